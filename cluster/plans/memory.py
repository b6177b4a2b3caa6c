"""HBM that a rank of each stage needs: values followed through the tasks, from write to free.

Parameters, optimizer states, batches and coordinates are there throughout. Everything else lives
from its first write until it is freed, or to the end of the step. While a segment runs, it holds
its compiled kernels' temporaries and constants besides.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from trnsim.device.chip import Chip

from ..machine import Machine
from .program import Exchange, Free, Layers, Receive, Ref, Run, StageProgram, Step, Task
from .segment import Segment

USES = {
    "parameter": "parameters",
    "gradient": "gradients",
    "optimizer": "optimizer",
    "activation": "activations",
    "buffer": "buffers",
    "batch": "batch",
    "coordinate": "batch",
}
"""Role of a value -> the line of the breakdown that it counts in."""
LINES = (*dict.fromkeys(USES.values()), "workspace")
WORKSPACE = LINES.index("workspace")
ALWAYS = ("parameter", "optimizer", "batch", "coordinate")

Name = tuple[str, int | None, int | None]
"""A value of a rank but for its microbatch: (name, layer, chunk)."""
Names = frozenset[Name]
NOTHING: Names = frozenset()


@dataclass(frozen=True)
class Memory:
    """HBM of a rank of a stage at its peak: bytes by use, and in which task that is."""

    stage: int
    uses: dict[str, int]
    at: str

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        return sum(self.uses.values())

    @property
    def largest(self) -> list[tuple[str, int]]:
        """The uses, the largest first."""
        return sorted(self.uses.items(), key=lambda item: -item[1])


@dataclass(frozen=True, slots=True)
class _Effect:
    """What a task does to the values of all microbatches (`common`) and of its own (`mine`).

    peak: int64[LINES] bytes of both, with workspace, where that is largest.
    """

    peak: np.ndarray
    top: int  # the sum of peak
    common: Names
    mine: Names


def memory(stage: StageProgram, machine: Machine) -> Memory:
    """The peak of a rank of one stage, runtime included."""
    return _Walk(stage, machine).peak()


class _Place(NamedTuple):
    """A reference of a step, looked up: which names it stands for, and what one of them takes."""

    name: str
    shift: int | None  # None: not layered
    chunked: bool
    own: bool  # of the task's microbatch
    line: int
    nbytes: int


class _Change(NamedTuple):
    """What a step writes or frees, and the bytes that it needs while it runs."""

    frees: bool
    places: tuple[_Place, ...]
    workspace: int


class _Walk:
    """Values that are live, task by task."""

    def __init__(self, stage: StageProgram, machine: Machine) -> None:
        self.stage, self.machine = stage, machine
        self.microbatches = len({task.microbatch for task in stage.tasks} - {-1})
        self.changes: dict[int, _Change] = {}
        self.bodies: dict[int, list[tuple[_Change, int | None]]] = {}
        self.effects: dict[tuple[int, Names, Names], _Effect] = {}
        self.sizes: dict[Names, np.ndarray] = {}
        self.totals: dict[Names, int] = {}
        self.common: Names = frozenset(self._always())
        self.micro: dict[int, Names] = {}

    def peak(self) -> Memory:
        """Walks through the step. The first of equal peaks counts."""
        most, top, at = np.zeros(len(LINES), np.int64), 0, ""
        live = self._total(self.common)
        for task in self.stage.tasks:
            effect = self._effect(task)
            mine = self.micro.pop(task.microbatch, NOTHING)
            others = live - self._total(self.common) - self._total(mine)
            if others + effect.top > top:
                top, at = others + effect.top, _describe(task)
                most = sum(map(self._uses, self.micro.values()), effect.peak)
            self.common, self.micro[task.microbatch] = effect.common, effect.mine
            live = others + self._total(effect.common) + self._total(effect.mine)
        uses = {line: n for line, n in zip(LINES, most.tolist(), strict=True) if n}
        uses["runtime"] = self.machine.chip.hbm_microcode_bytes * self.machine.lnc
        return Memory(self.stage.stage, uses, at)

    def _effect(self, task: Task) -> _Effect:
        mine = self.micro.get(task.microbatch, NOTHING)
        key = (id(task.body), self.common, mine)
        if key not in self.effects:
            self.effects[key] = self._new_effect(task, set(self.common), set(mine))
        return self.effects[key]

    def _new_effect(self, task: Task, common: set[Name], mine: set[Name]) -> _Effect:
        live = (self._uses(frozenset(common)) + self._uses(frozenset(mine))).tolist()
        most, total = list(live), sum(live)
        top = total
        for change, layer in self._changes(task):
            for place in change.places:
                of_layer = None if place.shift is None or layer is None else layer + place.shift
                name = place.name, of_layer, task.chunk if place.chunked else None
                names = mine if place.own else common
                if (name in names) is not change.frees:
                    continue
                if change.frees:
                    names.remove(name)
                else:
                    names.add(name)
                nbytes = -place.nbytes if change.frees else place.nbytes
                live[place.line] += nbytes
                total += nbytes
            if not change.frees and total + change.workspace > top:
                top = total + change.workspace
                most = list(live)
                most[WORKSPACE] = change.workspace
        return _Effect(np.array(most, np.int64), top, frozenset(common), frozenset(mine))

    def _changes(self, task: Task) -> list[tuple[_Change, int | None]]:
        """All changes of a task's body in order, with their layers."""
        if id(task.body) not in self.bodies:
            steps = steps_of(task.body)
            self.bodies[id(task.body)] = [(self._change(step), layer) for step, layer in steps]
        return self.bodies[id(task.body)]

    def _change(self, step: Step) -> _Change:
        if id(step) not in self.changes:
            frees = isinstance(step, Free)
            refs = self._ending(step) if frees else _written(step)
            extra = workspace(step.segment, self.machine) if isinstance(step, Run) else 0
            self.changes[id(step)] = _Change(frees, tuple(map(self._place, refs)), extra)
        return self.changes[id(step)]

    def _place(self, ref: Ref) -> _Place:
        value = self.stage.values[ref.name]
        return _Place(
            ref.name,
            ref.shift if value.layered else None,
            value.micro and not value.layered,
            value.micro and value.role not in ALWAYS,
            self._line(ref.name),
            self._nbytes(ref.name),
        )

    def _ending(self, step: Free) -> list[Ref]:
        return [ref for ref in step.values if self.stage.values[ref.name].role not in ALWAYS]

    def _name(self, ref: Ref, layer: int | None, chunk: int) -> Name:
        value = self.stage.values[ref.name]
        of_layer = layer + ref.shift if value.layered and layer is not None else None
        return ref.name, of_layer, chunk if value.micro and not value.layered else None

    def _line(self, name: str) -> int:
        return LINES.index(USES[self.stage.values[name].role])

    def _nbytes(self, name: str) -> int:
        value = self.stage.values[name]
        count = self.microbatches if value.micro and value.role in ALWAYS else 1
        return value.type.nbytes * count

    def _total(self, names: Names) -> int:
        """Bytes of values."""
        if names not in self.totals:
            self.totals[names] = int(self._uses(names).sum())
        return self.totals[names]

    def _uses(self, names: Names) -> np.ndarray:
        if names not in self.sizes:
            found = np.zeros(len(LINES), np.int64)
            counted = Counter(name for name, _, _ in names)
            for name, count in counted.items():
                found[self._line(name)] += self._nbytes(name) * count
            self.sizes[names] = found
        return self.sizes[names]

    def _always(self) -> Iterator[Name]:
        """Values that are there throughout: those that some step uses."""
        seen: set[tuple[int, int]] = set()
        refs: dict[int, list[Ref]] = {}
        for task in self.stage.tasks:
            if (id(task.body), task.chunk) in seen:
                continue
            seen.add((id(task.body), task.chunk))
            for step, layer in steps_of(task.body):
                if id(step) not in refs:
                    refs[id(step)] = list(self._kept((*_read(step), *_written(step))))
                for ref in refs[id(step)]:
                    yield self._name(ref, layer, task.chunk)

    def _kept(self, refs: Iterable[Ref]) -> Iterator[Ref]:
        return (ref for ref in refs if self.stage.values[ref.name].role in ALWAYS)


def workspace(segment: Segment, machine: Machine) -> int:
    """Bytes of temporaries and constants of a segment beside its arguments and results."""
    return _workspace(segment, machine.chip, machine.lnc)


@cache
def _workspace(segment: Segment, chip: Chip, lnc: int) -> int:
    program = segment.program(chip, lnc)
    own = {*program.arguments, *program.results}
    held = sum(program.buffers[v].type.nbytes for v in own if v in program.buffers)
    return max(0, program.arena_bytes - held)


def steps_of(body: tuple[Step, ...], layer: int | None = None) -> Iterator[tuple[Step, int | None]]:
    """Every step of a body in order, with its layer; loops are run through."""
    for step in body:
        if isinstance(step, Layers):
            for number in step.layers:
                yield from steps_of(step.body, number)
        else:
            yield step, layer


def _written(step: Step) -> tuple[Ref, ...]:
    match step:
        case Run() | Exchange():
            return step.writes
        case Receive():
            return (step.write,)
    return ()


def _read(step: Step) -> tuple[Ref, ...]:
    return step.reads if isinstance(step, Run | Exchange) else ()


def _describe(task: Task) -> str:
    return task.kind if task.microbatch < 0 else f"{task.kind} of microbatch {task.microbatch}"
