"""Every algorithm does its collective, and a changed schedule is caught."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trnsim.collectives.algorithms import hierarchical, mesh, pairwise, rdh, ring
from trnsim.collectives.schedule import Block, Collective, Schedule, block
from trnsim.collectives.verify import WrongSchedule, verify
from trnsim.device.errors import BadInput

from .collective_reference import collective

ALGORITHMS = {"ring": ring, "mesh": mesh, "rdh": rdh}


def unrolled(schedule: Schedule) -> list[Block]:
    """The rounds as blocks of their own."""
    return [
        replace(b, base=b.first(k), step=np.zeros_like(b.step), count=1)
        for b, k in schedule.each_round()
    ]


@pytest.mark.parametrize("module", [ring, rdh])
@given(st.integers(1, 11).flatmap(lambda n: st.permutations(range(n))))
@settings(max_examples=20, deadline=None)
def test_ranks_may_play_their_parts_in_any_order(module, order: list[int]) -> None:
    for kind in module.KINDS:
        asked = collective(kind, len(order), root=len(order) // 2)
        verify(asked, module.schedule(asked, order))


def test_an_order_with_a_rank_twice_is_refused() -> None:
    with pytest.raises(
        BadInput, match="^order: .0, 0, 2. is not valid; allowed: each of 0..2 once"
    ):
        ring.schedule(collective("all_reduce", 3), [0, 0, 2])


def test_a_ring_stores_its_pattern_once() -> None:
    schedule = ring.schedule(collective("all_reduce", 4096))
    assert [b.transfers for b in schedule.blocks] == [4096, 4096]
    assert schedule.rounds == 2 * 4095


def test_rdh_rounds_are_logarithmic() -> None:
    for n, rounds in [(8, 6), (9, 8), (12, 8), (16, 8)]:  # 2 log2 p, and 2 for folding
        assert rdh.schedule(collective("all_reduce", n)).rounds == rounds


def test_hierarchical_refuses_uneven_nodes_and_unknown_steps() -> None:
    with pytest.raises(BadInput, match="^ranks per node: node 0: 2, node 7: 1 is not valid"):
        hierarchical.places_of([0, 0, 7])
    asked = collective("all_reduce", 4)
    with pytest.raises(BadInput, match="^inter step of algorithm hierarchical: tree is not valid"):
        hierarchical.schedule(asked, np.arange(4).reshape(2, 2), "ring", "tree")
    with pytest.raises(BadInput, match="^collective of algorithm hierarchical: scatter"):
        hierarchical.schedule(collective("scatter", 4), np.arange(4).reshape(2, 2))
    with pytest.raises(BadInput, match="^stages of algorithm hierarchical: 4 is not valid"):
        hierarchical.schedule(asked, np.arange(4).reshape(2, 2), stages=4)


FIELDS = ("src", "dst", "base", "span", "offset", "step", "reduce", "channel")


@pytest.mark.parametrize("name", ["ring", "mesh", "rdh"])
def test_dropping_any_transfer_is_caught(name: str) -> None:
    asked = collective("all_reduce", 6)
    schedule = ALGORITHMS[name].schedule(asked)
    for number, old in enumerate(blocks := unrolled(schedule)):
        for row in range(old.transfers):
            columns = {f: np.delete(getattr(old, f), row) for f in FIELDS}
            changed = (*blocks[:number], replace(old, **columns), *blocks[number + 1 :])
            with pytest.raises(WrongSchedule, match="rank . .*chunk . "):
                verify(asked, replace(schedule, blocks=changed))


def test_a_wrong_step_of_an_all_to_all_is_named() -> None:  # U12
    asked = collective("all_to_all", 4)
    schedule = pairwise.schedule(asked)
    first = schedule.blocks[0]
    base = first.base.copy()
    base[2] = 2 * 4 + 1  # rank 2 sends to rank 3 what is for rank 1
    wrong = replace(schedule, blocks=(replace(first, base=base), *schedule.blocks[1:]))
    message = (
        "^all_to_all of 4 ranks by pairwise: rank 3 ends with chunk 11 wrong: it never arrives$"
    )
    with pytest.raises(WrongSchedule, match=message):
        verify(asked, wrong)


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([], "rank 0 ends with chunk 0 wrong: without the contribution of ranks [1, 2]"),
        (
            [block([1, 2], [0, 0], 0, modulus=1, reduce=True)] * 2,
            "rank 0 ends with chunk 0 wrong: with the contribution of ranks [1, 2] more than once",
        ),
        (
            [block([1, 2], [0, 0], 0, modulus=1)],
            "round 0: rank 0 gets chunk 0 from several transfers",
        ),
        ([block([1], [1], 0, modulus=1)], "block 0, transfer 0: sends to itself: rank 1 is out of"),
        (
            [block([1], [3], 0, modulus=1)],
            "block 0, transfer 0: destination rank 3 is out of range",
        ),
        ([block([1], [0], 0, modulus=2)], "block 0, transfer 0: chunk 1 is out of range"),
        (
            [block([1], [0], 0, modulus=1, into=np.array([1]))],
            "block 0, transfer 0: chunk at the destination 1 is out of range",
        ),
        (
            [block([0, 1], [1, 2], 0, modulus=1, fused=np.array([False, True]))],
            "block 0, transfer 1: fused transfer from rank 1 is out of range",
        ),
        (
            [block([0, 0], [1, 1], 0, modulus=1, reduce=np.array([True, False]))],
            "round 0: rank 1 gets chunk 0 from several transfers",
        ),
    ],
)
def test_wrong_schedules_are_told_apart(blocks: list[Block], message: str) -> None:
    asked = collective("all_reduce", 3)
    with pytest.raises(WrongSchedule) as refusal:
        verify(asked, Schedule("mine", 3, 1, tuple(blocks)))
    assert message in str(refusal.value)


def test_sending_what_is_not_there_is_refused() -> None:
    asked = collective("broadcast", 3)
    chain = (block([1], [2], 0, modulus=1), block([0], [1], 0, modulus=1))
    with pytest.raises(WrongSchedule, match="round 0: rank 1 sends chunk 0 that it does not hold$"):
        verify(asked, Schedule("mine", 3, 1, chain))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "all_reduced"}, "collective: all_reduced is not valid"),
        ({"reduction": "mean"}, "reduction: mean is not valid"),
        ({"reduction": None}, "reduction: None is not valid"),
        ({"reduction": "and"}, "reduction of f32: and is not valid"),
        ({"counts": -1}, "counts: -1 is not valid"),
        ({"counts": (1, 2)}, "counts: 2 numbers is not valid; allowed: 1 or 1 numbers"),
        ({"ranks": 0}, "ranks: 0 is not valid"),
        ({"root": 4}, "root: 4 is not valid; allowed: 0..3"),
        ({"pairs": ((0, 1),)}, "pairs: ((0, 1),) is not valid; allowed: none for all_reduce"),
        (
            {"kind": "permute", "reduction": None, "pairs": ((0, 1), (2, 1))},
            "target of a pair: 1 is not valid; allowed: each rank at most once",
        ),
        (
            {"kind": "permute", "reduction": None, "pairs": ((0, 4),)},
            "target of a pair: 4 is not valid; allowed: 0..3",
        ),
    ],
)
def test_bad_collectives_are_refused(fields: dict, message: str) -> None:
    whole = {"kind": "all_reduce", "ranks": 4, "counts": 8, "reduction": "add"} | fields
    with pytest.raises(BadInput) as refusal:
        Collective(**whole)
    assert str(refusal.value).startswith(message)


def test_collectives_from_arrays_and_lists_are_values() -> None:
    plain = Collective("all_gather", 2, (3, 4))
    assert Collective("all_gather", 2, np.array([3, 4])) == plain  # pyright: ignore
    assert Collective("all_gather", 2, [3, 4]) == plain  # pyright: ignore
    assert eval(repr(plain)) == plain and hash(plain) == hash(eval(repr(plain)))
    assert Collective("all_gather", 2, np.int64(3)) == Collective("all_gather", 2, 3)  # pyright: ignore


def test_a_block_of_subgroups_is_the_same_as_its_rows() -> None:
    who = np.array([[4, 0, 2], [1, 5, 3]], np.int32)
    pattern = block(
        [0, 1], [1, 2], [5, 7], modulus=9, step=1, count=2, span=2, fused=np.array([False, True])
    )
    whole = replace(pattern, who=who, shift=np.array([0, 9]))
    assert (whole.transfers, whole.replicas, pattern.replicas) == (4, 2, 1)
    flat = whole.flat
    assert flat.flat is flat and flat.who is None and flat.transfers == 4
    assert flat.src.tolist() == [4, 0, 1, 5] and flat.dst.tolist() == [0, 2, 5, 3]
    assert flat.offset.tolist() == [0, 0, 9, 9] and flat.base.tolist() == [5, 7, 5, 7]
    assert flat.fused is not None and flat.fused.tolist() == [False, True, False, True]
    rows, ids = flat.expand(1)
    assert rows.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert ids.tolist() == [6, 7, 8, 0, 15, 16, 17, 9]


def test_touches_of_memory() -> None:
    copies = block([0, 0, 0], [1, 2, 3], 0, modulus=1, fused=np.array([False, True, True]))
    assert [a.tolist() for a in copies.touches] == [[1, 0, 0], [1, 1, 1]]  # one read, three writes
    sums = replace(copies, src=copies.dst, dst=copies.src, reduce=np.ones(3, bool))
    assert [a.tolist() for a in sums.touches] == [[1, 1, 1], [2, 0, 0]]  # and one's own operand


def test_chunks_may_be_numbered_part_by_part() -> None:
    asked = collective("all_gather", 2, (3, 5))
    by_piece = Schedule("mine", 2, 2, (), np.array([1, 0]))
    assert by_piece.natural(2).tolist() == [2, 3, 0, 1]
    by_part = Schedule("mine", 2, 2, (), np.array([0, 2, 1, 3]))
    assert by_part.place_of(2).tolist() == [[0, 2], [1, 3]]
    assert by_part.chunk_counts(asked).tolist() == [2, 3, 1, 2]
    assert replace(by_part, copies=2).chunk_counts(asked).tolist() == [2, 3, 1, 2] * 2


def test_a_barrier_is_one_element() -> None:
    assert Collective("barrier", 5) == Collective("barrier", 5, 1, reduction="maximum")
    with pytest.raises(BadInput, match="^counts of a barrier: 2 is not valid; allowed: 1"):
        Collective("barrier", 5, 2)


@pytest.mark.parametrize(
    ("kind", "counts", "nbytes", "factor"),
    [
        ("all_reduce", 8, 32, 1.5),
        ("all_gather", (1, 2, 3, 0), 24, 0.75),
        ("reduce_scatter", 2, 32, 0.75),
        ("gather", 2, 32, 0.75),
        ("scatter", 2, 32, 0.75),
        ("all_to_all", 2, 32, 0.75),
        ("broadcast", 8, 32, 1.0),
        ("reduce", 8, 32, 1.0),
    ],
)
def test_sizes_and_bus_factors_are_those_of_nccl_tests(kind, counts, nbytes, factor) -> None:
    asked = collective(kind, 4, counts)
    assert (asked.nbytes, asked.bus_factor) == (nbytes, factor)
