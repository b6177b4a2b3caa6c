"""What the pages of `nki.isa` forbid of elementwise, row and GpSimd instructions is refused."""

# pyright: reportMissingImports=false, reportIndexIssue=false
from typing import Any

from .nki_golden import tile
from .nki_kernels import nisa, nl
from .nki_rules import GPSIMD, SCALAR, TENSOR, VECTOR, P, hbm, i32, refused, rules, t, u32

# ---- every operand -----------------------------------------------------------------------------


@rules(
    ("33 partitions from 32", lambda: nisa.memset(t(128, 4)[32:65], 0.0),
     "dst has 33 partitions and starts at 32; allowed starts: 0, 64"),
    ("65 partitions from 32", lambda: nisa.memset(t(128, 4)[32:97], 0.0),
     "dst has 65 partitions and starts at 32; allowed starts: 0$"),
    ("4 partitions from 16", lambda: nisa.memset(t(128, 4)[16:20], 0.0),
     "starts at 16; allowed starts: 0, 32, 64, 96"),
    ("in hbm", lambda: nisa.memset(hbm(128, 4), 0.0), "dst must be in sbuf or psum"),
    ("five free axes", lambda: nisa.memset(t(8, 2, 2, 2, 2, 2)[:, ::1], 0.0),
     "dst has 5 free axes; limit: 4"),
    ("64K elements", lambda: nisa.memset(t(8, 65537, dtype=nl.uint8), 0),
     "65537 elements per partition; limit in sbuf: 65536"),
)  # fmt: skip
def test_operands(call, message, chip):
    refused(call, message, chip)


# ---- copies and elementwise instructions -------------------------------------------------------


@rules(
    ("gpsimd and psum", lambda: nisa.tensor_copy(t(8, 8), t(8, 8, buffer=P), engine=GPSIMD),
     "Copy: src must be in sbuf for the gpsimd engine, not in psum"),
    ("tensor engine", lambda: nisa.tensor_copy(t(8, 8), t(8, 8), engine=TENSOR),
     "engine is tensor; allowed: vector, scalar, gpsimd"),
    ("scalar on v2", lambda: nisa.tensor_copy(t(8, 8), t(8, 8), engine=SCALAR),
     "engine scalar cannot copy on trn1; use activation", "trn1"),
    ("sizes", lambda: nisa.tensor_copy(t(8, 8), t(8, 4)), r"src has shape \[8, 4\] and dst \[8, 8"),
)  # fmt: skip
def test_tensor_copy(call, message, chip):
    refused(call, message, chip)


@rules(
    ("scalar engine", lambda: nisa.memset(t(8, 8), 0.0, engine=SCALAR),
     "engine is scalar; allowed: vector, gpsimd"),
    ("packed", lambda: nisa.memset(t(32, 8, dtype=nl.float8_e5m2_x4), 1.0), "can be set to 0 only",
     "trn3"),
)  # fmt: skip
def test_memset(call, message, chip):
    refused(call, message, chip)


@rules(
    ("predicate float", lambda: nisa.tensor_copy_predicated(t(8, 8), t(8, 8), t(8, 8)),
     "predicate is f32; allowed: ui8, ui16, ui32"),
    ("predicate signed", lambda: nisa.tensor_copy_predicated(t(8, 8), t(8, 8), i32(8, 8)),
     "predicate is i32"),
    ("dtypes", lambda: nisa.tensor_copy_predicated(t(8, 8), t(8, 8, dtype=nl.bfloat16), u32(8, 8)),
     "src is bf16 and dst f32; they must be equal"),
    ("both in psum", lambda: nisa.tensor_copy_predicated(
        t(8, 8), t(8, 8, buffer=P), t(8, 8, dtype=nl.uint32, buffer=P)),
     "src and predicate are in psum; limit: one"),
)  # fmt: skip
def test_tensor_copy_predicated(call, message, chip):
    refused(call, message, chip)


