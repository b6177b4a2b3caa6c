"""Which axes of a kernel's iteration space a value spans.

A space is a row-major range of `n` points. A `Pattern` describes a value over it as segments
(extent, varies) from the slowest axis to the fastest, in lowest terms: neighbours that agree are
merged and extents of one are dropped. A [B, S] value in the space of [B, H, S, D] is
((B, True), (H, False), (S, True), (D, False)). Reshapes leave a pattern as it is.
"""

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

Pattern = tuple[tuple[int, bool], ...]


def pattern(segments: Iterable[tuple[int, bool]]) -> Pattern:
    """Segments in lowest terms."""
    result: list[tuple[int, bool]] = []
    for extent, varies in segments:
        if extent == 1:
            continue
        if result and result[-1][1] == varies:
            result[-1] = (result[-1][0] * extent, varies)
        else:
            result.append((extent, varies))
    return tuple(result)


def full(n: int) -> Pattern:
    """A value with one element per point."""
    return pattern([(n, True)])


def splat(n: int) -> Pattern:
    """One element for all `n` points."""
    return pattern([(n, False)])


def points(p: Pattern) -> int:
    """Size of the space."""
    return math.prod(extent for extent, _ in p)


def elements(p: Pattern) -> int:
    """Size of the value."""
    return math.prod(extent for extent, varies in p if varies)


def cuts(extents: Iterable[int]) -> set[int]:
    """Sizes of the inner blocks between the axes: the products of all suffixes."""
    found, inner = set(), 1
    for extent in reversed(tuple(extents)):
        found.add(inner)
        inner *= extent
    return found | {inner}


def axes(all_cuts: set[int]) -> tuple[int, ...] | None:
    """Extents of the axes between `all_cuts`, or None where they do not divide one another."""
    ordered = sorted(all_cuts)
    extents = []
    for inner, outer in zip(ordered, ordered[1:], strict=False):
        if outer % inner:
            return None
        extents.append(outer // inner)
    return tuple(reversed(extents))


def mask(p: Pattern, extents: Sequence[int]) -> tuple[bool, ...]:
    """`p` along axes that refine it: True where the value varies."""
    if not p:
        return (False,) * len(extents)
    result, segments, left = [], list(p), 0
    varies = False
    for extent in extents:
        if left <= 1:
            left, varies = segments.pop(0)
        left //= extent
        result.append(varies)
    return tuple(result)


def masked(flags: Sequence[bool], extents: Sequence[int]) -> Pattern:
    """The pattern that varies along the flagged axes."""
    return pattern(zip(extents, flags, strict=True))


@lru_cache(maxsize=1 << 16)
def lift(inner: Pattern, outer: Pattern) -> Pattern | None:
    """`inner`, a pattern over the elements of `outer`, as a pattern over the points of `outer`.

    None where the axes of the two do not line up.
    """
    kept = [extent for extent, varies in outer if varies]
    extents = axes(cuts(kept) | cuts(extent for extent, _ in inner))
    if extents is None:
        return None
    flags = list(zip(extents, mask(inner, extents), strict=True))
    result: list[tuple[int, bool]] = []
    for extent, varies in outer:
        if not varies:
            result.append((extent, False))
            continue
        left = extent
        while left > 1:
            result.append(flags.pop(0))
            left //= result[-1][0]
    return pattern(result)


def union(patterns: Sequence[Pattern], n: int) -> Pattern | None:
    """The pattern that varies wherever one of `patterns` does."""
    extents = axes({1, n}.union(*(cuts(e for e, _ in p) for p in patterns if p)))
    if extents is None:
        return None
    masks = [mask(p, extents) for p in patterns]
    flags = (
        [any(column) for column in zip(*masks, strict=True)] if masks else [False] * len(extents)
    )
    return masked(flags, extents)


def of_broadcast(shape: Sequence[int], dimensions: Sequence[int], result: Sequence[int]) -> Pattern:
    """The operand of a broadcast_in_dim in the space of its result (dimensions increasing)."""
    varies = {d for i, d in enumerate(dimensions) if shape[i] == result[d]}
    return pattern((extent, d in varies) for d, extent in enumerate(result))


def of_axis(axis: int, shape: Sequence[int]) -> Pattern:
    """A value that varies along one axis of `shape` only."""
    return pattern((extent, d == axis) for d, extent in enumerate(shape))


def leading(rows: int, columns: int) -> Pattern:
    """One element per row."""
    return pattern([(rows, True), (columns, False)])
