"""Pipeline schedules: in which order each stage runs its passes over microbatches.

- `1f1b`: one forward, one backward (PipeDream-Flush, arXiv:2006.09503; Megatron-LM,
  arXiv:2104.04473, figure 4).
- `interleaved:V`: V chunks of layers per stage (arXiv:2104.04473, section 2.2). Chunk v of stage s
  is the (v·stages + s)-th part of the model.
- `zero-bubble`: ZB-H1 (arXiv:2401.10241, section 3): gradients of the input and of the weights are
  passes of their own, and those of the weights fill what would be bubbles, within the activation
  memory of the first stage of 1F1B.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, NamedTuple

from trnsim.device.errors import BadInput

Kind = Literal["1f1b", "interleaved", "zero-bubble"]
_FORMS = "1f1b, interleaved:V with V of at least 2 chunks per stage, zero-bubble"


class Slot(NamedTuple):
    """One pass of a stage. With `zero-bubble`, `backward` is of the input alone."""

    kind: Literal["forward", "backward", "weights"]
    microbatch: int
    chunk: int = 0


@dataclass(frozen=True)
class Schedule:
    """A kind of schedule; `chunks` per stage."""

    kind: Kind = "1f1b"
    chunks: int = 1

    def __str__(self) -> str:
        return f"{self.kind}:{self.chunks}" if self.kind == "interleaved" else self.kind

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of weights are passes of their own."""
        return self.kind == "zero-bubble"

    def slots(self, stages: int, stage: int, microbatches: int) -> tuple[Slot, ...]:
        """The passes of a stage in order: each microbatch and chunk once forward, once backward.

        Raises BadInput for a number of microbatches that the schedule cannot take.
        """
        self.check(stages, microbatches)
        if self.kind == "interleaved":
            return tuple(_interleaved(stages, stage, microbatches, self.chunks))
        if self.kind == "zero-bubble":
            return tuple(_zero_bubble(stages, stage, microbatches))
        return tuple(_one_forward_one_backward(stages, stage, microbatches))

    def check(self, stages: int, microbatches: int) -> None:
        """Raises BadInput where `slots` would."""
        if self.kind != "interleaved":
            return
        if stages < 2:
            raise BadInput("schedule", self, "interleaved only with pp of at least 2", "1f1b")
        if microbatches % stages:
            near = _multiples_near(microbatches, stages)
            raise BadInput(
                "microbatches", microbatches, f"a multiple of pp = {stages} with {self}", near
            )

    def before(self, stages: int, stage: int, chunk: int) -> tuple[int, int] | None:
        """(stage, chunk) whose output this chunk reads; None for the first part of the model."""
        if stage:
            return stage - 1, chunk
        return (stages - 1, chunk - 1) if chunk else None

    def after(self, stages: int, stage: int, chunk: int) -> tuple[int, int] | None:
        """(stage, chunk) that reads this chunk's output; None for the last part of the model."""
        if stage < stages - 1:
            return stage + 1, chunk
        return (0, chunk + 1) if chunk < self.chunks - 1 else None

    def bubble(self, stages: int, microbatches: int) -> Fraction:
        """Idle share of a step on an ideal fabric with equal stages.

        For `zero-bubble`, forward, input gradient and weight gradient take equal times and
        there are at least as many microbatches as stages; a backward of 1F1B may take any time.
        """
        work = microbatches * (3 if self.kind == "zero-bubble" else self.chunks)
        return Fraction(stages - 1, work + stages - 1)


def parse_schedule(text: "str | Schedule") -> Schedule:
    """`"interleaved:4"` to a Schedule. Raises BadInput for anything else."""
    if isinstance(text, Schedule):
        return text
    kind, _, chunks = str(text).lower().partition(":")
    if kind == "interleaved" and chunks.isdigit() and int(chunks) > 1:
        return Schedule("interleaved", int(chunks))
    if kind == "1f1b" and not chunks:
        return Schedule("1f1b")
    if kind == "zero-bubble" and not chunks:
        return Schedule("zero-bubble")
    near = "interleaved:2" if kind == "interleaved" else None
    raise BadInput("schedule", text, _FORMS, near)


def in_flight(slots: tuple[Slot, ...]) -> int:
    """The most passes forward, of all chunks, whose activations a stage holds at once.

    They end with the last pass that reads them: `weights` if there is one, else `backward`.
    """
    last = "weights" if any(slot.kind == "weights" for slot in slots) else "backward"
    held = most = 0
    for slot in slots:
        held += (slot.kind == "forward") - (slot.kind == last)
        most = max(most, held)
    return most


def _one_forward_one_backward(stages: int, stage: int, microbatches: int) -> Iterator[Slot]:
    ahead = min(microbatches, stages - 1 - stage)
    yield from (Slot("forward", m) for m in range(ahead))
    for m in range(microbatches):
        if m + ahead < microbatches:
            yield Slot("forward", m + ahead)
        yield Slot("backward", m)


def _zero_bubble(stages: int, stage: int, microbatches: int) -> Iterator[Slot]:
    """Stage s leaves s weight gradients behind its input gradients: s + (p - s) in flight."""
    for slot in _one_forward_one_backward(stages, stage, microbatches):
        yield slot
        if slot.kind == "backward" and slot.microbatch >= stage:
            yield Slot("weights", slot.microbatch - stage)
    for m in range(max(0, microbatches - stage), microbatches):
        yield Slot("weights", m)


def _interleaved(stages: int, stage: int, microbatches: int, chunks: int) -> Iterator[Slot]:
    """Groups of `stages` microbatches go through all chunks before the next group starts."""
    total = microbatches * chunks
    ahead = min(total, 2 * (stages - 1 - stage) + (chunks - 1) * stages)
    order = [_place(index, stages, chunks) for index in range(total)]
    forward = [Slot("forward", m, chunk) for m, chunk in order]
    backward = [Slot("backward", m, chunks - 1 - chunk) for m, chunk in order]
    yield from forward[:ahead]
    for index in range(total):
        yield from forward[index + ahead : index + ahead + 1]
        yield backward[index]


def _place(index: int, stages: int, chunks: int) -> tuple[int, int]:
    """(microbatch, chunk) of the index-th pass in one direction."""
    group, inside = divmod(index, stages * chunks)
    chunk, member = divmod(inside, stages)
    return group * stages + member, chunk


def _multiples_near(value: int, unit: int) -> str:
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else f"{unit}"
