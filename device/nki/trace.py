"""What a kernel left for each core: its instructions in program order, and its meetings.

A trace has all that decides when instructions run but the chip's numbers, so that other clocks and
costs, or another order of its instructions, are timed without the kernel: see `retime`, `greedy`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..isa.base import Instruction
from ..memory import View
from .interconnect import Request


class Issued(NamedTuple):
    """An instruction. `reads` and `writes` are what it is timed with; `line` is file:line of the
    kernel, `name` the user's, `free` whether the kernel left its engine open, `block` the number
    of its no_reorder block or 0."""

    instruction: Instruction
    reads: tuple[View, ...]
    writes: tuple[View, ...]
    queue: str
    line: str
    name: str
    free: bool
    block: int


class Met(NamedTuple):
    """A meeting of all cores: `CoreBarrier`, or `SendRecv` of `reads` to another's `writes`."""

    opcode: str
    engine: str
    reads: tuple[View, ...]
    writes: tuple[View, ...]
    line: str
    name: str


class Collected(NamedTuple):
    """A collective that the rank takes part in as `request`: `delay` ps after its operands are
    ready, and if the rank is alone for `alone` ps; of each channel, what it reads and writes."""

    request: Request
    reads_by_channel: tuple[tuple[View, ...], ...]
    writes_by_channel: tuple[tuple[View, ...], ...]
    delay: int
    alone: int
    line: str
    name: str
    sends: tuple[int, ...] = ()

    @property
    def reads(self) -> tuple[View, ...]:
        """Of all channels."""
        return tuple(view for views in self.reads_by_channel for view in views)

    @property
    def writes(self) -> tuple[View, ...]:
        """Of all channels."""
        return tuple(view for views in self.writes_by_channel for view in views)


Entry = Issued | Met | Collected


@dataclass
class Trace:
    """One core's. `after` has pairs of places: the second starts when the first has ended.

    `folded` counts zeros of PSUM that a matmul overwrote at once: they take no instruction.
    `whole` is False if the core also did what no entry says.
    """

    entries: list[Entry] = field(default_factory=list)
    after: list[tuple[int, int]] = field(default_factory=list)
    folded: int = 0
    stores: list[tuple[int, View, int]] = field(default_factory=list)  # place, where, register
    stated: int = 0  # instructions whose engine the kernel named
    whole: bool = True

    def release(self) -> None:
        """Forgets values: operands keep their places and shapes only."""
        for entry in self.entries:
            for view in (*entry.reads, *entry.writes):
                view._array = view.tensor._bytes = view.tensor._array = None

    def places(self, names: Sequence[str]) -> list[int]:
        """Where instructions of these names are."""
        wanted = set(names)
        return [i for i, entry in enumerate(self.entries) if entry.name in wanted]
