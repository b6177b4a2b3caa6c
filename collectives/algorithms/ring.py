"""Ring: every rank passes chunks on to the next one.

reduce_scatter and all_gather take n - 1 rounds each; all_reduce is one after the other; broadcast
is a scatter followed by the all_gather rounds, reduce the reduce_scatter rounds and a gather. Each
round is the same pattern on chunks that have moved on by one, so a schedule holds n transfers per
phase whatever the number of rounds.

Several rings share the data: edge-disjoint cycles of a torus, or one cycle in both directions.
"""

from collections.abc import Sequence

import numpy as np

from trnsim.device.errors import BadInput

from ..schedule import Block, Collective, Schedule, block, in_order
from .compose import side_by_side

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce")


def schedule(collective: Collective, order: Sequence[int] | np.ndarray | None = None) -> Schedule:
    """The ring through the group positions in `order` (default: as they are).

    order: int[n], or int[channels, n] for several rings, each of which does its share. Chunk i of a
    ring belongs to its i-th rank. Raises BadInput for an `order` that is no permutation and for
    kinds other than KINDS.
    """
    orders = [None] if order is None else list(np.atleast_2d(order))
    rings = [in_order(one_ring, collective, row) for row in orders]
    return side_by_side(rings, collective.pieces, "ring")


def both_ways(orders: np.ndarray) -> np.ndarray:
    """int[2 * channels, n]: every ring (int[channels, n] or int[n]) and the same one backwards."""
    rings = np.atleast_2d(orders)
    return np.concatenate([rings, rings[:, ::-1]])


def one_ring(collective: Collective, way: int = 1) -> Schedule:
    """One ring in rank order, upwards (way=1) or downwards (-1); chunk i is rank i's both ways."""
    phases = {
        "all_reduce": (_reduce_phase, _gather_phase),
        "reduce_scatter": (_reduce_phase,),
        "all_gather": (_gather_phase,),
        "broadcast": (_scatter_phase, _gather_phase),
        "reduce": (_reduce_phase, _collect_phase),
    }
    if collective.kind not in phases:
        raise BadInput("collective of algorithm ring", collective.kind, KINDS)
    n, root = collective.ranks, collective.root
    blocks = tuple(phase(n, root, way) for phase in phases[collective.kind]) if n > 1 else ()
    return Schedule("ring", n, n if collective.pieces == 1 else 1, blocks)


def _reduce_phase(n: int, root: int, way: int) -> Block:
    """Round k: rank i sends chunk i - 1 - k, so that it ends with the whole sum of chunk i."""
    ranks = np.arange(n)
    there, first = (ranks + way) % n, ranks - way
    return block(ranks, there, first, step=-way, count=n - 1, modulus=n, reduce=True)


def _gather_phase(n: int, root: int, way: int) -> Block:
    """Round k: rank i sends chunk i - k, which it got in the round before."""
    ranks = np.arange(n)
    return block(ranks, (ranks + way) % n, ranks, step=-way, count=n - 1, modulus=n)


def _scatter_phase(n: int, root: int, way: int) -> Block:
    """The root gives chunk i to rank i."""
    others = np.delete(np.arange(n), root)
    return block(np.full(n - 1, root), others, others, modulus=n)


def _collect_phase(n: int, root: int, way: int) -> Block:
    """Rank i gives chunk i to the root."""
    others = np.delete(np.arange(n), root)
    return block(others, np.full(n - 1, root), others, modulus=n)
