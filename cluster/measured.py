"""Measured collectives to calibrate on: points and series of them, read from files.

A CSV has the columns of `device/specs/measured.csv`, which is shipped. Results of nccom-test say
nothing about the machine, so the caller does. A series is what one tool measured of one operation
on one group of ranks.
"""

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from itertools import groupby
from pathlib import Path

import numpy as np

from trnsim.collectives.schedule import Collective
from trnsim.device.errors import BadFile, BadInput
from trnsim.device.units import parse_bytes

from . import nccom
from .instances import instance_names, load_instance
from .lnc import check_lnc
from .nccom_files import read_results

COLUMNS = (
    "id", "kind", "platform", "nodes", "ranks", "lnc", "op", "dtype", "bytes", "bytes_mean",
    "time_us", "use", "source",
)  # fmt: skip
ONE_NODE = {"inf2": "inf2.48xlarge", "trn1": "trn1.32xlarge", "trn2": "trn2.48xlarge"}
"""What `trn2-class` is read as: the largest single instance of the chip."""
CROSS_DIE = "cross die"
WHERE = ("", "same die", CROSS_DIE)


@dataclass(frozen=True)
class Group:
    """Where and what was measured. In a sendrecv each rank sends to the next, the last to rank 0.

    cross_die: the two ranks are on different dies of a chip. per_rank: sizes of an all_gather are
    each rank's input, not the output.
    """

    instance: str
    nodes: int
    ranks: int
    lnc: int | None
    operation: str
    dtype: str
    cross_die: bool = False
    per_rank: bool = False

    def collective(self, nbytes: int) -> Collective:
        """The collective of a printed size."""
        op = nccom.operation(self.operation)
        total = nbytes * self.ranks if self.per_rank else nbytes
        pairs = nccom.around(self.ranks) if op.kind == "permute" else ()
        return nccom.collective(op, total, nccom.dtype(self.dtype)[1], self.ranks, pairs=pairs)

    def table(self) -> np.ndarray:
        """int64[1, ranks]: the first ranks of each node; a cross-die pair is as far as a chip goes.

        Raises BadInput for more ranks than there are.
        """
        instance = load_instance(self.instance)
        per_node = instance.logical_cores(self.lnc)
        each, rest = divmod(self.ranks, self.nodes)
        if rest or each > per_node:
            allowed = f"{self.nodes} times 1 to {per_node} ({self.instance})"
            raise BadInput("ranks", self.ranks, allowed)
        local = np.arange(each)
        if self.cross_die:
            half = instance.chip.cores // check_lnc(instance.chip, self.lnc) // 2
            local = local * half
        return (np.arange(self.nodes)[:, None] * per_node + local).reshape(1, -1)


@dataclass(frozen=True)
class Series:
    """Times of one operation over sizes. latency, slope: what the rows can be held against.

    nbytes: int64[points] as printed; times: float64[points] ps. Small sizes that only show the
    launch overhead of the tool are left out of a slope: `slope_from` bytes and above count.
    """

    name: str
    group: Group
    nbytes: np.ndarray
    times: np.ndarray
    latency: bool
    slope: bool
    slope_from: int = 0
    source: str = ""

    def __post_init__(self) -> None:
        if self.slope and len(np.unique(self.nbytes[self.in_slope])) < 2:
            raise BadFile(f"{self.name}: a slope needs two sizes of at least {self.slope_from} B")

    @property
    def in_slope(self) -> np.ndarray:
        """bool[points]: the rows that a slope is taken over."""
        return self.nbytes >= self.slope_from

    def slope_of(self, times: np.ndarray) -> float:
        """ps per printed byte: least squares of time over bytes."""
        rows = self.in_slope
        return float(np.polyfit(self.nbytes[rows].astype(float), times[rows], 1)[0])


def shipped() -> list[Series]:
    """The measured points that come with trnsim (device/specs/measured.csv)."""
    text = (resources.files("trnsim.device.specs") / "measured.csv").read_text("utf-8")
    return series_of(_rows(text, "measured.csv"), "measured.csv")


