"""What the pages of `nki.isa` forbid of matrix instructions, DMA and indirection is refused."""

# pyright: reportMissingImports=false, reportIndexIssue=false
from typing import Any

import numpy as np
import pytest

from trnsim.device.errors import IllegalInstruction
from trnsim.device.nki import simulate

from .nki_golden import saved, tile, uniform
from .nki_kernels import nisa, nki, nl
from .nki_rules import GPSIMD, SCALAR, TENSOR, VECTOR, P, S, hbm, i32, refused, rules, t, u32

# ---- matrix instructions -----------------------------------------------------------------------


def product(m=8, n=8, k=8, left=nl.float32, right=None, out=nl.float32, **options: Any) -> Any:
    """A matmul with legal arguments but for `options`."""
    dst = options.pop("dst", None) or t(m, n, dtype=out, buffer=P)
    given = {"stationary": t(k, m, dtype=left), "moving": t(k, n, dtype=right or left)}
    return nisa.nc_matmul(dst, **{**given, **options})


DOUBLE = nisa.matmul_perf_mode.double_row
E5, E4, E4FN = nl.float8_e5m2, nl.float8_e4m3, nl.float8_e4m3fn


def double(dtype=E5, **options: Any) -> Any:
    """A double_row matmul with legal arguments but for `options`."""
    given = {
        "dst": t(8, 8, buffer=P), "stationary": t(8, 2, 8, dtype=dtype),
        "moving": t(8, 2, 8, dtype=dtype), "perf_mode": DOUBLE,
    }  # fmt: skip
    return nisa.nc_matmul(**{**given, **options})


@rules(
    ("stationary in psum", lambda: product(stationary=t(8, 8, buffer=P)),
     "stationary must be in sbuf"),
    ("dst in sbuf", lambda: product(dst=t(8, 8)), "dst must be in psum"),
    ("contraction", lambda: product(moving=t(9, 8)), "stationary has 8 partitions and moving 9"),
    ("stationary free", lambda: product(stationary=t(8, 129)), "stationary free size is 129"),
    ("moving free", lambda: product(n=513), "moving free size is 513; limit: 512"),
    ("moving free on v4", lambda: product(dst=t(8, 4096, buffer=P), moving=t(8, 4097)),
     "moving free size is 4097; limit: 4096", "trn3"),
    ("integers", lambda: product(left=nl.int32), "stationary is i32"),
    ("f32 by bf16", lambda: product(right=nl.bfloat16), "f32 pairs only with f32"),
    ("OCP fp8 on v3", lambda: product(left=E4FN), "stationary is f8E4M3FN"),
    ("both fp8", lambda: product(left=E4, right=E4FN), "cannot be mixed", "trn3"),
    ("bf16 result on v3", lambda: product(left=nl.bfloat16, out=nl.bfloat16),
     "dst is bf16; a matmul writes f32 on trn2"),
    ("banks", lambda: product(dst=t(8, 1024, buffer=P)[:, 508:516]), "limit: one PSUM bank"),
    ("tile size", lambda: product(tile_size=(48, 128), tile_position=(0, 0)),
     "tile_size row is 48; allowed: 32, 64, 128"),
    ("tile size on v2", lambda: product(tile_size=(32, 128), tile_position=(0, 0)),
     "tile_size row is 32; allowed: 64, 128", "trn1"),
    ("tile position", lambda: product(tile_size=(64, 64), tile_position=(32, 0)),
     "tile_position row is 32; allowed: multiples of 64"),
    ("too large for the tile", lambda: product(k=65, tile_size=(64, 64), tile_position=(0, 0)),
     "stationary has 65 rows; tile_size allows 64"),
    ("size alone", lambda: product(tile_size=(64, 64)), "both are needed, or neither"),
    ("position alone", lambda: product(tile_position=(64, 0)), "both are needed, or neither"),
    ("double_row on v2", double, "double_row needs fp8 operands on NeuronCore v3", "trn1"),
    ("double_row of bf16", lambda: double(nl.bfloat16), "double_row needs fp8 operands"),
    ("double_row shape", lambda: double(stationary=t(8, 4, 8, dtype=E5)),
     r"stationary has shape \[8, 4, 8\]; double_row needs \[K, 2, ...\]"),
    ("double_row in columns", lambda: double(tile_size=(128, 64), tile_position=(0, 0)),
     "double_row goes with neither column tiling"),
    ("transpose dtype", lambda: product(
        left=nl.bfloat16, is_transpose=True), "a transpose writes stationary's dtype, bf16"),
)  # fmt: skip
def test_nc_matmul(call, message, chip):
    refused(call, message, chip)


