"""Homes, barriers and clocks of rank programs made by hand."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from trnsim.cluster.barriers import insert_barriers
from trnsim.cluster.buffers import plan_buffers
from trnsim.cluster.clocks import Clocks, Event
from trnsim.cluster.overlap import Demand, Meeting
from trnsim.cluster.program import (
    Branch,
    Move,
    PairBarrier,
    RankProgram,
    RunKernel,
    StartCollective,
    Step,
    WaitCollective,
    While,
)
from trnsim.collectives.algorithms import ring
from trnsim.collectives.schedule import Collective
from trnsim.device.errors import CollectiveMismatch
from trnsim.device.ops.ir import Operation, TensorType
from trnsim.device.ops.kernel import NOTHING_RESIDENT, Cost, Kernel, Part, split

VECTOR = TensorType((64,), "f32")  # 256 bytes


@dataclass(frozen=True, kw_only=True, eq=False)
class Halves(Kernel):
    """Each core reads and writes its half; `gathers` makes it read everything."""

    gathers: bool = False

    def part(self, core: int, cores: int) -> Part:
        return split(64, core, cores, "rows")

    def reads(self, part: Part) -> dict[int, tuple[int, int]]:
        span = (0, 64) if self.gathers else (part.start, part.stop)
        return dict.fromkeys(self.inputs, span)

    def writes(self, part: Part) -> dict[int, tuple[int, int]]:
        return dict.fromkeys(self.outputs, (part.start, part.stop))


def run(
    inputs: Sequence[int],
    outputs: Sequence[int],
    time: Sequence[int] = (10, 10),
    gathers: bool = False,
) -> RunKernel:
    kernel = Halves(
        name="k",
        operations=(),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        types={},
        gathers=gathers,
    )
    cores = len(time)
    return RunKernel(
        kernel,
        tuple(kernel.part(core, cores) for core in range(cores)),
        (NOTHING_RESIDENT,) * cores,
        tuple(Cost(t, {"vector": t}, 1, 0, 0) for t in time),
    )


def plan(steps: Sequence[Step], pinned: Sequence[int], results: Sequence[int], values: int = 20):
    return plan_buffers(steps, [VECTOR] * values, {}, (), pinned, results, 2)


# -- homes --------------------------------------------------------------------------------------


def test_a_home_is_reused_when_its_value_is_dead() -> None:
    steps = [run([0], [1]), run([1], [2]), run([2], [3])]
    buffers, peak = plan(steps, [0], [3])
    assert buffers[1].offsets == (256, 256)
    assert buffers[3].offsets == buffers[1].offsets
    assert peak == 3 * 256


def test_values_older_than_a_loop_outlive_it() -> None:
    inside = (run([1], [5]), run([5], [6]))
    steps = [run([0], [1]), While(9, (), 1, inside), run([0], [7])]
    buffers, _ = plan(steps, [0], [7])
    assert len({buffers[v].offsets for v in (1, 5, 6)}) == 3


def test_the_index_of_a_branch_outlives_the_branches() -> None:
    """A core may still have to look at it when the other is on its way."""
    steps = [run([0], [1]), Branch(9, 1, ((run([0], [2]),), (run([0], [3]),))), run([0], [4])]
    buffers, _ = plan(steps, [0], [])
    assert buffers[1].offsets not in (buffers[2].offsets, buffers[3].offsets)
    assert buffers[1].offsets == buffers[4].offsets


def test_small_values_have_a_home_on_each_core() -> None:
    buffers, peak = plan_buffers([run([0], [1])], [VECTOR] * 2, {}, [1], [0], [1], 2)
    assert buffers[1].offsets == (256, 512)
    assert peak == 768


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=30))
def test_values_that_live_at_once_never_share_bytes(edges: list[tuple[int, int]]) -> None:
    steps = [run([a], [10 + i]) if b % 2 else run([10 + i - 1 if i else a], [10 + i])
             for i, (a, b) in enumerate(edges)]  # fmt: skip
    buffers, peak = plan(steps, range(10), [], 60)
    uses: dict[int, list[int]] = {v: [0, len(steps) + 1] for v in range(10)}
    for at, step in enumerate(steps, 1):
        for value in (*step.kernel.inputs, *step.kernel.outputs):
            uses.setdefault(value, []).append(at)
    for one, at in uses.items():
        assert buffers[one].interval(0)[1] <= peak
        for other, when in uses.items():
            if one < other and min(at) <= max(when) and min(when) <= max(at):
                assert buffers[one].offsets != buffers[other].offsets


# -- barriers -----------------------------------------------------------------------------------


def kinds(steps: Sequence[Step]) -> str:
    names = {RunKernel: "k", PairBarrier: "|", StartCollective: "s", WaitCollective: "w"}
    return "".join(
        f"({kinds(step.condition)};{kinds(step.body)})" if isinstance(step, While)
        else names.get(type(step), "m")
        for step in steps
    )  # fmt: skip


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        pytest.param([run([0], [1]), run([1], [2])], "kk", id="same halves"),
        pytest.param([run([0], [1]), run([1], [2], gathers=True)], "k|k", id="reads other half"),
        pytest.param(
            [run([0], [1], gathers=True), run([0], [2], gathers=True)], "kk", id="both only read"
        ),
        pytest.param(
            [run([0], [1]), run([1], [2], gathers=True), run([1], [3], gathers=True)],
            "k|kk",
            id="one meeting serves both",
        ),
        pytest.param([While(9, (), 0, (run([0], [1]),))], "(|;k)|", id="loop"),
    ],
)
def test_cores_meet_only_where_one_touches_what_the_other_did(
    steps: list[Step], expected: str
) -> None:
    buffers, _ = plan(steps, [0], [])
    assert kinds(insert_barriers(steps, buffers, 2)) == expected


def test_a_core_does_not_overwrite_what_the_other_still_reads() -> None:
    steps: list[Step] = [run([0], [1], gathers=True), run([2], [0])]
    buffers, _ = plan(steps, [0, 2], [1])
    assert kinds(insert_barriers(steps, buffers, 2)) == "k|k"


def test_a_core_does_not_overwrite_the_index_that_the_other_branches_on() -> None:
    branch = Branch(9, 0, ((run([1], [0]),), (run([1], [2]),)))
    buffers, _ = plan([branch], [0, 1], [])
    _, placed, _ = insert_barriers([branch], buffers, 2)
    assert isinstance(placed, Branch)
    assert [kinds(taken) for taken in placed.branches] == ["|k|", "k|"]


def test_one_core_needs_no_barrier() -> None:
    steps: list[Step] = [run([0], [1]), run([1], [2], gathers=True)]
    buffers, _ = plan(steps, [0], [])
    assert kinds(insert_barriers(steps, buffers, 1)) == "kk"


# -- clocks -------------------------------------------------------------------------------------


def collective(key: int, operand: int, result: int, stream: int = 0) -> StartCollective:
    what = Collective("all_reduce", 2, 64, "f32", "add")
    operation = Operation("all_reduce", (operand,), (result,), {}, (), "user.py:3")
    return StartCollective(
        key, operation, operand, result, ((0, 1),), what, ring.schedule(what), "ring", "by name",
        stream,
    )  # fmt: skip


def program(steps: Sequence[Step], lnc: int = 2) -> RankProgram:
    buffers, arena = plan_buffers(steps, [VECTOR] * 20, {}, (), [0], [], lnc)
    placed = insert_barriers(steps, buffers, lnc)
    return RankProgram("p", lnc, placed, buffers, {}, (0,), (), (), arena, 3)


def met(call: StartCollective, arrivals: np.ndarray) -> np.ndarray:
    """A collective that takes 100 ps from the last arrival of all ranks."""
    return np.full_like(arrivals, arrivals.max() + 100)


def test_a_step_is_the_sum_of_its_kernels_and_meetings() -> None:
    steps = program([run([0], [1], (10, 12)), run([1], [2], (5, 5), gathers=True)])
    time = Clocks(2, 2).step(steps, [{}, {}], met)
    assert time.duration == 12 + 3 + 5
    assert time.busy == {(0, "vector"): 15, (1, "vector"): 17}
    assert time.serial_bound == 17


@pytest.mark.parametrize(
    ("streams", "links", "step"),
    [((0, 0), 0.75, 210), ((0, 1), 0.75, 160), ((0, 1), 0.5, 110), ((0, 1), 1.0, 210)],
)
def test_collectives_of_two_streams_share_links(streams, links, step) -> None:
    starts = [collective(key, 1, key + 1, stream) for key, stream in enumerate(streams, start=1)]
    steps = [run([0], [1]), *starts, WaitCollective(1), WaitCollective(2)]

    def meet(call: StartCollective) -> Meeting:
        rows = np.array([[0, 1]])
        return Meeting("", Demand(links=links), call.stream, rows, np.zeros(2, np.int64))

    clocks = Clocks(2, 2)
    times = [clocks.step(program(steps), [{}, {}], met, meet=meet) for _ in range(2)]
    assert [time.duration for time in times] == [step, step]
    assert times[0].overlapped_bound == (200 if streams == (0, 0) else step - 10)


def test_compute_hides_a_collective_and_the_rest_is_exposed() -> None:
    steps = [run([0], [1]), collective(1, 1, 2), run([0], [3], (40, 40)), WaitCollective(1),
             run([2], [4])]  # fmt: skip
    time = Clocks(2, 2).step(program(steps), [{}, {}], met, traced=[0])
    assert time.duration == 10 + 100 + 10
    assert (time.collective, time.exposed) == (100, 60)
    assert time.overlapped_bound == 100
    assert [e for e in time.events if "vector" not in e.track and "core 1" not in e.track] == [
        Event(0, "core 0", "k", 0, 10, {"source": ""}),
        Event(0, "core 0", "k", 10, 40, {"source": ""}),
        Event(0, "collective stream 0", "all_reduce #1", 10, 100,
              {"source": "user.py:3", "algorithm": "ring", "bytes": 256}),
        Event(0, "core 0", "wait for collective #1", 50, 60),
        Event(0, "core 0", "k", 110, 10, {"source": ""}),
    ]  # fmt: skip


def test_loops_run_as_often_as_decided_and_steps_follow_each_other() -> None:
    steps = program([While(9, (run([0], [1], (1, 1)),), 0, (run([0], [2], (7, 7)),))], lnc=2)
    clocks = Clocks(3, 2)
    once = clocks.step(steps, [{9: [4]}] * 3, met)
    again = clocks.step(steps, [{9: [4]}] * 3, met)
    meetings = 5 + 1  # before each condition, and after the loop
    assert once.duration == again.duration == 5 * 1 + 4 * 7 + meetings * 3
    assert again.start == once.duration


def test_ranks_with_other_trips_meet_at_collectives() -> None:
    steps = program([
        While(9, (), 0, (run([0], [1], (10, 10)),)), collective(1, 0, 2), WaitCollective(1),
    ], lnc=2)  # fmt: skip
    time = Clocks(2, 2).step(replace(steps, barrier_ps=0), [{9: [1]}, {9: [5]}], met)
    assert time.ends.tolist() == [150, 150]


def test_groups_may_take_different_trips_with_their_collectives() -> None:
    call = replace(collective(1, 0, 2), groups=((0, 1), (2, 3)))
    steps = program([While(9, (), 0, (run([0], [1]), call, WaitCollective(1)))])
    priced = []

    def price(call: StartCollective, arrivals: np.ndarray) -> np.ndarray:
        priced.append(call.groups)
        return arrivals + 100

    decisions = [{9: [1]}] * 2 + [{9: [3]}] * 2
    time = Clocks(4, 2).step(replace(steps, barrier_ps=0), decisions, price)
    assert priced == [((0, 1), (2, 3)), ((2, 3),), ((2, 3),)]
    assert time.ends.tolist() == [110, 110, 330, 330]
    assert time.calls[1].executions == 3


def test_ranks_that_call_different_collectives_are_named() -> None:
    loop = While(9, (), 0, (collective(1, 0, 2), WaitCollective(1)))
    steps = program([loop, Move(())])
    with pytest.raises(CollectiveMismatch) as error:
        Clocks(3, 2).step(steps, [{9: [1]}, {9: [0]}, {9: [1]}], met)
    assert str(error.value) == (
        "ranks of one group call different collectives: ranks 0, 2 call all_reduce number 1"
        " (user.py:3); ranks 1 are at the end of the step"
    )
