"""The chips: what `device/specs/*.toml` says of each, as one plain value.

Times are integer picoseconds, sizes bytes, rates bytes per second, clocks hertz. Every field of
`Chip` is one entry of the spec file of the same name; `Chip.number(field)` gives its source.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib import resources
from typing import Any

from .errors import BadFile, BadInput
from .numbers import Number, read_entries, read_toml
from .overlay import Overlay, parse_overlay

CALIBRATED = "calibrated.toml"  # written by `trnsim calibrate`, laid over the spec files
CALIBRATED_STEPS = "calibrated_steps.toml"  # the same, by `trnsim calibrate --steps`
SPEC_FILES = {
    "inf2": "inferentia2", "trn1": "trainium1", "trn2": "trainium2", "trn3": "trainium3",
}  # fmt: skip
ENGINES = ("tensor", "vector", "scalar", "gpsimd", "sync")
LEANED_ON = ("assumed", "calibrated")


@dataclass(frozen=True, kw_only=True)
class ChipShape:
    """Cores of a chip, and how many of them form a logical core."""

    name: str  # trn1, inf2, trn2, trn3
    title: str
    generation: int  # NeuronCore version: 2 (Trainium1, Inferentia2), 3, 4
    cores: int  # physical NeuronCores per chip
    dies: int  # cores of one die have consecutive numbers
    lnc_allowed: tuple[int, ...]
    lnc_default: int
    chip_peak_flops: Mapping[str, int]  # printed for the chip; for utilisation, not for timing


@dataclass(frozen=True, kw_only=True)
class CoreTiming:
    """Clocks and fixed costs of a NeuronCore's engines. Cycles are of the engine's own clock."""

    clock_hz: Mapping[str, int]  # by engine
    peak_flops: Mapping[str, int]  # of the Tensor engine by dtype: bf16 f16 tf32 f32 f8 (mxf8)
    min_instruction_cycles: int  # an instruction never takes less (MIN_II)
    dynamic_instruction_cycles: int  # nor one whose address comes from a register
    static_overhead_cycles: int  # of a short or dependent instruction
    access_init_cycles: int  # first SBUF or PSUM access
    activation_table_load_ps: int
    semaphore_ps: int  # end on one engine -> start on another
    core_barrier_ps: int  # the two cores of a logical core meet
    kernel_launch_ps: int  # an empty kernel on the device


@dataclass(frozen=True, kw_only=True)
class TensorEngine:
    """Limits and relative rates of matmul."""

    stationary_free_max: int
    moving_free_max: int  # 4096 on v4: a result may span all PSUM banks there
    matmul_init_cycles: int
    matmul_fp32_factor: int  # times the cycles of bf16
    matmul_fp8_factor: float
    load_stationary_speedup: int  # LoadStationary takes N / this


@dataclass(frozen=True, kw_only=True)
class LaneEngines:
    """Relative rates of Vector, Scalar and GpSimd: `fast` divides, `two_input` multiplies N."""

    vector_copy_fast_factor: int  # copy, tensor_scalar: 16-bit, SBUF, contiguous
    vector_copy_half_fast_factor: int  # the same, strided or one operand in PSUM
    vector_tensor_tensor_fast_factor: int  # both inputs in SBUF, all operands 16-bit
    vector_two_input_factor: int
    vector_reduce_fast_factor: int  # add and max of bf16
    vector_memset_fast_factor: int  # zero in 16 bits
    vector_reciprocal_factor: int  # multiplies N
    vector_exponential_factor: int
    scalar_fast_factor: int
    scalar_fixed_ps: int  # of an activation, beside N cycles, when nothing overlaps it
    activation_reduce_cycles: int
    gpsimd_start_cycles: int
    gpsimd_rsqrt_factor: int


@dataclass(frozen=True, kw_only=True)
class Memories:
    """HBM of the chip, SBUF and PSUM of a core."""

    hbm_bytes: int
    hbm_stacks: int
    hbm_bytes_per_s: int
    hbm_microcode_bytes: int  # taken by the runtime, per physical core
    partitions: int
    sbuf_partition_bytes: int  # usable by kernels
    sbuf_physical_partition_bytes: int
    psum_banks: int
    psum_bank_bytes: int  # per partition
    sbuf_access_elements_max: int
    psum_access_elements_max: int
    strided_access_bytes: int  # a wider stride
    strided_access_factor: int  # costs this much more


@dataclass(frozen=True, kw_only=True)
class Dma:
    """The 16 DMA engines of a core, together."""

    dma_engines: int
    dma_rings: int
    dma_dge_queues: int
    dma_engine_bytes_per_s: int
    dma_bytes_per_s: int  # all engines of a core
    dma_fixed_ps: int  # a [128, F] copy takes max(this, bytes / rate)
    dma_start_ps: int  # trigger -> first data
    dma_semaphore_ps: int  # last data -> waiting engine
    dma_dge_ps: int  # between two triggers of a queue: descriptors are made
    dma_packet_bytes: int
    dma_transpose_fraction: float  # HBM -> SBUF
    dma_transpose_sbuf_fraction: float  # SBUF -> SBUF
    dma_compute_fraction: float  # reduce or cast on the way
    dma_efficiency: tuple[tuple[int, float], ...]  # (bytes per descriptor, fraction of the rate)
    host_bytes_per_s: int
    host_latency_ps: int


@dataclass(frozen=True, kw_only=True)
class Links:
    """How the chip talks to others. Rates of `link_bytes_per_s` are per neighbour and direction."""

    cc_cores: int
    cc_streams_per_core: int
    cc_packet_bytes: int
    cc_step_ps: int  # a CC-core's handling of one step of a collective
    cc_rendezvous: int  # crossings of a route by semaphores beside the data of a send and receive
    collective_start_ps: int  # once per collective
    on_chip_bytes_per_s: int  # between cores of a chip, per physical core and direction
    on_chip_latency_ps: int
    cc_hbm_fraction: float  # of a stack's bandwidth, for the touches of collectives
    die_bytes_per_s: int  # from one die of the chip to the other, for all ranks together
    die_latency_ps: int  # more than on the chip
    neuronlink_bytes_per_s: int  # as printed for the chip
    neuronlink_links: int
    link_bytes_per_s: Mapping[str, int]  # by level: torus, z, ring, server, rack, direct
    link_efficiency: float  # what collectives get of that
    link_latency_ps: int
    switch_latency_ps: int
    efa_latency_ps: int
    efa_efficiency: float  # what collectives get of the printed EFA rate


@dataclass(frozen=True, kw_only=True)
class Programs:
    """Compiled training programs as a whole."""

    program_efficiency: float  # of the pace of their kernels, one by one


@dataclass(frozen=True, kw_only=True, repr=False)
class Chip(Programs, Links, Dma, Memories, LaneEngines, TensorEngine, CoreTiming, ChipShape):
    """One kind of chip. Plain data: picklable, hashable, changed by `dataclasses.replace`."""

    numbers: Mapping[str, Number] = field(default_factory=dict, repr=False, compare=False)

    def __repr__(self) -> str:
        return f"Chip({self.name!r})"  # seventy fields hide what a message is about

    def __hash__(self) -> int:
        return hash((self.name, self.cores, self.hbm_bytes, self.dma_bytes_per_s))

    @property
    def cores_per_stack(self) -> int:
        """Physical cores that share one HBM stack."""
        return self.cores // self.hbm_stacks

    @property
    def stack_bytes(self) -> int:
        """Capacity of one HBM stack."""
        return self.hbm_bytes // self.hbm_stacks

    @property
    def stack_bytes_per_s(self) -> int:
        """Bandwidth of one HBM stack, which its cores share."""
        return self.hbm_bytes_per_s // self.hbm_stacks

    def link_rate(self, level: str) -> int:
        """Bytes/s that collectives get from a link of this level, per neighbour and direction."""
        return int(self.link_bytes_per_s[level] * self.link_efficiency)

    def peak(self, dtype: str) -> int:
        """FLOP/s of one core's Tensor engine for a StableHLO dtype; f8 of any kind is `f8`."""
        key = "f8" if dtype.startswith("f8") else dtype
        if key not in self.peak_flops:
            raise BadInput("dtype", dtype, self.peak_flops)
        return self.peak_flops[key]

    def descriptor_efficiency(self, nbytes: float) -> float:
        """Fraction of the DMA rate for descriptors of `nbytes`: linear between read points."""
        low_bytes, low = 0, 0.0
        for high_bytes, high in self.dma_efficiency:
            if nbytes < high_bytes:
                return low + (high - low) * (nbytes - low_bytes) / (high_bytes - low_bytes)
            low_bytes, low = high_bytes, high
        return low

    def number(self, key: str) -> Number:
        """Value, unit, source and status of a field, or of `field.key` of a table."""
        if key not in self.numbers:
            raise BadInput("number", key, f"a field of {self.title}", _nearest(key, self.numbers))
        return self.numbers[key]

    def assumed(self, *, without: Collection[str] = ()) -> tuple[str, ...]:
        """Keys of the numbers that nobody publishes or measured: assumed or calibrated.

        without: sections of the spec files that are left out.
        """
        return tuple(
            key
            for key, number in self.numbers.items()
            if number.status in LEANED_ON and number.section.partition(".")[0] not in without
        )


