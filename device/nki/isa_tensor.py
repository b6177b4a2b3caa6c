"""`nki.isa`: matmul and transpose, MX formats included."""

from typing import Any

import numpy as np

from ..errors import IllegalInstruction
from ..isa.indirection import TENSOR_GROUP, IndirectView, with_indices
from ..isa.matrix import TILE, Matmul, MatmulMx, QuantizeMx, Transpose
from ..memory import View
from .isa_constants import engine, matmul_perf_mode
from .isa_operands import ELEMENTS, column_view, engine_name, instruction, member, two, view
from .session import NkiInstruction, Session, current
from .tensor import NkiTensor

_FULL = (TILE, TILE)
_VECTOR_LIMIT = 32
_none, _unknown = matmul_perf_mode.none, engine.unknown


def _accumulation(session: Session, dst: View, accumulate: Any) -> bool | np.ndarray:
    """What `accumulate` means: as given, or found element by element from what was written."""
    whole = dst.base if isinstance(dst, IndirectView) else dst
    if accumulate is not None:
        if accumulate:
            session.check_accumulation(whole, stated=True)
        return bool(accumulate)
    written = session.written(whole)
    if not written.any(whole):
        return False
    session.check_accumulation(whole, stated=False)
    if written.covers(whole):
        return True
    if whole is not dst:
        raise IllegalInstruction("dst is indirect and was written in part: accumulate is needed")
    return written.mask(dst).copy()


@instruction
def nc_matmul(
    dst, stationary, moving, is_stationary_onezero=False, is_moving_onezero=False,
    is_transpose=False, accumulate=None, tile_position=(), tile_size=(), perf_mode=_none,
    name=None,
) -> NkiInstruction:  # fmt: skip
    """dst = stationary.T @ moving, over dst or onto it.

    Without `accumulate` what was written before is added to, the rest overwritten.
    """
    session = current()
    size, position = _tiling(tile_size, tile_position)
    target, left, right = (
        column_view(tensor, operand, TENSOR_GROUP)
        for tensor, operand in ((dst, "dst"), (stationary, "stationary"), (moving, "moving"))
    )
    made = Matmul(
        target, left, right,
        accumulate=_accumulation(session, target, accumulate),
        double_row=member(perf_mode, matmul_perf_mode, "perf_mode") == "double_row",
        transpose=bool(is_transpose),
        tfloat32=stationary.dtype.name == "tfloat32" or moving.dtype.name == "tfloat32",
        onezero=bool(is_stationary_onezero) + bool(is_moving_onezero),
        tile_size=size, tile_position=position,
    )  # fmt: skip
    return session.issue(with_indices(made, target, left, right), name)


@instruction
def nc_transpose(dst, data, engine=_unknown, name=None) -> NkiInstruction:
    """dst = data.T. Without an engine: Tensor for SBUF to PSUM beyond [32, 32], else Vector."""
    target, source = view(dst, "dst"), view(data, "data")
    chosen = engine_name(engine)
    if not chosen:
        small = max(source.shape[0], source.free) <= _VECTOR_LIMIT
        to_psum = source.space == "sbuf" and target.space == "psum"
        chosen = "tensor" if to_psum and not small else "vector"
    return current().issue(Transpose(target, source, chosen), name)


def _tiling(size: Any, position: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    """(tile_size, tile_position): both as given, or the whole array."""
    given = [value is not None and len(value) > 0 for value in (size, position)]
    if given[0] != given[1]:
        raise IllegalInstruction(
            f"tile_size is {size} and tile_position {position}; both are needed, or neither"
        )
    return two(size, _FULL, "tile_size"), two(position, (0, 0), "tile_position")


def _packed(tensor: Any, operand: str) -> tuple[View, str]:
    """A packed tensor's view and the format of its elements."""
    found = column_view(tensor, operand, TENSOR_GROUP, bits=True)
    element = ELEMENTS.get(tensor.dtype.name)
    if element is None:
        raise IllegalInstruction(f"{operand} is {tensor.dtype}; allowed: {', '.join(ELEMENTS)}")
    return found, element


def _scales(tensor: Any, operand: str) -> View:
    if isinstance(tensor, NkiTensor) and tensor.dtype.name not in ("uint8", "float8_e8m0fnu"):
        raise IllegalInstruction(f"{operand} is {tensor.dtype}; allowed: float8_e8m0fnu, uint8")
    return column_view(tensor, operand, TENSOR_GROUP, bits=True)


def _check_indices(tile_position: Any, *pairs: tuple[NkiTensor, NkiTensor]) -> None:
    """Data and its scales are picked by one index or none, and not together with row tiles."""
    for data, scale in pairs:
        indices = [tensor.index and tensor.index.index for tensor in (data, scale)]
        if indices[0] is not indices[1]:
            raise IllegalInstruction(f"{data} and its scales do not have the same index")
        if indices[0] is not None and two(tile_position, (0, 0), "tile_position") != (0, 0):
            raise IllegalInstruction(
                f"tile_position is {tuple(tile_position)}; (0, 0) with an index"
            )


@instruction
def nc_matmul_mx(
    dst, stationary, moving, stationary_scale, moving_scale, tile_position=None, tile_size=None,
    accumulate=None, name=None,
) -> NkiInstruction:  # fmt: skip
    """dst = stationary.T @ moving of MX tensors with their scales (NeuronCore-v4)."""
    session = current()
    target = column_view(dst, "dst", TENSOR_GROUP)
    left, left_element = _packed(stationary, "stationary")
    right, right_element = _packed(moving, "moving")
    left_scale = _scales(stationary_scale, "stationary_scale")
    right_scale = _scales(moving_scale, "moving_scale")
    _check_indices(tile_position, (stationary, stationary_scale), (moving, moving_scale))
    size, position = _tiling(tile_size, tile_position)
    made = MatmulMx(
        target, left, right, left_scale, right_scale, (left_element, right_element),
        accumulate=_accumulation(session, target, accumulate),
        tile_size=size, tile_position=position,
    )  # fmt: skip
    operands = target, left, right, left_scale, right_scale
    return session.issue(with_indices(made, *operands), name)


@instruction
def quantize_mx(dst, src, dst_scale, name=None) -> NkiInstruction:
    """dst and dst_scale = the MX form of src (NeuronCore-v4)."""
    target, element = _packed(dst, "dst")
    made = QuantizeMx(target, view(src, "src"), _scales(dst_scale, "dst_scale"), element)
    return current().issue(made, name)
