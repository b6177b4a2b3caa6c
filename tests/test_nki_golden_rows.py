"""The documentation's examples of selections, scans, statistics and searches, against numpy."""

# pyright: reportMissingImports=false
import ml_dtypes
import numpy as np
import pytest

from .nki_golden import FP32_MIN, RANDOM, on_tiles, tile, uniform
from .nki_kernels import nisa, nl


def test_bn_stats_and_bn_aggr():
    """nisa.bn_stats, bn_aggr of [128, 128]; goldens np.mean and np.var of rows."""

    def body(a):
        stats, both = tile((128, 6)), tile((128, 2))
        nisa.bn_stats(dst=stats, data=a)
        nisa.bn_aggr(dst=both, data=stats)
        return both

    a = uniform(128, 128)
    both = on_tiles(body, a)
    np.testing.assert_allclose(both[:, 0], a.mean(1), rtol=1e-5)
    np.testing.assert_allclose(both[:, 1], a.var(1), rtol=1e-5)


def test_bn_aggr_of_two_bn_stats():
    """nisa.bn_stats in two tiles of 512, then one bn_aggr; goldens np.mean and np.var of 1024."""

    def body(b):
        limit = nl.tile_size.bn_stats_fmax
        stats, both = tile((128, 12)), tile((128, 2))
        for i in range(1024 // limit):
            part = b[:, nl.ds(i * limit, limit)]
            nisa.bn_stats(dst=stats[:, nl.ds(6 * i, 6)], data=part)
        nisa.bn_aggr(dst=both, data=stats)
        return both

    b = uniform(128, 1024)
    both = on_tiles(body, b)
    np.testing.assert_allclose(both[:, 0], b.mean(1), rtol=1e-5)
    np.testing.assert_allclose(both[:, 1], b.var(1), rtol=1e-5)


def test_tensor_tensor_scan():
    """nisa.tensor_tensor_scan (multiply, add) in two halves, the second from the first's last
    column; golden the recurrence in float64."""

    def body(a, b):
        c = tile(a.shape)
        for start in (0, 512):
            part = nl.ds(start, 512)
            nisa.tensor_tensor_scan(
                dst=c[:, part], data0=a[:, part], data1=b[:, part],
                initial=c[:, nl.ds(511, 1)] if start else 0.0, op0=nl.multiply, op1=nl.add,
            )  # fmt: skip
        return c

    a, b = uniform(128, 1024, scale=1), uniform(128, 1024, scale=1)
    golden = np.zeros((128, 1025))
    for i in range(1024):
        golden[:, i + 1] = a[:, i] * golden[:, i] + b[:, i]
    np.testing.assert_allclose(on_tiles(body, a, b), golden[:, 1:], rtol=1e-5)


# ---- selections --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype",
    [np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3, ml_dtypes.float8_e5m2],
)
def test_range_select(dtype):
    """nisa.range_select, 0 <= 32 + position < 64, and the rows' maximum; golden np.where, cast."""

    def body(on_true, bound0, bound1):
        selected, largest = tile(on_true.shape, on_true.dtype), tile((128, 1), on_true.dtype)
        nisa.range_select(
            dst=selected, on_true_tile=on_true, comp_op0=nl.greater_equal, comp_op1=nl.less,
            bound0=bound0, bound1=bound1, reduce_cmd=nisa.reduce_cmd.reset_reduce,
            reduce_res=largest, reduce_op=nl.maximum, range_start=32, on_false_value=FP32_MIN,
        )  # fmt: skip
        return selected, largest

    data = uniform(128, 512, scale=1).astype(dtype)
    low, high = np.zeros((128, 1), np.float32), np.full((128, 1), 64, np.float32)
    selected, largest = on_tiles(body, data, low, high)
    inside = np.arange(512) + 32 < 64
    kept = data.astype(np.float32)[:, inside]
    np.testing.assert_array_equal(selected[:, inside].astype(np.float32), kept)
    np.testing.assert_array_equal(largest.astype(np.float32), kept.max(1, keepdims=True))
    lowest = np.float32(selected[0, -1])  # of the dtype: it rounds or saturates
    assert (selected[:, ~inside] == selected[0, -1]).all() and (lowest < -1e4 or np.isnan(lowest))


