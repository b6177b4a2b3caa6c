"""What `trnsim collective` computes: one collective in its groups, over sizes, on a fabric.

site = instance_site("trn2.48xlarge")
groups = group_table(site.job(), None)
row = Bench(site, groups).measure(Collective("all_reduce", 64, 2**20, "f32", "add"))
row.time_ps, row.busbw, row.bound, row.limited_by, row.reason
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from trnsim.collectives import choose
from trnsim.collectives.fabric import Fabric
from trnsim.collectives.price import Overheads, Priced, Pricer
from trnsim.collectives.schedule import Collective
from trnsim.device.chip import Chip
from trnsim.device.errors import BadInput

from .communicator import listed
from .instances import fabric, load_instance
from .lnc import check_lnc
from .mesh import Mesh
from .placement import place


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
        if self.instance is not None:
            shape = Mesh((("ranks", ranks),))
            place(load_instance(self.instance), shape, nodes=self.nodes, lnc=self.lnc)
        each, per_node = ranks // self.nodes, available // self.nodes
        return (np.arange(self.nodes)[:, None] * per_node + np.arange(each)).reshape(-1)

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
    instance = load_instance(name, overlay)
    lnc = check_lnc(instance.chip, lnc)
    many = f"{nodes} x {instance.name}" if nodes > 1 else instance.name
    return Site(
        title=f"{many} at LNC={lnc}",
        fabric=fabric(instance, nodes, lnc),
        overheads=overheads_of(instance.chip),
        nodes=nodes,
        lnc=lnc,
        instance=instance.name,
        chip=instance.chip,
    )


def overheads_of(chip: Chip) -> Overheads:
    """Start and step costs of the chip's CC-cores. Ranks handshake before data moves."""
    return Overheads(start_ps=chip.collective_start_ps, step_ps=chip.cc_step_ps)


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
class Arrivals:
    """When ranks call the collective: fixed delays by job rank, and jitter up to `jitter_ps`.

    Jitter is uniform in whole picoseconds, drawn anew for each of the `iterations`.
    """

    delays: Mapping[int, int] = field(default_factory=dict)
    jitter_ps: int = 0
    seed: int = 0
    iterations: int = 1

    @property
    def together(self) -> bool:
        """Whether all ranks come at once."""
        return not self.jitter_ps and not any(self.delays.values())

    def draw(self, job: np.ndarray, groups: np.ndarray) -> list[np.ndarray]:
        """int64[G, n] ps of every iteration; without jitter they are all alike, so one."""
        ps = dict.fromkeys(job.tolist(), 0)
        ps |= {int(job[rank]): late for rank, late in self.delays.items()}
        fixed = np.array([ps[rank] for rank in groups.reshape(-1).tolist()], np.int64)
        fixed = fixed.reshape(groups.shape)
        if not self.jitter_ps:
            return [fixed]
        random = np.random.default_rng(self.seed)
        draws = range(self.iterations)
        return [fixed + random.integers(0, self.jitter_ps + 1, groups.shape) for _ in draws]


@dataclass(frozen=True)
class Row:
    """One size. Times in ps, bandwidths in bytes/s (GB/s is 1e9), sizes in bytes per rank.

    times: from the first arrival to the last end, per iteration; after_ps: from the last arrival.
    late: the job rank that came last, None if all came together.
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

    algorithm: `policy`, `best` or a name. Schedules and routes are kept from size to size.
    """

    site: Site
    groups: np.ndarray
    algorithm: str = "policy"
    job: np.ndarray | None = None
    arrivals: Arrivals = field(default_factory=Arrivals)

    @cached_property
    def _pricers(self) -> dict[int, Pricer]:
        return {}

    @cached_property
    def _ranks(self) -> np.ndarray:
        return np.sort(self.groups.reshape(-1)) if self.job is None else self.job

    @cached_property
    def _draws(self) -> list[np.ndarray]:
        return self.arrivals.draw(self._ranks, self.groups)

    def plan(self, collective: Collective) -> choose.Plan:
        """The schedule of all groups, and the reason for it."""
        return choose.plan(collective, self.groups, self.site.fabric, self.algorithm)

    def price(self, collective: Collective, plan: choose.Plan, arrivals: np.ndarray) -> Priced:
        """The price of a plan."""
        schedule = plan.schedule
        if id(schedule) not in self._pricers:
            self._pricers[id(schedule)] = Pricer(schedule, self.site.fabric, self.groups)
        overheads = self.site.overheads
        return self._pricers[id(schedule)].price(collective, arrivals=arrivals, overheads=overheads)

    def measure(self, collective: Collective, checked: str | None = None) -> Row:
        """One row. Raises TrnsimError for a rank that cannot be reached."""
        plan = self.plan(collective)
        prices = [(a, self.price(collective, plan, a)) for a in self._draws]
        times = tuple(int((p.end.max(axis=1) - a.min(axis=1)).max()) for a, p in prices)
        last = prices[-1][1]
        return Row(
            nbytes=collective.nbytes,
            count=collective.nbytes // collective.itemsize,
            times=times,
            after_ps=last.duration_ps,
            bus_factor=collective.bus_factor,
            bound=last.bound_busbw,
            limited_by=last.limited_by,
            algorithm=plan.choice.algorithm,
            reason=plan.choice.reason,
            rounds=plan.schedule.rounds,
            input_bytes=_largest(collective, collective.input_count),
            output_bytes=_largest(collective, collective.output_count),
            late=None if self.arrivals.together else self._late(last),
            checked=checked,
        )

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


def describe_groups(groups: np.ndarray, job: np.ndarray, most: int = 4) -> str:
    """`1 group of N=64: ranks 0-63`, in ranks of the job."""
    place = {rank: i for i, rank in enumerate(job.tolist())}
    shown = [listed([place[rank] for rank in row]) for row in groups[:most].tolist()]
    shown += ["..."] if len(groups) > most else []
    many = "group" if len(groups) == 1 else "groups"
    return f"{len(groups)} {many} of N={groups.shape[1]}: ranks {' | '.join(shown)}"