def packed(**options: Any) -> Any:
    """An MX matmul with legal arguments but for `options`."""
    kind, scale = nl.float8_e5m2_x4, nl.float8_e8m0fnu
    given = {
        "dst": t(8, 8, buffer=P), "stationary": t(32, 8, dtype=kind),
        "moving": t(32, 8, dtype=kind), "stationary_scale": t(32, 8, dtype=scale),
        "moving_scale": t(32, 8, dtype=scale),
    }  # fmt: skip
    return nisa.nc_matmul_mx(**{**given, **options})


@rules(
    ("generation", packed, "needs NeuronCore-v4"),
    ("unpacked", lambda: packed(moving=t(32, 8, dtype=E5)), "moving is float8_e5m2", "trn3"),
    ("partitions", lambda: packed(stationary=t(16, 8, dtype=nl.float8_e5m2_x4)),
     "a multiple of 32 is needed", "trn3"),
    ("odd", lambda: packed(stationary=t(32, 7, dtype=nl.float8_e5m2_x4)),
     "stationary free size is 7; it must be even", "trn3"),
    ("scale dtype", lambda: packed(moving_scale=t(32, 8)), "moving_scale is float32", "trn3"),
    ("column tiles", lambda: packed(tile_size=(32, 64), tile_position=(0, 0)),
     "MX has row tiles only", "trn3"),
    ("position alone", lambda: packed(tile_position=(32, 0)), "both are needed", "trn3"),
)  # fmt: skip
def test_nc_matmul_mx(call, message, chip):
    refused(call, message, chip)


def quantized(**options: Any) -> Any:
    """quantize_mx with legal arguments but for `options`."""
    given = {
        "dst": t(32, 8, dtype=nl.float8_e5m2_x4), "src": t(32, 32, dtype=nl.bfloat16),
        "dst_scale": t(32, 8, dtype=nl.float8_e8m0fnu),
    }  # fmt: skip
    return nisa.quantize_mx(**{**given, **options})


@rules(
    ("generation", quantized, "needs NeuronCore-v4"),
    ("src", lambda: quantized(src=t(32, 32)), "src is f32; allowed: f16, bf16", "trn3"),
    ("fp4", lambda: quantized(dst=t(32, 8, dtype=nl.float4_e2m1fn_x4)), "dst holds f4", "trn3"),
    ("multiple of 4", lambda: quantized(src=t(32, 30, dtype=nl.bfloat16)), "multiple of 4", "trn3"),
    ("psum", lambda: quantized(src=t(32, 32, dtype=nl.bfloat16, buffer=P)), "in sbuf", "trn3"),
)  # fmt: skip
def test_quantize_mx(call, message, chip):
    refused(call, message, chip)


@rules(
    ("large on vector", lambda: nisa.nc_transpose(t(33, 8), t(8, 33), engine=VECTOR),
     r"limit on vector: \[32, 32\]"),
    ("large on tensor", lambda: nisa.nc_transpose(t(129 - 1, 8, buffer=P), t(8, 129)),
     r"limit on tensor: \[128, 128\]"),
    ("tensor into sbuf", lambda: nisa.nc_transpose(t(8, 8), t(8, 8), engine=TENSOR),
     "dst must be in psum"),
    ("tensor from psum", lambda: nisa.nc_transpose(
        t(8, 8, buffer=P), t(8, 8, buffer=P), engine=TENSOR), "data must be in sbuf"),
    ("dtype", lambda: nisa.nc_transpose(t(8, 8), t(8, 8, dtype=nl.bfloat16)), "must be equal"),
    ("gpsimd", lambda: nisa.nc_transpose(t(8, 8), t(8, 8), engine=GPSIMD),
     "engine is gpsimd; allowed: tensor, vector"),
)  # fmt: skip
def test_nc_transpose(call, message, chip):
    refused(call, message, chip)


