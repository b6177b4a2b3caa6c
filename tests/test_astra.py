"""ASTRA-sim's files and results: formats as it reads them, times to the nanosecond.

tests/data/astra_reference.csv: runs of ASTRA-sim 2 (master of March 2026), one collective each,
with endpoint-delay 10 and local-mem-bw 1600; `unaware` and `aware` are its two analytical networks.
"""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from trnsim.cluster.fabric_file import load_fabric, read_fabric
from trnsim.cluster.frontends import astra_profile
from trnsim.cluster.frontends.astra import (
    Network,
    System,
    load_network,
    load_system,
    read_network,
    read_system,
)
from trnsim.cluster.frontends.astra_profile import Simulated, simulate
from trnsim.device.errors import BadFile, BadInput

TABLE = Path(__file__).parent / "data" / "astra_reference.csv"
ROWS = list(csv.DictReader(TABLE.read_text().splitlines()))
MIB = 2**20


def network(topology: str, shape: str, bandwidth: float = 50.0, latency: float = 500.0) -> Network:
    sizes = [int(size) for size in shape.split("x")]
    kinds = topology.split("_")
    lists = {"bandwidth": [bandwidth] * len(sizes), "latency": [latency] * len(sizes)}
    return read_network({"topology": kinds, "npus_count": sizes} | lists)


def system(kind: str, algorithm: str, dims: int = 1, splits: int = 1, active: int = 1) -> System:
    data = {
        "endpoint-delay": 10,
        "local-mem-bw": 1600,
        "preferred-dataset-splits": splits,
        "active-chunks-per-dimension": active,
        "collective-optimization": "localBWAware",
        f"{kind.replace('_', '-')}-implementation": [algorithm] * dims,
    }
    return read_system(data, dims)


def run(row: dict[str, str]) -> Simulated:
    net = network(
        row["topology"], row["shape"], float(row["bandwidth_GBps"]), float(row["latency_ns"])
    )
    chunks = int(row["splits"]), int(row["active_chunks"])
    sys = system(row["coll"], row["algo"], len(net.dims), *chunks)
    return simulate(net, sys, row["coll"], int(row["bytes"]), row["backend"])


def name(row: dict[str, str]) -> str:
    return " ".join(row[key] for key in ("backend", "topology", "shape", "algo", "coll", "bytes"))


# ASTRA-sim's `unaware` network lets these send more than all their ports together carry.
BEATS_PORT = [
    "unaware Ring 8 direct all_to_all 67108864",
    "unaware Ring 8 direct all_to_all 1073741824",
    "unaware Ring 16 direct all_to_all 1048576",
    "unaware Ring 16 direct all_to_all 67108864",
    "unaware Switch 16 direct all_to_all 1073741824",
    "unaware Switch 256 direct all_to_all 1048576",
    "unaware Ring_Ring 16x16 direct all_to_all 1073741824",
    "unaware Ring_Ring 8x8 ring all_reduce 67108864",
]


def test_every_row_is_reproduced_or_beats_the_ports() -> None:
    found = [(row, run(row)) for row in ROWS]
    for row, result in found:
        print(name(row), row["sim_time_ns"], result.peer_ns, result.time_ns, result.beats_port)
        assert result.peer_ns == int(row["sim_time_ns"]), name(row)
        if not result.beats_port:
            assert abs(result.time_ns / int(row["sim_time_ns"]) - 1) <= 0.001
    assert [name(row) for row, result in found if result.beats_port] == BEATS_PORT
    assert all(r.time_ns == r.port_ns > r.peer_ns for _, r in found if r.beats_port)
    assert len(found) == 161


@pytest.mark.parametrize(
    ("topology", "algorithm"),
    [("Ring", "ring"), ("FullyConnected", "direct"), ("Switch", "halvingDoubling")],
)
@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "all_gather"])
def test_rounds_without_contention_need_no_events(monkeypatch, topology, algorithm, kind) -> None:
    net, sys = network(topology, "8"), system(kind, algorithm)
    quick = simulate(net, sys, kind, MIB, "aware").peer_ns
    monkeypatch.setattr(astra_profile._Phase, "alone", lambda self, delay: None)
    assert simulate(net, sys, kind, MIB, "aware").peer_ns == quick


