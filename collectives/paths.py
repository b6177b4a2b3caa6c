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

    target, latency: of every link; part: of every node (a search may be kept inside one part).
    """

    order: np.ndarray
    starts: np.ndarray
    target: np.ndarray
    latency: np.ndarray
    part: np.ndarray

    @classmethod
    def of(cls, source, target, latency, alive, part) -> "Graph":
        """The graph of the links that are alive and lead somewhere."""
        usable = np.flatnonzero(alive & (source != target))
        order = usable[np.argsort(source[usable], kind="stable")]
        starts = np.searchsorted(source[order], np.arange(len(part) + 1))
        return cls(order, starts, target, latency, part)

    def out(self, node: int) -> np.ndarray:
        """Live links out of a node, in order of their ids."""
        return self.order[self.starts[node] : self.starts[node + 1]]


@dataclass(eq=False)
class Tree:
    """The best paths from `source`, grown on demand; with `part`, only paths inside that part."""

    graph: Graph
    source: int
    part: int | None = None
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
        graph, links = self.graph, self.graph.out(node)
        delays = (cost + graph.latency[links]).tolist()
        ends = graph.target[links].tolist()
        if self.part is not None:
            inside = (graph.part[graph.target[links]] == self.part).tolist()
        else:
            inside = [True] * len(ends)
        for link, delay, end, stays in zip(links.tolist(), delays, ends, inside, strict=True):
            if stays and end not in self.arrived:
                heapq.heappush(self.queue, (delay, hops, link, end, node))
