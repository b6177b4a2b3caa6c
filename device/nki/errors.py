"""Errors of kernels: what is not modelled, and a kernel's line put in front of any message."""

from ..errors import TrnsimError, Unsupported


class NotModelled(Unsupported):
    """A part of NKI that exists and is not simulated: the message has its name."""

    def __init__(self, name: str, why: str = "") -> None:
        super().__init__(f"{name} is not modelled" + (f": {why}" if why else ""))


class DeadlockError(TrnsimError):
    """The cores of a kernel wait for each other in vain: the message has what each waits for."""


def at_line(error: TrnsimError, line: str) -> TrnsimError:
    """The same error with the kernel's source line in front of its message."""
    if line and not getattr(error, "line", ""):
        error.args = (f"{line}: {error}",)
        error.line = line  # type: ignore[attr-defined]
    return error
