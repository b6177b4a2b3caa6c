"""Which instructions of a trace must follow which: by what they read and write, and by hooks.

Two that use one region depend on each other if one of them writes it, by the same comparison of
regions that the timeline makes. A dependence is `data` if the second reads what the first wrote;
it then waits for the result, and otherwise only for its turn.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..memory import View
from ..timeline import Timeline
from .trace import Entry, Trace


@dataclass(slots=True)
class _Users:
    """The last writer of a region on chip, and its readers since."""

    writer: int = -1
    readers: list[int] = field(default_factory=list)


class _Accesses:
    """Reads or writes of HBM, by byte interval."""

    def __init__(self) -> None:
        self.views: list[View] = []
        self.places: list[int] = []
        self._spans = np.empty((64, 2), np.int64)

    def add(self, view: View, place: int) -> None:
        count = len(self.views)
        if count == len(self._spans):
            self._spans = np.concatenate([self._spans, np.empty_like(self._spans)])
        self._spans[count] = view.interval
        self.views.append(view)
        self.places.append(place)

    def before(self, view: View) -> list[int]:
        """Places of those that overlap the view."""
        low, high = view.interval
        spans = self._spans[: len(self.views)]
        near = np.flatnonzero((spans[:, 0] < high) & (spans[:, 1] > low))
        return [self.places[i] for i in near.tolist() if self.views[i].overlaps(view)]


class Dependences:
    """`of[i]` has the entries that entry i depends on, each with whether it needs their data."""

    def __init__(self, trace: Trace) -> None:
        self._regions = Timeline()
        self._users: dict[int, _Users] = {}
        self._hbm = _Accesses(), _Accesses()  # reads, writes
        written = {id(v.tensor) for e in trace.entries for v in e.writes if v.space == "hbm"}
        self._written = written
        self.of: list[dict[int, bool]] = [
            self._entry(place, entry) for place, entry in enumerate(trace.entries)
        ]
        for before, after in trace.after:
            self.of[after][before] = True

    def _entry(self, place: int, entry: Entry) -> dict[int, bool]:
        found: dict[int, bool] = {}
        reads, writes = self._split(entry.reads), self._split(entry.writes)
        for users in self._near(reads[0]):
            if users.writer >= 0:
                found[users.writer] = True
        for users in self._near(writes[0]):
            if users.writer >= 0:
                found.setdefault(users.writer, False)
            for reader in users.readers:
                found.setdefault(reader, False)
        self._through_hbm(place, reads[1], writes[1], found)
        for view in reads[0]:
            self._own(view).readers.append(place)
        for view in writes[0]:
            users = self._own(view)
            users.writer, users.readers = place, []
        found.pop(place, None)
        return found

    def _split(self, views: Sequence[View]) -> tuple[list[View], list[View]]:
        """(on chip, in HBM that the kernel writes)."""
        here = [view for view in views if view.space != "hbm"]
        there = [v for v in views if v.space == "hbm" and id(v.tensor) in self._written]
        return here, there

    def _through_hbm(
        self, place: int, reads: list[View], writes: list[View], found: dict[int, bool]
    ) -> None:
        past_reads, past_writes = self._hbm
        for view in reads:
            found |= dict.fromkeys(past_writes.before(view), True)
        for view in writes:
            for other in (*past_writes.before(view), *past_reads.before(view)):
                found.setdefault(other, False)
        for view in reads:
            past_reads.add(view, place)
        for view in writes:
            past_writes.add(view, place)

    def _near(self, views: Sequence[View]) -> list[_Users]:
        return [
            self._users.setdefault(id(near), _Users())
            for view in views
            for near in self._regions.clock(view).near
        ]

    def _own(self, view: View) -> _Users:
        return self._users.setdefault(id(self._regions.clock(view)), _Users())
