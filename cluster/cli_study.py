"""`trnsim study`: a sweep over any command, on all processors, that may be interrupted."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from .cli_collective import _console, _show


@click.command()
@click.argument("study", type=click.Path(path_type=Path))
@click.option(
    "--out", type=click.Path(path_type=Path), default=None,
    help="Folder of finished points, table and figures.  [default: out/NAME OF STUDY]",
)  # fmt: skip
@click.option(
    "--runtime", type=click.Choice(["ray", "local"]), default="ray", show_default=True,
    help="Points in Ray actors, or one after another in this process.",
)  # fmt: skip
@click.option("--address", default=None, help="A running Ray (ray://..., host:port, auto).")
@click.option("--fresh", is_flag=True, help="Forget finished points.")
@click.option(
    "--top",
    type=click.IntRange(1),
    default=12,
    show_default=True,
    help="Rows that the terminal shows.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the table as JSON.")
def study(study: Path, out: Path | None, runtime: str, address: str | None, fresh: bool,
          top: int, as_json: bool) -> None:  # fmt: skip
    """Run the points of STUDY, a TOML file, and make a table, its Pareto front and figures.

    Options of a study are those of the command that it runs (plan, collective, place). Points that
    cannot be are rows that say why. Finished points are kept in --out: after Ctrl-C or a crash, the
    same command goes on where it stopped.
    """
    from .report.study_tables import study_view
    from .studies.definition import read_study
    from .studies.run import JOURNAL, StudyRun
    from .studies.runners import RUNNERS, check
    from .studies.table import to_plain

    asked = read_study(study, tuple(RUNNERS))
    check(asked)
    folder = out or Path("out") / study.stem
    if fresh:
        (folder / JOURNAL).unlink(missing_ok=True)
    with _progress(folder, quiet=as_json) as advance:
        table = StudyRun(asked, folder, runtime, address).run(advance)
    if as_json:
        click.echo(json.dumps(to_plain(table), indent=2))
        return
    console = _console()
    _show(console, study_view(table, top))
    files = [f"{path.name}" for path in sorted(folder.iterdir()) if path.name != JOURNAL]
    console.print(f"in {folder}: {', '.join(files)}", highlight=False)


@contextmanager
def _progress(folder: Path, *, quiet: bool) -> Iterator[Any]:
    """A function of (finished, all): a bar, and what to do after an interruption."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("points"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=quiet) as bar:
        task, started = bar.add_task("points", total=None), list[int]()

        def advance(done: int, total: int) -> None:
            if done and not started:
                console.print(f"{done} of {total} points were finished before", highlight=False)
            started.append(done)
            bar.update(task, completed=done, total=total)

        try:
            yield advance
        except KeyboardInterrupt:
            text = f"stopped: finished points are kept in {folder}"
            console.print(f"{text}; the same command goes on from there", highlight=False)
            raise
