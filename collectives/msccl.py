"""MSCCL algorithms: their XML to a Collective and a Schedule, verified.

    collective, schedule = read_msccl(text)
    collective = replace(collective, counts=.., dtype=.., reduction=..)   # then execute, price

How it is done:

1. When: every step gets a round, the same as the step before it if it could be done at the same
   time (see `_Done.before`). A message is in the round of its receive step. Steps that wait for
   each other in a circle are an error that names them.
2. What: all steps together are moves between slots (gpu, buffer, offset). They are followed round
   by round, so that it is known which chunk every slot holds.
3. Where: a slot becomes a chunk id. Input and output of a chunk are copy 0; scratch slots, and an
   input that is read after its output was written, are further copies.

A message whose source is overwritten between its send and its receive step waits in a slot of its
own at the receiver, as it waits in a connection's buffers in reality.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from trnsim.device.errors import BadFile, BadInput, TrnsimError

from .msccl_file import RECEIVES, REDUCES, SENDS, Algorithm, Step, ThreadBlock, parse
from .schedule import POINT_TO_POINT, REDUCING, Block, Collective, Schedule, block
from .verify import verify

Slot = tuple[int, str, int]  # gpu, buffer, offset
WHOLE = ("all_reduce", "broadcast", "reduce")
FOREVER = 1 << 62


def read_msccl(text: str) -> tuple[Collective, Schedule]:
    """The algorithm of an MSCCL XML text: a collective of one element per chunk, and the schedule.

    Raises BadFile and BadInput for text that is no such algorithm, TrnsimError for steps that can
    never run, and WrongSchedule, with rank and chunk, if it does not do its collective.
    """
    algorithm = parse(text)
    collective = _collective(algorithm)
    parts = collective.piece_counts[0]
    slots = Slots(algorithm, collective, int(parts))
    moves = _Moves(algorithm, slots).all()
    schedule = _Names(algorithm.name, collective, int(parts), moves, slots).schedule()
    verify(collective, schedule)
    return collective, schedule


def _collective(algorithm: Algorithm) -> Collective:
    kind, n = algorithm.collective, algorithm.ranks
    assert kind not in POINT_TO_POINT
    share = 1 if kind in WHOLE else n
    if algorithm.chunks % share:
        allowed = f"a multiple of the {n} gpus"
        raise BadInput(f"nchunksperloop of {kind}", algorithm.chunks, allowed)
    return Collective(
        kind,
        n,
        algorithm.chunks // share,
        reduction="add" if kind in REDUCING else None,
        root=algorithm.root,
    )


class Slots:
    """Which slots there are, and the chunks (piece * parts + part) of inputs and outputs."""

    def __init__(self, algorithm: Algorithm, collective: Collective, parts: int) -> None:
        self.inplace, self.parts, self.collective = algorithm.inplace, parts, collective
        self.scratch = {gpu.id: gpu.scratch for gpu in algorithm.gpus}
        self.inputs: dict[Slot, int] = {}
        self.outputs: dict[Slot, int] = {}
        self.sizes: dict[tuple[int, str], int] = {}
        for rank in range(collective.ranks):
            for buffer, pieces in (("i", collective.inputs(rank)), ("o", collective.outputs(rank))):
                table = self.inputs if buffer == "i" else self.outputs
                self.sizes[rank, buffer] = len(pieces) * parts
                for place, piece in enumerate(pieces):
                    for part in range(parts):
                        slot = self.resolved(rank, buffer, place * parts + part)
                        table[slot] = piece.piece * parts + part

    def resolved(self, rank: int, buffer: str, offset: int) -> Slot:
        """In place, input and output are one buffer, called by the name of the larger one."""
        kind, own = self.collective.kind, rank * self.parts
        if self.inplace and kind in WHOLE and buffer in "io":
            return rank, "i", offset
        if self.inplace and kind == "all_gather" and buffer == "i":
            return rank, "o", own + offset
        if self.inplace and kind == "reduce_scatter" and buffer == "o":
            return rank, "i", own + offset
        return rank, buffer, offset

    def run(self, rank: int, start: tuple[str, int], count: int, where: str) -> list[Slot]:
        """`count` slots from `start` on. Raises BadFile for offsets outside of the buffer."""
        buffer, offset = start
        most = self.scratch[rank] if buffer == "s" else self.size(rank, buffer)
        if offset < 0 or offset + count > most:
            raise BadFile(f"{where}: chunks {buffer}[{offset}..{offset + count - 1}] of {most}")
        return [self.resolved(rank, buffer, offset + i) for i in range(count)]

    def size(self, rank: int, buffer: str) -> int:
        """Chunks of a rank's input ("i") or output ("o") buffer."""
        size = self.sizes[rank, buffer]
        if self.inplace and self.collective.kind in WHOLE:
            return max(self.sizes[rank, "i"], self.sizes[rank, "o"])
        return size


