"""Hugging Face `config.json` to the fields of `ModelConfig`, one function per family.

Keys and their defaults are those of the `configuration_*.py` files of huggingface/transformers.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from trnsim.device.errors import BadFile, BadInput, Unsupported


class Keys:
    """A configuration with errors that name the file and the key."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw, self.where = raw, where

    def need(self, key: str) -> int:
        """A key without a default. Raises BadFile if it is missing or no positive integer."""
        value = self.raw.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            found = "is missing" if value is None else f"is {value!r}"
            raise BadFile(f"{self.where}: {key} {found}; it has to be a positive integer")
        return value

    def get(self, key: str, default: Any) -> Any:
        """A key with a default, which also stands for null.

        Raises BadFile unless the value is of the default's type; whole numbers are also fractions.
        """
        value = self.raw.get(key)
        if value is None:
            return default
        if isinstance(default, int | float) and not isinstance(default, bool):
            whole = isinstance(default, int) and not isinstance(value, int)
            if not _is_number(value) or (whole and value != int(value)):
                raise BadFile(f"{self.where}: {key} is {value!r}; it has to be a number")
        elif not isinstance(value, type(default)):
            raise BadFile(f"{self.where}: {key} is {value!r}; it has to be {_KINDS[type(default)]}")
        return value

    def activation(self, key: str, default: str) -> str:
        """gelu, relu or silu. Raises Unsupported for another."""
        name = self.get(key, default)
        if name not in _ACTIVATIONS:
            raise Unsupported(f"{self.where}: {key} {name} is not modelled")
        return _ACTIVATIONS[name]

    def refuse(self, key: str, allowed: Any) -> None:
        """Raises Unsupported if the key is there with another value than `allowed`."""
        value = self.get(key, allowed)
        if value != allowed:
            raise Unsupported(f"{self.where}: {key} {value} is not modelled, only {allowed}")


_KINDS = {bool: "true or false", str: "text", list: "a list", dict: "a table"}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu",
    "gelu_fast": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "relu": "relu",
    "silu": "silu",
}


