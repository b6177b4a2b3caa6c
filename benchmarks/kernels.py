"""NKI kernels: modelled times against published ones, and the simulator's own speed.

    python benchmarks/kernels.py [--quick]

Goals: the 2048^3 bf16 matmul with values in 2 s, without in 0.5 s; 20,000 small instructions a
second with values. `order` says which end of the bracket a point is compared with: the program's
where the kernel was compiled without instruction scheduling, the scheduler's where it was with.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from threadpoolctl import threadpool_limits

from trnsim.device.nki import simulate
from trnsim.device.nki.result import SimulationResult

sys.path.insert(0, str(Path(__file__).parent))

import nki_published as kernels  # noqa: E402

RANDOM = np.random.default_rng(0)
BF16 = ml_dtypes.bfloat16
PEAK = 78.6e12  # FLOP/s of bf16, which the published MFU is of


@dataclass(frozen=True)
class Point:
    """A published figure: `value` of `unit`, within `tolerance` of which the model should be."""

    name: str
    kernel: Any
    chip: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: Any
    value: float
    unit: str
    measure: Callable[[int], float]  # of a time in picoseconds
    order: str  # program or greedy
    tolerance: float

    def run(self) -> SimulationResult:
        """The kernel's time; values are not needed."""
        arrays = [np.zeros(shape, self.dtype) for shape in self.shapes]
        return simulate(self.kernel, *arrays, chip=self.chip, data=False)

    def modelled(self, result: SimulationResult) -> tuple[float, float]:
        """(what is compared, what the other order gives)."""
        greedy, program = map(self.measure, result.bracket)
        return (program, greedy) if self.order == "program" else (greedy, program)


def mfu(flops: float) -> Callable[[int], float]:
    """Percent of the peak at which so many operations take a time."""
    return lambda ps: 100 * flops / (ps / 1e12 * PEAK)


def per(count: int, launch: int = 0) -> Callable[[int], float]:
    """Nanoseconds for one of `count`, without the launch."""
    return lambda ps: (ps - launch) / count / 1e3


SQUARE = ((2048, 2048), (2048, 2048))
MAMBA = ((4096, 512), (4096, 512), (4096, 16), (16, 512), (16, 512))
STREAM = ((8192, 128), (8192, 8192))  # one of the tutorial's 32 rows of tiles
LAUNCH = 3_200_000
POINTS = (
    Point("matmul lhsT.rhs 2048^3 bf16", kernels.matmul_t, "trn2", SQUARE, BF16, 90.92, "% MFU",
          mfu(2 * 2048**3), "program", 0.05),
    Point("matmul lhs.rhs 2048^3 bf16", kernels.matmul_n, "trn2", SQUARE, BF16, 89.26, "% MFU",
          mfu(2 * 2048**3), "program", 0.05),
    Point("mamba v1, 4096 channels, 512", kernels.mamba_v1, "trn1", MAMBA, np.float32, 2.34, "ms",
          lambda ps: ps / 1e9, "greedy", 0.2),
    Point("mamba v2, 4096 channels, 512", kernels.mamba_v2, "trn1", MAMBA, np.float32, 1.61, "ms",
          lambda ps: ps / 1e9, "greedy", 0.2),
    Point("matmul f32, loads before each", kernels.load_each, "trn2", STREAM, np.float32, 1217.4,
          "ns each", per(1024, LAUNCH), "greedy", 0.05),
    Point("matmul f32, lhsT loaded once", kernels.load_rows, "trn2", STREAM, np.float32, 859.0,
          "ns each", per(1024, LAUNCH), "greedy", 0.05),
    Point("nc_matmul f32 128x128x512", kernels.back_to_back, "trn2", ((128, 128), (128, 512)),
          np.float32, 859.0, "ns each", per(kernels.REPEATS, LAUNCH), "program", 0.01),
    Point("empty kernel", kernels.empty, "trn2", ((1, 1),), np.float32, 3.2, "us",
          lambda ps: ps / 1e6, "program", 0.01),
)  # fmt: skip


def points() -> bool:
    """A table of published and modelled figures; whether all are within their tolerances."""
    print(
        f"{'kernel':30s} chip  {'published':>14s} {'modelled':>9s}  off      order    other order"
    )
    good = True
    for point in POINTS:
        value, other = point.modelled(point.run())
        off = value / point.value - 1
        good &= abs(off) <= point.tolerance
        print(
            f"{point.name:30s} {point.chip}  {point.value:7g} {point.unit:7s} {value:8.4g}"
            f"  {off:+6.1%}  {point.order:8s} {other:8.4g}"
        )
    return good


# ---- the simulator's own speed ---------------------------------------------------------------


def seconds(run: Callable[[], Any], times: int) -> tuple[float, Any]:
    """The shortest of several runs in seconds of the processor, and what it gave."""
    best, result = float("inf"), None
    for _ in range(times):
        start = time.process_time()
        result = run()
        best = min(best, time.process_time() - start)
    return best, result


def speed(times: int) -> None:
    """Seconds of one processor, beside numpy on one thread for the same values."""
    a, b = (RANDOM.standard_normal((2048, 2048), np.float32).astype(BF16) for _ in range(2))
    with threadpool_limits(1):
        plain, want = seconds(lambda: a.astype(np.float32).T @ b.astype(np.float32), times)
    full, result = seconds(lambda: simulate(kernels.matmul_t, a, b), times)
    error = np.abs(result.output.astype(np.float32) - want).max() / np.abs(want).max()
    bare, other = seconds(lambda: simulate(kernels.matmul_t, a, b, data=False), times)
    again, _ = seconds(lambda: result.retimed(result.chip), times)
    order, _ = seconds(lambda: SimulationResult.bracket.func(result), times)  # type: ignore[attr-defined]
    assert other.time == result.time and error < 0.01
    print(f"\nmatmul 2048^3 bf16, {result.instructions:,} instructions, one processor:")
    print(
        f"  with values {full:.2f} s (numpy {plain:.2f} s, largest error {error:.1e} of the range)"
    )
    print(f"  without     {bare:.2f} s, retimed {again:.2f} s, scheduled {order:.2f} s")
    x = RANDOM.standard_normal((128, 8), np.float32)
    small, result = seconds(lambda: simulate(kernels.small, x), times)
    with threadpool_limits(1):
        plain, want = seconds(lambda: kernels.small_values(x), times)
    assert np.array_equal(result.output, want)
    rates = [result.instructions / spent for spent in (small, plain)]
    print("small instructions with values: {:,.0f}/s (numpy {:,.0f}/s)".format(*rates))


def main() -> None:
    """Both tables; exits with 1 if a point is off by more than its tolerance."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one run of each instead of three")
    arguments = parser.parse_args()
    good = points()
    speed(1 if arguments.quick else 3)
    sys.exit(not good)


if __name__ == "__main__":
    main()
