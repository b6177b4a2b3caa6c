"""What a physical core runs, apart from how it waits and how bytes travel.

Three levels, each a generator that yields what it needs to the level below:

    execution   the program's part: yields `Barrier` and `Exchange`       (the executor's)
    Worker      a core: turns those into `Meet`, `Post`, `Take`           (here, pure)
    runtime     a thin shell that carries these three out                 (local.py, ray_*.py)

The pure core is the same in every runtime, and so are the bytes it computes. A shell answers `Take`
with the message and `Meet` and `Post` with nothing.
"""

import struct
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol

import msgpack
import numpy as np

from trnsim.collectives.execute import RankView, Round
from trnsim.collectives.schedule import Collective, Schedule
from trnsim.device.errors import CollectiveMismatch, DeadlineExceeded, TrnsimError

from ..arena import Arena

# --- what an execution sees and asks for -------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CoreAddress:
    """One physical core: core `core` of the `cores` that are logical core (rank) `rank`.

    `chip` counts from 0 over the cluster, `physical` from 0 on the chip; `node` is the simulated
    instance. `hbm_bytes` is the size of the rank's arena.
    """

    rank: int
    core: int
    cores: int
    chip: int
    physical: int
    hbm_bytes: int
    node: int = 0

    def __str__(self) -> str:
        place = f"chip {self.chip}, physical core {self.physical}, node {self.node}"
        return f"rank {self.rank} ({place})"


@dataclass(slots=True)
class Seat:
    """What an execution has: its place, its memory, what was loaded; `state` is its own."""

    address: CoreAddress
    arena: Arena
    loaded: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Barrier:
    """Continue when every physical core of the rank is here."""


@dataclass(frozen=True, slots=True, eq=False)
class Exchange:
    """Run this rank's part of a collective; core 0 of a rank yields it.

    `group` are the ranks in the collective's order and `me` is this rank's index there. Inputs and
    outputs are row-major arrays of any shape with the collective's dtype; each input goes to the
    output of the same index, which is written in place. `key` tells the collectives of a program
    apart, equally on all ranks.
    """

    key: int
    collective: Collective
    schedule: Schedule
    group: tuple[int, ...]
    me: int
    inputs: list[np.ndarray]
    outputs: list[np.ndarray]


Request = Barrier | Exchange
Execution = Generator[Request, None, Any]
Execute = Callable[[Seat, str, Any], Execution]
"""`execute(seat, call, argument)`: arguments and results are plain data (see `wire`)."""

# --- messages ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Call:
    """What a rank says that it is doing; all ranks of a group must say the same.

    `nbytes` is the collective's size by its own convention, not this rank's share.
    """

    key: int
    kind: str
    reduction: str
    nbytes: int
    dtype: str
    group: tuple[int, ...]

    def __str__(self) -> str:
        reduction = f"({self.reduction})" if self.reduction else ""
        ranks = ", ".join(map(str, self.group))
        return f"{self.kind}{reduction} #{self.key} of {self.nbytes} B {self.dtype} on [{ranks}]"


def call_of(exchange: Exchange) -> Call:
    """What an exchange is, for comparison between ranks."""
    return Call(
        key=exchange.key,
        kind=exchange.collective.kind,
        reduction=exchange.collective.reduction or "",
        nbytes=exchange.collective.nbytes,
        dtype=exchange.collective.dtype,
        group=tuple(exchange.group),
    )


_HEAD = struct.Struct("<iiI")  # source rank, round, length of call
_ALIGN = 16


@dataclass(frozen=True, slots=True)
class Message:
    """One transfer between two ranks; `call` is packed, because it is only compared."""

    source: int
    round: int
    call: bytes
    data: memoryview

    def pack(self) -> bytes:
        """The message as bytes; the data start on a multiple of 16 bytes."""
        head = _HEAD.pack(self.source, self.round, len(self.call))
        return b"".join((head, self.call, bytes(_padding(len(self.call))), self.data))

    @classmethod
    def unpack(cls, frame: bytes) -> "Message":
        """The message of `pack`."""
        source, turn, length = _HEAD.unpack_from(frame)
        stop = _HEAD.size + length
        data = memoryview(frame)[stop + _padding(length) :]
        return cls(source, turn, frame[_HEAD.size : stop], data)


def _padding(length: int) -> int:
    return -(_HEAD.size + length) % _ALIGN


def pack_call(call: Call) -> bytes:
    """A call as the bytes that travel in front of every message."""
    fields = (call.key, call.kind, call.reduction, call.nbytes, call.dtype, call.group)
    packed = msgpack.packb(fields)
    assert packed is not None
    return packed


def unpack_call(packed: bytes) -> Call:
    """The call of `pack_call`."""
    key, kind, reduction, nbytes, dtype, group = msgpack.unpackb(packed)
    return Call(key, kind, reduction, nbytes, dtype, tuple(group))


# --- what a core asks of its shell -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Meet:
    """Wait for the other physical core of the rank."""


@dataclass(frozen=True, slots=True)
class Post:
    """Send `message` to rank `peer`; do not wait."""

    peer: int
    message: Message


@dataclass(frozen=True, slots=True)
class Take:
    """Wait for the next message from rank `peer`, which should be of this call and round."""

    peer: int
    call: bytes
    round: int


Event = Meet | Post | Take
Run = Generator[Event, Message | None, Any]


@dataclass(frozen=True, slots=True)
class Wait:
    """Why a core stands still: at its rank's barrier (`call` empty), or for rank `peer`."""

    address: CoreAddress
    peer: int
    call: bytes = b""
    round: int = 0

    def __str__(self) -> str:
        if not self.call:
            return f"{self.address} waits at the barrier of its physical cores"
        what = f"round {self.round} of {unpack_call(self.call)}"
        return f"{self.address} waits for rank {self.peer} in {what}"


