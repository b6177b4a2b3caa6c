"""`nki.isa`: elementwise instructions, reductions, scans and searches of Vector (and GpSimd)."""

import math
from typing import Any

from ..errors import IllegalInstruction
from ..isa.accumulate import (
    FP32_MIN,
    Exponential,
    RangeSelect,
    SelectReduce,
    TensorScalarCumulative,
    TensorScalarReduce,
)
from ..isa.indirection import with_indices
from ..isa.lanes import (
    Copy,
    Memset,
    Reciprocal,
    ScalarTensorTensor,
    TensorReduce,
    TensorScalar,
    TensorTensor,
    exact_integers,
)
from ..isa.scan import TensorTensorScan
from ..isa.search import BnAggr, BnStats, FindIndex8, MatchReplace8, Max8
from ..isa.shuffle import CopyPredicated, StreamShuffle
from ..memory import View
from .isa_constants import engine, reduce_cmd
from .isa_operands import (
    EXPONENT,
    PACKED,
    accumulators,
    axes_of,
    check_moves,
    column_view,
    command_name,
    engine_name,
    instruction,
    integer,
    number,
    operator,
    optional_operator,
    optional_scalar,
    refuse_tfloat32,
    scalar,
    stored,
    view,
)
from .session import NkiInstruction, current
from .tensor import NkiTensor

_unknown, _idle, _reset_reduce = engine.unknown, reduce_cmd.idle, reduce_cmd.reset_reduce


def _issue(made: Any, name: str | None, *indirect: View) -> NkiInstruction:
    """Issues an instruction; `indirect` are the operands that may have tensor indirection."""
    return current().issue(with_indices(made, *indirect), name)


def _in_psum(*operands: View) -> bool:
    return any(operand.space == "psum" for operand in operands)


@instruction
def tensor_copy(dst, src, engine=_unknown, name=None, dtype=None) -> NkiInstruction:
    """dst = src; Vector unless an engine is named. `dtype`, which kernels of NKI 0.2 give, is that
    of no operand: the values are rounded to dst's."""
    target, source = column_view(dst, "dst", bits=True), column_view(src, "src", bits=True)
    check_moves(dst, src)
    made = Copy(target, source, engine_name(engine) or "vector")
    return _issue(made, name, target, source)


@instruction
def memset(dst, value, engine=_unknown, name=None) -> NkiInstruction:
    """dst = a constant; Vector unless GpSimd is named. Packed dtypes to 0 only."""
    target, constant = stored(dst, "dst"), number(value, "value")
    if dst.dtype.name in PACKED and constant != 0:
        raise IllegalInstruction(f"value is {value}; a {dst.dtype} can be set to 0 only")
    if dst.dtype.name == EXPONENT:
        constant = _exponent_bits(constant)
    return _issue(Memset(target, constant, engine_name(engine) or "vector"), name)


def _exponent_bits(value: float) -> int:
    """The byte of float8_e8m0fnu for a power of two; 0 is its least value."""
    mantissa, exponent = math.frexp(value)
    if value and mantissa != 0.5:
        raise IllegalInstruction(f"value is {value}; float8_e8m0fnu holds powers of two")
    return min(max(exponent - 1 + 127, 0), 254) if value else 0


@instruction
def tensor_tensor(dst, data1, data2, op, engine=_unknown, name=None) -> NkiInstruction:
    """dst = data1 `op` data2. Without an engine: GpSimd for power and for 32-bit integers in
    SBUF, else Vector."""
    target, a = column_view(dst, "dst"), column_view(data1, "data1")
    b = view(data2, "data2")
    chosen, what = engine_name(engine), operator(op)
    if not chosen:
        integers = exact_integers(what, target, a, b) and not _in_psum(target, a, b)
        chosen = "gpsimd" if what == "power" or integers else "vector"
    return _issue(TensorTensor(target, a, b, what, chosen), name, target, a)


