"""Fabrics: torus, ring, switch, any graph, and fabrics joined by a switch.

Each function gives a `Fabric` (see `routes` for what it can do) without ranks; `Fabric.attach` puts
ranks on its nodes. Rates and latencies come from the caller: there are no hardware numbers here.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from trnsim.device.errors import BadInput

from .routes import Fabric, Level, Rates, Routes, positive

__all__ = ["Fabric", "Level", "Rates", "Routes", "graph", "join", "ring", "switch", "torus"]


def torus(
    dims: Sequence[int], *, bytes_per_s: Rates, latency_ps: Rates = 0, name: str = "chip"
) -> Fabric:
    """A torus of chips, row-major. Rates are per link and direction: one, or one per dimension.

    A dimension of 2 has one cable between its two chips, a dimension of 1 none.
    """
    dims = tuple(int(d) for d in dims)
    if not dims or min(dims) < 1:
        raise BadInput("dims", dims, "one or more positive extents")
    rates, delays = _each("bytes_per_s", bytes_per_s, dims), _each("latency_ps", latency_ps, dims)
    for rate in rates:
        positive("bytes_per_s", rate)
    ids = np.arange(int(np.prod(dims)))
    coordinates = np.stack(np.unravel_index(ids, dims), axis=1).astype(np.int64)
    grid = np.full((len(ids), len(dims), 2), -1, np.int64)
    source, target, rate, latency = [], [], [], []
    for dim, extent in enumerate(dims):
        for way in range(min(extent - 1, 2)):
            there = coordinates.copy()
            there[:, dim] = (there[:, dim] + 1 - 2 * way) % extent
            grid[:, dim, way] = len(ids) * len(source) + ids
            source.append(ids)
            target.append(np.ravel_multi_index(tuple(there.T), dims))
            rate.append(np.full(len(ids), rates[dim]))
            latency.append(np.full(len(ids), delays[dim]))
        if extent == 2:
            grid[:, dim, 1] = grid[:, dim, 0]
    return _fabric(
        tuple(f"{name}{i}" for i in ids),
        ("chip",) * len(ids),
        (_cat(source), _cat(target), _cat(rate), _cat(latency)),
        grid=grid,
        coordinates=coordinates,
        extents=np.tile(np.array(dims, np.int64), (len(ids), 1)),
        part=np.zeros(len(ids), np.int64),
    )


def ring(n: int, *, bytes_per_s: int, latency_ps: int = 0, both_ways: bool = True) -> Fabric:
    """n chips in a ring, with links in both directions or only upwards."""
    whole = torus((n,), bytes_per_s=bytes_per_s, latency_ps=latency_ps)
    if both_ways or n <= 2:
        return whole
    grid = whole.grid.copy()
    grid[:, :, 1] = -1
    up = {k: getattr(whole, k)[:n] for k in ("source", "target", "rate", "latency", "alive")}
    return replace(whole, grid=grid, **up)


def switch(n: int, *, bytes_per_s: int, latency_ps: int = 0) -> Fabric:
    """n chips around one switch. latency_ps is one crossing, charged on the way up."""
    chip = torus((1,), bytes_per_s=bytes_per_s)
    chips = [_renamed(chip, (f"chip{i}",)) for i in range(n)]
    star = join(chips, bytes_per_s=bytes_per_s, latency_ps=latency_ps, prefix="")
    return replace(star, server=np.zeros(len(star.names), np.int64))


def graph(
    nodes: Sequence[str] | dict[str, str], links: Sequence[tuple[str, str, int, int]]
) -> Fabric:
    """Any graph: node names (with kinds) and one-way links (source, target, bytes/s, latency ps).

    Raises BadInput for a name used twice, an unknown end or a rate that is not positive.
    """
    kinds = dict(nodes) if isinstance(nodes, dict) else {n: "chip" for n in nodes}
    if len(kinds) != len(nodes):
        raise BadInput("nodes", ", ".join(nodes), "names used once")
    index = {name: i for i, name in enumerate(kinds)}
    for source, target, rate, _ in links:
        for end in (source, target):
            if end not in index:
                raise BadInput("node of a link", end, index)
        if source == target:
            raise BadInput("link", f"{source}->{target}", "two different nodes")
        positive("bytes_per_s", rate)
    table = np.array([(index[s], index[t], r, d) for s, t, r, d in links], np.int64).reshape(-1, 4)
    n = len(kinds)
    return _fabric(
        tuple(kinds),
        tuple(kinds.values()),
        tuple(table.T),
        grid=np.full((n, 1, 2), -1, np.int64),
        coordinates=np.arange(n)[:, None],
        extents=np.zeros((n, 1), np.int64),
        part=np.zeros(n, np.int64),
    )


def join(
    parts: Sequence[Fabric],
    *,
    bytes_per_s: int,
    latency_ps: int = 0,
    nics: int | None = None,
    nic_bytes_per_s: int | None = None,
    prefix: str = "server",
) -> Fabric:
    """Fabrics side by side, joined by one non-blocking switch. Attach ranks afterwards.

    Without `nics`, every chip has its own link of bytes_per_s to the switch and back. With `nics`,
    each part has that many interfaces of bytes_per_s, which its chips share in blocks; a chip
    reaches its interface at nic_bytes_per_s (default: bytes_per_s).
    latency_ps is one whole crossing, charged on the way up. Inside a part, its own routes hold.
    """
    positive("bytes_per_s", bytes_per_s)
    if not parts:
        raise BadInput("parts", 0, "one fabric or more")
    bare = [part._detached() for part in parts]
    whole = _side_by_side(bare, prefix)
    chips = [whole.chips[whole.server[whole.chips] == s] for s in np.unique(whole.server)]
    if prefix == "":
        chips = [whole.chips]
    wiring = _Wiring(whole, int(bytes_per_s), int(latency_ps), nic_bytes_per_s or bytes_per_s)
    for own in chips:
        wiring.connect(own, nics)
    return wiring.build()


class _Wiring:
    """Adds one level of switch, and the links of chips and interfaces to it."""

    def __init__(self, whole: Fabric, rate: int, latency: int, host_rate: int) -> None:
        self.whole, self.rate, self.latency, self.host_rate = whole, rate, latency, host_rate
        self.names, self.kinds = list(whole.names), list(whole.kinds)
        self.links: list[tuple[int, int, int, int]] = []
        self.switch = self.add_node(f"switch{sum(k == 'switch' for k in self.kinds)}", "switch")
        self.up: dict[int, list[int]] = {}
        self.down: dict[int, list[int]] = {}
        self.servers: list[int] = []

    def add_node(self, name: str, kind: str) -> int:
        self.names.append(name)
        self.kinds.append(kind)
        return len(self.names) - 1

    def add_link(self, source: int, target: int, rate: int, latency: int) -> int:
        self.links.append((source, target, rate, latency))
        return len(self.whole.rate) + len(self.links) - 1

    def connect(self, chips: np.ndarray, nics: int | None) -> None:
        if nics is None:
            for chip in chips.tolist():
                self.up[chip] = [self.add_link(chip, self.switch, self.rate, self.latency), -1]
                self.down[chip] = [-1, self.add_link(self.switch, chip, self.rate, 0)]
            return
        for nic, shared in enumerate(np.array_split(chips, positive("nics", nics))):
            self.connect_nic(nic, shared.tolist())

    def connect_nic(self, index: int, chips: list[int]) -> None:
        if not chips:
            return
        server = int(self.whole.server[chips[0]])
        nic = self.add_node(f"server{server}/nic{index}", "nic")
        self.servers.append(server)
        up = self.add_link(nic, self.switch, self.rate, self.latency)
        down = self.add_link(self.switch, nic, self.rate, 0)
        for chip in chips:
            self.up[chip] = [self.add_link(chip, nic, self.host_rate, 0), up]
            self.down[chip] = [down, self.add_link(nic, chip, self.host_rate, 0)]

    def build(self) -> Fabric:
        old, n = self.whole, len(self.names)
        extra = np.array(self.links, np.int64).reshape(-1, 4)
        server = np.concatenate([old.server, [-1], np.array(self.servers, np.int64)])
        up, down = np.full((n, 2), -1, np.int64), np.full((n, 2), -1, np.int64)
        up[list(self.up)] = list(self.up.values())
        down[list(self.down)] = list(self.down.values())
        grown = [_grown_level(level, n) for level in old.levels]
        return replace(
            old,
            names=tuple(self.names),
            kinds=tuple(self.kinds),
            source=np.concatenate([old.source, extra[:, 0]]),
            target=np.concatenate([old.target, extra[:, 1]]),
            rate=np.concatenate([old.rate, extra[:, 2]]),
            latency=np.concatenate([old.latency, extra[:, 3]]),
            alive=np.concatenate([old.alive, np.ones(len(extra), bool)]),
            grid=_grown(old.grid, n, -1),
            coordinates=_grown(old.coordinates, n, 0),
            extents=_grown(old.extents, n, 0),
            levels=(*grown, Level(np.zeros(n, np.int64), up, down)),
            server=server,
        )


def _side_by_side(parts: Sequence[Fabric], prefix: str) -> Fabric:
    """One fabric with all nodes and links of the parts, renumbered, and no link between them."""
    dims = max(p.grid.shape[1] for p in parts)
    depth = max(len(p.levels) for p in parts)
    nodes = np.cumsum([0, *(len(p.names) for p in parts)])
    links = np.cumsum([0, *(len(p.rate) for p in parts)])
    servers = np.cumsum([0, *(_server_count(p) for p in parts)])
    grids = [_shift(_pad(p.grid, dims, -1), k) for p, k in zip(parts, links[:-1], strict=True)]
    server = [
        np.where(p.server < 0, -1, p.server + k) for p, k in zip(parts, servers[:-1], strict=True)
    ]
    return Fabric(
        names=tuple(_names(parts, prefix)),
        kinds=tuple(kind for p in parts for kind in p.kinds),
        source=_cat([p.source + k for p, k in zip(parts, nodes[:-1], strict=True)]),
        target=_cat([p.target + k for p, k in zip(parts, nodes[:-1], strict=True)]),
        rate=_cat([p.rate for p in parts]),
        latency=_cat([p.latency for p in parts]),
        alive=_cat([p.alive for p in parts]).astype(bool),
        grid=_cat(grids),
        coordinates=_cat([_pad(p.coordinates, dims, 0) for p in parts]),
        extents=_cat([_pad(p.extents, dims, 1) for p in parts]),
        levels=tuple(_stack_level(parts, depth, k, links) for k in range(depth)),
        server=_cat(server),
    )


def _stack_level(parts: Sequence[Fabric], depth: int, index: int, links: np.ndarray) -> Level:
    """Level `index` of all parts; a part with fewer levels repeats its last part numbers."""
    part, up, down, used = [], [], [], 0
    for fabric, first in zip(parts, links[:-1], strict=True):
        level = fabric.levels[min(index, len(fabric.levels) - 1)]
        none = np.full_like(level.up, -1)
        own = index < len(fabric.levels)
        part.append(level.part + used)
        up.append(_shift(level.up, first) if own else none)
        down.append(_shift(level.down, first) if own else none)
        used += int(level.part.max(initial=-1)) + 1
    return Level(_cat(part), _cat(up), _cat(down))


def _names(parts: Sequence[Fabric], prefix: str) -> list[str]:
    if prefix == "":
        return [name for p in parts for name in p.names]
    firsts = np.cumsum([0, *(_server_count(p) for p in parts)]).tolist()
    names = []
    for part, (first, stop) in zip(parts, pairwise(firsts), strict=True):
        tag = f"{prefix}{first}" if stop - first == 1 else f"{prefix}s{first}-{stop - 1}"
        names += [f"{tag}/{name}" for name in part.names]
    return names


def _server_count(fabric: Fabric) -> int:
    return int(fabric.server.max(initial=0)) + 1


def _fabric(names, kinds, links, *, grid, coordinates, extents, part) -> Fabric:
    source, target, rate, latency = (np.asarray(column, np.int64) for column in links)
    none = np.full((len(names), 2), -1, np.int64)
    return Fabric(
        names,
        kinds,
        source,
        target,
        rate,
        latency,
        np.ones(len(rate), bool),
        grid,
        coordinates,
        extents,
        (Level(part, none, none),),
        np.zeros(len(names), np.int64),
    )


def _renamed(fabric: Fabric, names: tuple[str, ...]) -> Fabric:
    return replace(fabric, names=names)


def _each(field: str, value: Rates, dims: Sequence[int]) -> list[int]:
    values = [value] * len(dims) if isinstance(value, int | np.integer) else list(value)
    if len(values) != len(dims):
        raise BadInput(field, value, f"one number, or {len(dims)} of them")
    return [int(v) for v in values]


def _cat(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.empty(0, np.int64)


def _shift(ids: np.ndarray, by: int) -> np.ndarray:
    return np.where(ids >= 0, ids + by, -1)


def _pad(table: np.ndarray, dims: int, fill: int) -> np.ndarray:
    """Widen axis 1 to `dims`. Extents pad with 1, so that a padded dimension is never walked."""
    width = [(0, 0), (0, dims - table.shape[1])] + [(0, 0)] * (table.ndim - 2)
    return np.pad(table, width, constant_values=fill)


def _grown(table: np.ndarray, n: int, fill: int) -> np.ndarray:
    return np.pad(table, [(0, n - len(table))] + [(0, 0)] * (table.ndim - 1), constant_values=fill)


def _grown_level(level: Level, n: int) -> Level:
    """Nodes that a new level adds are in no part of the levels below it."""
    return Level(_grown(level.part, n, -1), _grown(level.up, n, -1), _grown(level.down, n, -1))
