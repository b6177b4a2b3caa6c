"""A study from its file to its table: runs what is not finished yet, then writes the results."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from trnsim.device.errors import BadFile, Unsupported

from .. import wire
from ..report.nccom_json import write_json, write_text
from . import plots
from .definition import Study
from .execute import Job, run_local, run_ray
from .journal import Journal, PointResult, key_of
from .table import StudyTable, tabulate, to_csv, to_plain

JOURNAL = "points.trnsim"


@dataclass(frozen=True)
class StudyRun:
    """A study in its folder. `run` may be interrupted at any time and called again."""

    study: Study
    folder: Path
    runtime: str = "ray"
    address: str | None = None

    @property
    def keys(self) -> list[str]:
        """The key of each point, in order; equal points have one key."""
        fixed = dict(self.study.fixed)
        return [key_of(self.study.run, fixed | dict(point)) for point in self.study.points]

    def run(self, progress: Callable[[int, int], object] = lambda done, of: None) -> StudyTable:
        """Run the points that the journal does not have, and write the table and the figures.

        `progress` is called with the finished and all points, first with those found finished.
        Raises BadFile for a folder that cannot be written, and Unsupported if all points are
        refused: there is no table then.
        """
        keys = self.keys
        self._make_folder()
        with Journal(self.folder / JOURNAL) as journal:
            jobs = self._missing(keys, journal)
            total = len(set(keys))
            progress(total - len(jobs), total)
            for done, result in enumerate(self._results(jobs), total - len(jobs) + 1):
                journal.add(result)
                progress(done, total)
            results = [journal.results[key] for key in keys]
        if all(result.refused for result in results):
            raise Unsupported(f"all {len(results)} points are refused; {results[0].refused}")
        table = tabulate(self.study, results, version("trnsim"))
        write_table(table, self.study, self.folder)
        return table

    def _missing(self, keys: Sequence[str], journal: Journal) -> list[Job]:
        fixed, found = dict(self.study.fixed), {}
        for key, point in zip(keys, self.study.points, strict=True):
            if key not in journal.results:
                found.setdefault(key, Job(key, fixed | dict(point)))
        return list(found.values())

    def _results(self, jobs: Sequence[Job]) -> Iterator[PointResult]:
        if not jobs:
            return iter(())
        if self.runtime == "local":
            return run_local(self.study.run, jobs)
        return run_ray(self.study.run, jobs, self.address)

    def _make_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadFile(f"{self.folder}: cannot be made: {error.strerror}") from None


def write_table(table: StudyTable, study: Study, folder: Path) -> list[Path]:
    """table.csv, table.json, table.msgpack and the figures; each file whole or not at all."""
    write_text(folder / "table.csv", to_csv(table))
    write_json(folder / "table.json", to_plain(table))
    wire.write(folder / "table.msgpack", table)
    paths = [folder / f"table.{suffix}" for suffix in ("csv", "json", "msgpack")]
    for plot in study.plots:
        paths += plots.draw(plot, table, folder)
    return paths
