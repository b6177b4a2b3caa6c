"""Elementary functions that XLA expands, recognised again as one operator each.

XLA writes logistic as 1 / (1 + exp(-x)) and erfc, of which exact gelu is made, as 28 multiplies and
21 adds; a NeuronCore has them as one activation. A pass numbers values: equal expressions get equal
numbers, whatever the order of commutative operands, the copies of a subexpression, or the way in
which a constant is broadcast. At each operator it builds the number that the function of a
candidate argument would have, and rewrites the operator if it has that number. So a match is exact:
another constant or another operator is another number, and nothing is rewritten.

Values after the rewrite agree with the expansion within rounding of the type.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from .. import arithmetic
from .evaluate import CONTROL_FLOW, NAMES
from .ir import Block, Module, Operation, TensorType

Number = int | None  # a value number; None: no such value exists
Key = tuple[Any, ...]

_COMMUTATIVE = frozenset({"add", "multiply", "maximum", "minimum", "and", "or", "xor"})
_SPREADS = frozenset({"broadcast_in_dim", "reshape", "copy"})  # a splat stays a splat
_PURE = NAMES | CONTROL_FLOW | {"partition_id", "replica_id"}

# XLA's float32 erfc, after Cephes ndtrf.c: 1 - x T(x^2) for |x| < 1; beyond it
# exp(-x^2) / |x| times P(1/x^2) for |x| < 2 or R(1/x^2), reflected for x < 0.
_ERF_T = (
    7.853861353153693e-5, -8.010193625184903e-4, 5.188327685732524e-3, -2.685381193529856e-2,
    1.128358514861418e-1, -3.761262582423300e-1, 1.128379165726710e0,
)  # fmt: skip
_ERFC_P = (
    2.326819970068386e-2, -1.387039388740657e-1, 3.687424674597105e-1, -5.824733027278666e-1,
    6.210004621745983e-1, -4.944515323274145e-1, 3.404879937665872e-1, -2.741127028184656e-1,
    5.638259427386472e-1,
)  # fmt: skip
_ERFC_R = (
    -1.047766399936249e1, 1.297719955372516e1, -7.495518717768503e0, 2.921019019210786e0,
    -1.015265279202700e0, 4.218463358204948e-1, -2.820767439740514e-1, 5.641895067754075e-1,
)  # fmt: skip
_MAX_LOG = 88.72283905206835


@dataclass
class _Numbering:
    """Value numbers of a block: of each SSA value, of each expression, and the reverse."""

    types: tuple[TensorType, ...]
    of_value: dict[int, int] = field(default_factory=dict)
    of_key: dict[Key, int] = field(default_factory=dict)
    keys: list[Key] = field(default_factory=list)
    values: dict[int, int] = field(default_factory=dict)  # number -> first SSA value that has it

    def nested(self) -> "_Numbering":
        """The numbering inside a region: what it adds is not seen outside."""
        return _Numbering(
            self.types, dict(self.of_value), dict(self.of_key), list(self.keys), dict(self.values)
        )

    def number(self, value: int) -> int:
        """The number of an SSA value: its own if nothing is known of it."""
        if value not in self.of_value:
            self.assign(value, ("value", value))
        return self.of_value[value]

    def assign(self, value: int, key: Key) -> None:
        """Gives the SSA value the number of the expression `key`."""
        number = self.of_key.get(key)
        if number is None:
            number = self.of_key[key] = len(self.keys)
            self.keys.append(key)
        self.of_value[value] = number
        self.values.setdefault(number, value)

    def add(self, operation: Operation) -> None:
        """Numbers the result of an operator."""
        if len(operation.results) != 1:
            return
        key = self._key(operation)
        if key is not None:
            self.assign(operation.results[0], key)

    def _key(self, operation: Operation) -> Key | None:
        result = self.types[operation.results[0]]
        if operation.name == "constant":
            return _splat_key(operation.attributes["value"], result)
        operands = [self.number(v) for v in operation.operands]
        if operation.name in _SPREADS and self.keys[operands[0]][0] == "splat":
            return self.keys[operands[0]]
        if operation.name not in arithmetic.NAMES:
            return None
        attributes = dict(operation.attributes)
        if operation.name == "compare":
            attributes = {
                "direction": attributes["direction"],
                "total": attributes.get("compare_type") == "TOTALORDER",
            }
        return _node_key(operation.name, operands, result, attributes)


def _splat_key(value: Any, result: TensorType) -> Key | None:
    array = np.asarray(value)
    first = array.reshape(-1)[:1]
    if (
        array.size > 1
        and not (array.view(f"V{array.itemsize}") == first.view(f"V{array.itemsize}")).all()
    ):
        return None
    return ("splat", first.tobytes(), result.dtype) if array.size else None


def _node_key(name: str, operands: list[int], result: TensorType, attributes: dict) -> Key:
    if name in _COMMUTATIVE:
        operands = sorted(operands)
    return (name, tuple(operands), tuple(sorted(attributes.items())), result.shape, result.dtype)


@dataclass(frozen=True)
class _Builder:
    """Looks up the numbers of expressions over values of one type, adding none."""

    numbering: _Numbering
    type: TensorType

    def constant(self, value: float) -> Number:
        """The number of a constant, rounded to the type."""
        rounded = arithmetic.convert(np.float64(value).reshape(1), self.type.numpy)
        return self.numbering.of_key.get(("splat", rounded.tobytes(), self.type.dtype))

    def node(self, name: str, *operands: Number, **attributes: Any) -> Number:
        """The number of an operator of these operands."""
        known = [n for n in operands if n is not None]
        if len(known) < len(operands):
            return None
        dtype = "i1" if name == "compare" else self.type.dtype
        key = _node_key(name, known, TensorType(self.type.shape, dtype), attributes)
        return self.numbering.of_key.get(key)

    def less(self, a: Number, b: Number) -> Number:
        """a < b."""
        return self.node("compare", a, b, direction="LT", total=False)

    def polynomial(self, coefficients: tuple[float, ...], x: Number) -> Number:
        """Horner's scheme, the highest power first, started with a product."""
        first, second, *rest = coefficients
        total = self.node(
            "add", self.node("multiply", x, self.constant(first)), self.constant(second)
        )
        for c in rest:
            total = self.node("add", self.node("multiply", total, x), self.constant(c))
        return total


