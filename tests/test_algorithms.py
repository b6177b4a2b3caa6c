"""Every algorithm, in every group size and shape that it accepts, does its collective.

`verify` is the judge: it runs a schedule on multisets of contributions.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from trnsim.collectives.algorithms import (
    bruck,
    hierarchical,
    kangaring,
    mesh,
    pairwise,
    rdh,
    ring,
    single_step,
    torus,
    tree,
)
from trnsim.collectives.execute import execute
from trnsim.collectives.schedule import KINDS, Block, Collective, Schedule
from trnsim.collectives.verify import WrongSchedule, verify
from trnsim.device.errors import BadInput, TrnsimError

from .collective_reference import assert_same, collective, random_inputs, reference, roots

FLAT = {
    "ring": ring,
    "mesh": mesh,
    "single_step_mesh": single_step,
    "rdh": rdh,
    "double_binary_tree": tree,
    "bruck": bruck,
    "pairwise": pairwise,
}
CASES = [(name, kind) for name, module in FLAT.items() for kind in module.KINDS]
SHAPES = [(x, y) for x in range(1, 12) for y in range(1, 12) if x * y <= 33]
TORI = [(4,), (2, 3), (3, 3), (4, 4), (2, 2, 2), (3, 2, 4), (2, 1, 3), (3, 3, 3), (2, 2, 2, 2)]


def shuffled(*shape: int, seed: int = 0) -> np.ndarray:
    """Group positions in some order."""
    return np.random.default_rng(seed).permutation(int(np.prod(shape))).reshape(shape)


def several_orders(n: int, channels: int = 3) -> np.ndarray:
    return np.stack([shuffled(n, seed=seed) for seed in range(channels)])


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_flat_algorithms_up_to_33_ranks(name: str, kind: str) -> None:
    for n in range(1, 34):
        for root in roots(kind, n):
            asked = collective(kind, n, root=root)
            verify(asked, FLAT[name].schedule(asked))


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_flat_algorithms_up_to_256_ranks(name: str, kind: str) -> None:
    quadratic = kind == "all_to_all" or (name, kind) == ("mesh", "all_reduce")
    for n in (48, 100) if quadratic else (64, 100, 256):
        asked = collective(kind, n, root=n - 1)
        if name == "double_binary_tree":
            verify(asked, tree.schedule(asked, 2))
        else:
            verify(asked, FLAT[name].schedule(asked))


@pytest.mark.parametrize("kind", ring.KINDS)
def test_rings_in_several_orders_share_the_data(kind: str) -> None:
    for n in (1, 2, 3, 7, 16, 33):
        asked = collective(kind, n, root=n // 2)
        for channels in (1, 2, 3):
            made = ring.schedule(asked, ring.both_ways(several_orders(n, channels)))
            verify(asked, made)
            assert made.channels == (2 * channels if n > 1 else 1)
            assert made.rounds == ring.schedule(asked).rounds


def test_disjoint_rings_load_every_link_of_a_torus_once() -> None:
    row, column = np.divmod(np.arange(16), 4)
    first = np.argsort(4 * row + (row + column) % 4)  # two Hamiltonian cycles of the 4x4 torus
    second = np.argsort(4 * column + (row + column) % 4)
    made = ring.schedule(collective("all_gather", 16), ring.both_ways(np.stack([first, second])))
    (block,) = made.blocks
    edges = set(zip(block.src.tolist(), block.dst.tolist(), strict=True))
    apart = [((row[a] - row[b]) % 4, (column[a] - column[b]) % 4) for a, b in sorted(edges)]
    assert len(edges) == 64 and set(apart) == {(0, 1), (0, 3), (1, 0), (3, 0)}


@pytest.mark.parametrize("kind", kangaring.KINDS)
def test_kangaring_on_all_shapes_of_chips(kind: str) -> None:
    for chips, each in SHAPES:
        for secondaries in (1, 2, 3):
            if each % (1 + secondaries):
                continue
            asked = collective(kind, chips * each)
            table, orders = shuffled(chips, each), several_orders(chips)
            verify(asked, kangaring.schedule(asked, table, orders, secondaries))
    asked = collective(kind, 256)
    verify(asked, kangaring.schedule(asked, shuffled(64, 4)))


def test_kangaring_halves_the_hops_and_saves_touches() -> None:
    for kind, mine, theirs in [("all_gather", 3, 4), ("reduce_scatter", 4, 6)]:
        asked = collective(kind, 16)
        hop = max(kangaring.schedule(asked, np.arange(16).reshape(4, 4)).blocks, key=_count)
        assert hop.count == 7 and sum(a.sum() for a in hop.touches) == 8 * mine
        (plain,) = ring.schedule(asked).blocks
        assert plain.count == 15 and sum(a.sum() for a in plain.touches) == 8 * theirs


def _count(block: Block) -> int:
    return block.count


def test_kangaring_refuses_what_it_cannot_do() -> None:
    with pytest.raises(BadInput, match="^collective of algorithm kangaring: broadcast is not"):
        kangaring.schedule(collective("broadcast", 4), [[0, 1], [2, 3]])
    with pytest.raises(BadInput, match="^ranks per chip: 3 is not valid; allowed: a multiple of 2"):
        kangaring.schedule(collective("all_reduce", 3), [[0, 1, 2]])
    with pytest.raises(BadInput, match="^secondaries of algorithm kangaring: 4 is not valid"):
        kangaring.schedule(collective("all_reduce", 5), np.arange(5)[None], secondaries=4)
    with pytest.raises(BadInput, match="^chips: .* is not valid; allowed: each of 0..3 once"):
        kangaring.schedule(collective("all_reduce", 4), [[0, 1], [2, 2]])


@pytest.mark.parametrize("kind", mesh.TWO_STEP)
def test_two_step_mesh_on_all_shapes_of_chips(kind: str) -> None:
    for chips, each in SHAPES:
        asked = collective(kind, chips * each)
        verify(asked, mesh.schedule(asked, shuffled(chips, each)))
    asked = collective(kind, 128)
    verify(asked, mesh.schedule(asked, shuffled(32, 4)))


def test_a_mesh_sends_each_piece_once_to_each_other_chip() -> None:
    made = mesh.schedule(collective("all_gather", 64), np.arange(64).reshape(16, 4))
    first, second = made.blocks
    away = first.src // 4 != first.dst // 4
    assert away.sum() == 64 * 15 and not (second.src // 4 != second.dst // 4).any()
    taken = np.bincount(first.dst[away], minlength=64)
    assert set(taken.tolist()) == {15}  # one rank of each other chip sends to each rank
    assert (~away).sum() == 64 * 3 and second.transfers == 64 * 15 * 3


@pytest.mark.parametrize("kind", hierarchical.KINDS)
@pytest.mark.parametrize("intra", hierarchical.INTRA)
@pytest.mark.parametrize("inter", hierarchical.INTER)
def test_hierarchies_of_every_pair_of_steps(kind: str, intra: str, inter: str) -> None:
    for x, y in [(1, 1), (1, 4), (4, 1), (2, 2), (3, 4), (5, 2), (2, 8), (4, 6)]:
        if kind != "all_to_all" and not _served(kind, intra, inter, y):
            with pytest.raises(BadInput):
                _hierarchy(kind, x, y, intra, inter, 1)
            continue
        for stages in (1, 2, 3):
            verify(*_hierarchy(kind, x, y, intra, inter, stages))


def _served(kind: str, intra: str, inter: str, y: int) -> bool:
    inside = ("reduce_scatter", "all_gather") if kind == "all_reduce" else (kind,)
    if not set(inside) <= set(hierarchical.MODULES[intra].KINDS):
        return False
    return kind in hierarchical.MODULES[inter].KINDS and (intra != "kangaring" or y % 2 == 0)


def _hierarchy(
    kind: str, x: int, y: int, intra: str, inter: str, stages: int
) -> tuple[Collective, Schedule]:
    asked = collective(kind, x * y, root=x * y // 2)
    chips = np.arange(y).reshape(-1, 2) if y % 2 == 0 else None
    rings = {"ring": y, "kangaring": 0 if chips is None else len(chips)}.get(intra)
    orders = several_orders(rings, 2) if rings else None
    places = shuffled(x, y)
    made = hierarchical.schedule(
        asked, places, intra, inter, stages=stages, orders=orders, chips=chips
    )
    return asked, made


@pytest.mark.parametrize("kind", hierarchical.KINDS)
def test_hierarchies_of_every_shape_up_to_33(kind: str) -> None:
    for x, y in SHAPES:
        for intra, inter in (("ring", "rdh"), ("mesh", "ring"), ("rdh", "mesh")):
            asked = collective(kind, x * y, root=x * y - 1)
            verify(asked, hierarchical.schedule(asked, shuffled(x, y), intra, inter))
    if kind != "all_to_all":
        asked = collective(kind, 256)
        verify(asked, hierarchical.schedule(asked, shuffled(4, 64), "ring", "rdh"))


def test_pipeline_stages_are_lanes_on_channels_of_their_level() -> None:
    asked = collective("all_reduce", 12)
    made = hierarchical.schedule(asked, np.arange(12).reshape(3, 4), stages=3)
    phases = [(b.lane, int(b.channel[0])) for b in made.blocks]
    # Stages 0, 1, 2 through reduce_scatter, all_reduce (two blocks, on channel 1), all_gather.
    assert phases == [
        (0, 0),
        *[(0, 1), (0, 1), (1, 0)],
        *[(0, 0), (1, 1), (1, 1), (2, 0)],
        *[(1, 0), (2, 1), (2, 1)],
        (2, 0),
    ]
    assert made.lanes == 3 and made.parts == 3 * 4 * 3


@pytest.mark.parametrize("dims", TORI)
@pytest.mark.parametrize("kind", torus.KINDS)
def test_tori_of_any_dimensions(kind: str, dims: tuple[int, ...]) -> None:
    n = int(np.prod(dims))
    for channels in {1, 2, 2 * len(dims)}:
        asked = collective(kind, n, 7, root=n // 2, dtype="i32")
        made = torus.schedule(asked, shuffled(*dims), channels)
        verify(asked, made)
        inputs = random_inputs(asked)
        assert_same(execute(asked, made, inputs), reference(asked, inputs))


def test_torus_rings_run_along_one_dimension() -> None:
    places = np.arange(60).reshape(3, 4, 5)
    made = torus.schedule(collective("all_reduce", 60), places, 6)
    at = np.stack(np.unravel_index(np.arange(60), places.shape))
    for b in made.flat.blocks:
        differ = at[:, b.src] != at[:, b.dst]
        assert (differ.sum(axis=0) == 1).all() and (differ == differ[:, :1]).all()
    assert all(b.count in (2, 3, 4) for b in made.blocks)  # both ways in one block
    first = {b.lane: at[:, b.flat.src[0]] != at[:, b.flat.dst[0]] for b in made.blocks[:3]}
    assert [int(np.argmax(first[lane])) for lane in range(3)] == [2, 1, 0]
    assert made.lanes == 3 and made.channels == 6


def test_torus_refuses_other_channels_and_kinds() -> None:
    asked = collective("all_reduce", 4)
    with pytest.raises(BadInput, match="^channels of algorithm torus: 3 is not valid; .* 1, 2, 4"):
        torus.schedule(asked, np.arange(4).reshape(2, 2), 3)
    with pytest.raises(BadInput, match="^collective of algorithm torus: all_to_all is not valid"):
        torus.schedule(collective("all_to_all", 4), np.arange(4).reshape(2, 2))
    with pytest.raises(BadInput, match="^places: .* is not valid; allowed: each of 0..3 once"):
        torus.schedule(asked, np.zeros((2, 2), int))


@pytest.mark.parametrize("n", [*range(1, 34), 100, 256])
def test_no_rank_is_inside_both_trees(n: int) -> None:
    up = tree.parents(n)
    assert (up < 0).sum() == 1
    children = np.bincount(up[up >= 0], minlength=n)
    assert children.max(initial=0) <= 2 and tree.depths(up).max() <= n.bit_length()
    moved = np.roll(children, -1)  # node j of the second tree is rank j - 1
    assert not ((children > 0) & (moved > 0)).any()


@pytest.mark.parametrize("chunks", [1, 2, 5, 32])
def test_trees_in_any_number_of_chunks(chunks: int) -> None:
    for kind in tree.KINDS:
        for n in (1, 2, 3, 12, 17):
            asked = collective(kind, n, root=n // 3)
            made = tree.schedule(asked, chunks)
            verify(asked, made)
    up = tree.parents(17)
    whole = tree.schedule(collective("all_reduce", 17), chunks)
    assert whole.rounds == tree.heights(up).max() + tree.depths(up).max() + chunks - 1
    assert len(whole.blocks) <= 2 * (tree.heights(up).max() + tree.depths(up).max() + 1)
    with pytest.raises(BadInput, match="^chunks of algorithm double_binary_tree: 0 is not valid"):
        tree.schedule(collective("all_reduce", 2), 0)


def test_bruck_takes_log_n_rounds_for_any_group() -> None:
    for n, rounds in [(2, 1), (3, 2), (8, 3), (9, 4), (33, 6)]:
        for kind in bruck.KINDS:
            assert bruck.schedule(collective(kind, n)).rounds == rounds


@pytest.mark.parametrize("kind", KINDS)
def test_other_kinds_are_refused_by_name(kind: str) -> None:
    for name, module in FLAT.items():
        if kind not in module.KINDS:
            message = f"^collective of algorithm {name}: {kind} is not valid; allowed: one of "
            with pytest.raises(BadInput, match=message):
                module.schedule(collective(kind, 4))


def test_large_groups_are_small_arrays() -> None:
    places = np.arange(64 * 16384).reshape(16384, 64)
    asked = Collective("all_reduce", places.size, 2**20, reduction="add")
    made = hierarchical.schedule(
        asked, places, "kangaring", "rdh", chips=np.arange(64).reshape(16, 4)
    )
    columns = ("src", "dst", "base", "span", "offset", "step", "reduce", "channel")
    tables = {id(t): t for b in made.blocks for t in (getattr(b, f) for f in columns)}
    held = sum(t.nbytes for t in tables.values() if t.strides != (0,))
    assert held < 20 * 10**6  # 28 rounds of 16,384 transfers, not of a million
    assert len({id(b.who) for b in made.blocks}) == 2  # one table per level


# --- mutations ---

FIELDS = ("src", "dst", "base", "span", "offset", "step", "reduce", "channel", "fused", "into")


def schedules(n: int) -> Iterator[tuple[Collective, Schedule]]:
    """One of every algorithm and kind over n ranks (an even number)."""
    for name, kind in CASES:
        asked = collective(kind, n, 4 * n, root=n // 2, dtype="i64")
        chunked = partial(tree.schedule, chunks=2)
        make = chunked if name == "double_binary_tree" else FLAT[name].schedule
        yield asked, make(asked)
    halves = shuffled(2, n // 2)
    for kind in hierarchical.KINDS:
        asked = collective(kind, n, 4 * n, root=1, dtype="i64")
        yield asked, hierarchical.schedule(asked, halves, "ring", "mesh", stages=2)
        if kind != "all_to_all":
            yield asked, torus.schedule(asked, halves, 4)
    for kind in kangaring.KINDS:
        asked = collective(kind, n, 4 * n, dtype="i64")
        yield asked, kangaring.schedule(asked, halves.T, several_orders(n // 2, 2))


def unrolled(schedule: Schedule) -> list[Block]:
    """The rounds as blocks of their own."""
    return [
        replace(b, base=b.first(k), step=np.zeros_like(b.step), count=1)
        for b, k in schedule.each_round()
    ]


def mutated(schedule: Schedule, draw) -> Schedule:
    """One transfer of one round changed in one field, dropped, or done twice; or rounds swapped."""
    blocks = unrolled(schedule)
    assume(blocks)
    number = draw(st.integers(0, len(blocks) - 1))
    old = blocks[number]
    row = draw(st.integers(0, old.transfers - 1))
    what = draw(st.sampled_from(["drop", "twice", "swap", "src", "dst", "base", "reduce", "span"]))
    if what == "swap":
        other = draw(st.integers(0, len(blocks) - 1))
        blocks[number], blocks[other] = blocks[other], blocks[number]
        return replace(schedule, blocks=tuple(blocks))
    if what in ("drop", "twice"):
        rows = np.arange(old.transfers)
        rows = np.delete(rows, row) if what == "drop" else np.append(rows, row)
        kept = {f: getattr(old, f) for f in FIELDS}
        columns = {f: column[rows] for f, column in kept.items() if column is not None}
    else:
        column = np.array(getattr(old, what))
        high = {"src": schedule.ranks, "dst": schedule.ranks, "reduce": 2}.get(what) or old.modulus
        column[row] = draw(st.integers(0, high - 1))
        columns = {what: column}
    blocks[number] = replace(old, **columns)
    return replace(schedule, blocks=tuple(blocks))


ALL = [*schedules(6)]


@given(st.integers(0, len(ALL) - 1), st.data())
@settings(max_examples=400, deadline=None)
def test_a_mutation_that_changes_the_result_is_caught(case: int, data: st.DataObject) -> None:
    asked, right = ALL[case]
    wrong = mutated(right, data.draw)
    # Sums with a missing or doubled term differ, and so do elements of different places.
    inputs = [10**rank * np.arange(1, 1 + asked.input_count(rank)) for rank in range(asked.ranks)]
    try:
        got = execute(asked, wrong, inputs)
        changed = any(
            not np.array_equal(a, b) for a, b in zip(got, reference(asked, inputs), strict=True)
        )
    except (TrnsimError, KeyError):  # a rank sends what it does not have, or to nobody
        changed = True
    if changed:
        with pytest.raises(WrongSchedule):
            verify(asked, wrong)


def test_the_mutated_schedules_are_right_before() -> None:
    for asked, made in ALL:
        verify(asked, made)
        inputs = random_inputs(asked)
        assert_same(execute(asked, made, inputs), reference(asked, inputs))


@given(st.integers(0, len(ALL) - 1), st.integers(0, 10**6))
@settings(max_examples=200, deadline=None)
def test_uneven_counts_and_empty_legs(case: int, seed: int) -> None:
    shape, made = ALL[case]
    if shape.kind == "barrier":
        return
    counts = np.random.default_rng(seed).integers(0, 4, shape.pieces) * 3
    asked = replace(shape, counts=tuple(counts.tolist()))
    inputs = random_inputs(asked, seed)
    assert_same(execute(asked, made, inputs), reference(asked, inputs))


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_all_ranks_of_an_all_reduce_end_with_the_same_bits(dtype: str) -> None:
    for shape, made in ALL:
        if shape.kind == "all_reduce":
            asked = replace(shape, dtype=dtype, counts=97)
            got = execute(asked, made, random_inputs(asked))
            assert_same(got, [got[0]] * asked.ranks)
