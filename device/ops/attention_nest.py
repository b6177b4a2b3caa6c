"""The nest of attention: blocks of 512 keys against tiles of 128 queries, softmax on the way.

For each tile of queries a running maximum, sum and result are kept and rescaled when a block raises
the maximum (Milakov and Gimelshein, arXiv:1805.02867; Dao et al., arXiv:2205.14135). Four tiles of
queries, and heads that are held together, go through the blocks in turn; the steps of three such
units are under way at a time, so that the engines, each in its order, do not wait for one another.
Keys after the diagonal of a causal attention are not computed, to whole tiles of 128.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

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
from .attention_tiles import FOUR, Group, Heads, evacuate, size_of, whole_tiles
from .matmul_sides import BANK, PE
from .nest import Context, Loop, once, tiles

ROOM = 120_000
"""Bytes per partition for heads; one head may take more."""

KEPT_COLUMNS = 2048
"""Columns of sums that wait for their logarithm: each change of function loads a table."""


def nest(kernel: AttentionKernel, context: Context) -> Loop:
    """The loop over key heads, query heads and groups of 512 queries."""
    return once(_Forward(kernel, context).steps())


@dataclass(frozen=True, slots=True)
class _Unit:
    """One tile of queries against one block of keys.

    `head` is the query head's place among those that go together, `key` its key head's among those
    held; `tile` is the tile's number in its group of 512 queries, `row` its first query; `column`
    is where its sum is kept.
    """

    head: int
    key: int
    tile: int
    row: int
    rows: int
    block: int
    width: int
    last: bool
    column: int

    @property
    def first(self) -> bool:
        """Whether nothing has been summed yet."""
        return self.block == 0


class _Forward:
    def __init__(self, kernel: AttentionKernel, context: Context) -> None:
        self.kernel, self.context, self.shapes = kernel, context, kernel.shapes
        h, s, t, size = self.shapes.h, self.shapes.s, self.shapes.t, size_of(kernel)
        key_tiles, self.tall = -(-t // PE), -(-s // PE)
        self.four = min(FOUR, self.tall)
        key_bytes = 2 * (whole_tiles(t) + key_tiles * h) * size + 2 * FOUR * h * size
        head_bytes = 2 * self.four * (2 * h * size + PE * size + 4 * h)
        self.heads = heads = Heads(kernel, context, key_bytes, head_bytes, ROOM)
        self._allocate(context, heads.keys, heads.together, key_tiles)
        self.mask, self.made = heads.mask() if kernel.causal else (self.line, [])
        self.groups = tiles(0, s, BANK)
        self.turn = 0

    def _allocate(self, c: Context, keys: int, heads: int, key_tiles: int) -> None:
        dtype, h, four = self.heads.dtype, self.heads.h, self.four
        wide = whole_tiles(self.shapes.t)
        held = 2 * keys * (wide + key_tiles * h) * size_of(self.kernel) <= ROOM
        copies = range(2 if held else 1)
        self.keys = [c.tile(keys * wide, dtype, f"keys turned {i}") for i in copies]
        self.values = [c.tile((key_tiles, keys * h), dtype, f"values {i}") for i in copies]
        self.key_rows = c.rotating((FOUR, keys * h), dtype, "key rows")
        self.query_rows = c.rotating((four, heads * h), dtype, "query rows")
        self.queries = c.rotating(heads * four * PE, dtype, "queries turned")
        self.tops = c.rotating((2, heads * four), "f32", "tops")
        self.numbers = c.rotating((9, heads * four), "f32", "numbers")
        self.totals = c.rotating((heads * four, h), "f32", "totals")
        self.weights = c.rotating(BANK, dtype, "weights")
        self.turned = c.rotating((FOUR, PE), dtype, "weights turned")
        out = self.kernel.types[self.kernel.operations[0].results[0]].dtype
        self.out = c.rotating((four, heads * h), out, "out")
        count = self.context.part.count * self.tall
        self.waits = count <= KEPT_COLUMNS
        count = count if self.waits else heads * self.tall
        self.sums = c.tile(count, "f32", "sums of exponentials")
        self.lse = c.tile(count, "f32", "lse")
        self.line = c.tile(PE, "f32", "lse line")
        self.scores = [c.bank(BANK, "f32", f"scores {i}") for i in range(3)]
        self.products = [c.bank(h, "f32", f"product {i}") for i in range(2)]

    def steps(self) -> Iterator[Instruction | Loop]:
        """The whole nest."""
        yield from self.made
        yield self.heads.loop(self._keys, self._some)
        if self.waits:
            yield from self._logarithms(range(self.context.part.start, self.context.part.stop))

    def _keys(self, i: int, group: Group) -> Iterator[Instruction]:
        """Keys turned and values of the key heads, whole."""
        heads, t, count = self.heads, self.shapes.t, len(group.keys)
        k, v = heads.rows(1), heads.rows(2)
        self.turn = i % len(self.keys)
        wide = whole_tiles(t)
        keys = self.keys[self.turn].reshape(PE, self.heads.keys, wide)
        for j, (at, size) in enumerate(tiles(0, t, BANK)):
            rows = self.key_rows[j % 2]
            yield from heads.load(k, rows, group.b, group.keys, at, size)
            if t <= BANK:
                yield from heads.turn(rows, self.keys[self.turn][:, : count * wide], size, count)
                continue
            for g in range(count):
                yield from heads.turn(
                    rows[:, :, g * heads.h : (g + 1) * heads.h],
                    keys[:, g, at : at + whole_tiles(size)],
                    size, 1,
                )  # fmt: skip
        yield from heads.load(v, self.values[self.turn], group.b, group.keys, 0, t)

    def _some(self, group: Group, heads: range) -> Iterator[Instruction | Loop]:
        """The query heads that go together."""
        yield Loop(
            len(self.groups),
            lambda j: self._group(j, group, heads),
            lambda j: (self.groups[j][1], self.kernel.causal and j),
        )
        if not self.waits:
            yield from self._logarithms(self.heads.numbers(group, heads))

    def _logarithms(self, heads: range) -> Iterator[Instruction]:
        """lse of heads (numbered over all batch elements), whose columns are the first ones."""
        count = len(heads) * self.tall
        lse, sums = self.lse[:, :count], self.sums[:, :count]
        yield Activation(sums, sums, "log")
        yield TensorTensor(lse, sums, lse, "subtract")
        for first, some in tiles(0, len(heads), max(1, PE // self.tall)):
            own = heads[first : first + some]
            columns = self.lse[:, first * self.tall : (first + some) * self.tall]
            yield from self.heads.store_columns(self.kernel.targets[1], self.line, columns, own)

    def _units(self, start: int, count: int, group: Group, heads: range) -> list[_Unit]:
        units: list[_Unit] = []
        skipped = group.b * self.shapes.n + heads.start - self.context.part.start
        before = skipped * self.tall if self.waits else 0
        for c, n in enumerate(heads):
            key = n // self.shapes.repeat - group.keys.start
            for block in range(0, self.shapes.t, BANK):
                for i, (row, rows) in enumerate(tiles(start, start + count, PE)):
                    width = self.heads.seen(row, rows, block)
                    if width:
                        column = before + c * self.tall + row // PE
                        units.append(_Unit(c, key, i, row, rows, block, width, False, column))
        ends = {(unit.head, unit.tile): k for k, unit in enumerate(units)}
        for k in ends.values():
            units[k] = replace(units[k], last=True)
        return units

    def _group(self, j: int, group: Group, heads: range) -> Iterator[Instruction]:
        (start, count), own = self.groups[j], self.heads
        rows, together = self.query_rows[j % 2], len(heads)
        yield from own.load(own.rows(0), rows, group.b, heads, start, count)
        turned = self.queries[j % 2][:, : together * self.four * PE]
        yield from own.turn(rows, turned, count, together)
        units = self._units(start, count, group, heads)
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
        yield from own.store(own.result(0), self.out[j % 2], group.b, heads, start, count)

    # ---- the steps of a unit -----------------------------------------------------------------

    def _score(self, unit: _Unit, k: int, j: int) -> Instruction:
        h, at = self.heads.h, (unit.head * self.four + unit.tile) * PE
        query = self.queries[j % 2][:h, at : at + unit.rows]
        first = unit.key * whole_tiles(self.shapes.t) + unit.block
        key = self.keys[self.turn][:h, first : first + unit.width]
        return Matmul(self.scores[k % 3][: unit.rows, : unit.width], query, key)

    def _weigh(self, unit: _Unit, k: int, j: int) -> Iterator[Instruction]:
        """Maximum, exponentials and their sum, and alpha, by which earlier sums are scaled."""
        scores = self.scores[k % 3][: unit.rows, : unit.width]
        scale = self.kernel.scale
        if self.kernel.causal and unit.row + unit.rows - unit.block == unit.width:
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
        """Weights times values onto what was summed before; of a last block, what leaves."""
        product, turned, h = self.products[k % 2][: unit.rows], self.turned[k % 2], self.heads.h
        for i, (at, wide) in enumerate(tiles(0, unit.width, PE)):
            tile = (unit.block + at) // PE
            value = self.values[self.turn][:wide, tile, unit.key * h : (unit.key + 1) * h]
            yield Matmul(product, turned[:wide, i, : unit.rows], value, accumulate=i > 0)
        total = self.totals[j % 2][: unit.rows, unit.head * self.four + unit.tile]
        sums = self._column(self.sums, unit)
        if not unit.first:
            _, part, alpha = self._numbers(unit, j)
            yield ScalarTensorTensor(total, total, "multiply", alpha, "add", product)
            yield ScalarTensorTensor(sums, sums, "multiply", alpha, "add", part)
        elif not unit.last:
            yield Copy(total, product)
        if unit.last:
            done = self.out[j % 2][: unit.rows, unit.tile, unit.head * h : (unit.head + 1) * h]
            yield TensorScalar(done, product if unit.first else total, "divide", sums)
            yield Copy(self._column(self.lse, unit), self._top(unit, j, 0))

    # ---- numbers of a tile of queries ------------------------------------------------------------

    def _top(self, unit: _Unit, j: int, flip: int) -> View:
        """[rows, 1]: minus the scaled maximum so far, of this block or (flip) the one before."""
        turn, at = (unit.block // BANK + flip) % 2, unit.head * self.four + unit.tile
        return self.tops[j % 2][: unit.rows, turn, at : at + 1]

    def _numbers(self, unit: _Unit, j: int) -> tuple[View, View, View]:
        """[rows, 1] each: the block's maximum, its sum, and the scale of what was before.

        Those of three blocks are kept: they are used two units after they are found.
        """
        first, at = 3 * (unit.block // BANK % 3), unit.head * self.four + unit.tile
        tile: Tensor = self.numbers[j % 2]
        views = [tile[: unit.rows, first + i, at : at + 1] for i in range(3)]
        return views[0], views[1], views[2]

    def _column(self, tile: Tensor, unit: _Unit) -> View:
        """[rows, 1] of a [128, (head, tile of queries)] value."""
        return tile[: unit.rows, unit.column : unit.column + 1]
