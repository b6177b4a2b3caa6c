"""How a rowwise kernel uses SBUF: the classes of its values, slots for tiles, column tiles.

Values are of four classes. Immediates are constants. Fixed values do not vary over rows, or repeat
every few tiles of rows: they are loaded or computed once. Row values have one element per row
([P, 1]), wide values one per point ([P, columns]). Wide values are cut into column tiles unless
full values depend on a reduction of their row.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..arithmetic import IDENTITY
from ..dtypes import numpy_dtype
from .ir import Operation
from .nest import itemsize
from .rowwise import RowwiseKernel
from .rowwise_program import ALIASES, Peephole

COLUMNS = 1024
FIXED_BYTES = 24_000
SET_BYTES = 72_000
TURNS = 4
"""Sets of tiles where there is room: two row tiles compute in turn while two others move."""

TURNS_BYTES = 112_000
WIDE, ROW, FIXED, IMMEDIATE = "wide", "row", "fixed", "immediate"


@dataclass(frozen=True, slots=True)
class Plan:
    """Operators as instructions take them, classes of the values, slots of the tiles, and the
    columns of a tile. `periods` has the tiles of fixed values that repeat over the rows, and all
    fixed values take `fixed_bytes` per partition."""

    operations: tuple[Operation, ...]
    kind: dict[int, str]
    root: dict[int, int]
    slot: dict[int, tuple[str, str, int]]
    slots: tuple[tuple[str, str, int], ...]
    columns: int
    periods: dict[int, int]
    fixed_bytes: int

    @property
    def set_bytes(self) -> int:
        """Bytes per partition of one set of moving tiles."""
        sizes = (
            itemsize(dtype) * (self.columns if kind == WIDE else 1) for kind, dtype, _ in self.slots
        )
        return sum(-(-size // 4) * 4 for size in sizes)

    def turns(self, room: int) -> int:
        """Sets of tiles that iterations take in turn, in `room` bytes per partition."""
        if TURNS * self.set_bytes <= TURNS_BYTES:
            return TURNS
        return 2 if 2 * self.set_bytes + self.fixed_bytes <= room else 1


def plan(kernel: RowwiseKernel) -> Plan:
    """The kernel's plan (kept with the kernel)."""
    known = kernel.__dict__.get("_plan")
    if known is None:
        known = kernel.__dict__["_plan"] = _make_plan(kernel)
    return known


def varies(kernel: RowwiseKernel, value: int) -> tuple[bool, bool]:
    flags = kernel.forms[value]
    rows = any(f for f, a in zip(flags[:-1], kernel.axes[:-1], strict=True) if a > 1)
    return rows, flags[-1] and kernel.columns > 1


def _period(kernel: RowwiseKernel, value: int) -> int:
    """Tiles of 128 rows after which a value that varies over inner row axes repeats; 0 if it
    does not, or not at whole tiles."""
    flags = [f or a == 1 for f, a in zip(kernel.forms[value][:-1], kernel.axes[:-1], strict=True)]
    lead = next((i for i, (f, a) in enumerate(zip(flags, kernel.axes, strict=False))
                 if f and a > 1), len(flags))  # fmt: skip
    if lead == 0 or not all(flags[lead:]) or kernel.rows < 256:
        return 0
    rows = math.prod(kernel.axes[lead:-1])
    return rows // 128 if rows % 128 == 0 and rows < kernel.rows else 0


def _classes(kernel: RowwiseKernel, hoist: bool) -> tuple[dict[int, str], dict[int, int]]:
    constants = {o.results[0] for o in kernel.operations if o.name == "constant"}
    kinds, periods = {}, {}
    for value in kernel.types:
        rows, columns = varies(kernel, value)
        period = _period(kernel, value) if hoist and rows and not kernel.total else 0
        width = kernel.columns if columns else 1
        if period * width * itemsize(kernel.types[value].dtype) > FIXED_BYTES // 2:
            period = 0
        if value in constants:
            kinds[value] = IMMEDIATE
        elif period:
            kinds[value], periods[value] = FIXED, period
        elif columns and (rows or not hoist or kernel.rows == 1):
            kinds[value] = WIDE
        elif rows:
            kinds[value] = ROW
        else:
            kinds[value] = FIXED
    reduced = [o.results[0] for o in kernel.operations if o.name == "reduce"]
    late = set(reduced)
    for operation in kernel.operations:
        if late.intersection(operation.operands):
            late.add(operation.results[0])
    for value in late & set(periods):
        del periods[value]
        kinds[value] = WIDE if varies(kernel, value)[1] else ROW
    _settle(kernel, kinds, periods)
    if kernel.rows == 1 and not kernel.total:
        _demote(kernel, kinds, set(reduced))
    return kinds, periods


def _settle(kernel: RowwiseKernel, kinds: dict[int, str], periods: dict[int, int]) -> None:
    """A value is fixed only if what it is computed from is."""
    for operation in kernel.operations:
        result = operation.results[0]
        if result in periods and any(kinds[v] in (WIDE, ROW) for v in operation.operands):
            del periods[result]
            kinds[result] = WIDE if varies(kernel, result)[1] else ROW


