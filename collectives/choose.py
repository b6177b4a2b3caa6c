"""Which algorithm a collective uses: the vendor's published policy, or the name a user gives.

Source: AWS Neuron documentation, "intra-node" and "inter-node collective communication" of the
Neuron Runtime pages (SDK 2.32), and the limits in the runtime's header nec.h. The thresholds are
for a full trn2 node; those of smaller groups and of steps across nodes are not published, so the
same ones are used. 1 MB is 1e6 bytes there. On one chip, the vendor's tool reports RDH up to the
largest size it was asked for (64 MB), so there KangaRing is never taken.

The cheapest by price is up to the caller, who has the prices: `candidates` names what to try.

Names may have a number: ring:CHANNELS, kangaring:CHANNELS, torus:CHANNELS,
double_binary_tree:CHUNKS, hierarchical:INTRA+INTER:STAGES.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from trnsim.device.errors import BadInput
from trnsim.device.units import format_bytes

from .algorithms import (
    bruck,
    hierarchical,
    kangaring,
    mesh,
    pairwise,
    rdh,
    ring,
    single_step,
    torus,
    tree,
)
from .layout import Layout, chip_orders, layout
from .routes import Fabric
from .schedule import KINDS, POINT_TO_POINT, REDUCING, Collective, Schedule

FLAT = {
    "ring": ring.KINDS,
    "mesh": mesh.KINDS,
    "single_step_mesh": single_step.KINDS,
    "rdh": rdh.KINDS,
    "kangaring": kangaring.KINDS,
    "double_binary_tree": tree.KINDS,
    "bruck": bruck.KINDS,
    "torus": torus.KINDS,
    "pairwise": pairwise.KINDS,
}
NAMES = ("policy", *FLAT, "hierarchical", "hierarchical:INTRA+INTER")
NUMBERED = ("ring", "kangaring", "torus", "double_binary_tree")
CHANNELS = 4  # of a group that covers a server; "channels: at most 4", nki.collectives


@dataclass(frozen=True)
class Policy:
    """Thresholds of the published policy.

    mesh_below: bytes, "< 1 MB". rdh_up_to: bytes, "1-56 MB", KangaRing above. mesh_ranks,
    kangaring_ranks: most ranks (nec.h). flat_ring: large messages on several servers go round one
    flat ring instead of a hierarchy, which the vendor does on trn1 only. stages: pipeline stages of
    hierarchies for large messages, "up to 3"; for groups of more than pipelined_ranks one, as
    schedules and their prices grow with every stage.
    """

    mesh_below: int = 1_000_000
    rdh_up_to: int = 56_000_000
    mesh_ranks: int = 128
    kangaring_ranks: int = 256
    flat_ring: bool = False
    stages: int = 3
    pipelined_ranks: int = 4096


PUBLISHED = Policy()


@dataclass(frozen=True)
class Choice:
    """An algorithm by name and why it was taken."""

    algorithm: str
    reason: str


@dataclass(frozen=True, eq=False)
class Plan:
    """A schedule for all groups of a collective, and the choice that led to it."""

    schedule: Schedule
    choice: Choice


def plan(
    collective: Collective,
    groups: Sequence[Sequence[int]] | np.ndarray,
    fabric: Fabric,
    algorithm: str = "policy",
    policy: Policy = PUBLISHED,
) -> Plan:
    """Choose for the collective in its groups (int[G, n] ranks), and build the schedule.

    All groups share one schedule: its rings (or hypercube, for rdh) follow the first group's places
    on the fabric. Groups that lie differently on the servers get a flat algorithm.
    """
    table = np.asarray(groups, np.int64)
    lies = layout(table, fabric)
    choice = choose(collective, lies, algorithm, policy)
    orders = _orders(choice.algorithm, table[0], lies, fabric)
    return Plan(build(collective, choice.algorithm, lies, orders), choice)


def choose(
    collective: Collective,
    lies: Layout | Sequence[int] | None,
    algorithm: str = "policy",
    policy: Policy = PUBLISHED,
) -> Choice:
    """Choose for one group. lies: its layout, or only the server of each group position; None if
    several groups share the schedule and lie differently on their servers.

    Raises BadInput for a name that does not exist or does not do this kind of collective.
    """
    lies = lies if isinstance(lies, Layout) else Layout.of_servers(lies)
    if algorithm == "policy":
        return _Chooser(collective, lies, policy).choose()
    if algorithm.startswith("hierarchical"):
        if lies.servers is None:
            raise BadInput("algorithm", algorithm, f"{', '.join(FLAT)}: groups lie differently")
        if algorithm == "hierarchical":
            intra, inter = _Chooser(collective, lies, policy).steps()
            algorithm = f"hierarchical:{intra.algorithm}+{inter.algorithm}"
    _check_name(collective.kind, algorithm)
    return Choice(algorithm, "asked for by name")


def candidates(collective: Collective, lies: Layout) -> list[str]:
    """Names of the algorithms worth a price for this collective and group, cheapest to build first.

    Without those that would need more than a million transfers.
    """
    kind, n = collective.kind, collective.ranks
    quadratic = {"mesh", "single_step_mesh", "pairwise"} | (
        {"bruck"} if kind == "all_to_all" else set()
    )
    able = [name for name, kinds in FLAT.items() if kind in kinds]
    if (
        kind not in ("broadcast", "reduce", "gather", "scatter", "barrier", *POINT_TO_POINT)
        and n > 1000
    ):
        able = [name for name in able if name not in quadratic]
    if lies.chips is None or not lies.whole or lies.chips.shape[1] % 2:
        able = [name for name in able if name != "kangaring"]
    if lies.grid is None:
        able = [name for name in able if name != "torus"]
    if "double_binary_tree" in able:
        able += ["double_binary_tree:1", "double_binary_tree:32"]
    return able + _hierarchies(collective, lies)


def kinds(algorithm: str) -> tuple[str, ...]:
    """The kinds of collectives that a name can do; those of the policy are all.

    Raises BadInput for a name that does not exist.
    """
    if algorithm == "policy":
        return KINDS
    head, steps, _ = _parsed(algorithm)
    if head == "hierarchical":
        if steps:
            _check_steps(steps)
        return hierarchical.KINDS
    if head not in FLAT:
        raise BadInput("algorithm", algorithm, NAMES)
    return FLAT[head]


def _hierarchies(collective: Collective, lies: Layout) -> list[str]:
    kind, places = collective.kind, lies.places
    if places is None or min(places.shape) < 2 or kind not in hierarchical.KINDS:
        return []
    if kind == "all_to_all":
        return ["hierarchical:mesh+mesh"] if places.size <= 1000 else []
    intra = [name for name in hierarchical.INTRA if _can(name, _intra_kinds(kind))]
    inter = [name for name in hierarchical.INTER if _can(name, (kind,))]
    if lies.local_chips is None or lies.local_chips.shape[1] % 2:
        intra = [name for name in intra if name != "kangaring"]
    if len(places) > 1000:
        inter = [name for name in inter if "mesh" not in name]
    pairs = [f"hierarchical:{a}+{b}" for a in intra for b in inter]
    return [*pairs, *(f"{pair}:{hierarchical.STAGES}" for pair in pairs)]


def _can(name: str, kinds: Sequence[str]) -> bool:
    return set(kinds) <= set(FLAT[name])


def _intra_kinds(kind: str) -> tuple[str, ...]:
    return ("reduce_scatter", "all_gather") if kind == "all_reduce" else (kind,)


def build(
    collective: Collective,
    algorithm: str,
    lies: Layout | Sequence[int] | None,
    orders: Sequence[int] | np.ndarray | None = None,
) -> Schedule:
    """The schedule of a named algorithm.

    orders: group positions along the ring (or rings, int[channels, n]), or by corner of the
    hypercube (or cubes); in a hierarchy, local indices; for kangaring, chips. Schedules do not
    depend on sizes: equal calls give the same object. Raises BadInput for a group that it cannot
    serve.
    """
    _check_name(collective.kind, algorithm)
    lies = lies if isinstance(lies, Layout) else Layout.of_servers(lies)
    reduction = "add" if collective.kind in REDUCING else None
    shape = replace(collective, counts=1, dtype="f32", reduction=reduction)
    return _build(shape, algorithm, lies, _Orders.of(orders))


@dataclass(frozen=True)
class _Orders:
    """An array that can be a key."""

    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, orders: Sequence[int] | np.ndarray | None) -> "_Orders | None":
        table = None if orders is None else np.ascontiguousarray(orders, np.int64)
        return None if table is None else cls(table.shape, table.tobytes())

    @property
    def array(self) -> np.ndarray:
        return np.frombuffer(self.data, np.int64).reshape(self.shape)


@lru_cache(maxsize=64)
def _build(shape: Collective, algorithm: str, lies: Layout, key: _Orders | None) -> Schedule:
    head, steps, number = _parsed(algorithm)
    orders = None if key is None else key.array
    match head:
        case "hierarchical":
            return _hierarchical(shape, steps, number or 1, lies, orders)
        case "ring":
            return ring.schedule(shape, orders)
        case "rdh":
            return rdh.schedule(shape, orders)
        case "mesh":
            return mesh.schedule(shape, lies.chips if len(lies.per_server or ()) == 1 else None)
        case "kangaring":
            return kangaring.schedule(shape, _whole_chips(lies), orders)
        case "torus":
            return _torus(shape, lies.grid, number)
        case "double_binary_tree":
            return tree.schedule(shape, number or tree.CHUNKS)
    modules = {"single_step_mesh": single_step, "bruck": bruck, "pairwise": pairwise}
    return modules[head].schedule(shape)


def _hierarchical(
    shape: Collective, steps: str, stages: int, lies: Layout, orders: np.ndarray | None
) -> Schedule:
    intra, inter = steps.split("+")
    if lies.places is None:
        allowed = "the same local ranks on every server (hierarchical)"
        raise BadInput("ranks per server", lies.per_server, allowed)
    places = lies.places
    if intra == "rdh" and orders is not None:
        places, orders = places[:, orders], None
    return hierarchical.schedule(
        shape, places, intra, inter, stages=stages, orders=orders, chips=lies.local_chips
    )


def _torus(shape: Collective, grid: np.ndarray | None, channels: int | None) -> Schedule:
    if grid is None:
        raise BadInput("group of algorithm torus", "these ranks", "all chips of one torus")
    places = grid[..., 0] if grid.shape[-1] == 1 else grid
    whole = 2 * places.ndim if grid.shape[-1] == 1 else 2
    return torus.schedule(shape, places, channels or whole)


def _whole_chips(lies: Layout) -> np.ndarray:
    if lies.chips is None or not lies.whole:
        allowed = "all ranks of each of its chips, the same number on each"
        raise BadInput("group of algorithm kangaring", "these ranks", allowed)
    return lies.chips


def _orders(algorithm: str, group: np.ndarray, lies: Layout, fabric: Fabric) -> np.ndarray | None:
    """The orders that `build` takes, along the fabric."""
    head, steps, number = _parsed(algorithm)
    chips, step, channels = lies.chips, head, number or CHANNELS
    if head == "hierarchical":
        step, channels = steps.split("+")[0], CHANNELS
        group = group[:0] if lies.places is None else group[lies.places[0]]
        chips = lies.local_chips
    if step == "rdh":
        return fabric.cube_order(group) if head == "hierarchical" else fabric.cube_orders(group)
    if step == "ring":
        return fabric.rings(group, channels)
    if step == "kangaring" and chips is not None and len(group):
        return chip_orders(fabric.rings(group, channels), chips)
    return None


class _Chooser:
    """The published policy for one collective and group."""

    def __init__(self, collective: Collective, lies: Layout, policy: Policy) -> None:
        self.collective, self.lies, self.policy = collective, lies, policy

    def choose(self) -> Choice:
        kind, ranks, sizes = self.collective.kind, self.collective.ranks, self.lies.per_server
        if ranks == 1:
            return Choice("mesh", "one rank: nothing moves")
        if kind in POINT_TO_POINT:
            return Choice("mesh", "point to point: one round of direct transfers")
        if kind == "all_to_all":
            return self._all_to_all()
        if kind in ("gather", "scatter", "barrier"):
            return self._small(kind)
        if sizes is None:
            return self._by_size(self.collective.nbytes, ranks, "(groups lie differently)")
        if len(sizes) == 1:
            return self._by_size(
                self.collective.nbytes, ranks, "inside one server", self.lies.chips
            )
        if max(sizes) == 1:
            return self._across(self.collective.nbytes, len(sizes))
        if self.lies.places is None:
            where = "spread unevenly over servers, so flat"
            return self._by_size(self.collective.nbytes, ranks, where)
        return self._hierarchy(*self.lies.places.shape)

    def steps(self) -> tuple[Choice, Choice]:
        """(intra, inter) of a hierarchy: across servers, each local index handles its share."""
        sizes = self.lies.per_server or [1]
        nbytes, rooted = self.collective.nbytes, self.collective.kind in ("broadcast", "reduce")
        share = nbytes if rooted else nbytes // max(sizes)
        intra = self._by_size(nbytes, max(sizes), "inside a server", self.lies.local_chips)
        return intra, self._across(share, len(sizes))

    def _hierarchy(self, servers: int, each: int) -> Choice:
        where = f"{servers} servers with {each} ranks each"
        large = self.collective.nbytes > self.policy.rdh_up_to
        if self.policy.flat_ring and large and self.collective.kind in ring.KINDS:
            return Choice("ring", f"{where}: large messages go round one flat ring")
        intra, inter = self.steps()
        name = f"hierarchical:{intra.algorithm}+{inter.algorithm}"
        few = self.collective.ranks <= self.policy.pipelined_ranks
        if self.policy.stages > 1 and large and few:
            name += f":{self.policy.stages}"
        return Choice(name, f"{where}; intra {intra.reason}; inter {inter.reason}")

    def _all_to_all(self) -> Choice:
        ranks, most = self.collective.ranks, self.policy.mesh_ranks
        if ranks <= most:
            return Choice("mesh", "the vendor runs all_to_all on mesh")
        return Choice("pairwise", f"{ranks} ranks are too many for mesh, which takes {most}")

    def _small(self, kind: str) -> Choice:
        ranks = self.collective.ranks
        if ranks <= self.policy.mesh_ranks:
            return Choice("mesh", f"{kind}: direct transfers")
        return Choice("rdh", f"{kind}: {ranks} ranks are too many for mesh, so a binomial tree")

    def _by_size(
        self, nbytes: int, ranks: int, where: str, chips: np.ndarray | None = None
    ) -> Choice:
        size, policy = format_bytes(nbytes), self.policy
        few = ranks <= policy.mesh_ranks
        if nbytes < policy.mesh_below and few:
            return Choice("mesh", f"{size} is below {_mb(policy.mesh_below)} {where}")
        if nbytes < policy.mesh_below:
            return Choice(
                "rdh", f"{size} is small, but {ranks} ranks are too many for mesh {where}"
            )
        if nbytes <= policy.rdh_up_to:
            span = f"{policy.mesh_below / 1e6:g} and {_mb(policy.rdh_up_to)}"
            return Choice("rdh", f"{size} is between {span} {where}")
        if chips is not None and len(chips) == 1 and self.collective.kind in rdh.KINDS:
            return Choice("rdh", f"{size} {where}, on one chip, where no ring has links to fill")
        large = f"{size} is above {_mb(policy.rdh_up_to)} {where}"
        missing = self._no_kangaring(ranks, chips)
        return Choice("ring", f"{large}{missing}") if missing else Choice("kangaring", large)

    def _no_kangaring(self, ranks: int, chips: np.ndarray | None) -> str:
        """Why a large collective is on Ring; empty if it can be on KangaRing."""
        if self.collective.kind not in kangaring.KINDS:
            return f", and KangaRing has no {self.collective.kind}"
        if ranks > self.policy.kangaring_ranks:
            return f", and {ranks} ranks are too many for KangaRing"
        if chips is None or not self.lies.whole:
            return ", and KangaRing needs all ranks of each chip in the group"
        if chips.shape[1] % 2:
            return ", and KangaRing needs pairs of ranks on a chip"
        return ""

    def _across(self, nbytes: int, servers: int) -> Choice:
        size, policy = format_bytes(nbytes), self.policy
        if nbytes > policy.rdh_up_to:
            return Choice("ring", f"{size} is above {_mb(policy.rdh_up_to)} across servers")
        chosen = self._by_size(nbytes, servers, "across servers")
        if chosen.algorithm == "rdh" and servers & (servers - 1):
            why = f"{servers} servers are no power of two, which RDH needs across them"
            return Choice("ring", why)
        return chosen


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:g} MB"


def _parsed(algorithm: str) -> tuple[str, str, int | None]:
    """(name, steps of a hierarchy, number) of `name[:steps][:number]`. Raises BadInput."""
    head, *rest = algorithm.split(":")
    steps = rest.pop(0) if head == "hierarchical" and rest else ""
    if not rest:
        return head, steps, None
    numbered = head == "hierarchical" or head in NUMBERED
    if len(rest) > 1 or not numbered or not rest[0].isdecimal() or int(rest[0]) < 1:
        raise BadInput("algorithm", algorithm, NAMES)
    return head, steps, int(rest[0])


def _check_name(kind: str, algorithm: str) -> None:
    head, steps, _ = _parsed(algorithm)
    able = [name for name, kinds in FLAT.items() if kind in kinds]
    if head == "hierarchical":
        if kind not in hierarchical.KINDS:
            raise BadInput(f"algorithm of {kind}", "hierarchical", able)
        _check_steps(steps)
    elif head not in FLAT:
        raise BadInput("algorithm", algorithm, NAMES)
    elif kind not in FLAT[head]:
        raise BadInput(f"algorithm of {kind}", algorithm, able)


def _check_steps(steps: str) -> None:
    pairs = [f"{a}+{b}" for a in hierarchical.INTRA for b in hierarchical.INTER]
    if steps not in pairs:
        raise BadInput("steps of algorithm hierarchical", steps, pairs)
