"""Every instruction: what it refuses, with which words, and what it costs."""

import pytest

from trnsim.device.chip import load_chip
from trnsim.device.errors import IllegalInstruction
from trnsim.device.isa.base import Instruction
from trnsim.device.isa.dma import DmaCopy, DmaGather, DmaScatter, DmaTranspose
from trnsim.device.isa.gpsimd import (
    Custom,
    Gather,
    Iota,
    PartitionBroadcast,
    PartitionReduce,
)
from trnsim.device.isa.scalar import Activation
from trnsim.device.isa.tensor import Matmul, Transpose
from trnsim.device.isa.vector import (
    Copy,
    Memset,
    ScalarTensorTensor,
    Select,
    TensorReduce,
    TensorScalar,
    TensorTensor,
    VectorTranspose,
)
from trnsim.device.memory import Memory, View
from trnsim.device.units import cycles_ps, transfer_ps

TRN1, TRN2, TRN3 = load_chip("trn1"), load_chip("trn2"), load_chip("trn3")


def blank(shape, dtype: str = "f32", space: str = "sbuf", chip=TRN2) -> View:
    """An operand without data, for legality and cost."""
    if space == "hbm":
        return Memory.hbm(1 << 34, data=False).allocate(shape, dtype, "value")
    return getattr(Memory, space)(chip, data=False).allocate(shape, dtype, "tile")


def refused(instruction: Instruction, chip=TRN2) -> str:
    with pytest.raises(IllegalInstruction) as caught:
        instruction.check(chip)
    return str(caught.value)


# ---- legality ------------------------------------------------------------------------------


def test_matmul_limits():
    dst, wide = blank((128, 512), space="psum"), blank((128, 640))
    s, x = blank((128, 128)), blank((128, 512))
    Matmul(dst, s, x).check(TRN2)
    assert refused(Matmul(dst, s, wide)) == "Matmul: moving free size is 640; limit: 512"
    assert (
        refused(Matmul(dst, wide[:, 0:129], x)) == "Matmul: stationary free size is 129; limit: 128"
    )
    assert refused(Matmul(dst, s[0:64], x)) == (
        "Matmul: stationary has 64 partitions and moving 128: the contraction must be equal"
    )
    assert refused(Matmul(dst[0:64], s, x)) == (
        "Matmul: dst has shape [64, 512]; stationary and moving give [128, 512]"
    )
    assert refused(Matmul(x, s, x)) == (
        "Matmul: dst must be in psum for the tensor engine, not in sbuf"
    )
    assert refused(Matmul(dst, s, dst)) == (
        "Matmul: moving must be in sbuf for the tensor engine, not in psum"
    )


def test_matmul_dtypes():
    dst, s = blank((128, 64), space="psum"), blank((128, 128))
    narrow = blank((128, 64), "bf16")
    assert refused(Matmul(dst, s, narrow)) == (
        "Matmul: stationary is f32 and moving bf16; f32 pairs only with f32"
    )
    assert refused(Matmul(dst, s, blank((128, 64), "i32"))).startswith(
        "Matmul: moving is i32; allowed"
    )
    low = blank((128, 64), "bf16", "psum")
    assert refused(Matmul(low, s, blank((128, 64)))) == (
        "Matmul: dst is bf16; a matmul writes f32 on trn2"
    )
    Matmul(low, s, blank((128, 64))).check(TRN3)
    fp8 = blank((128, 2, 64), "f8E4M3")
    double = Matmul(dst[0:64], fp8, fp8, double_row=True)
    double.check(TRN2)
    assert refused(double, TRN1).startswith(
        "Matmul: double_row needs fp8 operands on NeuronCore v3"
    )


def test_matmul_stays_in_one_bank():
    memory = Memory.psum(TRN2, data=False)
    dst = memory.allocate((128, 512), "f32", "dst", address=1024)
    s, x = blank((128, 128)), blank((128, 512))
    assert refused(Matmul(dst, s, x)) == (
        "Matmul: dst takes bytes 1024 to 3072 of each partition; limit: one PSUM bank of 2048 B"
    )
    Matmul(dst[:, 256:512], s, x[:, 0:256]).check(TRN2)
    long = Memory.psum(TRN3, data=False).allocate((128, 1024), "f32", "long")
    Matmul(long, s, blank((128, 1024))).check(TRN3)


