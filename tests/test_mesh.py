"""Meshes: ranks, coordinates and replica groups as laws; placements that fit and that do not."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trnsim.cluster.instances import load_instance
from trnsim.cluster.lnc import CoreAddress
from trnsim.cluster.mesh import Mesh, data_parallel_degree, microbatches, parse_mesh
from trnsim.cluster.placement import describe, place
from trnsim.device.errors import BadInput

meshes = st.lists(
    st.tuples(st.sampled_from(["dp", "tp", "pp", "ep", "cp"]), st.integers(1, 5)),
    min_size=1,
    max_size=4,
    unique_by=lambda axis: axis[0],
).map(lambda axes: Mesh(tuple(axes)))
mesh_and_axes = meshes.flatmap(
    lambda mesh: st.tuples(st.just(mesh), st.lists(st.sampled_from(mesh.names), unique=True))
)


@given(meshes)
def test_text_round_trips(mesh: Mesh) -> None:
    assert parse_mesh(str(mesh)) == mesh
    assert eval(repr(mesh)) == mesh


def test_spaces_are_allowed_and_order_is_kept() -> None:
    mesh = parse_mesh(" tp = 2, dp=4 ")
    assert mesh.axes == (("tp", 2), ("dp", 4))
    assert (mesh.size, mesh.shape, mesh.degree("dp")) == (8, (2, 4), 4)


@pytest.mark.parametrize(
    "text", ["", " ", "dp", "dp=", "=2", "dp=-1", "dp=1.5", "dp=2;tp=2", "dp=2,"]
)
def test_garbage_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="^mesh: '.*' is not valid; allowed: axes as name=degree, "):
        parse_mesh(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp=0", "mesh: dp=0 is not valid; allowed: degrees of at least 1; nearest valid: dp=1"),
        ("dp=2,dp=3", "mesh: dp=2,dp=3 is not valid; allowed: each axis once; dp is named twice"),
    ],
)
def test_zero_and_repeated_axes_are_refused(text: str, message: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse_mesh(text)
    assert str(caught.value) == message


@given(meshes)
def test_rank_and_coordinates_are_inverse(mesh: Mesh) -> None:
    """Row-major, as the flattened devices of a jax.sharding.Mesh."""
    for rank in range(mesh.size):
        position = mesh.coordinates(rank)
        assert mesh.rank(position) == rank
        assert np.ravel_multi_index(tuple(position.values()), mesh.shape) == rank


@given(mesh_and_axes)
def test_groups_partition_the_ranks(case: tuple[Mesh, list[str]]) -> None:
    mesh, names = case
    groups = mesh.groups(*names)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
    assert {len(group) for group in groups} == {math.prod(mesh.degree(name) for name in names)}
    assert [group[0] for group in groups] == sorted(group[0] for group in groups)


@given(mesh_and_axes)
def test_members_differ_on_the_named_axes_only(case: tuple[Mesh, list[str]]) -> None:
    mesh, names = case
    for group in mesh.groups(*names):
        seen = [mesh.coordinates(rank) for rank in group]
        fixed = {tuple(p for name, p in c.items() if name not in names) for c in seen}
        moved = [tuple(c[name] for name in names) for c in seen]
        assert len(fixed) == 1 and moved == sorted(set(moved))


def test_groups_of_the_usual_mesh() -> None:
    mesh = parse_mesh("dp=2,tp=2")
    assert mesh.groups("tp") == ((0, 1), (2, 3))
    assert mesh.groups("dp") == ((0, 2), (1, 3))
    assert mesh.groups("dp", "tp") == ((0, 1, 2, 3),)
    assert mesh.groups("tp", "dp") == ((0, 2, 1, 3),)
    assert mesh.groups() == ((0,), (1,), (2,), (3,))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m.groups("ep"), "axis: ep is not valid; allowed: one of dp, tp"),
        (lambda m: m.groups("tp", "tp"), "axes: tp, tp is not valid; allowed: each axis once"),
        (lambda m: m.coordinates(4), "rank: 4 is not valid; allowed: 0 to 3 in mesh dp=2,tp=2"),
        (lambda m: m.rank({"tp": 2}), "tp: 2 is not valid; allowed: 0 to 1 in mesh dp=2,tp=2"),
    ],
)
def test_questions_outside_the_mesh(call, message: str) -> None:
    with pytest.raises(BadInput) as caught:
        call(parse_mesh("dp=2,tp=2"))
    assert str(caught.value).startswith(message)


# --- batches: case U8 ---


def test_u8_batch_that_data_parallelism_does_not_divide() -> None:
    dp = data_parallel_degree(1472, 8 * 8)
    assert dp == 23
    with pytest.raises(BadInput) as caught:
        microbatches(32, dp, microbatch=1)
    assert str(caught.value) == (
        "global batch: 32 is not valid; allowed: a multiple of dp x microbatch = 23 x 1 = 23; "
        "nearest valid: 23 or 46"
    )


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 64))
def test_microbatches_multiply_back(dp: int, microbatch: int, count: int) -> None:
    assert microbatches(dp * microbatch * count, dp, microbatch) == count


def test_world_that_the_model_does_not_divide() -> None:
    with pytest.raises(BadInput, match="^world size: 1000 .*; nearest valid: 960 or 1024$"):
        data_parallel_degree(1000, 64)


# --- placement ---


def refusal(name: str, mesh: str, **options) -> str:
    with pytest.raises(BadInput) as caught:
        place(load_instance(name), parse_mesh(mesh), **options)
    return str(caught.value)


def test_identity_placement_of_the_main_job() -> None:
    placed = place(load_instance("trn2.3xlarge"), parse_mesh("dp=2,tp=2"), lnc=2)
    assert [core.physical for rank in range(4) for core in placed.cores(rank)] == list(range(8))
    assert [placed.stack(rank)[2] for rank in range(4)] == [0, 1, 2, 3]
    assert placed.address(1) == "rank 1: node 0, chip 0, cores 2-3 (logical 1)"
    assert placed.logical_core.hbm_bytes == 24 * 2**30


def test_explicit_cores() -> None:
    instance = load_instance("trn2.48xlarge")
    placed = place(instance, parse_mesh("tp=3"), nodes=2, lnc=2, slots=[127, 0, 66])
    assert placed.cores(0) == (CoreAddress(1, 15, 3, 6), CoreAddress(1, 15, 3, 7))
    assert [placed.locate(rank) for rank in (1, 2)] == [(0, 0, 0), (1, 0, 2)]


@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize("nodes", [1, 3])
def test_a_full_placement_uses_every_core_once(lnc: int, nodes: int) -> None:
    instance = load_instance("trn2.48xlarge")
    size = nodes * instance.logical_cores(lnc)
    placed = place(instance, Mesh((("dp", size),)), nodes=nodes, lnc=lnc)
    cores = [core for rank in range(size) for core in placed.cores(rank)]
    assert cores == sorted(set(cores)) and len(cores) == nodes * instance.physical_cores


def test_neighbouring_ranks_share_a_stack_at_lnc_1() -> None:
    placed = place(load_instance("trn2.3xlarge"), parse_mesh("tp=8"), lnc=1)
    assert [placed.stack(rank)[2] for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_u15_chips_are_not_devices() -> None:
    """trn2.3xlarge taken for 4 devices of 8 cores, and its physical cores for ranks."""
    assert refusal("trn2.3xlarge", "dp=4,tp=2", lnc=2) == (
        "mesh: dp=4,tp=2 (8 ranks) is not valid; allowed: at most 4 ranks (trn2.3xlarge: 1 chip, "
        "8 physical cores, 4 logical cores at LNC=2); nearest valid: dp=2,tp=2, or 2 nodes"
    )
    assert place(load_instance("trn2.3xlarge"), parse_mesh("dp=4,tp=2"), lnc=1).ranks == 8
    large = describe(load_instance("trn2.48xlarge"), 1, 2)
    assert large == "trn2.48xlarge: 16 chips, 128 physical cores, 64 logical cores at LNC=2"


def test_u14_core_counts_of_trn1() -> None:
    assert refusal("trn1.32xlarge", "tp=24") == (
        "tp: 24 is not valid; allowed: 1, 2, 8, 16, multiples of 32 cores on trn1.32xlarge; "
        "nearest valid: 16 or 32"
    )
    assert refusal("trn1.32xlarge", "dp=2,tp=2") == (
        "mesh: dp=2,tp=2 (4 ranks) is not valid; allowed: 1, 2, 8, 16, multiples of 32 cores on "
        "trn1.32xlarge; nearest valid: 2 or 8"
    )
    assert refusal("trn1.32xlarge", "dp=4,tp=24", nodes=3).startswith("tp: 24 is not valid")


@given(st.integers(1, 128))
def test_trn1_takes_exactly_the_allowed_counts(ranks: int) -> None:
    allowed = ranks in (1, 2, 8, 16) or ranks % 32 == 0
    instance, mesh = load_instance("trn1.32xlarge"), Mesh((("dp", ranks),))
    if allowed:
        assert place(instance, mesh, nodes=4).ranks == ranks
    else:
        with pytest.raises(BadInput, match="allowed: 1, 2, 8, 16, multiples of 32 cores"):
            place(instance, mesh, nodes=4)


@given(st.integers(1, 40), st.integers(1, 40))
def test_the_mesh_that_is_suggested_fits(dp: int, tp: int) -> None:
    instance, mesh = load_instance("trn2.3xlarge"), Mesh((("dp", dp), ("tp", tp)))
    if mesh.size <= 4:
        assert place(instance, mesh).ranks == mesh.size
        return
    with pytest.raises(BadInput) as caught:
        place(instance, mesh)
    near, nodes = str(caught.value).partition("; nearest valid: ")[2].split(", or ")
    place(instance, parse_mesh(near))
    place(instance, mesh, nodes=int(nodes.removesuffix(" nodes")))


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([0, 1], "placement: 2 cores is not valid; allowed: 4, one per rank of dp=2,tp=2"),
        ([0, 1, 1, 2], "core of rank 2: 1 is not valid; allowed: a core not taken by rank 1"),
        ([0, 1, 2, 4], "core of rank 3: 4 is not valid; allowed: 0 to 3"),
    ],
)
def test_bad_cores_are_refused(slots: list[int], message: str) -> None:
    assert refusal("trn2.3xlarge", "dp=2,tp=2", slots=slots) == message


def test_lnc_and_nodes_are_checked_first() -> None:
    assert refusal("trn2.3xlarge", "tp=99", lnc=3).startswith("LNC: 3 is not valid")
    assert refusal("trn1.32xlarge", "tp=8", lnc=2).startswith("LNC: 2 is not valid; allowed: 1 on")
    assert refusal("inf2.48xlarge", "tp=32", nodes=2).startswith("nodes: 2 is not valid")
    assert refusal("inf2.48xlarge", "tp=32").endswith("nearest valid: tp=24")
