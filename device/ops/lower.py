"""Which kernel an operator becomes when it is not rowwise."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .attention import ATTENTION, AttentionKernel, check
from .group import Node, reducer
from .host import HostKernel
from .ir import TensorType
from .kernel import Kernel
from .matmul import matmul_kernel
from .movement import MOVEMENTS
from .movement_nest import is_row_move
from .reduction import ReductionKernel
from .single import single_fields
from .strided import Strided
from .vectorial import LaneKernel, fits


def kernel(
    node: Node,
    constants: Mapping[int, np.ndarray],
    strided: tuple[Strided, ...],
    types: Sequence[TensorType],
    epilogue: Node | None = None,
) -> Kernel:
    """The kernel of one operator (of a matmul also with its epilogue); a host fallback where the
    device has no instructions for it."""
    if strided:
        return matmul_kernel(node, strided, epilogue)
    fields = single_fields(node, constants, types)
    if node.name in ATTENTION:
        return check(AttentionKernel(**fields))
    wide = any(t.numpy.itemsize > 4 for t in (*node.operand_types, *node.result_types))
    if node.name == "rng_bit_generator":  # the state may be 64-bit words; it stays in registers
        wide = node.result_types[1].numpy.itemsize > 4
    empty = any(t.size == 0 for t in (*node.operand_types, *node.result_types))
    if node.name in MOVEMENTS and not empty:
        if _fills_wide(node, constants):
            return HostKernel(**fields, fallback=True)
        moved = MOVEMENTS[node.name](**fields)
        return moved if is_row_move(moved) else _streamed(fields, wide)
    if node.name == "reduce" and reducer(node.operation) is not None and not wide and not empty:
        reduction = ReductionKernel(**fields)
        return reduction if reduction.on_device else _streamed(fields, wide)
    return _streamed(fields, wide or empty)


def _fills_wide(node: Node, constants: Mapping[int, np.ndarray]) -> bool:
    """Whether an engine would have to write 64-bit values: DMA only moves them."""
    kind = node.result_types[0]
    filled = (
        operand in constants and source.dtype == kind.dtype
        for operand, source in zip(node.operation.operands, node.operand_types, strict=True)
    )
    return kind.numpy.itemsize > 4 and (node.name in ("pad", "scatter") or any(filled))


def _streamed(fields: dict[str, Any], host: bool) -> Kernel:
    """A kernel of the lane engines if they can do it, otherwise the host's."""
    lanes = LaneKernel(**fields)
    return lanes if fits(lanes) and not host else HostKernel(**fields, fallback=True)


def on_tensor_engine(node: Node) -> bool:
    """Floats of up to 32 bits; other dots are the host's."""
    kinds = [t.dtype for t in node.operand_types]
    floats = all(k.startswith(("f", "bf")) and k != "f64" for k in kinds)
    return floats and all(t.size for t in (*node.operand_types, *node.result_types))
