"""Conditional copies, and moves between the partitions of a quadrant, on Vector."""

from dataclasses import dataclass

import numpy as np

from ..chip import Chip
from ..memory import View
from .base import lane_cycles
from .lanes import Lanes, Scalar, shaped, views
from .numerics import cast
from .vector import one_input_cycles


@dataclass(frozen=True, slots=True, eq=False)
class CopyPredicated(Lanes):
    """dst = src where predicate is not zero (where it is, with `reverse`); dst stays elsewhere.

    src is a tensor of dst's dtype or a number, predicate an unsigned integer; one of them may be
    in PSUM. Cost: 2 N cycles; N if one is in PSUM and one in SBUF.
    """

    dst: View
    src: Scalar  # type: ignore[assignment]  # a tensor or a number
    predicate: View
    reverse: bool = False
    engine = "vector"

    def reads(self) -> tuple[View, ...]:
        return (self.predicate, *views(self.src))

    def check(self, chip: Chip) -> None:
        self.check_place(chip, "dst", self.dst)
        self.check_place(chip, "predicate", self.predicate)
        self.check_alike("predicate", self.predicate, "dst", self.dst)
        if self.predicate.dtype not in ("ui8", "ui16", "ui32", "i1"):
            raise self.illegal(f"predicate is {self.predicate.dtype}; allowed: ui8, ui16, ui32")
        if isinstance(self.src, View):
            self.check_place(chip, "src", self.src)
            self.check_alike("src", self.src, "dst", self.dst)
            self.check_one_psum(src=self.src, predicate=self.predicate)
            if self.src.dtype != self.dst.dtype:
                raise self.illegal(
                    f"src is {self.src.dtype} and dst {self.dst.dtype}; they must be equal"
                )

    def cycles(self, chip: Chip) -> int:
        if isinstance(self.src, View):
            elements = self.dst.free
            if self.src.space == self.predicate.space:
                elements *= chip.vector_two_input_factor
            return lane_cycles(chip, elements, self.src, self.predicate, self.dst)
        return lane_cycles(chip, self.dst.free, self.predicate, self.dst)

    def execute(self) -> None:
        dst = self.dst.array
        chosen = shaped(self.predicate.array, dst)
        chosen = chosen == 0 if self.reverse else chosen != 0
        if isinstance(self.src, View):
            np.copyto(dst, shaped(self.src.array, dst), where=chosen)
        else:
            np.copyto(dst, cast(np.asarray(self.src, np.float32), dst.dtype), where=chosen)


@dataclass(frozen=True, slots=True, eq=False)
class StreamShuffle(Lanes):
    """Inside each quadrant of 32 partitions, dst[i] = src[mask[i]]; 255 leaves dst[i] as it is.

    In place is allowed. Cost: N cycles.
    """

    dst: View
    src: View
    mask: tuple[int, ...]
    engine = "vector"

    def check(self, chip: Chip) -> None:
        dst, src = self.dst, self.src
        self.check_place(chip, "dst", dst)
        self.check_place(chip, "src", src)
        if dst.dtype != src.dtype:
            raise self.illegal(f"src is {src.dtype} and dst {dst.dtype}; they must be equal")
        if dst.free != src.free:
            raise self.illegal(
                f"src has {src.free} elements per partition and dst {dst.free}; must be equal"
            )
        if len(self.mask) != 32:
            raise self.illegal(f"shuffle_mask has {len(self.mask)} elements; it must have 32")
        for index, entry in enumerate(self.mask):
            if not 0 <= entry < 32 and entry != 255:
                raise self.illegal(f"shuffle_mask[{index}] is {entry}; allowed: 0 to 31, or 255")
        active = -(-max(dst.shape[0], src.shape[0]) // 32) * 32
        starts = (0,) if active > 64 else (0, 64) if active == 64 else (0, 32, 64, 96)
        for operand, view in (("src", src), ("dst", dst)):
            if view.partition not in starts:
                raise self.illegal(
                    f"{operand} starts at partition {view.partition}; with {active} active "
                    f"partitions allowed: {', '.join(map(str, starts))}"
                )

    def cycles(self, chip: Chip) -> int:
        return one_input_cycles(self, chip, self.src, self.dst)

    def execute(self) -> None:
        src = self.src.array.reshape(self.src.shape[0], -1).copy()
        dst = self.dst.array
        for row in range(len(dst)):
            quadrant, lane = divmod(row, 32)
            source = self.mask[lane] + 32 * quadrant
            if self.mask[lane] != 255 and source < len(src):
                dst[row] = src[source].reshape(dst.shape[1:])
