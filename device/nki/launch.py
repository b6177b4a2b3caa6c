"""The run of a kernel on the cores of one logical core.

Cores are threads of which one runs at a time: a core runs until it waits for another or ends,
then the next in number runs. The order is the same in every run. Tensors in shared HBM are the
same on all cores: the n-th that one core allocates is the n-th of the others.
"""

import math
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..chip import Chip
from ..dtypes import numpy_dtype
from ..errors import BadInput, IllegalInstruction, TrnsimError
from ..memory import Memory, Tensor, View
from .dtypes import DType
from .errors import DeadlockError, located
from .races import Races
from .session import Session
from .tensor import MemoryRegion, Storage
from .timeline import KernelCore
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


class Cancelled(BaseException):
    """Ends a core's thread after another core has failed."""


class Launch:
    """The cores of a logical core while a kernel runs on them."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.chip = settings, settings.chip
        self.hbm = Memory.hbm(
            self.chip.stack_bytes * settings.cores // self.chip.cores_per_stack, settings.data
        )
        self.sessions = [
            Session(self, KernelCore(self.chip, settings.data, self.hbm), number)
            for number in range(settings.cores)
        ]
        self.deadline_at = time.monotonic() + settings.deadline
        self.findings: dict[str, str] = {}
        self.input_bytes = 0
        self.races = Races(self) if settings.cores > 1 else None
        self._shared: list[Storage] = []
        self._written: dict[int, Written] = {}
        self._turns = _Turns(settings.cores)

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
        return storage

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
        """body(session) on every core; their results. Raises the first core's error."""
        if len(self.sessions) == 1:
            return [self._run_one(self.sessions[0], body)]
        results: list[Any] = [None] * len(self.sessions)
        errors: list[BaseException | None] = [None] * len(self.sessions)

        def core(number: int) -> None:
            try:
                self._turns.begin(number)
                results[number] = self._run_one(self.sessions[number], body)
            except Cancelled:
                pass
            except BaseException as error:
                errors[number] = error
                self._turns.cancel()
            finally:
                self._turns.end(number)

        threads = [
            threading.Thread(target=core, args=(number,), daemon=True)
            for number in range(len(self.sessions))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in errors:
            if error is not None:
                raise error
        return results

    def _run_one(self, session: Session, body: Callable[[Session], Any]) -> Any:
        session.enter()
        try:
            return body(session)
        except TrnsimError as error:
            raise located(error) from None
        finally:
            session.leave()

    def meet(self, session: Session, key: tuple, offer: Any, what: str) -> list[Any]:
        """All cores come with equal `key`; returns what each offered, by number.

        Raises DeadlockError if one ends, or waits for something else.
        """
        if len(self.sessions) == 1:
            raise IllegalInstruction(f"{what} needs a kernel launched on two cores: kernel[2]")
        met = self._turns.meet(session.program, key, offer, what)
        session.meetings += 1
        return met


class _Turns:
    """Lets one core run at a time, and lets all meet."""

    def __init__(self, count: int) -> None:
        self._condition = threading.Condition()
        self._turn = 0
        self._ended = [False] * count
        self._waiting: list[tuple[tuple, Any, str] | None] = [None] * count
        self._met: list[list[Any] | None] = [None] * count
        self._cancelled = False

    def begin(self, number: int) -> None:
        with self._condition:
            self._await(lambda: self._turn == number)

    def end(self, number: int) -> None:
        with self._condition:
            self._ended[number] = True
            self._pass(number)

    def cancel(self) -> None:
        with self._condition:
            self._cancelled = True
            self._condition.notify_all()

    def meet(self, number: int, key: tuple, offer: Any, what: str) -> list[Any]:
        with self._condition:
            self._waiting[number] = (key, offer, what)
            if all(self._waiting):
                self._join()
            else:
                self._pass(number)
                self._await(lambda: self._turn == number)
            if self._met[number] is None:
                self._refuse()
            met, self._met[number] = self._met[number], None
            assert met is not None
            return met

    def _join(self) -> None:
        waiting = [entry for entry in self._waiting if entry is not None]
        if len({key for key, _, _ in waiting}) != 1:
            self._refuse()
        offers = [offer for _, offer, _ in waiting]
        count = len(self._waiting)
        self._met = [offers] * count
        self._waiting = [None] * count

    def _pass(self, number: int) -> None:
        """The next core that can run has the turn; a core that waits in vain learns it."""
        count = len(self._ended)
        for step in range(1, count + 1):
            other = (number + step) % count
            if not self._ended[other] and self._waiting[other] is None:
                self._turn = other
                self._condition.notify_all()
                return
        for other, waits in enumerate(self._waiting):
            if waits is not None:
                self._turn = other
                self._condition.notify_all()
                return

    def _await(self, ready: Callable[[], bool]) -> None:
        self._condition.wait_for(lambda: self._cancelled or ready())
        if self._cancelled:
            raise Cancelled

    def _refuse(self) -> None:
        states = []
        for number, waits in enumerate(self._waiting):
            if waits is not None:
                states.append(f"core {number} waits in {waits[2]}")
            else:
                states.append(f"core {number} has ended")
        raise DeadlockError("; ".join(states))


def check_cores(chip: Chip, cores: int) -> None:
    """Raises BadInput for a number of cores that no logical core of the chip has."""
    if cores not in chip.lnc_allowed:
        raise BadInput("lnc", cores, [str(n) for n in chip.lnc_allowed])
