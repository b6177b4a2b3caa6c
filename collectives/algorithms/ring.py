"""Ring: every rank passes chunks on to the next one.

reduce_scatter and all_gather take n - 1 rounds each; all_reduce is one after the other; broadcast
is a scatter followed by the all_gather rounds. Each round is the same pattern on chunks that have
moved on by one, so a schedule holds n transfers per phase whatever the number of rounds.
"""

from collections.abc import Sequence

import numpy as np

from trnsim.device.errors import BadInput

from ..schedule import Block, Collective, Schedule, block

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")


def schedule(collective: Collective, order: Sequence[int] | np.ndarray | None = None) -> Schedule:
    """The ring through the group positions in `order` (default: as they are).

    Chunk i belongs to the i-th rank of the ring. Raises BadInput for an `order` that is no
    permutation and for kinds other than KINDS.
    """
    n = collective.ranks
    ring = np.arange(n) if order is None else np.asarray(order, np.int64)
    if not np.array_equal(np.sort(ring), np.arange(n)):
        raise BadInput("ring order", ring.tolist(), f"each of 0..{n - 1} once")
    phases = {
        "all_reduce": (_reduce_phase, _gather_phase),
        "reduce_scatter": (_reduce_phase,),
        "all_gather": (_gather_phase,),
        "broadcast": (_scatter_phase, _gather_phase),
    }
    if collective.kind not in phases:
        raise BadInput("collective of algorithm ring", collective.kind, KINDS)
    blocks = tuple(phase(collective, ring) for phase in phases[collective.kind]) if n > 1 else ()
    whole = collective.kind in ("all_reduce", "broadcast")
    return Schedule("ring", n, n if whole else 1, blocks, None if whole else ring)


def _reduce_phase(collective: Collective, ring: np.ndarray) -> Block:
    """Round k: place i sends chunk i - 1 - k, so that it ends with the whole sum of chunk i."""
    n = len(ring)
    first = np.arange(n) - 1
    return block(ring, np.roll(ring, -1), first, step=-1, count=n - 1, modulus=n, reduce=True)


def _gather_phase(collective: Collective, ring: np.ndarray) -> Block:
    """Round k: place i sends chunk i - k, which it got in the round before."""
    n = len(ring)
    return block(ring, np.roll(ring, -1), np.arange(n), step=-1, count=n - 1, modulus=n)


def _scatter_phase(collective: Collective, ring: np.ndarray) -> Block:
    """The root gives chunk i to place i."""
    n = len(ring)
    chunks = np.flatnonzero(ring != collective.root)
    return block(np.full(n - 1, collective.root), ring[chunks], chunks, modulus=n)
