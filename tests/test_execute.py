"""Values of collectives against numpy, bit by bit where the order of reduction says which bits."""

from collections import deque
from collections.abc import Iterator
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trnsim.collectives.algorithms import (
    bruck,
    hierarchical,
    mesh,
    pairwise,
    rdh,
    ring,
    single_step,
    tree,
)
from trnsim.collectives.execute import RankView, combine, execute, make_views, run_views
from trnsim.collectives.schedule import REDUCING, ROOTED, Collective, Schedule
from trnsim.device.dtypes import numpy_dtype
from trnsim.device.errors import CollectiveMismatch, TrnsimError

from .collective_reference import assert_same, collective, random_inputs, reference

ALGORITHMS = {
    "ring": ring,
    "mesh": mesh,
    "single_step_mesh": single_step,
    "rdh": rdh,
    "double_binary_tree": tree,
    "bruck": bruck,
    "pairwise": pairwise,
}
CASES = [(name, kind) for name, module in ALGORITHMS.items() for kind in module.KINDS]


@st.composite
def collectives(draw: st.DrawFn, kind: str, dtype: str = "i32") -> Collective:
    n = draw(st.integers(1, 17))
    pairs: tuple[tuple[int, int], ...] = ()
    if kind == "permute":
        targets = draw(st.permutations(range(n)))
        pairs = tuple(enumerate(targets))[: draw(st.integers(0, n))]
    if kind == "sendrecv":
        pairs = tuple(draw(st.lists(st.tuples(*[st.integers(0, n - 1)] * 2), max_size=9)))
    root = draw(st.integers(0, n - 1)) if kind in ROOTED else 0
    reduction = "add" if kind in REDUCING else None
    asked = Collective(kind, n, 1, dtype=dtype, reduction=reduction, root=root, pairs=pairs)
    pieces = asked.pieces
    size = st.integers(0, 40 if pieces == 1 else 5)
    uneven = st.lists(size, min_size=pieces, max_size=pieces).map(tuple)
    counts = 1 if kind == "barrier" else draw(size if kind == "permute" else size | uneven)
    return replace(asked, counts=counts)


