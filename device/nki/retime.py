"""The times of a trace: on other numbers of the same chip, and with the order that a kernel asks.

The entries of the cores' traces go through timelines as they did when the kernel ran, and the
cores meet in the same order, so the times are to the picosecond those of a new run.
"""

from collections.abc import Sequence

from ..chip import Chip
from ..errors import BadInput
from ..isa.base import Instruction
from .placement import place
from .timeline import KernelCore
from .trace import Issued, Met, Trace

FIXED = (
    "name", "generation", "cores", "partitions", "sbuf_partition_bytes", "psum_banks",
    "psum_bank_bytes", "sbuf_access_elements_max", "psum_access_elements_max",
    "stationary_free_max", "moving_free_max", "hbm_bytes", "hbm_stacks",
)  # fmt: skip
"""Numbers of a chip that decide what a kernel does and where its tensors lie, not only when."""


def check_same_kernel(old: Chip, new: Chip) -> None:
    """Raises BadInput if a kernel might do something else on the new chip."""
    for name in FIXED:
        if getattr(old, name) != getattr(new, name):
            raise BadInput(
                name, getattr(new, name),
                f"{getattr(old, name)}, as when the kernel ran: run it again on {new.name}",
            )  # fmt: skip


def retime(traces: Sequence[Trace], chip: Chip) -> list[KernelCore]:
    """Cores on which the traces were timed again. Raises BadInput for a trace with gaps."""
    if not all(trace.whole for trace in traces):
        raise BadInput("retime", "a kernel with collectives", "a kernel without; run it again")
    cores = [KernelCore(chip, data=False) for _ in traces]
    runs = [_Run(core, trace) for core, trace in zip(cores, traces, strict=True)]
    while not all(run.done for run in runs):
        meetings = [run.to_meeting() for run in runs]
        if meetings[0] is None:
            continue
        arrivals = [run.core.arrive(met) for run, met in zip(runs, meetings, strict=True) if met]
        for number, (run, met) in enumerate(zip(runs, meetings, strict=True)):
            assert met is not None  # the cores met in the kernel
            run.meet(met, arrivals, number)
    return cores


class _Run:
    """One core's way through its trace."""

    def __init__(self, core: KernelCore, trace: Trace) -> None:
        self.core, self.entries, self.position = core, trace.entries, 0
        core.trace = trace
        self.ends: list[tuple[int, str]] = []
        self.after: dict[int, list[int]] = {}
        for producer, consumer in trace.after:
            self.after.setdefault(consumer, []).append(producer)

    @property
    def done(self) -> bool:
        return self.position == len(self.entries)

    def to_meeting(self) -> Met | None:
        """Times entries up to the next meeting, which it returns, or to the end."""
        while not self.done:
            entry = self.entries[self.position]
            if isinstance(entry, Met):
                return entry
            _, end = self.core.time(entry, self._after(entry.instruction))
            self._ended(end, entry.instruction.engine)
        return None

    def meet(self, met: Met, arrivals: Sequence[int], number: int) -> None:
        """Times a meeting, to which the cores come at `arrivals`."""
        _, end = self.core.settle(met, arrivals, number)
        self._ended(end, met.engine)

    def _ended(self, end: int, engine: str) -> None:
        self.ends.append((end, engine))
        self.position += 1

    def _after(self, instruction: Instruction) -> int:
        """When all that the instruction must follow has ended, as its engine sees it."""
        return max(
            (
                end + self.core.handover(engine, instruction.engine)
                for end, engine in (self.ends[p] for p in self.after.get(self.position, ()))
            ),
            default=0,
        )


def finish(cores: Sequence[KernelCore], schedule: Sequence[tuple]) -> list[KernelCore]:
    """The cores of a kernel that has ended, timed with its tensors' places and its order.

    `schedule` has the pairs of names of `with_schedule`. Raises OutOfMemory.
    """
    again = False
    for core in cores:
        core.finish()
        trace = core.trace
        trace.after += [*_blocks(trace), *_scheduled(trace, schedule)]
        moved = [place(memory, trace.entries) for memory in (core.sbuf, core.psum)]
        again |= any(moved) or bool(trace.after)
    if not again:
        return list(cores)
    return retime([core.trace for core in cores], cores[0].chip)


def _blocks(trace: Trace) -> list[tuple[int, int]]:
    """Each instruction of a no_reorder block follows the one before it."""
    edges, last = [], {}
    for number, entry in enumerate(trace.entries):
        if isinstance(entry, Issued) and entry.block:
            if entry.block in last:
                edges.append((last[entry.block], number))
            last[entry.block] = number
    return edges


def _scheduled(trace: Trace, schedule: Sequence[tuple]) -> list[tuple[int, int]]:
    """Edges of with_schedule's (later, earlier or a list). Raises BadInput if they go backwards."""
    edges = []
    for later, earlier in schedule:
        names = [earlier] if isinstance(earlier, str) else list(earlier)
        for name in (later, *names):
            if not trace.places([name]):
                known = sorted({entry.name for entry in trace.entries if entry.name})
                raise BadInput("with_schedule", name, known)
        for after in trace.places([later]):
            for before in trace.places(names):
                if before > after:
                    raise BadInput(
                        "with_schedule", f"{later} after {earlier}",
                        "an order that the program keeps: values are computed in its order",
                    )  # fmt: skip
                edges.append((before, after))
    return edges
