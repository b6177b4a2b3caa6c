"""What a collective does (`Collective`) and how it is done (`Schedule`), both as plain data.

A collective moves *pieces*, numbered so that the number says what the piece is:

    all_reduce, broadcast   one piece: the whole buffer
    reduce                  one piece: the whole buffer, reduced at the root
    barrier                 one piece: a flag of one element, all-reduced
    all_gather, gather      piece i: the input of rank i
    reduce_scatter          piece i: the part of the input that rank i ends with, reduced
    scatter                 piece i: the part of the root's input that rank i ends with
    all_to_all              piece i*ranks + j: from rank i to rank j
    permute, sendrecv       piece p: along pairs[p]

A schedule cuts every piece into `parts` *chunks*, and speaks of chunk ids only: in each round,
transfers (source, destination, chunks, reduce?) happen at once. Where a chunk lives on a rank
(input slot, output slot, staging) follows from the collective. Ranks are positions in the group.

Large groups: a `Block` may hold a pattern over few members and the table `who` of the many
subgroups that do it at once, so that a hierarchy over a million ranks is a few small arrays.
Whoever does not care uses `schedule.flat` or `block.flat`, where every transfer is a row.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from trnsim.device.dtypes import is_float, numpy_dtype
from trnsim.device.errors import BadInput

KINDS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "permute",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "sendrecv",
    "barrier",
)
REDUCTIONS = ("add", "multiply", "minimum", "maximum", "and", "or")
REDUCING = ("all_reduce", "reduce_scatter", "reduce", "barrier")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
POINT_TO_POINT = ("permute", "sendrecv")
_ONE_PIECE = ("all_reduce", "broadcast", "reduce", "barrier")
_SHARES = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")


@dataclass(frozen=True)
class Slot:
    """Where a piece lies in a rank's buffer, in elements."""

    piece: int
    offset: int
    count: int


