"""Late ranks: exact delays, seeded jitter, and who is named."""

import numpy as np
import pytest

from trnsim.cluster.conditions import Start
from trnsim.collectives import fabric as fabrics
from trnsim.collectives.algorithms import ring
from trnsim.collectives.price import price
from trnsim.collectives.schedule import Collective
from trnsim.device.errors import BadInput

GROUPS = [[0, 1, 2, 3], [7, 6, 5, 4]]


def priced(start: Start):
    fabric = fabrics.ring(8, bytes_per_s=50 * 10**9, latency_ps=500_000).attach(range(8))
    what = Collective("all_reduce", 4, 2**18, reduction="add")
    arrivals = 100 + start.arrivals(8)[np.array(GROUPS)]
    return price(what, ring.schedule(what), fabric, GROUPS, arrivals=arrivals)


def test_a_group_ends_when_its_last_rank_has_come_and_it_is_named() -> None:  # U17
    on_time = priced(Start())
    late = priced(Start(delays=(("5", 3 * 10**9),)))
    assert late.end[0].tolist() == on_time.end[0].tolist()
    assert late.end[1].tolist() == (on_time.end[1] + 3 * 10**9).tolist()
    assert late.late.tolist() == [0, 5]


def test_jitter_is_repeated_by_its_seed() -> None:
    one = Start(jitter_ps=10**6, seed=7)
    draws = one.arrivals(4096)
    assert draws.tolist() == one.arrivals(4096).tolist()
    assert draws.tolist() != Start(jitter_ps=10**6, seed=8).arrivals(4096).tolist()
    assert draws.tolist() != one.arrivals(4096, iteration=1).tolist()
    assert 0 <= draws.min() and draws.max() <= 10**6
    assert abs(draws.mean() - 5 * 10**5) < 3 * 10**6 / np.sqrt(12 * 4096)
    result = priced(one)
    last = one.arrivals(8)[np.array(GROUPS)]
    assert result.late.tolist() == [GROUPS[g][k] for g, k in enumerate(last.argmax(axis=1))]
    base = priced(Start())
    assert result.end.tolist() == (base.end + last.max(axis=1)[:, None]).tolist()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Start(delays=(("8", 1),)), "delay of rank"),
        (lambda: Start(delays=(("1", -1),)), "delay of rank 1: -1 ps is not valid"),
        (lambda: Start(jitter_ps=-5), "jitter: -5 ps is not valid; allowed: 0 or more"),
    ],
)
def test_wrong_delays_are_refused(make, message: str) -> None:
    with pytest.raises(BadInput) as refusal:
        priced(make())
    assert str(refusal.value).startswith(message)
