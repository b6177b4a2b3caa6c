"""The clock of one pipeline stage: when its ranks do what their tasks say.

State: when compute is free on each class of places, and the exchanges in flight. A step depends on
it only through differences of times, so that

- what a stretch of steps does from one state, it does from every state shifted in time: it is
  worked out once (`Effect`) for each state relative to its beginning;
- a loop over layers whose state repeats with one shift per connected set of ranks repeats it for
  all layers that are left.

Both are exact. Neither is used for ranks that are traced.
"""

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from copy import copy
from dataclasses import dataclass, replace

import numpy as np

from ..clocks import Event
from .accounts import Account, Late
from .experts import EXPERT
from .flights import Flight, InFlight, Keys, Meeting, ValueKey
from .places import Array
from .prices import RunPrice
from .program import Exchange, Layers, Receive, Ref, Run, Send, Step, Task
from .segment import Segment
from .stage_steps import Effect, Sending, StageSteps, Stretch

Message = tuple[str, int, int, int]
"""(channel, microbatch, source stage, target stage)."""
Pace = Callable[[int, int], Array | None]
"""(stage, task index) -> float[1 or classes] by which compute takes longer; None for 1."""


@dataclass(frozen=True, slots=True)
class Context:
    """Where a step stands: its task and layer, and the first layer of its chunk."""

    kind: str
    microbatch: int
    chunk: int
    origin: int
    layer: int | None = None

    def at(self, layer: int) -> "Context":
        """The same task, at a layer."""
        return Context(self.kind, self.microbatch, self.chunk, self.origin, layer)


@dataclass(frozen=True, eq=False, slots=True)
class _State:
    """Compute and flights after an iteration of a loop over layers."""

    layer: int
    now: Array
    flights: tuple[Flight, ...]


