"""Equal parts of a fabric that do the same thing are priced once.

Exactly where it holds: all members of a subgroup lie in one part (their routes stay inside it), and
parts are equal in every link's rate and latency, in their ranks' DMA and memory, and in the
subgroups that run in them. A part with a slow link is priced for itself; a fabric with a failed
link is not folded at all.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .resources import Resources


@dataclass(frozen=True, eq=False)
class Fold:
    """Rows of members (subgroups) that stand for equal others.

    rows: int[k], the ones to price; of_row: int[Rows], which of the k each row is like. kinds: how
    many different parts the k are in.
    """

    copies: "Copies"
    members: np.ndarray
    rows: np.ndarray
    of_row: np.ndarray
    kinds: int

    @cached_property
    def parts(self) -> np.ndarray:
        """int: the parts that the priced rows are in."""
        fabric = self.copies.resources.fabric
        first = self.members[self.rows, 0]
        return np.unique(fabric.levels[0].part[fabric.rank_node[first]])

    def stays(self, used: np.ndarray) -> bool:
        """Whether all links among these resources lie inside the parts of the priced rows."""
        fabric = self.copies.resources.fabric
        wires = used[used < fabric.wires]
        part = fabric.levels[0].part
        inside = part[fabric.source[wires]]
        return bool((inside == part[fabric.target[wires]]).all() and (inside >= 0).all())

    def expand(self, load: np.ndarray) -> np.ndarray:
        """int64[resources]: the load of all rows, from that of the priced rows."""
        copies, resources = self.copies, self.copies.resources
        fabric, memory = resources.fabric, resources.memory
        like = self.members[self.rows[self.of_row]]
        full = load.copy()
        first = fabric.rank_node[self.members[:, 0]]
        shift, shift_like = fabric.twin[first, 1], fabric.twin[fabric.rank_node[like[:, 0]], 1]
        home = fabric.twin[first, 0]
        for wires, mine in copies.wires_by_home(home):
            moved = wires + shift[mine][:, None]
            full[moved] = load[wires + shift_like[mine][:, None]]
        for table in (fabric.dma_out, fabric.dma_in):
            if len(table) and table[0] >= 0:
                full[table[self.members]] = load[table[like]]
        if memory is not None:
            full[resources.stack(self.members)] = load[resources.stack(like)]
            self._expand_crossings(full, load, like)
        return full

    def _expand_crossings(self, full: np.ndarray, load: np.ndarray, like: np.ndarray) -> None:
        resources = self.copies.resources
        ways = (resources.count - resources.crossings) // len(resources.fabric.names)
        if not ways:
            return
        node = resources.fabric.rank_node
        for way in range(ways):
            into = resources.crossings + node[self.members] * ways + way
            full[into] = load[resources.crossings + node[like] * ways + way]


@dataclass(frozen=True, eq=False)
class Copies:
    """The equal parts of a fabric and its memory."""

    resources: "Resources"

    def fold(self, members: np.ndarray) -> Fold | None:
        """Rows of ranks (int[Rows, m]) by equal parts; None if nothing is gained."""
        fabric = self.resources.fabric
        if len(members) < 2 or not fabric.intact or not self._private_memory:
            return None
        part = fabric.levels[0].part[fabric.rank_node[members]]
        if (part != part[:, :1]).any() or (part < 0).any():
            return None
        local, like = self.local[members], self.like[part[:, 0]]
        by_part = np.argsort(part[:, 0], kind="stable")
        return self._matched(members, part[by_part, 0], local[by_part], like[by_part], by_part)

    def _matched(self, members, part, local, like, by_part) -> Fold | None:
        """Parts with equal rows, by their bytes; rows are sorted by part."""
        starts = np.flatnonzero(np.diff(part, prepend=-2))
        stops = np.append(starts[1:], len(part))
        seen: dict[tuple[int, bytes], int] = {}
        rows: list[np.ndarray] = []
        of_row, used = np.empty(len(part), np.int64), 0
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            key = (int(like[start]), local[start:stop].tobytes())
            if key not in seen:
                seen[key] = used
                rows.append(by_part[start:stop])
                used += stop - start
            of_row[by_part[start:stop]] = seen[key] + np.arange(stop - start)
        if 2 * used > len(part):
            return None
        return Fold(self, members, np.concatenate(rows), of_row, len(rows))

    @cached_property
    def local(self) -> np.ndarray:
        """int64[ranks]: which rank of its part each is: equal in equal parts, unique in one."""
        fabric = self.resources.fabric
        node = fabric.rank_node
        order = np.argsort(node, kind="stable")
        starts = np.flatnonzero(np.diff(node[order], prepend=-1))
        at = np.empty(len(node), np.int64)
        lengths = np.diff(np.append(starts, len(node)))
        at[order] = np.arange(len(node)) - np.repeat(starts, lengths)
        return fabric.twin[node, 0].astype(np.int64) * int(at.max(initial=0) + 1) + at

    @cached_property
    def like(self) -> np.ndarray:
        """int64[parts]: equal numbers for parts with equal links and ranks."""
        fabric = self.resources.fabric
        part = fabric.levels[0].part
        first = np.zeros(int(part.max(initial=-1)) + 1, np.int64)
        inside = np.flatnonzero(part >= 0)
        first[part[inside[::-1]]] = inside[::-1]
        home, shift = fabric.twin[first].T
        keys = home.astype(np.int64)
        for wires, mine in self.wires_by_home(home):
            moved = wires + shift[mine][:, None]
            keys[mine] = _classes([keys[mine], fabric.rate[moved], fabric.latency[moved]])
        return self._with_ranks(keys)

    def wires_by_home(self, home: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each kind of part, by a node of its first copy: (its inner links, entries of it)."""
        fabric = self.resources.fabric
        part = fabric.levels[0].part
        which = part[home]
        found = []
        for kind in np.unique(which).tolist():
            own = self._inner_wires.get(kind)
            if own is None:
                own = self._inner_wires[kind] = np.flatnonzero(
                    (part[fabric.source[: fabric.wires]] == kind)
                    & (part[fabric.target[: fabric.wires]] == kind)
                )
            found.append((own, np.flatnonzero(which == kind)))
        return found

    @cached_property
    def _inner_wires(self) -> dict[int, np.ndarray]:
        return {}

    def _with_ranks(self, keys: np.ndarray) -> np.ndarray:
        """Parts told apart by their ranks: DMA rates and latency, stack and die of each."""
        part = self._rank_part
        order = np.lexsort([self.local, part]) if not self._in_order else None
        counts = np.bincount(part[part >= 0], minlength=len(keys))
        sorted_part = part if order is None else part[order]
        tables = [column if order is None else column[order] for column in self._rank_columns()]
        inside = sorted_part >= 0
        for size in np.unique(counts[counts > 0]).tolist():
            mine = np.flatnonzero(counts == size)
            rows = np.flatnonzero(inside & (counts[np.maximum(sorted_part, 0)] == size))
            each = [t[rows].reshape(len(mine), size) for t in tables]
            keys[mine] = _classes([keys[mine], *each]) + len(keys) * size
        return keys

    @cached_property
    def _rank_part(self) -> np.ndarray:
        fabric = self.resources.fabric
        return fabric.levels[0].part[fabric.rank_node]

    @cached_property
    def _in_order(self) -> bool:
        """Whether ranks come by part, and by `local` inside it."""
        part, local = self._rank_part, self.local
        ahead = part[1:] > part[:-1]
        return bool((ahead | ((part[1:] == part[:-1]) & (local[1:] > local[:-1]))).all())

    def _rank_columns(self) -> list[np.ndarray]:
        fabric, memory = self.resources.fabric, self.resources.memory
        columns = [self.local]
        for table in (fabric.dma_out, fabric.dma_in):
            if len(table) and table[0] >= 0:
                columns += [fabric.rate[table], fabric.latency[table]]
        if memory is not None:
            columns.append(np.asarray(memory.bytes_per_s)[memory.of_rank])
            columns.append(memory.of_rank - self._first_stack[self._rank_part])
            if memory.die is not None:
                columns.append(memory.die)
        return columns

    @cached_property
    def _first_stack(self) -> np.ndarray:
        memory, part = self.resources.memory, self._rank_part
        assert memory is not None
        first = np.full(int(part.max(initial=-1)) + 1, len(memory.bytes_per_s), np.int64)
        np.minimum.at(first, part, memory.of_rank)
        return first

    @cached_property
    def _private_memory(self) -> bool:
        """Whether no stack serves ranks of two parts."""
        memory = self.resources.memory
        if memory is None:
            return True
        part = self._rank_part
        owner = np.full(len(memory.bytes_per_s), -1, np.int64)
        owner[memory.of_rank] = part
        return bool((owner[memory.of_rank] == part).all())


def _classes(columns: list[np.ndarray]) -> np.ndarray:
    """int64[rows]: equal numbers for rows equal in all columns (each int[rows] or int[rows, k])."""
    rows = len(columns[0])
    different = np.zeros(rows, bool)
    for column in columns:
        wrong = column != column[:1]
        different |= wrong if wrong.ndim == 1 else wrong.any(axis=1)
    found: dict[bytes, int] = {}
    which = np.zeros(rows, np.int64)
    for row in np.flatnonzero(different).tolist():
        key = b"".join(np.ascontiguousarray(column[row]).tobytes() for column in columns)
        which[row] = found.setdefault(key, len(found) + 1)
    return which
