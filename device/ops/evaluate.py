"""Values of operators: StableHLO semantics on numpy arrays.

`evaluate` computes one operator; `evaluate_block` is the reference interpreter of a straight line
of operators with its control flow. Collectives and partition_id are not values of one rank alone:
the cluster computes them.
"""

from collections.abc import Callable, Sequence

import numpy as np

from .. import arithmetic
from ..errors import Unsupported
from . import (
    regions,
    values_attention,
    values_contract,
    values_index,
    values_random,
    values_reduce,
    values_shape,
)
from . import values_sort as sorting
from .ir import Block, Operation, TensorType

Arrays = list[np.ndarray]
Types = Sequence[TensorType]
Evaluator = Callable[[Operation, Arrays, Types], Arrays]


def _elementwise(operation: Operation, inputs: Arrays, types: Types) -> Arrays:
    result = types[operation.results[0]]
    value = arithmetic.apply(operation.name, *inputs, out=result.numpy, **operation.attributes)
    return [value if value.shape == result.shape else np.broadcast_to(value, result.shape)]


def _constant(operation: Operation, inputs: Arrays, types: Types) -> Arrays:
    result = types[operation.results[0]]
    return [np.broadcast_to(np.asarray(operation.attributes["value"]), result.shape)]


def _iota(operation: Operation, inputs: Arrays, types: Types) -> Arrays:
    result = types[operation.results[0]]
    return [values_shape.iota(result.shape, operation.attributes["dimension"], result.numpy)]


def _broadcast_in_dim(operation: Operation, inputs: Arrays, types: Types) -> Arrays:
    shape = types[operation.results[0]].shape
    return [values_shape.broadcast_in_dim(inputs[0], shape, operation.attributes["dimensions"])]


def _reshape(operation: Operation, inputs: Arrays, types: Types) -> Arrays:
    return [inputs[0].reshape(types[operation.results[0]].shape)]


def _bitcast_convert(operation: Operation, inputs: Arrays, types: Types) -> Arrays:
    result = types[operation.results[0]]
    return [values_shape.bitcast_convert(inputs[0], result.shape, result.numpy)]


def _transpose(operation: Operation, inputs: Arrays, types: Types) -> Arrays:
    return [inputs[0].transpose(operation.attributes["permutation"])]


def _slice(operation: Operation, inputs: Arrays, types: Types) -> Arrays:
    a = operation.attributes
    return [values_shape.slice_(inputs[0], a["start"], a["limit"], a["strides"])]


def _dynamic_slice(operation: Operation, inputs: Arrays, types: Types) -> Arrays:
    sizes = operation.attributes["sizes"]
    return [values_shape.dynamic_slice(inputs[0], inputs[1:], sizes)]


def _dynamic_update_slice(operation: Operation, inputs: Arrays, types: Types) -> Arrays:
    return [values_shape.dynamic_update_slice(inputs[0], inputs[1], inputs[2:])]


def _concatenate(operation: Operation, inputs: Arrays, types: Types) -> Arrays:
    return [np.concatenate(inputs, axis=operation.attributes["dimension"])]


def _pad(operation: Operation, inputs: Arrays, types: Types) -> Arrays:
    a = operation.attributes
    return [values_shape.pad(inputs[0], inputs[1], a["low"], a["high"], a["interior"])]


def _reverse(operation: Operation, inputs: Arrays, types: Types) -> Arrays:
    return [np.flip(inputs[0], tuple(operation.attributes["dimensions"]))]


def _dot_general(operation: Operation, inputs: Arrays, types: Types) -> Arrays:
    names = ("lhs_batch", "rhs_batch", "lhs_contracting", "rhs_contracting")
    dims = {name: operation.attributes[name] for name in names}
    out = types[operation.results[0]].numpy
    return [values_contract.dot_general(inputs[0], inputs[1], **dims, out=out)]


def _convolution(operation: Operation, inputs: Arrays, types: Types) -> Arrays:
    fields = values_contract.Convolution.__dataclass_fields__
    numbers = values_contract.Convolution(**{name: operation.attributes[name] for name in fields})
    out = types[operation.results[0]].numpy
    return [values_contract.convolution(inputs[0], inputs[1], numbers, out)]


