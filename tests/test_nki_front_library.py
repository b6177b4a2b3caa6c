"""What published kernel libraries do and the simulator has to take: each case was a refusal."""

import importlib
import sys
from typing import Any

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
    def kernel(x):
        tile = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=tile, src=x, dge_mode=3)
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
    assert result.memory.peak_psum == 16384


def test_what_is_used_at_once_has_to_fit():
    with pytest.raises(
        OutOfMemory,
        match=r"test_nki_front_library.py:\d+: psum: psum8 needs 2048 B per partition while others "
        r"are still to be used: 18432 B of 16384 B per partition, held by: psum0 2048 B",
    ):
        simulate(banks, floats(1, 1), 9, 9)


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
        return saved(nl.load(x))

    x = floats(128, 8)
    np.testing.assert_array_equal(simulate(kernel[2], x).output, x)


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
