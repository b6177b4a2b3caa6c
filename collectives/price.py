"""What a schedule costs on a fabric: per-rank virtual clocks, advanced round by round.

Rules, for all groups that run one collective at once:

- A rank works through the rounds in order. A transfer starts when its source has received what the
  blocks before gave it (in the same lane of the schedule), the source's channel is free, and its
  destination has entered the collective. Before it, the source spends `Overheads.step_ps`.
- Sharing: within a round, the transfers of all groups over one resource share it. Resources are
  the links of the fabric (DMA of ranks included), HBM stacks and the crossings between dies. A
  resource needs (all bytes of the round over it) / rate, and a transfer takes as long as the
  slowest resource on its way. So two equal transfers over one link each take twice as long, and
  disjoint ones do not affect each other. Rounds of groups that arrive at different times still
  count as simultaneous. Lanes of a schedule share in turn by turn: see `lanes`.
- The source's channel is busy for that long; the destination has the data one route latency later.
- A group never ends before its most loaded resource could have carried everything that crosses it.

A repeated round costs the largest of its (nearly equal) chunks; when chunks differ by more than an
element, each repetition is priced with its own. Work that is equal is done once: see `copies` for
equal servers, `clocks` for equal repetitions.

Several collectives in flight together: see `inflight`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from trnsim.device.errors import BadInput
from trnsim.device.units import format_rate

from .costs import Memory, Overheads
from .resources import Resources, resources_of
from .rounds import Rounds
from .routes import Fabric
from .schedule import POINT_TO_POINT, Collective, Schedule

__all__ = ["Memory", "Overheads", "Priced", "Pricer", "price"]


@dataclass(frozen=True, eq=False)
class Priced:
    """The price of one collective in G groups of n ranks.

    end: int64[G, n] ps. durations: int64[G] ps, from the last arrival of the group (without
    handshake: the first) to its last end. late: int64[G] the rank that arrived last.
    load: int64[resources] bytes over each link, stack and crossing; link_load: its links.
    nbytes: size S as `Collective.nbytes`. bound_ps: what the most loaded resource needs for its
    bytes alone. limited_by: for people.
    """

    algorithm: str
    rounds: int
    nbytes: int
    bus_factor: float
    end: np.ndarray
    durations: np.ndarray
    late: np.ndarray
    load: np.ndarray
    links: int
    bound_ps: int
    limited_by: str

    @property
    def link_load(self) -> np.ndarray:
        """int64[links]: bytes over each link."""
        return self.load[: self.links]

    @property
    def duration_ps(self) -> int:
        """The slowest group's duration."""
        return int(self.durations.max(initial=0))

    @property
    def algbw(self) -> float:
        """Bytes/s: S over the duration; 0 if nothing took time."""
        return self._rate(self.duration_ps) if self.duration_ps else 0.0

    @property
    def busbw(self) -> float:
        """Bytes/s: algbw times the factor of nccl-tests."""
        return self.algbw * self.bus_factor

    @property
    def bound_busbw(self) -> float:
        """Bytes/s: the bus bandwidth if only the most loaded resource mattered; inf if none did."""
        return self._rate(self.bound_ps) * self.bus_factor if self.bound_ps else np.inf

    def _rate(self, ps: int) -> float:
        return self.nbytes * 1e12 / ps


def price(
    collective: Collective,
    schedule: Schedule,
    fabric: Fabric,
    groups: Sequence[Sequence[int]] | np.ndarray,
    *,
    arrivals: np.ndarray | None = None,
    overheads: Overheads | None = None,
) -> Priced:
    """Price one collective in all its groups. See `Pricer` to price one schedule many times."""
    return Pricer(schedule, fabric, groups).price(
        collective, arrivals=arrivals, overheads=overheads
    )


