"""Collectives of every kind for the tests, their inputs, and their outputs by numpy."""

from collections.abc import Sequence

import numpy as np

from trnsim.collectives.schedule import POINT_TO_POINT, REDUCING, ROOTED, Collective
from trnsim.device.dtypes import numpy_dtype


def collective(
    kind: str, n: int, counts: int | Sequence[int] = 1, root: int = 0, **fields
) -> Collective:
    """A collective of this kind; a permute leaves a rank out, a sendrecv uses some twice."""
    pairs: list[tuple[int, int]] = []
    if kind == "permute":
        pairs = [(i, (i + 2) % n) for i in range(n) if i != 1]
    if kind == "sendrecv":
        pairs = [(i, i * i % n) for i in range(n)] + [(0, n - 1), (0, n - 1)]
    return Collective(
        kind,
        n,
        1 if kind == "barrier" else counts,  # pyright: ignore[reportArgumentType]
        reduction="add" if kind in REDUCING else None,
        root=root if kind in ROOTED else 0,
        pairs=tuple(pairs),
        **fields,
    )


def roots(kind: str, n: int) -> set[int]:
    """Roots worth a test."""
    return {0, n // 2, n - 1} if kind in ROOTED else {0}


def random_inputs(asked: Collective, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    dtype = numpy_dtype(asked.dtype)
    sizes = [asked.input_count(rank) for rank in range(asked.ranks)]
    if dtype.kind in "iub":
        return [rng.integers(0, 2 if dtype.kind == "b" else 100, s).astype(dtype) for s in sizes]
    return [rng.normal(size=s).astype(dtype) for s in sizes]


def reference(asked: Collective, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """The outputs by numpy, for collectives whose reduction is an exact sum."""
    n, none = asked.ranks, np.empty(0, inputs[0].dtype)
    at_root = range(n) if asked.kind not in ("reduce", "gather") else [asked.root]
    if asked.kind in POINT_TO_POINT:
        return _messages(asked, inputs)
    if asked.kind in REDUCING:
        total = np.sum(inputs, axis=0, dtype=inputs[0].dtype)
        cuts = np.cumsum(asked.piece_counts)[:-1]
        if asked.kind == "reduce_scatter":
            return np.split(total, cuts)
        return [total if r in at_root else none for r in range(n)]
    if asked.kind in ("all_gather", "gather"):
        whole = np.concatenate(inputs)
        return [whole if r in at_root else none for r in range(n)]
    if asked.kind == "broadcast":
        return [inputs[asked.root]] * n
    if asked.kind == "scatter":
        return np.split(inputs[asked.root], np.cumsum(asked.piece_counts)[:-1])
    cuts = np.cumsum(asked.piece_counts.reshape(n, n), axis=1)[:, :-1]
    rows = [np.split(data, cut) for data, cut in zip(inputs, cuts, strict=True)]
    return [np.concatenate([row[j] for row in rows]) for j in range(n)]


def _messages(asked: Collective, inputs: list[np.ndarray]) -> list[np.ndarray]:
    counts, taken = asked.piece_counts.tolist(), [0] * asked.ranks
    arrived: list[list[np.ndarray]] = [[] for _ in range(asked.ranks)]
    for (source, target), count in zip(asked.pairs, counts, strict=True):
        at = taken[source]
        arrived[target].append(inputs[source][at : at + count])
        taken[source] = at + count
    silent = [np.zeros(asked.output_count(r), inputs[0].dtype) for r in range(asked.ranks)]
    return [np.concatenate(a) if a else z for a, z in zip(arrived, silent, strict=True)]


def assert_same(got: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for rank, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert a.dtype == b.dtype and a.tobytes() == b.tobytes(), f"rank {rank}: {a} is not {b}"
