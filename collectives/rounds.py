"""The rounds of a schedule in its groups: loads, durations, and the clocks' way through them."""

from dataclasses import replace
from functools import cached_property

import numpy as np

from .clocks import Clocks, Places, Round
from .copies import Fold
from .costs import Overheads
from .lanes import accompany, crowded, equal_lanes
from .loads import Across, Paths, Touch, limits
from .resources import Resources, needed_ps
from .schedule import Block, Collective, Schedule
from .sizes import Bytes, Sizes, only
from .tables import Parts, Positions, Table, parts_of

_PIECE = 1 << 19
_KEPT = 1 << 18  # clock numbers of larger rounds are made again when needed


class Rounds:
    """A schedule in the groups int[G, n], on resources."""

    def __init__(
        self, schedule: Schedule, resources: Resources, groups: np.ndarray, *, fold: bool = True
    ) -> None:
        self.schedule, self.resources, self.all_groups = schedule, resources, groups
        self.copies, self.shortcuts = resources.copies, fold
        self.fold = self.copies.fold(groups) if fold else None
        self._lay(groups if self.fold is None else groups[self.fold.rows])
        if self.fold is not None and not all(self.fold.stays(s.paths.used) for s in self.steps):
            self.fold = None
            self._lay(groups)

    def _lay(self, groups: np.ndarray) -> None:
        """Find the paths of every block in these groups."""
        self.groups = groups
        self.tables: dict[int, Table] = {}
        self._narrow: dict[tuple, Block] = {}
        self._known: dict[tuple, _Step] = {}
        self.steps = [self._step(block) for block in self.schedule.blocks]

    def _step(self, block: Block) -> "_Step":
        who, known = block.who, self._known
        if id(who) not in self.tables:
            self.tables[id(who)] = Table(self.copies, self.groups, who, self.shortcuts)
        key = _pattern_key(block, self.resources.memory is not None)
        if key not in known:
            known[key] = _Step(self, self.tables[id(who)], block)
        return known[key]

    @cached_property
    def unfolded(self) -> "Rounds":
        """The same without taking anything for equal."""
        return Rounds(self.schedule, self.resources, self.all_groups, fold=False)

    @cached_property
    def parts(self) -> Parts | None:
        """The parts that a single group fills, if equal ones can be told."""
        return parts_of(self.groups, list(self.tables.values()), self.copies)

    def rounds(self, collective: Collective) -> "list[Sized]":
        """Rounds with their bytes; identical ones as one with a count."""
        counts = self.schedule.chunk_counts(collective) * collective.itemsize
        sizes = Sizes(counts, collective.itemsize)
        rounds = []
        for block, step in zip(self.schedule.blocks, self.steps, strict=True):
            if sizes.balanced or block.count == 1:
                nbytes = sizes.largest(block) if block.count > 1 else sizes.of(block, 0)
                rounds.append([self._sized(step, block, nbytes, block.count)])
            else:
                each = (sizes.of(block, k) for k in range(block.count))
                rounds.append([self._sized(step, block, nbytes, 1) for nbytes in each])
        accompany(self.schedule.blocks, rounds)
        return [r for mine in rounds for r in mine if r.moves]

    def _sized(self, step: "_Step", block: Block, nbytes: Bytes, count: int) -> "Sized":
        """The round; if only some replicas move data, and all the same, of these alone."""
        if isinstance(nbytes, int) or step.fold is not None or not self.shortcuts:
            return Sized(step, block, nbytes, count)
        rows, least, most = np.asarray(nbytes.any(axis=1)), nbytes.min(), nbytes.max()
        if least or rows.all() or not most or (nbytes[rows] != most).any():
            return Sized(step, block, nbytes, count)
        fewer = self._narrowed(block, rows)
        return Sized(self._step(fewer), fewer, int(most), count)

    def _narrowed(self, block: Block, rows: np.ndarray) -> Block:
        """Some replicas of a block; equal choices of one `who` share theirs."""
        who = block.who
        assert who is not None
        key = (id(who), rows.tobytes())
        if key not in self._narrow:
            self._narrow[key] = replace(block, who=who[rows], shift=None)
        return replace(block, who=self._narrow[key].who, shift=None)

    def totals(
        self, rounds: "list[Sized]", by_group: bool = True
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(int64[resources] bytes, int64[resources] ps for them, int64[G] ps at the slowest)."""
        load, needed = self._needed(rounds)
        bound = self._group_bound(needed) if by_group else np.zeros(len(self.groups), np.int64)
        if self.fold is not None:
            return self.fold.expand(load), self.fold.expand(needed), bound[self.fold.of_row]
        return load, needed, bound

    def busy(self, rounds: "list[Sized]") -> tuple[np.ndarray, np.ndarray]:
        """(resources that these rounds take, int64 ps that each is busy with them)."""
        _, needed, _ = self.totals(rounds, by_group=False)
        used = np.flatnonzero(needed)
        return used, needed[used]

    def _needed(self, rounds: "list[Sized]") -> tuple[np.ndarray, np.ndarray]:
        copied, reduced = self._loads(rounds)
        if reduced is None:
            return copied, _busy(copied, self.resources.rate)
        if self.resources.rate is self.resources.reduce_rate:
            copied += reduced
            return copied, _busy(copied, self.resources.rate)
        needed = _busy(copied, self.resources.rate)
        needed += _busy(reduced, self.resources.reduce_rate)
        copied += reduced
        return copied, needed

    def _loads(self, rounds: "list[Sized]") -> tuple[np.ndarray, np.ndarray | None]:
        """Bytes over each resource by transfers that copy, and by those that reduce, if any."""
        adding = _Adding(self.resources.count)
        for r in rounds:
            if r.reduce is not None:
                adding.add(r, r.nbytes, r.reduce)
                continue
            for reduces in (False, True):
                mine = np.where(r.block.reduce == reduces, r.each, 0)
                if mine.any():
                    adding.add(r, mine, reduces)
        return adding.total(False), adding.total(True) if adding.has(True) else None

    def _group_bound(self, needed: np.ndarray) -> np.ndarray:
        if len(self.groups) == 1:
            return np.array([needed.max(initial=0)], np.int64)
        bound = np.zeros(len(self.groups), np.int64)
        for step in dict.fromkeys(self.steps):
            paths = step.direct
            each = paths.slowest(needed[paths.used]).reshape(len(self.groups), -1)
            bound = np.maximum(bound, each.max(axis=1, initial=0))
        return bound

    def run(
        self,
        rounds: "list[Sized]",
        overheads: Overheads,
        arrivals: np.ndarray,
        *,
        marks: list[int] | None = None,
        moving: dict[int, int] | None = None,
    ) -> np.ndarray:
        """int64[G, n]: when each rank ends; at once if nothing moves (a group of one rank).

        arrivals: int64[G, n], equal in groups that are equal (see `alike`). marks: gets the latest
        clock after each round. moving: gets how long data moves in each turn, overheads apart.
        """
        if not rounds:
            return arrivals
        if self.fold is None:
            return self._run(rounds, overheads, arrivals, marks, moving)
        ends = self._run(rounds, overheads, arrivals[self.fold.rows], marks, moving)
        return ends[self.fold.of_row]

    def alike(self, arrivals: np.ndarray) -> "Rounds":
        """These rounds, if groups that are taken for equal arrive equally; else without fold."""
        if self.fold is None:
            return self
        same = np.array_equal(arrivals[self.fold.rows][self.fold.of_row], arrivals)
        return self if same else self.unfolded

    def _run(
        self, rounds: "list[Sized]", overheads: Overheads, arrivals, marks, moving
    ) -> np.ndarray:
        wait = overheads.start_ps + (overheads.handshake_ps if overheads.handshake else 0)
        clocks = Clocks(
            arrivals.reshape(-1) + wait,
            self.schedule.channels,
            self.schedule.lanes,
            overheads.step_ps,
        )
        folding = _Folding(self, clocks)
        for r in rounds:
            whole = folding.round(r)
            if overheads.rendezvous:
                whole = replace(whole, latency=whole.latency * (1 + overheads.rendezvous))
            clocks.repeat(whole)
            if marks is not None:
                marks.append(int(clocks.end().max()))
            if moving is not None:
                longest = r.beats * int(whole.took.max(initial=0))
                moving[r.turn] = max(longest, moving.get(r.turn, 0))
        folding.unfold()
        return clocks.end().reshape(arrivals.shape)


class _Folding:
    """Keeps clocks for parts that differ only, as long as that goes."""

    def __init__(self, rounds: Rounds, clocks: Clocks) -> None:
        self.parts, self.clocks = rounds.parts, clocks
        self.positions: Positions | None = None
        self.inside = False  # whether the round before was inside parts
        if self.parts is not None and clocks.together:
            self.positions = self.parts.by_kind()
            clocks.fold(self.positions.ranks)

    def round(self, r: "Sized") -> Round:
        """The next round over the clocks that there are."""
        inside = r.step.fold is not None and r.step.like(r.nbytes) is not None
        if self.parts is not None and self.positions is None and inside and not self.inside:
            self.positions = self.parts.by_clocks(self.clocks.tables())
            if self.positions is not None:
                self.clocks.fold(self.positions.ranks)
        self.inside = inside
        short = None if self.positions is None else r.folded(self.positions)
        if short is None:
            self.unfold()
            return r.full()
        return short

    def unfold(self) -> None:
        """A clock for every rank again."""
        if self.positions is not None:
            self.clocks.unfold(self.positions.of_rank)
            self.positions = None


class _Adding:
    """Adds up loads; equal transfers of one step, and steps that expand alike, at once."""

    def __init__(self, resources: int) -> None:
        self.resources = resources
        self.equal: dict[tuple[Across | Paths, Fold | None, bool], int] = {}
        self.totals: dict[tuple[Fold | None, bool], np.ndarray] = {}

    def add(self, r: "Sized", nbytes: Bytes, reduces: bool) -> None:
        source, fold, mine = r.step.loading(r, nbytes)
        if isinstance(mine, int):
            key = (source, fold, reduces)
            self.equal[key] = self.equal.get(key, 0) + mine * r.count
        else:
            load = source.load(mine) if isinstance(source, Paths) else r.step.across_load(mine)
            self._into(source, fold, reduces, load * r.count)

    def _into(self, source: Across | Paths, fold: Fold | None, reduces: bool, load) -> None:
        key = (fold, reduces)
        if key not in self.totals:
            self.totals[key] = np.zeros(self.resources, np.int64)
        self.totals[key][source.used] += load

    def has(self, reduces: bool) -> bool:
        """Whether any such transfer was added."""
        return any(key[-1] == reduces for key in (*self.equal, *self.totals))

    def total(self, reduces: bool) -> np.ndarray:
        """int64[resources]"""
        for (source, fold, flag), nbytes in list(self.equal.items()):
            if flag == reduces:
                self._into(source, fold, flag, source.counts * nbytes)
                del self.equal[source, fold, flag]
        whole = self.totals.get((None, reduces))
        whole = np.zeros(self.resources, np.int64) if whole is None else whole
        for (fold, flag), load in self.totals.items():
            if flag == reduces and fold is not None:
                whole += fold.expand(load)
        return whole


class _Step:
    """A block's pattern in all rows of its table: which resources its transfers take."""

    def __init__(self, rounds: Rounds, table: Table, block: Block) -> None:
        self.rounds, self.table, self.block = rounds, table, block
        self.touch = _touch(block)
        self.fold = table.fold if self.across is None else None
        if self.across is None:
            used = self.paths.used  # a rank that cannot be reached is found here
            if self.fold is not None and not self.fold.stays(used):
                self.fold = table.fold = None
                del self.paths

    @cached_property
    def across(self) -> Across | None:
        """The same for every pattern in which each member sends once and receives once."""
        who, touch = self.table.who, self.touch
        if who is None or not self.rounds.shortcuts or self.rounds.fold or not touch.plain:
            return None
        source, destination = only(touch.source), only(touch.destination)
        if source is None or destination is None or not self.regular:
            return None
        return self.table.across((source, destination))

    @cached_property
    def regular(self) -> bool:
        """Whether every member of a row sends once and receives once."""
        every = np.arange(self.table.members.shape[1])
        return all(np.array_equal(np.sort(e), every) for e in (self.block.src, self.block.dst))

    @cached_property
    def paths(self) -> Paths:
        """Those of the rows that stand for all."""
        return self._paths(self.table.priced if self.fold is not None else self.table.members)

    @cached_property
    def direct(self) -> Paths:
        """Those of all rows."""
        alike = self.fold is not None or self.across is not None
        return self._paths(self.table.members) if alike else self.paths

    def _paths(self, members: np.ndarray) -> Paths:
        src, dst = members[:, self.block.src], members[:, self.block.dst]
        return Paths(self.rounds.resources, src.reshape(-1), dst.reshape(-1), self.touch)

    def loading(self, r: "Sized", nbytes: Bytes) -> tuple[Across | Paths, Fold | None, Bytes]:
        """(what the transfers load, how that expands to all rows, their bytes)."""
        if self.across is not None:
            return self.across, None, nbytes
        mine = self.like(nbytes)
        if self.fold is not None and mine is not None:
            return self.paths, self.fold, mine
        return self.direct, None, self.tiled(nbytes)

    def across_load(self, nbytes: np.ndarray) -> np.ndarray:
        """int64 bytes over each resource of `across`, for int64[R, T] bytes of the transfers."""
        assert self.across is not None
        every = np.tile(nbytes, (len(self.rounds.groups), 1))
        out, into = np.empty_like(every), np.empty_like(every)
        out[:, self.block.src] = every
        into[:, self.block.dst] = every
        return self.across.load(out.reshape(-1), into.reshape(-1))

    def tiled(self, nbytes: Bytes) -> Bytes:
        """Bytes of one group ([R, T], or one number) for all groups."""
        if isinstance(nbytes, int):
            return nbytes
        return np.tile(nbytes.reshape(-1), len(self.rounds.groups))

    def like(self, nbytes: Bytes) -> Bytes | None:
        """Bytes of the rows that are priced; None if rows that are alike move other bytes."""
        if isinstance(nbytes, int) or self.fold is None:
            return nbytes
        mine = nbytes[self.fold.rows]
        return mine.reshape(-1) if np.array_equal(mine[self.fold.of_row], nbytes) else None

    @cached_property
    def places(self) -> dict[tuple, Places]:
        return {}


class Sized:
    """A block's round with the bytes of its transfers."""

    def __init__(self, step: _Step, block: Block, nbytes: Bytes, count: int) -> None:
        self.step, self.block, self.nbytes, self.count = step, block, nbytes, count
        self.moves = bool(nbytes) if isinstance(nbytes, int) else bool(nbytes.any())
        self.moves = self.moves and block.transfers > 0
        self.company: list[list[Sized]] = []  # see `lanes`: what goes on meanwhile
        self.beats, self.turn = count, 0

    @property
    def each(self) -> np.ndarray:
        """int64[R, T]"""
        shape = (self.block.replicas, len(self.block.src))
        return np.broadcast_to(np.asarray(self.nbytes, np.int64), shape)

    @cached_property
    def reduce(self) -> bool | None:
        """Whether all transfers reduce; None if only some do."""
        flags = self.block.reduce
        return bool(flags[0]) if (flags == flags[0]).all() else None

    def _timed(self) -> tuple[np.ndarray, np.ndarray, Fold | None]:
        """(took, latency: int64 per transfer of the rows that are priced, or [1]; their fold)."""
        lanes = equal_lanes(self)
        if not lanes:
            paths, fold, times = crowded(self)
            return self._slowest(paths, times), self._latency(paths), fold
        paths, fold, nbytes = self.step.loading(self, self.nbytes)
        if isinstance(paths, Across):
            return self._taken_across(paths, lanes), self._latency(paths), None
        reduce = self.reduce
        if reduce is None:
            reduce = np.tile(self.block.reduce, paths.pairs // len(self.block.src))
        return paths.durations(nbytes * lanes, reduce), paths.latency, fold

    def _latency(self, paths: Across | Paths) -> np.ndarray:
        if isinstance(paths, Paths):
            return paths.latency
        return self._from(paths.latency_out) + self._to(paths.latency_in)

    def _slowest(self, paths: Across | Paths, times: np.ndarray) -> np.ndarray:
        if isinstance(paths, Paths):
            return paths.slowest(times)
        out, into = paths.busiest(times)
        return np.maximum(self._from(out), self._to(into))

    def _taken_across(self, paths: Across, lanes: int) -> np.ndarray:
        if isinstance(self.nbytes, int) and self.reduce is not None:
            kinds, out, into = paths.limit(self.reduce)
            if kinds:
                worst = np.maximum(self._from(out), self._to(into))
                return limits(kinds, self.nbytes * lanes)[worst]
        times = np.zeros(len(paths.used), np.int64)
        for reduces in (False, True):
            mine = np.where(self.block.reduce == reduces, self.each * lanes, 0)
            if mine.any():
                times += needed_ps(self.step.across_load(mine), paths.rate(reduces))
        return self._slowest(paths, times)

    def _from(self, members: np.ndarray) -> np.ndarray:
        """Of the source of each transfer."""
        return self._of(members, self.block.src)

    def _to(self, members: np.ndarray) -> np.ndarray:
        return self._of(members, self.block.dst)

    def _of(self, members: np.ndarray, ends: np.ndarray) -> np.ndarray:
        if len(members) == 1:
            return members
        return members.reshape(-1, len(self.block.src))[:, ends].reshape(-1)

    def full(self) -> Round:
        """The round over the clocks of all ranks."""
        took, latency, fold = self._timed()
        if fold is not None:
            took, latency = _spread(took, fold), _spread(latency, fold)
        moving = _moving(self.step.tiled(self.nbytes))
        groups, n = self.step.rounds.groups.shape
        places = self._places(None, moving, slice(None), groups, groups * n)
        if moving is None and self.step.table.flipped:
            took, latency = (_turned(a, len(self.block.src)) for a in (took, latency))
        return Round(places, _at(took, moving), _at(latency, moving), self.count)

    def folded(self, positions: Positions) -> Round | None:
        """The round over the clocks of one part's ranks, if it is the same in all parts."""
        if self.step.like(self.nbytes) is None:
            return None
        if self.step.fold is None and self.step.table.turning(positions) is None:
            return None
        took, latency, fold = self._timed()
        if fold is None:
            return self._turning(positions, took, latency)
        rows = self.step.table.rows_in(positions)
        took, latency = _spread(took, fold, rows), _spread(latency, fold, rows)
        nbytes = self.nbytes if isinstance(self.nbytes, int) else self.nbytes[rows].reshape(-1)
        moving = _moving(nbytes)
        places = self._places(positions, moving, rows, 1, positions.count)
        return Round(places, _at(took, moving), _at(latency, moving), self.count)

    def _places(self, positions: Positions | None, moving, rows, groups: int, clocks: int):
        block, kept = self.block, self.step.places
        key = (positions, block.lane, block.channel.tobytes())
        key += (None if moving is None else moving.tobytes(),)
        if key in kept:
            return kept[key]
        at = self.step.table.clocks(rows)
        at = at if positions is None else positions.of_rank[at]
        flip = positions is None and moving is None and self.step.table.flipped
        places = _places(block, at, groups, clocks, moving, flip)
        places = replace(places, regular=self.step.regular)
        if places.src.size <= _KEPT:
            kept.clear()
            kept[key] = places
        return places

    def _turning(self, positions: Positions, took, latency) -> Round | None:
        """Between parts: equal in all of them if each row's transfers are equal."""
        which, channel = self.step.table.turning(positions), only(self.block.channel)
        if which is None or channel is None or not self.step.regular:
            return None
        each = [_by_row(a, len(which)) for a in (took, latency, np.asarray(self.nbytes))]
        took, latency, nbytes = each
        if took is None or latency is None or nbytes is None:
            return None
        moving = None if nbytes.all() else np.flatnonzero(nbytes)
        at = which if moving is None else which[moving]
        places = Places(at, at, channel, self.block.lane, 1, positions.count)
        return Round(places, _at(took, moving), _at(latency, moving), self.count)


def _places(
    block: Block,
    at: np.ndarray,
    groups: int,
    clocks: int,
    moving: np.ndarray | None,
    flip: bool,
) -> Places:
    """at: int[rows, m] clocks of the members of every row; flip: order by member, then row."""
    if flip:
        at = np.ascontiguousarray(at.T)
        src, dst = (at[end].reshape(-1) for end in (block.src, block.dst))
    else:
        src, dst = (at[:, end].reshape(-1) for end in (block.src, block.dst))
    channel = only(block.channel)
    if channel is None:
        rows = at.shape[1] if flip else len(at)
        channel = np.repeat(block.channel, rows) if flip else np.tile(block.channel, rows)
    if moving is not None:
        src, dst = src[moving], dst[moving]
        channel = channel if isinstance(channel, int) else channel[moving]
    return Places(src.astype(np.int64), dst.astype(np.int64), channel, block.lane, groups, clocks)


def _turned(values: np.ndarray, width: int) -> np.ndarray:
    """Values ordered by row, then transfer of the row, in the order by transfer, then row."""
    return values if len(values) == 1 else values.reshape(-1, width).T.reshape(-1)


def _spread(values: np.ndarray, fold: Fold, rows: np.ndarray | slice = slice(None)) -> np.ndarray:
    """Values of the priced rows for some rows, or for all."""
    if len(values) == 1:
        return values
    return values.reshape(len(fold.rows), -1)[fold.of_row[rows]].reshape(-1)


def _by_row(values: np.ndarray, rows: int) -> np.ndarray | None:
    """The values [rows] or [1] of rows whose transfers have one value; None if some have more."""
    if values.size == 1:
        return values.reshape(1)
    table = values.reshape(rows, -1)
    return table[:, 0] if (table == table[:, :1]).all() else None


def _moving(nbytes: Bytes | None) -> np.ndarray | None:
    """The transfers that move data; None if all do."""
    if nbytes is None or isinstance(nbytes, int) or (nbytes > 0).all():
        return None
    return np.flatnonzero(nbytes)


def _at(values: np.ndarray, rows: np.ndarray | None) -> np.ndarray:
    """The values of some transfers; one value stands for all."""
    return values if rows is None or len(values) == 1 else values[rows]


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
    """As needed_ps, piece by piece: there may be millions of resources."""
    needed = np.empty(len(load), np.int64)
    for first in range(0, len(load), _PIECE):
        piece = slice(first, first + _PIECE)
        needed[piece] = needed_ps(load[piece], rate[piece])
    return needed
