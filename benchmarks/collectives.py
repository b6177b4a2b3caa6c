"""Speed of collective prices: fabric, schedule, routes and price, in one process.

    python benchmarks/collectives.py [--quick] [--json FILE]

Goals, on two cores, with a peak of 1 GiB: an all-reduce of 1 MiB, 64 MiB and 1 GiB on a flat ring
of 4,096 ranks in 0.3 s, on a 25 x 25 x 25 torus in 0.3 s, by the vendor's policy on 1,024
trn2.48xlarge (65,536 ranks) in 1 s, on 1,048,576 ranks in 10 s; three times that with a slow link.

Every time is printed with what it is checked against in the same run: the closed form of the
algorithm on an ideal fabric, or the same price without taking any work for equal ("full") on a
machine small enough for that.
"""

import argparse
import gc
import json
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import numpy as np

from trnsim.cluster.instances import fabric as instance_fabric
from trnsim.cluster.instances import load_instance
from trnsim.cluster.instances import overheads as instance_overheads
from trnsim.collectives import choose
from trnsim.collectives import fabric as fabrics
from trnsim.collectives.algorithms import ring, torus
from trnsim.collectives.costs import Overheads
from trnsim.collectives.fabric import Fabric
from trnsim.collectives.price import Priced, price
from trnsim.collectives.resources import Resources
from trnsim.collectives.rounds import Rounds
from trnsim.collectives.schedule import Collective, Schedule
from trnsim.device.units import format_bytes, format_time, parse_bytes, transfer_ps

RATE, SLOW, ALPHA = 50 * 10**9, 10**9, 500_000
SIZES = ("1MiB", "64MiB", "1GiB")
SERVER = "trn2.48xlarge"


@dataclass(frozen=True)
class Case:
    """One row of the table. seconds: wall time; cpu: of all threads; peak: MiB of the process."""

    name: str
    size: str
    ranks: int
    slow_link: bool
    seconds: float
    cpu: float
    goal: float
    peak: int
    modelled: str
    check: str


