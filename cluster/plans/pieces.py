"""The pieces of a dense transformer: JAX functions of one rank's arrays, between collectives.

Shapes: b sequences of a microbatch, s positions (t of keys), d hidden, n heads and m key-value
heads of the rank, h head width, f feed-forward width of the rank, v vocabulary of the rank.
Statistics, softmax and the loss are computed in f32. Each factory gives the same function for equal
arguments, so that its segments are lowered and compiled once.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from ..frontends import attention as fused

Array = jax.Array


@cache
def norm(kind: str, eps: float) -> Callable[..., Array]:
    """`layer` or `rms` norm of x [b, s, d] with scale [d] (and shift [d]); gives x's type."""

    def norm(x: Array, scale: Array, *shift: Array) -> Array:
        return normalised(kind, eps, x, scale, *shift)

    return norm


def normalised(kind: str, eps: float, x: Array, scale: Array, *shift: Array) -> Array:
    """x normalised over its last axis, in f32."""
    wide = x.astype(jnp.float32)
    if kind == "layer":
        wide = wide - jnp.mean(wide, -1, keepdims=True)
    mean = jnp.mean(wide * wide, -1, keepdims=True)
    wide = wide * jax.lax.rsqrt(mean + eps) * scale.astype(jnp.float32)
    for part in shift:
        wide = wide + part.astype(jnp.float32)
    return wide.astype(x.dtype)


@cache
def residual(bias: bool, rate: float, site: int) -> Callable[..., Array]:
    """x + dropout(o + bias): x, o [b, s, d], bias [d]; then what `dropped` needs if rate > 0."""

    def residual(x: Array, o: Array, *rest: Array) -> Array:
        if bias:
            o, rest = o + rest[0], rest[1:]
        return x + (dropped(o, rate, site, *rest) if rate else o)

    return residual


def dropped(x: Array, rate: float, site: int, samples: Array, places: Array, layer: Array) -> Array:
    """Dropout of x [b, s, d] by a hash of the element's place in the whole batch and model.

    samples: i32 [b], numbers of the sequences (with the seed); places: i32 [s], their positions.
    The mask does not depend on how the batch or the sequence is split over ranks.
    """
    keys = [
        jnp.broadcast_to(key.astype(jnp.uint32), x.shape)
        for key in (
            samples[:, None, None] + (layer * 64 + site) * jnp.int32(0x2C1B3C6D),
            places[None, :, None],
            jnp.arange(x.shape[2], dtype=jnp.int32)[None, None, :],
        )
    ]
    bits = keys[0]
    for key in keys[1:]:
        bits = mixed(bits ^ mixed(key))
    kept = bits >= jnp.uint32(int(rate * 2**32))
    return jnp.where(kept, x / (1 - rate), 0).astype(x.dtype)


def mixed(bits: Array) -> Array:
    """A bijection of uint32 that spreads every bit (the finaliser `lowbias32` of C. Wellons)."""
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x7FEB352D)
    bits = (bits ^ (bits >> 15)) * jnp.uint32(0x846CA68B)
    return bits ^ (bits >> 16)


@cache
def queries(theta: float, rotated: int, bias: bool, head_norm: float) -> Callable[..., Any]:
    """Queries, keys and values of x [b, s, d]: weights [d, n, h], [d, 2, m, h] (and biases).

    rotated: how many elements of a head rotary embedding turns (0: none), at base `theta`.
    head_norm: epsilon of the norm of each head of queries and keys (0: none), with scales [h].
    places: i32 [s], the positions. Gives q [b, s, n, h], k and v [b, s, m, h].
    """

    def queries(x: Array, places: Array, wq: Array, wkv: Array, *rest: Array) -> Any:
        q = jnp.einsum("bsd,dnh->bsnh", x, wq)
        kv = jnp.einsum("bsd,dcmh->bscmh", x, wkv)
        if bias:
            q, kv, rest = q + rest[0], kv + rest[1], rest[2:]
        k, v = kv[:, :, 0], kv[:, :, 1]
        if head_norm:
            q, k = (normalised("rms", head_norm, a, s) for a, s in zip((q, k), rest, strict=True))
        if rotated:
            q, k = rotate(q, places, theta, rotated), rotate(k, places, theta, rotated)
        return q, k, v

    return queries


def rotate(x: Array, places: Array, theta: float, rotated: int) -> Array:
    """Rotary position embedding of x [b, s, n, h] at positions i32 [s], pairs (i, i + half)."""
    half = rotated // 2
    rates = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = (places.astype(jnp.float32)[:, None] * rates)[None, :, None, :]
    sine, cosine = jnp.sin(angles), jnp.cos(angles)
    wide = x.astype(jnp.float32)
    one, other = wide[..., :half], wide[..., half:rotated]
    turned = [one * cosine - other * sine, other * cosine + one * sine, wide[..., rotated:]]
    return jnp.concatenate(turned[: 2 + (rotated < x.shape[-1])], -1).astype(x.dtype)


@cache
def attention(causal: bool) -> Callable[..., Any]:
    """softmax(q k^T / sqrt(h)) v as [b, s, n, h], and its log-sum-exp f32 [b, n, s]."""

    def attention(q: Array, k: Array, v: Array) -> Any:
        return fused.attention(q, k, v, causal=causal)

    return attention


