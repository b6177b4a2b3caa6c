"""`trnsim collective` with the habits of nccom-test, and the library beneath it."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trnsim.cluster import nccom
from trnsim.cluster.cli import main
from trnsim.cluster.collective_check import WrongValues, check
from trnsim.cluster.communicator import Communicator
from trnsim.collectives.algorithms import pairwise, ring
from trnsim.collectives.fabric import torus
from trnsim.collectives.schedule import Collective, Schedule
from trnsim.device.errors import BadInput, CollectiveMismatch, TrnsimError

Command = Callable[..., tuple[int, str, str]]
RING = """
title = "ring of 8"

[part.ring]
ring = 8
bandwidth = "50GB/s"
latency = "500ns"
"""


@pytest.fixture
def trnsim(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path):
    """Runs the command in a folder with `ring.toml`: exit code, standard output and error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NEURON_LOGICAL_NC_CONFIG", raising=False)
    (tmp_path / "ring.toml").write_text(RING)

    def run(line: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["trnsim", *line.split()])
        code = 0
        try:
            main()
        except SystemExit as done:
            code = int(done.code or 0)
        caught = capsys.readouterr()
        return code, caught.out, caught.err

    return run


def written(name: str, document: object) -> str:
    """A JSON file in the test's folder."""
    Path(name).write_text(json.dumps(document))
    return name


def results(trnsim: Command, line: str) -> dict:
    code, out, err = trnsim(f"collective {line} --json")
    assert (code, err) == (0, "")
    return json.loads(out)


def squeezed(text: str) -> list[str]:
    """Lines without trailing blanks and empty ones."""
    return [line.rstrip() for line in text.splitlines() if line.strip()]


GOLDEN_80 = """\
all_reduce on ring of 8, 8 of its 8 ranks
1 group of N=8: ranks 0-7; on 8 chips (chip0, chip1, chip2, chip3, chip4, chip5,
chip6, chip7)
    size    count        time:avg   algbw   busbw   bound
     (B)  (elems)  type      (us)  (GB/s)  (GB/s)  (GB/s)  algorithm  check
 ──────────────────────────────────────────────────────────────────────────
    1024      256  fp32      7.04    0.15    0.25   50.00  ring:1     ok
   32768     8192  fp32      8.15    4.02    7.04   50.00  ring:1     ok
 1048576   262144  fp32     43.70   23.99   41.99   50.00  ring:1     ok
Avg bus bandwidth: 16.4281 GB/s
algorithm, 1024-1048576 B: ring:1: asked for by name
limited by, 1024-32768 B: latency of 14 rounds
limited by, 1048576 B: chip0->chip1 (50 GB/s)
check, 1024-1048576 B: ok, within rounding
GB/s is 1e9 bytes/s; times are modelled (virtual) time
sizes are binary, as nccom-test reads them: 1k is 1 KiB
"""


def test_a_sweep_on_a_fabric_of_ones_own_at_80_columns(trnsim: Command) -> None:
    # 14 rounds of 131,072 B at 50 GB/s and 500 ns are 43,700.16 ns
    line = "collective allr --fabric ring.toml -b 1k -e 1MiB -f 32 -d fp32 --algorithm ring:1 -c"
    code, out, err = trnsim(line)
    assert (code, err) == (0, "")
    assert squeezed(out) == GOLDEN_80.splitlines()


GOLDEN_120 = """\
all_reduce on ring of 8, 8 of its 8 ranks
2 groups of N=4: ranks 0-3 | 7,6,5,4; the first on 4 chips (chip0, chip1, chip2, chip3)
 size(B)  count(elems)  type  time:avg(us)  algbw(GB/s)  busbw(GB/s)  bound(GB/s)  algorithm
 ───────────────────────────────────────────────────────────────────────────────────────────
 1048576        524288  bf16         36.46        28.76        43.14        50.00  ring:1
Avg bus bandwidth: 43.1427 GB/s
algorithm, 1048576 B: ring:1: asked for by name
limited by, 1048576 B: chip0->chip1 (50 GB/s)
GB/s is 1e9 bytes/s; times are modelled (virtual) time
"""


