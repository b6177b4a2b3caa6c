"""The backward pass of a piece: a JAX function of one rank's arrays, by `jax.vjp`.

A backward segment takes what it uses of the piece's arguments and of the cotangents of its results,
computes again what else it needs of the forward pass, and adds the cotangents of chosen arguments
to accumulators. What it does not use is not an argument of it, and does not have to be saved: of a
matrix product that is the product, of an activation after it that is the activation.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from trnsim.device.ops.ir import TensorType

from ..frontends.jax import lower_local, prune, sources, specs_of
from .segment import Segment, segment

Function = Callable[..., Any]
Types = tuple[TensorType, ...]
Source = tuple[str, int]
"""An array of a backward pass: ("argument", i) of the piece, ("cotangent", i) of its result i,
("sum", i) is the accumulator of the i-th wanted argument, ("made", i) the segment's result i."""


@dataclass(frozen=True)
class Backward:
    """A backward segment: what its arguments are, and where each wanted cotangent is.

    A cotangent that is the same array as another is not made by the segment.
    """

    segment: Segment
    used: tuple[Source, ...]
    results: tuple[Source, ...]


_INTO: dict[Function, Function] = {}


def adds_into(function: Function) -> Callable[[Function], Function]:
    """Declare how the cotangent of a piece's first argument is added to an accumulator.

    The decorated function takes the accumulator, the piece's arguments and the cotangents of its
    results, and gives the new accumulator.
    """

    def declare(into: Function) -> Function:
        _INTO[function] = into
        return into

    return declare


@cache
def backward(
    function: Function,
    types: Types,
    cotangents: tuple[bool, ...],
    wanted: tuple[int, ...],
    sums: tuple[TensorType | None, ...],
) -> Backward:
    """The backward pass of a piece with arguments of `types`, for its arguments `wanted`.

    cotangents: which results have one (the others count as zero). sums: for each wanted argument
    the type of the array that its cotangent is added to, or None to give it alone.
    """
    results = segment(function, types).results
    given = [i for i, there in enumerate(cotangents) if there]
    added = [(i, kind) for i, kind in enumerate(sums) if kind is not None]
    inputs = (
        *(("argument", i) for i in range(len(types))),
        *(("cotangent", i) for i in given),
        *(("sum", i) for i, _ in added),
    )
    kinds = (*types, *(results[i] for i in given), *(kind for _, kind in added))

    direct = function in _INTO and wanted == (0,) and bool(added) and all(cotangents)

    def back(*arrays: Any) -> list[Any]:
        have = dict(zip(inputs, arrays, strict=True))

        def of_wanted(*chosen: Any) -> tuple[Any, ...]:
            taken = dict(enumerate(arrays[: len(types)])) | dict(zip(wanted, chosen, strict=True))
            return as_tuple(function(*(taken[i] for i in range(len(types)))))

        if direct:
            return [_INTO[function](arrays[-1], *arrays[:-1])]
        _, pull = jax.vjp(of_wanted, *(arrays[i] for i in wanted))
        found = pull(tuple(_cotangent(have, i, kind) for i, kind in enumerate(results)))
        return [_added(value, have.get(("sum", i))) for i, value in enumerate(found)]

    closed = jax.make_jaxpr(back)(*specs_of(kinds))
    where, made = _results(sources(closed), inputs)
    lean, used = prune(closed, [i in made for i in range(len(wanted))])
    name = f"{function.__name__}_backward"
    module = lower_local(lean, [kinds[i] for i in used], name)
    return Backward(Segment(name, module), tuple(inputs[i] for i in used), where)


def as_tuple(results: Any) -> tuple[Any, ...]:
    """The results of a piece, one or several."""
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)


def _cotangent(have: dict[Source, Any], index: int, kind: TensorType) -> Any:
    if not kind.dtype.startswith(("f", "bf")):
        return jnp.zeros(kind.shape, jax.dtypes.float0)
    given = have.get(("cotangent", index))
    return jnp.zeros(kind.shape, kind.numpy) if given is None else given


def _added(cotangent: Any, total: Any) -> Any:
    return cotangent if total is None else total + cotangent.astype(total.dtype)


def _results(
    origin: Sequence[int], inputs: Sequence[Source]
) -> tuple[tuple[Source, ...], list[int]]:
    """Where each result is, and which ones a segment has to make."""
    made = sorted({-1 - place for place in origin if place < 0})
    results = [
        inputs[place] if place >= 0 else ("made", made.index(-1 - place)) for place in origin
    ]
    return tuple(results), made
