"""When each instruction starts and ends: in-order engines, hazards, semaphores, DMA queues.

Rules:

- An engine runs its instructions in the order in which they are added.
- An instruction waits for the regions it uses: for what it reads, until the last writer has
  committed (read after write); for what it writes, until the last writer and the readers are done
  (write after write, write after read). Regions are compared by space, partitions and bytes.
- Waiting for another engine costs a semaphore. On one engine, only reading what the engine has
  just written waits: for the pipeline's latency, after which results are committed.
- A DMA is triggered when its regions are ready, in the order of its queue, at most one in
  `dma_dge_ps` (its descriptors are made). Its data starts `dma_start_ps` later, at the earliest
  when the engines have done the work of its queue's previous transfer. Transfers of all queues
  share the DMA engines: a transfer uses the time that those added before it leave idle. It ends
  when its work is done and its duration over; others see its end `dma_semaphore_ps` later.
- Only DMA reaches HBM.
- On NeuronCore v2 some engines share a port of a memory (`SHARED_PORTS`): an instruction that uses
  it waits for a time when the other engine does not.

Loops that have become steady need not be run to the end: see `mark`, `repeats`, `fast_forward`.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .chip import Chip
from .errors import BadInput
from .isa.base import ENGINES
from .memory import View
from .units import cycles_ps

_NUMBER = {name: number for number, name in enumerate(ENGINES)}
_DMA = _NUMBER["dma"]
SHARED_PORTS = (("sbuf", ("vector", "gpsimd")), ("psum", ("vector", "scalar")))
"""Memories that two engines reach through one port on NeuronCore v2
(trainium_inferentia2_arch.rst); later generations have none."""

Port = tuple[str, tuple[str, ...]]
_SPANS_KEPT = 64  # busy periods of the DMA engines in which idle time is still looked for
_RECORDS_KEPT = 64  # recent accesses of an HBM tensor that are told apart


class Event(NamedTuple):
    """One instruction on the timeline, in picoseconds. `queue` is empty but for DMA."""

    engine: str
    name: str
    start: int
    end: int
    queue: str = ""


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment in the program: what had been added by then."""

    count: int
    position: int
    free: tuple[int, ...]
    busy: tuple[int, ...]
    queues: dict[str, tuple[int, int]]


class _Clock:
    """When a region was last written and read.

    `commit` is when its writer's own engine may read it, `visible` when others may; `reads` has
    by engine when a writer on another engine may overwrite it. `near` are the regions that
    overlap it, itself included.
    """

    __slots__ = ("commit", "visible", "writer", "reads", "near", "touched")

    def __init__(self) -> None:
        self.commit = self.visible = 0
        self.writer = -1
        self.reads: dict[int, int] = {}
        self.near: list[_Clock] = [self]
        self.touched = 0

    def shift(self, delta: int) -> None:
        self.commit += delta
        self.visible += delta
        self.reads = {engine: time + delta for engine, time in self.reads.items()}


class _Accesses:
    """Recent reads or writes of one HBM tensor: (view, when done, when added)."""

    __slots__ = ("recent", "older")

    def __init__(self) -> None:
        self.recent: list[tuple[View, int, int]] = []
        self.older = 0

    def add(self, view: View, done: int, count: int) -> None:
        self.recent.append((view, done, count))
        if len(self.recent) > 2 * _RECORDS_KEPT:
            dropped, self.recent = self.recent[:_RECORDS_KEPT], self.recent[_RECORDS_KEPT:]
            self.older = max(self.older, max(done for _, done, _ in dropped))

    def done(self, view: View) -> int:
        latest = self.older
        for other, done, _ in self.recent:
            if done > latest and other.overlaps(view):
                latest = done
        return latest

    def shift(self, since: int, delta: int) -> None:
        self.recent = [
            (view, done + delta if count > since else done, count)
            for view, done, count in self.recent
        ]


class _Extent:
    """The accesses of an HBM tensor; `near` are the tensors whose bytes overlap its own."""

    __slots__ = ("start", "stop", "reads", "writes", "near")

    def __init__(self, start: int, stop: int) -> None:
        self.start, self.stop = start, stop
        self.reads, self.writes = _Accesses(), _Accesses()
        self.near: list[_Extent] = [self]


