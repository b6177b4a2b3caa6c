"""The habits of nccom-test: its operations, data types and sizes, as its users write them.

Source: AWS Neuron documentation, tools/neuron-sys-tools/nccom-test.rst (SDK 2.32). Operations that
the tool does not have (broadcast, reduce, gather, scatter, barrier, uneven reduce_scatter) follow
the conventions of nccl-tests (NVIDIA/nccl-tests, doc/PERFORMANCE.md).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

import numpy as np

from trnsim.collectives.schedule import Collective
from trnsim.device.dtypes import numpy_dtype
from trnsim.device.errors import BadInput
from trnsim.device.units import format_bytes

DEFAULT_SIZE = "32M"
STEPS = 10  # without -i and -f, the range is cut into this many steps
MOST_SIZES = 10_000
ALIGNMENT = 32  # bytes; the guide's alltoallv sample rounds uneven counts up to this

DTYPES = {
    "uint8": "ui8", "int8": "i8", "fp8": "f8E4M3", "uint16": "ui16", "int16": "i16", "fp16": "f16",
    "bf16": "bf16", "uint32": "ui32", "int32": "i32", "fp32": "f32",
}  # fmt: skip
_DTYPE_ALIASES = {
    "fp8e4": "fp8", "bfloat16": "bf16", "float16": "fp16", "float32": "fp32",
    **{stablehlo.lower(): name for name, stablehlo in DTYPES.items()},
}  # fmt: skip
REDUCTIONS = {"sum": "add", "prod": "multiply", "min": "minimum", "max": "maximum"}


@dataclass(frozen=True)
class Operation:
    """One operation: its long name, the kind of collective that it is, and what it takes.

    total: its size counts the pieces of all ranks, so each rank has 1/n of it.
    """

    name: str
    kind: str
    total: bool = False
    reducing: bool = False
    rooted: bool = False
    uneven: bool = False


OPERATIONS = {
    op.name: op
    for op in (
        Operation("all_reduce", "all_reduce", reducing=True),
        Operation("all_gather", "all_gather", total=True),
        Operation("all_gatherv", "all_gather", total=True, uneven=True),
        Operation("reduce_scatter", "reduce_scatter", total=True, reducing=True),
        Operation("reduce_scatterv", "reduce_scatter", total=True, reducing=True, uneven=True),
        Operation("alltoall", "all_to_all", total=True),
        Operation("alltoallv", "all_to_all", total=True, uneven=True),
        Operation("sendrecv", "permute"),
        Operation("permute", "permute"),
        Operation("broadcast", "broadcast", rooted=True),
        Operation("reduce", "reduce", reducing=True, rooted=True),
        Operation("gather", "gather", total=True, rooted=True),
        Operation("scatter", "scatter", total=True, rooted=True),
        Operation("barrier", "barrier"),
    )
}
ALIASES = {
    "allr": "all_reduce", "allg": "all_gather", "allgv": "all_gatherv", "redsct": "reduce_scatter",
    "redsctv": "reduce_scatterv", "all_to_all": "alltoall", "all_to_allv": "alltoallv",
    "all_to_all_v": "alltoallv", "all_gather_v": "all_gatherv",
    "reduce_scatter_v": "reduce_scatterv", "send_recv": "sendrecv", "collective_permute": "permute",
}  # fmt: skip


def operation(name: str) -> Operation:
    """The operation by its short or long name. Raises BadInput with the nearest name."""
    key = str(name).lower()
    found = OPERATIONS.get(ALIASES.get(key, key))
    if found is None:
        raise BadInput("operation", name, (*OPERATIONS, *ALIASES))
    return found


def dtype(name: str) -> tuple[str, str]:
    """(nccom-test's name, StableHLO name) of a data type. Raises BadInput with the nearest name."""
    key = _DTYPE_ALIASES.get(str(name).lower(), str(name).lower())
    if key not in DTYPES:
        raise BadInput("-d", name, DTYPES)
    return key, DTYPES[key]


_SIZE = re.compile(r"([0-9]*\.?[0-9]+)\s*([A-Za-z]*)")
_BINARY = {"": 1, "b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


@dataclass(frozen=True)
class Size:
    """A size as it was written, and the bytes that it is read as."""

    text: str
    nbytes: int

    @property
    def note(self) -> str | None:
        """What to say about a unit that others read as a power of ten."""
        ambiguous = re.search(r"[kmgt]b?$", self.text, re.IGNORECASE)
        return f"{self.text} is {format_bytes(self.nbytes)}" if ambiguous else None


def size(text: str, field: str) -> Size:
    """`32M`, `1kb`, `1GB` (binary, as nccom-test reads them), `32MiB` or plain bytes.

    Raises BadInput for anything else and for parts of a byte.
    """
    match = _SIZE.fullmatch(str(text).strip())
    unit = match.group(2).lower() if match else "?"
    short = unit.removesuffix("b").removesuffix("i") if len(unit) > 1 else unit
    if match is None or short not in _BINARY:
        raise BadInput(
            field, repr(text), "bytes, or a number with k, M, G (binary) or KiB, MiB, GiB"
        )
    exact = Decimal(match.group(1)) * _BINARY[short]
    if exact != int(exact):
        raise BadInput(field, text, f"whole bytes; this is {exact} B")
    return Size(str(text), int(exact))


def sweep(begin: int, end: int, step: int | None = None, factor: int | None = None) -> list[int]:
    """The sizes from -b to -e, by -i bytes or -f times. Raises BadInput for a range without an end.

    Without a step or a factor, a tenth of the range is the step.
    """
    if begin > end:
        raise BadInput("-b", f"{begin} B", f"at most -e, which is {end} B")
    if step is not None and factor is not None:
        raise BadInput("-i", step, "only one of -i and -f")
    if factor is not None:
        return _by_factor(begin, end, factor)
    if step is not None and step < 1:
        raise BadInput("-i", step, "1 or more bytes")
    step = step or max(1, (end - begin) // STEPS)
    _check_many((end - begin) // step + 1, "-i", step)
    return list(range(begin, end + 1, step))


def _by_factor(begin: int, end: int, factor: int) -> list[int]:
    if factor < 2:
        raise BadInput("-f", factor, "a whole number of 2 or more: sizes would never reach -e", 2)
    if begin < 1:
        raise BadInput("-b", begin, "1 or more with -f: 0 times anything stays 0", 1)
    sizes = [begin]
    while sizes[-1] * factor <= end:
        sizes.append(sizes[-1] * factor)
    return sizes


def _check_many(count: int, field: str, value: int) -> None:
    if count > MOST_SIZES:
        raise BadInput(field, f"{value} B", f"at most {MOST_SIZES} sizes; this gives {count}")


@dataclass(frozen=True)
class Shares:
    """How an uneven operation divides a size: weights int[n] by piece, or int[n, n] by pair."""

    weights: tuple[tuple[int, ...], ...]


def collective(
    op: Operation,
    nbytes: int,
    dtype: str,
    ranks: int,
    *,
    reduction: str = "add",
    root: int = 0,
    pairs: Sequence[tuple[int, int]] = (),
    shares: Shares | None = None,
) -> Collective:
    """The collective that an operation of `nbytes` (see `Collective.nbytes`) is, in `ranks` ranks.

    dtype: StableHLO name. Pieces are rounded up to whole elements, uneven ones to 32 bytes, so the
    collective may be a little larger than asked; an operation of no bytes stays empty. A barrier
    has no size.
    """
    elements = -(-nbytes // numpy_dtype(dtype).itemsize)
    counts: int | tuple[int, ...] = -(-elements // ranks) if op.total else elements
    if shares is not None:
        counts = _divided(op, elements, ranks, shares, dtype)
    return Collective(
        op.kind,
        ranks,
        1 if op.kind == "barrier" else counts,
        dtype,
        reduction=reduction if op.reducing else None,
        root=root if op.rooted else 0,
        pairs=tuple(pairs) if op.kind == "permute" else (),
    )


def _divided(
    op: Operation, elements: int, ranks: int, shares: Shares, dtype: str
) -> tuple[int, ...]:
    """Elements of every piece: each row of weights divides the size; to whole 32 bytes, upwards."""
    table = np.array(shares.weights, np.int64)
    rows = ranks if op.kind == "all_to_all" else 1
    if table.shape == (1, ranks) and rows == ranks:
        table = np.repeat(table, ranks, axis=0)
    if table.shape != (rows, ranks):
        have = " x ".join(map(str, table.shape))
        raise BadInput("counts of --variable-size-op-metadata", have, f"{rows} x {ranks}")
    unit = max(1, ALIGNMENT // numpy_dtype(dtype).itemsize)
    total = max(1, int(table.sum(axis=1).max()))
    each = [-(-(elements * int(weight)) // (total * unit)) * unit for weight in table.reshape(-1)]
    return tuple(each)


def around(ranks: int) -> tuple[tuple[int, int], ...]:
    """Each rank sends to the next one, as nccl-tests' sendrecv does; none for a single rank."""
    return tuple((rank, (rank + 1) % ranks) for rank in range(ranks)) if ranks > 1 else ()
