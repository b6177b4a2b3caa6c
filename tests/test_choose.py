"""The published policy, and algorithms by name."""

import numpy as np
import pytest

from trnsim.collectives.choose import build, choose, plan
from trnsim.collectives.fabric import Fabric, join, torus
from trnsim.collectives.schedule import Collective
from trnsim.collectives.verify import verify
from trnsim.device.errors import BadInput

MB = 10**6


def asked(kind: str, ranks: int, nbytes: int) -> Collective:
    reducing = kind in ("all_reduce", "reduce_scatter")
    pieces = {"all_reduce": 1, "broadcast": 1}.get(kind, ranks)
    return Collective(kind, ranks, nbytes // 4 // pieces, reduction="add" if reducing else None)


def cluster(servers: int) -> Fabric:
    server = torus((4, 4), bytes_per_s=128 * 10**9)
    fabric = join([server] * servers, bytes_per_s=25 * 10**9)
    return fabric.attach(np.repeat(fabric.chips, 4))


@pytest.mark.parametrize(
    ("nbytes", "algorithm"),
    [(4, "mesh"), (MB - 4, "mesh"), (MB, "rdh"), (56 * MB, "rdh"), (56 * MB + 4, "ring")],
)
@pytest.mark.parametrize("kind", ["all_reduce", "broadcast"])
def test_inside_a_server_size_decides(kind: str, nbytes: int, algorithm: str) -> None:
    assert choose(asked(kind, 64, nbytes), [0] * 64).algorithm == algorithm


def test_the_missing_kangaring_is_said() -> None:
    choice = choose(asked("all_reduce", 64, 2**30), [0] * 64)
    assert choice.reason == (
        "1 GiB is above 56 MB inside one server: KangaRing is not built yet, so ring"
    )


@pytest.mark.parametrize(
    ("nodes", "nbytes", "algorithm"),
    [(4, 1000, "mesh"), (4, 8 * MB, "rdh"), (6, 8 * MB, "ring"), (4, 100 * MB, "ring")],
)
def test_across_servers_with_one_rank_each(nodes: int, nbytes: int, algorithm: str) -> None:
    assert choose(asked("all_gather", nodes, nbytes), range(nodes)).algorithm == algorithm


@pytest.mark.parametrize(
    ("nbytes", "algorithm"),
    [
        (1000, "hierarchical:mesh+mesh"),
        (8 * MB, "hierarchical:rdh+mesh"),
        (1000 * MB, "hierarchical:ring+rdh"),
        (8000 * MB, "hierarchical:ring+ring"),
    ],
)
def test_several_ranks_on_several_servers_are_a_hierarchy(nbytes: int, algorithm: str) -> None:
    choice = choose(asked("reduce_scatter", 256, nbytes), np.repeat(range(4), 64).tolist())
    assert choice.algorithm == algorithm
    assert choice.reason.startswith("4 servers with 64 ranks each; intra ")


def test_uneven_groups_stay_flat() -> None:
    choice = choose(asked("all_reduce", 3, 8 * MB), [0, 0, 1])
    assert choice.algorithm == "rdh" and "spread unevenly over servers" in choice.reason


@pytest.mark.parametrize("kind", ["all_to_all", "permute"])
def test_point_to_point_kinds_are_direct(kind: str) -> None:
    assert choose(Collective(kind, 4, 1), [0, 0, 1, 1]).algorithm == "mesh"


def test_one_rank_moves_nothing() -> None:
    choice = choose(asked("all_reduce", 1, 2**30), [0])
    assert choice.reason == "one rank: nothing moves"
    assert build(asked("all_reduce", 1, 4), choice.algorithm, [0]).rounds == 0


@pytest.mark.parametrize("nbytes", [4096, 8 * MB, 1000 * MB])
@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "broadcast"])
def test_plans_are_right(kind: str, nbytes: int) -> None:
    fabric, rng = cluster(2), np.random.default_rng(0)
    for group in ([0, 1, 2, 3], range(0, 128, 4), range(0, 128, 64), rng.permutation(24) * 5):
        what = asked(kind, len(group), nbytes)
        verify(what, plan(what, [list(group)], fabric).schedule)


@pytest.mark.parametrize(("ranks", "algorithm"), [(128, "mesh"), (256, "rdh"), (130, "ring")])
def test_mesh_has_a_limit_of_ranks(ranks: int, algorithm: str) -> None:
    assert choose(asked("all_reduce", ranks, 4096), range(ranks)).algorithm == algorithm
    exchange = choose(Collective("all_to_all", ranks, 1), [0] * ranks)
    assert exchange.algorithm == ("mesh" if ranks <= 128 else "pairwise")


def test_rdh_exchanges_with_neighbours_on_a_torus() -> None:
    fabric = cluster(1)
    what = asked("all_reduce", 64, 8 * MB)
    for block in plan(what, [list(range(64))], fabric, "rdh").schedule.blocks:
        hops = np.diff(fabric.routes(block.src, block.dst).starts)
        assert hops.max() <= 1


def test_a_ring_follows_the_fabric() -> None:
    fabric = cluster(1)
    what = asked("all_reduce", 64, 2**30)
    shuffled = np.random.default_rng(0).permutation(64)
    first = plan(what, shuffled[None], fabric, "ring").schedule.blocks[0]
    hops = np.diff(fabric.routes(shuffled[first.src], shuffled[first.dst]).starts)
    assert sorted(hops.tolist()) == [0] * 48 + [1] * 16


def test_equal_plans_share_a_schedule() -> None:
    fabric = cluster(1)
    small, large = asked("all_reduce", 4, 2**26), asked("all_reduce", 4, 2**28)
    groups = [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert plan(small, groups, fabric).schedule is plan(large, groups, fabric).schedule


def test_groups_that_lie_differently_get_a_flat_algorithm() -> None:
    fabric = cluster(2)
    what = asked("all_reduce", 4, 1000)
    groups = [[0, 1, 64, 65], [2, 66, 3, 67]]
    assert plan(what, groups, fabric).choice.algorithm == "mesh"
    with pytest.raises(BadInput, match="^algorithm: hierarchical is not valid; .*lie differently"):
        plan(what, groups, fabric, "hierarchical")


def test_by_name() -> None:
    fabric = cluster(2)
    what, groups = asked("all_reduce", 128, 1000), [list(range(128))]
    assert plan(what, groups, fabric, "ring").choice.reason == "asked for by name"
    named = plan(what, groups, fabric, "hierarchical:ring+rdh")
    assert named.schedule.algorithm == named.choice.algorithm == "hierarchical:ring+rdh"
    assert plan(what, groups, fabric, "hierarchical").choice.algorithm == "hierarchical:mesh+mesh"


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("all_reduce", "rign", "^algorithm: rign is not valid; .*; nearest valid: ring$"),
        (
            "all_to_all",
            "ring",
            "^algorithm of all_to_all: ring is not valid; allowed: one of mesh,",
        ),
        ("scatter", "hierarchical", "^algorithm of scatter: hierarchical is not valid"),
        ("all_reduce", "hierarchical:ring", "^steps of algorithm hierarchical: ring is not valid"),
        ("all_reduce", "hierarchical:ring+rhd", ".*; nearest valid: ring\\+rdh$"),
    ],
)
def test_bad_names_are_refused(kind: str, name: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        choose(asked(kind, 4, 64), [0, 0, 1, 1], name)
