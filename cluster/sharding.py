"""Which part of a global array each rank holds, and a compiled step as plain data. Numpy only."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trnsim.device.dtypes import numpy_dtype
from trnsim.device.errors import TrnsimError
from trnsim.device.ops.ir import Module, TensorType

from .wire import register


@register
@dataclass(frozen=True)
class Shards:
    """The boxes of one global array: `index[rank, dimension]` is (start, stop).

    Boxes of several ranks may be the same (replicas) but never overlap in part.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    index: np.ndarray

    def __post_init__(self) -> None:
        if self.index.ndim != 3 or self.index.shape[1:] != (len(self.shape), 2):
            raise TrnsimError(
                f"shards of {self.name}: index has shape {self.index.shape},"
                f" expected (ranks, {len(self.shape)}, 2)"
            )

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.index.shape[0]

    @property
    def local(self) -> TensorType:
        """The type of one rank's shard; all ranks hold the same shape."""
        extent = self.index[0, :, 1] - self.index[0, :, 0]
        return TensorType(tuple(int(n) for n in extent), self.dtype)

    def box(self, rank: int) -> tuple[slice, ...]:
        """The slices of the global array that a rank holds."""
        return tuple(slice(int(start), int(stop)) for start, stop in self.index[rank])

    @property
    def owners(self) -> tuple[int, ...]:
        """The lowest rank of each distinct box, in rank order: together they hold it all once."""
        flat = self.index.reshape(self.ranks, -1)
        _, first = np.unique(flat, axis=0, return_index=True)
        return tuple(sorted(int(rank) for rank in first))


@register
@dataclass(frozen=True)
class Lowered:
    """One step for `ranks` ranks: every rank runs `module` on its shards.

    `inputs` and `outputs` are in the order of the module's arguments and returned values.
    """

    module: Module
    ranks: int
    inputs: tuple[Shards, ...]
    outputs: tuple[Shards, ...]


def replicated(name: str, shape: Sequence[int], dtype: str, ranks: int) -> Shards:
    """Shards of an array that every rank holds whole."""
    box = np.array([(0, n) for n in shape], np.int64).reshape(len(shape), 2)
    return Shards(name, tuple(shape), dtype, np.broadcast_to(box, (ranks, *box.shape)).copy())


def shard(value: np.ndarray, shards: Shards, rank: int) -> np.ndarray:
    """A rank's part of a global array, C-contiguous. Refuses another shape or dtype."""
    _check(value, shards.shape, shards)
    part = value[shards.box(rank)]
    return part.copy() if part.ndim == 0 else np.ascontiguousarray(part)


def unshard(parts: Sequence[np.ndarray], shards: Shards) -> np.ndarray:
    """The global array from every rank's part (of replicas, the lowest rank's is taken)."""
    if len(parts) != shards.ranks:
        raise TrnsimError(f"{shards.name}: {len(parts)} parts for {shards.ranks} ranks")
    whole = np.empty(shards.shape, numpy_dtype(shards.dtype))
    for rank in shards.owners:
        _check(parts[rank], shards.local.shape, shards)
        whole[shards.box(rank)] = parts[rank]
    return whole


def _check(value: np.ndarray, shape: tuple[int, ...], shards: Shards) -> None:
    dtype = numpy_dtype(shards.dtype)
    if value.shape != shape or value.dtype != dtype:
        raise TrnsimError(
            f"{shards.name}: array is {value.dtype}{list(value.shape)},"
            f" expected {dtype}{list(shape)}"
        )