def test_groups_and_heads_on_one_line_at_120_columns(
    trnsim: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 3 and 0 are three hops apart; in six rounds, data crosses there twice: 2 us more
    monkeypatch.setenv("COLUMNS", "120")
    groups = written("groups.json", {"replica_groups": [[[0, 1, 2, 3], [7, 6, 5, 4]]]})
    line = "-b 1MiB -e 1MiB -d bf16 --algorithm ring:1"
    code, out, _ = trnsim(
        f"collective allr --fabric ring.toml {line} --custom-replica-groups {groups}"
    )
    assert code == 0
    time = 6 * (262144 / 50e9 + 500e-9) + 2 * 1000e-9
    assert time * 1e6 == pytest.approx(36.457, abs=1e-3)
    assert squeezed(out) == GOLDEN_120.splitlines()


def test_json_has_the_keys_of_nccom_test(trnsim: Command) -> None:
    found = results(trnsim, "allg -r 8 --fabric ring.toml -b 1kb -e 64kb -f 8 -d fp32")
    first, second, *_ = found["results"]
    theirs = ["size(B)", "count(elems)", "type", "algbw(GB/s)", "busbw(GB/s)", "time:avg(us)"]
    assert list(first)[:6] == theirs
    assert [row["size(B)"] for row in found["results"]] == [1024, 8192, 65536]
    assert (first["count(elems)"], first["type"]) == (256, "fp32")
    time = first["time:avg(us)"]
    assert first["algbw(GB/s)"] == pytest.approx(1024 / time / 1e3)
    assert first["busbw(GB/s)"] == pytest.approx(first["algbw(GB/s)"] * 7 / 8)
    about = found["trnsim"]
    assert (about["operation"], about["N"], about["groups"]) == ("all_gather", 8, [list(range(8))])


def test_json_goes_to_a_file_whole_or_not_at_all(trnsim: Command, tmp_path: Path) -> None:
    line = "collective allr --fabric ring.toml -b 1k -e 1k --report-to-json-file out.json"
    code, out, _ = trnsim(line)
    assert code == 0 and out.splitlines()[-1] == "results in out.json"
    assert [row["size(B)"] for row in json.loads(Path("out.json").read_text())["results"]] == [1024]
    code, out, err = trnsim(line.replace("out.json", "nowhere/out.json"))
    assert (code, out) == (2, "")
    assert err == "trnsim: error: nowhere/out.json: its folder does not exist\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.json", "ring.toml"]


