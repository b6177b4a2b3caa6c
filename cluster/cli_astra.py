"""`trnsim astra`: a collective by ASTRA-sim's files and rules, beside the bound of its ports."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from trnsim.device.units import format_bytes, format_time

from . import nccom
from .frontends.astra import load_network, load_system
from .frontends.astra_profile import RULES, simulate

PS_PER_NS = 1000


@click.command()
@click.argument("operation")
@click.argument("network", type=click.Path(path_type=Path))
@click.argument("system", type=click.Path(path_type=Path))
@click.option(
    "-b", "--bytes", "sizes", multiple=True, default=("1M",), show_default=True,
    help="Bytes of a rank's buffer (of its shard for an all-gather); may be repeated.",
)  # fmt: skip
@click.option(
    "--rule", type=click.Choice(RULES), default="unaware", show_default=True,
    help="Of its analytical network: without or with queues on links.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def astra(
    operation: str, network: Path, system: Path, sizes: tuple[str, ...], rule: str, as_json: bool
) -> None:
    """Time OPERATION on NETWORK (yml) and SYSTEM (json) by the rules of ASTRA-sim 2.

    This compatibility profile keeps that simulator's endpoint delay, local-memory term, chunking
    and rounding. Where its time beats what the ports can carry, the bound is the answer, and both
    are shown.
    """
    wires = load_network(network)
    rules = load_system(system, len(wires.dims))
    kind = nccom.operation(operation).kind
    rows = []
    for text in sizes:
        nbytes = nccom.size(text, "-b").nbytes
        done = simulate(wires, rules, kind, nbytes, rule)
        rows.append({"bytes": nbytes, **asdict(done), "time_ns": done.time_ns})
    if as_json:
        click.echo(json.dumps({"operation": kind, "npus": wires.npus, "rows": rows}, indent=2))
        return
    table = Table(title=f"{kind} on {wires.npus} NPUs, profile astra ({rule})", box=None)
    for column in ("size", "time", "ASTRA-sim", "port bound", ""):
        table.add_column(column, justify="right")
    for row in rows:
        beaten = "beats its ports" if row["time_ns"] > row["peer_ns"] else ""
        times = (format_time(row[key] * PS_PER_NS) for key in ("time_ns", "peer_ns", "port_ns"))
        table.add_row(format_bytes(row["bytes"]), *times, beaten)
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(table)
    console.print(wires.note)
    if rules.ignored:
        console.print(f"without effect in the system file: {', '.join(rules.ignored)}")
