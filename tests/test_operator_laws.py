"""Operators on any shape, against StableHLO's definitions written out element by element."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from trnsim.device.ops import values_sort
from trnsim.device.ops.evaluate import evaluate
from trnsim.device.ops.ir import Block, Operation, TensorType
from trnsim.device.ops.regions import combine

I32 = "i32"
laws = settings(max_examples=60, deadline=None)
small = st.integers(1, 4)


def block(*names: str, dtype: str = I32, count: int = 2) -> tuple[Block, tuple[TensorType, ...]]:
    """A region of `count` scalars that applies the operators in turn to the first two."""
    types = (TensorType((), dtype),) * (count + len(names))
    operations, last = [], 0
    for i, name in enumerate(names):
        operations.append(Operation(name, (last, 1), (count + i,)))
        last = count + i
    return Block(tuple(range(count)), tuple(operations), (last,)), types


def compute(
    name: str, shape: tuple[int, ...], *inputs: np.ndarray, regions: tuple = (), **attributes: Any
) -> np.ndarray:
    """One operator of int32 operands with regions over scalars of the numbers 0, 1, 2, ..."""
    types = [TensorType((), I32)] * 8
    types.append(TensorType(shape, I32))
    operation = Operation(name, tuple(range(len(inputs))), (8,), attributes, regions)
    return evaluate(operation, list(inputs), types)[0]


def draw_array(data: st.DataObject, shape: tuple[int, ...], low: int = -9, high: int = 9) -> Any:
    seed = data.draw(st.integers(0, 1 << 16))
    return np.random.default_rng(seed).integers(low, high, shape, endpoint=True).astype(np.int32)


@given(st.data())
@laws
def test_pad_places_every_element(data: st.DataObject) -> None:
    x = draw_array(data, tuple(data.draw(st.lists(small, min_size=1, max_size=3))))
    low = [data.draw(st.integers(-2, 3)) for _ in x.shape]
    interior = [data.draw(st.integers(0, 2)) for _ in x.shape]
    spread = [n + (n - 1) * i for n, i in zip(x.shape, interior, strict=True)]
    high = [data.draw(st.integers(max(-2, -s - a), 3)) for s, a in zip(spread, low, strict=True)]
    shape = tuple(s + a + b for s, a, b in zip(spread, low, high, strict=True))
    expected = np.full(shape, 99, np.int32)
    for index in np.ndindex(x.shape):
        place = tuple(a + k * (i + 1) for a, k, i in zip(low, index, interior, strict=True))
        if all(0 <= p < n for p, n in zip(place, shape, strict=True)):
            expected[place] = x[index]
    value = np.array(99, np.int32)
    found = compute("pad", shape, x, value, low=low, high=high, interior=interior)
    np.testing.assert_array_equal(found, expected)


def addressed(data: st.DataObject) -> tuple[np.ndarray, np.ndarray, dict[str, Any], tuple]:
    """An operand with one batching dimension, indices, dimension numbers, and window sizes."""
    rank = data.draw(st.integers(2, 4))
    shape = tuple(data.draw(small) for _ in range(rank))
    batching = data.draw(st.sampled_from([(), (0,)]))
    free = [d for d in range(rank) if d not in batching]
    index_map = tuple(data.draw(st.permutations(free)))[: data.draw(st.integers(1, len(free)))]
    dropped = tuple(d for d in free if data.draw(st.booleans()))
    sizes = tuple(
        1 if d in (*dropped, *batching) else data.draw(st.integers(1, n))
        for d, n in enumerate(shape)
    )
    batch = [shape[0]] if batching else []
    batch += [data.draw(small)]
    vector = data.draw(st.integers(0, len(batch)))
    indices_shape = (*batch[:vector], len(index_map), *batch[vector:])
    indices = draw_array(data, indices_shape, -2, 4)
    places = [d for d in range(len(indices_shape)) if d != vector]
    numbers = {
        "index_map": index_map,
        "dropped": dropped,
        "batching": batching,
        "indices_batching": tuple(places[:1]) if batching else (),
        "vector": vector,
    }
    return draw_array(data, shape), indices, numbers, sizes


def start_of(indices: np.ndarray, batch: tuple[int, ...], n: dict[str, Any], rank: int) -> list:
    """Where the window of a batch position starts, in the operand."""
    vector = np.moveaxis(indices, n["vector"], -1)[batch]
    start = [0] * rank
    for d, value in zip(n["index_map"], vector, strict=True):
        start[d] = int(value)
    if n["batching"]:
        start[0] = batch[0]
    return start


def window_places(data: st.DataObject, batch_rank: int, kept: int) -> tuple[int, ...]:
    """Dimensions of a result of that many batch and window dimensions that are the window's."""
    chosen = data.draw(st.permutations(range(batch_rank + kept)))[:kept]
    return tuple(sorted(chosen))


