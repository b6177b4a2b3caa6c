"""The timeline of a core that runs a kernel: events with source lines, and meetings of cores."""

import sys
from collections.abc import Sequence
from typing import NamedTuple

from ..chip import Chip
from ..core import Core
from ..isa.base import ENGINES, Instruction
from ..isa.dma import transfer_duration
from ..isa.lanes import Memset
from ..memory import Memory, View
from ..timeline import Timeline
from ..units import cycles_ps
from .memory import KernelMemory
from .trace import Collected, Entry, Issued, Met, Trace


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
        return max(self._free[ENGINES.index(engine)], self.settled(reads, writes))

    def settled(self, reads: Sequence[View], writes: Sequence[View]) -> int:
        """When what somebody would read and write is ready and visible."""
        time = self._floor
        for view in (*reads, *writes):
            if view.space == "hbm":
                for near in self._extent(view).near:
                    time = max(time, near.writes.done(view))
                    if view in writes:
                        time = max(time, near.reads.done(view))
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
        self._busy[number] += end - start
        self._free[number] = max(self._free[number], end)
        self._until(number, end, self.dma_semaphore_ps * (engine == "dma"), reads, writes)

    def beside(self, stream: int, end: int, reads: Sequence[View], writes: Sequence[View]) -> None:
        """A CC-core's stream, which is none of the engines, works on these regions until `end`."""
        self._until(len(ENGINES) + stream, end, self.dma_semaphore_ps, reads, writes)

    def _until(
        self, number: int, end: int, semaphore: int, reads: Sequence[View], writes: Sequence[View]
    ) -> None:
        self.count += 1
        used = [self._clock_of(view) for view in reads if view.space != "hbm"]
        changed = [self._clock_of(view) for view in writes if view.space != "hbm"]
        self._note(number, used, end + semaphore, changed, end, semaphore)
        self._note_hbm(reads, writes, end + semaphore)
        self._end = max(self._end, end + semaphore)

    def take_dma(self, earliest: int, duration: int) -> tuple[int, int]:
        """(start, end) of `duration` of the DMA engines' idle time, from `earliest` on."""
        return self._dma.fill(earliest, duration)

    def _clock_of(self, view: View):
        return self._clocks.get(view.region) or self._new_clock(view.region)


