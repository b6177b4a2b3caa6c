"""What a training plan takes: its step time, where that goes, and whether it fits."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib.metadata import version
from typing import Any

from trnsim.device.units import PS_PER_S

from ..collective import site_of
from ..machine import Machine
from .build import build
from .clocks import Conditions, Timeline, advance
from .expert_load import ExpertLoad, expert_load
from .goodput import Failures, Goodput, goodput
from .memory import Memory, memory
from .places import STAGE_AXIS
from .plan import Plan
from .prices import Prices
from .program import StageCode, TrainingProgram

COMPUTE = {
    "forward": "forward",
    "backward": "backward",
    "weights": "backward of weights",
    "recompute": "recompute",
    "gradients": "gradient upkeep",
    "optimizer": "optimizer",
}
"""Passes of tasks, and forward passes done again -> the parts of a step that are compute."""
EXPOSED = "exposed "  # and the label of exchanges
BUBBLE = "pipeline bubble"


@dataclass(frozen=True, kw_only=True)
class ExchangeTime:
    """All exchanges, or sends, of one kind. Times in ps per step, of the average rank with any.

    total: from a rank's arrival to its end; exposed: of that, what compute waited for. groups: per
    pipeline stage, of `ranks` members each. late: the rank that came last by most, and by how much.
    """

    label: str
    operation: str
    group: str
    ranks: int
    groups: int
    nbytes: int
    algorithm: str
    limited_by: str
    count: float
    total: int
    exposed: int
    late: tuple[int, int] | None


@dataclass(frozen=True, kw_only=True)
class PlanResult:
    """A priced plan. Times in ps, memory in bytes per rank.

    parts: where the step goes, averaged over all ranks; they sum to it (but for rounding): compute
    by pass, exposed exchanges by label, the bubble. memory: of the stage that needs most. hbm: what
    a rank has. peak_flops: published, of all chips' cores that are used. host_seconds: of this
    machine, not modelled. classes: of the places of a stage, how many were told apart.
    """

    version: str
    plan: dict[str, Any]
    step: int
    parts: dict[str, int]
    exchanges: tuple[ExchangeTime, ...]
    engines: dict[str, int]
    stages: tuple[int, ...]
    memory: Memory
    stage_memory: tuple[int, ...]
    hbm: int
    ranks: int
    tokens: int
    flops: int
    executed_flops: int
    peak_flops: int
    classes: int
    symmetry: str
    notes: tuple[str, ...]
    leaned_on: tuple[str, ...]
    goodput: Goodput | None = None
    host_seconds: dict[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """The step."""
        return self.step / PS_PER_S

    @property
    def tokens_per_s(self) -> float:
        """Of the whole job, while nothing fails."""
        return self.tokens / self.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs over what the published peak could do in the step."""
        return self.flops / (self.peak_flops * self.seconds)

    @property
    def hfu(self) -> float:
        """The same with the matmul FLOPs that the ranks execute, recomputation included."""
        return self.executed_flops / (self.peak_flops * self.seconds)

    @property
    def bubble(self) -> float:
        """Fraction of the step in which ranks wait for other stages."""
        return self.parts.get(BUBBLE, 0) / self.step

    @property
    def exposed(self) -> int:
        """Time in which compute waits for exchanges."""
        return sum(t for name, t in self.parts.items() if name.startswith(EXPOSED))

    @property
    def fits(self) -> bool:
        """Whether the memory of every stage is there."""
        return self.memory.total <= self.hbm

    @property
    def bound(self) -> str:
        """What the step mostly consists of, in words."""
        name, ps = max(self._shares().items(), key=lambda item: item[1])
        return f"{name}, {ps / self.step:.0%} of the step"

    def _shares(self) -> dict[str, int]:
        compute = sum(self.parts.get(name, 0) for name in COMPUTE.values())
        busiest = max(self.engines.items(), key=lambda item: item[1], default=("", 0))[0]
        shares = {f"compute, most of it limited by {busiest}": compute}
        return shares | {n: t for n, t in self.parts.items() if n not in COMPUTE.values()}


def price_plan(
    plan: Plan,
    *,
    conditions: Conditions | None = None,
    failed: Sequence[str] = (),
    degraded: Sequence[tuple[str, int]] = (),
    failures: Failures | None = None,
) -> PlanResult:
    """Virtual time and memory of one step of a plan.

    failed, degraded: of the fabric, as `conditions.with_failures` and `with_rates` take them.
    """
    return simulate(
        plan, conditions=conditions, failed=failed, degraded=degraded, failures=failures
    )[0]


