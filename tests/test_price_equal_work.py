"""Work taken for equal costs exactly what it costs when everything is priced: no shortcut shows."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trnsim.collectives import fabric as fabrics
from trnsim.collectives.algorithms import hierarchical, mesh, rdh, ring
from trnsim.collectives.choose import Policy, plan
from trnsim.collectives.costs import Memory, Overheads
from trnsim.collectives.fabric import Fabric
from trnsim.collectives.price import Pricer
from trnsim.collectives.resources import Resources, classes, needed_ps
from trnsim.collectives.rounds import Rounds
from trnsim.collectives.schedule import Collective, Schedule
from trnsim.device.units import transfer_ps

RATE, ALPHA = 50 * 10**9, 500_000
SERVERS, CHIPS, PER_CHIP = 4, 4, 2
REDUCING = ("all_reduce", "reduce_scatter")


def cluster(server: Fabric, servers: int = SERVERS, nics: int | None = 2) -> Fabric:
    """Servers joined over two interfaces each, two ranks on every chip with a DMA of their own."""
    whole = fabrics.join(
        [server] * servers, bytes_per_s=RATE // 4, latency_ps=15 * ALPHA, nics=nics
    )
    places = np.repeat(whole.chips, PER_CHIP)
    return whole.attach(places, dma_out=2 * RATE, dma_in=2 * RATE, latency_ps=ALPHA // 5)


def tori(servers: int = SERVERS) -> Fabric:
    return cluster(fabrics.torus((2, 2), bytes_per_s=RATE, latency_ps=ALPHA), servers)


def memory_of(fabric: Fabric) -> Memory:
    """One stack for the two ranks of a chip, which are on two dies."""
    stacks = np.repeat(np.arange(fabric.ranks // PER_CHIP), PER_CHIP)
    rates = np.full(fabric.ranks // PER_CHIP, 3 * RATE)
    die = np.tile(np.arange(PER_CHIP), fabric.ranks // PER_CHIP)
    return Memory(stacks, rates, die, die_bytes_per_s=RATE, die_latency_ps=777)


def both(schedule: Schedule, fabric: Fabric, groups, what: Collective, overheads: Overheads):
    """(ends, loads, ps needed) with and without taking work for equal."""
    memory, fraction = overheads.memory, overheads.reduce_fraction
    results = []
    for fold in (True, False):
        rounds = Rounds(schedule, Resources(fabric, memory, fraction), np.array(groups), fold=fold)
        start = np.zeros(rounds.all_groups.shape, np.int64)
        sized = rounds.rounds(what)
        totals = [array.tolist() for array in rounds.totals(sized)]
        results.append((rounds.run(sized, overheads, start).tolist(), *totals))
    return results


def degraded(fabric: Fabric, number: int | None) -> Fabric:
    """With one link between nodes at a third of its rate."""
    if number is None:
        return fabric
    name = fabric.link_name(number % fabric.wires)
    return fabric.degrade(links=[name], bytes_per_s=RATE // 9)


@given(
    st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "broadcast"]),
    st.sampled_from(list(product(("ring", "mesh", "rdh"), ("ring", "mesh", "rdh")))),
    st.sampled_from([2**20, 12345, 7, 0]),
    st.one_of(st.none(), st.integers(0, 200)),
    st.booleans(),
    st.sampled_from([2, 3, 4]),
)
@settings(max_examples=80, deadline=None)
def test_a_hierarchy(kind, steps, count, slow, with_memory: bool, servers: int) -> None:
    fabric = degraded(tori(servers), slow)
    n = fabric.ranks
    what = Collective(kind, n, count, reduction="add" if kind in REDUCING else None)
    places = hierarchical.places_of(fabric.rank_server)
    schedule = hierarchical.schedule(what, places, *steps)
    memory = memory_of(fabric) if with_memory else None
    overheads = Overheads(
        start_ps=5, step_ps=1000, handshake_ps=70, memory=memory, reduce_fraction=0.7
    )
    quick, slow_way = both(schedule, fabric, [list(range(n))], what, overheads)
    assert quick == slow_way


NAMES = ["policy", "hierarchical:kangaring+ring", "hierarchical:kangaring+rdh"]
NAMES += ["hierarchical:ring+rdh", "hierarchical:rdh+ring", "ring", "rdh", "kangaring"]


@given(
    st.sampled_from(NAMES),
    st.sampled_from(["all_reduce", "all_gather", "reduce_scatter"]),
    st.sampled_from([2**24, 2**20, 12345, 7]),
    st.one_of(st.none(), st.integers(0, 200)),
    st.booleans(),
    st.sampled_from([2, 3, 4, 8]),
    st.sampled_from([1, 3]),
)
@settings(max_examples=120, deadline=None)
def test_algorithms_with_lanes(name, kind, count, slow, memory, servers: int, stages: int) -> None:
    fabric = degraded(tori(servers), slow)
    n = fabric.ranks
    what = Collective(kind, n, count, reduction="add" if kind in REDUCING else None)
    schedule = plan(what, [range(n)], fabric, name, policy=Policy(stages=stages)).schedule
    overheads = Overheads(step_ps=1000, memory=memory_of(fabric) if memory else None)
    quick, slow_way = both(schedule, fabric, [list(range(n))], what, overheads)
    assert quick == slow_way


@given(
    st.sampled_from([ring, mesh, rdh]),
    st.sampled_from(["all_reduce", "all_gather"]),
    st.sampled_from([4, 8]),
    st.one_of(st.none(), st.integers(0, 200)),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_groups_inside_servers(module, kind, size, slow, with_memory: bool, swap: bool) -> None:
    fabric = degraded(tori(), slow)
    groups = np.arange(fabric.ranks).reshape(-1, size)
    if swap:  # one server has its ranks in another order
        groups[-1] = groups[-1][::-1]
    what = Collective(kind, size, 10**6, reduction="add" if kind in REDUCING else None)
    memory = memory_of(fabric) if with_memory else None
    quick, slow_way = both(
        module.schedule(what), fabric, groups, what, Overheads(step_ps=9, memory=memory)
    )
    assert quick == slow_way


def test_equal_servers_are_priced_once() -> None:
    fabric = tori(16)
    groups = np.arange(fabric.ranks).reshape(16, -1)
    what = Collective("all_reduce", 8, 10**6, reduction="add")
    resources = Resources(fabric)
    equal = Rounds(ring.schedule(what), resources, groups)
    assert equal.groups.tolist() == [list(range(8))]
    slow = fabric.degrade(links=["server5/chip0->server5/chip1"], bytes_per_s=10**9)
    one_differs = Rounds(ring.schedule(what), Resources(slow), groups)
    assert one_differs.groups.tolist() == [list(range(8)), list(range(40, 48))]
    dead = fabric.fail(links=["server5/chip0<->server5/chip1"])
    assert len(Rounds(ring.schedule(what), Resources(dead), groups).groups) == 16


def test_arrivals_of_one_server_do_not_become_those_of_its_equals() -> None:
    fabric = tori()
    groups = np.arange(fabric.ranks).reshape(SERVERS, -1)
    what = Collective("broadcast", 8, 10**6)
    pricer = Pricer(ring.schedule(what), fabric, groups)
    ideal = Overheads(handshake=False)
    arrivals = np.zeros(groups.shape, np.int64)
    on_time = pricer.price(what, arrivals=arrivals, overheads=ideal).end
    arrivals[2, 3] = 10**9
    late = pricer.price(what, arrivals=arrivals, overheads=ideal).end
    assert late[[0, 1, 3]].tolist() == on_time[[0, 1, 3]].tolist()
    assert late[2].max() > on_time[2].max()


@given(st.lists(st.integers(0, 2**45), max_size=200), st.integers(10**8, 10**13))
@settings(max_examples=60, deadline=None)
def test_needed_time_is_exact(loads: list[int], rate: int) -> None:
    rates = [rate, rate // 2 + 1, 10**9 + 7]
    load = np.array(loads, np.int64)
    rate_of = np.array([rates[i % 3] for i in range(len(loads))], np.int64)
    for nbytes, speed, ps in zip(loads, rate_of.tolist(), needed_ps(load, rate_of), strict=True):
        assert ps == transfer_ps(nbytes, speed)


@pytest.mark.parametrize("distinct", [1, 3, 64, 65, 500])
def test_classes(distinct: int) -> None:
    values = np.random.default_rng(0).integers(0, distinct, 2000) * 7
    found, which = classes(values)
    assert np.array(found)[which].tolist() == values.tolist()
    assert sorted(found) == sorted(set(values.tolist()))
