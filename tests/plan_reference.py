"""The models of plans in plain JAX: one function of whole parameters, without pieces or ranks."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trnsim.cluster.models.config import ModelConfig
from trnsim.cluster.plans.wholes import Wholes

Array = Any
Get = Callable[[str], Array]


def loss_and_gradients(
    model: ModelConfig, parameters: Wholes, tokens: np.ndarray, labels: np.ndarray
) -> tuple[float, Wholes]:
    """Mean loss over all tokens and its gradients, in f32."""
    value, gradients = jax.value_and_grad(lambda p: loss(model, p, tokens, labels))(parameters)
    return float(value), {key: np.asarray(array) for key, array in gradients.items()}


def loss(model: ModelConfig, parameters: Wholes, tokens: np.ndarray, labels: np.ndarray) -> Array:
    table = parameters["embedding.table", -1]
    x = table[tokens]
    if model.positions == "learned":
        x = x + parameters["embedding.positions", -1][: tokens.shape[1]]
    if model.type_vocab:
        x = x + parameters["embedding.types", -1][0]
    if model.post_norm:
        x = norm(model, x, lambda name: parameters[f"embedding.{name}", -1], "norm")
    for number in range(model.layers):
        x = layer(model, x, lambda name, n=number: parameters[f"layer.{name}", n])

    def head(name: str) -> Array:
        return parameters[f"head.{name}", -1]

    if model.post_norm:
        x = jax.nn.gelu(x @ head("transform") + head("transform_bias"))
    x = norm(model, x, head, "norm")
    logits = x @ (table if model.tied else head("output")).T
    logits = logits + head("bias") if model.post_norm else logits
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)
    return -jnp.mean(chosen)


def norm(model: ModelConfig, x: Array, get: Get, name: str) -> Array:
    if model.norm == "rms":
        mean = jnp.mean(x**2, -1, keepdims=True)
        return x / jnp.sqrt(mean + model.norm_eps) * get(f"{name}.scale")
    centred = x - jnp.mean(x, -1, keepdims=True)
    spread = jnp.sqrt(jnp.var(x, -1, keepdims=True) + model.norm_eps)
    return centred / spread * get(f"{name}.scale") + get(f"{name}.shift")


def layer(model: ModelConfig, x: Array, get: Get) -> Array:
    def bias(name: str) -> Array:
        return get(name) if model.linear_bias else 0.0

    if model.post_norm:
        x = norm(model, x + attention(model, x, get) + bias("attended.bias"), get, "attention.norm")
        return norm(model, x + feed_forward(model, x, get) + bias("out.bias"), get, "mlp.norm")
    attended = attention(model, norm(model, x, get, "attention.norm"), get)
    attended = x + attended + bias("attended.bias")
    inside = x if model.parallel_residual else attended
    made = feed_forward(model, norm(model, inside, get, "mlp.norm"), get)
    return attended + made + bias("out.bias")


def attention(model: ModelConfig, x: Array, get: Get) -> Array:
    n, m, h = model.heads, model.kv_heads, model.head_dim
    made = jnp.einsum("bsd,dnh->bnsh", x, get("attention.wqkv"))
    if model.qkv_bias:
        made = made + get("attention.bqkv")[:, None]
    q, k, v = made[:, :n], made[:, n : n + m], made[:, n + m :]
    if model.qk_norm:
        q, k = (
            a / jnp.sqrt(jnp.mean(a**2, -1, keepdims=True) + model.norm_eps) * get(f"attention.{s}")
            for a, s in ((q, "query_scale"), (k, "key_scale"))
        )
    if model.positions == "rope":
        q, k = rotary(model, q), rotary(model, k)
    k, v = (jnp.repeat(a, n // m, axis=1) for a in (k, v))
    scores = jnp.einsum("bnsh,bnth->bnst", q, k) / np.sqrt(h)
    if model.causal:
        scores = jnp.where(np.tri(x.shape[1], dtype=bool), scores, -jnp.inf)
    context = jnp.einsum("bnst,bnth->bsnh", jax.nn.softmax(scores), v)
    return jnp.einsum("bsnh,nhd->bsd", context, get("attention.wo"))


def rotary(model: ModelConfig, x: Array) -> Array:
    """Of x [b, n, s, h], as complex numbers."""
    turned = int(model.head_dim * model.rope_fraction)
    half = turned // 2
    rates = model.rope_theta ** (-np.arange(half) / half)
    angles = np.arange(x.shape[2])[:, None] * rates
    pairs = (x[..., :half] + 1j * x[..., half:turned]) * np.exp(1j * angles)
    return jnp.concatenate([pairs.real, pairs.imag, x[..., turned:]], -1)


def feed_forward(model: ModelConfig, x: Array, get: Get) -> Array:
    if model.activation == "swiglu":
        gate, made = (x @ get("mlp.up")[:, i] for i in (0, 1))
        return (gate * jax.nn.sigmoid(gate) * made) @ get("mlp.down")
    made = x @ get("mlp.up")
    made = made + get("mlp.up_bias") if model.linear_bias else made
    return jax.nn.gelu(made) @ get("mlp.down")
