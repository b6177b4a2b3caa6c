"""Values of gather and scatter.

Both see the operand as rows: the dimensions that indices address, or of which a window takes a
part, are flattened in front (`active`); the others, taken whole, form the row. A window then is a
set of row numbers, and gather and scatter work on [rows, row length].
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .. import arithmetic
from .regions import Combine

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Windows:
    """Where windows start: int64 start indices [batch...] of the operand dimensions addressed."""

    operand_shape: Shape
    sizes: Shape  # of a window, per operand dimension
    batch: Shape
    starts: dict[int, np.ndarray]

    @property
    def active(self) -> tuple[int, ...]:
        """Operand dimensions that are addressed or taken in part."""
        return tuple(
            d
            for d, size in enumerate(self.sizes)
            if d in self.starts or size != self.operand_shape[d]
        )

    @property
    def whole(self) -> tuple[int, ...]:
        """The other operand dimensions: a window has all of them."""
        active = self.active
        return tuple(d for d in range(len(self.sizes)) if d not in active)

    def clamped(self) -> "Windows":
        """Starts moved so that every window lies inside the operand."""
        starts = {
            d: np.clip(s, 0, self.operand_shape[d] - self.sizes[d]) for d, s in self.starts.items()
        }
        return Windows(self.operand_shape, self.sizes, self.batch, starts)

    def inside(self) -> np.ndarray:
        """bool [batch...]: whether the whole window lies inside the operand."""
        result = np.ones(self.batch, bool)
        for d, s in self.starts.items():
            result &= (s >= 0) & (s <= self.operand_shape[d] - self.sizes[d])
        return result

    def rows(self) -> np.ndarray:
        """Row numbers, int64 [batch..., size of each active dimension...]."""
        active = self.active
        numbers = np.zeros(self.batch + (1,) * len(active), np.int64)
        for place, d in enumerate(active):
            steps = np.arange(self.sizes[d]).reshape((-1,) + (1,) * (len(active) - place - 1))
            numbers = numbers * self.operand_shape[d] + steps
            if d in self.starts:
                numbers = numbers + self.starts[d].reshape(self.batch + (1,) * len(active))
        return numbers

    def as_rows(self, operand: np.ndarray) -> np.ndarray:
        """The operand as [rows, row length]; a view if the active dimensions are in front."""
        active, whole = self.active, self.whole
        count = math.prod(self.operand_shape[d] for d in active)
        length = math.prod(self.operand_shape[d] for d in whole)
        return operand.transpose(active + whole).reshape(count, length)

    def from_rows(self, rows: np.ndarray) -> np.ndarray:
        """The inverse of `as_rows`."""
        order = self.active + self.whole
        shaped = rows.reshape([self.operand_shape[d] for d in order])
        return shaped.transpose(np.argsort(order))


def windows(
    operand_shape: Shape,
    indices: np.ndarray,
    sizes: Shape,
    index_map: Sequence[int],
    index_vector_dim: int,
    operand_batching: Sequence[int],
    indices_batching: Sequence[int],
) -> Windows:
    """Windows that the index tensor addresses, with StableHLO's dimension numbers."""
    indices = indices.astype(np.int64)
    if index_vector_dim == indices.ndim:
        indices = indices[..., None]
    indices = np.moveaxis(indices, index_vector_dim, -1)
    batch = indices.shape[:-1]
    starts = {d: indices[..., k] for k, d in enumerate(index_map)}
    for d, i in zip(operand_batching, indices_batching, strict=True):
        axis = i - (i > index_vector_dim)
        counts = np.arange(batch[axis]).reshape((-1,) + (1,) * (len(batch) - axis - 1))
        starts[d] = np.broadcast_to(counts, batch)
    return Windows(operand_shape, sizes, batch, starts)


