"""Nests of movement kernels: DMA from place to place in HBM, or by rows through SBUF."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..isa.base import Instruction
from ..isa.dma import DESCRIPTOR_PS, DmaCopy, DmaGather, DmaScatter, DmaTranspose
from ..isa.vector import Copy, Memset
from ..memory import Tensor
from .group import reducer
from .kernel import Part
from .movement import (
    AssemblyKernel,
    GatherKernel,
    MovementKernel,
    ScatterKernel,
    ViewKernel,
    clip,
)
from .nest import Context, Loop, itemsize, once, strided, tiles
from .single import SingleKernel

FILL_COLUMNS = 1024
ROW_BYTES = 32_768


@dataclass(frozen=True, slots=True)
class Window:
    """Elements of a dense value: shape, element strides and offset."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0


def _dense(shape: Sequence[int]) -> tuple[int, ...]:
    strides, inner = [], 1
    for extent in reversed(shape):
        strides.append(inner)
        inner *= extent
    return tuple(reversed(strides))


def nest(kernel: MovementKernel, context: Context) -> Loop:
    """The transfers of the context's part."""
    if isinstance(kernel, ViewKernel):
        return once(list(_view_steps(kernel, context)))
    if isinstance(kernel, AssemblyKernel):
        return once(list(_assembly_steps(kernel, context)))
    assert isinstance(kernel, GatherKernel)
    return gather_nest(kernel, context)


# ---- views -----------------------------------------------------------------------------------


def _scalars(kernel: SingleKernel, context: Context, first: int, count: int) -> list[int]:
    """Values of scalar operands; zero in a run without data, where the address costs nothing."""
    if context.arrays is None:
        return [0] * count
    return [int(kernel.operand(first + d, context.arrays)) for d in range(count)]


def window(kernel: ViewKernel, starts: Sequence[int]) -> Window:
    """The result as a strided view of operand 0."""
    shape, a = kernel.operand_type(0).shape, kernel.attributes
    strides, result = _dense(shape), kernel.result_type.shape
    name = kernel.operation.name
    if name == "transpose":
        return Window(result, tuple(strides[d] for d in a["permutation"]))
    if name == "slice":
        offset = sum(s * e for s, e in zip(a["start"], strides, strict=True))
        return Window(
            result, tuple(s * e for s, e in zip(a["strides"], strides, strict=True)), offset
        )
    if name == "dynamic_slice":
        room = zip(starts, shape, result, strict=True)
        clamped = [min(max(s, 0), extent - size) for s, extent, size in room]
        return Window(result, strides, sum(s * e for s, e in zip(clamped, strides, strict=True)))
    if name == "reverse":
        gone = a["dimensions"]
        offset = sum((shape[d] - 1) * strides[d] for d in gone)
        return Window(result, tuple(-s if d in gone else s for d, s in enumerate(strides)), offset)
    repeated = [0] * len(result)
    for i, d in enumerate(a["dimensions"]):
        repeated[d] = strides[i] if shape[i] == result[d] else 0
    return Window(result, tuple(repeated))


def _view_steps(kernel: ViewKernel, context: Context) -> Iterator[Instruction]:
    part, axis = context.part, kernel.split_axis
    if kernel.operation.name == "bitcast_convert":
        yield from _bytes(kernel, context)
        return
    starts: list[int] = []
    if kernel.operation.name == "dynamic_slice":
        starts = _scalars(kernel, context, 1, len(kernel.result_type.shape))
    source = window(kernel, starts)
    shape, offset = list(source.shape), source.offset
    inner = kernel.inner * part.start
    if shape:
        offset += part.start * source.strides[axis]
        shape[axis] = part.count
    target = Window(tuple(shape), _dense(source.shape), inner)
    moved = Window(tuple(shape), source.strides, offset)
    yield from transfers(context, kernel.targets[0], target, _source(kernel, 0), moved)


def _source(kernel: SingleKernel, i: int) -> int:
    return kernel.sources[i]


def _bytes(kernel: ViewKernel, context: Context) -> Iterator[Instruction]:
    """bitcast_convert between widths: the bytes as they are."""
    if context.part.start > 0:
        return
    a, b = kernel.sources[0], kernel.targets[0]
    arrays = [None, None]
    if context.arrays is not None:
        arrays = [context.arrays[v].reshape(-1).view(np.uint8) for v in (a, b)]
    views = [
        context.core.hbm.adopt(array, (kernel.types[v].nbytes,), "ui8", f"%{v}", place)
        for v, array, place in zip((a, b), arrays, (0, kernel.types[a].nbytes + 64), strict=True)
    ]
    yield DmaCopy(views[1][:], views[0][:])


