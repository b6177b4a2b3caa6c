"""Ranges of merged axes in memory: as boxes, as uniform runs, and as DMA into tiles."""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..isa.dma import DmaCopy
from ..memory import View

if TYPE_CHECKING:
    from .nest import Context

Axes = tuple[tuple[int, int], ...]
"""(extent, element stride) of axes from slowest to fastest."""

Box = tuple[tuple[int, int], ...]
"""(start, stop) along each axis."""


def boxes(axes: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """The row-major range [start, stop) of `axes` as boxes of (start, stop) per axis."""
    if stop <= start:
        return
    if len(axes) <= 1:
        yield ((start, stop),) if axes else ()
        return
    inner = math.prod(axes[1:])
    first, last = start // inner, stop // inner
    if first == last or (start % inner and first + 1 > last):
        yield from (((first, first + 1), *b) for b in boxes(axes[1:], start % inner, stop % inner))
        return
    if start % inner:
        yield from (((first, first + 1), *b) for b in boxes(axes[1:], start % inner, inner))
        first += 1
    if last > first:
        yield ((first, last), *((0, extent) for extent in axes[1:]))
    if stop % inner:
        yield from (((last, last + 1), *b) for b in boxes(axes[1:], 0, stop % inner))


def runs(axes: Axes, start: int, count: int) -> list[tuple[int, int, int, int]]:
    """(position, offset, count, stride) of a range of merged axes: one entry per uniform run."""
    if not axes:
        return [(0, 0, count, 0)]
    found, position = [], 0
    for box in boxes([e for e, _ in axes], start, start + count):
        outer = box[:-1]
        strides = [s for _, s in axes[:-1]]
        low, high = box[-1]
        for point in _points(outer):
            offset = sum(p * s for p, s in zip(point, strides, strict=True))
            found.append((position, offset + low * axes[-1][1], high - low, axes[-1][1]))
            position += high - low
    return found


def _points(box: tuple[tuple[int, int], ...]) -> Iterator[tuple[int, ...]]:
    if not box:
        yield ()
        return
    for i in range(*box[0]):
        for rest in _points(box[1:]):
            yield (i, *rest)


def copies(
    context: "Context",
    value: int,
    dst: View,
    down: Axes,
    at: int,
    across: Axes,
    first: int,
    base: int,
) -> Iterator[DmaCopy]:
    """dst[p, f] = the element of `value` at positions (at + p, first + f) of two axis groups.

    One DMA for each uniform run of rows and each box of columns; `base` is an element offset.
    """
    rows, columns = dst.shape
    found = boxes([e for e, _ in across], first, first + columns) if across else [((0, columns),)]
    strides = [s for _, s in across] or [1]
    column = 0
    for box in found:
        shape = tuple(high - low for low, high in box)
        size = math.prod(shape)
        offset = base + sum(low * s for (low, _), s in zip(box, strides, strict=True))
        for p, p_offset, p_count, p_stride in runs(down, at, rows):
            source = context.hbm(value, (p_count, *shape), (p_stride, *strides), offset + p_offset)
            target = dst[p : p + p_count, column : column + size]
            yield DmaCopy(target.reshape(p_count, *shape) if len(shape) > 1 else target, source)
        column += size
