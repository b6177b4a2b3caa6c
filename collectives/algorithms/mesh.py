"""Mesh: every rank talks to every other at once; one round, or two for all_reduce.

all_reduce is a direct reduce_scatter, then a direct all_gather: each chunk is reduced by one rank,
which adds the contributions to its own in rank order, so all ranks end with the same bits.
A permute or sendrecv is one round of its pairs; a pair of a rank with itself moves nothing.

With the chips of the ranks, these three kinds take two steps instead (the vendor's mesh, AWS Neuron
documentation, "intra-node collective communication"): all_gather sends each piece once to every
other chip, to the rank of the same place there, which then hands it on to its neighbours; its own
neighbours get it meanwhile. reduce_scatter is the same backwards: partial sums on the chip first.
"""

import numpy as np

from trnsim.device.errors import BadInput

from ..schedule import KINDS, Block, Collective, Schedule, block
from .compose import mirrored

__all__ = ["KINDS", "schedule"]
TWO_STEP = ("all_reduce", "all_gather", "reduce_scatter")


def schedule(collective: Collective, chips: np.ndarray | None = None) -> Schedule:
    """Direct transfers between all pairs of ranks that have something for each other.

    chips: int[C, k] group positions on each chip, for two steps where C and k allow it. Raises
    BadInput for chips that do not hold each position once.
    """
    if chips is not None and collective.kind in TWO_STEP and min(np.shape(chips)) > 1:
        return _two_step(collective, np.asarray(chips, np.int64))
    rounds = {
        "all_reduce": (_to_owner, _from_owner),
        "reduce_scatter": (_to_owner,),
        "all_gather": (_from_owner,),
        "all_to_all": (_exchange,),
        "permute": (_along_pairs,),
        "sendrecv": (_along_pairs,),
        "broadcast": (_from_root,),
        "reduce": (_to_root,),
        "gather": (_pieces_to_root,),
        "scatter": (_pieces_from_root,),
        "barrier": (_to_root, _from_root),
    }
    n = collective.ranks
    blocks = tuple(make(collective) for make in rounds[collective.kind])
    blocks = tuple(b for b in blocks if b.transfers)
    return Schedule("mesh", n, n if collective.kind == "all_reduce" else 1, blocks)


def _two_step(collective: Collective, chips: np.ndarray) -> Schedule:
    n = collective.ranks
    if not np.array_equal(np.sort(chips, axis=None), np.arange(n)):
        raise BadInput("chips", chips.tolist(), f"each of 0..{n - 1} once")
    spread = Schedule("mesh", n, 1, (_to_entries(chips), _on_chip(chips)))
    if collective.kind == "all_gather":
        return spread
    collect = mirrored(spread, reduce=True)
    if collective.kind == "reduce_scatter":
        return collect
    return Schedule("mesh", n, n, collect.blocks + spread.blocks)


def _to_entries(chips: np.ndarray) -> Block:
    """Every rank sends its piece to its neighbours, and to the same place on each other chip."""
    count, k = chips.shape
    place, chip, there, other = np.indices((k, count, count, k)).reshape(4, -1)
    taken = np.where(chip == there, other != place, other == place)
    source = chips[chip, place][taken]
    return block(source, chips[there, other][taken], source, modulus=chips.size)


def _on_chip(chips: np.ndarray) -> Block:
    """Every rank hands on the pieces that it took from other chips to its neighbours."""
    count, k = chips.shape
    place, chip, there, other = np.indices((k, count, count, k)).reshape(4, -1)
    taken = (chip != there) & (other != place)
    holder, target = chips[there, place][taken], chips[there, other][taken]
    return block(holder, target, chips[chip, place][taken], modulus=chips.size)


def _all_pairs(n: int) -> tuple[np.ndarray, np.ndarray]:
    """(source, target) of all pairs of different ranks, by source."""
    source, target = np.divmod(np.arange(n * n), n)
    different = source != target
    return source[different], target[different]


def _to_owner(collective: Collective) -> Block:
    source, target = _all_pairs(collective.ranks)
    return block(source, target, target, modulus=collective.ranks, reduce=True)


def _from_owner(collective: Collective) -> Block:
    source, target = _all_pairs(collective.ranks)
    return block(source, target, source, modulus=collective.ranks)


def _exchange(collective: Collective) -> Block:
    n = collective.ranks
    source, target = _all_pairs(n)
    return block(source, target, source * n + target, modulus=n * n)


def _along_pairs(collective: Collective) -> Block:
    pairs = np.array(collective.pairs, np.int64).reshape(-1, 2)
    moving = np.flatnonzero(pairs[:, 0] != pairs[:, 1])
    return block(pairs[moving, 0], pairs[moving, 1], moving, modulus=max(1, len(pairs)))


def _others(collective: Collective) -> tuple[np.ndarray, np.ndarray]:
    """(the root once for each other rank, the other ranks)."""
    others = np.delete(np.arange(collective.ranks), collective.root)
    return np.full(len(others), collective.root), others


def _from_root(collective: Collective) -> Block:
    root, others = _others(collective)
    return block(root, others, 0, modulus=1)


def _to_root(collective: Collective) -> Block:
    root, others = _others(collective)
    return block(others, root, 0, modulus=1, reduce=True)


def _pieces_from_root(collective: Collective) -> Block:
    root, others = _others(collective)
    return block(root, others, others, modulus=collective.ranks)


def _pieces_to_root(collective: Collective) -> Block:
    root, others = _others(collective)
    return block(others, root, others, modulus=collective.ranks)