def _merged(target: Window, source: Window) -> tuple[list[int], list[int], list[int]]:
    """Shape and both strides with neighbours merged where both sides allow it."""
    shape: list[int] = []
    to: list[int] = []
    start: list[int] = []
    for extent, a, b in zip(target.shape, target.strides, source.strides, strict=True):
        if extent == 1:
            continue
        if shape and to[-1] == a * extent and start[-1] == b * extent:
            shape[-1], to[-1], start[-1] = shape[-1] * extent, a, b
        else:
            shape.append(extent)
            to.append(a)
            start.append(b)
    return shape or [1], to or [1], start or [1]


def transfers(
    context: Context, value: int, target: Window, origin: int, source: Window
) -> Iterator[Instruction]:
    """DMA of a window of one value to a window of another: copies, or transposes where the
    contiguous axis of the source is not that of the target."""
    shape, to, start = _merged(target, source)
    size = itemsize(context.kernel.types[value].dtype)
    turned = next((d for d, s in enumerate(start[:-1]) if s == 1), None)
    if size in (2, 4) and len(shape) > 1 and start[-1] != 1 and to[-1] == 1 and turned is not None:
        outer = math.prod(shape) // (shape[turned] * shape[-1])
        single = math.prod(shape) * DESCRIPTOR_PS // context.chip.dma_engines
        if outer * context.chip.dma_fixed_ps < single:
            yield from _turned(context, value, target, origin, source, turned)
            return
    yield DmaCopy(
        context.hbm(value, tuple(shape), tuple(to), target.offset),
        context.hbm(origin, tuple(shape), tuple(start), source.offset),
    )


def _turned(
    context: Context, value: int, target: Window, origin: int, source: Window, axis: int
) -> Iterator[Instruction]:
    shape, to, start = _merged(target, source)
    last = len(shape) - 1
    others = [d for d in range(last) if d != axis]
    for point in np.ndindex(*(shape[d] for d in others)):
        to_offset = target.offset + sum(p * to[d] for p, d in zip(point, others, strict=True))
        from_offset = source.offset + sum(p * start[d] for p, d in zip(point, others, strict=True))
        yield DmaTranspose(
            context.hbm(value, (shape[axis], shape[last]), (to[axis], 1), to_offset),
            context.hbm(origin, (shape[last], shape[axis]), (start[last], 1), from_offset),
        )


# ---- concatenate, pad, dynamic_update_slice --------------------------------------------------