class StageClock:
    """Clocks of the ranks of a stage, in ps from the start of the step.

    `post(message, arrival)` takes what is sent. With `varies`, `pace` differs from task to task.
    work: float[classes], the part of their slots that experts compute.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        steps: StageSteps,
        post: Callable[[Message, Array], None],
        pace: Pace = lambda *_: None,
        varies: bool = False,
        traced: int | None = None,
        work: Array | None = None,
    ) -> None:
        self.work = work
        self.tasks, self.steps, self.code = tasks, steps, steps.code
        self.post, self.pace = post, pace
        self.once, self.repeats = traced is None and not varies, traced is None
        self.traced = traced
        self.now = np.zeros(steps.classes.count, np.int64)
        self.port = self.now
        self.flights = InFlight()
        self.events: list[Event] = []
        self.index = 0
        self._context: Context | None = None
        self._account = Account()
        self._uses_of: Counter[Effect | Sending] = Counter()
        self._free: dict[tuple, Effect] = {}  # of stretches that begin with nothing in flight
        self._durations: dict[Segment, tuple[RunPrice, Array | int]] = {}
        self._factor: Array | None = None

    @property
    def task(self) -> Task | None:
        """The task under way; None when all are done."""
        return self.tasks[self.index] if self.index < len(self.tasks) else None

    def run(self) -> Generator[Message | None, Array, None]:
        """Runs all tasks; yields a message that it waits for, and is sent its arrival, and None
        after each task."""
        while (task := self.task) is not None:
            self._set_pace(self.pace(self.code.stage, self.index))
            origin = self.code.layers[task.chunk].start
            context = Context(task.kind, task.microbatch, task.chunk, origin)
            self._context = context
            for part, layer in self.steps.parts(task.body):
                match part:
                    case Receive():
                        self._receive(part, (yield self._message(part, context)))
                        context = self._context  # another one, after laps that were only counted
                    case Send():
                        self._send(part, context if layer is None else context.at(layer))
                    case _:
                        self._stretch(part, context if layer is None else context.at(layer))
            self.index += 1
            yield None
        for flight in list(self.flights):
            self._wait(flight)

    # Laps: what is done again and again by all stages

    def state(self, time: Array, microbatch: int) -> tuple:
        """All that the future depends on, in times and microbatches from these."""
        task, context = self.task, self._context
        at = context and (context.kind, context.microbatch - microbatch, context.chunk)
        to_do = task and (task.kind, task.microbatch - microbatch, task.chunk, id(task.body))
        here = Context("", microbatch, 0, 0)
        ends = (self.now - time, np.maximum(self.port, self.now) - time)
        return at, to_do, *(end.tobytes() for end in ends), self._relative(here)

    def open_lap(self) -> None:
        """From here on, accounts are kept apart."""
        self._outer = self._account, self._uses_of
        self._account, self._uses_of = Account(), Counter()

    def close_lap(self, more: int, tasks: int, microbatches: int, shift: Array) -> None:
        """The lap since `open_lap` comes `more` times again: of `tasks` each time, in all by
        `microbatches` and `shift` ps later."""
        (account, uses_of), lap = self._outer, (self._account, self._uses_of)
        account.merge(lap[0], more + 1)
        for what, uses in lap[1].items():
            uses_of[what] += uses * (more + 1)
        self._account, self._uses_of = account, uses_of
        self.index += more * tasks
        self.now, self.port = self.now + shift, self.port + shift
        later = Context("", microbatches, 0, 0)
        self.flights = InFlight([_moved(f, shift, 0, later, sign=1) for f in self.flights])
        if self._context is not None and tasks:
            microbatch = self._context.microbatch + microbatches
            self._context = replace(self._context, microbatch=microbatch)

    def account(self) -> Account:
        """Where the time of all tasks went."""
        whole = Account()
        whole.merge(self._account)
        for what, uses in self._uses_of.items():
            whole.merge(what.account, uses)
        return whole

    def _set_pace(self, factor: Array | None) -> None:
        if factor is not self._factor:
            self._factor = factor
            self._durations.clear()

    # Sends and receives

    def _message(self, step: Receive, context: Context) -> Message:
        return step.channel, context.microbatch, step.stage, self.code.stage

    def _receive(self, step: Receive, arrival: Array) -> None:
        waited = np.maximum(arrival - self.now, 0)
        self._account.add(("wait", step.channel), waited)
        self._trace("compute", f"wait for {step.channel}", self.now, waited)
        self.now = self.now + waited
        self._land()

    def _send(self, step: Send, context: Context) -> None:
        sending = self.steps.sending[id(step)]
        begin = np.maximum(self._ready((self._key(step.read, context),)), self.port)
        self.port = begin + sending.port
        self._uses_of[sending] += 1
        self._trace("send", step.channel, begin, self.port - begin)
        message = (step.channel, context.microbatch, self.code.stage, step.stage)
        self.post(message, begin + sending.arrival)

    # Stretches of other steps

    def _stretch(self, steps: Stretch, context: Context) -> None:
        if not self.once:
            self._block(steps, context)
            return
        key = (id(steps), context.kind, context.origin, context.layer, self._apart(steps))
        free = not self.flights
        effect = self._free.get(key) if free else None
        if effect is None:
            state = self._state(steps, context)
            effect = self.steps.shared.effects.get(state)
            if effect is None:
                effect = self.steps.shared.effects[state] = self._effect(steps, context)
                self._uses_of[effect] += 1
                return
            if free:
                self._free[key] = effect
        start, self.now = self.now, self.now + effect.now
        if effect.flights or not free:
            self.flights = InFlight([_moved(f, start, 0, context, sign=1) for f in effect.flights])
        self._uses_of[effect] += 1

    def _state(self, steps: Stretch, context: Context) -> tuple:
        """All that the effect of steps depends on."""
        layer = None if context.layer is None else context.layer - context.origin
        pace = None if self._factor is None else self.code.stage
        shape = self.steps.shape(steps, context.origin)
        return shape, context.kind, layer, pace, self._apart(steps), self._relative(context)

    def _effect(self, steps: Stretch, context: Context) -> Effect:
        """Does the steps once, and keeps what they did."""
        outer, self._account = self._account, Account()
        start = self.now
        self._block(steps, context)
        mine, self._account = self._account, outer
        flights = tuple(_moved(f, -start, 0, context, sign=-1) for f in self.flights)
        return Effect(self.now - start, flights, mine)

    def _relative(self, context: Context) -> tuple:
        """The flights in times and microbatches from here."""
        return tuple(
            (
                id(f.meeting),
                np.maximum(f.begin - self.now, 0).tobytes(),
                np.maximum(f.end - self.now, 0).tobytes(),
                _keys(f.reads, context, -1),
                _keys(f.writes, context, -1),
            )
            for f in self.flights
        )

    def _apart(self, steps: Stretch) -> bytes:
        """How much later than others each class is, of those that steps and flights connect."""
        if self.now.size == 1:
            return b""
        return (self.now - self.now[self.steps.component(steps, self.flights)]).tobytes()

    def _block(self, steps: Sequence[Step], context: Context) -> None:
        for step in steps:
            match step:
                case Run():
                    self._run(step, context)
                case Exchange():
                    self._exchange(step, context)
                case Layers():
                    self._layers(step, context)

    def _layers(self, loop: Layers, context: Context) -> None:
        numbers, before = loop.layers, None
        for done, layer in enumerate(numbers, start=1):
            outer, self._account = self._account, Account()
            self._block(loop.body, context.at(layer))
            mine, self._account = self._account, outer
            self._account.merge(mine)
            after = _State(layer, self.now, tuple(map(copy, self.flights)))
            left = len(numbers) - done
            if self.repeats and left and before and self._same(before, after, loop):
                self._account.merge(mine, left)
                shift = (after.now - before.now) * left
                self.now = after.now + shift
                moved = left * numbers.step
                flights = [_moved(f, shift, moved, context, sign=0) for f in after.flights]
                self.flights = InFlight(flights)
                return
            before = after

    def _same(self, before: _State, after: _State, loop: Layers) -> bool:
        """Whether all times of each connected set of ranks moved by one shift."""
        shift = after.now - before.now
        if shift.size > 1 and (shift != shift[self.steps.component(loop.body, self.flights)]).any():
            return False
        if len(before.flights) != len(after.flights):
            return False
        layers = after.layer - before.layer
        return all(
            a.meeting is b.meeting
            and _layered(a.reads, layers) == b.reads
            and _layered(a.writes, layers) == b.writes
            and _shifted(a.begin, b.begin, before.now, after.now).all()
            and _shifted(a.end, b.end, before.now, after.now).all()
            for a, b in zip(before.flights, after.flights, strict=True)
        )

    # Runs

    def _run(self, step: Run, context: Context) -> None:
        price, duration = self._duration(step.segment)
        taken = duration
        if self.flights:
            for flight in self.flights.before(*self._uses(step, context)):
                self._wait(flight)
            for flight in self.flights.overlapping(self.now, duration):
                delay = flight.delay(self.now, duration, price.demand)
                if delay is not None:
                    self._note_slowed(flight, delay)
                    self.flights.delay(flight, delay)
                    taken = taken + delay
        start, self.now = self.now, self.now + taken
        self._account.add(("run", "recompute" if step.again else context.kind), taken)
        self._account.runs[price] += 1
        if self.traced is not None:
            layer = "" if context.layer is None else f" of layer {context.layer}"
            self._trace("compute", step.segment.name + layer, start, self.now - start)
        self._land()

    def _duration(self, segment: Segment) -> tuple[RunPrice, Array | int]:
        if segment not in self._durations:
            price = self.steps.prices.run(segment)
            duration: Array | int = price.duration
            factor = self._factor
            if self.work is not None and segment.name.startswith(EXPERT):
                factor = self.work if factor is None else self.work * factor
            if factor is not None:
                duration = np.ceil(price.duration * factor).astype(np.int64)
            self._durations[segment] = (price, duration)
        return self._durations[segment]

    # Exchanges

    def _exchange(self, step: Exchange, context: Context) -> None:
        meeting = self.steps.meetings[id(step)]
        if meeting is None:
            self._alias(step, context)
            return
        reads, writes = self._uses(step, context)
        ready = self._ready(reads, writes, step.stream)
        met = meeting.last(ready)
        self._note_late(meeting, ready, met)
        flight = Flight(meeting, met, met + meeting.ends, reads, writes)
        self.flights.take_off(flight, self._note_slowed)
        self._account.add(("total", meeting.name), flight.end - ready)
        self._account.add(("count", meeting.name), 1)
        self._trace(f"stream {step.stream}", step.label, ready, flight.end - ready)

    def _note_slowed(self, flight: Flight, delay: Array) -> None:
        """A flight is delayed by sharing with something else."""
        meeting = flight.meeting
        self._account.add(("total", meeting.name), meeting.last(delay))
        self._account.add(("shared", meeting.name), delay)

    def _note_late(self, meeting: Meeting, ready: Array, met: Array) -> None:
        if ready.size > 1:
            waits = met - ready
            by = int(waits.max())
            if by:
                first = int(waits.argmax())
                group = meeting.rows[meeting.row[first]]
                late = int(group[ready[group].argmax()])
                self._account.arrived(meeting.name, Late(by, late))

    def _alias(self, step: Exchange, context: Context) -> None:
        """An exchange among groups of one rank: results are ready when operands are."""
        reads, writes = self._uses(step, context)
        for flight in self.flights.before(reads, ()):
            self.flights.alias(flight, writes)

    def _ready(self, reads: Keys, writes: Keys = (), stream: int = -1) -> Array:
        """When something that needs these values, and this stream, can begin."""
        ready = self.now
        for flight in self.flights.before(reads, writes, stream):
            ready = np.maximum(ready, flight.end)
        return ready

    def _uses(self, step: Run | Exchange, context: Context) -> tuple[Keys, Keys]:
        """(values that a step reads, values that it writes)."""
        reads = tuple([self._key(ref, context) for ref in step.reads])
        return reads, tuple([self._key(ref, context) for ref in step.writes])

    def _wait(self, flight: Flight) -> None:
        """Compute waits for a flight, and before it for those ahead of it in its stream."""
        queue = self.flights.queues[flight.stream]
        while flight in queue:
            self._wait_once(queue[0])

    def _wait_once(self, flight: Flight) -> None:
        waited = np.maximum(flight.end - self.now, 0)
        self._account.add(("exposed", flight.meeting.name), waited)
        self._trace("compute", f"wait for {flight.meeting.name}", self.now, waited)
        self.now = self.now + waited
        self._land()

    def _land(self) -> None:
        self.flights.land(self.now)

    def _key(self, ref: Ref, context: Context) -> ValueKey:
        value = self.code.values[ref.name]
        layer = None
        if value.layered and context.layer is not None:
            layer = context.layer + ref.shift
        chunk = context.chunk if value.micro and not value.layered else None
        return ref.name, layer, context.microbatch if value.micro else None, chunk

    def _trace(self, track: str, name: str, start: Array, duration: Array | int) -> None:
        if self.traced is not None:
            lasting = int(np.asarray(duration).flat[0])
            if lasting:
                self.events.append(Event(self.traced, track, name, int(start.flat[0]), lasting))


def _shifted(before: Array, after: Array, start: Array, now: Array) -> Array:
    """Whether a time of a flight moved with compute, or had passed both times; by class."""
    passed = (before <= start) & (after <= now)
    return passed | (after - before == now - start)


def _moved(flight: Flight, by: Array, layers: int, context: Context, sign: int) -> Flight:
    """The flight at other times, with keys of other layers, or relative to the task or back."""
    reads, writes = flight.reads, flight.writes
    if layers:
        reads, writes = _layered(reads, layers), _layered(writes, layers)
    if sign:
        reads, writes = _keys(reads, context, sign), _keys(writes, context, sign)
    return Flight(flight.meeting, flight.begin + by, flight.end + by, reads, writes)


def _layered(keys: Keys, by: int) -> Keys:
    return tuple(
        (name, None if layer is None else layer + by, micro, chunk)
        for name, layer, micro, chunk in keys
    )


def _keys(keys: Keys, context: Context, sign: int) -> Keys:
    """Keys with microbatch, chunk and layer counted from those of the task (-1), or back (1)."""
    return tuple(
        (
            name,
            None if layer is None else layer + sign * context.origin,
            None if micro is None else micro + sign * context.microbatch,
            None if chunk is None else chunk + sign * context.chunk,
        )
        for name, layer, micro, chunk in keys
    )
