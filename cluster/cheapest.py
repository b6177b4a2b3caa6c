"""`best`: the algorithm with the lowest price, found by pricing every one that can do the job."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from trnsim.collectives import choose
from trnsim.collectives.fabric import Fabric
from trnsim.collectives.layout import layout
from trnsim.collectives.schedule import POINT_TO_POINT, Collective
from trnsim.device.errors import BadInput

BEST = "best"


def algorithm_for(name: str, kind: str) -> str:
    """`name` where it can do this kind of collective, else the policy."""
    able = name == BEST or kind in choose.kinds(name)
    return name if able else "policy"


def plan(
    collective: Collective,
    groups: Sequence[Sequence[int]] | np.ndarray,
    fabric: Fabric,
    algorithm: str,
    price: Callable[[choose.Plan], int],
    policy: choose.Policy = choose.PUBLISHED,
) -> choose.Plan:
    """As `choose.plan`, and `best` too; `price` gives the picoseconds of a plan."""
    if algorithm != BEST:
        return choose.plan(collective, groups, fabric, algorithm, policy)
    if collective.ranks == 1 or collective.kind in POINT_TO_POINT:
        return choose.plan(collective, groups, fabric, "policy", policy)
    found = _priced(collective, np.asarray(groups, np.int64), fabric, price)
    (least, first), *others = found
    reason = f"cheapest of {len(found)} by price"
    if others:
        second, name = others[0][0], others[0][1].choice.algorithm
        more = 100 * (second - least) / least if least else 0.0
        reason += f"; then {name}, {more:.1f} % slower"
    return replace(first, choice=replace(first.choice, reason=reason))


def _priced(
    collective: Collective,
    groups: np.ndarray,
    fabric: Fabric,
    price: Callable[[choose.Plan], int],
) -> list[tuple[int, choose.Plan]]:
    """(ps, plan) of all algorithms that serve these groups, the cheapest first."""
    found = []
    for name in choose.candidates(collective, layout(groups, fabric)):
        try:
            made = choose.plan(collective, groups, fabric, name)
        except BadInput:  # not for groups of this shape
            continue
        found.append((price(made), made))
    return sorted(found, key=lambda item: item[0])
