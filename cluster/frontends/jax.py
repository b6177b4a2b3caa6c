"""A JAX function -> the program that every rank runs. All use of JAX and XLA internals is here
and in `stablehlo`.

XLA's SPMD partitioner does the work that it does for a real device: the function is compiled for N
virtual CPU devices, XLA writes the partitioned module to a temporary folder, and that module is
read as StableHLO. The number of devices is fixed when JAX's backend starts: see `virtual_devices`.
"""

import inspect
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import config as jax_config
from jax._src import core as jax_core
from jax._src import xla_bridge
from jax._src.interpreters import mlir as jax_mlir
from jax._src.interpreters import partial_eval
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxlib._jax import mlir as xla_mlir

from trnsim.device.dtypes import dtype_name
from trnsim.device.errors import TrnsimError, Unsupported
from trnsim.device.ops.ir import Module, TensorType

from ..sharding import Lowered, Shards
from .stablehlo import module_from_bytecode, module_from_mlir

UNSPECIFIED: Any = object()  # XLA chooses the output shardings

_DUMP = {
    "xla_dump_hlo_pass_re": "spmd-partitioning|dce|pipeline-start",
    "xla_dump_hlo_pipeline_re": "spmd-partitioner|sharding-removal",
    "xla_dump_hlo_as_proto": True,
    "xla_backend_optimization_level": 0,  # the compiled code is never run: the quickest will do
    "xla_cpu_use_fusion_emitters": False,
    # Groups as lists of ranks: the conversion to StableHLO loses the device order of mesh axes.
    "xla_enable_rgv3_materialization": False,
}


def virtual_devices(count: int) -> None:
    """Give JAX `count` CPU devices; once its backend has started, the number stays."""
    if xla_bridge.backends_are_initialized():
        return
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)


def device_mesh(axes: dict[str, int]) -> Mesh:
    """A mesh over the first devices, in rank order, with axes that XLA propagates (auto)."""
    shape = tuple(axes.values())
    count = int(np.prod(shape))
    devices = jax.devices()
    if len(devices) < count:
        raise TrnsimError(f"the mesh needs {count} virtual devices, JAX has {len(devices)}")
    return Mesh(np.array(devices[:count]).reshape(shape), tuple(axes))


def lower(
    function: Callable,
    *args: Any,
    mesh: Mesh | None = None,
    out_shardings: Any = UNSPECIFIED,
    name: str = "",
    names: Sequence[str] = (),
    out_names: Sequence[str] = (),
) -> Lowered:
    """Compile `function(*args)` for the devices of its shardings and return every rank's program.

    `args` are pytrees of arrays or `jax.ShapeDtypeStruct`s; leaves without a NamedSharding are
    replicated over `mesh` (by default the mesh of the first leaf that has one). Functions may be
    jitted already or come from `shard_map`. Typed PRNG keys become their uint32 data.
    Rank r is device `mesh.devices.flat[r]`. Shards are called by `names`, one per argument (by
    default the function's own), and `out_names`, one per element of a returned tuple.
    Raises Unsupported with operator and source line.
    """
    name = name or getattr(function, "__name__", "function")
    mesh = mesh or _mesh_of(args)
    specs = jax.tree.map(lambda leaf: abstract(leaf, mesh), args)
    argument_names = list(names) or _argument_names(function, len(args))
    _check_devices(argument_names, specs, mesh)
    with _settings():
        lowered = _jitted(function, name, out_shardings).lower(*specs)
        proto, compiled = _compile(lowered)
    devices = list(mesh.devices.flat) if mesh else _devices(compiled)
    bytecode = xla_mlir.hlo_to_stablehlo(proto)
    module = module_from_bytecode(jax_mlir.make_ir_context(), bytecode, name, len(devices))
    inputs = _all_shards(argument_names, specs, compiled.input_shardings[0], devices)
    outputs = _all_shards(list(out_names), lowered.out_info, compiled.output_shardings, devices)
    result = Lowered(module, len(devices), inputs, outputs)
    _check(result)
    return result


def specs_of(types: Sequence[TensorType]) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Arrays of these types, as JAX's shapes."""
    return tuple(jax.ShapeDtypeStruct(t.shape, t.numpy) for t in types)


def types_of(leaves: Sequence[Any]) -> tuple[TensorType, ...]:
    """Types of JAX's shapes, arrays or abstract values."""
    return tuple(TensorType(tuple(leaf.shape), dtype_name(leaf.dtype)) for leaf in leaves)


def lower_local(function: Callable, types: Sequence[TensorType], name: str = "") -> Module:
    """The operators of a function of one rank's arrays, without collectives.

    `function` takes one argument for each of `types` and returns an array or a tuple of them. The
    module is read as JAX lowers it: XLA's passes are not run, so composites stay whole.
    Raises Unsupported with operator and source line.
    """
    name = name or function.__name__
    with jax_config.use_simplified_jaxpr_constants(False):
        lowered = _jitted(function, name, UNSPECIFIED).lower(*specs_of(types))
    return module_from_mlir(lowered.compiler_ir("stablehlo"), name, 1)


