"""Values of attention and its gradient: softmax(scale * q k^T) v without the matrix of scores.

Shapes: q [b, s, n, h], k and v [b, t, kv, h] with n a multiple of kv: query head i reads key head
i // (n / kv). `lse` is float32 [b, n, s], the logarithm of each row's sum of exponentials. Scores,
sums and products are float32; probabilities and their gradients are rounded to q's dtype before
they are multiplied, as on the device.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from .. import arithmetic

FLOAT32 = np.dtype(np.float32)


@dataclass(frozen=True, slots=True)
class Shapes:
    """Extents of an attention: batch, queries, query heads, head size, keys, key heads."""

    b: int
    s: int
    n: int
    h: int
    t: int
    kv: int

    @classmethod
    def of(cls, q: tuple[int, ...], k: tuple[int, ...]) -> "Shapes":
        """From the shapes of q and k."""
        b, s, n, h = q
        return cls(b, s, n, h, k[1], k[2])

    @property
    def repeat(self) -> int:
        """Query heads to a key head."""
        return self.n // self.kv


def _wide(x: np.ndarray) -> np.ndarray:
    return arithmetic.convert(x, FLOAT32)


def _scores(q: np.ndarray, k: np.ndarray, scale: float, causal: bool) -> np.ndarray:
    """float32 [s, t]; of a causal attention the keys after a query are minus infinity."""
    scores = (_wide(q) @ _wide(k).T) * np.float32(scale)
    if causal:
        scores[np.triu_indices(len(scores), 1)] = -math.inf
    return scores


def attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, causal: bool
) -> tuple[np.ndarray, np.ndarray]:
    """(out [s, h] float32, lse [s]) of one head: q [s, h], k and v [t, h]."""
    scores = _scores(q, k, scale, causal)
    top = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True, dtype=FLOAT32)
    out = _wide(arithmetic.convert(weights, q.dtype)) @ _wide(v) / total
    return out, (np.log(total) + top)[:, 0]


def attention_gradient(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    dout: np.ndarray,
    dlse: np.ndarray,
    scale: float,
    causal: bool,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """float32 (dq [s, h], dk [t, h], dv [t, h]) of one head."""
    weights = np.exp(_scores(q, k, scale, causal) - lse[:, None])
    delta = (_wide(dout) * _wide(out)).sum(axis=-1, dtype=FLOAT32) - dlse
    inner = (_wide(dout) @ _wide(v).T - delta[:, None]) * weights
    weights = _wide(arithmetic.convert(weights, q.dtype))
    inner = _wide(arithmetic.convert(inner, q.dtype))
    wide = np.float32(scale)
    return inner @ _wide(k) * wide, inner.T @ _wide(q) * wide, weights.T @ _wide(dout)


def fill(
    operands: Sequence[np.ndarray],
    targets: Sequence[np.ndarray],
    units: Iterable[tuple[int, int]],
    scale: float,
    causal: bool,
) -> None:
    """Writes the given (batch element, query head) of the results into `targets`.

    Three operands are attention's, seven its gradient's.
    """
    repeat = operands[0].shape[2] // operands[1].shape[2]
    for b, n in units:
        g = n // repeat
        if len(operands) == 3:
            q, k, v = operands
            out, targets[1][b, n] = attention(q[b, :, n], k[b, :, g], v[b, :, g], scale, causal)
            found: tuple[np.ndarray, ...] = (out,)
        else:
            q, k, v, out, lse, dout, dlse = operands
            found = attention_gradient(
                q[b, :, n], k[b, :, g], v[b, :, g], out[b, :, n], lse[b, n],
                dout[b, :, n], dlse[b, n], scale, causal,
            )  # fmt: skip
        for target, value in zip(targets, found, strict=False):
            target[b, :, n] = arithmetic.convert(value, target.dtype)
