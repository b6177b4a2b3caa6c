"""SBUF and PSUM as kernels use them: tensors that live as long as Python holds them, or are used.

The vendor's compiler sees the whole kernel and gives tensors distinct addresses while there is
room, so that a loop's iterations do not wait for each other. Here addresses are given in rotation
to the same end: the first gap behind the last allocation, then from the start again. Where there
is no gap, a tensor that Python still holds may have been read for the last time: the place of those
that were not used for longest is given again. At the end the lives are known, from the first write
of a tensor to its last use, and what lived together has to fit.

A tensor that the allocator places has bytes of its own. Tensors at addresses that the kernel
states share the memory's bytes, and overlap as their addresses do.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..errors import OutOfMemory
from ..memory import ALIGNMENT, LARGEST_HOLDERS, Memory, Tensor
from .errors import at_line
from .written import Written

POOLED_BYTES = 64 << 20  # of released bytes kept for the next allocations


class Life(NamedTuple):
    """A tensor from its first write to its last use, by numbers of instructions."""

    first: int
    last: int
    nbytes: int  # per partition
    name: str
    line: str


class KernelMemory(Memory):
    """SBUF or PSUM of a core that runs a kernel. `peak` is of bytes that some tensor holds."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._cursor = 0
        self._stated = 0
        self._lives: dict[int, Written] = {}  # of the tensors held, by id
        self._past: list[Life] = []
        self._shares = False  # whether a place was given again
        self.overcommits = False  # whether even the places of tensors still to be read are
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

    def follow(self, written: Written) -> None:
        """`written` knows when its tensor, which is held here, is used."""
        self._lives[id(written.tensor)] = written

    def free(self, tensor: Tensor) -> None:
        super().free(tensor)
        self._end(self._lives.pop(id(tensor)))
        if self._stated or self._shares:
            self.used = self._covered()
        backing = tensor._bytes
        if backing is not None and len(backing) == tensor.nbytes and self._pooled < POOLED_BYTES:
            self._pool.setdefault(len(backing), []).append(backing)
            self._pooled += len(backing)

    def _hold(self, tensor: Tensor) -> None:
        before = self.peak
        super()._hold(tensor)
        if self._stated or self._shares:
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
        return self._given_again(tensor, step)

    def _given_again(self, tensor: Tensor, step: int) -> int:
        """The place whose tensors were not used for longest. Raises OutOfMemory if every place
        has a tensor that is still to be written, or read after its last write."""
        need, best = tensor.footprint, None
        starts = {0, *(edge for start, end, _ in self._blocks for edge in (start, end))}
        if self.bank and need > self.bank // 2:
            starts = range(0, self.capacity, self.bank)
        for start in sorted(starts):
            start = -(-start // step) * step
            if self.bank and need > self.bank - start % self.bank:
                start = -(-start // self.bank) * self.bank
            if start + need > self.capacity:
                continue
            used = self._last_use(start, start + need)
            if used is not None and (best is None or used < best[0]):
                best = used, start
        if best is None:
            raise self._out_of_memory(tensor, f"the largest gap is {self.largest_gap} B")
        self._shares = True
        self._cursor = best[1] + need
        return best[1]

    def _last_use(self, start: int, end: int) -> float | None:
        """Number of the last instruction that used what lies there; None if one is to come."""
        last: float = 0
        for first, stop, key in self._blocks:
            if first < end and start < stop:
                written = self._lives[key]
                if written.unread and not self.overcommits:
                    return None
                last = math.inf if written.unread else max(last, written.last)
        return last

    def _end(self, written: Written) -> None:
        if written.first is not None:
            tensor = written.tensor
            self._past.append(
                Life(written.first, written.last, tensor.footprint, tensor.name, written.line)
            )

    def check_lives(self) -> None:
        """Raises OutOfMemory, with the line of a tensor, if those in use at once do not fit."""
        if not self._shares:
            return
        for written in self._lives.values():
            self._end(written)
        alive: list[Life] = []
        for life in sorted(self._past):
            alive = [other for other in alive if other.last > life.first]
            alive.append(life)
            used = sum(other.nbytes for other in alive)
            if used > self.capacity:
                raise at_line(self._crowded(life, used, alive), life.line)

    def _crowded(self, life: Life, used: int, alive: list[Life]) -> OutOfMemory:
        largest = sorted(alive, key=lambda other: -other.nbytes)
        held = ", ".join(f"{other.name} {other.nbytes} B" for other in largest[:LARGEST_HOLDERS])
        return OutOfMemory(
            f"{self.space}: {life.name} needs {life.nbytes} B per partition while others are still "
            f"to be used: {used} B of {self.capacity} B per partition, held by: {held}"
        )
