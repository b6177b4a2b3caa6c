"""Routes of many pairs as arrays: compressed rows, built from columns of one link per pair."""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np


@dataclass(frozen=True, eq=False)
class Routes:
    """Paths of P pairs in compressed rows: pair p takes links[starts[p]:starts[p + 1]].

    starts: int64[P + 1]; links: int32[total]; latency: int64[P] picoseconds, summed over the links.
    """

    starts: np.ndarray
    links: np.ndarray
    latency: np.ndarray

    @cached_property
    def pairs(self) -> np.ndarray:
        """int32[total]: the pair that each entry of `links` belongs to."""
        each = np.arange(len(self.latency), dtype=np.int32)
        return np.repeat(each, np.diff(self.starts))

    def path(self, pair: int) -> list[int]:
        """Link ids of one pair, in order."""
        return self.links[self.starts[pair] : self.starts[pair + 1]].tolist()

    def used(self, links: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids, compact): the links in use, ascending, and int32[total] each entry's place there.

        links: how many the fabric has. As np.unique with return_inverse, without sorting.
        """
        flags = np.zeros(links, bool)
        flags[self.links] = True
        ids = np.flatnonzero(flags)
        place = np.empty(links, np.int32)
        place[ids] = np.arange(len(ids), dtype=np.int32)
        return ids, place[self.links]


Column = tuple[np.ndarray | None, np.ndarray]


@dataclass(eq=False)
class Columns:
    """The next link of some of the P pairs, column after column.

    A column is (rows, links): which pairs (each at most once; None: all of them), and their link.
    """

    pairs: int
    columns: list[Column] = field(default_factory=list)

    def add(self, rows: np.ndarray | None, links: np.ndarray) -> None:
        """Append a column; negative links are left out."""
        present = links >= 0
        if not present.all():
            rows = np.flatnonzero(present) if rows is None else rows[present]
            links = links[present]
        if len(links):
            self.columns.append((rows, links))

    def without(self, broken: np.ndarray) -> "Columns":
        """The same columns without the pairs in the mask `broken`."""
        kept = Columns(self.pairs)
        for rows, links in self.columns:
            keep = ~broken if rows is None else ~broken[rows]
            kept.add(np.flatnonzero(keep) if rows is None else rows[keep], links[keep])
        return kept

    def touching(self, wrong: np.ndarray) -> np.ndarray:
        """bool[pairs]: the pairs that use a link in the mask `wrong`."""
        touched = np.zeros(self.pairs, bool)
        for rows, links in self.columns:
            if rows is None:
                touched |= wrong[links]
            else:
                touched[rows[wrong[links]]] = True
        return touched

    def routes(self, latency: np.ndarray) -> Routes:
        """Compressed rows; latency: int64[links] of each link."""
        total = np.zeros(self.pairs, np.int64)
        for rows, links in self.columns:
            if rows is None:
                total += latency[links]
            else:
                total[rows] += latency[links]
        if all(rows is None for rows, _ in self.columns):
            return self._full(total)
        return Routes(*self._ragged(), total)

    def _full(self, latency: np.ndarray) -> Routes:
        width = len(self.columns)
        links = np.empty((self.pairs, width), np.int32)
        for k, (_, column) in enumerate(self.columns):
            links[:, k] = column
        return Routes(np.arange(self.pairs + 1) * width, links.reshape(-1), latency)

    def _ragged(self) -> tuple[np.ndarray, np.ndarray]:
        starts = np.zeros(self.pairs + 1, np.int64)
        lengths = starts[1:]
        for rows, _ in self.columns:
            lengths[slice(None) if rows is None else rows] += 1
        np.cumsum(lengths, out=lengths)
        links, at = np.empty(starts[-1], np.int32), starts[:-1].copy()
        for rows, column in self.columns:
            mine = slice(None) if rows is None else rows
            links[at[mine]] = column
            at[mine] += 1
        return starts, links
