"""What a study can run: commands of trnsim, with their own options, defaults and checks.

A point's options become a command line, which the command reads as it always does, so that a point
means what the same options mean in a terminal. Degrees may be given one by one (tp, pp, dp, ep,
cp); they make up the mesh.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import click

from trnsim.device.errors import BadInput, TrnsimError

from .definition import Study

AXES = ("pp", "dp", "ep", "cp", "tp")
HOPS = "_hops"  # ends the columns of `place` that an axis has


@dataclass(frozen=True)
class Runner:
    """A command as something to run: `measure` gives a point's columns from its parameters.

    apart: options on which the time to prepare a point does not depend: points that agree in all
    others are run by few actors and share what was prepared. columns: those that `measure` can
    give, beside one of hops per axis.
    """

    command: Callable[[], click.Command]
    measure: Callable[[Mapping[str, Any]], dict[str, Any]]
    columns: tuple[str, ...]
    apart: frozenset[str] = frozenset()

    def check_option(self, name: str) -> None:
        """Raises BadInput for an option that the command does not have."""
        known = _parameters(self.command())
        if name not in known and name not in AXES:
            raise BadInput("option", name, sorted(known))

    def parameters(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The command's parameters. Raises BadInput for an unknown option or a bad value."""
        command = self.command()
        words = list(_words(command, _with_mesh(options)))
        try:
            return command.make_context("study", words).params
        except click.ClickException as error:
            raise BadInput("options", " ".join(words), error.format_message()) from None

    def run(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The columns of a point. Raises TrnsimError for one that cannot be."""
        return {key: _plain(value) for key, value in self.measure(self.parameters(options)).items()}

    def shape(self, options: Mapping[str, Any]) -> str:
        """What points that share what is prepared have in common."""
        return repr(sorted((k, v) for k, v in options.items() if k not in self.apart))


def _with_mesh(options: Mapping[str, Any]) -> dict[str, Any]:
    """Degrees that are given one by one as a mesh, outer to inner."""
    degrees = {axis: options[axis] for axis in AXES if axis in options}
    rest = {key: value for key, value in options.items() if key not in degrees}
    if not degrees:
        return rest
    if "mesh" in rest:
        raise BadInput("mesh", rest["mesh"], f"not beside {', '.join(degrees)}")
    return rest | {"mesh": ",".join(f"{axis}={degree}" for axis, degree in degrees.items())}


def _words(command: click.Command, options: Mapping[str, Any]):
    """The command line of options; arguments by their names."""
    known, later = _parameters(command), []
    for key, value in options.items():
        if key not in known:
            raise BadInput("option", key, sorted(known))
        parameter = known[key]
        values = value if isinstance(value, list) else [value]
        if isinstance(parameter, click.Argument):
            later += map(str, values)
        elif getattr(parameter, "is_flag", False):
            yield from [parameter.opts[0]] if value else []
        else:
            for each in values:
                yield from (parameter.opts[0], str(each))
    yield from later


def _parameters(command: click.Command) -> dict[str, click.Parameter]:
    """By their names, and by those of their long options, which come first."""
    known = {(p.name or "").replace("-", "_"): p for p in command.params}
    return known | {
        option.lstrip("-").replace("-", "_"): p
        for p in command.params
        for option in p.opts
        if option.startswith("--")
    }


def _plain(value: Any) -> Any:
    """Numbers of numpy as Python's; infinities and NaN as nothing."""
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


# --- commands ---


def _collective_command() -> click.Command:
    from ..cli_collective import collective

    return collective


def _collective(asked: Mapping[str, Any]) -> dict[str, Any]:
    """One size of one stream: the first one, if there is no last."""
    from ..collective_command import CollectiveRun

    options = dict(asked) | {"maxbytes": asked["maxbytes"] or asked["minbytes"]}
    run = CollectiveRun.of(options.pop("operation"), **options)
    if run.count != 1 or len(run.streams) != 1:
        raise BadInput("sizes of a point", run.count, "one size of one stream")
    run.measure()
    row = run.rows[0][0]
    return {
        "ranks": len(run.job),
        "group_size": run.streams[0].n,
        "time_us": row.time_ps / 1e6,
        "algbw_gbps": row.algbw / 1e9,
        "busbw_gbps": row.busbw / 1e9,
        "bound_gbps": row.bound / 1e9,
        "limited_by": row.limited_by,
        "chosen": row.algorithm,
    }


def _place_command() -> click.Command:
    from ..cli_place import place

    return place


def _place(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The best placement and the default."""
    from ..placing.command import PlaceRun
    from ..placing.plan_file import with_plan

    found = PlaceRun.of(**with_plan(asked)).run()
    return {
        "best_us": found.best.score.total / 1e6,
        "default_us": found.default.score.total / 1e6,
        "default_over_best": found.gain + 1,
        "best": found.best.candidate.name,
        **{f"{axis}{HOPS}": hops.mean for axis, hops in found.best.hops.items()},
    }


def _plan_command() -> click.Command:
    from ..cli_plan import plan

    return plan


_OF_THE_COMMAND = ("trace", "strict", "as_json", "searching", "top")
"""Options of `trnsim plan` that say what to show, not what to price."""


def _plan(asked: Mapping[str, Any]) -> dict[str, Any]:
    """A training step. `exposed_communication` and `bubble` are shares of the step."""
    from ..cli_plan import _wanted
    from ..plans.result import price_plan

    if asked["searching"]:
        raise BadInput("search", True, "nothing: a point of a study has its degrees")
    options = {key: asked[key] for key in asked if key not in _OF_THE_COMMAND}
    plan, how = _wanted(options.pop("model"), options)
    result = price_plan(plan, **how)
    where = plan.machine.placement
    chips = where.nodes * where.instance.chips
    columns = {
        "mesh": str(plan.mesh),
        "chips": chips,
        "step_s": result.seconds,
        "tokens_per_s": result.tokens_per_s,
        "tokens_per_s_per_chip": result.tokens_per_s / chips,
        "mfu": result.mfu,
        "bubble": result.bubble,
        "exposed_communication": result.exposed / result.step,
        "memory_gib": result.memory.total / 2**30,
        "fits": result.fits,
        "bound": result.bound,
    }
    if result.goodput is not None:
        columns["goodput"] = result.goodput.fraction
        columns["good_tokens_per_s"] = result.tokens_per_s * result.goodput.fraction
    return columns


_SHARED_BY_PLANS = frozenset(
    "nodes pp dp ep global_batch zero schedule streams bucket early_all_gather late_reduce_scatter"
    " algorithm jitter seed slow_chip slow_link fail mtbf checkpoint checkpoint_every restart"
    " placement mesh recompute".split()
)
"""Options on which compiled segments do not depend (all but sizes of buckets)."""

RUNNERS: dict[str, Runner] = {
    "plan": Runner(
        _plan_command,
        _plan,
        (
            "mesh",
            "chips",
            "step_s",
            "tokens_per_s",
            "tokens_per_s_per_chip",
            "mfu",
            "bubble",
            "exposed_communication",
            "memory_gib",
            "fits",
            "bound",
            "goodput",
            "good_tokens_per_s",
        ),  # fmt: skip
        _SHARED_BY_PLANS,
    ),
    "collective": Runner(
        _collective_command,
        _collective,
        (
            "ranks",
            "group_size",
            "time_us",
            "algbw_gbps",
            "busbw_gbps",
            "bound_gbps",
            "limited_by",
            "chosen",
        ),  # fmt: skip
        frozenset({"minbytes", "datatype", "algorithm", "operation"}),
    ),
    "place": Runner(
        _place_command,
        _place,
        ("best_us", "default_us", "default_over_best", "best"),
        frozenset({"seed", "search_steps", "traffic"}),
    ),
}


def runner(kind: str) -> Runner:
    """The runner of a kind. Raises BadInput with the nearest name."""
    if kind not in RUNNERS:
        raise BadInput("run", kind, tuple(RUNNERS))
    return RUNNERS[kind]


def check(study: Study) -> None:
    """Raises BadInput for options that the command does not have, and for columns of the front and
    the figures that no point can have: before any point runs."""
    kind = runner(study.run)
    for name in (*study.fixed, *study.varying):
        kind.check_option(name)
    columns = (*study.varying, *kind.columns)
    asked = [("[pareto]", n, columns) for n in (study.pareto.names if study.pareto else ())]
    for plot in study.plots:
        known = (*columns, *study.fixed)
        asked += [(f"column of plot {plot.kind}", name, known) for name in plot.names]
    for field, name, known in asked:
        if name not in known and not name.endswith(HOPS):
            raise BadInput(field, name, known)


def outcome(kind: str, options: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """(columns, reason of a refusal or nothing) of a point."""
    try:
        return runner(kind).run(options), ""
    except TrnsimError as error:
        return {}, " ".join(str(error).split())
