"""Exchanges in flight beside compute, and what they take from it and from each other.

The rule: while something runs on a rank, it takes fractions of the rank's DMA engines, of its HBM
bandwidth, and of the busiest link inside and between nodes (`prices.Demand`). Where two things
overlap and ask together for 1 + e of the scarcest of these, each of them takes e of the time that
they would have overlapped longer; with several others, these delays add up. A delayed exchange
ends later on all ranks of its group, and those queued behind it in its stream wait.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from .places import Array, Classes
from .prices import Demand, ExchangePrice

ValueKey = tuple[str, int | None, int | None, int | None]
"""A value of a rank: (name, layer, microbatch, chunk), None where it has none."""


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
    reads: tuple[ValueKey, ...]
    writes: tuple[ValueKey, ...]

    def together(self, begin: Array, duration: Array | int) -> Array:
        """How long this would overlap with something else, int64[1 or classes] ps."""
        until = np.minimum(begin + duration, self.end)
        return np.maximum(until - np.maximum(begin, self.begin), 0)

    def delay(self, begin: Array, duration: Array | int, demand: Demand) -> Array | None:
        """What overlapping with something else costs each of the two; None for nothing."""
        excess = self.meeting.price.demand.excess(demand)
        if not excess:
            return None
        delay = np.ceil(self.together(begin, duration) * excess).astype(np.int64)
        return delay if delay.any() else None


def delayed(flights: Sequence[Flight], index: int, delay: Array) -> list[Flight]:
    """The flights after one is delayed: its group ends later, and its stream queues behind it."""
    meeting = flights[index].meeting
    spread = meeting.last(delay)
    moved = list(flights)
    moved[index] = replace(flights[index], end=flights[index].end + spread)
    before = flights[index]
    for later in range(index + 1, len(flights)):
        flight = flights[later]
        if flight.meeting.stream == meeting.stream:
            push = flight.meeting.last(np.where(flight.begin <= before.end, spread, 0))
            moved[later] = replace(flight, begin=flight.begin + push, end=flight.end + push)
            before, spread = flight, push
    return moved
