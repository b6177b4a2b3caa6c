"""Matmul kernels: dot_general as batch x [M, K] x [K, N] on the tensor engine."""

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .. import arithmetic
from .group import Node
from .ir import TensorType
from .kernel import Kernel, Layout, Part, split, split_rows, whole
from .strided import Strided, coalesce

Axes = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Operand:
    """A matmul operand in memory: (extent, element stride) of batch, free and contracted axes."""

    value: int
    batch: Axes
    free: Axes
    contract: Axes

    def matrix(self, array: np.ndarray) -> np.ndarray:
        """[batch, free, contract] as a view where the axes merge, else a copy."""
        axes = (*self.batch, *self.free, *self.contract)
        shape = tuple(extent for extent, _ in axes)
        strides = tuple(stride * array.itemsize for _, stride in axes)
        view = np.lib.stride_tricks.as_strided(array.reshape(-1), shape, strides, writeable=False)
        sizes = (math.prod(e for e, _ in part) for part in (self.batch, self.free, self.contract))
        return view.reshape(tuple(sizes))

    @property
    def merged(self) -> tuple[Axes, Axes, Axes]:
        """Batch, free and contracted axes with neighbours merged."""
        return tuple(tuple(coalesce(axes)) for axes in (self.batch, self.free, self.contract))  # type: ignore[return-value]


def blas_ready(x: np.ndarray) -> np.ndarray:
    """`x` itself if BLAS can read its matrices as they lie (either order), else a dense copy."""
    rows, columns = x.strides[-2] // x.itemsize, x.strides[-1] // x.itemsize
    m, n = x.shape[-2:]
    plain = columns == 1 and rows >= max(1, n)
    turned = rows == 1 and columns >= max(1, m)
    return x if plain or turned or 1 in (m, n) else np.ascontiguousarray(x)


@dataclass(frozen=True, kw_only=True, eq=False)
class MatmulKernel(Kernel):
    """result[b, m, n] = sum over k of left[b, m, k] * right[b, n, k]; float32 accumulation.

    With `addend` (batch 1) also plus that value: [m, n], or [n] for every row (`addend_row`).
    """

    left: Operand
    right: Operand
    batch: int
    m: int
    n: int
    k: int
    addend: int | None = None
    addend_row: bool = False

    @property
    def result(self) -> int:
        """The value written."""
        return self.outputs[0]

    def part(self, core: int, cores: int) -> Part:
        if self.batch >= cores and (self.batch % cores == 0 or self.batch > 4 * cores):
            return split(self.batch, core, cores, "batch")
        if max(self.m, self.n) < 2:
            return whole(1, core, cores)
        if self.m >= self.n or self.m >= 256:
            return split_rows(self.m, core, cores)
        return split_rows(self.n, core, cores, "columns")

    def share(self, part: Part) -> tuple[slice, slice, slice]:
        """The part's ranges of batch, M and N."""
        everything = slice(0, self.batch), slice(0, self.m), slice(0, self.n)
        mine = slice(part.start, part.stop)
        return {
            "batch": (mine, *everything[1:]),
            "rows": (everything[0], mine, everything[2]),
            "columns": (*everything[:2], mine),
            "whole": everything,
        }[part.axis]

    def _span(self, axes: list[tuple[Axes, slice]]) -> tuple[int, int]:
        """Hull of the elements that ranges of merged axis groups touch."""
        low = high = 0
        for group, chosen in axes:
            extents = [e for e, _ in group]
            total = math.prod(extents)
            if (chosen.start, chosen.stop) != (0, total) and len(group) == 1:
                low += chosen.start * group[0][1]
                high += (chosen.stop - 1) * group[0][1]
            else:
                high += sum((e - 1) * s for e, s in group)
        return low, high + 1

    def reads(self, part: Part) -> dict[int, tuple[int, int]]:
        if part.empty:
            return {}
        batch, rows, columns = self.share(part)
        spans: dict[int, tuple[int, int]] = {}
        for operand, free in ((self.left, rows), (self.right, columns)):
            b, f, k = operand.merged
            span = self._span([(b, batch), (f, free), (k, slice(0, self.k))])
            old = spans.get(operand.value, span)
            spans[operand.value] = min(old[0], span[0]), max(old[1], span[1])
        if self.addend is not None:
            span = (
                (columns.start, columns.stop) if self.addend_row else self.writes(part)[self.result]
            )
            old = spans.get(self.addend, span)
            spans[self.addend] = min(old[0], span[0]), max(old[1], span[1])
        return spans

    def writes(self, part: Part) -> dict[int, tuple[int, int]]:
        if part.empty:
            return {}
        batch, rows, columns = self.share(part)
        first = (batch.start * self.m + rows.start) * self.n + columns.start
        last = ((batch.stop - 1) * self.m + rows.stop - 1) * self.n + columns.stop
        return {self.result: (first, last)}

    # ---- values ----

    def evaluate(self, arrays: Mapping[int, np.ndarray], part: Part) -> None:
        if part.empty or not self.types[self.result].size:
            return
        batch, rows, columns = self.share(part)
        out = arrays[self.result].reshape(self.batch, self.m, self.n)[batch, rows, columns]
        left = self.left.matrix(arrays[self.left.value])[batch, rows]
        right = self.right.matrix(arrays[self.right.value])[batch, columns].swapaxes(1, 2)
        with np.errstate(all="ignore"):
            if self.addend is None:
                self._product(left, right, out)
                return
            product = np.empty(out.shape, np.float32)
            self._product(left, right, product)
            wide = (1, 1 if self.addend_row else self.m, self.n)
            chosen = arrays[self.addend].reshape(wide)[:, slice(None) if self.addend_row else rows]
            added = arithmetic.convert(chosen[:, :, columns], product.dtype)
            out[...] = arithmetic.convert(product + added, out.dtype)

    def _product(self, left: np.ndarray, right: np.ndarray, out: np.ndarray) -> None:
        kinds = [arithmetic.compute_dtype(a.dtype) for a in (left, right)]
        wide = max(kinds, key=lambda kind: (kind.kind == "f", kind.itemsize))
        left, right = arithmetic.convert(left, wide), arithmetic.convert(right, wide)
        if self.k == 0:
            out[...] = 0
        elif out.dtype == wide:
            np.matmul(blas_ready(left), blas_ready(right), out=out)
        else:
            product = np.matmul(blas_ready(left), blas_ready(right))
            out[...] = arithmetic.convert(product, out.dtype)

    # ---- time ----

    def layout(self, value: int, part: Part) -> Layout | None:
        aligned = self.batch == 1 or (part.axis == "batch" and self.m % 128 == 0)
        if part.empty or part.axis == "columns" or not aligned:
            return None
        batch, rows, _ = self.share(part)
        if value == self.result:
            start, stop = self._row_range(batch, rows)
            return Layout(self.batch * self.m, self.n, start, stop, self.types[value].dtype)
        b, f, k = self.left.merged
        dense = k == ((self.k, 1),) or self.k == 1
        lead = coalesce((*b, *f)) in ([(self.batch * self.m, self.k)], [])
        if value != self.left.value or value == self.right.value or not (dense and lead):
            return None
        start, stop = self._row_range(batch, rows)
        return Layout(self.batch * self.m, self.k, start, stop, self.types[value].dtype)

    def _row_range(self, batch: slice, rows: slice) -> tuple[int, int]:
        return batch.start * self.m + rows.start, (batch.stop - 1) * self.m + rows.stop

    def nest(self, context: Any) -> Any:
        from .matmul_nest import nest

        return nest(self, context)

    def _details(self, number: Mapping[int, int]) -> Hashable:
        sides = tuple(
            (number[o.value], o.batch, o.free, o.contract) for o in (self.left, self.right)
        )
        added = None if self.addend is None else number[self.addend]
        return (*sides, self.batch, self.m, self.n, self.k, added, self.addend_row)


