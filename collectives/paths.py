"""Best paths over a graph: least latency, then fewest links, then lowest link id.

Dijkstra's algorithm from one node at a time, kept for the next question, and run no further than
the nodes asked for.
"""

import heapq
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, eq=False)
class Graph:
    """Live links of a fabric, sorted by source: node n has order[starts[n]:starts[n + 1]].

    target, latency: of every link. zones: int[2, nodes], the part and the server of every node, -1
    for none. known: `steps` as asked for so far.
    """

    order: np.ndarray
    starts: np.ndarray
    target: np.ndarray
    latency: np.ndarray
    zones: np.ndarray
    known: dict[int, list[tuple[int, int, int, int, int]]] = field(default_factory=dict)

    @classmethod
    def of(cls, source, target, latency, alive, zones) -> "Graph":
        """The graph of the links that are alive and lead somewhere."""
        usable = np.flatnonzero(alive & (source != target))
        order = usable[np.argsort(source[usable], kind="stable")]
        starts = np.searchsorted(source[order], np.arange(zones.shape[1] + 1))
        return cls(order, starts, target, latency, zones)

    def out(self, node: int) -> np.ndarray:
        """Live links out of a node, in order of their ids."""
        return self.order[self.starts[node] : self.starts[node + 1]]

    def steps(self, node: int) -> list[tuple[int, int, int, int, int]]:
        """(link, latency, the node it leads to, part and server of that) of links out of a node."""
        if node not in self.known:
            links = self.out(node)
            ends = self.target[links]
            columns = links, self.latency[links], ends, *self.zones[:, ends]
            self.known[node] = list(zip(*(c.tolist() for c in columns), strict=True))
        return self.known[node]


@dataclass(eq=False)
class Tree:
    """The best paths from `source`, grown on demand.

    part: only paths inside that part. servers: only paths over nodes of these servers or of none.
    """

    graph: Graph
    source: int
    part: int | None = None
    servers: tuple[int, ...] | None = None
    arrived: dict[int, tuple[int, int]] = field(default_factory=dict)  # node -> (link, node before)
    queue: list[tuple[int, int, int, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.queue.append((0, 0, -1, self.source, -1))

    def path(self, target: int) -> list[int] | None:
        """Link ids from the source to `target`; None if it cannot be reached."""
        while target not in self.arrived:
            if not self._grow():
                return None
        links, node = [], target
        while node != self.source:
            link, node = self.arrived[node]
            links.append(link)
        return links[::-1]

    def _grow(self) -> bool:
        """Settle one more node; False when none is left."""
        while self.queue:
            cost, hops, via, node, before = heapq.heappop(self.queue)
            if node not in self.arrived:
                self.arrived[node] = (via, before)
                self._push(cost, hops + 1, node)
                return True
        return False

    def _push(self, cost: int, hops: int, node: int) -> None:
        for link, delay, end, part, server in self.graph.steps(node):
            if end not in self.arrived and self._allowed(part, server):
                heapq.heappush(self.queue, (cost + delay, hops, link, end, node))

    def _allowed(self, part: int, server: int) -> bool:
        if self.part is not None:
            return part == self.part
        return self.servers is None or server < 0 or server in self.servers
