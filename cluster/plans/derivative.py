"""The derivative of a piece: a JAX function of one rank's arrays, split where training splits it.

`jax.vjp` under a `jax.checkpoint` policy says what the backward pass needs: arguments of the piece,
and intermediate arrays that the piece has named (`checkpoint_name`) and the plan saves. Everything
else is computed again from those. The forward segment returns the piece's results and the named
arrays; a backward segment takes what it uses of arguments, named arrays and cotangents, and adds
the cotangents of chosen arguments to accumulators. What it does not use is not an argument of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from trnsim.device.ops.ir import TensorType

from ..frontends.jax import lower_local, prune, sources, specs_of, types_of
from .segment import Segment

Function = Callable[..., Any]
Types = tuple[TensorType, ...]


@dataclass(frozen=True)
class Backward:
    """A backward segment; `used` says what its arguments are, in order.

    Pairs of kind and index: ("argument", i) of the piece, ("saved", i), ("cotangent", i) of its
    result i, ("sum", i) for the accumulator of the i-th wanted argument. results: for each wanted
    argument where its cotangent is: ("made", i) is result i of the segment; or it is the same
    array as another, ("cotangent", i).
    """

    segment: Segment
    used: tuple[tuple[str, int], ...]
    results: tuple[tuple[str, int], ...]


@dataclass(frozen=True, eq=False)
class Derivative:
    """A piece of given argument types, of which the arguments `active` are differentiated.

    forward: gives the results, then the saved arrays. residuals: where each residual of the vjp
    comes from, as ("argument", i) or ("saved", i); `tree` puts them together again.
    """

    name: str
    arguments: Types
    active: tuple[int, ...]
    forward: Segment
    results: Types
    saved: Types
    residuals: tuple[tuple[str, int], ...]
    tree: Any

    @cache  # noqa: B019 - derivatives are kept for ever by the cache that makes them
    def backward(
        self,
        cotangents: tuple[bool, ...],
        wanted: tuple[int, ...],
        sums: tuple[TensorType | None, ...],
    ) -> Backward:
        """The segment for the cotangents of the arguments `wanted` (some of `active`).

        cotangents: which results have one (the others count as zero). sums: for each wanted
        argument the type of the array that its cotangent is added to, or None to give it alone.
        """
        given = [i for i, there in enumerate(cotangents) if there]
        added = [i for i, kind in enumerate(sums) if kind is not None]
        inputs = (
            *(("argument", i) for i in range(len(self.arguments))),
            *(("saved", i) for i in range(len(self.saved))),
            *(("cotangent", i) for i in given),
            *(("sum", i) for i in added),
        )
        types = (
            *self.arguments,
            *self.saved,
            *(self.results[i] for i in given),
            *(kind for kind in sums if kind is not None),
        )

        def backward(*arrays: Any) -> list[Any]:
            have = dict(zip(inputs, arrays, strict=True))
            pull = jax.tree.unflatten(self.tree, [have[source] for source in self.residuals])
            found = dict(zip(self.active, pull(self._cotangents(have)), strict=True))
            return [_added(found[index], have.get(("sum", i))) for i, index in enumerate(wanted)]

        closed = jax.make_jaxpr(backward)(*specs_of(types))
        results, made = _results(sources(closed, 0), inputs)
        function, used = prune(closed, [i in made for i in range(len(wanted))], drop=True)
        module = lower_local(function, [types[i] for i in used], f"{self.name}_backward")
        segment = Segment(module.name, module)
        return Backward(segment, tuple(inputs[i] for i in used), results)

    def _cotangents(self, have: dict[tuple[str, int], Any]) -> tuple[Any, ...]:
        return tuple(
            have[("cotangent", i)] if ("cotangent", i) in have else jnp.zeros(t.shape, t.numpy)
            for i, t in enumerate(self.results)
        )


@cache
def derivative(
    function: Function, types: Types, active: tuple[int, ...], names: frozenset[str]
) -> Derivative:
    """The `Derivative` of a piece that saves those of its named arrays that are in `names`."""
    policy = jax.checkpoint_policies.save_only_these_names(*sorted(names))
    held: dict[str, Any] = {}

    def forward(*arguments: Any) -> tuple[Any, ...]:
        def of_active(*chosen: Any) -> tuple[Any, ...]:
            given = dict(enumerate(arguments)) | dict(zip(active, chosen, strict=True))
            return as_tuple(function(*(given[i] for i in range(len(arguments)))))

        kept = jax.checkpoint(of_active, policy=policy, prevent_cse=False)
        results, pull = jax.vjp(kept, *(arguments[i] for i in active))
        residuals, held["tree"] = jax.tree.flatten(pull)
        held["results"] = len(results)
        return *results, *residuals

    closed = jax.make_jaxpr(forward)(*specs_of(types))
    results = held["results"]
    origin = sources(closed, results)
    kept = sorted({-1 - place for place in origin if place < 0})
    wanted = [i < results or i in kept for i in range(len(closed.out_avals))]
    lean, _ = prune(closed, wanted, drop=False)
    return Derivative(
        name=function.__name__,
        arguments=types,
        active=active,
        forward=Segment(function.__name__, lower_local(lean, types, function.__name__)),
        results=types_of(closed.out_avals[:results]),
        saved=types_of([closed.out_avals[i] for i in kept]),
        residuals=tuple(
            ("argument", place) if place >= 0 else ("saved", kept.index(-1 - place))
            for place in origin
        ),
        tree=held["tree"],
    )


def _results(
    origin: Sequence[int], inputs: Sequence[tuple[str, int]]
) -> tuple[tuple[tuple[str, int], ...], list[int]]:
    """Where each result is, and which ones a segment has to make."""
    made = sorted({-1 - place for place in origin if place < 0})
    results = [
        inputs[place] if place >= 0 else ("made", made.index(-1 - place)) for place in origin
    ]
    return tuple(results), made


def as_tuple(results: Any) -> tuple[Any, ...]:
    """The results of a piece, one or several."""
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)


def _added(cotangent: Any, total: Any) -> Any:
    return cotangent if total is None else total + cotangent.astype(total.dtype)
