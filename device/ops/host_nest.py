"""The nest of a host fallback: one call that ships operands to the host and results back."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..chip import Chip
from ..isa.base import Instruction
from ..memory import View
from ..units import transfer_ps
from .kernel import Kernel, Part
from .nest import Context, Loop, once


@dataclass(frozen=True, slots=True, eq=False)
class HostCall(Instruction):
    """Operands to the host, the operator there, results back.

    Cost: bytes over the host link, and its latency each way; the host's own time is not modelled.
    """

    kernel: Kernel
    part: Part
    transferred: int
    arrays: Mapping[int, np.ndarray] | None
    engine = "sync"

    def reads(self) -> tuple[View, ...]:
        return ()

    def writes(self) -> tuple[View, ...]:
        return ()

    def check(self, chip: Chip) -> None:
        """Legal everywhere."""

    def duration(self, chip: Chip) -> int:
        return 2 * chip.host_latency_ps + transfer_ps(self.transferred, chip.host_bytes_per_s)

    def execute(self) -> None:
        if self.arrays is not None:
            self.kernel.evaluate(self.arrays, self.part)


def nest(kernel: Kernel, context: Context) -> Loop:
    """One call."""
    moved = sum(kernel.types[v].nbytes for v in (*kernel.inputs, *kernel.outputs))
    return once([HostCall(kernel, context.part, moved, context.arrays)])
