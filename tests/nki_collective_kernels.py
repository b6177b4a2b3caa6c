"""Kernels with `nki.collectives` that the tests run, on Ray too: so they are in a file."""

# pyright: reportMissingImports=false
# `nki` is there once installed, at run time.
from trnsim.device.nki import install

install()

import nki  # noqa: E402
import nki.collectives as ncc  # noqa: E402
import nki.isa as nisa  # noqa: E402
import nki.language as nl  # noqa: E402

OPS = {"add": nl.add, "minimum": nl.minimum, "maximum": nl.maximum}


def hbm(shape, like):
    return nl.ndarray(shape, dtype=like.dtype, buffer=nl.shared_hbm)


def copied(x):
    """A kernel's argument in shared HBM, each core of the pair having copied its half."""
    made = hbm(x.shape, x)
    each = x.shape[0] // nl.num_programs(0)
    own = nl.ds(nl.program_id(0) * each, each)
    nisa.dma_copy(dst=made[own], src=x[own])
    return made


def zeros(shape, dtype):
    """Zeros in shared HBM."""
    made = nl.ndarray(shape, dtype=dtype, buffer=nl.shared_hbm)
    nl.store(made, nl.zeros(shape, dtype=dtype))
    return made


def returned(tensor):
    """What a kernel returns: a copy, each core of the pair having made its half."""
    return copied(tensor)


@nki.jit
def all_reduce(x, groups, op="add"):
    src, dst = copied(x), hbm(x.shape, x)
    ncc.all_reduce([src], [dst], ncc.ReplicaGroup(groups), OPS[op])
    return returned(dst)


@nki.jit
def all_gather(x, groups):
    src, dst = copied(x), hbm((x.shape[0] * len(groups[0]), x.shape[1]), x)
    ncc.all_gather(srcs=[src], dsts=[dst], replica_group=groups, collective_dim=0)
    return returned(dst)


