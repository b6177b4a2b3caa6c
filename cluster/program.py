"""What one rank runs, as data: steps over buffers in the rank's HBM.

A `RankProgram` is compiled once (`compile.py`) and read by two interpreters: `executor.py` computes
its values on one physical core, `clocks.py` advances the virtual clocks of all ranks. All ranks
share the program; a step says what each physical core of the logical core does.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from trnsim.collectives.schedule import Block, Collective, Schedule
from trnsim.device.ops import fuse, matmul
from trnsim.device.ops.ir import Operation, TensorType
from trnsim.device.ops.kernel import Cost, Kernel, Part, Residency

from . import wire


def _kinds(cls: type) -> Iterator[type]:
    for kind in cls.__subclasses__():
        yield kind
        yield from _kinds(kind)


assert fuse.fuse  # its import defines every kind of kernel
for _class in (Collective, Schedule, Cost, Part, Residency, matmul.Operand, *_kinds(Kernel)):
    wire.register(_class)
wire.register(Block, "ScheduleBlock")  # `Block` is the operator program's


@wire.register
@dataclass(frozen=True, slots=True)
class Buffer:
    """Home of a value in the rank's HBM: one byte offset per physical core.

    The offsets are equal for a shared value. They differ for a small value that each core computes
    for itself (loop counters, indices), so that no exchange is needed to read it.
    """

    offsets: tuple[int, ...]
    type: TensorType

    def interval(self, core: int) -> tuple[int, int]:
        """The byte interval that `core` uses."""
        return self.offsets[core], self.offsets[core] + self.type.nbytes


@wire.register
@dataclass(frozen=True, slots=True)
class RunKernel:
    """Run `kernel`: core `c` computes `parts[c]` with SBUF residency `residency[c]`.

    `costs[c]` is what that takes at operator fidelity.
    """

    kernel: Kernel
    parts: tuple[Part, ...]
    residency: tuple[Residency, ...]
    costs: tuple[Cost, ...]


@wire.register
@dataclass(frozen=True, slots=True)
class PairBarrier:
    """The physical cores of the logical core wait for each other."""


@wire.register
@dataclass(frozen=True, slots=True)
class StartCollective:
    """Start a collective on one operand; the result may be read after `WaitCollective(key)`."""

    key: int
    operation: Operation
    operand: int
    result: int
    groups: tuple[tuple[int, ...], ...]
    collective: Collective
    schedule: Schedule
    algorithm: str
    reason: str
    stream: int = 0


@wire.register
@dataclass(frozen=True, slots=True)
class WaitCollective:
    """Wait for the collective of that key on every physical core."""

    key: int


@wire.register
@dataclass(frozen=True, slots=True)
class SetRank:
    """Write the rank's number (partition_id) into a buffer of each core."""

    result: int
    zero: bool = False


@wire.register
@dataclass(frozen=True, slots=True)
class Move:
    """Parallel assignment `destination <- source` of loop-carried or branch values.

    Hardware compilers alias these buffers, so the move takes no virtual time.
    """

    pairs: tuple[tuple[int, int], ...]


@wire.register
@dataclass(frozen=True, slots=True)
class While:
    """Run `condition`, and while `predicate` holds `body`, each followed by the condition again.

    `key` names the loop in a run's decisions (the number of trips of each execution).
    """

    key: int
    condition: "tuple[Step, ...]"
    predicate: int
    body: "tuple[Step, ...]"
    location: str = ""


@wire.register
@dataclass(frozen=True, slots=True)
class Branch:
    """Run `branches[index]`; an index out of range takes the last (StableHLO `case`).

    `key` names the branch in a run's decisions (the index taken at each execution).
    """

    key: int
    index: int
    branches: "tuple[tuple[Step, ...], ...]"
    predicate: bool = False  # StableHLO `if`: true takes branch 0, false branch 1
    location: str = ""


Decisions = dict[int, list[int]]
"""For each loop key the trips, for each branch key the index, of its executions in order."""

Step = RunKernel | PairBarrier | StartCollective | WaitCollective | SetRank | Move | While | Branch


@wire.register
@dataclass(frozen=True, slots=True)
class RankProgram:
    """Steps, buffers and constants of one rank; `arena_bytes` is its modelled HBM peak.

    `commit` lists (argument, result): the training state, copied at the end of a step into the
    arguments of the next; donated buffers on the device, so it takes no virtual time.
    """

    name: str
    lnc: int
    steps: tuple[Step, ...]
    buffers: dict[int, Buffer]
    constants: dict[int, Any]
    arguments: tuple[int, ...]
    results: tuple[int, ...]
    commit: tuple[tuple[int, int], ...]
    arena_bytes: int
    barrier_ps: int
    hbm: dict[str, int] = field(default_factory=dict)

    def walk(self) -> Iterator[Step]:
        """Every step, nested ones included, in program order."""
        yield from _walk(self.steps)


def _walk(steps: tuple[Step, ...]) -> Iterator[Step]:
    for step in steps:
        yield step
        match step:
            case While():
                yield from _walk(step.condition)
                yield from _walk(step.body)
            case Branch():
                for branch in step.branches:
                    yield from _walk(branch)
