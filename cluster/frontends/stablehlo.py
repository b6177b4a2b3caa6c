"""StableHLO in MLIR form -> `ops.ir.Module`.

Calls and composites are inlined, tuples flattened, markers (sharding, barriers) become aliases,
and `dot` becomes `dot_general`.
"""

import re
import site
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jaxlib.mlir.ir as mlir
import numpy as np
from jaxlib.mlir.dialects import stablehlo as hlo

from trnsim.device.dtypes import numpy_dtype
from trnsim.device.errors import Unsupported
from trnsim.device.ops.ir import Block, Module, Operation, TensorType

PLAIN = frozenset(
    """
    abs add and atan2 bitcast_convert cbrt ceil clamp convert cosine count_leading_zeros
    divide dynamic_update_slice erf exponential exponential_minus_one floor is_finite log
    log_plus_one logistic maximum minimum multiply negate not or partition_id popcnt power
    remainder replica_id reshape round_nearest_afz round_nearest_even rsqrt select
    shift_left shift_right_arithmetic shift_right_logical sign sine sqrt subtract tan tanh xor
    if case while
    """.split()
)  # operators without attributes; their regions, if any, are translated as they are

ALIASES = frozenset(
    ["copy", "optimization_barrier", "sharding_constraint", "propagation_barrier"]
)  # the same value again: a copy has no meaning between values that never change
MARKERS = frozenset(
    """
    Sharding SPMDFullToShardShape SPMDShardToFullShape annotate_device_placement
    xla.sdy.FuncResultSharding xla.sdy.GlobalToLocalShape xla.sdy.LocalToGlobalShape
    """.split()
)  # custom calls that only carry a sharding
REDUCTIONS = frozenset(["add", "multiply", "minimum", "maximum", "and", "or"])
TERMINATORS = frozenset(["return"])

Attributes = dict[str, Any]


def module_from_bytecode(context: mlir.Context, bytecode: bytes, name: str, ranks: int) -> Module:
    """The program of one rank out of `ranks`, from a StableHLO module as text or bytecode.

    Raises Unsupported with operator and source line for what the operator set does not have.
    """
    with context:
        module = mlir.Module.parse(bytecode)
        return _Translation(module, ranks).module(name)


class _Unmodelled(Exception):
    """What is not modelled; the operator at hand adds its source line."""


