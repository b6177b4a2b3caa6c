"""The machine that a run simulates: nodes of an instance at an LNC, their cores and links."""

from dataclasses import dataclass
from functools import cached_property

from trnsim.collectives.fabric import Fabric
from trnsim.device.chip import Chip
from trnsim.device.errors import BadInput, OutOfMemory
from trnsim.device.units import format_bytes

from .instances import Instance, check_nodes, fabric, load_instance
from .lnc import LogicalCore, check_lnc, logical_per_chip, stack_of
from .program import RankProgram
from .runtimes.base import CoreAddress


@dataclass(frozen=True)
class Machine:
    """`nodes` instances whose logical cores are `lnc` physical cores each; `ranks` run a job.

    Rank r is logical core r, counted by node, chip and core. Raises BadInput for an LNC that the
    chip does not have, for nodes without EFA, and for more ranks than logical cores.
    """

    instance: Instance
    nodes: int
    lnc: int
    ranks: int

    def __post_init__(self) -> None:
        check_nodes(self.instance, self.nodes)
        check_lnc(self.instance.chip, self.lnc)
        if not 1 <= self.ranks <= self.logical_cores:
            raise BadInput(
                "mesh",
                f"{self.ranks} ranks",
                f"1 to {self.logical_cores} on {self.nodes} x {self.instance.name} at LNC={self.lnc}",
                self.logical_cores,
            )

    @classmethod
    def of(cls, instance: str, nodes: int, lnc: int | None, ranks: int) -> "Machine":
        """The machine by the instance's name; `lnc` None is the chip's default."""
        found = load_instance(instance)
        return cls(found, nodes, check_lnc(found.chip, lnc), ranks)

    @property
    def chip(self) -> Chip:
        """The kind of chip."""
        return self.instance.chip

    @property
    def logical_cores(self) -> int:
        """Logical cores of all nodes."""
        return self.nodes * self.instance.logical_cores(self.lnc)

    @cached_property
    def fabric(self) -> Fabric:
        """Chips and links, with an endpoint for every logical core."""
        return fabric(self.instance, self.nodes, self.lnc)

    def place(self, rank: int) -> tuple[int, int, int]:
        """(node, chip of the cluster, logical core of the chip) of a rank."""
        per_chip = logical_per_chip(self.chip, self.lnc)
        chip, core = divmod(rank, per_chip)
        return chip // self.instance.chips, chip, core

    def addresses(self, hbm_bytes: int) -> list[CoreAddress]:
        """The physical cores of all ranks, in order, each with its rank's arena size."""
        found = []
        for rank in range(self.ranks):
            _, chip, logical = self.place(rank)
            found += [
                CoreAddress(rank, core, self.lnc, chip, logical * self.lnc + core, hbm_bytes)
                for core in range(self.lnc)
            ]
        return found

    @property
    def hbm_bytes(self) -> int:
        """HBM that a rank can count on: its stack, less what ranks on the same stack need."""
        core = LogicalCore(self.chip, self.lnc)
        per_stack: dict[tuple[int, int], int] = {}
        for rank in range(min(self.ranks, self.chip.cores)):
            _, chip, logical = self.place(rank)
            stack = (chip, stack_of(self.chip, logical * self.lnc))
            per_stack[stack] = per_stack.get(stack, 0) + 1
        return core.hbm_visible_bytes // max(per_stack.values())

    def check_memory(self, program: RankProgram) -> None:
        """Raises OutOfMemory with both numbers and what holds the memory."""
        need = sum(program.hbm.values())
        if need <= self.hbm_bytes:
            return
        held = ", ".join(f"{use} {format_bytes(n)}" for use, n in program.hbm.items())
        raise OutOfMemory(
            f"HBM of rank 0 ({self.instance.name}, LNC={self.lnc}): {need} B"
            f" ({format_bytes(need)}) needed, {self.hbm_bytes} B ({format_bytes(self.hbm_bytes)})"
            f" available per rank; held by {held}"
        )
