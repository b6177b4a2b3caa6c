"""The nest of many moderate matmuls: the heads of attention.

If M, N and K are at most 512, several batch elements share each DMA, each copy out of PSUM and each
store, for a DMA of a few rows takes as long as one of many. Tiles hold slots side by side on the
free axis: (batch element, tile of 128 rows).
"""

import math
from collections.abc import Iterator
from itertools import product

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
SET_BYTES = 24_000
"""Bytes per partition of one set of tiles."""


def _regular(extent: int) -> bool:
    """One tile of the array, or up to four whole ones."""
    return extent <= PE or (extent <= BANK and extent % PE == 0)


def is_batched(kernel: MatmulKernel) -> bool:
    """Whether several batch elements can share their DMA."""
    if kernel.batch < 2 or kernel.n > BANK or not (_regular(kernel.m) and _regular(kernel.k)):
        return False
    for side, free in zip(sides(kernel), (kernel.m, kernel.n), strict=True):
        batch, inner, contract = side.operand.merged
        if not batch or len(inner) > 1 or len(contract) > 1:
            return False
        if not side.direct and not _regular(free):
            return False
    return True


def _element_bytes(kernel: MatmulKernel) -> int:
    """Bytes per partition that one batch element takes in one set of tiles."""
    steps, rows = -(-kernel.k // PE), -(-kernel.m // PE)
    left, right = sides(kernel)
    total = steps * kernel.m * itemsize(left.compute) + steps * kernel.n * itemsize(right.compute)
    total += rows * kernel.n * itemsize(kernel.types[kernel.result].dtype)
    if not left.direct:
        total += rows * kernel.k * itemsize(left.raw)
    if not right.direct:
        total += -(-kernel.n // PE) * kernel.k * itemsize(right.raw)
    return total


def group_size(kernel: MatmulKernel) -> int:
    """Batch elements that go together: whole runs of the innermost batch axis where they fit."""
    size = max(1, min(GROUP, kernel.batch, SET_BYTES // _element_bytes(kernel)))
    innermost = min(side.operand.merged[0][-1][0] for side in sides(kernel))
    if size > innermost:
        return size // innermost * innermost
    return max(d for d in range(1, size + 1) if innermost % d == 0)


def nest(kernel: MatmulKernel, context: Context) -> Loop:
    """The loop over groups of batch elements."""
    return once(_Lowering(kernel, context).steps())


class _Lowering:
    def __init__(self, kernel: MatmulKernel, context: Context) -> None:
        self.kernel, self.context = kernel, context
        self.k = kernel.k
        self.left, self.right = sides(kernel)
        batch, rows, columns = kernel.share(context.part)
        self.row, self.m = rows.start, rows.stop - rows.start
        self.column, self.n = columns.start, columns.stop - columns.start
        self.first = batch.start
        self.size = group_size(kernel)
        self.groups = tiles(batch.start, batch.stop, self.size)
        self.out = kernel.types[kernel.result].dtype
        self.deep, self.steps_k = min(self.k, PE), -(-self.k // PE)
        self.tall, self.steps_m = min(self.m, PE), -(-self.m // PE)
        self._allocate()

    def _allocate(self) -> None:
        context, size = self.context, self.size
        self.done: dict[str, list[Tensor]] = {}
        self.raw: dict[str, list[Tensor]] = {}
        self.banks: dict[str, list[Tensor]] = {}
        for name, side, free in (("left", self.left, self.m), ("right", self.right, self.n)):
            self.done[name] = context.rotating((size, self.steps_k, free), side.compute, name)
            if side.direct:
                continue
            slots = size * -(-free // PE)
            self.raw[name] = context.rotating((slots, self.k), side.raw, f"{name} rows")
            kind = "f32" if context.chip.generation < 3 else side.raw
            self.banks[name] = [context.bank(BANK, kind, f"{name} turned") for _ in range(2)]
        self.sums = [context.bank(BANK, "f32", "sum") for _ in range(4)]
        self.staged = context.rotating((size * self.steps_m, self.n), self.out, "out")

    def steps(self) -> Iterator[Loop]:
        """The whole nest."""
        yield Loop(len(self.groups), self._group, lambda i: self.groups[i][1])

    def _group(self, i: int) -> Iterator[Instruction]:
        at, count = self.groups[i]
        yield from self._load("left", self.left, i, self.row, self.m)
        yield from self._load("right", self.right, i, self.column, self.n)
        target = self._target(i)
        pack = max(1, BANK // self.n)
        for p, (slot, packed) in enumerate(tiles(0, count * self.steps_m, pack)):
            bank = self.sums[p % 4]
            spread = bank[: self.tall, : packed * self.n].reshape(self.tall, packed, self.n)
            for j in range(packed):
                yield from self._product(spread[:, j, :], slot + j, i)
            dst = target[: self.tall, slot : slot + packed, :]
            yield Copy(dst, spread) if p % 2 == 0 else Activation(dst, spread, "copy")
        if not self.context.stays(self.kernel.result):
            yield self._store(target, at, count)

    def _product(self, dst: View, slot: int, i: int) -> Iterator[Instruction]:
        """One tile of rows of one batch element."""
        g, tile = divmod(slot, self.steps_m)
        left, right = self.done["left"][i % 2], self.done["right"][i % 2]
        rows = slice(tile * PE, tile * PE + self.tall)
        for k in range(self.steps_k):
            yield Matmul(
                dst, left[: self.deep, g, k, rows], right[: self.deep, g, k, :], accumulate=k > 0
            )

    def _store(self, target: View, at: int, count: int) -> Instruction:
        n, m = self.kernel.n, self.kernel.m
        place = self.context.hbm(
            self.kernel.result,
            (self.tall, count, self.steps_m, self.n),
            (n, m * n, PE * n, 1),
            (at * m + self.row) * n + self.column,
        )
        source = target[: self.tall, : count * self.steps_m, :]
        return DmaCopy(place, source.reshape(self.tall, count, self.steps_m, self.n))

    def _target(self, i: int) -> View:
        """[128, slots, n] where the results are put: the staging tile, or where they stay."""
        if self.kernel.result in self.context.residency.kept:
            start = (self.groups[i][0] - self.first) * self.steps_m
            held = self.context.resident[self.kernel.result][0]
            return held[:, start : start + self.groups[i][1] * self.steps_m, :]
        return self.staged[i % 2]

    # ---- operands ----

    def _load(self, name: str, side: Side, i: int, start: int, free: int) -> Iterator[Instruction]:
        at, count = self.groups[i]
        _, inner, contract = side.operand.merged
        rows, deep = inner[0][1] if inner else 1, contract[0][1] if contract else 1
        done = self.done[name][i % 2]
        if side.direct:
            axes = ((self.deep, deep), (self.steps_k, PE * deep), (free, rows))
            dst = done[: self.deep, :count]
            yield from self._fetch(side, dst, axes, at, count, start * rows)
            return
        wide, steps = min(free, PE), -(-free // PE)
        if name == "left" and side.operand.value in self.context.residency.inside:
            first = (at - self.first) * steps
            held = self.context.resident[side.operand.value][0]
            raw = held[:wide, first : first + count * steps, :]
        else:
            raw = self.raw[name][i % 2][:wide, : count * steps, :]
            axes = ((wide, rows), (steps, PE * rows), (self.k, deep))
            dst = raw.reshape(wide, count, steps, self.k)
            yield from self._fetch(side, dst, axes, at, count, start * rows)
        yield from self._turn(name, raw, done, count, steps, wide)

    def _turn(
        self, name: str, raw: View, done: Tensor, count: int, steps: int, wide: int
    ) -> Iterator[Instruction]:
        """raw[row, (element, tile), k] to done[k, element, step of k, row], four at a time."""
        order = product(range(count), range(self.steps_k), range(steps))
        slots = [(g * steps + f, k) for g, k, f in order]
        flat = done[: self.deep, :count].reshape(self.deep, len(slots), wide)
        for q, (first, four) in enumerate(tiles(0, len(slots), BANK // PE)):
            spread = self.banks[name][q % 2].reshape(PE, BANK // PE, PE)
            for j, (slot, k) in enumerate(slots[first : first + four]):
                source = raw[:, slot, k * PE : k * PE + self.deep]
                yield Transpose(spread[: self.deep, j, :wide], source)
            yield Copy(flat[:, first : first + four, :], spread[: self.deep, :four, :wide])

    def _fetch(
        self,
        side: Side,
        dst: View,
        axes: Axes,
        at: int,
        count: int,
        offset: int,
    ) -> Iterator[DmaCopy]:
        """dst[p, element, step, f] from batch element `at` on: one DMA per box of batch axes."""
        batch, value = side.operand.merged[0], side.operand.value
        down, step, across = axes
        first = 0
        for box in boxes([e for e, _ in batch], at, at + count):
            shape = tuple(high - low for low, high in box)
            size = math.prod(shape)
            base = offset + sum(low * s for (low, _), (_, s) in zip(box, batch, strict=True))
            source = self.context.hbm(
                value,
                (down[0], *shape, step[0], across[0]),
                (down[1], *(s for _, s in batch), step[1], across[1]),
                base,
            )
            part = dst[:, first : first + size]
            yield DmaCopy(part.reshape(down[0], *shape, step[0], across[0]), source)
            first += size
