"""What a kernel holds: tensors in SBUF, PSUM and HBM, and views of them.

A view is (shape, strides, offset) in elements on the row-major line of its storage's elements. On
chip that line runs partition after partition, so that the stride of axis 0 is the number of
elements in one partition. `device_view` says the same to the instructions in their own terms.
"""

import math
from collections.abc import Sequence
from enum import Enum
from typing import Any

from ..errors import BadInput, IllegalInstruction
from ..memory import Tensor, View
from . import views
from .dtypes import DType, as_dtype
from .objects import NKIObject
from .written import Written


class MemoryRegion(Enum):
    """Where a tensor lives. `hbm` is private HBM: of one core."""

    sbuf = "sbuf"
    psum = "psum"
    private_hbm = "private_hbm"
    shared_hbm = "shared_hbm"

    def __str__(self) -> str:
        return self.value

    @property
    def space(self) -> str:
        """The memory in the device's terms: sbuf, psum or hbm."""
        return "hbm" if self.value.endswith("hbm") else self.value


VIEWS_KEPT = 4096  # of a tensor
REGIONS = {region.value: region for region in MemoryRegion} | {"hbm": MemoryRegion.private_hbm}


def as_region(buffer: Any) -> MemoryRegion:
    """The region of a `buffer=` argument. Raises BadInput for others."""
    found = buffer if isinstance(buffer, MemoryRegion) else REGIONS.get(str(buffer))
    if found is None:
        raise BadInput("buffer", buffer, REGIONS)
    return found


class Storage:
    """One allocation: its device tensor, what has been written of it, and where it was made.

    `origin` is its first partition. It lives as long as some NkiTensor holds it.
    """

    __slots__ = (
        "tensor", "region", "on_chip", "origin", "row", "written", "line", "views", "__weakref__",
    )  # fmt: skip

    def __init__(
        self,
        tensor: Tensor,
        region: MemoryRegion,
        origin: int = 0,
        full: bool = False,
        line: str = "",
    ) -> None:
        self.tensor, self.region, self.origin, self.line = tensor, region, origin, line
        self.row = tensor.footprint  # bytes of a partition; in HBM, of all
        self.on_chip = region.space != "hbm"
        self.written = Written(tensor, full, origin)
        self.views: dict[tuple, View] = {}  # those that instructions used, to be used again


class Indirection:
    """An address that is known when the instruction runs.

    `index` is a VirtualRegister or a tensor of one element (`kind` scalar), one value per
    partition (vector), or offsets along the free axis (tensor). It counts steps of `stride`
    elements along an axis that is `extent` long.
    """

    __slots__ = ("kind", "index", "stride", "extent", "count")

    def __init__(self, kind: str, index: Any, stride: int, extent: int, count: int = 0) -> None:
        self.kind, self.index, self.stride = kind, index, stride
        self.extent, self.count = extent, count