@given(st.data())
@laws
def test_gather_takes_clamped_windows(data: st.DataObject) -> None:
    x, indices, n, sizes = addressed(data)
    batch = np.moveaxis(indices, n["vector"], -1).shape[:-1]
    kept = [d for d in range(x.ndim) if d not in (*n["dropped"], *n["batching"])]
    offset_dims = window_places(data, len(batch), len(kept))
    rank = len(batch) + len(kept)
    others = [d for d in range(rank) if d not in offset_dims]
    shape = [0] * rank
    for d, extent in zip((*others, *offset_dims), (*batch, *(sizes[k] for k in kept)), strict=True):
        shape[d] = extent
    expected = np.zeros(shape, np.int32)
    for place in np.ndindex(*shape):
        start = start_of(indices, tuple(place[d] for d in others), n, x.ndim)
        where = [min(max(s, 0), e - z) for s, e, z in zip(start, x.shape, sizes, strict=True)]
        for d, k in zip(offset_dims, kept, strict=True):
            where[k] += place[d]
        expected[place] = x[tuple(where)]
    found = compute(
        "gather", tuple(shape), x, indices, offset_dims=offset_dims,
        collapsed_slice_dims=n["dropped"], operand_batching_dims=n["batching"],
        start_indices_batching_dims=n["indices_batching"], start_index_map=n["index_map"],
        index_vector_dim=n["vector"], slice_sizes=sizes,
    )  # fmt: skip
    np.testing.assert_array_equal(found, expected)


REGIONS: dict[str, tuple[tuple[str, ...], Callable]] = {
    "add": (("add",), lambda a, b: a + b),
    "maximum": (("maximum",), max),
    "a region of its own": (("multiply", "subtract"), lambda a, b: a * b - b),
}


@given(st.data(), st.sampled_from(list(REGIONS)))
@laws
def test_scatter_drops_windows_that_leave_the_operand(data: st.DataObject, name: str) -> None:
    x, indices, n, sizes = addressed(data)
    batch = np.moveaxis(indices, n["vector"], -1).shape[:-1]
    kept = [d for d in range(x.ndim) if d not in (*n["dropped"], *n["batching"])]
    window_dims = window_places(data, len(batch), len(kept))
    rank = len(batch) + len(kept)
    others = [d for d in range(rank) if d not in window_dims]
    shape = [0] * rank
    for d, extent in zip((*others, *window_dims), (*batch, *(sizes[k] for k in kept)), strict=True):
        shape[d] = extent
    updates = draw_array(data, tuple(shape))
    names, function = REGIONS[name]
    expected = x.copy()
    for place in np.ndindex(*shape):
        start = start_of(indices, tuple(place[d] for d in others), n, x.ndim)
        inside = all(0 <= s <= e - z for s, e, z in zip(start, x.shape, sizes, strict=True))
        for d, k in zip(window_dims, kept, strict=True):
            start[k] += place[d]
        if inside:
            current = int(expected[tuple(start)])
            value = function(current, int(updates[place])) & 0xFFFFFFFF
            expected[tuple(start)] = np.uint32(value).astype(np.int32)
    found = compute(
        "scatter", x.shape, x, indices, updates, regions=(block(*names)[0],),
        update_window_dims=window_dims, inserted_window_dims=n["dropped"],
        input_batching_dims=n["batching"], index_vector_dim=n["vector"],
        scatter_indices_batching_dims=n["indices_batching"],
        scatter_dims_to_operand_dims=n["index_map"],
    )  # fmt: skip
    np.testing.assert_array_equal(found, expected)