# ---- accumulation in PSUM ----------------------------------------------------------------------


@nki.jit
def onto(a, b, value, accumulate):
    """A matmul into PSUM that the Vector engine has set."""
    total = nl.ndarray((8, 8), dtype=nl.float32, buffer=nl.psum)
    nisa.memset(dst=total, value=value)
    nisa.nc_matmul(dst=total, stationary=nl.load(a), moving=nl.load(b), accumulate=accumulate)
    nisa.nc_matmul(dst=total, stationary=nl.load(a), moving=nl.load(b), accumulate=True)
    return saved(total)


ONTO = r"rules_matrix.py:\d+: psum0 .* holds what another engine than Tensor wrote; a matmul on "


@pytest.mark.parametrize("value, accumulate", [(1.0, True), (0.0, True), (1.0, None)])
@pytest.mark.parametrize("chip", ["trn1", "trn2", "trn3"])
def test_a_matmul_adds_to_what_a_matmul_wrote(value, accumulate, chip):
    """Before NeuronCore-v4; afterwards the values add up."""
    a, b = uniform(8, 8), uniform(8, 8)
    if chip == "trn3":
        made = simulate(onto, a, b, value, accumulate, chip=chip).output
        np.testing.assert_allclose(made, 2 * (a.T @ b) + value, rtol=1e-5)
        return
    with pytest.raises(IllegalInstruction, match=f"{ONTO}{chip} adds only to what"):
        simulate(onto, a, b, value, accumulate, chip=chip)
    assert simulate(onto, a, b, value, accumulate, chip=chip, hazards="report").findings


@pytest.mark.parametrize("value, accumulate", [(1.0, False), (0.0, None)])
def test_a_matmul_may_overwrite_what_others_wrote(value, accumulate):
    """Stated, or where what was there is zero and the compiler overwrites it."""
    a, b = uniform(8, 8), uniform(8, 8)
    made = simulate(onto, a, b, value, accumulate).output
    np.testing.assert_allclose(made, 2 * (a.T @ b), rtol=1e-5)


def test_a_matmul_does_not_add_to_what_nobody_wrote():
    def kernel(a):
        total = t(8, 8, buffer=P)
        nisa.nc_matmul(dst=total, stationary=nl.load(a), moving=nl.load(a), accumulate=True)

    with pytest.raises(IllegalInstruction, match="psum0 .* is read and was never written"):
        simulate(kernel, uniform(8, 8))


# ---- DMA ---------------------------------------------------------------------------------------


@rules(
    ("psum", lambda: nisa.dma_copy(t(8, 8), t(8, 8, buffer=P)), "src must be in hbm or sbuf"),
    ("sizes", lambda: nisa.dma_copy(t(8, 8), hbm(8, 9)), "src has 72 elements"),
    ("hwdge on v2", lambda: nisa.dma_copy(t(8, 8), hbm(8, 8), dge_mode=nisa.dge_mode.hwdge),
     "hwdge needs NeuronCore-v3", "trn1"),
    ("hwdge casts", lambda: nisa.dma_copy(
        t(8, 8), hbm(8, 8, dtype=nl.bfloat16), dge_mode=nisa.dge_mode.hwdge), "hwdge cannot cast"),
    ("engine alone", lambda: nisa.dma_copy(t(8, 8), hbm(8, 8), engine=SCALAR),
     "engine is scalar; it goes with dge_mode hwdge only"),
    ("engine", lambda: nisa.dma_copy(
        t(8, 8), hbm(8, 8), dge_mode=nisa.dge_mode.hwdge, engine=VECTOR), "allowed: sync, scalar"),
    ("priority", lambda: nisa.dma_copy(t(8, 8), hbm(8, 8), priority=0), "priority needs Neuron"),
    ("priority of v4", lambda: nisa.dma_copy(t(8, 8), hbm(8, 8), priority=4),
     "priority is 4; allowed: 0 to 3", "trn3"),
    ("mode as number", lambda: nisa.dma_copy(t(8, 8), hbm(8, 8), dge_mode=7), "dge_mode: 7 is not"),
    ("index in hbm", lambda: nisa.dma_copy(
        t(8, 8), hbm(16, 8).vector_select(0, hbm(8, 1, dtype=nl.int32))),
     "vector offset must be in sbuf, not in hbm"),
    ("table in sbuf", lambda: nisa.dma_copy(
        t(8, 8), t(16, 8).vector_select(0, i32(8, 1))), "vector_select is of axis 0 of a tensor"),
    ("index dtype", lambda: nisa.dma_copy(t(8, 8), hbm(16, 8).vector_select(0, t(8, 1))),
     "vector offset is f32; allowed: ui32, i32"),
    ("two offsets", lambda: hbm(16, 8).ap(
        [[8, 8], [1, 8]], scalar_offset=i32(1, 1), vector_offset=i32(8, 1)), "limit: one of them"),
)  # fmt: skip
def test_dma_copy(call, message, chip):
    refused(call, message, chip)


