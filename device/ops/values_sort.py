"""Values of sort and topk."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .. import arithmetic
from .ir import Block
from .regions import (
    Combine,
    Expression,
    Types,
    argument,
    evaluate_expression,
    expressions,
    node,
)


@dataclass(frozen=True)
class Key:
    """One sort key: an expression of the operands (region arguments 0, 2, 4, ...)."""

    expression: Expression
    descending: bool
    total_order: bool


def _mirrored(expression: Expression) -> Expression:
    """The same expression of the other element: argument 2k for 2k + 1 and back."""
    if expression.name == "argument":
        return argument(expression.value ^ 1)
    operands = tuple(_mirrored(o) for o in expression.operands)
    plain = Expression(expression.name, operands, expression.value, expression.dtype)
    if expression.name == "compare":
        direction, total = expression.value
        kind = "TOTALORDER" if total else "NOTYPE"
        return node("compare", *operands, direction=direction, compare_type=kind)
    return plain


def _single_key(expression: Expression) -> Key | None:
    if expression.name != "compare" or expression.value[0] != "LT":
        return None
    first, second = expression.operands
    if _mirrored(first) != second:
        return None
    parities = {number % 2 for number in first.uses()}
    if len(parities) != 1:
        return None
    descending = parities == {1}
    return Key(second if descending else first, descending, expression.value[1])


def keys(block: Block, types: Types) -> list[Key] | None:
    """The sort keys, most significant first, if the comparator is lexicographic; else None."""
    return _keys(expressions(block, types)[0])


def _keys(expression: Expression) -> list[Key] | None:
    key = _single_key(expression)
    if key is not None:
        return [key]
    if expression.name != "or":
        return None
    for strict, rest in (expression.operands, expression.operands[::-1]):
        key = _single_key(strict)
        if key is None or rest.name != "and":
            continue
        kind = "TOTALORDER" if key.total_order else "NOTYPE"
        equal = node(
            "compare",
            key.expression,
            _mirrored(key.expression),
            direction="EQ",
            compare_type=kind,
        )
        for condition, less in (rest.operands, rest.operands[::-1]):
            lower = _keys(less) if condition == equal else None
            if lower is not None:
                return [key, *lower]
    return None


def _sortable(values: np.ndarray, descending: bool, total_order: bool) -> np.ndarray:
    """Integers whose ascending order is that of the key."""
    if arithmetic.is_float(values.dtype):
        wide = arithmetic.convert(values, arithmetic.compute_dtype(values.dtype))
        wide = wide if total_order else wide + wide.dtype.type(0)  # -0 equals +0
        values = arithmetic.total_order(wide)
    elif values.dtype == np.bool_:
        values = values.astype(np.uint8)
    return np.invert(values) if descending else values


def sort(
    operands: Sequence[np.ndarray], dimension: int, found: list[Key] | None, combine: Combine
) -> list[np.ndarray]:
    """All operands in the order of the comparator along `dimension`; always stable."""
    if found is None:
        order = _order_by_counting(operands, dimension, combine)
    else:
        arguments = {2 * i: x for i, x in enumerate(operands)}
        columns = [
            _sortable(evaluate_expression(k.expression, arguments), k.descending, k.total_order)
            for k in found
        ]
        if len(columns) == 1:
            order = np.argsort(columns[0], axis=dimension, kind="stable")
        else:
            order = np.lexsort(columns[::-1], axis=dimension)
    return [np.take_along_axis(x, order, dimension) for x in operands]


def _order_by_counting(
    operands: Sequence[np.ndarray], dimension: int, combine: Combine
) -> np.ndarray:
    """Any comparator: an element's rank is the number of elements that come before it."""
    values = [np.moveaxis(x, dimension, 0) for x in operands]
    size = values[0].shape[0]
    rank = np.zeros(values[0].shape, np.int64)
    later = np.arange(size).reshape((-1,) + (1,) * (values[0].ndim - 1))
    for i in range(size):
        one = [np.broadcast_to(v[i], v.shape) for v in values]
        before = combine(*(x for pair in zip(one, values, strict=True) for x in pair))[0]
        after = combine(*(x for pair in zip(values, one, strict=True) for x in pair))[0]
        rank += before | (~after & (later > i))
    return np.moveaxis(np.argsort(rank, axis=0), 0, dimension)


def topk(x: np.ndarray, k: int, largest: bool) -> list[np.ndarray]:
    """The k first elements of the last dimension in total order, and their int32 places."""
    order = np.argsort(_sortable(x, largest, True), axis=-1, kind="stable")[..., :k]
    return [np.take_along_axis(x, order, -1), order.astype(np.int32)]
