"""From a plan to the program of its step: what every stage runs, task by task."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import jax.numpy as jnp

from trnsim.device.ops.ir import TensorType

from . import states
from .bodies import BOUNDARY, LOSS, Body, Passes, at, passes
from .layers import Unit, dense_layer, embedding, head
from .plan import Plan
from .program import (
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
    Value,
)
from .schedules import Slot
from .segment import segment
from .states import Bucket, buckets
from .tape import cotangent

FORWARD, BACKWARD, TIED = "forward", "backward", "tied embedding"


def build(plan: Plan) -> TrainingProgram:
    """One step of a plan: forward and backward of every microbatch, gradients, optimizer."""
    parts = _Parts(plan)
    return TrainingProgram(
        name=plan.model.name,
        stages=tuple(_Stage(plan, parts, stage).program() for stage in range(plan.pp)),
        microbatches=plan.microbatches,
        flops=plan.flops,
        tokens=plan.tokens,
        notes=plan.notes,
    )


@dataclass(frozen=True)
class Part:
    """A unit with the bodies of its passes and its buckets."""

    unit: Unit
    passes: Passes
    buckets: tuple[Bucket, ...]

    @cached_property
    def values(self) -> list[Value]:
        """Everything that the unit declares."""
        return [*self.passes.values, *(v for b in self.buckets for v in states.values(b))]

    @cached_property
    def fsdp(self) -> tuple[Bucket, ...]:
        """Buckets that are gathered before use."""
        return tuple(bucket for bucket in self.buckets if bucket.kind == "fsdp")

    def gather(self, shift: int = 0) -> list[Step]:
        """The parameters of an FSDP unit."""
        return [states.gather(bucket, shift) for bucket in self.fsdp]

    def drop(self) -> list[Step]:
        """The end of gathered parameters."""
        names = [name for bucket in self.fsdp for name in bucket.names]
        return [Free(tuple(map(Ref, names)))] if names else []

    def reduce(self, *, last: bool, shift: int = 0) -> list[Step]:
        """Exchange gradients: of FSDP in every microbatch, others with the last one."""
        found: list[Step] = []
        for bucket in self.buckets:
            if last or bucket.kind == "fsdp":
                found += states.reduce(bucket, shift)
            if bucket.kind == "fsdp":
                found.append(Free(tuple(Ref(name, shift) for name in bucket.gradients)))
        return found

    def clear(self) -> list[Step]:
        """Gradients to zero."""
        return [states.clear(bucket) for bucket in self.buckets]

    def update(self) -> list[Step]:
        """The optimizer."""
        return [step for bucket in self.buckets for step in states.update(bucket)]


class _Parts:
    """The units of a plan, which stages share."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        first = embedding(plan)
        self.embedding = self.part(first)
        self.table = next(p for p in first.parameters if p.name == "embedding.table")
        self.layer = self.part(dense_layer(plan))
        self.head = self.part(head(plan, self.table))

    def part(self, unit: Unit) -> Part:
        plan = self.plan
        made = passes(
            unit,
            unit.result,
            split=plan.schedule.splits_backward,
            full=plan.recompute == "full" and unit.layered,
        )
        return Part(unit, made, buckets(plan, unit))

    def kinds(self, layers: range) -> list[tuple[range, Part]]:
        """Consecutive layers of one kind."""
        return [(layers, self.layer)]


