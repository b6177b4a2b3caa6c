"""Plans: what is refused up front, with the nearest valid choice, and what follows from a plan."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trnsim.cluster.models.config import load_model
from trnsim.cluster.plans.plan import Plan, split_layers
from trnsim.device.errors import BadInput, Unsupported


def plan(model: Any = "llama3-8b", **changes: Any) -> Plan:
    fields = {"instance": "trn2.48xlarge", "mesh": "tp=8", "global_batch": 64, "seq": 4096}
    return Plan.of(model, **fields | changes)


def refusal(**changes: Any) -> str:
    with pytest.raises(BadInput) as caught:
        plan(**changes)
    return str(caught.value)


def test_a_mesh_without_dp_fills_the_machine() -> None:
    found = plan(mesh="pp=4,tp=8", nodes=4)
    assert str(found.mesh) == "pp=4,dp=8,tp=8"
    assert (found.dp, found.ep, found.microbatches) == (8, 1, 8)
    assert plan(mesh="dp=2,tp=8").machine.ranks == 16


def test_ranks_are_numbered_with_tp_fastest_unless_an_order_says_otherwise() -> None:
    assert str(plan(mesh="tp=8,pp=4", nodes=4).mesh) == "pp=4,dp=8,tp=8"
    assert str(plan(mesh="tp=8,dp=8,pp=4", nodes=4, order="tp, pp,dp").mesh) == "tp=8,pp=4,dp=8"
    assert plan(mesh="tp=8", order=("tp", "dp")).mesh.strides() == {"tp": 8, "dp": 1}
    assert refusal(mesh="tp=8", order="tp,cp") == (
        "order: tp,cp is not valid; allowed: each axis of mesh tp=8,dp=8 once; nearest valid: dp,tp"
    )


def test_u8_a_batch_that_dp_does_not_divide() -> None:
    assert refusal(mesh="pp=8,tp=8", nodes=23, global_batch=32, seq=2048) == (
        "global batch: 32 is not valid; allowed: a multiple of dp x microbatch = 23 x 1 = 23;"
        " nearest valid: 23 or 46"
    )


@pytest.mark.parametrize("nodes", [1, 3])
def test_u14_tensor_parallel_degrees_of_trn1(nodes: int) -> None:
    near = "16 or 32"
    assert refusal(instance="trn1.32xlarge", nodes=nodes, mesh="tp=24") == (
        "tp: 24 is not valid; allowed: 1, 2, 8, 16, multiples of 32 cores on trn1.32xlarge;"
        f" nearest valid: {near}"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"mesh": "tp=12"},
            "tp: 12 is not valid; allowed: 1, 2, 4, 8, 16, 32, 64, 128 on trn2.48xlarge;"
            " nearest valid: 8 or 16",
        ),
        (
            {"mesh": "tp=64"},
            "tp: 64 is not valid; allowed: a divisor of heads = 32; nearest valid: 32",
        ),
        (
            {"mesh": "dp=1,tp=2,xp=2"},
            "mesh axis: xp is not valid; allowed: one of pp, dp, ep, cp, tp",
        ),
        (
            {"mesh": "pp=64"},
            "pp: 64 is not valid; allowed: at most 32 layers over chunks of 1f1b;"
            " nearest valid: 32",
        ),
        (
            {"mesh": "dp=1,ep=8,tp=8"},
            "ep: 8 is not valid; allowed: 1: llama3-8b has no experts; nearest valid: 1",
        ),
        (
            {"model": "mixtral-8x7b", "mesh": "dp=1,ep=16"},
            "ep: 16 is not valid; allowed: a divisor of experts = 8; nearest valid: 8",
        ),
        (
            {"mesh": "cp=2,tp=8", "seq": 4100},
            "seq: 4100 is not valid; allowed: a multiple of 2 x cp x tp = 32;"
            " nearest valid: 4096 or 4128",
        ),
        (
            {"model": "gpt3-6.7b"},
            "seq: 4096 is not valid; allowed: at most 2048, the learned positions of gpt3-6.7b;"
            " nearest valid: 2048",
        ),
        (
            {"mesh": "pp=4,tp=8", "schedule": "interleaved:2", "global_batch": 12},
            "microbatches: 6 is not valid; allowed: a multiple of pp = 4 with interleaved:2;"
            " nearest valid: 4 or 8",
        ),
        (
            {"schedule": "gpipe"},
            "schedule: gpipe is not valid; allowed: 1f1b, interleaved:V with V of at least 2 chunks"
            " per stage, zero-bubble",
        ),
        (
            {"streams": 5},
            "streams: 5 is not valid; allowed: 1 to 4 on Trainium2 at LNC=2; nearest valid: 4",
        ),
        ({"zero": "2"}, "zero: 2 is not valid; allowed: one of none, 1, fsdp"),
        ({"microbatch": 0}, "microbatch: 0 is not valid; allowed: 1 or more; nearest valid: 1"),
        (
            {"dropout": 1.0},
            "dropout: 1.0 is not valid; allowed: 0 to less than 1; nearest valid: 0",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_the_nearest_valid(changes: dict, message: str) -> None:
    assert refusal(**changes) == message


def test_kv_heads_divide_or_are_copied() -> None:
    narrow = plan(mesh="tp=4")
    assert (narrow.local_heads, narrow.local_kv_heads, narrow.kv_copies) == (8, 2, 1)
    wide = plan(mesh="tp=32")
    assert (wide.local_heads, wide.local_kv_heads, wide.kv_copies) == (1, 1, 4)
    assert "Each of 8 key and value heads is on 4 ranks." in wide.notes
    odd = replace(load_model("llama3-8b"), heads=24, kv_heads=6, ffn=24, name="odd")
    assert refusal(model=odd, mesh="tp=4") == (
        "tp: 4 is not valid; allowed: a divisor or a multiple of kv_heads = 6;"
        " nearest valid: 3 or 6"
    )


def test_a_sliding_window_is_refused_only_where_it_matters() -> None:
    model = replace(load_model("llama3-8b"), window=4096)
    assert plan(model=model, seq=4096).seq == 4096
    with pytest.raises(Unsupported, match="window of 4096 under seq 8192 .* valid: seq 4096$"):
        plan(model=model, seq=8192)


def test_models_that_no_program_is_built_for_are_refused() -> None:
    latent = replace(load_model("llama3-8b"), kv_rank=512, name="latent")
    assert refusal(model=latent, mesh="cp=2,tp=8") == (
        "cp: 2 is not valid; allowed: 1 with the latent attention of latent; nearest valid: 1"
    )
    with pytest.raises(Unsupported, match="^llama3-8b: heads of 256; at most 128$"):
        plan(model=replace(load_model("llama3-8b"), head_dim=256))


def test_gradient_axes_are_those_with_equal_parameters() -> None:
    found = plan(model="mixtral-8x7b", mesh="pp=2,dp=1,cp=2,ep=4,tp=4")
    assert found.gradient_axes == ("ep", "cp")
    assert found.expert_gradient_axes == ("cp",)
    assert (found.microbatches, found.local_experts, found.local_seq) == (16, 2, 2048)


def test_the_vocabulary_is_filled_up() -> None:
    found = plan(model="gpt3-46b", seq=2048)
    assert found.vocab == 50264
    assert "Vocabulary of 50257 filled up to 50264, a multiple of tp." in found.notes


def test_layers_of_stages_and_chunks() -> None:
    found = plan(mesh="pp=4,tp=8", schedule="interleaved:2")
    assert [[(r.start, r.stop) for r in stage] for stage in found.stage_layers] == [
        [(0, 4), (16, 20)],
        [(4, 8), (20, 24)],
        [(8, 12), (24, 28)],
        [(12, 16), (28, 32)],
    ]
    sizes = [len(part) for part in split_layers(126, 16)]
    assert sizes == [7, *[8] * 14, 7]


@given(st.integers(1, 200), st.integers(1, 64))
def test_layers_are_split_whole_and_evenly(layers: int, parts: int) -> None:
    found = split_layers(layers, parts)
    assert [layer for part in found for layer in part] == list(range(layers))
    sizes = [len(part) for part in found]
    assert max(sizes) - min(sizes) <= 1 and sizes[-1] == min(sizes)


def test_tokens_and_flops_are_of_the_whole_job() -> None:
    found = plan(global_batch=64, seq=4096)
    assert found.tokens == 64 * 4096
    assert found.flops == found.tokens * load_model("llama3-8b").flops_per_token(4096)


def test_measured_training_rows_are_legal_plans() -> None:
    """The rows of published training steps that prices are compared with."""
    llama = Plan.of(
        "llama3-8b",
        instance="trn1.32xlarge",
        nodes=32,
        mesh="dp=32,tp=32",
        global_batch=1024,
        seq=8192,
        zero="1",
    )
    gpt = Plan.of(
        "gpt3-46b",
        instance="trn1.32xlarge",
        nodes=32,
        mesh="pp=8,dp=16,tp=8",
        global_batch=1024,
        seq=2048,
    )
    bert = Plan.of(
        "bert-large",
        instance="trn1.32xlarge",
        mesh="dp=32",
        global_batch=16384,
        microbatch=16,
        seq=128,
    )
    assert [p.microbatches for p in (llama, gpt, bert)] == [32, 64, 32]
