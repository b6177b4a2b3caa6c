"""A tiled matmul in NKI, as one writes it for Trainium: the simulator runs it unchanged.

trnsim kernel examples/nki_matmul.py:matmul --arg bf16[512,512] --arg bf16[512,1024]
python -m trnsim.device.nki examples/nki_matmul.py
"""

# pyright: reportMissingImports=false
# `import nki` is the simulator under both commands above.
import ml_dtypes
import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np


@nki.jit
def matmul(lhs_t, rhs):
    """lhs_t.T @ rhs of [k, m] and [k, n], multiples of 128 and (n) of 512.

    The tiles of lhs_t for one row of results, and all of rhs, stay in SBUF.
    """
    (k, m), (_, n) = lhs_t.shape, rhs.shape
    p, f = nl.tile_size.pmax, nl.tile_size.gemm_moving_fmax
    out = nl.ndarray((m, n), dtype=lhs_t.dtype, buffer=nl.shared_hbm)
    right = []
    for c in range(k // p):
        right.append(nl.load(rhs[nl.ds(c * p, p)]))
    for i in range(m // p):
        left = []
        for c in range(k // p):
            left.append(nl.load(lhs_t[nl.ds(c * p, p), nl.ds(i * p, p)]))
        row = nl.ndarray((p, n), dtype=out.dtype, buffer=nl.sbuf)
        for j in range(n // f):
            total = nl.ndarray((p, f), dtype=nl.float32, buffer=nl.psum)
            for c in range(k // p):
                nisa.nc_matmul(dst=total, stationary=left[c], moving=right[c][:, nl.ds(j * f, f)])
            nisa.tensor_copy(dst=row[:, nl.ds(j * f, f)], src=total)
        nisa.dma_copy(dst=out[nl.ds(i * p, p)], src=row)
    return out


def main() -> None:
    """Compares with numpy."""
    random = np.random.default_rng(0)
    lhs_t = random.standard_normal((512, 256), np.float32).astype(ml_dtypes.bfloat16)
    rhs = random.standard_normal((512, 1024), np.float32).astype(ml_dtypes.bfloat16)
    result = matmul(lhs_t, rhs).astype(np.float32)
    expected = lhs_t.astype(np.float32).T @ rhs.astype(np.float32)
    np.testing.assert_allclose(result, expected, rtol=2**-8, atol=1e-3)
    print("equal to numpy within the rounding of bfloat16")


if __name__ == "__main__":
    main()