def all_reduce(ranks: int, nbytes: int) -> Collective:
    return Collective("all_reduce", ranks, nbytes // 4, "f32", "add")


def flat_ring(n: int, nbytes: int, slow: bool) -> Priced:
    fabric = fabrics.ring(n, bytes_per_s=RATE, latency_ps=ALPHA).attach(np.arange(n))
    what = all_reduce(n, nbytes)
    return _price(what, ring.schedule(what), _slowed(fabric, slow, "chip7->chip8"))


def torus_rings(extent: int, nbytes: int, slow: bool) -> Priced:
    n = extent**3
    fabric = fabrics.torus((extent,) * 3, bytes_per_s=RATE, latency_ps=ALPHA).attach(np.arange(n))
    what, places = all_reduce(n, nbytes), np.arange(n).reshape((extent,) * 3)
    return _price(what, torus.schedule(what, places), _slowed(fabric, slow, "chip7->chip8"))


def policy(nodes: int, nbytes: int, slow: bool) -> Priced:
    fabric = instance_fabric(load_instance(SERVER), nodes)
    fabric = _slowed(fabric, slow, "node1/chip0->node1/chip1")
    what = all_reduce(fabric.ranks, nbytes)
    groups = np.arange(fabric.ranks)[None]
    schedule = choose.plan(what, groups, fabric).schedule
    return _price(what, schedule, fabric, instance_overheads(load_instance(SERVER), nodes))


def _slowed(fabric: Fabric, slow: bool, link: str) -> Fabric:
    return fabric.degrade(links=[link], bytes_per_s=SLOW) if slow else fabric


def _price(
    what: Collective, schedule: Schedule, fabric: Fabric, overheads: Overheads | None = None
) -> Priced:
    return price(what, schedule, fabric, np.arange(what.ranks)[None], overheads=overheads)


def ring_form(n: int, nbytes: int) -> int:
    """2 (n - 1) rounds of the largest chunk."""
    return 2 * (n - 1) * _round(nbytes, n)


def torus_form(extent: int, nbytes: int) -> int:
    """Rings along three dimensions, each on what the one before left, there and back."""
    runs = (extent ** (3 - k) for k in (1, 2, 3))  # chunks that a transfer moves
    return sum(2 * (extent - 1) * _round(nbytes, extent**3, run) for run in runs)


def _round(nbytes: int, parts: int, run: int = 1) -> int:
    return transfer_ps(4 * run * -(-(nbytes // 4) // parts), RATE) + ALPHA


def equal_to_full(nodes: int, nbytes: int, slow: bool) -> str:
    """Whether the price equals the one in which nothing is taken for equal, on fewer nodes."""
    fabric = instance_fabric(load_instance(SERVER), nodes)
    fabric = _slowed(fabric, slow, "node1/chip0->node1/chip1")
    what, groups = all_reduce(fabric.ranks, nbytes), np.arange(fabric.ranks)[None]
    schedule = choose.plan(what, groups, fabric).schedule
    costs = instance_overheads(load_instance(SERVER), nodes)
    ends, seconds = [], []
    for fold in (True, False):
        begun = time.perf_counter()
        resources = Resources(fabric, costs.memory, costs.reduce_fraction)
        rounds = Rounds(schedule, resources, groups, fold=fold)
        sized = rounds.rounds(what)
        rounds.totals(sized)
        ends.append(rounds.run(sized, costs, np.zeros(groups.shape, np.int64)))
        seconds.append(time.perf_counter() - begun)
    same = "equals" if np.array_equal(*ends) else "DIFFERS FROM"
    return f"{same} full on {nodes} nodes ({seconds[1] / seconds[0]:.0f}x its time)"


def cases(quick: bool) -> Iterator[Case]:
    n, extent, nodes, most = (512, 9, 32, 64) if quick else (4096, 25, 1024, 16384)
    for slow in (False, True):
        for size in SIZES:
            nbytes = parse_bytes(size)
            form = None if slow else ring_form(n, nbytes)
            name = f"flat ring {n:,}"
            yield _timed(name, size, slow, 0.3, lambda s=slow, b=nbytes: flat_ring(n, b, s), form)
            form = None if slow else torus_form(extent, nbytes)
            name = f"torus {extent}^3"
            run = lambda s=slow, b=nbytes: torus_rings(extent, b, s)  # noqa: E731
            yield _timed(name, size, slow, 0.3, run, form)
            check = equal_to_full(8, nbytes, slow)
            for count, goal in ((nodes, 1.0), (most, 10.0)):
                name = f"policy, {count:,} {SERVER}"
                run = lambda s=slow, b=nbytes, c=count: policy(c, b, s)  # noqa: E731
                yield _timed(name, size, slow, goal, run, None, check)


def _timed(
    name: str,
    size: str,
    slow: bool,
    goal: float,
    run: Callable[[], Priced],
    form: int | None,
    check: str = "",
) -> Case:
    gc.collect()
    choose._build.cache_clear()
    wall, cpu = time.perf_counter(), time.process_time()
    priced = run()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    if form is not None:
        agrees = abs(priced.duration_ps - form) <= 1e-9 * form
        check = "equals the formula" if agrees else f"formula says {format_time(form)}"
    elif not check:
        check = f"{priced.duration_ps / priced.bound_ps:.2f}x its bound"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    modelled, ranks = format_time(priced.duration_ps), priced.end.size
    goal *= 3 if slow else 1
    return Case(name, size, ranks, slow, wall, cpu, goal, peak, modelled, check)


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of collective prices.")
    parser.add_argument("--quick", action="store_true", help="small machines, for a check")
    parser.add_argument("--json", help="write the rows to this file")
    options = parser.parse_args()
    heads = ("all-reduce on", "size", "slow link", "s", "cpu s", "goal s", "peak", "modelled")
    line = "{:34} {:>6} {:>9} {:>7} {:>7} {:>6} {:>9} {:>10}  {}"
    print(line.format(*heads, "check"))
    rows = []
    for case in cases(options.quick):
        rows.append(case)
        times = (f"{case.seconds:.3f}", f"{case.cpu:.3f}", f"{case.goal:.1f}")
        slow, peak = "one" if case.slow_link else "none", format_bytes(case.peak << 20)
        print(line.format(case.name, case.size, slow, *times, peak, case.modelled, case.check))
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump([asdict(row) for row in rows], file, indent=1)


if __name__ == "__main__":
    main()
