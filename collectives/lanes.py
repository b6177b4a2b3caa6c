"""Lanes of a schedule that go on at once share resources.

A turn is what stands together in the list of blocks with lanes of its own: one block per lane. Its
lanes go on at once. In each of its rounds, a lane waits at a resource for what the other lanes of
the turn send over it meanwhile (their bytes of the turn, spread over the lane's own rounds), but
each of them gets no more of it than the lane itself: a fair share.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from .copies import Fold
from .loads import Across, Paths
from .resources import needed_ps
from .schedule import Block

if TYPE_CHECKING:
    from .rounds import Sized

Source = tuple[Across | Paths, Fold | None]


def accompany(blocks: Sequence[Block], rounds: "Sequence[list[Sized]]") -> None:
    """Tell the rounds of every block which rounds of other lanes go on meanwhile."""
    turns: list[list[list[Sized]]] = []
    last = -1
    for block, mine in zip(blocks, rounds, strict=True):
        if block.lane <= last or not turns:
            turns.append([])
        turns[-1].append(mine)
        last = block.lane
    for number, turn in enumerate(turns):
        _introduce(turn, number)


def _introduce(turn: "list[list[Sized]]", number: int) -> None:
    moving = [rounds for rounds in turn if any(r.moves for r in rounds)]
    for mine in moving:
        for r in mine:
            r.turn = number
            r.company = [others for others in moving if others is not mine]
            r.beats = sum(other.count for other in mine)


def equal_lanes(r: "Sized") -> int:
    """How many lanes do the same as this one at once, itself included; 0 if any does otherwise."""
    if not r.company:
        return 1
    mine = r.step.loading(r, r.nbytes)[:2]
    for others in r.company:
        if len(others) != 1:
            return 0
        (other,) = others
        same = other.count == r.count and other.reduce is not None and other.reduce == r.reduce
        if not same or not np.array_equal(other.nbytes, r.nbytes):
            return 0
        if other.step.loading(other, other.nbytes)[:2] != mine:
            return 0
    return 1 + len(r.company)


def crowded(r: "Sized") -> tuple[Across | Paths, Fold | None, np.ndarray]:
    """(resources, their fold, int64[U] ps of each for a round of this lane in its company)."""
    source, fold, _ = r.step.loading(r, r.nbytes)
    times = _times(r, (source, fold))
    if times is None:  # the others are not the same in parts that are the same
        source, fold = r.step.direct, None
        times = _times(r, (source, fold))
    assert times is not None
    return source, fold, times


def _times(r: "Sized", at: Source) -> np.ndarray | None:
    source = at[0]
    load = {reduces: _own(r, reduces, at) for reduces in (False, True)}
    own = load[False] + load[True]
    for others in r.company:
        for reduces in (False, True):
            beside = np.zeros(len(own), np.int64)
            for other in others:
                theirs = _theirs(other, reduces, at)
                if theirs is None:
                    return None
                beside += theirs
            load[reduces] = load[reduces] + np.minimum(own, -(-beside // r.beats))
    return sum(
        (needed_ps(load[reduces], source.rate(reduces)) for reduces in load),
        np.zeros(len(own), np.int64),
    )


def _own(r: "Sized", reduces: bool, at: Source) -> np.ndarray:
    """int64[U]: bytes of one round."""
    source, fold = at
    if r.reduce is not None and r.reduce != reduces:
        return np.zeros(len(source.used), np.int64)
    nbytes = r.nbytes if r.reduce is not None else np.where(r.block.reduce == reduces, r.each, 0)
    if fold is None and isinstance(source, Paths):
        return source.load(r.step.tiled(nbytes))
    return _load(r, source, r.step.like(nbytes) if fold is not None else nbytes)


def _load(r: "Sized", source: Across | Paths, nbytes) -> np.ndarray:
    if isinstance(source, Paths):
        return source.load(nbytes)
    return source.counts * nbytes if isinstance(nbytes, int) else r.step.across_load(nbytes)


def _theirs(other: "Sized", reduces: bool, at: Source) -> np.ndarray | None:
    """int64[U]: bytes of all rounds of another lane's block over the resources `at`; None if that
    differs between parts that `at` takes for equal.
    """
    source, fold = at
    if other.reduce is not None and other.reduce != reduces:
        return np.zeros(len(source.used), np.int64)
    nbytes = other.nbytes
    if other.reduce is None:
        nbytes = np.where(other.block.reduce == reduces, other.each, 0)
    theirs, its_fold, mine = other.step.loading(other, nbytes)
    load = _load(other, theirs, mine) * other.count
    if theirs is source:
        return load
    if (fold is None) == (its_fold is None) and (
        fold is None or its_fold is None or np.array_equal(fold.parts, its_fold.parts)
    ):
        return _matched(theirs.used, load, source.used)
    whole = np.zeros(source.resources.count, np.int64)
    whole[theirs.used] = load
    whole = whole if its_fold is None else its_fold.expand(whole)
    if fold is not None and not np.array_equal(fold.expand(whole), whole):
        return None
    return whole[source.used]


def _matched(used: np.ndarray, load: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Of a load on the resources `used` (ascending), that on those wanted."""
    if not len(used):
        return np.zeros(len(wanted), np.int64)
    place = np.minimum(np.searchsorted(used, wanted), len(used) - 1)
    return np.where(used[place] == wanted, load[place], 0)
