"""Rounds: how long each transfer takes under the load that all of its round put on resources."""

from copy import copy
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from trnsim.device.units import transfer_ps

from .resources import Column, Resources, classes, needed_ps, route_columns

_KEPT = 1 << 22  # entries of columns that stay in memory; larger ones are made again when needed
_RANKED = 64  # distinct (transfers, rate) of a block that are put in order of slowness

Kinds = tuple[list[tuple[int, int]], np.ndarray]
"""([(transfers, rate)] from fast to slow, int[P] or int[1]: which of them limits each transfer)."""


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

    @property
    def plain(self) -> bool:
        """Whether no transfer is fused."""
        return bool(self.travels.all() and self.lands.all())


class Loads:
    """Resources in use, in compact numbers, and how often a byte of every transfer crosses each.

    used: int[U] ascending resources; counts: int[U].
    """

    def __init__(self, resources: Resources, used: np.ndarray, counts: np.ndarray) -> None:
        small = not len(counts) or int(counts.max()) < 2**31
        self.resources, self.used = resources, used
        self.counts = counts.astype(np.int32) if small else counts

    def of_equal(self, nbytes: int) -> np.ndarray:
        """int64[U]: bytes over each when all transfers are of nbytes."""
        return np.multiply(self.counts, nbytes, dtype=np.int64)

    def rate(self, reduce: bool) -> np.ndarray:
        """int64[U]"""
        return self.resources.rate(self.used, reduce)

    def kinds(self, reduce: bool) -> Kinds:
        """([(transfers, rate)] from fast to slow, int[U]: which of them each resource is).

        What limits equal transfers does not depend on their size. Number 0 stands for nothing. An
        empty list if there are too many kinds.
        """
        speeds, speed = classes(self.rate(reduce))
        numbers, kind = classes(self.of_equal(len(speeds)) + speed)
        pairs = [(k // len(speeds), speeds[k % len(speeds)]) for k in numbers]
        if len(pairs) > _RANKED:
            return [], kind
        order = sorted(range(len(pairs)), key=lambda k: Fraction(*pairs[k]))
        place = np.empty(len(pairs), np.int8)
        place[order] = np.arange(1, len(pairs) + 1)
        return [(0, 1), *(pairs[k] for k in order)], place[kind]


class Paths(Loads):
    """The resources of P transfers: from rank src[p] to rank dst[p]. All of them may be at once."""

    def __init__(
        self, resources: Resources, src: np.ndarray, dst: np.ndarray, touch: Touch
    ) -> None:
        self.resources, self.touch = resources, touch
        self._ends: tuple[np.ndarray, np.ndarray] = (src, dst)
        self.pairs = len(src)
        self._limits: dict[bool, Kinds] = {}
        columns, self.latency = self._make()
        super().__init__(resources, *used_by(resources.count, columns))
        columns = self._compact(columns)
        size = sum(len(c.ids) for c in columns)
        self._columns = columns if size <= _KEPT else None

    def columns(self) -> list[Column]:
        """All resources in compact numbers, one column after another."""
        return self._compact(self._make()[0]) if self._columns is None else self._columns

    def load(self, nbytes: np.ndarray | int) -> np.ndarray:
        """int64[U]: bytes over each when transfer p moves nbytes[p] bytes."""
        if isinstance(nbytes, int):
            return self.of_equal(nbytes)
        total = np.zeros(len(self.used))
        for column in self.columns():
            each = column.of(nbytes).astype(np.float64) * column.weight
            total += np.bincount(column.ids, weights=each, minlength=len(total))
        return total.astype(np.int64)  # exact: float64 holds every integer up to 9e15

    def slowest(self, times: np.ndarray) -> np.ndarray:
        """int64[P]: the largest of `times` (one per resource in use) on each transfer's way."""
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
            pairs, worst = self._limit(reduce)
            if pairs:
                return limits(pairs, nbytes)[worst]
        return self.slowest(self.times(nbytes, reduce))

    def times(self, nbytes: np.ndarray | int, reduce: np.ndarray | bool) -> np.ndarray:
        """int64[U]: how long each resource is busy."""
        if isinstance(reduce, bool):
            return needed_ps(self.load(nbytes), self.rate(reduce))
        each = np.broadcast_to(np.asarray(nbytes, np.int64), self.pairs)
        copied = needed_ps(self.load(np.where(reduce, 0, each)), self.rate(False))
        return copied + needed_ps(self.load(np.where(reduce, each, 0)), self.rate(True))

    def _limit(self, reduce: bool) -> Kinds:
        if reduce not in self._limits:
            pairs, slowness = self.kinds(reduce)
            worst = single(self.slowest(slowness)) if pairs else slowness
            self._limits[reduce] = (pairs, worst)
        return self._limits[reduce]

    def _compact(self, columns: list[Column]) -> list[Column]:
        if 8 * sum(len(c.ids) for c in columns) < self.resources.count:
            return [Column(c.rows, np.searchsorted(self.used, c.ids), c.weight) for c in columns]
        place = np.zeros(self.resources.count, np.int32)
        place[self.used] = np.arange(len(self.used), dtype=np.int32)
        return [Column(c.rows, place[c.ids], c.weight) for c in columns]

    def _make(self) -> tuple[list[Column], np.ndarray]:
        """(columns, int64[P] or [1] latency)."""
        src, dst = self._ends
        routes = self.resources.fabric.routes(src, dst)
        latency, columns = routes.latency, route_columns(routes)
        if not self.touch.plain:
            columns = [part for c in columns for part in self._taken(c)]
        crossing = self.resources.crossing(src, dst)
        if crossing is not None and self.resources.memory is not None:
            latency[crossing[0]] += self.resources.memory.die_latency_ps
            columns += self._some(self._tiled(self.touch.travels), *crossing)
        if self.resources.memory is not None:
            columns += self._touches(self.touch.source, self.resources.stack(src))
            columns += self._touches(self.touch.destination, self.resources.stack(dst))
        return columns, single(latency)

    def _tiled(self, pattern: np.ndarray) -> np.ndarray:
        return np.tile(pattern, self.pairs // max(1, len(pattern)))

    def _taken(self, column: Column) -> list[Column]:
        """The entries of a route's column that fused transfers leave."""
        travels, lands = self._tiled(self.touch.travels), self._tiled(self.touch.lands)
        rows = np.arange(self.pairs) if column.rows is None else column.rows
        keep = np.where(self.resources.into[column.ids], lands[rows], travels[rows])
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


def used_by(resources: int, columns: list[Column]) -> tuple[np.ndarray, np.ndarray]:
    """(int[U] ascending resources in use, int64[U] weighted uses of each)."""
    if 8 * sum(len(c.ids) for c in columns) < resources:
        ids = np.concatenate([c.ids for c in columns] or [np.empty(0, np.int64)])
        weights = np.concatenate([np.full(len(c.ids), c.weight) for c in columns] or [ids])
        used, place = np.unique(ids, return_inverse=True)
        counts = np.bincount(place, weights=weights, minlength=len(used)).astype(np.int64)
        return used.astype(np.int64), counts
    total = np.zeros(resources, np.int64)
    for column in columns:
        times = np.bincount(column.ids)
        total[: len(times)] += times if column.weight == 1 else times * column.weight
    used = np.flatnonzero(total).astype(np.int32)
    return used, total[used]


def limits(pairs: list[tuple[int, int]], nbytes: int) -> np.ndarray:
    """int64: picoseconds of each kind when all transfers are of nbytes."""
    return np.array([transfer_ps(count * nbytes, rate) for count, rate in pairs], np.int64)


def single(values: np.ndarray) -> np.ndarray:
    """One value if all are equal."""
    return values[:1] if values.size and values.min() == values.max() else values


class Across(Loads):
    """Paths between members of rows that all lie below one switch, each in a part of its own.

    A route is then the source's way up and the destination's way down, whoever the partner is. So
    if every member sends once and receives once, what each resource carries does not depend on the
    pattern either, and is found once for all of them. members: int[R, m]; level: of the switch;
    touches: of HBM at source and destination.
    """

    def __init__(
        self, resources: Resources, members: np.ndarray, level: int, touches: tuple[int, int]
    ) -> None:
        self.shape, self.touches = members.shape, touches
        fabric, ranks = resources.fabric, members.reshape(-1)
        node = fabric.rank_node[ranks]
        where = fabric.levels[level]
        self._out = [*self._dma(fabric.dma_out, ranks), *where.up[node].T]
        self._into = [*where.down[node].T, *self._dma(fabric.dma_in, ranks)]
        ways = [self._out, self._into]
        self.latency_out, self.latency_in = (
            single(sum((fabric.latency[ids] * (ids >= 0) for ids in way), np.zeros(1, np.int64)))
            for way in ways
        )
        self._stack = None if resources.memory is None else resources.stack(ranks)
        self._count(resources)

    def touching(self, touches: tuple[int, int]) -> "Across":
        """The same ways with other touches of HBM."""
        other = copy(self)
        other.touches = touches
        other._count(self.resources)
        return other

    def _count(self, resources: Resources) -> None:
        super().__init__(resources, *used_by(resources.count, self._columns()))
        self._limits: dict[bool, tuple[list[tuple[int, int]], np.ndarray, np.ndarray]] = {}

    @staticmethod
    def _dma(table: np.ndarray, ranks: np.ndarray) -> list[np.ndarray]:
        known = len(table) and table[0] >= 0
        return [table[ranks].astype(np.int32)] if known else []

    def _columns(self) -> list[Column]:
        columns = [Column(None, ids[ids >= 0]) for ids in (*self._out, *self._into)]
        if self._stack is not None:
            columns.append(Column(None, self._stack, sum(self.touches)))
        return columns

    def load(self, out: np.ndarray, into: np.ndarray) -> np.ndarray:
        """int64[U]: bytes over each when members send `out` and receive `into` (int64[R * m])."""
        total = np.zeros(self.resources.count)
        ways = [(ids, out) for ids in self._out] + [(ids, into) for ids in self._into]
        if self._stack is not None:
            read, written = self.touches
            ways.append((self._stack, read * out + written * into))
        for ids, each in ways:
            known = ids >= 0
            if not known.all():
                ids, each = ids[known], each[known]
            sums = np.bincount(ids, weights=each)
            total[: len(sums)] += sums
        return total[self.used].astype(np.int64)  # exact: float64 holds every integer up to 9e15

    def busiest(self, times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(int64[R * m] or [1] the largest of `times` (int64[U]) on the way out, on the way in)."""
        whole = np.zeros(self.resources.count + 1, np.int64)
        whole[self.used] = times
        return self._worst(whole, self._out), self._worst(whole, self._into)

    def limit(self, reduce: bool) -> tuple[list[tuple[int, int]], np.ndarray, np.ndarray]:
        """(kinds, which limits each member's way out, which its way in: int8[R * m] or [1])."""
        if reduce not in self._limits:
            pairs, slowness = self.kinds(reduce)
            whole = np.zeros(self.resources.count + 1, np.int8)  # the last one: no link
            whole[self.used] = slowness if pairs else 0
            out, into = self._worst(whole, self._out), self._worst(whole, self._into)
            self._limits[reduce] = (pairs, out, into)
        return self._limits[reduce]

    def _worst(self, slowness: np.ndarray, way: list[np.ndarray]) -> np.ndarray:
        worst = np.zeros(self.shape[0] * self.shape[1], slowness.dtype)
        for ids in way if self._stack is None else [*way, self._stack]:
            np.maximum(worst, slowness[ids], out=worst)
        return single(worst)
