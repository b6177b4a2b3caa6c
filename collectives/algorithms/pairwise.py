"""Pairwise exchange: n - 1 rounds; in round k every rank sends to the one k places on.

Each rank has one message out and one in at a time, where mesh has all of them at once.
"""

import numpy as np

from trnsim.device.errors import BadInput

from ..schedule import Collective, Schedule, block

KINDS = ("all_to_all",)


def schedule(collective: Collective) -> Schedule:
    """All to all in n - 1 rounds of n messages."""
    if collective.kind not in KINDS:
        raise BadInput("collective of algorithm pairwise", collective.kind, KINDS)
    n = collective.ranks
    ranks = np.arange(n)
    peers = [(ranks + shift) % n for shift in range(1, n)]
    blocks = tuple(block(ranks, peer, ranks * n + peer, modulus=n * n) for peer in peers)
    return Schedule("pairwise", n, 1, blocks)
