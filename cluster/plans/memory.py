"""HBM that a rank of each stage needs: values followed through the tasks, from write to free.

Parameters, optimizer states, batches and coordinates are there throughout. Everything else lives
from its first write until it is freed, or to the end of the step. While a segment runs, it holds
its compiled kernels' temporaries and constants besides.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np

from trnsim.device.chip import Chip

from ..machine import Machine
from .program import Exchange, Free, Layers, Receive, Ref, Run, StageCode, StageProgram, Step, Task
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


@dataclass(frozen=True, eq=False, slots=True)
class _Live:
    """Values that are there at a time: bytes by line, and of all. One object for equal names."""

    names: Names
    uses: np.ndarray
    total: int


@dataclass(frozen=True, slots=True)
class _Effect:
    """What a task does to the values of all microbatches (`common`) and of its own (`mine`).

    peak: int64[LINES] bytes of both, with workspace, where that is largest.
    """

    peak: np.ndarray
    top: int  # the sum of peak
    common: _Live
    mine: _Live


def memory(stage: StageProgram, machine: Machine, *, workspace: bool = True) -> Memory:
    """The peak of a rank of one stage, runtime included. The first of equal peaks counts.

    Without `workspace`, no segment is compiled, and the peak is a lower bound.
    """
    lives = _lives(stage.code, (machine.chip, machine.lnc) if workspace else None)
    nothing = common = lives.live(NOTHING)
    micro: dict[int, _Live] = {}
    live, top, at, beside, peak = 0, -1, "", (), nothing.uses
    for task in stage.tasks:
        mine = micro.pop(task.microbatch, nothing)
        effect = lives.effect(task, common, mine)
        others = live - common.total - mine.total
        if others + effect.top > top:
            top, at = others + effect.top, _describe(task)
            beside, peak = tuple(micro.values()), effect.peak
        common, micro[task.microbatch] = effect.common, effect.mine
        live = others + common.total + effect.mine.total
    most = sum((mine.uses for mine in beside), peak + lives.always(stage))
    uses = {line: n for line, n in zip(LINES, most.tolist(), strict=True) if n}
    uses["runtime"] = machine.chip.hbm_microcode_bytes * machine.lnc
    return Memory(stage.stage, uses, at)


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


@lru_cache(maxsize=128)
def _lives(code: StageCode, on: tuple[Chip, int] | None) -> "_Lives":
    return _Lives(code, on)


class _Lives:
    """What the tasks of a stage's code do to the values that are live.

    on: chip and LNC that segments are compiled for; None leaves their workspace out.
    """

    def __init__(self, code: StageCode, on: tuple[Chip, int] | None) -> None:
        self.code, self.on = code, on
        self.changes: dict[int, _Change] = {}
        self.bodies: dict[int, list[tuple[_Change, int | None]]] = {}
        self.effects: dict[tuple[int, _Live, _Live], _Effect] = {}
        self.found: dict[Names, _Live] = {}
        self.kept: _Kept | None = None

    def effect(self, task: Task, common: _Live, mine: _Live) -> _Effect:
        """What a task does from here on."""
        key = (id(task.body), common, mine)
        if key not in self.effects:
            self.effects[key] = self._new_effect(task, common, mine)
        return self.effects[key]

    def live(self, names: Iterable[Name]) -> _Live:
        """Values by their names."""
        names = frozenset(names)
        if names not in self.found:
            uses = self._uses(names)
            self.found[names] = _Live(names, uses, int(uses.sum()))
        return self.found[names]

    def _new_effect(self, task: Task, before: _Live, of_task: _Live) -> _Effect:
        common, mine = set(before.names), set(of_task.names)
        live = (before.uses + of_task.uses).tolist()
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
        return _Effect(np.array(most, np.int64), top, self.live(common), self.live(mine))

    def _changes(self, task: Task) -> list[tuple[_Change, int | None]]:
        """All changes of a task's body in order, with their layers."""
        if id(task.body) not in self.bodies:
            steps = steps_of(task.body)
            self.bodies[id(task.body)] = [(self._change(step), layer) for step, layer in steps]
        return self.bodies[id(task.body)]

    def _change(self, step: Step) -> _Change:
        if id(step) not in self.changes:
            frees = isinstance(step, Free)
            refs: Iterable[Ref]
            refs = step.values if isinstance(step, Free) else _written(step)
            refs = [ref for ref in refs if self.code.values[ref.name].role not in ALWAYS]
            extra = 0
            if isinstance(step, Run) and self.on is not None:
                extra = workspace(step.segment, *self.on)
            self.changes[id(step)] = _Change(frees, tuple(map(self._place, refs)), extra)
        return self.changes[id(step)]

    def _place(self, ref: Ref) -> _Place:
        value = self.code.values[ref.name]
        return _Place(
            ref.name,
            ref.shift if value.layered else None,
            value.micro and not value.layered,
            value.micro,
            self._line(ref.name),
            value.type.nbytes,
        )

    def _name(self, ref: Ref, layer: int | None, chunk: int) -> Name:
        value = self.code.values[ref.name]
        of_layer = layer + ref.shift if value.layered and layer is not None else None
        return ref.name, of_layer, chunk if value.micro and not value.layered else None

    def _line(self, name: str) -> int:
        return LINES.index(USES[self.code.values[name].role])

    def _uses(self, names: Iterable[Name]) -> np.ndarray:
        found = np.zeros(len(LINES), np.int64)
        for name, count in Counter(name for name, _, _ in names).items():
            found[self._line(name)] += self.code.values[name].type.nbytes * count
        return found

    def always(self, stage: StageProgram) -> np.ndarray:
        """int64[LINES] bytes of what is there throughout."""
        if self.kept is None:
            names = frozenset(self._always(stage))
            of_batch = {name for name in names if self.code.values[name[0]].micro}
            self.kept = _Kept(self._uses(names - of_batch), self._uses(of_batch))
        microbatches = len({task.microbatch for task in stage.tasks} - {-1})
        return self.kept.once + self.kept.each * microbatches

    def _always(self, stage: StageProgram) -> Iterator[Name]:
        """Those that some step uses."""
        seen: set[tuple[int, int]] = set()
        refs: dict[int, list[Ref]] = {}
        for task in stage.tasks:
            if (id(task.body), task.chunk) in seen:
                continue
            seen.add((id(task.body), task.chunk))
            for step, layer in steps_of(task.body):
                if id(step) not in refs:
                    refs[id(step)] = list(self._kept((*_read(step), *_written(step))))
                for ref in refs[id(step)]:
                    yield self._name(ref, layer, task.chunk)

    def _kept(self, refs: Iterable[Ref]) -> Iterator[Ref]:
        return (ref for ref in refs if self.code.values[ref.name].role in ALWAYS)


class _Kept(NamedTuple):
    """int64[LINES] bytes that are there throughout: once, and for each microbatch."""

    once: np.ndarray
    each: np.ndarray


@cache
def workspace(segment: Segment, chip: Chip, lnc: int) -> int:
    """Bytes of temporaries and constants of a segment beside its arguments and results."""
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
