"""`trnsim compare`: files of nccom-test beside simulated ones, and what GB/s was in them."""

import json
import sys
from pathlib import Path

import pytest

from trnsim.cluster import compare, nccom_files
from trnsim.cluster.cli import main

OLD_TABLE = """\
nccom-test -r 2 allr
     size(B)    count(elems)     type    time(us)    algbw(GB/s)    busbw(GB/s)
    33554432        33554432    uint8         768          40.69          40.69
Avg bus bandwidth:      40.6901GB/s
"""
GUIDE = {
    "results": [
        {
            "size(B)": size, "count(elems)": size // 4, "type": "fp32",
            "algbw(GB/s)": size / time / 1e3, "busbw(GB/s)": size / time / 1e3 * 31 / 32,
            "time:avg(us)": time,
        }
        for size, time in ((1024, 6.19), (8192, 6.55), (65536, 8.18), (524288, 23.11))
    ]
}  # fmt: skip
"""The sample of --report-to-json-file in nccom-test's guide: 32 ranks, all_gather."""


def simulated(rows: list[tuple[int, str, float]], factor: float) -> dict:
    """A document as `trnsim collective` writes it."""
    results = [
        {
            "size(B)": size, "count(elems)": size, "type": dtype, "time:avg(us)": time,
            "algbw(GB/s)": size / time / 1e3, "busbw(GB/s)": size / time / 1e3 * factor,
            "algorithm": "hierarchical:rdh+mesh",
        }
        for size, dtype, time in rows
    ]  # fmt: skip
    about = {"operation": "all_reduce", "site": "trn1.2xlarge at LNC=1", "N": 2}
    return {"results": results, "trnsim": {**about, "bus_factor": factor}}


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")


