"""Who waits for whom: a simulation of the order of operations, without time and without data.

Every rank runs streams; every stream is a list of operations, done one after another. A call of a
collective ends when all members of its group have reached it on the stream of the same number; a
send and its receive end together; a wait ends when another stream of the same rank has got far
enough. Each operation is looked at a bounded number of times, so nothing that is put in makes this
hang: it ends with an order in which everything happens, or with an error that shows the waits.

There are no timers here: how long a wait may last is the caller's business.
"""

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from trnsim.device.errors import BadInput, CollectiveMismatch, TrnsimError

SHOWN = 8  # ranks that a message lists


@dataclass(frozen=True)
class Call:
    """A collective in a group of ranks, in this order. `what`: sizes, dtype, reduction, root; calls
    that meet must have equal kinds, groups and `what`.
    """

    kind: str
    group: tuple[int, ...]
    what: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.what}".strip()


@dataclass(frozen=True)
class Send:
    """A message to a rank; blocks until it is received."""

    to: int
    tag: int = 0

    def __str__(self) -> str:
        return f"send to rank {self.to}{_tag(self.tag)}"


@dataclass(frozen=True)
class Receive:
    """A message from a rank; blocks until it is sent."""

    source: int
    tag: int = 0

    def __str__(self) -> str:
        return f"receive from rank {self.source}{_tag(self.tag)}"


@dataclass(frozen=True)
class Wait:
    """Until the first `operations` of another stream of the same rank have ended."""

    stream: int
    operations: int

    def __str__(self) -> str:
        return f"wait for {self.operations} operations of stream {self.stream}"


Op = Call | Send | Receive | Wait
Programs = Mapping[int, Sequence[Sequence[Op]]]
"""rank -> streams -> operations in order."""


@dataclass(frozen=True)
class Stand:
    """Where a stream stands: at operation number `index`, which is `op`; None at its end."""

    rank: int
    stream: int
    index: int
    op: Op | None

    def __str__(self) -> str:
        where = f"rank {self.rank}" + (f" (stream {self.stream})" if self.stream else "")
        if self.op is None:
            return f"{where} -> at its end after {self.index} operations"
        group = f" -> group {_ranks(self.op.group)}" if isinstance(self.op, Call) else ""
        return f"{where} -> operation {self.index}: {self.op}{group}"


class Deadlock(TrnsimError):
    """Operations that can never end. `stands`: the chain of waits; each waits for the next one, and
    in a cycle the last one for the first.
    """

    def __init__(self, message: str, stands: Sequence[Stand]) -> None:
        super().__init__(message)
        self.stands = tuple(stands)


@dataclass(frozen=True)
class Meeting:
    """Operations that end together: (rank, stream, index) of each."""

    members: tuple[tuple[int, int, int], ...]


def meetings(programs: Programs, *, unreachable: Collection[int] = ()) -> list[Meeting]:
    """An order in which all operations end: deterministic, the lowest rank first.

    unreachable: ranks that no longer take part. Raises Deadlock with the waits, CollectiveMismatch
    for members of a group that call different things, BadInput for operations that make no sense.
    """
    members = _Members()
    _check(programs, members)
    return _Run(programs, frozenset(unreachable), members).all()


class _Members(dict[int, frozenset[int]]):
    """The set of each group; groups that many ranks share are looked at once."""

    def of(self, group: tuple[int, ...]) -> frozenset[int]:
        if id(group) not in self:
            self[id(group)] = frozenset(group)
        return self[id(group)]