class Worker:
    """One physical core, whatever carries its messages."""

    def __init__(self, address: CoreAddress, arena: Arena, execute: Execute) -> None:
        self.address = address
        self.seat = Seat(address, arena)
        self._execute = execute

    def load(self, name: str, value: Any) -> None:
        """Keep a program (or anything else) for later calls."""
        self.seat.loaded[name] = value

    def run(self, call: str, argument: Any) -> Run:
        """Execute one call; the generator's value is the call's result."""
        execution = self._execute(self.seat, call, argument)
        while True:
            try:
                request = next(execution)
            except StopIteration as stop:
                return stop.value
            if isinstance(request, Exchange):
                yield from self._exchange(request)
            elif self.address.cores > 1:
                yield Meet()

    def _exchange(self, exchange: Exchange) -> Run:
        call = pack_call(call_of(exchange))
        for given, result in zip(exchange.inputs, exchange.outputs, strict=True):
            ends = flat(given), flat(result)
            view = RankView(exchange.collective, exchange.schedule, exchange.me, *ends)
            for step in view.rounds():
                yield from self._round(exchange, call, step)
            view.finish()

    def _round(self, exchange: Exchange, call: bytes, step: Round) -> Run:
        for send in step.sends:
            peer = exchange.group[send.peer]
            yield Post(peer, self._message(step.index, call, send.payload()))
        for receive in step.receives:
            message = yield Take(exchange.group[receive.peer], call, step.index)
            assert message is not None
            receive.apply(np.frombuffer(message.data, exchange.outputs[0].dtype))

    def _message(self, turn: int, call: bytes, payload: np.ndarray) -> Message:
        # A copy: the payload is a view of memory that later rounds change.
        return Message(self.address.rank, turn, call, memoryview(payload.tobytes()))


def flat(array: np.ndarray) -> np.ndarray:
    """The same memory with one axis. Raises ValueError for an array that is not row-major."""
    if not array.flags.c_contiguous:
        raise ValueError(f"an exchange needs row-major arrays, not strides {array.strides}")
    return array.reshape(-1)


def check_message(message: Message, take: Take, rank: int) -> None:
    """Raise CollectiveMismatch, naming both ranks and calls, unless the message is as expected."""
    if (message.call, message.round) == (take.call, take.round):
        return
    mine, other = unpack_call(take.call), unpack_call(message.call)
    raise CollectiveMismatch(
        f"rank {rank} is in round {take.round} of {mine},"
        f" but rank {message.source} sent it round {message.round} of {other}"
    )


# --- when nothing moves ------------------------------------------------------------------------


def explain(waits: Sequence[Wait], finished: Iterable[CoreAddress]) -> TrnsimError:
    """The error of cores that wait for each other without end.

    A CollectiveMismatch where two ranks wait in different calls or one has finished; otherwise a
    DeadlineExceeded. The message names the ranks with what they wait for; a cycle as a cycle.
    """
    by_rank = {wait.address.rank: wait for wait in waits if wait.call}
    done = {address.rank for address in finished}
    for wait in by_rank.values():
        other = by_rank.get(wait.peer)
        if other is not None and other.call != wait.call and _in_group(wait, other):
            return CollectiveMismatch(
                f"rank {wait.address.rank} calls {unpack_call(wait.call)},"
                f" but rank {wait.peer} calls {unpack_call(other.call)}"
            )
        if other is None and wait.peer in done:
            return CollectiveMismatch(f"{wait}, but rank {wait.peer} has finished")
    cycle = _cycle({rank: wait.peer for rank, wait in by_rank.items()})
    story = "; ".join(map(str, waits))
    if cycle:
        story = f"ranks {' -> '.join(map(str, cycle))} wait for each other: {story}"
    return DeadlineExceeded(f"nothing moves: {story}")


def _in_group(wait: Wait, other: Wait) -> bool:
    """Whether the other's call concerns this rank too, so that it should be in it."""
    return wait.address.rank in unpack_call(other.call).group


def _cycle(waits_for: dict[int, int]) -> list[int]:
    """A cycle of ranks, first rank repeated at the end; empty if there is none."""
    for start in waits_for:
        path = [start]
        while (following := waits_for.get(path[-1])) is not None:
            if following in path:
                return [*path[path.index(following) :], following]
            path.append(following)
    return []


# --- the runtime's interface -------------------------------------------------------------------


class Runtime(Protocol):
    """Physical cores that run calls. Use as a context manager: leaving it releases everything."""

    def open(self, cores: Sequence[CoreAddress], execute: Execute) -> None:
        """Set up the cores. Those of one rank follow each other, core 0 first."""
        ...

    def load(self, name: str, payload: bytes) -> None:
        """Give every core the object of a wire document, as `seat.loaded[name]`."""
        ...

    def call(self, call: str, arguments: Sequence[Any] | None = None) -> list[Any]:
        """Run `execute(seat, call, arguments[i])` on core `i`, for all cores; their results.

        Raises what a core raised; CoreLost; CollectiveMismatch; DeadlineExceeded. After an error
        the cores are gone.
        """
        ...

    def close(self) -> None:
        """Release the cores; harmless when repeated."""
        ...

    def __enter__(self) -> "Runtime": ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


def spread(arguments: Sequence[Any] | None, cores: int) -> Sequence[Any]:
    """One argument for each core. Raises ValueError for another number of them."""
    if arguments is None:
        return [None] * cores
    if len(arguments) != cores:
        raise ValueError(f"{len(arguments)} arguments for {cores} cores")
    return arguments
