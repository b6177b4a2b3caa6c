"""The data plane of one physical core: a `RankProgram` on real arrays in the rank's HBM.

`execute` is a pure generator: it computes, and yields what it needs from others (a meeting of the
pair, an exchange with other ranks). A runtime answers; it may run all cores in one process or each
in its own actor, with the same bytes.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trnsim.device.chip import load_chip
from trnsim.device.core import Core
from trnsim.device.errors import TrnsimError
from trnsim.device.ops.ir import Operation

from . import wire
from .arena import Arena
from .program import (
    Branch,
    Decisions,
    Move,
    PairBarrier,
    RankProgram,
    RunKernel,
    SetRank,
    StartCollective,
    Step,
    While,
)
from .runtimes.base import Barrier, Exchange, Execution, Request, Seat


@wire.register
@dataclass(frozen=True, slots=True)
class CoreReport:
    """What a core learnt while it ran: the way it took through loops and branches."""

    decisions: Decisions
    kernels: int


@wire.register
@dataclass(frozen=True, slots=True)
class StepCall:
    """One step: arguments to place first (by value), values to read afterwards."""

    place: dict[int, np.ndarray]
    read: tuple[int, ...]


@wire.register
@dataclass(frozen=True, slots=True)
class StepReply:
    """The read values (from core 0 of the rank only) and the core's report."""

    values: dict[int, np.ndarray]
    report: CoreReport


@wire.register
@dataclass(frozen=True, slots=True)
class Loaded:
    """What a core needs for its steps: the program, and the chip at instruction fidelity."""

    program: RankProgram
    chip: str
    fidelity: str


def execute(seat: Seat, call: str, argument: StepCall) -> Execution:
    """The `Execute` of the runtimes: `step` is the only call.

    Places the arguments, runs the program, reads the results, and puts the training state
    (`program.commit`) back in its arguments for the next step.
    """
    if call != "step":
        raise ValueError(f"unknown call {call}")
    loaded: Loaded = seat.loaded["program"]
    address, program = seat.address, loaded.program
    first = address.core == 0
    if "device" not in seat.state:
        simulated = loaded.fidelity == "instruction"
        seat.state["device"] = Core(load_chip(loaded.chip)) if simulated else None
        if first:  # nothing ever writes into the homes of constants
            place(seat.arena, program, program.constants)
    if first:
        place(seat.arena, program, argument.place)
    yield Barrier()
    run = _CoreRun(program, address.rank, address.core, seat.arena, seat.state["device"])
    yield from run.block(program.steps)
    yield Barrier()
    values = {v: _read(seat.arena, program, v) for v in argument.read} if first else {}
    if first:
        run.commit()  # after reading: a result may be an argument's old value
    return StepReply(values, CoreReport(run.decisions, run.kernels))


def _read(arena: Arena, program: RankProgram, value: int) -> np.ndarray:
    buffer = program.buffers[value]
    return arena.array(buffer.offsets[0], buffer.type.shape, buffer.type.numpy).copy()


