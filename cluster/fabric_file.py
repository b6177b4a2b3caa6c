"""Fabric files (TOML): any graph of chips, switches and interfaces, and the ranks on it.

    title = "two servers"                # optional

    [part.server]                        # a part, by one of four builders
    torus = [4, 4]                       # torus = [...] | ring = N | switch = N | chips = [...]
    bandwidth = "128GB/s"                # per link and direction; torus: one, or one per dimension
    latency = "1us"                      # optional, as is every latency (then 0)

    [join]                               # needed for more than one part
    parts = { server = 2 }               # how many of each, in this order
    bandwidth = "25GB/s"                 # of each interface (of each chip's link without `nics`)
    latency = "15us"                     # one crossing from part to part
    nics = 16                            # optional: interfaces per part, shared by its chips
    nic_bandwidth = "32GB/s"             # optional: of a chip's link to its interface
    names = "server"                     # optional: parts are called server0, server1, ...

    [ranks]                              # optional: one rank per chip without a DMA limit
    per_chip = 4                         # or `on`: the chip of each rank, by name
    dma_out = "208GB/s"                  # one, or one per rank; left out: unlimited
    dma_in = "208GB/s"
    dma_latency = "1.5us"                # once per transfer

    [state]
    failed = ["server0/chip3<->server0/chip7", "server1/chip5"]      # links and nodes
    degraded = { "server0/chip0->server0/chip1" = "10GB/s", "rank 3" = "50GB/s" }

    [start]
    delay = { "3" = "20us", "8-15" = "5us" }                         # ranks that come late
    jitter = "2us"                       # uniform, 0 to this, for each rank
    seed = 7

A part that is any graph lists its nodes and links:

    [part.box]
    chips = ["a", "b", "c"]
    switches = ["s"]                     # optional, as are `nics`
    [[part.box.link]]
    between = ["a", "b"]                 # both ways; or from = "a", to = "b" for one way
    bandwidth = "256GB/s"
    latency = "1us"
    state = "up"                         # optional: up, failed, or { degraded = "10GB/s" }

Instead of parts and ranks, `[instance]` takes a known one: name = "trn2.48xlarge", nodes = 2,
lnc = 2. A link is named by its ends: a->b one way, a<->b both ways. Chips that a builder makes are
chip0, chip1, ...; the switch of `join` is switch0 (switch1 if it joins `switch` parts), its
interfaces are server0/nic0, ... Every rate and time has a unit. Other keys are refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from trnsim.collectives import fabric as fabrics
from trnsim.collectives.fabric import Fabric
from trnsim.device.errors import BadInput

from . import instances, reading
from .conditions import Start, with_failures, with_rates
from .frontends import astra
from .reading import Table, placed

TOP = ("title", "part", "join", "ranks", "state", "start", "instance")
SHAPES = {  # builder -> the other keys of its part
    "torus": ("bandwidth", "latency"),
    "ring": ("bandwidth", "latency", "one_way"),
    "switch": ("bandwidth", "latency"),
    "chips": ("switches", "nics", "link"),
}
JOIN = ("parts", "bandwidth", "latency", "nics", "nic_bandwidth", "names")
RANKS = ("per_chip", "on", "dma_out", "dma_in", "dma_latency")
LINK = ("between", "from", "to", "bandwidth", "latency", "state")
UP, FAILED, DEGRADED = "up", "failed", "degraded"
YAML = (".yml", ".yaml")
MOST_CHIPS = 2**22  # more would need more memory than a common machine has


@dataclass(frozen=True, eq=False)
class FabricFile:
    """What a fabric file says. notes: how it was read, for the report."""

    fabric: Fabric
    start: Start
    title: str = ""
    notes: tuple[str, ...] = ()


def load_fabric(path: str | Path) -> Fabric:
    """The fabric of a file, with ranks and failures. See `read_fabric`."""
    return read_fabric(path).fabric


def read_fabric(path: str | Path) -> FabricFile:
    """A fabric file: TOML as above, or the network file of ASTRA-sim (.yml, .yaml).

    Raises BadFile for a file that cannot be read, and BadInput naming file, field, value, what is
    allowed and the nearest valid choice.
    """
    name = Path(path).name
    if Path(path).suffix.lower() in YAML:
        network = astra.load_network(path)
        return FabricFile(network.fabric(), Start(), name, (network.note,))
    top = Table(reading.read_toml_file(path), name, TOP)
    fabric = _in_state(_whole(top), top.table("state", ("failed", "degraded"), {}))
    start = _start(top.table("start", ("delay", "jitter", "seed"), {}), fabric.ranks)
    return FabricFile(fabric, start, top.text("title", name))


def _whole(top: Table) -> Fabric:
    """The fabric with its ranks, before anything has failed."""
    if "instance" not in top:
        return _attached(_joined(top, _parts(top)), top.table("ranks", RANKS, {}))
    for key in ("part", "join", "ranks"):
        if key in top:
            raise BadInput(f"{top.where}: [{key}]", "(given)", "nothing beside [instance]")
    table = top.table("instance", ("name", "nodes", "lnc"))
    lnc = table.integer("lnc", 1) if "lnc" in table else None
    with placed(table.where):
        found = instances.load_instance(table.text("name"))
        return instances.fabric(found, table.integer("nodes", 1, 1), lnc)


def _parts(top: Table) -> dict[str, Fabric]:
    given = top.raw("part", {})
    if not isinstance(given, Mapping) or not given:
        raise BadInput(f"{top.where}: part", given or "(missing)", "[part.NAME] or [instance]")
    return {name: _part(given[name], f"{top.where}: [part.{name}]") for name in given}


def _part(data: object, where: str) -> Fabric:
    every = sorted({*SHAPES, *(key for keys in SHAPES.values() for key in keys)})
    kind = Table(data, where, every).one_of(SHAPES)
    table = Table(data, where, (kind, *SHAPES[kind]))
    with placed(where):
        return _graph(table) if kind == "chips" else _built(table, kind)


def _built(table: Table, kind: str) -> Fabric:
    dims = table.raw(kind) if kind == "torus" else [table.raw(kind)]
    count = _chips(dims, table.field(kind))
    if kind == "torus":
        rates = table.each("bandwidth", reading.rate)
        delays = table.each("latency", reading.time, "0ns")
        return fabrics.torus(dims, bytes_per_s=rates, latency_ps=delays)
    rate, latency = table.rate("bandwidth"), table.time("latency", "0ns")
    if kind == "switch":
        return fabrics.switch(count, bytes_per_s=rate, latency_ps=latency)
    both = not table.flag("one_way")
    return fabrics.ring(count, bytes_per_s=rate, latency_ps=latency, both_ways=both)


def _chips(dims: Any, field: str) -> int:
    """The chips of a shape. Raises BadInput unless dims are whole, positive and not too many."""
    whole = isinstance(dims, list) and dims
    if not whole or any(not isinstance(d, int) or isinstance(d, bool) or d < 1 for d in dims):
        raise BadInput(field, dims, "whole numbers, 1 or more")
    if (count := int(np.prod([float(d) for d in dims]))) > MOST_CHIPS:
        raise BadInput(field, dims, f"at most {MOST_CHIPS} chips")
    return count


def _graph(table: Table) -> Fabric:
    """Nodes and links one by one, with the state of each link."""
    kinds: dict[str, str] = {}
    for key, kind in (("chips", "chip"), ("switches", "switch"), ("nics", "nic")):
        for name in table.texts(key, []):
            if name in kinds or not name or "->" in name or "/" in name:
                raise BadInput(table.field(key), name, "names used once, without -> and /")
            kinds[name] = kind
    if not table.raw("chips"):
        raise BadInput(table.field("chips"), "[]", "one chip or more")
    rows = [row for i, link in enumerate(table.tables("link", LINK)) for row in _link(link)]
    made = fabrics.graph(kinds, [row[:4] for row in rows])
    alive = np.array([row[4] != FAILED for row in rows], bool)
    rates = [row[4] if isinstance(row[4], int) else row[2] for row in rows]
    return replace(made, alive=alive, rate=np.array(rates, np.int64))


def _link(table: Table) -> list[tuple[str, str, int, int, str | int]]:
    """(source, target, bytes/s, ps, state) once or both ways; the state of a slow link is its
    rate."""
    rate, latency, state = table.rate("bandwidth"), table.time("latency", "0ns"), _state(table)
    if table.one_of(("between", "from")) == "from":
        return [(table.text("from"), table.text("to"), rate, latency, state)]
    ends = table.texts("between")
    if len(ends) != 2 or "to" in table:
        raise BadInput(table.field("between"), ends, "two nodes, and no `to`")
    return [(a, b, rate, latency, state) for a, b in (ends, ends[::-1])]


def _state(table: Table) -> str | int:
    given = table.raw("state", UP)
    if isinstance(given, Mapping):
        slow = Table(given, table.field("state"), (DEGRADED,))
        return slow.rate(DEGRADED)
    if given not in (UP, FAILED):
        raise BadInput(table.field("state"), given, (UP, FAILED, '{ degraded = "10GB/s" }'))
    return given


# --- the whole ---


def _joined(top: Table, parts: dict[str, Fabric]) -> Fabric:
    if "join" not in top:
        if len(parts) > 1:
            raise BadInput(f"{top.where}: [join]", "(missing)", f"a table: {len(parts)} parts")
        return next(iter(parts.values()))
    table = top.table("join", JOIN)
    counts = Table(table.need("parts", "{ NAME = COUNT }"), table.field("parts"), parts)
    chosen = [parts[key] for key in counts.data for _ in range(counts.integer(key, 1))]
    if not chosen:
        raise BadInput(table.field("parts"), "{}", "{ NAME = COUNT } for one part or more")
    _chips([sum(len(part.chips) for part in chosen)], table.field("parts"))
    nics = table.integer("nics", 1) if "nics" in table else None
    if nics is None and "nic_bandwidth" in table:
        raise BadInput(table.field("nic_bandwidth"), "(given)", "only together with nics")
    with placed(table.where):
        return fabrics.join(
            chosen,
            bytes_per_s=table.rate("bandwidth"),
            latency_ps=table.time("latency", "0ns"),
            nics=nics,
            nic_bytes_per_s=table.rate("nic_bandwidth") if "nic_bandwidth" in table else None,
            prefix=_prefix(table),
        )


def _prefix(table: Table) -> str:
    prefix = table.text("names", "server")
    if not prefix or "/" in prefix or "->" in prefix:
        raise BadInput(table.field("names"), prefix, "text without / and ->")
    return prefix


def _attached(fabric: Fabric, table: Table) -> Fabric:
    if "on" in table and "per_chip" in table:
        raise BadInput(table.where, "per_chip and on", "one of them")
    with placed(table.where):
        if "on" in table:
            nodes = [fabric.names.need(name, "on") for name in table.texts("on")]
        else:
            nodes = fabric.chips.repeat(table.integer("per_chip", 1, 1))
        rates = {
            key: table.each(key, reading.rate) for key in ("dma_out", "dma_in") if key in table
        }
        return fabric.attach(nodes, **rates, latency_ps=table.time("dma_latency", "0ns"))


def _in_state(fabric: Fabric, table: Table) -> Fabric:
    slow = Table(table.raw(DEGRADED, {}), table.field(DEGRADED), table.raw(DEGRADED, {}))
    with placed(table.where):
        fabric = with_rates(fabric, {name: slow.rate(name) for name in slow.keys})
        return with_failures(fabric, table.texts("failed", []))


def _start(table: Table, ranks: int) -> Start:
    delay = Table(table.raw("delay", {}), table.field("delay"), table.raw("delay", {}))
    pairs = tuple((who, delay.time(who)) for who in delay.keys)
    start = Start(pairs, table.time("jitter", "0ns"), table.integer("seed", 0, 0))
    with placed(table.where):
        start.arrivals(ranks)
    return start
