"""The fused attention kernels: values against float64 numpy, both fidelities, cores, time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.interpreters.mlir import make_ir_context

from trnsim.cluster.frontends.attention import attention
from trnsim.cluster.frontends.stablehlo import module_from_bytecode
from trnsim.device.chip import load_chip
from trnsim.device.core import Core
from trnsim.device.errors import Unsupported
from trnsim.device.ops.evaluate import evaluate
from trnsim.device.ops.fuse import fuse
from trnsim.device.ops.ir import Operation, TensorType
from trnsim.device.ops.kernel import Kernel

CASES = [
    (2, 256, 2, 64, 256, 1, "f32", True, "trn2"),
    (1, 200, 2, 32, 200, 2, "f32", True, "trn2"),
    (1, 130, 1, 128, 700, 1, "f32", False, "trn1"),
    (1, 1100, 1, 128, 1100, 1, "bf16", True, "trn2"),
    (1, 16, 2, 8, 16, 1, "f32", True, "trn3"),
    (1, 1, 2, 8, 1, 1, "f32", True, "trn2"),
    (3, 96, 6, 16, 96, 2, "f32", True, "trn2"),
    (2, 128, 8, 64, 128, 8, "bf16", False, "trn1"),
    (1, 640, 4, 32, 640, 2, "f32", True, "trn2"),
]
Case = tuple[int, int, int, int, int, int, str, bool, str]


def softmax_attention(q, k, v, scale, causal):
    """(out, lse) in float64 from the whole matrix of scores."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    repeat = q.shape[2] // k.shape[2]
    k, v = np.repeat(k, repeat, 2), np.repeat(v, repeat, 2)
    scores = np.einsum("bsnh,btnh->bnst", q, k) * scale
    if causal:
        scores = np.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -np.inf)
    lse = np.log(np.exp(scores - scores.max(-1, keepdims=True)).sum(-1)) + scores.max(-1)
    return np.einsum("bnst,btnh->bsnh", np.exp(scores - lse[..., None]), v), lse


def gradient(q, k, v, lse, dout, dlse, scale, causal):
    """(dq, dk, dv) in float64 by the chain rule through the whole matrix of scores."""
    q, k, v, dout = (x.astype(np.float64) for x in (q, k, v, dout))
    repeat = q.shape[2] // k.shape[2]
    k, v = np.repeat(k, repeat, 2), np.repeat(v, repeat, 2)
    scores = np.einsum("bsnh,btnh->bnst", q, k) * scale
    if causal:
        scores = np.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -np.inf)
    weights = np.exp(scores - lse[..., None])
    incoming = np.einsum("bsnh,btnh->bnst", dout, v)
    inner = weights * (incoming - (weights * incoming).sum(-1, keepdims=True) + dlse[..., None])
    dq = np.einsum("bnst,btnh->bsnh", inner, k) * scale
    dk = np.einsum("bnst,bsnh->btnh", inner, q) * scale
    return dq, dk, np.einsum("bnst,bsnh->btnh", weights, dout)


