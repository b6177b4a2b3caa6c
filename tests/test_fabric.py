"""Fabrics: who is next to whom, which way data goes, what a failure does."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trnsim.collectives.fabric import Fabric, graph, join, ring, switch, torus
from trnsim.device.errors import BadInput, TrnsimError

GB = 10**9

# aws-neuron-driver, v3/neuron_dhal_v3.c: the four neighbours of each chip of a trn2 server.
TRN2_NEIGHBOURS = {
    0: {12, 1, 3, 4}, 1: {0, 13, 5, 2}, 2: {14, 3, 1, 6}, 3: {2, 15, 7, 0},
    4: {8, 5, 7, 0}, 5: {4, 9, 1, 6}, 6: {10, 7, 5, 2}, 7: {6, 11, 3, 4},
    8: {4, 9, 11, 12}, 9: {8, 5, 13, 10}, 10: {6, 11, 9, 14}, 11: {10, 7, 15, 8},
    12: {0, 13, 15, 8}, 13: {12, 1, 9, 14}, 14: {2, 15, 13, 10}, 15: {14, 3, 11, 12},
}  # fmt: skip


def path(fabric: Fabric, source: int, target: int) -> list[str]:
    routes = fabric.routes(np.array([source]), np.array([target]))
    return [fabric.link_name(link) for link in routes.path(0)]


def test_a_4x4_torus_has_the_neighbours_of_the_driver_table() -> None:
    fabric = torus((4, 4), bytes_per_s=GB)
    for chip, expected in TRN2_NEIGHBOURS.items():
        assert set(fabric.neighbours(f"chip{chip}")) == {f"chip{other}" for other in expected}


def test_routes_on_a_torus_go_dimension_by_dimension_the_shorter_way() -> None:
    fabric = torus((4, 4), bytes_per_s=GB, latency_ps=5).attach(range(16))
    assert path(fabric, 1, 14) == ["chip1->chip13", "chip13->chip14"]
    assert path(fabric, 0, 5) == ["chip0->chip4", "chip4->chip5"]
    assert fabric.routes(np.array([0, 3]), np.array([15, 3])).latency.tolist() == [10, 0]


def test_half_way_round_even_chips_go_up_and_odd_ones_down() -> None:
    fabric = ring(4, bytes_per_s=GB).attach(range(4))
    assert path(fabric, 0, 2) == ["chip0->chip1", "chip1->chip2"]
    assert path(fabric, 1, 3) == ["chip1->chip0", "chip0->chip3"]


def test_a_one_way_ring_goes_up_only() -> None:
    fabric = ring(5, bytes_per_s=GB, both_ways=False).attach(range(5))
    assert len(path(fabric, 1, 0)) == 4


def test_a_dimension_of_two_has_one_cable() -> None:
    fabric = torus((2, 2), bytes_per_s=GB)
    assert fabric.neighbours("chip0") == ["chip2", "chip1"]
    assert len(fabric.rate) == 8


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.data())
def test_torus_routes_are_connected_and_shortest(dims: list[int], data: st.DataObject) -> None:
    fabric = torus(dims, bytes_per_s=GB)
    n = len(fabric.names)
    fabric = fabric.attach(range(n))
    a, b = data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, n - 1))
    links = fabric.routes(np.array([a]), np.array([b])).path(0)
    stops = [a, *fabric.target[links].tolist()]
    assert stops[-1] == b and fabric.source[links].tolist() == stops[:-1]
    gaps = np.abs(fabric.coordinates[a] - fabric.coordinates[b])
    assert len(links) == np.minimum(gaps, np.array(dims) - gaps).sum()


def test_dma_links_are_per_rank_and_come_first_and_last() -> None:
    fabric = torus((2,), bytes_per_s=GB).attach(
        [0, 0, 1], dma_out=[7, 8, 9], dma_in=5, latency_ps=100
    )
    assert path(fabric, 0, 1) == ["dma out of rank 0", "dma in of rank 1"]
    assert path(fabric, 1, 2) == ["dma out of rank 1", "chip0->chip1", "dma in of rank 2"]
    routes = fabric.routes(np.array([1]), np.array([2]))
    assert fabric.rate[routes.links].tolist() == [8, GB, 5] and routes.latency.tolist() == [100]
    assert fabric.endpoints == {0: 0, 1: 0, 2: 1}


def test_attaching_again_replaces_the_ranks() -> None:
    fabric = torus((2,), bytes_per_s=GB).attach(["chip0"] * 5, dma_out=GB).attach(["chip1"])
    assert fabric.ranks == 1 and len(fabric.rate) == 2


def test_load_adds_up_what_crosses_each_link() -> None:
    fabric = ring(4, bytes_per_s=GB).attach(range(4))
    routes = fabric.routes(np.array([0, 1, 3]), np.array([2, 2, 3]))
    load = fabric.load(routes, np.array([100, 7, 9]))
    named = {fabric.link_name(i): int(load[i]) for i in np.flatnonzero(load).tolist()}
    assert named == {"chip0->chip1": 100, "chip1->chip2": 107}


def test_a_switch_is_one_crossing_with_one_latency() -> None:
    fabric = switch(3, bytes_per_s=GB, latency_ps=40).attach(range(3))
    assert path(fabric, 0, 2) == ["chip0->switch0", "switch0->chip2"]
    assert fabric.routes(np.array([0]), np.array([2])).latency.tolist() == [40]


def test_joined_servers_keep_their_own_routes_inside() -> None:
    server = torus((4, 4), bytes_per_s=128 * GB)
    fabric = join([server, server], bytes_per_s=25 * GB, latency_ps=15)
    fabric = fabric.attach(range(32))
    # Two links over the switch would be fewer than four on the torus, and are not taken.
    assert len(path(fabric, 0, 10)) == 4
    assert path(fabric, 0, 31) == ["server0/chip0->switch0", "switch0->server1/chip15"]
    assert fabric.rank_server.tolist() == [0] * 16 + [1] * 16


def test_chips_share_interfaces_in_blocks() -> None:
    server = torus((4,), bytes_per_s=128 * GB)
    fabric = join([server, server], bytes_per_s=25 * GB, nics=2, nic_bytes_per_s=16 * GB)
    fabric = fabric.attach(range(8))
    assert path(fabric, 1, 7) == [
        "server0/chip1->server0/nic0",
        "server0/nic0->switch0",
        "switch0->server1/nic1",
        "server1/nic1->server1/chip3",
    ]


def test_joined_graphs_and_detours_stay_inside_their_server() -> None:
    names = ["a", "b", "c", "d"]
    chain = [(p, q, GB, 10**6) for p, q in zip(names, names[1:], strict=False)]
    server = graph(names, chain + [(q, p, rate, delay) for p, q, rate, delay in chain])
    fabric = join([server, torus((4,), bytes_per_s=GB, latency_ps=10**6)], bytes_per_s=GB)
    fabric = fabric.attach(fabric.chips)
    assert len(path(fabric, 0, 3)) == 3  # though the switch is two links and no latency
    assert path(fabric, 3, 5) == ["server0/d->switch0", "switch0->server1/chip1"]
    broken = fabric.fail(links=["server1/chip0->server1/chip1"])
    assert len(path(broken, 4, 5)) == 3
    alone = broken.fail(links=["server1/chip0->server1/chip3"])
    assert path(alone, 4, 5) == ["server1/chip0->switch0", "switch0->server1/chip1"]


def test_switches_join_to_a_second_level() -> None:
    pod = switch(2, bytes_per_s=GB)
    fabric = join([pod, pod, torus((2, 2), bytes_per_s=GB)], bytes_per_s=GB)
    fabric = fabric.attach(fabric.chips)
    assert path(fabric, 0, 1) == [
        "server0/chip0->server0/switch0",
        "server0/switch0->server0/chip1",
    ]
    assert path(fabric, 1, 2) == ["server0/chip1->switch1", "switch1->server1/chip0"]
    assert path(fabric, 4, 5) == ["server2/chip0->server2/chip1"]


def test_joining_joined_fabrics_counts_their_servers() -> None:
    pair = join([torus((2,), bytes_per_s=GB)] * 2, bytes_per_s=GB)
    fabric = join([pair, pair], bytes_per_s=GB)
    assert fabric.attach(fabric.chips).rank_server.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_graph_takes_least_latency_then_fewest_links() -> None:
    links = [("a", "b", GB, 10), ("b", "c", GB, 10), ("a", "c", GB, 30), ("a", "d", GB, 20)]
    links += [("d", "c", GB, 0)]
    fabric = graph({"a": "chip", "b": "switch", "c": "chip", "d": "switch"}, links)
    fabric = fabric.attach(["a", "c"])
    assert path(fabric, 0, 1) == ["a->b", "b->c"]  # as quick as over d: the lower link id
    assert path(fabric.fail(links=["a->b"]), 0, 1) == ["a->d", "d->c"]
    assert path(fabric.fail(nodes=["b", "d"]), 0, 1) == ["a->c"]


def test_a_cut_cable_of_a_ring_sends_data_the_other_way() -> None:  # U4
    fabric = ring(8, bytes_per_s=GB).attach(range(8)).fail(links=["chip3<->chip4"])
    assert len(path(fabric, 3, 4)) == 7
    assert len(path(fabric, 2, 3)) == 1


@pytest.mark.parametrize(("source", "target"), [(3, 4), (4, 3)])
def test_a_rank_cut_off_is_named(source: int, target: int) -> None:  # U4
    fabric = ring(8, bytes_per_s=GB).attach(range(8))
    fabric = fabric.fail(links=["chip3<->chip4", "chip4<->chip5"])
    with pytest.raises(TrnsimError, match=r"^rank 4 \(chip4\) is unreachable: no live path"):
        path(fabric, source, target)


def test_a_failed_chip_makes_its_ranks_unreachable() -> None:
    fabric = ring(4, bytes_per_s=GB).attach([0, 1, 2, 2], dma_out=GB, dma_in=GB)
    broken = fabric.fail(nodes=["chip2"])
    with pytest.raises(TrnsimError, match="^rank 3 is unreachable: chip2 has failed$"):
        path(broken, 0, 3)
    assert path(broken, 0, 1) == path(fabric, 0, 1)


def test_degrading_changes_one_direction_or_both() -> None:
    fabric = ring(4, bytes_per_s=GB).attach(range(4), dma_out=GB, dma_in=GB)
    slow = fabric.degrade(links=["chip0->chip1"], bytes_per_s=7)
    assert sorted(set(slow.rate.tolist())) == [7, GB] and (slow.rate == 7).sum() == 1
    assert (fabric.degrade_rank(2, bytes_per_s=9).rate == 9).sum() == 2
    assert (fabric.rate == GB).all()


def test_ring_order_visits_neighbours_and_closes_on_a_torus() -> None:
    fabric = torus((4, 4), bytes_per_s=GB).attach(np.repeat(np.arange(16), 2))
    ranks = np.random.default_rng(1).permutation(32)
    order = ranks[fabric.ring_order(ranks)]
    assert sorted(order.tolist()) == list(range(32))
    hops = [len(path(fabric, a, b)) for a, b in zip(order, np.roll(order, -1), strict=True)]
    assert sorted(hops) == [0] * 16 + [1] * 16


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torus((), bytes_per_s=1), "dims: () is not valid; allowed: one or more positive"),
        (lambda: torus((2, 2), bytes_per_s=[1]), "bytes_per_s: [1] is not valid; allowed: one num"),
        (
            lambda: ring(3, bytes_per_s=0),
            "bytes_per_s: 0 is not valid; allowed: a positive integer",
        ),
        (lambda: graph(["a", "a"], []), "nodes: a, a is not valid; allowed: names used once"),
        (lambda: graph(["a"], [("a", "bb", 1, 0)]), "node of a link: bb is not valid"),
        (lambda: ring(3, bytes_per_s=1).fail(links=["chip0->chip9"]), "node: chip9 is not valid"),
        (lambda: ring(4, bytes_per_s=1).fail(links=["chip0->chip2"]), "link: chip0->chip2 is not"),
        (lambda: ring(3, bytes_per_s=1).attach([3]), "node of rank 0: 3 is not valid"),
        (lambda: ring(3, bytes_per_s=1).attach([0], dma_out=0), "dma_out: 0 is not valid"),
        (lambda: join([], bytes_per_s=1), "parts: 0 is not valid"),
    ],
)
def test_bad_fabrics_are_refused(make, message: str) -> None:
    with pytest.raises(BadInput) as refusal:
        make()
    assert str(refusal.value).startswith(message)