@rules(
    ("both in psum", lambda: nisa.tensor_tensor(
        t(8, 8), t(8, 8, buffer=P), t(8, 8, buffer=P), nl.add),
     "data1 and data2 are in psum; limit: one"),
    ("power in psum", lambda: nisa.tensor_tensor(t(8, 8), t(8, 8, buffer=P), t(8, 8), nl.power),
     "data1 must be in sbuf for the gpsimd engine"),
    ("power on vector", lambda: nisa.tensor_tensor(
        t(8, 8), t(8, 8), t(8, 8), nl.power, engine=VECTOR), "op power runs on gpsimd"),
    ("bits of floats", lambda: nisa.tensor_tensor(t(8, 8), t(8, 8), t(8, 8), nl.bitwise_and),
     "op and is for integers, not for f32"),
    ("unary", lambda: nisa.tensor_tensor(t(8, 8), t(8, 8), t(8, 8), nl.square),
     "op square takes one operand"),
    ("divide", lambda: nisa.tensor_tensor(t(8, 8), t(8, 8), t(8, 8), nl.divide),
     "op divide is no operator"),
    ("scalar engine", lambda: nisa.tensor_tensor(t(8, 8), t(8, 8), t(8, 8), nl.add, engine=SCALAR),
     "engine is scalar; allowed: vector, gpsimd"),
    ("partitions", lambda: nisa.tensor_tensor(t(8, 8), t(4, 16), t(8, 8), nl.add),
     "partitions and elements per partition must be equal"),
)  # fmt: skip
def test_tensor_tensor(call, message, chip):
    refused(call, message, chip)


@rules(
    ("mixed kinds", lambda: nisa.tensor_scalar(
        i32(8, 8), i32(8, 8), nl.bitwise_and, 1, op1=nl.add, operand1=1.0),
     "op0 is and and op1 add; both bitwise or both arithmetic"),
    ("operand dtype", lambda: nisa.tensor_scalar(t(8, 8), t(8, 8), nl.add, i32(8, 1)),
     "operand0 is i32; an arithmetic operator takes f32"),
    ("operand shape", lambda: nisa.tensor_scalar(t(8, 8), t(8, 8), nl.add, t(8, 2)),
     r"operand0 has shape \[8, 2\]; it must be \[8, 1\]"),
    ("bits on scalar", lambda: nisa.tensor_scalar(
        i32(8, 8), i32(8, 8), nl.bitwise_and, 1, engine=SCALAR), "engine scalar has multiply then"),
    ("maximum on scalar", lambda: nisa.tensor_scalar(
        t(8, 8), t(8, 8), nl.maximum, 0.0, engine=SCALAR), "engine scalar has multiply then add"),
    ("scalar on v2", lambda: nisa.tensor_scalar(
        t(8, 8), t(8, 8), nl.multiply, 2.0, engine=SCALAR), "no tensor_scalar on trn1", "trn1"),
    ("add on gpsimd", lambda: nisa.tensor_scalar(t(8, 8), t(8, 8), nl.add, 1.0, engine=GPSIMD),
     "engine gpsimd has only rsqrt"),
    ("rsqrt in psum", lambda: nisa.tensor_scalar(t(8, 8), t(8, 8, buffer=P), nl.rsqrt, 0.0),
     "data must be in sbuf for the gpsimd engine"),
    ("unary with operand", lambda: nisa.tensor_scalar(t(8, 8), t(8, 8), nl.abs, 1.0),
     "op abs takes none, or 0"),
    ("operand1 alone", lambda: nisa.tensor_scalar(t(8, 8), t(8, 8), nl.add, 1.0, operand1=2.0),
     "operand1 is 2.0 without an op1"),
)  # fmt: skip
def test_tensor_scalar(call, message, chip):
    refused(call, message, chip)


@rules(
    ("bits", lambda: nisa.scalar_tensor_tensor(
        t(8, 8), t(8, 8), nl.bitwise_and, 1, nl.add, t(8, 8)), "op and is bitwise"),
    ("both in psum", lambda: nisa.scalar_tensor_tensor(
        t(8, 8), t(8, 8, buffer=P), nl.add, 1.0, nl.add, t(8, 8, buffer=P)),
     "data and operand1 are in psum"),
)  # fmt: skip
def test_scalar_tensor_tensor(call, message, chip):
    refused(call, message, chip)


