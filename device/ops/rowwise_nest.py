"""The nest of a rowwise kernel: tiles of 128 rows, loads, engine instructions, stores.

Fixed values come first (prologue); then the loop over tiles of rows, two of which compute in turn;
then what follows total reductions. See `rowwise_plan` for classes and column tiles.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import zip_longest

import numpy as np

from ..isa.base import Instruction
from ..isa.dma import DmaCopy, DmaGather, DmaScatter
from ..isa.gpsimd import PartitionReduce
from ..isa.vector import Copy, Memset, TensorReduce, TensorTensor
from ..memory import Tensor, View
from .engines import Value, elementwise, iota
from .ir import Operation
from .nest import Context, Loop, once, strided, tiles
from .rowwise import RowwiseKernel
from .rowwise_plan import (
    FIXED,
    IMMEDIATE,
    ROW,
    WIDE,
    identity,
    plan,
    row_numbers,
    varies,
    wide_dtype,
)


def nest(kernel: RowwiseKernel, context: Context) -> Loop:
    """Prologue (fixed values), the loop over row tiles, and the end of total reductions."""
    return once(_Lowering(kernel, context).steps())


class _Lowering:
    """Instructions of one kernel on one core."""

    def __init__(self, kernel: RowwiseKernel, context: Context) -> None:
        self.kernel, self.context, self.plan = kernel, context, plan(kernel)
        self.constants = {
            o.results[0]: o.attributes["value"].reshape(())
            for o in kernel.operations
            if o.name == "constant"
        }
        self.turns = self.plan.turns(context.chip.sbuf_partition_bytes)
        self.together = max(1, self.turns // 2)
        self.fixed: dict[int, Tensor] = {}
        self.slots = {
            s: [
                context.tile(self.plan.columns if s[0] == WIDE else 1, s[1], f"{s[0]}{s[2]}.{i}")
                for i in range(self.turns)
            ]
            for s in self.plan.slots
        }
        self.tiles = tiles(context.part.start, context.part.stop, 128)
        self.strips = tiles(0, kernel.columns, self.plan.columns)
        self.accumulators: dict[int, Tensor] = {}
        self.spares: dict[tuple[str, int, int], Tensor] = {}
        self._sort()

    def _sort(self) -> None:
        """Operators by phase: fixed; row values first; wide; row values of reductions; total."""
        kinds, root = self.plan.kind, self.plan.root
        late: set[int] = set()
        self.early: list[Operation] = []
        self.before: list[Operation] = []
        self.wide: list[Operation] = []
        self.after: list[Operation] = []
        self.tail: list[Operation] = []
        split = len(self.strips) > 1
        for operation in self.plan.operations:
            result = operation.results[0]
            if operation.name == "constant" or root[result] != result:
                if late.intersection(operation.operands):
                    late.add(result)
                continue
            depends = bool(late.intersection(operation.operands))
            if operation.name == "reduce" or depends:
                late.add(result)
            if self.kernel.total and depends:
                self.tail.append(operation)
            elif operation.name == "reduce":
                self.wide.append(operation)
            elif kinds[result] == FIXED and not depends:
                self.early.append(operation)
            elif not split or kinds[result] == WIDE:
                self.wide.append(operation)
            else:
                (self.after if depends else self.before).append(operation)
        self.summed = {} if split or self.kernel.total else self._sums()

    def _sums(self) -> dict[int, int]:
        """Activations whose instruction also sums their results: value to the sum's value."""
        types, root = self.kernel.types, self.plan.root
        functions = {o.results[0] for o in self.wide if o.name == "activate"}
        found: dict[int, int] = {}
        for operation in self.wide:
            if operation.name == "reduce" and operation.attributes["reduction"] == "add":
                source, result = root[operation.operands[0]], operation.results[0]
                exact = types[source].dtype == types[result].dtype == "f32"
                if exact and source in functions:
                    found.setdefault(source, result)
        return found

    def steps(self) -> Iterator[Instruction | Loop]:
        """The whole nest."""
        yield from self._prologue()
        once_only = any(not self._has_rows(v) for v in self.kernel.outputs)
        if len(self.strips) == 1:
            pair = self.together
            pairs = [self.tiles[i : i + pair] for i in range(0, len(self.tiles), pair)]
            yield Loop(
                len(pairs),
                lambda i: self._together(
                    [self._row_tile(i * pair + k) for k in range(len(pairs[i]))]
                ),
                lambda i: (i == 0 and once_only, *(rows for _, rows in pairs[i])),
            )
        else:
            yield Loop(
                len(self.tiles),
                self._tile,
                lambda t: (t == 0 and once_only, self.tiles[t][1]),
                rotation=self.turns,
            )
        if self.kernel.total:
            yield from self._finish()

    # ---- prologue ----

    def _prologue(self) -> Iterator[Instruction]:
        kernel = self.kernel
        for value in kernel.inputs:
            if self.plan.kind[value] == FIXED:
                yield self._load_fixed(value)
        for operation in self.early:
            result = operation.results[0]
            tile = self._fixed_tile(result)
            for block in range(tile.shape[1]):
                strip = (0, tile.shape[2])
                yield from self._operate(operation, tile[:, block, :], 128, 0, strip, 0, block)
        for operation in kernel.operations:
            if operation.name == "reduce":
                yield from self._start_accumulator(operation)
        for value in kernel.outputs:
            if not kernel.written(value, self.context.part):
                continue
            rows = self._has_rows(value)
            if self.plan.kind[value] in (FIXED, IMMEDIATE) and not rows and not self._late(value):
                yield from self._store_fixed(value)

    def _late(self, value: int) -> bool:
        root = self.plan.root[value]
        made = {o.results[0] for o in (*self.tail, *self.wide) if o.name == "reduce"}
        return root in made or any(root in o.results for o in self.tail)

    def _fixed_tile(self, value: int) -> Tensor:
        width = self.kernel.columns if varies(self.kernel, value)[1] else 1
        dtype = self.kernel.types[value].dtype
        shape = (self.plan.periods.get(value, 1), width)
        self.fixed[value] = self.context.tile(shape, dtype, f"fixed %{value}")
        return self.fixed[value]

    def _load_fixed(self, value: int) -> Instruction:
        tile = self._fixed_tile(value)
        _, blocks, width = tile.shape
        if value in self.plan.periods:
            source = self.context.hbm(value, tile.shape, (width, 128 * width, 1))
        else:
            source = self.context.hbm(value, (128, blocks, width), (0, 0, 1))
        return DmaCopy(tile[:], source)

    def _store_fixed(self, value: int) -> Iterator[Instruction]:
        """An output without row axes: [1, C] or [1, 1], from the first partition."""
        width = self.kernel.columns if self.kernel.extents[value][-1] else 1
        source = self._operand(value, 1, 0, (0, width), 0)
        view = yield from self._expanded(value, source, 1, width, 0)
        yield DmaCopy(self.context.hbm(value, (1, width), (width, 1)), view)

    def _start_accumulator(self, operation: Operation) -> Iterator[Instruction]:
        if not self.kernel.total and len(self.strips) == 1:
            return
        result = operation.results[0]
        dtype = wide_dtype(self.kernel.types[result].dtype)
        tile = self.accumulators[result] = self.context.tile(1, dtype, f"total %{result}")
        yield Memset(tile[:], identity(operation.attributes["reduction"], dtype))

    # ---- one tile of rows ----

    def _together(self, parts: list[Iterator[Instruction]]) -> Iterator[Instruction]:
        """Instructions of several tiles in turn: one computes while another waits for an engine."""
        for turn in zip_longest(*(list(part) for part in parts)):
            yield from (step for step in turn if step is not None)

    def _row_tile(self, t: int) -> Iterator[Instruction]:
        """A tile of rows in one strip."""
        yield from self._load_rows(t)
        yield from self._strip(t, 0, t)

    def _load_rows(self, t: int) -> Iterator[Instruction]:
        for value in self.kernel.inputs:
            if self.plan.kind[value] == ROW:
                yield from self._load(value, t, 0)

    def _tile(self, t: int) -> Iterator[Instruction | Loop]:
        """A tile of rows, strip by strip."""
        rows, count, pair = self.tiles[t][1], len(self.strips), self.together
        yield from self._load_rows(t)
        for operation in self.before:
            yield from self._compute(operation, t, 0, t)
        if not self.kernel.total:
            for result, tile in self.accumulators.items():
                yield Memset(tile[:rows], self._start_of(result))
        for c in range(0, count, pair):
            strips = range(c, min(c + pair, count))
            yield from self._together([self._strip(t, k, t * count + k) for k in strips])
        if not self.kernel.total:
            for operation in self.wide:
                if operation.name == "reduce":
                    yield from self._close(operation, t)
        for operation in self.after:
            yield from self._compute(operation, t, 0, t)
            yield from self._store_strips(operation.results[0], t)

    def _has_rows(self, value: int) -> bool:
        """Whether the value's array spans row axes."""
        flags, axes = self.kernel.extents[value][:-1], self.kernel.axes[:-1]
        return any(f and a > 1 for f, a in zip(flags, axes, strict=True))

    def _store_strips(self, root: int, t: int) -> Iterator[Instruction]:
        """Stores of a row value, which an output may repeat along the row."""
        for c in range(len(self.strips)):
            yield from self._stores(root, t, c, t * len(self.strips) + c)

    def _start_of(self, result: int) -> float | int:
        operation = next(o for o in self.wide if o.results[0] == result)
        return identity(operation.attributes["reduction"], self.accumulators[result].dtype)

    def _close(self, operation: Operation, t: int) -> Iterator[Instruction]:
        """Rounds a row's accumulated reduction to its dtype."""
        result, rows = operation.results[0], self.tiles[t][1]
        yield Copy(self._view(result, t, 0, t), self.accumulators[result][:rows])
        yield from self._store_strips(result, t)

    def _strip(self, t: int, c: int, turn: int) -> Iterator[Instruction]:
        """One column tile of one row tile; `turn` picks the set of wide tiles."""
        for value in self.kernel.inputs:
            if self.plan.kind[value] == WIDE:
                yield from self._load(value, t, c, turn)
                yield from self._stores(value, t, c, turn)
            elif self.plan.kind[value] == ROW:
                yield from self._stores(value, t, c, turn)
        for operation in self.before:
            yield from self._stores(operation.results[0], t, c, turn)
        for value in self.kernel.outputs:
            if self.plan.kind[value] in (FIXED, IMMEDIATE) and not self._late(value):
                yield from self._store_rows(value, t, c, turn)
        for operation in self.wide:
            yield from self._compute(operation, t, c, turn)
            if operation.name != "reduce" or len(self.strips) == 1:
                yield from self._stores(operation.results[0], t, c, turn)

    def _compute(self, operation: Operation, t: int, c: int, turn: int) -> Iterator[Instruction]:
        result, rows = operation.results[0], self.tiles[t][1]
        if operation.name == "reduce":
            yield from self._reduce(operation, t, c, turn)
            return
        dst = self._view(result, t, c, turn)
        yield from self._operate(operation, dst, rows, t, self.strips[c], turn)

    def _operate(
        self,
        operation: Operation,
        dst: View,
        rows: int,
        t: int,
        strip: tuple[int, int],
        turn: int,
        block: int | None = None,
    ) -> Iterator[Instruction]:
        """`block` is the tile of rows that fixed values are for, by default tile t's."""
        block = self.tiles[t][0] // 128 if block is None else block
        if operation.name == "iota":
            first = (
                self.tiles[t][0] if self.plan.kind[operation.results[0]] != FIXED else 128 * block
            )
            yield from self._iota(operation, dst, first, strip, turn)
            return
        operands = [self._operand(v, rows, t, strip, turn, block) for v in operation.operands]
        summed = self.summed.get(operation.results[0])
        if summed is not None:
            attributes = operation.attributes | {"reduce": self._view(summed, t, 0, turn)}
            operation = replace(operation, attributes=attributes)
        yield from elementwise(operation, dst, operands, self._spare(turn), self.context.chip)

    def _spare(self, turn: int) -> Callable[..., Tensor]:
        """`_scratch` for one of the tiles that compute together."""
        return lambda dtype, width, number=0: self._scratch(
            dtype, width, 2 * number + turn % self.together
        )

    def _scratch(self, dtype: str, width: int, number: int = 0) -> Tensor:
        """[128, width] for values between the instructions of one operator."""
        key = (dtype, width, number)
        if key not in self.spares:
            self.spares[key] = self.context.tile(width, dtype, "scratch")
        return self.spares[key]

    def _iota(
        self, operation: Operation, dst: View, first: int, strip: tuple[int, int], turn: int
    ) -> Iterator[Instruction]:
        flags = self.kernel.forms[operation.results[0]]
        axes = self.kernel.axes
        period = math.prod(a for f, a in zip(flags[:-1], axes[:-1], strict=True) if f)
        behind = 0
        for d in range(len(axes) - 1):
            if flags[d] and axes[d] > 1:
                behind = math.prod(axes[d + 1 : -1])
        column = 1 if flags[-1] else 0
        scale = axes[-1] if flags[-1] else 1
        start = first if behind else 0
        yield from iota(
            dst, start, max(behind, 1), period, scale, column, strip[0], self._spare(turn)
        )  # fmt: skip

    # ---- reductions ----

    def _reduce(self, operation: Operation, t: int, c: int, turn: int) -> Iterator[Instruction]:
        result, rows = operation.results[0], self.tiles[t][1]
        reduction, source = operation.attributes["reduction"], operation.operands[0]
        if result in self.summed.values():
            return
        width = self.strips[c][1]
        value = self._operand(source, rows, t, self.strips[c], turn)
        view = yield from self._expanded(source, value, rows, width, turn)
        accumulator = self.accumulators.get(result)
        if accumulator is None:
            yield TensorReduce(self._view(result, t, c, turn), view, reduction)
            return
        piece = self._spare(turn)(accumulator.dtype, 1)[:rows]
        yield TensorReduce(piece, view, reduction)
        total = accumulator[:rows]
        engine = "gpsimd" if accumulator.dtype in ("i32", "ui32") else "vector"
        yield TensorTensor(total, total, piece, reduction, engine=engine)

    def _finish(self) -> Iterator[Instruction]:
        """Joins the partitions of total reductions, then computes what follows on one element."""
        scalars: dict[int, View] = {}
        for operation in self.wide:
            if operation.name != "reduce":
                continue
            result = operation.results[0]
            wide = self.accumulators[result]
            single = self._scratch(wide.dtype, 1, 2 + len(scalars))[:1]
            yield PartitionReduce(single, wide[:], operation.attributes["reduction"])
            rounded = self.context.tile(1, self.kernel.types[result].dtype, f"%{result}")[:1]
            yield Copy(rounded, single)
            scalars[result] = rounded
        for operation in self.tail:
            result = operation.results[0]
            dst = self.context.tile(1, self.kernel.types[result].dtype, f"%{result}")[:1]
            operands = [self._scalar(v, scalars) for v in operation.operands]
            yield from elementwise(operation, dst, operands, self._scratch, self.context.chip)
            scalars[result] = dst
        for value in self.kernel.outputs:
            if self._late(value):
                view = scalars[self.plan.root[value]]
                yield DmaCopy(self.context.hbm(value, (1, 1), (1, 1)), view)

    def _scalar(self, value: int, scalars: dict[int, View]) -> Value:
        root = self.plan.root[value]
        return scalars[root] if root in scalars else self._operand(value, 1, 0, (0, 1), 0)

    # ---- where values are ----

    def _tile_of(self, root: int, turn: int) -> Tensor:
        return self.slots[self.plan.slot[root]][turn % self.turns]

    def _view(self, value: int, t: int, c: int, turn: int) -> View:
        """The value's tile for rows of tile t and columns of strip c."""
        root, rows = self.plan.root[value], self.tiles[t][1]
        held = self._held(value)
        if held is not None:
            start, width = self.strips[c]
            return held[:rows, t, start : start + width]
        if self.plan.kind[root] == ROW:
            return self._tile_of(root, t)[:rows]
        return self._tile_of(root, turn)[:rows, : self.strips[c][1]]

    def _held(self, value: int) -> Tensor | None:
        """The resident tensor that a value is computed into or read from."""
        root = self.plan.root[value]
        for v in (value, root):
            found = self.context.resident.get(v)
            if found is not None and self.plan.kind[root] == WIDE:
                return found[0]
        return None

    def _operand(
        self,
        value: int,
        rows: int,
        t: int,
        strip: tuple[int, int],
        turn: int,
        block: int | None = None,
    ) -> Value:
        """A view or a number."""
        root = self.plan.root[value]
        dtype = self.kernel.types[value].dtype
        if root in self.constants:
            constant = self.constants[root]
            same = dtype == self.kernel.types[root].dtype
            return constant if same else constant.view(self.kernel.types[value].numpy)
        if self.plan.kind[root] == FIXED:
            tile = self.fixed[root]
            block = self.tiles[t][0] // 128 if block is None else block
            at = block % tile.shape[1]
            columns = slice(None) if tile.shape[2] == 1 else slice(strip[0], sum(strip))
            view = tile[:rows, at, columns]
        elif self.plan.kind[root] == ROW:
            view = self._tile_of(root, t)[:rows]
        else:
            held = self._held(value)
            view = (
                self._tile_of(root, turn)[:rows, : strip[1]]
                if held is None
                else held[:rows, t, strip[0] : sum(strip)]
            )
        return view if view.dtype == dtype else view.bitcast(dtype)

    def _expanded(
        self, value: int, source: Value, rows: int, width: int, turn: int
    ) -> Iterator[Instruction]:
        """The operand as a full view: immediates and columns written out in a tile."""
        if isinstance(source, View) and source.shape == (rows, width):
            return source
        dtype = self.kernel.types[value].dtype
        tile = self._spare(turn)(dtype, width, 4)[:rows, :width]
        if isinstance(source, View):
            yield Copy(tile, source.broadcast(rows, width))
        else:
            yield Memset(tile, source.item() if isinstance(source, np.ndarray) else source)
        return tile

    # ---- loads and stores ----

    def _rows_of(self, value: int, t: int) -> tuple[int, int, int] | np.ndarray:
        """Where the tile's rows of a value lie: (first, step, number) or row numbers."""
        start, rows = self.tiles[t]
        numbers = row_numbers(self.kernel, value, start, start + rows)
        step = int(numbers[1] - numbers[0]) if rows > 1 else 1
        if rows == 1 or (np.diff(numbers) == step).all():
            if step >= 0:
                return int(numbers[0]), step, rows
        return numbers

    def _load(self, value: int, t: int, c: int, turn: int = 0) -> Iterator[Instruction]:
        if value in self.context.residency.inside:
            return
        root = self.plan.root[value]
        rows = self.tiles[t][1]
        wide = self.plan.kind[value] == WIDE
        start, width = self.strips[c] if wide else (0, 1)
        total = self.kernel.columns if self.kernel.extents[value][-1] else 1
        dst = self._tile_of(root, turn if wide else t)[:rows, :width]
        where = self._rows_of(value, t)
        if isinstance(where, tuple):
            first, step, _ = where
            source = self.context.hbm(
                value, (rows, width), (step * total, 1), first * total + start
            )
            yield DmaCopy(dst, source)
            return
        index = self.context.table(where.astype(np.int32), "rows")
        table = self.context.hbm(
            value, (self.kernel.types[value].size // total, width), (total, 1), start
        )
        yield DmaGather(dst, table, strided(index, (rows, 1), (1, 1)))

    def _stores(self, root: int, t: int, c: int, turn: int) -> Iterator[Instruction]:
        """Stores of every output that `root`'s tile holds."""
        for value in self.kernel.outputs:
            if self.plan.root[value] == root:
                yield from self._store_rows(value, t, c, turn)

    def _store_rows(self, value: int, t: int, c: int, turn: int) -> Iterator[Instruction]:
        kernel, rows = self.kernel, self.tiles[t][1]
        flags = kernel.extents[value]
        has_rows = self._has_rows(value)
        if kernel.total and self._late(value) or self.context.stays(value):
            return
        if not has_rows and self.plan.kind[value] in (FIXED, IMMEDIATE):
            return
        if not has_rows and kernel.rows > 1:
            if t > 0 or not kernel.written(value, self.context.part):
                return
            rows = 1
        start, width = self.strips[c] if flags[-1] else (0, 1)
        if not flags[-1] and c > 0:
            return
        total = kernel.columns if flags[-1] else 1
        source = self._operand(value, rows, t, (start, width), turn)
        view = yield from self._expanded(value, source, rows, width, turn)
        where = self._rows_of(value, t) if has_rows else (0, 1, 1)
        if isinstance(where, tuple) and (where[1] or rows == 1):
            first, step, _ = where
            target = self.context.hbm(
                value, (rows, width), (step * total, 1), first * total + start
            )
            yield DmaCopy(target, view)
            return
        numbers = row_numbers(kernel, value, self.tiles[t][0], sum(self.tiles[t]))
        index = self.context.table(numbers.astype(np.int32), "rows")
        table = self.context.hbm(
            value, (kernel.types[value].size // total, width), (total, 1), start
        )
        yield DmaScatter(table, view, strided(index, (rows, 1), (1, 1)))
