"""Nests of reductions over leading or middle axes.

If the innermost axis stays, sums are matmuls with a column of ones that collect in PSUM (other
reducers combine tiles on Vector, then partitions on GpSimd). If the innermost axis is reduced, kept
elements lie on partitions and the reduced ones on the free axis.
"""

import math
from collections.abc import Iterator

from .. import arithmetic
from ..dtypes import is_float
from ..isa.base import Instruction
from ..isa.dma import DmaCopy
from ..isa.gpsimd import PartitionReduce
from ..isa.tensor import Matmul
from ..isa.vector import Copy, Memset, TensorReduce, TensorScalar, TensorTensor
from ..memory import Tensor, View
from .axes import copies, runs
from .nest import Context, Loop, itemsize, once, tiles
from .reduction import ReductionKernel

COLUMNS = 2048
BANK = 512
FREE = 4096
FEW_ROWS = 48
MANY_COLUMNS = 4096


def nest(kernel: ReductionKernel, context: Context) -> Loop:
    """The nest that fits the kernel's axes."""
    init = kernel.operation.operands[1]
    identity = arithmetic.IDENTITY[kernel.reduction](kernel.result_type.numpy)
    start = kernel.constants[init]
    lowering = _Lowering(kernel, context, None if start == identity else start.item())
    if not kernel.groups or kernel.groups[-1][1]:
        return once(lowering.inner())
    return once(lowering.leading())


