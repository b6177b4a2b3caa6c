"""Activations whose gradient is one function of the Scalar engine.

`gelu`, `gelu_tanh` and `silu` are those of `jax.nn`, and run anywhere. Lowered directly, their
derivatives, composites of plain JAX, become the functions `gelu_dx`, `gelu_tanh_dx` and `silu_dx`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

Array = Any
Function = Callable[[Array], Array]


def _with_derivative(name: str, function: Function, derivative: Function) -> Function:
    """`function` with the gradient `derivative(x)`, computed in float32, as a composite."""
    slope = jax.lax.composite(derivative, f"trnsim.{name}_dx")

    def backward(x: Array, given: Array) -> tuple[Array]:
        return ((slope(x).astype(given.dtype) * given),)

    made = jax.custom_vjp(function)
    made.defvjp(lambda x: (function(x), x), backward)
    return made


def _in_float32(function: Function) -> Function:
    """The function computed in float32 and rounded to its argument's type."""

    def wide(x: Array) -> Array:
        return function(x.astype(jnp.float32)).astype(x.dtype)

    return wide


def _slope(function: Function) -> Function:
    """The derivative of an elementwise function, by JAX."""

    def slope(x: Array) -> Array:
        return jax.jvp(function, (x,), (jnp.ones_like(x),))[1]

    return _in_float32(slope)


_exact = partial(jax.nn.gelu, approximate=False)
_tanh = partial(jax.nn.gelu, approximate=True)

gelu = _with_derivative("gelu", _exact, _slope(_exact))
gelu_tanh = _with_derivative("gelu_tanh", _tanh, _slope(_tanh))
silu = _with_derivative("silu", jax.nn.silu, _slope(jax.nn.silu))
