"""Activation functions that numpy does not have: erf, erfc, logistic, gelu, silu, softplus, and
derivatives of some.

Each takes and returns float32 or float64 arrays and is accurate to a few units in the last place
of its type; callers round narrower types. Temporaries stay in cache: large arrays are computed
block by block.
"""

from collections.abc import Callable

import numpy as np
from numpy.polynomial.chebyshev import chebval

Function = Callable[[np.ndarray], np.ndarray]

BLOCK = 1 << 15  # elements: a few float32 temporaries of this size fit a core's L2 cache

# erf(z) = z P(z^2) / Q(z^2) on |z| < 3.8325, beyond which float32 erf is 1 (Eigen, also in XLA).
_ERF_LIMIT = 3.832506856900711
_ERF_P = (
    2.2905065861350646e-4, 3.4082910107109506e-3, 5.0955695062380861e-2,
    1.8520832239976145e-1, 1.128379143519084,
)  # fmt: skip
_ERF_Q = (
    -1.1791602954361697e-7, 2.3547966471313185e-5, 1.0179625278914885e-3,
    1.4070470171167667e-2, 1.1098505178285362e-1, 4.9746925110067538e-1, 1.0,
)  # fmt: skip

# (z + k) exp(z^2) erfc(z) in t = (z - k) / (z + k), z >= 0: the form of Shepherd and Laframboise
# (Math. Comp. 36, 1981), least squares of the relative error. float32: powers of t, k = 3, 4e-9.
# float64: Chebyshev series, k = 2.5, 8e-15.
_ERFC_K = 3.0
_ERFC = (
    -3.238844219595194e-04, -4.786501813214272e-04, 3.083618823438883e-03,
    -1.2279426446184516e-03, -2.6841821148991585e-02, 1.1952909827232361e-01,
    -3.104656934738159e-01, 5.902283191680908e-01, -8.833944797515869e-01, 1.0740069150924683,
)  # fmt: skip
_ERFC64_K = 2.5
_ERFC64 = (
    1.290286664856342, -0.9280626596347152, 0.2391465012505899, -0.04031960056951913,
    0.00277285538700435, 0.000482470573133937, -0.00011487827965326708, -5.518109519866448e-06,
    3.780393564220089e-06, 1.0549590608125675e-07, -1.3703204767460218e-07,
    -6.501464340120381e-09, 5.392913456225074e-09, 5.526687316824947e-10, -2.0849029492333332e-10,
    -4.266247642387007e-11, 6.296829768814165e-12, 2.799343036691333e-12, -2.8030976397269502e-14,
    -1.6501400464119443e-13, -2.367450127089844e-14, 5.09792131577723e-15, 1.191375522490034e-15,
)  # fmt: skip
# erf(z) = z sum c_n z^(2n), |z| < 1, c_n = 2/sqrt(pi) (-1)^n / (n! (2n+1)), for float64.
_ERF64_TERMS = 20


def _blocked(function: Function) -> Function:
    """`function` computed block by block over the flattened array."""

    def whole(x: np.ndarray) -> np.ndarray:
        if not x.ndim:  # numpy turns results without axes into scalars, which cannot be outputs
            return function(x.reshape(1)).reshape(())
        if x.size <= BLOCK:
            return function(x)
        flat = np.ascontiguousarray(x).reshape(-1)
        out = np.empty_like(flat)
        for start in range(0, flat.size, BLOCK):
            out[start : start + BLOCK] = function(flat[start : start + BLOCK])
        return out.reshape(x.shape)

    whole.__doc__ = function.__doc__
    return whole


def _horner(coefficients: tuple[float, ...], x: np.ndarray) -> np.ndarray:
    """The polynomial with the highest power first, in the type of `x`."""
    result = x * coefficients[0]
    for c in coefficients[1:-1]:
        result += c
        result *= x
    result += coefficients[-1]
    return result


