"""`nl.add`, `nl.exp`, ...: what `op=` of instructions takes, and functions of tiles themselves."""

from typing import Any

from ..errors import BadInput

BINARY = (
    "add", "subtract", "multiply", "divide", "maximum", "minimum", "abs_max", "abs_min", "power",
    "equal", "not_equal", "less", "less_equal", "greater", "greater_equal",
    "bitwise_and", "bitwise_or", "bitwise_xor", "left_shift", "right_shift",
    "logical_and", "logical_or", "logical_xor", "fmod", "mod",
)  # fmt: skip
UNARY = (
    "abs", "square", "exp", "log", "sqrt", "rsqrt", "tanh", "sigmoid", "relu",
    "gelu", "gelu_apprx_sigmoid", "gelu_apprx_tanh", "gelu_dx", "gelu_apprx_sigmoid_dx",
    "silu", "silu_dx", "softplus", "mish", "erf", "erf_dx", "reciprocal", "copy",
    "sin", "cos", "tan", "arctan", "ceil", "floor", "trunc", "negative", "sign",
    "invert", "logical_not",
)  # fmt: skip
REDUCTIONS = ("sum", "max", "min", "mean", "prod", "var", "all")
MARKS = ("bypass", "average", "prelu")
"""Opcodes that are no functions: nothing, the mean of partitions, ReLU with a slope."""


class Opcode:
    """An operator by its NKI name. Called on tiles inside a kernel it returns a new tile."""

    __slots__ = ("name", "__name__")

    def __init__(self, name: str) -> None:
        self.name = self.__name__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from .tiles import evaluate  # which uses the instructions, which use opcodes

        return evaluate(self.name, *args, **kwargs)

    def __repr__(self) -> str:
        return f"nl.{self.name}"

    def __str__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple:
        return as_opcode, (self.name,)


OPCODES = {name: Opcode(name) for name in (*BINARY, *UNARY, *REDUCTIONS, *MARKS)}
"""By name; two of one name are one object."""


def as_opcode(op: Any) -> Opcode:
    """The opcode that `op=` means: an opcode, its name, or a numpy function of that name.

    Raises BadInput for others.
    """
    if type(op) is Opcode:
        return op
    found = OPCODES.get(op if isinstance(op, str) else getattr(op, "__name__", ""))
    if found is None:
        raise BadInput("op", op, OPCODES)
    return found
