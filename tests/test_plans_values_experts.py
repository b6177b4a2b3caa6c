"""Models with experts, and sequences in parts: loss and gradients are those of one rank alone."""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from trnsim.cluster.models.config import ModelConfig, load_model
from trnsim.cluster.plans.build import build
from trnsim.cluster.plans.execute import Outcome, run_with_values
from trnsim.cluster.plans.plan import Plan

SMALL: dict[str, Any] = {"layers": 2, "hidden": 32, "heads": 4, "head_dim": 8, "vocab": 64}
EXPERTS = replace(  # a dense layer, then routed experts and a shared one with its gate
    load_model("mixtral-8x7b"),
    **SMALL,
    kv_heads=2,
    ffn=40,
    experts=4,
    expert_ffn=24,
    shared_ffn=16,
    shared_gate=True,
    dense_layers=1,
)
LATENT = replace(  # queries of a narrow vector, a sigmoid router with groups
    EXPERTS,
    heads=4,
    kv_heads=4,
    head_dim=12,
    q_rank=16,
    kv_rank=8,
    rope_dim=4,
    value_dim=8,
    shared_gate=False,
    router="sigmoid",
    expert_groups=2,
    top_groups=1,
    name="latent",
)
BERT = replace(load_model("bert-large"), **SMALL, kv_heads=4, ffn=40, max_positions=16)
BATCH, SEQ = 8, 16


def step(model: ModelConfig, mesh: str, **changes: Any) -> Outcome:
    fields = {"global_batch": BATCH, "seq": SEQ, "dtype": "f32", "capacity": 4.0} | changes
    plan = Plan.of(model, instance="trn2.48xlarge", mesh=mesh, **fields)
    random = np.random.default_rng(0)
    batch = {name: random.integers(0, 64, (BATCH, SEQ), np.int32) for name in ("tokens", "labels")}
    return run_with_values(build(plan), plan, batch)


@cache
def alone(model: ModelConfig) -> Outcome:
    return step(model, "dp=1", microbatch=4)


@pytest.mark.parametrize(
    ("model", "mesh", "changes"),
    [
        (EXPERTS, "dp=1,ep=2,tp=2", {"recompute": "full"}),
        (EXPERTS, "pp=2,dp=1,ep=2", {"schedule": "zero-bubble", "zero": "1"}),
        (EXPERTS, "dp=2,ep=2,cp=2", {"zero": "fsdp", "recompute": "selective"}),
        (LATENT, "dp=1,ep=2,tp=2", {"zero": "1"}),
        (BERT, "dp=1,cp=2,tp=2", {}),
    ],
    ids=["ep-tp", "pp-ep", "ep-cp-fsdp", "latent", "bert-cp-tp"],
)
def test_loss_and_gradients_are_those_of_one_rank(
    model: ModelConfig, mesh: str, changes: dict[str, Any]
) -> None:
    expected, found = alone(model), step(model, mesh, microbatch=2, **changes)
    assert found.loss == pytest.approx(expected.loss, rel=1e-5)
    assert found.gradients.keys() == expected.gradients.keys()
    for key, gradient in expected.gradients.items():
        np.testing.assert_allclose(found.gradients[key], gradient, atol=1e-4, err_msg=str(key))


def test_only_layers_of_a_kind_have_its_parameters() -> None:
    layers: dict[str, set[int]] = {}
    for name, layer in alone(EXPERTS).parameters:
        layers.setdefault(name.split(".")[0], set()).add(layer)
    assert layers == {"embedding": {-1}, "head": {-1}, "layer": {0}, "experts": {1}}


def test_parameters_of_the_program_are_those_that_the_model_counts() -> None:
    for model in (EXPERTS, LATENT, BERT):
        arrays = alone(model).parameters.values()
        assert sum(array.size for array in arrays) == model.parameters