@dataclass(frozen=True)
class _Move:
    """A chunk from slot to slot in a round; `sent` is the round of the send step."""

    round: int
    sent: int
    src: Slot
    dst: Slot
    reduce: bool
    channel: int
    where: str


@dataclass(frozen=True)
class _Done:
    """A step that has its round, and what it and all before it touch in that round."""

    round: int
    reads: frozenset[Slot] = frozenset()
    writes: frozenset[Slot] = frozenset()
    adds: frozenset[Slot] = frozenset()

    def before(self, other: "_Done") -> bool:
        """Whether the other one has to wait for the next round.

        In a round, all reads come before all writes, and sums into one slot may come together.
        """
        wrote = self.writes | self.adds
        return bool((other.reads | other.writes) & wrote or other.adds & self.writes)


@dataclass(frozen=True)
class _Message:
    """What a send step puts into a connection: in which round, and out of which slots."""

    sent: int
    slots: list[Slot]


class _Moves:
    """All moves of an algorithm: runs the thread blocks until none can go on."""

    def __init__(self, algorithm: Algorithm, slots: Slots) -> None:
        self.algorithm, self.slots = algorithm, slots
        self.blocks = [(gpu.id, tb) for gpu in algorithm.gpus for tb in gpu.blocks]
        self.next = [0] * len(self.blocks)
        self.last = [_Done(0)] * len(self.blocks)
        self.done: dict[tuple[int, int, int], _Done] = {}
        self.wires: dict[tuple[int, int, int], list[_Message]] = defaultdict(list)
        self.taken: dict[tuple[int, int, int], int] = defaultdict(int)
        self.moves: list[_Move] = []

    def all(self) -> list[_Move]:
        """Moves by round. Raises TrnsimError for a deadlock and for messages nobody takes."""
        while any([self._advance(i) for i in range(len(self.blocks))]):
            pass
        stuck = [i for i, (_, tb) in enumerate(self.blocks) if self.next[i] < len(tb.steps)]
        if stuck:
            stories = ", ".join(self._story(i) for i in stuck[:4])
            raise TrnsimError(f"{self.algorithm.name}: steps wait for each other: {stories}")
        for (source, target, channel), left in self.wires.items():
            if left:
                raise TrnsimError(
                    f"{self.algorithm.name}: gpu {source} sends to gpu {target} on channel "
                    f"{channel} what it never receives"
                )
        return sorted(self.moves, key=lambda move: move.round)

    def _advance(self, index: int) -> bool:
        """Run a thread block's steps as far as they go; whether it got on."""
        (gpu, tb), before = self.blocks[index], self.next[index]
        while self.next[index] < len(tb.steps) and self._run(index, gpu, tb):
            self.done[gpu, tb.id, self.next[index]] = self.last[index]
            self.next[index] += 1
        return self.next[index] > before

    def _run(self, index: int, gpu: int, tb: ThreadBlock) -> bool:
        """One step, if what it waits for is there."""
        number = self.next[index]
        step = tb.steps[number]
        if step.waits:
            over = self.done.get((gpu, *step.waits))
            if over is None:
                return False
            self.last[index] = _joined(self.last[index], over)
        where = f"{self.algorithm.name}: gpu {gpu}, thread block {tb.id}, step {number}"
        if step.type in RECEIVES:
            if not self.wires[tb.recv, gpu, tb.channel]:
                return False
            self._receive(index, step, where)
        elif step.type in ("cpy", "re"):
            src = self.slots.run(gpu, step.src, step.count, where)
            dst = self.slots.run(gpu, step.dst, step.count, where)
            at = self._place(index, src, dst, step.type == "re")
            self._move(at, at, src, dst, step.type == "re", 0, where)
        if step.type in SENDS:
            self._send(index, step, where)
        return True

    def _place(
        self, index: int, reads: list[Slot], writes: list[Slot], adds: bool, earliest: int = 0
    ) -> int:
        """The round of the next step of a thread block, from `earliest` on, given what it does."""
        last, none = self.last[index], frozenset[Slot]()
        written = frozenset(writes)
        wanted = _Done(
            earliest, frozenset(reads), none if adds else written, written if adds else none
        )
        at = max(earliest, last.round + last.before(wanted))
        self.last[index] = _joined(last, replace(wanted, round=at))
        return at

    def _send(self, index: int, step: Step, where: str) -> None:
        """What is sent on after a receive is what that left: in dst, or in flight for rrs."""
        gpu, tb = self.blocks[index]
        slots = _flight(gpu, step, where)
        if step.type != "rrs":
            source = step.src if step.type == "s" else step.dst
            slots = self.slots.run(gpu, source, step.count, where)
        at = self._place(index, slots, [], False)
        self.wires[gpu, tb.send, tb.channel].append(_Message(at, slots))

    def _receive(self, index: int, step: Step, where: str) -> None:
        """Take the next message."""
        gpu, tb = self.blocks[index]
        wire = tb.recv, gpu, tb.channel
        message = self.wires[wire].pop(0)
        if len(message.slots) != step.count:
            raise TrnsimError(
                f"{where}: expects {step.count} chunks, gpu {wire[0]} sends {len(message.slots)}"
            )
        adds = step.type in REDUCES
        src = self.slots.run(gpu, step.src, step.count, where) if adds else []
        dst = _flight(gpu, step, where)
        if step.type != "rrs":
            dst = self.slots.run(gpu, step.dst, step.count, where)
        moved = bool(src) and src != dst  # the sum does not go where the local operand is
        earliest = max(message.sent, self.taken[wire])
        at = self._place(index, src if moved else [], dst, adds and not moved, earliest)
        self.taken[wire] = at + 1  # a connection carries one step after the other
        if moved:
            self._move(at, at, src, dst, False, 0, where)
        self._move(at, message.sent, message.slots, dst, adds, tb.channel, where)

    def _move(
        self, at: int, sent: int, src: list[Slot], dst: list[Slot], reduce: bool, channel: int,
        where: str,
    ) -> None:  # fmt: skip
        pairs = zip(src, dst, strict=True)
        self.moves += [_Move(at, sent, a, b, reduce, channel, where) for a, b in pairs]

    def _story(self, index: int) -> str:
        gpu, tb = self.blocks[index]
        step = tb.steps[self.next[index]]
        what = f"gpu {gpu} thread block {tb.id} step {self.next[index]} ({step.type})"
        if step.waits and (gpu, *step.waits) not in self.done:
            return f"{what} waits for thread block {step.waits[0]} step {step.waits[1]}"
        return f"{what} waits for gpu {tb.recv}"


