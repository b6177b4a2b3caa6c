"""Which algorithm a collective uses: the vendor's published policy, or the name a user gives.

Source: AWS Neuron documentation, "intra-node" and "inter-node collective communication" of the
Neuron Runtime pages (SDK 2.32). Its thresholds are for a full trn2 node; those of smaller groups
and of steps across nodes are not published, so the same ones are used. 1 MB is 1e6 bytes there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from trnsim.device.errors import BadInput
from trnsim.device.units import format_bytes

from .algorithms import hierarchical, mesh, pairwise, rdh, ring
from .routes import Fabric
from .schedule import POINT_TO_POINT, Collective, Schedule

MESH_BELOW = 1_000_000  # bytes; "< 1 MB"
RDH_UP_TO = 56_000_000  # bytes; "1-56 MB", KangaRing above
MESH_RANKS = 128  # the runtime's header nec.h: mesh takes at most 128 devices
FLAT = {
    "ring": ring.KINDS,
    "mesh": mesh.KINDS,
    "rdh": rdh.KINDS,
    "pairwise": pairwise.KINDS,
}
NAMES = ("policy", *FLAT, "hierarchical", "hierarchical:INTRA+INTER")


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
) -> Plan:
    """Choose for the collective in its groups (int[G, n] ranks), and build the schedule.

    All groups share one schedule: its rings (or hypercube, for rdh) follow the first group's places
    on the fabric. Groups that lie differently on the servers get a flat algorithm.
    """
    table = np.asarray(groups, np.int64)
    servers = _layout(table, fabric)
    choice = choose(collective, servers, algorithm)
    inside = choice.algorithm.removeprefix("hierarchical:").partition("+")[0]
    order = fabric.cube_order(table[0]) if inside == "rdh" else fabric.ring_order(table[0])
    return Plan(build(collective, choice.algorithm, servers, order.tolist()), choice)


def choose(
    collective: Collective, servers: Sequence[int] | None, algorithm: str = "policy"
) -> Choice:
    """Choose for one group. servers: the server of each group position; None if several groups
    share the schedule and lie differently on their servers.

    Raises BadInput for a name that does not exist or does not do this kind of collective.
    """
    if algorithm == "policy":
        return _policy(collective, servers)
    if algorithm.startswith("hierarchical"):
        if servers is None:
            raise BadInput("algorithm", algorithm, f"{', '.join(FLAT)}: groups lie differently")
        if algorithm == "hierarchical":
            intra, inter = _steps(collective, servers)
            algorithm = f"hierarchical:{intra.algorithm}+{inter.algorithm}"
    _check_name(collective.kind, algorithm)
    return Choice(algorithm, "asked for by name")


def build(
    collective: Collective,
    algorithm: str,
    servers: Sequence[int] | None,
    order: Sequence[int] | None = None,
) -> Schedule:
    """The schedule of a named algorithm. order: group positions along the ring, or by corner of
    the hypercube; in a hierarchy, that of the ranks inside a server.

    Schedules do not depend on sizes: equal calls give the same object.
    """
    _check_name(collective.kind, algorithm)
    shape = Collective(
        collective.kind,
        collective.ranks,
        1,
        reduction="add" if collective.reducing else None,
        root=collective.root,
        pairs=collective.pairs,
    )
    return _build(shape, algorithm, tuple(servers or ()), None if order is None else tuple(order))


@lru_cache(maxsize=256)
def _build(
    shape: Collective, algorithm: str, servers: tuple[int, ...], order: tuple[int, ...] | None
) -> Schedule:
    if algorithm.startswith("hierarchical:"):
        intra, inter = algorithm.partition(":")[2].split("+")
        return hierarchical.schedule(shape, _places(servers, order), intra, inter)
    if algorithm in ("ring", "rdh"):
        return {"ring": ring, "rdh": rdh}[algorithm].schedule(shape, order)
    return {"mesh": mesh, "pairwise": pairwise}[algorithm].schedule(shape)


def _places(servers: tuple[int, ...], order: tuple[int, ...] | None) -> np.ndarray:
    """Group positions by (server, local index), local indices as in `order` on the first."""
    places = hierarchical.places_of(servers)
    if order is None:
        return places
    rank = np.empty(len(order), np.int64)
    rank[list(order)] = np.arange(len(order))
    return places[:, np.argsort(rank[places[0]])]


def _policy(collective: Collective, servers: Sequence[int] | None) -> Choice:
    if collective.ranks == 1:
        return Choice("mesh", "one rank: nothing moves")
    if collective.kind in POINT_TO_POINT:
        return Choice("mesh", "point to point: one round of direct transfers")
    if collective.kind not in rdh.KINDS and collective.kind != "all_to_all":
        return Choice("mesh", f"{collective.kind}: direct transfers")
    if collective.kind == "all_to_all":
        return _all_to_all(collective.ranks)
    sizes = [1, 2] if servers is None else _per_server(servers)
    if len(sizes) == 1:
        return _by_size(collective.nbytes, collective.ranks, "inside one server")
    if max(sizes) == 1:
        return _across(collective.nbytes, len(sizes))
    if len(set(sizes)) > 1:
        where = "spread unevenly over servers, so flat"
        return _by_size(collective.nbytes, collective.ranks, where)
    intra, inter = _steps(collective, servers or ())
    name = f"hierarchical:{intra.algorithm}+{inter.algorithm}"
    where = f"{len(sizes)} servers with {sizes[0]} ranks each"
    return Choice(name, f"{where}; intra {intra.reason}; inter {inter.reason}")


def _steps(collective: Collective, servers: Sequence[int]) -> tuple[Choice, Choice]:
    """(intra, inter) of a hierarchy: across servers, each local index handles its share."""
    sizes = _per_server(servers)
    share = collective.nbytes // (1 if collective.kind == "broadcast" else max(sizes))
    intra = _by_size(collective.nbytes, max(sizes), "inside a server")
    return intra, _across(share, len(sizes))


def _all_to_all(ranks: int) -> Choice:
    if ranks <= MESH_RANKS:
        return Choice("mesh", "the vendor runs all_to_all on mesh")
    return Choice("pairwise", f"{ranks} ranks are too many for mesh, which takes {MESH_RANKS}")


def _by_size(nbytes: int, ranks: int, where: str) -> Choice:
    size = format_bytes(nbytes)
    if nbytes < MESH_BELOW and ranks <= MESH_RANKS:
        return Choice("mesh", f"{size} is below 1 MB {where}")
    if nbytes < MESH_BELOW:
        return Choice("rdh", f"{size} is small, but {ranks} ranks are too many for mesh {where}")
    if nbytes <= RDH_UP_TO:
        return Choice("rdh", f"{size} is between 1 and 56 MB {where}")
    return Choice("ring", f"{size} is above 56 MB {where}: KangaRing is not built yet, so ring")


def _across(nbytes: int, servers: int) -> Choice:
    chosen = _by_size(nbytes, servers, "across servers")
    if chosen.algorithm == "ring":
        return Choice("ring", f"{format_bytes(nbytes)} is above 56 MB across servers")
    if chosen.algorithm == "rdh" and servers & (servers - 1):
        return Choice("ring", f"{servers} servers are no power of two, which RDH needs across them")
    return chosen


def _per_server(servers: Sequence[int]) -> list[int]:
    return np.unique(np.asarray(servers), return_counts=True)[1].tolist()


def _layout(table: np.ndarray, fabric: Fabric) -> tuple[int, ...] | None:
    """The server of each position, numbered by first appearance; None if groups differ."""
    patterns = {_pattern(row) for row in fabric.rank_server[table]}
    return patterns.pop() if len(patterns) == 1 else None


def _pattern(servers: np.ndarray) -> tuple[int, ...]:
    _, first, which = np.unique(servers, return_index=True, return_inverse=True)
    return tuple(np.argsort(np.argsort(first))[which].tolist())


def _check_name(kind: str, algorithm: str) -> None:
    head, _, steps = algorithm.partition(":")
    if head == "hierarchical":
        _check_steps(kind, steps)
    elif algorithm not in FLAT:
        raise BadInput("algorithm", algorithm, NAMES)
    elif kind not in FLAT[algorithm]:
        able = [name for name, kinds in FLAT.items() if kind in kinds]
        raise BadInput(f"algorithm of {kind}", algorithm, able)


def _check_steps(kind: str, steps: str) -> None:
    if kind not in hierarchical.KINDS:
        able = [name for name, kinds in FLAT.items() if kind in kinds]
        raise BadInput(f"algorithm of {kind}", "hierarchical", able)
    names = steps.split("+")
    wrong = [name for name in names if name not in hierarchical.MODULES]
    if len(names) != 2 or wrong:
        pairs = [f"{a}+{b}" for a in hierarchical.INTRA for b in hierarchical.INTER]
        raise BadInput("steps of algorithm hierarchical", steps, pairs)
