"""A schedule as MSCCL XML.

Every rank gets one thread block per peer, direction and channel, and one for local steps. Input and
output are one buffer where the collective allows it (inplace="1"). The order that a schedule has by
rounds is kept by dependencies: a step waits for the steps that wrote what it reads or overwrites,
and for those that read what it overwrites. The MSCCL runtime has limits (256 steps per thread
block, 32 thread blocks per channel) that large schedules exceed; they are not checked here.
"""

import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from trnsim.device.errors import BadInput

from .msccl import WHOLE, Slots
from .msccl_file import COLLECTIVES, Algorithm
from .schedule import ROOTED, Block, Collective, Schedule

MOST = 64  # chunks of one step; the runtime takes less than 72
Place = tuple[str, int]  # buffer, offset
Thread = tuple[str, int, int]  # "send" | "recv" | "local", peer, channel


def write_msccl(collective: Collective, schedule: Schedule) -> str:
    """The XML text. Raises BadInput for kinds that MSCCL does not have."""
    names = {kind: name for name, kind in reversed(COLLECTIVES.items())}
    if collective.kind not in names:
        raise BadInput("collective of MSCCL XML", collective.kind, names)
    gpus = _Gpus(collective, schedule)
    for b, repetition in schedule.each_round():
        gpus.round(b, repetition)
    pieces = 1 if collective.kind in WHOLE else collective.ranks
    top = ElementTree.Element(
        "algo",
        name=schedule.algorithm,
        proto="Simple",
        nchannels=str(schedule.channels),
        nchunksperloop=str(pieces * schedule.parts),
        ngpus=str(collective.ranks),
        coll=names[collective.kind],
        inplace=str(int(gpus.inplace)),
        outofplace=str(int(not gpus.inplace)),
        minBytes="0",
        maxBytes="0",
    )
    if collective.kind in ROOTED:
        top.set("root", str(collective.root))
    for rank, gpu in enumerate(gpus.all):
        top.append(gpu.element(rank, gpus.slots))
    ElementTree.indent(top)
    return ElementTree.tostring(top, encoding="unicode") + "\n"


@dataclass
class _Step:
    type: str
    src: Place
    dst: Place
    count: int
    wait: tuple[Thread, int] | None
    needed: bool = False


