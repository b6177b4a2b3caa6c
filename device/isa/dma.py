"""The DMA engines: whole-row and strided moves between HBM and SBUF.

A core's 16 DMA engines are one resource here. A transfer of [P, F] uses one engine for every 8
partitions. From its first byte to its last it lasts max(fixed, bytes / rate), the rate being the
smaller of the engines' (times the published efficiency for its bytes per partition) and the core's
share of its HBM stack, and never less than its descriptors, one for each contiguous run, take to
process. Of the engines' time it takes less: its bytes at the full rate, or its descriptors, spread
over all of them. Transfers of other queues, and the next of its own, use the rest.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..arithmetic import apply, convert
from ..chip import Chip
from ..memory import ITEMSIZE, View, contiguous_elements
from ..units import transfer_ps
from .base import Instruction

SPACES = ("hbm", "sbuf")
Transfer = tuple[int, int]
DESCRIPTOR_PS = 7_000  # nki_perf_guide.rst fig. 20-21: a 4-byte transfer takes 7 ns of one engine


class Dma(Instruction):
    """Base of the DMA instructions; `queue` orders them, empty for the default of its direction."""

    __slots__ = ()
    engine = "dma"

    @property
    def hbm_bytes(self) -> int:  # type: ignore[override]
        """Bytes read from and written to HBM."""
        return hbm_bytes_of(self.dst, self.src)

    def cycles(self, chip: Chip) -> int:
        """DMA has no clock of its own: see `duration`."""
        raise NotImplementedError

    def transfer(self, chip: Chip) -> "Transfer":
        """Picoseconds that the data move, and of work for all DMA engines together."""
        raise NotImplementedError

    def duration(self, chip: Chip) -> int:
        return self.transfer(chip)[0]

    def work(self, chip: Chip) -> int:
        return self.transfer(chip)[1]

    def check_space(self, operand: str, view: View) -> None:
        """The operand is in HBM or SBUF."""
        if view.space not in SPACES:
            raise self.illegal(f"{operand} must be in hbm or sbuf for DMA, not in {view.space}")


@dataclass(frozen=True, slots=True, eq=False)
class DmaCopy(Dma):
    """dst = src between HBM and SBUF in any direction, of one shape; `accumulate` adds into dst.

    A change of dtype goes through float32. Casting and adding halve the rate before v4.
    """

    dst: View
    src: View
    accumulate: bool = False
    queue: str = ""

    def reads(self) -> tuple[View, ...]:
        return (self.src, self.dst) if self.accumulate else (self.src,)

    def check(self, chip: Chip) -> None:
        self.check_space("dst", self.dst)
        self.check_space("src", self.src)
        self.check_same("src", self.src, "dst", self.dst)

    def transfer(self, chip: Chip) -> Transfer:
        computes = self.accumulate or self.dst.dtype != self.src.dtype
        fraction = chip.dma_compute_fraction if computes else 1.0
        return transferring(chip, self.dst, self.src, fraction)

    def execute(self) -> None:
        dst, src = self.dst.array, self.src.array
        if self.accumulate:
            dst[...] = apply("add", dst, src, out=dst.dtype)
        elif dst.dtype == src.dtype:
            np.copyto(dst, src)
        else:
            dst[...] = convert(src, dst.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class DmaTranspose(Dma):
    """dst[j, i] = src[i, j], dtypes of 2 or 4 bytes.

    Up to 90 % of the copy rate from HBM, 50 % from SBUF.
    """

    dst: View
    src: View
    queue: str = ""

    def check(self, chip: Chip) -> None:
        self.check_space("dst", self.dst)
        self.check_space("src", self.src)
        if len(self.src.shape) != 2 or self.dst.shape != self.src.shape[::-1]:
            raise self.illegal(
                f"dst has shape {list(self.dst.shape)}; src {list(self.src.shape)} transposed is "
                f"{list(self.src.shape[::-1])}"
            )
        if self.src.dtype != self.dst.dtype or ITEMSIZE[self.src.dtype] not in (2, 4):
            raise self.illegal(
                f"src is {self.src.dtype} and dst {self.dst.dtype}; one dtype of 2 or 4 bytes"
            )

    def transfer(self, chip: Chip) -> Transfer:
        inside = self.src.space == "sbuf"
        fraction = chip.dma_transpose_sbuf_fraction if inside else chip.dma_transpose_fraction
        return transposing(chip, self.dst, self.src, fraction)

    def execute(self) -> None:
        self.dst.array[...] = self.src.array.T


@dataclass(frozen=True, slots=True, eq=False)
class DmaGather(Dma):
    """dst[i] = src[index[i]]: rows of an HBM tensor by row number, one descriptor run per row.

    index is an integer column [n, 1] in SBUF or HBM. A row number out of bounds is an error,
    or with `bounds="clamp"` the nearest row, or with `bounds="skip"` leaves dst[i] as it was.
    """

    dst: View
    src: View
    index: View
    bounds: str = "error"
    queue: str = ""

    def reads(self) -> tuple[View, ...]:
        return self.src, self.index

    @property
    def hbm_bytes(self) -> int:  # type: ignore[override]
        """Bytes read from and written to HBM: the rows that move."""
        return self.dst.nbytes * (2 if self.dst.space == "hbm" else 1)

    def check(self, chip: Chip) -> None:
        _check_rows(self, rows=self.dst, table=self.src, index=self.index, names=("dst", "src"))

    def transfer(self, chip: Chip) -> Transfer:
        return transferring(chip, self.dst, self.src)

    def execute(self) -> None:
        dst, src = self.dst.array, self.src.array
        rows, legal = _row_numbers(self, self.index, len(src), self.bounds)
        dst[legal] = convert(src[rows[legal]], dst.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class DmaScatter(Dma):
    """dst[index[i]] = src[i], or += with `accumulate` in order of i: rows of an HBM tensor.

    `bounds` as in DmaGather, "skip" leaving the row out.
    """

    dst: View
    src: View
    index: View
    accumulate: bool = False
    bounds: str = "error"
    queue: str = ""

    def reads(self) -> tuple[View, ...]:
        return (self.src, self.index, self.dst) if self.accumulate else (self.src, self.index)

    @property
    def hbm_bytes(self) -> int:  # type: ignore[override]
        """Bytes read from and written to HBM: the rows that move."""
        return self.src.nbytes * ((self.src.space == "hbm") + 1 + self.accumulate)

    def check(self, chip: Chip) -> None:
        _check_rows(self, rows=self.src, table=self.dst, index=self.index, names=("src", "dst"))

    def transfer(self, chip: Chip) -> Transfer:
        computes = self.accumulate or self.dst.dtype != self.src.dtype
        fraction = chip.dma_compute_fraction if computes else 1.0
        return transferring(chip, self.src, self.dst, fraction)

    def execute(self) -> None:
        dst, src = self.dst.array, self.src.array
        rows, legal = _row_numbers(self, self.index, len(dst), self.bounds)
        if not self.accumulate:
            dst[rows[legal]] = convert(src[legal], dst.dtype)
            return
        for i in np.flatnonzero(legal):
            dst[rows[i]] = apply("add", dst[rows[i]], src[i], out=dst.dtype)


def transferring(chip: Chip, rows: View, other: View, fraction: float = 1.0) -> Transfer:
    """The elements of `rows` moved from or to parts of `other`, at a fraction of the rate."""
    return _transfer(chip, _layout(rows), _layout(other), fraction)


def transfer_duration(chip: Chip, rows: View, other: View, fraction: float = 1.0) -> int:
    """Picoseconds of data for the elements of `rows`, moved from or to parts of `other`."""
    return _transfer(chip, _layout(rows), _layout(other), fraction)[0]


def transposing(chip: Chip, dst: View, src: View, fraction: float) -> Transfer:
    """A transpose at a fraction of the rate of a copy."""
    layouts = _layout(dst), _layout(src)
    data = transfer_ps(src.nbytes, int(_rate(chip, *layouts) * fraction))
    return max(chip.dma_fixed_ps, data), _spread(chip, data, *layouts)


Layout = tuple[str, str, tuple[int, ...], tuple[int, ...]]


def _layout(view: View) -> Layout:
    return view.space, view.dtype, view.shape, view.strides


@lru_cache(maxsize=4096)
def _transfer(chip: Chip, rows: Layout, other: Layout, fraction: float) -> Transfer:
    sizes = ITEMSIZE[rows[1]], ITEMSIZE[other[1]]
    count = math.prod(rows[2])
    nbytes = count * max(sizes)
    payload = nbytes / _partitions(chip, rows, other)
    rate = _rate(chip, rows, other) * fraction
    slow = int(rate * chip.descriptor_efficiency(payload))
    run = min(
        contiguous_elements(space, shape, strides, size)
        for (space, _, shape, strides), size in zip((rows, other), sizes, strict=True)
    )
    descriptors = -(-count // run) * DESCRIPTOR_PS // _engines(chip, rows, other)
    work = max(transfer_ps(nbytes, int(rate)), descriptors)
    lasts = max(chip.dma_fixed_ps, transfer_ps(nbytes, slow), descriptors)
    return lasts, _spread(chip, work, rows, other)


def _spread(chip: Chip, work: int, *layouts: Layout) -> int:
    """The work of the engines that a transfer uses, as time of all engines of the core."""
    return -(-work * _engines(chip, *layouts) // chip.dma_engines)


def _partitions(chip: Chip, *layouts: Layout) -> int:
    """Partitions of the SBUF side; between two places in HBM the work is spread as over all."""
    counts = [shape[0] for space, _, shape, _ in layouts if space == "sbuf"]
    return min(counts, default=chip.partitions)


def _engines(chip: Chip, *layouts: Layout) -> int:
    """DMA engines at work: each serves an equal share of the partitions (8 of 128)."""
    return -(-_partitions(chip, *layouts) * chip.dma_engines // chip.partitions)


def _rate(chip: Chip, *layouts: Layout) -> int:
    """Bytes per second: the engines at work, and this core's share of its HBM stack."""
    engines = chip.dma_bytes_per_s * _engines(chip, *layouts) // chip.dma_engines
    touches = sum(space == "hbm" for space, *_ in layouts)
    if not touches:
        return engines
    return min(engines, chip.stack_bytes_per_s // (chip.cores_per_stack * touches))


def hbm_bytes_of(*views: View) -> int:
    """Bytes of the views that lie in HBM."""
    return sum(view.nbytes for view in views if view.space == "hbm")


def _check_rows(
    instruction: DmaGather | DmaScatter, *, rows: View, table: View, index: View, names: tuple
) -> None:
    instruction.check_space(names[0], rows)
    instruction.check_space("index", index)
    if table.space != "hbm":
        raise instruction.illegal(f"{names[1]} must be in hbm, not in {table.space}")
    if rows.shape[1:] != table.shape[1:]:
        raise instruction.illegal(
            f"{names[0]} has rows of {list(rows.shape[1:])} and {names[1]} of "
            f"{list(table.shape[1:])}; they must be equal"
        )
    if index.shape not in ((rows.shape[0], 1), (rows.shape[0],)):
        raise instruction.illegal(
            f"index has shape {list(index.shape)}; it must be [{rows.shape[0]}, 1]"
        )
    if index.dtype not in ("i32", "ui32"):
        raise instruction.illegal(f"index is {index.dtype}; allowed: i32, ui32")
    if instruction.bounds not in ("error", "clamp", "skip"):
        raise instruction.illegal(f"bounds is {instruction.bounds}; allowed: error, clamp, skip")


def _row_numbers(
    instruction: Instruction, index: View, count: int, bounds: str
) -> tuple[np.ndarray, np.ndarray]:
    rows = index.array.reshape(-1).astype(np.int64)
    legal = (rows >= 0) & (rows < count)
    if bounds == "clamp":
        return np.clip(rows, 0, count - 1), np.ones(len(rows), bool)
    if bounds == "error" and not legal.all():
        raise instruction.illegal(f"index is {rows[~legal][0]}; limit: 0 to {count - 1}")
    return rows, legal
