"""Documents come back as they went, and damaged ones are refused with one clear line."""

import re
from dataclasses import dataclass, make_dataclass

import ml_dtypes
import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from trnsim.cluster import wire
from trnsim.device.errors import BadFile
from trnsim.device.ops.ir import Block, Module, Operation, TensorType

DTYPES = sorted(wire._DTYPES)


@st.composite
def arrays(draw) -> np.ndarray:
    """Arrays of every dtype, row-major, column-major or backwards."""
    dtype = wire._DTYPES[draw(st.sampled_from(DTYPES))]
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    array = draw(hnp.arrays(np.uint8, shape, elements=st.integers(0, 1))).astype(dtype)
    if array.ndim and draw(st.booleans()):
        return array[::-1]
    return array.T


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
)
KEYS = st.text() | st.integers(-9, 9) | st.tuples(st.integers(0, 9), st.text())
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text(), inner)
        | st.dictionaries(KEYS, inner)
    ),
    max_leaves=20,
)


def typed(value: object) -> object:
    """The value with the type at every level: 1 == True and (1,) vs [1] must be told apart."""
    if isinstance(value, dict):
        return "dict", [(typed(key), typed(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [typed(item) for item in value]
    return type(value), value


def assert_same_array(got: np.ndarray, expected: np.ndarray) -> None:
    assert type(got) is np.ndarray
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    assert got.tobytes() == expected.tobytes()
    assert got.flags.writeable and got.flags.c_contiguous


@given(VALUES)
def test_plain_data_comes_back_with_its_types(value):
    assert typed(wire.decode(wire.encode(value))) == typed(value)


@given(arrays())
def test_arrays_come_back(array):
    assert_same_array(wire.decode(wire.encode({"a": array}))["a"], array)


@pytest.mark.parametrize("name", DTYPES)
def test_every_byte_pattern_of_every_dtype_comes_back(name):
    dtype = wire._DTYPES[name]
    array = np.arange(256, dtype=np.uint8).repeat(dtype.itemsize).view(dtype)
    if name not in ("bool", "int4", "uint4"):
        assert_same_array(wire.decode(wire.encode(array)), array)
    scalar = np.ones((), dtype)[()]
    got = wire.decode(wire.encode(scalar))
    assert (type(got), got) == (type(scalar), scalar)


def test_big_endian_arrays_arrive_as_native():
    array = np.arange(5, dtype=">i4")
    got = wire.decode(wire.encode(array))
    assert got.dtype == np.dtype("int32") and got.tolist() == [0, 1, 2, 3, 4]


def test_long_arrays_travel_in_pieces(monkeypatch):
    monkeypatch.setattr(wire, "_BIN_LIMIT", 16)
    array = np.arange(13, dtype=np.float32)
    assert_same_array(wire.decode(wire.encode(array)), array)


def small_module() -> Module:
    """A module with a region, an array attribute and every kind of plain attribute."""
    inner = Block((2,), (Operation("negate", (2,), (3,)),), (3,))
    constant = Operation("constant", (), (0,), {"value": np.ones((2, 2), ml_dtypes.bfloat16)})
    loop = Operation("while", (0,), (1,), {"trip": 3, "names": ("a", "b")}, (inner,), "f.py:12")
    types = (TensorType((2, 2), "bf16"),) * 4
    return Module("step", types, Block((), (constant, loop), (1,)))


def test_operator_programs_come_back():
    module = small_module()
    got = wire.decode(wire.encode(module))
    assert (got.name, got.types, got.body.returns) == (module.name, module.types, (1,))
    assert got.body.operations[1] == module.body.operations[1]
    value = got.body.operations[0].attributes["value"]
    assert_same_array(value, module.body.operations[0].attributes["value"])


def test_bytes_are_the_same_every_time():
    assert wire.encode(small_module()) == wire.encode(small_module())


def test_truncation_at_every_byte_is_refused():
    data = wire.encode(small_module())
    for size in range(len(data)):
        with pytest.raises(BadFile, match=r"^run\.msgpack: (truncated|not a trnsim file)"):
            wire.decode(data[:size], "run.msgpack")


def test_one_changed_byte_is_refused_or_harmless():
    data = wire.encode(small_module())
    start = wire._header(data, "x")[1]
    for place in range(start, len(data)):
        changed = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        with pytest.raises(BadFile, match=r"^x: damaged: its checksum does not match$"):
            wire.decode(changed, "x")


@given(st.binary(max_size=64))
def test_foreign_bytes_are_refused(data):
    with pytest.raises(BadFile, match=r"^x: (not a trnsim file|truncated or not a trnsim file)"):
        wire.decode(data, "x")


@pytest.mark.parametrize("change", [{"schema": None}, {"schema": [1]}, {"length": "5"}])
def test_a_damaged_header_is_refused(change):
    unpacker = msgpack.Unpacker()
    unpacker.feed(wire.encode([1, 2]))
    header = unpacker.unpack() | change
    packed = msgpack.packb(header)
    assert packed is not None
    with pytest.raises(BadFile):
        wire.decode(packed + wire.encode([1, 2])[unpacker.tell() :])


def test_extra_bytes_are_refused():
    with pytest.raises(BadFile, match=r"^x: too long: 2 of 1 bytes$"):
        wire.decode(wire.encode(None) + b"\0", "x")


def test_another_version_is_refused():
    data = msgpack.packb({"format": "trnsim", "version": 99, "schema": {}})
    assert data is not None
    with pytest.raises(
        BadFile, match=r"^x: written with wire version 99; this trnsim reads version 1$"
    ):
        wire.decode(data, "x")


@pytest.fixture
def registry(monkeypatch):
    """A registry of its own for the test, so that classes of one name do not meet."""
    monkeypatch.setattr(wire, "_CLASSES", dict(wire._CLASSES))
    monkeypatch.setattr(wire, "_NAMES", dict(wire._NAMES))


@dataclass(frozen=True)
class Point:
    """A class that checks itself."""

    x: int
    y: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.x < 0:
            raise ValueError(f"x is {self.x}")


def test_registered_classes_come_back_inside_anything(registry):
    wire.register(Point)
    value = {(1, 2): [Point(1, (2,)), (Point(3, ()),)]}
    assert wire.decode(wire.encode(value)) == value


def test_an_unregistered_class_is_refused_by_name(registry):
    with pytest.raises(TypeError, match=r"Point has no wire form"):
        wire.encode([Point(1, ())])


def test_subclasses_of_plain_types_are_refused():
    with pytest.raises(TypeError, match=r"Text has no wire form"):
        wire.encode(type("Text", (str,), {})("a"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (None, "x: holds a Point, which this trnsim does not know"),
        (["x"], "x: Point has unknown fields: y"),
        (["x", "y", "z"], "x: Point has missing fields: z"),
    ],
)
def test_a_class_that_changed_is_noticed(registry, fields, message):
    wire.register(Point)
    data = wire.encode(Point(1, (2,)))
    del wire._CLASSES["Point"]
    if fields is not None:
        wire.register(make_dataclass("Point", fields))
    with pytest.raises(BadFile, match="^" + re.escape(message) + "$"):
        wire.decode(data, "x")


def test_a_class_that_refuses_its_fields_is_a_bad_file(registry):
    wire.register(Point)
    point = Point(1, ())
    object.__setattr__(point, "x", -5)
    with pytest.raises(BadFile, match=r"^x: Point is not valid: x is -5$"):
        wire.decode(wire.encode(point), "x")


def test_two_classes_of_one_name_cannot_both_register(registry):
    wire.register(Point)
    assert wire.register(Point) is Point
    with pytest.raises(ValueError, match=r"^wire name Point is taken by"):
        wire.register(make_dataclass("Point", ["x"]))
    with pytest.raises(TypeError, match=r"is not a dataclass$"):
        wire.register(int)


def test_files_are_replaced_whole(tmp_path):
    path = tmp_path / "run.msgpack"
    wire.write(path, {"step": 1})
    wire.write(path, {"step": 2})
    assert wire.read(path) == {"step": 2}
    with pytest.raises(TypeError):
        wire.write(path, object())
    assert wire.read(path) == {"step": 2}
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.msgpack"]


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "run.msgpack"
    wire.write(path, 1)

    def interrupt(descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(wire.os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        wire.write(path, 2)
    assert wire.read(path) == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.msgpack"]


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(BadFile, match=r"none\.msgpack: cannot be read: No such file or directory$"):
        wire.read(tmp_path / "none.msgpack")
