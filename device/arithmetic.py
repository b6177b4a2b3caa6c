"""Elementwise numerics and reductions by StableHLO name, for operators and instructions.

Semantics follow StableHLO as XLA evaluates it on a CPU: integers wrap; integer division truncates
toward zero, by zero it gives -1 (all ones) and the remainder gives the dividend; shifts by the
width or more shift everything out; maximum and minimum propagate NaN; conversion to an integer
saturates and takes NaN to zero. Floats narrower than 32 bits compute in float32 and round once,
to nearest even, when the result is written; float32 and float64 compute in their own type.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from . import special
from .errors import Unsupported

_FLOAT32, _FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
_FLOAT8 = frozenset(
    np.dtype(kind)
    for kind in (
        ml_dtypes.float8_e4m3, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2,
        ml_dtypes.float8_e3m4,
    )
)  # fmt: skip
_NARROW = frozenset({np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)}) | _FLOAT8
_INT4, _UINT4 = np.dtype(ml_dtypes.int4), np.dtype(ml_dtypes.uint4)


def is_float(dtype: np.dtype) -> bool:
    """Whether the dtype is floating point, ml_dtypes included."""
    return dtype.kind == "f" or dtype in _NARROW


def compute_dtype(dtype: np.dtype) -> np.dtype:
    """The type in which values of `dtype` are computed."""
    if dtype in _NARROW:
        return _FLOAT32
    if dtype in (_INT4, _UINT4):
        return np.dtype(np.int8 if dtype == _INT4 else np.uint8)
    return dtype


# ---- conversion ----------------------------------------------------------------------------

_float8_tables: dict[tuple[np.dtype, str], np.ndarray] = {}


def _float8_table(dtype: np.dtype, way: str) -> np.ndarray:
    """All values of an 8-bit float as float32, or of all bfloat16 bit patterns as 8-bit float."""
    table = _float8_tables.get((dtype, way))
    if table is None:
        if way == "up":
            table = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
        else:
            patterns = np.arange(1 << 16, dtype=np.uint32) << 16
            table = patterns.view(np.float32).astype(dtype)
        _float8_tables[dtype, way] = table
    return table


def _to_float8(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Rounds float32 to nearest even: to odd in bfloat16 first, which keeps the second exact."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    key = (bits >> 16).astype(np.uint16)
    key |= (bits & 0xFFFF).astype(bool)
    return _float8_table(dtype, "down")[key]


def _float_to_integer(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    limits = np.iinfo(dtype)
    wide = np.trunc(x.astype(np.float64))
    result = wide.astype(dtype)
    result = np.where(wide <= limits.min, dtype.type(limits.min), result)
    result = np.where(wide >= float(limits.max), dtype.type(limits.max), result)
    return np.where(np.isnan(wide), dtype.type(0), result)


def _convert(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    if x.dtype == dtype:
        return x
    if x.dtype in _FLOAT8:
        x = _float8_table(x.dtype, "up")[x.view(np.uint8)]
    elif x.dtype in _NARROW or x.dtype in (_INT4, _UINT4):
        x = x.astype(compute_dtype(x.dtype))
    if dtype == np.bool_:
        return x != 0
    if dtype in _FLOAT8:
        return _to_float8(x.astype(np.float32, copy=False), dtype)
    if dtype in _NARROW:
        return x.astype(np.float32, copy=False).astype(dtype)
    if is_float(x.dtype) and dtype.kind != "f":
        if dtype in (_INT4, _UINT4):
            low, high = (-8, 7) if dtype == _INT4 else (0, 15)
            return np.clip(_float_to_integer(x, compute_dtype(dtype)), low, high).astype(dtype)
        return _float_to_integer(x, dtype)
    return x.astype(dtype, copy=False)


def convert(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """`x` in another element type; `x` itself if it has the type. Integers wrap."""
    with np.errstate(all="ignore"):
        return _convert(x, dtype)


# ---- the functions, on operands already in their compute type ------------------------------


def _bits(x: np.ndarray) -> int:
    return 8 * x.dtype.itemsize


def _floats_or_integers(
    floats: Callable[..., np.ndarray], integers: Callable[..., np.ndarray]
) -> Callable[..., np.ndarray]:
    def function(x: np.ndarray, *others: np.ndarray) -> np.ndarray:
        return (floats if x.dtype.kind == "f" else integers)(x, *others)

    return function


def _subtract(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.logical_xor(a, b) if a.dtype == np.bool_ else np.subtract(a, b)


def _integer_divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    zero = b == 0
    safe = np.where(zero, b.dtype.type(1), b)
    quotient = np.floor_divide(a, safe)
    if a.dtype.kind == "i":
        rest = a - quotient * safe
        quotient += ((rest != 0) & ((a < 0) != (b < 0))).astype(a.dtype)
    return np.where(zero, np.invert(a.dtype.type(0)), quotient)


def _integer_remainder(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    zero = b == 0
    return np.where(zero, a, np.fmod(a, np.where(zero, b.dtype.type(1), b)))


def _integer_power(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Wraps; a negative exponent leaves 1 and -1 as their own inverses and takes others to 0."""
    result = np.power(a, np.maximum(b, 0))
    if b.dtype.kind == "u":
        return result
    inverse = np.where(np.abs(a) == 1, np.where(b % 2 == 0, a * a, a), a.dtype.type(0))
    return np.where(b < 0, inverse, result)


