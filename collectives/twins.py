"""A schedule over many equal nodes, on two of them: exact where all nodes do the same.

Nodes that are equal and joined by a switch that does not block only meet at their own interfaces.
If in every round each of them moves the same inside, and sends as much to one other node as it gets
from one, from and to the same places, then all of them are alike at all times, and it does not
matter which node is which: two nodes that send to each other stand for any number. What a schedule
takes then no longer depends on how many nodes there are, but for its rounds.
"""

from dataclasses import dataclass, replace

import numpy as np

from .schedule import Block, Collective, Schedule
from .sizes import only

KINDS = ("all_reduce", "all_gather", "reduce_scatter")


@dataclass(frozen=True, eq=False)
class Twins:
    """A schedule of 2 * Y ranks: those of two nodes, in group positions `members` of the whole one.

    like: int64[n], which of them each position of the whole group is like.
    """

    schedule: Schedule
    members: np.ndarray
    like: np.ndarray


def twins(
    schedule: Schedule, collective: Collective, nodes: np.ndarray, places: np.ndarray
) -> Twins | None:
    """The schedule on two nodes, or None where nodes may differ.

    nodes, places: int64[G, n], the node of each member of each group, and where in the node it is.
    All G groups run the schedule at the same time.
    """
    first = _alike(nodes, places)
    counts = schedule.chunk_counts(collective)
    if first is None or collective.kind not in KINDS or (counts != counts[0]).any():
        return None
    _, number = np.unique(nodes[0], return_inverse=True)
    members = np.flatnonzero(number < 2)
    index = np.full(nodes.shape[1], -1)
    index[members] = np.arange(len(members))
    tables: dict[int, _Rows | None] = {}
    blocks = []
    for block in schedule.blocks:
        if block.into is not None:
            return None
        if id(block.who) not in tables:
            who = np.arange(len(first))[None] if block.who is None else block.who
            tables[id(block.who)] = _rows(who, number, first)
        rows = tables[id(block.who)]
        made = None if rows is None else _on_two(block, rows, index)
        if made is None:
            return None
        blocks.append(made)
    small = replace(schedule, ranks=len(members), blocks=tuple(blocks))
    return Twins(small, members, index[first])


@dataclass(frozen=True, eq=False)
class _Rows:
    """Rows of a `who` on the first two nodes: of one node each, or of one member on every node."""

    who: np.ndarray
    kept: np.ndarray  # inside: which rows
    across: np.ndarray | None = None  # int[2]: which members of a row are on the two nodes


def _alike(nodes: np.ndarray, places: np.ndarray) -> np.ndarray | None:
    """int64[n]: the position on the first node that is like each; None if nodes differ."""
    names, number = np.unique(nodes[0], return_inverse=True)
    if len(names) < 3 or (nodes != nodes[0]).any() or nodes.shape[1] % len(names):
        return None
    order = np.lexsort((places[0], number)).reshape(len(names), -1)
    if (number[order] != np.arange(len(names))[:, None]).any():
        return None
    first = np.empty(nodes.shape[1], np.int64)
    first[order] = order[0]
    return first if (places[:, first] == places).all() else None


def _rows(who: np.ndarray, number: np.ndarray, first: np.ndarray) -> _Rows | None:
    node, like = number[who], first[who]
    count = int(number.max()) + 1
    if (node == node[:, :1]).all():
        order = np.lexsort((*like.T[::-1], node[:, 0]))
        if len(who) % count:
            return None
        by_node = order.reshape(count, -1)
        same = (like[by_node] == like[by_node[0]]).all()
        on = (node[by_node, 0] == np.arange(count)[:, None]).all()
        return _Rows(who, by_node[:2].reshape(-1)) if same and on else None
    if who.shape[1] != count or (like != like[:, :1]).any():
        return None
    order = np.argsort(node[0])
    if (node[:, order] != np.arange(count)).any():
        return None
    return _Rows(who, np.arange(len(who)), order[:2])


def _on_two(block: Block, rows: _Rows, index: np.ndarray) -> Block | None:
    who, shift = index[rows.who[rows.kept]].astype(np.int32), block.shift
    if rows.across is None:
        return replace(block, who=who, shift=None if shift is None else shift[rows.kept])
    sent = _sent_by_each(block, rows.who.shape[1])
    if not sent:
        return None
    mine = [np.flatnonzero(block.src == member)[:sent] for member in rows.across]
    kept = np.concatenate(mine)
    src = np.repeat(np.array([0, 1], np.int32), sent)
    none = np.zeros(2 * sent, np.int64)
    columns = {name: getattr(block, name)[kept] for name in ("span", "reduce", "channel")}
    return replace(
        block, src=src, dst=1 - src, base=none, offset=none, step=none,
        who=who[:, rows.across], shift=None, **columns,
    )  # fmt: skip


def _sent_by_each(block: Block, members: int) -> int:
    """How many transfers every member sends and gets, if all of them are the same; else 0."""
    sent, odd = divmod(len(block.src), members)
    alike = only(block.span) is not None and block.fused is None and not odd
    alike = alike and bool((block.reduce == block.reduce[0]).all())
    ends = (np.bincount(end, minlength=members) for end in (block.src, block.dst))
    return sent if alike and all((times == sent).all() for times in ends) else 0
