"""One call of `trnsim collective`: its options as a plan of what to measure, and its results."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import RenderableType
from rich.text import Text

from trnsim.collectives import choose
from trnsim.collectives.schedule import Collective
from trnsim.device.errors import BadInput
from trnsim.device.units import format_time, parse_time

from . import nccom, nccom_files
from .collective import (
    Bench,
    Row,
    Site,
    apart,
    describe_groups,
    file_site,
    group_table,
    instance_site,
)
from .collective_check import MODES, check
from .conditions import Start, parse_degraded, parse_delay, with_failures, with_rates
from .reading import placed, read_text
from .report import nccom_json
from .report.collective_tables import collective_view
from .streams import Lane, check_streams, measure_together

MOST_LISTED = 4096  # ranks whose groups the JSON lists one by one
_PERCENTILE = re.compile(r"avg|p(100|[1-9]?[0-9])")


@dataclass(frozen=True, eq=False)
class Stream:
    """What one stream runs: an operation over sizes, in groups of the job's ranks."""

    op: nccom.Operation
    dtype: str
    sizes: tuple[nccom.Size, ...]
    nbytes: tuple[int, ...]
    groups: np.ndarray
    pairs: tuple[tuple[int, int], ...] = ()
    shares: nccom.Shares | None = None
    reduction: str = "add"
    root: int = 0
    ops_per_iter: int = 1
    given: choose.Plan | None = None

    @property
    def n(self) -> int:
        """Ranks of a group."""
        return self.groups.shape[1]

    def collective(self, nbytes: int) -> Collective:
        """The operation at one size."""
        return nccom.collective(
            self.op, nbytes, nccom.DTYPES[self.dtype], self.n,
            reduction=self.reduction, root=self.root, pairs=self.pairs, shares=self.shares,
        )  # fmt: skip