@rules(
    ("partition axis", lambda: nisa.tensor_reduce(t(8, 1), nl.add, t(8, 8), axis=0),
     "allowed: the last free axes, not the partition axis"),
    ("first free axis", lambda: nisa.tensor_reduce(t(8, 8), nl.add, t(8, 8, 8), axis=1),
     "allowed: the last free axes"),
    ("no reduction", lambda: nisa.tensor_reduce(t(8, 1), nl.equal, t(8, 8), axis=1), "op is equal"),
    ("absolute", lambda: nisa.tensor_reduce(t(8, 1), nl.abs_max, t(8, 8), axis=1),
     "op is abs_max; allowed: add"),
    ("bits of floats", lambda: nisa.tensor_reduce(t(8, 1), nl.bitwise_or, t(8, 8), axis=1),
     "op or is for integers"),
    ("negated bits", lambda: nisa.tensor_reduce(
        i32(8, 1), nl.bitwise_or, i32(8, 8), axis=1, negate=True), "negate is for arithmetic"),
    ("result", lambda: nisa.tensor_reduce(t(8, 2), nl.add, t(8, 8), axis=1),
     r"reducing data \[8, 8\] leaves \[8, 1\]"),
)  # fmt: skip
def test_tensor_reduce(call, message, chip):
    refused(call, message, chip)


# ---- activations -------------------------------------------------------------------------------


@rules(
    ("function", lambda: nisa.activation(t(8, 8), nl.add, t(8, 8)), "is no activation function"),
    ("scale dtype", lambda: nisa.activation(t(8, 8), nl.exp, t(8, 8), scale=i32(8, 1)),
     "scale is i32; an arithmetic operator takes f32"),
    ("number as bias on v2", lambda: nisa.activation(t(8, 8), nl.exp, t(8, 8), bias=1.0),
     r"bias is 1.0; on trn1 it must be a \[P, 1\] tile", "trn1"),
    ("bias of reciprocal on v2", lambda: nisa.activation(
        t(8, 8), nl.reciprocal, t(8, 8), bias=t(8, 1)), "reciprocal takes no bias on trn1", "trn1"),
    ("tfloat32 bias", lambda: nisa.activation(
        t(8, 8), nl.exp, t(8, 8), bias=t(8, 1, dtype=nl.tfloat32)), "bias is tfloat32"),
    ("reduction", lambda: nisa.activation(
        t(8, 8), nl.exp, t(8, 8), reduce_op=nl.maximum, reduce_res=t(8, 1)), "reduce_op is max"),
    ("command", lambda: nisa.activation(
        t(8, 8), nl.exp, t(8, 8), reduce_cmd=nisa.reduce_cmd.load_reduce), "reduce_cmd is load"),
)  # fmt: skip
def test_activation(call, message, chip):
    refused(call, message, chip)


@rules(
    ("generation", lambda: nisa.activate2(t(8, 8), nl.exp, t(8, 8), 1.0, 0.0, nl.multiply, nl.add),
     "needs NeuronCore-v4"),
    ("pair", lambda: nisa.activate2(t(8, 8), nl.exp, t(8, 8), 1.0, 0.0, nl.add, nl.add),
     r"\(op0, op1\) is \(add, add\)", "trn3"),
    ("reverse", lambda: nisa.activate2(
        t(8, 8), nl.exp, t(8, 8), 1.0, 0.0, nl.multiply, nl.bypass, reverse1=True),
     "reverse needs an operator", "trn3"),
    ("two dtypes", lambda: nisa.activate2(
        t(8, 8), nl.exp, t(8, 8), t(8, 1), t(8, 1, dtype=nl.bfloat16), nl.multiply, nl.add),
     "imm0 and imm1 are tensors of two dtypes", "trn3"),
)  # fmt: skip
def test_activate2(call, message, chip):
    refused(call, message, chip)


# ---- with accumulators -------------------------------------------------------------------------


def selected(dst=None, dtype=nl.float32, **options: Any) -> Any:
    """range_select with legal arguments but for `options`."""
    given = {
        "dst": tile((8, 8)) if dst is None else dst, "on_true_tile": tile((8, 8), dtype),
        "comp_op0": nl.greater, "comp_op1": nl.less, "bound0": t(8, 1), "bound1": t(8, 1),
    }  # fmt: skip
    return nisa.range_select(**{**given, **options})


@rules(
    ("generation", selected, "needs NeuronCore-v3 or later", "trn1"),
    ("integers", lambda: selected(dtype=nl.int32), "on_true_tile is i32; it must be a float"),
    ("comparison", lambda: selected(comp_op0=nl.not_equal), "comp_op0 is not_equal"),
    ("bound", lambda: selected(bound1=i32(8, 1)), "bound1 is i32"),
    ("value", lambda: selected(on_false_value=0.0), "on_false_value is 0.0"),
    ("reduction", lambda: selected(reduce_op=nl.add), "reduce_op is add; allowed: maximum"),
    ("positions", lambda: selected(range_start=2**24 - 7),
     "positions are 16777209 to 16777216; limit: 0 to 16777215"),
)  # fmt: skip
def test_range_select(call, message, chip):
    refused(call, message, chip)


