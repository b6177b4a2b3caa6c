"""`trnsim plan`: refusals of numbers that are none, rank files, traces."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from trnsim.cluster.cli_plan import plan as command
from trnsim.cluster.instances import load_instance
from trnsim.cluster.placing.rank_file import Cores, rank_file
from trnsim.cluster.plans.clocks import MOST_SLOWER, Conditions
from trnsim.cluster.plans.fitting import remedies
from trnsim.device.errors import BadFile, BadInput, TrnsimError

from .test_plans_time_models import planned, price_plan

BATCH = ["--global-batch", "16", "--seq", "128"]


def refused(*words: str, model: str = "llama2-7b") -> TrnsimError:
    """The error of a command line."""
    error = CliRunner().invoke(command, [model, *BATCH, "--mesh", "tp=8", *words]).exception
    assert isinstance(error, TrnsimError), error
    return error


@pytest.mark.parametrize("value", ["nan", "inf", "1e300", "-1"])
def test_numbers_that_are_none_are_refused(value):
    assert "jitter" in str(refused("--jitter", value))
    assert "--slow-chip" in str(refused("--slow-chip", f"1={value}"))
    if value != "1e300":
        assert "capacity" in str(refused("--capacity", value, model="mixtral-8x7b"))


def test_slowest_of_all_still_has_a_clock():
    slow = Conditions(slow=((0, MOST_SLOWER),), jitter=MOST_SLOWER)
    plan = planned("dp=4,tp=1", global_batch=8)
    assert price_plan(plan).step < price_plan(plan, conditions=slow).step < 2**62


def test_times_without_end_are_refused():
    for option in ("--mtbf", "--checkpoint", "--restart", "--checkpoint-every"):
        words = ["--mtbf", "5000h", option, f"1{'0' * 400}h"]
        assert "inf is not valid" in str(refused(*words))


def test_remedies_of_a_plan_without_data_parallelism():
    """Optimizer states cannot be sharded; recomputation alone is left."""
    found = remedies(planned("tp=4,dp=1", global_batch=4, microbatch=4))
    assert {how for how, _ in found} == {"recompute full", "recompute selective", "microbatch 2"}


@pytest.mark.parametrize("more", [[], ["--search"]])
def test_nodes_are_named(more):
    error = refused("--nodes", "0", *more)
    assert isinstance(error, BadInput) and error.field == "nodes"


def test_trace_is_not_written_over_a_folder(tmp_path):
    assert isinstance(refused("--trace", str(tmp_path)), BadFile)
    assert [*tmp_path.parent.glob(f"*{tmp_path.name}*")] == [tmp_path]
    assert [*tmp_path.iterdir()] == []


def test_rank_file_is_where_ranks_run(tmp_path):
    """dp fastest on the cores, by the numbering of ranks and by a rank file."""
    chip_cores = Cores(1, load_instance("trn2.48xlarge").chips, 4)
    slots = [tp * 8 + dp for dp in range(8) for tp in range(8)]
    file = tmp_path / "ranks"
    file.write_text(rank_file(np.array(slots), chip_cores, "tp over chips"))
    usual = price_plan(planned("dp=8,tp=8"))
    placed = price_plan(planned("dp=8,tp=8", rank_file=file))
    ordered = price_plan(planned("dp=8,tp=8", order="tp,dp"))
    assert placed.step == ordered.step > usual.step
    assert placed.parts == ordered.parts


def test_result_and_trace_are_json(tmp_path):
    trace = tmp_path / "trace.json"
    words = ["bert-large", *BATCH, "--mesh", "pp=2,dp=4,tp=8", "--trace", str(trace), "--json"]
    done = CliRunner().invoke(command, words)
    assert done.exit_code == 0, done.exception

    def no_nan(text: str):
        raise AssertionError(text)

    result = json.loads(done.stdout, parse_constant=no_nan)
    events = json.loads(trace.read_text(), parse_constant=no_nan)["traceEvents"]
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            span = event["ts"], event["ts"] + event["dur"]
            tracks.setdefault((event["pid"], event["tid"]), []).append(span)
    assert len({process for process, _ in tracks}) == 2  # a stage each
    for spans in tracks.values():
        spans.sort()
        assert all(a[1] <= b[0] + 1e-5 for a, b in zip(spans, spans[1:], strict=False))
    assert (
        max(end for spans in tracks.values() for _, end in spans) * 1e6 <= result["step"] * 1.0001
    )
