"""Instructions of the Vector engine that also reduce into its accumulator registers.

`command` is a `reduce_cmd`: idle, reset, reduce, reset_reduce, load_reduce. Reading the registers
out (`result`, a [P, 1] column) is a second, short instruction: MIN_II cycles more.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..chip import Chip
from ..memory import View
from .base import lane_cycles
from .lanes import UNARY, Lanes, Scalar, apply_step, column, shaped, views
from .numerics import (
    ARITHMETIC,
    COMPARISONS,
    REDUCTIONS,
    Accumulators,
    load,
    store,
)
from .scan import running
from .vector import one_input_cycles

FP32_MIN = float(np.finfo(np.float32).min)
POSITIONS_MAX = 2**24
_EXPONENTIAL_DTYPES = ("f8E4M3", "f8E5M2", "f16", "bf16", "f32", "i8", "i16", "i32", "ui8", "ui16")
_TRUTH = {op: ARITHMETIC[op] for op in COMPARISONS}


class Accumulating(Lanes):
    """Base: fields `dst`, `result`, `command`, `registers`, `start` are the subclass's."""

    __slots__ = ()
    engine = "vector"
    dst: View
    result: View | None
    command: str
    registers: Accumulators | None

    def writes(self) -> tuple[View, ...]:
        return (self.dst,) if self.result is None else (self.dst, self.result)

    def check_accumulation(
        self, chip: Chip, op: str, ops: tuple[str, ...], commands: tuple[str, ...]
    ) -> None:
        """The reduction is one of the instruction's, and its result a column."""
        if op not in ops:
            raise self.illegal(f"reduce_op is {op}; allowed: {', '.join(ops)}")
        if self.command not in commands:
            raise self.illegal(f"reduce_cmd is {self.command}; allowed: {', '.join(commands)}")
        if self.result is not None:
            self.check_lanes(chip, "reduce_res", self.result, self.dst)

    def read_out(self, chip: Chip) -> int:
        """Cycles of reading the registers."""
        return 0 if self.result is None else chip.min_instruction_cycles

    def accumulate(
        self, like: View, op: str, values: np.ndarray, start: Any = None, negate: bool = False
    ) -> None:
        """Runs the command on the lanes of `like` and writes the registers out."""
        registers = self.registers or Accumulators()
        lanes = slice(like.partition, like.partition + like.shape[0])
        if isinstance(start, View):
            start = load(start).reshape(-1)
        registers.accumulate(lanes, self.command, op, values, start)
        if self.result is not None:
            out = registers.values[lanes]
            store(self.result, -out if negate else out.copy())


@dataclass(frozen=True, slots=True, eq=False)
class TensorScalarReduce(Accumulating):
    """dst = src `op` operand, and its rows reduced by add, multiply, maximum or minimum.

    Cost: N cycles, MIN_II more to read the result.
    """

    dst: View
    src: View
    op: str
    operand: Scalar | None
    reduce_op: str
    result: View | None = None
    reverse: bool = False
    command: str = "reset_reduce"
    start: Scalar | None = None
    negate: bool = False
    registers: Accumulators | None = None

    def reads(self) -> tuple[View, ...]:
        return (self.src, *views(self.operand, self.start))

    def check(self, chip: Chip) -> None:
        self.check_place(chip, "dst", self.dst)
        self.check_place(chip, "data", self.src)
        self.check_alike("data", self.src, "dst", self.dst)
        self.check_operator(self.op, arithmetic=True)
        if self.reverse:
            raise self.illegal("reverse0 is not supported yet by the hardware's compiler")
        if self.op not in UNARY:
            if self.operand is None:
                raise self.illegal(f"operand0 is missing; op {self.op} takes one")
            self.check_lanes(chip, "operand0", self.operand, self.src)
            self.check_float_operand("operand0", self.operand)
        commands = ("reset_reduce", "reduce", "load_reduce")
        self.check_accumulation(
            chip, self.reduce_op, ("add", "multiply", "maximum", "minimum"), commands
        )
        if (self.start is not None) != (self.command == "load_reduce"):
            raise self.illegal(
                f"reduce_init is {self.start} with reduce_cmd {self.command}; it goes with "
                "load_reduce, and only there"
            )

    def cycles(self, chip: Chip) -> int:
        return one_input_cycles(self, chip, self.src, self.dst) + self.read_out(chip)

    def execute(self) -> None:
        values = apply_step(self.op, load(self.src), self.operand, self.reverse)
        store(self.dst, values)
        self.accumulate(self.src, self.reduce_op, values, self.start, self.negate)