@dataclass(frozen=True)
class Collective:
    """Pre- and postcondition of a collective over `ranks` group positions 0..ranks-1.

    counts: elements of every piece, as one number or one per piece (0 is legal). dtype: a StableHLO
    name. reduction: for kinds that reduce. root: for broadcast, reduce, gather, scatter. pairs:
    (source, target); in a permute each rank is at most once source and once target, in a sendrecv
    (a batch of sends and receives) any number of times. A barrier is one element, and its
    reduction may be left out. Raises BadInput otherwise.
    """

    kind: str
    ranks: int
    counts: int | tuple[int, ...] = 1
    dtype: str = "f32"
    reduction: str | None = None
    root: int = 0
    pairs: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        self._make_hashable()
        if self.kind not in KINDS:
            raise BadInput("collective", self.kind, KINDS)
        if self.ranks < 1:
            raise BadInput("ranks", self.ranks, "1 or more")
        numpy_dtype(self.dtype)
        if self.kind == "barrier" and self.reduction is None:
            object.__setattr__(self, "reduction", "maximum")
        if self.reducing != (self.reduction is not None):
            raise BadInput("reduction", self.reduction, REDUCTIONS if self.reducing else "none")
        if self.reducing and self.reduction not in REDUCTIONS:
            raise BadInput("reduction", self.reduction, REDUCTIONS)
        if self.reduction in ("and", "or") and is_float(self.dtype):
            raise BadInput(f"reduction of {self.dtype}", self.reduction, REDUCTIONS[:4])
        if not 0 <= self.root < self.ranks:
            raise BadInput("root", self.root, f"0..{self.ranks - 1}")
        self._check_counts()
        self._check_pairs()

    @property
    def reducing(self) -> bool:
        """Whether ranks' contributions are combined."""
        return self.kind in REDUCING

    @property
    def pieces(self) -> int:
        """Number of pieces."""
        if self.kind in _ONE_PIECE:
            return 1
        if self.kind in POINT_TO_POINT:
            return len(self.pairs)
        return self.ranks * self.ranks if self.kind == "all_to_all" else self.ranks

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return numpy_dtype(self.dtype).itemsize

    @cached_property
    def piece_counts(self) -> np.ndarray:
        """int64[pieces]: elements of each piece."""
        return np.ascontiguousarray(np.broadcast_to(np.asarray(self.counts, np.int64), self.pieces))

    @cached_property
    def nbytes(self) -> int:
        """Size S by the convention of nccl-tests and nccom-test.

        all_reduce, broadcast, reduce: the buffer; all_gather, reduce_scatter, gather, scatter: all
        pieces; all_to_all: the largest input of a rank; permute, sendrecv: the largest piece.
        """
        counts = self.piece_counts
        if self.kind == "all_to_all":
            counts = counts.reshape(self.ranks, self.ranks).sum(axis=1)
        largest_only = self.kind in ("all_to_all", *POINT_TO_POINT)
        total = counts.max(initial=0) if largest_only else counts.sum()
        return int(total) * self.itemsize

    @property
    def bus_factor(self) -> float:
        """busbw / algbw, by the convention of nccl-tests."""
        share = (self.ranks - 1) / self.ranks
        if self.kind in ("all_reduce", "barrier"):
            return 2 * share
        return share if self.kind in _SHARES else 1.0

    def inputs(self, rank: int) -> list[Slot]:
        """The pieces that a rank holds (or contributes to) at the start, in buffer order."""
        return self._packed(self._input_pieces(rank))

    def outputs(self, rank: int) -> list[Slot]:
        """The pieces that a rank must hold at the end, in buffer order."""
        return self._packed(self._output_pieces(rank))

    def input_count(self, rank: int) -> int:
        """Elements that a rank's input must have; 0 if it is not read."""
        return int(sum(slot.count for slot in self.inputs(rank)))

    def output_count(self, rank: int) -> int:
        """Elements of a rank's output (a permute gives zeros to a rank that is no target)."""
        slots = self.outputs(rank)
        if self.kind == "permute" and not slots and isinstance(self.counts, int):
            return self.counts
        return int(sum(slot.count for slot in slots))

    def _input_pieces(self, rank: int) -> Sequence[int]:
        n = self.ranks
        if self.kind in ("all_gather", "gather"):
            return (rank,)
        if self.kind in ("broadcast", "scatter"):
            return range(self.pieces) if rank == self.root else ()
        if self.kind in POINT_TO_POINT:
            return [p for p, (source, _) in enumerate(self.pairs) if source == rank]
        return range(rank * n, rank * n + n) if self.kind == "all_to_all" else range(self.pieces)

    def _output_pieces(self, rank: int) -> Sequence[int]:
        if self.kind in ("reduce_scatter", "scatter"):
            return (rank,)
        if self.kind in ("reduce", "gather"):
            return range(self.pieces) if rank == self.root else ()
        if self.kind in POINT_TO_POINT:
            return [p for p, (_, target) in enumerate(self.pairs) if target == rank]
        step = self.ranks if self.kind == "all_to_all" else 1
        return range(rank if step > 1 else 0, self.pieces, step)

    def _packed(self, pieces: Sequence[int]) -> list[Slot]:
        counts = self.piece_counts[list(pieces)]
        offsets = np.cumsum(counts) - counts
        rows = zip(pieces, offsets.tolist(), counts.tolist(), strict=True)
        return [Slot(*row) for row in rows]

    def _make_hashable(self) -> None:
        """Lists and numpy numbers, as they come from files and arrays, to plain tuples of int."""
        given = np.asarray(self.counts, np.int64)
        counts = int(given) if given.ndim == 0 else tuple(given.tolist())
        object.__setattr__(self, "counts", counts)
        object.__setattr__(self, "pairs", tuple((int(a), int(b)) for a, b in self.pairs))

    def _check_counts(self) -> None:
        counts = (self.counts,) if isinstance(self.counts, int) else self.counts
        if not isinstance(self.counts, int) and len(counts) != self.pieces:
            raise BadInput("counts", f"{len(counts)} numbers", f"1 or {self.pieces} numbers")
        if min(counts, default=0) < 0:
            raise BadInput("counts", min(counts), "0 or more elements")
        if self.kind == "barrier" and counts != (1,):
            raise BadInput("counts of a barrier", self.counts, "1: its flag")

    def _check_pairs(self) -> None:
        if self.pairs and self.kind not in POINT_TO_POINT:
            raise BadInput("pairs", self.pairs, f"none for {self.kind}")
        for end, name in enumerate(("source", "target")):
            ranks = [pair[end] for pair in self.pairs]
            wrong = [r for r in ranks if not 0 <= r < self.ranks]
            if wrong:
                raise BadInput(f"{name} of a pair", wrong[0], f"0..{self.ranks - 1}")
            twice = [rank for rank, times in Counter(ranks).items() if times > 1]
            if twice and self.kind == "permute":
                raise BadInput(f"{name} of a pair", twice[0], "each rank at most once")


