"""Control flow without data: what folds, what needs the rank, what is refused."""

import numpy as np
import pytest

from trnsim.cluster.fold import fold
from trnsim.device.errors import BadInput, Unsupported
from trnsim.device.ops.ir import Block, Module, Operation, TensorType

I32, PRED, F32 = TensorType((), "i32"), TensorType((), "i1"), TensorType((), "f32")


def constant(result: int, value: int) -> Operation:
    return Operation("constant", (), (result,), {"value": np.asarray(value, np.int32)})


def less(a: int, b: int, result: int) -> Operation:
    return Operation("compare", (a, b), (result,), {"direction": "LT", "compare_type": "SIGNED"})


def counting(limit: Operation, location: str = "user.py:7") -> Module:
    """while (i < limit) i = i + 1, starting from 0; value 1 is the limit."""
    condition = Block((2,), (less(2, 1, 3),), (3,))
    body = Block((4,), (constant(5, 1), Operation("add", (4, 5), (6,))), (6,))
    loop = Operation("while", (0,), (7,), {}, (condition, body), location)
    types = (I32, I32, I32, PRED, I32, I32, I32, I32)
    return Module("count", types, Block((), (constant(0, 0), limit, loop), (7,)))


def test_a_counted_loop_folds_once_for_all_ranks() -> None:
    decisions = fold(counting(constant(1, 5)), ranks=3)
    assert decisions == [{7: [5]}] * 3
    assert decisions[0] is decisions[2]


def test_trips_that_depend_on_the_rank_are_folded_rank_by_rank() -> None:
    module = counting(Operation("convert", (8,), (1,)))
    body = module.body
    rank = Operation("partition_id", (), (8,))
    module = Module(
        "count",
        (*module.types, TensorType((), "ui32")),
        Block((), (rank, *body.operations), body.returns),
    )
    assert fold(module, ranks=3) == [{7: [0]}, {7: [1]}, {7: [2]}]


def data_dependent() -> Module:
    module = counting(Operation("convert", (8,), (1,)))
    return Module(
        "count", (*module.types, F32), Block((8,), module.body.operations, module.body.returns)
    )


def test_an_unknown_predicate_is_refused_with_its_source_line() -> None:
    with pytest.raises(Unsupported, match=r"^while at user\.py:7 depends on data") as error:
        fold(data_dependent(), ranks=2)
    assert "--assume user.py:7=N" in str(error.value)


def test_stated_trips_stand_in_for_data() -> None:
    assert fold(data_dependent(), 2, {"user.py:7": 11}) == [{7: [11]}] * 2


def test_a_stated_line_without_a_loop_is_refused() -> None:
    with pytest.raises(BadInput) as error:
        fold(data_dependent(), 2, {"user.py:8": 11})
    assert str(error.value) == (
        "--assume: user.py:8 is not valid; allowed: one of user.py:7; nearest valid: user.py:7"
    )


@pytest.mark.parametrize(("value", "taken"), [(0, 0), (1, 1), (2, 1), (-1, 1)])
def test_a_case_takes_its_last_branch_out_of_range(value: int, taken: int) -> None:
    """The inner loop of the branch that is taken shows which one that was."""
    branches = tuple(Block((), (constant(10 + i, 100 + i),), (10 + i,)) for i in range(2))
    case = Operation("case", (0,), (1,), {}, branches)
    outer = Operation("case", (2,), (3,), {}, branches)
    shift = Operation("subtract", (1, 4), (2,))
    types = (I32,) * 12
    module = Module(
        "case", types, Block((), (constant(0, value), case, constant(4, 100), shift, outer), (3,))
    )
    assert fold(module, 1) == [{1: [value], 3: [taken]}]
