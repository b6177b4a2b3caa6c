"""Parts of a model in a stage's program: passes with parameters gathered and gradients exchanged.

Under FSDP a layer's parameters are gathered some layers ahead of their use, and its gradients
reduced and scattered some layers behind, so that both overlap with the compute of other layers
(the vendor's NEURON_FSDP_NUM_LAYER_EARLY_AG_SHIFT and _LATE_RS_SHIFT).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from . import states
from .bodies import Passes, live_in
from .program import Free, Layers, Ref, Step, Value
from .states import Bucket

Pass = Literal["forward", "backward", "weights"]


@dataclass(frozen=True)
class Part:
    """A unit in a stage: its passes, its buckets, and those of another part that it also reads."""

    name: str
    passes: Passes
    buckets: tuple[Bucket, ...]
    borrowed: tuple[Bucket, ...] = ()
    layers: range | None = None  # of the model, of this kind

    @cached_property
    def values(self) -> list[Value]:
        """Everything that the part declares."""
        found = [*self.passes.values, *(v for b in self.buckets for v in states.values(b))]
        return [replace(v, only=self.layers) if v.layered else v for v in found]

    @cached_property
    def sharded(self) -> tuple[Bucket, ...]:
        """Buckets of which a rank keeps a share only."""
        return tuple(bucket for bucket in self.buckets if bucket.kind == "fsdp")

    def gathered(self, which: Pass) -> list[Bucket]:
        """Sharded buckets with a parameter that the pass reads."""
        read = live_in(getattr(self.passes, which))
        both = (*self.buckets, *self.borrowed)
        return [b for b in both if b.kind == "fsdp" and not read.isdisjoint(b.names)]

    def gather(self, which: Pass, shift: int = 0) -> list[Step]:
        """The parameters that a pass reads, of the layer `shift` further."""
        return [states.gather(bucket, shift) for bucket in self.gathered(which)]

    def drop(self, which: Pass) -> list[Step]:
        """The end of gathered parameters."""
        names = [name for bucket in self.gathered(which) for name in bucket.names]
        return [Free(tuple(map(Ref, names)))] if names else []

    def around(self, which: Pass) -> list[Step]:
        """A pass with its parameters gathered just before it."""
        return [*self.gather(which), *getattr(self.passes, which), *self.drop(which)]

    def scatter(self, shift: int = 0) -> list[Step]:
        """Reduce and scatter the gradients of sharded parameters."""
        return [step for bucket in self.sharded for step in states.reduce(bucket, shift)]

    def collect(self, shift: int = 0) -> list[Step]:
        """Add the rank's shares of them up."""
        found: list[Step] = []
        for bucket in self.sharded:
            found.append(states.accumulate(bucket, shift))
            ended = (*bucket.gradients, f"{bucket.name}.part")
            found.append(Free(tuple(Ref(name, shift) for name in ended)))
        return found

    def reduce(self, without: Sequence[Bucket] = ()) -> list[Step]:
        """Exchange the gradients that have added up over microbatches."""
        mine = [b for b in self.buckets if b.kind != "fsdp" and b not in without]
        return [step for bucket in mine for step in states.reduce(bucket)]

    def clear(self) -> list[Step]:
        """Gradients to zero."""
        return [states.clear(bucket) for bucket in self.buckets]

    def update(self) -> list[Step]:
        """The optimizer."""
        return [step for bucket in self.buckets for step in states.update(bucket)]


def staggered(
    order: range, part: Part, which: Pass, last: bool | None, *, ahead: int, behind: int
) -> list[Step]:
    """A pass over the layers in `order`, as one loop or several: the first of them comes before.

    last: gradients are exchanged, as in the last microbatch or another; None: they are not.
    Parameters are gathered `ahead` layers before their use, gradients of sharded parameters
    reduced while the layer `behind` further computes.
    """
    count, step = len(order), order.step
    ahead = min(ahead, count) if part.gathered(which) else 0
    late = last is not None and bool(part.sharded)
    behind = min(behind, count) if late else 0
    cuts = sorted({0, min(behind, count - ahead), max(behind, count - ahead), count})
    found: list[Step] = [Layers(order[:ahead], tuple(part.gather(which)))]
    for start, stop in zip(cuts, cuts[1:], strict=False):
        gathers = start < count - ahead
        body = part.gather(which, step * ahead) if gathers else []
        scatters = late and start >= behind
        if scatters and behind:
            body += part.scatter(-step * behind)
        body += [*getattr(part.passes, which), *part.drop(which)]
        if scatters:
            body += [] if behind else part.scatter()
            body += part.collect(-step * behind)
        if last:
            body += part.reduce()
        found.append(Layers(order[start:stop], tuple(body)))
    found.append(Layers(order[count - behind :], (*part.scatter(), *part.collect())))
    return [found[0], *(loop for loop in found[1:] if _runs(loop))]


def _runs(step: Step) -> bool:
    return isinstance(step, Layers) and bool(step.layers) and bool(step.body)
