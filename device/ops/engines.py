"""Elementwise operators as instructions of the lane engines."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..chip import Chip
from ..dtypes import is_float
from ..isa.base import Instruction, engine_for
from ..isa.gpsimd import Custom, Iota
from ..isa.scalar import FUNCTIONS, Activation
from ..isa.vector import (
    BINARY,
    Copy,
    Memset,
    ScalarTensorTensor,
    Select,
    TensorScalar,
    TensorTensor,
)
from ..memory import Tensor, View
from .ir import Operation

Value = View | np.ndarray
"""An operand: a view, or an immediate as a 0-d array."""

Scratch = Callable[..., Tensor]
COMPARE = {
    "EQ": "equal", "NE": "not_equal", "LT": "less", "LE": "less_equal", "GT": "greater",
    "GE": "greater_equal",
}  # fmt: skip
MIRRORED = {"add", "multiply", "maximum", "minimum", "and", "or", "xor", "equal", "not_equal"}


def number(value: np.ndarray) -> float | int:
    """An immediate as a Python number."""
    item = value.item()
    return int(item) if isinstance(item, bool | np.bool_) else item


def _is_column(view: View, dst: View) -> bool:
    return view.shape != dst.shape


def _full(value: Value, dst: View, scratch: Scratch, slot: int) -> Iterator[Instruction]:
    """`value` with dst's shape: columns repeat by stride 0, immediates are written out."""
    if isinstance(value, View):
        return value if value.shape == dst.shape else value.broadcast(*dst.shape)
    from ..dtypes import dtype_name

    tile = scratch(dtype_name(value.dtype), _width(dst), slot)[: dst.shape[0], : _width(dst)]
    yield Memset(tile, number(value))
    return tile


def _width(view: View) -> int:
    return view.shape[1]


def elementwise(
    operation: Operation, dst: View, operands: list[Value], scratch: Scratch, chip: Chip
) -> Iterator[Instruction]:
    """Instructions for dst = operation(operands) on one tile.

    Operands are views of dst's shape, [P, 1] columns, or immediates. `scratch(dtype, width, slot)`
    gives a spare tile.
    """
    name, attributes = operation.name, operation.attributes
    if name == "activate":
        yield from _activate(dst, operands, attributes, scratch)
    elif name == "tensor_scalar":
        yield from _tensor_scalar(dst, operands, attributes, scratch)
    elif name == "scalar_tensor_tensor":
        yield from _scalar_tensor_tensor(dst, operands, attributes, scratch)
    elif name == "convert":
        (source,) = operands
        view = yield from _full(source, dst, scratch, 8)
        yield Copy(dst, view)
    elif name == "select":
        yield from _select(dst, operands, scratch)
    elif name == "clamp":
        yield from _clamp(dst, operands, scratch)
    elif name == "compare":
        yield from _comparison(dst, operands, attributes, scratch)
    elif name in BINARY:
        yield from _binary(name, dst, operands[0], operands[1], scratch)
    elif len(operands) == 1:
        yield from _unary(name, dst, operands[0], attributes, scratch)
    else:
        yield from _custom(name, dst, operands, attributes, scratch)


def _scalar(value: Value) -> View | float | int:
    return value if isinstance(value, View) else number(value)


def _activate(
    dst: View, operands: list[Value], attributes: dict[str, Any], scratch: Scratch
) -> Iterator[Instruction]:
    """A function with a scale or bias, and the sum of its results where `reduce` asks for it."""
    view = yield from _full(operands[0], dst, scratch, 8)
    total, role = attributes.get("reduce"), attributes.get("role")
    function = attributes["function"]
    if role is None:
        yield Activation(dst, view, function, reduce=total)
        return
    other = _scalar(operands[1])
    if attributes["negate"] and isinstance(other, View):
        negated = scratch("f32", 1, 12)[: dst.shape[0]]
        yield TensorScalar(negated, other, "multiply", -1.0)
        other = negated
    elif attributes["negate"] and not isinstance(other, View):
        other = -other
    if role == "scale":
        yield Activation(dst, view, function, scale=other, reduce=total)
    else:
        yield Activation(dst, view, function, bias=other, reduce=total)


def _tensor_scalar(
    dst: View, operands: list[Value], attributes: dict[str, Any], scratch: Scratch
) -> Iterator[Instruction]:
    view = yield from _full(operands[0], dst, scratch, 8)
    second = _scalar(operands[2]) if len(operands) > 2 else None
    yield TensorScalar(
        dst, view, attributes["op0"], _scalar(operands[1]), attributes.get("op1"), second,
        attributes["reverse0"], attributes.get("reverse1", False),
        attributes.get("engine", "vector"),
    )  # fmt: skip


def _scalar_tensor_tensor(
    dst: View, operands: list[Value], attributes: dict[str, Any], scratch: Scratch
) -> Iterator[Instruction]:
    view = yield from _full(operands[0], dst, scratch, 8)
    other = yield from _full(operands[2], dst, scratch, 9)
    yield ScalarTensorTensor(
        dst, view, attributes["op0"], _scalar(operands[1]), attributes["op1"], other,
        attributes["reverse0"], attributes["reverse1"],
    )  # fmt: skip


