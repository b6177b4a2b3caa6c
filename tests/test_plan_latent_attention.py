"""Latent attention: the pieces against the formulas of arXiv:2405.04434, position by position."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from trnsim.cluster.models.config import ModelConfig, load_model
from trnsim.cluster.plans.latent_attention import attend, compress, expand

B, S, D, N, H, P, W, Q, C = 2, 6, 16, 3, 10, 4, 8, 12, 6

MODEL = replace(
    load_model("deepseek-v3"),
    name="small",
    hidden=D,
    heads=N,
    kv_heads=N,
    head_dim=H,
    rope_dim=P,
    value_dim=W,
    q_rank=Q,
    kv_rank=C,
)


def normed(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean() + MODEL.norm_eps)


def turned(x: np.ndarray, position: int) -> np.ndarray:
    """Rotary embedding of one vector: its halves are real and imaginary parts."""
    half = len(x) // 2
    angle = position * MODEL.rope_theta ** (-np.arange(half) / half)
    z = (x[:half] + 1j * x[half:]) * np.exp(1j * angle)
    return np.concatenate([z.real, z.imag])


def reference(x: np.ndarray, w: dict[str, np.ndarray], model: ModelConfig) -> np.ndarray:
    """One sequence [s, d] to [s, n, w], from equations 1 to 19 of the appendix."""
    out = np.zeros((len(x), N, W))
    for head in range(N):
        keys, values = [], []
        for t, row in enumerate(x):
            made = row @ w["kv_down"]
            up = normed(made[:C]) @ w["wkv"][:, head]
            keys.append(np.concatenate([up[: H - P], turned(made[C:], t)]))
            values.append(up[H - P :])
            source = normed(row @ w["q_down"]) if model.q_rank else row
            q = source @ w["wq"][:, head]
            q = np.concatenate([q[: H - P], turned(q[H - P :], t)])
            scores = np.exp(np.array(keys) @ q / np.sqrt(H))
            out[t, head] = scores / scores.sum() @ np.array(values)
    return out


@pytest.mark.parametrize("q_rank", [Q, 0], ids=["v3", "v2-lite"])
def test_values_are_those_of_the_formulas(q_rank: int) -> None:
    model, random = replace(MODEL, q_rank=q_rank), np.random.default_rng(0)
    shapes = {
        "x": (B, S, D),
        "kv_down": (D, C + P),
        "q_down": (D, Q),
        "wq": (q_rank or D, N, H),
        "wkv": (C, N, H - P + W),
    }
    w = {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}

    def pieces(x: jax.Array) -> jax.Array:
        places = np.arange(S, dtype=np.int32)
        queries = [w["q_down"], np.ones(Q, np.float32)] if q_rank else []
        packed = compress(model)(x, places, w["kv_down"], np.ones(C, np.float32), *queries)
        return attend(True)(*expand(model)(packed, places, w["wq"], w["wkv"]))

    found = jax.jit(pieces)(w["x"])
    for sequence, own in zip(w["x"], found, strict=True):
        np.testing.assert_allclose(own, reference(sequence, w, model), atol=1e-4)
