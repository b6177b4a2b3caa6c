"""Goodput: the share of time that training makes progress, with failures and checkpoints.

Source: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
Future Generation Computer Systems 22 (2006): failures are exponential with mean time M of the whole
job; a checkpoint takes d, a restart R; work is saved after every interval t. Equation 13 gives the
expected time T = M e^(R/M) (e^((t+d)/M) - 1) per interval, equation 37 the interval that minimises
it. Young's estimate is sqrt(2 d M). Times here are seconds as floats: no clock reaches this far.
"""

import math
from dataclasses import dataclass

from trnsim.device.errors import BadInput

MOST = 700.0  # exponents above this overflow a float


@dataclass(frozen=True, kw_only=True)
class Failures:
    """mtbf: of one node, seconds. checkpoint: to write one, restart: to start again from it.

    interval: of work between checkpoints; None is the best one.
    """

    mtbf: float
    checkpoint: float
    restart: float
    interval: float | None = None

    def __post_init__(self) -> None:
        for name in ("mtbf", "checkpoint"):
            if not 0 < getattr(self, name) < math.inf:
                raise BadInput(name, getattr(self, name), "more than 0 s")
        if not 0 <= self.restart < math.inf:
            raise BadInput("restart", self.restart, "0 s or more")
        if self.interval is not None and not 0 < self.interval < math.inf:
            raise BadInput("checkpoint interval", self.interval, "more than 0 s")


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Of a job: its mean time between failures, the interval used and the best, in seconds.

    fraction: of the time that is progress.
    """

    mtbf: float
    interval: float
    young: float
    best: float
    fraction: float


def goodput(failures: Failures, nodes: int) -> Goodput:
    """Goodput of a job on `nodes` nodes, any of which stops it when it fails."""
    mtbf = failures.mtbf / nodes
    best = daly_interval(mtbf, failures.checkpoint)
    interval = failures.interval or best
    return Goodput(
        mtbf=mtbf,
        interval=interval,
        young=math.sqrt(2 * failures.checkpoint * mtbf),
        best=best,
        fraction=progress(mtbf, failures.checkpoint, failures.restart, interval),
    )


def progress(mtbf: float, checkpoint: float, restart: float, interval: float) -> float:
    """Interval of work over the expected time that it takes."""
    exponent = (interval + checkpoint + restart) / mtbf
    if exponent > MOST:
        return 0.0
    expected = mtbf * math.exp(restart / mtbf) * math.expm1((interval + checkpoint) / mtbf)
    return interval / expected


def daly_interval(mtbf: float, checkpoint: float) -> float:
    """Daly's estimate of the best interval of work between checkpoints."""
    ratio = checkpoint / (2 * mtbf)
    if ratio >= 1:
        return mtbf
    return math.sqrt(2 * checkpoint * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - checkpoint
