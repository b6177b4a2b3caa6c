"""From an operator program to a rank program: updates in place, nothing on the host."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from trnsim.cluster.api import Simulated, simulate
from trnsim.cluster.program import RunKernel
from trnsim.device.ops.movement import UpdateKernel


def put(x: np.ndarray) -> jax.Array:
    mesh = Mesh(np.array(jax.devices()[:1]), ("dp",))
    return jax.device_put(x, NamedSharding(mesh, P()))


def kernels(result: Simulated) -> list[Any]:
    steps = result.simulation.program.walk()
    return [step.kernel for step in steps if isinstance(step, RunKernel)]


def scanned(layers: int) -> Simulated:
    """The gradient of a scan over `layers` matmuls: it stacks activations and gradients."""
    weights = np.zeros((layers, 128, 128), np.float32)

    def loss(x: jax.Array, weights: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(x @ w), None

        return jax.lax.scan(layer, x, weights)[0].sum()

    x = np.ones((64, 128), np.float32)
    return simulate(jax.grad(loss, (0, 1)), put(x), put(weights), time_only=True)


def test_a_layer_of_a_scan_costs_the_same_however_many_there_are() -> None:
    """Stacked arrays are updated in place: only the layer's own slice moves."""
    few, many = scanned(8), scanned(64)
    updates = [kernel for kernel in kernels(few) if isinstance(kernel, UpdateKernel)]
    assert updates and all(kernel.in_place for kernel in updates)
    assert not any(kernel.fallback for kernel in kernels(few))
    assert many.time.duration / 64 == pytest.approx(few.time.duration / 8, rel=0.1)


def test_an_array_that_is_read_again_is_not_updated_in_place() -> None:
    def both(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        doubled = x * 2
        return jax.lax.dynamic_update_slice(doubled, jnp.ones((4, 8)), (3, 0)), doubled @ x.T

    x = np.arange(128, dtype=np.float32).reshape(16, 8)
    result = simulate(both, put(x))
    assert not any(getattr(kernel, "in_place", False) for kernel in kernels(result))
    for got, want in zip(result.outputs, both(jnp.asarray(x)), strict=True):
        np.testing.assert_allclose(got, np.asarray(want), rtol=1e-6)


def test_an_argument_is_not_updated_in_place() -> None:
    def update(x: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(x, jnp.ones((4, 8)), (3, 0))

    x = np.arange(128, dtype=np.float32).reshape(16, 8)
    result = simulate(update, put(x))
    assert not any(getattr(kernel, "in_place", False) for kernel in kernels(result))
    np.testing.assert_array_equal(result.outputs, np.asarray(update(jnp.asarray(x))))


def agrees(function: Callable, *args: np.ndarray) -> Simulated:
    """The result of `function` on one logical core of two physical ones, compared with JAX's."""
    result = simulate(function, *map(put, args), lnc=2)
    wanted = jax.tree.leaves(jax.jit(function)(*args))
    for got, want in zip(jax.tree.leaves(result.outputs), wanted, strict=True):
        np.testing.assert_allclose(got, np.asarray(want), rtol=1e-5)
    return result


def test_what_a_condition_updates_for_itself_is_not_seen_by_the_body() -> None:
    def function(x: jax.Array) -> jax.Array:
        def condition(carry: tuple[jax.Array, jax.Array]) -> jax.Array:
            i, x = carry
            return (jax.lax.dynamic_update_slice(x, jnp.ones((2, 32)), (i, 0)).sum() > 0) & (i < 3)

        def body(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            return carry[0] + 1, carry[1] * 1.5

        return jax.lax.while_loop(condition, body, (jnp.int32(0), x))[1]

    agrees(function, np.linspace(2, 3, 512, dtype=np.float32).reshape(16, 32))


def test_a_constant_of_a_loop_is_not_updated_in_place() -> None:
    table = np.arange(64, dtype=np.float32).reshape(8, 8)

    def function(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 4, lambda i, x: jnp.asarray(table).at[i].set(x[0]) / 2 + x, x)

    agrees(function, np.ones((8, 8), np.float32))


@pytest.mark.parametrize("index", [-3, 0, 1, 2, 7])
def test_both_cores_take_the_same_branch(index: int) -> None:
    branches = [lambda x: x @ x.T, lambda x: -x, lambda x: x + x.sum(0)]
    x = np.arange(256, dtype=np.float32).reshape(16, 16)
    agrees(lambda x, i: jax.lax.switch(i, branches, x), x, np.asarray(index, np.int32))
