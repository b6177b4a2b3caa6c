"""Measured training steps: how far each is off, the shipped constant, and what the user sees."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from trnsim.cluster import calibrate_steps as steps
from trnsim.cluster.calibrate_steps import HIGH, KEY, LOW, StepCalibration, StepModel, fit
from trnsim.cluster.cli import cli
from trnsim.cluster.measured_steps import MeasuredStep, parse_steps, read_steps, shipped_steps
from trnsim.cluster.plans.plan import Plan
from trnsim.cluster.plans.result import price_plan
from trnsim.cluster.report.step_tables import steps_json, steps_markdown, steps_view
from trnsim.cluster.report.tables import specs
from trnsim.device.chip import CALIBRATED_STEPS, SPEC_FILES, calibrated, load_chip
from trnsim.device.errors import BadFile, BadInput
from trnsim.device.overlay import parse_overlay
from trnsim.device.units import PS_PER_S

SMALL = MeasuredStep(
    name="small", model="llama2-7b", instance="trn1.32xlarge", mesh="dp=4,tp=8", seq=128,
    global_batch=4, sequences_per_s=40.0, source="nobody measured it", zero="1",
)  # fmt: skip


@pytest.fixture(scope="module")
def found() -> StepCalibration:
    return steps.calibrate_steps(shipped_steps())


@pytest.fixture(scope="module")
def small() -> StepModel:
    return StepModel(SMALL)


def measured(model: StepModel, ps: float) -> StepModel:
    """The same step, as if it had been measured to take so long."""
    other = StepModel.__new__(StepModel)
    rate = model.step.global_batch * PS_PER_S / ps
    other.__dict__.update(model.__dict__, step=replace(model.step, sequences_per_s=rate))
    return other


# --- the shipped constant ---


def test_every_row_is_within_15_percent(found: StepCalibration) -> None:
    assert {e.step.name for e in found.errors} == {"llama3-8b", "gpt3-46b", "bert-large"}
    for error in found.errors:
        assert abs(error.deviation) <= 0.15, error.step.name


def test_rows_are_those_that_were_published(found: StepCalibration) -> None:
    seconds = {e.step.name: e.step.ps / PS_PER_S for e in found.errors}
    assert seconds == pytest.approx(
        {"llama3-8b": 21.36, "gpt3-46b": 21.60, "bert-large": 4.282}, rel=1e-3
    )


def test_choices_that_sources_leave_open_are_the_same_for_all() -> None:
    for step in shipped_steps():
        assert (step.zero, step.schedule) == ("1", "1f1b"), step.name
        assert step.recompute == ("none" if step.model == "bert-large" else "selective")


def test_the_shipped_number_is_the_fit(found: StepCalibration) -> None:
    known, fitted = calibrated(CALIBRATED_STEPS), found.overlay()
    assert {chip: set(numbers) for chip, numbers in known.items()} == {c: {KEY} for c in SPEC_FILES}
    for chip, numbers in fitted.items():
        there, number = known[chip][KEY], numbers[KEY]
        assert there.value == pytest.approx(number.value, abs=0.003), chip
        assert (there.status, there.source) == (number.status, number.source)
    assert {c for c, n in known.items() if n[KEY].status == "calibrated"} == {"trn1"}
    assert len({n[KEY].value for n in known.values()}) == 1  # one for all


def test_no_other_number_is_better(found: StepCalibration) -> None:
    """The slowest row is as far above its measurement as the fastest is below."""
    deviations = [e.deviation for e in found.errors]
    assert max(deviations) == pytest.approx(-min(deviations), abs=0.003)
    assert found.worst < max(abs(e.deviation_raw) for e in found.errors)


def test_deviations_are_shown(found: StepCalibration) -> None:
    text, plain = steps_markdown(found), steps_json(found)
    assert f"worst error {found.worst:.1%}" in text
    for error, row in zip(found.errors, plain["steps"], strict=True):
        assert error.deviation_left_out is not None
        shown = (error.deviation_raw, error.deviation, error.deviation_left_out)
        assert all(f"{deviation:+.1%}" in text for deviation in shown)
        assert row["error"] == row["modelled_ps"] / error.step.ps - 1
    assert steps_view(found)


def test_the_page_states_the_deviations(found: StepCalibration) -> None:
    """Rows of its table, to half a percent."""
    page = (Path(__file__).parents[1] / "docs" / "measured.md").read_text("utf-8")
    lines = page.partition("<!-- calibrate steps -->")[2].partition("<!-- /calibrate")[0]
    rows = {c[1].strip(): c for line in lines.splitlines() if len(c := line.split("|")) > 8}
    for error in found.errors:
        cells = rows[error.step.name]
        shown = [float(cells[k].strip(" %")) / 100 for k in (5, 7, 8)]
        real = [error.deviation_raw, error.deviation, error.deviation_left_out]
        assert shown == pytest.approx(real, abs=0.005)


# --- what the number does ---


def test_plans_use_the_number_and_say_so(small: StepModel) -> None:
    efficiency = load_chip("trn1").program_efficiency
    result = price_plan(small.plan)
    assert result.step == small.ps(efficiency) > small.ps(1.0)
    assert KEY in result.leaned_on
    row = next(row for row in specs(load_chip("trn1")) if row["name"] == KEY)
    assert (row["section"], row["status"]) == ("program", "calibrated")
    assert "gpt3-46b" in row["source"]


def test_the_number_is_of_compute_alone(small: StepModel) -> None:
    """A step between the kernels' pace and that divided by all of the number."""
    assert small.ps(1.0) < small.ps(0.8) < small.ps(1.0) / 0.8