def _box(shape: Sequence[int], box: tuple[slice, ...]) -> Window:
    strides = _dense(shape)
    steps = [b.step or 1 for b in box]
    extents = tuple(-(-(b.stop - b.start) // s) for b, s in zip(box, steps, strict=True))
    offset = sum(b.start * s for b, s in zip(box, strides, strict=True))
    return Window(extents, tuple(a * b for a, b in zip(strides, steps, strict=True)), offset)


def _assembly_steps(kernel: AssemblyKernel, context: Context) -> Iterator[Instruction]:
    part, result = context.part, kernel.result_type.shape
    fill = kernel.background()
    if fill is not None:
        yield from _fill(kernel, context, fill)
    starts = [] if context.arrays is None else kernel.starts(context.arrays)
    if getattr(kernel, "in_place", False):
        context.same(kernel.targets[0], kernel.sources[0])
    for i, to, start in kernel.pieces(starts):
        clipped = clip(kernel.split_axis, part, to, start)
        if clipped is None:
            continue
        target = _box(result, clipped[0])
        source = _box(kernel.operand_type(i).shape, clipped[1])
        if kernel.operation.operands[i] in kernel.constants:
            yield from _spread(kernel, context, i, target)
        else:
            yield from transfers(context, kernel.targets[0], target, kernel.sources[i], source)


def _constant_tile(kernel: AssemblyKernel, context: Context, i: int) -> Iterator[Instruction]:
    """[128, FILL_COLUMNS] of a scalar operand."""
    dtype = kernel.result_type.dtype
    tile = context.tile(FILL_COLUMNS, dtype, "fill")
    original = kernel.operation.operands[i]
    if original in kernel.constants:
        yield Memset(tile[:], kernel.constants[original].item())
    else:
        column = context.tile(1, dtype, "fill value")
        yield DmaCopy(column[:], context.hbm(kernel.sources[i], (128, 1), (0, 1)))
        yield Copy(tile[:], column.broadcast(128, FILL_COLUMNS))
    return tile


def _fill(kernel: AssemblyKernel, context: Context, i: int) -> Iterator[Instruction]:
    """The part of the result with the background everywhere."""
    tile = yield from _constant_tile(kernel, context, i)
    start, stop = kernel.writes(context.part)[kernel.targets[0]]
    yield from _pour(context, kernel.targets[0], tile, start, stop)


def _pour(
    context: Context, value: int, tile: Tensor, start: int, stop: int
) -> Iterator[Instruction]:
    whole = 128 * FILL_COLUMNS
    for at, count in tiles(start, stop, whole):
        rows = count // FILL_COLUMNS
        if rows:
            shape = (rows, FILL_COLUMNS)
            yield DmaCopy(context.hbm(value, shape, (FILL_COLUMNS, 1), at), tile[:rows])
        rest = count - rows * FILL_COLUMNS
        if rest:
            place = at + rows * FILL_COLUMNS
            yield DmaCopy(context.hbm(value, (1, rest), (rest, 1), place), tile[:1, :rest])


def _spread(
    kernel: AssemblyKernel, context: Context, i: int, target: Window
) -> Iterator[Instruction]:
    """A box of the result filled with a constant operand."""
    tile = yield from _constant_tile(kernel, context, i)
    rows = math.prod(target.shape[:-1]) if target.shape else 1
    width = target.shape[-1] if target.shape else 1
    if math.prod(target.shape) == kernel.result_type.size:
        yield from _pour(context, kernel.targets[0], tile, 0, kernel.result_type.size)
        return
    del rows
    for point in np.ndindex(*target.shape[:-1]):
        offset = target.offset + sum(p * s for p, s in zip(point, target.strides[:-1], strict=True))
        step = target.strides[-1] if target.strides else 1
        for at, count in tiles(0, width, FILL_COLUMNS):
            place = context.hbm(kernel.targets[0], (1, count), (count, step), offset + at * step)
            yield DmaCopy(place, tile[:1, :count])


# ---- gather and scatter by rows --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rows:
    """A gather or scatter of whole rows: operand as [count, width], one row per index vector."""

    count: int
    width: int
    number: int
    indexed: tuple[int, ...]
    batching: tuple[int, ...]


def rows_of_gather(kernel: GatherKernel) -> Rows | None:
    """The gather as row moves: leading operand axes are indexed or batched, the rest whole."""
    a = kernel.attributes
    table, result = kernel.operand_type(0).shape, kernel.result_type.shape
    batching = tuple(a.get("operand_batching_dims", ()))
    lead = sorted((*a["collapsed_slice_dims"], *batching))
    trailing = list(range(len(result) - len(a["offset_dims"]), len(result)))
    whole = all(a["slice_sizes"][d] == table[d] for d in range(len(lead), len(table)))
    if lead != list(range(len(lead))) or list(a["offset_dims"]) != trailing or not whole:
        return None
    if sorted((*a["start_index_map"], *batching)) != lead:
        return None
    width = math.prod(table[len(lead) :])
    number = kernel.result_type.size // max(width, 1)
    return Rows(math.prod(table[: len(lead)]), width, number, tuple(a["start_index_map"]), batching)


def rows_of_scatter(kernel: ScatterKernel) -> Rows | None:
    """The scatter as row moves, likewise."""
    a = kernel.attributes
    if len(kernel.operation.results) != 1:
        return None
    table, update = kernel.operand_type(0).shape, kernel.operand_type(2).shape
    batching = tuple(a.get("input_batching_dims", ()))
    lead = sorted((*a["inserted_window_dims"], *batching))
    windows = list(a["update_window_dims"])
    trailing = list(range(len(update) - len(windows), len(update)))
    whole = [update[d] for d in windows] == list(table[len(lead) :])
    if lead != list(range(len(lead))) or windows != trailing or not whole:
        return None
    if sorted((*a["scatter_dims_to_operand_dims"], *batching)) != lead:
        return None
    width = math.prod(table[len(lead) :])
    number = math.prod(update) // max(width, 1)
    indexed = tuple(a["scatter_dims_to_operand_dims"])
    return Rows(math.prod(table[: len(lead)]), width, number, indexed, batching)


def row_numbers(
    kernel: SingleKernel, rows: Rows, index: np.ndarray, batching: Sequence[int], clamp: bool
) -> np.ndarray:
    """Row of the operand for each index vector, in the order of the index array; with `clamp`
    inside the bounds, else -1 for those outside."""
    table = kernel.operand_type(0).shape
    axis = kernel.attributes["index_vector_dim"]
    vectors = np.moveaxis(index, axis, -1) if axis < index.ndim else index[..., None]
    numbers = np.zeros(vectors.shape[:-1], np.int64)
    outside = np.zeros(vectors.shape[:-1], bool)
    strides = _dense(table[: len(rows.indexed) + len(rows.batching)])
    for i, d in enumerate(rows.indexed):
        position = vectors[..., i].astype(np.int64)
        outside |= (position < 0) | (position >= table[d])
        numbers += np.clip(position, 0, table[d] - 1) * strides[d]
    for d, where in zip(rows.batching, batching, strict=True):
        place = where - (where > axis)
        shape = [-1 if k == place else 1 for k in range(numbers.ndim)]
        numbers += np.arange(table[d]).reshape(shape) * strides[d]
    return numbers if clamp else np.where(outside, -1, numbers)


def is_row_move(kernel: SingleKernel) -> bool:
    """Whether the nests here can do it: of gathers and scatters, those of whole rows."""
    if isinstance(kernel, GatherKernel):
        return rows_of_gather(kernel) is not None
    if isinstance(kernel, ScatterKernel):
        simple = reducer(kernel.operation) == "add" or _replaces(kernel)
        return simple and rows_of_scatter(kernel) is not None
    return (
        isinstance(kernel, AssemblyKernel) or kernel.operation.operands[0] not in kernel.constants
    )


def gather_nest(kernel: GatherKernel, context: Context) -> Loop:
    """Rows gathered through SBUF, 128 at a time."""
    rows = rows_of_gather(kernel)
    assert rows is not None
    first, last = _row_range(kernel, context.part, rows)
    numbers = np.zeros(rows.number, np.int32)
    if context.arrays is not None:
        index = kernel.operand(1, context.arrays)
        batching = kernel.attributes.get("start_indices_batching_dims", ())
        numbers = row_numbers(kernel, rows, index, batching, True).reshape(-1).astype(np.int32)
    return _by_rows(context, rows, numbers, first, last, kernel, gather=True)


def _row_range(kernel: GatherKernel, part: Part, rows: Rows) -> tuple[int, int]:
    if part.count >= kernel.extent:
        return 0, rows.number
    each = rows.number // kernel.extent
    return part.start * each, part.stop * each


def _by_rows(
    context: Context,
    rows: Rows,
    numbers: np.ndarray,
    first: int,
    last: int,
    kernel: SingleKernel,
    gather: bool,
) -> Loop:
    table_value = kernel.sources[0] if gather else kernel.targets[0]
    dense_value = kernel.targets[0] if gather else kernel.sources[2]
    dtype = kernel.result_type.dtype
    width = min(rows.width, ROW_BYTES // itemsize(dtype))
    buffers = context.rotating(width, dtype, "rows")
    index = context.table(numbers, "row numbers")
    pieces = tiles(first, last, 128)
    strips = tiles(0, rows.width, width)
    adds = not gather and reducer(kernel.operation) == "add"
    update = None if gather else kernel.constants.get(kernel.operation.operands[2])

    def body(i: int) -> Iterator[Instruction]:
        at, count = pieces[i]
        place = strided(index, (count, 1), (1, 1), at)
        for s, (column, wide) in enumerate(strips):
            tile = buffers[(i * len(strips) + s) % 2][:count, :wide]
            table = context.hbm(table_value, (rows.count, wide), (rows.width, 1), column)
            if update is not None:
                yield Memset(tile, update.item())
            else:
                offset = at * rows.width + column
                dense = context.hbm(dense_value, (count, wide), (rows.width, 1), offset)
                if gather:
                    yield DmaGather(tile, table, place, bounds="clamp")
                    yield DmaCopy(dense, tile)
                else:
                    yield DmaCopy(tile, dense)
            if not gather:
                yield DmaScatter(table, tile, place, accumulate=adds, bounds="skip")

    return Loop(len(pieces), body, lambda i: pieces[i][1])


def _replaces(kernel: ScatterKernel) -> bool:
    """Whether the update simply takes the place of the old value."""
    block = kernel.operation.regions[0]
    return not block.operations and block.returns == block.arguments[1:]


def scatter_nest(kernel: ScatterKernel, context: Context) -> Loop:
    """A copy of the operand, then updated rows through SBUF."""
    rows = rows_of_scatter(kernel)
    assert rows is not None
    numbers = np.zeros(rows.number, np.int32)
    if context.arrays is not None:
        index = kernel.operand(1, context.arrays)
        batching = kernel.attributes.get("scatter_indices_batching_dims", ())
        numbers = row_numbers(kernel, rows, index, batching, False).reshape(-1).astype(np.int32)

    def steps() -> Iterator[Instruction | Loop]:
        start = kernel.constants.get(kernel.operation.operands[0])
        if kernel.in_place:
            context.same(kernel.targets[0], kernel.sources[0])
        elif start is not None:
            fill = context.tile(FILL_COLUMNS, kernel.result_type.dtype, "fill")
            yield Memset(fill[:], start.item())
            yield from _pour(context, kernel.targets[0], fill, 0, kernel.result_type.size)
        else:
            size = (kernel.result_type.size,)
            yield DmaCopy(
                context.hbm(kernel.targets[0], size, (1,)),
                context.hbm(kernel.sources[0], size, (1,)),
            )
        yield _by_rows(context, rows, numbers, 0, rows.number, kernel, gather=False)

    return once(steps())
