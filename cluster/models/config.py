"""What a transformer is made of, from its `config.json`, and what follows: parameters, FLOPs."""

import json
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from trnsim.device.errors import BadFile, BadInput

from .huggingface import read_config

Activation = Literal["gelu", "relu", "swiglu"]
Norm = Literal["layer", "rms"]
Positions = Literal["learned", "rope", "none"]
Router = Literal["softmax", "sigmoid"]


@dataclass(frozen=True)
class Weights:
    """How many elements: in matrices that a token is multiplied with, and in the rest."""

    matrices: int = 0
    vectors: int = 0

    def __add__(self, other: "Weights") -> "Weights":
        return Weights(self.matrices + other.matrices, self.vectors + other.vectors)

    def __mul__(self, count: int) -> "Weights":
        return Weights(self.matrices * count, self.vectors * count)

    @property
    def total(self) -> int:
        return self.matrices + self.vectors


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A transformer. Widths are in elements; `family` is the `model_type` of Hugging Face.

    `ffn` is the width of dense feed-forward layers, `expert_ffn` that of each routed expert and
    `shared_ffn` that of all shared experts together. The first `dense_layers` layers of a mixture
    of experts have none. `kv_rank` > 0 is multi-head latent attention (DeepSeek-V2,
    arXiv:2405.04434): queries and keys of `head_dim`, of which `rope_dim` are rotated, and values
    of `value_dim`, all from compressed vectors of `q_rank` (0: not compressed) and `kv_rank`.
    """

    name: str
    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    activation: Activation
    norm: Norm
    positions: Positions
    max_positions: int
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: str = ""  # what the configuration scales positions by; not modelled
    rope_fraction: float = 1.0  # of head_dim that is rotated
    causal: bool = True
    tied: bool = False  # the output matrix is that of the embedding
    qkv_bias: bool = False
    linear_bias: bool = False  # of the attention's output and the feed-forward matrices
    qk_norm: bool = False  # RMS norm of each head of queries and keys
    post_norm: bool = False  # norms after the residual sum (BERT), and after the embedding
    parallel_residual: bool = False  # attention and feed-forward read the same input (GPT-NeoX)
    window: int = 0  # sliding window of attention; 0: none
    type_vocab: int = 0
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    shared_gate: bool = False  # the shared expert is scaled by a sigmoid of its own
    dense_layers: int = 0
    router: Router = "softmax"
    normalized_top_k: bool = True  # the weights of the chosen experts sum to 1
    router_scale: float = 1.0
    expert_groups: int = 1
    top_groups: int = 1  # of `expert_groups`, from which experts may be chosen
    q_rank: int = 0
    kv_rank: int = 0
    rope_dim: int = 0
    value_dim: int = 0
    source: str = ""

    def __post_init__(self) -> None:
        for field in ("layers", "hidden", "heads", "kv_heads", "head_dim", "vocab"):
            if getattr(self, field) < 1:
                raise BadInput(f"{self.name}: {field}", getattr(self, field), "1 or more", 1)
        if self.heads % self.kv_heads:
            allowed = f"a divisor of heads = {self.heads}"
            raise BadInput(f"{self.name}: kv_heads", self.kv_heads, allowed)
        if self.experts and not 1 <= self.top_k <= self.experts:
            raise BadInput(f"{self.name}: top_k", self.top_k, f"1 to {self.experts} experts")

    @property
    def value_head_dim(self) -> int:
        """Width of a head's values."""
        return self.value_dim or self.head_dim

    @property
    def norm_weights(self) -> int:
        """Parameters of one norm over `hidden`."""
        return self.hidden * (2 if self.norm == "layer" else 1)

    @property
    def attention_weights(self) -> Weights:
        """Of one layer, without its norm."""
        out = Weights(self.heads * self.value_head_dim * self.hidden)
        if self.kv_rank:
            return out + self._latent_weights()
        rows = (self.heads + 2 * self.kv_heads) * self.head_dim
        biases = rows * self.qkv_bias + self.hidden * self.linear_bias
        scales = 2 * self.head_dim * self.qk_norm
        return out + Weights(self.hidden * rows, biases + scales)

    def _latent_weights(self) -> Weights:
        queries = self.heads * self.head_dim
        q = Weights(self.hidden * queries)
        if self.q_rank:
            q = Weights(self.q_rank * (self.hidden + queries), self.q_rank)
        expanded = self.heads * (self.head_dim - self.rope_dim + self.value_dim)
        down = self.hidden * (self.kv_rank + self.rope_dim)
        return q + Weights(down + self.kv_rank * expanded, self.kv_rank)

    def feed_forward_weights(self, width: int) -> Weights:
        """Of a feed-forward block or an expert of this width."""
        inner = 2 if self.activation == "swiglu" else 1
        biases = (inner * width + self.hidden) * self.linear_bias
        return Weights((inner + 1) * self.hidden * width, biases if width else 0)

    @property
    def router_weights(self) -> Weights:
        """Of one layer: scores of experts, their correction (sigmoid), the shared expert's gate."""
        corrections = self.experts * (self.router == "sigmoid")
        return Weights(self.hidden * (self.experts + self.shared_gate), corrections)

    @property
    def expert_layers(self) -> int:
        """Layers with routed experts."""
        return self.layers - self.dense_layers if self.experts else 0

    def layer_weights(self, layer: int, *, active: bool = False) -> Weights:
        """Of layer `layer`; `active`: only those that work on one token."""
        rest = self.attention_weights + Weights(0, 2 * self.norm_weights)
        if not self.has_experts(layer):
            return rest + self.feed_forward_weights(self.ffn)
        shared = self.router_weights + self.feed_forward_weights(self.shared_ffn)
        routed = self.feed_forward_weights(self.expert_ffn)
        return rest + shared + routed * (self.top_k if active else self.experts)

    def has_experts(self, layer: int) -> bool:
        """Whether layer `layer` is a mixture of experts."""
        return self.experts > 0 and layer >= self.dense_layers

    @property
    def embedding_weights(self) -> int:
        """Tokens, learned positions, segments, and the norm after them."""
        learned = self.max_positions if self.positions == "learned" else 0
        rows = self.vocab + learned + self.type_vocab
        return rows * self.hidden + self.norm_weights * self.post_norm

    @property
    def head_weights(self) -> Weights:
        """After the layers. A tied output matrix works on each token and is no parameter here.

        BERT has a transform with norm before the output and a bias after it.
        """
        output = Weights(0 if self.tied else self.vocab * self.hidden)
        if not self.post_norm:
            return output + Weights(0, self.norm_weights)
        transform = Weights(self.hidden**2, self.hidden + self.norm_weights + self.vocab)
        return output + transform

    @cached_property
    def parameters(self) -> int:
        """All parameters of training the language model (next or masked token)."""
        return self.embedding_weights + self.head_weights.total + self._layers_of("total")

    @cached_property
    def active_parameters(self) -> int:
        """Those that work on one token, embedding included."""
        layers = self._layers_of("total", active=True)
        return self.embedding_weights + self.head_weights.total + layers

    def _layers_of(self, part: str, *, active: bool = False) -> int:
        kinds = ((0, self.layers - self.expert_layers), (self.layers - 1, self.expert_layers))
        return sum(
            getattr(self.layer_weights(layer, active=active), part) * n for layer, n in kinds
        )

    def flops_per_token(self, seq: int, *, masked: bool = False) -> int:
        """Forward and backward FLOPs of the model for one token of a sequence of `seq`.

        6 for each weight that the token is multiplied with, output matrix included and embedding
        lookup excluded, and 6 · seq · heads · (query width + value width) in each layer for
        attention: PaLM, arXiv:2204.02311, appendix B, and Megatron-LM, arXiv:2104.04473, equation
        3 without recomputation. Both count all pairs of positions; `masked` leaves out those that
        the causal mask hides.
        """
        output = self.vocab * self.hidden if self.tied else 0
        weights = self._layers_of("matrices", active=True) + self.head_weights.matrices + output
        widths = self.layers * self.heads * (self.head_dim + self.value_head_dim)
        halves = seq + 1 if masked and self.causal else 2 * seq
        return 6 * weights + 3 * widths * halves


def load_model(name_or_path: str | Path) -> ModelConfig:
    """A shipped model by its name, or the model of a `config.json` (or of the folder with it).

    Raises BadInput for a name that is neither or an architecture that is not known, BadFile for a
    file that is not such a configuration.
    """
    name = str(name_or_path).lower()
    if name in shipped_models():
        text = (_shipped() / f"{name}.json").read_text()
        return ModelConfig(name=name, **read_config(json.loads(text), f"{name}.json"))
    path = Path(name_or_path)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise BadInput("model", name_or_path, [*shipped_models(), "the path of a config.json"])
    name = path.parent.resolve().name if path.name == "config.json" else path.stem
    return ModelConfig(name=name, **read_config(_read_json(path), str(path)))


def shipped_models() -> tuple[str, ...]:
    """Names of the models that come with trnsim."""
    files = (item.name for item in _shipped().iterdir())
    return tuple(sorted(file.removesuffix(".json") for file in files if file.endswith(".json")))


def _shipped() -> Any:
    return resources.files("trnsim.cluster.models") / "shipped"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise BadFile(f"{path}: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise BadFile(f"{path}: a configuration is a JSON object")
    return found
