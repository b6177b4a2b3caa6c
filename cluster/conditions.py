"""What is not as it should be: failed and degraded parts of a fabric, ranks that start late."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trnsim.collectives.fabric import Fabric
from trnsim.device.errors import BadInput

from . import reading


def with_failures(fabric: Fabric, failed: Sequence[str]) -> Fabric:
    """The fabric without these links (`a->b` one way, `a<->b` both ways) and nodes (`chip3`)."""
    links = [name for name in failed if "->" in name]
    return fabric.fail(links=links, nodes=[name for name in failed if "->" not in name])


def with_rates(fabric: Fabric, degraded: Mapping[str, int]) -> Fabric:
    """The fabric with links (`a->b`, `a<->b`) or the DMA of ranks (`rank 3`) at other bytes/s."""
    for name, bytes_per_s in degraded.items():
        if name.startswith("rank "):
            (rank,) = _ranks(name.removeprefix("rank "), fabric.ranks, "degraded", single=True)
            if fabric.dma_out[rank] < 0 and fabric.dma_in[rank] < 0:
                raise BadInput("degraded", name, "ranks whose DMA has a rate")
            fabric = fabric.degrade_rank(rank, bytes_per_s=bytes_per_s)
        else:
            fabric = fabric.degrade(links=[name], bytes_per_s=bytes_per_s)
    return fabric


def parse_degraded(text: str) -> tuple[str, int]:
    """`chip0->chip1=10GB/s` as (name, bytes/s)."""
    name, equals, value = text.rpartition("=")
    if not equals or not name:
        raise BadInput("degraded", text, "LINK=RATE, as chip0->chip1=10GB/s or rank 3=20GB/s")
    return name, reading.rate(value, f"degraded {name}")


@dataclass(frozen=True)
class Start:
    """When ranks call a collective: fixed delays, and jitter on top.

    delays: (ranks, picoseconds) with ranks as `3` or `8-15`; a later one wins. Jitter is uniform
    in 0..jitter_ps, and the same for the same seed, iteration and number of ranks.
    """

    delays: tuple[tuple[str, int], ...] = ()
    jitter_ps: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise BadInput("seed", self.seed, "a whole number, 0 or more")
        if self.jitter_ps < 0:
            raise BadInput("jitter", f"{self.jitter_ps} ps", "0 or more")
        for who, delay in self.delays:
            if delay < 0:
                raise BadInput(f"delay of rank {who}", f"{delay} ps", "0 or more")

    def arrivals(self, ranks: int, iteration: int = 0) -> np.ndarray:
        """int64[ranks] picoseconds. Raises BadInput for a delay of a rank that is not there."""
        late = np.zeros(ranks, np.int64)
        for who, delay in self.delays:
            late[list(_ranks(who, ranks, "delay of rank"))] = delay
        if self.jitter_ps:
            random = np.random.default_rng([self.seed, iteration])
            late += random.integers(0, self.jitter_ps, ranks, endpoint=True)
        return late


def parse_delay(text: str) -> tuple[str, int]:
    """`3=20us` or `8-15=5us` as (ranks, picoseconds)."""
    who, equals, value = text.partition("=")
    if not equals or not who:
        raise BadInput("delay", text, "RANK=TIME or FIRST-LAST=TIME, as 3=20us or 8-15=5us")
    return who, reading.time(value, f"delay of rank {who}")


def _ranks(text: str, ranks: int, field: str, single: bool = False) -> range:
    first, dash, last = text.partition("-")
    last = last if dash else first
    if not (first.isdecimal() and last.isdecimal()) or (single and dash):
        raise BadInput(field, text, "a rank" if single else "a rank, or first-last")
    if not int(first) <= int(last) < ranks:
        raise BadInput(field, text, f"0..{ranks - 1}")
    return range(int(first), int(last) + 1)
