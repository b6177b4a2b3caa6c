"""The rounds of a schedule in its groups: loads, durations, and the clocks' way through them."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from .clocks import Clocks, Places, Round
from .copies import Fold
from .costs import Overheads
from .loads import Paths, Touch
from .resources import Resources, classes, needed_ps
from .schedule import POINT_TO_POINT, Block, Collective, Schedule

Bytes = np.ndarray | int  # of each transfer, or of all


class Rounds:
    """A schedule in the groups int[G, n], on resources."""

    def __init__(
        self, schedule: Schedule, resources: Resources, groups: np.ndarray, *, fold: bool = True
    ) -> None:
        self.schedule, self.resources, self.all_groups = schedule, resources, groups
        self.copies = resources.copies
        self.fold = self.copies.fold(groups) if fold else None
        self._lay(groups if self.fold is None else groups[self.fold.rows], fold)
        if self.fold is not None and not all(self.fold.stays(s.paths.used) for s in self.steps):
            self.fold = None
            self._lay(groups, fold)

    def _lay(self, table: np.ndarray, fold: bool) -> None:
        """Find the paths of every block for these groups."""
        self.table = table
        known: dict[tuple, _Step] = {}
        self.steps = [self._step(block, fold, known) for block in self.schedule.blocks]

    def _step(self, block: Block, fold: bool, known: "dict[tuple, _Step]") -> "_Step":
        key = _pattern_key(block, self.resources.memory is not None)
        if key not in known:
            known[key] = _Step(self, block, fold)
        return known[key]

    @cached_property
    def unfolded(self) -> "Rounds":
        """The same without taking anything for equal."""
        return Rounds(self.schedule, self.resources, self.all_groups, fold=False)

    def totals(self, collective: Collective) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(int64[resources] bytes, int64[resources] ps for them, int64[G] ps at the slowest)."""
        load, needed = self._needed(self.rounds(collective))
        bound = self._group_bound(needed)
        if self.fold is not None:
            return self.fold.expand(load), self.fold.expand(needed), bound[self.fold.of_row]
        return load, needed, bound

    def _group_bound(self, needed: np.ndarray) -> np.ndarray:
        if len(self.table) == 1:
            return np.array([needed.max(initial=0)], np.int64)
        bound = np.zeros(len(self.table), np.int64)
        for step in dict.fromkeys(self.steps):
            each = step.paths.slowest(needed).reshape(len(self.table), -1)
            bound = np.maximum(bound, each.max(axis=1, initial=0))
        return bound

    def busy(self, rounds: "list[_Sized]") -> tuple[np.ndarray, np.ndarray]:
        """(resources that these rounds take, int64 ps that each is busy with them)."""
        _, needed = self._needed(rounds)
        if self.fold is not None:
            needed = self.fold.expand(needed)
        used = np.flatnonzero(needed)
        return used, needed[used]

    def _needed(self, rounds: "list[_Sized]") -> tuple[np.ndarray, np.ndarray]:
        """(int64[resources] bytes, int64[resources] ps) of these rounds."""
        copied, reduced = self._loads(rounds)
        if reduced is None:
            return copied, _busy(copied, self.resources.rate)
        load = copied + reduced
        if self.resources.rate is self.resources.reduce_rate:
            return load, _busy(load, self.resources.rate)
        needed = _busy(copied, self.resources.rate)
        return load, needed + _busy(reduced, self.resources.reduce_rate)

    def _loads(self, rounds: "list[_Sized]") -> tuple[np.ndarray, np.ndarray | None]:
        """Bytes over each resource by transfers that copy, and by those that reduce, if any."""
        totals: dict[bool, np.ndarray] = {}
        equal: dict[tuple[_Step, bool], int] = {}

        def add(step: _Step, reduces: bool, nbytes: Bytes, count: int) -> None:
            if reduces not in totals:
                totals[reduces] = np.zeros(self.resources.count, np.int64)
            step.add_load(totals[reduces], nbytes, count)

        for r in rounds:
            if isinstance(r.nbytes, int) and r.reduce is not None:
                key = (r.step, r.reduce)
                equal[key] = equal.get(key, 0) + r.nbytes * r.count
                continue
            for reduces in (False, True):
                mine = np.where(r.block.reduce == reduces, r.each, 0)
                if mine.any():
                    add(r.step, reduces, mine, r.count)
        for (step, reduces), nbytes in equal.items():
            add(step, reduces, nbytes, 1)
        copied = totals.get(False)
        if copied is None:
            copied = np.zeros(self.resources.count, np.int64)
        return copied, totals.get(True)

    def rounds(self, collective: Collective) -> "list[_Sized]":
        """Rounds with their bytes; identical ones as one with a count."""
        counts = self.schedule.chunk_counts(collective) * collective.itemsize
        sizes = Sizes(counts, collective.itemsize)
        rounds = []
        for block, step in zip(self.schedule.blocks, self.steps, strict=True):
            if sizes.balanced or block.count == 1:
                nbytes = sizes.largest(block) if block.count > 1 else sizes.of(block, 0)
                rounds.append(_Sized(step, block, nbytes, block.count))
            else:
                rounds += [_Sized(step, block, sizes.of(block, k), 1) for k in range(block.count)]
        return [r for r in rounds if r.moves]

    def run(
        self,
        collective: Collective,
        overheads: Overheads,
        arrivals: np.ndarray,
        marks: list[int] | None = None,
    ) -> np.ndarray:
        """int64[G, n]: when each rank ends; at once if nothing moves (a group of one rank).

        marks: gets the latest clock after each of `rounds`.
        """
        if self.fold is not None:
            like = arrivals[self.fold.rows][self.fold.of_row]
            if not np.array_equal(like, arrivals):
                return self.unfolded.run(collective, overheads, arrivals, marks)
            return self._run(collective, overheads, arrivals[self.fold.rows], marks)[
                self.fold.of_row
            ]
        return self._run(collective, overheads, arrivals, marks)

    def _run(self, collective, overheads: Overheads, arrivals, marks) -> np.ndarray:
        rounds = self.rounds(collective)
        if not rounds:
            return arrivals
        wait = overheads.start_ps + (overheads.handshake_ps if overheads.handshake else 0)
        entered, folded = arrivals.reshape(-1) + wait, False
        if self.positions is not None and (entered == entered[0]).all():
            entered, folded = entered[: self.positions.count], True
        meetings = 1 + overheads.rendezvous * (collective.kind in POINT_TO_POINT)
        clocks = Clocks(entered, self.schedule.channels, self.schedule.lanes, overheads.step_ps)
        for r in rounds:
            short = r.folded() if folded else None
            if folded and short is None and self.positions is not None:
                clocks.unfold(self.positions.of_rank)
                folded = False
            whole = r.full() if short is None else short
            clocks.repeat(replace(whole, latency=whole.latency * meetings))
            if marks is not None:
                marks.append(int(clocks.end().max()))
        if folded and self.positions is not None:
            clocks.unfold(self.positions.of_rank)
        return clocks.end().reshape(arrivals.shape)

    @cached_property
    def positions(self) -> "_Positions | None":
        """Equal members of the equal parts of a single group; None if parts differ."""
        if len(self.table) != 1 or not any(s.fold is not None for s in self.steps):
            return None
        ranks = self.table[0]
        part = self.resources.fabric.levels[0].part[self.resources.fabric.rank_node[ranks]]
        if len(np.unique(self.copies.like[part])) > 1:
            return None
        _, of_rank = classes(self.copies.local[ranks])
        times = np.bincount(of_rank)
        if (times != len(np.unique(part))).any():
            return None
        return _Positions(of_rank, len(times))


