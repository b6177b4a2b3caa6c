"""One call of a collective: what its operands have to be, how they travel, and when.

Tensors travel as one row of elements per channel: those of a coalesced call one after another, in
blocks for the ranks of the group where an axis is cut or joined (`Parts`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arithmetic import apply
from ..errors import BadInput, IllegalInstruction
from ..isa.dma import transfer_duration
from ..memory import View
from .interconnect import Groups, Landed, Offer, Request, check_groups
from .isa_operands import BITS, integer, stored
from .session import Session, current
from .tensor import MemoryRegion, NkiTensor
from .trace import Collected

PRIORITY_GENERATION = 4  # of NeuronCore, from which `priority` is there
ARGUMENT = "the vendor's compiler refuses a kernel's argument as a collective's operand: copy it"


@dataclass(frozen=True)
class Parts:
    """Along which axis tensors are cut for the `count` ranks of a group, and joined again."""

    count: int
    cut: int | None = None
    joined: int | None = None

    def pack(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """All arrays as one row; with a cut, block after block for the ranks."""
        if self.cut is None:
            return np.concatenate([array.reshape(-1) for array in arrays])
        blocks = [np.split(array, self.count, axis=self.cut) for array in arrays]
        return np.concatenate([part.reshape(-1) for rank in zip(*blocks) for part in rank])  # noqa: B905 (all have `count`)

    def unpack(self, row: np.ndarray, arrays: Sequence[np.ndarray]) -> None:
        """Puts a row that arrived into arrays."""
        many = 1 if self.joined is None else self.count
        blocks, at = row.reshape(many, -1), 0
        for array in arrays:
            width = array.size // many
            pieces = blocks[:, at : at + width]
            at += width
            if not self.joined:
                array[...] = pieces.reshape(array.shape)
                continue
            shape = list(array.shape)
            shape[self.joined] //= many
            array[...] = np.concatenate([piece.reshape(shape) for piece in pieces], self.joined)


class Call:
    """A call with `buffers`, for each channel (tensors it takes from, tensors it puts into).

    Raises IllegalInstruction or BadInput for operands that the collective does not take.
    """

    def __init__(
        self,
        kind: str,
        groups: Groups,
        buffers: Sequence[tuple[Any, Any]],
        priority: Any = None,
        name: str | None = None,
        channels: tuple[int, ...] = (0,),
    ) -> None:
        self.session: Session = current()
        launch = self.session.launch
        self.kind, self.groups, self.channels, self.name = kind, groups, channels, name
        check_groups(groups, launch.rank, launch.interconnect.ranks)
        self.size = len(next(group for group in groups if launch.rank in group))
        self.srcs = [tensors(given, "srcs") for given, _ in buffers]
        self.dsts = [tensors(given, "dsts") for _, given in buffers]
        self.others: list[list[NkiTensor]] = []  # second operands, reduced with the first here
        self._check_space()
        self._check_dtypes()
        self._check_priority(priority)

    @property
    def on_chip(self) -> bool:
        """Whether the tensors are in SBUF."""
        return self.srcs[0][0].on_chip

    @property
    def _all(self) -> list[NkiTensor]:
        return [t for lists in (self.srcs, self.dsts, self.others) for some in lists for t in some]

    # ---- legality ------------------------------------------------------------------------

    def _check_space(self) -> None:
        regions = {tensor.buffer for tensor in self._all}
        if MemoryRegion.psum in regions or len({region.space for region in regions}) > 1:
            names = ", ".join(sorted(map(str, regions)))
            raise IllegalInstruction(f"tensors are in {names}; allowed: all in HBM, or all in SBUF")
        if len(regions) > 1 and self.session.launch.settings.cores > 1:
            raise IllegalInstruction("tensors are in private_hbm and in shared_hbm; allowed: one")
        if self.on_chip and any(len(some) > 1 for some in self.srcs):
            raise IllegalInstruction("several tensors in SBUF; coalescing is for tensors in HBM")
        if self.on_chip and any(len(tensor.shape) != 2 for tensor in self._all):
            raise IllegalInstruction("a tensor in SBUF has several free axes; allowed: [P, F]")

    def _check_dtypes(self) -> None:
        dtypes = {str(tensor.dtype) for tensor in self._all}
        if len(dtypes) > 1:
            raise IllegalInstruction(f"tensors are of {', '.join(sorted(dtypes))}; allowed: one")

    def _check_priority(self, priority: Any) -> None:
        if priority is None:
            return
        chip = self.session.chip
        if chip.generation < PRIORITY_GENERATION:
            raise IllegalInstruction(f"priority needs NeuronCore-v4 or later, not {chip.name}")
        if not 0 <= integer(priority, "priority") <= 3:
            raise IllegalInstruction(f"priority is {priority}; allowed: 0 to 3")

    def only_hbm(self) -> None:
        """Refuses tensors in SBUF."""
        if self.on_chip:
            raise IllegalInstruction("tensors are in SBUF; allowed: HBM")

    def only_one(self) -> None:
        """Refuses coalesced tensors."""
        for some in (*self.srcs, *self.dsts):
            if len(some) != 1:
                raise IllegalInstruction(f"{len(some)} tensors in a list; allowed: 1")

    def axis(self, collective_dim: Any, most: int = 0) -> int:
        """The axis, 0 to `most`."""
        axis = integer(collective_dim, "collective_dim")
        if not 0 <= axis <= most:
            allowed = "0" if most == 0 else f"0 to {most}"
            raise IllegalInstruction(f"collective_dim is {axis}; allowed: {allowed}")
        return axis

    def check_numbers(self, source: int, target: int, axis: int | None = None) -> None:
        """Elements of src : dst have to be as source : target; in SBUF along `axis`."""
        for srcs, dsts in zip(self.srcs, self.dsts, strict=True):
            if len(srcs) != len(dsts):
                raise IllegalInstruction(f"{len(srcs)} srcs and {len(dsts)} dsts")
            for src, dst in zip(srcs, dsts, strict=True):
                wanted = list(src.shape)
                if axis is not None:
                    wanted[axis] = wanted[axis] * target // source
                fits = src.size * target == dst.size * source
                exact = not src.on_chip or dst.shape == tuple(wanted)
                if not fits or not exact or (axis is not None and src.shape[axis] % source):
                    raise IllegalInstruction(
                        f"src {list(src.shape)} and dst {list(dst.shape)} do not fit in a group "
                        f"of {self.size}: dst has to have {target}/{source} of the elements of src"
                    )

    def check_divisible(self, axis: int) -> None:
        """An axis has to be cut into equal parts for the ranks."""
        for tensor in (*self.srcs[0], *self.dsts[0]):
            if tensor.shape[axis] % self.size:
                raise IllegalInstruction(
                    f"axis {axis} of {tensor} is no multiple of the group's {self.size} ranks"
                )

    def add_operands(self, others: list[list[NkiTensor]]) -> None:
        """Second operands for each channel, like the first."""
        for mine, added in zip(self.srcs, others, strict=True):
            if [t.shape for t in mine] != [t.shape for t in added]:
                raise IllegalInstruction("srcs0 and srcs1 have different shapes")
        self.others = others
        self._check_space()
        self._check_dtypes()

    # ---- the run -------------------------------------------------------------------------

    def run(
        self,
        reduction: str | None = None,
        parts: Parts | None = None,
        pairs: tuple[tuple[int, int], ...] = (),
    ) -> None:
        """Meets the other ranks; then the results are in dsts, in virtual time at its end."""
        self._check_computable(reduction)
        parts = parts or Parts(self.size)
        shares = self.size if parts.cut is not None else 1
        counts = tuple(sum(t.size for t in some) // shares for some in self.srcs)
        self.come(self.request(counts, reduction, pairs), self._reduce_ps())
        landed = self.collect(self._rows(parts, reduction))
        rank = self.session.launch.rank
        if pairs and rank not in [target for _, target in pairs]:
            self.finish(landed, [])
            return
        if self.writes_values:
            self.put(landed, parts)
        self.finish(landed, range(len(self.channels)))

    def request(
        self, counts: tuple[int, ...], reduction: str | None = None, pairs: tuple = (),
        variable: bool = False,
    ) -> Request:  # fmt: skip
        """What all ranks have to ask for. Raises what the interconnect refuses."""
        self.core = self._core
        self.asked = Request(
            self.kind, self.groups, self.srcs[0][0].dtype.device, counts, reduction, pairs,
            self.channels, self.core, self.on_chip, variable,
        )  # fmt: skip
        self.session.launch.interconnect.check(self.asked)
        return self.asked

    @property
    def _core(self) -> int | None:
        """None if the collective is the logical core's: on tensors that all its cores see."""
        launch = self.session.launch
        seen = self.srcs[0][0].buffer is MemoryRegion.shared_hbm or launch.settings.cores == 1
        return None if seen and not self.on_chip else self.session.program

    def come(self, request: Request, delay: int = 0) -> None:
        """Comes when operands are ready and streams are free, and `delay` ps later.

        If the collective is the logical core's, its cores meet first: then operands are complete.
        """
        session, launch = self.session, self.session.launch
        line, cores = session.line, launch.settings.cores
        for tensor in self._all:
            if launch.is_argument(tensor.storage.tensor):
                launch.findings.setdefault(line, f"{tensor}: {ARGUMENT}")
        self.entry = Collected(
            request, self._by_channel(self.srcs, self.others), self._by_channel(self.dsts),
            delay, self._alone_ps(), line, self.name or "",
        )  # fmt: skip
        self.arrival = session.core.come(self.entry, session.program, cores)
        if self.core is None and cores > 1:
            key = ("collective", request)
            self.arrival = max(launch.meet(session, key, self.arrival, f"{request} at {line}"))
        session.check_reads(self.entry.reads, line)

    def collect(self, rows: tuple, sends: tuple[int, ...] = ()) -> Landed:
        """Gives a row for each channel (None without data) to the collective; what it gave."""
        self.entry = self.entry._replace(sends=sends)
        offer = Offer(self.asked, self.arrival, self.entry.line, sends)
        landed = self.session.launch.collect(self.session, offer, rows, self.entry.alone)
        return landed.lasting(self.arrival, self.entry.alone if self.size == 1 else 0)

    def _by_channel(self, *lists: list[list[NkiTensor]]) -> tuple[tuple[View, ...], ...]:
        channels = range(len(self.channels))
        return tuple(
            tuple(self._views([some[c] for some in lists if c < len(some)])) for c in channels
        )

    @property
    def writes_values(self) -> bool:
        """Whether this core puts results in place: one does it for the cores of a rank."""
        return self.session.data and (self.core is not None or self.session.program == 0)

    def put(self, landed: Landed, parts: Parts) -> None:
        """Results into dsts."""
        for row, some in zip(landed.outputs, self.dsts, strict=True):
            assert row is not None
            parts.unpack(row, [stored(tensor, "dsts").array for tensor in some])

    def finish(self, landed: Landed, received: Sequence[int]) -> None:
        """Notes that dsts of these channels are written, and what took how long."""
        session, launch = self.session, self.session.launch
        for channel in received:
            for view in self.entry.writes_by_channel[channel]:
                session.note_write(view)
        session.core.trace.entries.append(self.entry)
        cores = launch.settings.cores
        session.core.land(self.entry, self.arrival, landed.ends, session.program, cores)

    def _views(self, lists: Sequence[Sequence[NkiTensor]]) -> list[View]:
        return [stored(tensor, "operand") for some in lists for tensor in some]

    def _check_computable(self, reduction: str | None) -> None:
        dtype = self.srcs[0][0].dtype
        if reduction and dtype.name in BITS:
            raise IllegalInstruction(
                f"tensors are {dtype}, which only MX instructions compute with"
            )

    def _rows(self, parts: Parts, reduction: str | None) -> tuple[np.ndarray | None, ...]:
        if not self.writes_values:
            return (None,) * len(self.channels)
        rows = [self._packed(parts, some) for some in self.srcs]
        for channel, some in enumerate(self.others):
            dtype = rows[channel].dtype
            rows[channel] = apply(
                str(reduction), rows[channel], self._packed(parts, some), out=dtype
            )
        return tuple(rows)

    def _packed(self, parts: Parts, some: Sequence[NkiTensor]) -> np.ndarray:
        return parts.pack([stored(tensor, "srcs").array for tensor in some])

    def _reduce_ps(self) -> int:
        """Picoseconds that DMA takes to reduce operands here, on all cores of the collective."""
        if not self.others:
            return 0
        chip, both = self.session.chip, [*self.srcs, *self.others]
        views = self._views(both)
        targets = self._views([*self.dsts, *self.dsts])
        fraction = chip.dma_compute_fraction
        total = sum(
            transfer_duration(chip, dst, src, fraction)
            for dst, src in zip(targets, views, strict=True)
        )
        return math.ceil(total / (self.session.launch.settings.cores if self.core is None else 1))

    def _alone_ps(self) -> int:
        chip = self.session.chip
        pairs = zip(self._views(self.dsts), self._views(self.srcs), strict=True)
        return chip.dma_start_ps + sum(transfer_duration(chip, dst, src) for dst, src in pairs)


def tensors(given: Any, operand: str) -> list[NkiTensor]:
    """A list of tensors. Raises BadInput for anything else."""
    if not isinstance(given, list | tuple) or not given:
        raise BadInput(operand, given, "a list of one tensor or more")
    for tensor in given:
        stored(tensor, operand)
    return list(given)
