"""Arithmetic of strided views: (shape, strides) in, (shape, strides) out; strides in elements."""

import math
from collections.abc import Mapping, Sequence

from ..errors import BadInput

Shape = tuple[int, ...]
Layout = tuple[Shape, Shape]
Pattern = Sequence[str | Sequence[str]]


def dense(shape: Sequence[int]) -> Shape:
    """Strides of a tensor in one piece, last axis fastest."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


def is_dense(shape: Shape, strides: Shape) -> bool:
    """Whether the elements lie in one piece, in order."""
    step = 1
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1 and stride != step:
            return False
        step *= extent
    return True


def reshaped(shape: Shape, strides: Shape, new: Shape) -> Shape | None:
    """Strides of the same elements as `new`, or None if no strides can say that."""
    if math.prod(shape) != math.prod(new):
        return None
    old = [(n, s) for n, s in zip(shape, strides, strict=True) if n != 1]
    result = [1] * len(new)
    axis, position = 0, 0
    while axis < len(old):
        end, group = axis + 1, old[axis][0]
        first = position
        count = 1
        while count != group:
            if count < group:
                if position == len(new):
                    return None
                count *= new[position]
                position += 1
            else:
                if end == len(old):
                    return None
                group *= old[end][0]
                end += 1
        for (_, outer), (inner_count, inner) in zip(
            old[axis:end], old[axis + 1 : end], strict=False
        ):
            if outer != inner * inner_count:
                return None
        step = old[end - 1][1]
        for place in range(position - 1, first - 1, -1):
            result[place] = step
            step *= new[place]
        axis = end
    return tuple(result)


def filled(shape: Sequence[int], count: int) -> Shape:
    """The shape with one -1 replaced so that it has `count` elements. Raises BadInput."""
    known = math.prod(n for n in shape if n != -1)
    if list(shape).count(-1) == 1 and known and count % known == 0:
        shape = [count // known if n == -1 else n for n in shape]
    if -1 in shape or math.prod(shape) != count:
        raise BadInput("shape", tuple(shape), f"{count} elements in all")
    return tuple(int(n) for n in shape)


def split(shape: Shape, strides: Shape, axis: int, parts: Sequence[int]) -> Layout:
    """One axis as several."""
    parts = filled(parts, shape[axis])
    inner = tuple(step * strides[axis] for step in dense(parts))
    return (
        (*shape[:axis], *parts, *shape[axis + 1 :]),
        (*strides[:axis], *inner, *strides[axis + 1 :]),
    )


def merged(shape: Shape, strides: Shape, first: int, last: int) -> Layout | None:
    """Axes `first` to `last` as one, or None if they do not lie in one piece."""
    size = math.prod(shape[first : last + 1])
    inner = reshaped(shape[first : last + 1], strides[first : last + 1], (size,))
    if inner is None:
        return None
    return (
        (*shape[:first], size, *shape[last + 1 :]),
        (*strides[:first], *inner, *strides[last + 1 :]),
    )


def rearranged(
    shape: Shape, strides: Shape, source: Pattern, target: Pattern, sizes: Mapping[str, int]
) -> Layout:
    """Axes split, reordered and merged as two patterns of names say. Raises BadInput."""
    if len(source) != len(shape):
        raise BadInput("src_pattern", source, f"{len(shape)} axes, like shape {list(shape)}")
    names: list[str] = []
    for group in source:
        axis = len(names)
        group = (group,) if isinstance(group, str) else tuple(group)
        parts = [sizes.get(name, -1) for name in group]
        if len(group) == 1:
            parts = [shape[axis]]
        shape, strides = split(shape, strides, axis, parts)
        names += group
    flat = [name for group in target for name in ((group,) if isinstance(group, str) else group)]
    if sorted(flat) != sorted(names) or len(set(names)) != len(names):
        raise BadInput("dst_pattern", target, f"each name of {source} once")
    order = [names.index(name) for name in flat]
    shape = tuple(shape[axis] for axis in order)
    strides = tuple(strides[axis] for axis in order)
    axis = 0
    for group in target:
        if not isinstance(group, str) and len(group) != 1:
            found = merged(shape, strides, axis, axis + len(group) - 1)
            if found is None:
                raise BadInput("dst_pattern", target, "groups whose axes lie in one piece")
            shape, strides = found
        axis += 1
    return shape, strides
