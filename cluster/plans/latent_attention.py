"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

Queries, keys and values are made from narrow vectors of each position: one of `q_rank`, one of
`kv_rank`, and `rope_dim` elements of a rotated key that all heads share. A rank of tp makes those
of its part of the sequence, they are gathered, and it expands its own heads from them: what is
gathered is narrower than the hidden states. Heads are wider for keys than for values, which the
fused kernel does not have, so that the scores are kept in HBM.

Shapes: b sequences, s positions (r of a rank's part), d hidden, n heads of the rank, h head width
of which p are rotated, w value width, q and c the ranks of queries and of keys and values.
"""

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from ..models.config import ModelConfig
from . import pieces

if TYPE_CHECKING:
    from .layers import Recorder

Array = jax.Array


def latent_attention(r: "Recorder", x: str) -> str:
    """Record the attention of x [b, r, d], as x; the whole sequence is on the ranks of tp."""
    plan, model = r.plan, r.plan.model
    name, heads = f"{r.name}.attention", plan.local_heads
    packed = r.tape.run(compress(model), [x, "shard_positions", *_down(r)], [f"{name}.latent"])
    q, kv = model.q_rank or model.hidden, model.kv_rank
    plain = model.head_dim - model.rope_dim
    reads = [
        r.gather(packed, "attention.latents"),
        "positions",
        r.parameter("attention.wq", q, heads, model.head_dim, cut=1),
        r.parameter("attention.wkv", kv, heads, plain + model.value_dim, cut=1),
    ]
    qkv = [f"{name}.{part}" for part in "qkv"]
    r.tape.run(expand(model), reads, qkv)
    context = r.tape.run(attend(model.causal), qkv, [f"{name}.context"])
    out = r.parameter("attention.wo", heads, model.value_dim, model.hidden, cut=0)
    partial = r.tape.run(pieces.project, [context, out], [f"{name}.partial"])
    return r.scatter(partial, "attention.out")


def _down(r: "Recorder") -> list[str]:
    """The matrices that make the narrow vectors, and their norms; every rank of tp has them."""
    model = r.plan.model
    width = model.kv_rank + model.rope_dim
    made = [
        r.parameter("attention.kv_down", model.hidden, width, partial=True),
        r.parameter("attention.kv_scale", model.kv_rank, partial=True, start="ones"),
    ]
    if model.q_rank:
        made += [
            r.parameter("attention.q_down", model.hidden, model.q_rank, partial=True),
            r.parameter("attention.q_scale", model.q_rank, partial=True, start="ones"),
        ]
    return made


@cache
def compress(model: ModelConfig) -> Callable[..., Array]:
    """x [b, r, d] at positions i32 [r] to its narrow vectors side by side: [b, r, q + c + p].

    Without a rank for queries, they are made from x itself.
    """

    def compress(x: Array, places: Array, down: Array, scale: Array, *queries: Array) -> Array:
        made = jnp.einsum("brd,dc->brc", x, down)
        latent, key = made[..., : model.kv_rank], made[..., model.kv_rank :]
        latent = pieces.normalised("rms", model.norm_eps, latent, scale)
        key = turned(model, key[:, :, None], places)[:, :, 0]
        source = x
        if queries:
            source = jnp.einsum("brd,dq->brq", x, queries[0])
            source = pieces.normalised("rms", model.norm_eps, source, queries[1])
        return jnp.concatenate([source, latent, key], -1)

    return compress


def turned(model: ModelConfig, x: Array, places: Array) -> Array:
    """Rotary embedding of all of x [b, s, n, p] at positions i32 [s]."""
    tables = pieces.rotation(model.rope_theta, model.rope_dim, model.rope_dim)(places)
    return pieces.rotate(model.rope_dim)(x, *tables)


@cache
def expand(model: ModelConfig) -> Callable[..., Any]:
    """Narrow vectors [b, s, q + c + p] to q, k [b, s, n, h] and v [b, s, n, w].

    wq: [q, n, h], the last p of h rotated; wkv: [c, n, (h - p) + w], keys first.
    """
    plain = model.head_dim - model.rope_dim

    def expand(packed: Array, places: Array, wq: Array, wkv: Array) -> Any:
        width = wq.shape[0]
        source, latent = packed[..., :width], packed[..., width : width + model.kv_rank]
        q = jnp.einsum("bsq,qnh->bsnh", source, wq)
        rotated = turned(model, q[..., plain:], places)
        kv = jnp.einsum("bsc,cnh->bsnh", latent, wkv)
        shared = packed[:, :, None, width + model.kv_rank :]
        shared = jnp.broadcast_to(shared, (*kv.shape[:3], model.rope_dim))
        k = jnp.concatenate([kv[..., :plain], shared], -1)
        return jnp.concatenate([q[..., :plain], rotated], -1), k, kv[..., plain:]

    return expand


@cache
def attend(causal: bool) -> Callable[..., Array]:
    """softmax(q kᵀ / sqrt(h)) v: q, k [b, s, n, h], v [b, s, n, w] -> [b, s, n, w]."""

    def latent_attend(q: Array, k: Array, v: Array) -> Array:
        scores = jnp.einsum("bsnh,btnh->bnst", q, k, preferred_element_type=jnp.float32)
        scores = scores * q.shape[-1] ** -0.5
        if causal:
            row = jax.lax.broadcasted_iota(jnp.int32, scores.shape[-2:], 0)
            column = jax.lax.broadcasted_iota(jnp.int32, scores.shape[-2:], 1)
            scores = jnp.where(row >= column, scores, -jnp.inf)
        return jnp.einsum("bnst,btnw->bsnw", jax.nn.softmax(scores, -1).astype(v.dtype), v)

    return latent_attend
