"""Groups of cores that are equal on equal sets of nodes: one set stands for all."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .places import Array


@dataclass(frozen=True, eq=False)
class Fold:
    """A table of cores as equal sets of nodes: `rows` of one set, on nodes 0..nodes-1.

    order: the rows of the table, set by set. Folds of equal rows are equal.
    """

    nodes: int
    rows: Array
    order: Array

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Fold) or self.nodes != other.nodes:
            return False
        return self is other or np.array_equal(self.rows, other.rows)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.nodes, self.rows.shape, self.rows.tobytes()))

    def expand(self, ends: Array) -> Array:
        """int64[table rows, members] from the ends of one set."""
        whole = np.empty((len(self.order), ends.shape[1]), np.int64)
        whole[self.order] = np.tile(ends, (len(self.order) // len(ends), 1))
        return whole


def folded(table: Array, per_node: int, nodes: int) -> Fold:
    """The table of logical cores, int64[rows, members], on one of its sets if all are equal.

    Nodes that share a row are of one set. Sets are equal if they have the same rows, nodes and rows
    taken in order.
    """
    node, core = np.divmod(table, per_node)
    label = _sets(node, nodes)
    order = np.argsort(label[node[:, 0]], kind="stable")
    sets, rows = np.unique(label[node[:, 0]], return_counts=True)
    members = np.flatnonzero(np.isin(label, sets))
    members = members[np.argsort(label[members], kind="stable")]
    size, odd = divmod(len(members), len(sets))
    if not odd and (rows == rows[0]).all() and (label[members[::size]] == sets).all():
        position = np.empty(nodes, np.int64)
        position[members] = np.arange(len(members)) % size
        local = (position[node] * per_node + core)[order].reshape(len(sets), rows[0], -1)
        if (local == local[0]).all():
            return Fold(size, np.ascontiguousarray(local[0]), order)
    return unfolded(table, nodes)


def unfolded(table: Array, nodes: int) -> Fold:
    """The table as it is."""
    return Fold(nodes, table, np.arange(len(table)))


def _sets(node: Array, nodes: int) -> Array:
    """int64[nodes]: the least node of the set that each node is in; rows of `node` are joined."""
    label = np.arange(nodes)
    while True:
        least = label[node].min(axis=1)
        if (label[node] == least[:, None]).all():
            return label
        np.minimum.at(label, node, least[:, None])
