"""Wrong kernels: each gives one clear error with its source line, here and on the command line."""

import inspect
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from trnsim.cluster.cli_kernel import parse_argument
from trnsim.device.errors import BadInput, IllegalInstruction, OutOfMemory, TrnsimError
from trnsim.device.isa import lanes
from trnsim.device.nki import simulate
from trnsim.device.nki.errors import DeadlockError, failed

from . import nki_wrong_kernels as wrong
from .nki_command import run_command
from .nki_kernels import nisa, nki, nl

FILE = Path(wrong.__file__)
ONES = np.ones((128, 8), "f")


class Case(NamedTuple):
    """A kernel's name, its arguments as `--arg` takes them, and the error that it ends in."""

    name: str
    arguments: tuple[str, ...]
    error: type[TrnsimError]
    message: str  # LINE stands for the file and line
    chip: str = "trn2"
    cores: int = 1


X = "f32[128,8]"
CASES = [
    Case("too_wide", ("f32[128,128]", "f32[128,1024]"), IllegalInstruction,
         "Matmul: moving free size is 1024; limit: 512"),
    Case("psum_overflow", ("f32[128,512]",), OutOfMemory,
         "psum: psum8 needs 2048 B per partition, 0 B of 16384 B per partition are free, the "
         "largest gap is 0 B; held by: psum0 2048 B, psum1 2048 B, psum2 2048 B, and 5 more; with "
         "psum8 18432 B per partition"),
    Case("sbuf_overflow", ("f32[128,65536]", "16384"), OutOfMemory,
         "sbuf: block3 needs 65536 B per partition, 16376 B of 212984 B per partition are free "
         "(of 229376 B, the rest is reserved), the largest gap is 16376 B; held by: "
         "block0 65536 B, block1 65536 B, block2 65536 B; with block3 262144 B per partition"),
    Case("sbuf_of_trn1", ("f32[128,16502]",), OutOfMemory,
         "sbuf: tile2 needs 66008 B per partition, 48208 B of 180224 B per partition are free "
         "(of 196608 B, the rest is reserved), the largest gap is 48208 B; held by: "
         "tile0 66008 B, tile1 66008 B; with tile2 198024 B per partition", chip="trn1"),
    Case("wrong_engine", ("f32[128,128]",), IllegalInstruction,
         "Copy: src must be in sbuf for the gpsimd engine, not in psum"),
    Case("mixed_dtypes", ("f32[128,128]", "bf16[128,512]"), IllegalInstruction,
         "Matmul: stationary is f32 and moving bf16; f32 pairs only with f32"),
    Case("uninitialised", (X,), IllegalInstruction,
         "sbuf0 f32[128, 8] in sbuf is read and was never written, or only in part; made at "
         "LINE-3"),
    Case("race", (X,), IllegalInstruction,
         "race: core 1 writes shared_hbm0 f32[128, 8] in hbm while core 0 writes it at LINE; no "
         "barrier orders them", cores=2),
    Case("barrier_on_one_core", (X,), DeadlockError,
         "core 0 waits in core_barrier at LINE; core 1 has ended", cores=2),
    Case("sendrecv_mismatch", ("f32[128,16]",), IllegalInstruction,
         "sendrecv: core 1 sends f32[128, 9] and core 0 receives f32[128, 8]", cores=2),
    Case("index_out_of_bounds", ("f32[4,8]", "i32[128,1]"), IllegalInstruction,
         "DmaGather: vector offset 6 is out of bounds: 0 to 3"),
    Case("one_core_too_few", (X,), IllegalInstruction,
         "sendrecv (pipe 0) at LINE needs a kernel launched on two cores: kernel[2]"),
    Case("later_generation", (X,), IllegalInstruction,
         "Exponential: needs NeuronCore-v4 or later; trn2 has v3"),
    Case("private_output", (X,), BadInput,
         "return: private_hbm0 float32[128, 8] in private_hbm is not valid; allowed: tensors in "
         "shared_hbm"),
    Case("unwritten_output", (X,), BadInput,
         "return: shared_hbm0 float32[128, 8] in shared_hbm, never written is not valid; allowed: "
         "tensors that the kernel writes"),
    Case("unknown_keyword", (X,), BadInput,
         "nisa.tensor_scalar: got an unexpected keyword argument 'mask' is not valid; allowed: "
         "dst, data, op0, operand0, reverse0, op1, operand1, reverse1, engine, name"),
    Case("slice_out_of_bounds", (X,), IllegalInstruction,
         "x float32[128, 8] in private_hbm: index 0:9 of axis 1; its extent is 8"),
    Case("uneven_outputs", (X,), IllegalInstruction,
         "shared_hbm tensor 0 is f32[128, 9] on core 1 and f32[128, 8] at LINE on another: all "
         "cores must allocate alike", cores=2),
    Case("too_many_partitions", (X,), IllegalInstruction,
         "sbuf0: partition dimension is 1 to 128, not 256"),
    Case("misaligned_partitions", (X,), IllegalInstruction,
         "TensorScalar: dst has 64 partitions and starts at 32; allowed starts: 0, 64"),
    Case("dma_from_psum", ("f32[128,128]",), IllegalInstruction,
         "DmaCopy: src must be in hbm or sbuf for DMA, not in psum"),
]  # fmt: skip


