"""The published policy, and algorithms by name."""

import numpy as np
import pytest

from trnsim.collectives.choose import Policy, build, candidates, choose, kinds, plan
from trnsim.collectives.fabric import Fabric, join, torus
from trnsim.collectives.layout import Layout, layout
from trnsim.collectives.schedule import KINDS, Collective
from trnsim.collectives.verify import verify
from trnsim.device.errors import BadInput

from .collective_reference import collective

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


def test_large_messages_take_kangaring_if_whole_chips_are_in_the_group() -> None:
    fabric = cluster(1)
    whole = [[0, 1, 2, 3, 20, 21, 22, 23]]
    choice = plan(asked("all_reduce", 8, 2**30), whole, fabric).choice
    assert (
        choice.algorithm == "kangaring"
        and choice.reason == "1 GiB is above 56 MB inside one server"
    )
    for group, why in [
        ([0, 1, 2, 3, 20, 21, 22], "all ranks of each chip in the group"),
        ([0, 1, 20, 21], "all ranks of each chip in the group"),
        (range(0, 64, 4), "all ranks of each chip in the group"),
    ]:
        choice = plan(asked("all_reduce", len(group), 2**30), [group], fabric).choice
        assert choice.algorithm == "ring"
        assert choice.reason == f"1 GiB is above 56 MB inside one server, and KangaRing needs {why}"
    assert plan(asked("broadcast", 8, 2**30), whole, fabric).choice.reason.endswith(
        ", and KangaRing has no broadcast"
    )
    alone = fabric.attach(fabric.chips)
    choice = plan(asked("all_gather", 16, 2**30), [range(16)], alone).choice
    assert choice.reason.endswith(", and KangaRing needs pairs of ranks on a chip")


def test_kangaring_has_a_limit_of_ranks() -> None:
    chips = torus((3,), bytes_per_s=10**9)
    fabric = chips.attach(np.repeat(chips.chips, 86))
    choice = plan(asked("all_reduce", 258, 2**30), [range(258)], fabric).choice
    assert choice.algorithm == "ring"
    assert choice.reason.endswith(", and 258 ranks are too many for KangaRing")


def test_one_chip_has_no_ring_at_any_size() -> None:
    fabric = cluster(1)
    for nbytes in (2**20, 2**26, 2**33):
        choice = plan(asked("all_reduce", 4, nbytes), [[4, 5, 6, 7]], fabric).choice
        assert choice.algorithm == "rdh"


def test_kangaring_rides_both_cycles_of_the_torus_both_ways() -> None:
    fabric = cluster(1)
    blocks = plan(asked("all_gather", 64, 2**30), [range(64)], fabric).schedule.blocks
    ring = next(b for b in blocks if b.count > 1)
    assert ring.count == 31 and sorted(set(ring.channel.tolist())) == [0, 1, 2, 3]
    assert ring.fused is not None
    alone = ~ring.fused
    routes = fabric.routes(ring.src[alone], ring.dst[alone])
    used, times = np.unique(routes.links, return_counts=True)
    assert len(used) == 64 and set(times.tolist()) == {1}  # every link of the torus, once
    away = fabric.rank_node[ring.src] != fabric.rank_node[ring.dst]
    assert (fabric.rank_node[ring.dst[1:]] == fabric.rank_node[ring.dst[:-1]])[ring.fused[1:]].all()
    assert away.sum() == 2 * 64  # each hop between chips writes twice


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
        (1000 * MB, "hierarchical:ring+rdh:3"),
        (8000 * MB, "hierarchical:ring+ring:3"),
    ],
)
def test_several_ranks_on_several_servers_are_a_hierarchy(nbytes: int, algorithm: str) -> None:
    choice = choose(asked("reduce_scatter", 256, nbytes), np.repeat(range(4), 64).tolist())
    assert choice.algorithm == algorithm
    assert choice.reason.startswith("4 servers with 64 ranks each; intra ")


def test_large_hierarchies_are_pipelined_up_to_a_number_of_ranks() -> None:
    for nodes, name in ((64, "hierarchical:ring+rdh:3"), (65, "hierarchical:ring+ring")):
        what = asked("all_reduce", nodes * 64, 1000 * MB)
        assert choose(what, np.repeat(range(nodes), 64).tolist()).algorithm == name


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


def test_rings_follow_the_fabric() -> None:
    fabric = cluster(1)
    what = asked("all_reduce", 64, 2**30)
    shuffled = np.random.default_rng(0).permutation(64)
    first = plan(what, shuffled[None], fabric, "ring").schedule.blocks[0]
    routes = fabric.routes(shuffled[first.src], shuffled[first.dst])
    assert sorted(np.diff(routes.starts).tolist()) == [0] * 192 + [1] * 64
    assert len(np.unique(routes.links)) == 64  # two cycles both ways: each link once
    one = plan(what, shuffled[None], fabric, "ring:1").schedule
    assert one.channels == 1 and one.blocks[0].transfers == 64