@dataclass(frozen=True, slots=True, eq=False)
class RangeSelect(Accumulating):
    """dst = src where both comparisons of (start + position) with a bound hold, else FP32_MIN.

    Bounds are float32 columns; positions count along the free axes. The rows' maximum goes into
    the registers. NeuronCore-v3 and later. Cost: N cycles, MIN_II more to read the result.
    """

    dst: View
    src: View
    compare0: str
    compare1: str
    bound0: View
    bound1: View
    result: View | None = None
    command: str = "reset_reduce"
    reduce_op: str = "maximum"
    start: int = 0
    otherwise: float = FP32_MIN
    registers: Accumulators | None = None

    def reads(self) -> tuple[View, ...]:
        return self.src, self.bound0, self.bound1

    def check(self, chip: Chip) -> None:
        self.check_generation(chip, 3)
        self.check_place(chip, "dst", self.dst)
        self.check_place(chip, "on_true_tile", self.src)
        self.check_alike("on_true_tile", self.src, "dst", self.dst)
        if not self.src.dtype.startswith(("f", "bf")):
            raise self.illegal(f"on_true_tile is {self.src.dtype}; it must be a float")
        for name, op in (("comp_op0", self.compare0), ("comp_op1", self.compare1)):
            if op not in _RANGE_OPS:
                raise self.illegal(f"{name} is {op}; allowed: {', '.join(_RANGE_OPS)}")
        for name, bound in (("bound0", self.bound0), ("bound1", self.bound1)):
            self.check_lanes(chip, name, bound, self.src)
            self.check_float_operand(name, bound)
        last = self.start + self.src.free - 1
        if self.start < 0 or last >= POSITIONS_MAX:
            raise self.illegal(
                f"positions are {self.start} to {last}; limit: 0 to {POSITIONS_MAX - 1}, where "
                "float32 counts"
            )
        if np.float32(self.otherwise) != np.float32(FP32_MIN):
            raise self.illegal(f"on_false_value is {self.otherwise}; it must be {FP32_MIN}")
        commands = ("idle", "reset", "reduce", "reset_reduce", "load_reduce")
        self.check_accumulation(chip, self.reduce_op, ("maximum",), commands)

    def cycles(self, chip: Chip) -> int:
        return lane_cycles(chip, self.src.free, self.src, self.dst) + self.read_out(chip)

    def execute(self) -> None:
        src = load(self.src)
        positions = np.arange(self.start, self.start + self.src.free, dtype=np.float32)
        bound0, bound1 = (load(b).reshape(-1, 1) for b in (self.bound0, self.bound1))
        inside = (_TRUTH[self.compare0](positions, bound0) != 0) & (
            _TRUTH[self.compare1](positions, bound1) != 0
        )
        values = np.where(inside.reshape(src.shape), src, np.float32(self.otherwise))
        store(self.dst, values)
        self.accumulate(self.src, self.reduce_op, values)


_RANGE_OPS = ("equal", "less", "less_equal", "greater", "greater_equal")
_PREDICATES = ("ui8", "i8", "ui16", "i16", "i1")


@dataclass(frozen=True, slots=True, eq=False)
class SelectReduce(Accumulating):
    """dst = on_true where predicate is not zero, else on_false (a number or column).

    With a command the rows' maximum goes into the registers. Cost (assumed, as tensor_tensor):
    2 N cycles, N if one of the inputs is in PSUM; MIN_II more to read the result.
    """

    dst: View
    predicate: View
    on_true: View
    on_false: Scalar
    result: View | None = None
    command: str = "idle"
    reduce_op: str = "maximum"
    reverse: bool = False
    registers: Accumulators | None = None

    def reads(self) -> tuple[View, ...]:
        return (self.predicate, self.on_true, *views(self.on_false))

    def check(self, chip: Chip) -> None:
        self.check_place(chip, "dst", self.dst)
        for name, view in (("predicate", self.predicate), ("on_true", self.on_true)):
            self.check_place(chip, name, view)
            self.check_alike(name, view, "dst", self.dst)
        self.check_one_psum(on_true=self.on_true, predicate=self.predicate)
        if self.predicate.dtype not in _PREDICATES:
            raise self.illegal(f"predicate is {self.predicate.dtype}; allowed: ui8, i8, ui16, i16")
        if self.on_true.dtype in ("i32", "ui32"):
            raise self.illegal(f"on_true is {self.on_true.dtype}; no 32-bit integers")
        self.check_lanes(chip, "on_false", self.on_false, self.on_true)
        commands = ("idle", "reset_reduce", "reduce")
        self.check_accumulation(chip, self.reduce_op, ("maximum",), commands)
        if self.result is not None and not self.result.dtype.startswith(("f", "bf")):
            raise self.illegal(f"reduce_res is {self.result.dtype}; it must be a float")

    def cycles(self, chip: Chip) -> int:
        elements = self.dst.free
        if self.on_true.space == self.predicate.space:
            elements *= chip.vector_two_input_factor
        cycles = lane_cycles(chip, elements, self.on_true, self.predicate, self.dst)
        return cycles + self.read_out(chip)

    def execute(self) -> None:
        on_true = load(self.on_true)
        chosen = shaped(self.predicate.array, on_true) != 0
        on_false = column(self.on_false, on_true)
        values = np.where(chosen != self.reverse, on_true, np.float32(on_false))
        store(self.dst, values)
        self.accumulate(self.on_true, self.reduce_op, values)


