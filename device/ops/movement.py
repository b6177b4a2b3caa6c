"""Movement kernels: operators that only move data, done by DMA between places in HBM."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .evaluate import evaluate
from .ir import Operation
from .kernel import Part, whole
from .single import RowSplitKernel, SingleKernel


@dataclass(frozen=True, kw_only=True, eq=False)
class MovementKernel(RowSplitKernel):
    """Base: `pieces` says which boxes of the result come from where."""

    def nest(self, context: Any) -> Any:
        from .movement_nest import nest

        return nest(self, context)

    def _rows(self, part: Part) -> tuple[slice, ...]:
        """Index of the part in the result."""
        return (slice(None),) * self.split_axis + (slice(part.start, part.stop),)


@dataclass(frozen=True, kw_only=True, eq=False)
class ViewKernel(MovementKernel):
    """transpose, slice, reverse, broadcast_in_dim, dynamic_slice: the result is a view of operand
    0."""

    def view(self, arrays: Mapping[int, np.ndarray]) -> np.ndarray:
        """The result as a view of the operand."""
        return evaluate(self.operation, self.operand_arrays(arrays), self.types)[0]  # type: ignore[arg-type]

    def evaluate(self, arrays: Mapping[int, np.ndarray], part: Part) -> None:
        if part.empty:
            return
        if self.result_type.shape == ():
            np.copyto(self.target(0, arrays), self.view(arrays))
            return
        rows = self._rows(part)
        np.copyto(self.target(0, arrays)[rows], self.view(arrays)[rows])


Piece = tuple[int, tuple[slice, ...], tuple[slice, ...]]


@dataclass(frozen=True, kw_only=True, eq=False)
class AssemblyKernel(MovementKernel):
    """concatenate, pad, dynamic_update_slice: boxes of the operands placed in the result."""

    def background(self) -> int | None:
        """Operand whose single value fills what no piece covers (pad), if any."""
        return 1 if self.operation.name == "pad" else None

    def pieces(self, starts: Sequence[int] = ()) -> list[Piece]:
        """(operand, box of the result, box of the operand); later pieces lie over earlier ones.

        `starts` are the clamped start indices of a dynamic_update_slice.
        """
        return _PIECES[self.operation.name](self, starts)

    def starts(self, arrays: Mapping[int, np.ndarray]) -> list[int]:
        """Clamped start indices of a dynamic_update_slice, from its scalar operands."""
        if self.operation.name != "dynamic_update_slice":
            return []
        room = zip(self.operand_type(0).shape, self.operand_type(1).shape, strict=True)
        raw = [int(self.operand(2 + d, arrays)) for d in range(len(self.result_type.shape))]
        return [min(max(r, 0), a - b) for r, (a, b) in zip(raw, room, strict=True)]

    def evaluate(self, arrays: Mapping[int, np.ndarray], part: Part) -> None:
        if part.empty:
            return
        out = self.target(0, arrays)
        fill = self.background()
        if fill is not None:
            out[self._rows(part) if out.ndim else ()] = self.operand(fill, arrays)
        for i, to, start in self.pieces(self.starts(arrays)):
            clipped = clip(self.split_axis, part, to, start)
            if clipped is not None:
                source = self.operand(i, arrays)[clipped[1]]
                target = out[clipped[0]]
                if not same_memory(source, target):
                    target[...] = source


def same_memory(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two views are the same bytes (a value updated in place)."""
    return a.ctypes.data == b.ctypes.data and a.strides == b.strides and a.shape == b.shape


