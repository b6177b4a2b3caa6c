"""Statistics and searches of the Vector engine: bn_stats, bn_aggr, max8, find and replace."""

from dataclasses import dataclass

import numpy as np

from ..chip import Chip
from ..memory import View
from .base import lane_cycles
from .lanes import Lanes
from .numerics import load, store

EIGHT = 8
SEARCH_MAX = 16_384  # elements per partition
BN_STATS_MAX = 512
_AGGREGATE_CYCLES = (13, 3)  # of bn_aggr, for each element (docstrings of SDK 2.26)


class Search(Lanes):
    """Base of the instructions on 8 values per partition."""

    __slots__ = ()
    engine = "vector"

    def check_searched(self, chip: Chip, operand: str, view: View) -> None:
        """The searched tensor has 8 to 16,384 elements per partition in up to three axes."""
        self.check_place(chip, operand, view)
        self.check_axes(operand, view, 3)
        if not EIGHT <= view.free <= SEARCH_MAX:
            raise self.illegal(
                f"{operand} has {view.free} elements per partition; allowed: {EIGHT} to "
                f"{SEARCH_MAX}"
            )

    def check_eight(self, chip: Chip, operand: str, view: View, like: View) -> None:
        """An operand has 8 elements in each partition of the searched tensor."""
        self.check_place(chip, operand, view)
        self.check_axes(operand, view, 3 if operand == "vals" else 2)
        if view.shape[0] != like.shape[0] or view.free != EIGHT:
            raise self.illegal(
                f"{operand} has shape {list(view.shape)}; it must be [{like.shape[0]}, {EIGHT}]"
            )


def _rows(view: View) -> np.ndarray:
    return load(view).reshape(view.shape[0], -1)


@dataclass(frozen=True, slots=True, eq=False)
class Max8(Search):
    """dst[P, 8] = the 8 largest values of each partition, in descending order. Cost: N cycles."""

    dst: View
    src: View

    def check(self, chip: Chip) -> None:
        self.check_searched(chip, "src", self.src)
        self.check_eight(chip, "dst", self.dst, self.src)

    def cycles(self, chip: Chip) -> int:
        return lane_cycles(chip, self.src.free, self.src)

    def execute(self) -> None:
        rows = _rows(self.src)
        if rows.shape[1] > 4 * EIGHT:
            rows = np.partition(rows, rows.shape[1] - EIGHT, axis=1)[:, -EIGHT:]
        store(self.dst, np.sort(rows, axis=1)[:, ::-1][:, :EIGHT])


@dataclass(frozen=True, slots=True, eq=False)
class FindIndex8(Search):
    """dst[p, k] = position of vals[p, k] in data[p]; all ones where there is none.

    The j-th of equal values finds the j-th occurrence, in ascending order. Cost: N cycles.
    """

    dst: View
    data: View
    vals: View

    def reads(self) -> tuple[View, ...]:
        return self.data, self.vals

    def check(self, chip: Chip) -> None:
        self.check_searched(chip, "data", self.data)
        self.check_eight(chip, "vals", self.vals, self.data)
        self.check_eight(chip, "dst", self.dst, self.data)
        _check_index(self, "dst", self.dst)

    def cycles(self, chip: Chip) -> int:
        return lane_cycles(chip, self.data.free, self.data)

    def execute(self) -> None:
        found = find(_rows(self.data), _rows(self.vals), range(EIGHT))
        self.dst.array[...] = _indices(found, self.dst)


@dataclass(frozen=True, slots=True, eq=False)
class MatchReplace8(Search):
    """dst = data with one occurrence of each of vals[p, :] replaced; `index` gets the positions.

    The k go from 7 down to 0: of equal values the last finds the first occurrence.
    Cost: N cycles.
    """

    dst: View
    data: View
    vals: View
    value: float
    index: View | None = None

    def reads(self) -> tuple[View, ...]:
        return self.data, self.vals

    def writes(self) -> tuple[View, ...]:
        return (self.dst,) if self.index is None else (self.dst, self.index)

    def check(self, chip: Chip) -> None:
        self.check_searched(chip, "data", self.data)
        self.check_place(chip, "dst", self.dst)
        self.check_alike("data", self.data, "dst", self.dst)
        self.check_eight(chip, "vals", self.vals, self.data)
        if self.index is not None:
            self.check_eight(chip, "dst_idx", self.index, self.data)
            _check_index(self, "dst_idx", self.index)

    def cycles(self, chip: Chip) -> int:
        return lane_cycles(chip, self.data.free, self.data, self.dst)

    def execute(self) -> None:
        rows = _rows(self.data).copy()
        found = find(rows, _rows(self.vals), range(EIGHT - 1, -1, -1))
        lanes, slots = np.nonzero(found >= 0)
        rows[lanes, found[lanes, slots]] = self.value
        store(self.dst, rows)
        if self.index is not None:
            self.index.array[...] = _indices(found, self.index)


