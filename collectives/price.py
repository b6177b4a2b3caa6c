"""What a schedule costs on a fabric: per-rank virtual clocks, advanced round by round.

Rules, for all groups that run one collective at once:

- A rank works through the rounds in order. A transfer starts when its source has received what the
  rounds before gave it, the source's channel is free, and its destination has entered the
  collective. Before it, the source spends `Overheads.step_ps`.
- Sharing: within a round, the transfers of all groups over one link share it. The link needs
  (all bytes of the round over it) / rate, and a transfer takes as long as the slowest link on its
  route. So two equal transfers over one link each take twice as long, and disjoint ones do not
  affect each other. Rounds of groups that arrive at different times still count as simultaneous.
- The source's channel is busy for that long; the destination has the data one route latency later.
- A group never ends before its most loaded link could have carried everything that crosses it.

A repeated round costs the largest of its (nearly equal) chunks; when chunks differ by more than an
element, each repetition is priced with its own. In a repeated round the clocks follow a max-plus
linear law: once a repetition shifts all clocks of a group by one amount, all later ones do, and
they are added in one multiplication, exactly.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from trnsim.device.errors import BadInput
from trnsim.device.units import format_rate, transfer_ps

from .routes import Fabric, Routes
from .schedule import Block, Collective, Schedule

_NEVER = np.iinfo(np.int64).min


@dataclass(frozen=True)
class Overheads:
    """Software and controller costs, given by the caller; the default is an ideal machine.

    start_ps: once per collective and rank. step_ps: per round and sender. handshake: nobody starts
    before the last rank of the group has arrived; without it (and in every permute, where only the
    two ends of a pair have to meet) ranks start as they come.
    """

    start_ps: int = 0
    step_ps: int = 0
    handshake: bool = True


@dataclass(frozen=True, eq=False)
class Priced:
    """The price of one collective in G groups of n ranks.

    end: int64[G, n] ps. durations: int64[G] ps, from the last arrival of the group (without
    handshake: the first) to its last end. late: int64[G] the rank that arrived last.
    link_load: int64[links] bytes over each link. nbytes: size S as `Collective.nbytes`.
    bound_ps: what the most loaded link needs for its bytes alone. limited_by: for people.
    """

    algorithm: str
    rounds: int
    nbytes: int
    bus_factor: float
    end: np.ndarray
    durations: np.ndarray
    late: np.ndarray
    link_load: np.ndarray
    bound_ps: int
    limited_by: str

    @property
    def duration_ps(self) -> int:
        """The slowest group's duration."""
        return int(self.durations.max(initial=0))

    @property
    def algbw(self) -> float:
        """Bytes/s: S over the duration; 0 if nothing took time."""
        return self._rate(self.duration_ps) if self.duration_ps else 0.0

    @property
    def busbw(self) -> float:
        """Bytes/s: algbw times the factor of nccl-tests."""
        return self.algbw * self.bus_factor

    @property
    def bound_busbw(self) -> float:
        """Bytes/s: the bus bandwidth if only the most loaded link mattered; inf if none did."""
        return self._rate(self.bound_ps) * self.bus_factor if self.bound_ps else np.inf

    def _rate(self, ps: int) -> float:
        return self.nbytes * 1e12 / ps


def price(
    collective: Collective,
    schedule: Schedule,
    fabric: Fabric,
    groups: Sequence[Sequence[int]] | np.ndarray,
    *,
    arrivals: np.ndarray | None = None,
    overheads: Overheads | None = None,
) -> Priced:
    """Price one collective in all its groups. See `Pricer` to price one schedule many times."""
    return Pricer(schedule, fabric, groups).price(
        collective, arrivals=arrivals, overheads=overheads
    )


