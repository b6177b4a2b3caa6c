"""The pieces of a dense transformer: JAX functions of one rank's arrays, between collectives.

Shapes: b sequences of a microbatch, s positions (t of keys), d hidden, n heads and m key-value
heads of the rank, h head width, f feed-forward width of the rank, v vocabulary of the rank.
Statistics, softmax and the loss are computed in f32. Each factory gives the same function for equal
arguments, so that its segments are lowered and compiled once.
"""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..frontends import activations
from ..frontends import attention as fused
from .derivative import adds_into

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
    square = jnp.mean(wide * wide, -1, keepdims=True)
    if kind == "layer":  # both means in one pass over x
        mean = jnp.mean(wide, -1, keepdims=True)
        wide, square = wide - mean, square - mean * mean
    wide = wide * jax.lax.rsqrt(square + eps) * scale.astype(jnp.float32)
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
def queries(
    sections: tuple[int, int], weights: int, biases: int, head_norm: float, rotated: int
) -> Callable[..., Any]:
    """Queries [b, s, n, h], keys and values [b, s, m, h] of x [b, s, d]: one projection.

    sections: n and m. Then come `weights` arrays [d, *, h] and `biases` arrays [*, h], which joined
    are those of queries, keys and values; with `head_norm`, epsilon of a norm of each head of
    queries and keys, the scales [h] of both; and if `rotated`, what `rotation` gives.
    """
    n, m = sections

    def queries(x: Array, *rest: Array) -> Any:
        made = jnp.einsum("bsd,dnh->bsnh", x, joined(rest[:weights], 1))
        if biases:
            made = made + joined(rest[weights : weights + biases], 0)
        rest = rest[weights + biases :]
        if head_norm:
            q, k, v = cut(n, m, m)(made)
            q, k = (normalised("rms", head_norm, a, w) for a, w in zip((q, k), rest, strict=False))
            made, rest = jnp.concatenate([q, k, v], 2), rest[2:]
        if not rotated:
            return cut(n, m, m)(made)
        turning, v = cut(n + m, m)(made)
        return *cut(n, m)(rotate(rotated)(turning, *rest)), v

    return queries


def joined(arrays: Sequence[Array], axis: int) -> Array:
    """The arrays along an axis; one alone as it is."""
    return arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays, axis)


@cache
def rotation(theta: float, rotated: int, width: int) -> Callable[..., Any]:
    """Cosines and sines f32 [s, h] of rotary embedding at positions i32 [s], at base `theta`.

    Of the `width` elements of a head the first `rotated` turn, in pairs (i, i + rotated / 2).
    """

    def rotation(places: Array) -> Any:
        half = rotated // 2
        rates = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
        angles = places.astype(jnp.float32)[:, None] * rates
        rest = (len(places), width - rotated)
        cosines, sines = [jnp.cos(angles)] * 2, [jnp.sin(angles)] * 2
        if width > rotated:
            cosines, sines = [*cosines, jnp.ones(rest)], [*sines, jnp.zeros(rest)]
        return jnp.concatenate(cosines, 1), jnp.concatenate(sines, 1)

    return rotation


@cache
def rotate(rotated: int) -> Callable[..., Array]:
    """Rotary embedding of x [b, s, n, h], cosine and sine f32 [s, h].

    The halves of a head change places by a product with a matrix of 0, 1 and -1, which is exact:
    the Tensor engine does it while halves of rows would be moved by DMA in small pieces. The
    gradient turns the other way.
    """
    half = rotated // 2

    def turned(x: Array, cosine: Array, sine: Array) -> Array:
        turn = np.zeros((x.shape[-1], x.shape[-1]), np.float32)
        turn[half:rotated, :half] = -np.eye(half)
        turn[:half, half:rotated] = np.eye(half)
        swapped = jnp.einsum("bsnh,hk->bsnk", x, jnp.asarray(turn).astype(x.dtype))
        wide = x.astype(jnp.float32) * cosine[None, :, None]
        return (wide + swapped.astype(jnp.float32) * sine[None, :, None]).astype(x.dtype)

    @jax.custom_vjp
    def rotate(x: Array, cosine: Array, sine: Array) -> Array:
        return turned(x, cosine, sine)

    def back(tables: Any, given: Array) -> Any:
        cosine, sine = tables
        return turned(given, cosine, -sine), jnp.zeros_like(cosine), jnp.zeros_like(sine)

    rotate.defvjp(lambda x, cosine, sine: (turned(x, cosine, sine), (cosine, sine)), back)
    return rotate


