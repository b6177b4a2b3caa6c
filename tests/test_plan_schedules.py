"""Pipeline schedules: laws of each order, and the published bubbles exactly on an ideal fabric."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trnsim.cluster.plans.schedules import Schedule, Slot, in_flight, parse_schedule
from trnsim.device.errors import BadInput

KINDS = [
    Schedule(),
    Schedule("zero-bubble"),
    Schedule("interleaved", 2),
    Schedule("interleaved", 3),
]
cases = st.tuples(st.sampled_from(KINDS), st.integers(2, 6), st.integers(1, 4))


def step_time(schedule: Schedule, stages: int, microbatches: int, times: dict[str, int]) -> int:
    """When the last stage ends, with sends that take no time. Fails on a cycle of waits."""
    queues = [list(schedule.slots(stages, s, microbatches)) for s in range(stages)]
    clocks, ends = [0] * stages, {}
    while any(queues):
        ready = [
            s
            for s in range(stages)
            if queues[s] and waits(schedule, stages, s, queues[s][0], ends) is not None
        ]
        assert ready, f"cycle of waits: {[q[:1] for q in queues]}"
        for s in ready:
            slot = queues[s].pop(0)
            start = max(clocks[s], waits(schedule, stages, s, slot, ends) or 0)
            clocks[s] = ends[s, slot] = start + times[slot.kind]
    return max(clocks)


def waits(schedule: Schedule, stages: int, s: int, slot: Slot, ends: dict) -> int | None:
    """When what a pass reads is there; None if that is not known yet."""
    kind, m, chunk = slot
    needs = []
    if kind == "forward" and (place := schedule.before(stages, s, chunk)):
        needs.append((place[0], Slot("forward", m, place[1])))
    if kind == "backward":
        needs.append((s, Slot("forward", m, chunk)))
        if place := schedule.after(stages, s, chunk):
            needs.append((place[0], Slot("backward", m, place[1])))
    if kind == "weights":
        needs.append((s, Slot("backward", m, chunk)))
    if any(need not in ends for need in needs):
        return None
    return max((ends[need] for need in needs), default=0)


@given(cases)
def test_every_pass_is_run_once_and_all_stages_come_to_an_end(case) -> None:
    schedule, stages, groups = case
    microbatches = groups * stages
    kinds = ["forward", "backward"] + ["weights"] * schedule.splits_backward
    everything = {
        Slot(kind, m, chunk)
        for kind in kinds
        for m in range(microbatches)
        for chunk in range(schedule.chunks)
    }
    for stage in range(stages):
        slots = schedule.slots(stages, stage, microbatches)
        assert set(slots) == everything and len(slots) == len(everything)
    step_time(schedule, stages, microbatches, {"forward": 1, "backward": 2, "weights": 1})


@given(st.integers(1, 8), st.integers(1, 12), st.integers(1, 5), st.integers(1, 9))
def test_bubble_of_1f1b_is_exact(stages: int, microbatches: int, forward: int, backward: int):
    ends = step_time(Schedule(), stages, microbatches, {"forward": forward, "backward": backward})
    work = microbatches * (forward + backward)
    assert Fraction(ends - work, ends) == Schedule().bubble(stages, microbatches)


def test_u7_bubble_of_4_stages_and_8_microbatches() -> None:
    assert Schedule().bubble(4, 8) == Fraction(3, 11)
    assert step_time(Schedule(), 4, 8, {"forward": 100, "backward": 200}) == 3300


@given(st.integers(2, 6), st.integers(1, 3), st.integers(2, 4), st.integers(1, 4))
def test_bubble_of_interleaved_is_exact(stages: int, groups: int, chunks: int, forward: int):
    schedule, microbatches = Schedule("interleaved", chunks), groups * stages
    times = {"forward": forward, "backward": 2 * forward}
    ends = step_time(schedule, stages, microbatches, times)
    work = microbatches * chunks * 3 * forward
    assert Fraction(ends - work, ends) == schedule.bubble(stages, microbatches)


@given(st.integers(1, 8), st.integers(0, 8))
def test_bubble_of_zero_bubble_is_a_third_of_1f1b(stages: int, more: int) -> None:
    schedule, microbatches = Schedule("zero-bubble"), stages + more
    ends = step_time(
        schedule, stages, microbatches, dict.fromkeys(("forward", "backward", "weights"), 1)
    )
    assert ends - 3 * microbatches == stages - 1
    assert Fraction(stages - 1, ends) == schedule.bubble(stages, microbatches)


@given(st.integers(1, 8), st.integers(1, 16))
def test_activations_in_flight(stages: int, microbatches: int) -> None:
    """1F1B: p - s; zero-bubble: p on every stage (arXiv:2401.10241, table 1)."""
    for stage in range(stages):
        plain = Schedule().slots(stages, stage, microbatches)
        assert in_flight(plain) == min(microbatches, stages - stage)
        zero = Schedule("zero-bubble").slots(stages, stage, microbatches)
        assert in_flight(zero) == min(microbatches, stages)


@given(st.integers(2, 6), st.integers(1, 3), st.integers(2, 4))
def test_activations_in_flight_of_interleaved(stages: int, groups: int, chunks: int) -> None:
    """Chunks ahead of the first backward and one more, as in Megatron-LM."""
    schedule, total = Schedule("interleaved", chunks), groups * stages * chunks
    for stage in range(stages):
        ahead = 2 * (stages - 1 - stage) + (chunks - 1) * stages
        slots = schedule.slots(stages, stage, groups * stages)
        assert in_flight(slots) == min(total, ahead + 1)


def test_the_whole_order_of_small_pipelines() -> None:
    def text(schedule: Schedule, stage: int, microbatches: int) -> str:
        slots = schedule.slots(2, stage, microbatches)
        return " ".join(f"{k[0].upper()}{m}{'abc'[c] * (schedule.chunks > 1)}" for k, m, c in slots)

    assert text(Schedule(), 0, 3) == "F0 F1 B0 F2 B1 B2"
    assert text(Schedule(), 1, 3) == "F0 B0 F1 B1 F2 B2"
    assert text(Schedule("zero-bubble"), 0, 3) == "F0 F1 B0 W0 F2 B1 W1 B2 W2"
    assert text(Schedule("zero-bubble"), 1, 3) == "F0 B0 F1 B1 W0 F2 B2 W1 W2"
    two = Schedule("interleaved", 2)
    assert text(two, 0, 2) == "F0a F1a F0b F1b B0b B1b B0a B1a"
    assert text(two, 1, 2) == "F0a F1a F0b B0b F1b B1b B0a B1a"


@pytest.mark.parametrize("text", ["1f1b", "zero-bubble", "interleaved:4"])
def test_text_round_trips(text: str) -> None:
    schedule = parse_schedule(text)
    assert str(schedule) == text and parse_schedule(schedule) is schedule
    assert eval(repr(schedule)) == schedule


@pytest.mark.parametrize("text", ["", "gpipe", "interleaved", "interleaved:1", "1f1b:2"])
def test_other_schedules_are_refused(text: str) -> None:
    with pytest.raises(BadInput, match="^schedule: .* is not valid; allowed: 1f1b, interleaved:V"):
        parse_schedule(text)


def test_interleaving_needs_whole_groups_of_microbatches() -> None:
    with pytest.raises(BadInput) as caught:
        Schedule("interleaved", 2).slots(4, 0, 6)
    assert str(caught.value) == (
        "microbatches: 6 is not valid; allowed: a multiple of pp = 4 with interleaved:2;"
        " nearest valid: 4 or 8"
    )
