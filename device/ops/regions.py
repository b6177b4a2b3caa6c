"""Regions over scalars (reducers, comparators, updates), computed on whole arrays.

A region is read as one nested expression per returned value, in a canonical form: operands of
commutative operators sorted, GT and GE written as LT and LE, scalar reshapes dropped. Equal
expressions are equal functions, which is how the common regions are recognised.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import arithmetic
from ..errors import Unsupported
from .ir import Block, Operation, TensorType

Combine = Callable[..., list[np.ndarray]]
Types = Sequence[TensorType]

_COMMUTATIVE = frozenset({"add", "multiply", "maximum", "minimum", "and", "or", "xor"})
_SCALAR_MOVES = frozenset({"reshape", "broadcast_in_dim", "copy", "optimization_barrier"})
_MIRRORED = {"GT": "LT", "GE": "LE"}


@dataclass(frozen=True)
class Expression:
    """A node of a region: an argument (`value` its number), a constant, or an operator."""

    name: str
    operands: "tuple[Expression, ...]" = ()
    value: Any = None  # argument number, constant bytes, or attributes
    dtype: str = ""  # of constants and conversions

    def uses(self) -> frozenset[int]:
        """Numbers of the region arguments below this node."""
        if self.name == "argument":
            return frozenset({self.value})
        return frozenset().union(*(o.uses() for o in self.operands))


def argument(number: int) -> Expression:
    """The region's argument of that number."""
    return Expression("argument", value=number)


def node(name: str, *operands: Expression, dtype: str = "", **attributes: Any) -> Expression:
    """An operator in canonical form."""
    if name == "compare":
        direction = attributes["direction"]
        if direction in _MIRRORED:
            direction, operands = _MIRRORED[direction], operands[::-1]
        total = attributes.get("compare_type") == "TOTALORDER"
        if direction in ("EQ", "NE"):
            operands = tuple(sorted(operands, key=repr))
        return Expression(name, operands, (direction, total))
    if name in _COMMUTATIVE:
        operands = tuple(sorted(operands, key=repr))
    value = tuple(sorted(attributes.items())) or None
    return Expression(name, operands, value, dtype if name == "convert" else "")


def expressions(block: Block, types: Types) -> tuple[Expression, ...]:
    """The returned values of a region as expressions. Raises Unsupported for other operators."""
    known = {value: argument(number) for number, value in enumerate(block.arguments)}
    for operation in block.operations:
        known[operation.results[0]] = _expression(operation, known, types)
    return tuple(known[value] for value in block.returns)


def _expression(operation: Operation, known: dict[int, Expression], types: Types) -> Expression:
    result = types[operation.results[0]]
    if operation.name == "constant":
        value = np.asarray(operation.attributes["value"]).reshape(-1)[:1].tobytes()
        return Expression("constant", value=value, dtype=result.dtype)
    operands = [known[v] for v in operation.operands]
    if operation.name in _SCALAR_MOVES:
        return operands[0]
    if operation.name not in arithmetic.NAMES:
        raise Unsupported(
            f"operator {operation.name} in a reducer region is not modelled ({operation.location})"
        )
    return node(operation.name, *operands, dtype=result.dtype, **operation.attributes)


def evaluate_expression(expression: Expression, arguments: Mapping[int, np.ndarray]) -> np.ndarray:
    """The expression with whole arrays for the region's arguments."""
    if expression.name == "argument":
        return arguments[expression.value]
    if expression.name == "constant":
        return np.frombuffer(expression.value, TensorType((), expression.dtype).numpy)[0]
    operands = [evaluate_expression(o, arguments) for o in expression.operands]
    if expression.name == "compare":
        direction, total = expression.value
        kind = "TOTALORDER" if total else "NOTYPE"
        return arithmetic.apply("compare", *operands, direction=direction, compare_type=kind)
    out = TensorType((), expression.dtype).numpy if expression.name == "convert" else None
    return arithmetic.apply(expression.name, *operands, out=out, **dict(expression.value or ()))


def combine(block: Block, types: Types) -> Combine:
    """The region as a function of whole arrays: elementwise, with numpy broadcasting."""
    returned = expressions(block, types)
    dtypes = [types[v].numpy for v in block.returns]

    def combined(*arrays: np.ndarray) -> list[np.ndarray]:
        values = [evaluate_expression(e, dict(enumerate(arrays))) for e in returned]
        shape = np.broadcast_shapes(*(np.shape(a) for a in arrays))
        return [
            np.broadcast_to(np.asarray(v), shape).astype(d, copy=False)
            for v, d in zip(values, dtypes, strict=True)
        ]

    return combined


def _without_widening(expression: Expression) -> Expression:
    """Without conversions: those of a narrow float to compute type and back."""
    if expression.name == "convert":
        return _without_widening(expression.operands[0])
    operands = tuple(_without_widening(o) for o in expression.operands)
    return Expression(expression.name, operands, expression.value, expression.dtype)


def reduction_name(block: Block, types: Types) -> str | None:
    """add, multiply, minimum, maximum, and, or: if the region is that of its two arguments."""
    if len(block.arguments) != 2 or len(block.returns) != 1:
        return None
    first, second = argument(0), argument(1)
    expression = _without_widening(expressions(block, types)[0])
    kinds = {types[v].numpy for v in block.arguments}
    if len(kinds) > 1 or expression.operands not in ((first, second), (second, first)):
        return None
    floating = arithmetic.is_float(next(iter(kinds)))
    converted = {o.results[0] for o in block.operations if o.name == "convert"}
    if converted and not floating:
        return None
    return expression.name if expression.name in arithmetic.IDENTITY else None


def is_update(block: Block, types: Types) -> bool:
    """Whether the region returns its update operands as they are (scatter that overwrites)."""
    count = len(block.returns)
    return expressions(block, types) == tuple(argument(count + i) for i in range(count))


def argument_reduction(block: Block, types: Types) -> str | None:
    """'maximum' or 'minimum' if the region is that of argmax or argmin as JAX writes it.

    The arguments are (value, index, value, index); NaN wins, equal values keep the lower index.
    """
    if len(block.arguments) != 4 or len(block.returns) != 2:
        return None
    a, index_a, b, index_b = (argument(n) for n in range(4))
    found = expressions(block, types)
    for name, direction in (("maximum", "GT"), ("minimum", "LT")):
        picked = node(
            "or",
            node("compare", a, b, direction=direction),
            node("compare", a, a, direction="NE"),
        )
        tie = node(
            "and",
            node("compare", a, b, direction="EQ"),
            node("compare", index_a, index_b, direction="LT"),
        )
        index = node("select", node("or", picked, tie), index_a, index_b)
        if found == (node("select", picked, a, b), index):
            return name
    return None
