"""Elementwise instructions as a kernel writes them, with the numerics of the engines.

`vector.py` has their like for compiled StableHLO, with exact integers and equal shapes. Here
operands have one partition count and as many elements per partition, in any free axes; arithmetic
is float32, bitwise operators work on bits, and results round to nearest even and saturate.
Costs are those of `vector.py`: cycles for N elements per partition.
"""

from dataclasses import dataclass

import numpy as np

from ..chip import Chip
from ..dtypes import is_float
from ..memory import View
from .base import HALVES, ON_CHIP, Instruction, lane_cycles
from .numerics import (
    ARITHMETIC,
    BITWISE,
    BITWISE_REDUCTIONS,
    FLOAT32,
    REDUCTIONS,
    UNARY,
    is_bitwise,
    load,
    operate,
    reduce_rows,
    store,
)
from .vector import one_input_cycles, two_input_cycles

Scalar = View | float | int
_INTEGERS32 = frozenset({"i32", "ui32"})


class Lanes(Instruction):
    """Base of the instructions that work on partitions side by side."""

    __slots__ = ()

    def spaces(self, engines: tuple[str, ...]) -> tuple[str, ...]:
        """Memories that the engine reaches. Raises for an engine that lacks the instruction."""
        if self.engine not in engines:
            raise self.illegal(f"engine is {self.engine}; allowed: {', '.join(engines)}")
        return ("sbuf",) if self.engine == "gpsimd" else ON_CHIP

    def check_alike(self, left: str, a: View, right: str, b: View) -> None:
        """Two operands have as many partitions, and as many elements in each."""
        if a.shape == b.shape or (a.shape[0] == b.shape[0] and a.free == b.free):
            return
        raise self.illegal(
            f"{left} has shape {list(a.shape)} and {right} {list(b.shape)}; partitions and "
            "elements per partition must be equal"
        )

    def check_one_psum(self, **operands: View) -> None:
        """At most one of the operands is in PSUM."""
        inside = [name for name, view in operands.items() if view.space == "psum"]
        if len(inside) > 1:
            raise self.illegal(f"{' and '.join(inside)} are in psum; limit: one of them")

    def check_lanes(
        self, chip: Chip, operand: str, value: Scalar | None, like: View, spaces=ON_CHIP
    ) -> None:
        """A view that stands for one value per partition is a [P, 1] column."""
        if isinstance(value, View):
            self.check_place(chip, operand, value, spaces)
            self.check_column(operand, value, like.shape[0])

    def check_float_operand(self, operand: str, value: Scalar | None) -> None:
        """A column of an arithmetic operator is float32."""
        if isinstance(value, View) and value.dtype != "f32":
            raise self.illegal(f"{operand} is {value.dtype}; an arithmetic operator takes f32")

    def check_generation(self, chip: Chip, least: int) -> None:
        """The chip's NeuronCore is of that version or later."""
        if chip.generation < least:
            raise self.illegal(
                f"needs NeuronCore-v{least} or later; {chip.name} has v{chip.generation}"
            )

    def check_dtype(self, operand: str, view: View, *allowed: str) -> None:
        """The operand is of one of the dtypes."""
        if view.dtype not in allowed:
            raise self.illegal(f"{operand} is {view.dtype}; allowed: {', '.join(allowed)}")

    def check_axes(self, operand: str, view: View, limit: int) -> None:
        """The operand has at most that many axes, its partition axis included."""
        if len(view.shape) > limit:
            raise self.illegal(f"{operand} has {len(view.shape)} axes; limit: {limit}")

    def check_operator(self, op: str, *dtypes: str, arithmetic: bool = False) -> None:
        """The operator exists, and takes these dtypes."""
        if op not in ARITHMETIC and op not in BITWISE and op not in UNARY:
            raise self.illegal(f"op is {op}; allowed: {', '.join(OPERATORS)}")
        if not is_bitwise(op):
            return
        if arithmetic:
            raise self.illegal(f"op {op} is bitwise; only arithmetic operators are allowed")
        for dtype in dtypes:
            if is_float(dtype):
                raise self.illegal(f"op {op} is for integers, not for {dtype}")


