"""How arguments of `nki.isa` functions become operands of instructions."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numpy as np

from ..errors import BadInput, IllegalInstruction, TrnsimError
from ..isa.indirection import LANE_GROUP, IndirectView
from ..isa.numerics import Accumulators
from ..memory import View
from .dtypes import STORED_AS_INTEGERS
from .errors import at_line
from .isa_constants import engine as engines
from .isa_constants import reduce_cmd as commands
from .opcodes import as_opcode
from .registers import VirtualRegister
from .session import Session, current, running
from .tensor import NkiTensor

P = ParamSpec("P")
R = TypeVar("R")

NAMES = {
    "bitwise_and": "and", "bitwise_or": "or", "bitwise_xor": "xor", "invert": "not",
    "left_shift": "shift_left", "right_shift": "shift_right_logical",
    "exp": "exponential", "sigmoid": "logistic", "sin": "sine",
    "gelu_apprx_tanh": "gelu_tanh", "gelu_apprx_sigmoid": "gelu_sigmoid",
    "gelu_apprx_sigmoid_dx": "gelu_sigmoid_dx",
    "max": "maximum", "min": "minimum", "sum": "add", "prod": "multiply", "mean": "average",
}  # fmt: skip
"""Opcodes that instructions call by another name."""

NO_INSTRUCTION = {
    "divide": "multiply by nisa.reciprocal", "mod": "no instruction has it",
    "fmod": "no instruction has it",
}  # fmt: skip
"""Operators of nki.language that no engine has (release notes of NKI 0.3, known limitations)."""

PACKED = frozenset(name for name in STORED_AS_INTEGERS if name.endswith("_x4"))
EXPONENT = "float8_e8m0fnu"
BITS = PACKED | {EXPONENT}
"""Dtypes that the device stores as unsigned integers: only MX instructions know their values."""
ELEMENTS = {
    "float8_e5m2_x4": "f8E5M2", "float8_e4m3fn_x4": "f8E4M3FN", "float4_e2m1fn_x4": "f4E2M1FN",
}  # fmt: skip
"""Element type of the packed dtypes."""


def instruction(function: Callable[P, R]) -> Callable[P, R]:
    """Puts the kernel's source line in front of the errors of a function of `nki.isa`.

    Tells the core whether the kernel names the engine.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        session = running()
        if session is not None:
            session.core.stated = _names_engine(args, kwargs)
        try:
            return function(*args, **kwargs)
        except TrnsimError as error:
            found = running()
            raise at_line(error, found.line if found else "") from None
        except TypeError as error:
            _check_call(function, args, kwargs)
            raise error from None

    return call


def _check_call(function: Callable, args: tuple, kwargs: dict) -> None:
    """Raises BadInput with the kernel's line if the function does not take these arguments."""
    signature = inspect.signature(function)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        found = running()
        wrong = BadInput(f"nisa.{function.__name__}", error, ", ".join(signature.parameters))
        raise at_line(wrong, found.line if found else "") from None


def _names_engine(args: tuple, kwargs: dict[str, Any]) -> bool:
    named = kwargs.get("engine")
    if named is None:
        named = next((value for value in args if type(value) is engines), None)
    return named is not None and named is not engines.unknown


def stored(tensor: Any, operand: str = "operand") -> View:
    """The view of a tensor of any dtype."""
    if type(tensor) is not NkiTensor:
        raise BadInput(operand, tensor, "an NKI tensor")
    index = tensor.index
    if index is None:
        return tensor.device_view()
    if index.kind == "tensor":
        raise IllegalInstruction(f"{operand} does not support tensor indirection (.indirect)")
    return current().operand(tensor)


def view(tensor: Any, operand: str = "operand") -> View:
    """The view of a tensor whose values an engine computes with: not packed, no exponents."""
    found = stored(tensor, operand)
    if tensor.dtype.name in BITS:
        raise IllegalInstruction(
            f"{operand} is {tensor.dtype}; only MX instructions compute with it"
        )
    return found


def column_view(tensor: Any, operand: str, group: int = LANE_GROUP, bits: bool = False) -> View:
    """As `view` (as `stored` with `bits`), for an operand that may have tensor indirection."""
    if type(tensor) is not NkiTensor or tensor.index is None or tensor.index.kind != "tensor":
        return stored(tensor, operand) if bits else view(tensor, operand)
    found = tensor.index
    rows = tensor.shape[0]
    base = tensor.view_at(tensor.offset, (rows, found.extent), (tensor.strides[0], 1))
    return IndirectView(base, view(found.index, "index"), tensor.shape[1], group)


