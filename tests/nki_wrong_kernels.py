"""Twelve wrong kernels, and some more. The line that each one's error names ends in `# wrong`."""

# pyright: reportMissingImports=false
# `nki` is there once installed, at run time.
from trnsim.device.nki import install

install()

import nki  # noqa: E402
import nki.isa as nisa  # noqa: E402
import nki.language as nl  # noqa: E402


@nki.jit
def too_wide(lhs_t, rhs):
    """A moving tile of 1024 columns, where the Tensor engine takes 512."""
    left, right = nl.load(lhs_t), nl.load(rhs)
    total = nl.ndarray((128, 1024), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=total, stationary=left, moving=right)  # wrong


@nki.jit
def psum_overflow(x):
    """Nine banks alive at once, of eight."""
    tile = nl.load(x)
    sums = []
    for _ in range(9):
        total = nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.psum)  # wrong
        nisa.nc_matmul(dst=total, stationary=tile[:, 0:128], moving=tile)
        sums.append(total)


@nki.jit
def sbuf_overflow(x, columns):
    """Tiles of one row of blocks, all kept alive: the last one does not fit."""
    blocks = []
    for i in range(x.shape[1] // columns):
        block = nl.ndarray((128, columns), dtype=x.dtype, name=f"block{i}")  # wrong
        nisa.dma_copy(dst=block, src=x[:, nl.ds(i * columns, columns)])
        blocks.append(block)


@nki.jit
def sbuf_of_trn1(x):
    """198,024 bytes of each partition of trn1, which has 196,608."""
    tiles = []
    for i in range(3):
        tile = nl.ndarray((128, 16502), dtype=nl.float32, name=f"tile{i}")  # wrong
        nisa.dma_copy(dst=tile, src=x)
        tiles.append(tile)


@nki.jit
def wrong_engine(x):
    """GpSimd reads PSUM, which it does not reach."""
    tile = nl.load(x)
    total = nl.ndarray((128, 128), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=total, stationary=tile, moving=tile)
    copy = nl.ndarray((128, 128), dtype=nl.float32)
    nisa.tensor_copy(dst=copy, src=total, engine=nisa.engine.gpsimd)  # wrong


@nki.jit
def mixed_dtypes(lhs_t, rhs):
    """float32 by bfloat16."""
    left, right = nl.load(lhs_t), nl.load(rhs)
    total = nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=total, stationary=left, moving=right)  # wrong


@nki.jit
def uninitialised(x):
    """Half of a tile is loaded, all of it is used."""
    tile = nl.ndarray(x.shape, dtype=x.dtype)
    half = x.shape[1] // 2
    nisa.dma_copy(dst=tile[:, 0:half], src=x[:, 0:half])
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=2.0)  # wrong


@nki.jit
def race(x):
    """Both cores write the whole output, each its own values."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    tile = nl.load(x)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=float(nl.program_id(0)))
    nisa.dma_copy(dst=out, src=tile)  # wrong
    return out


@nki.jit
def barrier_on_one_core(x):
    """Core 0 waits for a core that does not come."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    if nl.program_id(0) == 0:
        nisa.core_barrier(data=out, cores=(0, 1))  # wrong
    return out


@nki.jit
def sendrecv_mismatch(x):
    """The cores send tiles of different widths."""
    width = 8 + nl.program_id(0)
    own = nl.load(x[:, 0:width])
    other = nl.empty_like(own)
    peer = 1 - nl.program_id(0)
    nisa.sendrecv(src=own, dst=other, send_to_rank=peer, recv_from_rank=peer, pipe_id=0)  # wrong


@nki.jit
def index_out_of_bounds(table, rows):
    """A row number beyond the table's end."""
    index = nl.load(rows)
    picked = nl.ndarray((128, table.shape[1]), dtype=table.dtype)
    nisa.dma_copy(dst=picked, src=table.vector_select(0, index))  # wrong


@nki.jit
def one_core_too_few(x):
    """Written for two cores and launched on one."""
    tile = nl.load(x)
    other = nl.empty_like(tile)
    nisa.sendrecv(src=tile, dst=other, send_to_rank=1, recv_from_rank=1, pipe_id=0)  # wrong


@nki.jit
def later_generation(x):
    """Exponentials on the Vector engine are NeuronCore-v4's."""
    tile = nl.load(x)
    nisa.exponential(dst=tile, src=tile)  # wrong


# ---- and some more -----------------------------------------------------------------------------


@nki.jit
def private_output(x):
    """Returns a tensor that is not in shared HBM."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.private_hbm)  # wrong
    nl.store(out, nl.load(x))
    return out


@nki.jit
def unwritten_output(x):
    """Returns a tensor that nothing was written to."""
    return nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)  # wrong


@nki.jit
def asserts(x):
    """A condition of the kernel's own that does not hold."""
    assert x.shape[0] <= 64, f"{x.shape[0]} rows"  # wrong


@nki.jit
def unknown_keyword(x):
    """A keyword of the first NKI."""
    tile = nl.load(x)
    nisa.tensor_scalar(tile, tile, nl.add, 1.0, mask=None)  # wrong


@nki.jit
def slice_out_of_bounds(x):
    """A slice that ends beyond its tensor."""
    nl.load(x[:, 0:9])  # wrong


@nki.jit
def uneven_outputs(x):
    """The cores allocate shared tensors of different shapes."""
    return nl.ndarray((128, 8 + nl.program_id(0)), dtype=x.dtype, buffer=nl.shared_hbm)  # wrong


@nki.jit
def too_many_partitions(x):
    """256 rows in a memory of 128 partitions."""
    nl.ndarray((256, 8), dtype=x.dtype)  # wrong


@nki.jit
def misaligned_partitions(x):
    """64 partitions from 32 on."""
    tile = nl.load(x)
    nisa.tensor_scalar(dst=tile[32:96], data=tile[32:96], op0=nl.add, operand0=1.0)  # wrong


@nki.jit
def dma_from_psum(x):
    """DMA reads PSUM."""
    tile = nl.load(x)
    total = nl.ndarray((128, 128), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=total, stationary=tile, moving=tile)
    out = nl.ndarray((128, 128), dtype=nl.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=total)  # wrong
    return out
