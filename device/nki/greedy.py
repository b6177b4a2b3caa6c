"""The order in which a scheduler would issue a kernel's instructions: list scheduling.

The hardware's compiler may issue what a kernel leaves open in another order than the program's.
Rule: whenever an engine (or a queue of DMA) is free, it takes, of the instructions whose
dependences have been met, the one with the longest path to the end of the kernel. It chooses
among the `WINDOW` instructions from the oldest that has not been issued. An instruction whose
engine the kernel left open goes to the engine that would end it first. Nothing passes a meeting of
the cores, or a collective. Addresses are those of the run, so the reuse of a buffer orders its
users.

The times of the new order are those of the same timelines as the program's.
"""

import heapq
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from ..chip import Chip
from ..errors import TrnsimError
from ..isa.base import Instruction
from .dependences import Dependences
from .retime import retime
from .timeline import KernelCore
from .trace import Collected, Entry, Issued, Met, Trace

WINDOW = 1024
MOVABLE = ("vector", "scalar", "gpsimd")


def greedy(traces: Sequence[Trace], chip: Chip) -> list[KernelCore]:
    """Cores on which the traces were timed in the scheduler's order."""
    return retime([_Scheduler(trace, chip).run() for trace in traces], chip)


class _Scheduler:
    """One core's trace being put in order."""

    def __init__(self, trace: Trace, chip: Chip) -> None:
        self.trace, self.core = trace, KernelCore(chip, data=False)
        self.chip, self.entries = chip, trace.entries
        self.before = Dependences(trace).of
        self.behind: list[list[int]] = [[] for _ in self.entries]
        for place, needed in enumerate(self.before):
            for other in needed:
                self.behind[other].append(place)
        self.options = [self._options(entry) for entry in self.entries]
        self.rank = self._ranks()
        self.free: dict[str, int] = {}
        self.booked: dict[str, int] = {}  # until when a server has work that was given to it
        self.ends: dict[int, int] = {}  # of entries that have been issued
        self.where: dict[int, str] = {}
        self.order: list[int] = []
        self.missing = [len(needed) for needed in self.before]
        self.waiting: dict[str, list[tuple[int, int]]] = {}  # (ready, place), by ready
        self.ready: dict[str, list[tuple[int, int]]] = {}  # (-rank, place), by rank
        self.held: list[int] = []
        self.oldest = 0
        self.limit = 0

    # ---- what an instruction may cost --------------------------------------------------------

    def _options(self, entry: Entry) -> dict[str, tuple[int, int]]:
        """By server, an engine or a DMA queue: (how long it is taken, how long until the end)."""
        if isinstance(entry, Met):
            return {entry.engine: (self.chip.core_barrier_ps, self.chip.core_barrier_ps)}
        if isinstance(entry, Collected):
            return {"dma collective": (0, entry.alone)}
        instruction = entry.instruction
        if instruction.engine == "dma":
            taken = max(self.chip.dma_dge_ps, instruction.work(self.chip))
            lasts = self.chip.dma_start_ps + instruction.duration(self.chip)
            return {f"dma {entry.queue}": (taken, lasts)}
        costs = {instruction.engine: instruction.duration(self.chip)}
        for engine in MOVABLE if entry.free else ():
            moved = on_engine(instruction, engine, self.chip)
            if moved is not None:
                costs[engine] = moved.duration(self.chip)
        return {engine: (cost, cost) for engine, cost in costs.items()}

    def _ranks(self) -> list[int]:
        """The longest path from each entry's start to the end."""
        rank = [0] * len(self.entries)
        for place in range(len(self.entries) - 1, -1, -1):
            lasts = min(lasts for _, lasts in self.options[place].values())
            rank[place] = lasts + max((rank[other] for other in self.behind[place]), default=0)
        return rank

    # ---- the order ---------------------------------------------------------------------------

    def run(self) -> Trace:
        """The trace in the new order."""
        start = 0
        for place, entry in enumerate(self.entries):
            if not isinstance(entry, Issued):
                self._segment(start, place)
                (server,) = self.options[place]
                self._issue(place, server, self._ready(place, server))
                start = place + 1
        self._segment(start, len(self.entries))
        return self._reordered()

    def _segment(self, start: int, stop: int) -> None:
        self.oldest, self.limit = start, stop
        for place in range(start, stop):
            if not self.missing[place]:
                self._offer(place)
        while self.oldest < stop:
            server, time = self._next_server()
            heap = self.ready[server]
            waiting = self.waiting[server]
            while waiting and waiting[0][0] <= time:
                place = heapq.heappop(waiting)[1]
                heapq.heappush(heap, (-self.rank[place], place))
            place = heapq.heappop(heap)[1]
            if place not in self.where:
                self._issue(place, server, time)

    def _next_server(self) -> tuple[str, int]:
        """The server that can start something first, and when."""
        best, when = "", -1
        for server, waiting in self.waiting.items():
            self._drop_issued(server)
            heap, free = self.ready[server], self.free.get(server, 0)
            if not heap and not waiting:
                continue
            time = free if heap else max(free, waiting[0][0])
            if when < 0 or time < when:
                best, when = server, time
        return best, when

    def _drop_issued(self, server: str) -> None:
        for heap in (self.waiting[server], self.ready[server]):
            while heap and heap[0][1] in self.where:
                heapq.heappop(heap)

    def _offer(self, place: int) -> None:
        """An entry whose dependences have been issued can be chosen, if the window reaches it."""
        if place >= self.oldest + WINDOW:
            heapq.heappush(self.held, place)
            return
        server = min(self.options[place], key=lambda s: (self._finish(place, s), s))
        taken, lasts = self.options[place][server]
        self.booked[server] = self._finish(place, server) - lasts + taken
        self.ready.setdefault(server, [])
        heapq.heappush(self.waiting.setdefault(server, []), (self._ready(place, server), place))

    def _finish(self, place: int, server: str) -> int:
        """When an entry would end on a server, after what has been given to it."""
        start = max(self._ready(place, server), self.booked.get(server, 0))
        return start + self.options[place][server][1]

    def _ready(self, place: int, server: str) -> int:
        """When what an entry depends on lets it start on a server."""
        time, engine = 0, server.partition(" ")[0]
        for other, data in self.before[place].items():
            producer = self.where[other]
            same = producer == server and engine != "dma"
            end = self.ends[other]
            if data or not same:
                end += self.core.timeline.latency(producer.partition(" ")[0])
            if same and not data:
                continue
            time = max(time, end + self.core.handover(producer.partition(" ")[0], engine))
        return time

    def _issue(self, place: int, server: str, time: int) -> None:
        taken, lasts = self.options[place][server]
        start = max(time, self.free.get(server, 0))
        self.free[server] = start + taken
        self.ends[place], self.where[place] = start + lasts, server
        self.order.append(place)
        while self.oldest < self.limit and self.oldest in self.where:
            self.oldest += 1
        while self.held and self.held[0] < self.oldest + WINDOW:
            self._offer(heapq.heappop(self.held))
        for other in self.behind[place]:
            self.missing[other] -= 1
            if not self.missing[other] and other < self.limit:
                self._offer(other)

    def _reordered(self) -> Trace:
        position = {place: number for number, place in enumerate(self.order)}
        after = [(position[a], position[b]) for a, b in self.trace.after]
        entries = [self._entry(place) for place in self.order]
        return Trace(entries, after, whole=self.trace.whole)

    def _entry(self, place: int) -> Entry:
        entry, server = self.entries[place], self.where[place]
        if not isinstance(entry, Issued):
            return entry
        if server in (entry.instruction.engine, f"dma {entry.queue}"):
            return entry
        moved = on_engine(entry.instruction, server, self.chip)
        assert moved is not None
        return entry._replace(instruction=moved)


def on_engine(instruction: Any, engine: str, chip: Chip) -> Instruction | None:
    """The instruction on another engine, or None if it cannot run there with the same values.

    Scalar computes in float32, so 32-bit integers stay where they are.
    """
    if not _may_move(type(instruction)) or engine == instruction.engine:
        return None
    if any(view.dtype in ("i32", "ui32") for view in (*instruction.reads(), *instruction.writes())):
        return None
    moved = replace(instruction, engine=engine)
    try:
        moved.check(chip)
    except TrnsimError:
        return None
    return moved


@lru_cache
def _may_move(kind: type) -> bool:
    return "engine" in getattr(kind, "__dataclass_fields__", {})