@dataclass(frozen=True, eq=False)
class _Positions:
    """of_rank: int32[n], the number of the member of its part that each group position is."""

    of_rank: np.ndarray
    count: int


class _Step:
    """The paths of a block's pattern in all groups and replicas."""

    def __init__(self, rounds: Rounds, block: Block, fold: bool) -> None:
        self.rounds, self.block = rounds, block
        self.groups, self.rows = len(rounds.table), block.replicas
        self.fold = self._fold() if fold else None
        members = self.members if self.fold is None else self.members[self.fold.rows]
        self.paths = self._paths(members)
        if self.fold is not None and not self.fold.stays(self.paths.used):
            self.fold, self.paths = None, self._paths(self.members)

    @property
    def members(self) -> np.ndarray:
        """int[G * R, m]: the ranks of every subgroup."""
        table, who = self.rounds.table, self.block.who
        return table if who is None else table[:, who].reshape(-1, who.shape[1])

    @property
    def positions(self) -> np.ndarray:
        """int[G * R, m]: the clocks of every subgroup."""
        groups, n = self.rounds.table.shape
        at = np.arange(groups * n).reshape(groups, n)
        who = self.block.who
        return at if who is None else at[:, who].reshape(-1, who.shape[1])

    def _fold(self) -> Fold | None:
        return self.rounds.copies.fold(self.members) if self.groups == 1 < self.rows else None

    def _paths(self, members: np.ndarray) -> Paths:
        block = self.block
        src, dst = members[:, block.src].reshape(-1), members[:, block.dst].reshape(-1)
        return Paths(self.rounds.resources, src, dst, _touch(block))

    def add_load(self, total: np.ndarray, nbytes: Bytes, count: int) -> None:
        """Add the bytes of all transfers to int64[resources]."""
        if self.fold is None:
            total += self.paths.load(self.tiled(nbytes)) * count
            return
        same = self.like(nbytes)
        if same is None:
            total += self.direct.load(self.tiled(nbytes)) * count
        else:
            total += self.fold.expand(self.paths.load(same)) * count

    @cached_property
    def direct(self) -> Paths:
        """The paths of all rows, those that are like others included."""
        return self.paths if self.fold is None else self._paths(self.members)

    def tiled(self, nbytes: Bytes) -> Bytes:
        """Bytes of one group ([R, T], or one number) for all groups."""
        if isinstance(nbytes, int):
            return nbytes
        return np.tile(nbytes.reshape(-1), self.groups)

    def like(self, nbytes: Bytes) -> Bytes | None:
        """Bytes of the rows that are priced; None if rows that are alike move other bytes."""
        if isinstance(nbytes, int) or self.fold is None:
            return nbytes
        mine = nbytes[self.fold.rows]
        return mine.reshape(-1) if np.array_equal(mine[self.fold.of_row], nbytes) else None

    @cached_property
    def places(self) -> dict[tuple, Places]:
        return {}

    @cached_property
    def folded_places(self) -> dict[tuple, Places]:
        return {}

    @cached_property
    def turning(self) -> np.ndarray | None:
        """int[R]: the member of its part that all members of each row are, if every member sends
        once and receives once; else None."""
        positions, who = self.rounds.positions, self.block.who
        if who is None or positions is None:
            return None
        every = np.arange(who.shape[1])
        for ends in (self.block.src, self.block.dst):
            if not np.array_equal(np.sort(ends), every):
                return None
        which = positions.of_rank[who]
        return which[:, 0] if (which == which[:, :1]).all() else None


