"""Counts that do not fit together are refused before any data moves."""

import numpy as np
import pytest

from trnsim.collectives.check import check_counts
from trnsim.device.errors import CollectiveMismatch


def test_counts_that_agree_pass() -> None:
    check_counts("all_reduce", [7, 7, 7])
    check_counts("all_gather", [[1, 2, 0]] * 3)
    check_counts("all_to_all", [[1, 2], [3, 4]], [[1, 3], [2, 4]])
    check_counts("barrier", [])


@pytest.mark.parametrize(
    ("counts", "ranks", "message"),
    [
        (  # U13
            [409_600, *[409_598] * 7],
            None,
            "all_reduce: rank 0 passes 409600 elements, the others pass 409598",
        ),
        ([5, 5, 4], [8, 9, 11], "all_reduce: rank 11 passes 4 elements, the others pass 5"),
        ([5, 4], None, "all_reduce: rank 0 passes 5 elements, rank 1 passes 4"),
        ([5, 4, 5, 4, 4], None, "all_reduce: rank 0 passes 5 elements, rank 1 passes 4"),
        ([6, 5, 4], None, "all_reduce: rank 0 passes 6 elements, rank 2 passes 4"),
    ],
)
def test_a_rank_with_another_count_is_named(counts: list, ranks: list, message: str) -> None:
    with pytest.raises(CollectiveMismatch) as refusal:
        check_counts("all_reduce", counts, ranks=ranks)
    assert str(refusal.value) == message


def test_a_rank_with_another_table_is_named() -> None:
    tables = [[3, 4, 5], [3, 4, 5], [3, 9, 5]]
    message = "^all_gather: rank 2 passes 9 elements for piece 1, the others pass 4$"
    with pytest.raises(CollectiveMismatch, match=message):
        check_counts("all_gather", tables)


def test_pairs_of_an_all_to_all_have_to_match() -> None:
    sent = np.arange(16).reshape(4, 4)
    expected = sent.T.copy()
    check_counts("all_to_all", sent, expected)
    expected[3, 1] = 70
    message = "^all_to_all: rank 11 sends 7 elements to rank 13, which expects 70$"
    with pytest.raises(CollectiveMismatch, match=message):
        check_counts("all_to_all", sent, expected, ranks=[10, 11, 12, 13])
    with pytest.raises(CollectiveMismatch, match="^all_to_all: counts to send have shape"):
        check_counts("all_to_all", sent, expected[:3])
