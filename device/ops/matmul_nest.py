"""The nest of a matmul kernel.

Blocks of right's columns are the outer loop, tiles of 128 of left's rows the inner one. left's tile
is stationary with K on partitions, right's block moves, sums collect in PSUM and leave through
Vector and Scalar in turn. An operand whose K axis is the contiguous one in HBM is loaded with its
other axis on partitions and transposed by the tensor engine, 128 x 128 at a time; the transposes of
left's next row tile stand between the matmuls of this one. If all of K does not fit beside the
tiles, K is cut into blocks, and the blocks of right are loaded for every group of row tiles. What
is to be added to the result is added as the sums leave.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ..isa.base import Instruction
from ..isa.dma import DmaCopy
from ..isa.scalar import Activation
from ..isa.tensor import Matmul, Transpose
from ..isa.vector import Copy, TensorTensor
from ..memory import Tensor, View
from . import matmul_batched
from .axes import copies, runs
from .matmul import MatmulKernel
from .matmul_sides import BANK, PE, Side, sides
from .nest import Context, Loop, itemsize, once, tiles

RIGHT_BYTES = 36_000
LEFT_BYTES = 20_000
WIDE_RIGHT_BYTES = 66_000
WIDE_ROWS = 512
SET_BYTES = 178_200
RAW_STEPS = 8
"""Steps of K for which the rows of an operand are loaded at once to be transposed."""

RAW_TILES = {"left": 4, "right": 2}
"""Such loads under way: a DMA takes longer to come than two transposes of four steps."""

BLOCK_COLUMNS = 2048


@dataclass(frozen=True, slots=True)
class Tiling:
    """Sizes of the blocks: columns of right, K, and row tiles that share a block of right."""

    left: Side
    right: Side
    columns: int
    depth: int
    group: int
    k: int
    out: str
    addend: int  # bytes of an element of the addend

    @staticmethod
    def of(kernel: MatmulKernel) -> "Tiling":
        """The tiling of a kernel: wide blocks of right where many row tiles use them."""
        wide = Tiling.with_right(kernel, WIDE_RIGHT_BYTES)
        if kernel.m >= WIDE_ROWS and wide.resident_right and wide.partition_bytes <= SET_BYTES:
            return wide
        return Tiling.with_right(kernel, RIGHT_BYTES)

    @staticmethod
    def with_right(kernel: MatmulKernel, right_bytes: int) -> "Tiling":
        """The tiling with a bound on the bytes per partition of a block of right."""
        left, right = sides(kernel)
        size = max(itemsize(side.compute) for side in (left, right))
        steps = -(-kernel.k // PE)
        columns = min(kernel.n, BLOCK_COLUMNS, right_bytes // (steps * size) // BANK * BANK)
        if steps * PE * size <= LEFT_BYTES and columns >= min(kernel.n, BANK):
            depth, group = steps, 1
        else:
            group = min(4, -(-kernel.m // PE))
            columns = min(kernel.n, BANK)
            fitting = LEFT_BYTES // (group * PE * size), RIGHT_BYTES // (columns * size)
            depth = max(1, min(steps, *fitting))
        out = kernel.types[kernel.result].dtype
        addend = 0 if kernel.addend is None else itemsize(kernel.types[kernel.addend].dtype)
        tiling = Tiling(left, right, columns, depth, group, kernel.k, out, addend)
        while tiling.partition_bytes > SET_BYTES and tiling.depth > 1 and depth < steps:
            tiling = replace(tiling, depth=tiling.depth - 1)
        return tiling

    @property
    def resident_right(self) -> bool:
        """Whether a block of right holds all of K and serves every row tile."""
        return self.depth * PE >= self.k

    @property
    def partition_bytes(self) -> int:
        """Bytes per partition that the kernel's tiles take."""
        left, right = itemsize(self.left.compute), itemsize(self.right.compute)
        width = self.depth * PE
        one = self.group * width * left + self.depth * self.columns * right
        one += self.columns * (itemsize(self.out) + self.addend) * self.group
        raw = sum(
            RAW_TILES[name] * itemsize(side.raw)
            for name, side in (("left", self.left), ("right", self.right))
            if not side.direct
        )
        return 2 * one + self.raw_width * raw

    @property
    def raw_width(self) -> int:
        """Elements of a row that are loaded at once to be transposed."""
        return min(self.depth, RAW_STEPS) * PE


