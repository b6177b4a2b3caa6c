"""How a group lies on a fabric: its servers, chips and torus, as far as algorithms ask for it.

Several groups that run one collective share a schedule, so what is said here holds for all of them;
where they differ, it is None. Positions are places in the group.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .routes import Fabric


@dataclass(frozen=True, eq=False)
class Layout:
    """servers: int64[n], the server of each position, numbered by first appearance.

    places: int64[X, Y] positions by (server, local index), if the group is symmetric: the same
    local indices on every server (the vendor's rule for hierarchies).
    chips: int64[C, k] positions on each chip, in the fabric's order, if all chips have k.
    whole: whether all ranks of these chips are in the group.
    grid: int64[.., k] positions by torus coordinate and index on the chip, if the group fills tori.
    Layouts with equal arrays are equal.
    """

    servers: np.ndarray | None
    places: np.ndarray | None = None
    chips: np.ndarray | None = None
    whole: bool = False
    grid: np.ndarray | None = None

    @classmethod
    def of_servers(cls, servers: Sequence[int] | None) -> "Layout":
        """From the server of each position alone."""
        if servers is None:
            return cls(None)
        names = _numbered(np.asarray(servers, np.int64))
        sizes = np.bincount(names)
        even = sizes.min() == sizes.max()
        places = np.argsort(names, kind="stable").reshape(len(sizes), -1) if even else None
        return cls(names, places)

    @property
    def per_server(self) -> list[int] | None:
        """Ranks on each server."""
        return None if self.servers is None else np.bincount(self.servers).tolist()

    @property
    def local_chips(self) -> np.ndarray | None:
        """int64[C, k]: local indices on each chip of a server; None unless whole and symmetric."""
        if self.chips is None or self.places is None or not self.whole:
            return None
        local = np.full(self.places.size, -1)
        local[self.places[0]] = np.arange(self.places.shape[1])
        table = local[self.chips]
        mine = table[(table >= 0).all(axis=1)]
        return mine if mine.size == self.places.shape[1] else None

    @cached_property
    def _key(self) -> tuple:
        arrays = (self.servers, self.places, self.chips, self.grid)
        return self.whole, *(None if a is None else (a.shape, a.tobytes()) for a in arrays)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


def layout(groups: np.ndarray, fabric: Fabric) -> Layout:
    """The layout of groups (int[G, n] ranks) on a fabric."""
    nodes, servers = fabric.rank_node[groups], fabric.rank_server[groups]
    names = _numbered(servers[0]) if _alike(servers) else None
    chip = _numbered(nodes[0]) if _alike(nodes) else None
    chips = None if chip is None else _table(chip, groups[0])
    return Layout(
        names,
        None if names is None else _places(names, groups, fabric),
        chips,
        chips is not None and _whole(nodes, chips.shape[1], fabric),
        None
        if chips is None or len(set(servers[0].tolist())) > 1
        else _grid(nodes[0], chips, fabric),
    )


def chip_orders(rings: np.ndarray, chips: np.ndarray) -> np.ndarray:
    """int64[channels, C]: rows of `chips` in the order in which each ring comes to them."""
    chip = np.empty(chips.size, np.int64)
    chip[chips] = np.arange(len(chips))[:, None]
    first = np.stack([np.unique(chip[ring], return_index=True)[1] for ring in rings])
    return np.argsort(first, axis=1)


def _numbered(values: np.ndarray) -> np.ndarray:
    """int64[n]: the values as numbers by first appearance."""
    _, first, which = np.unique(values, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[which]


def _alike(values: np.ndarray) -> bool:
    """Whether all rows (int[G, n]) have equal values at the same positions as the first row."""
    _, first, which = np.unique(values[0], return_index=True, return_inverse=True)
    each = np.sort(values[:, first], axis=1)
    return bool((values == values[:, first[which]]).all() and (np.diff(each, axis=1) > 0).all())


def _table(chip: np.ndarray, ranks: np.ndarray) -> np.ndarray | None:
    """int64[C, k]: positions by chip, then by rank; None unless all chips have the same number."""
    sizes = np.bincount(chip)
    return None if np.ptp(sizes) else np.lexsort([ranks, chip]).reshape(len(sizes), -1)


def _places(names: np.ndarray, groups: np.ndarray, fabric: Fabric) -> np.ndarray | None:
    """Positions by (server, local index), if the same local indices are on every server."""
    sizes = np.bincount(names)
    if np.ptp(sizes):
        return None
    local = _local(fabric)[groups]
    places = np.lexsort([local[0], names]).reshape(len(sizes), -1)
    indices = local[:, places]
    return places if (indices == indices[:, :1]).all() else None


def _local(fabric: Fabric) -> np.ndarray:
    """int64[ranks]: the index of each rank on its server."""
    server = fabric.rank_server
    order = np.argsort(server, kind="stable")
    first = np.searchsorted(server[order], server[order])
    local = np.empty(len(server), np.int64)
    local[order] = np.arange(len(server)) - first
    return local


def _whole(nodes: np.ndarray, per_chip: int, fabric: Fabric) -> bool:
    """Whether the chips under these ranks have no other ranks."""
    return bool((np.bincount(fabric.rank_node)[nodes] == per_chip).all())


def _grid(nodes: np.ndarray, chips: np.ndarray, fabric: Fabric) -> np.ndarray | None:
    """Positions by coordinate, if the chips are all those of one torus of 2 or more dimensions."""
    under = nodes[chips[:, 0]]
    extents = fabric.extents[under]
    dims = extents[0]
    if (extents != dims).any() or np.prod(dims) != len(under) or (dims > 1).sum() < 2:
        return None
    place = np.ravel_multi_index(tuple(fabric.coordinates[under].T), tuple(dims.tolist()))
    if len(np.unique(place)) != len(under):
        return None
    wide = tuple(extent for extent in dims.tolist() if extent > 1)
    return chips[np.argsort(place)].reshape(*wide, chips.shape[1])
