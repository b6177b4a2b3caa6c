"""Allocation, capacity, views: what SBUF, PSUM and HBM hold and refuse."""

import math
import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trnsim.device.chip import load_chip
from trnsim.device.dtypes import numpy_dtype
from trnsim.device.errors import BadInput, IllegalInstruction, OutOfMemory
from trnsim.device.memory import Memory

TRN1, TRN2 = load_chip("trn1"), load_chip("trn2")


def test_first_fit_reuses_the_first_gap():
    memory = Memory.sbuf(TRN2, data=False)
    a, b, c = (memory.allocate((128, 100), "f32", name) for name in "abc")
    assert [t.address for t in (a, b, c)] == [0, 400, 800]
    memory.free(a)
    assert memory.allocate((128, 50), "f32", "d").address == 0
    assert memory.allocate((128, 60), "f32", "e").address == 1200
    assert memory.allocate((1, 50), "f32", "f").address == 200
    assert [t.name for t in memory.tensors] == ["d", "f", "b", "c", "e"]
    assert memory.used == 200 + 200 + 400 + 400 + 240
    assert memory.peak == memory.used


def test_peak_remembers_what_was_freed():
    memory = Memory.sbuf(TRN2, data=False)
    big = memory.allocate((128, 1000), "f32", "big")
    memory.free(big)
    memory.allocate((128, 10), "f32", "small")
    assert (memory.used, memory.peak, memory.available) == (
        40,
        4000,
        TRN2.sbuf_partition_bytes - 40,
    )


def test_freeing_twice_is_refused():
    memory = Memory.sbuf(TRN2, data=False)
    tensor = memory.allocate((128, 1), "f32", "once")
    memory.free(tensor)
    with pytest.raises(BadInput, match=r"^free: once f32\[128, 1\] in sbuf is not valid"):
        memory.free(tensor)


def test_sbuf_limit_on_trainium1():
    """Case U18: 198,024 B per partition where 196,608 exist and 180,224 are for kernels."""
    memory = Memory.sbuf(TRN1, data=False)
    memory.allocate((128, 1000), "f32", "weights")
    memory.allocate((128, 10), "bf16", "scale")
    with pytest.raises(OutOfMemory) as caught:
        memory.allocate((128, 49506), "f32", "activations")
    assert str(caught.value) == (
        "sbuf: activations needs 198024 B per partition, 176204 B of 180224 B per partition are "
        "free (of 196608 B, the rest is reserved), the largest gap is 176204 B; "
        "held by: weights 4000 B, scale 20 B"
    )


def test_fragmentation_shows_in_the_message():
    memory = Memory.hbm(1024, data=False)
    tensors = [memory.allocate((64,), "f32", f"t{i}") for i in range(4)]
    memory.free(tensors[0])
    memory.free(tensors[2])
    with pytest.raises(OutOfMemory, match="512 B of 1024 B are free, the largest gap is 256 B"):
        memory.allocate((100,), "f32", "wide")


def test_holders_are_listed_largest_first():
    memory = Memory.hbm(4096, data=False)
    for size in (64, 256, 128, 64, 512):
        memory.allocate((size,), "i8", f"s{size}")
    with pytest.raises(
        OutOfMemory, match=r"held by: s512 512 B, s256 256 B, s128 128 B, and 2 more$"
    ):
        memory.allocate((4096,), "i8", "all")


def test_psum_tensors_stay_inside_banks():
    memory = Memory.psum(TRN2, data=False)
    assert memory.allocate((128, 300), "f32", "a").address == 0
    assert memory.allocate((128, 300), "f32", "b").address == 2048
    assert memory.allocate((128, 200), "f32", "c").address == 1200
    assert memory.allocate((128, 1024), "f32", "two banks").address == 4096
    for _ in range(4):
        memory.allocate((128, 512), "f32", "bank")
    with pytest.raises(OutOfMemory, match="^psum: x needs 2048 B per partition, 896 B of 16384 B"):
        memory.allocate((128, 512), "f32", "x")


def test_shapes_that_do_not_exist_on_chip():
    memory = Memory.sbuf(TRN2, data=False)
    with pytest.raises(IllegalInstruction, match="^x: partition dimension is 1 to 128, not 129$"):
        memory.allocate((129, 4), "f32", "x")
    with pytest.raises(IllegalInstruction, match=r"^x: a tensor in sbuf is \[partition, free"):
        memory.allocate((128,), "f32", "x")


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16", "f8E4M3", "f8E4M3FN", "f8E5M2"])
def test_fresh_floats_are_nan(dtype):
    for memory in (Memory.sbuf(TRN2), Memory.psum(TRN2), Memory.hbm(1 << 20)):
        values = memory.allocate((4, 8), dtype, "fresh").array
        assert values.dtype == numpy_dtype(dtype) and np.isnan(values.astype(np.float32)).all()


def test_fresh_integers_show():
    memory = Memory.sbuf(TRN2)
    assert (memory.allocate((2, 3), "i32", "i").array == 2**31 - 1).all()
    assert memory.allocate((2, 3), "i1", "b").array.all()