def read_config(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields of ModelConfig, without its name, of a configuration.

    Raises BadInput for an architecture that is not known, BadFile for a key that is missing, and
    Unsupported for a feature that is not modelled.
    """
    kind = raw.get("model_type")
    if kind is None:
        raise BadFile(f"{where}: model_type is missing: not a Hugging Face config.json")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise BadInput(f"{where}: model_type", kind, FAMILIES)
    source = str(raw.get("_source", where))
    fields = FAMILIES[kind](Keys(raw, where))
    if not fields["head_dim"]:
        heads, hidden = fields["heads"], fields["hidden"]
        allowed = f"a divisor of the hidden size {hidden}, or a head_dim beside it"
        raise BadInput(f"{where}: attention heads", heads, allowed)
    return {"family": kind, "source": source} | fields


def _gpt2(keys: Keys) -> dict[str, Any]:
    hidden, heads = keys.need("n_embd"), keys.need("n_head")
    return {
        "layers": keys.need("n_layer"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": 0 if hidden % heads else hidden // heads,
        "ffn": keys.get("n_inner", 4 * hidden),
        "vocab": keys.need("vocab_size"),
        "activation": keys.activation("activation_function", "gelu_new"),
        "norm": "layer",
        "norm_eps": keys.get("layer_norm_epsilon", 1e-5),
        "positions": "learned",
        "max_positions": keys.get("n_positions", 1024),
        "tied": keys.get("tie_word_embeddings", True),
        "qkv_bias": True,
        "linear_bias": True,
    }


def _common(keys: Keys) -> dict[str, Any]:
    """What all families but GPT-2 name alike."""
    hidden, heads = keys.need("hidden_size"), keys.need("num_attention_heads")
    return {
        "layers": keys.need("num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": 0 if hidden % heads else hidden // heads,
        "ffn": keys.need("intermediate_size"),
        "vocab": keys.need("vocab_size"),
    }


def _neox(keys: Keys) -> dict[str, Any]:
    bias = keys.get("attention_bias", True)
    keys.refuse("attention_bias", True)
    return _common(keys) | {
        "activation": keys.activation("hidden_act", "gelu"),
        "norm": "layer",
        "norm_eps": keys.get("layer_norm_eps", 1e-5),
        "positions": "rope",
        "max_positions": keys.get("max_position_embeddings", 2048),
        "rope_theta": float(keys.get("rope_theta", keys.get("rotary_emb_base", 10000))),
        "rope_fraction": keys.get("rotary_pct", 0.25),
        "parallel_residual": keys.get("use_parallel_residual", True),
        "tied": keys.get("tie_word_embeddings", False),
        "qkv_bias": bias,
        "linear_bias": bias,
    }


def _bert(keys: Keys) -> dict[str, Any]:
    keys.refuse("position_embedding_type", "absolute")
    return _common(keys) | {
        "activation": keys.activation("hidden_act", "gelu"),
        "norm": "layer",
        "norm_eps": keys.get("layer_norm_eps", 1e-12),
        "positions": "learned",
        "max_positions": keys.get("max_position_embeddings", 512),
        "type_vocab": keys.get("type_vocab_size", 2),
        "causal": False,
        "tied": keys.get("tie_word_embeddings", True),
        "post_norm": True,
        "qkv_bias": True,
        "linear_bias": True,
    }


def _llama(keys: Keys) -> dict[str, Any]:
    if keys.activation("hidden_act", "silu") != "silu":
        raise Unsupported(f"{keys.where}: hidden_act {keys.raw['hidden_act']} is not modelled")
    fields = _common(keys)
    bias = keys.get("attention_bias", False)
    keys.refuse("mlp_bias", bias)
    return fields | {
        "kv_heads": keys.get("num_key_value_heads", fields["heads"]),
        "head_dim": keys.get("head_dim", fields["head_dim"]),
        "activation": "swiglu",
        "norm": "rms",
        "norm_eps": keys.get("rms_norm_eps", 1e-6),
        "positions": "rope",
        "max_positions": keys.get("max_position_embeddings", 2048),
        "rope_theta": float(_rope_theta(keys)),
        "rope_scaling": _rope_scaling(keys),
        "tied": keys.get("tie_word_embeddings", False),
        "qkv_bias": bias,
        "linear_bias": bias,
    }


def _rope_theta(keys: Keys) -> float:
    """Newer files keep it in `rope_parameters`."""
    parameters = keys.get("rope_parameters", {})
    return keys.get("rope_theta", parameters.get("rope_theta", 10000.0))


def _rope_scaling(keys: Keys) -> str:
    """The kind of scaling of positions (llama3, yarn, linear, ...), if there is any."""
    scaling = keys.get("rope_scaling", {}) or keys.get("rope_parameters", {})
    kind = Keys(scaling, keys.where).get("rope_type", "") or scaling.get("type", "")
    return "" if kind == "default" else str(kind)


def _mistral(keys: Keys) -> dict[str, Any]:
    window = {"window": keys.get("sliding_window", 0)}
    return _llama(keys) | window | {"kv_heads": keys.get("num_key_value_heads", 8)}


def _qwen2(keys: Keys) -> dict[str, Any]:
    window = keys.get("sliding_window", 0) if keys.get("use_sliding_window", False) else 0
    return _llama(keys) | {"qkv_bias": True, "window": window}


def _qwen3(keys: Keys) -> dict[str, Any]:
    head_dim = keys.get("head_dim", 128)
    return _qwen2(keys) | {"qkv_bias": False, "qk_norm": True, "head_dim": head_dim}


def _mixtral(keys: Keys) -> dict[str, Any]:
    fields = _mistral(keys)
    return fields | {
        "experts": keys.get("num_local_experts", 8),
        "top_k": keys.get("num_experts_per_tok", 2),
        "expert_ffn": fields["ffn"],
    }


def _qwen_experts(keys: Keys, experts: int) -> dict[str, Any]:
    keys.refuse("decoder_sparse_step", 1)
    keys.refuse("mlp_only_layers", [])
    return {
        "experts": keys.get("num_experts", experts),
        "top_k": keys.need("num_experts_per_tok"),
        "expert_ffn": keys.need("moe_intermediate_size"),
        "normalized_top_k": keys.get("norm_topk_prob", False),
    }


def _qwen2_moe(keys: Keys) -> dict[str, Any]:
    shared = {"shared_ffn": keys.need("shared_expert_intermediate_size"), "shared_gate": True}
    return _qwen2(keys) | _qwen_experts(keys, 60) | shared


def _qwen3_moe(keys: Keys) -> dict[str, Any]:
    return _qwen3(keys) | _qwen_experts(keys, 128)


def _deepseek(keys: Keys) -> dict[str, Any]:
    """DeepSeekMoE, arXiv:2401.06066, with ordinary attention."""
    keys.refuse("moe_layer_freq", 1)
    width = keys.need("moe_intermediate_size")
    return _llama(keys) | {
        "experts": keys.need("n_routed_experts"),
        "top_k": keys.need("num_experts_per_tok"),
        "expert_ffn": width,
        "shared_ffn": width * keys.get("n_shared_experts", 0),
        "dense_layers": keys.get("first_k_dense_replace", 0),
        "router": keys.get("scoring_func", "softmax"),
        "normalized_top_k": keys.get("norm_topk_prob", False),
        "router_scale": float(keys.get("routed_scaling_factor", 1.0)),
        "expert_groups": keys.get("n_group", 1),
        "top_groups": keys.get("topk_group", 1),
    }


def _deepseek_latent(keys: Keys) -> dict[str, Any]:
    """DeepSeek-V2, arXiv:2405.04434: multi-head latent attention."""
    rope = keys.need("qk_rope_head_dim")
    fields = _deepseek(keys)
    return fields | {
        "kv_heads": fields["heads"],
        "head_dim": keys.need("qk_nope_head_dim") + rope,
        "q_rank": keys.get("q_lora_rank", 0),
        "kv_rank": keys.need("kv_lora_rank"),
        "rope_dim": rope,
        "value_dim": keys.need("v_head_dim"),
    }


def _deepseek_v3(keys: Keys) -> dict[str, Any]:
    """DeepSeek-V3, arXiv:2412.19437, without its module that predicts several tokens."""
    defaults = {"scoring_func": "sigmoid", "norm_topk_prob": True}
    return _deepseek_latent(Keys(defaults | dict(keys.raw), keys.where))


FAMILIES: dict[str, Callable[[Keys], dict[str, Any]]] = {
    "gpt2": _gpt2,
    "gpt_neox": _neox,
    "bert": _bert,
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "deepseek": _deepseek,
    "deepseek_v2": _deepseek_latent,
    "deepseek_v3": _deepseek_v3,
}
