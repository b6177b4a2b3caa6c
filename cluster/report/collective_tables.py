"""Tables of `trnsim collective` and `trnsim compare`."""

from collections.abc import Callable, Sequence
from itertools import groupby

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from ..collective import Row
from ..compare import Comparison

GB = 1e9
Value = Callable[[Row], str]


def collective_view(
    rows: Sequence[Row],
    dtype: str,
    stats: Sequence[str] = ("avg",),
    *,
    sizes: bool = False,
    width: int = 80,
) -> list[RenderableType]:
    """The columns of nccom-test, the bound, and below it what holds for which sizes.

    Heads are on one line, spelled as nccom-test does, if that fits the width. Numbers are never
    broken: a table with many columns may be wider than `width`.
    """
    columns = _columns(rows, dtype, stats, sizes)
    titles = [title for title, _ in columns]
    cells = [[value(row) for _, value in columns] for row in rows]
    return [_fitting(titles, cells, width), _average(rows), *_notes(rows)]


def natural_width(table: Table) -> int:
    """Characters that a table needs to break nothing."""
    console = Console(width=10_000)
    return Measurement.get(console, console.options, table).maximum


def _fitting(titles: Sequence[str], cells: Sequence[Sequence[str]], width: int) -> Table:
    """With heads on one line if that fits, else on two, and hierarchies too."""
    heads = [title.replace("\n(", "(").replace("\n_", "_").replace("\n", " ") for title in titles]
    one_line = _table(heads, cells)
    if natural_width(one_line) <= width:
        return one_line
    folded = [[cell.replace("hierarchical:", "hierarchical:\n") for cell in row] for row in cells]
    return _table(titles, folded)


def _table(titles: Sequence[str], cells: Sequence[Sequence[str]]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), collapse_padding=True, pad_edge=False)
    for title in titles:
        left = title in ("type", "check") or "algorithm" in title
        table.add_column(title, justify="left" if left else "right", no_wrap=True)
    for row in cells:
        table.add_row(*row)
    return table


def _columns(
    rows: Sequence[Row], dtype: str, stats: Sequence[str], sizes: bool
) -> list[tuple[str, Value]]:
    columns: list[tuple[str, Value]] = [
        ("size\n(B)", lambda row: str(row.nbytes)),
        ("count\n(elems)", lambda row: str(row.count)),
    ]
    if sizes:
        columns += [
            ("total_input\n_size(B)", lambda row: str(row.input_bytes)),
            ("total_output\n_size(B)", lambda row: str(row.output_bytes)),
        ]
    columns.append(("type", lambda row: dtype))
    columns += [(f"time:{s}\n(us)", lambda row, s=s: _us(row.percentile(s))) for s in stats]
    if any(row.alone_ps is not None for row in rows):
        columns.append(("alone\n(us)", lambda row: _us(row.alone_ps or 0)))
    if any(row.late is not None for row in rows):
        columns += [
            ("after last\narrival\n(us)", lambda row: _us(row.after_ps)),
            ("last\nrank", lambda row: "-" if row.late is None else str(row.late)),
        ]
    columns += [
        ("algbw\n(GB/s)", lambda row: f"{row.algbw / GB:.2f}"),
        ("busbw\n(GB/s)", lambda row: f"{row.busbw / GB:.2f}"),
        ("bound\n(GB/s)", lambda row: _bound(row)),
        ("algorithm", lambda row: row.algorithm),
    ]
    if any(row.checked for row in rows):
        columns.append(("check", lambda row: (row.checked or "").partition(",")[0]))
    return columns


def _us(ps: float) -> str:
    return f"{ps / 1e6:.2f}"


def _bound(row: Row) -> str:
    return "-" if row.bound == float("inf") else f"{row.bound / GB:.2f}"


def _average(rows: Sequence[Row]) -> Text:
    mean = sum(row.busbw for row in rows) / len(rows)
    return Text(f"Avg bus bandwidth: {mean / GB:.4f} GB/s")


def _notes(rows: Sequence[Row]) -> list[Text]:
    """Why the algorithm, what limited it, and what was checked, for each run of sizes."""
    notes = _runs("algorithm", rows, lambda row: row.algorithm, lambda row: row.reason)
    notes += _runs("limited by", rows, lambda row: row.limited_by)
    if any(row.checked for row in rows):
        notes += _runs("check", rows, lambda row: row.checked or "")
    return notes


def _runs(title: str, rows: Sequence[Row], value: Value, why: Value | None = None) -> list[Text]:
    """One line for each run of sizes with the same value; `why` is that of the first size."""
    lines = []
    for text, run in groupby(rows, key=value):
        own = list(run)
        first, last = own[0].nbytes, own[-1].nbytes
        sizes = str(first) if first == last else f"{first}-{last}"
        because = f": {why(own[0])}" if why else ""
        lines.append(Text(f"{title}, {sizes} B: {text}{because}"))
    return lines


def comparison_view(comparison: Comparison, *, width: int = 80) -> list[RenderableType]:
    """Time, bus bandwidth and algorithm of both files for each size, and the ratio of the times."""
    first, second = _names(comparison)
    algorithms = any(any(pair.algorithms) for pair in comparison.pairs)
    titles = ["size\n(B)", "type", f"{first}\n(us)", f"{second}\n(us)", "ratio"]
    titles += [f"{name}\nbusbw\n(GB/s)" for name in (first, second)]
    titles += [f"{name}\nalgorithm" for name in (first, second)] if algorithms else []
    cells = []
    for pair in comparison.pairs:
        times = [f"{t:.2f}" for t in pair.times_us]
        busbws = [f"{b:.2f}" for b in pair.busbws] if pair.busbws else ["-", "-"]
        names = [name or "-" for name in pair.algorithms] if algorithms else []
        row = [str(pair.nbytes), pair.dtype or "-", *times, f"{pair.ratio:.3f}", *busbws, *names]
        cells.append(row)
    return [
        _fitting(titles, cells, width),
        *map(Text, _comparison_notes(comparison, first, second)),
    ]


def _names(comparison: Comparison) -> tuple[str, str]:
    """Heads of the columns: real and simulated if it is so, else first and second."""
    kinds = (comparison.first.simulated, comparison.second.simulated)
    if kinds == (False, True):
        return "real", "simulated"
    return ("simulated", "real") if kinds == (True, False) else ("first", "second")


def _comparison_notes(comparison: Comparison, first: str, second: str) -> list[str]:
    worst, pairs = comparison.worst, comparison.pairs
    notes = [
        f"ratio is time {second} / {first}: geometric mean {comparison.mean_ratio:.3f}, "
        f"furthest from 1 is {worst.ratio:.3f} at {worst.nbytes} B ({len(pairs)} rows compared)"
    ]
    for name, results, only in zip(
        (first, second), (comparison.first, comparison.second), comparison.only, strict=True
    ):
        if only:
            notes.append(f"{only} of {len(results.rows)} rows of {results.path} ({name}) unmatched")
    return [*notes, *comparison.units]
