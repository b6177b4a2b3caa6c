"""`trnsim train`: a training file on simulated NeuronCores, from the file to the record."""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from trnsim.device.errors import BadInput, TrnsimError

from . import wire
from .calls import check_algorithm
from .clocks import StepTime
from .compile import Fidelity
from .frontends.lift import DEGREES
from .frontends.training import TrainingJob, load_training
from .machine import Machine
from .mesh import Mesh
from .report.build import build_record
from .report.record import RunRecord, StepRecord
from .report.trace import write_trace
from .runtimes.base import Runtime
from .runtimes.local import LocalRuntime
from .simulation import Simulation

TRACED_RANKS = 4
LIFTED_RANKS = 256

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """What `trnsim train` was asked for. `options` go to the file's `training` function.

    `lift` names the axis that is compiled for a few ranks only, or is `none`; `auto` is `dp` where
    there are more ranks than XLA partitions in reasonable time (`LIFTED_RANKS`).
    """

    file: Path
    instance: str
    mesh: Mesh
    nodes: int = 1
    lnc: int | None = None
    steps: int = 5
    runtime: Literal["local", "ray"] = "local"
    address: str | None = None
    fidelity: Fidelity = "operator"
    time_only: bool = False
    lift: str = "auto"
    algorithm: str = "policy"
    streams: int = 1
    overlay: Path | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    stated: Mapping[str, int] = field(default_factory=dict)
    out: Path = Path("out")
    command: str = ""


def train(asked: TrainOptions, progress: Progress = lambda text: None) -> RunRecord:
    """Runs the training, writes `trace.json` and `run.msgpack` under `asked.out`.

    Raises TrnsimError for whatever the user can mend; nothing is half-written then.
    """
    if asked.steps < 1:
        raise BadInput("steps", asked.steps, "1 or more", 1)
    check_algorithm(asked.algorithm)
    _check_out(asked.out)
    if asked.stated and not asked.time_only:
        raise BadInput("--assume", next(iter(asked.stated)), "only with --time-only")
    lifted = lifted_axis(asked)
    machine = Machine.of(asked.instance, asked.nodes, asked.lnc, asked.mesh, asked.overlay)
    spent: dict[str, float] = {}
    with _timed(spent, "JAX and XLA"):
        progress("JAX and XLA: tracing, partitioning" + ("" if asked.time_only else ", reference"))
        job = _job(asked, lifted)
    with _timed(spent, "planning"):
        progress("planning kernels, memory and collectives")
        simulation = Simulation(
            job.lowered, machine, asked.fidelity, _commit(job), asked.algorithm,
            range(min(machine.ranks, TRACED_RANKS)), asked.streams,
        )  # fmt: skip
    with _timed(spent, "simulating"):
        steps, last = _run(asked, job, simulation, progress)
    record = build_record(
        simulation, last, steps,
        version=version("trnsim"), command=asked.command, mesh=dict(asked.mesh.axes),
        runtime=_runtime(asked, lifted),
        options={name: str(value) for name, value in asked.options.items()},
        host_seconds=spent, files=_files(asked.out),
    )  # fmt: skip
    _write(asked.out, record, last)
    return record


def lifted_axis(asked: TrainOptions) -> str | None:
    """The axis to lift. Raises BadInput for one that the mesh does not have, or with data."""
    if asked.lift == "none":
        return None
    if asked.lift == "auto":
        axes = dict(asked.mesh.axes)
        many = asked.mesh.size > LIFTED_RANKS and axes.get("dp", 1) > max(DEGREES)
        return "dp" if asked.time_only and many else None
    degree = asked.mesh.degree(asked.lift)
    if not asked.time_only:
        raise BadInput("--lift", asked.lift, "only with --time-only")
    return asked.lift if degree > max(DEGREES) else None


def _job(asked: TrainOptions, lifted: str | None) -> TrainingJob:
    return load_training(
        asked.file,
        dict(asked.mesh.axes),
        asked.steps,
        dict(asked.options),
        reference=not asked.time_only,
        data=not asked.time_only,
        lift=lifted,
    )


def _runtime(asked: TrainOptions, lifted: str | None) -> str:
    if not asked.time_only:
        return asked.runtime
    how = f", {lifted} lifted from {' and '.join(map(str, DEGREES))}" if lifted else ""
    return f"none (time only{how})"


@contextmanager
def _timed(spent: dict[str, float], what: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    spent[what] = time.perf_counter() - start


def _run(
    asked: TrainOptions, job: TrainingJob, simulation: Simulation, progress: Progress
) -> tuple[list[StepRecord], StepTime]:
    if asked.time_only:
        times = [simulation.time_only(asked.stated) for _ in range(asked.steps)]
        return [StepRecord(i, t.duration) for i, t in enumerate(times)], times[-1]
    with make_runtime(asked.runtime, asked.address) as runtime:
        progress(f"starting {len(simulation.machine.addresses(0))} simulated cores")
        simulation.start(runtime)
        return _train_steps(job, simulation, progress)


def _commit(job: TrainingJob) -> list[tuple[int, int]]:
    """The step's first results are the state, and so are its first arguments."""
    return [(index, index) for index in range(len(job.state_names))]


def _train_steps(
    job: TrainingJob, simulation: Simulation, progress: Progress
) -> tuple[list[StepRecord], StepTime]:
    """The state is placed once and stays on the cores; each step brings its batch."""
    records, times = [], []
    first = loss_index = len(job.state_names)
    arguments = dict(enumerate(job.state))
    for index, batch in enumerate(job.batches):
        progress(f"step {index + 1} of {len(job.batches)}")
        arguments |= {first + i: array for i, array in enumerate(batch)}
        result = simulation.step(arguments, [loss_index])
        loss = float(result.values[loss_index])
        reference = job.losses[index] if job.losses else None
        records.append(StepRecord(index, result.time.duration, loss, reference))
        times.append(result.time)
        arguments = {}
    return records, times[-1]


def make_runtime(kind: str, address: str | None = None) -> Runtime:
    """The runtime called `local` or `ray`; Ray is imported only when it is used."""
    if kind == "local":
        if address is not None:
            raise BadInput("address", address, "nothing with --runtime local")
        return LocalRuntime()
    from .runtimes.ray_runtime import RayRuntime

    return RayRuntime(address)


def _files(out: Path) -> dict[str, str]:
    return {
        "trace (ui.perfetto.dev)": str(out / "trace.json"),
        "record (trnsim show)": str(out / "run.msgpack"),
    }


def _check_out(out: Path) -> None:
    """Raises BadInput if the folder cannot be made or written: before the run, not after it."""
    there = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise BadInput("--out", out, f"a folder that can be written ({there} cannot)")


def _write(out: Path, record: RunRecord, last: StepTime) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_trace(out / "trace.json", last.events)
        wire.write(out / "run.msgpack", record)
    except OSError as error:
        raise TrnsimError(f"--out {out}: cannot be written: {error.strerror}") from error
