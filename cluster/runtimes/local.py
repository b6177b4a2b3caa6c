"""The in-process runtime: every physical core is a generator, and they run in turn.

A core runs until it has to wait; then the next one runs. Whatever the order, the values are the
same: a core only sees others' data through barriers and messages.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import threadpoolctl

from .. import wire
from ..arena import Arena
from .base import (
    CoreAddress,
    Event,
    Execute,
    Meet,
    Message,
    Post,
    Run,
    Take,
    Wait,
    Worker,
    check_message,
    explain,
    spread,
)


class LocalRuntime:
    """See `base.Runtime`. BLAS runs on one thread while it is open."""

    def __init__(self) -> None:
        self._workers: list[Worker] = []
        self._blas: threadpoolctl.threadpool_limits | None = None

    def open(self, cores: Sequence[CoreAddress], execute: Execute) -> None:
        """Make a worker for each core; those of a rank share one arena."""
        self._blas = threadpoolctl.threadpool_limits(limits=1)
        arenas: dict[int, Arena] = {}
        for address in cores:
            if address.rank not in arenas:
                arenas[address.rank] = Arena.local(address.hbm_bytes)
            self._workers.append(Worker(address, arenas[address.rank], execute))

    def load(self, name: str, payload: bytes) -> None:
        """Give every core the object; it is one object, so executions must not change it."""
        value = wire.decode(payload, name)
        for worker in self._workers:
            worker.load(name, value)

    def call(self, call: str, arguments: Sequence[Any] | None = None) -> list[Any]:
        """Run one call on all cores."""
        each = spread(arguments, len(self._workers))
        runs = [
            _Turn(worker.address, worker.run(call, argument))
            for worker, argument in zip(self._workers, each, strict=True)
        ]
        try:
            _Exchanger(runs).run()
        except BaseException:
            self.close()
            raise
        return [run.result for run in runs]

    def close(self) -> None:
        """Drop the memories and give BLAS its threads back."""
        self._workers = []
        if self._blas is not None:
            self._blas.restore_original_limits()
            self._blas = None

    def __enter__(self) -> "LocalRuntime":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _Turn:
    """A core's run and what it waits for."""

    def __init__(self, address: CoreAddress, run: Run) -> None:
        self.address = address
        self.run = run
        self.event: Event | None = None
        self.finished = False
        self.result: Any = None

    def advance(self, answer: Message | None) -> None:
        """Run up to the next event."""
        try:
            self.event = self.run.send(answer)
        except StopIteration as stop:
            self.event, self.finished, self.result = None, True, stop.value

    def wait(self) -> Wait:
        """Why the core stands still."""
        if isinstance(self.event, Take):
            return Wait(self.address, self.event.peer, self.event.call, self.event.round)
        return Wait(self.address, self.address.rank)


class _Exchanger:
    """Carries out the events of all cores."""

    def __init__(self, turns: list[_Turn]) -> None:
        self._turns = turns
        self._mail: defaultdict[tuple[int, int], deque[Message]] = defaultdict(deque)
        self._ranks: defaultdict[int, list[_Turn]] = defaultdict(list)
        for turn in turns:
            self._ranks[turn.address.rank].append(turn)

    def run(self) -> None:
        """Run all cores to their end. Raises `explain`'s error when they wait without end."""
        for turn in self._turns:
            turn.advance(None)
        while not all(turn.finished for turn in self._turns):
            if not sum(self._run_until_waiting(turn) for turn in self._turns):
                raise explain(
                    [turn.wait() for turn in self._turns if not turn.finished],
                    [turn.address for turn in self._turns if turn.finished],
                )

    def _run_until_waiting(self, turn: _Turn) -> int:
        """Number of events carried out before the core had to wait."""
        count = 0
        while not turn.finished and self._carry_out(turn):
            count += 1
        return count

    def _carry_out(self, turn: _Turn) -> bool:
        """Carry out the core's event and run on to the next, or return False if it must wait."""
        match turn.event:
            case Post(peer, message):
                self._mail[message.source, peer].append(message)
                turn.advance(None)
                return True
            case Take():
                return self._take(turn, turn.event)
            case _:
                return self._meet(turn.address.rank)

    def _take(self, turn: _Turn, take: Take) -> bool:
        queue = self._mail[take.peer, turn.address.rank]
        if not queue:
            return False
        message = queue.popleft()
        check_message(message, take, turn.address.rank)
        turn.advance(message)
        return True

    def _meet(self, rank: int) -> bool:
        turns = self._ranks[rank]
        if not all(isinstance(turn.event, Meet) for turn in turns):
            return False
        for turn in turns:
            turn.advance(None)
        return True