@instruction
def tensor_scalar(
    dst, data, op0, operand0, reverse0=False, op1=None, operand1=None, reverse1=False,
    engine=_unknown, name=None,
) -> NkiInstruction:  # fmt: skip
    """dst = (data `op0` operand0) `op1` operand1.

    Without an engine: GpSimd for rsqrt, else Vector.
    """
    first, second = operator(op0), optional_operator(op1)
    chosen = engine_name(engine) or ("gpsimd" if first == "rsqrt" else "vector")
    made = TensorScalar(
        column_view(dst, "dst"), column_view(data, "data"),
        first, optional_scalar(operand0, "operand0"), second, optional_scalar(operand1, "operand1"),
        bool(reverse0), bool(reverse1), chosen,
    )  # fmt: skip
    return _issue(made, name, made.dst, made.src)


@instruction
def scalar_tensor_tensor(
    dst, data, op0, operand0, op1, operand1, reverse0=False, reverse1=False, name=None
) -> NkiInstruction:
    """dst = (data `op0` operand0) `op1` operand1, operand1 a tensor."""
    made = ScalarTensorTensor(
        view(dst, "dst"), view(data, "data"), operator(op0), scalar(operand0, "operand0"),
        operator(op1), view(operand1, "operand1"), bool(reverse0), bool(reverse1),
    )  # fmt: skip
    return _issue(made, name)


@instruction
def tensor_reduce(dst, op, data, axis, negate=False, keepdims=False, name=None) -> NkiInstruction:
    """dst = data reduced along its last free axes."""
    source = column_view(data, "data")
    made = TensorReduce(
        column_view(dst, "dst"),
        source,
        operator(op),
        axes_of(axis, len(source.shape)),
        bool(negate),
    )
    return _issue(made, name, made.dst, source)


@instruction
def reciprocal(dst, data, name=None) -> NkiInstruction:
    """dst = 1 / data."""
    return _issue(Reciprocal(view(dst, "dst"), view(data, "data")), name)


@instruction
def tensor_copy_predicated(dst, src, predicate, reverse_pred=False, name=None) -> NkiInstruction:
    """dst = src where predicate is true."""
    source = view(src, "src") if isinstance(src, NkiTensor) else number(src, "src")
    made = CopyPredicated(
        column_view(dst, "dst"), source, column_view(predicate, "predicate"), bool(reverse_pred)
    )
    return _issue(made, name, made.dst, made.predicate)


@instruction
def nc_stream_shuffle(dst, src, shuffle_mask, name=None) -> NkiInstruction:
    """dst[i] = src[shuffle_mask[i]] in each quadrant of partitions; 255 leaves dst[i]."""
    mask = tuple(integer(entry, "shuffle_mask") for entry in shuffle_mask)
    return _issue(StreamShuffle(stored(dst, "dst"), stored(src, "src"), mask), name)


# ---- with the accumulator registers ---------------------------------------------------------


@instruction
def tensor_scalar_reduce(
    dst, data, op0, operand0, reduce_op, reduce_res=None, reverse0=False,
    reduce_cmd=_reset_reduce, reduce_init=None, reduce_res_negate=False, name=None,
) -> NkiInstruction:  # fmt: skip
    """dst = data `op0` operand0, its rows reduced into the registers and reduce_res."""
    session = current()
    made = TensorScalarReduce(
        column_view(dst, "dst"), column_view(data, "data"),
        operator(op0), optional_scalar(operand0, "operand0"), operator(reduce_op),
        _column(reduce_res), bool(reverse0), command_name(reduce_cmd),
        optional_scalar(reduce_init, "reduce_init"), bool(reduce_res_negate),
        accumulators(session, "vector"),
    )  # fmt: skip
    return _issue(made, name, made.dst, made.src)


def _column(tensor: Any) -> View | None:
    return None if tensor is None else view(tensor, "reduce_res")


@instruction
def range_select(
    dst, on_true_tile, comp_op0, comp_op1, bound0, bound1, reduce_cmd=_reset_reduce,
    reduce_res=None, reduce_op="maximum", range_start=0, on_false_value=FP32_MIN, name=None,
) -> NkiInstruction:  # fmt: skip
    """dst = on_true_tile where both comparisons of range_start + position hold, else FP32_MIN."""
    session = current()
    made = RangeSelect(
        view(dst, "dst"), view(on_true_tile, "on_true_tile"),
        operator(comp_op0), operator(comp_op1), view(bound0, "bound0"), view(bound1, "bound1"),
        _column(reduce_res), command_name(reduce_cmd), operator(reduce_op),
        integer(range_start, "range_start"), number(on_false_value, "on_false_value"),
        accumulators(session, "vector"),
    )  # fmt: skip
    return session.issue(made, name)


