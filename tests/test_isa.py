"""Every instruction: values against numpy; traces of several on a core."""

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
from trnsim.device.memory import View
from trnsim.device.units import cycles_ps

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


def run(core: Core, instruction: Instruction) -> np.ndarray:
    core.issue(instruction)
    return instruction.writes()[0].array


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
    second = start + TRN2.dma_dge_ps + fixed
    matmul = second + TRN2.dma_semaphore_ps
    done = matmul + cycles_ps(64, 2_400_000_000)
    copy = done + cycles_ps(100, 2_400_000_000) + TRN2.semaphore_ps
    copied = copy + cycles_ps(64, 960_000_000)
    store = copied + cycles_ps(100, 960_000_000) + TRN2.semaphore_ps + start
    assert core.timeline.events == [
        ("dma", "DmaCopy", start, start + fixed, "load"),
        ("dma", "DmaCopy", start + TRN2.dma_dge_ps, second, "load"),
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
