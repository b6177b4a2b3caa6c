"""A schedule on real buffers.

`execute` runs all ranks in this process. It steps the same `RankView`s that a distributed runtime
steps one per rank, so both give the same bytes by construction.

Protocol for one rank of a distributed runtime::

    view = RankView(collective, schedule, rank, input, output)
    for step in view.rounds():
        for send in step.sends:           # take and post all payloads of the round first
            post(send.peer, send.payload())
        for receive in step.receives:     # then apply the messages, in this order
            receive.apply(wait_for(receive.peer))
    view.finish()

- All chunks of a round between one pair of ranks are one message, a 1-D array of the collective's
  dtype with `count` elements. A pair never has two messages in one round, and empty messages do not
  exist on either side. Messages of a pair arrive in the order sent; `step.index` can tag them.
- `payload()` may be a view of this rank's buffers: it is valid until the first `apply` of the same
  round. A runtime that does not copy it on posting must copy it itself.
- `apply` in the order of `receives` fixes the order of reduction, hence the bits. What a rank sends
  itself (its own contribution, in its turn) is no message: it is put with the one next to it.
- A rank may run ahead of others; a round with neither sends nor receives is still yielded.

Reducing transfers compute in float32 and round to the dtype at each transfer, as the DMA path does
(f32 and f64 in their own precision, integers exactly and wrapping, i1 as logic).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import pairwise

import numpy as np

from trnsim.device.dtypes import dtype_name, is_float, numpy_dtype
from trnsim.device.errors import CollectiveMismatch, TrnsimError

from .schedule import Block, Collective, Schedule, Slot

_UFUNCS: dict[str, np.ufunc] = {
    "add": np.add,
    "multiply": np.multiply,
    "minimum": np.minimum,
    "maximum": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
}
_LOGIC = {
    "add": np.logical_or,
    "multiply": np.logical_and,
    "minimum": np.logical_and,
    "maximum": np.logical_or,
    "and": np.logical_and,
    "or": np.logical_or,
}


def combine(reduction: str, held: np.ndarray, arrived: np.ndarray, out: np.ndarray) -> None:
    """out = held (op) arrived for one reducing transfer; `out` may be `held`."""
    dtype = held.dtype
    if dtype == np.bool_:
        _LOGIC[reduction](held, arrived, out=out)
        return
    small = is_float(dtype_name(dtype)) and dtype.itemsize < 4
    with np.errstate(all="ignore"):
        if small:
            wide = _UFUNCS[reduction](held.astype(np.float32), arrived.astype(np.float32))
            out[...] = wide.astype(dtype)
        else:
            _UFUNCS[reduction](held, arrived, out=out)


@dataclass(frozen=True)
class Send:
    """One message out: to `peer`, `count` elements, taken by `payload()`."""

    peer: int
    count: int
    payload: Callable[[], np.ndarray]


@dataclass(frozen=True)
class Receive:
    """One message in: from `peer`, `count` elements, put in place by `apply(message)`."""

    peer: int
    count: int
    apply: Callable[[np.ndarray], None]


@dataclass(frozen=True)
class Round:
    """What one rank does in one round. `index` counts the rounds of the whole schedule."""

    index: int
    sends: tuple[Send, ...]
    receives: tuple[Receive, ...]


class RankView:
    """One rank's part of a schedule, over its own 1-D buffers.

    `input` is read and `output` written; for an all_reduce they may be the same memory (any other
    overlap costs a copy of the input). An input that is not read may have any length: broadcast to
    a rank that is not the root, permute from a rank that is no source. So may an output that is not
    written: that of a gather or reduce on a rank that is not the root.
    """

    def __init__(
        self,
        collective: Collective,
        schedule: Schedule,
        rank: int,
        input: np.ndarray,
        output: np.ndarray,
    ) -> None:
        self.collective, self.schedule, self.rank, self.output = collective, schedule, rank, output
        self._part = _part(collective, schedule, rank)
        self._part.check("input", input)
        self._part.check("output", output)
        whole = collective.kind in ("all_reduce", "reduce", "barrier") and _same(input, output)
        source = input if whole or not np.may_share_memory(input, output) else input.copy()
        self._held = {chunk: source[where] for chunk, where in self._part.inputs.items()}
        self._final = {chunk: output[where] for chunk, where in self._part.outputs.items()}
        self._staged: set[int] = set()

    def rounds(self) -> Iterator[Round]:
        """The rounds in order; finish each one (see the protocol) before asking for the next."""
        for index, (out, into) in enumerate(self._part.steps):
            sends = tuple(Send(m.peer, m.count, partial(self._payload, m)) for m in out)
            turns = self._turns(into)
            yield Round(index, sends, tuple(self._receives(turns)))
            if all(data is not None for _, data in turns):  # nothing but what it sends itself
                self._apply(turns, np.empty(0))

    def finish(self) -> None:
        """Move what is not in its output place yet; zeros for a rank that a permute skips."""
        if not self._final and self.collective.kind == "permute":
            self.output[...] = 0
        for chunk, place in self._final.items():
            held = self._held.get(chunk)
            if held is place or not place.size:
                continue  # empty chunks do not travel
            if held is None:
                raise TrnsimError(f"rank {self.rank}: chunk {chunk} never arrived")
            if not _same(held, place):
                place[...] = held

    def _payload(self, message: "_Message") -> np.ndarray:
        missing = [chunk for chunk in message.chunks if chunk not in self._held]
        if missing:
            raise TrnsimError(f"rank {self.rank}: sends chunk {missing[0]} before it has it")
        parts = [self._held[chunk] for chunk in message.chunks]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _turns(self, into: "list[_Message]") -> "list[tuple[_Message, np.ndarray | None]]":
        """Messages in their turn, with the data of those that the rank sends itself."""
        own = (m.peer == self.rank for m in into)
        return [(m, self._payload(m).copy() if o else None) for m, o in zip(into, own, strict=True)]

    def _receives(self, turns: "list[tuple[_Message, np.ndarray | None]]") -> "Iterator[Receive]":
        """Messages from others; what the rank sends itself is put with the one next to it."""
        others = [i for i, (_, data) in enumerate(turns) if data is None]
        cuts = pairwise([0, *others[1:], len(turns)]) if others else ()
        for i, (start, stop) in zip(others, cuts, strict=True):
            message = turns[i][0]
            yield Receive(message.peer, message.count, partial(self._apply, turns[start:stop]))

    def _apply(
        self, turns: "list[tuple[_Message, np.ndarray | None]]", arrived: np.ndarray
    ) -> None:
        for message, data in turns:
            if data is None:
                self._check(message, arrived)
            self._put(message, arrived if data is None else data)

    def _check(self, message: "_Message", data: np.ndarray) -> None:
        if data.size != message.count or data.dtype != self.output.dtype:
            raise CollectiveMismatch(
                f"{self.collective.kind}: rank {self.rank} expects {message.count} elements of "
                f"{self.collective.dtype} from rank {message.peer}, "
                f"got {data.size} of {data.dtype}"
            )

    def _put(self, message: "_Message", data: np.ndarray) -> None:
        at = 0
        for chunk, reduce in zip(message.landed, message.reduce, strict=True):
            count = self._part.counts[chunk]
            self._receive(chunk, data[at : at + count], reduce)
            at += count

    def _receive(self, chunk: int, data: np.ndarray, reduce: bool) -> None:
        if reduce and chunk not in self._held:
            raise TrnsimError(f"rank {self.rank}: reduces into chunk {chunk} before it has it")
        place = self._place(chunk)
        if reduce:
            combine(str(self.collective.reduction), self._held[chunk], data, out=place)
        else:
            place[...] = data
        self._held[chunk] = place

    def _place(self, chunk: int) -> np.ndarray:
        """Where an arriving chunk goes: its output slot, or staging of its own."""
        if chunk in self._final:
            return self._final[chunk]
        if chunk in self._staged:
            return self._held[chunk]
        self._staged.add(chunk)
        return np.empty(self._part.counts[chunk], self.output.dtype)


@dataclass(frozen=True, slots=True)
class _Message:
    """Chunks of one round between one pair of ranks; `peer` is the other one.

    chunks: their ids at the source; landed: at the destination.
    """

    peer: int
    count: int
    chunks: tuple[int, ...]
    landed: tuple[int, ...]
    reduce: tuple[bool, ...]


Steps = list[tuple[list[_Message], list[_Message]]]


class _Part:
    """What a rank does in a schedule, apart from its buffers: the same at every call."""

    def __init__(self, collective: Collective, schedule: Schedule, rank: int) -> None:
        self.collective, self.schedule, self.rank = collective, schedule, rank
        self.counts = _chunk_counts(collective, schedule)
        self.inputs = self._slices(collective.inputs(rank))
        self.outputs = self._slices(collective.outputs(rank))
        self.sizes = {
            "input": collective.input_count(rank) if self.inputs else None,
            "output": collective.output_count(rank) if self.outputs else None,
        }
        self.dtype = numpy_dtype(collective.dtype)

    @cached_property
    def steps(self) -> Steps:
        """(messages out, messages in) of every round."""
        steps: Steps = []
        for block in self.schedule.flat.blocks:
            mine = np.flatnonzero((block.src == self.rank) | (block.dst == self.rank))
            steps += [self._step(block, repetition, mine) for repetition in range(block.count)]
        return steps

    def check(self, name: str, buffer: np.ndarray) -> None:
        """Raise CollectiveMismatch unless the buffer is what the collective reads or writes."""
        where = f"{self.collective.kind}: {name} of rank {self.rank}"
        if buffer.dtype != self.dtype:
            raise CollectiveMismatch(
                f"{where} is {dtype_name(buffer.dtype)}, the collective is {self.collective.dtype}"
            )
        if buffer.ndim != 1:
            raise CollectiveMismatch(f"{where} has {buffer.ndim} dimensions, must have 1")
        if self.sizes[name] not in (None, buffer.size):
            raise CollectiveMismatch(
                f"{where} has {buffer.size} elements, the collective has {self.sizes[name]}"
            )

    def _slices(self, slots: Iterable[Slot]) -> dict[int, slice]:
        """chunk -> where it is in the buffer, for all chunks of the slots."""
        found = {}
        place = _places(self.collective, self.schedule)
        for slot in slots:
            at = slot.offset
            for chunk in place[slot.piece].tolist():
                found[chunk] = slice(at, at + self.counts[chunk])
                at += self.counts[chunk]
        return found

    def _step(
        self, block: Block, repetition: int, mine: np.ndarray
    ) -> tuple[list[_Message], list[_Message]]:
        out: dict[int, list[tuple[int, int, bool]]] = {}
        into: dict[int, list[tuple[int, int, bool]]] = {}
        rows, ids = block.expand(repetition, mine)
        ends = (block.src[rows].tolist(), block.dst[rows].tolist(), block.reduce[rows].tolist())
        landed = block.landed(rows, ids).tolist()
        for src, dst, reduce, chunk, there in zip(*ends, ids.tolist(), landed, strict=True):
            box, peer = (into, src) if dst == self.rank else (out, dst)
            content = box.setdefault(peer, [])  # also of an empty chunk: it keeps its turn
            if self.counts[chunk]:
                content.append((chunk, there, reduce))
        return self._messages(out), self._messages(into)

    def _messages(self, boxes: dict[int, list[tuple[int, int, bool]]]) -> list[_Message]:
        made = []
        for peer, content in boxes.items():
            if not content:
                continue
            chunks, landed, reduce = zip(*content, strict=True)
            count = sum(self.counts[c] for c in chunks)
            made.append(_Message(peer, count, chunks, landed, reduce))
        return made


@lru_cache(maxsize=1024)
def _part(collective: Collective, schedule: Schedule, rank: int) -> _Part:
    return _Part(collective, schedule, rank)


@lru_cache(maxsize=64)
def _chunk_counts(collective: Collective, schedule: Schedule) -> list[int]:
    return schedule.chunk_counts(collective).tolist()  # the same for all ranks


@lru_cache(maxsize=64)
def _places(collective: Collective, schedule: Schedule) -> np.ndarray:
    return schedule.place_of(collective.pieces)


def execute(
    collective: Collective, schedule: Schedule, inputs: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Run the schedule on all ranks in this process: one 1-D input per rank, new outputs.

    Raises CollectiveMismatch naming the first rank whose input has another size or dtype.
    """
    if len(inputs) != collective.ranks:
        raise CollectiveMismatch(
            f"{collective.kind}: {len(inputs)} inputs for {collective.ranks} ranks"
        )
    dtype = numpy_dtype(collective.dtype)
    outputs = [np.empty(collective.output_count(r), dtype) for r in range(collective.ranks)]
    run_views(make_views(collective, schedule, inputs, outputs))
    return outputs


def make_views(
    collective: Collective,
    schedule: Schedule,
    inputs: Sequence[np.ndarray],
    outputs: Sequence[np.ndarray],
) -> list[RankView]:
    """The view of every rank. Sizes and dtypes of all are checked before any data moves."""
    pairs = enumerate(zip(inputs, outputs, strict=True))
    return [RankView(collective, schedule, rank, a, b) for rank, (a, b) in pairs]


def run_views(views: Sequence[RankView]) -> None:
    """Step all views of one group together, and finish them."""
    for steps in zip(*(view.rounds() for view in views), strict=True):
        mail = {
            (view.rank, send.peer): send.payload().copy()
            for view, step in zip(views, steps, strict=True)
            for send in step.sends
        }
        for view, step in zip(views, steps, strict=True):
            for receive in step.receives:
                receive.apply(mail[receive.peer, view.rank])
    for view in views:
        view.finish()


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two 1-D arrays are the same memory, element for element."""
    return a.size == b.size and a.strides == b.strides and a.ctypes.data == b.ctypes.data