@dataclass(eq=False)
class CollectiveRun:
    """The streams of a call (mostly one) on a site. `measure` fills `rows`, a list per stream."""

    site: Site
    job: np.ndarray
    streams: tuple[Stream, ...]
    algorithm: str
    start: Start
    stats: tuple[str, ...]
    show_sizes: bool
    check_mode: str | None
    asked_iterations: tuple[int, int]
    rows: list[list[Row]] = field(default_factory=list)

    @classmethod
    def of(cls, operation: str, **asked: Any) -> "CollectiveRun":
        """From the options of the command. Raises TrnsimError for whatever does not fit."""
        nccom.operation(operation)
        stats = _stats(asked["stats"])
        _check_mode(asked["check"])
        for name, least in (("-n", 1), ("-w", 0)):
            value = asked["iters" if name == "-n" else "warmup_iters"]
            if value < least:
                raise BadInput(name, value, f"{least} or more")
        site, start = _site(asked)
        job, start = site.job(asked["ranks"]), _start(asked, start)
        start.arrivals(len(job))
        streams = tuple(_streams(operation, asked, job))
        check_streams(site, [stream.ops_per_iter for stream in streams])
        return cls(
            site=site,
            job=job,
            streams=streams,
            algorithm=asked["algorithm"],
            start=start,
            stats=stats,
            show_sizes=asked["sizes"],
            check_mode=asked["check"],
            asked_iterations=(asked["iters"], asked["warmup_iters"]),
        )

    @property
    def count(self) -> int:
        """Steps of the sweep: all streams run until the longest of them has had all its sizes."""
        return max(len(stream.nbytes) for stream in self.streams)

    def measure(self, advance: Callable[[], object] = lambda: None) -> None:
        """All rows; calls `advance` after each step."""
        benches = [self._bench(stream) for stream in self.streams]
        self.rows = [[] for _ in self.streams]
        for step in range(self.count):
            for rows, row in zip(self.rows, self._step(benches, step), strict=True):
                rows.append(row)
            advance()

    def _bench(self, stream: Stream) -> Bench:
        iterations = self.asked_iterations[0]
        site, job, start = self.site, self.job, self.start
        groups, given = stream.groups, stream.given
        return Bench(site, groups, self.algorithm, job, start, iterations, given)

    def _step(self, benches: Sequence[Bench], step: int) -> list[Row]:
        """A row of each stream; one that has no more sizes repeats its last."""
        sizes = [stream.nbytes[min(step, len(stream.nbytes) - 1)] for stream in self.streams]
        wanted = [s.collective(nbytes) for s, nbytes in zip(self.streams, sizes, strict=True)]
        checks = [self._check(b, c) for b, c in zip(benches, wanted, strict=True)]
        if len(benches) == 1 and self.streams[0].ops_per_iter == 1:
            return [benches[0].measure(wanted[0], checks[0])]
        ops = [stream.ops_per_iter for stream in self.streams]
        lanes = [Lane(*each) for each in zip(benches, wanted, ops, checks, strict=True)]
        return measure_together(lanes)

    def _check(self, bench: Bench, collective: Collective) -> str | None:
        if self.check_mode is None:
            return None
        schedule = bench.plan(collective).schedule
        return str(check(collective, schedule, self.check_mode, self.start.seed))

    def document(self) -> dict[str, Any]:
        """The results in nccom-test's keys."""
        made = [self._document(s, rows) for s, rows in zip(self.streams, self.rows, strict=True)]
        return made[0] if len(made) == 1 else {"streams": made}

    def _document(self, stream: Stream, rows: Sequence[Row]) -> dict[str, Any]:
        place = {rank: i for i, rank in enumerate(self.job.tolist())}
        listed = stream.groups.tolist() if stream.groups.size <= MOST_LISTED else []
        return {
            "results": [nccom_json.result(row, stream.dtype, self.stats) for row in rows],
            "trnsim": {
                "version": _version(),
                "operation": stream.op.name,
                "site": self.site.title,
                "nodes": self.site.nodes,
                "lnc": self.site.lnc,
                "ranks": len(self.job),
                "N": stream.n,
                "group_count": len(stream.groups),
                "groups": [[place[rank] for rank in row] for row in listed],
                "bus_factor": rows[0].bus_factor,
                "algorithm": self.algorithm,
                "seed": self.start.seed,
                "units": "GB/s is 1e9 bytes per second; us are modelled (virtual) microseconds",
                "leans_on": dict(self.site.leaned_on),
            },
        }

    def msccl(self) -> str:
        """The first schedule of the first stream as MSCCL XML."""
        from trnsim.collectives.msccl_write import write_msccl

        collective = self.streams[0].collective(self.streams[0].nbytes[0])
        schedule = self._bench(self.streams[0]).plan(collective).schedule
        return write_msccl(collective, schedule)

    def views(self, width: int = 80) -> list[RenderableType]:
        """What a terminal of this width shows."""
        parts: list[RenderableType] = []
        for number, (stream, rows) in enumerate(zip(self.streams, self.rows, strict=True)):
            parts.append(Text(self._title(number, stream)))
            parts.append(Text(describe_groups(self.site.fabric, stream.groups, self.job)))
            sizes = self.show_sizes
            parts += collective_view(rows, stream.dtype, self.stats, sizes=sizes, width=width)
        return [*parts, *map(Text, self._notes())]

    def _title(self, number: int, stream: Stream) -> str:
        title = f"{stream.op.name} on {self.site.title}, {len(self.job)} of its "
        title += f"{self.site.fabric.ranks} ranks"
        return f"stream {number}: {title}" if len(self.streams) > 1 else title

    def _notes(self) -> list[str]:
        notes = ["GB/s is 1e9 bytes/s; times are modelled (virtual) time"]
        written = {size.text: size.note for s in self.streams for size in s.sizes if size.note}
        if written:
            notes.append(
                f"sizes are binary, as nccom-test reads them: {', '.join(written.values())}"
            )
        if any(len(s.pairs) and s.op.name == "sendrecv" for s in self.streams):
            notes.append("sendrecv: each rank sends to the next one of its group, the last to 0")
        notes += [*self.site.notes, *self._start_notes()]
        leaned: dict[str, list[str]] = {}
        for key, status in self.site.leaned_on.items():
            leaned.setdefault(status, []).append(key)
        notes += [
            f"leans on {status} numbers: {', '.join(keys)}" for status, keys in leaned.items()
        ]
        return notes

    def _start_notes(self) -> list[str]:
        iterations, warmup = self.asked_iterations
        if self.start.jitter_ps:
            up_to, seed = format_time(self.start.jitter_ps), self.start.seed
            return [
                f"jitter up to {up_to}, seed {seed}, {iterations} iterations; "
                "time is from the first arrival to the last end"
            ]
        late = [row for rows in self.rows for row in rows if row.late is not None]
        if late:
            after = format_time(self.start.arrivals(len(self.job)).max())
            return [
                f"rank {late[0].late} comes last, {after} late; "
                "time is from the first arrival to the last end"
            ]
        if (iterations, warmup) != (20, 5):
            return [f"-n {iterations} -w {warmup}: without --jitter all iterations are alike"]
        return []


