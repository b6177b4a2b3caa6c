"""Logical NeuronCores: logical core k of a chip is its physical cores lnc*k .. lnc*k + lnc-1.

Source: about-neuron/arch/neuron-features/logical-neuroncore-config.rst. Logical cores are aligned
and contiguous, so that at LNC=2 the two physical cores are those that share one HBM stack.
"""

from dataclasses import dataclass

from trnsim.device.chip import Chip
from trnsim.device.errors import BadInput


@dataclass(frozen=True, order=True)
class CoreAddress:
    """Where a physical core is: its node, chip in the node, and numbers in the chip."""

    node: int
    chip: int
    logical: int
    physical: int

    def __str__(self) -> str:
        return f"node {self.node}, chip {self.chip}, core {self.physical} (logical {self.logical})"


def check_lnc(chip: Chip, lnc: int | None = None) -> int:
    """The LNC to use on `chip`: its default for None. Raises BadInput if it is not allowed."""
    if lnc is None:
        return chip.lnc_default
    if lnc in chip.lnc_allowed:
        return lnc
    nearest = min(chip.lnc_allowed, key=lambda allowed: abs(allowed - lnc))
    listed = " or ".join(map(str, chip.lnc_allowed))
    raise BadInput("LNC", lnc, f"{listed} on {chip.title} ({chip.name})", nearest)


def logical_per_chip(chip: Chip, lnc: int) -> int:
    """Logical cores, that is ranks, of one chip."""
    return chip.cores // check_lnc(chip, lnc)


def physical_cores(chip: Chip, lnc: int, logical: int) -> range:
    """Physical cores of one logical core of a chip. Raises BadInput outside the chip."""
    count = logical_per_chip(chip, lnc)
    if not 0 <= logical < count:
        raise BadInput("logical core", logical, f"0 to {count - 1} at LNC={lnc} on {chip.title}")
    return range(lnc * logical, lnc * logical + lnc)


def check_streams(chip: Chip, lnc: int, streams: int) -> None:
    """Raises BadInput for more collective streams than a logical core's CC-cores have."""
    most = chip.cc_streams_per_core * lnc
    if not 1 <= streams <= most:
        allowed = f"1 to {most} on {chip.title} at LNC={lnc}"
        raise BadInput("streams", streams, allowed, min(max(streams, 1), most))


def stack_of(chip: Chip, physical: int) -> int:
    """The HBM stack that a physical core of a chip uses. Raises BadInput outside the chip."""
    if not 0 <= physical < chip.cores:
        raise BadInput("physical core", physical, f"0 to {chip.cores - 1} on {chip.title}")
    return physical // chip.cores_per_stack


@dataclass(frozen=True)
class LogicalCore:
    """What one logical core of a chip has. One logical core is one rank."""

    chip: Chip
    lnc: int

    def __post_init__(self) -> None:
        check_lnc(self.chip, self.lnc)

    @property
    def sharers(self) -> int:
        """Logical cores that use one HBM stack: each sees all of it, and they compete for it."""
        return max(1, self.chip.cores_per_stack // self.lnc)

    @property
    def hbm_visible_bytes(self) -> int:
        """HBM that a logical core can address: its stack, shared by `sharers` logical cores."""
        return self.chip.stack_bytes * max(1, self.lnc // self.chip.cores_per_stack)

    @property
    def hbm_bytes(self) -> int:
        """Even share of HBM per logical core: what a rank can count on."""
        return self.hbm_visible_bytes // self.sharers

    @property
    def hbm_bytes_per_s(self) -> int:
        """Even share of the chip's HBM bandwidth."""
        return self.chip.hbm_bytes_per_s * self.lnc // self.chip.cores

    @property
    def dma_bytes_per_s(self) -> int:
        """All DMA engines of the physical cores together."""
        return self.chip.dma_bytes_per_s * self.lnc

    def peak(self, dtype: str) -> int:
        """FLOP/s of the Tensor engines of the physical cores together."""
        return self.chip.peak(dtype) * self.lnc
