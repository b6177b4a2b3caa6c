"""GpSimd instructions that number, gather and count elements, as a kernel writes them.

All operands are in SBUF. Costs start with 150 cycles; those that no page gives are marked assumed.
"""

from dataclasses import dataclass

import numpy as np

from ..arithmetic import convert
from ..chip import Chip
from ..memory import ITEMSIZE, View
from .base import lane_cycles
from .lanes import Lanes
from .numerics import BITWISE_REDUCTIONS, COMPARISONS, cast, load, operate, reduce_rows, store

CORE_PARTITIONS = 16  # that each of the eight GpSimd processors is connected to
GATHER_INDICES_MAX = 4096  # of local_gather, per processor
GATHER_RUNS = (1, 2, 4, 8, 16, 32)
_GATHER_GROUP = 512  # elements of one instruction of nc_n_gather
_SBUF = ("sbuf",)

Pattern = tuple[tuple[int, int], ...]
"""(step, count) of up to four axes, the slowest first."""


class OnGpSimd(Lanes):
    """Base of the instructions that only GpSimd has."""

    __slots__ = ()
    engine = "gpsimd"

    def check_sbuf(self, chip: Chip, **operands: View) -> None:
        """Every operand is a legal one in SBUF."""
        for operand, view in operands.items():
            self.check_place(chip, operand, view, _SBUF)

    def start(self, chip: Chip, elements: float, *operands: View) -> int:
        """Start of the processors, and a cycle per element."""
        return chip.gpsimd_start_cycles + lane_cycles(chip, elements, *operands)

    def check_int32(self, **numbers: int) -> None:
        """Constants of the instruction have 32 bits."""
        for name, value in numbers.items():
            if not -(2**31) <= value < 2**31:
                raise self.illegal(f"{name} is {value}; it must be an int32")

    def check_pattern(self, pattern: Pattern, dst: View, offset: int, channel: int) -> None:
        """Up to four axes, with as many elements as dst has per partition; 32-bit constants."""
        self.check_int32(offset=offset, channel_multiplier=channel)
        if not 1 <= len(pattern) <= 4:
            raise self.illegal(f"pattern has {len(pattern)} axes; allowed: 1 to 4")
        count = int(np.prod([n for _, n in pattern]))
        if count != dst.free:
            raise self.illegal(
                f"pattern has {count} elements and dst {dst.free} per partition; must be equal"
            )


