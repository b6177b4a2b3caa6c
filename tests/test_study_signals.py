"""A study whose process is stopped by a signal, and started again."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trnsim.cluster.studies.journal import Journal
from trnsim.cluster.studies.run import JOURNAL

STUDY = """
run = "collective"
[fixed]
operation = "all_reduce"
nodes = 2
[sweep]
minbytes = ["1MiB", "2MiB", "4MiB", "8MiB", "16MiB", "32MiB"]
algorithm = ["best", "ring"]
"""
POINTS, DEADLINE_S = 12, 60.0
MARK = b"busbw_gbps"  # once in every record
COMMAND = "from trnsim.cluster.cli import main; main()"


def start(folder: Path) -> subprocess.Popen:
    """`trnsim study` in a group of its own."""
    words = ["study", "study.toml", "--runtime", "local", "--out", folder.name]
    return subprocess.Popen(
        [sys.executable, "-P", "-c", COMMAND, *words],
        cwd=folder.parent,
        env={**os.environ, "COLUMNS": "200"},
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_points(process: subprocess.Popen, journal: Path, least: int) -> None:
    """Returns when the journal has that many points."""
    deadline = time.monotonic() + DEADLINE_S
    while not journal.exists() or journal.read_bytes().count(MARK) < least:
        assert process.poll() is None and time.monotonic() < deadline
        os.sched_yield()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a study that nothing stops."""
    folder = tmp_path_factory.mktemp("study")
    (folder / "study.toml").write_text(STUDY)
    process = start(folder / "whole")
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0
    return folder / "whole"


def tables(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("table.*")}


def stopped(folder: Path, how: signal.Signals, least: int) -> tuple[int, str, int]:
    """A run that gets a signal after some points: (exit code, standard error, points kept)."""
    process = start(folder)
    wait_for_points(process, folder / JOURNAL, least)
    os.killpg(process.pid, how)
    said = process.communicate(timeout=DEADLINE_S)[1]
    assert not tables(folder)
    with Journal(folder / JOURNAL) as journal:
        return process.returncode, said, len(journal.results)


def test_stopped_by_signals_and_started_again(whole: Path) -> None:
    folder = whole.with_name("stopped")
    code, _, kept = stopped(folder, signal.SIGKILL, 3)
    assert code == -signal.SIGKILL and 3 <= kept < POINTS
    code, said, kept = stopped(folder, signal.SIGINT, kept + 3)
    assert code == 130 and 6 <= kept < POINTS
    assert "finished points are kept in stopped" in said
    process = start(folder)
    said = process.communicate(timeout=DEADLINE_S)[1]
    assert said.startswith(f"{kept} of {POINTS} points were finished before")
    assert tables(folder) == tables(whole)
    with Journal(folder / JOURNAL) as journal:
        assert len(journal.results) == POINTS
    assert (folder / JOURNAL).read_bytes().count(MARK) == POINTS  # none is there twice


def test_a_record_that_was_cut_off_is_run_again(whole: Path) -> None:
    folder = whole.with_name("cut")
    folder.mkdir()
    (folder / JOURNAL).write_bytes((whole / JOURNAL).read_bytes()[:-5])
    said = start(folder).communicate(timeout=DEADLINE_S)[1]
    assert said.startswith(f"{POINTS - 1} of {POINTS} points")
    assert tables(folder) == tables(whole)
