"""Neighbouring operators of a rowwise kernel as one instruction, and which engine runs it.

The instruction set has two operators in one TensorScalar, a scalar operator before a two-tensor
one in ScalarTensorTensor, and a scale or bias inside Activation. Only float32 intermediates that
nobody else reads disappear in this way, for the engines keep them in float32 too. Operators with
one tensor input go to Vector or Scalar, whichever has less to do.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..dtypes import is_float
from ..isa.scalar import FUNCTIONS
from ..isa.vector import BINARY
from .engines import COMPARE, MIRRORED
from .ir import Operation, TensorType

ALIASES = ("broadcast_in_dim", "copy", "bitcast_convert")


class Peephole:
    """One pass over the operators. `wide` values are full tiles, `narrow` ones fit an instruction's
    scalar operand."""

    def __init__(
        self,
        operations: Sequence[Operation],
        types: Mapping[int, TensorType],
        root: Mapping[int, int],
        wide: set[int],
        narrow: set[int],
        outputs: Sequence[int],
    ) -> None:
        self.operations, self.types, self.root = operations, types, root
        self.wide, self.narrow = wide, narrow
        self.made: dict[int, Operation] = {}
        self.uses: dict[int, int] = {root[v]: 2 for v in outputs}
        for operation in operations:
            if operation.name not in ALIASES:
                for value in operation.operands:
                    self.uses[root[value]] = self.uses.get(root[value], 0) + 1
        self.gone: set[int] = set()
        self.load = {"vector": 0.0, "scalar": 0.0}

    def run(self) -> tuple[Operation, ...]:
        """The operators with neighbours joined."""
        joined = []
        for operation in self.operations:
            result = operation.results[0]
            if self.root[result] == result and result in self.wide:
                operation = self._join(operation)
            self.made[result] = operation
            joined.append(operation)
        kept = [o for o in joined if o.results[0] not in self.gone]
        return tuple(self._placed(o) for o in kept)

    # ---- joining ----

    def _is_f32(self, value: int) -> bool:
        return self.types[value].dtype == "f32"

    def _inner(self, value: int) -> Operation | None:
        """The operator that makes an intermediate that can disappear."""
        source = self.root[value]
        same = self.types[source].dtype == self.types[value].dtype == "f32"
        if same and source in self.wide and self.uses.get(source) == 1:
            return self.made.get(source)
        return None

    def _join(self, operation: Operation) -> Operation:
        name = operation.name
        floats = all(is_float(self.types[v].dtype) for v in operation.operands)
        if name in FUNCTIONS and len(operation.operands) == 1 and floats:
            return self._activation(operation)
        if (
            name == "compare"
            and floats
            and operation.attributes.get("compare_type") != "TOTALORDER"
        ):
            op = COMPARE[operation.attributes["direction"]]
        elif name in BINARY and name != "power" and floats:
            op = name
        else:
            return operation
        return self._binary(operation, op)

    def _activation(self, operation: Operation) -> Operation:
        (operand,) = operation.operands
        inner = self._inner(operand)
        plain = self._new(operation, "activate", (operand,), function=operation.name)
        if inner is None or inner.name != "tensor_scalar" or "op1" in inner.attributes:
            return plain
        op, reverse = inner.attributes["op0"], inner.attributes["reverse0"]
        if op == "multiply":
            role, negate = "scale", False
        elif op == "add" or (op == "subtract" and not reverse):
            role, negate = "bias", op == "subtract"
        else:
            return plain
        self.gone.add(self.root[operand])
        return self._new(
            operation, "activate", inner.operands,
            function=operation.name, role=role, negate=negate,
        )  # fmt: skip

    def _binary(self, operation: Operation, op: str) -> Operation:
        a, b = (self.root[v] for v in operation.operands)
        left, right = operation.operands
        if a == b and a in self.wide and op == "multiply" and self._is_f32(left):
            return self._new(operation, "activate", (left,), function="square")
        if a in self.wide and b in self.narrow:
            return self._scalar(operation, op, left, right, False)
        if b in self.wide and a in self.narrow:
            return self._scalar(operation, op, right, left, op not in MIRRORED)
        if a in self.wide and b in self.wide:
            return self._two(operation, op, left, right)
        return operation

    def _scalar(
        self, operation: Operation, op: str, tensor: int, scalar: int, reverse: bool
    ) -> Operation:
        inner = self._inner(tensor)
        if inner is not None and inner.name == "tensor_scalar" and "op1" not in inner.attributes:
            self.gone.add(self.root[tensor])
            return self._new(
                operation, "tensor_scalar", (*inner.operands, scalar),
                **inner.attributes, op1=op, reverse1=reverse,
            )  # fmt: skip
        return self._new(operation, "tensor_scalar", (tensor, scalar), op0=op, reverse0=reverse)

    def _two(self, operation: Operation, op: str, left: int, right: int) -> Operation:
        for tensor, other, swapped in ((left, right, False), (right, left, True)):
            inner = self._inner(tensor)
            if inner is None or inner.name != "tensor_scalar" or "op1" in inner.attributes:
                continue
            self.gone.add(self.root[tensor])
            return self._new(
                operation, "scalar_tensor_tensor", (*inner.operands, other),
                **inner.attributes, op1=op, reverse1=swapped and op not in MIRRORED,
            )  # fmt: skip
        return operation

    def _new(
        self, operation: Operation, name: str, operands: tuple[int, ...], **attributes: Any
    ) -> Operation:
        return replace(operation, name=name, operands=operands, attributes=attributes)

    # ---- engines ----

    def _placed(self, operation: Operation) -> Operation:
        """One-input operators on the engine with less to do; others where they have to be."""
        result = operation.results[0]
        if operation.name == "reduce":
            wide = self.root[operation.operands[0]] in self.wide
            self.load["vector"] += wide
        if self.root[result] != result or result not in self.wide:
            return operation
        if operation.name == "activate":
            self.load["scalar"] += 1
        elif operation.name == "tensor_scalar":
            engine = min(self.load, key=lambda e: (self.load[e], e != "vector"))
            self.load[engine] += 1
            return replace(operation, attributes={**operation.attributes, "engine": engine})
        elif operation.name not in ("iota", "constant"):
            self.load["vector"] += max(1, len(operation.operands))
        return operation
