"""Laps of a pipeline that are counted instead of run, and effects that are shared, are exact."""

from itertools import product

import pytest

from trnsim.cluster.plans.clocks import Conditions, Timeline, advance
from trnsim.cluster.plans.drive import repeats
from trnsim.cluster.plans.plan import Plan
from trnsim.cluster.plans.program import Task
from trnsim.cluster.plans.result import simulate
from trnsim.cluster.plans.stage_clock import StageClock

from .stages import Stated, pipeline, timed
from .test_plans_time_models import GPT

STAGES, MICROBATCHES = 4, 192
RUNS = {name: timed(name) for name in ("forward", "backward", "weights")}
TIMES = Stated({"forward": 1_000, "backward": 1_700, "weights": 901}, send=(30, 250))
SCHEDULES = ("1f1b", "interleaved:2", "zero-bubble")


def sums(timeline: Timeline) -> list[dict]:
    """What all accounts say, as plain data."""
    return [
        {key: amount.tolist() for key, amount in account.sums.items()}
        | {"runs": sorted((price.duration, n) for price, n in account.runs.items())}
        for account in timeline.accounts
    ]


@pytest.fixture
def tasks_run(monkeypatch) -> list[int]:
    """Grows by one for every stretch of steps that a clock goes through."""
    done, stretch = [], StageClock._stretch

    def counted(self, steps, context):
        done.append(context.microbatch)
        stretch(self, steps, context)

    monkeypatch.setattr(StageClock, "_stretch", counted)
    return done


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("slow", [(), ((2, 1.3),), ((5, 1.01), (0, 1.2))])
def test_counted_laps_are_exact(schedule, slow, tasks_run):
    program = pipeline(schedule, STAGES, MICROBATCHES, RUNS)
    prices = TIMES.prices(program, f"pp={STAGES},tp=2")
    conditions = Conditions(slow=slow)
    fast = advance(program, prices, conditions)
    few = len(tasks_run)
    whole = advance(program, prices, conditions, traced=True)
    assert fast.ends.tolist() == whole.ends.tolist()
    assert sums(fast) == sums(whole)
    assert few < (len(tasks_run) - few) / 2
    assert fast.repeated > MICROBATCHES / 2 and whole.repeated == 0


@pytest.mark.parametrize(
    ("schedule", "stages"), [("1f1b", 1), ("1f1b", 2), *product(SCHEDULES, [4])]
)
@pytest.mark.parametrize("length", [1, 3])
def test_no_number_of_microbatches_loses_time(schedule, stages, length, monkeypatch):
    state = StageClock.state  # as if only every `length`-th microbatch could be like another

    def told_apart(self, time, microbatch):
        return *state(self, time, microbatch), microbatch % length

    monkeypatch.setattr(StageClock, "state", told_apart)
    for microbatches in range(stages, 10 * stages, stages):
        program = pipeline(schedule, stages, microbatches, RUNS)
        prices = TIMES.prices(program, f"pp={stages}")
        fast, whole = advance(program, prices), advance(program, prices, traced=True)
        assert fast.ends.tolist() == whole.ends.tolist()
        assert sums(fast) == sums(whole), microbatches


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_laps_do_not_grow_with_the_batch(schedule, tasks_run):
    run = []
    for microbatches in (10 * STAGES, 1000 * STAGES):
        program = pipeline(schedule, STAGES, microbatches, RUNS)
        advance(program, TIMES.prices(program, f"pp={STAGES}"))
        run.append(len(tasks_run))
        tasks_run.clear()
    assert run[1] <= run[0]


def test_repeats_ends_before_another_body_or_microbatch():
    body, other = (), (1,)
    tasks = [Task("forward", body, m) for m in range(6)] + [Task("forward", other, 6)]  # type: ignore[arg-type]
    assert repeats(tasks, 2, 2, 2) == 1  # the sixth may be under way, so that two would be one more
    assert repeats(tasks, 2, 1, 1) == 3
    assert repeats(tasks, 2, 1, 2) == 0
    assert repeats(tasks, 2, 0, 1) == 0


@pytest.mark.parametrize("zero", ["none", "1", "fsdp"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_classes_that_drift_apart_share_nothing(schedule, zero):
    plan = Plan.of(
        GPT, instance="trn2.48xlarge", nodes=4, mesh="pp=2,tp=2,cp=2", seq=128, global_batch=1024,
        zero=zero, schedule=schedule,
    )  # fmt: skip
    conditions = Conditions(slow=((3, 1.05), (70, 1.3)))
    fast, timeline = simulate(plan, conditions=conditions)
    whole, _ = simulate(plan, conditions=conditions, traced=True)
    assert timeline.classes.count > 1
    assert plan.microbatches >= 16
    assert (fast.step, fast.parts, fast.exchanges) == (whole.step, whole.parts, whole.exchanges)