class _Sized:
    """A block's round with the bytes of its transfers: one number, or int64[R, T]."""

    def __init__(self, step: _Step, block: Block, nbytes: Bytes, count: int) -> None:
        self.step, self.block, self.nbytes, self.count = step, block, nbytes, count
        self.moves = bool(nbytes) if isinstance(nbytes, int) else bool(nbytes.any())
        self.moves = self.moves and block.transfers > 0

    @cached_property
    def each(self) -> np.ndarray:
        """int64[R, T]"""
        shape = (self.step.rows, len(self.block.src))
        return np.broadcast_to(np.asarray(self.nbytes, np.int64), shape)

    @cached_property
    def reduce(self) -> bool | None:
        """Whether all transfers reduce; None if only some do."""
        flags = self.block.reduce
        return bool(flags[0]) if (flags == flags[0]).all() else None

    @cached_property
    def _timed(self) -> tuple[np.ndarray, np.ndarray, bool]:
        """(took, latency, folded): int64 per transfer of the paths, or [1]."""
        step, nbytes = self.step, self.step.like(self.nbytes)
        folded = step.fold is not None and nbytes is not None
        paths = step.paths if folded else step.direct
        if nbytes is None or step.fold is None:
            nbytes = step.tiled(self.nbytes)
        reduce = self.reduce
        if reduce is None:
            reduce = np.tile(self.block.reduce, paths.pairs // len(self.block.src))
        return paths.durations(nbytes, reduce), paths.latency, folded

    def full(self) -> Round:
        """The round over the clocks of all ranks."""
        took, latency, folded = self._timed
        if folded:
            took, latency = self._spread(took), self._spread(latency)
        moving = _moving(self.step.tiled(self.nbytes))
        return Round(self._places(moving), _at(took, moving), _at(latency, moving), self.count)

    def _spread(self, values: np.ndarray) -> np.ndarray:
        fold = self.step.fold
        if len(values) == 1 or fold is None:
            return values
        return values.reshape(len(fold.rows), -1)[fold.of_row].reshape(-1)

    def _places(self, moving: np.ndarray | None) -> Places:
        block, step = self.block, self.step
        key = (block.lane, block.channel.tobytes(), None if moving is None else moving.tobytes())
        if key not in step.places:
            at = step.positions
            made = _places(block, at, step.groups, step.rounds.table.size, moving)
            step.places.clear()
            step.places[key] = made
        return step.places[key]

    def folded(self) -> Round | None:
        """The round over the clocks of one part's ranks, if it is the same in all parts."""
        positions = self.step.rounds.positions
        if positions is None or self.step.like(self.nbytes) is None:
            return None
        took, latency, folded = self._timed
        if folded and self.step.fold is not None:
            moving = _moving(self.step.like(self.nbytes))
            places = self._inner_places(positions, self.step.fold, moving)
            return Round(places, _at(took, moving), _at(latency, moving), self.count)
        return self._turning(positions, took, latency)

    def _inner_places(self, positions: _Positions, fold: Fold, moving: np.ndarray | None) -> Places:
        step, block = self.step, self.block
        key = (block.lane, block.channel.tobytes(), None if moving is None else moving.tobytes())
        if key not in step.folded_places:
            at = positions.of_rank[step.positions[fold.rows]].astype(np.int64)
            made = _places(block, at, 1, positions.count, moving)
            step.folded_places.clear()
            step.folded_places[key] = made
        return step.folded_places[key]

    def _turning(self, positions: _Positions, took, latency) -> Round | None:
        """Between parts: equal if each row's transfers are equal."""
        which, channel = self.step.turning, _single(self.block.channel)
        if which is None or channel is None or not isinstance(self.nbytes, int):
            return None
        rows = len(which)
        each = [a if len(a) == 1 else a.reshape(rows, -1) for a in (took, latency)]
        if any(a.ndim == 2 and (a != a[:, :1]).any() for a in each):
            return None
        took, latency = (a if a.ndim == 1 else a[:, 0] for a in each)
        at = which.astype(np.int64)
        places = Places(at, at, channel, self.block.lane, 1, positions.count)
        return Round(places, took, latency, self.count)


class Sizes:
    """Bytes of the transfers of a block."""

    def __init__(self, chunks: np.ndarray, itemsize: int) -> None:
        spread = int(chunks.max() - chunks.min()) if chunks.size else 0
        self.balanced = spread <= itemsize
        self.equal = int(chunks[0]) if chunks.size and not spread else None
        self._chunks = chunks

    @cached_property
    def before(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self._chunks)])

    def of(self, block: Block, repetition: int) -> Bytes:
        """One number, or int64[R, T]: exact bytes in one repetition."""
        rows, width = block.replicas, len(block.src)
        if not width:
            return 0
        if self.equal is not None:
            span = _single(block.span)
            if span is not None:
                return span * self.equal
            return np.broadcast_to(block.span.astype(np.int64) * self.equal, (rows, width))
        shift = np.zeros(1, np.int64) if block.shift is None else block.shift
        first = block.first(repetition)
        over = np.maximum(first + block.span - block.modulus, 0)  # chunks beyond the wrap
        offset = block.offset + shift[:, None]
        start = offset + first
        nbytes = self.before[start + block.span - over] - self.before[start]
        nbytes = nbytes + self.before[offset + over] - self.before[offset]
        return np.broadcast_to(nbytes, (rows, width))

    def largest(self, block: Block) -> Bytes:
        """The largest transfer of the same span in the round, for each transfer."""
        nbytes, spans = self.of(block, 0), block.span
        if isinstance(nbytes, int):
            return nbytes
        most = {span: int(nbytes[:, spans == span].max()) for span in np.unique(spans).tolist()}
        if len(most) == 1:
            return next(iter(most.values()))
        return np.broadcast_to([most[span] for span in spans.tolist()], nbytes.shape)