class NkiTensor(NKIObject):
    """A tensor or a view of one: `shape`, `strides` and `offset` in elements, `dtype`, `buffer`."""

    __slots__ = (
        "shape", "strides", "offset", "dtype", "buffer", "storage", "name", "index", "_view",
    )  # fmt: skip

    def __init__(
        self,
        shape: Sequence[int],
        dtype: Any,
        storage: Storage,
        buffer: Any = MemoryRegion.sbuf,
        name: str = "",
        strides: tuple[int, ...] | None = None,
        offset: int = 0,
        index: Indirection | None = None,
    ) -> None:
        self.shape = tuple(shape)
        self.strides = views.dense(self.shape) if strides is None else strides
        self.offset, self.dtype, self.buffer = offset, as_dtype(dtype), as_region(buffer)
        self.storage, self.name, self.index = storage, name, index
        self._view: View | None = None

    # ---- what it is --------------------------------------------------------------------------

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    @property
    def on_chip(self) -> bool:
        """Whether it is in SBUF or PSUM."""
        return self.storage.on_chip

    def is_contiguous(self) -> bool:
        """Whether the elements (on chip: of each partition) lie in one piece, in order."""
        first = 1 if self.on_chip else 0
        return views.is_dense(self.shape[first:], self.strides[first:])

    def get_pattern(self) -> list[list[int]]:
        """[[stride, count], ...] of the axes."""
        return [[s, n] for s, n in zip(self.strides, self.shape, strict=True)]

    def is_indirect(self) -> bool:
        """Whether its address is known only when an instruction runs."""
        return self.index is not None

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        name = self.name or self.storage.tensor.name
        return f"{name} {self.dtype}{list(self.shape)} in {self.buffer}"

    # ---- views -------------------------------------------------------------------------------

    def _like(
        self,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        offset: int | None = None,
        dtype: DType | None = None,
        index: Indirection | None = None,
    ) -> "NkiTensor":
        made = object.__new__(NkiTensor)
        made.shape, made.strides = shape, strides
        made.offset = self.offset if offset is None else offset
        made.dtype = self.dtype if dtype is None else dtype
        made.buffer, made.storage, made.name = self.buffer, self.storage, self.name
        made.index = self.index if index is None else index
        made._view = None
        return made

    def __getitem__(self, key: Any) -> "NkiTensor":
        items = key if type(key) is tuple else (key,)
        if Ellipsis in items or len(items) < len(self.shape):
            items = self._expanded(items)
        if len(items) != len(self.shape):
            raise IllegalInstruction(f"{len(items)} indices for {self}")
        shape, strides, dropped = list(self.shape), list(self.strides), []
        offset = self.offset
        for axis, item in enumerate(items):
            extent = shape[axis]
            if type(item) is slice and item.start is None and item.stop is None:
                if item.step in (None, 1):
                    continue
            start, count, step = _bounds(self, item, axis, extent)
            if count is None:
                count = 1
                if axis or not self.on_chip:
                    dropped.append(axis)
            offset += start * strides[axis]
            shape[axis] = count
            strides[axis] *= step
        least = 2 if self.on_chip else 1
        for axis in reversed(dropped[: max(len(shape) - least, 0)]):
            del shape[axis], strides[axis]
        return self._like(tuple(shape), tuple(strides), offset)

    def _expanded(self, items: tuple) -> tuple:
        whole = (slice(None),) * (len(self.shape) - len(items) + (Ellipsis in items))
        if Ellipsis not in items:
            return items + whole
        at = items.index(Ellipsis)
        return items[:at] + whole + items[at + 1 :]

    def __setitem__(self, key: Any, value: Any) -> None:
        raise IllegalInstruction(f"{self}: use nisa.tensor_copy or nl.store to write a tensor")

    def slice(self, dim: int, start: int, end: int, step: int = 1) -> "NkiTensor":
        """The elements start, start + step, ... before `end` along one axis."""
        dim = self._axis(dim)
        return self[(slice(None),) * dim + (slice(start, end, step),)]

    def select(self, dim: int, index: Any) -> "NkiTensor":
        """One element along an axis, which goes. `index`: int, register, or tensor of one."""
        dim = self._axis(dim)
        if isinstance(index, NkiTensor) or hasattr(index, "read_register"):
            return self._dynamic_select(dim, index)
        return self[(slice(None),) * dim + (int(index),)]

    def _dynamic_select(self, dim: int, index: Any) -> "NkiTensor":
        self._direct("select")
        if self.on_chip and dim == 0:
            raise IllegalInstruction(f"{self}: a dynamic select cannot be of the partition axis")
        shape = self.shape[:dim] + self.shape[dim + 1 :]
        strides = self.strides[:dim] + self.strides[dim + 1 :]
        found = Indirection("scalar", index, self.strides[dim], self.shape[dim])
        return self._like(shape, strides, index=found)

    def vector_select(self, dim: int, vector_offset: "NkiTensor") -> "NkiTensor":
        """Row `vector_offset[p]` of an HBM tensor for each partition p. dim is 0."""
        self._direct("vector_select")
        if dim != 0 or self.on_chip:
            raise IllegalInstruction(f"{self}: vector_select is of axis 0 of a tensor in HBM")
        shape = (vector_offset.shape[0], *self.shape[1:])
        found = Indirection("vector", vector_offset, self.strides[0], self.shape[0])
        return self._like(shape, self.strides, index=found)

    def indirect(self, index: "NkiTensor", num_elem: int | None = None) -> "NkiTensor":
        """Columns at the free offsets that `index` holds (tensor indirection, NeuronCore v4)."""
        self._direct("indirect")
        count = index.size if num_elem is None else num_elem
        extent = math.prod(self.shape[1:])
        found = Indirection("tensor", index, 1, extent, count)
        return self._like((self.shape[0], count), (self.strides[0], 1), index=found)

    def permute(self, dims: Sequence[int]) -> "NkiTensor":
        """Axes in another order; on chip the partition axis stays the first."""
        order = [self._axis(dim) for dim in dims]
        if sorted(order) != list(range(self.ndim)) or (self._leads and order[0] != 0):
            raise IllegalInstruction(f"{self}: permute {tuple(dims)} is no order of its axes")
        shape = tuple(self.shape[axis] for axis in order)
        return self._like(shape, tuple(self.strides[axis] for axis in order))

    def broadcast(self, dim: int, size: int) -> "NkiTensor":
        """An axis of length 1 repeated."""
        dim = self._axis(dim)
        if self.shape[dim] != 1 or (self.on_chip and dim == 0):
            raise IllegalInstruction(f"{self}: axis {dim} cannot be repeated {size} times")
        shape = (*self.shape[:dim], size, *self.shape[dim + 1 :])
        return self._like(shape, (*self.strides[:dim], 0, *self.strides[dim + 1 :]))

    def expand_dim(self, dim: int) -> "NkiTensor":
        """With a new axis of length 1 at `dim`."""
        dim = dim + self.ndim + 1 if dim < 0 else dim
        if not (1 if self._leads else 0) <= dim <= self.ndim:
            raise IllegalInstruction(f"{self}: no new axis can be at {dim}")
        shape = (*self.shape[:dim], 1, *self.shape[dim:])
        step = self.strides[dim] * self.shape[dim] if dim < self.ndim else 1
        return self._like(shape, (*self.strides[:dim], step, *self.strides[dim:]))

    def squeeze_dim(self, dim: int) -> "NkiTensor":
        """Without an axis of length 1."""
        dim = self._axis(dim)
        if self.shape[dim] != 1 or (self._leads and dim == 0):
            raise IllegalInstruction(f"{self}: axis {dim} cannot be squeezed")
        shape = self.shape[:dim] + self.shape[dim + 1 :]
        return self._like(shape, self.strides[:dim] + self.strides[dim + 1 :])

    def reshape_dim(self, dim: int, shape: Sequence[int]) -> "NkiTensor":
        """One axis as several; one of them may be -1."""
        dim = self._axis(dim)
        if self._leads and dim == 0 and len(shape) != 1:
            raise IllegalInstruction(f"{self}: the partition axis cannot be split")
        return self._like(*views.split(self.shape, self.strides, dim, shape))

    def flatten_dims(self, start_dim: int, end_dim: int) -> "NkiTensor":
        """Axes start_dim to end_dim (inclusive), which lie in one piece, as one."""
        first, last = self._axis(start_dim), self._axis(end_dim)
        found = views.merged(self.shape, self.strides, first, last)
        if found is None or (self._leads and first == 0 and last):
            raise IllegalInstruction(f"{self}: axes {first} to {last} do not lie in one piece")
        return self._like(*found)

    def reshape(self, *shape: Any) -> "NkiTensor":
        """The same elements with other axes; on chip the partition axis stays."""
        new = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        if math.prod(new) != self.size or -1 in new:
            new = views.filled(new, self.size)
        new = tuple(int(n) for n in new)
        if self._leads and new[:1] != self.shape[:1]:
            raise IllegalInstruction(
                f"{self}: reshape to {list(new)} changes the partition axis ({self.shape[0]})"
            )
        strides = views.reshaped(self.shape, self.strides, new)
        if strides is None:
            raise IllegalInstruction(f"{self}: its layout has no view of shape {list(new)}")
        return self._like(new, strides)

    def rearrange(
        self,
        src_pattern: views.Pattern,
        dst_pattern: views.Pattern,
        fixed_sizes: dict | None = None,
    ) -> "NkiTensor":
        """Axes split, reordered and merged by name."""
        shape, strides = views.rearranged(
            self.shape, self.strides, src_pattern, dst_pattern, fixed_sizes or {}
        )
        if self._leads and (shape[0], strides[0]) != (self.shape[0], self.strides[0]):
            raise IllegalInstruction(f"{self}: {dst_pattern} moves the partition axis")
        return self._like(shape, strides)

    def view(self, dtype: Any) -> "NkiTensor":
        """The same bytes as another dtype; the last axis grows or shrinks."""
        wanted = as_dtype(dtype)
        old, new = self.dtype.itemsize, wanted.itemsize
        if old == new:
            return self._like(self.shape, self.strides, dtype=wanted)
        last, rest = divmod(self.shape[-1] * old, new)
        others = (self.offset, *self.strides[:-1])
        if rest or self.strides[-1] != 1 or any(step * old % new for step in others):
            raise IllegalInstruction(f"{self} cannot be read as {wanted}")
        strides = (*(step * old // new for step in self.strides[:-1]), 1)
        return self._like((*self.shape[:-1], last), strides, self.offset * old // new, wanted)

    reinterpret_cast = view

    def ap(
        self,
        pattern: Sequence[Sequence[int]],
        offset: int | None = None,
        scalar_offset: Any = None,
        vector_offset: "NkiTensor | None" = None,
        indirect_dim: int = 0,
        dtype: Any = None,
    ) -> "NkiTensor":
        """[[stride, count], ...] on the storage, from `offset` elements behind the view's own.

        A scalar or vector offset moves it along axis `indirect_dim` of this view. (The public
        guide says that a stated offset replaces the view's own; the API's text, which is followed
        here, that it is added.)
        """
        wanted = self.dtype if dtype is None else as_dtype(dtype)
        start = self.offset * self.dtype.itemsize // wanted.itemsize + (offset or 0)
        index = None
        if scalar_offset is not None and vector_offset is not None:
            raise IllegalInstruction(f"{self}: scalar_offset and vector_offset; limit: one of them")
        if scalar_offset is not None or vector_offset is not None:
            kind = "scalar" if vector_offset is None else "vector"
            dim = self._axis(indirect_dim)
            step = self.strides[dim] * self.dtype.itemsize // wanted.itemsize
            given = scalar_offset if vector_offset is None else vector_offset
            index = Indirection(kind, given, step, self.shape[dim])
        strides = tuple(int(step) for step, _ in pattern)
        made = self._like(tuple(int(n) for _, n in pattern), strides, int(start), wanted, index)
        if index is None:
            made.index = None
        return made

    @property
    def _leads(self) -> bool:
        """Whether axis 0 must stay the first: partitions, or one row per partition."""
        return self.on_chip or (self.index is not None and self.index.kind == "vector")

    def _axis(self, dim: int) -> int:
        if not -self.ndim <= dim < self.ndim:
            raise IllegalInstruction(f"{self} has no axis {dim}")
        return dim % self.ndim

    def _direct(self, what: str) -> None:
        if self.index is not None:
            raise IllegalInstruction(f"{self}: {what} of a view that is indirect already")

    # ---- for the instructions ----------------------------------------------------------------

    def device_view(self) -> View:
        """The operand of an instruction. Raises IllegalInstruction if it leaves its tensor."""
        if self._view is None:
            known = self.storage.views
            key = (self.offset, self.shape, self.strides, self.dtype.device)
            found = known.get(key)
            if found is None:
                found = self.view_at(self.offset)
                if len(known) < VIEWS_KEPT:
                    known[key] = found
            self._view = found
        return self._view

    def view_at(
        self, offset: int, shape: tuple[int, ...] | None = None, strides: Any = None
    ) -> View:
        """As `device_view`, from another element, or with other axes, of the storage."""
        shape = self.shape if shape is None else shape
        strides = self.strides if strides is None else strides
        tensor, item = self.storage.tensor, self.dtype.itemsize
        if not self.on_chip:
            steps, inside, first = tuple(s * item for s in strides), offset * item, 0
            limit = tensor.nbytes
        else:
            first, inside = divmod(offset * item, self.storage.row)
            if shape[0] != 1 and strides[0] * item != self.storage.row:
                raise IllegalInstruction(
                    f"{self}: the step of the partition axis is {strides[0]}; on chip it is the "
                    f"elements of one partition, {self.storage.row // item}"
                )
            if first < 0 or first + shape[0] > tensor.shape[0]:
                raise self._outside(f"partitions {first} to {first + shape[0]}", tensor.shape[0])
            steps, limit = (0, *(s * item for s in strides[1:])), self.storage.row
        end = inside + item
        for count, step in zip(shape, steps, strict=True):
            if step < 0:
                raise IllegalInstruction(f"{self}: a stride is negative")
            end += (count - 1) * step
        if inside < 0 or (end > limit and 0 not in shape):
            raise self._outside(f"bytes {inside} to {end}", limit)
        partition = first + self.storage.origin if self.on_chip else 0
        return View(tensor, shape, steps, inside, partition, self.dtype.device)

    def _outside(self, what: str, limit: int) -> IllegalInstruction:
        made = f" made at {self.storage.line}" if self.storage.line else ""
        return IllegalInstruction(
            f"{self} reaches {what}; {self.storage.tensor.name}{made} ends at {limit}"
        )

    def table(self) -> View:
        """Of a view with a vector offset: [rows, ...] from which the vector picks rows."""
        index = self.index
        if index is None or index.kind != "vector":
            raise BadInput("operand", self, "a view with a vector offset")
        span = sum((n - 1) * s for n, s in zip(self.shape[1:], self.strides[1:], strict=True))
        room = self.storage.tensor.nbytes // self.dtype.itemsize - self.offset - span - 1
        rows = max(room // index.stride + 1, 0) if index.stride else index.extent
        strides = (index.stride, *self.strides[1:])
        return self.view_at(self.offset, (rows, *self.shape[1:]), strides)


class ds:
    """`nl.ds(start, size)`: `size` elements from `start` on, in an index."""

    __slots__ = ("start", "size")

    def __init__(self, start: Any, size: int) -> None:
        self.start, self.size = start, size


def _bounds(tensor: NkiTensor, item: Any, axis: int, extent: int) -> tuple[int, int | None, int]:
    """(start, count, step) of one index; count None for an integer."""
    kind = type(item)
    if kind is slice:
        step = 1 if item.step is None else int(item.step)
        start = 0 if item.start is None else int(item.start)
        stop = extent if item.stop is None else int(item.stop)
        start = start + extent if start < 0 else start
        stop = stop + extent if stop < 0 else stop
        if step < 1 or not 0 <= start <= stop <= extent:
            raise _bad_index(tensor, item, axis, extent)
        return start, -(-(stop - start) // step), step
    if kind is ds:
        start = int(item.start)
        if not 0 <= start <= start + item.size <= extent:
            raise _bad_index(tensor, f"ds({start}, {item.size})", axis, extent)
        return start, int(item.size), 1
    try:
        at = item.__index__()
    except AttributeError:
        raise _bad_index(tensor, item, axis, extent) from None
    at = at + extent if at < 0 else at
    if not 0 <= at < extent:
        raise _bad_index(tensor, item, axis, extent)
    return at, None, 1


def _bad_index(tensor: NkiTensor, item: Any, axis: int, extent: int) -> IllegalInstruction:
    shown = item
    if isinstance(item, slice):
        parts = (item.start, item.stop) if item.step is None else (item.start, item.stop, item.step)
        shown = ":".join("" if part is None else str(part) for part in parts)
    return IllegalInstruction(f"{tensor}: index {shown} of axis {axis}; its extent is {extent}")
