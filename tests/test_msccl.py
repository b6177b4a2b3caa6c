"""MSCCL XML in and out."""

import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trnsim.collectives import fabric
from trnsim.collectives.algorithms import (
    bruck,
    hierarchical,
    kangaring,
    mesh,
    pairwise,
    rdh,
    ring,
    single_step,
    tree,
)
from trnsim.collectives.execute import execute
from trnsim.collectives.msccl import read_msccl
from trnsim.collectives.msccl_write import write_msccl
from trnsim.collectives.price import price
from trnsim.collectives.schedule import REDUCING, Collective, Schedule
from trnsim.collectives.verify import WrongSchedule, verify
from trnsim.device.errors import BadFile, BadInput, TrnsimError

from .collective_reference import assert_same, collective, random_inputs, reference, roots

FLAT = (ring, mesh, single_step, rdh, tree, bruck, pairwise)
MISSING = ("permute", "sendrecv", "barrier")  # MSCCL has no such collective


def step(kind: str, src: str = "i0", dst: str = "i0", cnt: int = 1, wait: str = "") -> str:
    """One step, short: step("s", "i1", "s0", wait="2.0")."""
    thread, _, number = wait.partition(".")
    return (
        f'type="{kind}" srcbuf="{src[0]}" srcoff="{src[1:]}" dstbuf="{dst[0]}" '
        f'dstoff="{dst[1:]}" cnt="{cnt}" depid="{thread or -1}" deps="{number or -1}" hasdep="0"'
    )


def algorithm(coll: str, chunks: int, gpus: list[list[tuple]], scratch: int = 0, **more) -> str:
    """XML of gpus, each a list of thread blocks (send, recv, steps...)."""
    fields = {"inplace": 1, "nchannels": 1, "proto": "Simple"} | more
    extra = " ".join(f'{key}="{value}"' for key, value in fields.items())
    lines = [
        f'<algo name="mine" coll="{coll}" ngpus="{len(gpus)}" nchunksperloop="{chunks}" {extra}>'
    ]
    for gpu, blocks in enumerate(gpus):
        lines.append(f'<gpu id="{gpu}" i_chunks="{chunks}" o_chunks="0" s_chunks="{scratch}">')
        for number, (send, recv, *steps) in enumerate(blocks):
            lines.append(f'<tb id="{number}" send="{send}" recv="{recv}" chan="0">')
            lines += [f'<step s="{s}" {text}/>' for s, text in enumerate(steps)]
            lines.append("</tb>")
        lines.append("</gpu>")
    return "\n".join([*lines, "</algo>"])


def run(asked: Collective, schedule: Schedule, **fields) -> None:
    """Real data through an imported schedule."""
    whole = replace(asked, dtype="i32", **fields)
    inputs = random_inputs(whole)
    assert_same(execute(whole, schedule, inputs), reference(whole, inputs))


def ring_of(n: int) -> str:
    """An all_reduce ring as the MSCCL tools write it: partial sums are sent on, not kept."""
    gpus = []
    for gpu in range(n):
        steps = [step("s", f"i{gpu}", f"i{gpu}")]
        kinds = ["rrs"] * (n - 2) + ["rrcs"] + ["rcs"] * (n - 2) + ["r"]
        for k, kind in enumerate(kinds):
            at = f"i{(gpu - 1 - k) % n}"
            steps.append(step(kind, at, at))
        gpus.append([((gpu + 1) % n, (gpu - 1) % n, *steps)])
    return algorithm("allreduce", n, gpus)


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_a_ring_is_recognised_as_what_it_is(n: int) -> None:
    asked, schedule = read_msccl(ring_of(n))
    assert asked == Collective("all_reduce", n, n, reduction="add")
    assert (schedule.parts, schedule.rounds, schedule.copies) == (n, 2 * (n - 1), 1)
    run(asked, schedule, counts=41)


