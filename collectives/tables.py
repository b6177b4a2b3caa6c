"""The subgroups that do a block's pattern at once, in all groups, and what is equal among them."""

from functools import cached_property

import numpy as np

from .copies import Copies, Fold
from .loads import Across, single
from .resources import classes


class Positions:
    """Equal members of equal parts. of_rank: int32[n], which member each group position is."""

    def __init__(self, of_rank: np.ndarray, count: int) -> None:
        self.of_rank, self.count = of_rank, count


class Table:
    """Rows of members: the replicas of a block (`who`, may be None) in the groups int[G, n]."""

    def __init__(self, copies: Copies, groups: np.ndarray, who: np.ndarray | None, fold: bool):
        self.copies, self.groups, self.who = copies, groups, who
        self.fold: Fold | None = None
        if fold and who is not None and len(groups) == 1 < len(who):
            self.fold = copies.fold(self.members)
        self._across: dict[tuple[int, int], Across] = {}
        self._turning: list[np.ndarray | None] = []  # filled when asked for

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
            self._across[touches] = Across(self.copies.resources, self.members, self.level, touches)
        return self._across[touches]

    def turning(self, positions: Positions) -> np.ndarray | None:
        """int[R]: which member of its part all members of each row are, if there is only one."""
        if not self._turning:
            which = None
            if self.who is not None and len(self.groups) == 1:
                every = positions.of_rank[self.who]
                which = every[:, 0] if (every == every[:, :1]).all() else None
            self._turning.append(None if which is None else which.astype(np.int64))
        return self._turning[0]


def positions_of(groups: np.ndarray, tables: list[Table], copies: Copies) -> Positions | None:
    """For one group whose ranks fill equal parts equally; None otherwise."""
    if len(groups) != 1 or not any(t.fold is not None for t in tables):
        return None
    fabric, ranks = copies.resources.fabric, groups[0]
    part = fabric.levels[0].part[fabric.rank_node[ranks]]
    if len(single(copies.like[part])) > 1:
        return None
    _, of_rank = classes(copies.local[ranks])
    times = np.bincount(of_rank)
    if (times != np.count_nonzero(np.bincount(part))).any():
        return None
    return Positions(of_rank, len(times))
