"""The nest of the gradient of attention: blocks of 512 keys against tiles of 128 queries.

Probabilities are found again from the saved logarithms of the sums (Dao et al., arXiv:2205.14135,
algorithm 4). Of the heads that go together everything is held on chip: queries and incoming
gradients as rows and turned, the gradient of the queries in float32. The gradients of a block's
keys and values collect in PSUM over all tiles of queries. The steps of four units are under way at
a time, so that the engines, each in its order, do not wait for one another.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import Unsupported
from ..isa.base import Instruction
from ..isa.scalar import Activation
from ..isa.tensor import Matmul, Transpose
from ..isa.vector import Copy, ScalarTensorTensor, TensorReduce, TensorScalar, TensorTensor
from ..memory import Tensor, View
from .attention import AttentionKernel
from .attention_tiles import FOUR, Group, Heads, Rows, size_of, whole_tiles
from .matmul_sides import BANK, PE
from .nest import Context, Loop, once, tiles

ROOM = 120_000
"""Bytes per partition for heads; one head may take more."""

SPARE = 16 * 1024
"""Bytes per partition that the tiles of one unit take beside them."""


def nest(kernel: AttentionKernel, context: Context) -> Loop:
    """The loop over key heads, query heads and blocks of keys."""
    return once(_Backward(kernel, context).steps())


@dataclass(frozen=True, slots=True)
class _Unit:
    """One tile of queries from `row` on, of the `head`-th head that goes together, against the keys
    from `block` on of the `key`-th key head that is held. `last` of its head in this block."""

    head: int
    key: int
    row: int
    rows: int
    block: int
    width: int
    last: bool

    @property
    def cuts(self) -> list[tuple[int, int]]:
        """(first key in the block, keys) of each tile of keys."""
        return tiles(0, self.width, PE)

    @property
    def tile(self) -> int:
        """Number of the tile of queries."""
        return self.row // PE


class _Backward:
    def __init__(self, kernel: AttentionKernel, context: Context) -> None:
        self.kernel, self.context, self.shapes = kernel, context, kernel.shapes
        s, t, h, size = self.shapes.s, self.shapes.t, self.shapes.h, size_of(kernel)
        self.tall, self.key_tiles = -(-s // PE), -(-t // PE)
        key_bytes = (2 * whole_tiles(t) + self.key_tiles * h) * size
        head_bytes = (2 * whole_tiles(s) + 2 * self.tall * h) * size + self.tall * h * 4
        head_bytes += min(FOUR, self.tall) * 5 * h * size + 4 * h
        self._check_room(key_bytes + head_bytes)
        self.heads = Heads(kernel, context, key_bytes, head_bytes, ROOM, banks=1)
        self.blocks = tiles(0, t, BANK)
        self._allocate(context, self.heads.keys, self.heads.together)
        self.mask, self.made = self.heads.mask() if kernel.causal else (self.lse, [])

    def _allocate(self, c: Context, keys: int, heads: int) -> None:
        dtype, h, tall = self.heads.dtype, self.shapes.h, self.tall
        out = self.kernel.types[self.kernel.operations[0].results[0]].dtype
        wide, long = whole_tiles(self.shapes.t), whole_tiles(self.shapes.s)
        self.keys = c.tile(keys * wide, dtype, "keys turned")
        self.values = c.tile(keys * wide, dtype, "values turned")
        self.key_rows = c.tile((self.key_tiles, keys * h), dtype, "key rows")
        self.queries = c.tile(heads * long, dtype, "queries turned")
        self.douts = c.tile(heads * long, dtype, "dout turned")
        self.query_rows = c.tile((tall, heads * h), dtype, "query rows")
        self.dout_rows = c.tile((tall, heads * h), dtype, "dout rows")
        self.total = c.tile((heads * tall, h), "f32", "gradient of queries")
        four = min(FOUR, max(tall, self.key_tiles))
        self.spare = c.rotating((four, max(keys, heads) * h), dtype, "rows")
        self.products = c.tile(heads * h, "f32", "dout times out")
        self.part = c.tile(heads, "f32", "sums of products")
        self.lse = c.tile(heads * tall, "f32", "lse")
        self.delta = c.tile(heads * tall, "f32", "delta")
        self.lines = [c.tile(PE, "f32", f"line {i}") for i in range(2)]
        self.weights = c.rotating(BANK, dtype, "weights")
        self.inner = c.rotating(BANK, dtype, "gradient of scores")
        self.turned = c.rotating((FOUR, PE), dtype, "gradient of scores turned")
        self.out = {name: c.tile((four, heads * h), out, name) for name in ("dq", "dk", "dv")}
        self.scores = [c.bank(BANK, "f32", f"scores {i}") for i in range(2)]
        self.incoming = [c.bank(BANK, "f32", f"gradient of weights {i}") for i in range(2)]
        self.dq = c.bank(h, "f32", "dq")
        self.dk, self.dv = (c.bank(BANK, "f32", name) for name in ("dk", "dv"))

    def _check_room(self, held: int) -> None:
        room = self.context.chip.sbuf_partition_bytes
        if held + SPARE > room:
            raise Unsupported(
                f"attention_gradient ({self.kernel.location}): a head of {self.shapes.s} queries "
                f"and {self.shapes.t} keys takes {held} B of the {room} B per partition of SBUF; "
                "shard the sequence (cp)"
            )

    def steps(self) -> Iterator[Instruction | Loop]:
        """The whole nest."""
        yield from self.made
        yield self.heads.loop(self._keys, self._some)

    def _keys(self, i: int, group: Group) -> Iterator[Instruction]:
        heads, t, count = self.heads, self.shapes.t, len(group.keys)
        k, wide = heads.rows(1), whole_tiles(self.shapes.t)
        yield from heads.load(k, self.key_rows, group.b, group.keys, 0, t)
        yield from heads.turn(self.key_rows, self.keys[:, : count * wide], t, count)
        yield from self._through_spare(heads.rows(2), self.values, group)

    def _through_spare(self, source: Rows, turned: Tensor, group: Group) -> Iterator[Instruction]:
        """Turned rows of the key heads that are not needed as they are."""
        heads, t, count = self.heads, self.shapes.t, len(group.keys)
        wide = whole_tiles(t)
        for i, (at, size) in enumerate(tiles(0, t, BANK)):
            rows = self.spare[i % 2]
            yield from heads.load(source, rows, group.b, group.keys, at, size)
            if t <= BANK:
                yield from heads.turn(rows, turned[:, : count * wide], size, count)
                continue
            for g in range(count):
                own = rows[:, :, g * heads.h : (g + 1) * heads.h]
                place = turned[:, g * wide + at : g * wide + at + whole_tiles(size)]
                yield from heads.turn(own, place, size, 1)

    def _some(self, group: Group, heads: range) -> Iterator[Instruction | Loop]:
        """The query heads that go together."""
        own, s, count = self.heads, self.shapes.s, len(heads)
        for operand, rows, turned in (
            (0, self.query_rows, self.queries),
            (5, self.dout_rows, self.douts),
        ):
            yield from own.load(own.rows(operand), rows, group.b, heads, 0, s)
            yield from own.turn(rows, turned[:, : count * whole_tiles(s)], s, count)
        for operand, column, line in ((4, self.lse, self.lines[0]), (6, self.delta, self.lines[1])):
            value = self.kernel.sources[operand]
            numbers = own.numbers(group, heads)
            yield from own.load_columns(value, line, column[:], numbers, -1.0)
        yield from self._deltas(group, heads)
        yield Loop(
            len(self.blocks),
            lambda j: self._block(j, group, heads),
            lambda j: (self.blocks[j][1], j == 0, self.kernel.causal and j),
        )
        yield from self._store_queries(group, heads)

    def _deltas(self, group: Group, heads: range) -> Iterator[Instruction]:
        """delta[row] = sum of dout * out over the head, less dlse."""
        own, h, count = self.heads, self.shapes.h, len(heads)
        delta = self.delta[:, : count * self.tall].reshape(PE, count, self.tall)
        for i, (at, size) in enumerate(tiles(0, self.shapes.s, BANK)):
            out = self.spare[i % 2]
            yield from own.load(own.rows(3), out, group.b, heads, at, size)
            for row, rows in tiles(at, at + size, PE):
                tile, width = row // PE, slice(0, count * h)
                product, part = self.products[:rows, width], self.part[:rows, :count]
                dout = self.dout_rows[:rows, tile, width]
                yield TensorTensor(product, out[:rows, tile % FOUR, width], dout, "multiply")
                yield TensorReduce(part, product.reshape(rows, count, h), "add", axes=1)
                column = delta[:rows, :, tile]
                yield TensorTensor(column, column, part, "add")

    def _units(self, block: int, group: Group, heads: range) -> list[_Unit]:
        units = []
        for c, n in enumerate(heads):
            key = n // self.shapes.repeat - group.keys.start
            rows = [
                (row, count, self.heads.seen(row, count, block))
                for row, count in tiles(0, self.shapes.s, PE)
            ]
            seen = [entry for entry in rows if entry[2]]
            units += [
                _Unit(c, key, row, count, block, width, i == len(seen) - 1)
                for i, (row, count, width) in enumerate(seen)
            ]
        return units

    def _block(self, j: int, group: Group, heads: range) -> Iterator[Instruction]:
        block, width = self.blocks[j]
        units = self._units(block, group, heads)
        started: set[tuple[int, int]] = set()
        for k in range(-1, len(units) + 2):
            if k + 1 < len(units):
                yield from self._score(units[k + 1], k + 1)
            if 0 <= k < len(units):
                yield from self._weigh(units[k], k)
            if k >= 2 and units[k - 2].last:
                yield from self._leave(units[k - 2].head, width)
            if 0 <= k - 1 < len(units):
                yield from self._keys_and_values(units[k - 1], k - 1, started)
                yield from self._turn(units[k - 1], k - 1)
            if k >= 2:
                yield from self._queries(units[k - 2], k - 2)
        if units:
            yield from self._leave(units[-1].head, width)
        own = self.heads
        for result, name in ((1, "dk"), (2, "dv")):
            yield from own.store(own.result(result), self.out[name], group.b, heads, block, width)

    # ---- the steps of a unit -----------------------------------------------------------------

    def _score(self, unit: _Unit, k: int) -> Iterator[Instruction]:
        """Scores, and the gradient of the probabilities."""
        scores, incoming = (
            x[k % 2][: unit.rows, : unit.width] for x in (self.scores, self.incoming)
        )
        yield Matmul(scores, self._query(self.queries, unit), self._key(self.keys, unit))
        yield Matmul(incoming, self._query(self.douts, unit), self._key(self.values, unit))

    def _query(self, turned: Tensor, unit: _Unit) -> View:
        at = unit.head * whole_tiles(self.shapes.s) + unit.row
        return turned[: self.shapes.h, at : at + unit.rows]

    def _key(self, turned: Tensor, unit: _Unit) -> View:
        at = unit.key * whole_tiles(self.shapes.t) + unit.block
        return turned[: self.shapes.h, at : at + unit.width]

    def _weigh(self, unit: _Unit, k: int) -> Iterator[Instruction]:
        """Probabilities, and the gradient of the scores."""
        scores = self.scores[k % 2][: unit.rows, : unit.width]
        if self.kernel.causal and unit.row + unit.rows - unit.block == unit.width:
            corner = scores[:, unit.width - unit.rows :]
            yield TensorTensor(corner, corner, self.mask[: unit.rows, : unit.rows], "add")
        incoming = self.incoming[k % 2][: unit.rows, : unit.width]
        weights = self.weights[k % 2][: unit.rows, : unit.width]
        bias = self._column(self.lse, unit)
        yield Activation(weights, scores, "exponential", scale=self.kernel.scale, bias=bias)
        inner = self.inner[k % 2][: unit.rows, : unit.width]
        delta = self._column(self.delta, unit)
        yield ScalarTensorTensor(inner, incoming, "subtract", delta, "multiply", weights)

    def _column(self, tile: Tensor, unit: _Unit) -> View:
        at = unit.head * self.tall + unit.tile
        return tile[: unit.rows, at : at + 1]

    def _slot(self, head: int, i: int) -> slice:
        """Where in its bank the i-th tile of keys of a head collects: heads take turns."""
        h, count = self.shapes.h, min(FOUR, self.key_tiles)
        first = count * (head % 2) if 2 * count * h <= BANK else 0
        return slice((first + i) * h, (first + i + 1) * h)

    def _keys_and_values(
        self, unit: _Unit, k: int, started: set[tuple[int, int]]
    ) -> Iterator[Instruction]:
        h, rows = self.shapes.h, slice(0, unit.rows)
        width = slice(unit.head * h, (unit.head + 1) * h)
        for i, (at, wide) in enumerate(unit.cuts):
            for bank, left, right in (
                (self.dv, self.weights[k % 2], self.dout_rows),
                (self.dk, self.inner[k % 2], self.query_rows),
            ):
                yield Matmul(
                    bank[:wide, self._slot(unit.head, i)],
                    left[rows, at : at + wide],
                    right[rows, unit.tile, width],
                    accumulate=(unit.head, i) in started,
                )
            started.add((unit.head, i))

    def _turn(self, unit: _Unit, k: int) -> Iterator[Instruction]:
        spread = self.heads.turned[0].reshape(PE, FOUR, PE)
        turned, whole = self.turned[k % 2], unit.width // PE
        for i, (at, wide) in enumerate(unit.cuts):
            inner = self.inner[k % 2][: unit.rows, at : at + wide]
            yield Transpose(spread[:wide, i, : unit.rows], inner)
        if whole:
            place = turned[:, :whole, : unit.rows]
            yield Activation(place, spread[:, :whole, : unit.rows], "copy")
        if unit.width % PE:
            wide = unit.width % PE
            yield Copy(turned[:wide, whole, : unit.rows], spread[:wide, whole, : unit.rows])

    def _queries(self, unit: _Unit, k: int) -> Iterator[Instruction]:
        product, h = self.dq[: unit.rows], self.shapes.h
        for i, (at, wide) in enumerate(unit.cuts):
            tile = (unit.block + at) // PE
            rows = self.key_rows[:wide, tile, unit.key * h : (unit.key + 1) * h]
            turned = self.turned[k % 2][:wide, i, : unit.rows]
            yield Matmul(product, turned, rows, accumulate=i > 0)
        total = self.total[: unit.rows, unit.head * self.tall + unit.tile]
        if unit.block == 0:
            yield Copy(total, product)
        else:
            yield TensorTensor(total, total, product, "add")

    # ---- results -------------------------------------------------------------------------------

    def _leave(self, head: int, width: int) -> Iterator[Instruction]:
        """The gradients of a block's keys and values for one query head."""
        h, scale = self.shapes.h, self.kernel.scale
        for bank, factor, name in ((self.dv, 1.0, "dv"), (self.dk, scale, "dk")):
            for i, (_, wide) in enumerate(tiles(0, width, PE)):
                source = bank[:wide, self._slot(head, i)]
                place = self.out[name][:wide, i, head * h : (head + 1) * h]
                if name == "dv":
                    yield Activation(place, source, "copy", scale=factor)
                else:
                    yield TensorScalar(place, source, "multiply", factor)

    def _store_queries(self, group: Group, heads: range) -> Iterator[Instruction]:
        own, out, h = self.heads, self.out["dq"], self.shapes.h
        for at, size in tiles(0, self.shapes.s, BANK):
            for c in range(len(heads)):
                for i, (row, rows) in enumerate(tiles(at, at + size, PE)):
                    total = self.total[:rows, c * self.tall + row // PE]
                    place = out[:rows, i, c * h : (c + 1) * h]
                    yield TensorScalar(place, total, "multiply", self.kernel.scale)
            yield from own.store(own.result(0), out, group.b, heads, at, size)