Pattern = Callable[[_Builder, int], Iterator[Number]]


def _logistic(b: _Builder, x: int) -> Iterator[Number]:
    one = b.constant(1)
    denominator = b.node("add", b.node("exponential", b.node("negate", x)), one)
    yield b.node("divide", one, denominator)


def _silu(b: _Builder, x: int) -> Iterator[Number]:
    yield b.node("multiply", x, b.node("logistic", x))


def _softplus(b: _Builder, x: int) -> Iterator[Number]:
    zero = b.constant(0)
    falling = b.node("exponential", b.node("negate", b.node("abs", x)))
    total = b.node("add", b.node("maximum", x, zero), b.node("log_plus_one", falling))
    for delta in (x, b.node("subtract", x, zero)):
        for undefined in (x, b.node("add", x, zero)):
            is_nan = b.node("compare", delta, delta, direction="NE", total=False)
            yield b.node("select", is_nan, undefined, total)


def _erfc(b: _Builder, x: int) -> Iterator[Number]:
    one, zero, size, square = (
        b.constant(1),
        b.constant(0),
        b.node("abs", x),
        b.node("multiply", x, x),
    )
    near = b.node("subtract", one, b.node("multiply", x, b.polynomial(_ERF_T, square)))
    exponent = b.node("negate", square)
    scale = b.node("multiply", b.node("exponential", exponent), b.node("divide", one, size))
    inverse = b.node("divide", one, square)
    series = b.node(
        "select",
        b.less(size, b.constant(2)),
        b.polynomial(_ERFC_P, inverse),
        b.polynomial(_ERFC_R, inverse),
    )
    underflow = b.less(exponent, b.constant(-_MAX_LOG))
    tail = b.node("select", underflow, zero, b.node("multiply", scale, series))
    reflected = b.node("subtract", b.constant(2), tail)
    far = b.node("select", b.less(x, zero), reflected, tail)
    yield b.node("select", b.less(size, one), near, far)


def _products(b: _Builder, factors: tuple[Number, Number, Number]) -> Iterator[Number]:
    """The three ways to multiply three factors."""
    first, second, third = factors
    for a, c, d in ((first, second, third), (first, third, second), (second, third, first)):
        yield b.node("multiply", b.node("multiply", a, c), d)


def _gelu(b: _Builder, x: int) -> Iterator[Number]:
    half, one, root = b.constant(0.5), b.constant(1), b.constant(math.sqrt(0.5))
    negated = (
        b.node("multiply", b.node("negate", x), root),
        b.node("negate", b.node("multiply", x, root)),
    )
    for argument in negated:
        yield from _products(b, (x, half, b.node("erfc", argument)))
    scaled = (b.node("multiply", x, root), b.node("divide", x, b.constant(math.sqrt(2))))
    for argument in scaled:
        yield from _products(b, (x, half, b.node("add", b.node("erf", argument), one)))


