"""List scheduling: legal, deterministic, and collectives leave the critical path."""

import hypothesis.strategies as st
from hypothesis import given

from trnsim.cluster.order import Item, list_schedule


def test_independent_work_runs_while_a_collective_is_in_flight() -> None:
    items = [
        Item((), (1,), 10),
        Item((1,), (2,), 50, stream=0),
        Item((2,), (3,), 10),  # needs the collective
        Item((1,), (4,), 10),  # does not
    ]
    assert list_schedule(items) == [0, 1, 3, 2]


def test_the_longest_remaining_path_goes_first() -> None:
    items = [
        Item((), (1,), 10),
        Item((), (2,), 10),
        Item((2,), (3,), 100, stream=0),
        Item((3,), (4,), 10),
    ]
    assert list_schedule(items) == [1, 2, 0, 3]


def test_ties_keep_the_order_of_the_program() -> None:
    assert list_schedule([Item((), (i,), 5) for i in range(6)]) == [0, 1, 2, 3, 4, 5]


@st.composite
def programs(draw: st.DrawFn) -> list[Item]:
    items = []
    for index in range(draw(st.integers(1, 20))):
        reads = draw(st.sets(st.integers(0, index - 1), max_size=3)) if index else set()
        duration, stream = draw(st.integers(0, 50)), draw(st.sampled_from([None, 0, 1]))
        items.append(Item(tuple(sorted(reads)), (index,), duration, stream))
    return items


@given(programs())
def test_every_order_is_a_legal_permutation(items: list[Item]) -> None:
    order = list_schedule(items)
    assert sorted(order) == list(range(len(items)))
    place = {index: at for at, index in enumerate(order)}
    for index, item in enumerate(items):
        assert all(place[source] < place[index] for source in item.reads)
    assert list_schedule(items) == order