def expected(case: Case) -> str:
    """The whole message, with the line of the kernel that ends in `# wrong`."""
    lines, first = inspect.getsourcelines(getattr(wrong, case.name).function)
    at = next(first + i for i, line in enumerate(lines) if line.rstrip().endswith("# wrong"))
    text = case.message.replace("LINE-3", f"{FILE}:{at - 3}").replace("LINE", f"{FILE}:{at}")
    return f"{FILE}:{at}: {text}"


def arguments(case: Case) -> list[Any]:
    random = np.random.default_rng(0)
    return [parse_argument(text, random)[1] for text in case.arguments]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_simulate_raises_one_error_with_the_line(case):
    kernel = getattr(wrong, case.name)
    launched = kernel if case.cores == 1 else kernel[case.cores]
    with pytest.raises(case.error) as caught:
        simulate(launched, *arguments(case), chip=case.chip)
    assert str(caught.value) == expected(case)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_command_prints_one_line_and_leaves_nothing(capsys, monkeypatch, tmp_path, case):
    monkeypatch.chdir(tmp_path)
    given = [word for text in case.arguments for word in ("--arg", text)]
    place = f"{FILE}:{case.name}"
    ran = run_command(capsys, monkeypatch, place, *given, "--chip", case.chip, "--lnc", case.cores)
    assert ran == (2, "", f"trnsim: error: {expected(case)}\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "name, given, chip",
    [
        ("sbuf_overflow", [np.ones((128, 3 * 16384), "f"), 16384], "trn2"),
        ("sbuf_of_trn1", [np.ones((128, 16502), "f")], "trn2"),
        ("later_generation", [np.ones((128, 8), "f")], "trn3"),
    ],
)
def test_what_is_wrong_with_some_is_the_chip_or_the_size_alone(name, given, chip):
    assert simulate(getattr(wrong, name), *given, chip=chip).instructions


def test_a_failed_assertion_is_one_line_of_the_command(capsys, monkeypatch, tmp_path):
    """In Python it stays an AssertionError, so that a debugger finds it."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AssertionError, match="^128 rows"):
        simulate(wrong.asserts, ONES)
    case = Case("asserts", (X,), TrnsimError, "AssertionError: 128 rows")
    ran = run_command(capsys, monkeypatch, f"{FILE}:asserts", "--arg", X)
    assert ran == (2, "", f"trnsim: error: {expected(case)}\n")


def test_a_fault_of_the_simulator_is_not_called_one_of_the_kernel(monkeypatch):
    monkeypatch.setattr(lanes, "column", None)
    with pytest.raises(TypeError, match="not callable") as caught:
        simulate(nki.jit(lambda x: nisa.tensor_scalar(t := nl.load(x), t, nl.add, 1.0)), ONES)
    assert failed(caught.value) is caught.value
