"""Large fabrics: equal parts are laid out once, and are the same as parts laid out one by one."""

import time
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trnsim.cluster.instances import fabric as instance_fabric
from trnsim.cluster.instances import load_instance
from trnsim.collectives.fabric import Fabric, graph, join, ring, torus
from trnsim.device.errors import BadInput, TrnsimError

GB = 10**9


def links(fabric: Fabric) -> set[tuple[str, int, int]]:
    rows = zip(fabric.rate.tolist(), fabric.latency.tolist(), strict=True)
    return {(fabric.link_name(i), rate, delay) for i, (rate, delay) in enumerate(rows)}


def paths(fabric: Fabric) -> list[list[str]]:
    a, b = (axis.reshape(-1) for axis in np.indices((fabric.ranks, fabric.ranks)))
    routes = fabric.routes(a, b)
    return [[fabric.link_name(link) for link in routes.path(p)] for p in range(len(a))]


PARTS = {
    "torus": torus((3, 2), bytes_per_s=GB, latency_ps=2),
    "ring": ring(3, bytes_per_s=GB, latency_ps=4, both_ways=False),
    "graph": graph(["a", "b", "c"], [(a, b, GB, 7) for a, b in ("ab", "bc", "ca", "ba")]),
}


@given(st.lists(st.sampled_from(sorted(PARTS)), min_size=1, max_size=5), st.integers(0, 4))
def test_equal_parts_laid_out_once_are_as_parts_one_by_one(kinds: list[str], nics: int) -> None:
    given = {"bytes_per_s": 3 * GB, "latency_ps": 9, "nics": nics or None}
    shared = join([PARTS[kind] for kind in kinds], **given)
    alone = join([replace(PARTS[kind]) for kind in kinds], **given)  # no two are one object
    assert links(shared) == links(alone)
    shared, alone = (f.attach(f.chips, dma_out=GB, dma_in=GB) for f in (shared, alone))
    assert paths(shared) == paths(alone)
    assert shared.rank_server.tolist() == alone.rank_server.tolist()


@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 3))
def test_names_find_their_nodes(inner: int, outer: int, nics: int) -> None:
    pod = join([PARTS["torus"]] * inner, bytes_per_s=GB, nics=nics or None)
    fabric = join([pod] * outer + [PARTS["graph"]], bytes_per_s=GB)
    names = list(fabric.names)
    assert len(set(names)) == len(names)
    assert [fabric.node(name) for name in names] == list(range(len(names)))
    for wrong in ("server0/chip00", "server9/chip0", "chip0", "server-1/chip0", ""):
        assert fabric.names.find(wrong) is None


def test_a_cut_in_one_of_many_equal_graphs_reroutes_there_only() -> None:
    fabric = join([PARTS["graph"]] * 3, bytes_per_s=GB, latency_ps=1000)
    fabric = fabric.attach(fabric.chips).fail(links=["server1/a->server1/b"])
    routes = fabric.routes(np.array([0, 3, 6]), np.array([1, 4, 7]))
    named = [[fabric.link_name(link) for link in routes.path(p)] for p in range(3)]
    assert named[0] == ["server0/a->server0/b"] and named[2] == ["server2/a->server2/b"]
    assert named[1] == ["server1/a->switch0", "switch0->server1/b"]


def test_a_wrong_name_among_many_gets_a_short_answer() -> None:
    fabric = join([torus((4, 4), bytes_per_s=GB)] * 500, bytes_per_s=GB)
    with pytest.raises(BadInput) as refusal:
        fabric.node("server0/chp15")
    assert str(refusal.value) == (
        "node: server0/chp15 is not valid; allowed: one of 8001 names, server0/chip0 to switch0; "
        "nearest valid: server0/chip15"
    )


def test_a_failed_interface_among_thousands_is_found_at_once() -> None:
    fabric = instance_fabric(load_instance("trn2.48xlarge"), 1024)
    cut = fabric.fail(links=["node7/nic3<->switch0"])
    near = cut.routes(np.arange(448, 512), np.arange(0, 64))
    lost = [rank for rank in range(64) if len(near.path(rank)) > 6]
    assert lost == [12, 13, 14, 15]  # the ranks of chip 3 leave through a neighbour
    assert {*cut.server[cut.target[near.links]].tolist()} == {-1, 0, 7}  # through no third server
    dead = fabric.fail(nodes=["node7/chip3"])
    with pytest.raises(TrnsimError, match="^rank 460 is unreachable: node7/chip3 has failed$"):
        dead.routes(np.array([0]), np.array([460]))


def test_a_million_ranks_take_less_than_400_mb() -> None:
    tracemalloc.start()
    began = time.perf_counter()
    fabric = instance_fabric(load_instance("trn2.48xlarge"), 16384)
    took, peak = time.perf_counter() - began, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert fabric.ranks == 2**20 and len(fabric.rate) == 2**22
    assert peak < 400e6 and took < 10  # about 0.5 s on two cores
