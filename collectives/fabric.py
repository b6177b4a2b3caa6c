"""Fabrics: torus, ring, switch, any graph, and fabrics joined by a switch.

Each function gives a `Fabric` (see `routes` for what it can do) without ranks; `Fabric.attach` puts
ranks on its nodes. Rates and latencies come from the caller: there are no hardware numbers here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from trnsim.device.errors import BadInput

from .names import Listed, Names, Numbered, Repeated, chained
from .routes import KINDS, NIC, SWITCH, Fabric, Level, Rates, positive
from .rows import Routes

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
        Numbered(name, len(ids)),
        np.zeros(len(ids), np.int8),
        (_cat(source), _cat(target), _cat(rate), _cat(latency)),
        grid=grid,
        coordinates=coordinates,
        extents=np.tile(np.array(dims, np.int64), (len(ids), 1)),
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
    star = join([chip] * n, bytes_per_s=bytes_per_s, latency_ps=latency_ps)
    names = chained([Numbered("chip", n), Listed(("switch0",))])
    return replace(star, names=names, server=np.zeros(n + 1, np.int32))


def graph(
    nodes: Sequence[str] | Mapping[str, str], links: Sequence[tuple[str, str, int, int]]
) -> Fabric:
    """Any graph: node names (with kinds) and one-way links (source, target, bytes/s, latency ps).

    Raises BadInput for a name used twice, an unknown end or kind, or a rate that is not positive.
    """
    kinds = dict(nodes) if isinstance(nodes, Mapping) else {n: "chip" for n in nodes}
    if len(kinds) != len(nodes):
        raise BadInput("nodes", ", ".join(nodes), "names used once")
    for name, kind in kinds.items():
        if kind not in KINDS:
            raise BadInput(f"kind of {name}", kind, KINDS)
    names = Listed(tuple(kinds))
    rows = [(*_ends(names, s, t), positive("bytes_per_s", r), d) for s, t, r, d in links]
    table = np.array(rows, np.int64).reshape(-1, 4)
    n = len(kinds)
    return _fabric(
        names,
        np.array([KINDS.index(kind) for kind in kinds.values()], np.int8),
        tuple(table.T),
        grid=np.full((n, 1, 2), -1, np.int64),
        coordinates=np.arange(n)[:, None],
        extents=np.zeros((n, 1), np.int64),
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
    each server has that many interfaces of bytes_per_s, which its chips share in blocks; a chip
    reaches its interface at nic_bytes_per_s (default: bytes_per_s).
    latency_ps is one whole crossing, charged on the way up. Inside a part, its own routes hold.
    The same object given many times, as in `[server] * 1024`, is laid out once.
    """
    positive("bytes_per_s", bytes_per_s)
    if not parts:
        raise BadInput("parts", 0, "one fabric or more")
    whole = _side_by_side(_runs(parts), prefix)
    if nics is None:
        return _with_uplinks(whole, int(bytes_per_s), int(latency_ps))
    rates = int(bytes_per_s), int(nic_bytes_per_s or bytes_per_s)
    return _with_nics(whole, positive("nics", nics), rates, int(latency_ps), prefix)


def _ends(names: Names, source: str, target: str) -> tuple[int, int]:
    ends = names.need(source, "node of a link"), names.need(target, "node of a link")
    if source == target:
        raise BadInput("link", f"{source}->{target}", "two different nodes")
    return ends


