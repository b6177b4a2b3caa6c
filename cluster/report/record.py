"""What a run leaves behind: one plain value, enough to print the summary again."""

from dataclasses import dataclass, field

from .. import wire


@wire.register
@dataclass(frozen=True, slots=True)
class StepRecord:
    """One training step. `duration` in ps; losses are None in a time-only run."""

    index: int
    duration: int
    loss: float | None = None
    reference: float | None = None


@wire.register
@dataclass(frozen=True, slots=True)
class CallRecord:
    """A collective call of the program: who, what, how, and its time per step in ps."""

    key: int
    operation: str
    source: str
    groups: str
    ranks: int
    bytes: int
    algorithm: str
    reason: str
    executions: int
    total: int
    exposed: int


@wire.register
@dataclass(frozen=True, slots=True)
class KernelRecord:
    """All kernels of one source line and kind: their number and time per step in ps (core 0)."""

    name: str
    source: str
    count: int
    total: int
    fallback: bool = False


@wire.register
@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run: what it was run with, what it computed, how long it took, what it leaned on.

    Times in ps, sizes in bytes. `busy` maps `core 0 tensor` to the engine's time in one step;
    `memory` has the HBM bytes of a logical core by use, `capacity` its HBM; the SBUF numbers are
    bytes per partition of a physical core.
    """

    version: str
    command: str
    instance: str
    nodes: int
    chip: str
    lnc: int
    mesh: dict[str, int]
    ranks: int
    runtime: str
    fidelity: str
    options: dict[str, str]
    inputs: tuple[str, ...]
    steps: tuple[StepRecord, ...]
    busy: dict[str, int]
    overlapped_bound: int
    serial_bound: int
    collective: int
    exposed: int
    calls: tuple[CallRecord, ...]
    kernels: tuple[KernelRecord, ...]
    operators: int
    instructions: int
    flops: int
    peak_flops: int
    hbm_bytes: int
    memory: dict[str, int]
    capacity: int
    sbuf_peak: int
    sbuf_capacity: int
    leaned_on: tuple[str, ...]
    compilations: int
    host_seconds: dict[str, float] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
