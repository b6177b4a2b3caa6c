"""The library: a JAX function with shardings in, values and virtual time out.

    from trnsim.cluster.api import simulate

    result = simulate(step, state, batch, instance="trn2.3xlarge", lnc=2)
    result.outputs        # what step returns, as global numpy arrays
    result.time.duration  # modelled time in picoseconds
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


def simulate(
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
    time_only: bool = False,
    assume: Mapping[str, int] | None = None,
) -> Simulated:
    """Runs `function(*args)` once on the cores of an instance.

    args: pytrees of arrays whose NamedShardings name the JAX mesh (CPU devices: set
    `jax_num_cpu_devices` before JAX starts); rank r is the r-th device of that mesh. In a
    time-only run they may be `jax.ShapeDtypeStruct`s. `mesh` names the axes for messages only.

    Raises TrnsimError (BadInput, OutOfMemory, Unsupported, ...) with one clear line.
    """
    lowered = lower(function, *args)
    if mesh is None:
        mesh = Mesh((("ranks", lowered.ranks),))
    named = parse_mesh(mesh) if isinstance(mesh, str) else mesh
    machine = Machine.of(instance, nodes, lnc, named)
    traced = range(min(4, machine.ranks))
    simulation = Simulation(lowered, machine, fidelity, (), algorithm, traced)
    if time_only:
        return Simulated(None, simulation.time_only(assume), simulation, ())
    arrays = dict(enumerate(host_array(leaf) for leaf in jax.tree.leaves(args)))
    with make_runtime(runtime, address) as cores:
        simulation.start(cores)
        result = simulation.step(arrays, range(len(lowered.outputs)))
    flat = tuple(result.values[index] for index in range(len(lowered.outputs)))
    structure = jax.tree.structure(jax.eval_shape(function, *args))
    return Simulated(jax.tree.unflatten(structure, flat), result.time, simulation, flat)
