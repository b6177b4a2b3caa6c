"""The command line. Bad input ends as one line on standard error and exit code 2."""

import json
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from trnsim.device.chip import load_chip
from trnsim.device.errors import BadFile, BadInput, TrnsimError

from . import (
    cli_astra,
    cli_calibrate,
    cli_collective,
    cli_kernel,
    cli_place,
    cli_plan,
    cli_study,
    wire,
)
from .instances import load_instance
from .mesh import parse_mesh
from .report import tables
from .report.record import RunRecord
from .report.summary import print_summary

BAD_INPUT = 2
CHIPS = ("inf2", "trn1", "trn2", "trn3")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="trnsim")
def cli() -> None:
    """Simulate training on AWS Trainium without the hardware: real values and modelled time."""


@cli.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--instance", default="trn2.3xlarge", show_default=True, help="Kind of instance.")
@click.option("--nodes", default=1, show_default=True, help="How many of them, over EFA.")
@click.option("--lnc", type=int, default=None, help="Physical cores per logical core (1 or 2).")
@click.option("--mesh", default="dp=2,tp=2", show_default=True, help="Axes, the last one fastest.")
@click.option("--steps", default=5, show_default=True, help="Training steps.")
@click.option(
    "--runtime", type=click.Choice(["local", "ray"]), default="local", show_default=True,
    help="In this process, or one Ray actor per physical core.",
)  # fmt: skip
@click.option("--address", default=None, help="A running Ray (ray://..., host:port, auto).")
@click.option(
    "--fidelity", type=click.Choice(["operator", "instruction"]), default="operator",
    show_default=True, help="Whole arrays, or every instruction on SBUF and PSUM.",
)  # fmt: skip
@click.option("--algorithm", default="policy", show_default=True, help="Of collectives.")
@click.option(
    "--streams", type=int, default=1, show_default=True,
    help="Of collectives: those in different groups of ranks run side by side.",
)  # fmt: skip
@click.option(
    "--overlay", type=click.Path(path_type=Path), default=None,
    help="Calibrated numbers of `trnsim calibrate` in place of the shipped ones.",
)  # fmt: skip
@click.option("--time-only", is_flag=True, help="No data: virtual time alone, at any scale.")
@click.option(
    "--lift", default="auto", show_default=True, metavar="AXIS",
    help="With --time-only: compile for a few ranks of an axis over which only the batch is "
    "sharded, and widen its groups. auto: dp, where there are many ranks; none: never.",
)  # fmt: skip
@click.option("--text", type=click.Path(), default=None, help="Same as --set text=FILE.")
@click.option("--set", "options", multiple=True, metavar="NAME=VALUE", help="Passed to training().")
@click.option(
    "--assume", multiple=True, metavar="FILE:LINE=N",
    help="Trips of a loop, or branch taken, where a time-only run cannot know.",
)  # fmt: skip
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("out"), show_default=True,
    help="Folder for trace.json and run.msgpack.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the record as JSON.")
def train(file: Path, mesh: str, text: str | None, options: Sequence[str],
          assume: Sequence[str], as_json: bool, **asked) -> None:  # fmt: skip
    """Train FILE on simulated NeuronCores.

    FILE defines one function and nothing more is needed:

    \b
        def training(mesh, **options):
            return step, state, batches

    mesh is a jax.sharding.Mesh with the axes of --mesh. step(state, batch) returns
    (new state, scalar loss). state is a pytree of arrays placed with NamedShardings over mesh;
    batches is an iterable of such pytrees. Options come from --text and --set.

    Times are modelled (virtual) time of the hardware, not of this machine.
    """
    from .frontends.training import parse_options
    from .train import TrainOptions
    from .train import train as run

    console = Console(stderr=True)
    named = parse_options(options)
    if text is not None:
        named["text"] = text
    wanted = TrainOptions(
        file=file, mesh=parse_mesh(mesh), options=named, stated=_stated(assume),
        command=shlex.join(["trnsim", *sys.argv[1:]]), **asked,
    )  # fmt: skip
    with console.status("starting") as status:
        record = run(wanted, status.update)
    _print_record(record, as_json)


@cli.command()
@click.argument("record", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the record as JSON.")
def show(record: Path, as_json: bool) -> None:
    """Print the summary of a run again, from its RECORD (run.msgpack) alone."""
    loaded = wire.read(record)
    if not isinstance(loaded, RunRecord):
        raise BadFile(f"{record}: is a {type(loaded).__name__}, not the record of a run")
    _print_record(loaded, as_json)


@cli.command()
@click.argument("chip", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def specs(chip: str | None, as_json: bool) -> None:
    """Print the hardware numbers of CHIP (trn1, inf2, trn2, trn3), each with source and status.

    Without CHIP: the main numbers of all four beside each other.
    """
    chips = [load_chip(name) for name in ([chip] if chip else CHIPS)]
    if as_json:
        click.echo(json.dumps({c.name: tables.specs(c) for c in chips}, indent=2))
    else:
        view = tables.specs_table(chips[0]) if chip else tables.overview_table(chips)
        _console().print(view)


@cli.command()
@click.argument("instance")
@click.option("--lnc", type=int, default=None, help="Physical cores per logical core (1 or 2).")
@click.option("--nodes", default=1, show_default=True, help="How many instances, over EFA.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def topology(instance: str, lnc: int | None, nodes: int, as_json: bool) -> None:
    """Print chips, physical and logical cores, HBM per logical core, links of INSTANCE."""
    found = load_instance(instance)
    if as_json:
        click.echo(json.dumps(tables.topology(found, nodes=nodes, lnc=lnc), indent=2))
    else:
        _console().print(tables.topology_view(found, nodes=nodes, lnc=lnc))


cli.add_command(cli_astra.astra)
cli.add_command(cli_calibrate.calibrate)
cli.add_command(cli_collective.collective)
cli.add_command(cli_collective.compare)
cli.add_command(cli_kernel.kernel)
cli.add_command(cli_place.place)
cli.add_command(cli_study.study)
cli.add_command(cli_plan.plan)


def _stated(assume: Sequence[str]) -> dict[str, int]:
    found = {}
    for statement in assume:
        line, _, number = statement.rpartition("=")
        if not line or not number.isdigit():
            raise BadInput("--assume", statement, "FILE:LINE=N with a whole number N")
        found[line] = int(number)
    return found


def _console() -> Console:
    """Standard output; as wide as the tables need where it is no terminal."""
    return Console(width=None if sys.stdout.isatty() else 110)


def _print_record(record: RunRecord, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(_finite(asdict(record)), indent=2, allow_nan=False))
    else:
        print_summary(record, _console())


def _finite(value: Any) -> Any:
    """Plain data with null for NaN and infinities, which JSON does not have."""
    match value:
        case dict():
            return {key: _finite(item) for key, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
        case float() if not math.isfinite(value):
            return None
    return value


def main() -> None:
    """Entry of the `trnsim` command."""
    try:
        cli(standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.exceptions.Exit as done:
        sys.exit(done.exit_code)
    except click.ClickException as error:
        _fail(error.format_message())
    except TrnsimError as error:
        _fail(str(error))


def _fail(message: str) -> None:
    click.echo(f"trnsim: error: {' '.join(message.split())}", err=True)
    sys.exit(BAD_INPUT)
