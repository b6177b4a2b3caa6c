"""Control flow without data: folding the small integers that decide loops and branches.

A time-only run knows constants, loop counters and, where a program asks for it, the rank. What
depends on anything else stays unknown; a loop or branch that hangs on an unknown predicate needs a
stated trip count or branch (`--assume file.py:12=10`), or is refused with its source line.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from trnsim.device.dtypes import is_float
from trnsim.device.errors import BadInput, Unsupported
from trnsim.device.ops.evaluate import CONTROL_FLOW, evaluate
from trnsim.device.ops.ir import Block, Module, Operation

from .calls import COLLECTIVES
from .program import Decisions

FOLD_LIMIT = 4096  # elements: index tables of the partitioner are folded, activations are not

Known = dict[int, np.ndarray]


def fold(module: Module, ranks: int, stated: Mapping[str, int] | None = None) -> list[Decisions]:
    """The decisions of every rank (one shared dict where the rank does not matter).

    `stated` maps a source line (`file.py:12`) to the trips of its loop or the branch it takes.
    Raises Unsupported with the source line where a predicate stays unknown, BadInput for a stated
    line without a loop or branch.
    """
    stated = stated or {}
    _check_lines(module, stated)
    try:
        return [_Folder(module, None, stated).run()] * ranks
    except _NeedsRank:
        return [_Folder(module, rank, stated).run() for rank in range(ranks)]


def _check_lines(module: Module, stated: Mapping[str, int]) -> None:
    control = (o for o in module.body.walk() if o.name in CONTROL_FLOW)
    lines = sorted({operation.location for operation in control})
    for line in stated:
        if line not in lines:
            raise BadInput("--assume", line, lines or "nothing: no loop or branch in the step")


class _NeedsRank(Exception):
    """A predicate depends on the rank."""


class _Folder:
    def __init__(self, module: Module, rank: int | None, stated: Mapping[str, int]) -> None:
        self.types, self.body, self.rank, self.stated = module.types, module.body, rank, stated
        self.decisions: Decisions = {}
        self.by_rank: set[int] = set()  # values that are unknown only because the rank is

    def run(self) -> Decisions:
        self.block(self.body, {})
        return self.decisions

    def block(self, block: Block, known: Known) -> None:
        for operation in block.operations:
            self.visit(operation, known)

    def visit(self, operation: Operation, known: Known) -> None:
        match operation.name:
            case "while":
                self.loop(operation, known)
            case "case" | "if":
                self.branch(operation, known)
            case "partition_id" if self.rank is None:
                self.by_rank.update(operation.results)
            case "partition_id":
                known[operation.results[0]] = np.asarray(self.rank, np.uint32)
            case "replica_id":
                known[operation.results[0]] = np.asarray(0, np.uint32)
            case _ if operation.name not in COLLECTIVES:
                self.compute(operation, known)

    def compute(self, operation: Operation, known: Known) -> None:
        if not self.foldable(operation):
            return
        if all(value in known for value in operation.operands):
            inputs = [known[value] for value in operation.operands]
            known.update(
                zip(operation.results, evaluate(operation, inputs, self.types), strict=True)
            )
        elif all(value in known or value in self.by_rank for value in operation.operands):
            self.by_rank.update(operation.results)

    def foldable(self, operation: Operation) -> bool:
        touched = [self.types[value] for value in (*operation.operands, *operation.results)]
        return all(t.size <= FOLD_LIMIT and not is_float(t.dtype) for t in touched)

    def bind(self, targets: Sequence[int], sources: Sequence[int], known: Known) -> Known:
        """The known values of `targets` when they take those of `sources`."""
        self.by_rank.difference_update(targets)
        self.by_rank.update(t for t, s in zip(targets, sources, strict=True) if s in self.by_rank)
        return {t: known[s] for t, s in zip(targets, sources, strict=True) if s in known}

    def loop(self, operation: Operation, known: Known) -> None:
        condition, body = operation.regions
        carried = self.bind(operation.results, operation.operands, known)
        trips, stated = 0, self.stated.get(operation.location)
        while self.holds(operation, condition, known | carried, trips, stated):
            inner = dict(known) | self.bind(body.arguments, operation.results, carried)
            self.block(body, inner)
            carried = self.bind(operation.results, body.returns, inner)
            trips += 1
        known.update(carried)
        self.decisions.setdefault(operation.results[0], []).append(trips)

    def holds(
        self, operation: Operation, condition: Block, known: Known, trips: int, stated: int | None
    ) -> bool:
        if stated is not None:
            return trips < stated
        inner = known | self.bind(condition.arguments, operation.results, known)
        self.block(condition, inner)
        return bool(self.predicate(operation, condition.returns[0], inner))

    def branch(self, operation: Operation, known: Known) -> None:
        stated = self.stated.get(operation.location)
        index = stated if stated is not None else int(
            self.predicate(operation, operation.operands[0], known)
        )  # fmt: skip
        if operation.name == "if" and stated is None:
            index = 0 if index else 1
        count = len(operation.regions)
        taken = operation.regions[index if 0 <= index < count else count - 1]
        inner = dict(known)
        self.block(taken, inner)
        known.update(self.bind(operation.results, taken.returns, inner))
        self.decisions.setdefault(operation.results[0], []).append(index)

    def predicate(self, operation: Operation, value: int, known: Known) -> np.ndarray:
        if value in known:
            return known[value]
        if value in self.by_rank:
            raise _NeedsRank
        where = operation.location or "unknown line"
        raise Unsupported(
            f"{operation.name} at {where} depends on data, which a time-only run does not have;"
            f" state its trips or branch with --assume {where}=N"
        )
