"""Where the time of ranks goes: sums by kind and name, as arrays over classes of places."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from .places import Array
from .prices import RunPrice

Key = tuple[str, str]
"""(`run`, pass); (`total`, `exposed`, `shared`, `count`; name of exchanges); (`wait`, channel)."""


@dataclass(frozen=True, slots=True)
class Late:
    """The latest arrival of one exchange: how long after the first of its group, and who."""

    by: int
    place_class: int


@dataclass(slots=True)
class Account:
    """Sums of ps (or counts) by key: int64 arrays of one number or one per class.

    runs: how often each kind of run was done, on every rank.
    """

    sums: dict[Key, Array] = field(default_factory=dict)
    runs: Counter[RunPrice] = field(default_factory=Counter)
    late: dict[str, Late] = field(default_factory=dict)

    def add(self, key: Key, amount: Array | int) -> None:
        """Adds an amount; arrays given are not kept for change."""
        before = self.sums.get(key)
        if before is None:
            self.sums[key] = np.atleast_1d(np.asarray(amount, np.int64))
        else:
            self.sums[key] = before + amount

    def arrived(self, label: str, late: Late) -> None:
        """Keeps the latest arrival of each label."""
        if label not in self.late or late.by > self.late[label].by:
            self.late[label] = late

    def merge(self, other: "Account", times: int = 1) -> None:
        """Adds another account, several times over."""
        for key, amount in other.sums.items():
            self.add(key, amount * times)
        for price, count in other.runs.items():
            self.runs[price] += count * times
        for label, late in other.late.items():
            self.arrived(label, late)

    def total(self, kind: str) -> dict[str, Array]:
        """All sums of a kind by name."""
        return {name: amount for (k, name), amount in self.sums.items() if k == kind}
