"""Running the points of a study: in this process, or by Ray actors, one per processor.

Points of one shape share what has to be prepared (compiled segments, fabrics). An actor is given a
few points at a time, of shapes that it has begun if there are any left, so that each shape is
prepared by few actors and all of them end together. It hands each result over as soon as it is
there; it is then written to the journal.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from .journal import PointResult
from .runners import outcome, runner

POINTS_PER_CALL = 12  # at most: neighbours, which have most in common
CALLS_PER_ACTOR = 2  # waiting at an actor, at most, so that it has always something to do
UNTAKEN = 4  # results of a call that nobody has taken yet, at most


@dataclass(frozen=True)
class Job:
    """A point to run: its key and all its options."""

    key: str
    options: Mapping[str, Any]


def run_local(kind: str, jobs: Sequence[Job]) -> Iterator[PointResult]:
    """Results in this process, one after another, points of a shape together."""
    for shape in shapes(kind, jobs):
        yield from _results(kind, shape)


def run_ray(kind: str, jobs: Sequence[Job], address: str | None = None) -> Iterator[PointResult]:
    """Results of Ray actors as they come. Ray is started, and stopped, if there is none.

    Raises BadInput if Ray cannot be reached, and what an actor raised that is no refusal.
    """
    import ray

    with _ray(address):
        cpus = max(1, int(ray.cluster_resources().get("CPU", 1)))
        work = Work(shapes(kind, jobs), POINTS_PER_CALL)
        actors = [_Actor(ray) for _ in range(min(cpus, work.calls))]
        starting = {actor.started: actor for actor in actors}
        running: dict[Any, _Actor] = {}
        while running or work.calls:
            ready, _ = ray.wait([*starting, *running], num_returns=1)
            each: Any  # the end of `prepare`, or a stream of results
            for each in ready:
                actor = starting.pop(each, None) or running[each]
                if each in running:
                    try:
                        yield PointResult(*ray.get(next(each)))
                        continue
                    except StopIteration:
                        del running[each]
                while work.calls and list(running.values()).count(actor) < CALLS_PER_ACTOR:
                    running[actor.run(kind, work.take(actor.begun))] = actor


class Work:
    """Jobs by shape that nobody has taken yet."""

    def __init__(self, groups: Sequence[Sequence[Job]], size: int) -> None:
        self._left = {
            shape: [jobs[at : at + size] for at in range(0, len(jobs), size)][::-1]
            for shape, jobs in enumerate(groups)
        }
        self._new = set(self._left)

    @property
    def calls(self) -> int:
        """How many times there is something to take."""
        return sum(map(len, self._left.values()))

    def take(self, begun: set[int]) -> Sequence[Job]:
        """A few jobs for one who has `begun` some shapes: of these if there are any left, or else
        of one that nobody has begun, or else of any; of the largest of them."""

        def worth(shape: int) -> tuple[bool, bool, int]:
            return shape in begun, shape in self._new, len(self._left[shape])

        shape = max((shape for shape, jobs in self._left.items() if jobs), key=worth)
        self._new.discard(shape)
        begun.add(shape)
        return self._left[shape].pop()


def shapes(kind: str, jobs: Sequence[Job]) -> list[list[Job]]:
    """Jobs of equal shape together, in order."""
    groups: dict[str, list[Job]] = {}
    for job in jobs:
        groups.setdefault(runner(kind).shape(job.options), []).append(job)
    return list(groups.values())


@dataclass(eq=False)
class _Actor:
    """A process of Ray's that runs points. begun: the shapes of which it has had some."""

    ray: Any
    begun: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._handle = self.ray.remote(num_cpus=1)(_Points).remote()
        self.started = self._handle.prepare.remote()

    def run(self, kind: str, jobs: Sequence[Job]) -> Any:
        """Starts a call; gives the stream of its results."""
        options = {"num_returns": "streaming", "_generator_backpressure_num_objects": UNTAKEN}
        plain = [(job.key, dict(job.options)) for job in jobs]
        return self._handle.run.options(**options).remote(kind, plain)


class _Points:
    """The actor. Plain data in and out."""

    def prepare(self) -> None:
        """Before any point."""
        import gc

        import jax

        gc.set_threshold(200_000, 50, 1000)  # a plan is many small objects: looking takes 8 %
        jax.config.update("jax_platforms", "cpu")

    def run(
        self, kind: str, jobs: list[tuple[str, dict[str, Any]]]
    ) -> Iterator[tuple[str, dict[str, Any], str]]:
        """(key, columns, reason of a refusal) of each job."""
        for result in _results(kind, [Job(*each) for each in jobs]):
            yield result.key, result.values, result.refused


def _results(kind: str, jobs: Sequence[Job]) -> Iterator[PointResult]:
    for job in jobs:
        values, refused = outcome(kind, job.options)
        yield PointResult(job.key, values, refused)


@contextmanager
def _ray(address: str | None) -> Iterator[None]:
    from ..runtimes.ray_runtime import RayInstance

    instance = RayInstance(address)
    try:
        instance.connect()
        yield
    finally:
        instance.disconnect()
