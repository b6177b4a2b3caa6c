"""What a kernel is: a few StableHLO operators that a core runs in one pass.

A kernel has values (`evaluate`: numpy on whole arrays), a loop nest of instructions (`nest`), and a
cost. The nest is the one description of its time: `run` executes it with data, `cost` times it
without. Kernels are plain data, so that they travel as msgpack; nothing in them is a closure.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ..chip import Chip
from .ir import Operation, TensorType

if TYPE_CHECKING:
    from ..core import Core
    from .nest import Context, Loop


@dataclass(frozen=True, slots=True)
class Part:
    """The share of a kernel that one physical core computes: `start` to `stop` of its split axis.

    `axis` names what is split: 'rows', 'columns', 'batch' or 'whole'.
    """

    core: int
    cores: int
    start: int
    stop: int
    axis: str = "rows"

    @property
    def empty(self) -> bool:
        """Whether this core has nothing to do."""
        return self.stop <= self.start

    @property
    def count(self) -> int:
        """Length of the share."""
        return max(0, self.stop - self.start)


def split(count: int, core: int, cores: int, axis: str) -> Part:
    """The `core`-th of `cores` contiguous shares of `count`; earlier shares are the longer ones."""
    share = -(-count // cores)
    start = min(core * share, count)
    return Part(core, cores, start, min(start + share, count), axis)


def split_rows(count: int, core: int, cores: int, axis: str = "rows") -> Part:
    """Shares that start at whole tiles of 128, or at least at multiples of 16, where there are
    enough for every core: BLAS then rounds each element as it does for the whole."""
    unit = next((u for u in (128, 16) if count >= u * cores), 1)
    units = split(-(-count // unit), core, cores, axis)
    return Part(core, cores, min(unit * units.start, count), min(unit * units.stop, count), axis)


def whole(count: int, core: int, cores: int) -> Part:
    """All of an axis that cannot be split: on core 0; the other core gets an empty part."""
    return Part(core, cores, 0, count if core == 0 else 0, "whole")


@dataclass(frozen=True, slots=True)
class Cost:
    """Modelled time of one kernel on one core.

    `duration` and the engines' `busy` are picoseconds; `hbm_bytes` is the traffic of the DMA
    engines with HBM; `flops` counts multiplications and additions of the tensor engine;
    `sbuf_bytes` are the bytes at the start of each partition in which its tiles lie.
    """

    duration: int
    busy: dict[str, int] = field(default_factory=dict)
    instructions: int = 0
    hbm_bytes: int = 0
    flops: int = 0
    sbuf_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Layout:
    """How a core holds rows `start` to `stop` of a [rows, columns] value in SBUF.

    Rows lie on partitions, 128 to a tile; the tiles lie side by side on the free axis.
    """

    rows: int
    columns: int
    start: int
    stop: int
    dtype: str

    @property
    def tiles(self) -> int:
        """Tiles of up to 128 rows."""
        return -(-(self.stop - self.start) // 128)

    @property
    def partition_bytes(self) -> int:
        """Bytes that the value takes in each partition."""
        return self.tiles * self.columns * TensorType((), self.dtype).numpy.itemsize


@dataclass(frozen=True, slots=True)
class Residency:
    """What of a kernel's operands lives in SBUF around it.

    `inside`: inputs that are already in SBUF and are not loaded; `kept`: outputs that stay there;
    `unstored`: those of `kept` that nobody reads from HBM; `freed`: values that end after this
    kernel; `places`: (value, byte in each partition) of those inside and kept.
    """

    inside: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    unstored: tuple[int, ...] = ()
    freed: tuple[int, ...] = ()
    places: tuple[tuple[int, int], ...] = ()


NOTHING_RESIDENT = Residency()


@dataclass(frozen=True, kw_only=True, eq=False)
class Kernel:
    """Base of all kernels. `types` has the type of every value that the kernel touches."""

    name: str
    operations: tuple[Operation, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    types: dict[int, TensorType]
    location: str = ""
    fallback: bool = False

    def part(self, core: int, cores: int) -> Part:
        """The share of physical core `core` of `cores` (1 or 2); may be empty."""
        raise NotImplementedError

    def reads(self, part: Part) -> dict[int, tuple[int, int]]:
        """Flat row-major element interval that `part` reads of each input."""
        return {} if part.empty else {v: (0, self.types[v].size) for v in self.inputs}

    def writes(self, part: Part) -> dict[int, tuple[int, int]]:
        """Flat row-major element interval that `part` writes of each output."""
        return {} if part.empty else {v: (0, self.types[v].size) for v in self.outputs}

    def evaluate(self, arrays: Mapping[int, np.ndarray], part: Part) -> None:
        """Computes `part` on whole C-contiguous arrays, in place, at operator fidelity."""
        raise NotImplementedError

    def layout(self, value: int, part: Part) -> Layout | None:
        """How this kernel would read or write `value` in SBUF; None if it cannot be resident."""
        return None

    def nest(self, context: "Context") -> "Loop":
        """The kernel's loop nest of instructions for the context's part."""
        raise NotImplementedError

    @cached_property
    def signature(self) -> Hashable:
        """Equal for kernels that cost the same: operators, shapes and dtypes, values renumbered."""
        number: dict[int, int] = {}
        for value in (*self.inputs, *self.outputs, *sorted(self.types)):
            number.setdefault(value, len(number))
        types = tuple((number[v], t.shape, t.dtype) for v, t in sorted(self.types.items()))
        return (
            type(self).__name__,
            tuple(number[v] for v in self.inputs),
            tuple(number[v] for v in self.outputs),
            tuple(sorted(types)),
            tuple(_operation_key(o, number) for o in self.operations),
            self._details(number),
        )

    def _details(self, number: Mapping[int, int]) -> Hashable:
        """What else the cost depends on; values through `number`."""
        return ()

    def canonical(self, residency: Residency) -> Hashable:
        """`residency` with values as places among the inputs and outputs."""
        place = {v: i for i, v in enumerate((*self.inputs, *self.outputs))}
        held = (residency.inside, residency.kept, residency.unstored)
        return tuple(tuple(sorted(place[v] for v in vs)) for vs in held)

    def cost(self, chip: Chip, part: Part, residency: Residency = NOTHING_RESIDENT) -> Cost:
        """Time of `part` on a core of `chip`, from the nest without data, fast-forwarded."""
        from .nest import cost_of

        return cost_of(self, chip, part, residency)

    def run(
        self,
        core: "Core",
        arrays: Mapping[int, np.ndarray],
        part: Part,
        residency: Residency = NOTHING_RESIDENT,
    ) -> Cost:
        """Executes every instruction of the nest on `core` with the values in `arrays`."""
        from .nest import run_on

        return run_on(self, core, arrays, part, residency)

    def renamed(self, **changes: Any) -> "Kernel":
        """A copy with some fields changed."""
        return replace(self, **changes)


def plain(value: Any) -> Hashable:
    """An attribute as a hashable value."""
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.shape, value.tobytes() if value.size <= 16 else None)
    if isinstance(value, dict):
        return tuple((k, plain(v)) for k, v in sorted(value.items()))
    if isinstance(value, list | tuple):
        return tuple(plain(v) for v in value)
    return value


def _operation_key(operation: Operation, number: Mapping[int, int]) -> Hashable:
    return (
        operation.name,
        tuple(number.get(v, -1) for v in operation.operands),
        tuple(number.get(v, -1) for v in operation.results),
        plain(operation.attributes),
        tuple(tuple(o.name for o in region.walk()) for region in operation.regions),
    )
