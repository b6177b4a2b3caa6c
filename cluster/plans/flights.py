"""Exchanges in flight beside compute, and what they take from it and from each other.

The rule: while something runs on a rank, it takes fractions of the rank's DMA engines, of its HBM
bandwidth, and of the busiest link inside and between nodes (`prices.Demand`). Where two things
overlap and ask together for 1 + e of the scarcest of these, each of them takes e of the time that
they would have overlapped longer; with several others, these delays add up. A delayed exchange
ends later on all ranks of its group, and those queued behind it in its stream wait.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .places import Array, Classes
from .prices import Demand, ExchangePrice, excess

ValueKey = tuple[str, int | None, int | None, int | None]
"""A value of a rank: (name, layer, microbatch, chunk), None where it has none."""
Keys = tuple[ValueKey, ...]


@dataclass(frozen=True, eq=False)
class Meeting:
    """An exchange between classes of places.

    name: what its time is counted under. ends: int64[1 or classes] ps after the last arrival;
    rows: int64[rows, members] classes that wait for each other; row: int64[classes] the row of
    each class.
    """

    name: str
    price: ExchangePrice
    stream: int
    ends: Array
    rows: Array
    row: Array

    @classmethod
    def of(cls, name: str, price: ExchangePrice, stream: int, classes: Classes) -> "Meeting":
        """The exchange of places, on their classes."""
        ends = price.ends if price.ends.size == 1 else price.ends[classes.first]
        if price.partners is None:
            return cls(name, price, stream, ends, *classes.rows(price.groups))
        others = classes.of[price.partners[:, classes.first]]
        rows = np.stack([np.arange(classes.count), *others], axis=1)
        return cls(name, price, stream, ends, rows, np.arange(classes.count))

    def last(self, times: Array) -> Array:
        """For each class the largest of its group's times."""
        if times.size == 1:
            return times
        return times[self.rows].max(axis=1)[self.row]


@dataclass(frozen=True, eq=False, slots=True)
class Flight:
    """An exchange under way: when it begins and ends on each class, and the values it uses."""

    meeting: Meeting
    begin: Array
    end: Array
    reads: Keys
    writes: Keys

    def blocks(self, reads: Keys, writes: Keys) -> bool:
        """Whether something that uses these values has to come after this."""
        return any(key in self.writes for key in reads) or any(
            key in self.writes or key in self.reads for key in writes
        )

    def together(self, begin: Array, duration: Array | int) -> Array:
        """How long this would overlap with something else, int64[1 or classes] ps."""
        until = np.minimum(begin + duration, self.end)
        return np.maximum(until - np.maximum(begin, self.begin), 0)

    def delay(self, begin: Array, duration: Array | int, demand: Demand) -> Array | None:
        """What overlapping with something else costs each of the two; None for nothing."""
        more = excess(self.meeting.price.demand, demand)
        if not more:
            return None
        delay = np.ceil(self.together(begin, duration) * more).astype(np.int64)
        return delay if delay.any() else None

    def moved(self, begin: Array, end: Array) -> "Flight":
        """The flight at other times."""
        return Flight(self.meeting, begin, end, self.reads, self.writes)


class InFlight:
    """The flights of a stage in the order in which they were started."""

    def __init__(self, flights: Sequence[Flight] = ()) -> None:
        self.all = list(flights)
        self._keys: tuple[set[ValueKey], set[ValueKey]] | None = None

    def add(self, flight: Flight) -> None:
        """Starts one more."""
        self.all.append(flight)
        self._keys = None

    def land(self, now: Array) -> None:
        """Forgets those that have ended everywhere."""
        left = [flight for flight in self.all if (flight.end > now).any()]
        if len(left) < len(self.all):
            self.all, self._keys = left, None

    def before(self, reads: Keys, writes: Keys, stream: int = -1) -> list[Flight]:
        """Those that have to end before something that uses these values, or this stream."""
        if stream < 0 and not self._touches(reads, writes):
            return []
        return [f for f in self.all if f.meeting.stream == stream or f.blocks(reads, writes)]

    def overlapping(self, begin: Array, duration: Array | int) -> Iterator[int]:
        """Indices of those that are under way at some time of an interval."""
        until, later = begin + duration, set[int]()
        for index in range(len(self.all)):
            flight = self.all[index]
            if flight.meeting.stream in later:
                continue
            if (flight.begin >= until).all():
                later.add(flight.meeting.stream)  # and so do those behind it
            else:
                yield index

    def delay(self, index: int, delay: Array) -> None:
        """One is delayed: its group ends later, and its stream queues behind it."""
        flight = self.all[index]
        meeting, end = flight.meeting, flight.end
        spread = meeting.last(delay)
        self.all[index] = flight.moved(flight.begin, end + spread)
        for later in range(index + 1, len(self.all)):
            flight = self.all[later]
            if flight.meeting.stream == meeting.stream:
                push = flight.meeting.last(np.where(flight.begin <= end, spread, 0))
                self.all[later] = flight.moved(flight.begin + push, flight.end + push)
                end, spread = flight.end, push

    def _touches(self, reads: Keys, writes: Keys) -> bool:
        if self._keys is None:
            written = {key for f in self.all for key in f.writes}
            self._keys = (written, written.union(*(f.reads for f in self.all)))
        written, used = self._keys
        return not (written.isdisjoint(reads) and used.isdisjoint(writes))
