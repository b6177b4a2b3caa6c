"""Rounds: how long each transfer takes under the load that all of its round put on resources."""

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np

from trnsim.device.units import transfer_ps

from .resources import Column, Resources, classes, needed_ps, route_columns

_KEPT = 1 << 23  # entries of columns that stay in memory; larger ones are made again when needed
_RANKED = 64  # distinct (transfers, rate) of a block that are put in order of slowness


@dataclass(frozen=True, eq=False)
class Touch:
    """What the transfers of a pattern take, tiled over its pairs: int8[T] and bool[T].

    source, destination: touches of HBM; travels: whether a transfer takes links (a fused copy does
    not); lands: whether it takes the DMA into its destination (a fused reduction does not).
    """

    source: np.ndarray
    destination: np.ndarray
    travels: np.ndarray
    lands: np.ndarray


class Paths:
    """The resources of P transfers: from rank src[p] to rank dst[p]. All of them may be at once."""

    def __init__(
        self, resources: Resources, src: np.ndarray, dst: np.ndarray, touch: Touch
    ) -> None:
        self.resources, self.touch = resources, touch
        self._ends: tuple[np.ndarray, np.ndarray] = (src, dst)
        self.pairs = len(src)
        self._kinds: dict[bool, tuple[list[tuple[int, int]], np.ndarray]] = {}
        columns, self.latency = self._make()
        self.counts = self._counts(columns)
        size = sum(len(c.ids) for c in columns)
        self._columns = columns if size <= _KEPT else None

    def columns(self) -> list[Column]:
        """All resources, one column after another."""
        return self._make()[0] if self._columns is None else self._columns

    def load(self, nbytes: np.ndarray | int) -> np.ndarray:
        """int64[resources]: bytes over each when transfer p moves nbytes[p] bytes."""
        if isinstance(nbytes, int):
            return self.counts * nbytes
        total = np.zeros(self.resources.count)
        for column in self.columns():
            each = column.of(nbytes).astype(np.float64) * column.weight
            total += np.bincount(column.ids, weights=each, minlength=len(total))
        return total.astype(np.int64)  # exact: float64 holds every integer up to 9e15

    def slowest(self, times: np.ndarray) -> np.ndarray:
        """int64[P]: the largest of `times` (one per resource) on each transfer's way."""
        worst = np.zeros(self.pairs, times.dtype)
        for column in self.columns():
            mine = times[column.ids]
            if column.rows is None:
                np.maximum(worst, mine, out=worst)
            else:
                worst[column.rows] = np.maximum(worst[column.rows], mine)
        return worst

    def durations(self, nbytes: np.ndarray | int, reduce: np.ndarray | bool) -> np.ndarray:
        """int64[P] or [1]: how long each takes; `reduce` says which transfers reduce, or all."""
        if isinstance(nbytes, int) and isinstance(reduce, bool):
            pairs, worst = self._ranked(reduce)
            if pairs:
                table = np.array([transfer_ps(c * nbytes, rate) for c, rate in pairs], np.int64)
                return table[worst]
        return self.slowest(self.times(nbytes, reduce))

    def times(self, nbytes: np.ndarray | int, reduce: np.ndarray | bool) -> np.ndarray:
        """int64[resources]: how long each resource is busy."""
        if isinstance(reduce, bool):
            return self._busy(self.load(nbytes), self._rate(reduce))
        each = np.broadcast_to(np.asarray(nbytes, np.int64), self.pairs)
        reduced, copied = self.load(np.where(reduce, each, 0)), self.load(np.where(reduce, 0, each))
        return self._busy(copied, self._rate(False)) + self._busy(reduced, self._rate(True))

    def _rate(self, reduce: bool) -> np.ndarray:
        return self.resources.reduce_rate if reduce else self.resources.rate

    @cached_property
    def used(self) -> np.ndarray:
        """The resources that any transfer takes."""
        return np.flatnonzero(self.counts)

    def _busy(self, load: np.ndarray, rate: np.ndarray) -> np.ndarray:
        times = np.zeros(len(load), np.int64)
        times[self.used] = needed_ps(load[self.used], rate[self.used])
        return times

    def _ranked(self, reduce: bool) -> tuple[list[tuple[int, int]], np.ndarray]:
        """([(transfers, rate)] from fast to slow, int[P] or int[1]: which one limits each).

        For equal transfers: what limits them does not depend on their size. An empty list if there
        are too many kinds.
        """
        if reduce not in self._kinds:
            counts, rates = self.counts[self.used], self._rate(reduce)[self.used]
            speeds, speed = classes(rates)
            numbers, kind = classes(counts * len(speeds) + speed)
            pairs = [(k // len(speeds), speeds[k % len(speeds)]) for k in numbers]
            self._kinds[reduce] = self._rank(pairs, kind) if len(pairs) <= _RANKED else ([], kind)
        return self._kinds[reduce]

    def _rank(
        self, pairs: list[tuple[int, int]], kind: np.ndarray
    ) -> tuple[list[tuple[int, int]], np.ndarray]:
        order = sorted(range(len(pairs)), key=lambda k: Fraction(*pairs[k]))
        place = np.empty(len(pairs), np.int8)
        place[order] = np.arange(1, len(pairs) + 1)
        slowness = np.zeros(self.resources.count, np.int8)
        slowness[self.used] = place[kind]
        worst = self.slowest(slowness)
        if worst.size and worst.min() == worst.max():
            worst = worst[:1]
        return [(0, 1), *(pairs[k] for k in order)], worst

    def _counts(self, columns: list[Column]) -> np.ndarray:
        """int64[resources]: times that one byte of every transfer crosses each."""
        total = np.zeros(self.resources.count, np.int64)
        for column in columns:
            total += np.bincount(column.ids, minlength=len(total)) * column.weight
        return total

    def _make(self) -> tuple[list[Column], np.ndarray]:
        """(columns, int64[P] or [1] latency)."""
        src, dst = self._ends
        fabric = self.resources.fabric
        routes = fabric.routes(src, dst)
        latency, columns = routes.latency, route_columns(routes)
        if not (self.touch.travels.all() and self.touch.lands.all()):
            columns = [part for c in columns for part in self._taken(c)]
        crossing = self.resources.crossing(src, dst)
        if crossing is not None and self.resources.memory is not None:
            latency[crossing[0]] += self.resources.memory.die_latency_ps
            columns += self._some(self._tiled(self.touch.travels), *crossing)
        if self.resources.memory is not None:
            columns += self._touches(self.touch.source, self.resources.stack(src))
            columns += self._touches(self.touch.destination, self.resources.stack(dst))
        if latency.size and latency.min() == latency.max():
            latency = latency[:1]
        return columns, latency

    def _tiled(self, pattern: np.ndarray) -> np.ndarray:
        return np.tile(pattern, self.pairs // max(1, len(pattern)))

    def _taken(self, column: Column) -> list[Column]:
        """The entries of a route's column that fused transfers leave."""
        travels, lands = self._tiled(self.touch.travels), self._tiled(self.touch.lands)
        into = np.zeros(len(self.resources.fabric.rate), bool)
        into[self.resources.fabric.dma_in[self.resources.fabric.dma_in >= 0]] = True
        rows = np.arange(self.pairs) if column.rows is None else column.rows
        keep = np.where(into[column.ids], lands[rows], travels[rows])
        return [Column(rows[keep], column.ids[keep])] if keep.any() else []

    def _some(self, chosen: np.ndarray, rows: np.ndarray, ids: np.ndarray) -> list[Column]:
        keep = chosen[rows]
        return [Column(rows[keep], ids[keep])] if keep.any() else []

    def _touches(self, times: np.ndarray, ids: np.ndarray) -> list[Column]:
        """A column for each number of touches (not 0)."""
        if len(times) and times.min() == times.max():
            return [Column(None, ids, int(times[0]))] if times[0] else []
        each = self._tiled(times)
        columns = []
        for weight in np.unique(times[times > 0]).tolist():
            rows = np.flatnonzero(each == weight)
            columns.append(Column(rows, ids[rows], weight))
        return columns
