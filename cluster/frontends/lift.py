"""A step compiled for a few data-parallel ranks, as the step of many.

XLA's partitioner stops near two thousand virtual devices. Along an axis on which nothing but the
batch is sharded, every rank runs the same program whatever the degree, and only replica groups
grow. So the step is compiled for two small degrees with the batch of each rank as it will be,
`lift` widens the groups of both, and `check_same` makes sure that nothing else depends on the
degree. What remains are float constants (the mean over the batch), which take the same time.

A lifted step has no data plane: its shards are those of the compiled degree.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from trnsim.device.dtypes import is_float
from trnsim.device.errors import Unsupported
from trnsim.device.ops.ir import Block, Module, Operation, TensorType

from ..sharding import Lowered

DEGREES = (2, 4)
"""The degrees to compile for: two, to see what depends on the degree."""

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Axis:
    """The mesh around the lifted axis: ranks are (before, axis, after), the last fastest."""

    name: str
    before: int
    small: int
    after: int
    degree: int

    @classmethod
    def of(cls, mesh: Mapping[str, int], name: str, small: int) -> "Axis":
        """Of a mesh whose axis `name` has the full degree, compiled for `small`."""
        names, sizes = list(mesh), list(mesh.values())
        at = names.index(name)
        return cls(name, math.prod(sizes[:at]), small, math.prod(sizes[at + 1 :]), sizes[at])

    def place(self, ranks: Any) -> np.ndarray:
        """Coordinate of compiled ranks on the axis."""
        return np.asarray(ranks) // self.after % self.small

    def wide(self, ranks: Any, coordinates: Any) -> np.ndarray:
        """Ranks of the full mesh at `coordinates`, otherwise in the place of compiled ranks."""
        ranks = np.asarray(ranks)
        before, after = ranks // (self.after * self.small), ranks % self.after
        return (before * self.degree + coordinates) * self.after + after


def lift(lowered: Lowered, mesh: Mapping[str, int], name: str, small: int) -> Lowered:
    """The step of all ranks of `mesh`, from the one compiled with `small` on axis `name`.

    Raises Unsupported for collectives or tables that cannot be widened.
    """
    axis = Axis.of(mesh, name, small)
    types = list(lowered.module.types)
    body = _block(lowered.module.body, axis, types)
    module = Module(lowered.module.name, tuple(types), body)
    return replace(lowered, module=module, ranks=math.prod(mesh.values()))


def check_same(one: Lowered, other: Lowered, name: str) -> None:
    """Raises Unsupported, with the source line, where two lifted steps differ."""
    first, second = one.module.body.walk(), other.module.body.walk()
    pairs = list(zip(first, second, strict=False))
    for a, b in pairs:
        if not _same(a, b, one.module.types, other.module.types):
            raise Unsupported(
                f"axis {name} cannot be lifted: {a.name} at {a.location or 'an unknown line'} "
                f"depends on its degree; only the batch may be sharded over {name}"
            )
    if len(pairs) != sum(1 for _ in one.module.body.walk()) or one.module.types != (
        other.module.types
    ):
        raise Unsupported(f"axis {name} cannot be lifted: the program depends on its degree")


def _same(
    a: Operation, b: Operation, left: Sequence[TensorType], right: Sequence[TensorType]
) -> bool:
    if (a.name, a.operands, a.results) != (b.name, b.operands, b.results):
        return False
    if [left[v] for v in a.results] != [right[v] for v in b.results]:
        return False
    if a.name == "constant" and is_float(left[a.results[0]].dtype):
        return True
    return a.attributes.keys() == b.attributes.keys() and all(
        np.array_equal(value, b.attributes[key]) for key, value in a.attributes.items()
    )


def _block(block: Block, axis: Axis, types: list[TensorType]) -> Block:
    operations = tuple(_operation(operation, axis, types) for operation in block.operations)
    return Block(block.arguments, operations, block.returns)


def _operation(operation: Operation, axis: Axis, types: list[TensorType]) -> Operation:
    attributes = dict(operation.attributes)
    try:
        if "replica_groups" in attributes:
            attributes["replica_groups"] = widen_groups(attributes["replica_groups"], axis)
        elif "source_target_pairs" in attributes:
            attributes["source_target_pairs"] = _pairs(attributes["source_target_pairs"], axis)
        elif operation.name == "constant":
            attributes["value"] = _table(operation, axis, types)
    except ValueError as error:
        raise Unsupported(
            f"axis {axis.name} cannot be lifted: {operation.name} at "
            f"{operation.location or 'an unknown line'} {error}"
        ) from None
    regions = tuple(_block(region, axis, types) for region in operation.regions)
    return replace(operation, attributes=attributes, regions=regions)


def widen_groups(groups: Groups, axis: Axis) -> Groups:
    """Groups of the full mesh: across the axis they get all its coordinates, along it they repeat.

    Raises ValueError for groups that do neither.
    """
    rows = np.asarray(groups)
    places = axis.place(rows)
    if (places == places[:, :1]).all():
        base = rows[places[:, 0] == 0]
        every = np.arange(axis.degree).reshape(-1, 1, 1)
        return _tuples(axis.wide(base[None], every).reshape(-1, rows.shape[1]))
    return _tuples(np.concatenate([_across(row, axis) for row in rows]))


def _across(row: np.ndarray, axis: Axis) -> np.ndarray:
    """[1, members] of a group that has every coordinate of the axis for the same other places."""
    each = len(row) // axis.small
    for inner in (n for n in range(1, each + 1) if each % n == 0):
        if len(row) % (axis.small * inner):
            continue
        cube = row.reshape(-1, axis.small, inner)
        order, rest = axis.place(cube), axis.wide(cube, 0)
        ascending = (order == np.arange(axis.small)[:, None]).all()
        if ascending and (rest == rest[:, :1]).all():
            wide = axis.wide(cube[:, :1], np.arange(axis.degree)[:, None])
            return wide.reshape(1, -1)
    raise ValueError(f"has groups such as {row[:8].tolist()}, neither along nor across it")


def _pairs(pairs: Groups, axis: Axis) -> Groups:
    ends = np.asarray(pairs).reshape(-1, 2)
    places = axis.place(ends)
    if (places[:, 0] != places[:, 1]).any():
        raise ValueError("sends along it")
    every = np.arange(axis.degree).reshape(-1, 1, 1)
    return _tuples(axis.wide(ends[places[:, 0] == 0][None], every).reshape(-1, 2))


def _table(operation: Operation, axis: Axis, types: list[TensorType]) -> np.ndarray:
    """A table with one number for each rank grows; entries may rise evenly along the axis."""
    value, result = np.asarray(operation.attributes["value"]), operation.results[0]
    kind = types[result]
    if is_float(kind.dtype) or kind.shape != (axis.before * axis.small * axis.after,):
        return operation.attributes["value"]
    cube = np.broadcast_to(value, kind.shape).reshape(axis.before, axis.small, axis.after)
    cube = cube.astype(np.int64)
    step = cube[:, 1:2] - cube[:, :1]
    if (cube != cube[:, :1] + step * np.arange(axis.small).reshape(1, -1, 1)).any():
        raise ValueError("has a number for each rank that does not rise evenly along it")
    wide = cube[:, :1] + step * np.arange(axis.degree).reshape(1, -1, 1)
    types[result] = TensorType((wide.size,), kind.dtype)
    return wide.reshape(-1).astype(value.dtype)


def _tuples(rows: np.ndarray) -> Groups:
    return tuple(map(tuple, rows.tolist()))