def _erf64_near_zero(z: np.ndarray) -> np.ndarray:
    square, term, total = z * z, z * (2 / np.sqrt(np.pi)), np.zeros_like(z)
    for n in range(_ERF64_TERMS):
        total += term / (2 * n + 1)
        term = term * square / -(n + 1)
    return total


def _erfc_positive(z: np.ndarray) -> np.ndarray:
    """erfc(z) for z >= 0, small in relative error until it underflows."""
    if z.dtype == np.float64:
        scale = 1 / (z + _ERFC64_K)
        scaled = chebval(1 - 2 * _ERFC64_K * scale, _ERFC64)
    else:
        scale = 1 / (z + _ERFC_K)
        scaled = _horner(_ERFC, 1 - 2 * _ERFC_K * scale)
    scaled *= scale
    scaled *= np.exp(-z * z)
    return scaled


@_blocked
def erfc(x: np.ndarray) -> np.ndarray:
    """The complementary error function."""
    result = np.copysign(_erfc_positive(np.abs(x)), x)
    result += 2 * np.signbit(x).astype(x.dtype)
    return result


@_blocked
def erf(x: np.ndarray) -> np.ndarray:
    """The error function."""
    if x.dtype == np.float64:
        size = np.abs(x)
        far = np.copysign(1 - _erfc_positive(size), x)
        return np.where(size < 1, _erf64_near_zero(np.clip(x, -1, 1)), far)
    z = np.clip(x, -_ERF_LIMIT, _ERF_LIMIT)
    square = z * z
    return z * _horner(_ERF_P, square) / _horner(_ERF_Q, square)


@_blocked
def gelu(x: np.ndarray) -> np.ndarray:
    """x Phi(x) = x erfc(-x / sqrt 2) / 2, exact gelu."""
    tail = _erfc_positive(np.abs(x) * np.sqrt(0.5).astype(x.dtype))
    tail *= 0.5
    phi = np.invert(np.signbit(x)).astype(x.dtype)
    phi -= np.copysign(tail, x)
    phi *= x
    return phi


@_blocked
def gelu_tanh(x: np.ndarray) -> np.ndarray:
    """The tanh approximation of gelu: x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) / 2."""
    inner = x * x
    inner *= 0.044715
    inner += 1
    inner *= x
    inner *= float(np.sqrt(2 / np.pi))
    inner = np.tanh(inner)
    inner += 1
    inner *= 0.5
    inner *= x
    return inner


@_blocked
def logistic(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x))."""
    result = np.exp(-x)
    result += 1
    return np.divide(1, result, out=result)


@_blocked
def silu(x: np.ndarray) -> np.ndarray:
    """x logistic(x)."""
    result = np.exp(-x)
    result += 1
    return np.divide(x, result, out=result)


@_blocked
def softplus(x: np.ndarray) -> np.ndarray:
    """log(1 + exp(x))."""
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


@_blocked
def gelu_dx(x: np.ndarray) -> np.ndarray:
    """Derivative of exact gelu: Phi(x) + x phi(x)."""
    root = np.sqrt(0.5).astype(x.dtype)
    density = np.exp(x * x * x.dtype.type(-0.5)) * x.dtype.type(1 / np.sqrt(2 * np.pi))
    return (1 + erf(x * root)) * x.dtype.type(0.5) + x * density


@_blocked
def gelu_tanh_dx(x: np.ndarray) -> np.ndarray:
    """Derivative of gelu_tanh: with t = tanh(u), (1 + t) / 2 + x (1 - t^2) u' / 2."""
    root, cubic = x.dtype.type(np.sqrt(2 / np.pi)), x.dtype.type(0.044715)
    square = x * x
    t = np.tanh(root * x * (1 + cubic * square))
    slope = root * (1 + 3 * cubic * square)
    return x.dtype.type(0.5) * ((1 + t) + x * (1 - t * t) * slope)


@_blocked
def silu_dx(x: np.ndarray) -> np.ndarray:
    """Derivative of silu: s (1 + x (1 - s)) with s = logistic(x)."""
    s = logistic(x)
    return s * (1 + x * (1 - s))
