"""The child process of `load_training`: runs the user's file with JAX on virtual devices."""

import importlib.util
import inspect
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np

from trnsim.device.dtypes import dtype_name
from trnsim.device.errors import BadInput, TrnsimError

from .. import wire
from ..sharding import Lowered
from . import jax as frontend
from .lift import DEGREES, check_same
from .lift import lift as lift_step
from .training import TrainingJob


def main(sent: str, received: str) -> None:
    """Answer one request file with one response file."""
    try:
        response: dict[str, Any] = {"job": load(**wire.read(sent))}
    except TrnsimError as error:
        response = {"error": str(error), "kind": type(error).__name__}
    wire.write(received, response)


def load(
    path: str,
    mesh: dict[str, int],
    steps: int,
    options: dict[str, Any],
    reference: bool,
    data: bool,
    lift: str | None = None,
) -> TrainingJob:
    """The job of a file; see `training.load_training`."""
    if lift is not None:
        return lifted(path, mesh, options, lift)
    clock = _Clock()
    frontend.virtual_devices(int(np.prod(list(mesh.values()))))
    function = training_function(path, options)
    clock.lap("import")
    user = _User(path, function, options)
    full = user.training(frontend.device_mesh(mesh), steps if data and not reference else 1)
    clock.lap("state")
    lowered = lower_step(user, full)
    clock.lap("lower")
    state: tuple[np.ndarray, ...] = ()
    batches: tuple[tuple[np.ndarray, ...], ...] = ()
    losses: tuple[float, ...] = ()
    if data:
        source = full
        if reference:
            source = user.training(frontend.device_mesh(dict.fromkeys(mesh, 1)), steps)
            source.check_same_shapes(full)
        values = source.values()
        state = host_arrays(values)
        batches = tuple(host_arrays(batch) for batch in source.batches)
        clock.lap("data")
        if reference:
            losses = source.run(values)
            clock.lap("reference")
    names = tuple(s.name for s in lowered.inputs)
    leaves = len(jax.tree.leaves(full.state))
    return TrainingJob(
        path, mesh, lowered, names[:leaves], names[leaves:], state, batches, losses,
        jax.__version__, clock.laps,
    )  # fmt: skip


def lifted(path: str, mesh: dict[str, int], options: dict[str, Any], axis: str) -> TrainingJob:
    """The job without data, compiled for a few ranks of `axis`."""
    clock = _Clock()
    rest = int(np.prod(list(mesh.values()))) // mesh[axis]
    frontend.virtual_devices(rest * max(DEGREES))
    user = _User(path, training_function(path, options), options)
    clock.lap("import")
    small, large = (_compiled(user, mesh, axis, degree, clock) for degree in DEGREES)
    check_same(small[0], large[0], axis)
    lowered, full = small
    shapes = [tuple(leaf.shape) for leaf in jax.tree.leaves((full.state, full.whole_batch))]
    inputs = tuple(replace(s, shape=n) for s, n in zip(lowered.inputs, shapes, strict=True))
    names, leaves = tuple(s.name for s in inputs), len(jax.tree.leaves(full.state))
    return TrainingJob(
        path, mesh, replace(lowered, inputs=inputs), names[:leaves], names[leaves:],
        (), (), (), jax.__version__, clock.laps,
    )  # fmt: skip


def _compiled(
    user: "_User", mesh: dict[str, int], axis: str, degree: int, clock: "_Clock"
) -> tuple[Lowered, "Training"]:
    """The lifted step of all ranks, compiled with `degree` on the axis."""
    training = user.training(frontend.device_mesh(mesh | {axis: degree}), 1)
    training.narrow_batch(axis, mesh[axis])
    clock.lap("state")
    lowered = lift_step(lower_step(user, training), mesh, axis, degree)
    clock.lap("lower")
    return lowered, training


class _Clock:
    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self.last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name], self.last = self.laps.get(name, 0.0) + now - self.last, now


