"""What a collective costs besides its links: software, memory touches, reduction in the DMA path.

All numbers come from the caller. Rates of links and of every rank's DMA, link latencies, the
efficiency and latency of EFA belong to the fabric: give them to the links.
"""

from dataclasses import dataclass

import numpy as np

from trnsim.device.errors import BadInput


@dataclass(frozen=True, eq=False)
class Memory:
    """The HBM stacks that ranks' buffers lie in, and the crossing between the dies of a chip.

    of_rank: int[ranks], which stack; bytes_per_s: int64[stacks]. A stack carries every touch of the
    bytes of a transfer: a copy reads them at its source and writes them at its destination (1R1W);
    a reduction also reads the destination (2R1W). Fused transfers touch less (`Block.touches`).

    die: int[ranks], the die of its chip that a rank is on. Ranks of different dies of one chip
    share one path of die_bytes_per_s for each ordered pair of dies, and pay die_latency_ps.
    """

    of_rank: np.ndarray
    bytes_per_s: np.ndarray
    die: np.ndarray | None = None
    die_bytes_per_s: int = 0
    die_latency_ps: int = 0

    def __post_init__(self) -> None:
        if len(self.of_rank) and int(self.of_rank.max()) >= len(self.bytes_per_s):
            raise BadInput("stack of a rank", int(self.of_rank.max()), f"{len(self.bytes_per_s)}")
        if len(self.bytes_per_s) and int(self.bytes_per_s.min()) < 1:
            raise BadInput("bytes_per_s", int(self.bytes_per_s.min()), "a positive number")
        if self.die is not None and self.die_bytes_per_s < 1:
            raise BadInput("die_bytes_per_s", self.die_bytes_per_s, "a positive number")


@dataclass(frozen=True)
class Overheads:
    """Costs of the machine that are not links; the default is an ideal machine.

    start_ps: once per collective and rank (the trigger of a CC-core, its descriptor rings).
    handshake: nobody moves data before the last rank of the group has arrived; without it (and in
    every permute and sendrecv, where only the two ends of a pair have to meet) ranks start as they
    come. handshake_ps: what the exchange of semaphores before the data takes, once per collective.
    rendezvous: how often a transfer of a permute or sendrecv pays its route's latency besides once:
    such pairs have no handshake of the group, so they exchange their own semaphores.
    step_ps: per round and sender, a CC-core's handling of one step; its channel is busy meanwhile.
    reduce_fraction: a reducing transfer enters its destination at this fraction of the rate of the
    destination's DMA (0 < fraction <= 1): reading twice and adding costs DMA throughput.
    memory: the HBM that transfers touch; None is an unlimited one.
    """

    start_ps: int = 0
    step_ps: int = 0
    handshake: bool = True
    handshake_ps: int = 0
    rendezvous: int = 0
    reduce_fraction: float = 1.0
    memory: Memory | None = None

    def __post_init__(self) -> None:
        for name in ("start_ps", "step_ps", "handshake_ps", "rendezvous"):
            if getattr(self, name) < 0:
                wanted = "0 or more" if name == "rendezvous" else "0 or more picoseconds"
                raise BadInput(name, getattr(self, name), wanted)
        if not 0 < self.reduce_fraction <= 1:
            raise BadInput("reduce_fraction", self.reduce_fraction, "above 0, up to 1")
