"""Loop nests of instructions: run with data, or timed without and fast-forwarded.

A nest is described once. `run_on` issues every instruction on a core with data. `cost_of` times the
same nest on a core without data; a run of alike iterations is simulated until it repeats exactly
(every start and end shifted by one constant), and the rest is jumped over, loop by loop from the
inside out. A loop that never becomes periodic is extrapolated from its last iterations.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from ..chip import Chip
from ..core import Core
from ..isa.base import Instruction
from ..memory import ITEMSIZE, Tensor, View
from .kernel import NOTHING_RESIDENT, Cost, Kernel, Layout, Part, Residency

ROTATION = 2
"""Sets of tiles that a loop's iterations take in turn: while one computes, the next loads."""

PATIENCE = 10
"""Groups of iterations to try for an exact period before extrapolating."""

PERIODS = (1, 2, 3)
"""Groups of iterations that a period may take."""

Step = "Instruction | Loop"


@dataclass(frozen=True, slots=True)
class Loop:
    """`count` iterations; `body(i)` gives the instructions and inner loops of the i-th.

    Iterations with equal `alike(i)` are the same instructions on other addresses: they cost the
    same. Tiles may alternate with i modulo `rotation`. `steady` equal periods in a row make the
    loop steady: one on few engines needs more, for what it waits for may still be on its way.
    """

    count: int
    body: Callable[[int], Iterable["Instruction | Loop"]]
    alike: Callable[[int], Hashable] = lambda i: None
    rotation: int = ROTATION
    steady: int = 2


def once(steps: Iterable["Instruction | Loop"]) -> Loop:
    """Steps as a loop of one iteration."""
    return Loop(1, lambda i: steps)


def tiles(start: int, stop: int, size: int) -> list[tuple[int, int]]:
    """[start, stop) cut into (start, length) pieces of `size`, the last one shorter."""
    return [(at, min(size, stop - at)) for at in range(start, stop, size)]


# ---- playing -------------------------------------------------------------------------------


def execute(core: Core, loop: Loop) -> None:
    """Issues every instruction, with values where the core has data.

    Of iterations that are alike, the first of each set of tiles is checked: the others only have
    other addresses.
    """
    with np.errstate(all="ignore"):
        _execute(core, loop, checked=False)


def _execute(core: Core, loop: Loop, checked: bool) -> None:
    known: set[Hashable] = set()
    for i in range(loop.count):
        key = (loop.alike(i), i % loop.rotation)
        again = checked or key in known
        known.add(key)
        for step in loop.body(i):
            if isinstance(step, Loop):
                _execute(core, step, again)
                continue
            if not again:
                step.check(core.chip)
            if core.data:
                step.execute()
            core.time(step)


def simulate(core: Core, loop: Loop) -> None:
    """Times the loop, jumping over what repeats."""
    i = 0
    while i < loop.count:
        stop = i + 1
        key = loop.alike(i)
        while stop < loop.count and loop.alike(stop) == key:
            stop += 1
        _simulate_alike(core, loop, i, stop)
        i = stop


def _iteration(core: Core, loop: Loop, i: int) -> None:
    for step in loop.body(i):
        if isinstance(step, Loop):
            simulate(core, step)
        else:
            step.check(core.chip)
            core.time(step)


