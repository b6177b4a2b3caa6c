"""`nki.isa`: copies, transposes and sums by DMA, with indirect addresses."""

from typing import Any

from ..errors import IllegalInstruction
from ..isa.moves import (
    TRANSPOSES,
    DmaCompute,
    DmaCopy,
    DmaGather,
    DmaGatherAdd,
    DmaScatter,
    DmaTranspose,
)
from ..memory import View
from .isa_constants import dge_mode, engine, oob_mode
from .isa_operands import check_moves, engine_name, instruction, integer, member, operator, stored
from .session import NkiInstruction, Session, current
from .tensor import NkiTensor

_mode, _error, _unknown = dge_mode.unknown, oob_mode.error, engine.unknown


def _picks(tensor: Any) -> bool:
    """Whether a vector offset picks the tensor's rows."""
    return (
        isinstance(tensor, NkiTensor)
        and tensor.index is not None
        and (tensor.index.kind == "vector")
    )


def _index(tensor: NkiTensor) -> View:
    assert tensor.index is not None
    return stored(tensor.index.index, "vector_offset")


def _placed(tensor: Any, operand: str, skip: bool) -> View | None:
    """The view; None if its scalar offset is out of bounds and that is to be skipped."""
    moving = isinstance(tensor, NkiTensor) and tensor.index is not None
    if not (moving and skip):
        return stored(tensor, operand)
    try:
        return stored(tensor, operand)
    except IllegalInstruction:
        return None


def _nothing(session: Session, name: str | None) -> NkiInstruction:
    """A transfer that was skipped."""
    now = session.core.timeline.end
    return NkiInstruction(now, now, name or "")


@instruction
def dma_copy(
    dst, src, priority=None, oob_mode=_error, dge_mode=_mode, engine=_unknown, name=None
) -> NkiInstruction:
    """dst = src between HBM and SBUF; a vector offset of either picks rows (gather, scatter)."""
    session = current()
    mode, skip = _mode_name(dge_mode), _skips(oob_mode)
    if _picks(src) and _picks(dst):
        raise IllegalInstruction("src and dst both have a vector offset; limit: one of them")
    if _picks(src):
        target = _placed(dst, "dst", skip)
        if target is None:
            return _nothing(session, name)
        made: Any = DmaGather(target, src.table(), _index(src), src.shape[0], skip, mode)
        return session.issue(made, name)
    if _picks(dst):
        source = _placed(src, "src", skip)
        if source is None:
            return _nothing(session, name)
        made = DmaScatter(dst.table(), source, _index(dst), dst.shape[0], False, skip, mode)
        return session.issue(made, name)
    target, source = _placed(dst, "dst", skip), _placed(src, "src", skip)
    if target is None or source is None:
        return _nothing(session, name)
    check_moves(dst, src)
    level = None if priority is None else integer(priority, "priority")
    trigger = engine_name(engine)
    return session.issue(DmaCopy(target, source, mode, trigger, level, trigger), name)


def _mode_name(mode: Any) -> str:
    return member(mode, dge_mode, "dge_mode")


def _skips(mode: Any) -> bool:
    return member(mode, oob_mode, "oob_mode") == "skip"


@instruction
def dma_transpose(
    dst, src, axes=None, priority=None, dge_mode=_mode, oob_mode=_error, name=None
) -> NkiInstruction:
    """dst = src with its first and last axes exchanged; a vector offset of src gathers first."""
    session = current()
    order = _order(src, axes)
    mode = _mode_name(dge_mode)
    if _picks(src):
        table, index = src.table(), _index(src)
        made: Any = DmaGather(
            stored(dst, "dst"), table, index, src.shape[0], _skips(oob_mode), mode, order
        )
        return session.issue(made, name)
    if _skips(oob_mode) and src.index is None:
        raise IllegalInstruction("oob_mode skip goes with an indirect src only")
    level = None if priority is None else integer(priority, "priority")
    made = DmaTranspose(stored(dst, "dst"), stored(src, "src"), order, mode, level)
    return session.issue(made, name)


def _order(src: Any, axes: Any) -> tuple[int, ...]:
    if axes is not None:
        return tuple(integer(axis, "axes") for axis in axes)
    count = len(src.shape) if isinstance(src, NkiTensor) else 0
    return TRANSPOSES.get(count, ())


@instruction
def dma_compute(
    dst, srcs, reduce_op, scales=None, unique_indices=True, oob_mode=_error, name=None
) -> NkiInstruction:
    """dst = the sum of srcs; one with a vector offset makes it a scatter or gather onto dst."""
    session = current()
    if scales is not None and any(float(scale) != 1 for scale in scales):
        raise IllegalInstruction(f"scales is {list(scales)}; they must be 1.0")
    op = operator(reduce_op)
    skip = _skips(oob_mode)
    picked = [src for src in srcs if _picks(src)]
    if not picked and not _picks(dst):
        operands = tuple(stored(src, "srcs") for src in srcs)
        return session.issue(DmaCompute(stored(dst, "dst"), operands, op), name)
    if op != "add" or len(srcs) != 2 or not unique_indices:
        raise IllegalInstruction(
            f"{len(srcs)} srcs, reduce_op {op}, unique_indices {unique_indices}: with a vector "
            "offset allowed are 2 srcs, add, unique indices"
        )
    others = [src for src in srcs if not _picks(src)]
    if _picks(dst):
        if len(others) != 1:
            raise IllegalInstruction("a scatter needs one src like dst, and one without an offset")
        made: Any = DmaScatter(
            dst.table(), stored(others[0], "srcs"), _index(dst), dst.shape[0], True, skip
        )
        return session.issue(made, name)
    if len(picked) != 1 or not _same(others[0], dst):
        raise IllegalInstruction("a gather needs dst itself as the src without an offset")
    source = picked[0]
    made = DmaGatherAdd(stored(dst, "dst"), source.table(), _index(source), source.shape[0], skip)
    return session.issue(made, name)


def _same(a: NkiTensor, b: NkiTensor) -> bool:
    return (a.storage, a.offset, a.shape) == (b.storage, b.offset, b.shape)
