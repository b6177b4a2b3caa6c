"""A study as a TOML file: which options are fixed, which vary, and what to draw from the results.

    title = "all-reduce inside a node"
    run = "collective"            # or "plan", "place": options are those of the command

    [fixed]                       # the same for all points
    operation = "all_reduce"
    instance = "trn2.48xlarge"

    [sweep]                       # every combination of these
    minbytes = ["1MiB", "64MiB"]
    algorithm = ["policy", "ring"]

    [[together]]                  # these change together, row by row; may be given many times
    nodes = [1, 2, 4]
    nworkers = [64, 128, 256]

    [[point]]                     # single points besides the combinations
    minbytes = "1GiB"
    algorithm = "best"

    [pareto]                      # the front of the table
    lower = ["time_us"]
    higher = ["busbw_gbps"]

    [[plot]]                      # see `plots`
    kind = "scaling"
    x = "nodes"
    y = "busbw_gbps"

A point that is refused (a mesh that does not fit, too little memory) is a row that says why.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trnsim.device.errors import BadInput

from ..reading import Table, placed, read_toml_file

TOP = ("title", "run", "fixed", "sweep", "together", "point", "pareto", "plot")
PLOT = ("kind", "x", "y", "series", "title")
PLOTS = ("scaling", "lines", "pareto")
MOST_POINTS = 1_000_000


@dataclass(frozen=True)
class Plot:
    """A figure: kind, columns of x and y, columns that make one line each, its title."""

    kind: str
    x: str
    y: str
    series: tuple[str, ...] = ()
    title: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """The columns that it needs."""
        return self.x, self.y, *self.series


@dataclass(frozen=True)
class Pareto:
    """Columns that should be low, and those that should be high."""

    lower: tuple[str, ...]
    higher: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """All columns."""
        return *self.lower, *self.higher


@dataclass(frozen=True)
class Study:
    """A study. points: the options of each, in the order of the table; `varying`, their names."""

    title: str
    run: str
    fixed: Mapping[str, Any]
    points: tuple[Mapping[str, Any], ...]
    varying: tuple[str, ...]
    pareto: Pareto | None = None
    plots: tuple[Plot, ...] = ()


def read_study(path: str | Path, runs: Sequence[str]) -> Study:
    """The study of a file; `runs` are the kinds that exist.

    Raises BadFile for a file that cannot be read, and BadInput naming file, field, value, what is
    allowed and the nearest valid choice.
    """
    name = Path(path).name
    top = Table(read_toml_file(path), name, TOP)
    run = top.text("run")
    if run not in runs:
        raise BadInput(top.field("run"), run, runs)
    fixed = _options(top.raw("fixed", {}), f"{name}: [fixed]")
    points = _points(top, fixed)
    varying = tuple(dict.fromkeys(key for point in points for key in point))
    return Study(
        title=top.text("title", Path(path).stem),
        run=run,
        fixed=fixed,
        points=tuple(points),
        varying=varying,
        pareto=_pareto(top) if "pareto" in top else None,
        plots=tuple(_plot(table) for table in top.tables("plot", PLOT)),
    )


def _points(top: Table, fixed: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """All combinations of the sweep and the rows of `together`, then single points."""
    axes: list[list[Mapping[str, Any]]] = [
        [{key: value} for value in _values(f"{top.where}: [sweep]: {key}", values)]
        for key, values in _options(top.raw("sweep", {}), f"{top.where}: [sweep]").items()
    ]
    for number, data in enumerate(top.raw("together", []), 1):
        axes.append(_rows(_options(data, f"{top.where}: together {number}"), number, top.where))
    count = 1
    for axis in axes:
        count *= len(axis)
    if count > MOST_POINTS:
        raise BadInput(f"{top.where}: [sweep]", f"{count} points", f"at most {MOST_POINTS}")
    made = [_merged(parts, top.where) for parts in itertools.product(*axes)] if axes else []
    made += [
        _options(data, f"{top.where}: point {number}")
        for number, data in enumerate(top.raw("point", []), 1)
    ]
    for point in made:
        both = sorted(point.keys() & fixed.keys())
        if both:
            raise BadInput(f"{top.where}: {both[0]}", "fixed and varied", "one of them")
    return made or [{}]


def _rows(columns: Mapping[str, Any], number: int, where: str) -> list[Mapping[str, Any]]:
    """The rows of a [[together]]."""
    where = f"{where}: together {number}"
    lists = {key: _values(f"{where}: {key}", values) for key, values in columns.items()}
    lengths = {len(values) for values in lists.values()}
    if len(lengths) != 1:
        shown = ", ".join(f"{key} has {len(values)}" for key, values in lists.items())
        raise BadInput(where, shown or "{}", "columns of one length")
    return [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]


def _merged(parts: Sequence[Mapping[str, Any]], where: str) -> Mapping[str, Any]:
    merged: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            if key in merged:
                raise BadInput(f"{where}: {key}", "in two places", "one of [sweep], [[together]]")
            merged[key] = value
    return merged


def _options(data: object, where: str) -> dict[str, Any]:
    """A table of options, under the names that Python gives them."""
    if not isinstance(data, Mapping):
        raise BadInput(where, data, "a table")
    return {str(key).replace("-", "_"): value for key, value in data.items()}


def _values(where: str, values: object) -> list[Any]:
    if not isinstance(values, list) or not values:
        raise BadInput(where, values, "a list of one value or more")
    return values


def _pareto(top: Table) -> Pareto:
    table = top.table("pareto", ("lower", "higher"))
    found = Pareto(tuple(table.texts("lower", [])), tuple(table.texts("higher", [])))
    if not found.lower and not found.higher:
        raise BadInput(table.where, "{}", "columns in lower or higher")
    return found


def _plot(table: Table) -> Plot:
    with placed(table.where):
        kind = table.text("kind", "lines")
        if kind not in PLOTS:
            raise BadInput("kind", kind, PLOTS)
        series = tuple(table.texts("series", []))
        return Plot(kind, table.text("x"), table.text("y"), series, table.text("title", ""))
