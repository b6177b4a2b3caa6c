"""Several collectives in flight together: streams, or unrelated groups at once.

Each call is first priced alone. Its time is cut into phases (consecutive rounds of its schedule),
of which is known how long they take alone, T, and for how long they keep each resource busy, b.
Then time is followed from event to event (a call begins, a phase ends). While several calls are in
flight, a phase takes instead

    T - max b  +  max over its resources of ( b + sum over the other calls of min(b, T * b' / T') )

b' and T' are those of the other call's phase. In words: a phase waits at a resource for what the
others send over it in the same time, but each of them gets no more of it than the phase itself (a
fair share). If the resource would still be busy for longer than all of the time, its users are
slowed further until it fits. Latency and overheads of a phase are not stretched.

So two equal transfers over one link each take twice as long, disjoint calls do not affect each
other, and a call that is alone takes what `price` says. A call that ends gives its share back.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from .costs import Overheads
from .price import Priced, Pricer
from .schedule import Collective

PHASES = 16  # of a call, at most


@dataclass(frozen=True, eq=False)
class Call:
    """A collective that the groups of `pricer` call at `arrivals` (int64[G, n] ps, default 0)."""

    pricer: Pricer
    collective: Collective
    arrivals: np.ndarray | None = None
    overheads: Overheads = field(default_factory=Overheads)


def price_together(calls: Sequence[Call]) -> list[Priced]:
    """The price of each call while all of them may be in flight, in the order given.

    All calls have to be on one fabric (and one `Memory`, if any). Arrivals are given: a call that
    waits for the end of another one has to be priced after it, together with those still in flight.
    """
    alone = [
        c.pricer.price(c.collective, arrivals=c.arrivals, overheads=c.overheads) for c in calls
    ]
    if len(calls) < 2:
        return alone
    flights = [_Flight(call, priced) for call, priced in zip(calls, alone, strict=True)]
    _fly(flights)
    return [flight.landed() for flight in flights]


@dataclass(frozen=True, eq=False)
class _Phase:
    """alone: ps; used: int64, ascending resources; busy: int64 ps at each of them."""

    alone: int
    used: np.ndarray
    busy: np.ndarray


class _Flight:
    """A call on its way: `warp` maps its time alone to the time together, point by point."""

    def __init__(self, call: Call, priced: Priced) -> None:
        self.call, self.priced = call, priced
        starts = priced.end.max(axis=1) - priced.durations
        self.begin, self.end = int(starts.min()), int(priced.end.max())
        self.together = bool((starts == starts[0]).all())
        self.warp = [(self.begin, self.begin)]
        self.index, self.left = 0, 0.0

    @cached_property
    def phases(self) -> list[_Phase]:
        """At least one; their times alone add up to the call's."""
        rounds = self.call.pricer.rounds(self.call.overheads)
        sized = rounds.rounds(self.call.collective)
        cuts = self._cuts(rounds) if self.together and self.call.pricer.schedule.lanes == 1 else []
        ends = [mark for mark, _ in cuts] + [self.end - self.begin]
        stops = [stop for _, stop in cuts] + [len(sized)]
        phases = []
        for k, (end, stop) in enumerate(zip(ends, stops, strict=True)):
            before, first = (ends[k - 1], stops[k - 1]) if k else (0, 0)
            phases.append(_Phase(end - before, *rounds.busy(sized[first:stop])))
        return phases

    def _cuts(self, rounds) -> list[tuple[int, int]]:
        """(time from the begin, rounds before it) between phases of at least 1/PHASES each."""
        marks: list[int] = []
        arrivals = self.call.arrivals
        if arrivals is None or self.call.overheads.handshake:
            arrivals = np.zeros(self.priced.end.shape, np.int64)
        else:
            arrivals = arrivals - self.begin
        rounds = rounds.alike(arrivals)
        sized = rounds.rounds(self.call.collective)
        rounds.run(sized, self.call.overheads, arrivals, marks=marks)
        least, cuts, last = (self.end - self.begin) / PHASES, [], 0
        for stop, mark in enumerate(marks[:-1], start=1):
            if mark - last >= least and mark < self.end - self.begin:
                cuts.append((mark, stop))
                last = mark
        return cuts

    @property
    def phase(self) -> _Phase:
        return self.phases[self.index]

    @property
    def flying(self) -> bool:
        return self.index < len(self.phases)

    def advance(self, now: int, done: float) -> None:
        """`done` ps of its time alone have passed, and it is `now`."""
        self.left -= done
        if self.left < 0.5:
            self.left = 0.0
        passed = sum(p.alone for p in self.phases[: self.index + 1]) - self.left
        self.warp.append((self.begin + round(passed), now))
        while self.flying and not self.left:
            self.index += 1
            self.left = float(self.phase.alone) if self.flying else 0.0

    def landed(self) -> Priced:
        """The price with the ends moved to the time together."""
        end = self._warped(self.priced.end)
        starts = self.priced.end.max(axis=1) - self.priced.durations
        durations = end.max(axis=1) - self._warped(starts)
        return replace(self.priced, end=end, durations=durations)

    def _warped(self, times: np.ndarray) -> np.ndarray:
        alone, real = np.array(self.warp, np.int64).T
        k = np.clip(np.searchsorted(alone, times, side="right") - 1, 0, len(alone) - 1)
        after = np.minimum(k + 1, len(alone) - 1)
        step, moved = alone[after] - alone[k], real[after] - real[k]
        inside = times - alone[k]
        stretched = np.ceil(inside * (moved / np.maximum(step, 1)) - 1e-6).astype(np.int64)
        return real[k] + np.where((moved == step) | (inside <= 0), inside, stretched)


