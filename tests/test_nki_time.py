"""Times of kernels: retiming, runs without values, lives of tensors, and published figures."""

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trnsim.cluster.cli import main
from trnsim.device.chip import load_chip
from trnsim.device.errors import BadInput, OutOfMemory
from trnsim.device.nki import simulate
from trnsim.device.nki.result import SimulationResult
from trnsim.device.overlay import apply_overlay, parse_overlay
from trnsim.device.units import cycles_ps

from . import nki_kernels
from .nki_kernels import nisa, nki, nl

CHIP = load_chip("trn2")
kernels: Any = nki_kernels
RANDOM = np.random.default_rng(5)


def floats(*shape) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


def loaded(*place: str):
    """A Python file of this repository as a module."""
    path = Path(__file__).parents[1].joinpath(*place)
    spec = importlib.util.spec_from_file_location(f"loaded_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RUNS = [
    (loaded("examples", "nki_matmul.py").matmul, (floats(256, 256), floats(256, 512))),
    (kernels.tensor_add, (floats(256, 1024), floats(256, 1024))),
    (kernels.matmul, (floats(256, 256), floats(256, 1024))),
    (kernels.softmax, (floats(128, 300),)),
    (kernels.layernorm, (floats(128, 256), floats(1, 256), floats(1, 256))),
    (kernels.transpose, (floats(128, 512),)),
    (kernels.split_sum[2], (floats(256, 64),)),
    (kernels.exchange_through_hbm[2], (floats(128, 64),)),
    (kernels.loop_by_register, (floats(128, 8), np.array([[3]], np.int32))),
]
NAMES = [f"{run[0].function.__module__}.{run[0].function.__name__}" for run in RUNS]
OVERLAY = """
[trn2.core]
semaphore_ps = { value = "41ns", unit = "time", status = "assumed", source = "t", note = "x" }
core_barrier_ps = { value = "777ns", unit = "time", status = "assumed", source = "t", note = "x" }
[trn2.core.clock_hz]
tensor = { value = "1.1GHz", unit = "clock", status = "assumed", source = "t", note = "x" }
vector = { value = "0.7GHz", unit = "clock", status = "assumed", source = "t", note = "x" }
[trn2.dma]
dma_start_ps = { value = "2us", unit = "time", status = "assumed", source = "t", note = "x" }
dma_dge_ps = { value = "1us", unit = "time", status = "assumed", source = "t", note = "x" }
"""
OTHER = apply_overlay(CHIP, parse_overlay(OVERLAY, "test"))


def times(result: SimulationResult) -> list[tuple]:
    """All that is timed: per core its end, busy times and events."""
    return [(core.end, dict(core.busy), core.events) for core in result.cores]


# ---- retiming ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("kernel", "arrays"), RUNS, ids=NAMES)
def test_retiming_equals_a_new_run_on_the_other_numbers(kernel, arrays):
    here, there = simulate(kernel, *arrays), simulate(kernel, *arrays, chip=OTHER)
    assert here.time != there.time
    again = here.retimed(OTHER)
    assert times(again) == times(there) and again.chip is OTHER
    assert times(again.retimed(CHIP)) == times(here)
    assert again.bracket == there.bracket


@pytest.mark.parametrize(
    ("chip", "message"),
    [
        (load_chip("trn3"), "name: trn3 is not valid; allowed: trn2, as when the kernel ran"),
        (replace(CHIP, sbuf_partition_bytes=1 << 17), "sbuf_partition_bytes: 131072 is not valid"),
    ],
)
def test_what_changes_a_kernel_is_not_retimed(chip, message):
    result = simulate(kernels.softmax, floats(128, 8))
    with pytest.raises(BadInput, match=message):
        result.retimed(chip)