def test_the_hand_check_of_its_closed_form() -> None:
    sys = system("all_reduce", "ring", splits=4)
    for rule in ("unaware", "aware"):
        assert simulate(network("Ring", "8"), sys, "all_reduce", MIB, rule).peer_ns == 64440


def test_the_last_chunk_is_as_long_as_the_others() -> None:
    sys = system("all_reduce", "ring", splits=4)
    assert simulate(network("Ring", "8"), sys, "all_reduce", MIB + 3, "unaware").peer_ns == 80550


def test_a_slower_local_memory_adds_to_every_reducing_round() -> None:
    data = {
        "local-mem-bw": 50,
        "preferred-dataset-splits": 4,
        "all-reduce-implementation": ["ring"],
    }
    result = simulate(network("Ring", "8"), read_system(data, 1), "all_reduce", MIB, "unaware")
    assert result.peer_ns == 117780  # the reference of its own regression test


# --- files ---

NETWORK = {
    "topology": ["Ring", "Switch"],
    "npus_count": [4, 2],
    "bandwidth": [50.0, 25],
    "latency": [500.0, 1000],
}


def test_a_network_file_is_a_fabric_with_binary_gigabytes(tmp_path: Path) -> None:
    path = tmp_path / "net.yml"
    path.write_text(yaml.safe_dump(NETWORK))
    net = load_network(path)
    assert [dim.bytes_per_s for dim in net.dims] == [50 * 2**30, 25 * 2**30]
    assert net.note == (
        "net.yml: ASTRA-sim's GB is 2**30 bytes: bandwidth 50 as 53.69 GB/s, 25 as 26.84 GB/s"
    )
    assert read_fabric(path).notes == (net.note,)
    fabric = load_fabric(path)
    assert fabric.ranks == 8 and fabric.kinds.count("switch") == 4
    routes = fabric.routes(np.array([0, 0]), np.array([3, 4]))
    assert routes.latency.tolist() == [500_000, 2_000_000]


@pytest.mark.parametrize(
    "topology", ["Ring", "Switch", "FullyConnected", "Ring_Ring", "Ring_Switch"]
)
def test_dimension_0_is_innermost(topology: str) -> None:
    dims = topology.count("_") + 1
    fabric = network(topology, "x".join("43"[:dims]), latency=7).fabric()
    near = 2 if topology == "Switch" else 1
    assert fabric.ranks == (12 if dims == 2 else 4)
    routes = fabric.routes(np.array([0, 0]), np.array([1, 4 if dims == 2 else 1]))
    assert routes.latency.tolist()[0] == near * 7000
    assert routes.latency.tolist()[1] == (2 if topology.endswith("Switch") else 1) * 7000


BAD_NETWORKS = [
    ({"topology": ["Rin", "Ring"]}, "topology[0]: Rin", "one of Ring, FullyConnected, Switch"),
    ({"topology": "Ring"}, "topology: Ring", "a list with one entry per dimension"),
    ({"npus_count": [4, 1]}, "npus_count[1]: 1", "a whole number, 2 or more"),
    ({"bandwidth": [0, 1]}, "bandwidth[0]: 0", "a number of 2**30 bytes/s above 0"),
    ({"bandwidth": ["1", 1]}, "bandwidth[0]: 1", "a number of 2**30 bytes/s above 0"),
    ({"latency": [1, -1]}, "latency[1]: -1", "a number of ns, 0 or more"),
    ({"latency": None}, "latency: None", "a list with one entry per dimension"),
    ({"bandwith": [1, 1]}, "key: bandwith", "one of topology, npus_count, bandwidth, latency"),
    (
        {"npus_count": [4]},
        "lengths: topology: 2, npus_count: 1, bandwidth: 2, latency: 2",
        "one entry per dimension in every list",
    ),
]