def simulate(
    plan: Plan,
    *,
    conditions: Conditions | None = None,
    failed: Sequence[str] = (),
    degraded: Sequence[tuple[str, int]] = (),
    failures: Failures | None = None,
    traced: bool = False,
) -> tuple[PlanResult, Timeline]:
    """As `price_plan`, with the timeline and, if `traced`, its events."""
    begin = time.perf_counter()
    program = build(plan)
    built = time.perf_counter()
    changed = tuple(failed), tuple(degraded)
    prices = _prices(plan.machine, program.codes, plan.algorithm, *changed)
    prices.compile()
    compiled = time.perf_counter()
    load = _load(plan, conditions)
    timeline = advance(program, prices, conditions, traced, load.used if load else ())
    spent = {
        "building the program": built - begin,
        "compiling its segments": compiled - built,
        "pricing": time.perf_counter() - compiled,
    }
    needs = [memory(stage, plan.machine) for stage in program.stages]
    spent["memory"] = time.perf_counter() - compiled - spent["pricing"]
    result = _result(plan, program, prices, timeline, needs)
    if load and conditions:
        result = replace(result, notes=(*result.notes, load.note(conditions.imbalance or 0.0)))
    losses = goodput(failures, plan.machine.placement.nodes) if failures else None
    return replace(result, goodput=losses, host_seconds=spent), timeline


@lru_cache(maxsize=4)
def _prices(
    machine: Machine, codes: tuple[StageCode, ...], algorithm: str, *changed: Any
) -> Prices:
    """Plans that differ in their batch alone share these."""
    return Prices(machine, codes, algorithm, *changed)


def _load(plan: Plan, conditions: Conditions | None) -> ExpertLoad | None:
    if conditions is None or conditions.imbalance is None:
        return None
    return expert_load(plan, conditions.imbalance, conditions.seed)


def _result(
    plan: Plan,
    program: TrainingProgram,
    prices: Prices,
    timeline: Timeline,
    needs: Sequence[Memory],
) -> PlanResult:
    return PlanResult(
        version=version("trnsim"),
        plan=described(plan),
        step=timeline.duration,
        parts=parts(timeline),
        exchanges=(*exchanges(timeline, prices), *sends(timeline, prices)),
        engines=engines(timeline),
        stages=tuple(int(ends.max()) for ends in timeline.ends),
        memory=max(needs, key=lambda need: need.total),
        stage_memory=tuple(need.total for need in needs),
        hbm=plan.machine.hbm_bytes,
        ranks=plan.machine.ranks,
        tokens=program.tokens,
        flops=program.flops,
        executed_flops=executed_flops(timeline),
        peak_flops=published_peak(plan),
        classes=timeline.classes.count,
        symmetry=f"{symmetry(timeline, prices)}{repeated(timeline, program)}",
        notes=tuple(dict.fromkeys((*plan.notes, *program.notes))),
        leaned_on=_leaned_on(plan, timeline),
    )


def described(plan: Plan) -> dict[str, Any]:
    """What was asked for, as plain data."""
    where = plan.machine.placement
    return {
        "model": plan.model.name,
        "instance": where.instance.name,
        "nodes": where.nodes,
        "lnc": where.lnc,
        "mesh": str(where.mesh),
        "global_batch": plan.global_batch,
        "microbatch": plan.microbatch,
        "microbatches": plan.microbatches,
        "seq": plan.seq,
        "dtype": plan.dtype,
        "zero": plan.zero,
        "recompute": plan.recompute,
        "schedule": str(plan.schedule),
        "streams": plan.streams,
        "algorithm": plan.algorithm,
        "seed": plan.seed,
    }


def parts(timeline: Timeline) -> dict[str, int]:
    """Where the step of the average rank goes, in ps."""
    found = {name: ps for name, ps in _means(timeline, "run").items() if ps}
    ordered = {part: found[name] for name, part in COMPUTE.items() if name in found}
    for name, ps in _means(timeline, "exposed").items():
        part = EXPOSED + name.partition(": ")[0]
        ordered[part] = ordered.get(part, 0) + ps
    idle = [
        timeline.duration - ends + sum(account.total("wait").values())
        for ends, account in zip(timeline.ends, timeline.accounts, strict=True)
    ]
    if len(idle) > 1:
        ordered[BUBBLE] = round(timeline.mean(idle))
    elif any(ends.min() < timeline.duration for ends in timeline.ends):
        ordered["waiting for the last rank"] = round(timeline.mean(idle))
    return ordered