@given(st.data(), st.sampled_from(["add", "minimum"]), st.sampled_from([0, 3]))
@laws
def test_reduce_window_visits_every_offset(data: st.DataObject, name: str, init: int) -> None:
    rank = data.draw(st.integers(1, 3))
    x = draw_array(data, tuple(data.draw(small) for _ in range(rank)))

    def each(strategy: Any) -> tuple:
        return tuple(data.draw(strategy) for _ in range(rank))

    window, strides, base, dilation = each(small), each(small), each(small), each(st.integers(1, 2))
    padding = each(st.tuples(st.integers(-1, 3), st.integers(0, 3)))
    spread = [(n - 1) * b + 1 for n, b in zip(x.shape, base, strict=True)]
    padded = [max(s + low + high, 0) for s, (low, high) in zip(spread, padding, strict=True)]
    reach = [(w - 1) * d + 1 for w, d in zip(window, dilation, strict=True)]
    shape = tuple(
        (p - r) // s + 1 if p >= r else 0 for p, r, s in zip(padded, reach, strides, strict=True)
    )
    function = {"add": lambda a, b: a + b, "minimum": min}[name]
    expected = np.zeros(shape, np.int32)
    for place in np.ndindex(*shape):
        total = init
        for offset in itertools.product(*(range(w) for w in window)):
            at = [
                p * s + o * d - low
                for p, s, o, d, (low, _) in zip(
                    place, strides, offset, dilation, padding, strict=True
                )
            ]
            real = all(
                a % b == 0 and 0 <= a // b < n for a, b, n in zip(at, base, x.shape, strict=True)
            )
            value = x[tuple(a // b for a, b in zip(at, base, strict=True))] if real else init
            total = function(total, int(value))
        expected[place] = total
    found = compute(
        "reduce_window", shape, x, np.array(init, np.int32), regions=(block(name)[0],),
        window_dimensions=window, window_strides=strides, base_dilations=base,
        window_dilations=dilation, padding=padding,
    )  # fmt: skip
    np.testing.assert_array_equal(found, expected)


def comparator(direction: str) -> tuple[Block, tuple[TensorType, ...]]:
    """Compares the first operand of a sort of two; ties keep their order."""
    types = (*(TensorType((), I32),) * 4, TensorType((), "i1"))
    compare = Operation("compare", (0, 1), (4,), {"direction": direction, "compare_type": "SIGNED"})
    return Block((0, 1, 2, 3), (compare,), (4,)), types


@given(st.data(), st.sampled_from(["LT", "GT"]), st.integers(0, 1))
@laws
def test_sort_by_keys_is_sort_by_comparator(
    data: st.DataObject, direction: str, dimension: int
) -> None:
    shape = (data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6)))
    x = draw_array(data, shape, 0, 3)
    places = np.arange(x.size, dtype=np.int32).reshape(shape)
    region, types = comparator(direction)
    keys = values_sort.keys(region, types)
    assert keys is not None and keys[0].descending == (direction == "GT")
    by_keys = values_sort.sort([x, places], dimension, keys, combine(region, types))
    by_counting = values_sort.sort([x, places], dimension, None, combine(region, types))
    sign = 1 if direction == "LT" else -1
    order = np.argsort(sign * x, axis=dimension, kind="stable")
    for found in (by_keys, by_counting):
        np.testing.assert_array_equal(found[1], np.take_along_axis(places, order, dimension))
        np.testing.assert_array_equal(found[0], np.take_along_axis(x, order, dimension))


@given(st.data())
@laws
def test_reduce_with_a_region_of_its_own_keeps_the_order(data: st.DataObject) -> None:
    """a * b - b is not associative: its pairs are taken in order; of two elements exactly."""
    x = draw_array(data, (2, data.draw(small)))
    region = block("multiply", "subtract")[0]
    found = compute(
        "reduce", x.shape[1:], x, np.array(1, np.int32), regions=(region,), dimensions=(0,)
    )
    inner = x[0] * x[1] - x[1]
    np.testing.assert_array_equal(found, 1 * inner - inner)


@given(st.data(), st.permutations(range(4)), st.permutations(range(4)))
@laws
def test_dot_general_is_einsum(data: st.DataObject, p: list[int], q: list[int]) -> None:
    batch, contracted, one, two, three, four = (data.draw(small) for _ in range(6))
    a = draw_array(data, tuple(np.array([batch, contracted, one, two])[p]))
    b = draw_array(data, tuple(np.array([batch, contracted, three, four])[q]))
    letters = "".join("bcmn"[i] for i in p), "".join("bcxy"[i] for i in q)
    free = [c for c in letters[0] if c in "mn"] + [c for c in letters[1] if c in "xy"]
    expected = np.einsum(f"{letters[0]},{letters[1]}->b{''.join(free)}", a, b)
    found = compute(
        "dot_general", expected.shape, a, b,
        lhs_batch=(p.index(0),), rhs_batch=(q.index(0),),
        lhs_contracting=(p.index(1),), rhs_contracting=(q.index(1),),
    )  # fmt: skip
    np.testing.assert_array_equal(found, expected)
