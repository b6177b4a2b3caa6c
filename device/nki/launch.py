"""The run of a kernel on the cores of one logical core.

Cores are threads that take turns (see `Turns`). Tensors in shared HBM are the same on all cores:
the n-th that one core allocates is the n-th of the others. A logical core is one rank: what it
asks of other ranks goes out through `steps`.
"""

import math
import time
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..chip import Chip
from ..dtypes import numpy_dtype
from ..errors import BadInput, IllegalInstruction, TrnsimError
from ..memory import Memory, Tensor, View
from .dtypes import DType
from .errors import DeadlockError, at_line, located
from .interconnect import Interconnect, Landed, Offer, OneRank, Stand, land_alone, meetings
from .races import Races
from .session import Session
from .tensor import MemoryRegion, Storage
from .timeline import KernelCore
from .turns import Turns
from .written import Written


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a kernel is run. `hazards`: what a read of memory never written, or a race of the cores,
    is (error, or report: noted in the result). `deadline` in seconds of this machine's time."""

    chip: Chip
    cores: int = 1
    grid: bool = False  # launched as kernel[n]: program_ndim is 1
    data: bool = True
    seed: int = 0
    hazards: str = "error"
    deadline: float = 3600.0


class Wait(NamedTuple):
    """What a core waits for: the cores beside it, who come with the same `key`, or with an `offer`
    other ranks, to whom it gives `inputs`."""

    what: str
    key: tuple = ()
    offered: Any = None
    offer: Offer | None = None
    inputs: tuple[Any, ...] = ()
    line: str = ""


