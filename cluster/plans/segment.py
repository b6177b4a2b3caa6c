"""Segments: the straight-line compute of a training program between exchanges.

A segment is a JAX function of one rank's arrays, lowered to StableHLO once for each set of types
and compiled to kernels once for each chip and LNC. The same kernels are priced and run.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from trnsim.device.chip import Chip
from trnsim.device.ops.ir import Module, TensorType

from ..clocks import Clocks, StepTime
from ..compile import compile_program
from ..frontends.jax import lower_local
from ..program import Buffer, RankProgram, RunKernel


@dataclass(frozen=True, eq=False)
class Segment:
    """A lowered function of one rank: types of its arguments are those of the module's body."""

    name: str
    module: Module
    _programs: dict[tuple[Chip, int], RankProgram] = field(default_factory=dict, repr=False)
    _times: dict[tuple[Chip, int], StepTime] = field(default_factory=dict, repr=False)

    @property
    def arguments(self) -> tuple[TensorType, ...]:
        """Types of the arguments."""
        return tuple(self.module.types[v] for v in self.module.body.arguments)

    @property
    def results(self) -> tuple[TensorType, ...]:
        """Types of the results."""
        return tuple(self.module.types[v] for v in self.module.body.returns)

    def program(self, chip: Chip, lnc: int) -> RankProgram:
        """The kernels of a rank of `lnc` physical cores."""
        key = (chip, lnc)
        if key not in self._programs:
            calls: Any = _NoCalls()
            self._programs[key] = compile_program(self.module, chip, lnc, calls)
        return self._programs[key]

    def time(self, chip: Chip, lnc: int) -> StepTime:
        """Modelled time of one run on a rank alone: duration, engines, HBM traffic."""
        key = (chip, lnc)
        if key not in self._times:
            program = self.program(chip, lnc)
            self._times[key] = Clocks(1, lnc).step(program, [{}], _no_price)
        return self._times[key]

    def run(self, inputs: Sequence[np.ndarray], chip: Chip, lnc: int) -> list[np.ndarray]:
        """The results on arrays: every kernel, part by part, as the cores of a rank do."""
        program = self.program(chip, lnc)
        cores = _arrays(program)
        for arrays in cores:
            for value, constant in program.constants.items():
                arrays[value][...] = constant
            for value, given in zip(program.arguments, inputs, strict=True):
                arrays[value][...] = given
        for step in program.steps:
            if isinstance(step, RunKernel):
                for arrays, part in zip(cores, step.parts, strict=True):
                    if not part.empty:
                        step.kernel.evaluate(arrays, part)
        return [cores[0][v].copy() for v in program.results]


def _arrays(program: RankProgram) -> list[dict[int, np.ndarray]]:
    """For each physical core its values' homes in one memory, which reads as NaN at first."""
    memory = np.full(program.arena_bytes, 255, np.uint8)

    def home(buffer: Buffer, core: int) -> np.ndarray:
        start, stop = buffer.interval(core)
        return memory[start:stop].view(buffer.type.numpy).reshape(buffer.type.shape)

    return [
        {value: home(buffer, core) for value, buffer in program.buffers.items()}
        for core in range(program.lnc)
    ]


class _NoCalls:
    """Segments have no collectives."""

    def estimate(self, nbytes: int) -> int:
        raise AssertionError("a segment with a collective")


def _no_price(*_: Any) -> np.ndarray:
    raise AssertionError("a segment with a collective")


@cache
def segment(function: Callable[..., Any], types: tuple[TensorType, ...]) -> Segment:
    """The segment of a JAX function of arrays of these types. Equal calls give the same object."""
    name = getattr(function, "__name__", "segment")
    return Segment(name, lower_local(function, types, name))