def run(line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    monkeypatch.setattr(sys, "argv", ["trnsim", *line.split()])
    code = 0
    try:
        main()
    except SystemExit as done:
        code = int(done.code or 0)
    caught = capsys.readouterr()
    return code, caught.out, caught.err


GOLDEN = """\
                                              real  simulated
     size           real  simulated          busbw      busbw  real       simulated
      (B)  type     (us)       (us)  ratio  (GB/s)     (GB/s)  algorithm  algorithm
 ──────────────────────────────────────────────────────────────────────────────────────
 33554432  uint8  768.00     691.20  0.900   43.69      48.55  -          hierarchical:
                                                                          rdh+mesh
ratio is time simulated / real: geometric mean 0.900, furthest from 1 is 0.900
at 33554432 B (1 rows compared)
1 of 2 rows of sim.json (simulated) unmatched
real.txt: assumed GiB/s under the name "GB/s": 33554432 B in 768 us is 43.69
GB/s = 40.69 GiB/s, it prints 40.69; computed anew from size and time
sim.json: simulated, all_reduce, trn1.2xlarge at LNC=1, N=2; GB/s is 1e9
"""


def test_an_older_release_prints_gib_as_gb(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """U19: 33,554,432 B in 768 us is 43.69 GB/s = 40.69 GiB/s."""
    Path("real.txt").write_text(OLD_TABLE)
    rows = [(33554432, "uint8", 691.2), (33554432, "bf16", 1.0)]
    Path("sim.json").write_text(json.dumps(simulated(rows, 1.0)))
    code, out, err = run("compare real.txt sim.json", monkeypatch, capsys)
    assert (code, err) == (0, "")
    lines = [line.rstrip() for line in out.splitlines() if line.strip()]
    assert lines == GOLDEN.splitlines()


def test_units_are_found_from_sizes_and_times() -> None:
    Path("old.txt").write_text(OLD_TABLE)
    Path("new.json").write_text(json.dumps(GUIDE))
    Path("odd.json").write_text(json.dumps({"results": [row(1000, 1.0, 3.0)]}))
    Path("bare.json").write_text('{"results": [{"size(B)": 8, "time:avg(us)": 2}]}')
    units = [compare.unit_of(nccom_files.read_results(name)) for name in FILES]
    assert units == [
        'old.txt: assumed GiB/s under the name "GB/s": 33554432 B in 768 us is 43.69 GB/s = '
        "40.69 GiB/s, it prints 40.69; computed anew from size and time",
        "new.json: GB/s is 1e9, as its sizes and times give; computed anew from them",
        "odd.json: prints 3.00 GB/s for 1000 B in 1 us, which is neither GB/s (1.00) nor GiB/s "
        "(0.93): computed anew from size and time",
        "bare.json: prints no bandwidth; computed from size and time (GB/s is 1e9)",
    ]


FILES = ("old.txt", "new.json", "odd.json", "bare.json")


def row(size: int, time: float, algbw: float) -> dict:
    return {"size(B)": size, "type": "fp32", "time:avg(us)": time, "algbw(GB/s)": algbw}


def test_json_joins_by_size_and_type(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    Path("real.json").write_text(json.dumps(GUIDE))
    rows = [(524288, "fp32", 46.22), (1024, "fp32", 6.19), (8192, "bf16", 1.0)]
    Path("sim.json").write_text(json.dumps(simulated(rows, 31 / 32)))
    code, out, _ = run("compare real.json sim.json --json", monkeypatch, capsys)
    found = json.loads(out)
    assert code == 0
    assert (found["only_in_first"], found["only_in_second"]) == (2, 1)
    assert found["mean_ratio"] == pytest.approx(2**0.5)
    assert [pair["size(B)"] for pair in found["pairs"]] == [1024, 524288]
    big = found["pairs"][1]
    assert (big["time(us)"], big["ratio"]) == ([23.11, 46.22], 2)
    assert big["busbw(GB/s)"] == pytest.approx([21.97975, 21.97975 / 2], rel=1e-4)


def test_a_simulated_table_reads_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    line = "collective allr --instance trn1.2xlarge -r 2 -b 1M -e 16M -f 4 -d fp32"
    monkeypatch.delenv("COLUMNS")
    code, out, _ = run(f"{line} --report-to-json-file sim.json", monkeypatch, capsys)
    assert code == 0
    Path("sim.txt").write_text(out)
    text, document = (nccom_files.read_results(name) for name in ("sim.txt", "sim.json"))
    assert not text.simulated and document.simulated
    for printed, exact in zip(text.rows, document.rows, strict=True):
        assert (printed.nbytes, printed.count) == (exact.nbytes, exact.count)
        assert printed.dtype == exact.dtype == "fp32"
        assert printed.time_us == pytest.approx(exact.time_us, abs=0.005)
    joined = compare.compare(text, document)
    assert joined.mean_ratio == pytest.approx(1, abs=1e-3) and joined.only == (0, 0)


def test_streams_are_read_one_after_another() -> None:
    streams = [{"results": [row(1024, 5.0, 0.2)]}, {"results": [row(2048, 6.0, 0.3)]}]
    Path("streams.json").write_text(json.dumps({"streams": streams}))
    found = nccom_files.read_results("streams.json")
    assert [each.nbytes for each in found.rows] == [1024, 2048]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "real.json: not JSON: "),
        ("[]", "real.json: has no results: neither of nccom-test nor of trnsim"),
        ('{"results": []}', "real.json: has no results: neither of nccom-test nor of trnsim"),
        ('{"results": [3]}', "real.json: has no results: neither of nccom-test nor of trnsim"),
        ('{"results": [{"size(B)": 8}]}', "real.json: result 0 has no number time:avg(us)"),
        ('{"results": [{"size(B)": "8", "time:avg(us)": 1}]}', "result 0 has no number size(B)"),
        ('{"results": [{"size(B)": 8, "time:avg(us)": NaN}]}', "result 0 has no number time:avg"),
        ("hello", "real.json: has no results: neither JSON nor a table with size(B) and time(us)"),
        ("\xff", "real.json: is neither JSON nor a table: not text"),
        (None, "real.json: No such file or directory"),
        ('{"results": [{"size(B)": 9, "time:avg(us)": 1}]}', "results of sim.json: 1024 B fp32 is "
         "not valid; allowed: a size and type of real.json: 9 B"),
    ],
)  # fmt: skip
def test_bad_files_are_one_line(
    content: str | None,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    if content is not None:
        Path("real.json").write_bytes(content.encode("latin-1"))
    Path("sim.json").write_text(json.dumps(simulated([(1024, "fp32", 1.0)], 1.0)))
    code, out, err = run("compare real.json sim.json", monkeypatch, capsys)
    assert (code, out) == (2, "")
    assert err.startswith("trnsim: error: ") and message in err and err.count("\n") == 1
