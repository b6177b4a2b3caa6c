"""What a job moves in one step, axis by axis: the demands that a placement is judged by."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from trnsim.collectives.schedule import Collective
from trnsim.device.errors import BadInput

from .. import nccom
from ..mesh import Mesh

_FORM = "AXES=OPERATION:SIZE[:TIMES], such as tp=all_reduce:64MiB:160 or dp+ep=allr:1GiB"
_DEMAND = re.compile(r"([\w+]+)=(\w+):([^:]+?)(?::([0-9]+))?")


@dataclass(frozen=True)
class Demand:
    """A collective over the groups of mesh `axes`, `times` in a step."""

    axes: tuple[str, ...]
    collective: Collective
    times: int = 1
    label: str = ""

    @property
    def title(self) -> str:
        """What it is for, or which collective over which axes."""
        return self.label or f"{self.collective.kind} over {'+'.join(self.axes)}"


@dataclass(frozen=True)
class Traffic:
    """All demands of a step. Equal ones are merged, their times added."""

    demands: tuple[Demand, ...]

    @classmethod
    def of(cls, demands: Iterable[Demand]) -> "Traffic":
        """Equal demands become one; a collective of one rank moves nothing and is left out."""
        times: Counter[tuple] = Counter()
        for demand in demands:
            if demand.collective.ranks > 1 and demand.times:
                times[demand.axes, demand.collective, demand.label] += demand.times
        return cls(tuple(Demand(a, c, n, label) for (a, c, label), n in times.items()))


def parse_demand(text: str, mesh: Mesh, dtype: str = "bf16") -> Demand:
    """`tp=all_reduce:64MiB:160`: axes joined by +, operation, size and times of nccom-test's kind.

    sendrecv goes along the axis, from each place to the next. Raises BadInput for anything else.
    """
    match = _DEMAND.fullmatch(text)
    if match is None:
        raise BadInput("--traffic", text, _FORM)
    axes = tuple(match.group(1).split("+"))
    ranks = 1
    for axis in axes:
        ranks *= mesh.degree(axis)
    operation = nccom.operation(match.group(2))
    if operation.uneven or operation.name == "permute":
        raise BadInput("--traffic", text, "an even operation, or sendrecv along an axis")
    pairs = along(ranks) if operation.name == "sendrecv" else ()
    nbytes = nccom.size(match.group(3), "--traffic").nbytes
    _, kind = nccom.dtype(dtype)
    collective = nccom.collective(operation, nbytes, kind, ranks, pairs=pairs)
    return Demand(axes, collective, int(match.group(4) or 1))


def along(ranks: int) -> tuple[tuple[int, int], ...]:
    """Each place sends to the next; the last one to nobody."""
    return tuple((place, place + 1) for place in range(ranks - 1))
