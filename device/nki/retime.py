"""The times of a trace: on other numbers of the same chip, and with the order that a kernel asks.

The entries of the cores' traces go through timelines as they did when the kernel ran, and the
cores meet in the same order, so the times are to the picosecond those of a new run.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence

from ..chip import Chip
from ..errors import BadInput, OutOfMemory
from ..isa.base import Instruction
from .interconnect import Landed, Offer, Stand, land_alone
from .memory import KernelMemory
from .placement import place
from .timeline import KernelCore
from .trace import Collected, Entry, Issued, Met, Trace

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
    """Cores on which the traces were timed again.

    Raises BadInput for a trace with gaps, and for that of a rank which works with others.
    """
    if not all(trace.whole for trace in traces):
        raise BadInput("retime", "a trace with gaps", "a kernel of instructions; run it again")
    run = steps(traces, chip)
    try:
        stands = next(run)
        while True:
            stands = run.send(_alone(stands))
    except StopIteration as stop:
        return stop.value


def _alone(stands: Sequence[Stand]) -> dict[int, Landed]:
    """What collectives give to a rank that is alone. Raises BadInput if it is not."""
    offers = {core: stand.offer for core, stand in enumerate(stands) if stand.offer is not None}
    for offer in offers.values():
        if offer.request.ranks != (0,):
            raise BadInput("retime", "one of several ranks", "a kernel on one rank; run it again")
    return {core: land_alone(offer, (), 0) for core, offer in offers.items()}


def steps(
    traces: Sequence[Trace], chip: Chip
) -> Generator[tuple[Stand, ...], Mapping[int, Landed], list[KernelCore]]:
    """As `retime`; yields where the cores stand when they wait for other ranks, and takes what
    collectives gave, as `Launch.steps` does."""
    cores = [KernelCore(chip, data=False) for _ in traces]
    runs = [
        _Run(core, trace, i, len(cores))
        for i, (core, trace) in enumerate(zip(cores, traces, strict=True))
    ]
    while True:
        stops = [run.to_meeting() for run in runs]
        if all(stop is None for stop in stops):
            return cores
        if all(isinstance(stop, Met) for stop in stops):
            arrivals = [
                run.core.arrive(met)
                for run, met in zip(runs, stops, strict=True)
                if isinstance(met, Met)
            ]
            for run in runs:
                run.meet(arrivals)
            continue
        landed = yield tuple(_stands(runs, stops))
        for core, what in landed.items():
            runs[core].land(what)


def _stands(runs: "Sequence[_Run]", stops: Sequence[Entry | None]) -> Iterator[Stand]:
    """Where the cores of a rank stand. To what is the logical core's they come together."""
    collected = [stop.request for stop in stops if isinstance(stop, Collected)]
    for run, stop in zip(runs, stops, strict=True):
        if isinstance(stop, Collected):
            run.arrival = run.core.come(stop, run.number, len(runs))
    last = max(run.arrival for run in runs)
    for run, stop in zip(runs, stops, strict=True):
        shared = isinstance(stop, Collected) and stop.request.core is None
        if not isinstance(stop, Collected) or (
            shared and collected.count(stop.request) < len(runs)
        ):
            yield Stand("waits")
            continue
        run.arrival = last if shared else run.arrival
        offer = Offer(stop.request, run.arrival, stop.line, stop.sends)
        yield Stand(f"waits in {offer}", offer)


class _Run:
    """One core's way through its trace."""

    def __init__(self, core: KernelCore, trace: Trace, number: int, cores: int) -> None:
        self.core, self.entries, self.position = core, trace.entries, 0
        self.number, self.cores, self.arrival = number, cores, 0
        core.trace = trace
        self.ends: list[tuple[int, str]] = []
        self.after: dict[int, list[int]] = {}
        for producer, consumer in trace.after:
            self.after.setdefault(consumer, []).append(producer)

    def to_meeting(self) -> Met | Collected | None:
        """Times entries up to the next meeting, which it returns, or to the end."""
        while self.position < len(self.entries):
            entry = self.entries[self.position]
            if not isinstance(entry, Issued):
                return entry
            _, end = self.core.time(entry, self._after(entry.instruction))
            self._ended(end, entry.instruction.engine)
        return None

    def meet(self, arrivals: Sequence[int]) -> None:
        """Times a meeting of the cores, to which they come at `arrivals`."""
        met = self.entries[self.position]
        assert isinstance(met, Met)
        _, end = self.core.settle(met, arrivals, self.number)
        self._ended(end, met.engine)

    def land(self, landed: Landed) -> None:
        """Times the collective in which the core stands."""
        entry = self.entries[self.position]
        assert isinstance(entry, Collected)
        alone = len(entry.request.group_of(entry.request.ranks[0])) == 1
        landed = landed.lasting(self.arrival, entry.alone if alone else 0)
        self.core.land(entry, self.arrival, landed.ends, self.number, self.cores)
        self._ended(max(landed.ends), "dma")

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


def finish(
    cores: Sequence[KernelCore],
    schedule: Sequence[tuple],
    findings: dict[str, str] | None = None,
) -> bool:
    """Gives the tensors of a kernel that has ended their places, and its instructions their order;
    whether it has to be timed again with them.

    `schedule` has the pairs of names of `with_schedule`. Raises OutOfMemory for tensors that do not
    fit in program order, or notes it in `findings`: the vendor's compiler may have an order in
    which they do, and they stay beyond the end of the memory.
    """
    again = False
    for core in cores:
        core.finish()
        trace = core.trace
        trace.after += [*_blocks(trace), *_scheduled(trace, schedule)]
        for memory in (core.sbuf, core.psum):
            again |= _placed(memory, trace, findings)
        again |= bool(trace.after)
    return again


def _placed(memory: KernelMemory, trace: Trace, findings: dict[str, str] | None) -> bool:
    try:
        return place(memory, trace.entries)
    except OutOfMemory as error:
        if findings is None:
            raise
        findings.setdefault(getattr(error, "line", ""), str(error))
        return False


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
