"""Virtual clocks of the ranks of groups, advanced round by round.

In a repeated round the clocks follow a max-plus linear law. Once a repetition shifts all clocks of
a group by one amount, all later ones do, and they are added in one multiplication, exactly. If
every rank passes on to one other, many repetitions are done at once in any case: see `cycles`.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .cycles import later

_NEVER = np.iinfo(np.int64).min


@dataclass(frozen=True, eq=False)
class Places:
    """Where R transfers in each of G groups are among C clocks.

    src, dst: int[G * R] clocks; channel, lane: int[G * R] or one number. regular: known to be such
    that every clock is once a source and once a destination at most.
    """

    src: np.ndarray
    dst: np.ndarray
    channel: np.ndarray | int
    lane: int
    groups: int
    clocks: int
    regular: bool = False

    @cached_property
    def ready_src(self) -> np.ndarray:
        return self.src + self.lane * self.clocks if self.lane else self.src

    @cached_property
    def ready_dst(self) -> np.ndarray:
        return self.dst + self.lane * self.clocks if self.lane else self.dst

    @cached_property
    def free_src(self) -> np.ndarray:
        if isinstance(self.channel, int):
            return self.src + self.channel * self.clocks if self.channel else self.src
        return self.src + self.channel.astype(np.int64) * self.clocks

    @cached_property
    def one_out(self) -> bool:
        """Whether no two transfers leave one rank on one channel."""
        return self.regular or _distinct(self.free_src)

    @cached_property
    def one_in(self) -> bool:
        """Whether no two transfers go to one rank."""
        return self.regular or _distinct(self.dst)

    @cached_property
    def src_receives(self) -> np.ndarray:
        """bool: whether the source of a transfer receives one of them."""
        receives = np.zeros(self.clocks, bool)
        receives[self.dst] = True
        return receives[self.src]

    @cached_property
    def receivers(self) -> tuple[np.ndarray, np.ndarray]:
        """(clocks that receive, the group of each)."""
        return self._with_group(self.ready_dst)

    @cached_property
    def senders(self) -> tuple[np.ndarray, np.ndarray]:
        return self._with_group(self.free_src)

    def _with_group(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        unique, first = np.unique(places, return_index=True)
        return unique, first // (len(places) // self.groups)


@dataclass(frozen=True, eq=False)
class Round:
    """A round of transfers, `count` times. took, latency: int64 ps, one per transfer or one."""

    places: Places
    took: np.ndarray
    latency: np.ndarray
    count: int


class Clocks:
    """Per rank: when it has all that was sent to it (in each lane), and when each of its channels
    is free.
    """

    PATHS: int = 24  # repetitions that are worth longest paths

    def __init__(self, entered: np.ndarray, channels: int, lanes: int, step_ps: int) -> None:
        self.step_ps = step_ps
        self.entered, self.channels, self.lanes = entered, channels, lanes
        self.together = bool(len(entered) == 0 or (entered == entered[0]).all())
        self.ready = np.tile(entered, lanes)
        self.free = np.tile(entered, channels)

    def end(self) -> np.ndarray:
        """int64[C]: when each rank has received and sent everything."""
        ready = self.ready.reshape(self.lanes, -1).max(axis=0)
        return np.maximum(ready, self.free.reshape(self.channels, -1).max(axis=0))

    def tables(self) -> list[np.ndarray]:
        """int64[C] each: everything that is known of the ranks."""
        rows = [*self.ready.reshape(self.lanes, -1), *self.free.reshape(self.channels, -1)]
        return rows if self.together else [*rows, self.entered]

    def fold(self, ranks: np.ndarray) -> None:
        """Keep the clocks of these ranks only: those of the others are equal to theirs."""
        self.unfold(ranks)

    def unfold(self, of_rank: np.ndarray) -> None:
        """Give every rank the clocks of the one that it is like."""
        self.entered = self.entered[of_rank]
        self.ready = self.ready.reshape(self.lanes, -1)[:, of_rank].reshape(-1)
        self.free = self.free.reshape(self.channels, -1)[:, of_rank].reshape(-1)

    def repeat(self, r: Round) -> None:
        """Advance by r.count repetitions, by multiplication as soon as that is exact."""
        if not r.places.src.size:
            return
        tried, again = 0, 0
        for left in range(r.count - 1, -1, -1):
            if not left or tried < again:
                self._advance(r)
                tried += 1
                continue
            ready, free = self.ready.copy(), self.free.copy()
            start = self._advance(r)
            shift = self._shift(r, ready, free, start)
            if shift is None and left >= self.PATHS and tried and self._leap(r, start, left):
                return
            if shift is not None:
                for clocks, (mine, group) in (
                    (self.ready, r.places.receivers),
                    (self.free, r.places.senders),
                ):
                    clocks[mine] += left * shift[group]
                return
            tried += 1
            again = tried if tried < 4 else 2 * tried

    def _advance(self, r: Round) -> np.ndarray:
        """One repetition; returns when each transfer starts."""
        at = r.places
        start = np.maximum(self.ready[at.ready_src], self.free[at.free_src])
        if not self.together:
            np.maximum(start, self.entered[at.dst], out=start)
        sent = start + (r.took + self.step_ps)
        if at.one_out:
            self.free[at.free_src] = sent
        else:
            np.maximum.at(self.free, at.free_src, sent)
        arrived = sent + r.latency
        if at.one_in:
            self.ready[at.ready_dst] = np.maximum(self.ready[at.ready_dst], arrived)
        else:
            np.maximum.at(self.ready, at.ready_dst, arrived)
        return start

    def _leap(self, r: Round, start: np.ndarray, left: int) -> bool:
        """Advance by `left` more repetitions after one that began at `start`, if possible."""
        at = r.places
        if not at.regular or not isinstance(at.channel, int):
            return False
        transfer = np.full(self.ready.size // self.lanes, -1, np.int64)
        transfer[at.src] = np.arange(len(at.src))
        following = transfer[at.dst]
        if (following < 0).any():
            return False
        busy = np.broadcast_to(r.took + self.step_ps, start.shape)
        last = later(start, busy, busy + r.latency, following, left)
        if last is None:
            return False
        sent = last + busy
        self.free[at.free_src] = sent
        self.ready[at.ready_dst] = np.maximum(self.ready[at.ready_dst], sent + r.latency)
        return True

    def _shift(
        self, r: Round, ready: np.ndarray, free: np.ndarray, start: np.ndarray
    ) -> np.ndarray | None:
        """int64[G]: what the last repetition added to every clock it moves, if it was one amount.

        Also required: no start was set by a clock that this round leaves alone (an arrival, or a
        sender that receives nothing), because those do not move along.
        """
        at = r.places
        sent = (self.free[at.free_src] - free[at.free_src]).reshape(at.groups, -1)
        shift = sent[:, 0]
        if not (sent == shift[:, None]).all():
            return None
        got = (self.ready[at.ready_dst] - ready[at.ready_dst]).reshape(at.groups, -1)
        if not (got == shift[:, None]).all():
            return None
        own = np.where(at.src_receives, ready[at.ready_src], _NEVER)
        if (np.maximum(own, free[at.free_src]) != start).any():
            return None
        return shift


def _distinct(places: np.ndarray) -> bool:
    return bool(places.size == 0 or np.bincount(places).max() <= 1)