@pytest.mark.parametrize(
    ("operation", "size", "total_in", "total_out", "factor"),
    [
        ("allr", 1024, 1024, 1024, 14 / 8),
        ("allg", 1024, 128, 1024, 7 / 8),
        ("allgv", 1024, 128, 1024, 7 / 8),
        ("redsct", 1024, 1024, 128, 7 / 8),
        ("redsctv", 1024, 1024, 128, 7 / 8),
        ("alltoall", 1024, 1024, 1024, 7 / 8),
        ("alltoallv", 1024, 1024, 1024, 7 / 8),
        ("sendrecv", 1024, 1024, 1024, 1),
        ("permute", 1024, 1024, 1024, 1),
        ("broadcast", 1024, 1024, 1024, 1),
        ("reduce", 1024, 1024, 1024, 1),
        ("gather", 1024, 128, 1024, 7 / 8),
        ("scatter", 1024, 1024, 128, 7 / 8),
    ],
)
def test_sizes_and_factors_of_every_operation(
    trnsim: Command, operation: str, size: int, total_in: int, total_out: int, factor: float
) -> None:
    found = results(trnsim, f"{operation} --fabric ring.toml -b {size} -e {size} -d fp32 -c")
    (row,) = found["results"]
    assert (row["size(B)"], row["count(elems)"]) == (size, size // 4)
    assert (row["total_input_size(B)"], row["total_output_size(B)"]) == (total_in, total_out)
    assert found["trnsim"]["bus_factor"] == factor
    assert row["check"].startswith("ok, ")


def test_a_barrier_has_no_size(trnsim: Command) -> None:
    found = results(trnsim, "barrier --fabric ring.toml -c")
    assert [row["size(B)"] for row in found["results"]] == [1]


def test_sizes_are_rounded_up_to_whole_elements_of_every_rank(trnsim: Command) -> None:
    found = results(trnsim, "allg --fabric ring.toml -b 5 -e 5 -d fp32")
    assert found["results"][0]["size(B)"] == 8 * 4


def test_uneven_counts_as_in_the_guide(trnsim: Command) -> None:
    # its sample: 1 MB in the proportion 512 : 1024 is 1,048,608 B, 262,152 elements
    counts = {"send_counts": [512, 1024], "send_displs": [0, 512], "recv_counts": []}
    file = written("counts.json", {"metadata": [counts]})
    line = "alltoallv -r 2 --fabric ring.toml -d fp32 -b 1MB -e 1MB -c --algorithm mesh"
    (row,) = results(trnsim, f"{line} --variable-size-op-metadata {file}")["results"]
    assert (row["size(B)"], row["count(elems)"]) == (1048608, 262152)
    assert row["check"] == "ok, bit for bit"


def test_receive_counts_that_do_not_match_are_refused(trnsim: Command) -> None:
    entries = [
        {"send_counts": [1, 2], "recv_counts": [1, 2]},
        {"send_counts": [2, 4], "recv_counts": [3, 4]},
    ]
    file = written("counts.json", {"metadata": entries})
    line = "collective alltoallv -r 2 --fabric ring.toml --variable-size-op-metadata"
    code, out, err = trnsim(f"{line} {file}")
    assert (code, out) == (2, "")
    assert err == (
        "trnsim: error: counts.json: alltoallv: rank 0 sends 2 elements to rank 1, "
        "which expects 3\n"
    )


def test_pairs_of_the_guide(trnsim: Command) -> None:
    pairs = [[0, 1], [1, 0], [2, 3], [3, 2], [4, 4], [5, 5], [6, 6], [7, 7]]
    file = written("pairs.json", {"src_target_pairs": [pairs]})
    line = f"permute -r 8 --fabric ring.toml -b 50000 -e 50000 -c --custom-src-target-pairs {file}"
    (row,) = results(trnsim, line)["results"]
    assert row["time:avg(us)"] == 1.5  # 50 kB at 50 GB/s, and the latency
    assert row["check"] == "ok, bit for bit"


# --- groups ---


def test_the_group_of_every_collective_is_shown(trnsim: Command) -> None:
    """A tensor-parallel group of 8 takes as long on 32 ranks as on 64: the report says why."""
    times = []
    for ranks in (32, 64):
        groups = [list(range(first, first + 8)) for first in range(0, ranks, 8)]
        file = written("tp8.json", {"replica_groups": groups})
        line = f"allr -r {ranks} -b 1k -e 1k --custom-replica-groups {file}"
        code, out, _ = trnsim(f"collective {line}")
        lines = out.splitlines()
        assert code == 0 and lines[0].endswith(f", {ranks} of its 64 ranks")
        more = " | ..." if ranks == 64 else ""
        assert " ".join(lines[1:3]).startswith(
            f"{ranks // 8} groups of N=8: ranks 0-7 | 8-15 | 16-23 | 24-31{more}; the first on 2 "
        )
        found = results(trnsim, line)
        assert (found["trnsim"]["groups"], found["trnsim"]["N"]) == (groups, 8)
        times.append(found["results"][0]["time:avg(us)"])
    assert times[0] == times[1]
    whole = [results(trnsim, f"allr -r {ranks} -b 1M -e 1M") for ranks in (32, 64)]
    assert [w["trnsim"]["N"] for w in whole] == [32, 64]
    assert whole[0]["results"][0]["time:avg(us)"] < whole[1]["results"][0]["time:avg(us)"]


def test_data_parallel_groups_have_one_rank_per_node(trnsim: Command) -> None:
    found = results(trnsim, "allr -N 4 -r 8 -b 1k -e 1k --data-parallel-dimension 4")
    assert found["trnsim"]["groups"] == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_singleton_groups_move_nothing(trnsim: Command) -> None:
    file = written("single.json", {"replica_groups": [[rank] for rank in range(8)]})
    line = f"allr -r 8 -b 1k -e 1k -c --custom-replica-groups {file}"
    (row,) = results(trnsim, line)["results"]
    assert (row["time:avg(us)"], row["limited_by"]) == (0, "nothing: no data moves")


# --- above the bound, late ranks, failures ---


@pytest.mark.parametrize("operation", ["allr", "allg", "redsct", "alltoall", "sendrecv"])
@pytest.mark.parametrize("instance", ["trn1.32xlarge", "trn2.48xlarge"])
def test_bus_bandwidth_is_never_above_the_bound(
    trnsim: Command, operation: str, instance: str
) -> None:
    line = f"{operation} --instance {instance} -b 1k -e 1G -f 32 -d bf16"
    for row in results(trnsim, line)["results"]:
        assert 0 < row["busbw(GB/s)"] <= row["bound(GB/s)"], row
        assert row["limited_by"]


def test_everybody_waits_for_a_late_rank(trnsim: Command) -> None:
    line = "allr --fabric ring.toml -b 1MiB -e 1MiB -d fp32 --algorithm ring:1"
    (row,) = results(trnsim, f"{line} --delay 3=1ms --delay 5=2us")["results"]
    assert (row["time:avg(us)"], row["last_rank"]) == (pytest.approx(1043.70016), 3)
    assert row["after_last_arrival(us)"] == pytest.approx(43.70016)
    _, out, _ = trnsim(f"collective {line} --delay 3=1ms")
    late = "rank 3 comes last, 1 ms late; time is from the first arrival to the last end"
    assert late in out.splitlines()


def test_jitter_has_a_seed(trnsim: Command) -> None:
    line = "allr --fabric ring.toml -b 1k -e 1k --jitter 5us -n 50 --stats avg p50 p99"
    first, again, other = (
        results(trnsim, f"{line} --seed {seed}")["results"] for seed in (1, 1, 2)
    )
    assert first == again != other
    row = first[0]
    assert row["time:p50(us)"] <= row["time:p99(us)"]
    plain = results(trnsim, "allr --fabric ring.toml -b 1k -e 1k")["results"][0]["time:avg(us)"]
    assert plain < row["time:avg(us)"] < plain + 5


def test_failed_links_are_named(trnsim: Command) -> None:
    line = "collective allr --fabric ring.toml --algorithm ring -b 1k -e 1k"
    assert trnsim(f"{line} --fail chip3<->chip4")[0] == 0
    code, out, err = trnsim(f"{line} --fail chip3<->chip4 --fail chip2<->chip3")
    assert (code, out) == (2, "")
    assert err == (
        "trnsim: error: rank 3 (chip3) is unreachable: no live path between it and rank 2 (chip2)\n"
    )


def test_a_slow_link_slows_the_ring(trnsim: Command) -> None:
    line = "allr --fabric ring.toml --algorithm ring:1 -b 8MB -e 8MB --degrade chip0->chip1=5GB/s"
    (row,) = results(trnsim, line)["results"]
    assert row["bound(GB/s)"] == pytest.approx(5)
    assert row["limited_by"] == "chip0->chip1 (5 GB/s)"


# --- streams, algorithms, the environment ---


def test_equal_streams_share_their_links(trnsim: Command) -> None:
    stream = {"minbytes": "64MiB", "maxbytes": "64MiB"}
    file = written("streams.json", {"streams": [stream, stream]})
    line = f"allr --fabric ring.toml --algorithm ring:1 --streams-json {file}"
    for each in results(trnsim, line)["streams"]:
        (row,) = each["results"]
        rounds = 14 * 2**23 / 50e9 * 1e6  # us of bytes; the latency of 14 x 500 ns is not shared
        assert row["alone(us)"] == pytest.approx(rounds + 7, abs=1e-3)
        assert row["time:avg(us)"] == pytest.approx(2 * rounds + 7, abs=1e-3)


def test_streams_run_until_the_longest_sweep_ends(trnsim: Command) -> None:
    written("pairs.json", {"replica_groups": [[[0, 1], [2, 3], [4, 5], [6, 7]]]})
    first = {"operation": "all_reduce", "datatype": "bf16", "stepfactor": 2, "minbytes": "1KB",
             "maxbytes": "4KB", "custom_replica_groups": "pairs.json"}  # fmt: skip
    second = {"operation": "allg", "datatype": "fp32", "ops_per_iter": 2, "minbytes": "1KB",
              "maxbytes": "1KB"}  # fmt: skip
    file = written("streams.json", {"streams": [first, second]})
    reduced, gathered = results(trnsim, f"allg --fabric ring.toml -c --streams-json {file}")[
        "streams"
    ]
    assert [row["size(B)"] for row in reduced["results"]] == [1024, 2048, 4096]
    assert [row["size(B)"] for row in gathered["results"]] == [1024] * 3
    assert (reduced["trnsim"]["N"], gathered["trnsim"]["N"]) == (2, 8)
    code, out, _ = trnsim(f"collective allg --fabric ring.toml --streams-json {file}")
    titles = [line for line in out.splitlines() if line.startswith("stream ")]
    assert titles == [
        "stream 0: all_reduce on ring of 8, 8 of its 8 ranks",
        "stream 1: all_gather on ring of 8, 8 of its 8 ranks",
    ]


def test_operations_of_one_stream_do_not_share(trnsim: Command) -> None:
    stream = {"minbytes": "64MiB", "maxbytes": "64MiB", "ops_per_iter": 3}
    file = written("streams.json", {"streams": [stream]})
    line = f"allr --fabric ring.toml --algorithm ring:1 --streams-json {file}"
    (row,) = results(trnsim, line)["results"]
    assert row["time:avg(us)"] == row["alone(us)"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"streams": []}', "streams.json: has no list named streams"),
        ('{"streams": [3]}', "streams.json: stream 0 is not an object"),
        ('{"streams": [{"minbyte": 3}]}', "stream 0: minbyte is not valid; allowed: one of"),
        ('{"streams": [{"ops_per_iter": 0}]}', "ops_per_iter: 0 is not valid"),
        ('{"streams": [{"ops_per_iter": 65}]}', "ops_per_iter: 65 in all is not valid"),
        ('{"streams": [{}, {}, {}, {}, {}]}', "streams: 5 is not valid; allowed: 1 to 4 on "
         "Trainium2 at LNC=2"),
    ],
)  # fmt: skip
def test_bad_streams(trnsim: Command, content: str, message: str) -> None:
    Path("streams.json").write_text(content)
    code, out, err = trnsim("collective allr --streams-json streams.json")
    assert (code, out) == (2, "")
    assert message in err and err.count("\n") == 1


