"""The machine between ranks that run a kernel: which ring, which algorithm, and how long.

A collective of logical cores runs on the fabric of the job's ranks. One of single physical cores
(in SBUF or private HBM at LNC=2) runs on the fabric of all physical cores, where rank r's core k is
core lnc * place + k. Operands in SBUF do not touch HBM.

Collectives that have come when no rank can run on share links (`inflight`), also with those that
are still under way. What a rank has been told stays: an earlier one is not slowed by a later one.
HBM and links are shared among collectives alone, not with the kernels' own DMA.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from trnsim.collectives.choose import CHANNELS, Plan
from trnsim.collectives.inflight import Call, price_together
from trnsim.collectives.price import Priced
from trnsim.collectives.schedule import Collective
from trnsim.device.errors import BadInput, IllegalInstruction
from trnsim.device.nki.interconnect import Groups, Meeting, Request

from .collective import Bench, Site, instance_site
from .instances import Instance, load_instance
from .runtimes.base import CoreAddress

FEW_CHANNELS = 2  # of groups that do not cover a node (nki.collectives, "Channels")
SBUF_BYTES_PER_S = 1 << 60  # SBUF is never what a collective waits for
Sends = dict[int, tuple[int, ...]]


@dataclass(frozen=True)
class Machine:
    """Ranks on the logical cores of `nodes` instances, the same number on each.

    `overlay` is a file of numbers laid over the chip's.
    """

    instance: str
    ranks: int
    lnc: int
    nodes: int = 1
    algorithm: str = "policy"
    overlay: str | None = None

    def load(self) -> Instance:
        """The instance, with the overlay's numbers."""
        return load_instance(self.instance, self.overlay)

    def site(self, lnc: int) -> Site:
        """All cores, as ranks of `lnc` cores."""
        return instance_site(self.instance, nodes=self.nodes, lnc=lnc, overlay=self.overlay)


@dataclass(frozen=True)
class CollectiveUse:
    """One collective that ran, in ps and bytes (see `Row`, `Priced` for its numbers).

    `channel` of its call, `core` if it was of single physical cores. `late` came last.
    """

    name: str
    line: str
    channel: int
    core: int | None
    on_chip: bool
    groups: int
    size: int
    nbytes: int
    dtype: str
    algorithm: str
    reason: str
    rounds: int
    arrival: int
    late: int
    begin: int
    end: int
    duration: int
    algbw: float
    busbw: float
    bound: float
    limited_by: str


@dataclass(frozen=True)
class Share:
    """A part of a meeting that is one collective in some of its groups, on one channel."""

    channel: int
    groups: Groups
    collective: Collective


@dataclass(frozen=True, eq=False)
class Times:
    """When each rank's channels began and ended: by rank, ps per channel."""

    begins: dict[int, list[int]]
    ends: dict[int, list[int]]


@dataclass(frozen=True, eq=False)
class _Flying:
    call: Call
    end: int


@lru_cache(maxsize=8)
def shared_fabric(machine: Machine) -> "KernelFabric":
    """One for all ranks of this process that only plan; it prices nothing."""
    return KernelFabric(machine)


