"""Functions of whole tiles: each allocates its result and issues the instructions for it.

Results are in SBUF with the dtype of the first tile, unless `dtype` is given. Those of the Tensor
engine are in PSUM: of `matmul`, of `transpose`, and of a float32 row that is broadcast along
partitions.
"""

import math
from collections.abc import Sequence
from typing import Any

from ..errors import BadInput, IllegalInstruction
from . import isa
from .errors import NotModelled
from .opcodes import BINARY, MARKS, OPCODES, REDUCTIONS
from .session import current
from .tensor import MemoryRegion, NkiTensor

_BITS = {"int8": 8, "int16": 16, "int32": 32, "uint8": 8, "uint16": 16, "uint32": 32}
_REDUCERS = {"sum": "add", "max": "maximum", "min": "minimum", "prod": "multiply"}
_BY_SCALAR = {  # functions of one tile that are an operator with a number
    "abs": ("abs_max", 0.0), "negative": ("multiply", -1.0), "logical_not": ("logical_xor", 1),
}  # fmt: skip
_PSUM = MemoryRegion.psum


def evaluate(name: str, *args: Any, **kwargs: Any) -> NkiTensor:
    """The opcode `name` on tiles."""
    if name in BINARY:
        return binary(name, *args, **kwargs)
    if name in REDUCTIONS:
        return reduction(name, *args, **kwargs)
    if name in MARKS:
        raise BadInput("call", f"nl.{name}", "a function of tiles; this is only an opcode")
    return unary(name, *args, **kwargs)


def new(shape: Sequence[int], dtype: Any, buffer: Any = MemoryRegion.sbuf) -> NkiTensor:
    """A new tile."""
    return current().allocate(shape, dtype, buffer)


def binary(name: str, x: Any, y: Any, dtype: Any = None) -> NkiTensor:
    """x `name` y elementwise; one may be a number, a [P, 1] column, or need broadcasting."""
    op = OPCODES[name]
    if name in ("mod", "fmod"):
        raise NotModelled(f"nki.language.{name}", "no instruction has it")
    if name == "divide":
        return _divided(x, y, dtype)
    if not isinstance(x, NkiTensor) and not isinstance(y, NkiTensor):
        raise BadInput(f"nl.{name}", (x, y), "at least one tile")
    first = x if isinstance(x, NkiTensor) else y
    kind = dtype or first.dtype
    if not isinstance(x, NkiTensor):
        return _with_scalar(op, y, x, kind, reverse=True)
    if not isinstance(y, NkiTensor):
        return _with_scalar(op, x, y, kind)
    shape = _common(x.shape, y.shape)
    if _is_column(y, shape) and x.shape == shape:
        return _with_scalar(op, x, y, kind)
    if _is_column(x, shape) and y.shape == shape:
        return _with_scalar(op, y, x, kind, reverse=True)
    dst = new(shape, kind)
    left, right = broadcast_to(x, shape), broadcast_to(y, shape)
    if left.buffer is _PSUM and right.buffer is _PSUM:
        left = unary("copy", left)
    isa.tensor_tensor(dst, left, right, op)
    return dst


def _divided(x: Any, y: Any, dtype: Any) -> NkiTensor:
    """x / y by the reciprocal: no engine divides."""
    if not isinstance(y, NkiTensor):
        return binary("multiply", x, 1.0 / y, dtype)
    kind = dtype or (x.dtype if isinstance(x, NkiTensor) else y.dtype)
    return binary("multiply", x, unary("reciprocal", y, "float32"), kind)


def _with_scalar(
    op: Any, tile: NkiTensor, scalar: Any, dtype: Any, reverse: bool = False
) -> NkiTensor:
    dst = new(tile.shape, dtype)
    isa.tensor_scalar(dst, tile, op, scalar, reverse0=reverse)
    return dst


def _is_column(tile: NkiTensor, shape: tuple[int, ...]) -> bool:
    alike = tile.dtype == "float32" and tile.shape[0] == shape[0]
    return alike and math.prod(tile.shape[1:]) == 1 != math.prod(shape[1:])


def _common(x: tuple[int, ...], y: tuple[int, ...]) -> tuple[int, ...]:
    if len(x) != len(y) or any(a != b and 1 not in (a, b) for a, b in zip(x, y, strict=True)):
        raise IllegalInstruction(f"tiles of shape {list(x)} and {list(y)} do not go together")
    return tuple(max(a, b) for a, b in zip(x, y, strict=True))


