"""Programs of plans run with values: their loss and gradients are those of the whole model in JAX,
whatever the parallelism, and their optimizer is AdamW."""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from trnsim.cluster.models.config import ModelConfig, load_model
from trnsim.cluster.plans import wholes
from trnsim.cluster.plans.build import build
from trnsim.cluster.plans.execute import Outcome, run_with_values
from trnsim.cluster.plans.plan import Plan
from trnsim.cluster.plans.program import Layers, Receive, Send, Task, TrainingProgram
from trnsim.device.errors import CollectiveMismatch, TrnsimError

from .plan_reference import loss_and_gradients

BATCH, SEQ, VOCAB = 4, 8, 20
SMALL: dict[str, Any] = {"layers": 2, "hidden": 16, "heads": 4, "head_dim": 4, "ffn": 24}
GPT = replace(load_model("gpt3-6.7b"), **SMALL, kv_heads=4, vocab=VOCAB, max_positions=SEQ)
LLAMA = replace(load_model("llama3-8b"), **SMALL, kv_heads=2, vocab=VOCAB)
QWEN = replace(LLAMA, name="qwen3", qk_norm=True, qkv_bias=True, layers=4, vocab=VOCAB - 1)
NEOX = replace(GPT, name="neox", positions="rope", rope_fraction=0.5, parallel_residual=True)
BERT = replace(load_model("bert-large"), **SMALL, kv_heads=4, vocab=VOCAB, max_positions=SEQ)
MODELS = {m.name: m for m in (GPT, LLAMA, QWEN, NEOX, BERT)}


def plan_of(model: ModelConfig, mesh: str, **changes: Any) -> Plan:
    fields = {"global_batch": BATCH, "seq": SEQ, "dtype": "f32"} | changes
    return Plan.of(model, instance="trn2.48xlarge", mesh=mesh, **fields)


@cache
def batch() -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    return {
        name: random.integers(0, VOCAB - 1, (BATCH, SEQ), np.int32) for name in ("tokens", "labels")
    }


@cache
def started(name: str) -> wholes.Wholes:
    """Whole parameters of a model; biases and scales are not left at zeros and ones."""
    plan = plan_of(MODELS[name], "dp=1")
    random = np.random.default_rng(2)
    return {
        key: (array + 0.1 * random.normal(size=array.shape)).astype(np.float32)
        for key, array in wholes.start(build(plan), plan, seed=0).items()
    }


@cache
def expected(name: str) -> tuple[float, wholes.Wholes]:
    return loss_and_gradients(MODELS[name], started(name), **batch())


def shared(parameters: wholes.Wholes, plan: Plan) -> wholes.Wholes:
    """The parameters as a plan names them in which ranks share key and value heads."""
    found: wholes.Wholes = {}
    for (name, layer), array in parameters.items():
        if plan.kv_copies > 1 and name.endswith("qkv"):
            axis, stem = int(name.endswith("wqkv")), name.removesuffix("qkv")
            q, kv = np.split(array, [plan.model.heads], axis)
            found |= {(f"{stem}q", layer): q, (f"{stem}kv", layer): kv}
        else:
            found[name, layer] = array
    return found


def filled(parameters: wholes.Wholes, plan: Plan) -> wholes.Wholes:
    """The parameters with rows of zeros where the plan fills up the vocabulary."""
    more = plan.vocab - plan.model.vocab
    rows = {"embedding.table", "head.output", "head.bias"}
    return {
        (name, layer): np.concatenate([array, np.zeros((more, *array.shape[1:]), array.dtype)])
        if name in rows
        else array
        for (name, layer), array in parameters.items()
    }


def run(model: ModelConfig, mesh: str, **changes: Any) -> tuple[Plan, Outcome]:
    plan = plan_of(model, mesh, **changes)
    start = filled(shared(started(model.name), plan), plan)
    return plan, run_with_values(build(plan), plan, batch(), start=start)