def prune(closed: Any, wanted: Sequence[bool]) -> tuple[Callable, tuple[int, ...]]:
    """A traced function with only the `wanted` results, and which arguments those depend on."""
    jaxpr, used = partial_eval.dce_jaxpr(closed.jaxpr, list(wanted))
    function = jax_core.jaxpr_as_fun(jax_core.ClosedJaxpr(jaxpr, closed.consts))
    return function, tuple(i for i, kept in enumerate(used) if kept)


def sources(closed: Any) -> list[int]:
    """Where each result of a traced function comes from: an argument's index, or -1 - a result's.

    The result is the first one that is the same array.
    """
    arguments = {v: i for i, v in enumerate(closed.jaxpr.invars)}
    found: list[int] = []
    first: dict[Any, int] = {}
    for place, var in enumerate(closed.jaxpr.outvars):
        if isinstance(var, jax_core.Var) and var in arguments:
            found.append(arguments[var])
        else:
            key = var if isinstance(var, jax_core.Var) else place
            found.append(-1 - first.setdefault(key, place))
    return found


def abstract(leaf: Any, mesh: Mesh | None) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of a leaf; without a NamedSharding it is replicated on `mesh`."""
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        sharding = replicated(mesh) if mesh else None
    aval = jax.typeof(leaf) if not isinstance(leaf, jax.ShapeDtypeStruct) else leaf
    dtype = aval.dtype
    if not jnp.issubdtype(dtype, jax.dtypes.extended):
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    weak = bool(getattr(aval, "weak_type", False))
    return jax.ShapeDtypeStruct(aval.shape, dtype, sharding=sharding, weak_type=weak)


def host_array(leaf: Any) -> np.ndarray:
    """The global value of a leaf as numpy; typed PRNG keys as their uint32 data."""
    if jnp.issubdtype(getattr(leaf, "dtype", np.float32), jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)


def path_name(path: tuple) -> str:
    """The path of a leaf in its pytree, like `['params']['w']`."""
    return jax.tree_util.keystr(path)


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of an array that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def traced(function: Callable[[], Any]) -> Any:
    """The pytree that `function()` returns, as shapes with shardings, without computing it.

    Shardings are those that `jax.device_put`, sharding constraints and jitted functions with
    output shardings state for a leaf. A function that cannot be traced is called.
    """
    try:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)()
    except Exception:  # it looks at values (or is wrong: then the call says how)
        return function()
    stated: dict[Any, Any] = {}
    for equation in closed.jaxpr.eqns:
        stated.update(zip(equation.outvars, _stated_shardings(equation), strict=False))
    leaves, tree = jax.tree.flatten(shapes)
    found = [stated.get(v) if isinstance(v, jax_core.Var) else None for v in closed.jaxpr.outvars]
    return tree.unflatten(
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        for leaf, sharding in zip(leaves, found, strict=True)
    )


def _stated_shardings(equation: Any) -> list:
    """The NamedSharding of each result of an equation, or None."""
    parameters = equation.params
    key = next((k for k in ("devices", "sharding", "out_shardings") if k in parameters), None)
    stated = parameters[key] if key else ()
    stated = stated if isinstance(stated, (tuple, list)) else (stated,)
    return [s if isinstance(s, NamedSharding) else None for s in stated]


def _mesh_of(tree: Any) -> Mesh | None:
    for leaf in jax.tree.leaves(tree):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            return sharding.mesh
    return None


def _jitted(function: Callable, name: str, out_shardings: Any) -> Any:
    """`function` under a jit of our own, which keeps unused arguments as parameters."""

    def call(*args: Any) -> Any:
        return function(*args)

    call.__name__ = call.__qualname__ = name
    chosen = {} if out_shardings is UNSPECIFIED else {"out_shardings": out_shardings}
    return jax.jit(call, keep_unused=True, **chosen)


@contextmanager
def _settings() -> Iterator[None]:
    """Whole tracebacks in locations, constants inside the module, no cached executable."""
    with ExitStack() as stack:
        stack.enter_context(jax_config.traceback_in_locations_limit(-1))
        stack.enter_context(jax_config.include_full_tracebacks_in_locations(True))
        stack.enter_context(jax_config.use_simplified_jaxpr_constants(False))
        stack.enter_context(jax_config.enable_compilation_cache(False))
        yield


def _compile(lowered: Any) -> tuple[bytes, Any]:
    """The HloModuleProto after SPMD partitioning, and the executable (for its shardings)."""
    with tempfile.TemporaryDirectory(prefix="trnsim-xla-") as folder:
        compiled = lowered.compile(compiler_options=_DUMP | {"xla_dump_to": folder})
        path = _partitioned(Path(folder))
        return _first_field(path.read_bytes()), compiled


def _partitioned(folder: Path) -> Path:
    """The dump to read: after partitioning, or for one device the last one without shardings."""
    for pattern in (
        "*.after_spmd-partitioning.*.hlo.pb",
        "*.sharding-removal.*.hlo.pb",
        "*.before_optimizations.hlo.pb",
    ):
        found = sorted(folder.glob(pattern))
        if found:
            return found[-1]
    raise TrnsimError(f"XLA of JAX {jax.__version__} wrote no partitioned module")


def _first_field(message: bytes) -> bytes:
    """Field 1 of a protocol buffer message: the HloModuleProto of an HloProto."""
    position = 0

    def varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = message[position]
            position += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while position < len(message):
        key = varint()
        length = varint()  # a plain number when the field is not length-delimited
        if key & 7 == 2:
            if key >> 3 == 1:
                return message[position : position + length]
            position += length
    raise TrnsimError("XLA's dump holds no module")


def _devices(compiled: Any) -> list:
    """The devices in partition order, when only the compiled function knows its mesh."""
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    return list(shardings[0]._device_assignment) if shardings else jax.devices()[:1]


def _argument_names(function: Callable, count: int) -> list[str]:
    try:
        names = list(inspect.signature(function).parameters)[:count]
    except (TypeError, ValueError):
        names = []
    return names + [f"argument{i}" for i in range(len(names), count)]


def _leaf_name(names: list[str], path: tuple) -> str:
    if not names:
        return "result" + path_name(path)
    return names[path[0].idx] + path_name(path[1:])


def _all_shards(names: list[str], avals: Any, shardings: Any, devices: list) -> tuple[Shards, ...]:
    leaves = jax.tree.leaves_with_path(avals)
    flat = jax.tree.leaves(shardings)
    if len(flat) != len(leaves):
        raise Unsupported(f"JAX gave {len(flat)} shardings for {len(leaves)} arrays")
    memo: dict = {}
    return tuple(
        _shards(_leaf_name(names, path), aval, sharding, devices, memo)
        for (path, aval), sharding in zip(leaves, flat, strict=True)
    )


def _shards(name: str, aval: Any, sharding: Any, devices: list, memo: dict) -> Shards:
    shape, dtype, extra = tuple(aval.shape), aval.dtype, ()
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype))
        extra, dtype = data.shape, data.dtype
    if (sharding, shape, extra) not in memo:
        memo[sharding, shape, extra] = _with_whole(boxes(sharding, shape, devices), extra)
    return Shards(name, shape + extra, dtype_name(dtype), memo[sharding, shape, extra])


def boxes(sharding: Any, shape: tuple[int, ...], devices: list) -> np.ndarray:
    """int64 [ranks, dimensions, 2]: start and stop of what each device holds."""
    indices = sharding.devices_indices_map(shape)
    found = [
        [s.indices(n)[:2] for s, n in zip(indices[device], shape, strict=True)]
        for device in devices
    ]
    return np.array(found, np.int64).reshape(len(devices), len(shape), 2)


def _with_whole(index: np.ndarray, extra: tuple[int, ...]) -> np.ndarray:
    """Boxes with more dimensions, none of them split: the uint32 words of a PRNG key."""
    whole = np.array([(0, n) for n in extra], np.int64).reshape(1, len(extra), 2)
    return np.concatenate([index, np.repeat(whole, len(index), 0)], axis=1)


def _check_devices(names: list[str], specs: Any, mesh: Mesh | None) -> None:
    """Refuse arguments over other devices than the mesh's, or in another order."""
    if mesh is None:
        return
    for path, leaf in jax.tree.leaves_with_path(specs):
        other = leaf.sharding.mesh
        if other != mesh and list(other.devices.flat) != list(mesh.devices.flat):
            raise TrnsimError(
                f"{_leaf_name(names, path)} is placed on the devices of {other},"
                f" not on those of {mesh}: use one mesh, in one order"
            )


def _check(lowered: Lowered) -> None:
    """The module's arguments and results are the shards, type by type."""
    body, types = lowered.module.body, lowered.module.types
    for what, shards, values in (
        ("argument", lowered.inputs, body.arguments),
        ("result", lowered.outputs, body.returns),
    ):
        local: list[TensorType] = [s.local for s in shards]
        found = [types[v] for v in values]
        if local != found:
            pairs = zip(shards, local, found, strict=False)
            wrong = next((s.name for s, a, b in pairs if a != b), "their number")
            raise Unsupported(f"XLA partitioned {what} {wrong} otherwise than JAX states")
