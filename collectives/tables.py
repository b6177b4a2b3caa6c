"""The subgroups that do a block's pattern at once, in all groups, and what is equal among them."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .copies import Copies, Fold
from .loads import Across


@dataclass(frozen=True, eq=False)
class Positions:
    """Some parts of a group stand for all others; their members have one clock for each.

    of_rank: int32[n], the clock of each group position; count: clocks. parts: int[K], the parts
    that stand for all; ranks: int[K * Y], the group position that each clock is kept for.
    """

    of_rank: np.ndarray
    count: int
    parts: np.ndarray
    ranks: np.ndarray


class Parts:
    """A group whose ranks fill X parts equally: Y of them in each.

    at: int[X, Y], the group positions in each part, in the same order of members everywhere;
    part: int[X] their numbers; like: int[X], equal for parts that are equal.
    """

    def __init__(self, at: np.ndarray, part: np.ndarray, like: np.ndarray) -> None:
        self.at, self.part, self.like = at, part, like

    def by_kind(self) -> Positions:
        """One part of each kind, for clocks that do not differ within a kind."""
        _, first, which = np.unique(self.like, return_index=True, return_inverse=True)
        return self._positions(first, which)

    def by_clocks(self, clocks: list[np.ndarray]) -> Positions | None:
        """One part for all that are equal and have equal clocks (each int64[n]); None if these are
        more than a quarter of the parts.
        """
        tables = [table[self.at] for table in clocks]
        odd = np.arange(1, 2 * self.at.shape[1], 2, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        mixed = self.like.astype(np.uint64)
        for table in tables:  # wraps around on purpose: a hash of the row
            mixed = mixed * np.uint64(31) + (table.astype(np.uint64) * odd).sum(axis=1)
        _, first, which = np.unique(mixed, return_index=True, return_inverse=True)
        if 4 * len(first) > len(which):
            return None
        same = all((table == table[first][which]).all() for table in tables)
        same = same and (self.like == self.like[first][which]).all()
        return self._positions(first, which) if same else None

    def _positions(self, first: np.ndarray, which: np.ndarray) -> Positions:
        width = self.at.shape[1]
        of_rank = np.empty(self.at.size, np.int32)
        of_rank[self.at] = which[:, None] * width + np.arange(width)
        ranks = self.at[first].reshape(-1)
        return Positions(of_rank, len(ranks), self.part[first], ranks)


class Table:
    """Rows of members: the replicas of a block (`who`, may be None) in the groups int[G, n]."""

    def __init__(self, copies: Copies, groups: np.ndarray, who: np.ndarray | None, fold: bool):
        self.copies, self.groups, self.who = copies, groups, who
        self.fold: Fold | None = None
        if fold and who is not None and len(groups) == 1 < len(who):
            self.fold = copies.fold(self.members)
        self._across: dict[tuple[int, int], Across] = {}
        self._rows: dict[Positions, np.ndarray] = {}
        self._turning: dict[Positions, np.ndarray | None] = {}

    @property
    def members(self) -> np.ndarray:
        """int[G * R, m]: the ranks of every row."""
        if self.who is None:
            return self.groups
        return self.groups[:, self.who].reshape(-1, self.who.shape[1])

    @property
    def priced(self) -> np.ndarray:
        """The rows of `members` that stand for all."""
        return self.members if self.fold is None else self.members[self.fold.rows]

    def clocks(self, rows: np.ndarray | slice = slice(None)) -> np.ndarray:
        """int[rows, m]: the clocks of some rows' members; group g has those from g * n on."""
        groups, n = self.groups.shape
        if self.who is None:
            return np.arange(groups * n).reshape(groups, n)[rows]
        if groups == 1:
            return self.who[rows]
        at = np.arange(groups)[:, None, None] * n + self.who
        return at.reshape(-1, self.who.shape[1])[rows]

    @cached_property
    def flipped(self) -> bool:
        """Whether neighbours among clocks are members of different rows, not of one row: then
        transfers are best ordered by member, for the sake of caches.
        """
        if self.who is None or len(self.groups) > 1 or min(self.who.shape) < 2:
            return False
        along, across = self.who[0, 1] - self.who[0, 0], self.who[1, 0] - self.who[0, 0]
        return abs(int(across)) < abs(int(along))

    @cached_property
    def level(self) -> int | None:
        """The switch level that joins the members of each row, all in parts of their own below."""
        fabric = self.copies.resources.fabric
        if not fabric.intact or self.who is None or self.who.shape[1] < 2:
            return None
        node = fabric.rank_node[self.members]
        for index, level in enumerate(fabric.levels):
            part = level.part[node]
            if (part < 0).any():
                return None
            if (part == part[:, :1]).all():
                up, down = level.up[node], level.down[node]
                known = index > 0 and (up[..., 0] >= 0).all() and (down[..., -1] >= 0).all()
                return index if known else None
            inside = np.sort(part, axis=1)
            if (inside[:, 1:] == inside[:, :-1]).any():
                return None
        return None

    def across(self, touches: tuple[int, int]) -> Across | None:
        """What every member takes when it sends once and receives once; None if that depends."""
        if self.level is None:
            return None
        if touches not in self._across:
            made = next(iter(self._across.values()), None)
            if made is None:
                made = Across(self.copies.resources, self.members, self.level, touches)
            else:
                made = made.touching(touches)
            self._across[touches] = made
        return self._across[touches]

    def turning(self, positions: Positions) -> np.ndarray | None:
        """int[R]: which member of its part all members of each row are, if there is only one."""
        if positions not in self._turning:
            which = None
            if self.who is not None and len(self.groups) == 1:
                every = positions.of_rank[self.who]
                which = every[:, 0] if (every == every[:, :1]).all() else None
            self._turning.clear()
            self._turning[positions] = None if which is None else which.astype(np.int64)
        return self._turning[positions]

    def rows_in(self, positions: Positions) -> np.ndarray:
        """int[k]: the rows inside the parts that stand for all, part by part."""
        if positions not in self._rows:
            chosen = np.zeros(int(self.part.max()) + 1, bool)
            chosen[positions.parts] = True
            self._rows.clear()
            self._rows[positions] = np.flatnonzero(chosen[self.part])
        return self._rows[positions]

    @cached_property
    def part(self) -> np.ndarray:
        """int[Rows]: the part of each row's first member."""
        fabric = self.copies.resources.fabric
        return fabric.levels[0].part[fabric.rank_node[self.members[:, 0]]]


def parts_of(groups: np.ndarray, tables: list[Table], copies: Copies) -> Parts | None:
    """For one group whose ranks fill parts equally, and tables that treat equal parts equally."""
    folds = [t.fold for t in tables if t.fold is not None]
    if len(groups) != 1 or not folds:
        return None
    fabric, ranks = copies.resources.fabric, groups[0]
    part = fabric.levels[0].part[fabric.rank_node[ranks]]
    sizes = np.bincount(part)
    present = np.flatnonzero(sizes)
    like = copies.like[present]
    kinds = len(np.unique(like))
    if (sizes[present] != sizes[present[0]]).any() or any(f.kinds != kinds for f in folds):
        return None
    local = copies.local[ranks]
    at = np.lexsort([local, part]).reshape(len(present), -1)
    table, first = local[at], np.unique(like, return_index=True)[1]
    of_kind = np.zeros(int(like.max()) + 1, np.int64)
    of_kind[like[first]] = first
    return Parts(at, present, like) if (table == table[of_kind[like]]).all() else None
