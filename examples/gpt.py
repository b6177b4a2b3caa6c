"""A byte-level GPT in plain JAX, trained data- and tensor-parallel.

    trnsim train examples/gpt.py --instance trn2.3xlarge --lnc 2 --mesh dp=2,tp=2 --steps 5

`trnsim train` calls `training(mesh, **options)`. It is ordinary JAX: weights are placed with
NamedShardings (column- and row-parallel over `tp`), batches are split over `dp`, and XLA finds the
collectives. A mesh without `dp` or `tp` works too. Options are set with `--set layers=4`.
"""

import math
from collections.abc import Iterator
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Tree = Any


def training(
    mesh: Mesh,
    text: str | None = None,
    layers: int = 2,
    width: int = 64,
    heads: int = 4,
    context: int = 64,
    batch: int = 8,
    dtype: str = "f32",
    rate: float = 3e-3,
):
    """The step, its initial state and its batches, for `trnsim train`.

    `text` is a file of any bytes (default: the README beside this folder); `batch` counts
    sequences over the whole mesh; `dtype` (f32 or bf16) is that of the layers' arithmetic: the
    weights and the optimizer stay f32.
    """
    check_divisible(mesh, batch=batch, heads=heads)
    compute = {"f32": jnp.float32, "bf16": jnp.bfloat16}[dtype]

    def state() -> Tree:
        weights = initial_weights(layers, width, heads, context)
        zeros = jax.tree.map(jnp.zeros_like, weights)
        return {
            "weights": place(weights, mesh),
            "mean": place(zeros, mesh),
            "square": place(zeros, mesh),
            "count": jax.device_put(np.float32(0), sharding(mesh)),
        }

    def step(state: Tree, batch: jax.Array) -> tuple[Tree, jax.Array]:
        loss, gradient = jax.value_and_grad(cross_entropy)(state["weights"], batch, layers, compute)
        return adam(state, gradient, rate), loss

    return step, state, batches(mesh, read_text(text), batch, context)


def sharding(mesh: Mesh, *axes: str | None) -> NamedSharding:
    """A sharding that leaves out the axes that the mesh does not have."""
    return NamedSharding(mesh, PartitionSpec(*(a if a in mesh.axis_names else None for a in axes)))


def check_divisible(mesh: Mesh, batch: int, heads: int) -> None:
    dp, tp = mesh.shape.get("dp", 1), mesh.shape.get("tp", 1)
    if batch % dp:
        raise ValueError(f"batch={batch} is not a multiple of dp={dp}; use --set batch={dp}")
    if heads % tp:
        raise ValueError(f"heads={heads} is not a multiple of tp={tp}; use --set heads={tp}")


# --- model -------------------------------------------------------------------------------------

SHARDED_AXIS = {  # of a weight, by the end of its name: the axis that is split over tp
    "query": 1, "key": 1, "value": 1, "project": 0, "up": 1, "up_bias": 0, "down": 0, "unembed": 1,
}  # fmt: skip


