"""Every flat algorithm at 256 ranks, proved by symbolic execution."""

from types import ModuleType

import pytest

from trnsim.collectives.algorithms import bruck, mesh, pairwise, rdh, ring, single_step, tree
from trnsim.collectives.schedule import REDUCING, Collective
from trnsim.collectives.verify import verify

RANKS = 256
FLAT = (ring, mesh, single_step, rdh, tree, bruck, pairwise)


def collective(kind: str) -> Collective:
    if kind in ("permute", "sendrecv"):
        pairs = tuple((i, (i + 1) % RANKS) for i in range(RANKS))
        return Collective(kind, RANKS, 3, pairs=pairs)
    if kind == "barrier":
        return Collective(kind, RANKS)
    whole = kind in ("all_reduce", "broadcast", "reduce")
    reduction = "add" if kind in REDUCING else None
    return Collective(kind, RANKS, 2 * RANKS + 1 if whole else 2, reduction=reduction)


@pytest.mark.parametrize(
    ("module", "kind"), [(module, kind) for module in FLAT for kind in module.KINDS]
)
def test_256_ranks(module: ModuleType, kind: str) -> None:
    what = collective(kind)
    verify(what, module.schedule(what))
