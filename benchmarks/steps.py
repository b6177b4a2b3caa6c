"""Training steps of examples/gpt.py: how many per second, without data and with it.

    python benchmarks/steps.py

Without data: the virtual time of a step on 4, 64 and 512 ranks (`plan` is the one-off compilation,
XLA excluded). With data: the same step in the local runtime, and JAX's own on one CPU device.
"""

import time
from collections.abc import Callable
from pathlib import Path

from trnsim.cluster.frontends.training import TrainingJob, load_training
from trnsim.cluster.machine import Machine
from trnsim.cluster.mesh import parse_mesh
from trnsim.cluster.runtimes.local import LocalRuntime
from trnsim.cluster.simulation import Simulation

EXAMPLE = Path(__file__).parents[1] / "examples" / "gpt.py"
SCALES = (
    ("trn2.3xlarge", 1, "dp=2,tp=2"),
    ("trn2.48xlarge", 1, "dp=16,tp=4"),
    ("trn2.48xlarge", 8, "dp=128,tp=4"),
)


def rate(step: Callable[[], object], seconds: float = 2.0) -> float:
    """Calls per second."""
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        step()
        count += 1
    return count / (time.perf_counter() - start)


def without_data() -> None:
    print(f"{'ranks':>6} {'XLA (s)':>8} {'plan (s)':>9} {'steps/s':>8} {'modelled step (us)':>19}")
    for instance, nodes, axes in SCALES:
        mesh = parse_mesh(axes)
        start = time.perf_counter()
        options = {"batch": 2 * mesh.degree("dp")}
        job = load_training(EXAMPLE, dict(mesh.axes), 1, options, reference=False, data=False)
        lowered = time.perf_counter()
        simulation = Simulation(job.lowered, Machine.of(instance, nodes, 2, mesh))
        planned = time.perf_counter()
        modelled = simulation.time_only().duration / 1e6
        print(
            f"{mesh.size:>6} {lowered - start:>8.2f} {planned - lowered:>9.2f}"
            f" {rate(simulation.time_only):>8.1f} {modelled:>19.1f}"
        )


def with_data() -> None:
    mesh = parse_mesh("dp=2,tp=2")
    job = load_training(EXAMPLE, dict(mesh.axes), 2, {})
    print(f"\nwith data, 4 ranks x 2 cores, operator fidelity: {local_rate(job):.2f} steps/s")


def local_rate(job: TrainingJob) -> float:
    simulation = Simulation(job.lowered, Machine.of("trn2.3xlarge", 1, 2, parse_mesh("dp=2,tp=2")))
    arguments = dict(enumerate([*job.state, *job.batches[0]]))
    with LocalRuntime() as runtime:
        simulation.start(runtime)
        return rate(lambda: simulation.step(arguments, []))


if __name__ == "__main__":
    without_data()
    with_data()
