"""Operator programs: StableHLO as plain data.

A `Module` is one rank's program: single static assignment, values numbered across the whole
module (regions included), types in one list. Calls are inlined and tuples flattened by the front
end. Attributes are plain data: int, float, str, bool, tuple, numpy array.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..dtypes import numpy_dtype


@dataclass(frozen=True, slots=True)
class TensorType:
    """Shape and StableHLO element type of a value."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def numpy(self) -> np.dtype:
        """The element type as a numpy dtype."""
        return numpy_dtype(self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of a dense array of this type."""
        return self.size * self.numpy.itemsize


@dataclass(frozen=True, slots=True)
class Operation:
    """One StableHLO operator: its name without dialect, operand and result values, attributes.

    `location` is the source line that the front end recorded (`file.py:12`), or empty.
    """

    name: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    attributes: dict[str, Any] = field(default_factory=dict)
    regions: "tuple[Block, ...]" = ()
    location: str = ""


@dataclass(frozen=True, slots=True)
class Block:
    """A straight line of operators with arguments and returned values."""

    arguments: tuple[int, ...]
    operations: tuple[Operation, ...]
    returns: tuple[int, ...]

    def walk(self) -> Iterator[Operation]:
        """Every operator of the block and of the regions below it, in order."""
        for operation in self.operations:
            yield operation
            for region in operation.regions:
                yield from region.walk()


@dataclass(frozen=True, slots=True)
class Module:
    """One rank's operator program; `types[v]` is the type of value `v`."""

    name: str
    types: tuple[TensorType, ...]
    body: Block
