"""Mesh: every rank talks to every other at once; one round, or two for all_reduce.

all_reduce is a direct reduce_scatter, then a direct all_gather: each chunk is reduced by one rank,
which adds the contributions to its own in rank order, so all ranks end with the same bits.
A permute is one round of its pairs; a pair of a rank with itself moves nothing.
"""

import numpy as np

from trnsim.device.errors import BadInput

from ..schedule import Block, Collective, Schedule, block

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute", "broadcast")


def schedule(collective: Collective) -> Schedule:
    """Direct transfers between all pairs of ranks that have something for each other."""
    rounds = {
        "all_reduce": (_to_owner, _from_owner),
        "reduce_scatter": (_to_owner,),
        "all_gather": (_from_owner,),
        "all_to_all": (_exchange,),
        "permute": (_along_pairs,),
        "broadcast": (_from_root,),
    }
    if collective.kind not in rounds:
        raise BadInput("collective of algorithm mesh", collective.kind, KINDS)
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


def _from_root(collective: Collective) -> Block:
    others = np.delete(np.arange(collective.ranks), collective.root)
    return block(np.full(len(others), collective.root), others, 0, modulus=1)
