"""`nki.isa`: the activation instructions of the Scalar engine."""

from typing import Any

from ..errors import IllegalInstruction
from ..isa.activations import Activation
from ..isa.indirection import with_indices
from .isa_constants import reduce_cmd
from .isa_operands import (
    accumulators,
    column_view,
    command_name,
    instruction,
    operator,
    optional_operator,
    refuse_tfloat32,
    scalar,
    view,
)
from .session import NkiInstruction, current

FUNCTIONS = frozenset(
    {
        "copy", "square", "logistic", "relu", "prelu", "gelu", "gelu_dx", "gelu_tanh",
        "gelu_sigmoid", "gelu_sigmoid_dx", "silu", "silu_dx", "tanh", "softplus", "mish", "erf",
        "erf_dx", "exponential", "log", "sine", "arctan", "sqrt", "rsqrt", "reciprocal", "sign",
        "abs",
    }
)  # fmt: skip
"""Those of the table of activation functions (nki.api.shared.rst)."""

_idle = reduce_cmd.idle


def _function(op: Any) -> str:
    found = operator(op)
    if found not in FUNCTIONS:
        raise IllegalInstruction(
            f"op {op} is no activation function; allowed: {', '.join(sorted(FUNCTIONS))}"
        )
    return found


def _reduction(op: Any) -> str:
    return optional_operator(op) or "add"


@instruction
def activation(
    dst, op, data, bias=None, scale=1.0, reduce_op=None, reduce_res=None, reduce_cmd=_idle,
    name=None,
) -> NkiInstruction:  # fmt: skip
    """dst = op(data * scale + bias); its rows' sums go into the registers as reduce_cmd says."""
    session = current()
    refuse_tfloat32(bias, "bias")
    made = Activation(
        column_view(dst, "dst"), column_view(data, "data"), _function(op),
        scale=scalar(scale, "scale"), bias=0.0 if bias is None else scalar(bias, "bias"),
        command=command_name(reduce_cmd), reduce_op=_reduction(reduce_op),
        result=None if reduce_res is None else view(reduce_res, "reduce_res"),
        registers=accumulators(session, "scalar"),
    )  # fmt: skip
    return session.issue(with_indices(made, made.dst, made.src), name)


@instruction
def activation_reduce(
    dst, op, data, reduce_op, reduce_res, bias=None, scale=1.0, name=None
) -> NkiInstruction:
    """As activation with reduce_cmd.reset_reduce."""
    return activation.__wrapped__(  # type: ignore[attr-defined]
        dst, op, data, bias, scale, reduce_op, reduce_res, reduce_cmd.reset_reduce, name
    )


@instruction
def activate2(
    dst, op, data, imm0, imm1, op0, op1, relu_param=0.0, reverse0=False, reverse1=False,
    reduce_op=None, reduce_res=None, reduce_cmd=_idle, name=None,
) -> NkiInstruction:  # fmt: skip
    """dst = op((data `op0` imm0) `op1` imm1), with any of five reductions (NeuronCore-v4)."""
    session = current()
    made = Activation(
        column_view(dst, "dst"), column_view(data, "data"), _function(op),
        scale=scalar(imm0, "imm0"), bias=scalar(imm1, "imm1"),
        op0=optional_operator(op0) or "bypass", op1=optional_operator(op1) or "bypass",
        reverse0=bool(reverse0), reverse1=bool(reverse1), slope=scalar(relu_param, "relu_param"),
        command=command_name(reduce_cmd), reduce_op=_reduction(reduce_op),
        result=None if reduce_res is None else view(reduce_res, "reduce_res"),
        registers=accumulators(session, "scalar"), pipeline=True,
    )  # fmt: skip
    return session.issue(with_indices(made, made.dst, made.src), name)