class _Spans:
    """When a shared resource is taken: sorted [start, end) periods, of which the last are kept."""

    __slots__ = ("spans", "closed")

    def __init__(self, now: int) -> None:
        self.spans: list[list[int]] = []
        self.closed = now

    def shift(self, delta: int) -> None:
        self.spans = [[start + delta, end + delta] for start, end in self.spans]
        self.closed += delta

    def fill(self, earliest: int, duration: int) -> tuple[int, int]:
        """Takes `duration` of idle time from `earliest` on, in pieces if need be; (start, end)."""
        spans = self.spans
        time = earliest = max(earliest, self.closed)
        index = last = bisect_left(spans, earliest, key=lambda span: span[1])
        start = end = None
        left = duration
        while end is None and last < len(spans):
            begin, stop = spans[last]
            idle = begin - time
            if idle > 0:
                start = time if start is None else start
                if idle > left:
                    break
                left -= idle
                end = begin if not left else None
            time, last = max(time, stop), last + 1
        start = time if start is None else start
        end = time + left if end is None else end
        low = min(earliest, spans[index][0]) if last > index else earliest
        spans[index:last] = [[low, max(end, time)]]
        if len(spans) > _SPANS_KEPT:
            self.closed = spans.pop(0)[1]
        return start, end

    def gap(self, earliest: int, duration: int) -> int:
        """The first moment from `earliest` on with `duration` of idle time in one piece."""
        time = max(earliest, self.closed)
        index = bisect_left(self.spans, time, key=lambda span: span[1])
        for begin, stop in self.spans[index:]:
            if begin - time >= duration:
                break
            time = max(time, stop)
        return time