class Training:
    """What `training` returned for one mesh, checked: `state` and `batch` as shapes."""

    def __init__(self, user: "_User", mesh: Any, returned: Any, steps: int) -> None:
        self.user, self.mesh = user, mesh
        if not isinstance(returned, tuple) or len(returned) != 3 or not callable(returned[0]):
            raise TrnsimError(
                f"{user.path}: training must return (step, state, batches), got {_kind(returned)}"
            )
        self.step, self.source, batches = returned
        with user.code():
            self.batches = list(islice(iter(batches), steps))
        if len(self.batches) < steps:
            raise TrnsimError(
                f"{user.path}: batches ended after {len(self.batches)}; {steps} are needed"
            )
        with user.code():
            shape = frontend.traced(self.source) if callable(self.source) else self.source
            self.state = self.abstract(shape)
            self.batch = self.whole_batch = self.abstract(self.batches[0])
        self._check_batches()

    def abstract(self, tree: Any) -> Any:
        return jax.tree.map(lambda leaf: frontend.abstract(leaf, self.mesh), tree)

    def narrow_batch(self, axis: str, degree: int) -> None:
        """Of the batch, what the ranks on this mesh's `axis` would have if it had `degree`.

        Raises TrnsimError if the state is sharded over the axis, or the batch does not divide.
        """
        for path, leaf in jax.tree.leaves_with_path(self.state):
            if _sharded(leaf, axis):
                raise TrnsimError(
                    f"{self.user.path}: state{frontend.path_name(path)} is sharded over {axis}: "
                    f"only an axis over which the batch alone is sharded can be lifted"
                )

        def narrow(path: tuple, leaf: Any) -> Any:
            shape = list(leaf.shape)
            for dimension in _sharded(leaf, axis):
                if shape[dimension] % degree:
                    raise TrnsimError(
                        f"{self.user.path}: batch{frontend.path_name(path)} has "
                        f"{shape[dimension]} along {axis}, not a multiple of {axis}={degree}"
                    )
                shape[dimension] = shape[dimension] // degree * self.mesh.shape[axis]
            return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype, sharding=leaf.sharding)

        self.whole_batch = self.batch
        self.batch = jax.tree.map_with_path(narrow, self.batch)

    def values(self) -> Any:
        """The initial state as arrays."""
        if not callable(self.source):
            return self.source
        with self.user.code():
            return self.source()

    def run(self, state: Any) -> tuple[float, ...]:
        """The loss of each batch."""
        losses = []
        with self.user.code():
            step = jax.jit(self.step)
            for batch in self.batches:
                state, loss = step(state, batch)
                losses.append(float(loss))
        return tuple(losses)

    def check_same_shapes(self, other: "Training") -> None:
        """Refuse a file whose shapes depend on the mesh: the reference would be another model."""
        for what, mine, theirs in (
            ("state", self.state, other.state),
            ("batch", self.batch, other.batch),
        ):
            difference = first_difference(what, theirs, mine)
            if difference:
                raise TrnsimError(
                    f"{self.user.path}: {difference} on one device: shapes must not depend on"
                    " the mesh (or run without the reference)"
                )

    def _check_batches(self) -> None:
        for number, batch in enumerate(self.batches[1:], 1):
            difference = first_difference("batch", self.batch, batch)
            if difference:
                raise TrnsimError(f"{self.user.path}: {difference} in batch {number}")


def _sharded(leaf: Any, axis: str) -> list[int]:
    """Dimensions of a leaf that are sharded over the axis."""
    spec = [(s,) if isinstance(s, str) else (s or ()) for s in leaf.sharding.spec]
    return [dimension for dimension, names in enumerate(spec) if axis in names]


class _User:
    """The user's file and how to call it."""

    def __init__(self, path: str, function: Callable, options: dict[str, Any]) -> None:
        self.path, self.function, self.options = path, function, options

    def training(self, mesh: Any, steps: int) -> Training:
        with self.code():
            returned = self.function(mesh, **self.options)
        return Training(self, mesh, returned, steps)

    def code(self) -> Any:
        return user_code(self.path)


@contextmanager
def user_code(path: str) -> Iterator[None]:
    """Turn any exception of the user's code into one line with its place in the file."""
    try:
        yield
    except TrnsimError:
        raise
    except (Exception, SystemExit) as error:
        raise TrnsimError(f"{_place(path, error)}: {_kind(error)}: {_text(error)}") from error


def _place(path: str, error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f.lineno for f in frames if f.filename == str(Path(path).absolute())]
    return f"{path}:{lines[-1]}" if lines else path


