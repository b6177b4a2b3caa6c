"""`trnsim place`: which core each rank of a job should run on."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from trnsim.device.errors import BadInput

from .cli_collective import _console, _show, check_fabric_alone, progress

if TYPE_CHECKING:
    from .placing.study import PlacementStudy


@click.command()
@click.option("--instance", default="trn2.48xlarge", show_default=True, help="Kind of instance.")
@click.option("--nodes", default=1, show_default=True, help="How many of them, over EFA.")
@click.option("--lnc", type=int, default=None, help="Physical cores per logical core (1 or 2).")
@click.option(
    "--fabric", "fabric_file", type=click.Path(path_type=Path), default=None, metavar="FILE",
    help="A fabric of your own, instead of --instance.",
)  # fmt: skip
@click.option("--mesh", default=None, help="Axes, the last one fastest, as dp=2,tp=32.")
@click.option(
    "--plan", "plan_file", type=click.Path(path_type=Path), default=None, metavar="FILE",
    help="What `trnsim plan --json` wrote: its machine, mesh and traffic, instead of giving them.",
)  # fmt: skip
@click.option(
    "--traffic", "demands", multiple=True, metavar="AXES=OP:SIZE[:TIMES]",
    help="What a step moves: tp=all_reduce:64MiB:160, dp+ep=allr:1GiB; repeatable.",
)  # fmt: skip
@click.option("--dtype", default="bf16", show_default=True, help="Of the traffic.")
@click.option("--algorithm", default="policy", show_default=True, help="Of collectives.")
@click.option(
    "--rank-file", "files", multiple=True, type=click.Path(path_type=Path), metavar="FILE",
    help="A placement of your own to compare; repeatable.",
)  # fmt: skip
@click.option("--candidates", default=200, show_default=True, help="Regular placements to price.")
@click.option(
    "--search-steps", default=200, show_default=True, help="Of the local search; 0: none."
)
@click.option("--seed", default=0, show_default=True, help="Of the local search.")
@click.option(
    "--degrade", "degraded", multiple=True, metavar="LINK=RATE",
    help="chip0->chip1=10GB/s, or rank 3=50GB/s for its DMA; repeatable.",
)  # fmt: skip
@click.option(
    "--fail", "failed", multiple=True, metavar="LINK|NODE",
    help="chip0<->chip1 (both ways), chip0->chip1 or chip5 has failed; repeatable.",
)  # fmt: skip
@click.option(
    "--out", type=click.Path(path_type=Path), default=None, metavar="FILE",
    help="Write the best placement as a rank file.",
)  # fmt: skip
@click.option(
    "--heat-map", type=click.Path(path_type=Path), default=None, metavar="FILE",
    help="Write link load of the default and the best as .svg or .png.",
)  # fmt: skip
@click.option(
    "--top",
    type=click.IntRange(1),
    default=8,
    show_default=True,
    help="Placements that the table shows.",
)
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def place(out: Path | None, heat_map: Path | None, top: int, as_json: bool, **asked: Any) -> None:
    """Find on which core each rank of a mesh should run.

    Prices what a step moves over each axis of the mesh on many placements: the default (rank r on
    logical core r), the vendor's published layouts, axis orders, strides, sub-blocks of the torus,
    rank files, and a local search from the best. Ranks them and says why the best is best.

    \b
    hops   links between neighbours of an axis (mean / most)
    time   modelled time of all collectives of a step, one after another
    """
    from .placing.command import PlaceRun, check_folder
    from .placing.plan_file import with_plan
    from .placing.rank_file import rank_file
    from .plotting import check_figure
    from .report.nccom_json import write_text
    from .report.place_tables import document, place_view

    _alone(asked)
    check_fabric_alone(asked["fabric_file"], asked["instance"])
    asked = with_plan(asked)
    if heat_map is not None:
        check_figure(heat_map)
    check_folder(out)
    run = PlaceRun.of(**asked)
    with progress(run.most + run.steps, "placements", quiet=as_json) as advance:
        found = run.run(advance)
    if out is not None:
        write_text(out, rank_file(found.best.candidate.slots, run.cores, run.title))
    if heat_map is not None:
        _draw(heat_map, found)
    if as_json:
        click.echo(json.dumps(document(found), indent=2))
        return
    console = _console()
    console.print(f"{run.title}: {run.positions}", highlight=False)
    _show(console, place_view(found, top))
    for path, what in ((out, "best placement"), (heat_map, "heat map")):
        if path is not None:
            console.print(f"{what} in {path}", highlight=False)


def _alone(asked: dict[str, Any]) -> None:
    """Raises BadInput for what is given beside a plan, which has its own."""
    given = click.get_current_context().get_parameter_source
    for name in ("instance", "nodes", "lnc", "mesh", "fabric_file"):
        if asked["plan_file"] is not None and given(name) is not ParameterSource.DEFAULT:
            option = "--fabric" if name == "fabric_file" else f"--{name}"
            raise BadInput(option, asked[name], "nothing with --plan, which has its own")


def _draw(path: Path, found: "PlacementStudy") -> None:
    from .placing.heat_map import draw

    loads = {"default": found.default.score.load}
    if found.best is not found.default:
        loads["best"] = found.best.score.load
    draw(path, found.scorer.site.fabric, loads)
