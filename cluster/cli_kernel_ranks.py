"""`trnsim kernel ... --instance`: a kernel on many ranks, its slowest ranks and collectives."""

import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from trnsim.device.errors import BadInput
from trnsim.device.isa.base import ENGINES
from trnsim.device.nki.collectives import ReplicaGroup
from trnsim.device.nki.lint import lint
from trnsim.device.nki.result import SimulationResult
from trnsim.device.units import format_bytes, format_rate, format_time

from .cli_kernel import by_name, parse_argument, report_lint, trace_entries, write_entries
from .instances import load_instance
from .kernel_execution import Ranked
from .kernel_fabric import CollectiveUse
from .kernel_file import load_kernel
from .kernel_ranks import RanksResult, simulate_ranks

RANKS_SHOWN = 8
CALLS_SHOWN = 20
_GROUPS = re.compile(r"(?:([A-Za-z_]\w*)=)?groups\[(\d+)\]")


def run_ranks(
    place: str, arguments: Sequence[str], *, trace: Path, as_json: bool, seed: int, lnc: int,
    instance: str | None, ranks: int | None, nodes: int, linted: str, overlays: Sequence[Path],
    **options: Any,
) -> None:  # fmt: skip
    """Runs the kernel at FILE.py:NAME on ranks, writes the trace, prints tables or JSON."""
    if instance is None:
        raise BadInput("--instance", "none", "an instance for --ranks, --nodes and --runtime")
    many = ranks or nodes * load_instance(instance).logical_cores(lnc)
    found = load_kernel(place)
    inputs = [inputs_of(arguments, seed, rank, many) for rank in range(many)]
    if linted != "off":
        report_lint(lint(found, [*inputs[0].args, *inputs[0].kwargs.values()]), linted == "error")
    run = partial(
        simulate_ranks, found, inputs, ranks=many, lnc=lnc, instance=instance, nodes=nodes,
        seed=seed, **options,
    )  # fmt: skip
    with Console(stderr=True).status(f"running the kernel on {many} ranks"):
        result = run()
        times = {str(path): run(overlay=path).time for path in overlays}
    write_entries(trace, ranks_trace(result))
    if as_json:
        numbers = summary(result, place, arguments, seed)
        overlaid = [{"overlay": path, "time_ps": time} for path, time in times.items()]
        click.echo(json.dumps(numbers | {"overlays": overlaid}, indent=2))
        return
    show(result, place, trace)
    for path, time in times.items():
        click.echo(f"with {path}: {format_time(time)}")


def inputs_of(arguments: Sequence[str], seed: int, rank: int, ranks: int) -> Ranked:
    """The arguments of one rank: random ones are its own, `groups[N]` is of N ranks each."""
    random = np.random.default_rng((seed, rank))

    def parsed(text: str) -> tuple[str, Any]:
        grouped = _GROUPS.fullmatch(text.strip())
        if grouped:
            return grouped[1], _groups(int(grouped[2]), ranks)
        return parse_argument(text, random)

    positional, named = by_name(map(parsed, arguments))
    return Ranked(tuple(positional), named)


def _groups(size: int, ranks: int) -> ReplicaGroup:
    if size < 1 or ranks % size:
        raise BadInput("--arg groups", size, f"a divisor of the {ranks} ranks")
    return ReplicaGroup([list(range(r, r + size)) for r in range(0, ranks, size)])


# ---- what it gave ----------------------------------------------------------------------------


@dataclass(frozen=True)
class CallRow:
    """Calls of one line that are alike. Times in ps: of the longest, and of all together."""

    use: CollectiveUse
    calls: int
    longest: int
    total: int


def call_rows(result: RanksResult) -> list[CallRow]:
    """Collectives by line, kind, size and algorithm, those that take longest in all first."""
    found: dict[tuple, list[CollectiveUse]] = {}
    for use in result.collectives:
        key = (use.name, use.line, use.nbytes, use.size, use.groups, use.algorithm, use.on_chip)
        found.setdefault(key, []).append(use)
    rows = []
    for uses in found.values():
        times = [use.duration for use in uses]
        rows.append(CallRow(uses[times.index(max(times))], len(uses), max(times), sum(times)))
    return sorted(rows, key=lambda row: -row.total)


def in_collectives(rank: SimulationResult) -> int:
    """Picoseconds that collectives of a rank's busiest core were under way or waited for others."""
    return max(
        sum(event.end - event.start for event in core.events if event.engine == "collective")
        for core in rank.cores
    )


def slowest_first(result: RanksResult) -> list[int]:
    """Ranks by time."""
    return sorted(range(len(result.ranks)), key=lambda rank: (-result.ranks[rank].time, rank))