def gather(
    operand: np.ndarray, found: Windows, dropped: Sequence[int], offset_dims: Sequence[int]
) -> np.ndarray:
    """Clamped windows, without the `dropped` dimensions, at `offset_dims` of the result."""
    found = found.clamped()
    rows = found.rows()
    taken = found.as_rows(operand)[rows.reshape(-1)]
    rank, order = len(found.batch), found.active + found.whole
    shaped = taken.reshape(found.batch + tuple(found.sizes[d] for d in order))
    window = [rank + order.index(d) for d in range(operand.ndim)]
    kept = [axis for d, axis in enumerate(window) if d not in dropped]
    shaped = shaped.transpose([*range(rank), *kept, *(a for a in window if a not in kept)])
    shaped = shaped.reshape(shaped.shape[: rank + len(kept)])
    return np.moveaxis(shaped, range(rank, rank + len(kept)), offset_dims)


def _update_rows(updates: np.ndarray, found: Windows, window_dims: Sequence[int]) -> np.ndarray:
    """Updates as [batch..., active..., whole...] of the operand's dimensions."""
    batch_dims = [d for d in range(updates.ndim) if d not in window_dims]
    moved = updates.transpose([*batch_dims, *window_dims])
    rank = len(batch_dims)
    shaped = moved.reshape(moved.shape[:rank] + found.sizes)
    return shaped.transpose(
        [*range(rank), *(rank + d for d in found.active), *(rank + d for d in found.whole)]
    )


def window_sizes(
    rank: int, updates_shape: Shape, window_dims: Sequence[int], inserted: Sequence[int]
) -> Shape:
    """Extent of a scatter's window in every operand dimension: one where `inserted`."""
    extents = iter([updates_shape[d] for d in window_dims])
    return tuple(1 if d in inserted else next(extents) for d in range(rank))


def scatter(
    operands: Sequence[np.ndarray],
    updates: Sequence[np.ndarray],
    found: Windows,
    window_dims: Sequence[int],
    combine: Combine,
    reduction: str | None,
) -> list[np.ndarray]:
    """Copies of the operands with updates combined in; windows partly outside are dropped.

    `reduction` names a reduction, or 'update' for overwriting; otherwise `combine` is the region.
    """
    count = math.prod(found.sizes[d] for d in found.active)
    kept = np.repeat(found.inside().reshape(-1), count)
    rows = found.rows().reshape(-1)[kept]
    length = math.prod(found.sizes[d] for d in found.whole)
    targets = [np.array(found.as_rows(x), order="C") for x in operands]
    news = [_update_rows(u, found, window_dims).reshape(-1, length)[kept] for u in updates]
    scatter_rows(targets, rows, news, combine, reduction)
    return [found.from_rows(t) for t in targets]


def scatter_rows(
    targets: Sequence[np.ndarray],
    rows: np.ndarray,
    news: Sequence[np.ndarray],
    combine: Combine,
    reduction: str | None,
) -> None:
    """Combines `news` [n, length] into `targets` [rows, length] at row numbers `rows`, in place."""
    if rows.size == 0:
        return
    if reduction == "update":
        for target, new in zip(targets, news, strict=True):
            target[rows] = new
    elif reduction is not None:
        _reduce_rows(targets[0], rows, news[0], reduction)
    else:
        _combine_rows(targets, rows, news, combine)


def _reduce_rows(target: np.ndarray, rows: np.ndarray, new: np.ndarray, reduction: str) -> None:
    """Sorts by row, reduces each run of equal rows, then combines once into the target."""
    order = np.argsort(rows, kind="stable")
    ordered = rows[order]
    firsts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    if firsts.size < rows.size:
        new = arithmetic.reduce_runs(reduction, new[order], firsts)
        rows = ordered[firsts]
    name = arithmetic.elementwise_name(reduction, target.dtype)
    target[rows] = arithmetic.apply(name, target[rows], new, out=target.dtype)


def _combine_rows(
    targets: Sequence[np.ndarray], rows: np.ndarray, news: Sequence[np.ndarray], combine: Combine
) -> None:
    """One round for the first update of every row, one for the second, and so on."""
    order = np.argsort(rows, kind="stable")
    ordered = rows[order]
    firsts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    counts = np.diff(np.append(firsts, rows.size))
    for turn in range(counts.max()):
        chosen = order[firsts[counts > turn] + turn]
        where = rows[chosen]
        values = combine(*(t[where] for t in targets), *(n[chosen] for n in news))
        for target, value in zip(targets, values, strict=True):
            target[where] = value
