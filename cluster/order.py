"""The order in which a rank runs its kernels: list scheduling by critical path.

Collectives start as soon as their operands exist and run beside compute. Among the kernels whose
operands are there, the one with the longest remaining path goes first; a kernel that waits for a
collective in flight lets others pass. This is what keeps gradient all-reduces off the critical
path. The order is fixed at compile time and the same for all ranks, so ranks cannot call
collectives in different orders. (R. L. Graham, Bounds on multiprocessing timing anomalies, 1969,
is the classical analysis of list schedules.)
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Item:
    """One thing to run: the values it reads and writes, its estimated time, where it runs.

    stream: of a collective; None for compute.
    """

    reads: tuple[int, ...]
    writes: tuple[int, ...]
    duration: int
    stream: int | None = None


def list_schedule(items: Sequence[Item]) -> list[int]:
    """The indices of `items` in the order to run them. Durations are estimates in ps.

    Deterministic: ties go to the earlier index. Dependencies (reads of written values) hold.
    """
    producers = {value: i for i, item in enumerate(items) for value in item.writes}
    needs = [
        sorted({producers[v] for v in item.reads if v in producers} - {i})
        for i, item in enumerate(items)
    ]
    priority = _remaining_path(items, needs)
    consumers: list[list[int]] = [[] for _ in items]
    for i, sources in enumerate(needs):
        for source in sources:
            consumers[source].append(i)
    return _run(items, needs, consumers, priority)


def _remaining_path(items: Sequence[Item], needs: list[list[int]]) -> list[int]:
    """Longest path from the start of each item to the end. `needs` points backwards."""
    path = [item.duration for item in items]
    for i in reversed(range(len(items))):
        for source in needs[i]:
            path[source] = max(path[source], items[source].duration + path[i])
    return path


def _run(
    items: Sequence[Item],
    needs: list[list[int]],
    consumers: list[list[int]],
    priority: list[int],
) -> list[int]:
    missing = [len(sources) for sources in needs]
    available = [0] * len(items)
    waiting: list[tuple[int, int, int]] = []  # (available at, -priority, index): not ready yet
    ready: list[tuple[int, int]] = []  # compute that could run now
    now = 0
    free: dict[int, int] = {}  # when each stream is
    order: list[int] = []

    def finish(index: int, end: int) -> None:
        order.append(index)
        for consumer in consumers[index]:
            available[consumer] = max(available[consumer], end)
            missing[consumer] -= 1
            if missing[consumer] == 0:
                release(consumer)

    def release(index: int) -> None:
        heapq.heappush(waiting, (available[index], -priority[index], index))

    for index, count in enumerate(missing):
        if count == 0:
            release(index)
    while waiting or ready:
        if not ready:
            now = max(now, waiting[0][0])
        while waiting and waiting[0][0] <= now:
            _, key, index = heapq.heappop(waiting)
            stream = items[index].stream
            if stream is not None:
                free[stream] = max(now, free.get(stream, 0)) + items[index].duration
                finish(index, free[stream])
            else:
                heapq.heappush(ready, (key, index))
        if ready:
            _, index = heapq.heappop(ready)
            now += items[index].duration
            finish(index, now)
    return order
