"""Elementwise instructions as kernels write them, each against numpy."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from trnsim.device.core import Core
from trnsim.device.dtypes import numpy_dtype
from trnsim.device.isa import lanes
from trnsim.device.isa.activations import Activation
from trnsim.device.isa.matrix import Matmul
from trnsim.device.isa.moves import (
    DmaCopy,
    DmaGather,
)
from trnsim.device.isa.numerics import cast, to_tfloat32
from trnsim.device.isa.patterns import (
    Iota,
)
from trnsim.device.isa.search import Max8
from trnsim.device.isa.shuffle import CopyPredicated, StreamShuffle

from .isa_bench import BINARY, RNG, TRN1, TRN2, Bench, rand, refuses


@pytest.fixture
def on() -> Bench:
    return Bench()


# ---- numerics --------------------------------------------------------------------------------


@given(
    hnp.arrays(np.float32, 8, elements=st.floats(width=32, allow_nan=False)),
    st.sampled_from(["i8", "ui8", "i16", "ui16", "i32", "ui32"]),
)
def test_floats_to_integers_round_to_even_and_saturate(values, dtype):
    kind = numpy_dtype(dtype)
    limits = np.iinfo(kind)
    expected = [int(min(max(round(float(v)), limits.min), limits.max)) if np.isfinite(v) else
                (limits.max if v > 0 else limits.min) for v in values]  # fmt: skip
    assert cast(values, kind).tolist() == expected


def test_nan_to_an_integer_is_zero():
    assert cast(np.array([np.nan], np.float32), np.dtype(np.int32)).tolist() == [0]


def test_tfloat32_keeps_ten_bits_and_rounds_to_even():
    half = np.float32(2**-11)
    found = to_tfloat32(np.array([1 + half, 1 + 3 * half, 1 + 2 * half, np.inf], np.float32))
    assert found.tolist() == [1.0, 1 + 4 * half, 1 + 2 * half, np.inf]


# ---- elementwise -----------------------------------------------------------------------------


@pytest.mark.parametrize("op", BINARY)
def test_tensor_tensor_against_numpy(on, op):
    a, b = np.round(rand(32, 16)), np.round(rand(32, 16))
    out = on.run(lanes.TensorTensor(on.new((32, 16)), on.put(a), on.put(b), op))
    np.testing.assert_array_equal(out, BINARY[op](a, b).astype(np.float32))


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(["f32", "bf16", "f16", "i8", "ui8", "i16", "ui16", "i32"]),
    st.sampled_from(["f32", "bf16", "i8", "ui8", "i16", "i32"]),
    st.sampled_from(["add", "subtract", "multiply", "maximum"]),
    st.integers(1, 128),
    st.sampled_from([(6,), (2, 3), (3, 1, 2)]),
)
def test_tensor_tensor_computes_in_float32_between_any_dtypes(source, target, op, rows, free):
    on = Bench()
    a, b = (RNG.integers(0, 100, (rows, 6)) for _ in range(2))
    x, y = on.put(a.reshape(rows, *free), source), on.put(b, source)
    out = on.run(lanes.TensorTensor(on.new((rows, 6), target), x, y, op))
    exact = BINARY[op](*(v.array.reshape(rows, 6).astype(np.float32) for v in (x, y)))
    np.testing.assert_array_equal(out, cast(exact, numpy_dtype(target)))


def test_tensor_tensor_of_integers_is_exact_on_gpsimd_and_float32_on_vector(on):
    a = np.array([[2**24 + 1, -(2**31)]], np.int32)
    b = np.array([[2, -1]], np.int32)
    x, y, out = on.put(a), on.put(b), on.new((1, 2), "i32")
    exact = on.run(lanes.TensorTensor(out, x, y, "add", "gpsimd"))
    assert exact.tolist() == [[2**24 + 3, 2**31 - 1]]  # wraps
    rounded = on.run(lanes.TensorTensor(out, x, y, "add", "vector"))
    assert rounded.tolist() == [[2**24 + 2, -(2**31)]]  # float32, saturates


def test_bitwise_operators_work_on_bits(on):
    a = np.array([[0b1100, -8]], np.int32)
    b = np.array([[0b1010, 1]], np.int32)
    found = {
        op: on.run(lanes.TensorTensor(on.new((1, 2), "i32"), on.put(a), on.put(b), op)).tolist()
        for op in ("and", "or", "xor", "shift_left", "shift_right_logical")
    }
    assert found == {
        "and": [[0b1000, 0]],
        "or": [[0b1110, -7]],
        "xor": [[0b0110, -7]],
        "shift_left": [[0b1100 << 10, -16]],
        "shift_right_logical": [[0, 0x7FFFFFFC]],
    }


def test_tensor_tensor_refuses(on):
    a, psum = on.put(rand(4, 8)), on.put(rand(4, 8), space="psum")
    refuses(on, lanes.TensorTensor(a, psum, psum, "add"), "data1 and data2 are in psum; limit: one")
    refuses(on, lanes.TensorTensor(a, a, a, "power"), "op power runs on gpsimd, not on vector")
    refuses(on, lanes.TensorTensor(a, a, psum, "add", "gpsimd"), "data2 must be in sbuf for the g")
    refuses(on, lanes.TensorTensor(a, a, a, "and"), "op and is for integers, not for f32")
    refuses(on, lanes.TensorTensor(a, a, on.put(rand(4, 7)), "add"), r"data2 has shape \[4, 7\]")
    refuses(on, lanes.TensorTensor(a, a, a, "abs"), "op abs takes one operand")
    refuses(on, lanes.TensorTensor(a, a, a, "add", "scalar"), "engine is scalar; allowed: vector")


@pytest.mark.parametrize("column", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_tensor_scalar_of_two_operators(on, column, reverse):
    x = rand(16, 4, 8)
    a = rand(16, 1) if column else np.full((16, 1), 0.3, np.float32)
    operand = on.put(a) if column else 0.3
    made = lanes.TensorScalar(
        on.new((16, 32)), on.put(x), "subtract", operand, "multiply", -2.0, reverse0=reverse
    )
    first = a[:, :, None] - x if reverse else x - a[:, :, None]
    np.testing.assert_array_equal(on.run(made), (first * np.float32(-2)).reshape(16, 32))


@pytest.mark.parametrize(
    "op, expected",
    [("abs", np.abs), ("square", np.square), ("relu", lambda x: np.maximum(x, 0)),
     ("reciprocal", np.reciprocal)],
)  # fmt: skip
def test_tensor_scalar_of_one_operand(on, op, expected):
    x = rand(8, 5)
    out = on.run(lanes.TensorScalar(on.new((8, 5)), on.put(x), op, None))
    np.testing.assert_array_equal(out, expected(x))


def test_tensor_scalar_inverts_bits_and_takes_integer_masks(on):
    x = on.put(np.array([[5, 255]], np.uint8))
    out = on.new((1, 2), "ui8")
    assert on.run(lanes.TensorScalar(out, x, "not", None)).tolist() == [[250, 0]]
    made = lanes.TensorScalar(out, x, "and", 0x0F, "shift_left", 4)
    assert on.run(made).tolist() == [[0x50, 0xF0]]


def test_rsqrt_of_tensor_scalar_is_gpsimds_at_a_quarter_of_the_rate(on):
    x = on.put(np.full((4, 512), 16.0))
    made = lanes.TensorScalar(on.new((4, 512)), x, "rsqrt", 0.0, engine="gpsimd")
    assert on.run(made).ravel()[0] == 0.25
    assert on.cycles(made) == 150 + 4 * 512
    refuses(on, lanes.TensorScalar(x, x, "rsqrt", 0.0), "op rsqrt runs on gpsimd, not on vector")


def test_tensor_scalar_refuses(on):
    x, column = on.put(rand(4, 8)), on.put(rand(4, 1), "bf16")
    refuses(on, lanes.TensorScalar(x, x, "add", column), "operand0 is bf16; an arithmetic .* f32")
    refuses(on, lanes.TensorScalar(x, x, "add", on.put(rand(4, 2))), r"must be \[4, 1\]")
    refuses(on, lanes.TensorScalar(x, x, "abs", 2.0), "op abs takes none, or 0")
    refuses(on, lanes.TensorScalar(x, x, "add", None), "operand0 is missing")
    refuses(on, lanes.TensorScalar(x, x, "maximum", 1.0, engine="scalar"), "multiply then add")
    refuses(on, lanes.TensorScalar(x, x, "add", 1.0, engine="gpsimd"), "gpsimd has only rsqrt")
    integers = on.put(np.ones((4, 8), np.int32))
    mixed = lanes.TensorScalar(integers, integers, "and", 1, "add", 1.0)
    refuses(on, mixed, "both bitwise or both arithmetic")
    one = Bench(TRN1)
    y = one.put(rand(4, 8))
    refuses(one, lanes.TensorScalar(y, y, "add", 1.0, engine="scalar"), "no tensor_scalar on trn1")


def test_scalar_tensor_tensor(on):
    x, y, column = rand(16, 8), rand(16, 8), rand(16, 1)
    made = lanes.ScalarTensorTensor(
        on.new((16, 8)), on.put(x), "multiply", on.put(column), "subtract", on.put(y),
        reverse1=True,
    )  # fmt: skip
    np.testing.assert_array_equal(on.run(made), y - x * column)
    bits = lanes.ScalarTensorTensor(on.put(x), on.put(x), "and", 1, "add", on.put(y))
    refuses(on, bits, "op and is bitwise; only arithmetic")


def test_copies_of_one_dtype_keep_bits_and_others_go_through_float32(on):
    big = np.array([[2**24 + 1, 7]], np.int32)
    assert on.run(lanes.Copy(on.new((1, 2), "i32"), on.put(big))).tolist() == big.tolist()
    out = on.run(lanes.Copy(on.new((1, 2), "ui32"), on.put(big)))
    assert out.tolist() == [[2**24, 7]]
    halves = np.array([[0.5, 1.5, -2.5, 300.0]], np.float32)
    assert on.run(lanes.Copy(on.new((1, 4), "ui8"), on.put(halves))).tolist() == [[0, 2, 0, 255]]


def test_copy_refuses_the_scalar_engine_of_v2():
    one = Bench(TRN1)
    x = one.put(rand(4, 8))
    refuses(one, lanes.Copy(x, x, "scalar"), "engine scalar cannot copy on trn1")


def test_fast_modes_of_copies(on):
    wide, half = on.new((128, 1024)), on.new((128, 1024), "bf16")
    assert on.cycles(lanes.Copy(wide, wide)) == 1024
    assert on.cycles(lanes.Copy(half, half)) == 256
    assert on.cycles(lanes.TensorTensor(wide, wide, wide, "add")) == 2048
    assert on.cycles(lanes.TensorTensor(half, half, half, "add")) == 1024


@pytest.mark.parametrize("dtype, value", [("f32", -1.5), ("bf16", 2.0), ("i32", -7), ("ui8", 255)])
def test_memset(on, dtype, value):
    assert (on.run(lanes.Memset(on.new((4, 3), dtype), value)) == value).all()


def test_reciprocal_costs_eight_cycles_an_element(on):
    x = np.float32(2) ** np.arange(-4, 4, dtype=np.float32)[None]
    made = lanes.Reciprocal(on.new((1, 8)), on.put(x))
    np.testing.assert_array_equal(on.run(made), 1 / x)
    long = on.new((128, 512))
    assert on.cycles(lanes.Reciprocal(long, long)) == 4096


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(["add", "multiply", "maximum", "minimum"]),
    st.sampled_from(["f32", "bf16", "i16"]),
    st.integers(1, 3),
    st.booleans(),
)
def test_tensor_reduce_of_the_last_axes(op, dtype, axes, negate):
    on = Bench()
    x = on.put(RNG.integers(1, 4, (8, 2, 3, 4)), dtype)
    shape = (8, 2, 3, 4)[: 4 - axes] + (1,) * (1 if axes == 3 else 0)
    out = on.run(lanes.TensorReduce(on.new(shape), x, op, axes, negate))
    ufunc = BINARY[op]
    expected = ufunc.reduce(x.array.astype(np.float32), axis=tuple(range(4 - axes, 4)))
    np.testing.assert_array_equal(out.reshape(expected.shape), -expected if negate else expected)


def test_tensor_reduce_of_bits_and_what_it_refuses(on):
    x = on.put(np.array([[1, 2, 4]], np.uint8))
    assert on.run(lanes.TensorReduce(on.new((1, 1), "ui8"), x, "or", 1)).item() == 7
    refuses(on, lanes.TensorReduce(on.new((1, 1), "ui8"), x, "or", 1, True), "negate is for arith")
    refuses(on, lanes.TensorReduce(on.new((1, 1)), x, "add", 2), "partition axis cannot be reduced")
    refuses(on, lanes.TensorReduce(on.new((1, 1)), x, "equal", 1), "op is equal; allowed: add")


# ---- predicates and shuffles -----------------------------------------------------------------


@pytest.mark.parametrize("reverse", [False, True])
def test_copy_predicated_leaves_the_rest(on, reverse):
    old, new = rand(8, 4, 2), rand(8, 8)
    mask = RNG.integers(0, 2, (8, 8)).astype(np.uint8)
    dst = on.put(old)
    out = on.run(CopyPredicated(dst, on.put(new), on.put(mask), reverse))
    where = (mask == 0) if reverse else (mask != 0)
    np.testing.assert_array_equal(out, np.where(where, new, old.reshape(8, 8)).reshape(old.shape))
    scalar = on.run(CopyPredicated(dst, 3.0, on.put(np.ones((8, 8), np.uint8))))
    assert (scalar == 3).all()


def test_copy_predicated_refuses(on):
    x, mask = on.put(rand(4, 8)), on.put(np.ones((4, 8), np.uint8))
    refuses(on, CopyPredicated(x, x, x), "predicate is f32; allowed: ui8, ui16, ui32")
    refuses(on, CopyPredicated(x, on.put(rand(4, 8), "bf16"), mask), "src is bf16 and dst f32")
    psum = on.put(rand(4, 8), space="psum")
    inside = on.put(np.ones((4, 8), np.uint8), space="psum")
    refuses(on, CopyPredicated(x, psum, inside), "src and predicate are in psum")


def test_stream_shuffle_inside_quadrants(on):
    x = rand(64, 3)
    mask = [31 - k for k in range(32)]
    mask[0], mask[5] = 255, 7
    dst = on.put(np.full((64, 3), 9.0))
    out = on.run(StreamShuffle(dst, on.put(x), tuple(mask)))
    for row in range(64):
        source = mask[row % 32]
        expected = [9, 9, 9] if source == 255 else x[row // 32 * 32 + source]
        np.testing.assert_array_equal(out[row], expected)


def test_stream_shuffle_in_place_and_refusals(on):
    x = on.put(np.arange(32, dtype=np.float32)[:, None])
    out = on.run(StreamShuffle(x, x, tuple((k + 1) % 32 for k in range(32))))
    assert out.ravel().tolist() == [*range(1, 32), 0]
    refuses(on, StreamShuffle(x, x, (0,) * 31), "shuffle_mask has 31 elements; it must have 32")
    refuses(on, StreamShuffle(x, x, (32,) + (0,) * 31), r"shuffle_mask\[0\] is 32; allowed: 0 to")
    refuses(on, StreamShuffle(x, on.put(rand(32, 2)), (0,) * 32), "src has 2 elements per part")
    tall, part = on.put(rand(128, 1)), on.put(rand(128, 1))[32:96]
    refuses(on, StreamShuffle(part, tall[0:64], (0,) * 32), "dst (starts at|has 64 partitions)")


# ---- laws ------------------------------------------------------------------------------------


def test_time_does_not_depend_on_data():
    def program(core: Core) -> int:
        x = core.sbuf.allocate((128, 64), "f32", "x")
        y = core.hbm.allocate((128, 64), "f32", "y")
        w = core.sbuf.allocate((128, 1), "ui32", "w")
        p = core.psum.allocate((64, 64), "f32", "p")
        with np.errstate(all="ignore"):
            core.issue(Iota(w, ((1, 1),), 0, 1))
            core.issue(lanes.Memset(x, 1.0))
            core.issue(DmaCopy(y, x))
            core.issue(DmaGather(x, y, w, 128))
            core.issue(Matmul(p, x, x))
            core.issue(Activation(p, p, "exponential", command="reset_reduce"))
            core.issue(Max8(core.sbuf.allocate((64, 8), "f32", "m"), p))
        return core.drain()

    assert program(Core(TRN2)) == program(Core(TRN2, data=False)) > 0