@pytest.mark.parametrize(
    ("count", "start", "allowed"),
    [
        (65, 32, "0"), (128, 0, None), (64, 64, None), (33, 32, "0, 64"), (64, 0, None),
        (32, 96, None), (32, 16, "0, 32, 64, 96"), (1, 32, None), (1, 1, "0, 32, 64, 96"),
    ],
)  # fmt: skip
def test_partition_starts(count, start, allowed):
    src = blank((128, 16))[start : start + count]
    copy = Copy(blank((count, 16)), src)
    if allowed is None:
        copy.check(TRN2)
    else:
        assert refused(copy) == (
            f"Copy: src has {count} partitions and starts at {start}; allowed starts: {allowed}"
        )


def test_which_engine_reaches_what():
    s, p, h = blank((128, 8)), blank((128, 8), space="psum"), blank((128, 8), space="hbm")
    assert refused(Copy(s, p, engine="gpsimd")) == (
        "Copy: src must be in sbuf for the gpsimd engine, not in psum"
    )
    assert refused(Copy(s, h)) == (
        "Copy: src must be in sbuf or psum for the vector engine, not in hbm"
    )
    assert refused(DmaCopy(h, p)) == "DmaCopy: src must be in hbm or sbuf for DMA, not in psum"
    assert refused(TensorTensor(s, p, p, "add")) == (
        "TensorTensor: a and b are both in psum; limit: one of them"
    )
    TensorTensor(p, p, s, "add").check(TRN2)
    assert refused(TensorTensor(s, s, s, "add", engine="scalar")) == (
        "TensorTensor: engine is scalar; allowed: vector, gpsimd"
    )
    assert refused(Copy(s, s, engine="scalar"), TRN1) == (
        "Copy: engine scalar cannot copy on trn1; use Activation with function copy"
    )


def test_operators_and_shapes():
    s, t = blank((128, 8)), blank((128, 9))
    assert refused(TensorTensor(s, s, t, "add")) == (
        "TensorTensor: b has shape [128, 9] and dst [128, 8]; they must be equal"
    )
    assert refused(TensorTensor(s, s, s, "plus")).startswith(
        "TensorTensor: op is plus; allowed: add, and, divide"
    )
    assert refused(TensorTensor(s, s, s, "power")) == (
        "TensorTensor: op power runs on gpsimd, not on vector"
    )
    assert refused(TensorTensor(s, s, s, "xor")) == (
        "TensorTensor: op xor is for integers, not for f32"
    )
    i = blank((128, 8), "i32")
    assert refused(TensorTensor(i, i, i, "add")) == (
        "TensorTensor: op add of i32 is exact only on gpsimd; vector computes in f32"
    )
    TensorTensor(i, i, i, "xor").check(TRN2)
    assert refused(TensorScalar(s, s, "add", t)) == (
        "TensorScalar: operand0 has shape [128, 9]; it must be [128, 1]"
    )
    assert refused(TensorScalar(s, s, "add", 1, op1="add")) == (
        "TensorScalar: op1 is add and operand1 None: both or neither"
    )
    assert refused(Activation(s, s, "wave")).startswith(
        "Activation: function is wave; allowed: copy"
    )
    assert refused(TensorReduce(t, s, "add")) == (
        "TensorReduce: dst has shape [128, 9]; reducing src [128, 8] leaves [128, 1]"
    )
    wide = blank((128, 8), "i64")
    assert refused(Copy(wide, wide)) == "Copy: dst is i64; engines have no 64-bit types"
    deep = blank((2, 1, 2, 1, 2, 2))
    assert refused(Copy(deep, deep)) == "Copy: dst has 5 free axes; limit: 4"


def test_access_sizes():
    long = blank((2, 70_000), "i8", chip=TRN3)
    assert refused(Copy(long, long), TRN3) == (
        "Copy: dst has 70000 elements per partition; limit in sbuf: 65536"
    )


def test_transposes():
    src, dst = blank((128, 128), "bf16"), blank((128, 128), "bf16", "psum")
    Transpose(dst, src).check(TRN2)
    assert refused(Transpose(dst, src), TRN1) == (
        "Transpose: src is bf16 and dst bf16; on trn1 floats only, written as f32"
    )
    assert refused(VectorTranspose(blank((64, 32)), blank((32, 64)))) == (
        "VectorTranspose: src has shape [32, 64]; limit: [32, 32]"
    )
    assert refused(DmaTranspose(blank((8, 4), "i8"), blank((4, 8), "i8", "hbm"))) == (
        "DmaTranspose: src is i8 and dst i8; one dtype of 2 or 4 bytes"
    )


