"""ASTRA-sim 2: its network file (YAML) as a fabric, and its system file (JSON).

The network file has one entry per dimension, dimension 0 innermost (rank = a0 + n0 * (a1 + ...)):

    topology:   [ Ring, Switch ]      # Ring, FullyConnected or Switch
    npus_count: [ 4, 8 ]
    bandwidth:  [ 50.0, 25.0 ]        # "GB/s" per link, where GB is 2**30 bytes
    latency:    [ 500.0, 2000.0 ]     # ns per link; a Switch is two links

Bandwidths are converted: 50 is 53,687,091,200 bytes/s, and the network's `note` says so. Format
after the public source of ASTRA-sim (NetworkParser.cpp, Sys.cc; March 2026). What it computes from
these files is in `astra_profile`.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from trnsim.collectives import fabric as fabrics
from trnsim.collectives.fabric import Fabric
from trnsim.device.errors import BadFile, BadInput
from trnsim.device.units import format_rate

from ..reading import Table, read_text

TOPOLOGIES = ("Ring", "FullyConnected", "Switch")
NETWORK = ("topology", "npus_count", "bandwidth", "latency")
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
ALGORITHMS = ("ring", "direct", "halvingDoubling")
OPTIMISATIONS = ("baseline", "localBWAware")
MOST_NPUS = 65536  # of a network with a Switch or FullyConnected beside another dimension
GIB = 2**30


@dataclass(frozen=True)
class Dimension:
    """One dimension: bandwidth in bytes/s (2**30-byte GB already converted), latency in ps."""

    topology: str
    size: int
    bytes_per_s: int
    latency_ps: int


@dataclass(frozen=True)
class Network:
    """A network file, dimension 0 innermost."""

    dims: tuple[Dimension, ...]
    source: str = "network"

    @property
    def npus(self) -> int:
        """Number of NPUs: one chip with one rank each."""
        return math.prod(dim.size for dim in self.dims)

    @property
    def note(self) -> str:
        """How the bandwidths were read."""
        read = ", ".join(
            f"{dim.bytes_per_s / GIB:g} as {format_rate(dim.bytes_per_s)}" for dim in self.dims
        )
        return f"{self.source}: ASTRA-sim's GB is 2**30 bytes: bandwidth {read}"

    def fabric(self) -> Fabric:
        """The links that the file describes, with one rank per chip and no other limit."""
        if all(dim.topology == "Ring" for dim in self.dims):
            made = fabrics.torus(
                [dim.size for dim in self.dims[::-1]],
                bytes_per_s=[dim.bytes_per_s for dim in self.dims[::-1]],
                latency_ps=[dim.latency_ps for dim in self.dims[::-1]],
            )
        elif len(self.dims) == 1 and self.dims[0].topology == "Switch":
            dim = self.dims[0]
            made = fabrics.switch(
                dim.size, bytes_per_s=dim.bytes_per_s, latency_ps=2 * dim.latency_ps
            )
        else:
            made = self._graph()
        return made.attach(made.chips)

    def _graph(self) -> Fabric:
        if self.npus > MOST_NPUS:
            raise BadInput(f"{self.source}: npus_count", self.npus, f"at most {MOST_NPUS} NPUs")
        kinds = {f"chip{npu}": "chip" for npu in range(self.npus)}
        links: list[tuple[str, str, int, int]] = []
        for level, dim in enumerate(self.dims):
            for index, row in enumerate(self.groups(level)):
                names, hub = [f"chip{npu}" for npu in row.tolist()], f"switch{level}.{index}"
                if dim.topology == "Switch":
                    kinds[hub] = "switch"
                pairs = _cables(names, dim.topology, hub)
                links += [(a, b, dim.bytes_per_s, dim.latency_ps) for a, b in pairs]
        return fabrics.graph(kinds, links)

    def groups(self, level: int) -> np.ndarray:
        """int64[groups, size]: the NPUs that differ in one dimension only, in order."""
        shape = [dim.size for dim in self.dims[::-1]]
        grid = np.moveaxis(np.arange(self.npus).reshape(shape), len(shape) - 1 - level, -1)
        return grid.reshape(-1, self.dims[level].size)


def _cables(names: list[str], topology: str, hub: str) -> list[tuple[str, str]]:
    """One-way links among the NPUs of one group."""
    n = len(names)
    if topology == "Switch":
        return [pair for name in names for pair in ((name, hub), (hub, name))]
    if topology == "FullyConnected":
        return [(a, b) for a in names for b in names if a != b]
    near = [(names[i], names[(i + 1) % n]) for i in range(n if n > 2 else 1)]
    return near + [(b, a) for a, b in near]


def load_network(path: str | Path) -> Network:
    """A network file. Raises BadFile or BadInput for what ASTRA-sim would misread."""
    try:
        data = yaml.safe_load(read_text(path))
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f" line {where.line + 1}:" if where else ""
        raise BadFile(f"{path}:{line} is not YAML") from None
    return read_network(data, Path(path).name)


def read_network(data: object, source: str = "network") -> Network:
    """A Network of a parsed file. Raises BadInput naming the field."""
    table = Table(data, source, NETWORK)
    columns = [_listed(table, key) for key in NETWORK]
    if len({len(column) for column in columns}) > 1:
        shown = ", ".join(f"{key}: {len(c)}" for key, c in zip(NETWORK, columns, strict=True))
        raise BadInput(f"{source}: lengths", shown, "one entry per dimension in every list")
    rows = zip(*columns, strict=True)
    return Network(tuple(_dimension(row, table, i) for i, row in enumerate(rows)), source)


def _listed(table: Table, key: str) -> list[Any]:
    value = table.need(key, "a list with one entry per dimension")
    if not isinstance(value, list) or not value:
        raise BadInput(table.field(key), value, "a list with one entry per dimension")
    return value


def _dimension(row: tuple[Any, ...], table: Table, index: int) -> Dimension:
    topology, size, bandwidth, latency = row
    fields = [f"{table.field(key)}[{index}]" for key in NETWORK]
    if topology not in TOPOLOGIES:
        raise BadInput(fields[0], topology, TOPOLOGIES)
    if not isinstance(size, int) or isinstance(size, bool) or size < 2:
        raise BadInput(fields[1], size, "a whole number, 2 or more")
    rate = _exact(bandwidth, fields[2], "a number of 2**30 bytes/s above 0") * GIB
    if rate < 1:
        raise BadInput(fields[2], bandwidth, "a number of 2**30 bytes/s above 0")
    delay = _exact(latency, fields[3], "a number of ns, 0 or more") * 1000
    return Dimension(topology, size, int(rate), int(delay))


def _exact(value: object, field: str, allowed: str) -> Decimal:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < 0:  # type: ignore[arg-type]
        raise BadInput(field, value, allowed)
    return Decimal(str(value))


@dataclass(frozen=True)
class System:
    """What the profile uses of a system file.

    algorithms: kind -> one name per dimension. splits: chunks per collective; active: chunks in
    flight per dimension. endpoint_delay: ns; local_mem_bw: bytes/ns. ignored: keys without effect.
    """

    algorithms: Mapping[str, tuple[str, ...]]
    splits: int
    active: int = 1
    queues: int = 1
    endpoint_delay: int = 10
    local_mem_bw: float = 1600.0
    optimisation: str = "localBWAware"
    ignored: tuple[str, ...] = ()

    @property
    def slots(self) -> int:
        """Chunks in flight per queue."""
        return -(-self.active // self.queues)


def load_system(path: str | Path, dims: int) -> System:
    """A system file for a network of `dims` dimensions. Raises BadFile or BadInput."""
    try:
        data = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise BadFile(f"{path}: line {error.lineno}: {error.msg}") from None
    return read_system(data, dims, Path(path).name)


_USED = (
    "preferred-dataset-splits", "active-chunks-per-dimension", "num-queues-per-dim",
    "endpoint-delay", "local-mem-bw", "collective-optimization",
)  # fmt: skip


def read_system(data: object, dims: int, source: str = "system") -> System:
    """A System of a parsed file. ASTRA-sim crashes, hangs or silently drops dimensions for a file
    without splits, local memory rate, one algorithm per dimension or, with several dimensions, the
    optimisation: all of these are refused. Keys that the profile does not use are listed.
    """
    if not isinstance(data, Mapping):
        raise BadInput(source, data, "a JSON object")
    table = Table(data, source, tuple(data))
    table.need("local-mem-bw", "GB/s of local memory (1e9)")
    given = [kind for kind in KINDS if _key(kind) in data]
    if dims > 1:
        table.need("collective-optimization", " or ".join(OPTIMISATIONS))
    optimisation = table.text("collective-optimization", "localBWAware")
    if optimisation not in OPTIMISATIONS:
        raise BadInput(table.field("collective-optimization"), optimisation, OPTIMISATIONS)
    memory = float(_exact(table.raw("local-mem-bw"), table.field("local-mem-bw"), "GB/s above 0"))
    if not memory:
        raise BadInput(table.field("local-mem-bw"), 0, "GB/s above 0")
    used = {*_USED, *map(_key, KINDS)}
    return System(
        algorithms={kind: _algorithms(table, kind, dims) for kind in given},
        splits=table.integer("preferred-dataset-splits", 1),
        active=table.integer("active-chunks-per-dimension", 1, 1),
        queues=table.integer("num-queues-per-dim", 1, 1),
        endpoint_delay=table.integer("endpoint-delay", 0, 10),
        local_mem_bw=memory,
        optimisation=optimisation,
        ignored=tuple(sorted(key for key in data if key not in used)),
    )


def _key(kind: str) -> str:
    return f"{kind.replace('_', '-')}-implementation"


def _algorithms(table: Table, kind: str, dims: int) -> tuple[str, ...]:
    names = table.texts(_key(kind))
    field = table.field(_key(kind))
    if len(names) != dims:
        raise BadInput(field, names, f"{dims} names, one per dimension")
    for name in names:
        if name not in ALGORITHMS:
            raise BadInput(field, name, ALGORITHMS)
    return tuple(names)
