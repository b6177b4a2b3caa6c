"""What the golden tests share: random arrays, and a kernel made of a function of loaded tiles."""

# pyright: reportMissingImports=false
from collections.abc import Callable
from typing import Any

import numpy as np

from trnsim.device.nki import simulate

from .nki_kernels import nisa, nl

RANDOM = np.random.default_rng(41)
FP32_MIN = float(np.finfo(np.float32).min)


def uniform(*shape: int, scale: float = 100.0) -> np.ndarray:
    """Float32 in [0, scale)."""
    return (RANDOM.random(shape) * scale).astype(np.float32)


def tile(shape: Any, dtype: Any = nl.float32, buffer: Any = nl.sbuf) -> Any:
    """A new tile of a running kernel."""
    return nl.ndarray(tuple(shape), dtype=dtype, buffer=buffer)


def saved(value: Any) -> Any:
    """The output tensor of a running kernel that holds a tile; PSUM goes by way of SBUF."""
    out = nl.ndarray(value.shape, dtype=value.dtype, buffer=nl.shared_hbm)
    if value.buffer == nl.psum:
        copy = tile(value.shape, value.dtype)
        nisa.tensor_copy(dst=copy, src=value)
        value = copy
    nisa.dma_copy(dst=out, src=value)
    return out


def on_tiles(body: Callable[..., Any], *inputs: np.ndarray, chip: str = "trn2") -> Any:
    """Output (or outputs) of a kernel that loads its inputs, whose first axes are partitions,
    and stores the tiles that `body` returns for them."""

    def kernel(*tensors: Any) -> Any:
        tiles = []
        for tensor in tensors:
            loaded = tile(tensor.shape, tensor.dtype)
            nisa.dma_copy(dst=loaded, src=tensor)
            tiles.append(loaded)
        made = body(*tiles)
        return tuple(map(saved, made)) if isinstance(made, tuple) else saved(made)

    return simulate(kernel, *inputs, chip=chip).outputs
