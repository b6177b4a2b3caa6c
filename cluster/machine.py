"""The machine that a run simulates: placed ranks with their cores, memory and links."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from trnsim.device.chip import Chip
from trnsim.device.errors import OutOfMemory
from trnsim.device.units import format_bytes

from .instances import Instance, load_instance
from .mesh import Mesh
from .placement import Placement, place
from .program import RankProgram
from .runtimes.base import CoreAddress


@dataclass(frozen=True)
class Machine:
    """Ranks on the logical cores of some nodes."""

    placement: Placement

    @classmethod
    def of(
        cls,
        instance: str,
        nodes: int,
        lnc: int | None,
        mesh: Mesh,
        overlay: str | Path | None = None,
    ) -> "Machine":
        """The machine by the instance's name; `lnc` None is the chip's default. `overlay` is a file
        of `trnsim calibrate` whose numbers replace the shipped ones.

        Raises BadInput for an unknown instance, an LNC that the chip does not have, or a mesh that
        does not fit.
        """
        return cls(place(load_instance(instance, overlay), mesh, nodes=nodes, lnc=lnc))

    @property
    def instance(self) -> Instance:
        """The kind of instance."""
        return self.placement.instance

    @property
    def chip(self) -> Chip:
        """The kind of chip, with the link rates of this instance."""
        return self.instance.chip

    @property
    def lnc(self) -> int:
        """Physical cores per rank."""
        return self.placement.lnc

    @property
    def ranks(self) -> int:
        """Ranks of the job."""
        return self.placement.ranks

    def addresses(self, hbm_bytes: int) -> list[CoreAddress]:
        """The physical cores of all ranks, in rank order, each with its rank's arena size."""
        return [
            CoreAddress(
                rank=rank,
                core=index,
                cores=self.lnc,
                node=core.node,
                chip=core.node * self.instance.chips + core.chip,
                physical=core.physical,
                hbm_bytes=hbm_bytes,
            )
            for rank in range(self.ranks)
            for index, core in enumerate(self.placement.cores(rank))
        ]

    @cached_property
    def hbm_bytes(self) -> int:
        """HBM that a rank can count on: its stack, shared evenly by the ranks on it."""
        stacks = np.asarray(self.placement.slots) * self.lnc // self.chip.cores_per_stack
        sharers = np.unique(stacks, return_counts=True)[1]
        return self.placement.logical_core.hbm_visible_bytes // int(sharers.max())

    def check_memory(self, program: RankProgram) -> None:
        """Raises OutOfMemory with both numbers and what holds the memory."""
        need = sum(program.hbm.values())
        if need <= self.hbm_bytes:
            return
        held = ", ".join(f"{use} {format_bytes(n)}" for use, n in program.hbm.items())
        raise OutOfMemory(
            f"HBM of a rank on {self.instance.name} at LNC={self.lnc}: {need} B"
            f" ({format_bytes(need)}) needed, {self.hbm_bytes} B"
            f" ({format_bytes(self.hbm_bytes)}) available; held by {held}"
        )
