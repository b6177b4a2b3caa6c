"""Tables of `trnsim plan`, and its results as plain data."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from trnsim.device.units import format_bytes, format_duration, format_time

from ..plans.goodput import Goodput
from ..plans.result import ExchangeTime, PlanResult

WORTH_NOTING = 10_000  # of a step: waits that are shorter than this part of it are left out
HEAD = ("instance", "nodes", "lnc", "mesh")
BATCH = ("global_batch", "microbatch", "seq", "dtype", "zero", "recompute", "schedule", "streams")


def document(result: PlanResult) -> dict[str, Any]:
    """The result as plain data: ps, bytes, and what follows from them."""
    return asdict(result) | {
        "seconds": result.seconds,
        "tokens_per_s": result.tokens_per_s,
        "mfu": result.mfu,
        "hfu": result.hfu,
        "bubble": result.bubble,
        "exposed": result.exposed,
        "fits": result.fits,
        "bound": result.bound,
    }


def plan_view(result: PlanResult) -> list[RenderableType]:
    """What `trnsim plan` prints, part by part."""
    views = [_head(result), _summary(result), _parts(result), _exchanges(result), _memory(result)]
    views += [_goodput(result.goodput)] if result.goodput else []
    return [view for view in (*views, _notes(result)) if view is not None]


def _table(*titles: str) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), collapse_padding=True, pad_edge=False)
    for index, title in enumerate(titles):
        words = index == 0 or title in ("algorithm", "limited by", "group", "operation")
        table.add_column(title, justify="left" if words else "right", no_wrap=True)
    return table


def _head(result: PlanResult) -> Text:
    plan = result.plan
    many = f"{plan['nodes']} x " if plan["nodes"] > 1 else ""
    batch = ", ".join(f"{name.replace('_', ' ')} {plan[name]}" for name in BATCH)
    return Text(
        f"{plan['model']} on {many}{plan['instance']} at LNC={plan['lnc']}, mesh {plan['mesh']}"
        f" ({result.ranks} ranks)\n{batch}"
    )


def _summary(result: PlanResult) -> Table:
    table = _table("one training step", "")
    peak = result.peak_flops / result.ranks / 1e12
    table.add_row("step time", format_time(result.step))
    table.add_row("tokens per second", f"{result.tokens_per_s:,.0f}")
    table.add_row("sequences per second", f"{result.plan['global_batch'] / result.seconds:,.2f}")
    table.add_row(f"MFU of the published {peak:.4g} TFLOP/s per rank", f"{result.mfu:.1%}")
    table.add_row("the same of what the ranks execute", f"{result.hfu:.1%}")
    if len(result.stages) > 1:
        table.add_row("pipeline bubble", f"{result.bubble:.1%}")
    fits = "fits" if result.fits else "does not fit"
    table.add_row(
        f"HBM per rank: {fits} {format_bytes(result.hbm)}", format_bytes(result.memory.total)
    )
    table.add_row("mostly", result.bound)
    return table


def _parts(result: PlanResult) -> Table:
    table = _table("where the step goes (average rank)", "time", "share")
    for name, ps in result.parts.items():
        table.add_row(name, format_time(ps), f"{ps / result.step:.1%}")
    return table


def _exchanges(result: PlanResult) -> Table | None:
    if not result.exchanges:
        return None
    table = _table(
        "exchanges", "operation", "group", "ranks", "groups", "size", "algorithm", "count", "total",
        "exposed", "limited by",
    )  # fmt: skip
    for item in result.exchanges:
        table.add_row(
            item.label, item.operation, item.group, str(item.ranks), str(item.groups),
            format_bytes(item.nbytes), item.algorithm, f"{item.count:g}",
            format_time(item.total), format_time(item.exposed), item.limited_by,
        )  # fmt: skip
    return table


def _memory(result: PlanResult) -> Table:
    where = f" of stage {result.memory.stage}" if len(result.stages) > 1 else ""
    table = _table(f"HBM of a rank{where}, in {result.memory.at}", "size", "share")
    for use, nbytes in result.memory.largest:
        if nbytes:
            table.add_row(use, format_bytes(nbytes), f"{nbytes / result.hbm:.1%}")
    total = result.memory.total
    table.add_row(
        f"peak, of {format_bytes(result.hbm)}", format_bytes(total), f"{total / result.hbm:.1%}"
    )
    return table


def _goodput(losses: Goodput) -> Table:
    table = _table("with failures", "")
    table.add_row("mean time between failures of the job", format_duration(losses.mtbf))
    table.add_row("work between checkpoints", format_duration(losses.interval))
    table.add_row("best, by Daly", format_duration(losses.best))
    table.add_row("best, by Young", format_duration(losses.young))
    table.add_row("goodput", f"{losses.fraction:.1%}")
    return table


def _notes(result: PlanResult) -> Text:
    lines = [f"symmetry: {result.symmetry}"]
    lines += [f"late: {text}" for text in _late(result)]
    lines += [f"note: {note}" for note in result.notes]
    lines += list(_leaned_on(result))
    took = ", ".join(f"{what} {s:.2f} s" for what, s in result.host_seconds.items())
    lines.append(f"of this machine: {took}")
    return Text("\n".join(lines))


def _late(result: PlanResult) -> Iterator[str]:
    """The latest arrivals that matter, one for each label."""
    worst: dict[str, ExchangeTime] = {}
    for item in result.exchanges:
        if item.late and item.late[1] * WORTH_NOTING > result.step:
            held = worst.get(item.label)
            if held is None or held.late is None or item.late[1] > held.late[1]:
                worst[item.label] = item
    for item in worst.values():
        rank, by = item.late or (0, 0)
        yield f"rank {rank} by up to {format_time(by)} at {item.label} over {item.group}"


def _leaned_on(result: PlanResult) -> Iterator[str]:
    if result.leaned_on:
        chip = result.plan["instance"].partition(".")[0].partition("-")[0].rstrip("nu")
        named = ", ".join(result.leaned_on)
        yield f"leans on assumed and calibrated numbers (`trnsim specs {chip}`): {named}"