def affine(rows: int, pattern: Pattern, offset: int, channel: int) -> np.ndarray:
    """[rows, elements] offset + channel * row + the steps of the pattern, in 32-bit integers."""
    values = np.full(1, offset, np.int64)
    for step, count in pattern:
        values = (values[:, None] + np.arange(count, dtype=np.int64) * step).reshape(-1)
    table = values + np.arange(rows, dtype=np.int64)[:, None] * channel
    return table.astype(np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Iota(OnGpSimd):
    """dst[p, ...] = offset + channel * p + the steps of `pattern`, cast. Cost: 150 + N cycles."""

    dst: View
    pattern: Pattern
    offset: int = 0
    channel: int = 0

    def reads(self) -> tuple[View, ...]:
        return ()

    def check(self, chip: Chip) -> None:
        self.check_sbuf(chip, dst=self.dst)
        self.check_pattern(self.pattern, self.dst, self.offset, self.channel)

    def cycles(self, chip: Chip) -> int:
        return self.start(chip, self.dst.free, self.dst)

    def execute(self) -> None:
        values = affine(self.dst.shape[0], self.pattern, self.offset, self.channel)
        store(self.dst, values)


@dataclass(frozen=True, slots=True, eq=False)
class AffineSelect(OnGpSimd):
    """dst = src where (affine value `compare` 0), else `otherwise`. Cost: 150 + N cycles."""

    dst: View
    src: View
    pattern: Pattern
    channel: int
    otherwise: float
    compare: str = "equal"
    offset: int = 0

    def check(self, chip: Chip) -> None:
        self.check_sbuf(chip, dst=self.dst, on_true_tile=self.src)
        self.check_alike("on_true_tile", self.src, "dst", self.dst)
        self.check_pattern(self.pattern, self.dst, self.offset, self.channel)
        if self.compare not in COMPARISONS:
            raise self.illegal(f"cmp_op is {self.compare}; allowed: {', '.join(COMPARISONS)}")

    def cycles(self, chip: Chip) -> int:
        return self.start(chip, self.dst.free, self.dst, self.src)

    def execute(self) -> None:
        values = affine(self.dst.shape[0], self.pattern, self.offset, self.channel)
        chosen = operate(self.compare, values, np.zeros((), np.int32)) != 0
        out = self.dst.array
        src = self.src.array if self.src.dtype == self.dst.dtype else load(self.src)
        otherwise = cast(np.asarray(self.otherwise, np.float32), out.dtype)
        kept = cast(src, out.dtype).reshape(out.shape)
        out[...] = np.where(chosen.reshape(out.shape), kept, otherwise)


@dataclass(frozen=True, slots=True, eq=False)
class GatherInPartition(OnGpSimd):
    """dst[p, i] = src[p, index[p, i]], free axes flattened (nc_n_gather).

    Cost (assumed): 150 cycles for each group of 512 elements, and N cycles.
    """

    dst: View
    src: View
    index: View

    def reads(self) -> tuple[View, ...]:
        return self.src, self.index

    def check(self, chip: Chip) -> None:
        self.check_sbuf(chip, dst=self.dst, data=self.src, indices=self.index)
        self.check_dtype("indices", self.index, "ui32")
        self.check_alike("indices", self.index, "dst", self.dst)
        if self.src.shape[0] != self.dst.shape[0]:
            raise self.illegal(
                f"data has {self.src.shape[0]} partitions and dst {self.dst.shape[0]}; must be "
                "equal"
            )
        if self.src.dtype != self.dst.dtype:
            raise self.illegal(
                f"data is {self.src.dtype} and dst {self.dst.dtype}; they must be equal"
            )

    def cycles(self, chip: Chip) -> int:
        groups = -(-self.dst.free // _GATHER_GROUP)
        return groups * chip.gpsimd_start_cycles + lane_cycles(chip, self.dst.free, self.dst)

    def execute(self) -> None:
        rows = self.src.array.reshape(self.src.shape[0], -1)
        index = self.index.array.reshape(len(rows), -1).astype(np.int64)
        check_positions(self, index, rows.shape[1])
        self.dst.array[...] = np.take_along_axis(rows, index, axis=1).reshape(self.dst.shape)


def check_positions(instruction: Lanes, index: np.ndarray, count: int) -> None:
    """Every position is inside. Raises IllegalInstruction with the first that is not."""
    wrong = index[(index < 0) | (index >= count)]
    if wrong.size:
        raise instruction.illegal(f"index is {wrong.flat[0]}; limit: 0 to {count - 1}")


@dataclass(frozen=True, slots=True, eq=False)
class LocalGather(OnGpSimd):
    """In each 16 partitions: dst[p, j, :] = the `run` elements of src[p] from index j on.

    The indices of 16 partitions are read column by column; `valid` of them count. They are
    element offsets. Cost: 150 + elements / C cycles, C of the docstrings of SDK 2.26.
    """

    dst: View
    src: View
    index: View
    run: int = 1
    valid: int | None = None

    @property
    def count(self) -> int:
        """Indices that each processor uses."""
        return self.valid or self.index.free * CORE_PARTITIONS

    def reads(self) -> tuple[View, ...]:
        return self.src, self.index

    def check(self, chip: Chip) -> None:
        dst, src, index = self.dst, self.src, self.index
        self.check_sbuf(chip, dst=dst, src_buffer=src, index=index)
        self.check_dtype("index", index, "ui16")
        if src.dtype != dst.dtype:
            raise self.illegal(f"src_buffer is {src.dtype} and dst {dst.dtype}; must be equal")
        if src.shape[0] != index.shape[0] or src.shape[0] % CORE_PARTITIONS:
            raise self.illegal(
                f"src_buffer has {src.shape[0]} partitions and index {index.shape[0]}; they must "
                f"be equal and a multiple of {CORE_PARTITIONS}"
            )
        if self.run not in GATHER_RUNS:
            allowed = ", ".join(map(str, GATHER_RUNS))
            raise self.illegal(f"num_elem_per_idx is {self.run}; allowed: {allowed}")
        limit = min(index.free * CORE_PARTITIONS, GATHER_INDICES_MAX)
        if self.count > limit:
            raise self.illegal(f"num_valid_indices is {self.count}; limit: {limit}")
        if dst.shape[0] != src.shape[0] or dst.free != self.count * self.run:
            raise self.illegal(
                f"dst has shape {list(dst.shape)}; it must hold [{src.shape[0]}, "
                f"{self.count} x {self.run}]"
            )

    def cycles(self, chip: Chip) -> int:
        run, size = self.run, ITEMSIZE[self.src.dtype]
        rate = ((28 + 4 * run) / (4 * run)) / min(4 / size, run)
        return self.start(chip, self.count * run / rate)

    def execute(self) -> None:
        rows = self.src.array.reshape(self.src.shape[0], -1)
        index = self.index.array.reshape(len(rows), -1).astype(np.int64)
        out = np.empty((len(rows), self.count, self.run), rows.dtype)
        for first in range(0, len(rows), CORE_PARTITIONS):
            core = slice(first, first + CORE_PARTITIONS)
            starts = index[core].T.reshape(-1)[: self.count]
            places = starts[:, None] + np.arange(self.run)
            check_positions(self, places, rows.shape[1])
            out[core] = rows[core][:, places]
        self.dst.array[...] = out.reshape(self.dst.shape)


@dataclass(frozen=True, slots=True, eq=False)
class NonzeroWithCount(OnGpSimd):
    """dst = positions of nonzero elements + offset, then `padding`, last their number.

    Only partitions 0, 16, 32, ... are read and written. NeuronCore-v3 and later.
    Cost (assumed): 150 + N cycles.
    """

    dst: View
    src: View
    offset: int = 0
    padding: int = -1

    def reads(self) -> tuple[View, ...]:
        return tuple(self.src[p : p + 1] for p in range(0, self.src.shape[0], CORE_PARTITIONS))

    def writes(self) -> tuple[View, ...]:
        return tuple(self.dst[p : p + 1] for p in range(0, self.dst.shape[0], CORE_PARTITIONS))

    def check(self, chip: Chip) -> None:
        self.check_generation(chip, 3)
        self.check_sbuf(chip, dst=self.dst, src=self.src)
        self.check_dtype("src", self.src, "f32", "i32")
        self.check_dtype("dst", self.dst, "i32")
        self.check_int32(index_offset=self.offset, padding_val=self.padding)
        if self.dst.shape[0] != self.src.shape[0] or self.dst.free != self.src.free + 1:
            raise self.illegal(
                f"dst has shape {list(self.dst.shape)}; src {list(self.src.shape)} needs "
                f"[{self.src.shape[0]}, {self.src.free + 1}]"
            )

    def cycles(self, chip: Chip) -> int:
        return self.start(chip, self.src.free, self.src)

    def execute(self) -> None:
        src, dst = self.src.array, self.dst.array
        for row in range(0, len(src), CORE_PARTITIONS):
            found = np.flatnonzero(src[row])
            line = np.full(self.dst.free, self.padding, np.int64)
            line[: len(found)] = found + self.offset
            line[-1] = len(found)
            dst[row] = line.astype(np.int32).reshape(dst.shape[1:])


@dataclass(frozen=True, slots=True, eq=False)
class SequenceBounds(OnGpSimd):
    """dst[0, 0] = where each element's segment begins, dst[0, 1] = where it ends (exclusive).

    Padding (segment 0) begins at n and ends at -1. One partition. Cost (assumed): 150 + 2 N.
    """

    dst: View
    src: View

    def check(self, chip: Chip) -> None:
        self.check_sbuf(chip, dst=self.dst, segment_ids=self.src)
        for name, view in (("segment_ids", self.src), ("dst", self.dst)):
            self.check_dtype(name, view, "f32", "i32")
            if view.shape[0] != 1:
                raise self.illegal(f"{name} has {view.shape[0]} partitions; it must have 1")
        if self.dst.free != 2 * self.src.free:
            raise self.illegal(
                f"dst has {self.dst.free} elements; it must have 2 x {self.src.free}"
            )

    def cycles(self, chip: Chip) -> int:
        return self.start(chip, self.dst.free, self.src)

    def execute(self) -> None:
        ids = self.src.array.reshape(-1)
        n = len(ids)
        change = np.flatnonzero(ids[1:] != ids[:-1]) + 1
        edges = np.concatenate([[0], change, [n]])
        lengths = np.diff(edges)
        begin = np.where(ids == 0, n, np.repeat(edges[:-1], lengths))
        end = np.where(ids == 0, -1, np.repeat(edges[1:], lengths))
        store(self.dst, np.stack([begin, end]).astype(np.float32))


PARTITION_REDUCTIONS = ("add", "average", "maximum", "or", "and")


@dataclass(frozen=True, slots=True, eq=False)
class PartitionReduce(OnGpSimd):
    """dst[1, ...] = src reduced over partitions by add, average, maximum, or, and.

    Cost (assumed): 150 + N log2 P cycles, a tree over the partitions of N elements each.
    """

    dst: View
    src: View
    op: str

    def check(self, chip: Chip) -> None:
        self.check_sbuf(chip, dst=self.dst, data=self.src)
        if self.op not in PARTITION_REDUCTIONS:
            raise self.illegal(f"op is {self.op}; allowed: {', '.join(PARTITION_REDUCTIONS)}")
        if self.op in BITWISE_REDUCTIONS:
            self.check_operator(self.op, self.src.dtype, self.dst.dtype)
        if self.dst.shape[0] != 1 or self.dst.free != self.src.free:
            raise self.illegal(
                f"dst has shape {list(self.dst.shape)}; reducing data {list(self.src.shape)} "
                f"leaves [1, {self.src.free}]"
            )

    def cycles(self, chip: Chip) -> int:
        levels = max((self.src.shape[0] - 1).bit_length(), 1)
        return self.start(chip, self.src.free * levels, self.src)

    def execute(self) -> None:
        if self.op in BITWISE_REDUCTIONS:
            value = BITWISE_REDUCTIONS[self.op].reduce(self.src.array, axis=0)
            store(self.dst, value.astype(self.dst.array.dtype))
            return
        columns = load(self.src).reshape(self.src.shape[0], -1).T
        value = reduce_rows("add" if self.op == "average" else self.op, columns)
        store(self.dst, value / np.float32(len(columns.T)) if self.op == "average" else value)


@dataclass(frozen=True, slots=True, eq=False)
class TopK(OnGpSimd):
    """The K largest of the first `n` elements of each 16 partitions, in ascending order.

    Element i lies in partition i % 16, column i // 16. All 16 partitions get the result (assumed),
    and of equal values the earliest are taken (assumed). Cost: 4 n + K cycles.
    """

    values: View
    index: View
    src: View
    n: int

    def writes(self) -> tuple[View, ...]:
        return self.values, self.index

    def check(self, chip: Chip) -> None:
        self.check_sbuf(chip, val_dst=self.values, idx_dst=self.index, src=self.src)
        self.check_dtype("src", self.src, "bf16")
        self.check_dtype("val_dst", self.values, "bf16")
        self.check_dtype("idx_dst", self.index, "ui32")
        self.check_alike("idx_dst", self.index, "val_dst", self.values)
        rows, k = self.src.shape[0], self.values.free
        if rows % CORE_PARTITIONS or self.values.shape[0] != rows:
            raise self.illegal(
                f"src has {rows} partitions and val_dst {self.values.shape[0]}; they must be equal "
                f"and a multiple of {CORE_PARTITIONS}"
            )
        if not 8 <= self.n < 65536 or self.src.free * CORE_PARTITIONS < self.n:
            raise self.illegal(
                f"n is {self.n}; allowed: 8 to 65535, and at most 16 x {self.src.free} elements"
            )
        if not 1 <= k < 32768 or k > self.n:
            raise self.illegal(f"K is {k}; allowed: 1 to 32767, and at most n = {self.n}")

    def cycles(self, chip: Chip) -> int:
        return max(4 * self.n + self.values.free, chip.min_instruction_cycles)

    def execute(self) -> None:
        rows = load(self.src).reshape(self.src.shape[0], -1)
        k = self.values.free
        values, index = self.values.array, self.index.array
        for first in range(0, len(rows), CORE_PARTITIONS):
            core = slice(first, first + CORE_PARTITIONS)
            snake = rows[core].T.reshape(-1)[: self.n]
            best = np.argsort(-snake, kind="stable")[:k][::-1]
            values[core] = convert(snake[best], values.dtype).reshape(values.shape[1:])
            index[core] = best.astype(np.uint32).reshape(index.shape[1:])
