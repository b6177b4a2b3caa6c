"""Elementwise numerics against JAX, and the laws that StableHLO states for edge cases."""

import math
from collections.abc import Callable
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from trnsim.device import arithmetic, special
from trnsim.device.arithmetic import IDENTITY, apply, convert, reduce
from trnsim.device.errors import Unsupported

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT8 = [
    np.dtype(t)
    for t in (
        ml_dtypes.float8_e4m3, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2,
        ml_dtypes.float8_e3m4,
    )
]  # fmt: skip
FLOATS = [np.dtype(np.float32), np.dtype(np.float16), BFLOAT16]
INTEGERS = [np.dtype(t) for t in (np.int8, np.uint8, np.int16, np.int32, np.uint32)]

Function = Callable[..., Any]
BOTH: dict[str, Function] = {
    "add": lax.add, "subtract": lax.sub, "multiply": lax.mul, "divide": lax.div,
    "remainder": lax.rem, "maximum": lax.max, "minimum": lax.min,
}  # fmt: skip
BOTH_UNARY: dict[str, Function] = {"negate": lax.neg, "abs": lax.abs, "sign": lax.sign}
FLOAT_UNARY: dict[str, Function] = {
    "floor": lax.floor, "ceil": lax.ceil, "sqrt": lax.sqrt, "rsqrt": lax.rsqrt, "cbrt": lax.cbrt,
    "round_nearest_even": lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN),
    "round_nearest_afz": lambda x: lax.round(x, lax.RoundingMethod.AWAY_FROM_ZERO),
    "exponential": lax.exp, "exponential_minus_one": lax.expm1, "log": lax.log,
    "log_plus_one": lax.log1p, "logistic": lax.logistic, "tanh": lax.tanh, "tan": lax.tan,
    "sine": lax.sin, "cosine": lax.cos, "erf": lax.erf, "erfc": lax.erfc,
    "is_finite": lax.is_finite,
    "silu": jax.nn.silu, "softplus": jax.nn.softplus, "relu": jax.nn.relu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False), "gelu_tanh": jax.nn.gelu,
}  # fmt: skip
FLOAT_BINARY: dict[str, Function] = {"power": lax.pow, "atan2": lax.atan2}
INTEGER_BINARY: dict[str, Function] = {
    "and": lax.bitwise_and, "or": lax.bitwise_or, "xor": lax.bitwise_xor,
    "shift_left": lax.shift_left, "shift_right_logical": lax.shift_right_logical,
    "shift_right_arithmetic": lax.shift_right_arithmetic,
}  # fmt: skip
INTEGER_UNARY: dict[str, Function] = {
    "not": lax.bitwise_not, "popcnt": lax.population_count, "count_leading_zeros": lax.clz,
}  # fmt: skip

ABSOLUTE = {"tanh", "sine", "cosine", "erf", "tan", "gelu_tanh"}  # JAX cancels near their zeros


def floats(dtype: np.dtype) -> np.ndarray:
    """Special values and a spread of ordinary ones."""
    edges = [0.0, -0.0, 0.5, -0.5, 1.5, -2.5, 1, -1, np.inf, -np.inf, np.nan, 88, -88, 3e38, 2e-38]
    spread = np.random.default_rng(1).standard_normal(49) * np.logspace(-3, 1, 49)
    with np.errstate(over="ignore"):
        return np.concatenate([edges, spread]).astype(np.float32).astype(dtype)


