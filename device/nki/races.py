"""Races of the two cores on HBM that both see.

Accesses of different cores are ordered only if the cores have met (barrier, sendrecv) in between.
Two that overlap, of which one is a write, between the same two meetings are a race; but a write
that leaves every byte as it is is none, nor is reading what the core wrote itself: cores that do
not share the work write the same twice.
"""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..isa.base import Instruction
from ..isa.moves import DmaGather, DmaGatherAdd, DmaScatter
from ..memory import ITEMSIZE, Tensor, View
from .written import Written

if TYPE_CHECKING:
    from .launch import Launch
    from .session import Session


class Access(NamedTuple):
    """What a core read or wrote: a view, or the rows of it that an index picked."""

    view: View
    rows: np.ndarray | None
    line: str  # the kernel's
    meetings: int  # before it


class Doubt(NamedTuple):
    """A write that is a race unless it changes nothing."""

    view: View
    before: np.ndarray
    message: str


class Races:
    """The accesses of every core to shared tensors since its last meetings."""

    def __init__(self, launch: "Launch") -> None:
        self._launch = launch
        self._cores = launch.settings.cores
        self._reads: dict[int, list[list[Access]]] = {}
        self._writes: dict[int, list[list[Access]]] = {}

    def watch(self, tensor: Tensor) -> None:
        """The tensor is shared."""
        self._reads[id(tensor)] = [[] for _ in range(self._cores)]
        self._writes[id(tensor)] = [[] for _ in range(self._cores)]

    def note(self, session: "Session", instruction: Instruction, line: str) -> list[Doubt]:
        """An instruction that is about to run. Reports a race of what it reads with what another
        core wrote; of its writes, returns those to `settle` when it has run."""
        doubts: list[Doubt] = []
        for view in instruction.reads():
            if id(view.tensor) in self._reads:
                access = Access(view, _rows(instruction, view), line, session.meetings)
                self._compare(session, access, self._writes, "reads", "writes")
                self._add(self._reads, session, access)
        for view in instruction.writes():
            if id(view.tensor) in self._writes:
                access = Access(view, _rows(instruction, view), line, session.meetings)
                for kept, did in ((self._reads, "reads"), (self._writes, "writes")):
                    self._compare(session, access, kept, "writes", did, doubts)
                self._add(self._writes, session, access)
        return doubts

    def settle(self, doubts: list[Doubt], line: str) -> None:
        """The writes are done: reports those that changed something."""
        for view, before, message in doubts:
            if before.tobytes() != view.array.tobytes():
                self._launch.hazard(message, line)

    def _add(self, kept: dict, session: "Session", access: Access) -> None:
        own = kept[id(access.view.tensor)][session.program]
        if own and own[-1].meetings < session.meetings - 1:
            own.clear()  # all cores have met since
        own.append(access)

    def _compare(
        self,
        session: "Session",
        access: Access,
        kept: dict,
        does: str,
        did: str,
        doubts: list[Doubt] | None = None,
    ) -> None:
        view = access.view
        for core, accesses in enumerate(kept[id(view.tensor)]):
            if core == session.program:
                continue
            for other in accesses:
                if other.meetings == session.meetings and _share_elements(access, other):
                    if does == "reads" and self._wrote(session, access):
                        return
                    message = (
                        f"race: core {session.program} {does} {view} while core {core} {did} it "
                        f"at {other.line}; no barrier orders them"
                    )
                    if doubts is None or not session.data:
                        self._launch.hazard(message, access.line)
                    else:
                        doubts.append(Doubt(view, view.array.copy(), message))
                    return

    def _wrote(self, session: "Session", access: Access) -> bool:
        """Whether the core wrote all that it reads itself since the cores met."""
        touched = Written(access.view.tensor)
        for own in self._writes[id(access.view.tensor)][session.program]:
            if own.meetings == session.meetings and own.rows is None:
                if _place(own.view) == _place(access.view):
                    return True
                touched.add(own.view)
        mask = touched.mask(access.view)
        return bool((mask if access.rows is None else mask[access.rows]).all())


def _place(view: View) -> tuple:
    return view.dtype, view.offset, view.shape, view.strides


def _rows(instruction: Instruction, view: View) -> np.ndarray | None:
    """The rows of the view that an index picks, sorted; None for all, or if the index is not
    known."""
    if not isinstance(instruction, DmaGather | DmaGatherAdd | DmaScatter):
        return None
    if view is not instruction.whole or instruction.index.tensor._bytes is None:
        return None
    numbers = np.unique(instruction.index.array.astype(np.int64))
    return numbers[(numbers >= 0) & (numbers < view.shape[0])]


def _share_elements(a: Access, b: Access) -> bool:
    if not a.view.overlaps(b.view):
        return False
    if a.rows is not None or b.rows is not None:
        return _spans_meet(_spans(a), _spans(b))
    if a.view.box is not None and b.view.box is not None:
        return True
    touched = Written(a.view.tensor)
    touched.add(a.view)
    return touched.any(b.view)


def _spans(access: Access) -> tuple[np.ndarray, np.ndarray]:
    """(first byte, end) of each row, in order."""
    view = access.view
    rows = np.arange(view.shape[0]) if access.rows is None else access.rows
    start = view.offset + rows * view.strides[0]
    inner = zip(view.shape[1:], view.strides[1:], strict=True)
    return start, start + sum((n - 1) * step for n, step in inner) + ITEMSIZE[view.dtype]


def _spans_meet(a: tuple[np.ndarray, np.ndarray], b: tuple[np.ndarray, np.ndarray]) -> bool:
    if not a[0].size or not b[0].size:
        return False
    behind = np.searchsorted(a[1], b[0], "right")  # the first of a that ends behind b's start
    found = behind < len(a[0])
    return bool((a[0][behind[found]] < b[1][found]).any())
