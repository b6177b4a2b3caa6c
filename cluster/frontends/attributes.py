"""The attributes of StableHLO operators as plain data, in the spelling of `ops.ir`."""

from collections.abc import Callable
from typing import Any

import jaxlib.mlir.ir as mlir
import numpy as np
from jaxlib.mlir.dialects import stablehlo as hlo

Attributes = dict[str, Any]
REDUCTIONS = frozenset(["add", "multiply", "minimum", "maximum", "and", "or"])


class Unmodelled(Exception):
    """What is not modelled; the operator at hand adds its source line."""


def short_name(op: Any) -> str:
    """The operator's name without its dialect."""
    return op.name.rpartition(".")[2]


def integer(op: Any, key: str) -> int:
    return int(mlir.IntegerAttr(op.attributes[key]).value)


def _bool(op: Any, key: str) -> bool:
    return key in op.attributes and bool(mlir.BoolAttr(op.attributes[key]).value)


def integers(op: Any, key: str) -> np.ndarray:
    return np.asarray(mlir.DenseIntElementsAttr(op.attributes[key]))


def _ints(op: Any, key: str) -> tuple[int, ...]:
    return tuple(int(i) for i in mlir.DenseI64ArrayAttr(op.attributes[key]))


def _ints_or(op: Any, key: str, count: int, default: int) -> tuple[int, ...]:
    return _ints(op, key) if key in op.attributes else (default,) * count


def channel(op: Any) -> int:
    if "channel_handle" not in op.attributes:
        return 0
    return int(hlo.ChannelHandle(op.attributes["channel_handle"]).handle)


COMPOSITES = {
    "trnsim.attention": "attention",
    "trnsim.attention_gradient": "attention_gradient",
    "trnsim.gelu_dx": "gelu_dx",
    "trnsim.gelu_tanh_dx": "gelu_tanh_dx",
    "trnsim.silu_dx": "silu_dx",
}
"""Composites that stay one operator: the device has it (see `attention` and `activations`)."""


def composite_name(op: Any) -> str:
    """What a `stablehlo.composite` is called."""
    return mlir.StringAttr(op.attributes["name"]).value


def composite_attributes(op: Any) -> Attributes:
    """`causal` and `scale` of an attention; nothing else has attributes."""
    if "composite_attributes" not in op.attributes:
        return {}
    given = mlir.DictAttr(op.attributes["composite_attributes"])
    if not len(given):
        return {}
    return {
        "causal": bool(mlir.BoolAttr(given["causal"]).value),
        "scale": float(mlir.FloatAttr(given["scale"]).value),
    }


def _padding(op: Any, count: int) -> tuple[tuple[int, int], ...]:
    if "padding" not in op.attributes:
        return ((0, 0),) * count
    return tuple((int(low), int(high)) for low, high in integers(op, "padding"))


def _enum(op: Any, key: str, kind: Any) -> str:
    return str(kind(op.attributes[key]).value)


def _rank(value: Any) -> int:
    return mlir.RankedTensorType(value.type).rank


def _compare(op: Any) -> Attributes:
    kind = "NOTYPE"
    if "compare_type" in op.attributes:
        kind = _enum(op, "compare_type", hlo.ComparisonTypeAttr)
    direction = _enum(op, "comparison_direction", hlo.ComparisonDirectionAttr)
    return {"direction": direction, "compare_type": kind}


def _dot_general(op: Any) -> Attributes:
    numbers = hlo.DotDimensionNumbers(op.attributes["dot_dimension_numbers"])
    return {
        "lhs_batch": tuple(numbers.lhs_batching_dimensions),
        "rhs_batch": tuple(numbers.rhs_batching_dimensions),
        "lhs_contracting": tuple(numbers.lhs_contracting_dimensions),
        "rhs_contracting": tuple(numbers.rhs_contracting_dimensions),
    }


def _gather(op: Any) -> Attributes:
    numbers = hlo.GatherDimensionNumbers(op.attributes["dimension_numbers"])
    return {
        "offset_dims": tuple(numbers.offset_dims),
        "collapsed_slice_dims": tuple(numbers.collapsed_slice_dims),
        "operand_batching_dims": tuple(numbers.operand_batching_dims),
        "start_indices_batching_dims": tuple(numbers.start_indices_batching_dims),
        "start_index_map": tuple(numbers.start_index_map),
        "index_vector_dim": int(numbers.index_vector_dim),
        "slice_sizes": _ints(op, "slice_sizes"),
    }


def _scatter(op: Any) -> Attributes:
    numbers = hlo.ScatterDimensionNumbers(op.attributes["scatter_dimension_numbers"])
    return {
        "update_window_dims": tuple(numbers.update_window_dims),
        "inserted_window_dims": tuple(numbers.inserted_window_dims),
        "input_batching_dims": tuple(numbers.input_batching_dims),
        "scatter_indices_batching_dims": tuple(numbers.scatter_indices_batching_dims),
        "scatter_dims_to_operand_dims": tuple(numbers.scattered_dims_to_operand_dims),
        "index_vector_dim": int(numbers.index_vector_dim),
    }


def _reduce_window(op: Any) -> Attributes:
    sizes = _ints(op, "window_dimensions")
    count = len(sizes)
    return {
        "window_dimensions": sizes,
        "window_strides": _ints_or(op, "window_strides", count, 1),
        "base_dilations": _ints_or(op, "base_dilations", count, 1),
        "window_dilations": _ints_or(op, "window_dilations", count, 1),
        "padding": _padding(op, count),
    }


