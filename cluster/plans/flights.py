"""Exchanges of a stage in flight: `overlap` on classes of places, with the values they use."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from .. import overlap
from .places import Array, Classes
from .prices import ExchangePrice

ValueKey = tuple[str, int | None, int | None, int | None]
"""A value of a rank: (name, layer, microbatch, chunk), None where it has none."""
Keys = tuple[ValueKey, ...]


@dataclass(frozen=True, eq=False)
class Meeting(overlap.Meeting):
    """An exchange between classes of places; `name`: what its time is counted under.

    ends: int64[1 or classes] ps after the last arrival.
    """

    ends: Array

    @classmethod
    def of(cls, name: str, price: ExchangePrice, stream: int, classes: Classes) -> "Meeting":
        """The exchange of places, on their classes."""
        ends = price.ends if price.ends.size == 1 else price.ends[classes.first]
        if price.partners is None:
            return cls(name, price.demand, stream, *classes.rows(price.groups), ends)
        others = classes.of[price.partners[:, classes.first]]
        rows = np.stack([np.arange(classes.count), *others], axis=1)
        return cls(name, price.demand, stream, rows, np.arange(classes.count), ends)


@dataclass(eq=False, slots=True)
class Flight(overlap.Flight):
    """An exchange under way, and the values it uses."""

    reads: Keys
    writes: Keys


class InFlight(overlap.InFlight[Flight]):
    """The flights of a stage, by the values that they read and write."""

    def __init__(self, flights: Iterable[Flight] = ()) -> None:
        super().__init__()
        self.written: dict[ValueKey, Flight] = {}
        self.read: dict[ValueKey, list[Flight]] = {}
        for flight in flights:
            self.add(flight)

    def add(self, flight: Flight) -> None:
        """Starts one more, as it is."""
        super().add(flight)
        for key in flight.writes:
            self.written[key] = flight
        for key in flight.reads:
            self.read.setdefault(key, []).append(flight)

    def before(self, reads: Keys, writes: Keys, stream: int = -1) -> list[Flight]:
        """Those that have to end before something that uses these values, or this stream."""
        found = [self.written[key] for key in (*reads, *writes) if key in self.written]
        for key in writes:
            found += self.read.get(key, ())
        found += self.queues.get(stream, ())[-1:]
        return list(dict.fromkeys(found)) if len(found) > 1 else found

    def alias(self, flight: Flight, writes: Keys) -> None:
        """More values that are ready when it ends."""
        flight.writes += writes
        for key in writes:
            self.written[key] = flight

    def forget(self, flight: Flight) -> None:
        """One that has left its queue."""
        super().forget(flight)
        for key in flight.writes:
            if self.written.get(key) is flight:
                del self.written[key]
        for key in flight.reads:
            self.read[key].remove(flight)
            if not self.read[key]:
                del self.read[key]
