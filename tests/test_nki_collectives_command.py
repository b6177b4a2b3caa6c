"""Kernels on ranks as Ray actors, and `trnsim kernel --instance`."""

import json

import numpy as np
import pytest

from trnsim.cluster.kernel_execution import Ranked
from trnsim.cluster.kernel_ranks import simulate_ranks
from trnsim.device.errors import BadInput, CollectiveMismatch, IllegalInstruction

from . import nki_collective_kernels as kernels
from .nki_collective_kernels import nki
from .nki_command import run_command as command

FILE = kernels.__file__
BIG = "trn2.48xlarge"


# ---- Ray -------------------------------------------------------------------------------------


def on(runtime, kernel, inputs, **machine):
    return simulate_ranks(kernel, inputs, instance=BIG, runtime=runtime, **machine)


def assert_alike(one, other) -> None:
    """The same bytes and the same picoseconds, of every instruction and collective."""
    assert one.collectives == other.collectives and one.time == other.time
    for a, b in zip(one.ranks, other.ranks, strict=True):
        assert (a.cores, a.findings, a.peak_hbm) == (b.cores, b.findings, b.peak_hbm)
        pairs = zip(_arrays(a.outputs), _arrays(b.outputs), strict=True)
        assert all(p.dtype == q.dtype and p.tobytes() == q.tobytes() for p, q in pairs)


def _arrays(outputs) -> list[np.ndarray]:
    return list(outputs) if isinstance(outputs, tuple) else [outputs]


def test_actors_give_the_same_bytes_and_the_same_picoseconds(ray_instance):
    random = np.random.default_rng(3)
    x = random.standard_normal((4, 16, 8), np.float32).astype(kernels.nl.bfloat16)
    groups = kernels.ncc.ReplicaGroup([[0, 3], [2, 1]])
    inputs = [(x[r], groups) for r in range(4)]
    machine = {"ranks": 4, "lnc": 2}
    assert_alike(*(on(r, kernels.all_reduce, inputs, **machine) for r in ("local", "ray")))
    counts = [[1, 0, 2], [0, 3, 1], [2, 2, 2]]
    starts = [np.concatenate([[0], np.cumsum(row)[:-1]]) for row in counts]
    tables = [np.array([*pair, [0] * 3], np.uint32) for pair in zip(counts, starts, strict=True)]
    ragged = [
        Ranked((np.arange(8, dtype=np.float32) + 10 * r, table, [[0, 1, 2]], "all_to_all_v", 9))
        for r, table in enumerate(tables)
    ]
    pair = (on(r, kernels.ragged, ragged, ranks=3, nodes=3, lnc=1) for r in ("local", "ray"))
    assert_alike(*pair)


def test_errors_of_actors_are_those_of_the_process(ray_instance):
    x = np.zeros((2, 8, 8), np.float32)
    for kernel, rest, error in (
        (kernels.differing, ("op",), CollectiveMismatch),
        (kernels.refused, ("stranger",), IllegalInstruction),
    ):
        told = []
        for runtime in ("local", "ray"):
            with pytest.raises(error) as caught:
                on(runtime, kernel, [(x[r], [[0, 1]], *rest) for r in range(2)], ranks=2)
            told.append(str(caught.value))
        assert told[0] == told[1]


def test_what_cannot_travel_is_refused_before_ray_starts():
    @nki.jit
    def nested(x):
        return x

    with pytest.raises(BadInput, match="kernel: .*nested is not valid; allowed: a function at the"):
        on("ray", nested, (1,), ranks=1)
    with pytest.raises(BadInput, match="argument of a kernel on Ray: .*object has no wire form"):
        on("ray", kernels.all_reduce, (object(), [[0]]), ranks=1)


# ---- the command line ------------------------------------------------------------------------


def test_the_command_shows_ranks_and_collectives(capsys, monkeypatch, tmp_path):
    trace = tmp_path / "trace.json"
    words = [f"{FILE}:all_reduce", "--arg", "f32[128,64]", "--arg", "groups=groups[4]"]
    words += ["--instance", BIG, "--ranks", "8", "--lnc", "2", "--trace", trace]
    code, out, err = command(capsys, monkeypatch, *words, "--json")
    assert (code, err) == (0, "")
    numbers = json.loads(out)
    randoms = [np.random.default_rng((0, rank)) for rank in range(8)]
    inputs = [r.standard_normal((128, 64), np.float32) for r in randoms]
    groups = [[0, 1, 2, 3], [4, 5, 6, 7]]
    result = simulate_ranks(
        kernels.all_reduce, lambda r: (inputs[r], groups), ranks=8, lnc=2, instance=BIG
    )
    assert numbers["time_ps"] == result.time
    assert [rank["time_ps"] for rank in numbers["ranks"]] == [r.time for r in result.ranks]
    (call,) = numbers["collectives"]
    assert (call["algorithm"], call["groups"], call["size"]) == ("mesh", 2, 4)
    assert call["duration"] == result.collectives[0].duration
    entries = json.loads(trace.read_text())["traceEvents"]
    names = [e["args"]["name"] for e in entries if e["name"] == "process_name"]
    assert names == [f"rank {r} core {c}" for r in range(8) for c in range(2)]
    tracks = {e["args"]["name"] for e in entries if e["name"] == "thread_name"}
    assert tracks == {"dma load", "dma store", "collective channel 0"} & tracks
    assert sum(e["name"] == "AllReduce" for e in entries) == 16
    code, out, err = command(capsys, monkeypatch, *words)
    assert code == 0 and f"on 8 ranks of 1 x {BIG} at LNC=2" in out
    assert "all_reduce" in out and "2 x 4" in out and "latency of 2" in out
    overlay = tmp_path / "slow.toml"
    overlay.write_text(
        '[trn2.collective]\ncollective_start_ps = { value = "20us", unit = "time", source = "x", '
        'status = "assumed", note = "a test" }\n'
    )
    words += ["--time-only", "--overlay", overlay, "--json"]
    numbers = json.loads(command(capsys, monkeypatch, *words)[1])
    assert numbers["time_ps"] == result.time
    slower = 20_000_000 - result.ranks[0].chip.collective_start_ps
    assert [run["time_ps"] for run in numbers["overlays"]] == [result.time + slower]


@pytest.mark.parametrize(
    "words, message",
    [
        (["--ranks", "2"], "--instance: none is not valid; allowed: an instance for --ranks"),
        (["--ranks", "6", "--instance", BIG], "--arg groups: 4 is not valid; allowed: a divisor"),
        (["--instance", "trn9"], "instance: trn9 is not valid"),
        (["--instance", "trn1.2xlarge", "--lnc", "2"], "LNC: 2 is not valid"),
        (["--instance", BIG, "--ranks", "4", "--chip", "trn3"], "allowed: trn2: that of"),
        (["--instance", BIG, "--ranks", "4", "--address", "x:1"], "address: x:1 is not valid"),
    ],
)
def test_bad_machines_are_one_line(capsys, monkeypatch, tmp_path, words, message):
    monkeypatch.chdir(tmp_path)
    given = [f"{FILE}:all_reduce", "--arg", "f32[8,8]", "--arg", "groups[4]", *words]
    code, out, err = command(capsys, monkeypatch, *given)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert not list(tmp_path.iterdir())
