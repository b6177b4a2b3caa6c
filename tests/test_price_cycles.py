"""Repetitions by longest paths against repetitions one by one."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from trnsim.collectives import fabric as fabrics
from trnsim.collectives.algorithms import ring
from trnsim.collectives.clocks import Clocks
from trnsim.collectives.costs import Overheads
from trnsim.collectives.cycles import later
from trnsim.collectives.price import price
from trnsim.collectives.schedule import Collective


@given(st.integers(1, 4), st.integers(2, 12), st.integers(1, 40), st.integers(1, 6), st.integers())
@settings(max_examples=200, deadline=None)
def test_longest_paths(cycles: int, length: int, steps: int, values: int, seed: int) -> None:
    random = np.random.default_rng(seed % 2**32)
    n = cycles * length
    names = random.permutation(n).reshape(cycles, length)
    following = np.empty(n, np.int64)
    following[names] = np.roll(names, -1, axis=1)
    start = random.integers(0, 1000, n)
    busy = random.integers(0, 100, values)[random.integers(0, values, n)]
    hop = busy + random.integers(0, 50, n)
    expected = start
    for _ in range(steps):
        received = np.empty(n, np.int64)
        received[following] = expected + hop
        expected = np.maximum(expected + busy, received)
    found = later(start, busy, hop, following, steps)
    assert found is not None
    assert found.tolist() == expected.tolist()


def test_cycles_of_different_lengths_and_many_values_are_left_to_repetition() -> None:
    start = np.zeros(5, np.int64)
    assert later(start, start, start, np.array([1, 0, 3, 4, 2]), 9) is None
    many = np.arange(20)
    assert later(many, many, many, np.roll(many, -1), 9) is None


@given(
    st.integers(30, 90),
    st.lists(st.tuples(st.integers(0, 89), st.sampled_from([2, 3, 50])), max_size=4),
    st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_a_ring_with_slow_links_costs_the_same_by_paths(n: int, slow: list, late: bool) -> None:
    fabric = fabrics.ring(n, bytes_per_s=50 * 10**9, latency_ps=500_000).attach(range(n))
    for chip, part in slow:
        link = f"chip{chip % n}->chip{(chip + 1) % n}"
        fabric = fabric.degrade(links=[link], bytes_per_s=50 * 10**9 // part)
    what = Collective("all_reduce", n, n * 2**12, reduction="add")
    arrivals = np.zeros((1, n), np.int64)
    arrivals[0, n // 2] = 10**7 * late
    options = {"arrivals": arrivals, "overheads": Overheads(step_ps=1000, handshake=False)}
    quick = price(what, ring.schedule(what), fabric, [list(range(n))], **options)
    paths, Clocks.PATHS = Clocks.PATHS, 10**9  # never
    try:
        slow_way = price(what, ring.schedule(what), fabric, [list(range(n))], **options)
    finally:
        Clocks.PATHS = paths
    assert quick.end.tolist() == slow_way.end.tolist()
