"""Model configurations: published parameter counts to the unit, FLOPs, and files that are not."""

import json
from pathlib import Path
from typing import Any

import pytest

from trnsim.cluster.models.config import ModelConfig, load_model, shipped_models
from trnsim.cluster.plans.plan import Plan
from trnsim.device.errors import BadFile, BadInput, Unsupported

PUBLISHED = {  # parameters of the model cards' safetensors on huggingface.co, by name
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
    "deepseek-moe-16b": 16_375_728_128,
    "deepseek-v3": 671_026_419_200,  # without multi-token prediction
    "bert-large": 335_174_458,  # BertForMaskedLM
}
OTHERS: dict[str, tuple[int, dict[str, Any]]] = {  # their config.json, defaults left out
    "gpt2": (
        124_439_808,
        {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257},
    ),
    "pythia-6.9b": (
        6_857_302_016,
        {
            "model_type": "gpt_neox",
            "hidden_size": 4096,
            "intermediate_size": 16384,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "vocab_size": 50432,
        },
    ),
    "mistral-7b": (
        7_241_732_096,
        {
            "model_type": "mistral",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
            "vocab_size": 32000,
        },
    ),
    "qwen2-7b": (
        7_615_616_512,
        {
            "model_type": "qwen2",
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_attention_heads": 28,
            "num_hidden_layers": 28,
            "num_key_value_heads": 4,
            "sliding_window": 131072,
            "use_sliding_window": False,
            "vocab_size": 152064,
        },
    ),
    "qwen3-8b": (
        8_190_735_360,
        {
            "model_type": "qwen3",
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_attention_heads": 32,
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
            "vocab_size": 151936,
        },
    ),
    "qwen1.5-moe-a2.7b": (
        14_315_784_192,
        {
            "model_type": "qwen2_moe",
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "moe_intermediate_size": 1408,
            "num_attention_heads": 16,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 24,
            "num_key_value_heads": 16,
            "shared_expert_intermediate_size": 5632,
            "vocab_size": 151936,
        },
    ),
    "qwen3-30b-a3b": (
        30_532_122_624,
        {
            "model_type": "qwen3_moe",
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_attention_heads": 32,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 48,
            "num_key_value_heads": 4,
            "norm_topk_prob": True,
            "vocab_size": 151936,
        },
    ),
}


def load(tmp_path: Path, raw: dict[str, Any]) -> ModelConfig:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(raw))
    return load_model(path)


@pytest.mark.parametrize("name", PUBLISHED)
def test_shipped_models_have_the_published_parameters(name: str) -> None:
    assert load_model(name).parameters == PUBLISHED[name]


@pytest.mark.parametrize("name", OTHERS)
def test_files_of_other_families_give_the_published_parameters(tmp_path: Path, name: str) -> None:
    parameters, raw = OTHERS[name]
    assert load(tmp_path, raw).parameters == parameters


@pytest.mark.parametrize(
    ("name", "billions"),
    [("gpt3-6.7b", 6.7), ("gpt3-23b", 23), ("gpt3-46b", 46), ("gpt3-175b", 175)],
)
def test_gpt3_has_about_the_parameters_of_its_name(name: str, billions: float) -> None:
    assert load_model(name).parameters == pytest.approx(billions * 1e9, rel=0.015)


def test_every_shipped_model_loads_and_says_where_it_is_from() -> None:
    for name in shipped_models():
        model = load_model(name)
        assert model.name == name and ("arXiv" in model.source or "aws-neuron" in model.source)
        assert eval(repr(model)) == model


def test_flops_of_a_token_are_those_of_megatron() -> None:
    """arXiv:2104.04473, equation 3 without recomputation: 72 s l h² (1 + s/6h + V/12lh)."""
    model, s = load_model("gpt3-175b"), 2048
    layers, h, vocab = model.layers, model.hidden, model.vocab
    assert model.flops_per_token(s) == 72 * layers * h**2 + 12 * layers * h * s + 6 * vocab * h
    hidden_pairs = 6 * layers * h * (s - 1)  # half of all pairs less the diagonal
    assert model.flops_per_token(s) - model.flops_per_token(s, masked=True) == hidden_pairs


