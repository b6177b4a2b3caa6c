"""`nki.isa`: the instructions of a NeuronCore as functions of a kernel.

Each function checks its arguments, makes the device's instruction and issues it on the running
core, which checks, executes and times it. Signatures are those of NKI 0.6.
"""

from ..errors import IllegalInstruction as NkiValidationError
from . import isa_constants as constants
from .exchange import core_barrier, sendrecv
from .isa_constants import (
    dge_mode,
    dma_engine,
    engine,
    gpsimd_engine,
    matmul_perf_mode,
    nc_version,
    oob_mode,
    reduce_cmd,
    scalar_engine,
    tensor_engine,
    unknown_engine,
    vector_engine,
)
from .isa_dma import dma_compute, dma_copy, dma_transpose
from .isa_gpsimd import (
    affine_select,
    dropout,
    iota,
    local_gather,
    nc_n_gather,
    nonzero_with_count,
    rand2,
    rand_get_state,
    rand_set_state,
    rng,
    sequence_bounds,
    set_rng_seed,
    tensor_partition_reduce,
    topk,
)
from .isa_scalar import activate2, activation, activation_reduce
from .isa_tensor import nc_matmul, nc_matmul_mx, nc_transpose, quantize_mx
from .isa_vector import (
    bn_aggr,
    bn_stats,
    exponential,
    max8,
    memset,
    nc_find_index8,
    nc_match_replace8,
    nc_stream_shuffle,
    range_select,
    reciprocal,
    scalar_tensor_tensor,
    select_reduce,
    tensor_copy,
    tensor_copy_predicated,
    tensor_reduce,
    tensor_scalar,
    tensor_scalar_cumulative,
    tensor_scalar_reduce,
    tensor_tensor,
    tensor_tensor_scan,
)
from .registers import (
    VirtualRegister,
    register_alloc,
    register_load,
    register_move,
    register_store,
)
from .session import NkiInstruction, current


def get_nc_version() -> nc_version:
    """The NeuronCore version of the running core's chip."""
    return nc_version(current().chip.generation)


def get_nc_sub_version() -> int:
    """The silicon revision: 0, the first."""
    return 0


__all__ = [
    "NkiInstruction", "NkiValidationError", "VirtualRegister", "activate2", "activation",
    "activation_reduce", "affine_select", "bn_aggr", "bn_stats", "constants", "core_barrier",
    "dge_mode",
    "dma_compute", "dma_copy", "dma_engine", "dma_transpose", "dropout", "engine", "exponential",
    "get_nc_sub_version", "get_nc_version", "gpsimd_engine", "iota", "local_gather",
    "matmul_perf_mode", "max8", "memset", "nc_find_index8", "nc_match_replace8", "nc_matmul",
    "nc_matmul_mx", "nc_n_gather", "nc_stream_shuffle", "nc_transpose", "nc_version",
    "nonzero_with_count", "oob_mode", "quantize_mx", "rand2", "rand_get_state", "rand_set_state",
    "range_select", "reciprocal", "reduce_cmd", "register_alloc", "register_load",
    "register_move", "register_store", "rng", "scalar_engine", "scalar_tensor_tensor",
    "select_reduce", "sendrecv", "sequence_bounds", "set_rng_seed", "tensor_copy",
    "tensor_copy_predicated", "tensor_engine", "tensor_partition_reduce", "tensor_reduce",
    "tensor_scalar", "tensor_scalar_cumulative", "tensor_scalar_reduce", "tensor_tensor",
    "tensor_tensor_scan", "topk", "unknown_engine", "vector_engine",
]  # fmt: skip
