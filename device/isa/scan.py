"""Recurrences along the rows of a tile, on Vector."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..chip import Chip
from ..memory import View
from .base import lane_cycles
from .lanes import UNARY, Lanes, Scalar, views
from .numerics import REDUCTIONS, load, operate, store


def running(op: str, first: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """[P, N] values of reg = row[i] `op` reg along each row, from `first`."""
    if op in ("add", "multiply", "maximum", "minimum"):
        joined = np.concatenate([first[:, None], rows], axis=1)
        return REDUCTIONS[op][0].accumulate(joined, axis=1, dtype=np.float32)[:, 1:]
    columns = np.ascontiguousarray(rows.T)
    return recurrence(lambda reg, i: operate(op, columns[i], reg), first, len(columns))


def recurrence(
    step: Callable[[np.ndarray, int], np.ndarray], first: np.ndarray, count: int
) -> np.ndarray:
    """[P, count] values of reg = step(reg, i)."""
    out = np.empty((count, len(first)), np.float32)
    reg = first
    for i in range(count):
        out[i] = step(reg, i)
        reg = out[i]
    return out.T


@dataclass(frozen=True, slots=True, eq=False)
class TensorTensorScan(Lanes):
    """dst[i] = (a[i] `op0` dst[i - 1]) `op1` b[i] along each row, from `initial`; float32.

    `initial` is a number or column; `reverse` swaps the sides. Cost: 2 N cycles.
    """

    dst: View
    a: View
    b: View
    initial: Scalar
    op0: str
    op1: str
    reverse0: bool = False
    reverse1: bool = False
    engine = "vector"

    def reads(self) -> tuple[View, ...]:
        return (self.a, self.b, *views(self.initial))

    def check(self, chip: Chip) -> None:
        for operand, view in (("dst", self.dst), ("data0", self.a), ("data1", self.b)):
            self.check_place(chip, operand, view)
            self.check_alike(operand, view, "dst", self.dst)
        self.check_one_psum(data0=self.a, data1=self.b)
        self.check_lanes(chip, "initial", self.initial, self.a)
        for name, op in (("op0", self.op0), ("op1", self.op1)):
            self.check_operator(op, arithmetic=True)
            if op in UNARY:
                raise self.illegal(f"{name} is {op}; a binary operator is needed")

    def cycles(self, chip: Chip) -> int:
        elements = self.dst.free * chip.vector_two_input_factor
        return lane_cycles(chip, elements, self.a, self.b, self.dst)

    def execute(self) -> None:
        rows = self.a.shape[0]
        a, b = (np.ascontiguousarray(load(v).reshape(rows, -1).T) for v in (self.a, self.b))
        first = np.empty(rows, np.float32)
        initial = self.initial
        first[...] = load(initial).reshape(-1) if isinstance(initial, View) else initial

        def step(reg: np.ndarray, i: int) -> np.ndarray:
            sides = (reg, a[i]) if self.reverse0 else (a[i], reg)
            value = operate(self.op0, *sides)
            sides = (b[i], value) if self.reverse1 else (value, b[i])
            return operate(self.op1, *sides)

        store(self.dst, recurrence(step, first, len(a)))
