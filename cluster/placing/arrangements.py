"""Regular placements of a mesh: which part of which axis goes along which physical dimension.

An arrangement gives every physical dimension a list of (axis, degree), outer to inner, whose
degrees multiply to its extent; the parts of an axis, from the first dimension to the last, multiply
to its degree. Axis orders, strides and sub-blocks of a torus are all of this form:

    tp=32, dp=2 on 4 rows x 4 columns x 4 cores
    default      row: dp2 tp2   column: tp4   core: tp4     tp is 2 neighbouring rows
    folded       row: tp2 dp2 (folded)  ...                 tp is rows 0+3 and 1+2

In a folded dimension every second run of an inner part goes backwards, as an ox ploughs, so that
the ends of neighbouring runs are neighbours.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..mesh import Mesh
from .positions import Positions, flat

Part = tuple[str, int]


@dataclass(frozen=True)
class Arrangement:
    """A regular placement: `parts[d]` along dimension d of `positions`; `folded` dimensions."""

    positions: Positions
    parts: tuple[tuple[Part, ...], ...]
    folded: frozenset[int] = frozenset()

    def slots(self, mesh: Mesh) -> np.ndarray:
        """int64[ranks]: the place of each rank of the mesh."""
        ranks = np.arange(mesh.size)
        strides, degrees = mesh.strides(), dict(mesh.axes)
        coordinate = {name: ranks // strides[name] % degrees[name] for name in mesh.names}
        left = dict(degrees)
        slots = np.zeros(mesh.size, np.int64)
        for dimension, parts in enumerate(self.parts):
            along = np.zeros(mesh.size, np.int64)
            for name, degree in parts:
                left[name] //= degree
                digit = coordinate[name] // left[name] % degree
                if dimension in self.folded:
                    digit = np.where(along % 2 == 1, degree - 1 - digit, digit)
                along = along * degree + digit
            slots = slots * self.positions.extents[dimension] + along
        return slots

    def __str__(self) -> str:
        shown = []
        for index, (dimension, parts) in enumerate(
            zip(self.positions.dimensions, self.parts, strict=True)
        ):
            along = " ".join(f"{name}{degree}" for name, degree in parts)
            fold = " folded" if index in self.folded else ""
            shown.append(f"{dimension.name}: {along}{fold}")
        return ", ".join(shown)


def orders(mesh: Mesh) -> Iterator[tuple[str, np.ndarray]]:
    """Every order of the axes of degree above 1, outer to inner, on the places in order."""
    wide = [axis for axis in mesh.axes if axis[1] > 1]
    for order in itertools.permutations(wide):
        name = "order " + ",".join(axis for axis, _ in order)
        yield name, Arrangement(flat(mesh.size), (order,)).slots(mesh)


def strides(mesh: Mesh) -> Iterator[tuple[str, np.ndarray]]:
    """One axis in two parts, with other axes between them, in every order of the parts."""
    wide = [axis for axis in mesh.axes if axis[1] > 1]
    for index, (axis, degree) in enumerate(wide):
        rest = wide[:index] + wide[index + 1 :]
        for outer in _divisors(degree)[1:-1]:
            for order in itertools.permutations(rest):
                for first, last in itertools.combinations(range(len(order) + 1), 2):
                    parts = [*order[:first], (axis, outer), *order[first:last]]
                    parts += [(axis, degree // outer), *order[last:]]
                    shown = ",".join(f"{name}{extent}" for name, extent in parts)
                    yield (
                        f"stride {shown}",
                        Arrangement(flat(mesh.size), (tuple(parts),)).slots(mesh),
                    )


def blocks(mesh: Mesh, positions: Positions) -> Iterator[Arrangement]:
    """Sub-blocks: every way to give the axes parts of the dimensions, in every order, and folded.

    `positions` must have exactly as many places as the mesh has ranks.
    """
    wide = tuple(axis for axis in mesh.axes if axis[1] > 1)
    for parts in _shares(positions.extents, dict(wide)):
        for ordered in itertools.product(*(itertools.permutations(each) for each in parts)):
            yield Arrangement(positions, ordered)
            for dimension, each in enumerate(ordered):
                if len(each) > 1:
                    yield Arrangement(positions, ordered, frozenset((dimension,)))


def _shares(extents: Sequence[int], left: dict[str, int]) -> Iterator[tuple[tuple[Part, ...], ...]]:
    """For each dimension the degrees (above 1) that it gives to the axes; all axes used up."""
    if not extents:
        if all(degree == 1 for degree in left.values()):
            yield ()
        return
    for share in _products(extents[0], tuple(left.items())):
        rest = left | {name: left[name] // degree for name, degree in share}
        if math.prod(rest.values()) == math.prod(extents[1:]):
            for others in _shares(extents[1:], rest):
                yield (share, *others)


def _products(extent: int, axes: Sequence[Part]) -> Iterator[tuple[Part, ...]]:
    """Ways to write `extent` as a product of divisors of the axes' degrees."""
    if not axes:
        if extent == 1:
            yield ()
        return
    (name, degree), rest = axes[0], axes[1:]
    for part in _divisors(math.gcd(extent, degree)):
        for others in _products(extent // part, rest):
            yield ((name, part), *others) if part > 1 else others


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
