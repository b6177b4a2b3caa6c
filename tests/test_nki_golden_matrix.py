"""The documentation's examples of matmul, transposes and stated addresses, against numpy."""

# pyright: reportMissingImports=false
import ml_dtypes
import numpy as np
import pytest

from trnsim.device.nki import simulate

from .nki_golden import on_tiles, tile, uniform
from .nki_kernels import nisa, nki, nl

# ---- matmul ------------------------------------------------------------------------------------


def test_nc_matmul():
    """nisa.nc_matmul of [128, 128] by [128, 512]; golden a.T @ b."""

    def body(a, b):
        c = tile((128, 512), buffer=nl.psum)
        nisa.nc_matmul(dst=c, stationary=a, moving=b)
        return c

    a, b = uniform(128, 128), uniform(128, 512)
    np.testing.assert_allclose(on_tiles(body, a, b), a.T @ b, rtol=1e-5)


@nki.jit
def accumulated(d, e):
    """Two tiles of the contraction, added up in PSUM."""
    out = nl.ndarray((128, 512), dtype=d.dtype, buffer=nl.shared_hbm)
    total = nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.psum)
    for i in nl.affine_range(2):
        rows = nl.ds(i * 128, 128)
        nisa.nc_matmul(dst=total, stationary=nl.load(d[rows]), moving=nl.load(e[rows]))
    nl.store(out, nl.copy(total))
    return out


def test_nc_matmul_accumulates_in_psum():
    """nisa.nc_matmul over a contraction of 256 in two steps; golden d.T @ e."""
    d, e = uniform(256, 128), uniform(256, 512)
    np.testing.assert_allclose(simulate(accumulated, d, e).output, d.T @ e, rtol=1e-5)


@nki.jit
def tiled_array(g, h):
    """16 products on quarters of the array, each at its place."""
    out = nl.ndarray((16, 64, 512), dtype=g.dtype, buffer=nl.shared_hbm)
    for i in nl.affine_range(4):
        for j in nl.affine_range(4):
            row, column = i % 2 * 64, j % 2 * 64
            left = nl.ndarray((128, 64), dtype=g.dtype)
            right = nl.ndarray((128, 512), dtype=h.dtype)
            total = nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.psum)
            nisa.dma_copy(dst=left[nl.ds(row, 64)], src=g[i * 4 + j])
            nisa.dma_copy(dst=right[nl.ds(row, 64)], src=h[i * 4 + j])
            nisa.nc_matmul(
                dst=total[nl.ds(column, 64)], stationary=left[nl.ds(row, 64)],
                moving=right[nl.ds(row, 64)], tile_position=(row, column), tile_size=(64, 64),
            )  # fmt: skip
            copy = nl.ndarray((64, 512), dtype=nl.float32)
            nisa.tensor_copy(dst=copy, src=total[nl.ds(column, 64)])
            nl.store(out[i * 4 + j], copy)
    return out


def test_nc_matmul_on_quarters_of_the_array():
    """nisa.nc_matmul with tile_position and tile_size, a batch of 16; golden g.T @ h of each."""
    g, h = uniform(16, 64, 64), uniform(16, 64, 512)
    golden = np.matmul(g.transpose(0, 2, 1), h)
    np.testing.assert_allclose(simulate(tiled_array, g, h).output, golden, rtol=1e-5)


@pytest.mark.parametrize("columns", [1, 16])
def test_nc_matmul_of_two_rows_at_once(columns):
    """nisa.nc_matmul in fp8 with perf_mode double_row, [128, 2, n]; golden np.einsum."""

    def body(a, b):
        c = tile((columns, 512), buffer=nl.psum)
        nisa.nc_matmul(dst=c, stationary=a, moving=b, perf_mode=nisa.matmul_perf_mode.double_row)
        return c

    a, b = uniform(128, 2, columns, scale=4), uniform(128, 2, 512, scale=4)
    a, b = a.astype(ml_dtypes.float8_e5m2), b.astype(ml_dtypes.float8_e5m2)
    golden = np.einsum("kli,klj->ij", a.astype(np.float32), b.astype(np.float32))
    np.testing.assert_allclose(on_tiles(body, a, b), golden, rtol=1e-5)


# ---- transposes --------------------------------------------------------------------------------


def test_nc_transpose():
    """nisa.nc_transpose of [128, 64] on Tensor into PSUM, and of [32, 2] on Vector; golden .T."""

    def body(a, b):
        a_turned, b_turned = tile((64, 128), buffer=nl.psum), tile((2, 32))
        nisa.nc_transpose(dst=a_turned, data=a)
        nisa.nc_transpose(dst=b_turned, data=b, engine=nisa.engine.vector)
        return a_turned, b_turned

    a, b = uniform(128, 64), uniform(32, 2)
    a_turned, b_turned = on_tiles(body, a, b)
    np.testing.assert_array_equal(a_turned, a.T)
    np.testing.assert_array_equal(b_turned, b.T)


# ---- addresses that the kernel states ----------------------------------------------------------


@nki.jit
def transposed_in_place_of_two(a, banks):
    """[N, M] -> [M, N] by tiles, whose addresses rotate over two places and `banks` banks."""
    n, m = a.shape
    out = nl.ndarray((m, n), dtype=a.dtype, buffer=nl.shared_hbm)
    for i in range(n // 128):
        for j in range(m // 128):
            turn = i * (m // 128) + j
            source = nl.ndarray((128, 128), dtype=a.dtype, address=(0, 1024 + turn % 2 * 512))
            bank = nl.ndarray(
                (128, 128), dtype=a.dtype, buffer=nl.psum, address=(0, turn % banks * 2048)
            )
            target = nl.ndarray((128, 128), dtype=a.dtype, address=(0, 2048 + turn % 2 * 512))
            nisa.dma_copy(dst=source, src=a[nl.ds(i * 128, 128), nl.ds(j * 128, 128)])
            nisa.nc_transpose(dst=bank, data=source)
            nisa.tensor_copy(dst=target, src=bank)
            nisa.dma_copy(dst=out[nl.ds(j * 128, 128), nl.ds(i * 128, 128)], src=target)
    return out


@pytest.mark.parametrize("banks", [1, 8])
def test_tiles_at_stated_addresses(banks):
    """Direct allocation in SBUF and PSUM by modulo; golden .T, and the bytes that tiles take."""
    a = uniform(512, 256)
    result = simulate(transposed_in_place_of_two, a, banks)
    np.testing.assert_array_equal(result.output, a.T)
    assert result.memory.peak_sbuf <= 4 * 512
    assert result.memory.peak_psum == min(banks, 2) * 512