def _nearest(key: str, known: Mapping[str, object]) -> str | None:
    return BadInput("number", key, known).args[0].partition("nearest valid: ")[2] or None


def with_number(chip: Chip, key: str, number: Number) -> Chip:
    """The chip with one number, `field` or `field.key`, replaced together with its source."""
    name, _, inner = key.partition(".")
    value = {**getattr(chip, name), inner: number.value} if inner else number.value
    return replace(chip, **{name: value}, numbers={**chip.numbers, key: number})


def load_chip(name: str) -> Chip:
    """The chip called `name`: trn1, inf2, trn2, trn3 or the long name. Raises BadInput."""
    short = {long: short for short, long in SPEC_FILES.items()}
    key = short.get(str(name).lower(), str(name).lower())
    if key not in SPEC_FILES:
        raise BadInput("chip", name, [*SPEC_FILES, *SPEC_FILES.values()])
    return _load(SPEC_FILES[key])


@cache
def _load(file: str) -> Chip:
    return chip_of(file, *read_spec(file))


@cache
def calibrated(file: str = CALIBRATED) -> Overlay:
    """The calibrated numbers that come with trnsim, from one of its two files."""
    text = (resources.files("trnsim.device.specs") / file).read_text("utf-8")
    return parse_overlay(text, file)