class _Translation:
    """Numbers the values of one module while it copies the operators."""

    def __init__(self, module: mlir.Module, ranks: int) -> None:
        self.root = module.operation
        self.ranks = ranks
        self.sites: list[str] = []  # source lines of the calls being inlined
        self.types: list[TensorType] = []
        self.functions: dict[str, Any] = {}
        for operation in module.body.operations:
            if operation.operation.name == "func.func":
                self.functions[
                    mlir.StringAttr(operation.operation.attributes["sym_name"]).value
                ] = operation

    def module(self, name: str) -> Module:
        for op in _operations(self.root):  # before the tokens that callbacks bring
            if _callback(op):
                raise self.unsupported(f"host callback ({_callback(op)})", op)
        try:
            body = self.block(self.functions["main"].regions[0].blocks[0], {})
        except _Unmodelled as error:
            raise Unsupported(f"{error} is not modelled (an argument of {name})") from None
        return Module(name, tuple(self.types), body)

    def block(self, source: Any, scope: dict) -> Block:
        arguments = [self.fresh(value, scope) for value in source.arguments]
        operations: list[Operation] = []
        returns = self.run(source, scope, operations)
        return Block(_flat(arguments), tuple(operations), _flat(returns))

    def run(self, source: Any, scope: dict, out: list[Operation]) -> list:
        """Translate a block's operators into `out`; what its terminator returns."""
        for view in source.operations:
            op = view.operation
            if short_name(op) in TERMINATORS:
                return [scope[value] for value in op.operands]
            self.operation(op, scope, out)
        return []

    def operation(self, op: Any, scope: dict, out: list[Operation]) -> None:
        try:
            self.translate(short_name(op), op, scope, out)
        except _Unmodelled as error:
            raise self.unsupported(str(error), op) from None

    def translate(self, name: str, op: Any, scope: dict, out: list[Operation]) -> None:
        special = _SPECIAL.get(name)
        if special is not None:
            special(self, op, scope, out)
        elif name in PLAIN:
            self.emit(name, op, scope, out, {})
        elif name in _ATTRIBUTES:
            self.emit(name, op, scope, out, _ATTRIBUTES[name](op))
        elif name in _COLLECTIVES:
            self.collective(name, op, scope, out)
        else:
            raise _Unmodelled(f"operator {op.name.removeprefix('stablehlo.')}")

    def where(self, op: Any) -> str:
        """The source line of an operator, or of the call that it came from, or empty."""
        return location(op) or next((site for site in reversed(self.sites) if site), "")

    def unsupported(self, what: str, op: Any) -> Unsupported:
        where = self.where(op)
        return Unsupported(f"{what} is not modelled" + (f" ({where})" if where else ""))

    def emit(
        self, name: str, op: Any, scope: dict, out: list[Operation], attributes: Attributes
    ) -> None:
        operands = _flat([scope[value] for value in op.operands])
        regions = tuple(self.block(region.blocks[0], scope) for region in op.regions)
        results = _flat([self.fresh(value, scope) for value in op.results])
        out.append(Operation(name, operands, results, attributes, regions, self.where(op)))

    def collective(self, name: str, op: Any, scope: dict, out: list[Operation]) -> None:
        """One operation per operand: a variadic collective is that many collectives."""
        attributes = _COLLECTIVES[name](op) | {"channel_id": _channel(op)}
        if name == "collective_permute":
            pairs = _integers(op, "source_target_pairs")
            attributes["source_target_pairs"] = tuple((int(a), int(b)) for a, b in pairs)
        else:
            attributes["replica_groups"] = self.groups(op)
        for operand, result in zip(op.operands, op.results, strict=True):
            value = self.fresh(result, scope)
            out.append(Operation(name, (scope[operand],), (value,), attributes, (), self.where(op)))

    def groups(self, op: Any) -> tuple[tuple[int, ...], ...]:
        attribute = op.attributes["replica_groups"]
        if hlo.ReplicaGroupMeshAxesAttr.isinstance(attribute):  # jaxlib loses their device order
            raise _Unmodelled(f"operator {short_name(op)} with mesh axes for replica groups")
        rows = np.asarray(mlir.DenseIntElementsAttr(attribute))
        if rows.size == 0:
            return (tuple(range(self.ranks)),)
        if not _channel(op):  # groups of replicas, of which there is one: each rank is alone
            return tuple((rank,) for rank in range(self.ranks))
        return tuple(tuple(int(r) for r in row if r >= 0) for row in rows)

    def fresh(self, value: Any, scope: dict) -> Any:
        """Number a value (a nested tuple of numbers for a tuple) and note its type."""
        scope[value] = self.number(value.type)
        return scope[value]

    def number(self, kind: Any) -> Any:
        if isinstance(kind, mlir.TupleType):
            kind = mlir.TupleType(kind)
            return tuple(self.number(kind.get_type(i)) for i in range(kind.num_types))
        self.types.append(_tensor_type(kind))
        return len(self.types) - 1

    # operators that are more than a name with attributes

    def constant(self, op: Any, scope: dict, out: list[Operation]) -> None:
        kind = _tensor_type(op.results[0].type)
        value = constant_array(op.attributes["value"], kind)
        self.emit("constant", op, scope, out, {"value": value})

    def dot(self, op: Any, scope: dict, out: list[Operation]) -> None:
        rank = mlir.RankedTensorType(op.operands[0].type).rank
        attributes = {"lhs_batch": (), "rhs_batch": ()}
        attributes |= {"lhs_contracting": (rank - 1,), "rhs_contracting": (0,)}
        self.emit("dot_general", op, scope, out, attributes)

    def alias(self, op: Any, scope: dict, out: list[Operation]) -> None:
        for operand, result in zip(op.operands, op.results, strict=True):
            scope[result] = scope[operand]

    def call(self, op: Any, scope: dict, out: list[Operation]) -> None:
        key = "decomposition" if op.name == "stablehlo.composite" else "callee"
        callee = self.functions[mlir.FlatSymbolRefAttr(op.attributes[key]).value]
        body = callee.regions[0].blocks[0]
        inner = {
            argument: scope[operand]
            for argument, operand in zip(body.arguments, op.operands, strict=True)
        }
        self.sites.append(location(op))
        returns = self.run(body, inner, out)
        self.sites.pop()
        scope.update(zip(op.results, returns, strict=True))

    def custom_call(self, op: Any, scope: dict, out: list[Operation]) -> None:
        target = mlir.StringAttr(op.attributes["call_target_name"]).value
        if target in MARKERS:
            self.alias(op, scope, out)
        elif target == "mhlo.topk":
            attributes = mlir.DictAttr(op.attributes["mhlo.attributes"])
            self.emit("topk", op, scope, out, _topk(attributes))
        else:
            raise _Unmodelled(f"operator custom_call @{target}")

    def tuple(self, op: Any, scope: dict, out: list[Operation]) -> None:
        scope[op.results[0]] = tuple(scope[value] for value in op.operands)

    def get_tuple_element(self, op: Any, scope: dict, out: list[Operation]) -> None:
        scope[op.results[0]] = scope[op.operands[0]][_int(op, "index")]


