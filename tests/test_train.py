"""Training runs: one description in two planes and two runtimes, and what the command says."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trnsim.cluster import wire
from trnsim.cluster.clocks import StepTime
from trnsim.cluster.frontends.training import TrainingJob, load_training
from trnsim.cluster.machine import Machine
from trnsim.cluster.mesh import parse_mesh
from trnsim.cluster.program import StartCollective
from trnsim.cluster.report.record import RunRecord
from trnsim.cluster.runtimes.base import Runtime
from trnsim.cluster.runtimes.local import LocalRuntime
from trnsim.cluster.runtimes.ray_runtime import RayRuntime
from trnsim.cluster.simulation import Simulation

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "gpt.py"
SMALL = {"width": 32, "context": 16, "layers": 1}
STEPS = 5


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> TrainingJob:
    text = tmp_path_factory.mktemp("train") / "text"  # the default text changes with the README
    text.write_text("one fish two fish red fish blue fish\n" * 50)
    return load_training(EXAMPLE, {"dp": 2, "tp": 2}, STEPS, SMALL | {"text": str(text)})


def simulation(job: TrainingJob, lnc: int = 2, **options: Any) -> Simulation:
    machine = Machine.of("trn2.3xlarge", 1, lnc, parse_mesh("dp=2,tp=2"))
    state = [(i, i) for i in range(len(job.state_names))]
    return Simulation(job.lowered, machine, commit=state, **options)


def run(job: TrainingJob, runtime: Runtime, **options: Any) -> tuple[list, list[StepTime]]:
    """All results (parameters and loss) of the last step, and the time of every step."""
    simulated = simulation(job, **options)
    count = len(job.state_names)
    arguments = dict(enumerate(job.state))
    results = []
    with runtime:
        simulated.start(runtime)
        for index, batch in enumerate(job.batches):
            arguments |= {count + i: array for i, array in enumerate(batch)}
            last = index == len(job.batches) - 1
            results.append(simulated.step(arguments, range(count + 1) if last else [count]))
            arguments = {}
    return [results[-1].values[i] for i in range(count + 1)], [r.time for r in results]


def assert_same(one: tuple[list, list[StepTime]], other: tuple[list, list[StepTime]]) -> None:
    for a, b in zip(one[0], other[0], strict=True):
        assert a.dtype == b.dtype and a.tobytes() == b.tobytes()
    for s, t in zip(one[1], other[1], strict=True):
        assert np.array_equal(s.ends, t.ends)
        assert s.busy == t.busy


@pytest.fixture(scope="module")
def local(job: TrainingJob) -> tuple[list, list[StepTime]]:
    return run(job, LocalRuntime())


def test_losses_follow_jax(job: TrainingJob) -> None:
    simulated = simulation(job)
    count, losses = len(job.state_names), []
    with LocalRuntime() as runtime:
        simulated.start(runtime)
        arguments = dict(enumerate(job.state))
        for batch in job.batches:
            result = simulated.step(arguments | {count: batch[0]}, [count])
            losses.append(float(result.values[count]))
            arguments = {}
    np.testing.assert_allclose(losses, job.losses, rtol=1e-5)
    assert losses[-1] < losses[0]


def test_two_runs_in_a_row_are_the_same(job: TrainingJob, local: Any) -> None:
    assert_same(local, run(job, LocalRuntime()))


def test_ray_gives_the_same_bits_and_picoseconds(
    job: TrainingJob, local: Any, ray_instance: object
) -> None:
    assert_same(local, run(job, RayRuntime()))


def test_time_needs_no_data(job: TrainingJob, local: Any) -> None:
    simulated = simulation(job)
    times = [simulated.time_only() for _ in range(STEPS)]
    assert [t.ends.tolist() for t in times] == [t.ends.tolist() for t in local[1]]


def test_instruction_fidelity_agrees(job: TrainingJob, local: Any) -> None:
    """Every instruction on SBUF and PSUM: same training, nearly the same time."""
    short = replace(job, batches=job.batches[:1])
    values, times = run(short, LocalRuntime(), fidelity="instruction")
    reference, reference_times = run(short, LocalRuntime())
    for got, want in zip(values, reference, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-6)
    assert abs(times[0].duration / reference_times[0].duration - 1) <= 0.05


def test_lnc_1_and_2_compute_the_same(job: TrainingJob, local: Any) -> None:
    values, _ = run(job, LocalRuntime(), lnc=1)
    for got, want in zip(values, local[0], strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-5)


def test_streams_change_when_and_not_what(job: TrainingJob, local: Any) -> None:
    values, times = run(job, LocalRuntime(), streams=2)
    for got, want in zip(values, local[0], strict=True):
        assert got.tobytes() == want.tobytes()
    assert times[0].duration <= local[1][0].duration
    timed = simulation(job, streams=2)
    assert [timed.time_only().duration for _ in times] == [time.duration for time in times]
    calls = [step for step in timed.program.walk() if isinstance(step, StartCollective)]
    streams = {call.groups: {c.stream for c in calls if c.groups == call.groups} for call in calls}
    assert sorted(map(sorted, streams.values())) == [[0], [1]]  # tp and dp


def test_a_pair_of_cores_is_quicker_when_the_step_is_compute_bound() -> None:
    options = {"width": 512, "context": 256, "layers": 1, "heads": 8, "batch": 8}
    job = load_training(EXAMPLE, {"dp": 2, "tp": 2}, 1, options, data=False, reference=False)
    one, two = (simulation(job, lnc=lnc).time_only().duration for lnc in (1, 2))
    assert two < 0.75 * one


# -- the command --------------------------------------------------------------------------------


def trnsim(*arguments: str, **options: Any) -> subprocess.CompletedProcess:
    command = [sys.executable, "-P", "-c", "from trnsim.cluster.cli import main; main()"]
    return subprocess.run(
        [*command, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=120, **options
    )


def refusal(*arguments: str) -> str:
    """The one line of a refused command."""
    done = trnsim(*arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout == ""
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("trnsim: error: "), done.stderr
    return lines[0].removeprefix("trnsim: error: ")


def test_train_prints_a_summary_that_show_prints_again(tmp_path: Path) -> None:
    small = [f"--set={name}={value}" for name, value in SMALL.items()]
    done = trnsim("train", str(EXAMPLE), "--steps", "2", "--out", str(tmp_path), *small)
    assert done.returncode == 0, done.stderr
    for part in (
        "Loss",
        "overlapped bound",
        "serial bound",
        "exposed",
        "HBM per logical core: peak",
    ):
        assert part in done.stdout
    again = trnsim("show", str(tmp_path / "run.msgpack"))
    assert again.stdout == done.stdout
    record = wire.read(tmp_path / "run.msgpack")
    assert isinstance(record, RunRecord) and len(record.steps) == 2
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    tracks = {e["args"]["name"] for e in trace if e["name"] == "thread_name"}
    assert {"core 0", "core 1 vector", "core 0 dma", "collective stream 0"} <= tracks
    as_json = trnsim("show", str(tmp_path / "run.msgpack"), "--json")
    assert json.loads(as_json.stdout)["ranks"] == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["--instance", "trn2.4xlarge"], "instance: trn2.4xlarge", id="instance"),
        pytest.param(["--lnc", "3"], "LNC: 3 is not valid; allowed: 1 or 2", id="LNC=3"),
        pytest.param(
            ["--instance", "trn1.32xlarge", "--lnc", "2", "--mesh", "dp=2,tp=16"],
            "LNC: 2 is not valid; allowed: 1 on Trainium1",
            id="LNC=2 on trn1",
        ),
        pytest.param(["--mesh", "dp=4,tp=4"], "mesh: dp=4,tp=4 (16 ranks)", id="does not fit"),
        pytest.param(
            ["--instance", "trn1.32xlarge", "--mesh", "tp=24"],
            "tp: 24 is not valid; allowed: 1, 2, 8, 16, multiples of 32",
            id="U14",
        ),
        pytest.param(["--mesh", "dp=two"], "mesh: 'dp=two' is not valid", id="mesh"),
        pytest.param(["--steps", "0"], "steps: 0 is not valid", id="steps"),
        pytest.param(["--runtime", "rey"], "Invalid value for '--runtime'", id="runtime"),
        pytest.param(["--assume", "gpt.py:3=1"], "--assume: gpt.py:3 is not valid", id="assume"),
        pytest.param(["--out", "README.md"], "--out: README.md is not valid", id="out"),
        pytest.param(["--set", "widht=3"], "widht", id="option of the file"),
        pytest.param(["--text", "no/such/file"], "no/such/file", id="text"),
        pytest.param(["--streams", "5"], "streams: 5 is not valid; allowed: 1 to 4", id="streams"),
        pytest.param(["--algorithm", "tree"], "algorithm: tree is not valid", id="algorithm"),
        pytest.param(
            ["--time-only", "--set=width=40000", "--set=layers=8"], "HBM of a rank", id="HBM"
        ),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert message in refusal("train", str(EXAMPLE), f"--out={out}", *arguments)
    assert not out.exists()


def test_an_error_in_the_users_file_names_its_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def training(mesh):\n    return undefined, 1, []\n")
    message = refusal("train", str(file), "--out", str(tmp_path / "out"))
    assert "mine.py:2" in message and "undefined" in message


def test_a_loss_may_be_an_old_value_of_the_state(tmp_path: Path) -> None:
    """And JSON has no NaN: it becomes null."""
    file = tmp_path / "mine.py"
    file.write_text(
        "import numpy as np\n"
        "def training(mesh):\n"
        "    step = lambda state, batch: ((batch.sum(), state[0]), state[1])\n"
        "    state = (np.float32(3), np.float32(np.nan))\n"
        "    return step, state, [np.full(4, i, np.float32) for i in range(4)]\n"
    )
    done = trnsim("train", str(file), "--steps", "4", "--out", str(tmp_path / "out"), "--json")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout, parse_constant=pytest.fail)
    losses = [(step["loss"], step["reference"]) for step in record["steps"]]
    assert losses == [(None, None), (3, 3), (0, 0), (4, 4)]


def test_a_foreign_record_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.msgpack").write_bytes(b"hello")
    assert "x.msgpack" in refusal("show", str(tmp_path / "x.msgpack"))


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds the actor's process in /proc")
def test_a_killed_core_ends_the_run_with_its_name(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-c", "from trnsim.cluster.cli import main; main()"]
    small = [f"--set={name}={value}" for name, value in SMALL.items()]
    arguments = ["train", str(EXAMPLE), "--runtime", "ray", "--steps", "2000", *small]
    process = subprocess.Popen(
        [*command, *arguments, "--mesh", "dp=1,tp=2", "--out", str(tmp_path / "out")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    try:
        victim = _wait_for_actor(process)
        os.kill(victim, signal.SIGKILL)
        killed = time.monotonic()
        _, errors = process.communicate(timeout=60)
        assert time.monotonic() - killed < 30
    finally:
        process.kill()
    assert process.returncode == 2
    last = errors.strip().splitlines()[-1]
    for word in ("rank ", "chip 0", "physical core", "node", f"process {victim}"):
        assert word in last, errors


def _wait_for_actor(process: subprocess.Popen) -> int:
    """The process of a core's actor that is busy running steps."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and process.poll() is None:
        for entry in Path("/proc").iterdir():
            try:
                title = (entry / "cmdline").read_bytes()
                busy = sum(map(int, (entry / "stat").read_text().rsplit(")", 1)[1].split()[11:13]))
            except (OSError, ValueError, IndexError):
                continue
            if title.startswith(b"ray::CoreActor.run") and busy > 300:
                return int(entry.name)
        time.sleep(0.2)
    raise AssertionError("no actor came up")
