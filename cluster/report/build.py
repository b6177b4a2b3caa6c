"""From a simulation and its last step to the record that is printed and kept."""

from collections.abc import Mapping, Sequence

from trnsim.device.units import format_bytes

from ..clocks import StepTime
from ..program import RankProgram, RunKernel, StartCollective
from ..sharding import Shards
from ..simulation import Simulation
from .record import CallRecord, KernelRecord, RunRecord, StepRecord


def build_record(
    simulation: Simulation,
    last: StepTime,
    steps: Sequence[StepRecord],
    *,
    version: str,
    command: str,
    mesh: Mapping[str, int],
    runtime: str,
    options: Mapping[str, str],
    host_seconds: Mapping[str, float],
    files: Mapping[str, str],
) -> RunRecord:
    """The record of a run whose last step took `last`."""
    machine, program = simulation.machine, simulation.program
    chip = machine.chip
    return RunRecord(
        version=version,
        command=command,
        instance=machine.instance.name,
        nodes=machine.placement.nodes,
        chip=chip.name,
        lnc=machine.lnc,
        mesh=dict(mesh),
        ranks=machine.ranks,
        runtime=runtime,
        fidelity=simulation.fidelity,
        options=dict(options),
        inputs=tuple(_shape(shards) for shards in simulation.lowered.inputs),
        steps=tuple(steps),
        busy={f"core {core} {engine}": time for (core, engine), time in sorted(last.busy.items())},
        overlapped_bound=last.overlapped_bound,
        serial_bound=last.serial_bound,
        collective=last.collective,
        exposed=last.exposed,
        calls=_calls(simulation, last),
        kernels=_kernels(simulation, last),
        operators=sum(1 for _ in simulation.lowered.module.body.walk()),
        instructions=last.instructions,
        flops=last.flops,
        peak_flops=chip.peak_flops["bf16"],
        hbm_bytes=last.hbm_bytes,
        memory=dict(program.hbm),
        capacity=machine.hbm_bytes,
        sbuf_peak=max(_sbuf_peak(program, core) for core in range(machine.lnc)),
        sbuf_capacity=chip.sbuf_partition_bytes,
        leaned_on=_leaned_on(simulation, last),
        compilations=1,
        host_seconds=dict(host_seconds),
        files=dict(files),
    )


def _leaned_on(simulation: Simulation, last: StepTime) -> tuple[str, ...]:
    """Assumed and calibrated numbers that play a part in this run."""
    chip, site = simulation.machine.chip, simulation.calls.site
    steps = [step for step in simulation.program.walk() if isinstance(step, RunKernel)]
    assumed = chip.assumed(without=("program",))
    links = set(assumed) - set(chip.assumed(without=("program", "collective")))
    unused = links - set(site.leaned_on if last.calls else ())
    if simulation.machine.lnc == 1:
        unused.add("core_barrier_ps")
    if not any(step.kernel.fallback for step in steps):
        unused.add("host_latency_ps")
    return tuple(key for key in assumed if key not in unused)


def _shape(shards: Shards) -> str:
    shape = ", ".join(map(str, shards.shape))
    return f"{shards.name}: {shards.dtype}[{shape}], {format_bytes(shards.local.nbytes)} per rank"


def _sbuf_peak(program: RankProgram, core: int) -> int:
    """Most bytes per partition that a kernel's tiles and the resident values take together."""
    held: dict[int, int] = {}
    peak = 0
    for step in program.walk():
        if isinstance(step, RunKernel) and not step.parts[core].empty:
            kernel, residency = step.kernel, step.residency[core]
            for value in residency.kept:
                layout = kernel.layout(value, step.parts[core])
                held[value] = layout.partition_bytes if layout else 0
            peak = max(peak, step.costs[core].sbuf_bytes + sum(held.values()))
            for value in residency.freed:
                held.pop(value, None)
    return peak


def _calls(simulation: Simulation, last: StepTime) -> tuple[CallRecord, ...]:
    calls = []
    for step in simulation.program.walk():
        if not isinstance(step, StartCollective) or step.key not in last.calls:
            continue
        time = last.calls[step.key]
        calls.append(
            CallRecord(
                key=step.key,
                operation=step.operation.name,
                source=step.operation.location,
                groups=_groups(step.groups),
                ranks=len(step.groups[0]),
                bytes=step.collective.nbytes,
                algorithm=step.algorithm,
                reason=step.reason,
                executions=time.executions,
                total=time.total,
                exposed=time.exposed,
            )
        )
    return tuple(calls)


def _groups(groups: Sequence[tuple[int, ...]]) -> str:
    """`2 x [0, 2]`: how many groups, and the members of the first."""
    first = groups[0]
    members = ", ".join(map(str, first[:4])) + (", ..." if len(first) > 4 else "")
    return f"{len(groups)} x [{members}]"


def _kernels(simulation: Simulation, last: StepTime) -> tuple[KernelRecord, ...]:
    runs = last.runs
    found: dict[tuple[str, str, bool], KernelRecord] = {}
    for step in simulation.program.walk():
        if not isinstance(step, RunKernel):
            continue
        kernel = step.kernel
        key = (kernel.name, kernel.location, kernel.fallback)
        old = found.get(key, KernelRecord(kernel.name, kernel.location, 0, 0, kernel.fallback))
        count = runs.get(id(step), 0)
        found[key] = KernelRecord(
            old.name,
            old.source,
            old.count + count,
            old.total + count * step.costs[0].duration,
            old.fallback,
        )
    return tuple(found.values())
