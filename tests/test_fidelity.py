"""Both fidelities read one nest: the same values within rounding, the same time within 5 %."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from trnsim.cluster.plans.pieces import normalised
from trnsim.device.chip import load_chip
from trnsim.device.core import Core
from trnsim.device.ops.kernel import Kernel
from trnsim.device.ops.nest import Loop, execute, simulate
from trnsim.device.ops.rowwise import RowwiseKernel
from trnsim.device.ops.rowwise_plan import plan
from trnsim.device.units import PS_PER_S

from .kernels import CHIP, Fused, assert_close

TIME_TOLERANCE = 0.05
DTYPES = {"f32": (jnp.float32, 1e-5), "bf16": (jnp.bfloat16, 1e-2)}


def layernorm(x, scale, bias):
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-5) * scale + bias


def attention(q, k, v):
    scores = jnp.einsum("bhsd,bhtd->bhst", q, k) / 8
    return jnp.einsum("bhst,bhtd->bhsd", jax.nn.softmax(scores, -1), v)


MATMULS = [(128, 128, 128), (256, 384, 640), (100, 300, 70), (1, 300, 500), (130, 1100, 40)]
SHAPES = [(128, 512), (512, 768), (100, 300), (333, 70), (64, 9000)]
HEADS = [(2, 3, 128, 64), (1, 2, 256, 64), (2, 2, 100, 24)]
TABLE = (
    [("matmul", lambda a, b: a @ b, ((m, k), (k, n))) for m, k, n in MATMULS]
    + [("matmul transposed", lambda a, b: a.T @ b.T, ((k, m), (n, k))) for m, k, n in MATMULS[:3]]
    + [("elementwise", lambda a, b: jnp.tanh(a + b) * a, (s, s)) for s in SHAPES]
    + [("softmax", lambda a: jax.nn.softmax(a, -1), (s,)) for s in SHAPES]
    + [("layernorm", layernorm, (s, s[-1:], s[-1:])) for s in SHAPES[:4]]
    + [("attention", attention, (h, h, h)) for h in HEADS]
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", TABLE, ids=lambda case: f"{case[0]} {case[2][0]}")
def test_fidelities_agree_in_values_and_time(case, dtype):
    _, function, shapes = case
    kind, tolerance = DTYPES[dtype]
    arguments = [
        jnp.asarray(np.random.default_rng(i).standard_normal(s), kind) for i, s in enumerate(shapes)
    ]
    program = Fused(function, *arguments)
    values, (run,) = program.run()
    (cost,) = program.cost()
    assert_close(values, program.evaluate(), tolerance)
    assert abs(run - cost) <= TIME_TOLERANCE * run


@pytest.mark.parametrize("name", ["trn1", "trn2", "trn3"])
def test_every_generation_runs_the_same_kernels(name):
    chip = load_chip(name)
    x = np.random.default_rng(0).standard_normal((200, 150)).astype(np.float32)
    program = Fused(lambda a, b: jax.nn.softmax(a @ b.T, -1), x, x)
    arrays = dict(zip(program.module.body.arguments, program.inputs, strict=True))
    for kernel in program.kernels:
        for value in kernel.outputs:
            arrays[value] = np.zeros(program.types[value].shape, np.float32)
        part = kernel.part(0, 1)
        run = kernel.run(Core(chip), arrays, part)
        cost = kernel.cost(chip, part)
        assert abs(run.duration - cost.duration) <= TIME_TOLERANCE * run.duration
        assert run.hbm_bytes == cost.hbm_bytes and run.flops == cost.flops
    (result,) = (arrays[v] for v in program.module.body.returns)
    assert_close([result], program.expected(), 1e-5)


def test_rows_of_which_two_sets_do_not_fit_come_one_after_another():
    """A layer norm's backward pass whose values of a row tile take more than half of SBUF."""

    def backward(x, scale, dy, onward, of_scale, of_shift):
        shift = jnp.zeros_like(scale)
        _, pullback = jax.vjp(partial(normalised, "layer", 1e-5), x, scale, shift)
        dx, dscale, dshift = pullback(dy)
        return dx + onward, of_scale + dscale, of_shift + dshift

    chip, width = load_chip("trn1"), 4096
    rows, columns = (1, 256, width), (width,)
    kinds = [(rows, "bfloat16"), (columns, "bfloat16"), (rows, "bfloat16"), (rows, "bfloat16")]
    rng = np.random.default_rng(0)
    arguments = [
        jnp.asarray(rng.standard_normal(shape), dtype)
        for shape, dtype in [*kinds, (columns, "float32"), (columns, "float32")]
    ]
    program = Fused(backward, *arguments)
    plans = [plan(k) for k in program.kernels if isinstance(k, RowwiseKernel)]
    assert 1 in [p.turns(chip.sbuf_partition_bytes) for p in plans]
    arrays = dict(zip(program.module.body.arguments, program.inputs, strict=True))
    for kernel in program.kernels:
        for value in kernel.outputs:
            arrays[value] = np.zeros(program.types[value].shape, program.types[value].numpy)
        part = kernel.part(0, 1)
        run, cost = kernel.run(Core(chip), arrays, part), kernel.cost(chip, part)
        assert abs(run.duration - cost.duration) <= TIME_TOLERANCE * run.duration
    results = [arrays[v] for v in program.module.body.returns]
    assert_close(results, program.expected(), 1e-2)


