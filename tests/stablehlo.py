"""JAX functions run as operator programs: what the tests of operators compare with JAX."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from trnsim.cluster.frontends.jax import host_array, lower
from trnsim.device.ops.evaluate import evaluate_block
from trnsim.device.ops.ir import Module


def module(function: Callable, *args: Any) -> Module:
    """The function's program on one device, as XLA's partitioner leaves it."""
    return lower(function, *args).module


def run(program: Module, *args: Any) -> list[np.ndarray]:
    """The program's results by the reference interpreter; their types are checked."""
    leaves = [host_array(leaf) for leaf in jax.tree.leaves(args)]
    results = evaluate_block(program.body, program.types, leaves)
    for value, result in zip(program.body.returns, results, strict=True):
        expected = program.types[value]
        assert (result.shape, result.dtype) == (expected.shape, expected.numpy)
    return results


def names(program: Module) -> set[str]:
    """Names of the operators in the program, regions included."""
    return {operation.name for operation in program.body.walk()}


def reference(function: Callable, *args: Any) -> list[np.ndarray]:
    """What JAX computes, as flat numpy arrays."""
    return [host_array(leaf) for leaf in jax.tree.leaves(jax.jit(function)(*args))]


def check(function: Callable, *args: Any, tolerance: float | None = 0.0) -> Module:
    """Asserts that the program gives JAX's values within a relative and absolute tolerance.

    Integers, booleans and NaN positions must be equal whatever the tolerance.
    """
    program = module(function, *args)
    pairs = zip(run(program, *args), reference(function, *args), strict=True)
    for place, (found, expected) in enumerate(pairs):
        compare(found, expected, tolerance or 0.0, f"result {place}")
    return program


def compare(found: np.ndarray, expected: np.ndarray, tolerance: float, what: str = "") -> None:
    """Asserts equal shape and dtype, and values within the tolerance."""
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype), what
    if expected.dtype.kind in "biu":
        np.testing.assert_array_equal(found, expected, err_msg=what)
    else:
        wide = np.float64
        np.testing.assert_allclose(
            found.astype(wide), expected.astype(wide), tolerance, tolerance, err_msg=what
        )
