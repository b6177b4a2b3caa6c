"""The file contract of `trnsim train`: what comes back, and one clear line for each mistake."""

import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest

from trnsim.cluster.frontends import training_child
from trnsim.cluster.frontends.training import TrainingJob, load_training, parse_options
from trnsim.cluster.wire import decode, encode
from trnsim.device.errors import BadInput, DeadlineExceeded, TrnsimError, Unsupported

GPT = str(Path(__file__).parents[1] / "examples" / "gpt.py")
SMALL = {"layers": 1, "width": 16, "context": 8, "heads": 2}

HEADER = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
def put(mesh, x, *axes):
    return jax.device_put(x, NamedSharding(mesh, P(*axes)))
"""
GOOD = """
def training(mesh, rate=0.1):
    state = {"w": put(mesh, np.ones((4, 2), np.float32), None, "tp")}
    def loss(state, batch):
        return ((batch @ state["w"]) ** 2).mean()
    def step(state, batch):
        value, g = jax.value_and_grad(loss)(state, batch)
        return jax.tree.map(lambda w, g: w - rate * g, state, g), value
    batches = (put(mesh, np.full((4, 4), i, np.float32), "dp") for i in range(1, 4))
    return step, state, batches
"""


def job_of(path: str, steps: int = 2, **changes: Any) -> TrainingJob:
    """The job, loaded in this process."""
    request = {"mesh": {"dp": 2, "tp": 2}, "options": {}, "reference": True, "data": True}
    return training_child.load(path=path, steps=steps, **(request | changes))


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes a training file and returns its path."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write_file(text: str, name: str = "user.py") -> str:
        path = tmp_path / name
        path.write_text(HEADER + dedent(text))
        return str(path)

    return write_file


def line_of(path: str, text: str) -> int:
    lines = Path(path).read_text().splitlines()
    return next(i for i, line in enumerate(lines, 1) if text in line)


# --- what comes back ---------------------------------------------------------------------------


def test_job_of_the_example_in_a_child_process(tmp_path: Path) -> None:
    text = tmp_path / "text"  # of the test's own: the default text changes with the README
    text.write_text("one fish two fish red fish blue fish\n" * 50)
    job = load_training(GPT, {"dp": 2, "tp": 2}, 2, SMALL | {"text": str(text)})
    assert (job.file, job.mesh, job.lowered.ranks) == (GPT, {"dp": 2, "tp": 2}, 4)
    inputs, outputs = job.lowered.inputs, job.lowered.outputs
    assert [s.name for s in inputs] == [*job.state_names, *job.batch_names]
    assert [s.name for s in outputs] == [*job.state_names, "loss"]
    for before, after in zip(inputs[: len(job.state)], outputs, strict=False):
        np.testing.assert_array_equal(before.index, after.index)
    assert [a.shape for a in job.state] == [s.shape for s in inputs[: len(job.state)]]
    assert [b[0].shape for b in job.batches] == [(8, 9)] * 2
    assert np.abs(np.array(job.losses) - np.log(256)).max() < 0.1
    assert job.losses[1] < job.losses[0]
    up = inputs[job.state_names.index("state['weights']['0.up']")]
    assert (up.shape, up.local.shape) == ((16, 64), (16, 32))


def test_a_job_without_data_is_the_same_program() -> None:
    options = SMALL | {"dtype": "bf16"}
    full = job_of(GPT, options=options, reference=False)
    bare = job_of(GPT, options=options, reference=False, data=False)
    assert (bare.state, bare.batches, bare.losses) == ((), (), ())
    assert encode(bare.lowered) == encode(full.lowered)


def test_two_loads_are_equal_and_travel(write) -> None:
    one, two = (job_of(write(GOOD)) for _ in range(2))
    assert one.losses == two.losses
    assert encode((one.lowered, one.state, one.batches)) == encode(
        (two.lowered, two.state, two.batches)
    )
    assert encode(decode(encode(one))) == encode(one)


def test_state_as_arrays_and_as_a_function(write) -> None:
    lazy = GOOD.replace("state = {", "state = lambda: {")
    jobs = [job_of(write(text, name)) for text, name in ((GOOD, "a.py"), (lazy, "b.py"))]
    for job in jobs:
        np.testing.assert_allclose(job.losses, [16, 4.8**2], rtol=1e-6)
        assert job.lowered.inputs[0].local.shape == (4, 1)
        np.testing.assert_array_equal(job.batches[1][0], np.full((4, 4), 2, np.float32))


def test_a_state_function_that_looks_at_values_is_called(write) -> None:
    text = GOOD.replace("state = {", "state = lambda: float(jnp.ones(())) and {")
    assert job_of(write(text)).lowered.inputs[0].local.shape == (4, 1)


def test_a_state_function_is_not_computed_without_data(write) -> None:
    huge = "jnp.ones((1 << 20, 1 << 20))"  # 4 TiB
    text = GOOD.replace("state = {", "state = lambda: {").replace(
        "np.ones((4, 2), np.float32)", huge
    )
    text = text.replace('batch @ state["w"]', 'batch.sum() * state["w"]')
    job = job_of(write(text), data=False, reference=False)
    assert job.lowered.inputs[0].local.shape == (1 << 20, 1 << 19)


def test_options_are_parsed() -> None:
    texts = ["layers=4", "rate=1e-3", "dtype=bf16", "text=a=b", "flag=true", "none=None"]
    assert parse_options(texts) == {
        "layers": 4, "rate": 1e-3, "dtype": "bf16", "text": "a=b", "flag": True, "none": None,
    }  # fmt: skip
    with pytest.raises(BadInput, match="^--set: layers is not valid; allowed: NAME=VALUE$"):
        parse_options(["layers"])


# --- mistakes ----------------------------------------------------------------------------------

STEP = "def step(state, batch):"
MISTAKES = {
    "error while importing": ("x = 1 / 0", "{file}:{1 / 0}: ZeroDivisionError: division by zero"),
    "syntax": ("def training(:", "{file}:{def training(:}: SyntaxError: invalid syntax"),
    "exit": ("raise SystemExit(3)", "{file}:{SystemExit}: SystemExit: 3"),
    "missing function": ("train = 1", "{file} does not define a function training(mesh, ...)"),
    "no mesh": (
        "def training(): pass",
        "{file}: training() takes no mesh; define training(mesh, ...)",
    ),
    "error inside": (
        "def training(mesh):\n    return dict()['w']",
        "{file}:{dict()}: KeyError: 'w'",
    ),
    "wrong return": (
        "def training(mesh): return 1, 2",
        "{file}: training must return (step, state, batches), got tuple",
    ),
    "too few batches": (
        GOOD.replace("range(1, 4)", "range(1)"),
        "{file}: batches ended after 1; 2 are needed",
    ),
    "batches change": (
        GOOD.replace("np.full((4, 4)", "np.full((4 * i, 4)"),
        "{file}: batch is f32[4,4] and becomes f32[8,4] in batch 1",
    ),
    "error in step": (
        GOOD.replace(STEP, STEP + "\n        raise ValueError('two\\nlines')"),
        "{file}:{raise}: ValueError: two lines",
    ),
    "no loss": (
        GOOD.replace(", value\n", "\n"),
        "{file}: step must return (state, loss), got dict",
    ),
    "loss not a scalar": (
        GOOD.replace(", value\n", ", value[None]\n"),
        "{file}: step must return a scalar loss, got f32[1]",
    ),
    "loss not a number": (
        GOOD.replace(", value\n", ", (value, value)\n"),
        "{file}: step must return a scalar loss, got a tuple",
    ),
    "state changes dtype": (
        GOOD.replace("w - rate * g", "(w - rate * g).astype('bfloat16')"),
        "{file}: step changes the state: state['w'] is f32[4,2] and becomes bf16[4,2]",
    ),
    "state changes structure": (
        GOOD.replace("state, g), value", "state, g) | {'v': value}, value"),
        "{file}: step changes the state: the structure differs: state['v'] is in only one of the"
        " two",
    ),
    "shapes depend on the mesh": (
        GOOD.replace("np.full((4,", "np.full((2 * mesh.size,"),
        "{file}: batch is f32[8,4] and becomes f32[2,4] on one device: shapes must not depend on"
        " the mesh (or run without the reference)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_the_file_is_one_line(name: str, write) -> None:
    text, message = MISTAKES[name]
    path = write(text)
    with pytest.raises(TrnsimError) as error:
        job_of(path)
    expected = message.replace("{file}", path)
    if "{" in expected:
        marker = expected[expected.index("{") + 1 : expected.index("}")]
        expected = expected.replace("{" + marker + "}", str(line_of(path, marker)))
    assert str(error.value) == expected


def test_options_that_training_does_not_take_are_refused() -> None:
    message = (
        "^option: layer is not valid; allowed: one of text, layers, width, heads, context, batch,"
        " dtype, rate; nearest valid: layers$"
    )
    with pytest.raises(BadInput, match=message):
        job_of(GPT, options={"layer": 2})


def test_sizes_that_the_mesh_does_not_divide() -> None:
    with pytest.raises(TrnsimError, match=r"heads=3 is not a multiple of tp=2; use --set heads=2$"):
        job_of(GPT, options={"heads": 3})


def test_an_operator_that_is_not_modelled(write) -> None:
    path = write(GOOD.replace("value, g =", "jax.debug.print('x')\n        value, g ="))
    line = line_of(path, "debug.print")
    with pytest.raises(
        Unsupported, match=rf"^host callback \(.*\) is not modelled \({path}:{line}\)$"
    ):
        job_of(path)


# --- the child process -------------------------------------------------------------------------


def test_errors_come_back_from_the_child_process(write) -> None:
    path = write("x = 1 / 0")
    with pytest.raises(TrnsimError, match=rf"^{path}:{line_of(path, '1 / 0')}: ZeroDivisionError"):
        load_training(path, {"dp": 1})


def test_the_end_of_the_child_process_is_an_error(write) -> None:
    path = write("import os, sys\nprint('out of luck', file=sys.stderr, flush=True)\nos._exit(7)")
    with pytest.raises(TrnsimError, match=f"^{path}: JAX ended with exit code 7: out of luck$"):
        load_training(path, {"dp": 1})


def test_the_child_process_has_a_deadline(write) -> None:
    path = write("while True: pass")
    with pytest.raises(DeadlineExceeded, match=f"^{path}: JAX did not finish within 0.2 s$"):
        load_training(path, {"dp": 1}, deadline=0.2)


def test_a_file_that_is_not_there() -> None:
    message = "^FILE: nothing.py is not valid; allowed: an existing Python file$"
    with pytest.raises(BadInput, match=message):
        load_training("nothing.py", {"dp": 1})


def test_the_parent_needs_no_jax() -> None:
    code = "import sys, trnsim.cluster.frontends.training; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
