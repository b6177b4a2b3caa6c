"""What the nests of attention and its gradient share: heads in SBUF, as rows and transposed.

Rows lie 128 to a tile on partitions; a transposed head has its h elements on partitions. One DMA
fetches four tiles of rows.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ..isa.base import Instruction
from ..isa.dma import DmaCopy
from ..isa.gpsimd import Iota
from ..isa.scalar import Activation
from ..isa.tensor import Transpose
from ..isa.vector import Copy, Memset, TensorScalar
from ..memory import Tensor, View
from .attention import AttentionKernel
from .matmul_sides import BANK, PE
from .nest import Context, Loop, tiles

MASKED = -1e30
"""Added to scores of keys that a query may not see; its exponential is zero."""

FOUR = BANK // PE


@dataclass(frozen=True, slots=True)
class Rows:
    """A value [b, rows, heads, h] in HBM."""

    value: int
    rows: int
    heads: int
    h: int

    def view(self, context: Context, b: int, head: int, start: int, count: int) -> View:
        """Rows of one head: [128, tiles, h] of whole tiles, [count, h] of a last one."""
        step = self.heads * self.h
        offset = (b * self.rows + start) * step + head * self.h
        if count <= PE:
            return context.hbm(self.value, (count, self.h), (step, 1), offset)
        shape = (PE, count // PE, self.h)
        return context.hbm(self.value, shape, (step, PE * step, 1), offset)


class Heads:
    """Loads and stores of heads; `kernel`, `context` and sizes for the two nests."""

    def __init__(self, kernel: AttentionKernel, context: Context) -> None:
        self.kernel, self.context, self.shapes = kernel, context, kernel.shapes
        self.h, self.dtype = self.shapes.h, kernel.operand_type(0).dtype
        kind = "f32" if context.chip.generation < 3 else self.dtype
        self.turned = [context.bank(BANK, kind, f"turned {i}") for i in range(2)]
        units = list(kernel.heads(context.part))
        self.groups: list[list[tuple[int, int]]] = []
        for b, n in units:
            last = self.groups[-1][-1] if self.groups else None
            if last is not None and self._key_head(*last) == self._key_head(b, n):
                self.groups[-1].append((b, n))
            else:
                self.groups.append([(b, n)])

    def _key_head(self, b: int, n: int) -> tuple[int, int]:
        return b, n // self.shapes.repeat

    def loop(
        self,
        shared: Callable[[int, int], Iterable[Instruction | Loop]],
        head: Callable[[int, int, int], Iterable[Instruction | Loop]],
    ) -> Loop:
        """For each key head `shared(b, key head)`, then `head(i, b, n)` of its query heads."""

        def group(i: int) -> Iterator[Instruction | Loop]:
            members = self.groups[i]
            yield from shared(*self._key_head(*members[0]))
            yield Loop(len(members), lambda j: head(j, *members[j]))

        return Loop(len(self.groups), group, lambda i: len(self.groups[i]))

    def rows(self, operand: int) -> Rows:
        """An operand of shape [b, rows, heads, h]."""
        _, rows, heads, h = self.kernel.operand_type(operand).shape
        return Rows(self.kernel.sources[operand], rows, heads, h)

    def result(self, result: int) -> Rows:
        """A result of shape [b, rows, heads, h]."""
        _, rows, heads, h = self.kernel.types[self.kernel.operations[0].results[result]].shape
        return Rows(self.kernel.targets[result], rows, heads, h)

    # ---- rows --------------------------------------------------------------------------------

    def load(
        self, source: Rows, dst: Tensor | View, b: int, head: int, start: int, count: int
    ) -> Iterator[DmaCopy]:
        """dst[p, tile, :] from rows `start` on; a last tile that is not whole apart."""
        for at, size, tile in _pieces(count):
            place = dst[:PE, tile : tile + size // PE] if size % PE == 0 else dst[:size, tile]
            view = source.view(self.context, b, head, start + at, size)
            yield DmaCopy(place.reshape(*view.shape), view)

    def store(
        self, target: Rows, src: Tensor | View, b: int, head: int, start: int, count: int
    ) -> Iterator[DmaCopy]:
        """The reverse of `load`."""
        for at, size, tile in _pieces(count):
            place = src[:PE, tile : tile + size // PE] if size % PE == 0 else src[:size, tile]
            view = target.view(self.context, b, head, start + at, size)
            yield DmaCopy(view, place.reshape(*view.shape))

    def turn(self, src: Tensor | View, dst: View, count: int) -> Iterator[Instruction]:
        """src[p, tile, h] to dst[h, row], four tiles at a time."""
        for q, (at, size) in enumerate(tiles(0, count, BANK)):
            bank = self.turned[q % 2]
            for i, (row, wide) in enumerate(tiles(at, at + size, PE)):
                yield Transpose(bank[: self.h, i * PE : i * PE + wide], src[:wide, row // PE])
            yield evacuate(q, dst[: self.h, at : at + size], bank[: self.h, :size])

    # ---- one number for each row ---------------------------------------------------------------

    def load_columns(
        self, value: int, line: Tensor, dst: View, b: int, n: int, factor: float
    ) -> Iterator[Instruction]:
        """dst[p, tile] = factor * value[b, n, row] for float32 values, through `line` [tile, p]."""
        s, whole = self.shapes.s, self.shapes.s // PE
        start, count = (b * self.shapes.n + n) * s, -(-s // PE)
        if s % PE:
            yield Memset(line[:count], 0.0)
            rest = self.context.hbm(value, (1, s % PE), (PE, 1), start + whole * PE)
            yield DmaCopy(line[whole : whole + 1, : s % PE], rest)
        if whole:
            yield DmaCopy(line[:whole], self.context.hbm(value, (whole, PE), (PE, 1), start))
        bank = self.columns[:PE, :count]
        yield Transpose(bank, line[:count])
        yield TensorScalar(dst[:, :count], bank, "multiply", factor)

    def store_columns(
        self, value: int, line: Tensor, src: View, b: int, n: int
    ) -> Iterator[Instruction]:
        """The reverse of `load_columns`, as it is."""
        s, whole = self.shapes.s, self.shapes.s // PE
        start, count = (b * self.shapes.n + n) * s, -(-s // PE)
        bank = self.columns[:count, :PE]
        yield Transpose(bank, src[:, :count])
        yield Copy(line[:count], bank)
        if whole:
            yield DmaCopy(self.context.hbm(value, (whole, PE), (PE, 1), start), line[:whole])
        if s % PE:
            rest = self.context.hbm(value, (1, s % PE), (PE, 1), start + whole * PE)
            yield DmaCopy(rest, line[whole : whole + 1, : s % PE])

    @property
    def columns(self) -> Tensor:
        """A float32 bank for the columns."""
        if not hasattr(self, "_columns"):
            same = self.turned[0].dtype == "f32"
            self._columns = self.turned[0] if same else self.context.bank(PE, "f32", "columns")
        return self._columns

    # ---- causality -----------------------------------------------------------------------------

    def mask(self) -> tuple[Tensor, list[Instruction]]:
        """[128, 128] float32: 0 where column <= row, MASKED elsewhere; and what makes it."""
        tile = self.context.tile(PE, "f32", "mask")
        return tile, [
            Iota(tile[:], (1,), channel=-1),
            TensorScalar(tile[:], tile[:], "greater", 0.0, "multiply", MASKED),
        ]

    def seen(self, row: int, rows: int, block: int) -> int:
        """Keys of the block from `block` on that rows `row` to `row + rows` may see."""
        last = min(block + BANK, self.shapes.t)
        return max(0, min(last, row + rows) - block) if self.kernel.causal else last - block


def _pieces(count: int) -> Iterator[tuple[int, int, int]]:
    """(first row, rows, first tile) of each DMA: up to four whole tiles, then the rest."""
    whole = count // PE * PE
    for at, size in tiles(0, whole, BANK):
        yield at, size, at // PE
    if count % PE:
        yield whole, count - whole, whole // PE


def evacuate(turn: int, dst: View, bank: View) -> Instruction:
    """A copy out of PSUM, by Vector and Scalar in turn."""
    return Copy(dst, bank) if turn % 2 == 0 else Activation(dst, bank, "copy")
