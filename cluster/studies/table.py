"""The table of a study: one row per point, in the order of the study, and its Pareto front."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trnsim.device.errors import BadInput

from .. import wire
from .definition import Pareto, Study
from .journal import PointResult


@wire.register
@dataclass(frozen=True)
class StudyTable:
    """Rows as values by column; a refused point has its reason in `refused` and no results.

    columns: varied options, results, `refused`. front: numbers of the rows on the Pareto front.
    """

    title: str
    run: str
    version: str
    fixed: dict[str, Any]
    varying: list[str]
    columns: list[str]
    rows: list[dict[str, Any]]
    front: list[int]

    @property
    def done(self) -> list[dict[str, Any]]:
        """Rows that have results of something that can be run: it fits into memory."""
        return [row for row in self.rows if _can_be(row)]


def tabulate(study: Study, results: Sequence[PointResult], version: str) -> StudyTable:
    """The table of a study from the results of its points, in the order of the study."""
    found = dict.fromkeys(key for result in results for key in result.values)
    named = [key for key in found if key not in study.varying]
    columns = [*study.varying, *named, "refused"]
    rows = [
        {**{key: None for key in columns}, **result.values, **point, "refused": result.refused}
        for point, result in zip(study.points, results, strict=True)
    ]
    front = pareto_front(rows, study.pareto) if study.pareto else []
    return StudyTable(
        study.title,
        study.run,
        version,
        dict(study.fixed),
        list(study.varying),
        columns,
        rows,
        front,
    )


def pareto_front(rows: Sequence[Mapping[str, Any]], pareto: Pareto) -> list[int]:
    """Numbers of the rows that no other row is better than: as good in all, better in one.

    Rows without a value in one of the columns do not count, nor plans that do not fit. Raises
    BadInput for a column that no row has.
    """
    signs = [(name, 1) for name in pareto.lower] + [(name, -1) for name in pareto.higher]
    for name, _ in signs:
        if rows and name not in rows[0]:
            raise BadInput("[pareto]", name, list(rows[0]))
    whole = [
        (tuple(sign * row[name] for name, sign in signs), number)
        for number, row in enumerate(rows)
        if _can_be(row) and all(isinstance(row.get(name), int | float) for name, _ in signs)
    ]
    front: list[tuple[tuple[float, ...], int]] = []
    for values, number in sorted(whole):  # a row can only be dominated by one before it
        if not any(_dominates(kept, values) for kept, _ in front):
            front.append((values, number))
    return sorted(number for _, number in front)


def _can_be(row: Mapping[str, Any]) -> bool:
    return not row.get("refused") and row.get("fits") is not False


def _dominates(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))


def to_csv(table: StudyTable) -> str:
    """The rows, with a column `pareto` of 1 and 0 if there is a front."""
    out = io.StringIO()
    columns = [*table.columns, *(["pareto"] if table.front else [])]
    writer = csv.DictWriter(out, columns, lineterminator="\n")
    writer.writeheader()
    front = set(table.front)
    for number, row in enumerate(table.rows):
        writer.writerow({**row, "pareto": int(number in front)} if front else row)
    return out.getvalue()


def to_plain(table: StudyTable) -> dict[str, Any]:
    """For JSON."""
    return {
        "title": table.title,
        "run": table.run,
        "version": table.version,
        "fixed": table.fixed,
        "columns": table.columns,
        "rows": table.rows,
        "pareto": table.front,
    }
