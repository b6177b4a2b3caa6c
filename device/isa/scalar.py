"""The Scalar engine: functions of one tensor, from a table."""

from dataclasses import dataclass

import numpy as np

from ..arithmetic import apply, convert
from ..chip import Chip
from ..memory import View
from .base import HALVES, Instruction, lane_cycles
from .vector import Scalar, check_scalar, column, views_of

FUNCTIONS = {
    "copy": "", "abs": "", "negate": "", "relu": "", "sign": "", "square": "",
    "floor": "", "ceil": "", "round_nearest_even": "", "round_nearest_afz": "",
    "exponential": "exponential", "exponential_minus_one": "exponential",
    "log": "log", "log_plus_one": "log",
    "tanh": "tanh", "logistic": "logistic", "silu": "silu", "softplus": "softplus",
    "erf": "erf", "gelu": "gelu", "gelu_tanh": "gelu_tanh",
    "gelu_dx": "gelu", "gelu_tanh_dx": "gelu_tanh", "silu_dx": "silu",
    "sqrt": "sqrt", "rsqrt": "rsqrt", "reciprocal": "reciprocal", "cbrt": "cbrt",
    "sine": "trigonometry", "cosine": "trigonometry", "tan": "trigonometry",
}  # fmt: skip
"""Functions, and the table each needs; those with none are part of every table.

Which functions share a table is not published. One table per family is assumed. The documents name
gelu_dx and silu_dx (nki.language); gelu_tanh_dx, to go with gelu_tanh, is assumed.
"""

_FLOAT32 = np.dtype(np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class Activation(Instruction):
    """dst = function(src * scale + bias), in float32; scale and bias numbers or [P, 1] views.

    With `reduce` ([P, 1]) the float32 results are also summed along the free axes into it.
    Cost: N cycles, 64 more with `reduce`; a change of table costs its load (the core adds it).
    """

    dst: View
    src: View
    function: str
    scale: Scalar = 1.0
    bias: Scalar = 0.0
    reduce: View | None = None
    engine = "scalar"

    @property
    def table(self) -> str:  # type: ignore[override]
        """The table that the function needs, or an empty string."""
        return FUNCTIONS[self.function]

    def reads(self) -> tuple[View, ...]:
        return (self.src, *views_of(self.scale, self.bias))

    def writes(self) -> tuple[View, ...]:
        return (self.dst,) if self.reduce is None else (self.dst, self.reduce)

    def check(self, chip: Chip) -> None:
        if self.function not in FUNCTIONS:
            raise self.illegal(f"function is {self.function}; allowed: {', '.join(FUNCTIONS)}")
        self.check_place(chip, "dst", self.dst)
        self.check_place(chip, "src", self.src)
        self.check_same("src", self.src, "dst", self.dst)
        check_scalar(self, chip, "scale", self.scale, ("sbuf", "psum"))
        check_scalar(self, chip, "bias", self.bias, ("sbuf", "psum"))
        if self.reduce is not None:
            self.check_place(chip, "reduce", self.reduce)
            self.check_column("reduce", self.reduce, self.dst.shape[0])

    def cycles(self, chip: Chip) -> int:
        elements: float = self.dst.free
        if self.function == "copy" and self.src.dtype in HALVES and self.dst.dtype in HALVES:
            elements = elements / chip.scalar_fast_factor
        cycles = lane_cycles(chip, elements, self.src, self.dst)
        return cycles if self.reduce is None else cycles + chip.activation_reduce_cycles

    def execute(self) -> None:
        src, dst = self.src.array, self.dst.array
        value = src
        if isinstance(self.scale, View) or self.scale != 1:
            value = apply("multiply", value, column(self.scale, src), out=_FLOAT32)
        if isinstance(self.bias, View) or self.bias != 0:
            value = apply("add", value, column(self.bias, src), out=_FLOAT32)
        if self.reduce is None:
            dst[...] = _function(self.function, value, dst.dtype)
            return
        value = _function(self.function, value, _FLOAT32)
        total = value.sum(axis=tuple(range(1, value.ndim)), dtype=_FLOAT32)
        self.reduce.array[...] = total.reshape(self.reduce.shape)
        dst[...] = convert(value, dst.dtype)


def _function(name: str, x: np.ndarray, out: np.dtype) -> np.ndarray:
    if name == "copy":
        return convert(x, out)
    x = convert(x, _FLOAT32)
    if name == "square":
        return convert(np.square(x), out)
    if name == "reciprocal":
        return convert(np.reciprocal(x), out)
    return apply(name, x, out=out)
