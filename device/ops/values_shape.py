"""Values of the operators that move elements: shapes, slices, padding, bit patterns."""

import math
from collections.abc import Sequence

import numpy as np

Shape = tuple[int, ...]


def iota(shape: Shape, dimension: int, dtype: np.dtype) -> np.ndarray:
    """Counts along one dimension (a broadcast view)."""
    counts = np.arange(shape[dimension]).astype(dtype)
    rest = (1,) * (len(shape) - dimension - 1)
    return np.broadcast_to(counts.reshape(-1, *rest), shape)


def broadcast_in_dim(x: np.ndarray, shape: Shape, dimensions: Sequence[int]) -> np.ndarray:
    """Dimension i of `x` becomes `dimensions[i]` of the result (a view)."""
    order = sorted(range(x.ndim), key=lambda i: dimensions[i])
    spread = [1] * len(shape)
    for i in order:
        spread[dimensions[i]] = x.shape[i]
    return np.broadcast_to(x.transpose(order).reshape(spread), shape)


def slice_(
    x: np.ndarray, start: Sequence[int], limit: Sequence[int], strides: Sequence[int]
) -> np.ndarray:
    """Elements start, start + stride, ... below limit in every dimension (a view)."""
    return x[tuple(slice(a, b, s) for a, b, s in zip(start, limit, strides, strict=True))]


def _clamped(shape: Shape, starts: Sequence[np.ndarray], sizes: Sequence[int]) -> list[int]:
    limits = zip(starts, shape, sizes, strict=True)
    return [min(max(int(start), 0), extent - size) for start, extent, size in limits]


def dynamic_slice(x: np.ndarray, starts: Sequence[np.ndarray], sizes: Sequence[int]) -> np.ndarray:
    """The window of `sizes` at `starts`, clamped so that it lies inside `x` (a view)."""
    begin = _clamped(x.shape, starts, sizes)
    return x[tuple(slice(b, b + s) for b, s in zip(begin, sizes, strict=True))]


def dynamic_update_slice(
    x: np.ndarray, update: np.ndarray, starts: Sequence[np.ndarray]
) -> np.ndarray:
    """A copy of `x` with the window at the clamped `starts` replaced by `update`."""
    result = np.array(x, order="C")
    dynamic_slice(result, starts, update.shape)[...] = update
    return result


def _padded_axis(size: int, low: int, high: int, interior: int) -> tuple[int, slice, slice]:
    """Extent of the padded axis, and where the elements that survive come from and go to."""
    step = interior + 1
    extent = max(low + high + max(size + (size - 1) * interior, 0), 0)
    first = max(0, -(low // step))
    last = min(size, (extent - 1 - low) // step + 1) if extent else first
    last = max(first, last)
    target = slice(low + first * step, low + (last - 1) * step + 1, step)
    return extent, slice(first, last), target if last > first else slice(0, 0)


def pad(
    x: np.ndarray,
    value: np.ndarray,
    low: Sequence[int],
    high: Sequence[int],
    interior: Sequence[int],
) -> np.ndarray:
    """Pads at both ends and between elements; negative amounts cut elements off."""
    axes = [_padded_axis(*axis) for axis in zip(x.shape, low, high, interior, strict=True)]
    result = np.full(tuple(extent for extent, _, _ in axes), value, dtype=x.dtype)
    result[tuple(target for _, _, target in axes)] = x[tuple(source for _, source, _ in axes)]
    return result


def bitcast_convert(x: np.ndarray, shape: Shape, dtype: np.dtype) -> np.ndarray:
    """The same bytes as another type; a trailing dimension splits or joins elements."""
    dense = np.ascontiguousarray(x)
    if dtype == np.bool_ or x.dtype == np.bool_:
        return dense.view(np.uint8).astype(bool).reshape(shape).view(dtype)
    if math.prod(shape) == 0:
        return np.empty(shape, dtype)
    return dense.reshape(-1).view(dtype).reshape(shape)
