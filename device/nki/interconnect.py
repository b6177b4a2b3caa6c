"""What a kernel asks of the other ranks, and who answers: the seam to collectives and fabrics.

A core that calls a collective makes an `Offer` and stands. When no core of any rank can run on,
`meetings` finds the collectives for which all have come; whoever runs the ranks prices and carries
them out (see `Interconnect`) and answers the cores. All that has come by then shares the fabric.

A collective of tensors in shared HBM is the logical core's: its cores meet in it, and it runs once.
One in SBUF or private HBM is each core's own: core k meets the cores k of the other ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from ..errors import BadInput, CollectiveMismatch, IllegalInstruction, TrnsimError
from .errors import DeadlockError

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Request:
    """A collective as a core calls it. All who take part have to ask for the same.

    `kind` is all_reduce, all_gather, reduce_scatter, all_to_all, permute (along `pairs` of ranks),
    or ring (from each rank to the next of its group's ring). `counts` has for each of `channels`
    the elements of a piece: of a whole buffer in all_reduce, permute and ring; of what a rank gives
    in all_gather, keeps in reduce_scatter, sends to each rank in all_to_all. With `variable` they
    are 0, and every `Offer` has its own. `core` is None for the logical core's.
    """

    kind: str
    groups: Groups
    dtype: str
    counts: tuple[int, ...]
    reduction: str | None = None
    pairs: tuple[tuple[int, int], ...] = ()
    channels: tuple[int, ...] = (0,)
    core: int | None = None
    on_chip: bool = False
    variable: bool = False

    @property
    def name(self) -> str:
        """As `nki.collectives` calls it."""
        if self.kind == "ring":
            return "collective_permute_implicit" + ("_reduce" if self.reduction else "")
        return {"permute": "collective_permute"}.get(self.kind, self.kind) + "_v" * self.variable

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that take part."""
        return tuple(rank for group in self.groups for rank in group)

    def group_of(self, rank: int) -> tuple[int, ...]:
        """The group of a rank that takes part."""
        return next(group for group in self.groups if rank in group)

    def __str__(self) -> str:
        size = "" if self.variable else f"[{sum(self.counts)}]"
        reduction = f" {self.reduction}" if self.reduction else ""
        place = "SBUF" if self.on_chip else "HBM"
        return f"{self.name}{reduction} of {self.dtype}{size} in {place} on {_shown(self.groups)}"


@dataclass(frozen=True)
class Offer:
    """A core's call: it can begin at `arrival` ps. `sends`: with `variable`, elements it sends."""

    request: Request
    arrival: int
    line: str
    sends: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.request} at {self.line}"


@dataclass(frozen=True)
class Stand:
    """Where a core of a rank stands: in a collective, or as `what` says."""

    what: str
    offer: Offer | None = None


@dataclass(frozen=True, eq=False)
class Landed:
    """What a collective gave a rank, by channel: begin and end in ps, and values (None: none).

    `sends`: with `variable`, what each rank of the group sent.
    """

    begins: tuple[int, ...]
    ends: tuple[int, ...]
    sends: tuple[tuple[int, ...], ...] = ()
    outputs: tuple[np.ndarray | None, ...] = ()

    def lasting(self, arrival: int, least: int) -> "Landed":
        """The same, with no end before `least` ps have passed since `arrival`."""
        return replace(self, ends=tuple(max(end, arrival + least) for end in self.ends))


@dataclass(frozen=True, eq=False)
class Meeting:
    """A collective for which all have come. `seats` has by rank its cores; arrivals in ps."""

    request: Request
    seats: dict[int, tuple[int, ...]]
    arrivals: dict[int, int]
    sends: dict[int, tuple[int, ...]] = field(default_factory=dict)
    line: str = ""


class Interconnect(Protocol):
    """What ranks of kernels know of the machine between them."""

    @property
    def ranks(self) -> int:
        """How many there are."""
        ...

    def check(self, request: Request) -> None:
        """Raises IllegalInstruction for what these ranks cannot do together."""
        ...

    def ring(self, group: tuple[int, ...], channel: int) -> tuple[int, ...]:
        """The ranks of a group in the order in which data go round."""
        ...


class OneRank:
    """The interconnect of a kernel that runs on one rank: data stay where they are."""

    ranks = 1

    def check(self, request: Request) -> None:
        """Every collective is one of rank 0 with itself."""

    def ring(self, group: tuple[int, ...], channel: int) -> tuple[int, ...]:
        """Rank 0."""
        return group


