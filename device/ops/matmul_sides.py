"""How a matmul's operands come to have K on partitions."""

from dataclasses import dataclass

from .matmul import MatmulKernel, Operand
from .nest import itemsize

PE = 128
BANK = 512


@dataclass(frozen=True, slots=True)
class Side:
    """One operand: its dtype in HBM, and the dtype that the tensor engine computes with."""

    operand: Operand
    dtype: str
    compute: str

    @property
    def direct(self) -> bool:
        """Whether it is loaded with K on partitions, not transposed on chip."""
        _, free, contract = self.operand.merged
        if not free or not contract or free[-1][1] == 1:
            return True
        return contract[-1][1] != 1

    @property
    def raw(self) -> str:
        """The dtype in which it is loaded for a transpose."""
        return self.dtype if itemsize(self.dtype) > 1 else "bf16"


def sides(kernel: MatmulKernel) -> tuple[Side, Side]:
    """Left and right. float32 pairs only with float32; other floats mix."""
    dtypes = [kernel.types[o.value].dtype for o in (kernel.left, kernel.right)]
    compute = ["f32", "f32"] if "f32" in dtypes else dtypes
    return (
        Side(kernel.left, dtypes[0], compute[0]),
        Side(kernel.right, dtypes[1], compute[1]),
    )
