"""Data plane speed of one core: both fidelities against plain numpy, on one BLAS thread.

    python benchmarks/device.py [--quick]

Goals: a 2048 x 2048 x 2048 float32 matmul takes at most 1.15 times numpy's time at operator
fidelity, and at most 2 times at instruction fidelity.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from threadpoolctl import threadpool_limits

from trnsim.device.chip import load_chip
from trnsim.device.core import Core
from trnsim.device.dtypes import dtype_name
from trnsim.device.ops.fuse import fuse
from trnsim.device.ops.ir import Block, Operation, TensorType
from trnsim.device.ops.kernel import Kernel

CHIP = load_chip("trn2")


class Program:
    """A straight line of operators on arrays, written by hand."""

    def __init__(self, *arrays: np.ndarray) -> None:
        self.types = [TensorType(a.shape, dtype_name(a.dtype)) for a in arrays]
        self.arrays = dict(enumerate(arrays))
        self.operations: list[Operation] = []

    def value(self, shape: tuple[int, ...], dtype: str) -> int:
        self.types.append(TensorType(shape, dtype))
        return len(self.types) - 1

    def add(
        self, name: str, operands: tuple[int, ...], shape: tuple[int, ...], **attributes
    ) -> int:
        result = self.value(shape, self.types[operands[0]].dtype)
        self.operations.append(Operation(name, operands, (result,), attributes))
        return result

    def over_rows(self, name: str, x: int, start: float) -> int:
        """Reduction along the last axis, broadcast back."""
        shape, dtype = self.types[x].shape, self.types[x].dtype
        init, a, b, c = (self.value((), dtype) for _ in range(4))
        value = np.asarray(start, self.types[x].numpy)
        self.operations.append(Operation("constant", (), (init,), {"value": value}))
        block = Block((a, b), (Operation(name, (a, b), (c,)),), (c,))
        reduced = self.value(shape[:-1], dtype)
        axes = {"dimensions": (len(shape) - 1,)}
        self.operations.append(Operation("reduce", (x, init), (reduced,), axes, (block,)))
        kept = tuple(range(len(shape) - 1))
        return self.add("broadcast_in_dim", (reduced,), shape, dimensions=kept)


def matmul(size: int, dtype: type = np.float32) -> tuple[Program, Callable[[], object]]:
    a, b = (_random((size, size), dtype, i) for i in range(2))
    program = Program(a, b)
    program.add(
        "dot_general", (0, 1), a.shape,
        lhs_batch=(), rhs_batch=(), lhs_contracting=(1,), rhs_contracting=(0,),
    )  # fmt: skip
    if dtype is np.float32:
        out = np.empty_like(a)
        return program, lambda: np.matmul(a, b, out=out)
    return program, lambda: (a.astype(np.float32) @ b.astype(np.float32)).astype(dtype)


def elementwise(rows: int, columns: int) -> tuple[Program, Callable[[], object]]:
    a, b = (_random((rows, columns), np.float32, i) for i in range(2))
    program = Program(a, b)
    total = program.add("add", (0, 1), a.shape)
    program.add("multiply", (program.add("tanh", (total,), a.shape), 0), a.shape)
    return program, lambda: np.tanh(a + b) * a


def softmax(rows: int, columns: int) -> tuple[Program, Callable[[], object]]:
    x = _random((rows, columns), np.float32, 0)
    program = Program(x)
    shifted = program.add("subtract", (0, program.over_rows("maximum", 0, -np.inf)), x.shape)
    powers = program.add("exponential", (shifted,), x.shape)
    program.add("divide", (powers, program.over_rows("add", powers, 0.0)), x.shape)

    def plain() -> np.ndarray:
        e = np.exp(x - x.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)

    return program, plain


def _random(shape: tuple[int, ...], dtype: type, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype)


@dataclass(frozen=True)
class Timing:
    """Seconds of one pass."""

    numpy: float
    operator: float
    instruction: float
    cost: float
    modelled_ps: int


def measure(program: Program, plain: Callable[[], object], repeats: int) -> Timing:
    """Best of `repeats` for each way, taken in turn so that a busy machine is fair to all."""
    last = program.operations[-1].results[0]
    kernels = [k for k in fuse(program.operations, program.types, {last}) if isinstance(k, Kernel)]
    arrays = dict(program.arrays)
    for kernel in kernels:
        arrays |= {
            v: np.zeros(program.types[v].shape, program.types[v].numpy) for v in kernel.outputs
        }
    core, best, modelled = Core(CHIP), [float("inf")] * 3, 0
    start = time.perf_counter()
    for kernel in kernels:
        modelled += kernel.cost(CHIP, kernel.part(0, 1)).duration
    cost = time.perf_counter() - start

    def operator() -> None:
        for kernel in kernels:
            kernel.evaluate(arrays, kernel.part(0, 1))

    def instruction() -> None:
        for kernel in kernels:
            kernel.run(core, arrays, kernel.part(0, 1))

    for _ in range(repeats):
        for i, way in enumerate((plain, operator, instruction)):
            start = time.perf_counter()
            way()
            best[i] = min(best[i], time.perf_counter() - start)
    return Timing(best[0], best[1], best[2], cost, modelled)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small shapes, two repeats")
    quick = parser.parse_args().quick
    size, rows, repeats = (512, 1024, 2) if quick else (2048, 8192, 5)
    cases = {
        f"matmul {size}^3 f32": matmul(size),
        f"matmul {size}^3 bf16": matmul(size, ml_dtypes.bfloat16),
        f"tanh(a + b) * a [{rows}, 1024]": elementwise(rows, 1024),
        f"softmax [{rows}, 1024]": softmax(rows, 1024),
    }
    print(f"{'operator':32} {'numpy':>9} {'operator':>17} {'instruction':>17} "
          f"{'cost':>8} {'modelled':>10}")  # fmt: skip
    with threadpool_limits(1):
        for name, (program, plain) in cases.items():
            t = measure(program, plain, repeats)
            print(f"{name:32} {t.numpy * 1e3:6.1f} ms "
                  f"{1 / t.operator:6.1f}/s {t.operator / t.numpy:6.2f}x "
                  f"{1 / t.instruction:6.1f}/s {t.instruction / t.numpy:6.2f}x "
                  f"{t.cost * 1e3:5.1f} ms {t.modelled_ps / 1e6:7.1f} us")  # fmt: skip


if __name__ == "__main__":
    main()