def test_time_with_and_without_data_is_equal_to_the_picosecond():
    x = np.random.default_rng(0).standard_normal((700, 260)).astype(np.float32)
    program = Fused(lambda a: layernorm(a @ a.T, a[0, 0], a[0, 1]), x)
    arrays = dict(zip(program.module.body.arguments, program.inputs, strict=True))
    for kernel in program.kernels:
        for value in kernel.outputs:
            arrays[value] = np.zeros(program.types[value].shape, np.float32)
        part = kernel.part(0, 1)
        with_data = kernel.run(Core(CHIP), arrays, part)
        without = kernel.run(Core(CHIP, data=False), {}, part)
        assert with_data == without


def _matmul(m: int, k: int, n: int, dtype=np.float32) -> Kernel:
    program = Fused(lambda a, b: a @ b, jnp.zeros((m, k), dtype), jnp.zeros((k, n), dtype))
    return program.kernels[-1]


@pytest.mark.parametrize("name", ["trn1", "trn2", "trn3"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_tiles_of_any_matmul_fit_sbuf(name, dtype):
    chip = load_chip(name)
    for m, k, n in [(7, 8192, 512), (128, 5000, 2048), (1, 9000, 300), (1100, 4096, 3072)]:
        kernel = _matmul(m, k, n, dtype)
        cost = kernel.cost(chip, kernel.part(0, 1))
        assert 0 < cost.sbuf_bytes <= chip.sbuf_partition_bytes
        assert cost.flops == 2 * m * k * n


def test_a_large_matmul_is_bound_by_the_tensor_engine():
    size = 2048
    kernel = _matmul(size, size, size, jnp.bfloat16)
    cost = kernel.cost(CHIP, kernel.part(0, 1))
    roofline = 2 * size**3 * PS_PER_S // CHIP.peak("bf16")
    assert cost.flops == 2 * size**3
    assert roofline <= cost.duration <= 1.4 * roofline
    assert max(cost.busy, key=lambda e: cost.busy[e]) == "tensor"


def test_a_large_elementwise_kernel_is_bound_by_hbm():
    x = jnp.zeros((8192, 2048), jnp.float32)
    (kernel,) = Fused(lambda a, b: a + b, x, x).kernels
    cost = kernel.cost(CHIP, kernel.part(0, 1))
    assert cost.hbm_bytes == 3 * x.nbytes
    rate = min(CHIP.dma_bytes_per_s, CHIP.stack_bytes_per_s // CHIP.cores_per_stack)
    bound = cost.hbm_bytes * PS_PER_S // rate
    assert bound <= cost.duration <= 1.1 * bound


def test_two_cores_take_about_half_the_time():
    kernel = _matmul(1024, 1024, 1024)
    one = kernel.cost(CHIP, kernel.part(0, 1)).duration
    two = max(kernel.cost(CHIP, kernel.part(core, 2)).duration for core in range(2))
    assert two < 0.6 * one


def test_fast_forward_is_exact_where_the_loop_is_periodic():
    kernel = _matmul(1500, 300, 1000)
    durations = []
    for play in (execute, simulate):
        core = Core(CHIP, data=False)
        core.watch(play is simulate)
        from trnsim.device.ops.kernel import NOTHING_RESIDENT
        from trnsim.device.ops.nest import Context

        context = Context(core, kernel, kernel.part(0, 1), NOTHING_RESIDENT, None, {})
        nest = kernel.nest(context)
        assert isinstance(nest, Loop)
        play(core, nest)
        durations.append((core.drain(), core.timeline.busy, core.instructions))
    assert durations[0] == durations[1]


def test_costs_are_remembered_by_signature_not_by_value_numbers():
    first, second = _matmul(64, 64, 64), _matmul(64, 64, 64)
    shifted = Fused(lambda c, a, b: (c * 2, a @ b), *(jnp.zeros((64, 64)),) * 3).kernels
    (third,) = (k for k in shifted if k.name == "dot_general")
    assert first.signature == second.signature == third.signature


def test_tiles_of_a_gather_do_not_lie_over_what_stays_in_sbuf():
    """A value of 44 tiles would stay beside the gather's rows of 32 KiB, and has no room."""

    def function(x, table, at):
        kept = jnp.cos(x)
        rows = table[at + jnp.clip(jnp.sin(x).sum(1)[:128], 0, 0).astype(jnp.int32)]
        return kept * rows.sum(), rows

    draw = np.random.default_rng(0)
    x, table = (draw.standard_normal(s).astype(np.float32) for s in ((44 * 128, 1000), (128, 8192)))
    program = Fused(function, x, table, np.arange(128, dtype=np.int32))
    found, times = program.run()
    assert_close(found, program.expected(), 1e-5)
    assert times == pytest.approx(program.cost(), rel=TIME_TOLERANCE)
