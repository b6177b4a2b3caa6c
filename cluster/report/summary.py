"""The summary of a run for the terminal, from its record alone."""

from collections.abc import Iterable, Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from trnsim.device.units import format_bytes, format_time

from .record import CallRecord, KernelRecord, RunRecord

SHOWN = 8  # lines of the tables of collectives and kernels


def print_summary(record: RunRecord, console: Console) -> None:
    """Prints losses, step time, engines, bounds, collectives, memory and assumptions."""
    console.print(Group(*(part for part in _parts(record) if part is not None)))


def _parts(record: RunRecord) -> Iterable[RenderableType | None]:
    yield _heading(record)
    yield _losses(record)
    yield _times(record)
    yield _engines(record)
    yield _calls(record.calls)
    yield _kernels(record.kernels)
    yield _memory(record)
    yield _notes(record)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", overflow="fold")
    return table


def _heading(record: RunRecord) -> Text:
    mesh = " x ".join(f"{axis}={size}" for axis, size in record.mesh.items())
    cores = record.ranks * record.lnc
    nodes = "" if record.nodes == 1 else f"{record.nodes} x "
    return Text(
        f"trnsim {record.version}: {record.command}\n"
        f"{nodes}{record.instance} ({record.chip}), LNC={record.lnc}, mesh {mesh}:"
        f" {record.ranks} logical cores = {cores} physical NeuronCores\n"
        f"runtime {record.runtime}, fidelity {record.fidelity},"
        f" {record.operators} operators in {sum(k.count for k in record.kernels)} kernels and"
        f" {sum(c.executions for c in record.calls)} collectives per rank and step\n"
    )


def _losses(record: RunRecord) -> Table | None:
    if all(step.loss is None for step in record.steps):
        return None
    table = _table("Loss", "step", "simulated", "JAX, one CPU device", "relative difference")
    for step in record.steps:
        if step.loss is None:
            continue
        reference, difference = "-", "-"
        if step.reference is not None:
            reference = f"{step.reference:.7f}"
            difference = f"{abs(step.loss - step.reference) / abs(step.reference or 1):.1e}"
        table.add_row(str(step.index), f"{step.loss:.7f}", reference, difference)
    return table


def _times(record: RunRecord) -> Table:
    last = record.steps[-1].duration
    table = _table("\nModelled time of a step", "", "time", "of the step")

    def row(label: str, time: int) -> None:
        table.add_row(label, format_time(time), f"{time / last:.1%}")

    row("step", last)
    row("overlapped bound (busiest engine or collectives)", record.overlapped_bound)
    row("serial bound (all of that one after another, without latencies)", record.serial_bound)
    row("collectives, total", record.collective)
    row("collectives, exposed", record.exposed)
    if record.flops:
        share = record.flops / record.lnc / (record.peak_flops * last / 1e12)
        table.add_row("matmul FLOP utilisation of the cores", f"{share:.2%}", "")
    return table


def _engines(record: RunRecord) -> Table:
    engines = sorted({key.rsplit(" ", 1)[1] for key in record.busy})
    cores = sorted({key.rsplit(" ", 1)[0] for key in record.busy})
    table = _table("\nBusy time of the engines of a logical core", "engine", *cores)
    for engine in engines:
        times = [record.busy.get(f"{core} {engine}", 0) for core in cores]
        table.add_row(engine, *(format_time(t) for t in times))
    return table


def _calls(calls: Sequence[CallRecord]) -> Table | None:
    """Calls that do the same are one line."""
    if not calls:
        return None
    table = _table(
        "\nCollectives", "operation", "groups", "ranks", "bytes", "algorithm", "calls", "time",
        "exposed",
    )  # fmt: skip
    same: dict[tuple[str, str, int, int, str], list[CallRecord]] = {}
    for call in calls:
        kind = (call.operation, call.groups, call.ranks, call.bytes, call.algorithm)
        same.setdefault(kind, []).append(call)
    ordered = sorted(same.items(), key=lambda item: -sum(c.total for c in item[1]))
    for (operation, groups, ranks, nbytes, algorithm), members in ordered[:SHOWN]:
        table.add_row(
            operation, groups, str(ranks), format_bytes(nbytes), algorithm,
            str(sum(c.executions for c in members)),
            format_time(sum(c.total for c in members)),
            format_time(sum(c.exposed for c in members)),
        )  # fmt: skip
    if len(ordered) > SHOWN:
        rest = [call for _, members in ordered[SHOWN:] for call in members]
        table.add_row(
            f"{len(ordered) - SHOWN} more kinds", "", "", "", "",
            str(sum(c.executions for c in rest)), format_time(sum(c.total for c in rest)),
            format_time(sum(c.exposed for c in rest)),
        )  # fmt: skip
    return table


def _kernels(kernels: Sequence[KernelRecord]) -> Table:
    table = _table("\nSlowest kernels (core 0)", "kernel", "source", "count", "time")
    for kernel in sorted(kernels, key=lambda k: -k.total)[:SHOWN]:
        table.add_row(kernel.name, kernel.source, str(kernel.count), format_time(kernel.total))
    return table


def _memory(record: RunRecord) -> Table:
    table = _table("\nMemory", "", "used", "of")
    for use, nbytes in record.memory.items():
        table.add_row(f"HBM per logical core: {use}", format_bytes(nbytes), "")
    total = format_bytes(sum(record.memory.values()))
    table.add_row("HBM per logical core: peak", total, format_bytes(record.capacity))
    sbuf = format_bytes(record.sbuf_peak)
    table.add_row("SBUF per partition: peak", sbuf, format_bytes(record.sbuf_capacity))
    return table


def _notes(record: RunRecord) -> Text:
    lines = [""]
    fallbacks = [kernel for kernel in record.kernels if kernel.fallback]
    for kernel in fallbacks:
        lines.append(
            f"host fallback: {kernel.name} at {kernel.source or 'unknown line'},"
            f" {kernel.count} times, {format_time(kernel.total)} per step"
        )
    lines.append(f"compilations: {record.compilations} (a new shape would cost another)")
    if record.leaned_on:
        lines.append("leans on assumed and calibrated numbers: " + ", ".join(record.leaned_on))
        lines.append(f"  (`trnsim specs {record.chip}` prints each with its source and status)")
    spent = ", ".join(f"{what} {seconds:.1f} s" for what, seconds in record.host_seconds.items())
    lines.append(f"this machine spent: {spent}")
    lines += [f"{what}: {path}" for what, path in record.files.items()]
    return Text("\n".join(lines))
