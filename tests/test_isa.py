"""Every instruction: values against numpy, what it refuses, what it costs."""

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trnsim.device import arithmetic
from trnsim.device.chip import load_chip
from trnsim.device.core import Core
from trnsim.device.dtypes import numpy_dtype
from trnsim.device.errors import IllegalInstruction
from trnsim.device.isa.base import Instruction, engine_for
from trnsim.device.isa.dma import DmaCopy, DmaGather, DmaScatter, DmaTranspose
from trnsim.device.isa.gpsimd import (
    Custom,
    Gather,
    Iota,
    PartitionBroadcast,
    PartitionReduce,
    Scatter,
)
from trnsim.device.isa.scalar import FUNCTIONS, Activation
from trnsim.device.isa.tensor import Matmul, Transpose
from trnsim.device.isa.vector import (
    BINARY,
    Copy,
    Memset,
    ScalarTensorTensor,
    Select,
    TensorReduce,
    TensorScalar,
    TensorTensor,
    VectorTranspose,
)
from trnsim.device.memory import Memory, View
from trnsim.device.units import cycles_ps, transfer_ps

TRN1, TRN2, TRN3 = load_chip("trn1"), load_chip("trn2"), load_chip("trn3")
RNG = np.random.default_rng(0)
F32, BF16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)


@pytest.fixture
def core() -> Core:
    return Core(TRN2)


def tile(core: Core, values, dtype: str | None = None, space: str = "sbuf") -> View:
    """A tensor on chip with these values."""
    values = np.asarray(values)
    names = {F32: "f32", BF16: "bf16", np.dtype(np.int32): "i32", np.dtype(np.uint32): "ui32"}
    dtype = dtype or names[values.dtype]
    view = getattr(core, space).allocate(values.shape, dtype, "tile")
    view.array[...] = values.astype(numpy_dtype(dtype))
    return view


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def empty(core: Core, shape, dtype: str = "f32", space: str = "sbuf") -> View:
    return getattr(core, space).allocate(shape, dtype, "out")


def blank(shape, dtype: str = "f32", space: str = "sbuf", chip=TRN2) -> View:
    """An operand without data, for legality and cost."""
    if space == "hbm":
        return Memory.hbm(1 << 34, data=False).allocate(shape, dtype, "value")
    return getattr(Memory, space)(chip, data=False).allocate(shape, dtype, "tile")


def run(core: Core, instruction: Instruction) -> np.ndarray:
    core.issue(instruction)
    return instruction.writes()[0].array


def refused(instruction: Instruction, chip=TRN2) -> str:
    with pytest.raises(IllegalInstruction) as caught:
        instruction.check(chip)
    return str(caught.value)


# ---- Tensor engine: values -----------------------------------------------------------------


@pytest.mark.parametrize(("k", "m", "n"), [(128, 128, 512), (1, 1, 1), (7, 100, 33), (128, 1, 512)])
def test_matmul_is_the_products_sum(core, k, m, n):
    s, x = floats(k, m), floats(k, n)
    dst = empty(core, (m, n), space="psum")
    found = run(core, Matmul(dst, tile(core, s), tile(core, x)))
    np.testing.assert_allclose(found, np.matmul(s.T, x), rtol=1e-4, atol=1e-4)


def test_matmul_accumulates_in_psum(core):
    s, x = floats(128, 3, 64), floats(128, 3, 200)
    dst, stationary, moving = empty(core, (64, 200), space="psum"), tile(core, s), tile(core, x)
    for k in range(3):
        core.issue(Matmul(dst, stationary[:, k], moving[:, k], accumulate=k > 0))
    expected = np.einsum("pkm,pkn->mn", s.astype(np.float64), x.astype(np.float64))
    np.testing.assert_allclose(dst.array, expected, rtol=1e-4, atol=1e-4)


def test_accumulating_on_fresh_memory_shows(core):
    dst = empty(core, (4, 8), space="psum")
    run(core, Matmul(dst, tile(core, floats(4, 4)), tile(core, floats(4, 8)), accumulate=True))
    assert np.isnan(dst.array).all()


@pytest.mark.parametrize("left", ["bf16", "f16", "f8E4M3", "f8E5M2"])
@pytest.mark.parametrize("right", ["bf16", "f8E4M3FN"])
def test_narrow_matmul_accumulates_in_float32(core, left, right):
    """Products of narrow floats are exact in float32; the sum is a float32 sum."""
    s, x = tile(core, floats(128, 32), left), tile(core, floats(128, 40), right)
    dst = empty(core, (32, 40), space="psum")
    found = run(core, Matmul(dst, s, x))
    wide = s.array.astype(np.float64).T @ x.array.astype(np.float64)
    np.testing.assert_allclose(found, wide, rtol=1e-5, atol=1e-4)


def test_double_row_contracts_twice_as_much(core):
    s, x = floats(128, 2, 16), floats(128, 2, 24)
    stationary, moving = tile(core, s, "f8E4M3"), tile(core, x, "f8E5M2")
    dst = empty(core, (16, 24), space="psum")
    found = run(core, Matmul(dst, stationary, moving, double_row=True))
    wide = [v.array.astype(np.float64) for v in (stationary, moving)]
    np.testing.assert_allclose(found, np.einsum("pkm,pkn->mn", *wide), rtol=1e-5, atol=1e-4)