def weight_shapes(layers: int, width: int, heads: int, context: int) -> dict[str, tuple[int, ...]]:
    shapes = {"embed": (256, width), "position": (context, width)}
    for i in range(layers):
        shapes |= {
            f"{i}.norm1": (width,),
            f"{i}.query": (width, heads, width // heads),
            f"{i}.key": (width, heads, width // heads),
            f"{i}.value": (width, heads, width // heads),
            f"{i}.project": (heads, width // heads, width),
            f"{i}.norm2": (width,),
            f"{i}.up": (width, 4 * width),
            f"{i}.up_bias": (4 * width,),
            f"{i}.down": (4 * width, width),
            f"{i}.down_bias": (width,),
        }
    return shapes | {"norm": (width,), "unembed": (width, 256)}


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def initial_weights(layers: int, width: int, heads: int, context: int) -> dict[str, jax.Array]:
    """Ones for norms, zeros for biases, and parts of one normal draw (quicker to compile)."""
    shapes = weight_shapes(layers, width, heads, context)
    weights = {}
    sizes = [math.prod(shape) for shape in shapes.values()]
    draw = 0.02 * jax.random.normal(jax.random.key(0), (sum(sizes),))
    for (name, shape), start in zip(shapes.items(), accumulate(sizes, initial=0), strict=False):
        if "norm" in name:
            weights[name] = jnp.ones(shape)
        elif "bias" in name:
            weights[name] = jnp.zeros(shape)
        else:
            weights[name] = draw[start : start + math.prod(shape)].reshape(shape)
    return weights


def place(weights: dict[str, jax.Array], mesh: Mesh) -> dict[str, jax.Array]:
    def axes(name: str, rank: int) -> list[str | None]:
        split = SHARDED_AXIS.get(name.rpartition(".")[2])
        return ["tp" if axis == split else None for axis in range(rank)]

    return {
        name: jax.device_put(w, sharding(mesh, *axes(name, w.ndim))) for name, w in weights.items()
    }


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Layer normalisation, computed in f32."""
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(-1, keepdims=True)
    variance = (centred * centred).mean(-1, keepdims=True)
    return (centred * jax.lax.rsqrt(variance + 1e-5)).astype(x.dtype) * scale


def attention(x: jax.Array, w: Tree) -> jax.Array:
    """Causal self-attention: x is [batch, time, width]."""
    query = jnp.einsum("btw,whd->bhtd", x, w["query"])
    key = jnp.einsum("btw,whd->bhtd", x, w["key"])
    value = jnp.einsum("btw,whd->bhtd", x, w["value"])
    scores = jnp.einsum("bhtd,bhsd->bhts", query, key) / np.sqrt(query.shape[-1])
    time = x.shape[1]
    past = jnp.tril(jnp.ones((time, time), bool))
    weights = jax.nn.softmax(jnp.where(past, scores, -1e9).astype(jnp.float32)).astype(x.dtype)
    mixed = jnp.einsum("bhts,bhsd->bhtd", weights, value)
    return jnp.einsum("bhtd,hdw->btw", mixed, w["project"])


def feed_forward(x: jax.Array, w: Tree) -> jax.Array:
    hidden = jax.nn.gelu(x @ w["up"] + w["up_bias"], approximate=False)
    return hidden @ w["down"] + w["down_bias"]


def logits(weights: Tree, tokens: jax.Array, layers: int, dtype: Any) -> jax.Array:
    """f32 [batch, time, 256] from tokens [batch, time]."""
    weights = {name: w.astype(dtype) for name, w in weights.items()}
    x = weights["embed"][tokens] + weights["position"][: tokens.shape[1]]
    for i in range(layers):
        w = {name.partition(".")[2]: v for name, v in weights.items() if name.startswith(f"{i}.")}
        x = x + attention(norm(x, w["norm1"]), w)
        x = x + feed_forward(norm(x, w["norm2"]), w)
    return (norm(x, weights["norm"]) @ weights["unembed"]).astype(jnp.float32)


def cross_entropy(weights: Tree, batch: jax.Array, layers: int, dtype: Any) -> jax.Array:
    """Mean negative log-likelihood of each byte given those before it: batch is [n, context+1]."""
    inputs, targets = batch[:, :-1], batch[:, 1:]
    log_p = jax.nn.log_softmax(logits(weights, inputs, layers, dtype))
    return -jnp.take_along_axis(log_p, targets[..., None], axis=-1).mean()


def adam(state: Tree, gradient: Tree, rate: float, b1: float = 0.9, b2: float = 0.99) -> Tree:
    count = state["count"] + 1
    mean = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state["mean"], gradient)
    square = jax.tree.map(lambda s, g: b2 * s + (1 - b2) * g * g, state["square"], gradient)

    def update(w: jax.Array, m: jax.Array, s: jax.Array) -> jax.Array:
        return w - rate * (m / (1 - b1**count)) / (jnp.sqrt(s / (1 - b2**count)) + 1e-8)

    weights = jax.tree.map(update, state["weights"], mean, square)
    return {"weights": weights, "mean": mean, "square": square, "count": count}


# --- data --------------------------------------------------------------------------------------


def read_text(path: str | None) -> np.ndarray:
    """The bytes of a file; without one, of the README, or of this program."""
    readme = Path(__file__).parents[1] / "README.md"
    default = readme if readme.exists() else Path(__file__)
    return np.frombuffer(Path(path or default).read_bytes(), np.uint8)


def batches(mesh: Mesh, text: np.ndarray, batch: int, context: int) -> Iterator[jax.Array]:
    """Endless batches int32 [batch, context + 1] of random windows, the same in every run."""
    if len(text) <= context:
        raise ValueError(f"the text has {len(text)} bytes; context={context} needs one more")
    rng = np.random.default_rng(1)
    while True:
        starts = rng.integers(0, len(text) - context, batch)
        windows = np.stack([text[s : s + context + 1] for s in starts]).astype(np.int32)
        yield jax.device_put(windows, sharding(mesh, "dp", None))