def test_an_overlay_sets_it(tmp_path: Path, small: StepModel) -> None:
    path = tmp_path / "mine.toml"
    text = steps.StepCalibration(0.8, ()).overlay_text("here")
    path.write_text(text)
    assert parse_overlay(text, "mine")["trn1"][KEY].value == 0.8
    plan = Plan.of(
        SMALL.model, instance=SMALL.instance, mesh=SMALL.mesh, seq=SMALL.seq,
        global_batch=SMALL.global_batch, zero="1", overlay=path,
    )  # fmt: skip
    assert price_plan(plan).step == small.ps(0.8)


@pytest.mark.parametrize("value", [0.0, -1.0, 1.01, float("nan")])
def test_a_number_that_cannot_be(value: float, small: StepModel) -> None:
    with pytest.raises(BadInput, match="^program_efficiency: .* allowed: above 0, at most 1"):
        small.ps(value)


# --- the fit ---


@pytest.mark.parametrize("truth", [0.6, 0.75, 0.9])
def test_the_number_is_recovered(small: StepModel, truth: float) -> None:
    assert fit([measured(small, small.ps(truth))]) == pytest.approx(truth, abs=0.001)


def test_the_fit_balances_the_worst(small: StepModel) -> None:
    slow, fast = (measured(small, small.ps(0.75) * factor) for factor in (1.05, 0.95))
    found = fit([slow, fast])
    assert slow.deviation(found) == pytest.approx(-fast.deviation(found), abs=0.002)


def test_the_fit_stays_within_bounds(small: StepModel) -> None:
    assert fit([measured(small, small.ps(1.0) / 2)]) == HIGH  # faster than its kernels
    assert fit([measured(small, small.ps(LOW) * 2)]) == LOW


# --- files and the command ---


def step_file(path: Path, **changes: object) -> Path:
    row: dict[str, object] = {
        "name": "mine", "model": "llama2-7b", "instance": "trn1.32xlarge", "mesh": "dp=4,tp=8",
        "seq": 128, "global_batch": 4, "sequences_per_s": 40.0, "source": "here",
    }  # fmt: skip
    row |= changes
    lines = [f"{key} = {json.dumps(value)}" for key, value in row.items() if value is not None]
    path.write_text("\n".join(["[[step]]", *lines]))
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq": None}, r"a\.toml: step mine: seq missing"),
        ({"name": None}, r"a\.toml: step without a name: name missing"),
        ({"sequence": 1}, r"a\.toml: step mine: unknown sequence"),
        ({"sequences_per_s": 0}, r"a\.toml: step mine: .*sequences_per_s 0 is not above 0"),
        ({"sequences_per_s": "many"}, r"a\.toml: step mine: "),
    ],
)
def test_a_wrong_step_is_named(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(BadFile, match=message):
        read_steps(step_file(tmp_path / "a.toml", **changes))


def test_files_that_are_no_steps(tmp_path: Path) -> None:
    for text in ("", "x = 1", "step = 1", "[[steps]]\nname = 'a'"):
        with pytest.raises(BadFile, match=r"^mine: needs tables \[\[step\]\]"):
            parse_steps(text, "mine")
    with pytest.raises(BadFile, match="^mine: "):
        parse_steps("[", "mine")
    with pytest.raises(BadFile, match="No such file"):
        read_steps(tmp_path / "none.toml")


def test_a_step_that_cannot_be_planned_is_refused() -> None:
    with pytest.raises(BadInput, match="^instance: trn4 is not valid"):
        replace(SMALL, instance="trn4").plan()


def test_the_command_fits_a_users_step_and_writes_an_overlay(tmp_path: Path) -> None:
    path, out = step_file(tmp_path / "mine.toml", zero="1"), tmp_path / "out.toml"
    asked = ["calibrate", "--steps", str(path), "--out", str(out), "--json"]
    done = CliRunner().invoke(cli, asked, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    (row,) = document["steps"]
    assert row["step"] == "mine" and row["left_out_ps"] is None
    assert parse_overlay(out.read_text(), "out")["trn1"][KEY].value == document[KEY]
    assert "Written by `trnsim " in out.read_text()
