"""The GpSimd engine: eight processors for what the lane engines cannot do.

It reaches SBUF only. Costs start with a fixed number of cycles; where no formula is published
(partition reduce and broadcast, gather, scatter, custom functions) the docstring states the
assumption.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..arithmetic import NAMES, apply, convert, reduce
from ..chip import Chip
from ..memory import View
from .base import Instruction, lane_cycles
from .vector import REDUCTIONS

_SBUF = ("sbuf",)
_GATHER_GROUP = 512  # elements per instruction group (nc_n_gather docstring)


class GpSimd(Instruction):
    """Base of the instructions that only GpSimd has."""

    __slots__ = ()
    engine = "gpsimd"

    def check_sbuf(self, chip: Chip, **operands: View) -> None:
        """Every operand is a legal one in SBUF."""
        for operand, view in operands.items():
            self.check_place(chip, operand, view, _SBUF)


@dataclass(frozen=True, slots=True, eq=False)
class Iota(GpSimd):
    """dst[p, i, j, ...] = start + channel * p + steps[0] * i + steps[1] * j + ...

    `steps` has one entry for each free axis. Cost: 150 + N cycles.
    """

    dst: View
    steps: tuple[int, ...]
    start: int = 0
    channel: int = 0

    def reads(self) -> tuple[View, ...]:
        return ()

    def check(self, chip: Chip) -> None:
        self.check_sbuf(chip, dst=self.dst)
        if len(self.steps) != len(self.dst.shape) - 1:
            raise self.illegal(
                f"steps has {len(self.steps)} entries; dst has {len(self.dst.shape) - 1} free axes"
            )

    def cycles(self, chip: Chip) -> int:
        return chip.gpsimd_start_cycles + lane_cycles(chip, self.dst.free, self.dst)

    def execute(self) -> None:
        dst = self.dst.array
        value = np.full((1,) * dst.ndim, self.start, np.int64)
        for axis, step in enumerate((self.channel, *self.steps)):
            extent = np.arange(dst.shape[axis], dtype=np.int64) * step
            value = value + extent.reshape(-1, *(1,) * (dst.ndim - axis - 1))
        dst[...] = value.astype(np.int32) if dst.dtype.kind in "iu" else convert(value, dst.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class PartitionReduce(GpSimd):
    """dst[1, ...] = src[P, ...] reduced over partitions by `op`; floats accumulate in float32.

    Cost (assumed): 150 + N log2 P cycles, a tree over the partitions of N elements each.
    """

    dst: View
    src: View
    op: str

    def check(self, chip: Chip) -> None:
        self.check_sbuf(chip, dst=self.dst, src=self.src)
        if self.op not in REDUCTIONS:
            raise self.illegal(f"op is {self.op}; allowed: {', '.join(sorted(REDUCTIONS))}")
        if self.dst.shape != (1, *self.src.shape[1:]):
            raise self.illegal(
                f"dst has shape {list(self.dst.shape)}; reducing src {list(self.src.shape)} leaves "
                f"{[1, *self.src.shape[1:]]}"
            )

    def cycles(self, chip: Chip) -> int:
        levels = max((self.src.shape[0] - 1).bit_length(), 1)
        return chip.gpsimd_start_cycles + lane_cycles(chip, self.src.free * levels, self.src)

    def execute(self) -> None:
        dst = self.dst.array
        dst[...] = reduce(self.op, self.src.array, 0, out=dst.dtype, keepdims=True)


@dataclass(frozen=True, slots=True, eq=False)
class PartitionBroadcast(GpSimd):
    """dst[p, ...] = src[0, ...] for every partition p. Cost (assumed): 150 + N cycles."""

    dst: View
    src: View

    def check(self, chip: Chip) -> None:
        self.check_sbuf(chip, dst=self.dst, src=self.src)
        if self.src.shape != (1, *self.dst.shape[1:]):
            raise self.illegal(
                f"src has shape {list(self.src.shape)}; dst {list(self.dst.shape)} needs "
                f"{[1, *self.dst.shape[1:]]}"
            )

    def cycles(self, chip: Chip) -> int:
        return chip.gpsimd_start_cycles + lane_cycles(chip, self.dst.free, self.dst)

    def execute(self) -> None:
        dst = self.dst.array
        dst[...] = convert(self.src.array, dst.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Gather(GpSimd):
    """dst[p, i] = src[p, index[p, i]], positions along the one free axis. Inside bounds only.

    Cost (assumed): 150 cycles for each group of 512 elements, and N cycles.
    """

    dst: View
    src: View
    index: View

    def reads(self) -> tuple[View, ...]:
        return self.src, self.index

    def check(self, chip: Chip) -> None:
        self.check_sbuf(chip, dst=self.dst, src=self.src, index=self.index)
        _check_positions(self, self.index, "dst", self.dst, self.src)

    def cycles(self, chip: Chip) -> int:
        return _grouped_cycles(chip, self.dst)

    def execute(self) -> None:
        dst, src = self.dst.array, self.src.array
        index = _positions(self, self.index, src.shape[1])
        dst[...] = convert(np.take_along_axis(src, index, axis=1), dst.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Scatter(GpSimd):
    """dst[p, index[p, i]] = src[p, i], in order of i; others stay. Inside bounds only.

    With `accumulate` the values add. Cost (assumed): as Gather.
    """

    dst: View
    src: View
    index: View
    accumulate: bool = False

    def reads(self) -> tuple[View, ...]:
        return (self.src, self.index, self.dst) if self.accumulate else (self.src, self.index)

    def check(self, chip: Chip) -> None:
        self.check_sbuf(chip, dst=self.dst, src=self.src, index=self.index)
        _check_positions(self, self.index, "src", self.src, self.dst)

    def cycles(self, chip: Chip) -> int:
        return _grouped_cycles(chip, self.src)

    def execute(self) -> None:
        dst, src = self.dst.array, self.src.array
        index = _positions(self, self.index, dst.shape[1])
        rows = np.arange(len(dst))
        for i in range(src.shape[1]):  # in order: the last of equal positions stays
            where = rows, index[:, i]
            value = convert(src[:, i], dst.dtype)
            dst[where] = (
                apply("add", dst[where], value, out=dst.dtype) if self.accumulate else value
            )


@dataclass(frozen=True, slots=True, eq=False)
class Custom(GpSimd):
    """dst = function(*operands, **attributes): any elementwise function of `device.arithmetic`.

    GpSimd's processors run general code; 32-bit integers are exact. Operands have dst's shape.
    Cost (assumed): 150 + N cycles for each operand.
    """

    dst: View
    operands: tuple[View, ...]
    function: str
    attributes: dict[str, Any] = field(default_factory=dict)

    def reads(self) -> tuple[View, ...]:
        return self.operands

    def check(self, chip: Chip) -> None:
        self.check_sbuf(chip, dst=self.dst)
        if self.function not in NAMES:
            raise self.illegal(f"function is {self.function}; allowed: {', '.join(sorted(NAMES))}")
        for number, view in enumerate(self.operands):
            self.check_place(chip, f"operand {number}", view, _SBUF)
            self.check_same(f"operand {number}", view, "dst", self.dst)

    def cycles(self, chip: Chip) -> int:
        elements = self.dst.free * max(len(self.operands), 1)
        return chip.gpsimd_start_cycles + lane_cycles(chip, elements, self.dst, *self.operands)

    def execute(self) -> None:
        dst = self.dst.array
        values = [view.array for view in self.operands]
        dst[...] = apply(self.function, *values, out=dst.dtype, **self.attributes)


def _grouped_cycles(chip: Chip, moved: View) -> int:
    groups = -(-moved.free // _GATHER_GROUP)
    return groups * chip.gpsimd_start_cycles + lane_cycles(chip, moved.free, moved)


def _check_positions(
    instruction: Instruction, index: View, name: str, moved: View, table: View
) -> None:
    instruction.check_same("index", index, name, moved)
    if len(index.shape) != 2 or len(table.shape) != 2 or table.shape[0] != index.shape[0]:
        raise instruction.illegal(
            f"index {list(index.shape)} and the indexed tensor {list(table.shape)} must have two "
            "axes and equal partitions"
        )
    if index.dtype not in ("i32", "ui32", "i16", "ui16"):
        raise instruction.illegal(f"index is {index.dtype}; allowed: i32, ui32, i16, ui16")


def _positions(instruction: Instruction, index: View, count: int) -> np.ndarray:
    positions = index.array.astype(np.int64)
    wrong = positions[(positions < 0) | (positions >= count)]
    if wrong.size:
        raise instruction.illegal(f"index is {wrong.flat[0]}; limit: 0 to {count - 1}")
    return positions
