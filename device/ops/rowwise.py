"""Rowwise kernels: fused elementwise operators and reductions along rows, in one pass over memory.

The iteration space has row axes and, last, one free axis (`axes`). Each value has two masks over
the axes: `extents` (what its array spans) and `forms` (along which axes it really varies).
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import arithmetic
from . import pattern as pt
from .axes import Box, boxes
from .group import Group, Node, reducer
from .ir import Operation, TensorType
from .kernel import Kernel, Layout, Part, split_rows, whole
from .narrow import narrowed

BLOCK_ELEMENTS = 1 << 16
"""Elements of a block of rows: its values stay in the host's cache between operators."""

LONG_ROW = 512
"""Elements per row from which on DMA and instructions are efficient."""

ATTRIBUTES = ("direction", "compare_type", "exponent_bits", "mantissa_bits")
_DIRECT: dict[str, np.ufunc] = {
    "add": np.add, "subtract": np.subtract, "multiply": np.multiply, "divide": np.divide,
    "maximum": np.maximum, "minimum": np.minimum, "exponential": np.exp, "tanh": np.tanh,
    "sqrt": np.sqrt, "negate": np.negative, "abs": np.abs, "log": np.log,
}  # fmt: skip


def choose_columns(n: int, shape: Sequence[int]) -> int:
    """Free extent for `n` points without structure, of an array of `shape`: rows for all
    partitions, long runs, and whole trailing axes where possible (as matmuls lay rows out).

    Rows that are short lie side by side where enough are left for all partitions."""
    if n <= 512:
        return n
    trailing = sorted(c for c in pt.cuts(shape) if n // c >= 128 and 32 <= c <= 8192)
    long = [c for c in trailing if c >= LONG_ROW]
    if trailing:
        return long[0] if long else _side_by_side(n, trailing[-1])
    best = max((c for c in _divisors(n) if c <= 2048 and n // c >= 128), default=1)
    if best >= 16:
        return best
    return n // max(c for c in _divisors(n) if c <= 128)


def _side_by_side(n: int, row: int) -> int:
    """Whole rows of `row` elements that make a long one, while there are 128 of these."""
    fitting = [k for k in _divisors(n // row) if n // (row * k) >= 128]
    return row * next((k for k in fitting if row * k >= LONG_ROW), fitting[-1])


def _divisors(n: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


@dataclass(frozen=True, kw_only=True, eq=False)
class RowwiseKernel(Kernel):
    """`total`: reductions run over the whole space. `resident`: whole rows stay in SBUF."""

    axes: tuple[int, ...]
    extents: dict[int, tuple[bool, ...]]
    forms: dict[int, tuple[bool, ...]]
    total: bool = False
    resident: bool = False

    @property
    def rows(self) -> int:
        """Points of the row axes."""
        return math.prod(self.axes[:-1])

    @property
    def columns(self) -> int:
        """Extent of the free axis."""
        return self.axes[-1]

    @property
    def splittable(self) -> bool:
        """Whether rows can be divided: every output has all row axes, or none."""
        rows = [self.extents[v][:-1] for v in self.outputs]
        long = [a > 1 for a in self.axes[:-1]]
        for flags in rows:
            seen = {f for f, matters in zip(flags, long, strict=True) if matters}
            if len(seen) > 1:
                return False
        return not self.total and self.rows > 1

    def part(self, core: int, cores: int) -> Part:
        if not self.splittable:
            return whole(self.rows, core, cores)
        return split_rows(self.rows, core, cores)

    def _interval(self, value: int, part: Part) -> tuple[int, int]:
        flags, size = self.extents[value], self.types[value].size
        lead = 0
        while lead < len(self.axes) - 1 and (flags[lead] or self.axes[lead] == 1):
            lead += 1
        inner = math.prod(self.axes[lead:-1])
        units = math.prod(self.axes[:lead])
        each = size // max(units, 1)
        return part.start // inner * each, -(-part.stop // inner) * each

    def reads(self, part: Part) -> dict[int, tuple[int, int]]:
        return {} if part.empty else {v: self._interval(v, part) for v in self.inputs}

    def writes(self, part: Part) -> dict[int, tuple[int, int]]:
        return {} if part.empty else {
            v: self._interval(v, part) for v in self.outputs if self.written(v, part)
        }  # fmt: skip

    def written(self, value: int, part: Part) -> bool:
        """Whether this part writes `value`: one without row axes is written by the first."""
        has_rows = any(
            f for f, a in zip(self.extents[value][:-1], self.axes[:-1], strict=True) if a > 1
        )
        return has_rows or part.start == 0

    def layout(self, value: int, part: Part) -> Layout | None:
        from .rowwise_plan import WIDE, plan

        spans = all(f or a == 1 for f, a in zip(self.forms[value], self.axes, strict=True))
        if (
            self.fallback
            or part.empty
            or not spans
            or self.total
            or self.rows < 2
            or self.columns < 2
        ):
            return None
        planned = plan(self)
        if planned.kind[value] != WIDE or planned.root[value] != value:
            return None
        return Layout(self.rows, self.columns, part.start, part.stop, self.types[value].dtype)

    def nest(self, context: Any) -> Any:
        from . import host_nest, rowwise_nest

        return (host_nest if self.fallback else rowwise_nest).nest(self, context)

    def _details(self, number: Mapping[int, int]) -> Hashable:
        masks = (
            tuple(sorted((number[v], m) for v, m in table.items()))
            for table in (self.extents, self.forms)
        )
        return (self.axes, *masks, self.total, self.resident)

    # ---- values ----

    def evaluate(self, arrays: Mapping[int, np.ndarray], part: Part) -> None:
        if part.empty:
            return
        run = _Evaluation(self, arrays, part)
        with np.errstate(all="ignore"):
            run.all()


class _Evaluation:
    """One evaluation of a part, block of rows by block of rows."""

    def __init__(self, kernel: RowwiseKernel, arrays: Mapping[int, np.ndarray], part: Part) -> None:
        self.kernel, self.part = kernel, part
        self.inputs = {v: self._shaped(v, arrays[v]) for v in kernel.inputs}
        self.outputs = {
            v: self._shaped(v, arrays[v]) for v in kernel.outputs if kernel.written(v, part)
        }
        self.partial: dict[int, list[np.ndarray]] = {}
        late: set[int] = set()
        self.body: list[Operation] = []
        self.tail: list[Operation] = []
        for operation in kernel.operations:
            after = late.intersection(operation.operands)
            (self.tail if after else self.body).append(operation)
            if after or (kernel.total and operation.name == "reduce"):
                late.add(operation.results[0])

    def _shaped(self, value: int, array: np.ndarray) -> np.ndarray:
        flags = self.kernel.extents[value]
        shape = [a if f else 1 for a, f in zip(self.kernel.axes, flags, strict=True)]
        return array.reshape(shape)

    def all(self) -> None:
        """Runs every block, then what follows total reductions."""
        kernel = self.kernel
        rows = max(1, BLOCK_ELEMENTS // kernel.columns)
        for start in range(self.part.start, self.part.stop, rows):
            stop = min(start + rows, self.part.stop)
            for box in boxes(kernel.axes[:-1], start, stop):
                self._block((*box, (0, kernel.columns)))
        if kernel.total:
            self._finish()

    def _slice(self, array: np.ndarray, flags: Sequence[bool], box: Box) -> np.ndarray:
        return array[
            tuple(slice(*b) if f else slice(None) for b, f in zip(box, flags, strict=True))
        ]

    def _block(self, box: Box) -> None:
        extents = self.kernel.extents
        known = {v: self._slice(a, extents[v], box) for v, a in self.inputs.items()}
        targets = {v: self._slice(a, extents[v], box) for v, a in self.outputs.items()}
        for operation in self.body:
            result = operation.results[0]
            target = targets.get(result)
            known[result] = self._operate(operation, known, box, target)
            if target is not None and known[result] is not target:
                target[...] = known[result]
        self.late = known

    def _finish(self) -> None:
        known, box = self.late, tuple((0, a) for a in self.kernel.axes)
        for value, pieces in self.partial.items():
            operation = next(o for o in self.body if o.results[0] == value)
            kind = self.kernel.types[value].numpy
            stacked = np.stack([p.reshape(-1)[0] for p in pieces])
            total = arithmetic.reduce(operation.attributes["reduction"], stacked, 0, kind)
            known[value] = total.reshape((1,) * len(self.kernel.axes))
        for operation in self.tail:
            known[operation.results[0]] = self._operate(operation, known, box, None)
        for value in {*self.partial, *(o.results[0] for o in self.tail)} & set(self.outputs):
            self.outputs[value][...] = known[value]

    def _operate(
        self,
        operation: Operation,
        known: dict[int, np.ndarray],
        box: Box,
        target: np.ndarray | None,
    ) -> np.ndarray:
        name, kind = operation.name, self.kernel.types[operation.results[0]].numpy
        operands = [known[v] for v in operation.operands]
        if name in ("broadcast_in_dim", "copy"):
            return operands[0]
        if name == "constant":
            return operation.attributes["value"].reshape((1,) * len(box))
        if name == "iota":
            return self._iota(operation, box, kind)
        if name == "reduce":
            return self._reduce(operation, operands[0], box, kind)
        if name == "bitcast_convert":
            return operands[0].view(kind)
        if target is not None and _direct(name, operands, target):
            return _DIRECT[name](*operands, out=target)
        attributes = {k: v for k, v in operation.attributes.items() if k in ATTRIBUTES}
        return arithmetic.apply(name, *operands, out=kind, **attributes)

    def _iota(self, operation: Operation, box: Box, kind: np.dtype) -> np.ndarray:
        flags = self.kernel.forms[operation.results[0]]
        result, inner = np.zeros((1,) * len(box), np.int64), 1
        for d in reversed(range(len(box))):
            if flags[d]:
                shape = [-1 if i == d else 1 for i in range(len(box))]
                result = result + inner * np.arange(*box[d]).reshape(shape)
                inner *= self.kernel.axes[d]
        return arithmetic.convert(result, kind)

    def _reduce(self, operation: Operation, x: np.ndarray, box: Box, kind: np.dtype) -> np.ndarray:
        reduction = operation.attributes["reduction"]
        shape = tuple(b - a for a, b in box)
        if self.kernel.total:
            wide = arithmetic.compute_dtype(kind)
            x = np.broadcast_to(x, shape)
            piece = arithmetic.reduce(reduction, x.reshape(-1), 0, wide)
            self.partial.setdefault(operation.results[0], []).append(piece)
            return piece
        x = np.broadcast_to(x, (*x.shape[:-1], shape[-1]))
        return arithmetic.reduce(reduction, x, -1, kind, keepdims=True)


def _direct(name: str, operands: Sequence[np.ndarray], target: np.ndarray) -> bool:
    """Whether numpy can write the result straight into the output: plain floats, full form."""
    if name not in _DIRECT or target.dtype.char not in "fd":
        return False
    if any(a.dtype != target.dtype for a in operands):
        return False
    return np.broadcast_shapes(*(a.shape for a in operands)) == target.shape


# ---- from groups ---------------------------------------------------------------------------


def _rewritten(node: Node) -> Operation:
    source, attributes = node.operation, dict(node.operation.attributes)
    operands = node.operands
    if source.name == "reduce":
        attributes, operands = {"reduction": reducer(source)}, operands[:1]
    if source.name == "constant":
        attributes = {"value": np.asarray(attributes["value"]).reshape(-1)[:1].reshape(())}
    if source.name in ("broadcast_in_dim", "iota"):
        attributes = {}
    return Operation(source.name, operands, node.results, attributes, (), source.location)


def _needed(nodes: Sequence[Node], outputs: Sequence[int]) -> list[Node]:
    wanted, kept = set(outputs), []
    for node in reversed(nodes):
        if node.results[0] in wanted:
            kept.append(node)
            wanted.update(node.operands[:1] if node.name == "reduce" else node.operands)
    return kept[::-1]


def _axes(group: Group, outputs: Sequence[int], types: Mapping[int, TensorType]) -> tuple[int, ...]:
    axes = group.axes()
    assert axes is not None
    shapes = [t.shape for t in types.values() if t.size == group.n]
    if len(axes) > 1:
        return _cut_free(axes, shapes) if group.columns is None else axes
    columns = choose_columns(group.n, max(shapes, key=len, default=(group.n,)))
    if group.columns == group.n and not group.total:
        columns = group.n
    return (group.n // columns, columns)


def _cut_free(axes: tuple[int, ...], shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The axes with a free one of which rows leave partitions idle cut at an axis of the arrays."""
    *rows, free = axes
    if math.prod(rows) >= 128:
        return axes
    inner = {c for shape in shapes for c in pt.cuts(shape)}
    fitting = sorted(c for c in inner if 32 <= c < free and free % c == 0 and c <= 8192)
    long = [c for c in fitting if c >= LONG_ROW]
    if not fitting:
        return axes
    columns = long[0] if long else fitting[-1]
    return (*rows, free // columns, columns)


def rowwise_kernel(
    group: Group, outputs: tuple[int, ...], types: Mapping[int, TensorType]
) -> RowwiseKernel:
    """The kernel of a finished group; nodes that no output needs are dropped."""
    nodes = _needed(group.nodes, outputs)
    operations = tuple(_rewritten(node) for node in nodes)
    made = {v for o in operations for v in o.results}
    used = {v: None for o in operations for v in o.operands if v not in made}
    values = [*used, *made]
    axes = _axes(group, outputs, {v: types[v] for v in values})
    types = {v: types[v] for v in values}
    operations, types = narrowed(operations, types, {*used, *outputs})
    names = [n.name for n in nodes if n.name not in ("broadcast_in_dim", "constant", "convert")]
    return RowwiseKernel(
        name="+".join(dict.fromkeys(names or [nodes[-1].name])),
        operations=operations,
        inputs=tuple(used),
        outputs=outputs,
        types=types,
        location=next((o.location for o in reversed(operations) if o.location), ""),
        axes=axes,
        extents={v: pt.mask(group.extent[v], axes) for v in values},
        forms={v: pt.mask(group.form[v], axes) for v in values},
        total=group.total,
        resident=group.row_resident,
        fallback=any(t.numpy.itemsize > 4 for t in types.values()),
    )