HWDGE = nisa.dge_mode.hwdge
BF16 = nl.bfloat16


def turned(shape, dst, dtype=BF16, **options: Any) -> Any:
    """dma_transpose of a new HBM tensor into a new tile."""
    return nisa.dma_transpose(t(*dst, dtype=dtype), hbm(*shape, dtype=dtype), **options)


def gathered(rows=32, columns=128, index=(32, 1), kind=nl.uint32, dtype=BF16, **options: Any):
    """dma_transpose of picked rows with legal arguments but for `options`."""
    table = hbm(64, columns, dtype=dtype)
    pick = table.vector_select(0, tile(index, kind))[:rows]
    return nisa.dma_transpose(t(columns, rows, dtype=dtype), pick, **options)


@rules(
    ("axes", lambda: turned((16, 4, 8), (4, 16, 8), axes=(1, 0, 2)), r"axes is \(1, 0, 2\)"),
    ("dtypes", lambda: nisa.dma_transpose(t(8, 16), hbm(16, 8, dtype=BF16)), "one dtype of 2 or 4"),
    ("1 byte", lambda: turned((16, 8), (8, 16), nl.uint8), "one dtype of 2 or 4 bytes"),
    ("into hbm", lambda: nisa.dma_transpose(hbm(8, 16), hbm(16, 8)), "dst must be in sbuf"),
    ("swdge", lambda: turned((16, 8), (8, 16), dge_mode=nisa.dge_mode.swdge),
     "dge_mode is swdge; allowed: unknown, none, hwdge"),
    ("hwdge rows", lambda: turned((32, 8), (8, 32), dge_mode=HWDGE), "src has 32 rows; hwdge tr"),
    ("hwdge 4 bytes", lambda: turned((16, 8), (8, 16), nl.float32, dge_mode=HWDGE), "2 bytes"),
    ("hwdge width", lambda: nisa.dma_transpose(
        t(128, 2, 16, dtype=BF16), hbm(16, 256, dtype=BF16), dge_mode=HWDGE), "256"),
    ("hwdge of three axes", lambda: turned((3, 16, 8), (8, 16, 3), dge_mode=HWDGE),
     "the first axis is 1, 2, 4, 8 or 16"),
    ("skip", lambda: turned((16, 8), (8, 16), oob_mode=nisa.oob_mode.skip), "indirect src only"),
    ("indirect on v2", gathered, "an indirect transpose needs NeuronCore-v3", "trn1"),
    ("indirect hwdge", lambda: gathered(dge_mode=HWDGE), "swdge or unknown, not hwdge"),
    ("indirect static", lambda: gathered(dge_mode=nisa.dge_mode.none), "unknown, not none"),
    ("indirect index", lambda: gathered(kind=nl.int32), r"indices are i32\[32, 1\]; ui32"),
    ("indirect 4 bytes", lambda: gathered(dtype=nl.float32), "one dtype of 2 bytes"),
    ("indirect rows", lambda: gathered(rows=8, index=(8, 1)), "a multiple of 16 is needed"),
    ("indirect 4 axes", lambda: nisa.dma_transpose(
        t(8, 2, 2, 16, dtype=BF16), hbm(64, 2, 2, 8, dtype=BF16).vector_select(0, u32(16, 1))),
     "of four axes the second or third must be 1"),
)  # fmt: skip
def test_dma_transpose(call, message, chip):
    refused(call, message, chip)


