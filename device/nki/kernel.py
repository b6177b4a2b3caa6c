"""`nki.jit` and `nki.simulate`: kernels as callables, and their run on simulated cores."""

import functools
import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from ..chip import Chip, load_chip
from ..errors import BadInput
from .arrays import is_array, like_inputs, to_numpy
from .errors import at_line
from .launch import Launch, Settings, check_cores
from .result import CoreRun, SimulationResult
from .retime import finish, retime
from .session import Session, running
from .tensor import MemoryRegion, NkiTensor
from .timeline import KernelCore

TARGETS = {"gen2": "trn1", "gen3": "trn2", "gen4": "trn3"}
TARGET_VARIABLE = "NEURON_PLATFORM_TARGET_OVERRIDE"
DEFAULT_CHIP = "trn2"


class Kernel:
    """A kernel: call it with arrays to simulate it; `kernel[2]` runs on two cores.

    Inside another kernel a call is a plain call.
    """

    def __init__(self, function: Callable, cores: int | None = None, **options: Any) -> None:
        self.function, self.cores, self.options = function, cores, options
        functools.update_wrapper(self, function)

    def __getitem__(self, grid: Any) -> "Kernel":
        sizes = grid if isinstance(grid, tuple) else (grid,)
        numbers = [getattr(size, "size", size) for size in sizes]
        if len(numbers) != 1 or not isinstance(numbers[0], int):
            raise BadInput("kernel[...]", grid, "the number of cores, 1 or 2")
        return Kernel(self.function, numbers[0], **self.options)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else functools.partial(self.__call__, instance)

    def with_schedule(self, edges: Sequence[tuple[str, str]]) -> "Kernel":
        """The kernel with an order of named instructions: (later, earlier or a list of them)."""
        return Kernel(self.function, self.cores, **{**self.options, "schedule": tuple(edges)})

    @property
    def schedule(self) -> tuple:
        """The edges of `with_schedule`."""
        return self.options.get("schedule", ())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if running() is not None:
            return self.function(*args, **kwargs)
        return returned(simulate(self, *args, **kwargs), [*args, *kwargs.values()])

    def __repr__(self) -> str:
        return f"Kernel({self.function.__qualname__})"


def jit(fn: Callable | None = None, **kwargs: Any) -> Any:
    """A kernel of a function; with options alone, the decorator. No option changes the model."""
    if fn is None:
        return functools.partial(jit, **kwargs)
    return fn if isinstance(fn, Kernel) else Kernel(fn, **kwargs)


def simulated(kernel: Any) -> Callable:
    """`nki.simulate(kernel)`: takes arrays, returns outputs of the same kind."""

    @functools.wraps(kernel)
    def run(*args: Any, **kwargs: Any) -> Any:
        return jit(kernel)(*args, **kwargs)

    return run


def simulate(
    kernel: Any,
    *args: Any,
    chip: str | Chip | None = None,
    seed: int = 0,
    hazards: str | None = None,
    deadline: float = 3600.0,
    data: bool = True,
    **kwargs: Any,
) -> SimulationResult:
    """Runs a kernel on arrays and returns outputs (numpy) with time, engines and memory.

    `chip` is a chip or its name; without one, NEURON_PLATFORM_TARGET_OVERRIDE, or trn2.
    `hazards` says what a read of memory never written, and a race of the two cores, is: `error`,
    or `report` (noted in `findings`). `deadline` is in seconds of this machine. Without `data` no
    values are computed and outputs are None; the time is the same, and what the kernel does must
    not depend on values (see `fold`). Other keywords are the kernel's.
    """
    made = jit(kernel)
    target = as_chip(chip)
    cores = made.cores or 1
    check_cores(target, cores)
    hazards = hazards or os.environ.get("TRNSIM_NKI_HAZARDS", "error")
    if hazards not in ("error", "report"):
        raise BadInput("hazards", hazards, ("error", "report"))
    settings = Settings(
        chip=target, cores=cores, grid=made.cores is not None, seed=seed,
        hazards=hazards, deadline=deadline, data=data,
    )  # fmt: skip
    return _run(made, settings, args, kwargs)


def as_chip(chip: str | Chip | None) -> Chip:
    """The chip asked for, or that of the environment, or trn2."""
    if isinstance(chip, Chip):
        return chip
    name = chip or os.environ.get(TARGET_VARIABLE) or DEFAULT_CHIP
    return load_chip(TARGETS.get(name, name))


def _run(kernel: Kernel, settings: Settings, args: tuple, kwargs: dict) -> SimulationResult:
    launch = Launch(settings)
    body = program(kernel, launch, args, kwargs)
    with threadpool_limits(1):  # the number of threads changes bits
        results = launch.run(body)
    cores = [session.core for session in launch.sessions]
    if finish(cores, kernel.schedule, launch.findings if settings.hazards == "report" else None):
        cores = retime([core.trace for core in cores], settings.chip)
    return result_of(kernel, launch, results, cores)


