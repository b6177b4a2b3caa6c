"""Edge-disjoint Hamiltonian cycles of a torus: the rings of a multi-channel collective.

A torus with d dimensions of 3 or more splits into d Hamiltonian cycles (Kotzig 1973: d = 2). Each
dimension starts as one set of edges: the rings along it. Where two rings of dimension a and two of
dimension b form a unit square, exchanging the square's edges between the two sets joins the two
rings of each set, and every node keeps two edges of each set. Squares are taken in order until each
set is one cycle; where that is not enough, squares taken at random (with a fixed seed) that leave
no more cycles than before move the search on. A set that still is several cycles is left out.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations
from random import Random

import numpy as np

MOST_NODES = 4096  # beyond it, a search costs more than a second; no instance is near
WALKED = 256  # nodes up to which a search goes on at random
STEPS = 4000


@lru_cache(maxsize=64)
def torus_rings(dims: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    """Cycles over a torus, each as int64[nodes]: the place of each node (row-major) along it.

    Empty for a dimension below 3 (its edges are no ring), and beyond MOST_NODES nodes.
    """
    nodes = int(np.prod(dims))
    if min(dims, default=0) < 3 or nodes > MOST_NODES:
        return ()
    sets = _EdgeSets(dims)
    while sets.join_by_squares():
        pass
    if nodes <= WALKED:
        sets.wander(Random(nodes))
    return tuple(order for s in range(len(dims)) if (order := sets.places(s)) is not None)


class _EdgeSets:
    """neighbours[s][node]: the two nodes beside `node` in edge set s."""

    def __init__(self, dims: Sequence[int]) -> None:
        self.dims = dims
        ids = np.arange(int(np.prod(dims))).reshape(tuple(dims))
        self.up = [np.roll(ids, -1, axis=d).reshape(-1).tolist() for d in range(len(dims))]
        down = [np.roll(ids, 1, axis=d).reshape(-1).tolist() for d in range(len(dims))]
        pairs = zip(down, self.up, strict=True)
        self.neighbours = [[list(two) for two in zip(a, b, strict=True)] for a, b in pairs]
        self.labels = [self._label(s) for s in range(len(dims))]

    def join_by_squares(self) -> bool:
        """Exchange every square that leaves fewer cycles; False if there is none."""
        joined = False
        for a, b in combinations(range(len(self.dims)), 2):
            for corner in range(len(self.up[0])):
                joined |= self._try(corner, a, b)
        return joined

    def wander(self, random: Random) -> None:
        """Exchange squares at random that leave no more cycles, until each set is one."""
        pairs = list(combinations(range(len(self.dims)), 2))
        for _ in range(STEPS if pairs else 0):
            if all(self._cycles(s) == 1 for s in range(len(self.dims))):
                return
            self._try(random.randrange(len(self.up[0])), *random.choice(pairs), allowed=0)

    def _try(self, corner: int, a: int, b: int, allowed: int = -1) -> bool:
        """Exchange the square at `corner` in dimensions a, b, if cycles change by <= `allowed`."""
        right, above = self.up[a][corner], self.up[b][corner]
        far = self.up[b][right]
        flat, steep = self._owner(corner, right), self._owner(corner, above)
        alike = flat == self._owner(above, far) and steep == self._owner(right, far)
        if flat == steep or not alike:
            return False
        sides = [(corner, right), (above, far)], [(corner, above), (right, far)]
        before = self._cycles(flat) + self._cycles(steep)
        joins = self._parted(flat, corner, above) or self._parted(steep, corner, right)
        if allowed < 0 and not joins:
            return False
        self._swap(flat, *sides)
        self._swap(steep, *sides[::-1])
        labels = self.labels[flat], self.labels[steep]
        self.labels[flat], self.labels[steep] = self._label(flat), self._label(steep)
        if self._cycles(flat) + self._cycles(steep) <= before + allowed:
            return True
        self._swap(flat, *sides[::-1])
        self._swap(steep, *sides)
        self.labels[flat], self.labels[steep] = labels
        return False

    def _parted(self, s: int, one: int, other: int) -> bool:
        """Whether two nodes are on different cycles of set s."""
        return self.labels[s][one] != self.labels[s][other]

    def _owner(self, one: int, other: int) -> int:
        """The set that holds an edge."""
        return next(s for s, near in enumerate(self.neighbours) if other in near[one])

    def _swap(self, s: int, out: list[tuple[int, int]], into: list[tuple[int, int]]) -> None:
        near = self.neighbours[s]
        for one, other in out:
            near[one].remove(other)
            near[other].remove(one)
        for one, other in into:
            near[one].append(other)
            near[other].append(one)

    def _cycles(self, s: int) -> int:
        return max(self.labels[s]) + 1

    def _label(self, s: int) -> list[int]:
        """The cycle that each node is on in set s."""
        labels = [-1] * len(self.neighbours[s])
        found = 0
        for start in range(len(labels)):
            if labels[start] < 0:
                for node in self._walk(s, start):
                    labels[node] = found
                found += 1
        return labels

    def _walk(self, s: int, start: int) -> list[int]:
        """The nodes of the cycle through `start`, first towards the lower neighbour."""
        near, walk = self.neighbours[s], [start]
        before, node = start, min(near[start])
        while node != start:
            walk.append(node)
            one, other = near[node]
            before, node = node, other if one == before else one
        return walk

    def places(self, s: int) -> np.ndarray | None:
        """The place of each node along set s; None if it is more than one cycle."""
        walk = self._walk(s, 0)
        if len(walk) != len(self.neighbours[s]):
            return None
        places = np.empty(len(walk), np.int64)
        places[walk] = np.arange(len(walk))
        return places
