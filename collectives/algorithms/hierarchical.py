"""Hierarchical: inside the nodes, then across them (or the other way round).

For X nodes with Y ranks each, after the vendor's inter-node description:

    all_reduce      = intra reduce_scatter, inter all_reduce, intra all_gather
    reduce_scatter  = intra reduce_scatter, inter reduce_scatter
    all_gather      = inter all_gather, intra all_gather
    broadcast       = inter broadcast, intra broadcast;  reduce the other way round
    all_to_all      = intra exchange by local index of the destination, inter exchange

The steps are schedules of their own, chosen independently. Inter steps run between ranks of the
same local index, all local indices at once. With several pipeline stages (the vendor has up to
three), every stage has its share of the buffer, and works inside the nodes while the one before it
works across them.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial

import numpy as np

from trnsim.device.errors import BadInput

from ..schedule import Block, Collective, Schedule, block
from . import bruck, kangaring, levels, mesh, pairwise, rdh, ring, single_step, tree
from .compose import moved_on, shares_order, side_by_side

KINDS = (*levels.KINDS, "all_to_all")
MODULES = {
    "ring": ring,
    "kangaring": kangaring,
    "mesh": mesh,
    "rdh": rdh,
    "double_binary_tree": tree,
    "single_step_mesh": single_step,
    "bruck": bruck,
    "pairwise": pairwise,
}
INTRA = ("ring", "kangaring", "mesh", "rdh")
INTER = ("ring", "mesh", "rdh", "double_binary_tree", "single_step_mesh")
STAGES = 3


def schedule(
    collective: Collective,
    places: np.ndarray,
    intra: str = "ring",
    inter: str = "ring",
    *,
    stages: int = 1,
    orders: np.ndarray | Sequence[Sequence[int]] | None = None,
    chips: np.ndarray | Sequence[Sequence[int]] | None = None,
) -> Schedule:
    """The two-level schedule. places: int[X, Y], group position of each (node, local index).

    orders: int[channels, Y], the rings inside a node over local indices (for kangaring
    int[channels, C], over rows of `chips`). chips: int[C, k], local indices on each chip, for
    kangaring and the two-step mesh. Raises BadInput for other kinds, steps and numbers of stages,
    and for `places` that does not hold each position.
    """
    if collective.kind not in KINDS:
        raise BadInput("collective of algorithm hierarchical", collective.kind, KINDS)
    for level, name, known in (("intra", intra, INTRA), ("inter", inter, INTER)):
        if name not in known:
            raise BadInput(f"{level} step of algorithm hierarchical", name, known)
    if not 1 <= stages <= STAGES:
        raise BadInput("stages of algorithm hierarchical", stages, f"1..{STAGES}")
    table = levels.Levels(places)
    name = f"hierarchical:{intra}+{inter}" + (f":{stages}" if stages > 1 else "")
    if collective.kind == "all_to_all":
        return _all_to_all(table.places.astype(np.int64), name)
    made = []
    across = lru_cache(maxsize=None)(MODULES[inter].schedule)  # one for all rings inside
    for order in [None] if orders is None else np.atleast_2d(orders):
        steps = (_intra(intra, order, chips), across)
        made.append(_pipeline(collective, table, steps, stages, name))
    return side_by_side(made, collective.pieces, name)


def places_of(nodes: Sequence[int] | np.ndarray) -> np.ndarray:
    """int64[X, Y]: group positions by (node, local index), from the node of each position.

    Raises BadInput unless every node has the same number of ranks (the vendor's rule too).
    """
    names, which, sizes = np.unique(nodes, return_inverse=True, return_counts=True)
    if sizes.min() != sizes.max():
        shown = ", ".join(f"node {a}: {b}" for a, b in zip(names, sizes, strict=True))
        raise BadInput("ranks per node", shown, "the same number on every node (hierarchical)")
    return np.argsort(which, kind="stable").reshape(len(names), -1)


def _intra(name: str, order: np.ndarray | None, chips) -> levels.Step:
    if name == "ring":
        return partial(ring.schedule, order=order)
    if name == "kangaring":
        if chips is None:
            raise BadInput("chips", None, "the local indices on each chip (kangaring)")
        return partial(kangaring.schedule, chips=chips, order=order)
    if name == "mesh" and chips is not None:
        return partial(mesh.schedule, chips=np.asarray(chips))
    return MODULES[name].schedule


def _pipeline(
    collective: Collective,
    table: levels.Levels,
    steps: Sequence[levels.Step],
    stages: int,
    name: str,
) -> Schedule:
    """Stage s does its phase p while stage s + 1 does its phase p - 1. Each stage is a lane."""
    parts, phases, order = levels.phases(collective, table, steps)
    share = Schedule(name, collective.ranks, parts, tuple(b for p in phases for b in p), order)
    if stages == 1:
        return share
    channels, size = share.channels, collective.pieces * parts
    apart = [_on_level(phase, p, len(phases), channels) for p, phase in enumerate(phases)]
    blocks = [
        replace(moved_on(b, stage * size), lane=stage)
        for time in range(len(phases) + stages - 1)
        for stage in range(stages)
        if 0 <= time - stage < len(phases)
        for b in apart[time - stage]
    ]
    order = shares_order([share] * stages, collective.pieces)
    return Schedule(name, collective.ranks, parts * stages, tuple(blocks), order)


def _on_level(phase: list[Block], index: int, phases: int, channels: int) -> list[Block]:
    """The phase on the channels of its level: those inside and across nodes work side by side."""
    outer = index == 1 if phases == 3 else index % 2
    return [moved_on(b, 0, channel=channels * outer) for b in phase]


def _all_to_all(places: np.ndarray, name: str) -> Schedule:
    """Chunk ((x, y), y', x') goes from (x, y) to (x, y') and from there to (x', y')."""
    x, y = places.shape
    n = x * y
    where, away = np.arange(n), np.arange(y)
    source, index = (a.reshape(-1) for a in np.meshgrid(where, away, indexing="ij"))
    moving = source % y != index
    source, index = source[moving], index[moving]
    first = block(
        places[source // y, source % y],
        places[source // y, index],
        source * n + index * x,
        span=x,
        modulus=n * n,
    )
    source, target = (a.reshape(-1) for a in np.meshgrid(where, where, indexing="ij"))
    moving = source // y != target // y
    source, target = source[moving], target[moving]
    second = block(
        places[source // y, target % y],
        places[target // y, target % y],
        source * n + target % y * x + target // y,
        modulus=n * n,
    )
    source, target = np.divmod(np.arange(n * n), n)  # target as (y', x')
    pieces = places.reshape(-1)[source] * n + places[target % x, target // x]
    blocks = tuple(b for b in (first, second) if b.transfers)
    return Schedule(name, n, 1, blocks, pieces)
