"""Kernels of one operator that the lane engines compute: windows, random bits, convolution."""

from dataclasses import dataclass
from typing import Any

from .single import SingleKernel


@dataclass(frozen=True, kw_only=True, eq=False)
class LaneKernel(SingleKernel):
    """Values by the operator's reference semantics; time by an instruction count per element."""

    def nest(self, context: Any) -> Any:
        from .host_nest import nest

        return nest(self, context)


VECTORIAL: dict[str, type[SingleKernel]] = {}
