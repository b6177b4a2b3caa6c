"""`trnsim place --plan`: the traffic of a priced plan, and rank files that go back into it."""

import json

import pytest
from click.testing import CliRunner

from trnsim.cluster.cli_place import place
from trnsim.cluster.cli_plan import plan
from trnsim.cluster.mesh import parse_mesh
from trnsim.cluster.placing.plan_file import read_plan
from trnsim.cluster.placing.traffic import parse_demand
from trnsim.device.errors import BadFile, BadInput

OPTIONS = ["bert-large", "--instance", "trn2.3xlarge", "--mesh", "dp=2,tp=2", "--seq", "128"]
OPTIONS += ["--global-batch", "4", "--zero", "1", "--json"]


@pytest.fixture(scope="module")
def priced(tmp_path_factory):
    done = CliRunner().invoke(plan, OPTIONS)
    assert done.exit_code == 0, done.output
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    path.write_text(done.stdout)
    return path


def test_every_group_of_the_mesh_is_traffic_of_the_same_bytes_and_times(priced):
    document, found = json.loads(priced.read_text()), read_plan(priced)
    assert (found["instance"], found["mesh"]) == ("trn2.3xlarge", "dp=2,tp=2")
    demands = [parse_demand(text, parse_mesh(found["mesh"])) for text in found["demands"]]
    wanted = [e for e in document["exchanges"] if e["group"] in ("tp", "dp", "dp x tp")]
    assert len(demands) == len(wanted) > 0
    for demand, exchange in zip(demands, wanted, strict=True):
        assert demand.axes == tuple(exchange["group"].split(" x "))
        assert demand.collective.kind == exchange["operation"]
        assert demand.collective.ranks == exchange["ranks"]
        assert demand.times == exchange["count"]
        assert 0 <= exchange["nbytes"] - demand.collective.nbytes < 64


def test_the_best_placement_is_a_rank_file_of_the_plan(priced, tmp_path):
    out = tmp_path / "ranks.txt"
    done = CliRunner().invoke(
        place, ["--plan", str(priced), "--search-steps", "5", "--out", str(out), "--json"]
    )
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)
    again = CliRunner().invoke(plan, [*OPTIONS, "--rank-file", str(out)])
    assert again.exit_code == 0, again.output
    step = json.loads(priced.read_text())["step"]
    assert json.loads(again.stdout)["step"] <= 1.01 * step


def refused(*options: str) -> Exception | None:
    error = CliRunner().invoke(place, options).exception
    assert isinstance(error, Exception)
    return error


def test_what_is_no_plan_and_what_a_plan_has_already_are_refused(priced, tmp_path):
    other = tmp_path / "other.json"
    other.write_text('{"plan": {}}')
    error = refused("--plan", str(other))
    assert isinstance(error, BadFile) and "is not what `trnsim plan --json` writes" in str(error)
    assert isinstance(refused("--plan", str(tmp_path / "none.json")), BadFile)
    error = refused("--plan", str(priced), "--nodes", "2")
    assert isinstance(error, BadInput) and "nothing with --plan" in str(error)
    error = refused("--instance", "trn2.3xlarge")
    assert isinstance(error, BadInput) and "or --plan FILE" in str(error)
