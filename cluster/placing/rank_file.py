"""Rank files: one line per rank, in Open MPI's form, that says on which core it runs.

    # trnsim rank file: 1 x trn2.48xlarge at LNC=2, mesh dp=2,tp=32
    rank 0=node0 slot=0:0        # chip 0 of node 0, its logical core 0
    rank 1=node0 slot=0:1

Node n is the n-th host of the job; a slot is chip:logical core. On a fabric of a file, whose ranks
have no cores, all are on `fabric` and a slot is the number of the fabric's rank.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trnsim.device.errors import BadInput

from ..reading import read_text

_LINE = re.compile(r"rank\s+([0-9]+)\s*=\s*(\S+)\s+slot\s*=\s*(?:([0-9]+):)?([0-9]+)")
_FORM = "rank R=nodeN slot=CHIP:CORE"


@dataclass(frozen=True)
class Cores:
    """How slots are numbered: by node, chip and logical core; a fabric of a file has one "chip"."""

    nodes: int
    chips: int
    per_chip: int
    named: bool = True  # False: a fabric of a file

    @property
    def size(self) -> int:
        """All slots."""
        return self.nodes * self.chips * self.per_chip

    def text(self, slot: int) -> str:
        """`node0 slot=3:1`."""
        node, inside = divmod(slot, self.chips * self.per_chip)
        chip, core = divmod(inside, self.per_chip)
        return f"node{node} slot={chip}:{core}" if self.named else f"fabric slot={slot}"

    def slot(self, host: str, chip: str | None, core: str, where: str) -> int:
        """The number of a slot. Raises BadInput for one that does not exist."""
        if not self.named:
            return self._within(f"{where}: slot", int(core), self.size)
        node = host.removeprefix("node")
        if not node.isdecimal() or chip is None:
            raise BadInput(
                where, f"{host} slot={core if chip is None else f'{chip}:{core}'}", _FORM
            )
        inside = self._within(f"{where}: chip", int(chip), self.chips) * self.per_chip
        inside += self._within(f"{where}: core", int(core), self.per_chip)
        return (
            self._within(f"{where}: node", int(node), self.nodes) * self.chips * self.per_chip
            + inside
        )

    @staticmethod
    def _within(field: str, value: int, count: int) -> int:
        if value >= count:
            raise BadInput(field, value, f"0 to {count - 1}", count - 1)
        return value


def rank_file(slots: np.ndarray, cores: Cores, title: str) -> str:
    """The text of a rank file. `slots`: int64[ranks]."""
    lines = [f"rank {rank}={cores.text(slot)}" for rank, slot in enumerate(slots.tolist())]
    return "\n".join([f"# trnsim rank file: {title}", *lines, ""])


def read_rank_file(path: str | Path, cores: Cores, ranks: int) -> np.ndarray:
    """int64[ranks]: the slot of each rank. Lines of other text after # are comments.

    Raises BadFile for a file that cannot be read; BadInput, naming the line, for one that is no
    rank file, a rank that is missing, twice or too many, and a core that two ranks have.
    """
    slots = np.full(ranks, -1, np.int64)
    taken: dict[int, int] = {}
    for number, line in enumerate(read_text(path).splitlines(), 1):
        words = line.partition("#")[0].strip()
        if not words:
            continue
        where = f"{path}: line {number}"
        match = _LINE.fullmatch(words)
        if match is None:
            raise BadInput(where, repr(words), _FORM)
        rank = int(match.group(1))
        if rank >= ranks or slots[rank] >= 0:
            raise BadInput(f"{where}: rank", rank, f"each of 0 to {ranks - 1} once")
        slots[rank] = cores.slot(match.group(2), match.group(3), match.group(4), where)
        first = taken.setdefault(int(slots[rank]), rank)
        if first != rank:
            raise BadInput(f"{where}: slot of rank {rank}", words, f"a core not of rank {first}")
    missing = np.flatnonzero(slots < 0)
    if missing.size:
        raise BadInput(
            f"{path}: ranks",
            f"{ranks - missing.size} ranks",
            f"{ranks}: rank {missing[0]} is missing",
        )
    return slots
