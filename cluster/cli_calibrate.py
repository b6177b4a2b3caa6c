"""`trnsim calibrate`: constants from measured collectives and steps, and how well they do."""

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from trnsim.device.errors import BadFile, BadInput

if TYPE_CHECKING:
    from .calibrate import Calibration
    from .calibrate_steps import StepCalibration


@click.command()
@click.argument("files", nargs=-1, type=click.Path(path_type=Path))
@click.option("--steps", is_flag=True, help="Fit program_efficiency to training steps instead.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the constants here (TOML).")
@click.option("--with-shipped", is_flag=True, help="Also fit the points that come with trnsim.")
@click.option("--no-left-out", is_flag=True, help="Do not fit without each series in turn.")
@click.option("--instance", help="Of results of nccom-test: kind of instance.")
@click.option("--op", help="Of results of nccom-test: allr, allg, redsct, alltoall, sendrecv, ...")
@click.option("--ranks", "-r", type=int, help="Of results of nccom-test: ranks.")
@click.option("--nodes", "-N", default=1, show_default=True, help="The same: instances.")
@click.option("--lnc", type=int, help="The same: physical cores per rank (default: the chip's).")
@click.option("--points/--no-points", default=True, show_default=True, help="Show every point.")
@click.option("--markdown", is_flag=True, help="Print Markdown.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: ps, and errors as fractions.")
def calibrate(
    files: tuple[Path, ...], steps: bool, out: Path | None, with_shipped: bool, no_left_out: bool,
    points: bool, markdown: bool, as_json: bool, **machine,
) -> None:  # fmt: skip
    """Fit the calibrated constants to measured collectives in FILES.

    FILES are CSV files with the columns of device/specs/measured.csv, or results of nccom-test
    (--report-to-json-file, or its printed table), for which --instance, --op and --ranks say what
    was measured. Without FILES: the points that come with trnsim, whose fit is what trnsim uses.

    The constants go to --out, an overlay that other commands take by --overlay. Rates are
    fitted to slopes (time over bytes), latencies to the points that are good for it. Constants that
    the points do not depend on are left alone.

    With --steps, FILES have the form of device/specs/measured_steps.toml; without any, those steps
    are fitted. One number, what compiled programs reach of the pace of their kernels, makes the
    worst deviation of all steps as small as it can; every deviation is shown.
    """
    if steps:
        _calibrate_steps(files, out, with_shipped, not no_left_out, markdown, as_json)
        return
    from .calibrate import calibrate as run
    from .calibrate import current
    from .measured import shipped
    from .report import calibration_tables as tables

    series = [one for path in files for one in _series_in(path, machine)]
    if with_shipped or not files:
        series += shipped()
    _check_names([one.name for one in series])
    console = Console(stderr=True)
    with console.status("all series") as status:
        start = current() if files else None
        found = run(series, start=start, leave_out=not no_left_out, progress=status.update)
    _write_overlay(out, found, console)
    if as_json:
        click.echo(json.dumps(tables.calibration_json(found), indent=2))
    elif markdown:
        click.echo(tables.calibration_markdown(found))
    else:
        Console().print(tables.calibration_view(found, points=points))


def _calibrate_steps(
    files: tuple[Path, ...], out: Path | None, with_shipped: bool, leave_out: bool,
    markdown: bool, as_json: bool,
) -> None:  # fmt: skip
    from .calibrate_steps import calibrate_steps
    from .measured_steps import read_steps, shipped_steps
    from .report import step_tables as tables

    measured = [step for path in files for step in read_steps(path)]
    if with_shipped or not files:
        measured += shipped_steps()
    _check_names([step.name for step in measured], "step")
    console = Console(stderr=True)
    with console.status("all steps") as status:
        found = calibrate_steps(measured, leave_out=leave_out, progress=status.update)
    _write_overlay(out, found, console)
    if as_json:
        click.echo(json.dumps(tables.steps_json(found), indent=2))
    elif markdown:
        click.echo(tables.steps_markdown(found))
    else:
        Console().print(tables.steps_view(found))


def _series_in(path: Path, machine: dict) -> list:
    from .measured import Group, read_nccom, read_series

    if path.suffix.lower() == ".csv":
        return read_series(path)
    for name in ("instance", "op", "ranks"):
        if machine[name] is None:
            raise BadInput(f"--{name}", "nothing", f"what {path} was measured on (not a .csv file)")
    where = {key: value for key, value in machine.items() if key != "op"}
    return [read_nccom(path, Group(operation=machine["op"], dtype="uint8", **where))]


def _check_names(names: list[str], what: str = "series") -> None:
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise BadInput(what, sorted(twice)[0], "each name once in all files")


def _write_overlay(
    path: Path | None, found: "Calibration | StepCalibration", console: Console
) -> None:
    if path is None:
        return
    try:
        path.write_text(found.overlay_text(shlex.join(["trnsim", *sys.argv[1:]])), "utf-8")
    except OSError as error:
        raise BadFile(f"{path}: {error.strerror or error}") from None
    console.print(f"wrote {path}", highlight=False)
