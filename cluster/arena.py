"""One rank's HBM: a memory that the physical cores of its logical core share.

In the Ray runtime the cores of a pair are two processes on one node. Core 0 creates the memory and
core 1 attaches to it by name. On Linux the name is a descriptor of the creator's process
(`/proc/PID/fd/N`): the memory has no file, so that a crash leaves nothing behind. Elsewhere it is a
file that is removed as soon as the pair has attached.

The memory starts with a page for the pair's barrier; addresses count from after it. Pages that
nobody writes take no memory, however large the HBM. Fresh memory reads as zero bytes.
"""

import contextlib
import ctypes
import math
import mmap
import os
import platform
import secrets
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from trnsim.device.errors import DeadlineExceeded

_CONTROL = 4096  # the barrier's page
_LINE = 128  # counters of two writers stay out of each other's cache line (and its prefetch pair)
_RESERVE = 1 << 28  # memory that an arena leaves to the rest of the machine


class Arena:
    """`size` bytes of HBM, shared by whoever attaches to `name`.

    Made by `Arena.local`, `Arena.create` or `Arena.attach`.
    """

    def __init__(self, buffer: mmap.mmap, size: int, name: str = "", file: str = "") -> None:
        self.size, self.name = size, name
        self._buffer = buffer
        self._file = file

    @classmethod
    def local(cls, size: int) -> "Arena":
        """A memory of this process alone."""
        arena = cls.create(size)
        arena.seal()
        return arena

    @classmethod
    def create(cls, size: int) -> "Arena":
        """A memory that one other process attaches to; on disk if main memory has no room."""
        descriptor, file = _open_memory(_CONTROL + size)
        os.ftruncate(descriptor, _CONTROL + size)
        buffer = mmap.mmap(descriptor, _CONTROL + size)
        if file:
            os.close(descriptor)
            return cls(buffer, size, file, file)
        # The descriptor stays open, because its number is the memory's name.
        return cls(buffer, size, f"/proc/{os.getpid()}/fd/{descriptor}")

    @classmethod
    def attach(cls, name: str, size: int) -> "Arena":
        """The memory that another process on this machine has created under `name`."""
        descriptor = os.open(name, os.O_RDWR)
        try:
            buffer = mmap.mmap(descriptor, _CONTROL + size)
        finally:
            os.close(descriptor)
        return cls(buffer, size, name)

    def seal(self) -> None:
        """Give up the name once the pair has attached; the memory lives on in its processes."""
        if self._file:
            Path(self._file).unlink(missing_ok=True)
        elif self.name.startswith(f"/proc/{os.getpid()}/"):
            os.close(int(self.name.rpartition("/")[2]))
        self.name = self._file = ""

    def array(
        self, offset: int, shape: tuple[int, ...], dtype: np.dtype | type = np.uint8
    ) -> np.ndarray:
        """A writable row-major view at byte `offset`. Raises ValueError outside of the memory."""
        stop = offset + math.prod(shape) * np.dtype(dtype).itemsize
        if offset < 0 or stop > self.size:
            raise ValueError(f"HBM bytes {offset}..{stop} are outside of the arena's {self.size}")
        return np.ndarray(shape, dtype, self._buffer, _CONTROL + offset)

    @property
    def buffer(self) -> mmap.mmap:
        """The whole memory, the barrier's page first."""
        return self._buffer


# --- where the memory comes from ---------------------------------------------------------------

_HAS_PROC = sys.platform == "linux" and os.path.isdir("/proc/self/fd")


def _open_memory(nbytes: int) -> tuple[int, str]:
    """A descriptor of a new shared memory, and its file where it cannot do without one."""
    if not _HAS_PROC:
        path = os.path.join(tempfile.gettempdir(), f"trnsim-{secrets.token_hex(8)}")
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), path
    if nbytes + _RESERVE < available_memory():
        return os.memfd_create("trnsim-hbm"), ""
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno()), ""


