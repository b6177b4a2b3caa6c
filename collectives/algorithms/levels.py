"""Collectives over several levels: chips, nodes, or the dimensions of a torus.

`places` is int[.., X, Y]: the group position at each coordinate. Its last axis is level 0, the
innermost; every line along an axis is a subgroup that runs a step, all lines of a level at once:

    all_reduce      reduce_scatter on levels 0 .. top - 1, all_reduce on the top, all_gather back
    reduce_scatter  reduce_scatter on levels 0 .. top;  all_gather the other way round
    broadcast       from the top down;  reduce from level 0 up

Chunks are numbered by the owner at level 0, then level 1, .., so that what a rank owns after a step
is one run. A step is a function Collective -> Schedule over the members of a line.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from trnsim.device.errors import BadInput

from ..schedule import REDUCING, Block, Collective, Schedule
from .compose import times

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce")
Step = Callable[[Collective], Schedule]


class Levels:
    """The lines of each level; made once and shared by all schedules over the same places."""

    def __init__(self, places: np.ndarray) -> None:
        self.places = np.asarray(places, np.int32)
        n = self.places.size
        if not np.array_equal(np.sort(self.places, axis=None), np.arange(n)):
            raise BadInput("places", places.tolist(), f"each of 0..{n - 1} once")
        depth = self.places.ndim
        self.sizes = [self.places.shape[depth - 1 - level] for level in range(depth)]
        self.lines = [self._lines(level) for level in range(depth)]
        ids = np.arange(n).reshape(self.places.shape)
        self._corners = [self._along(ids, level)[:, 0] for level in range(depth)]

    @property
    def top(self) -> int:
        """The outermost level."""
        return len(self.sizes) - 1

    def coordinate(self, level: int, other: int) -> np.ndarray:
        """int64: the coordinate at level `other` of each line of `level`."""
        return np.unravel_index(self._corners[level], self.places.shape)[-1 - other]

    def _lines(self, level: int) -> np.ndarray:
        return self._along(self.places, level)

    def _along(self, table: np.ndarray, level: int) -> np.ndarray:
        return np.moveaxis(table, -1 - level, -1).reshape(-1, self.sizes[level])


def phases(
    collective: Collective, levels: Levels, steps: Sequence[Step]
) -> tuple[int, list[list[Block]], np.ndarray | None]:
    """(parts, the blocks of each step in order, order) of a schedule. steps: one per level.

    Raises BadInput for kinds other than KINDS, and what a step raises.
    """
    build = {
        "all_reduce": _all_reduce,
        "reduce_scatter": _reduce_scatter,
        "all_gather": _all_gather,
        "broadcast": _rooted,
        "reduce": _rooted,
    }
    if collective.kind not in build:
        raise BadInput("collective over levels", collective.kind, KINDS)
    return build[collective.kind](collective, levels, steps)


Phases = tuple[int, list[list[Block]], np.ndarray | None]


def _all_reduce(collective: Collective, levels: Levels, steps: Sequence[Step]) -> Phases:
    top = levels.top
    scatter = [_step(steps[i], "reduce_scatter", levels.sizes[i]) for i in range(top)]
    gather = [_step(steps[i], "all_gather", levels.sizes[i]) for i in range(top)]
    across = _step(steps[top], "all_reduce", levels.sizes[top])
    scales = _scales(levels.sizes[:top], across.parts)
    done = [_embed(scatter[i], levels, i, scatter, scales) for i in range(top)]
    done.append(_embed(across, levels, top, scatter, [*scales, 1]))
    done += [_embed(gather[i], levels, i, scatter, scales) for i in reversed(range(top))]
    return int(np.prod(levels.sizes[:top])) * across.parts, done, None


def _reduce_scatter(collective: Collective, levels: Levels, steps: Sequence[Step]) -> Phases:
    made = [_step(steps[i], "reduce_scatter", size) for i, size in enumerate(levels.sizes)]
    scales = _scales(levels.sizes, 1)
    done = [_embed(step, levels, i, made, scales) for i, step in enumerate(made)]
    return 1, done, _order(levels, made)


def _all_gather(collective: Collective, levels: Levels, steps: Sequence[Step]) -> Phases:
    made = [_step(steps[i], "all_gather", size) for i, size in enumerate(levels.sizes)]
    scales = _scales(levels.sizes, 1)
    done = [_embed(step, levels, i, made, scales) for i, step in enumerate(made)]
    return 1, done[::-1], _order(levels, made)


def _rooted(collective: Collective, levels: Levels, steps: Sequence[Step]) -> Phases:
    """Lines through the root at the levels below: at the top one line, at level 0 all of them."""
    at = [int(axis[0]) for axis in np.nonzero(levels.places == collective.root)][::-1]
    made = [_step(steps[i], collective.kind, size, at[i]) for i, size in enumerate(levels.sizes)]
    parts = int(np.prod([step.parts for step in made]))
    done = []
    for level, step in enumerate(made):
        mine = np.ones(len(levels.lines[level]), bool)
        for below in range(level):
            mine &= levels.coordinate(level, below) == at[below]
        who = levels.lines[level][mine]
        done.append([_embedded(b, who, None, parts // step.parts) for b in step.blocks])
    return parts, done[::-1] if collective.kind == "broadcast" else done, None


def _step(step: Step, kind: str, ranks: int, root: int = 0) -> Schedule:
    reduction = "add" if kind in REDUCING else None
    return step(Collective(kind, ranks, 1, reduction=reduction, root=root))


def _scales(sizes: Sequence[int], last: int) -> list[int]:
    """Chunks in what one member of each level owns, `last` in that of the last one."""
    scales = [last]
    for size in sizes[:0:-1]:
        scales.insert(0, scales[0] * size)
    return scales[: len(sizes)]


def _owned(step: Schedule, ranks: int) -> np.ndarray:
    """int64[ranks]: the chunk that each member owns. Raises BadInput if it owns several."""
    if step.parts != 1:
        raise BadInput("step of a hierarchy", step.algorithm, "steps with one chunk per rank")
    return step.place_of(ranks)[:, 0]


def _order(levels: Levels, made: Sequence[Schedule]) -> np.ndarray:
    """Pieces by owner at level 0, then level 1, .."""
    inside_first = levels.places.transpose()
    natural = [step.natural(size) for step, size in zip(made, levels.sizes, strict=True)]
    return inside_first[np.ix_(*natural)].reshape(-1).astype(np.int64)


def _embed(
    step: Schedule, levels: Levels, level: int, below: Sequence[Schedule], scales: Sequence[int]
) -> list[Block]:
    """The step on all lines of its level, each on the chunks that its members own by now."""
    shift = np.zeros(len(levels.lines[level]), np.int64)
    for other in range(level):
        owned = _owned(below[other], levels.sizes[other])
        shift += owned[levels.coordinate(level, other)] * scales[other]
    return [_embedded(b, levels.lines[level], shift, scales[level]) for b in step.blocks]


def _embedded(b: Block, who: np.ndarray, shift: np.ndarray | None, scale: int) -> Block:
    """The block once per row of `who`; its chunk c becomes `scale` chunks from c * scale on."""
    b = b.flat
    if scale == 1:
        return replace(b, who=who, shift=shift)
    return replace(
        b,
        base=times(b.base, scale),
        span=times(b.span, scale),
        offset=times(b.offset, scale),
        step=times(b.step, scale),
        modulus=b.modulus * scale,
        who=who,
        shift=shift,
    )
