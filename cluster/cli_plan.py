"""`trnsim plan`: what a training step takes, where it goes, and whether it fits."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console

from trnsim.device.errors import BadFile, BadInput, OutOfMemory
from trnsim.device.units import format_bytes, parse_bytes, parse_duration

from .cli_collective import _console, _show

SEARCHED = (
    "instance", "nodes", "lnc", "global_batch", "microbatch", "seq", "dtype", "zero", "schedule",
    "order", "streams", "early_all_gather", "late_reduce_scatter", "dropout", "capacity",
    "algorithm", "overlay", "seed",
)  # fmt: skip
"""Options that every candidate of a search has."""


@click.command()
@click.argument("model")
@click.option("--instance", default="trn2.48xlarge", show_default=True, help="Kind of instance.")
@click.option("--nodes", default=1, show_default=True, help="How many of them, over EFA.")
@click.option(
    "--lnc", type=int, default=None, envvar="NEURON_LOGICAL_NC_CONFIG", show_envvar=True,
    help="Physical cores per logical core (1 or 2).",
)  # fmt: skip
@click.option(
    "--mesh", default="tp=1", show_default=True,
    help="pp, dp, ep, cp, tp with degrees, the last one fastest; dp may be left out.",
)  # fmt: skip
@click.option("--global-batch", type=int, required=True, help="Sequences of a step, whole job.")
@click.option("--microbatch", type=int, default=1, show_default=True, help="Sequences at once.")
@click.option("--seq", type=int, required=True, help="Tokens of a sequence.")
@click.option("--dtype", default="bf16", show_default=True, help="bf16 (fp32 master) or f32.")
@click.option("--zero", default="none", show_default=True, help="none, 1 or fsdp.")
@click.option("--recompute", default="none", show_default=True, help="none, selective or full.")
@click.option(
    "--schedule", default="1f1b", show_default=True, help="1f1b, interleaved:V or zero-bubble."
)
@click.option(
    "--order", default=None, metavar="AXES",
    help="Numbering of ranks, slowest axis first.  [default: pp,dp,ep,cp,tp]",
)  # fmt: skip
@click.option(
    "--rank-file", type=click.Path(), default=None, metavar="FILE",
    help="The core of each rank, as `trnsim place --out` writes.  [default: rank r on core r]",
)  # fmt: skip
@click.option("--streams", default=2, show_default=True, help="Collective streams per rank.")
@click.option("--bucket", default=None, metavar="SIZE", help="Of gradients.  [default: 512MiB]")
@click.option("--early-all-gather", default=1, show_default=True, help="FSDP: layers ahead.")
@click.option("--late-reduce-scatter", default=1, show_default=True, help="FSDP: layers behind.")
@click.option("--dropout", default=0.0, show_default=True, help="Probability.")
@click.option("--capacity", default=2.0, show_default=True, help="Of an expert, times even share.")
@click.option("--algorithm", default="policy", show_default=True, help="Of collectives.")
@click.option(
    "--overlay", type=click.Path(path_type=Path), default=None,
    help="Calibrated numbers of `trnsim calibrate` in place of the shipped ones.",
)  # fmt: skip
@click.option(
    "--jitter", default=0.0, show_default=True, metavar="FRACTION",
    help="Compute of every rank and task is longer by up to this.",
)  # fmt: skip
@click.option(
    "--imbalance", default=None, type=float, metavar="VARIATION",
    help="Uneven load of experts, as a coefficient of variation, on kernels that skip empty slots.",
)  # fmt: skip
@click.option("--seed", default=0, show_default=True, help="Of jitter, dropout and routing.")
@click.option(
    "--slow-chip", "slow", multiple=True, metavar="CHIP=FACTOR",
    help="Chip 12 (counted over all nodes) computes 1.5 times as long: 12=1.5; repeatable.",
)  # fmt: skip
@click.option(
    "--slow-link", "degraded", multiple=True, metavar="LINK=RATE",
    help="node0/chip0->node0/chip1=10GB/s (chip0->chip1 on one node); repeatable.",
)  # fmt: skip
@click.option("--fail", "failed", multiple=True, metavar="LINK", help="A failed link.")
@click.option("--mtbf", default=None, metavar="TIME", help="Between failures of a node: 5000h.")
@click.option("--checkpoint", default="60s", show_default=True, help="Time to write a checkpoint.")
@click.option("--checkpoint-every", default=None, metavar="TIME", help="Of work.  [default: best]")
@click.option("--restart", default="300s", show_default=True, help="Time to start again.")
@click.option(
    "--search", "searching", is_flag=True,
    help="Find the degrees that are not given in --mesh, and the recomputation if it is not given.",
)  # fmt: skip
@click.option(
    "--top",
    type=click.IntRange(1),
    default=8,
    show_default=True,
    help="Candidates of --search that are shown.",
)
@click.option(
    "--trace", type=click.Path(path_type=Path), default=None,
    help="Write a trace for ui.perfetto.dev: a track per stage and stream.",
)  # fmt: skip
@click.option("--strict", is_flag=True, help="Refuse a plan that does not fit into HBM.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def plan(
    model: str, trace: Path | None, strict: bool, as_json: bool, searching: bool, top: int,
    **asked: Any,
) -> None:  # fmt: skip
    """Price a training step of MODEL: a config.json of Hugging Face, or a shipped model's name.

    Times are modelled (virtual) time of the hardware, not of this machine. A rank is a logical
    core. MFU counts the model's FLOPs (forward and backward, no recomputation) against the peak
    that is published for the chip. exposed is the time that compute waits for an exchange.
    """
    if trace is not None and not trace.absolute().parent.is_dir():
        raise BadFile(f"{trace}: its folder does not exist")
    if trace is not None and trace.is_dir():
        raise BadFile(f"{trace}: is a folder")
    searched: dict[str, Any] = {}
    if searching and asked.get("rank_file") is not None:
        raise BadInput("--rank-file", asked["rank_file"], "only without --search")
    if searching:
        asked["mesh"], asked["recompute"], searched = _found(model, dict(asked), top, as_json)
    with Console(stderr=True).status("building and pricing"):
        from .plans.result import simulate
        from .report.plan_tables import document, plan_view

        wanted, how = _wanted(model, asked)
        result, timeline = simulate(wanted, **how, traced=trace is not None)
        if not result.fits:
            result = replace(result, notes=(*result.notes, _remedy(wanted)))
    if strict and not result.fits:
        held = ", ".join(f"{use} {format_bytes(n)}" for use, n in result.memory.largest)
        raise OutOfMemory(
            f"HBM of a rank: {format_bytes(result.memory.total)} needed,"
            f" {format_bytes(result.hbm)} available; held by {held}. {result.notes[-1]}"
        )
    if trace is not None:
        _write_trace(trace, timeline.events)
    if as_json:
        click.echo(json.dumps(document(result) | searched, indent=2))
    else:
        _show(_console(), plan_view(result))


def _wanted(model: str, asked: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The plan, and how `simulate` is to run it."""
    from .conditions import parse_degraded
    from .plans.clocks import Conditions
    from .plans.plan import Plan

    slow, jitter, imbalance = (asked.pop(name) for name in ("slow", "jitter", "imbalance"))
    how = {
        "failed": asked.pop("failed"),
        "degraded": [parse_degraded(text) for text in asked.pop("degraded")],
        "failures": _failures(asked),
    }
    bucket = asked.pop("bucket")
    if bucket is not None:
        asked["bucket_bytes"] = parse_bytes(bucket, "--bucket")
    wanted = Plan.of(model, **asked)
    how["conditions"] = Conditions(
        slow=tuple(_slow_ranks(slow, wanted.machine)),
        jitter=jitter,
        imbalance=imbalance,
        seed=asked["seed"],
    )
    return wanted, how