def unary(name: str, x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """A function of one tile."""
    if name in _COMPOSED:
        return unary("copy", _COMPOSED[name](x), dtype or x.dtype)
    dst = new(x.shape, dtype or x.dtype)
    if name == "copy":
        isa.tensor_copy(dst, x)
    elif name == "reciprocal":
        isa.reciprocal(dst, x)
    elif name == "invert":
        isa.tensor_scalar(dst, x, OPCODES["bitwise_xor"], _ones(x))
    elif name in _BY_SCALAR:
        op, scalar = _BY_SCALAR[name]
        if name == "abs" and current().chip.generation < 4:
            isa.activation(dst, OPCODES["abs"], x)
        else:
            isa.tensor_scalar(dst, x, OPCODES[op], scalar)
    elif name == "cos":
        isa.activation(dst, OPCODES["sin"], x, bias=_column(x, math.pi / 2))
    else:
        isa.activation(dst, OPCODES[name], x)
    return dst


def _tan(x: NkiTensor) -> NkiTensor:
    return _divided(unary("sin", x, "float32"), unary("cos", x, "float32"), None)


def _floor(x: NkiTensor) -> NkiTensor:
    """One less than the nearest integer where that is above x. Below 2^31, as integers are."""
    nearest = unary("copy", unary("copy", x, "int32"), "float32")
    return binary("subtract", nearest, binary("greater", nearest, x, "float32"))


def _ceil(x: NkiTensor) -> NkiTensor:
    return unary("negative", _floor(unary("negative", x, "float32")))


def _trunc(x: NkiTensor) -> NkiTensor:
    return binary("multiply", _floor(unary("abs", x, "float32")), unary("sign", x, "float32"))


_COMPOSED = {"tan": _tan, "floor": _floor, "ceil": _ceil, "trunc": _trunc}


def _ones(x: NkiTensor) -> int:
    bits = _BITS.get(x.dtype.name)
    if bits is None:
        raise IllegalInstruction(f"nl.invert is for integers, not for {x.dtype}")
    return (1 << bits) - 1 if x.dtype.name.startswith("u") else -1


def _column(x: NkiTensor, value: float) -> NkiTensor:
    column = new((x.shape[0], 1), "float32")
    isa.memset(column, value)
    return column


# ---- reductions ------------------------------------------------------------------------------


def reduction(
    name: str, x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False
) -> NkiTensor:
    """Along the last free axes."""
    axes = _free_axes(x, axis)
    if name in ("mean", "var"):
        return _moment(name, x, axes, dtype, keepdims)
    if name == "all":
        wanted = binary("not_equal", x, 0)
        return reduction("min", wanted, axes, dtype, keepdims)
    dst = new(_reduced(x.shape, axes, keepdims), dtype or x.dtype)
    isa.tensor_reduce(dst, OPCODES[_REDUCERS[name]], x, axes, keepdims=keepdims)
    return dst


def _free_axes(x: NkiTensor, axis: Any) -> tuple[int, ...]:
    given = tuple(axis) if isinstance(axis, list | tuple) else (axis,)
    axes = tuple(sorted(a % x.ndim for a in given))
    if 0 in axes or axes != tuple(range(x.ndim - len(axes), x.ndim)):
        raise IllegalInstruction(f"axis is {axis}; allowed: the last free axes of {list(x.shape)}")
    return axes


def _reduced(shape: tuple[int, ...], axes: tuple[int, ...], keepdims: bool) -> tuple[int, ...]:
    kept = shape[: len(shape) - len(axes)]
    if keepdims:
        return kept + (1,) * len(axes)
    return kept if len(kept) > 1 else (*kept, 1)


def _moment(
    name: str, x: NkiTensor, axes: tuple[int, ...], dtype: Any, keepdims: bool
) -> NkiTensor:
    count = math.prod(x.shape[axis] for axis in axes)
    total = reduction("sum", x, axes, "float32", True)
    mean = binary("multiply", total, 1.0 / count)
    if name == "var":
        away = binary("subtract", x, _spread(mean, x), "float32")
        squares = reduction("sum", unary("square", away), axes, "float32", True)
        return binary("multiply", squares, 1.0 / count, dtype or x.dtype)
    result = binary("multiply", total, 1.0 / count, dtype or x.dtype)
    return result if keepdims else result.reshape(_reduced(x.shape, axes, False))


def _spread(column: NkiTensor, like: NkiTensor) -> NkiTensor:
    return column if math.prod(column.shape[1:]) == 1 else broadcast_to(column, like.shape)


def softmax(x: NkiTensor, axis: Any = -1, dtype: Any = None) -> NkiTensor:
    """exp(x - max) / sum along the last free axes."""
    axes = _free_axes(x, axis)
    largest = reduction("max", x, axes, "float32", True)
    powers = unary("exp", binary("subtract", x, largest, "float32"))
    total = reduction("sum", powers, axes, "float32", True)
    return binary("multiply", powers, unary("reciprocal", total), dtype or x.dtype)


def rms_norm(
    x: NkiTensor,
    w: NkiTensor,
    axis: Any,
    n: int,
    epsilon: float = 1e-6,
    dtype: Any = None,
    compute_dtype: Any = None,
) -> NkiTensor:
    """x / sqrt(sum of squares / n + epsilon) * w."""
    kind = compute_dtype or "float32"
    total = reduction("sum", unary("square", x, kind), axis, "float32", True)
    mean = binary("add", binary("multiply", total, 1.0 / n), epsilon)
    scaled = binary("multiply", x, unary("rsqrt", mean), kind)
    return binary("multiply", scaled, w, dtype or x.dtype)


# ---- layout, HBM, matmul ---------------------------------------------------------------------


def broadcast_to(x: NkiTensor, shape: Sequence[int], dtype: Any = None) -> NkiTensor:
    """Free axes of length 1 repeated (a view); a partition axis of 1 is copied to all."""
    shape = tuple(shape)
    if len(shape) != x.ndim:
        raise IllegalInstruction(f"{x} cannot be broadcast to {list(shape)}")
    made = x
    if shape[0] != x.shape[0]:
        if x.shape[0] != 1:
            raise IllegalInstruction(f"{x} cannot be broadcast to {list(shape)}")
        made = _by_matmul(x, shape[0]) if _fits_bank(x) else _by_shuffle(x, shape[0])
    for axis in range(1, len(shape)):
        if made.shape[axis] != shape[axis]:
            made = made.broadcast(axis, shape[axis])
    return made if dtype is None or dtype == x.dtype else unary("copy", made, dtype)


def _fits_bank(row: NkiTensor) -> bool:
    """Whether the Tensor engine copies the row as it is, into a bank of a PSUM half empty."""
    psum = current().core.psum
    whole = row.dtype.name == "float32" and row.storage.region is MemoryRegion.sbuf
    return whole and row.size * 4 <= psum.bank and 2 * psum.used < psum.capacity


def _by_matmul(row: NkiTensor, partitions: int) -> NkiTensor:
    """A row on all partitions, in PSUM: a matmul with ones (nki/guides/tutorials/fused_mamba.rst:
    partitions are broadcast along by the Tensor engine)."""
    session = current()
    ones = session.state.get("ones")
    if ones is None:
        ones = session.state["ones"] = new((1, 128), "float32")
        isa.memset(ones, 1.0)
    made = new((partitions, *row.shape[1:]), "float32", _PSUM)
    isa.nc_matmul(made, ones[:, :partitions], row, is_stationary_onezero=True)
    return made


def _by_shuffle(row: NkiTensor, partitions: int) -> NkiTensor:
    made = new((partitions, *row.shape[1:]), row.dtype)
    for start in range(0, partitions, 32):
        count = min(32, partitions - start)
        isa.nc_stream_shuffle(made[start : start + count], row, [0] * 32)
    return made


def expand_dims(x: NkiTensor, axis: int) -> NkiTensor:
    """A view with a new axis of length 1."""
    return x.expand_dim(axis)


def load(src: NkiTensor, dtype: Any = None) -> NkiTensor:
    """A new tile in SBUF with the values of a tensor in HBM."""
    view = src if src.ndim > 1 else src.expand_dim(0)
    dst = new(view.shape, dtype or src.dtype)
    isa.dma_copy(dst, view)
    return dst


def store(dst: NkiTensor, value: NkiTensor) -> None:
    """A tensor in HBM = a tile of SBUF."""
    tile = unary("copy", value) if value.buffer is _PSUM else value
    isa.dma_copy(dst if dst.ndim > 1 or tile.ndim == 1 else dst.expand_dim(0), tile)


def load_transpose2d(src: NkiTensor, dtype: Any = None) -> NkiTensor:
    """A new tile in SBUF: the transpose of a 2-d tensor in HBM."""
    rows, columns = src.shape
    dst = new((columns, rows), src.dtype)
    isa.dma_transpose(dst, src)
    return dst if dtype is None else unary("copy", dst, dtype)


def transpose(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """A 2-d tile with its axes exchanged."""
    rows, columns = x.shape
    if rows <= 32 and columns <= 32:
        dst = new((columns, rows), x.dtype)
        isa.nc_transpose(dst, x, engine=isa.engine.vector)
    else:
        dst = new((columns, rows), _transposed_dtype(x), _PSUM)
        isa.nc_transpose(dst, x, engine=isa.engine.tensor)
    return unary("copy", dst, dtype or x.dtype)


def _transposed_dtype(x: NkiTensor) -> Any:
    return x.dtype if current().chip.generation >= 3 else "float32"


def matmul(x: NkiTensor, y: NkiTensor, transpose_x: bool = False) -> NkiTensor:
    """x @ y (or x.T @ y) in PSUM, float32."""
    stationary = x if transpose_x else transpose(x)
    dst = new((stationary.shape[1], y.shape[1]), "float32", _PSUM)
    isa.nc_matmul(dst, stationary, y)
    return dst


def where(condition: NkiTensor, x: Any, y: Any, dtype: Any = None) -> NkiTensor:
    """x where the condition is not 0, else y."""
    like = x if isinstance(x, NkiTensor) else y if isinstance(y, NkiTensor) else condition
    shape = condition.shape
    dst = new(shape, dtype or like.dtype)
    if isinstance(y, NkiTensor):
        isa.tensor_copy(dst, broadcast_to(y, shape))
    else:
        isa.memset(dst, y)
    source = broadcast_to(x, shape) if isinstance(x, NkiTensor) else x
    isa.tensor_copy_predicated(dst, source, _mask(condition))
    return dst


def _mask(condition: NkiTensor) -> NkiTensor:
    if condition.dtype.name.startswith(("int", "uint")):
        return condition
    return binary("not_equal", condition, 0.0, "uint8")


def shared_identity_matrix(n: int, dtype: Any = "uint8", dst: NkiTensor | None = None) -> NkiTensor:
    """The [n, n] identity in SBUF; one for each dtype and size in a kernel."""
    session = current()
    key = f"identity {n} {dtype}"
    if dst is None and key in session.state:
        return session.state[key]
    made = new((n, n), dtype) if dst is None else dst
    isa.memset(made, 0)
    ones = new((n, n), dtype)
    isa.memset(ones, 1)
    equal: Any = OPCODES["equal"]
    isa.affine_select(made, [[-1, n]], 1, ones, 0, cmp_op=equal)
    if dst is None:
        session.state[key] = made
    return made


def random_seed(seed: NkiTensor) -> None:
    """Sets the state of the random numbers from a [1, 1] tensor."""
    isa.set_rng_seed(seed)


def rand(
    shape: Sequence[int], dtype: Any, buffer: Any = MemoryRegion.sbuf, name: str = ""
) -> NkiTensor:
    """A new tile of numbers in [0, 1)."""
    dst = current().allocate(shape, dtype, buffer, name)
    isa.rand2(dst, 0.0, 1.0)
    return dst


def dropout(x: NkiTensor, rate: Any, dtype: Any = None) -> NkiTensor:
    """x with each element zeroed with probability `rate`."""
    dst = new(x.shape, dtype or x.dtype)
    isa.dropout(dst, x, rate)
    return dst


def gather_flattened(
    data: NkiTensor, indices: NkiTensor, axis: int = 0, dtype: Any = None
) -> NkiTensor:
    """Of each partition, the elements that its own indices name, free axes flattened.

    Raises NotModelled for an axis other than the default: no document says what it does.
    """
    if axis != 0:
        raise NotModelled(f"nki.language.gather_flattened(axis={axis})")
    picks = indices if indices.dtype == "uint32" else unary("copy", indices, "uint32")
    dst = new(indices.shape, data.dtype)
    isa.nc_n_gather(dst, data, picks)
    return dst if dtype is None or dtype == data.dtype else unary("copy", dst, dtype)