@pytest.mark.parametrize(
    ("model", "mesh", "changes"),
    [
        (GPT, "dp=2,tp=2", {"recompute": "full", "bucket_bytes": 2000}),
        (GPT, "pp=2,dp=2", {"zero": "fsdp"}),
        (GPT, "pp=2,dp=1,tp=2", {"schedule": "zero-bubble", "recompute": "full"}),
        (LLAMA, "dp=2,cp=2", {"zero": "1", "recompute": "selective"}),
        (QWEN, "dp=1,tp=4", {"recompute": "selective"}),
        (QWEN, "pp=2,dp=2", {"schedule": "interleaved:2", "zero": "1"}),
        (QWEN, "dp=2", {"zero": "fsdp", "early_all_gather": 3, "late_reduce_scatter": 2}),
        (QWEN, "dp=4", {"zero": "fsdp", "early_all_gather": 0, "late_reduce_scatter": 0}),
        (NEOX, "pp=2,dp=1", {"recompute": "full"}),
        (BERT, "pp=2,dp=2", {"zero": "1"}),
    ],
    ids=lambda value: value.name if isinstance(value, ModelConfig) else str(value),
)
def test_loss_and_gradients_are_those_of_the_whole_model(
    model: ModelConfig, mesh: str, changes: dict[str, Any]
) -> None:
    plan, found = run(model, mesh, **changes)
    loss, gradients = expected(model.name)
    assert found.loss == pytest.approx(loss, rel=1e-5)
    gradients = filled(shared(gradients, plan), plan)
    assert found.gradients.keys() == gradients.keys()
    for key, gradient in gradients.items():
        scale = max(np.abs(gradient).max(), 1e-3)
        np.testing.assert_allclose(
            found.gradients[key], gradient, atol=1e-4 * scale, err_msg=str(key)
        )


@pytest.mark.parametrize("changes", [{}, {"zero": "1"}, {"zero": "fsdp"}], ids=str)
def test_the_optimizer_is_adamw(changes: dict[str, Any]) -> None:
    _, found = run(LLAMA, "dp=2", **changes)
    for key, gradient in found.gradients.items():
        before = started(LLAMA.name)[key]
        step = gradient / (np.abs(gradient) + 1e-8) + 0.1 * before  # of the first step
        np.testing.assert_allclose(found.parameters[key], before - 1e-4 * step, atol=1e-6)


def test_dropout_does_not_depend_on_the_parallelism() -> None:
    _, alone = run(GPT, "dp=1", dropout=0.5)
    _, many = run(GPT, "dp=2,tp=2", dropout=0.5, recompute="full")
    assert many.loss == pytest.approx(alone.loss, rel=1e-5)
    assert alone.loss != pytest.approx(expected(GPT.name)[0], rel=1e-3)
    for key, gradient in alone.gradients.items():
        np.testing.assert_allclose(many.gradients[key], gradient, atol=1e-5, err_msg=str(key))


def test_bf16_is_close_to_f32() -> None:
    _, found = run(LLAMA, "dp=2,tp=2", dtype="bf16", zero="1")
    assert found.loss == pytest.approx(expected(LLAMA.name)[0], rel=0.02)
    assert found.parameters["layer.mlp.down", 0].dtype == "bfloat16"
    assert found.gradients["layer.mlp.down", 0].dtype == np.float32


def changed(program: TrainingProgram, stage: int, tasks: tuple[Task, ...]) -> TrainingProgram:
    stages = list(program.stages)
    stages[stage] = replace(stages[stage], tasks=tasks)
    return replace(program, stages=tuple(stages))


def test_stages_that_wait_for_each_other_are_an_error() -> None:
    plan = plan_of(LLAMA, "pp=2,dp=1")
    program = build(plan)
    tasks = program.stages[0].tasks
    backward = next(i for i, task in enumerate(tasks) if task.kind == "backward")
    early = (tasks[0], tasks[backward], *tasks[1:backward], *tasks[backward + 1 :])
    with pytest.raises(CollectiveMismatch) as error:
        run_with_values(changed(program, 0, early), plan, batch())
    assert str(error.value) == (
        "pipeline stages wait for each other: stage 0 waits for backward 0 of microbatch 0 from"
        " stage 1; stage 1 waits for forward 0 of microbatch 0 from stage 0"
    )


def test_a_value_that_is_not_there_is_an_error() -> None:
    plan = plan_of(LLAMA, "dp=1")
    program = build(plan)
    tasks = tuple(task for task in program.stages[0].tasks if task.kind != "forward")
    with pytest.raises(TrnsimError, match="read before it is written"):
        run_with_values(changed(program, 0, tasks), plan, batch())


def test_what_passes_between_stages() -> None:
    """Each boundary once per microbatch and direction; a rank's part of [b, s, d]."""
    plan = plan_of(GPT, "pp=2,dp=2,tp=2")
    first, last = build(plan).stages
    ends = [
        (type(step), step.channel, step.stage, task.microbatch)
        for task in first.tasks
        for loop in task.body
        if isinstance(loop, Layers)
        for step in loop.body
        if isinstance(step, Send | Receive)
    ]
    assert ends == [
        (Send, "forward 0", 1, 0),
        (Send, "forward 0", 1, 1),
        (Receive, "backward 0", 1, 0),
        (Receive, "backward 0", 1, 1),
    ]
    assert last.values["x"].type.shape == (1, SEQ // 2, 16)
    assert GPT.tied and first.tasks[-2].kind == last.tasks[-2].kind == "gradients"
