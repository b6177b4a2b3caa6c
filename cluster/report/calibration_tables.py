"""What `trnsim calibrate` shows: constants, series, points; for terminals, as Markdown, JSON."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trnsim.device.numbers import Number
from trnsim.device.units import format_bytes, format_time

from ..calibrate import Calibration, SeriesError
from ..measured import Series

SERIES = ("series", "what", "GB/s", "model", "error", "left out", "point", "left out")
POINTS = ("series", "size", "measured", "model", "error", "left out")
CONSTANTS = ("number", "chips", "value", "meaning", "determined by")


def calibration_view(found: Calibration, *, points: bool = True) -> RenderableType:
    """Tables for a terminal."""
    parts: list[RenderableType] = [
        table("constants", CONSTANTS[:3] + CONSTANTS[4:], _without(3, constant_rows(found))),
        table("series", SERIES, series_rows(found)),
    ]
    if points:
        parts.append(table("points", POINTS, point_rows(found)))
    return Group(*parts, Text(summary_line(found)), Text(NOTE))


def _without(column: int, rows: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    return [row[:column] + row[column + 1 :] for row in rows]


NOTE = (
    "GB/s: 1e9 bytes/s by the slope, least squares of time over bytes; error: of the modelled time "
    "per byte. left out: fitted without that series. point: the worst one; points have errors only "
    "where they are more than the overhead of the tool."
)


def calibration_markdown(found: Calibration) -> str:
    """Series, and constants, as Markdown tables."""
    series = markdown(SERIES, series_rows(found))
    constants = markdown(CONSTANTS, constant_rows(found))
    return f"{series}\n{summary_line(found)}\n\n{constants}"


def calibration_json(found: Calibration) -> dict[str, Any]:
    """Everything as plain values; times in ps, errors as fractions."""
    return {
        "constants": [
            {"number": c.key, "chips": list(c.chips), "unit": c.unit, "value": value}
            | {"meaning": c.meaning, "determined_by": list(found.fit.by.get(c, ()))}
            for c, value in found.fit.values.items()
        ],
        "series": [_series_json(error) for error in found.errors],
        "summary": found.summary(),
    }


def _series_json(error: SeriesError) -> dict[str, Any]:
    series = error.series
    left_out = [None] * len(series.nbytes) if error.left_out is None else error.left_out.tolist()
    columns = (series.nbytes.tolist(), series.times.tolist(), error.times.tolist(), left_out)
    keys = ("bytes", "measured_ps", "modelled_ps", "left_out_ps")
    return {
        "series": series.name,
        "what": what(series),
        "source": series.source,
        "slope_error": error.slope,
        "slope_error_left_out": error.slope_left_out,
        "latency_error": error.latency,
        "latency_error_left_out": error.latency_left_out,
        "points": [dict(zip(keys, row, strict=True)) for row in zip(*columns, strict=True)],
    }


def what(series: Series) -> str:
    """`all_reduce, 16 ranks of trn2.48xlarge at LNC=2`."""
    group = series.group
    where = f"{group.nodes} x {group.instance}" if group.nodes > 1 else group.instance
    op = f"{group.operation} across dies" if group.cross_die else group.operation
    lnc = f" at LNC={group.lnc}" if group.lnc else ""
    return f"{op}, {group.ranks} ranks of {where}{lnc}"


def series_rows(found: Calibration) -> list[tuple[str, ...]]:
    """One row per series, as text."""
    return [
        (
            error.series.name,
            what(error.series),
            *_slopes(error),
            *(percent(e) for e in (error.slope, error.slope_left_out)),
            *(percent(e) for e in (error.latency, error.latency_left_out)),
        )
        for error in found.errors
    ]


def _slopes(error: SeriesError) -> tuple[str, str]:
    series = error.series
    if not series.slope:
        return "", ""
    rates = (1e3 / series.slope_of(times) for times in (series.times, error.times))
    measured, modelled = (f"{rate:.4g}" for rate in rates)
    return measured, modelled


def point_rows(found: Calibration) -> list[tuple[str, ...]]:
    """One row per point, as text; errors only where a point means something."""
    rows = []
    for error in found.errors:
        series = error.series
        for k, nbytes in enumerate(series.nbytes.tolist()):
            left_out = None if error.left_out is None else error.left_out[k] / series.times[k] - 1
            shown = (error.points[k], left_out) if series.latency else (None, None)
            times = (format_time(t[k]) for t in (series.times, error.times))
            rows.append((series.name, format_bytes(nbytes), *times, *map(percent, shown)))
    return rows


def constant_rows(found: Calibration) -> list[tuple[str, ...]]:
    """One row per constant, as text; those that no series determines say so."""
    rows = []
    for constant, value in found.fit.values.items():
        number: Number = constant.number(value, "")
        by = ", ".join(found.fit.by.get(constant, ())) or "nothing here: left as it was"
        rows.append((constant.key, ", ".join(constant.chips), number.text, constant.meaning, by))
    return rows


def summary_line(found: Calibration) -> str:
    """Medians and worst errors in one line."""
    return "; ".join(f"{name} {value:.1%}" for name, value in found.summary().items())


def percent(error: float | None) -> str:
    """A signed percentage; nothing for None."""
    return "" if error is None else f"{error:+.1%}"


def table(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table for a terminal, its words to the left."""
    table = Table(
        box=SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False, padding=(0, 1, 0, 0)
    )
    for head in heads:
        left = head in ("step", "series", "what", "number", "chips", "meaning", "determined by")
        wraps = head in ("what", "chips", "meaning", "determined by", "left out")
        table.add_column(
            head,
            justify="left" if left else "right",
            no_wrap=not wraps,
            min_width=20 if head == "what" else None,
        )
    for row in rows:
        table.add_row(*row)
    return table


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