@nki.jit
def reduce_scatter(x, groups, op="add"):
    src, dst = copied(x), hbm((x.shape[0] // len(groups[0]), x.shape[1]), x)
    ncc.reduce_scatter([src], [dst], groups, 0, OPS[op])
    return returned(dst)


@nki.jit
def all_to_all(x, groups):
    src, dst = copied(x), hbm(x.shape, x)
    ncc.all_to_all([src], [dst], groups, 0)
    return returned(dst)


@nki.jit
def permute(x, pairs):
    src, dst = copied(x), copied(x)
    ncc.collective_permute([src], [dst], pairs)
    return returned(dst)


@nki.jit
def coalesced(a, b, groups, what):
    """One call with two tensors of different sizes."""
    n = len(groups[0])
    srcs, grown = [copied(a), copied(b)], n if what == "all_gather" else 1
    shrunk = n if what == "reduce_scatter" else 1
    dsts = [hbm((t.shape[0] * grown // shrunk, t.shape[1]), t) for t in (a, b)]
    if what == "all_reduce":
        ncc.all_reduce(srcs, dsts, groups, nl.add)
    elif what == "reduce_scatter":
        ncc.reduce_scatter(srcs, dsts, groups, 0, nl.add)
    else:
        getattr(ncc, what)(srcs, dsts, groups, 0)
    return returned(dsts[0]), returned(dsts[1])


@nki.jit
def in_sbuf(x, groups, what, dim=0):
    """Each core's own collective, on its half of the rows; the results one after another."""
    n, cores = len(groups[0]), nl.num_programs(0)
    rows, columns = x.shape[0] // cores, x.shape[1]
    core = nl.program_id(0)
    src = nl.ndarray((rows, columns), dtype=x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=src, src=x[nl.ds(core * rows, rows)])
    shapes = {"all_gather0": (rows * n, columns), "all_gather1": (rows, columns * n),
              "all_reduce0": (rows, columns), "reduce_scatter0": (rows // n, columns)}  # fmt: skip
    dst = nl.ndarray(shapes[f"{what}{dim}"], dtype=x.dtype, buffer=nl.sbuf)
    if what == "all_gather":
        ncc.all_gather([src], [dst], groups, dim)
    elif what == "all_reduce":
        ncc.all_reduce([src], [dst], groups, nl.add)
    else:
        ncc.reduce_scatter([src], [dst], groups, dim, nl.add)
    out = hbm((dst.shape[0] * cores, dst.shape[1]), x)
    nisa.dma_copy(dst=out[nl.ds(core * dst.shape[0], dst.shape[0])], src=dst)
    return out


@nki.jit
def ring_gather(x, groups, channels=1, on_chip=False):
    """An all-gather by implicit permutes: [rank, channel, rows, columns] by whose data it is."""
    n = len(groups[0])
    rows, columns = x.shape[0] // channels, x.shape[1]
    out = hbm((n, channels, rows, columns), x)

    def buffers():
        space = nl.sbuf if on_chip else nl.shared_hbm
        return [nl.ndarray((rows, columns), dtype=x.dtype, buffer=space) for _ in range(channels)]

    here = buffers()
    for c in range(channels):
        nisa.dma_copy(dst=here[c], src=x[nl.ds(c * rows, rows)])
    for step in range(n):
        for c in range(channels):
            rank = ncc.collective_permute_implicit_current_processing_rank_id(
                iteration_id=step, replica_group=groups, channel_id=c
            )
            place = out.ap(
                pattern=[[columns, rows], [1, columns]], offset=c * rows * columns,
                scalar_offset=rank, indirect_dim=0,
            )  # fmt: skip
            nisa.dma_copy(dst=place, src=here[c])
        there = buffers()
        ncc.collective_permute_implicit(
            [[t] for t in here], [[t] for t in there], groups, list(range(channels))
        )
        here = there
    return out


@nki.jit
def ring_reduce(x, groups):
    """One implicit permute of x + 2 x, and whose it is."""
    src, twice, dst = copied(x), hbm(x.shape, x), hbm(x.shape, x)
    tile = nl.load(x)
    nl.store(twice, nl.add(tile, tile))
    ncc.collective_permute_implicit_reduce([[src]], [[twice]], [[dst]], groups, nl.add)
    rank = ncc.collective_permute_implicit_current_processing_rank_id(1, groups)
    return returned(dst), int(rank)


@nki.jit
def selected(table):
    """The row of [ranks, n] that has the rank's number."""
    out = hbm((1, table.shape[1]), table)
    row = table.ap(pattern=[[table.shape[1], 1], [1, table.shape[1]]], scalar_offset=ncc.rank_id())
    nisa.dma_copy(dst=out, src=row)
    return out


@nki.jit
def ragged(x, metadata, groups, what, out_size, in_sbuf=False, known=False, placed=False):
    """`all_to_all_v` or `all_gather_v`; returns dst, which begins as zeros, and the metadata."""
    dst, space = zeros((1, out_size), x.dtype), nl.shared_hbm
    src = hbm((1, x.shape[0]), x)
    nisa.dma_copy(dst=src, src=x.reshape((1, x.shape[0])))
    shape = tuple(metadata.shape)
    if in_sbuf:
        shape, space = (1, *shape), nl.sbuf
    table = nl.ndarray(shape, dtype=metadata.dtype, buffer=space)
    nisa.dma_copy(dst=table, src=metadata.reshape(shape))
    call = getattr(ncc, what)
    call([src], [dst], groups, table, recv_counts_known=known, has_rdispls=placed)
    after = hbm(metadata.shape, metadata)
    nisa.dma_copy(dst=after.reshape(shape), src=table)
    return dst, after


@nki.jit
def overlapped(x, groups, use_result):
    """An all-reduce in SBUF beside work of the Vector engine that does not need it."""
    tile, total = nl.load(x), nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    ncc.all_reduce([tile], [total], groups, nl.add)
    result = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=result, data1=tile, data2=total if use_result else tile, op=nl.add)
    out = hbm(x.shape, x)
    nisa.dma_copy(dst=out, src=result)
    return out


@nki.jit
def late_rank(x, groups, late, work):
    """All-reduce in SBUF to which rank `late` comes after `work` adds."""
    tile, total = nl.load(x), nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    for _ in range(work if int(ncc.rank_id()) == late else 0):
        nisa.tensor_tensor(dst=tile, data1=tile, data2=tile, op=nl.maximum)
    ncc.all_reduce([tile], [total], groups, nl.add)
    out = hbm(x.shape, x)
    nisa.dma_copy(dst=out, src=total)
    return out


@nki.jit
def differing(x, groups, what):
    """Rank 1 does something else than the others."""
    odd = int(ncc.rank_id()) == 1
    wide = nl.bfloat16 if what == "dtype" and odd else x.dtype
    rows = 32 if what == "count" and odd else x.shape[0]
    src = zeros((rows, x.shape[1]), wide)
    dst = nl.ndarray((rows, x.shape[1]), dtype=wide, buffer=nl.shared_hbm)
    calls = [lambda: ncc.all_reduce([src], [dst], groups, nl.add),
             lambda: ncc.all_to_all([src], [dst], groups, 0)]  # fmt: skip
    if what == "order":
        calls = calls[::-1] if odd else calls
        calls[0]()
        calls[1]()
    elif what == "kind":
        calls[1 if odd else 0]()
    elif what == "op":
        ncc.all_reduce([src], [dst], groups, nl.maximum if odd else nl.add)
    elif what == "groups":
        ncc.all_reduce([src], [dst], [[0, 1, 2, 3]] if odd else groups, nl.add)
    elif what == "space" and odd:
        ncc.all_reduce([nl.load(src)], [nl.empty_like(nl.load(src))], groups, nl.add)
    elif what == "early" and odd:
        return returned(src)
    elif what == "late" and odd:
        calls[0]()
        calls[0]()
    else:
        calls[0]()
    return returned(dst)


@nki.jit
def one_core_only(x, groups):
    """Core 1 of the pair does not come to a collective of shared HBM."""
    src, dst = copied(x), hbm(x.shape, x)
    if nl.program_id(0) == 0:
        ncc.all_reduce([src], [dst], groups, nl.add)
    else:
        nisa.core_barrier(data=src, cores=(0, 1))
    return dst


@nki.jit
def refused(x, groups, what):
    """Calls that the documentation does not allow."""
    sbuf = nl.load(x)
    shared, to = copied(x), hbm(x.shape, x)
    psum = nl.ndarray((8, 8), dtype=nl.float32, buffer=nl.psum)
    deep = nl.ndarray((8, 2, 2), dtype=x.dtype, buffer=nl.sbuf)
    half = nl.ndarray(x.shape, dtype=nl.bfloat16, buffer=nl.shared_hbm)
    calls = {
        "psum": lambda: ncc.all_reduce([psum], [psum], groups, nl.add),
        "mixed": lambda: ncc.all_reduce([sbuf], [to], groups, nl.add),
        "dtypes": lambda: ncc.all_reduce([shared], [half], groups, nl.add),
        "several": lambda: ncc.all_reduce([sbuf, sbuf], [sbuf, sbuf], groups, nl.add),
        "axes": lambda: ncc.all_reduce([deep], [deep], groups, nl.add),
        "op": lambda: ncc.all_reduce([shared], [to], groups, nl.multiply),
        "sizes": lambda: ncc.all_gather([shared], [to], groups, 0),
        "dim": lambda: ncc.all_gather([shared], [to], groups, 1),
        "scatter dim": lambda: ncc.reduce_scatter([sbuf], [sbuf], groups, 1, nl.add),
        "sbuf": lambda: ncc.all_to_all([sbuf], [sbuf], groups, 0),
        "indivisible": lambda: ncc.all_to_all([to[0:3]], [to[3:6]], groups, 0),
        "permutes": lambda: ncc.collective_permute([shared, to], [to, shared], [(0, 1)]),
        "channels": lambda: ncc.collective_permute_implicit([[shared]], [[to]], groups, [1]),
        "many": lambda: ncc.collective_permute_implicit(
            [[shared]] * 3, [[to]] * 3, groups, [0, 1, 2]
        ),
        "lists": lambda: ncc.collective_permute_implicit([[shared]], [[to]], groups, [0, 1]),
        "priority": lambda: ncc.all_reduce([shared], [to], groups, nl.add, priority=1),
        "tensor": lambda: ncc.all_reduce(shared, to, groups, nl.add),
        "group": lambda: ncc.all_reduce([shared], [to], 3, nl.add),
        "overlap": lambda: ncc.all_reduce([shared], [to], [[0, 1], [1]], nl.add),
        "outside": lambda: ncc.all_reduce([shared], [to], [[0, 99]], nl.add),
        "stranger": lambda: ncc.all_reduce([shared], [to], [[1]], nl.add),
        "unwritten": lambda: ncc.all_reduce([to], [shared], groups, nl.add),
        "gather_v": lambda: ncc.all_gather_v([shared], [to], groups, half),
        "all_to_all_v": lambda: ncc.all_to_all_v([shared], [to], groups, half),
    }  # fmt: skip
    calls[what]()
    return to