class KernelCore(Core):
    """A core with a kernel's memories and a timeline that keeps every instruction's line.

    Its trace has what was timed: `time` and `settle` of the same entries on another KernelCore
    give the same times on a chip with the same numbers.
    """

    def __init__(self, chip: Chip, data: bool, hbm: Memory | None = None) -> None:
        super().__init__(chip, data, hbm=hbm)
        self.sbuf: KernelMemory = KernelMemory.sbuf(chip, data)  # type: ignore[assignment]
        self.psum: KernelMemory = KernelMemory.psum(chip, data)  # type: ignore[assignment]
        self.timeline: KernelTimeline = KernelTimeline.of(chip)  # type: ignore[assignment]
        self.events: list[KernelEvent] = []
        self.trace = Trace()
        self.streams: dict[int, int] = {}  # of CC-cores, until when each works
        self.sbuf.moment = self.psum.moment = lambda: len(self.trace.entries)
        self._timed = self._blocks = 0
        self.stated = False  # whether the next instruction's engine is named by the kernel
        self.block = 0  # the no_reorder block that is open
        self._zeros: list[_Zeros] = []

    def new_block(self) -> int:
        """The number of a new no_reorder block."""
        self._blocks += 1
        return self._blocks

    def run(
        self, instruction: Instruction, line: str, name: str, also: tuple[View, ...]
    ) -> tuple[int, int]:
        """Times an executed instruction that also reads `also`; keeps it in trace and events."""
        reads, writes = (*instruction.reads(), *also), instruction.writes()
        free, self.stated = not self.stated, False
        self.trace.stated += not free
        queue = ""
        if instruction.engine == "dma":
            queue = instruction.queue or ("store" if writes[0].space == "hbm" else "load")
        entry = Issued(instruction, reads, writes, queue, line, name, free, self.block)
        if self._zeros:
            self._touch(entry)
        if free and isinstance(instruction, Memset) and _zeroes_psum(instruction):
            self._zeros.append(_Zeros(entry, []))
            return self.timeline.end, self.timeline.end
        return self._add(entry)

    def _add(self, entry: Issued) -> tuple[int, int]:
        self.trace.entries.append(entry)
        return self.time(entry)

    def _touch(self, entry: Issued) -> None:
        """Zeros that the entry uses are either overwritten by its matmul, or must be written."""
        matmul = entry.instruction.engine == "tensor"
        views = [view for view in (*entry.reads, *entry.writes) if view.space == "psum"]
        if not views:
            return
        for zeros in list(self._zeros):
            (target,) = zeros.entry.writes
            for view in views:
                if not view.overlaps(target):
                    continue
                if view.tensor is not target.tensor:
                    self._retire(zeros)
                    break
                if matmul and view in entry.writes:
                    zeros.overwritten.append(view)
                    if _inside(target, view):
                        self._retire(zeros)
                elif not any(_inside(view, other) for other in zeros.overwritten):
                    zeros.overwritten.clear()
                    self._retire(zeros)
                    break

    def _retire(self, zeros: "_Zeros") -> None:
        self._zeros.remove(zeros)
        if zeros.overwritten:
            self.trace.folded += 1
        else:
            self._add(zeros.entry)

    def finish(self) -> None:
        """The kernel has ended: writes the zeros that nothing overwrote."""
        for zeros in list(self._zeros):
            self._retire(zeros)
        self.trace.whole = self._timed == self.timeline.count

    def handover(self, producer: str, consumer: str) -> int:
        """What passes from the end of an instruction on one engine until another sees it."""
        if producer == "dma":
            return self.chip.dma_semaphore_ps
        return self.chip.semaphore_ps if producer != consumer else 0

    def time(self, entry: Issued, after: int = 0) -> tuple[int, int]:  # type: ignore[override]
        """(start, end) of an instruction, which becomes an event."""
        instruction, engine = entry.instruction, entry.instruction.engine
        nbytes, flops, work = 0, 0, None
        if engine == "dma":
            work, nbytes = instruction.work(self.chip), instruction.hbm_bytes
            self.hbm_bytes += nbytes
        elif engine == "scalar" and instruction.table and instruction.table != self.table:
            self.table = instruction.table
            start, end = self.timeline.add("scalar", self.chip.activation_table_load_ps)
            self._note(entry, "scalar", "LoadTable", start, end, name=instruction.table)
        elif engine == "tensor":
            flops = instruction.flops
            self.flops += flops
        start, end = self.timeline.add(
            engine, instruction.duration(self.chip), entry.reads, entry.writes, "", entry.queue,
            work, after,
        )  # fmt: skip
        opcode = type(instruction).__name__
        self._note(entry, engine, opcode, start, end, entry.name, nbytes, flops)
        return start, end

    def arrive(self, met: Met) -> int:
        """When this core comes to a meeting: what it would read and write there is ready."""
        reads = met.writes if met.opcode == "CoreBarrier" else met.reads
        return self.timeline.ready(met.engine, reads, met.writes)

    def settle(self, met: Met, arrivals: Sequence[int], core: int) -> tuple[int, int]:
        """(start, end) of a meeting to which the cores came at `arrivals`, this one as `core`."""
        chip, timeline = self.chip, self.timeline
        start, end = arrivals[core], max(arrivals) + chip.core_barrier_ps
        if met.opcode == "SendRecv":
            (source,), (target,) = met.reads, met.writes
            duration = transfer_duration(chip, target, source)
            if met.engine == "dma":
                start, end = timeline.take_dma(end + chip.dma_start_ps, duration)
            else:
                begin = cycles_ps(chip.gpsimd_start_cycles, chip.clock_hz["gpsimd"])
                start, end = end, end + begin + duration
        timeline.hold(met.engine, start, end, met.reads, met.writes)
        self._note(met, met.engine, met.opcode, start, end, met.name)
        return start, end

    def come(self, entry: Collected, core: int, cores: int) -> int:
        """When core `core` of `cores` comes to a collective: its operands are ready and the
        CC-core streams of its channels free."""
        free = [self.streams.get(stream, 0) for stream in self._streams(entry, core, cores)]
        return max(self.timeline.settled(entry.reads, entry.writes), *free) + entry.delay

    def land(
        self, entry: Collected, arrival: int, ends: Sequence[int], core: int, cores: int
    ) -> None:
        """A collective to which the rank came at `arrival` ends on its channels."""
        opcode = "".join(word.capitalize() for word in entry.request.name.split("_"))
        streams = self._streams(entry, core, cores)
        for index, (stream, end) in enumerate(zip(streams, ends, strict=True)):
            reads, writes = entry.reads_by_channel[index], entry.writes_by_channel[index]
            self.streams[stream] = end
            self.timeline.beside(stream, end, reads, writes)
            self._timed += 1
            nbytes = sum(view.nbytes for view in reads)
            queue = f"channel {entry.request.channels[index]}"
            self.events.append(
                KernelEvent(
                    "collective", opcode, arrival, end, queue, entry.line, entry.name, nbytes, 0
                )
            )

    def _streams(self, entry: Collected, core: int, cores: int) -> list[int]:
        """Streams of an entry's channels: of all of the logical core's, or of the core's own."""
        each = self.chip.cc_streams_per_core
        if entry.request.core is None:
            return [channel % (each * cores) for channel in entry.request.channels]
        return [core * each + channel % each for channel in entry.request.channels]

    def _note(
        self,
        entry: Entry,
        engine: str,
        opcode: str,
        start: int,
        end: int,
        name: str = "",
        nbytes: int = 0,
        flops: int = 0,
    ) -> None:
        self._timed += 1
        queue = entry.queue if isinstance(entry, Issued) else "sendrecv" * (engine == "dma")
        self.events.append(
            KernelEvent(engine, opcode, start, end, queue, entry.line, name, nbytes, flops)
        )


class _Zeros(NamedTuple):
    """A memset of PSUM to zero that waits to be overwritten, and the parts that were.

    The first matmul of an accumulation group overwrites its bank, so a bank that a kernel sets to
    zero for it needs no instruction (trainium_inferentia2_arch.rst, PSUM accumulation: a buffer of
    zeros, a loop, matmuls that accumulate). A kernel that names the engine keeps its memset.
    """

    entry: Issued
    overwritten: list[View]


def _zeroes_psum(instruction: Memset) -> bool:
    return instruction.dst.space == "psum" and instruction.value == 0


def _inside(view: View, other: View) -> bool:
    _, first, end, low, high = view.region
    _, their_first, their_end, their_low, their_high = other.region
    return their_first <= first and end <= their_end and their_low <= low and high <= their_high


def kernel_line(own: tuple[str, ...]) -> str:
    """file:line of the innermost frame whose file lies in none of the folders `own`."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(own):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