def test_overlapping_addresses_share_bytes():
    memory = Memory.sbuf(TRN2)
    floats = memory.allocate((128, 4), "f32", "floats", address=64)
    bits = memory.allocate((128, 2), "ui32", "bits", address=72)
    floats.array[...] = 1.0
    assert (bits.array == 0x3F800000).all()
    assert memory.used == 0
    assert floats.bitcast("ui32").array[0, 0] == 0x3F800000


def test_partitions_are_apart_in_memory_by_an_odd_number_of_cache_lines():
    tensor = Memory.sbuf(TRN2).allocate((128, 4), "f32", "t")
    pitch = tensor.array.strides[0]
    assert pitch % 64 == 0 and pitch // 64 % 2 == 1 and pitch >= TRN2.sbuf_partition_bytes


def test_psum_values_of_every_layout_stay_apart():
    """Small, bank-sized and longer tensors, all held at once."""
    memory = Memory.psum(TRN2)
    shapes = [(128, 100), (64, 412), (128, 512), (128, 1024), (1, 1), (128, 3, 100)]
    held = [memory.allocate(shape, "f32", str(shape)) for shape in shapes]
    for number, tensor in enumerate(held):
        tensor.array[...] = number
    for number, tensor in enumerate(held):
        assert (tensor.array == number).all()
        assert (tensor[0:1, 0:1].array == number).all()
    assert held[2].array.flags.c_contiguous


def test_stated_psum_addresses_overlap():
    memory = Memory.psum(TRN2)
    long = memory.allocate((128, 4, 512), "f32", "long", address=0)
    bank = memory.allocate((128, 512), "f32", "bank", address=4096)
    long.array[...] = np.arange(4)[:, None]
    assert (bank.array == 2).all()


def test_without_data_nothing_is_stored():
    tensor = Memory.sbuf(TRN2, data=False).allocate((128, 4), "f32", "t")
    assert tensor.data is None
    with pytest.raises(BadInput, match="the run was made without data"):
        _ = tensor[0:4].array


def test_a_part_on_chip_is_one_object():
    tensor = Memory.sbuf(TRN2, data=False).allocate((128, 4, 8), "f32", "t")
    assert tensor[0:64, 1] is tensor[0:64, 1]
    assert tensor[0:64, 1] is not tensor[0:64, 1:2]
    assert tensor[0:64, 1].shape != tensor[0:64, 1:2].shape
    value = Memory.hbm(1 << 20, data=False).allocate((128, 32), "f32", "v")
    assert value[0:64] is not value[0:64], "parts of HBM are too many to keep"


def test_arrays_go_with_their_last_tensor():
    """Without waiting for the garbage collector: HBM arrays are large."""
    array = np.zeros((4, 4), np.float32)
    gone = weakref.ref(array)
    tensor = Memory.hbm(100).adopt(array, (4, 4), "f32", "v")
    part = tensor[0:2]
    assert part.array.base is not None
    del array, tensor
    assert gone() is not None, "a view keeps it"
    del part
    assert gone() is None


def test_adopted_tensors_are_the_owners_array():
    memory = Memory.hbm(100)
    values = np.arange(12, dtype=np.float32)
    tensor = memory.adopt(values, (3, 4), "f32", "v")
    tensor[1, 2:4].array[...] = -1
    assert values.tolist() == [0, 1, 2, 3, 4, 5, -1, -1, 8, 9, 10, 11]
    assert memory.used == 0
    other = memory.adopt(None, (3, 4), "f32", "w")
    assert not tensor.overlaps(other)
    with pytest.raises(
        BadInput, match=r"^v: float32\[2, 6\] is not valid; allowed: a C-contiguous"
    ):
        memory.adopt(np.zeros((6, 2), np.float32).T, (2, 6), "f32", "v")


def test_views_agree_with_numpy():
    tensor = Memory.hbm(1 << 16).allocate((4, 6, 10), "f32", "t")
    tensor.array[...] = np.arange(240).reshape(4, 6, 10)
    x = tensor.array
    for view, expected in [
        (tensor[1], x[1]),
        (tensor[1:3, 2], x[1:3, 2]),
        (tensor[:, 1:5:2, 3:9:3], x[:, 1:5:2, 3:9:3]),
        (tensor[2].reshape(3, 20), x[2].reshape(3, 20)),
        (tensor.permute(2, 0, 1)[1:3], x.transpose(2, 0, 1)[1:3]),
        (tensor[0:1, 0].broadcast(5, 10), np.broadcast_to(x[0:1, 0], (5, 10))),
        (tensor[0, 0].broadcast(3, 10), np.broadcast_to(x[0, 0], (3, 10))),
        (tensor[:, :, 0:8].split(2, 4), x[:, :, 0:8].reshape(4, 6, 2, 4)),
        (tensor[1, 1].expand(1), x[1, 1][:, None]),
    ]:
        np.testing.assert_array_equal(view.array, expected)
        assert view.shape == expected.shape


