"""The nest of many small matmuls: attention heads of short sequences.

If M and K fit the PE array and N one PSUM bank, several batch elements share each DMA, each copy
out of PSUM and each store, for a DMA of a few rows takes as long as one of many.
"""

import math
from collections.abc import Iterator

from ..isa.base import Instruction
from ..isa.dma import DmaCopy
from ..isa.scalar import Activation
from ..isa.tensor import Matmul, Transpose
from ..isa.vector import Copy
from ..memory import Tensor, View
from .axes import Axes, boxes
from .matmul import MatmulKernel
from .matmul_sides import BANK, PE, Side, sides
from .nest import Context, Loop, itemsize, once, tiles

GROUP = 16
GROUP_BYTES = 16_000


def is_small(kernel: MatmulKernel) -> bool:
    """Whether several batch elements can share their DMA."""
    if kernel.batch < 2 or kernel.m > PE or kernel.k > PE or kernel.n > BANK:
        return False
    for side, free in zip(sides(kernel), (kernel.m, kernel.n), strict=True):
        batch, inner, contract = side.operand.merged
        if not batch or len(inner) > 1 or len(contract) > 1:
            return False
        if not side.direct and free > PE:
            return False
    return True


def group_size(kernel: MatmulKernel) -> int:
    """Batch elements that go together."""
    widest = max(
        kernel.n * max(4, itemsize(kernel.types[kernel.result].dtype)), kernel.m * 4, kernel.k * 4
    )
    size = max(1, min(GROUP, kernel.batch, GROUP_BYTES // widest))
    innermost = min(side.operand.merged[0][-1][0] for side in sides(kernel))
    return size // innermost * innermost if size > innermost else size


def partition_bytes(kernel: MatmulKernel) -> int:
    """Bytes per partition that the kernel's tiles take."""
    left, right = sides(kernel)
    one = kernel.m * itemsize(left.compute) + kernel.n * itemsize(right.compute)
    one += kernel.n * itemsize(kernel.types[kernel.result].dtype)
    one += sum(kernel.k * itemsize(s.raw) for s in (left, right) if not s.direct)
    return 2 * one * group_size(kernel)


def nest(kernel: MatmulKernel, context: Context) -> Loop:
    """The loop over groups of batch elements."""
    return once(_Lowering(kernel, context).steps())


class _Lowering:
    def __init__(self, kernel: MatmulKernel, context: Context) -> None:
        self.kernel, self.context = kernel, context
        self.m, self.n, self.k = kernel.m, kernel.n, kernel.k
        self.left, self.right = sides(kernel)
        batch, rows, columns = kernel.share(context.part)
        self.row, self.m = rows.start, rows.stop - rows.start
        self.column, self.n = columns.start, columns.stop - columns.start
        self.first = batch.start
        size = group_size(kernel)
        self.groups = tiles(batch.start, batch.stop, size)
        self.out = kernel.types[kernel.result].dtype
        self.turned = {
            "left": context.rotating((size, self.m), self.left.compute, "left"),
            "right": context.rotating((size, self.n), self.right.compute, "right"),
        }
        self.raw: dict[str, list[Tensor]] = {}
        self.banks: dict[str, list[Tensor]] = {}
        for name, side in (("left", self.left), ("right", self.right)):
            if side.direct:
                continue
            self.raw[name] = context.rotating((size, self.k), side.raw, f"{name} rows")
            kind = "f32" if context.chip.generation < 3 else side.raw
            self.banks[name] = [context.bank(BANK, kind, f"{name} turned") for _ in range(2)]
        self.sums = [context.bank(BANK, "f32", "sum") for _ in range(4)]
        self.staged = context.rotating((size, self.n), self.out, "out")

    def steps(self) -> Iterator[Loop]:
        """The whole nest."""
        yield Loop(len(self.groups), self._group, lambda i: self.groups[i][1])

    def _group(self, i: int) -> Iterator[Instruction]:
        at, count = self.groups[i]
        yield from self._load("left", self.left, i, self.row, self.m)
        yield from self._load("right", self.right, i, self.column, self.n)
        pack = max(1, BANK // self.n)
        target = self._target(i)
        left, right = self.turned["left"][i % 2], self.turned["right"][i % 2]
        for p, (g, packed) in enumerate(tiles(0, count, pack)):
            bank = self.sums[p % 4]
            spread = bank[: self.m, : packed * self.n].reshape(self.m, packed, self.n)
            for j in range(packed):
                yield Matmul(
                    spread[:, j, :],
                    left[: self.k, g + j, : self.m],
                    right[: self.k, g + j, : self.n],
                )
            dst = target[: self.m, g : g + packed, : self.n]
            yield Copy(dst, spread) if p % 2 == 0 else Activation(dst, spread, "copy")
        if not self.context.stays(self.kernel.result):
            n, m = self.kernel.n, self.kernel.m
            offset = (at * m + self.row) * n + self.column
            place = self.context.hbm(
                self.kernel.result, (self.m, count, self.n), (n, m * n, 1), offset
            )
            yield DmaCopy(place, target[: self.m, :count, : self.n])

    def _target(self, i: int) -> View:
        """[m, group, n] where the results are put: the staging tile, or where they stay."""
        if self.kernel.result in self.context.residency.kept:
            start = self.groups[i][0] - self.first
            held = self.context.resident[self.kernel.result][0]
            return held[:, start : start + self.groups[i][1], :]
        return self.staged[i % 2][:]

    def _load(self, name: str, side: Side, i: int, start: int, free: int) -> Iterator[Instruction]:
        at, count = self.groups[i]
        value = side.operand.value
        batch, inner, contract = side.operand.merged
        rows, deep = inner[0][1] if inner else 1, contract[0][1] if contract else 1
        offset = start * rows
        done = self.turned[name][i % 2]
        if side.direct:
            dst = done[: self.k, :count, :free]
            yield from self._fetch(value, dst, (self.k, deep), batch, at, (free, rows), offset)
            return
        if name == "left" and value in self.context.residency.inside:
            first = at - self.first
            raw = self.context.resident[value][0][:free, first : first + count, : self.k]
        else:
            raw = self.raw[name][i % 2][:free, :count, : self.k]
            yield from self._fetch(value, raw, (free, rows), batch, at, (self.k, deep), offset)
        for q, (g, four) in enumerate(tiles(0, count, BANK // PE)):
            spread = self.banks[name][q % 2].reshape(PE, BANK // PE, PE)
            for j in range(four):
                yield Transpose(spread[: self.k, j, :free], raw[:, g + j, :])
            yield Copy(done[: self.k, g : g + four, :free], spread[: self.k, :four, :free])

    def _fetch(
        self,
        value: int,
        dst: View,
        down: tuple[int, int],
        batch: Axes,
        at: int,
        across: tuple[int, int],
        offset: int,
    ) -> Iterator[DmaCopy]:
        """dst[p, g, f] of batch elements from `at` on: one DMA for each box of batch axes."""
        first = 0
        for box in boxes([e for e, _ in batch], at, at + dst.shape[1]):
            shape = tuple(high - low for low, high in box)
            count = math.prod(shape)
            base = offset + sum(low * s for (low, _), (_, s) in zip(box, batch, strict=True))
            source = self.context.hbm(
                value,
                (down[0], *shape, across[0]),
                (down[1], *(s for _, s in batch), across[1]),
                base,
            )
            part = dst[:, first : first + count, :]
            yield DmaCopy(part.reshape(down[0], *shape, across[0]), source)
            first += count