def _fly(flights: list[_Flight]) -> None:
    """From event to event, until every call has ended."""
    waiting = sorted(range(len(flights)), key=lambda i: flights[i].begin)
    aloft: list[_Flight] = []
    now = flights[waiting[0]].begin
    while aloft or waiting:
        while waiting and flights[waiting[0]].begin <= now:
            flight = flights[waiting.pop(0)]
            flight.left = float(flight.phase.alone)
            flight.advance(now, 0.0)
            aloft += [flight] if flight.flying else []
        following = flights[waiting[0]].begin if waiting else None
        if not aloft:
            now = following if following is not None else now
            continue
        stretch = _stretches([flight.phase for flight in aloft])
        step = min(_up(flight.left * s) for flight, s in zip(aloft, stretch, strict=True))
        step = step if following is None else min(step, following - now)
        now += step
        for flight, s in zip(aloft, stretch, strict=True):
            flight.advance(now, step / s)
        aloft = [flight for flight in aloft if flight.flying]


def _stretches(phases: list[_Phase]) -> list[float]:
    """Time together / time alone of each phase, while exactly these are in flight."""
    if len(phases) == 1:
        return [1.0]
    used = np.unique(np.concatenate([p.used for p in phases]))
    busy = np.zeros((len(phases), len(used)))
    for row, phase in zip(busy, phases, strict=True):
        row[np.searchsorted(used, phase.used)] = phase.busy
    alone = np.array([max(p.alone, 1) for p in phases], float)
    share = np.minimum(busy / alone[:, None], 1.0)
    together = alone.copy()
    for i, mine in enumerate(busy):
        others = np.minimum(mine, share * alone[i]).sum(axis=0) - np.minimum(
            mine, share[i] * alone[i]
        )
        waits = mine + np.where(mine > 0, others, 0.0)
        together[i] += waits.max(initial=0.0) - mine.max(initial=0.0)
    full = (busy / together[:, None]).sum(axis=0)
    over = [max(1.0, float(full[mine > 0].max(initial=0.0))) for mine in busy]
    # A phase that alone is shorter than its load (it overlaps with its neighbours) stays so alone.
    return [
        float(t * o / a) if t > a else 1.0 for t, o, a in zip(together, over, alone, strict=True)
    ]


def _up(ps: float) -> int:
    """Up to the next picosecond, if not an integer but for rounding."""
    nearest = round(ps)
    return max(1, nearest if abs(ps - nearest) < 1e-6 * max(1.0, ps * 1e-9) else int(np.ceil(ps)))
