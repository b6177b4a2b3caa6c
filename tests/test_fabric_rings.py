"""Rings of several channels: Hamiltonian cycles of a torus that share no edge."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trnsim.collectives.fabric import Fabric, join, ring, torus
from trnsim.collectives.torus_rings import torus_rings

GB = 10**9


def walks(dims: tuple[int, ...]) -> list[list[int]]:
    return [np.argsort(places).tolist() for places in torus_rings(dims)]


def edges(walk: list[int]) -> set[frozenset[int]]:
    return {frozenset(edge) for edge in pairwise([*walk, walk[0]])}


def hops(fabric: Fabric, order: np.ndarray) -> list[list[int]]:
    routes = fabric.routes(order, np.roll(order, -1))
    return [routes.path(pair) for pair in range(len(order))]


@pytest.mark.parametrize(
    "dims", [(4, 4), (3, 3), (3, 4), (3, 5), (4, 6), (4, 8), (8, 8), (4, 4, 4), (3, 4, 5), (5,)]
)
def test_a_torus_splits_into_one_hamiltonian_cycle_per_dimension(dims: tuple[int, ...]) -> None:
    fabric = torus(dims, bytes_per_s=GB)
    cables = {frozenset(ends) for ends in zip(fabric.source, fabric.target, strict=True)}
    cycles = walks(dims)
    assert len(cycles) == len(dims)
    for walk in cycles:
        assert sorted(walk) == list(range(len(fabric.names))) and edges(walk) <= cables
    assert all(not edges(a) & edges(b) for a, b in combinations(cycles, 2))
    assert set().union(*map(edges, cycles)) == cables


@given(st.lists(st.integers(2, 6), min_size=1, max_size=3))
def test_cycles_of_any_torus_are_whole_and_share_no_edge(dims: list[int]) -> None:
    cycles = walks(tuple(dims))
    assert all(sorted(walk) == list(range(int(np.prod(dims)))) for walk in cycles)
    assert all(not edges(a) & edges(b) for a, b in combinations(cycles, 2))


def test_four_rings_of_a_trn2_server_use_every_link_once() -> None:
    fabric = torus((4, 4), bytes_per_s=GB).attach(np.repeat(np.arange(16), 4))
    ranks = np.random.default_rng(3).permutation(64)
    rings = fabric.rings(ranks, 4)
    assert rings.shape == (4, 64) and all(sorted(r.tolist()) == list(range(64)) for r in rings)
    links = [link for r in rings for path in hops(fabric, ranks[r]) for link in path]
    assert sorted(links) == list(range(64))


def test_two_rings_are_the_two_cycles_in_one_direction() -> None:
    fabric = torus((4, 4), bytes_per_s=GB).attach(range(16))
    one, two = fabric.rings(range(16), 2).tolist()
    assert not edges(one) & edges(two)


def test_a_ring_of_chips_has_two_directions() -> None:
    fabric = ring(6, bytes_per_s=GB).attach(range(6))
    rings = fabric.rings(range(6))
    assert len(rings) == 2
    assert sorted(sum((p for r in rings for p in hops(fabric, r)), [])) == list(range(12))


def test_rings_over_servers_leave_from_different_chips() -> None:
    server = torus((4, 4), bytes_per_s=GB)
    fabric = join([server] * 3, bytes_per_s=GB, nics=16).attach(range(48))
    rings = fabric.rings(range(48), 2)
    ways_out = []
    for r in rings:
        paths = hops(fabric, r)
        out = [fabric.link_name(path[0]) for path in paths if len(path) == 4]
        assert len(out) == 3 and sum(len(path) == 1 for path in paths) == 45
        ways_out.append(set(out))
    assert not ways_out[0] & ways_out[1]


@pytest.mark.parametrize(("nodes", "rings"), [([0], 1), ([0, 1], 1), ([0, 1, 2, 3], 2)])
def test_parts_of_a_torus_fall_back_to_the_path_along_it(nodes: list[int], rings: int) -> None:
    fabric = torus((4, 4), bytes_per_s=GB).attach(np.repeat(nodes, 2))
    ranks = np.arange(2 * len(nodes))
    found = fabric.rings(ranks)
    assert len(found) == rings and found[0].tolist() == fabric.ring_order(ranks).tolist()
    assert all(len(path) <= 1 for r in found for path in hops(fabric, r))


def test_cubes_halve_on_the_chip_first_and_take_turns_over_the_links() -> None:
    """Bits of the grid rotate, so that four cubes at once use different links of every chip."""
    chips = torus((4, 4), bytes_per_s=10**9)
    fabric = chips.attach(np.repeat(chips.chips, 4), dma_out=10**9, dma_in=10**9)
    orders = fabric.cube_orders(range(64))
    assert orders.shape == (4, 64)
    assert orders[0].tolist() == fabric.cube_order(range(64)).tolist()
    for distance in (32, 16):
        for order in orders:
            assert (order[np.arange(64)] // 4 == order[np.arange(64) ^ distance] // 4).all()
    for distance in (8, 4, 2, 1):
        pairs = np.concatenate([[o, o[np.arange(64) ^ distance]] for o in orders], axis=1)
        routes = fabric.node_routes(fabric.rank_node[pairs[0]], fabric.rank_node[pairs[1]])
        assert np.diff(routes.starts).max() == 1  # neighbours
        assert np.bincount(routes.links).tolist() == [4] * 64  # every link, as often as the others
