"""The table of `trnsim study` in a terminal."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ..studies.table import StudyTable

MOST_COLUMNS = 14


def study_view(table: StudyTable, most: int = 12) -> list[RenderableType]:
    """The front if there is one, else the first rows; refusals counted by their reason."""
    done = table.done
    rows = [table.rows[number] for number in table.front] or done
    refused = sum(1 for row in table.rows if row["refused"])
    large = len(table.rows) - len(done) - refused
    head = f"{table.title}: {len(table.rows)} points, {refused} refused"
    head += f", {large} do not fit into memory" if large else ""
    what = "the Pareto front" if table.front else "the first"
    parts: list[RenderableType] = [Text(head)]
    if rows:
        parts += [
            Text(f"{what}, {min(most, len(rows))} of {len(rows)} rows"),
            _rows(table, rows[:most]),
        ]
    return [*parts, *map(Text, _refusals(table.rows))]


def _rows(table: StudyTable, rows: Sequence[Mapping[str, Any]]) -> Table:
    columns = [c for c in table.columns if c != "refused"]
    columns = columns[: max(MOST_COLUMNS, len(table.varying))]
    shown = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in columns:
        number = all(isinstance(row[column], int | float | None) for row in rows)
        shown.add_column(column.replace("_", "\n", 1), justify="right" if number else "left")
    for row in rows:
        shown.add_row(*(_cell(row[column]) for column in columns))
    return shown


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _refusals(rows: Sequence[Mapping[str, Any]], most: int = 5) -> list[str]:
    """The commonest reasons, by their field."""
    reasons = [str(row["refused"]) for row in rows if row["refused"]]
    fields = Counter(reason.partition(":")[0] for reason in reasons)
    first = {field: next(r for r in reasons if r.startswith(field)) for field in fields}
    return [f"refused, {n} points: {first[field]}" for field, n in fields.most_common(most)]
