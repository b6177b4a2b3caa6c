"""Schedules over many equal nodes, priced on two of them, cost what they cost on all."""

import numpy as np
import pytest

from trnsim.cluster.collective import site_of
from trnsim.cluster.instances import load_instance
from trnsim.collectives import choose
from trnsim.collectives.price import Pricer
from trnsim.collectives.schedule import Collective
from trnsim.collectives.twins import twins

NODE = 64  # logical cores of a trn2.48xlarge
TRN2 = load_instance("trn2.48xlarge")


def groups_of(nodes: int, tp: int) -> np.ndarray:
    """int64[tp, n]: data-parallel groups over all nodes."""
    return np.ascontiguousarray(np.arange(nodes * NODE).reshape(-1, tp).T)


def small_table(table: np.ndarray, members: np.ndarray) -> np.ndarray:
    """The same groups on two nodes."""
    nodes, places = np.divmod(table[:, members], NODE)
    return np.unique(nodes[0], return_inverse=True)[1] * NODE + places


def even(kind: str, n: int, parts: int) -> Collective:
    """About a megabyte, in equal chunks."""
    reduction = None if kind == "all_gather" else "add"
    return Collective(kind, n, 3 * 2**10 * parts * n, "bf16", reduction)


ALGORITHMS = {
    8: ("policy", "ring", "hierarchical:ring+ring", "hierarchical:rdh+mesh"),
    NODE: ("policy", "ring"),  # one rank on a node has no level inside
}


@pytest.mark.parametrize(
    ("tp", "algorithm"), [(tp, a) for tp in ALGORITHMS for a in ALGORITHMS[tp]]
)
@pytest.mark.parametrize("nodes", [3, 4, 6])
@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter"])
def test_two_nodes_stand_for_all(tp, nodes, kind, algorithm):
    site, table = site_of(TRN2, nodes=nodes, lnc=2), groups_of(nodes, tp)
    n = table.shape[1]
    plan = choose.plan(even(kind, n, 1), table, site.fabric, algorithm, site.policy)
    collective = even(kind, n, plan.schedule.parts)
    found = twins(plan.schedule, collective, *np.divmod(table, NODE))
    if algorithm == "ring" and tp < NODE:
        assert found is None  # its nodes have first and last ranks of their own
        return
    assert found is not None
    whole = Pricer(plan.schedule, site.fabric, table).price(collective, overheads=site.overheads)
    pair = site_of(TRN2, nodes=2, lnc=2)
    pricer = Pricer(found.schedule, pair.fabric, small_table(table, found.members), of=n)
    small = pricer.price(collective, overheads=pair.overheads)
    assert np.array_equal(small.end[:, found.like], whole.end)


def test_nodes_that_differ_are_not_twins():
    table = groups_of(4, 8)
    site = site_of(TRN2, nodes=4, lnc=2)
    collective = even("all_reduce", table.shape[1], 1)
    plan = choose.plan(collective, table, site.fabric, "hierarchical:ring+ring", site.policy)
    nodes, places = np.divmod(table, NODE)
    uneven = Collective("all_reduce", table.shape[1], 100_003, "bf16", "add")
    assert twins(plan.schedule, uneven, nodes, places) is None
    crooked = places.copy()
    crooked[0, -1] += 1
    assert twins(plan.schedule, collective, nodes, crooked) is None
    assert twins(plan.schedule, collective, nodes // 2, places) is None