def test_msccl_out_and_in_is_the_same_algorithm(trnsim: Command) -> None:
    line = "allr --fabric ring.toml -b 1MiB -e 1MiB -d fp32"
    code, out, _ = trnsim(f"collective {line} --algorithm ring:1 --msccl-out ring.xml")
    assert code == 0 and out.splitlines()[-1] == "MSCCL XML in ring.xml"
    (row,) = results(trnsim, f"{line} -c --msccl ring.xml")["results"]
    assert row["time:avg(us)"] == pytest.approx(43.70016)
    assert (row["reason"], row["check"]) == ("MSCCL XML of ring.xml", "ok, within rounding")
    for wrong, message in (
        (
            line.replace("allr", "allg"),
            "ring.xml: kind: all_reduce is not valid; allowed: all_gather",
        ),
        (f"{line} -r 4", "ring.xml: ranks: 8 is not valid; allowed: 4, as asked for"),
        (f"{line} --algorithm rdh", "--algorithm: rdh is not valid; allowed: not with --msccl"),
    ):
        code, out, err = trnsim(f"collective {wrong} --msccl ring.xml")
        assert (code, out) == (2, "") and err.startswith(f"trnsim: error: {message}")


@pytest.mark.parametrize("size", ["1k", "1M", "1G"])
def test_best_is_not_above_any_name(trnsim: Command, size: str) -> None:
    line = f"allr -r 16 -b {size} -e {size}"
    (best,) = results(trnsim, f"{line} --algorithm best")["results"]
    assert best["reason"].startswith("cheapest of ")
    for name in ("policy", "ring", "mesh", "rdh", best["algorithm"]):
        (row,) = results(trnsim, f"{line} --algorithm {name}")["results"]
        assert best["time:avg(us)"] <= row["time:avg(us)"]