class _CoreRun:
    """One step on one physical core; `device` simulates it at instruction fidelity, or is None."""

    def __init__(
        self, program: RankProgram, rank: int, core: int, arena: Arena, device: Core | None
    ) -> None:
        self.program, self.rank, self.core = program, rank, core
        self.device = device
        self.arrays = {
            value: arena.array(buffer.offsets[core], buffer.type.shape, buffer.type.numpy)
            for value, buffer in program.buffers.items()
        }
        self.decisions: Decisions = {}
        self.kernels = 0

    def block(self, steps: Sequence[Step]) -> Generator[Request, None, None]:
        for step in steps:
            match step:
                case RunKernel():
                    self.kernel(step)
                case PairBarrier():
                    yield Barrier()
                case StartCollective():
                    yield Barrier()
                    if self.core == 0:
                        yield self.exchange(step)
                        self.received()
                    yield Barrier()
                case SetRank(result=result, zero=zero):
                    self.arrays[result][...] = 0 if zero else self.rank
                case Move(pairs=pairs):
                    self.move(pairs)
                case While():
                    yield from self.loop(step)
                case Branch():
                    yield from self.branch(step)

    def kernel(self, step: RunKernel) -> None:
        part = step.parts[self.core]
        if part.empty:
            return
        self.kernels += 1
        if self.device is None or step.kernel.fallback:
            step.kernel.evaluate(self.arrays, part)
            return
        cost = step.kernel.run(self.device, self.arrays, part, step.residency[self.core])
        if cost.duration != step.costs[self.core].duration:
            raise AssertionError(
                f"{step.kernel.name} took {cost.duration} ps with data and"
                f" {step.costs[self.core].duration} ps without"
            )

    def exchange(self, step: StartCollective) -> Exchange:
        group = _group_of(self.rank, step.groups)
        n = len(group)
        source = pack(step.operation, self.arrays[step.operand], n)
        target = self.arrays[step.result]
        direct = in_order(step.operation, target.shape)
        landing = target.reshape(-1) if direct else np.empty(target.size, target.dtype)
        self.unpacked = None if direct else (step.operation, landing, target, n)
        return Exchange(
            key=step.key,
            collective=step.collective,
            schedule=step.schedule,
            group=group,
            me=group.index(self.rank),
            inputs=[source],
            outputs=[landing],
        )

    def received(self) -> None:
        """Puts a result that arrived rank by rank in the order of its array."""
        if self.unpacked is not None:
            unpack(*self.unpacked)

    def move(self, pairs: Sequence[tuple[int, int]]) -> None:
        """All sources are read before any target is written: loops may swap what they carry."""
        written = {self.address(target) for target, _ in pairs}
        values = [
            self.arrays[source].copy() if self.address(source) in written else self.arrays[source]
            for _, source in pairs
        ]
        for (target, _), value in zip(pairs, values, strict=True):
            if self.core == 0 or len(set(self.program.buffers[target].offsets)) > 1:
                self.arrays[target][...] = value

    def address(self, value: int) -> int:
        return self.program.buffers[value].offsets[self.core]

    def loop(self, step: While) -> Generator[Request, None, None]:
        trips = 0
        yield from self.block(step.condition)
        while bool(self.arrays[step.predicate]):
            yield from self.block(step.body)
            yield from self.block(step.condition)
            trips += 1
        self.decisions.setdefault(step.key, []).append(trips)

    def branch(self, step: Branch) -> Generator[Request, None, None]:
        index = int(self.arrays[step.index])
        if step.predicate:
            index = 0 if index else 1
        self.decisions.setdefault(step.key, []).append(index)
        count = len(step.branches)
        yield from self.block(step.branches[index if 0 <= index < count else count - 1])

    def commit(self) -> None:
        """The new training state becomes the arguments of the next step."""
        self.move(self.program.commit)


def _group_of(rank: int, groups: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    for group in groups:
        if rank in group:
            return group
    raise TrnsimError(f"rank {rank} is in no replica group of {groups}")


# -- the layout of collectives: one contiguous block for each rank of the group -----------------


def in_order(operation: Operation, shape: tuple[int, ...]) -> bool:
    """Whether the result of a collective is its blocks one after another in memory."""
    axis = _joined(operation)
    return axis is None or all(extent == 1 for extent in shape[:axis])


def _joined(operation: Operation) -> int | None:
    match operation.name:
        case "all_gather":
            return operation.attributes["dimension"]
        case "all_to_all":
            return operation.attributes["concat_dimension"]
    return None


def _cut(operation: Operation) -> int | None:
    match operation.name:
        case "reduce_scatter":
            return operation.attributes["dimension"]
        case "all_to_all":
            return operation.attributes["split_dimension"]
    return None


def pack(operation: Operation, array: np.ndarray, n: int) -> np.ndarray:
    """The operand as one 1-D array, block after block for the `n` ranks of the group."""
    axis = _cut(operation)
    if axis is None:
        return array.reshape(-1)
    return np.concatenate([block.reshape(-1) for block in np.split(array, n, axis=axis)])


def unpack(operation: Operation, landing: np.ndarray, target: np.ndarray, n: int) -> None:
    """Joins the blocks in `landing` along the result's axis, into `target`."""
    axis = _joined(operation)
    assert axis is not None
    shape = list(target.shape)
    shape[axis] //= n
    blocks = landing.reshape(n, *shape)
    target[...] = np.concatenate(list(blocks), axis=axis)


def place(arena: Arena, program: RankProgram, arrays: Mapping[int, np.ndarray]) -> None:
    """Writes values (arguments of a step) into their buffers; replicated ones into each copy."""
    for value, array in arrays.items():
        buffer = program.buffers[value]
        for offset in set(buffer.offsets):
            arena.array(offset, buffer.type.shape, buffer.type.numpy)[...] = array
