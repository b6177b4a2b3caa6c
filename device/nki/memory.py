"""SBUF and PSUM as kernels use them: tensors that live as long as Python holds them.

The vendor's compiler sees the whole kernel and gives tensors distinct addresses while there is
room, so that a loop's iterations do not wait for each other. Here addresses are given in rotation
to the same end: the first gap behind the last allocation, then from the start again.

A tensor that the allocator places has bytes of its own. Tensors at addresses that the kernel
states share the memory's bytes, and overlap as their addresses do.
"""

from collections.abc import Sequence

import numpy as np

from ..errors import OutOfMemory
from ..memory import ALIGNMENT, Memory, Tensor

POOLED_BYTES = 64 << 20  # of released bytes kept for the next allocations


class KernelMemory(Memory):
    """SBUF or PSUM of a core that runs a kernel. `peak` is of bytes that some tensor holds."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._cursor = 0
        self._stated = 0
        self._pool: dict[int, list[np.ndarray]] = {}
        self._pooled = 0

    def allocate_at(self, shape: Sequence[int], dtype: str, name: str, address: int) -> Tensor:
        """A tensor at a byte address of each partition that the kernel states.

        It may overlap others that were placed so. Raises OutOfMemory beyond the end.
        """
        tensor = self.allocate(shape, dtype, name, address)
        self._stated += 1
        self._hold(tensor)
        return tensor

    def free(self, tensor: Tensor) -> None:
        super().free(tensor)
        if self._stated:
            self.used = self._covered()
        backing = tensor._bytes
        if backing is not None and len(backing) == tensor.nbytes and self._pooled < POOLED_BYTES:
            self._pool.setdefault(len(backing), []).append(backing)
            self._pooled += len(backing)

    def _hold(self, tensor: Tensor) -> None:
        before = self.peak
        super()._hold(tensor)
        if self._stated:
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
        if banked is None or not self.data:  # the kernel states the address
            return super()._tensor(address, shape, dtype, name)
        probe = Tensor(self.space, address, shape, dtype, name)
        backing = self._bytes_of(probe.nbytes)
        return Tensor(self.space, address, shape, dtype, name, backing, probe.footprint, 0)

    def _bytes_of(self, size: int) -> np.ndarray:
        pool = self._pool.get(size)
        if not pool:
            return np.empty(size, np.uint8)
        self._pooled -= size
        return pool.pop()

    def _first_fit(self, tensor: Tensor) -> int:
        step = max(ALIGNMENT[self.space], tensor.itemsize)
        gaps = self._gaps()
        for behind in (self._cursor, 0):
            for start, end in gaps:
                start = -(-max(start, behind) // step) * step
                if self.bank and tensor.footprint > self.bank - start % self.bank:
                    start = -(-start // self.bank) * self.bank
                if start + tensor.footprint <= end:
                    self._cursor = start + tensor.footprint
                    return start
        raise self._out_of_memory(tensor, f"the largest gap is {self.largest_gap} B")
