"""`trnsim astra`: ASTRA-sim's own files on the command line."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from trnsim.cluster.cli import cli
from trnsim.device.errors import BadInput

RING = "topology: [ Ring ]\nnpus_count: [ 8 ]\nbandwidth: [ 50.0 ]\nlatency: [ 500.0 ]\n"
SYSTEM = {
    "endpoint-delay": 10, "preferred-dataset-splits": 4, "active-chunks-per-dimension": 1,
    "all-reduce-implementation": ["ring"], "all-to-all-implementation": ["direct"],
    "local-mem-bw": 1600,
}  # fmt: skip


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    (tmp_path / "net.yml").write_text(RING)
    (tmp_path / "sys.json").write_text(json.dumps(SYSTEM))
    return [str(tmp_path / "net.yml"), str(tmp_path / "sys.json")]


def test_the_hand_check_of_its_documentation(files: list[str]) -> None:
    """Ring 8, 1 MiB, 4 splits: 4 * (15 * 10 + 7 * 60 + 14 * 1110) = 64,440 ns."""
    done = CliRunner().invoke(cli, ["astra", "allr", *files, "-b", "1M", "--json"])
    assert done.exit_code == 0, done.output
    (row,) = json.loads(done.output)["rows"]
    assert (row["bytes"], row["peer_ns"], row["time_ns"]) == (2**20, 64440, 64440)


def test_a_time_that_beats_the_ports_is_marked(files: list[str]) -> None:
    done = CliRunner().invoke(cli, ["astra", "alltoall", *files, "-b", "1G"])
    assert "beats its ports" in done.output
    assert "ASTRA-sim's GB is 2**30 bytes: bandwidth 50 as 53.69 GB/s" in done.output


def test_a_collective_that_the_profile_lacks_is_refused(files: list[str]) -> None:
    done = CliRunner().invoke(cli, ["astra", "permute", *files])
    assert isinstance(done.exception, BadInput)