def test_an_imported_ring_costs_what_our_ring_costs() -> None:
    own = Collective("all_reduce", 8, 2**18, reduction="add")
    links = fabric.ring(8, bytes_per_s=50 * 10**9, latency_ps=500_000)
    links = links.attach(links.chips)
    _, schedule = read_msccl(ring_of(8))
    for made in (schedule, ring.schedule(own)):
        ends = price(own, made, links, [range(8)]).duration_ps
        assert abs(ends - 43_700_160) < 14 * 2  # U1: 14 * (131,072 B / 50 GB/s + 500 ns)


def pairs(n: int) -> str:
    """All pairs: everybody sends to the owner's scratch, which reduces and sends back."""
    gpus = []
    for gpu in range(n):
        peers = [peer for peer in range(n) if peer != gpu]
        adds = [step("re", f"s{i}", f"i{gpu}", wait=f"{i + 1}.1") for i in range(n - 1)]
        blocks: list[tuple] = [(-1, -1, *adds)]
        for i, peer in enumerate(peers):
            there = gpu - (gpu > peer)
            blocks.append(
                (
                    peer,
                    peer,
                    step("s", f"i{peer}", f"s{there}"),
                    step("r", f"i{gpu}", f"s{i}"),
                    step("s", f"i{gpu}", f"i{gpu}", wait=f"0.{n - 2}"),
                    step("r", f"i{peer}", f"i{peer}"),
                )
            )
        gpus.append(blocks)
    return algorithm("allreduce", n, gpus, scratch=n - 1)


@pytest.mark.parametrize("n", [2, 3, 4, 7])
def test_scratch_buffers_are_copies_of_chunks(n: int) -> None:
    asked, schedule = read_msccl(pairs(n))
    assert schedule.copies == n and schedule.rounds == 3
    run(asked, schedule, counts=30)


def test_the_order_of_local_reductions_is_kept() -> None:
    asked, schedule = read_msccl(pairs(3))
    one, big = np.float32(1), np.float32(2**24)
    inputs = [np.full(3, v, np.float32) for v in (one, big, one)]
    got = execute(asked, schedule, inputs)
    # Chunk 0: (1 + big) + 1; chunk 1: (big + 1) + 1; chunk 2: (1 + 1) + big. big + 1 is big.
    assert [x.tolist() for x in got] == [[big, big, big + 2]] * 3


def test_out_of_place_with_several_chunks_per_step() -> None:
    gpus = [
        [
            (1 - me, -1, step("s", "i0", f"o{2 * me}", cnt=2)),
            (-1, 1 - me, step("r", "i0", f"o{2 - 2 * me}", cnt=2)),
            (-1, -1, step("cpy", "i0", f"o{2 * me}", cnt=2)),
        ]
        for me in (0, 1)
    ]
    asked, schedule = read_msccl(algorithm("allgather", 4, gpus, inplace=0, outofplace=1))
    assert (asked.kind, schedule.parts, schedule.rounds) == ("all_gather", 2, 1)
    run(asked, schedule, counts=(5, 0))


def test_an_input_that_is_read_after_its_output_was_written_is_kept() -> None:
    sends = step("s", "i0", "s0", wait="1.0")
    gpus = [
        [(1, -1, sends), (-1, 1, step("r", "i0", "o0"), step("re", "i0", "o0"))],
        [(0, -1, step("s", "i0", "o0")), (-1, 0, step("rrc", "i0", "o0"))],
    ]
    asked, schedule = read_msccl(algorithm("allreduce", 1, gpus, inplace=0))
    assert schedule.copies == 2
    run(asked, schedule, counts=7)


