"""Torus: rings along every dimension, one dimension after the other.

all_reduce is a reduce_scatter along each dimension but the last, an all_reduce along that, and
all_gathers back. With several channels the data is shared: channel 2 * d starts with dimension d,
channel 2 * d + 1 does the same with its rings the other way round, so that all links are in use.
"""

from functools import partial

import numpy as np

from trnsim.device.errors import BadInput

from ..schedule import Collective, Schedule
from . import levels, ring
from .compose import side_by_side

KINDS = levels.KINDS


def schedule(collective: Collective, places: np.ndarray, channels: int = 1) -> Schedule:
    """places: int[..], the group position at each coordinate of the torus; the last axis is first.

    Raises BadInput for other kinds, for `places` that does not hold each position once, and for
    channels other than 1, 2 and twice the number of dimensions.
    """
    if collective.kind not in KINDS:
        raise BadInput("collective of algorithm torus", collective.kind, KINDS)
    dims = np.ndim(places)
    if channels not in (1, 2, 2 * dims):
        raise BadInput("channels of algorithm torus", channels, sorted({1, 2, 2 * dims}))
    made = []
    for turn in range(max(1, channels // 2)):
        table = levels.Levels(np.moveaxis(places, range(dims), np.roll(range(dims), -turn)))
        for way in (1, -1)[:channels]:
            steps = [partial(ring.one_ring, way=way)] * dims
            parts, phases, order = levels.phases(collective, table, steps)
            blocks = tuple(b for phase in phases for b in phase)
            made.append(Schedule("torus", collective.ranks, parts, blocks, order))
        if channels > 2:
            made[-2:] = [side_by_side(made[-2:], collective.pieces, "torus")]
    return side_by_side(made, collective.pieces, "torus")
