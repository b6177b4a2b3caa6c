"""The library: a JAX function with shardings in, values and virtual time out.

from trnsim.cluster.api import Simulator, simulate

result = simulate(step, state, batch, instance="trn2.3xlarge", lnc=2)
result.outputs        # what step returns, as global numpy arrays
result.time.duration  # modelled time in picoseconds

with Simulator(step, state, batch, runtime="ray") as simulated_step:  # compiled once
    for batch in batches:
        state, loss = simulated_step(state, batch).outputs
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np

from .clocks import StepTime
from .compile import Fidelity
from .frontends.jax import host_array, lower
from .machine import Machine
from .mesh import Mesh, parse_mesh
from .sharding import shard
from .simulation import Simulation
from .train import make_runtime


@dataclass(frozen=True)
class Simulated:
    """One execution of a function on simulated cores.

    `outputs` has the structure of the function's result with global numpy arrays (None in a
    time-only run); `time` is the virtual time, with `time.events` for the trace; `simulation` has
    the program, the placement and the memory plan.
    """

    outputs: Any
    time: StepTime
    simulation: Simulation
    flat: tuple[np.ndarray, ...]

    def of_rank(self, rank: int) -> tuple[np.ndarray, ...]:
        """The results of one rank, in the order of the flattened outputs."""
        shards = self.simulation.lowered.outputs
        return tuple(shard(a, s, rank) for a, s in zip(self.flat, shards, strict=True))


class Simulator:
    """A JAX function compiled once for the cores of an instance, to be called like the function.

    args: pytrees of arrays whose NamedShardings name the JAX mesh (CPU devices: set
    `jax_num_cpu_devices` before JAX starts); rank r is the r-th device of that mesh. For time alone
    they may be `jax.ShapeDtypeStruct`s. Calls take arrays of the same shapes with any placement.
    `mesh` (such as "dp=2,tp=2") only names axes in messages. Virtual time goes on from call to
    call. Use as a context manager, or call `close`.

    Raises TrnsimError (BadInput, OutOfMemory, Unsupported, ...) with one clear line.
    """

    def __init__(
        self,
        function: Callable,
        *args: Any,
        instance: str = "trn2.3xlarge",
        nodes: int = 1,
        lnc: int | None = None,
        mesh: str | Mesh | None = None,
        runtime: Literal["local", "ray"] = "local",
        address: str | None = None,
        fidelity: Fidelity = "operator",
        algorithm: str = "policy",
        streams: int = 1,
    ) -> None:
        lowered = lower(function, *args)
        named = mesh or Mesh((("ranks", lowered.ranks),))
        named = parse_mesh(named) if isinstance(named, str) else named
        machine = Machine.of(instance, nodes, lnc, named)
        traced = range(min(4, machine.ranks))
        self.simulation = Simulation(lowered, machine, fidelity, (), algorithm, traced, streams)
        self._structure = jax.tree.structure(jax.eval_shape(function, *args))
        self._runtime = make_runtime(runtime, address)
        self._started = False

    def __call__(self, *args: Any) -> Simulated:
        """One execution with data. Raises TrnsimError for other shapes than at the start."""
        if not self._started:
            self.simulation.start(self._runtime)
            self._started = True
        arrays = dict(enumerate(host_array(leaf) for leaf in jax.tree.leaves(args)))
        results = range(len(self.simulation.lowered.outputs))
        result = self.simulation.step(arrays, results)
        flat = tuple(result.values[index] for index in results)
        outputs = jax.tree.unflatten(self._structure, flat)
        return Simulated(outputs, result.time, self.simulation, flat)

    def time_only(self, assume: Mapping[str, int] | None = None) -> Simulated:
        """One execution without data. `assume`: trips or branches by source line (`file.py:12`)."""
        return Simulated(None, self.simulation.time_only(assume), self.simulation, ())

    def close(self) -> None:
        """Releases the cores; harmless when repeated."""
        self._runtime.close()

    def __enter__(self) -> "Simulator":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def simulate(
    function: Callable,
    *args: Any,
    time_only: bool = False,
    assume: Mapping[str, int] | None = None,
    **options: Any,
) -> Simulated:
    """One execution of `function(*args)`; `options` as for `Simulator`."""
    with Simulator(function, *args, **options) as simulator:
        return simulator.time_only(assume) if time_only else simulator(*args)
