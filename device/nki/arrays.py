"""Arrays in and out of kernels: numpy, and whatever can become it (JAX, torch; neither needed)."""

import importlib
from typing import Any

import numpy as np

from .dtypes import DType, as_dtype


def is_array(value: Any) -> bool:
    """Whether an argument is an array, and not a number or a setting of the kernel."""
    if isinstance(value, np.ndarray | np.generic):
        return True
    return hasattr(value, "__array__") or hasattr(value, "__dlpack__")


def to_numpy(value: Any) -> tuple[np.ndarray, DType]:
    """The values, C-contiguous, with their NKI dtype. Raises BadInput for other dtypes."""
    kind = str(getattr(value, "dtype", ""))
    if kind.startswith("torch."):
        array = _from_torch(value, kind)
    else:
        array = np.asarray(value)
    return np.ascontiguousarray(array), as_dtype(array.dtype)


def _from_torch(value: Any, kind: str) -> np.ndarray:
    """numpy has no counterpart that torch knows for these: their bits are taken instead."""
    torch: Any = importlib.import_module("torch")  # the caller has it

    name = {"torch.bfloat16": "bfloat16", "torch.float8_e4m3fn": "float8_e4m3fn",
            "torch.float8_e5m2": "float8_e5m2"}.get(kind)  # fmt: skip
    value = value.detach().cpu().contiguous()
    if name is None:
        return value.numpy()
    bits = torch.int16 if name == "bfloat16" else torch.uint8
    return value.view(bits).numpy().view(as_dtype(name).dtype)


def like_inputs(output: np.ndarray, inputs: list[Any]) -> Any:
    """An output as the inputs came: numpy, torch or JAX."""
    kinds = {type(value).__module__.partition(".")[0] for value in inputs}
    if "torch" in kinds:
        return _to_torch(output)
    if kinds & {"jax", "jaxlib"}:
        import jax.numpy as jnp  # the caller has it

        return jnp.asarray(output)
    return output


def _to_torch(array: np.ndarray) -> Any:
    torch: Any = importlib.import_module("torch")  # the caller has it

    kinds = {"bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn,
             "float8_e5m2": torch.float8_e5m2}  # fmt: skip
    kind = kinds.get(array.dtype.name)
    if kind is None:
        return torch.from_numpy(array)
    bits = np.int16 if array.itemsize == 2 else np.uint8
    return torch.from_numpy(array.view(bits)).view(kind)
