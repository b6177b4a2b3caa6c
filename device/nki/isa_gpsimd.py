"""`nki.isa`: GpSimd's patterns, gathers and searches, and the random numbers."""

from typing import Any

from ..isa.patterns import (
    AffineSelect,
    GatherInPartition,
    Iota,
    LocalGather,
    NonzeroWithCount,
    PartitionReduce,
    SequenceBounds,
    TopK,
)
from ..isa.random import Dropout, GetState, Rand2, RandomState, Rng, SetSeed, SetState
from .isa_constants import engine
from .isa_operands import (
    engine_name,
    instruction,
    integer,
    number,
    operator,
    pairs,
    scalar,
    stored,
    view,
)
from .session import NkiInstruction, Session, current

_vector, _gpsimd = engine.vector, engine.gpsimd


@instruction
def iota(dst, pattern, offset=0, channel_multiplier=0, name=None) -> NkiInstruction:
    """dst[p, ...] = offset + channel_multiplier * p + the steps of the pattern."""
    made = Iota(
        view(dst, "dst"), pairs(pattern), integer(offset, "offset"),
        integer(channel_multiplier, "channel_multiplier"),
    )  # fmt: skip
    return current().issue(made, name)


@instruction
def affine_select(
    dst, pattern, channel_multiplier, on_true_tile, on_false_value, cmp_op="equal", offset=0,
    name=None,
) -> NkiInstruction:  # fmt: skip
    """dst = on_true_tile where (the affine value `cmp_op` 0), else on_false_value."""
    made = AffineSelect(
        view(dst, "dst"), view(on_true_tile, "on_true_tile"), pairs(pattern),
        integer(channel_multiplier, "channel_multiplier"),
        float(number(on_false_value, "on_false_value")), operator(cmp_op),
        integer(offset, "offset"),
    )  # fmt: skip
    return current().issue(made, name)


@instruction
def nc_n_gather(dst, data, indices, name=None) -> NkiInstruction:
    """dst[p, i] = data[p, indices[p, i]], free axes flattened."""
    made = GatherInPartition(stored(dst, "dst"), stored(data, "data"), view(indices, "indices"))
    return current().issue(made, name)


@instruction
def local_gather(
    dst, src_buffer, index, num_elem_per_idx=1, num_valid_indices=None, name=None
) -> NkiInstruction:
    """In each 16 partitions: runs of src_buffer from the indices of those partitions on."""
    valid = None if num_valid_indices is None else integer(num_valid_indices, "num_valid_indices")
    made = LocalGather(
        stored(dst, "dst"), stored(src_buffer, "src_buffer"), view(index, "index"),
        integer(num_elem_per_idx, "num_elem_per_idx"), valid,
    )  # fmt: skip
    return current().issue(made, name)


@instruction
def nonzero_with_count(dst, src, index_offset=0, padding_val=-1, name=None) -> NkiInstruction:
    """dst = positions of nonzero elements, padding, their number; partitions 0, 16, 32, ..."""
    made = NonzeroWithCount(
        view(dst, "dst"), view(src, "src"), integer(index_offset, "index_offset"),
        integer(padding_val, "padding_val"),
    )  # fmt: skip
    return current().issue(made, name)


@instruction
def sequence_bounds(dst, segment_ids, name=None) -> NkiInstruction:
    """dst = where each element's segment begins and ends."""
    made = SequenceBounds(view(dst, "dst"), view(segment_ids, "segment_ids"))
    return current().issue(made, name)


@instruction
def tensor_partition_reduce(dst, op, data, name=None) -> NkiInstruction:
    """dst[1, ...] = data reduced over partitions."""
    made = PartitionReduce(view(dst, "dst"), view(data, "data"), operator(op))
    return current().issue(made, name)


@instruction
def topk(val_dst, idx_dst, src, n, name=None) -> NkiInstruction:
    """The K largest of the first n elements of each 16 partitions, ascending."""
    made = TopK(
        view(val_dst, "val_dst"), view(idx_dst, "idx_dst"), view(src, "src"), integer(n, "n")
    )
    return current().issue(made, name)


# ---- random numbers --------------------------------------------------------------------------


def _state(session: Session, engine: str) -> RandomState:
    """The generators of an engine of this core."""
    key = f"random numbers of {engine}"
    found = session.state.get(key)
    if found is None:
        seed = session.launch.settings.seed + session.program
        found = session.state[key] = RandomState(engine, seed)
    return found


def _generators(engine: Any) -> tuple[str, RandomState]:
    """An engine that has generators, and them. Vector's stand in for one that has none."""
    name = engine_name(engine)
    return name, _state(current(), name if name in ("vector", "gpsimd") else "vector")


@instruction
def rng(dst, engine=_vector, name=None) -> NkiInstruction:
    """dst = random bits."""
    chosen, state = _generators(engine)
    return current().issue(Rng(view(dst, "dst"), state, chosen or "vector"), name)


@instruction
def rand2(dst, min, max, name=None) -> NkiInstruction:
    """dst = uniform numbers in [min, max] (NeuronCore-v4)."""
    session = current()
    made = Rand2(
        view(dst, "dst"), scalar(min, "min"), scalar(max, "max"), _state(session, "vector")
    )
    return session.issue(made, name)


@instruction
def dropout(dst, data, prob, name=None) -> NkiInstruction:
    """dst = data with elements set to 0 with probability prob."""
    session = current()
    made = Dropout(
        view(dst, "dst"), view(data, "data"), scalar(prob, "prob"), _state(session, "vector")
    )
    return session.issue(made, name)


@instruction
def set_rng_seed(src_seeds, name=None) -> NkiInstruction:
    """Seeds the Vector engine's generators from a [1, 1] tile."""
    session = current()
    return session.issue(SetSeed(view(src_seeds, "src_seeds"), _state(session, "vector")), name)


@instruction
def rand_set_state(src_seeds, engine=_gpsimd, name=None) -> NkiInstruction:
    """The generators of an engine = the words of a tile."""
    chosen, state = _generators(engine)
    made = SetState(view(src_seeds, "src_seeds"), state, chosen or "gpsimd")
    return current().issue(made, name)


@instruction
def rand_get_state(dst, engine=_gpsimd, name=None) -> NkiInstruction:
    """dst = the words of an engine's generators."""
    chosen, state = _generators(engine)
    return current().issue(GetState(view(dst, "dst"), state, chosen or "gpsimd"), name)
