"""Double binary tree: two trees, each with half the data; no rank is inside both.

Chunks go up a tree (reduced) and down again, one behind the other. A tree is an in-order binary
tree: of numbers 1..n, those divisible by 2^h are at height h or more, so odd ones are leaves. The
second tree is the first one with all ranks moved on by one. After Sanders, Speck, Traff, "Two-tree
algorithms for full bandwidth broadcast, reduction and scan" (2009).
"""

import numpy as np

from trnsim.device.errors import BadInput

from ..schedule import Collective, Schedule
from .compose import mirrored, pipelined

KINDS = ("all_reduce", "broadcast", "reduce", "barrier")
CHUNKS = 8


def schedule(collective: Collective, chunks: int = CHUNKS) -> Schedule:
    """Each tree moves its half of the buffer in `chunks` chunks. Raises BadInput for other kinds
    and for less than one chunk.
    """
    if collective.kind not in KINDS:
        raise BadInput("collective of algorithm double_binary_tree", collective.kind, KINDS)
    if chunks < 1:
        raise BadInput("chunks of algorithm double_binary_tree", chunks, "1 or more")
    chunks = 1 if collective.kind == "barrier" else chunks
    if collective.ranks == 1:
        return Schedule("double_binary_tree", 1, 1, ())
    if collective.kind in ("all_reduce", "barrier"):
        return _all_reduce(collective.ranks, chunks)
    down = _broadcast(collective.ranks, collective.root, chunks)
    return down if collective.kind == "broadcast" else mirrored(down, reduce=True)


def parents(n: int) -> np.ndarray:
    """int64[n]: the parent of each node of the in-order tree over 0..n-1; -1 for the root."""
    found = np.full(n, -1, np.int64)
    for node in range(1, n + 1):
        up = _above(node)
        while up > n and up < 2 * n:
            up = _above(up)
        if up <= n:
            found[node - 1] = up - 1
    return found


def _above(node: int) -> int:
    low = node & -node
    return node - low if node & (2 * low) else node + low


def depths(up: np.ndarray) -> np.ndarray:
    """int64[n]: how many steps each node is below the root."""
    depth, at = np.zeros(len(up), np.int64), up.copy()
    while (at >= 0).any():
        depth += at >= 0
        at = np.where(at >= 0, up[at], -1)
    return depth


def heights(up: np.ndarray) -> np.ndarray:
    """int64[n]: how many steps the deepest leaf is below each node."""
    height = np.zeros(len(up), np.int64)
    for node in np.argsort(-depths(up), kind="stable").tolist():
        if up[node] >= 0:
            height[up[node]] = max(height[up[node]], height[node] + 1)
    return height


def _all_reduce(n: int, chunks: int) -> Schedule:
    up = parents(n)
    height, depth = heights(up), depths(up)
    node = np.flatnonzero(up >= 0)
    top = height.max()
    src = np.concatenate([node, up[node]])
    dst = np.concatenate([up[node], node])
    start = np.concatenate([height[node], top + depth[up[node]]])
    rising = np.arange(len(src)) < len(node)
    ranks = np.stack([np.arange(n), np.roll(np.arange(n), 1)])
    return _two_trees(n, ranks, src, dst, start, chunks, rising)


def _broadcast(n: int, root: int, chunks: int) -> Schedule:
    """The root feeds two trees of all others."""
    up = parents(n - 1)
    depth = depths(up)
    others = np.delete(np.arange(n), root)
    ranks = np.stack([np.append(others, root), np.append(np.roll(others, 1), root)])
    src = np.where(up >= 0, up, n - 1)
    return _two_trees(n, ranks, src, np.arange(n - 1), depth, chunks, np.zeros(n - 1, bool))


def _two_trees(
    n: int,
    ranks: np.ndarray,
    src: np.ndarray,
    dst: np.ndarray,
    start: np.ndarray,
    chunks: int,
    rising: np.ndarray,
) -> Schedule:
    """The same tree twice: ranks[t] (int[2, n]) are the ranks of its nodes in tree t."""
    which = np.repeat([0, 1], len(src))
    blocks = pipelined(
        ranks[:, src].reshape(-1),
        ranks[:, dst].reshape(-1),
        np.tile(start, 2),
        chunks,
        offset=which * chunks,
        reduce=np.tile(rising, 2),
        channel=2 * which + np.tile(~rising, 2),
    )
    return Schedule("double_binary_tree", n, 2 * chunks, tuple(blocks))
