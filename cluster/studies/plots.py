"""Figures of a study's table, each as SVG and PNG.

- `scaling`: y over x (chips, nodes) with the best point of each series at each x: throughput beside
  the ideal line, efficiency against the smallest x, and exposed communication if the table has it.
  It is called weak scaling where the global batch grows with x, strong where it stays.
- `lines`: y over x, the best (highest) y of each series.
- `pareto`: all points, and those of the front joined.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trnsim.device.errors import BadInput

from ..plotting import SUFFIXES, figure, save
from .definition import Plot
from .table import StudyTable

EXPOSED = "exposed_communication"  # the column with the share of a step
Line = list[tuple[float, dict[str, Any]]]


def draw(plot: Plot, table: StudyTable, folder: Path) -> list[Path]:
    """Write a plot; the files. Raises BadInput for columns that the table does not have."""
    for name in (plot.x, plot.y, *plot.series):
        if name not in table.columns and name not in table.fixed:
            raise BadInput(f"column of plot {plot.kind}", name, table.columns)
    lines = dict(_lines(plot, table))
    paths = [folder / f"{_name(plot)}{suffix}" for suffix in SUFFIXES]
    panels = 3 if plot.kind == "scaling" and EXPOSED in table.columns else 1
    panels = 2 if plot.kind == "scaling" and panels == 1 else panels
    with figure(4.6 * panels, 3.8) as drawn:
        axes = drawn.subplots(1, panels, squeeze=False)[0]
        if plot.kind == "scaling":
            _scaling(axes, plot, lines)
        elif plot.kind == "pareto":
            _pareto(axes[0], plot, table)
        else:
            _curves(axes[0], plot, lines)
        drawn.suptitle(plot.title or _title(plot, table, lines))
        for path in paths:
            save(drawn, path)
    return paths


def _lines(plot: Plot, table: StudyTable) -> Iterator[tuple[str, Line]]:
    """(name, [(x, the row with the highest y)]) of each series, x rising."""
    series: dict[str, dict[float, dict[str, Any]]] = {}
    for row in table.done:
        row = {**table.fixed, **row}
        if row.get(plot.x) is None or row.get(plot.y) is None:
            continue
        name = ", ".join(f"{key} {row[key]}" for key in plot.series)
        best = series.setdefault(name, {})
        kept = best.get(row[plot.x])
        if kept is None or row[plot.y] > kept[plot.y]:
            best[row[plot.x]] = row
    for name, best in series.items():
        yield name, sorted(best.items())


def efficiency(line: Line, y: str) -> list[float]:
    """y per x against that of the smallest x."""
    first_x, first = line[0]
    return [row[y] / first[y] * first_x / x for x, row in line]


def _scaling(axes: Sequence[Any], plot: Plot, lines: dict[str, Line]) -> None:
    from matplotlib.ticker import NullLocator

    for name, line in lines.items():
        xs = [x for x, _ in line]
        axes[0].plot(xs, [row[plot.y] for _, row in line], marker="o", label=name)
        axes[1].plot(xs, efficiency(line, plot.y), marker="o", label=name)
        if len(axes) > 2:
            axes[2].plot(xs, [row[EXPOSED] for _, row in line], marker="o", label=name)
    for index, line in enumerate(lines.values()):
        (first_x, first), xs = line[0], [x for x, _ in line]
        ideal = [first[plot.y] * x / first_x for x in xs]
        label = "ideal" if not index else None
        axes[0].plot(xs, ideal, color="grey", linestyle=":", linewidth=1, label=label)
    axes[0].set(xscale="log", yscale="log", ylabel=_words(plot.y))
    axes[1].set(xscale="log", ylim=(0, 1.1), ylabel="efficiency")
    if len(axes) > 2:
        axes[2].set(xscale="log", ylim=(0, None), ylabel="exposed communication, share of step")
    ticks = sorted({x for line in lines.values() for x, _ in line})
    for panel in axes:
        panel.set_xlabel(_words(plot.x))
        panel.set_xticks(ticks, [f"{x:g}" for x in ticks], rotation=45)
        panel.xaxis.set_minor_locator(NullLocator())
    if lines:
        axes[0].legend(fontsize=7)


def _curves(axes: Any, plot: Plot, lines: dict[str, Line]) -> None:
    for name, line in lines.items():
        axes.plot([x for x, _ in line], [row[plot.y] for _, row in line], marker="o", label=name)
    axes.set(xlabel=_words(plot.x), ylabel=_words(plot.y))
    if plot.series and lines:
        axes.legend(fontsize=7)


def _pareto(axes: Any, plot: Plot, table: StudyTable) -> None:
    points = [(row[plot.x], row[plot.y]) for row in table.done if row.get(plot.x) is not None]
    axes.scatter(*zip(*points, strict=True), s=12, color="silver", label="points")
    front = [table.rows[number] for number in table.front]
    edge = sorted((row[plot.x], row[plot.y]) for row in front)
    if edge:
        axes.plot(*zip(*edge, strict=True), marker="o", label="Pareto front")
    axes.set(xlabel=_words(plot.x), ylabel=_words(plot.y))
    axes.legend(fontsize=7)


def _title(plot: Plot, table: StudyTable, lines: dict[str, Line]) -> str:
    if plot.kind != "scaling":
        return table.title
    kinds = {_growth(line) for line in lines.values()}
    return f"{table.title}: {kinds.pop()} scaling" if len(kinds) == 1 else table.title


def _growth(line: Line) -> str:
    """`weak` where the global batch grows as x does."""
    batches = [row.get("global_batch") for _, row in line]
    if len(line) < 2 or None in batches or batches[0] == batches[-1]:
        return "strong"
    return "weak"


def _name(plot: Plot) -> str:
    """`scaling-nodes-tokens_per_s`."""
    return re.sub(r"[^\w.-]", "_", f"{plot.kind}-{plot.x}-{plot.y}")


def _words(column: str) -> str:
    return column.replace("_per_", "/").replace("_", " ")
