"""What can be said of the steps of a stage before they run: prices, who meets, what is alike."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from .. import overlap
from .accounts import Account
from .flights import Flight, InFlight, Meeting
from .places import Array, Classes, connected
from .prices import ExchangePrice, Prices, SendPrice
from .program import Exchange, Free, Layers, Receive, Run, Send, StageCode, Step

Stretch = tuple[Step, ...]
Part = tuple[Stretch | Send | Receive, int | None]
"""A step to another stage, or steps between two of them, and the layer that they stand in."""


@dataclass(eq=False, slots=True)
class Effect:
    """What a stretch does from one relative state: times are relative to its beginning."""

    now: Array
    flights: tuple[Flight, ...]
    account: Account


@dataclass(frozen=True, eq=False, slots=True)
class Sending:
    """A send: ps that the port is taken and until it is there, by class, and what is counted."""

    port: Array
    arrival: Array
    account: Account


class Shared:
    """What stages that do the same have in common: meetings, and effects of stretches.

    Good for all programs of one machine, mesh and way of pricing (`Prices.ground`), whose places
    are of the same classes.
    """

    def __init__(self) -> None:
        self.meetings: dict[tuple, Meeting] = {}
        self.effects: dict[tuple, Effect] = {}
        self._shapes: dict[tuple, int] = {}

    def meeting(self, step: Exchange, price: ExchangePrice, classes: Classes) -> Meeting:
        """The meeting of an exchange: the same for all stages that have the same price."""
        name = price.name(step.label)
        who = (price.axes, price.span)
        key = (name, step.stream, price.ends.tobytes(), price.demand, price.limited_by, who)
        if key not in self.meetings:
            self.meetings[key] = Meeting.of(name, price, step.stream, classes)
        return self.meetings[key]

    def shape(self, content: tuple) -> int:
        """A number for what steps do; equal for equal content."""
        return self._shapes.setdefault(content, len(self._shapes))


class StageSteps:
    """The steps of a stage's code on a machine whose places are of some classes.

    exchanges, sends: prices by the names that times are counted under. tables: rows of classes
    that meet.
    """

    def __init__(self, code: StageCode, prices: Prices, classes: Classes, shared: Shared) -> None:
        self.code, self.prices, self.classes, self.shared = code, prices, classes, shared
        self.exchanges: dict[str, ExchangePrice] = {}
        self.sends: dict[str, SendPrice] = {}
        self.meetings: dict[int, Meeting | None] = {}
        self.sending: dict[int, Sending] = {}
        for step in code.walk():
            if isinstance(step, Exchange):
                self.meetings[id(step)] = self._meeting(step)
            elif isinstance(step, Send):
                self.sending[id(step)] = self._sending(step)
        self.tables = _tables(self.meetings.values())
        self._shapes: dict[tuple[int, int], int] = {}
        self._cuts: dict[int, list[Part]] = {}
        self._tables: dict[int, dict[int, Array]] = {}
        self._components: dict[tuple[int, ...], Array] = {}

    def _meeting(self, step: Exchange) -> Meeting | None:
        price = self.prices.exchange(self.code, step)
        if price is None:
            return None
        meeting = self.shared.meeting(step, price, self.classes)
        self.exchanges[meeting.name] = price
        return meeting

    def _sending(self, step: Send) -> Sending:
        kind = self.code.values[step.read.name].type
        price = self.prices.send(self.code.stage, step.stage, kind)
        name = price.name(step.channel)
        self.sends[name] = price
        port, arrival = self._of_class(price.port), self._of_class(price.arrival)
        account = Account()
        account.add(("total", name), arrival)
        account.add(("count", name), 1)
        return Sending(port, arrival, account)

    def _of_class(self, values: Array) -> Array:
        return values if values.size == 1 else values[self.classes.first]

    def parts(self, body: Stretch) -> list[Part]:
        """The body cut at its sends and receives."""
        if id(body) not in self._cuts:
            self._cuts[id(body)] = list(_cut(body, None))
        return self._cuts[id(body)]

    def shape(self, steps: Stretch, origin: int) -> int:
        """A number for what steps do, layers counted from `origin`; alike in all that share."""
        key = (id(steps), origin)
        if key not in self._shapes:
            content = tuple(self._content(step, origin) for step in steps)
            self._shapes[key] = self.shared.shape(content)
        return self._shapes[key]

    def _content(self, step: Step, origin: int) -> tuple:
        match step:
            case Run():
                price = self.prices.run(step.segment)
                return (step.segment, price, *self._named(step), step.again)
            case Exchange():
                return (id(self.meetings[id(step)]), *self._named(step))
            case Layers():
                numbers = (step.layers.start - origin, step.layers.step, len(step.layers))
                return (*numbers, self.shape(step.body, origin))
        return ()

    def _named(self, step: Run | Exchange) -> tuple:
        """The values of a step and how they are declared."""
        values = self.code.values
        return tuple(
            tuple((r, values[r.name].layered, values[r.name].micro) for r in refs)
            for refs in (step.reads, step.writes)
        )

    def component(self, steps: Stretch, flights: InFlight) -> Array:
        """int64[classes]: which of them steps, and what is in flight, connect."""
        if id(steps) not in self._tables:
            met = [self.meetings[id(step)] for step in _exchanges(steps)]
            self._tables[id(steps)] = _tables(met)
        tables = self._tables[id(steps)]
        if flights:
            tables = tables | _tables(flight.meeting for flight in flights)
        key = tuple(sorted(tables))
        if key not in self._components:
            self._components[key] = connected(self.classes.count, tables.values())
        return self._components[key]


def _tables(meetings: Iterable[overlap.Meeting | None]) -> dict[int, Array]:
    """The different tables of rows of meetings."""
    return {id(m.rows): m.rows for m in meetings if m is not None}


def _exchanges(steps: Stretch) -> Iterator[Exchange]:
    for step in steps:
        if isinstance(step, Layers):
            yield from _exchanges(step.body)
        elif isinstance(step, Exchange):
            yield step


def _cut(body: Stretch, layer: int | None) -> Iterator[Part]:
    """Loops with sends or receives are unrolled; what takes no time is left out."""
    open_part: list[Step] = []
    for step in body:
        talks = isinstance(step, Layers) and _talks(step.body)
        if not talks and not isinstance(step, Send | Receive):
            if _takes_time(step):
                open_part.append(step)
            continue
        if open_part:
            yield tuple(open_part), layer
            open_part = []
        if isinstance(step, Layers):
            for number in step.layers:
                yield from _cut(step.body, number)
        else:
            assert isinstance(step, Send | Receive)
            yield step, layer
    if open_part:
        yield tuple(open_part), layer


def _takes_time(step: Step) -> bool:
    return not isinstance(step, Free) and not (isinstance(step, Layers) and not step.layers)


def _talks(body: Sequence[Step]) -> bool:
    return any(
        isinstance(step, Send | Receive) or (isinstance(step, Layers) and _talks(step.body))
        for step in body
    )
