"""Fits `program_efficiency` to measured training steps, and says how far each row is off.

A compiled training program does not reach the pace that the loop nests of its kernels give one by
one: schedules of engines, spills and synchronisation between kernels cost time that nobody
publishes. One number for all programs and chips stands for that: compute takes the kernels' time
over it. Collectives keep the constants that measured collectives gave (`calibrate.py`).

The fit makes the worst relative deviation of all rows as small as one number can. Every step is
shorter with a higher efficiency, so that is where the slowest row is as far above its measurement
as the fastest is below. No number belongs to a row; what the fit is worth for others shows when a
row is left out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from scipy.optimize import brentq

from trnsim.device.numbers import Number, Status
from trnsim.device.overlay import Overlay, overlay_text

from .instances import load_instance
from .measured_steps import MeasuredStep
from .plans.build import build
from .plans.clocks import advance
from .plans.prices import Prices

KEY = "program_efficiency"
CHIPS = ("trn1", "inf2", "trn2", "trn3")
NOTE = "pace of compiled training programs over that of their kernels one by one; nobody publishes"
LOW, HIGH = 0.5, 1.0
DIGITS = 3  # that are kept
HEADING = "The number below makes the worst deviation of the steps that its source names smallest."


class StepModel:
    """The modelled time of one measured step, for any efficiency of programs."""

    def __init__(self, step: MeasuredStep) -> None:
        self.step, self.plan = step, step.plan()
        self._program = build(self.plan)
        self._known: dict[float, int] = {}

    def ps(self, efficiency: float) -> int:
        """The step, with compute at this part of its kernels' pace."""
        if efficiency not in self._known:
            plan, codes = self.plan, self._program.codes
            prices = Prices(plan.machine, codes, plan.algorithm, efficiency=efficiency)
            self._known[efficiency] = advance(self._program, prices).duration
        return self._known[efficiency]

    def deviation(self, efficiency: float) -> float:
        """(modelled - measured) / measured."""
        return self.ps(efficiency) / self.step.ps - 1


def fit(models: Sequence[StepModel]) -> float:
    """The efficiency of the smallest worst deviation, from LOW to HIGH, to three digits."""

    def balance(efficiency: float) -> float:
        deviations = [model.deviation(efficiency) for model in models]
        return max(deviations) + min(deviations)

    if balance(HIGH) >= 0:  # too long even at the kernels' own pace
        return HIGH
    if balance(LOW) <= 0:
        return LOW
    found: Any = brentq(balance, LOW, HIGH, xtol=10**-DIGITS / 2)  # typed for `full_output` too
    return round(found, DIGITS)


@dataclass(frozen=True)
class StepError:
    """How a step comes out: ps at the kernels' pace, at the fitted one, and fitted without it."""

    step: MeasuredStep
    raw: int
    modelled: int
    left_out: int | None = None

    @property
    def deviation(self) -> float:
        """(modelled - measured) / measured."""
        return self.modelled / self.step.ps - 1

    @property
    def deviation_raw(self) -> float:
        """The same at the kernels' pace."""
        return self.raw / self.step.ps - 1

    @property
    def deviation_left_out(self) -> float | None:
        """The same, fitted to the other steps."""
        return None if self.left_out is None else self.left_out / self.step.ps - 1


@dataclass(frozen=True)
class StepCalibration:
    """The efficiency as it is kept, and every step priced with it."""

    efficiency: float
    errors: tuple[StepError, ...]

    @property
    def worst(self) -> float:
        """The largest deviation, by size."""
        return max(abs(error.deviation) for error in self.errors)

    def overlay(self) -> Overlay:
        """The number for every chip: calibrated where measured, else assumed to be the same."""
        measured = {load_instance(error.step.instance).chip.name for error in self.errors}
        source = f"trnsim calibrate --steps: {', '.join(e.step.name for e in self.errors)}"
        return {
            chip: {KEY: self._number(source, "calibrated" if chip in measured else "assumed")}
            for chip in CHIPS
        }

    def _number(self, source: str, status: Status) -> Number:
        value = self.efficiency
        return Number(value, "fraction", source, status, NOTE, text=f"{value:g}", section="program")

    def overlay_text(self, command: str) -> str:
        """The overlay as a file, saying how it came about."""
        return overlay_text(self.overlay(), f"Written by `{command}`: do not edit.\n{HEADING}")


def calibrate_steps(
    steps: Sequence[MeasuredStep],
    *,
    leave_out: bool = True,
    progress: Callable[[str], None] = lambda _: None,
) -> StepCalibration:
    """Fit the efficiency to the steps, and say how far each is off.

    leave_out: also fit without each in turn, and predict it. Raises TrnsimError for steps that
    cannot be planned.
    """
    models = []
    for step in steps:
        progress(f"building {step.name}")
        models.append(StepModel(step))
    progress("all steps")
    efficiency = fit(models)
    errors = []
    for model in models:
        others = [m for m in models if m is not model]
        left_out = None
        if leave_out and others:
            progress(f"without {model.step.name}")
            left_out = model.ps(fit(others))
        errors.append(StepError(model.step, model.ps(HIGH), model.ps(efficiency), left_out))
    return StepCalibration(efficiency, tuple(errors))
