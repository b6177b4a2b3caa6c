"""What a run of a kernel gives: outputs, time, engines, memory, source lines."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ..chip import Chip
from ..errors import BadInput
from ..isa.base import ENGINES
from .greedy import greedy
from .retime import check_same_kernel, retime
from .timeline import KernelCore, KernelEvent
from .trace import Trace


@dataclass(frozen=True)
class EngineUse:
    """An engine of one core, or the sum over cores: picoseconds of work, instructions."""

    name: str
    busy: int
    instructions: int


@dataclass(frozen=True)
class MemoryUse:
    """The most bytes that tensors held at once: per partition on chip, the largest of the cores.

    Tensors are held as long as Python holds them; where that is more than there is, from their
    first use to their last (see `placement`).
    """

    peak_sbuf: int
    peak_psum: int
    peak_hbm: int
    sbuf: int  # what there is
    psum: int


@dataclass(frozen=True)
class LineUse:
    """What one source line of a kernel cost: picoseconds of its engines, instructions."""

    line: str
    busy: int
    instructions: int
    engines: tuple[str, ...]


@dataclass(frozen=True)
class CoreRun:
    """One core's run. `end` is when its last instruction is done, in picoseconds."""

    end: int
    busy: Mapping[str, int]
    events: Sequence[KernelEvent]
    flops: int
    hbm_bytes: int
    peak_sbuf: int
    peak_psum: int
    trace: Trace = field(default_factory=Trace, repr=False, compare=False)

    def again(self, core: KernelCore) -> "CoreRun":
        """The same run timed again."""
        return replace(
            self, end=core.timeline.end, busy=core.timeline.busy, events=tuple(core.events)
        )

    @classmethod
    def of(cls, core: KernelCore, memories: KernelCore) -> "CoreRun":
        """The run of a core, with the memories of the one that ran the kernel."""
        return cls(
            end=core.timeline.end, busy=core.timeline.busy, events=tuple(core.events),
            flops=core.flops, hbm_bytes=core.hbm_bytes,
            peak_sbuf=memories.sbuf.peak, peak_psum=memories.psum.peak, trace=core.trace,
        )  # fmt: skip


@dataclass(frozen=True)
class SimulationResult:
    """Outputs and modelled time of a kernel.

    `time` in picoseconds is the launch plus the slowest core. `findings` has by source line the
    hazards (never-written reads, races), where the run was asked to report them.
    """

    outputs: Any
    chip: Chip
    cores: tuple[CoreRun, ...]
    peak_hbm: int
    findings: Mapping[str, str] = field(default_factory=dict)
    hooks: tuple[str, ...] = ()
    seed: int = 0

    @property
    def output(self) -> Any:
        """The one output. Raises BadInput if there are several."""
        if isinstance(self.outputs, tuple) and len(self.outputs) != 1:
            raise BadInput("output", len(self.outputs), "a kernel with one output")
        return self.outputs[0] if isinstance(self.outputs, tuple) else self.outputs

    @property
    def time(self) -> int:
        """Picoseconds from launch to the last result."""
        return self.chip.kernel_launch_ps + max(core.end for core in self.cores)

    def engine(self, name: str) -> EngineUse:
        """An engine's work, all cores together: tensor vector scalar gpsimd sync dma."""
        if name not in ENGINES:
            raise BadInput("engine", name, ENGINES)
        count = sum(event.engine == name for core in self.cores for event in core.events)
        return EngineUse(name, sum(core.busy[name] for core in self.cores), count)

    @property
    def memory(self) -> MemoryUse:
        """Peak use of the memories."""
        return MemoryUse(
            max(core.peak_sbuf for core in self.cores),
            max(core.peak_psum for core in self.cores),
            self.peak_hbm,
            self.chip.sbuf_partition_bytes,
            self.chip.psum_banks * self.chip.psum_bank_bytes,
        )

    @property
    def events(self) -> tuple[KernelEvent, ...]:
        """Every instruction, core after core, in program order."""
        return tuple(event for core in self.cores for event in core.events)

    @property
    def instructions(self) -> int:
        """Number of instructions."""
        return sum(len(core.events) for core in self.cores)

    @property
    def flops(self) -> int:
        """Operations of the Tensor engines."""
        return sum(core.flops for core in self.cores)

    @property
    def hbm_bytes(self) -> int:
        """Bytes that DMA read from and wrote to HBM."""
        return sum(core.hbm_bytes for core in self.cores)

    def mfu(self, dtype: str = "bf16") -> float:
        """Tensor engine operations over what the cores' peak gives in `time`."""
        seconds = self.time / 1e12
        return self.flops / (seconds * self.chip.peak(dtype) * len(self.cores))

    @cached_property
    def bracket(self) -> tuple[int, int]:
        """(dependency-greedy, program order): times in picoseconds, launch included.

        The hardware's compiler may reorder what the kernel leaves open. The first is of the order
        of `greedy` or, as list scheduling can end later, of the program's if that is shorter.
        Raises BadInput for a kernel with collectives.
        """
        cores = greedy([core.trace for core in self.cores], self.chip)
        end = max(core.timeline.end for core in cores)
        return min(self.chip.kernel_launch_ps + end, self.time), self.time

    @property
    def whole(self) -> bool:
        """Whether the traces tell all: `bracket` and `retimed` need it. Collectives are no part."""
        return all(core.trace.whole for core in self.cores)

    @property
    def folded(self) -> int:
        """Memsets of PSUM to zero that took no instruction, as a matmul overwrote them."""
        return sum(core.trace.folded for core in self.cores)

    def retimed(self, chip: Chip) -> "SimulationResult":
        """This run on other numbers of its chip (see `overlay`), without running the kernel.

        Raises BadInput if the kernel could do something else there: it must be run again then.
        """
        check_same_kernel(self.chip, chip)
        cores = retime([core.trace for core in self.cores], chip)
        pairs = zip(cores, self.cores, strict=True)
        return replace(self, chip=chip, cores=tuple(run.again(core) for core, run in pairs))

    @property
    def bounds(self) -> tuple[int, int]:
        """(overlapped, serial): the busiest engine of a core, and the sum of a core's engines."""
        overlapped = max(max(core.busy.values()) for core in self.cores)
        return overlapped, max(sum(core.busy.values()) for core in self.cores)

    def lines(self) -> list[LineUse]:
        """Source lines, those whose instructions keep engines longest first."""
        busy: dict[str, int] = defaultdict(int)
        count: dict[str, int] = defaultdict(int)
        engines: dict[str, set[str]] = defaultdict(set)
        for event in self.events:
            busy[event.line] += event.end - event.start
            count[event.line] += 1
            engines[event.line].add(event.engine)
        order = sorted(busy, key=lambda line: (-busy[line], line))
        return [
            LineUse(line, busy[line], count[line], tuple(sorted(engines[line]))) for line in order
        ]
