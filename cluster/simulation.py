"""The coordinator: one compiled step on a machine, with or without data.

It owns the placement, the group table (in the calls' plans) and the virtual clocks. A data run
places shards on cores, lets a runtime run the program, and reads results back; the virtual time of
a step comes from the same program and from the decisions that the cores took.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trnsim.device.errors import CollectiveMismatch

from . import wire
from .calls import Calls
from .clocks import Clocks, StepTime
from .compile import Fidelity, compile_program
from .executor import CoreReport, Loaded, StepCall, StepReply, execute
from .fold import fold
from .machine import Machine
from .program import Decisions, RankProgram
from .runtimes.base import Runtime
from .sharding import Lowered, shard, unshard


@dataclass(frozen=True, slots=True)
class StepResult:
    """Global arrays of the results that were asked for, by result index, and the virtual time."""

    values: dict[int, np.ndarray]
    time: StepTime


class Simulation:
    """A lowered step on a machine.

    `commit` lists (result index, argument index) pairs of training state that stays on the cores.
    Raises OutOfMemory if a rank's share does not fit its HBM.
    """

    def __init__(
        self,
        lowered: Lowered,
        machine: Machine,
        fidelity: Fidelity = "operator",
        commit: Sequence[tuple[int, int]] = (),
        algorithm: str = "policy",
        traced: Iterable[int] = (),
        streams: int = 1,
    ) -> None:
        self.lowered, self.machine, self.fidelity = lowered, machine, fidelity
        self.traced = tuple(traced)
        self.calls = Calls(machine, algorithm, streams)
        self.program: RankProgram = compile_program(
            lowered.module, machine.chip, machine.lnc, self.calls, fidelity, commit
        )
        machine.check_memory(self.program)
        self.clocks = Clocks(machine.ranks, machine.lnc)
        self._runtime: Runtime | None = None

    def time_only(self, stated: Mapping[str, int] | None = None) -> StepTime:
        """Advances the clocks over one step without data.

        `stated` gives trips or branches by source line where control flow depends on data.
        """
        return self.advance(fold(self.lowered.module, self.machine.ranks, stated))

    def advance(self, decisions: Sequence[Decisions]) -> StepTime:
        """Advances the clocks over one step that took `decisions[rank]`."""
        meet = self.calls.meeting if self.calls.streams > 1 else None
        return self.clocks.step(self.program, decisions, self.calls.price, self.traced, meet)

    def start(self, runtime: Runtime) -> None:
        """Sets up the cores on `runtime` and gives them the program."""
        runtime.open(self.machine.addresses(self.program.arena_bytes), execute)
        loaded = Loaded(self.program, self.machine.chip.name, self.fidelity)
        runtime.load("program", wire.encode(loaded))
        self._runtime = runtime

    def step(self, arguments: Mapping[int, np.ndarray], read: Sequence[int]) -> StepResult:
        """Runs one step with data: places the global `arguments`, returns the results `read`.

        Arguments that are not given keep the values they have (the training state).
        """
        assert self._runtime is not None, "start() comes first"
        replies: list[StepReply] = self._runtime.call("step", self._calls(arguments, read))
        lnc, ranks = self.machine.lnc, self.machine.ranks
        firsts = [replies[rank * lnc] for rank in range(ranks)]
        decisions = [
            _agreed([reply.report for reply in replies[rank * lnc : (rank + 1) * lnc]], rank)
            for rank in range(ranks)
        ]
        values = {
            index: unshard(
                [reply.values[self.program.results[index]] for reply in firsts],
                self.lowered.outputs[index],
            )
            for index in read
        }
        return StepResult(values, self.advance(decisions))

    def _calls(self, arguments: Mapping[int, np.ndarray], read: Sequence[int]) -> list[StepCall]:
        wanted = tuple(self.program.results[index] for index in read)
        calls = []
        for rank in range(self.machine.ranks):
            shards = {
                self.program.arguments[index]: shard(array, self.lowered.inputs[index], rank)
                for index, array in arguments.items()
            }
            calls.append(StepCall(shards, wanted))
            calls += [StepCall({}, wanted)] * (self.machine.lnc - 1)
        return calls


def _agreed(reports: Sequence[CoreReport], rank: int) -> Decisions:
    """The decisions of a rank, on which its physical cores must agree."""
    first = reports[0].decisions
    if any(report.decisions != first for report in reports):
        raise CollectiveMismatch(f"the physical cores of rank {rank} took different branches")
    return first
