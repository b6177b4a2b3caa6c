"""`trnsim kernel FILE.py:NAME`: an NKI kernel on random or given inputs, and its modelled time."""

import ast
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from trnsim.device.errors import BadFile, BadInput, Unsupported
from trnsim.device.isa.base import ENGINES
from trnsim.device.nki.dtypes import DTYPES, as_dtype
from trnsim.device.nki.errors import failed
from trnsim.device.nki.kernel import as_chip, simulate
from trnsim.device.nki.lint import Finding, grouped, lint
from trnsim.device.nki.result import SimulationResult
from trnsim.device.overlay import apply_overlay
from trnsim.device.units import format_bytes, format_time

from .kernel_file import load_kernel

LINES_SHOWN = 10
ORDERS = ("greedy", "program")
SHORT = {
    "f32": "float32", "f16": "float16", "bf16": "bfloat16", "f8e4m3": "float8_e4m3",
    "f8e4m3fn": "float8_e4m3fn", "f8e5m2": "float8_e5m2", "i8": "int8", "i16": "int16",
    "i32": "int32", "u8": "uint8", "u16": "uint16", "u32": "uint32",
}  # fmt: skip
_SHAPED = re.compile(r"([a-z][a-z0-9_]*)\[([0-9, ]*)\]")


@click.command()
@click.argument("kernel", metavar="FILE.py:NAME")
@click.option(
    "--arg", "arguments", multiple=True, metavar="ARG",
    help="An argument, in order: f32[4096,1024] (random), FILE.npy, or a Python literal; "
    "NAME=ARG for a keyword.",
)  # fmt: skip
@click.option("--chip", help="trn1, inf2, trn2, trn3. Default: that of the instance, or trn2.")
@click.option("--lnc", type=int, default=1, show_default=True, help="Cores of kernel[n]: 1 or 2.")
@click.option("--seed", default=0, show_default=True, help="Of the random inputs.")
@click.option(
    "--hazards", type=click.Choice(["error", "report"]), default="error", show_default=True,
    help="What a read of memory that was never written, and a race, is.",
)  # fmt: skip
@click.option("--deadline", default=3600.0, show_default=True, help="Seconds of this machine.")
@click.option(
    "--trace", type=click.Path(path_type=Path), default=Path("kernel.json"), show_default=True,
    help="Trace for ui.perfetto.dev: a track per engine and DMA queue.",
)  # fmt: skip
@click.option(
    "--lint", "linted", type=click.Choice(["error", "warn", "off"]), default="warn",
    show_default=True, help="What Python is that the hardware's compiler refuses.",
)  # fmt: skip
@click.option(
    "--time-only", is_flag=True,
    help="Compute no values: the same times, sooner; registers must not depend on values.",
)  # fmt: skip
@click.option(
    "--overlay", "overlays", multiple=True, type=click.Path(path_type=Path),
    help="A file of numbers laid over the chip's; several are each timed from the one run.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the numbers as JSON.")
@click.option("--instance", help="Run on its ranks: random inputs of their own, nki.collectives.")
@click.option("--ranks", type=int, help="How many; default: all logical cores of the nodes.")
@click.option("--nodes", default=1, show_default=True, help="Instances, joined by EFA.")
@click.option(
    "--runtime", type=click.Choice(["local", "ray"]), default="local", show_default=True,
    help="In process, or a Ray actor for each rank.",
)  # fmt: skip
@click.option("--address", help="Of a running Ray instance.")
def kernel(
    kernel: str, arguments: Sequence[str], chip: str | None, lnc: int, seed: int, hazards: str,
    deadline: float, trace: Path, linted: str, time_only: bool, overlays: Sequence[Path],
    as_json: bool, instance: str | None, ranks: int | None, nodes: int, runtime: str,
    address: str | None,
) -> None:  # fmt: skip
    """Simulate the NKI kernel NAME of FILE.py and print its modelled time.

    \b
        trnsim kernel my_kernels.py:matmul --arg bf16[2048,2048] --arg bf16[2048,2048]

    `import nki` in FILE.py is the simulator. Times are modelled (virtual) time of the hardware,
    launch included, in program order of each engine; the bracket also has the time of a scheduler
    that issues whatever is ready. Busy times are sums over the cores.

    With --instance it runs on many ranks. An argument groups[N] is a ReplicaGroup of N ranks each:

    \b
        trnsim kernel my_kernels.py:reduce --arg f32[128,512] --arg groups[8] \\
            --instance trn2.48xlarge --ranks 64 --lnc 2
    """
    if instance is not None or ranks is not None or nodes != 1 or runtime != "local":
        from .cli_kernel_ranks import run_ranks

        run_ranks(
            kernel, arguments, chip=chip, lnc=lnc, seed=seed, hazards=hazards, deadline=deadline,
            trace=trace, as_json=as_json, instance=instance, ranks=ranks, nodes=nodes,
            runtime=runtime, address=address, linted=linted, data=not time_only,
            overlays=overlays,
        )  # fmt: skip
        return
    target = as_chip(chip)
    others = {path: apply_overlay(target, path) for path in overlays}
    wanted, random = load_kernel(kernel), np.random.default_rng(seed)
    positional, named = by_name(parse_argument(text, random) for text in arguments)
    if linted != "off":
        report_lint(lint(wanted, [*positional, *named.values()]), linted == "error")
    with Console(stderr=True).status("running the kernel"):
        try:
            result = simulate(
                wanted[lnc] if lnc != 1 else wanted, *positional, chip=target, seed=seed,
                hazards=hazards, deadline=deadline, data=not time_only, **named,
            )  # fmt: skip
        except Exception as error:
            raise failed(error) from error
        variants = {path: result.retimed(other) for path, other in others.items()}
        for one in (result, *variants.values()):
            if one.whole:
                _ = one.bracket  # kept by the result; takes a while for long kernels
    write_trace(trace, result)
    if as_json:
        numbers = summary(result, kernel, positional, named) | {"overlays": overlaid(variants)}
        click.echo(json.dumps(numbers, indent=2))
    else:
        show(result, kernel, trace)
        if variants:
            Console(width=None if sys.stdout.isatty() else 120).print(_variants(variants))


