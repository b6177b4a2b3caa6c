"""What an instruction is, and the rules that all of them share.

An instruction is a frozen value: operands are views, the rest plain data. It knows what it reads
and writes, whether it is legal on a chip, what it costs, and what it computes; nothing else in the
simulator prices or computes it a second time.
"""

import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from ..arithmetic import apply, convert
from ..chip import Chip
from ..dtypes import is_float
from ..errors import IllegalInstruction
from ..memory import ITEMSIZE, View
from ..units import PS_PER_S

ENGINES = ("tensor", "vector", "scalar", "gpsimd", "sync", "dma")
"""The engines of a core. `dma` is its 16 DMA engines together."""

HALVES = frozenset({"bf16", "f16"})
"""Floats that the Vector engine's fast modes are made for."""

COMPARISONS = {
    "equal": "EQ", "not_equal": "NE", "less": "LT", "less_equal": "LE",
    "greater": "GT", "greater_equal": "GE",
}  # fmt: skip
"""Comparisons as operators of instructions: the result is 1 or 0 in the destination's dtype."""

ON_CHIP = ("sbuf", "psum")
FREE_AXES_MAX = 4  # of an access pattern (trainium_inferentia2_arch.rst)


class Instruction:
    """Base of all instructions. `engine` is one of ENGINES.

    Most have one source and one destination; others say what they read and write.
    """

    __slots__ = ()
    dst: View
    src: View
    engine: str
    table: ClassVar[str] = ""  # activation function table that must be loaded
    queue: str = ""  # DMA queue
    flops: int = 0
    hbm_bytes: int = 0

    def reads(self) -> tuple[View, ...]:
        """The views whose values are used."""
        return (self.src,)

    def writes(self) -> tuple[View, ...]:
        """The views that get new values."""
        return (self.dst,)

    def used(self) -> tuple[View, ...]:
        """The views of which every element is read: fewer than `reads` where an index picks."""
        return self.reads()

    def check(self, chip: Chip) -> None:
        """Raises IllegalInstruction, naming operand, limit and value."""
        raise NotImplementedError

    def cycles(self, chip: Chip) -> int:
        """Cycles of the engine's clock until it can start its next instruction."""
        raise NotImplementedError

    def duration(self, chip: Chip) -> int:
        """Picoseconds until the engine can start its next instruction."""
        return -(-self.cycles(chip) * PS_PER_S // chip.clock_hz[self.engine])

    def work(self, chip: Chip) -> int:
        """Picoseconds that it takes of its engine; less than `duration` for some DMA."""
        return self.duration(chip)

    def execute(self) -> None:
        """Computes the values of `writes()` from those of `reads()`."""
        raise NotImplementedError

    def illegal(self, message: str) -> IllegalInstruction:
        """The error for a broken rule."""
        return IllegalInstruction(f"{type(self).__name__}: {message}")

    def check_place(
        self, chip: Chip, operand: str, view: View, spaces: Sequence[str] = ON_CHIP
    ) -> None:
        """The operand lies in one of the spaces, at a partition and of a size that exist."""
        if view.space not in spaces:
            raise self.illegal(
                f"{operand} must be in {' or '.join(spaces)} for the {self.engine} engine, "
                f"not in {view.space}"
            )
        if view.legal_on is chip:  # found before: views are used again and again
            return
        if view.partition and not starts_legally(view):
            raise self.illegal(
                f"{operand} has {view.shape[0]} partitions and starts at {view.partition}; "
                f"allowed starts: {legal_starts(view.shape[0])}"
            )
        limit = (
            chip.psum_access_elements_max if view.space == "psum" else chip.sbuf_access_elements_max
        )
        if view.free > limit and _distinct(view) > limit:
            raise self.illegal(
                f"{operand} has {view.free} elements per partition; limit in {view.space}: {limit}"
            )
        if ITEMSIZE[view.dtype] > 4:
            raise self.illegal(f"{operand} is {view.dtype}; engines have no 64-bit types")
        if len(view.shape) > 1 + FREE_AXES_MAX:
            raise self.illegal(
                f"{operand} has {len(view.shape) - 1} free axes; limit: {FREE_AXES_MAX}"
            )
        view.legal_on = chip

    def check_same(self, left: str, a: View, right: str, b: View) -> None:
        """Two operands have one shape."""
        if a.shape != b.shape:
            raise self.illegal(
                f"{left} has shape {list(a.shape)} and {right} {list(b.shape)}; they must be equal"
            )

    def check_column(self, operand: str, view: View, partitions: int) -> None:
        """The operand is one float or integer for each partition."""
        if view.shape[0] != partitions or view.free != 1:
            raise self.illegal(
                f"{operand} has shape {list(view.shape)}; it must be [{partitions}, 1]"
            )


def _distinct(view: View) -> int:
    """Elements per partition, those that a broadcast axis repeats counted once."""
    pairs = zip(view.shape[1:], view.strides[1:], strict=True)
    return math.prod(extent for extent, step in pairs if step)


def legal_starts(partitions: int) -> str:
    """Partitions at which an operand of that many may start."""
    if partitions > 64:
        return "0"
    return "0, 64" if partitions > 32 else "0, 32, 64, 96"


def starts_legally(view: View) -> bool:
    """More than 64 partitions start at 0, more than 32 at 0 or 64, others at multiples of 32."""
    count, start = view.shape[0], view.partition
    return start % 32 == 0 if count <= 32 else start == 0 or (count <= 64 and start == 64)


def is_wide(chip: Chip, *views: View) -> bool:
    """Whether some operand's neighbours lie so far apart that the memory gives half its rate."""
    limit = chip.strided_access_bytes
    for view in views:
        shape, strides = view.shape, view.strides
        axis = len(shape) - 1
        while axis > 1 and shape[axis] == 1:
            axis -= 1
        if strides[axis] > limit and shape[axis] != 1 and axis:
            return True
    return False


def lane_cycles(chip: Chip, elements: float, *views: View) -> int:
    """Cycles of a lane engine for `elements` per partition, rate effects of strides included."""
    cycles = -int(-elements // 1)
    if is_wide(chip, *views):
        cycles *= chip.strided_access_factor
    return cycles if cycles > chip.min_instruction_cycles else chip.min_instruction_cycles


def combine(op: str, a: np.ndarray, b: np.ndarray | float | int, out: np.dtype) -> np.ndarray:
    """Elementwise `op` of two operands, comparisons included, in dtype `out`."""
    direction = COMPARISONS.get(op)
    if direction is None:
        return apply(op, a, b, out=out)
    return convert(apply("compare", a, b, direction=direction), out)


def is_integer_arithmetic(op: str, *dtypes: str) -> bool:
    """Whether `op` on these dtypes needs exact 32-bit integer arithmetic."""
    return op in _ARITHMETIC and all(not is_float(d) and ITEMSIZE[d] == 4 for d in dtypes)


def engine_for(op: str, *dtypes: str) -> str:
    """The engine for an elementwise operator: Vector, or GpSimd for what Vector cannot do.

    Vector computes arithmetic in float32, so 32-bit integers are GpSimd's; so is power.
    """
    return "gpsimd" if op == "power" or is_integer_arithmetic(op, *dtypes) else "vector"


_ARITHMETIC = frozenset({"add", "subtract", "multiply", "divide", "remainder", "power"})
