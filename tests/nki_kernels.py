"""NKI kernels that the tests run: written as a user writes them, against `import nki`."""

# pyright: reportMissingImports=false
# `nki` is there once installed, at run time.
from trnsim.device.nki import install

install()

import nki  # noqa: E402
import nki.isa as nisa  # noqa: E402
import nki.language as nl  # noqa: E402

P = nl.tile_size.pmax
F = nl.tile_size.gemm_moving_fmax


@nki.jit
def tensor_add(a, b):
    """a + b in tiles of 128 x 512."""
    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    for i in nl.affine_range(a.shape[0] // P):
        for j in nl.affine_range(a.shape[1] // F):
            rows, columns = nl.ds(i * P, P), nl.ds(j * F, F)
            x = nl.ndarray((P, F), dtype=a.dtype, buffer=nl.sbuf)
            y = nl.ndarray((P, F), dtype=a.dtype, buffer=nl.sbuf)
            nisa.dma_copy(dst=x, src=a[rows, columns])
            nisa.dma_copy(dst=y, src=b[rows, columns])
            nisa.tensor_tensor(dst=x, data1=x, data2=y, op=nl.add)
            nisa.dma_copy(dst=out[rows, columns], src=x)
    return out


@nki.jit
def matmul(lhs_t, rhs):
    """lhs_t.T @ rhs, all in multiples of the tiles."""
    (k, m), (_, n) = lhs_t.shape, rhs.shape
    out = nl.ndarray((m, n), dtype=lhs_t.dtype, buffer=nl.shared_hbm)
    for i in range(m // P):
        for j in range(n // F):
            total = nl.ndarray((P, F), dtype=nl.float32, buffer=nl.psum)
            for c in range(k // P):
                left = nl.ndarray((P, P), dtype=lhs_t.dtype, buffer=nl.sbuf)
                right = nl.ndarray((P, F), dtype=rhs.dtype, buffer=nl.sbuf)
                nisa.dma_copy(dst=left, src=lhs_t[nl.ds(c * P, P), nl.ds(i * P, P)])
                nisa.dma_copy(dst=right, src=rhs[nl.ds(c * P, P), nl.ds(j * F, F)])
                nisa.nc_matmul(dst=total, stationary=left, moving=right)
            tile = nl.ndarray((P, F), dtype=out.dtype, buffer=nl.sbuf)
            nisa.tensor_copy(dst=tile, src=total)
            nisa.dma_copy(dst=out[nl.ds(i * P, P), nl.ds(j * F, F)], src=tile)
    return out


@nki.jit
def softmax(x):
    """Along the rows of [128, n]: exp and its sum in one instruction."""
    rows, columns = x.shape
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    tile = nl.load(x)
    largest = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=largest, op=nl.maximum, data=tile, axis=1, negate=True)
    powers = nl.ndarray(x.shape, dtype=nl.float32, buffer=nl.sbuf)
    total = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation_reduce(
        dst=powers, op=nl.exp, data=tile, bias=largest, reduce_op=nl.add, reduce_res=total
    )
    nisa.reciprocal(dst=total, data=total)
    nisa.tensor_scalar(dst=tile, data=powers, op0=nl.multiply, operand0=total)
    nl.store(out, tile)
    return out


@nki.jit
def layernorm(x, gamma, beta, epsilon=1e-5):
    """(x - mean) / sqrt(variance + epsilon) * gamma + beta along rows, with `nl` functions."""
    rows, columns = x.shape
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    tile = nl.load(x)
    scale = nl.broadcast_to(nl.load(gamma), x.shape)
    shift = nl.broadcast_to(nl.load(beta), x.shape)
    away = nl.subtract(tile, nl.mean(tile, axis=1, keepdims=True))
    variance = nl.mean(nl.square(away), axis=1, keepdims=True)
    scaled = nl.multiply(away, nl.rsqrt(nl.add(variance, epsilon)))
    nl.store(out, nl.add(nl.multiply(scaled, scale), shift))
    return out


@nki.jit
def transpose(x):
    """[128, n * 128] -> [n * 128, 128] by the Tensor engine."""
    out = nl.ndarray(x.shape[::-1], dtype=x.dtype, buffer=nl.shared_hbm)
    tile = nl.load(x)
    for j in range(x.shape[1] // P):
        turned = nl.ndarray((P, P), dtype=x.dtype, buffer=nl.psum)
        nisa.nc_transpose(dst=turned, data=tile[:, nl.ds(j * P, P)])
        nl.store(out[nl.ds(j * P, P)], nl.copy(turned))
    return out


@nki.jit
def split_sum(x):
    """Row sums of x[2 * 128, n] + the other core's: each core half of the rows, then sendrecv."""
    core, cores = nl.program_id(0), nl.num_programs()
    out = nl.ndarray((P, 1), dtype=nl.float32, buffer=nl.shared_hbm)
    tile = nl.load(x[nl.ds(core * P, P)])
    own = nl.sum(tile, axis=1, keepdims=True)
    if cores == 2:
        theirs = nl.ndarray(own.shape, dtype=own.dtype, buffer=nl.sbuf)
        nisa.sendrecv(
            src=own, dst=theirs, send_to_rank=1 - core, recv_from_rank=1 - core, pipe_id=0
        )
        nisa.tensor_tensor(dst=own, data1=own, data2=theirs, op=nl.add)
    half = P // cores
    nisa.dma_copy(dst=out[nl.ds(core * half, half)], src=own[nl.ds(core * half, half)])
    return out


@nki.jit
def exchange_through_hbm(x, barrier=True):
    """Each core writes half of a scratch tensor and reads the other's half, after a barrier."""
    core = nl.program_id(0)
    scratch = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    half = x.shape[1] // 2
    mine, other = nl.ds(core * half, half), nl.ds((1 - core) * half, half)
    nl.store(scratch[:, mine], nl.load(x[:, mine]))
    if barrier:
        nisa.core_barrier(data=scratch, cores=(0, 1))
    nl.store(out[:, mine], nl.load(scratch[:, other]))
    return out


@nki.jit
def loop_by_register(x, count):
    """x + 1 repeated count[0] times, the bound read from memory."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    tile = nl.load(x)
    bound = nl.load(count)
    register = nisa.register_alloc()
    nisa.register_load(register, bound)
    nl.fori_loop(0, register, lambda i: nisa.tensor_scalar(tile, tile, nl.add, 1.0))
    nl.store(out, tile)
    return out