def by_name(arguments: Iterable[tuple[str, Any]]) -> tuple[list[Any], dict[str, Any]]:
    """Positional and keyword arguments, of (keyword or "", value)."""
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for name, value in arguments:
        if name:
            named[name] = value
        else:
            positional.append(value)
    return positional, named


def overlaid(variants: Mapping[Path, SimulationResult]) -> list[dict[str, Any]]:
    """The bracket of each overlay, in picoseconds."""
    return [
        {"overlay": str(path), "bracket_ps": dict(zip(ORDERS, result.bracket, strict=True))}
        for path, result in variants.items()
    ]


def _variants(variants: Mapping[Path, SimulationResult]) -> Table:
    table = Table("overlay", box=None)
    for head in ("program order", "greedy"):
        table.add_column(head, justify="right")
    for path, result in variants.items():
        greedy, program = result.bracket
        table.add_row(str(path), format_time(program), format_time(greedy))
    return table


# ---- what to run -----------------------------------------------------------------------------


def report_lint(findings: Sequence[Finding], refuse: bool) -> None:
    """Shows findings on standard error. Raises Unsupported with the first one to `refuse` them."""
    if findings and refuse:
        more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
        raise Unsupported(f"{findings[0]}{more}")
    for line in grouped(findings):
        click.secho(line, fg="yellow", err=True)


def parse_argument(text: str, random: np.random.Generator) -> tuple[str, Any]:
    """(keyword or "", value) of one --arg. Raises BadInput."""
    name, equals, rest = text.partition("=")
    if equals and name.isidentifier():
        return name, parse_argument(rest, random)[1]
    shaped = _SHAPED.fullmatch(text.strip())
    if shaped:
        return "", _random(shaped[1], shaped[2], random)
    if text.endswith(".npy"):
        return "", _loaded(Path(text))
    try:
        return "", ast.literal_eval(text)
    except (ValueError, SyntaxError):
        raise BadInput(
            "--arg", text, "DTYPE[SHAPE] such as f32[128,512], FILE.npy, or a Python literal"
        ) from None


def _random(dtype: str, shape: str, random: np.random.Generator) -> np.ndarray:
    if dtype not in SHORT and dtype not in DTYPES:
        raise BadInput("--arg", dtype, [*SHORT, *DTYPES])
    kind = as_dtype(SHORT.get(dtype, dtype)).dtype
    sizes = [int(size) for size in shape.split(",") if size.strip()]
    if np.issubdtype(kind, np.integer):
        return random.integers(0, 8, sizes).astype(kind)
    return random.standard_normal(sizes, np.float32).astype(kind)


def _loaded(path: Path) -> np.ndarray:
    try:
        return np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise BadFile(f"{path}: {error}") from None


# ---- what it gave ----------------------------------------------------------------------------


def summary(
    result: SimulationResult, place: str, positional: Sequence[Any], named: dict[str, Any]
) -> dict[str, Any]:
    """The numbers, in picoseconds and bytes, with what they were computed from."""
    memory, (overlapped, serial) = result.memory, result.bounds
    given = [*map(_described, positional), *(f"{k}={_described(v)}" for k, v in named.items())]
    return {
        "kernel": place,
        "arguments": given,
        "chip": result.chip.name,
        "cores": len(result.cores),
        "seed": result.seed,
        "time_ps": result.time,
        "launch_ps": result.chip.kernel_launch_ps,
        "bracket_ps": dict(zip(ORDERS, result.bracket, strict=True)) if result.whole else None,
        "bounds_ps": {"overlapped": overlapped, "serial": serial},
        "busy_ps": {name: result.engine(name).busy for name in ENGINES},
        "instructions": {name: result.engine(name).instructions for name in ENGINES},
        "flops": result.flops,
        "mfu": mfu(result),
        "hbm_bytes": result.hbm_bytes,
        "peak_sbuf_bytes": memory.peak_sbuf,
        "peak_psum_bytes": memory.peak_psum,
        "lines": [
            {"line": use.line, "busy_ps": use.busy, "instructions": use.instructions,
             "engines": list(use.engines)}
            for use in result.lines()[:LINES_SHOWN]
        ],
        "findings": dict(result.findings),
        "hooks": list(result.hooks),
        "folded_memsets": result.folded,
        "assumed": list(result.chip.assumed(without=("program",))),
    }  # fmt: skip