def read_series(path: str | Path) -> list[Series]:
    """The series of a CSV file. Raises BadFile naming the line and the column."""
    try:
        text = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadFile(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    return series_of(_rows(text, str(path)), str(path))


def read_nccom(path: str | Path, group: Group, name: str = "") -> Series:
    """One series from results of nccom-test (JSON, or the table it prints).

    Of several rows of one size, all count. Their data type is that of the file, if it says one.
    """
    results = read_results(path)
    kinds = {row.dtype for row in results.rows} - {""}
    if len(kinds) > 1:
        raise BadFile(f"{path}: several data types: {', '.join(sorted(kinds))}")
    return Series(
        name or Path(path).stem,
        replace(group, dtype=kinds.pop() if kinds else group.dtype),
        np.array([row.nbytes for row in results.rows], np.int64),
        np.array([row.time_us for row in results.rows]) * 1e6,
        latency=True,
        slope=len({row.nbytes for row in results.rows}) > 1,
        source=str(path),
    )


Row = Mapping[str, str]


def _rows(text: str, path: str) -> list[Row]:
    reader = csv.DictReader(io.StringIO(text))
    missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        raise BadFile(f"{path}: column {', '.join(missing)} missing; needed: {', '.join(COLUMNS)}")
    rows = [row for row in reader if row["kind"] == "collective"]
    if not rows:
        raise BadFile(f"{path}: no row of kind collective")
    return [row | {"line": f"{path}: {row['id']} {row['bytes']} B"} for row in rows]


def series_of(rows: Iterable[Row], path: str) -> list[Series]:
    """Rows with the same id, one after another, as one series."""
    return [_series(name, list(mine)) for name, mine in groupby(rows, lambda row: row["id"])]


def _series(name: str, rows: Sequence[Row]) -> Series:
    groups = {_group(row) for row in rows}
    if len(groups) > 1:
        raise BadFile(f"{rows[0]['line']}: {name} has rows of different groups or operations")
    use = rows[0]["use"]
    return Series(
        name,
        groups.pop(),
        np.array([_positive(row, "bytes", int) for row in rows], np.int64),
        np.array([_positive(row, "time_us", float) for row in rows]) * 1e6,
        latency="latency" in use,
        slope="slope" in use,
        slope_from=_slope_from(use),
        source=rows[0]["source"],
    )


def _slope_from(use: str) -> int:
    found = re.search(r"above ([0-9.]+ ?[KMG]i?B)", use)
    return parse_bytes(found.group(1)) if found else 0


def _positive(row: Row, column: str, kind: type) -> float:
    try:
        value = kind(row[column])
    except (TypeError, ValueError):
        value = 0
    if not 0 < value < 1e18:
        raise BadFile(f"{row['line']}: {column} {row[column]!r} is not a number above 0")
    return value


def _group(row: Row) -> Group:
    words = row["op"].split(None, 1)
    try:
        op, (dtype, _) = nccom.operation(words[0] if words else ""), nccom.dtype(row["dtype"])
        if len(words) > 1 and words[1] not in WHERE:
            raise BadInput("op", row["op"], [f"{words[0]} {where}".rstrip() for where in WHERE])
        return Group(
            _instance(row["platform"]),
            int(_positive(row, "nodes", int)),
            int(_positive(row, "ranks", int)),
            int(_positive(row, "lnc", int)) if row["lnc"] else None,
            op.name,
            dtype,
            cross_die=words[1:] == [CROSS_DIE],
            per_rank=row["bytes_mean"].startswith("per-rank") and op.kind == "all_gather",
        )
    except BadInput as error:
        raise BadFile(f"{row['line']}: {error}") from None


def _instance(platform: str) -> str:
    name = platform.removesuffix("-class")
    name = ONE_NODE.get(name, name)
    if name not in instance_names():
        raise BadInput("platform", platform, [*instance_names(), *(f"{c}-class" for c in ONE_NODE)])
    return name
