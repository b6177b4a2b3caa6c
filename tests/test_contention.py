"""Sharing between collectives in flight together, in closed form."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trnsim.collectives import fabric as fabrics
from trnsim.collectives.algorithms import mesh, rdh, ring
from trnsim.collectives.costs import Memory, Overheads
from trnsim.collectives.fabric import Fabric
from trnsim.collectives.inflight import Call, price_together
from trnsim.collectives.price import Priced, Pricer, price
from trnsim.collectives.schedule import Collective, Schedule, block
from trnsim.device.units import transfer_ps

RATE, ALPHA = 50 * 10**9, 500_000
MiB = 2**20


def funnel(latency: int = 0) -> Fabric:
    """Ranks 0 and 1 on a send over one link a->b to rank 2; rank 3 to rank 4 over another one."""
    links = [("a", "b", RATE, latency), ("c", "d", RATE, latency)]
    return fabrics.graph(["a", "b", "c", "d"], links).attach(["a", "a", "b", "c", "d", "b"])


def send(fabric: Fabric, src: int, dst: int, nbytes: int, at: int = 0, **overheads) -> Call:
    what = Collective("permute", 2, nbytes, dtype="ui8", pairs=((0, 1),))
    arrivals = np.full((1, 2), at, np.int64)
    pricer = Pricer(mesh.schedule(what), fabric, [[src, dst]])
    return Call(pricer, what, arrivals, Overheads(**overheads))


def ends(calls: list[Call]) -> list[int]:
    return [int(p.end.max()) for p in price_together(calls)]


@pytest.mark.parametrize("latency", [0, ALPHA])
def test_two_equal_transfers_over_one_link_each_take_twice_as_long(latency: int) -> None:
    fabric, alone = funnel(latency), transfer_ps(MiB, RATE)
    calls = [send(fabric, 0, 2, MiB), send(fabric, 1, 5, MiB)]
    assert ends(calls[:1]) == [alone + latency]
    assert ends(calls) == [2 * alone + latency] * 2
    assert ends([*calls, send(fabric, 3, 4, MiB)])[2] == alone + latency


def test_three_transfers_and_one_of_another_size() -> None:
    fabric, each = funnel(), transfer_ps(MiB, RATE)
    three = [send(fabric, 0, 2, MiB), send(fabric, 1, 5, MiB), send(fabric, 0, 5, MiB)]
    assert ends(three) == [3 * each] * 3
    # Half each until the small one has ended at 2; then the large one has two left.
    large = [send(fabric, 0, 2, MiB), send(fabric, 1, 5, 3 * MiB)]
    assert ends(large) == pytest.approx([2 * each, 4 * each], abs=2)


def test_a_share_is_given_back_and_taken_when_calls_end_and_begin() -> None:
    fabric, each = funnel(), transfer_ps(MiB, RATE)
    half = each // 2
    staggered = [send(fabric, 0, 2, MiB), send(fabric, 1, 5, MiB, at=half)]
    # Alone for a half, together for two halves of the first one's rest, then alone again.
    assert ends(staggered) == pytest.approx([each + each - half, 2 * each], abs=2)
    apart = [send(fabric, 0, 2, MiB), send(fabric, 1, 5, MiB, at=each)]
    assert ends(apart) == [each, 2 * each]
    gap = [send(fabric, 0, 2, MiB), send(fabric, 1, 5, MiB, at=7 * each)]
    assert ends(gap) == [each, 8 * each]


def test_a_call_that_mostly_waits_takes_only_its_share() -> None:
    """The link is busy for a tenth of the other call's time: a tenth of it is lost, no more."""
    fabric, each = funnel(9 * transfer_ps(MiB, RATE)), transfer_ps(MiB, RATE)
    lazy = send(fabric, 1, 5, MiB)  # 1 on the link, 9 of latency
    long = send(fabric, 0, 2, 10 * MiB)
    took = ends([long, lazy])
    assert ends([lazy]) == [10 * each]
    assert took[1] == pytest.approx(11 * each, abs=2)  # waits for as much as it sends
    whole = 19 * each
    assert whole < took[0] <= whole + 2 * each


