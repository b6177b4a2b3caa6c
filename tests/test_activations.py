"""Activations with a gradient of their own: values and gradients of jax.nn, lowered to one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.interpreters.mlir import make_ir_context

from trnsim.cluster.frontends.activations import gelu, gelu_tanh, silu
from trnsim.cluster.frontends.stablehlo import module_from_bytecode
from trnsim.device import arithmetic

CASES = [
    ("gelu", gelu, lambda x: jax.nn.gelu(x, approximate=False)),
    ("gelu_tanh", gelu_tanh, jax.nn.gelu),
    ("silu", silu, jax.nn.silu),
]
X = np.linspace(-9, 9, 1001, dtype=np.float32)


@pytest.mark.parametrize(("name", "own", "plain"), CASES)
def test_values_and_gradients_are_those_of_jax(name, own, plain):
    np.testing.assert_allclose(own(X), plain(X), rtol=1e-6, atol=1e-6)
    slopes = jax.grad(lambda x: plain(x).sum())(X)
    np.testing.assert_allclose(jax.grad(lambda x: own(x).sum())(X), slopes, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(arithmetic.apply(f"{name}_dx", X), slopes, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "own", "plain"), CASES)
def test_a_gradient_is_one_operator(name, own, plain):
    kind = jax.ShapeDtypeStruct((4, 8), jnp.bfloat16)
    text = jax.jit(jax.grad(lambda x: own(x).sum())).lower(kind).as_text()
    module = module_from_bytecode(make_ir_context(), text.encode(), name, 1)
    names = [operation.name for operation in module.body.operations]
    assert f"{name}_dx" in names and not {"tanh", "logistic", "exponential", "erf"} & set(names)
