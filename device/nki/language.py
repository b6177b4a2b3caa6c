"""`nki.language`: dtypes, memory, ranges, opcodes, and functions of whole tiles.

Opcodes (`nl.add`, `nl.exp`, ...) are what instructions take as `op=`, and functions that allocate
a result in SBUF and issue the instructions for it.
"""

import builtins  # `min` and others are opcodes here
import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import BadInput
from .arrays import to_numpy
from .dtypes import DTYPES, DType
from .errors import NotModelled
from .objects import NKIObject
from .opcodes import OPCODES
from .registers import VirtualRegister, dynamic_range, fori_loop, while_loop
from .session import current, running
from .tensor import MemoryRegion, NkiTensor, ds
from .tiles import (
    broadcast_to,
    dropout,
    expand_dims,
    gather_flattened,
    load,
    load_transpose2d,
    matmul,
    rand,
    random_seed,
    rms_norm,
    shared_identity_matrix,
    softmax,
    store,
    transpose,
    where,
)

__all__ = [  # noqa: PLE0604 (opcodes and dtypes are added from their tables)
    "DType", "MemoryRegion", "NKIObject", "NkiTensor", "VirtualRegister", "affine_range",
    "broadcast_to", "device_print", "dropout", "ds", "dynamic_range", "empty_like", "expand_dims",
    "fori_loop", "full", "gather_flattened", "hbm", "is_hbm", "is_on_chip", "is_psum", "is_sbuf",
    "load", "load_transpose2d", "matmul", "ndarray", "no_reorder", "num_programs", "ones",
    "private_hbm", "program_id", "program_ndim", "psum", "rand", "random_seed", "range",
    "rms_norm", "sbuf", "sequential_range", "shared_constant", "shared_hbm",
    "shared_identity_matrix", "softmax", "static_range", "store", "tile_size", "transpose",
    "where", "while_loop", "zeros", "zeros_like",
]  # fmt: skip

sbuf, psum = MemoryRegion.sbuf, MemoryRegion.psum
hbm = private_hbm = MemoryRegion.private_hbm
shared_hbm = MemoryRegion.shared_hbm

bool_ = DTYPES["bool"]
globals().update({name: dtype for name, dtype in DTYPES.items() if not name.endswith("64")})
globals().update(OPCODES)

range = affine_range = sequential_range = static_range = range


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    raise NotModelled(f"nki.language.{name}")


# ---- tensors ---------------------------------------------------------------------------------


class _TensorType(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, NkiTensor)


class ndarray(metaclass=_TensorType):
    """A new tensor in a memory; also the type of tensors, for annotations."""

    def __new__(
        cls,
        shape: Sequence[int],
        dtype: Any,
        buffer: Any = sbuf,
        name: str = "",
        address: tuple[int, int] | None = None,
    ) -> NkiTensor:  # type: ignore[misc]
        """`address` is (first partition, byte offset in each); without it, where there is room."""
        return current().allocate(shape, dtype, buffer, name or "", address)


def full(
    shape: Sequence[int], fill_value: float, dtype: Any, buffer: Any = sbuf, name: str = ""
) -> NkiTensor:
    """A new tensor filled with a value."""
    from . import isa  # which imports opcodes of this package

    made = current().allocate(shape, dtype, buffer, name)
    if not made.on_chip:
        _fill_hbm(made, fill_value)
    else:
        isa.memset(made, fill_value)
    return made


def _fill_hbm(tensor: NkiTensor, value: float) -> None:
    """Tiles of SBUF set once and stored row after row."""
    from . import isa

    rows = tensor.reshape((tensor.shape[0], -1)) if tensor.ndim > 1 else tensor.expand_dim(0)
    height, width = builtins.min(rows.shape[0], 128), builtins.min(rows.shape[1], 2048)
    tile = full((height, width), value, tensor.dtype)
    for row in range(0, rows.shape[0], height):
        for column in range(0, rows.shape[1], width):
            last = builtins.min(row + height, rows.shape[0])
            part = rows[row:last, column : builtins.min(column + width, rows.shape[1])]
            isa.dma_copy(part, tile[: part.shape[0], : part.shape[1]])


def zeros(shape: Sequence[int], dtype: Any, buffer: Any = sbuf, name: str = "") -> NkiTensor:
    """A new tensor of zeros."""
    return full(shape, 0, dtype, buffer, name)