def integers(dtype: np.dtype) -> np.ndarray:
    """Ends of the range, small numbers, and a spread."""
    limits = np.iinfo(dtype)
    edges = [limits.min, limits.max, 0, 1, 2, 7, limits.max // 2]
    edges += [-1, -7] if limits.min < 0 else []
    spread = np.random.default_rng(1).integers(limits.min, limits.max, 20, dtype, endpoint=True)
    return np.concatenate([np.array(edges, dtype), spread])


def pairs(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.repeat(values, values.size), np.tile(values, values.size)


def compare_all(functions: dict[str, Function], *operands: np.ndarray, units: float) -> None:
    """Compares each function with JAX within `units` last places of the operands' type."""
    expected = jax.jit(lambda *xs: {n: f(*xs) for n, f in functions.items()})(*operands)
    epsilon = 0 if operands[0].dtype.kind in "iu" else float(ml_dtypes.finfo(operands[0].dtype).eps)
    for name, value in expected.items():
        found, value = apply(name, *operands), np.asarray(value)
        assert found.dtype == value.dtype, name
        np.testing.assert_allclose(
            found.astype(np.float64),
            value.astype(np.float64),
            rtol=units * epsilon,
            atol=units * epsilon if name in ABSOLUTE else 1e-36,  # XLA flushes denormals
            err_msg=f"{name} {operands[0].dtype}",
        )


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_float_functions_are_those_of_jax(dtype: np.dtype) -> None:
    x = floats(dtype)
    compare_all(BOTH_UNARY | FLOAT_UNARY, x, units=8)
    compare_all(BOTH | FLOAT_BINARY, *pairs(x), units=8)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integer_functions_are_those_of_jax(dtype: np.dtype) -> None:
    x = integers(dtype)
    unary = dict(INTEGER_UNARY) if dtype.kind == "u" else INTEGER_UNARY | BOTH_UNARY
    compare_all(unary, x, units=0)
    compare_all(BOTH | INTEGER_BINARY, *pairs(x), units=0)


def test_conversions_saturate_as_those_of_jax() -> None:
    targets = [*INTEGERS, np.dtype(bool), np.dtype(np.float16), BFLOAT16, *FLOAT8]
    with np.errstate(all="ignore"):
        x = np.concatenate(
            [floats(np.dtype(np.float32)), np.array([2**31, -(2**31), 300, -129], np.float32)]
        )
    for source in (x, x.astype(BFLOAT16), integers(np.dtype(np.int32))):
        expected = jax.jit(lambda v: [lax.convert_element_type(v, t) for t in targets])(source)
        for target, value in zip(targets, expected, strict=True):
            found = convert(source, target)
            assert found.dtype == target
            np.testing.assert_array_equal(
                found.astype(np.float64), np.asarray(value).astype(np.float64), str(target)
            )


def test_reduce_precision_is_that_of_jax() -> None:
    x = np.concatenate([floats(np.dtype(np.float32)), np.array([65520, 6.2e-5, 5e-8], np.float32)])
    formats = [(8, 7), (5, 10), (5, 2), (4, 3), (8, 23)]
    expected = jax.jit(lambda v: [lax.reduce_precision(v, e, m) for e, m in formats])(x)
    for (exponent, mantissa), value in zip(formats, expected, strict=True):
        found = apply("reduce_precision", x, exponent_bits=exponent, mantissa_bits=mantissa)
        np.testing.assert_array_equal(found, np.asarray(value), f"e{exponent}m{mantissa}")


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_float8_rounds_once_to_nearest_even(dtype: np.dtype) -> None:
    bits = np.random.default_rng(2).integers(0, 1 << 32, 100_000, np.uint32)
    x = bits.view(np.float32)
    with np.errstate(all="ignore"):
        expected = x.astype(dtype)
    np.testing.assert_array_equal(convert(x, dtype).astype(np.float32), expected.astype(np.float32))


@given(st.lists(st.floats(width=32), min_size=2, max_size=20))
@settings(max_examples=50, deadline=None)
def test_narrow_floats_compute_in_float32_and_round_once(values: list[float]) -> None:
    x = convert(np.array(values, np.float32), BFLOAT16)
    wide = x.astype(np.float32)
    for name, function in (("add", np.add), ("multiply", np.multiply)):
        with np.errstate(all="ignore"):
            expected = function(wide, wide[::-1]).astype(BFLOAT16)
        found = apply(name, x, x[::-1])
        np.testing.assert_array_equal(found.astype(np.float32), expected.astype(np.float32))


def test_total_order_separates_zeros_and_places_nans_outside() -> None:
    ordered = np.array([-np.nan, -np.inf, -1, -0.0, 0.0, 1, np.inf, np.nan], np.float32)
    ordered[0] = np.copysign(np.float32(np.nan), np.float32(-1))
    less = apply("compare", ordered[:-1], ordered[1:], direction="LT", compare_type="TOTALORDER")
    assert less.all()
    equal = apply("compare", ordered, ordered, direction="EQ", compare_type="TOTALORDER")
    assert equal.all()
    assert not apply("compare", ordered[3], ordered[4], direction="LT")


@pytest.mark.parametrize(
    ("name", "a", "b", "expected"),
    [
        ("divide", -7, 2, -3), ("divide", 7, -2, -3), ("divide", 5, 0, -1),
        ("divide", -(2**31), -1, -(2**31)), ("remainder", -7, 2, -1), ("remainder", 7, -2, 1),
        ("remainder", 5, 0, 5), ("add", 2**31 - 1, 1, -(2**31)), ("power", 3, 4, 81),
        ("power", 2, -1, 0), ("power", -1, -3, -1), ("shift_left", 1, 32, 0),
        ("shift_right_logical", -1, 31, 1), ("shift_right_arithmetic", -8, 40, -1),
    ],
)  # fmt: skip
def test_integer_edges(name: str, a: int, b: int, expected: int) -> None:
    found = apply(name, np.array([a], np.int32), np.array([b], np.int32))
    assert found.dtype == np.int32
    assert found.tolist() == [expected]


def test_select_and_clamp_broadcast_scalars() -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_array_equal(apply("clamp", np.float32(1), x, np.float32(4)), x.clip(1, 4))
    chosen = apply("select", np.array(True), x, -x)
    np.testing.assert_array_equal(chosen, x)


@pytest.mark.parametrize("dtype", [*FLOATS, *FLOAT8[:1], *INTEGERS, np.dtype(bool)], ids=str)
def test_large_select_is_that_of_where(dtype: np.dtype) -> None:
    random = np.random.default_rng(0)
    a, b = random.integers(0, 2, (2, 70, 90)).astype(dtype)
    predicate = random.integers(0, 2, (70, 90)).astype(bool)
    found = apply("select", predicate, a, b)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, np.where(predicate, a, b))
    np.testing.assert_array_equal(
        apply("select", predicate, a, b[:1]), np.where(predicate, a, b[:1])
    )


def test_plain_numbers_take_the_type_of_the_array() -> None:
    x = np.array([1, 2], BFLOAT16)
    assert apply("multiply", x, 0.5).dtype == BFLOAT16
    assert apply("multiply", x, 0.5, out=np.dtype(np.float32)).tolist() == [0.5, 1.0]


@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=lambda t: t.__name__)
def test_special_functions_are_accurate(dtype: type) -> None:
    x = np.linspace(-6, 6, 4001).astype(dtype)
    epsilon = np.finfo(dtype).eps
    for found, exact in (
        (special.erf(x), np.array([math.erf(v) for v in x])),
        (special.gelu(x), np.array([v / 2 * math.erfc(-v / math.sqrt(2)) for v in x.tolist()])),
    ):
        assert found.dtype == dtype
        assert np.abs(found - exact).max() < 8 * epsilon
        relative = np.abs(found - exact)[x != 0] / np.abs(exact)[x != 0]
        assert relative.max() < 60 * epsilon  # exp(-z^2) loses z^2 / 2 units in the tail


