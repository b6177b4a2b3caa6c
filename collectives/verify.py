"""Proof that a schedule does its collective, by running it on symbols.

Every chunk on every rank is the multiset of contributions that it holds. A transfer that sends what
its source does not have, or that makes the result depend on the order of writes, is refused too.
Cost is ranks * chunks * contributors, so cubic for all_reduce: meant for up to a few hundred ranks.
"""

import numpy as np

from trnsim.device.errors import TrnsimError

from .schedule import Block, Collective, Schedule

_COLUMNS = ("src", "dst", "base", "span", "offset", "step", "reduce")
_CAP = 2  # a contribution held twice is wrong however often: counts stop here and never overflow


class WrongSchedule(TrnsimError):
    """A schedule does not do its collective: the message names the first wrong rank and chunk."""


def verify(collective: Collective, schedule: Schedule) -> None:
    """Return if the schedule implements the collective, else raise WrongSchedule."""
    title = f"{collective.kind} of {collective.ranks} ranks by {schedule.algorithm}"
    _check_shape(collective, schedule, title)
    state = _initial(collective, schedule)
    for number, (block, repetition) in enumerate(schedule.each_round()):
        _apply(state, block, repetition, f"{title}, round {number}")
    _check_result(state, collective, schedule, title)


def _check_shape(collective: Collective, schedule: Schedule, title: str) -> None:
    n, pieces = collective.ranks, collective.pieces
    if schedule.ranks != n:
        raise WrongSchedule(f"{title}: the schedule is for {schedule.ranks} ranks")
    chunks = pieces * schedule.parts
    if not np.array_equal(np.sort(schedule.natural(pieces)), np.arange(chunks)):
        raise WrongSchedule(f"{title}: its order is not a permutation of {pieces} pieces")
    chunks *= schedule.copies
    for number, block in enumerate(schedule.flat.blocks):
        where = f"{title}, block {number}"
        for end, name in ((block.src, "source"), (block.dst, "destination")):
            _refuse(where, (end < 0) | (end >= n), f"{name} rank", end)
        alone = (block.src == block.dst) & ~_again(block)
        _refuse(where, alone, "sends to itself: rank", block.src)
        _refuse(where, (block.span < 0) | (block.span > block.modulus), "span", block.span)
        last = block.offset + block.modulus
        _refuse(where, (block.offset < 0) | (last > chunks), "chunk", last - 1)
        if block.into is not None:
            low, high = block.offset + block.into, last + block.into
            _refuse(where, (low < 0) | (high > chunks), "chunk at the destination", high - 1)
        if block.fused is not None:
            _refuse(where, block.fused & ~_joined(block), "fused transfer from rank", block.src)


def _joined(block: Block) -> np.ndarray:
    """bool[T]: whether a transfer could be one DMA operation with the one before it."""
    same = {f: getattr(block, f) == np.roll(getattr(block, f), 1) for f in _COLUMNS}
    chunks = same["base"] & same["span"] & same["offset"] & same["step"] & same["reduce"]
    joined = chunks & np.where(block.reduce, same["dst"], same["src"])
    joined[:1] = False
    return joined


def _again(block: Block) -> np.ndarray:
    """bool[T]: transfers that may be from a rank to itself.

    Between copies of a chunk, and where a rank adds what it had to a chunk that another transfer of
    the round fills.
    """
    filled = set(block.dst[~block.reduce].tolist())
    mine = [rank in filled for rank in block.dst.tolist()]
    again = block.reduce & np.array(mine, bool)
    return again if block.into is None else again | (block.into != 0)


def _refuse(where: str, wrong: np.ndarray, name: str, values: np.ndarray) -> None:
    if wrong.any():
        first = int(np.argmax(wrong))
        raise WrongSchedule(f"{where}, transfer {first}: {name} {values[first]} is out of range")