def program(kernel: Kernel, launch: Launch, args: tuple, kwargs: dict) -> Callable[[Session], Any]:
    """What each core of the launch runs: the kernel on its arguments, which are now in HBM."""
    names = _names(kernel.function, args, kwargs)
    inputs = [_adopt(launch, value, name) for value, name in zip(args, names, strict=False)]
    named = {name: _adopt(launch, value, name) for name, value in kwargs.items()}

    def body(session: Session) -> Any:
        own = [_wrapped(value) for value in inputs]
        rest = {name: _wrapped(value) for name, value in named.items()}
        return kernel.function(*own, **rest)

    return body


def result_of(
    kernel: Kernel, launch: Launch, results: list[Any], cores: Sequence[KernelCore]
) -> SimulationResult:
    """The outputs of a launch that has ended with these results, and the time of `cores`: its own,
    or those on which it was timed again."""
    settings = launch.settings
    hooks = [hook for session in launch.sessions for hook in session.hooks]
    hooks += ["with_schedule"] if "schedule" in kernel.options else []
    hooks += ["engine="] if any(core.trace.stated for core in cores) else []
    outputs = _outputs(results[0], launch)
    for core in cores:
        core.trace.release()
    return SimulationResult(
        outputs=outputs,
        chip=settings.chip,
        cores=tuple(
            CoreRun.of(core, session.core)
            for core, session in zip(cores, launch.sessions, strict=True)
        ),
        peak_hbm=launch.hbm.peak + launch.input_bytes,
        findings=dict(launch.findings),
        hooks=tuple(dict.fromkeys(hooks)),
        seed=settings.seed,
    )


class _Input:
    """An argument that lives in HBM: every core gets a tensor of its own on one storage."""

    def __init__(self, storage, shape, dtype, name) -> None:
        self.storage, self.shape, self.dtype, self.name = storage, shape, dtype, name


def _adopt(launch: Launch, value: Any, name: str) -> Any:
    if isinstance(value, list | tuple) and any(is_array(item) for item in value):
        return type(value)(_adopt(launch, item, f"{name}{i}") for i, item in enumerate(value))
    if isinstance(value, dict) and any(is_array(item) for item in value.values()):
        return {key: _adopt(launch, item, f"{name}_{key}") for key, item in value.items()}
    if not is_array(value) or isinstance(value, np.generic):
        return value
    array, dtype = to_numpy(value)
    if launch.settings.data:
        array = np.array(array, order="C", copy=True)  # a kernel may write into its arguments
    storage = launch.adopt(array, array.shape, dtype, name)
    return _Input(storage, array.shape or (1,), dtype, name)


def _wrapped(value: Any) -> Any:
    if isinstance(value, _Input):
        region = value.storage.region
        return NkiTensor(value.shape, value.dtype, value.storage, region, value.name)
    if isinstance(value, list | tuple):
        return type(value)(_wrapped(item) for item in value)
    if isinstance(value, dict):
        return {key: _wrapped(item) for key, item in value.items()}
    return value


def _names(function: Callable, args: tuple, kwargs: dict) -> list[str]:
    """Names of the positional arguments. Raises BadInput where the call does not fit."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        raise BadInput("arguments", error, f"those of {function.__name__}") from None
    names = list(inspect.signature(function).parameters)
    return [names[i] if i < len(names) else f"arg{i}" for i in range(len(args))]


def _outputs(value: Any, launch: Launch) -> Any:
    """The returned tensors as numpy arrays, in the structure that the kernel returned."""
    if isinstance(value, NkiTensor):
        return _values(value, launch)
    if isinstance(value, list | tuple):
        return tuple(_outputs(item, launch) for item in value)
    if isinstance(value, dict):
        return {key: _outputs(item, launch) for key, item in value.items()}
    return value


def _values(tensor: NkiTensor, launch: Launch) -> np.ndarray | None:
    made = tensor.storage.line  # of what the kernel allocated; an argument may be returned
    if tensor.on_chip or (made and tensor.buffer is MemoryRegion.private_hbm):
        raise at_line(BadInput("return", tensor, "tensors in shared_hbm"), made)
    view = tensor.device_view()
    if launch.settings.hazards == "error" and not tensor.storage.written.any(view):
        wrong = BadInput("return", f"{tensor}, never written", "tensors that the kernel writes")
        raise at_line(wrong, made)
    if not launch.settings.data:
        return None
    return np.array(view.array).view(tensor.dtype.dtype)


def returned(result: SimulationResult, inputs: list[Any]) -> Any:
    """A result's outputs as the inputs came."""

    def convert(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return like_inputs(value, inputs)
        if isinstance(value, tuple):
            return tuple(convert(item) for item in value)
        if isinstance(value, dict):
            return {key: convert(item) for key, item in value.items()}
        return value

    return convert(result.outputs)
