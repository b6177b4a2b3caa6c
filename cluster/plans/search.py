"""The best degrees for a model on a machine: every legal mesh, those that fit, priced.

For each mesh the least recomputation that fits into memory is taken. A mesh of which the model's
FLOPs alone, at the published peak and with its pipeline's bubble, take longer than the best step
found is not priced: that bound says why it loses. Nor is one whose values alone do not fit, before
the workspace of its kernels is known. Axes that are given keep their degrees.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from trnsim.device.errors import BadInput, TrnsimError
from trnsim.device.units import PS_PER_S, format_bytes, format_time

from ..instances import check_nodes, load_instance
from ..lnc import check_lnc
from ..mesh import parse_mesh
from ..models.config import ModelConfig, load_model
from .build import build
from .memory import memory
from .plan import Plan, divisors
from .result import PlanResult, price_plan

RECOMPUTE = ("none", "selective", "full")
DEEPEST, LONGEST = 16, 8
"""Largest degrees of pp and cp that are tried."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Candidate:
    """A legal plan, its price if it fits and could win, and why it is not the best.

    need: bytes of a rank, without the workspace of kernels if the plan is not priced. refused: a
    kernel cannot be made for it, so that `need` is not known.
    """

    plan: Plan
    need: int
    bound: int
    result: PlanResult | None = None
    why: str = ""
    refused: bool = False


def search(
    model: str | ModelConfig,
    *,
    fixed: Mapping[str, int],
    progress: Progress = lambda done, of: None,
    **asked: Any,
) -> list[Candidate]:
    """Candidates, the best first: priced ones by step time, then others by their bound.

    `fixed` are degrees that stay; `asked` is what `Plan.of` takes besides the mesh, recomputation
    included where it is not to be chosen. Raises BadInput if no mesh is legal, and what refuses all
    that are.
    """
    wanted = list(_legal(model, dict(fixed), asked))
    candidates: list[Candidate] = []
    best: PlanResult | None = None
    refused: TrnsimError | None = None
    for done, plans in enumerate(sorted(wanted, key=lambda plans: _bound(plans[0]))):
        progress(done, len(wanted))
        try:
            candidate = _judged(plans, best)
        except TrnsimError as error:
            refused = refused or error
            candidate = Candidate(plans[0], 0, _bound(plans[0]), why=str(error), refused=True)
        if candidate.result and (best is None or candidate.result.step < best.step):
            best = candidate.result
        candidates.append(candidate)
    progress(len(wanted), len(wanted))
    ranked = sorted(candidates, key=_rank)
    if refused and ranked[0].refused:
        raise refused
    return [_explained(candidate, ranked[0]) for candidate in ranked]


def _legal(model: str | ModelConfig, fixed: dict[str, int], asked: dict) -> Iterator[list[Plan]]:
    """For each legal mesh its plans, one for each recomputation that may be chosen."""
    config = model if isinstance(model, ModelConfig) else load_model(model)
    recomputes = [asked.pop("recompute")] if "recompute" in asked else list(RECOMPUTE)
    refused: TrnsimError | None = None
    found = False
    for degrees in _degrees(config, fixed, asked):
        text = ",".join(f"{axis}={degree}" for axis, degree in degrees.items())
        try:
            plans = [Plan.of(config, mesh=text, recompute=r, **asked) for r in recomputes]
        except BadInput as error:
            refused = refused or error
            continue
        found = True
        yield plans
    if not found:
        raise refused or BadInput("mesh", fixed, "degrees that the model and the machine can take")


def _degrees(config: ModelConfig, fixed: dict[str, int], asked: dict) -> Iterator[dict[str, int]]:
    """Degrees to try; dp is what is left."""
    kind = load_instance(asked["instance"])
    check_nodes(kind, asked.get("nodes", 1))
    cores = asked.get("nodes", 1) * kind.logical_cores(check_lnc(kind.chip, asked.get("lnc")))
    heads = [tp for tp in divisors(config.heads) if tp <= cores]
    listed = [tp for tp in kind.tensor_parallel or heads if tp in heads]
    powers = [2**i for i in range(4)]
    tried = {
        "pp": [pp for pp in divisors(config.layers) if pp <= min(DEEPEST, cores)],
        "ep": [ep for ep in divisors(config.experts) if ep <= cores] if config.experts else [1],
        "cp": [cp for cp in powers if cp <= LONGEST and asked["seq"] // cp >= 4096] or [1],
        "tp": listed or [1],
    }
    options = [[fixed[axis]] if axis in fixed else tried[axis] for axis in tried]
    for degrees in product(*options):
        mesh = dict(zip(tried, degrees, strict=True)) | fixed
        yield {axis: degree for axis, degree in mesh.items() if degree > 1 or axis in ("dp", "tp")}


def _bound(plan: Plan) -> int:
    """No step is shorter: the model's FLOPs at the published peak, and the pipeline's bubble."""
    machine = plan.machine
    peak = machine.placement.logical_core.peak(plan.dtype) * machine.ranks
    flops = plan.tokens * plan.model.flops_per_token(plan.seq, masked=True)
    busy = 1 - plan.schedule.bubble(plan.pp, plan.microbatches)
    return int(flops * PS_PER_S / peak / busy)


def _judged(plans: list[Plan], best: PlanResult | None) -> Candidate:
    """The mesh with the least recomputation that fits, priced if it could be the best."""
    needs = []
    for plan in plans:
        bound = _bound(plan)
        needs.append(_need(plan, workspace=False))
        if needs[-1] > plan.machine.hbm_bytes:
            continue
        if best is not None and bound >= best.step:
            return Candidate(plan, needs[-1], bound)
        needs[-1] = _need(plan, workspace=True)
        if needs[-1] <= plan.machine.hbm_bytes:
            return Candidate(plan, needs[-1], bound, price_plan(plan))
    return Candidate(plans[-1], min(needs), _bound(plans[-1]))


def _need(plan: Plan, *, workspace: bool) -> int:
    """Bytes of the rank that needs most."""
    stages = build(plan).stages
    return max(memory(stage, plan.machine, workspace=workspace).total for stage in stages)


def _rank(candidate: Candidate) -> tuple[bool, bool, bool, int]:
    fits = candidate.need <= candidate.plan.machine.hbm_bytes
    return (
        candidate.refused,
        not fits,
        candidate.result is None,
        (candidate.result.step if candidate.result else candidate.bound),
    )


def _explained(candidate: Candidate, best: Candidate) -> Candidate:
    """The candidate with why it loses against the best."""
    if candidate.refused:
        return candidate
    if candidate is best:
        why = ""
    elif candidate.need > candidate.plan.machine.hbm_bytes:
        have = format_bytes(candidate.plan.machine.hbm_bytes)
        why = f"does not fit: {format_bytes(candidate.need)} of {have}"
    elif candidate.result is None or best.result is None:
        why = (
            f"at least {format_time(candidate.bound)}: the model at the published peak, and bubble"
        )
    else:
        why = _difference(candidate.result, best.result)
    return replace(candidate, why=why)


def _difference(result: PlanResult, best: PlanResult) -> str:
    """The parts of the step that cost more than the best plan's, most first."""
    names = {*result.parts, *best.parts}
    more = {n: result.parts.get(n, 0) - best.parts.get(n, 0) for n in names}
    worst = sorted((n for n in more if more[n] > 0), key=lambda n: (-more[n], n))[:2]
    return ", ".join(f"{n} +{format_time(more[n])}" for n in worst)


def fixed_degrees(mesh: str | None) -> dict[str, int]:
    """Degrees that a user gave, by axis."""
    return dict(parse_mesh(mesh).axes) if mesh else {}
