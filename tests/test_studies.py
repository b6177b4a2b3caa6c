"""Studies: what is refused before a point runs, interruptions, and the table, which is the same."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from trnsim.cluster.cli_study import study as command
from trnsim.cluster.studies.definition import read_study
from trnsim.cluster.studies.execute import Job, Work
from trnsim.cluster.studies.journal import key_of
from trnsim.cluster.studies.run import JOURNAL, StudyRun
from trnsim.cluster.studies.runners import RUNNERS, check
from trnsim.cluster.studies.table import to_plain
from trnsim.device.errors import BadFile, BadInput, Unsupported

EXAMPLES = Path(__file__).parents[1] / "examples" / "studies"
ALL_REDUCE = """
run = "collective"
[fixed]
operation = "all_reduce"
instance = "trn2.3xlarge"
[sweep]
minbytes = ["1MiB", "16MiB"]
algorithm = ["ring", "mesh", "nosuch"]
[pareto]
lower = ["time_us"]
"""
PLAN = """
run = "plan"
[fixed]
model = "llama2-7b"
seq = 128
global_batch = 64
[sweep]
tp = [8]
"""
PLACE = """
run = "place"
[fixed]
instance = "trn1.32xlarge"
mesh = "dp=4,tp=8"
traffic = "tp=all_reduce:1MiB"
search_steps = 1
candidates = 2
"""


def study_of(tmp_path: Path, text: str):
    file = tmp_path / "study.toml"
    file.write_text(text)
    return read_study(file, tuple(RUNNERS))


def run_of(tmp_path: Path, name: str) -> StudyRun:
    return StudyRun(study_of(tmp_path, ALL_REDUCE), tmp_path / name, "local")


def documents(folder: Path) -> dict[str, bytes]:
    """The tables of a study's folder."""
    return {path.name: path.read_bytes() for path in folder.glob("table.*")}


def test_interrupted_study_repeats_nothing_and_ends_the_same(tmp_path):
    whole = run_of(tmp_path, "whole")
    whole.run()

    def stop(done: int, of: int) -> None:
        if done == 4:
            raise KeyboardInterrupt

    cut = run_of(tmp_path, "cut")
    with pytest.raises(KeyboardInterrupt):
        cut.run(stop)
    assert documents(cut.folder) == {}  # no table of half a study
    journal = cut.folder / JOURNAL
    kept = journal.read_bytes()
    journal.write_bytes(kept[:-7])  # killed while it wrote the fourth point
    steps: list[tuple[int, int]] = []
    cut.run(lambda *step: steps.append(step))
    assert steps == [(3, 6), (4, 6), (5, 6), (6, 6)]
    assert documents(cut.folder) == documents(whole.folder) != {}
    assert journal.read_bytes().startswith(kept)


def test_ray_gives_the_table_of_one_process(tmp_path, ray_instance):
    alone, by_actors = run_of(tmp_path, "alone"), run_of(tmp_path, "actors")
    alone.run()
    steps: list[int] = []
    replace(by_actors, runtime="ray").run(lambda done, _: steps.append(done))
    assert steps == list(range(7))
    assert documents(by_actors.folder) == documents(alone.folder) != {}


def test_actors_go_on_with_shapes_that_they_have_begun():
    groups = [[Job(f"{name}{number}", {}) for number in range(5)] for name in "abc"]
    work, one, two = Work(groups, 2), set(), set()

    def keys(begun: set[int]) -> str:
        return " ".join(job.key for job in work.take(begun))

    assert (keys(one), keys(two)) == ("a0 a1", "b0 b1")
    assert [keys(one) for _ in range(3)] == ["a2 a3", "a4", "c0 c1"]  # c is nobody's yet
    assert [keys(two) for _ in range(3)] == ["b2 b3", "b4", "c2 c3"]  # nothing is left but c
    assert (keys(one), work.calls) == ("c4", 0)


def test_refused_points_are_rows_that_say_why(tmp_path):
    table = run_of(tmp_path, "all").run()
    refused = [row["algorithm"] for row in table.rows if row["refused"]]
    assert refused == ["nosuch"] * 2 and len(table.done) == 4
    best = min(table.done, key=lambda row: row["time_us"])
    assert [table.rows[number] for number in table.front] == [best]
    json.dumps(to_plain(table), allow_nan=False)


def test_one_process_at_a_time_and_no_foreign_journals(tmp_path):
    run = run_of(tmp_path, "busy")

    def again(done: int, of: int) -> None:
        if not done:
            with pytest.raises(BadFile, match="another study is running"):
                run.run()

    run.run(again)
    (run.folder / JOURNAL).write_bytes(b"not a journal")
    with pytest.raises(BadFile, match="not a journal"):
        run.run()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("modl = [1]", "option: modl is not valid; .*nearest valid: model"),
        ("[pareto]\nlower = ['memory_gb']", "memory_gb is not valid; .*nearest valid: memory_gib"),
        ("[pareto]\nlower = ['seq']", "seq is not valid"),  # the same for all points
        ("[[plot]]\nx = 'tp'\ny = 'mfuu'", "column of plot lines: mfuu .*nearest valid: mfu"),
        ("[[plot]]\nx = 'tp'\ny = 'mfu'\nseries = ['lncc']", "lncc is not valid"),
    ],
)
def test_names_are_checked_before_a_point_runs(tmp_path, more, message):
    file = tmp_path / "study.toml"
    file.write_text(PLAN + more)
    done = CliRunner().invoke(command, [str(file), "--out", str(tmp_path / "out")])
    assert isinstance(done.exception, BadInput)
    with pytest.raises(BadInput, match=message):
        check(read_study(file, tuple(RUNNERS)))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", [PLAN, ALL_REDUCE, PLACE])
def test_columns_of_a_command_are_those_that_its_points_have(tmp_path, text):
    study = study_of(tmp_path, text)
    check(study)
    kind = RUNNERS[study.run]
    found = kind.run(dict(study.fixed) | dict(study.points[0]))
    assert set(found) - set(kind.columns) <= {"dp_hops", "tp_hops"}


def test_points_run_again_when_a_file_that_they_name_has_changed(tmp_path):
    file = tmp_path / "ranks"
    options = {"model": "llama2-7b", "rank_file": str(file)}
    keys = {key_of("plan", options)}
    for text in ("rank 0=host slot=0", "rank 0=host slot=1"):
        file.write_text(text)
        keys |= {key_of("plan", options), key_of("plan", dict(options))}
    assert len(keys) == 3


def test_a_study_of_refusals_is_refused(tmp_path):
    file = tmp_path / "study.toml"
    file.write_text(ALL_REDUCE.replace('"ring", "mesh", ', ""))
    done = CliRunner().invoke(command, [str(file), "--runtime=local", f"--out={tmp_path / 'out'}"])
    assert isinstance(done.exception, Unsupported)
    assert str(done.exception).startswith("all 2 points are refused; algorithm: nosuch is not")
    assert not list((tmp_path / "out").glob("table.*"))


def test_a_point_does_not_search(tmp_path):
    study = study_of(tmp_path, PLAN.replace("[fixed]", "[fixed]\nsearch = true"))
    with pytest.raises(BadInput, match="^search: True is not valid"):
        RUNNERS[study.run].run(dict(study.fixed) | dict(study.points[0]))


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.toml")), ids=lambda file: file.stem)
def test_examples_are_studies(file):
    check(read_study(file, tuple(RUNNERS)))
