"""Tensor indirection of NeuronCore-v4: operands whose columns lie where an index says.

Offset i of a group of partitions is index[i % G, i // G] of the group's own rows, G being 16 on the
lane engines and 32 on the Tensor engine. Partition p of the operand reads or writes its elements
at the offsets of p's group. How long that takes is not published: it is priced as direct access.
"""

from typing import Any

import numpy as np

from ..chip import Chip
from ..memory import ITEMSIZE, View
from .base import Instruction

LANE_GROUP, TENSOR_GROUP = 16, 32
QUADRANT = 32
GENERATION = 4
_ENGINES = {"Copy": ("vector", "scalar"), "TensorTensor": ("vector", "gpsimd")}
"""Engines on which an instruction takes indirect operands, where not all of its own do."""
_OFFSETS = ("ui8", "ui16", "ui32", "i16", "i32")


class IndirectView(View):
    """[P, count] elements of a tile, by an index. Its `array` is a copy of what they hold."""

    __slots__ = ("base", "index", "group", "values")

    base: View
    index: View
    group: int
    values: np.ndarray | None  # while an instruction writes them

    def __init__(self, base: View, index: View, count: int, group: int) -> None:
        size = ITEMSIZE[base.dtype]
        shape = (base.shape[0], count)
        super().__init__(base.tensor, shape, (0, size), base.offset, base.partition, base.dtype)
        self._region, self._box = base.region, ()
        self.base, self.index, self.group, self.values = base, index, group, None

    def places(self) -> np.ndarray:
        """[P, count] offsets along the free axis of the base."""
        rows, count, group = self.shape[0], self.shape[1], self.group
        index = self.index.array.reshape(rows, -1).astype(np.int64)
        out = np.empty((rows, count), np.int64)
        for first in range(0, rows, group):
            own = index[first : first + group]
            out[first : first + group] = own.T.reshape(-1)[:count]
        return out

    @property
    def array(self) -> np.ndarray:
        """The values: a copy, or what is being written."""
        if self.values is not None:
            return self.values
        rows = self.base.array.reshape(self.shape[0], -1)
        return np.take_along_axis(rows, self.places(), axis=1)

    def scatter(self) -> None:
        """Puts what was written where the index says; of equal offsets the last stays."""
        assert self.values is not None
        base = self.base.array
        rows = base.reshape(self.shape[0], -1).copy()
        np.put_along_axis(rows, self.places(), self.values, axis=1)
        base[...] = rows.reshape(base.shape)
        self.values = None


class Indirect(Instruction):
    """An instruction with operands of `IndirectView`: it also waits for their indices."""

    __slots__ = ("inner", "operands")

    def __init__(self, inner: Instruction, operands: tuple[IndirectView, ...]) -> None:
        self.inner, self.operands = inner, operands

    @property
    def engine(self) -> str:  # type: ignore[override]
        """That of the instruction inside."""
        return self.inner.engine

    @property
    def table(self) -> str:  # type: ignore[override]
        """That of the instruction inside."""
        return self.inner.table

    @property
    def flops(self) -> int:  # type: ignore[override]
        """Those of the instruction inside."""
        return self.inner.flops

    def reads(self) -> tuple[View, ...]:
        return (*map(_whole, self.inner.reads()), *(view.index for view in self.operands))

    def used(self) -> tuple[View, ...]:
        plain = (view for view in self.inner.used() if type(view) is not IndirectView)
        return (*plain, *(view.index for view in self.operands))

    def writes(self) -> tuple[View, ...]:
        return tuple(map(_whole, self.inner.writes()))

    def check(self, chip: Chip) -> None:
        if chip.generation < GENERATION:
            raise self.inner.illegal(
                f"tensor indirection needs NeuronCore-v{GENERATION} or later, not {chip.name}"
            )
        written = self.inner.writes()
        if self.inner.engine not in _ENGINES.get(type(self.inner).__name__, (self.inner.engine,)):
            raise self.inner.illegal(f"tensor indirection does not run on {self.inner.engine}")
        for view in self.operands:
            self._check_index(view)
            if view in written:
                self._check_scattered(view)
            else:
                self._check_start(view.index, "its operand", view)
        self.inner.check(chip)

    def _check_index(self, view: IndirectView) -> None:
        index, (rows, count) = view.index, view.shape
        group = min(view.group, rows)
        if index.space != "sbuf" or index.dtype not in _OFFSETS or index.shape[0] != rows:
            raise self.inner.illegal(
                f"an index is {index}; it must be integers in sbuf with {rows} partitions"
            )
        if index.partition % QUADRANT:
            raise self.inner.illegal(
                f"an index starts at partition {index.partition}; allowed: multiples of {QUADRANT}"
            )
        if count > group * index.free:
            raise self.inner.illegal(
                f"num_elem is {count}; an index of {index.free} columns has {group * index.free}"
            )

    def _check_scattered(self, dst: IndirectView) -> None:
        """The index of a scattered dst starts where the first source does, or that one's index."""
        if self.inner.engine == "scalar" and dst.space == "psum":
            raise self.inner.illegal(
                "dst is indirect and in psum; the scalar engine cannot scatter there"
            )
        source = self.inner.reads()[0]
        if source.space == "sbuf":
            self._check_start(dst.index, "the source", source)
        elif type(source) is IndirectView:
            self._check_start(dst.index, "the source's index", source.index)

    def _check_start(self, index: View, name: str, other: View) -> None:
        if index.partition != other.partition:
            raise self.inner.illegal(
                f"an index starts at partition {index.partition} and {name} at {other.partition}; "
                "they must be equal"
            )

    def cycles(self, chip: Chip) -> int:
        return self.inner.cycles(chip)

    def execute(self) -> None:
        for view in self.operands:
            self._check_offsets(view)
        written = [view for view in self.operands if view in self.inner.writes()]
        for view in written:
            view.values = view.array
        self.inner.execute()
        for view in written:
            view.scatter()

    def _check_offsets(self, view: IndirectView) -> None:
        places = view.places()
        wrong = places[(places < 0) | (places >= view.base.free)]
        if wrong.size:
            raise self.inner.illegal(f"an index holds {wrong[0]}; limit: 0 to {view.base.free - 1}")


def _whole(view: View) -> View:
    return view.base if type(view) is IndirectView else view


def with_indices(made: Any, *operands: View) -> Instruction:
    """The instruction, wrapped if some of its operands are indirect."""
    indirect = tuple(view for view in operands if type(view) is IndirectView)
    return Indirect(made, indirect) if indirect else made
