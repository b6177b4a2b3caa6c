"""Time: closed forms exactly, sharing, stragglers, and bounds that are never beaten."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trnsim.collectives import fabric as fabrics
from trnsim.collectives.algorithms import hierarchical, mesh, pairwise, rdh, ring
from trnsim.collectives.fabric import Fabric
from trnsim.collectives.price import Overheads, Priced, Pricer, price
from trnsim.collectives.schedule import Collective, Schedule, block
from trnsim.device.errors import BadInput, TrnsimError
from trnsim.device.units import parse_rate, parse_time, transfer_ps

MODULES = {"ring": ring, "mesh": mesh, "rdh": rdh}
RATE = parse_rate("50GB/s")
ALPHA = parse_time("500ns")
REDUCING = ("all_reduce", "reduce_scatter")


def asked(kind: str, n: int, nbytes: int, pairs: tuple = ()) -> Collective:
    """nbytes: of one piece, in f32."""
    reduction = "add" if kind in REDUCING else None
    return Collective(kind, n, nbytes // 4, reduction=reduction, pairs=pairs)


def ideal_ring(n: int, rate: int = RATE) -> Fabric:
    return fabrics.ring(n, bytes_per_s=rate, latency_ps=ALPHA).attach(range(n))


def ideal_switch(n: int) -> Fabric:
    return fabrics.switch(n, bytes_per_s=RATE, latency_ps=ALPHA).attach(range(n))


def priced(what: Collective, fabric: Fabric, name: str = "ring", **options) -> Priced:
    schedule = MODULES[name].schedule(what)
    return price(what, schedule, fabric, [list(range(what.ranks))], **options)


def step(nbytes: int) -> int:
    return transfer_ps(nbytes, RATE) + ALPHA


def test_the_ring_of_eight_in_gb_and_gib() -> None:  # U1
    what = asked("all_reduce", 8, 2**20)
    assert priced(what, ideal_ring(8)).duration_ps == 43_700_160
    gib = priced(what, ideal_ring(8, parse_rate("50GiB/s"))).duration_ps
    assert gib == 14 * (math.ceil(131072 * 1e12 / (50 * 2**30)) + ALPHA)
    assert round(gib / 1000) == 41_180


@pytest.mark.parametrize(
    ("n", "nbytes", "expected"), [(6, 1_200_000, 45_000), (7, 1_400_000, 54_000)]
)
def test_rings_of_six_and_seven(n: int, nbytes: int, expected: int) -> None:  # U2
    assert priced(asked("all_reduce", n, nbytes), ideal_ring(n)).duration_ps == expected * 1000


@pytest.mark.parametrize("n", [2, 3, 4, 6, 8, 13, 16])
def test_alpha_beta_on_a_switch(n: int) -> None:
    """One link out of and into each rank, one latency per message: the textbook cases."""
    chunk = 2**16
    fabric, whole = ideal_switch(n), chunk * n

    def took(kind: str, name: str, nbytes: int) -> int:
        return priced(asked(kind, n, nbytes), fabric, name).duration_ps

    assert took("all_reduce", "ring", whole) == 2 * (n - 1) * step(chunk)
    assert took("all_gather", "ring", chunk) == (n - 1) * step(chunk)
    assert took("reduce_scatter", "ring", chunk) == (n - 1) * step(chunk)
    assert took("broadcast", "ring", whole) == step((n - 1) * chunk) + (n - 1) * step(chunk)
    assert took("all_reduce", "mesh", whole) == 2 * step((n - 1) * chunk)
    assert took("all_gather", "mesh", chunk) == step((n - 1) * chunk)
    assert took("all_to_all", "mesh", chunk) == step((n - 1) * chunk)
    assert took("broadcast", "mesh", whole) == step((n - 1) * whole)
    # Rank i of the binomial tree gets its copy in round bit_length(i), over bit_count(i) hops.
    assert took("broadcast", "rdh", whole) == max(
        i.bit_length() * transfer_ps(whole, RATE) + i.bit_count() * ALPHA for i in range(1, n)
    )
    exchange = asked("all_to_all", n, chunk)
    rounds = price(exchange, pairwise.schedule(exchange), fabric, [list(range(n))])
    assert rounds.duration_ps == (n - 1) * step(chunk)


@pytest.mark.parametrize(("n", "p"), [(4, 4), (8, 8), (16, 16), (6, 4), (11, 8)])
def test_rdh_on_a_switch(n: int, p: int) -> None:
    whole = p * 2**14
    halves = sum(step(whole >> k) for k in range(1, p.bit_length()))
    fold = 2 * step(whole) if n > p else 0
    assert priced(asked("all_reduce", n, whole), ideal_switch(n), "rdh").duration_ps == (
        fold + 2 * halves
    )


def test_a_hierarchy_is_the_sum_of_its_steps() -> None:
    server = fabrics.switch(4, bytes_per_s=RATE, latency_ps=ALPHA)
    far, slow = parse_time("15us"), RATE // 10
    fabric = fabrics.join([server] * 2, bytes_per_s=slow, latency_ps=far)
    fabric = fabric.attach(fabric.chips)
    what = asked("all_reduce", 8, 2**20)
    schedule = hierarchical.schedule(
        what, hierarchical.places_of(fabric.rank_server), "ring", "rdh"
    )
    across = transfer_ps(2**20 // 8, slow) + far
    expected = 6 * step(2**18) + 2 * across
    assert price(what, schedule, fabric, [list(range(8))]).duration_ps == expected


def circulant() -> Fabric:
    """8 chips with 16 cables, no switch: neighbours at distance 1 and 2; 12 pairs not adjacent."""
    names = [f"chip{i}" for i in range(8)]
    ends = [(i, (i + d) % 8) for i in range(8) for d in (1, 2)]
    links = [(names[a], names[b], RATE, ALPHA) for a, b in ends]
    links += [(names[b], names[a], RATE, ALPHA) for a, b in ends]
    return fabrics.graph(names, links).attach(names)


@pytest.mark.parametrize("name", MODULES)
def test_a_graph_without_switch_is_routed_over_chips(name: str) -> None:  # U3
    fabric, what = circulant(), asked("all_reduce", 8, 2**20)
    result = priced(what, fabric, name)
    assert fabric.egress("chip0") == 4 * RATE
    assert result.duration_ps >= 1.75 * 2**20 / (4 * RATE) * 1e12
    hops = fabric.routes(*np.divmod(np.arange(64), 8)).links
    if name == "mesh":  # every pair moves a chunk twice, over all links of its route
        assert result.link_load.sum() == 2 * 2**17 * len(hops)
    assert (result.link_load > 0).sum() >= 8


def test_a_cut_cable_lengthens_the_ring_by_its_detour() -> None:  # U4
    what = asked("all_reduce", 8, 2**20)
    fabric = ideal_ring(8).fail(links=["chip3<->chip4"])
    result = priced(what, fabric)
    # Downwards, each link carries the detour only; the last chunk goes round by seven hops.
    assert result.duration_ps > 14 * step(2**17)
    load = {fabric.link_name(i): int(x) for i, x in enumerate(result.link_load)}
    assert load["chip3->chip2"] == 14 * 2**17 and load["chip3->chip4"] == 0
    with pytest.raises(TrnsimError, match=r"^rank 4 \(chip4\) is unreachable"):
        priced(what, fabric.fail(links=["chip4<->chip5"]))


@given(
    st.sampled_from(["ring", "mesh", "rdh"]),
    st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "broadcast"]),
    st.integers(2, 12),
    st.lists(st.integers(0, 2**22), min_size=1, max_size=12),
    st.lists(st.sampled_from([RATE, RATE // 3, 7 * 10**8]), min_size=12, max_size=12),
)
@settings(max_examples=60, deadline=None)
def test_no_collective_beats_its_bound(name, kind, n: int, sizes: list, rates: list) -> None:  # U6
    fabric = ideal_ring(n)
    for chip, rate in enumerate(rates[:n]):
        fabric = fabric.degrade(links=[f"chip{chip}->chip{(chip + 1) % n}"], bytes_per_s=rate)
    whole = kind in ("all_reduce", "broadcast")
    counts = sizes[0] if whole else tuple(sizes[i % len(sizes)] for i in range(n))
    what = Collective(kind, n, counts, reduction="add" if kind in REDUCING else None)
    for handshake in (True, False):
        result = priced(what, fabric, name, overheads=Overheads(handshake=handshake))
        assert result.duration_ps >= result.bound_ps
        assert result.busbw <= result.bound_busbw
        for link in np.flatnonzero(result.link_load):
            needed = transfer_ps(int(result.link_load[link]), int(fabric.rate[link]))
            assert result.duration_ps >= needed


def test_the_limit_is_named() -> None:
    big, small = asked("all_reduce", 8, 2**30), asked("all_reduce", 8, 2**10)
    slow = ideal_ring(8).degrade(links=["chip5->chip6"], bytes_per_s=10**9)
    assert priced(big, slow).limited_by == "chip5->chip6 (1 GB/s)"
    assert priced(small, slow).limited_by == "latency of 14 rounds"
    fabric = fabrics.torus((1,), bytes_per_s=1).attach([0] * 8, dma_out=RATE, dma_in=2 * RATE)
    assert priced(big, fabric).limited_by == "dma out of rank 0 (50 GB/s)"
    hops = tuple(block([i], [i + 1], 0, modulus=1) for i in range(3))
    chain = Schedule("chain", 4, 1, hops)
    by_turns = price(asked("broadcast", 4, 2**30), chain, ideal_ring(4), [range(4)])
    assert by_turns.limited_by == "several resources in turn, most chip0->chip1 (50 GB/s)"
    assert price(asked("broadcast", 4, 2**10), chain, ideal_ring(4), [range(4)]).limited_by == (
        "latency of 3 rounds"
    )
    lone = asked("all_reduce", 1, 2**10)
    assert priced(lone, ideal_ring(2)).limited_by == "nothing: no data moves"


def test_the_sender_is_busy_without_the_latency() -> None:  # U16
    what = asked("broadcast", 2, 2**20)
    halves = tuple(block([0], [1], part, modulus=2) for part in (0, 1))
    result = price(what, Schedule("chain", 2, 2, halves), ideal_ring(2), [[0, 1]])
    each = transfer_ps(2**19, RATE)
    assert result.end.tolist() == [[2 * each, 2 * each + ALPHA]]


@pytest.mark.parametrize("name", MODULES)
def test_a_group_waits_for_its_straggler(name: str) -> None:  # U17
    what, late = asked("all_reduce", 4, 2**20), parse_time("3ms")
    fabric = fabrics.ring(8, bytes_per_s=RATE, latency_ps=ALPHA).attach(range(8))
    schedule, groups = MODULES[name].schedule(what), [[0, 1, 2, 3], [4, 5, 6, 7]]
    pricer = Pricer(schedule, fabric, groups)
    on_time = pricer.price(what)
    arrivals = np.zeros((2, 4), np.int64)
    arrivals[1, 2] = late
    result = pricer.price(what, arrivals=arrivals)
    assert result.end[0].tolist() == on_time.end[0].tolist()
    assert result.end[1].tolist() == (on_time.end[1] + late).tolist()
    assert result.late[1] == 6
    assert result.durations.tolist() == on_time.durations.tolist()


def test_without_handshake_only_those_who_need_the_straggler_wait() -> None:
    what, late = asked("broadcast", 4, 2**20), parse_time("3ms")
    arrivals = np.array([[0, 0, 0, late]])
    result = priced(
        what, ideal_switch(4), "mesh", arrivals=arrivals, overheads=Overheads(handshake=False)
    )
    all_three = transfer_ps(3 * 2**20, RATE) + ALPHA
    assert result.end.tolist() == [
        [late + all_three - ALPHA, all_three, all_three, late + all_three]
    ]


def test_a_permute_waits_for_its_own_ends_only() -> None:
    what, late = asked("permute", 4, 2**20, pairs=((0, 1), (2, 3))), parse_time("3ms")
    arrivals = np.array([[0, 0, 0, late]])
    result = priced(what, ideal_switch(4), "mesh", arrivals=arrivals)
    each = transfer_ps(2**20, RATE)
    assert result.end.tolist() == [[each, each + ALPHA, late + each, late + each + ALPHA]]


def test_overheads_are_paid_once_per_collective_and_once_per_round() -> None:
    what = asked("all_reduce", 8, 2**20)
    overheads = Overheads(start_ps=10_000_000, step_ps=700_000)
    result = priced(what, ideal_ring(8), overheads=overheads)
    assert result.duration_ps == 43_700_160 + 10_000_000 + 14 * 700_000


def test_transfers_that_share_a_link_take_twice_as_long() -> None:
    fabric = fabrics.graph(
        ["a", "b", "c", "d"],
        [("a", "b", RATE, 0), ("b", "c", RATE, 0), ("b", "d", RATE, 0)],
    ).attach(["a", "a", "c", "d"])
    alone = asked("permute", 2, 2**20, pairs=((0, 1),))
    schedule = mesh.schedule(alone)
    one = price(alone, schedule, fabric, [[0, 2]]).duration_ps
    two = price(alone, schedule, fabric, [[0, 2], [1, 3]])
    assert two.durations.tolist() == [2 * one, 2 * one]


def test_disjoint_groups_do_not_affect_each_other() -> None:
    fabric = fabrics.torus((2, 4), bytes_per_s=RATE, latency_ps=ALPHA).attach(range(8))
    what = asked("all_reduce", 4, 2**20)
    schedule = ring.schedule(what)
    one = price(what, schedule, fabric, [[0, 1, 2, 3]]).durations.tolist()
    assert price(what, schedule, fabric, [[0, 1, 2, 3], [4, 5, 6, 7]]).durations.tolist() == one * 2


def test_ranks_of_a_chip_share_its_links() -> None:
    chips = fabrics.ring(4, bytes_per_s=RATE, latency_ps=ALPHA)
    what = asked("all_reduce", 4, 2**20)
    schedule = ring.schedule(what)
    fabric = chips.attach([0, 1, 2, 3, 0, 1, 2, 3])
    both = price(what, schedule, fabric, [[0, 1, 2, 3], [4, 5, 6, 7]])
    assert both.duration_ps == 6 * (transfer_ps(2 * 2**18, RATE) + ALPHA)


def unrolled(schedule: Schedule) -> Schedule:
    blocks = [
        replace(b, base=b.first(k), step=np.zeros_like(b.step), count=1)
        for b, k in schedule.each_round()
    ]
    return replace(schedule, blocks=tuple(blocks))


@given(
    st.integers(2, 9),
    st.integers(1, 3),
    st.lists(st.sampled_from([RATE, RATE // 2, RATE // 7]), min_size=27, max_size=27),
    st.lists(st.integers(0, 10**8), min_size=27, max_size=27),
    st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_fast_forward_is_exact(n: int, count: int, rates, arrivals, handshake: bool) -> None:
    """Repeated rounds cost the same as all of them one by one, on uneven links, with stragglers."""
    fabric = ideal_ring(n * count)
    for chip, rate in enumerate(rates[: n * count]):
        target = (chip + 1) % (n * count)
        fabric = fabric.degrade(links=[f"chip{chip}->chip{target}"], bytes_per_s=rate)
    groups = np.arange(n * count).reshape(count, n)
    what = asked("all_reduce", n, n * 2**16)
    schedule = ring.schedule(what)
    options = {
        "arrivals": np.array(arrivals[: n * count]).reshape(count, n),
        "overheads": Overheads(step_ps=1000, handshake=handshake),
    }
    quick = price(what, schedule, fabric, groups, **options)
    slow = price(what, unrolled(schedule), fabric, groups, **options)
    assert quick.end.tolist() == slow.end.tolist()
    assert quick.link_load.tolist() == slow.link_load.tolist()


def test_uneven_chunks_are_priced_one_by_one() -> None:
    counts = (2**18, 0, 0, 2**10)
    what = Collective("all_gather", 4, counts, dtype="f32")
    result = priced(what, ideal_switch(4))
    schedule = unrolled(ring.schedule(what))
    assert result.duration_ps == price(what, schedule, ideal_switch(4), [[0, 1, 2, 3]]).duration_ps
    assert result.duration_ps == 3 * step(2**20)  # the large piece passes three links in turn


def test_nearly_equal_chunks_cost_the_largest() -> None:
    what = Collective("all_reduce", 8, 8 * 1000 + 3, reduction="add")
    assert priced(what, ideal_ring(8)).duration_ps == 14 * step(4 * 1001)


def test_nothing_to_move_takes_no_time() -> None:
    costly = Overheads(start_ps=5, step_ps=7)
    for what in (asked("all_reduce", 4, 0), asked("all_to_all", 4, 0), asked("all_reduce", 1, 64)):
        result = priced(what, ideal_ring(4), "mesh", overheads=costly)
        assert result.duration_ps == 0 and result.limited_by == "nothing: no data moves"


def test_large_groups_stay_small() -> None:
    n = 4096
    result = priced(asked("all_reduce", n, n * 2**14), ideal_ring(n))
    assert result.duration_ps == 2 * (n - 1) * step(2**14)


def test_bandwidths_follow_the_conventions_of_nccl_tests() -> None:
    result = priced(asked("all_gather", 8, 2**20), ideal_switch(8), "mesh")
    assert result.nbytes == 8 * 2**20
    assert result.algbw == pytest.approx(8 * 2**20 / step(7 * 2**20) * 1e12)
    assert result.busbw == pytest.approx(result.algbw * 7 / 8)
    assert asked("all_to_all", 8, 2**20).nbytes == 8 * 2**20
    assert asked("all_reduce", 8, 2**20).bus_factor == 1.75


@pytest.mark.parametrize(
    ("groups", "options", "message"),
    [
        ([[0, 1, 2]], {}, "group size: 3 is not valid; allowed: 4, as the schedule"),
        ([[0, 1, 2, 8]], {}, "rank of a group: 8 is not valid; allowed: 0..7"),
        ([[0, 1, 2, 3], [3, 4, 5, 6]], {}, "rank of a group: 3 is not valid; allowed: each rank"),
        ([[0, 1, 2, 3]], {"arrivals": np.zeros(4)}, "shape of arrivals: (4,) is not valid"),
    ],
)
def test_bad_group_tables_are_refused(groups: list, options: dict, message: str) -> None:
    what = asked("all_reduce", 4, 2**10)
    with pytest.raises(BadInput) as refusal:
        price(what, ring.schedule(what), ideal_ring(8), groups, **options)
    assert str(refusal.value).startswith(message)