def test_a_flat_ring_crosses_between_servers_once_each() -> None:
    fabric = cluster(3)
    shuffled = np.random.default_rng(1).permutation(192)
    what = asked("all_reduce", 192, 2**30)
    made = plan(what, shuffled[None], fabric, policy=Policy(flat_ring=True)).schedule
    assert made.algorithm == "ring"
    first = made.blocks[0]
    server = fabric.rank_server[shuffled]
    for channel in range(made.channels):
        mine = first.channel == channel
        assert (server[first.src[mine]] != server[first.dst[mine]]).sum() == 3


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
        ("all_reduce", "ring:0", "^algorithm: ring:0 is not valid"),
        ("all_reduce", "mesh:2", "^algorithm: mesh:2 is not valid"),
        ("all_reduce", "hierarchical:ring+ring:x", "^algorithm: hierarchical:ring.ring:x is not"),
    ],
)
def test_bad_names_are_refused(kind: str, name: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        choose(asked(kind, 4, 64), [0, 0, 1, 1], name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "kangaring",
            "^group of algorithm kangaring: these ranks is not valid; allowed: all ranks",
        ),
        ("torus", "^group of algorithm torus: these ranks is not valid; allowed: all chips of one"),
        ("torus:3", "^channels of algorithm torus: 3 is not valid"),
        ("hierarchical:ring+ring", "^ranks per server: .3, 1. is not valid"),
        ("hierarchical:ring+ring:4", "^ranks per server: .3, 1. is not valid"),
    ],
)
def test_groups_that_an_algorithm_cannot_serve_are_refused(name: str, message: str) -> None:
    fabric = cluster(2)
    group = range(0, 64, 4) if name == "torus:3" else [0, 4, 9, 64]
    with pytest.raises(BadInput, match=message):
        plan(asked("all_reduce", len(group), 64), [group], fabric, name)


def test_hierarchies_need_the_same_local_ranks_on_every_server() -> None:
    fabric = cluster(2)
    what = asked("all_reduce", 4, 64)
    same, other = [[65, 1, 0, 64]], [[0, 1, 64, 66]]
    assert plan(what, same, fabric).choice.algorithm == "hierarchical:mesh+mesh"
    assert "spread unevenly" in plan(what, other, fabric).choice.reason
    across = plan(what, same, fabric, "hierarchical:ring+ring").schedule.flat.blocks[1]
    local = np.array(same[0]) % 64
    assert (local[across.src] == local[across.dst]).all()


def test_policies_can_be_changed() -> None:
    fabric = cluster(2)
    what, group = asked("all_reduce", 128, 2**30), [range(128)]
    flat = plan(what, group, fabric, policy=Policy(flat_ring=True)).choice
    assert flat.algorithm == "ring" and flat.reason.endswith(
        "large messages go round one flat ring"
    )
    piped = plan(what, group, fabric, policy=Policy(stages=3))
    assert piped.schedule.algorithm == "hierarchical:kangaring+rdh:3"
    few = plan(asked("all_reduce", 64, 1000), [range(64)], fabric, policy=Policy(mesh_below=999))
    assert few.choice.reason == "1000 B is between 0.000999 and 56 MB inside one server"


@pytest.mark.parametrize("kind", KINDS)
def test_every_candidate_does_the_collective(kind: str) -> None:
    for fabric, group in [
        (cluster(1), range(8)),
        (cluster(1).attach(cluster(1).chips), range(16)),
        (cluster(2), [*range(4), *range(64, 68)]),
        (cluster(2), [7, 3, 70]),
    ]:
        what = collective(kind, len(group), root=len(group) - 1)
        names = candidates(what, layout(np.array([group]), fabric))
        assert plan(what, [group], fabric).choice.algorithm in names
        for name in names:
            verify(what, plan(what, [group], fabric, name).schedule)


def test_candidates_know_the_group() -> None:
    what = asked("all_reduce", 16, 64)
    fabric = cluster(1)
    flat = {"ring", "mesh", "single_step_mesh", "rdh", "double_binary_tree"}
    trees = {"double_binary_tree:1", "double_binary_tree:32"}
    assert set(candidates(what, layout(np.arange(16)[None], fabric))) == flat | trees | {
        "kangaring"
    }
    chips = fabric.attach(fabric.chips)
    assert set(candidates(what, layout(np.arange(16)[None], chips))) == flat | trees | {"torus"}
    two = candidates(what, layout(np.array([[*range(8), *range(64, 72)]]), cluster(2)))
    assert {"hierarchical:kangaring+rdh", "hierarchical:ring+double_binary_tree:3"} <= set(two)
    many = candidates(asked("all_reduce", 4096, 64), Layout.of_servers([0] * 4096))
    assert set(many) == {"ring", "rdh"} | trees | {"double_binary_tree"}


def test_kinds_of_a_name() -> None:
    assert kinds("policy") == KINDS and kinds("mesh") == KINDS
    assert kinds("ring:2") == kinds("ring") and "all_to_all" not in kinds("ring")
    assert "all_to_all" in kinds("hierarchical") and "gather" not in kinds("hierarchical:ring+rdh")
    with pytest.raises(BadInput, match="^algorithm: rign is not valid; .*; nearest valid: ring$"):
        kinds("rign")
    with pytest.raises(BadInput, match="^steps of algorithm hierarchical: ring is not valid"):
        kinds("hierarchical:ring")
