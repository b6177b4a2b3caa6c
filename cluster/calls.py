"""Collective calls of a program on a machine: which schedule each runs, and what it costs.

The group table: a call runs in all of its replica groups at once, and is priced over all of them
together, so that groups share links.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b

import numpy as np

from trnsim.collectives import choose
from trnsim.collectives.price import Pricer
from trnsim.collectives.schedule import Collective, Schedule
from trnsim.device.errors import BadInput
from trnsim.device.ops.ir import Operation, TensorType
from trnsim.device.units import transfer_ps

from . import cheapest
from .collective import Site, site_of
from .lnc import check_streams
from .machine import Machine
from .overlap import Meeting, demand_of
from .program import StartCollective

COLLECTIVES = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "collective_permute": "permute",
    "collective_broadcast": "broadcast",
}
"""StableHLO operators that move data between ranks, and the kind of collective that each is."""

Groups = tuple[tuple[int, ...], ...]

PRICES_KEPT = 64
"""Prices by how far the ranks arrive apart that are remembered: steps and layers repeat them."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How one call is done: in which groups of ranks, by which schedule, and why that one."""

    groups: Groups
    collective: Collective
    schedule: Schedule
    algorithm: str
    reason: str


def check_algorithm(name: str) -> None:
    """Raises BadInput unless `name` can be given to `Calls`."""
    if name != cheapest.BEST:
        choose.kinds(name)


class Calls:
    """Plans and prices of collective calls on a machine.

    `algorithm` is `policy` (the vendor's published one), `best` (the cheapest by price) or the name
    of one, which then serves every kind of collective that it can do. Calls in equal groups are in
    one of `streams`, one after another. Raises BadInput for more than the CC-cores have.
    """

    def __init__(self, machine: Machine, algorithm: str = "policy", streams: int = 1) -> None:
        check_algorithm(algorithm)
        check_streams(machine.chip, machine.lnc, streams)
        self.machine, self.algorithm, self.streams = machine, algorithm, streams
        self.slots = np.asarray(machine.placement.slots)
        self._plans: dict[tuple, Plan] = {}
        self._pricers: dict[tuple, tuple[Pricer, np.ndarray]] = {}
        self._ends: dict[tuple, np.ndarray] = {}
        self._streams: dict[Groups, int] = {}
        self._meetings: dict[tuple, Meeting] = {}

    @cached_property
    def site(self) -> Site:
        """Links, costs of CC-cores and memories, and the policy's thresholds on this machine."""
        where = self.machine.placement
        return site_of(self.machine.instance, nodes=where.nodes, lnc=where.lnc)

    def estimate(self, nbytes: int) -> int:
        """A guess in ps for the order of kernels, before the call is planned."""
        chip = self.machine.chip
        rate = chip.on_chip_bytes_per_s * self.machine.lnc
        return chip.collective_start_ps + 2 * transfer_ps(nbytes, rate)

    def plan(self, operation: Operation, operand: TensorType, result: TensorType) -> Plan:
        """The schedule of a collective operator. Raises BadInput for groups that do not fit."""
        groups = self.groups(operation)
        collective = describe(operation, operand, result, len(groups[0]))
        key = (collective, groups)
        if key not in self._plans:
            algorithm = cheapest.algorithm_for(self.algorithm, collective.kind)
            table = self.table(groups)

            def price(plan: choose.Plan) -> int:
                pricer = Pricer(plan.schedule, self.site.fabric, table)
                return pricer.price(collective, overheads=self.site.overheads).duration_ps

            found = cheapest.plan(
                collective, table, self.site.fabric, algorithm, price, self.site.policy
            )
            name, reason = found.choice.algorithm, found.choice.reason
            self._plans[key] = Plan(groups, collective, found.schedule, name, reason)
        return self._plans[key]

    def groups(self, operation: Operation) -> Groups:
        """The replica groups of a call; all ranks for a permute and for an empty list."""
        everybody = (tuple(range(self.machine.ranks)),)
        if operation.name == "collective_permute":
            return everybody
        groups: Groups = operation.attributes["replica_groups"] or everybody
        if len({len(group) for group in groups}) > 1:
            sizes = ", ".join(str(len(group)) for group in groups)
            raise BadInput(
                f"replica groups of {operation.name} ({operation.location})",
                f"sizes {sizes}",
                "groups of one size",
            )
        return groups

    def stream(self, groups: Groups) -> int:
        """The stream of calls in these groups: a new one for new groups while there are any, then
        0, as the vendor's runtime folds them (compute-comm-overlap.rst)."""
        known = len(self._streams)
        return self._streams.setdefault(groups, known if known < self.streams else 0)

    def table(self, groups: Groups) -> np.ndarray:
        """int64[groups, members]: the logical core of each member."""
        return self.slots[np.asarray(groups)]

    def price(self, start: StartCollective, arrivals: np.ndarray) -> np.ndarray:
        """int64[ranks]: when each rank has ended the call that it reaches at `arrivals`."""
        key, pricer, members = self._pricer(start)
        base = arrivals[members].min()
        relative = arrivals[members] - base
        seen = (key, start.collective, blake2b(relative, digest_size=16).digest())
        if seen not in self._ends:
            if len(self._ends) >= PRICES_KEPT:
                self._ends.pop(next(iter(self._ends)))
            priced = pricer.price(
                start.collective, arrivals=relative, overheads=self.site.overheads
            )
            self._ends[seen] = priced.end
        ends = arrivals.copy()
        ends[members] = self._ends[seen] + base
        return ends

    def meeting(self, start: StartCollective) -> Meeting:
        """Who waits for whom in a call, and what it takes of a rank while nobody is late."""
        key, pricer, members = self._pricer(start)
        key = (key, start.collective, start.stream)
        if key not in self._meetings:
            priced = pricer.price(start.collective, overheads=self.site.overheads)
            table = self.table(start.groups)
            demand = demand_of(self.site, priced.load, table, priced.duration_ps)
            row = np.zeros(self.machine.ranks, np.int64)
            row[members] = np.arange(len(members))[:, None]
            name = start.operation.name
            self._meetings[key] = Meeting(name, demand, start.stream, members, row)
        return self._meetings[key]

    def _pricer(self, start: StartCollective) -> tuple[tuple, Pricer, np.ndarray]:
        """(key, pricer, int64[groups, members] ranks) of a call."""
        key = (id(start.schedule), start.groups)
        if key not in self._pricers:
            pricer = Pricer(start.schedule, self.site.fabric, self.table(start.groups))
            self._pricers[key] = pricer, np.asarray(start.groups)
        return key, *self._pricers[key]


def describe(
    operation: Operation, operand: TensorType, result: TensorType, ranks: int
) -> Collective:
    """The collective that an operator is, for groups of `ranks` with these per-rank types."""
    kind = COLLECTIVES[operation.name]
    attributes = operation.attributes
    whole = Collective(kind="broadcast", ranks=ranks, counts=operand.size, dtype=operand.dtype)
    match kind:
        case "all_reduce":
            return replace(whole, kind=kind, reduction=attributes["reduction"])
        case "reduce_scatter":
            return replace(whole, kind=kind, counts=result.size, reduction=attributes["reduction"])
        case "all_to_all":
            return replace(whole, kind=kind, counts=operand.size // ranks)
        case "permute":
            pairs: Sequence[tuple[int, int]] = attributes["source_target_pairs"]
            return replace(whole, kind=kind, pairs=tuple(map(tuple, pairs)))
    return replace(whole, kind=kind)