def test_matmul_writes_bfloat16_on_v4():
    core = Core(TRN3)
    s, x = tile(core, floats(64, 8), "bf16"), tile(core, floats(64, 16), "bf16")
    dst = empty(core, (8, 16), "bf16", space="psum")
    first = run(core, Matmul(dst, s, x)).copy()
    product = s.array.astype(np.float32).T @ x.array.astype(np.float32)
    np.testing.assert_array_equal(first, product.astype(BF16))
    second = run(core, Matmul(dst, s, x, accumulate=True))
    np.testing.assert_array_equal(second, (first.astype(np.float32) + product).astype(BF16))


@pytest.mark.parametrize("dtype", ["f32", "bf16", "i32", "f16"])
def test_transpose_keeps_the_bits(core, dtype):
    src = empty(core, (100, 60), dtype)
    src.array.view(np.uint8)[...] = RNG.integers(0, 256, src.array.view(np.uint8).shape)
    dst = empty(core, (60, 100), dtype, "psum")
    found = run(core, Transpose(dst, src))
    assert found.tobytes() == np.ascontiguousarray(src.array.T).tobytes()


def test_transpose_on_v2_writes_float32():
    core = Core(TRN1)
    src = tile(core, floats(32, 16), "bf16")
    found = run(core, Transpose(empty(core, (16, 32), space="psum"), src))
    np.testing.assert_array_equal(found, src.array.astype(np.float32).T)


# ---- lane engines: values ------------------------------------------------------------------


BITWISE = {"and", "or", "xor", "shift_left", "shift_right_logical", "shift_right_arithmetic"}


@pytest.mark.parametrize(
    ("op", "dtype"),
    [(op, "i32") for op in sorted(BINARY)]
    + [(op, dtype) for op in sorted(BINARY - BITWISE) for dtype in ("f32", "bf16")],
)
def test_tensor_tensor(core, op, dtype):
    a = tile(
        core, (floats(64, 40) * 9).astype(np.int32) if dtype == "i32" else floats(64, 40), dtype
    )
    b = tile(core, np.abs(floats(64, 40) * 9).astype(np.int32) % 7 + (dtype == "i32"), dtype)
    names = {
        "equal": np.equal, "not_equal": np.not_equal, "less": np.less,
        "less_equal": np.less_equal, "greater": np.greater, "greater_equal": np.greater_equal,
    }  # fmt: skip
    dst = empty(core, (64, 40), dtype)
    found = run(core, TensorTensor(dst, a, b, op, engine=engine_for(op, dtype, dtype)))
    kind = numpy_dtype(dtype)
    if op in names:
        expected = names[op](a.array, b.array).astype(kind)
    else:
        expected = arithmetic.apply(op, a.array, b.array, out=kind)
    wide = np.int64 if dtype == "i32" else np.float64
    np.testing.assert_array_equal(found.astype(wide), expected.astype(wide))


def test_operands_of_several_dtypes_compute_in_float32(core):
    a, b = tile(core, floats(8, 30), "bf16"), tile(core, floats(8, 30))
    found = run(core, TensorTensor(empty(core, (8, 30), "f16"), a, b, "multiply"))
    expected = (a.array.astype(np.float32) * b.array).astype(np.float16)
    np.testing.assert_array_equal(found, expected)


def test_integers_are_exact_on_gpsimd(core):
    """Threefry's additions wrap at 32 bits."""
    a = tile(core, RNG.integers(0, 2**32, (128, 16), dtype=np.uint32))
    b = tile(core, RNG.integers(0, 2**32, (128, 16), dtype=np.uint32))
    found = run(core, TensorTensor(empty(core, (128, 16), "ui32"), a, b, "add", engine="gpsimd"))
    np.testing.assert_array_equal(found, a.array + b.array)
    shifted = TensorScalar(empty(core, (128, 16), "ui32"), a, "shift_left", 13, "xor", 0xFF)
    np.testing.assert_array_equal(run(core, shifted), (a.array << 13) ^ 0xFF)


def test_tensor_scalar_with_two_operators(core):
    x, column = floats(100, 3, 20), floats(100, 1)
    src, scale = tile(core, x), tile(core, column)
    dst = empty(core, (100, 3, 20))
    found = run(core, TensorScalar(dst, src, "multiply", scale, "subtract", 0.5, reverse1=True))
    np.testing.assert_array_equal(found, np.float32(0.5) - x * column[:, :, None])


def test_tensor_scalar_rounds_once(core):
    src = tile(core, floats(16, 50), "bf16")
    dst = empty(core, (16, 50), "bf16")
    found = run(core, TensorScalar(dst, src, "multiply", 1.7, "add", 3.1))
    exact = src.array.astype(np.float32) * np.float32(1.7) + np.float32(3.1)
    np.testing.assert_array_equal(found, exact.astype(BF16))


def test_masks_and_counts_scale_as_numbers(core):
    mask = tile(core, RNG.integers(0, 2, (8, 10)).astype(bool), "i1")
    found = run(core, TensorScalar(empty(core, (8, 10)), mask, "multiply", -1e9, "add", 1.0))
    np.testing.assert_array_equal(found, mask.array * np.float32(-1e9) + np.float32(1))
    counts = tile(core, RNG.integers(-9, 9, (8, 10)).astype(np.int32))
    found = run(core, TensorScalar(empty(core, (8, 10)), counts, "multiply", 0.25))
    np.testing.assert_array_equal(found, counts.array * np.float32(0.25))


