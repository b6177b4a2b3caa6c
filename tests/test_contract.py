"""What follows a matmul or a scatter is taken into it: values, kernels, and traffic saved."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from .kernels import CHIP, Fused, assert_close

RANDOM = np.random.default_rng(0)


def floats(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


def accumulate(total, x, w):
    return total + x @ w


def accumulate_rounded(total, x, w):
    product = x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)
    return total + product.astype(jnp.float32)


def bias(x, w, b):
    return x @ w + b


def weight_gradient(total, x, w, given):
    _, backward = jax.vjp(lambda w: jnp.einsum("bsd,dnh->bsnh", x, w), w)
    return total + backward(given)[0]


def rows_gradient(total, rows, given):
    _, backward = jax.vjp(lambda table: table[rows], total)
    return total + backward(given)[0]


CASES = [
    (accumulate, (floats(200, 300), floats(200, 64), floats(64, 300)), ["dot_general+add"]),
    (accumulate, (floats(700, 1100), floats(700, 1500), floats(1500, 1100)), ["dot_general+add"]),
    (
        accumulate_rounded,
        (floats(200, 300), floats(200, 64), floats(64, 300)),
        ["convert", "convert", "dot_general+add"],
    ),
    (bias, (floats(200, 64), floats(64, 700), floats(700)), ["dot_general+add"]),
    (
        weight_gradient,
        (floats(64, 2, 96), floats(2, 150, 64), floats(64, 2, 96), floats(2, 150, 2, 96)),
        ["dot_general+add"],
    ),
    (
        rows_gradient,
        (floats(50, 16), np.array([1, 2, 2, 7], np.int32), floats(4, 16)),
        ["compare+add+select", "scatter"],
    ),
]


@pytest.mark.parametrize(("function", "args", "kernels"), CASES)
def test_one_kernel_with_the_values_of_jax(function, args, kernels):
    program = Fused(function, *args)
    assert [kernel.name for kernel in program.kernels] == kernels
    expected = [np.asarray(jax.jit(function)(*args))]
    tolerance = 1e-2 if function is accumulate_rounded else 1e-5
    for cores in (1, 2):
        assert_close(program.evaluate(cores), expected, tolerance)
        found, times = program.run(cores)
        assert_close(found, expected, tolerance)
        assert times == program.cost(cores)


def test_a_result_that_others_read_stays():
    def both(total, x, w):
        product = x @ w
        return total + product, product * 2

    program = Fused(both, floats(64, 32), floats(64, 16), floats(16, 32))
    assert "dot_general+add" not in [kernel.name for kernel in program.kernels]


def test_adding_on_the_way_out_saves_the_round_trip_of_the_product():
    shape = floats(1024, 1024), floats(1024, 1024), floats(1024, 1024)
    (kernel,) = Fused(accumulate, *shape).kernels
    cost = kernel.cost(CHIP, kernel.part(0, 1))
    once = 4 * sum(a.nbytes for a in shape) // 3
    assert cost.hbm_bytes <= 1.5 * once


def test_transposes_between_matmuls_do_not_hold_them_up():
    """K on the free axis of left costs less than a quarter more than K on its partitions."""

    def turned(x, w):
        return x @ w

    def plain(x, w):
        return x.T @ w

    times = []
    for function in (turned, plain):
        kinds = [jnp.zeros((2048, 2048), jnp.bfloat16)] * 2
        (kernel,) = Fused(function, *kinds).kernels
        times.append(kernel.cost(CHIP, kernel.part(0, 1)).duration)
    assert times[0] < 1.25 * times[1]


def test_rows_that_repeat_over_a_leading_axis_keep_all_partitions_busy():
    def place(x, rows):
        return x + rows

    kinds = jnp.zeros((4, 256, 1024), jnp.bfloat16), jnp.zeros((1, 256, 1024), jnp.bfloat16)
    whole = jnp.zeros((4, 256, 1024), jnp.bfloat16)
    times = []
    for args in (kinds, (whole, whole)):
        (kernel,) = Fused(place, *args).kernels
        times.append(kernel.cost(CHIP, kernel.part(0, 1)).duration)
    assert times[0] < 2 * times[1]
    x, rows = floats(3, 130, 64), floats(1, 130, 64)
    program = Fused(place, x, rows)
    for cores in (1, 2):
        found, cost = program.run(cores)
        assert_close(found, [x + rows], 1e-6)
        assert cost == program.cost(cores)
