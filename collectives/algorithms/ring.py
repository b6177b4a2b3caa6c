"""Ring: every rank passes chunks on to the next one.

reduce_scatter and all_gather take n - 1 rounds each; all_reduce is one after the other; broadcast
is a scatter followed by the all_gather rounds. Each round is the same pattern on chunks that have
moved on by one, so a schedule holds n transfers per phase whatever the number of rounds.
"""

from collections.abc import Sequence

import numpy as np

from trnsim.device.errors import BadInput

from ..schedule import Block, Collective, Schedule, block, in_order

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")


def schedule(collective: Collective, order: Sequence[int] | np.ndarray | None = None) -> Schedule:
    """The ring through the group positions in `order` (default: as they are).

    Chunk i belongs to the i-th rank of the ring. Raises BadInput for an `order` that is no
    permutation and for kinds other than KINDS.
    """
    return in_order(_schedule, collective, order)


def _schedule(collective: Collective) -> Schedule:
    phases = {
        "all_reduce": (_reduce_phase, _gather_phase),
        "reduce_scatter": (_reduce_phase,),
        "all_gather": (_gather_phase,),
        "broadcast": (_scatter_phase, _gather_phase),
    }
    if collective.kind not in phases:
        raise BadInput("collective of algorithm ring", collective.kind, KINDS)
    n = collective.ranks
    blocks = tuple(phase(n, collective.root) for phase in phases[collective.kind]) if n > 1 else ()
    return Schedule("ring", n, n if collective.pieces == 1 else 1, blocks)


def _reduce_phase(n: int, root: int) -> Block:
    """Round k: rank i sends chunk i - 1 - k, so that it ends with the whole sum of chunk i."""
    ranks = np.arange(n)
    next_one = (ranks + 1) % n
    return block(ranks, next_one, ranks - 1, step=-1, count=n - 1, modulus=n, reduce=True)


def _gather_phase(n: int, root: int) -> Block:
    """Round k: rank i sends chunk i - k, which it got in the round before."""
    ranks = np.arange(n)
    return block(ranks, (ranks + 1) % n, ranks, step=-1, count=n - 1, modulus=n)


def _scatter_phase(n: int, root: int) -> Block:
    """The root gives chunk i to rank i."""
    others = np.delete(np.arange(n), root)
    return block(np.full(n - 1, root), others, others, modulus=n)
