"""Experts over ep and tp: values and gradients of a dense mixture, capacity, and traffic."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trnsim.cluster.models.config import ModelConfig, load_model
from trnsim.cluster.plans.experts import (
    BLOCK,
    earlier,
    record_experts,
    route,
    slots_of_expert,
)
from trnsim.cluster.plans.plan import Plan
from trnsim.cluster.plans.program import Exchange
from trnsim.cluster.plans.tape import Gradient, Tape, cotangent
from trnsim.device.ops.ir import TensorType

from .plan_ranks import run_ranks, with_gradient

B, S, D, F, E, K = 2, 8, 16, 12, 8, 2  # sequences of a rank, positions, widths, experts

SOFTMAX = replace(
    load_model("mixtral-8x7b"), hidden=D, ffn=F, expert_ffn=F, heads=4, kv_heads=2, layers=2
)
SIGMOID = replace(
    SOFTMAX, router="sigmoid", router_scale=2.5, expert_groups=4, top_groups=2, activation="gelu"
)


def plan(model: ModelConfig, mesh: str, capacity: float = E / K) -> Plan:
    fields: dict[str, Any] = {"global_batch": 8 * B, "microbatch": B, "seq": S, "dtype": "f32"}
    return Plan.of(model, instance="trn2.48xlarge", mesh=mesh, capacity=capacity, **fields)


def weights(model: ModelConfig) -> dict[str, np.ndarray]:
    """The whole arrays of a layer."""
    rng = np.random.default_rng(1)
    gate = (2,) if model.activation == "swiglu" else ()
    shapes = {"router": (D, E), "expert_in": (E, D, *gate, F), "expert_out": (E, F, D)}
    if model.router == "sigmoid":
        shapes["router_bias"] = (E,)
    return {name: rng.standard_normal(shape, np.float32) / 4 for name, shape in shapes.items()}


def dense(model: ModelConfig) -> Callable[..., jax.Array]:
    """Every expert on every token, in plain JAX."""

    def dense(x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
        flat = x.reshape(-1, D)
        logits = flat @ w["router"]
        if model.router == "sigmoid":
            scores = jax.nn.sigmoid(logits)
            ranked = scores + w["router_bias"]
            groups = ranked.reshape(-1, model.expert_groups, E // model.expert_groups)
            best = jnp.sort(groups, -1)[..., -2:].sum(-1)
            low = jnp.sort(best, -1)[:, -model.top_groups][:, None]
            ranked = jnp.where((best >= low)[..., None], groups, -jnp.inf).reshape(-1, E)
        else:
            ranked = scores = jax.nn.softmax(logits)
        chosen = ranked >= jnp.sort(ranked, -1)[:, -K][:, None]
        share = jnp.where(chosen, scores, 0)
        share = model.router_scale * share / share.sum(-1, keepdims=True)
        if model.activation == "swiglu":
            made = jnp.einsum("td,edcf->cetf", flat, w["expert_in"])
            made = jax.nn.silu(made[0]) * made[1]
        else:
            made = jax.nn.gelu(jnp.einsum("td,edf->etf", flat, w["expert_in"]))
        found = jnp.einsum("etf,efd,te->td", made, w["expert_out"], share)
        return found.reshape(x.shape)

    return dense


def recorded(found: Plan, whole: dict[str, np.ndarray]) -> Tape:
    tape = Tape({"ep": found.ep, "tp": found.tp})
    tape.give("x", TensorType((B, S // found.tp, D), "f32"), active=True)
    for name, array in whole.items():
        shape = list(array.shape)
        if name in ("expert_in", "expert_out"):
            shape[0] //= found.ep
            shape[-1 if name == "expert_in" else 1] //= found.tp
        kind = TensorType(tuple(shape), "f32")
        if name == "router_bias":
            tape.give(name, kind)
        else:
            tape.parameter(name, kind, Gradient(cotangent(name), kind, sums=False))
    record_experts(tape, found, "x", {name: name for name in whole}, "y")
    return tape


def cut(name: str, array: np.ndarray, found: Plan, rank: int) -> np.ndarray:
    """A rank's part of a weight."""
    if not name.startswith("expert"):
        return array
    at = found.mesh.coordinates(rank)
    own = np.split(array, found.ep, 0)[at["ep"]]
    return np.split(own, found.tp, -1 if name == "expert_in" else 1)[at["tp"]]


