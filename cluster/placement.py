"""Which logical core each rank of a mesh runs on, and the meshes that an instance can take."""

from collections.abc import Sequence
from dataclasses import dataclass

from trnsim.device.errors import BadInput

from .instances import Instance, check_nodes
from .lnc import CoreAddress, LogicalCore, check_lnc, physical_cores, stack_of
from .mesh import Mesh


@dataclass(frozen=True)
class Placement:
    """Rank r of the mesh runs on logical core `slots[r]`.

    Logical cores are numbered by node, chip and core, as the ranks of `instances.fabric`.
    """

    instance: Instance
    nodes: int
    lnc: int
    mesh: Mesh
    slots: Sequence[int]

    @property
    def ranks(self) -> int:
        return self.mesh.size

    @property
    def logical_core(self) -> LogicalCore:
        """What each rank has: its HBM, bandwidth and peak."""
        return LogicalCore(self.instance.chip, self.lnc)

    def locate(self, rank: int) -> tuple[int, int, int]:
        """(node, chip in the node, logical core in the chip) of a rank."""
        if not 0 <= rank < self.ranks:
            raise BadInput("rank", rank, f"0 to {self.ranks - 1} in mesh {self.mesh}")
        node, inside = divmod(self.slots[rank], self.instance.logical_cores(self.lnc))
        chip, logical = divmod(inside, self.instance.chip.cores // self.lnc)
        return node, chip, logical

    def cores(self, rank: int) -> tuple[CoreAddress, ...]:
        """The physical cores of a rank: `lnc` of them, all in one chip."""
        node, chip, logical = self.locate(rank)
        own = physical_cores(self.instance.chip, self.lnc, logical)
        return tuple(CoreAddress(node, chip, logical, physical) for physical in own)

    def stack(self, rank: int) -> tuple[int, int, int]:
        """(node, chip, HBM stack) of a rank: at LNC=1, ranks with an equal stack share it."""
        first = self.cores(rank)[0]
        return first.node, first.chip, stack_of(self.instance.chip, first.physical)

    def address(self, rank: int) -> str:
        """`rank 5: node 0, chip 1, cores 2-3 (logical 1)`, for messages."""
        node, chip, logical = self.locate(rank)
        own = [core.physical for core in self.cores(rank)]
        named = f"core {own[0]}" if len(own) == 1 else f"cores {own[0]}-{own[-1]}"
        return f"rank {rank}: node {node}, chip {chip}, {named} (logical {logical})"


def place(
    instance: Instance,
    mesh: Mesh,
    *,
    nodes: int = 1,
    lnc: int | None = None,
    slots: Sequence[int] | None = None,
) -> Placement:
    """Put the ranks of a mesh on the logical cores of `nodes` instances.

    Without `slots`, rank r is on logical core r. Raises BadInput for an LNC that the chip does not
    have, a mesh that does not fit, a number of ranks that the runtime refuses, or bad slots.
    """
    check_nodes(instance, nodes)
    lnc = check_lnc(instance.chip, lnc)
    available = nodes * instance.logical_cores(lnc)
    check_tensor_parallel(instance, mesh, available)
    _check_fits(instance, mesh, nodes, lnc)
    _check_counts(instance, mesh, available)
    chosen = range(mesh.size) if slots is None else tuple(slots)
    _check_slots(chosen, mesh, available)
    return Placement(instance, nodes, lnc, mesh, chosen)


def describe(instance: Instance, nodes: int, lnc: int) -> str:
    """`trn2.3xlarge: 1 chip, 8 physical cores, 4 logical cores at LNC=2`."""
    chips, physical = nodes * instance.chips, nodes * instance.physical_cores
    logical = nodes * instance.logical_cores(lnc)
    many = f"{nodes} x {instance.name}" if nodes > 1 else instance.name
    return (
        f"{many}: {chips} chip{'s' * (chips > 1)}, {physical} physical cores, "
        f"{logical} logical cores at LNC={lnc}"
    )


def _check_fits(instance: Instance, mesh: Mesh, nodes: int, lnc: int) -> None:
    per_node = instance.logical_cores(lnc)
    if mesh.size <= nodes * per_node:
        return
    smaller = _shrunk(mesh, nodes * per_node)
    near = [str(smaller)] if _count_is_allowed(instance, smaller.size) else []
    near += [f"{-(-mesh.size // per_node)} nodes"] if instance.efa_bytes_per_s else []
    limit = f"at most {nodes * per_node} ranks ({describe(instance, nodes, lnc)})"
    raise BadInput("mesh", f"{mesh} ({mesh.size} ranks)", limit, ", or ".join(near) or None)


def _shrunk(mesh: Mesh, available: int) -> Mesh:
    """The mesh with its first axes made smaller until it fits, the last ones kept if possible."""
    degrees, left = [], available
    for degree in reversed(mesh.shape):
        degrees.append(min(degree, max(1, left)))
        left //= degrees[-1]
    return Mesh(tuple(zip(mesh.names, reversed(degrees), strict=True)))


def _count_is_allowed(instance: Instance, ranks: int) -> bool:
    """Trainium1's runtime takes a job of 1, 2, 8, 16 or a multiple of 32 cores."""
    counts, unit = instance.core_counts, instance.core_counts_multiple
    return not counts or ranks in counts or ranks % unit == 0


def check_tensor_parallel(instance: Instance, mesh: Mesh, available: int) -> None:
    """Raises BadInput for a tp group that Trainium1's runtime does not take.

    The counts are those of a job; in a larger job, groups of 4 are published layouts too.
    """
    tp, unit = dict(mesh.axes).get("tp", 1), instance.core_counts_multiple
    if not _count_is_allowed(instance, tp) and unit % tp:
        near = _near_counts(instance, tp, available)
        raise BadInput("tp", tp, _counts(instance), near)


def _check_counts(instance: Instance, mesh: Mesh, available: int) -> None:
    if not _count_is_allowed(instance, mesh.size):
        near = _near_counts(instance, mesh.size, available)
        raise BadInput("mesh", f"{mesh} ({mesh.size} ranks)", _counts(instance), near)


def _counts(instance: Instance) -> str:
    listed = ", ".join(map(str, instance.core_counts))
    return f"{listed}, multiples of {instance.core_counts_multiple} cores on {instance.name}"


def _near_counts(instance: Instance, count: int, most: int) -> str:
    """The allowed counts below and above `count`, up to `most`."""
    multiples = range(instance.core_counts_multiple, most + 1, instance.core_counts_multiple)
    allowed = [n for n in (*instance.core_counts, *multiples) if n <= most]
    below, above = [n for n in allowed if n < count], [n for n in allowed if n > count]
    return " or ".join(map(str, below[-1:] + above[:1]))


def _check_slots(slots: Sequence[int], mesh: Mesh, available: int) -> None:
    if len(slots) != mesh.size:
        raise BadInput("placement", f"{len(slots)} cores", f"{mesh.size}, one per rank of {mesh}")
    if isinstance(slots, range):
        return
    seen: dict[int, int] = {}
    for rank, slot in enumerate(slots):
        if not 0 <= slot < available:
            raise BadInput(f"core of rank {rank}", slot, f"0 to {available - 1}")
        if slot in seen:
            raise BadInput(f"core of rank {rank}", slot, f"a core not taken by rank {seen[slot]}")
        seen[slot] = rank