def available_memory() -> int:
    """Bytes of main memory that this Linux process may still take."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    meminfo = dict(line.split(":") for line in lines)
    free = int(meminfo["MemAvailable"].split()[0]) * 1024
    with contextlib.suppress(OSError, ValueError):  # no control group, or "max"
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        free = min(free, limit - int((group / "memory.current").read_text()))
    return free


# --- the pair's barrier ------------------------------------------------------------------------


class PairBarrier:
    """Where the two physical cores of a logical core meet.

    Each core counts its own arrivals in a word that only it writes, and waits until the other's
    count has caught up: no atomic read-modify-write is needed. A core that has to wait looks a few
    times and then sleeps in the kernel (futex), so that the other core gets the processor at once
    on a machine with fewer processors than simulated cores.
    """

    LOOKS = 40  # a few microseconds

    def __init__(self, arena: Arena, core: int, names: tuple[str, str]) -> None:
        """`names` are the pair's cores as error messages call them."""
        control = memoryview(arena.buffer)
        words = [control[line : line + 8].cast("q") for line in (0, _LINE)]
        self._mine, self._peer = words[core], words[1 - core]
        self._names = names[core], names[1 - core]
        self._wake, self._sleep = _sleepers(arena, (core * _LINE, (1 - core) * _LINE))

    def wait(self, deadline_s: float) -> None:
        """Return when both cores have called `wait` equally often.

        Raises DeadlineExceeded, naming both cores, after `deadline_s` seconds.
        """
        arrived = self._mine[0] + 1
        _fence()
        self._mine[0] = arrived
        self._wake()
        for _ in range(self.LOOKS):
            if self._peer[0] >= arrived:
                return _fence()
        self._wait_asleep(arrived, deadline_s)
        _fence()

    def _wait_asleep(self, arrived: int, deadline_s: float) -> None:
        end = time.monotonic() + deadline_s
        while (seen := self._peer[0]) < arrived:
            left = end - time.monotonic()
            if left <= 0:
                mine, peer = self._names
                raise DeadlineExceeded(
                    f"{mine} waited {deadline_s:g} s at barrier {arrived} for {peer},"
                    f" which is at barrier {seen}"
                )
            self._sleep(seen, left)


_LOCK = threading.Lock()


def _fence() -> None:
    """Order memory accesses before and after, on processors that reorder stores.

    A lock's release and the next acquire of it are ordered, whatever the processor.
    """
    with _LOCK:
        pass
    with _LOCK:
        pass


_FUTEX_NUMBERS = {"x86_64": 202, "aarch64": 98}
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


Wake = Callable[[], object]
Sleep = Callable[[int, float], object]


def _sleepers(arena: Arena, lines: tuple[int, int]) -> tuple[Wake, Sleep]:
    """How to wake the peer and how to sleep while its count is as seen, for some seconds."""
    number = _FUTEX_NUMBERS.get(platform.machine())
    if sys.platform != "linux" or number is None or sys.byteorder != "little":
        return (lambda: None), (lambda seen, left: time.sleep(min(left, 50e-6)))
    mine, peer = ((ctypes.c_char * 8).from_buffer(arena.buffer, line) for line in lines)
    futex = ctypes.CDLL(None).syscall
    mine_address, peer_address = (ctypes.c_void_p(ctypes.addressof(word)) for word in (mine, peer))

    def wake(keep: object = mine) -> None:
        futex(number, mine_address, _FUTEX_WAKE, 1, None, None, 0)

    def sleep(seen: int, left: float, keep: object = peer) -> None:
        low = ctypes.c_uint32(seen & 0xFFFFFFFF)  # a futex is the counter's low 32 bits
        limit = _Timespec(int(left), int(left % 1 * 1e9))
        futex(number, peer_address, _FUTEX_WAIT, low, ctypes.byref(limit), None, 0)

    return wake, sleep
