"""Operations of several streams at once: each stream one after another, all streams together."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from trnsim.collectives.inflight import Call, price_together
from trnsim.collectives.price import Priced
from trnsim.collectives.schedule import Collective
from trnsim.device.errors import BadInput

from . import lnc
from .collective import Bench, Row, Site

MOST_OPERATIONS = 64  # of all streams in one iteration
MOST_PASSES = 20  # until the starts of operations that follow others settle


@dataclass(frozen=True, eq=False)
class Lane:
    """What one stream does in an iteration: `ops` times the same collective."""

    bench: Bench
    collective: Collective
    ops: int = 1
    checked: str | None = None


def check_streams(site: Site, operations: Sequence[int]) -> None:
    """Raises BadInput for more streams than a rank's CC-cores have, or too many operations.

    operations: of each stream in one iteration.
    """
    if sum(operations) > MOST_OPERATIONS:
        raise BadInput("ops_per_iter", f"{sum(operations)} in all", f"at most {MOST_OPERATIONS}")
    if site.chip is not None and site.lnc is not None:
        lnc.check_streams(site.chip, site.lnc, len(operations))


def measure_together(lanes: Sequence[Lane]) -> list[Row]:
    """One row per lane, in an iteration in which all of them run; times are per operation."""
    plans = [lane.bench.plan(lane.collective) for lane in lanes]
    prices: list[list[tuple[np.ndarray, Priced]]] = [[] for _ in lanes]
    for draw in range(max(len(lane.bench.arrivals) for lane in lanes)):
        starts = []
        for lane, plan in zip(lanes, plans, strict=True):
            arrivals = lane.bench.arrivals[min(draw, len(lane.bench.arrivals) - 1)]
            starts.append(lane.bench.call(lane.collective, plan, arrivals))
        for own, found in zip(prices, _settled(starts, [lane.ops for lane in lanes]), strict=True):
            own += found
    alone = [lane.bench.measure(lane.collective).times[0] for lane in lanes]
    return [
        lane.bench.row(lane.collective, plan, own, lane.checked, alone_ps=ps)
        for lane, plan, own, ps in zip(lanes, plans, prices, alone, strict=True)
    ]


def _settled(starts: Sequence[Call], ops: Sequence[int]) -> list[list[tuple[np.ndarray, Priced]]]:
    """(arrivals, price) of every operation of every stream.

    An operation arrives when its rank has ended the one before it in its stream. When that is
    depends on all others, so ends are fed back as arrivals until they no longer change.
    """
    calls = [[call] * many for call, many in zip(starts, ops, strict=True)]
    found: list[list[Priced]] = []
    for _ in range(MOST_PASSES):
        flat = iter(price_together([call for own in calls for call in own]))
        found = [[next(flat) for _ in own] for own in calls]
        following = [_chained(own, ends) for own, ends in zip(calls, found, strict=True)]
        if all(_alike(a, b) for a, b in zip(calls, following, strict=True)):
            break
        calls = following
    return [
        [(_arrivals(call), priced) for call, priced in zip(own, ends, strict=True)]
        for own, ends in zip(calls, found, strict=True)
    ]


def _chained(calls: Sequence[Call], priced: Sequence[Priced]) -> list[Call]:
    """The calls, each arriving when the one before it ends."""
    ends = [price.end for price in priced[:-1]]
    later = [replace(call, arrivals=end) for call, end in zip(calls[1:], ends, strict=True)]
    return [calls[0], *later]


def _alike(one: Sequence[Call], other: Sequence[Call]) -> bool:
    return all(np.array_equal(_arrivals(a), _arrivals(b)) for a, b in zip(one, other, strict=True))


def _arrivals(call: Call) -> np.ndarray:
    return np.zeros(call.pricer.groups.shape, np.int64) if call.arrivals is None else call.arrivals
