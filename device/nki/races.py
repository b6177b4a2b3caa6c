"""Races of the two cores on HBM that both see.

Accesses of different cores are ordered only if the cores have met (barrier, sendrecv) in between.
Two that overlap, of which one is a write, between the same two meetings are a race.
"""

from typing import TYPE_CHECKING

from ..isa.base import Instruction
from ..memory import Tensor, View
from .written import Written

if TYPE_CHECKING:
    from .launch import Launch
    from .session import Session

Access = tuple[View, str, int]  # what, the kernel's line, meetings before it


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

    def note(self, session: "Session", instruction: Instruction, line: str) -> None:
        """An instruction's accesses. Reports a race with what another core did."""
        for view in instruction.reads():
            if id(view.tensor) in self._reads:
                self._compare(session, view, line, self._writes, "reads", "writes")
                self._add(self._reads, session, view, line)
        for view in instruction.writes():
            if id(view.tensor) in self._writes:
                self._compare(session, view, line, self._reads, "writes", "reads")
                self._compare(session, view, line, self._writes, "writes", "writes")
                self._add(self._writes, session, view, line)

    def _add(self, kept: dict, session: "Session", view: View, line: str) -> None:
        own = kept[id(view.tensor)][session.program]
        if own and own[-1][2] < session.meetings - 1:
            own.clear()  # all cores have met since
        own.append((view, line, session.meetings))

    def _compare(
        self, session: "Session", view: View, line: str, kept: dict, does: str, did: str
    ) -> None:
        for core, accesses in enumerate(kept[id(view.tensor)]):
            if core == session.program:
                continue
            for other, their_line, meetings in accesses:
                if meetings == session.meetings and _share_elements(view, other):
                    self._launch.hazard(
                        f"race: core {session.program} {does} {view} while core {core} {did} it "
                        f"at {their_line}; no barrier orders them",
                        line,
                    )
                    return


def _share_elements(a: View, b: View) -> bool:
    if not a.overlaps(b):
        return False
    if a.box is not None and b.box is not None:
        return True
    touched = Written(a.tensor)
    touched.add(a)
    return touched.any(b)
