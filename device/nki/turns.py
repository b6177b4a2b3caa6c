"""Threads of which one runs at a time: the cores of a logical core.

The caller of `run` gives each core that can run its turn, by number, until it waits or ends. So
the order of what cores do is the same in every run.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import DeadlineExceeded

ENDING_S = 1.0  # for a thread that has been told to end


class Cancelled(BaseException):
    """Ends a core's thread after the run has failed elsewhere."""


class Turns:
    """Cores by number: what each waits for (None: nothing), and whether it has ended.

    A core calls `wait`, and goes on when it has had an `answer` and `run` is called again.
    `deadline_at` is of time.monotonic().
    """

    def __init__(self, bodies: Sequence[Callable[[], Any]], deadline_at: float) -> None:
        count = len(bodies)
        self._bodies, self._deadline_at = bodies, deadline_at
        self._threads: list[threading.Thread | None] = [None] * count
        self._resume = [threading.Semaphore(0) for _ in bodies]
        self._stopped = threading.Semaphore(0)
        self._answers: list[Any] = [None] * count
        self._errors: list[BaseException | None] = [None] * count
        self._cancelled = False
        self._running: int | None = None
        self.waiting: list[Any] = [None] * count
        self.ended = [False] * count
        self.results: list[Any] = [None] * count

    @property
    def done(self) -> bool:
        """Whether all cores have ended."""
        return all(self.ended)

    def run(self) -> None:
        """Every core runs until it waits or ends. Raises what the first failing core raises, and
        DeadlineExceeded if a core does not come back in time."""
        for core in range(len(self._bodies)):
            if self.ended[core] or self.waiting[core] is not None:
                continue
            self._turn(core)
            error = self._errors[core]
            if error is not None:
                self.cancel()
                raise error

    def _turn(self, core: int) -> None:
        self._running = core
        if self._threads[core] is None:
            thread = threading.Thread(target=self._thread, args=(core,), daemon=True)
            self._threads[core] = thread
            thread.start()
        else:
            self._resume[core].release()
        left = max(self._deadline_at - time.monotonic(), 0.0)
        if not self._stopped.acquire(timeout=left):
            self.cancel()
            raise DeadlineExceeded(f"core {core} of the kernel still runs at the deadline")
        self._running = None

    def _thread(self, core: int) -> None:
        try:
            self.results[core] = self._bodies[core]()
        except Cancelled:
            pass
        except BaseException as error:
            self._errors[core] = error
        finally:
            self.ended[core] = True
            self._stopped.release()

    def wait(self, core: int, what: Any) -> Any:
        """Called by the core: stands until it is answered; the answer."""
        self.waiting[core] = what
        self._stopped.release()
        self._resume[core].acquire()
        if self._cancelled:
            raise Cancelled
        return self._answers[core]

    def answer(self, core: int, value: Any) -> None:
        """The core may go on with `value`."""
        self.waiting[core], self._answers[core] = None, value

    def cancel(self) -> None:
        """Ends the threads of all cores but one that runs."""
        self._cancelled = True
        for core, thread in enumerate(self._threads):
            self._resume[core].release()
            if thread is not None and core != self._running:
                thread.join(ENDING_S)
