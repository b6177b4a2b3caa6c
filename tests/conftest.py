"""JAX with eight virtual CPU devices, set before its backend starts; one Ray for all tests."""

import signal

import jax
import pytest

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
# A shell that starts the tests in the background has SIGINT ignored, in their processes as well.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def ray_instance():
    """A local Ray, which `RayRuntime()` finds; started by the first test that needs it."""
    from trnsim.cluster.runtimes.ray_runtime import RayInstance

    instance = RayInstance()
    instance.connect()
    yield instance
    instance.disconnect()