@rules(
    ("both in psum", lambda: nisa.select_reduce(
        t(8, 8), t(8, 8, dtype=nl.uint8, buffer=P), t(8, 8, buffer=P), 0.0), "are in psum"),
    ("predicate", lambda: nisa.select_reduce(t(8, 8), u32(8, 8), t(8, 8), 0.0), "predicate is ui"),
    ("integers", lambda: nisa.select_reduce(
        t(8, 8), t(8, 8, dtype=nl.uint8), i32(8, 8), 0.0), "on_true is i32"),
    ("tfloat32", lambda: nisa.select_reduce(
        t(8, 8), t(8, 8, dtype=nl.uint8), t(8, 8, dtype=nl.tfloat32), 0.0), "on_true is tfloat32"),
    ("command", lambda: nisa.select_reduce(
        t(8, 8), t(8, 8, dtype=nl.uint8), t(8, 8), 0.0, reduce_cmd=nisa.reduce_cmd.load_reduce),
     "reduce_cmd is load_reduce"),
)  # fmt: skip
def test_select_reduce(call, message, chip):
    refused(call, message, chip)


@rules(
    ("integers", lambda: nisa.tensor_scalar_cumulative(i32(8, 8), t(8, 8), nl.add, nl.add, 0.0),
     "dst is i32; no 32-bit integers"),
    ("reduction", lambda: nisa.tensor_scalar_cumulative(t(8, 8), t(8, 8), nl.add, nl.equal, 0.0),
     "reduce_op is equal"),
    ("start", lambda: nisa.tensor_scalar_cumulative(
        t(8, 8), t(8, 8), nl.add, nl.add, 0.0, reduce_cmd=nisa.reduce_cmd.load_reduce),
     "imm1 is missing"),
    ("column dtype", lambda: nisa.tensor_scalar_cumulative(
        t(8, 8), t(8, 8), nl.add, nl.add, i32(8, 1)), "imm0 is i32"),
)  # fmt: skip
def test_tensor_scalar_cumulative(call, message, chip):
    refused(call, message, chip)


@rules(
    ("bits", lambda: nisa.tensor_scalar_reduce(t(8, 8), t(8, 8), nl.bitwise_or, 1, nl.add),
     "op or is bitwise"),
    ("reduction", lambda: nisa.tensor_scalar_reduce(t(8, 8), t(8, 8), nl.add, 1.0, nl.subtract),
     "reduce_op is subtract"),
    ("reverse", lambda: nisa.tensor_scalar_reduce(
        t(8, 8), t(8, 8), nl.subtract, 1.0, nl.add, reverse0=True), "reverse0 is not supp"),
    ("start", lambda: nisa.tensor_scalar_reduce(
        t(8, 8), t(8, 8), nl.add, 1.0, nl.add, reduce_init=1.0), "it goes with load_reduce"),
)  # fmt: skip
def test_tensor_scalar_reduce(call, message, chip):
    refused(call, message, chip)


@rules(
    ("generation", lambda: nisa.exponential(t(8, 8), t(8, 8)), "needs NeuronCore-v4"),
    ("dst dtype", lambda: nisa.exponential(u32(8, 8), t(8, 8)), "dst is ui32", "trn3"),
    ("axes", lambda: nisa.exponential(t(8, 2, 2, 2, 2), t(8, 2, 2, 2, 2)),
     "dst has 5 axes; limit: 4", "trn3"),
    ("result dtype", lambda: nisa.exponential(
        t(8, 8), t(8, 8), reduce_res=i32(8, 1), reduce_cmd=nisa.reduce_cmd.reset_reduce),
     "reduce_res is i32", "trn3"),
    ("start", lambda: nisa.exponential(t(8, 8), t(8, 8), reduce_init=1.0),
     "it goes with load_reduce", "trn3"),
)  # fmt: skip
def test_exponential(call, message, chip):
    refused(call, message, chip)


@rules(
    ("both in psum", lambda: nisa.tensor_tensor_scan(
        t(8, 8), t(8, 8, buffer=P), t(8, 8, buffer=P), 0.0, nl.add, nl.add), "are in psum"),
    ("bits", lambda: nisa.tensor_tensor_scan(
        t(8, 8), t(8, 8), t(8, 8), 0.0, nl.bitwise_or, nl.add), "op or is bitwise"),
    ("unary", lambda: nisa.tensor_tensor_scan(
        t(8, 8), t(8, 8), t(8, 8), 0.0, nl.abs, nl.add), "op0 is abs; a binary"),
)  # fmt: skip
def test_tensor_tensor_scan(call, message, chip):
    refused(call, message, chip)


