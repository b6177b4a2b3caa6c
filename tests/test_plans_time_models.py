"""Priced plans of small models: sums, traffic, memory, and prices against the whole fabric."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from trnsim.cluster.cli_plan import plan as command
from trnsim.cluster.collective import site_of
from trnsim.cluster.models.config import ModelConfig
from trnsim.cluster.plans import prices as pricing
from trnsim.cluster.plans.build import build
from trnsim.cluster.plans.clocks import Conditions, advance
from trnsim.cluster.plans.goodput import Failures, daly_interval, goodput, progress
from trnsim.cluster.plans.memory import memory
from trnsim.cluster.plans.places import Places
from trnsim.cluster.plans.plan import Plan
from trnsim.cluster.plans.prices import Prices
from trnsim.cluster.plans.result import COMPUTE, PlanResult, price_plan, simulate
from trnsim.collectives import choose
from trnsim.collectives.price import Pricer
from trnsim.collectives.schedule import Collective
from trnsim.device.errors import BadInput, OutOfMemory

from .stages import machine

D, F, V, SEQ, LAYERS = 256, 512, 1024, 128, 4
GPT = ModelConfig(
    name="small", family="gpt2", layers=LAYERS, hidden=D, heads=8, kv_heads=8, head_dim=32, ffn=F,
    vocab=V, activation="gelu", norm="layer", positions="learned", max_positions=SEQ,
    qkv_bias=True, linear_bias=True,
)  # fmt: skip


def planned(mesh: str, nodes: int = 1, **fields) -> Plan:
    """A plan of the small model, four microbatches of 1 where the batch is not given."""
    made: dict[str, Any] = dict(global_batch=64, seq=SEQ, microbatch=1) | fields
    return Plan.of(GPT, instance="trn2.48xlarge", nodes=nodes, mesh=mesh, **made)


MESHES: dict[str, dict[str, Any]] = {
    "dp": dict(mesh="dp=4,tp=1", global_batch=8),
    "tp": dict(mesh="dp=2,tp=4", global_batch=8),
    "pp": dict(mesh="pp=4,dp=1,tp=4", global_batch=8),
    "interleaved": dict(mesh="pp=2,dp=2,tp=1", global_batch=8, schedule="interleaved:2"),
    "zero-bubble": dict(mesh="pp=2,dp=2,tp=1", global_batch=8, schedule="zero-bubble"),
    "zero1": dict(mesh="dp=4,tp=4", global_batch=8, zero="1"),
    "fsdp": dict(mesh="dp=4,tp=1", global_batch=8, zero="fsdp"),
    "full": dict(mesh="dp=2,tp=4", global_batch=8, recompute="full"),
}


@pytest.fixture(scope="module")
def results() -> dict[str, PlanResult]:
    """Every plan of MESHES, priced."""
    return {name: price_plan(planned(**fields)) for name, fields in MESHES.items()}


@pytest.mark.parametrize("name", MESHES)
def test_parts_are_the_step(results, name):
    result = results[name]
    assert sum(result.parts.values()) == pytest.approx(result.step, abs=len(result.parts))
    assert result.exposed <= sum(i.total for i in result.exchanges if i.operation != "send")
    assert 0 < result.mfu < result.executed_flops / result.flops
    assert result.fits


def traffic(result: PlanResult, label: str) -> dict[tuple[str, str], float]:
    """Bytes of whole buffers that exchanges of a label move, by operation and group."""
    found: dict[tuple[str, str], float] = {}
    for item in result.exchanges:
        if item.label == label:
            key = (item.operation, item.group)
            found[key] = found.get(key, 0) + item.count * item.nbytes
    return found


def padded(parameters: int, ranks: int) -> int:
    return -(-parameters // ranks) * ranks


def test_gradients_are_reduced_once(results):
    moved = traffic(results["dp"], "gradients")
    assert moved == {("all_reduce", "dp"): pytest.approx(4 * GPT.parameters, rel=1e-4)}


def test_zero1_is_reduce_scatter_and_all_gather(results):
    result = results["zero1"]
    local = sum(
        item.count * item.nbytes for item in result.exchanges if item.operation == "reduce_scatter"
        and item.label == "gradients"
    )  # fmt: skip
    assert traffic(result, "parameters")[("all_gather", "dp")] == pytest.approx(local / 2, rel=1e-3)


def test_fsdp_gathers_parameters_for_every_pass(results):
    result = results["fsdp"]
    microbatches = 2
    gathered = traffic(result, "parameters")[("all_gather", "dp")]
    reduced = traffic(result, "gradients")[("reduce_scatter", "dp")]
    assert reduced == pytest.approx(2 * GPT.parameters * microbatches, rel=1e-2)
    assert gathered == pytest.approx(2 * reduced, rel=0.1)  # forward and backward


def test_tensor_parallel_traffic_of_a_layer(results):
    """Forward: two gathers and two reduce-scatters of [b, s, d]; backward the same, and the two
    inputs gathered again for the gradients of the weights (arXiv:2205.05198, section 4.2.2). The
    embedding scatters once and gathers its gradient; the loss gathers twice and scatters once.
    """
    size, passes = SEQ * D * 2, 4
    assert traffic(results["tp"], "tensor parallel") == {
        ("all_gather", "tp"): (6 * LAYERS + 3) * passes * size,
        ("reduce_scatter", "tp"): (4 * LAYERS + 2) * passes * size,
    }


def test_expert_parallel_traffic_of_a_layer():
    """Tokens go to their experts and back, forward and backward: slots of `capacity` times the even
    share, top_k for each token, which sequence parallelism has divided over tp."""
    experts: dict[str, Any] = dict(experts=8, top_k=2, expert_ffn=F, activation="swiglu")
    plain: dict[str, Any] = dict(qkv_bias=False, linear_bias=False, norm="rms", positions="rope")
    model = replace(GPT, family="mixtral", **experts, **plain)
    batch: dict[str, Any] = dict(global_batch=16, seq=SEQ, capacity=1.5)
    plan = Plan.of(model, instance="trn2.48xlarge", mesh="dp=2,ep=4,tp=2", **batch)
    found = [i for i in price_plan(plan).exchanges if i.operation == "all_to_all"]
    slots = int(1.5 * 2 * SEQ // 2)
    passes = 16 // (2 * 4)
    assert {(i.group, i.ranks, i.nbytes) for i in found} == {("ep", 4, slots * D * 2)}
    assert sum(i.count for i in found) == 4 * LAYERS * passes


def test_memory_of_states(results):
    uses = results["dp"].memory.uses
    assert uses["parameters"] == pytest.approx(2 * GPT.parameters, rel=0.02)
    assert uses["gradients"] == 4 * GPT.parameters
    assert uses["optimizer"] == pytest.approx(12 * GPT.parameters, rel=0.01)
    sharded = results["zero1"].memory.uses
    # positions, norms and the biases of row-parallel matrices are on every rank of tp
    whole = SEQ * D + LAYERS * (4 * D + 2 * D) + 2 * D
    share = (GPT.parameters - whole) // 16 + whole // 4  # filled up in each bucket
    assert sharded["optimizer"] == pytest.approx(12 * share, rel=0.02)
    assert results["fsdp"].memory.uses["parameters"] < uses["parameters"] / 3


def activations(mesh: str, recompute: str) -> list[int]:
    """Bytes at the peak of every stage."""
    plan = planned(mesh, global_batch=8, recompute=recompute)
    return [memory(stage, plan.machine).uses["activations"] for stage in build(plan).stages]


def test_full_recomputation_keeps_inputs_of_layers():
    losses = 8 * 4
    assert activations("dp=1,tp=1", "full") == [LAYERS * SEQ * D * 2 + losses]
    selective, none = activations("dp=1,tp=1", "selective"), activations("dp=1,tp=1", "none")
    assert LAYERS * SEQ * D * 2 + losses < selective[0] < none[0]


def test_stages_hold_as_many_microbatches_as_come_after_them():
    """1F1B: stage s of p has p - s microbatches in flight."""
    one = SEQ * D * 2 // 4
    assert activations("pp=4,dp=1,tp=4", "full")[:3] == [4 * one, 3 * one, 2 * one]


def test_one_kind_of_exchange_names_its_group(results):
    """U5: the axis, the members and the number of groups of every collective."""
    groups = {(i.group, i.ranks, i.groups) for i in results["zero1"].exchanges}
    assert groups == {("dp", 4, 4), ("tp", 4, 4)}


@pytest.mark.parametrize("mesh", ["dp=32,tp=8", "pp=2,dp=16,tp=8", "tp=8,dp=32", "dp=8,tp=32"])
@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter"])
def test_folded_prices_are_those_of_the_whole_fabric(mesh, kind):
    where = machine(mesh, nodes=4)
    places = Places(where.placement.mesh)
    prices = Prices(where, ())
    site = site_of(where.instance, nodes=4, lnc=2)
    for axis in ("dp", "tp"):
        groups = places.groups((axis,))
        n = groups.shape[1]
        for elements in (960, 96 * 2**14):
            whole = elements * n if kind == "all_reduce" else elements
            reduction = None if kind == "all_gather" else "add"
            collective = Collective(kind, n, whole, "bf16", reduction)
            stages = tuple(range(places.stages))
            found = prices._price(collective, stages, groups, ((axis,), 0))
            table = places.ranks[:, groups].reshape(-1, n)
            made = choose.plan(collective, table, site.fabric, "policy", site.policy)
            even = pricing._even(collective, made.schedule)
            priced = Pricer(made.schedule, site.fabric, table).price(even, overheads=site.overheads)
            assert np.array_equal(found.ends, priced.end), (axis, elements, found.algorithm)


def test_slow_link_is_not_folded():
    plan = planned("dp=8,tp=8", nodes=1, global_batch=8)
    program = build(plan)
    slow = Prices(plan.machine, program.codes, degraded=(("chip0->chip1", 10**9),))
    time = advance(program, slow)
    assert time.classes.count > 1
    assert time.duration > price_plan(plan).step


def test_slow_chip_makes_its_ranks_late():
    plan = planned("dp=4,tp=4", global_batch=4)
    result = price_plan(plan, conditions=Conditions(slow=((9, 1.5),)))
    late = {item.late[0] for item in result.exchanges if item.late and item.group == "tp"}
    assert 9 in late
    assert result.step > price_plan(plan).step


@pytest.mark.parametrize("name", MESHES)
def test_folding_and_fast_forwarding_is_exact(results, name):
    plan, fast = planned(**MESHES[name]), results[name]
    every_rank = Conditions(jitter=1e-18)  # a clock for each, no task taken for another
    for slow, timeline in (simulate(plan, traced=True), simulate(plan, conditions=every_rank)):
        assert slow.step == fast.step
        assert slow.parts == fast.parts
        assert [i.count for i in slow.exchanges] == [i.count for i in fast.exchanges]
        if timeline.events:
            assert max(event.start + event.duration for event in timeline.events) == fast.step


def test_trace_has_a_process_for_each_stage(tmp_path):
    path = tmp_path / "trace.json"
    arguments = "llama2-7b --mesh pp=2,dp=1,tp=8 --global-batch 2 --seq 128 --trace".split()
    CliRunner().invoke(command, [*arguments, str(path)], catch_exceptions=False)
    entries = json.loads(path.read_text())["traceEvents"]
    named = {e["args"]["name"] for e in entries if e["ph"] == "M" and "name" in e["args"]}
    assert {"stage 0 (rank 0)", "stage 1 (rank 8)", "compute", "stream 0"} <= named


def test_goodput_is_best_at_dalys_interval():
    failures = Failures(mtbf=1000 * 3600, checkpoint=60, restart=300)
    found = goodput(failures, nodes=100)
    assert found.mtbf == 36000
    assert found.best == pytest.approx(daly_interval(36000, 60))
    others = [progress(36000, 60, 300, found.best * factor) for factor in (0.8, 1.25)]
    assert found.fraction > max(others)
    assert found.young == pytest.approx(found.best, rel=0.05)


def test_bubble_of_the_plan_is_the_closed_form(results):
    result = results["pp"]
    passes = sum(result.parts.get(name, 0) for name in COMPUTE.values())
    assert result.bubble > 3 / (8 + 3) * passes / result.step  # sends and uneven ends come on top


def test_boundaries_carry_the_hidden_states_of_a_microbatch(results):
    """U7: microbatch x seq x hidden elements, of which every rank of tp sends its part."""
    sent = {item.label: item for item in results["pp"].exchanges if item.operation == "send"}
    assert set(sent) == {"pipeline forward", "pipeline backward"}
    for item in sent.values():
        assert item.nbytes * 4 == 1 * SEQ * D * 2
        assert (item.group, item.groups, item.count) == ("pp", 4, 8)


def test_command_prints_json():
    arguments = "llama2-7b --mesh dp=1,tp=8 --global-batch 1 --seq 128 --json".split()
    found = CliRunner().invoke(command, arguments, catch_exceptions=False)
    document = json.loads(found.output)
    assert document["plan"]["mesh"] == "dp=1,tp=8"
    assert sum(document["parts"].values()) == pytest.approx(document["step"], abs=20)


def test_what_does_not_fit_names_what_would():
    arguments = "llama2-7b --mesh dp=8,tp=8 --global-batch 64 --seq 4096 --microbatch 8 --strict"
    with pytest.raises(OutOfMemory) as error:
        CliRunner().invoke(command, arguments.split(), catch_exceptions=False)
    said = str(error.value)
    assert said.startswith("HBM of a rank: ")
    assert " GiB needed, 24 GiB available; held by activations " in said
    assert "optimizer 9.416 GiB" in said
    assert "Would fit with " in said and "recompute full (" in said


def test_times_between_failures_have_units():
    arguments = "llama2-7b --mesh dp=1,tp=8 --global-batch 1 --seq 128 --mtbf 5000".split()
    with pytest.raises(BadInput, match="^--mtbf: 5000 is not valid; allowed: .* s, min, h, days$"):
        CliRunner().invoke(command, arguments, catch_exceptions=False)


def test_slow_chip_outside_the_machine_is_refused():
    arguments = "llama2-7b --mesh dp=1,tp=8 --global-batch 1 --seq 128 --slow-chip 99=2".split()
    with pytest.raises(BadInput, match="^--slow-chip: 99=2 is not valid; allowed: .* 0 to 15$"):
        CliRunner().invoke(command, arguments, catch_exceptions=False)
