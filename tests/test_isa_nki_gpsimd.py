"""GpSimd's instructions and random numbers, as kernels write them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trnsim.device.isa.accumulate import (
    FP32_MIN,
)
from trnsim.device.isa.patterns import (
    AffineSelect,
    GatherInPartition,
    Iota,
    LocalGather,
    NonzeroWithCount,
    PartitionReduce,
    SequenceBounds,
    TopK,
)
from trnsim.device.isa.random import Dropout, GetState, Rand2, RandomState, Rng, SetSeed, SetState

from .isa_bench import BF16, RNG, TRN1, TRN3, Bench, rand, refuses


@pytest.fixture
def on() -> Bench:
    return Bench()


@pytest.fixture
def on3() -> Bench:
    return Bench(TRN3)


# ---- GpSimd ----------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(
    st.integers(-9, 9), st.integers(-3, 3),
    st.lists(st.tuples(st.integers(-5, 5), st.integers(1, 3)), min_size=1, max_size=4),
    st.sampled_from(["i32", "f32", "i16"]),
)  # fmt: skip
def test_iota(offset, channel, pattern, dtype):
    on = Bench()
    counts = [n for _, n in pattern]
    free = int(np.prod(counts))
    made = Iota(on.new((5, free), dtype), tuple(pattern), offset, channel)
    expected = np.empty((5, *counts), np.int64)
    for place in np.ndindex(*expected.shape):
        steps = sum(i * step for i, (step, _) in zip(place[1:], pattern, strict=True))
        expected[place] = offset + channel * place[0] + steps
    np.testing.assert_array_equal(on.run(made), expected.reshape(5, free))
    assert on.cycles(made) == 150 + 64


def test_affine_select_makes_a_causal_mask(on):
    x = rand(16, 16)
    made = AffineSelect(
        on.new((16, 16), "bf16"), on.put(x), ((-1, 16),), 1, FP32_MIN, "greater_equal"
    )
    out = on.run(made).astype(np.float32)
    below = np.arange(16)[:, None] >= np.arange(16)
    np.testing.assert_array_equal(out[below], x.astype(BF16).astype(np.float32)[below])
    assert np.isneginf(out[~below]).all()  # float32's least is beyond bfloat16
    y = on.put(x)
    refuses(on, AffineSelect(y, y, ((1, 8),), 0, 0.0), "pattern has 8 elements and dst 16")
    psum = on.put(x, space="psum")
    refuses(on, AffineSelect(y, psum, ((1, 16),), 0, 0.0), "on_true_tile must be in sbuf")


def test_gather_in_partition(on):
    x, index = rand(8, 4, 5), RNG.integers(0, 20, (8, 6)).astype(np.uint32)
    out = on.run(GatherInPartition(on.new((8, 2, 3)), on.put(x), on.put(index)))
    expected = np.take_along_axis(x.reshape(8, 20), index.astype(np.int64), axis=1)
    np.testing.assert_array_equal(out.reshape(8, 6), expected)
    index[3, 2] = 20
    refuses(on, GatherInPartition(on.new((8, 6)), on.put(x), on.put(index)), "index is 20; limit")
    short = on.put(np.zeros((8, 6), np.uint16))
    refuses(on, GatherInPartition(on.new((8, 6)), on.put(x), short), "indices is ui16; allowed")


def test_local_gather_takes_indices_column_by_column(on):
    x = rand(32, 64)
    index = (RNG.integers(0, 16, (32, 3)) * 4).astype(np.uint16)
    out = on.run(LocalGather(on.new((32, 40, 4)), on.put(x), on.put(index), 4, 40))
    for core in range(2):
        rows = slice(16 * core, 16 * core + 16)
        starts = index[rows].flatten(order="F")[:40]
        expected = np.stack([x[rows, s : s + 4] for s in starts.astype(int)], axis=1)
        np.testing.assert_array_equal(out[rows], expected)


def test_local_gather_refuses(on):
    x, index = on.put(rand(32, 64)), on.put(np.zeros((32, 3), np.uint16))
    refuses(on, LocalGather(on.new((32, 144)), x, index, 3), "num_elem_per_idx is 3; allowed: 1, 2")
    refuses(
        on, LocalGather(on.new((32, 49)), x, index, 1, 49), "num_valid_indices is 49; limit: 48"
    )
    refuses(on, LocalGather(on.new((32, 47)), x, index), r"it must hold \[32, 48 x 1\]")
    y, part = on.put(rand(24, 8)), on.put(np.zeros((24, 3), np.uint16))
    refuses(on, LocalGather(on.new((24, 48)), y, part), "a multiple of 16")


def test_nonzero_with_count_touches_every_sixteenth_partition(on):
    x = np.zeros((32, 8), np.float32)
    x[0] = [0, 1, 1, 0, 0, 1, 0, 0]
    x[1] = 5
    dst = on.put(np.full((32, 9), 77, np.int32))
    on.run(NonzeroWithCount(dst, on.put(x), 16, -1), dst)
    assert dst.array[0].tolist() == [17, 18, 21, -1, -1, -1, -1, -1, 3]
    assert dst.array[16].tolist() == [-1] * 8 + [0]
    untouched = [row for row in range(32) if row % 16]
    assert (dst.array[untouched] == 77).all()
    one = Bench(TRN1)
    refuses(one, NonzeroWithCount(one.new((16, 9), "i32"), one.new((16, 8))), "needs NeuronCore-v3")
    refuses(on, NonzeroWithCount(on.new((16, 8), "i32"), on.new((16, 8))), r"needs \[16, 9\]")


def test_sequence_bounds(on):
    ids = np.array([[0, 1, 1, 2, 2, 2, 0, 3, 3]], np.int32)
    out = on.run(SequenceBounds(on.new((1, 2, 9), "i32"), on.put(ids)))
    assert out.tolist() == [[[9, 1, 1, 3, 3, 3, 9, 7, 7], [-1, 3, 3, 6, 6, 6, -1, 9, 9]]]
    tall = on.put(np.zeros((2, 9), np.int32))
    refuses(on, SequenceBounds(on.new((1, 2, 9), "i32"), tall), "has 2 partitions; it must have 1")


@pytest.mark.parametrize("op, of", [("add", np.sum), ("average", np.mean), ("maximum", np.max)])
def test_partition_reduce(on, op, of):
    x = rand(128, 4, 3)
    out = on.run(PartitionReduce(on.new((1, 12)), on.put(x), op))
    np.testing.assert_allclose(out, of(x, axis=0).reshape(1, 12), rtol=1e-5, atol=1e-5)
    refuses(on, PartitionReduce(on.new((1, 12)), on.put(x), "multiply"), "op is multiply; allowed")


def test_topk_of_the_snake(on):
    n, k = 42, 8
    x = RNG.permutation(48).astype(np.float32)
    tile = np.stack([x.reshape(3, 16).T] * 2).reshape(32, 3)
    made = TopK(on.new((32, k), "bf16"), on.new((32, k), "ui32"), on.put(tile, "bf16"), n)
    values, index = on.run(made)
    best = np.argsort(x[:n])[-k:]
    assert (index == best).all() and (values.astype(np.float32) == x[best]).all()
    assert on.cycles(made) == 4 * n + k


# ---- random numbers --------------------------------------------------------------------------


def test_random_bits_repeat_with_the_seed(on):
    state = RandomState("vector")
    seed = on.put(np.array([[42]], np.uint32))
    dst = on.new((128, 64), "ui32")
    on.core.issue(SetSeed(seed, state))
    first = on.run(Rng(dst, state))
    second = on.run(Rng(dst, state))
    on.core.issue(SetSeed(seed, state))
    again = on.run(Rng(dst, state))
    assert (first == again).all() and (first != second).any()
    assert len(np.unique(first)) > 8000 and abs(first.mean() / 2**32 - 0.5) < 0.02
    refuses(on, Rng(on.new((4, 4)), state), "dst is f32; allowed: i8, i16")


def test_a_generator_is_xorwow(on):
    state = RandomState("gpsimd")
    words = np.tile(np.array([123456789, 362436069, 521288629, 88675123, 5783321, 6615241]), (4, 1))
    on.core.issue(SetState(on.put(words.astype(np.uint32)), state))
    out = on.run(Rng(on.new((4, 3), "ui32"), state, "gpsimd"))
    x, y, z, w, v, d = (int(n) for n in words[0])
    expected = []
    for _ in range(3):
        t = x ^ (x >> 2)
        x, y, z, w = y, z, w, v
        v = (v ^ (v << 4) ^ t ^ (t << 1)) & 0xFFFFFFFF
        d = (d + 362437) & 0xFFFFFFFF
        expected.append((d + v) & 0xFFFFFFFF)
    assert out.tolist() == [expected] * 4
    after = on.run(GetState(on.new((4, 6), "ui32"), state))
    assert after[0].tolist() == [x, y, z, w, v, d]


def test_dropout_zeroes_a_fraction(on):
    state = RandomState("vector", 1)
    x = on.put(np.full((128, 256), 3.0))
    out = on.run(Dropout(on.new((128, 256)), x, 0.25, state))
    assert set(np.unique(out)) == {0, 3} and abs((out == 0).mean() - 0.25) < 0.01
    assert (on.run(Dropout(on.new((128, 256)), x, 1.0, state)) == 0).all()
    assert (on.run(Dropout(on.new((128, 256)), x, 0.0, state)) == 3).all()


def test_rand2_is_uniform_between_its_bounds(on, on3):
    state = RandomState("vector")
    out = on3.run(Rand2(on3.new((128, 64)), -1.0, 3.0, state))
    assert out.min() >= -1 and out.max() < 3 and abs(out.mean() - 1) < 0.05
    refuses(on3, Rand2(on3.new((128, 64)), 1.0, 1.0, state), "min < max is needed")
    refuses(on, Rand2(on.new((128, 64)), 0.0, 1.0, state), "needs NeuronCore-v4")
