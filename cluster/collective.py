"""What `trnsim collective` computes: one collective in its groups, over sizes, on a fabric.

site = instance_site("trn2.48xlarge")
groups = group_table(site.job(), None)
row = Bench(site, groups).measure(Collective("all_reduce", 64, 2**20, "f32", "add"))
row.time_ps, row.busbw, row.bound, row.limited_by, row.reason
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from trnsim.collectives import choose
from trnsim.collectives.costs import Overheads
from trnsim.collectives.fabric import Fabric
from trnsim.collectives.inflight import Call
from trnsim.collectives.members import members
from trnsim.collectives.price import Priced, Pricer
from trnsim.collectives.schedule import Collective
from trnsim.device.chip import Chip
from trnsim.device.errors import BadInput

from . import cheapest
from .communicator import listed
from .conditions import Start
from .instances import Instance, fabric, load_instance, overheads
from .lnc import check_lnc
from .mesh import Mesh
from .placement import place

FLAT_RING = ("trn1",)
"""Chips whose large messages go round one ring over all nodes (internode-collective-comm.rst)."""


@dataclass(frozen=True, eq=False)
class Site:
    """Where collectives run: a fabric with ranks, and the overheads of its controllers."""

    title: str
    fabric: Fabric
    overheads: Overheads = field(default_factory=Overheads)
    nodes: int = 1
    lnc: int | None = None
    instance: str | None = None
    chip: Chip | None = None
    notes: tuple[str, ...] = ()
    policy: choose.Policy = choose.PUBLISHED

    def job(self, ranks: int | None = None) -> np.ndarray:
        """int64[ranks]: the fabric's rank of each rank of the job, the same number on every node.

        Raises BadInput for more ranks than there are, a number that the nodes do not divide, or one
        that the instance's runtime refuses.
        """
        available = self.fabric.ranks
        ranks = available if ranks is None else ranks
        if not 1 <= ranks <= available:
            raise BadInput("-r", ranks, f"1 to {available} ranks on {self.title}", available)
        if ranks % self.nodes:
            near = max(1, ranks // self.nodes) * self.nodes
            raise BadInput("-r", ranks, f"a multiple of the {self.nodes} nodes", near)
        self._check_runtime(ranks)
        each, per_node = ranks // self.nodes, available // self.nodes
        return (np.arange(self.nodes)[:, None] * per_node + np.arange(each)).reshape(-1)

    def _check_runtime(self, ranks: int) -> None:
        if self.instance is None:
            return
        instance, shape = load_instance(self.instance), Mesh((("ranks", ranks),))
        try:
            place(instance, shape, nodes=self.nodes, lnc=self.lnc)
        except BadInput as error:
            allowed = str(error).partition("allowed: ")[2]
            raise BadInput("-r", ranks, allowed) from None

    @property
    def leaned_on(self) -> dict[str, str]:
        """Numbers of the chip that shape collectives and are assumed or calibrated -> status."""
        if self.chip is None:
            return {}
        numbers = {key: self.chip.number(key) for key in self.chip.assumed()}
        return {
            key: number.status
            for key, number in numbers.items()
            if number.section.partition(".")[0] == "collective" and self._uses(key)
        }

    def _uses(self, key: str) -> bool:
        """Whether a number of collectives plays a part in this fabric."""
        if self.instance is None:
            return False
        instance = load_instance(self.instance)
        if key.startswith("efa"):
            return self.nodes > 1
        if key == "switch_latency_ps":
            return instance.topology == "switch"
        if key == "link_bytes_per_s.z":
            return len(instance.dims) == 3
        if key.startswith("link_bytes_per_s."):
            switched = ("server", "rack", "direct") if instance.topology == "switch" else ()
            return key.partition(".")[2] in (instance.topology, *switched)
        return not key.startswith("link_") or instance.topology != "single"


def instance_site(
    name: str, *, nodes: int = 1, lnc: int | None = None, overlay: str | Path | None = None
) -> Site:
    """All logical cores of some instances, with the numbers of an overlay file.

    Raises BadInput as `load_instance` and `fabric` do.
    """
    return site_of(load_instance(name, overlay), nodes=nodes, lnc=lnc)


def site_of(instance: Instance, *, nodes: int = 1, lnc: int | None = None) -> Site:
    """All logical cores of `nodes` instances. Raises BadInput for an LNC the chip does not have."""
    lnc = check_lnc(instance.chip, lnc)
    many = f"{nodes} x {instance.name}" if nodes > 1 else instance.name
    return Site(
        title=f"{many} at LNC={lnc}",
        fabric=fabric(instance, nodes, lnc),
        overheads=overheads(instance, nodes, lnc),
        nodes=nodes,
        lnc=lnc,
        instance=instance.name,
        chip=instance.chip,
        policy=choose.Policy(flat_ring=instance.chip.name in FLAT_RING),
    )


def file_site(path: str | Path) -> tuple[Site, Start]:
    """The fabric of a file without controllers' overheads, and when its ranks start.

    Raises BadFile and BadInput as `read_fabric` does, and BadInput for a fabric without ranks.
    """
    from .fabric_file import read_fabric

    found = read_fabric(path)
    if not found.fabric.ranks:
        raise BadInput(str(path), "no ranks", "a fabric with ranks on its chips")
    return Site(title=found.title, fabric=found.fabric, notes=found.notes), found.start


def group_table(job: np.ndarray, groups: Sequence[Sequence[int]] | None) -> np.ndarray:
    """int64[G, n] fabric ranks of groups of job ranks; None: everybody in one group.

    Raises BadInput for groups of different sizes: they run one schedule.
    """
    if groups is None:
        return job[None, :]
    sizes = [len(group) for group in groups]
    if len(set(sizes)) > 1:
        raise BadInput("replica groups", f"sizes {', '.join(map(str, sizes))}", "one size for all")
    return job[np.asarray(groups, np.int64)]


def apart(ranks: int, size: int) -> list[list[int]]:
    """Groups of `size` ranks that lie as far apart as they can: one per node for `size` nodes.

    Raises BadInput unless `size` divides `ranks`.
    """
    if size < 1 or ranks % size:
        raise BadInput("--data-parallel-dimension", size, f"a divisor of the {ranks} ranks")
    stride = ranks // size
    return [list(range(first, ranks, stride)) for first in range(stride)]


@dataclass(frozen=True)
class Row:
    """One size. Times in ps, bandwidths in bytes/s (GB/s is 1e9), sizes in bytes per rank.

    times: from the first arrival to the last end, per iteration; after_ps: from the last arrival,
    the longest. late: the job rank that came last, None if all came together or it varies.
    """

    nbytes: int
    count: int
    times: tuple[int, ...]
    after_ps: int
    bus_factor: float
    bound: float
    limited_by: str
    algorithm: str
    reason: str
    rounds: int
    input_bytes: int
    output_bytes: int
    late: int | None = None
    checked: str | None = None
    alone_ps: int | None = None

    @property
    def time_ps(self) -> float:
        """The average."""
        return sum(self.times) / len(self.times)

    def percentile(self, name: str) -> float:
        """ps of `avg` or `pNN`, by the nearest rank."""
        if name == "avg":
            return self.time_ps
        return float(np.percentile(self.times, int(name[1:]), method="inverted_cdf"))

    @property
    def algbw(self) -> float:
        return self.nbytes * 1e12 / self.time_ps if self.time_ps else 0.0

    @property
    def busbw(self) -> float:
        return self.algbw * self.bus_factor


@dataclass(frozen=True, eq=False)
class Bench:
    """Prices collectives in groups (int64[G, n] fabric ranks) of a site.

    algorithm: `policy`, `best` or a name; `given`, a plan for all sizes, goes before it. job: the
    fabric ranks that `start` numbers, default those of all groups; with jitter, each of the
    `iterations` is drawn anew. Schedules and routes are kept from size to size.
    """

    site: Site
    groups: np.ndarray
    algorithm: str = "policy"
    job: np.ndarray | None = None
    start: Start = field(default_factory=Start)
    iterations: int = 1
    given: choose.Plan | None = None

    @cached_property
    def _pricers(self) -> dict[int, Pricer]:
        return {}

    @cached_property
    def _ranks(self) -> np.ndarray:
        return np.sort(self.groups.reshape(-1)) if self.job is None else self.job

    @cached_property
    def arrivals(self) -> list[np.ndarray]:
        """int64[G, n] ps of every iteration; without jitter they are all alike, so one."""
        place = np.zeros(self.site.fabric.ranks, np.int64)
        place[self._ranks] = np.arange(len(self._ranks))
        many = self.iterations if self.start.jitter_ps else 1
        late = (self.start.arrivals(len(self._ranks), iteration) for iteration in range(many))
        return [each[place[self.groups]] for each in late]

    def plan(self, collective: Collective) -> choose.Plan:
        """The schedule of all groups, and the reason for it."""
        if self.given is not None:
            return self.given

        def price(plan: choose.Plan) -> int:
            call = self.call(collective, plan, self.arrivals[0])
            options = {"arrivals": call.arrivals, "overheads": call.overheads}
            return call.pricer.price(collective, **options).duration_ps

        site = self.site
        return cheapest.plan(
            collective, self.groups, site.fabric, self.algorithm, price, site.policy
        )

    def call(self, collective: Collective, plan: choose.Plan, arrivals: np.ndarray) -> Call:
        """The call of a plan: its groups arrive at int64[G, n] ps."""
        schedule = plan.schedule
        if id(schedule) not in self._pricers:
            self._pricers[id(schedule)] = Pricer(schedule, self.site.fabric, self.groups)
        return Call(self._pricers[id(schedule)], collective, arrivals, self.site.overheads)

    def measure(self, collective: Collective, checked: str | None = None) -> Row:
        """One row. Raises TrnsimError for a rank that cannot be reached."""
        plan = self.plan(collective)
        prices = []
        for arrivals in self.arrivals:
            call = self.call(collective, plan, arrivals)
            priced = call.pricer.price(collective, arrivals=arrivals, overheads=self.site.overheads)
            prices.append((arrivals, priced))
        return self.row(collective, plan, prices, checked)

    def row(
        self,
        collective: Collective,
        plan: choose.Plan,
        prices: Sequence[tuple[np.ndarray, Priced]],
        checked: str | None = None,
        alone_ps: int | None = None,
    ) -> Row:
        """The row of a collective that has been priced: (arrivals, price) of every iteration."""
        last = prices[-1][1]
        return Row(
            nbytes=collective.nbytes,
            count=collective.nbytes // collective.itemsize,
            times=tuple(int((p.end.max(axis=1) - a.min(axis=1)).max()) for a, p in prices),
            after_ps=max(int((p.end.max(axis=1) - a.max(axis=1)).max()) for a, p in prices),
            bus_factor=collective.bus_factor,
            bound=last.bound_busbw,
            limited_by=last.limited_by,
            algorithm=plan.choice.algorithm,
            reason=plan.choice.reason,
            rounds=plan.schedule.rounds,
            input_bytes=_largest(collective, collective.input_count),
            output_bytes=_largest(collective, collective.output_count),
            late=self._late(last) if self._apart else None,
            checked=checked,
            alone_ps=alone_ps,
        )

    @property
    def _apart(self) -> bool:
        """Whether the same ranks come late each time."""
        return len(self.arrivals) == 1 and bool(np.ptp(self.arrivals[0]))

    def _late(self, priced: Priced) -> int:
        """The job rank that came last in the slowest group."""
        rank = int(priced.late[int(priced.end.max(axis=1).argmax())])
        return int(np.flatnonzero(self._ranks == rank)[0])


def _largest(collective: Collective, count) -> int:
    """Bytes of the rank that has most; even counts differ only at a root or the ends of pairs."""
    n = collective.ranks
    even = isinstance(collective.counts, int) and collective.kind != "permute"
    some = {0, collective.root, n - 1} if even else range(n)
    return max(count(rank) for rank in some) * collective.itemsize


def describe_groups(fabric: Fabric, groups: np.ndarray, job: np.ndarray, most: int = 4) -> str:
    """`1 group of N=16: ranks 0-15; on 4 chips (...)`, in ranks of the job."""
    place = {rank: i for i, rank in enumerate(job.tolist())}
    shown = [listed([place[rank] for rank in row]) for row in groups[:most].tolist()]
    shown += ["..."] if len(groups) > most else []
    many, first = ("group", "") if len(groups) == 1 else ("groups", "the first ")
    where = members(fabric, groups[0]).where
    ranks = " | ".join(shown)
    return f"{len(groups)} {many} of N={groups.shape[1]}: ranks {ranks}; {first}on {where}"