@dataclass(eq=False)
class _Run:
    programs: Programs
    unreachable: frozenset[int]
    members: _Members
    at: dict[tuple[int, int], int] = field(default_factory=dict)
    calls: dict[tuple, dict[int, Call]] = field(default_factory=dict)
    messages: dict[tuple, deque[tuple[int, int]]] = field(default_factory=dict)
    waiters: dict[tuple[int, int], list[tuple[int, int]]] = field(default_factory=dict)
    todo: deque[tuple[int, int]] = field(default_factory=deque)
    done: list[Meeting] = field(default_factory=list)

    def all(self) -> list[Meeting]:
        for rank in sorted(self.programs):
            for stream in range(len(self.programs[rank])):
                self.at[rank, stream] = 0
                if rank not in self.unreachable:
                    self.todo.append((rank, stream))
        while self.todo:
            self._reach(*self.todo.popleft())
        stuck = [s for s in self._stands() if s.op is not None and s.rank not in self.unreachable]
        if stuck:
            raise self._deadlock(stuck)
        return self.done

    def _op(self, rank: int, stream: int) -> Op | None:
        ops, index = self.programs[rank][stream], self.at[rank, stream]
        return ops[index] if index < len(ops) else None

    def _stands(self) -> list[Stand]:
        return [Stand(r, s, index, self._op(r, s)) for (r, s), index in self.at.items()]

    def _reach(self, rank: int, stream: int) -> None:
        """A stream has come to its next operation."""
        match self._op(rank, stream):
            case Call() as call:
                self._call(rank, stream, call)
            case Send(to=to, tag=tag):
                self._message(("send", rank, to, tag), ("receive", rank, to, tag), rank, stream)
            case Receive(source=source, tag=tag):
                self._message(
                    ("receive", source, rank, tag), ("send", source, rank, tag), rank, stream
                )
            case Wait(stream=other, operations=operations):
                if self.at[rank, other] >= operations:
                    self._end([(rank, stream)])
                else:
                    self.waiters.setdefault((rank, other), []).append((rank, stream))

    def _call(self, rank: int, stream: int, call: Call) -> None:
        key = (self.members.of(call.group), stream)
        here = self.calls.setdefault(key, {})
        here[rank] = call
        if len(here) == len(call.group):
            if any(other != call for other in here.values()):
                raise CollectiveMismatch(self._mismatch(here, stream))
            del self.calls[key]
            self._end([(member, stream) for member in call.group])

    def _message(self, mine: tuple, other: tuple, rank: int, stream: int) -> None:
        partners = self.messages.get(other)
        if partners:
            self._end([partners.popleft(), (rank, stream)])
        else:
            self.messages.setdefault(mine, deque()).append((rank, stream))

    def _end(self, streams: list[tuple[int, int]]) -> None:
        self.done.append(Meeting(tuple(sorted((r, s, self.at[r, s]) for r, s in streams))))
        for key in streams:
            self.at[key] += 1
            self.todo.append(key)
        for key in streams:
            for waiter in self.waiters.pop(key, []):
                self.todo.append(waiter)

    def _mismatch(self, here: Mapping[int, Call], stream: int) -> str:
        callers: dict[Call, list[int]] = {}
        for rank in sorted(here):
            callers.setdefault(here[rank], []).append(rank)
        group = _ranks(sorted(here))
        calls = "; ".join(
            f"{_who(ranks)} {'calls' if len(ranks) == 1 else 'call'} operation"
            f" {self.at[ranks[0], stream]}: {call}"
            + ("" if list(call.group) == sorted(here) else f" in the order {_ranks(call.group)}")
            for call, ranks in callers.items()
        )
        return f"group {group}: its ranks call different collectives: {calls}"

    def _deadlock(self, stuck: list[Stand]) -> Deadlock:
        """The first chain of waits, which ends in a cycle, or at a rank that will never come."""
        chain, seen = [stuck[0]], {(stuck[0].rank, stuck[0].stream): 0}
        while True:
            following = self._awaited(chain[-1])
            if isinstance(following, str):
                return Deadlock(f"nothing moves: {_arrows(chain)}; {following}", chain)
            key = (following.rank, following.stream)
            if key in seen:
                cycle = chain[seen[key] :]
                return Deadlock(f"cycle of waits: {_arrows([*cycle, cycle[0]])}", cycle)
            seen[key] = len(chain)
            chain.append(following)

    def _awaited(self, stand: Stand) -> Stand | str:
        """The stream that keeps this one waiting, or why nothing will ever end its wait."""
        ways = list(self._missing(stand))
        for rank, stream in ways:  # a rank that can never come says more than one that waits too
            if rank in self.unreachable:
                return f"rank {rank} is unreachable"
            if rank not in self.programs:
                return f"rank {rank} has no program"
            if stream is None:
                return f"rank {rank} has no matching operation left"
            if self._op(rank, stream) is None:
                return str(Stand(rank, stream, self.at[rank, stream], None))
        rank, stream = ways[0]
        assert stream is not None
        return Stand(rank, stream, self.at[rank, stream], self._op(rank, stream))

    def _missing(self, stand: Stand) -> Iterator[tuple[int, int | None]]:
        """(rank, stream) that have not come yet; stream None if the rank has none that will."""
        match stand.op:
            case Call() as call:
                here = self.calls[self.members.of(call.group), stand.stream]
                for rank in call.group:
                    if rank not in here:
                        streams = len(self.programs.get(rank, ()))
                        yield rank, stand.stream if stand.stream < streams else None
            case Send(to=to, tag=tag):
                yield to, self._stream_with(to, Receive(stand.rank, tag))
            case Receive(source=source, tag=tag):
                yield source, self._stream_with(source, Send(stand.rank, tag))
            case Wait(stream=stream):
                yield stand.rank, stream

    def _stream_with(self, rank: int, op: Op) -> int | None:
        """The first stream of a rank that still has this operation before it."""
        for stream, ops in enumerate(self.programs.get(rank, ())):
            if op in ops[self.at[rank, stream] :]:
                return stream
        return None


def _check(programs: Programs, members: _Members) -> None:
    for rank, streams in programs.items():
        for stream, ops in enumerate(streams):
            for index, op in enumerate(ops):
                _check_op(op, (rank, stream, index), streams, members)


def _check_op(
    op: Op, where: tuple[int, int, int], streams: Sequence[Sequence[Op]], members: _Members
) -> None:
    rank, stream, _ = where
    match op:
        case Call(group=group):
            ranks = members.of(group)
            if rank not in ranks:
                raise _bad(where, "group", list(group), f"a group with rank {rank} in it")
            if len(ranks) != len(group):
                raise _bad(where, "group", list(group), "each rank once")
        case Wait(stream=other, operations=operations):
            if not 0 <= other < len(streams) or other == stream:
                raise _bad(where, "stream", other, "another stream of the rank")
            if not 0 <= operations <= len(streams[other]):
                allowed = f"0..{len(streams[other])}"
                raise _bad(where, f"operations of stream {other}", operations, allowed)


def _bad(where: tuple[int, int, int], name: str, value: object, allowed: str) -> BadInput:
    rank, stream, index = where
    return BadInput(f"rank {rank}, stream {stream}, operation {index}, {name}", value, allowed)


def _tag(tag: int) -> str:
    return f" with tag {tag}" if tag else ""


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:SHOWN]))
    return f"[{shown}]" if len(ranks) <= SHOWN else f"[{shown}, ... {len(ranks)} ranks]"


def _who(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:SHOWN]))}{more}"


def _arrows(stands: Sequence[Stand]) -> str:
    return ", waits for ".join(map(str, stands))
