"""Schedules made of schedules: shares side by side, time reversed, and pipelines of chunks."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from ..schedule import Block, Schedule, block

_COLUMNS = ("src", "dst", "base", "span", "step", "reduce")


def side_by_side(shares: Sequence[Schedule], pieces: int, name: str) -> Schedule:
    """Every share does the whole collective on its own part of every piece, all at once.

    Shares use channels of their own. If their rounds go together (same counts, same subgroups) they
    are one round; otherwise each share is a lane. All shares must have the same `parts`.
    """
    if len(shares) == 1:
        return replace(shares[0], algorithm=name)
    parts, ranks = shares[0].parts, shares[0].ranks
    size, channels = pieces * parts, max(share.channels for share in shares)
    moved = [
        [moved_on(b, i * size, channel=i * channels) for b in share.blocks]
        for i, share in enumerate(shares)
    ]
    if _alike(shares):
        blocks = [_merged(together) for together in zip(*moved, strict=True)]
    else:
        blocks = in_lanes(moved)
    order = shares_order(shares, pieces)
    return Schedule(name, ranks, parts * len(shares), tuple(blocks), order)


def shares_order(shares: Sequence[Schedule], pieces: int) -> np.ndarray | None:
    """`Schedule.order` if share i has the chunks from i * pieces * parts on."""
    parts, all_parts = shares[0].parts, sum(share.parts for share in shares)
    if pieces == 1 and all(share.order is None for share in shares):
        return None
    natural = []
    for i, share in enumerate(shares):
        piece, part = np.divmod(share.natural(pieces), parts)
        natural.append(piece * all_parts + i * parts + part)
    return np.concatenate(natural)


def in_lanes(lists: Sequence[Sequence[Block]]) -> list[Block]:
    """The blocks of every list in lanes of their own, in turns."""
    turns = max((len(blocks) for blocks in lists), default=0)
    lanes = [1 + max((b.lane for b in blocks), default=0) for blocks in lists]
    return [
        replace(blocks[turn], lane=blocks[turn].lane + sum(lanes[:i]))
        for turn in range(turns)
        for i, blocks in enumerate(lists)
        if turn < len(blocks)
    ]


def moved_on(b: Block, chunks: int, *, channel: int = 0) -> Block:
    """The block on chunks and channels with higher numbers."""
    return replace(b, offset=plus(b.offset, chunks), channel=plus(b.channel, channel))


def times(column: np.ndarray, factor: int) -> np.ndarray:
    """The product; a single number for all transfers stays one."""
    if column.strides == (0,) and len(column):
        return np.broadcast_to(column[:1] * column.dtype.type(factor), column.shape)
    return column * column.dtype.type(factor)


def plus(column: np.ndarray, more: int) -> np.ndarray:
    """The sum; a single number for all transfers stays one."""
    if column.strides == (0,) and len(column):
        return np.broadcast_to(column[:1] + column.dtype.type(more), column.shape)
    return column + column.dtype.type(more) if more else column


def mirrored(schedule: Schedule, *, reduce: bool) -> Schedule:
    """The schedule backwards in time, with all transfers turned round.

    What spreads chunks over trees then gathers them: a broadcast becomes a reduce, an all_gather a
    reduce_scatter, a scatter (reduce=False) a gather. Right only if every rank gets every chunk at
    most once; rounds without fused transfers only.
    """
    blocks = tuple(_turned(b, reduce) for b in reversed(schedule.blocks))
    return replace(schedule, blocks=blocks)


def pipelined(
    src: np.ndarray,
    dst: np.ndarray,
    start: np.ndarray,
    chunks: int,
    *,
    offset: int | np.ndarray = 0,
    reduce: bool | np.ndarray = False,
    channel: int | np.ndarray = 0,
) -> list[Block]:
    """Transfers that each move chunks offset + 0, 1, .. chunks - 1 in rounds start, start + 1, ..

    One block for each stretch of rounds in which the same transfers are active.
    """
    columns = [np.broadcast_to(c, np.shape(src)) for c in (offset, reduce, channel)]
    blocks = []
    for first, last in pairwise(np.unique([*start, *(start + chunks)]).tolist()):
        on = np.flatnonzero((start <= first) & (first < start + chunks))
        if not on.size:
            continue
        made = block(
            src[on],
            dst[on],
            first - start[on],
            step=1,
            count=last - first,
            modulus=chunks,
            offset=columns[0][on],
            reduce=columns[1][on],
            channel=columns[2][on],
        )
        blocks.append(made)
    return blocks


def _alike(shares: Sequence[Schedule]) -> bool:
    """Whether the rounds of all shares can be merged one by one."""
    first = shares[0].blocks
    return all(
        len(s.blocks) == len(first) and all(map(_together, s.blocks, first)) for s in shares[1:]
    )


def _together(a: Block, b: Block) -> bool:
    same = (a.count, a.modulus, a.lane) == (b.count, b.modulus, b.lane)
    return same and a.who is b.who and np.array_equal(_shift(a), _shift(b))


def _shift(b: Block) -> np.ndarray:
    return np.zeros(b.replicas, np.int64) if b.shift is None else b.shift


def _merged(blocks: Sequence[Block]) -> Block:
    fused = None
    if any(b.fused is not None for b in blocks):
        fused = np.concatenate(
            [np.zeros(len(b.src), bool) if b.fused is None else b.fused for b in blocks]
        )
    columns = {f: np.concatenate([getattr(b, f) for b in blocks]) for f in _COLUMNS}
    offset = np.concatenate([b.offset for b in blocks])
    channel = np.concatenate([b.channel for b in blocks])
    return replace(blocks[0], offset=offset, channel=channel, fused=fused, **columns)


def _turned(b: Block, reduce: bool) -> Block:
    assert b.fused is None, "a fused transfer has no mirror image"
    return replace(
        b,
        src=b.dst,
        dst=b.src,
        base=b.base + (b.count - 1) * b.step,
        step=-b.step,
        reduce=np.broadcast_to(np.bool_(reduce), b.src.shape),
    )
