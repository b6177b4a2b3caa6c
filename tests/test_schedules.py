"""Every algorithm does its collective, and a changed schedule is caught."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from trnsim.collectives.algorithms import (
    bruck,
    hierarchical,
    mesh,
    pairwise,
    rdh,
    ring,
    single_step,
    tree,
)
from trnsim.collectives.execute import execute
from trnsim.collectives.schedule import KINDS, Block, Collective, Schedule, block
from trnsim.collectives.verify import WrongSchedule, verify
from trnsim.device.errors import BadInput, TrnsimError

from .collective_reference import collective, roots

ALGORITHMS = {
    "ring": ring,
    "mesh": mesh,
    "single_step_mesh": single_step,
    "rdh": rdh,
    "double_binary_tree": tree,
    "bruck": bruck,
    "pairwise": pairwise,
}
CASES = [(name, kind) for name, module in ALGORITHMS.items() for kind in module.KINDS]


def unrolled(schedule: Schedule) -> list[Block]:
    """The rounds as blocks of their own."""
    return [
        replace(b, base=b.first(k), step=np.zeros_like(b.step), count=1)
        for b, k in schedule.each_round()
    ]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_every_algorithm_and_group_size_is_right(name: str, kind: str) -> None:
    for n in range(1, 18):
        for root in roots(kind, n):
            asked = collective(kind, n, root=root)
            verify(asked, ALGORITHMS[name].schedule(asked))


@pytest.mark.parametrize("n", [32, 64, 100])
@pytest.mark.parametrize("name", ["ring", "mesh", "rdh"])
def test_larger_groups_are_right(name: str, n: int) -> None:
    for kind in set(ALGORITHMS[name].KINDS) - {"all_to_all"}:
        asked = collective(kind, n)
        verify(asked, ALGORITHMS[name].schedule(asked))


@pytest.mark.parametrize("name", ["ring", "mesh", "rdh", "hierarchical"])
def test_256_ranks_are_right(name: str) -> None:
    asked = collective("all_reduce", 256)
    if name == "hierarchical":
        verify(asked, hierarchical.schedule(asked, np.arange(256).reshape(4, 64), "ring", "rdh"))
    else:
        verify(asked, ALGORITHMS[name].schedule(asked))


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


@pytest.mark.parametrize("kind", KINDS)
def test_algorithms_refuse_other_kinds_by_name(kind: str) -> None:
    for name, module in ALGORITHMS.items():
        if kind in module.KINDS:
            continue
        with pytest.raises(BadInput, match=f"^collective of algorithm {name}: {kind} is not valid"):
            module.schedule(collective(kind, 4))


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


def mutate(schedule: Schedule, pick: st.DataObject) -> Schedule:
    """One transfer of one round changed in one field, or dropped."""
    blocks = unrolled(schedule)
    assume(blocks)
    number = pick.draw(st.integers(0, len(blocks) - 1))
    old = blocks[number]
    row = pick.draw(st.integers(0, old.transfers - 1))
    what = pick.draw(st.sampled_from(["drop", "src", "dst", "base", "reduce", "span"]))
    if what == "drop":
        keep = np.arange(old.transfers) != row
        columns = {f: getattr(old, f)[keep] for f in FIELDS}
    else:
        column = getattr(old, what).copy()
        high = {"src": schedule.ranks, "dst": schedule.ranks, "reduce": 2}.get(what, old.modulus)
        column[row] = pick.draw(st.integers(0, high - 1))
        columns = {what: column}
    blocks[number] = replace(old, **columns)
    return replace(schedule, blocks=tuple(blocks))


FIELDS = ("src", "dst", "base", "span", "offset", "step", "reduce", "channel")


@given(st.sampled_from(CASES), st.integers(2, 9), st.data())
@settings(max_examples=150, deadline=None)
def test_a_mutation_that_changes_the_result_is_caught(case, n: int, data: st.DataObject) -> None:
    name, kind = case
    asked = collective(kind, n, 2 * n, dtype="i64")
    right = ALGORITHMS[name].schedule(asked)
    wrong = mutate(right, data)
    inputs = [
        10**rank * np.arange(1, 1 + asked.input_count(rank)) for rank in range(n)
    ]  # sums with a missing or doubled term differ
    expected = execute(asked, right, inputs)
    try:
        got = execute(asked, wrong, inputs)
        changed = any(not np.array_equal(a, b) for a, b in zip(expected, got, strict=True))
    except TrnsimError:  # a rank sends or reduces what it does not have
        changed = True
    if changed:
        with pytest.raises(WrongSchedule):
            verify(asked, wrong)


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
