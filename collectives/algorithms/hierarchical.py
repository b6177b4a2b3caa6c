"""Hierarchical: inside the nodes, then across them (or the other way round).

For X nodes with Y ranks each, after the vendor's inter-node description:

    all_reduce      = intra reduce_scatter, inter all_reduce, intra all_gather
    reduce_scatter  = intra reduce_scatter, inter reduce_scatter
    all_gather      = inter all_gather, intra all_gather
    broadcast       = inter broadcast, intra broadcast

The steps are schedules of their own (ring, mesh, rdh), chosen independently. Inter steps run
between ranks of the same local index, all local indices at once. Chunks are numbered so that what
one local index owns is one run.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from trnsim.device.errors import BadInput

from ..schedule import Block, Collective, Schedule
from . import mesh, rdh, ring

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
STEPS = {"ring": ring.schedule, "mesh": mesh.schedule, "rdh": rdh.schedule}


def schedule(
    collective: Collective, places: np.ndarray, intra: str = "ring", inter: str = "ring"
) -> Schedule:
    """The two-level schedule. places: int[X, Y], group position of each (node, local index).

    Raises BadInput for other kinds, unknown steps, or `places` that does not hold each position.
    """
    if collective.kind not in KINDS:
        raise BadInput("collective of algorithm hierarchical", collective.kind, KINDS)
    for level, name in (("intra", intra), ("inter", inter)):
        if name not in STEPS:
            raise BadInput(f"{level} step of algorithm hierarchical", name, STEPS)
    if not np.array_equal(np.sort(places, axis=None), np.arange(collective.ranks)):
        raise BadInput("places", places.tolist(), f"each of 0..{collective.ranks - 1} once")
    build = {
        "all_reduce": _all_reduce,
        "all_gather": _all_gather,
        "reduce_scatter": _reduce_scatter,
        "broadcast": _broadcast,
    }[collective.kind]
    parts, blocks, order = build(collective, places, intra, inter)
    name = f"hierarchical:{intra}+{inter}"
    return Schedule(name, collective.ranks, parts, tuple(blocks), order)


def places_of(nodes: Sequence[int] | np.ndarray) -> np.ndarray:
    """int64[X, Y]: group positions by (node, local index), from the node of each position.

    Raises BadInput unless every node has the same number of ranks (the vendor's rule too).
    """
    names, which, sizes = np.unique(nodes, return_inverse=True, return_counts=True)
    if sizes.min() != sizes.max():
        shown = ", ".join(f"node {a}: {b}" for a, b in zip(names, sizes, strict=True))
        raise BadInput("ranks per node", shown, "the same number on every node (hierarchical)")
    return np.argsort(which, kind="stable").reshape(len(names), -1)


Parts = tuple[int, list[Block], np.ndarray | None]


def _all_reduce(collective: Collective, places: np.ndarray, intra: str, inter: str) -> Parts:
    x, y = places.shape
    scatter, gather = _step(intra, "reduce_scatter", y), _step(intra, "all_gather", y)
    across = _step(inter, "all_reduce", x)
    owned = _owned(scatter, y) * across.parts  # first chunk of what each local index owns
    blocks = _embed(scatter, places, scale=across.parts)
    blocks += _embed(across, places.T, offset=owned)
    blocks += _embed(gather, places, scale=across.parts)
    return y * across.parts, blocks, None


def _reduce_scatter(collective: Collective, places: np.ndarray, intra: str, inter: str) -> Parts:
    x, y = places.shape
    inside, across = _step(intra, "reduce_scatter", y), _step(inter, "reduce_scatter", x)
    blocks = _embed(inside, places, scale=x)
    blocks += _embed(across, places.T, offset=_owned(inside, y) * x)
    return 1, blocks, _order(places, across, inside)


def _all_gather(collective: Collective, places: np.ndarray, intra: str, inter: str) -> Parts:
    x, y = places.shape
    inside, across = _step(intra, "all_gather", y), _step(inter, "all_gather", x)
    blocks = _embed(across, places.T, offset=_owned(inside, y) * x)
    blocks += _embed(inside, places, scale=x)
    return 1, blocks, _order(places, across, inside)


def _broadcast(collective: Collective, places: np.ndarray, intra: str, inter: str) -> Parts:
    x, y = places.shape
    node, local = (int(i[0]) for i in np.nonzero(places == collective.root))
    across = _step(inter, "broadcast", x, root=node)
    inside = _step(intra, "broadcast", y, root=local)
    blocks = _embed(across, places[:, local][None], scale=inside.parts)
    blocks += _embed(inside, places, scale=across.parts)
    return across.parts * inside.parts, blocks, None


def _step(name: str, kind: str, ranks: int, root: int = 0) -> Schedule:
    reduction = "add" if kind in ("all_reduce", "reduce_scatter") else None
    return STEPS[name](Collective(kind, ranks, 1, reduction=reduction, root=root))


def _order(places: np.ndarray, across: Schedule, inside: Schedule) -> np.ndarray:
    """Pieces by (place of the local index, place of the node)."""
    x, y = places.shape
    return places[across.natural(x)][:, inside.natural(y)].T.reshape(-1)


def _owned(step: Schedule, ranks: int) -> np.ndarray:
    """int64[ranks]: the chunk that each rank of a step owns, which has one part per piece."""
    return step.place_of(ranks)[:, 0]


def _embed(
    step: Schedule, who: np.ndarray, *, offset: np.ndarray | int = 0, scale: int = 1
) -> list[Block]:
    """The step once per row of `who` (int[replicas, ranks of the step]), all rows at once.

    Its chunk c becomes the `scale` chunks from offset[row] + c * scale.
    """
    first, who = np.broadcast_to(offset, len(who)).astype(np.int64), who.astype(np.int32)
    return [_embed_block(b, who, first, scale) for b in step.blocks]


def _embed_block(b: Block, who: np.ndarray, first: np.ndarray, scale: int) -> Block:
    b = b.flat
    return replace(
        b,
        base=b.base * scale,
        span=b.span * scale,
        offset=b.offset * scale,
        step=b.step * scale,
        modulus=b.modulus * scale,
        who=who,
        shift=first,
    )
