"""The FILE of `trnsim train FILE`: a training step in ordinary JAX.

The file defines one function::

    def training(mesh, **options):
        return step, state, batches

- `mesh` is a `jax.sharding.Mesh` with the axes of `--mesh`;
- `step(state, batch) -> (state, loss)` is a JAX function (jitted or not), loss a scalar;
- `state` is a pytree of arrays placed with `jax.device_put(x, NamedSharding(mesh, spec))`, or a
  function of no arguments that returns one. Leaves without such a sharding are replicated;
- `batches` is an iterable of pytrees of arrays, placed in the same way.

Shapes and values must not depend on the size of the mesh: the file also runs on a mesh of one
device, for the losses to compare with. As a function, `state` is only traced where values are not
needed, so that a large model is never built for a run without data.

`--text PATH` and `--set NAME=VALUE` become keyword arguments of `training`.

JAX runs in a child process, because its number of devices is fixed once it has started.
"""

import ast
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trnsim.device import errors
from trnsim.device.errors import BadInput, DeadlineExceeded, TrnsimError

from .. import wire
from ..sharding import Lowered

CHILD = "trnsim.cluster.frontends.training_child"


@wire.register
@dataclass(frozen=True)
class TrainingJob:
    """A training step for every rank of a mesh, and what to run it on.

    The step's inputs are the leaves of the state, then those of the batch; its outputs are the
    leaves of the new state, sharded as the state, then the loss. `state` and `batches` are global
    arrays, empty for a job without data; `losses` are JAX's on one CPU device, empty without a
    reference run. `seconds` is the wall time by part.
    """

    file: str
    mesh: dict[str, int]
    lowered: Lowered
    state_names: tuple[str, ...]
    batch_names: tuple[str, ...]
    state: tuple[np.ndarray, ...]
    batches: tuple[tuple[np.ndarray, ...], ...]
    losses: tuple[float, ...]
    jax_version: str
    seconds: dict[str, float]


def parse_options(settings: Iterable[str]) -> dict[str, Any]:
    """`NAME=VALUE` strings as keyword arguments: numbers, booleans and None are parsed."""
    options: dict[str, Any] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or not name.isidentifier():
            raise BadInput("--set", setting, "NAME=VALUE")
        options[name] = _literal(text)
    return options


def _literal(text: str) -> Any:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return {"true": True, "false": False}.get(text.lower(), text)
    plain = (bool, int, float, str, type(None), tuple, list)
    return value if isinstance(value, plain) else text


def load_training(
    path: str | os.PathLike,
    mesh_axes: Mapping[str, int],
    steps: int = 1,
    options: Mapping[str, Any] | None = None,
    reference: bool = True,
    data: bool = True,
    lift: str | None = None,
    deadline: float = 300.0,
) -> TrainingJob:
    """Run the file in a child process and return its step, lowered for every rank.

    `lift` names an axis over which only the batch is sharded: the step is compiled for a few ranks
    of it (see `lift`), without data. `deadline` is in seconds. Every mistake in the file is a
    TrnsimError of one line.
    """
    if not Path(path).is_file():
        raise BadInput("FILE", path, "an existing Python file")
    request = {
        "path": str(path),
        "mesh": {str(axis): int(size) for axis, size in mesh_axes.items()},
        "steps": int(steps),
        "options": dict(options or {}),
        "reference": bool(reference and data),
        "data": bool(data),
        "lift": lift,
    }
    with tempfile.TemporaryDirectory(prefix="trnsim-train-") as folder:
        return _run_child(request, Path(folder), deadline)


def _run_child(request: dict[str, Any], folder: Path, deadline: float) -> TrainingJob:
    sent, received, log = folder / "request", folder / "response", folder / "log"
    wire.write(sent, request)
    command = [sys.executable, "-P", "-m", CHILD, str(sent), str(received)]
    with log.open("wb") as stderr:
        try:
            code = subprocess.run(
                command, env=_environment(), stdout=2, stderr=stderr, timeout=deadline
            ).returncode
        except subprocess.TimeoutExpired:
            raise DeadlineExceeded(
                f"{request['path']}: JAX did not finish within {deadline:g} s"
            ) from None
    if not received.exists():
        lines = log.read_text(errors="replace").strip().splitlines() or ["no message"]
        raise TrnsimError(f"{request['path']}: JAX ended with exit code {code}: {lines[-1]}")
    response = wire.read(received)
    if "error" in response:
        kind = getattr(errors, response["kind"], TrnsimError)
        raise _rebuilt(kind, response["error"])
    return response["job"]


def _rebuilt(kind: type[TrnsimError], message: str) -> TrnsimError:
    error = kind.__new__(kind)  # without __init__: BadInput's builds its message from parts
    Exception.__init__(error, message)
    return error


def _environment() -> dict[str, str]:
    """The child's environment: CPU only, no flags that change the number of devices."""
    kept = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    return kept | {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "2"}
