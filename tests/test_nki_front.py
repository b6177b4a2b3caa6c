"""NKI kernels run as written: values against numpy, times as closed forms of the chip's numbers."""

# pyright: reportIndexIssue=false
# What `nki.jit` returns is not known before run time.
import gc
import json
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from trnsim.device.chip import load_chip
from trnsim.device.errors import BadInput, DeadlineExceeded, IllegalInstruction, OutOfMemory
from trnsim.device.isa.dma import transferring
from trnsim.device.memory import Memory
from trnsim.device.nki import simulate
from trnsim.device.nki.errors import DeadlockError, NotModelled
from trnsim.device.units import cycles_ps

from . import nki_kernels as kernels
from .nki_command import run_command as command
from .nki_kernels import nisa, nki, nl

CHIP = load_chip("trn2")
RANDOM = np.random.default_rng(0)
HERE = Path(kernels.__file__).name


def floats(*shape) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


def dma(*shape, dtype="f32") -> int:
    """Picoseconds of data of one [partition, free] copy between HBM and SBUF."""
    hbm = Memory.hbm(1 << 30, data=False).allocate(shape, dtype)
    return transferring(CHIP, Memory.sbuf(CHIP, data=False).allocate(shape, dtype), hbm)[0]


def dma_work(*shape, dtype="f32") -> int:
    """What it takes of the DMA engines' time."""
    hbm = Memory.hbm(1 << 30, data=False).allocate(shape, dtype)
    return transferring(CHIP, Memory.sbuf(CHIP, data=False).allocate(shape, dtype), hbm)[1]


def vector(cycles) -> int:
    return cycles_ps(cycles, CHIP.clock_hz["vector"])


LATENCY = vector(CHIP.static_overhead_cycles)  # until a result of the Vector engine is committed


# ---- values and times ------------------------------------------------------------------------


def test_tensor_add_is_two_loads_an_add_and_a_store():
    a, b = floats(128, 512), floats(128, 512)
    result = simulate(kernels.tensor_add, a, b)
    np.testing.assert_array_equal(result.output, a + b)
    move, work = dma(128, 512), dma_work(128, 512)
    add = vector(CHIP.vector_two_input_factor * 512)
    loaded = CHIP.dma_start_ps + work + move + CHIP.dma_semaphore_ps
    added = loaded + add + LATENCY + CHIP.semaphore_ps
    stored = added + CHIP.dma_start_ps + move + CHIP.dma_semaphore_ps
    assert result.time == CHIP.kernel_launch_ps + stored
    assert result.engine("vector").busy == add
    assert (result.engine("dma").busy, result.engine("dma").instructions) == (3 * work, 3)
    assert result.hbm_bytes == 3 * a.nbytes
    assert result.bounds == (3 * work, 3 * work + add)


def test_an_empty_kernel_takes_its_launch():
    assert simulate(nki.jit(lambda x: None), floats(1, 1)).time == CHIP.kernel_launch_ps


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_tiled_matmul(dtype):
    left, right = floats(256, 256).astype(dtype), floats(256, 512).astype(dtype)
    result = simulate(kernels.matmul, left, right)
    expected = left.astype(np.float32).T @ right.astype(np.float32)
    error = 1e-6 if dtype == np.float32 else 2**-8
    np.testing.assert_allclose(result.output.astype(np.float32), expected, rtol=error, atol=1e-4)
    factor = CHIP.matmul_fp32_factor if dtype == np.float32 else 1
    one = cycles_ps(factor * 512, CHIP.clock_hz["tensor"])
    assert result.engine("tensor").busy == 4 * one
    assert result.flops == 2 * 256 * 256 * 512
    assert result.memory.peak_psum == 2 * 512 * 4


def test_softmax_on_three_engines():
    x = floats(128, 512)
    result = simulate(kernels.softmax, x)
    powers = np.exp(x - x.max(1, keepdims=True))
    np.testing.assert_allclose(result.output, powers / powers.sum(1, keepdims=True), rtol=1e-5)
    scalar = cycles_ps(512 + CHIP.activation_reduce_cycles, CHIP.clock_hz["scalar"])
    assert result.engine("scalar").busy == CHIP.activation_table_load_ps + scalar


