"""Expanded elementary functions become one operator, and nothing else does."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from trnsim.device.ops.ir import Block, Module, Operation
from trnsim.device.ops.recognise import recognise

from .stablehlo import module, names, reference, run

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
X = (np.random.default_rng(0).standard_normal((16, 32)) * 3).astype(np.float32)

FUNCTIONS: dict[str, tuple[Callable, str]] = {
    "gelu": (lambda x: jax.nn.gelu(x, approximate=False), "gelu"),
    "gelu by erf": (lambda x: 0.5 * x * (1 + lax.erf(x / np.sqrt(2).astype(x.dtype))), "gelu"),
    "gelu, root first": (lambda x: x * lax.erfc(-(x * math.sqrt(0.5))) * 0.5, "gelu"),
    "gelu_tanh": (jax.nn.gelu, "gelu_tanh"),
    "silu": (jax.nn.silu, "silu"),
    "logistic": (jax.nn.sigmoid, "logistic"),
    "softplus": (jax.nn.softplus, "softplus"),
    "erfc": (lax.erfc, "erfc"),
    "erf": (lax.erf, "erf"),
}
DTYPES = {"float32": (X, 4e-6), "bfloat16": (X.astype(BFLOAT16), 3e-2)}


@cache
def expanded(name: str, dtype: str) -> Module:
    return module(FUNCTIONS[name][0], DTYPES[dtype][0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_is_one_operator_with_the_same_values(name: str, dtype: str) -> None:
    x, tolerance = DTYPES[dtype]
    before = expanded(name, dtype)
    after = recognise(before)
    assert [o.name for o in after.body.operations] == [FUNCTIONS[name][1]]
    for expected in (run(before, x)[0], reference(FUNCTIONS[name][0], x)[0]):
        np.testing.assert_allclose(
            run(after, x)[0].astype(np.float64), expected.astype(np.float64), tolerance, tolerance
        )


def test_exact_gelu_arrives_as_29_multiplies_and_21_adds() -> None:
    found = [operation.name for operation in expanded("gelu", "float32").body.operations]
    assert found.count("multiply") == 29  # one squares the argument a second time
    assert found.count("add") == 21


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_of_gelu_keeps_its_own_exponential(dtype: str) -> None:
    x, _ = DTYPES[dtype]

    def loss(x: Any) -> Any:
        return jnp.sum(FUNCTIONS["gelu"][0](x).astype(jnp.float32))

    before = module(jax.value_and_grad(loss), x)
    after = recognise(before)
    found = [operation.name for operation in after.body.operations]
    assert [found.count(n) for n in ("gelu", "erfc", "exponential", "select")] == [1, 1, 1, 0]
    for a, b in zip(run(after, x), run(before, x), strict=True):
        scale = np.abs(b.astype(np.float64)).max()
        difference = np.abs(a.astype(np.float64) - b.astype(np.float64)).max()
        assert difference <= (1e-6 if dtype == "float32" else 1e-2) * scale


def test_functions_inside_loops_and_branches() -> None:
    def looped(x: Any) -> Any:
        layer = lambda c, _: (jax.nn.silu(c), jax.nn.gelu(c, approximate=False))  # noqa: E731
        x, ys = lax.scan(layer, x, None, length=3)
        return lax.cond(x[0, 0] > 0, jax.nn.softplus, lambda v: v, x), ys

    after = recognise(module(looped, X))
    assert {"silu", "gelu", "softplus"} <= names(after)
    assert "exponential" not in names(after)
    for found, expected in zip(run(after, X), reference(looped, X), strict=True):
        np.testing.assert_allclose(found, expected, 4e-6, 4e-6)


def test_argument_may_be_computed_and_used_elsewhere() -> None:
    def layer(x: Any) -> Any:
        h = x * 2 + 1
        return jax.nn.gelu(h, approximate=False) + h

    after = recognise(module(layer, X))
    assert [o.name for o in after.body.operations if o.name != "constant"].count("gelu") == 1
    np.testing.assert_allclose(run(after, X)[0], reference(layer, X)[0], 4e-6, 4e-6)


def changed(program: Module, place: int, operation: Operation) -> Module:
    operations = list(program.body.operations)
    operations[place] = operation
    return replace(program, body=replace(program.body, operations=tuple(operations)))


def swapped(operation: Operation) -> Operation:
    return replace(operation, operands=operation.operands[::-1])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_order_of_commutative_operands_does_not_matter(name: str) -> None:
    program = expanded(name, "float32")
    operations = tuple(
        swapped(o) if o.name in ("add", "multiply", "maximum") else o
        for o in program.body.operations
    )
    after = recognise(replace(program, body=replace(program.body, operations=operations)))
    assert [o.name for o in after.body.operations] == [FUNCTIONS[name][1]]


ROUNDINGS = [name for name in FUNCTIONS if name != "erf"]


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_a_perturbed_constant_is_another_function(data: st.DataObject) -> None:
    """Values always agree with the program, and the whole function is not claimed."""
    name = data.draw(st.sampled_from(ROUNDINGS))
    program = expanded(name, "float32")
    constants = [i for i, o in enumerate(program.body.operations) if o.name == "constant"]
    place = data.draw(st.sampled_from(constants))
    operation = program.body.operations[place]
    value = operation.attributes["value"]
    towards = np.float32(data.draw(st.sampled_from([-math.inf, math.inf])))
    steps = data.draw(st.sampled_from([1, 1000, 100_000]))
    other = value
    for _ in range(1 if steps == 1 else 2):
        other = np.nextafter(other, towards)
    other = (other + (value * np.float32(steps * 1e-7) if steps > 1 else 0)).astype(np.float32)
    attributes = operation.attributes | {"value": other}
    perturbed = changed(program, place, replace(operation, attributes=attributes))
    after = recognise(perturbed)
    assert [o.name for o in after.body.operations] != [FUNCTIONS[name][1]]
    np.testing.assert_allclose(run(after, X)[0], run(perturbed, X)[0], 4e-6, 4e-6)


OTHERS = {
    "multiply": "add", "add": "subtract", "subtract": "add", "negate": "abs", "abs": "negate",
    "exponential": "exponential_minus_one", "log_plus_one": "log", "maximum": "minimum",
    "divide": "multiply", "tanh": "sine", "erf": "tanh",
}  # fmt: skip


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_another_operator_is_another_function(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(ROUNDINGS))
    program = expanded(name, "float32")
    places = [i for i, o in enumerate(program.body.operations) if o.name in OTHERS]
    place = data.draw(st.sampled_from(places))
    operation = program.body.operations[place]
    mutated = changed(program, place, replace(operation, name=OTHERS[operation.name]))
    after = recognise(mutated)
    assert [o.name for o in after.body.operations] != [FUNCTIONS[name][1]]
    np.testing.assert_allclose(run(after, X)[0], run(mutated, X)[0], 4e-6, 4e-6)


def test_dead_operators_go_and_collectives_stay() -> None:
    program = expanded("silu", "float32")
    argument, free = program.body.arguments[0], len(program.types)
    dead = Operation("negate", (argument,), (free,))
    collective = Operation("all_reduce", (argument,), (free + 1,), {"reduction": "add"})
    body = Block(
        program.body.arguments,
        (dead, collective, *program.body.operations),
        program.body.returns,
    )
    types = (*program.types, program.types[argument], program.types[argument])
    after = recognise(Module("m", types, body))
    assert [o.name for o in after.body.operations] == ["all_reduce", "silu"]


def test_recognising_twice_changes_nothing() -> None:
    once = recognise(expanded("gelu", "bfloat16"))
    assert recognise(once) == once
