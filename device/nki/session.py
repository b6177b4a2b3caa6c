"""One core's run of a kernel: what `nki.isa` and `nki.language` act on.

`current()` is the session of the running thread. An instruction is checked, executed and timed as
the kernel calls it; errors get the kernel's source line.
"""

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..chip import Chip
from ..dtypes import numpy_dtype
from ..errors import BadInput, DeadlineExceeded, IllegalInstruction, TrnsimError
from ..isa.base import Instruction
from ..memory import View
from .dtypes import as_dtype
from .errors import OWN, at_line
from .fold import folded
from .memory import KernelMemory
from .objects import NKIObject
from .tensor import MemoryRegion, NkiTensor, Storage, as_region
from .timeline import KernelCore, kernel_line

if TYPE_CHECKING:
    from .launch import Launch

_running = threading.local()
FOLDED = "constants, iota, arguments and copies of them; a run with data knows every value"
DEADLINE_EVERY = 64  # instructions between two looks at the clock


def current() -> "Session":
    """The session of this thread. Raises BadInput outside a kernel."""
    found = getattr(_running, "session", None)
    if found is None:
        raise BadInput("call", "an NKI function outside a kernel", "nki.simulate(kernel)(...)")
    return found


session = current


def running() -> "Session | None":
    """The session of this thread, if a kernel runs."""
    return getattr(_running, "session", None)


class NkiInstruction(NKIObject):
    """Handle of an issued instruction, with its (start, end) in picoseconds as it was issued.

    `place` is where it is in its core's trace, or -1 if it took no time.
    """

    __slots__ = ("start", "end", "name", "place")

    def __init__(self, start: int, end: int, name: str = "", place: int = -1) -> None:
        self.start, self.end, self.name, self.place = start, end, name, place

    def depends_on(self, *producers: "NkiInstruction") -> "NkiInstruction":
        """This starts when the others, issued before it, have ended."""
        session = current()
        session.hooks.append("depends_on")
        places = [producer.place for producer in producers]
        edges = [(place, self.place) for place in places if 0 <= place < self.place]
        session.core.trace.after += edges
        return self


