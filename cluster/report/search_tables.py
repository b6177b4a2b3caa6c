"""The table of `trnsim plan --search`: the best degrees, and why the runners-up lose."""

from collections.abc import Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from trnsim.device.units import format_bytes, format_time

from ..plans.search import Candidate
from .plan_tables import _table


def search_view(candidates: Sequence[Candidate], top: int) -> list[RenderableType]:
    """A row for each of the first `top` candidates, and how many there were of each kind."""
    table = _table("mesh", "recompute", "step", "MFU", "memory", "why it is not the best")
    table.columns[1].justify = table.columns[5].justify = "left"
    table.columns[5].no_wrap = False
    for candidate in candidates[:top]:
        result = candidate.result
        table.add_row(
            str(candidate.plan.mesh),
            candidate.plan.recompute,
            format_time(result.step) if result else "",
            f"{result.mfu:.1%}" if result else "",
            "" if candidate.refused else format_bytes(candidate.need),
            candidate.why or "the best",
        )
    priced = sum(candidate.result is not None for candidate in candidates)
    large = sum(c.need > c.plan.machine.hbm_bytes for c in candidates)
    refused = sum(candidate.refused for candidate in candidates)
    rest = len(candidates) - priced - large - refused
    kinds = f"{priced} priced, {rest} cannot win, {large} do not fit"
    kinds += f", {refused} refused" if refused else ""
    return [table, Text(f"{len(candidates)} legal meshes: {kinds}")]


def search_document(candidates: Sequence[Candidate]) -> list[dict[str, Any]]:
    """The candidates as plain data: ps and bytes."""
    return [
        {
            "mesh": str(candidate.plan.mesh),
            "recompute": candidate.plan.recompute,
            "step": candidate.result.step if candidate.result else None,
            "bound": candidate.bound,
            "memory": None if candidate.refused else candidate.need,
            "why": candidate.why,
        }
        for candidate in candidates
    ]
