"""Who takes part in a collective, in one line."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trnsim.cluster.instances import fabric as instance_fabric
from trnsim.cluster.instances import load_instance
from trnsim.collectives.members import describe_groups, members, runs

TRN2 = instance_fabric(load_instance("trn2.48xlarge"), 2)


def test_the_group_shows_whether_it_was_the_one_meant() -> None:  # U5
    small = describe_groups(TRN2, np.arange(128).reshape(16, 8))
    whole = describe_groups(TRN2, [range(128)])
    assert str(small) == (
        "16 groups (all alike), the first N=8: ranks 0-7 on 2 chips (node0/chip0, node0/chip1)"
    )
    assert str(whole) == "1 group, N=128: ranks 0-127 on 32 chips of 2 servers"
    assert small.first.size == 8 and whole.first.size == 128


def test_members_are_counted_by_chip_and_server() -> None:
    found = members(TRN2, [0, 1, 2, 64, 65, 4])
    assert (found.servers, found.chips, found.size) == (2, 3, 6)
    assert (found.per_server, found.per_chip) == ((2, 4), (1, 3))
    assert str(found) == (
        "N=6: ranks 0-2, 64-65, 4 on 3 chips (node0/chip0, node0/chip1, node1/chip0)"
    )


def test_groups_that_lie_differently_are_said_to() -> None:
    assert not describe_groups(TRN2, [[0, 1], [2, 64]]).alike


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([5], "5"),
        ([3, 1], "3, 1"),
        ([0, 8, 16, 24], "0-24 by 8"),
        ([3, 2, 1, 7, 8], "3-1 by -1, 7-8"),
        (list(np.arange(20) ** 2), "0-1, 4, 9, 16, 25, 36, 49, 64, and 11 more"),
    ],
)
def test_numbers_are_shown_as_runs(numbers: list[int], text: str) -> None:
    assert runs(numbers) == text


@given(st.lists(st.integers(0, 9), unique=True, min_size=1, max_size=8))
def test_runs_say_exactly_the_numbers(numbers: list[int]) -> None:
    said: list[int] = []
    for run in runs(numbers).split(", "):
        span, _, step = run.partition(" by ")
        first, dash, last = span.partition("-")
        by = int(step or 1)
        said += range(int(first), int(last) + (1 if by > 0 else -1), by) if dash else [int(first)]
    assert said == numbers
