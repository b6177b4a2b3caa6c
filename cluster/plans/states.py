"""Gradients, optimizer states and sharded parameters of a unit: what is kept, exchanged, updated.

Parameters with equal gradient axes are cut into buckets; a bucket is exchanged as one flat array,
filled up to equal shares of the ranks.

- `none`: gradients are all-reduced; every rank updates everything.
- ZeRO-1 (arXiv:1910.02054): gradients are reduced and scattered, a rank updates its part of the
  bucket, and the new parameters are gathered.
- FSDP (ZeRO-3): a rank also keeps only its part of the parameters, which are gathered before use;
  gradients are reduced and scattered after every microbatch, in the parameters' dtype.

Gradients add up in f32. Parameters that are not f32 have an f32 master copy.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any, Literal

import jax.numpy as jnp

from trnsim.device.ops.ir import Operation, TensorType

from .layers import TABLE, Parameter, Unit, sharded
from .plan import Plan
from .program import Exchange, Free, Ref, Role, Run, Share, Step, Value
from .segment import segment

GRADIENTS = "gradients"
PARAMETERS = "parameters"
REPLICAS = "gradients of replicas"
EVEN = 512  # elements: as many of each of the 128 partitions of SBUF, four at a time

Kind = Literal["whole", "zero1", "fsdp"]


@dataclass(frozen=True)
class Bucket:
    """Parameters that are exchanged as one flat array over `axes`, a group of `ranks`."""

    name: str
    kind: Kind
    parameters: tuple[Parameter, ...]
    axes: tuple[str, ...]
    ranks: int
    stream: int
    streams: int

    @property
    def layered(self) -> bool:
        """Whether there is one for each layer."""
        return self.parameters[0].layered

    @property
    def dtype(self) -> str:
        """The parameters' dtype."""
        return self.parameters[0].type.dtype

    def flat(self, dtype: str) -> TensorType:
        """A rank's share of the bucket, filled up so that it lies evenly in 128 partitions."""
        count = sum(p.type.size for p in self.parameters)
        return TensorType((-(-count // self.ranks // EVEN) * EVEN,), dtype)

    @property
    def names(self) -> list[str]:
        """Of the parameters."""
        return [p.name for p in self.parameters]

    @property
    def gradients(self) -> list[str]:
        """Names of the parameters' gradients."""
        return [p.gradient for p in self.parameters]


def buckets(plan: Plan, unit: Unit) -> tuple[Bucket, ...]:
    """The buckets of a unit, in the order of its parameters."""
    groups: dict[tuple, list[list[Parameter]]] = {}
    for parameter in unit.parameters:
        apart = plan.model.tied and parameter.name == TABLE  # the loss has it too
        found = groups.setdefault((parameter.axes, apart), [[]])
        size = 4 * (parameter.type.size + sum(p.type.size for p in found[-1]))
        if found[-1] and size > plan.bucket_bytes and not sharded(plan, parameter.axes):
            found.append([])
        found[-1].append(parameter)
    flat = [(axes, part) for (axes, _), parts in groups.items() for part in parts]
    return tuple(
        Bucket(
            f"{unit.name}.bucket{i}",
            _kind(plan, axes),
            tuple(part),
            axes,
            prod(plan.degree(axis) for axis in axes),
            min(1, plan.streams - 1),
            plan.streams,
        )
        for i, (axes, part) in enumerate(flat)
    )


def _kind(plan: Plan, axes: Sequence[str]) -> Kind:
    if plan.zero == "none" or not axes:
        return "whole"
    return "fsdp" if plan.zero == "fsdp" else "zero1"


def values(bucket: Bucket) -> Iterator[Value]:
    """Everything that a rank keeps of a bucket."""
    fsdp, layered = bucket.kind == "fsdp", bucket.layered
    for p in bucket.parameters:
        yield Value(p.name, p.type, "buffer" if fsdp else "parameter", layered, place=p.split)
        kind = p.type if fsdp else replace(p.type, dtype="f32")
        yield Value(p.gradient, kind, "buffer" if fsdp else "gradient", layered, place=p.split)
        if bucket.kind == "whole":
            for state in _states(bucket):
                single = replace(p.type, dtype="f32")
                yield Value(f"{p.name}.{state}", single, "optimizer", layered, place=p.split)
    if bucket.kind != "whole":
        yield from _shares(bucket)


def _shares(bucket: Bucket) -> Iterator[Value]:
    parameters = Share(tuple(bucket.names), bucket.axes)
    gradients = Share(tuple(bucket.gradients), bucket.axes)
    wide, narrow = bucket.flat("f32"), bucket.flat(bucket.dtype)
    roles: list[tuple[str, TensorType, Role, Share]] = [
        (state, wide, "optimizer", parameters) for state in _states(bucket)
    ]
    roles.append(("gradient", wide, "gradient", gradients))
    if bucket.kind == "fsdp":
        roles.append(("share", narrow, "parameter", parameters))
        roles.append(("part", narrow, "buffer", gradients))
    else:
        roles.append(("new", narrow, "buffer", parameters))
    for name, kind, role, place in roles:
        yield Value(f"{bucket.name}.{name}", kind, role, bucket.layered, place=place)


def _states(bucket: Bucket) -> tuple[str, ...]:
    """Optimizer states: f32 parameters that the rank keeps anyway are their own master copy."""
    masters = bucket.dtype != "f32" or bucket.kind == "zero1"
    return ("master", "mean", "square") if masters else ("mean", "square")


def clear(bucket: Bucket) -> Run:
    """Set the gradients that add up to zero."""
    kinds = tuple(replace(p.type, dtype="f32") for p in bucket.parameters)
    names = bucket.gradients
    if bucket.kind == "fsdp":
        kinds, names = (bucket.flat("f32"),), [f"{bucket.name}.gradient"]
    return Run(segment(_zeros(kinds), ()), (), _refs(names))


def gather(bucket: Bucket, shift: int = 0) -> Exchange:
    """All parameters of an FSDP bucket from the ranks' shares, `shift` layers from this one."""
    operation = Operation("all_gather", (), (), {"dimension": 0})
    share = [f"{bucket.name}.share"]
    reads, writes = _refs(share, shift), _refs(bucket.names, shift)
    return Exchange(operation, bucket.axes, reads, writes, PARAMETERS, bucket.stream, flat=True)


def reduce(bucket: Bucket, shift: int = 0) -> Iterator[Step]:
    """Sum the gradients of a bucket over the ranks, `shift` layers from this one.

    For FSDP those of one microbatch: `accumulate` then adds them to the rank's share.
    """
    yield from _replicas(bucket, shift)
    match bucket.kind:
        case "whole":
            if bucket.axes:
                yield _exchange("all_reduce", bucket, bucket.gradients, bucket.gradients, shift)
        case "zero1":
            total = f"{bucket.name}.gradient"
            yield _exchange("reduce_scatter", bucket, bucket.gradients, [total], shift)
        case "fsdp":
            part = f"{bucket.name}.part"
            yield _exchange("reduce_scatter", bucket, bucket.gradients, [part], shift)


def accumulate(bucket: Bucket, shift: int) -> Run:
    """Add a microbatch's share of the gradients."""
    total, part = f"{bucket.name}.gradient", f"{bucket.name}.part"
    types = (bucket.flat("f32"), bucket.flat(bucket.dtype))
    reads, writes = _refs([total, part], shift), _refs([total], shift)
    return Run(segment(_accumulate, types), reads, writes)


def _replicas(bucket: Bucket, shift: int) -> Iterator[Exchange]:
    """Sums over tp: of parameters that each rank used on its own part of the sequence."""
    partial = [p.gradient for p in bucket.parameters if p.partial]
    add = Operation("all_reduce", (), (), {"reduction": "add"})
    if partial:
        refs = _refs(partial, shift)
        yield Exchange(add, ("tp",), refs, refs, REPLICAS, bucket.stream, flat=True)
    for p in bucket.parameters:
        if p.split.copies > 1:
            refs, span = _refs([p.gradient], shift), p.split.copies
            yield Exchange(add, ("tp",), refs, refs, REPLICAS, bucket.stream, span)


def _exchange(
    name: str, bucket: Bucket, reads: Sequence[str], writes: Sequence[str], shift: int
) -> Exchange:
    attributes: dict[str, Any] = {"reduction": "add"}
    if name == "reduce_scatter":
        attributes["dimension"] = 0
    stream = bucket.stream
    if bucket.kind == "fsdp":  # beside the gathering of parameters
        stream = min(2, bucket.streams - 1)
    return Exchange(
        Operation(name, (), (), attributes),
        bucket.axes,
        _refs(reads, shift),
        _refs(writes, shift),
        GRADIENTS,
        stream,
        flat=True,
    )


def update(bucket: Bucket) -> Iterator[Step]:
    """The optimizer on a bucket; ZeRO-1 then gathers the new parameters."""
    states = _states(bucket)
    if bucket.kind == "whole":
        for p in bucket.parameters:
            kept = [f"{p.name}.{state}" for state in states]
            yield _adamw(bucket, p.type, p.gradient, kept, p.name)
        return
    kept = [f"{bucket.name}.{state}" for state in states]
    fsdp = bucket.kind == "fsdp"
    target = f"{bucket.name}.{'share' if fsdp else 'new'}"
    yield _adamw(bucket, bucket.flat(bucket.dtype), f"{bucket.name}.gradient", kept, target)
    if not fsdp:
        operation = Operation("all_gather", (), (), {"dimension": 0})
        reads, writes = _refs([target]), _refs(bucket.names)
        yield Exchange(operation, bucket.axes, reads, writes, PARAMETERS, bucket.stream, flat=True)
        yield Free(reads)


def _adamw(
    bucket: Bucket, kind: TensorType, gradient: str, states: Sequence[str], target: str
) -> Run:
    wide = replace(kind, dtype="f32")
    masters = len(states) == 3
    reads = ["step", gradient, *states, *([] if masters else [target])]
    writes = [*states, target]
    types = (TensorType((), "i32"), *([wide] * (len(reads) - 1)))
    return Run(segment(adamw(masters, bucket.dtype), types), _refs(reads), _refs(writes))


@cache
def adamw(masters: bool, dtype: str) -> Any:
    """AdamW (arXiv:1711.05101) in f32, with usual hyperparameters: they cost no time.

    Arguments: step, gradient, then with `masters` master, mean, square, else mean, square, master.
    Gives the states in their order and the parameter in `dtype`.
    """
    rate, decay, b1, b2, eps = 1e-4, 0.1, 0.9, 0.95, 1e-8

    def adamw(step: Any, gradient: Any, *states: Any) -> Any:
        master, mean, square = states if masters else (states[2], states[0], states[1])
        turn = step.astype(jnp.float32)
        mean = b1 * mean + (1 - b1) * gradient
        square = b2 * square + (1 - b2) * gradient * gradient
        corrected = mean / (1 - b1**turn)
        spread = jnp.sqrt(square / (1 - b2**turn)) + eps
        master = master - rate * (corrected / spread + decay * master)
        parameter = master.astype(TensorType((), dtype).numpy)
        return (master, mean, square, parameter) if masters else (mean, square, parameter)

    return adamw


@cache
def _zeros(kinds: tuple[TensorType, ...]) -> Any:
    def zeros() -> Any:
        return tuple(jnp.zeros(kind.shape, kind.numpy) for kind in kinds)

    return zeros


def _accumulate(total: Any, part: Any) -> Any:
    return total + part.astype(total.dtype)


def _refs(names: Sequence[str], shift: int = 0) -> tuple[Ref, ...]:
    return tuple(Ref(name, shift) for name in names)
