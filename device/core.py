"""A NeuronCore: its memories and engines; runs instructions."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .chip import Chip
from .isa.base import Instruction
from .memory import Memory
from .timeline import Mark, Timeline


@dataclass(frozen=True, slots=True)
class CoreMark:
    """A moment in a core's program: the timeline's mark and the counters."""

    timeline: Mark
    flops: int
    hbm_bytes: int
    table: str


class Core:
    """A physical NeuronCore.

    With `data` instructions compute values; without, the same instructions take the same time.
    `flops` counts the Tensor engine's operations, `hbm_bytes` what DMA read and wrote in HBM,
    `instructions` what was issued (loads of function tables included).
    """

    def __init__(
        self, chip: Chip, data: bool = True, record: bool = False, hbm: Memory | None = None
    ) -> None:
        self.chip, self.data = chip, data
        self.sbuf, self.psum = Memory.sbuf(chip, data), Memory.psum(chip, data)
        self.hbm = hbm or Memory.hbm(chip.stack_bytes // chip.cores_per_stack, data)
        self.timeline = Timeline.of(chip, record)
        self.table = ""
        self.flops = self.hbm_bytes = 0

    @property
    def instructions(self) -> int:
        """Number of instructions issued."""
        return self.timeline.count

    def issue(self, instruction: Instruction) -> tuple[int, int]:
        """Checks the instruction, computes its values, and returns its (start, end).

        Raises IllegalInstruction for one that the chip would refuse.
        """
        instruction.check(self.chip)
        if self.data:
            with np.errstate(all="ignore"):
                instruction.execute()
        return self.time(instruction)

    def time(self, instruction: Instruction) -> tuple[int, int]:
        """(start, end) of an instruction known to be legal; computes nothing."""
        engine, queue = instruction.engine, ""
        reads, writes = instruction.reads(), instruction.writes()
        if engine == "dma":
            queue = instruction.queue or ("store" if writes[0].space == "hbm" else "load")
            self.hbm_bytes += instruction.hbm_bytes
        elif engine == "tensor":
            self.flops += instruction.flops
        elif engine == "scalar":
            self._load_table(instruction.table)
        return self.timeline.add(
            engine,
            instruction.duration(self.chip),
            reads,
            writes,
            type(instruction).__name__,
            queue,
            instruction.work(self.chip) if engine == "dma" else None,
        )

    def _load_table(self, table: str) -> None:
        if table and table != self.table:
            self.table = table
            self.timeline.add("scalar", self.chip.activation_table_load_ps, name="LoadTable")

    def drain(self) -> int:
        """Waits until everything has ended; returns that time."""
        return self.timeline.drain()

    def watch(self, watching: bool = True) -> None:
        """Whether starts and ends are kept for `repeats`."""
        self.timeline.watching = watching

    def mark(self) -> CoreMark:
        """This moment, for `repeats` and `fast_forward`."""
        return CoreMark(self.timeline.mark(), self.flops, self.hbm_bytes, self.table)

    def repeats(self, marks: Sequence[CoreMark]) -> int | None:
        """The shift in picoseconds by which each period between marks repeats, or None."""
        return self.timeline.repeats([mark.timeline for mark in marks])

    def steady(self, marks: Sequence[CoreMark], seen: int = 3) -> tuple[int, int] | None:
        """(n, shift): the last n marks' work repeats, `seen` times alike; see Timeline.steady."""
        return self.timeline.steady([mark.timeline for mark in marks], seen)

    def fast_forward(self, since: CoreMark, shift: int, times: int) -> None:
        """As if what was issued since the mark were issued `times` more, each `shift` later."""
        self.timeline.fast_forward(since.timeline, shift, times)
        self.flops += times * (self.flops - since.flops)
        self.hbm_bytes += times * (self.hbm_bytes - since.hbm_bytes)
