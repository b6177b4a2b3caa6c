"""Hardware numbers with their source: the entries of `device/specs/*.toml`, read and checked."""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from importlib import resources
from typing import Any, Literal, get_args

from . import units
from .errors import BadFile, BadInput

Status = Literal["published", "measured", "derived", "calibrated", "assumed"]
STATUSES: tuple[str, ...] = get_args(Status)
NEED_NOTE = ("derived", "calibrated", "assumed")  # how it came about has to be said

_TEXT_UNITS = {
    "bytes": (units.parse_bytes, "B"),
    "bytes/s": (units.parse_rate, "B/s"),
    "time": (units.parse_time, "ps"),
    "clock": (units.parse_clock, "Hz"),
}
_SCALED_UNITS = {"TFLOP/s": (10**12, "FLOP/s"), "Gbps": (125 * 10**6, "B/s")}
_KEYS = {"value", "unit", "source", "status", "note", "conflict"}


@dataclass(frozen=True)
class Number:
    """One hardware number: its value in the canonical unit, and where it comes from.

    `value` is in `unit` (B, B/s, ps, Hz, FLOP/s, or a plain name such as cycles); a list in the
    file is a tuple here. `text` is the value as its source prints it.
    """

    value: Any
    unit: str
    source: str
    status: Status
    note: str = ""
    conflict: str = ""
    text: str = ""
    section: str = ""


def _canonical(value: Any, unit: str) -> tuple[Any, str, str]:
    """(value, unit, text) of an entry in canonical units. Raises ValueError or BadInput."""
    if unit in _TEXT_UNITS:
        parse, canonical = _TEXT_UNITS[unit]
        if not isinstance(value, str):
            raise ValueError(f'value {value} needs text with a unit, such as "4KiB" or "1us"')
        return parse(value), canonical, value
    if isinstance(value, str):
        raise ValueError(f"value {value!r} is text, but unit {unit!r} takes a number")
    if unit in _SCALED_UNITS:
        factor, canonical = _SCALED_UNITS[unit]
        return int(Decimal(str(value)) * factor), canonical, f"{value:g} {unit}"
    frozen = _frozen(value)
    return frozen, unit, f"{value} {unit}"


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _check(entry: Mapping[str, Any]) -> None:
    missing = [key for key in ("value", "unit", "source", "status") if entry.get(key) in (None, "")]
    if missing:
        raise ValueError(f"{', '.join(missing)} missing")
    unknown = sorted(entry.keys() - _KEYS)
    if unknown:
        raise ValueError(f"unknown field {', '.join(unknown)}")
    if entry["status"] not in STATUSES:
        raise ValueError(f"status {entry['status']!r} is not one of {', '.join(STATUSES)}")
    if entry["status"] in NEED_NOTE and not entry.get("note"):
        raise ValueError(f"a number that is {entry['status']} needs a note")


def read_number(entry: Mapping[str, Any], where: str, section: str = "") -> Number:
    """A checked Number of one TOML entry. Raises BadFile naming `where` (file and key)."""
    try:
        _check(entry)
        value, unit, text = _canonical(entry["value"], entry["unit"])
    except (ValueError, BadInput) as error:
        raise BadFile(f"{where}: {error}") from None
    return Number(
        value=value, unit=unit, text=text, section=section,
        source=entry["source"], status=entry["status"],
        note=entry.get("note", ""), conflict=entry.get("conflict", ""),
    )  # fmt: skip


def read_toml(name: str) -> dict[str, Any]:
    """The parsed `device/specs/<name>.toml`. Raises BadFile when it is not TOML."""
    text = (resources.files("trnsim.device.specs") / f"{name}.toml").read_text("utf-8")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadFile(f"{name}.toml: {error}") from None


def read_entries(table: Mapping[str, Any], file: str, section: str) -> Iterator[tuple[str, Number]]:
    """(key, Number) of every entry of one section; a nested table gives keys `table.key`."""
    for key, entry in table.items():
        where = f"{file}: [{section}] {key}"
        if not isinstance(entry, Mapping):
            raise BadFile(f"{where}: not a table of value, unit, source and status")
        if "value" in entry or entry.keys() & _KEYS:
            yield key, read_number(entry, where, section)
        else:
            inner = read_entries(entry, file, f"{section}.{key}")
            yield from ((f"{key}.{name}", number) for name, number in inner)