@instruction
def select_reduce(
    dst, predicate, on_true, on_false, reduce_res=None, reduce_cmd=_idle, reduce_op="maximum",
    reverse_pred=False, name=None,
) -> NkiInstruction:  # fmt: skip
    """dst = on_true where predicate is true, else on_false; the rows' maximum."""
    session = current()
    refuse_tfloat32(on_true, "on_true")
    made = SelectReduce(
        view(dst, "dst"), view(predicate, "predicate"), view(on_true, "on_true"),
        scalar(on_false, "on_false"), _column(reduce_res), command_name(reduce_cmd),
        operator(reduce_op), bool(reverse_pred), accumulators(session, "vector"),
    )  # fmt: skip
    return session.issue(made, name)


@instruction
def tensor_scalar_cumulative(
    dst, src, op0, op1, imm0, imm1=None, reduce_cmd=_reset_reduce, name=None
) -> NkiInstruction:
    """dst[i] = reg = (src[i] `op0` imm0) `op1` reg, along each row."""
    session = current()
    made = TensorScalarCumulative(
        column_view(dst, "dst"), column_view(src, "src"),
        operator(op0), operator(op1), scalar(imm0, "imm0"),
        optional_scalar(imm1, "imm1"), command_name(reduce_cmd), accumulators(session, "vector"),
    )  # fmt: skip
    return _issue(made, name, made.dst, made.src)


@instruction
def exponential(
    dst, src, max_value=0.0, reduce_res=None, reduce_cmd=_idle, reduce_init=0.0, name=None
) -> NkiInstruction:
    """dst = exp(src - max_value) on Vector, and the rows' sums (NeuronCore-v4)."""
    session = current()
    made = Exponential(
        column_view(dst, "dst"), column_view(src, "src"),
        scalar(max_value, "max_value"), _column(reduce_res),
        command_name(reduce_cmd), scalar(reduce_init, "reduce_init"),
        accumulators(session, "vector"),
    )  # fmt: skip
    return _issue(made, name, made.dst, made.src)


@instruction
def tensor_tensor_scan(
    dst, data0, data1, initial, op0, op1, reverse0=False, reverse1=False, name=None
) -> NkiInstruction:
    """dst[i] = (data0[i] `op0` dst[i - 1]) `op1` data1[i], along each row."""
    made = TensorTensorScan(
        view(dst, "dst"), view(data0, "data0"), view(data1, "data1"), scalar(initial, "initial"),
        operator(op0), operator(op1), bool(reverse0), bool(reverse1),
    )  # fmt: skip
    return _issue(made, name)


# ---- statistics and searches -----------------------------------------------------------------


@instruction
def bn_stats(dst, data, name=None) -> NkiInstruction:
    """dst[P, 6] = count, mean and variance * count of the even, then of the odd elements."""
    return _issue(BnStats(view(dst, "dst"), view(data, "data")), name)


@instruction
def bn_aggr(dst, data, name=None) -> NkiInstruction:
    """dst[P, 2] = mean and variance of the statistics of bn_stats."""
    return _issue(BnAggr(view(dst, "dst"), view(data, "data")), name)


@instruction
def max8(dst, src, name=None) -> NkiInstruction:
    """dst[P, 8] = the eight largest of each partition, in descending order."""
    return _issue(Max8(view(dst, "dst"), view(src, "src")), name)


@instruction
def nc_find_index8(dst, data, vals, name=None) -> NkiInstruction:
    """dst[P, 8] = positions of eight values; all ones where there is none."""
    return _issue(FindIndex8(view(dst, "dst"), view(data, "data"), view(vals, "vals")), name)


@instruction
def nc_match_replace8(dst, data, vals, imm, dst_idx=None, name=None) -> NkiInstruction:
    """dst = data with one occurrence of each of eight values replaced by imm."""
    index = None if dst_idx is None else view(dst_idx, "dst_idx")
    made = MatchReplace8(
        view(dst, "dst"), view(data, "data"), view(vals, "vals"), float(number(imm, "imm")), index
    )
    return _issue(made, name)