def test_comparison_with_a_number_gives_a_mask(core):
    x = floats(20, 30)
    found = run(core, TensorScalar(empty(core, (20, 30), "i1"), tile(core, x), "greater", 0.0))
    np.testing.assert_array_equal(found, x > 0)


def test_scalar_tensor_tensor(core):
    """The optimizer's step: parameter - rate * gradient in one instruction."""
    gradient, parameter = floats(64, 80), floats(64, 80)
    dst = empty(core, (64, 80))
    step = ScalarTensorTensor(
        dst, tile(core, gradient), "multiply", 0.1, "subtract", tile(core, parameter), reverse1=True
    )
    np.testing.assert_array_equal(run(core, step), parameter - gradient * np.float32(0.1))


@pytest.mark.parametrize("engine", ["vector", "scalar", "gpsimd"])
@pytest.mark.parametrize("to", ["bf16", "f16", "f8E4M3", "i32", "i1", "f32"])
def test_copy_casts(core, engine, to):
    src = tile(core, floats(32, 20) * 3)
    found = run(core, Copy(empty(core, (32, 20), to), src, engine=engine))
    np.testing.assert_array_equal(found, arithmetic.convert(src.array, numpy_dtype(to)))


def test_memset_and_select(core):
    a, b = tile(core, floats(64, 9)), tile(core, floats(64, 9), "bf16")
    mask = tile(core, RNG.integers(0, 2, (64, 9)).astype(bool), "i1")
    dst = empty(core, (64, 9))
    np.testing.assert_array_equal(run(core, Memset(dst, 2.5)), np.full((64, 9), 2.5, np.float32))
    both = np.where(mask.array, a.array, b.array.astype(np.float32))
    np.testing.assert_array_equal(run(core, Select(dst, mask, a, b)), both)
    filled = np.where(mask.array, a.array, np.float32(-np.inf))
    np.testing.assert_array_equal(run(core, Select(dst, mask, a, -math.inf)), filled)


@pytest.mark.parametrize(
    ("op", "function"),
    [("add", np.sum), ("maximum", np.max), ("minimum", np.min), ("multiply", np.prod)],
)
def test_tensor_reduce(core, op, function):
    x = floats(40, 6, 10)
    src = tile(core, x)
    found = run(core, TensorReduce(empty(core, (40, 1)), src, op))
    np.testing.assert_allclose(found[:, 0], function(x, axis=(1, 2)), rtol=1e-4, atol=1e-5)
    found = run(core, TensorReduce(empty(core, (40, 6)), src, op, axes=1, negate=True))
    np.testing.assert_allclose(found, -function(x, axis=2), rtol=1e-5, atol=1e-6)


def test_narrow_sums_accumulate_in_float32(core):
    src = tile(core, np.full((4, 1000), 1.0), "bf16")  # bf16 sums would stop at 256
    assert (run(core, TensorReduce(empty(core, (4, 1), "bf16"), src, "add")) == 1000).all()


def test_vector_transpose(core):
    x = floats(32, 20)
    np.testing.assert_array_equal(
        run(core, VectorTranspose(empty(core, (20, 32)), tile(core, x))), x.T
    )


@pytest.mark.parametrize("function", sorted(FUNCTIONS))
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_activation_functions(core, function, dtype):
    src = tile(core, np.abs(floats(30, 40)) + 0.1, dtype)
    found = run(core, Activation(empty(core, (30, 40), dtype), src, function))
    x, kind = src.array.astype(np.float32), numpy_dtype(dtype)
    own = {"copy": lambda: x, "square": lambda: x * x, "reciprocal": lambda: 1 / x}
    expected = own[function]() if function in own else arithmetic.apply(function, x)
    np.testing.assert_array_equal(found, expected.astype(kind))


def test_activation_scales_shifts_and_sums(core):
    """The heart of softmax: exp(x - max) and its row sums in one pass."""
    x, low = floats(128, 4, 50), floats(128, 1)
    src, bias = tile(core, x), tile(core, low)
    dst, total = empty(core, (128, 4, 50), "bf16"), empty(core, (128, 1))
    core.issue(Activation(dst, src, "exponential", scale=0.5, bias=bias, reduce=total))
    expected = np.exp(x * np.float32(0.5) + low[:, :, None])
    np.testing.assert_array_equal(dst.array, expected.astype(BF16))
    np.testing.assert_allclose(total.array[:, 0], expected.sum(axis=(1, 2)), rtol=1e-5)


# ---- GpSimd and DMA: values ----------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["i32", "ui32", "f32", "bf16"])
def test_iota(core, dtype):
    dst = empty(core, (50, 3, 7), dtype)
    found = run(core, Iota(dst, steps=(10, 1), start=5, channel=2))
    p, i, j = np.meshgrid(np.arange(50), np.arange(3), np.arange(7), indexing="ij")
    np.testing.assert_array_equal(found, (5 + 2 * p + 10 * i + j).astype(numpy_dtype(dtype)))


def test_partition_reduce_and_broadcast(core):
    x = floats(100, 30)
    row = empty(core, (1, 30))
    found = run(core, PartitionReduce(row, tile(core, x), "maximum"))
    np.testing.assert_array_equal(found, x.max(axis=0, keepdims=True))
    found = run(core, PartitionBroadcast(empty(core, (64, 30)), row))
    np.testing.assert_array_equal(found, np.broadcast_to(x.max(axis=0), (64, 30)))