def read_spec(file: str) -> tuple[dict[str, Any], dict[str, Number]]:
    """(name, title, generation) and the numbers of a spec file.

    Those of its base are beneath, calibrated ones above.
    """
    table = read_toml(file)
    numbers = read_spec(table["base"])[1] if "base" in table else {}
    for section, entries in table.items():
        if isinstance(entries, Mapping):
            own = dict(read_entries(entries, f"{file}.toml", section))
            numbers = _replaced(numbers, own)
    for calibration in (CALIBRATED, CALIBRATED_STEPS):
        numbers |= dict(calibrated(calibration).get(table.get("name", ""), {}))
    return {key: table[key] for key in ("name", "title", "generation") if key in table}, numbers


def _replaced(base: Mapping[str, Number], own: Mapping[str, Number]) -> dict[str, Number]:
    """`base` with the entries of `own`; a table that `own` states replaces the whole table."""
    tables = {key.partition(".")[0] for key in own if "." in key}
    kept = {key: n for key, n in base.items() if key.partition(".")[0] not in tables}
    return kept | dict(own)


def chip_of(file: str, identity: Mapping[str, Any], numbers: Mapping[str, Number]) -> Chip:
    """A Chip of the numbers of a spec file. Raises BadFile for a missing or unknown key."""
    values: dict[str, Any] = dict(identity)
    for key, number in numbers.items():
        table, dot, inner = key.partition(".")
        if dot:
            values.setdefault(table, {})[inner] = number.value
        else:
            values[key] = number.value
    _match_fields(file, values)
    return Chip(**values, numbers=dict(numbers))


def _match_fields(file: str, values: Mapping[str, Any]) -> None:
    names = {item.name for item in fields(Chip)} - {"numbers"}
    missing, unknown = sorted(names - values.keys()), sorted(values.keys() - names)
    if missing:
        raise BadFile(f"{file}.toml: missing {', '.join(missing)}")
    if unknown:
        raise BadFile(f"{file}.toml: unknown {', '.join(unknown)}")
    engines = values["clock_hz"].keys()
    if set(engines) != set(ENGINES):
        raise BadFile(f"{file}.toml: clock_hz has {', '.join(engines)}; needs {', '.join(ENGINES)}")