def refuse_tfloat32(tensor: Any, operand: str) -> None:
    """The operand may be of any dtype but tfloat32."""
    if isinstance(tensor, NkiTensor) and tensor.dtype.name == "tfloat32":
        raise IllegalInstruction(f"{operand} is tfloat32; allowed: any other dtype")


def check_moves(dst: NkiTensor, src: NkiTensor) -> None:
    """A copy keeps the bits of packed and exponent dtypes: no cast from or to them.

    The unsigned integer of their width holds the same bits. Raises IllegalInstruction.
    """
    for one, other in ((dst, src), (src, dst)):
        if one.dtype.name in BITS and one.dtype != other.dtype:
            if one.dtype.device != other.dtype.device:
                raise IllegalInstruction(
                    f"src is {src.dtype} and dst {dst.dtype}; {one.dtype} does not cast"
                )


def optional_scalar(value: Any, operand: str) -> View | float | int | None:
    """A number, a [P, 1] column, or None."""
    return None if value is None else scalar(value, operand)


def scalar(value: Any, operand: str) -> View | float | int:
    """A number or a [P, 1] column."""
    if type(value) is float or type(value) is int:
        return value
    if isinstance(value, NkiTensor):
        return view(value, operand)
    if isinstance(value, VirtualRegister):
        return value.read_register()
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, np.generic | np.ndarray) and value.size == 1:
        item = np.asarray(value).reshape(-1)[0]
        return int(item) if item.dtype.kind in "iub" else float(item)
    raise BadInput(operand, value, "a number or a [P, 1] tensor")


def number(value: Any, operand: str) -> float | int:
    """A number that is known when the kernel is built, or a register's."""
    found = scalar(value, operand)
    if isinstance(found, View):
        raise BadInput(operand, value, "a number")
    return found


def integer(value: Any, operand: str) -> int:
    """An integer, or a register's."""
    found = number(value, operand)
    if int(found) != found:
        raise BadInput(operand, value, "an integer")
    return int(found)


_known: dict[Any, str] = {}


def operator(op: Any) -> str:
    """The instruction's name of an `op=`. Raises IllegalInstruction for one without hardware."""
    found = _known.get(op) if op.__hash__ else None
    if found is None:
        name = as_opcode(op).name
        if name in NO_INSTRUCTION:
            raise IllegalInstruction(f"op {name} is no operator: {NO_INSTRUCTION[name]}")
        found = _known[op] = NAMES.get(name, name)
    return found


def optional_operator(op: Any) -> str | None:
    """As `operator`, None for None."""
    return None if op is None else operator(op)


def engine_name(engine: Any) -> str:
    """The name of an engine, empty for unknown."""
    if engine is engines.unknown or engine is None:
        return ""
    return member(engine, engines, "engine")


def member(value: Any, kind: Any, operand: str) -> str:
    """The name of an enumeration's member, given as itself or by its value."""
    try:
        return kind(value).name
    except ValueError:
        allowed = [f"nisa.{kind.__name__}.{member.name}" for member in kind]
        raise BadInput(operand, value, allowed) from None


def command_name(command: Any) -> str:
    """The name of a reduce_cmd."""
    return member(command, commands, "reduce_cmd")


def accumulators(session: Session, engine: str) -> Accumulators:
    """The accumulator registers of an engine of this core."""
    key = f"accumulators of {engine}"
    found = session.state.get(key)
    if found is None:
        found = session.state[key] = Accumulators()
    return found


def axes_of(axis: Any, ndim: int) -> int:
    """How many last axes an `axis` argument names. Raises IllegalInstruction for others."""
    given = axis if isinstance(axis, tuple | list) else (axis,)
    axes = sorted(int(a) % ndim for a in given)
    if not axes or axes != list(range(ndim - len(axes), ndim)) or axes[0] == 0:
        raise IllegalInstruction(
            f"axis is {axis} of {ndim} axes; allowed: the last free axes, not the partition axis"
        )
    return len(axes)


def pairs(pattern: Any) -> tuple[tuple[int, int], ...]:
    """[[step, count], ...] as integers."""
    try:
        found = tuple((int(step), int(count)) for step, count in pattern)
    except (TypeError, ValueError):
        raise BadInput("pattern", pattern, "[[step, count], ...]") from None
    return found


def two(value: Any, default: tuple[int, int], operand: str) -> tuple[int, int]:
    """A pair of integers, or the default for nothing."""
    if value is None or len(value) == 0:
        return default
    if len(value) != 2:
        raise BadInput(operand, value, "a pair of integers")
    return int(value[0]), int(value[1])