def clip(
    axis: int, part: Part, to: tuple[slice, ...], start: tuple[slice, ...]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """A piece limited to the part's range of the result's `axis`; None if nothing is left."""
    if not to:
        return to, start
    low, high, step = to[axis].start, to[axis].stop, to[axis].step or 1
    first = max(0, -(-(part.start - low) // step))
    last = min(-(-(high - low) // step), -(-(part.stop - low) // step))
    if last <= first:
        return None
    new_to = slice(low + first * step, low + (last - 1) * step + 1, step)
    base = start[axis].start
    new_start = slice(base + first, base + last)
    return _swapped(to, axis, new_to), _swapped(start, axis, new_start)


def _swapped(box: tuple[slice, ...], axis: int, other: slice) -> tuple[slice, ...]:
    return (*box[:axis], other, *box[axis + 1 :])


def _everything(shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(0, extent) for extent in shape)


def _concatenate(kernel: AssemblyKernel, starts: Sequence[int]) -> list[Piece]:
    axis, at, pieces = kernel.attributes["dimension"], 0, []
    for i in range(len(kernel.sources)):
        shape = kernel.operand_type(i).shape
        to = list(_everything(shape))
        to[axis] = slice(at, at + shape[axis])
        pieces.append((i, tuple(to), _everything(shape)))
        at += shape[axis]
    return [p for p in pieces if kernel.operand_type(p[0]).size]


def _pad(kernel: AssemblyKernel, starts: Sequence[int]) -> list[Piece]:
    """Negative padding trims the operand."""
    a, to, start = kernel.attributes, [], []
    result = kernel.result_type.shape
    for extent, low, interior, size in zip(
        kernel.operand_type(0).shape, a["low"], a["interior"], result, strict=True
    ):
        step = interior + 1
        first = max(0, -(low // step))
        last = min(extent, -(-(size - low) // step))
        if last <= first:
            return []
        to.append(slice(low + first * step, low + (last - 1) * step + 1, step))
        start.append(slice(first, last))
    return [(0, tuple(to), tuple(start))]


def _update(kernel: AssemblyKernel, starts: Sequence[int]) -> list[Piece]:
    shape = kernel.operand_type(1).shape
    starts = starts or (0,) * len(shape)
    to = tuple(slice(s, s + extent) for s, extent in zip(starts, shape, strict=True))
    whole_result = _everything(kernel.result_type.shape)
    return [(0, whole_result, whole_result), (1, to, _everything(shape))]


_PIECES: dict[str, Callable[[AssemblyKernel, Sequence[int]], list[Piece]]] = {
    "concatenate": _concatenate,
    "pad": _pad,
    "dynamic_update_slice": _update,
}


@dataclass(frozen=True, kw_only=True, eq=False)
class UpdateKernel(AssemblyKernel):
    """dynamic_update_slice. With `in_place` operand 0 and the result share memory, and only the
    updated region moves."""

    in_place: bool = False

    def part(self, core: int, cores: int) -> Part:
        """Split only along an axis that the update covers, where its start is always zero."""
        axis, shapes = self.split_axis, (self.operand_type(0).shape, self.operand_type(1).shape)
        covered = bool(shapes[0]) and shapes[0][axis] == shapes[1][axis]
        if self.in_place or not covered:
            return whole(self.extent, core, cores)
        return super().part(core, cores)

    def pieces(self, starts: Sequence[int] = ()) -> list[Piece]:
        return super().pieces(starts)[1:] if self.in_place else super().pieces(starts)

    def _details(self, number: Mapping[int, int]) -> tuple[bool]:
        return (self.in_place,)


@dataclass(frozen=True, kw_only=True, eq=False)
class GatherKernel(MovementKernel):
    """gather: rows of the index array are split where the result's leading axis follows them."""

    @property
    def by_rows(self) -> bool:
        """Whether a range of the result's split axis is a range of start indices."""
        a = self.attributes
        plain = not a.get("operand_batching_dims") and self.split_axis not in a["offset_dims"]
        batch = [d for d in range(len(self.result_type.shape)) if d not in a["offset_dims"]]
        axis = batch.index(self.split_axis) if plain and batch else -1
        return axis == 0 and a["index_vector_dim"] != 0

    def part(self, core: int, cores: int) -> Part:
        return super().part(core, cores) if self.by_rows else whole(self.extent, core, cores)

    def evaluate(self, arrays: Mapping[int, np.ndarray], part: Part) -> None:
        if part.empty:
            return
        table, index = self.operand_arrays(arrays)[:2]
        out = self.target(0, arrays)
        if part.count < self.extent:
            out, index = out[self._rows(part)], index[part.start : part.stop]
        np.copyto(out, _gathered(self.operation, table, index, self.types, out.shape))


def _gathered(
    operation: Operation, table: np.ndarray, index: np.ndarray, types: Any, shape: tuple[int, ...]
) -> np.ndarray:
    from .ir import TensorType

    changed = dict(types)
    changed[operation.operands[1]] = TensorType(index.shape, types[operation.operands[1]].dtype)
    changed[operation.results[0]] = TensorType(shape, types[operation.results[0]].dtype)
    return evaluate(operation, [table, index], changed)[0]  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True, eq=False)
class ScatterKernel(SingleKernel):
    """scatter: a copy of the operand, then its updated rows, on one core (updates may collide).

    With `in_place` operand 0 and the result share memory, and nothing is copied first.
    """

    in_place: bool = False

    def nest(self, context: Any) -> Any:
        from .movement_nest import scatter_nest

        return scatter_nest(self, context)

    def _details(self, number: Mapping[int, int]) -> tuple[bool]:
        return (self.in_place,)


MOVEMENTS: dict[str, type[SingleKernel]] = {
    "transpose": ViewKernel,
    "slice": ViewKernel,
    "reverse": ViewKernel,
    "broadcast_in_dim": ViewKernel,
    "dynamic_slice": ViewKernel,
    "bitcast_convert": ViewKernel,
    "concatenate": AssemblyKernel,
    "pad": AssemblyKernel,
    "dynamic_update_slice": UpdateKernel,
    "gather": GatherKernel,
    "scatter": ScatterKernel,
}
