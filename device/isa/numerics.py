"""Numerics of the engines, as a kernel sees them (nki.api.shared.rst, nki/api/nki/isa docstrings).

Arithmetic operators take operands to float32, compute there, and round once on write: to nearest
even, integers saturating and NaN to 0. Bitwise operators work on the bits of integers. GpSimd adds
and multiplies 32-bit integers exactly.

The instructions of `vector`, `scalar` and `tensor` compute with integers as StableHLO asks of a
compiler; those of `lanes`, `activations` and the like with the functions of this file.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from .. import special
from ..arithmetic import convert, is_float
from ..memory import View

FLOAT32 = np.dtype(np.float32)
_PI = np.float32(np.pi)


def load(view: View) -> np.ndarray:
    """The view's values as float32."""
    array = view.array
    return array if array.dtype == FLOAT32 else convert(array, FLOAT32)


def cast(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Values in another dtype as an engine writes them: through float32, nearest even, saturating.

    Integers to integers of the same width keep their bits.
    """
    if values.dtype == dtype:
        return values
    if is_float(dtype) or dtype == np.bool_:
        return convert(values, dtype)
    if values.dtype.kind == "b":
        return values.astype(dtype)
    with np.errstate(all="ignore"):
        wide = np.rint(convert(values, np.dtype(np.float64)))
        limits = np.iinfo(dtype)
        return np.nan_to_num(np.clip(wide, limits.min, limits.max), nan=0.0).astype(dtype)


def store(view: View, values: np.ndarray) -> None:
    """Writes values to a view, reshaped to it (as many elements per partition) and rounded."""
    array = view.array
    if values.shape != array.shape:
        values = values.reshape(array.shape)
    array[...] = values if values.dtype == array.dtype else cast(values, array.dtype)


def to_tfloat32(values: np.ndarray) -> np.ndarray:
    """Float32 rounded to nearest even at 10 bits of mantissa."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + 0xFFF + ((bits >> 13) & 1)) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(values), rounded.view(np.float32), values)


# ---- operators -----------------------------------------------------------------------------


def _truth(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    def operator(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return function(a, b).astype(np.float32)

    return operator


def _shift_right(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Logical: zeros come in from the left."""
    unsigned = np.dtype(f"u{a.dtype.itemsize}")
    return (a.view(unsigned) >> b.astype(unsigned)).view(a.dtype)


ARITHMETIC: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add, "subtract": np.subtract, "multiply": np.multiply,
    "maximum": np.maximum, "minimum": np.minimum, "power": np.power,
    "equal": _truth(np.equal), "not_equal": _truth(np.not_equal),
    "less": _truth(np.less), "less_equal": _truth(np.less_equal),
    "greater": _truth(np.greater), "greater_equal": _truth(np.greater_equal),
    "logical_and": _truth(np.logical_and), "logical_or": _truth(np.logical_or),
    "logical_xor": _truth(np.logical_xor),
    "divide": np.divide, "fmod": np.fmod, "mod": np.mod,  # nki.language only: no engine has them
    "abs_max": lambda a, b: np.maximum(np.abs(a), np.abs(b)),
    "abs_min": lambda a, b: np.minimum(np.abs(a), np.abs(b)),
}  # fmt: skip
"""Binary operators on float32; comparisons give 1 or 0."""

BITWISE: dict[str, Callable[..., np.ndarray]] = {
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "shift_left": lambda a, b: np.left_shift(a, b.astype(a.dtype)),
    "shift_right_logical": _shift_right,
}  # fmt: skip
"""Binary operators on the bits of integers."""

UNARY: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "bypass": lambda x: x,
    "abs": np.abs,
    "square": np.square,
    "relu": lambda x: np.maximum(x, np.float32(0)),
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "reciprocal": np.reciprocal,
    "not": np.invert,
}
"""Operators that take no operand; `not` is bitwise."""

COMPARISONS = ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")

REDUCTIONS: dict[str, tuple[np.ufunc, float]] = {
    "add": (np.add, 0.0), "multiply": (np.multiply, 1.0), "subtract": (np.add, 0.0),
    "maximum": (np.maximum, -np.inf), "minimum": (np.minimum, np.inf),
    "abs_max": (np.maximum, 0.0), "abs_min": (np.minimum, np.inf),
    "logical_and": (np.logical_and, 1.0), "logical_or": (np.logical_or, 0.0),
    "logical_xor": (np.logical_xor, 0.0),
}  # fmt: skip
"""Reductions in float32: the function along a row, and what they start from."""

BITWISE_REDUCTIONS: dict[str, np.ufunc] = {
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip


def is_bitwise(op: str) -> bool:
    """Whether the operator works on bits, not on float32 values."""
    return op in BITWISE or op == "not"


def operate(op: str, a: np.ndarray, b: np.ndarray | float | int) -> np.ndarray:
    """`a op b` on float32 values, or on the bits of integers."""
    function = ARITHMETIC.get(op)
    if function is not None:
        return function(a, np.float32(b) if isinstance(b, int | float) else b)
    if isinstance(b, int | float):
        b = np.asarray(int(b) & ((1 << (8 * a.dtype.itemsize)) - 1)).astype(a.dtype)
    return BITWISE[op](a, b if op.startswith("shift") else b.astype(a.dtype))


def reduce_rows(op: str, values: np.ndarray, keep: int = 1) -> np.ndarray:
    """Float32 values reduced along all axes from `keep` on.

    `subtract` is the first element less all others, as an engine's accumulator does it.
    """
    rows = values.reshape(*values.shape[:keep], -1)
    if op == "subtract":
        return rows[..., 0] - rows[..., 1:].sum(axis=-1, dtype=np.float32)
    if op in ("abs_max", "abs_min"):
        rows = np.abs(rows)
    ufunc, start = REDUCTIONS[op]
    if op.startswith("logical"):
        return ufunc.reduce(rows != 0, axis=-1).astype(np.float32)
    return ufunc.reduce(rows, axis=-1, dtype=np.float32, initial=np.float32(start))


# ---- functions of the Scalar engine --------------------------------------------------------


def sine(x: np.ndarray) -> np.ndarray:
    """sin, and outside [-pi, pi] the cubic of its last piece: the engine reduces no argument.

    sin(9.0) is 27.65 (nki.api.shared.rst), which is d^3 / 6 - d at d = 9 - pi.
    """
    beyond = np.abs(x) - _PI
    cubic = np.sign(x) * (beyond * beyond * beyond / np.float32(6) - beyond)
    return np.where(beyond > 0, cubic, np.sin(x)).astype(np.float32)


_GELU_SIGMOID = np.float32(1.702)


def _gelu_sigmoid(x: np.ndarray) -> np.ndarray:
    return x * special.logistic(_GELU_SIGMOID * x)


def _gelu_sigmoid_dx(x: np.ndarray) -> np.ndarray:
    s = special.logistic(_GELU_SIGMOID * x)
    return s + _GELU_SIGMOID * x * s * (1 - s)


ACTIVATIONS: dict[str, tuple[Callable[[np.ndarray], np.ndarray], str]] = {
    "copy": (lambda x: x, ""),
    "square": (np.square, ""),
    "relu": (UNARY["relu"], ""),
    "abs": (np.abs, ""),
    "sign": (np.sign, ""),
    "prelu": (lambda x: x, ""),  # its parameter is an operand of Activation
    "exponential": (np.exp, "exponential"),
    "log": (np.log, "log"),
    "tanh": (np.tanh, "tanh"),
    "logistic": (special.logistic, "logistic"),
    "silu": (special.silu, "silu"),
    "silu_dx": (special.silu_dx, "silu"),
    "softplus": (special.softplus, "softplus"),
    "mish": (lambda x: x * np.tanh(special.softplus(x)), "softplus"),
    "erf": (special.erf, "erf"),
    "erf_dx": (lambda x: np.float32(2 / np.sqrt(np.pi)) * np.exp(-x * x), "erf"),
    "gelu": (special.gelu, "gelu"),
    "gelu_dx": (special.gelu_dx, "gelu"),
    "gelu_tanh": (special.gelu_tanh, "gelu_tanh"),
    "gelu_sigmoid": (_gelu_sigmoid, "gelu"),
    "gelu_sigmoid_dx": (_gelu_sigmoid_dx, "gelu"),
    "sqrt": (np.sqrt, "sqrt"),
    "rsqrt": (UNARY["rsqrt"], "rsqrt"),
    "reciprocal": (np.reciprocal, "reciprocal"),
    "sine": (sine, "trigonometry"),
    "arctan": (np.arctan, "trigonometry"),
    "cosine": (np.cos, "trigonometry"),
    "tan": (np.tan, "trigonometry"),
    "negate": (np.negative, ""),
    "floor": (np.floor, ""),
    "ceil": (np.ceil, ""),
    "trunc": (np.trunc, ""),
}
"""Functions of the Scalar engine in float32, and the table each needs (assumed, as in scalar.py).

The last six are for nki.language: nisa.activation does not have them. Values outside the published
input ranges are computed as if inside, but for `sine`.
"""


# ---- accumulators --------------------------------------------------------------------------

LANES = 128


class Accumulators:
    """The accumulator registers of an engine: one float32 for each lane, kept between instructions.

    `values` are NaN until an instruction resets or loads them.
    """

    def __init__(self) -> None:
        self.values = np.full(LANES, np.nan, np.float32)

    def accumulate(
        self, lanes: slice, command: str, op: str, results: np.ndarray | None, start: Any = None
    ) -> None:
        """One instruction's `reduce_cmd`.

        `reset` and `reset_reduce` start from the identity of `op`, `load_reduce` from `start`,
        `reduce` goes on; all but `reset` then take the rows of `results` in.
        """
        ufunc, identity = REDUCTIONS[op]
        register = self.values[lanes]
        if command in ("reset", "reset_reduce"):
            register[...] = identity
        elif command == "load_reduce":
            register[...] = start
        if command in ("reduce", "reset_reduce", "load_reduce") and results is not None:
            if op == "abs_max" or op == "abs_min":
                register[...] = np.abs(register)
            register[...] = ufunc(register, reduce_rows(op, results))


REDUCE_COMMANDS = ("idle", "reset", "reduce", "reset_reduce", "load_reduce")
