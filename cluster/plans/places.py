"""Places: the ranks of one pipeline stage, numbered alike in every stage, and classes of them.

A place is a position on all axes of the mesh but `pp`, row-major; place q of stage s is the rank
with those coordinates. Places that cannot differ in time form a class, and a clock is kept for each
class. What may make places differ is given as numbers per place; classes follow, never the reverse.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ..mesh import Mesh

Array = np.ndarray
STAGE_AXIS = "pp"


@dataclass(frozen=True)
class Places:
    """Ranks of a mesh by (stage, place)."""

    mesh: Mesh

    @property
    def stages(self) -> int:
        """Pipeline stages: 1 without the axis."""
        return dict(self.mesh.axes).get(STAGE_AXIS, 1)

    @property
    def count(self) -> int:
        """Places of a stage."""
        return self.mesh.size // self.stages

    @cached_property
    def ranks(self) -> Array:
        """int64[stages, places]: the rank at each place."""
        grid = np.arange(self.mesh.size, dtype=np.int64).reshape(self.mesh.shape)
        if STAGE_AXIS in self.mesh.names:
            grid = np.moveaxis(grid, self.mesh.names.index(STAGE_AXIS), 0)
        return grid.reshape(self.stages, -1)

    def groups(self, axes: Sequence[str]) -> Array:
        """int64[groups, members] places: members differ on the axes as named, in their order."""
        for axis in axes:
            self.mesh.degree(axis)  # raises BadInput for an axis that is not there
        rest = [(name, degree) for name, degree in self.mesh.axes if name != STAGE_AXIS]
        names = [name for name, _ in rest]
        grid = np.arange(self.count, dtype=np.int64).reshape([degree for _, degree in rest])
        order = [i for i, name in enumerate(names) if name not in axes]
        order += [names.index(axis) for axis in axes]
        members = int(np.prod([self.mesh.degree(axis) for axis in axes], dtype=np.int64))
        return np.ascontiguousarray(grid.transpose(order).reshape(-1, members))


@dataclass(frozen=True, eq=False)
class Classes:
    """Places by class: `of[place]`, and the first place of each class."""

    of: Array
    first: Array
    _rows: dict[int, tuple[Array, tuple[Array, Array]]] = field(default_factory=dict, repr=False)

    @property
    def count(self) -> int:
        """How many classes there are."""
        return len(self.first)

    @cached_property
    def sizes(self) -> Array:
        """int64[classes]: places of each."""
        return np.bincount(self.of, minlength=self.count)

    def rows(self, groups: Array) -> tuple[Array, Array]:
        """(int64[rows, members] classes that meet, int64[classes] the row of each class).

        Of the groups that the first places of the classes are in.
        """
        if id(groups) not in self._rows:
            self._rows[id(groups)] = (groups, self._new_rows(groups))
        return self._rows[id(groups)][1]

    def _new_rows(self, groups: Array) -> tuple[Array, Array]:
        row_of_place = np.empty(groups.size, np.int64)
        row_of_place[groups.reshape(-1)] = np.repeat(np.arange(len(groups)), groups.shape[1])
        needed, row = np.unique(row_of_place[self.first], return_inverse=True)
        return self.of[groups[needed]], row


def classes_of(
    places: int, values: Iterable[Array], groups: Sequence[Array], partners: Sequence[Array] = ()
) -> Classes:
    """The coarsest classes in which places have equal `values` and meet equal classes.

    values: arrays of one number, or of one per place. groups: int64[groups, members] tables with
    every place once: places of a class are in groups of the same row of classes. partners:
    int64[places] tables of one other place each.
    """
    of = np.zeros(places, np.int64)
    for value in _distinct(values):
        if value.size > 1 and (value != value[0]).any():
            of = _refined(of, value)
    partners = _distinct(partners)
    while of.any():  # one class meets only itself
        finer = of
        for table in groups:
            finer = _met(finer, table)
        for table in partners:
            finer = _refined(finer, finer[table])
        if finer.max() == of.max():
            break
        of = finer
    return Classes(of, np.unique(of, return_index=True)[1])


def _distinct(arrays: Iterable[Array]) -> list[Array]:
    """Those of different content, in order."""
    return list({array.tobytes(): array for array in arrays}.values())


def _refined(of: Array, value: Array) -> Array:
    """Classes told apart by one more number of each place."""
    _, kind = np.unique(value, return_inverse=True)
    _, finer = np.unique(of * (int(kind.max()) + 1) + kind, return_inverse=True)
    return finer


def _met(of: Array, groups: Array) -> Array:
    """Classes told apart by the row of classes of their group."""
    kinds: dict[bytes, int] = {}
    kind = np.array([kinds.setdefault(row.tobytes(), len(kinds)) for row in of[groups]], np.int64)
    found = np.empty(of.shape, np.int64)
    found[groups] = kind[:, None]
    return _refined(of, found)


def connected(count: int, tables: Iterable[Array]) -> Array:
    """int64[count]: the least member of each class's component, where rows of tables connect."""
    label = np.arange(count)
    tables = [table for table in tables if table.shape[1] > 1]
    while True:
        before = label
        for table in tables:
            label = label.copy()
            np.minimum.at(label, table, label[table].min(axis=1)[:, None])
        if np.array_equal(before, label):
            return label
