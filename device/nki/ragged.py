"""`all_gather_v` and `all_to_all_v`: counts and places come from a uint32 tensor at run time.

Its rows are counts to send, places in src, counts received, places in dst (only with
`has_rdispls`); a column for each rank of the group. It is [rows, n] in HBM, [1, rows, n] in SBUF.
Limits are those that the documentation of nki.collectives states for each.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import BadInput, IllegalInstruction
from ..memory import View
from .collective_call import Call
from .interconnect import Groups, Landed
from .isa_operands import instruction, stored
from .tensor import NkiTensor

GATHERED_RANKS, GATHERED_CORES = 4, 2  # all_gather_v: ranks of a group, at LNC=2 only
SWITCH_GENERATION = 4  # of NeuronCore, whose instances have a NeuronSwitch fabric


@instruction
def all_gather_v(
    srcs, dsts, replica_group, metadata_tensor, recv_counts_known=False, has_rdispls=False,
    priority=None, name=None,
) -> None:  # fmt: skip
    """Slot r of dst begins with the piece of src that rank r sends to all. Flat, in HBM."""
    call = _RaggedCall("all_gather", replica_group, srcs, dsts, metadata_tensor, priority, name)
    cores = call.session.launch.settings.cores
    if call.size != GATHERED_RANKS or cores != GATHERED_CORES or has_rdispls:
        raise IllegalInstruction(
            f"group of {call.size} ranks at LNC={cores}, has_rdispls {bool(has_rdispls)}; allowed: "
            f"the {GATHERED_RANKS} ranks of a chip at LNC={GATHERED_CORES}, without has_rdispls"
        )
    call.exchange(bool(recv_counts_known), False)


@instruction
def all_to_all_v(
    srcs, dsts, replica_group, metadata_tensor, recv_counts_known=False, has_rdispls=False,
    priority=None, name=None,
) -> None:  # fmt: skip
    """Every rank sends a piece of src of its own size to each rank. Flat, in HBM."""
    call = _RaggedCall("all_to_all", replica_group, srcs, dsts, metadata_tensor, priority, name)
    chip = call.session.chip
    if has_rdispls and chip.generation < SWITCH_GENERATION:
        raise IllegalInstruction(f"has_rdispls needs a NeuronSwitch fabric; {chip.name} has none")
    call.exchange(bool(recv_counts_known), bool(has_rdispls))


class _RaggedCall(Call):
    """A call whose counts are in `metadata`."""

    def __init__(
        self, kind: str, replica_group: Any, srcs: Any, dsts: Any, metadata: Any,
        priority: Any, name: str | None,
    ) -> None:  # fmt: skip
        from .collectives import ReplicaGroup

        groups: Groups = ReplicaGroup(replica_group).key
        super().__init__(kind, groups, [(srcs, dsts)], priority, name)
        self.only_hbm()
        self.only_one()
        (self.src,), (self.dst,) = self.srcs[0], self.dsts[0]
        stored(metadata, "metadata_tensor")
        self.metadata: NkiTensor = metadata

    def exchange(self, counts_known: bool, placed: bool) -> None:
        """Meets the other ranks, and puts what arrives where the metadata say."""
        if not self.session.data:
            raise BadInput(f"counts of {self.kind}_v", "unknown", "a run with data")
        table = self._table(placed)
        self.come(self.request((0,), variable=True))
        rows = self._rows_of(table, placed)
        sent, starts = rows["send_counts"], rows["send_displs"]
        if self.kind == "all_gather":
            sent, starts = sent[:1], starts[:1]
        self._check_fits("send", sent, starts, self.src.size)
        source = self._flat(self.src)
        pieces = [source[a : a + n] for a, n in zip(starts, sent, strict=True)]
        row = np.concatenate(pieces) if self.writes_values else None
        self._use_metadata(table, counts_known)
        landed = self.collect((row,), tuple(sent))
        self._receive(landed, rows.get("recv_displs"), counts_known)

    def _use_metadata(self, table: NkiTensor, counts_known: bool) -> None:
        """The collective reads the metadata, and writes the counts received."""
        reads, writes = self.entry.reads_by_channel[0], self.entry.writes_by_channel[0]
        written = () if counts_known else (self._row(table, 2),)
        self.entry = self.entry._replace(
            reads_by_channel=((*reads, stored(table)),), writes_by_channel=((*writes, *written),)
        )

    def _receive(self, landed: Landed, places: list[int] | None, counts_known: bool) -> None:
        group = next(g for g in self.groups if self.session.launch.rank in g)
        me = group.index(self.session.launch.rank) if self.kind == "all_to_all" else 0
        counts = [sent[me] for sent in landed.sends]
        slot = self.dst.size // self.size
        if places is None:
            places = [slot * rank for rank in range(self.size)]
            over = [rank for rank, count in enumerate(counts) if count > slot]
            if over:
                raise IllegalInstruction(
                    f"rank {group[over[0]]} sends {counts[over[0]]} elements; a slot of dst has "
                    f"{slot}"
                )
        self._check_fits("recv", counts, places, self.dst.size)
        if self.writes_values:
            self._put(landed.outputs[0], counts, places)
        self.finish(landed, [])
        for place, count in zip(places, counts, strict=True):
            if count:
                view = self.dst.view_at(self.dst.offset + place, (count,), (1,))
                self.session.note_write(view)
        if not counts_known:
            self._write_counts(counts)

    def _put(self, row: np.ndarray | None, counts: Sequence[int], places: Sequence[int]) -> None:
        assert row is not None
        target, at = self._flat(self.dst), 0
        for count, place in zip(counts, places, strict=True):
            target[place : place + count] = row[at : at + count]
            at += count

    # ---- metadata ------------------------------------------------------------------------

    def _table(self, placed: bool) -> NkiTensor:
        """The metadata as [rows, n] or [1, rows, n]."""
        lead = (1,) if self.metadata.on_chip else ()
        need = 4 if placed else 3
        shape = tuple(self.metadata.shape)
        fits = len(shape) == len(lead) + 2 and shape[: len(lead)] == lead
        if not fits or shape[-2] < need or shape[-1] != self.size:
            wanted = [*lead, need, self.size]
            raise IllegalInstruction(f"metadata_tensor is {list(shape)}; it has to be {wanted}")
        if str(self.metadata.dtype) != "uint32":
            raise IllegalInstruction(f"metadata_tensor is {self.metadata.dtype}, must be uint32")
        return self.metadata

    def _rows_of(self, table: NkiTensor, placed: bool) -> dict[str, list[int]]:
        names = {"send_counts": 0, "send_displs": 1} | ({"recv_displs": 3} if placed else {})
        found = {}
        for name, number in names.items():
            view = self._row(table, number)
            self.session.check_reads((view,), self.session.line)
            found[name] = [int(value) for value in view.array.reshape(-1)]
        return found

    def _row(self, table: NkiTensor, number: int) -> View:
        rows = slice(number, number + 1)
        part = table[:, rows, :] if table.on_chip else table[rows, :]
        return part.device_view()

    def _write_counts(self, counts: Sequence[int]) -> None:
        view = self._row(self.metadata, 2)
        if self.writes_values or self.metadata.on_chip:  # in SBUF each core has its own
            view.array[...] = np.array(counts, np.uint32).reshape(view.shape)
        self.session.note_write(view)

    # ---- flat buffers --------------------------------------------------------------------

    def _flat(self, tensor: NkiTensor) -> np.ndarray:
        if not tensor.is_contiguous():
            raise IllegalInstruction(f"{tensor} does not lie in one piece")
        return stored(tensor, "operand").array.reshape(-1)

    def _check_fits(
        self, way: str, counts: Sequence[int], places: Sequence[int], size: int
    ) -> None:
        for count, place in zip(counts, places, strict=True):
            if place + count > size:
                raise IllegalInstruction(
                    f"{way}_count {count} at {way}_displ {place} leaves the tensor of {size} "
                    "elements"
                )