_SPECIAL: dict[str, Callable] = {
    "constant": _Translation.constant,
    "dot": _Translation.dot,
    "call": _Translation.call,
    "composite": _Translation.call,
    "custom_call": _Translation.custom_call,
    "tuple": _Translation.tuple,
    "get_tuple_element": _Translation.get_tuple_element,
    **{name: _Translation.alias for name in ALIASES},
}


def _operations(region_holder: Any) -> Iterator[Any]:
    for region in region_holder.regions:
        for block in region.blocks:
            for view in block.operations:
                yield view.operation
                yield from _operations(view.operation)


def _callback(op: Any) -> str:
    """The target of a custom call to the host, or empty."""
    if op.name != "stablehlo.custom_call":
        return ""
    target = mlir.StringAttr(op.attributes["call_target_name"]).value
    return target if "callback" in target else ""


def short_name(op: Any) -> str:
    """The operator's name without its dialect."""
    return op.name.rpartition(".")[2]


def _flat(values: Sequence) -> tuple[int, ...]:
    flat: list[int] = []
    for value in values:
        flat.extend(_flat(value) if isinstance(value, tuple) else (value,))
    return tuple(flat)


def _tensor_type(kind: Any) -> TensorType:
    if not isinstance(kind, mlir.RankedTensorType):
        raise _Unmodelled(f"a value of type {kind}")
    dtype = str(kind.element_type)
    try:
        numpy_dtype(dtype)
    except Unsupported:
        raise _Unmodelled(f"dtype {dtype}") from None
    return TensorType(tuple(kind.shape), dtype)


def constant_array(attribute: Any, kind: TensorType) -> np.ndarray:
    """The value of a dense constant: full shape, or shape () for a splat."""
    elements = mlir.DenseElementsAttr(attribute)
    if elements.is_splat:
        return np.array(_scalar(elements.get_splat_value(), kind), kind.numpy)
    try:
        values = np.array(elements)
    except (TypeError, ValueError, RuntimeError):
        values = np.array(list(_typed(attribute)))
    return values.astype(kind.numpy).reshape(kind.shape)


def _typed(attribute: Any) -> Any:
    try:
        return mlir.DenseFPElementsAttr(attribute)
    except ValueError:
        return mlir.DenseIntElementsAttr(attribute)


def _scalar(attribute: Any, kind: TensorType) -> Any:
    value = attribute.value
    if kind.dtype.startswith("ui"):
        return value % (1 << (8 * kind.numpy.itemsize))
    return value


@cache
def _libraries() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    folders = {paths["stdlib"], paths["platstdlib"], paths["purelib"], paths["platlib"]}
    folders |= set(site.getsitepackages())
    return tuple(str(Path(folder)) + "/" for folder in folders)


