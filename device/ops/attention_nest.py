"""The nest of attention: blocks of 512 keys against tiles of 128 queries, softmax on the way.

For each tile of queries a running maximum, sum and result are kept and rescaled when a block raises
the maximum (Milakov and Gimelshein, arXiv:1805.02867; Dao et al., arXiv:2205.14135). Four tiles of
queries go through a block in turn, and the steps of three of them are under way at a time, so that
the engines, each in its order, do not wait for one another. Keys after the diagonal of a causal
attention are not computed, to whole tiles of 128.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ..isa.base import Instruction
from ..isa.scalar import Activation
from ..isa.tensor import Matmul, Transpose
from ..isa.vector import (
    Copy,
    ScalarTensorTensor,
    TensorReduce,
    TensorScalar,
    TensorTensor,
)
from ..memory import Tensor, View
from .attention import AttentionKernel
from .attention_tiles import FOUR, Heads, evacuate
from .matmul_sides import BANK, PE
from .nest import Context, Loop, once, tiles


def nest(kernel: AttentionKernel, context: Context) -> Loop:
    """The loop over key heads, query heads and groups of 512 queries."""
    return once(_Forward(kernel, context).steps())


@dataclass(frozen=True, slots=True)
class _Unit:
    """One tile of queries (`tile` of its group, first query `row`) against one block of keys."""

    tile: int
    row: int
    rows: int
    block: int
    width: int
    first: bool


class _Forward:
    def __init__(self, kernel: AttentionKernel, context: Context) -> None:
        self.kernel, self.context, self.shapes = kernel, context, kernel.shapes
        self.heads = heads = Heads(kernel, context)
        dtype, h, s, t = heads.dtype, heads.h, self.shapes.s, self.shapes.t
        key_tiles = -(-t // PE)
        self.keys = context.tile(t, dtype, "keys turned")
        self.values = context.tile((key_tiles, h), dtype, "values")
        self.key_rows = context.rotating((FOUR, h), dtype, "key rows")
        self.query_rows = context.rotating((FOUR, h), dtype, "query rows")
        self.queries = context.rotating(BANK, dtype, "queries turned")
        self.tops = context.rotating((2, FOUR), "f32", "tops")
        self.numbers = context.rotating((9, FOUR), "f32", "numbers")
        self.totals = context.rotating((FOUR, h), "f32", "totals")
        self.weights = context.rotating(BANK, dtype, "weights")
        self.turned = context.rotating((FOUR, PE), dtype, "weights turned")
        self.out = context.rotating((FOUR, h), kernel.types[kernel.targets[0]].dtype, "out")
        self.sums = context.tile(-(-s // PE), "f32", "sums of exponentials")
        self.lse = context.tile(-(-s // PE), "f32", "lse")
        self.line = context.tile(PE, "f32", "lse line")
        self.scores = [context.bank(BANK, "f32", f"scores {i}") for i in range(3)]
        self.products = [context.bank(h, "f32", f"product {i}") for i in range(2)]
        self.mask, self.made = heads.mask() if kernel.causal else (self.lse, [])
        self.groups = tiles(0, s, BANK)

    def steps(self) -> Iterator[Instruction | Loop]:
        """The whole nest."""
        yield from self.made
        yield self.heads.loop(self._keys, self._head)

    def _keys(self, b: int, g: int) -> Iterator[Instruction]:
        """Keys turned and values, whole."""
        heads, t = self.heads, self.shapes.t
        k, v = heads.rows(1), heads.rows(2)
        for i, (at, size) in enumerate(tiles(0, t, BANK)):
            rows = self.key_rows[i % 2]
            yield from heads.load(k, rows, b, g, at, size)
            yield from heads.turn(rows, self.keys[:, at : at + size], size)
        yield from heads.load(v, self.values, b, g, 0, t)

    def _head(self, i: int, b: int, n: int) -> Iterator[Instruction | Loop]:
        yield Loop(
            len(self.groups),
            lambda j: self._group(j, b, n),
            lambda j: (self.groups[j][1], self.kernel.causal and j),
        )
        lse, sums = self.lse[:], self.sums[:]
        yield Activation(sums, sums, "log")
        yield TensorTensor(lse, sums, lse, "subtract")
        lse = self.kernel.targets[1]
        yield from self.heads.store_columns(lse, self.line, self.lse[:], b, n)

    def _units(self, start: int, count: int) -> list[_Unit]:
        units = []
        for block in range(0, self.shapes.t, BANK):
            for i, (row, rows) in enumerate(tiles(start, start + count, PE)):
                width = self.heads.seen(row, rows, block)
                if width:
                    units.append(_Unit(i, row, rows, block, width, block == 0))
        return units

    def _group(self, j: int, b: int, n: int) -> Iterator[Instruction]:
        start, count = self.groups[j]
        rows = self.query_rows[j % 2]
        yield from self.heads.load(self.heads.rows(0), rows, b, n, start, count)
        yield from self.heads.turn(rows, self.queries[j % 2][:], count)
        units = self._units(start, count)
        for k in range(-2, len(units) + 1):
            if k + 2 < len(units):
                yield self._score(units[k + 2], k + 2, j)
            if 0 <= k < len(units):
                yield from self._turn(units[k], k)
            if 0 <= k + 1 < len(units):
                yield from self._weigh(units[k + 1], k + 1, j)
            if 0 <= k < len(units):
                yield from self._turned(units[k], k)
            if k - 1 >= 0:
                yield from self._sum(units[k - 1], k - 1, j)
        yield from self._leave(j, b, n, units)

    # ---- the steps of a unit -----------------------------------------------------------------

    def _score(self, unit: _Unit, k: int, j: int) -> Instruction:
        h, at = self.heads.h, unit.tile * PE
        query = self.queries[j % 2][:h, at : at + unit.rows]
        key = self.keys[:h, unit.block : unit.block + unit.width]
        return Matmul(self.scores[k % 3][: unit.rows, : unit.width], query, key)

    def _weigh(self, unit: _Unit, k: int, j: int) -> Iterator[Instruction]:
        """Maximum, exponentials and their sum, and alpha, by which earlier sums are scaled."""
        scores = self.scores[k % 3][: unit.rows, : unit.width]
        scale = self.kernel.scale
        last = unit.row + unit.rows - unit.block
        if self.kernel.causal and last == unit.width:
            corner = scores[:, unit.width - unit.rows :]
            yield TensorTensor(corner, corner, self.mask[: unit.rows, : unit.rows], "add")
        old, new = (self._top(unit, j, flip) for flip in (1, 0))
        top, part, alpha = self._numbers(unit, j)
        yield TensorReduce(top, scores, "maximum")
        if unit.first:
            yield TensorScalar(new, top, "multiply", -scale)
        else:
            yield TensorScalar(new, top, "multiply", -scale, "minimum", old)
        weights = self.weights[k % 2][: unit.rows, : unit.width]
        into = self._column(self.sums, unit) if unit.first else part
        yield Activation(weights, scores, "exponential", scale=scale, bias=new, reduce=into)
        if not unit.first:
            yield Activation(alpha, old, "exponential", scale=-1.0, bias=new)

    def _turn(self, unit: _Unit, k: int) -> Iterator[Instruction]:
        spread, weights = self._spread(k), self.weights[k % 2]
        for i, (at, wide) in enumerate(tiles(0, unit.width, PE)):
            yield Transpose(spread[:wide, i, : unit.rows], weights[: unit.rows, at : at + wide])

    def _spread(self, k: int) -> View:
        """[128, 4, 128] of a bank: weights turned."""
        return self.heads.turned[k % 2].reshape(PE, FOUR, PE)

    def _turned(self, unit: _Unit, k: int) -> Iterator[Instruction]:
        spread, turned, whole = self._spread(k), self.turned[k % 2], unit.width // PE
        if whole:
            source = spread[:, :whole, : unit.rows]
            yield evacuate(k, turned[:, :whole, : unit.rows], source)
        if unit.width % PE:
            wide = unit.width % PE
            yield Copy(turned[:wide, whole, : unit.rows], spread[:wide, whole, : unit.rows])

    def _sum(self, unit: _Unit, k: int, j: int) -> Iterator[Instruction]:
        product = self.products[k % 2][: unit.rows]
        turned = self.turned[k % 2]
        for i, (at, wide) in enumerate(tiles(0, unit.width, PE)):
            value = self.values[:wide, (unit.block + at) // PE]
            yield Matmul(product, turned[:wide, i, : unit.rows], value, accumulate=i > 0)
        total = self.totals[j % 2][: unit.rows, unit.tile]
        if unit.first:
            yield Copy(total, product)
        else:
            _, part, alpha = self._numbers(unit, j)
            sums = self._column(self.sums, unit)
            yield ScalarTensorTensor(total, total, "multiply", alpha, "add", product)
            yield ScalarTensorTensor(sums, sums, "multiply", alpha, "add", part)

    def _leave(self, j: int, b: int, n: int, units: list[_Unit]) -> Iterator[Instruction]:
        """Results over their sums; the scaled maxima for the head's `lse`."""
        start, count = self.groups[j]
        for i, unit in {unit.tile: unit for unit in units}.items():
            done, total = (tile[j % 2][: unit.rows, i] for tile in (self.out, self.totals))
            yield TensorScalar(done, total, "divide", self._column(self.sums, unit))
            yield Copy(self._column(self.lse, unit), self._top(unit, j, 0))
        yield from self.heads.store(self.heads.result(0), self.out[j % 2], b, n, start, count)

    # ---- numbers of a tile of queries ------------------------------------------------------------

    def _top(self, unit: _Unit, j: int, flip: int) -> View:
        """[rows, 1]: minus the scaled maximum so far, of this block or (flip) the one before."""
        turn = (unit.block // BANK + flip) % 2
        return self.tops[j % 2][: unit.rows, turn, unit.tile : unit.tile + 1]

    def _numbers(self, unit: _Unit, j: int) -> tuple[View, View, View]:
        """[rows, 1] each: the block's maximum, its sum, and the scale of what was before.

        Those of three blocks are kept: they are used two units after they are found.
        """
        first = 3 * (unit.block // BANK % 3)
        tile: Tensor = self.numbers[j % 2]
        views = [tile[: unit.rows, first + i, unit.tile : unit.tile + 1] for i in range(3)]
        return views[0], views[1], views[2]

    def _column(self, tile: Tensor, unit: _Unit) -> View:
        """[rows, 1] of a [128, tiles of queries] value of the head."""
        return tile[: unit.rows, unit.row // PE : unit.row // PE + 1]