@pytest.mark.parametrize(("name", "kind"), CASES)
@given(data=st.data())
@settings(max_examples=12, deadline=None)
def test_every_algorithm_agrees_with_numpy(name: str, kind: str, data: st.DataObject) -> None:
    asked = data.draw(collectives(kind))
    inputs = random_inputs(asked)
    assert_same(execute(asked, ALGORITHMS[name].schedule(asked), inputs), reference(asked, inputs))


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_every_group_size_agrees_with_numpy(name: str, kind: str) -> None:
    for n in (1, 2, 3, 5, 8, 13, 17):
        asked = collective(kind, n, 7, root=n // 2, dtype="i32")
        inputs = random_inputs(asked)
        got = execute(asked, ALGORITHMS[name].schedule(asked), inputs)
        assert_same(got, reference(asked, inputs))


@pytest.mark.parametrize("intra", ["ring", "mesh", "rdh"])
@pytest.mark.parametrize("inter", ["ring", "mesh", "rdh"])
def test_hierarchies_agree_with_numpy_in_any_rank_order(intra: str, inter: str) -> None:
    rng = np.random.default_rng(3)
    for x, y in [(2, 3), (3, 2), (1, 4), (4, 1), (3, 5)]:
        places = hierarchical.places_of(rng.permutation(np.repeat(np.arange(x), y)))
        for kind in hierarchical.KINDS:
            counts = rng.integers(0, 6, collective(kind, x * y).pieces) + 30
            asked = collective(kind, x * y, counts.tolist(), root=x * y - 1, dtype="i32")
            inputs = random_inputs(asked)
            got = execute(asked, hierarchical.schedule(asked, places, intra, inter), inputs)
            assert_same(got, reference(asked, inputs))


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32", "f64"])
@pytest.mark.parametrize("name", ["ring", "mesh", "rdh"])
def test_an_all_reduce_ends_bitwise_equal_and_near_the_sum(name: str, dtype: str) -> None:
    for n in (2, 3, 6, 7, 8, 12):
        asked = Collective("all_reduce", n, 50, dtype=dtype, reduction="add")
        inputs = random_inputs(asked, seed=n)
        got = execute(asked, ALGORITHMS[name].schedule(asked), inputs)
        assert_same(got, [got[0]] * n)
        exact = np.sum([x.astype(np.float64) for x in inputs], axis=0)
        bound = n * float(ml_dtypes.finfo(numpy_dtype(dtype)).eps)
        scale = np.sum([np.abs(x.astype(np.float64)) for x in inputs], axis=0)
        assert (np.abs(got[0].astype(np.float64) - exact) <= bound * scale).all()


def test_a_ring_rounds_to_bf16_at_each_transfer_in_ring_order() -> None:
    n = 5
    asked = Collective("all_reduce", n, n, dtype="bf16", reduction="add")
    inputs = random_inputs(asked)
    got = execute(asked, ring.schedule(asked), inputs)[0]
    for chunk in range(n):  # it starts at the rank after its owner and ends at the owner
        total = inputs[(chunk + 1) % n][chunk]
        for rank in range(chunk + 2, chunk + n + 1):
            own = np.float32(inputs[rank % n][chunk])
            total = ml_dtypes.bfloat16(own + np.float32(total))
        assert got[chunk] == total


def test_a_mesh_adds_in_rank_order_to_the_owner() -> None:
    asked = Collective("all_reduce", 3, 3, dtype="f32", reduction="add")
    big = np.float32(2**24)
    inputs = [np.full(3, v, np.float32) for v in (1, big, 1)]
    got = execute(asked, mesh.schedule(asked), inputs)[0]
    # Chunk 0: (1 + big) + 1; chunk 1: (big + 1) + 1; chunk 2: (1 + 1) + big. big + 1 is big.
    assert got.tolist() == [big, big, big + 2]


@pytest.mark.parametrize(
    ("dtype", "reduction", "values", "expected"),
    [
        ("ui8", "add", ([250], [10]), [4]),
        ("i32", "add", ([2**31 - 1], [1]), [-(2**31)]),
        ("i64", "multiply", ([3], [2**40]), [3 * 2**40]),
        ("i16", "minimum", ([-5, 9], [4, 2]), [-5, 2]),
        ("ui32", "and", ([12], [10]), [8]),
        ("ui32", "or", ([12], [10]), [14]),
        ("i1", "and", ([True, True], [True, False]), [True, False]),
        ("i1", "or", ([False, True], [False, False]), [False, True]),
        ("i1", "add", ([True, False], [True, False]), [True, False]),
        ("i1", "maximum", ([True, False], [False, False]), [True, False]),
        ("f32", "maximum", ([1.5, -2.0], [0.5, np.inf]), [1.5, np.inf]),
        ("f16", "multiply", ([300.0], [300.0]), [np.inf]),
        ("bf16", "minimum", ([1.0], [-3.0]), [-3.0]),
    ],
)
def test_reductions_of_all_dtypes(dtype: str, reduction: str, values, expected) -> None:
    kind = numpy_dtype(dtype)
    asked = Collective("all_reduce", 2, len(expected), dtype=dtype, reduction=reduction)
    inputs = [np.array(row).astype(kind) for row in values]
    for name in ("ring", "mesh", "rdh"):
        got = execute(asked, ALGORITHMS[name].schedule(asked), inputs)
        assert_same(got, [np.array(expected).astype(kind)] * 2)


@pytest.mark.parametrize("reduction", ["minimum", "maximum", "add", "multiply"])
def test_nan_spreads_through_a_reduction(reduction: str) -> None:
    held, arrived = np.array([np.nan, 1], np.float32), np.array([1, np.nan], np.float32)
    combine(reduction, held, arrived, out=held)
    assert np.isnan(held).all()


def run_shuffled(
    asked: Collective, schedule: Schedule, inputs: list[np.ndarray], seed: int
) -> list[np.ndarray]:
    """Every rank by itself, in a random order, with mailboxes between pairs: as actors would."""
    outputs = [np.empty(asked.output_count(r), x.dtype) for r, x in enumerate(inputs)]
    views = make_views(asked, schedule, inputs, outputs)
    mail: dict[tuple[int, int], deque[bytes]] = {}

    def program(view: RankView) -> Iterator[None]:
        for step in view.rounds():
            for send in step.sends:
                box = mail.setdefault((view.rank, send.peer), deque())
                box.append(send.payload().tobytes())
            for receive in step.receives:
                while not mail.get((receive.peer, view.rank)):
                    yield
                message = mail[receive.peer, view.rank].popleft()
                receive.apply(np.frombuffer(message, view.output.dtype))
            yield
        view.finish()

    rng, running = np.random.default_rng(seed), [program(view) for view in views]
    for _ in range(100_000):
        if not running:
            break
        one = running[rng.integers(len(running))]
        if next(one, running) is running:
            running.remove(one)
    assert not running and not any(mail.values())
    return outputs


@pytest.mark.parametrize(("name", "kind"), CASES)
@given(data=st.data(), seed=st.integers(0, 99))
@settings(max_examples=6, deadline=None)
def test_ranks_on_their_own_give_the_same_bytes(name: str, kind: str, data, seed: int) -> None:
    asked = data.draw(collectives(kind, dtype="bf16"))
    schedule = ALGORITHMS[name].schedule(asked)
    inputs = random_inputs(asked)
    assert_same(run_shuffled(asked, schedule, inputs, seed), execute(asked, schedule, inputs))


def test_a_round_has_one_message_per_pair_with_all_its_chunks() -> None:
    asked = Collective("all_reduce", 4, 10, dtype="f32", reduction="add")
    inputs = [np.zeros(10, np.float32) for _ in range(4)]
    view = RankView(asked, rdh.schedule(asked), 1, inputs[1], inputs[1])
    shape = [
        ([(s.peer, s.count) for s in r.sends], [(v.peer, v.count) for v in r.receives])
        for r in view.rounds()
        for _ in [[s.payload() for s in r.sends]]
        for _ in [[v.apply(np.zeros(v.count, np.float32)) for v in r.receives]]
    ]  # 10 elements in 4 chunks: 3, 3, 2, 2
    assert shape == [
        ([(3, 4)], [(3, 6)]),
        ([(0, 3)], [(0, 3)]),
        ([(0, 3)], [(0, 3)]),
        ([(3, 6)], [(3, 4)]),
    ]


@pytest.mark.parametrize("name", ["ring", "mesh", "rdh"])
def test_an_all_reduce_may_be_in_place(name: str) -> None:
    asked = Collective("all_reduce", 5, 13, dtype="i32", reduction="add")
    buffers = random_inputs(asked)
    expected = reference(asked, [b.copy() for b in buffers])
    run_views(make_views(asked, ALGORITHMS[name].schedule(asked), buffers, buffers))
    assert_same(buffers, expected)


def test_other_overlaps_of_input_and_output_are_safe() -> None:
    asked = Collective("all_to_all", 4, 2, dtype="i32")
    buffers = random_inputs(asked)
    expected = reference(asked, [b.copy() for b in buffers])
    run_views(make_views(asked, pairwise.schedule(asked), buffers, buffers))
    assert_same(buffers, expected)


def test_inputs_are_left_alone() -> None:
    for name, kind in CASES:
        asked = collective(kind, 3, 6, dtype="f32")
        inputs = random_inputs(asked)
        before = [x.tobytes() for x in inputs]
        execute(asked, ALGORITHMS[name].schedule(asked), inputs)
        assert [x.tobytes() for x in inputs] == before


@pytest.mark.parametrize("n", [6, 7, 12])
@pytest.mark.parametrize("name", [name for name, kind in CASES if kind == "all_reduce"])
def test_ones_sum_to_the_number_of_ranks(name: str, n: int) -> None:  # U2
    asked = Collective("all_reduce", n, 1_200_000 // 4 // n, dtype="f32", reduction="add")
    ones = [np.ones(asked.input_count(rank), np.float32) for rank in range(n)]
    got = execute(asked, ALGORITHMS[name].schedule(asked), ones)
    assert all((result == n).all() for result in got)


@pytest.mark.parametrize("name", [name for name, kind in CASES if kind == "all_reduce"])
def test_singleton_groups_are_the_identity(name: str) -> None:  # U9
    asked = Collective("all_reduce", 1, 1, dtype="i32", reduction="add")
    for rank in range(8):
        got = execute(asked, ALGORITHMS[name].schedule(asked), [np.array([rank], np.int32)])
        assert got[0].tolist() == [rank]


@pytest.mark.parametrize(("group", "total"), [([0, 1, 2, 3], 10), ([4, 5, 6, 7], 26), ([2, 3], 7)])
@pytest.mark.parametrize("name", [name for name, kind in CASES if kind == "all_reduce"])
def test_subgroups_reduce_their_own_ranks(name: str, group: list[int], total: int) -> None:  # U10
    asked = Collective("all_reduce", len(group), 1, dtype="i32", reduction="add")
    inputs = [np.array([rank + 1], np.int32) for rank in group]
    got = execute(asked, ALGORITHMS[name].schedule(asked), inputs)
    assert [x.tolist() for x in got] == [[total]] * len(group)


@pytest.mark.parametrize("name", [name for name, kind in CASES if kind == "all_gather"])
def test_a_subgroup_gathers_its_own_shape(name: str) -> None:  # U10
    asked = Collective("all_gather", 4, 2 * 4, dtype="i32")
    inputs = [np.full((2, 4), rank, np.int32).reshape(-1) for rank in (1, 3, 4, 6)]
    for result in execute(asked, ALGORITHMS[name].schedule(asked), inputs):
        assert result.reshape(8, 4)[:, 0].tolist() == [1, 1, 3, 3, 4, 4, 6, 6]


@pytest.mark.parametrize("name", [name for name, kind in CASES if kind == "all_gather"])
def test_an_uneven_all_gather_keeps_rank_order(name: str) -> None:  # U11
    asked = Collective("all_gather", 2, (5 * 3, 4 * 3), dtype="i32")
    inputs = [np.arange(15, dtype=np.int32), np.arange(15, 27, dtype=np.int32)]
    got = execute(asked, ALGORITHMS[name].schedule(asked), inputs)
    assert [x.reshape(9, 3).tolist() for x in got] == [np.arange(27).reshape(9, 3).tolist()] * 2


def test_an_output_that_is_not_written_is_left_alone() -> None:
    asked = Collective("reduce", 3, 4, dtype="i32", reduction="add", root=1)
    inputs = [np.full(4, 1 + rank, np.int32) for rank in range(3)]
    outputs = [np.full(4, -1, np.int32) for _ in range(3)]
    run_views(make_views(asked, rdh.schedule(asked), inputs, outputs))
    assert [x.tolist() for x in outputs] == [[-1] * 4, [6] * 4, [-1] * 4]


def test_a_batch_of_messages_may_use_a_rank_several_times() -> None:
    asked = Collective(
        "sendrecv", 3, (1, 2, 0, 1), dtype="i32", pairs=((0, 2), (0, 1), (1, 0), (1, 2))
    )
    inputs = [np.array([5, 6, 7], np.int32), np.array([8], np.int32), np.empty(0, np.int32)]
    got = execute(asked, mesh.schedule(asked), inputs)
    assert [x.tolist() for x in got] == [[], [6, 7], [5, 8]]


def test_all_ranks_of_a_single_step_add_in_rank_order() -> None:
    asked = Collective("all_reduce", 4, 1, dtype="f32", reduction="add")
    inputs = [np.array([v], np.float32) for v in (2.0**24, 1, 1, -(2.0**24))]
    got = execute(asked, single_step.schedule(asked), inputs)
    assert [x.tolist() for x in got] == [[0.0]] * 4  # ((big + 1) + 1) - big, big + 1 is big


def test_a_permute_gives_zeros_to_a_rank_that_gets_nothing() -> None:
    asked = Collective("permute", 3, 2, dtype="i32", pairs=((0, 0), (1, 2)))
    inputs = [np.full(2, 5 + rank, np.int32) for rank in range(3)]
    got = execute(asked, mesh.schedule(asked), inputs)
    assert [x.tolist() for x in got] == [[5, 5], [0, 0], [6, 6]]


def test_mismatched_counts_are_refused_before_data_moves() -> None:  # U13
    asked = Collective("all_reduce", 3, 409_598, dtype="i8", reduction="add")
    inputs = [np.zeros(409_600 if rank == 0 else 409_598, np.int8) for rank in range(3)]
    message = "^all_reduce: input of rank 0 has 409600 elements, the collective has 409598$"
    with pytest.raises(CollectiveMismatch, match=message):
        execute(asked, ring.schedule(asked), inputs)


def test_a_wrong_dtype_or_number_of_ranks_is_refused() -> None:
    asked = Collective("all_reduce", 2, 2, dtype="f32", reduction="add")
    inputs = [np.zeros(2, np.float32), np.zeros(2, np.float64)]
    with pytest.raises(CollectiveMismatch, match="^all_reduce: input of rank 1 is f64, the coll"):
        execute(asked, ring.schedule(asked), inputs)
    with pytest.raises(CollectiveMismatch, match="^all_reduce: 1 inputs for 2 ranks$"):
        execute(asked, ring.schedule(asked), inputs[:1])


def test_a_message_of_the_wrong_size_is_refused() -> None:
    asked = Collective("broadcast", 2, 4, dtype="f32")
    output = np.empty(4, np.float32)
    view = RankView(asked, mesh.schedule(asked), 1, np.empty(0, np.float32), output)
    receive = next(view.rounds()).receives[0]
    message = "^broadcast: rank 1 expects 4 elements of f32 from rank 0, got 3 of float32$"
    with pytest.raises(CollectiveMismatch, match=message):
        receive.apply(np.zeros(3, np.float32))


def test_finishing_too_early_is_refused() -> None:
    asked = Collective("broadcast", 2, 4, dtype="f32")
    buffers = np.empty(0, np.float32), np.empty(4, np.float32)
    with pytest.raises(TrnsimError, match="^rank 1: chunk 0 never arrived$"):
        RankView(asked, mesh.schedule(asked), 1, *buffers).finish()