def test_gather_and_scatter_along_free(core):
    x = floats(32, 20)
    index = np.stack([RNG.permutation(20)[:8] for _ in range(32)]).astype(np.int32)
    src, where = tile(core, x), tile(core, index)
    found = run(core, Gather(empty(core, (32, 8)), src, where))
    np.testing.assert_array_equal(found, np.take_along_axis(x, index, axis=1))
    back = tile(core, np.zeros((32, 20), np.float32))
    expected = np.zeros((32, 20), np.float32)
    np.put_along_axis(expected, index, found, axis=1)
    np.testing.assert_array_equal(run(core, Scatter(back, tile(core, found), where)), expected)
    again = Scatter(back, tile(core, found), where, accumulate=True)
    np.testing.assert_array_equal(run(core, again), expected * 2)


def test_scatter_of_equal_positions(core):
    where = tile(core, np.zeros((2, 3), np.int32))
    src = tile(core, np.array([[1, 2, 3], [4, 5, 6]], np.float32))
    dst = tile(core, np.zeros((2, 1), np.float32))
    assert run(core, Scatter(dst, src, where)).tolist() == [[3], [6]]
    assert run(core, Scatter(dst, src, where, accumulate=True)).tolist() == [[9], [21]]


def test_custom_functions(core):
    x = tile(core, RNG.integers(0, 2**32, (16, 9), dtype=np.uint32))
    found = run(core, Custom(empty(core, (16, 9), "ui32"), (x,), "popcnt"))
    np.testing.assert_array_equal(found, np.bitwise_count(x.array))
    a, b = tile(core, floats(16, 9)), tile(core, floats(16, 9))
    found = run(core, Custom(empty(core, (16, 9)), (a, b), "atan2"))
    np.testing.assert_array_equal(found, np.arctan2(a.array, b.array))
    rounded = Custom(
        empty(core, (16, 9)), (a,), "reduce_precision", {"exponent_bits": 8, "mantissa_bits": 7}
    )
    np.testing.assert_array_equal(run(core, rounded), a.array.astype(BF16).astype(np.float32))


def test_dma_moves_and_casts(core):
    x = floats(64, 50)
    value = core.hbm.adopt(x, (64, 50), "f32", "x")
    sbuf = empty(core, (64, 20), "bf16")
    np.testing.assert_array_equal(
        run(core, DmaCopy(sbuf, value[:, 10:30])), x[:, 10:30].astype(BF16)
    )
    row = DmaCopy(empty(core, (64, 50)), value[3:4].broadcast(64, 50))
    np.testing.assert_array_equal(run(core, row), np.broadcast_to(x[3], (64, 50)))
    expected = x.copy()
    expected[:, 0:20] += sbuf.array
    run(core, DmaCopy(value[:, 0:20], sbuf, accumulate=True))
    np.testing.assert_array_equal(x, expected)


def test_dma_transpose(core):
    x = floats(40, 64)
    value = core.hbm.adopt(x, (40, 64), "f32", "x")
    np.testing.assert_array_equal(run(core, DmaTranspose(empty(core, (64, 40)), value)), x.T)


def test_dma_gather_rows(core):
    table = floats(1000, 24)
    value = core.hbm.adopt(table, (1000, 24), "f32", "table")
    index = tile(core, np.array([[3], [999], [3], [1000], [-1]], np.int32))
    dst = tile(core, np.full((5, 24), 7, np.float32))
    found = run(core, DmaGather(dst, value, index, bounds="skip"))
    np.testing.assert_array_equal(found[:3], table[[3, 999, 3]])
    assert (found[3:] == 7).all()
    found = run(core, DmaGather(dst, value, index, bounds="clamp"))
    np.testing.assert_array_equal(found, table[[3, 999, 3, 999, 0]])
    with pytest.raises(IllegalInstruction, match="^DmaGather: index is 1000; limit: 0 to 999$"):
        core.issue(DmaGather(dst, value, index))


def test_dma_scatter_rows(core):
    """The gradient of an embedding: rows of one number add up."""
    table, rows = np.zeros((50, 8), np.float32), floats(6, 8)
    value = core.hbm.adopt(table, (50, 8), "f32", "table")
    numbers = np.array([4, 9, 4, 4, 50, 0], np.int32)
    index, src = tile(core, numbers.reshape(6, 1)), tile(core, rows)
    core.issue(DmaScatter(value, src, index, accumulate=True, bounds="skip"))
    expected = np.zeros((50, 8), np.float32)
    np.add.at(expected, numbers[[0, 1, 2, 3, 5]], rows[[0, 1, 2, 3, 5]])
    np.testing.assert_array_equal(table, expected)
    core.issue(DmaScatter(value, src, index, bounds="skip"))
    np.testing.assert_array_equal(table[[4, 9, 0]], rows[[3, 1, 5]])


# ---- legality ------------------------------------------------------------------------------


