"""From an operator program to a rank program: updates in place, nothing on the host."""

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
