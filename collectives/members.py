"""Where the members of a collective's groups are on a fabric, for reports.

A result that does not say who took part hides the commonest mistake: a collective that ran in
another group than was meant.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .routes import Fabric

SHOWN = 8  # runs of numbers that a line shows; the rest is counted


@dataclass(frozen=True)
class Members:
    """One group of a collective. str() is one line for people.

    ranks: in group order; size: N; servers, chips: how many; per_chip, per_server: fewest and most
    ranks. where: `chip0` to `chip3` by name while few, then counted.
    """

    ranks: tuple[int, ...]
    servers: int
    chips: int
    per_server: tuple[int, int]
    per_chip: tuple[int, int]
    where: str

    @property
    def size(self) -> int:
        """N, the number of ranks in the group."""
        return len(self.ranks)

    def __str__(self) -> str:
        return f"N={self.size}: ranks {runs(self.ranks)} on {self.where}"


@dataclass(frozen=True)
class Groups:
    """All groups of a collective: how many, the first, and whether the others lie alike."""

    count: int
    first: Members
    alike: bool

    def __str__(self) -> str:
        if self.count == 1:
            return f"1 group, {self.first}"
        like = "all alike" if self.alike else "on different numbers of chips or servers"
        return f"{self.count} groups ({like}), the first {self.first}"


def members(fabric: Fabric, group: Sequence[int] | np.ndarray) -> Members:
    """The members of one group: ranks of the fabric, in group order."""
    ranks = np.asarray(group, np.int64)
    chips, on_chip = np.unique(fabric.rank_node[ranks], return_counts=True)
    servers, on_server = np.unique(fabric.rank_server[ranks], return_counts=True)
    names = ", ".join(fabric.names[chip] for chip in chips[:SHOWN].tolist())
    where = f"{len(chips)} chip{'s' * (len(chips) > 1)}"
    where += f" ({names})" if len(chips) <= SHOWN else f" of {_count(len(servers), 'server')}"
    return Members(
        ranks=tuple(ranks.tolist()),
        servers=len(servers),
        chips=len(chips),
        per_server=(int(on_server.min()), int(on_server.max())),
        per_chip=(int(on_chip.min()), int(on_chip.max())),
        where=where,
    )


def describe_groups(fabric: Fabric, groups: Sequence[Sequence[int]] | np.ndarray) -> Groups:
    """All groups, the first one with its members."""
    table = np.asarray(groups, np.int64)
    shapes = {_spread(fabric, row) for row in table}
    return Groups(len(table), members(fabric, table[0]), len(shapes) == 1)


def _spread(fabric: Fabric, ranks: np.ndarray) -> tuple[int, int]:
    return len(np.unique(fabric.rank_node[ranks])), len(np.unique(fabric.rank_server[ranks]))


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}"


def runs(numbers: Sequence[int]) -> str:
    """`0-7, 16-23`, or `0-56 by 8`: numbers as runs of one step, in the order given."""
    given = np.asarray(numbers, np.int64)
    shown, at = [], 0
    while at < len(given) and len(shown) < SHOWN:
        stop = _end_of_run(given, at)
        shown.append(_run(given[at:stop].tolist()))
        at = stop
    rest = f", and {len(given) - at} more" if at < len(given) else ""
    return ", ".join(shown) + rest


def _end_of_run(given: np.ndarray, at: int) -> int:
    """The end of the run that starts here: at least 3 numbers of one step, else 1."""
    steps = np.diff(given[at:])
    if len(steps) < 2 or steps[0] != steps[1]:
        return at + (2 if len(steps) and steps[0] == 1 else 1)
    other = np.flatnonzero(steps != steps[0])
    return at + 1 + (int(other[0]) if other.size else len(steps))


def _run(run: list[int]) -> str:
    if len(run) == 1:
        return str(run[0])
    step = run[1] - run[0]
    return f"{run[0]}-{run[-1]}" + ("" if step == 1 else f" by {step}")
