"""The data plane of a training program: its values on every rank, in this process.

Segments run by their kernels, collectives by the schedules that the plan's algorithm gives for the
groups on the machine. Stages take turns: one that waits for what another has not sent yet gives the
turn away, and if all wait, that is an error that names what each waits for.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from trnsim.collectives import choose
from trnsim.collectives.execute import execute as run_schedule
from trnsim.device.errors import CollectiveMismatch, TrnsimError
from trnsim.device.ops.ir import TensorType

from ..calls import Calls, describe
from ..cheapest import algorithm_for
from ..executor import in_order, pack, unpack
from . import wholes
from .layers import LOSS
from .plan import Plan
from .program import (
    Exchange,
    Free,
    Layers,
    Receive,
    Ref,
    Run,
    Send,
    StageProgram,
    Step,
    Task,
    TrainingProgram,
)

Key = tuple[str, int, int, int]
"""Name, layer, microbatch, chunk; -1 for what a value does not have one of each of."""
Waits = Generator[str, None, None]


@dataclass(frozen=True)
class Outcome:
    """Of one step: the mean loss, and whole arrays by name and layer (-1: outside of the layers).

    `gradients` are those of the mean loss; `parameters` are after the optimizer.
    """

    loss: float
    gradients: wholes.Wholes
    parameters: wholes.Wholes


def run_with_values(
    program: TrainingProgram,
    plan: Plan,
    batch: Mapping[str, np.ndarray],
    seed: int = 0,
    start: wholes.Wholes | None = None,
) -> Outcome:
    """One step on real values, all ranks.

    batch: `tokens` and `labels`, i32 [global batch, seq]. start: whole parameters by name (by
    default `wholes.start` with the seed). Raises CollectiveMismatch if stages wait for each other.
    """
    start = wholes.start(program, plan, seed) if start is None else start
    mail: Mail = {}
    stages = [_Stage(plan, stage, batch, start, seed, mail) for stage in program.stages]
    _take_turns(stages)
    for stage in stages:
        stage.check_ended()
    left = [key for key, sent in mail.items() if sent]
    if left:
        raise CollectiveMismatch(f"sent and never received: {left[0]}")
    return Outcome(
        loss=sum(stage.loss() for stage in stages),
        gradients=wholes.joined([stage.whole("gradient") for stage in stages]),
        parameters=wholes.joined([stage.whole("parameter") for stage in stages]),
    )


Mail = dict[tuple, list[list[np.ndarray]]]
"""(from stage, to stage, channel, microbatch) -> messages, one array per rank of the stage."""


def _take_turns(stages: "list[_Stage]") -> None:
    runs = {stage.program.stage: stage.run() for stage in stages}
    waits: dict[int, str] = {}
    while runs:
        before = {stage.program.stage: stage.done for stage in stages}
        for number, run in list(runs.items()):
            try:
                waits[number] = next(run)
            except StopIteration:
                del runs[number]
        if runs and all(before[s.program.stage] == s.done for s in stages):
            cycle = "; ".join(f"stage {number} waits for {waits[number]}" for number in runs)
            raise CollectiveMismatch(f"pipeline stages wait for each other: {cycle}")


@dataclass
class _Stage:
    """The ranks of one pipeline stage and their arrays."""

    plan: Plan
    program: StageProgram
    batch: Mapping[str, np.ndarray]
    start: wholes.Wholes
    seed: int
    mail: Mail
    arrays: list[dict[Key, np.ndarray]] = field(default_factory=list)
    done: int = 0  # steps

    def __post_init__(self) -> None:
        mesh = self.plan.mesh
        places = [mesh.coordinates(rank) for rank in range(mesh.size)]
        self.ranks = [r for r, at in enumerate(places) if at.get("pp", 0) == self.program.stage]
        self.places = [places[rank] for rank in self.ranks]
        self.row = {rank: i for i, rank in enumerate(self.ranks)}
        self.calls = Calls(self.plan.machine, self.plan.algorithm)
        self.layer, self.task = -1, self.program.tasks[0]
        self.arrays = [self._initial(at) for at in self.places]

    def _initial(self, at: Mapping[str, int]) -> dict[Key, np.ndarray]:
        found: dict[Key, np.ndarray] = {}
        for value in self.program.values.values():
            for layer in value.of(self._layers()):
                made = wholes.initial(self.plan, self.program, value, layer, at, self.start)
                if made is not None:
                    found[value.name, layer, -1, -1] = made
        for m in range(self.plan.microbatches):
            for name, array in wholes.inputs(self.plan, self.batch, m, at, self.seed).items():
                if name in self.program.values:
                    found[name, -1, m if self.program.values[name].micro else -1, -1] = array
        return found

    def _layers(self) -> list[int]:
        return [layer for chunk in self.program.layers for layer in chunk]

    # -- running -----------------------------------------------------------------------------------

    def run(self) -> Waits:
        """Run all tasks; yields what it waits for while that has not arrived."""
        for task in self.program.tasks:
            self.task = task
            yield from self.block(task.body)

    def block(self, steps: Sequence[Step]) -> Waits:
        for step in steps:
            match step:
                case Layers(layers=layers, body=body):
                    for layer in layers:
                        self.layer = layer
                        yield from self.block(body)
                case Receive():
                    yield from self.receive(step)
                case Run():
                    self.segment(step)
                case Exchange():
                    self.exchange(step)
                case Send():
                    self.mail.setdefault(self.channel(step), []).append(
                        [self.get(row, step.read).copy() for row in range(len(self.ranks))]
                    )
                case Free(values=values):
                    self.free(values)
            self.done += 1

    def channel(self, step: Send | Receive) -> tuple:
        ends = (self.program.stage, step.stage)
        ends = ends if isinstance(step, Send) else ends[::-1]
        return (*ends, step.channel, self.task.microbatch)

    def receive(self, step: Receive) -> Waits:
        key = self.channel(step)
        while not self.mail.get(key):
            yield f"{step.channel} of microbatch {self.task.microbatch} from stage {step.stage}"
        for row, array in enumerate(self.mail[key].pop(0)):
            self.put(row, step.write, array)

    def segment(self, step: Run) -> None:
        machine = self.plan.machine
        for row in range(len(self.ranks)):
            reads = [self.get(row, ref) for ref in step.reads]
            made = step.segment.run(reads, machine.chip, machine.lnc)
            for ref, array in zip(step.writes, made, strict=True):
                self.put(row, ref, array)

    def exchange(self, step: Exchange) -> None:
        groups = [g for g in step.groups(self.plan.mesh) if g[0] in self.row]
        n = len(groups[0])
        operand, result = step.types(self.program.values, n)
        collective = describe(step.operation, operand, result, n)
        site, table = self.calls.site, self.calls.table(tuple(groups))
        name = "policy" if self.plan.algorithm == "best" else self.plan.algorithm
        algorithm = algorithm_for(name, collective.kind)
        schedule = choose.plan(collective, table, site.fabric, algorithm, site.policy).schedule
        for group in groups:
            rows = [self.row[rank] for rank in group]
            inputs = [self.operand(row, step, operand, n) for row in rows]
            for row, landing in zip(rows, run_schedule(collective, schedule, inputs), strict=True):
                self.land(row, step, landing, result, n)

    def operand(self, row: int, step: Exchange, kind: TensorType, n: int) -> np.ndarray:
        if not step.flat:
            return pack(step.operation, self.get(row, step.reads[0]), n)
        return _flat([self.get(row, ref) for ref in step.reads], kind.size)

    def land(self, row: int, step: Exchange, landing: np.ndarray, kind: TensorType, n: int) -> None:
        if step.flat:
            at = 0
            for ref in step.writes:
                value = self.program.values[ref.name].type
                self.put(row, ref, landing[at : at + value.size].reshape(value.shape).copy())
                at += value.size
            return
        target = landing.reshape(kind.shape)
        if not in_order(step.operation, kind.shape):
            target = np.empty(kind.shape, landing.dtype)
            unpack(step.operation, landing, target, n)
        self.put(row, step.writes[0], target)

    # -- arrays ------------------------------------------------------------------------------------

    def key(self, ref: Ref) -> Key:
        value = self.program.values[ref.name]
        chunk = self.task.chunk if value.micro and not value.layered else -1
        if value.role == "batch":
            chunk = -1
        micro = self.task.microbatch if value.micro else -1
        return ref.name, self.layer + ref.shift if value.layered else -1, micro, chunk

    def get(self, row: int, ref: Ref) -> np.ndarray:
        key = self.key(ref)
        if key not in self.arrays[row]:
            raise TrnsimError(f"{_where(self.task)}: {key} is read before it is written")
        return self.arrays[row][key]

    def put(self, row: int, ref: Ref, array: np.ndarray) -> None:
        value = self.program.values[ref.name]
        if array.shape != value.type.shape or array.dtype != value.type.numpy:
            raise TrnsimError(
                f"{_where(self.task)}: {ref.name} is {value.type}, got {array.dtype}{array.shape}"
            )
        self.arrays[row][self.key(ref)] = array

    def free(self, values: Sequence[Ref]) -> None:
        for row in range(len(self.ranks)):
            for ref in values:
                if self.arrays[row].pop(self.key(ref), None) is None:
                    raise TrnsimError(
                        f"{_where(self.task)}: {self.key(ref)} ends, but is not there"
                    )

    # -- results -----------------------------------------------------------------------------------

    def loss(self) -> float:
        """The sum over ranks of their parts of the loss, one rank for each set of tp."""
        whole = [row for row, at in enumerate(self.places) if at.get("tp", 0) == 0]
        return float(
            sum(
                array
                for row in whole
                for key, array in self.arrays[row].items()
                if key[0] == "loss"
            )
        )

    def whole(self, what: wholes.What) -> wholes.Wholes:
        """Whole parameters or gradients of this stage."""
        return wholes.join(self.plan, self.program, what, self.places, self.arrays)

    def check_ended(self) -> None:
        """Raises TrnsimError if an activation or a buffer has not ended, but for the loss."""
        values = self.program.values
        held = [k for k in self.arrays[0] if values[k[0]].role in ("activation", "buffer")]
        held = [key for key in held if key[0] != LOSS]
        if held:
            raise TrnsimError(f"stage {self.program.stage}: never ended: {sorted(held)}")


def _flat(arrays: Sequence[np.ndarray], size: int) -> np.ndarray:
    joined = np.concatenate([array.reshape(-1) for array in arrays])
    return np.concatenate([joined, np.zeros(size - joined.size, joined.dtype)])


def _where(task: Task) -> str:
    return f"{task.kind} of microbatch {task.microbatch}, chunk {task.chunk}"