class Pricer:
    """A schedule in its groups on a fabric, with routes computed once, for any size and arrivals.

    groups: int[G, n] ranks of the fabric; each rank at most once. All G groups run the schedule at
    the same time and share resources. of: ranks of the collective, where the schedule is that of
    fewer which stand for all (`twins`). Raises BadInput for a table that does not fit, and when it
    prices, TrnsimError for a rank that cannot be reached.
    """

    def __init__(
        self,
        schedule: Schedule,
        fabric: Fabric,
        groups: Sequence[Sequence[int]] | np.ndarray,
        of: int | None = None,
    ) -> None:
        self.schedule, self.fabric, self.of = schedule, fabric, of or schedule.ranks
        self.groups = _group_table(groups, schedule.ranks, fabric.ranks)
        self._rounds: dict[tuple, Rounds] = {}
        self._profiles: dict[tuple[Collective, Overheads], Profile] = {}

    def price(
        self,
        collective: Collective,
        *,
        arrivals: np.ndarray | None = None,
        overheads: Overheads | None = None,
    ) -> Priced:
        """arrivals: int64[G, n] ps at which each rank calls the collective (default: all at 0)."""
        profile, arrived, begin, end = self.timed(collective, arrivals, overheads)
        durations = end.max(axis=1) - begin
        return Priced(
            algorithm=self.schedule.algorithm,
            rounds=self.schedule.rounds,
            nbytes=collective.nbytes,
            bus_factor=collective.bus_factor,
            end=end,
            durations=durations,
            late=self.groups[np.arange(len(arrived)), arrived.argmax(axis=1)],
            load=profile.load,
            links=len(self.fabric.rate),
            bound_ps=profile.bound,
            limited_by=self._limited_by(profile, int(durations.max(initial=0))),
        )

    def timed(
        self, collective: Collective, arrivals: np.ndarray | None, overheads: Overheads | None
    ) -> "tuple[Profile, np.ndarray, np.ndarray, np.ndarray]":
        """(profile, arrivals int64[G, n], begin of each group int64[G], ends int64[G, n])."""
        overheads = overheads or Overheads()
        if collective.kind in POINT_TO_POINT:
            overheads = replace(overheads, handshake=False)
        elif overheads.rendezvous:
            overheads = replace(overheads, rendezvous=0)
        if collective.ranks != self.of:
            raise BadInput("ranks of the collective", collective.ranks, f"{self.of}")
        zero = np.zeros(self.groups.shape, np.int64)
        arrived = zero if arrivals is None else np.asarray(arrivals, np.int64)
        if arrived.shape != self.groups.shape:
            raise BadInput("shape of arrivals", arrived.shape, f"{self.groups.shape}")
        profile = self._profile(collective, overheads)
        if overheads.handshake:
            begin = arrived.max(axis=1)
            return profile, arrived, begin, begin[:, None] + profile.end
        begin = arrived.min(axis=1)
        rounds = self.rounds(overheads).alike(arrived)
        end = rounds.run(rounds.rounds(collective), overheads, arrived)
        return profile, arrived, begin, np.maximum(end, (begin + profile.group_bound)[:, None])

    def rounds(self, overheads: Overheads) -> Rounds:
        """The schedule's rounds on the resources that these overheads have."""
        key = (overheads.memory, overheads.reduce_fraction)
        if key not in self._rounds:
            self._rounds[key] = Rounds(self.schedule, resources_of(self.fabric, *key), self.groups)
        return self._rounds[key]

    def _limited_by(self, profile: "Profile", duration: int) -> str:
        if not duration:
            return "nothing: no data moves"
        if 2 * profile.bound < duration:
            if 2 * profile.moving < duration:
                return f"latency of {self.schedule.rounds} rounds"
            return f"several resources in turn, most {self._resource(profile)}"
        return self._resource(profile)

    def _resource(self, profile: "Profile") -> str:
        rate = format_rate(int(profile.resources.rate(np.array([profile.busiest]))[0]))
        return f"{profile.resources.name(profile.busiest)} ({rate})"

    def _profile(self, collective: Collective, overheads: Overheads) -> "Profile":
        key = (collective, overheads)
        if key not in self._profiles:
            if len(self._profiles) >= 64:
                self._profiles.clear()
            self._profiles[key] = self._new_profile(collective, overheads)
        return self._profiles[key]

    def _new_profile(self, collective: Collective, overheads: Overheads) -> "Profile":
        rounds = self.rounds(overheads)
        sized = rounds.rounds(collective)
        load, needed, group_bound = rounds.totals(sized)
        moving: dict[int, int] = {}
        end = rounds.run(sized, overheads, np.zeros(self.groups.shape, np.int64), moving=moving)
        end = np.maximum(end, group_bound[:, None])
        busiest = int(needed.argmax()) if len(needed) else 0
        bound = int(needed.max(initial=0))
        longest = sum(moving.values())
        return Profile(rounds.resources, load, group_bound, bound, busiest, longest, end)


@dataclass(frozen=True, eq=False)
class Profile:
    """All of a price that does not depend on arrivals. `end` is relative to the last arrival.

    moving: ps for the longest transfers of all rounds, one after another, without overheads.
    """

    resources: Resources
    load: np.ndarray
    group_bound: np.ndarray
    bound: int
    busiest: int
    moving: int
    end: np.ndarray


def _group_table(
    groups: Sequence[Sequence[int]] | np.ndarray, n: int, available: int
) -> np.ndarray:
    sizes = {len(group) for group in groups}
    if sizes != {n}:
        raise BadInput("group size", ", ".join(map(str, sorted(sizes))), f"{n}, as the schedule")
    table = np.array(groups, np.int64)
    outside = table[(table < 0) | (table >= available)]
    if outside.size:
        raise BadInput("rank of a group", int(outside[0]), f"0..{available - 1}")
    times = np.bincount(table.reshape(-1))
    if times.max() > 1:
        raise BadInput(
            "rank of a group", int(np.flatnonzero(times > 1)[0]), "each rank at most once"
        )
    return table