def test_matmul_limits():
    dst, wide = blank((128, 512), space="psum"), blank((128, 640))
    s, x = blank((128, 128)), blank((128, 512))
    Matmul(dst, s, x).check(TRN2)
    assert refused(Matmul(dst, s, wide)) == "Matmul: moving free size is 640; limit: 512"
    assert (
        refused(Matmul(dst, wide[:, 0:129], x)) == "Matmul: stationary free size is 129; limit: 128"
    )
    assert refused(Matmul(dst, s[0:64], x)) == (
        "Matmul: stationary has 64 partitions and moving 128: the contraction must be equal"
    )
    assert refused(Matmul(dst[0:64], s, x)) == (
        "Matmul: dst has shape [64, 512]; stationary and moving give [128, 512]"
    )
    assert refused(Matmul(x, s, x)) == (
        "Matmul: dst must be in psum for the tensor engine, not in sbuf"
    )
    assert refused(Matmul(dst, s, dst)) == (
        "Matmul: moving must be in sbuf for the tensor engine, not in psum"
    )


def test_matmul_dtypes():
    dst, s = blank((128, 64), space="psum"), blank((128, 128))
    narrow = blank((128, 64), "bf16")
    assert refused(Matmul(dst, s, narrow)) == (
        "Matmul: stationary is f32 and moving bf16; f32 pairs only with f32"
    )
    assert refused(Matmul(dst, s, blank((128, 64), "i32"))).startswith(
        "Matmul: moving is i32; allowed"
    )
    low = blank((128, 64), "bf16", "psum")
    assert refused(Matmul(low, s, blank((128, 64)))) == (
        "Matmul: dst is bf16; a matmul writes f32 on trn2"
    )
    Matmul(low, s, blank((128, 64))).check(TRN3)
    fp8 = blank((128, 2, 64), "f8E4M3")
    double = Matmul(dst[0:64], fp8, fp8, double_row=True)
    double.check(TRN2)
    assert refused(double, TRN1).startswith(
        "Matmul: double_row needs fp8 operands on NeuronCore v3"
    )


def test_matmul_stays_in_one_bank():
    memory = Memory.psum(TRN2, data=False)
    dst = memory.allocate((128, 512), "f32", "dst", address=1024)
    s, x = blank((128, 128)), blank((128, 512))
    assert refused(Matmul(dst, s, x)) == (
        "Matmul: dst takes bytes 1024 to 3072 of each partition; limit: one PSUM bank of 2048 B"
    )
    Matmul(dst[:, 256:512], s, x[:, 0:256]).check(TRN2)
    long = Memory.psum(TRN3, data=False).allocate((128, 1024), "f32", "long")
    Matmul(long, s, blank((128, 1024))).check(TRN3)


@pytest.mark.parametrize(
    ("count", "start", "allowed"),
    [
        (65, 32, "0"), (128, 0, None), (64, 64, None), (33, 32, "0, 64"), (64, 0, None),
        (32, 96, None), (32, 16, "0, 32, 64, 96"), (1, 32, None), (1, 1, "0, 32, 64, 96"),
    ],
)  # fmt: skip
def test_partition_starts(count, start, allowed):
    src = blank((128, 16))[start : start + count]
    copy = Copy(blank((count, 16)), src)
    if allowed is None:
        copy.check(TRN2)
    else:
        assert refused(copy) == (
            f"Copy: src has {count} partitions and starts at {start}; allowed starts: {allowed}"
        )


def test_which_engine_reaches_what():
    s, p, h = blank((128, 8)), blank((128, 8), space="psum"), blank((128, 8), space="hbm")
    assert refused(Copy(s, p, engine="gpsimd")) == (
        "Copy: src must be in sbuf for the gpsimd engine, not in psum"
    )
    assert refused(Copy(s, h)) == (
        "Copy: src must be in sbuf or psum for the vector engine, not in hbm"
    )
    assert refused(DmaCopy(h, p)) == "DmaCopy: src must be in hbm or sbuf for DMA, not in psum"
    assert refused(TensorTensor(s, p, p, "add")) == (
        "TensorTensor: a and b are both in psum; limit: one of them"
    )
    TensorTensor(p, p, s, "add").check(TRN2)
    assert refused(TensorTensor(s, s, s, "add", engine="scalar")) == (
        "TensorTensor: engine is scalar; allowed: vector, gpsimd"
    )
    assert refused(Copy(s, s, engine="scalar"), TRN1) == (
        "Copy: engine scalar cannot copy on trn1; use Activation with function copy"
    )


def test_operators_and_shapes():
    s, t = blank((128, 8)), blank((128, 9))
    assert refused(TensorTensor(s, s, t, "add")) == (
        "TensorTensor: b has shape [128, 9] and dst [128, 8]; they must be equal"
    )
    assert refused(TensorTensor(s, s, s, "plus")).startswith(
        "TensorTensor: op is plus; allowed: add, and, divide"
    )
    assert refused(TensorTensor(s, s, s, "power")) == (
        "TensorTensor: op power runs on gpsimd, not on vector"
    )
    i = blank((128, 8), "i32")
    assert refused(TensorTensor(i, i, i, "add")) == (
        "TensorTensor: op add of i32 is exact only on gpsimd; vector computes in f32"
    )
    TensorTensor(i, i, i, "xor").check(TRN2)
    assert refused(TensorScalar(s, s, "add", t)) == (
        "TensorScalar: operand0 has shape [128, 9]; it must be [128, 1]"
    )
    assert refused(TensorScalar(s, s, "add", 1, op1="add")) == (
        "TensorScalar: op1 is add and operand1 None: both or neither"
    )
    assert refused(Activation(s, s, "wave")).startswith(
        "Activation: function is wave; allowed: copy"
    )
    assert refused(TensorReduce(t, s, "add")) == (
        "TensorReduce: dst has shape [128, 9]; reducing src [128, 8] leaves [128, 1]"
    )
    wide = blank((128, 8), "i64")
    assert refused(Copy(wide, wide)) == "Copy: dst is i64; engines have no 64-bit types"
    deep = blank((2, 1, 2, 1, 2, 2))
    assert refused(Copy(deep, deep)) == "Copy: dst has 5 free axes; limit: 4"


