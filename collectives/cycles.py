"""Many repetitions of a round at once, where every rank passes on to one other what it gets.

Transfer i follows itself after `busy[i]` (its channel) and lets the transfer of its destination
start after `hop[i]` (the data), so k repetitions later it starts at the length of a longest path

    S_i(k) = max over j <= k of  S_(i-j)(0) + hop_(i-j) + ... + hop_(i-1) + (k - j) * most busy,

j hops along the cycle of transfers, and the rest of the time at the busiest transfer on the way.
For each value v of `busy`, the j whose way is at most and somewhere v busy are a window, and the
best one is a maximum over it. So the cost grows with the number of different values, not with k.
"""

import numpy as np

VALUES = 16  # different values of busy, at most
LARGEST = 1 << 18  # transfers, at most: the maxima over windows take memory


def later(
    start: np.ndarray, busy: np.ndarray, hop: np.ndarray, following: np.ndarray, steps: int
) -> np.ndarray | None:
    """int64: when each transfer starts, `steps` repetitions after `start`; None if it is not known.

    following: int, a permutation: the transfer that waits for each one's data. All times are ps.
    """
    if len(start) > LARGEST:
        return None
    values = np.unique(busy)
    order = _cycles(following) if len(values) <= VALUES else None
    if order is None or order.shape[1] < 2:
        return None
    now, rest, most = start[order], steps, order.shape[1] - 1
    while rest:
        step = min(rest, most)
        now = _jump(now, busy[order], hop[order], values, step)
        rest -= step
    result = np.empty_like(start)
    result[order] = now
    return result


def _cycles(following: np.ndarray) -> np.ndarray | None:
    """int[C, L]: the cycles of a permutation, if all are of one length."""
    after = following.tolist()
    seen, cycles = bytearray(len(after)), []
    for first in range(len(after)):
        cycle = []
        while not seen[first]:
            seen[first] = 1
            cycle.append(first)
            first = after[first]
        if cycle:
            cycles.append(cycle)
    return np.array(cycles) if len({len(c) for c in cycles}) == 1 else None


def _jump(
    start: np.ndarray, busy: np.ndarray, hop: np.ndarray, values: np.ndarray, steps: int
) -> np.ndarray:
    """int64[C, L] starts after fewer steps than a cycle is long; row c is a cycle in order."""
    length = start.shape[1]
    start, busy, hop = (np.concatenate([a, a], axis=1) for a in (start, busy, hop))
    at = np.arange(2 * length)
    gone = np.cumsum(hop, axis=1) - hop  # hops before each
    best = np.full(start.shape, np.iinfo(np.int64).min)
    for value in values.tolist():
        above = np.maximum.accumulate(np.where(busy > value, at, -1), axis=1)
        equal = np.maximum.accumulate(np.where(busy == value, at, -1), axis=1)
        low = np.maximum(at - steps, above + 1)
        rows, columns = np.nonzero((equal >= low) & (at >= length))
        if not rows.size:
            continue
        window = _most(start - gone + at * value, rows, low[rows, columns], equal[rows, columns])
        found = window + gone[rows, columns] + (steps - columns) * value
        best[rows, columns] = np.maximum(best[rows, columns], found)
    return best[:, length:]


def _most(table: np.ndarray, rows: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """int64: the maximum of table[row, low:high + 1] of each query, by those of 2**k entries."""
    level = np.frexp((high - low + 1).astype(float))[1] - 1
    result = np.empty(len(rows), np.int64)
    for k in range(int(level.max()) + 1):
        mine = np.flatnonzero(level == k)
        row, last = rows[mine], high[mine] - (1 << k) + 1
        result[mine] = np.maximum(table[row, low[mine]], table[row, last])
        width = table.shape[1] - (1 << k)
        table = np.maximum(table[:, :width], table[:, 1 << k :])
    return result
