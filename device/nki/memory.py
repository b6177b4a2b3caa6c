"""SBUF and PSUM as kernels use them: tensors that live as long as Python holds them.

The vendor's compiler sees the whole kernel and gives tensors distinct addresses while there is
room, so that a loop's iterations do not wait for each other. Here addresses are given in rotation
to the same end: the first gap behind the last allocation, then from the start again.

A tensor that the allocator places has bytes of its own. Tensors at addresses that the kernel
states share the memory's bytes, and overlap as their addresses do.

What does not fit lies beyond the end until the kernel has ended: then `placement` finds out whether
all tensors fit by the lives that the trace shows, which may be shorter than Python's.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ..errors import OutOfMemory
from ..memory import ALIGNMENT, Memory, Tensor

POOLED_BYTES = 256 << 20  # of released bytes that all memories of a run keep for allocations


class KernelMemory(Memory):
    """SBUF or PSUM of a core that runs a kernel. `peak` is of bytes that some tensor holds."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.placed: list[Tensor] = []  # by the allocator, in order
        self.released: dict[int, int] = {}  # id of a placed tensor -> `moment` of its release
        self.moment: Callable[[], int] = lambda: 0
        self.line = ""  # of the kernel, for `overflow`
        self.overflow: tuple[OutOfMemory, str] | None = None  # the first that did not fit
        self.stated: list[Tensor] = []  # at addresses that the kernel gave
        self.pool_bytes = POOLED_BYTES  # kept by this one
        self._end = self.capacity  # of what lies beyond the capacity
        self._cursor = 0
        self._pool: dict[int, list[np.ndarray]] = {}
        self._pooled = 0

    def allocate_at(self, shape: Sequence[int], dtype: str, name: str, address: int) -> Tensor:
        """A tensor at a byte address of each partition that the kernel states.

        It may overlap others that were placed so. Raises OutOfMemory beyond the end.
        """
        tensor = self.allocate(shape, dtype, name, address)
        self.stated.append(tensor)
        self._hold(tensor)
        return tensor

    def empty(self) -> "KernelMemory":
        """Another of the same size, which holds only the tensors at stated addresses."""
        made = KernelMemory(
            self.space, self.capacity, bank=self.bank, physical=self.physical,
            partitions=self.partitions, data=False,
        )  # fmt: skip
        for tensor in self.stated:
            made.stated.append(tensor)
            made._hold(tensor)
        return made

    def move(self, tensor: Tensor) -> bool:
        """Takes a tensor in at an address of this memory; whether there was room."""
        start = self._room(tensor)
        if start is not None:
            tensor.address = start
            self._hold(tensor)
        return start is not None

    def free(self, tensor: Tensor) -> None:
        super().free(tensor)
        self.released[id(tensor)] = self.moment()
        if self.stated:
            self.used = self._covered()
        backing = tensor._bytes
        if backing is not None and len(backing) == tensor.nbytes and self._pooled < self.pool_bytes:
            self._pool.setdefault(len(backing), []).append(backing)
            self._pooled += len(backing)
        tensor._bytes = tensor._array = None

    def _hold(self, tensor: Tensor) -> None:
        before = self.peak
        super()._hold(tensor)
        if self.stated:
            self.used = self._covered()
            self.peak = max(before, self.used)

    def _out_of_memory(self, tensor: Tensor, why: str) -> OutOfMemory:
        error = super()._out_of_memory(tensor, why)
        total = self.used + tensor.footprint
        return OutOfMemory(f"{error}; with {tensor.name} {total} B per partition")

    def _covered(self) -> int:
        return self.capacity - sum(end - start for start, end in self._gaps())

    def _tensor(
        self,
        address: int,
        shape: Sequence[int],
        dtype: str,
        name: str,
        banked: bool | None = None,
    ) -> Tensor:
        if banked is None:  # the kernel states the address
            return super()._tensor(address, shape, dtype, name)
        if not self.data:
            self.placed.append(super()._tensor(address, shape, dtype, name))
            return self.placed[-1]
        probe = Tensor(self.space, address, shape, dtype, name)
        backing = self._bytes_of(probe.nbytes)
        made = Tensor(self.space, address, shape, dtype, name, backing, probe.footprint, 0)
        self.placed.append(made)
        return made

    def _bytes_of(self, size: int) -> np.ndarray:
        pool = self._pool.get(size)
        if not pool:
            return np.empty(size, np.uint8)
        self._pooled -= size
        return pool.pop()

    def _gaps(self) -> list[tuple[int, int]]:
        return [(start, min(end, self.capacity)) for start, end in super()._gaps()
                if start < self.capacity]  # fmt: skip

    def _first_fit(self, tensor: Tensor) -> int:
        start = self._room(tensor)
        if start is not None:
            return start
        error = self._out_of_memory(tensor, f"the largest gap is {self.largest_gap} B")
        if tensor.footprint > self.capacity:
            raise error
        if self.overflow is None:
            self.overflow = error, self.line
        step = self.bank or max(ALIGNMENT[self.space], tensor.itemsize)
        start = -(-self._end // step) * step
        self._end = start + tensor.footprint
        return start

    def _room(self, tensor: Tensor) -> int | None:
        """The first place with room behind the last allocation, then from the start again."""
        step, size, bank = max(ALIGNMENT[self.space], tensor.itemsize), tensor.footprint, self.bank
        for behind in (self._cursor, 0):
            for start, end in self._gaps_from(behind):
                start = -(-start // step) * step
                if bank and size > bank - start % bank:
                    start = -(-start // bank) * bank
                if start + size <= end:
                    self._cursor = start + size
                    return start
        return None

    def _gaps_from(self, behind: int) -> Iterator[tuple[int, int]]:
        """Free ranges from an address on."""
        blocks = self._blocks
        if self.stated:  # these may overlap
            yield from ((max(start, behind), end) for start, end in self._gaps() if end > behind)
            return
        index = bisect_left(blocks, (behind,))
        end = max(behind, blocks[index - 1][1]) if index else behind
        while index < len(blocks) and end < self.capacity:
            start, stop, _ = blocks[index]
            if start > end:
                yield end, min(start, self.capacity)
            end, index = stop, index + 1
        if end < self.capacity:
            yield end, self.capacity