def test_the_environment_sets_the_lnc(trnsim: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    found = results(trnsim, "allr -b 1k -e 1k")["trnsim"]
    assert (found["lnc"], found["ranks"]) == (1, 128)


def test_what_the_result_leaned_on_is_said(trnsim: Command) -> None:
    one = results(trnsim, "allr -b 1k -e 1k")["trnsim"]["leans_on"]
    two = results(trnsim, "allr -N 2 -b 1k -e 1k")["trnsim"]["leans_on"]
    assert set(one.values()) <= {"assumed", "calibrated"} and "cc_step_ps" in one
    assert {key for key in two if key.startswith("efa")} and not any("efa" in key for key in one)


# --- bad input: one line and exit code 2 ---

REFUSED = {
    "alr": "operation: alr is not valid; allowed: one of",
    "allr -d fp33": "-d: fp33 is not valid; allowed: one of uint8, int8, fp8, uint16, int16, fp16, "
    "bf16, uint32, int32, fp32; nearest valid: fp32",
    "allr -b 1G -e 1M": "-b: 1073741824 B is not valid; allowed: at most -e, which is 1048576 B",
    "allr -b 1M -e 2M -f 1": "-f: 1 is not valid; allowed: a whole number of 2 or more: sizes would"
    " never reach -e; nearest valid: 2",
    "allr -b 0 -e 2M -f 2": "-b: 0 is not valid; allowed: 1 or more with -f",
    "allr -b 1M -e 2M -i 0": "-i: 0 is not valid; allowed: 1 or more bytes",
    "allr -b 1M -e 2M -i 1": "-i: 1 B is not valid; allowed: at most 10000 sizes; this gives "
    "1048577",
    "allr -b 1M -e 2M -i 1k -f 2": "-i: 1024 is not valid; allowed: only one of -i and -f",
    "allr -b 1X": "-b: '1X' is not valid; allowed: bytes, or a number with k, M, G (binary)",
    "allr -r 65": "-r: 65 is not valid; allowed: 1 to 64 ranks on trn2.48xlarge at LNC=2; "
    "nearest valid: 64",
    "allr -r 0": "-r: 0 is not valid",
    "allr -r 5 -N 2": "-r: 5 is not valid; allowed: a multiple of the 2 nodes; nearest valid: 4",
    "allr -r 24 --instance trn1.32xlarge": "-r: 24 is not valid; allowed: 1, 2, 8, 16, multiples "
    "of 32 cores on trn1.32xlarge; nearest valid: 16 or 32",
    "allr -N 0": "nodes: 0 is not valid",
    "allr --lnc 3": "LNC: 3 is not valid; allowed: 1 or 2 on Trainium2 (trn2); nearest valid: 2",
    "allr --instance trn2.48xlarg": "instance: trn2.48xlarg is not valid",
    "allr --algorithm rinng": "algorithm: rinng is not valid",
    "allr --algorithm pairwise": "algorithm of all_reduce: pairwise is not valid",
    "allr --reduction mean": "reduction: mean is not valid",
    "allg --reduction sum": "--reduction: sum is not valid; allowed: none for all_gather",
    "allr --root 1": "--root: 1 is not valid; allowed: none for all_reduce, which has no root",
    "broadcast -r 4 --root 4": "--root: 4 is not valid; allowed: 0 to 3, a position in the group",
    "allr --delay 3": "delay: 3 is not valid; allowed: RANK=TIME",
    "allr --delay 99=1us": "delay of rank: 99 is not valid; allowed: 0..63",
    "allr --jitter 5": "--jitter: 5 is not valid; allowed: a number with a unit of",
    "allr --stats p101": "-t: p101 is not valid; allowed: avg or a percentile p0 to p100",
    "allr -n 0": "-n: 0 is not valid; allowed: 1 or more",
    "allr --deadline 0s": "--deadline: 0s is not valid; allowed: more than 0",
    "allr --fabric none.toml": "none.toml: No such file or directory",
    "allr --fabric ring.toml -N 2": "--nodes: 2 is not valid; allowed: not with --fabric",
    "allr --custom-src-target-pairs x": "--custom-src-target-pairs: x is not valid; allowed: only "
    "with permute, not all_reduce",
    "allr --variable-size-op-metadata x": "--variable-size-op-metadata: x is not valid; allowed: "
    "only with all_gatherv, reduce_scatterv, alltoallv, not all_reduce",
    "allr -N 1024 -b 1M -e 1M -c": "-c: 65536 ranks, which move ",
    "allr --msccl none.xml": "none.xml: No such file or directory",
    "allr --msccl ring.toml": "ring.toml: ",
    "allr -s 10.0.0.1 10.0.0.2": "-s of nccom-test has no meaning here: trnsim runs in this "
    "process, without hosts, MPI or Slurm; use -N for the number of nodes",
    "allr --slurm-job-id=7": "--slurm-job-id of nccom-test has no meaning here",
    "allr --unique-buff": "--unique-buff of nccom-test has no meaning here: buffers",
    "allr --sb2sb": "--sb2sb of nccom-test has no meaning here: collectives between SBUFs",
    "allr --frobnicate": "No such option '--frobnicate'",
}


@pytest.mark.parametrize("line", REFUSED)
def test_bad_input_is_one_line(trnsim: Command, line: str) -> None:
    code, out, err = trnsim(f"collective {line}")
    assert (code, out) == (2, "")
    assert err.startswith(f"trnsim: error: {REFUSED[line]}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"replica_groups": [[[0, 1], [1, 2]]]}', "replica_groups: rank: 1 is not valid; allowed: "
         "groups that do not overlap; it is in groups 0 and 1"),
        ('{"replica_groups": [[0, 1], [2]]}', "sizes 2, 1 is not valid; allowed: one size for all"),
        ('{"replica_groups": [[0, 8]]}', "rank: 8 is not valid; allowed: 0 to 7"),
        ('{"replica_groups": [[]]}', "an empty list is not valid"),
        ('{"replica_groups": [[0, true]]}', "is not a list of lists of whole numbers"),
        ('{"groups": [[0, 1]]}', "groups.json: has no replica_groups"),
        ('{"replica_groups": [[0, 1]', "groups.json: not JSON: "),
        ("", "groups.json: not JSON: "),
    ],
)  # fmt: skip
def test_bad_files_of_groups(trnsim: Command, content: str, message: str) -> None:
    Path("groups.json").write_text(content)
    line = "collective allr --fabric ring.toml --custom-replica-groups groups.json"
    code, out, err = trnsim(line)
    assert (code, out) == (2, "")
    assert message in err and err.count("\n") == 1