def nest(kernel: MatmulKernel, context: Context) -> Loop:
    """The loop over batches, blocks of columns and row tiles."""
    if matmul_batched.is_batched(kernel):
        return matmul_batched.nest(kernel, context)
    return once(_Lowering(kernel, context).steps())


class _Lowering:
    def __init__(self, kernel: MatmulKernel, context: Context) -> None:
        self.kernel, self.context = kernel, context
        self.tiling = t = Tiling.of(kernel)
        batch, rows, columns = kernel.share(context.part)
        self.batches = range(batch.start, batch.stop)
        self.blocks = tiles(columns.start, columns.stop, t.columns)
        self.groups = tiles(rows.start, rows.stop, PE * t.group)
        self.depths = tiles(0, kernel.k, PE * t.depth)
        self._made: dict[Hashable, list[Any]] = {}
        self._allocate()

    def _allocate(self) -> None:
        t, c = self.tiling, self.context
        self.left = c.rotating((t.depth, t.group * PE), t.left.compute, "left")
        self.right = c.rotating((t.depth, t.columns), t.right.compute, "right")
        self.interleaved = t.resident_right and t.group == 1 and not t.left.direct
        self.staged: list[Tensor] = []
        if not c.stays(self.kernel.result):
            self.staged = c.rotating((t.group, t.columns), t.out, "out")
        width = t.raw_width
        gen2 = c.chip.generation < 3
        self.raw: dict[str, list[Tensor]] = {}
        self.turned: dict[str, list[Tensor]] = {}
        for name, side in (("left", t.left), ("right", t.right)):
            if side.direct:
                continue
            if name == "right" or self._left_held() is None:
                names = [f"{name} rows {i}" for i in range(RAW_TILES[name])]
                self.raw[name] = [c.tile(width, side.raw, n) for n in names]
            kind = "f32" if gen2 else side.raw
            self.turned[name] = [c.bank(BANK, kind, f"{name} turned") for _ in range(2)]
        self.banks = [c.bank(BANK, "f32", "sum") for _ in range(4)]
        self.added: list[Tensor] = []
        if self.kernel.addend is not None:
            dtype = self.kernel.types[self.kernel.addend].dtype
            self.added = c.rotating((t.group, t.columns), dtype, "addend")

    def _left_held(self) -> Tensor | None:
        value = self.kernel.left.value
        if value not in self.context.residency.inside:
            return None
        found = self.context.resident.get(value)
        return None if found is None else found[0]

    # ---- loops ----

    def steps(self) -> Iterator[Instruction | Loop]:
        """The whole nest."""
        yield Loop(len(self.batches), self._batch)

    def _batch(self, b: int) -> Iterator[Loop]:
        yield Loop(len(self.blocks), lambda j: self._block(b, j), lambda j: self.blocks[j][1])

    def _block(self, b: int, j: int) -> Iterator[Instruction | Loop]:
        turn = b * len(self.blocks) + j
        if self.tiling.resident_right:
            yield from self._load_right(b, j, 0, turn)
        if self.kernel.addend is not None and self.kernel.addend_row:
            start, width = self.blocks[j]
            view = self.context.hbm(self.kernel.addend, (PE, width), (0, 1), start)
            yield DmaCopy(self.added[turn % 2][:, 0, :width], view)
        if self.interleaved:
            yield Loop(len(self.groups), lambda g: self._beside(b, j, g, turn), self._alike_beside)
        else:
            yield Loop(len(self.groups), lambda g: self._group(b, j, g, turn), self._alike_rows)

    def _alike_beside(self, g: int) -> Hashable:
        last = len(self.groups) - 1
        return g == 0, g == last, self._alike_rows(g), self._alike_rows(min(g + 1, last))

    def _beside(self, b: int, j: int, g: int, turn: int) -> Iterator[Instruction | Loop]:
        """A row tile's matmuls, and between them the transposes of the next one."""
        count = turn * len(self.groups) + g
        if turn == b * len(self.blocks) and g == 0:
            for step in self._left_steps(b, 0, count):
                yield from step
        yield from self._load_addend(j, g, count)
        follows = g + 1 < len(self.groups) or j + 1 < len(self.blocks)
        ahead = list(self._left_steps(b, (g + 1) % len(self.groups), count + 1)) if follows else []
        work = list(self._products(j, g, turn, count))
        share = -(-len(work) // max(1, len(ahead)))
        for i, step in enumerate(ahead):
            yield from step
            yield from work[i * share : (i + 1) * share]
        yield from work[share * len(ahead) :]
        yield from self._leave(b, j, g, count)

    def _products(self, j: int, g: int, turn: int, count: int) -> Iterator[Instruction]:
        """The matmuls of one row tile with a block of right, and how their sums leave."""
        rows = self.groups[g][1]
        for n, (at, width) in enumerate(tiles(0, self.blocks[j][1], BANK)):
            bank = self._bank(count, 0, n)[:rows, :width]
            left, right = self.left[count % 2], self.right[turn % 2]
            yield from self._chain(bank, left, right, 0, rows, at, width, 0)
            yield self._evacuate(bank, count, j, g, 0, n, at, width)

    def _left_steps(self, b: int, g: int, count: int) -> Iterator[list[Instruction]]:
        """A row tile of left as it comes: loads, and four steps of K transposed at a time."""
        (at, rows), depth, tile = self.groups[g], self.depths[0][1], self.left[count % 2]
        side, held = self.tiling.left, self._left_held()
        cuts = [(0, depth)] if held is not None else tiles(0, depth, self.tiling.raw_width)
        for c, (first, some) in enumerate(cuts):
            loads: list[Instruction] = []
            if held is not None:
                raw = held[:rows, self._flat_tile(count, g, 0), first : first + some]
            else:
                turn = (count * len(cuts) + c) % RAW_TILES["left"]
                raw, (_, free, contract) = self.raw["left"][turn][:rows, :some], side.operand.merged
                base, value = self._offset(side, b), side.operand.value
                loads += copies(self.context, value, raw, free, at, contract, first, base)
            steps = tiles(0, some, PE)
            for q in range(0, len(steps), 4):
                four, place = steps[q : q + 4], (first // PE + q) // 4
                yield loads + self._turn_four("left", raw, tile, four, place, 0, rows)
                loads = []

    def _alike_rows(self, g: int) -> Hashable:
        """Rows, and the runs in which left has them: each is a DMA."""
        start, rows = self.groups[g]
        free = self.tiling.left.operand.merged[1]
        return rows, len(runs(free, start, rows)) if len(free) > 1 else 1

    def _group(self, b: int, j: int, g: int, turn: int) -> Iterator[Instruction | Loop]:
        count = turn * len(self.groups) + g
        yield from self._load_addend(j, g, count)
        yield Loop(
            len(self.depths),
            lambda d: self._depth(b, j, g, d, turn, count),
            lambda d: (self.depths[d][1], d == 0),
        )
        yield from self._leave(b, j, g, count)

    def _depth(
        self, b: int, j: int, g: int, d: int, turn: int, count: int
    ) -> Iterator[Instruction | Loop]:
        index = count * len(self.depths) + d
        yield from self._load_left(b, g, d, index)
        right = self.right[turn % 2]
        if not self.tiling.resident_right:
            yield from self._load_right(b, j, d, index)
            right = self.right[index % 2]
        left = self.left[index % 2]
        for i, (_, rows) in enumerate(self._row_tiles(g)):
            for n, (at, width) in enumerate(tiles(0, self.blocks[j][1], BANK)):
                bank = self._bank(count, i, n)[:rows, :width]
                yield from self._chain(bank, left, right, i, rows, at, width, d)
                if len(self.depths) == 1:
                    yield self._evacuate(bank, count, j, g, i, n, at, width)

    def _row_tiles(self, g: int) -> list[tuple[int, int]]:
        start, rows = self.groups[g]
        return tiles(start, start + rows, PE)

    def _bank(self, count: int, i: int, n: int) -> Tensor:
        if self.tiling.group > 1 or len(self.depths) > 1:
            return self.banks[i if self.tiling.group > 1 else count % 2]
        return self.banks[2 * (count % 2) + n % 2]

    def _chain(
        self,
        bank: View,
        left: Tensor,
        right: Tensor,
        i: int,
        rows: int,
        at: int,
        width: int,
        d: int,
    ) -> list[Matmul]:
        """Sum over the K tiles of one block; instructions on the same tiles are made once."""
        depth = self.depths[d][1]
        key = (id(bank.tensor), id(left), id(right), i, rows, at, width, depth, d > 0)
        if key not in self._made:
            self._made[key] = [
                Matmul(
                    bank,
                    left[:deep, k, i * PE : i * PE + rows],
                    right[:deep, k, at : at + width],
                    accumulate=k > 0 or d > 0,
                )
                for k, (_, deep) in enumerate(tiles(0, depth, PE))
            ]
        return self._made[key]

    # ---- results ----

    def _leave(self, b: int, j: int, g: int, count: int) -> Iterator[Instruction]:
        start, width = self.blocks[j]
        for i, (row, rows) in enumerate(self._row_tiles(g)):
            if len(self.depths) > 1:
                bank = self._bank(count, i, 0)[:rows, :width]
                yield self._evacuate(bank, count, j, g, i, i, 0, width)
            if self.context.stays(self.kernel.result):
                continue
            source = self._place(count, j, g, i)[:rows, :width]
            n = self.kernel.n
            offset = ((self.batches[b]) * self.kernel.m + row) * n + start
            target = self.context.hbm(self.kernel.result, (rows, width), (n, 1), offset)
            yield DmaCopy(target, source)

    def _place(self, count: int, j: int, g: int, i: int) -> View:
        """[128, columns] where the results of a row tile are put in SBUF."""
        held = self.context.resident.get(self.kernel.result)
        if held is not None and self.kernel.result in self.context.residency.kept:
            start, width = self.blocks[j]
            tile = self._flat_tile(count, g, i)
            return held[0][:, tile, start : start + width]
        return self.staged[count % 2][:, i, :]

    def _flat_tile(self, count: int, g: int, i: int) -> int:
        per_batch = -(-(self.groups[-1][0] + self.groups[-1][1] - self.groups[0][0]) // PE)
        b = count // (len(self.groups) * len(self.blocks))
        return b * per_batch + g * self.tiling.group + i

    def _load_addend(self, j: int, g: int, count: int) -> Iterator[Instruction]:
        """What is added to the rows of a group, if they differ."""
        if self.kernel.addend is None or self.kernel.addend_row:
            return
        start, width = self.blocks[j]
        for i, (row, rows) in enumerate(self._row_tiles(g)):
            offset = row * self.kernel.n + start
            view = self.context.hbm(self.kernel.addend, (rows, width), (self.kernel.n, 1), offset)
            yield DmaCopy(self.added[count % 2][:rows, i, :width], view)

    def _evacuate(
        self, bank: View, count: int, j: int, g: int, i: int, n: int, at: int, width: int
    ) -> Instruction:
        rows = bank.shape[0]
        dst = self._place(count, j, g, i)[:rows, at : at + width]
        if self.added:
            turn, tile = (count // len(self.groups), 0) if self.kernel.addend_row else (count, i)
            added = self.added[turn % 2][:rows, tile, at : at + width]
            return TensorTensor(dst, bank, added, "add")
        return Copy(dst, bank) if n % 2 == 0 else Activation(dst, bank, "copy")

    # ---- operands ----

    def _load_right(self, b: int, j: int, d: int, index: int) -> Iterator[Instruction | Loop]:
        start, width = self.blocks[j]
        tile = self.right[index % 2]
        yield from self._load("right", self.tiling.right, tile, b, d, start, width, index)

    def _load_left(self, b: int, g: int, d: int, index: int) -> Iterator[Instruction | Loop]:
        start, rows = self.groups[g]
        tile = self.left[index % 2]
        yield from self._load("left", self.tiling.left, tile, b, d, start, rows, index, g)

    def _offset(self, side: Side, b: int) -> int:
        batch, _, _ = side.operand.merged
        return runs(batch, self.batches[b], 1)[0][1] if batch else 0

    def _load(
        self,
        name: str,
        side: Side,
        tile: Tensor,
        b: int,
        d: int,
        start: int,
        count: int,
        index: int,
        g: int = 0,
    ) -> Iterator[Instruction | Loop]:
        """Fills tile[k, step, :count] with K block d of free range [start, start + count)."""
        if side.direct:
            yield from self._load_direct(side, tile, b, d, start, count)
            return
        pieces = tiles(start, start + count, PE)
        yield Loop(
            len(pieces),
            lambda i: self._turn(name, side, tile, b, d, start, pieces[i], index, i, g),
            lambda i: pieces[i][1],
        )

    def _load_direct(
        self, side: Side, tile: Tensor, b: int, d: int, start: int, count: int
    ) -> Iterator[Instruction]:
        _, free, contract = side.operand.merged
        base, (first, depth) = self._offset(side, b), self.depths[d]
        value, whole = side.operand.value, depth // PE
        plain = len(contract) == 1 and len(free) <= 1
        if plain and whole > 1:
            stride, inner = contract[0][1], free[0][1] if free else 1
            offset = base + first * stride + start * (free[0][1] if free else 0)
            source = self.context.hbm(
                value, (PE, whole, count), (stride, PE * stride, inner), offset
            )
            yield DmaCopy(tile[:, :whole, :count], source)
        else:
            whole = 0
        for k, (at, deep) in enumerate(tiles(first, first + depth, PE)):
            if k >= whole:
                target = tile[:deep, k, :count]
                yield from copies(self.context, value, target, contract, at, free, start, base)

    def _turn(
        self,
        name: str,
        side: Side,
        tile: Tensor,
        b: int,
        d: int,
        start: int,
        piece: tuple[int, int],
        index: int,
        i: int,
        g: int,
    ) -> Iterator[Instruction | Loop]:
        """128 rows with K along them, transposed into `tile` as they are loaded, or from where
        they are held."""
        at, rows = piece
        first, depth = self.depths[d]
        held = self._left_held() if name == "left" else None
        if held is not None:
            t = self._flat_tile(index // len(self.depths), g, i)
            raw = held[:rows, t, first : first + depth]
            yield self._turn_steps(name, raw, tile, 0, at - start)
            return
        cuts = tiles(0, depth, self.tiling.raw_width)
        turn = (index * max(1, -(-self._widest(name) // PE)) + i) * len(cuts)

        def cut(c: int) -> Iterator[Instruction | Loop]:
            from_k, count = cuts[c]
            _, free, contract = side.operand.merged
            raw = self.raw[name][(turn + c) % RAW_TILES[name]][:rows, :count]
            base, value = self._offset(side, b), side.operand.value
            yield from copies(self.context, value, raw, free, at, contract, first + from_k, base)
            yield self._turn_steps(name, raw, tile, from_k // PE, at - start)

        if len(cuts) == 1:
            yield from cut(0)
        else:
            yield Loop(len(cuts), cut, lambda c: cuts[c][1])

    def _turn_steps(self, name: str, raw: View, tile: Tensor, step: int, position: int) -> Loop:
        """raw[row, k] to tile[k, step on, position + row], four steps at a time."""
        rows, depth = raw.shape
        steps = tiles(0, depth, PE)
        fours = [steps[k : k + 4] for k in range(0, len(steps), 4)]
        return Loop(
            len(fours),
            lambda q: self._turn_four(name, raw, tile, fours[q], step // 4 + q, position, rows),
            lambda q: (len(fours[q]), fours[q][-1][1]),
            steady=6,
        )

    def _widest(self, name: str) -> int:
        return self.tiling.columns if name == "right" else self.tiling.group * PE

    def _turn_four(
        self,
        name: str,
        raw: View,
        tile: Tensor,
        steps: list[tuple[int, int]],
        q: int,
        position: int,
        rows: int,
    ) -> list[Instruction]:
        place = (id(raw.tensor), raw.offset, raw.shape, id(tile))
        key = (name, *place, q, position, rows, tuple(steps))
        if key not in self._made:
            self._made[key] = list(self._make_turn(name, raw, tile, steps, q, position, rows))
        return self._made[key]

    def _make_turn(
        self,
        name: str,
        raw: View,
        tile: Tensor,
        steps: list[tuple[int, int]],
        q: int,
        position: int,
        rows: int,
    ) -> Iterator[Instruction]:
        bank = self.turned[name][q % 2]
        spread = bank.reshape(PE, BANK // PE, PE)
        for s, (at, deep) in enumerate(steps):
            yield Transpose(spread[:deep, s, :rows], raw[:, at : at + deep])
        whole = sum(deep == PE for _, deep in steps)
        if whole:
            dst = tile[:, 4 * q : 4 * q + whole, position : position + rows]
            yield Copy(dst, spread[:, :whole, :rows])
        if whole < len(steps):
            deep = steps[-1][1]
            dst = tile[:deep, 4 * q + whole, position : position + rows]
            yield Copy(dst, spread[:deep, whole, :rows])