@rules(
    ("operator", lambda: nisa.dma_compute(t(8, 8), [t(8, 8), t(8, 8)], nl.maximum), "allowed: add"),
    ("scales", lambda: nisa.dma_compute(t(8, 8), [t(8, 8)], nl.add, scales=[2.0]), "must be 1.0"),
    ("17 sources", lambda: nisa.dma_compute(t(8, 8), [t(8, 8)] * 17, nl.add), "srcs has 17"),
    ("sizes", lambda: nisa.dma_compute(t(8, 8), [t(8, 9)], nl.add), "they must be equal"),
    ("equal indices", lambda: nisa.dma_compute(
        hbm(16, 8).vector_select(0, i32(8, 1)), [t(8, 8), t(8, 8)], nl.add, unique_indices=False),
     "unique_indices False"),
)  # fmt: skip
def test_dma_compute(call, message, chip):
    refused(call, message, chip)


# ---- registers, tensor indirection -------------------------------------------------------------


@rules(
    ("two elements", lambda: nisa.register_load(nisa.register_alloc(), i32(1, 2)),
     "has 2 elements; a register takes one in hbm or sbuf"),
    ("psum", lambda: nisa.register_load(nisa.register_alloc(), i32(1, 1, buffer=P)),
     "a register takes one in hbm or sbuf"),
    ("into psum", lambda: nisa.register_store(i32(1, 1, buffer=P), nisa.register_alloc(1)),
     "a register goes into one in hbm or sbuf"),
)  # fmt: skip
def test_registers(call, message, chip):
    refused(call, message, chip)


def scattered(rows=32, start=0, index=0, buffer=S) -> Any:
    """A tile of `rows` partitions from `start` on, indirect by an index from `index` on."""
    pick = t(128, 1, dtype=nl.uint16)[index : index + rows]
    return t(128, 32, buffer=buffer)[start : start + rows].indirect(pick, 16)


def plain(rows=32, start=0, buffer=S) -> Any:
    """A tile like what `scattered` gives."""
    return t(128, 16, buffer=buffer)[start : start + rows]


@rules(
    ("generation", lambda: nisa.tensor_copy(plain(), scattered()), "needs NeuronCore-v4", "trn2"),
    ("gpsimd copies", lambda: nisa.tensor_copy(plain(), scattered(), engine=GPSIMD),
     "tensor indirection does not run on gpsimd", "trn3"),
    ("quadrant", lambda: nisa.tensor_copy(plain(16), scattered(16, index=16)),
     "an index starts at partition 16; allowed: multiples of 32", "trn3"),
    ("gathered source", lambda: nisa.tensor_copy(plain(), scattered(start=32)),
     "an index starts at partition 0 and its operand at 32", "trn3"),
    ("scattered from sbuf", lambda: nisa.tensor_copy(scattered(), plain(start=64)),
     "an index starts at partition 0 and the source at 64", "trn3"),
    ("scattered from psum", lambda: nisa.tensor_copy(scattered(), scattered(32, 32, 32, P)),
     "an index starts at partition 0 and the source's index at 32", "trn3"),
    ("scalar into psum", lambda: nisa.tensor_copy(scattered(buffer=P), plain(), engine=SCALAR),
     "the scalar engine cannot scatter there", "trn3"),
    ("activation into psum", lambda: nisa.activation(scattered(buffer=P), nl.exp, plain()),
     "the scalar engine cannot scatter there", "trn3"),
    ("second input", lambda: nisa.tensor_tensor(plain(), plain(), scattered(), nl.add),
     r"data2 does not support tensor indirection", "trn3"),
    ("matmul tiles", lambda: nisa.nc_matmul(
        t(16, 8, buffer=P), scattered(), t(32, 8), tile_size=(64, 64), tile_position=(64, 0)),
     r"tile_position is \(64, 0\); with tensor indirection", "trn3"),
    ("matmul dtype", lambda: nisa.nc_matmul(t(16, 8, buffer=P), scattered(), t(32, 8)),
     "stationary is f32; allowed: bf16", "trn3"),
)  # fmt: skip
def test_tensor_indirection(call, message, chip):
    refused(call, message, chip)
