"""The documentation's examples of copies, gathers, patterns and transposes, against numpy."""

# pyright: reportMissingImports=false, reportIndexIssue=false
import numpy as np
import pytest

from trnsim.device.errors import IllegalInstruction
from trnsim.device.nki import simulate

from .nki_golden import RANDOM, on_tiles, saved, tile, uniform
from .nki_kernels import nisa, nki, nl

# ---- DMA ---------------------------------------------------------------------------------------


def copied(*, chip="trn2", **options):
    """A kernel that copies HBM to HBM by one dma_copy."""

    def kernel(a):
        b = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=b, src=a, **options)
        return b

    return lambda a: simulate(kernel, a, chip=chip).output


def test_dma_copy():
    """nisa.dma_copy of [256, 1] in HBM; golden the input."""
    a = uniform(256, 1)
    np.testing.assert_array_equal(copied()(a), a)


def test_dma_copy_by_software_descriptors():
    """nisa.dma_copy with dge_mode swdge; golden the input."""
    a = uniform(64, 512)
    np.testing.assert_array_equal(copied(dge_mode=nisa.dge_mode.swdge)(a), a)


def test_dma_copy_by_hardware_descriptors():
    """nisa.dma_copy between SBUF tiles with dge_mode hwdge on trn2, refused on trn1."""

    def body(a):
        b = tile(a.shape)
        nisa.dma_copy(dst=b, src=a, dge_mode=nisa.dge_mode.hwdge)
        return b

    a = uniform(128, 512)
    np.testing.assert_array_equal(on_tiles(body, a), a)
    with pytest.raises(IllegalInstruction, match="hwdge needs NeuronCore-v3 or later, not trn1"):
        on_tiles(body, a, chip="trn1")


def every(step, rows):
    """Row numbers 0, step, 2 step, ... as an iota on chip."""
    index = tile((rows, 1), nl.int32)
    nisa.iota(dst=index, pattern=[[0, 1]], channel_multiplier=step)
    return index


@nki.jit
def gather_rows(a, step, mode):
    """Half as many rows as `a` has, each `step`-th; those that are not there stay -1."""
    rows = a.shape[0] // 2
    picked = tile((rows, a.shape[1]))
    nisa.memset(dst=picked, value=-1.0)
    source = a.vector_select(0, every(step, rows))
    nisa.dma_copy(dst=picked, src=source, oob_mode=mode)
    return saved(picked)


@nki.jit
def scatter_rows(a, step, mode):
    """The rows of `a` into each `step`-th row of twice as many; the others stay -1."""
    rows, columns = a.shape
    out = nl.full((2 * rows, columns), -1.0, dtype=a.dtype, buffer=nl.shared_hbm)
    target = out.vector_select(0, every(step, rows))
    nisa.dma_copy(dst=target, src=nl.load(a), oob_mode=mode)
    return out


ERROR, SKIP = nisa.oob_mode.error, nisa.oob_mode.skip


def test_indirect_load():
    """nisa.dma_copy from every second row; golden fancy indexing."""
    a = uniform(128, 512)
    made = simulate(gather_rows, a, 2, ERROR).output
    np.testing.assert_array_equal(made, a[2 * np.arange(64)])


def test_indirect_load_skips_rows_that_are_not_there():
    """nisa.dma_copy from every third row with oob_mode skip; golden the first 43 rows, then -1."""
    a = uniform(128, 512)
    golden = np.full((64, 512), -1, np.float32)
    golden[:43] = a[3 * np.arange(43)]
    np.testing.assert_array_equal(simulate(gather_rows, a, 3, SKIP).output, golden)


def test_indirect_load_of_rows_that_are_not_there():
    """nisa.dma_copy from every third row with oob_mode error; an error that names row 129."""
    with pytest.raises(IllegalInstruction, match=r"golden_moves.py:\d+: .*offset 129 is out of b"):
        simulate(gather_rows, uniform(128, 512), 3, ERROR)