def _site(asked: Mapping[str, Any]) -> tuple[Site, Start]:
    """Where, with what has failed; and when ranks start, if a file says so."""
    if asked["fabric_file"] is not None:
        for name, default in (("lnc", None), ("overlay", None), ("nodes", 1)):
            if asked[name] != default:
                raise BadInput(f"--{name}", asked[name], "not with --fabric, which says it all")
        site, start = file_site(asked["fabric_file"])
    else:
        options = {key: asked[key] for key in ("nodes", "lnc", "overlay")}
        site, start = instance_site(asked["instance"], **options), Start()
    fabric = with_rates(site.fabric, dict(map(parse_degraded, asked["degraded"])))
    return replace(site, fabric=with_failures(fabric, asked["failed"])), start


def _start(asked: Mapping[str, Any], given: Start) -> Start:
    """The file's, with what the options say instead."""
    delays = tuple(map(parse_delay, asked["delays"])) or given.delays
    jitter, seed = given.jitter_ps, given.seed if asked["seed"] is None else asked["seed"]
    if asked["jitter"] is not None:
        jitter = parse_time(asked["jitter"], "--jitter")
    return Start(delays, jitter, seed)


def _streams(operation: str, asked: Mapping[str, Any], job: np.ndarray) -> list[Stream]:
    common = {
        "operation": operation,
        "datatype": asked["datatype"],
        "minbytes": asked["minbytes"],
        "maxbytes": asked["maxbytes"],
        "stepbytes": asked["stepbytes"],
        "stepfactor": asked["stepfactor"],
        "custom_replica_groups": asked["groups"],
        "custom_src_target_pairs": asked["pairs"],
        "variable_size_op_metadata": asked["shares"],
    }
    given = [{}] if asked["streams"] is None else nccom_files.read_streams(asked["streams"])
    base = Path(asked["streams"]).parent if asked["streams"] is not None else Path()
    return [_stream(common | _resolved(stream, base), asked, job) for stream in given]


def _resolved(stream: dict[str, Any], base: Path) -> dict[str, Any]:
    """File names of a stream are beside the file that names them, if they are there."""
    out = dict(stream)
    for key in ("custom_replica_groups", "custom_src_target_pairs", "variable_size_op_metadata"):
        if key in out and (base / str(out[key])).exists():
            out[key] = base / str(out[key])
    return out


def _stream(wanted: Mapping[str, Any], asked: Mapping[str, Any], job: np.ndarray) -> Stream:
    op = nccom.operation(wanted["operation"])
    dtype, _ = nccom.dtype(wanted["datatype"])
    sizes, nbytes = _sizes(op, wanted)
    groups = _groups(wanted["custom_replica_groups"], asked["apart"], job)
    n = groups.shape[1]
    root, reduction = _root(op, asked["root"], n), _reduction(op, asked["reduction"])
    stream = Stream(
        op, dtype, sizes, nbytes, groups,
        pairs=_pairs(op, wanted["custom_src_target_pairs"], n),
        shares=_shares(op, wanted["variable_size_op_metadata"], n),
        reduction=reduction,
        root=root,
        ops_per_iter=_positive("ops_per_iter", wanted.get("ops_per_iter", 1)),
    )  # fmt: skip
    first = stream.collective(stream.nbytes[0])  # refuses what does not go together
    if asked["msccl"] is None:
        return stream
    return replace(stream, given=_from_msccl(asked["msccl"], asked["algorithm"], first))


