"""A physical core as a Ray actor: the thin shell around `base.Worker`.

Three threads (Ray's concurrency groups): calls run in one, messages of other actors arrive in
another one, in the order in which they were sent, and the third one answers what the core waits
for. An actor needs numpy, not JAX.
"""

import os
import sys
import threading
import traceback
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")

import ray
import threadpoolctl

from trnsim.device import errors
from trnsim.device.errors import DeadlineExceeded, TrnsimError

from .. import wire
from ..arena import Arena, PairBarrier
from .base import (
    CoreAddress,
    Event,
    Execute,
    Message,
    Post,
    Run,
    Take,
    Wait,
    Worker,
    check_message,
)

WINDOW_MESSAGES, WINDOW_BYTES = 64, 64 << 20
_CREDIT_MESSAGES, _CREDIT_BYTES = WINDOW_MESSAGES // 4, WINDOW_BYTES // 4


class Mailbox:
    """Messages by source rank, in order; and what the peers have taken of what was sent to them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queues: defaultdict[int, deque[Message]] = defaultdict(deque)
        self._sent: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0])
        self._taken: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0])
        self.delivered = 0
        self.posted = 0

    def deliver(self, frame: bytes) -> None:
        """A message has arrived."""
        message = Message.unpack(frame)
        with self._changed:
            self._queues[message.source].append(message)
            self.delivered += 1
            self._changed.notify_all()

    def take(self, source: int, deadline_s: float) -> Message | None:
        """The next message of a rank, or None at the deadline."""
        with self._changed:
            queue = self._queues[source]
            if self._changed.wait_for(lambda: queue, deadline_s):
                return queue.popleft()
            return None

    def sent(self, peer: int, nbytes: int) -> None:
        """A message was sent to `peer`."""
        with self._changed:
            _add(self._sent[peer], 1, nbytes)
            self.posted += 1

    def credit(self, peer: int, messages: int, nbytes: int) -> None:
        """`peer` says that it has taken so much since it said so last."""
        with self._changed:
            _add(self._taken[peer], messages, nbytes)
            self._changed.notify_all()

    def wait_for_credit(self, deadline_s: float) -> int | None:
        """Wait until no peer is a window behind; the rank that is, at the deadline."""
        with self._changed:
            if self._changed.wait_for(lambda: self._behind() is None, deadline_s):
                return None
            return self._behind()

    def _behind(self) -> int | None:
        for peer, (messages, nbytes) in self._sent.items():
            taken = self._taken[peer]
            if messages - taken[0] > WINDOW_MESSAGES or nbytes - taken[1] > WINDOW_BYTES:
                return peer
        return None


def _add(counts: list[int], messages: int, nbytes: int) -> None:
    counts[0] += messages
    counts[1] += nbytes


class CoreActor:
    """One physical core in a process of its own."""

    def __init__(self, address: CoreAddress, execute: Execute, deadline_s: float) -> None:
        self._blas = threadpoolctl.threadpool_limits(limits=1)
        self._address, self._execute, self._deadline = address, execute, deadline_s
        self._mailbox = Mailbox()
        self._deliver: dict[int, Callable[..., None]] = {}
        self._credit: dict[int, Callable[..., None]] = {}
        self._untold: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0])
        self._round: tuple[bytes, int] | None = None
        self._wait: Wait | None = None
        self._meetings = 0

    # --- setting up ---

    def describe(self) -> dict[str, Any]:
        """Where the core lives: for messages about it, and for tests."""
        host = ray.util.get_node_ip_address()
        return {"pid": os.getpid(), "host": host, "jax": "jax" in sys.modules}

    def create_arena(self) -> str:
        """Make the rank's HBM; its name."""
        self._set_arena(Arena.create(self._address.hbm_bytes))
        return self._arena.name

    def attach_arena(self, name: str) -> None:
        """Map the HBM that core 0 has made."""
        self._set_arena(Arena.attach(name, self._address.hbm_bytes))

    def seal_arena(self, *attached: None) -> None:
        """Give up the HBM's name after the others have attached."""
        self._arena.seal()

    def _set_arena(self, arena: Arena) -> None:
        rank, core = self._address.rank, self._address.core
        self._arena = arena
        self._barrier = PairBarrier(
            arena, core, (f"core 0 of rank {rank}", f"core 1 of rank {rank}")
        )
        self._worker = Worker(self._address, arena, self._execute)

    def connect(self, peers: dict[int, Any]) -> None:
        """Core 0 of every rank, for messages."""
        self._deliver = {rank: peer.deliver.remote for rank, peer in peers.items()}
        self._credit = {rank: peer.credit.remote for rank, peer in peers.items()}

    def load(self, name: str, payload: bytes) -> None:
        """See `base.Runtime.load`."""
        self._worker.load(name, wire.decode(payload, name))

    # --- running ---

    def run(self, call: str, argument: bytes) -> bytes:
        """Execute a call; a document with its result or its error."""
        try:
            result = self._drive(self._worker.run(call, wire.decode(argument, call)))
            return wire.encode({"result": result})
        except TrnsimError as error:
            return wire.encode({"error": _public_name(error), "message": str(error)})
        except Exception:
            return wire.encode({"error": "", "message": traceback.format_exc()})

    def _drive(self, run: Run) -> Any:
        answer = None
        while True:
            try:
                event = run.send(answer)
            except StopIteration as stop:
                return stop.value
            answer = self._carry_out(event)

    def _carry_out(self, event: Event) -> Message | None:
        match event:
            case Post(peer, message):
                return self._post(peer, message)
            case Take():
                return self._take(event)
            case _:
                return self._meet()

    def _meet(self) -> None:
        self._wait = Wait(self._address, self._address.rank)
        self._barrier.wait(self._deadline)
        self._wait = None
        self._meetings += 1

    def _post(self, peer: int, message: Message) -> None:
        turn = message.call, message.round
        if turn != self._round:
            self._round = turn
            self._throttle(message)
        self._mailbox.sent(peer, len(message.data))
        self._deliver[peer](message.pack())

    def _throttle(self, message: Message) -> None:
        """Let peers catch up between rounds, so that unread messages do not pile up.

        Never inside of a round, whose messages a peer may need before it can take older ones.
        """
        if self._mailbox.wait_for_credit(0) is None:
            return
        behind = self._mailbox.wait_for_credit(self._deadline)
        if behind is not None:
            wait = Wait(self._address, behind, message.call, message.round)
            raise DeadlineExceeded(f"{wait}, which takes no messages, since {self._deadline:g} s")

    def _take(self, take: Take) -> Message:
        self._wait = Wait(self._address, take.peer, take.call, take.round)
        message = self._mailbox.take(take.peer, self._deadline)
        if message is None:
            raise DeadlineExceeded(f"{self._wait}, since {self._deadline:g} s")
        self._wait = None
        check_message(message, take, self._address.rank)
        self._tell(take.peer, len(message.data))
        return message

    def _tell(self, peer: int, nbytes: int) -> None:
        untold = self._untold[peer]
        _add(untold, 1, nbytes)
        if untold[0] >= _CREDIT_MESSAGES or untold[1] >= _CREDIT_BYTES:
            self._credit[peer](self._address.rank, *untold)
            untold[:] = [0, 0]

    # --- in the other threads ---

    @ray.method(concurrency_group="mail", num_returns=0, enable_task_events=False)
    def deliver(self, frame: bytes) -> None:
        """A peer's message."""
        self._mailbox.deliver(frame)

    @ray.method(concurrency_group="mail", num_returns=0, enable_task_events=False)
    def credit(self, peer: int, messages: int, nbytes: int) -> None:
        """A peer has taken messages."""
        self._mailbox.credit(peer, messages, nbytes)

    @ray.method(concurrency_group="watch")
    def status(self) -> tuple[Wait | None, int, int, int]:
        """What the core waits for, and how many messages and barriers it has seen."""
        return self._wait, self._mailbox.posted, self._mailbox.delivered, self._meetings


def _public_name(error: TrnsimError) -> str:
    """The error's class, or its nearest base that every process knows."""
    bases = [cls.__name__ for cls in type(error).__mro__ if hasattr(errors, cls.__name__)]
    return bases[0]
