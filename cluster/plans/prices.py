"""What the steps of a training program cost on a machine: segments, exchanges, sends.

Exchanges and sends are priced on the real placement, all groups of all stages that do the same at
once. Groups that fill equal sets of equal nodes are priced on one set, and groups that do the same
on every node on two nodes (`collectives.twins`): the fabric between nodes is one switch that does
not block. Both are exact, and neither is done where links have failed or are slow. Buffers are
padded to equal chunks. Sends of different pairs of stages are taken not to share links.

Segments take the time of their kernels over the chip's `program_efficiency`: what compiled training
programs reach of it as a whole, calibrated to measured steps (`cluster/calibrate_steps.py`).

Prices leave out when ranks arrive; `clocks` adds that.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np

from trnsim.collectives import choose
from trnsim.collectives.price import Priced, Pricer
from trnsim.collectives.schedule import POINT_TO_POINT, Collective, Schedule
from trnsim.collectives.twins import twins
from trnsim.device.errors import BadInput
from trnsim.device.ops.ir import TensorType
from trnsim.device.units import PS_PER_S

from .. import cheapest
from ..calls import check_algorithm, describe
from ..collective import Site, site_of
from ..conditions import with_failures, with_rates
from ..instances import Instance
from ..machine import Machine
from ..overlap import Demand, demand_of
from .folds import Fold, folded, unfolded
from .places import Array, Classes, Places, classes_of
from .program import Exchange, Run, Send, StageCode
from .segment import Segment


@dataclass(frozen=True, slots=True)
class RunPrice:
    """One run of a segment on a rank alone; `limited_by` is its busiest engine.

    duration: ps of its kernels over the efficiency of programs.
    """

    duration: int
    demand: Demand
    flops: int
    hbm_bytes: int
    limited_by: str


@dataclass(frozen=True, eq=False)
class ExchangePrice:
    """One exchange in one stage.

    ends: int64[1 or places] ps after the last arrival. groups: int64[groups, members] places that
    wait for each other. partners: where only pairs wait for each other, the source and target of
    each place (itself for none), int64[2, places].
    """

    collective: Collective
    algorithm: str
    reason: str
    ends: Array
    groups: Array
    partners: Array | None
    demand: Demand
    limited_by: str
    axes: tuple[str, ...]
    span: int = 0

    @property
    def members(self) -> int:
        """Ranks of a group."""
        return self.groups.shape[1]

    @property
    def group(self) -> str:
        """The axes that a group is over: `dp x cp`, or `2 neighbours on tp`."""
        axes = " x ".join(self.axes)
        return f"{self.span} neighbours on {axes}" if self.span else axes

    def name(self, label: str) -> str:
        """`gradients: all_reduce of 1024 B over dp`: equal for exchanges that do the same."""
        return f"{label}: {self.collective.kind} of {self.collective.nbytes} B over {self.group}"


@dataclass(frozen=True, eq=False)
class SendPrice:
    """A send to another stage: int64[1 or places] ps that the sender's port is taken, and until the
    receiver has the data."""

    port: Array
    arrival: Array
    nbytes: int

    def name(self, channel: str) -> str:
        """`forward: send of 1024 B`: equal for all chunks that a channel is numbered by."""
        return f"{channel.rstrip('0123456789 ')}: send of {self.nbytes} B"


@dataclass(frozen=True, eq=False)
class _Priced:
    """A collective in all groups of a table: int64[rows, members] ends."""

    ends: Array
    algorithm: str
    reason: str
    demand: Demand
    limited_by: str


class _Transfers(NamedTuple):
    """As `places.classes_of` takes them."""

    values: list[Array]
    tables: list[Array]
    partners: list[Array]


class Prices:
    """Prices on a machine, for the code of all stages of a training program.

    `algorithm` as for `calls.Calls`. failed, degraded: links and nodes of the fabric, as
    `conditions` takes them. efficiency: in place of the chip's `program_efficiency`.
    """

    def __init__(
        self,
        machine: Machine,
        codes: Sequence[StageCode],
        algorithm: str = "policy",
        failed: Sequence[str] = (),
        degraded: tuple[tuple[str, int], ...] = (),
        efficiency: float | None = None,
    ) -> None:
        check_algorithm(algorithm)
        self.efficiency = machine.chip.program_efficiency if efficiency is None else efficiency
        if not 0 < self.efficiency <= 1:
            raise BadInput("program_efficiency", self.efficiency, "above 0, at most 1", 1)
        self.machine, self.codes, self.algorithm = machine, tuple(codes), algorithm
        self.failed, self.degraded = tuple(failed), tuple(degraded)
        self.places = Places(machine.placement.mesh)
        self.slots = np.asarray(machine.placement.slots, np.int64)
        self._runs: dict[Segment, RunPrice] = {}
        self._groups: dict[tuple[tuple[str, ...], int], Array] = {}
        self._exchanges: dict[tuple, ExchangePrice] = {}
        self._steps: dict[tuple[int, int], tuple[Exchange, ExchangePrice | None]] = {}
        self._priced: dict[tuple, _Priced] = {}
        self._sends: dict[tuple, SendPrice] = {}
        self._folds: dict[tuple, Fold] = {}

    @property
    def ground(self) -> tuple:
        """Equal for prices that are equal whatever the program."""
        where = self.machine.placement
        return (
            where.instance, where.nodes, where.lnc, where.mesh, self.slots.tobytes(),
            self.algorithm, self.failed, self.degraded, self.efficiency,
        )  # fmt: skip

    def run(self, segment: Segment) -> RunPrice:
        """A segment on one rank of this machine."""
        if segment not in self._runs:
            self._runs[segment] = _run_price(segment, self.machine, self.efficiency)
        return self._runs[segment]

    def compile(self) -> None:
        """Compiles all segments; otherwise `run` does it when it meets one."""
        for segment in self._segments:
            self.run(segment)

    @cached_property
    def _segments(self) -> list[Segment]:
        runs = (step for code in self.codes for step in code.walk() if isinstance(step, Run))
        return list(dict.fromkeys(run.segment for run in runs))

    @cached_property
    def classes(self) -> Classes:
        """Places that exchanges and sends do not tell apart."""
        return self.classes_with(())

    def classes_with(self, values: Iterable[Array]) -> Classes:
        """Places that neither these values, one per place, nor exchanges and sends tell apart."""
        told = [*values, *self._transfers.values]
        return classes_of(self.places.count, told, self._transfers.tables, self._transfers.partners)

    @cached_property
    def _transfers(self) -> "_Transfers":
        """What exchanges and sends of all stages may tell places apart by."""
        values: list[Array] = []
        tables: dict[tuple[tuple[str, ...], int], Array] = {}
        partners: list[Array] = []
        for code in self.codes:
            for step in code.walk():
                if isinstance(step, Send):
                    price = self.send(code.stage, step.stage, code.values[step.read.name].type)
                    values += [price.port, price.arrival]
                elif isinstance(step, Exchange) and (met := self.exchange(code, step)):
                    values.append(met.ends)
                    if met.partners is None:
                        tables[met.axes, met.span] = met.groups
                    else:
                        partners += list(met.partners)
        return _Transfers(values, list(tables.values()), partners)

    def exchange(self, stage: StageCode, step: Exchange) -> ExchangePrice | None:
        """An exchange as `stage` does it; None where its groups are of one rank."""
        key = (id(step), stage.stage)
        if key not in self._steps:
            self._steps[key] = step, self._exchange(stage, step)
        return self._steps[key][1]

    def _exchange(self, stage: StageCode, step: Exchange) -> ExchangePrice | None:
        if step.span == 1 or all(self.places.mesh.degree(axis) == 1 for axis in step.axes):
            return None
        key = self._kind(stage, step)
        stages = self._stages[key]
        if (key, stage.stage) not in self._exchanges:
            groups = self.groups(step)
            operand, result = step.types(stage.values, groups.shape[1])
            collective = describe(step.operation, operand, result, groups.shape[1])
            priced = self._price(collective, stages, groups, (step.axes, step.span))
            rows = priced.ends.reshape(len(stages), *groups.shape)[stages.index(stage.stage)]
            ends = np.empty(groups.size, np.int64)
            ends[groups] = rows
            self._exchanges[key, stage.stage] = ExchangePrice(
                collective, priced.algorithm, priced.reason, _short(ends), groups,
                _partners(collective, groups), priced.demand, priced.limited_by, step.axes,
                step.span,
            )  # fmt: skip
        return self._exchanges[key, stage.stage]

    @cached_property
    def _stages(self) -> dict[tuple, tuple[int, ...]]:
        """The stages that do each kind of exchange: they are priced together."""
        found: dict[tuple, dict[int, None]] = {}
        for code in self.codes:
            for step in code.walk():
                if isinstance(step, Exchange):
                    found.setdefault(self._kind(code, step), {})[code.stage] = None
        return {key: tuple(stages) for key, stages in found.items()}

    def _kind(self, stage: StageCode, step: Exchange) -> tuple:
        """Equal for exchanges that do the same."""
        operation = step.operation
        attributes = tuple(sorted((k, repr(v)) for k, v in operation.attributes.items()))
        types = step.types(stage.values, self.groups(step).shape[1])
        return operation.name, attributes, types, step.axes, step.span, step.label

    def groups(self, step: Exchange) -> Array:
        """int64[groups, members] places of a stage that an exchange is among."""
        key = (step.axes, step.span)
        if key not in self._groups:
            groups = self.places.groups(step.axes)
            self._groups[key] = groups.reshape(-1, step.span) if step.span else groups
        return self._groups[key]

    def send(self, source: int, target: int, kind: TensorType) -> SendPrice:
        """A value from every place of a stage to the same place of another, all at once."""
        for stage in (source, target):
            if not 0 <= stage < self.places.stages:
                raise BadInput("stage", stage, f"0 to {self.places.stages - 1}")
        key = (source, target, kind)
        if key not in self._sends:
            table = self.places.ranks[[source, target]].T
            pair = Collective("permute", 2, counts=kind.size, dtype=kind.dtype, pairs=((0, 1),))
            ends = self._price_in(pair, table, ("send", source, target)).ends
            self._sends[key] = SendPrice(_short(ends[:, 0]), _short(ends[:, 1]), kind.nbytes)
        return self._sends[key]

    def _price(
        self, collective: Collective, stages: tuple[int, ...], groups: Array, name: tuple
    ) -> _Priced:
        key = (collective, stages, name)
        if key not in self._priced:
            ranks = self.places.ranks[list(stages)][:, groups]
            self._priced[key] = self._price_in(collective, ranks, (stages, name))
        return self._priced[key]

    def _price_in(self, collective: Collective, ranks: Array, name: tuple) -> _Priced:
        """A collective in groups of ranks, which are always the same for a name."""
        where, changed = self.machine.placement, (self.failed, self.degraded)
        if name not in self._folds:
            table = self.slots[ranks].reshape(-1, collective.ranks)
            per_node = where.instance.logical_cores(where.lnc)
            fold = unfolded(table, where.nodes) if any(changed) else None
            self._folds[name] = fold or folded(table, per_node, where.nodes)
        fold = self._folds[name]
        ground = _Ground(where.instance, fold.nodes, where.lnc, *changed)
        priced = _price_rows(collective, ground, fold, self.algorithm)
        return replace(priced, ends=fold.expand(priced.ends))


def _short(values: Array) -> Array:
    """One number where all are equal."""
    same = values.size > 1 and bool((values == values.flat[0]).all())
    return values.reshape(-1)[:1].copy() if same else values


def _partners(collective: Collective, groups: Array) -> Array | None:
    if collective.kind not in POINT_TO_POINT:
        return None
    partners = np.tile(np.arange(groups.size), (2, 1))
    for source, target in collective.pairs:
        partners[0, groups[:, target]] = groups[:, source]
        partners[1, groups[:, source]] = groups[:, target]
    return partners


class _Ground(NamedTuple):
    """A fabric by what it is made of."""

    instance: Instance
    nodes: int
    lnc: int
    failed: tuple[str, ...] = ()
    degraded: tuple[tuple[str, int], ...] = ()

    @property
    def per_node(self) -> int:
        """Logical cores of a node."""
        return self.instance.logical_cores(self.lnc)

    def places(self, cores: Array) -> tuple[Array, Array]:
        """(logical core in the node, node) of logical cores."""
        node, place = np.divmod(cores, self.per_node)
        return place, node

    def cores_of(self, node: Array, place: Array) -> Array:
        """The logical cores at these places of nodes."""
        return node * self.per_node + place


@cache
def _site(ground: _Ground) -> Site:
    site = site_of(ground.instance, nodes=ground.nodes, lnc=ground.lnc)
    if not (ground.failed or ground.degraded):
        return site
    fabric = with_rates(with_failures(site.fabric, ground.failed), dict(ground.degraded))
    return Site(
        site.title, fabric, site.overheads, site.nodes, site.lnc, site.instance, site.chip,
        policy=site.policy,
    )  # fmt: skip


@cache
def _price_rows(collective: Collective, ground: _Ground, fold: Fold, algorithm: str) -> _Priced:
    """Price in the groups of a folded table; plans of a study share these."""
    site, table = _site(ground), fold.rows
    name = cheapest.algorithm_for(algorithm, collective.kind)

    def duration(plan: choose.Plan) -> int:
        return _priced_as(plan, collective, ground, table)[1].duration_ps

    plan = cheapest.plan(collective, table, site.fabric, name, duration, site.policy)
    ends, priced, demand = _priced_as(plan, collective, ground, table)
    choice = plan.choice
    return _Priced(ends, choice.algorithm, choice.reason, demand, priced.limited_by)


def _priced_as(
    plan: choose.Plan, collective: Collective, ground: _Ground, table: Array
) -> tuple[Array, Priced, Demand]:
    """(ends of the table's members, price, demand) by a schedule; equal nodes are two of them."""
    schedule = plan.schedule
    even = _even(collective, schedule)
    places, nodes = ground.places(table)
    small = None
    if ground.nodes > 2 and not (ground.failed or ground.degraded):
        small = twins(schedule, even, nodes, places)
    like: Array | slice = slice(None)
    if small is not None:
        ground, like, schedule = ground._replace(nodes=2), small.like, small.schedule
        pair = np.unique(nodes[0, small.members], return_inverse=True)[1]
        table = ground.cores_of(pair, places[:, small.members])
    site = _site(ground)
    pricer = Pricer(schedule, site.fabric, table, of=collective.ranks)
    priced = pricer.price(even, overheads=site.overheads)
    return priced.end[:, like], priced, demand_of(site, priced.load, table, priced.duration_ps)


def _even(collective: Collective, schedule: Schedule) -> Collective:
    """With equal chunks: buffers are padded to whole elements of every chunk."""
    if collective.kind in POINT_TO_POINT or not isinstance(collective.counts, int):
        return collective
    return replace(collective, counts=-(-collective.counts // schedule.parts) * schedule.parts)


def _run_price(segment: Segment, machine: Machine, efficiency: float) -> RunPrice:
    """The same work as that of the kernels alone, in a longer time."""
    time = segment.time(machine.chip, machine.lnc)
    taken = math.ceil(time.duration / efficiency)
    duration = max(taken, 1)
    dma = max((t for (_, engine), t in time.busy.items() if engine == "dma"), default=0)
    rate = machine.placement.logical_core.hbm_bytes_per_s
    hbm = time.hbm_bytes * PS_PER_S / (duration * rate)
    busiest = max(time.busy.items(), key=lambda item: item[1], default=((0, "nothing"), 0))
    demand = Demand(min(1.0, dma / duration), min(1.0, hbm))
    return RunPrice(taken, demand, time.flops, time.hbm_bytes, busiest[0][1])
