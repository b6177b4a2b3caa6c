"""The Tensor engine: matmul and transpose on a 128 x 128 systolic array."""

from dataclasses import dataclass

import numpy as np

from ..arithmetic import convert
from ..chip import Chip
from ..dtypes import is_float
from ..memory import ITEMSIZE, View
from .base import Instruction, is_wide

FLOATS = frozenset({"f32", "bf16", "f16", "f8E4M3", "f8E4M3FN", "f8E5M2", "f8E3M4"})
_FLOAT32 = np.dtype(np.float32)
_scratch: dict[tuple[int, ...], np.ndarray] = {}


@dataclass(frozen=True, slots=True, eq=False)
class Matmul(Instruction):
    """dst[M, N] = stationary[K, M].T @ moving[K, N], or += with `accumulate`, in float32.

    stationary and moving in SBUF with K on partitions, dst in one PSUM bank. With `double_row`
    (fp8, NeuronCore v3 and later) stationary is [K, 2, M] and moving [K, 2, N]: two rows of the
    contraction per cell, at the time of one.
    Cost: max(N, 64) cycles, x 4 for float32; the next stationary loads in the background.
    """

    dst: View
    stationary: View
    moving: View
    accumulate: bool = False
    double_row: bool = False
    engine = "tensor"

    def reads(self) -> tuple[View, ...]:
        return self.stationary, self.moving

    @property
    def flops(self) -> int:  # type: ignore[override]
        """Multiplications and additions."""
        return 2 * self.stationary.size * self.moving.shape[-1]

    def check(self, chip: Chip) -> None:
        dst, stationary, moving = self.dst, self.stationary, self.moving
        self.check_place(chip, "stationary", stationary, ("sbuf",))
        self.check_place(chip, "moving", moving, ("sbuf",))
        self.check_place(chip, "dst", dst, ("psum",))
        self._check_shapes(chip)
        self._check_dtypes(chip)
        check_banks(self, chip)

    def _check_shapes(self, chip: Chip) -> None:
        dst, stationary, moving = self.dst.shape, self.stationary.shape, self.moving.shape
        axes = 3 if self.double_row else 2
        if not len(stationary) == len(moving) == axes or len(dst) != 2:
            raise self.illegal(
                f"stationary {list(stationary)}, moving {list(moving)} and dst {list(dst)} must "
                f"have {axes}, {axes} and 2 axes"
            )
        if stationary[:-1] != moving[:-1]:
            raise self.illegal(
                f"stationary has {stationary[0]} partitions and moving {moving[0]}: "
                "the contraction must be equal"
            )
        if stationary[-1] > chip.stationary_free_max:
            raise self.illegal(
                f"stationary free size is {stationary[-1]}; limit: {chip.stationary_free_max}"
            )
        if moving[-1] > chip.moving_free_max:
            raise self.illegal(f"moving free size is {moving[-1]}; limit: {chip.moving_free_max}")
        if dst != (stationary[-1], moving[-1]):
            raise self.illegal(
                f"dst has shape {list(dst)}; stationary and moving give "
                f"[{stationary[-1]}, {moving[-1]}]"
            )

    def _check_dtypes(self, chip: Chip) -> None:
        left, right, out = self.stationary.dtype, self.moving.dtype, self.dst.dtype
        for operand, dtype in (("stationary", left), ("moving", right)):
            if dtype not in FLOATS:
                raise self.illegal(f"{operand} is {dtype}; allowed: {', '.join(sorted(FLOATS))}")
        if (left == "f32") != (right == "f32"):
            raise self.illegal(f"stationary is {left} and moving {right}; f32 pairs only with f32")
        if out != "f32" and not (out == "bf16" and chip.generation >= 4):
            allowed = "f32 or bf16" if chip.generation >= 4 else "f32"
            raise self.illegal(f"dst is {out}; a matmul writes {allowed} on {chip.name}")
        if self.double_row and (chip.generation < 3 or ITEMSIZE[left] + ITEMSIZE[right] != 2):
            raise self.illegal(
                f"double_row needs fp8 operands on NeuronCore v3 or later, not {left} and {right} "
                f"on {chip.name}"
            )

    def cycles(self, chip: Chip) -> int:
        cycles = max(
            self.moving.shape[-1],
            chip.matmul_init_cycles,
            -(-self.stationary.shape[-1] // chip.load_stationary_speedup),
        )
        if self.moving.dtype == "f32":
            cycles *= chip.matmul_fp32_factor
        return cycles * chip.strided_access_factor if is_wide(chip, self.moving) else cycles

    def execute(self) -> None:
        stationary, moving, dst = self.stationary.array, self.moving.array, self.dst.array
        if self.double_row:
            stationary = stationary.reshape(-1, stationary.shape[-1])
            moving = moving.reshape(-1, moving.shape[-1])
        if moving.dtype != _FLOAT32:
            stationary, moving = convert(stationary, _FLOAT32), convert(moving, _FLOAT32)
        if dst.dtype == _FLOAT32 and not self.accumulate:
            np.matmul(stationary.T, moving, out=dst)
            return
        product = np.matmul(stationary.T, moving, out=_buffer(dst.shape))
        if self.accumulate:
            np.add(dst, product, out=dst if dst.dtype == _FLOAT32 else product, dtype=_FLOAT32)
        if dst.dtype != _FLOAT32:
            dst[...] = product


@dataclass(frozen=True, slots=True, eq=False)
class Transpose(Instruction):
    """dst[F, P] = src[P, F].T, as a pass of the Tensor engine: src in SBUF, dst in PSUM.

    P and F up to 128. From NeuronCore v3 on the bits are kept and dst has src's dtype (2 or 4
    bytes); on v2 it is a matmul by the identity, which writes float32.
    Cost: max(P, 64) cycles; for 4 bytes as a float32 matmul on v2, half of that later.
    """

    dst: View
    src: View
    engine = "tensor"

    def check(self, chip: Chip) -> None:
        dst, src = self.dst, self.src
        self.check_place(chip, "src", src, ("sbuf",))
        self.check_place(chip, "dst", dst, ("psum",))
        if len(src.shape) != 2 or dst.shape != src.shape[::-1]:
            raise self.illegal(
                f"dst has shape {list(dst.shape)}; src {list(src.shape)} transposed is "
                f"{list(src.shape[::-1])}"
            )
        if src.shape[1] > chip.partitions:
            raise self.illegal(f"src free size is {src.shape[1]}; limit: {chip.partitions}")
        self._check_dtypes(chip)
        check_banks(self, chip)

    def _check_dtypes(self, chip: Chip) -> None:
        src, dst = self.src.dtype, self.dst.dtype
        if chip.generation >= 3:
            if dst != src or ITEMSIZE[src] not in (2, 4):
                raise self.illegal(f"src is {src} and dst {dst}; one dtype of 2 or 4 bytes")
        elif not is_float(src) or dst != "f32":
            raise self.illegal(
                f"src is {src} and dst {dst}; on {chip.name} floats only, written as f32"
            )

    def cycles(self, chip: Chip) -> int:
        cycles = max(self.src.shape[0], chip.matmul_init_cycles)
        if ITEMSIZE[self.src.dtype] == 4:
            factor = chip.matmul_fp32_factor
            cycles *= factor if chip.generation < 3 else max(factor // 2, 1)
        return cycles

    def execute(self) -> None:
        self.dst.array[...] = convert(self.src.array, self.dst.array.dtype).T


def check_banks(instruction: Matmul | Transpose, chip: Chip) -> None:
    """dst lies in one PSUM bank, or, where a result may be longer, starts at one."""
    start, stop = instruction.dst.interval
    size = chip.psum_bank_bytes
    if start // size == (stop - 1) // size:
        return
    if stop - start > size and chip.moving_free_max > size // 4 and start % size == 0:
        return
    raise instruction.illegal(
        f"dst takes bytes {start} to {stop} of each partition; limit: one PSUM bank of {size} B"
    )


def _buffer(shape: tuple[int, ...]) -> np.ndarray:
    """Float32 scratch of a shape, kept: a fresh one costs page faults on every matmul."""
    found = _scratch.get(shape)
    if found is None:
        if len(_scratch) > 64:
            _scratch.clear()
        found = _scratch[shape] = np.empty(shape, np.float32)
    return found
