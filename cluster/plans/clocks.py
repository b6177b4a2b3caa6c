"""The time plane of a training program: all stages' clocks, advanced until every task is done.

Ranks of a stage that nothing tells apart share one clock (`places.classes_of`); what tells them
apart is the prices of their exchanges and sends, the pace of their chips, and jitter.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from trnsim.device.errors import BadInput

from ..clocks import Event
from .accounts import Account
from .drive import Mail, drive
from .places import Array, Classes
from .prices import ExchangePrice, Prices, SendPrice
from .program import TrainingProgram
from .stage_clock import Message, StageClock
from .stage_steps import Shared, StageSteps

MOST_SLOWER = 100  # times: clocks of 64 bits have room for a slow chip with jitter


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """How ranks are not alike.

    slow: (rank, factor of 1 or more by which its compute takes longer). jitter: in every task, the
    compute of every rank takes longer by a fraction drawn evenly from 0 to this, by `seed`.
    imbalance: the coefficient of variation of the load of experts, by `seed`, on kernels that skip
    empty slots; None: experts compute all their slots, so that their load does not matter.
    """

    slow: tuple[tuple[int, float], ...] = ()
    jitter: float = 0.0
    imbalance: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.jitter <= MOST_SLOWER:
            raise BadInput("jitter", self.jitter, f"a fraction of 0 to {MOST_SLOWER}, such as 0.05")
        if self.seed < 0:
            raise BadInput("seed", self.seed, "a whole number, 0 or more")
        for rank, factor in self.slow:
            if not 1 <= factor <= MOST_SLOWER:
                allowed, near = f"a factor of 1 to {MOST_SLOWER}", MOST_SLOWER if factor > 1 else 1
                raise BadInput(f"slowness of rank {rank}", factor, allowed, near)


@dataclass(frozen=True, eq=False)
class Timeline:
    """Times of a step in ps. ends: int64[stages, classes]; accounts by stage.

    exchanges, sends: by the names that accounts have for them. repeated: microbatches that were
    counted, because everything in them is as it was some before.
    """

    classes: Classes
    ends: Array
    accounts: tuple[Account, ...]
    exchanges: dict[str, ExchangePrice]
    sends: dict[str, SendPrice]
    events: list[Event] = field(default_factory=list)
    repeated: int = 0

    @property
    def duration(self) -> int:
        """From the start to the end of the last rank."""
        return int(self.ends.max())

    def mean(self, amounts: Sequence[Array | int]) -> float:
        """The average over all ranks of an amount that each stage has for its classes."""
        sizes = self.classes.sizes
        sums = [
            float((np.broadcast_to(np.asarray(amount), sizes.shape) * sizes).sum())
            for amount in amounts
        ]
        return sum(sums) / (len(sums) * float(sizes.sum()))


class Paces:
    """By how much compute of each rank takes longer: `of(stage, task)` float[1 or classes]."""

    def __init__(self, prices: Prices, conditions: Conditions) -> None:
        self.places, self.conditions = prices.places, conditions
        self.classes: Classes | None = None
        self.base: list[Array | None] = [None] * self.places.stages
        for rank, factor in conditions.slow:
            if not 0 <= rank < self.places.mesh.size:
                raise BadInput("rank", rank, f"0 to {self.places.mesh.size - 1}")
            stage, place = np.argwhere(self.places.ranks == rank)[0]
            if self.base[stage] is None:
                self.base[stage] = np.ones(self.places.count)
            pace = self.base[stage]
            assert pace is not None
            pace[place] = max(pace[place], factor)

    @property
    def varies(self) -> bool:
        """Whether every rank and task has its own."""
        return self.conditions.jitter > 0

    def of(self, stage: int, task: int) -> Array | None:
        """float[1 or classes], or None for 1; the same object for an equal pace."""
        if self.varies:
            random = np.random.default_rng([self.conditions.seed, stage, task])
            jitter = 1.0 + self.conditions.jitter * random.random(self.places.count)
            base = self.base[stage]
            return jitter if base is None else jitter * base
        return self._of_classes[stage]

    def fold(self, classes: Classes) -> None:
        """Sets the classes that `of` answers for."""
        self._of_classes = [None if b is None else b[classes.first] for b in self.base]


def advance(
    program: TrainingProgram,
    prices: Prices,
    conditions: Conditions | None = None,
    traced: bool = False,
    used: Sequence[float] = (),
) -> Timeline:
    """Virtual time of one step. `traced`: events of the first place of every stage. used: by place
    on ep, the part of its experts' slots that a rank computes.

    Raises CollectiveMismatch for stages that wait for each other in a cycle, or for a message that
    nobody sends or receives.
    """
    paces = Paces(prices, conditions or Conditions())
    work = _of_places(prices, used)
    steps = _steps(prices, paces, work)
    classes = steps[0].classes
    paces.fold(classes)
    mail: Mail = {}

    def post(message: Message, arrival: Array) -> None:
        mail.setdefault(message, deque()).append(arrival)

    clocks = [
        StageClock(
            stage.tasks, mine, post, paces.of, paces.varies,
            int(prices.places.ranks[stage.stage, 0]) if traced else None,
            None if work is None else work[classes.first],
        )
        for stage, mine in zip(program.stages, steps, strict=True)
    ]  # fmt: skip
    repeated = drive(clocks, mail, laps=not (traced or paces.varies))
    ends = np.stack([clock.now for clock in clocks])
    events = [event for clock in clocks for event in clock.events]
    exchanges = {name: price for each in steps for name, price in each.exchanges.items()}
    sends = {name: price for each in steps for name, price in each.sends.items()}
    accounts = tuple(clock.account() for clock in clocks)
    return Timeline(classes, ends, accounts, exchanges, sends, events, repeated)


def _steps(prices: Prices, paces: Paces, work: Array | None) -> tuple[StageSteps, ...]:
    """The steps of all stages, with a class for each place if their paces vary."""
    told = [base for base in (*paces.base, work) if base is not None]
    if not told and not paces.varies:
        return _steps_alike(prices)
    everyone = np.arange(prices.places.count)
    classes = Classes(everyone, everyone) if paces.varies else prices.classes_with(told)
    return tuple(StageSteps(code, prices, classes, Shared()) for code in prices.codes)


@lru_cache(maxsize=4)
def _steps_alike(prices: Prices) -> tuple[StageSteps, ...]:
    shared = _shared((*prices.ground, prices.classes.of.tobytes()))
    return tuple(StageSteps(code, prices, prices.classes, shared) for code in prices.codes)


@lru_cache(maxsize=8)
def _shared(key: tuple) -> Shared:
    """What plans that differ in batch, schedule or sharding alone have in common."""
    return Shared()


def _of_places(prices: Prices, used: Sequence[float]) -> Array | None:
    """float[places] of what is given by place on ep, or None."""
    if not used:
        return None
    mesh = prices.places.mesh
    if "ep" not in mesh.names:
        return np.full(prices.places.count, used[0])
    index = prices.places.ranks[0] // mesh.strides()["ep"] % mesh.degree("ep")
    return np.asarray(used)[index]