def _custom(
    name: str, dst: View, operands: list[Value], attributes: dict[str, Any], scratch: Scratch
) -> Iterator[Instruction]:
    views = []
    for i, operand in enumerate(operands):
        view = yield from _full(operand, dst, scratch, 8 + i)
        views.append(view)
    known = {k: v for k, v in attributes.items() if k != "location"}
    yield Custom(dst, tuple(views), name, known)


def _unary(
    name: str, dst: View, source: Value, attributes: dict[str, Any], scratch: Scratch
) -> Iterator[Instruction]:
    view = yield from _full(source, dst, scratch, 8)
    floats = is_float(view.dtype)
    if name in FUNCTIONS and floats:
        yield Activation(dst, view, name)
    elif name == "negate" and not floats:
        engine = engine_for("subtract", view.dtype)
        yield TensorScalar(dst, view, "subtract", 0, reverse0=True, engine=engine)
    elif name == "not":
        yield TensorScalar(dst, view, "xor", 1 if view.dtype == "i1" else -1)
    else:
        yield Custom(dst, (view,), name, attributes)


def _binary(op: str, dst: View, a: Value, b: Value, scratch: Scratch) -> Iterator[Instruction]:
    """Two full tensors, or a tensor and one value per partition or for all."""
    dtypes = [v.dtype for v in (a, b) if isinstance(v, View)] or [dst.dtype]
    engine = engine_for(op, *dtypes)
    if not isinstance(a, View) and not isinstance(b, View):
        a = yield from _full(a, dst, scratch, 8)
    first = isinstance(a, View) and a.shape == dst.shape
    second = isinstance(b, View) and b.shape == dst.shape
    if first and second:
        yield TensorTensor(dst, a, b, op, engine=engine)  # type: ignore[arg-type]
    elif first or second:
        source, other = (a, b) if first else (b, a)
        scalar = other if isinstance(other, View) else number(other)
        reverse = not first and op not in MIRRORED
        yield TensorScalar(dst, source, op, scalar, reverse0=reverse, engine=engine)  # type: ignore[arg-type]
    else:
        left = yield from _full(a, dst, scratch, 8)
        right = yield from _full(b, dst, scratch, 9)
        yield TensorTensor(dst, left, right, op, engine=engine)


def _comparison(
    dst: View, operands: list[Value], attributes: dict[str, Any], scratch: Scratch
) -> Iterator[Instruction]:
    if attributes.get("compare_type") == "TOTALORDER":
        yield from _custom("compare", dst, operands, attributes, scratch)
    else:
        op = COMPARE[attributes["direction"]]
        yield from _binary(op, dst, operands[0], operands[1], scratch)


def _select(dst: View, operands: list[Value], scratch: Scratch) -> Iterator[Instruction]:
    mask = yield from _full(operands[0], dst, scratch, 8)
    choices = []
    for value in operands[1:]:
        choices.append(value.broadcast(*dst.shape) if isinstance(value, View) and
                       value.shape != dst.shape else value if isinstance(value, View) else
                       number(value))  # fmt: skip
    yield Select(dst, mask, choices[0], choices[1])


def _clamp(dst: View, operands: list[Value], scratch: Scratch) -> Iterator[Instruction]:
    low, x, high = operands
    bounds = [v if isinstance(v, View) else number(v) for v in (low, high)]
    full = [isinstance(v, View) and v.shape == dst.shape and _width(dst) > 1 for v in (low, high)]
    if isinstance(x, View) and x.shape == dst.shape and not any(full):
        yield TensorScalar(dst, x, "maximum", bounds[0], "minimum", bounds[1])
        return
    yield from _binary("maximum", dst, x, low, scratch)
    yield from _binary("minimum", dst, dst, high, scratch)


def iota(
    dst: View,
    start: int,
    behind: int,
    period: int,
    scale: int,
    column: int,
    first: int,
    scratch: Scratch,
) -> Iterator[Instruction]:
    """dst[p, c] = ((start + p) // behind % period) * scale + column * (first + c), cast.

    With `period` 1 the row part is zero.
    """
    exact = dst.dtype in ("i32", "ui32", "f32")
    rows, width = dst.shape
    target = dst if exact else scratch("i32", width, 10)[:rows, :width]
    simple = period == 1 or (behind == 1 and start % period + rows <= period)
    if simple:
        row = start % period if period > 1 else 0
        channel = scale if period > 1 else 0
        yield Iota(target, (column,), start=row * scale + column * first, channel=channel)
    else:
        numbers = scratch("i32", 1, 11)[:rows]
        yield Iota(numbers, (0,), start=start, channel=1)
        yield TensorScalar(numbers, numbers, "divide", behind, "remainder", period, engine="gpsimd")
        yield TensorScalar(numbers, numbers, "multiply", scale, engine="gpsimd")
        yield Iota(target, (column,), start=column * first)
        if target.dtype == "f32":
            yield TensorScalar(target, target, "add", numbers)
        else:
            yield TensorScalar(target, target, "add", numbers, engine="gpsimd")
    if not exact:
        yield Copy(dst, target)
