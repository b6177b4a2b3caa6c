"""Whole traces of the timeline, and the law that they follow from the rules alone."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trnsim.device.chip import load_chip
from trnsim.device.errors import BadInput
from trnsim.device.isa.base import ENGINES
from trnsim.device.memory import Memory, View
from trnsim.device.timeline import Timeline

TRN2 = load_chip("trn2")
SEMAPHORE, DMA_SEMAPHORE, DMA_START = 3, 7, 20
LATENCY = {"vector": 10, "tensor": 5}


def timeline(dma_start_ps: int = DMA_START) -> Timeline:
    return Timeline(
        semaphore_ps=SEMAPHORE,
        dma_semaphore_ps=DMA_SEMAPHORE,
        dma_start_ps=dma_start_ps,
        latency_ps=LATENCY,
        record=True,
    )


def tiles(count: int, space: str = "sbuf") -> list[View]:
    memory = Memory.sbuf(TRN2, data=False) if space == "sbuf" else Memory.psum(TRN2, data=False)
    return [memory.allocate((128, 64), "f32", f"{space}{i}") for i in range(count)]


def values(count: int) -> list[View]:
    memory = Memory.hbm(1 << 30, data=False)
    return [memory.allocate((128, 64), "f32", f"value{i}") for i in range(count)]


def test_one_engine_runs_in_order_back_to_back():
    t = timeline()
    a, b, c = tiles(3)
    t.add("vector", 100, [a], [b], "x")
    t.add("vector", 50, [a], [c], "y")
    assert t.events == [("vector", "x", 0, 100, ""), ("vector", "y", 100, 150, "")]
    assert t.end == 150 + 10


def test_read_after_write():
    t = timeline()
    a, b, c, d = tiles(4)
    t.add("vector", 100, [], [a], "write")
    t.add("vector", 100, [a], [b], "same engine")  # after the pipeline: + latency
    t.add("scalar", 100, [a], [c], "other engine")  # + latency + semaphore
    t.add("gpsimd", 100, [d], [], "independent")
    assert [e[1:4] for e in t.events] == [
        ("write", 0, 100), ("same engine", 110, 210), ("other engine", 113, 213),
        ("independent", 0, 100),
    ]  # fmt: skip


def test_write_after_read_and_write_after_write():
    t = timeline()
    a, b, c = tiles(3)
    t.add("vector", 100, [a], [b], "reads a, writes b")
    t.add("scalar", 10, [c], [a], "overwrites a")  # the reader has ended: + semaphore
    t.add("gpsimd", 10, [], [b], "overwrites b")  # the writer has committed: + semaphore
    t.add("vector", 10, [], [b], "overwrites b again")
    assert [e[2:4] for e in t.events] == [(0, 100), (103, 113), (113, 123), (126, 136)]


def test_one_engine_overwrites_without_waiting():
    """Accumulation in PSUM: matmuls into one bank follow each other at full rate."""
    t = timeline()
    (bank,), (a, b) = tiles(1, "psum"), tiles(2)
    for step in range(3):
        t.add("tensor", 100, [a, b], [bank], str(step))
    assert [e[2:4] for e in t.events] == [(0, 100), (100, 200), (200, 300)]


def test_regions_are_compared_by_space_partitions_and_bytes():
    t = timeline()
    (a,), (p,) = tiles(1), tiles(1, "psum")
    t.add("vector", 100, [], [a[0:64, 0:32]], "write")
    t.add("scalar", 1, [a[0:64, 32:64]], [], "other bytes")
    t.add("gpsimd", 1, [a[64:128, 0:32]], [], "other partitions")
    t.add("tensor", 1, [p], [], "other space")
    t.add("sync", 1, [a[32:96, 31:33]], [], "overlaps")
    assert [e[2] for e in t.events] == [0, 0, 0, 0, 113]


def test_dma_start_is_pipelined():
    """A queue of transfers pays the start once; their consumers see each end a semaphore later."""
    t = timeline()
    a, b, c, d = tiles(4)
    x, y, z = values(3)
    t.add("dma", 50, [x], [a], "a", "load")
    t.add("dma", 50, [y], [b], "b", "load")
    t.add("vector", 5, [a, b], [c], "use")
    t.add("dma", 50, [c], [z], "c", "store")
    t.add("dma", 50, [x], [d], "d", "load")
    assert t.events == [
        ("dma", "a", 20, 70, "load"),
        ("dma", "b", 70, 120, "load"),
        ("vector", "use", 127, 132, ""),
        ("dma", "c", 165, 215, "store"),  # ready at 132 + 10 + 3, data 20 later
        ("dma", "d", 120, 220, "load"),  # 45 before the store and 5 after it
    ]


def test_transfers_use_what_earlier_ones_leave_idle():
    t = timeline(dma_start_ps=0)
    a, b, c, d = tiles(4)
    x, y = values(2)
    t.add("vector", 100, [], [a], "v")
    t.add("dma", 30, [a], [x], "store", "store")  # idle until 113
    t.add("dma", 80, [y], [b], "first", "load")
    t.add("dma", 50, [y], [c], "second", "load")  # 33 before the store, 17 after it
    t.add("dma", 10, [y], [d], "third", "load")
    assert [e[2:4] for e in t.events[1:]] == [(113, 143), (0, 80), (80, 160), (160, 170)]
    assert t.busy["dma"] == 170


def test_a_queue_triggers_in_order_as_descriptors_are_made():
    """One trigger in 30: the data of three transfers overlap, and a waiting one holds the rest."""
    t = Timeline(dma_start_ps=20, dma_dge_ps=30, dma_semaphore_ps=7, record=True)
    a, b, c, d, e = tiles(5)
    x, y = values(2)
    t.add("vector", 100, [], [e], "v")
    t.add("dma", 80, [x], [a], "a", "load", work=10)  # triggered at 0
    t.add("dma", 80, [x], [b], "b", "load", work=10)  # at 30
    t.add("dma", 80, [e], [y], "c", "load", work=10)  # at 100, when v has ended
    t.add("dma", 80, [x], [d], "d", "load", work=10)  # at 130
    t.add("dma", 80, [x], [c], "e", "other", work=10)  # at 0; the engines are taken from 20 to 30
    assert [event[2:4] for event in t.events[1:]] == [
        (20, 100), (50, 130), (120, 200), (150, 230), (30, 110),
    ]  # fmt: skip
    assert t.busy["dma"] == 50


def test_the_work_of_a_queue_is_done_in_order():
    """A transfer whose work lasts longer than making the next descriptors delays the next data."""
    t = Timeline(dma_start_ps=20, dma_dge_ps=30, record=True)
    a, b = tiles(2)
    (x,) = values(1)
    t.add("dma", 50, [x], [a], "a", "load", work=90)
    t.add("dma", 50, [x], [b], "b", "load", work=5)
    assert [event[2:4] for event in t.events] == [(20, 110), (110, 160)]


def test_an_instruction_starts_no_sooner_than_it_is_told():
    t = timeline()
    a, b = tiles(2)
    (x,) = values(1)
    t.add("vector", 10, [], [a], "v", after=40)
    t.add("dma", 10, [x], [b], "d", "load", after=100)
    assert [event[2:4] for event in t.events] == [(40, 50), (120, 130)]


def test_hbm_hazards():
    """Transfers to and from one HBM tensor wait for each other only where they overlap."""
    t = timeline()
    a, b, c, d = tiles(4)
    (x,) = values(1)
    t.add("dma", 50, [a], [x[:, 0:32]], "left", "store")
    t.add("dma", 50, [b], [x[:, 32:64]], "right", "store")
    t.add("dma", 50, [x[:, 32:64]], [c[:, 0:32]], "right again", "load")
    t.add("dma", 50, [x[:, 0:32]], [d[:, 0:32]], "left again", "other")
    assert [e[2:4] for e in t.events] == [(20, 70), (70, 120), (147, 197), (120, 220)]


def test_in_place_update_through_hbm_of_another_name():
    """A donated buffer: output and input are two tensors at one address."""
    memory = Memory.hbm(1 << 20, data=False)
    old = memory.adopt(None, (128, 64), "f32", "old", address=4096)
    new = memory.adopt(None, (128, 64), "f32", "new", address=4096)
    apart = memory.adopt(None, (128, 64), "f32", "apart", address=4096 + old.nbytes)
    a, b = tiles(2)
    t = timeline()
    t.add("dma", 50, [old], [a], "load", "load")
    t.add("dma", 50, [b], [new], "store", "store")
    t.add("dma", 50, [b], [apart], "elsewhere", "third")
    assert [e[2:4] for e in t.events] == [(20, 70), (97, 147), (70, 170)]


def test_drain_starts_afresh():
    t = timeline()
    a, b = tiles(2)
    t.add("vector", 100, [], [a], "v")
    assert t.drain() == 110
    t.add("scalar", 10, [a], [b], "s")
    t.add("dma", 50, [], [b[0:64]], "d", "load")
    assert [e[2:4] for e in t.events[1:]] == [(110, 120), (143, 193)]
    assert t.drain() == 200
    t.advance(1000)
    t.add("sync", 1)
    assert t.events[-1][2:4] == (1000, 1001)


def test_reset_forgets_everything():
    t = timeline()
    (a,) = tiles(1)
    t.add("vector", 100, [], [a], "v")
    t.reset()
    assert (t.end, t.serial, t.count, t.events) == (0, 0, 0, [])
    assert t.add("scalar", 5, [a], []) == (0, 5)


def test_bounds():
    t = timeline()
    for engine, duration in [("tensor", 5), ("vector", 2), ("dma", 4), ("tensor", 6)]:
        t.add(engine, duration)
    assert t.busy == {
        "tensor": 11, "vector": 2, "scalar": 0, "gpsimd": 0, "sync": 0, "dma": 4,
    }  # fmt: skip
    assert (t.overlapped, t.serial) == (11, 17)


def test_shared_ports_of_v2():
    """Vector and Scalar do not read PSUM at once on Trainium1; on Trainium2 they do."""
    trn1 = load_chip("trn1")
    for chip, expected in ((trn1, [(0, 100), (100, 150), (0, 70), (100, 130)]), (TRN2, None)):
        t = Timeline.of(chip, record=True)
        p, q = tiles(2, "psum")
        a, b, c, d = tiles(4)
        t.add("vector", 100, [p], [a])
        t.add("scalar", 50, [q], [b])  # the PSUM port is Vector's until 100
        t.add("tensor", 70, [c], [])  # has ports of its own
        t.add("gpsimd", 30, [d], [])  # the SBUF port is Vector's until 100
        apart = [(0, 100), (0, 50), (0, 70), (0, 30)]
        assert [e[2:4] for e in t.events] == (expected or apart)


def test_a_shared_port_is_used_when_it_is_idle():
    t = Timeline(ports=[("psum", ("vector", "scalar"))], record=True)
    p, q, r = tiles(3, "psum")
    (a,) = tiles(1)
    t.add("tensor", 200, [], [p])
    t.add("vector", 50, [p], [a])  # from 200 to 250
    t.add("scalar", 150, [q], [])  # before that
    t.add("scalar", 60, [r], [])  # 50 are left before it: too short
    assert [e[2:4] for e in t.events] == [(0, 200), (200, 250), (0, 150), (250, 310)]


def test_unknown_engine():
    with pytest.raises(BadInput, match="^engine: tensr is not valid.*nearest valid: tensor$"):
        timeline().add("tensr", 1)


def test_latencies_of_a_chip():
    t = Timeline.of(TRN2)
    a, b = tiles(2)
    t.add("scalar", 1000, [], [a])
    start, _ = t.add("vector", 1000, [a], [b])
    assert start == 1000 + TRN2.scalar_fixed_ps + TRN2.semaphore_ps


# ---- the rules, directly: every pair of instructions ---------------------------------------


def by_the_rules(program, t: Timeline) -> list[tuple[int, int]]:
    """Start and end from the rules: quadratic, DMA idle time picosecond by picosecond."""
    ran: list[tuple] = []
    taken: set[int] = set()
    for engine, duration, reads, writes, queue in program:
        dma = engine == "dma"
        start = 0
        for other, _, their_reads, their_writes, _, _, end in ran:
            commit = end + LATENCY.get(other, 0)
            alone = other == engine and not dma
            signal = DMA_SEMAPHORE if other == "dma" else SEMAPHORE
            if any(a.overlaps(b) for a in reads for b in their_writes):
                start = max(start, commit if alone else commit + signal)
            if not alone and any(a.overlaps(b) for a in writes for b in their_writes):
                start = max(start, commit + signal)
            if not alone and any(a.overlaps(b) for a in writes for b in their_reads):
                start = max(start, end + signal)
        if not dma:
            start = max([start, *(r[6] for r in ran if r[0] == engine)])
            end = start + duration
        else:
            start += DMA_START
            start = max([start, *(r[6] for r in ran if r[0] == "dma" and r[4] == queue)])
            mine: list[int] = []
            moment = start
            while len(mine) < duration:
                if moment not in taken:
                    mine.append(moment)
                moment += 1
            taken.update(mine)
            start, end = mine[0], mine[-1] + 1
        ran.append((engine, duration, reads, writes, queue, start, end))
    return [(r[5], r[6]) for r in ran]


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_any_program_follows_the_rules(data):
    on_chip = tiles(2) + tiles(1, "psum")
    in_hbm = values(2)

    def operand(hbm: bool) -> View:
        view = data.draw(st.sampled_from(on_chip + in_hbm if hbm else on_chip))
        first, last = sorted(data.draw(st.lists(st.integers(0, 3), min_size=2, max_size=2)))
        low, high = sorted(data.draw(st.lists(st.integers(0, 3), min_size=2, max_size=2)))
        return view[32 * first : 32 * last + 32, 16 * low : 16 * high + 16]

    t = timeline()
    program = []
    for _ in range(data.draw(st.integers(1, 25))):
        engine = data.draw(st.sampled_from(ENGINES))
        hbm = engine == "dma"
        reads = [operand(hbm) for _ in range(data.draw(st.integers(0, 2)))]
        writes = [operand(hbm) for _ in range(data.draw(st.integers(0, 1)))]
        queue = data.draw(st.sampled_from(["load", "store"])) if hbm else ""
        program.append((engine, data.draw(st.integers(1, 60)), reads, writes, queue))
    found = [t.add(e, d, r, w, queue=q) for e, d, r, w, q in program]
    assert found == by_the_rules(program, t)
    assert t.overlapped <= t.end and t.serial == sum(step[1] for step in program)


# ---- steady loops --------------------------------------------------------------------------


def pipeline_step(t: Timeline, i: int, buffers: dict[str, list[View]], durations) -> None:
    load, tensor, vector, store = durations
    tile, sums, out = (buffers[k][i % len(buffers[k])] for k in ("in", "psum", "out"))
    x, y = buffers["hbm"]
    t.add("dma", load, [x], [tile], "load", "load")
    t.add("tensor", tensor, [tile], [sums], "matmul")
    t.add("vector", vector, [sums], [out], "copy")
    t.add("dma", store, [out], [y[i % 128 : i % 128 + 1]], "store", "store")


def buffers_of(count: int) -> dict[str, list[View]]:
    sbuf = tiles(2 * count)
    return {"in": sbuf[:count], "out": sbuf[count:], "psum": tiles(count, "psum"), "hbm": values(2)}


@settings(deadline=None, max_examples=25)
@given(
    st.integers(1, 3),
    st.tuples(*[st.integers(1, 90)] * 4),
    st.integers(0, 40),
)
def test_fast_forward_equals_running_on(buffers, durations, times):
    """A steady pipeline skipped ahead ends, to the picosecond, as the one that ran throughout."""
    whole, skipping = timeline(), timeline()
    skipping.watching = True
    marks = [skipping.mark()]
    where = buffers_of(buffers)
    done, period = 0, None
    while period is None:
        assert done < 300, "a pipeline of constant durations must become steady"
        for _ in range(buffers):
            pipeline_step(skipping, done, where, durations)
            done += 1
        marks.append(skipping.mark())
        period = skipping.steady(marks)
    skipping.fast_forward(marks[-1 - period[0]], period[1], times)
    times *= period[0]
    for i in range(done, done + 2 * buffers):  # epilogue: some more steps
        pipeline_step(skipping, i, where, durations)
    for i in range(done + times * buffers + 2 * buffers):
        pipeline_step(whole, i, where, durations)
    assert skipping.end == whole.end
    assert skipping.busy == whole.busy
    assert skipping.count == whole.count


def test_periods_that_differ_do_not_repeat():
    t = timeline()
    t.watching = True
    marks = [t.mark()]
    for duration in (10, 10, 11):
        t.add("vector", duration)
        marks.append(t.mark())
    assert t.repeats(marks[:3]) == 10
    assert t.repeats(marks) is None
    assert t.repeats(marks[:2]) is None
