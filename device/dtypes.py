"""Element types by their StableHLO names, with their numpy counterparts."""

import ml_dtypes
import numpy as np

from .errors import Unsupported

_NUMPY: dict[str, np.dtype] = {
    name: np.dtype(kind)
    for name, kind in {
        "i1": np.bool_,
        "i4": ml_dtypes.int4, "ui4": ml_dtypes.uint4,
        "i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64,
        "ui8": np.uint8, "ui16": np.uint16, "ui32": np.uint32, "ui64": np.uint64,
        "f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32, "f64": np.float64,
        "f8E4M3": ml_dtypes.float8_e4m3, "f8E4M3FN": ml_dtypes.float8_e4m3fn,
        "f8E5M2": ml_dtypes.float8_e5m2, "f8E3M4": ml_dtypes.float8_e3m4,
    }.items()
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _NUMPY.items()}


def numpy_dtype(name: str) -> np.dtype:
    """The numpy dtype of a StableHLO element type. Raises Unsupported for other types."""
    try:
        return _NUMPY[name]
    except KeyError:
        raise Unsupported(f"dtype {name} is not modelled; modelled: {', '.join(_NUMPY)}") from None


def dtype_name(dtype: np.dtype | type) -> str:
    """The StableHLO name of a numpy dtype. Raises Unsupported for other types."""
    try:
        return _NAMES[np.dtype(dtype)]
    except KeyError:
        raise Unsupported(f"dtype {dtype} is not modelled; modelled: {', '.join(_NUMPY)}") from None


def is_float(name: str) -> bool:
    """Whether the StableHLO element type is a floating-point type."""
    return name.startswith(("f", "bf"))