@dataclass(frozen=True, eq=False)
class _Run:
    """`count` copies of one part: the numbers that their nodes, links and servers start from."""

    part: Fabric
    nodes: np.ndarray
    links: np.ndarray
    servers: np.ndarray

    @property
    def count(self) -> int:
        return len(self.nodes)

    def same(self, table: np.ndarray) -> np.ndarray:
        """The table of every copy, one after another."""
        return np.tile(table, (self.count,) + (1,) * (table.ndim - 1))

    def moved(self, table: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """The same, with ids that count from the copy's start; -1 stays."""
        by = starts.astype(np.int32).reshape(-1, *[1] * table.ndim)
        return np.where(table >= 0, table + by, np.int32(-1)).reshape(-1, *table.shape[1:])

    def twin(self) -> np.ndarray:
        """Nodes and link offsets relative to the first copy, or to its own first equal part."""
        home = self.same(self.part.twin[:, 0]) + self.nodes[0]
        shift = self.part.twin[:, 1] + (self.links - self.links[0])[:, None]
        return np.stack([home, shift.reshape(-1)], axis=1).astype(np.int32)


def _runs(parts: Sequence[Fabric]) -> list[_Run]:
    """Parts without ranks; neighbours that are one object are one run."""
    found, starts = [], np.zeros(3, np.int64)
    for _, same in groupby(parts, key=id):
        copies = list(same)
        part = copies[0].detached()
        size = np.array([len(part.names), len(part.rate), _server_count(part)])
        each = starts + np.arange(len(copies))[:, None] * size
        found.append(_Run(part, *each.T))
        starts = starts + len(copies) * size
    return found


def _side_by_side(runs: list[_Run], prefix: str) -> Fabric:
    """One fabric with all nodes and links of the parts, renumbered, and no link between them."""
    dims = max(r.part.grid.shape[1] for r in runs)
    depth = max(len(r.part.levels) for r in runs)
    return Fabric(
        names=chained([_names(r, prefix) for r in runs]),
        kind=_cat([r.same(r.part.kind) for r in runs]),
        source=_cat([r.moved(r.part.source, r.nodes) for r in runs]),
        target=_cat([r.moved(r.part.target, r.nodes) for r in runs]),
        rate=_cat([r.same(r.part.rate) for r in runs]),
        latency=_cat([r.same(r.part.latency) for r in runs]),
        alive=_cat([r.same(r.part.alive) for r in runs]),
        grid=_cat([r.moved(_pad(r.part.grid, dims, -1), r.links) for r in runs]),
        coordinates=_cat([r.same(_pad(r.part.coordinates, dims, 0)) for r in runs]),
        extents=_cat([r.same(_pad(r.part.extents, dims, 1)) for r in runs]),
        levels=tuple(_stack_level(runs, k) for k in range(depth)),
        server=_cat([r.moved(r.part.server, r.servers) for r in runs]),
        twin=_cat([r.twin() for r in runs]),
    )


def _stack_level(runs: list[_Run], index: int) -> Level:
    """Level `index` of all parts; a part with fewer levels repeats its last part numbers."""
    part, up, down, used = [], [], [], 0
    for r in runs:
        level = r.part.levels[min(index, len(r.part.levels) - 1)]
        size = int(level.part.max(initial=-1)) + 1
        part.append(r.moved(level.part, used + size * np.arange(r.count)))
        used += size * r.count
        none = np.full_like(level.up, -1)
        own = index < len(r.part.levels)
        up.append(r.moved(level.up if own else none, r.links))
        down.append(r.moved(level.down if own else none, r.links))
    return Level(_cat(part), _cat(up), _cat(down))


def _names(run: _Run, prefix: str) -> Names:
    step = _server_count(run.part)
    return Repeated(prefix, run.count, run.part.names, int(run.servers[0]), step)


def _server_count(fabric: Fabric) -> int:
    return int(fabric.server.max(initial=0)) + 1


def _with_uplinks(whole: Fabric, rate: int, latency: int) -> Fabric:
    """A switch, and a link of every chip to it and back."""
    chips, hub = whole.chips, len(whole.names)
    up = len(whole.rate) + np.arange(len(chips))
    links = [_links(chips, hub, rate, latency), _links(hub, chips, rate, 0)]
    return _grown(
        whole,
        names=Listed((_switch_name(whole),)),
        kind=np.array([SWITCH], np.int8),
        server=np.array([-1], np.int32),
        links=np.concatenate(links),
        up=(chips, np.stack([up, np.full_like(up, -1)], axis=1)),
        down=(chips, np.stack([np.full_like(up, -1), up + len(chips)], axis=1)),
    )


def _with_nics(
    whole: Fabric, nics: int, rates: tuple[int, int], latency: int, prefix: str
) -> Fabric:
    """A switch, interfaces, and the links between them and the chips.

    rates: bytes/s of an interface, and of a chip's link to it.
    """
    chips, hub, first = whole.chips, len(whole.names), len(whole.rate)
    server, index = _interfaces(whole.server[chips], nics)
    shared, which = np.unique(server * nics + index, return_inverse=True)
    nic, n, c = hub + 1 + np.arange(len(shared)), len(shared), len(chips)
    out = first + 2 * n + np.arange(c)
    links = [_links(nic, hub, rates[0], latency), _links(hub, nic, rates[0], 0)]
    links += [_links(chips, nic[which], rates[1], 0), _links(nic[which], chips, rates[1], 0)]
    return _grown(
        whole,
        names=chained([Listed((_switch_name(whole),)), *_nic_names(shared // nics, prefix)]),
        kind=np.array([SWITCH] + [NIC] * n, np.int8),
        server=np.concatenate([[-1], shared // nics]).astype(np.int32),
        links=np.concatenate(links),
        up=(chips, np.stack([out, first + which], axis=1)),
        down=(chips, np.stack([first + n + which, out + c], axis=1)),
    )


def _interfaces(server: np.ndarray, nics: int) -> tuple[np.ndarray, np.ndarray]:
    """(server, interface) of each chip: the chips of a server share its interfaces in blocks."""
    order = np.argsort(server, kind="stable")
    _, starts, counts = np.unique(server[order], return_index=True, return_counts=True)
    within = np.empty(len(server), np.int64)
    within[order] = np.arange(len(server)) - np.repeat(starts, counts)
    size = np.empty(len(server), np.int64)
    size[order] = np.repeat(counts, counts)
    small, more = np.divmod(size, nics)  # `more` interfaces serve one chip more than the others
    late = within - more * (small + 1)
    index = np.where(late < 0, within // (small + 1), more + late // np.maximum(small, 1))
    return server.astype(np.int64), index


def _nic_names(server: np.ndarray, prefix: str) -> list[Names]:
    """Names of interfaces from the server of each, by server."""
    numbers, counts = np.unique(server, return_counts=True)
    rows = zip(numbers.tolist(), counts.tolist(), strict=True)
    names: list[Names] = []
    for count, same in groupby(rows, key=lambda row: row[1]):
        own = [number for number, _ in same]
        names.append(Repeated(prefix, len(own), Numbered("nic", count), own[0]))
    return names


def _switch_name(whole: Fabric) -> str:
    return f"switch{len(whole.levels) - 1}"


def _links(source: np.ndarray | int, target: np.ndarray | int, rate: int, latency: int):
    """int64[n, 4]: source, target, rate and latency of links."""
    return np.stack(np.broadcast_arrays(source, target, rate, latency), axis=1).astype(np.int64)


Ports = tuple[np.ndarray, np.ndarray]  # nodes, and their two link ids each


def _grown(
    whole: Fabric, *, names: Names, kind: np.ndarray, server: np.ndarray, links: np.ndarray,
    up: Ports, down: Ports,
) -> Fabric:  # fmt: skip
    """The fabric with more nodes and links, and one level more, below which all nodes are."""
    n, more = len(whole.names) + len(kind), len(kind)
    here = np.arange(len(whole.names), n, dtype=np.int32)
    level = Level(np.zeros(n, np.int32), _ports(n, up), _ports(n, down))
    return replace(
        whole,
        names=chained([whole.names, names]),
        kind=np.concatenate([whole.kind, kind]),
        source=np.concatenate([whole.source, links[:, 0].astype(np.int32)]),
        target=np.concatenate([whole.target, links[:, 1].astype(np.int32)]),
        rate=np.concatenate([whole.rate, links[:, 2]]),
        latency=np.concatenate([whole.latency, links[:, 3]]),
        alive=np.concatenate([whole.alive, np.ones(len(links), bool)]),
        grid=_longer(whole.grid, more, -1),
        coordinates=_longer(whole.coordinates, more, 0),
        extents=_longer(whole.extents, more, 0),
        levels=(*(_longer_level(old, more) for old in whole.levels), level),
        server=np.concatenate([whole.server, server]),
        twin=np.concatenate([whole.twin, np.stack([here, np.zeros_like(here)], axis=1)]),
    )


def _ports(n: int, ports: Ports) -> np.ndarray:
    table = np.full((n, 2), -1, np.int32)
    table[ports[0]] = ports[1]
    return table


def _fabric(names, kind, links, *, grid, coordinates, extents) -> Fabric:
    """A fabric that is one part and one server."""
    source, target, rate, latency = (np.asarray(column, np.int64) for column in links)
    n = len(names)
    none, home = np.full((n, 2), -1, np.int32), np.zeros(n, np.int32)
    return Fabric(
        names=names,
        kind=kind,
        source=source.astype(np.int32),
        target=target.astype(np.int32),
        rate=rate,
        latency=latency,
        alive=np.ones(len(rate), bool),
        grid=grid.astype(np.int32),
        coordinates=coordinates.astype(np.int32),
        extents=extents.astype(np.int32),
        levels=(Level(home, none, none),),
        server=home,
        twin=np.stack([np.arange(n, dtype=np.int32), home], axis=1),
    )


def _each(field: str, value: Rates, dims: Sequence[int]) -> list[int]:
    values = [value] * len(dims) if isinstance(value, int | np.integer) else list(value)
    if len(values) != len(dims):
        raise BadInput(field, value, f"one number, or {len(dims)} of them")
    return [int(v) for v in values]


def _cat(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.empty(0, np.int64)


def _pad(table: np.ndarray, dims: int, fill: int) -> np.ndarray:
    """Widen axis 1 to `dims`. Extents pad with 1, so that a padded dimension is never walked."""
    width = [(0, 0), (0, dims - table.shape[1])] + [(0, 0)] * (table.ndim - 2)
    return np.pad(table, width, constant_values=fill) if any(map(any, width)) else table


def _longer(table: np.ndarray, more: int, fill: int) -> np.ndarray:
    return np.concatenate([table, np.full((more, *table.shape[1:]), fill, table.dtype)])


def _longer_level(level: Level, more: int) -> Level:
    """Nodes that a new level adds are in no part of the levels below it."""
    return Level(*(_longer(table, more, -1) for table in (level.part, level.up, level.down)))