def test_a_deadline_ends_the_wait(trnsim: Command) -> None:
    code, out, err = trnsim("collective allr -N 64 -b 1 -e 1G -i 1MiB --deadline 20ms")
    assert (code, out) == (2, "")
    assert err.endswith("not done after --deadline 20ms: ask for less, or wait longer\n")


# --- sizes ---


@pytest.mark.parametrize(
    ("text", "nbytes", "note"),
    [
        ("32M", 2**25, "32M is 32 MiB"),
        ("1kb", 1024, "1kb is 1 KiB"),
        ("1GB", 2**30, "1GB is 1 GiB"),
        ("1.5g", 3 * 2**29, "1.5g is 1.5 GiB"),
        ("32MiB", 2**25, None),
        ("8", 8, None),
        ("8B", 8, None),
    ],
)
def test_sizes_are_binary_and_say_so(text: str, nbytes: int, note: str | None) -> None:
    size = nccom.size(text, "-b")
    assert (size.nbytes, size.note) == (nbytes, note)


def test_sweeps_as_in_the_guide() -> None:
    assert nccom.sweep(8, 16, step=4) == [8, 12, 16]
    assert nccom.sweep(8, 32, factor=2) == [8, 16, 32]
    assert nccom.sweep(2**25, 2**25) == [2**25]
    assert nccom.sweep(0, 100) == list(range(0, 101, 10))


