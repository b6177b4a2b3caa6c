"""Fabric files: what they say is what is built, and every mistake is one clear line."""

from pathlib import Path

import numpy as np
import pytest

from trnsim.cluster.conditions import Start, parse_degraded, parse_delay, with_failures, with_rates
from trnsim.cluster.fabric_file import load_fabric, read_fabric
from trnsim.collectives import fabric as fabrics
from trnsim.collectives.algorithms import mesh, ring
from trnsim.collectives.price import price
from trnsim.collectives.routes import Fabric
from trnsim.collectives.schedule import Collective
from trnsim.device.errors import BadFile, BadInput, TrnsimError

EXAMPLES = Path(__file__).parent.parent / "examples" / "fabrics"
GB = 10**9
US = 10**6

RING = """
[part.p]
ring = 8
bandwidth = "50GB/s"
latency = "500ns"
"""


def read(tmp_path: Path, text: str):
    path = tmp_path / "f.toml"
    path.write_text(text)
    return read_fabric(path)


def links(fabric: Fabric) -> list[tuple[str, int, int]]:
    rows = zip(fabric.rate.tolist(), fabric.latency.tolist(), strict=True)
    return [(fabric.link_name(i), rate, delay) for i, (rate, delay) in enumerate(rows)]


def path(fabric: Fabric, source: int, target: int) -> list[str]:
    routes = fabric.routes(np.array([source]), np.array([target]))
    return [fabric.link_name(link) for link in routes.path(0)]


def test_the_example_of_two_servers_is_what_it_says() -> None:
    found = read_fabric(EXAMPLES / "two_servers.toml")
    fabric = found.fabric
    server = fabrics.torus((4, 4), bytes_per_s=128 * GB, latency_ps=US)
    whole = fabrics.join([server] * 2, bytes_per_s=25 * GB, latency_ps=15 * US, nics=16)
    whole = whole.attach(
        whole.chips.repeat(4), dma_out=208 * GB, dma_in=208 * GB, latency_ps=1_500_000
    )
    slow = {name: rate for name, rate, _ in links(fabric) if (name, rate) not in dict.fromkeys(
        (name, rate) for name, rate, _ in links(whole))}  # fmt: skip
    assert slow == {
        "server0/chip0->server0/chip1": 10 * GB,
        "dma out of rank 70": 50 * GB,
        "dma in of rank 70": 50 * GB,
    }
    dead = [fabric.link_name(link) for link in np.flatnonzero(~fabric.alive).tolist()]
    assert sorted(dead) == ["server0/chip3->server0/chip7", "server0/chip7->server0/chip3"]
    late = found.start.arrivals(128)
    assert late[3] >= 20 * US and (late[8:16] >= 5 * US).all() and late[0] <= 2 * US
    assert found.title == "two 4x4 servers, not all well"


