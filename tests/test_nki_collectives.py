"""`nki.collectives` on many ranks: values against numpy, times against the collectives' own."""

# pyright: reportIndexIssue=false
# What `nki.jit` returns is not known before run time.
import threading
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from trnsim.cluster.collective import instance_site
from trnsim.cluster.communicator import Communicator
from trnsim.cluster.kernel_execution import Ranked
from trnsim.cluster.kernel_ranks import RanksResult, simulate_ranks
from trnsim.device.chip import load_chip
from trnsim.device.errors import (
    BadInput,
    CollectiveMismatch,
    DeadlineExceeded,
    IllegalInstruction,
    TrnsimError,
)
from trnsim.device.nki import simulate
from trnsim.device.nki.errors import DeadlockError
from trnsim.device.nki.retime import finish

from . import nki_collective_kernels as kernels
from .nki_collective_kernels import nki, nl

BIG, CHIP = "trn2.48xlarge", load_chip("trn2")
BF16 = ml_dtypes.bfloat16
HERE = r".*nki_collective_kernels.py:\d+"
PAIRS = [[0, 2], [3, 1]]


def floats(*shape, seed=0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def run(kernel, x, /, *rest, ranks=None, lnc=1, instance=BIG, **options) -> RanksResult:
    """Rank r gets x[r], and the rest."""
    many = len(x) if ranks is None else ranks
    return simulate_ranks(
        kernel, lambda r: (x[r], *rest), ranks=many, lnc=lnc, instance=instance, **options
    )


def event(result: RanksResult, rank: int, core: int = 0, number: int = 0):
    """The rank's collective of that number."""
    found = [e for e in result.ranks[rank].cores[core].events if e.engine == "collective"]
    return found[number]


# ---- values ----------------------------------------------------------------------------------


@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("groups", [[[0, 1, 2, 3]], PAIRS])
def test_values_are_those_of_the_group(groups, dtype, lnc):
    x = floats(4, 8, 6).astype(dtype)
    members = [next(g for g in groups if r in g) for r in range(4)]
    n, close = len(groups[0]), 5e-2 if dtype is BF16 else 1e-5
    summed = run(kernels.all_reduce, x, groups, lnc=lnc).outputs
    largest = run(kernels.all_reduce, x, groups, "maximum", lnc=lnc).outputs
    gathered = run(kernels.all_gather, x, groups, lnc=lnc).outputs
    scattered = run(kernels.reduce_scatter, x, groups, "minimum", lnc=lnc).outputs
    exchanged = run(kernels.all_to_all, x, groups, lnc=lnc).outputs
    for rank, group in enumerate(members):
        me, wide = group.index(rank), x[group].astype(np.float32)
        rows = slice(me * 8 // n, (me + 1) * 8 // n)
        np.testing.assert_allclose(summed[rank].astype("f"), wide.sum(0), atol=close)
        assert (largest[rank] == x[group].max(0)).all()
        assert (gathered[rank] == np.concatenate(x[group])).all()
        assert (scattered[rank] == x[group].min(0)[rows]).all()
        assert (exchanged[rank] == np.concatenate([x[r][rows] for r in group])).all()


def test_bits_are_those_of_the_schedule():
    """The order of sums is the algorithm's, and each is rounded: as the communicator has it."""
    x = floats(8, 64, 32).astype(BF16)
    done = Communicator.on(BIG, lnc=1, ranks=range(8)).all_reduce(list(x))
    result = run(kernels.all_reduce, x, [list(range(8))])
    assert [o.tobytes() for o in result.outputs] == [v.tobytes() for v in done]
    assert result.outputs[0].tobytes() != x.astype("f").sum(0).astype(BF16).tobytes()


@pytest.mark.parametrize("lnc", [1, 2])
def test_collectives_in_sbuf_are_each_cores_own(lnc):
    x, groups = floats(4, 64, 8), [[0, 1, 2, 3]]
    halves = np.split(x, lnc, axis=1)  # by core
    outputs = run(kernels.in_sbuf, x, groups, "all_gather", 1, lnc=lnc).outputs
    wide = np.concatenate([np.concatenate(half, axis=1) for half in halves])
    assert all((out == wide).all() for out in outputs)
    outputs = run(kernels.in_sbuf, x[:, : 32 * lnc], groups, "all_gather", lnc=lnc).outputs
    tall = np.concatenate([half.reshape(-1, 8) for half in np.split(x[:, : 32 * lnc], lnc, axis=1)])
    assert all((out == tall).all() for out in outputs)
    outputs = run(kernels.in_sbuf, x, groups, "all_reduce", lnc=lnc).outputs
    assert all(np.allclose(out, x.sum(0), atol=1e-5) for out in outputs)
    result = run(kernels.in_sbuf, x, groups, "reduce_scatter", lnc=lnc)
    for rank, out in enumerate(result.outputs):
        parts = [np.split(half.sum(0), 4)[rank] for half in halves]
        np.testing.assert_allclose(out, np.concatenate(parts), atol=1e-5)
    assert [use.core for use in result.collectives] == ([None] if lnc == 1 else [0, 1])
    assert all(use.on_chip for use in result.collectives)


@pytest.mark.parametrize("what", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_several_tensors_travel_in_one_call(what):
    a, b, groups = floats(4, 8, 3), floats(4, 12, 5, seed=1), [[0, 1], [2, 3]]
    result = simulate_ranks(
        kernels.coalesced, lambda r: (a[r], b[r], groups, what), ranks=4, instance=BIG
    )
    alone = getattr(kernels, what)
    for number, x in enumerate((a, b)):
        single = run(alone, x, groups)
        assert all(
            (out[number] == one).all()
            for out, one in zip(result.outputs, single.outputs, strict=True)
        )
        assert len(result.collectives) == 1
        assert result.collectives[0].nbytes > single.collectives[0].nbytes


def test_a_permute_leaves_who_is_no_target_alone():
    x = floats(4, 8, 6)
    outputs = run(kernels.permute, x, [(0, 1), (1, 0), (2, 3)]).outputs
    for out, source in zip(outputs, (1, 0, 2, 2), strict=True):
        assert (out == x[source]).all()


def test_rank_id_selects():
    table = floats(8, 16)
    result = simulate_ranks(kernels.selected, (table,), ranks=8, instance=BIG)
    assert all((out == table[r]).all() for r, out in enumerate(result.outputs))


@pytest.mark.parametrize(
    "ranks, lnc, channels, on_chip, instance",
    [(4, 1, 1, False, BIG), (8, 1, 2, True, BIG), (4, 2, 4, False, "trn2.3xlarge")],
)
def test_data_go_round_the_ring(ranks, lnc, channels, on_chip, instance):
    """After each implicit permute the data are of the rank that the kernel is told."""
    x = floats(ranks, 8, 4)
    groups = [list(range(ranks))]
    result = run(
        kernels.ring_gather,
        x,
        groups,
        channels,
        on_chip,
        lnc=lnc,
        hazards="report",
        instance=instance,
    )  # both cores of a pair do the same
    for out in result.outputs:
        assert (out.reshape(x.shape) == x).all()
    assert len({use.channel for use in result.collectives}) == channels


def test_rings_of_channels_differ_where_links_do():
    groups = [list(range(64))]

    @nki.jit
    def told(x):
        whose = kernels.ncc.collective_permute_implicit_current_processing_rank_id
        return tuple(int(whose(1, groups, c)) for c in range(4))

    result = simulate_ranks(told, (floats(1, 1),), ranks=64, lnc=2, instance=BIG)
    before = np.array(result.outputs)  # [rank, channel]
    assert all(sorted(before[:, c]) == list(range(64)) for c in range(4))
    assert len({tuple(before[:, c]) for c in range(4)}) == 4
    backwards = before[before[:, 0], 2]
    assert backwards.tolist() == list(range(64))  # channel 2 is channel 0 the other way


def test_a_reduced_permute_sums_at_its_source():
    x = floats(8, 16, 4)
    result = run(kernels.ring_reduce, x, [list(range(8))])
    assert sorted(whose for _, whose in result.outputs) == list(range(8))
    for out, whose in result.outputs:
        np.testing.assert_array_equal(out, x[whose] + 2 * x[whose])
    plain = run(kernels.ring_gather, x, [list(range(8))])
    first = result.collectives[0]
    assert first.duration == plain.collectives[0].duration
    assert first.name == "collective_permute_implicit_reduce"


# ---- counts at run time ----------------------------------------------------------------------


def ragged_data(nodes: int, counts: np.ndarray, size: int) -> list[Ranked]:
    """Arguments of `ragged` for ranks of which rank r sends counts[r, s] elements to rank s."""
    made = []
    for rank in range(nodes):
        starts = np.concatenate([[0], np.cumsum(counts[rank])[:-1]])
        unset = np.full(nodes, 9)
        table = np.array([counts[rank], starts, unset], np.uint32)
        x = np.arange(size, dtype=np.float32) + 100 * rank
        groups = [list(range(nodes))]
        made.append(Ranked((x, table, groups), {"what": "all_to_all_v", "out_size": 4 * nodes}))
    return made


@pytest.mark.parametrize("in_sbuf", [False, True])
@pytest.mark.parametrize("known", [False, True])
def test_all_to_all_v_takes_counts_from_a_tensor(in_sbuf, known):
    """One rank on each of 3 nodes; slot s of dst begins with what rank s sends."""
    counts = np.array([[1, 2, 0], [3, 0, 4], [2, 1, 1]])
    starts = [Ranked(s.args, s.kwargs | {"in_sbuf": in_sbuf, "known": known})
              for s in ragged_data(3, counts, 12)]  # fmt: skip
    result = simulate_ranks(
        kernels.ragged, starts, ranks=3, nodes=3, instance=BIG, lnc=2, hazards="report"
    )
    for rank, (out, after) in enumerate(result.outputs):
        wanted = np.zeros((3, 4), np.float32)
        for source in range(3):
            first = int(counts[source, :rank].sum())
            piece = 100 * source + first + np.arange(counts[source, rank])
            wanted[source, : counts[source, rank]] = piece
        np.testing.assert_array_equal(out.reshape(3, 4), wanted)
        assert after[2].tolist() == ([9, 9, 9] if known else counts[:, rank].tolist())


def test_all_to_all_v_puts_pieces_where_it_is_told_on_a_switch():
    """All 4 ranks of each of two chips of a Trn3 server, at LNC=2."""
    n = 8
    groups, table = [list(range(n))], np.zeros((4, n), np.uint32)
    table[0], table[1], table[3] = 1, np.arange(n), np.arange(n)[::-1]
    x = [np.arange(n, dtype=np.float32) + 10 * r for r in range(n)]
    options = {"what": "all_to_all_v", "out_size": n, "placed": True}
    starts = [Ranked((x[r], table, groups), options) for r in range(n)]
    machine = {"ranks": n, "instance": "trn3-gen1-ultraserver", "lnc": 2, "hazards": "report"}
    result = simulate_ranks(kernels.ragged, starts, **machine)
    for rank, (out, _) in enumerate(result.outputs):
        assert out[0].tolist() == [10.0 * source + rank for source in range(n)][::-1]


def test_all_gather_v_gives_everybody_one_piece_of_each():
    groups, sent = [[0, 1, 2, 3]], [3, 0, 2, 1]
    x = [np.arange(6, dtype=np.float32) + 10 * r for r in range(4)]
    tables = [np.full((3, 4), 7, np.uint32) for _ in sent]
    for rank, table in enumerate(tables):
        table[0, 0], table[1, 0] = sent[rank], 1
    starts = [
        Ranked((x[r], tables[r], groups), {"what": "all_gather_v", "out_size": 12})
        for r in range(4)
    ]
    result = simulate_ranks(kernels.ragged, starts, ranks=4, instance=BIG, lnc=2, hazards="report")
    wanted = np.zeros((4, 3), np.float32)
    for rank, count in enumerate(sent):
        wanted[rank, :count] = x[rank][1 : 1 + count]
    for out, after in result.outputs:
        assert (out.reshape(4, 3) == wanted).all() and after[2].tolist() == sent


@pytest.mark.parametrize(
    "change, machine, message",
    [
        ({}, {"ranks": 4}, r"group \[0, 1, 2, 3\]; allowed on trn2.48xlarge: the ranks of"),
        ({"placed": True}, {}, "has_rdispls needs a NeuronSwitch fabric; trn2 has none"),
        ({"what": "all_gather_v"}, {}, r"group of 3 ranks at LNC=2.*allowed: the 4 ranks of"),
        ({"out_size": 6}, {}, "rank 1 sends 3 elements; a slot of dst has 2"),
        ({"size": 3}, {}, "send_count 2 at send_displ 2 leaves the tensor of 3 elements"),
        ({"columns": 4}, {}, r"metadata_tensor is \[3, 4\]; it has to be \[3, 3\]"),
    ],
)  # fmt: skip
def test_counts_that_the_documents_refuse(change, machine, message):
    n = machine.get("ranks", 3)
    counts = np.full((n, n), 2)
    counts[1] = 3
    starts = ragged_data(n, counts, 12)
    for number, start in enumerate(starts):
        x, table, groups = start.args
        x = x[: change.get("size", 12)]
        table = np.resize(table, (3, change.get("columns", n)))
        kept = {k: v for k, v in change.items() if k not in ("size", "columns")}
        starts[number] = Ranked((x, table, groups), start.kwargs | kept)
    options = {"ranks": n, "nodes": 3, "instance": BIG, "lnc": 2, "hazards": "report"}
    options |= {"nodes": 1} if machine else {}
    with pytest.raises(IllegalInstruction, match=message):
        simulate_ranks(kernels.ragged, starts, **options)


# ---- time ------------------------------------------------------------------------------------


@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize("what", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_a_collective_takes_what_the_fabric_takes(what, lnc):
    x = floats(16, 128, 64)
    result = run(getattr(kernels, what), x, [list(range(16))], lnc=lnc)
    done = getattr(Communicator.on(BIG, lnc=lnc, ranks=range(16)), what)(list(x))
    (use,) = result.collectives
    assert (use.duration, use.algorithm) == (done.duration_ps, done.algorithm)
    assert (use.busbw, use.bound) == (done.priced.busbw, done.priced.bound_busbw)
    for rank in range(16):
        mine = event(result, rank)
        assert mine.end - mine.start == done.end_ps[rank]
        assert [e for e in result.ranks[rank].events if e.engine == "collective"][-1] == mine


def test_in_sbuf_no_stack_of_hbm_is_shared(monkeypatch):
    """With HBM so slow that it is what a collective waits for, one in SBUF does not wait."""

    def slow(*args, **options):
        site = instance_site(*args, **options)
        memory = site.overheads.memory
        assert memory is not None
        less = replace(memory, bytes_per_s=memory.bytes_per_s // 20)
        return replace(site, overheads=replace(site.overheads, memory=less))

    x, groups = floats(2, 128, 512), [[0, 1]]
    usual = run(kernels.all_reduce, x, groups).collectives[0]
    monkeypatch.setattr("trnsim.cluster.kernel_fabric.instance_site", slow)
    through = run(kernels.all_reduce, x, groups).collectives[0]
    beside = run(kernels.in_sbuf, x, groups, "all_reduce").collectives[0]
    assert "HBM stack 0" in through.limited_by and through.duration > usual.duration
    assert beside.duration == usual.duration and "HBM" not in beside.limited_by


def test_a_late_rank_holds_up_its_group_and_no_other():
    x, groups = floats(4, 128, 64), [[0, 1], [2, 3]]
    early, result = (run(kernels.late_rank, x, groups, 3, work) for work in (0, 50))
    ends = [[event(r, rank).end for rank in range(4)] for r in (early, result)]
    late = event(result, 3).start - event(early, 3).start
    assert late > 0 and event(result, 2).start == event(early, 2).start
    assert ends[1][:2] == ends[0][:2]
    assert [b - a for a, b in zip(ends[0][2:], ends[1][2:], strict=True)] == [late, late]
    assert result.collectives[0].late == 3 and result.slowest == 2


def test_engines_wait_only_for_what_they_read():
    x = floats(2, 128, 64)
    free, waiting = (run(kernels.overlapped, x, [[0, 1]], use) for use in (False, True))
    for result in (free, waiting):
        add = next(e for e in result.ranks[0].events if e.engine == "vector")
        mine = event(result, 0)
        after = mine.end + CHIP.dma_semaphore_ps
        assert add.start == (after if result is waiting else mine.start)
    assert free.ranks[0].time < waiting.ranks[0].time
    np.testing.assert_allclose(waiting.outputs[0], x[0] + x.sum(0), atol=1e-5)


def test_a_stream_works_through_its_collectives_and_channels_share_links():
    x, groups = floats(2, 128, 8192), [[0, 1]]

    @nki.jit
    def twice(x):
        tiles = [nl.load(x), nl.load(x)]
        for tile in tiles:
            kernels.ncc.all_reduce([tile], [nl.empty_like(tile)], groups, nl.add)

    result = run(twice, x)
    first, second = event(result, 0), event(result, 0, number=1)
    assert second.start == first.end
    assert second.end - second.start == first.end - first.start
    # Two channels of one ring have half of the rate each: twice the bytes in one channel.
    split, whole = (
        run(kernels.ring_gather, x, groups, channels, True).collectives for channels in (2, 1)
    )
    assert [use.channel for use in split[:2]] == [0, 1]
    assert split[0].limited_by == whole[0].limited_by
    assert abs(split[0].duration - whole[0].duration) < whole[0].duration // 100
    assert split[0].nbytes * 2 == whole[0].nbytes


def test_the_cores_of_a_pair_share_what_lies_between_the_chips():
    """Rank 0 and 4 are on different chips: both cores' collectives cross the same links."""
    x = floats(8, 256, 2048)
    groups = [[0, 4], [1, 5], [2, 6], [3, 7]]
    pair = run(kernels.in_sbuf, x, groups, "all_reduce", lnc=2).collectives
    one = run(kernels.in_sbuf, x[:, :128], groups, "all_reduce", lnc=1, ranks=8).collectives
    assert [use.core for use in pair] == [0, 1]
    assert pair[0].duration == pair[1].duration > one[0].duration


def test_one_rank_alone_needs_no_instance():
    x = floats(128, 16)
    for kernel in (kernels.all_reduce, kernels.all_gather, kernels.all_to_all):
        for made in (kernel, kernel[2]):
            result = simulate(made, x, [[0]])
            np.testing.assert_array_equal(result.output, x)
            assert [e.engine for e in result.cores[0].events].count("collective") == 1
            on = simulate_ranks(made, (x, [[0]]), ranks=1, instance=BIG)
            assert on.ranks[0].time == on.time == result.time


@pytest.mark.parametrize("lnc", [1, 2])
def test_without_values_the_times_are_the_same(lnc):
    x, groups = floats(8, 16, 8), [list(range(8))]
    for kernel, *rest in (
        (kernels.all_reduce, groups),
        (kernels.in_sbuf, groups, "all_gather", 1),
        (kernels.ring_gather, groups, 2, True),
        (kernels.ring_reduce, groups),
        (kernels.late_rank, groups, 3, 20),
    ):
        values, times = (
            run(kernel, x, *rest, lnc=lnc, data=data, hazards="report") for data in (True, False)
        )
        assert times.collectives == values.collectives
        assert [r.cores for r in times.ranks] == [r.cores for r in values.ranks]
    with pytest.raises(BadInput, match="counts of all_to_all_v: unknown is not valid; allowed: a"):
        simulate_ranks(
            kernels.ragged, ragged_data(3, np.ones((3, 3), int), 12), ranks=3, nodes=3,
            instance=BIG, data=False,
        )  # fmt: skip


@pytest.mark.parametrize("lnc", [1, 2])
def test_a_trace_that_is_timed_again_gives_the_same_times(monkeypatch, lnc):
    x, groups = floats(4, 16, 8), [[0, 1, 2, 3]]
    first = finish
    for kernel, *rest in (
        (kernels.all_reduce, groups),
        (kernels.in_sbuf, groups, "all_gather", 1),
        (kernels.ring_gather, groups, 2, False),
        (kernels.ring_reduce, groups),
        (kernels.late_rank, groups, 3, 20),
    ):
        runs = []
        for again in (False, True):
            monkeypatch.setattr(
                "trnsim.cluster.kernel_execution.finish",
                lambda *args, again=again: first(*args) or again,
            )
            runs.append(run(kernel, x, *rest, lnc=lnc, hazards="report"))
        assert runs[0].collectives == runs[1].collectives
        assert [r.cores for r in runs[0].ranks] == [r.cores for r in runs[1].ranks]
        pairs = zip(runs[0].outputs, runs[1].outputs, strict=True)
        assert all(np.array_equal(np.asarray(a[0]), np.asarray(b[0])) for a, b in pairs)


@nki.jit
def crowded(x, groups):
    """Tensors that fit SBUF by their uses, not by how long Python holds them; a collective each."""
    held, total = [], nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    for _ in range(6):
        tile = nl.ndarray((128, 12288), dtype=nl.float32, buffer=nl.sbuf)
        kernels.nisa.dma_copy(dst=tile[:, 0 : x.shape[1]], src=x)
        result = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
        kernels.ncc.all_reduce([tile[:, 0 : x.shape[1]]], [result], groups, nl.add)
        kernels.nisa.dma_copy(dst=total, src=result)
        held.append(tile)
    return total


def test_tensors_that_do_not_all_fit_are_laid_out_again_on_all_ranks():
    """A tile's place is taken by a later one, whose load waits for the tile's collective."""
    x = floats(2, 128, 64)
    result = run(crowded, x, [[0, 1]])
    assert result.ranks[0].memory.peak_sbuf <= CHIP.sbuf_partition_bytes
    np.testing.assert_allclose(result.outputs[0], x.sum(0), atol=1e-5)
    loads = [e for e in result.ranks[0].events if e.queue == "load"]
    ends = [event(result, 0, number=number).end for number in range(6)]
    assert [use.end for use in result.collectives] == ends
    assert loads[3].start < ends[0] < loads[-1].start


def test_runs_are_the_same_each_time_and_leave_no_thread():
    x, before = floats(8, 16, 8), threading.active_count()
    runs = [run(kernels.in_sbuf, x, [list(range(8))], "all_gather", 1, lnc=2) for _ in range(3)]
    for other in runs[1:]:
        assert other.collectives == runs[0].collectives
        assert [r.cores for r in other.ranks] == [r.cores for r in runs[0].ranks]
    with pytest.raises(CollectiveMismatch):
        run(kernels.differing, x, [list(range(8))], "op")
    assert threading.active_count() == before


# ---- ranks that differ -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "what, error, message",
    [
        ("dtype", CollectiveMismatch, r"different collectives \(dtype f32 and bf16\)"),
        ("count", CollectiveMismatch, r"different collectives \(counts \(512,\) and \(256,\)\)"),
        ("kind", CollectiveMismatch, r"\(name all_reduce and all_to_all\)"),
        ("order", CollectiveMismatch, r"\(name all_reduce and all_to_all\)"),
        ("op", CollectiveMismatch, r"\(reduction add and maximum\)"),
        ("groups", CollectiveMismatch, r"\(groups .*\(2, 3\)\) and \(\(0, 1, 2, 3\),\)\)"),
        ("space", CollectiveMismatch, r"\(on_chip False and True\)"),
        ("early", DeadlockError, r"ranks 0, 2, 3: waits in all_reduce add .*; rank 1: has ended"),
        ("late", DeadlockError, r"rank 0: has ended; rank 1: waits in|ranks 0, 2, 3: has ended"),
    ],
)  # fmt: skip
def test_ranks_that_differ_are_one_error_with_ranks_calls_and_lines(what, error, message):
    with pytest.raises(error, match=message) as caught:
        run(kernels.differing, floats(4, 64, 8), [[0, 1], [2, 3]], what)
    text = str(caught.value)
    assert "\n" not in text and "nki_collective_kernels.py:" in text
    assert "rank 1" in text or "ranks 0" in text


def test_a_pair_that_does_not_come_together_is_named():
    with pytest.raises(
        DeadlockError,
        match=rf"^rank 0: {HERE}: core 0 waits in all_reduce add of f32\[512\] in HBM on "
        rf"\[0, 1\] at {HERE}; core 1 waits in core_barrier at {HERE}",
    ):
        run(kernels.one_core_only, floats(2, 64, 8), [[0, 1]], lnc=2)


def test_a_rank_that_does_not_come_back_ends_at_the_deadline():
    @nki.jit
    def endless(x):
        halt = threading.Event()
        if int(kernels.ncc.rank_id()) == 1:
            halt.wait(5)

    with pytest.raises(DeadlineExceeded, match="core 0 of the kernel still runs at the deadline"):
        run(endless, floats(2, 8, 8), deadline=0.2)


@pytest.mark.parametrize(
    "what, message",
    [
        ("psum", "tensors are in psum; allowed: all in HBM, or all in SBUF"),
        ("mixed", "tensors are in sbuf, shared_hbm; allowed: all in HBM, or all in SBUF"),
        ("dtypes", "tensors are of bfloat16, float32; allowed: one"),
        ("several", "several tensors in SBUF; coalescing is for tensors in HBM"),
        ("axes", r"a tensor in SBUF has several free axes; allowed: \[P, F\]"),
        ("op", "op is multiply; allowed: add, minimum, maximum"),
        ("sizes", r"src \[8, 8\] and dst \[8, 8\] do not fit in a group of 2: dst has to have 2/1"),
        ("dim", "collective_dim is 1; allowed: 0"),
        ("scatter dim", "collective_dim is 1; allowed: 0"),
        ("sbuf", "tensors are in SBUF; allowed: HBM"),
        ("indivisible", "axis 0 of .* is no multiple of the group's 2 ranks"),
        ("permutes", "2 tensors in a list; allowed: 1"),
        ("channels", r"channel_ids is \[1\]; allowed: 0, 1, ... in order"),
        ("many", "3 channels; allowed: 4 in groups that cover a node, 2 in others"),
        ("lists", "2 channel_ids for lists of 1, 1 channels"),
        ("priority", "priority needs NeuronCore-v4 or later, not trn2"),
        ("tensor", "srcs: .* is not valid; allowed: a list of one tensor or more"),
        ("group", "replica_group: 3 is not valid; allowed: a list of lists of ranks"),
        ("overlap", "rank of replica_group: 1 is not valid; allowed: each rank once"),
        ("outside", "rank of replica_group: 99 is not valid; allowed: 0 to 1"),
        ("stranger", r"rank 0 calls a collective of \[1\]"),
        ("unwritten", "is read and was never written"),
        ("gather_v", "group of 2 ranks at LNC=1.*allowed: the 4 ranks of a chip at LNC=2"),
        ("all_to_all_v", r"metadata_tensor is \[8, 8\]; it has to be \[3, 2\]"),
    ],
)
def test_what_the_documents_refuse_is_one_line(what, message):
    with pytest.raises(TrnsimError, match=rf"^rank 0: {HERE}: .*{message}"):
        run(kernels.refused, floats(2, 8, 8), [[0, 1]], what)


def test_an_argument_as_an_operand_is_noted():
    @nki.jit
    def direct(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        kernels.ncc.all_reduce([x], [out], [[0, 1]], nl.add)
        return out

    x = floats(2, 8, 8)
    result = run(direct, x)
    np.testing.assert_allclose(result.outputs[1], x.sum(0), rtol=1e-6)
    assert "compiler refuses a kernel's argument" in next(iter(result.ranks[0].findings.values()))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"instance": None}, "instance: none is not valid; allowed: an instance for several"),
        ({"ranks": 129}, "ranks: 129 is not valid; allowed: 1 to 128 ranks on trn2.48xlarge"),
        ({"ranks": 3, "nodes": 2}, "ranks: 3 is not valid; allowed: a multiple of the 2 nodes"),
        ({"lnc": 3}, "LNC: 3 is not valid; allowed: 1 or 2"),
        ({"chip": "trn1"}, "chip: trn1 is not valid; allowed: trn.*2: that of trn2.48xlarge"),
        ({"instance": "trn2.49xlarge"}, "nearest valid: trn2.48xlarge"),
        ({"inputs": [(1,)]}, "inputs: a list of 1 is not valid; allowed: one for each of 2 ranks"),
        ({"inputs": 7}, "inputs: int is not valid"),
        ({"hazards": "no"}, "hazards: no is not valid"),
    ],
)
def test_machines_and_inputs_that_do_not_fit(options, message):
    given = {"inputs": (floats(8, 8), [[0, 1]]), "ranks": 2, "instance": BIG} | options
    with pytest.raises(BadInput, match=message):
        simulate_ranks(kernels.all_reduce, given.pop("inputs"), **given)