@dataclass(frozen=True, slots=True, eq=False)
class TensorScalarCumulative(Accumulating):
    """reg = reg `op1` (src[i] `op0` operand); dst[i] = reg, along each row.

    The register starts from op1's identity (reset_reduce), from `start` (load_reduce) or as it is
    (reduce). Cost (assumed, as tensor_tensor_scan): 2 N cycles.
    """

    dst: View
    src: View
    op0: str
    op1: str
    operand: Scalar
    start: Scalar | None = None
    command: str = "reset_reduce"
    registers: Accumulators | None = None
    result = None

    def reads(self) -> tuple[View, ...]:
        return (self.src, *views(self.operand, self.start))

    def check(self, chip: Chip) -> None:
        self.check_place(chip, "dst", self.dst)
        self.check_place(chip, "src", self.src)
        self.check_alike("src", self.src, "dst", self.dst)
        self.check_operator(self.op0, arithmetic=True)
        ops = ("add", "subtract", "multiply", "maximum", "minimum")
        self.check_accumulation(chip, self.op1, ops, ("reset_reduce", "reduce", "load_reduce"))
        for name, view in (("src", self.src), ("dst", self.dst)):
            if view.dtype in ("i32", "ui32"):
                raise self.illegal(f"{name} is {view.dtype}; no 32-bit integers")
        for name, value in (("imm0", self.operand), ("imm1", self.start)):
            self.check_lanes(chip, name, value, self.src)
            self.check_float_operand(name, value)
        if self.command == "load_reduce" and self.start is None:
            raise self.illegal("imm1 is missing; reduce_cmd load_reduce takes one")

    def cycles(self, chip: Chip) -> int:
        elements = self.src.free * chip.vector_two_input_factor
        return lane_cycles(chip, elements, self.src, self.dst)

    def execute(self) -> None:
        rows = apply_step(self.op0, load(self.src), self.operand, False)
        rows = rows.reshape(len(rows), -1)
        registers = self.registers or Accumulators()
        lanes = slice(self.src.partition, self.src.partition + len(rows))
        first = registers.values[lanes]
        if self.command == "reset_reduce":
            first[...] = REDUCTIONS[self.op1][1]
        elif self.command == "load_reduce":
            start = self.start
            first[...] = load(start).reshape(-1) if isinstance(start, View) else start
        out = running(self.op1, first, rows)
        first[...] = out[:, -1]
        store(self.dst, out)


@dataclass(frozen=True, slots=True, eq=False)
class Exponential(Accumulating):
    """dst = exp(src - largest) on Vector, with the rows' sums. NeuronCore-v4.

    Cost: N / 4 cycles (four times the Scalar engine), MIN_II more to read the result.
    """

    dst: View
    src: View
    largest: Scalar = 0.0
    result: View | None = None
    command: str = "idle"
    start: Scalar = 0.0
    registers: Accumulators | None = None

    def reads(self) -> tuple[View, ...]:
        return (self.src, *views(self.largest, self.start))

    def check(self, chip: Chip) -> None:
        self.check_generation(chip, 4)
        self.check_place(chip, "dst", self.dst)
        self.check_place(chip, "src", self.src)
        self.check_alike("src", self.src, "dst", self.dst)
        self.check_dtype("dst", self.dst, *_EXPONENTIAL_DTYPES)
        self.check_dtype("src", self.src, *_EXPONENTIAL_DTYPES, "ui32")
        for name, view in (("dst", self.dst), ("src", self.src)):
            self.check_axes(name, view, 4)
        if self.result is not None:
            self.check_dtype("reduce_res", self.result, *_EXPONENTIAL_DTYPES[:5])
        for name, value in (("max_value", self.largest), ("reduce_init", self.start)):
            self.check_lanes(chip, name, value, self.src)
            self.check_float_operand(name, value)
        commands = ("idle", "reset_reduce", "reduce", "load_reduce")
        self.check_accumulation(chip, "add", ("add",), commands)
        if self.command != "load_reduce" and (isinstance(self.start, View) or self.start != 0):
            raise self.illegal(
                f"reduce_init is {self.start} with reduce_cmd {self.command}; it goes with "
                "load_reduce"
            )

    def cycles(self, chip: Chip) -> int:
        elements = self.src.free / chip.vector_exponential_factor
        return lane_cycles(chip, elements, self.src, self.dst) + self.read_out(chip)

    def execute(self) -> None:
        src = load(self.src)
        values = np.exp(src - np.float32(column(self.largest, src)))
        store(self.dst, values)
        self.accumulate(self.src, "add", values, self.start)
