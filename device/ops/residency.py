"""What stays in SBUF between kernels.

HBM traffic is usually the bound, so the result of a kernel stays in SBUF until its last reader on
the same core, if the reader wants the same layout and there is room beside everybody's working
tiles. It is stored too if HBM has to have it: it is returned, read by something that is no kernel,
read in another layout, or read by the other core. Addresses are fixed here, from the top of SBUF
down, shortest lives first; a value that finds no room for its whole life stays for a first part of
it.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from ..chip import Chip
from .evaluate import CONTROL_FLOW
from .ir import Operation
from .kernel import Kernel, Layout, Part, Residency

Placed = tuple[Kernel, tuple[Part, ...]]
ALIGN = 64


@dataclass
class _Life:
    """A value on one core: made at place `start` in `layout`, read in SBUF at `uses`."""

    value: int
    layout: Layout
    start: int
    uses: list[int] = field(default_factory=list)
    needs_hbm: bool = False
    address: int = -1

    @property
    def size(self) -> int:
        """Bytes per partition."""
        return -(-self.layout.partition_bytes // ALIGN) * ALIGN

    @property
    def stop(self) -> int:
        """Place of the last use in SBUF."""
        return self.uses[-1]


def _overlap(a: tuple[int, int] | None, b: tuple[int, int] | None) -> bool:
    return a is not None and b is not None and a[0] < b[1] and b[0] < a[1]


def _lives(
    sequence: Sequence[Placed | Operation], core: int, returns: Collection[int]
) -> list[_Life]:
    """Every value that a kernel makes on this core, with its uses there."""
    lives: dict[int, _Life] = {}
    written: dict[int, tuple[int, int]] = {}
    for place, item in enumerate(sequence):
        if isinstance(item, Operation):
            for value in item.operands:
                if value in lives:
                    lives[value].needs_hbm = True
            continue
        kernel, parts = item
        for value in kernel.inputs:
            if value in lives:
                _use(lives[value], place, kernel, parts, core, written[value])
        for value, span in kernel.writes(parts[core]).items():
            layout = kernel.layout(value, parts[core])
            if layout is not None:
                lives[value] = _Life(value, layout, place, needs_hbm=value in returns)
                written[value] = span
    return [life for life in lives.values() if life.uses]


def _use(
    life: _Life,
    place: int,
    kernel: Kernel,
    parts: Sequence[Part],
    core: int,
    written: tuple[int, int],
) -> None:
    for other, part in enumerate(parts):
        span = kernel.reads(part).get(life.value)
        if not _overlap(span, written):
            continue
        if other != core:
            life.needs_hbm = True
        elif kernel.layout(life.value, part) == life.layout:
            life.uses.append(place)
        else:
            life.needs_hbm = True


def _room(sequence: Sequence[Placed | Operation], core: int, chip: Chip) -> list[int]:
    """Bytes per partition that each place takes for its own tiles; control flow takes all."""
    room = []
    for item in sequence:
        if isinstance(item, Operation):
            room.append(chip.sbuf_partition_bytes if item.name in CONTROL_FLOW else 0)
        else:
            kernel, parts = item
            room.append(kernel.cost(chip, parts[core]).sbuf_bytes)
    return room


def _address(
    life: _Life, stop: int, placed: Sequence[_Life], room: Sequence[int], capacity: int
) -> int:
    """The highest free address over places start..stop that is above the working tiles; or -1."""
    floor = max(room[life.start : stop + 1])
    top = capacity // ALIGN * ALIGN
    others = sorted(
        (other for other in placed if other.start <= stop and life.start <= other.stop),
        key=lambda other: -(other.address + other.size),
    )
    for other in others:
        if other.address + other.size <= top - life.size:
            break
        top = min(top, other.address)
    return top - life.size if top - life.size >= floor else -1


def plan_residency(
    sequence: Sequence[Placed | Operation], core: int, returns: Collection[int], chip: Chip
) -> list[Residency]:
    """For each place of a straight line of kernels: what stays in SBUF around it on `core`.

    `sequence` has (kernel, parts of all cores) and foreign operators, in the order in which they
    run; `returns` are the values that something after the sequence reads from HBM. Places of
    foreign operators get an empty Residency.
    """
    room = _room(sequence, core, chip)
    placed: list[_Life] = []
    for life in sorted(_lives(sequence, core, returns), key=lambda v: (v.stop - v.start, v.start)):
        while life.uses:
            life.address = _address(life, life.stop, placed, room, chip.sbuf_partition_bytes)
            if life.address >= 0:
                placed.append(life)
                break
            life.uses.pop()
            life.needs_hbm = True
    return _collect(len(sequence), placed)


def _collect(count: int, placed: Sequence[_Life]) -> list[Residency]:
    inside: list[list[int]] = [[] for _ in range(count)]
    kept: list[list[int]] = [[] for _ in range(count)]
    unstored: list[list[int]] = [[] for _ in range(count)]
    freed: list[list[int]] = [[] for _ in range(count)]
    address = {life.value: life.address for life in placed}
    for life in sorted(placed, key=lambda v: v.value):
        kept[life.start].append(life.value)
        if not life.needs_hbm:
            unstored[life.start].append(life.value)
        for use in life.uses:
            inside[use].append(life.value)
        freed[life.stop].append(life.value)
    return [
        Residency(
            tuple(inside[i]),
            tuple(kept[i]),
            tuple(unstored[i]),
            tuple(freed[i]),
            tuple((v, address[v]) for v in (*inside[i], *kept[i])),
        )
        for i in range(count)
    ]
