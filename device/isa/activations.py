"""The Scalar engine's activation as a kernel writes it: scale, function, reduction, in float32."""

from dataclasses import dataclass

import numpy as np

from ..chip import Chip
from ..memory import View
from .base import HALVES, lane_cycles
from .lanes import Lanes, Scalar, column, views
from .numerics import ACTIVATIONS, FLOAT32, Accumulators, load, operate, store

PIPELINES = frozenset(
    {
        ("multiply", "add"), ("multiply", "subtract"), ("multiply", "bypass"),
        ("add", "bypass"), ("subtract", "bypass"), ("bypass", "bypass"),
    }
)  # fmt: skip
"""Operators before the function that activate2 has."""


@dataclass(frozen=True, slots=True, eq=False)
class Activation(Lanes):
    """dst = function((src `op0` scale) `op1` bias), with the rows' reduction in the registers.

    scale and bias are numbers or [P, 1] columns. `command` is a reduce_cmd; `result`, a column,
    reads the registers out. `slope` is prelu's. The form with other operators than multiply and
    add, or other reductions than add, is activate2 (`pipeline`, NeuronCore-v4).
    Cost: N cycles, 64 more to read the result; a change of function table costs its load.
    """

    dst: View
    src: View
    function: str
    scale: Scalar = 1.0
    bias: Scalar = 0.0
    op0: str = "multiply"
    op1: str = "add"
    reverse0: bool = False
    reverse1: bool = False
    slope: Scalar = 0.0
    command: str = "idle"
    reduce_op: str = "add"
    result: View | None = None
    registers: Accumulators | None = None
    pipeline: bool = False
    engine = "scalar"

    @property
    def table(self) -> str:  # type: ignore[override]
        """The function table that must be loaded, or an empty string."""
        return ACTIVATIONS[self.function][1]

    def reads(self) -> tuple[View, ...]:
        return (self.src, *views(self.scale, self.bias, self.slope))

    def writes(self) -> tuple[View, ...]:
        return (self.dst,) if self.result is None else (self.dst, self.result)

    def check(self, chip: Chip) -> None:
        if self.function not in ACTIVATIONS:
            raise self.illegal(f"op is {self.function}; allowed: {', '.join(ACTIVATIONS)}")
        self.check_place(chip, "dst", self.dst)
        self.check_place(chip, "data", self.src)
        self.check_alike("data", self.src, "dst", self.dst)
        names = ("imm0", "imm1") if self.pipeline else ("scale", "bias")
        for name, value in zip(names, (self.scale, self.bias), strict=True):
            self.check_lanes(chip, name, value, self.src)
        if self.pipeline:
            self._check_pipeline(chip)
        else:
            self._check_plain(chip)
        if self.result is not None:
            self.check_lanes(chip, "reduce_res", self.result, self.src)

    def _check_plain(self, chip: Chip) -> None:
        self.check_float_operand("scale", self.scale)
        if not isinstance(self.bias, View) and self.bias != 0 and chip.generation < 3:
            raise self.illegal(f"bias is {self.bias}; on {chip.name} it must be a [P, 1] tile")
        if self.reduce_op != "add":
            raise self.illegal(f"reduce_op is {self.reduce_op}; allowed: add")
        if self.function == "reciprocal" and chip.generation < 3 and views(self.bias):
            raise self.illegal(f"op reciprocal takes no bias on {chip.name}")
        self._check_command(("idle", "reset", "reduce", "reset_reduce"))

    def _check_pipeline(self, chip: Chip) -> None:
        self.check_generation(chip, 4)
        if (self.op0, self.op1) not in PIPELINES:
            allowed = ", ".join(f"({a}, {b})" for a, b in sorted(PIPELINES))
            raise self.illegal(f"(op0, op1) is ({self.op0}, {self.op1}); allowed: {allowed}")
        ops = ("add", "maximum", "minimum", "abs_max", "abs_min")
        if self.reduce_op not in ops:
            raise self.illegal(f"reduce_op is {self.reduce_op}; allowed: {', '.join(ops)}")
        self._check_command(("idle", "reset", "reduce", "reset_reduce"))
        for reverse, op in ((self.reverse0, self.op0), (self.reverse1, self.op1)):
            if reverse and op == "bypass":
                raise self.illegal("reverse needs an operator, not bypass")
        if len({view.dtype for view in views(self.scale, self.bias)}) > 1:
            raise self.illegal("imm0 and imm1 are tensors of two dtypes; one is needed")

    def _check_command(self, commands: tuple[str, ...]) -> None:
        if self.command not in commands:
            raise self.illegal(f"reduce_cmd is {self.command}; allowed: {', '.join(commands)}")

    def cycles(self, chip: Chip) -> int:
        elements: float = self.dst.free
        if self.function == "copy" and self.src.dtype in HALVES and self.dst.dtype in HALVES:
            elements = elements / chip.scalar_fast_factor
        cycles = lane_cycles(chip, elements, self.src, self.dst)
        return cycles if self.result is None else cycles + chip.activation_reduce_cycles

    def execute(self) -> None:
        values = load(self.src)
        steps = ((self.op0, self.scale, self.reverse0), (self.op1, self.bias, self.reverse1))
        for op, operand, reverse in steps:
            if op != "bypass" and (reverse or not _neutral(op, operand)):
                other = np.asarray(column(operand, values), np.float32)
                values = operate(op, *((other, values) if reverse else (values, other)))
        values = self._function(values)
        store(self.dst, values)
        self._reduce(values)

    def _function(self, values: np.ndarray) -> np.ndarray:
        if self.function == "prelu":
            slope = np.asarray(column(self.slope, values), np.float32)
            return np.where(values > 0, values, values * slope)
        return np.asarray(ACTIVATIONS[self.function][0](values), FLOAT32)

    def _reduce(self, values: np.ndarray) -> None:
        if self.command == "idle" and self.result is None:
            return
        registers = self.registers or Accumulators()
        lanes = slice(self.src.partition, self.src.partition + self.src.shape[0])
        registers.accumulate(lanes, self.command, self.reduce_op, values)
        if self.result is not None:
            store(self.result, registers.values[lanes].copy())


def _neutral(op: str, operand: Scalar) -> bool:
    return not isinstance(operand, View) and operand == (1 if op == "multiply" else 0)