class Problem:
    """An attention or its gradient as a kernel, with arrays and the right results."""

    def __init__(self, case: Case, backward: bool) -> None:
        b, s, n, h, t, kv, dtype, causal, chip = case
        self.chip, self.scale, self.causal, self.dtype = load_chip(chip), h**-0.5, causal, dtype
        q, k = TensorType((b, s, n, h), dtype), TensorType((b, t, kv, h), dtype)
        line, wide = TensorType((b, n, s), "f32"), TensorType((b, t, n, h), dtype)
        name = "attention_gradient" if backward else "attention"
        self.types = [q, k, k, q, line, *([q, line, q, wide, wide] if backward else [])]
        count = 7 if backward else 3
        results = tuple(range(count, len(self.types)))
        attributes = {"scale": self.scale, "causal": causal}
        self.operation = Operation(name, tuple(range(count)), results, attributes, (), "f.py:1")
        random = np.random.default_rng(0)
        self.arrays = {
            v: random.standard_normal(kind.shape).astype(kind.numpy)
            for v, kind in enumerate(self.types)
        }
        q, k, v = (self.arrays[i] for i in range(3))
        out, lse = softmax_attention(q, k, v, self.scale, causal)
        self.right = [out, lse]
        if backward:
            self.arrays[3], self.arrays[4] = out.astype(q.dtype), lse.astype(np.float32)
            dout, dlse = self.arrays[5], self.arrays[6]
            self.right = list(gradient(q, k, v, lse, dout, dlse, self.scale, causal))

    @property
    def kernel(self) -> Kernel:
        (kernel,) = fuse([self.operation], self.types, set(self.operation.results))
        assert isinstance(kernel, Kernel)
        return kernel

    def check(self, found: list[np.ndarray]) -> None:
        tolerance = 2e-5 if self.dtype == "f32" else 2e-2
        for a, b in zip(found, self.right, strict=True):
            assert np.abs(a.astype(np.float64) - b).max() <= tolerance * np.abs(b).max()

    def results(self) -> list[np.ndarray]:
        return [self.arrays[v] for v in self.operation.results]


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_of_both_fidelities_are_those_of_the_whole_matrix(case: Case, backward: bool):
    problem = Problem(case, backward)
    operands = [problem.arrays[v] for v in problem.operation.operands]
    problem.check(evaluate(problem.operation, operands, problem.types))
    kernel = problem.kernel
    for cores in (1, 2):
        for core in range(cores):
            kernel.evaluate(problem.arrays, kernel.part(core, cores))
        problem.check(problem.results())
        for v in problem.operation.results:
            problem.arrays[v][...] = 0
        for core in range(cores):
            part = kernel.part(core, cores)
            run = kernel.run(Core(problem.chip), problem.arrays, part)
            assert run == kernel.cost(problem.chip, part)
        problem.check(problem.results())


def test_the_mask_halves_the_time_of_a_long_sequence():
    whole = Problem((1, 2048, 1, 128, 2048, 1, "bf16", False, "trn2"), False)
    half = Problem((1, 2048, 1, 128, 2048, 1, "bf16", True, "trn2"), False)
    times = [p.kernel.cost(p.chip, p.kernel.part(0, 1)).duration for p in (whole, half)]
    assert 0.5 < times[1] / times[0] < 0.75


def test_scores_do_not_go_through_hbm():
    problem = Problem((1, 1024, 2, 128, 1024, 2, "bf16", False, "trn2"), True)
    cost = problem.kernel.cost(problem.chip, problem.kernel.part(0, 1))
    once = sum(kind.nbytes for kind in problem.types)
    assert once <= cost.hbm_bytes <= 1.1 * once


@pytest.mark.parametrize(
    ("case", "backward", "message"),
    [
        ((1, 8, 1, 160, 8, 1, "f32", False, "trn2"), False, "head size 160; at most 128"),
        ((1, 8, 3, 8, 8, 2, "f32", False, "trn2"), False, "3 query heads, not a multiple of 2"),
        ((1, 8, 1, 8, 9, 1, "f32", True, "trn2"), False, "causal, with 8 queries and 9 keys"),
    ],
)
def test_what_does_not_fit_is_refused(case, backward, message):
    b, s, n, h, t, kv, dtype, causal, _ = case
    q, k = TensorType((b, s, n, h), dtype), TensorType((b, t, kv, h), dtype)
    attributes = {"scale": 1.0, "causal": causal}
    operation = Operation("attention", (0, 1, 2), (3, 4), attributes, (), "f.py:1")
    with pytest.raises(Unsupported, match=message):
        fuse([operation], [q, k, k, q, TensorType((b, n, s), "f32")], {3, 4})