class Session:
    """A kernel on one core. `program` is its index of `programs` cores."""

    def __init__(self, launch: "Launch", core: KernelCore, program: int) -> None:
        self.launch, self.core, self.program = launch, core, program
        self.chip: Chip = core.chip
        self.hooks: list[str] = []
        self.random: Any = None  # state of the random instructions
        self.state: dict[str, Any] = {}  # accumulator registers and the like, by owner
        self.meetings = 0  # with the other core
        self._also: list[View] = []
        self._names: dict[str, int] = {}
        self._shared = 0
        self._count = 0

    # ---- what a kernel may ask ---------------------------------------------------------------

    @property
    def data(self) -> bool:
        """Whether values are computed."""
        return self.core.data

    @property
    def line(self) -> str:
        """file:line of the kernel that is running."""
        return kernel_line(OWN)

    def enter(self) -> None:
        """This thread now runs this session."""
        _running.session = self

    def leave(self) -> None:
        """This thread runs no session."""
        _running.session = None

    # ---- tensors -----------------------------------------------------------------------------

    def allocate(
        self,
        shape: Sequence[int],
        dtype: Any,
        buffer: Any = MemoryRegion.sbuf,
        name: str = "",
        address: tuple[int, int] | None = None,
    ) -> NkiTensor:
        """A new tensor. Raises OutOfMemory or IllegalInstruction with the kernel's line."""
        line = self.line
        try:
            region, kind = as_region(buffer), as_dtype(dtype)
            sizes = tuple(int(n) for n in shape)
            if any(n < 0 for n in sizes):
                raise BadInput("shape", sizes, "sizes of 0 or more")
            label = name or self._label(region)
            if region is MemoryRegion.shared_hbm:
                storage = self.launch.shared(self, sizes, kind, label, line)
            elif region is MemoryRegion.private_hbm:
                storage = self.launch.private(sizes, kind, label, line)
            else:
                storage = self._on_chip(region, sizes, kind.device, label, line, address)
            return NkiTensor(sizes, kind, storage, region, name)
        except TrnsimError as error:
            raise at_line(error, line) from None

    def _label(self, region: MemoryRegion) -> str:
        count = self._names[region.value] = self._names.get(region.value, -1) + 1
        return f"{region.value}{count}"

    def _on_chip(
        self,
        region: MemoryRegion,
        shape: tuple[int, ...],
        dtype: str,
        label: str,
        line: str,
        address: tuple[int, int] | None,
    ) -> Storage:
        memory: KernelMemory = getattr(self.core, region.value)
        origin = 0
        memory.line = line
        if address is None:
            tensor = memory.allocate(shape, dtype, label)
        else:
            origin, place = int(address[0]), int(address[1])
            if origin + shape[0] > memory.partitions:
                raise IllegalInstruction(
                    f"{label}: address {tuple(address)} with {shape[0]} partitions; "
                    f"there are {memory.partitions}"
                )
            tensor = memory.allocate_at(shape, dtype, label, place)
        storage = Storage(tensor, region, origin, line=line)
        self.launch.watch(storage, memory)
        return storage

    # ---- operands ----------------------------------------------------------------------------

    def operand(self, tensor: Any) -> View:
        """The device's view of a tensor, a scalar offset resolved now.

        Raises BadInput for what is no tensor, IllegalInstruction for a view that leaves its
        tensor, or that only a DMA understands (a vector offset).
        """
        if not isinstance(tensor, NkiTensor):
            raise BadInput("operand", tensor, "an NKI tensor")
        if tensor.index is None:
            return tensor.device_view()
        if tensor.index.kind != "scalar":
            raise IllegalInstruction(f"{tensor}: {tensor.index.kind} offsets are not for this")
        return tensor.view_at(tensor.offset + self.index_of(tensor) * tensor.index.stride)

    def index_of(self, tensor: NkiTensor) -> int:
        """The value of a view's scalar offset, which the next instruction waits for."""
        assert tensor.index is not None
        index = tensor.index.index
        if not isinstance(index, NkiTensor):
            return int(index)
        view = index.device_view()
        self._also.append(view)
        return self._scalar(tensor, view)

    def read_scalar(self, tensor: NkiTensor) -> int:
        """The one element of a tensor, as an integer."""
        view = self.operand(tensor)
        if view.size != 1 or view.space == "psum":
            raise IllegalInstruction(
                f"{tensor} has {view.size} elements; a register takes one in hbm or sbuf"
            )
        self.check_reads((view,), self.line)
        return self._scalar(tensor, view)

    def _scalar(self, tensor: NkiTensor, view: View) -> int:
        if self.data:
            return int(view.array.reshape(-1)[0])
        traces = [session.core.trace for session in self.launch.sessions]
        value = folded(traces, self.program, view)
        if value is None:
            error = BadInput("time only", f"a value of {tensor}", FOLDED)
            raise at_line(error, self.line)
        return value

    def write_scalar(self, tensor: NkiTensor, value: int) -> None:
        """The one element of a tensor = an integer."""
        view = self.operand(tensor)
        if view.size != 1 or view.space == "psum":
            raise IllegalInstruction(
                f"{tensor} has {view.size} elements; a register goes into one in hbm or sbuf"
            )
        if self.data:
            view.array[...] = np.array(value).astype(numpy_dtype(view.dtype))
        else:
            trace = self.core.trace
            trace.stores.append((len(trace.entries), view, value))
        self.launch.written(view).add(view)

    # ---- instructions ------------------------------------------------------------------------

    def issue(self, instruction: Instruction, name: str | None = None) -> NkiInstruction:
        """Checks, executes and times an instruction. Raises with the kernel's line."""
        line = self.line
        try:
            self._check_clock(line)
            instruction.check(self.chip)
            self.check_reads((*instruction.used(), *self._also), line)
            races = self.launch.races
            doubts = races.note(self, instruction, line) if races else ()
            if self.core.data:
                with np.errstate(all="ignore"):
                    instruction.execute()
            if races and doubts:
                races.settle(doubts, line)
        except TrnsimError as error:
            self._also.clear()
            raise at_line(error, line) from None
        for view in instruction.writes():
            written = self.launch.written(view)
            written.add(view)
            if view.space == "psum":
                written.note_engine(view, instruction.engine)
        also = tuple(self._also)
        self._also.clear()
        count = len(self.core.trace.entries)
        start, end = self.core.run(instruction, line, name or "", also)
        places = len(self.core.trace.entries)
        return NkiInstruction(start, end, name or "", places - 1 if places > count else -1)

    def written(self, view: View):
        """What has been written of the view's tensor: see `Written`."""
        return self.launch.written(view)

    def note_write(self, view: View) -> None:
        """The view has been written by what is running."""
        self.launch.written(view).add(view)

    def check_deadline(self) -> None:
        """Raises DeadlineExceeded if the run has lasted too long."""
        if time.monotonic() > self.launch.deadline_at:
            raise DeadlineExceeded(
                f"{self.line}: the kernel has run for {self.launch.settings.deadline:g} s"
            )

    def _check_clock(self, line: str) -> None:
        self._count += 1
        if self._count % DEADLINE_EVERY == 0:
            self.check_deadline()

    def check_accumulation(self, view: View, stated: bool) -> None:
        """Before NeuronCore-v4 a matmul adds to what matmuls wrote: others' values are a hazard.

        Where that it adds is not `stated`, zeros are none: overwriting gives the same.
        """
        foreign = self.launch.written(view).foreign
        if foreign is None or self.chip.generation >= 4 or not foreign.any(view):
            return
        if stated or (self.data and np.any(view.array)):
            self.launch.hazard(
                f"{view} holds what another engine than Tensor wrote; a matmul on "
                f"{self.chip.name} adds only to what a matmul wrote",
                self.line,
            )

    def check_reads(self, views: Sequence[View], line: str) -> None:
        """Each view has been written; if not, an error or a finding (see Settings.hazards)."""
        for view in views:
            written = self.launch.written(view)
            if not written.full and not written.covers(view):
                self.launch.uninitialised(view, line)
