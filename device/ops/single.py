"""Kernels of one operator, evaluated by its reference semantics."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .evaluate import evaluate
from .group import Node
from .ir import Operation, TensorType
from .kernel import Kernel, Part, split, whole


@dataclass(frozen=True, kw_only=True, eq=False)
class SingleKernel(Kernel):
    """One operator. `sources[i]` is the value that holds the data of operand i; operands in
    `constants` are scalars that travel with the kernel. `types` has the operator's own values."""

    sources: tuple[int, ...]
    targets: tuple[int, ...]
    constants: dict[int, np.ndarray] = field(default_factory=dict)

    @property
    def operation(self) -> Operation:
        """The operator."""
        return self.operations[0]

    @property
    def attributes(self) -> dict[str, Any]:
        """The operator's attributes."""
        return self.operations[0].attributes

    def operand_type(self, i: int) -> TensorType:
        """Type of operand i at this use."""
        return self.types[self.operation.operands[i]]

    @property
    def result_type(self) -> TensorType:
        """Type of the first result."""
        return self.types[self.operation.results[0]]

    def operand(self, i: int, arrays: Mapping[int, np.ndarray]) -> np.ndarray:
        """Operand i in its shape at this use: a view of the source's array."""
        value, kind = self.operation.operands[i], self.operand_type(i)
        if value in self.constants:
            return np.broadcast_to(self.constants[value], kind.shape)
        return arrays[self.sources[i]].reshape(kind.shape)

    def operand_arrays(self, arrays: Mapping[int, np.ndarray]) -> list[np.ndarray]:
        """All operands."""
        return [self.operand(i, arrays) for i in range(len(self.sources))]

    def target(self, i: int, arrays: Mapping[int, np.ndarray]) -> np.ndarray:
        """Result i's array in its shape at this use."""
        return arrays[self.targets[i]].reshape(self.types[self.operation.results[i]].shape)

    def part(self, core: int, cores: int) -> Part:
        return whole(1, core, cores)

    def evaluate(self, arrays: Mapping[int, np.ndarray], part: Part) -> None:
        if part.empty:
            return
        results = evaluate(self.operation, self.operand_arrays(arrays), self.types)  # type: ignore[arg-type]
        for i, result in enumerate(results):
            np.copyto(self.target(i, arrays), result)


@dataclass(frozen=True, kw_only=True, eq=False)
class RowSplitKernel(SingleKernel):
    """A kernel whose result can be computed row by row: `split_axis` is the result's first axis
    longer than one, and a part is a range of it."""

    @property
    def split_axis(self) -> int:
        """First axis of the result with more than one element; 0 for scalars."""
        shape = self.result_type.shape
        return next((d for d, extent in enumerate(shape) if extent > 1), 0)

    @property
    def extent(self) -> int:
        """Length of the split axis."""
        shape = self.result_type.shape
        return shape[self.split_axis] if shape else 1

    @property
    def inner(self) -> int:
        """Elements of the result per step of the split axis."""
        return self.result_type.size // max(1, self.extent)

    def part(self, core: int, cores: int) -> Part:
        if self.extent < 2:
            return whole(self.extent, core, cores)
        return split(self.extent, core, cores, "rows")

    def writes(self, part: Part) -> dict[int, tuple[int, int]]:
        if part.empty:
            return {}
        return {self.targets[0]: (part.start * self.inner, part.stop * self.inner)}


def single_fields(
    node: Node, constants: Mapping[int, np.ndarray], types: Sequence[TensorType]
) -> dict[str, Any]:
    """Fields of a SingleKernel for `node`."""
    operation = node.operation
    known = dict(zip(operation.operands, node.operand_types, strict=True))
    known |= dict(zip(operation.results, node.result_types, strict=True))
    for region in operation.regions:
        inner = [*region.arguments, *(v for o in region.walk() for v in (*o.operands, *o.results))]
        known |= {v: types[v] for v in inner}
    for value, kind in zip((*node.operands, *node.results),
                           (*node.operand_types, *node.result_types), strict=True):  # fmt: skip
        known.setdefault(value, kind)
    read = [v for o, v in zip(operation.operands, node.operands, strict=True) if o not in constants]
    return {
        "name": operation.name,
        "operations": (operation,),
        "inputs": tuple(dict.fromkeys(read)),
        "outputs": node.results,
        "types": known,
        "location": operation.location,
        "sources": node.operands,
        "targets": node.results,
        "constants": dict(constants),
    }
