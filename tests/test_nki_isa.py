"""`nki.isa` in kernels: signatures, engines chosen, accumulation, indirect addresses, errors."""

import inspect
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from trnsim.device.errors import BadInput, TrnsimError
from trnsim.device.nki import isa as nisa
from trnsim.device.nki import language as nl
from trnsim.device.nki import simulate

SIGNATURES = """
dma_copy dst src priority oob_mode dge_mode engine name
tensor_copy dst src engine name dtype
memset dst value engine name
tensor_copy_predicated dst src predicate reverse_pred name
nc_matmul dst stationary moving is_stationary_onezero is_moving_onezero is_transpose accumulate tile_position tile_size perf_mode name
nc_matmul_mx dst stationary moving stationary_scale moving_scale tile_position tile_size accumulate name
nc_transpose dst data engine name
dma_transpose dst src axes priority dge_mode oob_mode name
tensor_tensor dst data1 data2 op engine name
tensor_scalar dst data op0 operand0 reverse0 op1 operand1 reverse1 engine name
tensor_reduce dst op data axis negate keepdims name
tensor_partition_reduce dst op data name
tensor_scalar_cumulative dst src op0 op1 imm0 imm1 reduce_cmd name
activation dst op data bias scale reduce_op reduce_res reduce_cmd name
activation_reduce dst op data reduce_op reduce_res bias scale name
activate2 dst op data imm0 imm1 op0 op1 relu_param reverse0 reverse1 reduce_op reduce_res reduce_cmd name
iota dst pattern offset channel_multiplier name
affine_select dst pattern channel_multiplier on_true_tile on_false_value cmp_op offset name
local_gather dst src_buffer index num_elem_per_idx num_valid_indices name
nc_n_gather dst data indices name
bn_stats dst data name
bn_aggr dst data name
tensor_tensor_scan dst data0 data1 initial op0 op1 reverse0 reverse1 name
nc_stream_shuffle dst src shuffle_mask name
rng dst engine name
dropout dst data prob name
set_rng_seed src_seeds name
rand_set_state src_seeds engine name
rand_get_state dst engine name
rand2 dst min max name
exponential dst src max_value reduce_res reduce_cmd reduce_init name
reciprocal dst data name
max8 dst src name
sequence_bounds dst segment_ids name
scalar_tensor_tensor dst data op0 operand0 op1 operand1 reverse0 reverse1 name
tensor_scalar_reduce dst data op0 operand0 reduce_op reduce_res reverse0 reduce_cmd reduce_init reduce_res_negate name
core_barrier data cores engine name
dma_compute dst srcs reduce_op scales unique_indices oob_mode name
quantize_mx dst src dst_scale name
range_select dst on_true_tile comp_op0 comp_op1 bound0 bound1 reduce_cmd reduce_res reduce_op range_start on_false_value name
select_reduce dst predicate on_true on_false reduce_res reduce_cmd reduce_op reverse_pred name
sendrecv src dst send_to_rank recv_from_rank pipe_id dma_engine name
register_alloc x
register_move dst src
register_load dst src
register_store dst src
nc_find_index8 dst data vals name
nc_match_replace8 dst data vals imm dst_idx name
nonzero_with_count dst src index_offset padding_val name
topk val_dst idx_dst src n name
get_nc_version
get_nc_sub_version
"""  # noqa: E501
"""Functions of NKI 0.6 with their parameters, in order (nki/api/nki/isa/__init__.py)."""

VECTOR: Any = "vector"
ONE: Any = 1
X = np.random.default_rng(0).standard_normal((32, 16)).astype(np.float32)


@pytest.mark.parametrize("line", SIGNATURES.strip().splitlines(), ids=lambda line: line.split()[0])
def test_signatures_are_those_of_the_documentation(line):
    name, *parameters = line.split()
    assert list(inspect.signature(getattr(nisa, name)).parameters) == parameters


def loaded(x):
    """A tile in SBUF with an input's values."""
    tile = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=x)
    return tile