def _joined(first: _Done, second: _Done) -> _Done:
    """After both: the later round, and what is touched in it."""
    if first.round != second.round:
        return max(first, second, key=lambda done: done.round)
    return _Done(
        first.round,
        first.reads | second.reads,
        first.writes | second.writes,
        first.adds | second.adds,
    )


def _flight(gpu: int, step: Step, where: str) -> list[Slot]:
    """Slots of a sum that is sent on without being kept."""
    return [(gpu, f"x{where}", i) for i in range(step.count)]


class _Names:
    """Slots to chunk ids, and moves to blocks."""

    def __init__(
        self, name: str, collective: Collective, parts: int, moves: list[_Move], slots: Slots
    ) -> None:
        self.name, self.collective, self.parts, self.slots = name, collective, parts, slots
        self.chunks = collective.pieces * parts
        self.copies = 1
        self.ids: dict[tuple[Slot, int], int] = {}
        self.used: dict[tuple[int, int], int] = {}
        self.moves = self._in_place(list(self._through_buffers(moves)))
        self.kept = self._kept_inputs()

    def schedule(self) -> Schedule:
        held = dict(self.slots.inputs)
        blocks = [self._keep(held)] if self.kept else []
        for at in sorted({move.round for move in self.moves}):
            together = [move for move in self.moves if move.round == at]
            made = self._round(together, held)
            blocks += [made] if made is not None else []
        return Schedule(
            self.name, self.collective.ranks, self.parts, tuple(blocks), None, self.copies
        )

    def _through_buffers(self, moves: list[_Move]) -> Iterator[_Move]:
        """Messages whose source changes before they are received wait at the receiver."""
        writes = defaultdict(list)
        for move in moves:
            writes[move.dst].append(move.round)
        for number, move in enumerate(moves):
            if any(move.sent <= at < move.round for at in writes[move.src]):
                waiting = (move.dst[0], f"f{number}", 0)
                yield replace(move, round=move.sent, dst=waiting, reduce=False)
                yield replace(move, src=waiting, sent=move.round, channel=0)
            else:
                yield move

    def _in_place(self, moves: list[_Move]) -> list[_Move]:
        """A sum in flight may be made where its local operand is, if nobody needs that again."""
        moves = sorted(moves, key=lambda move: move.round)
        reads, writes = defaultdict(list), defaultdict(list)
        for move in moves:
            reads[move.src].append(move.round)
            writes[move.dst].append((move.round, move.reduce))
        renamed: dict[Slot, Slot] = {}
        for move in moves:
            flight, own = move.dst, move.src
            if not (flight[1].startswith("x") and own[0] == flight[0]) or move.reduce:
                continue
            last = max(reads[flight], default=move.round)
            later = sorted(w for w in writes[own] if w[0] >= move.round)
            until, adds = later[0] if later else (FOREVER, own in self.slots.outputs)
            needed = any(move.round < at <= until for at in reads[own])
            if not adds and not needed and until >= last:
                renamed[flight] = own
        changed = (
            replace(m, src=renamed.get(m.src, m.src), dst=renamed.get(m.dst, m.dst)) for m in moves
        )
        return [move for move in changed if move.src != move.dst]

    def _kept_inputs(self) -> set[Slot]:
        """Inputs that are used after the output of the same chunk was written elsewhere."""
        first: dict[Slot, int] = {}
        for move in self.moves:
            first.setdefault(move.dst, move.round)
        outputs = {(slot[0], chunk): slot for slot, chunk in self.slots.outputs.items()}
        kept = set()
        for move in self.moves:
            for slot in (move.src, move.dst):
                output = outputs.get((slot[0], self.slots.inputs.get(slot, -1)))
                if output not in (None, slot) and first.get(output, move.round) < move.round:
                    kept.add(slot)
        return kept

    def _keep(self, held: dict[Slot, int]) -> Block:
        """Copies of the inputs that have to outlive the output's first value."""
        rows = [(slot[0], held[slot], self._id(slot, held[slot])) for slot in sorted(self.kept)]
        rank, chunk, copy = np.array(rows, np.int64).T
        return block(rank, rank, chunk, modulus=self.chunks, into=copy - chunk)

    def _id(self, slot: Slot, chunk: int) -> int:
        """The chunk id of a slot while it holds this chunk."""
        if (slot, chunk) not in self.ids:
            main = chunk in (self.slots.inputs.get(slot), self.slots.outputs.get(slot))
            if main and slot not in self.kept:
                self.ids[slot, chunk] = chunk
            else:
                copy = self.used.get((slot[0], chunk), self._first_copy(slot[0], chunk))
                self.used[slot[0], chunk] = copy + 1
                self.copies = max(self.copies, copy + 1)
                self.ids[slot, chunk] = copy * self.chunks + chunk
        return self.ids[slot, chunk]

    def _first_copy(self, rank: int, chunk: int) -> int:
        """0 if the rank has neither an input nor an output of the chunk."""
        pieces = [*self.collective.inputs(rank), *self.collective.outputs(rank)]
        return int(chunk // self.parts in {piece.piece for piece in pieces})

    def _round(self, moves: list[_Move], held: dict[Slot, int]) -> Block | None:
        """The moves of one round: local copies first, the others in the order of the steps."""
        rows, now = [], dict(held)
        for move in sorted(moves, key=lambda m: m.src[0] != m.dst[0] or m.reduce):
            chunk = self._chunk(move, held, now)
            source, target = self._id(move.src, chunk), self._id(move.dst, chunk)
            now[move.dst] = chunk
            if (move.src[0], source) != (move.dst[0], target):
                rows.append((move.src[0], move.dst[0], source, target, move.reduce, move.channel))
        held.update(now)
        if not rows:
            return None
        src, dst, source, target, reduce, channel = np.array(rows, np.int64).T
        into = target - source if (target != source).any() else None
        size = self.chunks
        offset = source // size * size
        return block(
            src, dst, source % size, modulus=size, offset=offset, reduce=reduce.astype(bool),
            channel=channel, into=into,
        )  # fmt: skip

    def _chunk(self, move: _Move, held: dict[Slot, int], now: dict[Slot, int]) -> int:
        """The chunk that moves. Raises TrnsimError if there is none, or another one to add to."""
        if move.src not in held:
            raise TrnsimError(f"{move.where}: rank {move.src[0]} reads {_shown(move.src)} unset")
        chunk = held[move.src]
        if move.reduce and now.get(move.dst) != chunk:
            other = now.get(move.dst, "nothing")
            raise TrnsimError(
                f"{move.where}: rank {move.dst[0]} adds chunk {chunk} to {_shown(move.dst)}, "
                f"which holds {other}"
            )
        return chunk


def _shown(slot: Slot) -> str:
    return f"{slot[1]}[{slot[2]}]" if len(slot[1]) == 1 else "a message in flight"
