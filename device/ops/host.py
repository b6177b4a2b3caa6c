"""Host fallback: an operator that the device has no instructions for."""

from dataclasses import dataclass
from typing import Any

from .single import SingleKernel


@dataclass(frozen=True, kw_only=True, eq=False)
class HostKernel(SingleKernel):
    """Priced as the transfer of its operands to the host and of its results back."""

    @property
    def transferred(self) -> int:
        """Bytes that cross to the host and back."""
        return sum(self.types[v].nbytes for v in (*self.inputs, *self.outputs))

    def nest(self, context: Any) -> Any:
        from .host_nest import nest

        return nest(self, context)
