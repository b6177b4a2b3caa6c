"""Messages and files: msgpack with a version and a schema. No pickle.

A document is a msgpack header followed by a msgpack body:

    header  {format: "trnsim", version, schema: {class: [field, ...]}, length, crc32}
    body    plain msgpack, where every array starts with a tag: list, tuple, dict, array, ...

Dataclasses travel as the values of their fields, in the order that the header's schema states, so
that a file says by itself what is in it and a class that has changed since is noticed. Classes are
named in one registry: `register`. Arrays are (dtype name, shape, bytes), little-endian.
"""

import dataclasses
import math
import os
import secrets
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import ml_dtypes
import msgpack
import numpy as np

from trnsim.device.errors import BadFile
from trnsim.device.ops import ir

FORMAT = "trnsim"
VERSION = 1

_LIST, _TUPLE, _DICT, _ARRAY, _SCALAR, _OBJECT = range(6)
_BIN_LIMIT = 1 << 30  # msgpack's bin holds less than 4 GiB: longer arrays travel in pieces
_HEADER_LIMIT = 1 << 20
_NATIVE_NAMES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64", "complex64", "complex128",
)  # fmt: skip
_ML_NAMES = (
    "bfloat16", "float8_e3m4", "float8_e4m3", "float8_e4m3fn", "float8_e5m2", "int4", "uint4",
)  # fmt: skip
_DTYPES = {name: np.dtype(name) for name in _NATIVE_NAMES} | {
    name: np.dtype(getattr(ml_dtypes, name)) for name in _ML_NAMES
}
_CLASSES: dict[str, type] = {}
_NAMES: dict[type, str] = {}

Class = TypeVar("Class", bound=type)


def register(cls: Class, name: str | None = None) -> Class:
    """Let instances of a dataclass travel, under the class's name or `name`. A decorator too.

    Raises TypeError for a class that is no dataclass and ValueError for a name that is taken.
    """
    if not _is_dataclass(cls):
        raise TypeError(f"{cls!r} is not a dataclass")
    name = name or cls.__name__
    if _CLASSES.setdefault(name, cls) is not cls:
        raise ValueError(f"wire name {name} is taken by {_CLASSES[name].__module__}.{name}")
    _NAMES[cls] = name
    return cls


def _is_dataclass(cls: object) -> bool:
    return isinstance(cls, type) and dataclasses.is_dataclass(cls)


for _class in (ir.TensorType, ir.Operation, ir.Block, ir.Module):
    register(_class)


def _fields(cls: type) -> list[str]:
    return [field.name for field in dataclasses.fields(cls) if field.init]


# --- out ---------------------------------------------------------------------------------------


class _Packer:
    """Turns Python objects into msgpack's types, and collects the schema on the way."""

    def __init__(self) -> None:
        self.schema: dict[str, list[str]] = {}
        self._order: dict[type, tuple[int, list[str]]] = {}

    def plain(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, float, str, bytes):
            return value
        if kind is list:
            return [_LIST, *map(self.plain, value)]
        if kind is tuple:
            return [_TUPLE, *map(self.plain, value)]
        if kind is dict:
            return self._mapping(value)
        if isinstance(value, np.ndarray):
            return [_ARRAY, _dtype(value.dtype), list(value.shape), *_pieces(value)]
        if isinstance(value, np.generic):
            return [_SCALAR, _dtype(value.dtype), *_pieces(np.asarray(value))]
        if kind in _NAMES:
            return self._object(value)
        raise TypeError(f"{kind.__module__}.{kind.__qualname__} has no wire form; {value!r:.60}")

    def _mapping(self, value: dict) -> Any:
        if all(type(key) is str for key in value):
            return {key: self.plain(item) for key, item in value.items()}
        return [_DICT, *(self.plain(part) for pair in value.items() for part in pair)]

    def _object(self, value: Any) -> list:
        number, names = self._class(type(value))
        return [_OBJECT, number, *(self.plain(getattr(value, name)) for name in names)]

    def _class(self, cls: type) -> tuple[int, list[str]]:
        if cls not in self._order:
            self._order[cls] = len(self._order), _fields(cls)
            self.schema[_NAMES[cls]] = self._order[cls][1]
        return self._order[cls]


def _dtype(dtype: np.dtype) -> str:
    if dtype.name not in _DTYPES:
        raise TypeError(f"dtype {dtype} has no wire form; it is one of {', '.join(_DTYPES)}")
    return dtype.name


def _pieces(array: np.ndarray) -> Iterator[memoryview]:
    """The array's bytes, row-major and little-endian, in pieces that msgpack can hold."""
    array = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    data = array.reshape(-1).view(np.uint8).data
    for start in range(0, len(data), _BIN_LIMIT):
        yield data[start : start + _BIN_LIMIT]


def _pack(plain: Any) -> bytes:
    return cast(bytes, msgpack.packb(plain))