def test_the_command_times_one_run_on_several_overlays(capsys, monkeypatch, tmp_path):
    (tmp_path / "other.toml").write_text(OVERLAY)
    (tmp_path / "same.toml").write_text("[trn2.core]\n")
    words = [f"{kernels.__file__}:tensor_add", "--arg", "f32[128,512]", "--arg", "f32[128,512]"]
    words += ["--time-only", "--trace", tmp_path / "trace.json", "--json"]
    words += ["--overlay", tmp_path / "other.toml", "--overlay", tmp_path / "same.toml"]
    monkeypatch.setattr(sys, "argv", ["trnsim", "kernel", *map(str, words)])
    main()
    numbers = json.loads(capsys.readouterr().out)
    x = floats(128, 512)
    for found, chip in zip((numbers, *numbers["overlays"]), (CHIP, OTHER, CHIP), strict=True):
        want = simulate(kernels.tensor_add, x, x, chip=chip).bracket
        assert found["bracket_ps"] == dict(zip(("greedy", "program"), want, strict=True))
    assert numbers["time_ps"] == numbers["bracket_ps"]["program"]


# ---- without values ----------------------------------------------------------------------------


@pytest.mark.parametrize(("kernel", "arrays"), RUNS, ids=NAMES)
def test_without_values_the_times_are_the_same(kernel, arrays):
    full, bare = simulate(kernel, *arrays), simulate(kernel, *arrays, data=False)
    assert times(bare) == times(full)
    assert bare.memory == full.memory and bare.outputs is None


def loop(tile, bound):
    """tile + 1 as often as the element of `bound` says."""
    register = nisa.register_alloc()
    nisa.register_load(register, bound)
    nl.fori_loop(0, register, lambda i: nisa.tensor_scalar(tile, tile, nl.add, 1.0))


def int_tile(columns=1):
    return nl.ndarray((1, columns), dtype=nl.int32, buffer=nl.sbuf)


def set_to_four(x):
    tile = int_tile()
    nisa.memset(tile, 4)
    return tile


def of_iota(x):
    tile, copy = int_tile(8), int_tile(8)
    nisa.iota(tile, [[2, 8]], offset=-2)
    nisa.tensor_copy(copy, tile)
    return copy[:, 3:4]


def stored_register(x):
    tile, scratch = int_tile(), nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.private_hbm)
    nisa.register_store(tile, nisa.register_alloc(4))
    nisa.dma_copy(scratch, tile)
    nisa.register_store(tile, nisa.register_alloc(9))
    return scratch


@pytest.mark.parametrize("make", [set_to_four, of_iota, stored_register])
def test_scalars_are_folded_without_values(make):
    @nki.jit
    def kernel(x):
        tile = nl.load(x)
        loop(tile, make(x))

    full, bare = (simulate(kernel, floats(8, 8), data=data) for data in (True, False))
    assert full.engine("vector").instructions - (make is not stored_register) == 4
    assert times(bare) == times(full)


def test_a_register_that_depends_on_values_needs_them():
    @nki.jit
    def kernel(x):
        count = int_tile()
        nisa.tensor_copy(count, nl.load(x))
        nisa.tensor_scalar(count, count, nl.add, 1)
        loop(nl.load(x), count)

    message = (
        r"test_nki_time.py:\d+: time only: a value of sbuf0 int32\[1, 1\] in sbuf is not valid"
    )
    with pytest.raises(BadInput, match=message):
        simulate(kernel, np.ones((1, 1), "f"), data=False)


# ---- lives of tensors --------------------------------------------------------------------------


def wide(name):
    return nl.ndarray((128, 16384), dtype=nl.float32, name=name)


def in_turn(tiles, out):
    """Each tile is written and read before the next."""
    for tile in tiles:
        nisa.memset(tile, 1.0)
        nisa.dma_copy(out, tile)


def at_once(tiles, out):
    for tile in tiles:
        nisa.memset(tile, 1.0)
    for tile in tiles:
        nisa.dma_copy(out, tile)


def kept(tiles, out):
    """Nothing reads them, but the kernel holds them."""
    for tile in tiles:
        nisa.memset(tile, 1.0)


def some_unused(tiles, out):
    at_once(tiles[:2], out)


@pytest.mark.parametrize(
    ("use", "tiles_held"), [(in_turn, 1), (some_unused, 2), (at_once, None), (kept, None)]
)
def test_tensors_that_python_holds_need_room_only_while_they_are_used(use, tiles_held):
    @nki.jit
    def kernel(x):
        out = nl.ndarray((128, 16384), dtype=nl.float32, buffer=nl.shared_hbm)
        use([wide(f"t{i}") for i in range(4)], out)
        return out

    if tiles_held is None:
        with pytest.raises(OutOfMemory, match=r"test_nki_time.py:\d+: sbuf: t3 needs 65536 B"):
            simulate(kernel, floats(1, 1))
        return
    result = simulate(kernel, floats(1, 1))
    assert (result.output == 1).all()
    assert result.memory.peak_sbuf == tiles_held * 65536
    assert simulate(kernel, floats(1, 1), data=False).time == result.time