def test_views_on_chip_keep_their_partitions():
    tensor = Memory.sbuf(TRN2).allocate((128, 4, 8), "f32", "t")
    tensor.array[...] = np.arange(128 * 32).reshape(128, 4, 8)
    view = tensor[32:64, 1]
    assert view.shape == (32, 8) and view.partitions == (32, 32)
    assert view.interval == (32, 64)
    np.testing.assert_array_equal(view.array, tensor.array[32:64, 1])
    assert tensor[5].shape == (1, 4, 8)
    assert tensor[5].partitions == (5, 1)
    column = tensor[:, 2, 3:4].broadcast(128, 16)
    np.testing.assert_array_equal(column.array, np.repeat(tensor.array[:, 2, 3:4], 16, axis=1))


@pytest.mark.parametrize(
    ("index", "shown"),
    [
        (np.s_[:, 0:9], ":, 0:9"),
        (np.s_[0:129], "0:129"),
        (np.s_[:, -1], ":, -1"),
        (np.s_[0:8:2], "0:8:2"),
        (np.s_[:, 0, 0], ":, 0, 0"),
    ],
)
def test_indices_outside_are_refused(index, shown):
    tensor = Memory.sbuf(TRN2, data=False).allocate((128, 8), "f32", "t")
    with pytest.raises(IllegalInstruction) as caught:
        tensor[index]
    assert str(caught.value) == (
        f"[{shown}] is outside t f32[128, 8] in sbuf, or no slice that it can have"
    )


def test_views_that_cannot_be_are_refused():
    tensor = Memory.sbuf(TRN2, data=False).allocate((128, 8), "f32", "t")
    with pytest.raises(BadInput, match="^broadcast: "):
        tensor[0:1].broadcast(128, 8)
    with pytest.raises(BadInput, match="^reshape: "):
        tensor[:, 0:4].reshape(64, 8)
    with pytest.raises(BadInput, match="^axes: "):
        tensor.permute(1, 0)
    with pytest.raises(BadInput, match="^dtype: bf16 is not valid; allowed: a dtype of 4 B"):
        tensor.bitcast("bf16")


def test_overlap_is_exact_for_boxes_of_one_tensor():
    tensor = Memory.hbm(1 << 20, data=False).allocate((8, 4, 64), "f32", "t")
    left, right = tensor[:, :, 0:32], tensor[:, :, 32:64]
    assert left.interval[1] > right.interval[0], "the byte ranges do interleave"
    assert not left.overlaps(right)
    assert left.overlaps(tensor[3, 2, 31:33])
    assert not tensor[:, 1].overlaps(tensor.permute(1, 0, 2)[2:4])


SIZES = st.lists(
    st.tuples(st.booleans(), st.integers(1, 700), st.sampled_from(["f32", "bf16", "i8"])),
    max_size=40,
)


@settings(deadline=None, max_examples=60)
@given(SIZES, st.sampled_from(["sbuf", "psum", "hbm"]))
def test_allocator_invariants(steps, space):
    """Tensors are inside, apart, aligned and in their bank; the books agree; freeing empties it."""
    memory = {
        "sbuf": lambda: Memory.sbuf(TRN2, data=False),
        "psum": lambda: Memory.psum(TRN2, data=False),
        "hbm": lambda: Memory.hbm(16384, data=False),
    }[space]()
    held, peak = [], 0
    for free, size, dtype in steps:
        if free and held:
            memory.free(held.pop(size % len(held)))
        else:
            try:
                held.append(memory.allocate((128, size) if space != "hbm" else (size,), dtype, "t"))
            except OutOfMemory:
                assert space != "sbuf"
                continue
        used = sum(t.footprint for t in held)
        peak = max(peak, used)
        assert (memory.used, memory.peak) == (used, peak)
        ends = 0
        for tensor in sorted(held, key=lambda t: t.address):
            assert ends <= tensor.address and tensor.address % tensor.itemsize == 0
            ends = tensor.address + tensor.footprint
            if space == "psum" and tensor.footprint <= 2048:
                assert tensor.address // 2048 == (ends - 1) // 2048
        assert ends <= memory.capacity
    for tensor in held:
        memory.free(tensor)
    assert memory.used == 0 and memory.largest_gap == memory.capacity


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_overlap_agrees_with_shared_elements(data):
    """Two slices of one HBM tensor overlap exactly if some element is in both (unit steps)."""
    shape = (3, 4, 5)
    tensor = Memory.hbm(4096).allocate(shape, "i32", "t")

    def part():
        bounds = []
        for extent in shape:
            start = data.draw(st.integers(0, extent - 1))
            bounds.append(slice(start, data.draw(st.integers(start + 1, extent))))
        return tuple(bounds)

    first, second = part(), part()
    tensor.array[...] = 0
    tensor[first].array[...] = 1
    shared = bool((tensor[second].array == 1).any())
    assert tensor[first].overlaps(tensor[second]) == shared
    assert math.prod(tensor[first].shape) == tensor[first].size
