"""Ray transfers per second between actors, through the whole line that a collective takes.

Pairs of ranks swap a buffer (an all_to_all of two ranks: one message each way and round). Counts
messages; each is 64 KiB unless told otherwise.

    python benchmarks/transfers.py [--bytes 65536] [--swaps 1000] [--pairs 1 2]
"""

import argparse
import time
from typing import Any

import numpy as np

from trnsim.cluster.runtimes.base import CoreAddress, Exchange, Execution, Runtime, Seat
from trnsim.cluster.runtimes.local import LocalRuntime
from trnsim.cluster.runtimes.ray_runtime import RayRuntime
from trnsim.collectives.algorithms import mesh
from trnsim.collectives.schedule import Collective


def swap(seat: Seat, call: str, argument: Any) -> Execution:
    """Swap `nbytes` with the neighbour, `swaps` times; seconds that it took."""
    nbytes, swaps = argument
    rank = seat.address.rank
    collective = Collective("all_to_all", 2, nbytes, "ui8")
    schedule = mesh.schedule(collective)
    group = (rank & ~1, rank | 1)
    data, result = np.ones((2, 2 * nbytes), np.uint8)
    start = time.perf_counter()
    for key in range(swaps):
        yield Exchange(key, collective, schedule, group, rank & 1, [data], [result])
    return time.perf_counter() - start


def measure(runtime: Runtime, pairs: int, nbytes: int, swaps: int) -> float:
    """Messages per second of all pairs together."""
    with runtime:
        cores = [
            CoreAddress(rank, 0, 1, chip=0, physical=rank, hbm_bytes=0) for rank in range(2 * pairs)
        ]
        runtime.open(cores, swap)
        runtime.call("swap", [(nbytes, 10)] * len(cores))
        seconds = runtime.call("swap", [(nbytes, swaps)] * len(cores))
    return 2 * pairs * swaps / max(seconds)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description="Ray transfers per second between actors.")
    parser.add_argument("--bytes", type=int, default=65536, help="size of a message")
    parser.add_argument("--swaps", type=int, default=1000, help="rounds")
    parser.add_argument("--pairs", type=int, nargs="+", default=[1, 2], help="pairs of ranks")
    arguments = parser.parse_args()
    for name, kind in (("local", LocalRuntime), ("ray", RayRuntime)):
        for pairs in arguments.pairs:
            rate = measure(kind(), pairs, arguments.bytes, arguments.swaps)
            print(f"{name:6}{pairs} pair(s)  {arguments.bytes} B  {rate:8.0f} transfers/s")


if __name__ == "__main__":
    main()