def test_a_head_that_does_not_fit_sbuf_is_refused():
    problem = Problem((1, 16, 1, 128, 16, 1, "bf16", True, "trn2"), True)
    q, line = TensorType((1, 32768, 1, 128), "bf16"), TensorType((1, 1, 32768), "f32")
    problem.types = [q, q, q, q, line, q, line, q, q, q]
    kernel = problem.kernel
    with pytest.raises(Unsupported, match="of SBUF; shard the sequence"):
        kernel.cost(problem.chip, kernel.part(0, 1))


@pytest.mark.parametrize("shape", [(2, 24, 4, 8, 2, True), (1, 16, 3, 8, 3, False)])
def test_in_jax_it_has_the_gradient_of_what_it_stands_for(shape):
    b, s, n, h, kv, causal = shape
    random = np.random.default_rng(0)
    q, k, v, given = (
        random.standard_normal((b, s, heads, h)).astype(np.float32) for heads in (n, kv, kv, n)
    )

    def plain(q, k, v):
        k, v = (jnp.repeat(x, n // kv, 2) for x in (k, v))
        scores = jnp.einsum("bsnh,btnh->bnst", q, k) * h**-0.5
        scores = jnp.where(jnp.tril(jnp.ones((s, s), bool)) | (not causal), scores, -jnp.inf)
        lse = jax.nn.logsumexp(scores, -1)
        return jnp.einsum("bnst,btnh->bsnh", jax.nn.softmax(scores, -1), v), lse

    def loss(function):
        def total(q, k, v):
            out, lse = function(q, k, v)
            return (out * given).sum() + jnp.sin(lse).sum()

        return jax.value_and_grad(total, (0, 1, 2))

    expected = loss(plain)(q, k, v)
    found = loss(lambda *x: attention(*x, causal=causal))(q, k, v)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def test_lowered_directly_it_is_one_kernel_forward_and_one_backward():
    kind = jax.ShapeDtypeStruct((1, 16, 2, 8), jnp.bfloat16)

    def loss(q, k, v):
        return attention(q, k, v, causal=True)[0].astype(jnp.float32).sum()

    text = jax.jit(jax.grad(loss, (0, 1, 2))).lower(kind, kind, kind).as_text()
    module = module_from_bytecode(make_ir_context(), text.encode(), "loss", 1)
    names = [operation.name for operation in module.body.operations]
    assert names.count("attention") == names.count("attention_gradient") == 1
    assert "dot_general" not in names


@pytest.mark.parametrize("causal", [True, False])
def test_long_sequences_go_in_blocks_of_the_same_values(monkeypatch, causal):
    random = np.random.default_rng(0)
    q, k, v, given = (
        random.standard_normal((1, 300, heads, 8)).astype(np.float32) for heads in (4, 2, 2, 4)
    )

    def total(q, k, v):
        out, lse = attention(q, k, v, causal=causal)
        return (out * given).sum() + jnp.sin(lse).sum()

    whole = jax.value_and_grad(total, (0, 1, 2))(q, k, v)
    monkeypatch.setattr("trnsim.cluster.frontends.attention.LONGEST_BYTES", 512)
    blocks = jax.value_and_grad(total, (0, 1, 2))(q, k, v)
    for a, b in zip(jax.tree.leaves(blocks), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(a, b, rtol=3e-5, atol=3e-5)


def test_a_sequence_of_12288_has_kernels_that_fit_the_smallest_sbuf():
    kind = jax.ShapeDtypeStruct((1, 12288, 1, 128), jnp.bfloat16)

    def loss(q, k, v):
        return attention(q, k, v, causal=True)[0].astype(jnp.float32).sum()

    text = jax.jit(jax.grad(loss, (0, 1, 2))).lower(kind, kind, kind).as_text()
    module = module_from_bytecode(make_ir_context(), text.encode(), "loss", 1)
    found = [o for o in module.body.operations if o.name.startswith("attention")]
    assert [o.name for o in found].count("attention_gradient") == 3
    types = list(module.types)
    for operation in found:
        (kernel,) = fuse([operation], types, set(operation.results))
        assert isinstance(kernel, Kernel)
        kernel.cost(load_chip("trn1"), kernel.part(0, 1))
