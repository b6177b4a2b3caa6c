"""From a plan to the program of its step: what every stage runs, task by task."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache

import jax.numpy as jnp

from trnsim.device.ops.ir import TensorType

from .bodies import Passes, at, passes
from .layers import (
    BOUNDARY,
    LOSS,
    ROTATION,
    TABLE,
    Unit,
    dense_layer,
    embedding,
    expert_layer,
    head,
)
from .parts import Part, Pass, staggered
from .pieces import rotation
from .plan import Plan
from .program import (
    Free,
    Layers,
    Receive,
    Ref,
    Run,
    Send,
    StageCode,
    StageProgram,
    Step,
    Task,
    TrainingProgram,
    Value,
)
from .segment import segment
from .states import Bucket, buckets
from .tape import cotangent

FORWARD, BACKWARD, TIED = "forward", "backward", "tied embedding"


def build(plan: Plan) -> TrainingProgram:
    """One step of a plan: forward and backward of every microbatch, gradients, optimizer.

    Plans that differ in their batch alone get programs of the same code.
    """
    return TrainingProgram(
        name=plan.model.name,
        stages=tuple(stage.program(plan.microbatches) for stage in _written(_Shape.of(plan))),
        microbatches=plan.microbatches,
        flops=plan.flops,
        tokens=plan.tokens,
        notes=(*plan.notes, *_notes(plan)),
    )


@dataclass(frozen=True)
class _Shape:
    """A plan as far as code depends on it: all of it but the batch, beyond one microbatch."""

    key: tuple
    several: bool
    plan: Plan = field(compare=False)

    @classmethod
    def of(cls, plan: Plan) -> "_Shape":
        key = tuple(getattr(plan, f.name) for f in fields(plan) if f.name != "global_batch")
        return cls(key, plan.microbatches > 1, plan)


@lru_cache(maxsize=4)
def _written(shape: _Shape) -> "tuple[_Stage, ...]":
    parts = _Parts(shape.plan)
    return tuple(_Stage(shape.plan, parts, n, shape.several) for n in range(shape.plan.pp))


def _notes(plan: Plan) -> Iterator[str]:
    """What the program assumes, in full sentences."""
    exchanged = plan.dtype if plan.zero == "fsdp" else "f32"
    yield f"Gradients add up in f32 and are exchanged in {exchanged}; they are not clipped."
    if plan.model.post_norm:
        yield "The loss is that of a label for every token; there is no next-sentence loss."


class _Parts:
    """The parts of a plan's model, which stages share."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        first = embedding(plan)
        self.embedding = self.part(first)
        self.table = next(p for p in first.parameters if p.name == TABLE)
        model = plan.model
        dense, mixed = model.layers - model.expert_layers, range(model.layers)
        both = [(range(dense), dense_layer), (mixed[dense:], expert_layer)]
        made = [(layers, unit(plan)) for layers, unit in both if layers]
        self.types = made[0][1].tape.types
        self.layers = [(layers, self.part(unit, layers)) for layers, unit in made]
        tied = [b for b in self.embedding.buckets if self.table in b.parameters]
        self.tied: tuple[Bucket, ...] = tuple(tied) if plan.model.tied else ()
        self.head = replace(self.part(head(plan, self.table)), borrowed=self.tied)

    def part(self, unit: Unit, layers: range | None = None) -> Part:
        plan = self.plan
        made = passes(
            unit,
            unit.result,
            split=plan.schedule.splits_backward,
            full=plan.recompute == "full" and unit.layered,
        )
        return Part(unit.name, made, buckets(plan, unit), layers=layers)

    def kinds(self, layers: range) -> list[tuple[range, Part]]:
        """Consecutive layers of one kind."""
        found = []
        for whole, part in self.layers:
            mine = range(max(layers.start, whole.start), min(layers.stop, whole.stop))
            found += [(mine, part)] if mine else []
        return found


