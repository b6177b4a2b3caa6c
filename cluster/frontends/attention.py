"""Attention as one operator that the device has a kernel for.

    out, lse = attention(q, k, v, causal=True)

is plain JAX, with a gradient, and runs anywhere. More positions than SBUF can hold go in blocks,
whose results are joined by their sums of exponentials. Where a function is lowered directly, the
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
Pair = tuple[slice, slice, bool]

LONGEST_BYTES = 16_384
"""Positions of a block times bytes of an element: what the gradient of a head of 128 holds of them
fits into the SBUF of every generation (`device/ops/attention_gradient_nest.py`)."""


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
    compute = jax.lax.composite(_whole, ATTENTION)
    rows: list[tuple[Array, Array]] = []
    for pairs in _blocks(q, k, causal):
        parts = [
            compute(q[:, i], k[:, j], v[:, j], causal=diagonal, scale=scale)
            for i, j, diagonal in pairs
        ]
        rows.append(parts[0] if len(parts) == 1 else _joined(parts))
    if len(rows) == 1:
        return rows[0]
    return jnp.concatenate([out for out, _ in rows], 1), jnp.concatenate([x for _, x in rows], 2)


def _joined(parts: list[tuple[Array, Array]]) -> tuple[Array, Array]:
    """Of the same queries with several blocks of keys: the result with all of them."""
    lse = jax.nn.logsumexp(jnp.stack([part for _, part in parts]), 0)
    out = jnp.zeros((), jnp.float32)
    for result, own in parts:
        share = jnp.exp(own - lse).transpose(0, 2, 1)[..., None]
        out = out + result.astype(jnp.float32) * share
    return out.astype(parts[0][0].dtype), lse


def _blocks(q: Array, k: Array, causal: bool) -> list[list[Pair]]:
    """For each block of queries (queries, keys, whether keys after a query are hidden) of the
    blocks of keys that it sees."""
    most = LONGEST_BYTES // q.dtype.itemsize
    rows, keys = (_cut(x.shape[1], most) for x in (q, k))
    return [
        [(i, j, causal and a == b) for b, j in enumerate(keys) if not causal or b <= a]
        for a, i in enumerate(rows)
    ]


def _cut(count: int, most: int) -> list[slice]:
    """Equal blocks of whole tiles of 128, the last one shorter."""
    size = -(-count // -(-count // most))
    size = -(-size // 128) * 128 if size < count else count
    return [slice(at, min(at + size, count)) for at in range(0, count, size)]


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
    compute, kv = jax.lax.composite(_whole_gradient, GRADIENT), k.shape[2]
    parts: dict[tuple[int, int], list[Array]] = {}
    for pairs in _blocks(q, k, causal):
        for i, j, diagonal in pairs:
            dq, dk, dv = compute(
                q[:, i], k[:, j], v[:, j], out[:, i], lse[:, :, i], dout[:, i], dlse[:, :, i],
                causal=diagonal, scale=scale,
            )  # fmt: skip
            for place, part in ((0, i), dq), ((1, j), _shared(dk, kv)), ((2, j), _shared(dv, kv)):
                parts.setdefault((place[0], place[1].start), []).append(part)
    dq, dk, dv = (
        _whole_of([_sum(found) for (kind, _), found in sorted(parts.items()) if kind == wanted])
        for wanted in range(3)
    )
    return dq, dk, dv


def _sum(parts: list[Array]) -> Array:
    """In float32, rounded once."""
    if len(parts) == 1:
        return parts[0]
    whole = sum(part.astype(jnp.float32) for part in parts)
    return jnp.asarray(whole).astype(parts[0].dtype)


def _whole_of(blocks: list[Array]) -> Array:
    return blocks[0] if len(blocks) == 1 else jnp.concatenate(blocks, 1)


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