def test_access_sizes():
    long = blank((2, 70_000), "i8", chip=TRN3)
    assert refused(Copy(long, long), TRN3) == (
        "Copy: dst has 70000 elements per partition; limit in sbuf: 65536"
    )


def test_transposes():
    src, dst = blank((128, 128), "bf16"), blank((128, 128), "bf16", "psum")
    Transpose(dst, src).check(TRN2)
    assert refused(Transpose(dst, src), TRN1) == (
        "Transpose: src is bf16 and dst bf16; on trn1 floats only, written as f32"
    )
    assert refused(VectorTranspose(blank((64, 32)), blank((32, 64)))) == (
        "VectorTranspose: src has shape [32, 64]; limit: [32, 32]"
    )
    assert refused(DmaTranspose(blank((8, 4), "i8"), blank((4, 8), "i8", "hbm"))) == (
        "DmaTranspose: src is i8 and dst i8; one dtype of 2 or 4 bytes"
    )


def test_rows():
    table, rows = blank((100, 8), space="hbm"), blank((16, 8))
    index = blank((16, 1), "i32")
    DmaGather(rows, table, index).check(TRN2)
    assert refused(DmaGather(rows, rows, index)) == "DmaGather: src must be in hbm, not in sbuf"
    assert refused(DmaGather(rows, table, blank((8, 1), "i32"))) == (
        "DmaGather: index has shape [8, 1]; it must be [16, 1]"
    )
    assert refused(DmaScatter(table, rows, blank((16, 1)))) == (
        "DmaScatter: index is f32; allowed: i32, ui32"
    )
    assert refused(DmaScatter(table, rows[:, 0:4], index)) == (
        "DmaScatter: src has rows of [4] and dst of [8]; they must be equal"
    )


# ---- cost: closed forms --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "n", "cycles"),
    [
        ("bf16", 512, 512),
        ("bf16", 1, 64),
        ("f8E4M3", 300, 300),
        ("f32", 512, 2048),
        ("f32", 9, 256),
    ],
)
def test_matmul_cost(dtype, n, cycles):
    moving = blank((128, n), dtype)
    matmul = Matmul(blank((128, n), space="psum"), blank((128, 128), dtype), moving)
    assert matmul.duration(TRN2) == cycles_ps(cycles, TRN2.clock_hz["tensor"])
    assert matmul.flops == 2 * 128 * 128 * n


def test_matmul_reaches_the_printed_peaks():
    """TFLOP/s of full tiles, against the peaks of the architecture pages (rounded there)."""
    for chip in (TRN1, TRN2, TRN3):
        for dtype in ("bf16", "f32"):
            operands = blank((128, 128), dtype), blank((128, 512), dtype)
            matmul = Matmul(blank((128, 512), space="psum"), *operands)
            rate = matmul.flops / matmul.duration(chip) * 1e12
            assert rate == pytest.approx(chip.peak(dtype), rel=0.02)


def test_double_row_doubles_the_rate():
    fp8 = blank((128, 2, 128), "f8E4M3"), blank((128, 2, 512), "f8E4M3")
    matmul = Matmul(blank((128, 512), space="psum"), *fp8, double_row=True)
    assert matmul.flops / matmul.duration(TRN2) * 1e12 == pytest.approx(TRN2.peak("f8"), rel=0.02)


def test_measured_matmul():
    """nki kernel-optimization figures: 859 ns for 128 x 128 x 512 in float32 on Trainium2."""
    matmul = Matmul(blank((128, 512), space="psum"), blank((128, 128)), blank((128, 512)))
    assert matmul.duration(TRN2) == pytest.approx(859_000, rel=0.01)


N = 2000