def encode(obj: Any) -> bytes:
    """A document with `obj` in it.

    Legal: None, bool, int (64 bits), float, str, bytes, list, tuple, dict (any legal keys), numpy
    arrays and scalars of the modelled dtypes, and instances of registered dataclasses. Types are
    matched exactly: a subclass would not come back as itself. Raises TypeError for anything else.
    """
    packer = _Packer()
    body = _pack(packer.plain(obj))
    header = {
        "format": FORMAT,
        "version": VERSION,
        "schema": packer.schema,
        "length": len(body),
        "crc32": zlib.crc32(body),
    }
    return _pack(header) + body


# --- in ----------------------------------------------------------------------------------------


class _Reader:
    """Turns msgpack's types back into Python objects. Raises BadFile, naming the source."""

    def __init__(self, source: str, classes: list[tuple[type, list[str]]]) -> None:
        self.source = source
        self._classes = classes
        self._builders: dict[int, Callable[[list], Any]] = {
            _LIST: lambda parts: [self.value(part) for part in parts],
            _TUPLE: lambda parts: tuple(self.value(part) for part in parts),
            _DICT: self._mapping,
            _ARRAY: lambda parts: _array(parts[0], tuple(parts[1]), parts[2:]),
            _SCALAR: lambda parts: _array(parts[0], (), parts[1:])[()],
            _OBJECT: self._object,
        }

    def value(self, plain: Any) -> Any:
        if type(plain) is list:
            return self._builders[plain[0]](plain[1:])
        if type(plain) is dict:
            return {key: self.value(item) for key, item in plain.items()}
        return plain

    def _mapping(self, parts: list) -> dict:
        values = [self.value(part) for part in parts]
        return dict(zip(values[::2], values[1::2], strict=True))

    def _object(self, parts: list) -> Any:
        cls, names = self._classes[parts[0]]
        fields = dict(zip(names, map(self.value, parts[1:]), strict=True))
        try:
            return cls(**fields)
        except Exception as error:
            raise BadFile(f"{self.source}: {cls.__name__} is not valid: {error}") from error


def _array(name: str, shape: tuple[int, ...], pieces: list[bytes]) -> np.ndarray:
    dtype = _DTYPES[name]
    data = bytearray().join(pieces)
    if len(data) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(data)} bytes for an array {name}{list(shape)}")
    if sys.byteorder == "big":
        return np.frombuffer(data, dtype.newbyteorder("<")).astype(dtype).reshape(shape)
    return np.frombuffer(data, dtype).reshape(shape)


def _header(data: bytes, source: str) -> tuple[dict, int]:
    """The header and the offset of the body. Raises BadFile for foreign or cut-off bytes."""
    unpacker = msgpack.Unpacker(raw=False, max_buffer_size=_HEADER_LIMIT)
    unpacker.feed(data[:_HEADER_LIMIT])
    try:
        header = unpacker.unpack()
    except msgpack.OutOfData:
        raise BadFile(f"{source}: truncated or not a trnsim file ({len(data)} bytes)") from None
    except Exception:
        header = None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise BadFile(f"{source}: not a trnsim file")
    if header.get("version") != VERSION:
        raise BadFile(
            f"{source}: written with wire version {header.get('version')};"
            f" this trnsim reads version {VERSION}"
        )
    return header, unpacker.tell()


def _body(data: bytes, header: dict, start: int, source: str) -> memoryview:
    body = memoryview(data)[start:]
    expected = header.get("length")
    if len(body) != expected:
        word = "truncated" if len(body) < (expected or 0) else "too long"
        raise BadFile(f"{source}: {word}: {len(body)} of {expected} bytes")
    if zlib.crc32(body) != header.get("crc32"):
        raise BadFile(f"{source}: damaged: its checksum does not match")
    return body


def _resolve(schema: dict[str, list[str]], source: str) -> list[tuple[type, list[str]]]:
    """The classes of a schema, in order. Raises BadFile where this version's classes differ."""
    classes = []
    for name, fields in schema.items():
        cls = _CLASSES.get(name)
        if cls is None:
            raise BadFile(f"{source}: holds a {name}, which this trnsim does not know")
        for word, names in (
            ("missing", set(_fields(cls)) - set(fields)),
            ("unknown", set(fields) - set(_fields(cls))),
        ):
            if names:
                raise BadFile(f"{source}: {name} has {word} fields: {', '.join(sorted(names))}")
        classes.append((cls, fields))
    return classes


def decode(data: bytes, source: str = "message") -> Any:
    """The object of a document; arrays are writable. `source` names the document in errors.

    Raises BadFile for foreign, truncated, damaged bytes, another version, and changed classes.
    """
    header, start = _header(data, source)
    try:
        body = _body(data, header, start, source)
        reader = _Reader(source, _resolve(header["schema"], source))
        return reader.value(msgpack.unpackb(body, raw=False))
    except BadFile:
        raise
    except Exception as error:
        raise BadFile(f"{source}: damaged: {error!r}") from error


# --- files -------------------------------------------------------------------------------------


def write(path: str | os.PathLike, obj: Any) -> None:
    """Write a document in one step: a reader sees the old file or the whole new one."""
    data = encode(obj)
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read(path: str | os.PathLike) -> Any:
    """The object of a file. Raises BadFile, naming the path."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise BadFile(f"{path}: cannot be read: {error.strerror}") from error
    return decode(data, str(path))