class Launch:
    """The cores of a logical core while a kernel runs on them: rank `rank` of an interconnect."""

    def __init__(
        self, settings: Settings, rank: int = 0, interconnect: Interconnect | None = None
    ) -> None:
        self.settings, self.chip = settings, settings.chip
        self.rank, self.interconnect = rank, interconnect or OneRank()
        self.hbm = Memory.hbm(
            self.chip.stack_bytes * settings.cores // self.chip.cores_per_stack, settings.data
        )
        self.sessions = [
            Session(self, KernelCore(self.chip, settings.data, self.hbm), number)
            for number in range(settings.cores)
        ]
        for session in self.sessions:
            for memory in (session.core.sbuf, session.core.psum):
                memory.pool_bytes //= settings.cores * self.interconnect.ranks
        self.deadline_at = time.monotonic() + settings.deadline
        self.findings: dict[str, str] = {}
        self.input_bytes = 0
        self.races = Races(self) if settings.cores > 1 else None
        self._shared: list[Storage] = []
        self._written: dict[int, Written] = {}
        self._turns: Turns | None = None
        self._adopted: set[int] = set()

    # ---- tensors -----------------------------------------------------------------------------

    def watch(self, storage: Storage, memory: Memory | None) -> None:
        """Frees an allocation when no kernel holds it any more."""
        tensor = storage.tensor
        storage.written.line = storage.line
        self._written[id(tensor)] = storage.written
        weakref.finalize(storage, self._release, tensor, memory)

    def _release(self, tensor: Tensor, memory: Memory | None) -> None:
        self._written.pop(id(tensor), None)
        if memory is not None:
            memory.free(tensor)

    def written(self, view: View) -> Written:
        """What has been written of the view's tensor."""
        found = self._written.get(id(view.tensor))
        return Written(view.tensor, True) if found is None else found

    def private(self, shape: tuple[int, ...], dtype: DType, name: str, line: str) -> Storage:
        """A tensor in HBM that one core sees."""
        tensor = self.hbm.allocate(shape or (1,), dtype.device, name)
        storage = Storage(tensor, MemoryRegion.private_hbm, line=line)
        self.watch(storage, self.hbm)
        return storage

    def shared(
        self, session: Session, shape: tuple[int, ...], dtype: DType, name: str, line: str
    ) -> Storage:
        """The core's next tensor in shared HBM. Raises IllegalInstruction if others differ."""
        number, session._shared = session._shared, session._shared + 1
        if number == len(self._shared):
            tensor = self.hbm.allocate(shape or (1,), dtype.device, name)
            storage = Storage(tensor, MemoryRegion.shared_hbm, line=line)
            self.watch(storage, self.hbm)
            self._shared.append(storage)
            self._share(tensor)
        storage = self._shared[number]
        found = storage.tensor
        if (found.shape, found.dtype) != (shape or (1,), dtype.device):
            raise IllegalInstruction(
                f"shared_hbm tensor {number} is {dtype.device}{list(shape)} on core "
                f"{session.program} and {found.dtype}{list(found.shape)} at {storage.line} on "
                "another: all cores must allocate alike"
            )
        return storage

    def adopt(self, array: np.ndarray | None, shape: Any, dtype: DType, name: str) -> Storage:
        """An input: a tensor in HBM with the values of a C-contiguous array, all written.

        It is in shared HBM where several cores run, as the vendor's simulator has it.
        """
        self.input_bytes += math.prod(shape) * dtype.itemsize
        backing = None if array is None else array.view(numpy_dtype(dtype.device))
        tensor = self.hbm.adopt(backing, tuple(shape) or (1,), dtype.device, name)
        region = MemoryRegion.shared_hbm if self.settings.cores > 1 else MemoryRegion.private_hbm
        storage = Storage(tensor, region, full=True)
        self.watch(storage, None)
        self._share(tensor)
        self._adopted.add(id(tensor))
        return storage

    def is_argument(self, tensor: Tensor) -> bool:
        """Whether it came in from outside."""
        return id(tensor) in self._adopted

    def _share(self, tensor: Tensor) -> None:
        if self.races:
            self.races.watch(tensor)

    def uninitialised(self, view: View, line: str) -> None:
        """A read of memory that was never written. Raises IllegalInstruction or notes it."""
        made = self.written(view).line
        place = f"; made at {made}" if made else ""
        self.hazard(f"{view} is read and was never written, or only in part{place}", line)

    def hazard(self, message: str, line: str) -> None:
        """Raises IllegalInstruction, or notes the message, as the settings ask."""
        if self.settings.hazards == "error":
            raise IllegalInstruction(message)
        self.findings.setdefault(line, message)

    # ---- cores -------------------------------------------------------------------------------

    def run(self, body: Callable[[Session], Any]) -> list[Any]:
        """body(session) on every core of the only rank; their results. Raises the first error."""
        if len(self.sessions) == 1:
            return [self._run_one(body, self.sessions[0])]
        run = self.steps(body)
        try:
            stands = next(run)
            while True:
                stands = run.send(self._alone(stands))
        except StopIteration as stop:
            return stop.value

    def steps(
        self, body: Callable[[Session], Any]
    ) -> Generator[tuple[Stand, ...], Mapping[int, Landed], list[Any]]:
        """body(session) on every core; yields where they stand when none can go on by itself, and
        takes what collectives gave to some of them. Its value is their results."""
        bodies = [partial(self._run_one, body, session) for session in self.sessions]
        turns = self._turns = Turns(bodies, self.deadline_at)
        try:
            while True:
                turns.run()
                if turns.done:
                    return turns.results
                if self._meet(turns):
                    continue
                stands = tuple(self._stand(turns, core) for core in range(len(self.sessions)))
                if not any(stand.offer for stand in stands):
                    raise self._deadlock(turns, stands)
                for core, landed in (yield stands).items():
                    turns.answer(core, landed)
        finally:
            turns.cancel()

    def _run_one(self, body: Callable[[Session], Any], session: Session) -> Any:
        session.enter()
        try:
            return body(session)
        except TrnsimError as error:
            raise located(error) from None
        finally:
            session.leave()

    def _stand(self, turns: Turns, core: int) -> Stand:
        wait: Wait | None = turns.waiting[core]
        if wait is None:
            return Stand("has ended")
        return Stand(f"waits in {wait.what}", wait.offer)

    def _deadlock(self, turns: Turns, stands: Sequence[Stand]) -> TrnsimError:
        story = "; ".join(f"core {core} {stand.what}" for core, stand in enumerate(stands))
        line = next(wait.line for wait in turns.waiting if wait is not None)
        return at_line(DeadlockError(story), line)

    def _meet(self, turns: Turns) -> bool:
        """Lets cores that wait for each other alone go on, if all have come."""
        waits: list[Wait | None] = turns.waiting
        keys = {wait.key for wait in waits if wait is not None and wait.offer is None}
        come = [wait.offered for wait in waits if wait is not None and wait.offer is None]
        if len(keys) != 1 or len(come) != len(waits):
            return False
        for core in range(len(waits)):
            turns.answer(core, come)
        return True

    def meet(self, session: Session, key: tuple, offered: Any, what: str) -> list[Any]:
        """All cores come with equal `key`; returns what each offered, by number.

        Raises DeadlockError if one ends, or waits for something else.
        """
        if len(self.sessions) == 1:
            raise IllegalInstruction(f"{what} needs a kernel launched on two cores: kernel[2]")
        assert self._turns is not None
        met = self._turns.wait(session.program, Wait(what, key, offered, line=session.line))
        session.meetings += 1
        return met

    # ---- ranks -------------------------------------------------------------------------------

    def collect(
        self, session: Session, offer: Offer, inputs: tuple[Any, ...], alone_ps: int
    ) -> Landed:
        """Other ranks come with the same request; returns what the collective gave to this core.

        `inputs` has an array for each channel, or None without data. `alone_ps` is the time if the
        rank is alone. Raises CollectiveMismatch or DeadlockError if others do not come.
        """
        if self._turns is None:
            return land_alone(offer, inputs, alone_ps)
        what = str(offer)
        wait = Wait(what, offered=alone_ps, offer=offer, inputs=inputs)
        return self._turns.wait(session.program, wait)

    def inputs(self, core: int) -> tuple[Any, ...]:
        """What the core that stands in a collective gives, by channel."""
        assert self._turns is not None
        return self._turns.waiting[core].inputs

    def _alone(self, stands: tuple[Stand, ...]) -> dict[int, Landed]:
        """Answers of a rank that is alone."""
        assert self._turns is not None
        answers = {}
        for meeting in meetings([stands]):
            cores = meeting.seats[0]
            wait: Wait = self._turns.waiting[cores[0]]
            offer = Offer(meeting.request, meeting.arrivals[0], meeting.line, meeting.sends[0])
            landed = land_alone(offer, wait.inputs, wait.offered)
            answers |= dict.fromkeys(cores, landed)
        return answers


def check_cores(chip: Chip, cores: int) -> None:
    """Raises BadInput for a number of cores that no logical core of the chip has."""
    if cores not in chip.lnc_allowed:
        raise BadInput("lnc", cores, [str(n) for n in chip.lnc_allowed])
