"""NKI kernels on many ranks: values on all of them, and modelled time.

    result = simulate_ranks(kernel[2], (x,), ranks=8, instance="trn2.48xlarge")
    result.time                      # ps, of the slowest rank
    result.ranks[3].output           # of rank 3; each is a SimulationResult
    result.collectives[0].busbw      # what each collective took, and why

Ranks run until all of them stand in collectives; those for which all have come are then priced
together, carried out, and their ranks run on. In process the ranks take turns in one order; with
`runtime="ray"` each is an actor. Both give the same bytes and the same picoseconds.
"""

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trnsim.device.chip import Chip
from trnsim.device.errors import BadInput
from trnsim.device.nki.interconnect import Meeting, Stand, meetings
from trnsim.device.nki.kernel import Kernel, as_chip, jit, simulate
from trnsim.device.nki.result import SimulationResult
from trnsim.device.overlay import apply_overlay

from .instances import load_instance
from .kernel_execution import (
    KernelAnswer,
    KernelEnd,
    KernelEnded,
    KernelJob,
    Ranked,
    State,
    portable,
    unpacked,
)
from .kernel_fabric import CollectiveUse, KernelFabric, Machine, Times
from .lnc import check_lnc
from .runtimes.base import Runtime
from .train import make_runtime

SEAT_BYTES = 4096  # of a rank's arena in the runtime: a kernel keeps its HBM itself

One = tuple | Mapping[str, Any] | Ranked
Inputs = One | list | Callable[[int], One]
"""Arguments of a kernel for all ranks (positional, named, both), a list of one for each rank, or a
function of the rank."""


@dataclass(frozen=True)
class RanksResult:
    """Every rank's result, and the collectives in the order in which they ran."""

    ranks: tuple[SimulationResult, ...]
    collectives: tuple[CollectiveUse, ...] = ()
    machine: Machine | None = None

    @property
    def time(self) -> int:
        """Picoseconds from launch to the last result of the slowest rank."""
        return max(rank.time for rank in self.ranks)

    @property
    def slowest(self) -> int:
        """The first of the slowest ranks."""
        return max(range(len(self.ranks)), key=lambda rank: (self.ranks[rank].time, -rank))

    @property
    def outputs(self) -> list[Any]:
        """The outputs of each rank."""
        return [rank.outputs for rank in self.ranks]


def simulate_ranks(
    kernel: Any,
    inputs: Inputs = (),
    *,
    ranks: int | None = None,
    lnc: int | None = None,
    instance: str | None = None,
    nodes: int = 1,
    chip: str | Chip | None = None,
    runtime: str = "local",
    address: str | None = None,
    algorithm: str = "policy",
    seed: int = 0,
    hazards: str | None = None,
    deadline: float = 3600.0,
    data: bool = True,
    overlay: str | Path | None = None,
) -> RanksResult:
    """Runs a kernel on ranks of `nodes` instances; without an instance, on one rank of `chip`.

    `ranks` is all logical cores if not given; rank r is on logical core r of its node. `lnc` is
    the grid of `kernel[n]`, or given here. `algorithm` is of collectives: policy, best, or a name.
    `hazards`, `deadline`, `data`: see `simulate`; `overlay` is a file of numbers. Raises BadInput
    for ranks that do not fit, what `simulate` raises with the rank in front, and CollectiveMismatch
    or DeadlockError for ranks that differ.
    """
    made = _gridded(jit(kernel), lnc)
    cores = made.cores or 1
    if instance is None:
        if ranks not in (None, 1) or nodes != 1 or runtime != "local":
            raise BadInput("instance", "none", "an instance for several ranks, nodes, or Ray")
        options = {"seed": seed, "hazards": hazards, "deadline": deadline, "data": data}
        return _on_one_rank(made, inputs, as_chip(chip), overlay, options)
    _check_instance(instance, cores, chip)
    available = nodes * load_instance(instance).logical_cores(cores)
    machine = Machine(
        instance, available if ranks is None else ranks, cores, nodes, algorithm,
        None if overlay is None else str(Path(overlay).resolve()),
    )  # fmt: skip
    job = KernelJob(
        machine, made if runtime == "local" else None, "" if runtime == "local" else _place(made),
        made.cores is not None, seed, _hazards(hazards), deadline, data,
    )  # fmt: skip
    starts = [_arguments(inputs, rank, machine.ranks) for rank in range(machine.ranks)]
    try:
        with make_runtime(runtime, address) as cores_of:
            return _Coordinator(job, cores_of).run(starts)
    finally:
        job.stop()


def _on_one_rank(
    kernel: Kernel, inputs: Inputs, chip: Chip, overlay: str | Path | None, options: dict[str, Any]
) -> RanksResult:
    """A kernel without an instance, on the numbers of `overlay` if there is one."""
    given = _arguments(inputs, 0, 1)
    numbers = chip if overlay is None else apply_overlay(chip, overlay)
    found = simulate(kernel, *given.args, chip=numbers, **options, **given.kwargs)
    return RanksResult((found,))