class Timeline:
    """The clocks of one core's engines, advanced by `add`.

    `latency_ps` is by engine how long after its end an instruction's result is committed.
    With `record` every instruction is kept in `events`.
    """

    def __init__(
        self,
        *,
        semaphore_ps: int = 0,
        dma_semaphore_ps: int = 0,
        dma_start_ps: int = 0,
        dma_dge_ps: int = 0,
        latency_ps: Mapping[str, int] | None = None,
        ports: Sequence[Port] = (),
        bucket_bytes: int = 2048,
        record: bool = False,
    ) -> None:
        self.semaphore_ps, self.dma_semaphore_ps = semaphore_ps, dma_semaphore_ps
        self.dma_start_ps, self.dma_dge_ps = dma_start_ps, dma_dge_ps
        latency = latency_ps or {}
        self._latency = [latency.get(engine, 0) for engine in ENGINES]
        self._bucket, self._shared = bucket_bytes, tuple(ports)
        self.record, self.watching = record, False
        self.events: list[Event] = []
        self.reset()

    @classmethod
    def of(cls, chip: Chip, record: bool = False) -> "Timeline":
        """The timeline of a core of the chip, with its latencies."""
        latency = {
            engine: cycles_ps(chip.static_overhead_cycles, chip.clock_hz[engine])
            for engine in ("tensor", "vector", "gpsimd")
        }
        return cls(
            semaphore_ps=chip.semaphore_ps,
            dma_semaphore_ps=chip.dma_semaphore_ps,
            dma_start_ps=chip.dma_start_ps,
            dma_dge_ps=chip.dma_dge_ps,
            latency_ps=latency | {"scalar": chip.scalar_fixed_ps},
            ports=SHARED_PORTS if chip.generation == 2 else (),
            record=record,
        )

    def reset(self) -> None:
        """Back to time zero, nothing run."""
        self._free = [0] * len(ENGINES)
        self._busy = [0] * len(ENGINES)
        self._end = 0
        self.count = 0
        self._log: list[tuple[int, int, int]] = []
        self.events.clear()
        self._forget(0)

    def _forget(self, now: int) -> None:
        self._floor = now
        self._clocks: dict[tuple, _Clock] = {}
        self._buckets: dict[tuple[str, int], list[tuple[tuple, _Clock]]] = {}
        self._extents: dict[tuple[int, int], _Extent] = {}
        self._queues: dict[str, tuple[int, int]] = {}  # (next trigger, end of the work)
        self._dma = _Spans(now)
        self._ports = {port: _Spans(now) for port in self._shared}

    def drain(self) -> int:
        """Waits until everything has ended and is visible; returns that time."""
        now = self._end
        self._free = [now] * len(ENGINES)
        self._forget(now)
        return now

    def advance(self, time: int) -> None:
        """Drains, then stands idle until `time` (for what happens outside the core)."""
        self._end = max(self._end, time)
        self.drain()

    @property
    def end(self) -> int:
        """When the last result is committed, and the last DMA seen to have ended."""
        return self._end

    @property
    def busy(self) -> dict[str, int]:
        """Picoseconds of work by engine; for `dma`, of all DMA engines together."""
        return dict(zip(ENGINES, self._busy, strict=True))

    @property
    def overlapped(self) -> int:
        """Lower bound of the time: the busiest engine alone."""
        return max(self._busy)

    @property
    def serial(self) -> int:
        """The time with one engine at work at a time: the sum."""
        return sum(self._busy)

    def add(
        self,
        engine: str,
        duration: int,
        reads: Sequence[View] = (),
        writes: Sequence[View] = (),
        name: str = "",
        queue: str = "",
        work: int | None = None,
        after: int = 0,
    ) -> tuple[int, int]:
        """Adds an instruction that lasts `duration`; returns (start, end).

        It keeps its engine as long; a DMA keeps the DMA engines for `work` picoseconds. It starts,
        or is triggered, at `after` at the earliest.
        """
        number = _NUMBER.get(engine)
        if number is None:
            raise BadInput("engine", engine, ENGINES)
        self.count += 1
        if number == _DMA:
            work = duration if work is None else work
            start, end = self._transfer(duration, work, reads, writes, queue, after)
            self._busy[_DMA] += work
        else:
            start, end = self._compute(number, duration, reads, writes, after)
            self._busy[number] += duration
        if self.watching:
            self._log.append((number, start, end))
        if self.record:
            self.events.append(Event(engine, name, start, end, queue))
        return start, end

    def _compute(
        self,
        number: int,
        duration: int,
        reads: Sequence[View],
        writes: Sequence[View],
        after: int,
    ) -> tuple[int, int]:
        start = max(self._free[number], after)
        known = self._clocks
        used = []
        for view in reads:
            clock = known.get(view.region) or self._new_clock(view.region)
            used.append(clock)
            for near in clock.near:
                ready = near.commit if near.writer == number else near.visible
                if ready > start:
                    start = ready
        changed = []
        for view in writes:
            clock = known.get(view.region) or self._new_clock(view.region)
            changed.append(clock)
            for near in clock.near:
                if near.writer != number and near.visible > start:
                    start = near.visible
                for reader, done in near.reads.items():
                    if reader != number and done > start:
                        start = done
        if self._ports:
            start = self._through_ports(ENGINES[number], start, duration, (*reads, *writes))
        end = start + duration
        commit = end + self._latency[number]
        self._free[number] = end
        self._note(number, used, end + self.semaphore_ps, changed, commit, self.semaphore_ps)
        if commit > self._end:
            self._end = commit
        return start, end

    def _note(
        self,
        number: int,
        used: list[_Clock],
        read: int,
        changed: list[_Clock],
        commit: int,
        semaphore: int,
    ) -> None:
        count = self.count
        for clock in used:
            clock.reads[number] = read
            clock.touched = count
        for clock in changed:
            clock.commit, clock.visible = commit, commit + semaphore
            clock.writer, clock.touched = number, count
            clock.reads = {}

    def clock(self, view: View) -> _Clock:
        """The record of a region on chip; `near` are those of the regions that overlap it."""
        return self._clocks.get(view.region) or self._new_clock(view.region)

    def latency(self, engine: str) -> int:
        """Picoseconds from the end of an engine's instruction until its result is committed."""
        return self._latency[_NUMBER[engine]]

    def _new_clock(self, region: tuple[str, int, int, int, int]) -> _Clock:
        clock = _Clock()
        space, first, end, low, high = region
        seen = set()
        for bucket in range(low // self._bucket, max(high - 1, low) // self._bucket + 1):
            members = self._buckets.setdefault((space, bucket), [])
            for (_, other_first, other_end, other_low, other_high), other in members:
                apart = first >= other_end or other_first >= end
                if apart or low >= other_high or other_low >= high or id(other) in seen:
                    continue
                seen.add(id(other))
                clock.near.append(other)
                other.near.append(clock)
            members.append((region, clock))
        self._clocks[region] = clock
        return clock

    def _through_ports(self, engine: str, start: int, duration: int, views: Sequence[View]) -> int:
        """The first start at which no port that the instruction uses is taken; takes them."""
        spaces = {view.space for view in views}
        used = [
            spans
            for (space, engines), spans in self._ports.items()
            if engine in engines and space in spaces
        ]
        settled = None
        while settled != start:
            settled = start
            for spans in used:
                start = spans.gap(start, duration)
        for spans in used:
            spans.fill(start, duration)
        return start

    # ---- DMA -------------------------------------------------------------------------------

    def _transfer(
        self,
        duration: int,
        work: int,
        reads: Sequence[View],
        writes: Sequence[View],
        queue: str,
        after: int,
    ) -> tuple[int, int]:
        ready = max(self._floor, after)
        used, changed = [], []
        for view in reads:
            if view.space == "hbm":
                for near in self._extent(view).near:
                    ready = max(ready, near.writes.done(view))
            else:
                clock = self._clocks.get(view.region) or self._new_clock(view.region)
                used.append(clock)
                for near in clock.near:
                    if near.visible > ready:
                        ready = near.visible
        for view in writes:
            if view.space == "hbm":
                for near in self._extent(view).near:
                    ready = max(ready, near.writes.done(view), near.reads.done(view))
            else:
                clock = self._clocks.get(view.region) or self._new_clock(view.region)
                changed.append(clock)
                for near in clock.near:
                    ready = max(ready, near.visible, *near.reads.values())
        free, done = self._queues.get(queue, (0, 0))
        trigger = max(ready, free)
        start, done = self._dma.fill(max(trigger + self.dma_start_ps, done), work)
        self._queues[queue] = trigger + self.dma_dge_ps, done
        end = max(done, start + duration)
        self._free[_DMA] = max(self._free[_DMA], end)
        seen = end + self.dma_semaphore_ps
        self._note(_DMA, used, seen, changed, end, self.dma_semaphore_ps)
        self._note_hbm(reads, writes, seen)
        self._end = max(self._end, seen)
        return start, end

    def _note_hbm(self, reads: Sequence[View], writes: Sequence[View], seen: int) -> None:
        for view in reads:
            if view.space == "hbm":
                self._extent(view).reads.add(view, seen, self.count)
        for view in writes:
            if view.space == "hbm":
                self._extent(view).writes.add(view, seen, self.count)

    def _extent(self, view: View) -> _Extent:
        tensor = view.tensor
        key = (tensor.address, tensor.nbytes)
        found = self._extents.get(key)
        if found is None:
            found = _Extent(tensor.address, tensor.address + tensor.nbytes)
            for other in self._extents.values():
                if found.start < other.stop and other.start < found.stop:
                    found.near.append(other)
                    other.near.append(found)
            self._extents[key] = found
        return found

    # ---- steady loops ----------------------------------------------------------------------

    def mark(self) -> Mark:
        """This moment, to compare later ones with. Set `watching` before the first."""
        return Mark(
            self.count, len(self._log), tuple(self._free), tuple(self._busy), dict(self._queues)
        )

    def repeats(self, marks: Sequence[Mark]) -> int | None:
        """The shift by which each period between successive marks repeats the one before it.

        Periods are equal if they have the same engines, and starts and ends moved by one constant
        number of picoseconds. None if they are not, or are empty. Needs three marks or more.
        """
        lengths = {b.position - a.position for a, b in zip(marks, marks[1:], strict=False)}
        if len(lengths) != 1:
            return None
        periods = [
            self._log[a.position : b.position] for a, b in zip(marks, marks[1:], strict=False)
        ]
        if len(periods) < 2 or not periods[0]:
            return None
        shift = periods[1][0][1] - periods[0][0][1]
        for earlier, later in zip(periods, periods[1:], strict=False):
            moved = [(number, start + shift, end + shift) for number, start, end in earlier]
            if moved != later:
                return None
        return shift

    def steady(self, marks: Sequence[Mark], seen: int = 3) -> tuple[int, int] | None:
        """(n, shift) of the shortest steady period: the last n marks' work, `seen` times alike.

        Iterations of a loop often repeat only in groups (store, load and compute can interlock
        over several), so each n is tried. Take a mark after every iteration, or, with rotating
        buffers, after every rotation: work that is skipped must use the same tiles.
        """
        for n in range(1, (len(marks) - 1) // seen + 1):
            shift = self.repeats(marks[len(marks) - 1 - seen * n :: n])
            if shift is not None:
                return n, shift
        return None

    def fast_forward(self, since: Mark, shift: int, times: int) -> None:
        """As if what was added since the mark were added `times` more, each `shift` later."""
        delta = shift * times
        self.count += times * (self.count - since.count)
        for number, (free, busy) in enumerate(zip(since.free, since.busy, strict=True)):
            self._busy[number] += times * (self._busy[number] - busy)
            if self._free[number] != free:
                self._free[number] += delta
        for queue, (free, done) in self._queues.items():
            if (free, done) != since.queues.get(queue):
                self._queues[queue] = free + delta, done + delta
        for clock in self._clocks.values():
            if clock.touched > since.count:
                clock.shift(delta)
        for extent in self._extents.values():
            extent.reads.shift(since.count, delta)
            extent.writes.shift(since.count, delta)
        for spans in (self._dma, *self._ports.values()):
            spans.shift(delta)
        self._end += delta
