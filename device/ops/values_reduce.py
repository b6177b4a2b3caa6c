"""Values of reduce, reduce_window and select_and_scatter."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .. import arithmetic
from .regions import Combine
from .values_index import scatter_rows
from .values_shape import pad

Shape = tuple[int, ...]


def reduce_named(
    x: np.ndarray, init: np.ndarray, dimensions: Sequence[int], name: str
) -> np.ndarray:
    """A reduction by name; narrow floats accumulate in float32 and round once."""
    wide = arithmetic.compute_dtype(x.dtype)
    total = arithmetic.reduce(name, x, tuple(dimensions), out=wide)
    if init == arithmetic.IDENTITY[name](x.dtype):
        return arithmetic.convert(total, x.dtype)
    combined = arithmetic.elementwise_name(name, x.dtype)
    return arithmetic.apply(combined, total, arithmetic.convert(init, wide), out=x.dtype)


def reduce_argument(
    x: np.ndarray, indices: np.ndarray, dimensions: Sequence[int], name: str
) -> list[np.ndarray]:
    """Extreme value and its index: the lowest index of equal values, the first NaN."""
    values, numbers = (_front(a, dimensions) for a in (x, indices))
    values = arithmetic.convert(values, arithmetic.compute_dtype(x.dtype))
    place = (np.argmax if name == "maximum" else np.argmin)(values, axis=0)[None]
    best = np.take_along_axis(values, place, 0)
    ties = np.where(values == best, numbers, np.iinfo(indices.dtype).max).min(axis=0)
    if values.dtype.kind == "f":
        first = np.take_along_axis(numbers, place, 0)[0]
        ties = np.where(np.isnan(best[0]), first, ties)
    return [arithmetic.convert(best[0], x.dtype), ties]


def _front(x: np.ndarray, dimensions: Sequence[int]) -> np.ndarray:
    """[reduced elements, kept dimensions...]."""
    kept = [d for d in range(x.ndim) if d not in dimensions]
    moved = x.transpose([*dimensions, *kept])
    return moved.reshape(math.prod(x.shape[d] for d in dimensions), *(x.shape[d] for d in kept))


def reduce_general(
    operands: Sequence[np.ndarray],
    inits: Sequence[np.ndarray],
    dimensions: Sequence[int],
    combine: Combine,
) -> list[np.ndarray]:
    """Any associative region: neighbours in pairs, order kept, then `init` in front."""
    values = [_front(x, dimensions) for x in operands]
    shape = values[0].shape[1:]
    starts = [np.broadcast_to(i, shape) for i in inits]
    if values[0].shape[0] == 0:
        return starts
    while (n := values[0].shape[0]) > 1:
        pairs = combine(*(v[0 : n - 1 : 2] for v in values), *(v[1:n:2] for v in values))
        rest = [v[n - n % 2 :] for v in values]
        values = [np.concatenate(both) for both in zip(pairs, rest, strict=True)]
    return combine(*starts, *(v[0] for v in values))


@dataclass(frozen=True)
class Window:
    """A sliding window, per dimension; `padding` is (low, high)."""

    dimensions: Shape
    strides: Shape
    base_dilations: Shape
    window_dilations: Shape
    padding: tuple[tuple[int, int], ...]

    def padded(self, x: np.ndarray, value: np.ndarray) -> np.ndarray:
        """The base with padding and dilation."""
        return pad(
            x,
            value,
            [low for low, _ in self.padding],
            [high for _, high in self.padding],
            [d - 1 for d in self.base_dilations],
        )

    def counts(self, padded: Shape) -> Shape:
        """How many windows fit the padded base in each dimension."""
        spans = zip(padded, self.dimensions, self.strides, self.window_dilations, strict=True)
        return tuple(max((p - ((w - 1) * d + 1)) // s + 1, 0) for p, w, s, d in spans)

    def views(self, padded: np.ndarray) -> Iterator[np.ndarray]:
        """Views [windows...] of the padded base, one per offset inside the window, row-major."""
        counts = self.counts(padded.shape)
        for offset in itertools.product(*(range(w) for w in self.dimensions)):
            starts = [o * d for o, d in zip(offset, self.window_dilations, strict=True)]
            spans = zip(starts, counts, self.strides, strict=True)
            yield padded[tuple(slice(a, a + (n - 1) * s + 1 if n else a, s) for a, n, s in spans)]

    def only(self, dimension: int) -> "Window":
        """The window's part in one dimension, on a base that is padded already."""

        def single(values: Shape) -> Shape:
            return tuple(v if d == dimension else 1 for d, v in enumerate(values))

        return Window(
            single(self.dimensions),
            single(self.strides),
            (1,) * len(self.dimensions),
            single(self.window_dilations),
            ((0, 0),) * len(self.dimensions),
        )


