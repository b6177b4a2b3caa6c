"""A core with tiles of given values, for tests of single instructions."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from trnsim.device.chip import load_chip
from trnsim.device.core import Core
from trnsim.device.dtypes import dtype_name, numpy_dtype
from trnsim.device.errors import IllegalInstruction
from trnsim.device.memory import View

TRN1, TRN2, TRN3 = load_chip("trn1"), load_chip("trn2"), load_chip("trn3")
RNG = np.random.default_rng(0)
BF16 = ml_dtypes.bfloat16


class Bench:
    """A core, and tiles with given values on it."""

    def __init__(self, chip=TRN2) -> None:
        self.core = Core(chip)

    def put(self, values, dtype: str | None = None, space: str = "sbuf") -> View:
        """A tensor with these values."""
        values = np.asarray(values)
        if values.dtype == np.float64:
            values = values.astype(np.float32)
        name = dtype or dtype_name(values.dtype)
        view = getattr(self.core, space).allocate(values.shape, name, "tile")
        view.array[...] = values.astype(numpy_dtype(name))
        return view

    def new(self, shape, dtype: str = "f32", space: str = "sbuf") -> View:
        """A tensor whose values do not matter."""
        return getattr(self.core, space).allocate(shape, dtype, "out")

    def run(self, instruction, *outputs: View) -> Any:
        """Issues it; the values of its outputs (all it writes without names)."""
        self.core.issue(instruction)
        found = [view.array.copy() for view in (outputs or instruction.writes())]
        return found[0] if len(found) == 1 else found

    def cycles(self, instruction) -> int:
        """Its cost."""
        return instruction.cycles(self.core.chip)


def refuses(bench: Bench, instruction, message: str) -> None:
    """The chip refuses the instruction with a message that has this in it."""
    with pytest.raises(IllegalInstruction, match=message):
        bench.core.issue(instruction)


def rand(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


BINARY = {
    "add": np.add, "subtract": np.subtract, "multiply": np.multiply, "maximum": np.maximum,
    "minimum": np.minimum, "equal": np.equal, "not_equal": np.not_equal, "less": np.less,
    "less_equal": np.less_equal, "greater": np.greater, "greater_equal": np.greater_equal,
    "logical_and": np.logical_and, "logical_or": np.logical_or, "logical_xor": np.logical_xor,
    "abs_max": lambda a, b: np.maximum(abs(a), abs(b)),
    "abs_min": lambda a, b: np.minimum(abs(a), abs(b)),
}  # fmt: skip
"""Binary operators by the names of instructions."""
