"""Mesh: every rank talks to every other at once; one round, or two for all_reduce.

all_reduce is a direct reduce_scatter, then a direct all_gather: each chunk is reduced by one rank,
which adds the contributions to its own in rank order, so all ranks end with the same bits.
A permute or sendrecv is one round of its pairs; a pair of a rank with itself moves nothing.
"""

import numpy as np

from ..schedule import KINDS, Block, Collective, Schedule, block

__all__ = ["KINDS", "schedule"]


def schedule(collective: Collective) -> Schedule:
    """Direct transfers between all pairs of ranks that have something for each other."""
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