class Pricer:
    """A schedule in its groups on a fabric, with routes computed once, for any size and arrivals.

    groups: int[G, n] ranks of the fabric; each rank at most once. All G groups run the schedule at
    the same time and share links. Raises BadInput for a table that does not fit, TrnsimError for a
    rank that cannot be reached.
    """

    def __init__(
        self, schedule: Schedule, fabric: Fabric, groups: Sequence[Sequence[int]] | np.ndarray
    ) -> None:
        self.schedule, self.fabric = schedule.flat, fabric
        self.groups = _group_table(groups, schedule.ranks, fabric.ranks)
        known: dict[tuple[bytes, bytes], _Paths] = {}
        self._paths = [self._block_paths(block, known) for block in self.schedule.blocks]
        self._profiles: dict[tuple[Collective, Overheads], _Profile] = {}

    def price(
        self,
        collective: Collective,
        *,
        arrivals: np.ndarray | None = None,
        overheads: Overheads | None = None,
    ) -> Priced:
        """arrivals: int64[G, n] ps at which each rank calls the collective (default: all at 0)."""
        overheads = overheads or Overheads()
        if collective.kind in ("permute", "sendrecv"):
            overheads = replace(overheads, handshake=False)
        if collective.ranks != self.schedule.ranks:
            raise BadInput("ranks of the collective", collective.ranks, f"{self.schedule.ranks}")
        zero = np.zeros(self.groups.shape, np.int64)
        arrived = zero if arrivals is None else np.asarray(arrivals, np.int64)
        if arrived.shape != self.groups.shape:
            raise BadInput("shape of arrivals", arrived.shape, f"{self.groups.shape}")
        profile = self._profile(collective, overheads)
        begin = arrived.max(axis=1) if overheads.handshake else arrived.min(axis=1)
        if overheads.handshake:
            end = begin[:, None] + profile.end
        else:
            end = self._run(profile.rounds, arrived, overheads)
            end = np.maximum(end, (begin + profile.group_bound)[:, None])
        return self._priced(collective, profile, arrived, begin, end)

    def _priced(self, collective: Collective, profile: "_Profile", arrived, begin, end) -> Priced:
        durations = end.max(axis=1) - begin
        return Priced(
            algorithm=self.schedule.algorithm,
            rounds=self.schedule.rounds,
            nbytes=collective.nbytes,
            bus_factor=collective.bus_factor,
            end=end,
            durations=durations,
            late=self.groups[np.arange(len(arrived)), arrived.argmax(axis=1)],
            link_load=profile.load,
            bound_ps=profile.bound,
            limited_by=self._limited_by(profile, int(durations.max(initial=0))),
        )

    def _limited_by(self, profile: "_Profile", duration: int) -> str:
        if not duration:
            return "nothing: no data moves"
        if 2 * profile.bound < duration:
            return f"latency of {self.schedule.rounds} rounds"
        rate = format_rate(int(self.fabric.rate[profile.busiest]))
        return f"{self.fabric.link_name(profile.busiest)} ({rate})"

    def _block_paths(self, block: Block, known: dict[tuple[bytes, bytes], "_Paths"]) -> "_Paths":
        key = (block.src.tobytes(), np.ascontiguousarray(block.dst).tobytes())
        if key not in known:
            src, dst = self.groups[:, block.src], self.groups[:, block.dst]
            routes = self.fabric.routes(src.reshape(-1), dst.reshape(-1))
            shape = (len(self.groups), self.schedule.ranks)
            known[key] = _Paths(block.src, block.dst, shape, routes, self.fabric)
        return known[key]

    def _profile(self, collective: Collective, overheads: Overheads) -> "_Profile":
        key = (collective, overheads)
        if key not in self._profiles:
            if len(self._profiles) >= 64:
                self._profiles.clear()
            self._profiles[key] = self._new_profile(collective, overheads)
        return self._profiles[key]

    def _new_profile(self, collective: Collective, overheads: Overheads) -> "_Profile":
        rounds = self._rounds(collective)
        load = np.zeros(len(self.fabric.rate), np.int64)
        for r in rounds:
            load[r.paths.used] += r.load * r.count
        needed = np.zeros(len(load), np.int64)
        busy = np.flatnonzero(load)
        needed[busy] = _link_ps(load[busy], self.fabric.rate[busy])
        bound = np.zeros(len(self.groups), np.int64)
        for paths in {id(p): p for p in self._paths}.values():
            bound = np.maximum(bound, paths.slowest(needed[paths.used]).max(axis=1, initial=0))
        end = np.zeros(self.groups.shape, np.int64)
        if overheads.handshake:
            end = np.maximum(self._run(rounds, end, overheads), bound[:, None])
        return _Profile(rounds, load, bound, int(needed.max(initial=0)), int(needed.argmax()), end)

    def _rounds(self, collective: Collective) -> "list[_Round]":
        """Rounds with their durations; identical ones as one with a count."""
        counts = self.schedule.chunk_counts(collective) * collective.itemsize
        sizes = _Sizes(counts, collective.itemsize)
        rounds = []
        for block, paths in zip(self.schedule.blocks, self._paths, strict=True):
            if sizes.balanced or block.count == 1:
                nbytes = sizes.largest(block) if block.count > 1 else sizes.of(block, 0)
                rounds.append(paths.round(block, nbytes, block.count))
            else:
                each = (sizes.of(block, k) for k in range(block.count))
                rounds += [paths.round(block, nbytes, 1) for nbytes in each]
        return rounds

    def _run(
        self, rounds: "list[_Round]", arrivals: np.ndarray, overheads: Overheads
    ) -> np.ndarray:
        """int64[G, n]: when each rank ends; at once if nothing moves (a group of one rank)."""
        if not any(r.moving.size for r in rounds):
            return arrivals
        clocks = _Clocks(arrivals + overheads.start_ps, self.schedule.channels, overheads.step_ps)
        for r in rounds:
            clocks.repeat(r)
        return clocks.end()


