"""Recursive doubling and halving (RDH), for any group size by folding.

With p the largest power of two up to n, the n - p ranks beyond it are folded: each hands its data
to a partner below p before the exchange among p ranks, and gets its result from it afterwards.
Halving (reduce_scatter) and doubling (all_gather) take log2(p) rounds each; all_reduce is one after
the other; broadcast, reduce, scatter, gather and barrier are binomial trees. After Thakur,
Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH" (2005).

Pieces are numbered so that a rank and the one folded into it are neighbours: then what moves in an
exchange is always one run of chunks.
"""

from collections.abc import Sequence

import numpy as np

from trnsim.device.errors import BadInput

from ..schedule import Block, Collective, Schedule, block, in_order
from .compose import mirrored, side_by_side

KINDS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "scatter",
    "gather",
    "barrier",
)
SHARED = ("all_reduce", "all_gather", "reduce_scatter")


def schedule(collective: Collective, order: Sequence[int] | np.ndarray | None = None) -> Schedule:
    """Recursive doubling/halving; order[i] is the group position at corner i of the hypercube.

    order: int[n], or int[channels, n] for several cubes, each of which does its share (rooted kinds
    and barriers take the first). Raises BadInput for an `order` that is no permutation and for
    kinds other than KINDS.
    """
    orders = [None] if order is None else list(np.atleast_2d(order))
    if collective.kind not in SHARED:
        orders = orders[:1]
    cubes = [in_order(_schedule, collective, row) for row in orders]
    return side_by_side(cubes, collective.pieces, "rdh")


def _schedule(collective: Collective) -> Schedule:
    makers = {
        "all_reduce": _all_reduce,
        "all_gather": _all_gather,
        "reduce_scatter": _reduce_scatter,
        "broadcast": _broadcast,
        "reduce": lambda c: mirrored(_broadcast(c), reduce=True),
        "scatter": _scatter,
        "gather": lambda c: mirrored(_scatter(c), reduce=False),
        "barrier": _barrier,
    }
    if collective.kind not in makers:
        raise BadInput("collective of algorithm rdh", collective.kind, KINDS)
    return makers[collective.kind](collective)


def power_below(n: int) -> int:
    """The largest power of two that is at most n."""
    return 1 << (n.bit_length() - 1)


def _all_reduce(collective: Collective) -> Schedule:
    n, p = collective.ranks, power_below(collective.ranks)
    starts = np.arange(p + 1)
    low, high = np.arange(n - p), np.arange(p, n)
    fold = [block(high, low, 0, span=p, modulus=p, reduce=True)] if n > p else []
    unfold = [block(low, high, 0, span=p, modulus=p)] if n > p else []
    return Schedule("rdh", n, p, (*fold, *_halving(starts), *_doubling(starts), *unfold))


def _all_gather(collective: Collective) -> Schedule:
    n, p = collective.ranks, power_below(collective.ranks)
    order, starts = _folded_order(n, p)
    low, high = np.arange(n - p), np.arange(p, n)
    own = starts[:-1][low] + 1  # the piece of the folded rank comes right after its partner's
    fold = [block(high, low, own, modulus=n)] if n > p else []
    # All but its own piece: the run that starts after it, round to it again.
    unfold = [block(low, high, own + 1, span=n - 1, modulus=n)] if n > p else []
    return Schedule("rdh", n, 1, (*fold, *_doubling(starts), *unfold), order)


def _reduce_scatter(collective: Collective) -> Schedule:
    n, p = collective.ranks, power_below(collective.ranks)
    order, starts = _folded_order(n, p)
    low, high = np.arange(n - p), np.arange(p, n)
    own = starts[:-1][low] + 1
    fold = [block(high, low, 0, span=n, modulus=n, reduce=True)] if n > p else []
    unfold = [block(low, high, own, modulus=n)] if n > p else []
    return Schedule("rdh", n, 1, (*fold, *_halving(starts), *unfold), order)


def _broadcast(collective: Collective) -> Schedule:
    """Binomial tree: the ranks that have the buffer double in each round."""
    n, root = collective.ranks, collective.root
    blocks, have = [], 1
    while have < n:
        giver = np.arange(min(have, n - have))
        blocks.append(block((giver + root) % n, (giver + have + root) % n, 0, modulus=1))
        have *= 2
    return Schedule("rdh", n, 1, tuple(blocks))


def _barrier(collective: Collective) -> Schedule:
    down = _broadcast(collective)
    up = mirrored(down, reduce=True)
    return Schedule("rdh", collective.ranks, 1, up.blocks + down.blocks)


def _scatter(collective: Collective) -> Schedule:
    """Binomial tree: who has a run of pieces gives half of it away, until each has its own."""
    n, root = collective.ranks, collective.root
    blocks, distance = [], 1 << (n - 1).bit_length()
    while distance := distance // 2:
        giver = np.arange(0, n - distance, 2 * distance)  # places counted from the root
        taker = giver + distance
        span = np.minimum(distance, n - taker)
        blocks.append(block((giver + root) % n, (taker + root) % n, taker, span=span, modulus=n))
    return Schedule("rdh", n, 1, tuple(blocks), (np.arange(n) + root) % n)


def _folded_order(n: int, p: int) -> tuple[np.ndarray, np.ndarray]:
    """(order, starts): pieces with folded ones beside their partner's; where each of p begins."""
    ranks = np.arange(p)
    starts = ranks + np.minimum(ranks, n - p)
    order = np.empty(n, np.int64)
    order[starts] = ranks
    order[starts[: n - p] + 1] = np.arange(p, n)
    return order, np.append(starts, n)


def _exchange(starts: np.ndarray, distance: int, reduce: bool) -> Block:
    """Ranks `distance` apart swap: halving gives the partner's side away, doubling one's own."""
    ranks = np.arange(len(starts) - 1)
    side = (ranks ^ distance if reduce else ranks) // distance * distance
    first = starts[side]
    span = starts[side + distance] - first
    return block(ranks, ranks ^ distance, first, span=span, modulus=int(starts[-1]), reduce=reduce)


def _halving(starts: np.ndarray) -> list[Block]:
    p = len(starts) - 1
    return [_exchange(starts, p >> k, True) for k in range(1, p.bit_length())]


def _doubling(starts: np.ndarray) -> list[Block]:
    p = len(starts) - 1
    return [_exchange(starts, 1 << k, False) for k in range(p.bit_length() - 1)]
