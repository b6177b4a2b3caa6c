"""Data through a schedule, compared with numpy: what `trnsim collective --check` does.

The expected values follow from the collective alone (which pieces a rank gives and gets), so that a
schedule that is wrong anywhere shows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from trnsim.collectives.execute import execute
from trnsim.collectives.schedule import Collective, Schedule
from trnsim.device.dtypes import is_float, numpy_dtype
from trnsim.device.errors import BadInput, TrnsimError
from trnsim.device.units import format_bytes

MODES = ("random", "all_ones")
MOST_BYTES = 2**28  # of all inputs and outputs; larger collectives are checked with fewer elements
MOST_CHUNKS = 4_000_000  # moved; about 6 us each
_EQUAL_ON_ALL = ("all_reduce", "all_gather", "broadcast")
_UFUNC = {"add": np.add, "multiply": np.multiply, "minimum": np.minimum, "maximum": np.maximum}
_BITS = {"and": np.bitwise_and, "or": np.bitwise_or}


class WrongValues(TrnsimError):
    """A schedule gives other values than numpy: the message names rank, element and both values."""


@dataclass(frozen=True)
class Checked:
    """A check that passed: elements checked, of how many the collective has, and how exactly."""

    elements: int
    whole: int
    exact: bool

    def __str__(self) -> str:
        how = "bit for bit" if self.exact else "within rounding"
        some = "" if self.elements == self.whole else f" ({self.elements} of {self.whole} elements)"
        return f"ok, {how}{some}"


def check(
    collective: Collective, schedule: Schedule, mode: str = "random", seed: int = 0
) -> Checked:
    """Run the schedule on data and compare. Raises WrongValues with the first wrong element.

    Raises BadInput for a mode that does not exist, and for schedules too large to run here.
    """
    if mode not in MODES:
        raise BadInput("-c", mode, MODES)
    chunks = sum(int(b.span.sum(dtype=np.int64)) * b.count * b.replicas for b in schedule.blocks)
    if chunks > MOST_CHUNKS:
        moved = f"{collective.ranks} ranks, which move {chunks} chunks"
        raise BadInput("-c", moved, f"at most {MOST_CHUNKS} chunks: fewer ranks")
    small = _shrunk(collective, schedule)
    inputs = _inputs(small, mode, seed)
    outputs = execute(small, schedule, inputs)
    exact = not (small.reducing and is_float(small.dtype)) or small.reduction != "add"
    _compare(small, inputs, outputs)
    return Checked(int(small.piece_counts.sum()), int(collective.piece_counts.sum()), exact)


def _shrunk(collective: Collective, schedule: Schedule) -> Collective:
    """The collective with fewer elements, if it has too many; every piece keeps all its chunks."""
    total = _bytes(collective)
    if total <= MOST_BYTES:
        return collective
    cut, least = -(-total // MOST_BYTES), 2 * schedule.parts
    counts = [min(c, max(least, c // cut)) for c in np.atleast_1d(collective.counts).tolist()]
    single = isinstance(collective.counts, int)
    small = replace(collective, counts=counts[0] if single else tuple(counts))
    if _bytes(small) > MOST_BYTES:
        raise BadInput("-c", f"{format_bytes(_bytes(small))} of data", format_bytes(MOST_BYTES))
    return small


def _bytes(collective: Collective) -> int:
    """Inputs and outputs of all ranks; the output of all ranks is estimated from the first's."""
    n = collective.ranks
    if isinstance(collective.counts, int):
        root = collective.root
        each = max(collective.input_count(r) + collective.output_count(r) for r in {0, root, n - 1})
        return n * each * collective.itemsize
    each = (collective.input_count(r) + collective.output_count(r) for r in range(n))
    return sum(each) * collective.itemsize