@dataclass(frozen=True, eq=False)
class _Profile:
    """All of a price that does not depend on arrivals. `end` is relative to the last arrival."""

    rounds: "list[_Round]"
    load: np.ndarray
    group_bound: np.ndarray
    bound: int
    busiest: int
    end: np.ndarray


@dataclass(frozen=True, eq=False)
class _Round:
    """A round of R moving transfers in every group, `count` times.

    moving: int[R] rows of the block that move data; duration: int64[G, R] ps;
    load: int64[used links] bytes in one repetition; channel: int[R].
    """

    paths: "_Paths"
    moving: np.ndarray
    channel: np.ndarray
    duration: np.ndarray
    load: np.ndarray
    count: int

    @cached_property
    def index(self) -> "_Index":
        """Where its transfers are among the clocks."""
        return self.paths.index(self.moving, self.channel)


class _Paths:
    """The routes of a block's pairs in all groups, in compact numbers of the links they use."""

    def __init__(
        self,
        src: np.ndarray,
        dst: np.ndarray,
        shape: tuple[int, int],
        routes: Routes,
        fabric: Fabric,
    ) -> None:
        self.src, self.dst, self.shape, self.groups = src, dst, shape, shape[0]
        self.indices: dict[bytes, _Index] = {}
        self.used, self.link = np.unique(routes.links, return_inverse=True)
        self.pairs, self.starts = routes.pairs, routes.starts
        self.rate = fabric.rate[self.used]
        self.latency = routes.latency.reshape(self.groups, len(src))

    @cached_property
    def filled(self) -> np.ndarray:
        """Pairs whose route has links at all."""
        return np.flatnonzero(np.diff(self.starts))

    def index(self, rows: np.ndarray, channel: np.ndarray) -> "_Index":
        """Clock indices of these rows of the block; kept for the next round of the same rows."""
        key = rows.tobytes() + np.ascontiguousarray(channel).tobytes()
        if key not in self.indices:
            latency = self.latency[:, rows]
            made = _Index(self.src[rows], self.dst[rows], channel, latency, self.shape)
            self.indices = {key: made}
        return self.indices[key]

    def slowest(self, link_ps: np.ndarray) -> np.ndarray:
        """int64[G, T]: the largest of link_ps (int64[used]) on each pair's route."""
        worst = np.zeros(len(self.starts) - 1, np.int64)
        if self.filled.size:
            worst[self.filled] = np.maximum.reduceat(link_ps[self.link], self.starts[self.filled])
        return worst.reshape(self.groups, len(self.src))

    def round(self, block: Block, nbytes: np.ndarray, count: int) -> _Round:
        """The round in which transfer t of every group moves nbytes[t] bytes."""
        each = np.tile(nbytes, self.groups)
        load = np.bincount(self.link, weights=each[self.pairs], minlength=len(self.used))
        load = load.astype(np.int64)
        moving = np.flatnonzero(nbytes)
        duration = self.slowest(_link_ps(load, self.rate))[:, moving]
        return _Round(self, moving, block.channel[moving], duration, load, count)


class _Sizes:
    """Bytes of the transfers of a block."""

    def __init__(self, chunks: np.ndarray, itemsize: int) -> None:
        spread = int(chunks.max() - chunks.min()) if chunks.size else 0
        self.balanced = spread <= itemsize
        self.equal = int(chunks[0]) if chunks.size and not spread else None
        self.before = np.concatenate([[0], np.cumsum(chunks)])

    def of(self, block: Block, repetition: int) -> np.ndarray:
        """int64[T]: exact bytes in one repetition."""
        if self.equal is not None:
            return block.span.astype(np.int64) * self.equal
        first = block.first(repetition)
        over = np.maximum(first + block.span - block.modulus, 0)  # chunks beyond the wrap
        start = block.offset + first
        nbytes = self.before[start + block.span - over] - self.before[start]
        return nbytes + self.before[block.offset + over] - self.before[block.offset]

    def largest(self, block: Block) -> np.ndarray:
        """int64[T]: the largest transfer of the same span in the round, for each transfer."""
        nbytes, spans = self.of(block, 0), block.span
        most = {span: nbytes[spans == span].max() for span in np.unique(spans).tolist()}
        return np.array([most[span] for span in spans.tolist()], np.int64)