class _Stage:
    """Writes the code of one stage, for one microbatch or several."""

    def __init__(self, plan: Plan, parts: _Parts, stage: int, several: bool) -> None:
        self.plan, self.parts, self.stage, self.several = plan, parts, stage, several
        self.layers = plan.stage_layers[stage]
        self.split = plan.schedule.splits_backward
        chunks = range(len(self.layers))
        self.starts = any(map(self.first_part, chunks))
        self.ends = any(map(self.last_part, chunks))
        self.values = self.declared()
        self.bodies = {
            (kind, chunk, last): tuple(self.body(kind, chunk, last))
            for kind, chunk, last in self.passes()
        }
        self.first = Task("gradients", (*self.rotation(), *self.outside(Part.clear)))
        self.last = tuple(self.after_microbatches())
        ends = (self.first, *self.last)
        self.code = StageCode(
            stage, self.layers, (*self.bodies.values(), *(task.body for task in ends)), self.values
        )

    def passes(self) -> Iterator[tuple[str, int, bool]]:
        """(kind, chunk, whether it ends the gradients of the chunk) of all bodies."""
        lasts = (False, True) if self.several else (True,)
        for chunk in range(len(self.layers)):
            yield "forward", chunk, False
            if self.split:
                yield "backward", chunk, False
            yield from ((self.ending, chunk, last) for last in lasts)

    @property
    def ending(self) -> Pass:
        """The pass after which the gradients of a microbatch are there."""
        return "weights" if self.split else "backward"

    def program(self, microbatches: int) -> StageProgram:
        """All tasks of a step."""
        slots = self.plan.schedule.slots(self.plan.pp, self.stage, microbatches)
        final = {slot.chunk: slot for slot in slots if slot.kind == self.ending}
        tasks = [
            Task(s.kind, self.bodies[s.kind, s.chunk, s is final[s.chunk]], s.microbatch, s.chunk)
            for s in slots
        ]
        return StageProgram(self.code, (self.first, *tasks, *self.last))

    def after_microbatches(self) -> Iterator[Task]:
        """What comes after all passes."""
        if self.shares_table:
            yield Task("gradients", tuple(self.exchange_table()))
        ended = [Free(tuple(map(Ref, ROTATION)))] if self.plan.rotated else []
        yield Task("optimizer", (*ended, *self.outside(Part.update)))

    def rotation(self) -> Iterator[Step]:
        """The tables of rotary embedding."""
        plan = self.plan
        if plan.rotated:
            function = rotation(plan.model.rope_theta, plan.rotated, plan.model.head_dim)
            tables = segment(function, (self.parts.types["positions"],))
            yield Run(tables, (Ref("positions"),), tuple(map(Ref, ROTATION)))

    @property
    def shares_table(self) -> bool:
        """Whether the first and the last stage have a copy of the tied embedding each."""
        return bool(self.parts.tied) and self.starts != self.ends

    def first_part(self, chunk: int) -> bool:
        """Whether the chunk starts with the embedding."""
        return self.plan.schedule.before(self.plan.pp, self.stage, chunk) is None

    def last_part(self, chunk: int) -> bool:
        """Whether the chunk ends with the loss."""
        return self.plan.schedule.after(self.plan.pp, self.stage, chunk) is None

    def body(self, kind: str, chunk: int, last: bool) -> Iterator[Step]:
        """The body of a pass."""
        match kind:
            case "forward":
                return self.forward(chunk)
            case "backward":
                return self.backward(chunk, last)
        return self.weights(chunk, last)

    def forward(self, chunk: int) -> Iterator[Step]:
        layers, parts = self.layers[chunk], self.parts
        inner = [
            loop for kind, part in parts.kinds(layers) for loop in self.loops(kind, part, "forward")
        ]
        yield from inner[:1]
        if self.first_part(chunk):
            yield at(layers.start, *parts.embedding.around("forward"))
        else:
            yield at(layers.start, self.receive(chunk, BOUNDARY, FORWARD))
        yield from inner[1:]
        if self.last_part(chunk):
            yield at(layers.stop, *parts.head.around("forward"))
        else:
            sent = self.send(chunk, BOUNDARY, FORWARD)
            yield at(layers.stop, sent, Free((Ref(BOUNDARY),)))

    def backward(self, chunk: int, last: bool) -> Iterator[Step]:
        layers, parts, x = self.layers[chunk], self.parts, cotangent(BOUNDARY)
        after = None if self.split else last
        inner = [
            loop
            for kind, part in reversed(parts.kinds(layers))
            for loop in self.loops(kind[::-1], part, "backward", after)
        ]
        yield from inner[:1]
        if self.last_part(chunk):
            seed = Run(segment(_one, ()), (), (Ref(cotangent(LOSS)),))
            ended = Free(seed.writes)
            yield at(layers.stop, seed, *parts.head.around("backward"), ended)
            yield from self.reduced(layers.stop, parts.head, after)
        else:
            yield at(layers.stop, self.receive(chunk, x, BACKWARD))
        yield from inner[1:]
        if self.first_part(chunk):
            yield at(layers.start, *parts.embedding.around("backward"))
            yield from self.reduced(layers.start, parts.embedding, after)
        else:
            yield at(layers.start, self.send(chunk, x, BACKWARD), Free((Ref(x),)))

    def weights(self, chunk: int, last: bool) -> Iterator[Step]:
        layers, parts = self.layers[chunk], self.parts
        inner = [
            loop
            for kind, part in reversed(parts.kinds(layers))
            for loop in self.loops(kind[::-1], part, "weights", last)
        ]
        yield from inner[:1]
        if self.last_part(chunk):
            yield at(layers.stop, *parts.head.around("weights"))
            yield from self.reduced(layers.stop, parts.head, last)
        yield from inner[1:]
        if self.first_part(chunk):
            yield at(layers.start, *parts.embedding.around("weights"))
            yield from self.reduced(layers.start, parts.embedding, last)

    def loops(self, order: range, part: Part, which: Pass, last: bool | None = None) -> list[Step]:
        """The loop over layers of one kind: first what comes before it.

        `last`: exchange gradients as in the last microbatch or another; None: leave them.
        """
        ahead = self.plan.early_all_gather
        behind = self.plan.late_reduce_scatter
        return staggered(order, part, which, last, ahead=ahead, behind=behind)

    def reduced(self, layer: int, part: Part, last: bool | None) -> Iterator[Step]:
        """The exchange of gradients of a part outside of the layers."""
        if last is None:
            return
        keep = self.parts.tied if self.shares_table else ()
        steps = [*part.scatter(), *part.collect(), *(part.reduce(without=keep) if last else ())]
        if part is self.parts.head and self.shares_table:
            steps += [*self.copy.scatter(), *self.copy.collect()]
        if steps:
            yield at(layer, *steps)

    @property
    def copy(self) -> Part:
        """The embedding that the last stage has for the loss."""
        nothing = Passes((), (), (), ())
        return Part("embedding", nothing, self.parts.tied)

    @property
    def table_gradient(self) -> str:
        """The value that the copies of the tied embedding exchange."""
        bucket = next(iter(self.parts.tied))
        return f"{bucket.name}.gradient" if bucket.kind == "fsdp" else bucket.gradients[0]

    def exchange_table(self) -> Iterator[Step]:
        """Both copies of the tied embedding get the sum of their gradients."""
        name = self.table_gradient
        other, mine = Ref(f"{name}.other"), Ref(name)
        stage = self.plan.pp - 1 if self.starts else 0
        kind = self.values[name].type
        yield Send(mine, stage, TIED)
        yield Receive(other, stage, TIED)
        order = (mine, other) if self.starts else (other, mine)
        yield Run(segment(_sum, (kind, kind)), order, (mine,))
        yield Free((other,))
        yield from self.copy.reduce()

    def send(self, chunk: int, name: str, channel: str) -> Send:
        stage, hop = self.peer(chunk, channel, forward=channel == FORWARD)
        return Send(Ref(name), stage, hop)

    def receive(self, chunk: int, name: str, channel: str) -> Receive:
        stage, hop = self.peer(chunk, channel, forward=channel == BACKWARD)
        return Receive(Ref(name), stage, hop)

    def peer(self, chunk: int, channel: str, *, forward: bool) -> tuple[int, str]:
        """The neighbouring stage, and the channel between its chunk and this one."""
        schedule = self.plan.schedule
        neighbour = (schedule.after if forward else schedule.before)(
            self.plan.pp, self.stage, chunk
        )
        assert neighbour is not None
        return neighbour[0], f"{channel} {max(chunk, neighbour[1])}"

    def outside(self, what: Callable[[Part], list[Step]]) -> Iterator[Step]:
        """What every part of the stage does once per step: `clear` or `update`."""
        for chunk, layers in enumerate(self.layers):
            if self.first_part(chunk):
                yield at(layers.start, *what(self.parts.embedding))
            for kind, part in self.parts.kinds(layers):
                yield Layers(kind, tuple(what(part)))
            if self.last_part(chunk):
                yield at(layers.stop, *what(self.parts.head))
                if self.shares_table:
                    yield at(layers.stop, *what(self.copy))

    def declared(self) -> dict[str, Value]:
        """Every value that the stage's steps refer to."""
        parts = [part for layers in self.layers for _, part in self.parts.kinds(layers)]
        parts += [self.parts.embedding] * self.starts
        parts += [self.parts.head] * self.ends
        parts += [self.copy] * (self.ends and self.shares_table)
        found = {v.name: v for v in _common(self.plan, self.parts.types)}
        for part in parts:
            found |= {value.name: value for value in part.values}
        if self.shares_table:
            name = self.table_gradient
            found[f"{name}.other"] = Value(f"{name}.other", found[name].type, "buffer")
        return found


