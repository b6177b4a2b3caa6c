"""Calibration: reading measurements, recovering constants, and how well the shipped ones do."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from trnsim.cluster import calibrate
from trnsim.cluster.calibrate import CONSTANTS, Calibration, Constant, Model, fit
from trnsim.cluster.cli import cli
from trnsim.cluster.instances import load_instance
from trnsim.cluster.measured import COLUMNS, Group, Series, read_nccom, read_series, shipped
from trnsim.device.chip import CALIBRATED, calibrated, load_chip
from trnsim.device.errors import BadFile, BadInput
from trnsim.device.overlay import apply_overlay, overlay_text, parse_overlay, read_overlay

ROW = {
    "id": "S", "kind": "collective", "platform": "trn2.3xlarge", "nodes": "1", "ranks": "4",
    "lnc": "2", "op": "all_reduce", "dtype": "fp32", "bytes": "1048576", "bytes_mean": "buffer",
    "time_us": "20", "use": "latency and slope", "source": "here",
}  # fmt: skip


def csv(path: Path, *rows: dict[str, str]) -> Path:
    lines = [",".join(COLUMNS), *(",".join((ROW | row)[c] for c in COLUMNS) for row in rows)]
    path.write_text("\n".join(lines))
    return path


def named(key: str, chip: str) -> Constant:
    return next(c for c in CONSTANTS if c.key == key and chip in c.chips)


@pytest.fixture(scope="module")
def found() -> Calibration:
    return calibrate.calibrate(shipped())


# --- the shipped constants ---


def test_slopes_of_the_shipped_points(found: Calibration) -> None:
    summary = found.summary()
    assert len([e for e in found.errors if e.slope is not None]) == 11
    assert summary["slope median"] <= 0.10
    assert summary["slope worst"] <= 0.25


def test_latencies_of_the_shipped_points(found: Calibration) -> None:
    timed = [e for e in found.errors if e.series.latency]
    assert {e.series.name for e in timed} == {"C-S2", "C-J1", "C-J2", "C-S7"}
    for error in timed:
        assert np.abs(error.points).max() <= 0.25, error.series.name


def test_series_are_predicted_from_the_others(found: Calibration) -> None:
    assert found.summary()["slope left out median"] <= 0.15


def test_shipped_numbers_are_the_fit(found: Calibration) -> None:
    """Constants are in the file with three digits, and only those that the points determine."""
    fitted, known = found.overlay(), calibrated()
    assert fitted.keys() == known.keys()
    for chip, numbers in fitted.items():
        assert numbers.keys() == known[chip].keys()
        for key, number in numbers.items():
            there = known[chip][key]
            assert there.value == pytest.approx(number.value, rel=0.01), (chip, key)
            assert (there.status, there.source) == (number.status, number.source)


def test_every_constant_serves_several_series_or_a_generation(found: Calibration) -> None:
    """None belongs to a series: they are numbers of chips, fewer than series, all determined."""
    assert len(CONSTANTS) < len(found.errors)
    assert set(found.fit.by) == set(CONSTANTS)
    assert {c.key for c in CONSTANTS} <= set(load_chip("trn2").numbers)


def test_fitted_chips_are_calibrated_and_others_assumed() -> None:
    assert load_chip("trn2").number("link_efficiency").status == "calibrated"
    assert load_chip("trn3").number("link_efficiency").status == "assumed"
    assert "C-J4aa8" in load_chip("trn2").number("link_efficiency").source


# --- recovery ---


def synthetic(values: dict[Constant, float], series: list[Series]) -> list[Series]:
    """The same series, as the model has them."""
    model = Model()
    return [replace(s, times=model.times(s, values)) for s in series]


def test_constants_are_recovered_from_what_the_model_makes_of_them() -> None:
    rate, start = named("on_chip_bytes_per_s", "trn2"), named("collective_start_ps", "trn2")
    efficiency = named("link_efficiency", "trn2")
    truth = {c: c.start for c in CONSTANTS} | {rate: 70e9, start: 5e6, efficiency: 0.3}
    few = [s for s in shipped() if s.name in ("C-J1", "C-J4aa8")]
    again = fit(Model(), synthetic(truth, few))
    for constant in (rate, start, efficiency):
        assert again.values[constant] == pytest.approx(truth[constant], rel=0.01)


def test_what_nothing_determines_stays() -> None:
    few = [s for s in shipped() if s.name == "C-J1"]
    before = {c: c.start for c in CONSTANTS} | {named("efa_efficiency", "trn2"): 0.5}
    again = fit(Model(), few, before)
    assert again.values[named("efa_efficiency", "trn2")] == 0.5
    assert set(again.by) == {
        named("on_chip_bytes_per_s", "trn2"),
        named("collective_start_ps", "trn2"),
    }
    overlay = Calibration(again, ()).fit.by
    assert all(names == ("C-J1",) for names in overlay.values())


def test_start_costs_come_from_latency_rows_alone() -> None:
    few = [s for s in shipped() if s.name in ("C-J6ar", "C-J4aa8")]
    slow = [replace(s, times=s.times + 1e9) for s in few]  # a millisecond of launch in every row
    again = fit(Model(), slow)
    assert again.by
    assert not [c for c in again.by if c.unit == "ps"]


def test_a_fit_is_deterministic() -> None:
    few = [s for s in shipped() if s.name in ("C-J1", "C-J2")]
    one, other = fit(Model(), few), fit(Model(), few)
    assert one.values == other.values


# --- reading ---


def test_sizes_are_read_as_the_file_means_them(tmp_path: Path) -> None:
    rows = [{"op": "all_gather", "bytes": b} for b in ("1024", "2048")]
    (output,) = read_series(csv(tmp_path / "a.csv", *rows))
    assert output.group.collective(1024).nbytes == 1024
    rows = [row | {"bytes_mean": "per-rank input"} for row in rows]
    (each,) = read_series(csv(tmp_path / "b.csv", *rows))
    assert each.group.collective(1024).nbytes == 4 * 1024
    assert each.nbytes.tolist() == [1024, 2048]


def test_slopes_leave_out_what_the_row_says(tmp_path: Path) -> None:
    use = "slope only above 256 MiB (launch)"
    rows = [{"bytes": str(m << 20), "time_us": str(t), "use": use}
            for m, t in ((1, 900), (256, 1000), (512, 2000))]  # fmt: skip
    (series,) = read_series(csv(tmp_path / "a.csv", *rows))
    assert not series.latency
    assert series.slope_of(series.times) == pytest.approx(1e9 / (256 << 20))


def test_ranks_are_the_first_of_each_node() -> None:
    group = Group("trn2.48xlarge", 2, 8, 2, "all_reduce", "fp32")
    assert group.table().tolist() == [[0, 1, 2, 3, 64, 65, 66, 67]]
    pair = Group("trn2.3xlarge", 1, 2, 1, "sendrecv", "uint8", cross_die=True)
    assert pair.table().tolist() == [[0, 4]]
    with pytest.raises(BadInput, match=r"^ranks: 9 is not valid; allowed: 1 times 1 to 8"):
        Group("trn2.3xlarge", 1, 9, 1, "all_reduce", "fp32").table()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"time_us": "soon"}, r"a\.csv: S 1048576 B: time_us 'soon' is not a number above 0"),
        ({"time_us": "-1"}, r"time_us '-1' is not a number above 0"),
        ({"time_us": "nan"}, r"time_us 'nan' is not a number above 0"),
        ({"bytes": ""}, r"bytes '' is not a number above 0"),
        ({"op": "all_reduced"}, r"operation: all_reduced .* nearest valid: all_reduce"),
        (
            {"op": "all_reduce sideways"},
            r"op: all_reduce sideways is not valid; allowed: one of all_reduce, .* cross die",
        ),
        ({"platform": "trn2.4xlarge"}, r"platform: trn2\.4xlarge .* nearest valid: trn2\.48xlarge"),
        ({"dtype": "float"}, r"-d: float is not valid"),
    ],
)
def test_a_wrong_row_is_named(tmp_path: Path, row: dict[str, str], message: str) -> None:
    with pytest.raises(BadFile, match=message):
        read_series(csv(tmp_path / "a.csv", row))


def test_files_that_are_no_measurements(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("id,bytes\nS,1\n")
    with pytest.raises(
        BadFile, match=r"a\.csv: column kind, platform, nodes.* missing; needed: id"
    ):
        read_series(path)
    with pytest.raises(BadFile, match="no row of kind collective"):
        read_series(csv(path, {"kind": "kernel"}))
    with pytest.raises(BadFile, match="S: a slope needs two sizes"):
        read_series(csv(path, {}))
    with pytest.raises(BadFile, match="S has rows of different groups or operations"):
        read_series(csv(path, {}, {"ranks": "8"}))
    with pytest.raises(BadFile, match="No such file"):
        read_series(tmp_path / "b.csv")
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadFile, match=r"a\.csv: invalid start byte|a\.csv"):
        read_series(path)


def nccom_file(path: Path, *rows: tuple[int, float]) -> Path:
    results = [{"size(B)": b, "type": "bf16", "time:avg(us)": t} for b, t in rows]
    path.write_text(json.dumps({"results": results}))
    return path


def test_results_of_nccom_test_are_a_series(tmp_path: Path) -> None:
    group = Group("trn2.48xlarge", 1, 64, None, "allr", "uint8")
    series = read_nccom(nccom_file(tmp_path / "mine.json", (1024, 20.0), (2**20, 80.0)), group)
    assert (series.name, series.group.dtype) == ("mine", "bf16")
    assert series.times.tolist() == [20e6, 80e6]
    assert series.latency and series.slope


# --- overlays and the command ---


def test_an_overlay_changes_a_chip_and_says_why(tmp_path: Path) -> None:
    number = named("link_efficiency", "trn2").number(0.25, "mine")
    text = overlay_text({"trn2": {"link_efficiency": number}}, "two\nlines")
    assert text.startswith("# two\n# lines\n\n[trn2.collective]\nlink_efficiency = ")
    path = tmp_path / "mine.toml"
    path.write_text(text)
    chip = apply_overlay(load_chip("trn2"), path)
    assert chip.link_efficiency == 0.25 and chip.number("link_efficiency").source == "mine"
    assert chip.link_rate("torus") == chip.link_bytes_per_s["torus"] // 4
    assert load_instance("trn2.48xlarge", path).chip == chip
    assert load_instance("trn1.32xlarge", path) == load_instance("trn1.32xlarge")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[trn2", "mine: "),
        ("x = 1", "mine: x stands outside a section"),
        ("[trn2]\nlink_efficiency = { value = 1 }", "link_efficiency stands outside a section"),
        ("[trn2.collective]\nlink_efficiency = { value = 1, unit = 'fraction' }",
         r"mine: trn2: \[collective\] link_efficiency: source, status missing"),
    ],
)  # fmt: skip
def test_a_wrong_overlay_is_named(text: str, message: str) -> None:
    with pytest.raises(BadFile, match=message):
        parse_overlay(text, "mine")


def test_an_overlay_has_to_fit_the_chip(tmp_path: Path) -> None:
    number = named("link_efficiency", "trn2").number(0.25, "mine")
    with pytest.raises(BadFile, match=r"\[trn2\] number: link_efficacy .* valid: link_efficiency"):
        apply_overlay(load_chip("trn2"), {"trn2": {"link_efficacy": number}})
    with pytest.raises(BadFile, match=r"link_latency_ps: unit fraction is not ps"):
        apply_overlay(load_chip("trn2"), {"trn2": {"link_latency_ps": number}})
    with pytest.raises(BadFile, match=r"chip: trn4 is not valid"):
        apply_overlay(load_chip("trn2"), {"trn4": {}})
    with pytest.raises(BadFile, match="No such file"):
        apply_overlay(load_chip("trn2"), tmp_path / "none.toml")


def test_the_command_fits_a_users_results_and_writes_an_overlay(tmp_path: Path) -> None:
    """A tool's file and a CSV; only what they determine is written."""
    times = Model().times(
        shipped()[2], {c: c.start for c in CONSTANTS} | {named("on_chip_bytes_per_s", "trn2"): 50e9}
    )
    pairs = zip(shipped()[2].nbytes.tolist(), (times / 1e6).tolist(), strict=True)
    path, out = nccom_file(tmp_path / "mine.json", *pairs), tmp_path / "mine.toml"
    asked = ["calibrate", str(path), "--instance", "trn2.3xlarge", "--lnc", "1", "--op", "sendrecv"]
    done = CliRunner().invoke(cli, [*asked, "-r", "2", "--out", str(out), "--json"])
    assert done.exit_code == 0, done.output
    (series,) = json.loads(done.stdout)["series"]
    assert series["series"] == "mine" and abs(series["slope_error"]) < 0.01
    overlay = read_overlay(out)
    assert overlay["trn2"]["on_chip_bytes_per_s"].value == pytest.approx(50e9, rel=0.01)
    assert overlay["trn2"]["on_chip_bytes_per_s"].status == "calibrated"
    assert "efa_efficiency" not in overlay["trn2"]


def test_the_command_asks_for_what_a_file_does_not_say(tmp_path: Path) -> None:
    path = nccom_file(tmp_path / "mine.json", (1024, 20.0))
    done = CliRunner().invoke(cli, ["calibrate", str(path)])
    assert isinstance(done.exception, BadInput)
    assert str(done.exception).startswith("--instance: nothing is not valid; allowed: what ")


def test_markdown_has_every_series(found: Calibration) -> None:
    from trnsim.cluster.report.calibration_tables import calibration_markdown

    text = calibration_markdown(found)
    assert all(f"| {s.name} | " in text for s in shipped())
    assert "slope median" in text and CALIBRATED.endswith(".toml")
