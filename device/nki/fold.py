"""Scalars that a run without data knows: constants, iota, and what copies make of them.

A register may decide what a kernel does next, so a run without data looks up in the traces which
instruction wrote its element last. It knows what a memset, an iota or a register_store wrote, what
an argument holds that no instruction writes, and follows copies to their sources.
"""

from collections.abc import Sequence

from ..isa.dma import DmaCopy as RowCopy
from ..isa.lanes import Copy, Memset
from ..isa.moves import DmaCopy
from ..isa.patterns import Iota, affine
from ..memory import View
from .trace import Issued, Trace

COPIES = (Copy, DmaCopy, RowCopy)


def folded(traces: Sequence[Trace], core: int, view: View) -> int | None:
    """The one element of a view on a core, as an integer; None if only data could tell.

    What another core wrote is not known: only a meeting would order it.
    """
    for number, trace in enumerate(traces):
        if number != core and view.space == "hbm" and _last(trace, view, len(trace.entries)):
            return None
    return _value(traces[core], view, len(traces[core].entries))


def _value(trace: Trace, view: View, before: int) -> int | None:
    place = _last(trace, view, before)
    stored = [s for s in trace.stores if s[0] <= before and s[1].overlaps(view)]
    if stored and stored[-1][0] >= place:
        return stored[-1][2]
    if not place:
        known = view.tensor._bytes is not None and view.space == "hbm"
        return int(view.array.reshape(-1)[0]) if known else None
    entry = trace.entries[place - 1]
    if not isinstance(entry, Issued):
        return None  # what came from another core or rank
    instruction = entry.instruction
    if isinstance(instruction, Memset):
        return int(instruction.value)
    index = _index(entry.writes[0], view)
    if index is None:
        return None
    if isinstance(instruction, Iota):
        shape = instruction.dst.shape
        values = affine(shape[0], instruction.pattern, instruction.offset, instruction.channel)
        return int(values.reshape(shape)[index])
    if isinstance(instruction, COPIES) and instruction.src.shape == instruction.dst.shape:
        element = instruction.src[tuple(slice(i, i + 1) for i in index)]
        return _value(trace, element, place - 1)
    return None


def _last(trace: Trace, view: View, before: int) -> int:
    """1 + the place of the last entry that writes some of the view; 0 for none."""
    for place in range(before, 0, -1):
        if any(view.overlaps(written) for written in trace.entries[place - 1].writes):
            return place
    return 0


def _index(whole: View, element: View) -> tuple[int, ...] | None:
    """Where an element is in a view of the same tensor and dtype, or None."""
    if whole.tensor is not element.tensor or whole.dtype != element.dtype:
        return None
    index, rest = [], element.offset - whole.offset
    if whole.space != "hbm":
        index.append(element.partition - whole.partition)
    for extent, stride in list(zip(whole.shape, whole.strides, strict=True))[len(index) :]:
        step = min(rest // stride, extent - 1) if stride else 0
        rest -= step * stride
        index.append(step)
    inside = all(0 <= i < extent for i, extent in zip(index, whole.shape, strict=True))
    return tuple(index) if inside and not rest else None