def _gelu_tanh(b: _Builder, x: int) -> Iterator[Number]:
    half, one = b.constant(0.5), b.constant(1)
    cubes = (
        b.node("multiply", b.node("multiply", x, x), x),
        b.node("power", x, b.constant(3)),
    )
    for cube in cubes:
        inner = b.node("add", x, b.node("multiply", cube, b.constant(0.044715)))
        argument = b.node("multiply", inner, b.constant(math.sqrt(2 / math.pi)))
        gate = b.node("add", b.node("tanh", argument), one)
        yield from _products(b, (x, half, gate))


_PATTERNS: dict[str, tuple[tuple[str, Pattern], ...]] = {
    "divide": (("logistic", _logistic),),
    "multiply": (("silu", _silu), ("gelu", _gelu), ("gelu_tanh", _gelu_tanh)),
    "select": (("softplus", _softplus), ("erfc", _erfc)),
}
"""By the last operator of the expansion."""

_DEPTH = {"logistic": 4, "silu": 1, "softplus": 1, "erfc": 3, "gelu": 2, "gelu_tanh": 2}
"""How far below the last operator the argument is, at most, on its shortest path."""


def _below(numbering: _Numbering, number: int, depth: int) -> Iterator[int]:
    """Numbers of the expression's parts down to `depth`, nearest first, each once."""
    seen, level = {number}, [number]
    for _ in range(depth):
        level = [
            o
            for n in level
            if len(numbering.keys[n]) == 5
            for o in numbering.keys[n][1]
            if numbering.keys[o][0] != "splat"
        ]
        fresh = [n for n in dict.fromkeys(level) if n not in seen]
        seen.update(fresh)
        yield from fresh


def _match(numbering: _Numbering, operation: Operation) -> tuple[str, int] | None:
    """The function that the operator completes and its argument's SSA value."""
    result = operation.results[0]
    kind, number = numbering.types[result], numbering.of_value[result]
    builder = _Builder(numbering, kind)
    for name, pattern in _PATTERNS.get(operation.name, ()):
        for x in _below(numbering, number, _DEPTH[name]):
            value = numbering.values[x]
            if numbering.types[value] == kind and number in pattern(builder, x):
                return name, value
    return None


def _unwidened(numbering: _Numbering, operation: Operation) -> Operation:
    """A function of a widened narrow float, narrowed again: the function of the narrow type."""
    if operation.name != "convert":
        return operation
    outer = numbering.keys[numbering.number(operation.operands[0])]
    if outer[0] not in ("erfc", "erf", "logistic") or len(outer) != 5:
        return operation
    inner = numbering.keys[outer[1][0]]
    if inner[0] != "convert" or outer[4] != "f32":
        return operation
    source = numbering.values[inner[1][0]]
    if numbering.types[source] != numbering.types[operation.results[0]]:
        return operation
    return replace(operation, name=outer[0], operands=(source,), attributes={})


def _rewritten(numbering: _Numbering, block: Block) -> Block:
    operations = []
    for operation in block.operations:
        if operation.name in CONTROL_FLOW:
            inner = tuple(_rewritten(numbering.nested(), r) for r in operation.regions)
            operation = replace(operation, regions=inner)
        operation = _unwidened(numbering, operation)
        numbering.add(operation)
        found = _match(numbering, operation) if operation.name in _PATTERNS else None
        if found is not None:
            name, argument = found
            operation = replace(operation, name=name, operands=(argument,), attributes={})
            numbering.add(operation)
        operations.append(operation)
    return replace(block, operations=tuple(operations))


def _used(operation: Operation) -> Iterator[int]:
    """Every value that an operator reads, in its regions too."""
    yield from operation.operands
    for region in operation.regions:
        yield from region.returns
        for inner in region.operations:
            yield from _used(inner)


def _pure(operation: Operation) -> bool:
    inner = (o for region in operation.regions for o in region.walk())
    return operation.name in _PURE and all(o.name in _PURE for o in inner)


def _without_dead(block: Block) -> Block:
    live, kept = set(block.returns), []
    for operation in reversed(block.operations):
        if _pure(operation) and live.isdisjoint(operation.results):
            continue
        if operation.name in CONTROL_FLOW:
            regions = tuple(_without_dead(r) for r in operation.regions)
            operation = replace(operation, regions=regions)
        live.update(_used(operation))
        kept.append(operation)
    return replace(block, operations=tuple(kept[::-1]))


def recognise(module: Module) -> Module:
    """The module with expanded logistic, silu, softplus, erfc, gelu and gelu_tanh as one operator.

    Control-flow regions are rewritten too. Operators whose results nobody uses are removed, except
    collectives.
    """
    rewritten = _rewritten(_Numbering(module.types), module.body)
    return replace(module, body=_without_dead(rewritten))
