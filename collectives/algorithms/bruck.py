"""Bruck: log2 n rounds for any group size, at the price of more bytes for all_to_all.

all_gather: in round k every rank gives the ranks 2^k before it all that it has. all_to_all: in
round k every rank sends 2^k on all that still has to go an odd number of 2^k. After Bruck et al.,
"Efficient algorithms for all-to-all communications in multiport message-passing systems" (1997).
"""

import numpy as np

from trnsim.device.errors import BadInput

from ..schedule import Block, Collective, Schedule, block

KINDS = ("all_gather", "all_to_all")


def schedule(collective: Collective) -> Schedule:
    """Raises BadInput for kinds other than KINDS."""
    if collective.kind not in KINDS:
        raise BadInput("collective of algorithm bruck", collective.kind, KINDS)
    n = collective.ranks
    distances = [1 << k for k in range((n - 1).bit_length())]
    if collective.kind == "all_gather":
        return Schedule("bruck", n, 1, tuple(_spread(n, d) for d in distances))
    away, source = np.divmod(np.arange(n * n), n)  # chunks by how far they go, then by source
    order = source * n + (source + away) % n
    return Schedule("bruck", n, 1, tuple(_exchange(n, d) for d in distances), order)


def _spread(n: int, distance: int) -> Block:
    """Every rank has the pieces of itself and the distance - 1 ranks after it."""
    ranks = np.arange(n)
    return block(ranks, (ranks - distance) % n, ranks, span=min(distance, n - distance), modulus=n)


def _exchange(n: int, distance: int) -> Block:
    """Pieces that go `distance` further; by now, they are away % distance from their source."""
    going = np.flatnonzero(np.arange(n) & distance)
    source, away = np.arange(n)[:, None], going[None, :]
    at = (source + away % distance) % n
    chunk = away * n + source
    return block(
        at.reshape(-1), ((at + distance) % n).reshape(-1), chunk.reshape(-1), modulus=n * n
    )