def _gather(operation: Operation, inputs: Arrays, types: Types) -> Arrays:
    a = operation.attributes
    operand, indices = inputs
    found = values_index.windows(
        operand.shape,
        indices,
        tuple(a["slice_sizes"]),
        a["start_index_map"],
        a["index_vector_dim"],
        a["operand_batching_dims"],
        a["start_indices_batching_dims"],
    )
    dropped = (*a["collapsed_slice_dims"], *a["operand_batching_dims"])
    return [values_index.gather(operand, found, dropped, a["offset_dims"])]


def _region_reduction(block: Block, types: Types) -> str | None:
    return "update" if regions.is_update(block, types) else regions.reduction_name(block, types)


def _scatter(operation: Operation, inputs: Arrays, types: Types) -> Arrays:
    a, count, region = operation.attributes, len(operation.results), operation.regions[0]
    operands, indices, updates = inputs[:count], inputs[count], inputs[count + 1 :]
    window_dims = a["update_window_dims"]
    inserted = (*a["inserted_window_dims"], *a["input_batching_dims"])
    found = values_index.windows(
        operands[0].shape,
        indices,
        values_index.window_sizes(operands[0].ndim, updates[0].shape, window_dims, inserted),
        a["scatter_dims_to_operand_dims"],
        a["index_vector_dim"],
        a["input_batching_dims"],
        a["scatter_indices_batching_dims"],
    )
    combine, reduction = regions.combine(region, types), _region_reduction(region, types)
    return values_index.scatter(operands, updates, found, window_dims, combine, reduction)


def _reduce(operation: Operation, inputs: Arrays, types: Types) -> Arrays:
    count, region = len(operation.results), operation.regions[0]
    operands, inits = inputs[:count], inputs[count:]
    dimensions = operation.attributes["dimensions"]
    name = regions.reduction_name(region, types)
    if name is not None:
        return [values_reduce.reduce_named(operands[0], inits[0], dimensions, name)]
    combine = regions.combine(region, types)
    name = regions.argument_reduction(region, types)
    if name is not None and operands[0].size:
        values, indices = operands
        found = values_reduce.reduce_argument(values, indices, dimensions, name)
        return combine(*inits, *found)
    return values_reduce.reduce_general(operands, inits, dimensions, combine)


def _reduce_window(operation: Operation, inputs: Arrays, types: Types) -> Arrays:
    count, region, a = len(operation.results), operation.regions[0], operation.attributes
    operands, inits = inputs[:count], inputs[count:]
    window = values_reduce.Window(
        tuple(a["window_dimensions"]),
        tuple(a["window_strides"]),
        tuple(a["base_dilations"]),
        tuple(a["window_dilations"]),
        tuple((low, high) for low, high in a["padding"]),
    )
    name = regions.reduction_name(region, types)
    if name is not None and inits[0] == arithmetic.IDENTITY[name](inits[0].dtype):
        return [values_reduce.reduce_window_named(operands[0], window, name)]
    combine = regions.combine(region, types)
    return values_reduce.reduce_window_general(operands, inits, window, combine)


def _select_and_scatter(operation: Operation, inputs: Arrays, types: Types) -> Arrays:
    a, ones = operation.attributes, (1,) * inputs[0].ndim
    window = values_reduce.Window(
        tuple(a["window_dimensions"]),
        tuple(a["window_strides"]),
        ones,
        ones,
        tuple((low, high) for low, high in a["padding"]),
    )
    select, scatter = operation.regions
    result = values_reduce.select_and_scatter(
        *inputs,
        window=window,
        select=regions.combine(select, types),
        combine=regions.combine(scatter, types),
        reduction=_region_reduction(scatter, types),
    )
    return [result]


def _sort(operation: Operation, inputs: Arrays, types: Types) -> Arrays:
    region = operation.regions[0]
    found, combine = sorting.keys(region, types), regions.combine(region, types)
    return sorting.sort(inputs, operation.attributes["dimension"], found, combine)