def test_range_select_chained():
    """nisa.range_select three times on one register (reset_reduce, reduce, reduce), read at the
    end; golden the running np.maximum."""

    def body(data, bound0, bound1):
        selected, largest = tile(data.shape), tile((128, 1))
        commands = (nisa.reduce_cmd.reset_reduce, nisa.reduce_cmd.reduce, nisa.reduce_cmd.reduce)
        for i, command in enumerate(commands):
            if i:
                nisa.tensor_scalar(dst=data, data=data, op0=nl.add, operand0=1.0)
            nisa.range_select(
                dst=selected, on_true_tile=data, comp_op0=nl.greater_equal, comp_op1=nl.less,
                bound0=bound0, bound1=bound1, reduce_cmd=command, reduce_op=nl.maximum,
                reduce_res=largest if i == 2 else None, range_start=32 + i * 128,
            )  # fmt: skip
        return selected, largest

    data = uniform(128, 512, scale=1)
    low, high = np.zeros((128, 1), np.float32), np.full((128, 1), 350, np.float32)
    selected, largest = on_tiles(body, data, low, high)
    golden, most = data, np.full((128, 1), FP32_MIN, np.float32)
    chosen = data
    for i in range(3):
        golden = golden + np.float32(1) if i else golden
        inside = 32 + 128 * i + np.arange(512) < 350
        chosen = np.where(inside, golden, np.float32(FP32_MIN))
        most = np.maximum(most, chosen.max(1, keepdims=True))
    np.testing.assert_array_equal(selected, chosen)
    np.testing.assert_array_equal(largest, most)


@pytest.mark.parametrize("reverse", [False, True])
def test_select_reduce(reverse):
    """nisa.select_reduce of a tile or FP32_MIN, also with the predicate reversed; golden
    np.where."""

    def body(predicate, on_true):
        dst = tile(on_true.shape)
        nisa.select_reduce(
            dst=dst, predicate=predicate, on_true=on_true, on_false=FP32_MIN, reverse_pred=reverse
        )
        return dst

    on_true, predicate = np.ones((128, 64), np.float32), np.zeros((128, 64), np.uint8)
    predicate[:64] = 1
    golden = np.where((predicate != 0) != reverse, on_true, np.float32(FP32_MIN))
    np.testing.assert_array_equal(on_tiles(body, predicate, on_true), golden)


def test_select_reduce_with_the_maximum():
    """nisa.select_reduce of a tile or a column, and the maximum; goldens np.where, np.max."""

    def body(predicate, on_true, on_false):
        dst, largest = tile(on_true.shape), tile((128, 1))
        nisa.select_reduce(
            dst=dst, predicate=predicate, on_true=on_true, on_false=on_false,
            reduce_cmd=nisa.reduce_cmd.reset_reduce, reduce_res=largest, reduce_op=nl.maximum,
        )  # fmt: skip
        return dst, largest

    on_true, on_false = uniform(128, 512), uniform(128, 1)
    predicate = RANDOM.integers(0, 2, (128, 512)).astype(np.uint8)
    selected, largest = on_tiles(body, predicate, on_true, on_false)
    golden = np.where(predicate, on_true, on_false)
    np.testing.assert_array_equal(selected, golden)
    np.testing.assert_array_equal(largest, golden.max(1, keepdims=True))


def test_affine_select():
    """nisa.affine_select keeps the lower triangle (partition > column); golden np.tril, FP32_MIN
    above."""

    def body(a):
        b = tile(a.shape)
        nisa.affine_select(
            dst=b, pattern=[[-1, 128]], channel_multiplier=1, on_true_tile=a,
            on_false_value=FP32_MIN, cmp_op=nl.greater,
        )  # fmt: skip
        return b

    a = uniform(128, 128)
    golden = np.where(np.tri(128, k=-1) != 0, a, np.float32(FP32_MIN))
    np.testing.assert_array_equal(on_tiles(body, a), golden)


