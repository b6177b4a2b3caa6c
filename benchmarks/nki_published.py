"""Kernels with published times, written anew from what their publications say of their structure.

matmul_t, matmul_n: the kernels of awslabs/nki-autotune's kernel_library (2048^3 bf16, trn2).
mamba: the documentation's fused Mamba tutorial, its first and second version (trn1).
load_each, load_rows: the first two kernels of the documentation's kernel optimization tutorial.
"""

# pyright: reportMissingImports=false
# `nki` is there once installed, at run time.
from trnsim.device.nki import install

install()

import nki  # noqa: E402
import nki.isa as nisa  # noqa: E402
import nki.language as nl  # noqa: E402
import numpy as np  # noqa: E402

P, F = 128, 512


def tiles(count, columns, dtype):
    """Tiles of 128 partitions in SBUF."""
    return [nl.ndarray((P, columns), dtype=dtype, buffer=nl.sbuf) for _ in range(count)]


def add_product(totals, left, right, column):
    """totals[m][:, column on] += left.T @ right, a bank of PSUM for each m."""
    for m, total in enumerate(totals):
        bank = nl.zeros((P, F), dtype=nl.float32, buffer=nl.psum)
        for stationary, moving in zip(left, right, strict=True):
            nisa.nc_matmul(bank, stationary[:, nl.ds(m * P, P)], moving)
        part = nl.ndarray((P, F), dtype=total.dtype, buffer=nl.sbuf)
        nisa.tensor_copy(part, bank)
        sums = total[:, nl.ds(column, F)]
        nisa.tensor_tensor(sums, sums, part, op=nl.add)