def test_rows():
    table, rows = blank((100, 8), space="hbm"), blank((16, 8))
    index = blank((16, 1), "i32")
    DmaGather(rows, table, index).check(TRN2)
    assert refused(DmaGather(rows, rows, index)) == "DmaGather: src must be in hbm, not in sbuf"
    assert refused(DmaGather(rows, table, blank((8, 1), "i32"))) == (
        "DmaGather: index has shape [8, 1]; it must be [16, 1]"
    )
    assert refused(DmaScatter(table, rows, blank((16, 1)))) == (
        "DmaScatter: index is f32; allowed: i32, ui32"
    )
    assert refused(DmaScatter(table, rows[:, 0:4], index)) == (
        "DmaScatter: src has rows of [4] and dst of [8]; they must be equal"
    )


# ---- cost: closed forms --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "n", "cycles"),
    [
        ("bf16", 512, 512),
        ("bf16", 1, 64),
        ("f8E4M3", 300, 300),
        ("f32", 512, 2048),
        ("f32", 9, 256),
    ],
)
def test_matmul_cost(dtype, n, cycles):
    moving = blank((128, n), dtype)
    matmul = Matmul(blank((128, n), space="psum"), blank((128, 128), dtype), moving)
    assert matmul.duration(TRN2) == cycles_ps(cycles, TRN2.clock_hz["tensor"])
    assert matmul.flops == 2 * 128 * 128 * n


def test_matmul_reaches_the_printed_peaks():
    """TFLOP/s of full tiles, against the peaks of the architecture pages (rounded there)."""
    for chip in (TRN1, TRN2, TRN3):
        for dtype in ("bf16", "f32"):
            operands = blank((128, 128), dtype), blank((128, 512), dtype)
            matmul = Matmul(blank((128, 512), space="psum"), *operands)
            rate = matmul.flops / matmul.duration(chip) * 1e12
            assert rate == pytest.approx(chip.peak(dtype), rel=0.02)


def test_double_row_doubles_the_rate():
    fp8 = blank((128, 2, 128), "f8E4M3"), blank((128, 2, 512), "f8E4M3")
    matmul = Matmul(blank((128, 512), space="psum"), *fp8, double_row=True)
    assert matmul.flops / matmul.duration(TRN2) * 1e12 == pytest.approx(TRN2.peak("f8"), rel=0.02)


def test_measured_matmul():
    """nki kernel-optimization figures: 859 ns for 128 x 128 x 512 in float32 on Trainium2."""
    matmul = Matmul(blank((128, 512), space="psum"), blank((128, 128)), blank((128, 512)))
    assert matmul.duration(TRN2) == pytest.approx(859_000, rel=0.01)


N = 2000