def _common(plan: Plan, types: Mapping[str, TensorType]) -> Iterator[Value]:
    """Inputs of the step, and the hidden states between layers."""
    for name in ("tokens", "labels", "samples"):
        yield Value(name, types[name], "batch", micro=True)
    for name in ("positions", "shard_positions"):
        yield Value(name, types[name], "batch")
    yield Value("layer", types["layer"], "coordinate", layered=True)
    for name in ("tp.index", "cp.index"):
        yield Value(name, types[name], "coordinate")
    yield Value("step", TensorType((), "i32"), "coordinate")
    for name in ROTATION:
        yield Value(name, types[name], "buffer")
    yield Value(LOSS, TensorType((), "f32"), "activation", micro=True)
    yield Value(cotangent(LOSS), TensorType((), "f32"), "buffer")
    yield Value(BOUNDARY, types[BOUNDARY], "activation", layered=True, micro=True)
    late = plan.schedule.splits_backward
    role = "activation" if late else "buffer"
    yield Value(cotangent(BOUNDARY), types[BOUNDARY], role, layered=True, micro=late)


def _one() -> jnp.ndarray:
    return jnp.ones((), jnp.float32)


def _sum(one: jnp.ndarray, other: jnp.ndarray) -> jnp.ndarray:
    return one + other
