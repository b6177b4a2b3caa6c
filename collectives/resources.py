"""Everything that transfers share, numbered in one row: links, HBM stacks, crossings between dies.

The one rule of sharing: in a round, a resource takes (all bytes of the round over it) / rate, and a
transfer takes as long as the slowest resource on its way.
"""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from trnsim.device.units import transfer_ps

from .copies import Copies
from .costs import Memory
from .routes import Fabric
from .rows import Routes

_FEW = 64


@dataclass(frozen=True, eq=False)
class Column:
    """One resource of some of the pairs, each charged `weight` times the bytes of its pair.

    rows: which pairs; None: all of them, in order. ids: int32, one per row.
    """

    rows: np.ndarray | None
    ids: np.ndarray
    weight: int = 1

    def of(self, pairs: np.ndarray) -> np.ndarray:
        """The entries of a per-pair array that this column's rows have."""
        return pairs if self.rows is None else pairs[self.rows]


@dataclass(frozen=True, eq=False)
class Resources:
    """The links of a fabric, then the stacks of a memory, then the crossings of its chips.

    Reductions enter their destination at `reduce_fraction` of the rate of its DMA.
    """

    fabric: Fabric
    memory: Memory | None = None
    reduce_fraction: float = 1.0
    _dies: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        memory = self.memory
        if memory is not None and memory.die is not None:
            object.__setattr__(self, "_dies", int(memory.die.max(initial=0)) + 1)

    @cached_property
    def _speeds(self) -> tuple[np.ndarray, np.ndarray]:
        """(int[resources] which of the speeds each has, int64[speeds] bytes/s).

        The DMA into ranks has speeds of its own, so that reductions can have others.
        """
        parts = [self.fabric.rate]
        if self.memory is not None:
            parts.append(np.asarray(self.memory.bytes_per_s, np.int64))
        found, which = classes(np.concatenate(parts) if len(parts) > 1 else parts[0])
        into, speeds = self.fabric.dma_in[self.fabric.dma_in >= 0], len(found)
        which[into] += speeds
        rates = [*found, *found]
        if self._ways:
            crossings = np.full(len(self.fabric.names) * self._ways, len(rates), np.int32)
            which = np.concatenate([which, crossings])
            rates.append(0 if self.memory is None else self.memory.die_bytes_per_s)
        small = np.int16 if len(rates) < 2**15 else np.int32
        return which.astype(small), np.array(rates, np.int64)

    @cached_property
    def _reduce_speeds(self) -> np.ndarray:
        rates = self._speeds[1].copy()
        half = len(rates) // 2  # the second half is of the DMA into ranks; crossings come last
        slower = (rates[half : 2 * half] * self.reduce_fraction).astype(np.int64)
        rates[half : 2 * half] = np.maximum(1, slower)
        return rates

    @property
    def reducing_differs(self) -> bool:
        """Whether reductions have other rates than copies."""
        return self.reduce_fraction != 1

    def rate(self, which: np.ndarray | slice, reduce: bool = False) -> np.ndarray:
        """int64: bytes/s of some resources, for transfers that copy or reduce."""
        kind, rates = self._speeds
        return (self._reduce_speeds if reduce else rates)[kind[which]]

    @property
    def count(self) -> int:
        """How many resources there are."""
        return len(self._speeds[0])

    @property
    def _ways(self) -> int:
        """Ordered pairs of different dies of a chip."""
        return self._dies * (self._dies - 1)

    @cached_property
    def into(self) -> np.ndarray:
        """bool[links]: the DMA links into ranks."""
        into = np.zeros(len(self.fabric.rate), bool)
        into[self.fabric.dma_in[self.fabric.dma_in >= 0]] = True
        return into

    @cached_property
    def copies(self) -> "Copies":
        """The equal parts of the fabric."""
        return Copies(self)

    @property
    def crossings(self) -> int:
        """The number of the first crossing."""
        return len(self.fabric.rate) + (0 if self.memory is None else len(self.memory.bytes_per_s))

    def stack(self, ranks: np.ndarray) -> np.ndarray:
        """int32: the resource that the HBM of each rank is."""
        assert self.memory is not None
        return (len(self.fabric.rate) + self.memory.of_rank[ranks]).astype(np.int32)

    def crossing(self, src: np.ndarray, dst: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """(pairs that cross between the dies of a chip, the resource each takes), if any do."""
        if not self._dies or self.memory is None or self.memory.die is None:
            return None
        here, there = self.fabric.rank_node[src], self.fabric.rank_node[dst]
        a, b = self.memory.die[src], self.memory.die[dst]
        rows = np.flatnonzero((here == there) & (a != b))
        way = a[rows] * (self._dies - 1) + b[rows] - (b[rows] > a[rows])
        ids = self.crossings + here[rows] * self._ways + way
        return (rows, ids.astype(np.int32)) if rows.size else None

    def name(self, resource: int) -> str:
        """For people: `chip0->chip1`, `dma out of rank 3`, `HBM stack 2`, `dies of chip4`."""
        links = len(self.fabric.rate)
        if resource < links:
            return self.fabric.link_name(resource)
        if resource < self.crossings:
            return f"HBM stack {resource - links}"
        return f"dies of {self.fabric.names[(resource - self.crossings) // self._ways]}"


def route_columns(routes: Routes) -> list[Column]:
    """The k-th link of all pairs that have so many, for each k."""
    lengths = np.diff(routes.starts)
    longest = int(lengths.max(initial=0))
    if len(lengths) and int(lengths.min()) == longest:
        table = routes.links.reshape(len(lengths), longest)
        return [Column(None, np.ascontiguousarray(table[:, k])) for k in range(longest)]
    columns = []
    for k in range(longest):
        rows = np.flatnonzero(lengths > k)
        columns.append(Column(rows, routes.links[routes.starts[rows] + k]))
    return columns


def classes(values: np.ndarray) -> tuple[list[int], np.ndarray]:
    """(distinct values, int32: which of them each is). Cheap when there are few of them."""
    which = np.zeros(len(values), np.int32)
    if not len(values):
        return [], which
    found = [int(values[0])]
    left = np.flatnonzero(values != values[0])
    while left.size:
        rest = values[left]
        if len(found) >= _FEW:
            more, inverse = np.unique(rest, return_inverse=True)
            which[left] = inverse + len(found)
            return found + more.tolist(), which
        same = rest == rest[0]
        which[left[same]] = len(found)
        found.append(int(rest[0]))
        left = left[~same]
    return found, which


def needed_ps(load: np.ndarray, rate: np.ndarray) -> np.ndarray:
    """int64: picoseconds for `load` bytes at `rate`, rounded up, exact."""
    if len(load) and (rate == rate[0]).all():
        return _at_rate(load, int(rate[0]))
    speeds, speed = classes(rate)
    times = np.zeros(len(load), np.int64)
    for k, value in enumerate(speeds):
        mine = np.flatnonzero(speed == k)
        times[mine] = _at_rate(load[mine], value)
    return times


def _at_rate(load: np.ndarray, rate: int) -> np.ndarray:
    loads, which = classes(load)
    return np.array([transfer_ps(nbytes, rate) for nbytes in loads], np.int64)[which]


def resources_of(
    fabric: Fabric, memory: Memory | None = None, reduce_fraction: float = 1.0
) -> Resources:
    """The resources of a fabric; kept with it, so that all its prices share what is derived."""
    kept = vars(fabric).setdefault("_resources", {})
    key = (memory, reduce_fraction)
    if key not in kept:
        if len(kept) >= 8:
            kept.clear()
        kept[key] = Resources(fabric, memory, reduce_fraction)
    return kept[key]
