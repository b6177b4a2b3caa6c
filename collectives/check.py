"""What all ranks of a group must agree on before any data moves."""

from collections.abc import Sequence

import numpy as np

from trnsim.device.errors import CollectiveMismatch

from .schedule import KINDS


def check_counts(
    kind: str,
    counts: Sequence[int] | Sequence[Sequence[int]] | np.ndarray,
    expected: Sequence[Sequence[int]] | np.ndarray | None = None,
    ranks: Sequence[int] | None = None,
) -> None:
    """Raise CollectiveMismatch unless the counts (elements) that the ranks call with fit together.

    counts: what each rank passes: int[n], or int[n, m] where every rank passes a table (the counts
    of all ranks of an all_gather_v). With `expected`, for all_to_all_v and sendrecv: counts[i][j]
    is what rank i sends to rank j, and expected[j][i] what rank j takes from rank i.
    ranks: the names to print, if they are not the positions. The message has the op, the rank that
    differs (from most others) and both counts.
    """
    assert kind in KINDS, kind
    table = np.asarray(counts, np.int64)
    names = np.arange(len(table)) if ranks is None else np.asarray(ranks)
    if expected is not None:
        _check_pairs(kind, table, np.asarray(expected, np.int64), names)
    elif len(table):
        _check_alike(kind, table, names)


def _check_pairs(kind: str, sent: np.ndarray, expected: np.ndarray, names: np.ndarray) -> None:
    if sent.shape != expected.T.shape:
        raise CollectiveMismatch(
            f"{kind}: counts to send have shape {sent.shape}, to receive {expected.shape}"
        )
    wrong = np.argwhere(sent != expected.T)
    if len(wrong):
        i, j = wrong[0].tolist()
        raise CollectiveMismatch(
            f"{kind}: rank {names[i]} sends {sent[i, j]} elements to rank {names[j]}, "
            f"which expects {expected[j, i]}"
        )


def _check_alike(kind: str, table: np.ndarray, names: np.ndarray) -> None:
    rows = table.reshape(len(table), -1)
    values, which, times = np.unique(rows, axis=0, return_inverse=True, return_counts=True)
    which = which.reshape(-1)
    usual = int(times.argmax()) if len(set(times.tolist())) > 1 else int(which[-1])
    different = np.flatnonzero(which != usual)
    if not different.size:
        return
    odd, mine = int(different[0]), values[which[different[0]]]
    entry = int(np.flatnonzero(mine != values[usual])[0])
    piece = f" for piece {entry}" if table.ndim > 1 else ""
    most = int(np.flatnonzero(which == usual)[0])
    others = "the others" if len(different) == 1 and len(table) > 2 else f"rank {names[most]}"
    verb = "pass" if others == "the others" else "passes"
    raise CollectiveMismatch(
        f"{kind}: rank {names[odd]} passes {mine[entry]} elements{piece}, "
        f"{others} {verb} {values[usual][entry]}"
    )
