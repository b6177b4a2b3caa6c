"""StableHLO in MLIR form -> `ops.ir.Module`.

Calls and composites are inlined, tuples flattened, markers (sharding, barriers) become aliases,
and `dot` becomes `dot_general`.
"""

import os
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

from .attributes import (
    ATTRIBUTES,
    COLLECTIVES,
    COMPOSITES,
    Attributes,
    Unmodelled,
    channel,
    composite_attributes,
    composite_name,
    integer,
    integers,
    short_name,
    topk,
)

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
TERMINATORS = frozenset(["return"])


def module_from_bytecode(context: mlir.Context, bytecode: bytes, name: str, ranks: int) -> Module:
    """The program of one rank out of `ranks`, from a StableHLO module as text or bytecode.

    Raises Unsupported with operator and source line for what the operator set does not have.
    """
    with context:
        return module_from_mlir(mlir.Module.parse(bytecode), name, ranks)


def module_from_mlir(module: mlir.Module, name: str, ranks: int) -> Module:
    """The program of one rank out of `ranks`, from a StableHLO module in memory."""
    with module.context:
        return _Translation(module, ranks).module(name)


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
                name = mlir.StringAttr(operation.operation.attributes["sym_name"])
                self.functions[name.value] = operation

    def module(self, name: str) -> Module:
        for op in _operations(self.root):  # before the tokens that callbacks bring
            if _callback(op):
                raise self.unsupported(f"host callback ({_callback(op)})", op)
        try:
            body = self.block(self.functions["main"].regions[0].blocks[0], {})
        except Unmodelled as error:
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
        except Unmodelled as error:
            raise self.unsupported(str(error), op) from None

    def translate(self, name: str, op: Any, scope: dict, out: list[Operation]) -> None:
        special = _SPECIAL.get(name)
        if special is not None:
            special(self, op, scope, out)
        elif name in PLAIN:
            self.emit(name, op, scope, out, {})
        elif name in ATTRIBUTES:
            self.emit(name, op, scope, out, ATTRIBUTES[name](op))
        elif name in COLLECTIVES:
            self.collective(name, op, scope, out)
        else:
            raise Unmodelled(f"operator {op.name.removeprefix('stablehlo.')}")

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
        attributes = COLLECTIVES[name](op) | {"channel_id": channel(op)}
        if name == "collective_permute":
            pairs = integers(op, "source_target_pairs")
            attributes["source_target_pairs"] = tuple((int(a), int(b)) for a, b in pairs)
        else:
            attributes["replica_groups"] = self.groups(op)
        for operand, result in zip(op.operands, op.results, strict=True):
            value = self.fresh(result, scope)
            out.append(Operation(name, (scope[operand],), (value,), attributes, (), self.where(op)))

    def groups(self, op: Any) -> tuple[tuple[int, ...], ...]:
        attribute = op.attributes["replica_groups"]
        if hlo.ReplicaGroupMeshAxesAttr.isinstance(attribute):  # jaxlib loses their device order
            raise Unmodelled(f"operator {short_name(op)} with mesh axes for replica groups")
        rows = np.asarray(mlir.DenseIntElementsAttr(attribute))
        if rows.size == 0:
            return (tuple(range(self.ranks)),)
        if not channel(op):  # groups of replicas, of which there is one: each rank is alone
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
        """The operators of the function that is called; of a composite, those it stands for,
        unless the device has a kernel for it."""
        if op.name == "stablehlo.composite" and (kernel := COMPOSITES.get(composite_name(op))):
            self.emit(kernel, op, scope, out, composite_attributes(op))
            return
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
            self.emit("topk", op, scope, out, topk(attributes))
        else:
            raise Unmodelled(f"operator custom_call @{target}")

    def top_k(self, op: Any, scope: dict, out: list[Operation]) -> None:
        self.emit("topk", op, scope, out, topk(op.attributes))

    def tuple(self, op: Any, scope: dict, out: list[Operation]) -> None:
        scope[op.results[0]] = tuple(scope[value] for value in op.operands)

    def get_tuple_element(self, op: Any, scope: dict, out: list[Operation]) -> None:
        scope[op.results[0]] = scope[op.operands[0]][integer(op, "index")]


_SPECIAL: dict[str, Callable] = {
    "constant": _Translation.constant,
    "dot": _Translation.dot,
    "call": _Translation.call,
    "composite": _Translation.call,
    "custom_call": _Translation.custom_call,
    "top_k": _Translation.top_k,
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


def _flat(values: Sequence) -> tuple[int, ...]:
    flat: list[int] = []
    for value in values:
        flat.extend(_flat(value) if isinstance(value, tuple) else (value,))
    return tuple(flat)


def _tensor_type(kind: Any) -> TensorType:
    if not isinstance(kind, mlir.RankedTensorType):
        raise Unmodelled(f"a value of type {kind}")
    dtype = str(kind.element_type)
    try:
        numpy_dtype(dtype)
    except Unsupported:
        raise Unmodelled(f"dtype {dtype}") from None
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
def _source_line(text: str, folder: str) -> str:
    frames = re.findall(r'"([^"\n]*)":(\d+):\d+', text)
    if not frames:
        return ""
    mine = [f for f in frames if not f[0].startswith(_libraries()) and not f[0].startswith("<")]
    file, line = (mine or frames)[0]
    path = Path(file)
    if path.is_relative_to(folder):
        path = path.relative_to(folder)
    return f"{path}:{line}"


def location(op: Any) -> str:
    """`file:line` of the innermost frame outside installed libraries, or empty."""
    return _source_line(str(op.location), os.getcwd())


OPERATORS = (
    PLAIN | set(ATTRIBUTES) | set(COLLECTIVES) | {"constant"}
)  # every name a translated module can contain
