"""Operator programs run kernel by kernel, at both fidelities: what the tests of kernels compare."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from trnsim.cluster.frontends.jax import host_array
from trnsim.device.chip import load_chip
from trnsim.device.core import Core
from trnsim.device.ops.contract import contract
from trnsim.device.ops.evaluate import evaluate_block
from trnsim.device.ops.fuse import fuse
from trnsim.device.ops.ir import Block, Module, Operation
from trnsim.device.ops.kernel import Kernel, Residency
from trnsim.device.ops.recognise import recognise
from trnsim.device.ops.residency import plan_residency
from trnsim.device.ops.simplify import simplify

from .stablehlo import module

CHIP = load_chip("trn2")


class Fused:
    """A function's program on one device as kernels, and arrays to run it on."""

    def __init__(self, function: Callable, *args: Any) -> None:
        self.module: Module = simplify(contract(recognise(module(function, *args))))
        self.inputs = [host_array(leaf) for leaf in jax.tree.leaves(args)]
        self.types, body = self.module.types, self.module.body
        self.items = fuse(body.operations, self.types, body.returns)

    @property
    def kernels(self) -> list[Kernel]:
        """The kernels, without foreign operators."""
        return [item for item in self.items if isinstance(item, Kernel)]

    def expected(self) -> list[np.ndarray]:
        """Results by the reference interpreter."""
        return evaluate_block(self.module.body, self.types, self.inputs)

    def plans(self, cores: int) -> list[list[Residency]]:
        """Residency of each core."""
        sequence = [
            (item, tuple(item.part(c, cores) for c in range(cores)))
            if isinstance(item, Kernel)
            else item
            for item in self.items
        ]
        returns = set(self.module.body.returns)
        return [plan_residency(sequence, core, returns, CHIP) for core in range(cores)]

    def evaluate(self, cores: int = 1) -> list[np.ndarray]:
        """Results at operator fidelity."""

        def step(kernel: Kernel, core: int, place: int, arrays: dict[int, np.ndarray]) -> None:
            kernel.evaluate(arrays, kernel.part(core, cores))

        return self._through(cores, step)

    def run(self, cores: int = 1) -> tuple[list[np.ndarray], list[int]]:
        """Results at instruction fidelity with residency, and each core's kernel time in ps."""
        devices, plans = [Core(CHIP) for _ in range(cores)], self.plans(cores)
        times = [0] * cores

        def step(kernel: Kernel, core: int, place: int, arrays: dict[int, np.ndarray]) -> None:
            part = kernel.part(core, cores)
            times[core] += kernel.run(devices[core], arrays, part, plans[core][place]).duration

        return self._through(cores, step), times

    def cost(self, cores: int = 1) -> list[int]:
        """Each core's kernel time in ps at operator fidelity, with residency."""
        plans = self.plans(cores)
        return [
            sum(
                item.cost(CHIP, item.part(core, cores), plans[core][place]).duration
                for place, item in enumerate(self.items)
                if isinstance(item, Kernel)
            )
            for core in range(cores)
        ]

    def _through(self, cores: int, step: Callable[..., None]) -> list[np.ndarray]:
        arrays = dict(zip(self.module.body.arguments, self.inputs, strict=True))
        arrays = {v: np.ascontiguousarray(a) for v, a in arrays.items()}
        for place, item in enumerate(self.items):
            if isinstance(item, Operation):
                self._foreign(item, arrays)
                continue
            for value in item.outputs:
                kind = self.types[value]
                arrays[value] = np.zeros(kind.shape, kind.numpy)
            for core in range(cores):
                step(item, core, place, arrays)
        return [arrays[v] for v in self.module.body.returns]

    def _foreign(self, item: Operation, arrays: dict[int, np.ndarray]) -> None:
        results = evaluate_block(Block((), (item,), item.results), self.types, [], dict(arrays))
        for value, result in zip(item.results, results, strict=True):
            arrays[value] = np.ascontiguousarray(result)


def assert_close(
    found: Sequence[np.ndarray], expected: Sequence[np.ndarray], tolerance: float
) -> None:
    """Floats within a tolerance relative to the largest value; others exactly."""
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        if a.dtype.kind in "biu":
            np.testing.assert_array_equal(a, b)
        elif a.size:
            wide = b.astype(np.float64)
            scale = np.nanmax(np.abs(wide)) or 1.0
            difference = np.abs(a.astype(np.float64) - wide)
            assert np.nanmax(difference) <= tolerance * scale
            np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