def test_a_message_keeps_its_value_when_its_source_changes_on_the_way() -> None:
    gpus = [
        # gpu 0 sends its input, adds gpu 1's, and only then gpu 1 takes the message.
        [(1, 1, step("s", "i0", "i0"), step("rrc", "i0", "i0"))],
        [(0, 0, step("s", "i0", "i0"), step("nop", wait="1.0"), step("rrc", "i0", "i0")),
         (-1, -1, step("cpy", "i0", "s0"), step("cpy", "s0", "s1"))],
    ]  # fmt: skip
    asked, schedule = read_msccl(algorithm("allreduce", 1, gpus, scratch=2))
    run(asked, schedule, counts=5)


@pytest.mark.parametrize("module", FLAT)
def test_our_algorithms_survive_the_round_trip(module) -> None:
    for kind in set(module.KINDS) - set(MISSING):
        for n in (1, 2, 3, 6, 8):
            for root in roots(kind, n):
                asked = collective(kind, n, root=root)
                returns(asked, module.schedule(asked))


@pytest.mark.parametrize("kind", hierarchical.KINDS)
def test_hierarchies_survive_the_round_trip(kind: str) -> None:
    asked = collective(kind, 8, root=3)
    places = np.random.default_rng(0).permutation(8).reshape(2, 4)
    for stages in (1, 2):
        returns(asked, hierarchical.schedule(asked, places, "ring", "rdh", stages=stages))


@pytest.mark.parametrize("kind", kangaring.KINDS)
def test_kangaring_survives_the_round_trip(kind: str) -> None:
    asked = collective(kind, 8)
    orders = np.array([[0, 1], [1, 0]])
    returns(asked, kangaring.schedule(asked, np.arange(8).reshape(2, 4), orders))


def returns(asked: Collective, schedule: Schedule) -> None:
    """Write, read, and run both: the same bits, although bf16 sums depend on the order."""
    back, made = read_msccl(write_msccl(asked, schedule))
    assert (back.kind, back.ranks, back.root) == (asked.kind, asked.ranks, asked.root)
    assert made.parts == schedule.parts
    whole = replace(asked, counts=37, dtype="bf16")
    inputs = random_inputs(whole)
    assert_same(execute(whole, made, inputs), execute(whole, schedule, inputs))


def test_pipelines_stay_pipelines() -> None:
    asked = collective("all_reduce", 8)
    for made in (ring.schedule(asked), tree.schedule(asked), rdh.schedule(asked)):
        assert read_msccl(write_msccl(asked, made))[1].rounds == made.rounds


def test_the_written_file_is_what_msccl_expects() -> None:
    asked = collective("all_gather", 2)
    text = write_msccl(asked, ring.schedule(asked))
    assert text == (
        '<algo name="ring" proto="Simple" nchannels="1" nchunksperloop="2" ngpus="2" '
        'coll="allgather" inplace="1" outofplace="0" minBytes="0" maxBytes="0">\n'
        '  <gpu id="0" i_chunks="1" o_chunks="2" s_chunks="0">\n'
        '    <tb id="0" send="-1" recv="1" chan="0">\n'
        '      <step s="0" type="r" srcbuf="o" srcoff="1" dstbuf="o" dstoff="1" cnt="1" '
        'depid="-1" deps="-1" hasdep="0" />\n'
        "    </tb>\n"
        '    <tb id="1" send="1" recv="-1" chan="0">\n'
        '      <step s="0" type="s" srcbuf="o" srcoff="0" dstbuf="o" dstoff="0" cnt="1" '
        'depid="-1" deps="-1" hasdep="0" />\n'
        "    </tb>\n"
        "  </gpu>\n"
        '  <gpu id="1" i_chunks="1" o_chunks="2" s_chunks="0">\n'
        '    <tb id="0" send="-1" recv="0" chan="0">\n'
        '      <step s="0" type="r" srcbuf="o" srcoff="0" dstbuf="o" dstoff="0" cnt="1" '
        'depid="-1" deps="-1" hasdep="0" />\n'
        "    </tb>\n"
        '    <tb id="1" send="0" recv="-1" chan="0">\n'
        '      <step s="0" type="s" srcbuf="o" srcoff="1" dstbuf="o" dstoff="1" cnt="1" '
        'depid="-1" deps="-1" hasdep="0" />\n'
        "    </tb>\n"
        "  </gpu>\n"
        "</algo>\n"
    )


