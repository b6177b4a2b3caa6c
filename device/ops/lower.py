"""Which kernel an operator becomes when it is not rowwise."""

from collections.abc import Mapping, Sequence

import numpy as np

from .group import Node, reducer
from .host import HostKernel
from .ir import TensorType
from .kernel import Kernel
from .matmul import matmul_kernel
from .movement import MOVEMENTS
from .reduction import ReductionKernel
from .single import single_fields
from .strided import Strided
from .vectorial import VECTORIAL


def kernel(
    node: Node,
    constants: Mapping[int, np.ndarray],
    strided: tuple[Strided, ...],
    types: Sequence[TensorType],
) -> Kernel:
    """The kernel of one operator; a host fallback where the device has no instructions for it."""
    if node.name == "dot_general" and _on_tensor_engine(node):
        return matmul_kernel(node, strided)
    fields = single_fields(node, constants, types)
    wide = any(t.numpy.itemsize > 4 for t in (*node.operand_types, *node.result_types))
    empty = any(t.size == 0 for t in (*node.operand_types, *node.result_types))
    if node.name in MOVEMENTS and not empty:
        return MOVEMENTS[node.name](**fields)
    if wide or empty:
        return HostKernel(**fields, fallback=True)
    if node.name == "reduce" and reducer(node.operation) is not None:
        return ReductionKernel(**fields)
    if node.name in VECTORIAL:
        return VECTORIAL[node.name](**fields)
    return HostKernel(**fields, fallback=True)


def _on_tensor_engine(node: Node) -> bool:
    """Floats of up to 32 bits; other dots are the host's."""
    kinds = [t.dtype for t in node.operand_types]
    floats = all(k.startswith(("f", "bf")) and k != "f64" for k in kinds)
    return floats and all(t.size for t in (*node.operand_types, *node.result_types))
