"""The search for degrees: against pricing everything, what stays fixed, what does not fit."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from trnsim.cluster.cli_plan import plan as command
from trnsim.cluster.models.config import ModelConfig
from trnsim.cluster.plans import search as searching
from trnsim.cluster.plans.plan import Plan
from trnsim.cluster.plans.result import price_plan
from trnsim.cluster.plans.search import search
from trnsim.device.errors import BadInput, OutOfMemory, Unsupported

GPT = ModelConfig(
    name="small", family="gpt2", layers=4, hidden=256, heads=8, kv_heads=8, head_dim=32, ffn=512,
    vocab=1024, activation="gelu", norm="layer", positions="learned", max_positions=128,
    qkv_bias=True, linear_bias=True,
)  # fmt: skip
ASKED = {"instance": "trn2.3xlarge", "lnc": 2, "global_batch": 8, "seq": 128, "zero": "1"}


@pytest.fixture(scope="module")
def found():
    return search(GPT, fixed={}, **ASKED)


def test_the_best_is_the_best_of_all_that_are_priced_one_by_one(found):
    legal = {}
    for pp in (1, 2, 4):
        for tp in (1, 2, 4):
            try:
                plan = Plan.of(GPT, mesh=f"pp={pp},tp={tp}", recompute="none", **ASKED)
            except BadInput:
                continue
            legal[str(plan.mesh)] = price_plan(plan).step
    best = found[0]
    assert best.result.step == min(legal.values())
    assert len(found) == len(legal)
    for candidate in found:
        step = candidate.result.step if candidate.result else candidate.bound
        assert candidate.bound <= step
        assert best.result.step <= step


def test_runners_up_say_why_they_lose(found):
    assert found[0].why == ""
    assert all(candidate.why for candidate in found[1:])
    steps = [candidate.result.step for candidate in found if candidate.result]
    assert steps == sorted(steps)
    piped = next(c for c in found[1:] if c.plan.pp > 1 and c.result)
    assert "pipeline bubble +" in piped.why


def test_degrees_that_are_given_stay():
    assert {c.plan.tp for c in search(GPT, fixed={"tp": 2}, **ASKED)} == {2}


def test_degrees_that_cannot_be_are_refused():
    with pytest.raises(BadInput, match="tp"):
        search(GPT, fixed={"tp": 3}, **ASKED)


def test_the_command_prints_the_best_plan():
    options = ["--instance", "trn2.3xlarge", "--global-batch", "4", "--seq", "128"]
    options += ["--mesh", "tp=4", "--search", "--recompute", "full", "--json"]
    done = CliRunner().invoke(command, ["bert-large", *options])
    assert done.exit_code == 0, done.output
    printed = json.loads(done.stdout)
    assert printed["plan"]["mesh"] == printed["search"][0]["mesh"]
    assert {entry["recompute"] for entry in printed["search"]} == {"full"}


def test_nothing_that_fits_is_an_error():
    options = ["--instance", "trn2.3xlarge", "--global-batch", "4", "--seq", "8192"]
    options += ["--mesh", "tp=4,pp=1", "--recompute", "full", "--search"]
    done = CliRunner().invoke(command, ["llama3-70b", *options])
    assert isinstance(done.exception, OutOfMemory)
    assert "no degrees fit; the least needs" in str(done.exception)


def test_large_memory_is_a_reason(found):
    tight = replace(found[0], need=found[0].plan.machine.hbm_bytes + 1)
    from trnsim.cluster.plans.search import _explained

    assert "does not fit: " in _explained(tight, found[1]).why


def test_what_no_kernel_can_be_made_for_is_refused_and_the_search_goes_on(monkeypatch, found):
    judged = searching._judged

    def without_pipelines(plans, best):
        if plans[0].pp > 1:
            raise Unsupported("no such kernel")
        return judged(plans, best)

    monkeypatch.setattr(searching, "_judged", without_pipelines)
    again = search(GPT, fixed={}, **ASKED)
    assert [c.plan.pp > 1 for c in again] == [c.refused for c in again]
    assert [c.refused for c in again] == sorted(c.refused for c in again)
    assert {c.why for c in again if c.refused} == {"no such kernel"}
    assert {str(c.plan.mesh) for c in again} == {str(c.plan.mesh) for c in found}
    with pytest.raises(Unsupported, match="no such kernel"):
        search(GPT, fixed={"pp": 2}, **ASKED)
