"""Operators as XLA's partitioner emits them, computed by the reference interpreter, against JAX."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from trnsim.device.errors import Unsupported
from trnsim.device.ops.evaluate import NAMES, branch, evaluate, evaluate_block
from trnsim.device.ops.ir import Block, Operation, TensorType

from .stablehlo import check, module, names, run

RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((6, 8)).astype(np.float32)
Y = RANDOM.standard_normal((8, 5)).astype(np.float32)
I = RANDOM.integers(-50, 50, (6, 8)).astype(np.int32)  # noqa: E741, the indices beside X
B = X.astype(ml_dtypes.bfloat16)


def images(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def test_moves_of_elements() -> None:
    def moves(x: Any, i: Any) -> Any:
        return (
            x.reshape(3, 16).T.reshape(4, 12),
            jnp.transpose(x.reshape(3, 2, 8), (2, 0, 1)),
            x[1:5:2, ::3],
            x[::-1, 2:],
            lax.dynamic_slice(x, (i[0, 0], i[0, 1]), (2, 3)),
            lax.dynamic_update_slice(x, -x[:2, :3], (i[0, 2], i[0, 3])),
            jnp.concatenate([x, x[:, :2]], 1),
            lax.pad(x, 7.0, [(1, -2, 1), (-1, 3, 0)]),
            lax.broadcast_in_dim(x, (2, 6, 3, 8), (1, 3)),
            lax.broadcasted_iota(jnp.uint8, (3, 4), 1),
            jnp.where(i > 0, x, 0),
            jnp.clip(i, -3, 3),
        )

    program = check(moves, X, I)
    assert {"dynamic_slice", "dynamic_update_slice", "pad", "reverse"} <= names(program)


def test_bitcast_convert_changes_width() -> None:
    def casts(x: Any, b: Any) -> Any:
        halves = lax.bitcast_convert_type(x, jnp.uint16)
        return (
            halves,
            lax.bitcast_convert_type(halves, jnp.float32),
            lax.bitcast_convert_type(x, jnp.int32),
            lax.bitcast_convert_type(b.reshape(6, 4, 2), jnp.uint32),
            lax.bitcast_convert_type(b, jnp.int8),
        )

    check(casts, X, B)


def test_dot_general_with_any_dimensions_and_mixed_types() -> None:
    def dots(x: Any, y: Any, b: Any) -> Any:
        a, c = x.reshape(2, 3, 2, 4), y.reshape(2, 4, 5)
        return (
            x @ y,
            jnp.einsum("bqhd,bdk->hbqk", a, c),
            lax.dot_general(a, a, (((1, 3), (1, 3)), ((2,), (2,)))),
            lax.dot_general(b, y, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32),
            jnp.dot(x[0], y),
            jnp.outer(x[0], y[0]),
        )

    program = check(dots, X, Y, B, tolerance=1e-5)
    assert "dot_general" in names(program)


def test_dots_of_narrow_floats_sum_in_float32_and_integers_wrap() -> None:
    ones = np.ones((1, 1000), ml_dtypes.bfloat16)
    check(lambda a: a @ a.T, ones, tolerance=1e-2)
    program = module(lambda a: a @ a.T, ones)
    assert run(program, ones)[0].tolist() == [[1000]]
    small = RANDOM.integers(-128, 128, (5, 9)).astype(np.int8)
    check(lambda a: lax.dot_general(a, a, (((1,), (1,)), ((), ()))), small)
    wide = dict(preferred_element_type=jnp.int32)
    check(lambda a: lax.dot_general(a, a, (((1,), (1,)), ((), ())), **wide), small)


CONVOLUTIONS = {
    "dilated": ((4, 9, 7, 6), (3, 2, 6, 8), ((2, 1), ((1, 2), (0, -1)), (1, 2), (2, 1)), {}),
    "grouped": (
        (4, 9, 7, 6), (3, 2, 3, 8), ((1, 2), "SAME", (1, 1), (1, 1)), {"feature_group_count": 2},
    ),
    "depthwise": (
        (2, 5, 5, 4), (3, 3, 1, 8), ((1, 1), "VALID", (1, 1), (1, 1)), {"feature_group_count": 4},
    ),
    "batch groups": (
        (4, 5, 5, 3), (2, 2, 3, 4), ((1, 1), "VALID", (1, 1), (1, 1)), {"batch_group_count": 2},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolution(case: str) -> None:
    lhs, rhs, (strides, padding, lhs_dilation, rhs_dilation), groups = CONVOLUTIONS[case]

    def convolve(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(
            x, w, strides, padding, lhs_dilation, rhs_dilation,
            dimension_numbers=("NHWC", "HWIO", "NHWC"), **groups,
        )  # fmt: skip

    program = check(convolve, images(*lhs), images(*rhs), tolerance=1e-5)
    assert names(program) == {"convolution"}


def test_gradients_of_a_convolution() -> None:
    def loss(x: Any, w: Any) -> Any:
        out = lax.conv_general_dilated(x, w, (2, 2), "SAME", feature_group_count=2)
        return jnp.sum(out**2)

    check(jax.grad(loss, (0, 1)), images(4, 6, 9, 7), images(8, 3, 3, 2), tolerance=1e-4)


def test_convolution_in_bfloat16_sums_in_float32() -> None:
    x = images(2, 3, 8, 8).astype(ml_dtypes.bfloat16)
    w = images(4, 3, 3, 3).astype(ml_dtypes.bfloat16)
    check(lambda a, b: lax.conv(a, b, (1, 1), "SAME"), x, w, tolerance=2e-2)


def test_gather() -> None:
    def gathers(x: Any, i: Any) -> Any:
        batched = x.reshape(2, 3, 8)
        return (
            x[i[:, 0] % 6],
            x[i[:, 0] % 6, i[:, 1] % 8],
            jnp.take_along_axis(x, i % 8, 1),
            jnp.take(x, i, axis=1, mode="clip"),
            jnp.take(x, i[:2], axis=0, mode="fill"),
            jax.vmap(lambda m, k: m[k])(batched, i[:2, :4] % 3),
            jax.vmap(lambda v, k: lax.dynamic_slice(v, (k,), (3,)))(x, i[:, 0]),
        )

    program = check(gathers, X, I)
    assert "gather" in names(program)


def test_scatter() -> None:
    def scatters(x: Any, i: Any) -> Any:
        batched = x.reshape(2, 3, 8)
        return (
            x.at[i[:, 0]].add(x, mode="drop"),
            x.at[jnp.arange(6), i[:, 1] % 8].set(1.0),
            x.at[i[:, 0]].max(x),
            x.at[i[:, 0] % 2].multiply(x),
            jnp.zeros((6, 8)).at[:, i[0]].add(2.0),
            i.at[i[:, 0] % 6].min(i),
            jax.vmap(lambda m, k: m.at[k].add(1.0))(batched, i[:2, :4] % 3),
            x.at[i[0] % 6, 1].apply(jnp.sin),
        )

    program = check(scatters, X, I, tolerance=1e-6)
    assert "scatter" in names(program)


def test_gradient_of_an_embedding_in_bfloat16() -> None:
    table = images(16, 8).astype(ml_dtypes.bfloat16)
    tokens = RANDOM.integers(0, 16, (4, 9)).astype(np.int32)

    def loss(t: Any) -> Any:
        return jnp.sum(t[tokens].astype(jnp.float32) * 1.25)

    check(jax.grad(loss), table, tolerance=2e-2)


def test_reductions() -> None:
    def reductions(x: Any, i: Any, b: Any) -> Any:
        return (
            x.sum(), x.sum(0), x.max(1), x.min(), x.prod(1), b.sum(1), b.max(0), i.sum(1),
            (i > 0).all(1), (i > 40).any(0), jnp.argmax(x, 1), jnp.argmin(x, 0),
            jnp.argmax(i % 3, 1), jnp.argmax(b, 1), jnp.nanmax(x),
            lax.reduce(i, np.int32(-1), lax.bitwise_and, (1,)),
            lax.reduce(x, np.float32(2), lax.add, (0,)),
            lax.reduce((x, x), (np.float32(0), np.float32(0)), extremes, (1,)),
        )  # fmt: skip

    def extremes(a: Any, b: Any) -> Any:
        return jnp.maximum(a[0], b[0]), a[1] + b[1]

    program = check(reductions, X, I, B, tolerance=1e-2)
    assert "reduce" in names(program)
    check(lambda x: (x.sum(), x.sum(0), jnp.prod(x, 1), jnp.argmax(x)), X, tolerance=1e-6)


def test_argmax_takes_the_first_nan() -> None:
    x = X.copy()
    x[1, 3] = x[1, 5] = np.nan
    check(lambda v: (jnp.argmax(v, 1), jnp.argmin(v, 1), v.max(1), v.min(0)), x)


def test_windows() -> None:
    def windows(x: Any) -> Any:
        return (
            lax.reduce_window(x, -np.inf, lax.max, (2, 3), (1, 2), "SAME"),
            lax.reduce_window(x, 0.0, lax.add, (3, 2), (2, 1), ((1, 0), (0, 2)), (1, 2), (2, 1)),
            lax.reduce_window(x, 1.0, lax.add, (2, 2), (1, 1), "VALID"),
            jnp.cumsum(x, 1), jnp.cumprod(x, 0), lax.cummax(x, 1, reverse=True),
        )  # fmt: skip

    program = check(windows, X, tolerance=1e-5)
    assert "reduce_window" in names(program)


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
def test_gradient_of_max_pooling(padding: str) -> None:
    def loss(x: Any) -> Any:
        return jnp.sum(lax.reduce_window(x, -np.inf, lax.max, (2, 3), (1, 2), padding) ** 2)

    program = check(jax.grad(loss), X, tolerance=1e-6)
    assert "select_and_scatter" in names(program)


def test_sorts() -> None:
    x = X.copy()
    x[0, :4] = [0.0, -0.0, np.nan, np.inf]

    def sorts(x: Any, i: Any, b: Any) -> Any:
        return (
            jnp.sort(x, 1), jnp.sort(i, 0), jnp.sort(b, 1), jnp.argsort(x, 1),
            jnp.argsort(-x, 1, descending=True), jnp.argsort(i % 3, 1, stable=True),
            lax.sort((i % 3, x, i), dimension=1, num_keys=2), lax.top_k(x, 3), lax.top_k(i, 8),
        )  # fmt: skip

    program = check(sorts, x, I, B)
    assert {"sort", "topk"} <= names(program)


@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_random_bits_are_those_of_jax(implementation: str) -> None:
    def draws(key: Any) -> Any:
        return (
            jax.random.bits(key, (5, 7)),
            jax.random.bits(key, (5,), np.uint8),
            jax.random.key_data(jax.random.split(key, 3)),
            jax.random.bernoulli(key, 0.9, (4, 3)),
            jax.random.randint(jax.random.fold_in(key, 7), (9,), 0, 1000),
        )

    check(draws, jax.random.key(3, impl=implementation))


@pytest.mark.parametrize("algorithm", ["RNG_THREE_FRY", "RNG_PHILOX", "RNG_DEFAULT"])
def test_bit_generators_are_those_of_xla(algorithm: str) -> None:
    generator = getattr(lax.RandomAlgorithm, algorithm)
    state = np.array([1, 2, 3, 0xFFFFFFFF], np.uint32)  # the counter's next step carries
    kinds = [((5, 7), np.uint32), ((4, 3), np.uint32), ((), np.uint32), ((3,), np.uint8)]

    def draws(state: Any) -> Any:
        return [lax.rng_bit_generator(state, s, d, algorithm=generator) for s, d in kinds]

    check(draws, state)


def test_control_flow() -> None:
    def flows(x: Any, i: Any) -> Any:
        outer = x.sum()
        return (
            lax.fori_loop(0, 5, lambda k, v: v * 1.5 + k + outer, x),
            lax.while_loop(lambda v: v[0] < 3, lambda v: (v[0] + 1, v[1] * v[0]), (0, i)),
            lax.cond(i[0, 0] > 0, lambda v: v + outer, lambda v: v - 1, x),
            lax.switch(i[0, 1], [lambda v: v, lambda v: v * 2, lambda v: v * outer], x),
            lax.scan(lambda c, v: (jnp.tanh(c + v), c), x[0], x),
        )

    program = check(flows, X, I, tolerance=1e-5)
    assert {"while", "case"} <= names(program)


def test_selector_outside_takes_the_last_branch() -> None:
    empty = Block((), (), ())
    case = Operation("case", (0,), (), regions=(empty, empty, empty))
    assert [branch(case, np.array(i)) for i in (-1, 0, 1, 2, 3)] == [2, 0, 1, 2, 2]
    either = Operation("if", (0,), (), regions=(empty, empty))
    assert [branch(either, np.array(b)) for b in (True, False)] == [0, 1]


def test_step_of_a_transformer_block() -> None:
    key = jax.random.key(0)
    d, f = 16, 32
    shapes = {"qkv": (d, 3 * d), "out": (d, d), "up": (d, f), "down": (f, d)}
    weights = {n: images(*s) * 0.2 for n, s in shapes.items()}
    x = images(2, 8, d)

    def normed(h: Any) -> Any:
        mean, variance = h.mean(-1, keepdims=True), h.var(-1, keepdims=True)
        return (h - mean) * lax.rsqrt(variance + 1e-5)

    def loss(w: Any, x: Any, key: Any) -> Any:
        q, k, v = (z.reshape(2, 8, 4, 4) for z in jnp.split(normed(x) @ w["qkv"], 3, -1))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 2
        scores = jnp.where(jnp.tril(jnp.ones((8, 8), bool)), scores, -jnp.inf)
        attended = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(2, 8, d)
        h = x + attended @ w["out"]
        hidden = jax.nn.gelu(normed(h) @ w["up"], approximate=False)
        kept = jax.random.bernoulli(key, 0.9, hidden.shape)
        h = h + jnp.where(kept, hidden / 0.9, 0) @ w["down"]
        return -jax.nn.log_softmax(h)[..., 0].mean()

    def step(w: Any, x: Any, key: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(w, x, key)
        return jax.tree.map(lambda a, g: a - 0.1 * g, w, gradient), value

    check(step, weights, x, key, tolerance=2e-6)


def test_an_operator_that_is_missing_is_named_with_its_line() -> None:
    operation = Operation("cholesky", (0,), (1,), location="model.py:12")
    types = (TensorType((2, 2), "f32"),) * 2
    with pytest.raises(Unsupported, match=r"^operator cholesky is not modelled \(model\.py:12\)$"):
        evaluate(operation, [np.eye(2, dtype=np.float32)], types)
    assert "all_reduce" not in NAMES


def test_captured_values_come_from_the_environment() -> None:
    scalar = TensorType((), "f32")
    block = Block((1,), (Operation("add", (0, 1), (2,)),), (2,))
    found = evaluate_block(
        block, (scalar,) * 3, [np.array(2, np.float32)], {0: np.array(40, np.float32)}
    )
    assert found == [42]
