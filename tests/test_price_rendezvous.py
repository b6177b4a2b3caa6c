"""Sends and receives meet by semaphores of their own: each crossing costs the route's latency."""

import pytest

from trnsim.collectives.choose import plan
from trnsim.collectives.costs import Overheads
from trnsim.collectives.fabric import ring
from trnsim.collectives.price import price
from trnsim.collectives.schedule import Collective


@pytest.mark.parametrize("kind", ["permute", "sendrecv"])
def test_a_pair_pays_its_latency_once_more_for_each_crossing(kind: str) -> None:
    chips = ring(4, bytes_per_s=10**9, latency_ps=700)
    fabric = chips.attach(chips.chips)
    collective = Collective(kind, 4, 250, pairs=((0, 1), (1, 3)))
    schedule = plan(collective, [range(4)], fabric).schedule
    for crossings in (0, 1, 3):
        costs = Overheads(rendezvous=crossings)
        ends = price(collective, schedule, fabric, [range(4)], overheads=costs).end[0]
        sent, hop = 1000 * 1000, 700 * (1 + crossings)  # 1000 B at 1 GB/s; no link is shared
        assert ends[[0, 1, 3]].tolist() == [sent, sent + hop, sent + 2 * hop]


def test_groups_handshake_instead() -> None:
    chips = ring(4, bytes_per_s=10**9, latency_ps=700)
    fabric = chips.attach(chips.chips)
    collective = Collective("all_reduce", 4, 250, reduction="add")
    schedule = plan(collective, [range(4)], fabric).schedule
    costs = [Overheads(rendezvous=crossings) for crossings in (0, 3)]
    ends = [
        price(collective, schedule, fabric, [range(4)], overheads=c).end.tolist() for c in costs
    ]
    assert ends[0] == ends[1]
