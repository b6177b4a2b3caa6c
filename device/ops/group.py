"""A growing rowwise kernel: operators over one iteration space, unified as they join.

Every value has two patterns over the group's space: `extent` (the axes that its type covers) and
`form` (the axes along which it really varies: a broadcast has the form of its operand). Operators
join by matching the pattern of a value they share with the group; where one of the two spaces is
the other's value, the smaller is lifted into the larger.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from .. import arithmetic
from . import pattern as pt
from .ir import Operation, TensorType
from .pattern import Pattern

MAX_NODES = 96
MAX_INPUTS = 24
RESIDENT_BYTES = 80_000
"""Bytes per partition of one set of row tiles: two rotating sets fit the smallest SBUF."""

REDUCERS = {"add", "multiply", "minimum", "maximum", "and", "or"}
FREE_EXPANSIONS = {"constant", "iota", "broadcast_in_dim"}


@dataclass(frozen=True, slots=True)
class Node:
    """An operator with its operands and results replaced by the values that hold their data.

    `operand_types` and `result_types` are the types at this use; shapes differ by reshapes.
    """

    operation: Operation
    operands: tuple[int, ...]
    results: tuple[int, ...]
    operand_types: tuple[TensorType, ...]
    result_types: tuple[TensorType, ...]

    @property
    def name(self) -> str:
        return self.operation.name


@dataclass(frozen=True, slots=True)
class Space:
    """A node in its own iteration space of `n` points. `columns` is the extent it reduces."""

    n: int
    operands: tuple[Pattern, ...]
    extent: Pattern
    form: Pattern | None = None
    columns: int | None = None


def reducer(operation: Operation) -> str | None:
    """The reduction of a one-input reduce whose region is one known operator."""
    if len(operation.results) != 1 or not operation.regions:
        return None
    block = operation.regions[0]
    if len(block.operations) != 1 or block.returns != block.operations[0].results:
        return None
    inner = block.operations[0]
    known = inner.name in REDUCERS and set(inner.operands) == set(block.arguments)
    return inner.name if known else None


def _reduce_space(node: Node, identity: Callable[[int, TensorType, str], bool]) -> Space | None:
    shape, kind = node.operand_types[0].shape, reducer(node.operation)
    axes = sorted(node.operation.attributes["dimensions"])
    trailing = axes == list(range(len(shape) - len(axes), len(shape)))
    if kind is None or not trailing or not axes or not math.prod(shape):
        return None
    if not identity(node.operands[1], node.operand_types[1], kind):
        return None
    n, columns = math.prod(shape), math.prod(shape[d] for d in axes)
    extent = pt.leading(n // columns, columns)
    return Space(n, (pt.full(n),), extent, extent, columns)


def _broadcast_space(node: Node) -> Space | None:
    dimensions = node.operation.attributes["dimensions"]
    source, result = node.operand_types[0], node.result_types[0]
    if list(dimensions) != sorted(dimensions):
        return None
    operand = pt.of_broadcast(source.shape, dimensions, result.shape)
    return Space(result.size, (operand,), pt.full(result.size), operand)


def _elementwise_space(node: Node) -> Space | None:
    n = node.result_types[0].size
    if node.name == "bitcast_convert" and (
        node.operand_types[0].numpy.itemsize != node.result_types[0].numpy.itemsize
    ):
        return None
    operands = tuple(pt.full(n) if t.size == n else pt.splat(n) for t in node.operand_types)
    return Space(n, operands, pt.full(n))


def space_of(node: Node, identity: Callable[[int, TensorType, str], bool]) -> Space | None:
    """The node's own iteration space, or None if it is not a rowwise operator.

    `identity(value, type, reduction)` tells whether a value is that reduction's identity constant.
    """
    if any(t.size == 0 for t in (*node.operand_types, *node.result_types)):
        return None
    if node.name == "reduce":
        return _reduce_space(node, identity)
    if node.name == "broadcast_in_dim":
        return _broadcast_space(node)
    if node.name == "constant":
        n = node.result_types[0].size
        return Space(n, (), pt.full(n), pt.splat(n))
    if node.name == "iota":
        shape = node.result_types[0].shape
        form = pt.of_axis(node.operation.attributes["dimension"], shape)
        return Space(math.prod(shape), (), pt.full(math.prod(shape)), form)
    if node.name in arithmetic.NAMES or node.name in ("copy", "bitcast_convert"):
        return _elementwise_space(node)
    return None


def is_splat(operation: Operation) -> bool:
    """Whether a constant has one value throughout."""
    value = np.asarray(operation.attributes["value"]).reshape(-1)
    if value.size <= 1:
        return value.size == 1
    raw = np.ascontiguousarray(value).view(np.uint8).reshape(value.size, -1)
    return bool((raw == raw[0]).all())


@dataclass
class Group:
    """Rowwise nodes over one space. `lazy` finds the node of a value that is recomputed here."""

    lazy: Callable[[int], Node | None]
    spaces: Callable[[Node], Space | None]
    n: int = 1
    nodes: list[Node] = field(default_factory=list)
    extent: dict[int, Pattern] = field(default_factory=dict)
    form: dict[int, Pattern] = field(default_factory=dict)
    made: set[int] = field(default_factory=set)
    itemsize: dict[int, int] = field(default_factory=dict)
    columns: int | None = None
    total: bool = False
    sealed: bool = False

    def copy(self) -> "Group":
        """An independent copy, to try a change on."""
        return Group(
            self.lazy, self.spaces, self.n, list(self.nodes), dict(self.extent), dict(self.form),
            set(self.made), dict(self.itemsize), self.columns, self.total, self.sealed,
        )  # fmt: skip

    def inputs(self) -> list[int]:
        """Values that come from outside, in the order of their first use."""
        return [v for v in self.extent if v not in self.made]

    # ---- growing ----

    def leaves(self, node: Node) -> dict[int, Pattern] | None:
        """Patterns of the non-lazy values that `node` needs, in the node's own space."""
        space = self.spaces(node)
        if space is None:
            return None
        found: dict[int, Pattern] = {}
        for value, p in zip(node.operands, space.operands, strict=False):
            inner = self.lazy(value)
            if inner is None:
                below = {value: p}
            else:
                nested = self.leaves(inner)
                if nested is None:
                    return None
                lifted = {v: pt.lift(q, p) for v, q in nested.items()}
                below = {v: q for v, q in lifted.items() if q is not None}
                if len(below) < len(lifted):
                    return None
            for v, q in below.items():
                if found.setdefault(v, q) != q:
                    return None
        return found

    def _lift_all(self, outer: Pattern) -> bool:
        """Moves the group into the space of `outer`, whose value it computes."""
        if self.columns is not None or self.total:
            return False
        for table in (self.extent, self.form):
            for value, p in table.items():
                lifted = pt.lift(p, outer)
                if lifted is None:
                    return False
                table[value] = lifted
        self.n = pt.points(outer)
        return True

    def _anchor(self, node: Node) -> Pattern | None:
        """Where the node's own space lies in the group's, after lifting the group if needed."""
        space, leaves = self.spaces(node), self.leaves(node)
        if space is None or leaves is None:
            return None
        shared = [v for v in leaves if v in self.extent]
        if not self.nodes or not shared:
            return pt.full(space.n) if not self.nodes else None
        value = max(shared, key=lambda v: pt.elements(leaves[v]))
        inner, outer = leaves[value], self.extent[value]
        if pt.elements(inner) != pt.elements(outer):
            return None
        if inner == pt.full(space.n):
            return outer
        if outer == pt.full(self.n):
            return pt.full(space.n) if self._lift_all(inner) else None
        return pt.full(self.n) if space.n == self.n and inner == outer else None

    def _place(self, value: int, extent: Pattern, dtype: TensorType) -> bool:
        """Makes `value` with this extent available: known, recomputed, or an input."""
        if value in self.extent:
            return self.extent[value] == extent
        node = self.lazy(value)
        if node is not None:
            return self._append(node, extent)
        self.extent[value] = self.form[value] = extent
        self.itemsize[value] = dtype.numpy.itemsize
        return True

    def _append(self, node: Node, where: Pattern) -> bool:
        """Adds a node whose own space is the varying part of `where`."""
        space = self.spaces(node)
        if space is None or (space.columns is not None and not self._reduces(space, where)):
            return False
        for value, p, t in zip(node.operands, space.operands, node.operand_types, strict=False):
            lifted = pt.lift(p, where)
            if lifted is None or not self._place(value, lifted, t):
                return False
        extent, result = pt.lift(space.extent, where), node.results[0]
        form = (
            pt.union([self.form[v] for v in node.operands], self.n)
            if space.form is None
            else pt.lift(space.form, where)
        )
        if node.name == "broadcast_in_dim":
            form = self.form[node.operands[0]]
        if extent is None or form is None:
            return False
        self.extent[result], self.form[result] = extent, form
        self.itemsize[result] = node.result_types[0].numpy.itemsize
        self.made.add(result)
        self.nodes.append(node)
        return True

    def _reduces(self, space: Space, where: Pattern) -> bool:
        if where != pt.full(self.n) or space.n != self.n:
            return False
        if space.columns == self.n and self.n > 1:
            self.total = True
        elif self.columns not in (None, space.columns):
            return False
        else:
            self.columns = space.columns
        return not (self.total and self.columns is not None)

    def add(self, node: Node) -> bool:
        """Tries to take `node` in; False leaves the group in an undefined state (use a copy)."""
        where = self._anchor(node)
        if where is None:
            return False
        if not self.nodes:
            self.n = pt.points(where)
        return self._append(node, where) and self.legal()

    def absorb(self, other: "Group", shared: Iterable[int]) -> bool:
        """Tries to put `other`, which computes the `shared` inputs of this group, before it."""
        value = max(shared, key=lambda v: pt.elements(self.extent[v]))
        mine, theirs = self.extent[value], other.extent[value]
        if theirs == pt.full(other.n) and other.n != self.n:
            if not other._lift_all(mine):
                return False
        elif mine == pt.full(self.n) and other.n != self.n:
            if not self._lift_all(theirs):
                return False
        if self.n != other.n or {self.columns, other.columns} - {
            None,
            self.columns or other.columns,
        }:
            return False
        if any(self.extent.get(v, p) != p for v, p in other.extent.items()):
            return False
        later = [node for node in self.nodes if node.results[0] not in other.made]
        self.nodes = other.nodes + later
        self.extent = other.extent | self.extent
        self.made |= other.made
        self.itemsize |= other.itemsize
        self.columns = self.columns or other.columns
        self.total = self.total or other.total
        return self._recompute_forms() and self.legal()

    def _recompute_forms(self) -> bool:
        """Forms follow from the inputs once the nodes are all here."""
        form = {v: self.extent[v] for v in self.inputs()}
        for node in self.nodes:
            result, space = node.results[0], self.spaces(node)
            if node.name == "broadcast_in_dim":
                found = form[node.operands[0]]
            elif node.name == "reduce":
                found = self.extent[result]
            elif space is not None and space.form is not None:
                found = pt.lift(space.form, self.extent[result])
            else:
                found = pt.union([form[v] for v in node.operands], self.n)
            if found is None:
                return False
            form[result] = found
        self.form = form
        return True

    # ---- what a kernel allows ----

    def axes(self) -> tuple[int, ...] | None:
        """Extents of the iteration space's axes; the last is the free axis. None if they clash."""
        found = {1, self.n}
        for p in (*self.extent.values(), *self.form.values()):
            found |= pt.cuts(extent for extent, _ in p)
        if self.columns is not None:
            found.add(self.columns)
            if any(1 < cut < self.columns for cut in found):
                return None
        return pt.axes(found)

    def partial(self, value: int) -> bool:
        """Whether the value spans some row axes and not others."""
        axes = self.axes() or ()
        flags = pt.mask(self.extent[value], axes)[:-1]
        return len(set(flags)) > 1

    def tainted(self) -> set[int]:
        """Values that depend on a reduction made here."""
        found: set[int] = set()
        for node in self.nodes:
            if node.name == "reduce" or found.intersection(node.operands):
                found.add(node.results[0])
        return found

    @property
    def row_resident(self) -> bool:
        """Whether whole rows must stay in SBUF: a full value depends on a reduction made here."""
        if self.columns is None:
            return False
        return any(self.form[v] and self.form[v][-1][1] for v in self.tainted())

    def legal(self) -> bool:
        """Whether the nest can run this group: sizes, axes, and what depends on reductions."""
        if len(self.nodes) > MAX_NODES or len(self.inputs()) > MAX_INPUTS:
            return False
        axes = self.axes()
        if axes is None or len(axes) > 5:
            return False
        if self.total:
            return all(pt.elements(self.extent[v]) == 1 for v in self.tainted())
        return not self.row_resident or self.live_bytes(self.columns or 1) <= RESIDENT_BYTES

    def live_bytes(self, columns: int) -> int:
        """Largest sum of the values that live at once, in bytes per partition of a row tile."""
        wide = [v for v, p in self.form.items() if p and p[-1][1]]
        last = {v: i for i, node in enumerate(self.nodes) for v in node.operands}
        live = sum(self.itemsize[v] for v in wide if v not in self.made)
        peak = live
        for i, node in enumerate(self.nodes):
            result = node.results[0]
            if result in wide and node.name != "broadcast_in_dim":
                live += max(self.itemsize[result], 4)
            peak = max(peak, live)
            ending = {v for v in (*node.operands, result) if last.get(v, -1) == i and v in wide}
            live -= sum(max(self.itemsize[v], 4) for v in ending if v in self.made)
        return peak * columns