def test_layernorm_with_functions_of_tiles():
    x, gamma, beta = floats(128, 256), floats(1, 256), floats(1, 256)
    result = simulate(kernels.layernorm, x, gamma, beta)
    scaled = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(result.output, scaled * gamma + beta, atol=1e-5)


def test_transposes_flow_through_three_engines():
    x = floats(128, 512)
    result = simulate(kernels.transpose, x)
    np.testing.assert_array_equal(result.output, x.T)
    turn = cycles_ps(128 * CHIP.matmul_fp32_factor // 2, CHIP.clock_hz["tensor"])
    tensor = cycles_ps(CHIP.static_overhead_cycles, CHIP.clock_hz["tensor"])
    copied = turn + tensor + CHIP.semaphore_ps + vector(128) + LATENCY + CHIP.semaphore_ps
    first = CHIP.dma_start_ps + dma(128, 512) + CHIP.dma_semaphore_ps + copied
    stores = 3 * CHIP.dma_dge_ps + dma(128, 128)
    last = first + CHIP.dma_start_ps + stores + CHIP.dma_semaphore_ps
    assert result.time == CHIP.kernel_launch_ps + last


# ---- two cores -------------------------------------------------------------------------------


def test_two_cores_split_the_work_and_exchange():
    x = floats(256, 64)
    result = simulate(kernels.split_sum[2], x)
    sums = x.sum(1, keepdims=True)
    np.testing.assert_allclose(result.output, sums[:128] + sums[128:], atol=1e-4)
    reduced = CHIP.dma_start_ps + dma(128, 64) + CHIP.dma_semaphore_ps + vector(64)
    ready = reduced + LATENCY + CHIP.semaphore_ps
    sent = ready + CHIP.core_barrier_ps + CHIP.dma_start_ps + dma(128, 1) + CHIP.dma_semaphore_ps
    summed = sent + vector(CHIP.min_instruction_cycles) + LATENCY + CHIP.semaphore_ps
    stored = summed + CHIP.dma_start_ps + dma(64, 1) + CHIP.dma_semaphore_ps
    assert [core.end for core in result.cores] == [stored, stored]
    assert result.time == CHIP.kernel_launch_ps + stored


def test_shared_hbm_is_one_tensor_and_a_barrier_orders_it():
    x = floats(128, 64)
    result = simulate(kernels.exchange_through_hbm[2], x)
    np.testing.assert_array_equal(result.output, np.hstack([x[:, 32:], x[:, :32]]))
    written = 2 * (CHIP.dma_start_ps + dma(128, 32) + CHIP.dma_semaphore_ps)
    met = written + CHIP.core_barrier_ps
    assert result.time == CHIP.kernel_launch_ps + met + written


def test_runs_are_the_same_each_time():
    runs = [simulate(kernels.exchange_through_hbm[2], np.ones((128, 64), "f")) for _ in range(5)]
    assert len({tuple(run.events) for run in runs}) == 1


def test_without_the_barrier_a_core_reads_what_is_not_there():
    with pytest.raises(IllegalInstruction, match=rf"{HERE}:\d+: shared_hbm0.*never written"):
        simulate(kernels.exchange_through_hbm[2], floats(128, 64), False)
    result = simulate(kernels.exchange_through_hbm[2], floats(128, 64), False, hazards="report")
    assert any("race: core 1 reads" in text or "never written" in text
               for text in result.findings.values())  # fmt: skip


@nki.jit
def both_write(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nl.store(out, nl.add(nl.load(x), float(nl.program_id(0))))
    return out


def test_two_cores_that_write_one_place_are_a_race():
    with pytest.raises(
        IllegalInstruction,
        match=r"test_nki_front.py:\d+: race: core 1 writes .* while core 0 writes it at .*"
        r"test_nki_front.py:\d+; no barrier orders them",
    ):
        simulate(both_write[2], floats(128, 64))


@nki.jit
def one_sided(x, what):
    tile = nl.load(x)
    if nl.program_id(0) == 0:
        if what == "barrier":
            nisa.core_barrier(data=x, cores=(0, 1))
        else:
            nisa.sendrecv(tile, nl.empty_like(tile), 1, 1, 3)
    elif what == "mixed":
        nisa.core_barrier(data=x, cores=(0, 1))


@pytest.mark.parametrize(
    "what, message",
    [
        ("barrier", r"core 0 waits in core_barrier at .*front.py:\d+; core 1 has ended"),
        ("sendrecv", r"core 0 waits in sendrecv \(pipe 3\) at .*front.py:\d+; core 1 has ended"),
        ("mixed", r"core 0 waits in sendrecv .*; core 1 waits in core_barrier at .*"),
    ],
)
def test_a_core_that_waits_in_vain_is_a_deadlock(what, message):
    with pytest.raises(DeadlockError, match=message):
        simulate(one_sided[2], floats(128, 8), what)


def test_shared_allocations_must_be_alike():
    @nki.jit
    def uneven(x):
        nl.ndarray((128, 8 + nl.program_id(0)), dtype=x.dtype, buffer=nl.shared_hbm)

    with pytest.raises(IllegalInstruction, match=r"tensor 0 is f32\[128, 9\] on core 1 and f32"):
        simulate(uneven[2], floats(128, 8))


def test_grids_are_of_one_or_two_cores():
    @nki.jit
    def grid(x):
        assert nl.num_programs() == 2 and nl.program_ndim() == 1

    simulate(grid[2], floats(1, 1))
    with pytest.raises(BadInput, match="lnc: 3 is not valid"):
        simulate(grid[3], floats(1, 1))
    with pytest.raises(BadInput, match="lnc: 2 is not valid"):
        simulate(grid[2], floats(1, 1), chip="trn1")


# ---- memory ----------------------------------------------------------------------------------


def test_tiles_live_as_long_as_python_holds_them():
    @nki.jit
    def rotating(x):
        for _ in range(100):
            tile = nl.ndarray((128, 8192), dtype=nl.float32)
            nisa.memset(tile, 0)

    gc.collect()
    assert simulate(rotating, floats(1, 1)).memory.peak_sbuf == 2 * 8192 * 4


def test_out_of_sbuf_says_both_numbers_and_the_line():
    @nki.jit
    def hoards(x):
        tiles = [nl.ndarray((128, 16384), dtype=nl.float32, name=f"t{i}") for i in range(4)]
        for tile in tiles:
            nisa.memset(tile, 0)
        nisa.tensor_copy(tiles[0], tiles[1])

    message = (
        rf"test_nki_front.py:\d+: sbuf: t3 needs 65536 B per partition, 16376 B of "
        rf"{CHIP.sbuf_partition_bytes} B per partition are free.*held by: t0 65536 B"
    )
    with pytest.raises(OutOfMemory, match=message):
        simulate(hoards, floats(1, 1))


def test_tensors_at_stated_addresses_overlap_and_count_once():
    @nki.jit
    def overlapping(x):
        out = nl.ndarray((128, 8), dtype=nl.float32, buffer=nl.shared_hbm)
        a = nl.ndarray((128, 8), dtype=nl.float32, buffer=nl.sbuf, address=(0, 1024))
        b = nl.ndarray((128, 16), dtype=nl.bfloat16, buffer=nl.sbuf, address=(0, 1024))
        nisa.memset(a, 1.0)
        nisa.memset(b[:, ::2], 0.0)
        nisa.dma_copy(out, a)
        return out

    result = simulate(overlapping, floats(1, 1))
    assert result.memory.peak_sbuf == 32
    assert (result.output.view(np.uint32) == 0x3F800000).all()  # 1.0 has zeros in its low half


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: nl.ndarray((256, 8), nl.float32), IllegalInstruction, "1 to 128, not 256"),
        (lambda: nl.ndarray((8,), nl.float32), IllegalInstruction, r"\[partition, free...\]"),
        (lambda: nl.ndarray((128, 4097), nl.float32, nl.psum), OutOfMemory, "16384 B of 16384 B"),
        (lambda: nl.ndarray((8, 8), nl.float32, "cache"), BadInput, "buffer: cache is not"),
        (lambda: nl.arange(8), NotModelled, "nki.language.arange is not modelled"),
        (lambda: nki.baremetal, NotModelled, "nki.baremetal is not modelled"),
    ],
)
def test_what_cannot_be_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        simulate(nki.jit(lambda x: make()), floats(1, 1))


