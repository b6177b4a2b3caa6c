"""Ring attention on every rank: the values and gradients of attention over the whole sequence."""

import jax
import numpy as np
import pytest

from trnsim.cluster.frontends.attention import attention
from trnsim.cluster.mesh import Mesh
from trnsim.cluster.plans.program import Exchange
from trnsim.cluster.plans.ring_attention import positions, record_ring
from trnsim.cluster.plans.tape import Tape, cotangent
from trnsim.device.ops.ir import TensorType

from .plan_ranks import run_ranks, with_gradient

B, S, N, M, H = 2, 16, 4, 2, 8  # sequences, positions, heads, key-value heads, head width


def whole(seed: int = 0) -> list[np.ndarray]:
    """q, k, v and the cotangent of the result."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((B, S, n, H), np.float32) for n in (N, M, M, N)]


def recorded(cp: int, causal: bool) -> Tape:
    tape = Tape({"cp": cp})
    for name, n in (("q", N), ("k", M), ("v", M)):
        tape.give(name, TensorType((B, S // cp, n, H), "f32"), active=True)
    record_ring(tape, "q", "k", "v", "out", causal=causal)
    return tape


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_values_and_gradients_are_those_of_one_rank(cp: int, causal: bool) -> None:
    q, k, v, dout = whole()
    function = with_gradient(lambda *a: attention(*a, causal=causal)[0])
    out, found = jax.jit(function)(dout, q, k, v)
    gradients = dict(zip(("q", "k", "v"), found, strict=True))

    tape, mine = recorded(cp, causal), positions(S, cp, causal)
    given = {"q": q, "k": k, "v": v, cotangent("out"): dout}
    arrays = [
        {name: a[:, mine[rank]] for name, a in given.items()}
        | {"cp.index": np.array(rank, np.int32)}
        for rank in range(cp)
    ]
    forward = tape.forward()
    backward, _ = tape.backward("out")
    run_ranks([*forward, *backward], Mesh((("cp", cp),)), arrays)
    for rank in range(cp):
        np.testing.assert_allclose(arrays[rank]["out"], out[:, mine[rank]], atol=1e-5)
        for name, expected in gradients.items():
            part = arrays[rank][cotangent(name)]
            np.testing.assert_allclose(part, expected[:, mine[rank]], atol=2e-5, err_msg=name)


def test_positions_of_zigzag() -> None:
    assert positions(8, 2, causal=True).tolist() == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert positions(8, 2, causal=False).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert positions(4, 1, causal=True).tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize("cp", [2, 4])
def test_traffic_is_that_of_the_ring(cp: int) -> None:
    """Keys and values cp - 1 times forward and backward, their gradients cp times backward."""
    tape = recorded(cp, causal=True)
    forward = [s for s in tape.forward() if isinstance(s, Exchange)]
    backward = [s for s in tape.backward("out")[0] if isinstance(s, Exchange)]
    assert len(forward) == 2 * (cp - 1)
    assert len(backward) == 2 * (cp - 1) + 2 * cp
    assert {s.operation.name for s in forward + backward} == {"collective_permute"}


def test_keys_are_on_their_way_before_the_step_that_does_not_need_them() -> None:
    names = [type(step).__name__ for step in recorded(4, causal=True).forward()]
    assert names == ["Exchange", "Exchange", "Run"] * 3 + ["Run", "Run"]