def find(rows: np.ndarray, values: np.ndarray, order: range) -> np.ndarray:
    """[P, 8] positions of values in rows, -1 for none, each position taken once, in that order."""
    free = np.ones(rows.shape, bool)
    found = np.full(values.shape, -1, np.int64)
    lanes = np.arange(len(rows))
    for k in order:
        match = (rows == values[:, k : k + 1]) & free
        first = match.argmax(axis=1)
        hit = match[lanes, first]
        found[hit, k] = first[hit]
        free[lanes[hit], first[hit]] = False
    return found


def _indices(found: np.ndarray, view: View) -> np.ndarray:
    """Positions in the view's dtype and axes; -1 becomes all ones."""
    return found.astype(view.array.dtype).reshape(view.shape)


def _check_index(instruction: Search, operand: str, view: View) -> None:
    if view.dtype not in ("ui16", "ui32"):
        raise instruction.illegal(f"{operand} is {view.dtype}; allowed: ui16, ui32")


@dataclass(frozen=True, slots=True, eq=False)
class BnStats(Lanes):
    """dst[P, 6] = (count, mean, variance * count) of the even, then of the odd elements.

    At most 512 elements per partition. Cost: N cycles.
    """

    dst: View
    src: View
    engine = "vector"

    def check(self, chip: Chip) -> None:
        self.check_place(chip, "dst", self.dst)
        self.check_place(chip, "data", self.src)
        if self.src.free > BN_STATS_MAX:
            raise self.illegal(
                f"data has {self.src.free} elements per partition; limit: {BN_STATS_MAX}"
            )
        if self.dst.shape[0] != self.src.shape[0] or self.dst.free != 6:
            raise self.illegal(
                f"dst has shape {list(self.dst.shape)}; it must be [{self.src.shape[0]}, 6]"
            )

    def cycles(self, chip: Chip) -> int:
        return lane_cycles(chip, self.src.free, self.src)

    def execute(self) -> None:
        rows = _rows(self.src)
        parts = []
        for half in (rows[:, 0::2], rows[:, 1::2]):
            count = half.shape[1]
            mean = half.sum(axis=1, dtype=np.float32) / np.float32(max(count, 1))
            spread = np.square(half - mean[:, None]).sum(axis=1, dtype=np.float32)
            parts += [np.full(len(rows), count, np.float32), mean, spread]
        store(self.dst, np.stack(parts, axis=1))


@dataclass(frozen=True, slots=True, eq=False)
class BnAggr(Lanes):
    """dst[P, 2] = mean and variance of (count, mean, variance * count) triples.

    Cost: 13 N / 3 cycles.
    """

    dst: View
    src: View
    engine = "vector"

    def check(self, chip: Chip) -> None:
        self.check_place(chip, "dst", self.dst)
        self.check_place(chip, "data", self.src)
        if self.src.free % 3:
            raise self.illegal(
                f"data has {self.src.free} elements per partition; a multiple of 3 is needed"
            )
        if self.dst.shape[0] != self.src.shape[0] or self.dst.free != 2:
            raise self.illegal(
                f"dst has shape {list(self.dst.shape)}; it must be [{self.src.shape[0]}, 2]"
            )

    def cycles(self, chip: Chip) -> int:
        times, over = _AGGREGATE_CYCLES
        return lane_cycles(chip, self.src.free * times / over, self.src)

    def execute(self) -> None:
        triples = load(self.src).reshape(self.src.shape[0], -1, 3)
        counts, means, spreads = (triples[:, :, k] for k in range(3))
        total = counts.sum(axis=1, dtype=np.float32)
        mean = (counts * means).sum(axis=1, dtype=np.float32) / total
        apart = counts * np.square(means - mean[:, None])
        variance = (spreads + apart).sum(axis=1, dtype=np.float32) / total
        store(self.dst, np.stack([mean, variance], axis=1))
