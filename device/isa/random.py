"""Random numbers of the Vector and GpSimd engines: a XORWOW generator for each lane.

XORWOW (Marsaglia, J. Stat. Soft. 8, 2003) has five words and a counter; a lane of GpSimd has one
generator, a lane of Vector four, used in turn (assumed). How the hardware seeds lanes from one
seed is not published: here by numpy's SeedSequence, so values are deterministic but not the
hardware's.
"""

from dataclasses import dataclass

import numpy as np

from ..chip import Chip
from ..memory import ITEMSIZE, View
from .base import ON_CHIP, lane_cycles
from .lanes import Lanes, Scalar, column, views
from .numerics import LANES, store

WORDS = 6
STREAMS = {"gpsimd": 1, "vector": 4}
_WEYL = np.uint32(362437)
_INTEGERS = ("i8", "i16", "i32", "ui8", "ui16", "ui32")
_UNIFORM = ("f8E4M3", "f8E5M2", "f16", "bf16", "f32", *_INTEGERS)  # dtypes of rand2
_RATE_V4 = 4  # 32-bit numbers per lane and cycle (trainium3_arch.rst)


class RandomState:
    """The generators of one engine: `words` is uint32 [128 lanes, streams, 6]."""

    def __init__(self, engine: str, seed: int = 0) -> None:
        self.engine = engine
        self.words = np.empty((LANES, STREAMS[engine], WORDS), np.uint32)
        self.seed(seed)

    def seed(self, seed: int) -> None:
        """All lanes from one number."""
        sequence = np.random.SeedSequence([seed & 0xFFFFFFFF, STREAMS[self.engine]])
        self.words[...] = sequence.generate_state(self.words.size).reshape(self.words.shape)

    def draw(self, lanes: slice, count: int) -> np.ndarray:
        """[lanes, count] random 32-bit words."""
        streams = self.words.shape[1]
        steps = -(-count // streams)
        state = self.words[lanes].transpose(2, 0, 1).copy()
        x, y, z, w, v, d = state
        out = np.empty((steps, lanes.stop - lanes.start, streams), np.uint32)
        for step in range(steps):
            t = x ^ (x >> np.uint32(2))
            x, y, z, w = y, z, w, v
            v = (v ^ (v << np.uint32(4))) ^ (t ^ (t << np.uint32(1)))
            d = d + _WEYL
            out[step] = d + v
        self.words[lanes] = np.stack([x, y, z, w, v, d]).transpose(1, 2, 0)
        return out.transpose(1, 0, 2).reshape(lanes.stop - lanes.start, -1)[:, :count]


def uniform(words: np.ndarray) -> np.ndarray:
    """Float32 in [0, 1) from 32-bit words: their upper 24 bits."""
    return (words >> np.uint32(8)).astype(np.float32) * np.float32(2**-24)


class Random(Lanes):
    """Base of the instructions that draw or set random numbers."""

    __slots__ = ()

    def check_draw(self, chip: Chip, dst: View, engines: tuple[str, ...]) -> None:
        """dst is in reach of an engine that has the instruction."""
        self.check_place(chip, "dst", dst, self.spaces(engines))

    def draw_cycles(self, chip: Chip, dst: View) -> int:
        """Cycles of drawing a word for each element."""
        if self.engine == "gpsimd":
            return chip.gpsimd_start_cycles + lane_cycles(chip, dst.free, dst)
        rate = _RATE_V4 if chip.generation >= 4 else 1
        return lane_cycles(chip, dst.free / rate, dst)


def _lanes(view: View) -> slice:
    return slice(view.partition, view.partition + view.shape[0])


@dataclass(frozen=True, slots=True, eq=False)
class Rng(Random):
    """dst = random bits: the least significant of 32 for narrower integers. Cost: N cycles."""

    dst: View
    state: RandomState
    engine: str = "vector"

    def reads(self) -> tuple[View, ...]:
        return ()

    def check(self, chip: Chip) -> None:
        self.check_draw(chip, self.dst, ("vector", "gpsimd"))
        if self.engine == "gpsimd":
            self.check_generation(chip, 3)
        if self.dst.dtype not in _INTEGERS:
            raise self.illegal(f"dst is {self.dst.dtype}; allowed: {', '.join(_INTEGERS)}")

    def cycles(self, chip: Chip) -> int:
        return self.draw_cycles(chip, self.dst)

    def execute(self) -> None:
        words = self.state.draw(_lanes(self.dst), self.dst.free)
        unsigned = np.dtype(f"u{ITEMSIZE[self.dst.dtype]}")
        out = self.dst.array
        out[...] = words.astype(unsigned).view(out.dtype).reshape(out.shape)


@dataclass(frozen=True, slots=True, eq=False)
class Rand2(Random):
    """dst = uniform numbers in [low, high], cast. NeuronCore-v4. Cost: N / 4 cycles."""

    dst: View
    low: Scalar
    high: Scalar
    state: RandomState
    engine = "vector"

    def reads(self) -> tuple[View, ...]:
        return views(self.low, self.high)

    def check(self, chip: Chip) -> None:
        self.check_generation(chip, 4)
        self.check_draw(chip, self.dst, ("vector",))
        self.check_dtype("dst", self.dst, *_UNIFORM)
        for name, value in (("min", self.low), ("max", self.high)):
            self.check_lanes(chip, name, value, self.dst)
            self.check_float_operand(name, value)
        if not isinstance(self.low, View) and not isinstance(self.high, View):
            if not self.low < self.high:
                raise self.illegal(f"min is {self.low} and max {self.high}; min < max is needed")

    def cycles(self, chip: Chip) -> int:
        return self.draw_cycles(chip, self.dst)

    def execute(self) -> None:
        drawn = uniform(self.state.draw(_lanes(self.dst), self.dst.free))
        low, high = (np.float32(column(v, drawn)) for v in (self.low, self.high))
        store(self.dst, low + drawn * (high - low))


@dataclass(frozen=True, slots=True, eq=False)
class Dropout(Random):
    """dst = src with each element set to 0 with its partition's probability. Cost: N cycles."""

    dst: View
    src: View
    probability: Scalar
    state: RandomState
    engine = "vector"

    def reads(self) -> tuple[View, ...]:
        return (self.src, *views(self.probability))

    def check(self, chip: Chip) -> None:
        self.check_draw(chip, self.dst, ("vector",))
        self.check_place(chip, "data", self.src)
        self.check_alike("data", self.src, "dst", self.dst)
        if self.src.dtype != self.dst.dtype:
            raise self.illegal(f"data is {self.src.dtype} and dst {self.dst.dtype}; must be equal")
        self.check_lanes(chip, "prob", self.probability, self.src)
        if isinstance(self.probability, View):
            integers = not self.src.dtype.startswith(("f", "bf"))
            if integers and self.probability.dtype != "f32":
                raise self.illegal(
                    f"prob is {self.probability.dtype}; with {self.src.dtype} data it must be f32"
                )

    def cycles(self, chip: Chip) -> int:
        return lane_cycles(chip, self.src.free, self.src, self.dst)

    def execute(self) -> None:
        src, dst = self.src.array, self.dst.array
        drawn = uniform(self.state.draw(_lanes(self.src), self.src.free)).reshape(src.shape)
        kept = drawn >= np.float32(column(self.probability, drawn))
        zero = np.zeros((), dst.dtype)
        dst[...] = np.where(kept, src, zero).reshape(dst.shape)


@dataclass(frozen=True, slots=True, eq=False)
class SetSeed(Random):
    """Seeds the Vector engine from a [1, 1] tile of 32 bits. Cost (assumed): MIN_II."""

    src: View
    state: RandomState
    engine = "vector"

    def writes(self) -> tuple[View, ...]:
        return ()

    def check(self, chip: Chip) -> None:
        self.check_place(chip, "src_seeds", self.src, ON_CHIP)
        if self.src.size != 1 or ITEMSIZE[self.src.dtype] != 4:
            raise self.illegal(
                f"src_seeds is {self.src.dtype}{list(self.src.shape)}; one 32-bit value is needed"
            )

    def cycles(self, chip: Chip) -> int:
        return chip.min_instruction_cycles

    def execute(self) -> None:
        self.state.seed(int(self.src.array.reshape(-1).view(np.uint32)[0]))


class StateMove(Random):
    """Base of the moves of whole generator states: 6 words per generator and lane."""

    __slots__ = ()

    def check_state(self, chip: Chip, operand: str, view: View) -> None:
        """The tile has the words of every lane's generators."""
        self.check_generation(chip, 4 if self.engine == "vector" else 3)
        if self.engine not in STREAMS:
            raise self.illegal(f"engine is {self.engine}; allowed: {', '.join(STREAMS)}")
        words = WORDS * STREAMS[self.engine]
        if view.dtype != "ui32" or view.free != words:
            raise self.illegal(
                f"{operand} is {view.dtype}{list(view.shape)}; ui32 [P, {words}] is needed on "
                f"{self.engine}"
            )


@dataclass(frozen=True, slots=True, eq=False)
class SetState(StateMove):
    """The generators of the lanes = src, 6 words each. Cost (assumed): MIN_II."""

    src: View
    state: RandomState
    engine: str = "gpsimd"

    def writes(self) -> tuple[View, ...]:
        return ()

    def check(self, chip: Chip) -> None:
        self.check_state(chip, "src_seeds", self.src)
        self.check_place(chip, "src_seeds", self.src, ("sbuf",))

    def cycles(self, chip: Chip) -> int:
        return chip.min_instruction_cycles

    def execute(self) -> None:
        words = self.src.array.reshape(self.src.shape[0], -1, WORDS)
        self.state.words[_lanes(self.src)] = words


@dataclass(frozen=True, slots=True, eq=False)
class GetState(StateMove):
    """dst = the generators of the lanes, 6 words each. Cost (assumed): MIN_II."""

    dst: View
    state: RandomState
    engine: str = "gpsimd"

    def reads(self) -> tuple[View, ...]:
        return ()

    def check(self, chip: Chip) -> None:
        self.check_state(chip, "dst", self.dst)
        spaces = ("sbuf",) if self.engine == "gpsimd" or chip.generation < 4 else ON_CHIP
        self.check_place(chip, "dst", self.dst, spaces)

    def cycles(self, chip: Chip) -> int:
        return chip.min_instruction_cycles

    def execute(self) -> None:
        out = self.dst.array
        out[...] = self.state.words[_lanes(self.dst)].reshape(out.shape)