@cache
def cut(*counts: int) -> Callable[..., Any]:
    """Parts of x [b, s, *, h] along its heads; the gradient joins them again."""
    ends = [sum(counts[:i]) for i in range(len(counts) + 1)]

    @jax.custom_vjp
    def cut(x: Array) -> tuple[Array, ...]:
        return tuple(x[:, :, start:stop] for start, stop in pairwise(ends))

    cut.defvjp(lambda x: (cut(x), None), lambda _, given: (jnp.concatenate(given, 2),))
    return cut


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
            return activations.gelu_tanh(made)
        case "relu":
            return jax.nn.relu(made)
    return swiglu(made)


@jax.custom_vjp
def swiglu(made: Array) -> Array:
    """silu of the gate times the other: [..., 2, f] -> [..., f]."""
    return activations.silu(made[..., 0, :]) * made[..., 1, :]


def _swiglu_back(made: Array, given: Array) -> tuple[Array]:
    """Both halves written side by side: JAX's own transpose of a slice would pad and add."""
    gate, other = made[..., 0, :], made[..., 1, :]
    value, pull = jax.vjp(activations.silu, gate)
    return (jnp.stack([pull(given * other)[0], given * value], -2),)


swiglu.defvjp(lambda made: (swiglu(made), made), _swiglu_back)


@jax.custom_vjp
def embed(table: Array, tokens: Array, index: Array) -> Array:
    """Rows of this rank's part of the vocabulary, zero for other tokens: partial sums [b, s, d].

    table [v, d]; tokens i32 [b, s]; index: i32, which part of the vocabulary the table is.
    """
    here = tokens - index * table.shape[0]
    mine = (here >= 0) & (here < table.shape[0])
    rows = jnp.take(table, here, axis=0, mode="clip")
    return rows * mine[..., None].astype(table.dtype)


def _embed(table: Array, tokens: Array, index: Array) -> Any:
    return embed(table, tokens, index), (tokens - index * table.shape[0], table)


def _embed_back(saved: Any, given: Array) -> Any:
    """Rows of other tokens are dropped: they have no place in the table."""
    here, table = saved
    place = jnp.where(here < 0, table.shape[0], here)
    found = jnp.zeros(table.shape, table.dtype).at[place].add(given, mode="drop")
    return found, none(here), none(here[0, 0])


embed.defvjp(_embed, _embed_back)


@adds_into(embed)
def embed_into(total: Array, table: Array, tokens: Array, index: Array, given: Array) -> Array:
    """The table's gradient f32 [v, d], added to row by row."""
    here = tokens - index * table.shape[0]
    place = jnp.where(here < 0, table.shape[0], here)
    return total.at[place].add(given.astype(total.dtype), mode="drop")


def none(index: Array) -> np.ndarray:
    """The cotangent of an integer array."""
    return np.zeros(index.shape, jax.dtypes.float0)


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

    Both relative to `largest` f32 [b, s]; labels i32 [b, s]; index: i32, which part of the
    vocabulary. vocab: how many tokens there are, of rows that fill up the last rank's part; 0: no
    such rows.
    """

    def powers(made: Array, largest: Array, index: Array) -> Array:
        each = jnp.exp(made.astype(jnp.float32) - largest[..., None])
        if not vocab:
            return each
        token = jax.lax.broadcasted_iota(jnp.int32, made.shape, made.ndim - 1)
        return jnp.where(token + index * made.shape[-1] < vocab, each, 0)

    @jax.custom_vjp
    def exponentials(made: Array, largest: Array, labels: Array, index: Array) -> Array:
        here = labels - index * made.shape[-1]
        mine = (here >= 0) & (here < made.shape[-1])
        place = jnp.clip(here, 0, made.shape[-1] - 1)[..., None]
        chosen = jnp.take_along_axis(made, place, -1, mode="clip")[..., 0].astype(jnp.float32)
        each = powers(made, largest, index)
        return jnp.stack([jnp.sum(each, -1), jnp.where(mine, chosen - largest, 0)])

    def forward(*arguments: Array) -> Any:
        return exponentials(*arguments), arguments

    def back(saved: Any, given: Array) -> Any:
        made, largest, labels, index = saved
        b, s, v = made.shape
        here = labels - index * v
        place = jnp.where(here < 0, v, here).reshape(-1)
        each = powers(made, largest, index) * given[0][..., None]
        flat, row = each.astype(made.dtype).reshape(b * s, v), jnp.arange(b * s, dtype=jnp.int32)
        label = given[1].reshape(-1).astype(made.dtype)
        found = flat.at[row, place].add(label, mode="drop").reshape(made.shape)
        return found, jnp.zeros_like(largest), none(labels), none(index)

    exponentials.defvjp(forward, back)
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
