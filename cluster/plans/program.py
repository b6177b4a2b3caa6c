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

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from trnsim.device.ops.ir import Operation, TensorType

from ..mesh import Groups, Mesh
from .segment import Segment

Role = Literal["parameter", "gradient", "optimizer", "activation", "batch", "coordinate", "buffer"]
"""What a value is for: the breakdown of memory, and what is set before a step.

`parameter`, `optimizer` keep their values from step to step; `batch` is set for each microbatch
(`tokens`, `labels`, `positions`, `samples`); `coordinate` is set once: the rank's place on an axis
of the mesh (`tp.index`), the number of a layer (`layer`) or of the step (`step`), scalars i32.
"""


@dataclass(frozen=True, slots=True)
class Split:
    """How a rank's parameter is cut from the whole array: (axis, dimension) pairs.

    `copies` neighbouring ranks of the axis hold the same part (key and value heads). `sections` of
    a rank's extent are cut each for itself, along the last cut (queries, keys and values).
    """

    cuts: tuple[tuple[str, int], ...] = ()
    copies: int = 1
    sections: tuple[int, ...] = ()
    start: Literal["normal", "ones", "zeros"] = "normal"


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's part over `axes` of the flat values `parts`, padded to a multiple of the ranks."""

    parts: tuple[str, ...]
    axes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Value:
    """A declared array of a rank: `layered` is one for each layer, `micro` for each microbatch.

    A value of a microbatch that is not layered is also one for each chunk of the stage.
    `place` says which part of a parameter, of its gradient or of its optimizer state it is. `only`:
    layers of the model that have it, where not all layers are of one kind.
    """

    name: str
    type: TensorType
    role: Role
    layered: bool = False
    micro: bool = False
    place: Split | Share | None = None
    only: range | None = None

    def of(self, layers: Iterable[int]) -> list[int]:
        """Those of `layers` that have this value; -1 for a value that is not layered."""
        if not self.layered:
            return [-1]
        return [layer for layer in layers if self.only is None or layer in self.only]


@dataclass(frozen=True, slots=True)
class Ref:
    """A value by name; `shift` adds to the layer of the enclosing `Layers` loop (prefetching)."""

    name: str
    shift: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """Run a segment: `reads` are its arguments and `writes` its results, in order.

    `again`: the forward pass once more, in a backward pass that recomputes.
    """

    segment: Segment
    reads: tuple[Ref, ...]
    writes: tuple[Ref, ...]
    again: bool = False


@dataclass(frozen=True, slots=True)
class Exchange:
    """A collective over the groups of mesh `axes`, started when its operands are ready.

    `operation` is the StableHLO operator with its attributes, without replica groups. With `flat`,
    `reads` are one contiguous flat array (a gradient bucket), filled up to the group's shares,
    and `writes` are cut from the flat result. Readers of the result wait for it.
    `label` says what it is for ("gradients", "tensor parallel", ...). Pairs of a permute are
    positions in the group. With `span`, groups are of `span` neighbours on the one axis only.
    """

    operation: Operation
    axes: tuple[str, ...]
    reads: tuple[Ref, ...]
    writes: tuple[Ref, ...]
    label: str
    stream: int = 0
    span: int = 0
    flat: bool = False
    again: bool = False

    def types(self, values: Mapping[str, Value], ranks: int) -> tuple[TensorType, TensorType]:
        """Operand and result as the collective sees them, in a group of `ranks`."""
        read, write = values[self.reads[0].name].type, values[self.writes[0].name].type
        if not self.flat:
            return read, write
        count = sum(values[ref.name].type.size for ref in self.reads)
        if self.operation.name == "all_gather":
            return TensorType((count,), read.dtype), TensorType((count * ranks,), read.dtype)
        if self.operation.name == "reduce_scatter":
            return TensorType((write.size * ranks,), read.dtype), write
        whole = TensorType((count,), read.dtype)
        return whole, whole

    def groups(self, mesh: Mesh) -> Groups:
        """The replica groups over the whole mesh, pipeline stages included."""
        whole = mesh.groups(*self.axes)
        if not self.span:
            return whole
        return tuple(
            group[at : at + self.span] for group in whole for at in range(0, len(group), self.span)
        )


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


@dataclass(frozen=True, eq=False, slots=True)
class StageCode:
    """What the tasks of a pipeline stage are made of: different bodies over one set of values.

    `layers` by chunk, as numbers in the model. Steps that differ in their numbers of microbatches
    alone have the same object, so that what is found out about it is found out once.
    """

    stage: int
    layers: tuple[range, ...]
    bodies: tuple[tuple[Step, ...], ...]
    values: dict[str, Value]

    def walk(self) -> Iterator[Step]:
        """Every distinct step once, loops included."""
        for body in self.bodies:
            yield from _walk(body)


@dataclass(frozen=True, slots=True)
class StageProgram:
    """What the ranks of one pipeline stage run: tasks whose bodies are those of `code`."""

    code: StageCode
    tasks: tuple[Task, ...]

    @classmethod
    def of(
        cls,
        stage: int,
        layers: tuple[range, ...],
        tasks: Sequence[Task],
        values: dict[str, Value],
    ) -> "StageProgram":
        """A program of its own code."""
        bodies = {id(task.body): task.body for task in tasks}
        return cls(StageCode(stage, layers, tuple(bodies.values()), values), tuple(tasks))

    @property
    def stage(self) -> int:
        """Its number."""
        return self.code.stage

    @property
    def layers(self) -> tuple[range, ...]:
        """Layers of each chunk."""
        return self.code.layers

    @property
    def values(self) -> dict[str, Value]:
        """Declared values by name."""
        return self.code.values

    def walk(self) -> Iterator[Step]:
        """Every distinct step once, loops included."""
        return self.code.walk()


@dataclass(frozen=True, slots=True)
class TrainingProgram:
    """One step of training: a program per stage; `notes` are assumptions to report."""

    name: str
    stages: tuple[StageProgram, ...]
    microbatches: int
    flops: int  # of the model per step and job, as MFU counts them
    tokens: int  # per step, whole job
    notes: tuple[str, ...] = field(default=())

    @property
    def codes(self) -> tuple[StageCode, ...]:
        """Of all stages."""
        return tuple(stage.code for stage in self.stages)


def _walk(steps: "tuple[Step, ...]") -> Iterator[Step]:
    for step in steps:
        yield step
        if isinstance(step, Layers):
            yield from _walk(step.body)