@cache
def attention_backward(causal: bool) -> Callable[..., Any]:
    """dq, dk, dv from q, k, v, the results of `attention` and the cotangent of the first."""

    def attention_backward(
        q: Array, k: Array, v: Array, out: Array, lse: Array, dout: Array
    ) -> Any:
        zero = jnp.zeros_like(lse)
        return fused.attention_gradient(q, k, v, out, lse, dout, zero, causal=causal)

    return attention_backward


def project(context: Array, weight: Array) -> Array:
    """The attention's output: context [b, s, n, h], weight [n, h, d] -> partial sums [b, s, d]."""
    return jnp.einsum("bsnh,nhd->bsd", context, weight)


@cache
def expand(bias: bool, gated: bool) -> Callable[..., Array]:
    """x [b, s, d] to the feed-forward width: weight [d, f] or with a gate [d, 2, f]."""

    def expand(x: Array, weight: Array, *rest: Array) -> Array:
        made = jnp.einsum("bsd,dcf->bscf" if gated else "bsd,df->bsf", x, weight)
        return made + rest[0] if bias else made

    return expand


@cache
def contract(activation: str) -> Callable[..., Array]:
    """The activation and the way back: [b, s, f] (swiglu: [b, s, 2, f]), weight [f, d]."""

    def contract(made: Array, weight: Array) -> Array:
        return jnp.einsum("bsf,fd->bsd", activated(made, activation), weight)

    return contract


def activated(made: Array, activation: str) -> Array:
    """`gelu` by its tanh form, `relu`, or `swiglu` of [..., 2, f]: gate first."""
    match activation:
        case "gelu":
            return jax.nn.gelu(made)
        case "relu":
            return jax.nn.relu(made)
    return jax.nn.silu(made[..., 0, :]) * made[..., 1, :]


def embed(table: Array, tokens: Array, index: Array) -> Array:
    """Rows of this rank's part of the vocabulary, zero for other tokens: partial sums [b, s, d].

    table [v, d]; tokens i32 [b, s]; index: i32, which part of the vocabulary the table is.
    """
    here = tokens - index * table.shape[0]
    mine = (here >= 0) & (here < table.shape[0])
    rows = jnp.take(table, jnp.where(mine, here, 0), axis=0)
    return jnp.where(mine[..., None], rows, 0).astype(table.dtype)


@cache
def place(runs: int, types: bool, rate: float, site: int) -> Callable[..., Array]:
    """x [b, s, d] + learned positions [*, d] (+ the first row of types [*, d]), then dropout.

    places: i32 [s], positions in `runs` consecutive runs of equal length.
    """

    def place(x: Array, places: Array, table: Array, *rest: Array) -> Array:
        run = x.shape[1] // runs
        rows = [jax.lax.dynamic_slice_in_dim(table, places[i * run], run, 0) for i in range(runs)]
        x = x + jnp.concatenate(rows)[None] if runs > 1 else x + rows[0][None]
        if types:
            x, rest = x + rest[0][0], rest[1:]
        return dropped(x, rate, site, rest[0], places, rest[1]) if rate else x

    return place


def logits(x: Array, weight: Array) -> tuple[Array, Array]:
    """Logits [b, s, v] of x [b, s, d] with weight [v, d], and their maximum f32 [b, s]."""
    made = jnp.einsum("bsd,vd->bsv", x, weight)
    return made, jax.lax.stop_gradient(jnp.max(made, -1).astype(jnp.float32))


def biased_logits(x: Array, weight: Array, bias: Array) -> tuple[Array, Array]:
    """As `logits`, with a bias [v]."""
    made = jnp.einsum("bsd,vd->bsv", x, weight) + bias
    return made, jax.lax.stop_gradient(jnp.max(made, -1).astype(jnp.float32))


@cache
def exponentials(vocab: int) -> Callable[..., Array]:
    """f32 [2, b, s] of this rank's vocabulary: sum of exponentials, and the label's logit.

    vocab: how many tokens there are, of rows that fill up the last rank's part; 0: no such rows.
    """

    def exponentials(made: Array, largest: Array, labels: Array, index: Array) -> Array:
        wide = made.astype(jnp.float32) - jax.lax.stop_gradient(largest)[..., None]
        token = jax.lax.broadcasted_iota(jnp.int32, made.shape, made.ndim - 1)
        token = token + index * made.shape[-1]
        each = jnp.exp(wide)
        each = jnp.where(token < vocab, each, 0) if vocab else each
        chosen = jnp.where(token == labels[..., None], wide, 0)
        return jnp.stack([jnp.sum(each, -1), jnp.sum(chosen, -1)])

    return exponentials


@cache
def cross_entropy(tokens: int) -> Callable[..., Array]:
    """The rank's part of the mean loss over `tokens` of the whole step: f32 []."""

    def cross_entropy(sums: Array) -> Array:
        return jnp.sum(jnp.log(sums[0]) - sums[1]) / float(tokens)  # may exceed an i32

    return cross_entropy


@cache
def transform(kind: str, eps: float, activation: str) -> Callable[..., Array]:
    """BERT's transform before the output: norm(activation(x w + bias)), w [d, d]."""

    def transform(x: Array, weight: Array, bias: Array, scale: Array, *shift: Array) -> Array:
        made = activated(jnp.einsum("bsd,de->bse", x, weight) + bias, activation)
        return normalised(kind, eps, made, scale, *shift)

    return transform