def _demote(kernel: RowwiseKernel, kinds: dict[int, str], late: set[int]) -> None:
    """With a single row, what follows a reduction is a row value, not a fixed one."""
    for operation in kernel.operations:
        result = operation.results[0]
        if result in late or late.intersection(operation.operands):
            late.add(result)
            if kinds[result] == FIXED:
                kinds[result] = ROW


def _roots(kernel: RowwiseKernel) -> dict[int, int]:
    root = {v: v for v in kernel.types}
    for operation in kernel.operations:
        if operation.name in ALIASES:
            root[operation.results[0]] = root[operation.operands[0]]
    return root


def _make_plan(kernel: RowwiseKernel) -> Plan:
    root = _roots(kernel)
    kinds, periods = _classes(kernel, hoist=True)
    fixed = _fixed_bytes(kernel, kinds, root, periods)
    if fixed > FIXED_BYTES:
        kinds, periods = _classes(kernel, hoist=False)
        fixed = _fixed_bytes(kernel, kinds, root, periods)
    for value, source in root.items():
        kinds[value] = kinds[source]
        if source in periods:
            periods[value] = periods[source]
    wide = {v for v, kind in kinds.items() if kind == WIDE}
    narrow = {v for v, k in kinds.items() if k != WIDE and not varies(kernel, root[v])[1]}
    operations = Peephole(kernel.operations, kernel.types, root, wide, narrow, kernel.outputs).run()
    slot, slots = _allocate(kernel, operations, kinds, root)
    width = sum(itemsize(dtype) for kind, dtype, _ in slots if kind == WIDE)
    columns = kernel.columns
    if not kernel.resident:
        columns = min(columns, COLUMNS, max(64, SET_BYTES // max(width, 1)))
        columns = -(-kernel.columns // -(-kernel.columns // columns))
    return Plan(operations, kinds, root, slot, slots, columns, periods, fixed)


def _fixed_bytes(
    kernel: RowwiseKernel, kinds: dict[int, str], root: dict[int, int], periods: dict[int, int]
) -> int:
    total = 0
    for value in {root[v] for v, kind in kinds.items() if kind == FIXED}:
        width = kernel.columns if varies(kernel, value)[1] else 1
        size = width * itemsize(kernel.types[value].dtype) * periods.get(value, 1)
        total += -(-size // 4) * 4
    return total


def _allocate(
    kernel: RowwiseKernel,
    operations: Sequence[Operation],
    kinds: dict[int, str],
    root: dict[int, int],
) -> tuple[dict[int, tuple[str, str, int]], tuple[tuple[str, str, int], ...]]:
    """Slots for loop values: a slot is taken again after its value's last use."""
    last: dict[int, int] = {}
    for i, operation in enumerate(operations):
        for value in operation.operands:
            last[root[value]] = i
    end = len(operations)
    for value in kernel.outputs:
        last[root[value]] = max(last.get(root[value], 0), _position(operations, root[value]))
    slot: dict[int, tuple[str, str, int]] = {}
    free: dict[tuple[str, str], list[int]] = {}
    counts: dict[tuple[str, str], int] = {}

    def take(value: int) -> None:
        key = (kinds[value], kernel.types[value].dtype)
        spare = free.setdefault(key, [])
        if spare:
            number = spare.pop(0)
        else:
            number = counts.get(key, 0)
            counts[key] = number + 1
        slot[value] = (*key, number)

    for value in kernel.inputs:
        if kinds[value] in (WIDE, ROW):
            take(value)
    for i, operation in enumerate(operations):
        result = operation.results[0]
        if root[result] == result and kinds[result] in (WIDE, ROW):
            take(result)
        ended = {root[v] for v in (*operation.operands, result)}
        for value in ended:
            if value in slot and last.get(value, end) == i and kinds[value] == WIDE:
                kind, dtype, number = slot[value]
                free[kind, dtype].append(number)
    slots = tuple((*key, n) for key, count in counts.items() for n in range(count))
    return slot, slots


def _position(operations: Sequence[Operation], value: int) -> int:
    return next((i for i, o in enumerate(operations) if value in o.results), 0)


def row_numbers(kernel: RowwiseKernel, value: int, start: int, stop: int) -> np.ndarray:
    """Which row of the value's own [rows, width] array each row of the kernel reads."""
    numbers, rest, scale = np.zeros(stop - start, np.int64), np.arange(start, stop), 1
    for extent, varies in zip(
        reversed(kernel.axes[:-1]), reversed(kernel.extents[value][:-1]), strict=True
    ):
        if varies:
            numbers += rest % extent * scale
            scale *= extent
        rest = rest // extent
    return numbers


def wide_dtype(dtype: str) -> str:
    """The dtype in which a reduction accumulates."""
    return "f32" if dtype.startswith(("f", "bf")) else dtype


def identity(reduction: str, dtype: str) -> float | int:
    """The value that a reduction starts from, as a Python number."""
    return IDENTITY[reduction](numpy_dtype(dtype)).item()