def test_indirect_store():
    """nisa.dma_copy into every second row; golden fancy assignment."""
    a = uniform(64, 512)
    golden = np.full((128, 512), -1, np.float32)
    golden[::2] = a
    np.testing.assert_array_equal(simulate(scatter_rows, a, 2, ERROR).output, golden)


def test_indirect_store_skips_rows_that_are_not_there():
    """nisa.dma_copy into every third row with oob_mode skip; golden the first 43 rows."""
    a = uniform(64, 512)
    golden = np.full((128, 512), -1, np.float32)
    golden[3 * np.arange(43)] = a[:43]
    np.testing.assert_array_equal(simulate(scatter_rows, a, 3, SKIP).output, golden)


def test_indirect_store_into_rows_that_are_not_there():
    """nisa.dma_copy into every third row with oob_mode error; an error that names row 129."""
    with pytest.raises(IllegalInstruction, match=r"golden_moves.py:\d+: .*offset 129 is out of b"):
        simulate(scatter_rows, uniform(64, 512), 3, ERROR)


def test_indirect_store_that_adds():
    """nisa.dma_compute (what dma_copy's dst_rmw_op became) onto every second row of ones; golden
    fancy +=."""

    def kernel(a):
        out = nl.full((128, 512), 1.0, dtype=a.dtype, buffer=nl.shared_hbm)
        target = out.vector_select(0, every(2, 64))
        nisa.dma_compute(dst=target, srcs=[nl.load(a), target], reduce_op=nl.add)
        return out

    a = uniform(64, 512)
    golden = np.ones((128, 512), np.float32)
    golden[::2] += a
    np.testing.assert_array_equal(simulate(kernel, a).output, golden)


# ---- DMA transposes ----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["unknown", "hwdge"])
@pytest.mark.parametrize("from_hbm", [True, False])
def test_dma_transpose(from_hbm, mode):
    """nisa.dma_transpose of float16 [16, 128] from HBM and from SBUF, by either way; golden .T."""

    def kernel(a):
        turned = tile(a.shape[::-1], a.dtype)
        source = a if from_hbm else nl.load(a)
        nisa.dma_transpose(dst=turned, src=source, dge_mode=getattr(nisa.dge_mode, mode))
        return saved(turned)

    a = uniform(16, 128).astype(np.float16)
    np.testing.assert_array_equal(simulate(kernel, a).output, a.T)


def test_dma_transpose_of_gathered_rows():
    """nisa.dma_transpose of rows that an index picks, axes (2, 1, 0); golden np.transpose."""

    def kernel(a, rows):
        turned = tile((128, 4, 32), a.dtype)
        picked = a.vector_select(0, nl.load(rows))
        nisa.dma_transpose(dst=turned, src=picked, axes=(2, 1, 0))
        return saved(turned)

    a = np.arange(64 * 4 * 128).reshape(64, 4, 128).astype(np.uint16)
    rows = RANDOM.permutation(64)[:32].astype(np.uint32)[:, None]
    golden = a[rows[:, 0]].transpose(2, 1, 0)
    np.testing.assert_array_equal(simulate(kernel, a, rows).output, golden)


def test_load_transpose2d():
    """nl.load_transpose2d, and nisa.dma_transpose, of float32 [2048, 128]; golden .T."""

    def kernel(a):
        by_dma = tile(a.shape[::-1], a.dtype)
        nisa.dma_transpose(dst=by_dma, src=a)
        return saved(nl.load_transpose2d(a)), saved(by_dma)

    a = uniform(2048, 128)
    for made in simulate(kernel, a).outputs:
        np.testing.assert_array_equal(made, a.T)


# ---- loads and stores --------------------------------------------------------------------------


