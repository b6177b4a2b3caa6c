"""Human units at the edges: parsed and printed here, and nowhere else.

Inside, virtual time is integer picoseconds, sizes are integer bytes, rates are integer bytes per
second and clocks are integer hertz. `GB` is 1e9 bytes and `GiB` is 2**30 bytes, never mixed.
"""

import re
from decimal import Decimal

from .errors import BadInput

PS_PER_S = 10**12

_BYTES = {
    "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip
_TIMES = {"ps": 1, "ns": 10**3, "us": 10**6, "ms": 10**9, "s": 10**12}
_DURATIONS = {"s": 1, "min": 60, "h": 3600, "days": 86_400}
_RATES = {f"{unit}/s": factor for unit, factor in _BYTES.items()} | {
    "Gbps": 125 * 10**6,
    "Tbps": 125 * 10**9,
}
_CLOCKS = {"Hz": 1, "kHz": 10**3, "MHz": 10**6, "GHz": 10**9}
_NUMBER = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*([A-Za-z/]+)\s*", re.IGNORECASE)


def _parse(text: str, units: dict[str, int], field: str) -> int:
    match = _NUMBER.fullmatch(str(text))
    if match is None or match.group(2) not in units:
        raise BadInput(field, text, f"a number with a unit of {', '.join(units)}")
    exact = Decimal(match.group(1)) * units[match.group(2)]
    return int(exact.to_integral_value())


def parse_bytes(text: str, field: str = "size") -> int:
    """`"64MiB"` to bytes. Raises BadInput for a bare number or an unknown unit."""
    return _parse(text, _BYTES, field)


def parse_time(text: str, field: str = "time") -> int:
    """`"15us"` to picoseconds. Raises BadInput for a bare number or an unknown unit."""
    return _parse(text, _TIMES, field)


def parse_duration(text: str, field: str = "duration") -> float:
    """`"12h"` to seconds. Raises BadInput for a bare number or an unknown unit."""
    match = _NUMBER.fullmatch(str(text))
    if match is None or match.group(2) not in _DURATIONS:
        raise BadInput(field, text, f"a number with a unit of {', '.join(_DURATIONS)}")
    return float(match.group(1)) * _DURATIONS[match.group(2)]


def format_duration(seconds: float) -> str:
    """Seconds for people: `2.5 h`."""
    for unit, size in reversed(_DURATIONS.items()):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def parse_rate(text: str, field: str = "bandwidth") -> int:
    """`"256GB/s"` to bytes per second. Raises BadInput for a bare number or an unknown unit."""
    return _parse(text, _RATES, field)


def parse_clock(text: str, field: str = "clock") -> int:
    """`"2.4GHz"` to hertz. Raises BadInput for a bare number or an unknown unit."""
    return _parse(text, _CLOCKS, field)


def transfer_ps(nbytes: int, bytes_per_s: int) -> int:
    """Picoseconds to move `nbytes` at `bytes_per_s`, rounded up, in exact integers."""
    return -(-int(nbytes) * PS_PER_S // int(bytes_per_s))


def cycles_ps(cycles: int, hertz: int) -> int:
    """Picoseconds of `cycles` of a clock of `hertz`, rounded up, in exact integers."""
    return -(-int(cycles) * PS_PER_S // int(hertz))


def _scaled(value: float, steps: list[tuple[str, float]]) -> str:
    for unit, factor in steps:
        if abs(value) >= factor:
            return f"{value / factor:.4g} {unit}"
    unit, factor = steps[-1]
    return f"{value / factor:.4g} {unit}"


def format_time(ps: int | float) -> str:
    """Picoseconds for people: `12.35 us`."""
    return _scaled(ps, [("s", 1e12), ("ms", 1e9), ("us", 1e6), ("ns", 1e3), ("ps", 1)])


def format_bytes(nbytes: int | float) -> str:
    """Bytes for people, in binary units: `24 GiB`."""
    return _scaled(
        nbytes, [("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1)]
    )


def format_rate(bytes_per_s: int | float) -> str:
    """Bytes per second for people, in decimal units: `256 GB/s`."""
    return _scaled(
        bytes_per_s, [("TB/s", 1e12), ("GB/s", 1e9), ("MB/s", 1e6), ("KB/s", 1e3), ("B/s", 1)]
    )