def exchanges(timeline: Timeline, prices: Prices) -> tuple[ExchangeTime, ...]:
    """Every kind of exchange of the step, the longest first."""
    found = []
    for name, price in timeline.exchanges.items():
        took = [a for a in timeline.accounts if ("count", name) in a.sums]

        def mean(kind: str, name: str = name, took: Sequence = took) -> float:
            return timeline.mean([account.sums.get((kind, name), 0) for account in took])

        found.append(
            ExchangeTime(
                label=name.partition(": ")[0],
                operation=price.collective.kind,
                group=price.group,
                ranks=price.members,
                groups=len(price.groups),
                nbytes=price.collective.nbytes,
                algorithm=price.algorithm,
                limited_by=price.limited_by,
                count=mean("count"),
                total=round(mean("total")),
                exposed=round(mean("exposed")),
                late=_latest(timeline, prices, name),
            )
        )
    return tuple(sorted(found, key=lambda item: -item.total))


def sends(timeline: Timeline, prices: Prices) -> tuple[ExchangeTime, ...]:
    """What stages send to each other: from each place to the same place of the other stage.

    total: until the receiver has the data. Waits of receivers are the bubble, not `exposed`.
    """
    found = []
    for name, price in timeline.sends.items():
        took = [a.sums for a in timeline.accounts if ("count", name) in a.sums]
        found.append(
            ExchangeTime(
                label=f"pipeline {name.partition(': ')[0]}",
                operation="send",
                group=STAGE_AXIS,
                ranks=2,
                groups=prices.places.count,
                nbytes=price.nbytes,
                algorithm="direct",
                limited_by="",
                count=timeline.mean([sums["count", name] for sums in took]),
                total=round(timeline.mean([sums["total", name] for sums in took])),
                exposed=0,
                late=None,
            )
        )
    return tuple(found)


def _latest(timeline: Timeline, prices: Prices, name: str) -> tuple[int, int] | None:
    """(rank, ps) of the latest arrival at an exchange."""
    found = [
        (account.late[name].by, stage, account.late[name].place_class)
        for stage, account in enumerate(timeline.accounts)
        if name in account.late
    ]
    if not found:
        return None
    by, stage, place_class = max(found)
    return int(prices.places.ranks[stage, timeline.classes.first[place_class]]), by


def _means(timeline: Timeline, kind: str) -> dict[str, int]:
    """Sums of a kind by name, averaged over all ranks."""
    names = dict.fromkeys(n for a in timeline.accounts for k, n in a.sums if k == kind)
    return {
        name: round(timeline.mean([a.sums.get((kind, name), 0) for a in timeline.accounts]))
        for name in names
    }


def engines(timeline: Timeline) -> dict[str, int]:
    """Compute of the average rank by the engine that limits it, in ps at the pace of the chip."""
    found: dict[str, int] = {}
    for account in timeline.accounts:
        for price, count in account.runs.items():
            found[price.limited_by] = found.get(price.limited_by, 0) + price.duration * count
    return {name: ps // len(timeline.accounts) for name, ps in found.items()}


def executed_flops(timeline: Timeline) -> int:
    """Matmul FLOPs of all ranks of the job."""
    places = int(timeline.classes.sizes.sum())
    runs = [item for account in timeline.accounts for item in account.runs.items()]
    return places * sum(price.flops * count for price, count in runs)


def published_peak(plan: Plan) -> int:
    """FLOP/s that are printed for the chips, for the cores that the job uses."""
    chip, machine = plan.machine.chip, plan.machine
    return chip.chip_peak_flops[plan.dtype] * machine.ranks * machine.lnc // chip.cores


def symmetry(timeline: Timeline, prices: Prices) -> str:
    """What was worked out once, in words."""
    places, classes = prices.places.count, timeline.classes.count
    stages = prices.places.stages
    of = f"each of {stages} pipeline stages" if stages > 1 else "the job"
    if classes == places:
        return f"no two of the {places} ranks of {of} were taken for alike"
    if classes == 1:
        return f"all {places} ranks of {of} do the same at the same time: one clock"
    return f"{places} ranks of {of} in {classes} classes that nothing tells apart: a clock for each"


def repeated(timeline: Timeline, program: TrainingProgram) -> str:
    """Which microbatches were not run, in words."""
    if not timeline.repeated:
        return ""
    return (
        f"; {timeline.repeated} of {program.microbatches} microbatches are as those before them,"
        " but later, and were only counted"
    )


def _leaned_on(plan: Plan, timeline: Timeline) -> tuple[str, ...]:
    """Assumed and calibrated numbers that play a part."""
    chip, where = plan.machine.chip, plan.machine.placement
    talks = timeline.exchanges or plan.pp > 1
    site = site_of(where.instance, nodes=min(where.nodes, 2), lnc=where.lnc)
    used = set(site.leaned_on) if talks else set()
    links = {k for k in chip.assumed() if chip.number(k).section.startswith("collective")}
    return tuple(k for k in chip.assumed() if k not in links or k in used)