def saved(tile):
    """An output with a tile's values."""
    out = nl.ndarray(tile.shape, dtype=tile.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=tile)
    return out


def run(kernel, *inputs, **options):
    """The first output, and the events' (engine, opcode)."""
    result = simulate(kernel, *inputs, **options)
    outputs = result.outputs
    first = outputs[0] if isinstance(outputs, list | tuple) else outputs
    return np.asarray(first), [(event.engine, event.opcode) for event in result.events]


def engine_of(events, opcode):
    """The engine that ran the only instruction of that name."""
    (found,) = [engine for engine, name in events if name == opcode]
    return found


# ---- engines ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype, op, engine, expected",
    [
        (np.float32, nl.add, nisa.engine.unknown, "vector"),
        (np.int32, nl.add, nisa.engine.unknown, "gpsimd"),
        (np.int32, nl.add, nisa.engine.vector, "vector"),
        (np.int32, nl.bitwise_and, nisa.engine.unknown, "vector"),
        (np.float32, nl.power, nisa.engine.unknown, "gpsimd"),
    ],
)
def test_the_engine_of_tensor_tensor(dtype, op, engine, expected):
    def kernel(a):
        x = loaded(a)
        nisa.tensor_tensor(x, x, x, op, engine=engine)
        return saved(x)

    _, events = run(kernel, np.full((4, 4), 3, dtype))
    assert engine_of(events, "TensorTensor") == expected


def test_integers_in_psum_go_to_vector():
    def kernel(a):
        x = loaded(a)
        psum = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.psum)
        nisa.tensor_copy(psum, x)
        nisa.tensor_tensor(x, x, psum, nl.add)
        return saved(x)

    out, events = run(kernel, np.full((4, 4), 3, np.int32))
    assert engine_of(events, "TensorTensor") == "vector" and (out == 6).all()