def _select_and_scatter(op: Any) -> Attributes:
    count = _rank(op.operands[0])
    return {
        "window_dimensions": _ints_or(op, "window_dimensions", count, 1),
        "window_strides": _ints_or(op, "window_strides", count, 1),
        "padding": _padding(op, count),
    }


def _convolution(op: Any) -> Attributes:
    numbers = hlo.ConvDimensionNumbers(op.attributes["dimension_numbers"])
    spatial = len(numbers.input_spatial_dimensions)
    reversal = (False,) * spatial
    if "window_reversal" in op.attributes:
        reversal = tuple(bool(b) for b in mlir.DenseBoolArrayAttr(op.attributes["window_reversal"]))
    return {
        "window_strides": _ints_or(op, "window_strides", spatial, 1),
        "padding": _padding(op, spatial),
        "lhs_dilation": _ints_or(op, "lhs_dilation", spatial, 1),
        "rhs_dilation": _ints_or(op, "rhs_dilation", spatial, 1),
        "window_reversal": reversal,
        "input_batch": numbers.input_batch_dimension,
        "input_feature": numbers.input_feature_dimension,
        "input_spatial": tuple(numbers.input_spatial_dimensions),
        "kernel_input_feature": numbers.kernel_input_feature_dimension,
        "kernel_output_feature": numbers.kernel_output_feature_dimension,
        "kernel_spatial": tuple(numbers.kernel_spatial_dimensions),
        "output_batch": numbers.output_batch_dimension,
        "output_feature": numbers.output_feature_dimension,
        "output_spatial": tuple(numbers.output_spatial_dimensions),
        "feature_group_count": integer(op, "feature_group_count"),
        "batch_group_count": integer(op, "batch_group_count"),
    }


def _sort(op: Any) -> Attributes:
    rank = _rank(op.operands[0])
    dimension = integer(op, "dimension") if "dimension" in op.attributes else -1
    return {"dimension": dimension % rank, "is_stable": _bool(op, "is_stable")}


def topk(attributes: Any) -> Attributes:
    largest = "largest" not in attributes or bool(mlir.BoolAttr(attributes["largest"]).value)
    return {"k": int(mlir.IntegerAttr(attributes["k"]).value), "largest": largest}


def _rng(op: Any) -> Attributes:
    return {"algorithm": _enum(op, "rng_algorithm", hlo.RngAlgorithmAttr)}


def _reduction(op: Any) -> str:
    """The name of a two-argument reduction region. Raises Unsupported for any other region."""
    block = op.regions[0].blocks[0]
    operations = list(block.operations)
    name = short_name(operations[0].operation)
    simple = len(operations) == 2 and name in REDUCTIONS
    if not simple or set(operations[0].operation.operands) != set(block.arguments):
        raise Unmodelled(f"{short_name(op)} with a reduction other than one operator")
    return name


def _all_to_all(op: Any) -> Attributes:
    return {
        "split_dimension": integer(op, "split_dimension"),
        "concat_dimension": integer(op, "concat_dimension"),
        "split_count": integer(op, "split_count"),
    }


ATTRIBUTES: dict[str, Callable[[Any], Attributes]] = {
    "iota": lambda op: {"dimension": integer(op, "iota_dimension")},
    "broadcast_in_dim": lambda op: {"dimensions": _ints(op, "broadcast_dimensions")},
    "transpose": lambda op: {"permutation": _ints(op, "permutation")},
    "slice": lambda op: {
        "start": _ints(op, "start_indices"),
        "limit": _ints(op, "limit_indices"),
        "strides": _ints(op, "strides"),
    },
    "dynamic_slice": lambda op: {"sizes": _ints(op, "slice_sizes")},
    "concatenate": lambda op: {"dimension": integer(op, "dimension")},
    "pad": lambda op: {
        "low": _ints(op, "edge_padding_low"),
        "high": _ints(op, "edge_padding_high"),
        "interior": _ints(op, "interior_padding"),
    },
    "reverse": lambda op: {"dimensions": _ints(op, "dimensions")},
    "compare": _compare,
    "dot_general": _dot_general,
    "gather": _gather,
    "scatter": _scatter,
    "reduce": lambda op: {"dimensions": _ints(op, "dimensions")},
    "reduce_window": _reduce_window,
    "select_and_scatter": _select_and_scatter,
    "sort": _sort,
    "convolution": _convolution,
    "rng_bit_generator": _rng,
    "reduce_precision": lambda op: {
        "exponent_bits": integer(op, "exponent_bits"),
        "mantissa_bits": integer(op, "mantissa_bits"),
    },
    "topk": lambda op: topk(op.attributes),
}

COLLECTIVES: dict[str, Callable[[Any], Attributes]] = {
    "all_reduce": lambda op: {"reduction": _reduction(op)},
    "reduce_scatter": lambda op: {
        "dimension": integer(op, "scatter_dimension"),
        "reduction": _reduction(op),
    },
    "all_gather": lambda op: {"dimension": integer(op, "all_gather_dim")},
    "all_to_all": _all_to_all,
    "collective_permute": lambda op: {},
    "collective_broadcast": lambda op: {},
}
