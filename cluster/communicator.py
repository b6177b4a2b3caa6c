"""Collectives on arrays: values of every rank, and the modelled time.

    ranks = Communicator.on("trn2.3xlarge", lnc=2)
    done = ranks.all_reduce([np.ones(4, np.float32)] * 4)
    done.values[0]         # array([4., 4., 4., 4.], dtype=float32)
    done.duration_ps       # from the last arrival to the last end

Arrays are given and returned in the order of the communicator's ranks, which may be any ranks of
the fabric in any order. Roots, pairs and delays name ranks by their number on the fabric. Whatever
does not fit together is refused before anything moves.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from trnsim.collectives import choose
from trnsim.collectives.check import check_counts
from trnsim.collectives.costs import Overheads
from trnsim.collectives.execute import execute
from trnsim.collectives.fabric import Fabric
from trnsim.collectives.price import Priced, Pricer
from trnsim.collectives.schedule import Collective, Schedule
from trnsim.device.dtypes import dtype_name
from trnsim.device.errors import BadInput, CollectiveMismatch

from . import cheapest

Arrays = Sequence[np.ndarray]


@dataclass(frozen=True, eq=False)
class Done:
    """One collective that has run: a value per rank (None where a rank gets none), and its price.

    end_ps: when each rank ends, in the order of the ranks, from the time at which delays count 0.
    """

    values: list[np.ndarray | None]
    collective: Collective
    schedule: Schedule
    priced: Priced
    algorithm: str
    reason: str

    @property
    def duration_ps(self) -> int:
        """From the last arrival (without a handshake: the first) to the last end."""
        return self.priced.duration_ps

    @property
    def end_ps(self) -> np.ndarray:
        """int64[n] ps."""
        return self.priced.end[0]

    def __iter__(self) -> Iterator[np.ndarray]:
        """The values of the ranks that get one."""
        return (value for value in self.values if value is not None)

    def __getitem__(self, position: int) -> np.ndarray:
        """The value of the rank at a position. Raises BadInput for a rank that gets none."""
        value = self.values[position]
        if value is None:
            have = ", ".join(str(p) for p, v in enumerate(self.values) if v is not None)
            raise BadInput("position", position, f"ranks with a result: {have or 'none'}")
        return value


@dataclass(frozen=True, eq=False)
class Communicator:
    """Some ranks of a fabric, in an order, that run collectives together.

    algorithm: `policy`, `best`, or a name for every kind that it can do (others by policy).
    """

    fabric: Fabric
    ranks: tuple[int, ...]
    algorithm: str = "policy"
    overheads: Overheads = field(default_factory=Overheads)
    policy: choose.Policy = choose.PUBLISHED

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", tuple(int(rank) for rank in self.ranks))
        if not self.ranks:
            raise BadInput("ranks", "none", "one rank or more")
        seen: set[int] = set()
        for rank in self.ranks:
            if not 0 <= rank < self.fabric.ranks:
                raise BadInput("rank", rank, f"0 to {self.fabric.ranks - 1}")
            if rank in seen:
                raise BadInput("rank", rank, "each rank once")
            seen.add(rank)

    @classmethod
    def on(
        cls,
        instance: str,
        *,
        nodes: int = 1,
        lnc: int | None = None,
        ranks: Sequence[int] | None = None,
        algorithm: str = "policy",
    ) -> "Communicator":
        """All logical cores of `nodes` instances (or these `ranks`), with the chip's overheads."""
        from .collective import instance_site

        site = instance_site(instance, nodes=nodes, lnc=lnc)
        chosen = range(site.fabric.ranks) if ranks is None else ranks
        return cls(site.fabric, tuple(chosen), algorithm, site.overheads, site.policy)

    @property
    def size(self) -> int:
        """Number of ranks, n."""
        return len(self.ranks)

    def sub(self, ranks: Sequence[int]) -> "Communicator":
        """The same with only these ranks (numbers on the fabric), in this order."""
        for rank in ranks:
            self._position(rank, "rank")
        return replace(self, ranks=tuple(ranks))

    def all_reduce(self, arrays: Arrays, op: str = "add", *, delays: "Delays" = None) -> Done:
        """Equal arrays in; their reduction, in the same shape, on every rank."""
        shape, dtype = self._alike("all_reduce", arrays)
        collective = self._collective("all_reduce", _size(shape), dtype, reduction=op)
        return self._shaped(collective, arrays, [shape] * self.size, delays)

    def all_gather(self, arrays: Arrays, *, delays: "Delays" = None) -> Done:
        """Equal arrays (m, ...) in; (n * m, ...) in rank order on every rank."""
        self._alike("all_gather", arrays)
        return self.all_gather_v(arrays, delays=delays)

    def all_gather_v(self, arrays: Arrays, *, delays: "Delays" = None) -> Done:
        """Arrays (m_r, ...) in; (sum of m_r, ...) in rank order on every rank. m_r may be 0."""
        rows, rest, dtype = self._rows("all_gather", arrays)
        collective = self._collective("all_gather", [m * _size(rest) for m in rows], dtype)
        return self._shaped(collective, arrays, [(sum(rows), *rest)] * self.size, delays)

    def reduce_scatter(self, arrays: Arrays, op: str = "add", *, delays: "Delays" = None) -> Done:
        """Equal arrays (n * m, ...) in; rank r gets rows r * m .. of their reduction, (m, ...)."""
        shape, _ = self._alike("reduce_scatter", arrays, ndim=1)
        self._divisible("reduce_scatter", shape[0])
        rows = [shape[0] // self.size] * self.size
        return self.reduce_scatter_v(arrays, rows, op, delays=delays)

    def reduce_scatter_v(
        self, arrays: Arrays, rows: Sequence[int], op: str = "add", *, delays: "Delays" = None
    ) -> Done:
        """Equal arrays (sum of rows, ...) in; rank r gets its rows[r] of their reduction."""
        shape, dtype = self._alike("reduce_scatter", arrays, ndim=1)
        rows = self._row_counts("reduce_scatter", rows, shape[0])
        counts = [m * _size(shape[1:]) for m in rows]
        collective = self._collective("reduce_scatter", counts, dtype, reduction=op)
        return self._shaped(collective, arrays, [(m, *shape[1:]) for m in rows], delays)

    def all_to_all(self, arrays: Arrays, *, delays: "Delays" = None) -> Done:
        """Equal arrays (n * m, ...) in; rank r gets block r of every rank, in rank order."""
        shape, _ = self._alike("all_to_all", arrays, ndim=1)
        self._divisible("all_to_all", shape[0])
        send = [[shape[0] // self.size] * self.size] * self.size
        return self.all_to_all_v(arrays, send, delays=delays)

    def all_to_all_v(
        self,
        arrays: Arrays,
        send_rows: Sequence[Sequence[int]],
        receive_rows: Sequence[Sequence[int]] | None = None,
        *,
        delays: "Delays" = None,
    ) -> Done:
        """Array r holds, one after another, send_rows[r][s] rows for each rank s; 0 is allowed.

        receive_rows[s][r] is what rank s expects from rank r: it has to be send_rows[r][s].
        """
        rows, rest, dtype = self._rows("all_to_all", arrays)
        table = self._send_table(send_rows, receive_rows, _size(rest))
        for rank, have, needed in zip(self.ranks, rows, table.sum(axis=1).tolist(), strict=True):
            if have != needed:
                raise CollectiveMismatch(
                    f"all_to_all: rank {rank} has {have} rows, its send counts need {needed}"
                )
        collective = self._collective("all_to_all", (table * _size(rest)).reshape(-1), dtype)
        shapes = [(int(m), *rest) for m in table.sum(axis=0)]
        return self._shaped(collective, arrays, shapes, delays)

    def broadcast(self, array: np.ndarray, root: int, *, delays: "Delays" = None) -> Done:
        """The array of rank `root`, on every rank."""
        array, at = np.asarray(array), self._position(root, "root")
        collective = self._collective("broadcast", array.size, dtype_name(array.dtype), root=at)
        inputs = [array if p == at else array[:0] for p in range(self.size)]
        return self._shaped(collective, inputs, [array.shape] * self.size, delays)

    def reduce(
        self, arrays: Arrays, root: int, op: str = "add", *, delays: "Delays" = None
    ) -> Done:
        """Equal arrays in; their reduction on rank `root` alone, None on the others."""
        shape, dtype = self._alike("reduce", arrays)
        at = self._position(root, "root")
        collective = self._collective("reduce", _size(shape), dtype, reduction=op, root=at)
        return self._shaped(collective, arrays, self._only(at, shape), delays)

    def gather(self, arrays: Arrays, root: int, *, delays: "Delays" = None) -> Done:
        """Arrays (m_r, ...) in; (sum of m_r, ...) in rank order on rank `root` alone."""
        rows, rest, dtype = self._rows("gather", arrays)
        at, counts = self._position(root, "root"), [m * _size(rest) for m in rows]
        collective = self._collective("gather", counts, dtype, root=at)
        return self._shaped(collective, arrays, self._only(at, (sum(rows), *rest)), delays)

    def scatter(
        self,
        array: np.ndarray,
        root: int,
        rows: Sequence[int] | None = None,
        *,
        delays: "Delays" = None,
    ) -> Done:
        """The array of rank `root` (sum of rows, ...); rank r gets its rows[r] (default: equal)."""
        array, at = np.asarray(array), self._position(root, "root")
        if array.ndim < 1:
            raise CollectiveMismatch(f"scatter: rank {root} has a scalar, which has no rows")
        if rows is None:
            self._divisible("scatter", len(array))
            rows = [len(array) // self.size] * self.size
        rows, rest = self._row_counts("scatter", rows, len(array)), array.shape[1:]
        counts = [m * _size(rest) for m in rows]
        collective = self._collective("scatter", counts, dtype_name(array.dtype), root=at)
        inputs = [array if p == at else array[:0] for p in range(self.size)]
        return self._shaped(collective, inputs, [(m, *rest) for m in rows], delays)

    def permute(
        self, arrays: Arrays, pairs: Sequence[tuple[int, int]], *, delays: "Delays" = None
    ) -> Done:
        """Along (source, target) pairs; a rank that is no target gets zeros, as in StableHLO.

        Each rank may be source once and target once. Ranks need not meet: without a handshake.
        """
        shape, dtype = self._alike("permute", arrays)
        where = [(self._position(a, "source"), self._position(b, "target")) for a, b in pairs]
        collective = self._collective("permute", _size(shape), dtype, pairs=where)
        return self._shaped(collective, arrays, [shape] * self.size, delays)

    def send_recv(
        self, array: np.ndarray, source: int, target: int, *, delays: "Delays" = None
    ) -> Done:
        """The array of rank `source`, on rank `target` too; None on the others."""
        array = np.asarray(array)
        ends = (self._position(source, "source"), self._position(target, "target"))
        dtype = dtype_name(array.dtype)
        collective = self._collective("sendrecv", array.size, dtype, pairs=[ends])
        inputs = [array if p == ends[0] else np.empty(0, array.dtype) for p in range(self.size)]
        return self._shaped(collective, inputs, self._only(ends[1], array.shape), delays)

    def barrier(self, *, delays: "Delays" = None) -> Done:
        """Nobody goes on before everybody has come. No values."""
        flag = self._collective("barrier", 1, "ui8")
        done = self._run(flag, [np.zeros(1, np.uint8)] * self.size, delays)
        return replace(done, values=[None] * self.size)

    # --- inside ---

    def _collective(self, kind: str, counts, dtype: str, **options) -> Collective:
        counts = int(counts) if np.ndim(counts) == 0 else tuple(int(c) for c in counts)
        if isinstance(counts, tuple) and len(set(counts)) == 1:
            counts = counts[0]
        options["pairs"] = tuple(options.get("pairs", ()))
        return Collective(kind, self.size, counts, dtype, **options)

    def _shaped(
        self,
        collective: Collective,
        arrays: Arrays,
        shapes: Sequence[tuple[int, ...] | None],
        delays: "Delays",
    ) -> Done:
        """Run, and give every result its shape; None for a rank without a result."""
        done = self._run(collective, [np.ascontiguousarray(a).reshape(-1) for a in arrays], delays)
        values = [
            None if shape is None or value is None else value.reshape(shape)
            for value, shape in zip(done.values, shapes, strict=True)
        ]
        return replace(done, values=values)

    def _run(self, collective: Collective, inputs: Arrays, delays: "Delays") -> Done:
        arrivals = self._arrivals(delays)
        group = [self.ranks]

        def price(plan: choose.Plan) -> Priced:
            pricer = Pricer(plan.schedule, self.fabric, group)
            return pricer.price(collective, arrivals=arrivals, overheads=self.overheads)

        plan = cheapest.plan(
            collective, group, self.fabric, self._algorithm_for(collective.kind),
            lambda plan: price(plan).duration_ps, self.policy,
        )  # fmt: skip
        priced = price(plan)
        values: list[np.ndarray | None] = list(execute(collective, plan.schedule, inputs))
        name, reason = plan.choice.algorithm, plan.choice.reason
        return Done(values, collective, plan.schedule, priced, name, reason)

    def _algorithm_for(self, kind: str) -> str:
        return cheapest.algorithm_for(self.algorithm, kind)

    def _arrivals(self, delays: "Delays") -> np.ndarray:
        """int64[1, n] ps."""
        arrivals = np.zeros((1, self.size), np.int64)
        for rank, ps in (delays or {}).items():
            if ps < 0:
                raise BadInput(f"delay of rank {rank}", f"{ps} ps", "0 or more")
            arrivals[0, self._position(rank, "rank of a delay")] = ps
        return arrivals

    def _position(self, rank: int, role: str) -> int:
        if rank not in self.ranks:
            raise BadInput(role, rank, f"a rank of the group: {listed(self.ranks)}")
        return self.ranks.index(rank)

    def _only(self, position: int, shape: tuple[int, ...]) -> list[tuple[int, ...] | None]:
        return [shape if p == position else None for p in range(self.size)]

    def _check_count(self, kind: str, arrays: Arrays) -> None:
        if len(arrays) != self.size:
            raise CollectiveMismatch(f"{kind}: {len(arrays)} arrays for {self.size} ranks")

    def _check_dtypes(self, kind: str, arrays: Arrays) -> str:
        first = arrays[0].dtype
        for rank, array in zip(self.ranks, arrays, strict=True):
            if array.dtype != first:
                raise CollectiveMismatch(
                    f"{kind}: rank {rank} passes {array.dtype}, rank {self.ranks[0]} passes {first}"
                )
        return dtype_name(first)

    def _alike(self, kind: str, arrays: Arrays, ndim: int = 0) -> tuple[tuple[int, ...], str]:
        """(shape, dtype) of equal arrays with at least `ndim` dimensions."""
        self._check_count(kind, arrays)
        dtype, first = self._check_dtypes(kind, arrays), arrays[0]
        check_counts(kind, [array.size for array in arrays], ranks=self.ranks)
        for rank, array in zip(self.ranks, arrays, strict=True):
            if array.shape != first.shape:
                raise CollectiveMismatch(
                    f"{kind}: rank {rank} passes the shape {array.shape}, "
                    f"rank {self.ranks[0]} the shape {first.shape}"
                )
        if first.ndim < ndim:
            raise CollectiveMismatch(f"{kind}: rank {self.ranks[0]} passes a scalar without rows")
        return first.shape, dtype

    def _rows(self, kind: str, arrays: Arrays) -> tuple[list[int], tuple[int, ...], str]:
        """(rows of each rank, shape of one row, dtype)."""
        self._check_count(kind, arrays)
        dtype, first = self._check_dtypes(kind, arrays), arrays[0]
        for rank, array in zip(self.ranks, arrays, strict=True):
            if array.ndim < 1:
                raise CollectiveMismatch(f"{kind}: rank {rank} passes a scalar without rows")
            if array.shape[1:] != first.shape[1:]:
                raise CollectiveMismatch(
                    f"{kind}: rank {rank} passes rows of {array.shape[1:]}, "
                    f"rank {self.ranks[0]} rows of {first.shape[1:]}"
                )
        return [len(array) for array in arrays], first.shape[1:], dtype

    def _divisible(self, kind: str, rows: int) -> None:
        if rows % self.size:
            allowed = f"a multiple of the {self.size} ranks (uneven rows: {kind}_v)"
            raise BadInput(f"rows of {kind}", rows, allowed)

    def _row_counts(self, kind: str, rows: Sequence[int], total: int) -> list[int]:
        counts = [int(m) for m in rows]
        if len(counts) != self.size or min(counts) < 0 or sum(counts) != total:
            raise BadInput(f"rows of {kind}", counts, f"{self.size} counts with the sum {total}")
        return counts

    def _send_table(self, send_rows, receive_rows, row: int) -> np.ndarray:
        """int64[n, n]: rows from rank position i to j, checked against what receivers expect.

        row: elements of one.
        """
        sent = self._square("send rows", send_rows)
        if receive_rows is None:
            return sent
        expected = self._square("receive rows", receive_rows)
        check_counts("all_to_all", sent * row, expected * row, self.ranks)
        return sent

    def _square(self, name: str, rows) -> np.ndarray:
        lengths = {len(row) for row in rows}
        if len(rows) != self.size or lengths != {self.size}:
            raise BadInput(f"{name} of all_to_all", rows, f"{self.size} x {self.size} counts")
        table = np.array(rows, np.int64)
        if table.min() < 0:
            raise BadInput(f"{name} of all_to_all", int(table.min()), "0 or more")
        return table


Delays = Mapping[int, int] | None
"""Picoseconds by which ranks (numbers on the fabric) come late."""


def listed(ranks: Sequence[int], runs: int = 6) -> str:
    """`0-3,8,12-15` in the order given; after so many runs, `...`."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], rank]
        else:
            parts.append([rank])
        if len(parts) > runs:
            break
    names = ["-".join(map(str, part)) for part in parts[:runs]]
    return ",".join([*names, "..."] if len(parts) > runs else names)


def _size(shape: Sequence[int]) -> int:
    return int(np.prod(shape, dtype=np.int64))