@given(st.integers(1, 10**6), st.integers(0, 10**6), st.integers(2, 100))
def test_sweeps_stay_in_their_range(begin: int, more: int, factor: int) -> None:
    sizes = nccom.sweep(begin, begin + more, factor=factor)
    assert sizes[0] == begin and sizes[-1] <= begin + more < sizes[-1] * factor
    steps = nccom.sweep(begin, begin + more)
    assert steps[0] == begin and steps[-1] <= begin + more and len(steps) <= 20


# --- the check can fail ---


def broken(schedule: Schedule, row: int, field: str, value: int) -> Schedule:
    """The schedule with one number of one transfer of its first block changed."""
    from dataclasses import replace

    block = schedule.blocks[0]
    column = np.array(getattr(block, field))
    column[row] = value
    return replace(schedule, blocks=(replace(block, **{field: column}), *schedule.blocks[1:]))


def test_a_changed_step_fails_the_check() -> None:
    what = Collective("all_to_all", 4, 3, "i32")
    schedule = pairwise.schedule(what)
    assert str(check(what, schedule)) == "ok, bit for bit"
    base = int(schedule.blocks[0].flat.base[0])
    with pytest.raises(TrnsimError, match=r"rank \d"):
        check(what, broken(schedule.flat, 0, "base", (base + 1) % schedule.blocks[0].modulus))


def test_a_wrong_value_is_named() -> None:
    what = Collective("all_reduce", 4, 8, "f32", "add")
    schedule = ring.schedule(what)
    once = broken(schedule.flat, 1, "reduce", 0)
    with pytest.raises(WrongValues, match=r"check failed: all_reduce of 4 ranks: rank \d, piece 0, "
                       r"element \d is [-0-9.]+, must be [-0-9.]+"):  # fmt: skip
        check(what, once)


# --- collectives on arrays ---


def machine(ranks: int) -> Communicator:
    fabric = torus((ranks,), bytes_per_s=50 * 10**9, latency_ps=500_000)
    return Communicator(fabric.attach(fabric.chips), tuple(range(ranks)))


def test_singleton_groups_are_identity() -> None:
    for rank in range(8):
        done = machine(8).sub([rank]).all_reduce([np.full(3, rank, np.int32)])
        assert np.array_equal(done[0], [rank] * 3) and done.duration_ps == 0


def test_subgroups_gather_and_reduce() -> None:
    ranks = machine(8)
    gathered = ranks.sub([1, 3, 5, 7]).all_gather(
        [np.full((2, 4), r, np.float32) for r in range(4)]
    )
    assert [value.shape for value in gathered] == [(8, 4)] * 4
    for group, total in (((0, 1, 2, 3), 10), ((4, 5, 6, 7), 26), ((2, 3), 7)):
        done = ranks.sub(group).all_reduce([np.array([r + 1.0]) for r in group])
        assert [value.tolist() for value in done] == [[total]] * len(group)


def test_uneven_gather_keeps_the_order() -> None:
    a, b = np.arange(15).reshape(5, 3), np.arange(12).reshape(4, 3) + 100
    done = machine(2).all_gather_v([a, b])
    assert all(np.array_equal(value, np.concatenate([a, b])) for value in done)


def test_mismatched_counts_are_refused_before_anything_moves() -> None:
    arrays = [np.zeros(409_600 if rank == 0 else 409_598, np.float32) for rank in range(4)]
    with pytest.raises(CollectiveMismatch) as error:
        machine(4).all_reduce(arrays)
    assert str(error.value) == ("all_reduce: rank 0 passes 409600 elements, the others pass 409598")


