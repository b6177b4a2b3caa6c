"""What the nests of attention and its gradient share: heads in SBUF, as rows and turned.

Rows lie 128 to a tile on partitions; a turned head has its h elements on partitions. Heads that are
neighbours in HBM go together where they are small: one DMA fetches four tiles of rows of all of
them, since one of few bytes takes as long as one of many.
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
from .nest import Context, Loop, itemsize, tiles

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

    def view(self, context: Context, b: int, heads: range, start: int, count: int) -> View:
        """Rows of neighbouring heads: [128, tiles, heads * h] of whole tiles, [count, heads * h] of
        a last one."""
        step, width = self.heads * self.h, len(heads) * self.h
        offset = (b * self.rows + start) * step + heads.start * self.h
        if count <= PE:
            return context.hbm(self.value, (count, width), (step, 1), offset)
        shape = (PE, count // PE, width)
        return context.hbm(self.value, shape, (step, PE * step, 1), offset)


@dataclass(frozen=True, slots=True)
class Group:
    """Key heads that are held together, and the query heads of the part that read them."""

    b: int
    keys: range
    heads: range


class Heads:
    """Loads and stores of heads, and the loop over them. `key_bytes` and `head_bytes` are what one
    key head and one query head take per partition, of `room`; transposes go through `banks`."""

    def __init__(
        self,
        kernel: AttentionKernel,
        context: Context,
        key_bytes: int,
        head_bytes: int,
        room: int,
        banks: int = 2,
    ) -> None:
        self.kernel, self.context, self.shapes = kernel, context, kernel.shapes
        self.h, self.dtype = self.shapes.h, kernel.operand_type(0).dtype
        kind = "f32" if context.chip.generation < 3 else self.dtype
        self.turned = [context.bank(BANK, kind, f"turned {i}") for i in range(banks)]
        repeat, tall = self.shapes.repeat, -(-self.shapes.s // PE)
        most = max(1, room // 2 // (key_bytes + repeat * head_bytes))
        self.keys = -(-self.shapes.kv // -(-self.shapes.kv // most))
        most = max(1, min(room // 2 // head_bytes, PE // tall))
        self.together = -(-self.keys * repeat // -(-self.keys * repeat // most))
        self.groups = list(self._groups())

    def _groups(self) -> Iterator[Group]:
        """The part's heads, cut where the batch element or the held key heads change."""
        repeat, part = self.shapes.repeat, self.context.part
        for b in range(part.start // self.shapes.n, -(-part.stop // self.shapes.n)):
            first = max(part.start - b * self.shapes.n, 0)
            last = min(part.stop - b * self.shapes.n, self.shapes.n)
            for low, count in tiles(first // repeat, -(-last // repeat), self.keys):
                heads = range(max(first, low * repeat), min(last, (low + count) * repeat))
                yield Group(b, range(low, low + count), heads)

    def loop(
        self,
        shared: Callable[[int, Group], Iterable[Instruction | Loop]],
        some: Callable[[Group, range], Iterable[Instruction | Loop]],
    ) -> Loop:
        """For each group `shared(i, group)`, then `some(group, heads)` of those together."""

        def group(i: int) -> Iterator[Instruction | Loop]:
            found = self.groups[i]
            cuts = tiles(found.heads.start, found.heads.stop, self.together)
            yield from shared(i, found)
            yield Loop(
                len(cuts),
                lambda j: some(found, range(cuts[j][0], sum(cuts[j]))),
                lambda j: (cuts[j][1], (cuts[j][0] - found.heads.start) % self.shapes.repeat),
            )

        def alike(i: int) -> tuple[int, ...]:
            found = self.groups[i]
            skipped = found.heads.start - found.keys.start * self.shapes.repeat
            return len(found.keys), len(found.heads), skipped

        return Loop(len(self.groups), group, alike)

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
        self, source: Rows, dst: Tensor, b: int, heads: range, start: int, count: int
    ) -> Iterator[DmaCopy]:
        """dst[p, tile, :] from rows `start` on; a last tile that is not whole apart."""
        for view, place in self._pieces(source, dst, b, heads, start, count):
            yield DmaCopy(place, view)

    def store(
        self, target: Rows, src: Tensor, b: int, heads: range, start: int, count: int
    ) -> Iterator[DmaCopy]:
        """The reverse of `load`."""
        for view, place in self._pieces(target, src, b, heads, start, count):
            yield DmaCopy(view, place)

    def _pieces(
        self, rows: Rows, tile: Tensor, b: int, heads: range, start: int, count: int
    ) -> Iterator[tuple[View, View]]:
        """(in HBM, in SBUF) of each DMA: up to four whole tiles, then the rest."""
        whole, width = count // PE * PE, len(heads) * self.h
        for at, size in [*tiles(0, whole, BANK), *tiles(whole, count, PE)]:
            view, first = rows.view(self.context, b, heads, start + at, size), at // PE
            if size <= PE:
                yield view, tile[:size, first, :width]
            else:
                yield view, tile[:, first : first + size // PE, :width]

    def turn(self, src: View, dst: View, count: int, heads: int) -> Iterator[Instruction]:
        """src[p, tile, (head, h)] to dst[h, head, row], four tiles of 128 rows at a time.

        dst has room for whole tiles, so that those of neighbouring heads lie side by side.
        """
        tall, wide = -(-count // PE), dst.shape[1] // heads
        slots = [
            (c, tile, min(PE, count - tile * PE)) for c in range(heads) for tile in range(tall)
        ]
        dense = tall * PE == wide and count % PE == 0
        runs = tiles(0, len(slots), FOUR if dense else 1)
        for q, (first, some) in enumerate(runs):
            bank = self.turned[q % len(self.turned)]
            for i, (c, tile, count) in enumerate(slots[first : first + some]):
                source = src[:count, tile, c * self.h : (c + 1) * self.h]
                yield Transpose(bank[: self.h, i * PE : i * PE + count], source)
            c, tile, count = slots[first]
            place, size = c * wide + tile * PE, (some - 1) * PE + count
            yield evacuate(q, dst[: self.h, place : place + size], bank[: self.h, :size])

    # ---- one number for each row ---------------------------------------------------------------

    def load_columns(
        self, value: int, line: Tensor, dst: View, heads: range, factor: float
    ) -> Iterator[Instruction]:
        """dst[p, (head, tile)] = factor * value[head, row] for float32 values, through `line`
        [(head, tile), p]; heads are numbered over all batch elements."""
        count = len(heads) * -(-self.shapes.s // PE)
        if self.shapes.s % PE:
            yield Memset(line[:count], 0.0)
        for view, place in self._lines(value, line, heads):
            yield DmaCopy(place, view)
        bank = self.columns[:PE, :count]
        yield Transpose(bank, line[:count])
        yield TensorScalar(dst[:, :count], bank, "multiply", factor)

    def store_columns(
        self, value: int, line: Tensor, src: View, heads: range
    ) -> Iterator[Instruction]:
        """The reverse of `load_columns`, as it is."""
        count = len(heads) * -(-self.shapes.s // PE)
        bank = self.columns[:count, :PE]
        yield Transpose(bank, src[:, :count])
        yield Copy(line[:count], bank)
        for view, place in self._lines(value, line, heads):
            yield DmaCopy(view, place)

    def _lines(self, value: int, line: Tensor, heads: range) -> Iterator[tuple[View, View]]:
        """(in HBM, in SBUF) of each DMA of [b, n, s] float32: all heads at once of whole tiles."""
        s, rest = self.shapes.s, self.shapes.s % PE
        start, tall = heads.start * s, -(-s // PE)
        if not rest:
            count = len(heads) * tall
            yield self.context.hbm(value, (count, PE), (PE, 1), start), line[:count]
            return
        for c in range(len(heads)):
            at, whole = start + c * s, tall - 1
            if whole:
                view = self.context.hbm(value, (whole, PE), (PE, 1), at)
                yield view, line[c * tall : c * tall + whole]
            view = self.context.hbm(value, (1, rest), (PE, 1), at + whole * PE)
            yield view, line[c * tall + whole : (c + 1) * tall, :rest]

    def numbers(self, group: Group, heads: range) -> range:
        """Query heads of a group, numbered over all batch elements."""
        first = group.b * self.shapes.n
        return range(first + heads.start, first + heads.stop)

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


def evacuate(turn: int, dst: View, bank: View) -> Instruction:
    """A copy out of PSUM, by Vector and Scalar in turn."""
    return Copy(dst, bank) if turn % 2 == 0 else Activation(dst, bank, "copy")


def whole_tiles(count: int) -> int:
    """Rows up to the end of the last tile of 128."""
    return -(-count // PE) * PE


def size_of(kernel: AttentionKernel) -> int:
    """Bytes of an element of q, k and v."""
    return itemsize(kernel.operand_type(0).dtype)