def _initial(collective: Collective, schedule: Schedule) -> np.ndarray:
    """uint8[rank, chunk, contributor]: one contributor suffices where nothing is reduced."""
    n, parts = collective.ranks, schedule.parts
    place = schedule.place_of(collective.pieces)
    chunks = collective.pieces * parts * schedule.copies
    state = np.zeros((n, chunks, n if collective.reducing else 1), np.uint8)
    for rank in range(n):
        for slot in collective.inputs(rank):
            state[rank, place[slot.piece], rank if collective.reducing else 0] = 1
    return state


def _apply(state: np.ndarray, block: Block, repetition: int, title: str) -> None:
    index, ids = block.expand(repetition)
    src, dst, reduce = block.src[index], block.dst[index], block.reduce[index]
    landed = block.landed(index, ids)
    payload = state[src, ids]  # a copy: all transfers read before any writes
    _must_hold(payload, src, ids, f"{title}: rank {{}} sends chunk {{}} that it does not hold")
    _must_hold(
        state[dst[reduce], landed[reduce]],
        dst[reduce],
        landed[reduce],
        f"{title}: rank {{}} reduces into chunk {{}} that it does not hold",
    )
    turn = np.argsort(_message_turn(block)[index], kind="stable")
    _must_not_race((dst * state.shape[1] + landed)[turn], reduce[turn], state.shape[1], title)
    state[dst[~reduce], landed[~reduce]] = payload[~reduce]
    _add(state, dst[reduce], landed[reduce], payload[reduce])


def _message_turn(block: Block) -> np.ndarray:
    """int64[T]: a pair's transfers are one message, which applies in the turn of the first."""
    pairs = block.src.astype(np.int64) << 32 | block.dst
    _, first, which = np.unique(pairs, return_index=True, return_inverse=True)
    return first[which]


def _add(state: np.ndarray, dst: np.ndarray, ids: np.ndarray, payload: np.ndarray) -> None:
    """Add rows to the chunks that they arrive in; several for one chunk take several passes."""
    while dst.size:
        _, now = np.unique(dst * state.shape[1] + ids, return_index=True)
        total = state[dst[now], ids[now]] + payload[now]
        state[dst[now], ids[now]] = np.minimum(total, _CAP)
        later = np.ones(len(dst), bool)
        later[now] = False
        dst, ids, payload = dst[later], ids[later], payload[later]


def _must_hold(held: np.ndarray, ranks: np.ndarray, ids: np.ndarray, message: str) -> None:
    empty = ~held.any(axis=-1)
    if empty.any():
        first = int(np.argmax(empty))
        raise WrongSchedule(message.format(ranks[first], ids[first]))


def _must_not_race(keys: np.ndarray, reduce: np.ndarray, chunks: int, title: str) -> None:
    """Of several transfers into one chunk in one round, only the first may overwrite."""
    values, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    wrong = (np.arange(len(keys)) != first[inverse]) & ~reduce
    if wrong.any():
        rank, chunk = divmod(int(values[inverse[np.argmax(wrong)]]), chunks)
        raise WrongSchedule(f"{title}: rank {rank} gets chunk {chunk} from several transfers")


def _check_result(
    state: np.ndarray, collective: Collective, schedule: Schedule, title: str
) -> None:
    place = schedule.place_of(collective.pieces)
    for rank in range(collective.ranks):
        for slot in collective.outputs(rank):
            chunks = np.sort(place[slot.piece])
            wrong = (state[rank, chunks] != 1).any(axis=-1)
            if wrong.any():
                chunk = int(chunks[np.argmax(wrong)])
                story = _story(state[rank, chunk], collective.reducing)
                raise WrongSchedule(f"{title}: rank {rank} ends with chunk {chunk} wrong: {story}")


def _story(held: np.ndarray, reducing: bool) -> str:
    if not reducing:
        return "it never arrives" if held[0] == 0 else "it is added to itself"
    missing = np.flatnonzero(held == 0).tolist()
    twice = np.flatnonzero(held > 1).tolist()
    stories = [f"without the contribution of ranks {missing}"] if missing else []
    stories += [f"with the contribution of ranks {twice} more than once"] if twice else []
    return ", ".join(stories)
