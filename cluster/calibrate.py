"""Fits the constants that nobody publishes to measured collectives.

The model is the pricer itself, run on every point with the vendor's policy. A constant is a number
of a chip's spec with a physical meaning and bounds. Two fits, one after the other:

- rates, so that the slope of every series (least squares of time over bytes) comes out right: one
  residual per series, log(modelled slope / measured slope);
- latencies, so that the points of the series that are good for it come out right: residuals
  log(modelled time / measured time), weighted so that every series counts once.

Both are least squares within the bounds (scipy, deterministic, from the same start). No constant
belongs to a series or a point. What a series is worth for the others shows when it is left out:
`errors` gives both.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from scipy.optimize import least_squares

from trnsim.collectives import choose
from trnsim.collectives.price import Pricer
from trnsim.device.chip import load_chip, with_number
from trnsim.device.numbers import Number, Status
from trnsim.device.overlay import Overlay, overlay_text

from .instances import Instance, fabric, load_instance, overheads
from .measured import Series

Values = Mapping["Constant", float]
SUMMARY = "Every number below is fitted to the measured series that its source names."
STEP = 1e-3  # of derivatives, relative
TOLERANCE = 1e-4  # of a fit, relative
SEARCH = (0.25, 0.75)  # where else to begin: rates so far between their bounds, by ratio
BETTER = 0.9  # of the squares left, to prefer a fit from elsewhere
MATTERS = 0.02  # a series that changes less, of what a constant does, is not named for it
HARDLY = 1e-4  # and below this, nothing is known of the constant


@dataclass(frozen=True)
class Constant:
    """A number of these chips that is fitted: between low and high, from `start`.

    Values are in the canonical unit: B/s, ps, or a plain fraction. The first chip's own points are
    what it is fitted to, and those of the others.
    """

    key: str
    chips: tuple[str, ...]
    unit: Literal["B/s", "ps", "fraction"]
    low: float
    start: float
    high: float
    meaning: str

    @property
    def of_rate(self) -> bool:
        """Whether slopes determine it; else latencies do."""
        return self.unit != "ps"

    @property
    def name(self) -> str:
        return f"{self.key} of {', '.join(self.chips)}"

    @property
    def span(self) -> float:
        """Logarithm of the ratio of its bounds."""
        return float(np.log(self.high / self.low))

    def scaled(self, value: float) -> float:
        """0 at `low`, 1 at `high`, by ratios."""
        return float(np.log(value / self.low)) / self.span

    def unscaled(self, u: float) -> float:
        """The inverse of `scaled`."""
        return float(self.low * (self.high / self.low) ** u)

    def number(self, value: float, source: str, status: Status = "calibrated") -> Number:
        """The value, rounded to three digits, as an entry of a spec file."""
        shown = float(f"{value:.3g}")
        text = {
            "B/s": f"{shown / 1e9:g}GB/s", "ps": f"{shown / 1e6:g}us", "fraction": f"{shown:g}",
        }[self.unit]  # fmt: skip
        exact = shown if self.unit == "fraction" else round(shown)
        return Number(exact, self.unit, source, status, self.meaning, "", text, "collective")


# No HBM share: at its assumed value it binds nowhere in the measured series, and one that binds
# cannot be told from a slower DMA.
ALL = ("trn1", "inf2", "trn2", "trn3")
CONSTANTS = (
    Constant(
        "on_chip_bytes_per_s", ("trn1", "inf2"), "B/s", 30e9, 90e9, 272e9,
        "DMA rate of a rank's collectives per physical core and direction",
    ),
    Constant(
        "on_chip_bytes_per_s", ("trn2",), "B/s", 30e9, 100e9, 368e9,
        "DMA rate of a rank's collectives per physical core and direction",
    ),
    Constant(
        "link_efficiency", ALL, "fraction", 0.2, 0.6, 1.0,
        "of the NeuronLink rate per neighbour and direction",
    ),
    Constant(
        "efa_efficiency", ALL, "fraction", 0.3, 0.8, 1.0, "of the printed EFA rate",
    ),
    Constant(
        "collective_start_ps", ("trn1", "inf2"), "ps", 1e6, 20e6, 100e6,
        "once per collective",
    ),
    Constant(
        "collective_start_ps", ("trn2", "trn3"), "ps", 1e6, 10e6, 100e6,
        "once per collective",
    ),
    Constant(
        "die_latency_ps", ("trn2", "trn3"), "ps", 0.1e6, 1e6, 10e6,
        "one way between the two dies of a chip",
    ),
)  # fmt: skip


class Model:
    """Modelled times of measured series, for any values of the constants.

    `base` are the numbers beneath: those of the constants that are not given stay as they are.
    """

    def __init__(self, constants: Sequence[Constant] = CONSTANTS) -> None:
        self.constants = tuple(constants)
        self._cases: dict[str, _Case] = {}
        self._known: dict[tuple, np.ndarray] = {}

    def times(self, series: Series, values: Values) -> np.ndarray:
        """float64[points]: modelled ps."""
        return self._times(series, values, np.ones(len(series.nbytes), bool))

    def slope(self, series: Series, values: Values) -> float:
        """ps per printed byte."""
        times = np.zeros(len(series.nbytes))
        times[series.in_slope] = self._times(series, values, series.in_slope)
        return series.slope_of(times)

    def _times(self, series: Series, values: Values, rows: np.ndarray) -> np.ndarray:
        case = self._case(series)
        mine = {c: v for c, v in values.items() if case.instance.chip.name in c.chips}
        key = (series.name, rows.tobytes(), *sorted((c.name, v) for c, v in mine.items()))
        if key not in self._known:
            self._known[key] = case.times(_changed(case.instance, mine), rows)
        return self._known[key]

    def _case(self, series: Series) -> "_Case":
        if series.name not in self._cases:
            self._cases[series.name] = _Case(series)
        return self._cases[series.name]


class _Case:
    """One series with its groups and collectives, priced on a changed instance.

    The policy goes by sizes and layouts, not by rates, so schedules are chosen once.
    """

    def __init__(self, series: Series) -> None:
        self.series, group = series, series.group
        self.instance = load_instance(group.instance)
        self.groups = group.table()
        links = fabric(self.instance, group.nodes, group.lnc)
        collectives = [group.collective(int(size)) for size in series.nbytes]
        self.asked = [(c, choose.plan(c, self.groups, links).schedule) for c in collectives]

    def times(self, instance: Instance, rows: np.ndarray) -> np.ndarray:
        """float64[rows]: modelled ps on a changed instance of the points in the mask `rows`."""
        nodes, lnc = self.series.group.nodes, self.series.group.lnc
        links, costs = fabric(instance, nodes, lnc), overheads(instance, nodes, lnc)
        pricers: dict[int, Pricer] = {}
        times = []
        for k in np.flatnonzero(rows).tolist():
            collective, schedule = self.asked[k]
            if id(schedule) not in pricers:
                pricers[id(schedule)] = Pricer(schedule, links, self.groups)
            priced = pricers[id(schedule)].price(collective, overheads=costs)
            times.append(priced.duration_ps)
        return np.array(times, float)


def _changed(instance: Instance, values: Values) -> Instance:
    chip = instance.chip
    for constant, value in values.items():
        chip = with_number(chip, constant.key, _exact(constant, value))
    return replace(instance, chip=chip)


def _exact(constant: Constant, value: float) -> Number:
    """The value as it is, not rounded for people."""
    exact = value if constant.unit == "fraction" else round(value)
    return Number(exact, constant.unit, "calibration", "calibrated", constant.meaning)


@dataclass(frozen=True)
class Fit:
    """Values of the constants, and the names of the series that determined each.

    A constant that no series depends on is not in `by`; its value is as it was before.
    cost: the sum of all squared residuals.
    """

    values: Values
    by: Mapping[Constant, tuple[str, ...]]
    cost: float


def fit(
    model: Model, series: Sequence[Series], start: Values | None = None, near: Values | None = None
) -> Fit:
    """Least squares of slopes, then of latencies.

    start: what constants are before (default: as stated), and stay if nothing determines them.
    near: where to search from; without it, from `start` and from low and high rates, as a slope
    says nothing of a resource that is not the slowest. Another place counts if clearly better.
    """
    values = {c: c.start for c in model.constants} | dict(start or {})
    if near is not None:
        return _fit(model, series, values, dict(near))
    begins = [values]
    for u in SEARCH:
        begins.append({c: c.unscaled(u) if c.of_rate else v for c, v in values.items()})
    first, *others = [_fit(model, series, values, begin) for begin in begins]
    best = min(others, key=lambda f: f.cost)
    return best if best.cost < BETTER * first.cost else first


def _fit(model: Model, series: Sequence[Series], start: Values, values: Values) -> Fit:
    by: dict[bool, dict[Constant, tuple[str, ...]]] = {}
    cost: dict[bool, float] = {}
    for rates in (False, True, False):  # latencies first and last: slopes depend a little on them
        rows = [s for s in series if (s.slope if rates else s.latency)]
        free = [c for c in model.constants if c.of_rate == rates]
        residuals = _slope if rates else _latency
        values, by[rates], cost[rates] = _least_squares(model, rows, free, values, residuals)
    known = by[True] | by[False]
    kept = {c: v if c in known else start[c] for c, v in values.items()}
    return Fit(kept, known, sum(cost.values()))


Residuals = Callable[[Model, Series, Values], np.ndarray]


def _slope(model: Model, series: Series, values: Values) -> np.ndarray:
    """float64[1]: logarithm of modelled over measured slope."""
    return np.log([model.slope(series, values) / series.slope_of(series.times)])


def _latency(model: Model, series: Series, values: Values) -> np.ndarray:
    """float64[points]: logarithm of modelled over measured time; a series is as heavy as one."""
    return np.log(model.times(series, values) / series.times) / np.sqrt(len(series.times))


def _least_squares(
    model: Model,
    series: Sequence[Series],
    free: Sequence[Constant],
    values: Values,
    residuals: Residuals,
) -> tuple[dict[Constant, float], dict[Constant, tuple[str, ...]], float]:
    """(values with the free ones fitted, what determined them, sum of squares left)."""
    if not series:
        return dict(values), {}, 0.0

    def at(x: np.ndarray) -> dict[Constant, float]:
        return dict(values) | {c: c.unscaled(u - 1) for c, u in zip(free, x, strict=True)}

    def of(x: np.ndarray) -> np.ndarray:
        return np.concatenate([residuals(model, s, at(x)) for s in series])

    # from 1 to 2 between the bounds: steps of derivatives are relative, so not around 0
    x0 = [1 + min(max(c.scaled(values[c]), 0.01), 0.99) for c in free]
    found = least_squares(
        of, x0, bounds=(1.0, 2.0), diff_step=STEP, xtol=TOLERANCE, ftol=TOLERANCE, gtol=1e-9
    )
    fitted = at(found.x)
    owner = np.repeat(np.arange(len(series)), [len(residuals(model, s, fitted)) for s in series])
    by = {}
    for column, constant in enumerate(free):
        moved = np.sqrt(np.bincount(owner, found.jac[:, column] ** 2)) / constant.span
        least = MATTERS if moved.max() > MATTERS else HARDLY
        by[constant] = tuple(s.name for s, m in zip(series, moved, strict=True) if m > least)
    return fitted, {c: names for c, names in by.items() if names}, 2 * float(found.cost)


def current() -> dict[Constant, float]:
    """The constants as the chips have them."""
    return {c: float(load_chip(c.chips[0]).number(c.key).value) for c in CONSTANTS}


def slope_error(series: Series, times: np.ndarray) -> float:
    """Relative error of the slope of modelled times."""
    return series.slope_of(times) / series.slope_of(series.times) - 1


@dataclass(frozen=True)
class SeriesError:
    """How well a series comes out: fitted with it, and from the others alone (left out).

    times: ps of the fitted model, left_out: of the one that has not seen the series.
    """

    series: Series
    times: np.ndarray
    left_out: np.ndarray | None = None

    @property
    def slope(self) -> float | None:
        """Relative error of the slope; None where it means nothing."""
        return slope_error(self.series, self.times) if self.series.slope else None

    @property
    def slope_left_out(self) -> float | None:
        """The same, left out."""
        if not self.series.slope or self.left_out is None:
            return None
        return slope_error(self.series, self.left_out)

    @property
    def points(self) -> np.ndarray:
        """float64[points]: relative error of each time."""
        return self.times / self.series.times - 1

    @property
    def latency(self) -> float | None:
        """The worst of the points, by size, with its sign; None where points mean nothing."""
        return _worst(self.points) if self.series.latency else None

    @property
    def latency_left_out(self) -> float | None:
        """The same, left out."""
        if not self.series.latency or self.left_out is None:
            return None
        return _worst(self.left_out / self.series.times - 1)


def _worst(errors: np.ndarray) -> float:
    return float(errors[np.abs(errors).argmax()])


@dataclass(frozen=True)
class Calibration:
    """What `calibrate` found."""

    fit: Fit
    errors: tuple[SeriesError, ...]

    def summary(self) -> dict[str, float]:
        """Median and worst of the errors' sizes, as fractions; only of what there is."""
        columns = {
            "slope": [e.slope for e in self.errors],
            "slope left out": [e.slope_left_out for e in self.errors],
            "latency": [p for e in self.errors if e.series.latency for p in e.points.tolist()],
        }
        found = {}
        for name, column in columns.items():
            sizes = [abs(error) for error in column if error is not None]
            if sizes:
                found[f"{name} median"] = float(np.median(sizes))
                found[f"{name} worst"] = max(sizes)
        return found

    def overlay(self) -> Overlay:
        """The constants that the series determined, on every chip that they are meant for.

        `calibrated` on chips that were measured, `assumed` to be the same on others.
        """
        groups = {e.series.name: e.series.group for e in self.errors}
        tables: dict[str, dict[str, Number]] = {}
        for constant, names in self.fit.by.items():
            source = f"trnsim calibrate: {', '.join(names)}"
            measured = {load_instance(groups[name].instance).chip.name for name in names}
            for chip in constant.chips:
                status: Status = "calibrated" if chip in measured else "assumed"
                number = constant.number(self.fit.values[constant], source, status)
                tables.setdefault(chip, {})[constant.key] = number
        return tables

    def overlay_text(self, command: str) -> str:
        """The overlay as a file, saying how it came about."""
        heading = f"Written by `{command}`: do not edit.\n{SUMMARY}"
        return overlay_text(self.overlay(), heading)


def calibrate(
    series: Sequence[Series],
    *,
    start: Values | None = None,
    leave_out: bool = True,
    progress: Callable[[str], None] = lambda _: None,
) -> Calibration:
    """Fit the constants to the series, and say how well each comes out.

    leave_out: also fit without each series in turn, and predict it. Raises TrnsimError for series
    that the machine they name cannot run.
    """
    model = Model()
    progress("all series")
    found = fit(model, series, start)
    errors = []
    for one in series:
        others = [s for s in series if s is not one]
        left_out = None
        if leave_out and others:
            progress(f"without {one.name}")
            again = fit(model, others, start, near=found.values)
            left_out = model.times(one, again.values)
        errors.append(SeriesError(one, model.times(one, found.values), left_out))
    return Calibration(found, tuple(errors))