@nki.jit
def matmul_t(lhs_t, rhs):
    """lhs_t.T @ rhs: for each 512 columns, two halves of K, four blocks of 512 rows.

    Loads of [128, 512]; two buffers of rhs and eight of lhs_t, by half of K and block of rows, new
    ones for each 512 columns; the sums stay in SBUF to the end.
    """
    (k, m), (_, n) = lhs_t.shape, rhs.shape
    half = k // 2 // P
    out = nl.ndarray((m, n), dtype=rhs.dtype, buffer=nl.shared_hbm)
    sums = [tiles(m // P, F, rhs.dtype) for _ in range(n // F)]
    for column, totals in zip(range(0, n, F), sums, strict=True):
        left = [[tiles(half, F, lhs_t.dtype) for _ in range(m // F)] for _ in range(2)]
        right = [tiles(half, F, rhs.dtype) for _ in range(2)]
        for total in totals:
            nisa.memset(total, 0.0)
        for part in range(2):
            rows = [nl.ds((part * half + i) * P, P) for i in range(half)]
            for tile, row in zip(right[part], rows, strict=True):
                nisa.dma_copy(tile, rhs[row, nl.ds(column, F)])
            for block in range(m // F):
                for tile, row in zip(left[part][block], rows, strict=True):
                    nisa.dma_copy(tile, lhs_t[row, nl.ds(block * F, F)])
                some = totals[block * F // P : (block + 1) * F // P]
                add_product(some, left[part][block], right[part], 0)
        for i, total in enumerate(totals):
            nisa.dma_copy(out[nl.ds(i * P, P), nl.ds(column, F)], total)
    return out


@nki.jit
def matmul_n(lhs, rhs):
    """lhs @ rhs: halves of M, for each 512 columns, two halves of K; lhs is transposed by DMA.

    Of sixteen buffers for transposed lhs it uses one for each half of M and K, written again for
    every 512 columns; of eight for rhs, new ones for each 512 columns, two.
    """
    (m, k), (_, n) = lhs.shape, rhs.shape
    rows, depth = m // 2, k // 2
    out = nl.ndarray((m, n), dtype=rhs.dtype, buffer=nl.shared_hbm)
    turned = [[tiles(depth // P, rows, lhs.dtype) for _ in range(4)] for _ in range(4)]
    for top in range(2):
        totals = tiles(rows // P, n, rhs.dtype)
        for total in totals:
            nisa.memset(total, 0.0)
        for column in range(0, n, F):
            right = [tiles(depth // P, F, rhs.dtype) for _ in range(8)]
            for part in range(2):
                left = turned[part][top]
                for i, tile in enumerate(left):
                    start = part * depth + i * P
                    nisa.dma_transpose(tile, lhs[nl.ds(top * rows, rows), nl.ds(start, P)])
                for i, tile in enumerate(right[part]):
                    nisa.dma_copy(tile, rhs[nl.ds(part * depth + i * P, P), nl.ds(column, F)])
                add_product(totals, left, right[part], column)
            for i, total in enumerate(totals):
                place = out[nl.ds(top * rows + i * P, P), nl.ds(column, F)]
                nisa.dma_copy(place, total[:, nl.ds(column, F)])
    return out


def scan_state(state, channels, total, operands, loaded):
    """One state of 128 channels: total += C * scan(exp(delta * A), delta * u * B)."""
    delta, u, a, b, c = operands
    length = delta.shape[1]
    delta_i, u_i = loaded if loaded else (nl.load(delta[channels]), nl.load(u[channels]))
    decay, scaled, scanned = (tiles(1, length, nl.float32)[0] for _ in range(3))
    nisa.activation(decay, op=nl.exp, data=delta_i, scale=nl.load(a[channels, nl.ds(state, 1)]))
    nisa.tensor_tensor(scaled, delta_i, u_i, op=nl.multiply)
    row = nl.broadcast_to(nl.load(b[nl.ds(state, 1)]), (P, length))
    nisa.tensor_tensor(scaled, scaled, row, op=nl.multiply)
    nisa.tensor_tensor_scan(scanned, decay, scaled, 0.0, op0=nl.multiply, op1=nl.add)
    row = nl.broadcast_to(nl.load(c[nl.ds(state, 1)]), (P, length))
    nisa.tensor_tensor(scanned, scanned, row, op=nl.multiply)
    nisa.tensor_tensor(total, total, scanned, op=nl.add)


@nki.jit
def mamba_v1(delta, u, a, b, c):
    """States outside, channels inside: delta and u are loaded again for every state."""
    out = nl.ndarray(delta.shape, dtype=delta.dtype, buffer=nl.shared_hbm)
    totals = tiles(delta.shape[0] // P, delta.shape[1], nl.float32)
    for total in totals:
        nisa.memset(total, 0.0)
    for state in range(a.shape[1]):
        for i, total in enumerate(totals):
            scan_state(state, nl.ds(i * P, P), total, (delta, u, a, b, c), None)
    for i, total in enumerate(totals):
        nl.store(out[nl.ds(i * P, P)], total)
    return out


@nki.jit
def mamba_v2(delta, u, a, b, c):
    """Channels outside: delta and u are loaded once."""
    out = nl.ndarray(delta.shape, dtype=delta.dtype, buffer=nl.shared_hbm)
    for i in range(delta.shape[0] // P):
        channels = nl.ds(i * P, P)
        total = nl.zeros((P, delta.shape[1]), dtype=nl.float32)
        loaded = nl.load(delta[channels]), nl.load(u[channels])
        for state in range(a.shape[1]):
            scan_state(state, channels, total, (delta, u, a, b, c), loaded)
        nl.store(out[channels], total)
    return out


@nki.jit
def load_each(lhs_t, rhs):
    """lhs_t.T @ rhs: both tiles are loaded before each matmul."""
    return _tiled(lhs_t, rhs, False)


@nki.jit
def load_rows(lhs_t, rhs):
    """lhs_t.T @ rhs: the tiles of lhs_t are loaded once for each 128 rows."""
    return _tiled(lhs_t, rhs, True)


def _tiled(lhs_t, rhs, once):
    (k, m), (_, n) = lhs_t.shape, rhs.shape
    out = nl.ndarray((m, n), dtype=rhs.dtype, buffer=nl.shared_hbm)
    for row in range(0, m, P):
        kept = [nl.load(lhs_t[nl.ds(i, P), nl.ds(row, P)]) for i in range(0, k, P)] if once else []
        for column in range(0, n, F):
            bank = nl.ndarray((P, F), dtype=nl.float32, buffer=nl.psum)
            for i in range(0, k, P):
                left = kept[i // P] if once else nl.load(lhs_t[nl.ds(i, P), nl.ds(row, P)])
                nisa.nc_matmul(bank, left, nl.load(rhs[nl.ds(i, P), nl.ds(column, F)]))
            tile = tiles(1, F, rhs.dtype)[0]
            nisa.tensor_copy(tile, bank)
            nl.store(out[nl.ds(row, P), nl.ds(column, F)], tile)
    return out


REPEATS = 1024


@nki.jit
def back_to_back(left, right):
    """Matmuls that follow each other: banks of 64, from tiles that were loaded once."""
    stationary, moving = nl.load(left), nl.load(right)
    for _ in range(REPEATS // 64):
        bank = nl.ndarray((P, F), dtype=nl.float32, buffer=nl.psum)
        for _ in range(64):
            nisa.nc_matmul(bank, stationary, moving)


@nki.jit
def empty(x):
    """Nothing."""


# ---- for the simulator's own speed -----------------------------------------------------------

SMALL = 10_000


@nki.jit
def small(x):
    """Instructions on 8 elements per partition: multiply and add, maximum, by turns."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    a, b = nl.load(x), nl.load(x)
    for _ in range(SMALL // 2):
        nisa.tensor_scalar(a, a, op0=nl.multiply, operand0=0.5, op1=nl.add, operand1=0.25)
        nisa.tensor_tensor(a, a, b, op=nl.maximum)
    nl.store(out, a)
    return out


def small_values(x):
    """The same in numpy."""
    a = x.copy()
    for _ in range(SMALL // 2):
        a = np.maximum(a * np.float32(0.5) + np.float32(0.25), x)
    return a
