"""Errors of kernels: what is not modelled, and a kernel's line put in front of any message."""

import os

from ..errors import TrnsimError, Unsupported

OWN = (os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep, "<frozen")
"""Where the simulator's own code lies: its frames are no lines of a kernel."""


class NotModelled(Unsupported):
    """A part of NKI that exists and is not simulated: the message has its name."""

    def __init__(self, name: str, why: str = "") -> None:
        super().__init__(f"{name} is not modelled" + (f": {why}" if why else ""))


class DeadlockError(TrnsimError):
    """The cores of a kernel wait for each other in vain: the message has what each waits for."""


def located(error: TrnsimError) -> TrnsimError:
    """An error of a view or index, which has no line yet, with that of the innermost kernel frame.

    It is found in the error's traceback.
    """
    line, trace = "", error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith(OWN):
            line = f"{file}:{trace.tb_lineno}"
        trace = trace.tb_next
    return at_line(error, line)


def at_line(error: TrnsimError, line: str) -> TrnsimError:
    """The same error with the kernel's source line in front of its message."""
    if line and not getattr(error, "line", ""):
        error.args = (f"{line}: {error}",)
        error.line = line  # type: ignore[attr-defined]
    return error