class _Lowering:
    def __init__(self, kernel: ReductionKernel, context: Context, init: float | int | None) -> None:
        self.kernel, self.context, self.init = kernel, context, init
        self.op = kernel.reduction
        self.dtype = kernel.operand_type(0).dtype
        self.wide = "f32" if is_float(self.dtype) else self.dtype
        self.integer = self.wide in ("i32", "ui32")
        kept, gone, stride = [], [], kernel.operand_type(0).size
        part = context.part
        for i, (extent, reduced) in enumerate(kernel.groups):
            stride //= extent
            if reduced:
                gone.append((extent, stride))
            else:
                mine = part.count if i == kernel.first_kept else extent
                kept.append((mine, stride))
        self.kept, self.gone = tuple(kept), tuple(gone)
        self.offset = part.start * kept[0][1] if kept else 0
        self.target = kernel.writes(part)[kernel.targets[0]][0]

    def _identity(self) -> float | int:
        from ..dtypes import numpy_dtype

        return arithmetic.IDENTITY[self.op](numpy_dtype(self.wide)).item()

    def _combine(self, total: View, piece: View) -> Instruction:
        engine = "gpsimd" if self.integer else "vector"
        return TensorTensor(total, total, piece, self.op, engine=engine)

    def _finish(self, out: View, total: View) -> Iterator[Instruction]:
        if self.init is not None:
            engine = "gpsimd" if self.integer else "vector"
            yield TensorScalar(out, total, self.op, self.init, engine=engine)
        else:
            yield Copy(out, total)

    # ---- the innermost axis is reduced ----

    def inner(self) -> Iterator[Instruction | Loop]:
        """Kept elements on partitions; reduced ones on the free axis, FREE at a time."""
        rows = math.prod(e for e, _ in self.kept)
        depth = math.prod(e for e, _ in self.gone)
        width = min(depth, FREE)
        data = self.context.rotating(width, self.dtype, "rows")
        pieces = self.context.rotating(1, self.wide, "piece")
        totals = self.context.rotating(1, self.wide, "total")
        outs = self.context.rotating(1, self.kernel.result_type.dtype, "out")
        row_tiles, strips = tiles(0, rows, 128), tiles(0, depth, width)

        def strip(t: int, s: int) -> Iterator[Instruction]:
            (at, count), (first, wide) = row_tiles[t], strips[s]
            turn = (t * len(strips) + s) % 2
            tile = data[turn][:count, :wide]
            source = self.kernel.sources[0]
            yield from copies(
                self.context, source, tile, self.kept, at, self.gone, first, self.offset
            )
            yield TensorReduce(pieces[turn][:count], tile, self.op)
            yield self._combine(totals[t % 2][:count], pieces[turn][:count])

        def tile(t: int) -> Iterator[Instruction | Loop]:
            at, count = row_tiles[t]
            yield Memset(totals[t % 2][:count], self._identity())
            yield Loop(len(strips), lambda s: strip(t, s), lambda s: strips[s][1])
            yield from self._finish(outs[t % 2][:count], totals[t % 2][:count])
            target = self.context.hbm(self.kernel.targets[0], (count, 1), (1, 1), self.target + at)
            yield DmaCopy(target, outs[t % 2][:count])

        yield Loop(len(row_tiles), tile, lambda t: row_tiles[t][1])

    # ---- the innermost axis stays ----

    def leading(self) -> Iterator[Instruction | Loop]:
        """For each outer kept index: columns of the last kept axis, rows added up."""
        outer = math.prod(e for e, _ in self.kept[:-1])
        columns = self.kept[-1][0]
        self._rows = math.prod(e for e, _ in self.gone)
        if self._rows <= FEW_ROWS and columns >= MANY_COLUMNS:
            yield self._vertical(outer, columns)
            return
        strips = tiles(0, columns, COLUMNS)
        self._stack = max(1, min(8, FREE // min(columns, COLUMNS), -(-self._rows // 128)))
        if len(self.gone) > 1:
            self._stack = 1
        self._blocks = tiles(0, self._rows, 128 * self._stack)
        width = min(columns, COLUMNS)
        self._data = self.context.rotating((self._stack, width), self.dtype, "rows")
        self._outs = self.context.rotating(width, self.kernel.result_type.dtype, "out")
        floats = is_float(self.dtype) and itemsize(self.dtype) > 1
        if self.op == "add" and floats:
            ones = self.context.tile(1, self.dtype, "ones")
            yield Memset(ones[:], 1)
            self._ones = ones
            count = -(-width // BANK)
            self._banks = [
                [self.context.bank(BANK, "f32", "sum") for _ in range(count)] for _ in range(2)
            ]
            sums = self._matmul_sums
        else:
            self._totals = self.context.rotating(width, self.wide, "total")
            self._single = self.context.rotating(width, self.wide, "single")
            sums = self._vector_sums

        def column(o: int, s: int) -> Iterator[Instruction | Loop]:
            start, wide = strips[s]
            turn = o * len(strips) + s
            base = self.offset + start + (runs(self.kept[:-1], o, 1)[0][1] if outer > 1 else 0)
            yield from sums(base, wide, turn)
            target = self.target + o * columns + start
            yield DmaCopy(
                self.context.hbm(self.kernel.targets[0], (1, wide), (wide, 1), target),
                self._outs[turn % 2][:1, :wide],
            )

        yield Loop(
            outer,
            lambda o: [
                Loop(len(strips), lambda s: column(o, s), lambda s: strips[s][1]),
            ],
        )

    def _vertical(self, outer: int, columns: int) -> Loop:
        """Few rows of many columns: columns over all partitions, row upon row added."""
        width = min(COLUMNS // 2, -(-columns // 128))
        pieces = []
        for at, count in tiles(0, columns, 128 * width):
            whole = count // width
            pieces += [(at, whole, width)] if whole else []
            rest = count - whole * width
            pieces += [(at + whole * width, 1, rest)] if rest else []
        data = self.context.rotating(width, self.dtype, "rows")
        totals = self.context.rotating(width, self.wide, "total")
        outs = self.context.rotating(width, self.kernel.result_type.dtype, "out")

        def piece(o: int, i: int) -> Iterator[Instruction]:
            (at, rows, wide), turn = pieces[i], o * len(pieces) + i
            base = self.offset + at + (runs(self.kept[:-1], o, 1)[0][1] if outer > 1 else 0)
            total = totals[turn % 2][:rows, :wide]
            steps = [offset + k * stride for _, offset, count, stride in
                     runs(self.gone, 0, self._rows) for k in range(count)]  # fmt: skip
            for r, step in enumerate(steps):
                tile = data[(turn * len(steps) + r) % 2][:rows, :wide]
                source = self.context.hbm(
                    self.kernel.sources[0], (rows, wide), (wide, 1), base + step
                )
                yield DmaCopy(tile, source)
                yield Copy(total, tile) if r == 0 else self._combine(total, tile)
            out = outs[turn % 2][:rows, :wide]
            yield from self._finish(out, total)
            target = self.target + o * columns + at
            place = self.context.hbm(self.kernel.targets[0], (rows, wide), (wide, 1), target)
            yield DmaCopy(place, out)

        return Loop(
            outer,
            lambda o: [Loop(len(pieces), lambda i: piece(o, i), lambda i: pieces[i][1:])],
        )

    def _block(self, i: int, base: int, wide: int, turn: int) -> Iterator[Instruction]:
        """Loads one stack of row tiles; returns [(view, rows)]."""
        at, count = self._blocks[i]
        tile: Tensor = self._data[turn % 2]
        whole = count // 128 if len(self.gone) == 1 else 0
        if whole:
            stride = self.gone[0][1]
            source = self.context.hbm(
                self.kernel.sources[0],
                (128, whole, wide),
                (stride, 128 * stride, 1),
                base + at * stride,
            )
            yield DmaCopy(tile[:, :whole, :wide], source)
        rest = count - 128 * whole
        views = [(tile[:, k, :wide], 128) for k in range(whole)]
        if rest:
            view = tile[:rest, whole, :wide]
            source, first = self.kernel.sources[0], at + 128 * whole
            yield from copies(self.context, source, view, self.gone, first, ((wide, 1),), 0, base)
            views.append((view, rest))
        return views

    def _matmul_sums(self, base: int, wide: int, turn: int) -> Iterator[Instruction | Loop]:
        banks = self._banks[turn % 2]
        cuts = tiles(0, wide, BANK)

        def block(i: int) -> Iterator[Instruction]:
            views = yield from self._block(i, base, wide, turn * len(self._blocks) + i)
            for k, (view, rows) in enumerate(views):
                for c, (at, width) in enumerate(cuts):
                    yield Matmul(
                        banks[c][:1, :width],
                        self._ones[:rows],
                        view[:, at : at + width],
                        accumulate=i > 0 or k > 0,
                    )

        yield Loop(len(self._blocks), block, lambda i: (self._blocks[i][1], i == 0))
        for c, (at, width) in enumerate(cuts):
            yield from self._finish(self._outs[turn % 2][:1, at : at + width], banks[c][:1, :width])

    def _vector_sums(self, base: int, wide: int, turn: int) -> Iterator[Instruction | Loop]:
        total, single = self._totals[turn % 2], self._single[turn % 2]
        yield Memset(total[:, :wide], self._identity())

        def block(i: int) -> Iterator[Instruction]:
            views = yield from self._block(i, base, wide, turn * len(self._blocks) + i)
            for view, rows in views:
                yield self._combine(total[:rows, :wide], view)

        yield Loop(len(self._blocks), block, lambda i: self._blocks[i][1])
        yield PartitionReduce(single[:1, :wide], total[:, :wide], self.op)
        yield from self._finish(self._outs[turn % 2][:1, :wide], single[:1, :wide])