# ---- zeros of PSUM -----------------------------------------------------------------------------


def accumulates(engine, spoil=False):
    @nki.jit
    def kernel(x):
        out = nl.ndarray((64, 512), dtype=nl.float32, buffer=nl.shared_hbm)
        tile, total = nl.load(x), nl.ndarray((64, 512), dtype=nl.float32, buffer=nl.psum)
        nisa.memset(total, 0.0, engine=engine)
        if spoil:
            nisa.tensor_scalar(total[:, 0:64], total[:, 0:64], nl.add, 0.0)
        for _ in range(2):
            nisa.nc_matmul(total, tile[:, 0:64], tile)
        nl.store(out, total)
        return out

    return kernel


def test_zeros_that_a_matmul_overwrites_take_no_instruction():
    x = floats(128, 512)
    folded = simulate(accumulates(nisa.engine.unknown), x)
    kept = simulate(accumulates(nisa.engine.vector), x)
    np.testing.assert_array_equal(folded.output, kept.output)
    np.testing.assert_allclose(folded.output, 2 * x[:, :64].T @ x, rtol=1e-4, atol=1e-3)
    assert (folded.folded, kept.folded) == (1, 0)
    assert [e.opcode for e in kept.events].count("Memset") == 1
    assert [e.opcode for e in folded.events].count("Memset") == 0
    assert "engine=" in kept.hooks and "engine=" not in folded.hooks


def test_zeros_that_another_instruction_uses_are_written():
    result = simulate(accumulates(nisa.engine.unknown, spoil=True), floats(128, 512))
    assert result.folded == 0
    assert [e.opcode for e in result.events if e.engine == "vector"][:2] == [
        "Memset", "TensorScalar",
    ]  # fmt: skip


# ---- published figures -------------------------------------------------------------------------


BENCHMARK = loaded("benchmarks", "kernels.py")


@pytest.fixture(scope="module")
def modelled():
    return {point.name: point.modelled(point.run()) for point in BENCHMARK.POINTS}


@pytest.mark.parametrize("point", BENCHMARK.POINTS, ids=lambda point: point.name)
def test_modelled_times_are_near_published_ones(point, modelled):
    assert modelled[point.name][0] == pytest.approx(point.value, rel=point.tolerance)


def test_published_orders_are_kept(modelled):
    """The one matmul is better than the other, and the second mamba than the first, either way."""
    values = {name.split(",")[0]: value for name, value in modelled.items()}
    assert values["matmul lhsT.rhs 2048^3 bf16"][0] > values["matmul lhs.rhs 2048^3 bf16"][0]
    for first, second in zip(values["mamba v1"], values["mamba v2"], strict=True):
        assert second < first


def test_kernels_of_the_published_figures_compute_what_they_say():
    published = BENCHMARK.kernels
    a, b = floats(1024, 1024), floats(1024, 512)
    for kernel, left in ((published.matmul_t, a.T.copy()), (published.matmul_n, a)):
        got = simulate(kernel, left.astype(nl.bfloat16.dtype), b.astype(nl.bfloat16.dtype)).output
        assert np.abs(got.astype("f") - a @ b).max() < 0.02 * np.abs(a @ b).max()
    delta, u = np.abs(floats(2, 256, 64))
    decay, rows, columns = -np.abs(floats(256, 4)), floats(4, 64), floats(4, 64)
    state, want = np.zeros((256, 4)), np.zeros((256, 64))
    for t in range(64):
        step = delta[:, t, None]
        state = np.exp(step * decay) * state + step * u[:, t, None] * rows[:, t]
        want[:, t] = state @ columns[:, t]
    for kernel in (published.mamba_v1, published.mamba_v2):
        got = simulate(kernel, delta, u, decay, rows, columns).output
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)


def test_an_fp32_matmul_is_four_passes():
    assert cycles_ps(4 * 512, CHIP.clock_hz["tensor"]) == pytest.approx(859_000, rel=0.01)
