"""Exchanges in flight beside compute, and what they take from it and from each other.

The rule: while something runs on a rank, it takes fractions of the rank's DMA engines, of its HBM
bandwidth, and of the busiest link inside and between nodes (`prices.Demand`). Where two things
overlap and ask together for 1 + e of the scarcest of these, each of them takes e of the time that
they would have overlapped longer; with several others, these delays add up. A delayed exchange
ends later on all ranks of its group, and those queued behind it in its stream wait.
"""

from collections.abc import Iterable, Iterator
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


@dataclass(eq=False, slots=True)
class Flight:
    """An exchange under way: when it begins and ends on each class, and the values it uses.

    Its times are moved by `InFlight` alone, and never changed in place.
    """

    meeting: Meeting
    begin: Array
    end: Array
    reads: Keys
    writes: Keys

    @property
    def stream(self) -> int:
        """The stream that it is in."""
        return self.meeting.stream

    def delay(self, begin: Array, duration: Array | int, demand: Demand) -> Array | None:
        """What overlapping with something else costs each of the two; None for nothing."""
        more = excess(self.meeting.price.demand, demand)
        if not more:
            return None
        until = np.minimum(begin + duration, self.end)
        together = np.maximum(until - np.maximum(begin, self.begin), 0)
        delay = np.ceil(together * more).astype(np.int64)
        return delay if delay.any() else None

    def move(self, begin: Array | int, end: Array | int) -> None:
        """Shifts its times."""
        self.begin, self.end = self.begin + begin, self.end + end


class InFlight:
    """The flights of a stage: a queue for each stream, in which none begins before another ends."""

    def __init__(self, flights: Iterable[Flight] = ()) -> None:
        self.queues: dict[int, list[Flight]] = {}
        self.written: dict[ValueKey, Flight] = {}
        self.read: dict[ValueKey, list[Flight]] = {}
        self._number = 0
        for flight in flights:
            self.add(flight)

    def __len__(self) -> int:
        return self._number

    def __contains__(self, flight: object) -> bool:
        return any(flight in queue for queue in self.queues.values())

    def __iter__(self) -> Iterator[Flight]:
        for queue in self.queues.values():
            yield from queue

    def add(self, flight: Flight) -> None:
        """Starts one more."""
        self._number += 1
        self.queues.setdefault(flight.stream, []).append(flight)
        for key in flight.writes:
            self.written[key] = flight
        for key in flight.reads:
            self.read.setdefault(key, []).append(flight)

    def land(self, now: Array) -> None:
        """Forgets those that have ended everywhere."""
        if not self._number:
            return
        for queue in self.queues.values():
            while queue and not (queue[0].end > now).any():
                self._forget(queue.pop(0))

    def before(self, reads: Keys, writes: Keys, stream: int = -1) -> list[Flight]:
        """Those that have to end before something that uses these values, or this stream."""
        found = [self.written[key] for key in (*reads, *writes) if key in self.written]
        for key in writes:
            found += self.read.get(key, ())
        found += self.queues.get(stream, ())[-1:]
        return list(dict.fromkeys(found)) if len(found) > 1 else found

    def overlapping(self, begin: Array, duration: Array | int) -> Iterator[Flight]:
        """Those that are under way at some time of an interval."""
        until = begin + duration
        for queue in self.queues.values():
            for flight in queue:
                if (flight.begin >= until).all():
                    break  # and so do those behind it
                yield flight

    def delay(self, flight: Flight, delay: Array) -> None:
        """One is delayed: its group ends later, and its stream queues behind it."""
        queue = self.queues[flight.stream]
        before, push = flight.end, flight.meeting.last(delay)
        flight.move(0, push)
        for later in queue[queue.index(flight) + 1 :]:
            push = later.meeting.last(np.where(later.begin <= before, push, 0))
            before = later.end
            later.move(push, push)

    def alias(self, flight: Flight, writes: Keys) -> None:
        """More values that are ready when it ends."""
        flight.writes += writes
        for key in writes:
            self.written[key] = flight

    def _forget(self, flight: Flight) -> None:
        self._number -= 1
        for key in flight.writes:
            if self.written.get(key) is flight:
                del self.written[key]
        for key in flight.reads:
            self.read[key].remove(flight)
            if not self.read[key]:
                del self.read[key]