def test_all_to_all_v_checks_every_pair() -> None:
    sends = [[1, 2], [3, 4]]
    arrays = [np.arange(3), np.arange(7) + 10]
    done = machine(2).all_to_all_v(arrays, sends, [[1, 3], [2, 4]])
    assert [value.tolist() for value in done] == [
        [0, 10, 11, 12], [1, 2, 13, 14, 15, 16],
    ]  # fmt: skip
    with pytest.raises(CollectiveMismatch) as error:
        machine(2).all_to_all_v(arrays, sends, [[1, 2], [2, 4]])
    assert str(error.value) == "all_to_all: rank 1 sends 3 elements to rank 0, which expects 2"


def test_rooted_and_point_to_point_kinds() -> None:
    ranks = machine(8).sub([6, 1, 3])
    x = np.arange(6.0).reshape(3, 2)
    assert all(np.array_equal(v, x) for v in ranks.broadcast(x, root=1))
    reduced = ranks.reduce([x, 2 * x, 3 * x], root=3)
    assert reduced.values[:2] == [None, None] and np.array_equal(reduced[2], 6 * x)
    gathered = ranks.gather([x[:1], x[:0], x[1:]], root=6)
    assert np.array_equal(gathered[0], x) and gathered.values[1:] == [None, None]
    scattered = ranks.scatter(x, root=1, rows=[0, 2, 1])
    assert [len(v) for v in scattered] == [0, 2, 1]
    moved = ranks.permute([x, x + 1, x + 2], [(6, 3), (3, 6)])
    assert np.array_equal(moved[0], x + 2) and not moved[1].any() and np.array_equal(moved[2], x)
    sent = ranks.send_recv(x, source=3, target=1)
    assert np.array_equal(sent[1], x)
    with pytest.raises(BadInput, match="position: 0 is not valid; allowed: ranks with a result: 1"):
        sent[0]


def test_a_barrier_ends_after_the_last_arrival() -> None:
    done = machine(4).barrier(delays={2: 10**9})
    assert done.priced.late.tolist() == [2] and (done.end_ps > 10**9).all()
    assert done.values == [None] * 4


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda r: r.all_reduce([np.zeros(2)] * 3), "all_reduce: 3 arrays for 4 ranks"),
        (lambda r: r.all_reduce([np.zeros(2), *[np.zeros(2, np.float32)] * 3]),
         "all_reduce: rank 1 passes float32, rank 0 passes float64"),
        (lambda r: r.reduce_scatter([np.zeros(6)] * 4), "rows of reduce_scatter: 6 is not valid"),
        (lambda r: r.all_gather([np.zeros((k, 2)) for k in range(4)]), "rank 0 passes 0 elements"),
        (lambda r: r.broadcast(np.zeros(2), root=9), "root: 9 is not valid; allowed: a rank of"),
        (lambda r: r.sub([0, 0]), "rank: 0 is not valid; allowed: each rank once"),
        (lambda r: r.sub([4]), "rank: 4 is not valid; allowed: a rank of the group: 0-3"),
        (lambda r: r.permute([np.zeros(2)] * 4, [(0, 1), (2, 1)]), "target of a pair: 1"),
        (lambda r: r.scatter(np.zeros(4), 0, [1, 1, 1, 2]), "rows of scatter: [1, 1, 1, 2]"),
        (lambda r: r.barrier(delays={1: -1}), "delay of rank 1: -1 ps is not valid"),
    ],
)  # fmt: skip
def test_misuse_is_refused(call: Callable, message: str) -> None:
    with pytest.raises((BadInput, CollectiveMismatch), match=re.escape(message)):
        call(machine(4))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_ranks_in_any_order(data: st.DataObject) -> None:
    who = data.draw(st.lists(st.integers(0, 8), min_size=1, max_size=9, unique=True))
    rows = data.draw(st.lists(st.integers(0, 4), min_size=len(who), max_size=len(who)))
    ranks = machine(9).sub(who)
    parts = [np.arange(m * 2, dtype=np.int32).reshape(m, 2) + 100 * i for i, m in enumerate(rows)]
    whole = np.concatenate(parts)
    for value in ranks.all_gather_v(parts):
        assert np.array_equal(value, whole)
    inputs = [whole * (i + 1) for i in range(len(who))]
    total = np.add.reduce(np.stack(inputs), axis=0, dtype=np.int32)
    ends = np.cumsum(rows).tolist()
    for value, end, m in zip(ranks.reduce_scatter_v(inputs, rows), ends, rows, strict=True):
        assert np.array_equal(value, total[end - m : end])
