"""Instances and UltraServers: how many chips they have and how these are wired.

Read from `device/specs/instances.toml`, where every number has its source.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from trnsim.collectives import fabric as fabrics
from trnsim.collectives.costs import Memory, Overheads
from trnsim.collectives.fabric import Fabric
from trnsim.device.chip import Chip, load_chip, with_number
from trnsim.device.errors import BadFile, BadInput
from trnsim.device.numbers import Number, read_entries, read_toml
from trnsim.device.overlay import Overlay, apply_overlay

from .lnc import check_lnc, logical_per_chip

FILE = "instances"
TOPOLOGIES = ("single", "ring", "torus", "switch")
Link = tuple[str, str, int, int]  # source, target, bytes per second, picoseconds
ALIASES = {
    "trn2u-ultraserver": "trn2-ultraserver",
    "trn3-gen1": "trn3-gen1-ultraserver",
    "trn3-gen2": "trn3-gen2-ultraserver",
}


@dataclass(frozen=True, kw_only=True)
class Instance:
    """One kind of instance or UltraServer. `chip` carries the link rates of this instance."""

    name: str
    chip: Chip
    topology: str
    chips: int
    servers: int = 1  # trn2u instances or Trn3 servers inside an UltraServer
    racks: int = 1  # second-level switches of a switched UltraServer
    dims: tuple[int, ...] = ()  # torus axes, the last one fastest in chip ids; Z first
    efa_bytes_per_s: int = 0  # all network interfaces together; 0: no EFA
    efa_devices: int = 0
    core_counts: tuple[int, ...] = ()  # ranks that a job may have; () leaves it free
    core_counts_multiple: int = 0
    tensor_parallel: tuple[int, ...] = ()  # degrees that the vendor lists; () leaves it free
    vcpus: int | None = None
    host_memory_bytes: int | None = None
    numbers: Mapping[str, Number] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.topology not in TOPOLOGIES:
            raise BadFile(f"{FILE}.toml: {self.name}: topology {self.topology} is not known")
        if self.dims and math.prod(self.dims) != self.chips:
            raise BadFile(f"{FILE}.toml: {self.name}: dims {self.dims} are not {self.chips} chips")
        if self.chips % self.servers or self.servers % self.racks:
            raise BadFile(f"{FILE}.toml: {self.name}: chips, servers and racks do not divide")

    @property
    def chips_per_server(self) -> int:
        return self.chips // self.servers

    @property
    def physical_cores(self) -> int:
        return self.chips * self.chip.cores

    def logical_cores(self, lnc: int | None = None) -> int:
        """Ranks at an LNC; None is the chip's default. Raises BadInput for an illegal LNC."""
        return self.chips * logical_per_chip(self.chip, check_lnc(self.chip, lnc))


@cache
def _table() -> dict[str, Any]:
    return read_toml(FILE)


def instance_names() -> tuple[str, ...]:
    """Every instance and UltraServer that `load_instance` knows."""
    return tuple(_table())


def load_instance(name: str, overlay: Overlay | str | Path | None = None) -> Instance:
    """The instance called `name`, with the numbers of an overlay (or its file) for its chip.

    Raises BadInput with the nearest name for an unknown one.
    """
    key = ALIASES.get(str(name).lower(), str(name).lower())
    if key not in _table():
        raise BadInput("instance", name, instance_names())
    instance = _load(key)
    if overlay is None:
        return instance
    return replace(instance, chip=apply_overlay(instance.chip, overlay))


@cache
def _load(name: str) -> Instance:
    return instance_of(name, *read_instance(name))


def read_instance(name: str) -> tuple[dict[str, Any], dict[str, Number]]:
    """Plain fields (chip, topology) and numbers of one entry, those of `like` beneath."""
    entry = dict(_table()[name])
    plain, numbers = read_instance(entry.pop("like")) if "like" in entry else ({}, {})
    plain |= {key: entry.pop(key) for key in ("chip", "topology") if key in entry}
    numbers |= dict(read_entries(entry, f"{FILE}.toml", name))
    return plain, numbers


def instance_of(name: str, plain: Mapping[str, Any], numbers: Mapping[str, Number]) -> Instance:
    """An Instance of the numbers of its entry; those named as a field of Chip change its chip."""
    chip, values = load_chip(plain["chip"]), {}
    for key, number in numbers.items():
        if key in chip.numbers:
            chip = with_number(chip, key, number)
        else:
            values[key] = number.value
    unknown = sorted(values.keys() - {item.name for item in fields(Instance)})
    if unknown or "chips" not in values:
        raise BadFile(f"{FILE}.toml: {name}: {', '.join(unknown) or 'chips'} unknown or missing")
    rest = {key: number for key, number in numbers.items() if key in values}
    return Instance(name=name, chip=chip, topology=plain["topology"], numbers=rest, **values)


