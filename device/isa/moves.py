"""DMA as a kernel writes it: any layout to any other of as many elements, indirect rows, sums.

Costs are those of `dma.py`. `mode` is how descriptors are made: static (before the run), swdge (by
GpSimd) or hwdge (by hardware that Sync or Scalar triggers, NeuronCore-v3 on). All are priced alike:
what a descriptor costs its maker is not published but for hwdge (about 600 ns an instruction,
inside `dma_start_ps`).
"""

from dataclasses import dataclass

import numpy as np

from ..arithmetic import convert
from ..chip import Chip
from ..memory import ITEMSIZE, View
from .dma import Dma, Transfer, hbm_bytes_of, transferring, transposing
from .numerics import FLOAT32, cast, load

MODES = ("unknown", "none", "swdge", "hwdge")
HWDGE_ENGINES = ("sync", "scalar")
SOURCES_MAX = 16  # of dma_compute
TRANSPOSES = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}
"""The permutation of dma_transpose, by number of axes."""


class Moves(Dma):
    """Base: what copies, transposes and sums have in common."""

    __slots__ = ()

    def check_elements(self, left: str, a: View, right: str, b: View) -> None:
        """Two operands have as many elements."""
        if a.size != b.size:
            raise self.illegal(
                f"{left} has {a.size} elements {list(a.shape)} and {right} {b.size} "
                f"{list(b.shape)}; they must be equal"
            )

    def check_mode(self, chip: Chip, mode: str, engine: str, casts: bool) -> None:
        """The descriptor mode exists on the chip, and does what is asked."""
        if mode not in MODES:
            raise self.illegal(f"dge_mode is {mode}; allowed: {', '.join(MODES)}")
        if mode == "hwdge" and chip.generation < 3:
            raise self.illegal(f"dge_mode hwdge needs NeuronCore-v3 or later, not {chip.name}")
        if mode == "hwdge" and casts:
            raise self.illegal("dge_mode hwdge cannot cast: src and dst must have one dtype")
        if engine and mode != "hwdge":
            raise self.illegal(f"engine is {engine}; it goes with dge_mode hwdge only")
        if engine and engine not in HWDGE_ENGINES:
            raise self.illegal(f"engine is {engine}; allowed: {', '.join(HWDGE_ENGINES)}")

    def check_priority(self, chip: Chip, priority: int | None) -> None:
        """0 to 3, from NeuronCore-v4 on."""
        if priority is None:
            return
        if chip.generation < 4:
            raise self.illegal(f"priority needs NeuronCore-v4 or later, not {chip.name}")
        if not 0 <= priority <= 3:
            raise self.illegal(f"priority is {priority}; allowed: 0 to 3")