def _operand(source: Strided, batch: tuple[int, ...], contract: tuple[int, ...]) -> Operand:
    free = [d for d in range(len(source.shape)) if d not in (*batch, *contract)]

    def axes(chosen: "list[int] | tuple[int, ...]") -> Axes:
        return tuple((source.shape[d], source.strides[d]) for d in chosen)

    return Operand(source.value, axes(batch), axes(free), axes(contract))


def matmul_kernel(
    node: Node, operands: tuple[Strided, ...], epilogue: Node | None = None
) -> MatmulKernel:
    """The kernel of a dot_general on strided operands, and of the addition that follows it.

    Contracted axes are taken from the slowest to the fastest of left, so that they merge.
    """
    a = node.operation.attributes
    pairs = list(zip(a["lhs_contracting"], a["rhs_contracting"], strict=True))
    pairs.sort(key=lambda p: (-operands[0].strides[p[0]], -operands[1].strides[p[1]]))
    left = _operand(operands[0], a["lhs_batch"], tuple(p[0] for p in pairs))
    right = _operand(operands[1], a["rhs_batch"], tuple(p[1] for p in pairs))
    dtypes = [t.dtype for t in node.operand_types]
    types = {
        o.value: TensorType((_source_size(o),), d)
        for o, d in zip((left, right), dtypes, strict=True)
    }
    last = epilogue or node
    kernel = MatmulKernel(
        name="dot_general",
        operations=(node.operation,),
        inputs=tuple(dict.fromkeys((left.value, right.value))),
        outputs=last.results,
        types=types | {last.results[0]: last.result_types[0]},
        location=node.operation.location,
        left=left,
        right=right,
        batch=_points(left.batch),
        m=_points(left.free),
        n=_points(right.free),
        k=_points(left.contract),
    )
    return kernel if epilogue is None else _with_addend(kernel, node, epilogue)


def _with_addend(kernel: MatmulKernel, dot: Node, epilogue: Node) -> MatmulKernel:
    """The kernel with what `epilogue` (an add) adds to the result of `dot`."""
    place = 1 - epilogue.operands.index(dot.results[0])
    value, kind = epilogue.operands[place], epilogue.operand_types[place]
    return replace(
        kernel,
        name="dot_general+add",
        operations=(dot.operation, epilogue.operation),
        inputs=tuple(dict.fromkeys((*kernel.inputs, value))),
        types={value: kind, **kernel.types},
        addend=value,
        addend_row=kind.size < kernel.m * kernel.n,
    )


def _points(axes: Axes) -> int:
    return math.prod(extent for extent, _ in axes)


def _source_size(operand: Operand) -> int:
    return math.prod(e for e, _ in (*operand.batch, *operand.free, *operand.contract))