def test_never_written_memory_is_reported_with_its_line():
    @nki.jit
    def careless(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        tile = nl.ndarray(x.shape, dtype=x.dtype)
        nisa.dma_copy(tile[:, :4], x[:, :4])
        nl.store(out, tile)
        return out

    message = r"test_nki_front.py:\d+: sbuf0 f32\[128, 8\] in sbuf is read and was never written"
    with pytest.raises(IllegalInstruction, match=message):
        simulate(careless, floats(128, 8))
    result = simulate(careless, floats(128, 8), hazards="report")
    assert len(result.findings) == 1 and np.isnan(result.output[:, 4:]).all()


def test_matmul_accumulates_from_its_second_write_and_its_result_is_in_psum():
    @nki.jit
    def wrong(x):
        tile = nl.load(x)
        nisa.nc_matmul(dst=nl.ndarray((8, 8), nl.float32), stationary=tile, moving=tile)

    with pytest.raises(IllegalInstruction, match=r"front.py:\d+: .*dst must be in psum"):
        simulate(wrong, floats(128, 8))


# ---- Python around it ------------------------------------------------------------------------


def test_loops_by_registers():
    result = simulate(kernels.loop_by_register, np.zeros((128, 8), "f"), np.array([[3]], "i4"))
    assert (result.output == 3).all()
    assert result.engine("vector").instructions == 3

    @nki.jit
    def countdown(x):
        register = nisa.register_alloc(5)
        nl.while_loop(register, lambda r: r - 1)
        assert [int(i) for i in nl.dynamic_range(register)] == [0, 1, 2, 3, 4]

    simulate(countdown, floats(1, 1))


def test_a_loop_without_end_meets_the_deadline():
    @nki.jit
    def endless(x):
        nl.while_loop(nisa.register_alloc(1), lambda r: r)

    with pytest.raises(DeadlineExceeded, match=r"front.py:\d+: the kernel has run for 0.01 s"):
        simulate(endless, floats(1, 1), deadline=0.01)


def test_arrays_come_back_as_they_came():
    a = floats(128, 512)
    assert isinstance(kernels.tensor_add(a, a), np.ndarray)
    assert isinstance(nki.simulate(kernels.tensor_add)(a, a), np.ndarray)
    assert isinstance(kernels.tensor_add(jnp.asarray(a), jnp.asarray(a)), jnp.ndarray)


def test_events_name_the_kernels_lines():
    result = simulate(kernels.tensor_add, floats(128, 512), floats(128, 512))
    source = Path(kernels.__file__).read_text().splitlines()
    for event in result.events:
        file, _, number = event.line.rpartition(":")
        assert Path(file).name == HERE
        expected = {"DmaCopy": "dma_copy", "TensorTensor": "tensor_tensor"}[event.opcode]
        assert expected in source[int(number) - 1]
    slowest = result.lines()[0]
    assert slowest.engines == ("vector",) and slowest.instructions == 1


def test_a_call_that_does_not_fit_is_bad_input():
    with pytest.raises(BadInput, match="arguments: missing a required argument: 'b'"):
        simulate(kernels.tensor_add, floats(128, 512))
    with pytest.raises(BadInput, match="an NKI function outside a kernel"):
        nl.ndarray((8, 8), nl.float32)


def test_nki_is_the_simulator_only_when_asked_for():
    code = (
        "import sys; from trnsim.device.nki import install, uninstall\n"
        "assert 'nki' not in sys.modules; install()\n"
        "import nki.isa as nisa, nki.language as nl; from nki.typing import tensor\n"
        "import nki; assert nki.isa is nisa and nki.language is nl\n"
        "uninstall(); assert 'nki' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_scripts_run_with_the_simulator(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, numpy as np, nki, nki.language as nl\n"
        "@nki.jit\n"
        "def double(x):\n"
        "    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)\n"
        "    nl.store(out, nl.add(nl.load(x), nl.load(x)))\n"
        "    return out\n"
        "print(double(np.full((1, 1), float(sys.argv[1]), 'f')))\n"
    )
    run = [sys.executable, "-m", "trnsim.device.nki"]
    done = subprocess.run([*run, script, "21"], capture_output=True, text=True, check=True)
    assert done.stdout == "[[42.]]\n"
    missing = subprocess.run([*run, tmp_path / "no.py"], capture_output=True, text=True)
    assert (missing.returncode, missing.stderr.count("\n")) == (2, 1)


# ---- the command line ------------------------------------------------------------------------


def test_the_command_prints_numbers_and_writes_a_trace(capsys, monkeypatch, tmp_path):
    trace = tmp_path / "out" / "trace.json"
    place = f"{kernels.__file__}:tensor_add"
    words = [place, "--arg", "f32[128,512]", "--arg", "b=f32[128,512]", "--trace", trace]
    code, out, err = command(capsys, monkeypatch, *words, "--json")
    assert (code, err) == (0, "")
    numbers = json.loads(out)
    result = simulate(kernels.tensor_add, floats(128, 512), floats(128, 512))
    assert numbers["time_ps"] == result.time
    assert numbers["busy_ps"]["dma"] == result.engine("dma").busy
    assert numbers["arguments"] == ["float32[128, 512]", "b=float32[128, 512]"]
    entries = json.loads(trace.read_text())["traceEvents"]
    tracks = [e["args"]["name"] for e in entries if e["ph"] == "M" and e["name"] == "thread_name"]
    assert tracks == ["dma load", "vector", "dma store"]
    add = next(e for e in entries if e["name"] == "TensorTensor")
    assert add["args"]["line"].rpartition(":")[0] == kernels.__file__
    assert add["ts"] == (CHIP.kernel_launch_ps + result.events[2].start) / 1e6
    code, out, err = command(capsys, monkeypatch, *words)
    assert code == 0 and "10.1 us modelled" in out and "nki_kernels.py:" in out


@pytest.mark.parametrize(
    "words, message",
    [
        (["no.py:k"], "kernel: no.py:k is not valid; allowed: FILE.py:NAME of a file that exists"),
        (["{}:tensor_ad"], "nearest valid: tensor_add"),
        (["{}:softmax", "--arg", "f99[8]"], "--arg: f99 is not valid"),
        (["{}:softmax", "--arg", "f32[8]["], "allowed: DTYPE[SHAPE] such as f32[128,512]"),
        (["{}:softmax", "--arg", "f32[256,8]"], "partition dimension is 1 to 128, not 256"),
        (["{}:softmax", "--arg", "f32[8,8]", "--chip", "trn9"], "chip: trn9 is not valid"),
        (["{}:softmax", "--arg", "f32[8,8]", "--chip", "trn1", "--lnc", "2"], "lnc: 2 is not"),
    ],
)
def test_bad_input_is_one_line(capsys, monkeypatch, tmp_path, words, message):
    words = [word.format(kernels.__file__) for word in words]
    monkeypatch.chdir(tmp_path)
    code, out, err = command(capsys, monkeypatch, *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert not list(tmp_path.iterdir())


def test_the_example_is_numpys_matmul():
    example = Path(__file__).parents[1] / "examples" / "nki_matmul.py"
    run = [sys.executable, "-m", "trnsim.device.nki", example]
    done = subprocess.run(run, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("equal to numpy within the rounding of bfloat16\n", "")
