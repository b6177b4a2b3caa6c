"""Errors that a user can cause. Each message is one clear line; the command line exits with 2."""

import difflib
from collections.abc import Iterable


class TrnsimError(Exception):
    """Base of every error that describes the user's input, not a fault of the simulator."""


class BadInput(TrnsimError):
    """A field has a value that is not allowed.

    The message names the field, the value, what is allowed and the nearest valid choice.
    """

    def __init__(
        self,
        field: str,
        value: object,
        allowed: Iterable[object] | str,
        nearest: object | None = None,
    ) -> None:
        self.field, self.value = field, value
        if isinstance(allowed, str):
            listed = allowed
        else:
            options = [str(option) for option in allowed]
            listed = "one of " + ", ".join(options)
            if nearest is None:
                close = difflib.get_close_matches(str(value), options, n=1)
                nearest = close[0] if close else None
        hint = "" if nearest is None else f"; nearest valid: {nearest}"
        super().__init__(f"{field}: {value!s} is not valid; allowed: {listed}{hint}")


class IllegalInstruction(TrnsimError):
    """An instruction breaks a rule of the hardware: the message has operand, limit and value."""


class OutOfMemory(TrnsimError):
    """A memory is too small: the message has both numbers and what holds the memory."""


class Unsupported(TrnsimError):
    """An operator or feature that is not modelled: the message has its name and source line."""


class CoreLost(TrnsimError):
    """A simulated core's process ended during a run."""


class DeadlineExceeded(TrnsimError):
    """A wait did not end in time: the message says who waited for what."""


class CollectiveMismatch(TrnsimError):
    """Ranks of one group called different collectives: the message names ranks and calls."""


class BadFile(TrnsimError):
    """A file is truncated, foreign, or of another version."""