@dataclass
class _Stage:
    """Writes the program of one stage."""

    plan: Plan
    parts: _Parts
    stage: int
    bodies: dict[tuple, Body] = field(default_factory=dict)

    def program(self) -> StageProgram:
        plan = self.plan
        slots = plan.schedule.slots(plan.pp, self.stage, plan.microbatches)
        tasks = [Task("gradients", tuple(self.outside("clear")))]
        tasks += [
            Task(s.kind, self.body(s, self.last(s, slots)), s.microbatch, s.chunk) for s in slots
        ]
        tasks.append(Task("optimizer", tuple(self.outside("update"))))
        return StageProgram(self.stage, self.layers, tuple(tasks), self.values())

    @property
    def layers(self) -> tuple[range, ...]:
        return self.plan.stage_layers[self.stage]

    def last(self, slot: Slot, slots: Sequence[Slot]) -> bool:
        """Whether the gradients of the chunk are complete after this pass."""
        final = "weights" if self.plan.schedule.splits_backward else "backward"
        same = [s for s in slots if s.kind == final and s.chunk == slot.chunk]
        return slot == same[-1]

    def first_part(self, chunk: int) -> bool:
        """Whether the chunk starts with the embedding."""
        return self.plan.schedule.before(self.plan.pp, self.stage, chunk) is None

    def last_part(self, chunk: int) -> bool:
        """Whether the chunk ends with the loss."""
        return self.plan.schedule.after(self.plan.pp, self.stage, chunk) is None

    def body(self, slot: Slot, last: bool) -> Body:
        """The body of a pass; the same object for all microbatches that do the same."""
        key = (slot.kind, slot.chunk, last)
        if key not in self.bodies:
            make = {"forward": self.forward, "backward": self.backward, "weights": self.weights}
            self.bodies[key] = tuple(make[slot.kind](slot.chunk, last))
        return self.bodies[key]

    def forward(self, chunk: int, last: bool) -> Iterator[Step]:
        layers, parts = self.layers[chunk], self.parts
        if self.first_part(chunk):
            first = parts.embedding
            yield at(layers.start, *first.gather(), *first.passes.forward, *first.drop())
        else:
            yield at(layers.start, self.receive(chunk, BOUNDARY, FORWARD))
        for kind, part in parts.kinds(layers):
            yield from self.loop(kind, part, part.passes.forward, 1)
        if self.last_part(chunk):
            end = parts.head
            yield at(layers.stop, *end.gather(), *end.passes.forward, *end.drop())
        else:
            x = Ref(BOUNDARY)
            yield at(layers.stop, self.send(chunk, BOUNDARY, FORWARD), Free((x,)))

    def backward(self, chunk: int, last: bool) -> Iterator[Step]:
        layers, parts, x = self.layers[chunk], self.parts, cotangent(BOUNDARY)
        split = self.plan.schedule.splits_backward
        if self.last_part(chunk):
            end = parts.head
            seed = Run(segment(_one, ()), (), (Ref(cotangent(LOSS)),))
            steps = (*end.gather(), seed, *end.passes.backward, *end.drop())
            yield at(layers.stop, *steps, *([] if split else end.reduce(last=last)))
        else:
            yield at(layers.stop, self.receive(chunk, x, BACKWARD))
        for kind, part in reversed(parts.kinds(layers)):
            yield from self.loop(kind, part, part.passes.backward, -1, None if split else last)
        if self.first_part(chunk):
            first = parts.embedding
            steps = first.passes.backward
            end = [] if split else [Free((Ref(x),)), *first.reduce(last=last)]
            yield at(layers.start, *steps, *end)
        else:
            yield at(layers.start, self.send(chunk, x, BACKWARD), Free((Ref(x),)))

    def weights(self, chunk: int, last: bool) -> Iterator[Step]:
        layers, parts = self.layers[chunk], self.parts
        if self.last_part(chunk):
            end = parts.head
            yield at(layers.stop, *end.passes.weights, *end.reduce(last=last))
        for kind, part in reversed(parts.kinds(layers)):
            yield from self.loop(kind, part, part.passes.weights, -1, last)
        if self.first_part(chunk):
            first = parts.embedding
            yield at(layers.start, *first.passes.weights, *first.reduce(last=last))

    def loop(
        self, layers: range, part: Part, body: Body, step: int, last: bool | None = None
    ) -> Iterator[Step]:
        """The loop over layers of one kind, upwards or downwards.

        `last`: exchange gradients as in the last microbatch or another; None: leave them.
        """
        order = layers if step > 0 else layers[::-1]
        found = [*part.gather(), *body, *part.drop()]
        if last is not None:
            found += part.reduce(last=last)
        if order:
            yield Layers(order, tuple(found))

    def send(self, chunk: int, name: str, channel: str) -> Send:
        schedule, pp = self.plan.schedule, self.plan.pp
        other = schedule.after if channel == FORWARD else schedule.before
        stage, there = other(pp, self.stage, chunk) or (0, 0)
        return Send(Ref(name), stage, f"{channel} {max(chunk, there)}")

    def receive(self, chunk: int, name: str, channel: str) -> Receive:
        schedule, pp = self.plan.schedule, self.plan.pp
        other = schedule.before if channel == FORWARD else schedule.after
        stage, there = other(pp, self.stage, chunk) or (0, 0)
        return Receive(Ref(name), stage, f"{channel} {max(chunk, there)}")

    def outside(self, what: str) -> Iterator[Step]:
        """What every part of the stage does once per step: `clear` or `update`."""
        for chunk, layers in enumerate(self.layers):
            if self.first_part(chunk):
                yield at(layers.start, *getattr(self.parts.embedding, what)())
            for kind, part in self.parts.kinds(layers):
                yield Layers(kind, tuple(getattr(part, what)()))
            if self.last_part(chunk):
                yield at(layers.stop, *getattr(self.parts.head, what)())

    def values(self) -> dict[str, Value]:
        """Every value that the stage's steps refer to."""
        parts = [self.parts.layer]
        chunks = range(len(self.layers))
        parts += [self.parts.embedding] * any(map(self.first_part, chunks))
        parts += [self.parts.head] * any(map(self.last_part, chunks))
        found = {v.name: v for v in _common(self.plan, self.parts.layer.unit)}
        for part in parts:
            found |= {value.name: value for value in part.values}
        return found


def _common(plan: Plan, layer: Unit) -> Iterator[Value]:
    """Inputs of the step, and the hidden states between layers."""
    kinds = layer.tape.types
    for name in ("tokens", "labels", "samples"):
        yield Value(name, kinds[name], "batch", micro=True)
    for name in ("positions", "shard_positions"):
        yield Value(name, kinds[name], "batch")
    yield Value("layer", kinds["layer"], "coordinate", layered=True)
    yield Value("tp.index", kinds["tp.index"], "coordinate")
    yield Value("step", TensorType((), "i32"), "coordinate")
    yield Value(BOUNDARY, kinds[BOUNDARY], "activation", layered=True, micro=True)
    yield Value(LOSS, TensorType((), "f32"), "activation", micro=True)
    yield Value(cotangent(LOSS), TensorType((), "f32"), "buffer")
    late = plan.schedule.splits_backward
    kind = kinds[BOUNDARY]
    yield Value(cotangent(BOUNDARY), kind, "activation" if late else "buffer", late, late)


def _one() -> jnp.ndarray:
    return jnp.ones((), jnp.float32)