def _sign(x: np.ndarray) -> np.ndarray:
    return np.copysign(np.sign(x), x) if x.dtype.kind == "f" else np.sign(x)


def _round_afz(x: np.ndarray) -> np.ndarray:
    whole = np.trunc(x)
    return whole + np.copysign((np.abs(x - whole) >= 0.5).astype(x.dtype), x)


def _count_leading_zeros(x: np.ndarray) -> np.ndarray:
    smeared = x.view(f"u{x.dtype.itemsize}").copy()
    shift = 1
    while shift < _bits(x):
        smeared |= smeared >> shift
        shift *= 2
    return (_bits(x) - np.bitwise_count(smeared)).astype(x.dtype)


def _shift(
    shift: Callable[..., np.ndarray], a: np.ndarray, b: np.ndarray, beyond: Any
) -> np.ndarray:
    """`beyond` where the amount, read as unsigned, is the width of the type or more."""
    legal = b.view(f"u{b.dtype.itemsize}") < _bits(a)
    if legal.all():
        return shift(a, b)
    return np.where(legal, shift(a, np.where(legal, b, b.dtype.type(0))), beyond)


def _shift_left(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return _shift(np.left_shift, a, b, a.dtype.type(0))


def _shift_right_logical(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    unsigned = f"u{a.dtype.itemsize}"
    shifted = _shift(np.right_shift, a.view(unsigned), b.view(unsigned), np.dtype(unsigned).type(0))
    return shifted.view(a.dtype)


def _shift_right_arithmetic(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    signed = f"i{a.dtype.itemsize}"
    a_signed = a.view(signed)
    last = np.dtype(signed).type(_bits(a) - 1)
    return _shift(np.right_shift, a_signed, b.view(signed), a_signed >> last).view(a.dtype)


def total_order(x: np.ndarray) -> np.ndarray:
    """Integers in the order of IEEE totalOrder: -NaN < -inf < -0 < +0 < +inf < NaN."""
    signed = x.view(f"i{x.dtype.itemsize}")
    return np.where(signed < 0, signed ^ np.iinfo(signed.dtype).max, signed)


_SELECT_BITS = 4096
"""From this many elements, select works on bits: an unpredictable `where` is 5 times slower."""

_DIRECTIONS = {
    "EQ": np.equal, "NE": np.not_equal, "LT": np.less, "LE": np.less_equal,
    "GT": np.greater, "GE": np.greater_equal,
}  # fmt: skip


def _compare(
    a: np.ndarray, b: np.ndarray, direction: str, compare_type: str = "NOTYPE"
) -> np.ndarray:
    if compare_type == "TOTALORDER":
        a, b = total_order(a), total_order(b)
    return _DIRECTIONS[direction](a, b)


def _select(predicate: np.ndarray, on_true: np.ndarray, on_false: np.ndarray) -> np.ndarray:
    predicate = predicate.astype(bool, copy=False)
    if predicate.ndim == 0:
        shape = np.broadcast_shapes(on_true.shape, on_false.shape)
        return np.broadcast_to(on_true if predicate else on_false, shape)
    if predicate.size < _SELECT_BITS:
        return np.where(predicate, on_true, on_false)
    unsigned = np.dtype(f"u{on_true.dtype.itemsize}")
    mask = np.negative(predicate.view(np.uint8).astype(unsigned))
    bits = on_false.view(unsigned)
    return (((on_true.view(unsigned) ^ bits) & mask) ^ bits).view(on_true.dtype)


def _clamp(low: np.ndarray, x: np.ndarray, high: np.ndarray) -> np.ndarray:
    return np.minimum(np.maximum(low, x), high)


def _reduce_precision(x: np.ndarray, exponent_bits: int, mantissa_bits: int) -> np.ndarray:
    """Rounds to the nearest even float of that format; beyond its range to infinity or zero."""
    stored, bias = (52, 1023) if x.dtype == _FLOAT64 else (23, 127)
    unsigned = np.dtype(f"u{x.dtype.itemsize}")
    bits = np.ascontiguousarray(x).view(unsigned)
    sign = bits & unsigned.type(1 << (_bits(x) - 1))
    result = bits
    if mantissa_bits < stored:
        drop = stored - mantissa_bits
        half = (1 << (drop - 1)) - 1
        odd = (bits >> unsigned.type(drop)) & unsigned.type(1)
        mask = unsigned.type(((1 << _bits(x)) - 1) ^ ((1 << drop) - 1))
        result = (bits + odd + unsigned.type(half)) & mask
    magnitude = result ^ sign
    reduced_bias = (1 << (exponent_bits - 1)) - 1
    if reduced_bias < bias:
        top = unsigned.type((bias + reduced_bias + 1) << stored)
        bottom = unsigned.type((bias - reduced_bias + 1) << stored)
        infinity = unsigned.type((2 * bias + 1) << stored)
        magnitude = np.where(magnitude >= top, infinity, magnitude)
        magnitude = np.where(magnitude < bottom, unsigned.type(0), magnitude)
    return np.where(np.isnan(x), x, (sign | magnitude).view(x.dtype))


_FUNCTIONS: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add,
    "subtract": _subtract,
    "multiply": np.multiply,
    "divide": _floats_or_integers(np.divide, _integer_divide),
    "remainder": _floats_or_integers(np.fmod, _integer_remainder),
    "maximum": np.maximum,
    "minimum": np.minimum,
    "power": _floats_or_integers(np.power, _integer_power),
    "atan2": np.arctan2,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "negate": np.negative,
    "abs": np.abs,
    "sign": _sign,
    "floor": np.floor,
    "ceil": np.ceil,
    "round_nearest_even": np.rint,
    "round_nearest_afz": _round_afz,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "cbrt": np.cbrt,
    "exponential": np.exp,
    "exponential_minus_one": np.expm1,
    "log": np.log,
    "log_plus_one": np.log1p,
    "logistic": special.logistic,
    "tanh": np.tanh,
    "tan": np.tan,
    "sine": np.sin,
    "cosine": np.cos,
    "erf": special.erf,
    "erfc": special.erfc,
    "popcnt": lambda x: np.bitwise_count(x.view(f"u{x.dtype.itemsize}")).astype(x.dtype),
    "count_leading_zeros": _count_leading_zeros,
    "is_finite": np.isfinite,
    "shift_left": _shift_left,
    "shift_right_logical": _shift_right_logical,
    "shift_right_arithmetic": _shift_right_arithmetic,
    "compare": _compare,
    "select": _select,
    "clamp": _clamp,
    "convert": lambda x: x,
    "reduce_precision": _reduce_precision,
    "gelu": special.gelu,
    "gelu_tanh": special.gelu_tanh,
    "gelu_dx": special.gelu_dx,
    "gelu_tanh_dx": special.gelu_tanh_dx,
    "silu": special.silu,
    "silu_dx": special.silu_dx,
    "softplus": special.softplus,
    "relu": lambda x: np.maximum(x, 0),
}

NAMES = frozenset(_FUNCTIONS)
"""Every name that `apply` computes."""


# ---- the interface -------------------------------------------------------------------------


def _operands(
    values: Sequence[np.ndarray | np.generic | float | int],
) -> tuple[list[np.ndarray], np.dtype]:
    """Operands in one compute type, and the type that the result has unless another is asked.

    Plain Python numbers take the type of the arrays beside them.
    """
    arrays = [v for v in values if isinstance(v, np.ndarray | np.generic)]
    if not arrays:
        arrays = [np.asarray(v) for v in values]
    first = arrays[0].dtype
    kinds = {a.dtype for a in arrays}
    if len(kinds) > 1:
        floats = {compute_dtype(k) for k in kinds if is_float(k)}
        computed = max(floats, key=lambda k: k.itemsize) if floats else np.result_type(*kinds)
        natural = computed
    else:
        computed, natural = compute_dtype(first), first
    return [_convert(np.asarray(v), computed) for v in values], natural


def _choices(
    values: Sequence[np.ndarray | np.generic | float | int],
) -> tuple[list[np.ndarray], np.dtype]:
    """Like `_operands`, but values of one type are not computed with: they stay as they are."""
    arrays = [v for v in values if isinstance(v, np.ndarray | np.generic)]
    if len(arrays) == len(values) and len({a.dtype for a in arrays}) == 1:
        return [np.asarray(a) for a in arrays], arrays[0].dtype
    return _operands(values)


def apply(
    name: str,
    *operands: np.ndarray | np.generic | float | int,
    out: np.dtype | None = None,
    **attributes: Any,
) -> np.ndarray:
    """The elementwise function `name` of broadcastable operands.

    The result has dtype `out`; without it, the operands' dtype (bool for compare and is_finite).
    Mixed float operands compute in the widest, at least float32. `select` takes (predicate,
    on_true, on_false), `clamp` (low, x, high); `compare` needs `direction`, and `compare_type` if
    TOTALORDER; `reduce_precision` needs `exponent_bits` and `mantissa_bits`; `convert` needs `out`.
    Raises Unsupported for an unknown name. May return an operand itself (convert).
    """
    try:
        function = _FUNCTIONS[name]
    except KeyError:
        raise Unsupported(f"elementwise function {name} is not modelled") from None
    with np.errstate(all="ignore"):
        if name == "convert":
            return _convert(np.asarray(operands[0]), np.dtype(out))
        if name == "select":
            values, natural = _choices(operands[1:])
            values = [np.asarray(operands[0]), *values]
        else:
            values, natural = _operands(operands)
        result = np.asarray(function(*values, **attributes))
        if result.dtype == np.bool_ and out is None:
            return result
        return _convert(result, natural if out is None else np.dtype(out))


def _lowest(dtype: np.dtype) -> Any:
    if dtype == np.bool_:
        return dtype.type(False)
    if is_float(dtype):
        with np.errstate(all="ignore"):
            infinity = np.asarray(-np.inf, np.float32).astype(dtype)[()]
        return infinity if infinity == infinity else ml_dtypes.finfo(dtype).min
    return dtype.type(ml_dtypes.iinfo(dtype).min)


def _highest(dtype: np.dtype) -> Any:
    if dtype == np.bool_:
        return dtype.type(True)
    if is_float(dtype):
        return dtype.type(-_lowest(dtype))
    return dtype.type(ml_dtypes.iinfo(dtype).max)


IDENTITY: dict[str, Callable[[np.dtype], Any]] = {
    "add": lambda dtype: dtype.type(0),
    "multiply": lambda dtype: dtype.type(1),
    "minimum": _highest,
    "maximum": _lowest,
    "and": lambda dtype: np.invert(dtype.type(0)),
    "or": lambda dtype: dtype.type(0),
}
"""The value that a reduction starts from, as a scalar of the dtype."""

_REDUCTIONS: dict[str, np.ufunc] = {
    "add": np.add, "multiply": np.multiply, "minimum": np.minimum, "maximum": np.maximum,
    "and": np.bitwise_and, "or": np.bitwise_or,
}  # fmt: skip


def elementwise_name(reduction: str, dtype: np.dtype) -> str:
    """The elementwise function that combines two values of a reduction: on bool, or / and."""
    if np.dtype(dtype) == np.bool_:
        logical = {"add": "or", "maximum": "or", "multiply": "and", "minimum": "and"}
        return logical.get(reduction, reduction)
    return reduction


def _ufunc(name: str, dtype: np.dtype) -> np.ufunc:
    if name not in _REDUCTIONS:
        raise Unsupported(f"reduction {name} is not modelled; modelled: {', '.join(_REDUCTIONS)}")
    return _REDUCTIONS[elementwise_name(name, dtype)]


def reduce(
    name: str,
    array: np.ndarray,
    axis: int | tuple[int, ...],
    out: np.dtype | None = None,
    keepdims: bool = False,
) -> np.ndarray:
    """Reduces `axis` with add, multiply, minimum, maximum, and, or; an empty one to the identity.

    Floats below 32 bits accumulate in float32 and round once to `out` (default: the array's dtype);
    integers wrap in their own type. Raises Unsupported for another name.
    """
    ufunc = _ufunc(name, array.dtype)
    with np.errstate(all="ignore"):
        values = _convert(array, compute_dtype(array.dtype))
        start = values.dtype.type(IDENTITY[name](array.dtype))
        result = ufunc.reduce(
            values, axis=axis, dtype=values.dtype, keepdims=keepdims, initial=start
        )
        return _convert(np.asarray(result), np.dtype(out or array.dtype))


_LONG_ROW = 32
"""Elements of a row from which one call per run is faster than reduceat (10 times at 512)."""


def reduce_runs(name: str, array: np.ndarray, firsts: np.ndarray) -> np.ndarray:
    """Reduces runs of rows, run i from row firsts[i] to before firsts[i + 1], in compute type."""
    with np.errstate(all="ignore"):
        values = _convert(array, compute_dtype(array.dtype))
        ufunc = _ufunc(name, array.dtype)
        if math.prod(array.shape[1:]) < _LONG_ROW:
            return ufunc.reduceat(values, firsts, axis=0, dtype=values.dtype)
        totals = np.empty((len(firsts), *array.shape[1:]), values.dtype)
        runs = zip(firsts, np.append(firsts[1:], len(values)), strict=True)
        for total, (first, last) in zip(totals, runs, strict=True):
            ufunc.reduce(values[first:last], axis=0, dtype=values.dtype, out=total)
        return totals


def accumulate(name: str, array: np.ndarray, axis: int) -> np.ndarray:
    """Running reduction along `axis`, in the array's own type."""
    with np.errstate(all="ignore"):
        return _ufunc(name, array.dtype).accumulate(array, axis=axis, dtype=array.dtype)
