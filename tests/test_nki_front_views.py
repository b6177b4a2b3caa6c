"""Tensors of NKI kernels: every view names the elements that numpy names."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trnsim.device.chip import load_chip
from trnsim.device.errors import BadInput, IllegalInstruction
from trnsim.device.nki.dtypes import DTYPES, as_dtype
from trnsim.device.nki.launch import Launch, Settings
from trnsim.device.nki.objects import NKIObject
from trnsim.device.nki.tensor import NkiTensor, ds

CHIP = load_chip("trn2")


def tensor(shape, buffer="sbuf", dtype="float32", address=None) -> NkiTensor:
    """A tensor that holds 0, 1, 2, ... in row-major order."""
    launch = Launch(Settings(chip=CHIP))
    made = launch.sessions[0].allocate(shape, dtype, buffer, "t", address)
    count = np.arange(made.size).reshape(shape)
    made.device_view().array[...] = count.astype(made.dtype.dtype)
    return made


def values(view: NkiTensor) -> np.ndarray:
    return view.device_view().array


def reference(shape) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


@st.composite
def slices(draw, extent):
    start = draw(st.integers(0, extent - 1))
    return slice(start, draw(st.integers(start + 1, extent)), draw(st.integers(1, 3)))


@given(st.data())
def test_slices_in_hbm_are_numpys(data):
    shape = (5, 4, 6)
    index = tuple(data.draw(st.one_of(slices(n), st.integers(-n, n - 1))) for n in shape[:2])
    index = (*index, data.draw(slices(shape[2])))
    np.testing.assert_array_equal(values(tensor(shape, "hbm")[index]), reference(shape)[index])


@given(st.data())
def test_slices_on_chip_keep_partitions_and_two_axes(data):
    shape = (8, 4, 6)
    rows = slice(data.draw(st.integers(0, 3)), data.draw(st.integers(4, 8)))
    index = (rows, data.draw(st.one_of(slices(4), st.integers(0, 3))), data.draw(slices(6)))
    for buffer in ("sbuf", "psum"):
        np.testing.assert_array_equal(values(tensor(shape, buffer)[index]), reference(shape)[index])


def test_integer_indices_leave_two_axes_on_chip_and_one_in_hbm():
    assert tensor((8, 6))[3, 2].shape == (1, 1)
    assert tensor((8, 4, 6))[3, 2].shape == (1, 6)
    assert tensor((8, 6), "hbm")[3, 2].shape == (1,)
    assert tensor((8, 4, 6))[..., 0].shape == (8, 4)
    assert tensor((8, 6))[:, ds(2, 3)].shape == (8, 3)


@given(st.permutations([1, 2, 3]), st.sampled_from(["sbuf", "hbm"]))
def test_permute_is_transpose(order, buffer):
    shape, dims = (4, 2, 3, 5), (0, *order)
    np.testing.assert_array_equal(
        values(tensor(shape, buffer).permute(dims)), reference(shape).transpose(dims)
    )


@given(st.sampled_from([(4, 24), (4, 2, 12), (4, 2, 3, 4), (4, 6, 4), (4, 1, 24)]))
def test_reshape_of_a_dense_tensor_and_of_a_slice_of_rows(new):
    t, expected = tensor((8, 4, 6)), reference((8, 4, 6))[:4]
    np.testing.assert_array_equal(values(t[:4].reshape(new)), expected.reshape(new))
    np.testing.assert_array_equal(values(t[:4].reshape((*new[:-1], -1))), expected.reshape(new))


def test_reshape_splits_what_a_slice_left_apart_and_refuses_to_join_it():
    part = tensor((8, 4, 6))[:, :, 1:5]
    np.testing.assert_array_equal(
        values(part.reshape((8, 2, 2, 2, 2))),
        reference((8, 4, 6))[:, :, 1:5].reshape(8, 2, 2, 2, 2),
    )
    with pytest.raises(IllegalInstruction, match=r"its layout has no view of shape \[8, 16\]"):
        part.reshape((8, 16))
    with pytest.raises(IllegalInstruction, match="changes the partition axis"):
        tensor((8, 4)).reshape((4, 8))


def test_named_views():
    t, x = tensor((4, 24)), reference((4, 24))
    split = t.rearrange(("b", ("h", "w")), ("b", "w", "h"), {"h": 4})
    np.testing.assert_array_equal(values(split), x.reshape(4, 4, 6).transpose(0, 2, 1))
    joined = t.reshape_dim(1, (2, 3, -1)).flatten_dims(2, 3)
    np.testing.assert_array_equal(values(joined), x.reshape(4, 2, 12))
    column = t.slice(1, 3, 4).expand_dim(1).broadcast(1, 5).squeeze_dim(2)
    np.testing.assert_array_equal(values(column), np.repeat(x[:, 3:4], 5, 1))
    np.testing.assert_array_equal(values(t.select(1, 7)), x[:, 7:8])
    with pytest.raises(IllegalInstruction, match="cannot be repeated"):
        t.broadcast(0, 2)


def test_patterns_address_the_storage():
    t, x = tensor((8, 16)), reference((8, 16))
    part = t[2:6, 4:12]
    assert part.get_pattern() == [[16, 4], [1, 8]] and part.offset == 36
    again = part.ap([[16, 4], [2, 3]])
    np.testing.assert_array_equal(values(again), x[2:6, 4:10:2])
    np.testing.assert_array_equal(
        values(part.ap([[16, 4], [0, 2], [4, 3]], offset=1))[:, 1], x[2:6, 5:16:4]
    )
    with pytest.raises(IllegalInstruction, match="step of the partition axis is 32.*is .*16"):
        values(t.ap([[32, 4], [1, 16]]))
    with pytest.raises(IllegalInstruction, match=r"reaches bytes 4 to 68; t.* ends at 64"):
        values(t.ap([[16, 8], [1, 16]], offset=1))


def test_views_as_another_dtype():
    t = tensor((4, 8))
    halves = t.view("bfloat16")
    assert halves.shape == (4, 16)
    np.testing.assert_array_equal(values(halves), reference((4, 8)).view(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(values(halves[:, 4:8].view("float32")), reference((4, 8))[:, 2:4])
    with pytest.raises(IllegalInstruction, match="cannot be read as float32"):
        halves[:, 1:3].view("float32")


def test_an_address_of_the_kernel_has_a_partition_and_bytes():
    t = tensor((32, 8), address=(64, 1024))
    assert t.device_view().partition == 64
    assert t.device_view().interval == (1024, 1056)
    assert t[4:8].device_view().partition == 68
    with pytest.raises(IllegalInstruction, match=r"address \(100, 0\) with 32 partitions"):
        tensor((32, 8), address=(100, 0))


@pytest.mark.parametrize(
    "index", [(slice(0, 9),), (slice(None), slice(3, 2)), (8,), (0, 0, 0), (slice(0, 8, -1),)]
)
def test_indices_outside_are_refused(index):
    with pytest.raises(IllegalInstruction, match=r"t float32\[8, 6\] in sbuf"):
        tensor((8, 6))[index]


def test_dtypes_are_numpys_and_names():
    assert np.dtype(DTYPES["bfloat16"]) == ml_dtypes.bfloat16  # type: ignore[call-overload]
    assert DTYPES["float32"] == np.float32 and np.dtype("float32") == DTYPES["float32"]
    assert DTYPES["float16"] == "float16" and str(DTYPES["float16"]) == "float16"
    assert {DTYPES["int8"]: 1}[as_dtype(np.int8)] == 1
    assert DTYPES["tfloat32"] != DTYPES["float32"]
    with pytest.raises(BadInput, match="dtype: float31 is not valid.*nearest valid: float32"):
        as_dtype("float31")


class _Plain(NKIObject):
    rows: int
    columns: int = 4
    scale = 2.0

    def __post_init__(self):
        self.size = (self.rows or 0) * self.columns


def test_objects_take_annotations_and_class_attributes():
    assert _Plain(rows=3).size == 12
    assert (_Plain().rows, _Plain(1, 2, 3.0).scale) == (None, 3.0)
    with pytest.raises(TypeError, match="_Plain has no field depth"):
        _Plain(depth=1)


def test_objects_stay_so_as_dataclasses():
    from dataclasses import dataclass, field

    @dataclass
    class Config(NKIObject):
        rows: int
        names: list = field(default_factory=list)

    assert (Config().rows, Config(2).names) == (None, [])
