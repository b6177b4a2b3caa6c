"""Attention as one operator that the device has a kernel for.

    out, lse = attention(q, k, v, causal=True)

is plain JAX, with a gradient, and runs anywhere. Where a function is lowered directly, the
composites that it consists of become the fused kernels of `device/ops/attention.py`; XLA's
partitioner takes them apart into what they stand for.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

ATTENTION, GRADIENT = "trnsim.attention", "trnsim.attention_gradient"

Array = Any
Saved = tuple[Array, ...]


def attention(
    q: Array, k: Array, v: Array, *, causal: bool, scale: float | None = None
) -> tuple[Array, Array]:
    """(softmax(scale * q k^T) v, log of the sums of exponentials), query i seeing keys 0..i only
    if `causal`.

    q [b, s, n, h], k and v [b, t, kv, h] of one dtype, n a multiple of kv: neighbouring query heads
    share a key head. out as q; lse float32 [b, n, s]. `scale` is 1 / sqrt(h) by default.
    """
    return _attention(q, k, v, causal, q.shape[-1] ** -0.5 if scale is None else scale)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _attention(q: Array, k: Array, v: Array, causal: bool, scale: float) -> tuple[Array, Array]:
    return jax.lax.composite(_whole, ATTENTION)(q, k, v, causal=causal, scale=scale)


def _forward(
    q: Array, k: Array, v: Array, causal: bool, scale: float
) -> tuple[tuple[Array, Array], Saved]:
    done: tuple[Array, Array] = _attention(q, k, v, causal, scale)
    return done, (q, k, v, *done)


def _backward(causal: bool, scale: float, saved: Saved, given: tuple[Array, Array]) -> Saved:
    (q, k, v, out, lse), (dout, dlse) = saved, given
    return attention_gradient(q, k, v, out, lse, dout, dlse, causal=causal, scale=scale)


_attention.defvjp(_forward, _backward)


def attention_gradient(
    q: Array, k: Array, v: Array, out: Array, lse: Array, dout: Array, dlse: Array,
    *, causal: bool, scale: float | None = None,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """(dq, dk, dv) of `attention` from its results and their cotangents.

    `out` and `lse` may be those of more keys than `k`: then it is the part of dq that is due to `k`
    and `v`, and their whole gradients from these queries (ring attention).
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    compute = jax.lax.composite(_whole_gradient, GRADIENT)
    dq, dk, dv = compute(q, k, v, out, lse, dout, dlse, causal=causal, scale=scale)
    kv = k.shape[2]
    return dq, _shared(dk, kv), _shared(dv, kv)


def _shared(gradient: Array, kv: int) -> Array:
    """The sum over the query heads of each key head: [b, t, n, h] to [b, t, kv, h]."""
    b, t, n, h = gradient.shape
    if n == kv:
        return gradient
    whole = gradient.reshape(b, t, kv, n // kv, h)
    parts = (whole[:, :, :, i].astype(jnp.float32) for i in range(n // kv))
    return jnp.asarray(sum(parts)).astype(gradient.dtype)


# ---- what the composites stand for -----------------------------------------------------------


def _scores(q: Array, k: Array, causal: bool, scale: float) -> Array:
    """float32 [b, kv, query heads of each, s, t]; keys after a query are minus infinity."""
    b, s, n, h = q.shape
    kv = k.shape[2]
    grouped = q.reshape(b, s, kv, n // kv, h)
    scores = jnp.einsum("bsgrh,btgh->bgrst", grouped, k, preferred_element_type=jnp.float32)
    if causal:
        row = jax.lax.broadcasted_iota(jnp.int32, scores.shape[-2:], 0)
        column = jax.lax.broadcasted_iota(jnp.int32, scores.shape[-2:], 1)
        scores = jnp.where(row >= column, scores, -jnp.inf)
    return scores * scale


def _whole(q: Array, k: Array, v: Array, *, causal: bool, scale: float) -> tuple[Array, Array]:
    b, s, n, h = q.shape
    scores = _scores(q, k, causal, scale)
    lse = jax.nn.logsumexp(scores, -1)
    weights = jnp.exp(scores - lse[..., None]).astype(v.dtype)
    out = jnp.einsum("bgrst,btgh->bsgrh", weights, v, preferred_element_type=jnp.float32)
    return out.reshape(b, s, n, h).astype(q.dtype), lse.reshape(b, n, s)


def _whole_gradient(
    q: Array, k: Array, v: Array, out: Array, lse: Array, dout: Array, dlse: Array,
    *, causal: bool, scale: float,
) -> Saved:  # fmt: skip
    b, s, n, h = q.shape
    t, kv = k.shape[1], k.shape[2]
    wide = jnp.float32
    delta = (dout.astype(wide) * out.astype(wide)).sum(-1).transpose(0, 2, 1) - dlse

    def rows(x: Array) -> Array:
        return x.reshape(b, kv, n // kv, s, 1)

    def grouped(x: Array) -> Array:
        return x.reshape(b, s, kv, n // kv, h)

    weights = jnp.exp(_scores(q, k, causal, scale) - rows(lse))
    product = partial(jnp.einsum, preferred_element_type=wide)
    incoming = product("bsgrh,btgh->bgrst", grouped(dout), v)
    inner = ((incoming - rows(delta)) * weights).astype(q.dtype)
    weights = weights.astype(q.dtype)
    dq = product("bgrst,btgh->bsgrh", inner, k).reshape(q.shape) * scale
    dk = product("bgrst,bsgrh->btgrh", inner, grouped(q)).reshape(b, t, n, h) * scale
    dv = product("bgrst,bsgrh->btgrh", weights, grouped(dout)).reshape(b, t, n, h)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)
