"""Bytes of the transfers of a block, from the elements of its chunks."""

from functools import cached_property

import numpy as np

from .schedule import Block

Bytes = np.ndarray | int
"""Of each transfer (int64[R, T]: replicas, pattern), or of all."""


class Sizes:
    """chunks: int64, bytes of every chunk."""

    def __init__(self, chunks: np.ndarray, itemsize: int) -> None:
        spread = int(chunks.max() - chunks.min()) if chunks.size else 0
        self.balanced = spread <= itemsize
        self.equal = int(chunks[0]) if chunks.size and not spread else None
        self._chunks = chunks

    @cached_property
    def before(self) -> np.ndarray:
        """int64: bytes of all chunks before each."""
        return np.concatenate([[0], np.cumsum(self._chunks)])

    def of(self, block: Block, repetition: int) -> Bytes:
        """Exact bytes in one repetition."""
        rows, width = block.replicas, len(block.src)
        if not width:
            return 0
        if self.equal is not None:
            span = only(block.span)
            if span is not None:
                return span * self.equal
            return np.broadcast_to(block.span.astype(np.int64) * self.equal, (rows, width))
        shift = np.zeros(1, np.int64) if block.shift is None else block.shift
        first = block.first(repetition)
        over = np.maximum(first + block.span - block.modulus, 0)  # chunks beyond the wrap
        offset = block.offset + shift[:, None]
        start = offset + first
        nbytes = self.before[start + block.span - over] - self.before[start]
        nbytes += self.before[offset + over] - self.before[offset]
        if nbytes.min() == nbytes.max():
            return int(nbytes[0, 0])
        return np.broadcast_to(nbytes, (rows, width))

    def largest(self, block: Block) -> Bytes:
        """The largest transfer of the same span in the round, for each transfer."""
        nbytes, spans = self.of(block, 0), block.span
        if isinstance(nbytes, int):
            return nbytes
        most = {span: int(nbytes[:, spans == span].max()) for span in np.unique(spans).tolist()}
        if len(most) == 1:
            return next(iter(most.values()))
        return np.broadcast_to([most[span] for span in spans.tolist()], nbytes.shape)


def only(column: np.ndarray) -> int | None:
    """The value of a column that has only one."""
    return int(column[0]) if len(column) and (column == column[0]).all() else None
