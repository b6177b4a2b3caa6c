"""The compatibility profile `astra`: what ASTRA-sim 2 would say, on this simulator's schedules.

Its rules, after its public source and the closed forms that follow from it, confirmed by its runs:

- A collective is cut into `splits` chunks of size // splits bytes; the last is not shortened.
- A chunk passes through phases, one dimension each. all_reduce (localBWAware): reduce_scatter in
  each dimension but the last, all_reduce in the last, all_gather back; `baseline`: all_reduce in
  each. reduce_scatter and all_to_all: dimensions upwards; all_gather: downwards. `size` of an
  all_gather is the shard.
- In each dimension, `active` chunks are in flight; the others wait in the order they came.
- A phase takes one endpoint delay, and in each round another one, the message, and after a reducing
  round three passes over local memory (two reads, one write) of one message, floored. In
  halvingDoubling, what is reduced is the part that is sent next.
- `unaware`: a message takes floor(hops * latency + bytes / rate) whatever else is on the link.
- `aware`: a directed link is busy for floor(bytes / rate), first come first served; the next device
  has the message after floor(latency + bytes / rate), and only then passes it on.

All times are whole ns, floored as ASTRA-sim does. The rules of `unaware` let a chip send more than
its ports carry: then `Simulated.beats_port` is set, and `time_ns` is the bound of the ports.
"""

import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from trnsim.collectives.algorithms import mesh, pairwise, rdh, ring
from trnsim.collectives.schedule import Collective, Schedule
from trnsim.device.errors import BadInput

from .astra import Dimension, Network, System

RULES = ("unaware", "aware")
SCHEDULES: dict[str, Callable[[Collective], Schedule]] = {
    "ring": ring.schedule,
    "direct": mesh.schedule,
    "halvingDoubling": rdh.schedule,
}


@dataclass(frozen=True)
class Simulated:
    """peer_ns: what ASTRA-sim would print. port_ns: what a chip's links together need at least for
    what it must send or receive. time_ns: the later of both."""

    peer_ns: int
    port_ns: int

    @property
    def beats_port(self) -> bool:
        """Whether ASTRA-sim's time is shorter than the chip's ports allow."""
        return self.peer_ns < self.port_ns

    @property
    def time_ns(self) -> int:
        return max(self.peer_ns, self.port_ns)


def simulate(network: Network, system: System, kind: str, nbytes: int, rule: str) -> Simulated:
    """One collective over all NPUs. nbytes: the buffer of an NPU; of an all_gather, its shard.

    Raises BadInput for a kind, rule, size or group that the profile does not have.
    """
    if rule not in RULES:
        raise BadInput("rule of profile astra", rule, RULES)
    if kind not in system.algorithms:
        raise BadInput("collective of profile astra", kind, tuple(system.algorithms))
    chunk, chunks = chunking(nbytes, system.splits, kind, network.npus)
    phases = [_phase(network, system, *row) for row in _plan(network, system, kind, chunk)]
    if rule == "unaware":
        peer = _queued(
            [(p.level, p.duration(system.endpoint_delay)) for p in phases], system, chunks
        )
    else:
        alone = [phase.alone(system.endpoint_delay) for phase in phases]
        quick = chunks == 1 and None not in alone
        peer = sum(filter(None, alone)) if quick else _Events(network, system, phases, chunks).run()
    return Simulated(peer, port_ns(network, kind, nbytes))


