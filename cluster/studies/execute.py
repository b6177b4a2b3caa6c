"""Running the points of a study: in this process, or as Ray tasks.

A task runs a batch of points that share what has to be prepared (compiled segments, fabrics), and
hands each result over as soon as it is there; it is then written to the journal. A batch is at most
what keeps all processors busy.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .journal import PointResult
from .runners import outcome, runner

TASKS_PER_CPU = 2  # batches at least, so that processors end together
IN_FLIGHT = 1  # results of a task that nobody has taken yet, at most


@dataclass(frozen=True)
class Job:
    """A point to run: its key and all its options."""

    key: str
    options: Mapping[str, Any]


def run_local(kind: str, jobs: Sequence[Job]) -> Iterator[PointResult]:
    """Results in this process, one after another, points of a shape together."""
    for batch in batches(kind, jobs, 1):
        yield from _results(kind, batch)


def run_ray(kind: str, jobs: Sequence[Job], address: str | None = None) -> Iterator[PointResult]:
    """Results of Ray tasks as they come. Ray is started, and stopped, if there is none.

    Raises BadInput if Ray cannot be reached, and what a task raised that is no refusal.
    """
    import ray

    with _ray(address):
        cpus = max(1, int(ray.cluster_resources().get("CPU", 1)))
        options: dict[str, Any] = {
            "num_returns": "streaming",
            "max_retries": 0,
            "num_cpus": 1,
            "_generator_backpressure_num_objects": IN_FLIGHT,
        }
        task: Any = ray.remote(**options)(_task)
        waiting = list(batches(kind, jobs, cpus))[::-1]
        running: list[Any] = []
        while waiting or running:
            while waiting and len(running) < 2 * cpus:
                batch = [(job.key, dict(job.options)) for job in waiting.pop()]
                running.append(task.remote(kind, batch))
            ready, _ = ray.wait(running, num_returns=1)
            stream: Any
            for stream in ready:
                try:
                    key, values, refused = ray.get(next(stream))
                except StopIteration:
                    running.remove(stream)
                else:
                    yield PointResult(key, values, refused)


def batches(kind: str, jobs: Sequence[Job], cpus: int) -> Iterator[list[Job]]:
    """Jobs of equal shape together, large batches cut, the longest first."""
    groups: dict[str, list[Job]] = {}
    shape = runner(kind).shape
    for job in jobs:
        groups.setdefault(shape(job.options), []).append(job)
    most = max(1, -(-len(jobs) // (TASKS_PER_CPU * cpus))) if cpus > 1 else max(1, len(jobs))
    cut = [g[at : at + most] for g in groups.values() for at in range(0, len(g), most)]
    yield from sorted(cut, key=len, reverse=True)


def _results(kind: str, jobs: Sequence[Job]) -> Iterator[PointResult]:
    for job in jobs:
        values, refused = outcome(kind, job.options)
        yield PointResult(job.key, values, refused)


def _task(kind: str, batch: list[tuple[str, dict[str, Any]]]) -> Iterator[tuple[str, dict, str]]:
    """The body of a task. Plain data in and out."""
    import gc

    import jax

    gc.set_threshold(200_000, 50, 1000)  # a plan is many small objects: looking often takes 8 %
    jax.config.update("jax_platforms", "cpu")
    for result in _results(kind, [Job(*each) for each in batch]):
        yield result.key, result.values, result.refused


@contextmanager
def _ray(address: str | None) -> Iterator[None]:
    from ..runtimes.ray_runtime import RayInstance

    instance = RayInstance(address)
    try:
        instance.connect()
        yield
    finally:
        instance.disconnect()
