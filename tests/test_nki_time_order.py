"""Orders of a kernel's instructions: the scheduler's, and those that a kernel asks for."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trnsim.device.chip import load_chip
from trnsim.device.errors import BadInput
from trnsim.device.memory import View
from trnsim.device.nki import simulate
from trnsim.device.nki.dependences import Dependences
from trnsim.device.nki.greedy import WINDOW, greedy
from trnsim.device.nki.result import SimulationResult
from trnsim.device.nki.trace import Entry
from trnsim.device.units import cycles_ps

from . import nki_kernels
from .nki_kernels import nisa, nki, nl

CHIP = load_chip("trn2")
kernels: Any = nki_kernels
X = np.ones((128, 512), np.float32)
LONG = 512


def vector(cycles: int = LONG) -> int:
    return cycles_ps(cycles, CHIP.clock_hz["vector"])


def scalar(cycles: int = LONG) -> int:
    return cycles_ps(cycles, CHIP.clock_hz["scalar"])


def tile(dtype=nl.float32):
    return nl.ndarray((128, LONG), dtype=dtype, buffer=nl.sbuf)


def bracket(result: SimulationResult) -> tuple[int, int]:
    """(greedy, program order) without the launch."""
    launch = result.chip.kernel_launch_ps
    return result.bracket[0] - launch, result.bracket[1] - launch


def names(cores) -> list[str]:
    return [event.name for event in cores[0].events]


VECTOR, SCALAR = nisa.engine.vector, nisa.engine.scalar
LATENCY = cycles_ps(CHIP.static_overhead_cycles, CHIP.clock_hz["vector"])


# ---- the scheduler's order ---------------------------------------------------------------------


def blocked(engine):
    """b waits for a load; c does not, and stands behind it."""

    @nki.jit
    def kernel(x):
        a, b, c = tile(), tile(), tile()
        nisa.dma_copy(a, x, name="load")
        nisa.tensor_scalar(b, a, nl.add, 1.0, engine=engine, name="b")
        nisa.memset(c, 1.0, engine=engine, name="c")

    return kernel


def test_an_instruction_that_is_ready_passes_one_that_waits():
    result = simulate(blocked(VECTOR), X)
    greedy_ps, program_ps = bracket(result)
    start = result.events[1].start
    assert program_ps == start + 2 * vector() + LATENCY
    assert greedy_ps == start + vector() + LATENCY
    assert names(greedy([core.trace for core in result.cores], CHIP)) == ["load", "c", "b"]


def test_the_longest_path_goes_first():
    @nki.jit
    def kernel(x):
        a, b, c = tile(), tile(), tile()
        nisa.memset(a, 1.0, engine=VECTOR, name="leaf")
        nisa.memset(b, 1.0, engine=VECTOR, name="root")
        nisa.activation(c, nl.copy, b, name="follows root")

    result = simulate(kernel, X)
    order = names(greedy([core.trace for core in result.cores], CHIP))
    assert order[0] == "root" and order[-1] in ("leaf", "follows root")
    greedy_ps, program_ps = bracket(result)
    assert program_ps - greedy_ps == vector()


def copies(engine):
    @nki.jit
    def kernel(x):
        a = tile()
        nisa.memset(a, 1.0)
        for _ in range(2):
            nisa.tensor_copy(tile(), a, engine=engine)

    return kernel


def test_an_open_engine_is_the_one_that_ends_first_and_a_stated_one_is_kept():
    free, stated = (simulate(copies(e), X) for e in (nisa.engine.unknown, VECTOR))
    moved = greedy([core.trace for core in free.cores], CHIP)
    assert sorted(event.engine for event in moved[0].events) == ["scalar", "vector", "vector"]
    fixed = greedy([core.trace for core in stated.cores], CHIP)
    assert {event.engine for event in fixed[0].events if event.opcode == "Copy"} == {"vector"}
    assert free.bracket[1] == stated.bracket[1] and free.bracket[0] < stated.bracket[0]
    assert ("engine=" in stated.hooks, "engine=" in free.hooks) == (True, False)


def test_integers_do_not_move_to_an_engine_that_computes_in_floats():
    @nki.jit
    def kernel(x):
        a = tile(nl.int32)
        nisa.memset(a, 1)
        for _ in range(3):
            nisa.tensor_copy(tile(nl.int32), a)

    result = simulate(kernel, X)
    moved = greedy([core.trace for core in result.cores], CHIP)
    assert {event.engine for event in moved[0].events} == {"vector"}


KERNELS = [
    (kernels.tensor_add, (np.ones((256, 1024), "f"), np.ones((256, 1024), "f"))),
    (kernels.matmul, (np.ones((256, 256), "f"), np.ones((256, 1024), "f"))),
    (kernels.layernorm, (np.ones((128, 256), "f"), np.ones((1, 256), "f"), np.ones((1, 256), "f"))),
    (kernels.split_sum[2], (np.ones((256, 64), "f"),)),
    (kernels.exchange_through_hbm[2], (np.ones((128, 64), "f"),)),
]


@pytest.mark.parametrize(("kernel", "arrays"), KERNELS)
def test_the_order_is_one_of_the_same_instructions_that_keeps_every_dependence(kernel, arrays):
    result = simulate(kernel, *arrays)
    for old, new in zip(
        result.cores, greedy([core.trace for core in result.cores], CHIP), strict=True
    ):
        places = {id(entry.writes): i for i, entry in enumerate(new.trace.entries)}
        order = [places[id(entry.writes)] for entry in old.trace.entries]
        assert sorted(order) == list(range(len(order)))
        for after, needed in enumerate(Dependences(old.trace).of):
            assert all(order[before] < order[after] for before in needed)
    assert result.bracket[0] <= result.bracket[1] == result.time
    assert result.bracket[0] >= result.bounds[0] * (len(result.cores) == 1)


def brute_force(entries: Sequence[Entry]) -> list[set[int]]:
    """Pairs that share bytes, one of which writes them: by comparison of all."""

    def meet(one: tuple[View, ...], other: tuple[View, ...]) -> bool:
        return any(a.overlaps(b) for a in one for b in other)

    return [
        {
            i for i in range(j)
            if meet(entries[i].writes, (*entries[j].reads, *entries[j].writes))
            or meet(entries[i].reads, entries[j].writes)
        }
        for j in range(len(entries))
    ]  # fmt: skip


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(*[st.integers(0, 7)] * 3, st.booleans()), min_size=2, max_size=12))
def test_dependences_follow_from_the_regions_alone(steps):
    """Every pair that shares bytes is ordered, if not directly then through others."""

    @nki.jit
    def kernel(x):
        out = nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.shared_hbm)
        line = nl.load(x)
        for to, source, width, store in steps:
            width = 32 + 8 * width
            part = line[:, nl.ds(source * 48, width)]
            if store:
                nisa.dma_copy(out[:, nl.ds(to * 48, width)], part)
                nisa.dma_copy(part, out[:, nl.ds(to * 48, width)])
            else:
                nisa.tensor_copy(line[:, nl.ds(to * 48, width)], part)

    trace = simulate(kernel, X, data=False).cores[0].trace
    reach: list[set[int]] = []
    for needed in Dependences(trace).of:
        reach.append(set(needed).union(*(reach[i] for i in needed)))
    for found, wanted in zip(reach, brute_force(trace.entries), strict=True):
        assert wanted <= found


def test_the_scheduler_looks_no_further_than_its_window():
    def passed(distance: int) -> bool:
        @nki.jit
        def kernel(x):
            a, b = tile(), nl.ndarray((128, 1), dtype=nl.float32, buffer=nl.sbuf)
            nisa.dma_copy(a, x)
            for _ in range(distance):
                nisa.tensor_scalar(a, a, nl.add, 1.0, engine=VECTOR)
            nisa.memset(b, 1.0, engine=VECTOR, name="far")

        result = simulate(kernel, X, data=False)
        return names(greedy([core.trace for core in result.cores], CHIP))[1] == "far"

    assert [passed(WINDOW - 2), passed(WINDOW + 2)] == [True, False]


# ---- orders that a kernel asks for -------------------------------------------------------------


def two(hook=None) -> Any:
    """Independent instructions on Scalar and Vector; `hook` gets their handles."""

    @nki.jit
    def kernel(x):
        a, b = tile(), tile()
        nisa.memset(a, 1.0, engine=VECTOR)
        first = nisa.activation(tile(), nl.copy, a, name="first")
        second = nisa.tensor_scalar(b, a, nl.add, 1.0, engine=VECTOR, name="second")
        if hook is not None:
            hook(first, second)

    return kernel


def starts(result: SimulationResult) -> tuple[int, int, int]:
    """(end of `first`, start of `second`, what passes between the engines)."""
    events = {event.name: event for event in result.events}
    return events["first"].end, events["second"].start, CHIP.semaphore_ps


def test_without_a_hook_the_two_overlap():
    end, start, _ = starts(simulate(two(), X))
    assert start < end


@pytest.mark.parametrize(
    ("kernel", "hook"),
    [
        (two(lambda first, second: second.depends_on(first)), "depends_on"),
        (two().with_schedule([("second", "first")]), "with_schedule"),
        (two().with_schedule([("second", ["first"])]), "with_schedule"),
    ],
)
def test_edges_are_kept_in_both_orders(kernel, hook):
    result = simulate(kernel, X)
    end, start, between = starts(result)
    assert start == end + between
    assert hook in result.hooks
    moved = greedy([core.trace for core in result.cores], CHIP)
    ends = {event.name: (event.start, event.end) for event in moved[0].events}
    assert ends["second"][0] >= ends["first"][1] + between
    assert simulate(kernel, X, data=False).time == result.time


def test_a_no_reorder_block_runs_one_instruction_at_a_time():
    @nki.jit
    def kernel(x):
        a = tile()
        nisa.memset(a, 1.0, engine=VECTOR)
        with nl.no_reorder():
            nisa.activation(tile(), nl.copy, a, name="first")
            nisa.tensor_scalar(tile(), a, nl.add, 1.0, engine=VECTOR, name="second")

    result = simulate(kernel, X)
    end, start, between = starts(result)
    assert start == end + between and "no_reorder" in result.hooks


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        ([("second", "frist")], "with_schedule: frist is not valid; .*nearest valid: first"),
        ([("first", "second")], "with_schedule: first after second is not valid"),
    ],
)
def test_edges_that_cannot_be_kept_are_refused(edges, message):
    with pytest.raises(BadInput, match=message):
        simulate(two().with_schedule(edges), X)