def _found(
    model: str, asked: dict[str, Any], top: int, as_json: bool
) -> tuple[str, str, dict[str, Any]]:
    """Mesh and recomputation of the best plan, and what it was compared with, for JSON; shows that
    otherwise."""
    from rich.progress import Progress

    from .plans.search import fixed_degrees, search
    from .report.search_tables import search_document, search_view

    given = click.get_current_context().get_parameter_source
    mesh, recompute = asked.pop("mesh"), asked.pop("recompute")
    chosen = {name: asked[name] for name in SEARCHED}
    if given("recompute") is not ParameterSource.DEFAULT:
        chosen["recompute"] = recompute
    if asked["bucket"] is not None:
        chosen["bucket_bytes"] = parse_bytes(asked["bucket"], "--bucket")
    kept = fixed_degrees(mesh if given("mesh") is not ParameterSource.DEFAULT else None)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("meshes", total=None)
        candidates = search(
            model, fixed=kept, **chosen,
            progress=lambda done, of: bar.update(task, completed=done, total=of),
        )  # fmt: skip
    best = candidates[0]
    if best.result is None:
        raise OutOfMemory(f"no degrees fit; the least needs {best.why.partition(': ')[2]}")
    if not as_json:
        _show(_console(), search_view(candidates, top))
    return str(best.plan.mesh), best.plan.recompute, {"search": search_document(candidates)}


def _remedy(wanted: Any) -> str:
    from .plans.fitting import remedies

    found = remedies(wanted)
    if not found:
        return "Does not fit with any recomputation, sharding or half the microbatch either."
    return "Would fit with " + " or ".join(f"{how} ({format_bytes(n)})" for how, n in found) + "."


def _failures(asked: dict[str, Any]) -> Any:
    from .plans.goodput import Failures

    mtbf, every = asked.pop("mtbf"), asked.pop("checkpoint_every")
    write, restart = asked.pop("checkpoint"), asked.pop("restart")
    if mtbf is None:
        return None
    return Failures(
        mtbf=parse_duration(mtbf, "--mtbf"),
        checkpoint=parse_duration(write, "--checkpoint"),
        restart=parse_duration(restart, "--restart"),
        interval=None if every is None else parse_duration(every, "--checkpoint-every"),
    )


def _slow_ranks(slow: Sequence[str], machine: Any) -> list[tuple[int, float]]:
    """(rank, factor) of all ranks on slow chips."""
    from .plans.clocks import MOST_SLOWER

    where, found = machine.placement, []
    for text in slow:
        chip, _, factor = text.partition("=")
        chips = where.nodes * where.instance.chips
        if not chip.isdecimal() or int(chip) >= chips:
            raise BadInput("--slow-chip", text, f"CHIP=FACTOR with a chip of 0 to {chips - 1}")
        try:
            times = float(factor)
        except ValueError:
            times = 0.0
        if not 1 <= times <= MOST_SLOWER:
            raise BadInput("--slow-chip", text, f"CHIP=FACTOR with a factor of 1 to {MOST_SLOWER}")
        per_chip = where.instance.chip.cores // where.lnc
        cores = range(int(chip) * per_chip, (int(chip) + 1) * per_chip)
        found += [(rank, times) for rank, slot in enumerate(where.slots) if slot in cores]
    return found


def _write_trace(path: Path, events: Sequence[Any]) -> None:
    from .report.trace import write_trace

    ranks = list(dict.fromkeys(event.rank for event in events))
    names = {rank: f"stage {stage} (rank {rank})" for stage, rank in enumerate(ranks)}
    write_trace(path, events, names)
