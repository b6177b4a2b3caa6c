"""Tables of `trnsim place`."""

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from trnsim.device.units import format_bytes, format_time

from ..placing.local_search import cost
from ..placing.score import busiest
from ..placing.study import PlacementStudy, Ranked


def place_view(study: PlacementStudy, most: int = 8) -> list[RenderableType]:
    """The ranking with the reasons: time by demand, hops by axis, the busiest link."""
    return [_ranking(study, most), *map(Text, [*_why(study), *_notes(study)])]


def _ranking(study: PlacementStudy, most: int) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for head in ("#", "time", "vs default"):
        table.add_column(head, justify="right", no_wrap=True)
    for name in study.best.hops:
        table.add_column(f"{name} hops\nmean/most", justify="right", no_wrap=True)
    table.add_column("busiest link", no_wrap=True)
    table.add_column("placement")
    for place, item, alike in shown(study, most):
        name = item.candidate.name + (f" (and {alike} alike)" if alike else "")
        table.add_row(str(place), *_cells(study, item), name)
    return table


def shown(study: PlacementStudy, most: int) -> list[tuple[int, Ranked, int]]:
    """(place in the ranking from 1, candidate, how many cost just the same).

    The best `most` of different cost, and the default, the vendor's layouts and rank files.
    """
    groups: dict[tuple[int, int], list[tuple[int, Ranked]]] = {}
    for place, item in enumerate(study.ranking, 1):
        groups.setdefault(cost(item.score), []).append((place, item))
    found = []
    for index, group in enumerate(groups.values()):
        for place, item in group:
            named = item.candidate.kind in ("default", "vendor", "rank file")
            if named or (index < most and (place, item) == group[0]):
                found.append((place, item, len(group) - 1))
    return found


def _cells(study: PlacementStudy, item: Ranked) -> list[str]:
    base, time = study.default.score.total, item.score.total
    versus = f"{100 * (time - base) / base:+.1f} %" if base else "-"
    hops = [f"{each.mean:.2f}/{each.most}" for each in item.hops.values()]
    links = busiest(study.scorer.site.fabric, item.score.load, 1)
    link = f"{links[0][0]} {format_time(links[0][2])}" if links else "none"
    return [format_time(time), versus, *hops, link]


def _why(study: PlacementStudy) -> list[str]:
    """Demand by demand, the best against the default."""
    best, default = study.best, study.default
    if best is default:
        return ["why: no placement tried is better than the default"]
    lines = [f"why {best.candidate.name} takes {_less(best.score.total, default.score.total)}:"]
    for own, other in zip(best.score.costs, default.score.costs, strict=True):
        times, limit = own.demand.times, own.limited_by
        change = f"{format_time(other.duration)} -> {format_time(own.duration)}"
        lines.append(
            f"  {own.demand.title} ({format_bytes(own.demand.collective.nbytes)} x {times}): "
            f"{change} each, {_less(own.total, other.total)}; {other.algorithm} -> "
            f"{own.algorithm}, limited by {other.limited_by} -> {limit}"
        )
    return lines


def _less(own: int, other: int) -> str:
    if own == other or not other:
        return "as long as the default"
    percent = 100 * abs(other - own) / other
    return f"{percent:.1f} % {'less' if own < other else 'more'} than the default"


def _notes(study: PlacementStudy) -> list[str]:
    notes = ["placements: parts of the axes along each dimension, outer to inner"]
    notes += ["time: all collectives of a step one after another, as if nothing overlapped"]
    tried = f"{len(study.ranking)} placements in the ranking, {study.searched} more searched"
    notes.append(tried + (f"; {study.left_out} not priced" if study.left_out else ""))
    return notes


def document(study: PlacementStudy) -> dict[str, Any]:
    """The study as plain data; times in ps, loads in bytes."""
    fabric = study.scorer.site.fabric
    return {
        "site": study.scorer.site.title,
        "mesh": str(study.scorer.mesh),
        "default_over_best": study.gain + 1,
        "not_priced": study.left_out,
        "searched": study.searched,
        "ranking": [
            {
                "rank": place,
                "kind": item.candidate.kind,
                "name": item.candidate.name,
                "time_ps": item.score.total,
                "byte_hops": item.score.moved,
                "hops": {a: {"mean": h.mean, "most": h.most} for a, h in item.hops.items()},
                "demands": [
                    {
                        "what": call.demand.title,
                        "bytes": call.demand.collective.nbytes,
                        "times": call.demand.times,
                        "duration_ps": call.duration,
                        "algorithm": call.algorithm,
                        "limited_by": call.limited_by,
                    }
                    for call in item.score.costs
                ],
                "busiest_links": [
                    {"link": name, "bytes": nbytes, "busy_ps": ps}
                    for name, nbytes, ps in busiest(fabric, item.score.load)
                ],
            }
            for place, item in enumerate(study.ranking, 1)
        ],
    }
