"""KangaRing: only one rank of each unit of neighbours on a chip rides the ring.

The ranks of a chip are cut into units of one *primary* and its *secondaries*. Primaries form the
ring, so it has half as many hops (for one secondary each). Secondaries are reached by the DMA
engines themselves: an arriving chunk is written twice (one read, two writes), and a reducing hop
adds the secondary's contribution on the way (three reads, one write). Per hop of a unit of two,
all_gather then touches HBM 3 times instead of 4, and reduce_scatter 4 times instead of 6.

Source: AWS Neuron documentation, "intra-node collective communication" (SDK 2.32). It needs all
ranks of a chip in the group. Several rings (edge-disjoint cycles over the chips) share the data;
primaries change from ring to ring, so that all ranks' DMA engines take part.
"""

from collections.abc import Sequence

import numpy as np

from trnsim.device.errors import BadInput

from ..schedule import Block, Collective, Schedule, block
from .compose import side_by_side

KINDS = ("all_reduce", "all_gather", "reduce_scatter")
MOST_SECONDARIES = 3  # the runtime's header nec.h


def schedule(
    collective: Collective,
    chips: np.ndarray | Sequence[Sequence[int]],
    order: Sequence[int] | np.ndarray | None = None,
    secondaries: int = 1,
) -> Schedule:
    """chips: int[C, k] group positions on each chip. order: int[C] or int[channels, C], the chips
    along each ring (default: as they are).

    Raises BadInput for other kinds and numbers of secondaries, for chips that do not hold each
    position once, and for k that is no multiple of 1 + secondaries.
    """
    if collective.kind not in KINDS:
        raise BadInput("collective of algorithm kangaring", collective.kind, KINDS)
    if not 1 <= secondaries <= MOST_SECONDARIES:
        raise BadInput("secondaries of algorithm kangaring", secondaries, f"1..{MOST_SECONDARIES}")
    table, size = np.asarray(chips, np.int64), 1 + secondaries
    if not np.array_equal(np.sort(table, axis=None), np.arange(collective.ranks)):
        raise BadInput("chips", table.tolist(), f"each of 0..{collective.ranks - 1} once")
    if table.shape[1] % size:
        wanted = f"a multiple of {size} (kangaring: a primary and its secondaries)"
        raise BadInput("ranks per chip", table.shape[1], wanted)
    orders = np.atleast_2d(np.arange(len(table)) if order is None else order)
    make = {"all_reduce": _all_reduce, "all_gather": _all_gather}
    build = make.get(collective.kind, _reduce_scatter)
    rings = []
    for channel, row in enumerate(orders):
        units = table[row].reshape(-1, size)
        rings.append(build(np.roll(units, channel, axis=1)))
    return side_by_side(rings, collective.pieces, "kangaring")


def _all_reduce(units: np.ndarray) -> Schedule:
    """units: int[U, 1 + secondaries] ranks; chunk u is unit u's."""
    rounds = [_own(units, 1), _reduce_ring(units, 1), _spread(units), _gather_ring(units, 1)]
    return _schedule(units, len(units), rounds, None)


def _reduce_scatter(units: np.ndarray) -> Schedule:
    """Chunks u * size .. belong to the ranks of unit u, in order."""
    size = units.shape[1]
    rounds = [_own(units, size), _reduce_ring(units, size), _hand_over(units)]
    return _schedule(units, 1, rounds, units.reshape(-1))


def _all_gather(units: np.ndarray) -> Schedule:
    size = units.shape[1]
    return _schedule(units, 1, [_meet(units), _gather_ring(units, size)], units.reshape(-1))


def _schedule(
    units: np.ndarray, parts: int, blocks: list[Block], order: np.ndarray | None
) -> Schedule:
    kept = tuple(b for b in blocks if b.transfers and b.count)
    return Schedule("kangaring", units.size, parts, kept, order)


def _own(units: np.ndarray, run: int) -> Block:
    """Secondaries add to their primary the first run of chunks that it sends: the unit's before."""
    count, size = units.shape
    before = np.repeat(np.arange(-1, count - 1) * run, size - 1)
    return block(
        units[:, 1:].reshape(-1),
        np.repeat(units[:, 0], size - 1),
        before,
        span=run,
        modulus=count * run,
        reduce=True,
        fused=np.tile(np.arange(size - 1) > 0, count),
    )


def _reduce_ring(units: np.ndarray, run: int) -> Block:
    """Round k: primary u - 1 sends run u - 2 - k to primary u, which adds its secondaries' too."""
    count, size = units.shape
    givers = np.column_stack([units[:, 1:], np.roll(units[:, 0], 1)])
    first = np.arange(-2, count - 2) * run
    return block(
        givers.reshape(-1),
        np.repeat(units[:, 0], size),
        np.repeat(first, size),
        span=run,
        step=-run,
        count=count - 1,
        modulus=count * run,
        reduce=True,
        fused=np.tile(np.arange(size) > 0, count),
    )


def _gather_ring(units: np.ndarray, run: int) -> Block:
    """Round k: primary u sends run u - k to all of unit u + 1 by one read and several writes."""
    count, size = units.shape
    return block(
        np.repeat(units[:, 0], size),
        np.roll(units, -1, axis=0).reshape(-1),
        np.repeat(np.arange(count) * run, size),
        span=run,
        step=-run,
        count=count - 1,
        modulus=count * run,
        fused=np.tile(np.arange(size) > 0, count),
    )


def _spread(units: np.ndarray) -> Block:
    """Every primary gives its unit's chunk to its secondaries."""
    count, size = units.shape
    return block(
        np.repeat(units[:, 0], size - 1),
        units[:, 1:].reshape(-1),
        np.repeat(np.arange(count), size - 1),
        modulus=count,
        fused=np.tile(np.arange(size - 1) > 0, count),
    )


def _hand_over(units: np.ndarray) -> Block:
    """Every primary gives each secondary its own chunk."""
    count, size = units.shape
    chunks = np.arange(units.size).reshape(count, size)[:, 1:]
    source = np.repeat(units[:, 0], size - 1)
    return block(source, units[:, 1:].reshape(-1), chunks.reshape(-1), modulus=units.size)


def _meet(units: np.ndarray) -> Block:
    """The ranks of a unit exchange their own chunks."""
    count, size = units.shape
    giver, taker = np.divmod(np.arange(size * size), size)
    giver, taker = giver[giver != taker], taker[giver != taker]
    chunks = np.arange(units.size).reshape(count, size)[:, giver]
    return block(
        units[:, giver].reshape(-1),
        units[:, taker].reshape(-1),
        chunks.reshape(-1),
        modulus=units.size,
        fused=np.tile((np.arange(len(giver)) % max(1, size - 1)) > 0, count),
    )