OPERATORS = (*ARITHMETIC, *BITWISE, *UNARY)


def views(*operands: Scalar | None) -> tuple[View, ...]:
    """Those operands that are views."""
    return tuple(operand for operand in operands if isinstance(operand, View))


def column(value: Scalar, like: np.ndarray) -> np.ndarray | float | int:
    """One value per partition as float32, to broadcast along the free axes; a number as it is."""
    if isinstance(value, View):
        return load(value).reshape(-1, *(1,) * (like.ndim - 1))
    return value


def shaped(values: np.ndarray, like: np.ndarray) -> np.ndarray:
    """Values in the axes of another operand."""
    return values if values.shape == like.shape else values.reshape(like.shape)


def exact_integers(op: str, *operands: View) -> bool:
    """Whether GpSimd computes the operator on these 32-bit integers in native integers."""
    return not is_bitwise(op) and all(view.dtype in _INTEGERS32 for view in operands)


_EXACT = {
    "add": np.add, "subtract": np.subtract, "multiply": np.multiply,
    "maximum": np.maximum, "minimum": np.minimum,
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class TensorTensor(Lanes):
    """dst = a `op` b. Not both inputs in PSUM; power only on GpSimd.

    GpSimd computes 32-bit integers exactly. Cost: 2 N cycles; N if one input is in PSUM or all are
    16-bit floats.
    """

    dst: View
    a: View
    b: View
    op: str
    engine: str = "vector"

    def reads(self) -> tuple[View, ...]:
        return self.a, self.b

    def check(self, chip: Chip) -> None:
        dst, a, b = self.dst, self.a, self.b
        spaces = self.spaces(("vector", "gpsimd"))
        for operand, view in (("dst", dst), ("data1", a), ("data2", b)):
            self.check_place(chip, operand, view, spaces)
        self.check_alike("data1", a, "dst", dst)
        self.check_alike("data2", b, "dst", dst)
        self.check_one_psum(data1=a, data2=b)
        if self.op not in ARITHMETIC:
            self.check_operator(self.op, a.dtype, b.dtype, dst.dtype)
            if self.op in UNARY:
                raise self.illegal(f"op {self.op} takes one operand; a binary operator is needed")
        if self.op == "power" and self.engine != "gpsimd":
            raise self.illegal(f"op power runs on gpsimd, not on {self.engine}")

    def cycles(self, chip: Chip) -> int:
        return two_input_cycles(self, chip, self.a, self.b, self.dst)

    def execute(self) -> None:
        op, dst = self.op, self.dst
        a, b = self.a.array, self.b.array
        function = ARITHMETIC.get(op)
        if function is None:
            store(dst, operate(op, a, shaped(b, a)).astype(dst.array.dtype, copy=False))
            return
        if self.engine == "gpsimd" and exact_integers(op, self.a, self.b, dst):
            self._integers(a, shaped(b, a))
            return
        out = dst.array
        if a.dtype == b.dtype == out.dtype == FLOAT32 and a.shape == b.shape == out.shape:
            if isinstance(function, np.ufunc) and dst.dtype == "f32":
                function(a, b, out=out)
                return
        a, b = load(self.a), load(self.b)
        store(dst, function(a, shaped(b, a)))

    def _integers(self, a: np.ndarray, b: np.ndarray) -> None:
        """Native 32-bit arithmetic; it wraps."""
        wide = a.astype(np.int64), b.astype(np.int64)
        function = _EXACT.get(self.op) or ARITHMETIC[self.op]
        values = function(*wide)
        out = self.dst.array
        out[...] = values.reshape(out.shape).astype(np.int64).astype(out.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class TensorScalar(Lanes):
    """dst = (src `op0` operand0) `op1` operand1; the second is optional, both of one kind.

    An operand is a number or a [P, 1] column, float32 for arithmetic; a unary operator takes none.
    `reverse` swaps the sides. Vector has all operators; Scalar (v3 on) multiply then add, or one
    of them; GpSimd rsqrt. Cost: N cycles, one or two operators alike.
    """

    dst: View
    src: View
    op0: str
    operand0: Scalar | None
    op1: str | None = None
    operand1: Scalar | None = None
    reverse0: bool = False
    reverse1: bool = False
    engine: str = "vector"

    def reads(self) -> tuple[View, ...]:
        return (self.src, *views(self.operand0, self.operand1))

    def check(self, chip: Chip) -> None:
        dst, src = self.dst, self.src
        spaces = self.spaces(("vector", "scalar", "gpsimd"))
        self.check_place(chip, "dst", dst, spaces)
        self.check_place(chip, "data", src, spaces)
        self.check_alike("data", src, "dst", dst)
        self._check_step(chip, "0", self.op0, self.operand0)
        if self.op1 is not None:
            self._check_step(chip, "1", self.op1, self.operand1)
            if is_bitwise(self.op0) != is_bitwise(self.op1):
                raise self.illegal(
                    f"op0 is {self.op0} and op1 {self.op1}; both bitwise or both arithmetic"
                )
        elif self.operand1 is not None:
            raise self.illegal(f"operand1 is {self.operand1} without an op1")
        self._check_engine(chip)

    def _check_step(self, chip: Chip, step: str, op: str, operand: Scalar | None) -> None:
        self.check_operator(op, self.src.dtype, self.dst.dtype)
        if op in UNARY:
            if isinstance(operand, View) or operand:
                raise self.illegal(f"operand{step} is {operand}; op {op} takes none, or 0")
            return
        if operand is None:
            raise self.illegal(f"operand{step} is missing; op {op} takes one")
        self.check_lanes(chip, f"operand{step}", operand, self.src)
        if not is_bitwise(op):
            self.check_float_operand(f"operand{step}", operand)
        elif isinstance(operand, View) and is_float(operand.dtype):
            raise self.illegal(f"operand{step} is {operand.dtype}; op {op} is for integers")

    def _check_engine(self, chip: Chip) -> None:
        ops = (self.op0, self.op1)
        if self.engine == "gpsimd" and (self.op0 != "rsqrt" or self.op1 is not None):
            raise self.illegal(f"engine gpsimd has only rsqrt here, not {_named(*ops)}")
        if self.engine == "scalar":
            if chip.generation < 3:
                raise self.illegal(f"engine scalar has no tensor_scalar on {chip.name}")
            if ops not in (("multiply", "add"), ("multiply", None), ("add", None)):
                raise self.illegal(
                    f"engine scalar has multiply then add, or one of them, not {_named(*ops)}"
                )
        if self.engine == "vector" and "rsqrt" in ops:
            raise self.illegal("op rsqrt runs on gpsimd, not on vector")

    def cycles(self, chip: Chip) -> int:
        cycles = one_input_cycles(self, chip, self.src, self.dst)
        if self.op0 == "rsqrt":
            extra = self.dst.free * (chip.gpsimd_rsqrt_factor - 1)
            return cycles + extra
        return cycles

    def execute(self) -> None:
        dst, src = self.dst, self.src
        bits = is_bitwise(self.op0)
        values = src.array if bits else load(src)
        if not bits and self.op1 is None and self._direct(values):
            return
        values = apply_step(self.op0, values, self.operand0, self.reverse0)
        if self.op1 is not None:
            values = apply_step(self.op1, values, self.operand1, self.reverse1)
        store(dst, values.astype(dst.array.dtype, copy=False) if bits else values)

    def _direct(self, values: np.ndarray) -> bool:
        """Writes float32 to float32 without a copy between, if it can."""
        function, out = ARITHMETIC.get(self.op0), self.dst.array
        if not isinstance(function, np.ufunc) or self.reverse0 or self.dst.dtype != "f32":
            return False
        if values.shape != out.shape or self.operand0 is None:
            return False
        other = column(self.operand0, values)
        function(values, np.float32(other) if isinstance(other, int | float) else other, out=out)
        return True


def _named(*ops: str | None) -> str:
    return " then ".join(op for op in ops if op)


def apply_step(op: str, values: np.ndarray, operand: Scalar | None, reverse: bool) -> np.ndarray:
    """One step of tensor_scalar on float32 values, or on integers for a bitwise operator."""
    if op in UNARY:
        return UNARY[op](values)
    assert operand is not None
    bits = is_bitwise(op)
    if isinstance(operand, View):
        other = operand.array if bits else load(operand)
        other = other.reshape(-1, *(1,) * (values.ndim - 1))
    else:
        other = operand
    if not reverse:
        return operate(op, values, other)
    if not isinstance(other, np.ndarray):
        other = np.asarray(other).astype(values.dtype)
    return operate(op, other, values)


@dataclass(frozen=True, slots=True, eq=False)
class ScalarTensorTensor(Lanes):
    """dst = (src `op0` operand0) `op1` other, arithmetic only. Cost: as TensorTensor."""

    dst: View
    src: View
    op0: str
    operand0: Scalar
    op1: str
    other: View
    reverse0: bool = False
    reverse1: bool = False
    engine = "vector"

    def reads(self) -> tuple[View, ...]:
        return (self.src, self.other, *views(self.operand0))

    def check(self, chip: Chip) -> None:
        named = (("dst", self.dst), ("data", self.src), ("operand1", self.other))
        for operand, view in named:
            self.check_place(chip, operand, view)
            self.check_alike(operand, view, "dst", self.dst)
        self.check_one_psum(data=self.src, operand1=self.other)
        self.check_lanes(chip, "operand0", self.operand0, self.src)
        for op in (self.op0, self.op1):
            self.check_operator(op, arithmetic=True)
        if self.op1 in UNARY:
            raise self.illegal(f"op1 {self.op1} takes one operand; a binary operator is needed")

    def cycles(self, chip: Chip) -> int:
        return two_input_cycles(self, chip, self.src, self.other, self.dst)

    def execute(self) -> None:
        values = apply_step(self.op0, load(self.src), self.operand0, self.reverse0)
        other = shaped(load(self.other), values)
        sides = (other, values) if self.reverse1 else (values, other)
        store(self.dst, operate(self.op1, *sides))


@dataclass(frozen=True, slots=True, eq=False)
class Copy(Lanes):
    """dst = src. One dtype keeps its bits; others go through float32.

    On Vector, GpSimd (SBUF only) or Scalar (not v2). Cost: N cycles.
    """

    dst: View
    src: View
    engine: str = "vector"

    def check(self, chip: Chip) -> None:
        spaces = self.spaces(("vector", "scalar", "gpsimd"))
        self.check_place(chip, "dst", self.dst, spaces)
        self.check_place(chip, "src", self.src, spaces)
        self.check_alike("src", self.src, "dst", self.dst)
        if self.engine == "scalar" and chip.generation < 3:
            raise self.illegal(
                f"engine scalar cannot copy on {chip.name}; use activation with op=nl.copy"
            )

    def cycles(self, chip: Chip) -> int:
        return one_input_cycles(self, chip, self.src, self.dst)

    def execute(self) -> None:
        src, dst = self.src.array, self.dst.array
        if src.dtype == dst.dtype:
            dst[...] = src if src.shape == dst.shape else src.reshape(dst.shape)
        else:
            store(self.dst, load(self.src))


@dataclass(frozen=True, slots=True, eq=False)
class Memset(Lanes):
    """dst = value, on Vector or GpSimd.

    Cost: N cycles; half for zero in 16-bit floats.
    """

    dst: View
    value: float | int
    engine: str = "vector"

    def reads(self) -> tuple[View, ...]:
        return ()

    def check(self, chip: Chip) -> None:
        self.check_place(chip, "dst", self.dst, self.spaces(("vector", "gpsimd")))

    def cycles(self, chip: Chip) -> int:
        elements: float = self.dst.free
        if self.engine == "gpsimd":
            return chip.gpsimd_start_cycles + lane_cycles(chip, elements, self.dst)
        if self.value == 0 and self.dst.dtype in HALVES:
            elements = elements / chip.vector_memset_fast_factor
        return lane_cycles(chip, elements, self.dst)

    def execute(self) -> None:
        out = self.dst.array
        if out.dtype.kind in "iu" and isinstance(self.value, int):
            out[...] = np.asarray(self.value).astype(out.dtype)
        else:
            store(self.dst, np.broadcast_to(np.float32(self.value), out.shape))


@dataclass(frozen=True, slots=True, eq=False)
class Reciprocal(Lanes):
    """dst = 1 / src on Vector. Cost: 8 N cycles."""

    dst: View
    src: View
    engine = "vector"

    def check(self, chip: Chip) -> None:
        self.check_place(chip, "dst", self.dst)
        self.check_place(chip, "data", self.src)
        self.check_alike("data", self.src, "dst", self.dst)

    def cycles(self, chip: Chip) -> int:
        elements = self.src.free * chip.vector_reciprocal_factor
        return lane_cycles(chip, elements, self.src, self.dst)

    def execute(self) -> None:
        store(self.dst, np.reciprocal(load(self.src)))


_REDUCES = (*(op for op in REDUCTIONS if not op.startswith("abs")), *BITWISE_REDUCTIONS)
"""Legal reductions (nki.api.shared.rst, table of operators)."""


@dataclass(frozen=True, slots=True, eq=False)
class TensorReduce(Lanes):
    """dst = src reduced over its last `axes` free axes by `op`, times -1 with `negate`.

    Cost: N cycles of src; half for add, maximum, minimum of 16-bit floats.
    """

    dst: View
    src: View
    op: str
    axes: int
    negate: bool = False
    engine = "vector"

    def check(self, chip: Chip) -> None:
        dst, src = self.dst, self.src
        self.check_place(chip, "dst", dst)
        self.check_place(chip, "data", src)
        if self.op not in _REDUCES:
            raise self.illegal(f"op is {self.op}; allowed: {', '.join(_REDUCES)}")
        if self.op in BITWISE_REDUCTIONS:
            self.check_operator(self.op, src.dtype, dst.dtype)
            if self.negate:
                raise self.illegal(f"negate is for arithmetic operators, not for {self.op}")
        if not 1 <= self.axes < len(src.shape):
            raise self.illegal(
                f"axis covers the last {self.axes} of {len(src.shape)} axes; the partition axis "
                "cannot be reduced, and at least one free axis must be"
            )
        kept = int(np.prod(src.shape[1 : len(src.shape) - self.axes]))
        if dst.shape[0] != src.shape[0] or dst.free != kept:
            raise self.illegal(
                f"dst has shape {list(dst.shape)}; reducing data {list(src.shape)} leaves "
                f"[{src.shape[0]}, {kept}]"
            )

    def cycles(self, chip: Chip) -> int:
        elements: float = self.src.free
        halves = self.src.dtype in HALVES and self.dst.dtype in HALVES
        if halves and self.op in ("add", "maximum", "minimum"):
            elements = elements / chip.vector_reduce_fast_factor
        return lane_cycles(chip, elements, self.src)

    def execute(self) -> None:
        src = self.src.array
        keep = src.ndim - self.axes
        if self.op in BITWISE_REDUCTIONS:
            rows = src.reshape(*src.shape[:keep], -1)
            value = BITWISE_REDUCTIONS[self.op].reduce(rows, axis=-1)
            store(self.dst, value.astype(self.dst.array.dtype))
            return
        value = reduce_rows(self.op, load(self.src), keep)
        store(self.dst, -value if self.negate else value)
