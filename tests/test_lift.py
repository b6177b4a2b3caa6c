"""Steps compiled for a few data-parallel ranks and widened: the same step as compiled for all."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trnsim.cluster.frontends.lift import Axis, check_same, lift, widen_groups
from trnsim.cluster.frontends.training import load_training
from trnsim.cluster.mesh import Mesh, parse_mesh
from trnsim.cluster.sharding import Lowered
from trnsim.cluster.train import TrainOptions, train
from trnsim.device.errors import BadInput, TrnsimError, Unsupported
from trnsim.device.ops.ir import Block, Module, Operation, TensorType

degrees = st.integers(1, 3)


@given(before=degrees, after=degrees, degree=st.sampled_from([2, 4, 6]), small=st.just(2))
def test_groups_of_any_axes_widen_to_those_of_the_full_mesh(before, after, degree, small):
    def mesh(dp):
        return Mesh((("a", before), ("dp", dp), ("b", after)))

    axis = Axis("dp", before, small, after, degree)
    for names in (("a",), ("b",), ("dp",), ("dp", "b"), ("b", "dp"), ("a", "dp", "b"), ("a", "b")):
        found = widen_groups(mesh(small).groups(*names), axis)
        assert set(found) == set(mesh(degree).groups(*names)), names


def test_groups_that_are_neither_along_nor_across_are_refused():
    with pytest.raises(ValueError, match=r"groups such as \[0, 3\], neither along nor across"):
        widen_groups(((0, 3), (1, 2)), Axis("dp", 1, 2, 2, 8))


def lowered(*operations: Operation, types: list[TensorType]) -> Lowered:
    return Lowered(Module("step", tuple(types), Block((), operations, ())), 4, (), ())


def test_tables_of_one_number_per_rank_grow_evenly():
    table = Operation("constant", (), (0,), {"value": np.array([0, 5, 10, 15], np.int32)})
    wide = lift(lowered(table, types=[TensorType((4,), "i32")]), {"dp": 4, "tp": 2}, "dp", 2)
    (found,) = wide.module.body.operations
    np.testing.assert_array_equal(found.attributes["value"], [0, 5, 10, 15, 20, 25, 30, 35])
    assert wide.module.types == (TensorType((8,), "i32"),) and wide.ranks == 8


def test_what_depends_on_the_degree_is_refused_with_its_line():
    def step(extent: int) -> Lowered:
        iota = Operation("iota", (), (0,), {"dimension": 0}, (), "f.py:7")
        return lowered(iota, types=[TensorType((extent,), "i32")])

    with pytest.raises(Unsupported, match=r"dp cannot be lifted: iota at f.py:7 depends on its"):
        check_same(step(2), step(4), "dp")
    sends = Operation("collective_permute", (0,), (1,), {"source_target_pairs": ((0, 2),)})
    with pytest.raises(Unsupported, match="collective_permute at an unknown line sends along it"):
        lift(lowered(sends, types=[]), {"dp": 4, "tp": 2}, "dp", 2)


def options(tmp_path, lift: str, mesh: str = "dp=8,tp=2") -> TrainOptions:
    return TrainOptions(
        file=Path("examples/gpt.py"), instance="trn2.48xlarge", mesh=parse_mesh(mesh), steps=2,
        time_only=True, lift=lift, out=tmp_path, options={"batch": 16, "text": "examples/gpt.py"},
    )  # fmt: skip


def test_a_lifted_step_takes_the_same_time_to_the_picosecond(tmp_path):
    whole, lifted = (train(options(tmp_path, how)) for how in ("none", "dp"))
    assert lifted.runtime == "none (time only, dp lifted from 2 and 4)"
    same = {"runtime": "", "host_seconds": {}}
    assert replace(lifted, **same) == replace(whole, **same)
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace["traceEvents"]


SHARDED_STATE = """
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
def training(mesh):
    state = jax.device_put(np.ones(16, np.float32), NamedSharding(mesh, P("dp")))
    batch = jax.device_put(np.ones(24, np.float32), NamedSharding(mesh, P({batch})))
    def step(state, batch):
        return state, batch.mean()
    return step, state, [batch]
"""


def test_a_state_sharded_over_the_axis_is_refused(tmp_path):
    file = tmp_path / "f.py"
    file.write_text(SHARDED_STATE.format(batch='"dp"'))
    with pytest.raises(TrnsimError, match="state is sharded over dp: only an axis over which"):
        load_training(file, {"dp": 8}, data=False, lift="dp")


def test_a_batch_that_does_not_divide_is_refused(tmp_path):
    file = tmp_path / "f.py"
    file.write_text(SHARDED_STATE.format(batch='"dp"').replace('16, np.float32), NamedSharding'
                    '(mesh, P("dp"))', '16, np.float32), NamedSharding(mesh, P())'))  # fmt: skip
    with pytest.raises(TrnsimError, match="batch has 24 along dp, not a multiple of dp=16"):
        load_training(file, {"dp": 16}, data=False, lift="dp")


def test_an_axis_that_is_not_there_and_a_lift_with_data_are_refused(tmp_path):
    with pytest.raises(BadInput, match="axis: pp"):
        train(options(tmp_path, "pp"))
    with pytest.raises(BadInput, match="only with --time-only"):
        train(replace(options(tmp_path, "dp"), time_only=False))