# ---- statistics and searches -------------------------------------------------------------------


@rules(
    ("bn_stats", lambda: nisa.bn_stats(t(8, 6), t(8, 513)), "513 elements per .* limit: 512"),
    ("bn_stats dst", lambda: nisa.bn_stats(t(8, 5), t(8, 512)), r"it must be \[8, 6\]"),
    ("bn_aggr", lambda: nisa.bn_aggr(t(8, 2), t(8, 7)), "a multiple of 3 is needed"),
    ("max8 few", lambda: nisa.max8(t(8, 8), t(8, 7)), "allowed: 8 to 16384"),
    ("max8 many", lambda: nisa.max8(t(8, 8), t(8, 16385)), "allowed: 8 to 16384"),
    ("max8 axes", lambda: nisa.max8(t(8, 8), t(8, 2, 2, 4)), "src has 4 axes; limit: 3"),
    ("max8 dst axes", lambda: nisa.max8(t(8, 2, 4), t(8, 16)), "dst has 3 axes; limit: 2"),
    ("find dtype", lambda: nisa.nc_find_index8(i32(8, 8), t(8, 16), t(8, 8)),
     "dst is i32; allowed: ui16, ui32"),
    ("find values", lambda: nisa.nc_find_index8(u32(8, 8), t(8, 16), t(8, 9)),
     r"vals has shape \[8, 9\]; it must be \[8, 8\]"),
    ("replace index", lambda: nisa.nc_match_replace8(
        t(8, 16), t(8, 16), t(8, 8), 0.0, dst_idx=t(8, 8)), "dst_idx is f32"),
)  # fmt: skip
def test_searches(call, message, chip):
    refused(call, message, chip)


# ---- GpSimd ------------------------------------------------------------------------------------


@rules(
    ("iota psum", lambda: nisa.iota(i32(8, 8, buffer=P), [[1, 8]]), "dst must be in sbuf"),
    ("iota count", lambda: nisa.iota(i32(8, 8), [[1, 7]]), "pattern has 7 elements and dst 8"),
    ("iota axes", lambda: nisa.iota(i32(8, 8), [[1, 8]] + [[1, 1]] * 4), "pattern has 5 axes"),
    ("iota offset", lambda: nisa.iota(i32(8, 8), [[1, 8]], offset=2**31),
     "offset is 2147483648; it must be an int32"),
    ("select psum", lambda: nisa.affine_select(
        t(8, 8), [[1, 8]], 1, t(8, 8, buffer=P), 0.0), "on_true_tile must be in sbuf"),
    ("select partitions", lambda: nisa.affine_select(t(8, 8), [[1, 8]], 1, t(4, 8), 0.0),
     "partitions and elements per partition must be equal"),
    ("select operator", lambda: nisa.affine_select(
        t(8, 8), [[1, 8]], 1, t(8, 8), 0.0, cmp_op=nl.add), "cmp_op is add"),
    ("gather index", lambda: nisa.nc_n_gather(t(8, 8), t(8, 8), i32(8, 8)), "indices is i32"),
    ("gather dtype", lambda: nisa.nc_n_gather(t(8, 8), i32(8, 8), u32(8, 8)),
     "data is i32 and dst f32; they must be equal"),
    ("gather psum", lambda: nisa.nc_n_gather(t(8, 8), t(8, 8, buffer=P), u32(8, 8)),
     "data must be in sbuf"),
    ("local dtype", lambda: nisa.local_gather(t(16, 16), t(16, 8), i32(16, 1)), "index is i32"),
    ("local partitions", lambda: nisa.local_gather(
        t(8, 16), t(8, 8), t(8, 1, dtype=nl.uint16)), "a multiple of 16"),
    ("local run", lambda: nisa.local_gather(
        t(16, 48), t(16, 8), t(16, 1, dtype=nl.uint16), num_elem_per_idx=3),
     "num_elem_per_idx is 3; allowed: 1, 2, 4, 8, 16, 32"),
    ("local valid", lambda: nisa.local_gather(
        t(16, 17), t(16, 8), t(16, 1, dtype=nl.uint16), num_valid_indices=17),
     "num_valid_indices is 17; limit: 16"),
    ("local count", lambda: nisa.local_gather(
        t(16, 4112), t(16, 8), t(16, 257, dtype=nl.uint16)), "is 4112; limit: 4096"),
    ("bounds partitions", lambda: nisa.sequence_bounds(t(2, 16), t(2, 8)), "it must have 1"),
    ("bounds dtype", lambda: nisa.sequence_bounds(t(1, 16), t(1, 8, dtype=nl.bfloat16)),
     "segment_ids is bf16; allowed: f32, i32"),
    ("partitions op", lambda: nisa.tensor_partition_reduce(t(1, 8), nl.multiply, t(8, 8)),
     "op is multiply"),
    ("nonzero v2", lambda: nisa.nonzero_with_count(i32(16, 9), i32(16, 8)), "Core-v3", "trn1"),
    ("nonzero size", lambda: nisa.nonzero_with_count(i32(16, 8), i32(16, 8)), r"needs \[16, 9\]"),
    ("nonzero padding", lambda: nisa.nonzero_with_count(
        i32(16, 9), i32(16, 8), padding_val=2**31), "padding_val is 2147483648"),
    ("topk dtype", lambda: nisa.topk(t(16, 4), u32(16, 4), t(16, 8), 128), "src is f32"),
    ("topk n", lambda: nisa.topk(
        t(16, 4, dtype=nl.bfloat16), u32(16, 4), t(16, 8, dtype=nl.bfloat16), 129),
     "n is 129; allowed: 8 to 65535, and at most 16 x 8"),
)  # fmt: skip
def test_gpsimd(call, message, chip):
    refused(call, message, chip)