def test_only_chosen_experts_work_on_a_token() -> None:
    """arXiv:2401.04088: 13B active of 47B; arXiv:2401.06066: 2.8B of 16.4B."""
    assert load_model("mixtral-8x7b").active_parameters == 12_879_925_248
    assert load_model("deepseek-moe-16b").active_parameters == 2_828_650_496


def test_masked_positions_count_only_where_there_is_a_mask() -> None:
    model = load_model("bert-large")
    assert model.flops_per_token(128, masked=True) == model.flops_per_token(128)


def test_bert_training_flops_by_hand() -> None:
    h = 1024
    matrices = 24 * 12 * h**2 + h**2 + 30522 * h
    assert load_model("bert-large").flops_per_token(128) == 6 * matrices + 12 * 24 * h * 128


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="model_type: qwen4 is not valid; .*; nearest valid: qwen3"):
        load(tmp_path, {"model_type": "qwen4"})


def test_an_unknown_name_has_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="^model: llama-3-8b .*; nearest valid: llama3-8b$"):
        load_model("llama-3-8b")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"n_head": None}, BadFile, "n_head is missing; it has to be a positive integer"),
        ({"n_head": "12"}, BadFile, "n_head is '12'; it has to be a positive integer"),
        ({"n_head": 0}, BadFile, "n_head is 0; it has to be a positive integer"),
        ({"model_type": None}, BadFile, "model_type is missing: not a Hugging Face config.json"),
        ({"activation_function": "mish"}, Unsupported, "activation_function mish is not modelled"),
        ({"model_type": ["gpt2"]}, BadInput, r"model_type: \['gpt2'\] is not valid; .*"),
        ({"n_inner": "4"}, BadFile, "n_inner is '4'; it has to be a number"),
        ({"n_inner": 4.5}, BadFile, "n_inner is 4.5; it has to be a number"),
        ({"layer_norm_epsilon": float("nan")}, BadFile, "layer_norm_epsilon is nan; .* a number"),
        ({"tie_word_embeddings": 1}, BadFile, "tie_word_embeddings is 1; .* true or false"),
        ({"n_head": 7}, BadInput, "attention heads: 7 is not valid; allowed: a divisor of .*"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, change: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=f"config.json: {message}$"):
        load(tmp_path, OTHERS["gpt2"][1] | change)


def test_a_feature_that_is_not_modelled_is_refused(tmp_path: Path) -> None:
    raw = OTHERS["qwen3-30b-a3b"][1] | {"decoder_sparse_step": 2}
    with pytest.raises(Unsupported, match="decoder_sparse_step 2 is not modelled, only 1$"):
        load(tmp_path, raw)


def test_a_file_that_is_no_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text("{")
    with pytest.raises(BadFile, match="model.json: not JSON"):
        load_model(path)
    path.write_text("[]")
    with pytest.raises(BadFile, match="model.json: a configuration is a JSON object$"):
        load_model(path)


def test_heads_have_to_divide(tmp_path: Path) -> None:
    raw = OTHERS["qwen2-7b"][1] | {"num_key_value_heads": 3}
    with pytest.raises(BadInput, match="kv_heads: 3 is not valid; allowed: a divisor of heads = 2"):
        load(tmp_path, raw)


@pytest.mark.parametrize(
    ("keys", "kind"),
    [
        ({}, ""),
        ({"rope_scaling": None}, ""),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "llama3"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, ""),
    ],
)
def test_scaling_of_positions_is_noted(tmp_path: Path, keys: dict[str, Any], kind: str) -> None:
    model = load(tmp_path, OTHERS["qwen2-7b"][1] | keys)
    assert model.rope_scaling == kind
    plan = Plan.of(model, instance="trn2.3xlarge", global_batch=4, seq=128)
    assert any(f"scaling ({kind})" in note for note in plan.notes) == bool(kind)
