"""Operators that only rename data, as reshapes: kernels see through those at no cost.

A reduction over axes of extent one, a broadcast that repeats nothing, a transpose that moves only
axes of extent one, a conversion to the same type, a slice or pad of everything. A broadcast iota is
an iota of the larger shape.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..arithmetic import IDENTITY
from .ir import Block, Module, Operation, TensorType


def simplify(module: Module) -> Module:
    """The same program with renaming operators as `reshape`, in all regions."""
    return replace(module, body=_block(module.body, module.types))


def _block(block: Block, types: Sequence[TensorType]) -> Block:
    constants: dict[int, np.ndarray] = {}
    iotas: dict[int, int] = {}
    operations = []
    for operation in block.operations:
        if operation.name == "constant":
            constants[operation.results[0]] = operation.attributes["value"]
        if operation.regions and operation.name in ("while", "case", "if"):
            regions = tuple(_block(region, types) for region in operation.regions)
            operation = replace(operation, regions=regions)
        operation = _wide_iota(operation, types, iotas)
        if _renames(operation, types, constants):
            operation = replace(
                operation, name="reshape", operands=operation.operands[:1], attributes={},
                regions=(),
            )  # fmt: skip
        operations.append(operation)
    return replace(block, operations=tuple(operations))


def _wide_iota(
    operation: Operation, types: Sequence[TensorType], iotas: dict[int, int]
) -> Operation:
    """`operation`, or an iota in place of the broadcast of one; keeps track of iotas' axes."""
    if operation.name == "broadcast_in_dim" and operation.operands[0] in iotas:
        axis = iotas[operation.operands[0]]
        target = operation.attributes["dimensions"][axis]
        result = types[operation.results[0]].shape
        if types[operation.operands[0]].shape[axis] == result[target]:
            operation = replace(
                operation, name="iota", operands=(), attributes={"dimension": target}
            )
    if operation.name == "iota":
        iotas[operation.results[0]] = operation.attributes["dimension"]
    return operation


def _renames(
    operation: Operation, types: Sequence[TensorType], constants: dict[int, np.ndarray]
) -> bool:
    if len(operation.results) != 1 or not operation.operands:
        return False
    source, result = types[operation.operands[0]], types[operation.results[0]]
    if source.size != result.size or source.dtype != result.dtype:
        return False
    match operation.name:
        case "convert" | "copy":
            return True
        case "slice" | "pad":
            return source.shape == result.shape
        case "broadcast_in_dim":
            dimensions = operation.attributes["dimensions"]
            return list(dimensions) == sorted(dimensions)
        case "transpose":
            moved = [d for d in operation.attributes["permutation"] if source.shape[d] > 1]
            return moved == sorted(moved)
        case "reduce":
            return _neutral(operation, source, constants)
    return False


def _neutral(operation: Operation, source: TensorType, constants: dict[int, np.ndarray]) -> bool:
    """Whether a reduction of single elements starts from the identity of its operator."""
    region, initial = operation.regions[0], constants.get(operation.operands[1])
    if initial is None or len(region.operations) != 1:
        return False
    kind = region.operations[0].name
    if kind not in IDENTITY or set(region.operations[0].operands) != set(region.arguments):
        return False
    return bool(np.all(np.asarray(initial) == IDENTITY[kind](source.numpy)))
