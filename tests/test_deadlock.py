"""Orders of operations that end, and those that cannot: the waits are printed."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trnsim.collectives.deadlock import (
    Call,
    Deadlock,
    Meeting,
    Receive,
    Send,
    Wait,
    meetings,
)
from trnsim.device.errors import BadInput, CollectiveMismatch, TrnsimError

ALL = (0, 1, 2, 3)
REDUCE, GATHER = Call("all_reduce", ALL, "4 f32"), Call("all_gather", ALL, "4 f32")


def refused(programs, kind: type[TrnsimError] = Deadlock, **options) -> str:
    with pytest.raises(kind) as refusal:
        meetings(programs, **options)
    return str(refusal.value)


def test_an_order_in_which_everything_happens() -> None:
    programs = {
        0: [[Call("all_reduce", (0, 1)), Send(2)]],
        1: [[Call("all_reduce", (0, 1))]],
        2: [[Receive(0)]],
    }
    assert meetings(programs) == [
        Meeting(((0, 0, 0), (1, 0, 0))),
        Meeting(((0, 0, 1), (2, 0, 0))),
    ]


def test_groups_in_crossed_order_are_a_cycle() -> None:
    a, b = Call("all_reduce", (0, 1)), Call("all_gather", (1, 0, 2))
    message = refused({0: [[a, b]], 1: [[b, a]], 2: [[b]]})
    assert message == (
        "cycle of waits: rank 0 -> operation 0: all_reduce -> group [0, 1],"
        " waits for rank 1 -> operation 0: all_gather -> group [1, 0, 2],"
        " waits for rank 0 -> operation 0: all_reduce -> group [0, 1]"
    )


def test_sends_that_face_each_other_are_a_cycle() -> None:
    programs = {0: [[Send(1), Receive(1)]], 1: [[Send(0), Receive(0)]]}
    with pytest.raises(Deadlock) as refusal:
        meetings(programs)
    assert [(s.rank, s.index) for s in refusal.value.stands] == [(0, 0), (1, 0)]
    assert str(refusal.value) == (
        "cycle of waits: rank 0 -> operation 0: send to rank 1,"
        " waits for rank 1 -> operation 0: send to rank 0,"
        " waits for rank 0 -> operation 0: send to rank 1"
    )
    programs[1] = [[Receive(0), Send(0)]]
    assert len(meetings(programs)) == 2


def test_another_order_in_one_group_is_a_mismatch() -> None:
    programs = {rank: [[REDUCE, GATHER]] for rank in ALL} | {2: [[GATHER, REDUCE]]}
    assert refused(programs, CollectiveMismatch) == (
        "group [0, 1, 2, 3]: its ranks call different collectives:"
        " ranks 0, 1, 3 call operation 0: all_reduce 4 f32;"
        " rank 2 calls operation 0: all_gather 4 f32"
    )


def test_other_sizes_and_other_orders_of_ranks_are_mismatches() -> None:
    programs = {rank: [[REDUCE]] for rank in ALL} | {1: [[Call("all_reduce", ALL, "5 f32")]]}
    assert "rank 1 calls operation 0: all_reduce 5 f32" in refused(programs, CollectiveMismatch)
    programs[1] = [[Call("all_reduce", (1, 0, 2, 3), "4 f32")]]
    assert "rank 1 calls operation 0: all_reduce 4 f32 in the order [1, 0, 2, 3]" in refused(
        programs, CollectiveMismatch
    )


def test_ranks_that_never_come_are_named() -> None:
    programs = {rank: [[REDUCE]] for rank in ALL}
    at = "nothing moves: rank 0 -> operation 0: all_reduce 4 f32 -> group [0, 1, 2, 3]; "
    assert refused(programs, unreachable=[3]) == at + "rank 3 is unreachable"
    assert refused(programs | {3: [[]]}) == at + "rank 3 -> at its end after 0 operations"
    del programs[3]
    assert refused(programs) == at + "rank 3 has no program"
    lonely = {0: [[Send(1, tag=5)]], 1: [[Receive(0, tag=6)]]}
    assert refused(lonely) == (
        "nothing moves: rank 0 -> operation 0: send to rank 1 with tag 5;"
        " rank 1 has no matching operation left"
    )


def test_streams_run_side_by_side_and_wait_for_each_other() -> None:
    first, second = Call("all_reduce", (0, 1)), Call("all_gather", (0, 1))
    crossed = {0: [[first], [second]], 1: [[first], [second]]}
    assert len(meetings(crossed)) == 2
    waiting = {0: [[Wait(1, 1), first], [second]], 1: [[first], [Wait(0, 1), second]]}
    assert refused(waiting) == (
        "cycle of waits: rank 0 -> operation 0: wait for 1 operations of stream 1,"
        " waits for rank 0 (stream 1) -> operation 0: all_gather -> group [0, 1],"
        " waits for rank 1 (stream 1) -> operation 0: wait for 1 operations of stream 0,"
        " waits for rank 1 -> operation 0: all_reduce -> group [0, 1],"
        " waits for rank 0 -> operation 0: wait for 1 operations of stream 1"
    )
    other_stream = {0: [[first]], 1: [[], [first]]}
    assert refused(other_stream).endswith("rank 1 -> at its end after 0 operations")


@pytest.mark.parametrize(
    ("programs", "message"),
    [
        ({0: [[Call("all_reduce", (1, 2))]]}, "operation 0, group: [1, 2] is not valid; allowed"),
        ({0: [[Call("all_reduce", (0, 0))]]}, "operation 0, group: [0, 0] is not valid; allowed"),
        ({0: [[Wait(0, 0)]]}, "operation 0, stream: 0 is not valid; allowed: another stream"),
        ({0: [[Wait(1, 2)], []]}, "operation 0, operations of stream 1: 2 is not valid"),
    ],
)
def test_operations_without_sense_are_refused(programs, message: str) -> None:
    assert refused(programs, BadInput).startswith(f"rank 0, stream 0, {message}")


def test_a_large_ring_of_waits_is_found_at_once() -> None:
    n = 3000
    programs = {r: [[Send((r + 1) % n), Receive((r - 1) % n)]] for r in range(n)}
    with pytest.raises(Deadlock) as refusal:
        meetings(programs)
    assert len(refusal.value.stands) == n


def test_a_large_group_is_one_meeting() -> None:
    group = tuple(range(20_000))
    call = Call("all_reduce", group)
    assert len(meetings({rank: [[call, call]] for rank in group})) == 2


def operations(ranks: int):
    peers = st.integers(0, ranks - 1)
    groups = st.sets(peers, min_size=1).map(lambda s: tuple(sorted(s)))
    calls = st.builds(Call, st.sampled_from(["all_reduce", "barrier"]), groups)
    return st.one_of(calls, st.builds(Send, peers), st.builds(Receive, peers))


@given(
    st.lists(
        st.lists(st.lists(operations(4), max_size=4), min_size=1, max_size=2),
        min_size=4,
        max_size=4,
    )
)
@settings(max_examples=200, deadline=None)
def test_every_program_ends_in_an_order_or_an_error(lists) -> None:
    programs = dict(enumerate(lists))
    try:
        order = meetings(programs)
    except TrnsimError:
        return
    ended = [member for meeting in order for member in meeting.members]
    expected = [
        (r, s, i) for r in programs for s, ops in enumerate(programs[r]) for i in range(len(ops))
    ]
    assert sorted(ended) == expected
    for rank, streams in programs.items():  # each stream in its own order
        for stream in range(len(streams)):
            mine = [i for r, s, i in ended if (r, s) == (rank, stream)]
            assert mine == sorted(mine)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.data())
@settings(max_examples=60, deadline=None)
def test_one_global_order_never_deadlocks(kinds, data) -> None:
    """Every rank does its part of one list of operations, in the order of that list."""
    programs: dict = {rank: [[]] for rank in ALL}
    for kind in kinds:
        if kind:
            group = tuple(sorted(data.draw(st.sets(st.sampled_from(ALL), min_size=1))))
            for rank in group:
                programs[rank][0].append(Call("all_reduce", group))
        else:
            source, to = data.draw(st.permutations(ALL))[:2]
            programs[source][0].append(Send(to))
            programs[to][0].append(Receive(source))
    assert len(meetings(programs)) == len(kinds)