@pytest.mark.parametrize(
    ("make", "cycles"),
    [
        (lambda d, s, p: TensorTensor(d("f32"), d("f32"), d("f32"), "add"), 2 * N),
        (lambda d, s, p: TensorTensor(d("f32"), d("f32"), p("f32"), "add"), N),
        (lambda d, s, p: TensorTensor(d("bf16"), d("bf16"), d("bf16"), "add"), N),
        (lambda d, s, p: TensorScalar(d("f32"), d("f32"), "add", 1.0), N),
        (lambda d, s, p: TensorScalar(d("f32"), d("f32"), "add", 1.0, "multiply", 2.0), N),
        (lambda d, s, p: TensorScalar(d("bf16"), d("bf16"), "add", 1.0), N // 4),
        (lambda d, s, p: Copy(d("bf16"), p("bf16")), N // 2),
        (lambda d, s, p: Copy(d("bf16"), p("f32")), N),
        (lambda d, s, p: Copy(d("bf16"), s("bf16")), N // 2),  # stride 2: 4 B, not contiguous
        (lambda d, s, p: Copy(d("f32"), s("f32")), N),
        (lambda d, s, p: Copy(d("f32"), s("f32", 8)), 2 * N),  # stride 32 B: half the bandwidth
        (lambda d, s, p: Memset(d("f32"), 0), N),
        (lambda d, s, p: Memset(d("bf16"), 0), N // 2),
        (lambda d, s, p: Memset(d("bf16"), 1), N),
        (lambda d, s, p: Select(d("f32"), d("i1"), d("f32"), 0.0), 2 * N),
        (lambda d, s, p: Select(d("f32"), d("i1"), d("f32"), d("f32")), 3 * N),
        (lambda d, s, p: TensorReduce(d("f32")[:, 0:1], d("f32"), "add"), N),
        (lambda d, s, p: TensorReduce(d("bf16")[:, 0:1], d("bf16"), "add"), N // 2),
        (
            lambda d, s, p: ScalarTensorTensor(d("f32"), d("f32"), "add", 1.0, "add", d("f32")),
            2 * N,
        ),
        (lambda d, s, p: Activation(d("f32"), d("f32"), "exponential"), N),
        (lambda d, s, p: Activation(d("f32"), p("f32"), "tanh", reduce=d("f32")[:, 0:1]), N + 64),
        (lambda d, s, p: Activation(d("f32")[:, 0:2], d("f32")[:, 0:2], "tanh"), 64),
        (lambda d, s, p: Iota(d("i32"), (1,)), 150 + N),
        (lambda d, s, p: TensorTensor(d("i32"), d("i32"), d("i32"), "add", "gpsimd"), 150 + 2 * N),
        (lambda d, s, p: PartitionReduce(d("f32")[0:1], d("f32"), "add"), 150 + 7 * N),
        (lambda d, s, p: PartitionBroadcast(d("f32"), d("f32")[0:1]), 150 + N),
        (lambda d, s, p: Gather(d("f32"), d("f32"), d("i32")), 150 * 4 + N),
        (lambda d, s, p: Custom(d("f32"), (d("f32"), d("f32")), "atan2"), 150 + 2 * N),
    ],
)
def test_lane_costs(make, cycles):
    def dense(dtype):
        return blank((128, N), dtype)

    def strided(dtype, step=2):
        return blank((128, N * step), dtype)[:, ::step]

    def psum(dtype):
        return blank((128, N), dtype, "psum")

    instruction = make(dense, strided, psum)
    instruction.check(TRN2)
    assert instruction.cycles(TRN2) == cycles
    assert instruction.duration(TRN2) == cycles_ps(cycles, TRN2.clock_hz[instruction.engine])


def test_transpose_costs():
    def cost(chip, dtype, out, p, f):
        return Transpose(blank((f, p), out, "psum"), blank((p, f), dtype)).cycles(chip)

    assert cost(TRN2, "bf16", "bf16", 128, 128) == 128
    assert cost(TRN2, "bf16", "bf16", 32, 128) == 64
    assert cost(TRN2, "f32", "f32", 128, 128) == 256
    assert cost(TRN1, "f32", "f32", 128, 128) == 512


RATE = min(TRN2.dma_bytes_per_s, TRN2.stack_bytes_per_s // 2)


@pytest.mark.parametrize(
    ("free", "expected"),
    [
        (1, TRN2.dma_fixed_ps),
        (16, TRN2.dma_fixed_ps),
        (1024, transfer_ps(128 * 4096, int(RATE * 0.966))),
        (8192, transfer_ps(128 * 32768, RATE)),
    ],
)
def test_dma_cost(free, expected):
    """The fixed cost, or bytes over what the payload makes of the core's share of its stack."""
    load = DmaCopy(blank((128, free)), blank((128, free), space="hbm"))
    assert load.duration(TRN2) == expected
    assert load.hbm_bytes == 128 * free * 4


def test_dma_throughput_follows_the_figure():
    """nki-dma-overview.rst: fraction of the plateau by bytes per partition, P = 128."""
    plateau = None
    for nbytes, fraction in reversed(TRN2.dma_efficiency):
        load = DmaCopy(blank((128, nbytes), "i8"), blank((128, nbytes), "i8", "hbm"))
        rate = 128 * nbytes / load.duration(TRN2)
        plateau = plateau or rate
        assert rate / plateau == pytest.approx(fraction, rel=0.08)


def test_dma_of_few_partitions_uses_few_engines():
    """Measured: [4, 4096] bf16, 32 KiB on one engine, takes 1,416 ns (nki-dma-overview.rst)."""
    load = DmaCopy(blank((4, 4096), "bf16"), blank((4, 4096), "bf16", "hbm"))
    assert load.duration(TRN2) == pytest.approx(1_416_000, rel=0.03)


def test_dma_of_single_elements_is_bound_by_descriptors():
    column = blank((128, 512, 8), space="hbm")[:, :, 0]
    load = DmaCopy(blank((128, 512)), column)
    assert load.duration(TRN2) == 128 * 512 * 7_000 // 16


def test_dma_variants():
    src, dst = blank((128, 8192), space="hbm"), blank((128, 8192))
    nbytes = 128 * 8192 * 4
    assert DmaCopy(dst, src, accumulate=True).duration(TRN2) == transfer_ps(nbytes, RATE // 2)
    inside = DmaCopy(dst, blank((128, 8192)))
    assert inside.duration(TRN2) == transfer_ps(nbytes, TRN2.dma_bytes_per_s)
    assert inside.hbm_bytes == 0
    across = DmaCopy(src, blank((128, 8192), space="hbm"))
    assert across.duration(TRN2) == transfer_ps(nbytes, TRN2.stack_bytes_per_s // 4)
    assert across.hbm_bytes == 2 * nbytes
    turned = DmaTranspose(blank((128, 8192)), blank((8192, 128), space="hbm"))
    assert turned.duration(TRN2) == transfer_ps(nbytes, int(RATE * 0.9))


# ---- core ----------------------------------------------------------------------------------


def test_function_table_is_loaded_when_it_changes():
    core = Core(TRN2, data=False, record=True)
    a, b = core.sbuf.allocate((128, 1200), "f32", "a"), core.sbuf.allocate((128, 1200), "f32", "b")
    for function in ("exponential", "exponential", "square", "tanh", "exponential"):
        core.issue(Activation(b, a, function))
    load = TRN2.activation_table_load_ps
    assert [event.name for event in core.timeline.events] == [
        "LoadTable", "Activation", "Activation", "Activation",
        "LoadTable", "Activation", "LoadTable", "Activation",
    ]  # fmt: skip
    assert core.timeline.busy["scalar"] == 3 * load + 5 * 1_000_000


def test_trace_of_a_tile():
    """Load two tiles, multiply, evacuate, store: every start follows from the published numbers."""
    core = Core(TRN2, data=False, record=True)
    x, w, y = (core.hbm.adopt(None, (128, 32), "bf16", n) for n in "xwy")
    sx, sw, sy = (core.sbuf.allocate((128, 32), "bf16", "s" + n) for n in "xwy")
    p = core.psum.allocate((32, 32), "f32", "p")
    for instruction in (
        DmaCopy(sx, x),
        DmaCopy(sw, w),
        Matmul(p, sw, sx),
        Copy(sy[0:32], p),
        DmaCopy(y[0:32], sy[0:32]),
    ):
        core.issue(instruction)
    fixed, start = TRN2.dma_fixed_ps, TRN2.dma_start_ps
    second = start + 2 * fixed
    matmul = second + TRN2.dma_semaphore_ps
    done = matmul + cycles_ps(64, 2_400_000_000)
    copy = done + cycles_ps(100, 2_400_000_000) + TRN2.semaphore_ps
    copied = copy + cycles_ps(64, 960_000_000)
    store = copied + cycles_ps(100, 960_000_000) + TRN2.semaphore_ps + start
    assert core.timeline.events == [
        ("dma", "DmaCopy", start, start + fixed, "load"),
        ("dma", "DmaCopy", start + fixed, second, "load"),
        ("tensor", "Matmul", matmul, done, ""),
        ("vector", "Copy", copy, copied, ""),
        ("dma", "DmaCopy", store, store + fixed, "store"),
    ]
    assert core.drain() == store + fixed + TRN2.dma_semaphore_ps
    assert core.hbm_bytes == (128 + 128 + 32) * 32 * 2
    assert (core.flops, core.instructions) == (2 * 128 * 32 * 32, 5)


def softmax(core: Core, rows: np.ndarray | None, count: int) -> View:
    value = core.hbm.adopt(rows, (count, 96), "f32", "x")
    out = core.hbm.allocate((count, 96), "f32", "y")
    x, e = core.sbuf.allocate((128, 96), "f32", "x"), core.sbuf.allocate((128, 96), "f32", "e")
    top, total = (core.sbuf.allocate((128, 1), "f32", n) for n in ("top", "total"))
    for start in range(0, count, 128):
        part = slice(start, min(start + 128, count))
        n = part.stop - part.start
        core.issue(DmaCopy(x[0:n], value[part]))
        core.issue(TensorReduce(top[0:n], x[0:n], "maximum", negate=True))
        core.issue(Activation(e[0:n], x[0:n], "exponential", bias=top[0:n], reduce=total[0:n]))
        core.issue(Activation(total[0:n], total[0:n], "reciprocal"))
        core.issue(TensorScalar(e[0:n], e[0:n], "multiply", total[0:n]))
        core.issue(DmaCopy(out[part], e[0:n]))
    return out


def test_softmax_and_the_law_of_time():
    """Values against numpy; a run without data gives the same trace."""
    rows = floats(300, 96)
    with_data, without = Core(TRN2, record=True), Core(TRN2, data=False, record=True)
    found = softmax(with_data, rows, 300)
    softmax(without, None, 300)
    exact = np.exp(rows - rows.max(axis=1, keepdims=True))
    np.testing.assert_allclose(found.array, exact / exact.sum(axis=1, keepdims=True), rtol=1e-5)
    assert with_data.timeline.events == without.timeline.events
    assert with_data.drain() == without.drain()


@settings(deadline=None, max_examples=30)
@given(
    st.integers(1, 128), st.integers(1, 128), st.integers(1, 512),
    st.sampled_from(["f32", "bf16", "f16"]),
)  # fmt: skip
def test_any_matmul_is_legal_right_and_costed(k, m, n, dtype):
    core = Core(TRN2)
    s, x = tile(core, floats(k, m), dtype), tile(core, floats(k, n), dtype)
    dst = empty(core, (m, n), space="psum")
    start, end = core.issue(Matmul(dst, s, x))
    wide = s.array.astype(np.float64).T @ x.array.astype(np.float64)
    np.testing.assert_allclose(dst.array, wide, rtol=1e-4, atol=1e-3)
    cycles = max(n, 64) * (4 if dtype == "f32" else 1)
    assert (start, end) == (0, cycles_ps(cycles, TRN2.clock_hz["tensor"]))
