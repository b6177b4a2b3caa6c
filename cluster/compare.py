"""Two files of results side by side: nccom-test's and a simulated one, or any two of either.

Bandwidths are computed anew from size and time, in GB/s of 1e9 bytes. nccom-test prints "GB/s", but
older releases (those with a column `time(us)`) divide by 2**30: what the file did is found from its
own numbers and said.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trnsim.device.errors import BadInput

from .nccom_files import Result, Results

GB, GIB = 1e9, 2.0**30


@dataclass(frozen=True)
class Pair:
    """The same size and type in both files. Bandwidths in GB/s (1e9); None if nothing says them."""

    nbytes: int
    dtype: str
    times_us: tuple[float, float]
    algbws: tuple[float, float]
    busbws: tuple[float, float] | None
    algorithms: tuple[str, str]

    @property
    def ratio(self) -> float:
        """Time of the second file over time of the first."""
        first, second = self.times_us
        return second / first if first else math.inf


@dataclass(frozen=True)
class Comparison:
    """Rows in both files, in the order of the first, and how many each has that the other lacks."""

    first: Results
    second: Results
    pairs: tuple[Pair, ...]
    only: tuple[int, int]
    units: tuple[str, str]

    @property
    def mean_ratio(self) -> float:
        """The geometric mean of the ratios; 0 or inf if a time is 0."""
        ratios = [pair.ratio for pair in self.pairs]
        if not all(0 < ratio < math.inf for ratio in ratios):
            return min(ratios) if min(ratios) == 0 else math.inf
        return math.exp(sum(map(math.log, ratios)) / len(ratios))

    @property
    def worst(self) -> Pair:
        """The pair that is furthest from 1, as a factor."""
        return max(self.pairs, key=lambda pair: _distance(pair.ratio))


def _distance(ratio: float) -> float:
    return abs(math.log(ratio)) if 0 < ratio < math.inf else math.inf


def compare(first: Results, second: Results) -> Comparison:
    """Join on size and, where both name one, type. Raises BadInput if no row is in both."""
    waiting: dict[int, list[Result]] = defaultdict(list)
    for row in second.rows:
        waiting[row.nbytes].append(row)
    joined = []
    for row in first.rows:
        match = next((r for r in waiting[row.nbytes] if _same_type(row, r)), None)
        if match is not None:
            waiting[row.nbytes].remove(match)
            joined.append((row, match))
    if not joined:
        allowed = f"a size and type of {first.path}: {_sizes(first)}"
        raise BadInput(f"results of {second.path}", _sizes(second), allowed)
    pairs = tuple(_pair(a, b, _factor(first, second, (a, b))) for a, b in joined)
    only = (len(first.rows) - len(pairs), len(second.rows) - len(pairs))
    return Comparison(first, second, pairs, only, (unit_of(first), unit_of(second)))


def _same_type(a: Result, b: Result) -> bool:
    return not a.dtype or not b.dtype or a.dtype == b.dtype


def _sizes(results: Results, most: int = 6) -> str:
    named = [f"{row.nbytes} B {row.dtype}".strip() for row in results.rows[:most]]
    return ", ".join(named + (["..."] if len(results.rows) > most else []))


def _pair(a: Result, b: Result, factor: float | None) -> Pair:
    algbws = (rate(a), rate(b))
    busbws = None if factor is None else (algbws[0] * factor, algbws[1] * factor)
    times, names = (a.time_us, b.time_us), (a.algorithm, b.algorithm)
    return Pair(a.nbytes, a.dtype or b.dtype, times, algbws, busbws, names)


def rate(row: Result) -> float:
    """GB/s (1e9) from size and time alone."""
    return row.nbytes / row.time_us * 1e6 / GB if row.time_us else 0.0


def _factor(first: Results, second: Results, rows: tuple[Result, Result]) -> float | None:
    """busbw over algbw: of the simulated row, which is not rounded, else the best resolved one."""
    simulated = [r for r, file in zip(rows, (first, second), strict=True) if file.simulated]
    printed = [row for row in simulated if row.algbw and row.busbw]
    printed = printed or [r for r in (*first.rows, *second.rows) if r.algbw and r.busbw]
    if not printed:
        return None
    best = max(printed, key=lambda row: row.algbw or 0)
    return (best.busbw or 0) / (best.algbw or 1)


def unit_of(results: Results) -> str:
    """A sentence: what the file's "GB/s" is, found by computing it anew from size and time."""
    if results.simulated:
        about = results.about or {}
        what = ", ".join(str(about[key]) for key in ("operation", "site") if key in about)
        return f"{results.path}: simulated, {what}, N={about.get('N', '?')}; GB/s is 1e9"
    printed = [row for row in results.rows if row.algbw and row.time_us]
    if not printed:
        return f"{results.path}: prints no bandwidth; computed from size and time (GB/s is 1e9)"
    best = max(printed, key=lambda row: row.algbw or 0)
    algbw, true = best.algbw or 0.0, rate(best)
    is_gib = sum(_far(row, GIB) for row in printed) < sum(_far(row, GB) for row in printed)
    off = min(_far(best, GIB), _far(best, GB))
    if off > 0.02:
        return (
            f"{results.path}: prints {algbw:.2f} GB/s for {best.nbytes} B in {best.time_us:g} us, "
            f"which is neither GB/s ({true:.2f}) nor GiB/s ({true * GB / GIB:.2f}): "
            "computed anew from size and time"
        )
    if is_gib:
        return (
            f'{results.path}: assumed GiB/s under the name "GB/s": {best.nbytes} B in '
            f"{best.time_us:g} us is {true:.2f} GB/s = {true * GB / GIB:.2f} GiB/s, it prints "
            f"{algbw:.2f}; computed anew from size and time"
        )
    return f"{results.path}: GB/s is 1e9, as its sizes and times give; computed anew from them"


def _far(row: Result, unit: float) -> float:
    """Relative difference of the printed algbw from size over time in this unit."""
    computed = row.nbytes / row.time_us * 1e6 / unit
    return abs((row.algbw or 0) - computed) / computed if computed else 0.0


def document(comparison: Comparison) -> dict[str, Any]:
    """The comparison as plain data."""
    return {
        "first": comparison.first.path,
        "second": comparison.second.path,
        "units": list(comparison.units),
        "mean_ratio": comparison.mean_ratio,
        "only_in_first": comparison.only[0],
        "only_in_second": comparison.only[1],
        "pairs": [_plain(pair) for pair in comparison.pairs],
    }


def _plain(pair: Pair) -> dict[str, Any]:
    busbws: Sequence[float | None] = pair.busbws or (None, None)
    return {
        "size(B)": pair.nbytes,
        "type": pair.dtype,
        "time(us)": list(pair.times_us),
        "ratio": pair.ratio,
        "algbw(GB/s)": list(pair.algbws),
        "busbw(GB/s)": list(busbws),
        "algorithm": list(pair.algorithms),
    }
