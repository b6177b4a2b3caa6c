"""Kernels of fused attention and its gradient.

`attention` (q, k, v) -> (out, lse) and `attention_gradient` (q, k, v, out, lse, dout, dlse) ->
(dq, dk, dv), with attributes `scale` and `causal`; shapes as in `values_attention`. The scores stay
on chip. dk and dv are given for each query head, [b, t, n, h]: whoever shares a key head among
query heads sums them. Cores of a pair share out the heads.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import Unsupported
from . import values_attention as values
from .kernel import Part, split
from .single import SingleKernel
from .values_attention import Shapes

ATTENTION = ("attention", "attention_gradient")
HEAD_MAX = 128


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionKernel(SingleKernel):
    """Attention, or its gradient; a part is a range of (batch element, query head)."""

    @property
    def shapes(self) -> Shapes:
        """The extents."""
        return Shapes.of(self.operand_type(0).shape, self.operand_type(1).shape)

    @property
    def scale(self) -> float:
        """What scores are multiplied by."""
        return self.attributes["scale"]

    @property
    def causal(self) -> bool:
        """Whether query i sees keys 0 to i only."""
        return self.attributes["causal"]

    def part(self, core: int, cores: int) -> Part:
        return split(self.shapes.b * self.shapes.n, core, cores, "batch")

    def heads(self, part: Part) -> Iterator[tuple[int, int]]:
        """(batch element, query head) of the part, in order."""
        return (divmod(unit, self.shapes.n) for unit in range(part.start, part.stop))

    def evaluate(self, arrays: Mapping[int, np.ndarray], part: Part) -> None:
        operands = self.operand_arrays(arrays)
        targets = [self.target(i, arrays) for i in range(len(self.targets))]
        with np.errstate(all="ignore"):
            values.fill(operands, targets, self.heads(part), self.scale, self.causal)

    def nest(self, context: Any) -> Any:
        from . import attention_gradient_nest, attention_nest

        own = attention_nest if self.name == "attention" else attention_gradient_nest
        return own.nest(self, context)


def check(kernel: AttentionKernel) -> AttentionKernel:
    """The kernel itself. Raises Unsupported for shapes or dtypes that it does not have."""
    shapes, where = kernel.shapes, f"{kernel.name} ({kernel.location})"
    if shapes.h > HEAD_MAX:
        raise Unsupported(f"{where}: head size {shapes.h}; at most {HEAD_MAX}")
    if shapes.n % shapes.kv:
        raise Unsupported(f"{where}: {shapes.n} query heads, not a multiple of {shapes.kv}")
    if kernel.causal and shapes.s != shapes.t:
        raise Unsupported(f"{where}: causal, with {shapes.s} queries and {shapes.t} keys")
    dtypes = {kernel.operand_type(i).dtype for i in (0, 1, 2)}
    if dtypes not in ({"bf16"}, {"f16"}, {"f32"}):
        raise Unsupported(f"{where}: dtypes {sorted(dtypes)}; one of bf16, f16, f32 for q, k and v")
    return kernel