def _places(
    block: Block, at: np.ndarray, groups: int, clocks: int, moving: np.ndarray | None
) -> Places:
    """at: int[rows, m] clocks of the members of every subgroup."""
    src, dst = at[:, block.src].reshape(-1), at[:, block.dst].reshape(-1)
    channel = _single(block.channel)
    if channel is None:
        channel = np.tile(block.channel, len(at))
    if moving is not None:
        src, dst = src[moving], dst[moving]
        channel = channel if isinstance(channel, int) else channel[moving]
    return Places(src, dst, channel, block.lane, groups, clocks)


def _moving(nbytes: Bytes | None) -> np.ndarray | None:
    """The transfers that move data; None if all do."""
    if nbytes is None or isinstance(nbytes, int) or (nbytes > 0).all():
        return None
    return np.flatnonzero(nbytes)


def _at(values: np.ndarray, rows: np.ndarray | None) -> np.ndarray:
    """The values of some transfers; one value stands for all."""
    return values if rows is None or len(values) == 1 else values[rows]


def _single(column: np.ndarray) -> int | None:
    """The value of a column that has only one."""
    return int(column[0]) if len(column) and (column == column[0]).all() else None


def _touch(block: Block) -> Touch:
    source, destination = block.touches
    fused = np.zeros(len(block.src), bool) if block.fused is None else block.fused
    return Touch(source, destination, ~(fused & ~block.reduce), ~(fused & block.reduce))


def _pattern_key(block: Block, memory: bool) -> tuple:
    """Blocks with equal keys take the same resources."""
    key = (id(block.who), block.src.tobytes(), np.ascontiguousarray(block.dst).tobytes())
    if memory or block.fused is not None:
        key += tuple(a.tobytes() for a in block.touches)
    return key + (
        (block.fused.tobytes(), block.reduce.tobytes()) if block.fused is not None else ()
    )


def _busy(load: np.ndarray, rate: np.ndarray) -> np.ndarray:
    busy = np.flatnonzero(load)
    needed = np.zeros(len(load), np.int64)
    needed[busy] = needed_ps(load[busy], rate[busy])
    return needed
