"""Finished points on disk: appended one by one, so that an interruption loses only what is running.

A journal is a sequence of wire documents, each after its length (8 bytes, little-endian). What was
being written when a process died is cut off when the journal is opened again. A point is known by a
digest of its kind, its options and the simulator's own sources: after a change of the simulator,
points are run again, and old ones stay unused.
"""

import fcntl
import hashlib
import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

from trnsim.device.errors import BadFile

from .. import wire

_LENGTH = struct.Struct("<Q")
PACKAGES = ("device", "collectives", "cluster")


@wire.register
@dataclass(frozen=True, slots=True)
class PointResult:
    """What a point gave: `values` by column, or `refused`, the reason why it cannot be."""

    key: str
    values: dict[str, Any]
    refused: str = ""


def key_of(run: str, options: Mapping[str, Any]) -> str:
    """The digest of a point: equal for equal options, in any order, and contents of files."""
    lists = (value if isinstance(value, list) else [value] for value in options.values())
    names = [name for each in lists for name in each if isinstance(name, str)]
    files = sorted(filter(None, map(_content, names)))
    text = json.dumps([run, dict(options), files, fingerprint()], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _content(name: str) -> str | None:
    """The digest of a file, or of a model's folder; None if there is none."""
    try:
        path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except (OSError, ValueError):
        return None


@cache
def fingerprint() -> str:
    """A digest of the simulator's sources and numbers."""
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for package in PACKAGES:
        files = (p for p in (root / package).rglob("*") if p.suffix in (".py", ".toml", ".json"))
        for path in sorted(files):
            digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


class Journal:
    """Results by key; `add` writes one to the disk before it returns. One process at a time.

    Raises BadFile for a file that is no journal, or that another process has open.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.results: dict[str, PointResult] = {}
        self._file = _opened(path)
        try:
            self._read()
        except BaseException:
            self._file.close()
            raise

    def add(self, result: PointResult) -> None:
        """Keep a result."""
        document = wire.encode(result)
        self._file.write(_LENGTH.pack(len(document)) + document)
        self._file.flush()
        os.fsync(self._file.fileno())
        self.results[result.key] = result

    def _read(self) -> None:
        """Take what is whole, and cut off what is not."""
        data = self._file.read()
        at = 0
        while at + _LENGTH.size <= len(data):
            (length,) = _LENGTH.unpack_from(data, at)
            start, end = at + _LENGTH.size, at + _LENGTH.size + length
            if end > len(data):
                break
            result = wire.decode(data[start:end], f"{self.path}: at byte {start}")
            if not isinstance(result, PointResult):
                raise BadFile(f"{self.path}: holds a {type(result).__name__}, not points")
            self.results[result.key] = result
            at = end
        if data and not at:
            raise BadFile(f"{self.path}: not a journal of a study")
        self._file.truncate(at)
        self._file.seek(at)

    def __enter__(self) -> "Journal":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()


def _opened(path: Path) -> Any:
    """The file for reading and appending, locked. Raises BadFile."""
    try:
        file = open(path, "a+b")
    except OSError as error:
        raise BadFile(f"{path}: cannot be opened: {error.strerror}") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise BadFile(f"{path}: another study is running in this folder") from None
    file.seek(0)
    return file