# ---- the accumulator registers along a row -----------------------------------------------------

ACCUMULATE = {"add": np.add, "multiply": np.multiply, "maximum": np.maximum, "minimum": np.minimum}


def cumulative(source, op1, imm0, imm1=None, command="reset_reduce", chained=False):
    """Output of tensor_scalar_cumulative with op0 add; operands are numbers or [128, 1] arrays.
    `chained`: a second one goes on from the register and writes over the first's output."""
    columns = [v for v in (imm0, imm1) if isinstance(v, np.ndarray)]

    def body(src, *loaded):
        given = list(loaded)
        first = given.pop(0) if isinstance(imm0, np.ndarray) else imm0
        start = given.pop(0) if isinstance(imm1, np.ndarray) else imm1
        dst = tile(src.shape)
        commands = [getattr(nisa.reduce_cmd, command)] + [nisa.reduce_cmd.reduce] * chained
        for each in commands:
            nisa.tensor_scalar_cumulative(
                dst=dst, src=src, op0=nl.add, op1=getattr(nl, op1), imm0=first, imm1=start,
                reduce_cmd=each,
            )  # fmt: skip
        return dst

    return on_tiles(body, source, *columns)


@pytest.mark.parametrize("op1", ["add", "multiply", "maximum"])
@pytest.mark.parametrize("imm0", [0.0, 1.0, "column"])
def test_tensor_scalar_cumulative(op1, imm0):
    """nisa.tensor_scalar_cumulative from the identity; golden ufunc.accumulate of src + imm0."""
    src = uniform(128, 24, scale=1)
    given = uniform(128, 1, scale=1) if imm0 == "column" else imm0
    golden = ACCUMULATE[op1].accumulate(src + np.float32(given), axis=1)
    np.testing.assert_allclose(cumulative(src, op1, given), golden, rtol=1e-5)


@pytest.mark.parametrize("op1", ["add", "multiply", "minimum"])
def test_tensor_scalar_cumulative_from_a_loaded_register(op1):
    """The same with load_reduce of a column; golden accumulate behind that column."""
    src, column, start = (uniform(128, columns, scale=1) for columns in (24, 1, 1))
    rows = np.concatenate([start, src + column], axis=1)
    golden = ACCUMULATE[op1].accumulate(rows, axis=1)[:, 1:]
    made = cumulative(src, op1, column, start, "load_reduce")
    np.testing.assert_allclose(made, golden, rtol=1e-4)


@pytest.mark.parametrize("command, start", [("reset_reduce", None), ("load_reduce", 1.0)])
def test_tensor_scalar_cumulative_chained(command, start):
    """Two of them, the second with reduce; golden cumsum behind the first's total."""
    src = np.ones((128, 64), np.float32)
    made = cumulative(src, "add", 0.0, start, command, chained=True)
    np.testing.assert_array_equal(made, np.cumsum(src, axis=1) + 64 + (start or 0))


def test_tensor_scalar_cumulative_as_a_scan():
    """A scan from 2: load_reduce of a number; golden np.cumsum + 2."""
    src = np.ones((128, 64), np.float32)
    made = cumulative(src, "add", 0.0, 2.0, "load_reduce")
    np.testing.assert_array_equal(made, np.cumsum(src, axis=1) + 2)


# ---- searches ----------------------------------------------------------------------------------


def eight_largest(x):
    """[P, 8] of a [P, ...] array, in descending order."""
    return -np.sort(-x.reshape(len(x), -1), axis=1)[:, :8]


def test_max8():
    """nisa.max8 of [32, 128]; golden the sorted rows' first eight."""

    def body(x):
        largest = tile((32, 8))
        nisa.max8(dst=largest, src=x)
        return largest

    x = uniform(32, 128)
    np.testing.assert_array_equal(on_tiles(body, x), eight_largest(x))