@pytest.mark.parametrize(("change", "what", "allowed"), BAD_NETWORKS)
def test_bad_network_files_are_refused(tmp_path: Path, change, what: str, allowed: str) -> None:
    path = tmp_path / "net.yml"
    path.write_text(yaml.safe_dump(NETWORK | change))
    with pytest.raises(BadInput) as refusal:
        load_network(path)
    assert str(refusal.value).startswith(f"net.yml: {what} is not valid; allowed: {allowed}")


def test_what_is_no_yaml_or_json_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("topology: [Ring\nnpus_count")
    with pytest.raises(BadFile, match="x: line 2: is not YAML$"):
        load_network(path)
    path.write_text("{\n'a'")
    with pytest.raises(BadFile, match="x: line 2: Expecting property name"):
        load_system(path, 1)
    with pytest.raises(BadFile, match="nothing: No such file"):
        load_network(tmp_path / "nothing")


def test_a_system_file_is_read_and_lists_what_it_ignores(tmp_path: Path) -> None:
    path = tmp_path / "sys.json"
    data = {
        "scheduling-policy": "LIFO", "endpoint-delay": 20, "active-chunks-per-dimension": 3,
        "num-queues-per-dim": 2, "preferred-dataset-splits": 4, "local-mem-bw": 50,
        "all-reduce-implementation": ["ring", "direct"], "collective-optimization": "baseline",
        "boost-mode": 1,
    }  # fmt: skip
    path.write_text(json.dumps(data))
    read = load_system(path, 2)
    assert (read.endpoint_delay, read.splits, read.slots, read.local_mem_bw) == (20, 4, 2, 50.0)
    assert read.algorithms == {"all_reduce": ("ring", "direct")}
    assert read.ignored == ("boost-mode", "scheduling-policy")


GOOD = {"preferred-dataset-splits": 1, "local-mem-bw": 50, "all-reduce-implementation": ["ring"]}


@pytest.mark.parametrize(
    ("change", "dims", "message"),
    [
        ({"preferred-dataset-splits": 0}, 1, "system: preferred-dataset-splits: 0 is not valid"),
        ({"local-mem-bw": 0}, 1, "system: local-mem-bw: 0 is not valid; allowed: GB/s above 0"),
        ({}, 2, "system: collective-optimization: (missing) is not valid"),
        ({"collective-optimization": "baseline"}, 2, "system: all-reduce-implementation: ['ring']"),
        ({"all-reduce-implementation": ["rng"]}, 1, "system: all-reduce-implementation: rng is"),
    ],
)
def test_bad_system_files_are_refused(change: dict, dims: int, message: str) -> None:
    with pytest.raises(BadInput) as refusal:
        read_system(GOOD | change, dims)
    assert str(refusal.value).startswith(message)


@pytest.mark.parametrize(
    ("kind", "nbytes", "rule", "message"),
    [
        ("all_reduce", 8, "aware-ish", "rule of profile astra: aware-ish is not valid"),
        ("all_gather", 8, "aware", "collective of profile astra: all_gather is not valid"),
        ("all_reduce", 0, "aware", "size: 0 is not valid; allowed: 1 byte or more"),
    ],
)
def test_what_the_profile_does_not_have_is_refused(kind, nbytes, rule, message) -> None:
    with pytest.raises(BadInput) as refusal:
        simulate(network("Ring", "4"), system("all_reduce", "ring"), kind, nbytes, rule)
    assert str(refusal.value).startswith(message)


def test_halving_needs_a_power_of_two() -> None:
    with pytest.raises(BadInput, match="^all_reduce by halvingDoubling over: 6 is not valid"):
        simulate(
            network("Switch", "6"),
            system("all_reduce", "halvingDoubling"),
            "all_reduce",
            64,
            "aware",
        )