def _kind(value: Any) -> str:
    return type(value).__name__


def _text(error: BaseException, limit: int = 300) -> str:
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    words = " ".join(text.split()) or "no message"
    return words if len(words) <= limit else words[: limit - 3] + "..."


def training_function(path: str, options: dict[str, Any]) -> Callable:
    """The file's `training`, after a check that it takes the options."""
    absolute = Path(path).absolute()
    sys.path.insert(0, str(absolute.parent))
    spec = importlib.util.spec_from_file_location(f"trnsim_user_{absolute.stem}", absolute)
    if spec is None or spec.loader is None:
        raise BadInput("FILE", path, "a Python file (.py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    with user_code(path):
        spec.loader.exec_module(module)
    function = getattr(module, "training", None)
    if not callable(function):
        raise TrnsimError(f"{path} does not define a function training(mesh, ...)")
    _check_options(path, function, options)
    return function


def _check_options(path: str, function: Callable, options: dict[str, Any]) -> None:
    parameters = list(inspect.signature(function).parameters.values())
    if not parameters:
        raise TrnsimError(f"{path}: training() takes no mesh; define training(mesh, ...)")
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    known = [p.name for p in parameters[1:]]
    for name in options:
        if name not in known:
            allowed = known or f"none: training in {path} takes no options"
            raise BadInput("option", name, allowed)


def lower_step(user: _User, training: Training) -> Any:
    """The step for every rank, with the state's shardings kept from step to step."""
    step = jax.jit(training.step)
    with user.code():
        out = jax.eval_shape(step, training.state, training.batch)
    check_result(user.path, training.state, out)
    kept = jax.tree.map(lambda leaf: leaf.sharding, training.state)
    whole = frontend.replicated(training.mesh)
    with user.code():
        return frontend.lower(
            step, training.state, training.batch, mesh=training.mesh, out_shardings=(kept, whole),
            name="step", names=("state", "batch"), out_names=("state", "loss"),
        )  # fmt: skip


def check_result(path: str, state: Any, out: Any) -> None:
    """The step returns (state, loss): the same structure, shapes and dtypes, and a scalar."""
    if not isinstance(out, tuple) or len(out) != 2:
        raise TrnsimError(f"{path}: step must return (state, loss), got {_kind(out)}")
    difference = first_difference("state", state, out[0])
    if difference:
        raise TrnsimError(f"{path}: step changes the state: {difference}")
    loss = out[1]
    if not isinstance(loss, jax.ShapeDtypeStruct):
        raise TrnsimError(f"{path}: step must return a scalar loss, got a {_kind(loss)}")
    if loss.shape != () or not jax.numpy.issubdtype(loss.dtype, np.floating):
        raise TrnsimError(f"{path}: step must return a scalar loss, got {_describe(loss)}")


def first_difference(name: str, before: Any, after: Any) -> str:
    """Where two pytrees differ in structure, shape or dtype, in words; empty if nowhere."""
    old, new = jax.tree.structure(before), jax.tree.structure(after)
    if old != new:
        lone = sorted(_paths(before) ^ _paths(after))
        where = f"{name}{lone[0]} is in only one of the two" if lone else f"{new} is not {old}"
        return f"the structure differs: {where}"
    for (path, a), b in zip(jax.tree.leaves_with_path(before), jax.tree.leaves(after), strict=True):
        if _describe(a) != _describe(b):
            return f"{name}{frontend.path_name(path)} is {_describe(a)} and becomes {_describe(b)}"
    return ""


def _paths(tree: Any) -> set[str]:
    return {frontend.path_name(path) for path, _ in jax.tree.leaves_with_path(tree)}


def _describe(leaf: Any) -> str:
    leaf = frontend.abstract(leaf, None)
    try:
        kind = dtype_name(leaf.dtype)
    except (TrnsimError, TypeError):  # a PRNG key, or a type that only JAX knows
        kind = str(leaf.dtype)
    return f"{kind}[{','.join(map(str, leaf.shape))}]"


def host_arrays(tree: Any) -> tuple[np.ndarray, ...]:
    return tuple(frontend.host_array(leaf) for leaf in jax.tree.leaves(tree))


if __name__ == "__main__":
    main(*sys.argv[1:])