def test_blocks_give_the_same_values_as_one_array() -> None:
    x = np.random.default_rng(0).standard_normal((3, special.BLOCK)).astype(np.float32)
    np.testing.assert_array_equal(special.gelu(x)[1], special.gelu(x[1]))
    np.testing.assert_array_equal(special.gelu(x.T), special.gelu(x).T)


@pytest.mark.parametrize("name", sorted(IDENTITY))
@pytest.mark.parametrize(
    "dtype", [*map(np.dtype, (np.int8, np.uint32, bool)), *FLOATS, *FLOAT8], ids=str
)
def test_identity_changes_nothing(name: str, dtype: np.dtype) -> None:
    if name in ("and", "or") and arithmetic.is_float(dtype):
        return
    x = floats(dtype)[:10] if arithmetic.is_float(dtype) else integers_or_bools(dtype)
    x = x[x == x]
    identity = IDENTITY[name](dtype)
    assert identity.dtype == dtype
    combined = apply(arithmetic.elementwise_name(name, dtype), x, np.asarray(identity))
    finite = np.isfinite(x.astype(np.float32))  # e4m3fn has no infinity
    np.testing.assert_array_equal(combined[finite], x[finite])
    empty = reduce(name, np.zeros((2, 0), dtype), 1)
    assert empty.tolist() == [identity, identity]


def integers_or_bools(dtype: np.dtype) -> np.ndarray:
    return np.array([True, False]) if dtype.kind == "b" else integers(dtype)


def test_sums_of_narrow_floats_accumulate_in_float32() -> None:
    ones = np.ones((1, 1000), BFLOAT16)
    assert reduce("add", ones, 1).tolist() == [1000]
    assert reduce("add", ones, 1).dtype == BFLOAT16
    assert reduce("add", ones, 1, out=np.dtype(np.float32), keepdims=True).shape == (1, 1)
    assert reduce("add", np.full(3, 100, np.int8), 0) == np.int8(300 - 256)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(Unsupported, match="^elementwise function bessel is not modelled$"):
        apply("bessel", np.zeros(1))
    with pytest.raises(Unsupported, match="^reduction xor is not modelled; modelled: add, multi"):
        reduce("xor", np.zeros(1), 0)