@nki.jit
def through_sbuf(a, width):
    """A copy in slices of columns, each taken as a Python slice and as nl.ds."""
    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    for i in nl.affine_range(a.shape[1] // width):
        loaded = nl.load(a[:, i * width : (i + 1) * width])
        again = nl.load(a[:, nl.ds(i * width, width)])
        nisa.tensor_tensor(dst=loaded, data1=loaded, data2=again, op=nl.maximum)
        nl.store(out[:, nl.ds(i * width, width)], loaded)
    return out


@pytest.mark.parametrize("width", [512, 4096])
def test_load_store_and_ds(width):
    """nl.load, nl.store and nl.ds; golden the input (what mgrid's index tiles said are slices)."""
    a = uniform(128, 4096)
    np.testing.assert_array_equal(simulate(through_sbuf, a, width).output, a)


def test_load_and_store_of_batches():
    """nl.load and nl.store of one batch of [4, 128, 512] after another; golden the input."""

    def kernel(a):
        out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
        for batch in nl.affine_range(4):
            nl.store(out[batch, 0:128, 0:512], nl.load(a[batch, 0:128, 0:512]))
        return out

    a = uniform(4, 128, 512)
    np.testing.assert_array_equal(simulate(kernel, a).output, a)


def test_a_constant_in_hbm():
    """nl.full in HBM (what nl.store of a number was); golden np.full."""
    made = simulate(lambda a: nl.full(a.shape, 100, a.dtype, nl.shared_hbm), uniform(256, 512))
    np.testing.assert_array_equal(made.output, np.full((256, 512), 100, np.float32))


@pytest.mark.parametrize("by_iota", [True, False])
def test_load_and_store_of_picked_rows(by_iota):
    """nl.load and nl.store through row numbers, from HBM or from iota; golden fancy indexing."""

    def kernel(data, rows):
        index = every(2, 64) if by_iota else nl.load(rows)
        picked = nl.load(data.vector_select(0, index))
        out = nl.full(data.shape, 0.0, dtype=data.dtype, buffer=nl.shared_hbm)
        nl.store(out.vector_select(0, index), picked)
        return saved(picked), out

    data, rows = uniform(128, 512), (2 * np.arange(64, dtype=np.int32))[:, None]
    picked, out = simulate(kernel, data, rows).outputs
    np.testing.assert_array_equal(picked, data[::2])
    np.testing.assert_array_equal(out[::2], data[::2])
    assert not out[1::2].any()


def test_nc_n_gather():
    """nisa.nc_n_gather of random columns of [32, 64]; golden np.take_along_axis."""

    def body(data, index):
        picked = tile(index.shape)
        nisa.nc_n_gather(dst=picked, data=data, indices=index)
        return picked

    data, index = uniform(32, 64), RANDOM.integers(0, 64, (32, 10)).astype(np.uint32)
    made = on_tiles(body, data, index)
    np.testing.assert_array_equal(made, np.take_along_axis(data, index.astype(int), axis=1))


def test_gather_flattened():
    """nl.gather_flattened of every fifth and of random columns; golden np.take_along_axis."""
    data, index = uniform(32, 64), RANDOM.integers(0, 64, (32, 20)).astype(np.uint32)
    index[:, :10] = np.arange(10) * 5
    made = on_tiles(lambda d, i: nl.gather_flattened(d, i), data, index)
    np.testing.assert_array_equal(made, np.take_along_axis(data, index.astype(int), axis=1))


def test_local_gather():
    """nisa.local_gather of [128, 512, 4] by [128, 4] indices, four elements each; golden np.take
    in each 16 partitions, indices column by column."""

    def body(source, index):
        gathered = tile((128, 4, 16, 4))
        nisa.local_gather(
            dst=gathered, src_buffer=source, index=index, num_elem_per_idx=4, num_valid_indices=64
        )
        return gathered

    source = uniform(128, 512, 4)
    own = RANDOM.integers(0, 512, (8, 16, 4)).astype(np.uint16)
    made = on_tiles(body, source, own.reshape(128, 4) * np.uint16(4))
    for core in range(8):
        rows = slice(16 * core, 16 * core + 16)
        golden = source[rows][:, own[core].T.reshape(-1)]
        np.testing.assert_array_equal(made[rows], golden.reshape(16, 4, 16, 4))


# ---- the grid ----------------------------------------------------------------------------------


@nki.jit
def by_program(a):
    """Each core copies its part of the first axis, one element tile after another."""
    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    share = a.shape[0] // nl.num_programs()
    for i in range(share):
        for j in range(a.shape[1]):
            row = nl.program_id(0) * share + i
            nl.store(out[row, j], nl.load(a[row, j]))
    return out


@pytest.mark.parametrize("cores", [1, 2])
def test_spmd_grid(cores):
    """kernel[n] over [4, 2, 1, 1] by program_id; golden the input. More programs than a logical
    core has cores do not exist."""
    a = uniform(4, 2, 1, 1)
    np.testing.assert_array_equal(simulate(by_program[cores], a).output, a)


# ---- GpSimd's patterns, and moves between partitions -------------------------------------------


@pytest.mark.parametrize(
    "shape, step, channel, offset, golden",
    [
        ((1, 512), 1, 0, 0, np.arange(512)[None]),
        ((128, 1), 0, 1, 0, np.arange(128)[:, None]),
        ((1, 512), -1, 0, 0, -np.arange(512)[None]),
        ((128, 1), 0, 2, 5, np.arange(5, 260, 2)[:, None]),
        ((128, 512), 1, 1, 0, np.arange(512)[None] + np.arange(128)[:, None]),
    ],
)
def test_iota(shape, step, channel, offset, golden):
    """nisa.iota along columns, partitions, downwards, from 5 by 2, and along both; goldens
    np.arange."""

    def kernel(x):
        made = tile(shape, nl.int32)
        pattern = [[step, shape[1]]]
        nisa.iota(dst=made, pattern=pattern, offset=offset, channel_multiplier=channel)
        return saved(made)

    np.testing.assert_array_equal(simulate(kernel, uniform(1, 1)).output, golden)


def test_tensor_partition_reduce():
    """nisa.tensor_partition_reduce, the sum over 128 partitions of [128, 32, 4]; golden np.sum."""

    def body(a):
        total = tile((1, 32, 4))
        nisa.tensor_partition_reduce(dst=total, op=nl.add, data=a)
        return total

    a = uniform(128, 32, 4)
    np.testing.assert_allclose(on_tiles(body, a), a.sum(0, keepdims=True), rtol=1e-5)


def test_tensor_partition_reduce_of_batches():
    """The same of each of four batches; golden np.sum of axis 1."""

    def kernel(a):
        out = nl.ndarray((4, 1, 32, 8), dtype=a.dtype, buffer=nl.shared_hbm)
        for batch in nl.affine_range(4):
            total = tile((1, 32, 8))
            nisa.tensor_partition_reduce(dst=total, op=nl.add, data=nl.load(a[batch]))
            nl.store(out[batch], total)
        return out

    a = uniform(4, 128, 32, 8)
    made = simulate(kernel, a).output
    np.testing.assert_allclose(made, a.sum(1, keepdims=True), rtol=1e-5)


ROTATED = [(i - 1) % 32 for i in range(32)]


def test_nc_stream_shuffle_in_place():
    """nisa.nc_stream_shuffle of 32 partitions onto themselves; golden fancy indexing."""

    def body(a):
        nisa.nc_stream_shuffle(dst=a, src=a, shuffle_mask=ROTATED)
        return a

    a = uniform(32, 128)
    np.testing.assert_array_equal(on_tiles(body, a), a[ROTATED])


def test_nc_stream_shuffle_spreads_one_partition():
    """nisa.nc_stream_shuffle of one partition to 32; golden np.repeat."""

    def body(a):
        b = tile((32, 128))
        nisa.nc_stream_shuffle(dst=b, src=a, shuffle_mask=[0] * 32)
        return b

    a = uniform(1, 128)
    np.testing.assert_array_equal(on_tiles(body, a), np.repeat(a, 32, axis=0))


def test_nc_stream_shuffle_is_the_same_in_each_quadrant():
    """nisa.nc_stream_shuffle of 128 partitions; golden fancy indexing in each 32."""

    def body(a):
        b = tile(a.shape)
        nisa.nc_stream_shuffle(dst=b, src=a, shuffle_mask=ROTATED)
        return b

    a = uniform(128, 128)
    golden = a.reshape(4, 32, 128)[:, ROTATED].reshape(128, 128)
    np.testing.assert_array_equal(on_tiles(body, a), golden)