class KernelFabric:
    """The `Interconnect` of ranks on a machine; plans, and prices what has come.

    Raises BadInput for a machine that does not exist or ranks that do not fit.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine, self.ranks = machine, machine.ranks
        self.site, self.instance = machine.site(machine.lnc), machine.load()
        self.job = _job(self.site, machine.ranks)
        self._benches: dict[tuple, Bench] = {}
        self._plans: dict[tuple, Plan] = {}
        self._flying: dict[tuple, list[_Flying]] = {}
        self._orders: dict[tuple[int, ...], np.ndarray] = {}
        self._shares: dict[Request, list[Share]] = {}

    # ---- what kernels ask ----------------------------------------------------------------

    def ring(self, group: tuple[int, ...], channel: int) -> tuple[int, ...]:
        """The group's ranks along the fabric's ring of a channel."""
        orders = self._rings(group)
        return tuple(group[i] for i in orders[channel % len(orders)].tolist())

    def check(self, request: Request) -> None:
        """Raises IllegalInstruction for channels, or ragged groups, that the machine has not."""
        allowed = CHANNELS if all(map(self._covers_a_node, request.groups)) else FEW_CHANNELS
        if len(request.channels) > allowed:
            raise IllegalInstruction(
                f"{len(request.channels)} channels; allowed: {CHANNELS} in groups that cover a "
                f"node, {FEW_CHANNELS} in others"
            )
        if request.variable:
            for group in request.groups:
                self._check_ragged(request.kind, group)

    def _covers_a_node(self, group: tuple[int, ...]) -> bool:
        chips = {self._chip(rank) for rank in group}
        return len(chips) % self.instance.chips == 0

    def _check_ragged(self, kind: str, group: tuple[int, ...]) -> None:
        """Limits that the documentation of all_gather_v and all_to_all_v states."""
        chips = {self._chip(rank) for rank in group}
        if kind == "all_gather":
            if len(chips) > 1:
                raise IllegalInstruction(f"group {list(group)} is on {len(chips)} chips; limit: 1")
            return
        if self.instance.topology == "switch":
            each = self.instance.chip.cores // self.machine.lnc
            whole = len(group) == each * len(chips) and max(group) - min(group) + 1 == len(group)
            if self.machine.lnc != 2 or len(chips) < 2 or not whole:
                raise IllegalInstruction(
                    f"group {list(group)} at LNC={self.machine.lnc}; allowed with a NeuronSwitch: "
                    "sequential ranks, all of several devices, at LNC=2"
                )
            return
        places = self.job[list(group)] % self.instance.logical_cores(self.machine.lnc)
        if len(set(places.tolist())) > 1 or len({self._node(rank) for rank in group}) < len(group):
            raise IllegalInstruction(
                f"group {list(group)}; allowed on {self.instance.name}: the ranks of the same "
                "place on different nodes"
            )

    def _chip(self, rank: int) -> int:
        return int(self.job[rank]) // (self.instance.chip.cores // self.machine.lnc)

    def _node(self, rank: int) -> int:
        return int(self.job[rank]) // self.instance.logical_cores(self.machine.lnc)

    def address(self, rank: int, hbm_bytes: int) -> CoreAddress:
        """Where a rank is, as a runtime wants it: its logical core as one."""
        each = self.instance.chip.cores // self.machine.lnc
        physical = int(self.job[rank]) % each * self.machine.lnc
        return CoreAddress(rank, 0, 1, self._chip(rank), physical, hbm_bytes, self._node(rank))

    # ---- plans ---------------------------------------------------------------------------

    def shares(self, request: Request, sends: Sends) -> list[Share]:
        """The collectives that a request is: one per channel, and per kind of group."""
        if request.variable:
            return self._shared_out(request, sends)
        if request not in self._shares:
            self._shares[request] = self._shared_out(request, sends)
        return self._shares[request]

    def _shared_out(self, request: Request, sends: Sends) -> list[Share]:
        found: dict[tuple[int, Collective], list[tuple[int, ...]]] = {}
        for index, count in enumerate(request.counts):
            for group in request.groups:
                collective = self._collective(request, index, count, group, sends)
                found.setdefault((index, collective), []).append(group)
        return [Share(index, tuple(groups), it) for (index, it), groups in found.items()]

    def _collective(
        self, request: Request, index: int, count: int, group: tuple[int, ...], sends: Sends
    ) -> Collective:
        n, dtype = len(group), request.dtype
        if request.variable:
            counts = tuple(sent for rank in group for sent in sends[rank])
            return Collective(request.kind, n, counts, dtype)
        if request.kind == "ring":
            ring = self._rings(group)
            order = ring[request.channels[index] % len(ring)].tolist()
            pairs = tuple(sorted(zip(order, [*order[1:], order[0]], strict=True)))
            return Collective("permute", n, count, dtype, pairs=pairs)
        if request.kind == "permute":
            return Collective("permute", n, count, dtype, pairs=request.pairs)
        return Collective(request.kind, n, count, dtype, reduction=request.reduction)

    def plan(self, share: Share, request: Request) -> Plan:
        """The schedule of a share: the same in every process."""
        key = (share.collective, share.groups, self._ground(request))
        if key not in self._plans:
            self._plans[key] = self._bench(share.groups, request).plan(share.collective)
        return self._plans[key]

    def _rings(self, group: tuple[int, ...]) -> np.ndarray:
        """int64[rings, n]: positions in the group along each ring."""
        if group not in self._orders:
            self._orders[group] = self.site.fabric.rings(self.job[list(group)], CHANNELS)
        return self._orders[group]

    def _ground(self, request: Request) -> tuple[int | None, bool]:
        """(core, SBUF): whatever is equal here is on one fabric and one memory."""
        return (None if self.machine.lnc == 1 else request.core), request.on_chip

    def _bench(self, groups: Groups, request: Request) -> Bench:
        core, on_chip = self._ground(request)
        key = (groups, core, on_chip)
        if key not in self._benches:
            places = self.job[np.array(groups, np.int64)]
            if core is not None:
                places = places * self.machine.lnc + core
            site = self._sites[core is not None, on_chip]
            self._benches[key] = Bench(site, places, self.machine.algorithm)
        return self._benches[key]

    @cached_property
    def _sites(self) -> dict[tuple[bool, bool], Site]:
        """By (of physical cores, operands in SBUF)."""
        machine, sites = self.machine, {}
        for physical in (False, True):
            own = self.site
            if physical and machine.lnc > 1:
                own = machine.site(1)
            sites[physical, False], sites[physical, True] = own, _in_sbuf(own)
        return sites

    # ---- prices --------------------------------------------------------------------------

    def settle(self, meetings: Sequence[Meeting]) -> tuple[list[Times], list[CollectiveUse]]:
        """When all ranks of each meeting have what it gives, and what ran."""
        parts = [
            (number, share, self._call(share, meeting))
            for number, meeting in enumerate(meetings)
            for share in self.shares(meeting.request, meeting.sends)
        ]
        prices = self._priced([(meetings[number], call) for number, _, call in parts])
        times = [Times({}, {}) for _ in meetings]
        uses = []
        for (number, share, call), priced in zip(parts, prices, strict=True):
            _note(times[number], share, priced)
            uses.append(self._use(meetings[number], share, call, priced))
        return times, uses

    def _call(self, share: Share, meeting: Meeting) -> Call:
        arrivals = [[meeting.arrivals[rank] for rank in group] for group in share.groups]
        plan = self.plan(share, meeting.request)
        bench = self._bench(share.groups, meeting.request)
        return bench.call(share.collective, plan, np.array(arrivals, np.int64))

    def _priced(self, calls: Sequence[tuple[Meeting, Call]]) -> list[Priced]:
        """Prices of calls that share what there is with each other and with earlier ones."""
        found: dict[int, Priced] = {}
        grounds: dict[tuple, list[int]] = {}
        for index, (meeting, _) in enumerate(calls):
            core, on_chip = self._ground(meeting.request)
            grounds.setdefault((core is not None, on_chip), []).append(index)
        for ground, indices in grounds.items():
            new = [calls[index][1] for index in indices]
            first = min(int(_arrivals(call).min()) for call in new)
            flying = [old for old in self._flying.get(ground, []) if old.end > first]
            prices = price_together([*(old.call for old in flying), *new])[len(flying) :]
            found |= dict(zip(indices, prices, strict=True))
            flying += [_Flying(call, int(p.end.max())) for call, p in zip(new, prices, strict=True)]
            self._flying[ground] = flying
        return [found[index] for index in range(len(calls))]

    def _use(self, meeting: Meeting, share: Share, call: Call, priced: Priced) -> CollectiveUse:
        request, arrivals = meeting.request, _arrivals(call)
        choice = self.plan(share, request).choice
        ranks = np.array(share.groups)
        return CollectiveUse(
            name=request.name,
            line=meeting.line,
            channel=request.channels[share.channel],
            core=self._ground(request)[0],
            on_chip=request.on_chip,
            groups=len(share.groups),
            size=share.collective.ranks,
            nbytes=share.collective.nbytes,
            dtype=request.dtype,
            algorithm=choice.algorithm,
            reason=choice.reason,
            rounds=priced.rounds,
            arrival=int(arrivals.min()),
            late=int(ranks.reshape(-1)[int(arrivals.argmax())]),
            begin=int((priced.end.max(axis=1) - priced.durations).min()),
            end=int(priced.end.max()),
            duration=priced.duration_ps,
            algbw=priced.algbw,
            busbw=priced.busbw,
            bound=priced.bound_busbw,
            limited_by=priced.limited_by,
        )


def _arrivals(call: Call) -> np.ndarray:
    assert call.arrivals is not None
    return call.arrivals


def _note(times: Times, share: Share, priced: Priced) -> None:
    begins = priced.end.max(axis=1) - priced.durations
    for row, group in enumerate(share.groups):
        for place, rank in enumerate(group):
            times.begins.setdefault(rank, []).append(int(begins[row]))
            times.ends.setdefault(rank, []).append(int(priced.end[row, place]))


def _in_sbuf(site: Site) -> Site:
    memory = site.overheads.memory
    assert memory is not None
    free = replace(memory, bytes_per_s=np.full_like(memory.bytes_per_s, SBUF_BYTES_PER_S))
    return replace(site, overheads=replace(site.overheads, memory=free))


def _job(site: Site, ranks: int) -> np.ndarray:
    """The fabric's rank of each rank. Raises BadInput."""
    try:
        return site.job(ranks)
    except BadInput as error:
        raise BadInput("ranks", ranks, str(error).partition("allowed: ")[2]) from None
