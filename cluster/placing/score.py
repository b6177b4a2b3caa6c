"""What a placement costs: each demand priced in its groups, link loads, and hops between members.

The time of a placement is the sum over demands of times x duration, as if nothing overlapped: what
a step spends on communication at worst. It orders placements of one job; it is not a step time.
"""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from trnsim.collectives import choose
from trnsim.collectives.fabric import Fabric
from trnsim.collectives.price import Priced, Pricer
from trnsim.device.units import transfer_ps

from .. import cheapest
from ..collective import Site
from ..mesh import Mesh
from .traffic import Demand, Traffic


@dataclass(frozen=True)
class DemandCost:
    """One demand on a placement. Times in ps: of one call, and of all calls of a step."""

    demand: Demand
    duration: int
    algorithm: str
    limited_by: str

    @property
    def total(self) -> int:
        """ps of all calls of a step."""
        return self.duration * self.demand.times


@dataclass(frozen=True)
class Hops:
    """Links between neighbours in the groups of an axis (in group order, the last to the first)."""

    mean: float
    most: int


@dataclass(frozen=True, eq=False)
class Score:
    """A placement's cost. load: int64[links], bytes over each link of the fabric in a step."""

    costs: tuple[DemandCost, ...]
    load: np.ndarray = field(repr=False)

    @property
    def total(self) -> int:
        """ps of communication in a step, as if nothing overlapped."""
        return sum(cost.total for cost in self.costs)

    @cached_property
    def moved(self) -> int:
        """Bytes times links that they cross in a step."""
        return int(self.load.sum())


class Scorer:
    """Prices placements (int64[ranks] slots) of a mesh's traffic on a site.

    Groups that occur again are not priced again. `algorithm` as of `trnsim collective`.
    """

    def __init__(self, site: Site, mesh: Mesh, traffic: Traffic, algorithm: str = "policy") -> None:
        self.site, self.mesh, self.traffic, self.algorithm = site, mesh, traffic, algorithm
        axes = {demand.axes for demand in traffic.demands}
        self._groups = {names: np.asarray(mesh.groups(*names)) for names in axes}
        self._known: dict[tuple, tuple[DemandCost, np.ndarray]] = {}
        self.priced = 0

    def score(self, slots: np.ndarray) -> Score:
        """The cost of a placement."""
        found = [self._cost(demand, slots) for demand in self.traffic.demands]
        load = np.zeros(len(self.site.fabric.rate), np.int64)
        for (_, each), demand in zip(found, self.traffic.demands, strict=True):
            load += each * demand.times
        return Score(tuple(cost for cost, _ in found), load)

    def hops(self, axis: str, slots: np.ndarray) -> Hops:
        """Links between neighbours of an axis. A link into or out of a rank's DMA is none."""
        groups = slots[np.asarray(self.mesh.groups(axis))]
        node = self.site.fabric.rank_node
        pairs = node[np.stack([groups, np.roll(groups, -1, axis=1)])].reshape(2, -1)
        distinct, count = np.unique(pairs, axis=1, return_counts=True)
        routes = self.site.fabric.node_routes(*distinct)
        lengths = np.diff(routes.starts)
        return Hops(float((lengths * count).sum() / count.sum()), int(lengths.max()))

    def _cost(self, demand: Demand, slots: np.ndarray) -> tuple[DemandCost, np.ndarray]:
        table = slots[self._groups[demand.axes]]
        key = (demand.collective, table.tobytes())
        if key not in self._known:
            self.priced += 1
            plan, priced = self._price(demand, table)
            cost = DemandCost(demand, priced.duration_ps, plan.choice.algorithm, priced.limited_by)
            self._known[key] = cost, priced.link_load
        cost, load = self._known[key]
        return DemandCost(demand, cost.duration, cost.algorithm, cost.limited_by), load

    def _price(self, demand: Demand, table: np.ndarray) -> tuple[choose.Plan, Priced]:
        site, collective = self.site, demand.collective

        def priced(plan: choose.Plan) -> Priced:
            pricer = Pricer(plan.schedule, site.fabric, table)
            return pricer.price(collective, overheads=site.overheads)

        algorithm = cheapest.algorithm_for(self.algorithm, collective.kind)
        plan = cheapest.plan(
            collective,
            table,
            site.fabric,
            algorithm,
            lambda made: priced(made).duration_ps,
            site.policy,
        )
        return plan, priced(plan)


def busiest(fabric: Fabric, load: np.ndarray, most: int = 3) -> list[tuple[str, int, int]]:
    """(name, bytes, ps) of the links between nodes that need most time for their bytes."""
    wires = np.arange(fabric.wires)
    need = load[wires] / fabric.rate[wires]
    order = np.lexsort([wires, -need])[:most]
    found = [(fabric.link_name(i), int(load[i]), int(fabric.rate[i])) for i in order.tolist()]
    return [(name, nbytes, transfer_ps(nbytes, rate)) for name, nbytes, rate in found if nbytes]
