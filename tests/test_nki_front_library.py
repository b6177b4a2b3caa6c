"""What published kernel libraries do and the simulator has to take: each case was a refusal."""

import importlib
import sys
from typing import Any

import ml_dtypes  # noqa: F401 - numpy knows bfloat16 by it
import numpy as np
import pytest

from trnsim.device.errors import IllegalInstruction, OutOfMemory
from trnsim.device.nki import install, simulate
from trnsim.device.nki import isa as nisa
from trnsim.device.nki import language as nl
from trnsim.device.nki.dtypes import as_dtype
from trnsim.device.nki.errors import NotModelled
from trnsim.device.nki.install import uninstall
from trnsim.device.nki.kernel import jit


def saved(tile: Any) -> Any:
    """The tile in shared HBM."""
    out = nl.ndarray(tile.shape, dtype=tile.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=tile)
    return out


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).random(shape).astype(np.float32)


# ---- dtypes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["float8_e4m3fn_x4", "float8_e5m2_x4", "float4_e2m1fn_x4"])
def test_packed_arrays_carry_their_element_type_in_and_out(name):
    """numpy has no such dtype: an unsigned integer's metadata has the name."""
    packed = np.arange(128 * 4).reshape(128, 4).astype(getattr(nl, name).dtype)
    seen = []

    def kernel(x):
        seen.append(x.dtype)
        return saved(nl.load(x))

    out = simulate(kernel, packed).output
    assert seen == [getattr(nl, name)]
    assert as_dtype(out.dtype) is getattr(nl, name)
    assert out.tobytes() == packed.tobytes()
    assert getattr(nl, name) == packed.dtype
    assert getattr(nl, name) != np.dtype(packed.dtype.str)


# ---- imports ---------------------------------------------------------------------------------


@pytest.fixture
def installed():
    install()
    yield
    uninstall()


def test_annotations_of_the_old_package_are_there_and_nothing_else_of_it(installed):
    typing = importlib.import_module("neuronxcc.nki.typing")
    assert typing.tensor is nl.ndarray and typing.mutable_tensor is nl.ndarray
    with pytest.raises(NotModelled, match="neuronxcc.nki.isa is not modelled"):
        print(importlib.import_module("neuronxcc.nki").isa)
    uninstall()
    assert "neuronxcc" not in sys.modules


# ---- operands --------------------------------------------------------------------------------


def test_enumerations_are_given_by_value_too():
    none: Any = nisa.dge_mode.none.value

    def kernel(x):
        tile = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=tile, src=x, dge_mode=none)
        return saved(tile)

    x = floats(128, 8)
    np.testing.assert_array_equal(simulate(kernel, x).output, x)


def test_a_transpose_may_say_that_nobody_makes_its_descriptors():
    def kernel(x):
        turned = nl.ndarray((8, 16), dtype=x.dtype, buffer=nl.sbuf)
        nisa.dma_transpose(dst=turned, src=x, dge_mode=nisa.dge_mode.none)
        return saved(turned)

    x = floats(16, 8)
    np.testing.assert_array_equal(simulate(kernel, x).output, x.T)


@pytest.mark.parametrize(("repeats", "fits"), [(100, True), (0, False)])
def test_elements_that_a_view_of_psum_repeats_count_once(repeats, fits):
    """64 elements read 100 times are 64 of the 4096; 6400 different ones do not fit."""

    def kernel(x):
        sums = nl.ndarray((128, 64 if fits else 6400), dtype=nl.bfloat16, buffer=nl.psum)
        nisa.memset(sums[:, 0:64], 2.0)
        view = sums.expand_dim(2).broadcast(2, repeats) if fits else sums
        wide = nl.ndarray(view.shape, dtype=x.dtype, buffer=nl.sbuf)
        nisa.tensor_copy(dst=wide, src=view)
        return saved(wide)

    if fits:
        assert (simulate(kernel, floats(128, 1)).output == 2.0).all()
    else:
        with pytest.raises(IllegalInstruction, match="6400 elements per partition; limit in psum"):
            simulate(kernel, floats(128, 1))


# ---- functions of tiles ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["floor", "ceil", "trunc", "tan"])
def test_functions_that_no_engine_has_are_composed(name):
    def kernel(x):
        return saved(getattr(nl, name)(nl.load(x)))

    edges = [-2.5, -2.0, -1.5, -0.5, 0.0, 0.49999997, 0.5, 1.5, 2.5, 3.0]
    x = np.resize(np.array(edges, np.float32), (128, 10)) * (0.4 if name == "tan" else 1)
    found = simulate(kernel, x).output
    np.testing.assert_allclose(found, getattr(np, name)(x), rtol=1e-5 * (name == "tan"))


