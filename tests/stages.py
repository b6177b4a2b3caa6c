"""Training programs by hand, and prices that a test states."""

from dataclasses import dataclass, field

import numpy as np

from trnsim.cluster.instances import load_instance
from trnsim.cluster.machine import Machine
from trnsim.cluster.mesh import parse_mesh
from trnsim.cluster.overlap import Demand
from trnsim.cluster.placement import place
from trnsim.cluster.plans.prices import Prices, RunPrice, SendPrice
from trnsim.cluster.plans.program import (
    Exchange,
    Receive,
    Ref,
    Run,
    Send,
    StageProgram,
    Task,
    TrainingProgram,
    Value,
)
from trnsim.cluster.plans.schedules import parse_schedule
from trnsim.cluster.plans.segment import Segment
from trnsim.device.ops.ir import Block, Module, Operation, TensorType

F32 = TensorType((1024,), "f32")


def timed(name: str) -> Segment:
    """A segment without content, whose time `Stated` gives by its name."""
    return Segment(name, Module(name, (), Block((), (), ())))


def machine(mesh: str, instance: str = "trn2.48xlarge", nodes: int = 1, lnc: int = 2) -> Machine:
    """Ranks of a mesh in order on some nodes."""
    return Machine(place(load_instance(instance), parse_mesh(mesh), nodes=nodes, lnc=lnc))


@dataclass
class Stated:
    """Times in ps of segments by name; sends take (port, arrival)."""

    runs: dict[str, int]
    send: tuple[int, int] = (0, 0)
    demands: dict[str, Demand] = field(default_factory=dict)

    def prices(self, program: TrainingProgram, mesh: str, nodes: int = 1, **fields) -> Prices:
        """`Prices` with these in place of its own."""
        found = Prices(machine(mesh, nodes=nodes), program.codes, **fields)
        found.run = lambda segment: RunPrice(  # type: ignore[method-assign]
            self.runs[segment.name], self.demands.get(segment.name, Demand()), 0, 0, "tensor"
        )
        port, arrival = (np.array([time]) for time in self.send)
        found.send = lambda *_: SendPrice(port, arrival, 0)  # type: ignore[method-assign]
        return found


def collective(name: str, axes: tuple[str, ...], read: str, write: str, label: str, stream=0, **at):
    """An exchange of one value."""
    return Exchange(Operation(name, (), (), at), axes, (Ref(read),), (Ref(write),), label, stream)


def pipeline(schedule: str, stages: int, microbatches: int, runs: dict[str, Segment]):
    """A program of nothing but passes and the sends between them."""
    kind = parse_schedule(schedule)
    values = {name: Value(name, F32, "activation", micro=True) for name in ("x", "y", "dx", "dy")}
    made = []
    for stage in range(stages):
        tasks = []
        bodies: dict = {}
        for slot in kind.slots(stages, stage, microbatches):
            before = kind.before(stages, stage, slot.chunk)
            after = kind.after(stages, stage, slot.chunk)
            come, go = (before, after) if slot.kind == "forward" else (after, before)
            body: list = []
            if come and slot.kind != "weights":
                body.append(Receive(Ref("x"), come[0], slot.kind))
            body.append(Run(runs[slot.kind], (Ref("x"),), (Ref("y"),)))
            if go and slot.kind != "weights":
                body.append(Send(Ref("y"), go[0], slot.kind))
            shared = bodies.setdefault((slot.kind, slot.chunk), tuple(body))
            tasks.append(Task(slot.kind, shared, slot.microbatch, slot.chunk))
        made.append(StageProgram.of(stage, (range(1),) * kind.chunks, tasks, values))
    return TrainingProgram(schedule, tuple(made), microbatches, 0, 0)
