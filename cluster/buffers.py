"""Homes of values in a rank's HBM: lifetimes over the steps, then first-fit offsets.

Everything a kernel or a collective reads or writes has a home; values inside a fused kernel have
none. The plan is made once, so its peak is both the modelled memory and the arena that the data
plane allocates.
"""

import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from trnsim.device.ops.ir import TensorType

from .program import (
    Branch,
    Buffer,
    Move,
    RunKernel,
    SetRank,
    StartCollective,
    Step,
    WaitCollective,
    While,
)

ALIGNMENT = 64  # bytes: one cache line of the machine that runs the data plane


@dataclass(slots=True)
class Lifetime:
    """First and last position, both included, at which a value's home must hold it."""

    start: int
    end: int


class _Liveness:
    """Numbers the steps and collects the lifetime of every home."""

    def __init__(self, home: Mapping[int, int]) -> None:
        self.home = home
        self.position = 0
        self.lifetimes: dict[int, Lifetime] = {}
        self.operands: dict[int, tuple[int, int]] = {}

    def touch(self, *values: int) -> None:
        for value in values:
            home = self.home.get(value, value)
            found = self.lifetimes.setdefault(home, Lifetime(self.position, self.position))
            found.end = max(found.end, self.position)

    def visit(self, steps: Sequence[Step]) -> None:
        for step in steps:
            self.position += 1
            match step:
                case RunKernel(kernel=kernel):
                    self.touch(*kernel.inputs, *kernel.outputs)
                case StartCollective():
                    self.touch(step.operand, step.result)
                    self.operands[step.key] = (step.operand, step.result)
                case WaitCollective(key=key):
                    self.touch(*self.operands[key])
                case SetRank(result=result):
                    self.touch(result)
                case Move(pairs=pairs):
                    self.touch(*(value for pair in pairs for value in pair))
                case While():
                    self.loop(step)
                case Branch(index=index, branches=branches):
                    self.touch(index)
                    for branch in branches:
                        self.visit(branch)
                    self.touch(index)  # a core may look at it when the other is in the branch

    def loop(self, step: While) -> None:
        """What is older than the loop and touched inside must last to the end of the loop."""
        begin = self.position
        self.visit(step.condition)
        self.touch(step.predicate)
        self.visit(step.body)
        self.position += 1
        for lifetime in self.lifetimes.values():
            if lifetime.start < begin <= lifetime.end:
                lifetime.end = self.position
        self.touch(step.predicate)


class _Space:
    """First-fit allocation in an address space without a limit."""

    def __init__(self) -> None:
        self.blocks: list[tuple[int, int]] = []  # (start, end) in use, sorted
        self.peak = 0

    def allocate(self, size: int) -> int:
        offset = 0
        for start, end in self.blocks:
            if start - offset >= size:
                break
            offset = end
        bisect.insort(self.blocks, (offset, offset + size))
        self.peak = max(self.peak, offset + size)
        return offset

    def free(self, offset: int, size: int) -> None:
        self.blocks.remove((offset, offset + size))


def plan_buffers(
    steps: Sequence[Step],
    types: Sequence[TensorType],
    home: Mapping[int, int],
    replicated: Iterable[int],
    pinned: Sequence[int],
    results: Sequence[int],
    cores: int,
) -> tuple[dict[int, Buffer], int]:
    """Buffers of all values that the steps touch, and the bytes of the arena that holds them.

    `home[v]` is the value whose buffer `v` shares; `pinned` values (arguments, constants) live
    from the first step, `results` to the last. `replicated` homes get one copy for each core.
    """
    liveness = _Liveness(home)
    liveness.touch(*pinned)
    liveness.visit(steps)
    liveness.position += 1
    liveness.touch(*results)
    for value in pinned:  # a training state is written back to its arguments at the end
        liveness.touch(value)
    per_core = set(replicated)
    buffers, peak = _place(liveness.lifetimes, types, per_core, cores)
    for value, owner in home.items():
        if owner in buffers:
            buffers[value] = Buffer(buffers[owner].offsets, types[value])
    return buffers, peak


def _place(
    lifetimes: Mapping[int, Lifetime],
    types: Sequence[TensorType],
    per_core: set[int],
    cores: int,
) -> tuple[dict[int, Buffer], int]:
    space = _Space()
    buffers: dict[int, Buffer] = {}
    ending: list[tuple[int, int, int]] = []  # (end, offset, size), sorted
    for value, lifetime in sorted(lifetimes.items(), key=lambda item: (item[1].start, item[0])):
        while ending and ending[0][0] < lifetime.start:
            _, offset, size = ending.pop(0)
            space.free(offset, size)
        size = max(1, -(-types[value].nbytes // ALIGNMENT)) * ALIGNMENT
        copies = cores if value in per_core else 1
        offsets = [space.allocate(size) for _ in range(copies)]
        for offset in offsets:
            bisect.insort(ending, (lifetime.end, offset, size))
        buffers[value] = Buffer(tuple(offsets * (cores // copies)), types[value])
    return buffers, space.peak