def _from_msccl(file: Path, algorithm: str, wanted: Collective) -> choose.Plan:
    """The plan in an MSCCL XML file. Raises BadInput for a file of another collective or group."""
    from trnsim.collectives.msccl import read_msccl

    if algorithm != "policy":
        raise BadInput("--algorithm", algorithm, "not with --msccl, which is one")
    with placed(str(file)):
        found, schedule = read_msccl(read_text(file))
    for name in ("kind", "ranks", "root"):
        have, need = getattr(found, name), getattr(wanted, name)
        if have != need:
            raise BadInput(f"{file}: {name}", have, f"{need}, as asked for")
    return choose.Plan(schedule, choose.Choice(schedule.algorithm, f"MSCCL XML of {file}"))


def _root(op: nccom.Operation, root: int | None, n: int) -> int:
    if root is not None and not op.rooted:
        raise BadInput("--root", root, f"none for {op.name}, which has no root")
    if root is not None and not 0 <= root < n:
        raise BadInput("--root", root, f"0 to {n - 1}, a position in the group")
    return root or 0


def _reduction(op: nccom.Operation, name: str | None) -> str:
    if name is not None and not op.reducing:
        raise BadInput("--reduction", name, f"none for {op.name}, which reduces nothing")
    return nccom.REDUCTIONS.get(name or "add", name or "add")


def _sizes(
    op: nccom.Operation, wanted: Mapping[str, Any]
) -> tuple[tuple[nccom.Size, ...], tuple[int, ...]]:
    """(sizes as written, bytes of every row)."""
    if op.kind == "barrier":
        return (), (0,)
    low = nccom.size(wanted["minbytes"] or nccom.DEFAULT_SIZE, "-b")
    high = nccom.size(wanted["maxbytes"], "-e") if wanted["maxbytes"] else None
    end = (
        max(low.nbytes, nccom.size(nccom.DEFAULT_SIZE, "-e").nbytes)
        if high is None
        else high.nbytes
    )
    step = nccom.size(wanted["stepbytes"], "-i") if wanted["stepbytes"] else None
    factor = wanted["stepfactor"]
    if factor is not None and not isinstance(factor, int):
        raise BadInput("stepfactor", factor, "a whole number of 2 or more")
    nbytes = nccom.sweep(low.nbytes, end, step.nbytes if step else None, factor)
    written = [size for size in (low, high, step) if size is not None]
    return tuple(s for s in written if wanted["minbytes"] or s is not low), tuple(nbytes)


def _positive(field: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise BadInput(field, value, "a whole number of 1 or more")
    return value


def _groups(file: Any, apart_size: int | None, job: np.ndarray) -> np.ndarray:
    if file is not None and apart_size is not None:
        raise BadInput("--data-parallel-dimension", apart_size, "not with --custom-replica-groups")
    if file is not None:
        return group_table(job, nccom_files.read_groups(file, len(job)))
    return group_table(job, apart(len(job), apart_size) if apart_size is not None else None)


def _pairs(op: nccom.Operation, file: Any, n: int) -> tuple[tuple[int, int], ...]:
    if op.kind != "permute":
        if file is not None:
            raise BadInput("--custom-src-target-pairs", file, f"only with permute, not {op.name}")
        return ()
    return nccom.around(n) if file is None else nccom_files.read_pairs(file, n)


def _shares(op: nccom.Operation, file: Any, n: int) -> nccom.Shares | None:
    if file is None:
        return None
    if not op.uneven:
        named = ", ".join(o.name for o in nccom.OPERATIONS.values() if o.uneven)
        raise BadInput("--variable-size-op-metadata", file, f"only with {named}, not {op.name}")
    return nccom_files.read_shares(file, op, n)


def _stats(text: str) -> tuple[str, ...]:
    names = tuple(name for name in re.split(r"[,\s]+", text) if name)
    for name in names:
        if not _PERCENTILE.fullmatch(name):
            raise BadInput("-t", name, "avg or a percentile p0 to p100")
    if not names:
        raise BadInput("-t", repr(text), "avg or a percentile p0 to p100")
    return names


def _check_mode(mode: str | None) -> None:
    if mode is not None and mode not in MODES:
        raise BadInput("-c", mode, MODES)


def _version() -> str:
    try:
        return version("trnsim")
    except PackageNotFoundError:
        return "unknown"