def land_alone(offer: Offer, inputs: Sequence[Any], alone_ps: int) -> Landed:
    """A collective of one rank with itself is a copy of `alone_ps`."""
    channels = range(len(offer.request.channels))
    return Landed(
        begins=tuple(offer.arrival for _ in channels),
        ends=tuple(offer.arrival + alone_ps for _ in channels),
        sends=(offer.sends,),
        outputs=tuple(inputs),
    )


# ---- who has come ----------------------------------------------------------------------------


def meetings(states: Sequence[Sequence[Stand]]) -> list[Meeting]:
    """The collectives for which all have come, `states` being where the cores of each rank stand.

    Raises CollectiveMismatch or DeadlockError, naming ranks, calls and lines, if there is none.
    """
    found, seen = [], set()
    for cores in states:
        for stand in cores:
            if stand.offer is None or stand.offer.request in seen:
                continue
            seen.add(stand.offer.request)
            made = _meeting(stand.offer, states)
            if made is not None:
                found.append(made)
    if not found:
        raise stuck(states)
    return found


def _meeting(offer: Offer, states: Sequence[Sequence[Stand]]) -> Meeting | None:
    request, seats, arrivals, sends = offer.request, {}, {}, {}
    for rank in request.ranks:
        cores = _seats(request, len(states[rank]))
        offers = [states[rank][core].offer for core in cores]
        if any(other is None or other.request != request for other in offers):
            return None
        come = [other for other in offers if other is not None]
        seats[rank], sends[rank] = cores, come[0].sends
        arrivals[rank] = max(other.arrival for other in come)
    return Meeting(request, seats, arrivals, sends, offer.line)


def _seats(request: Request, cores: int) -> tuple[int, ...]:
    return tuple(range(cores)) if request.core is None else (request.core,)


FIELDS = ("name", "groups", "reduction", "dtype", "counts", "pairs", "channels", "on_chip")
"""Of a request, those whose difference an error names."""


def stuck(states: Sequence[Sequence[Stand]]) -> TrnsimError:
    """The error of ranks that wait for each other in vain."""
    first = next(stand.offer for cores in states for stand in cores if stand.offer is not None)
    several = max(map(len, states)) > 1
    places: dict[str, list[str]] = {}
    differ = ""
    for rank, cores in enumerate(states):
        for core, stand in enumerate(cores):
            name = f"{rank}" + (f" core {core}" if several else "")
            places.setdefault(stand.what, []).append(name)
            concerned = rank in first.request.ranks and core in _seats(first.request, len(cores))
            if concerned and stand.offer is not None and not differ:
                differ = _difference(first.request, stand.offer.request)
    story = "; ".join(f"{_ranks(names)}: {what}" for what, names in places.items())
    if differ:
        return CollectiveMismatch(f"ranks call different collectives ({differ}): {story}")
    return DeadlockError(f"ranks wait in vain: {story}")


def _difference(one: Request, other: Request) -> str:
    """`dtype f32 and bf16`; empty if they are the same."""
    if one == other:
        return ""
    names = [name for name in FIELDS if getattr(one, name) != getattr(other, name)]
    name = names[0] if names else "core"
    return f"{name} {getattr(one, name)} and {getattr(other, name)}"


def _ranks(names: list[str]) -> str:
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return f"rank{'s' if len(names) > 1 else ''} {shown}"


def _shown(groups: Groups) -> str:
    texts = [str(list(group)) if len(group) <= 8 else _run(group) for group in groups[:2]]
    return ", ".join(texts) + (f" and {len(groups) - 2} more groups" if len(groups) > 2 else "")


def _run(group: tuple[int, ...]) -> str:
    return f"[{group[0]}, {group[1]}, ... {group[-1]}] ({len(group)} ranks)"


def check_groups(groups: Groups, rank: int, ranks: int) -> None:
    """Raises BadInput for groups that overlap or leave the machine, IllegalInstruction for a rank
    that calls a collective of others."""
    named = [member for group in groups for member in group]
    if not named or not all(groups):
        raise BadInput("replica_group", list(map(list, groups)), "lists of one rank or more")
    outside = [member for member in named if not 0 <= member < ranks]
    if outside:
        raise BadInput("rank of replica_group", outside[0], f"0 to {ranks - 1}")
    twice = [member for member in set(named) if named.count(member) > 1]
    if twice:
        raise BadInput("rank of replica_group", twice[0], "each rank once: groups do not overlap")
    if rank not in named:
        raise IllegalInstruction(f"rank {rank} calls a collective of {_shown(groups)}")
