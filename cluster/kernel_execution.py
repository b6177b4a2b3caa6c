"""What one rank does in a runtime while it runs a kernel.

`start` runs the kernel until its cores stand in collectives (or it has ended) and returns where
they stand; `advance` takes part in what the coordinator has settled, and runs on. Data of
collectives go from rank to rank by the runtime's messages, as a schedule's `Exchange`. A kernel
may have to be timed `again` when it has ended (see `retime`), for which all ranks go through their
traces the same way, without data. `result` is what it gave.
"""

import contextlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trnsim.device.chip import Chip
from trnsim.device.dtypes import numpy_dtype
from trnsim.device.errors import BadInput, TrnsimError
from trnsim.device.nki.collectives import ReplicaGroup
from trnsim.device.nki.interconnect import Landed, Offer, Request, Stand
from trnsim.device.nki.kernel import Kernel, program, result_of
from trnsim.device.nki.launch import Launch, Settings
from trnsim.device.nki.result import CoreRun, SimulationResult
from trnsim.device.nki.retime import finish
from trnsim.device.nki.retime import steps as retimed_steps
from trnsim.device.nki.timeline import KernelCore, KernelEvent
from trnsim.device.nki.trace import Trace

from . import wire
from .kernel_fabric import KernelFabric, Machine, Share, shared_fabric
from .kernel_file import load_kernel
from .runtimes.base import Exchange, Execution, Seat

for _class in (Request, Offer, Stand):
    wire.register(_class, f"Kernel{_class.__name__}")

Steps = Generator[tuple[Stand, ...], Mapping[int, Landed], list[Any] | list[KernelCore]]


@wire.register
@dataclass(frozen=True)
class Ranked:
    """Arguments of the kernel on one rank."""

    args: tuple = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


@wire.register
@dataclass(frozen=True)
class KernelAnswer:
    """A collective that this rank is in: for its cores, begins and ends of its channels in ps.

    `number` is of the collective among all of the run. `sends`: see `Meeting`.
    """

    number: int
    request: Request
    cores: tuple[int, ...]
    begins: tuple[int, ...]
    ends: tuple[int, ...]
    sends: dict[int, tuple[int, ...]]


@wire.register
@dataclass(frozen=True)
class KernelEnd:
    """What a rank's kernel gave, in plain types."""

    outputs: Any
    cores: tuple[dict[str, Any], ...]
    peak_hbm: int
    findings: dict[str, str]
    hooks: tuple[str, ...]


@wire.register
@dataclass(frozen=True)
class KernelEnded:
    """The kernel has ended on this rank, and may have to be timed again."""

    again: bool


State = tuple[Stand, ...] | KernelEnded
"""Where the cores of a rank stand, or that they have ended."""


@dataclass(frozen=True)
class KernelJob:
    """An `Execute` of the runtimes: one kernel on all ranks of a machine.

    `place` is FILE.py:NAME of a kernel that other processes load; else `kernel` runs here.
    """

    machine: Machine
    kernel: Kernel | None
    place: str = ""
    grid: bool = False
    seed: int = 0
    hazards: str = "error"
    deadline: float = 3600.0
    data: bool = True
    started: list["_Rank"] = field(default_factory=list, compare=False, repr=False)

    def __call__(self, seat: Seat, call: str, argument: Any) -> Execution:
        if call == "start":
            seat.state["rank"] = rank = _Rank(self, seat.address.rank, argument)
            self.started.append(rank)
        rank: _Rank = seat.state["rank"]
        if call == "result":
            return rank.result()
        if call == "again":
            rank.again()
        return rank.advance(argument if call == "advance" else [])

    def stop(self) -> None:
        """Ends the threads of ranks in this process that have not come to their end."""
        while self.started:
            self.started.pop().stop()

    @property
    def chip(self) -> Chip:
        """With the numbers of the instance."""
        return self.machine.load().chip

    def settings(self) -> Settings:
        """Of every rank's launch."""
        return Settings(
            chip=self.chip, cores=self.machine.lnc, grid=self.grid, seed=self.seed,
            hazards=self.hazards, deadline=self.deadline, data=self.data,
        )  # fmt: skip


