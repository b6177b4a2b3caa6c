"""The Vector engine: elementwise, reductions along free axes, copies.

Some of these also run on Scalar or GpSimd; `engine` says where. Costs are cycles per element of a
partition: one tensor input N, two inputs 2 N, less in the fast modes of 16-bit floats.
"""

from dataclasses import dataclass

import numpy as np

from ..arithmetic import apply, compute_dtype, convert, reduce
from ..chip import Chip
from ..dtypes import is_float
from ..memory import ITEMSIZE, View
from .base import (
    COMPARISONS,
    HALVES,
    ON_CHIP,
    Instruction,
    combine,
    is_integer_arithmetic,
    lane_cycles,
)

BINARY = frozenset(
    {
        "add", "subtract", "multiply", "divide", "remainder", "power", "maximum", "minimum",
        "and", "or", "xor", "shift_left", "shift_right_logical", "shift_right_arithmetic",
        *COMPARISONS,
    }
)  # fmt: skip
"""Operators of TensorTensor, TensorScalar and ScalarTensorTensor."""

BITWISE = frozenset(
    {"and", "or", "xor", "shift_left", "shift_right_logical", "shift_right_arithmetic"}
)
"""Those of BINARY that are for integers and booleans only."""

REDUCTIONS = frozenset({"add", "multiply", "maximum", "minimum", "and", "or"})
_UFUNCS = {
    "add": np.add, "subtract": np.subtract, "multiply": np.multiply, "divide": np.divide,
    "maximum": np.maximum, "minimum": np.minimum,
}  # fmt: skip
_FLOAT32 = np.dtype(np.float32)
_ELEMENTWISE = ("vector", "gpsimd")

Scalar = View | float | int