def summary(result: RanksResult, place: str, arguments: Sequence[str], seed: int) -> dict[str, Any]:
    """The numbers, in picoseconds, bytes and bytes/s, with what they were computed from."""
    machine, first = result.machine, result.ranks[0]
    return {
        "kernel": place,
        "arguments": list(arguments),
        "machine": machine and asdict(machine),
        "chip": first.chip.name,
        "seed": seed,
        "time_ps": result.time,
        "slowest": result.slowest,
        "launch_ps": first.chip.kernel_launch_ps,
        "ranks": [
            {
                "time_ps": rank.time, "instructions": rank.instructions, "flops": rank.flops,
                "hbm_bytes": rank.hbm_bytes, "collective_ps": in_collectives(rank),
                "busy_ps": {name: rank.engine(name).busy for name in ENGINES},
                "peak_sbuf_bytes": rank.memory.peak_sbuf,
                "peak_psum_bytes": rank.memory.peak_psum,
            }
            for rank in result.ranks
        ],
        "collectives": [_plain(use) for use in result.collectives],
        "findings": findings(result),
        "assumed": list(first.chip.assumed(without=("program",))),
    }  # fmt: skip


def _plain(use: CollectiveUse) -> dict[str, Any]:
    bound = use.bound if math.isfinite(use.bound) else None
    return asdict(use) | {"bound": bound}


def findings(result: RanksResult) -> dict[str, str]:
    """Hazards by line, of all ranks together."""
    return {line: text for rank in result.ranks[::-1] for line, text in rank.findings.items()}


def show(result: RanksResult, place: str, trace: Path) -> None:
    """Tables on standard output."""
    console = Console(width=None if sys.stdout.isatty() else 120)
    machine, count = result.machine, len(result.ranks)
    where = f"{machine.nodes} x {machine.instance}" if machine else result.ranks[0].chip.name
    console.print(
        f"[bold]{place}[/] on {count} rank{'s' if count > 1 else ''} of {where} at "
        f"LNC={machine.lnc if machine else 1}: [bold]{format_time(result.time)}[/] modelled, "
        f"slowest rank {result.slowest}",
        highlight=False,
    )
    console.print(_ranks_table(result))
    if result.collectives:
        console.print(_collectives_table(result))
    for line, message in findings(result).items():
        console.print(f"[yellow]{line}: {message}[/]")
    console.print(f"trace: {trace}")


def _ranks_table(result: RanksResult) -> Table:
    shown = slowest_first(result)[:RANKS_SHOWN]
    table = Table("rank", box=None)
    for head in ("time", "in collectives", "busiest engine", "busy", "HBM traffic", "instructions"):
        table.add_column(head, justify="right")
    for number in shown:
        rank = result.ranks[number]
        busiest = max(ENGINES, key=lambda name: rank.engine(name).busy)
        table.add_row(
            str(number), format_time(rank.time), format_time(in_collectives(rank)), busiest,
            format_time(rank.engine(busiest).busy), format_bytes(rank.hbm_bytes),
            f"{rank.instructions:,}",
        )  # fmt: skip
    left = len(result.ranks) - len(shown)
    if left:
        table.add_row("...", f"{left} more")
    return table


def _collectives_table(result: RanksResult) -> Table:
    table = Table("collective", "line", "algorithm", box=None)
    for head in ("calls", "ranks", "size", "longest", "algbw", "busbw", "bound"):
        table.add_column(head, justify="right")
    table.add_column("limited by")
    rows = call_rows(result)
    for row in rows[:CALLS_SHOWN]:
        use = row.use
        table.add_row(
            use.name + (" SBUF" if use.on_chip else ""), Path(use.line).name, use.algorithm,
            f"{row.calls}", f"{use.groups} x {use.size}", format_bytes(use.nbytes),
            format_time(row.longest), _rate(use.algbw), _rate(use.busbw), _rate(use.bound),
            use.limited_by,
        )  # fmt: skip
    if len(rows) > CALLS_SHOWN:
        table.add_row(f"{len(rows) - CALLS_SHOWN} more")
    return table


def _rate(value: float) -> str:
    return format_rate(int(value)) if math.isfinite(value) and value >= 1 else "-"


def ranks_trace(result: RanksResult) -> list[dict[str, Any]]:
    """Trace entries: a process per rank and core, a track per engine and stream of collectives."""
    entries: list[dict[str, Any]] = []
    first = 0
    for number, rank in enumerate(result.ranks):
        entries += trace_entries(rank, first, f"rank {number} ")
        first += len(rank.cores)
    return entries