@dataclass
class _Gpu:
    """The thread blocks of a rank, and who wrote and read each of its chunks last."""

    scratch: int = 0
    threads: dict[Thread, list[_Step]] = field(default_factory=lambda: defaultdict(list))
    writer: dict[Place, tuple[Thread, int]] = field(default_factory=dict)
    readers: dict[Place, list[tuple[Thread, int]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def add(
        self, thread: Thread, kind: str, src: Place, dst: Place, count: int, *,
        reads: list[Place], writes: list[Place],
    ) -> None:  # fmt: skip
        """A step after all that it depends on; further dependencies are steps of type nop."""
        waits = self._waits(thread, reads, writes)
        steps = self.threads[thread]
        for wait in waits[:-1]:
            steps.append(_Step("nop", ("i", -1), ("o", -1), 0, wait))
        steps.append(_Step(kind, src, dst, count, waits[-1] if waits else None))
        for other, number in waits:
            self.threads[other][number].needed = True
        here = thread, len(steps) - 1
        for place in reads:
            self.readers[place].append(here)
        for place in writes:
            self.writer[place], self.readers[place] = here, []

    def _waits(
        self, thread: Thread, reads: list[Place], writes: list[Place]
    ) -> list[tuple[Thread, int]]:
        """The last step of each other thread block among those that have to come first."""
        found = [self.writer[p] for p in (*reads, *writes) if p in self.writer]
        found += [step for place in writes for step in self.readers[place]]
        last: dict[Thread, int] = {}
        for other, number in found:
            last[other] = max(number, last.get(other, -1))
        last.pop(thread, None)
        return sorted(last.items())

    def element(self, rank: int, slots: Slots) -> ElementTree.Element:
        """The <gpu> element."""
        sizes = {f"{b}_chunks": str(slots.size(rank, b)) for b in "io"}
        fields = {"id": str(rank), **sizes, "s_chunks": str(self.scratch)}
        node = ElementTree.Element("gpu", fields)
        number = {thread: i for i, thread in enumerate(sorted(self.threads))}
        for thread, i in number.items():
            way, peer, channel = thread
            ends = {"send": "-1", "recv": "-1"} | ({way: str(peer)} if way != "local" else {})
            fields = {"id": str(i), **ends, "chan": str(channel)}
            block = ElementTree.SubElement(node, "tb", fields)
            for s, step in enumerate(self.threads[thread]):
                wait = (number[step.wait[0]], step.wait[1]) if step.wait else (-1, -1)
                _element(block, s, step, wait)
        return node


def _element(block: ElementTree.Element, s: int, step: _Step, wait: tuple[int, int]) -> None:
    fields = {
        "s": s,
        "type": step.type,
        "srcbuf": step.src[0],
        "srcoff": step.src[1],
        "dstbuf": step.dst[0],
        "dstoff": step.dst[1],
        "cnt": step.count,
        "depid": wait[0],
        "deps": wait[1],
        "hasdep": int(step.needed),
    }
    ElementTree.SubElement(block, "step", {key: str(value) for key, value in fields.items()})


@dataclass(frozen=True)
class _Run:
    """Chunks that move together: contiguous at both ends."""

    src: int
    dst: int
    source: Place
    target: Place
    count: int
    reduce: bool
    channel: int
    again: bool


class _Gpus:
    """All ranks; `round` adds the steps of one round."""

    def __init__(self, collective: Collective, schedule: Schedule) -> None:
        kind, n, parts = collective.kind, collective.ranks, schedule.parts
        self.inplace = kind in (*WHOLE, "all_gather", "reduce_scatter")
        chunks = (1 if kind in WHOLE else n) * parts
        shape = Algorithm("", kind, n, chunks, self.inplace, collective.root)
        self.natural = schedule.natural(collective.pieces)
        self.slots = Slots(shape, collective, parts)
        self.all = [_Gpu() for _ in range(n)]
        self.places: dict[tuple[int, int], Place] = {}
        chunk = np.argsort(self.natural)
        for table in (self.slots.inputs, self.slots.outputs):
            for (rank, buffer, offset), natural in table.items():
                self.places[rank, int(chunk[natural])] = buffer, offset
        self._own(chunk)

    def _own(self, chunk: np.ndarray) -> None:
        """What is input and output of one rank in two buffers is copied first."""
        for (rank, *source), natural in self.slots.inputs.items():
            place, start = self.places[rank, int(chunk[natural])], (str(source[0]), int(source[1]))
            if place != start:
                self._local(rank, "cpy", start, place, 1)

    def round(self, b: Block, repetition: int) -> None:
        """Steps of one round: what ranks read, before what they overwrite."""
        runs = list(self._runs(b, repetition))
        saved = {run: self._saved(run) for run in runs if run.again}
        for run in runs:
            if run.src == run.dst and not run.again:
                kind = "re" if run.reduce else "cpy"
                self._local(run.src, kind, run.source, run.target, run.count)
        for run in runs:
            if run.src != run.dst:
                self.all[run.src].add(
                    ("send", run.dst, run.channel), "s", run.source, run.target, run.count,
                    reads=_places(run.source, run.count), writes=[],
                )  # fmt: skip
        for run in _by_message(runs):
            if run.again:
                self._local(run.src, "re", saved[run], run.target, run.count)
            elif run.src != run.dst:
                self._receive(run)

    def _receive(self, run: _Run) -> None:
        there = _places(run.target, run.count)
        source = run.target if run.reduce else run.source
        self.all[run.dst].add(
            ("recv", run.src, run.channel), "rrc" if run.reduce else "r", source, run.target,
            run.count, reads=there if run.reduce else [], writes=there,
        )  # fmt: skip

    def _local(self, rank: int, kind: str, source: Place, target: Place, count: int) -> None:
        there = _places(target, count)
        reads = _places(source, count) + (there if kind == "re" else [])
        thread = ("local", -1, 0)
        self.all[rank].add(thread, kind, source, target, count, reads=reads, writes=there)

    def _saved(self, run: _Run) -> Place:
        """A copy of what a rank adds to its chunk after another one has overwritten that."""
        place = self._scratch(run.src, run.count)
        self._local(run.src, "cpy", run.source, place, run.count)
        return place

    def _scratch(self, rank: int, count: int) -> Place:
        gpu = self.all[rank]
        gpu.scratch += count
        return "s", gpu.scratch - count

    def _place(self, rank: int, chunk: int) -> Place:
        if (rank, chunk) not in self.places:
            self.places[rank, chunk] = self._scratch(rank, 1)
        return self.places[rank, chunk]

    def _runs(self, b: Block, repetition: int) -> Iterator[_Run]:
        index, ids = b.expand(repetition)
        landed = b.landed(index, ids)
        last: _Run | None = None
        for t, chunk, there in zip(index.tolist(), ids.tolist(), landed.tolist(), strict=True):
            src, dst = int(b.src[t]), int(b.dst[t])
            one = _Run(
                src, dst, self._place(src, chunk), self._place(dst, there), 1, bool(b.reduce[t]),
                int(b.channel[t]), src == dst and chunk == there,
            )  # fmt: skip
            joined = None if last is None else _joined(last, one)
            if joined is None and last is not None:
                yield last
            last = joined or one
        if last is not None:
            yield last


def _joined(a: _Run, b: _Run) -> _Run | None:
    """Both as one run, if the second goes on where the first ends."""
    alike = (a.src, a.dst, a.reduce, a.channel, a.again) == (
        b.src, b.dst, b.reduce, b.channel, b.again,
    )  # fmt: skip
    next_ones = (a.source[0], a.source[1] + a.count), (a.target[0], a.target[1] + a.count)
    if not alike or (b.source, b.target) != next_ones or a.count >= MOST:
        return None
    return _Run(a.src, a.dst, a.source, a.target, a.count + 1, a.reduce, a.channel, a.again)


def _by_message(runs: list[_Run]) -> list[_Run]:
    """In the order in which ranks apply them: a pair's runs in the turn of its first."""
    turn: dict[tuple[int, int], int] = {}
    for number, run in enumerate(runs):
        turn.setdefault((run.src, run.dst), number)
    return sorted(runs, key=lambda run: turn[run.src, run.dst])


def _places(start: Place, count: int) -> list[Place]:
    return [(start[0], start[1] + i) for i in range(count)]