def moved(src: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Values in another dtype as DMA converts them: through float32."""
    return src if src.dtype == dtype else cast(convert(src, FLOAT32), dtype)


@dataclass(frozen=True, slots=True, eq=False)
class DmaCopy(Moves):
    """dst = src between HBM and SBUF, as many elements in row-major order; casts go by float32."""

    dst: View
    src: View
    mode: str = "unknown"
    trigger: str = ""
    priority: int | None = None
    queue: str = ""

    def check(self, chip: Chip) -> None:
        self.check_space("dst", self.dst)
        self.check_space("src", self.src)
        self.check_elements("src", self.src, "dst", self.dst)
        self.check_mode(chip, self.mode, self.trigger, self.src.dtype != self.dst.dtype)
        self.check_priority(chip, self.priority)

    def transfer(self, chip: Chip) -> Transfer:
        fraction = chip.dma_compute_fraction if self.dst.dtype != self.src.dtype else 1.0
        return transferring(chip, self.dst, self.src, fraction)

    def execute(self) -> None:
        dst, src = self.dst.array, self.src.array
        if src.shape != dst.shape:
            src = src.reshape(dst.shape)
        np.copyto(dst, src if src.dtype == dst.dtype else moved(src, dst.dtype))


class Indirect(Moves):
    """Base of moves whose rows an index picks: row i of one side is row index[i] of the other."""

    __slots__ = ()

    def check_index(self, table: View, rows: int, index: View) -> None:
        """The table is in HBM, and the index has an integer for each row."""
        if table.space != "hbm":
            raise self.illegal(f"a vector offset picks rows of a tensor in hbm, not {table.space}")
        if index.space != "sbuf":
            raise self.illegal(f"the vector offset must be in sbuf, not in {index.space}")
        if index.dtype not in ("i32", "ui32"):
            raise self.illegal(f"the vector offset is {index.dtype}; allowed: ui32, i32")
        if index.size < rows:
            raise self.illegal(
                f"the vector offset has {index.size} elements for {rows} rows; it needs one each"
            )

    def positions(
        self, index: View, rows: int, count: int, skip: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Row numbers in the order of the hardware (columns of index first), and which are legal.

        Raises IllegalInstruction for one outside `count` rows, unless `skip`.
        """
        numbers = index.array.reshape(index.shape[0], -1).T.reshape(-1)[:rows].astype(np.int64)
        legal = (numbers >= 0) & (numbers < count)
        if not skip and not legal.all():
            raise self.illegal(
                f"vector offset {numbers[~legal][0]} is out of bounds: 0 to {count - 1}"
            )
        return numbers, legal


def picked_rows(table: View, index: View, rows: int) -> tuple[View, ...]:
    """The index, and the rows of the table that it picks; without data only the index."""
    if index.tensor._bytes is None:
        return (index,)
    numbers = index.array.reshape(index.shape[0], -1).T.reshape(-1)[:rows].astype(np.int64)
    inside = np.unique(numbers[(numbers >= 0) & (numbers < table.shape[0])])
    return (index, *(table[n : n + 1] for n in inside.tolist()))


@dataclass(frozen=True, slots=True, eq=False)
class DmaGather(Indirect):
    """dst[i] = whole[index[i]] for `rows` rows; with `skip` rows out of bounds leave dst as it is.

    `axes` other than () transpose what is gathered (dma_transpose with an indirect source).
    """

    dst: View
    whole: View
    index: View
    rows: int
    skip: bool = False
    mode: str = "unknown"
    axes: tuple[int, ...] = ()
    queue: str = ""

    def reads(self) -> tuple[View, ...]:
        return self.whole, self.index

    def used(self) -> tuple[View, ...]:
        return picked_rows(self.whole, self.index, self.rows)

    @property
    def hbm_bytes(self) -> int:  # type: ignore[override]
        """Bytes read from and written to HBM: the rows that move."""
        return self.dst.nbytes * (2 if self.dst.space == "hbm" else 1)

    def check(self, chip: Chip) -> None:
        self.check_space("dst", self.dst)
        self.check_index(self.whole, self.rows, self.index)
        count = self.rows * int(np.prod(self.whole.shape[1:]))
        if count != self.dst.size:
            raise self.illegal(
                f"src picks {count} elements and dst has {self.dst.size}; they must be equal"
            )
        self.check_mode(chip, self.mode, "", self.whole.dtype != self.dst.dtype)
        if self.mode == "hwdge":
            raise self.illegal("a vector offset needs dge_mode swdge or unknown, not hwdge")
        if self.axes:
            self._check_transpose(chip)

    def _check_transpose(self, chip: Chip) -> None:
        if chip.generation < 3:
            raise self.illegal(f"an indirect transpose needs NeuronCore-v3, not {chip.name}")
        if ITEMSIZE[self.whole.dtype] != 2 or self.whole.dtype != self.dst.dtype:
            raise self.illegal(
                f"src is {self.whole.dtype} and dst {self.dst.dtype}; one dtype of 2 bytes"
            )
        if self.rows % 16:
            raise self.illegal(f"src has {self.rows} rows; a multiple of 16 is needed")
        if self.mode == "none":
            raise self.illegal("an indirect transpose needs dge_mode swdge or unknown, not none")
        if self.index.dtype != "ui32" or len(self.index.shape) != 2:
            raise self.illegal(
                f"indices are {self.index.dtype}{list(self.index.shape)}; ui32 of two axes is "
                "needed"
            )
        if len(self.whole.shape) == 4 and 1 not in self.whole.shape[1:3]:
            raise self.illegal(
                f"src has shape {list(self.whole.shape)}; of four axes the second or third must "
                "be 1"
            )
        if self.whole.shape[-1] > 128:
            raise self.illegal(f"src has {self.whole.shape[-1]} as its last axis; limit: 128")
        lanes = self.index.shape[0]
        if lanes % 16 or not 16 <= lanes <= 128 or (self.index.free > 1 and lanes != 128):
            raise self.illegal(
                f"indices have shape {list(self.index.shape)}; 16 to 128 rows, a multiple of 16, "
                "and 128 if there are several columns"
            )

    def transfer(self, chip: Chip) -> Transfer:
        fraction = chip.dma_transpose_fraction if self.axes else 1.0
        return transferring(chip, self.dst, self.whole, fraction)

    def execute(self) -> None:
        table, dst = self.whole.array, self.dst.array
        numbers, legal = self.positions(self.index, self.rows, len(table), self.skip)
        if self.axes:
            self._transposed(table, numbers, legal)
            return
        if legal.all():
            dst[...] = moved(table[numbers], dst.dtype).reshape(dst.shape)
            return
        rows = dst.reshape(self.rows, -1) if dst.flags.c_contiguous else dst
        picked = moved(table[numbers[legal]], dst.dtype)
        if len(rows) == self.rows:
            rows[legal] = picked.reshape(-1, *rows.shape[1:])
            return
        full = dst.reshape(self.rows, -1).copy()
        full[legal] = picked.reshape(-1, full.shape[1])
        dst[...] = full.reshape(dst.shape)

    def _transposed(self, table: np.ndarray, numbers: np.ndarray, legal: np.ndarray) -> None:
        dst = self.dst.array
        shape = (self.rows, *table.shape[1:])
        turned = tuple(shape[axis] for axis in self.axes)
        back = np.argsort(self.axes)
        rows = dst.reshape(turned).transpose(back).copy()
        rows[legal] = table[numbers[legal]]
        dst[...] = rows.transpose(self.axes).reshape(dst.shape)


@dataclass(frozen=True, slots=True, eq=False)
class DmaScatter(Indirect):
    """whole[index[i]] = src[i] for `rows` rows, or += with `accumulate`; `skip` as in DmaGather."""

    whole: View
    src: View
    index: View
    rows: int
    accumulate: bool = False
    skip: bool = False
    mode: str = "unknown"
    queue: str = ""

    def reads(self) -> tuple[View, ...]:
        return self.src, self.index

    def writes(self) -> tuple[View, ...]:
        return (self.whole,)

    @property
    def hbm_bytes(self) -> int:  # type: ignore[override]
        """Bytes read from and written to HBM: the rows that move."""
        return self.src.nbytes * ((self.src.space == "hbm") + 1 + self.accumulate)

    def check(self, chip: Chip) -> None:
        self.check_space("src", self.src)
        self.check_index(self.whole, self.rows, self.index)
        count = self.rows * int(np.prod(self.whole.shape[1:]))
        if count != self.src.size:
            raise self.illegal(
                f"dst picks {count} elements and src has {self.src.size}; they must be equal"
            )
        self.check_mode(chip, self.mode, "", self.whole.dtype != self.src.dtype)
        if self.mode == "hwdge":
            raise self.illegal("a vector offset needs dge_mode swdge or unknown, not hwdge")

    def transfer(self, chip: Chip) -> Transfer:
        computes = self.accumulate or self.whole.dtype != self.src.dtype
        fraction = chip.dma_compute_fraction if computes else 1.0
        return transferring(chip, self.src, self.whole, fraction)

    def execute(self) -> None:
        table = self.whole.array
        numbers, legal = self.positions(self.index, self.rows, len(table), self.skip)
        src = self.src.array.reshape(self.rows, *table.shape[1:])
        if not self.accumulate:
            table[numbers[legal]] = moved(src[legal], table.dtype)
            return
        for i in np.flatnonzero(legal):
            row = convert(table[numbers[i]], FLOAT32) + convert(src[i], FLOAT32)
            table[numbers[i]] = cast(row, table.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class DmaGatherAdd(Indirect):
    """dst[i] += whole[index[i]] for `rows` rows, in float32 (dma_compute of an indirect source)."""

    dst: View
    whole: View
    index: View
    rows: int
    skip: bool = False
    queue: str = ""

    def reads(self) -> tuple[View, ...]:
        return self.whole, self.index, self.dst

    def used(self) -> tuple[View, ...]:
        return (self.dst, *picked_rows(self.whole, self.index, self.rows))

    @property
    def hbm_bytes(self) -> int:  # type: ignore[override]
        """Bytes read from HBM: the rows that move."""
        return self.dst.nbytes

    def check(self, chip: Chip) -> None:
        self.check_index(self.whole, self.rows, self.index)
        if self.dst.space != "sbuf":
            raise self.illegal(f"dst must be in sbuf to gather and add, not in {self.dst.space}")
        count = self.rows * int(np.prod(self.whole.shape[1:]))
        if count != self.dst.size:
            raise self.illegal(
                f"the indirect source picks {count} elements and dst has {self.dst.size}"
            )

    def transfer(self, chip: Chip) -> Transfer:
        return transferring(chip, self.dst, self.whole, chip.dma_compute_fraction)

    def execute(self) -> None:
        table, dst = self.whole.array, self.dst.array
        numbers, legal = self.positions(self.index, self.rows, len(table), self.skip)
        rows = convert(dst, FLOAT32).reshape(self.rows, -1).copy()
        picked = convert(table[numbers[legal]], FLOAT32)
        rows[legal] += picked.reshape(-1, rows.shape[1])
        dst[...] = cast(rows, dst.dtype).reshape(dst.shape)


@dataclass(frozen=True, slots=True, eq=False)
class DmaTranspose(Moves):
    """dst = src with axes permuted: (1, 0), (2, 1, 0) or (3, 1, 2, 0); dtypes of 2 or 4 bytes.

    dst in SBUF. Up to 90 % of the copy rate from HBM, 50 % from SBUF. hwdge: 2 bytes, a last axis
    of at most 128, and leading axes that fill 16 rows.
    """

    dst: View
    src: View
    axes: tuple[int, ...]
    mode: str = "unknown"
    priority: int | None = None
    queue: str = ""

    def check(self, chip: Chip) -> None:
        dst, src = self.dst, self.src
        self.check_space("dst", dst)
        self.check_space("src", src)
        if dst.space != "sbuf":
            raise self.illegal(f"dst must be in sbuf, not in {dst.space}")
        if TRANSPOSES.get(len(src.shape)) != self.axes:
            raise self.illegal(
                f"axes is {self.axes} for src of {len(src.shape)} axes; allowed: "
                f"{', '.join(map(str, TRANSPOSES.values()))}"
            )
        self.check_elements("src", src, "dst", dst)
        if dst.shape[0] != src.shape[self.axes[0]]:
            raise self.illegal(
                f"dst has {dst.shape[0]} partitions; src {list(src.shape)} transposed has "
                f"{src.shape[self.axes[0]]}"
            )
        if src.dtype != dst.dtype or ITEMSIZE[src.dtype] not in (2, 4):
            raise self.illegal(f"src is {src.dtype} and dst {dst.dtype}; one dtype of 2 or 4 bytes")
        self.check_mode(chip, self.mode, "", False)
        self.check_priority(chip, self.priority)
        if self.mode == "swdge":
            raise self.illegal(f"dge_mode is {self.mode}; allowed: unknown, none, hwdge")
        if self.mode == "hwdge":
            self._check_hwdge()

    def _check_hwdge(self) -> None:
        shape = self.src.shape
        if ITEMSIZE[self.src.dtype] != 2:
            raise self.illegal(f"src is {self.src.dtype}; hwdge transposes 2 bytes")
        if shape[-1] > 128:
            raise self.illegal(f"src has {shape[-1]} as its last axis; limit with hwdge: 128")
        if len(shape) == 2 and shape[0] != 16:
            raise self.illegal(f"src has {shape[0]} rows; hwdge transposes 16")
        if len(shape) > 2 and (shape[0] not in (1, 2, 4, 8, 16) or shape[0] * shape[-2] % 16):
            raise self.illegal(
                f"src has shape {list(shape)}; with hwdge the first axis is 1, 2, 4, 8 or 16 and "
                "times the last but one a multiple of 16"
            )

    def transfer(self, chip: Chip) -> Transfer:
        inside = self.src.space == "sbuf"
        fraction = chip.dma_transpose_sbuf_fraction if inside else chip.dma_transpose_fraction
        return transposing(chip, self.dst, self.src, fraction)

    def execute(self) -> None:
        dst = self.dst.array
        dst[...] = self.src.array.transpose(self.axes).reshape(dst.shape)


@dataclass(frozen=True, slots=True, eq=False)
class DmaCompute(Moves):
    """dst = the sum of up to 16 sources, in float32, on the way.

    Cost: the transfer of every source, at the rate of DMA that computes.
    """

    dst: View
    srcs: tuple[View, ...]
    op: str = "add"
    queue: str = ""

    def reads(self) -> tuple[View, ...]:
        return self.srcs

    @property
    def hbm_bytes(self) -> int:  # type: ignore[override]
        """Bytes read from and written to HBM."""
        return hbm_bytes_of(self.dst, *self.srcs)

    def check(self, chip: Chip) -> None:
        self.check_space("dst", self.dst)
        if not 1 <= len(self.srcs) <= SOURCES_MAX:
            raise self.illegal(f"srcs has {len(self.srcs)} tensors; allowed: 1 to {SOURCES_MAX}")
        for number, src in enumerate(self.srcs):
            self.check_space(f"srcs[{number}]", src)
            self.check_elements(f"srcs[{number}]", src, "dst", self.dst)
        if self.op != "add":
            raise self.illegal(f"reduce_op is {self.op}; allowed: add")

    def transfer(self, chip: Chip) -> Transfer:
        fraction = chip.dma_compute_fraction
        each = [transferring(chip, self.dst, src, fraction) for src in self.srcs]
        return sum(lasts for lasts, _ in each), sum(work for _, work in each)

    def execute(self) -> None:
        dst = self.dst.array
        total = load(self.srcs[0]).reshape(dst.shape)
        for src in self.srcs[1:]:
            total = total + load(src).reshape(dst.shape)
        dst[...] = cast(total, dst.dtype)