def test_a_direct_connect_graph_carries_every_pair() -> None:  # U3
    fabric = load_fabric(EXAMPLES / "direct_connect.toml")
    assert fabric.ranks == 8 and len(fabric.rate) == 32
    pairs = [(a, b) for a in range(8) for b in range(a)]
    assert sum(len(path(fabric, a, b)) > 1 for a, b in pairs) == 12
    size = 8 * 2**20
    what = Collective("all_reduce", 8, size // 4, "f32", "add")
    for schedule in (ring.schedule(what), mesh.schedule(what)):
        priced = price(what, schedule, fabric, [range(8)])
        assert priced.duration_ps >= 1.75 * size / fabric.egress("c0") * 1e12
        assert priced.link_load.sum() >= 2 * 7 * size  # every byte that moves is on some link


def test_a_cut_cable_and_a_cut_chip(tmp_path: Path) -> None:  # U4
    cut = read(tmp_path, RING + '[state]\nfailed = ["chip3<->chip4"]\n').fabric
    assert len(path(cut, 3, 4)) == 7
    off = read(tmp_path, RING + '[state]\nfailed = ["chip3<->chip4", "chip4<->chip5"]\n').fabric
    what = Collective("all_reduce", 8, 1024, "f32", "add")
    with pytest.raises(TrnsimError, match=r"^rank 4 \(chip4\) is unreachable: no live path"):
        price(what, ring.schedule(what), off, [range(8)])
    dead = read(tmp_path, RING + '[state]\nfailed = ["chip4"]\n').fabric
    with pytest.raises(TrnsimError, match="^rank 4 "):
        price(what, ring.schedule(what), dead, [range(8)])


def test_every_builder_is_the_function_of_its_name(tmp_path: Path) -> None:
    rest = 'bandwidth = "50GB/s"\nlatency = "500ns"\n'
    made = {
        "ring = 6\none_way = true": fabrics.ring(
            6, bytes_per_s=50 * GB, latency_ps=500_000, both_ways=False
        ),
        "switch = 5": fabrics.switch(5, bytes_per_s=50 * GB, latency_ps=500_000),
        "torus = [3, 2]": fabrics.torus((3, 2), bytes_per_s=50 * GB, latency_ps=500_000),
    }
    for line, expected in made.items():
        found = read(tmp_path, f"[part.p]\n{line}\n{rest}").fabric
        assert links(found) == links(expected) and list(found.names) == list(expected.names)


def test_dimensions_may_differ_and_parts_may_be_mixed(tmp_path: Path) -> None:
    text = """
    [part.a]
    torus = [2, 3]
    bandwidth = ["10GB/s", "20GB/s"]
    latency = ["1us", "2us"]
    [part.b]
    chips = ["x", "y"]
    switches = ["s"]
    [[part.b.link]]
    between = ["x", "s"]
    bandwidth = "7GB/s"
    [[part.b.link]]
    from = "s"
    to = "y"
    bandwidth = "8GB/s"
    state = { degraded = "1GB/s" }
    [[part.b.link]]
    from = "y"
    to = "x"
    bandwidth = "9GB/s"
    state = "failed"
    [join]
    parts = { a = 2, b = 1 }
    bandwidth = "200Gbps"
    names = "node"
    [ranks]
    on = ["node2/x", "node0/chip5", "node2/y"]
    dma_out = ["1GB/s", "2GB/s", "3GB/s"]
    """
    fabric = read(tmp_path, text).fabric
    assert path(fabric, 0, 2) == ["dma out of rank 0", "node2/x->node2/s", "node2/s->node2/y"]
    named = {name: rate for name, rate, _ in links(fabric)}
    assert named["node2/s->node2/y"] == GB and named["dma out of rank 2"] == 3 * GB
    assert named["node1/chip0->node1/chip3"] == 10 * GB
    assert path(fabric, 2, 0) == ["dma out of rank 2", "node2/y->switch0", "switch0->node2/x"]


def test_an_instance_is_a_fabric_too(tmp_path: Path) -> None:
    text = '[instance]\nname = "trn2.48xlarge"\nnodes = 2\n[state]\nfailed = ["node1/chip3"]\n'
    fabric = read(tmp_path, text).fabric
    assert fabric.ranks == 128
    with pytest.raises(TrnsimError, match="^rank 76 is unreachable: node1/chip3 has failed$"):
        path(fabric, 0, 76)


BAD = [
    ("", "part: (missing) is not valid; allowed: [part.NAME] or [instance]"),
    ("[prt.p]", "key: prt is not valid; allowed: one of title, part, join, ranks, state, "
     "start, instance; nearest valid: part"),
    ("[part.p]\nrng = 8", "[part.p]: key: rng is not valid"),
    ("[part.p]\nring = 8\ntorus = [2]", "[part.p]: torus and ring is not valid; allowed: "
     "exactly one of torus, ring, switch, chips"),
    ("[part.p]\nring = 8\nbandwidth = 50", "[part.p]: bandwidth: 50 is not valid; allowed: "
     'text with a unit, as "256GB/s" or "200Gbps"; nearest valid: "50GB/s"'),
    ('[part.p]\nring = 8\nbandwidth = "50GB"', "[part.p]: bandwidth: 50GB is not valid; "
     "allowed: a number with a unit of B/s"),
    ('[part.p]\nring = 8\nbandwidth = "0GB/s"', "[part.p]: bandwidth: 0GB/s is not valid; "
     "allowed: a rate above zero"),
    ("[part.p]\nring = 8", "[part.p]: bandwidth: (missing) is not valid"),
    ('[part.p]\nring = 8\nbandwidth = "1GB/s"\nlatency = 1', "[part.p]: latency: 1 is not"),
    ("[part.p]\nring = 0", "[part.p]: ring: [0] is not valid; allowed: whole numbers, 1"),
    ("[part.p]\ntorus = [4, 99999999]", "[part.p]: torus: [4, 99999999] is not valid; "
     "allowed: at most"),
    ('[part.p]\ntorus = [4, 4]\nbandwidth = ["1GB/s"]', "[part.p]: bytes_per_s: [1000"),
    ('[part.p]\nchips = ["a", "a"]', "[part.p]: chips: a is not valid; allowed: names used"),
    ("[part.p]\nchips = []", "[part.p]: chips: [] is not valid; allowed: one chip or more"),
    ('[part.p]\nchips = ["a"]\nbandwidth = "1GB/s"', "[part.p]: key: bandwidth is not"),
    ('[part.p]\nchips = ["a", "b"]\n[[part.p.link]]\nbetween = ["a", "c"]\nbandwidth = "1GB/s"',
     "[part.p]: node of a link: c is not valid; allowed: one of a, b"),
    ('[part.p]\nchips = ["a", "b"]\n[[part.p.link]]\nbetween = ["a", "b"]\nbandwidth = "1GB/s"\n'
     'state = "fialed"', "[part.p]: link 1: state: fialed is not valid; allowed: one of up, "
     'failed, { degraded = "10GB/s" }; nearest valid: failed'),
    (RING + '[part.q]\nring = 2\nbandwidth = "1GB/s"', "[join]: (missing) is not valid"),
    (RING + '[join]\nbandwidth = "1GB/s"\nparts = { q = 2 }', "[join]: parts: key: q is"),
    (RING + '[join]\nbandwidth = "1GB/s"\nparts = { p = 0 }', "[join]: parts: p: 0 is not"),
    (RING + '[ranks]\non = ["chip9"]', "[ranks]: on: chip9 is not valid"),
    (RING + '[ranks]\nper_chip = 1.5', "[ranks]: per_chip: 1.5 is not valid"),
    (RING + '[ranks]\ndma_in = ["1GB/s"]', "[ranks]: dma_in: 1 rates is not valid; allowed: "
     "one, or one for each of 8 ranks"),
    (RING + '[state]\nfailed = ["chip0->chip2"]', "[state]: link: chip0->chip2 is not valid"),
    (RING + '[state]\ndegraded = { "rank 3" = "1GB/s" }', "[state]: degraded: rank 3 is not "
     "valid; allowed: ranks whose DMA has a rate"),
    (RING + '[state]\ndegraded = { "chip0->chip1" = 5 }', "[state]: degraded: chip0->chip1: "
     "5 is not valid"),
    (RING + '[start]\ndelay = { "8" = "1us" }', "[start]: delay of rank: 8 is not valid; "
     "allowed: 0..7"),
    (RING + '[start]\ndelay = { "x" = "1us" }', "[start]: delay of rank: x is not valid"),
    (RING + "[start]\nseed = -1", "[start]: seed: -1 is not valid; allowed: a whole number"),
    (RING + '[instance]\nname = "trn2.48xlarge"', "[part]: (given) is not valid; allowed: "
     "nothing beside [instance]"),
    ('[instance]\nname = "trn2.48xlage"', "[instance]: instance: trn2.48xlage is not valid"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), BAD)
def test_mistakes_are_one_line_that_says_where(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(BadInput) as refusal:
        read(tmp_path, text)
    assert str(refusal.value).startswith(f"f.toml: {message}") and "\n" not in str(refusal.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="none.toml: No such file"):
        read_fabric(tmp_path / "none.toml")
    with pytest.raises(BadFile, match="f.toml: Expected .* declaration"):
        read(tmp_path, "[part")


def test_conditions_given_apart_are_those_of_a_file(tmp_path: Path) -> None:
    text = RING + '[ranks]\ndma_in = "9GB/s"\n'
    state = 'failed = ["chip1->chip2"]\ndegraded = { "chip0<->chip1" = "1GB/s", "rank 2" = "3GB/s"}'
    filed = read(tmp_path, text + f"[state]\n{state}").fabric
    rates = dict(map(parse_degraded, ("chip0<->chip1=1GB/s", "rank 2=3GB/s")))
    apart = with_failures(with_rates(read(tmp_path, text).fabric, rates), ["chip1->chip2"])
    assert (apart.rate == filed.rate).all() and (apart.alive == filed.alive).all()
    start = Start(tuple(map(parse_delay, ("3=20us", "4-5=1us"))))
    assert start.arrivals(8).tolist() == [0, 0, 0, 20 * US, US, US, 0, 0]
    for bad, parse in (("3", parse_delay), ("chip0", parse_degraded), ("3=5", parse_delay)):
        with pytest.raises(BadInput):
            parse(bad)


def test_jitter_is_the_same_for_the_same_seed_and_differs_between_iterations() -> None:
    start = Start((), jitter_ps=1000, seed=5)
    assert all((start.arrivals(50) == start.arrivals(50)).all() for _ in range(10))
    assert (start.arrivals(50, 1) != start.arrivals(50)).any()
    assert (Start((), 1000, 6).arrivals(50) != start.arrivals(50)).any()
    assert start.arrivals(5000).min() >= 0 and start.arrivals(5000).max() <= 1000
