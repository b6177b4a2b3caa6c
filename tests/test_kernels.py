"""Fusion and kernels at operator fidelity: values against the reference interpreter, and laws."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from trnsim.device.ops import pattern as pt
from trnsim.device.ops.axes import boxes, runs
from trnsim.device.ops.fuse import fuse
from trnsim.device.ops.ir import Block, Operation, TensorType
from trnsim.device.ops.kernel import Kernel
from trnsim.device.ops.matmul import MatmulKernel
from trnsim.device.ops.movement import UpdateKernel
from trnsim.device.ops.rowwise import RowwiseKernel, choose_columns
from trnsim.device.ops.strided import Strided

from .kernels import CHIP, Fused, assert_close


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def integers(below: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, below, shape).astype(np.int32)


def softmax(x):
    return jax.nn.softmax(x, -1)


def layernorm(x, scale, bias):
    centred = x - x.mean(-1, keepdims=True)
    variance = (centred**2).mean(-1, keepdims=True)
    return centred * lax.rsqrt(variance + 1e-5) * scale + bias


def attention(q, k, v):
    length = q.shape[1]
    scores = jnp.einsum("bshd,bthd->bhst", q, k) / 8
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
    return jnp.einsum("bhst,bthd->bshd", softmax(scores), v)


def cross_entropy(w, x, y):
    logits = jax.nn.log_softmax(x @ w)
    return -jnp.take_along_axis(logits, y[:, None], 1).mean()


def adam(p, m, v, g, t):
    m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
    return p - 1e-3 * (m / (1 - 0.9**t)) / (jnp.sqrt(v / (1 - 0.99**t)) + 1e-8), m, v


def shuffles(x):
    return (
        jnp.concatenate([x[:, ::2], x[:, 1::2]], 1), jnp.pad(x, ((1, 2), (0, 3))), jnp.flip(x, 0),
        jnp.roll(x, 3, 1), x.T.reshape(6, -1), jnp.tile(x, (2, 3)),
        lax.pad(x, 1.0, ((-1, 2, 1),) * 2),
    )  # fmt: skip


def statistics(x):
    return (
        jnp.linalg.norm(x), x.mean(), x.std(0), x.var(1), x.min(), jnp.prod(x[:3], 0),
        jnp.any(x > 2, 1), jnp.all(x > -9), x.reshape(4, 10, -1).sum((0, 2)),
        jnp.tile(x, (6, 7)).reshape(4, -1).sum(0), jnp.tile(x, (6, 7)).reshape(3, 4, -1).max(1),
    )  # fmt: skip


def integer_arithmetic(a, b):
    return (
        a + b, a * b, a // b, a % b, a << 2, a & b, jnp.maximum(a, b), (a < b).sum(), a.sum(0),
        a.max(1), lax.population_count(a), ~a, a @ b.T,
    )  # fmt: skip


def functions(x):
    return (
        jnp.sin(x), jnp.log1p(jnp.abs(x)), jnp.expm1(x), jnp.cbrt(x), jnp.arctan2(x, x + 1),
        jnp.sign(x), jnp.round(x), jnp.isfinite(x), lax.erf(x), jnp.clip(x, -1, 1), x**3,
        jnp.power(jnp.abs(x), 1.5), lax.reduce_precision(x, 8, 7), jax.nn.gelu(x),
    )  # fmt: skip


def convolution(x, w):
    layout = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=layout)


def pooled(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID").sum()


def mlp(w1, b1, w2, x):
    return (jax.nn.gelu(x @ w1 + b1, approximate=False) @ w2).mean()


KEY = np.array([1, 2], np.uint32)
CASES: dict[str, tuple[Callable, tuple[Any, ...]]] = {
    "softmax": (softmax, (floats(40, 130),)),
    "layernorm": (layernorm, (floats(4, 33, 70), floats(70), floats(70))),
    "attention": (attention, (floats(2, 70, 3, 16), floats(2, 70, 3, 16), floats(2, 70, 3, 16))),
    "attention gradient": (
        jax.grad(lambda *a: attention(*a).sum(), (0, 1, 2)),
        (floats(2, 30, 3, 16), floats(2, 30, 3, 16, seed=1), floats(2, 30, 3, 16, seed=2)),
    ),
    "mlp gradient": (
        jax.grad(mlp, (0, 1, 2)),
        (floats(16, 64), floats(64), floats(64, 16), floats(4, 10, 16)),
    ),
    "cross entropy": (
        jax.value_and_grad(cross_entropy, (0, 1)),
        (floats(20, 50), floats(30, 20), integers(50, 30)),
    ),
    "adam": (adam, (*(floats(37, 55, seed=i) for i in range(2)), floats(37, 55, seed=4) ** 2,
                    floats(37, 55, seed=3), np.float32(3))),
    "embedding gradient": (
        jax.grad(lambda t, i: (t[i] ** 2).sum()),
        (floats(50, 16), integers(50, 3, 20)),
    ),
    "shuffles": (shuffles, (floats(12, 20),)),
    "statistics": (statistics, (floats(40, 60),)),
    "integers": (integer_arithmetic, (integers(99, 30, 40), integers(9, 30, 40) + 1)),
    "functions": (functions, (floats(33, 40),)),
    "argmax": (lambda x: jnp.argmax(x, 1), (floats(20, 50),)),
    "sort and top k": (lambda x: (jnp.sort(x, 1), lax.top_k(x, 4)), (floats(20, 50),)),
    "running sum": (lambda x: jnp.cumsum(x, 1), (floats(20, 50),)),
    "convolution": (convolution, (floats(2, 12, 12, 8), floats(3, 3, 8, 16))),
    "convolution gradient": (
        jax.grad(lambda x, w: (convolution(x, w) ** 2).sum(), (0, 1)),
        (floats(2, 6, 6, 8), floats(3, 3, 8, 16)),
    ),
    "pooling gradient": (jax.value_and_grad(pooled), (floats(2, 12, 12, 8),)),
    "dropout": (
        lambda k, x: jnp.where(
            jax.random.bernoulli(jax.random.wrap_key_data(k), 0.9, x.shape), x / 0.9, 0
        ),
        (KEY, floats(33, 70)),
    ),
    "random bits": (
        lambda k: jax.random.bits(jax.random.wrap_key_data(k, impl="rbg"), (33, 70)),
        (np.array([1, 2, 3, 4], np.uint32),),
    ),
    "scan": (lambda x: lax.scan(lambda c, y: (c * 0.5 + y, c.sum()), x[0], x), (floats(6, 10),)),
    "update": (
        lambda x, u, i: lax.dynamic_update_slice(x, u, (i, 0)),
        (floats(20, 10), floats(3, 10), np.int32(19)),
    ),
    "switch": (
        lambda x, i: lax.switch(i, [jnp.sin, jnp.cos, lambda v: v * 2], x),
        (floats(20, 10), np.int32(2)),
    ),
    "scalars": (lambda a, b: (a + b, jnp.where(a > b, a, b)), (np.float32(2), np.float32(3))),
    "empty": (lambda x: (x[:0].sum(), jnp.concatenate([x[:0], x])), (floats(5, 4),)),
}  # fmt: skip


@pytest.fixture(scope="module")
def fused() -> Callable[[str], Fused]:
    made: dict[str, Fused] = {}

    def get(name: str) -> Fused:
        if name not in made:
            function, arguments = CASES[name]
            made[name] = Fused(function, *arguments)
        return made[name]

    return get


@pytest.mark.parametrize("name", CASES)
def test_both_fidelities_give_the_reference_values_on_one_and_two_cores(fused, name):
    program = fused(name)
    expected = program.expected()
    for cores in (1, 2):
        assert_close(program.evaluate(cores), expected, 2e-6)
        values, times = program.run(cores)
        assert_close(values, expected, 5e-6)
        for run, cost in zip(times, program.cost(cores), strict=True):
            assert abs(run - cost) <= 0.05 * run


@pytest.mark.parametrize("name", ["layernorm", "attention", "cross entropy", "shuffles", "adam"])
def test_parts_write_every_element_once_and_read_only_what_they_say(fused, name):
    program = fused(name)
    arrays = {v: a for v, a in zip(program.module.body.arguments, program.inputs, strict=True)}
    for kernel in program.kernels:
        outputs = {
            v: np.zeros(program.types[v].shape, program.types[v].numpy) for v in kernel.outputs
        }
        kernel.evaluate(arrays | outputs, kernel.part(0, 1))
        covered = {v: np.zeros(a.size, int) for v, a in outputs.items()}
        halves = {v: np.zeros_like(a) for v, a in outputs.items()}
        for core in range(2):
            part = kernel.part(core, 2)
            reads = kernel.reads(part)
            fenced = {v: _poisoned(arrays[v], *reads.get(v, (0, 0))) for v in kernel.inputs}
            kernel.evaluate(fenced | halves, part)
            for value, (low, high) in kernel.writes(part).items():
                covered[value][low:high] += 1
        if isinstance(kernel, MatmulKernel):  # a range of columns is no interval: its hull is given
            assert all((count >= 1).all() for count in covered.values())
            assert_close(list(halves.values()), list(outputs.values()), 1e-6)
        else:
            assert all((count == 1).all() for count in covered.values())
            assert_close(list(halves.values()), list(outputs.values()), 0.0)
        arrays |= outputs


def _poisoned(array: np.ndarray, low: int, high: int) -> np.ndarray:
    """The array with garbage outside [low, high)."""
    copy = array.reshape(-1).copy()
    garbage = np.nan if copy.dtype.kind == "f" else 1
    copy[:low] = copy[high:] = garbage
    return copy.reshape(array.shape)


@pytest.mark.parametrize("name", CASES)
def test_kernels_and_foreign_operators_come_in_a_legal_order(fused, name):
    program = fused(name)
    known = set(program.module.body.arguments)
    for item in program.items:
        needed = item.inputs if isinstance(item, Kernel) else item.operands
        assert set(needed) <= known
        known |= set(item.outputs if isinstance(item, Kernel) else item.results)
    assert set(program.module.body.returns) <= known


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, (*value, *value.values())))
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    if is_dataclass(value):
        return all(_is_plain(getattr(value, f.name)) for f in fields(value))
    return value is None or isinstance(value, int | float | str | np.ndarray)


@pytest.mark.parametrize("name", CASES)
def test_kernels_are_plain_data(fused, name):
    for kernel in fused(name).kernels:
        assert all(_is_plain(getattr(kernel, f.name)) for f in fields(kernel))


def test_softmax_layernorm_and_adam_are_one_kernel_each(fused):
    for name, outputs in (("softmax", 1), ("layernorm", 1), ("adam", 3)):
        kernels = fused(name).kernels
        wide = [k for k in kernels if k.types[k.outputs[0]].size > 1]
        assert len(wide) == 1 and len(wide[0].outputs) == outputs


def test_attention_is_matmul_softmax_matmul_with_transposes_folded(fused):
    kinds = [type(k) for k in fused("attention").kernels[:3]]
    assert kinds == [MatmulKernel, RowwiseKernel, MatmulKernel]


def test_fallback_names_what_the_device_cannot_do():
    program = Fused(lambda x: jnp.sort(x, 1), floats(2, 20_000))
    assert [k.name for k in program.kernels if k.fallback] == ["sort"]
    moved = 2 * 2 * 20_000 * 4
    cost = program.kernels[-1].cost(CHIP, program.kernels[-1].part(0, 1))
    assert cost.duration >= moved * 10**12 // CHIP.host_bytes_per_s


def test_equal_operators_are_computed_once():
    program = Fused(lambda x: (jnp.exp(x) + 1, jnp.exp(x) * 2), floats(8, 8))
    names = [o.name for k in program.kernels for o in k.operations]
    assert names.count("exponential") == 1


def test_an_update_in_place_moves_only_its_region():
    program = Fused(lambda x, u, i: lax.dynamic_update_slice(x, u, (i, 0)),
                    floats(4096, 64), floats(3, 64), np.int32(5))  # fmt: skip
    (kernel,) = (k for k in program.kernels if isinstance(k, UpdateKernel))
    in_place = kernel.renamed(in_place=True)
    whole, part = kernel.cost(CHIP, kernel.part(0, 1)), in_place.cost(CHIP, in_place.part(0, 1))
    assert part.hbm_bytes == 2 * 3 * 64 * 4
    assert whole.hbm_bytes == part.hbm_bytes + 2 * 4096 * 64 * 4


# ---- collectives keep their place --------------------------------------------------------------

F32 = TensorType((256, 64), "f32")


def _operation(name: str, operands: tuple[int, ...], result: int, **attributes: Any) -> Operation:
    return Operation(name, operands, (result,), attributes)


def test_nothing_joins_a_kernel_that_a_collective_waits_for():
    operations = [
        _operation("tanh", (0,), 1),
        _operation("all_reduce", (1,), 2, reduction="add", replica_groups=((0, 1),)),
        _operation("negate", (1,), 3),
        _operation("add", (2, 3), 4),
    ]
    items = fuse(operations, (F32,) * 5, {4})
    kinds = [[o.name for o in i.operations] if isinstance(i, Kernel) else i.name for i in items]
    assert kinds == [["tanh"], "all_reduce", ["negate", "add"]]


def test_values_that_branches_capture_are_stored():
    inner = Block((), (_operation("negate", (1,), 2),), (2,))
    operations = [
        _operation("tanh", (0,), 1),
        Operation("if", (3,), (4,), {}, (inner, inner)),
    ]
    types = (F32, F32, F32, TensorType((), "i1"), F32)
    first, branch = fuse(operations, types, {4})
    assert isinstance(first, Kernel) and first.outputs == (1,)
    assert branch is operations[1]


# ---- residency ---------------------------------------------------------------------------------


@pytest.mark.parametrize("cores", [1, 2])
def test_resident_values_never_overlap_and_leave_room_for_tiles(cores):
    def block(x, s, b, w1, w2):
        return x + jax.nn.gelu(layernorm(x, s, b) @ w1) @ w2

    program = Fused(
        block, floats(512, 256), floats(256), floats(256), floats(256, 512), floats(512, 256)
    )
    for core, plan in enumerate(program.plans(cores)):
        held: dict[int, tuple[int, int]] = {}
        for item, residency in zip(program.items, plan, strict=True):
            assert isinstance(item, Kernel)
            part = item.part(core, cores)
            for value, address in residency.places:
                layout = item.layout(value, part)
                assert layout is not None
                held[value] = (address, address + layout.partition_bytes)
            spans = sorted(held.values())
            assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:], strict=False))
            assert not spans or item.cost(CHIP, part, residency).sbuf_bytes <= spans[0][0]
            assert not spans or spans[-1][1] <= CHIP.sbuf_partition_bytes
            for value in residency.freed:
                del held[value]
        assert not held
    traffic = [
        sum(k.cost(CHIP, k.part(0, cores), *r).hbm_bytes for k, *r in pairs)
        for pairs in (
            [(k,) for k in program.kernels],
            list(zip(program.kernels, program.plans(cores)[0], strict=True)),
        )
    ]
    assert traffic[1] < 0.7 * traffic[0]


# ---- the algebra of axes -----------------------------------------------------------------------


def test_64_bit_values_are_moved_but_not_written_by_engines():
    def function(x):
        padded = jnp.pad(x, ((1, 0), (0, 2)), constant_values=3)
        updated = lax.dynamic_update_slice(x, jnp.full((2, 2), 7.0), (1, 1))
        added = jnp.zeros_like(x).at[jnp.array([2, 2])].add(x[:2])
        return padded, updated, added, x[jnp.array([1, 0])], x.T, jnp.concatenate([x, x])

    with jax.enable_x64(True):
        program = Fused(function, np.arange(20.0).reshape(4, 5))
        for found in (program.evaluate(), program.run()[0]):
            assert_close(found, program.expected(), 0)
    hosted = {kernel.name for kernel in program.kernels if kernel.fallback}
    assert {"pad", "dynamic_update_slice", "scatter"} <= hosted
    assert not {"gather", "transpose", "concatenate"} & hosted


EXTENTS = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@given(EXTENTS, st.data())
def test_boxes_and_runs_cover_a_range_in_order(extents, data):
    size = int(np.prod(extents))
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    order = np.arange(size).reshape(extents)
    found = [order[tuple(slice(*b) for b in box)].ravel() for box in boxes(extents, start, stop)]
    assert np.concatenate([np.empty(0, int), *found]).tolist() == list(range(start, stop))
    strides = tuple(int(s) for s in np.array(order.strides) // order.itemsize)
    axes = tuple(zip(extents, strides, strict=True))
    points = [
        offset + i * stride for _, offset, count, stride in runs(axes, start, stop - start)
        for i in range(count)
    ]  # fmt: skip
    assert points == list(range(start, stop))


@given(EXTENTS, st.data())
def test_lifting_a_pattern_selects_the_same_elements(extents, data):
    flags = [data.draw(st.booleans()) for _ in extents]
    outer = pt.pattern(zip(extents, flags, strict=True))
    kept = [e for e, f in zip(extents, flags, strict=True) if f]
    inner_flags = [data.draw(st.booleans()) for _ in kept]
    inner = pt.pattern(zip(kept, inner_flags, strict=True))
    lifted = pt.lift(inner, outer)
    assert lifted is not None
    assert pt.points(lifted) == pt.points(outer)
    assert pt.elements(lifted) == pt.elements(inner)
    expected = iter(inner_flags)
    chosen = [next(expected) if f else False for f in flags]
    assert lifted == pt.pattern(zip(extents, chosen, strict=True))


@given(EXTENTS, st.data())
def test_strided_views_reshape_only_where_numpy_needs_no_copy(extents, data):
    permutation = data.draw(st.permutations(range(len(extents))))
    array = np.arange(int(np.prod(extents)), dtype=np.int32).reshape(extents)
    turned = Strided.dense(0, TensorType(tuple(extents), "i32")).transposed(permutation)
    np.testing.assert_array_equal(turned.view(array), array.transpose(permutation))
    target = data.draw(st.permutations([*extents, 1]))
    shaped = turned.reshaped(target)
    expected = array.transpose(permutation).reshape(target)
    if shaped is not None:
        np.testing.assert_array_equal(shaped.view(array), expected)
    else:
        assert not np.shares_memory(expected, array)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=4))
def test_columns_divide_the_space(shape):
    size = int(np.prod(shape))
    assert size % choose_columns(size, shape) == 0