def test_nc_find_index8():
    """nisa.nc_find_index8 of the eight largest of [32, 128]; golden np.argsort."""

    def body(x):
        largest, index = tile((32, 8)), tile((32, 8), nl.uint32)
        nisa.max8(dst=largest, src=x)
        nisa.nc_find_index8(dst=index, data=x, vals=largest)
        return index

    x = uniform(32, 128)
    index = on_tiles(body, x)
    assert index.dtype == np.uint32
    np.testing.assert_array_equal(index, np.argsort(-x, axis=1)[:, :8])


def match_replace(x, value, in_place=False, index=True):
    """Outputs of max8 and nc_match_replace8: the tile, and the positions."""

    def body(data):
        rows = data.shape[0]
        largest, places = tile((rows, 8)), tile((rows, 8), nl.uint32)
        nisa.max8(dst=largest, src=data)
        dst = data if in_place else tile(data.shape)
        nisa.nc_match_replace8(
            dst=dst, data=data, vals=largest, imm=value, dst_idx=places if index else None
        )
        return (dst, places) if index else dst

    return on_tiles(body, x)


def replaced(x, value):
    """Golden: the eight largest of each row replaced, and where they were."""
    rows = x.reshape(len(x), -1).copy()
    places = np.argsort(-rows, axis=1)[:, :8]
    np.put_along_axis(rows, places, np.float32(value), axis=1)
    return rows.reshape(x.shape), places


def test_nc_match_replace8():
    """nisa.nc_match_replace8 of [4, 16] without positions; golden -inf at the eight largest."""
    x = uniform(4, 16)
    made = match_replace(x, float("-inf"), index=False)
    np.testing.assert_array_equal(made, replaced(x, -np.inf)[0])
    assert (np.isinf(made).sum(axis=1) == 8).all()


@pytest.mark.parametrize("shape", [(128, 512), (64, 256), (128, 4, 4)])
@pytest.mark.parametrize("in_place", [False, True])
def test_nc_match_replace8_with_positions(shape, in_place):
    """nisa.nc_match_replace8 with positions, of two and of three axes, also in place; golden
    np.argsort and np.put_along_axis."""
    x = RANDOM.permuted(np.arange(np.prod(shape)).reshape(shape[0], -1), axis=1)
    x = x.reshape(shape).astype(np.float32)
    made, places = match_replace(x, 0.0, in_place)
    golden, where = replaced(x, 0.0)
    np.testing.assert_array_equal(made, golden)
    np.testing.assert_array_equal(places, where)


def test_sequence_bounds():
    """nisa.sequence_bounds of 32 sorted segment numbers; golden a loop over them."""

    def body(ids):
        bounds = tile((1, 2, 32))
        nisa.sequence_bounds(dst=bounds, segment_ids=ids)
        return bounds

    ids = np.sort(RANDOM.integers(0, 12, 32)).astype(np.float32)
    golden = np.empty((2, 32))
    for i, own in enumerate(ids):
        same = np.flatnonzero(ids == own)
        golden[:, i] = (32, -1) if own == 0 else (same[0], same[-1] + 1)
    assert (ids == 0).any()
    np.testing.assert_array_equal(on_tiles(body, ids[None])[0], golden)


def test_sequence_bounds_of_the_documented_example():
    """nisa.sequence_bounds with padding before and inside; golden as the page prints it."""

    def body(ids):
        bounds = tile((1, 2, 9), nl.int32)
        nisa.sequence_bounds(dst=bounds, segment_ids=ids)
        return bounds

    ids = np.array([[0, 1, 1, 2, 2, 2, 0, 3, 3]], np.int32)
    golden = [[9, 1, 1, 3, 3, 3, 9, 7, 7], [-1, 3, 3, 6, 6, 6, -1, 9, 9]]
    np.testing.assert_array_equal(on_tiles(body, ids)[0], golden)
