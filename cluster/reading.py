"""Checked reading of the tables of a user's file: a mistake is one line that says where it is."""

import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trnsim.device.errors import BadFile, BadInput, TrnsimError
from trnsim.device.units import parse_rate, parse_time


def read_text(path: str | Path) -> str:
    """The text of a file. Raises BadFile when it is not there or not text."""
    try:
        return Path(path).read_text("utf-8")
    except OSError as error:
        raise BadFile(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise BadFile(f"{path}: is not a text file (UTF-8)") from None


def read_toml_file(path: str | Path) -> dict[str, Any]:
    """A TOML file. Raises BadFile with line and column of what is no TOML."""
    try:
        return tomllib.loads(read_text(path))
    except tomllib.TOMLDecodeError as error:
        raise BadFile(f"{path}: {error}") from None


class Table:
    """A table of a file. Keys are taken one by one; `done` refuses those that nobody took.

    where: file and place, the start of every message. All methods raise BadInput with the field,
    its value, what is allowed and the nearest valid choice.
    """

    def __init__(self, data: object, where: str, keys: Iterable[str]) -> None:
        if not isinstance(data, Mapping):
            raise BadInput(where, data, "a table")
        self.data, self.where, self.keys = data, where, tuple(keys)
        for key in data:
            if key not in self.keys:
                raise BadInput(f"{where}: key", key, self.keys)

    def __contains__(self, key: str) -> bool:
        return key in self.data

    def field(self, key: str) -> str:
        """The name of a field in messages."""
        return f"{self.where}: {key}"

    def raw(self, key: str, default: Any = None) -> Any:
        """The value as it is in the file."""
        return self.data.get(key, default)

    def need(self, key: str, allowed: str) -> Any:
        """The value of a key that has to be there."""
        if key not in self.data:
            raise BadInput(self.field(key), "(missing)", allowed)
        return self.data[key]

    def one_of(self, keys: Iterable[str]) -> str:
        """The only key of `keys` that is given."""
        found = [key for key in keys if key in self.data]
        if len(found) != 1:
            given = " and ".join(found) or "(none)"
            raise BadInput(self.where, given, f"exactly one of {', '.join(keys)}")
        return found[0]

    def table(self, key: str, keys: Iterable[str], default: object = None) -> "Table":
        """The table under a key."""
        data = self.data.get(key, default)
        return Table("(missing)" if data is None else data, f"{self.where}: [{key}]", keys)

    def tables(self, key: str, keys: Iterable[str]) -> list["Table"]:
        """The tables of `[[key]]`, numbered from 1 in messages; none if it is left out."""
        data, keys = self.data.get(key, []), tuple(keys)
        if not isinstance(data, list):
            raise BadInput(self.field(key), data, f"tables [[...{key}]]")
        return [Table(one, f"{key} {i}", keys) for i, one in enumerate(data, 1)]

    def flag(self, key: str) -> bool:
        """true or false; false if left out."""
        value = self.data.get(key, False)
        if not isinstance(value, bool):
            raise BadInput(self.field(key), value, "true or false")
        return value

    def integer(self, key: str, least: int, default: int | None = None) -> int:
        """A whole number of at least `least`."""
        value = self.data.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            shown = "(missing)" if value is None else value
            raise BadInput(self.field(key), shown, f"a whole number, {least} or more")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Text."""
        value = self.data.get(key, default)
        if not isinstance(value, str):
            raise BadInput(self.field(key), "(missing)" if value is None else value, "text")
        return value

    def texts(self, key: str, default: list[str] | None = None) -> list[str]:
        """A list of texts."""
        value = self.data.get(key, default)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise BadInput(self.field(key), "(missing)" if value is None else value, "texts in [ ]")
        return value

    def rate(self, key: str) -> int:
        """Bytes per second, from text with a unit."""
        return rate(self.need(key, RATE), self.field(key))

    def time(self, key: str, default: str | None = None) -> int:
        """Picoseconds, from text with a unit."""
        given = self.data.get(key, default)
        return time(self.need(key, TIME) if given is None else given, self.field(key))

    def each(self, key: str, read: Callable[[Any, str], int], default: str | None = None):
        """One value, or a list of them, read by `rate` or `time`."""
        given = self.data.get(key, default)
        given = self.need(key, "text with a unit") if given is None else given
        if isinstance(given, list):
            return [read(item, f"{self.field(key)}[{i}]") for i, item in enumerate(given)]
        return read(given, self.field(key))


RATE = 'text with a unit, as "256GB/s" or "200Gbps"'
TIME = 'text with a unit, as "1us" or "500ns"'


def rate(value: object, field: str) -> int:
    """Bytes per second. Raises BadInput for a bare number, an unknown unit and for zero."""
    if not isinstance(value, str):
        raise BadInput(field, value, RATE, _with_unit(value, "GB/s"))
    found = parse_rate(value, field)
    if found < 1:
        raise BadInput(field, value, "a rate above zero")
    return found


def time(value: object, field: str) -> int:
    """Picoseconds. Raises BadInput for a bare number and an unknown unit."""
    if not isinstance(value, str):
        raise BadInput(field, value, TIME, _with_unit(value, "us"))
    return parse_time(value, field)


def _with_unit(value: object, unit: str) -> str | None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return f'"{value}{unit}"' if number else None


@contextmanager
def placed(where: str) -> Iterator[None]:
    """Errors of the code inside say first where in the file their cause is."""
    try:
        yield
    except TrnsimError as error:
        if not str(error).startswith(where):
            error.args = (f"{where}: {error}",)
        raise
