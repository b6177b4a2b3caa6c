"""Uneven load of experts: how it is drawn, and what it does to the time of a step."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trnsim.cluster.models.config import load_model
from trnsim.cluster.plans.clocks import Conditions
from trnsim.cluster.plans.expert_load import expert_load, shares
from trnsim.cluster.plans.plan import Plan
from trnsim.cluster.plans.result import PlanResult, price_plan
from trnsim.device.errors import BadInput

MODEL = replace(load_model("mixtral-8x7b"), layers=2, hidden=256, ffn=512, expert_ffn=512)


def plan(mesh: str = "dp=1,ep=4,tp=2", **changes: Any) -> Plan:
    fields: dict[str, Any] = {"global_batch": 8, "seq": 256} | changes
    model = replace(MODEL, vocab=512, heads=4, kv_heads=2, head_dim=64)
    return Plan.of(model, instance="trn2.48xlarge", mesh=mesh, **fields)


def priced(found: Plan, imbalance: float | None, seed: int = 0) -> PlanResult:
    return price_plan(found, conditions=Conditions(imbalance=imbalance, seed=seed))


@given(st.integers(2, 64), st.floats(0.01, 0.9), st.integers(0, 99))
def test_shares_are_all_of_the_assignments(count: int, imbalance: float, seed: int) -> None:
    found = shares(count, imbalance, seed)
    assert found.shape == (count,) and (found >= 0).all()
    assert found.sum() == pytest.approx(1.0)
    np.testing.assert_array_equal(found, shares(count, imbalance, seed))


@pytest.mark.parametrize("imbalance", [0.1, 0.5, 1.0])
def test_shares_have_the_variation_that_was_asked_for(imbalance: float) -> None:
    drawn = np.stack([shares(16, imbalance, seed) for seed in range(2000)]) * 16
    assert np.sqrt(np.mean((drawn - 1) ** 2)) == pytest.approx(imbalance, rel=0.05)


def test_an_even_load_uses_the_even_share_of_the_room() -> None:
    load = expert_load(plan(capacity=2.0), 0.0, 0)
    assert load.used == (0.5,) * 4 and load.dropped == 0


def test_what_has_no_room_is_dropped() -> None:
    load = expert_load(plan(capacity=1.0), 1.0, 0)
    assert max(load.used) <= 1.0
    assert load.dropped == pytest.approx(1 - np.mean(load.used))


def test_full_slots_take_the_time_of_a_whole_buffer() -> None:
    found = plan(capacity=1.0)
    assert priced(found, 0.0).step == priced(found, None).step


def test_the_fullest_rank_sets_the_time() -> None:
    """Every layer ends with an exchange among the ranks, so all wait for the most loaded one."""
    found = plan()
    even, uneven, whole = (priced(found, x, seed=3) for x in (0.0, 0.6, None))
    assert even.step < uneven.step <= whole.step
    assert (even.classes, uneven.classes, whole.classes) == (1, 4, 1)
    assert "coefficient of variation of 0.6: kernels skip empty slots" in uneven.notes[-1]


@pytest.mark.parametrize(
    ("imbalance", "allowed"), [(-0.1, "0 to less than 2.646 for 8 experts"), (3.0, "0 to less")]
)
def test_impossible_variations_are_refused(imbalance: float, allowed: str) -> None:
    with pytest.raises(BadInput, match=f"^imbalance: {imbalance} is not valid; allowed: {allowed}"):
        expert_load(plan(), imbalance, 0)


def test_a_dense_model_has_no_experts_to_load() -> None:
    dense = Plan.of("llama3-8b", instance="trn2.48xlarge", mesh="tp=8", global_batch=8, seq=1024)
    with pytest.raises(BadInput, match="imbalance: 0.5 .* none: llama3-8b has no experts$"):
        expert_load(dense, 0.5, 0)