def test_written_steps_are_few_and_depend_on_what_is_there() -> None:
    asked = collective("all_reduce", 4)
    top = ElementTree.fromstring(write_msccl(asked, rdh.schedule(asked)))
    for block in top.iter("tb"):
        assert [node.get("s") for node in block] == [str(i) for i in range(len(block))]
    waited = {
        (gpu.get("id"), node.get("depid"), node.get("deps"))
        for gpu in top.iter("gpu")
        for node in gpu.iter("step")
        if node.get("depid") != "-1"
    }
    marked = {
        (gpu.get("id"), block.get("id"), node.get("s"))
        for gpu in top.iter("gpu")
        for block in gpu.iter("tb")
        for node in block
        if node.get("hasdep") == "1"
    }
    assert waited == marked and waited


@pytest.mark.parametrize("kind", MISSING)
def test_kinds_that_msccl_lacks_are_refused(kind: str) -> None:
    asked = collective(kind, 4)
    with pytest.raises(BadInput, match=f"^collective of MSCCL XML: {kind} is not valid"):
        write_msccl(asked, mesh.schedule(asked))


def test_a_wrong_algorithm_is_refused_with_rank_and_chunk() -> None:
    text = ring_of(3).replace('type="rrcs"', 'type="rcs"', 1)
    with pytest.raises(WrongSchedule, match="^all_reduce of 3 ranks by mine: rank 0 ends with ch"):
        read_msccl(text)