def chunking(nbytes: int, splits: int, kind: str, npus: int) -> tuple[int, int]:
    """(bytes per chunk, number of chunks); the last chunk is as long as the others."""
    if nbytes < 1:
        raise BadInput("size", nbytes, "1 byte or more")
    chunk = nbytes // splits
    if kind == "all_gather" and not chunk:
        raise BadInput("size", nbytes, f"{splits} bytes or more: one per chunk", splits)
    if kind != "all_gather" and chunk < npus:
        chunk, nbytes = npus, splits * npus
    return chunk, -(-nbytes // chunk)


def port_ns(network: Network, kind: str, nbytes: int) -> int:
    """What an NPU must send at least over the rate of all its links, floored to ns."""
    n = network.npus
    crossing = {"all_reduce": 2 * (n - 1) * nbytes // n, "all_gather": (n - 1) * nbytes}
    bytes_out = crossing.get(kind, (n - 1) * nbytes // n)
    egress = sum(dim.bytes_per_s * _ports(dim) for dim in network.dims)
    return bytes_out * 10**9 // egress


def _ports(dim: Dimension) -> int:
    return {"Ring": min(2, dim.size - 1), "FullyConnected": dim.size - 1, "Switch": 1}[dim.topology]


Row = tuple[int, str, str, int]  # level, kind, algorithm, bytes


def _plan(network: Network, system: System, kind: str, chunk: int) -> list[Row]:
    """The phases of one chunk, in order."""
    sizes = [dim.size for dim in network.dims]
    names, levels = system.algorithms[kind], range(len(sizes))
    if kind == "all_to_all" or (kind == "all_reduce" and system.optimisation == "baseline"):
        return [(level, kind, names[level], chunk) for level in levels]
    rows: list[Row] = []
    if kind == "all_gather":
        for level in reversed(levels):
            rows.append((level, kind, names[level], chunk))
            chunk *= sizes[level]
        return rows
    for level in levels if kind == "reduce_scatter" else levels[:-1]:
        rows.append((level, "reduce_scatter", names[level], chunk))
        chunk //= sizes[level]
    if kind == "reduce_scatter":
        return rows
    rows.append((levels[-1], kind, names[-1], chunk))
    for level in reversed(levels[:-1]):
        rows.append((level, "all_gather", names[level], chunk))
        chunk *= sizes[level]
    return rows


@dataclass(frozen=True, eq=False)
class _Round:
    """`count` equal rounds of messages of `nbytes`; peers[i]: the positions that i sends to.
    local: ns that a rank spends on its memory after it has received."""

    peers: tuple[tuple[int, ...], ...]
    nbytes: int
    local: int
    count: int


@dataclass(frozen=True, eq=False)
class _Phase:
    """One chunk's way through one dimension."""

    level: int
    dim: Dimension
    rounds: tuple[_Round, ...]

    @cached_property
    def steps(self) -> list[_Round]:
        """Every round, repetitions one by one."""
        return [r for r in self.rounds for _ in range(r.count)]

    @cached_property
    def expected(self) -> list[list[int]]:
        """Messages that each position receives in each of `steps`."""
        every = {id(r): Counter(j for peers in r.peers for j in peers) for r in self.rounds}
        return [[every[id(r)][i] for i in range(self.dim.size)] for r in self.steps]

    def duration(self, delay: int) -> int:
        """ns without other traffic: the rules of `unaware`."""
        rounds = (r.count * (delay + r.local + self._message(r)) for r in self.rounds)
        return delay + sum(rounds)

    def alone(self, delay: int) -> int | None:
        """ns by the rules of `aware`, if no two messages of a round ever use one link."""
        total = delay
        for r in self.rounds:
            ways = [_way(self.dim, i, j) for i, peers in enumerate(r.peers) for j in peers]
            links = [link for way in ways for link in way]
            if len(set(links)) < len(links):
                return None
            hop = int(_latency(self.dim) + r.nbytes / _rate(self.dim))
            total += r.count * (delay + r.local + hop * max(map(len, ways)))
        return total

    def _message(self, r: _Round) -> int:
        pairs = ((i, j) for i, peers in enumerate(r.peers) for j in peers)
        hops = max(len(_way(self.dim, i, j)) for i, j in set(_alike(self.dim, pairs)))
        return int(hops * _latency(self.dim) + r.nbytes / _rate(self.dim))


def _alike(dim: Dimension, pairs: Iterator[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Pairs of positions with equal routes, each as one pair that starts at 0."""
    return ((0, (j - i) % dim.size) for i, j in pairs)


def _phase(
    network: Network, system: System, level: int, kind: str, algorithm: str, chunk: int
) -> _Phase:
    dim = network.dims[level]
    rounds = list(_rounds(kind, algorithm, dim.size, chunk))
    reduced = [3 * int(r.nbytes / system.local_mem_bw) if local else 0 for r, local in rounds]
    if algorithm == "halvingDoubling":  # it reduces what it sends next, and nothing at the end
        again = [
            later if local else 0 for (_, local), later in zip(rounds[1:], reduced[1:], strict=True)
        ]
        reduced = [*again, 0]
    made = (
        _Round(r.peers, r.nbytes, local, r.count)
        for (r, _), local in zip(rounds, reduced, strict=True)
    )
    return _Phase(level, dim, tuple(made))


def _rounds(kind: str, algorithm: str, n: int, chunk: int) -> Iterator[tuple[_Round, bool]]:
    """(round, whether it reduces) of this simulator's schedule for a group of n."""
    if (kind, algorithm) == ("all_to_all", "ring"):
        yield _handed_on(n, chunk), False
        return
    if algorithm == "halvingDoubling" and (n & (n - 1) or kind == "all_to_all"):
        raise BadInput(f"{kind} by halvingDoubling over", n, "a power of two, and no all_to_all")
    reduction = "add" if kind in ("all_reduce", "reduce_scatter") else None
    schedule = SCHEDULES[algorithm](Collective(kind, n, 1, reduction=reduction)).flat
    for block in schedule.blocks:
        peers: list[list[int]] = [[] for _ in range(n)]
        for source, target in zip(block.src.tolist(), block.dst.tolist(), strict=True):
            peers[source].append(target)
        order = tuple(tuple(sorted(p, key=lambda j: (j - i) % n)) for i, p in enumerate(peers))
        pieces = int(block.span[0]) * chunk
        nbytes = pieces if kind == "all_gather" else pieces // n
        yield _Round(order, nbytes, 0, block.count), bool(block.reduce[0])


def _handed_on(n: int, chunk: int) -> _Round:
    """all_to_all on a ring: pairwise exchange, a message to the k-th rank handed on k times."""
    schedule = pairwise.schedule(Collective("all_to_all", n, 1)).flat
    steps = sum(int(b.dst[0] - b.src[0]) % n * b.count for b in schedule.blocks)
    return _Round(tuple(((i + 1) % n,) for i in range(n)), chunk // n, 0, steps)


def _rate(dim: Dimension) -> float:
    """Bytes per ns."""
    return dim.bytes_per_s / 1e9


def _latency(dim: Dimension) -> float:
    """ns per link."""
    return dim.latency_ps / 1e3


Way = tuple[tuple[int, int], ...]  # directed links by their two ends; a switch is position -1


def _way(dim: Dimension, source: int, target: int) -> Way:
    """The links between two positions of a dimension; on a ring the shorter way, ties upwards."""
    if dim.topology == "Switch":
        return (source, -1), (-1, target)
    if dim.topology == "FullyConnected":
        return ((source, target),)
    n, ahead = dim.size, (target - source) % dim.size
    step = 1 if 2 * ahead <= n else -1
    stops = [(source + step * k) % n for k in range(min(ahead, n - ahead) + 1)]
    return tuple(zip(stops[:-1], stops[1:], strict=True))


def _queued(phases: list[tuple[int, int]], system: System, chunks: int) -> int:
    """ns until all chunks have passed all phases (level, ns), with the queues of the levels."""
    waiting: dict[int, deque[int]] = {level: deque() for level, _ in phases}
    free = dict.fromkeys(waiting, system.slots)
    done = [0] * chunks  # phases that each chunk has passed
    ends: list[tuple[int, int, int]] = []
    clock = order = 0

    def enter(chunk: int) -> None:
        if done[chunk] < len(phases):
            waiting[phases[done[chunk]][0]].append(chunk)

    for chunk in range(chunks):
        enter(chunk)
    while True:
        for level, queue in waiting.items():
            while free[level] and queue:
                chunk = queue.popleft()
                free[level] -= 1
                heapq.heappush(ends, (clock + phases[done[chunk]][1], order, chunk))
                order += 1
        if not ends:
            return clock
        clock, _, chunk = heapq.heappop(ends)
        free[phases[done[chunk]][0]] += 1
        done[chunk] += 1
        enter(chunk)


class _Events:
    """The rules of `aware`: every message on every link, every rank at its own pace."""

    def __init__(self, network: Network, system: System, phases: list[_Phase], chunks: int) -> None:
        self.system, self.phases, self.chunks = system, phases, chunks
        self.rows = [network.groups(level) for level in range(len(network.dims))]
        self.place = [self._places(row) for row in self.rows]
        self.busy: dict[tuple[int, int, int, int], int] = {}
        self.queue: list[tuple[int, int, Callable[..., None], tuple]] = []
        self.got: Counter[tuple[int, int, int, int]] = Counter()
        self.at: dict[tuple[int, int], tuple[int, int, int]] = {}
        self.waiting = [[deque() for _ in self.rows] for _ in range(network.npus)]
        self.free = [[system.slots] * len(self.rows) for _ in range(network.npus)]
        self.order = self.end = 0

    @staticmethod
    def _places(rows: np.ndarray) -> list[tuple[int, int]]:
        """(group, position) of each NPU."""
        where = {npu: (g, i) for g, row in enumerate(rows.tolist()) for i, npu in enumerate(row)}
        return [where[npu] for npu in range(len(where))]

    def run(self) -> int:
        """ns until every rank has every chunk."""
        for npu in range(len(self.waiting)):
            for chunk in range(self.chunks):
                self._enter(0, npu, chunk, 0)
        while self.queue:
            now, _, event, about = heapq.heappop(self.queue)
            self.end = max(self.end, now)
            event(now, *about)
        return self.end

    def _later(self, when: int, event: Callable[..., None], *about) -> None:
        heapq.heappush(self.queue, (when, self.order, event, about))
        self.order += 1

    def _enter(self, now: int, npu: int, chunk: int, phase: int) -> None:
        """A chunk comes to the queue of a phase's dimension."""
        level = self.phases[phase].level
        self.waiting[npu][level].append((chunk, phase))
        self._admit(now, npu, level)

    def _admit(self, now: int, npu: int, level: int) -> None:
        while self.free[npu][level] and self.waiting[npu][level]:
            self.free[npu][level] -= 1
            chunk, phase = self.waiting[npu][level].popleft()
            self._later(now + self.system.endpoint_delay, self._send, npu, chunk, phase, 0)

    def _send(self, now: int, npu: int, chunk: int, phase: int, step: int) -> None:
        """A rank sends its messages of one round, and looks whether it has received all already."""
        work = self.phases[phase]
        group, position = self.place[work.level][npu]
        for peer in work.steps[step].peers[position]:
            other = int(self.rows[work.level][group, peer])
            way = _way(work.dim, position, peer)
            self._hop(now, way, group, (other, chunk, phase, step))
        self.at[npu, chunk] = (phase, step, 0)
        self._proceed(now, npu, chunk)

    def _hop(self, now: int, way: Way, group: int, message: tuple[int, int, int, int]) -> None:
        """A message is at the start of the first link of `way`, or has arrived."""
        npu, chunk, phase, step = message
        if not way:
            self.got[message] += 1
            self._proceed(now, npu, chunk)
            return
        work = self.phases[phase]
        nbytes, link = work.steps[step].nbytes, (work.level, group, *way[0])
        start = max(now, self.busy.get(link, 0))
        self.busy[link] = start + int(nbytes / _rate(work.dim))
        arrival = start + int(_latency(work.dim) + nbytes / _rate(work.dim))
        self._later(arrival, self._hop, way[1:], group, message)

    def _proceed(self, now: int, npu: int, chunk: int) -> None:
        """Go on to the next round if this one's messages have all come."""
        phase, step, _ = self.at.get((npu, chunk), (-1, -1, 0))
        work = self.phases[phase]
        position = self.place[work.level][npu][1]
        if phase < 0 or self.got[npu, chunk, phase, step] < work.expected[step][position]:
            return
        del self.got[npu, chunk, phase, step], self.at[npu, chunk]
        then = now + work.steps[step].local + self.system.endpoint_delay
        if step + 1 < len(work.steps):
            self._later(then, self._send, npu, chunk, phase, step + 1)
        else:
            self._later(then, self._leave, npu, chunk, phase)

    def _leave(self, now: int, npu: int, chunk: int, phase: int) -> None:
        level = self.phases[phase].level
        self.free[npu][level] += 1
        if phase + 1 < len(self.phases):
            self._enter(now, npu, chunk, phase + 1)
        self._admit(now, npu, level)
