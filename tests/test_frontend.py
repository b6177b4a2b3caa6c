"""JAX programs, imported and run rank by rank in numpy, give what JAX gives."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.experimental import io_callback
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from trnsim.cluster.frontends import jax as frontend
from trnsim.cluster.frontends.stablehlo import OPERATORS
from trnsim.cluster.sharding import Lowered, Shards, replicated, shard, unshard
from trnsim.cluster.wire import decode, encode
from trnsim.device import arithmetic
from trnsim.device.errors import TrnsimError, Unsupported
from trnsim.device.ops import evaluate
from trnsim.device.ops.ir import Block, Operation

COLLECTIVES = {
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute",
    "collective_broadcast",
}  # fmt: skip
IDENTITIES = {"partition_id", "replica_id"}


# --- a reference: all ranks of one program in lockstep ------------------------------------------


class Lockstep:
    """Runs every rank's program in numpy; ranks may take different branches."""

    def __init__(self, lowered: Lowered) -> None:
        self.lowered, self.types = lowered, lowered.module.types
        self.values: list[dict[int, np.ndarray]] = [{} for _ in range(lowered.ranks)]

    def run(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Global outputs from global inputs."""
        shards, ranks = self.lowered.inputs, range(self.lowered.ranks)
        arguments = {
            r: [shard(x, s, r) for x, s in zip(inputs, shards, strict=True)] for r in ranks
        }
        results = self.block(self.lowered.module.body, arguments)
        return [
            unshard([results[r][i] for r in ranks], s) for i, s in enumerate(self.lowered.outputs)
        ]

    def block(self, block: Block, arguments: dict[int, list]) -> dict[int, list[np.ndarray]]:
        for rank, values in arguments.items():
            self.values[rank].update(zip(block.arguments, values, strict=True))
        for operation in block.operations:
            inputs = {r: [self.values[r][v] for v in operation.operands] for r in arguments}
            for rank, results in self.operation(operation, inputs).items():
                self.values[rank].update(zip(operation.results, results, strict=True))
        return {r: [self.values[r][v] for v in block.returns] for r in arguments}

    def operation(self, op: Operation, inputs: dict[int, list]) -> dict[int, list]:
        if op.name in COLLECTIVES:
            results = collective(op, {r: x for r, (x,) in inputs.items()})
            return {r: [results[r]] for r in inputs}
        if op.name in IDENTITIES:
            return {r: [np.uint32(r * (op.name == "partition_id"))] for r in inputs}
        if op.name == "while":
            return self.loop(op, inputs)
        if op.name in ("if", "case"):
            return self.branch(op, inputs)
        return {r: evaluate.evaluate(op, x, self.types) for r, x in inputs.items()}

    def loop(self, op: Operation, carried: dict[int, list]) -> dict[int, list]:
        done: dict[int, list] = {}
        while carried:
            going = self.block(op.regions[0], carried)
            done |= {r: x for r, x in carried.items() if not going[r][0]}
            carried = {r: x for r, x in carried.items() if going[r][0]}
            carried = self.block(op.regions[1], carried) if carried else {}
        return done

    def branch(self, op: Operation, inputs: dict[int, list]) -> dict[int, list]:
        chosen = {r: evaluate.branch(op, x[0]) for r, x in inputs.items()}
        results: dict[int, list] = {}
        for i, region in enumerate(op.regions):
            results |= self.block(region, {r: [] for r in inputs if chosen[r] == i})
        return results


def collective(op: Operation, inputs: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
    if op.name == "collective_permute":
        pairs = {target: source for source, target in op.attributes["source_target_pairs"]}
        return {r: inputs[pairs[r]] if r in pairs else np.zeros_like(x) for r, x in inputs.items()}
    results = {}
    for group in op.attributes["replica_groups"]:
        parts = [inputs[r] for r in group if r in inputs]
        for i, rank in enumerate(group):
            if rank in inputs:
                results[rank] = group_result(op, parts, i)
    return results


def group_result(op: Operation, parts: list[np.ndarray], i: int) -> np.ndarray:
    a, count = op.attributes, len(parts)
    if op.name == "all_gather":
        return np.concatenate(parts, a["dimension"])
    if op.name == "all_to_all":
        mine = [np.split(x, a["split_count"], a["split_dimension"])[i] for x in parts]
        return np.concatenate(mine, a["concat_dimension"])
    if op.name == "collective_broadcast":
        return parts[0]
    total = arithmetic.reduce(a["reduction"], np.stack(parts), 0)
    if op.name == "reduce_scatter":
        return np.split(total, count, a["dimension"])[i]
    return total


def well_formed(lowered: Lowered) -> None:
    """Single assignment, definition before use, known names, numbered types."""
    types, defined = lowered.module.types, set()

    def define(values: Sequence[int]) -> None:
        for value in values:
            assert 0 <= value < len(types) and value not in defined
            defined.add(value)

    def check(block: Block) -> None:
        define(block.arguments)
        for op in block.operations:
            assert op.name in OPERATORS
            assert defined.issuperset(op.operands), op
            for region in op.regions:
                check(region)
            define(op.results)
        assert defined.issuperset(block.returns)

    check(lowered.module.body)


# --- programs -----------------------------------------------------------------------------------

PROGRAMS: dict[str, Callable[[Mesh], tuple]] = {}


def program(build: Callable[[Mesh], tuple]) -> Callable[[Mesh], tuple]:
    """`build(mesh)` gives a function and its arguments."""
    PROGRAMS[build.__name__] = build
    return build


def place(mesh: Mesh, value: Any, *axes: Any) -> jax.Array:
    return jax.device_put(value, NamedSharding(mesh, P(*axes)))


def normal(mesh: Mesh, shape: tuple[int, ...], *axes: Any, dtype: Any = np.float32) -> jax.Array:
    value = np.random.default_rng(len(shape) + sum(shape)).normal(size=shape)
    return place(mesh, value.astype(dtype), *axes)


def integers(mesh: Mesh, shape: tuple[int, ...], high: int, *axes: Any) -> jax.Array:
    rng = np.random.default_rng(sum(shape))
    return place(mesh, rng.integers(0, high, shape).astype(np.int32), *axes)


def per_shard(mesh: Mesh, function: Callable, inside: Any, outside: Any) -> Callable:
    return jax.shard_map(function, mesh=mesh, in_specs=inside, out_specs=outside)


@program
def scan_over_layers(mesh: Mesh) -> tuple:
    def loss(weights, x):
        h, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, weights)
        return (h**2).sum()

    weights = normal(mesh, (3, 8, 8), None, None, "tp")
    return jax.value_and_grad(loss, (0, 1)), weights, normal(mesh, (4, 8), "dp")


@program
def threefry_dropout(mesh: Mesh) -> tuple:
    def drop(x, key):
        return jnp.where(jax.random.bernoulli(key, 0.8, x.shape), x / 0.8, 0)

    return drop, normal(mesh, (8, 8), "dp", "tp"), place(mesh, jax.random.key(3))


@program
def keys_in_and_out(mesh: Mesh) -> tuple:
    keys = place(mesh, jax.random.split(jax.random.key(1), 4), "dp")
    return lambda k: (jax.vmap(lambda k: jax.random.fold_in(k, 7))(k), k), keys


@program
def sorting(mesh: Mesh) -> tuple:
    def orders(x):
        return jnp.argmax(x, 1), jnp.argmin(x, 0), jnp.sort(x, 0), jnp.argsort(x, 1)

    return orders, normal(mesh, (8, 6), "dp")


@program
def largest(mesh: Mesh) -> tuple:
    return lambda x: lax.top_k(x, 3), normal(mesh, (8, 6), "dp")


@program
def convolution_gradients(mesh: Mesh) -> tuple:
    def loss(w, x):
        return (lax.conv_general_dilated(x, w, (2, 1), "SAME") ** 2).sum()

    return jax.grad(loss, (0, 1)), normal(mesh, (4, 3, 3, 3)), normal(mesh, (4, 3, 8, 8), "dp")


@program
def pooling_gradients(mesh: Mesh) -> tuple:
    def loss(x):
        top = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        mean = lax.reduce_window(x, 0.0, lax.add, (1, 3, 3, 1), (1, 1, 1, 1), "SAME")
        return (top**2).sum() + (mean**2).sum()

    return jax.grad(loss), normal(mesh, (4, 4, 4, 4), "dp")


@program
def embedding_gradient_by_column(mesh: Mesh) -> tuple:
    table, tokens = normal(mesh, (16, 8), None, "tp"), integers(mesh, (4, 6), 16, "dp")
    return jax.grad(lambda e, i: (e[i] ** 2).sum()), table, tokens


@program
def embedding_gradient_by_row(mesh: Mesh) -> tuple:
    table, tokens = normal(mesh, (16, 8), "tp"), integers(mesh, (4, 6), 16, "dp")
    return jax.grad(lambda e, i: (e[i] ** 2).sum()), table, tokens


@program
def scatters(mesh: Mesh) -> tuple:
    def update(x, i):
        return x.at[i].add(2.0), x.at[i, i].max(3.0), x.at[:, i].mul(2.0), x.at[i].set(1.0)

    return update, normal(mesh, (8, 8), "dp"), integers(mesh, (3,), 8)


@program
def sum_over_axes(mesh: Mesh) -> tuple:
    def sums(x):
        return lax.psum(x, "dp"), lax.pmax(lax.pmin(x, "tp"), "dp"), lax.pmean(x, ("tp", "dp"))

    out = (P(None, "tp"), P(), P())
    return per_shard(mesh, sums, P("dp", "tp"), out), normal(mesh, (8, 8), "dp", "tp")


@program
def gather_and_scatter_over_axes(mesh: Mesh) -> tuple:
    def both(x):
        gathered = lax.all_gather(x, "tp", axis=1, tiled=True)
        return gathered, lax.psum_scatter(gathered * x.sum(), "tp", scatter_dimension=1, tiled=True)

    out = (P("dp", "tp"), P("dp", "tp"))
    return per_shard(mesh, both, P("dp", "tp"), out), normal(mesh, (8, 8), "dp", "tp")


@program
def exchange(mesh: Mesh) -> tuple:
    def moves(x):
        ring = lax.ppermute(x, "dp", [(0, 1), (1, 0)])
        one_way = lax.ppermute(x, "tp", [(0, 1)])
        return lax.all_to_all(x, "tp", 0, 1, tiled=True), ring, one_way, x + lax.axis_index("tp")

    out = (P("dp", "tp"),) * 4
    return per_shard(mesh, moves, P("dp", "tp"), out), normal(mesh, (8, 8), "dp", "tp")


@program
def resharding(mesh: Mesh) -> tuple:
    def turn(x):
        swapped = lax.with_sharding_constraint(x * 2, NamedSharding(mesh, P("tp", "dp")))
        rows = lax.with_sharding_constraint(x + 1, NamedSharding(mesh, P(("dp", "tp"))))
        return swapped, rows, x[::-1], jnp.roll(x, 1, 0)

    return turn, normal(mesh, (8, 8), "dp", "tp")


@program
def uneven(mesh: Mesh) -> tuple:
    def pad(x):
        return jnp.pad(x[:7], ((1, 2), (0, 1))).cumsum(0), x[1:6:2].sum(0)

    return pad, normal(mesh, (8, 3), "dp")


@program
def branches(mesh: Mesh) -> tuple:
    def choose(x, i):
        first = lax.cond(i > 0, lambda: x * 2, lambda: x.sum(0, keepdims=True) + x)
        return first, lax.switch(i, [lambda x: x, lambda x: x * 3, lambda x: -x], x)

    return choose, normal(mesh, (8, 8), "dp", "tp"), place(mesh, jnp.int32(1))


@program
def loops(mesh: Mesh) -> tuple:
    def repeat(x):
        grown = lax.while_loop(lambda c: c[0].max() < 100, lambda c: (c[0] * 2, c[1] + 1), (x, 0))
        return grown, lax.fori_loop(0, 3, lambda i, x: x @ x / 4 + i, x)

    return repeat, normal(mesh, (8, 8), "dp", "tp")


@program
def elementary(mesh: Mesh) -> tuple:
    def all_of_them(x):
        odd = [jnp.sin, jnp.cos, jnp.tan, jnp.expm1, jnp.tanh, jnp.cbrt, jnp.floor, jnp.round]
        odd += [jnp.sign, jnp.isfinite, jax.nn.sigmoid, jax.nn.softplus, jax.nn.gelu, lax.erf]
        odd += [
            lambda x: jax.nn.gelu(x, approximate=False),
            lambda x: lax.reduce_precision(x, 8, 7),
        ]
        positive = [jnp.log, jnp.log1p, jnp.sqrt, lax.rsqrt, lambda x: x**2.5]
        return [f(x) for f in odd] + [f(jnp.abs(x) + 0.1) for f in positive]

    return all_of_them, normal(mesh, (8, 8), "dp", "tp")


@program
def bits(mesh: Mesh) -> tuple:
    def all_of_them(x):
        signed = [x << 1, x >> 1, lax.shift_right_logical(x, 1), x & 3, x | 1, x ^ 5, ~x]
        counts = [lax.population_count(x), lax.clz(x), x // 3, x % 3, lax.rem(x, 5), -x]
        return signed + counts + [lax.bitcast_convert_type(x, jnp.float32)]

    return all_of_them, integers(mesh, (8, 8), 1000, "dp", "tp")


@program
def mixed_precision(mesh: Mesh) -> tuple:
    def dots(x, y):
        wide = jnp.dot(x, y, preferred_element_type=jnp.float32)
        return (
            wide,
            lax.dot(x.astype(jnp.float32), y.astype(jnp.float32)),
            x.astype(jnp.float32) @ y,
        )

    x = normal(mesh, (8, 8), "dp", "tp", dtype=jnp.bfloat16)
    return dots, x, normal(mesh, (8, 4), "tp", dtype=jnp.bfloat16)


@program
def constants(mesh: Mesh) -> tuple:
    table = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)

    def add(x):
        small = [jnp.asarray(table[0], kind) for kind in (jnp.bfloat16, jnp.float8_e4m3fn)]
        eighth = sum(part.astype(jnp.float32) for part in small)
        mask = jnp.asarray(table > 0)
        return x + table + eighth, jnp.where(mask, x, np.uint32(4000000000)), jnp.tril(mask)

    return add, normal(mesh, (8, 8), "dp")


@program
def unused_and_plain_arguments(mesh: Mesh) -> tuple:
    return lambda x, unused, scale: x * scale, normal(mesh, (4,), "dp"), np.ones(3, np.int32), 2.0


@program
def already_jitted_with_barrier_and_remat(mesh: Mesh) -> tuple:
    @jax.jit
    def step(x):
        inner = jax.checkpoint(lambda x: jnp.sin(jnp.sin(x @ x)))
        return lax.optimization_barrier((jax.grad(lambda x: inner(x).sum())(x), x))

    return step, normal(mesh, (8, 8), "dp")


def numpy_leaves(tree: Any) -> list[np.ndarray]:
    return [frontend.host_array(leaf) for leaf in jax.tree.leaves(tree)]


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    expected = expected.astype(np.float64)
    scale = np.linalg.norm(expected.ravel()) or 1.0
    return float(np.linalg.norm((found.astype(np.float64) - expected).ravel()) / scale)


def assert_same(found: Sequence[np.ndarray], expected: Sequence[np.ndarray], limit: float) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if b.dtype.kind in "iub":
            np.testing.assert_array_equal(a, b)
        else:
            assert relative_error(a, b) <= limit


def agrees_with_jax(function: Callable, *arguments: Any) -> Lowered:
    lowered = frontend.lower(function, *arguments)
    well_formed(lowered)
    found = Lockstep(lowered).run(numpy_leaves(arguments))
    assert_same(found, numpy_leaves(jax.jit(function)(*arguments)), 1e-5)
    return lowered


@pytest.mark.parametrize("name", PROGRAMS)
def test_ranks_compute_what_jax_computes(name: str) -> None:
    function, *arguments = PROGRAMS[name](frontend.device_mesh({"dp": 2, "tp": 2}))
    assert agrees_with_jax(function, *arguments).ranks == 4


@pytest.mark.parametrize("axes", [{"dp": 1, "tp": 1}, {"dp": 2, "tp": 4}, {"tp": 2, "dp": 2}])
@pytest.mark.parametrize("name", ["scan_over_layers", "sum_over_axes", "resharding", "branches"])
def test_other_meshes(name: str, axes: dict[str, int]) -> None:
    function, *arguments = PROGRAMS[name](frontend.device_mesh(axes))
    assert agrees_with_jax(function, *arguments).ranks == int(np.prod(list(axes.values())))


def test_rbg_bits_are_one_operator() -> None:
    mesh = frontend.device_mesh({"dp": 2})
    key = place(mesh, jax.random.key(0, impl="rbg"))
    lowered = agrees_with_jax(lambda k: jax.random.normal(k, (8,)), key)
    assert (lowered.inputs[0].shape, lowered.inputs[0].dtype) == ((4,), "ui32")
    assert sum(op.name == "rng_bit_generator" for op in lowered.module.body.walk()) == 1


def test_a_program_without_a_mesh_has_one_rank() -> None:
    lowered = frontend.lower(lambda x, y: {"sum": x + y}, np.float64(1), np.arange(3))
    assert lowered.ranks == 1
    assert [(s.name, s.shape, s.dtype) for s in lowered.inputs + lowered.outputs] == [
        ("x", (), "f32"),
        ("y", (3,), "i32"),
        ("result['sum']", (3,), "f32"),
    ]


def test_a_mesh_only_inside_shard_map() -> None:
    mesh = frontend.device_mesh({"dp": 4})
    function = per_shard(mesh, lambda x: lax.psum(x, "dp"), P("dp"), P())
    lowered = frontend.lower(jax.jit(function), np.arange(8.0))
    assert lowered.ranks == 4
    (found,) = Lockstep(lowered).run([np.arange(8, dtype=np.float32)])
    np.testing.assert_array_equal(found, [12, 16])


def test_ranks_follow_the_order_of_the_mesh() -> None:
    mesh = Mesh(np.array(jax.devices()[:3:-1]).reshape(2, 2), ("dp", "tp"))
    turned = NamedSharding(mesh, P("tp", "dp"))
    x = normal(mesh, (8, 8), "dp", "tp")
    agrees_with_jax(lambda x: lax.with_sharding_constraint(jnp.cumsum(x, 0), turned), x)


def test_explicit_axes() -> None:
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        lowered = agrees_with_jax(
            lambda x: jax.reshard(x, P(None, "dp")), normal(mesh, (8, 8), "tp")
        )
    assert lowered.outputs[0].local.shape == (8, 4)


def test_64_bits_only_when_jax_has_them() -> None:
    x = np.arange(3.0)
    assert frontend.lower(lambda x: x, x).outputs[0].dtype == "f32"
    with jax.enable_x64(True):
        lowered = agrees_with_jax(lambda x: (x * 2, jnp.arange(4)), x)
    assert [s.dtype for s in lowered.outputs] == ["f64", "i64"]


def test_output_shardings_can_be_stated() -> None:
    mesh = frontend.device_mesh({"dp": 4})
    x = normal(mesh, (8, 8), "dp")
    columns = NamedSharding(mesh, P(None, "dp"))
    (out,) = frontend.lower(lambda x: x + 1, x, out_shardings=columns).outputs
    assert out.local.shape == (8, 2)


# --- a model that nobody here wrote ------------------------------------------------------------


class Block_(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.norm1, self.norm2 = (nnx.LayerNorm(width, rngs=rngs) for _ in range(2))
        self.attention = nnx.MultiHeadAttention(4, width, decode=False, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        mask = nnx.make_causal_mask(x[..., 0])
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.down(jax.nn.gelu(self.up(self.norm2(x)), approximate=False))


class Transformer(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(64, width, rngs=rngs)
        self.blocks = nnx.List([Block_(width, rngs) for _ in range(2)])
        self.head = nnx.Linear(width, 64, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def flax_step(mesh: Mesh) -> tuple:
    model = nnx.eval_shape(lambda: Transformer(32, nnx.Rngs(0)))
    graph, weights, rest = nnx.split(model, nnx.Param, ...)
    assert not jax.tree.leaves(rest)
    rng = np.random.default_rng(0)
    optimizer = optax.adamw(1e-3)

    def axes(path: Any, leaf: jax.Array) -> P:
        name = jax.tree_util.keystr(path)
        if leaf.ndim < 2:
            return P()
        if any(part in name for part in ("up", "query", "key", "value")):
            return P(None, "tp")
        return P("tp") if any(part in name for part in ("down", "'out'")) else P()

    def put(tree: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: place(mesh, leaf, *axes(path, leaf)), tree
        )

    def step(weights, moments, tokens):
        def loss(weights):
            scores = nnx.merge(graph, weights, rest)(tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(scores, tokens[:, 1:]).mean()

        value, gradient = jax.value_and_grad(loss)(weights)
        updates, moments = optimizer.update(gradient, moments, weights)
        return gradient, optax.apply_updates(weights, updates), moments, value

    filled = jax.tree.map(lambda w: rng.normal(0.0, 0.1, w.shape).astype(w.dtype), weights)
    weights = put(filled)
    return step, weights, put(optimizer.init(weights)), integers(mesh, (4, 17), 64, "dp")


def test_flax_transformer_with_adamw() -> None:
    step, *arguments = flax_step(frontend.device_mesh({"dp": 2, "tp": 2}))
    lowered = frontend.lower(step, *arguments)
    well_formed(lowered)
    operations = list(lowered.module.body.walk())
    assert 1500 < len(operations) < 4000
    assert {"all_reduce", "gather", "scatter", "dot_general"} <= {op.name for op in operations}
    named = [op for op in operations if op.name != "constant"]
    mine = [op for op in named if op.location.startswith("tests/test_frontend.py:")]
    assert len(mine) > 0.9 * len(named)
    found = Lockstep(lowered).run(numpy_leaves(arguments))
    expected = numpy_leaves(jax.jit(step)(*arguments))
    gradients = len(jax.tree.leaves(arguments[0]))
    whole = np.sqrt(sum(np.vdot(g, g) for g in expected[:gradients]))
    for a, b in zip(found[:gradients], expected[:gradients], strict=True):
        if np.linalg.norm(b) > 1e-6 * whole:
            assert relative_error(a, b) <= 1e-5
        else:  # a key's bias does not change attention: its gradient is zero but for rounding
            assert np.linalg.norm(a) <= 1e-6 * whole
    assert_same(found[-1:], expected[-1:], 1e-6)


# --- refusals -----------------------------------------------------------------------------------


def refused(function: Callable, *arguments: Any) -> str:
    with pytest.raises(Unsupported) as error:
        frontend.lower(function, *arguments)
    return str(error.value)


def here(function: Callable, offset: int = 0) -> str:
    return f"(tests/test_frontend.py:{inspect.getsourcelines(function)[1] + offset})"


@pytest.mark.parametrize("count", [1, 4])
def test_unsupported_operators_are_named_with_their_source_line(
    count: int, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(request.config.rootpath)
    x = normal(frontend.device_mesh({"dp": count}), (8, 8))

    def factor(x):
        return jnp.linalg.cholesky(x)

    def shows(x):
        jax.debug.print("{x}", x=x)
        return x

    def ordered(x):
        return io_callback(np.sin, x, x, ordered=True)

    def spectrum(x):
        return jnp.abs(jnp.fft.fft(x))

    callback = "host callback (xla_ffi_python_cpu_callback) is not modelled"
    custom = "operator custom_call @lapack_spotrf_ffi is not modelled"
    assert refused(factor, x) == f"{custom} {here(factor, 1)}"
    assert refused(shows, x) == f"{callback} {here(shows, 1)}"
    assert refused(ordered, x) == f"{callback} {here(ordered, 1)}"
    assert refused(spectrum, x) == f"dtype complex<f32> is not modelled {here(spectrum, 1)}"


def test_a_mesh_larger_than_the_machine() -> None:
    with pytest.raises(TrnsimError, match="^the mesh needs 64 virtual devices, JAX has 8$"):
        frontend.device_mesh({"dp": 16, "tp": 4})


def test_arguments_on_two_meshes() -> None:
    x, y = (normal(frontend.device_mesh({"dp": n}), (8,), "dp") for n in (4, 2))
    message = r"^y is placed on the devices of Mesh\('dp': 2.*\), not on those of Mesh\('dp': 4"
    with pytest.raises(TrnsimError, match=message):
        frontend.lower(lambda x, y: x + y, x, y)


def test_every_operator_has_values() -> None:
    known = evaluate.NAMES | evaluate.CONTROL_FLOW | COLLECTIVES | IDENTITIES
    assert OPERATORS <= known


# --- shards -------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.permutations(["a", "b", None]),
    st.sampled_from(["f32", "bf16", "i1", "ui32"]),
)
def test_unshard_is_the_inverse_of_shard(blocks: list[int], axes: list, dtype: str) -> None:
    mesh = frontend.device_mesh({"a": 2, "b": 3})
    shape = tuple(6 * n for n in blocks)
    sharding = NamedSharding(mesh, P(*axes[: len(shape)]))
    index = frontend.boxes(sharding, shape, list(mesh.devices.flat))
    shards = Shards("x", shape, dtype, index)
    value = np.arange(np.prod(shape)).reshape(shape).astype(shards.local.numpy)
    parts = [shard(value, shards, rank) for rank in range(6)]
    assert {part.shape for part in parts} == {shards.local.shape}
    np.testing.assert_array_equal(unshard(parts, shards), value)


def test_shards_refuse_another_array() -> None:
    shards = replicated("w", (2, 3), "f32", 2)
    message = r"^w: array is int32\[2, 3\], expected float32\[2, 3\]$"
    with pytest.raises(TrnsimError, match=message):
        shard(np.zeros((2, 3), np.int32), shards, 0)
    with pytest.raises(TrnsimError, match="^w: 1 parts for 2 ranks$"):
        unshard([np.zeros((2, 3), np.float32)], shards)


def test_lowered_travels() -> None:
    function, *arguments = PROGRAMS["exchange"](frontend.device_mesh({"dp": 2, "tp": 2}))
    lowered = frontend.lower(function, *arguments)
    again = decode(encode(lowered))
    assert encode(again) == encode(lowered)
    assert again.module.body == lowered.module.body