class _Coordinator:
    """Starts the ranks, and settles what they stand in until all have ended."""

    def __init__(self, job: KernelJob, runtime: Runtime) -> None:
        self.job, self.runtime = job, runtime
        self.fabric = KernelFabric(job.machine)
        self.uses: list[CollectiveUse] = []
        self.settled = 0

    def run(self, starts: Sequence[Ranked]) -> RanksResult:
        """All ranks, from start to end."""
        travels = bool(self.job.place)
        given = [_portable(start) for start in starts] if travels else starts
        seats = [self.fabric.address(rank, SEAT_BYTES) for rank in range(len(starts))]
        self.runtime.open(seats, self.job)
        ended = self._to_end(self.runtime.call("start", given))
        if any(end.again for end in ended):
            self.fabric, self.uses = KernelFabric(self.job.machine), []
            self._to_end(self.runtime.call("again"))
        results = tuple(map(self._result, self.runtime.call("result")))
        return RanksResult(results, tuple(self.uses), self.job.machine)

    def _to_end(self, states: list[State]) -> list[KernelEnded]:
        """Settles what ranks stand in until all have ended."""
        while any(isinstance(state, tuple) for state in states):
            states = self.runtime.call("advance", self._answers(states))
        return [state for state in states if isinstance(state, KernelEnded)]

    def _answers(self, states: Sequence[State]) -> list[list[KernelAnswer]]:
        """By rank, what it takes part in."""
        found = meetings([self._stands(state) for state in states])
        times, uses = self.fabric.settle(found)
        self.uses += uses
        answers: list[list[KernelAnswer]] = [[] for _ in states]
        for meeting, when in zip(found, times, strict=True):
            self.settled += 1
            for rank in meeting.request.ranks:
                answers[rank].append(_answer(self.settled, meeting, when, rank))
        return answers

    def _stands(self, state: State) -> tuple[Stand, ...]:
        ended = (Stand("has ended"),) * self.job.machine.lnc
        return state if isinstance(state, tuple) else ended

    def _result(self, given: SimulationResult | KernelEnd) -> SimulationResult:
        if isinstance(given, KernelEnd):
            return unpacked(given, self.job.chip, self.job.seed)
        return given


def _answer(number: int, meeting: Meeting, times: Times, rank: int) -> KernelAnswer:
    return KernelAnswer(
        number, meeting.request, meeting.seats[rank], tuple(times.begins[rank]),
        tuple(times.ends[rank]), meeting.sends,
    )  # fmt: skip


def _portable(start: Ranked) -> Ranked:
    named = {name: portable(value) for name, value in start.kwargs.items()}
    return Ranked(tuple(map(portable, start.args)), named)


# ---- what was asked for ----------------------------------------------------------------------


def _gridded(kernel: Kernel, lnc: int | None) -> Kernel:
    """The kernel on `lnc` cores. Raises BadInput if it has another grid."""
    if lnc is None or lnc == kernel.cores:
        return kernel
    if kernel.cores is not None:
        raise BadInput("lnc", lnc, f"{kernel.cores}: the kernel's grid")
    return kernel[lnc] if lnc > 1 else kernel


def _check_instance(instance: str, cores: int, chip: str | Chip | None) -> None:
    """Raises BadInput for an LNC or a chip that the instance does not have."""
    found = load_instance(instance).chip
    check_lnc(found, cores)
    asked = chip.name if isinstance(chip, Chip) else chip
    if asked not in (None, found.name):
        raise BadInput("chip", asked, f"{found.name}: that of {instance}", found.name)


def _hazards(asked: str | None) -> str:
    found = asked or os.environ.get("TRNSIM_NKI_HAZARDS", "error")
    if found not in ("error", "report"):
        raise BadInput("hazards", found, ("error", "report"))
    return found


def _arguments(inputs: Inputs, rank: int, ranks: int) -> Ranked:
    """The arguments of a rank. Raises BadInput."""
    given: Any = inputs
    if isinstance(inputs, list):
        if len(inputs) != ranks:
            raise BadInput("inputs", f"a list of {len(inputs)}", f"one for each of {ranks} ranks")
        given = inputs[rank]
    elif callable(inputs):
        given = inputs(rank)
    if isinstance(given, Ranked):
        return given
    if isinstance(given, Mapping):
        return Ranked(kwargs=dict(given))
    if isinstance(given, tuple):
        return Ranked(given)
    raise BadInput(
        "inputs", type(given).__name__, "a tuple or dict of arguments, or a list of them"
    )


def _place(kernel: Kernel) -> str:
    """FILE.py:NAME from which other processes get the kernel. Raises BadInput if there is none."""
    function = kernel.function
    file, name = inspect.getsourcefile(function), function.__qualname__
    if file is None or not Path(file).is_file() or not name.isidentifier():
        raise BadInput("kernel", name, "a function at the top of a file, for runtime ray")
    return f"{Path(file).resolve()}:{name}"