def reduce_window_general(
    operands: Sequence[np.ndarray], inits: Sequence[np.ndarray], window: Window, combine: Combine
) -> list[np.ndarray]:
    """Any region: one vectorised step per offset inside the window."""
    padded = [window.padded(x, i) for x, i in zip(operands, inits, strict=True)]
    counts = window.counts(padded[0].shape)
    totals = [np.broadcast_to(i, counts) for i in inits]
    for views in zip(*(window.views(p) for p in padded), strict=True):
        totals = combine(*totals, *views)
    return totals


def reduce_window_named(x: np.ndarray, window: Window, name: str) -> np.ndarray:
    """A reduction by name from its identity: one dimension after the other, in compute type."""
    wide = arithmetic.convert(x, arithmetic.compute_dtype(x.dtype))
    scan = _scan_dimension(x.shape, window)
    if scan is not None:
        return arithmetic.convert(_scan(wide, name, *scan), x.dtype)
    total = window.padded(wide, arithmetic.IDENTITY[name](wide.dtype))
    combined = arithmetic.elementwise_name(name, x.dtype)
    for d in range(x.ndim):
        views = window.only(d).views(total)
        total = next(views)
        for view in views:
            total = arithmetic.apply(combined, total, view)
    return arithmetic.convert(total, x.dtype)


def _scan_dimension(shape: Shape, window: Window) -> tuple[int, bool] | None:
    """The dimension and direction if the window is that of a prefix reduction, such as cumsum."""
    wide = [d for d, size in enumerate(window.dimensions) if size > 1]
    plain = (window.strides, window.base_dilations, window.window_dilations)
    if len(wide) != 1 or any(v != 1 for values in plain for v in values):
        return None
    d, n = wide[0], shape[wide[0]]
    if window.dimensions[d] != n or any(
        p != (0, 0) for i, p in enumerate(window.padding) if i != d
    ):
        return None
    low, high = window.padding[d]
    return (d, low == 0) if {low, high} == {0, n - 1} else None


def _scan(x: np.ndarray, name: str, axis: int, backwards: bool) -> np.ndarray:
    if backwards:
        return np.flip(arithmetic.accumulate(name, np.flip(x, axis), axis), axis)
    return arithmetic.accumulate(name, x, axis)


def select_and_scatter(
    x: np.ndarray,
    source: np.ndarray,
    init: np.ndarray,
    window: Window,
    select: Combine,
    combine: Combine,
    reduction: str | None,
) -> np.ndarray:
    """Each window's selected element receives its `source` element; the others stay `init`."""
    inside = window.padded(np.ones(x.shape, bool), np.zeros((), bool))
    numbers = window.padded(np.arange(x.size).reshape(x.shape), np.zeros((), int))
    views = (window.views(p) for p in (window.padded(x, np.zeros((), x.dtype)), inside, numbers))
    best = place = found = None
    for values, here, where in zip(*views, strict=True):
        if best is None or place is None or found is None:
            best, place, found = values, where, here
            continue
        better = here & (~found | ~select(best, values)[0])
        best, place, found = (
            np.where(better, values, best),
            np.where(better, where, place),
            found | here,
        )
    result = np.full((x.size, 1), init, dtype=x.dtype)
    if found is not None and place is not None:
        chosen = found.reshape(-1)
        news = source.reshape(-1, 1)[chosen]
        scatter_rows([result], place.reshape(-1)[chosen], [news], combine, reduction)
    return result.reshape(x.shape)