@pytest.mark.parametrize("name", ["mod", "fmod"])
def test_remainders_are_not_modelled(name):
    with pytest.raises(NotModelled, match=f"nki.language.{name} is not modelled"):
        simulate(lambda x: getattr(nl, name)(nl.load(x), 2.0), floats(128, 4))


def test_gather_flattened_picks_by_each_partitions_own_indices():
    def kernel(x, index):
        return saved(nl.gather_flattened(nl.load(x), nl.load(index), dtype=nl.bfloat16))

    x = np.random.default_rng(0).integers(0, 99, (128, 2, 8)).astype(np.float32)
    index = np.random.default_rng(1).integers(0, 16, (128, 5)).astype(np.int32)
    found = simulate(kernel, x, index).output
    golden = np.take_along_axis(x.reshape(128, 16), index, 1)
    np.testing.assert_array_equal(found.astype(np.float32), golden)


def test_gather_along_another_axis_is_not_modelled():
    with pytest.raises(NotModelled, match=r"gather_flattened\(axis=1\)"):
        simulate(lambda x: nl.gather_flattened(nl.load(x), nl.load(x), 1), floats(128, 4))


def mx_product(x, w, columns, position):
    """Quantized w.T @ x[:, columns], the columns picked on the way into the Tensor engine."""
    scales, packed = [], []
    for tensor in (x, w):
        data = nl.ndarray((128, tensor.shape[1] // 4), dtype=nl.float8_e4m3fn_x4, buffer=nl.sbuf)
        scale = nl.ndarray(data.shape, dtype=nl.uint8, buffer=nl.sbuf)
        nisa.memset(scale, 0)
        nisa.quantize_mx(data, nl.load(tensor), scale)
        packed.append(data)
        scales.append(scale)
    moving, moving_scale = packed[0], scales[0]
    if columns is not None:
        index = nl.load(columns)
        moving, moving_scale = moving.indirect(index, 32), moving_scale.indirect(index, 32)
        if position == "other index":
            moving_scale = scales[0].indirect(nl.load(columns), 32)
    out = nl.ndarray((w.shape[1] // 4, moving.shape[1]), dtype=nl.float32, buffer=nl.psum)
    places = position if isinstance(position, tuple) else None
    nisa.nc_matmul_mx(out, packed[1], moving, scales[1], moving_scale, tile_position=places)
    copy = nl.ndarray(out.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(copy, out)
    return saved(copy)


def columns_of(picks: np.ndarray) -> np.ndarray:
    """Offset i of 32 partitions is at [i % 32, i // 32] of their index."""
    return np.tile(picks.reshape(-1, 32).T, (4, 1)).astype(np.uint16)


def test_mx_operands_take_columns_by_index():
    x, w = floats(128, 4 * 48).astype("bfloat16"), floats(128, 4 * 16).astype("bfloat16")
    picks = np.random.default_rng(2).permutation(48)[:32]
    whole = simulate(mx_product, x, w, None, None, chip="trn3").output
    found = simulate(mx_product, x, w, columns_of(picks), None, chip="trn3").output
    np.testing.assert_array_equal(found, whole[:, picks])


@pytest.mark.parametrize(
    ("position", "message"),
    [
        ("other index", "and its scales do not have the same index"),
        ((32, 0), r"tile_position is \(32, 0\); \(0, 0\) with an index"),
    ],
)
def test_mx_operands_and_scales_go_by_one_index_without_tiles(position, message):
    x, w = floats(128, 4 * 48).astype("bfloat16"), floats(128, 4 * 16).astype("bfloat16")
    index = columns_of(np.arange(32))
    with pytest.raises(IllegalInstruction, match=message):
        simulate(mx_product, x, w, index, position, chip="trn3")


# ---- torch -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float8_e4m3fn", "int32"])
def test_torch_tensors_in_and_out(name):
    torch = pytest.importorskip("torch")
    x = torch.arange(128 * 4).reshape(128, 4).to(getattr(torch, name))
    out = jit(lambda x: saved(nl.load(x)))(x)
    assert isinstance(out, torch.Tensor) and out.dtype == x.dtype
    assert torch.equal(out.to(torch.float32), x.to(torch.float32))


# ---- memory ----------------------------------------------------------------------------------


def banks(x, count, again):
    """`count` banks filled and read one after the other; then the first `again` read once more."""
    tiles, total = [], nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(total, 0.0)
    for i in range(count):
        tiles.append(nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.psum))
        nisa.memset(tiles[i], float(i + 1))
        nisa.tensor_tensor(total, total, tiles[i], nl.add)
    for i in range(again):
        nisa.tensor_tensor(total, total, tiles[i], nl.add)
    return saved(total)


def test_the_place_of_a_tensor_read_for_the_last_time_is_given_again():
    """Python holds 20 banks of PSUM, of which never more than 8 are still to be used."""
    result = simulate(banks, floats(1, 1), 20, 1)
    assert (result.output == sum(range(1, 21)) + 1).all()
    assert result.memory.peak_psum == 2 * 2048


def test_what_is_used_at_once_has_to_fit():
    with pytest.raises(
        OutOfMemory,
        match=r"test_nki_front_library.py:\d+: psum: psum8 needs 2048 B per partition, 0 B of "
        r"16384 B per partition are free, .*held by: psum0 2048 B",
    ):
        simulate(banks, floats(1, 1), 9, 9)


def test_what_does_not_fit_is_noted_where_hazards_are():
    """The compiler may order instructions so that it fits: here every bank is read at the end."""

    def kernel(x):
        tiles = [nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.psum) for _ in range(9)]
        for i, tile in enumerate(tiles):
            nisa.memset(tile, float(i))
        total = nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.sbuf)
        nisa.memset(total, 0.0)
        for tile in tiles:
            nisa.tensor_tensor(total, total, tile, nl.add)
        return saved(total)

    result = simulate(kernel, floats(1, 1), hazards="report")
    assert (result.output == sum(range(9))).all()
    (finding,) = result.findings.values()
    assert "psum8 needs 2048 B per partition, 0 B of 16384 B" in finding
    with pytest.raises(OutOfMemory, match="psum8 needs 2048 B per partition, 0 B of 16384 B"):
        simulate(kernel, floats(1, 1))


def test_a_bank_is_given_again_where_a_small_tensor_lies_in_its_middle():
    def kernel(x):
        first = nl.ndarray((128, 256), dtype=nl.float32, buffer=nl.psum)
        small = nl.ndarray((128, 8), dtype=nl.float32, buffer=nl.psum)
        nisa.memset(small, 1.0)
        out = nl.ndarray((128, 8), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_copy(out, small)
        del first
        full = [nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.psum) for _ in range(8)]
        for tile in full:
            nisa.memset(tile, 2.0)
        nisa.tensor_tensor(out, out, full[7][:, 0:8], nl.add)
        return saved(out)

    assert (simulate(kernel, floats(1, 1)).output == 3.0).all()


# ---- two cores -------------------------------------------------------------------------------


def test_cores_that_write_the_same_values_do_not_race():
    """A kernel that does not share its work runs on two cores; each writes all of the output."""

    @jit
    def kernel(x):
        halfway = saved(nl.load(x))
        return saved(nl.load(halfway[0:64]))

    x = floats(128, 8)
    np.testing.assert_array_equal(simulate(kernel[2], x).output, x[:64])


@pytest.mark.parametrize(("rows", "races"), [((0, 1), False), ((1, 1), True)])
def test_rows_by_index_race_where_they_are_the_same_rows(rows, races):
    """Core 0 adds to rows that it picks, core 1 writes a row beside them."""

    @jit
    def kernel(x, index):
        table = nl.ndarray((2, 64), dtype=x.dtype, buffer=nl.shared_hbm)
        where = nl.load(index)
        tile = nl.load(x)
        if nl.program_id(0) == 0:
            nisa.dma_copy(dst=table.vector_select(0, where[0:1, 0:1]), src=tile[0:1])
        else:
            other = nl.ndarray((1, 64), dtype=x.dtype, buffer=nl.sbuf)
            nisa.tensor_scalar(other, tile[0:1], nl.add, 1.0)
            nisa.dma_copy(dst=table[rows[1] : rows[1] + 1], src=other)
        return table

    x = floats(1, 64)
    index = np.array([[rows[0]]], np.int32)
    if races:
        with pytest.raises(IllegalInstruction, match="race: core 1 writes"):
            simulate(kernel[2], x, index)
    else:
        np.testing.assert_array_equal(simulate(kernel[2], x, index).output, [x[0], x[0] + 1])


def test_a_barrier_on_one_core_waits_for_nobody():
    @jit
    def kernel(x):
        out = saved(nl.load(x))
        nisa.core_barrier(out, (0))
        return out

    assert simulate(kernel, floats(128, 8)).output.shape == (128, 8)


def test_a_barrier_on_a_tile_is_noted():
    @jit
    def kernel(x):
        tile = nl.load(x)
        nisa.core_barrier(tile, (0, 1))
        return saved(tile)

    result = simulate(kernel[2], floats(128, 8))
    assert list(result.findings.values()) == [
        "core_barrier: data is in sbuf; documented is shared_hbm"
    ]
