"""A placement study: candidates priced, ranked, and what is different about the best.

Candidates: the default (rank r on place r), the vendor's published layouts, all orders of the axes,
one axis in two strides, sub-blocks of the physical dimensions, rank files, and a local search that
starts from the best of these.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from random import Random

import numpy as np

from ..collective import Site
from ..instances import Instance
from ..mesh import Mesh
from .arrangements import blocks, orders, strides
from .local_search import Found, cost, local_search, units
from .positions import Positions
from .score import Hops, Score, Scorer
from .vendor import vendor_layouts

MOST_LISTED = 4096  # arrangements of a kind that are listed before a sample is drawn
DEFAULT = "default"


@dataclass(frozen=True, eq=False)
class Candidate:
    """A placement and its name. slots: int64[ranks]. kind: what made it."""

    kind: str
    name: str
    slots: np.ndarray


@dataclass(frozen=True, eq=False)
class Ranked:
    """A candidate with its cost; hops: of each axis of degree above 1."""

    candidate: Candidate
    score: Score
    hops: Mapping[str, Hops]


@dataclass(frozen=True, eq=False)
class PlacementStudy:
    """All ranked candidates, best first. `left_out`: arrangements that were not priced."""

    scorer: Scorer
    ranking: tuple[Ranked, ...]
    left_out: int
    searched: int

    @property
    def best(self) -> Ranked:
        """The candidate with the least time."""
        return self.ranking[0]

    @cached_property
    def default(self) -> Ranked:
        """Rank r on place r."""
        return next(item for item in self.ranking if item.candidate.kind == DEFAULT)

    @property
    def gain(self) -> float:
        """How much more time the default takes than the best: 0.25 is a quarter more."""
        return (
            self.default.score.total / self.best.score.total - 1 if self.best.score.total else 0.0
        )


def candidates(
    instance: Instance | None, site: Site, mesh: Mesh, positions: Positions
) -> Iterator[Candidate]:
    """The regular placements, the default first; some may be equal."""
    yield Candidate(DEFAULT, DEFAULT, np.arange(mesh.size))
    box = positions.first(mesh.size)
    if instance is not None and site.lnc is not None:
        for layout in vendor_layouts(instance, site.lnc, mesh, box):
            yield Candidate("vendor", layout.name, layout.slots)
    for name, slots in orders(mesh):
        yield Candidate("order", name, slots)
    for name, slots in islice(strides(mesh), MOST_LISTED):
        yield Candidate("stride", name, slots)
    for arrangement in islice(blocks(mesh, box), MOST_LISTED):
        yield Candidate("block", str(arrangement), arrangement.slots(mesh))


def study(
    scorer: Scorer,
    positions: Positions,
    instance: Instance | None = None,
    *,
    given: Mapping[str, np.ndarray] | None = None,
    most: int = 200,
    steps: int = 200,
    seed: int = 0,
    advance: Callable[[], object] = lambda: None,
) -> PlacementStudy:
    """Price the candidates and search on from the best.

    given: placements of the user's rank files, by name. most: regular placements that are priced;
    if there are more, the default, the vendor's and the orders are kept and the rest is drawn.
    steps: placements of the local search (0: none). `advance` is called for each placement.
    """
    found = _distinct(candidates(instance, scorer.site, scorer.mesh, positions), given or {})
    kept = _sample(found, most, Random(seed))
    scored = []
    for candidate in kept:
        scored.append((scorer.score(candidate.slots), candidate))
        advance()
    searched = 0
    if steps:
        start = min(scored, key=lambda item: cost(item[0]))
        result = _search(scorer, start[1].slots, positions, steps, seed, advance)
        searched = result.looked
        if cost(result.score) < cost(start[0]):
            name = f"local search from {start[1].name}, seed {seed}"
            scored.append((result.score, Candidate("search", name, result.slots)))
    scored.sort(key=lambda item: cost(item[0]))
    ranking = tuple(Ranked(c, s, _hops(scorer, c.slots)) for s, c in scored)
    return PlacementStudy(scorer, ranking, len(found) - len(kept), searched)


def _search(
    scorer: Scorer,
    start: np.ndarray,
    positions: Positions,
    steps: int,
    seed: int,
    advance: Callable[[], object],
) -> Found:
    """Large units first, then smaller ones from there; each size gets an equal share of steps."""
    sizes = [u for u in units(positions.extents) if positions.size // u >= 3] or [1]
    best, looked = start, 0
    for unit in sizes:
        share = max(1, steps // len(sizes))
        found = local_search(scorer, best, seed=seed, steps=share, unit=unit, advance=advance)
        best, looked = found.slots, looked + found.looked
    return Found(best, scorer.score(best), looked)


def _distinct(made: Iterator[Candidate], given: Mapping[str, np.ndarray]) -> list[Candidate]:
    """Each placement once, under its first name; rank files come first of all but the default."""
    default = next(made)
    files = [Candidate("rank file", name, slots) for name, slots in given.items()]
    found: dict[bytes, Candidate] = {}
    for candidate in (default, *files, *made):
        found.setdefault(candidate.slots.tobytes(), candidate)
    named = [c for c in files if found[c.slots.tobytes()] is not c]
    return [*found.values(), *named]


def _sample(found: list[Candidate], most: int, random: Random) -> list[Candidate]:
    """At most `most`: named ones always, the rest drawn, in the order listed."""
    always = [c for c in found if c.kind not in ("stride", "block")]
    rest = [c for c in found if c.kind in ("stride", "block")]
    room = max(0, most - len(always))
    drawn = sorted(random.sample(range(len(rest)), room)) if room < len(rest) else range(len(rest))
    return [*always, *(rest[i] for i in drawn)]


def _hops(scorer: Scorer, slots: np.ndarray) -> dict[str, Hops]:
    return {name: scorer.hops(name, slots) for name, degree in scorer.mesh.axes if degree > 1}