def _inputs(collective: Collective, mode: str, seed: int) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    counts = [collective.input_count(rank) for rank in range(collective.ranks)]
    dtype = numpy_dtype(collective.dtype)
    if mode == "all_ones":
        return [np.ones(count, dtype) for count in counts]
    return [_random(random, count, dtype, is_float(collective.dtype)) for count in counts]


def _random(random: np.random.Generator, count: int, dtype: np.dtype, floats: bool) -> np.ndarray:
    if floats:
        return random.standard_normal(count, np.float32).astype(dtype)
    if dtype == np.bool_:
        return random.integers(0, 2, count).astype(dtype)
    return random.integers(0, 256, count * dtype.itemsize, np.uint8).view(dtype)


def _compare(
    collective: Collective, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray]
) -> None:
    pieces = _pieces(collective, inputs)
    for rank, got in enumerate(outputs):
        for slot in collective.outputs(rank):
            mine = got[slot.offset : slot.offset + slot.count]
            wanted, slack = pieces[slot.piece]
            _compare_piece(collective, rank, slot.piece, mine, wanted, slack)
    if collective.kind in _EQUAL_ON_ALL:
        first = outputs[0].tobytes()
        for rank, got in enumerate(outputs):
            if got.tobytes() != first:
                raise WrongValues(f"check failed: {_title(collective)}: rank {rank} differs from 0")


def _pieces(
    collective: Collective, inputs: Sequence[np.ndarray]
) -> dict[int, tuple[np.ndarray, np.ndarray | None]]:
    """piece -> (values, allowed difference or None): what it holds once all have contributed."""
    given: dict[int, list[np.ndarray]] = {}
    for rank, array in enumerate(inputs):
        for slot in collective.inputs(rank):
            given.setdefault(slot.piece, []).append(array[slot.offset : slot.offset + slot.count])
    if not collective.reducing:
        return {piece: (arrays[0], None) for piece, arrays in given.items()}
    return {piece: _reduced(collective, arrays) for piece, arrays in given.items()}


def _reduced(
    collective: Collective, arrays: list[np.ndarray]
) -> tuple[np.ndarray, np.ndarray | None]:
    name, dtype = str(collective.reduction), arrays[0].dtype
    ufunc = _UFUNC.get(name) or _BITS[name]
    if dtype == np.bool_:
        ufunc = np.logical_or if name in ("add", "maximum", "or") else np.logical_and
    if not is_float(collective.dtype):
        return ufunc.reduce(np.stack(arrays), axis=0, dtype=dtype), None
    wide = np.stack(arrays).astype(np.float64)
    total = ufunc.reduce(wide, axis=0)
    if name in ("minimum", "maximum"):
        return total, None
    largest = np.abs(wide).sum(axis=0) if name == "add" else np.abs(total)
    import ml_dtypes

    step = float(ml_dtypes.finfo(dtype).eps)
    return total, len(arrays) * step * largest + float(ml_dtypes.finfo(dtype).smallest_subnormal)


def _compare_piece(
    collective: Collective,
    rank: int,
    piece: int,
    got: np.ndarray,
    wanted: np.ndarray,
    slack: np.ndarray | None,
) -> None:
    if slack is None:
        wrong = ~_same(got, wanted)
    else:
        wrong = ~(np.abs(got.astype(np.float64) - wanted) <= slack)  # a NaN is wrong too
    if wrong.any():
        at = int(np.argmax(wrong))
        raise WrongValues(
            f"check failed: {_title(collective)}: rank {rank}, piece {piece}, element {at} is "
            f"{got[at]}, must be {wanted[at]}"
        )


def _same(got: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Element by element, bit for bit (a NaN equals itself)."""
    if got.dtype != wanted.dtype:
        return got.astype(np.float64) == wanted
    bits = np.dtype(f"u{got.dtype.itemsize}")
    return got.view(bits) == np.ascontiguousarray(wanted).view(bits)


def _title(collective: Collective) -> str:
    return f"{collective.kind} of {collective.ranks} ranks"
