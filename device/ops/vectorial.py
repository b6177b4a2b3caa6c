"""Kernels of one operator that stream through the lane engines.

Values come from the operator's reference semantics. Time: operands are loaded in tiles of 128
partitions, every element of the work costs some cycles on one engine, and results are stored.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..chip import Chip
from ..dtypes import is_float
from .single import SingleKernel

SORT_MAX = 16_384
"""Elements per row that a sort can hold on chip (max8 and find_index8 have this limit)."""

THREEFRY_OPERATIONS = 20 * 5 + 5 * 3
"""Per block of two words: 20 rounds of add, two shifts, or, xor; five key injections."""

PHILOX_OPERATIONS = 10 * 8
"""Per block of four words: 10 rounds of two wide products and the mixing."""


@dataclass(frozen=True, slots=True)
class Work:
    """Cycles of `engine` for each of `elements`, spread over the partitions."""

    engine: str
    elements: int
    cycles: float


@dataclass(frozen=True, kw_only=True, eq=False)
class LaneKernel(SingleKernel):
    """An operator whose instructions are modelled as one stream."""

    def work(self, chip: Chip) -> Work:
        """What the engines have to do."""
        return WORK[self.name](self, chip)

    def nest(self, context: Any) -> Any:
        from .vectorial_nest import nest

        return nest(self, context)


def _reduce(kernel: LaneKernel, chip: Chip) -> Work:
    """Variadic reduce (argmax): a comparison and a select for each operand, per element."""
    inputs = len(kernel.sources) // 2
    cycles = chip.vector_two_input_factor * (1 + 2 * inputs)
    return Work("vector", kernel.operand_type(0).size, cycles)


def _window(kernel: LaneKernel, chip: Chip) -> Work:
    """One two-input operator per window position; a running reduction takes log2 steps."""
    window = kernel.attributes["window_dimensions"]
    result = kernel.result_type
    steps = 1
    for size, extent in zip(window, result.shape, strict=True):
        steps += math.ceil(math.log2(size)) if size >= max(extent, 3) else size - 1
    exact = is_float(result.dtype)
    return Work("vector" if exact else "gpsimd", result.size, chip.vector_two_input_factor * steps)


def _select_and_scatter(kernel: LaneKernel, chip: Chip) -> Work:
    """Find the chosen element of every window, then add the source there."""
    window = math.prod(kernel.attributes["window_dimensions"])
    return Work("vector", kernel.operand_type(1).size, chip.vector_two_input_factor * 3 * window)


def _random(kernel: LaneKernel, chip: Chip) -> Work:
    """Threefry and Philox in 32-bit integer instructions of GpSimd."""
    philox = kernel.attributes["algorithm"] == "PHILOX"
    each = PHILOX_OPERATIONS / 4 if philox else THREEFRY_OPERATIONS / 2
    bits = kernel.types[kernel.operation.results[1]]
    return Work("gpsimd", bits.nbytes // 4, each)


def _sort(kernel: LaneKernel, chip: Chip) -> Work:
    """A bitonic network along the axis: comparison and selects per stage and operand."""
    extent = kernel.operand_type(0).shape[kernel.attributes["dimension"]]
    levels = math.ceil(math.log2(max(extent, 2)))
    stages = levels * (levels + 1) // 2
    cycles = chip.vector_two_input_factor * (1 + 2 * len(kernel.sources)) * stages / 2
    return Work("vector", kernel.operand_type(0).size, cycles)


def _topk(kernel: LaneKernel, chip: Chip) -> Work:
    """4 n + k cycles per partition (nki.isa docstring)."""
    extent = kernel.operand_type(0).shape[-1]
    cycles = 4 + kernel.attributes["k"] / extent
    return Work("gpsimd", kernel.operand_type(0).size, cycles)


def _dot(kernel: LaneKernel, chip: Chip) -> Work:
    """Integer products: a multiplication and an addition per term, exact on GpSimd only."""
    shape = kernel.operand_type(0).shape
    depth = math.prod(shape[d] for d in kernel.attributes["lhs_contracting"])
    return Work("gpsimd", kernel.result_type.size * depth, 2)


def _convolution(kernel: LaneKernel, chip: Chip) -> Work:
    """Matmuls over input features for every window position, at the tensor engine's full rate."""
    a, weights = kernel.attributes, kernel.operand_type(1)
    out_features = weights.shape[a["kernel_output_feature"]]
    terms = kernel.result_type.size * (weights.size // max(out_features, 1))
    factor = chip.matmul_fp32_factor if weights.dtype == "f32" else 1
    return Work("tensor", terms, factor / chip.partitions)


def _elements(kernel: LaneKernel, chip: Chip) -> Work:
    """Gather and scatter of windows that are not rows: one cycle per element moved."""
    moved = max(kernel.result_type.size, kernel.operand_type(len(kernel.sources) - 1).size)
    return Work("gpsimd", moved, 2)


WORK: dict[str, Callable[[LaneKernel, Chip], Work]] = {
    "reduce": _reduce,
    "reduce_window": _window,
    "select_and_scatter": _select_and_scatter,
    "rng_bit_generator": _random,
    "sort": _sort,
    "topk": _topk,
    "dot_general": _dot,
    "convolution": _convolution,
    "gather": _elements,
    "scatter": _elements,
}


def fits(kernel: LaneKernel) -> bool:
    """Whether the device can do it: a sorted row has to lie in SBUF."""
    if kernel.name == "sort":
        return kernel.operand_type(0).shape[kernel.attributes["dimension"]] <= SORT_MAX
    if kernel.name == "topk":
        return kernel.operand_type(0).shape[-1] <= SORT_MAX
    return kernel.name in WORK
