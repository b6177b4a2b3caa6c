"""Errors of kernels: what is not modelled, and a kernel's line put in front of any message."""

import os
import sysconfig

from ..errors import TrnsimError, Unsupported

OWN = (os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep, "<frozen")
"""Where the simulator's own code lies: its frames are no lines of a kernel."""


_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))


class KernelFailed(TrnsimError):
    """A kernel's own Python raised an exception: the message has its line, kind and text."""


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


def failed(error: Exception) -> Exception:
    """An exception that a kernel's own Python raised, as KernelFailed; any other as it is.

    A fault of the simulator, whose innermost frame but for libraries is its own, stays what it is.
    """
    if isinstance(error, TrnsimError):
        return error
    line, trace = "", error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if file.startswith(OWN):
            line = ""
        elif not file.startswith(_LIBRARIES):
            line = f"{file}:{trace.tb_lineno}"
        trace = trace.tb_next
    if not line:
        return error
    text = str(error)
    return KernelFailed(f"{line}: {type(error).__name__}" + (f": {text}" if text else ""))


def at_line(error: TrnsimError, line: str) -> TrnsimError:
    """The same error with the kernel's source line in front of its message."""
    if line and not getattr(error, "line", ""):
        error.args = (f"{line}: {error}",)
        error.line = line  # type: ignore[attr-defined]
    return error
