"""Accumulator registers, scans, activation, statistics and searches, as kernels write them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from trnsim.device.isa.accumulate import (
    FP32_MIN,
    Exponential,
    RangeSelect,
    SelectReduce,
    TensorScalarCumulative,
    TensorScalarReduce,
)
from trnsim.device.isa.activations import Activation
from trnsim.device.isa.numerics import Accumulators
from trnsim.device.isa.scan import TensorTensorScan
from trnsim.device.isa.search import BnAggr, BnStats, FindIndex8, MatchReplace8, Max8

from .isa_bench import BF16, BINARY, RNG, TRN1, TRN3, Bench, rand, refuses


@pytest.fixture
def on() -> Bench:
    return Bench()


@pytest.fixture
def on3() -> Bench:
    return Bench(TRN3)


# ---- accumulator registers -------------------------------------------------------------------


@pytest.mark.parametrize("op", ["add", "multiply", "maximum", "minimum"])
def test_tensor_scalar_reduce_and_its_registers(on, op):
    x, y = (np.round(rand(8, 4) * 2) for _ in range(2))
    registers = Accumulators()
    dst, result = on.new((8, 4)), on.new((8, 1))

    def step(values, command, **more):
        made = TensorScalarReduce(
            dst, on.put(values), "multiply", 2.0, op, result, command=command,
            registers=registers, **more,
        )  # fmt: skip
        return on.run(made, dst, result)

    ufunc = BINARY[op]
    out, total = step(x, "reset_reduce")
    np.testing.assert_array_equal(out, x * 2)
    np.testing.assert_array_equal(total[:, 0], ufunc.reduce(x * 2, axis=1))
    _, both = step(y, "reduce")
    np.testing.assert_array_equal(both[:, 0], ufunc(total[:, 0], ufunc.reduce(y * 2, axis=1)))
    _, loaded = step(y, "load_reduce", start=3.0)
    np.testing.assert_array_equal(loaded[:, 0], ufunc(3, ufunc.reduce(y * 2, axis=1)))
    _, negated = step(y, "reset_reduce", negate=True)
    np.testing.assert_array_equal(negated[:, 0], -ufunc.reduce(y * 2, axis=1))


def test_tensor_scalar_reduce_costs_and_refuses(on):
    x, column = on.new((128, 512)), on.new((128, 1))
    plain = TensorScalarReduce(x, x, "add", 1.0, "add")
    read = TensorScalarReduce(x, x, "add", 1.0, "add", column)
    assert (on.cycles(plain), on.cycles(read)) == (512, 512 + 64)
    refuses(on, TensorScalarReduce(x, x, "add", 1.0, "and"), "reduce_op is and; allowed: add, mul")
    refuses(on, TensorScalarReduce(x, x, "add", 1.0, "add", command="idle"), "reduce_cmd is idle")
    refuses(on, TensorScalarReduce(x, x, "add", 1.0, "add", start=1.0), "goes with load_reduce")


def test_range_select_and_its_maximum(on):
    x = rand(16, 32)
    low = RNG.integers(0, 16, (16, 1)).astype(np.float32)
    high = low + 8
    dst, result = on.new((16, 32)), on.new((16, 1))
    made = RangeSelect(
        dst, on.put(x), "greater_equal", "less", on.put(low), on.put(high), result, start=3
    )
    out, largest = on.run(made)
    at = np.arange(3, 35, dtype=np.float32)
    expected = np.where((at >= low) & (at < high), x, np.float32(FP32_MIN))
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(largest, expected.max(axis=1, keepdims=True))


def test_range_select_refuses():
    one = Bench(TRN1)
    x, bound = one.put(rand(4, 8)), one.put(rand(4, 1))
    refuses(one, RangeSelect(x, x, "less", "less", bound, bound), "needs NeuronCore-v3 or later")
    on = Bench()
    x, bound = on.put(rand(4, 8)), on.put(rand(4, 1))
    refuses(on, RangeSelect(x, x, "not_equal", "less", bound, bound), "comp_op0 is not_equal")
    wrong = RangeSelect(x, x, "less", "less", bound, bound, otherwise=0.0)
    refuses(on, wrong, "on_false_value is 0.0; it must be -3.4")


@pytest.mark.parametrize("reverse", [False, True])
def test_select_reduce(on, reverse):
    x, other = rand(8, 6), rand(8, 1)
    mask = RNG.integers(0, 2, (8, 6)).astype(np.uint8)
    dst, result = on.new((8, 2, 3)), on.new((8, 1))
    made = SelectReduce(
        dst, on.put(mask), on.put(x), on.put(other), result, "reset_reduce", reverse=reverse
    )
    out, largest = on.run(made)
    expected = np.where((mask != 0) != reverse, x, other)
    np.testing.assert_array_equal(out.reshape(8, 6), expected)
    np.testing.assert_array_equal(largest, expected.max(axis=1, keepdims=True))
    integers = on.put(np.ones((8, 6), np.int32))
    refuses(on, SelectReduce(dst, on.put(mask), integers, 0.0), "on_true is i32; no 32-bit")


@pytest.mark.parametrize("op", ["add", "subtract", "multiply", "maximum", "minimum"])
def test_tensor_scalar_cumulative_in_two_tiles(on, op):
    x = np.round(rand(4, 10) * 3)
    registers = Accumulators()
    start = {"multiply": 1.0, "maximum": -np.inf, "minimum": np.inf}.get(op, 0.0)
    expected = np.empty_like(x)
    reg = np.full(4, start, np.float32)
    for i in range(10):
        reg = expected[:, i] = BINARY[op](x[:, i] + 1, reg)
    found = []
    for part, command in ((x[:, :6], "reset_reduce"), (x[:, 6:], "reduce")):
        made = TensorScalarCumulative(
            on.new(part.shape), on.put(part), "add", op, 1.0, command=command, registers=registers
        )
        found.append(on.run(made))
    np.testing.assert_array_equal(np.concatenate(found, axis=1), expected)


def test_exponential_on_vector_is_v4s(on, on3):
    x, largest = rand(8, 16), rand(8, 1)
    dst, result = on3.new((8, 16)), on3.new((8, 1))
    made = Exponential(dst, on3.put(x), on3.put(largest), result, "load_reduce", 1.0)
    out, total = on3.run(made)
    np.testing.assert_array_equal(out, np.exp(x - largest))
    np.testing.assert_allclose(total[:, 0], 1 + out.sum(axis=1), rtol=1e-6)
    long = on3.new((128, 1024))
    assert on3.cycles(Exponential(long, long)) == 256
    y = on.put(x)
    refuses(on, Exponential(y, y), "needs NeuronCore-v4 or later; trn2 has v3")


@pytest.mark.parametrize("op0, op1", [("multiply", "add"), ("subtract", "maximum")])
@pytest.mark.parametrize("reverse0, reverse1", [(False, False), (True, True)])
def test_tensor_tensor_scan(on, op0, op1, reverse0, reverse1):
    a, b, first = (np.round(rand(4, n)) for n in (7, 7, 1))
    made = TensorTensorScan(
        on.new((4, 7)), on.put(a), on.put(b), on.put(first), op0, op1, reverse0, reverse1
    )
    expected = np.empty_like(a)
    reg = first[:, 0]
    for i in range(7):
        x = BINARY[op0](reg, a[:, i]) if reverse0 else BINARY[op0](a[:, i], reg)
        reg = expected[:, i] = BINARY[op1](b[:, i], x) if reverse1 else BINARY[op1](x, b[:, i])
    np.testing.assert_array_equal(on.run(made), expected)
    assert on.cycles(made) == 64
    psum = on.put(a, space="psum")
    refuses(on, TensorTensorScan(psum, psum, psum, 0.0, op0, op1), "data0 and data1 are in psum")


# ---- activation ------------------------------------------------------------------------------


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


FUNCTIONS = {
    "exponential": np.exp, "square": np.square, "logistic": _sigmoid, "tanh": np.tanh,
    "silu": lambda x: x * _sigmoid(x),
    "silu_dx": lambda x: _sigmoid(x) * (1 + x * (1 - _sigmoid(x))),
    "softplus": lambda x: np.log1p(np.exp(x)), "mish": lambda x: x * np.tanh(np.log1p(np.exp(x))),
    "gelu_sigmoid": lambda x: x * _sigmoid(1.702 * x), "sine": np.sin, "arctan": np.arctan,
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "erf_dx": lambda x: 2 / np.sqrt(np.pi) * np.exp(-x * x), "sign": np.sign, "abs": np.abs,
}  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS)
def test_activation_functions(on, function):
    x = rand(16, 32).clip(-3, 3)
    out = on.run(Activation(on.new((16, 32)), on.put(x), function))
    np.testing.assert_allclose(out, FUNCTIONS[function](x.astype(np.float64)), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize(
    "function, of", [("gelu_dx", "gelu"), ("gelu_sigmoid_dx", "gelu_sigmoid"), ("erf_dx", "erf")]
)
def test_derivatives_are_those_of_their_functions(on, function, of):
    x, step = np.linspace(-3, 3, 33, dtype=np.float32)[None], np.float32(1 / 64)
    slope = on.run(Activation(on.new((1, 33)), on.put(x), function))
    high, low = (on.run(Activation(on.new((1, 33)), on.put(x + d), of)) for d in (step, -step))
    np.testing.assert_allclose(slope, (high - low) / (2 * step), atol=2e-4)


def test_sine_is_not_reduced_beyond_pi(on):
    out = on.run(Activation(on.new((1, 2)), on.put([[9.0, -9.0]]), "sine"))
    np.testing.assert_allclose(out, [[27.65, -27.65]], rtol=1e-3)  # nki.api.shared.rst


def test_activation_scales_then_biases(on):
    x, scale, bias = rand(8, 4), rand(8, 1), rand(8, 1)
    made = Activation(on.new((8, 4), "bf16"), on.put(x), "exponential", on.put(scale), on.put(bias))
    expected = np.exp(x * scale + bias).astype(BF16)
    np.testing.assert_array_equal(on.run(made), expected)


def test_activation_accumulates_over_instructions(on):
    x, registers = rand(8, 16), Accumulators()
    dst, result = on.new((8, 16)), on.new((8, 1))
    src = on.put(x)
    on.run(Activation(dst, src, "square", command="reset_reduce", registers=registers))
    on.run(Activation(dst, src, "copy", registers=registers))  # idle
    last = Activation(dst, src, "copy", command="reduce", result=result, registers=registers)
    total = on.run(last, result)
    np.testing.assert_allclose(total[:, 0], (x * x).sum(1) + x.sum(1), rtol=1e-5)
    on.run(Activation(dst, src, "copy", command="reset", registers=registers))
    assert (registers.values[:8] == 0).all()


def test_the_result_of_an_activation_may_lie_on_its_output(on):
    x = on.put(np.ones((4, 3)))
    on.run(Activation(x, x, "copy", command="reset_reduce", result=x[:, 0:1]))
    assert x.array.tolist() == [[3, 1, 1]] * 4


def test_activation_costs_and_refuses(on):
    x, column = on.new((128, 512)), on.new((128, 1))
    assert on.cycles(Activation(x, x, "tanh")) == 512
    assert on.cycles(Activation(x, x, "tanh", command="reset_reduce", result=column)) == 576
    refuses(on, Activation(x, x, "wave"), "op is wave; allowed: copy")
    refuses(on, Activation(x, x, "tanh", reduce_op="maximum"), "reduce_op is maximum; allowed: add")
    refuses(on, Activation(x, x, "tanh", on.put(rand(128, 1), "bf16")), "scale is bf16")
    refuses(on, Activation(x, x, "tanh", pipeline=True), "needs NeuronCore-v4")
    one = Bench(TRN1)
    y = one.new((4, 4))
    refuses(one, Activation(y, y, "tanh", bias=1.0), r"bias is 1.0; on trn1 it must be a \[P, 1\]")


def test_activate2_has_other_operators_and_reductions(on3):
    x, column = rand(8, 6), on3.new((8, 1))
    made = Activation(
        on3.new((8, 6)), on3.put(x), "abs", 2.0, 1.0, "multiply", "subtract", reverse1=True,
        command="reset_reduce", reduce_op="maximum", result=column, pipeline=True,
    )  # fmt: skip
    out, largest = on3.run(made)
    np.testing.assert_array_equal(out, abs(1 - x * 2))
    np.testing.assert_array_equal(largest[:, 0], out.max(axis=1))
    prelu = Activation(
        on3.new((8, 6)), on3.put(x), "prelu", 0.0, 0.0, "bypass", "bypass", slope=0.25,
        pipeline=True,
    )  # fmt: skip
    np.testing.assert_array_equal(on3.run(prelu), np.where(x > 0, x, x * 0.25))
    y = on3.put(x)
    wrong = Activation(y, y, "abs", 1.0, 1.0, "maximum", "add", pipeline=True)
    refuses(on3, wrong, r"\(op0, op1\) is \(maximum, add\); allowed: \(add, bypass\)")


# ---- statistics and searches -----------------------------------------------------------------


def test_bn_stats_of_halves_and_their_aggregate(on):
    x = (rand(16, 1024) * 3 + 5).astype(np.float32)
    stats = on.new((16, 12))
    for half in range(2):
        on.run(
            BnStats(stats[:, 6 * half : 6 * half + 6], on.put(x[:, 512 * half : 512 * half + 512]))
        )
    even = x[:, 0:512:2]
    np.testing.assert_allclose(
        stats.array[:, :3],
        np.stack([np.full(16, 256), even.mean(1), even.var(1) * 256], axis=1), rtol=1e-5,
    )  # fmt: skip
    made = BnAggr(on.new((16, 2)), stats)
    out = on.run(made)
    np.testing.assert_allclose(out[:, 0], x.mean(axis=1), rtol=1e-6)
    np.testing.assert_allclose(out[:, 1], x.var(axis=1), rtol=1e-5)
    assert on.cycles(made) == 64  # 13 x 12 / 3 = 52 is less than the least
    refuses(on, BnStats(on.new((16, 6)), on.put(x)), "data has 1024 elements .*limit: 512")
    refuses(on, BnAggr(on.new((16, 2)), on.new((16, 8))), "a multiple of 3 is needed")


def test_max8_in_descending_order(on):
    x = rand(16, 5, 20)
    out = on.run(Max8(on.new((16, 8)), on.put(x)))
    np.testing.assert_array_equal(out, -np.sort(-x.reshape(16, -1), axis=1)[:, :8])
    refuses(on, Max8(on.new((16, 8)), on.new((16, 7))), "src has 7 elements .*allowed: 8 to 16384")
    refuses(on, Max8(on.new((16, 4)), on.put(x)), r"dst has shape \[16, 4\]; it must be \[16, 8\]")


def test_find_index8_takes_equal_values_in_ascending_order(on):
    data = np.array([[5, 1, 5, 2, 5, 3, 4, 0, 9]], np.float32)
    vals = np.array([[9, 5, 5, 5, 5, 7, 0, 1]], np.float32)
    out = on.run(FindIndex8(on.new((1, 8), "ui32"), on.put(data), on.put(vals)))
    none = 0xFFFFFFFF
    assert out.tolist() == [[8, 0, 2, 4, none, none, 7, 1]]
    short = on.run(FindIndex8(on.new((1, 8), "ui16"), on.put(data), on.put(vals)))
    assert short.tolist() == [[8, 0, 2, 4, 0xFFFF, 0xFFFF, 7, 1]]
    wrong = FindIndex8(on.new((1, 8), "i32"), on.put(data), on.put(vals))
    refuses(on, wrong, "dst is i32; allowed: ui16, ui32")


def test_match_replace8_takes_equal_values_in_descending_order(on):
    data = np.array([[1, 2, 3, 4, 8, 8, 8, 8, 8, 8, 8]], np.float32)
    vals = np.array([[3, 8, 8, 8, 8, 8, 8, 8]], np.float32)
    index = on.new((1, 8), "ui32")
    out, found = on.run(MatchReplace8(on.new((1, 11)), on.put(data), on.put(vals), -np.inf, index))
    assert found.tolist() == [[2, 10, 9, 8, 7, 6, 5, 4]]  # nc_match_replace8's own example
    assert out.tolist() == [[1, 2, -np.inf, 4, *[-np.inf] * 7]]


@settings(max_examples=20, deadline=None)
@given(hnp.arrays(np.int8, (3, 12), elements=st.integers(0, 4)))
def test_match_replace8_after_max8_removes_the_eight_largest(data):
    on = Bench()
    x = on.put(data.astype(np.float32))
    largest = on.new((3, 8))
    on.run(Max8(largest, x))
    out = on.run(MatchReplace8(on.new((3, 12)), x, largest, -1.0))
    expected = np.sort(data, axis=1)[:, :4]
    np.testing.assert_array_equal(np.sort(out, axis=1)[:, 8:], expected)
