"""Values against JAX on one device: gradients leaf by leaf, and losses of training steps."""

import importlib.util
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from trnsim.cluster.api import Simulated, Simulator, simulate

EXAMPLE = Path(__file__).parents[1] / "examples" / "gpt.py"
GRADIENT = {"f32": 1e-5, "bf16": 2e-2}  # relative L2 of each leaf
NOISE = {"f32": 2**-24, "bf16": 2**-8}  # of the whole gradient: rounding of a zero
LOSS = {"f32": 1e-5, "bf16": 1e-3}  # relative
DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}


def mesh_of(dp: int, tp: int) -> Mesh:
    return Mesh(np.array(jax.devices()[: dp * tp]).reshape(dp, tp), ("dp", "tp"))


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpt_example", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def norm(x: Any) -> float:
    return float(np.linalg.norm(np.asarray(x, np.float64)))


def distance(simulated: Any, reference: Any) -> float:
    """Relative L2 distance of two arrays."""
    want = np.asarray(reference, np.float64)
    return norm(np.asarray(simulated, np.float64) - want) / norm(want)


def assert_close_leaves(simulated: Any, reference: Any, dtype: str) -> None:
    """Each leaf on its own. A leaf that is zero in exact arithmetic (the bias of attention keys,
    which softmax does not see) holds rounding noise on both sides."""
    wants = jax.tree.leaves_with_path(reference)
    gots = jax.tree.leaves(simulated)
    assert len(wants) == len(gots)
    noise = NOISE[dtype] * float(np.sqrt(sum(norm(want) ** 2 for _, want in wants)))
    for (path, want), got in zip(wants, gots, strict=True):
        name = jax.tree_util.keystr(path)
        if norm(want) < noise:
            assert norm(got) < noise, name
        else:
            assert distance(got, want) <= GRADIENT[dtype], name


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("lnc", [1, 2])
def test_first_gradients_of_the_example(dtype: str, lnc: int) -> None:
    gpt = example()

    def gradient(mesh: Mesh) -> tuple[Any, tuple]:
        _, state, batches = gpt.training(mesh, dtype=dtype, context=32, batch=4)
        loss = partial(gpt.cross_entropy, layers=2, dtype=DTYPES[dtype])
        return jax.value_and_grad(loss), (state()["weights"], next(batches))

    one, arguments = gradient(mesh_of(1, 1))
    loss, reference = jax.jit(one)(*arguments)
    function, arguments = gradient(mesh_of(2, 2))
    result = simulate(function, *arguments, lnc=lnc)
    assert abs(float(result.outputs[0]) - float(loss)) <= LOSS[dtype] * abs(float(loss))
    assert_close_leaves(result.outputs[1], reference, dtype)


class Block(nnx.Module):
    """A pre-norm transformer block of flax's own parts, dropout off."""

    def __init__(self, width: int, dtype: Any, rngs: nnx.Rngs) -> None:
        self.norm1 = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads=4, in_features=width, dtype=dtype, decode=False, rngs=rngs
        )
        self.norm2 = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.down(jax.nn.gelu(self.up(self.norm2(x)), approximate=False))


class Transformer(nnx.Module):
    """Embedding, two blocks, and a head."""

    def __init__(self, width: int, vocabulary: int, dtype: Any, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(vocabulary, width, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([Block(width, dtype, rngs) for _ in range(2)])
        self.head = nnx.Linear(width, vocabulary, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x).astype(jnp.float32)


def flax_step(dtype: str) -> tuple[Any, Any, Any]:
    """(step, gradient, initial state): optax.adamw on the transformer."""
    model = Transformer(32, 64, DTYPES[dtype], nnx.Rngs(0))
    graph, weights = nnx.split(model)
    optimizer = optax.adamw(1e-3)

    def loss(weights: Any, tokens: jax.Array) -> jax.Array:
        scores = nnx.merge(graph, weights)(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(scores, tokens[:, 1:]).mean()

    gradient = jax.value_and_grad(loss)

    def step(state: Any, tokens: jax.Array) -> Any:
        weights, moments = state
        value, grads = gradient(weights, tokens)
        updates, moments = optimizer.update(grads, moments, weights)
        return (optax.apply_updates(weights, updates), moments), value

    return step, gradient, (weights, optimizer.init(weights))


def column_parallel(tree: Any, mesh: Mesh) -> Any:
    """Matrices split over tp along their last axis where that divides, the rest replicated."""

    def put(leaf: Any) -> Any:
        split = leaf.ndim == 2 and leaf.shape[-1] % mesh.shape["tp"] == 0
        return jax.device_put(leaf, NamedSharding(mesh, P(None, "tp") if split else P()))

    return jax.tree.map(put, tree)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_flax_transformer_with_adamw(dtype: str) -> None:
    step, gradient, state = flax_step(dtype)
    mesh = mesh_of(2, 2)
    tokens = np.random.default_rng(0).integers(0, 64, (5, 4, 17)).astype(np.int32)
    sharded, reference = column_parallel(state, mesh), state
    batches = [jax.device_put(batch, NamedSharding(mesh, P("dp"))) for batch in tokens]
    _, grads = jax.jit(gradient)(reference[0], tokens[0])
    result = simulate(gradient, sharded[0], batches[0])
    assert_close_leaves(result.outputs[1], grads, dtype)
    losses, expected, one = [], [], jax.jit(step)
    with Simulator(step, sharded, batches[0]) as simulated_step:
        for batch in tokens:
            sharded, loss = simulated_step(sharded, batch).outputs
            reference, value = one(reference, batch)
            losses.append(float(loss))
            expected.append(float(value))
    np.testing.assert_allclose(losses, expected, rtol=LOSS[dtype])


def test_scan_over_layers_and_an_embedding_with_its_gradient() -> None:
    mesh, rng = mesh_of(2, 2), np.random.default_rng(1)

    def put(x: np.ndarray, *axes: str | None) -> jax.Array:
        return jax.device_put(x, NamedSharding(mesh, P(*axes)))

    table = put(rng.standard_normal((50, 16)).astype(np.float32))
    layers = put(0.3 * rng.standard_normal((4, 16, 16)).astype(np.float32), None, None, "tp")
    tokens = put(rng.integers(0, 50, (4, 6)).astype(np.int32), "dp")

    def loss(table: jax.Array, layers: jax.Array, tokens: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(x @ w) + x, None

        x, _ = jax.lax.scan(layer, table[tokens], layers)
        return (x**2).mean()

    function = jax.value_and_grad(loss, (0, 1))
    value, gradients = jax.jit(function)(*(np.asarray(a) for a in (table, layers, tokens)))
    result: Simulated = simulate(function, table, layers, tokens)
    assert distance(result.outputs[0], value) <= 1e-6
    assert_close_leaves(result.outputs[1], gradients, "f32")
