"""`nki.collectives`: what ranks do together.

Tensors are all in HBM or all in SBUF; several at once (coalesced) only in HBM. Reductions compute
in float32 and round to the dtype at each step of the algorithm. A collective runs on the streams of
the CC-cores: it begins when what it uses is ready and its stream is free, and no engine waits for
it but for what it reads and writes. Channel c is stream c; all else is on stream 0.

Who takes part, and the order of cores: see `interconnect`.
"""

from collections.abc import Sequence
from typing import Any

from ..errors import BadInput, IllegalInstruction
from .collective_call import Call, Parts, tensors
from .interconnect import Groups
from .isa_operands import instruction, integer, operator
from .objects import NKIObject
from .ragged import all_gather_v, all_to_all_v
from .registers import VirtualRegister
from .session import current

__all__ = [
    "ReplicaGroup", "all_gather", "all_gather_v", "all_reduce", "all_to_all", "all_to_all_v",
    "collective_permute", "collective_permute_implicit", "collective_permute_implicit_reduce",
    "collective_permute_implicit_current_processing_rank_id", "rank_id", "reduce_scatter",
]  # fmt: skip

REDUCTIONS = ("add", "minimum", "maximum")


class ReplicaGroup(NKIObject):
    """Ranks that work together: a list of lists of ranks, which do not overlap."""

    replica_groups: Any = None

    def __post_init__(self) -> None:
        given = self.replica_groups
        if isinstance(given, ReplicaGroup):
            given = given.replica_groups
        try:
            groups = [[int(rank) for rank in group] for group in given]
        except TypeError:
            raise BadInput("replica_group", given, "a list of lists of ranks") from None
        self.replica_groups = groups

    @property
    def key(self) -> Groups:
        """The groups as tuples."""
        return tuple(map(tuple, self.replica_groups))

    def __repr__(self) -> str:
        return f"ReplicaGroup({self.replica_groups})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ReplicaGroup) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


def _groups(replica_group: Any) -> Groups:
    return ReplicaGroup(replica_group).key


def _reduction(op: Any) -> str:
    name = operator(op)
    if name not in REDUCTIONS:
        raise IllegalInstruction(f"op is {name}; allowed: {', '.join(REDUCTIONS)}")
    return name


@instruction
def all_reduce(srcs, dsts, replica_group, op, priority=None, name=None) -> None:
    """dsts = the reduction of all ranks' srcs. op: nl.add, nl.minimum, nl.maximum."""
    call = Call("all_reduce", _groups(replica_group), [(srcs, dsts)], priority, name)
    call.check_numbers(source=1, target=1)
    call.run(_reduction(op))


@instruction
def all_gather(srcs, dsts, replica_group, collective_dim, priority=None, name=None) -> None:
    """dsts = all ranks' srcs one after another along axis `collective_dim` (1: SBUF only)."""
    call = Call("all_gather", _groups(replica_group), [(srcs, dsts)], priority, name)
    axis = call.axis(collective_dim, most=1 if call.on_chip else 0)
    call.check_numbers(source=1, target=call.size, axis=axis)
    call.run(parts=Parts(call.size, joined=axis))


@instruction
def reduce_scatter(srcs, dsts, replica_group, collective_dim, op, priority=None, name=None) -> None:
    """dsts = this rank's part, along axis 0, of the reduction of all ranks' srcs."""
    call = Call("reduce_scatter", _groups(replica_group), [(srcs, dsts)], priority, name)
    axis = call.axis(collective_dim)
    call.check_numbers(source=call.size, target=1, axis=axis)
    call.run(_reduction(op), parts=Parts(call.size, cut=axis))


@instruction
def all_to_all(srcs, dsts, replica_group, collective_dim, priority=None, name=None) -> None:
    """Part r of dsts, along axis 0, = this rank's part of the srcs of rank r. In HBM only."""
    call = Call("all_to_all", _groups(replica_group), [(srcs, dsts)], priority, name)
    axis = call.axis(collective_dim)
    call.only_hbm()
    call.check_numbers(source=1, target=1)
    call.check_divisible(axis)
    call.run(parts=Parts(call.size, cut=axis, joined=axis))


@instruction
def collective_permute(srcs, dsts, source_target_pairs, priority=None, name=None) -> None:
    """dsts of `target` = srcs of `source` for each pair of ranks. One tensor, in HBM.

    All ranks call it. The dsts of a rank that is no target stay as they are.
    """
    pairs = tuple((int(source), int(target)) for source, target in source_target_pairs)
    everybody = (tuple(range(current().launch.interconnect.ranks)),)
    call = Call("permute", everybody, [(srcs, dsts)], priority, name)
    call.only_hbm()
    call.only_one()
    call.check_numbers(source=1, target=1)
    call.run(pairs=pairs)


@instruction
def collective_permute_implicit(
    srcs_by_channel, dsts_by_channel, replica_group, channel_ids=(0,), priority=None, name=None
) -> None:
    """dsts of each rank = srcs of the rank before it in the ring of each channel.

    Rings follow the machine's links: ask `..._current_processing_rank_id` whose data there are.
    """
    channels = _channels(channel_ids, srcs_by_channel, dsts_by_channel)
    buffers = list(zip(srcs_by_channel, dsts_by_channel, strict=True))
    call = Call("ring", _groups(replica_group), buffers, priority, name, channels)
    call.only_one()
    call.check_numbers(source=1, target=1)
    call.run()


@instruction
def collective_permute_implicit_reduce(
    srcs0_by_channel, srcs1_by_channel, dsts_by_channel, replica_group, op,
    channel_ids=(0,), priority=None, name=None,
) -> None:  # fmt: skip
    """As `collective_permute_implicit`, of op(srcs0, srcs1)."""
    channels = _channels(channel_ids, srcs0_by_channel, srcs1_by_channel, dsts_by_channel)
    buffers = list(zip(srcs0_by_channel, dsts_by_channel, strict=True))
    call = Call("ring", _groups(replica_group), buffers, priority, name, channels)
    call.only_one()
    call.check_numbers(source=1, target=1)
    call.add_operands([tensors(srcs, "srcs1") for srcs in srcs1_by_channel])
    call.run(_reduction(op))


def _channels(channel_ids: Sequence[int], *by_channel: Sequence[Any]) -> tuple[int, ...]:
    channels = tuple(int(channel) for channel in channel_ids)
    if channels != tuple(range(len(channels))) or not channels:
        raise IllegalInstruction(f"channel_ids is {list(channels)}; allowed: 0, 1, ... in order")
    if any(len(lists) != len(channels) for lists in by_channel):
        counts = ", ".join(str(len(lists)) for lists in by_channel)
        raise IllegalInstruction(f"{len(channels)} channel_ids for lists of {counts} channels")
    return channels


@instruction
def collective_permute_implicit_current_processing_rank_id(
    iteration_id, replica_group, channel_id=0, name=None
) -> VirtualRegister:
    """A register with the rank whose data are here after `iteration_id` implicit permutes."""
    launch = current().launch
    step = integer(iteration_id, "iteration_id")
    group = next((g for g in _groups(replica_group) if launch.rank in g), None)
    if group is None:
        raise IllegalInstruction(f"rank {launch.rank} is not in {replica_group!r}")
    ring = launch.interconnect.ring(group, integer(channel_id, "channel_id"))
    return VirtualRegister(ring[(ring.index(launch.rank) - step) % len(ring)])


@instruction
def rank_id(name=None) -> VirtualRegister:
    """A register with the number of this rank."""
    return VirtualRegister(current().launch.rank)
