"""The timeline of a core that runs a kernel: events with source lines, and meetings of cores."""

import sys
from collections.abc import Sequence
from typing import NamedTuple

from ..core import Core
from ..isa.base import ENGINES, Instruction
from ..memory import Memory, View
from ..timeline import Timeline
from .memory import KernelMemory


class KernelEvent(NamedTuple):
    """One instruction in picoseconds. `line` is file:line of the kernel, `name` the user's."""

    engine: str
    opcode: str
    start: int
    end: int
    queue: str
    line: str
    name: str
    nbytes: int
    flops: int


class KernelTimeline(Timeline):
    """A timeline that can say when regions are ready, and wait for a moment outside the core."""

    def ready(self, engine: str, reads: Sequence[View], writes: Sequence[View]) -> int:
        """When `engine` is free and what it would read and write is ready and visible."""
        number = ENGINES.index(engine)
        time = max(self._free[number], self._floor)
        for view in (*reads, *writes):
            if view.space == "hbm":
                for near in self._extent(view).near:
                    time = max(time, near.writes.done(view), near.reads.done(view))
                continue
            clock = self._clocks.get(view.region) or self._new_clock(view.region)
            for near in clock.near:
                time = max(time, near.visible)
                if view in writes:
                    time = max(time, *near.reads.values(), 0)
        return time

    def hold(
        self, engine: str, start: int, end: int, reads: Sequence[View], writes: Sequence[View]
    ) -> None:
        """`engine` works from `start` to `end`, as agreed with others, on these regions."""
        number = ENGINES.index(engine)
        self.count += 1
        self._busy[number] += end - start
        self._free[number] = max(self._free[number], end)
        used = [self._clock_of(view) for view in reads if view.space != "hbm"]
        changed = [self._clock_of(view) for view in writes if view.space != "hbm"]
        seen = end + self.dma_semaphore_ps if engine == "dma" else end
        self._note(number, used, seen, changed, end, seen - end)
        self._note_hbm(reads, writes, seen)
        self._end = max(self._end, seen)

    def take_dma(self, earliest: int, duration: int) -> tuple[int, int]:
        """(start, end) of `duration` of the DMA engines' idle time, from `earliest` on."""
        return self._dma.fill(earliest, duration)

    def _clock_of(self, view: View):
        return self._clocks.get(view.region) or self._new_clock(view.region)


class KernelCore(Core):
    """A core with a kernel's memories and a timeline that keeps every instruction's line."""

    def __init__(self, chip, data: bool, hbm: Memory | None = None) -> None:
        super().__init__(chip, data, hbm=hbm)
        self.sbuf, self.psum = KernelMemory.sbuf(chip, data), KernelMemory.psum(chip, data)
        self.timeline: KernelTimeline = KernelTimeline.of(chip)  # type: ignore[assignment]
        self.events: list[KernelEvent] = []

    def run(
        self, instruction: Instruction, line: str, name: str, also: tuple[View, ...]
    ) -> tuple[int, int]:
        """Times an executed instruction that also reads `also`; keeps it as an event."""
        engine, queue, nbytes = instruction.engine, "", 0
        reads, writes = (*instruction.reads(), *also), instruction.writes()
        if engine == "dma":
            queue = instruction.queue or ("store" if writes[0].space == "hbm" else "load")
            nbytes = instruction.hbm_bytes
            self.hbm_bytes += nbytes
        elif engine == "scalar" and instruction.table and instruction.table != self.table:
            self.table = instruction.table
            start, end = self.timeline.add("scalar", self.chip.activation_table_load_ps)
            self.events.append(
                KernelEvent("scalar", "LoadTable", start, end, "", line, instruction.table, 0, 0)
            )
        flops = instruction.flops if engine == "tensor" else 0
        self.flops += flops
        work = instruction.work(self.chip) if engine == "dma" else None
        start, end = self.timeline.add(
            engine, instruction.duration(self.chip), reads, writes, "", queue, work
        )
        opcode = type(instruction).__name__
        self.events.append(
            KernelEvent(engine, opcode, start, end, queue, line, name, nbytes, flops)
        )
        return start, end


def kernel_line(own: tuple[str, ...]) -> str:
    """file:line of the innermost frame whose file lies in none of the folders `own`."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(own):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
