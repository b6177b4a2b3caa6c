"""What would make a plan fit into memory, without other degrees."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from trnsim.device.errors import BadInput

from .build import build
from .memory import memory
from .plan import Plan

RECOMPUTE = ("none", "selective", "full")
ZERO = ("none", "1", "fsdp")


def remedies(plan: Plan, most: int = 3) -> list[tuple[str, int]]:
    """Changes that fit, as (what to change, bytes of a rank at its peak), the smallest first.

    One change, or recomputation and sharding together if none does alone.
    """
    found: list[tuple[str, int]] = []
    changes = list(_single(plan))
    for change in (*changes, *_double(changes)):
        if len(found) == most or (found and len(change) > 1):
            break
        need = _need(plan, change)
        if need is not None and need <= plan.machine.hbm_bytes:
            found.append((", ".join(f"{k.replace('_', ' ')} {v}" for k, v in change.items()), need))
    return found


def _single(plan: Plan) -> Iterator[dict[str, Any]]:
    shards = plan.gradient_axes
    for name, order in (("recompute", RECOMPUTE), ("zero", ZERO if shards else ())):
        now = getattr(plan, name)
        if now in order:
            yield from ({name: value} for value in order[order.index(now) + 1 :])
    if plan.microbatch > 1:
        yield {"microbatch": plan.microbatch // 2}


def _double(changes: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for one in changes:
        for other in changes:
            if "recompute" in one and "zero" in other:
                yield one | other


def _need(plan: Plan, change: dict[str, Any]) -> int | None:
    """Bytes at the peak with a change; None where the plan cannot have it."""
    try:
        changed = replace(plan, **change)
    except BadInput:
        return None
    return max(memory(stage, plan.machine).total for stage in build(changed).stages)