@rules(
    ("rng floats", lambda: nisa.rng(t(8, 8)), "dst is f32; allowed: i8"),
    ("rng on gpsimd of v2", lambda: nisa.rng(u32(8, 8), engine=GPSIMD), "NeuronCore-v3", "trn1"),
    ("rng in psum", lambda: nisa.rng(t(8, 8, dtype=nl.uint32, buffer=P), engine=GPSIMD),
     "dst must be in sbuf"),
    ("rand2 generation", lambda: nisa.rand2(t(8, 8), 0.0, 1.0), "NeuronCore-v4"),
    ("rand2 range", lambda: nisa.rand2(t(8, 8), 1.0, 1.0), "min < max is needed", "trn3"),
    ("rand2 dtype", lambda: nisa.rand2(t(8, 8, dtype=nl.float8_e4m3fn), 0.0, 1.0),
     "dst is f8E4M3FN", "trn3"),
    ("dropout dtype", lambda: nisa.dropout(t(8, 8, dtype=nl.bfloat16), t(8, 8), 0.5), "dst"),
    ("dropout of integers", lambda: nisa.dropout(
        i32(8, 8), i32(8, 8), t(8, 1, dtype=nl.bfloat16)), "prob is bf16; with i32 data"),
    ("seed", lambda: nisa.set_rng_seed(u32(1, 2)), "one 32-bit value is needed"),
    ("state words", lambda: nisa.rand_set_state(u32(8, 5)), r"ui32 \[P, 6\] is needed on gpsimd"),
    ("state of vector on v3", lambda: nisa.rand_set_state(u32(8, 24), engine=VECTOR),
     "NeuronCore-v4"),
    ("state on v2", lambda: nisa.rand_get_state(u32(8, 6)), "NeuronCore-v3", "trn1"),
)  # fmt: skip
def test_random(call, message, chip):
    refused(call, message, chip)


MASK = list(range(32))


@rules(
    ("mask length", lambda: nisa.nc_stream_shuffle(t(32, 8), t(32, 8), MASK[:31]), "has 31 elem"),
    ("mask entry", lambda: nisa.nc_stream_shuffle(t(32, 8), t(32, 8), [*MASK[:31], 32]),
     r"shuffle_mask\[31\] is 32; allowed: 0 to 31, or 255"),
    ("dtype", lambda: nisa.nc_stream_shuffle(t(32, 8), i32(32, 8), MASK), "they must be equal"),
    ("start of 64", lambda: nisa.nc_stream_shuffle(t(128, 8)[32:64], t(128, 8)[0:64], MASK),
     "dst starts at partition 32; with 64 active partitions allowed: 0, 64"),
)  # fmt: skip
def test_nc_stream_shuffle(call, message, chip):
    refused(call, message, chip)
