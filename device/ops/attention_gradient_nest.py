"""The nest of the gradient of attention: blocks of 512 keys against tiles of 128 queries.

Probabilities are found again from the saved logarithms of the sums (Dao et al., arXiv:2205.14135,
algorithm 4). Of a query head everything is held on chip: queries and incoming gradients as rows and
turned, the gradient of the queries in float32. The gradients of a block's keys and values collect
in PSUM over all tiles of queries. Scores of the next unit are computed while this one's leave.
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
from .attention_tiles import FOUR, Heads, Rows
from .matmul_sides import BANK, PE
from .nest import Context, Loop, itemsize, once, tiles


def nest(kernel: AttentionKernel, context: Context) -> Loop:
    """The loop over key heads, query heads and blocks of keys."""
    return once(_Backward(kernel, context).steps())


@dataclass(frozen=True, slots=True)
class _Unit:
    """One tile of queries from `row` on against the keys from `block` on."""

    row: int
    rows: int
    block: int
    width: int

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
        s, t, h = self.shapes.s, self.shapes.t, self.shapes.h
        self._check_room(s, t, h)
        self.heads = heads = Heads(kernel, context)
        self.blocks = tiles(0, t, BANK)
        self._allocate(context, heads.dtype, -(-s // PE), -(-t // PE))
        self.mask, self.made = heads.mask() if kernel.causal else (self.line, [])

    def _allocate(self, c: Context, dtype: str, queries: int, keys: int) -> None:
        s, t, h = self.shapes.s, self.shapes.t, self.shapes.h
        out = self.kernel.types[self.kernel.operations[0].results[0]].dtype
        self.keys = c.tile(t, dtype, "keys turned")
        self.values = c.tile(t, dtype, "values turned")
        self.key_rows = c.tile((keys, h), dtype, "key rows")
        self.queries, self.douts = (
            c.tile(s, dtype, "queries turned"),
            c.tile(s, dtype, "dout turned"),
        )
        self.query_rows = c.tile((queries, h), dtype, "query rows")
        self.dout_rows = c.tile((queries, h), dtype, "dout rows")
        self.total = c.tile((queries, h), "f32", "gradient of queries")
        self.spare = c.rotating((FOUR, h), dtype, "rows")
        self.products = c.tile(h, "f32", "dout times out")
        self.lse, self.delta = c.tile(queries, "f32", "lse"), c.tile(queries, "f32", "delta")
        self.line = c.tile(PE, "f32", "line")
        self.weights = c.rotating(BANK, dtype, "weights")
        self.inner = c.rotating(BANK, dtype, "gradient of scores")
        self.turned = c.tile((FOUR, PE), dtype, "gradient of scores turned")
        self.out = {name: c.tile((FOUR, h), out, name) for name in ("dq", "dk", "dv")}
        self.scores = [c.bank(BANK, "f32", f"scores {i}") for i in range(2)]
        self.incoming = c.bank(BANK, "f32", "gradient of weights")
        self.dq = c.bank(h, "f32", "dq")
        self.dk, self.dv = (c.bank(FOUR * h, "f32", name) for name in ("dk", "dv"))

    def _check_room(self, s: int, t: int, h: int) -> None:
        size = itemsize(self.kernel.operand_type(0).dtype)
        held = size * (2 * t + 2 * s) + (-(-t // PE) + 2 * -(-s // PE)) * h * size
        held += -(-s // PE) * h * 4
        room = self.context.chip.sbuf_partition_bytes
        if held + 16 * 1024 > room:
            raise Unsupported(
                f"attention_gradient ({self.kernel.location}): a head of {s} queries and {t} keys "
                f"takes {held} B of the {room} B per partition of SBUF; shard the sequence (cp)"
            )

    def steps(self) -> Iterator[Instruction | Loop]:
        """The whole nest."""
        yield from self.made
        yield self.heads.loop(self._keys, self._head)

    def _keys(self, b: int, g: int) -> Iterator[Instruction]:
        k, v, t = self.heads.rows(1), self.heads.rows(2), self.shapes.t
        yield from self.heads.load(k, self.key_rows, b, g, 0, t)
        yield from self.heads.turn(self.key_rows, self.keys[:], t)
        yield from self._through_spare(v, self.values, b, g, t)

    def _through_spare(
        self, source: Rows, turned: Tensor, b: int, head: int, count: int
    ) -> Iterator[Instruction]:
        """Turned rows that are not needed as they are."""
        for i, (at, size) in enumerate(tiles(0, count, BANK)):
            rows = self.spare[i % 2]
            yield from self.heads.load(source, rows, b, head, at, size)
            yield from self.heads.turn(rows, turned[:, at : at + size], size)

    def _head(self, i: int, b: int, n: int) -> Iterator[Instruction | Loop]:
        heads, s = self.heads, self.shapes.s
        for operand, rows, turned in (
            (0, self.query_rows, self.queries),
            (5, self.dout_rows, self.douts),
        ):
            yield from heads.load(heads.rows(operand), rows, b, n, 0, s)
            yield from heads.turn(rows, turned[:], s)
        sources = self.kernel.sources
        yield from heads.load_columns(sources[4], self.line, self.lse[:], b, n, -1.0)
        yield from heads.load_columns(sources[6], self.line, self.delta[:], b, n, -1.0)
        yield from self._deltas(b, n)
        yield Loop(
            len(self.blocks),
            lambda j: self._block(j, b, n),
            lambda j: (self.blocks[j][1], j == 0, self.kernel.causal and j),
        )
        yield from self._store_queries(b, n)

    def _deltas(self, b: int, n: int) -> Iterator[Instruction]:
        """delta[row] = sum of dout * out over the head, less dlse."""
        heads, s = self.heads, self.shapes.s
        for i, (at, size) in enumerate(tiles(0, s, BANK)):
            rows = self.spare[i % 2]
            yield from heads.load(heads.rows(3), rows, b, n, at, size)
            for row, count in tiles(at, at + size, PE):
                tile = row // PE
                product = self.products[:count]
                out, dout = rows[:count, tile % FOUR], self.dout_rows[:count, tile]
                yield TensorTensor(product, out, dout, "multiply")
                column = self.delta[:count, tile : tile + 1]
                whole = self.line[:count, :1]
                yield TensorReduce(whole, product, "add")
                yield TensorTensor(column, column, whole, "add")

    def _block(self, j: int, b: int, n: int) -> Iterator[Instruction]:
        block, width = self.blocks[j]
        units = []
        for row, rows in tiles(0, self.shapes.s, PE):
            seen = self.heads.seen(row, rows, block)
            if seen:
                units.append(_Unit(row, rows, block, seen))
        started: set[int] = set()
        for k in range(-1, len(units) + 1):
            if k + 1 < len(units):
                yield self._score(units[k + 1], k + 1)
            if 0 <= k < len(units):
                yield from self._weigh(units[k], k)
            if k - 1 >= 0:
                yield from self._queries(units[k - 1], k - 1)
            if 0 <= k < len(units):
                yield from self._keys_and_values(units[k], k, started)
                yield from self._turn(units[k], k)
        yield from self._leave(b, n, block, width)

    # ---- the steps of a unit -----------------------------------------------------------------

    def _score(self, unit: _Unit, k: int) -> Instruction:
        h = self.shapes.h
        query = self.queries[:h, unit.row : unit.row + unit.rows]
        key = self.keys[:h, unit.block : unit.block + unit.width]
        return Matmul(self.scores[k % 2][: unit.rows, : unit.width], query, key)

    def _weigh(self, unit: _Unit, k: int) -> Iterator[Instruction]:
        """Probabilities, and the gradient of the scores."""
        h = self.shapes.h
        scores = self.scores[k % 2][: unit.rows, : unit.width]
        if self.kernel.causal and unit.row + unit.rows - unit.block == unit.width:
            corner = scores[:, unit.width - unit.rows :]
            yield TensorTensor(corner, corner, self.mask[: unit.rows, : unit.rows], "add")
        incoming = self.incoming[: unit.rows, : unit.width]
        dout = self.douts[:h, unit.row : unit.row + unit.rows]
        value = self.values[:h, unit.block : unit.block + unit.width]
        yield Matmul(incoming, dout, value)
        weights = self.weights[k % 2][: unit.rows, : unit.width]
        bias = self._column(self.lse, unit)
        yield Activation(weights, scores, "exponential", scale=self.kernel.scale, bias=bias)
        inner = self.inner[k % 2][: unit.rows, : unit.width]
        delta = self._column(self.delta, unit)
        yield ScalarTensorTensor(inner, incoming, "subtract", delta, "multiply", weights)

    def _column(self, tile: Tensor, unit: _Unit) -> View:
        return tile[: unit.rows, unit.tile : unit.tile + 1]

    def _keys_and_values(self, unit: _Unit, k: int, started: set[int]) -> Iterator[Instruction]:
        h = self.shapes.h
        rows = slice(0, unit.rows)
        for i, (at, wide) in enumerate(unit.cuts):
            for bank, left, right in (
                (self.dv, self.weights[k % 2], self.dout_rows),
                (self.dk, self.inner[k % 2], self.query_rows),
            ):
                yield Matmul(
                    bank[:wide, i * h : (i + 1) * h],
                    left[rows, at : at + wide],
                    right[rows, unit.tile],
                    accumulate=i in started,
                )
            started.add(i)

    def _turn(self, unit: _Unit, k: int) -> Iterator[Instruction]:
        spread = self.heads.turned[k % 2].reshape(PE, FOUR, PE)
        for i, (at, wide) in enumerate(unit.cuts):
            inner = self.inner[k % 2][: unit.rows, at : at + wide]
            yield Transpose(spread[:wide, i, : unit.rows], inner)
        whole = unit.width // PE
        if whole:
            turned = self.turned[:, :whole, : unit.rows]
            yield Activation(turned, spread[:, :whole, : unit.rows], "copy")
        if unit.width % PE:
            wide = unit.width % PE
            yield Copy(self.turned[:wide, whole, : unit.rows], spread[:wide, whole, : unit.rows])

    def _queries(self, unit: _Unit, k: int) -> Iterator[Instruction]:
        product, cuts = self.dq[: unit.rows], unit.cuts
        for i, (at, wide) in enumerate(cuts):
            rows = self.key_rows[:wide, (unit.block + at) // PE]
            yield Matmul(product, self.turned[:wide, i, : unit.rows], rows, accumulate=i > 0)
        total = self.total[: unit.rows, unit.tile]
        if unit.block == 0:
            yield Copy(total, product)
        else:
            yield TensorTensor(total, total, product, "add")

    # ---- results -------------------------------------------------------------------------------

    def _leave(self, b: int, n: int, block: int, width: int) -> Iterator[Instruction]:
        h = self.shapes.h
        for name, bank, factor, result in (
            ("dv", self.dv, 1.0, 2),
            ("dk", self.dk, self.kernel.scale, 1),
        ):
            out = self.out[name]
            for i, (_, wide) in enumerate(tiles(0, width, PE)):
                source = bank[:wide, i * h : (i + 1) * h]
                yield Activation(out[:wide, i], source, "copy", scale=factor)
            yield from self.heads.store(self.heads.result(result), out, b, n, block, width)

    def _store_queries(self, b: int, n: int) -> Iterator[Instruction]:
        out, scale = self.out["dq"], self.kernel.scale
        for at, size in tiles(0, self.shapes.s, BANK):
            for i, (row, rows) in enumerate(tiles(at, at + size, PE)):
                total = self.total[:rows, row // PE]
                yield TensorScalar(out[:rows, i], total, "multiply", scale)
            yield from self.heads.store(self.heads.result(0), out, b, n, at, size)
