"""Named parallel axes, and the ranks and replica groups that follow from them.

Ranks are numbered row-major over the axes in the order given, the last axis fastest, as
`jax.sharding.Mesh` does with `devices.reshape(shape)`: with dp=2,tp=4 the ranks 0-3 are a tp group.
"""

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from trnsim.device.errors import BadInput

Groups = tuple[tuple[int, ...], ...]

_AXIS = re.compile(r"\s*([A-Za-z_]\w*)\s*=\s*([0-9]+)\s*")
_FORM = "axes as name=degree, such as dp=2,tp=2"


@dataclass(frozen=True)
class Mesh:
    """Axes as (name, degree) in order: names unique, degrees at least 1."""

    axes: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        if not self.axes:
            raise BadInput("mesh", "''", _FORM)
        for name, degree in self.axes:
            if degree < 1:
                raise BadInput("mesh", f"{name}={degree}", "degrees of at least 1", f"{name}=1")
        for name in self.names:
            if self.names.count(name) > 1:
                raise BadInput("mesh", self, f"each axis once; {name} is named twice")

    def __str__(self) -> str:
        return ",".join(f"{name}={degree}" for name, degree in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(degree for _, degree in self.axes)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.shape)

    def degree(self, name: str) -> int:
        """Degree of an axis. Raises BadInput for an axis that the mesh does not have."""
        self._check_names([name])
        return dict(self.axes)[name]

    def strides(self) -> dict[str, int]:
        """Distance in ranks between neighbours on each axis."""
        later = [math.prod(self.shape[i + 1 :]) for i in range(len(self.axes))]
        return dict(zip(self.names, later, strict=True))

    def coordinates(self, rank: int) -> dict[str, int]:
        """Position of a rank on each axis. Raises BadInput outside the mesh."""
        if not 0 <= rank < self.size:
            raise BadInput("rank", rank, f"0 to {self.size - 1} in mesh {self}")
        strides = self.strides()
        return {name: rank // strides[name] % degree for name, degree in self.axes}

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """The rank at the given position; an axis that is left out counts as 0."""
        self._check_names(coordinates)
        for name, position in coordinates.items():
            if not 0 <= position < self.degree(name):
                raise BadInput(name, position, f"0 to {self.degree(name) - 1} in mesh {self}")
        strides = self.strides()
        return sum(position * strides[name] for name, position in coordinates.items())

    def groups(self, *names: str) -> Groups:
        """Replica groups over the named axes together: they partition the ranks.

        Ranks of a group differ only on the named axes, in row-major order of the axes as named;
        groups are ordered by their first rank.
        """
        self._check_names(names)
        if len(set(names)) < len(names):
            raise BadInput("axes", ", ".join(names), "each axis once")
        offsets = tuple(self._offsets(names))
        rest = [name for name in self.names if name not in names]
        return tuple(tuple(base + o for o in offsets) for base in self._offsets(rest))

    def _offsets(self, names: Iterable[str]) -> Iterator[int]:
        strides, degrees = self.strides(), dict(self.axes)
        steps = [range(0, degrees[name] * strides[name], strides[name]) for name in names]
        return map(sum, itertools.product(*steps))

    def _check_names(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self.names:
                raise BadInput("axis", name, self.names)


def parse_mesh(text: str) -> Mesh:
    """`"dp=2,tp=2"` to a Mesh. Raises BadInput for anything else, a zero or a repeated axis."""
    axes = []
    for part in str(text).split(","):
        match = _AXIS.fullmatch(part)
        if match is None:
            raise BadInput("mesh", repr(str(text)), _FORM)
        axes.append((match.group(1), int(match.group(2))))
    return Mesh(tuple(axes))


def data_parallel_degree(world: int, model_parallel: int) -> int:
    """World size over the product of the other degrees. Raises BadInput if it does not divide."""
    if world % model_parallel:
        allowed = f"a multiple of the model-parallel degree {model_parallel}"
        raise BadInput("world size", world, allowed, _multiples(world, model_parallel))
    return world // model_parallel


def microbatches(global_batch: int, dp: int, microbatch: int = 1) -> int:
    """Microbatches per rank and step. Raises BadInput unless dp * microbatch divides the batch."""
    unit = dp * microbatch
    if global_batch < 1 or global_batch % unit:
        allowed = f"a multiple of dp x microbatch = {dp} x {microbatch} = {unit}"
        raise BadInput("global batch", global_batch, allowed, _multiples(global_batch, unit))
    return global_batch // unit


def _multiples(value: int, unit: int) -> str:
    below = value // unit * unit
    return f"{below} or {below + unit}" if below > 0 else f"{unit}"