def test_memory_is_shared_like_a_link() -> None:
    """Copies on two chips' ranks with separate links, but all four buffers in one stack."""
    fabric = funnel()
    memory = Memory(np.zeros(6, np.int64), np.array([RATE]))
    calls = [
        send(fabric, 0, 2, MiB, memory=memory),
        send(fabric, 3, 4, MiB, memory=memory),
    ]
    touches = transfer_ps(2 * MiB, RATE)  # one read and one write
    assert ends(calls[:1]) == [touches]
    assert ends(calls) == [2 * touches] * 2


def test_reductions_touch_memory_three_times_and_enter_slower() -> None:
    what = Collective("reduce_scatter", 2, MiB, dtype="ui8", reduction="add")
    fabric = fabrics.ring(2, bytes_per_s=100 * RATE).attach([0, 1], dma_out=RATE, dma_in=RATE)
    memory = Memory(np.zeros(2, np.int64), np.array([RATE]))
    run = lambda **o: price(what, ring.schedule(what), fabric, [[0, 1]], overheads=Overheads(**o))  # noqa: E731
    assert run().duration_ps == transfer_ps(MiB, RATE)
    assert run(reduce_fraction=0.5).duration_ps == transfer_ps(MiB, RATE // 2)
    both = run(memory=memory)  # two transfers at once, three touches each
    assert both.duration_ps == transfer_ps(6 * MiB, RATE)
    assert both.limited_by == "HBM stack 0 (50 GB/s)"
    gather = Collective("all_gather", 2, MiB, dtype="ui8")
    copies = price(
        gather, ring.schedule(gather), fabric, [[0, 1]], overheads=Overheads(memory=memory)
    )
    assert copies.duration_ps == transfer_ps(4 * MiB, RATE)


def test_dies_of_a_chip_share_their_crossing() -> None:
    fabric = fabrics.graph(["chip"], []).attach(["chip"] * 4)
    memory = Memory(np.arange(4), np.full(4, 100 * RATE), np.array([0, 0, 1, 1]), RATE, 7000)

    def permute(*pairs: tuple[int, int]) -> Priced:
        what = Collective("permute", 4, MiB, dtype="ui8", pairs=pairs)
        groups = [[0, 1, 2, 3]]
        return price(what, mesh.schedule(what), fabric, groups, overheads=Overheads(memory=memory))

    once, touch = transfer_ps(MiB, RATE), transfer_ps(MiB, 100 * RATE)
    assert permute((0, 2)).duration_ps == once + 7000
    assert permute((0, 1)).duration_ps == touch
    assert permute((0, 2), (1, 3)).duration_ps == 2 * once + 7000
    assert permute((0, 2), (3, 1)).duration_ps == once + 7000  # one way each
    assert permute((0, 2)).limited_by == "dies of chip (50 GB/s)"


def all_reduce(fabric: Fabric, group: list[int], nbytes: int, module=ring, at: int = 0) -> Call:
    what = Collective("all_reduce", len(group), nbytes, dtype="ui8", reduction="add")
    pricer = Pricer(module.schedule(what), fabric, [group])
    return Call(pricer, what, np.full((1, len(group)), at, np.int64))


@given(
    st.sampled_from([ring, mesh, rdh]),
    st.integers(0, 2**22),
    st.integers(0, 10**9),
    st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_one_call_in_flight_is_its_price(module, nbytes: int, at: int, slow: bool) -> None:
    fabric = fabrics.torus((2, 4), bytes_per_s=RATE, latency_ps=ALPHA).attach(range(8))
    if slow:
        fabric = fabric.degrade(links=["chip1->chip2"], bytes_per_s=RATE // 3)
    call = all_reduce(fabric, [0, 1, 2, 3], nbytes, module, at)
    one = call.pricer.price(call.collective, arrivals=call.arrivals)
    for calls in ([call], [call, all_reduce(fabric, [4, 5, 6, 7], nbytes, module, at)]):
        assert price_together(calls)[0].end.tolist() == one.end.tolist()
        assert price_together(calls)[0].durations.tolist() == one.durations.tolist()


def test_groups_of_one_call_and_calls_of_one_group_agree() -> None:
    """Equal rings over the same cables: priced as two groups, or as two calls in flight."""
    fabric = fabrics.ring(4, bytes_per_s=RATE, latency_ps=ALPHA).attach([0, 1, 2, 3, 0, 1, 2, 3])
    what = Collective("all_reduce", 4, MiB, dtype="ui8", reduction="add")
    groups = [[0, 1, 2, 3], [4, 5, 6, 7]]
    one_call = price(what, ring.schedule(what), fabric, groups)
    two_calls = price_together([all_reduce(fabric, g, MiB) for g in groups])
    assert [p.duration_ps for p in two_calls] == [one_call.duration_ps] * 2


@given(
    st.lists(
        st.tuples(st.sampled_from([ring, mesh, rdh]), st.integers(1, 2**22), st.integers(0, 10**8)),
        min_size=2,
        max_size=4,
    )
)
@settings(max_examples=40, deadline=None)
def test_nothing_is_faster_in_company_and_no_link_is_overfull(streams: list) -> None:
    fabric = fabrics.torus((2, 4), bytes_per_s=RATE, latency_ps=ALPHA).attach(range(8))
    calls = [all_reduce(fabric, list(range(8)), n, module, at) for module, n, at in streams]
    together = price_together(calls)
    for call, priced in zip(calls, together, strict=True):
        alone = call.pricer.price(call.collective, arrivals=call.arrivals)
        assert (priced.end >= alone.end).all()
    load = np.sum([p.link_load for p in together], axis=0)
    span = max(int(p.end.max()) for p in together) - min(at for *_, at in streams)
    assert span >= transfer_ps(int(load.max()), RATE) * 0.999
    again = price_together(calls)
    assert [p.end.tolist() for p in again] == [p.end.tolist() for p in together]


@pytest.mark.parametrize(
    ("first", "second", "expected"), [(1, 1, 2), (1, 3, 4), (2, 1, 3), (0, 1, 1)]
)
def test_lanes_of_a_turn_share_a_link(first: int, second: int, expected: int) -> None:
    counts = (first * MiB, second * MiB)
    what = Collective("sendrecv", 2, counts, dtype="ui8", pairs=((0, 1), (0, 1)))
    lanes = tuple(replace(block([0], [1], k, modulus=2, channel=k), lane=k) for k in (0, 1))
    fabric = funnel(ALPHA)
    took = price(what, Schedule("lanes", 2, 1, lanes), fabric, [[0, 2]])
    each = transfer_ps(MiB, RATE)
    assert took.duration_ps == pytest.approx(expected * each + ALPHA, abs=4)


def test_fused_transfers_take_less() -> None:
    """KangaRing's duplicate write (1R2W) and its reduction of three operands (3R1W)."""
    chips = fabrics.ring(2, bytes_per_s=RATE).attach([0, 1, 1])
    memory = Memory(np.arange(3), np.full(3, RATE))
    what = Collective("broadcast", 3, MiB, dtype="ui8")
    fused = block([0, 0], [1, 2], 0, modulus=1, fused=np.array([False, True]))
    apart = block([0, 0], [1, 2], 0, modulus=1)
    stacks = len(chips.rate)
    priced = [
        price(what, Schedule(n, 3, 1, (b,)), chips, [[0, 1, 2]], overheads=Overheads(memory=memory))
        for n, b in (("fused", fused), ("apart", apart))
    ]
    assert [p.load[stacks:].tolist() for p in priced] == [[MiB, MiB, MiB], [2 * MiB, MiB, MiB]]
    assert [p.link_load.max() for p in priced] == [MiB, 2 * MiB]
    to_root = Collective("reduce", 3, MiB, dtype="ui8", reduction="add")
    operands = block([1, 2], [0, 0], 0, modulus=1, reduce=True, fused=np.array([False, True]))
    three = price(
        to_root,
        Schedule("3R1W", 3, 1, (operands,)),
        chips,
        [[0, 1, 2]],
        overheads=Overheads(memory=memory),
    )
    assert three.load[stacks:].tolist() == [2 * MiB, MiB, MiB]
