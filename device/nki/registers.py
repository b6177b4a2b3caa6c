"""Virtual registers: scalars of the engines' sequencers, for loop bounds and addresses.

A kernel is executed as it is read, so a register always has its value. Python may use it as an
integer; `fori_loop` and `while_loop` are loops of Python. A 32-bit value wraps as int32.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..errors import BadInput, IllegalInstruction
from .objects import NKIObject
from .session import current
from .tensor import NkiTensor


class VirtualRegister(NKIObject):
    """A register. `ready` is when its value is known, in picoseconds."""

    def __init__(self, state: int | None = None, frozen: bool = False) -> None:
        self.state, self.frozen = state, frozen

    def read_register(self) -> int:
        """Its value. Raises IllegalInstruction if it was never written."""
        if self.state is None:
            raise IllegalInstruction("a register is read that was never written")
        return self.state

    __int__ = __index__ = read_register

    def __bool__(self) -> bool:
        return self.read_register() != 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, int | VirtualRegister) and int(self) == int(other)

    def __lt__(self, other: Any) -> bool:
        return int(self) < int(other)

    def __le__(self, other: Any) -> bool:
        return int(self) <= int(other)

    def __gt__(self, other: Any) -> bool:
        return int(self) > int(other)

    def __ge__(self, other: Any) -> bool:
        return int(self) >= int(other)

    def __add__(self, other: Any) -> "VirtualRegister":
        return VirtualRegister(_wrapped(int(self) + int(other)))

    def __sub__(self, other: Any) -> "VirtualRegister":
        return VirtualRegister(_wrapped(int(self) - int(other)))

    def __mul__(self, other: Any) -> "VirtualRegister":
        return VirtualRegister(_wrapped(int(self) * int(other)))

    __radd__, __rmul__ = __add__, __mul__
    __hash__ = NKIObject.__hash__

    def __repr__(self) -> str:
        return f"register({self.state})"


def register_alloc(x: int | None = None) -> VirtualRegister:
    """A new register, with a value if `x` is an integer."""
    return VirtualRegister(None if x is None else _wrapped(int(x)))


def register_move(dst: VirtualRegister, src: Any) -> None:
    """dst = an integer or another register's value."""
    _check(dst).state = _wrapped(int(src))


def register_load(dst: VirtualRegister, src: NkiTensor) -> None:
    """dst = the one element of a tensor in SBUF or HBM."""
    _check(dst).state = _wrapped(current().read_scalar(src))


def register_store(dst: NkiTensor, src: VirtualRegister) -> None:
    """The one element of a tensor = the register's value."""
    current().write_scalar(dst, _check(src).read_register())


def fori_loop(lower: Any, upper: Any, body_fun: Callable, step: int = 1) -> None:
    """body_fun(i) for i from lower to upper, i a register passed by value."""
    for i in range(int(lower), int(upper), step):
        current().check_deadline()
        body_fun(VirtualRegister(i))


def while_loop(init: VirtualRegister, body_fun: Callable) -> None:
    """r = body_fun(r) while r is not zero."""
    register = VirtualRegister(int(init))
    while int(register):
        current().check_deadline()
        register = body_fun(VirtualRegister(int(register)))
        if not isinstance(register, VirtualRegister):
            raise BadInput("body_fun", register, "a function that returns a register")


def dynamic_range(start: Any, stop: Any = None, step: int = 1) -> Iterator[VirtualRegister]:
    """Loop iterators whose bounds may be registers."""
    first, last = (0, start) if stop is None else (start, stop)
    for i in range(int(first), int(last), step):
        current().check_deadline()
        yield VirtualRegister(i)


def _check(register: Any) -> VirtualRegister:
    if not isinstance(register, VirtualRegister):
        raise BadInput("register", register, "a register of nisa.register_alloc")
    return register


def _wrapped(value: int) -> int:
    return int(np.array(value & 0xFFFFFFFF, np.uint32).view(np.int32)[()])
