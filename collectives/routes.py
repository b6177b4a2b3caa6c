"""A fabric of chips, switches and network interfaces as arrays, and routes over it.

A fabric is a directed multigraph. Ranks sit on its nodes; every rank has its own DMA link out of
and into its node. A route is a list of link ids. It is computed only for pairs that are asked for:

- nodes of one grid (torus, ring): dimension order, the shorter way round; at exactly half way, even
  coordinates go up and odd ones down, which spreads the load and is deterministic;
- nodes below one switch, in different parts: up to the switch and down again (lowest such level);
- everything else, and every route that crosses a failed link: least latency, then fewest links,
  then lowest link id; inside the part of the fabric that both ends are in, if it can be done.

A link that carries the bytes of several transfers is shared; `Fabric.load` adds them up. Rates are
given by the caller: there are no hardware numbers here.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from trnsim.device.errors import BadInput, TrnsimError

Rates = int | Sequence[int]
LINK_COLUMNS = ("source", "target", "rate", "latency", "alive")


@dataclass(frozen=True, eq=False)
class Level:
    """One layer of switches. Nodes with the same `part` reach each other at or below this level.

    part: int32[nodes]; up, down: int32[nodes, 2] link ids to and from the switch, -1 for none.
    """

    part: np.ndarray
    up: np.ndarray
    down: np.ndarray


@dataclass(frozen=True, eq=False)
class Routes:
    """Paths of P pairs in compressed rows: pair p takes links[starts[p]:starts[p + 1]].

    starts: int64[P + 1]; links: int64[total]; latency: int64[P] picoseconds, summed over the links.
    """

    starts: np.ndarray
    links: np.ndarray
    latency: np.ndarray

    @cached_property
    def pairs(self) -> np.ndarray:
        """int64[total]: the pair that each entry of `links` belongs to."""
        return np.repeat(np.arange(len(self.latency)), np.diff(self.starts))

    def path(self, pair: int) -> list[int]:
        """Link ids of one pair, in order."""
        return self.links[self.starts[pair] : self.starts[pair + 1]].tolist()


@dataclass(frozen=True, eq=False)
class Fabric:
    """Nodes, links and the ranks attached to them. Built by the functions of `fabric`.

    names, kinds: one per node (kind is chip, switch or nic).
    source, target: int64[links] node ids; rate: int64[links] bytes/s; latency: int64[links] ps;
    alive: bool[links].
    grid: int64[nodes, dims, 2] link up and link down each dimension, -1 for none;
    coordinates, extents: int64[nodes, dims]; server: int64[nodes], the joined part a node is in.
    rank_node: int64[ranks]; dma_out, dma_in: int64[ranks] link ids, -1 for an unlimited rate.
    """

    names: tuple[str, ...]
    kinds: tuple[str, ...]
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
    rank_node: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    dma_out: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    dma_in: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))

    @property
    def ranks(self) -> int:
        """Number of ranks attached."""
        return len(self.rank_node)

    @cached_property
    def endpoints(self) -> dict[int, int]:
        """rank -> node id."""
        return dict(enumerate(self.rank_node.tolist()))

    @cached_property
    def rank_server(self) -> np.ndarray:
        """int64[ranks]: the joined part (server, instance) of each rank."""
        return self.server[self.rank_node]

    @cached_property
    def chips(self) -> np.ndarray:
        """int64: node ids of the chips, in order."""
        return np.array([i for i, kind in enumerate(self.kinds) if kind == "chip"], np.int64)

    def node(self, name: str) -> int:
        """Node id by name. Raises BadInput with the nearest name."""
        if name not in self._index:
            raise BadInput("node", name, self.names)
        return self._index[name]

    def link_name(self, link: int) -> str:
        """`chip0->chip1`, or `dma out of rank 3`."""
        if link in self._dma_names:
            return self._dma_names[link]
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
            raise BadInput("link", name, (self.link_name(i) for i in self._wires()))
        return found

    def neighbours(self, name: str) -> list[str]:
        """Names of the nodes that a live link leads to from this one, in link order."""
        node = self.node(name)
        out = self._wires()[self.source[self._wires()] == node]
        return [self.names[self.target[link]] for link in out if self.alive[link]]

    def egress(self, name: str) -> int:
        """Bytes/s of all live links that leave a node."""
        wires = self._wires()
        mine = wires[(self.source[wires] == self.node(name)) & self.alive[wires]]
        return int(self.rate[mine].sum())

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
        ids = [self.node(n) if isinstance(n, str) else int(n) for n in nodes]
        for rank, node in enumerate(ids):
            if not 0 <= node < len(self.names):
                raise BadInput(f"node of rank {rank}", node, f"0..{len(self.names) - 1}")
        bare = self._detached()
        where = np.array(ids, np.int64)
        if dma_out is None and latency_ps:
            raise BadInput("dma_out", None, "a rate, when the DMA has a latency")
        bare, out = bare._with_dma(where, dma_out, latency_ps, "dma_out")
        bare, into = bare._with_dma(where, dma_in, 0, "dma_in")
        return replace(bare, rank_node=where, dma_out=out, dma_in=into)

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
        a, b = self.rank_node[sources], self.rank_node[targets]
        out, into = self._dma(self.dma_out, sources), self._dma(self.dma_in, targets)
        keys, which = np.unique(a * len(self.names) + b, return_inverse=True)
        try:
            paths = self.node_routes(keys // len(self.names), keys % len(self.names))
        except _Unreachable as error:
            raise self._unreachable_rank(error, a, b, sources, targets) from None
        every = np.arange(len(sources))
        columns = [_present(every, out), _expand(paths, which), _present(every, into)]
        return self._rows(len(sources), columns)

    def node_routes(self, sources: np.ndarray, targets: np.ndarray) -> Routes:
        """Routes between distinct pairs of nodes, without DMA links."""
        columns, unknown = self._structured(sources, targets)
        rows = self._rows(len(sources), columns)
        broken = unknown.copy()
        broken[rows.pairs[~self.alive[rows.links]]] = True
        if not broken.any():
            return rows
        keep = ~broken[rows.pairs]
        fixed = [(rows.pairs[keep], rows.links[keep])]
        for pair in np.flatnonzero(broken).tolist():
            path = self._search(int(sources[pair]), int(targets[pair]))
            fixed.append((np.full(len(path), pair), np.array(path, np.int64)))
        return self._rows(len(sources), fixed)

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

        By server, then by grid coordinates in Gray code: a torus with dimensions of 4 is a
        hypercube, so that positions that differ in one bit are on neighbouring chips.
        """
        nodes = self.rank_node[np.asarray(ranks, np.int64)]
        corner = self.coordinates[nodes]
        for shift in (16, 8, 4, 2, 1):  # inverse Gray code: the prefix exclusive or of the bits
            corner = corner ^ (corner >> shift)
        return np.lexsort([np.arange(len(nodes)), nodes, *corner.T[::-1], self.server[nodes]])

    # --- inside ---

    @cached_property
    def _index(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.names)}

    @cached_property
    def _dma_names(self) -> dict[int, str]:
        out = {link: f"dma out of rank {r}" for r, link in enumerate(self.dma_out.tolist())}
        into = {link: f"dma in of rank {r}" for r, link in enumerate(self.dma_in.tolist())}
        return out | into

    @cached_property
    def _adjacency(self) -> tuple[np.ndarray, np.ndarray]:
        """Live links sorted by source, and where each source starts."""
        usable = np.flatnonzero(self.alive & (self.source != self.target))
        order = usable[np.argsort(self.source[usable], kind="stable")]
        return order, np.searchsorted(self.source[order], np.arange(len(self.names) + 1))

    @cached_property
    def _trees(self) -> dict[tuple[int, int | None], dict[int, int]]:
        return {}

    def _wires(self) -> np.ndarray:
        return np.flatnonzero(self.source != self.target)

    def _between(self, a: int, b: int) -> list[int]:
        return np.flatnonzero((self.source == a) & (self.target == b)).tolist()

    def _detached(self) -> "Fabric":
        wires = len(self._wires())  # DMA links always come last
        cut = {
            k: getattr(self, k)[:wires] for k in ("source", "target", "rate", "latency", "alive")
        }
        none = np.empty(0, np.int64)
        return replace(self, **cut, rank_node=none, dma_out=none, dma_in=none)

    def _with_dma(
        self, nodes: np.ndarray, rates: Rates | None, latency: int, field: str
    ) -> tuple["Fabric", np.ndarray]:
        if rates is None:
            return self, np.full(len(nodes), -1, np.int64)
        each = np.broadcast_to(np.asarray(rates, np.int64), len(nodes))
        if len(each) and each.min() < 1:
            raise BadInput(field, int(each.min()), "a positive number of bytes/s")
        ids = len(self.rate) + np.arange(len(nodes))
        grown = replace(
            self,
            source=np.concatenate([self.source, nodes]),
            target=np.concatenate([self.target, nodes]),
            rate=np.concatenate([self.rate, each]),
            latency=np.concatenate([self.latency, np.full(len(nodes), latency, np.int64)]),
            alive=np.concatenate([self.alive, np.ones(len(nodes), bool)]),
        )
        return grown, ids

    def _dma(self, table: np.ndarray, ranks: np.ndarray) -> np.ndarray:
        links = table[ranks]
        real = np.flatnonzero(links >= 0)
        dead = real[~self.alive[links[real]]]
        if dead.size:
            rank = int(ranks[dead[0]])
            raise TrnsimError(f"rank {rank} is unreachable: {self._where(rank)} has failed")
        return links

    def _where(self, rank: int) -> str:
        return self.names[self.rank_node[rank]]

    def _unreachable_rank(self, error: "_Unreachable", a, b, sources, targets) -> TrnsimError:
        pair = int(np.argmax((a == error.source) & (b == error.target)))
        source, target = int(sources[pair]), int(targets[pair])
        far, near = target, source
        if not self._leads_out(error.source):  # it is the sender that is cut off
            far, near = source, target
        return TrnsimError(
            f"rank {far} ({self._where(far)}) is unreachable: no live path between it and "
            f"rank {near} ({self._where(near)})"
        )

    def _leads_out(self, node: int) -> bool:
        _, starts = self._adjacency
        return bool(starts[node + 1] > starts[node])

    def _rows(self, pairs: int, columns: list[tuple[np.ndarray, np.ndarray]]) -> Routes:
        """Columns of (pair, link), in path order, to compressed rows."""
        pair = np.concatenate([c[0] for c in columns] or [np.empty(0, np.int64)]).astype(np.int64)
        link = np.concatenate([c[1] for c in columns] or [np.empty(0, np.int64)]).astype(np.int64)
        order = np.argsort(pair, kind="stable")
        pair, link = pair[order], link[order]
        starts = np.searchsorted(pair, np.arange(pairs + 1))
        latency = np.zeros(pairs, np.int64)
        np.add.at(latency, pair, self.latency[link])
        return Routes(starts, link, latency)

    def _structured(
        self, sources: np.ndarray, targets: np.ndarray
    ) -> tuple[list[tuple[np.ndarray, np.ndarray]], np.ndarray]:
        """Columns of the routes that follow from structure, and which pairs need a search."""
        todo = sources != targets
        columns = self._grid_columns(sources, targets, todo)
        below = self.levels[0].part[sources] == self.levels[0].part[targets]
        for level in self.levels[1:]:
            same = level.part[sources] == level.part[targets]
            mine = np.flatnonzero(todo & same & ~below)
            below |= same
            todo[mine] = False
            up, down = level.up[sources[mine]], level.down[targets[mine]]
            missing = (up[:, 0] < 0) | (down[:, -1] < 0)
            todo[mine[missing]] = True
            for column in (*up[~missing].T, *down[~missing].T):
                columns.append(_present(mine[~missing], column))
        return columns, todo

    def _grid_columns(
        self, sources: np.ndarray, targets: np.ndarray, todo: np.ndarray
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Dimension-order routes inside grids; clears `todo` for the pairs it routes."""
        extents = self.extents[sources]
        same = self.levels[0].part[sources] == self.levels[0].part[targets]
        mine = np.flatnonzero(todo & same & (extents > 0).all(axis=1))
        todo[mine] = False
        at, goal = sources[mine], self.coordinates[targets[mine]]
        columns = []
        for dim in range(self.grid.shape[1]):
            here, extent = self.coordinates[at, dim], extents[mine, dim]
            ahead = (goal[:, dim] - here) % extent
            down = (2 * ahead > extent) | ((2 * ahead == extent) & (here % 2 == 1))
            down &= self.grid[at, dim, 1] >= 0
            left = np.where(down, extent - ahead, ahead)
            while (moving := np.flatnonzero(left > 0)).size:
                links = self.grid[at[moving], dim, down[moving].astype(np.int64)]
                columns.append((mine[moving], links))
                at[moving] = self.target[links]
                left[moving] -= 1
        return columns

    def _search(self, source: int, target: int) -> list[int]:
        """Least latency, then fewest links, then lowest link id; inside the part if possible.

        Raises _Unreachable.
        """
        part = self.levels[0].part
        if part[source] == part[target] >= 0:
            path = self._climb(source, target, int(part[source]))
            if path is not None:
                return path
        path = self._climb(source, target, None)
        if path is None:
            raise _Unreachable(source, target)
        return path

    def _climb(self, source: int, target: int, part: int | None) -> list[int] | None:
        """Links from source to target, following the best paths' tree back from the target."""
        if (source, part) not in self._trees:
            self._trees[source, part] = self._tree(source, part)
        tree, path, node = self._trees[source, part], [], target
        while node != source:
            if node not in tree:
                return None
            path.append(tree[node])
            node = int(self.source[tree[node]])
        return path[::-1]

    def _tree(self, source: int, part: int | None) -> dict[int, int]:
        """node -> the link that leads to it on its best path from `source` (Dijkstra's algorithm).

        With `part`, only paths inside that part of level 0.
        """
        order, starts = self._adjacency
        inside = self.levels[0].part
        arrived: dict[int, int] = {}
        queue = [(0, 0, -1, source)]
        while queue:
            cost, hops, via, node = heapq.heappop(queue)
            if node in arrived:
                continue
            arrived[node] = via
            for link in order[starts[node] : starts[node + 1]].tolist():
                there = int(self.target[link])
                if there not in arrived and (part is None or inside[there] == part):
                    step = (cost + int(self.latency[link]), hops + 1, link, there)
                    heapq.heappush(queue, step)
        return arrived


class _Unreachable(TrnsimError):
    def __init__(self, source: int, target: int) -> None:
        super().__init__(f"node {target} is unreachable from node {source}")
        self.source, self.target = source, target


def positive(field: str, value: int) -> int:
    if value < 1:
        raise BadInput(field, value, "a positive integer")
    return int(value)


def _present(pairs: np.ndarray, links: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return pairs[links >= 0], links[links >= 0]


def _expand(paths: Routes, which: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rows `which` of `paths`, as one column of (row number, link)."""
    lengths = np.diff(paths.starts)[which]
    rows = np.repeat(np.arange(len(which)), lengths)
    within = np.arange(len(rows)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return rows, paths.links[np.repeat(paths.starts[which], lengths) + within]