def mfu(result: SimulationResult) -> float:
    """Model FLOP utilisation against the peak in bf16."""
    return result.mfu("bf16")


def _described(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)}"
    return repr(value)


def show(result: SimulationResult, place: str, trace: Path) -> None:
    """Tables on standard output."""
    console = Console(width=None if sys.stdout.isatty() else 120)
    memory, (overlapped, serial) = result.memory, result.bounds
    cores = len(result.cores)
    console.print(
        f"[bold]{place}[/] on {result.chip.name}, {cores} core{'s' if cores > 1 else ''}: "
        f"[bold]{format_time(result.time)}[/] modelled "
        f"(launch {format_time(result.chip.kernel_launch_ps)})"
    )
    facts = Table(box=None, show_header=False)
    if result.whole:
        ends = [f"{format_time(t)} {o}" for t, o in zip(result.bracket, ORDERS, strict=True)]
        facts.add_row("bracket", f"{ends[0]}, {ends[1]} order")
    facts.add_row("bounds", f"{format_time(overlapped)} overlapped, {format_time(serial)} serial")
    if result.flops:
        facts.add_row("MFU", f"{mfu(result):.2%} of bf16 peak, {result.flops / 1e9:.4g} GFLOP")
    facts.add_row("HBM traffic", format_bytes(result.hbm_bytes))
    facts.add_row(
        "peak per partition",
        f"SBUF {memory.peak_sbuf:,} of {memory.sbuf:,} B, "
        f"PSUM {memory.peak_psum:,} of {memory.psum:,} B",
    )
    if result.hooks:
        facts.add_row("hooks honoured", ", ".join(result.hooks))
    if result.folded:
        facts.add_row("folded", f"{result.folded} zeros of PSUM that a matmul overwrites")
    console.print(facts)
    console.print(_engines(result), _lines(result))
    for line, message in result.findings.items():
        console.print(f"[yellow]{line}: {message}[/]")
    console.print(f"trace: {trace}")


def _engines(result: SimulationResult) -> Table:
    table = Table("engine", box=None)
    for head in ("busy", "share", "instructions"):
        table.add_column(head, justify="right")
    whole = result.time * len(result.cores)
    for name in ENGINES:
        use = result.engine(name)
        if use.instructions:
            share = f"{use.busy / whole:.1%}"
            table.add_row(name, format_time(use.busy), share, f"{use.instructions:,}")
    return table


def _lines(result: SimulationResult) -> Table:
    table = Table("slowest lines", "engines", box=None)
    for head in ("busy", "instructions"):
        table.add_column(head, justify="right")
    for use in result.lines()[:LINES_SHOWN]:
        place = Path(use.line).name
        table.add_row(place, " ".join(use.engines), format_time(use.busy), f"{use.instructions:,}")
    return table


def write_trace(path: Path, result: SimulationResult) -> None:
    """A trace for ui.perfetto.dev: a process per core, a track per engine and DMA queue."""
    write_entries(path, trace_entries(result))


def trace_entries(
    result: SimulationResult, first: int = 0, prefix: str = ""
) -> list[dict[str, Any]]:
    """The entries of a result's cores as processes from number `first` on, named `prefix` core."""
    entries: list[dict[str, Any]] = []
    launch = result.chip.kernel_launch_ps
    for number, core in enumerate(result.cores, start=first):
        tracks: dict[str, int] = {}
        entries.append(_name(number, 0, "process_name", f"{prefix}core {number - first}"))
        for event in core.events:
            track = f"{event.engine} {event.queue}" if event.queue else event.engine
            if track not in tracks:
                tracks[track] = len(tracks) + 1
                entries.append(_name(number, tracks[track], "thread_name", track))
            entries.append({
                "ph": "X", "pid": number + 1, "tid": tracks[track],
                "name": event.name or event.opcode, "cat": event.engine,
                "ts": (launch + event.start) / 1e6, "dur": (event.end - event.start) / 1e6,
                "args": {"line": event.line, "opcode": event.opcode, "hbm_bytes": event.nbytes},
            })  # fmt: skip
    return entries


def write_entries(path: Path, entries: list[dict[str, Any]]) -> None:
    """Writes a trace in one step. Raises BadInput if the file cannot be written."""
    partial = path.with_suffix(path.suffix + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps({"displayTimeUnit": "ns", "traceEvents": entries}))
        partial.replace(path)
    except OSError as error:
        raise BadInput("--trace", path, f"a file that can be written ({error.strerror})") from None


def _name(core: int, track: int, kind: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": core + 1, "tid": track, "name": kind, "args": {"name": name}}
