"""What each rank of a training plan does in one step, as data.

A `TrainingProgram` has one `StageProgram` for each pipeline stage; all ranks of a stage share it.
A stage runs tasks (forward, backward, weight gradients, gradient exchange, optimizer) in order; a
task's body is a list of steps over named values. `execute.py` computes values with it, `clocks.py`
advances virtual time over it, `memory.py` reads the life of values off it.

Arrays are named, not numbered: a step refers to `Ref(name)`, and which array that is follows from
the value's declaration: one per rank, one per layer, one per microbatch, or one per both. Bodies
are shared by all microbatches and loop bodies by all layers, so that a step of 80 layers and 64
microbatches is a few dozen objects.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from trnsim.device.ops.ir import Operation, TensorType

from .segment import Segment

Role = Literal["parameter", "gradient", "optimizer", "activation", "batch", "coordinate", "buffer"]
"""What a value is for: the breakdown of memory, and what is set before a step.

`parameter`, `optimizer` keep their values from step to step; `batch` is set for each microbatch;
`coordinate` is the rank's place on an axis of the mesh (`tp.index`), a scalar i32.
"""


@dataclass(frozen=True, slots=True)
class Value:
    """A declared array of a rank: `layered` is one for each layer, `micro` for each microbatch.

    A value of a microbatch that is not layered is also one for each chunk of the stage.
    """

    name: str
    type: TensorType
    role: Role
    layered: bool = False
    micro: bool = False


@dataclass(frozen=True, slots=True)
class Ref:
    """A value by name; `shift` adds to the layer of the enclosing `Layers` loop (prefetching)."""

    name: str
    shift: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """Run a segment: `reads` are its arguments and `writes` its results, in order."""

    segment: Segment
    reads: tuple[Ref, ...]
    writes: tuple[Ref, ...]


@dataclass(frozen=True, slots=True)
class Exchange:
    """A collective over the groups of mesh `axes`, started when its operands are ready.

    `operation` is the StableHLO operator with its attributes, without replica groups. Several
    `reads` count as one contiguous flat array (a gradient bucket), padded to a multiple of the
    group; several `writes` are cut from the flat result. Readers of the result wait for it.
    `label` says what it is for ("gradients", "tensor parallel", ...).
    """

    operation: Operation
    axes: tuple[str, ...]
    reads: tuple[Ref, ...]
    writes: tuple[Ref, ...]
    label: str
    stream: int = 0


@dataclass(frozen=True, slots=True)
class Send:
    """Send a value to the rank of the same place in another pipeline stage, without waiting.

    The receiver names the same `channel`, microbatch and stages.
    """

    read: Ref
    stage: int
    channel: str


@dataclass(frozen=True, slots=True)
class Receive:
    """Receive into a value what the rank of the same place in `stage` sends on `channel`."""

    write: Ref
    stage: int
    channel: str


@dataclass(frozen=True, slots=True)
class Free:
    """Values that end here."""

    values: tuple[Ref, ...]


@dataclass(frozen=True, slots=True)
class Layers:
    """Run `body` for each of `layers` (numbers in the whole model), in that order."""

    layers: range
    body: "tuple[Step, ...]"


Step = Run | Exchange | Send | Receive | Free | Layers

Pass = Literal["forward", "backward", "weights", "gradients", "optimizer"]


@dataclass(frozen=True, slots=True)
class Task:
    """One pass of a stage; `microbatch` is -1 where it is not of one microbatch."""

    kind: Pass
    body: tuple[Step, ...]
    microbatch: int = -1
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class StageProgram:
    """What the ranks of one pipeline stage run. `layers` by chunk, as numbers in the model."""

    stage: int
    layers: tuple[range, ...]
    tasks: tuple[Task, ...]
    values: dict[str, Value]

    def walk(self) -> Iterator[Step]:
        """Every distinct step once, loops included, in program order."""
        seen: set[int] = set()
        for task in self.tasks:
            if id(task.body) not in seen:
                seen.add(id(task.body))
                yield from _walk(task.body)


@dataclass(frozen=True, slots=True)
class TrainingProgram:
    """One step of training: a program per stage; `notes` are assumptions to report."""

    name: str
    stages: tuple[StageProgram, ...]
    microbatches: int
    flops: int  # of the model per step and job, as MFU counts them
    tokens: int  # per step, whole job
    notes: tuple[str, ...] = field(default=())


def _walk(steps: "tuple[Step, ...]") -> Iterator[Step]:
    for step in steps:
        yield step
        if isinstance(step, Layers):
            yield from _walk(step.body)
