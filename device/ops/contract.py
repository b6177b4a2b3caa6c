"""Operators taken together with the contraction or scatter that they follow.

A transpose that exchanges the free axes of a dot_general is the dot_general of exchanged operands;
a conversion to float32 is its result before rounding (what XLA calls excess precision); adding a
scatter into zeros is a scatter into the other operand. Only where nobody else reads what vanishes.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..dtypes import is_float
from .ir import Block, Module, Operation, TensorType


def contract(module: Module) -> Module:
    """The same program with fewer operators around contractions, in all regions."""
    return replace(module, body=_block(module.body, module.types))


def _block(block: Block, types: Sequence[TensorType]) -> Block:
    uses = Counter(block.returns)
    for operation in block.walk():
        uses.update(operation.operands)
        for region in operation.regions:
            uses.update(region.returns)
    made: dict[int, Operation] = {}
    for operation in block.operations:
        regions = operation.regions
        if operation.name in ("while", "case", "if"):
            regions = tuple(_block(region, types) for region in regions)
        operation = replace(operation, regions=regions)
        found = _together(operation, made, uses, types)
        if found is not None:
            operation, gone = found
            del made[gone]
        made[operation.results[0] if operation.results else -1 - len(made)] = operation
    return replace(block, operations=tuple(made.values()))


def _together(
    operation: Operation, made: dict[int, Operation], uses: Counter, types: Sequence[TensorType]
) -> tuple[Operation, int] | None:
    """The operator and what it reads as one, and the value that vanishes."""
    for value in operation.operands:
        source = made.get(value)
        if source is None or uses[value] != 1 or len(source.results) != 1:
            continue
        whole = None
        if source.name == "dot_general" and operation.name == "transpose":
            whole = exchanged(source, operation, types)
        elif source.name == "dot_general" and operation.name == "convert":
            whole = _unrounded(source, operation, types)
        elif source.name == "scatter" and operation.name == "add":
            whole = _scattered(source, operation, value, made)
        if whole is not None:
            return whole, value
    return None


def exchanged(
    dot: Operation, transpose: Operation, types: Sequence[TensorType]
) -> Operation | None:
    """dot_general(b, a) for a transpose of dot_general(a, b) that puts b's free axes before a's."""
    a = dot.attributes
    batch = len(a["lhs_batch"])
    left, right = (
        len(types[value].shape) - batch - len(a[f"{side}_contracting"])
        for value, side in zip(dot.operands, ("lhs", "rhs"), strict=True)
    )
    order = (*range(batch), *range(batch + left, batch + left + right), *range(batch, batch + left))
    if tuple(transpose.attributes["permutation"]) != order:
        return None
    attributes = {
        **a,
        "lhs_batch": a["rhs_batch"],
        "rhs_batch": a["lhs_batch"],
        "lhs_contracting": a["rhs_contracting"],
        "rhs_contracting": a["lhs_contracting"],
    }
    return replace(
        dot, operands=dot.operands[::-1], results=transpose.results, attributes=attributes
    )


def _unrounded(dot: Operation, convert: Operation, types: Sequence[TensorType]) -> Operation | None:
    narrow, wide = types[dot.results[0]], types[convert.results[0]]
    if not is_float(narrow.dtype) or wide.dtype != "f32" or narrow.numpy.itemsize > 4:
        return None
    return replace(dot, results=convert.results)


def _scattered(
    scatter: Operation, add: Operation, value: int, made: dict[int, Operation]
) -> Operation | None:
    inner = scatter.regions[0].operations
    adds = len(inner) == 1 and inner[0].name == "add"
    other = [v for v in add.operands if v != value]
    if not adds or len(other) != 1 or not _is_zero(scatter.operands[0], made):
        return None
    return replace(scatter, operands=(other[0], *scatter.operands[1:]), results=add.results)


def _is_zero(value: int, made: dict[int, Operation]) -> bool:
    source = made.get(value)
    while source is not None and source.name in ("broadcast_in_dim", "reshape"):
        source = made.get(source.operands[0])
    return (
        source is not None
        and source.name == "constant"
        and not np.asarray(source.attributes["value"]).any()
    )
