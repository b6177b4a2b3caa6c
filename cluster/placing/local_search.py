"""Search among all placements: a seeded local search, and every one of them for small jobs.

The local search swaps the places of two units (a rank, or all ranks of a chip, server or node, or
an empty place) and keeps what is no worse: less time, or as much time and less data times links.
When no swap of a round of all pairs (at random order) helps, it starts again from the best with a
few random swaps, until its steps are used up. The same seed gives the same placement.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

import numpy as np

from trnsim.device.errors import BadInput

from .score import Score, Scorer

MOST_EXHAUSTIVE = 9  # ranks: 9! placements
KICKS = 3  # random swaps of a new start


@dataclass(frozen=True, eq=False)
class Found:
    """The best placement, its cost, and how many placements were looked at."""

    slots: np.ndarray
    score: Score
    looked: int


def cost(score: Score) -> tuple[int, int]:
    """What the search lowers: time first, then bytes times links."""
    return score.total, score.moved


def local_search(
    scorer: Scorer,
    start: np.ndarray,
    *,
    seed: int,
    steps: int,
    unit: int = 1,
    advance: Callable[[], object] = lambda: None,
) -> Found:
    """From `start`, at most `steps` placements. `unit`: places that move together, aligned.

    Raises BadInput for a unit that does not divide the places.
    """
    places = scorer.site.fabric.ranks
    if places % unit:
        raise BadInput("unit", unit, f"a divisor of the {places} places")
    search = _Search(scorer, _occupants(start, places), Random(seed), unit, steps, advance)
    return search.run()


def exhaustive(scorer: Scorer) -> Found:
    """The best of all placements of up to MOST_EXHAUSTIVE ranks on as many places.

    Raises BadInput for more.
    """
    places, ranks = scorer.site.fabric.ranks, scorer.mesh.size
    if max(places, ranks) > MOST_EXHAUSTIVE:
        raise BadInput("ranks of an exhaustive search", places, f"at most {MOST_EXHAUSTIVE}")
    every = (np.array(slots) for slots in itertools.permutations(range(places), ranks))
    looked = [(cost(scorer.score(slots)), slots) for slots in every]
    best = min(looked, key=lambda item: item[0])[1]
    return Found(best, scorer.score(best), len(looked))


def _occupants(slots: np.ndarray, places: int) -> np.ndarray:
    """int64[places]: the rank at each place, -1 for none."""
    found = np.full(places, -1, np.int64)
    found[slots] = np.arange(len(slots))
    return found


class _Search:
    def __init__(
        self,
        scorer: Scorer,
        occupants: np.ndarray,
        random: Random,
        unit: int,
        steps: int,
        advance: Callable[[], object],
    ) -> None:
        self.scorer, self.random, self.unit = scorer, random, unit
        self.left, self.looked, self.advance = steps, 0, advance
        self.now = occupants
        self.score = self._look(occupants)
        self.best, self.best_score = self.now, self.score

    def run(self) -> Found:
        while self.left > 0:
            improved = self._round()
            if cost(self.score) < cost(self.best_score):
                self.best, self.best_score = self.now, self.score
            if not improved:
                self._kick()
        return Found(self._slots(self.best), self.best_score, self.looked)

    def _round(self) -> bool:
        """Try all swaps once, in a random order; whether one of them helped."""
        pairs = list(itertools.combinations(range(len(self.now) // self.unit), 2))
        self.random.shuffle(pairs)
        helped = False
        for one, other in pairs:
            if self.left <= 0:
                break
            changed = self._swapped(self.now, one, other)
            if changed is None:
                continue
            score = self._look(changed)
            if cost(score) <= cost(self.score):
                helped |= cost(score) < cost(self.score)
                self.now, self.score = changed, score
        return helped

    def _kick(self) -> None:
        """A few random swaps away from the best."""
        self.now = self.best
        units = range(len(self.now) // self.unit)
        for _ in range(KICKS if len(units) > 1 else 0):
            changed = self._swapped(self.now, *self.random.sample(units, 2))
            self.now = self.now if changed is None else changed
        self.score = self._look(self.now)

    def _swapped(self, occupants: np.ndarray, one: int, other: int) -> np.ndarray | None:
        """With two units exchanged; None if both are empty."""
        a = slice(one * self.unit, (one + 1) * self.unit)
        b = slice(other * self.unit, (other + 1) * self.unit)
        if (occupants[a] < 0).all() and (occupants[b] < 0).all():
            return None
        changed = occupants.copy()
        changed[a], changed[b] = occupants[b], occupants[a]
        return changed

    def _look(self, occupants: np.ndarray) -> Score:
        self.left -= 1
        self.looked += 1
        self.advance()
        return self.scorer.score(self._slots(occupants))

    def _slots(self, occupants: np.ndarray) -> np.ndarray:
        slots = np.empty(self.scorer.mesh.size, np.int64)
        taken = np.flatnonzero(occupants >= 0)
        slots[occupants[taken]] = taken
        return slots


def units(extents: tuple[int, ...]) -> Iterator[int]:
    """Sizes of the aligned blocks below each dimension, largest first, down to single places."""
    size = int(np.prod(extents[1:], dtype=np.int64))
    for extent in extents[1:]:
        yield size
        size //= extent
    yield 1