@cache
def _source_line(text: str) -> str:
    frames = re.findall(r'"([^"\n]*)":(\d+):\d+', text)
    if not frames:
        return ""
    mine = [f for f in frames if not f[0].startswith(_libraries()) and not f[0].startswith("<")]
    file, line = (mine or frames)[0]
    path = Path(file)
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return f"{path}:{line}"


def location(op: Any) -> str:
    """`file:line` of the innermost frame outside installed libraries, or empty."""
    return _source_line(str(op.location))


def _int(op: Any, key: str) -> int:
    return int(mlir.IntegerAttr(op.attributes[key]).value)


def _bool(op: Any, key: str) -> bool:
    return key in op.attributes and bool(mlir.BoolAttr(op.attributes[key]).value)


def _integers(op: Any, key: str) -> np.ndarray:
    return np.asarray(mlir.DenseIntElementsAttr(op.attributes[key]))


def _ints(op: Any, key: str) -> tuple[int, ...]:
    return tuple(int(i) for i in mlir.DenseI64ArrayAttr(op.attributes[key]))


def _ints_or(op: Any, key: str, count: int, default: int) -> tuple[int, ...]:
    return _ints(op, key) if key in op.attributes else (default,) * count


def _channel(op: Any) -> int:
    if "channel_handle" not in op.attributes:
        return 0
    return int(hlo.ChannelHandle(op.attributes["channel_handle"]).handle)


def _padding(op: Any, count: int) -> tuple[tuple[int, int], ...]:
    if "padding" not in op.attributes:
        return ((0, 0),) * count
    return tuple((int(low), int(high)) for low, high in _integers(op, "padding"))


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
        "feature_group_count": _int(op, "feature_group_count"),
        "batch_group_count": _int(op, "batch_group_count"),
    }


def _sort(op: Any) -> Attributes:
    rank = _rank(op.operands[0])
    dimension = _int(op, "dimension") if "dimension" in op.attributes else -1
    return {"dimension": dimension % rank, "is_stable": _bool(op, "is_stable")}


def _topk(attributes: Any) -> Attributes:
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
        raise _Unmodelled(f"{short_name(op)} with a reduction other than one operator")
    return name


def _all_to_all(op: Any) -> Attributes:
    return {
        "split_dimension": _int(op, "split_dimension"),
        "concat_dimension": _int(op, "concat_dimension"),
        "split_count": _int(op, "split_count"),
    }


_ATTRIBUTES: dict[str, Callable[[Any], Attributes]] = {
    "iota": lambda op: {"dimension": _int(op, "iota_dimension")},
    "broadcast_in_dim": lambda op: {"dimensions": _ints(op, "broadcast_dimensions")},
    "transpose": lambda op: {"permutation": _ints(op, "permutation")},
    "slice": lambda op: {
        "start": _ints(op, "start_indices"),
        "limit": _ints(op, "limit_indices"),
        "strides": _ints(op, "strides"),
    },
    "dynamic_slice": lambda op: {"sizes": _ints(op, "slice_sizes")},
    "concatenate": lambda op: {"dimension": _int(op, "dimension")},
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
        "exponent_bits": _int(op, "exponent_bits"),
        "mantissa_bits": _int(op, "mantissa_bits"),
    },
    "topk": lambda op: _topk(op.attributes),
    "top_k": lambda op: _topk(op.attributes),
}

_COLLECTIVES: dict[str, Callable[[Any], Attributes]] = {
    "all_reduce": lambda op: {"reduction": _reduction(op)},
    "reduce_scatter": lambda op: {
        "dimension": _int(op, "scatter_dimension"),
        "reduction": _reduction(op),
    },
    "all_gather": lambda op: {"dimension": _int(op, "all_gather_dim")},
    "all_to_all": _all_to_all,
    "collective_permute": lambda op: {},
    "collective_broadcast": lambda op: {},
}

OPERATORS = (
    PLAIN | set(_ATTRIBUTES) - {"top_k"} | set(_COLLECTIVES) | {"constant"}
)  # every name a translated module can contain