def tokens_of(array: np.ndarray, found: Plan, rank: int) -> np.ndarray:
    """A rank's sequences, and its part of them."""
    at = found.mesh.coordinates(rank)
    own = np.split(array, found.ep, 0)[at["ep"]]
    return np.split(own, found.tp, 1)[at["tp"]]


@pytest.mark.parametrize(
    ("model", "mesh"),
    [(SOFTMAX, "dp=1,ep=4,tp=2"), (SIGMOID, "dp=1,tp=2,ep=2"), (SOFTMAX, "dp=1,ep=1,tp=1")],
    ids=["ep4tp2", "sigmoid", "alone"],
)
def test_values_and_gradients_are_those_of_a_dense_mixture(model: ModelConfig, mesh: str) -> None:
    found, whole = plan(model, mesh), weights(model)
    rng = np.random.default_rng(0)
    x, dy = (rng.standard_normal((found.ep * B, S, D), np.float32) for _ in range(2))
    y, (dx, gradients) = jax.jit(with_gradient(dense(model)))(dy, x, whole)

    tape = recorded(found, whole)
    arrays = [
        {"x": tokens_of(x, found, r), cotangent("y"): tokens_of(dy, found, r)}
        | {name: cut(name, array, found, r) for name, array in whole.items()}
        for r in range(found.machine.ranks)
    ]
    forward = tape.forward()
    backward, _ = tape.backward("y")
    run_ranks([*forward, *backward], found.mesh, arrays)
    for rank, own in enumerate(arrays):
        np.testing.assert_allclose(own["y"], tokens_of(y, found, rank), atol=1e-4)
        np.testing.assert_allclose(own[cotangent("x")], tokens_of(dx, found, rank), atol=1e-4)
        for name in ("expert_in", "expert_out"):
            expected = cut(name, gradients[name], found, rank)
            np.testing.assert_allclose(own[cotangent(name)], expected, atol=1e-4, err_msg=name)
    router = sum(own[cotangent("router")] for own in arrays)
    np.testing.assert_allclose(router, gradients["router"], atol=1e-4)


def test_a_full_expert_leaves_later_tokens_out() -> None:
    model = replace(SOFTMAX, top_k=1)
    router = np.zeros((D, E), np.float32)
    router[0, 3] = 1.0
    x = np.ones((1, 5, D), np.float32)
    x[0, 1, 0] = -1.0  # an expert of its own: the first of those that are alike
    chosen, slots, tokens = map(np.asarray, jax.jit(route(model, 3))(x, router))
    assert slots[:, 0].tolist() == [9, 0, 10, 11, 24]  # expert 3 has slots 9 to 11
    assert tokens.tolist() == [1, *[5] * 8, 0, 2, 3, *[5] * 12]
    np.testing.assert_allclose(chosen, 1.0)


@pytest.mark.parametrize("count", [5, 2 * BLOCK, 3 * BLOCK])
def test_earlier_tokens_are_counted_exactly(count: int) -> None:
    taken = np.random.default_rng(0).integers(0, 2, (count, 4)).astype(np.float32)
    taken[:, 0] = 1
    expected = np.cumsum(taken, 0) - taken
    np.testing.assert_array_equal(jax.jit(earlier)(taken), expected)


def test_room_of_an_expert() -> None:
    """capacity · tokens · k / experts, rounded up; never more than the tokens there are."""
    assert slots_of_expert(plan(SOFTMAX, "dp=1,tp=2", capacity=1.1)) == 3  # 1.1 x 8 x 2 / 8 = 2.2
    assert slots_of_expert(plan(SOFTMAX, "dp=1,tp=2", capacity=2.0)) == 4
    assert slots_of_expert(plan(SOFTMAX, "dp=1,tp=2", capacity=100.0)) == 8


def test_bytes_of_the_all_to_all() -> None:
    """Forward and backward each send the buffers there and back: experts · room · hidden."""
    found = plan(SOFTMAX, "dp=1,ep=4,tp=2", capacity=2.0)
    tape = recorded(found, weights(SOFTMAX))
    steps = [*tape.forward(), *tape.backward("y")[0]]
    sent = [s for s in steps if isinstance(s, Exchange) and s.operation.name == "all_to_all"]
    assert len(sent) == 4
    assert {tape.types[s.reads[0].name].size for s in sent} == {E * slots_of_expert(found) * D}
    assert {s.axes for s in sent} == {("ep",)}
