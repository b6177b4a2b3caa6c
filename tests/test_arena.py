"""A pair's memory is one memory, and its barrier orders what the pair does."""

import mmap
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from trnsim.cluster import arena as arena_module
from trnsim.cluster.arena import Arena, PairBarrier
from trnsim.device.errors import DeadlineExceeded

NAMES = ("rank 0 core 0", "rank 0 core 1")

PEER = """
import sys
import numpy as np
from trnsim.cluster.arena import Arena, PairBarrier

arena = Arena.attach(sys.argv[1], int(sys.argv[2]))
barrier = PairBarrier(arena, 1, ("core 0", "core 1"))
values = arena.array(64, (8,), np.float32)
for turn in range(200):
    barrier.wait(30)  # core 0 has written its turn
    values += values
    barrier.wait(30)
print(values.tolist())
"""


@pytest.fixture(params=["descriptor", "file", "disk"])
def source(request, monkeypatch, tmp_path):
    """Each place a shared memory may come from; files go to (and must leave) `tmp_path`."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if request.param == "file":
        monkeypatch.setattr(arena_module, "_HAS_PROC", False)
    if request.param == "disk":
        monkeypatch.setattr(arena_module, "available_memory", lambda: 0)
    return tmp_path


def test_two_processes_share_memory_and_meet(source):
    size = 1 << 16
    arena = Arena.create(size)
    command = [sys.executable, "-c", PEER, arena.name, str(size)]
    peer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    barrier = PairBarrier(arena, 0, ("core 0", "core 1"))
    values = arena.array(64, (8,), np.float32)
    for turn in range(200):
        values[:] = np.arange(8) + turn
        barrier.wait(30)
        if turn == 0:
            arena.seal()
        barrier.wait(30)
        assert values.tolist() == (2.0 * (np.arange(8) + turn)).tolist()
    output, _ = peer.communicate(timeout=30)
    assert output.strip() == str((2.0 * (np.arange(8) + 199)).tolist())
    assert list(source.iterdir()) == []


def test_sealing_closes_the_descriptor():
    before = os.listdir("/proc/self/fd")
    arena = Arena.create(4096)
    name = arena.name
    assert Arena.attach(name, 4096).array(0, (2,)).tolist() == [0, 0]
    arena.seal()
    del arena
    assert len(os.listdir("/proc/self/fd")) <= len(before)


@pytest.mark.parametrize("gib", [4, 96])
def test_a_large_memory_takes_only_the_pages_that_are_written(gib):
    before = resident_bytes()
    arena = Arena.local(gib << 30)
    assert arena.array((gib << 30) - 8, (1,), np.int64)[0] == 0
    arena.array((gib << 30) - 8, (1,), np.int64)[0] = 7
    assert arena.array((gib << 30) - 8, (1,), np.int64)[0] == 7
    assert resident_bytes() - before < 1 << 26


def resident_bytes() -> int:
    """Main memory that this process takes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_views_alias_the_memory_by_byte_address():
    arena = Arena.local(64)
    arena.array(8, (2, 2), np.float32)[:] = [[1, 2], [3, 4]]
    assert arena.array(16, (2,), np.float32).tolist() == [3, 4]
    halves = arena.array(8, (8,), ml_dtypes.bfloat16)
    assert halves[1::2].astype(float).tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(("offset", "stop"), [(-4, 4), (60, 68), (64, 72)])
def test_views_outside_of_the_memory_are_refused(offset, stop):
    message = rf"^HBM bytes {offset}\.\.{stop} are outside of the arena's 64$"
    with pytest.raises(ValueError, match=message):
        Arena.local(64).array(offset, (2,), np.float32)


def test_neither_side_runs_ahead_of_the_other():
    """Between two barriers both sides see the other's last write: the whole trace is checked."""
    arena, turns = Arena.local(4096), 300
    board = arena.array(0, (2,), np.int64)
    traces: list[list[int]] = [[], []]

    def run(core: int) -> None:
        barrier = PairBarrier(arena, core, NAMES)
        for turn in range(turns):
            board[core] = turn
            barrier.wait(30)
            traces[core].append(int(board[1 - core]))
            barrier.wait(30)

    threads = [threading.Thread(target=run, args=(core,)) for core in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert traces == [list(range(turns))] * 2


def test_a_deadline_names_who_waits_for_whom():
    barrier = PairBarrier(Arena.local(64), 1, NAMES)
    with pytest.raises(
        DeadlineExceeded,
        match=r"^rank 0 core 1 waited 0\.01 s at barrier 1"
        r" for rank 0 core 0, which is at barrier 0$",
    ):
        barrier.wait(0.01)


def test_without_futexes_the_barrier_still_meets(monkeypatch):
    monkeypatch.setattr(arena_module, "_FUTEX_NUMBERS", {})
    test_neither_side_runs_ahead_of_the_other()
