"""A value in memory seen through transposes and reshapes: a shape with element strides."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .ir import TensorType


@dataclass(frozen=True, slots=True)
class Strided:
    """`value`'s dense array read with `shape` and `strides` (in elements)."""

    value: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @staticmethod
    def dense(value: int, kind: TensorType) -> "Strided":
        """Row-major order."""
        strides, inner = [], 1
        for extent in reversed(kind.shape):
            strides.append(inner)
            inner *= extent
        return Strided(value, kind.shape, tuple(reversed(strides)))

    def transposed(self, permutation: Sequence[int]) -> "Strided":
        """Axes in another order."""
        return Strided(
            self.value,
            tuple(self.shape[d] for d in permutation),
            tuple(self.strides[d] for d in permutation),
        )

    def reshaped(self, shape: Sequence[int]) -> "Strided | None":
        """The same elements in another shape, or None where that needs a copy."""
        if tuple(shape) == self.shape:
            return self
        if math.prod(shape) == 0:
            return Strided(self.value, tuple(shape), (0,) * len(shape))
        runs = coalesce(zip(self.shape, self.strides, strict=True))
        strides: list[int] = []
        for extent in reversed(shape):
            if extent == 1:
                strides.append(0)
                continue
            if not runs or runs[-1][0] % extent:
                return None
            length, stride = runs.pop()
            strides.append(stride)
            if length > extent:
                runs.append((length // extent, stride * extent))
        return Strided(self.value, tuple(shape), tuple(reversed(strides)))

    def view(self, array: np.ndarray) -> np.ndarray:
        """A numpy view of the dense `array`."""
        flat = array.reshape(-1)
        size = flat.itemsize
        return np.lib.stride_tricks.as_strided(
            flat, self.shape, tuple(s * size for s in self.strides), writeable=False
        )


def coalesce(axes: "Sequence[tuple[int, int]] | zip[tuple[int, int]]") -> list[tuple[int, int]]:
    """(extent, stride) pairs with neighbours that form one longer axis merged."""
    runs: list[tuple[int, int]] = []
    for extent, stride in axes:
        if extent == 1:
            continue
        if runs and runs[-1][1] == stride * extent:
            runs[-1] = (runs[-1][0] * extent, stride)
        else:
            runs.append((extent, stride))
    return runs