@dataclass(frozen=True, eq=False)
class Block:
    """One round of transfers, repeated `count` times while the chunks move on.

    In repetition k, transfer t moves, from src[t] to dst[t], the span[t] chunks

        offset[t] + (base[t] + k * step[t] + i) % modulus,  i = 0 .. span[t] - 1

    and adds them there if reduce[t], else overwrites. All transfers of a round read before any
    writes. Those between one pair of ranks are one message; messages into a rank apply in the order
    of their first transfers. Of several transfers into one chunk, only the first may overwrite, and
    then a rank may add what it had itself (src == dst). All arrays have shape [T].

    fused[t]: transfer t is one DMA operation with the transfer before it. A fused copy is a second
    write of what that transfer reads (same source, same chunks; DMA duplication): it neither reads
    again nor takes links again, and goes to the same chip. A fused reduction is a further operand
    of that one (same destination, same chunks). See `touches` for what this saves.

    into: int64[T], or None: the destination keeps what it gets under a chunk id that is this much
    higher. Copies of chunk c have the ids c + i * pieces * parts (see `Schedule.copies`), so that a
    rank may hold several values of a chunk, as algorithms with scratch buffers do. A transfer from
    a rank to itself is then a local copy or reduction.

    lane: blocks of different lanes touch different chunks. A transfer waits for what earlier blocks
    of its own lane gave its source, not for other lanes: only resources couple lanes.

    who: int32[R, m], or None for one pattern over all ranks. With it, R disjoint subgroups do the
    pattern at once: row r has src, dst in 0..m-1 played by who[r, src], who[r, dst], on chunks
    shift[r] (int64[R]) further on.
    """

    src: np.ndarray
    dst: np.ndarray
    base: np.ndarray
    span: np.ndarray
    offset: np.ndarray
    step: np.ndarray
    reduce: np.ndarray
    channel: np.ndarray
    count: int
    modulus: int
    fused: np.ndarray | None = None
    into: np.ndarray | None = None
    lane: int = 0
    who: np.ndarray | None = None
    shift: np.ndarray | None = None

    @property
    def replicas(self) -> int:
        """Subgroups that do the pattern at once: the rows of `who`."""
        return 1 if self.who is None else len(self.who)

    @cached_property
    def flat(self) -> "Block":
        """The same block with every transfer as a row: replica-major, without `who`."""
        if self.who is None:
            return self
        rows = len(self.who)
        shift = np.zeros(rows, np.int64) if self.shift is None else self.shift
        tiled = {f: _tile(getattr(self, f), rows) for f in ("base", "span", "step", "reduce")}
        return replace(
            self,
            src=self.who[:, self.src].reshape(-1),
            dst=self.who[:, self.dst].reshape(-1),
            offset=(shift[:, None] + self.offset).reshape(-1),
            channel=_tile(self.channel, rows),
            fused=None if self.fused is None else _tile(self.fused, rows),
            into=None if self.into is None else _tile(self.into, rows),
            who=None,
            shift=None,
            **tiled,
        )

    @property
    def touches(self) -> tuple[np.ndarray, np.ndarray]:
        """int8[T], int8[T]: HBM accesses of each transfer's bytes at its source and destination.

        A copy reads once and writes once; a reduction also reads the destination. Fused: a copy is
        only its write, a reduction only its read at the source. So two ranks of a chip take 4
        touches per all_gather hop on a ring and 3 on a KangaRing, and 6 and 4 for reduce_scatter.
        """
        fused = np.zeros(len(self.src), bool) if self.fused is None else self.fused
        at_source = np.where(fused & ~self.reduce, 0, 1).astype(np.int8)
        at_destination = np.where(fused & self.reduce, 0, 1 + self.reduce).astype(np.int8)
        return at_source, at_destination

    @property
    def transfers(self) -> int:
        """Transfers in one round, of all replicas."""
        return len(self.src) * self.replicas

    def first(self, repetition: int, rows: np.ndarray | slice = slice(None)) -> np.ndarray:
        """int64: (base + k * step) % modulus of these rows of the pattern; add offset (and shift of
        the replica) for the chunk.
        """
        moved = self.base[rows].astype(np.int64) + repetition * self.step[rows].astype(np.int64)
        return moved % self.modulus

    def expand(
        self, repetition: int, rows: np.ndarray | slice = slice(None)
    ) -> tuple[np.ndarray, np.ndarray]:
        """(transfer index, chunk id), one entry per chunk moved, in order. For flat blocks."""
        assert self.who is None, "expand the flat block"
        index = rows if isinstance(rows, np.ndarray) else np.arange(self.transfers)[rows]
        span = self.span[rows].astype(np.int64)
        within = np.arange(span.sum()) - np.repeat(np.cumsum(span) - span, span)
        first = np.repeat(self.first(repetition, rows), span)
        ids = np.repeat(self.offset[rows], span) + (first + within) % self.modulus
        return np.repeat(index, span), ids

    def landed(self, index: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """int64: the chunk ids of `expand` at the destinations."""
        return ids if self.into is None else ids + self.into[index]


@dataclass(frozen=True, eq=False)
class Schedule:
    """How a collective is done: blocks of rounds, one after another.

    parts: chunks per piece. By nature, chunk piece * parts + part is that part of the piece. With
    `order`, chunk c is natural chunk order[c] (int64[pieces * parts]), or, if it has one entry per
    piece, part c % parts of piece order[c // parts]. `algorithm` is the name that reports print.
    copies: how many values of a chunk a rank may hold; copy 0 is the input and output.
    """

    algorithm: str
    ranks: int
    parts: int
    blocks: tuple[Block, ...]
    order: np.ndarray | None = None
    copies: int = 1

    @property
    def rounds(self) -> int:
        """Rounds of all blocks, repetitions counted."""
        return sum(block.count for block in self.blocks)

    @property
    def channels(self) -> int:
        """Number of channels used."""
        return 1 + max((int(b.channel.max(initial=0)) for b in self.blocks), default=0)

    @property
    def lanes(self) -> int:
        """Number of lanes used."""
        return 1 + max((block.lane for block in self.blocks), default=0)

    @cached_property
    def flat(self) -> "Schedule":
        """The same schedule with every transfer of every block as a row."""
        if all(block.who is None for block in self.blocks):
            return self
        return replace(self, blocks=tuple(block.flat for block in self.blocks))

    def each_round(self) -> Iterator[tuple[Block, int]]:
        """(flat block, repetition) of every round, in order."""
        for block in self.flat.blocks:
            for repetition in range(block.count):
                yield block, repetition

    def natural(self, pieces: int) -> np.ndarray:
        """int64[pieces * parts]: piece * parts + part of every chunk id."""
        if self.order is None:
            return np.arange(pieces * self.parts)
        if len(self.order) == pieces:
            return (self.order[:, None] * self.parts + np.arange(self.parts)).reshape(-1)
        return self.order

    def place_of(self, pieces: int) -> np.ndarray:
        """int64[pieces, parts]: the chunk id of each part of each piece."""
        place = np.empty(pieces * self.parts, np.int64)
        place[self.natural(pieces)] = np.arange(pieces * self.parts)
        return place.reshape(pieces, self.parts)

    def chunk_counts(self, collective: Collective) -> np.ndarray:
        """int64[pieces * parts * copies]: elements per chunk; the first parts of a piece get the
        rest.
        """
        counts = part_counts(collective.piece_counts, self.parts).reshape(-1)
        counts = counts if self.order is None else counts[self.natural(collective.pieces)]
        return counts if self.copies == 1 else np.tile(counts, self.copies)


def in_order(
    make: Callable[[Collective], Schedule],
    collective: Collective,
    order: Sequence[int] | np.ndarray | None,
) -> Schedule:
    """The schedule that `make` gives if group position order[i] plays the part of rank i.

    For kinds whose pieces belong to ranks one to one, or that have one piece. Raises BadInput for
    an `order` that is no permutation.
    """
    if order is None:
        return make(collective)
    who = np.asarray(order, np.int64)
    if not np.array_equal(np.sort(who), np.arange(collective.ranks)):
        raise BadInput("order", who.tolist(), f"each of 0..{collective.ranks - 1} once")
    root = int(np.argmax(who == collective.root))
    made = make(replace(collective, root=root))
    blocks = tuple(renumbered(b, who) for b in made.blocks)
    if collective.pieces == 1:
        return replace(made, blocks=blocks)
    piece, part = np.divmod(made.natural(collective.pieces), made.parts)
    return replace(made, blocks=blocks, order=who[piece] * made.parts + part)


def renumbered(block: Block, who: np.ndarray) -> Block:
    """The block with rank who[i] in the part of rank i."""
    if block.who is not None:
        return replace(block, who=who[block.who].astype(np.int32))
    return replace(block, src=who[block.src].astype(np.int32), dst=who[block.dst].astype(np.int32))


def part_counts(counts: np.ndarray, parts: int) -> np.ndarray:
    """int64[len(counts), parts]: each count cut into parts that differ by at most one."""
    counts = np.asarray(counts, np.int64)[:, None]
    return counts // parts + (np.arange(parts) < counts % parts)


def block(
    src: Sequence[int] | np.ndarray,
    dst: Sequence[int] | np.ndarray,
    base: int | Sequence[int] | np.ndarray,
    *,
    modulus: int,
    span: int | np.ndarray = 1,
    offset: int | np.ndarray = 0,
    step: int | np.ndarray = 0,
    reduce: bool | np.ndarray = False,
    channel: int | np.ndarray = 0,
    fused: np.ndarray | None = None,
    into: np.ndarray | None = None,
    count: int = 1,
) -> Block:
    """A Block from arrays or single numbers; single numbers take no memory per transfer."""
    source = np.asarray(src, np.int32)

    def column(value: int | Sequence[int] | np.ndarray, kind: type = np.int32) -> np.ndarray:
        return np.broadcast_to(np.asarray(value, kind), source.shape)

    return Block(
        src=source,
        dst=column(dst),
        base=column(base, np.int64),
        span=column(span),
        offset=column(offset, np.int64),
        step=column(step, np.int64),
        reduce=column(reduce, np.bool_),
        channel=column(channel),
        count=count,
        modulus=modulus,
        fused=None if fused is None else np.asarray(fused, np.bool_),
        into=None if into is None else np.asarray(into, np.int64),
    )


def _tile(column: np.ndarray, rows: int) -> np.ndarray:
    """The column `rows` times over; a single number stays one (no memory per transfer)."""
    if column.strides == (0,) and len(column):
        return np.broadcast_to(column[:1], rows * len(column))
    return np.tile(column, rows)