def test_the_engine_of_a_transpose_follows_its_shape():
    def kernel(a, b):
        small, large = loaded(a), loaded(b)
        first = nl.ndarray((16, 32), dtype=nl.float32, buffer=nl.psum)
        second = nl.ndarray((16, 64), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_transpose(first, small)
        nisa.nc_transpose(second, large)
        out = nl.ndarray((16, 64), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_copy(out, second)
        return saved(out)

    tall = np.concatenate([X, X])
    out, events = run(kernel, X, tall)
    assert [engine for engine, name in events if name == "Transpose"] == ["vector", "tensor"]
    np.testing.assert_array_equal(out, tall.T)


# ---- accumulation ----------------------------------------------------------------------------


def test_matmul_without_a_flag_overwrites_first_and_adds_later_element_by_element():
    def kernel(a):
        x = loaded(a)
        psum = nl.ndarray((16, 24), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(psum[:, 0:16], x, x)
        nisa.nc_matmul(psum[:, 8:24], x, x)
        nisa.nc_matmul(psum[:, 8:24], x, x)
        out = nl.ndarray(psum.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_copy(out, psum)
        return saved(out)

    out, _ = run(kernel, X)
    product = X.T @ X
    expected = np.zeros((16, 24), np.float32)
    expected[:, :16] = product
    expected[:, 8:] += 2 * product
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


def test_matmul_with_a_flag_does_as_told():
    def kernel(a):
        x = loaded(a)
        psum = nl.ndarray((16, 16), dtype=nl.float32, buffer=nl.psum)
        for i in range(3):
            nisa.nc_matmul(psum, x, x, accumulate=i > 1)
        out = nl.ndarray(psum.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_copy(out, psum)
        return saved(out)

    out, _ = run(kernel, X)
    np.testing.assert_allclose(out, 2 * X.T @ X, rtol=1e-5)


def test_adding_to_psum_that_was_never_written_is_an_error():
    def kernel(a):
        x = loaded(a)
        psum = nl.ndarray((16, 16), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(psum, x, x, accumulate=True)

    with pytest.raises(TrnsimError, match="is read and was never written"):
        run(kernel, X)


def test_registers_are_kept_between_instructions():
    def kernel(a):
        x = loaded(a)
        out = nl.ndarray((32, 1), dtype=nl.float32, buffer=nl.sbuf)
        y = nl.ndarray(x.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.activation(y, nl.square, x, reduce_op=nl.add, reduce_cmd=nisa.reduce_cmd.reset_reduce)
        nisa.activation(y, nl.copy, x, reduce_cmd=nisa.reduce_cmd.reduce, reduce_res=out)
        return saved(out)

    out, _ = run(kernel, X)
    np.testing.assert_allclose(out[:, 0], (X * X).sum(1) + X.sum(1), rtol=1e-4)


# ---- indirect addresses ----------------------------------------------------------------------


def _gather(mode):
    def kernel(table, index):
        picks = loaded(index)
        rows, free = index.shape[0], table.shape[1]
        dst = nl.ndarray((rows, free), dtype=table.dtype, buffer=nl.sbuf)
        nisa.memset(dst, 7.0)
        source = table.ap([[free, rows], [1, free]], vector_offset=picks, indirect_dim=0)
        nisa.dma_copy(dst, source, oob_mode=mode)
        return saved(dst)

    return kernel


def test_gather_by_a_vector_offset():
    index = np.array([[3], [31], [32], [0]], np.uint32)
    out, _ = run(_gather(nisa.oob_mode.skip), X, index)
    np.testing.assert_array_equal(out, np.stack([X[3], X[31], np.full(16, 7), X[0]]))
    with pytest.raises(TrnsimError, match="vector offset 32 is out of bounds: 0 to 31"):
        run(_gather(nisa.oob_mode.error), X, index)


def test_scatter_by_a_vector_offset_into_memory_that_is_written_in_part():
    def kernel(values, index):
        tile, picks = loaded(values), loaded(index)
        out = nl.ndarray((8, 16), dtype=nl.float32, buffer=nl.shared_hbm)
        zero = nl.ndarray((8, 16), dtype=nl.float32, buffer=nl.sbuf)
        nisa.memset(zero, 0.0)
        nisa.dma_copy(out, zero)
        target = out.ap([[16, 3], [1, 16]], vector_offset=picks, indirect_dim=0)
        nisa.dma_copy(target, tile)
        nisa.dma_compute(target, [tile, target], nl.add)
        return out

    out, _ = run(kernel, X[:3], np.array([[6], [0], [2]], np.uint32))
    expected = np.zeros((8, 16), np.float32)
    expected[[6, 0, 2]] = 2 * X[:3]
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("by", ["register", "tensor"])
def test_scalar_offset(by):
    def kernel(table, index):
        tile = loaded(index)
        register = nisa.register_alloc()
        nisa.register_load(register, tile)
        dst = nl.ndarray((4, 16), dtype=nl.float32, buffer=nl.sbuf)
        offset = register if by == "register" else tile
        nisa.dma_copy(dst, table.ap([[16, 4], [1, 16]], scalar_offset=offset, indirect_dim=0))
        return saved(dst)

    out, _ = run(kernel, X, np.array([[5]], np.int32))
    np.testing.assert_array_equal(out, X[5:9])


def test_gather_transpose():
    def kernel(table, index):
        picks = loaded(index)
        dst = nl.ndarray((16, 32), dtype=table.dtype, buffer=nl.sbuf)
        source = table.ap([[16, 32], [1, 16]], vector_offset=picks, indirect_dim=0)
        nisa.dma_transpose(dst, source, axes=(1, 0))
        return saved(dst)

    table = X.astype(ml_dtypes.bfloat16)
    index = np.random.default_rng(1).permutation(32).astype(np.uint32)[:, None]
    out, _ = run(kernel, table, index)
    np.testing.assert_array_equal(out, table[index[:, 0]].T)


def test_tensor_indirection_gathers_and_scatters_columns():
    offsets = np.random.default_rng(5).permutation(32).astype(np.uint32)
    index = np.tile(offsets.reshape(2, 16).T, (2, 1))  # offset i in row i % 16, column i // 16

    def kernel(a, b):
        x, picks = loaded(a), loaded(b)
        y = nl.ndarray((32, 32), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar(y, x.indirect(picks, 32), nl.multiply, 2.0)
        z = nl.ndarray((32, 32), dtype=nl.float32, buffer=nl.sbuf)
        nisa.memset(z, 0.0)
        nisa.tensor_copy(z.indirect(picks, 32), y)
        nisa.activation(y, nl.copy, z)
        return saved(y)

    values = np.random.default_rng(6).standard_normal((32, 32)).astype(np.float32)
    out, _ = run(kernel, values, index, chip="trn3")
    np.testing.assert_array_equal(out, values * 2)
    with pytest.raises(TrnsimError, match="tensor indirection needs NeuronCore-v4 or later"):
        run(kernel, values, index, chip="trn2")
    with pytest.raises(TrnsimError, match="an index holds 32; limit: 0 to 31"):
        run(kernel, values, np.where(index == 5, np.uint32(32), index), chip="trn3")


def test_tensor_indirection_is_not_for_every_operand():
    def kernel(a, b):
        x, picks = loaded(a), loaded(b)
        nisa.tensor_tensor(x, x, x.indirect(picks, 16), nl.add)

    index = np.zeros((32, 1), np.uint32)
    with pytest.raises(TrnsimError, match="data2 does not support tensor indirection"):
        run(kernel, X, index, chip="trn3")


# ---- MX --------------------------------------------------------------------------------------


def test_quantized_matmul_is_near_the_exact_one():
    def kernel(a, b):
        parts = []
        for source in (a, b):
            tile = loaded(source)
            free = source.shape[1] // 4
            data = nl.ndarray((32, free), dtype=nl.float8_e4m3fn_x4, buffer=nl.sbuf)
            scale = nl.ndarray((4, free), dtype=nl.float8_e8m0fnu, buffer=nl.sbuf)
            nisa.quantize_mx(data, tile, scale)
            parts += [(data, scale)]
        (w, ws), (x, xs) = parts
        psum = nl.ndarray((8, 12), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul_mx(psum, w, x, ws, xs)
        out = nl.ndarray((8, 12), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_copy(out, psum)
        return saved(out)

    random = np.random.default_rng(3)
    a, b = (random.standard_normal((32, 4 * n)).astype(ml_dtypes.bfloat16) for n in (8, 12))
    out, _ = run(kernel, a, b, chip="trn3")
    left, right = (v.astype(np.float32).reshape(32, -1, 4) for v in (a, b))
    exact = np.einsum("kmq,knq->mn", left, right)
    largest = np.einsum("kmq,knq->mn", abs(left), abs(right))
    assert (abs(out - exact) < largest * 2**-3).all()  # 3 bits of mantissa in both factors
    assert abs(out - exact).max() > 0
    with pytest.raises(TrnsimError, match="needs NeuronCore-v4 or later; trn2 has v3"):
        run(kernel, a, b, chip="trn2")


# ---- errors ----------------------------------------------------------------------------------


def _wrong(call):
    def kernel(a):
        x = loaded(a)
        call(x)

    return kernel


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda x: nisa.tensor_tensor(x, x, x, nl.divide), "op divide is no operator: multiply by"),
        (lambda x: nisa.activation(x, nl.floor, x), "is no activation function; allowed: abs"),
        (
            lambda x: nisa.tensor_reduce(x, nl.add, x, axis=0),
            "axis is 0 of 2 axes; allowed: the",
        ),
        (lambda x: nisa.tensor_copy(x, 3.0), "src: 3.0 is not valid; allowed: an NKI tensor"),
        (lambda x: nisa.memset(x, 0, engine=VECTOR), "engine: vector is not valid; allowed: one"),
        (
            lambda x: nisa.dma_copy(x, x, oob_mode=7),  # type: ignore[arg-type]
            "oob_mode: 7 is not valid; allowed: one of",
        ),
        (lambda x: nisa.iota(x, 3), r"pattern: 3 is not valid; allowed: \[\[step, count\], ...\]"),
        (lambda x: nisa.dma_compute(x, [x, x], nl.add, scales=[1.0, 2.0]), "they must be 1.0"),
        (lambda x: nisa.nc_matmul(x, x, x), "Matmul: dst must be in psum"),
        (lambda x: nisa.tensor_scalar(x, x, nl.add, "two"), "operand0: two is not valid"),
    ],
)
def test_errors_name_the_kernels_line(call, message):
    with pytest.raises(TrnsimError, match=message) as caught:
        simulate(_wrong(call), X)
    assert re.match(r".*test_nki_isa\.py:\d+: ", str(caught.value))


def test_outside_a_kernel_nothing_runs():
    with pytest.raises(BadInput, match="an NKI function outside a kernel"):
        nisa.get_nc_version()


def test_packed_dtypes_are_for_mx_instructions():
    def kernel(a):
        x = nl.ndarray((32, 4), dtype=nl.float8_e5m2_x4, buffer=nl.sbuf)
        nisa.memset(x, 0)
        nisa.tensor_scalar(x, x, nl.add, 1.0)

    with pytest.raises(TrnsimError, match="dst is float8_e5m2_x4; only MX instructions"):
        run(kernel, X, chip="trn3")


def test_copies_keep_the_bits_of_packed_and_exponent_dtypes():
    def kernel(a):
        scale = nl.ndarray((32, 16), dtype=nl.float8_e8m0fnu, buffer=nl.sbuf)
        nisa.memset(scale, 4.0)
        byte = nl.ndarray((32, 16), dtype=nl.uint8, buffer=nl.sbuf)
        nisa.tensor_copy(byte, scale)
        return saved(byte)

    def casts(a):
        scale = nl.ndarray((32, 16), dtype=nl.float8_e8m0fnu, buffer=nl.sbuf)
        nisa.memset(scale, 0.0)
        nisa.tensor_copy(loaded(a), scale)

    out, _ = run(kernel, X, chip="trn3")
    assert (out == 129).all()
    with pytest.raises(TrnsimError, match="float8_e8m0fnu does not cast"):
        run(casts, X, chip="trn3")


def test_what_a_named_engine_triggers_has_a_queue_of_its_own():
    def kernel(a):
        x = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.sbuf)
        nisa.dma_copy(x, a, dge_mode=nisa.dge_mode.hwdge, engine=nisa.engine.scalar)
        return saved(x)

    queues = [event.queue for event in simulate(kernel, X).events]
    assert queues == ["scalar", "store"]


@pytest.mark.parametrize("chip, version", [("trn1", 2), ("trn2", 3), ("trn3", 4)])
def test_versions_can_be_compared(chip, version):
    seen = []

    def kernel(a):
        found = nisa.get_nc_version()
        seen.append((found.value, found >= nisa.nc_version.gen3, nisa.get_nc_sub_version()))
        return saved(loaded(a))

    run(kernel, X, chip=chip)
    assert seen == [(version, version >= 3, 0)]


@pytest.mark.parametrize("dtype", [nl.float32, nl.bfloat16])
def test_a_copy_takes_the_dtype_of_its_destination(dtype: Any) -> None:
    """Kernels of NKI 0.2 name a dtype: the copy's own is dst's all the same."""

    def kernel(x):
        tile = nl.ndarray((128, 8), dtype=x.dtype, buffer=nl.sbuf)
        nisa.dma_copy(tile, x)
        copy = nl.ndarray((128, 8), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_copy(copy, tile, dtype=dtype)
        out = nl.ndarray((128, 8), dtype=nl.float32, buffer=nl.shared_hbm)
        nisa.dma_copy(out, copy)
        return out

    x = np.full((128, 8), 1 / 3, np.float32)
    np.testing.assert_array_equal(simulate(kernel, x).output, x)
