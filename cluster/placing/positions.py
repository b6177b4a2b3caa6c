"""The physical dimensions along which the ranks of a fabric lie: nodes, torus axes, cores."""

import math
from dataclasses import dataclass

import numpy as np

from trnsim.collectives.fabric import Fabric

from ..instances import Instance
from ..lnc import logical_per_chip


@dataclass(frozen=True)
class Dimension:
    """One physical dimension and how many places it has."""

    name: str
    extent: int


@dataclass(frozen=True)
class Positions:
    """A box of places, outermost dimension first: place p is row-major in it, as slots are."""

    dimensions: tuple[Dimension, ...]

    @property
    def extents(self) -> tuple[int, ...]:
        """Places along each dimension."""
        return tuple(dimension.extent for dimension in self.dimensions)

    @property
    def size(self) -> int:
        """How many places there are."""
        return math.prod(self.extents)

    def first(self, count: int) -> "Positions":
        """The places 0 to count - 1 as a box; as one dimension if they are no box."""
        kept: list[Dimension] = []
        left = count
        for dimension in reversed(self.dimensions):
            if left % dimension.extent and dimension.extent % left:
                return flat(count)
            kept.insert(0, Dimension(dimension.name, min(dimension.extent, left)))
            left //= kept[0].extent
        return Positions(tuple(kept))

    def __str__(self) -> str:
        return " x ".join(f"{d.extent} {d.name}{'s' * (d.extent > 1)}" for d in self.dimensions)


def flat(count: int) -> Positions:
    """Places in one dimension."""
    return Positions((Dimension("place", count),))


def of_instance(instance: Instance, nodes: int, lnc: int) -> Positions:
    """Nodes, the instance's own dimensions (torus axes, or racks, servers and chips), cores."""
    inner = _inside(instance)
    cores = logical_per_chip(instance.chip, lnc)
    found = [("node", nodes), *inner, ("core", cores)]
    return Positions(tuple(Dimension(name, extent) for name, extent in found if extent > 1))


def _inside(instance: Instance) -> list[tuple[str, int]]:
    if instance.topology == "switch":
        racks, servers = instance.racks, instance.servers
        return [("rack", racks), ("server", servers // racks), ("chip", instance.chips_per_server)]
    dims = instance.dims or (instance.chips,)
    return list(zip(_axes(len(dims), "server"), dims, strict=True))


def _axes(dims: int, third: str) -> tuple[str, ...]:
    """Names of a torus's axes, the last one fastest."""
    near = ("row", "column") if dims > 1 else ("chip",)
    outer = (third,) if dims == 3 else tuple(f"axis {d}" for d in range(dims - len(near)))
    return (*outer, *near)


def of_fabric(fabric: Fabric) -> Positions:
    """Servers, torus axes and ranks of a chip, if all servers are one torus and all chips alike.

    Else the ranks are one dimension.
    """
    whole = flat(fabric.ranks)
    chips, each = np.unique(fabric.rank_node, return_counts=True)
    dims = fabric.extents[chips[0]].tolist() if fabric.ranks else []
    alike = bool((fabric.extents[chips] == dims).all()) and len(set(each.tolist())) == 1
    if not alike or math.prod(dims) < 1 or len(chips) % math.prod(dims):
        return whole
    if (np.diff(fabric.rank_node) < 0).any():
        return whole
    axes = list(zip(_axes(len(dims), "plane"), dims, strict=True))
    found = [("server", len(chips) // math.prod(dims)), *axes, ("core", int(each[0]))]
    made = Positions(tuple(Dimension(name, extent) for name, extent in found if extent > 1))
    return made if made.size == fabric.ranks else whole
