"""Numbers laid over the spec files: an overlay is a TOML file with tables per chip.

    [trn2.collective]
    link_efficiency = { value = 0.5, unit = "fraction", status = "calibrated", source = "...", ... }

Sections and entries have the form of the spec files. `trnsim calibrate` writes such files.
"""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import BadFile, BadInput
from .numbers import Number, read_entries

if TYPE_CHECKING:
    from .chip import Chip

Overlay = Mapping[str, Mapping[str, Number]]  # chip -> key -> number


def read_overlay(path: str | Path) -> Overlay:
    """The overlay in a file. Raises BadFile for one that cannot be read or is of another form."""
    try:
        text = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadFile(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    return parse_overlay(text, str(path))


def parse_overlay(text: str, name: str) -> Overlay:
    """The overlay in a text; `name` is what errors call it."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadFile(f"{name}: {error}") from None
    return {chip: _chip_numbers(chip, sections, name) for chip, sections in tables.items()}


def _chip_numbers(chip: str, sections: object, name: str) -> dict[str, Number]:
    numbers: dict[str, Number] = {}
    for section, entries in (sections if isinstance(sections, Mapping) else {chip: None}).items():
        if not isinstance(entries, Mapping) or "value" in entries:
            raise BadFile(f"{name}: {section} stands outside a section, such as [trn2.collective]")
        numbers |= dict(read_entries(entries, f"{name}: {chip}", section))
    return numbers


def apply_overlay(chip: "Chip", overlay: Overlay | str | Path) -> "Chip":
    """The chip with the overlay's numbers for it. Raises BadFile for a number it does not have."""
    from .chip import SPEC_FILES, with_number

    named = isinstance(overlay, str | Path)
    where, tables = (str(overlay), read_overlay(overlay)) if named else ("overlay", overlay)
    unknown = sorted(tables.keys() - SPEC_FILES.keys())
    if unknown:
        raise BadFile(f"{where}: {BadInput('chip', unknown[0], SPEC_FILES)}")
    for key, number in tables.get(chip.name, {}).items():
        try:
            known = chip.number(key)
        except BadInput as error:
            raise BadFile(f"{where}: [{chip.name}] {error}") from None
        if known.unit != number.unit:
            raise BadFile(f"{where}: [{chip.name}] {key}: unit {number.unit} is not {known.unit}")
        chip = with_number(chip, key, replace(number, section=known.section))
    return chip


def overlay_text(overlay: Overlay, heading: str = "") -> str:
    """The overlay as TOML; `parse_overlay` reads it back."""
    lines = [f"# {line}" for line in heading.splitlines()]
    for chip, numbers in overlay.items():
        for section, mine in groupby(numbers.items(), lambda item: item[1].section):
            lines += ["", f"[{chip}.{section}]"]
            lines += [f"{key.rpartition('.')[2]} = {_entry(number)}" for key, number in mine]
    return "\n".join(lines) + "\n"


_UNITS = {"B": "bytes", "B/s": "bytes/s", "ps": "time", "Hz": "clock"}


def _entry(number: Number) -> str:
    text = number.unit in _UNITS
    fields = {
        "value": number.text if text else number.value,
        "unit": _UNITS.get(number.unit, number.unit),
        "status": number.status,
        "source": number.source,
        "note": number.note,
    }
    inside = ", ".join(f"{key} = {json.dumps(value)}" for key, value in fields.items() if value)
    return f"{{ {inside} }}"
