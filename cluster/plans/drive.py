"""Advances the clocks of all stages until every task is done.

Stages only wait for each other's messages, so they may be advanced in any order. Here a stage runs
when another one needs its message: how far each of them is when the first stage has done with a
microbatch then follows from the program alone. If everything - tasks to come, messages, times - is
there as it was some microbatches before, but for one shift in time of all ranks that meet, then so
is everything after it: these laps are counted, not run, for as long as all stages' tasks are the
same. This is exact.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from trnsim.device.errors import CollectiveMismatch

from .places import Array, connected
from .program import Task
from .stage_clock import Message, StageClock

Mail = dict[Message, deque[Array]]
"""Arrivals of messages that nobody has received yet, by message; none is empty."""


def drive(clocks: Sequence[StageClock], mail: Mail, laps: bool) -> int:
    """Runs every stage to its end. With `laps`, what repeats is not run again: for how many
    microbatches that was, is the result.

    Raises CollectiveMismatch for stages that wait for each other in a cycle, or for a message that
    nobody sends or receives.
    """
    runs = _Runs(clocks, mail)
    found = _Laps(runs)
    for number in range(len(clocks)):
        runs.finish(number, found.watch if laps and number == 0 else lambda: None)
    if mail:
        channel, microbatch, source, target = next(iter(mail))
        raise CollectiveMismatch(
            f"stage {target} never receives {channel} of microbatch {microbatch},"
            f" which stage {source} sends"
        )
    return found.counted


class _Runs:
    """The stages under way: `waits` has the message that each of them waits for."""

    def __init__(self, clocks: Sequence[StageClock], mail: Mail) -> None:
        self.clocks, self.mail = clocks, mail
        self.waits: list[Message | None] = [None] * len(clocks)
        self._number = {clock.code.stage: n for n, clock in enumerate(clocks)}
        self._runs = [clock.run() for clock in clocks]

    def finish(self, number: int, watch: Callable[[], None]) -> None:
        """Runs a stage to its end, and others as far as it needs them. `watch` is called after
        each of its tasks."""
        path = [number]  # every stage but the first runs for the message that the one before needs
        while path:
            try:
                self._go_on(path[-1])
            except StopIteration:
                ended = path.pop()
                if path and self.waits[path[-1]] not in self.mail:
                    raise CollectiveMismatch(self._story([*path, ended])) from None
                continue
            wanted = self.waits[path[-1]]
            if len(path) > 1 and self.waits[path[-2]] in self.mail:
                path.pop()
            elif wanted is None:
                if len(path) == 1:
                    watch()
            elif wanted not in self.mail:
                source = self._number.get(wanted[2], -1)
                if source in path:
                    raise CollectiveMismatch(self._story(path[path.index(source) :], cycle=True))
                if source < 0:
                    raise CollectiveMismatch(self._story(path))
                path.append(source)

    def _go_on(self, number: int) -> None:
        """Runs a stage to the end of a task, or to a message that is not there."""
        wanted, run = self.waits[number], self._runs[number]
        if wanted is not None and wanted not in self.mail:
            return
        self.waits[number] = None
        message = next(run) if wanted is None else run.send(self._taken(wanted))
        while message in self.mail:
            message = run.send(self._taken(message))
        self.waits[number] = message

    def _taken(self, message: Message) -> Array:
        arrivals = self.mail[message]
        arrival = arrivals.popleft()
        if not arrivals:
            del self.mail[message]
        return arrival

    def _story(self, path: Sequence[int], cycle: bool = False) -> str:
        """What stages wait for, one after another."""
        story = []
        for number in path:
            message, task = self.waits[number], self.clocks[number].task
            if message is not None and task is not None:
                channel, microbatch, source, target = message
                story.append(
                    f"stage {target} in {task.kind} waits for {channel} of microbatch {microbatch}"
                    f" from stage {source}"
                )
        if cycle:
            return "stages wait in a cycle: " + "; ".join(story)
        return f"{story[-1]}, which has ended without sending it"


@dataclass(frozen=True)
class _Mark:
    """Where all stages stand when the first one has done with a microbatch."""

    microbatch: int
    time: Array
    state: tuple
    tasks: tuple[int, ...]


class _Laps:
    """Looks for a state that was there before, runs one lap from it, and counts those that follow.

    States are looked up by their hashes; a lap that does not end as it began is one lap.
    """

    def __init__(self, runs: _Runs) -> None:
        self.runs = runs
        tasks = enumerate(runs.clocks[0].tasks)
        last = {task.microbatch: index for index, task in tasks if task.microbatch >= 0}
        self.ends = {index: microbatch for microbatch, index in last.items()}
        self.seen: dict[int, int] = {}
        self.begin: _Mark | None = None
        self.length = self.counted = 0

    def watch(self) -> None:
        """Called after each task of the first stage."""
        microbatch = self.ends.get(self.runs.clocks[0].index - 1)
        if microbatch is None:
            return
        if self.begin is None:
            mark = self._mark(microbatch)
            before = self.seen.setdefault(hash(mark.state), microbatch)
            length = microbatch - before
            if length and microbatch + 2 * length in self.ends.values():  # one more comes after it
                self.begin, self.length = mark, length
                for clock in self.runs.clocks:
                    clock.open_lap()
        elif microbatch == self.begin.microbatch + self.length:
            self._close(self.begin, self._mark(microbatch))
            self.ends.clear()

    def _mark(self, microbatch: int) -> _Mark:
        clocks, mail = self.runs.clocks, self.runs.mail
        time = clocks[0].now
        now = {clock.code.stage: clock.now for clock in clocks}
        letters = sorted(
            (
                (channel, of - microbatch, source, target),
                tuple((np.maximum(arrival, now[target]) - time).tobytes() for arrival in arrivals),
            )
            for (channel, of, source, target), arrivals in mail.items()
        )
        state = tuple(
            (clock.state(time, microbatch), wanted and (wanted[0], wanted[1] - microbatch))
            for clock, wanted in zip(clocks, self.runs.waits, strict=True)
        )
        tables = {key: rows for clock in clocks for key, rows in clock.steps.tables.items()}
        apart = time - time[connected(time.size, tables.values())]
        return _Mark(
            microbatch,
            time,
            (apart.tobytes(), state, *letters),
            tuple(clock.index for clock in clocks),
        )

    def _close(self, begin: _Mark, end: _Mark) -> None:
        """Counts the lap for all that are like it."""
        clocks, waits = self.runs.clocks, self.runs.waits
        counts = [after - before for before, after in zip(begin.tasks, end.tasks, strict=True)]
        more = 0
        if begin.state == end.state:
            more = min(
                repeats(clock.tasks, clock.index, count, self.length)
                for clock, count in zip(clocks, counts, strict=True)
            )
        later = self.counted = more * self.length
        shift = more * (end.time - begin.time)
        for number, (clock, count) in enumerate(zip(clocks, counts, strict=True)):
            clock.close_lap(more, count, later, shift)
            wanted = waits[number]
            waits[number] = wanted and (wanted[0], wanted[1] + later, *wanted[2:])
        letters = list(self.runs.mail.items())
        self.runs.mail.clear()
        for (channel, of, source, target), arrivals in letters:
            moved = deque(arrival + shift for arrival in arrivals)
            self.runs.mail[channel, of + later, source, target] = moved


def repeats(tasks: Sequence[Task], index: int, count: int, microbatches: int) -> int:
    """How often the `count` tasks before `index` come again, each time `microbatches` later.

    The task after the last of them is the same too: a stage may be in the middle of it.
    """
    if count == 0:
        return 0
    same = 0
    for before, after in zip(tasks[index - count :], tasks[index:], strict=False):
        if (
            before.body is not after.body
            or before.microbatch + microbatches != after.microbatch
            or (before.kind, before.chunk) != (after.kind, after.chunk)
        ):
            break
        same += 1
    return max(0, same - 1) // count
