"""The time plane of training programs: closed forms, exactness of folding, waits."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trnsim.cluster.plans.clocks import Conditions, advance
from trnsim.cluster.plans.program import (
    Layers,
    Receive,
    Ref,
    Run,
    Send,
    StageProgram,
    Task,
    TrainingProgram,
    Value,
)
from trnsim.device.errors import CollectiveMismatch

from .stages import F32, Stated, collective, pipeline, timed

F, B, W = timed("forward"), timed("backward"), timed("weights")
PASSES = {"forward": F, "backward": B, "weights": W}


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (2, 2), (4, 8), (5, 7), (8, 32)])
def test_bubble_of_1f1b(stages, microbatches):
    program = pipeline("1f1b", stages, microbatches, PASSES)
    prices = Stated({"forward": 100, "backward": 200}).prices(program, f"pp={stages}")
    step = advance(program, prices).duration
    assert step == (microbatches + stages - 1) * 300
    idle = Fraction(step - microbatches * 300, step)
    assert idle == Fraction(stages - 1, microbatches + stages - 1)  # U7: 3/11 for 4 and 8


@pytest.mark.parametrize(("stages", "microbatches", "chunks"), [(2, 4, 2), (4, 8, 2), (4, 8, 3)])
def test_bubble_of_interleaved(stages, microbatches, chunks):
    program = pipeline(f"interleaved:{chunks}", stages, microbatches, PASSES)
    prices = Stated({"forward": 100, "backward": 200}).prices(program, f"pp={stages}")
    step = advance(program, prices).duration
    assert step == (microbatches * chunks + stages - 1) * 300


def test_zero_bubble_is_shorter_by_the_weights():
    program = pipeline("zero-bubble", 4, 8, PASSES)
    prices = Stated({"forward": 100, "backward": 100, "weights": 100}).prices(program, "pp=4")
    assert advance(program, prices).duration == 8 * 300 + 3 * (100 + 100 - 100)


def test_receiver_waits_for_latency_and_sender_for_its_port():
    program = pipeline("1f1b", 2, 1, PASSES)
    prices = Stated({"forward": 100, "backward": 200}, send=(30, 70)).prices(program, "pp=2")
    time = advance(program, prices)
    assert time.ends[:, 0].tolist() == [100 + 70 + 100 + 200 + 70 + 200, 470]
    assert time.accounts[0].sums["wait", "backward"].tolist() == [740 - 300]


def test_cycle_of_waits_is_named():
    x = Value("x", F32, "activation", micro=True)

    def stage(number, other):
        body = (Receive(Ref("x"), other, "x"), Send(Ref("x"), other, "x"))
        return StageProgram.of(number, (range(1),), (Task("forward", body, 0),), {"x": x})

    program = TrainingProgram("ring", (stage(0, 1), stage(1, 0)), 1, 0, 0)
    with pytest.raises(CollectiveMismatch) as error:
        advance(program, Stated({}).prices(program, "pp=2"))
    assert str(error.value) == (
        "stages wait in a cycle: stage 0 in forward waits for x of microbatch 0 from stage 1;"
        " stage 1 in forward waits for x of microbatch 0 from stage 0"
    )


def overlapped(layers=40, microbatches=3):
    """A loop with a collective on the critical path and one beside compute."""
    gather = collective("all_gather", ("tp",), "h", "g", "tensor", dimension=0)
    reduce = collective("all_reduce", ("dp",), "w", "w2", "data", 1, reduction="add")
    forward = (Run(F, (Ref("g"),), (Ref("h"),)), gather, Run(F, (Ref("g"),), (Ref("h"),)))
    body = (Run(B, (Ref("g"),), (Ref("w"),)), reduce, gather, Run(B, (Ref("g"),), (Ref("h"),)))
    big = type(F32)((2**20,), "f32")
    values = {
        "h": Value("h", F32, "activation", micro=True),
        "g": Value("g", type(F32)((4096,), "f32"), "activation", micro=True),
        "w": Value("w", big, "gradient", layered=True),
        "w2": Value("w2", big, "gradient", layered=True),
    }
    step = Run(W, (Ref("w2"),), ())
    passes = []
    ahead, back = (Layers(range(layers), forward),), (Layers(range(layers)[::-1], body),)
    for m in range(microbatches):
        passes += [Task("forward", ahead, m), Task("backward", back, m)]
    passes.append(Task("optimizer", (Layers(range(layers), (step,)),)))
    stage = StageProgram.of(0, (range(layers),), passes, values)
    return TrainingProgram("overlapped", (stage,), microbatches, 0, 0)


TIMES = Stated({"forward": 10_000_000, "backward": 30_000_000, "weights": 1_000})


@pytest.mark.parametrize(
    "conditions",
    [
        Conditions(),
        Conditions(slow=((5, 1.5),)),
        Conditions(slow=((3, 1.1), (30, 1.2))),
    ],
)
def test_folded_and_fast_forwarded_is_exact(conditions):
    program = overlapped()
    prices = TIMES.prices(program, "dp=16,tp=4")
    fast = advance(program, prices, conditions)
    slow = advance(program, prices, conditions, traced=True)
    whole = advance(program, prices, Conditions(slow=conditions.slow, jitter=1e-18))
    ends = whole.ends[:, fast.classes.first]
    assert fast.ends.tolist() == slow.ends.tolist() == ends.tolist()
    for key, amount in fast.accounts[0].sums.items():
        assert (amount == slow.accounts[0].sums[key]).all(), key
        every = np.broadcast_to(whole.accounts[0].sums[key], 64)
        assert (amount == every[fast.classes.first]).all(), key
    assert fast.classes.count < 16


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 31), st.floats(1, 2)), max_size=3), st.integers(1, 9))
def test_classes_are_exact_for_any_slow_ranks(slow, layers):
    program = overlapped(layers, 2)
    prices = TIMES.prices(program, "dp=8,tp=4")
    fast = advance(program, prices, Conditions(slow=tuple(slow)))
    whole = advance(program, prices, Conditions(slow=tuple(slow), jitter=1e-18))
    assert fast.ends[:, fast.classes.of].tolist() == whole.ends.tolist()


def test_group_ends_when_its_last_rank_has_come():
    """U17: max(arrival) + T for every rank of the group of the late one; others do not wait."""
    gather = collective("all_gather", ("tp",), "h", "g", "tensor", dimension=0)
    steps = (Run(F, (), (Ref("h"),)), gather, Run(W, (Ref("g"),), ()))
    values = overlapped(1, 1).stages[0].values
    stage = StageProgram.of(0, (range(1),), (Task("forward", steps, 0),), values)
    program = TrainingProgram("gather", (stage,), 1, 0, 0)
    prices = TIMES.prices(program, "dp=2,tp=4")
    alone = advance(program, prices).duration
    time = advance(program, prices, Conditions(slow=((6, 3.0),)))
    ends = time.ends[0, time.classes.of].tolist()
    assert ends[:4] == [alone] * 4
    assert ends[4:6] + ends[7:] == [alone + 20_000_000] * 3
    assert ends[6] == alone + 20_000_000 + 2 * 1_000


def test_late_rank_is_named():
    program = overlapped(2, 1)
    prices = TIMES.prices(program, "dp=2,tp=4")
    time = advance(program, prices, Conditions(slow=((6, 2.0),)))
    (late,) = (v for name, v in time.accounts[0].late.items() if name.startswith("tensor"))
    assert time.classes.first[late.place_class] == 6
    assert late.by == 2 * 30_000_000


def test_jitter_repeats_with_its_seed():
    program = overlapped(3, 2)
    prices = TIMES.prices(program, "dp=4,tp=4")
    ends = [
        advance(program, prices, Conditions(jitter=0.1, seed=seed)).ends.tolist()
        for seed in (1, 1, 2)
    ]
    assert ends[0] == ends[1] != ends[2]