def _simulate_alike(core: Core, loop: Loop, i: int, stop: int) -> None:
    group = loop.rotation
    if stop - i < (loop.steady + 1) * group:
        for j in range(i, stop):
            _iteration(core, loop, j)
        return
    marks, ends = [core.mark()], [core.timeline.end]
    while stop - i >= group:
        for j in range(i, i + group):
            _iteration(core, loop, j)
        i += group
        marks.append(core.mark())
        ends.append(core.timeline.end)
        jumped = _jump(core, loop, marks, ends, (stop - i) // group)
        i += jumped * group
        if jumped:
            break
    for j in range(i, stop):
        _iteration(core, loop, j)


def _jump(core: Core, loop: Loop, marks: list[Any], ends: list[int], left: int) -> int:
    """Fast-forwards up to `left` groups if the last ones repeat; returns how many."""
    for period in PERIODS:
        needed = loop.steady * period
        if len(marks) <= needed or left < period:
            continue
        shift = core.repeats(marks[-1 - needed :: period])
        if shift is not None:
            core.fast_forward(marks[-1 - period], shift, left // period)
            return left // period * period
    if len(marks) > PATIENCE + loop.steady and left:
        half = PATIENCE // 2
        shift = (ends[-1] - ends[-1 - half]) // half
        core.fast_forward(marks[-2], shift, left)
        return left
    return 0


# ---- what a nest is written with -----------------------------------------------------------


@dataclass
class Context:
    """A core, the operands, and the tiles that a nest allocates on the core.

    Tiles lie in the first `peak` bytes of each partition; the plan puts what stays in SBUF between
    kernels above them.
    """

    core: Core
    kernel: Kernel
    part: Part
    residency: Residency
    arrays: Mapping[int, np.ndarray] | None
    resident: dict[int, tuple[Tensor, Layout]]
    _values: dict[int, Tensor] = field(default_factory=dict)
    _held: list[tuple[Any, Tensor]] = field(default_factory=list)
    _next: int = 0
    peak: int = 0

    @property
    def chip(self) -> Chip:
        """The chip of the core."""
        return self.core.chip

    def tile(self, free: int | tuple[int, ...], dtype: str, name: str = "tile") -> Tensor:
        """[128, free...] in SBUF until the kernel ends."""
        shape = (128, *(free if isinstance(free, tuple) else (free,)))
        tensor = self._hold(self.core.sbuf, shape, dtype, name)
        self.peak = max(self.peak, tensor.address + tensor.footprint)
        if self.peak > self._floor:
            raise AssertionError(f"{self.kernel.name}: {name} lies over what stays in SBUF")
        return tensor

    @cached_property
    def _floor(self) -> int:
        """The lowest byte of what stays in SBUF."""
        held = _residents.get(self.core, {}).values()
        return min((tensor.address for tensor, _ in held), default=self.chip.sbuf_partition_bytes)

    def rotating(self, free: int | tuple[int, ...], dtype: str, name: str = "tile") -> list[Tensor]:
        """One tile for each set that iterations take in turn."""
        return [self.tile(free, dtype, f"{name}.{i}") for i in range(ROTATION)]

    def bank(self, free: int, dtype: str = "f32", name: str = "psum") -> Tensor:
        """[128, free] in PSUM until the kernel ends."""
        return self._hold(self.core.psum, (128, free), dtype, name)

    def _hold(self, memory: Any, shape: tuple[int, ...], dtype: str, name: str) -> Tensor:
        tensor = memory.allocate(shape, dtype, name)
        self._held.append((memory, tensor))
        return tensor

    def release(self) -> None:
        """Frees every tile of the kernel."""
        for memory, tensor in self._held:
            memory.free(tensor)
        self._held.clear()

    def value(self, value: int) -> Tensor:
        """The value's dense array in HBM, as one line of elements."""
        if value not in self._values:
            kind = self.kernel.types[value]
            array = None if self.arrays is None else self.arrays[value].reshape(-1)
            self._values[value] = self._adopt(array, (kind.size,), kind.dtype, f"%{value}")
        return self._values[value]

    def same(self, value: int, other: int) -> None:
        """Makes `value` another name of `other`'s memory."""
        self._values[value] = self.value(other)

    def table(self, array: np.ndarray, name: str) -> Tensor:
        """A constant in HBM that the compiler has laid there (row numbers of a DMA)."""
        kept = array if self.arrays is not None else None
        from ..dtypes import dtype_name

        return self._adopt(kept, array.shape, dtype_name(array.dtype), name)

    def _adopt(self, array: Any, shape: tuple[int, ...], dtype: str, name: str) -> Tensor:
        tensor = self.core.hbm.adopt(array, shape, dtype, name, self._next)
        self._next += -(-tensor.nbytes // 64) * 64
        return tensor

    def hbm(
        self, value: int, shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0
    ) -> View:
        """Elements of a value in HBM: `strides` and `offset` in elements, stride 0 repeats."""
        tensor = self.value(value)
        return strided(tensor, shape, strides, offset)

    def stays(self, value: int) -> bool:
        """Whether an output stays in SBUF and needs no store."""
        return value in self.residency.unstored


def strided(
    tensor: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0
) -> View:
    """Elements of a tensor in HBM: `strides` and `offset` in elements."""
    size = tensor.itemsize
    return View(tensor, shape, tuple(s * size for s in strides), offset * size, 0, tensor.dtype)


# ---- running and pricing -------------------------------------------------------------------

_residents: "WeakKeyDictionary[Core, dict[int, tuple[Tensor, Layout]]]" = WeakKeyDictionary()


def _resident_tensors(
    core: Core, kernel: Kernel, part: Part, residency: Residency
) -> dict[int, tuple[Tensor, Layout]]:
    """The core's resident values, with new tensors for the outputs that are to stay."""
    table = _residents.setdefault(core, {})
    places = dict(residency.places)
    for value in (*residency.inside, *residency.kept):
        layout = kernel.layout(value, part)
        if layout is None:
            raise AssertionError(f"{kernel.name} cannot hold value {value} in SBUF")
        if value in residency.kept or value not in table:
            shape, name = (128, layout.tiles, layout.columns), f"resident %{value}"
            tensor = core.sbuf.allocate(shape, layout.dtype, name, places[value])
            table[value] = tensor, layout
    return {v: table[v] for v in places}


def _play(
    kernel: Kernel,
    core: Core,
    arrays: Mapping[int, np.ndarray] | None,
    part: Part,
    residency: Residency,
    play: Callable[[Core, Loop], None],
) -> Cost:
    start = core.drain()
    busy, count = core.timeline.busy, core.instructions
    flops, traffic, core.table = core.flops, core.hbm_bytes, ""
    resident = _resident_tensors(core, kernel, part, residency)
    context = Context(core, kernel, part, residency, arrays, resident)
    try:
        nest = kernel.nest(context)
        play(core, nest)
    finally:
        context.release()
    for value in residency.freed:
        _residents[core].pop(value, None)
    end = core.drain()
    return Cost(
        duration=end - start,
        busy={e: t - busy[e] for e, t in core.timeline.busy.items() if t != busy[e]},
        instructions=core.instructions - count,
        hbm_bytes=core.hbm_bytes - traffic,
        flops=core.flops - flops,
        sbuf_bytes=context.peak,
    )


def run_on(
    kernel: Kernel,
    core: Core,
    arrays: Mapping[int, np.ndarray],
    part: Part,
    residency: Residency = NOTHING_RESIDENT,
) -> Cost:
    """Issues every instruction of the kernel's nest; see Kernel.run. A core without data needs no
    arrays."""
    if part.empty:
        return Cost(0)
    return _play(kernel, core, arrays if core.data else None, part, residency, execute)


_costs: dict[Hashable, Cost] = {}


def cost_of(
    kernel: Kernel, chip: Chip, part: Part, residency: Residency = NOTHING_RESIDENT
) -> Cost:
    """Time of the kernel's nest without data; remembered by the kernel's signature."""
    if part.empty:
        return Cost(0)
    key = (kernel.signature, _chip_key(chip), part, kernel.canonical(residency))
    if key not in _costs:
        core = Core(chip, data=False)
        core.watch()
        _costs[key] = _play(kernel, core, None, part, residency, simulate)
    return _costs[key]


@lru_cache(maxsize=32)
def _chip_key(chip: Chip) -> Hashable:
    return repr(chip)


def itemsize(dtype: str) -> int:
    """Bytes of an element by StableHLO name."""
    return ITEMSIZE[dtype]
