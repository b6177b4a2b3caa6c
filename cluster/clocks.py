"""The time plane of a step: virtual clocks of all ranks, advanced over a `RankProgram`.

One int64 clock in picoseconds per (physical core of the logical core, rank), one per (collective
stream, rank). Ranks that took the same decisions advance together as array operations; at a
collective the classes of its groups meet, because it is priced over all of them at once.
Collectives of different streams slow each other by the rule of `overlap`.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from trnsim.device.errors import CollectiveMismatch

from .overlap import Demand, Flight, InFlight, Meeting
from .program import (
    Branch,
    Decisions,
    PairBarrier,
    RankProgram,
    RunKernel,
    StartCollective,
    Step,
    WaitCollective,
    While,
)

Array = np.ndarray
Pricer = Callable[[StartCollective, Array], Array]
"""(call, arrival of every rank in ps) -> end of every rank in ps."""

Meet = Callable[[StartCollective], Meeting]
"""Who waits for whom in a call, and what it takes of a rank."""

STREAMS = 4  # collective streams per logical core (2 CC-cores for each physical core of a pair)


@dataclass(frozen=True, slots=True)
class Event:
    """One bar of the trace: `track` of `rank`, from `start` for `duration` ps."""

    rank: int
    track: str
    name: str
    start: int
    duration: int
    detail: dict[str, str | int] = field(default_factory=dict)


@dataclass(slots=True)
class CallTime:
    """What one collective call of the program cost, over its executions, on the slowest rank."""

    key: int
    stream: int = 0
    executions: int = 0
    total: int = 0
    exposed: int = 0


@dataclass(frozen=True, slots=True)
class StepTime:
    """Virtual time of one step.

    `ends[rank]` in ps from the start of the run; `busy[(core, engine)]` in ps on the rank with
    most work; `calls[key]` for each collective call; `runs[id(step)]` counts the executions of a
    `RunKernel` step; `events` of the traced ranks.
    """

    start: int
    ends: Array
    busy: dict[tuple[int, str], int]
    calls: dict[int, CallTime]
    runs: dict[int, int]
    events: list[Event]
    instructions: int
    flops: int
    hbm_bytes: int

    @property
    def duration(self) -> int:
        """The step in ps, from its start to the end of the last rank."""
        return int(self.ends.max()) - self.start

    @property
    def collective(self) -> int:
        """Time in collectives on the slowest rank of each call, in ps."""
        return sum(call.total for call in self.calls.values())

    @property
    def exposed(self) -> int:
        """Collective time that compute waited for, in ps."""
        return sum(call.exposed for call in self.calls.values())

    @property
    def overlapped_bound(self) -> int:
        """No schedule of this work is shorter: the busiest engine or stream, in ps."""
        streams: dict[int, int] = {}
        for call in self.calls.values():
            streams[call.stream] = streams.get(call.stream, 0) + call.total
        return max([0, *streams.values(), *self.busy.values()])

    @property
    def serial_bound(self) -> int:
        """Everything one after another on the busiest core, collectives included, in ps."""
        cores = {core for core, _ in self.busy}
        return self.collective + max(
            (sum(t for (c, _), t in self.busy.items() if c == core) for core in cores), default=0
        )


@dataclass(slots=True)
class Clocks:
    """Virtual clocks of all ranks, carried from step to step."""

    ranks: int
    cores: int
    core: Array = field(init=False)
    stream: Array = field(init=False)
    aloft: InFlight[Flight] = field(init=False)

    def __post_init__(self) -> None:
        self.core = np.zeros((self.cores, self.ranks), np.int64)
        self.stream = np.zeros((STREAMS, self.ranks), np.int64)
        self.aloft = InFlight()

    def take_off(self, flight: Flight) -> None:
        """One more collective is under way; those of other streams end later, and it does too."""
        self.aloft.land(self.core.max(axis=0))
        self.aloft.take_off(flight)
        for stream, queue in self.aloft.queues.items():
            if queue:
                members = queue[-1].meeting.rows
                self.stream[stream, members] = queue[-1].end[members]

    def step(
        self,
        program: RankProgram,
        decisions: Sequence[Decisions],
        price: Pricer,
        traced: Iterable[int] = (),
        meet: Meet | None = None,
    ) -> StepTime:
        """Advance over one step; `decisions[rank]` as a data run or `fold` gave them.

        Without `meet`, collectives do not slow each other (those of one stream never do).

        Raises CollectiveMismatch when ranks of one group stand at different collectives for ever.
        """
        start = int(self.core.max())
        self.core[:] = start  # the host starts the next step when all ranks have ended
        walks = [
            _Walk(self, program, rows, decisions[rows[0]], set(traced))
            for rows in _classes(decisions)
        ]
        _drive(walks, self, price, meet)
        busiest = max(walks, key=lambda walk: sum(walk.busy.values()))
        return StepTime(
            start,
            self.core.max(axis=0),
            busiest.busy,
            _merge([walk.calls for walk in walks]),
            busiest.runs,
            [event for walk in walks for event in walk.events],
            busiest.instructions,
            busiest.flops,
            busiest.hbm_bytes,
        )


_ALONE = Meeting("", Demand(), 0, np.zeros((0, 1), np.int64), np.zeros(0, np.int64))


def _classes(decisions: Sequence[Decisions]) -> list[Array]:
    """Ranks with equal decisions, by first rank."""
    groups: dict[str, list[int]] = {}
    seen: dict[int, str] = {}
    for rank, taken in enumerate(decisions):
        text = seen.setdefault(id(taken), repr(sorted(taken.items())))
        groups.setdefault(text, []).append(rank)
    return [np.asarray(rows) for rows in groups.values()]


def _merge(parts: list[dict[int, CallTime]]) -> dict[int, CallTime]:
    merged = parts[0]
    for calls in parts[1:]:
        for key, call in calls.items():
            into = merged.setdefault(key, CallTime(key, call.stream))
            into.executions = max(into.executions, call.executions)
            into.total = max(into.total, call.total)
            into.exposed = max(into.exposed, call.exposed)
    return merged


def _drive(walks: "list[_Walk]", clocks: Clocks, price: Pricer, meet: Meet | None) -> None:
    """Advance all classes from collective to collective."""
    runs = [walk.run() for walk in walks]
    calls = [next(run, None) for run in runs]
    while any(call is not None for call in calls):
        call, ready = _complete(walks, calls)
        ranks = np.concatenate([walks[i].rows for i in ready])
        arrivals = np.maximum(clocks.core.max(axis=0), clocks.stream[call.stream])
        flight = Flight(meet(call) if meet else _ALONE, arrivals, price(call, arrivals))
        if meet:
            clocks.take_off(flight)
        clocks.stream[call.stream, ranks] = flight.end[ranks]
        for i in ready:
            calls[i] = _resume(runs[i], walks[i], flight)


def _complete(
    walks: "list[_Walk]", calls: list[StartCollective | None]
) -> tuple[StartCollective, list[int]]:
    """A call, in those of its groups that stand at it as a whole, and the classes in them.

    Groups need not agree with each other: each may take its own trips through a loop.
    """
    waiting = [call for call in calls if call is not None]
    if len(waiting) == len(calls) and len({call.key for call in waiting}) == 1:
        return waiting[0], list(range(len(walks)))
    owner = {rank: i for i, walk in enumerate(walks) for rank in walk.rows.tolist()}
    for call in waiting:
        classes = [{owner[rank] for rank in group} for group in call.groups]
        here = {i for i, other in enumerate(calls) if other is not None and other.key == call.key}
        while torn := {i for group in classes if group - here for i in group & here}:
            here -= torn
        if here:
            groups = zip(call.groups, classes, strict=True)
            whole = tuple(group for group, members in groups if members <= here)
            return replace(call, groups=whole), sorted(here)
    raise CollectiveMismatch(_mismatch(walks, calls))


def _resume(
    run: Generator[StartCollective, Flight, None], walk: "_Walk", flight: Flight
) -> StartCollective | None:
    try:
        return run.send(flight)
    except StopIteration:
        return None


def _mismatch(walks: "list[_Walk]", calls: list[StartCollective | None]) -> str:
    stands = [
        f"ranks {', '.join(map(str, walk.rows[:8]))}"
        + (f" and {len(walk.rows) - 8} more" if len(walk.rows) > 8 else "")
        + (" are at the end of the step" if call is None else f" call {_describe(call)}")
        for walk, call in zip(walks, calls, strict=True)
    ]
    return "ranks of one group call different collectives: " + "; ".join(stands)


def _describe(call: StartCollective) -> str:
    where = f" ({call.operation.location})" if call.operation.location else ""
    return f"{call.operation.name} number {call.key}{where}"


class _Walk:
    """One class of ranks on its way through the program."""

    def __init__(
        self,
        clocks: Clocks,
        program: RankProgram,
        rows: Array,
        decisions: Decisions,
        traced: set[int],
    ) -> None:
        self.clocks, self.program, self.rows = clocks, program, rows
        self.left = {key: iter(outcomes) for key, outcomes in decisions.items()}
        self.traced = [(i, int(rank)) for i, rank in enumerate(rows) if rank in traced]
        self.now = clocks.core[:, rows]
        self.pending: dict[int, tuple[StartCollective, Flight]] = {}
        self.busy: dict[tuple[int, str], int] = {}
        self.calls: dict[int, CallTime] = {}
        self.runs: dict[int, int] = {}
        self.events: list[Event] = []
        self.instructions = self.flops = self.hbm_bytes = 0

    def run(self) -> Generator[StartCollective, Flight, None]:
        yield from self.block(self.program.steps)
        self.clocks.core[:, self.rows] = self.now.max(axis=0)

    def block(self, steps: Sequence[Step]) -> Generator[StartCollective, Flight, None]:
        for step in steps:
            match step:
                case RunKernel():
                    self.kernel(step)
                case PairBarrier():
                    self.barrier()
                case StartCollective():
                    self.clocks.core[:, self.rows] = self.now
                    self.pending[step.key] = step, (yield step)
                    call = self.calls.setdefault(step.key, CallTime(step.key, step.stream))
                    call.executions += 1
                case WaitCollective(key=key):
                    self.wait(key)
                case While(key=key):
                    yield from self.block(step.condition)
                    for _ in range(next(self.left[key])):
                        yield from self.block(step.body)
                        yield from self.block(step.condition)
                case Branch(key=key, branches=branches):
                    index = next(self.left[key])
                    yield from self.block(branches[index if 0 <= index < len(branches) else -1])

    def kernel(self, step: RunKernel) -> None:
        self.runs[id(step)] = self.runs.get(id(step), 0) + 1
        for core, cost in enumerate(step.costs):
            if cost.duration == 0:
                continue
            for engine, time in cost.busy.items():
                self.busy[core, engine] = self.busy.get((core, engine), 0) + time
            for i, rank in self.traced:
                self.trace(rank, core, step, int(self.now[core, i]))
            self.now[core] += cost.duration
            self.instructions += cost.instructions
            self.flops += cost.flops
            self.hbm_bytes += cost.hbm_bytes

    def trace(self, rank: int, core: int, step: RunKernel, start: int) -> None:
        """A bar for the kernel, and one for each engine: its busy time, from the kernel's start."""
        cost, name = step.costs[core], step.kernel.name
        detail: dict[str, str | int] = {"source": step.kernel.location}
        bars = {f"core {core}": cost.duration}
        bars |= {f"core {core} {engine}": time for engine, time in cost.busy.items() if time}
        self.events += [Event(rank, track, name, start, t, detail) for track, t in bars.items()]

    def barrier(self) -> None:
        met = self.now.max(axis=0) + self.program.barrier_ps
        for i, rank in self.traced:
            for core, start in enumerate(self.now[:, i].tolist()):
                if start < met[i]:
                    duration = int(met[i]) - start
                    self.events.append(Event(rank, f"core {core}", "barrier", start, duration))
        self.now[:] = met

    def wait(self, key: int) -> None:
        step, flight = self.pending.pop(key)
        begin, end = flight.begin[self.rows], flight.end[self.rows]
        now = self.now.max(axis=0)
        waited = np.maximum(end - now, 0)
        call = self.calls[key]
        call.total += int((end - begin).max())
        call.exposed += int(waited.max())
        for i, rank in self.traced:
            detail: dict[str, str | int] = {
                "source": step.operation.location,
                "algorithm": step.algorithm,
                "bytes": self.program.buffers[step.operand].type.nbytes,
            }
            track, took = f"collective stream {step.stream}", int(end[i] - begin[i])
            name = f"{step.operation.name} #{step.key}"
            self.events.append(Event(rank, track, name, int(begin[i]), took, detail))
            if waited[i]:
                name, start = f"wait for collective #{key}", int(now[i])
                self.events.append(Event(rank, "core 0", name, start, int(waited[i])))
        self.now[:] = np.maximum(self.now, end)