TWO = [
    [(1, 1, step("s"), step("rrc"))],
    [(0, 0, step("s"), step("rrc"))],
]


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("<algo", BadFile, "MSCCL XML: not well formed: "),
        ("<gpu/>", BadFile, "MSCCL XML: the top element is <gpu>, must be <algo>"),
        (algorithm("allsend", 1, TWO), BadInput, "coll of the MSCCL algorithm: allsend is not"),
        (
            algorithm("allreduce", 1, TWO).replace('ngpus="2"', 'ngpus="two"'),
            BadFile,
            "MSCCL XML: algo: ngpus='two' is not a number",
        ),
        (
            algorithm("allreduce", 1, TWO).replace(' ngpus="2"', ""),
            BadFile,
            "MSCCL XML: algo has no attribute ngpus",
        ),
        (
            algorithm("allreduce", 1, TWO).replace('gpu id="1"', 'gpu id="2"'),
            BadFile,
            "MSCCL XML: gpu ids [0, 2] are not 0..1",
        ),
        (
            algorithm("allreduce", 10**9, TWO),
            BadFile,
            "MSCCL XML: ngpus 2 times nchunksperloop 1000000000 is above 1048576, the most that",
        ),
        (
            algorithm("allreduce", 1, TWO).replace('s="1"', 's="3"'),
            BadFile,
            "MSCCL XML: gpu 0, thread block 0: steps [0, 3] are not 0..1",
        ),
        (
            algorithm("allreduce", 1, TWO).replace('"rrc"', '"rrx"'),
            BadInput,
            "type of gpu 0, thread block 0, step 1: rrx is not valid",
        ),
        (
            algorithm("allreduce", 1, TWO).replace('"i"', '"q"'),
            BadInput,
            "srcbuf of gpu 0, thread block 0, step 0: q is not valid",
        ),
        (
            algorithm("allreduce", 1, [[(0, 1, step("s"))], TWO[1]]),
            BadFile,
            "MSCCL XML: gpu 0, thread block 0: send=0 is no other gpu",
        ),
        (
            algorithm("allreduce", 1, [[(-1, 1, step("s"))], TWO[1]]),
            BadFile,
            "MSCCL XML: gpu 0, thread block 0, step 0: s without a peer",
        ),
        (
            algorithm("allreduce", 1, [[(1, 1, step("s", wait="4.0"))], TWO[1]]),
            BadFile,
            "MSCCL XML: gpu 0, thread block 0, step 0: depends on step (4, 0), which is not there",
        ),
        (
            algorithm("allreduce", 1, [[(1, 1, step("s", "i5"))], TWO[1]]),
            BadFile,
            "mine: gpu 0, thread block 0, step 0: chunks i[5..5] of 1",
        ),
        (
            algorithm("allgather", 3, TWO),
            BadInput,
            "nchunksperloop of all_gather: 3 is not valid; allowed: a multiple of the 2 gpus",
        ),
        (
            algorithm("allreduce", 2, [[(1, 1, step("s", cnt=2))], TWO[1]]),
            TrnsimError,
            "mine: gpu 1, thread block 0, step 1: expects 1 chunks, gpu 0 sends 2",
        ),
        (
            algorithm("allreduce", 1, [[(1, 1, step("rrc"), step("s"))],
                                       [(0, 0, step("rrc"), step("s"))]]),
            TrnsimError,
            "mine: steps wait for each other: gpu 0 thread block 0 step 0 (rrc) waits for gpu 1, "
            "gpu 1 thread block 0 step 0 (rrc) waits for gpu 0",
        ),
        (
            algorithm("allreduce", 1, [[(1, 1, step("s"), step("s"), step("rrc"))], TWO[1]]),
            TrnsimError,
            "mine: gpu 0 sends to gpu 1 on channel 0 what it never receives",
        ),
        (
            algorithm("allreduce", 1, [[(1, 1, step("s", "s0"), step("rrc"))], TWO[1]], scratch=1),
            TrnsimError,
            "mine: gpu 1, thread block 0, step 1: rank 0 reads s[0] unset",
        ),
        (
            algorithm("allreduce", 2, [[(-1, -1, step("re", "i0", "i1"))], []]),
            TrnsimError,
            "mine: gpu 0, thread block 0, step 0: rank 0 adds chunk 0 to i[1], which holds 1",
        ),
    ],
)  # fmt: skip
def test_what_is_no_algorithm_is_refused(text: str, error: type, message: str) -> None:
    with pytest.raises(error) as refusal:
        read_msccl(text)
    assert str(refusal.value).startswith(message)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_a_changed_step_is_refused_or_still_right(data: st.DataObject) -> None:
    """No edit of a number or type makes an import fail otherwise, or pass and be wrong."""
    text = data.draw(st.sampled_from([ring_of(3), pairs(3), write_msccl(*_tree())]))
    top = ElementTree.fromstring(text)
    node = data.draw(st.sampled_from(list(top.iter("step"))))
    key = data.draw(st.sampled_from(["type", "srcoff", "dstoff", "cnt", "depid", "deps"]))
    kinds = st.sampled_from(["s", "r", "rcs", "rrs", "rrc", "rrcs", "cpy", "re", "nop"])
    value = data.draw(kinds if key == "type" else st.integers(-1, 6).map(str))
    node.set(key, value)
    try:
        asked, schedule = read_msccl(ElementTree.tostring(top, encoding="unicode"))
    except TrnsimError:
        return
    run(asked, schedule, counts=11)


def _tree() -> tuple[Collective, Schedule]:
    asked = collective("all_reduce", 4)
    return asked, tree.schedule(asked, 2)


def test_the_reduction_and_counts_are_the_callers() -> None:
    asked, schedule = read_msccl(ring_of(4))
    assert asked.kind in REDUCING
    run(replace(asked, reduction="add"), schedule, counts=3)  # fewer elements than chunks
    largest = replace(asked, reduction="maximum", counts=9)
    got = execute(largest, schedule, [np.full(9, v, np.float32) for v in (1, 7, 3, 2)])
    assert [x.tolist() for x in got] == [[7.0] * 9] * 4
    verify(largest, schedule)
