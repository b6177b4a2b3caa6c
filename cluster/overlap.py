"""What collectives in flight take from each other, and from compute beside them.

The rule: while something runs on a rank, it takes fractions of the rank's DMA engines, of its HBM
bandwidth, and of the busiest link inside and between nodes (`Demand`). Where two things overlap and
ask together for 1 + e of the scarcest of these, each of them takes e of the time that they would
have overlapped longer; with several others, these delays add up. A delayed collective ends later on
all ranks of its group, and those queued behind it in its stream wait.

Training plans (`plans`) use it with one place for many ranks that nothing tells apart, and for
compute as well; `clocks` uses it with every rank, for the collectives of several streams.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from trnsim.collectives.resources import resources_of
from trnsim.device.units import PS_PER_S

from .collective import Site

Array = np.ndarray


class Demand(NamedTuple):
    """Fractions of what a rank has that something takes while it runs, each 0 to 1."""

    dma: float = 0.0
    hbm: float = 0.0
    links: float = 0.0  # the busiest link inside a node
    network: float = 0.0  # the busiest link between nodes


@cache
def excess(one: Demand, other: Demand) -> float:
    """By how much both together ask for more than there is of the scarcest."""
    return max(0.0, max(a + b for a, b in zip(one, other, strict=True)) - 1.0)


def demand_of(site: Site, load: Array, table: Array, duration: int) -> Demand:
    """What the busiest rank of a collective takes: bytes through its DMA engines, its stack, links.

    load: bytes over every resource in `duration` ps. table: int64[groups, members] logical cores.
    The DMA engines of a rank move what leaves it; the stack carries every touch.
    """
    if not duration or site.chip is None or site.lnc is None:
        return Demand()
    fabric, memory = site.fabric, site.overheads.memory
    seconds = duration / PS_PER_S
    members = table.reshape(-1)
    out = load[fabric.dma_out[members]].max(initial=0)
    dma = float(out) / (seconds * site.chip.dma_bytes_per_s * site.lnc)
    stack = 0.0
    if memory is not None:
        stacks = resources_of(fabric, memory, site.overheads.reduce_fraction).stack(members)
        stack = float(load[stacks].max(initial=0)) / (seconds * site.chip.stack_bytes_per_s)
    used = load[: fabric.wires] / (fabric.rate[: fabric.wires] * seconds)
    server = fabric.server
    ends = server[fabric.source[: fabric.wires]], server[fabric.target[: fabric.wires]]
    between = (ends[0] != ends[1]) | (ends[0] < 0)
    inside = float(used[~between].max(initial=0.0))
    return Demand(
        min(1.0, dma), min(1.0, stack), min(1.0, inside),
        min(1.0, float(used[between].max(initial=0.0))),
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Meeting:
    """A collective: who waits for whom, in which stream, and what it takes meanwhile.

    rows: int64[rows, members] members (ranks, or classes of them) that wait for each other; row:
    int64[all] the row of each.
    """

    name: str
    demand: Demand
    stream: int
    rows: Array
    row: Array

    def last(self, times: Array) -> Array:
        """For each member the largest of its group's times."""
        if times.size == 1:
            return times
        return times[self.rows].max(axis=1)[self.row]


@dataclass(eq=False, slots=True)
class Flight:
    """A collective under way: int64[1 or all] ps at which it begins and ends on each member.

    Its times are moved by `InFlight` alone, and never changed in place.
    """

    meeting: Meeting
    begin: Array
    end: Array

    @property
    def stream(self) -> int:
        """The stream that it is in."""
        return self.meeting.stream

    def delay(self, begin: Array, duration: Array | int, demand: Demand) -> Array | None:
        """What overlapping with something else costs each of the two; None for nothing."""
        more = excess(self.meeting.demand, demand)
        if not more:
            return None
        until = np.minimum(begin + duration, self.end)
        together = np.maximum(until - np.maximum(begin, self.begin), 0)
        delay = np.ceil(together * more).astype(np.int64)
        return delay if delay.any() else None

    def move(self, begin: Array | int, end: Array | int) -> None:
        """Shifts its times."""
        self.begin, self.end = self.begin + begin, self.end + end


F = TypeVar("F", bound=Flight)


class InFlight(Generic[F]):
    """Those under way: a queue for each stream, in which none begins before another ends."""

    def __init__(self) -> None:
        self.queues: dict[int, list[F]] = {}
        self._number = 0

    def __len__(self) -> int:
        return self._number

    def __iter__(self) -> Iterator[F]:
        for queue in self.queues.values():
            yield from queue

    def add(self, flight: F) -> None:
        """Starts one more, as it is."""
        self._number += 1
        self.queues.setdefault(flight.stream, []).append(flight)

    def take_off(self, flight: F, slowed: Callable[[F, Array], None] = lambda *_: None) -> None:
        """Starts one more; it and those of other streams slow each other.

        `slowed` is told what the others were delayed by.
        """
        demand, duration = flight.meeting.demand, flight.end - flight.begin
        for other in self.overlapping(flight.begin, duration):
            if other.stream == flight.stream:
                continue
            delay = other.delay(flight.begin, duration, demand)
            if delay is not None:
                slowed(other, delay)
                self.delay(other, delay)
                flight.move(0, flight.meeting.last(delay))
        self.add(flight)

    def land(self, now: Array) -> None:
        """Forgets those that have ended everywhere."""
        if not self._number:
            return
        for queue in self.queues.values():
            while queue and not (queue[0].end > now).any():
                self.forget(queue.pop(0))

    def forget(self, flight: F) -> None:
        """One that has left its queue."""
        self._number -= 1

    def overlapping(self, begin: Array, duration: Array | int) -> Iterator[F]:
        """Those that are under way at some time of an interval."""
        until = begin + duration
        for queue in self.queues.values():
            for flight in queue:
                if (flight.begin >= until).all():
                    break  # and so do those behind it
                yield flight

    def delay(self, flight: F, delay: Array) -> None:
        """One is delayed: its group ends later, and its stream queues behind it."""
        queue = self.queues[flight.stream]
        before, push = flight.end, flight.meeting.last(delay)
        flight.move(0, push)
        for later in queue[queue.index(flight) + 1 :]:
            push = later.meeting.last(np.where(later.begin <= before, push, 0))
            before = later.end
            later.move(push, push)
