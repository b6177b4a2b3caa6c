"""HBM, SBUF and PSUM: capacity, allocation, and views of what they hold.

SBUF and PSUM have 128 partitions of bytes. A tensor there is `[partition, free...]`: its first
axis runs over partitions, the others lie at one byte address inside each of them. HBM is one line
of bytes. With data, SBUF and PSUM are real byte arrays, so tensors at overlapping addresses
overlap; an HBM tensor has a numpy array of its own (a rank's HBM may live in shared memory).
Without data the same addresses exist, for legality and time, and nothing is stored.

Fresh floats read as NaN and fresh integers as their largest value, so that use of uninitialised
memory shows.
"""

import math
from bisect import insort
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from .chip import Chip
from .dtypes import is_float, numpy_dtype
from .errors import BadInput, IllegalInstruction, OutOfMemory

ALIGNMENT = {"hbm": 64, "sbuf": 4, "psum": 4}
PARTS_KEPT = 4096  # views that a tensor on chip remembers
LARGEST_HOLDERS = 3  # tensors that an out-of-memory message names

Index = int | slice | tuple[int | slice, ...]


class View:
    """A strided window on a tensor: the operand of an instruction.

    `shape` and `dtype` (StableHLO name) say what is read; `offset` is the byte offset from the
    tensor's start, `strides` are in bytes. On chip the first axis is the partition axis: its
    stride is 0 here (a view covers consecutive partitions from `partition` on) and `offset` is
    inside each partition. Stride 0 on another axis repeats one element (`broadcast`).
    """

    __slots__ = (
        "tensor", "space", "dtype", "shape", "strides", "offset", "partition",
        "legal_on", "_array", "_region", "_box", "_free",
    )  # fmt: skip

    tensor: "Tensor"
    legal_on: Chip | None  # the chip whose access rules the view was found to keep
    _array: np.ndarray | None
    _region: tuple | None
    _box: tuple | None
    _free: int | None

    def __init__(
        self,
        tensor: "Tensor",
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        offset: int,
        partition: int,
        dtype: str,
    ) -> None:
        self.tensor, self.space, self.dtype = tensor, tensor.space, dtype
        self.shape, self.strides = shape, strides
        self.offset, self.partition = offset, partition
        self.legal_on = self._array = self._region = self._box = self._free = None

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return ITEMSIZE[self.dtype]

    @property
    def partitions(self) -> tuple[int, int]:
        """(first partition, number of partitions); (0, 1) in HBM."""
        return (0, 1) if self.space == "hbm" else (self.partition, self.shape[0])

    @property
    def free(self) -> int:
        """Elements per partition; in HBM, all elements."""
        if self._free is None:
            self._free = math.prod(self.shape if self.space == "hbm" else self.shape[1:])
        return self._free

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements together."""
        return math.prod(self.shape) * ITEMSIZE[self.dtype]

    @property
    def interval(self) -> tuple[int, int]:
        """Byte range [start, stop) from first to last element: absolute, or per partition."""
        return self.region[3:]

    @property
    def region(self) -> tuple[str, int, int, int, int]:
        """(space, first partition, end partition, first byte, end byte): what hazards compare."""
        region = self._region
        if region is None:
            start = self.tensor.address + self.offset
            end = start + ITEMSIZE[self.dtype]
            for count, stride in zip(self.shape, self.strides):  # noqa: B905 (hot path)
                end += (count - 1) * stride
            first, count = self.partitions
            region = self._region = (self.space, first, first + count, start, end)
        return region

    @property
    def box(self) -> tuple[tuple[int, int], ...] | None:
        """[start, stop) along each axis of the tensor, or None if the view is no box of it."""
        if self._box is None:
            self._box = _box_of(self) or ()
        return self._box or None

    @property
    def contiguous(self) -> bool:
        """Whether the elements (on chip: of each partition) lie in one piece."""
        return contiguous_elements(self.space, self.shape, self.strides, self.itemsize) == self.free

    @property
    def array(self) -> np.ndarray:
        """The values as a numpy view. Raises BadInput in a run without data."""
        if self._array is None:
            self._array = self.tensor._window(self)
        return self._array

    def __getitem__(self, index: Index) -> "View":
        """A part: slices and integers, inside the bounds. The partition axis is always kept."""
        items = index if isinstance(index, tuple) else (index,)
        shape, strides = list(self.shape), list(self.strides)
        offset, partition = self.offset, self.partition
        if len(items) > len(shape):
            raise self._outside(index)
        dropped = []
        for axis, item in enumerate(items):
            extent = shape[axis]
            if isinstance(item, slice):
                start = 0 if item.start is None else item.start
                stop = extent if item.stop is None else item.stop
                step = 1 if item.step is None else item.step
                if not 0 <= start <= stop <= extent or step < 1:
                    raise self._outside(index)
                shape[axis] = stop - start if step == 1 else -(-(stop - start) // step)
            else:
                start, step = int(item), 1
                if not 0 <= start < extent:
                    raise self._outside(index)
                shape[axis] = 1
                if axis or self.space == "hbm":
                    dropped.append(axis)
            if axis == 0 and self.space != "hbm":
                if step != 1:
                    raise self._outside(index)
                partition += start
            else:
                offset += start * strides[axis]
                strides[axis] *= step
        for axis in reversed(dropped):
            del shape[axis], strides[axis]
        return View(self.tensor, tuple(shape), tuple(strides), offset, partition, self.dtype)

    def reshape(self, *shape: int) -> "View":
        """The same elements with other axes; on chip the partition axis stays the first.

        Only for views that lie in one piece (per partition). Raises BadInput otherwise.
        """
        keeps = self.space == "hbm" or (bool(shape) and shape[0] == self.shape[0])
        if not (keeps and math.prod(shape) == self.size and self.contiguous):
            raise BadInput("reshape", shape, f"the same elements as {self}, in one piece")
        strides = _dense_strides(shape, self.itemsize, self.space)
        return View(self.tensor, tuple(shape), strides, self.offset, self.partition, self.dtype)

    def permute(self, *axes: int) -> "View":
        """Axes in another order; on chip axis 0 stays the first. Raises BadInput otherwise."""
        if sorted(axes) != list(range(len(self.shape))) or (self.space != "hbm" and axes[0]):
            raise BadInput("axes", axes, f"an order of the axes of {self} with partitions first")
        shape = tuple(self.shape[axis] for axis in axes)
        strides = tuple(self.strides[axis] for axis in axes)
        return View(self.tensor, shape, strides, self.offset, self.partition, self.dtype)

    def broadcast(self, *shape: int) -> "View":
        """Axes of length 1 repeated to `shape` (leading axes may be new in HBM), by stride 0.

        The partition axis is not repeated on chip: engines cannot; DMA from HBM can.
        """
        lead = len(shape) - len(self.shape)
        own = (1,) * lead + self.shape
        legal = lead >= 0 and all(a == b or a == 1 for a, b in zip(own, shape, strict=True))
        if not legal or (self.space != "hbm" and (lead or shape[0] != self.shape[0])):
            raise BadInput("broadcast", shape, f"{self} with free axes of length 1 repeated")
        steps = (0,) * lead + self.strides
        strides = tuple(s if a == b else 0 for a, b, s in zip(own, shape, steps, strict=True))
        return View(self.tensor, tuple(shape), strides, self.offset, self.partition, self.dtype)

    def expand(self, axis: int) -> "View":
        """With a new axis of length 1 at `axis` (not before the partition axis on chip)."""
        if not (0 if self.space == "hbm" else 1) <= axis <= len(self.shape):
            raise BadInput("axis", axis, f"an axis of {self} behind the partition axis")
        shape = (*self.shape[:axis], 1, *self.shape[axis:])
        strides = (*self.strides[:axis], self.itemsize, *self.strides[axis:])
        return View(self.tensor, shape, strides, self.offset, self.partition, self.dtype)

    def split(self, axis: int, inner: int) -> "View":
        """Axis `axis` of n elements as two, n / inner and inner (never the partition axis)."""
        outer, rest = divmod(self.shape[axis], inner)
        if rest or (self.space != "hbm" and axis == 0):
            raise BadInput("split", inner, f"a divisor of the elements of axis {axis} of {self}")
        stride = self.strides[axis]
        shape = (*self.shape[:axis], outer, inner, *self.shape[axis + 1 :])
        strides = (*self.strides[:axis], inner * stride, stride, *self.strides[axis + 1 :])
        return View(self.tensor, shape, strides, self.offset, self.partition, self.dtype)

    def bitcast(self, dtype: str) -> "View":
        """The same bytes read as another dtype of the same width."""
        if ITEMSIZE[dtype] != self.itemsize:
            raise BadInput("dtype", dtype, f"a dtype of {self.itemsize} B, like {self.dtype}")
        return View(self.tensor, self.shape, self.strides, self.offset, self.partition, dtype)

    def overlaps(self, other: "View") -> bool:
        """Whether two views may share a byte; exact for boxes of one tensor."""
        space, first, end, low, high = self.region
        their_space, their_first, their_end, their_low, their_high = other.region
        if space != their_space or first >= their_end or their_first >= end:
            return False
        if low >= their_high or their_low >= high:
            return False
        if self.tensor is not other.tensor or self.box is None or other.box is None:
            return True
        pairs = zip(self.box, other.box, strict=True)
        return all(a < d and c < b for (a, b), (c, d) in pairs)

    def _outside(self, index: Any) -> IllegalInstruction:
        shown = ", ".join(map(_shown, index if isinstance(index, tuple) else (index,)))
        return IllegalInstruction(f"[{shown}] is outside {self}, or no slice that it can have")

    def __repr__(self) -> str:
        place = f" from partition {self.partition}" if self.partition else ""
        return f"{self.tensor.name} {self.dtype}{list(self.shape)} in {self.space}{place}"


class Tensor(View):
    """An allocation: a view of all of itself, with an address and a name.

    `pitch` is the distance between partitions in the backing bytes, and `base` where the first
    partition's first byte is in them (both 0 in HBM).
    """

    __slots__ = ("address", "name", "_bytes", "pitch", "base", "_parts")

    def __init__(
        self,
        space: str,
        address: int,
        shape: Sequence[int],
        dtype: str,
        name: str,
        backing: np.ndarray | None = None,
        pitch: int = 0,
        base: int = 0,
    ) -> None:
        self.space, self.address, self.name = space, address, name
        self._bytes, self.pitch, self.base = backing, pitch, base
        self._parts: dict[tuple, View] = {}
        self.dtype, self.shape = dtype, tuple(int(n) for n in shape)
        self.strides = _dense_strides(self.shape, ITEMSIZE[dtype], space)
        self.offset = self.partition = 0
        self.legal_on = self._array = self._region = self._box = self._free = None

    @property
    def tensor(self) -> "Tensor":  # type: ignore[override]
        """Itself; not stored, so that an array goes as soon as its last tensor does."""
        return self

    def __getitem__(self, index: Index) -> View:
        """A part, as of any view. On chip the same part is the same object: loops use few."""
        if self.space == "hbm":
            return View.__getitem__(self, index)
        key = []
        for item in index if type(index) is tuple else (index,):
            if type(item) is slice:
                key += (item.start, item.stop, item.step)
            else:
                key.append(item)
                key.append("at")
        key = tuple(key)
        part = self._parts.get(key)
        if part is None:
            if len(self._parts) >= PARTS_KEPT:
                self._parts.clear()
            part = self._parts[key] = View.__getitem__(self, index)
        return part

    @property
    def data(self) -> np.ndarray | None:
        """The values, or None in a run without data."""
        return None if self._bytes is None else self.array

    @property
    def footprint(self) -> int:
        """Bytes held: per partition on chip, in all in HBM."""
        return self.free * self.itemsize

    def _window(self, view: View) -> np.ndarray:
        if self._bytes is None:
            raise BadInput("data", None, f"values of {view}: the run was made without data")
        strides, start = view.strides, view.offset
        if self.pitch:
            strides = (self.pitch, *strides[1:])
            start += self.base + view.partition * self.pitch
        kind = numpy_dtype(view.dtype)
        return np.ndarray(view.shape, kind, self._bytes, start, strides)  # type: ignore[arg-type]


class Memory:
    """One memory: where its tensors lie, how full it is and was.

    `capacity`, `used` and `peak` are bytes: per partition for SBUF and PSUM. Allocation takes the
    first gap that fits. A PSUM tensor of up to one bank never crosses into the next.
    """

    def __init__(
        self,
        space: str,
        capacity: int,
        *,
        bank: int = 0,
        physical: int = 0,
        partitions: int = 1,
        data: bool = True,
    ) -> None:
        self.space, self.capacity, self.bank = space, capacity, bank
        self.physical, self.partitions, self.data = physical, partitions, data
        self.used = self.peak = 0
        self._blocks: list[tuple[int, int, int]] = []  # (start, end, id), sorted
        self._tensors: dict[int, Tensor] = {}
        self._beyond = capacity  # addresses of adopted tensors that have none
        self._store: dict[str, np.ndarray] = {}

    @classmethod
    def sbuf(cls, chip: Chip, data: bool = True) -> "Memory":
        """The part of a core's SBUF that kernels may use."""
        return cls(
            "sbuf", chip.sbuf_partition_bytes, physical=chip.sbuf_physical_partition_bytes,
            partitions=chip.partitions, data=data,
        )  # fmt: skip

    @classmethod
    def psum(cls, chip: Chip, data: bool = True) -> "Memory":
        """A core's PSUM, all banks."""
        return cls(
            "psum", chip.psum_banks * chip.psum_bank_bytes, bank=chip.psum_bank_bytes,
            partitions=chip.partitions, data=data,
        )  # fmt: skip

    @classmethod
    def hbm(cls, capacity: int, data: bool = True) -> "Memory":
        """`capacity` bytes of HBM."""
        return cls("hbm", capacity, data=data)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors held, by address."""
        return tuple(self._tensors[key] for _, _, key in self._blocks)

    @property
    def available(self) -> int:
        """Bytes not held."""
        return self.capacity - self.used

    @property
    def largest_gap(self) -> int:
        """Bytes of the longest free range."""
        return max((end - start for start, end in self._gaps()), default=0)

    def allocate(
        self, shape: Sequence[int], dtype: str, name: str = "tile", address: int | None = None
    ) -> Tensor:
        """A new tensor at the first gap that fits, or at `address` if that is given.

        Raises OutOfMemory (numbers and largest holders), or IllegalInstruction for a shape that
        this memory cannot hold. A tensor at a stated address may overlap others, and is not
        counted: the caller manages that space.
        """
        self._check_shape(shape, dtype, name)
        probe = Tensor(self.space, 0, shape, dtype, name)
        if address is None:
            start = self._first_fit(probe)
            tensor = self._tensor(start, shape, dtype, name, 0 < probe.footprint <= self.bank)
            self._hold(tensor)
        else:
            if address < 0 or address + probe.footprint > self.capacity:
                raise self._out_of_memory(probe, f"does not fit at byte {address}")
            tensor = self._tensor(address, shape, dtype, name)
        if tensor.data is not None:
            _fill(tensor.data, dtype)
        return tensor

    def adopt(
        self,
        array: np.ndarray | None,
        shape: Sequence[int],
        dtype: str,
        name: str = "value",
        address: int | None = None,
    ) -> Tensor:
        """A tensor of HBM that lives elsewhere: C-contiguous `array` (or None without data), whose
        elements are read as `shape`.

        It is not counted as held: its owner does. `address` is what hazards compare; without one
        the tensor overlaps no other.
        """
        if self.space != "hbm":
            raise BadInput("adopt", self.space, "hbm")
        backing = None
        if array is not None:
            fits = array.size == math.prod(shape) and array.itemsize == ITEMSIZE[dtype]
            if not (fits and array.flags.c_contiguous):
                found = f"{array.dtype}{list(array.shape)}"
                raise BadInput(name, found, f"a C-contiguous array of {dtype}{list(shape)}")
            backing = array.reshape(-1).view(np.uint8)
        if address is None:
            address = self._beyond
            self._beyond += math.prod(shape) * ITEMSIZE[dtype]
        return Tensor("hbm", address, shape, dtype, name, backing)

    def free(self, tensor: Tensor) -> None:
        """Releases the tensor's bytes. Raises BadInput if it is not held here."""
        if self._tensors.pop(id(tensor), None) is None:
            raise BadInput("free", tensor, f"a tensor that {self.space} holds")
        tensor._parts.clear()
        self._blocks.remove((tensor.address, tensor.address + tensor.footprint, id(tensor)))
        self.used -= tensor.footprint

    def _check_shape(self, shape: Sequence[int], dtype: str, name: str) -> None:
        if dtype not in ITEMSIZE:
            numpy_dtype(dtype)
        if self.space == "hbm":
            return
        if len(shape) < 2:
            raise IllegalInstruction(
                f"{name}: a tensor in {self.space} is [partition, free...], not {list(shape)}"
            )
        if not 0 < shape[0] <= self.partitions:
            raise IllegalInstruction(
                f"{name}: partition dimension is 1 to {self.partitions}, not {shape[0]}"
            )

    def _tensor(
        self, address: int, shape: Sequence[int], dtype: str, name: str, banked: bool = False
    ) -> Tensor:
        if not self.data:
            return Tensor(self.space, address, shape, dtype, name)
        if self.space == "hbm":
            backing = np.empty(math.prod(shape) * ITEMSIZE[dtype], np.uint8)
            return Tensor("hbm", address, shape, dtype, name, backing)
        if banked:
            number, inside = divmod(address, self.bank)
            backing = self._backing("banks", self.partitions * self.capacity)
            base = number * self.partitions * self.bank + inside
            return Tensor(self.space, address, shape, dtype, name, backing, self.bank, base)
        pitch = _pitch(self.capacity)
        backing = self._backing("rows", self.partitions * pitch)
        return Tensor(self.space, address, shape, dtype, name, backing, pitch, address)

    def _backing(self, layout: str, nbytes: int) -> np.ndarray:
        """The bytes: partition by partition (`rows`), or bank by bank (`banks`).

        Tensors of PSUM that fit a bank and are placed by the allocator lie in the second, where a
        full bank is one piece of memory (numpy adds into it three times as fast); all others,
        stated addresses among them, in the first. No two tensors placed by the allocator overlap.
        """
        if layout not in self._store:
            self._store[layout] = np.zeros(nbytes, np.uint8)
        return self._store[layout]

    def _hold(self, tensor: Tensor) -> None:
        self._tensors[id(tensor)] = tensor
        insort(self._blocks, (tensor.address, tensor.address + tensor.footprint, id(tensor)))
        self.used += tensor.footprint
        self.peak = max(self.peak, self.used)

    def _gaps(self) -> list[tuple[int, int]]:
        """Free ranges by address."""
        gaps, end = [], 0
        for start, stop, _ in self._blocks:
            if start > end:
                gaps.append((end, start))
            end = max(end, stop)
        if end < self.capacity:
            gaps.append((end, self.capacity))
        return gaps

    def _first_fit(self, tensor: Tensor) -> int:
        step = max(ALIGNMENT[self.space], tensor.itemsize)
        need = tensor.footprint
        for start, end in self._gaps():
            start = -(-start // step) * step
            if self.bank and start // self.bank != (start + max(need, 1) - 1) // self.bank:
                start = -(-start // self.bank) * self.bank
            if start + need <= end:
                return start
        raise self._out_of_memory(tensor, f"the largest gap is {self.largest_gap} B")

    def _out_of_memory(self, tensor: Tensor, why: str) -> OutOfMemory:
        per = "" if self.space == "hbm" else " per partition"
        limit = f"{self.available} B of {self.capacity} B{per} are free"
        if self.physical:
            limit += f" (of {self.physical} B, the rest is reserved)"
        held = sorted(self._tensors.values(), key=lambda t: (-t.footprint, t.address))
        names = [f"{t.name} {t.footprint} B" for t in held[:LARGEST_HOLDERS]]
        if len(held) > LARGEST_HOLDERS:
            names.append(f"and {len(held) - LARGEST_HOLDERS} more")
        return OutOfMemory(
            f"{self.space}: {tensor.name} needs {tensor.footprint} B{per}, {limit}, {why}; "
            f"held by: {', '.join(names) or 'nothing'}"
        )


class _Sizes(dict[str, int]):
    def __missing__(self, dtype: str) -> int:
        self[dtype] = numpy_dtype(dtype).itemsize
        return self[dtype]


ITEMSIZE = _Sizes()
"""Bytes of one element, by StableHLO name."""


def contiguous_elements(
    space: str, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int
) -> int:
    """Elements of a view's longest run in one piece (on chip: inside a partition)."""
    run = 1
    for axis in range(len(shape) - 1, -1 if space == "hbm" else 0, -1):
        if shape[axis] != 1 and strides[axis] != run * itemsize:
            break
        run *= shape[axis]
    return run


def _dense_strides(shape: Sequence[int], itemsize: int, space: str) -> tuple[int, ...]:
    strides, step = [], itemsize
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    strides.reverse()
    if space != "hbm" and strides:
        strides[0] = 0
    return tuple(strides)


def _pitch(capacity: int) -> int:
    """Distance between partitions: an odd number of cache lines, so that rows of one column do
    not all fall into the same cache sets."""
    return (-(-capacity // 64) | 1) * 64


def _fill(array: np.ndarray, dtype: str) -> None:
    if is_float(dtype):
        array[...] = np.nan
    elif dtype == "i1":
        array[...] = True
    else:
        array[...] = ml_dtypes.iinfo(array.dtype).max


def _box_of(view: View) -> tuple[tuple[int, int], ...]:
    """Axis ranges of a view in its tensor, found from its strides; () if it is no box."""
    tensor = view.tensor
    rest, ranges = view.offset, []
    for extent, stride in zip(tensor.shape, tensor.strides, strict=True):
        start = min(rest // stride, extent - 1) if stride else 0
        rest -= start * stride
        ranges.append([start, start + 1])
    for count, stride in zip(view.shape, view.strides, strict=True):
        if count == 1 or stride == 0:
            continue
        axis = next((k for k, s in enumerate(tensor.strides) if s and stride % s == 0), None)
        if axis is None or ranges[axis][1] - ranges[axis][0] != 1:
            return ()
        ranges[axis][1] += (count - 1) * (stride // tensor.strides[axis])
        if ranges[axis][1] > tensor.shape[axis]:
            return ()
    return tuple((start, stop) for start, stop in ranges)


def _shown(item: Any) -> str:
    if not isinstance(item, slice):
        return str(item)
    ends = ["" if end is None else str(end) for end in (item.start, item.stop)]
    return ":".join(ends) + ("" if item.step is None else f":{item.step}")