def fabric(instance: Instance, nodes: int = 1, lnc: int | None = None) -> Fabric:
    """The links of `nodes` instances with one rank per logical core.

    Ranks are ordered by node, chip and logical core. Every rank has its own DMA link out of and
    into its chip. Several nodes are joined over EFA by one switch that does not block.
    """
    check_nodes(instance, nodes)
    lnc = check_lnc(instance.chip, lnc)
    whole = _wired(instance, nodes)
    chip, per_chip = instance.chip, logical_per_chip(instance.chip, lnc)
    rate = chip.on_chip_bytes_per_s * lnc
    places = whole.chips.repeat(per_chip)
    return whole.attach(places, dma_out=rate, dma_in=rate, latency_ps=chip.on_chip_latency_ps)


def overheads(instance: Instance, nodes: int = 1, lnc: int | None = None) -> Overheads:
    """What collectives cost besides the links of `fabric` of the same arguments.

    CC-cores need time to start and for each step; reducing takes DMA rate; HBM stacks are shared by
    the ranks on them, and chips of two dies have a crossing.
    """
    chip, lnc = instance.chip, check_lnc(instance.chip, lnc)
    cores = np.arange(nodes * instance.physical_cores)[::lnc]  # the first of each rank
    stacks = nodes * instance.physical_cores // chip.cores_per_stack
    rate = int(chip.stack_bytes_per_s * chip.cc_hbm_fraction)
    memory = Memory(
        of_rank=cores // chip.cores_per_stack,
        bytes_per_s=np.full(stacks, rate, np.int64),
        die=cores % chip.cores * chip.dies // chip.cores if chip.dies > 1 else None,
        die_bytes_per_s=chip.die_bytes_per_s,
        die_latency_ps=chip.die_latency_ps,
    )
    return Overheads(
        start_ps=chip.collective_start_ps,
        step_ps=chip.cc_step_ps,
        rendezvous=chip.cc_rendezvous,
        reduce_fraction=chip.dma_compute_fraction,
        memory=memory,
    )


def check_nodes(instance: Instance, nodes: int) -> None:
    """Raises BadInput for less than one node, or for several of an instance without EFA."""
    if nodes < 1:
        raise BadInput("nodes", nodes, "1 or more", 1)
    if nodes > 1 and not instance.efa_bytes_per_s:
        raise BadInput("nodes", nodes, f"1: {instance.name} has no EFA to other nodes", 1)


def _wired(instance: Instance, nodes: int) -> Fabric:
    """Chips and their links, without ranks; several nodes are joined over EFA."""
    switched = instance.topology == "switch"
    one = _ultraserver(instance) if switched else _direct_node(instance)
    if nodes == 1:
        return one
    return fabrics.join(
        [one] * nodes,
        bytes_per_s=interface_rate(instance),
        latency_ps=_efa_crossing(instance.chip),
        nics=instance.efa_devices,
        prefix="node",
    )


def _direct_node(instance: Instance) -> Fabric:
    if instance.topology == "single":
        return fabrics.graph(["chip0"], [])
    levels = [instance.topology] * len(instance.dims)
    if len(levels) == 3:
        levels[0] = "z"
    rates = [instance.chip.link_rate(level) for level in levels]
    return fabrics.torus(instance.dims, bytes_per_s=rates, latency_ps=instance.chip.link_latency_ps)


def interface_rate(instance: Instance) -> int:
    """Bytes per second that collectives get from one network interface, per direction."""
    return int(instance.efa_bytes_per_s * instance.chip.efa_efficiency) // instance.efa_devices


def _efa_crossing(chip: Chip) -> int:
    """The rank's own DMA is charged apart: HBM to HBM then takes `efa_latency_ps`."""
    return chip.efa_latency_ps - chip.on_chip_latency_ps


def _ultraserver(instance: Instance) -> Fabric:
    """One Trn3 UltraServer, without ranks, as in the figure of trn3-arch.rst.

    Each chip has links to the switch of its server, to the second-level switch of its rack, and to
    the chip of the same position in the paired server of the other rack. Routes are those of least
    latency.
    """
    chip, size = instance.chip, instance.chips_per_server
    rack = instance.chips // instance.racks
    names = [f"chip{c}" for c in range(instance.chips)]
    links: list[Link] = []
    for c, name in enumerate(names):
        for level, index in (("server", c // size), ("rack", c // rack)):
            switch, rate = f"{level}-switch{index}", chip.link_rate(level)
            half = chip.link_latency_ps // 2
            links.append((name, switch, rate, half + chip.switch_latency_ps))
            links.append((switch, name, rate, half))
        for twin in names[c + rack :: rack]:
            rate = chip.link_rate("direct")
            links += [(a, b, rate, chip.link_latency_ps) for a, b in ((name, twin), (twin, name))]
    switches = dict.fromkeys(end for _, end, *_ in links if end not in names)
    return fabrics.graph(dict.fromkeys(names, "chip") | dict.fromkeys(switches, "switch"), links)
