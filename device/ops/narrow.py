"""64-bit index arithmetic in 32 bits where every value provably fits: engines have no 64-bit types.

JAX numbers the elements of a random array in ui64, as iota times a constant plus iota.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from .ir import Operation, TensorType

WIDE = {"ui64": "ui32", "i64": "i32"}
LIMIT = {"ui64": 2**32 - 1, "i64": 2**31 - 1}


def _bound(
    operation: Operation, types: Mapping[int, TensorType], bounds: Mapping[int, int]
) -> int | None:
    """The largest value of a non-negative result; None if it is not known."""
    kind = types[operation.results[0]]
    if operation.name == "constant":
        value = int(operation.attributes["value"])
        return value if value >= 0 else None
    if operation.name == "iota":
        return kind.size - 1
    known = [bounds.get(v) for v in operation.operands]
    a = known[0] if known else None
    b = known[1] if len(known) > 1 else None
    if a is None:
        return None
    match operation.name:
        case "broadcast_in_dim" | "copy" | "convert" | "shift_right_logical":
            return a
        case "add":
            return None if b is None else a + b
        case "multiply":
            return None if b is None else a * b
        case "remainder" | "divide" | "maximum":
            return None if b is None else max(a, b)
    return None


def narrowed(
    operations: Sequence[Operation], types: dict[int, TensorType], visible: Collection[int]
) -> tuple[tuple[Operation, ...], dict[int, TensorType]]:
    """Operators and types with 64-bit integers as 32-bit ones, if all of them fit and none is
    visible outside the kernel; otherwise unchanged."""
    wide = {v for v, t in types.items() if t.dtype in WIDE}
    if not wide or wide & set(visible):
        return tuple(operations), types
    bounds: dict[int, int] = {}
    for operation in operations:
        result = operation.results[0]
        bound = _bound(operation, types, bounds)
        if bound is not None:
            bounds[result] = bound
        if result in wide and (bound is None or bound > LIMIT[types[result].dtype]):
            return tuple(operations), types
    changed = {v: TensorType(t.shape, WIDE[t.dtype]) if v in wide else t for v, t in types.items()}
    return tuple(_narrow(o, changed) if o.results[0] in wide else o for o in operations), changed


def _narrow(operation: Operation, types: Mapping[int, TensorType]) -> Operation:
    if operation.name != "constant":
        return operation
    value = np.asarray(operation.attributes["value"]).astype(types[operation.results[0]].numpy)
    return replace(operation, attributes={"value": value})
