"""The nest of a streamed kernel: loads, lane work and stores, overlapped tile by tile."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ..chip import Chip
from ..isa.base import Instruction
from ..isa.dma import Dma, Transfer, transferring
from ..memory import View
from ..units import cycles_ps
from .kernel import Kernel, Part
from .nest import Context, Loop, once, strided
from .vectorial import LaneKernel

TILE_BYTES = 8192
"""Bytes per partition of a tile."""


@dataclass(frozen=True, slots=True, eq=False)
class StreamCopy(Dma):
    """A DmaCopy that takes time only: the kernel's values come from its last instruction."""

    dst: View
    src: View
    queue: str = ""

    def reads(self) -> tuple[View, ...]:
        return (self.src,)

    def writes(self) -> tuple[View, ...]:
        return (self.dst,)

    @property
    def hbm_bytes(self) -> int:  # type: ignore[override]
        """Bytes read from or written to HBM."""
        return self.src.nbytes

    def check(self, chip: Chip) -> None:
        self.check_same("src", self.src, "dst", self.dst)

    def transfer(self, chip: Chip) -> Transfer:
        return transferring(chip, self.dst, self.src)

    def execute(self) -> None:
        """Nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class LaneWork(Instruction):
    """`count` cycles of a lane engine on a tile; with `kernel`, also the kernel's values."""

    engine: str
    count: int
    src: View
    dst: View
    kernel: Kernel | None = None
    arrays: Mapping[int, np.ndarray] | None = None
    part: Part | None = None

    def reads(self) -> tuple[View, ...]:
        return (self.src,)

    def writes(self) -> tuple[View, ...]:
        return (self.dst,)

    def check(self, chip: Chip) -> None:
        self.check_place(chip, "src", self.src, ("sbuf",))
        self.check_place(chip, "dst", self.dst, ("sbuf",))

    def duration(self, chip: Chip) -> int:
        start = chip.gpsimd_start_cycles if self.engine == "gpsimd" else 0
        cycles = start + max(chip.min_instruction_cycles, self.count)
        return cycles_ps(cycles, chip.clock_hz[self.engine])

    def execute(self) -> None:
        if self.kernel is not None and self.arrays is not None and self.part is not None:
            self.kernel.evaluate(self.arrays, self.part)


def nest(kernel: LaneKernel, context: Context) -> Loop:
    """Tiles of all operands in, work, tiles of all results out."""
    return once(_steps(kernel, context))


def _steps(kernel: LaneKernel, context: Context) -> Iterator[Instruction | Loop]:
    work = kernel.work(context.chip)
    bytes_in = sum(kernel.types[v].nbytes for v in kernel.inputs)
    bytes_out = sum(kernel.types[v].nbytes for v in kernel.outputs)
    count = max(1, -(-max(bytes_in, bytes_out) // (128 * TILE_BYTES)))
    cycles = -(-int(work.elements * work.cycles) // (128 * count))
    widths = [-(-total // (128 * count)) for total in (bytes_in, bytes_out)]
    tiles = [context.rotating(max(w, 1), "ui8", n) for w, n in zip(widths, "io", strict=True)]
    whole = context.core.hbm.adopt(None, (max(widths) * 128 * 2,), "ui8", "stream")

    def body(i: int) -> Iterator[Instruction]:
        load, store = tiles[0][i % 2], tiles[1][i % 2]
        yield StreamCopy(load[:], strided(whole, load.shape, (load.shape[1], 1)))
        last = i == count - 1
        yield LaneWork(
            work.engine, cycles, load[:], store[:],
            kernel if last else None, context.arrays, context.part,
        )  # fmt: skip
        out = strided(whole, store.shape, (store.shape[1], 1), widths[0] * 128)
        yield StreamCopy(out, store[:])

    yield Loop(count, body)