@dataclass(frozen=True, slots=True, eq=False)
class TensorTensor(Instruction):
    """dst = a `op` b, elementwise, all of one shape; computed in float32, integers exactly.

    Not both inputs in PSUM. Cost: 2 N cycles; N if one input is in PSUM or all are 16-bit floats.
    """

    dst: View
    a: View
    b: View
    op: str
    engine: str = "vector"

    def reads(self) -> tuple[View, ...]:
        return self.a, self.b

    def check(self, chip: Chip) -> None:
        spaces = places(self, _ELEMENTWISE)
        check_op(self, self.op, self.a.dtype, self.b.dtype)
        for operand, view in (("dst", self.dst), ("a", self.a), ("b", self.b)):
            self.check_place(chip, operand, view, spaces)
        self.check_same("a", self.a, "dst", self.dst)
        self.check_same("b", self.b, "dst", self.dst)
        if self.a.space == self.b.space == "psum":
            raise self.illegal("a and b are both in psum; limit: one of them")
        check_exact(self, self.op, self.a.dtype, self.b.dtype, self.dst.dtype)
        if self.op == "power" and self.engine != "gpsimd":
            raise self.illegal(f"op power runs on gpsimd, not on {self.engine}")

    def cycles(self, chip: Chip) -> int:
        return two_input_cycles(self, chip, self.a, self.b, self.dst)

    def execute(self) -> None:
        a, b, dst = self.a.array, self.b.array, self.dst.array
        ufunc = _UFUNCS.get(self.op)
        if ufunc is not None and a.dtype == b.dtype == dst.dtype == _FLOAT32:
            ufunc(a, b, out=dst)
        else:
            dst[...] = combine(self.op, a, b, dst.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class TensorScalar(Instruction):
    """dst = (src `op0` operand0) `op1` operand1, in float32 between; the second is optional.

    An operand is a number or a [P, 1] view: one value per partition. `reverse` swaps the sides of
    its operator. Cost: N cycles, one or two operators alike.
    """

    dst: View
    src: View
    op0: str
    operand0: Scalar
    op1: str | None = None
    operand1: Scalar | None = None
    reverse0: bool = False
    reverse1: bool = False
    engine: str = "vector"

    def reads(self) -> tuple[View, ...]:
        return (self.src, *views_of(self.operand0, self.operand1))

    def check(self, chip: Chip) -> None:
        spaces = places(self, ("vector", "scalar", "gpsimd"))
        self.check_place(chip, "dst", self.dst, spaces)
        self.check_place(chip, "src", self.src, spaces)
        self.check_same("src", self.src, "dst", self.dst)
        check_op(self, self.op0, self.src.dtype)
        check_exact(self, self.op0, self.src.dtype, self.dst.dtype)
        check_scalar(self, chip, "operand0", self.operand0, spaces)
        if (self.op1 is None) != (self.operand1 is None):
            raise self.illegal(f"op1 is {self.op1} and operand1 {self.operand1}: both or neither")
        if self.op1 is not None and self.operand1 is not None:
            check_op(self, self.op1, self.src.dtype)
            check_exact(self, self.op1, self.src.dtype, self.dst.dtype)
            check_scalar(self, chip, "operand1", self.operand1, spaces)

    def cycles(self, chip: Chip) -> int:
        return one_input_cycles(self, chip, self.src, self.dst)

    def execute(self) -> None:
        dst = self.dst.array
        second = self.op1 is None or (self.op1 in _UFUNCS and not isinstance(self.operand1, View))
        if second and _in_place(self.op0, self.src, self.operand0, self.reverse0, dst):
            if self.op1 is not None:
                sides = (self.operand1, dst) if self.reverse1 else (dst, self.operand1)
                _UFUNCS[self.op1](*sides, out=dst)
            return
        src = _in_floats(self.src, self.dst, self.op0, self.operand0, self.operand1)
        middle = dst.dtype if self.op1 is None else compute_dtype(src.dtype)
        value = _one_sided(self.op0, src, self.operand0, self.reverse0, middle)
        if self.op1 is not None and self.operand1 is not None:
            value = _one_sided(self.op1, value, self.operand1, self.reverse1, dst.dtype)
        dst[...] = value


@dataclass(frozen=True, slots=True, eq=False)
class ScalarTensorTensor(Instruction):
    """dst = (src `op0` operand0) `op1` other: a number or column first, then a tensor.

    Cost: as TensorTensor.
    """

    dst: View
    src: View
    op0: str
    operand0: Scalar
    op1: str
    other: View
    reverse0: bool = False
    reverse1: bool = False
    engine: str = "vector"

    def reads(self) -> tuple[View, ...]:
        return (self.src, self.other, *views_of(self.operand0))

    def check(self, chip: Chip) -> None:
        spaces = places(self, _ELEMENTWISE)
        for operand, view in (("dst", self.dst), ("src", self.src), ("other", self.other)):
            self.check_place(chip, operand, view, spaces)
            self.check_same(operand, view, "dst", self.dst)
        if self.src.space == self.other.space == "psum":
            raise self.illegal("src and other are both in psum; limit: one of them")
        for op in (self.op0, self.op1):
            check_op(self, op, self.src.dtype)
            check_exact(self, op, self.src.dtype, self.dst.dtype)
        check_scalar(self, chip, "operand0", self.operand0, spaces)

    def cycles(self, chip: Chip) -> int:
        return two_input_cycles(self, chip, self.src, self.other, self.dst)

    def execute(self) -> None:
        dst = self.dst.array
        src = _in_floats(self.src, self.dst, self.op0, self.operand0)
        value = _one_sided(self.op0, src, self.operand0, self.reverse0, compute_dtype(src.dtype))
        left, right = value, self.other.array
        if self.reverse1:
            left, right = right, left
        dst[...] = combine(self.op1, left, right, dst.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Copy(Instruction):
    """dst = src, cast to dst's dtype, on Vector, Scalar (not v2) or GpSimd. Cost: N cycles."""

    dst: View
    src: View
    engine: str = "vector"

    def check(self, chip: Chip) -> None:
        spaces = places(self, ("vector", "scalar", "gpsimd"))
        self.check_place(chip, "dst", self.dst, spaces)
        self.check_place(chip, "src", self.src, spaces)
        self.check_same("src", self.src, "dst", self.dst)
        if self.engine == "scalar" and chip.generation < 3:
            raise self.illegal(
                f"engine scalar cannot copy on {chip.name}; use Activation with function copy"
            )

    def cycles(self, chip: Chip) -> int:
        return one_input_cycles(self, chip, self.src, self.dst)

    def execute(self) -> None:
        dst = self.dst.array
        dst[...] = convert(self.src.array, dst.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Memset(Instruction):
    """dst = value everywhere. Cost: N cycles; half for zero in 16-bit floats."""

    dst: View
    value: float | int
    engine: str = "vector"

    def reads(self) -> tuple[View, ...]:
        return ()

    def check(self, chip: Chip) -> None:
        self.check_place(chip, "dst", self.dst, places(self, _ELEMENTWISE))

    def cycles(self, chip: Chip) -> int:
        elements: float = self.dst.free
        if self.engine == "gpsimd":
            return chip.gpsimd_start_cycles + lane_cycles(chip, elements, self.dst)
        if self.value == 0 and self.dst.dtype in HALVES:
            elements = elements / chip.vector_memset_fast_factor
        return lane_cycles(chip, elements, self.dst)

    def execute(self) -> None:
        self.dst.array[...] = self.value


@dataclass(frozen=True, slots=True, eq=False)
class Select(Instruction):
    """dst = on_true where mask is not zero, else on_false; each a view or a number.

    Cost: N cycles for the mask and for each tensor.
    """

    dst: View
    mask: View
    on_true: Scalar
    on_false: Scalar
    engine: str = "vector"

    def reads(self) -> tuple[View, ...]:
        return (self.mask, *views_of(self.on_true, self.on_false))

    def check(self, chip: Chip) -> None:
        spaces = places(self, _ELEMENTWISE)
        named = [("dst", self.dst), ("mask", self.mask)]
        choices = (("on_true", self.on_true), ("on_false", self.on_false))
        named += [(name, value) for name, value in choices if isinstance(value, View)]
        for operand, view in named:
            self.check_place(chip, operand, view, spaces)
            self.check_same(operand, view, "dst", self.dst)
        inputs = [name for name, view in named[1:] if view.space == "psum"]
        if len(inputs) > 1:
            raise self.illegal(f"{' and '.join(inputs)} are in psum; limit: one of them")

    def cycles(self, chip: Chip) -> int:
        inputs = self.reads()
        cycles = lane_cycles(chip, self.dst.free * len(inputs), self.dst, *inputs)
        return cycles + (chip.gpsimd_start_cycles if self.engine == "gpsimd" else 0)

    def execute(self) -> None:
        dst = self.dst.array
        on_true, on_false = (
            convert(value.array, dst.dtype) if isinstance(value, View) else value
            for value in (self.on_true, self.on_false)
        )
        dst[...] = np.where(self.mask.array != 0, on_true, on_false).astype(dst.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class TensorReduce(Instruction):
    """dst[P, ...] = src reduced along its last `axes` free axes (all by default), by `op`.

    Floats accumulate in float32. `negate` changes the sign of the result. dst holds one value for
    each remaining element. Cost: N cycles of src; half for add, maximum, minimum of 16-bit floats.
    """

    dst: View
    src: View
    op: str
    axes: int = 0
    negate: bool = False
    engine = "vector"

    def _kept(self) -> tuple[int, ...]:
        return self.src.shape[: len(self.src.shape) - self.axes] if self.axes else ()

    def check(self, chip: Chip) -> None:
        self.check_place(chip, "dst", self.dst)
        self.check_place(chip, "src", self.src)
        if self.op not in REDUCTIONS:
            raise self.illegal(f"op is {self.op}; allowed: {', '.join(sorted(REDUCTIONS))}")
        if not 0 <= self.axes < len(self.src.shape):
            raise self.illegal(f"axes is {self.axes}; src has {len(self.src.shape) - 1} free axes")
        kept = int(np.prod(self._kept()[1:]))
        if self.dst.shape[0] != self.src.shape[0] or self.dst.free != kept:
            raise self.illegal(
                f"dst has shape {list(self.dst.shape)}; reducing src {list(self.src.shape)} leaves "
                f"[{self.src.shape[0]}, {kept}]"
            )

    def cycles(self, chip: Chip) -> int:
        elements: float = self.src.free
        halves = self.src.dtype in HALVES and self.dst.dtype in HALVES
        if halves and self.op in ("add", "maximum", "minimum"):
            elements = elements / chip.vector_reduce_fast_factor
        return lane_cycles(chip, elements, self.src)

    def execute(self) -> None:
        src, dst = self.src.array, self.dst.array
        count = self.axes or src.ndim - 1
        axis = tuple(range(src.ndim - count, src.ndim))
        value = reduce(
            self.op, src, axis, out=compute_dtype(src.dtype) if self.negate else dst.dtype
        )
        if self.negate:
            value = apply("negate", value, out=dst.dtype)
        dst[...] = np.asarray(value).reshape(dst.shape)


@dataclass(frozen=True, slots=True, eq=False)
class VectorTranspose(Instruction):
    """dst[F, P] = src[P, F].T for P and F up to 32, in SBUF or PSUM. Cost: F cycles."""

    dst: View
    src: View
    engine = "vector"

    def check(self, chip: Chip) -> None:
        self.check_place(chip, "dst", self.dst)
        self.check_place(chip, "src", self.src)
        if len(self.src.shape) != 2 or self.dst.shape != self.src.shape[::-1]:
            raise self.illegal(
                f"dst has shape {list(self.dst.shape)}; src {list(self.src.shape)} transposed is "
                f"{list(self.src.shape[::-1])}"
            )
        if max(self.src.shape) > 32:
            raise self.illegal(f"src has shape {list(self.src.shape)}; limit: [32, 32]")
        if self.src.dtype != self.dst.dtype:
            raise self.illegal(f"src is {self.src.dtype} and dst {self.dst.dtype}; must be equal")

    def cycles(self, chip: Chip) -> int:
        return lane_cycles(chip, self.src.free, self.src)

    def execute(self) -> None:
        self.dst.array[...] = self.src.array.T


# ---- rules and costs that several share ----------------------------------------------------


def places(instruction: Instruction, engines: tuple[str, ...]) -> tuple[str, ...]:
    """Memories that the instruction's engine reaches. Raises for an engine that lacks it."""
    if instruction.engine not in engines:
        raise instruction.illegal(f"engine is {instruction.engine}; allowed: {', '.join(engines)}")
    return ("sbuf",) if instruction.engine == "gpsimd" else ON_CHIP


def check_op(instruction: Instruction, op: str, *dtypes: str) -> None:
    """The operator exists, for these dtypes."""
    if op not in BINARY:
        raise instruction.illegal(f"op is {op}; allowed: {', '.join(sorted(BINARY))}")
    if op in BITWISE:
        for dtype in dtypes:
            if is_float(dtype):
                raise instruction.illegal(f"op {op} is for integers, not for {dtype}")


def check_exact(instruction: Instruction, op: str, *dtypes: str) -> None:
    """32-bit integer arithmetic is GpSimd's: the other engines compute it in float32."""
    if instruction.engine != "gpsimd" and is_integer_arithmetic(op, *dtypes):
        raise instruction.illegal(
            f"op {op} of {dtypes[0]} is exact only on gpsimd; {instruction.engine} computes in f32"
        )


def check_scalar(
    instruction: Instruction, chip: Chip, operand: str, value: Scalar, spaces: tuple[str, ...]
) -> None:
    """A view that stands for one value per partition is a column."""
    if isinstance(value, View):
        instruction.check_place(chip, operand, value, spaces)
        instruction.check_column(operand, value, instruction.writes()[0].shape[0])


def views_of(*operands: Scalar | None) -> tuple[View, ...]:
    """Those operands that are views."""
    return tuple(operand for operand in operands if isinstance(operand, View))


def column(value: Scalar, like: np.ndarray) -> np.ndarray | float | int:
    """A [P, 1] view as an array that broadcasts along the free axes of `like`."""
    if isinstance(value, View):
        return value.array.reshape(-1, *(1,) * (like.ndim - 1))
    return value


def one_input_cycles(instruction: Instruction, chip: Chip, src: View, dst: View) -> int:
    """N cycles, fewer in the fast modes: 16-bit floats on Vector (v3) and Scalar (v4)."""
    elements: float = dst.free
    halves = src.dtype in HALVES and dst.dtype in HALVES
    if instruction.engine == "gpsimd":
        return chip.gpsimd_start_cycles + lane_cycles(chip, elements, src, dst)
    if halves and instruction.engine == "scalar":
        elements = elements / chip.scalar_fast_factor
    elif halves:
        in_sbuf = src.space == dst.space == "sbuf"
        unit = src.strides[-1] == dst.strides[-1] == ITEMSIZE[src.dtype]
        fast = chip.vector_copy_fast_factor if in_sbuf and unit else None
        elements = elements / (fast or chip.vector_copy_half_fast_factor)
    return lane_cycles(chip, elements, src, dst)


def two_input_cycles(instruction: Instruction, chip: Chip, a: View, b: View, dst: View) -> int:
    """2 N cycles; N with one input in PSUM; half of 2 N if all are 16-bit floats in SBUF."""
    elements: float = dst.free * chip.vector_two_input_factor
    if instruction.engine == "gpsimd":
        return chip.gpsimd_start_cycles + lane_cycles(chip, elements, a, b, dst)
    if a.space != b.space:
        elements = dst.free
    elif a.dtype in HALVES and b.dtype in HALVES and dst.dtype in HALVES:
        elements = elements / chip.vector_tensor_tensor_fast_factor
    return lane_cycles(chip, elements, a, b, dst)


def _in_place(op: str, src: View, operand: Scalar, reverse: bool, dst: np.ndarray) -> bool:
    """dst = src `op` operand written directly, if everything is float32. False if it is not."""
    ufunc, array = _UFUNCS.get(op), src.array
    if ufunc is None or array.dtype != _FLOAT32 or dst.dtype != _FLOAT32:
        return False
    other = column(operand, array)
    if isinstance(other, np.ndarray) and other.dtype != _FLOAT32:
        return False
    left, right = (other, array) if reverse else (array, other)
    ufunc(left, right, out=dst)
    return True


def _in_floats(src: View, dst: View, op: str, *operands: Scalar | None) -> np.ndarray:
    """The source's values, integers as float32 if the result or an operand is a float.

    Booleans stay as they are only for the bitwise operators.
    """
    array = src.array
    if is_float(src.dtype):
        return array
    floats = is_float(dst.dtype) or (src.dtype == "i1" and op not in ("and", "or", "xor"))
    for operand in operands:
        dtype = operand.dtype if isinstance(operand, View) else None
        floats |= isinstance(operand, float) if dtype is None else is_float(dtype)
    return convert(array, _FLOAT32) if floats else array


def _one_sided(
    op: str, array: np.ndarray, operand: Scalar, reverse: bool, out: np.dtype
) -> np.ndarray:
    other = column(operand, array)
    if not reverse:
        return combine(op, array, other, out)
    if not isinstance(other, np.ndarray):
        other = np.asarray(other, array.dtype if array.dtype.kind in "iu" else np.float32)
    return combine(op, other, array, out)
