"""What the tests of forbidden calls share: short names, tiles, and the refusal itself."""

# pyright: reportMissingImports=false
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from trnsim.device.errors import BadInput, IllegalInstruction, TrnsimError
from trnsim.device.nki import simulate

from .nki_golden import tile, uniform
from .nki_kernels import nisa, nl

P, S = nl.psum, nl.sbuf
GPSIMD, VECTOR, SCALAR = nisa.engine.gpsimd, nisa.engine.vector, nisa.engine.scalar
TENSOR = nisa.engine.tensor


def t(*shape: int, dtype: Any = nl.float32, buffer: Any = nl.sbuf, at: int | None = None) -> Any:
    """A tile, from partition `at` on."""
    if at is None:
        return tile(shape, dtype, buffer)
    return nl.ndarray(shape, dtype=dtype, buffer=buffer, address=(at, 0))


def hbm(*shape: int, dtype: Any = nl.float32) -> Any:
    """A tensor in HBM."""
    return nl.ndarray(shape, dtype=dtype, buffer=nl.private_hbm)


def i32(*shape: int, buffer: Any = nl.sbuf) -> Any:
    """A tile of int32."""
    return tile(shape, nl.int32, buffer)


def u32(*shape: int) -> Any:
    """A tile of uint32."""
    return tile(shape, nl.uint32)


def refused(call: Callable[[], Any], message: str, chip: str = "trn2") -> None:
    """The call inside a kernel is an error with the line of the file that it stands in."""
    with pytest.raises(TrnsimError, match=message) as caught:
        simulate(lambda x: call(), uniform(1, 1), chip=chip)
    assert isinstance(caught.value, IllegalInstruction | BadInput)
    assert str(caught.value).startswith(f"{inspect.getfile(call)}:")


# (what, the call, what the error says[, the chip])
Rule = tuple[str, Any, str] | tuple[str, Any, str, str]


def rules(*given: Rule) -> Any:
    """Parameters of a test from rules."""
    cases = [(*rule[1:], "trn2")[:3] for rule in given]
    return pytest.mark.parametrize("call, message, chip", cases, ids=[rule[0] for rule in given])
