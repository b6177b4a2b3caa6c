"""Ranks that come late: fixed delays, and jitter that a seed repeats exactly."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from trnsim.device.errors import BadInput


@dataclass(frozen=True)
class Stragglers:
    """When ranks reach a collective.

    delays: rank -> ps after everybody else. jitter_ps: every rank is late by a whole number of
    picoseconds from 0 to this, drawn evenly; equal seeds give equal delays, and a rank's delay does
    not depend on the groups. Raises BadInput for a negative time.
    """

    delays: Mapping[int, int] = field(default_factory=dict)
    jitter_ps: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in (("jitter_ps", self.jitter_ps), ("seed", self.seed)):
            if value < 0:
                raise BadInput(name, value, "0 or more")
        for rank, delay in self.delays.items():
            if delay < 0:
                raise BadInput(f"delay of rank {rank}", delay, "0 or more picoseconds")

    def late_by(self, ranks: int) -> np.ndarray:
        """int64[ranks]: ps that each of the ranks 0..ranks-1 is late. Raises BadInput for a delay
        of a rank that does not exist.
        """
        wrong = [rank for rank in self.delays if not 0 <= rank < ranks]
        if wrong:
            raise BadInput("rank with a delay", wrong[0], f"0..{ranks - 1}")
        draws = np.random.Generator(np.random.PCG64(self.seed))
        late = draws.integers(0, self.jitter_ps, ranks, dtype=np.int64, endpoint=True)
        late[list(self.delays)] += np.array(list(self.delays.values()), np.int64)
        return late

    def arrivals(
        self, groups: Sequence[Sequence[int]] | np.ndarray, ranks: int, at: int = 0
    ) -> np.ndarray:
        """int64[G, n]: when each member of the groups arrives; `at` is when everybody is due."""
        return at + self.late_by(ranks)[np.asarray(groups, np.int64)]