class _Rank:
    """A rank's launch, between its stops."""

    def __init__(self, job: KernelJob, rank: int, start: Ranked) -> None:
        self.job, self.rank = job, rank
        self.fabric: KernelFabric = shared_fabric(job.machine)
        self.kernel = job.kernel or load_kernel(job.place)
        self.launch = Launch(job.settings(), rank, self.fabric)
        with _named(rank):
            body = program(self.kernel, self.launch, start.args, start.kwargs)
        self.steps: Steps | None = self.launch.steps(body)
        self.cores = [session.core for session in self.launch.sessions]
        self.results: list[Any] | None = None
        self.state: State | None = None

    def stop(self) -> None:
        """Ends the kernel where it stands."""
        if self.steps is not None:
            self.steps.close()

    def again(self) -> None:
        """The trace is to be timed again."""
        traces = [core.trace for core in self.cores]
        self.steps, self.state = retimed_steps(traces, self.launch.chip), None

    def advance(self, answers: Sequence[KernelAnswer]) -> Execution:
        """Carries out what was settled and runs on; the value is the rank's new state."""
        landed: dict[int, Landed] = {}
        for answer in answers:
            found = yield from self._carry(answer)
            landed |= dict.fromkeys(answer.cores, found)
        if self.steps is not None and (landed or self.state is None):
            with _named(self.rank):
                self._run(self.steps, landed)
        return self.state

    def _run(self, steps: "Steps", landed: Mapping[int, Landed]) -> None:
        try:
            self.state = next(steps) if self.state is None else steps.send(landed)
        except StopIteration as stop:
            self.steps = None
            if self.results is None:
                self.results = stop.value
                self.state = KernelEnded(finish(self.cores, self.kernel.schedule))
            else:
                self.cores, self.state = stop.value, KernelEnded(False)

    def result(self) -> Execution:
        """What the kernel gave (packed if it is to travel)."""
        yield from ()
        assert self.results is not None
        with _named(self.rank):
            result = result_of(self.kernel, self.launch, self.results, self.cores)
        return packed(result) if self.job.place else result

    def _carry(self, answer: KernelAnswer) -> Generator[Exchange, None, Landed]:
        request, nothing = answer.request, (None,) * len(answer.request.channels)
        inputs = self.launch.inputs(answer.cores[0]) if self.results is None else nothing
        outputs: list[np.ndarray | None] = [None] * len(request.channels)
        for share in self.fabric.shares(request, answer.sends):
            group = next((group for group in share.groups if self.rank in group), None)
            given = inputs[share.channel]
            if group is not None and given is not None:
                exchange = self._exchange(answer, share, group, given)
                yield exchange
                outputs[share.channel] = exchange.outputs[0]
        group = request.group_of(self.rank)
        return Landed(
            answer.begins, answer.ends, tuple(answer.sends[rank] for rank in group), tuple(outputs)
        )

    def _exchange(
        self, answer: KernelAnswer, share: Share, group: tuple[int, ...], given: np.ndarray
    ) -> Exchange:
        collective, me = share.collective, group.index(self.rank)
        output = np.empty(collective.output_count(me), numpy_dtype(collective.dtype))
        schedule = self.fabric.plan(share, answer.request).schedule
        key = answer.number * len(answer.request.channels) + share.channel
        return Exchange(key, collective, schedule, group, me, [given], [output])


@contextlib.contextmanager
def _named(rank: int) -> Iterator[None]:
    """Puts the rank in front of the messages of its errors."""
    try:
        yield
    except TrnsimError as error:
        error.args = (f"rank {rank}: {error}",)
        raise


# ---- across processes ------------------------------------------------------------------------


def packed(result: SimulationResult) -> KernelEnd:
    """A result as plain types; its chip and traces stay behind."""
    cores = tuple(
        dict(vars(core), busy=dict(core.busy), events=[tuple(e) for e in core.events], trace=None)
        for core in result.cores
    )
    return KernelEnd(
        result.outputs, cores, result.peak_hbm, dict(result.findings), tuple(result.hooks)
    )


def unpacked(end: KernelEnd, chip: Chip, seed: int) -> SimulationResult:
    """The result of `packed`."""
    left = Trace(whole=False)
    cores = tuple(
        CoreRun(**dict(core, events=tuple(KernelEvent(*e) for e in core["events"]), trace=left))
        for core in end.cores
    )
    return SimulationResult(end.outputs, chip, cores, end.peak_hbm, end.findings, end.hooks, seed)


def portable(value: Any) -> Any:
    """An argument as another process can have it. Raises BadInput for one that cannot travel."""
    if isinstance(value, ReplicaGroup):
        return value.replica_groups
    try:
        wire.encode(value)
    except TypeError as error:
        raise BadInput("argument of a kernel on Ray", error, "arrays and plain values") from None
    return value