class _Clocks:
    """Per rank: when it has all that was sent to it, and when each of its channels is free."""

    def __init__(self, entered: np.ndarray, channels: int, step_ps: int) -> None:
        self.shape, self.step_ps = entered.shape, step_ps
        self.entered = entered.reshape(-1)
        self.ready = self.entered.copy()
        self.free = np.tile(self.entered, channels)

    def end(self) -> np.ndarray:
        free = self.free.reshape(-1, self.ready.size).max(axis=0)
        return np.maximum(self.ready, free).reshape(self.shape)

    def repeat(self, r: _Round) -> None:
        """Advance by r.count repetitions, by multiplication as soon as that is exact."""
        if not r.moving.size:
            return
        index = r.index
        for left in range(r.count - 1, -1, -1):
            ready, free = self.ready.copy(), self.free.copy()
            start = self._advance(r)
            shift = self._shift(r, ready, free, start) if left else None
            if shift is not None:
                self.ready[index.receivers] += left * shift[index.receivers // self.shape[1]]
                group = index.senders % self.ready.size // self.shape[1]
                self.free[index.senders] += left * shift[group]
                return

    def _advance(self, r: _Round) -> np.ndarray:
        """One repetition; returns when each transfer starts."""
        index = r.index
        start = np.maximum(self.ready[index.src], self.free[index.channel_src])
        start = np.maximum(start, self.entered[index.dst])
        sent = start + (r.duration.reshape(-1) + self.step_ps)
        np.maximum.at(self.free, index.channel_src, sent)
        np.maximum.at(self.ready, index.dst, sent + index.latency)
        return start

    def _shift(
        self, r: _Round, ready: np.ndarray, free: np.ndarray, start: np.ndarray
    ) -> np.ndarray | None:
        """int64[G]: what the last repetition added to every clock it moves, if it was one amount.

        Also required: no start was set by a clock that this round leaves alone (an arrival, or a
        sender that receives nothing), because those do not move along.
        """
        index = r.index
        own = np.where(index.src_receives, ready[index.src], _NEVER)
        if (np.maximum(own, free[index.channel_src]) != start).any():
            return None
        groups = self.shape[0]
        got = (self.ready - ready)[index.dst].reshape(groups, -1)
        sent = (self.free - free)[index.channel_src].reshape(groups, -1)
        shift = sent[:, 0]
        same = (got == shift[:, None]).all() and (sent == shift[:, None]).all()
        return shift if same else None


class _Index:
    """Flat clock indices [G * R] of transfers (positions src, dst, channel) in G groups of n.

    Clocks are group-major; those of channel c follow those of channel c - 1.
    """

    def __init__(
        self,
        src: np.ndarray,
        dst: np.ndarray,
        channel: np.ndarray,
        latency: np.ndarray,
        shape: tuple[int, int],
    ) -> None:
        groups, n = shape
        first = np.arange(groups)[:, None] * n
        self.src = (first + src).reshape(-1)
        self.dst = (first + dst).reshape(-1)
        self.channel_src = (first + src + channel.astype(np.int64) * groups * n).reshape(-1)
        self.latency = latency.reshape(-1)
        self.receivers = np.unique(self.dst)
        self.senders = np.unique(self.channel_src)
        self.src_receives = np.tile(np.isin(src, dst), groups)


def _link_ps(load: np.ndarray, rate: np.ndarray) -> np.ndarray:
    """int64: picoseconds for `load` bytes at `rate`, rounded up, exact, once per distinct pair."""
    times = np.empty(len(load), np.int64)
    for speed in np.unique(rate).tolist():
        mine = np.flatnonzero(rate == speed)
        loads, which = np.unique(load[mine], return_inverse=True)
        each = [transfer_ps(nbytes, speed) for nbytes in loads.tolist()]
        times[mine] = np.array(each, np.int64)[which]
    return times


def _group_table(
    groups: Sequence[Sequence[int]] | np.ndarray, n: int, available: int
) -> np.ndarray:
    sizes = {len(group) for group in groups}
    if sizes != {n}:
        raise BadInput("group size", ", ".join(map(str, sorted(sizes))), f"{n}, as the schedule")
    table = np.array(groups, np.int64)
    outside = table[(table < 0) | (table >= available)]
    if outside.size:
        raise BadInput("rank of a group", int(outside[0]), f"0..{available - 1}")
    ranks, times = np.unique(table, return_counts=True)
    if (times > 1).any():
        raise BadInput("rank of a group", int(ranks[times > 1][0]), "each rank at most once")
    return table