def ones(shape: Sequence[int], dtype: Any, buffer: Any = sbuf, name: str = "") -> NkiTensor:
    """A new tensor of ones."""
    return full(shape, 1, dtype, buffer, name)


def empty_like(x: NkiTensor, dtype: Any = None, buffer: Any = None, name: str = "") -> NkiTensor:
    """A new tensor of the shape (and dtype and buffer) of another."""
    return current().allocate(x.shape, dtype or x.dtype, buffer or x.buffer, name)


def zeros_like(x: NkiTensor, dtype: Any = None, buffer: Any = None, name: str = "") -> NkiTensor:
    """Zeros of the shape (and dtype and buffer) of another tensor."""
    return zeros(x.shape, dtype or x.dtype, buffer or x.buffer, name)


def shared_constant(constant: Any) -> NkiTensor:
    """A tensor in shared HBM with the values of an array, or of a .npy file."""
    if isinstance(constant, str | Path):
        constant = np.load(constant)
    array, dtype = to_numpy(constant)
    storage = current().launch.adopt(array.copy(), array.shape, dtype, "constant")
    return NkiTensor(array.shape or (1,), dtype, storage, storage.region, "constant")


def is_sbuf(buffer: Any) -> bool:
    """Whether a buffer is SBUF."""
    return _region(buffer) is sbuf


def is_psum(buffer: Any) -> bool:
    """Whether a buffer is PSUM."""
    return _region(buffer) is psum


def is_hbm(buffer: Any) -> bool:
    """Whether a buffer is HBM, private or shared."""
    return _region(buffer) in (private_hbm, shared_hbm)


def is_on_chip(buffer: Any) -> bool:
    """Whether a buffer is SBUF or PSUM."""
    return _region(buffer) in (sbuf, psum)


def _region(buffer: Any) -> Any:
    return buffer.buffer if isinstance(buffer, NkiTensor) else buffer


# ---- the grid and the chip -------------------------------------------------------------------


def program_id(axis: int = 0) -> int:
    """Number of this core among those of the kernel: kernel[n]."""
    _check_axis(axis)
    return current().program


def num_programs(axes: Any = 0) -> int:
    """Cores of the kernel."""
    _check_axis(0 if axes is None else axes)
    return len(current().launch.sessions)


def program_ndim() -> int:
    """1 for kernel[n], 0 without a grid."""
    return int(current().launch.settings.grid)


def _check_axis(axis: Any) -> None:
    if axis not in (0, None, (0,), [0]):
        raise BadInput("axis", axis, "0: a grid has one axis")


class _TileSize(NKIObject):
    """Limits of tiles on the chip that the kernel runs on (outside one, on the default chip)."""

    pmax = 128
    psum_fmax = psum_bank_fmax = 512
    psum_bank_fmax_bytes = 2048
    gemm_stationary_fmax = 128
    gemm_moving_fmax = 512
    bn_stats_fmax = 512
    psum_min_align = 4
    sbuf_min_align = 1

    def __init__(self) -> None:
        pass

    @property
    def _chip(self) -> Any:
        from .kernel import as_chip

        session = running()
        return as_chip(None) if session is None else session.chip

    @property
    def psum_num_banks(self) -> int:
        """PSUM banks of a partition."""
        return self._chip.psum_banks

    @property
    def total_available_sbuf_size(self) -> int:
        """Another name of `sbuf_fmax_bytes`."""
        return self.sbuf_fmax_bytes

    @property
    def sbuf_fmax_bytes(self) -> int:
        """Bytes of an SBUF partition that kernels may use."""
        return self._chip.sbuf_partition_bytes

    @property
    def sbuf_fmax(self) -> int:
        """The same in float32 elements."""
        return self.sbuf_fmax_bytes // 4

    @property
    def sbuf_size_bytes(self) -> int:
        """The same for all partitions together."""
        return self.sbuf_fmax_bytes * self.pmax


tile_size = _TileSize()


# ---- scheduling and debugging ----------------------------------------------------------------


@contextlib.contextmanager
def no_reorder() -> Iterator[None]:
    """Each instruction of the block starts when the one before it has ended."""
    session = current()
    session.hooks.append("no_reorder")
    outer, session.core.block = session.core.block, session.core.new_block()
    try:
        yield
    finally:
        session.core.block = outer


def device_print(print_prefix: str, tensor: NkiTensor) -> None:
    """Prints a tensor's values. It takes no time."""
    session = current()
    view = session.operand(tensor)
    print(f"{print_prefix} {tensor}" + (f"\n{view.array}" if session.data else ""))
