"""Element types as kernels name them, with what numpy and the device call them."""

from typing import Any

import ml_dtypes
import numpy as np

from ..errors import BadInput

STORED_AS_INTEGERS = ("float8_e5m2_x4", "float8_e4m3fn_x4", "float4_e2m1fn_x4", "tfloat32")
"""Types of which numpy has no counterpart: integers (of tfloat32, floats) that carry the name."""
METADATA = "nki"
"""Key of the name in the metadata of such a numpy dtype."""


def _named(kind: np.dtype) -> str | None:
    """The NKI name that a numpy dtype carries, if it does."""
    return kind.metadata.get(METADATA) if kind.metadata else None


class DType:
    """An element type: `nl.bfloat16`.

    numpy takes it (`np.dtype(nl.bfloat16)`), it equals the numpy dtype and its own name, and
    `str()` is the name. `device` is the StableHLO name of what a memory stores: packed and
    exponent-only types are stored as unsigned integers of their width.
    """

    __slots__ = ("name", "dtype", "device")

    def __init__(self, name: str, kind: Any, device: str) -> None:
        self.name, self.device = name, device
        self.dtype = np.dtype(kind)
        if name in STORED_AS_INTEGERS:
            self.dtype = np.dtype(kind, metadata={METADATA: name})

    @property
    def itemsize(self) -> int:
        """Bytes of one element; of a packed type, of its four together."""
        return self.dtype.itemsize

    def __eq__(self, other: object) -> bool:
        if isinstance(other, DType):
            return self.name == other.name
        if isinstance(other, str):
            return self.name == other
        if isinstance(other, np.dtype | type):
            try:
                kind = np.dtype(other)
            except TypeError:
                return False
            return self.dtype == kind and _named(self.dtype) == _named(kind)
        return False

    def __hash__(self) -> int:
        return hash(self.name)

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple:
        return as_dtype, (self.name,)


DTYPES = {
    name: DType(name, kind, device)
    for name, kind, device in (
        ("bool", np.bool_, "i1"),
        ("int8", np.int8, "i8"),
        ("int16", np.int16, "i16"),
        ("int32", np.int32, "i32"),
        ("int64", np.int64, "i64"),
        ("uint8", np.uint8, "ui8"),
        ("uint16", np.uint16, "ui16"),
        ("uint32", np.uint32, "ui32"),
        ("uint64", np.uint64, "ui64"),
        ("float16", np.float16, "f16"),
        ("float32", np.float32, "f32"),
        ("float64", np.float64, "f64"),
        ("bfloat16", ml_dtypes.bfloat16, "bf16"),
        ("tfloat32", np.float32, "f32"),
        ("float8_e4m3", ml_dtypes.float8_e4m3, "f8E4M3"),
        ("float8_e4m3fn", ml_dtypes.float8_e4m3fn, "f8E4M3FN"),
        ("float8_e5m2", ml_dtypes.float8_e5m2, "f8E5M2"),
        ("float8_e8m0fnu", ml_dtypes.float8_e8m0fnu, "ui8"),
        ("float8_e5m2_x4", np.uint32, "ui32"),
        ("float8_e4m3fn_x4", np.uint32, "ui32"),
        ("float4_e2m1fn_x4", np.uint16, "ui16"),
    )
}
"""By name. The 64-bit ones are for tensors in HBM: no engine computes with them."""

ALIASES = {"bool_": "bool", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_BY_NUMPY = {dtype.dtype: dtype for name, dtype in DTYPES.items() if name not in STORED_AS_INTEGERS}


def as_dtype(value: Any) -> DType:
    """The element type that a kernel or a caller means: a DType, a name, or a numpy dtype.

    Raises BadInput for others.
    """
    if type(value) is DType:
        return value
    if isinstance(value, str):
        found = DTYPES.get(ALIASES.get(value, value))
    else:
        try:
            kind = np.dtype(value)
            found = DTYPES.get(_named(kind) or "") or _BY_NUMPY.get(kind)
        except TypeError:
            found = None
    if found is None:
        raise BadInput("dtype", value, DTYPES)
    return found
