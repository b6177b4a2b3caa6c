"""A fabric of chips, switches and network interfaces as arrays, and routes over it.

A fabric is a directed multigraph. Ranks sit on its nodes; every rank has its own DMA link out of
and into its node. A route is a list of link ids. It is computed only for pairs that are asked for:

- nodes of one grid (torus, ring): dimension order, the shorter way round; at exactly half way, even
  coordinates go up and odd ones down, which spreads the load and is deterministic;
- nodes below one switch, in different parts: up to the switch and down again (lowest such level);
- everything else, and every route that crosses a failed link: least latency, then fewest links,
  then lowest link id; inside the part of the fabric that both ends are in, if it can be done, else
  without passing through a third server, if that can be done.

A link that carries the bytes of several transfers is shared; `Fabric.load` adds them up. Rates are
given by the caller: there are no hardware numbers here.

Equal parts share what is not an array: names, and the best paths of parts that are no grids.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from trnsim.device.errors import BadInput, TrnsimError

from .names import Names
from .paths import Graph, Tree
from .rows import Columns, Routes
from .torus_rings import torus_rings

Rates = int | Sequence[int]
KINDS = ("chip", "switch", "nic")
CHIP, SWITCH, NIC = range(len(KINDS))


@dataclass(frozen=True, eq=False)
class Level:
    """One layer of switches. Nodes with the same `part` reach each other at or below this level.

    part: int32[nodes], -1 for none; up, down: int32[nodes, 2] link ids to and from the switch, -1
    for none.
    """

    part: np.ndarray
    up: np.ndarray
    down: np.ndarray


@dataclass(frozen=True, eq=False)
class Fabric:
    """Nodes, links and the ranks attached to them. Built by the functions of `fabric`.

    names, kind: one per node (int8[nodes], indices into KINDS).
    source, target: int32[links] node ids; rate: int64[links] bytes/s; latency: int64[links] ps;
    alive: bool[links].
    grid: int32[nodes, dims, 2] link up and link down each dimension, -1 for none;
    coordinates, extents: int32[nodes, dims]; server: int32[nodes], the joined part a node is in.
    twin: int32[nodes, 2]: the same node in the first equal part, and how much higher link ids are
    here than there.
    rank_node: int64[ranks]; dma_out, dma_in: int64[ranks] link ids, -1 for an unlimited rate.
    """

    names: Names
    kind: np.ndarray
    source: np.ndarray
    target: np.ndarray
    rate: np.ndarray
    latency: np.ndarray
    alive: np.ndarray
    grid: np.ndarray
    coordinates: np.ndarray
    extents: np.ndarray
    levels: tuple[Level, ...]
    server: np.ndarray
    twin: np.ndarray
    rank_node: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    dma_out: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    dma_in: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))

    @property
    def ranks(self) -> int:
        """Number of ranks attached."""
        return len(self.rank_node)

    @property
    def wires(self) -> int:
        """Number of links between nodes; the DMA links of ranks come after them."""
        return len(self.rate) - int((self.dma_out >= 0).sum()) - int((self.dma_in >= 0).sum())

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """chip, switch or nic, one per node."""
        return tuple(KINDS[kind] for kind in self.kind.tolist())

    @cached_property
    def endpoints(self) -> dict[int, int]:
        """rank -> node id."""
        return dict(enumerate(self.rank_node.tolist()))

    @cached_property
    def rank_server(self) -> np.ndarray:
        """int32[ranks]: the joined part (server, instance) of each rank."""
        return self.server[self.rank_node]

    @cached_property
    def chips(self) -> np.ndarray:
        """int64: node ids of the chips, in order."""
        return np.flatnonzero(self.kind == CHIP)

    @cached_property
    def intact(self) -> bool:
        """Whether no link has failed."""
        return bool(self.alive.all())

    def node(self, name: str) -> int:
        """Node id by name. Raises BadInput with the nearest name."""
        return self.names.need(name)

    def link_name(self, link: int) -> str:
        """`chip0->chip1`, or `dma out of rank 3`."""
        for way, table in (("out of", self.dma_out), ("in of", self.dma_in)):
            if len(table) and 0 <= table[0] <= link <= table[-1]:
                return f"dma {way} rank {link - int(table[0])}"
        return f"{self.names[self.source[link]]}->{self.names[self.target[link]]}"

    def links(self, name: str) -> list[int]:
        """Link ids of `a->b`, or of `a<->b` both ways. Raises BadInput if there is none."""
        both = "<->" in name
        source, arrow, target = name.partition("<->" if both else "->")
        if not arrow:
            raise BadInput("link", name, "node->node or node<->node")
        ends = [(self.node(source), self.node(target))]
        ends += [ends[0][::-1]] if both else []
        found = [link for a, b in ends for link in self._between(a, b)]
        if not found:
            near = [link for end in ends[0] for link in self._leaving(end)]
            raise BadInput("link", name, sorted(self.link_name(link) for link in near) or "none")
        return found

    def neighbours(self, name: str) -> list[str]:
        """Names of the nodes that a live link leads to from this one, in link order."""
        out = self._leaving(self.node(name))
        return [self.names[self.target[link]] for link in out if self.alive[link]]

    def egress(self, name: str) -> int:
        """Bytes/s of all live links that leave a node."""
        out = self._leaving(self.node(name))
        return int(self.rate[out][self.alive[out]].sum())

    def attach(
        self,
        nodes: Sequence[str] | Sequence[int] | np.ndarray,
        *,
        dma_out: Rates | None = None,
        dma_in: Rates | None = None,
        latency_ps: int = 0,
    ) -> "Fabric":
        """Put rank r on nodes[r] (name or id), replacing ranks attached before.

        dma_out, dma_in: bytes/s of each rank's DMA link, one for all or one per rank; None is
        unlimited. latency_ps is charged once per transfer, on the way out.
        """
        where = self._node_ids(nodes)
        bare = self.detached()
        if dma_out is None and latency_ps:
            raise BadInput("dma_out", None, "a rate, when the DMA has a latency")
        out = _rates("dma_out", dma_out, len(where))
        into = _rates("dma_in", dma_in, len(where))
        return bare._with_dma(where, out, into, latency_ps)

    def detached(self) -> "Fabric":
        """The fabric without its ranks and their DMA links."""
        columns = ("source", "target", "rate", "latency", "alive")
        cut = {name: getattr(self, name)[: self.wires] for name in columns}
        none = np.empty(0, np.int64)
        return replace(self, **cut, rank_node=none, dma_out=none, dma_in=none)

    def fail(self, *, links: Sequence[str] = (), nodes: Sequence[str] = ()) -> "Fabric":
        """The fabric without these links (`a->b`, `a<->b`) and without all links of these nodes."""
        alive = self.alive.copy()
        for name in links:
            alive[self.links(name)] = False
        for name in nodes:
            node = self.node(name)
            alive[(self.source == node) | (self.target == node)] = False
        return replace(self, alive=alive)

    def degrade(self, *, links: Sequence[str], bytes_per_s: int) -> "Fabric":
        """The fabric with these links at another rate."""
        rate = self.rate.copy()
        for name in links:
            rate[self.links(name)] = positive("bytes_per_s", bytes_per_s)
        return replace(self, rate=rate)

    def degrade_rank(self, rank: int, *, bytes_per_s: int) -> "Fabric":
        """The fabric with the DMA of one rank at another rate, in both directions."""
        rate = self.rate.copy()
        ids = [link for link in (self.dma_out[rank], self.dma_in[rank]) if link >= 0]
        rate[ids] = positive("bytes_per_s", bytes_per_s)
        return replace(self, rate=rate)

    def routes(self, sources: np.ndarray, targets: np.ndarray) -> Routes:
        """Routes of the rank pairs (sources[p], targets[p]), DMA links included.

        Raises TrnsimError naming the rank that cannot be reached.
        """
        sources, targets = np.asarray(sources, np.int64), np.asarray(targets, np.int64)
        columns = Columns(len(sources))
        out, into = self._dma(self.dma_out, sources), self._dma(self.dma_in, targets)
        columns.add(None, out)
        try:
            inner = self._node_columns(self.rank_node[sources], self.rank_node[targets])
        except _Unreachable as error:
            raise self._unreachable_rank(error, sources, targets) from None
        columns.columns += inner.columns
        columns.add(None, into)
        return columns.routes(self.latency)

    def node_routes(self, sources: np.ndarray, targets: np.ndarray) -> Routes:
        """Routes between pairs of nodes, without DMA links."""
        return self._node_columns(sources, targets).routes(self.latency)

    def load(self, routes: Routes, nbytes: np.ndarray) -> np.ndarray:
        """int64[links]: bytes that each link carries when pair p moves nbytes[p] bytes."""
        carried = np.bincount(
            routes.links, weights=np.asarray(nbytes)[routes.pairs], minlength=len(self.rate)
        )
        return carried.astype(np.int64)  # exact: float64 holds every integer up to 9e15

    def ring_order(self, ranks: Sequence[int] | np.ndarray) -> np.ndarray:
        """int64[n]: positions of `ranks` in an order whose neighbours are near on the fabric.

        By server, then along a path that turns back at each end (reflected Gray code of the grid
        coordinates): on a torus with an even first dimension, it closes over neighbouring chips.
        """
        nodes = self.rank_node[np.asarray(ranks, np.int64)]
        keys = [np.arange(len(nodes))]
        flip = np.zeros(len(nodes), np.int64)
        turns = []
        for dim in range(self.coordinates.shape[1]):
            here, extent = self.coordinates[nodes, dim], self.extents[nodes, dim]
            turns.append(np.where(flip % 2 == 1, extent - 1 - here, here))
            flip = flip + here
        return np.lexsort([*keys, nodes, *turns[::-1], self.server[nodes]])

    def cube_order(self, ranks: Sequence[int] | np.ndarray) -> np.ndarray:
        """int64[n]: positions of `ranks` as corners of a hypercube laid on the fabric.

        Ranks of one chip differ in the highest bits, where halving starts and moves most. Then come
        grid coordinates in Gray code: a torus with dimensions of 4 is a hypercube, so that
        positions that differ in one bit are on neighbouring chips. Servers have the lowest bits.
        """
        return self.cube_orders(ranks, 1)[0]

    def cube_orders(self, ranks: Sequence[int] | np.ndarray, channels: int = 4) -> np.ndarray:
        """int64[k, n], 1 <= k <= channels: cube orders whose bits of the grid take turns.

        Exchanges of all k at once then go over different links of each chip.
        """
        nodes = self.rank_node[np.asarray(ranks, np.int64)]
        by_node = np.argsort(nodes, kind="stable")
        local = np.empty(len(nodes), np.int64)
        local[by_node] = np.arange(len(nodes)) - np.searchsorted(nodes[by_node], nodes[by_node])
        bits = self._corner_bits(nodes)
        last = [nodes, self.server[nodes]]
        turns = range(max(1, min(channels, len(bits))))
        return np.stack([np.lexsort([*last, *np.roll(bits, t, axis=0), local]) for t in turns])

    def _corner_bits(self, nodes: np.ndarray) -> np.ndarray:
        """bool[k, n]: inverse Gray code of the coordinates, lowest bit of the last dimension first.

        Without bits in which no nodes differ.
        """
        corner = np.where(self.extents[nodes] > 1, self.coordinates[nodes], 0)
        for shift in (16, 8, 4, 2, 1):  # the prefix exclusive or of the bits
            corner = corner ^ (corner >> shift)
        width = int(corner.max(initial=0)).bit_length()
        bits = [axis >> k & 1 for axis in corner.T[::-1] for k in range(width)]
        apart = [bit for bit in bits if bit.any() and not bit.all()]
        return np.array(apart, bool).reshape(len(apart), len(nodes))

    def rings(self, ranks: Sequence[int] | np.ndarray, channels: int = 4) -> np.ndarray:
        """int64[k, n], 1 <= k <= channels: positions of `ranks` in the orders of k rings.

        No two rings use one directed link between chips, where the fabric allows it: if the ranks
        fill whole tori (dimensions of 3 or more), along edge-disjoint Hamiltonian cycles of the
        torus (two on a 4x4 torus, three on a 4x4x4 one), then along the same cycles backwards;
        otherwise along `ring_order` and its reverse. On several servers, the rings leave a server
        from different chips.
        """
        ranks = np.asarray(ranks, np.int64)
        nodes = self.rank_node[ranks]
        cycles = self._cycles(nodes)
        if cycles is None:
            order = self.ring_order(ranks)
            one_way = len(np.unique(nodes)) < 3
            return np.stack([order] if one_way else [order, order[::-1]])[:channels]
        orders = [self._along(nodes, places) for places in cycles]
        return np.stack([*orders, *(order[::-1] for order in orders)])[:channels]

    def _cycles(self, nodes: np.ndarray) -> list[np.ndarray] | None:
        """Place of each node along each Hamiltonian cycle of its torus; None if there is none.

        All tori that the nodes are in have to be filled, and be alike. Later cycles start at other
        chips.
        """
        unique = np.unique(nodes)
        extents = self.extents[unique[0]] if len(unique) else np.zeros(1, np.int32)
        dims = tuple(extents[extents > 1].tolist())
        alike = (self.extents[unique] == extents).all()
        tori = np.unique(self.levels[0].part[unique], return_counts=True)[1]
        size = int(np.prod(extents))
        if not alike or min(dims, default=0) < 3 or (tori != size).any() or size < 3:
            return None
        places = self.coordinates[nodes][:, extents > 1]
        flat = np.ravel_multi_index(tuple(places.T), dims)
        cycles = torus_rings(dims)
        shift = size // len(cycles)
        return [(cycle[flat] - k * shift) % size for k, cycle in enumerate(cycles)] or None

    def _along(self, nodes: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Positions by server, torus, and place; ranks of one chip stay together."""
        part = self.levels[0].part[nodes]
        return np.lexsort([np.arange(len(nodes)), places, part, self.server[nodes]])

    # --- inside ---

    @cached_property
    def _graph(self) -> Graph:
        zones = np.stack([self.levels[0].part, self.server])
        return Graph.of(self.source, self.target, self.latency, self.alive, zones)

    @cached_property
    def _trees(self) -> dict[tuple, Tree]:
        return {}

    @cached_property
    def _hurt(self) -> set[int]:
        """Parts of level 0 with a failed link."""
        ends = self.source[~self.alive]
        return set(self.levels[0].part[ends].tolist())

    def _leaving(self, node: int) -> list[int]:
        return np.flatnonzero(self.source[: self.wires] == node).tolist()

    def _between(self, a: int, b: int) -> list[int]:
        return [link for link in self._leaving(a) if self.target[link] == b]

    def _node_ids(self, nodes: Sequence[str] | Sequence[int] | np.ndarray) -> np.ndarray:
        if not isinstance(nodes, np.ndarray):
            nodes = np.array([self.node(n) if isinstance(n, str) else int(n) for n in nodes])
        ids = nodes.astype(np.int64)
        wrong = np.flatnonzero((ids < 0) | (ids >= len(self.names)))
        if wrong.size:
            rank = int(wrong[0])
            raise BadInput(f"node of rank {rank}", int(ids[rank]), f"0..{len(self.names) - 1}")
        return ids

    def _with_dma(
        self, nodes: np.ndarray, out: np.ndarray | None, into: np.ndarray | None, latency: int
    ) -> "Fabric":
        """Ranks on these nodes, with DMA links of these rates after all others."""
        first, n = len(self.rate), len(nodes)
        rates = [rate for rate in (out, into) if rate is not None]
        ends = [nodes.astype(np.int32)] * len(rates)
        delay = np.zeros(n * len(rates), np.int64)
        delay[: n if out is not None else 0] = latency
        ids, none = first + np.arange(n), np.full(n, -1, np.int64)
        return replace(
            self,
            source=np.concatenate([self.source, *ends]),
            target=np.concatenate([self.target, *ends]),
            rate=np.concatenate([self.rate, *rates]),
            latency=np.concatenate([self.latency, delay]),
            alive=np.concatenate([self.alive, np.ones(len(delay), bool)]),
            rank_node=nodes,
            dma_out=none if out is None else ids,
            dma_in=none if into is None else ids + n * (len(rates) - 1),
        )

    def _dma(self, table: np.ndarray, ranks: np.ndarray) -> np.ndarray:
        links = table[ranks]
        if self.intact:
            return links
        dead = np.flatnonzero((links >= 0) & ~self.alive[links])
        if dead.size:
            rank = int(ranks[dead[0]])
            raise TrnsimError(f"rank {rank} is unreachable: {self._where(rank)} has failed")
        return links

    def _where(self, rank: int) -> str:
        return self.names[self.rank_node[rank]]

    def _unreachable_rank(self, error: "_Unreachable", sources, targets) -> TrnsimError:
        here, there = self.rank_node[sources], self.rank_node[targets]
        pair = int(np.argmax((here == error.source) & (there == error.target)))
        source, target = int(sources[pair]), int(targets[pair])
        far, near = target, source
        if not len(self._graph.out(error.source)):  # it is the sender that is cut off
            far, near = source, target
        return TrnsimError(
            f"rank {far} ({self._where(far)}) is unreachable: no live path between it and "
            f"rank {near} ({self._where(near)})"
        )

    def _node_columns(self, sources: np.ndarray, targets: np.ndarray) -> Columns:
        """The routes between nodes. Raises _Unreachable."""
        columns = Columns(len(sources))
        open_pairs = sources != targets
        self._add_grid(columns, sources, targets, open_pairs)
        self._add_levels(columns, sources, targets, open_pairs)
        if not self.intact:
            broken = columns.touching(~self.alive)
            if broken.any():
                columns = columns.without(broken)
                open_pairs |= broken
        self._add_searched(columns, sources, targets, np.flatnonzero(open_pairs))
        return columns

    def _add_levels(self, columns: Columns, sources, targets, open_pairs: np.ndarray) -> None:
        """Routes up to a switch and down again; clears `open_pairs` for the pairs it routes."""
        below = self.levels[0].part[sources] == self.levels[0].part[targets]
        for level in self.levels[1:]:
            if below.all():
                return
            same = level.part[sources] == level.part[targets]
            mine = np.flatnonzero(open_pairs & same & ~below)
            below |= same
            up, down = level.up[sources[mine]], level.down[targets[mine]]
            known = (up[:, 0] >= 0) & (down[:, -1] >= 0)
            if not known.all():
                mine, up, down = mine[known], up[known], down[known]
            open_pairs[mine] = False
            rows = None if len(mine) == columns.pairs else mine
            for column in (*up.T, *down.T):
                columns.add(rows, column)

    def _add_grid(self, columns: Columns, sources, targets, open_pairs: np.ndarray) -> None:
        """Dimension-order routes inside grids; clears `open_pairs` for the pairs it routes."""
        same = self.levels[0].part[sources] == self.levels[0].part[targets]
        mine = np.flatnonzero(open_pairs & same)
        mine = mine[(self.extents[sources[mine]] > 0).all(axis=1)]
        open_pairs[mine] = False
        at, goal = sources[mine].astype(np.int64), self.coordinates[targets[mine]]
        for dim in range(self.grid.shape[1] if len(mine) else 0):
            here, extent = self.coordinates[at, dim], self.extents[at, dim]
            ahead = (goal[:, dim] - here) % extent
            down = (2 * ahead > extent) | ((2 * ahead == extent) & (here % 2 == 1))
            down &= self.grid[at, dim, 1] >= 0
            left = np.where(down, extent - ahead, ahead)
            while (moving := np.flatnonzero(left > 0)).size:
                links = self.grid[at[moving], dim, down[moving].astype(np.int64)]
                columns.add(mine[moving], links)
                at[moving] = self.target[links]
                left[moving] -= 1

    def _add_searched(self, columns: Columns, sources, targets, rows: np.ndarray) -> None:
        """Routes found by a search, once for each pair of nodes."""
        if not rows.size:
            return
        keys = np.asarray(sources[rows], np.int64) * len(self.names) + targets[rows]
        keys, which = np.unique(keys, return_inverse=True)
        ends = zip(*(part.tolist() for part in np.divmod(keys, len(self.names))), strict=True)
        paths = [self._search(a, b) for a, b in ends]
        table = np.full((len(paths), max(map(len, paths))), -1, np.int32)
        for row, path in zip(table, paths, strict=True):
            row[: len(path)] = path
        for column in table.T:
            columns.add(rows, column[which])

    def _search(self, source: int, target: int) -> list[int]:
        """The best path; inside the part that both ends are in, if possible, else over no third
        server. Raises _Unreachable.

        In a part without failures, it is the path of the first equal part, moved.
        """
        part = self.levels[0].part
        if part[source] == part[target] >= 0:
            near, far, shift = source, target, 0
            first, shift_of_copy = self.twin[source].tolist()
            if not self._hurt & {int(part[source]), int(part[first])}:
                near, far, shift = first, int(self.twin[target, 0]), shift_of_copy
            path = self._climb(near, far, part=int(part[near]))
            if path is not None:
                return [link + shift for link in path]
        ends = tuple(sorted(self.server[[source, target]].tolist()))
        path = self._climb(source, target, servers=ends) if ends[0] != ends[1] else None
        path = path or self._climb(source, target)
        if path is None:
            raise _Unreachable(source, target)
        return path

    def _climb(self, source: int, target: int, **inside) -> list[int] | None:
        key = (source, *inside.items())
        if key not in self._trees:
            self._trees[key] = Tree(self._graph, source, **inside)
        return self._trees[key].path(target)


class _Unreachable(TrnsimError):
    def __init__(self, source: int, target: int) -> None:
        super().__init__(f"node {target} is unreachable from node {source}")
        self.source, self.target = source, target


def _rates(field: str, rates: Rates | None, n: int) -> np.ndarray | None:
    if rates is None:
        return None
    each = np.asarray(rates, np.int64)
    if each.ndim and len(each) != n:
        raise BadInput(field, f"{len(each)} rates", f"one, or one for each of {n} ranks")
    if each.size and each.min() < 1:
        raise BadInput(field, int(each.min()), "a positive number of bytes/s")
    return np.broadcast_to(each, n)


def positive(field: str, value: int) -> int:
    if value < 1:
        raise BadInput(field, value, "a positive integer")
    return int(value)