def _topk(operation: Operation, inputs: Arrays, types: Types) -> Arrays:
    a = operation.attributes
    return sorting.topk(inputs[0], a["k"], a.get("largest", True))


def _rng_bit_generator(operation: Operation, inputs: Arrays, types: Types) -> Arrays:
    bits = types[operation.results[1]]
    algorithm = operation.attributes["algorithm"]
    return values_random.rng_bit_generator(inputs[0], algorithm, bits.shape, bits.numpy)


def _attention(operation: Operation, inputs: Arrays, types: Types) -> Arrays:
    results = [np.empty(types[v].shape, types[v].numpy) for v in operation.results]
    a, (b, _, n, _) = operation.attributes, inputs[0].shape
    units = ((i, j) for i in range(b) for j in range(n))
    values_attention.fill(inputs, results, units, a["scale"], a["causal"])
    return results


def _copy(operation: Operation, inputs: Arrays, types: Types) -> Arrays:
    return inputs


_EVALUATORS: dict[str, Evaluator] = {
    **dict.fromkeys(arithmetic.NAMES, _elementwise),
    "constant": _constant,
    "iota": _iota,
    "broadcast_in_dim": _broadcast_in_dim,
    "reshape": _reshape,
    "bitcast_convert": _bitcast_convert,
    "transpose": _transpose,
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "concatenate": _concatenate,
    "pad": _pad,
    "reverse": _reverse,
    "dot_general": _dot_general,
    "convolution": _convolution,
    "gather": _gather,
    "scatter": _scatter,
    "reduce": _reduce,
    "reduce_window": _reduce_window,
    "select_and_scatter": _select_and_scatter,
    "sort": _sort,
    "topk": _topk,
    "rng_bit_generator": _rng_bit_generator,
    "attention": _attention,
    "attention_gradient": _attention,
    "copy": _copy,
    "optimization_barrier": _copy,
}

NAMES = frozenset(_EVALUATORS)
"""Every operator that `evaluate` computes."""

CONTROL_FLOW = frozenset({"while", "case", "if"})
"""The operators that only `evaluate_block` computes."""


def evaluate(operation: Operation, inputs: Arrays, types: Types) -> Arrays:
    """The results of one operator on full arrays of its operands' types.

    Results may be read-only views (of inputs, or broadcast). Raises Unsupported, with the source
    line, for operators that are not in `NAMES`.
    """
    try:
        evaluator = _EVALUATORS[operation.name]
    except KeyError:
        raise Unsupported(
            f"operator {operation.name} is not modelled ({operation.location})"
        ) from None
    return evaluator(operation, inputs, types)


def evaluate_block(
    block: Block,
    types: Types,
    arguments: Sequence[np.ndarray],
    environment: dict[int, np.ndarray] | None = None,
) -> Arrays:
    """The returned values of a block, control flow included.

    `environment` has the values of enclosing blocks, by value number; the block adds its own.
    """
    values = {} if environment is None else environment
    values.update(zip(block.arguments, arguments, strict=True))
    for operation in block.operations:
        inputs = [values[v] for v in operation.operands]
        if operation.name in CONTROL_FLOW:
            results = _control_flow(operation, inputs, types, values)
        else:
            results = evaluate(operation, inputs, types)
        values.update(zip(operation.results, results, strict=True))
    return [values[v] for v in block.returns]


def _control_flow(
    operation: Operation, inputs: Arrays, types: Types, values: dict[int, np.ndarray]
) -> Arrays:
    if operation.name == "while":
        condition, body = operation.regions
        while evaluate_block(condition, types, inputs, values)[0]:
            inputs = evaluate_block(body, types, inputs, values)
        return inputs
    return evaluate_block(operation.regions[branch(operation, inputs[0])], types, [], values)


def branch(operation: Operation, selector: np.ndarray) -> int:
    """Which region of `case` or `if` runs: true is the first; outside indices take the last."""
    if operation.name == "if":
        return 0 if selector else 1
    index = int(selector)
    return index if 0 <= index < len(operation.regions) else len(operation.regions) - 1
