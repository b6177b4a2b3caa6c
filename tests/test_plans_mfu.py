"""Utilisation of the shipped models: never above what their kernels reach on the device model."""

import pytest

from trnsim.cluster.models.config import shipped_models
from trnsim.cluster.plans.build import build
from trnsim.cluster.plans.clocks import advance
from trnsim.cluster.plans.plan import Plan
from trnsim.cluster.plans.prices import Prices
from trnsim.cluster.plans.program import Run, TrainingProgram
from trnsim.cluster.plans.result import engines, executed_flops, price_plan
from trnsim.cluster.plans.segment import Segment
from trnsim.device.units import PS_PER_S

USUAL = {
    "bert": ("trn1.32xlarge", "dp=32"),
    "gpt3": ("trn1.32xlarge", "pp=4,tp=8"),
    "llama2-13b": ("trn1.32xlarge", "pp=4,tp=8"),
    "llama": ("trn2.48xlarge", "pp=4,tp=16"),
    "mixtral": ("trn2.48xlarge", "pp=4,ep=4,tp=4"),
    "deepseek": ("trn2.48xlarge", "pp=2,ep=8,tp=4"),
}
"""Instance and mesh of models whose names begin so; the first that fits."""


def usual(model: str) -> Plan:
    """A model on an instance that it is trained on."""
    instance, mesh = next(where for name, where in USUAL.items() if model.startswith(name))
    seq = 128 if model.startswith("bert") else 512
    return Plan.of(model, instance=instance, mesh=mesh, global_batch=32, seq=seq, zero="1")


def segments(program: TrainingProgram) -> set[Segment]:
    return {s.segment for stage in program.stages for s in stage.walk() if isinstance(s, Run)}


@pytest.mark.parametrize("model", shipped_models())
def test_utilisation_is_below_what_the_kernels_reach(model: str) -> None:
    plan = usual(model)
    program, machine, chip = build(plan), plan.machine, plan.machine.chip
    for segment in segments(program):
        time = segment.time(chip, machine.lnc)
        assert time.flops * PS_PER_S <= chip.peak("bf16") * machine.lnc * time.duration
    result = price_plan(plan)
    alone = advance(program, Prices(machine, program.codes, efficiency=1.0))
    kernels = sum(engines(alone).values()) / PS_PER_S  # of the average rank, one after another
    reached = executed_flops(alone) / (result.peak_flops * kernels)
    assert result.executed_flops == executed_flops(alone)
    assert 0 < result.hfu <= reached * chip.program_efficiency < 1
    assert result.step > alone.duration
    # what the model needs, without pairs that the mask hides, is what ranks execute, or less
    needed = plan.model.flops_per_token(plan.seq, masked=True) * result.tokens
    assert needed <= result.executed_flops