@pytest.mark.parametrize(
    ("make", "cycles"),
    [
        (lambda d, s, p: TensorTensor(d("f32"), d("f32"), d("f32"), "add"), 2 * N),
        (lambda d, s, p: TensorTensor(d("f32"), d("f32"), p("f32"), "add"), N),
        (lambda d, s, p: TensorTensor(d("bf16"), d("bf16"), d("bf16"), "add"), N),
        (lambda d, s, p: TensorScalar(d("f32"), d("f32"), "add", 1.0), N),
        (lambda d, s, p: TensorScalar(d("f32"), d("f32"), "add", 1.0, "multiply", 2.0), N),
        (lambda d, s, p: TensorScalar(d("bf16"), d("bf16"), "add", 1.0), N // 4),
        (lambda d, s, p: Copy(d("bf16"), p("bf16")), N // 2),
        (lambda d, s, p: Copy(d("bf16"), p("f32")), N),
        (lambda d, s, p: Copy(d("bf16"), s("bf16")), N // 2),  # stride 2: 4 B, not contiguous
        (lambda d, s, p: Copy(d("f32"), s("f32")), N),
        (lambda d, s, p: Copy(d("f32"), s("f32", 8)), 2 * N),  # stride 32 B: half the bandwidth
        (lambda d, s, p: Memset(d("f32"), 0), N),
        (lambda d, s, p: Memset(d("bf16"), 0), N // 2),
        (lambda d, s, p: Memset(d("bf16"), 1), N),
        (lambda d, s, p: Select(d("f32"), d("i1"), d("f32"), 0.0), 2 * N),
        (lambda d, s, p: Select(d("f32"), d("i1"), d("f32"), d("f32")), 3 * N),
        (lambda d, s, p: TensorReduce(d("f32")[:, 0:1], d("f32"), "add"), N),
        (lambda d, s, p: TensorReduce(d("bf16")[:, 0:1], d("bf16"), "add"), N // 2),
        (
            lambda d, s, p: ScalarTensorTensor(d("f32"), d("f32"), "add", 1.0, "add", d("f32")),
            2 * N,
        ),
        (lambda d, s, p: Activation(d("f32"), d("f32"), "exponential"), N),
        (lambda d, s, p: Activation(d("f32"), p("f32"), "tanh", reduce=d("f32")[:, 0:1]), N + 64),
        (lambda d, s, p: Activation(d("f32")[:, 0:2], d("f32")[:, 0:2], "tanh"), 64),
        (lambda d, s, p: Iota(d("i32"), (1,)), 150 + N),
        (lambda d, s, p: TensorTensor(d("i32"), d("i32"), d("i32"), "add", "gpsimd"), 150 + 2 * N),
        (lambda d, s, p: PartitionReduce(d("f32")[0:1], d("f32"), "add"), 150 + 7 * N),
        (lambda d, s, p: PartitionBroadcast(d("f32"), d("f32")[0:1]), 150 + N),
        (lambda d, s, p: Gather(d("f32"), d("f32"), d("i32")), 150 * 4 + N),
        (lambda d, s, p: Custom(d("f32"), (d("f32"), d("f32")), "atan2"), 150 + 2 * N),
    ],
)
def test_lane_costs(make, cycles):
    def dense(dtype):
        return blank((128, N), dtype)

    def strided(dtype, step=2):
        return blank((128, N * step), dtype)[:, ::step]

    def psum(dtype):
        return blank((128, N), dtype, "psum")

    instruction = make(dense, strided, psum)
    instruction.check(TRN2)
    assert instruction.cycles(TRN2) == cycles
    assert instruction.duration(TRN2) == cycles_ps(cycles, TRN2.clock_hz[instruction.engine])


def test_transpose_costs():
    def cost(chip, dtype, out, p, f):
        return Transpose(blank((f, p), out, "psum"), blank((p, f), dtype)).cycles(chip)

    assert cost(TRN2, "bf16", "bf16", 128, 128) == 128
    assert cost(TRN2, "bf16", "bf16", 32, 128) == 64
    assert cost(TRN2, "f32", "f32", 128, 128) == 256
    assert cost(TRN1, "f32", "f32", 128, 128) == 512


RATE = min(TRN2.dma_bytes_per_s, TRN2.stack_bytes_per_s // 2)


@pytest.mark.parametrize(
    ("free", "expected"),
    [
        (1, TRN2.dma_fixed_ps),
        (16, TRN2.dma_fixed_ps),
        (1024, transfer_ps(128 * 4096, int(RATE * 0.966))),
        (8192, transfer_ps(128 * 32768, RATE)),
    ],
)
def test_dma_cost(free, expected):
    """The fixed cost, or bytes over what the payload makes of the core's share of its stack."""
    load = DmaCopy(blank((128, free)), blank((128, free), space="hbm"))
    assert load.duration(TRN2) == expected
    assert load.hbm_bytes == 128 * free * 4


def test_dma_throughput_follows_the_figure():
    """nki-dma-overview.rst: fraction of the plateau by bytes per partition, P = 128."""
    plateau = None
    for nbytes, fraction in reversed(TRN2.dma_efficiency):
        load = DmaCopy(blank((128, nbytes), "i8"), blank((128, nbytes), "i8", "hbm"))
        rate = 128 * nbytes / load.duration(TRN2)
        plateau = plateau or rate
        assert rate / plateau == pytest.approx(fraction, rel=0.08)


def test_dma_of_few_partitions_uses_few_engines():
    """Measured: [4, 4096] bf16, 32 KiB on one engine, takes 1,416 ns (nki-dma-overview.rst)."""
    load = DmaCopy(blank((4, 4096), "bf16"), blank((4, 4096), "bf16", "hbm"))
    assert load.duration(TRN2) == pytest.approx(1_416_000, rel=0.03)


def test_dma_of_single_elements_is_bound_by_descriptors():
    column = blank((128, 512, 8), space="hbm")[:, :, 0]
    load = DmaCopy(blank((128, 512)), column)
    assert load.duration(TRN2) == 128 * 512 * 7_000 // 16


def test_dma_variants():
    src, dst = blank((128, 8192), space="hbm"), blank((128, 8192))
    nbytes = 128 * 8192 * 4
    assert DmaCopy(dst, src, accumulate=True).duration(TRN2) == transfer_ps(nbytes, RATE // 2)
    inside = DmaCopy(dst, blank((128, 8192)))
    assert inside.duration(TRN2) == transfer_ps(nbytes, TRN2.dma_bytes_per_s)
    assert inside.hbm_bytes == 0
    across = DmaCopy(src, blank((128, 8192), space="hbm"))
    assert across.duration(TRN2) == transfer_ps(nbytes, TRN2.stack_bytes_per_s // 4)
    assert across.hbm_bytes == 2 * nbytes
    turned = DmaTranspose(blank((128, 8192)), blank((8192, 128), space="hbm"))
    assert turned.duration(TRN2) == transfer_ps(nbytes, int(RATE * 0.9))
