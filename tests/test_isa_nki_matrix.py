"""Matmul, transposes, MX formats and DMA, as kernels write them."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trnsim.device.isa.matrix import Matmul, MatmulMx, QuantizeMx, Transpose, scale_rows, scaled
from trnsim.device.isa.moves import (
    DmaCompute,
    DmaCopy,
    DmaGather,
    DmaGatherAdd,
    DmaScatter,
    DmaTranspose,
)
from trnsim.device.units import cycles_ps

from .isa_bench import BF16, RNG, TRN1, TRN2, TRN3, Bench, rand, refuses


@pytest.fixture
def on() -> Bench:
    return Bench()


@pytest.fixture
def on3() -> Bench:
    return Bench(TRN3)


# ---- matmul ----------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(
    st.integers(1, 128), st.integers(1, 128), st.sampled_from([(8,), (2, 4), (3, 2, 2)]),
    st.sampled_from(["f32", "bf16", "f16", "f8E4M3", "f8E5M2"]),
)  # fmt: skip
def test_matmul_flattens_free_axes(k, m, free, dtype):
    on = Bench()
    w, x = on.put(rand(k, m), dtype), on.put(rand(k, *free), dtype)
    out = on.run(Matmul(on.new((m, *free), space="psum"), w, x))
    expected = w.array.astype(np.float32).T @ x.array.astype(np.float32).reshape(k, -1)
    np.testing.assert_allclose(out.reshape(m, -1), expected, rtol=1e-4, atol=1e-4)


def test_matmul_accumulates_where_it_is_told(on):
    w, x = on.put(np.eye(4)), on.put(np.ones((4, 6)))
    dst = on.put(np.full((4, 6), 10.0), space="psum")
    mask = np.zeros((4, 6), bool)
    mask[:, :2] = True
    assert on.run(Matmul(dst, w, x, accumulate=mask))[0].tolist() == [11, 11, 1, 1, 1, 1]
    assert on.run(Matmul(dst, w, x, accumulate=True))[0].tolist() == [12, 12, 2, 2, 2, 2]
    assert on.run(Matmul(dst, w, x))[0].tolist() == [1] * 6


def test_double_row_contracts_two_rows_at_the_cost_of_one(on):
    w, x = on.put(rand(128, 2, 16), "f8E4M3"), on.put(rand(128, 2, 64), "f8E5M2")
    made = Matmul(on.new((16, 64), space="psum"), w, x, double_row=True)
    left, right = (v.array.astype(np.float32).reshape(256, -1) for v in (w, x))
    np.testing.assert_allclose(on.run(made), left.T @ right, rtol=1e-4, atol=1e-3)
    assert on.cycles(made) == 64 and made.flops == 2 * 256 * 16 * 64
    flat = on.put(rand(128, 16), "f8E4M3")
    refuses(on, Matmul(made.dst, flat, x, double_row=True), r"double_row needs \[K, 2, ...\]")


def test_transpose_mode_keeps_bits(on):
    x = rand(16, 8)
    x[0, 0], x[3, 2] = np.nan, np.inf
    data, eye = on.put(x, "bf16"), on.put(np.eye(16), "bf16")
    out = on.run(Matmul(on.new((8, 16), "bf16", "psum"), data, eye, transpose=True))
    np.testing.assert_array_equal(out.view(np.uint16), data.array.T.copy().view(np.uint16))


def test_matmul_costs(on):
    def cost(dtype, n=512, **more):
        w, x = on.new((128, 128), dtype), on.new((128, n), dtype)
        return on.cycles(Matmul(on.new((128, n), space="psum"), w, x, **more))

    assert cost("bf16") == 512 and cost("f32") == 2048 and cost("bf16", 8) == 64
    assert cost("f32", tfloat32=True) == 512
    assert cost("f32", onezero=1) == 1024
    w, x = on.new((128, 128)), on.new((128, 512))
    made = Matmul(on.new((128, 512), space="psum"), w, x)
    assert made.duration(TRN2) == cycles_ps(2048, 2_400_000_000)  # 853 ns; 859 measured


def test_matmul_refuses(on, on3):
    w, x = on.new((128, 128), "bf16"), on.new((128, 512), "bf16")
    dst = on.new((128, 512), space="psum")
    sbuf, half = on.new((128, 512)), on.new((128, 512), "bf16", "psum")
    refuses(on, Matmul(sbuf, w, x), "dst must be in psum")
    refuses(on, Matmul(half, w, x), "dst is bf16; a matmul writes f32 on trn2")
    refuses(on, Matmul(dst, w, on.new((128, 512))), "f32 pairs only with f32")
    refuses(on, Matmul(dst, w, on.new((64, 512), "bf16")), "the contraction must be equal")
    refuses(on, Matmul(dst, w, on.new((128, 1024), "bf16")), "moving free size is 1024; limit: 512")
    refuses(on, Matmul(dst, on.new((128, 256), "bf16"), x), "stationary free size is 256; limit: 1")
    refuses(on, Matmul(dst, on.new((128, 128), "f8E4M3FN"), x), "stationary is f8E4M3FN; allowed")
    left, right = on3.new((128, 128), "f8E4M3FN"), on3.new((128, 512), "f8E4M3")
    out = on3.new((128, 512), space="psum")
    refuses(on3, Matmul(out, left, right), "f8E4M3 and f8E4M3FN cannot be mixed")


def test_matmul_tiling(on):
    w, x = on.put(rand(32, 64), "bf16"), on.put(rand(32, 16), "bf16")
    dst = on.new((64, 16), space="psum")
    on.run(Matmul(dst, w, x, tile_size=(32, 64), tile_position=(96, 64)))

    def wrong(size, position):
        return Matmul(dst, w, x, tile_size=size, tile_position=position)

    refuses(on, wrong((32, 64), (16, 0)), "tile_position row is 16; allowed: multiples of 32")
    refuses(on, wrong((48, 64), (0, 0)), "tile_size row is 48; allowed: 32, 64, 128")
    refuses(on, wrong((32, 32), (0, 0)), "stationary has 64 columns; tile_size allows 32")
    one = Bench(TRN1)
    y, z = one.new((32, 64), "bf16"), one.new((32, 16), "bf16")
    small = Matmul(one.new((64, 16), space="psum"), y, z, tile_size=(32, 64))
    refuses(one, small, "tile_size row is 32; allowed: 64, 128")


@pytest.mark.parametrize("dtype", ["f32", "bf16", "i32", "ui8"])
def test_transpose_on_both_engines(on, dtype):
    x = on.put(RNG.integers(0, 99, (64, 4, 8)), dtype)
    out = on.run(Transpose(on.new((32, 64), dtype, "psum"), x))
    np.testing.assert_array_equal(out, x.array.reshape(64, 32).T)
    y = on.put(RNG.integers(0, 99, (32, 16)), dtype)
    out = on.run(Transpose(on.new((16, 32), dtype), y, "vector"))
    np.testing.assert_array_equal(out, y.array.T)


def test_transpose_refuses(on):
    x = on.new((64, 32))
    refuses(on, Transpose(on.new((32, 64)), x), "dst must be in psum")
    refuses(on, Transpose(on.new((32, 64)), x, "vector"), r"limit on vector: \[32, 32\]")
    refuses(on, Transpose(on.new((32, 64), "bf16", "psum"), x), "data is f32 and dst bf16")
    one = Bench(TRN1)
    widened = one.run(Transpose(one.new((4, 8), "f32", "psum"), one.put(rand(8, 4), "bf16")))
    assert widened.shape == (4, 8)


# ---- MX --------------------------------------------------------------------------------------

KINDS = {"f8E4M3FN": (ml_dtypes.float8_e4m3fn, 8), "f8E5M2": (ml_dtypes.float8_e5m2, 15)}


@pytest.mark.parametrize("element", KINDS)
def test_quantize_mx_by_its_definition(on3, element):
    x = (rand(64, 16) * 10.0 ** RNG.integers(-3, 4, (64, 16))).astype(BF16)
    x[8:16, 4:8] = 0
    dst = on3.new((64, 4), "ui32")
    scale = on3.put(np.full((64, 6), 9, np.uint8))
    made = QuantizeMx(dst, on3.put(x), scale, element)
    on3.core.issue(made)
    kind, largest = KINDS[element]
    values = dst.array.view(np.uint8).view(kind).astype(np.float64).reshape(64, 4, 4)
    for group in range(8):
        row = group // 4 * 32 + group % 4
        for column in range(4):
            block = x[8 * group : 8 * group + 8, 4 * column : 4 * column + 4].astype(np.float64)
            amax = abs(block).max()
            power = np.floor(np.log2(amax)) - (largest - 1) if amax else -127
            assert scale.array[row, column] == power + 127
            rounded = (block / 2.0**power).astype(np.float32).astype(kind).astype(np.float64)
            np.testing.assert_array_equal(values[8 * group : 8 * group + 8, column], rounded)
    assert (scale.array[4:32] == 9).all() and (scale.array[:, 4:] == 9).all()
    assert on3.cycles(made) == 64


@pytest.mark.parametrize("elements", [("f8E4M3FN", "f8E4M3FN"), ("f8E5M2", "f4E2M1FN")])
def test_matmul_mx_is_the_matmul_of_what_is_scaled(on3, elements):
    def operand(columns, element):
        dtype = "ui16" if element == "f4E2M1FN" else "ui32"
        bits = RNG.integers(0, 1 << 16, (64, columns))
        data = on3.put(bits if dtype == "ui16" else bits * 0x3000 % 0x40404040, dtype)
        return data, on3.put(RNG.integers(120, 130, (64, columns)).astype(np.uint8))

    (w, ws), (x, xs) = operand(8, elements[0]), operand(12, elements[1])
    made = MatmulMx(on3.new((8, 12), space="psum"), w, x, ws, xs, elements)
    left, right = scaled(w, ws, elements[0]), scaled(x, xs, elements[1])
    expected = np.einsum("kqm,kqn->mn", left, right)
    np.testing.assert_allclose(on3.run(made), expected, rtol=1e-4, atol=1e-3)
    assert made.flops == 2 * 256 * 8 * 12 and on3.cycles(made) == 64


def test_quantized_values_come_back(on3):
    x = rand(32, 32).astype(BF16)
    dst, scale = on3.new((32, 8), "ui32"), on3.new((4, 8), "ui8")
    on3.core.issue(QuantizeMx(dst, on3.put(x), scale, "f8E4M3FN"))
    back = scaled(dst, scale, "f8E4M3FN").transpose(0, 2, 1).reshape(32, 32)
    groups = abs(x.astype(np.float32)).reshape(4, 8, 8, 4).max(axis=(1, 3))
    error = abs(back - x.astype(np.float32)).reshape(4, 8, 8, 4).max(axis=(1, 3))
    assert (error <= groups * 2.0**-3).all()  # 3 bits of mantissa, an exponent to spare


def test_scales_lie_in_the_first_four_rows_of_quadrants():
    assert scale_rows(96).tolist() == [0, 1, 2, 3, 32, 33, 34, 35, 64, 65, 66, 67]


def test_mx_refuses(on, on3):
    x, dst, scale = (
        on.new(s, d) for s, d in (((32, 8), "bf16"), ((32, 2), "ui32"), ((4, 2), "ui8"))
    )
    refuses(on, QuantizeMx(dst, x, scale, "f8E4M3FN"), "needs NeuronCore-v4 or later; trn2 has v3")
    x, dst, scale = (
        on3.new(s, d) for s, d in (((48, 8), "bf16"), ((48, 2), "ui32"), ((4, 2), "ui8"))
    )
    refuses(on3, QuantizeMx(dst, x, scale, "f8E4M3FN"), "src has 48 partitions; a multiple of 32")
    y, small = on3.new((32, 8)), on3.new((32, 2), "ui32")
    refuses(on3, QuantizeMx(small, y, scale, "f8E4M3FN"), "src is f32; allowed: f16, bf16")
    w, out = on3.new((64, 3), "ui32"), on3.new((3, 3), space="psum")
    odd = MatmulMx(out, w, w, scale, scale, ("f8E5M2", "f8E5M2"))
    refuses(on3, odd, "stationary free size is 3; it must be even")


# ---- DMA -------------------------------------------------------------------------------------


def test_dma_copy_of_other_axes_and_dtypes(on):
    x = np.array([[0.5, 1.5, 2.5, 300.0]], np.float32).repeat(6, axis=0)
    out = on.run(DmaCopy(on.new((2, 12), "ui8"), on.put(x, space="hbm")))
    assert out.tolist() == [[0, 2, 2, 255] * 3] * 2
    psum = on.new((4, 4), space="psum")
    refuses(on, DmaCopy(on.new((4, 4)), psum), "src must be in hbm or sbuf for DMA, not in psum")
    refuses(on, DmaCopy(on.new((4, 4)), on.new((4, 5))), "src has 20 elements .* and dst 16")


def test_dma_modes(on):
    x, y = on.new((4, 4)), on.new((4, 4), space="hbm")
    refuses(on, DmaCopy(x, on.new((4, 4), "bf16"), "hwdge"), "dge_mode hwdge cannot cast")
    refuses(on, DmaCopy(x, y, "swdge", "sync"), "engine is sync; it goes with dge_mode hwdge only")
    refuses(on, DmaCopy(x, y, "hwdge", "vector"), "engine is vector; allowed: sync, scalar")
    refuses(on, DmaCopy(x, y, priority=1), "priority needs NeuronCore-v4 or later, not trn2")
    one = Bench(TRN1)
    refuses(one, DmaCopy(one.new((4, 4)), one.new((4, 4)), "hwdge"), "hwdge needs NeuronCore-v3")


def test_gather_and_scatter_skip_or_refuse_what_is_out_of_bounds(on):
    rows = rand(10, 6)
    whole = on.put(rows, space="hbm")
    index = on.put(np.array([[3], [9], [10], [0]], np.uint32))
    dst = on.put(np.full((4, 2, 3), 7.0))
    out = on.run(DmaGather(dst, whole, index, 4, skip=True))
    np.testing.assert_array_equal(out.reshape(4, 6)[[0, 1, 3]], rows[[3, 9, 0]])
    assert (out[2] == 7).all()
    refuses(on, DmaGather(dst, whole, index, 4), "vector offset 10 is out of bounds: 0 to 9")
    src = rand(4, 6)
    out = on.run(DmaScatter(whole, on.put(src), index, 4, skip=True))
    np.testing.assert_array_equal(out[[3, 9, 0]], src[[0, 1, 3]])
    np.testing.assert_array_equal(out[[1, 2, 4]], rows[[1, 2, 4]])
    refuses(on, DmaScatter(whole, on.put(src), index, 4, mode="hwdge"), "needs dge_mode swdge")


def test_only_the_picked_rows_must_have_been_written(on):
    whole, index = on.put(rand(10, 6), space="hbm"), on.put(np.array([[3], [9]], np.uint32))
    used = DmaGather(on.new((2, 6)), whole, index, 2).used()
    assert [view.interval for view in used[1:]] == [whole[3:4].interval, whole[9:10].interval]


def test_read_modify_write(on):
    rows, src = rand(10, 6), rand(3, 6)
    index = on.put(np.array([[3], [9], [0]], np.uint32))
    whole = on.put(rows, space="hbm")
    out = on.run(DmaScatter(whole, on.put(src), index, 3, accumulate=True))
    expected = rows.copy()
    expected[[3, 9, 0]] += src
    np.testing.assert_array_equal(out, expected)
    out = on.run(DmaGatherAdd(on.put(src), whole, index, 3))
    np.testing.assert_array_equal(out, src + expected[[3, 9, 0]])


@pytest.mark.parametrize("shape", [(16, 8), (4, 3, 8), (4, 3, 2, 8)])
def test_dma_transpose(on, shape):
    x = rand(*shape).astype(BF16)
    axes = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}[len(shape)]
    expected = x.transpose(axes)
    out = on.run(DmaTranspose(on.new(expected.shape, "bf16"), on.put(x, space="hbm"), axes))
    np.testing.assert_array_equal(out, expected)
    wrong = DmaTranspose(on.new(expected.shape, "bf16"), on.put(x, space="hbm"), (0, 1))
    refuses(on, wrong, r"axes is \(0, 1\)")


def test_dma_transpose_refuses(on):
    x = on.new((32, 8), "bf16", "hbm")
    refuses(on, DmaTranspose(on.new((8, 32), "bf16"), x, (1, 0), "hwdge"), "src has 32 rows; hwdge")
    refuses(on, DmaTranspose(on.new((8, 32), "bf16", "hbm"), x, (1, 0)), "dst must be in sbuf")
    byte = on.new((32, 8), "ui8", "hbm")
    refuses(on, DmaTranspose(on.new((8, 32), "ui8"), byte, (1, 0)), "one dtype of 2 or 4 bytes")


def test_gather_transpose_reads_indices_column_by_column(on):
    rows = rand(300, 64).astype(BF16)
    index = RNG.integers(0, 300, (128, 2)).astype(np.uint32)
    index[5, 1] = 4000
    dst = on.put(np.full((64, 256), 7.0), "bf16")
    made = DmaGather(dst, on.put(rows, space="hbm"), on.put(index), 256, True, axes=(1, 0))
    flat = index.T.flatten().astype(int)
    expected = np.full((64, 256), 7, BF16)
    legal = flat < 300
    expected[:, legal] = rows[flat[legal]].T
    np.testing.assert_array_equal(on.run(made), expected)


def test_dma_compute_adds_in_float32(on):
    a, b, c = (rand(8, 4).astype(BF16) for _ in range(3))
    made = DmaCompute(on.new((8, 4), "bf16"), tuple(on.put(v, space="hbm") for v in (a, b, c)))
    expected = (a.astype(np.float32) + b.astype(np.float32) + c.astype(np.float32)).astype(BF16)
    np.testing.assert_array_equal(on.run(made), expected)
    x = on.new((4, 4))
    refuses(on, DmaCompute(x, (x,) * 17), "srcs has 17 tensors; allowed: 1 to 16")
    refuses(on, DmaCompute(x, (x, x), "maximum"), "reduce_op is maximum; allowed: add")
