"""Where the two physical cores of a logical core have to wait for each other.

Both cores work in one HBM address space. A core may not touch bytes that the other has written
since they last met, nor write bytes that the other has read since then. The check is by byte
interval, so a value that both cores split along the same rows needs no barrier at all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from .program import (
    Branch,
    Buffer,
    Move,
    PairBarrier,
    RunKernel,
    SetRank,
    StartCollective,
    Step,
    WaitCollective,
    While,
)

Interval = tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Access:
    core: int
    interval: Interval
    write: bool


def _clash(one: _Access, other: _Access) -> bool:
    return (
        one.core != other.core
        and (one.write or other.write)
        and one.interval[0] < other.interval[1]
        and other.interval[0] < one.interval[1]
    )


def insert_barriers(
    steps: Sequence[Step], buffers: Mapping[int, Buffer], cores: int
) -> tuple[Step, ...]:
    """The steps with a `PairBarrier` before each step that needs one. One core needs none."""
    return tuple(steps) if cores == 1 else _Inserter(buffers, cores).block(steps)


class _Inserter:
    def __init__(self, buffers: Mapping[int, Buffer], cores: int) -> None:
        self.buffers, self.cores = buffers, cores
        self.open: list[_Access] = []  # since the cores last met
        self.started: dict[int, list[_Access]] = {}  # open accesses when a collective started

    def block(self, steps: Sequence[Step]) -> tuple[Step, ...]:
        result: list[Step] = []
        for step in steps:
            accesses = self.accesses(step)
            if any(_clash(new, old) for new in accesses for old in self.open):
                result.append(self.meet())
            self.open += accesses
            result += self.nested(step)
        return tuple(result)

    def meet(self) -> PairBarrier:
        self.open = []
        return PairBarrier()

    def nested(self, step: Step) -> list[Step]:
        match step:
            case While():
                return self.loop(step)
            case Branch(index=index):
                first = self.meet()
                branches = []
                for branch in step.branches:
                    self.open = self.reads(index)
                    branches.append((*self.block(branch), PairBarrier()))
                return [first, replace(step, branches=tuple(branches)), self.meet()]
            case StartCollective(key=key):
                self.started[key] = list(self.open)
            case WaitCollective(key=key):  # both cores have passed the start
                before = {id(access) for access in self.started.pop(key)}
                self.open = [access for access in self.open if id(access) not in before]
        return [step]

    def loop(self, step: While) -> list[Step]:
        """Iterations begin with a meeting, as an iteration may touch what the last one did."""
        self.open = []
        condition = (PairBarrier(), *self.block(step.condition))
        reads = self.reads(step.predicate)
        if any(_clash(new, old) for new in reads for old in self.open):
            condition = (*condition, self.meet())
        self.open += reads
        body = self.block(step.body)
        return [replace(step, condition=condition, body=body), self.meet()]

    def reads(self, value: int) -> list[_Access]:
        """Each core looks at the value to decide where it goes on."""
        return [self.read(value, core) for core in range(self.cores)]

    def read(self, value: int, core: int) -> _Access:
        return _Access(core, self.buffers[value].interval(core), write=False)

    def write(self, value: int, core: int) -> _Access:
        return _Access(core, self.buffers[value].interval(core), write=True)

    def part(self, value: int, core: int, elements: Interval, write: bool) -> _Access:
        buffer = self.buffers[value]
        start, size = buffer.offsets[core], buffer.type.numpy.itemsize
        interval = (start + elements[0] * size, start + elements[1] * size)
        return _Access(core, interval, write)

    def accesses(self, step: Step) -> list[_Access]:
        cores = range(self.cores)
        match step:
            case RunKernel():
                return [access for core in cores for access in self.kernel(step, core)]
            case SetRank(result=result):
                return [self.write(result, core) for core in cores]
            case Move(pairs=pairs):
                return [
                    access
                    for target, source in pairs
                    for core in self.movers(target)
                    for access in (self.write(target, core), self.read(source, core))
                ]
            case Branch(index=index):
                return self.reads(index)
        return []

    def movers(self, target: int) -> range:
        """A shared value is moved by the first core, a replicated one by each."""
        shared = len(set(self.buffers[target].offsets)) == 1
        return range(1 if shared else self.cores)

    def kernel(self, step: RunKernel, core: int) -> list[_Access]:
        part = step.parts[core]
        if part.empty:
            return []
        reads = step.kernel.reads(part).items()
        writes = step.kernel.writes(part).items()
        return [self.part(value, core, span, write=False) for value, span in reads] + [
            self.part(value, core, span, write=True) for value, span in writes
        ]
