"""From an operator program to what one rank runs: kernels, order, split, residency, homes.

The passes, each in its own place: recognise expanded functions, contract what follows a matmul,
fuse operators into kernels (device), order them (`order.py`), split each over the physical cores of
the logical core, plan what stays in SBUF (device), give values homes in HBM (`buffers.py`) and
place barriers (`barriers.py`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from trnsim.device.chip import Chip
from trnsim.device.core import Core
from trnsim.device.ops.contract import contract
from trnsim.device.ops.fuse import captured, fuse
from trnsim.device.ops.ir import Block, Module, Operation
from trnsim.device.ops.kernel import Cost, Kernel, Part, Residency
from trnsim.device.ops.movement import ScatterKernel, UpdateKernel
from trnsim.device.ops.recognise import recognise
from trnsim.device.ops.residency import plan_residency
from trnsim.device.ops.simplify import simplify

from .barriers import insert_barriers
from .buffers import plan_buffers
from .calls import COLLECTIVES, Calls
from .order import Item, list_schedule
from .program import (
    Branch,
    Move,
    RankProgram,
    RunKernel,
    SetRank,
    StartCollective,
    Step,
    WaitCollective,
    While,
)

Fidelity = Literal["operator", "instruction"]
REPLICATED_BYTES = 64
"""Results up to this size are computed by both cores of a pair instead of being exchanged."""


def compile_program(
    module: Module,
    chip: Chip,
    lnc: int,
    calls: Calls,
    fidelity: Fidelity = "operator",
    commit: Sequence[tuple[int, int]] = (),
) -> RankProgram:
    """The program of every rank of `module` on logical cores of `lnc` physical cores.

    `commit` lists (result index, argument index) pairs: training state that becomes the argument of
    the next step. Raises Unsupported for an operator that is not modelled.
    """
    module = simplify(contract(recognise(module)))
    compiler = _Compiler(module, chip, lnc, calls, fidelity)
    steps = compiler.block(module.body, module.body.returns)
    results = tuple(compiler.home.get(v, v) for v in module.body.returns)
    pinned = (*module.body.arguments, *compiler.constants)
    buffers, arena = plan_buffers(
        steps, compiler.types, compiler.home, compiler.replicated, pinned, results, lnc
    )
    state = tuple((module.body.arguments[a], results[r]) for r, a in commit)
    program = RankProgram(
        name=module.name,
        lnc=lnc,
        steps=insert_barriers(steps, buffers, lnc),
        buffers=buffers,
        constants=compiler.constants,
        arguments=module.body.arguments,
        results=results,
        commit=state,
        arena_bytes=arena,
        barrier_ps=chip.core_barrier_ps if lnc > 1 else 0,
        hbm={},
    )
    return replace(program, hbm=_breakdown(program, chip))


def _breakdown(program: RankProgram, chip: Chip) -> dict[str, int]:
    """Bytes of HBM by use; they sum to what the logical core needs at its peak."""

    def total(values: Iterable[int]) -> int:
        return sum(program.buffers[v].type.nbytes for v in values if v in program.buffers)

    arguments, constants = total(program.arguments), total(program.constants)
    return {
        "arguments": arguments,
        "constants": constants,
        "results and temporaries": program.arena_bytes - arguments - constants,
        "runtime and microcode": chip.hbm_microcode_bytes * program.lnc,
    }


def _read(item: Kernel | Operation) -> tuple[int, ...]:
    return item.inputs if isinstance(item, Kernel) else item.operands


def _made(item: Kernel | Operation) -> tuple[int, ...]:
    return item.outputs if isinstance(item, Kernel) else item.results


def _constant(item: Kernel | Operation) -> bool:
    return isinstance(item, Operation) and item.name == "constant"


@dataclass(frozen=True, slots=True)
class _Placed:
    """A kernel with its share on each physical core."""

    kernel: Kernel
    parts: tuple[Part, ...]


class _Compiler:
    def __init__(
        self, module: Module, chip: Chip, lnc: int, calls: Calls, fidelity: Fidelity
    ) -> None:
        self.types = list(module.types)
        self.chip, self.lnc, self.calls = chip, lnc, calls
        self.fidelity: Fidelity = fidelity
        self.home: dict[int, int] = {}
        self.replicated: set[int] = set()
        self.constants: dict[int, np.ndarray] = {}
        self.keys = 0

    # -- blocks ---------------------------------------------------------------------------------

    def block(
        self, block: Block, returns: Sequence[int], carried: Sequence[int] = ()
    ) -> list[Step]:
        """The steps of one block, without barriers. `carried` arrays may be updated in place."""
        items = fuse([self.closed(o) for o in block.operations], self.types, set(returns))
        order = list_schedule([self.item(item) for item in items])
        ordered = self.in_place([items[i] for i in order], carried, returns)
        return self.emit([self.split(item) for item in ordered], returns)

    def in_place(
        self, items: Sequence[Kernel | Operation], carried: Sequence[int], returns: Sequence[int]
    ) -> list[Kernel | Operation]:
        """Updates of an array that nobody reads again write into its home.

        The array must be this block's own (`carried`, or made here and no constant), and no
        collective's: that may still be in flight.
        """
        own = {*carried, *(v for item in items if not _constant(item) for v in _made(item))}
        kept = {
            *returns,
            *(v for item in items if isinstance(item, Operation) for v in _read(item)),
        }
        last = {value: at for at, item in enumerate(items) for value in _read(item)}
        result = list(items)
        for at, item in enumerate(items):
            if not isinstance(item, UpdateKernel | ScatterKernel):
                continue
            array, updated = item.sources[0], item.targets[0]
            small = self.types[array].nbytes <= REPLICATED_BYTES
            free = array in own - kept and last[array] == at and item.sources.count(array) == 1
            if free and not small and self.types[array] == self.types[updated]:
                result[at] = item.renamed(in_place=True)
                self.home[updated] = self.home.get(array, array)
        return result

    def closed(self, operation: Operation) -> Operation:
        """The operation with values that its regions capture appended to its operands."""
        if not operation.regions or operation.name not in ("while", "case", "if"):
            return operation
        extra = sorted(captured(operation) - set(operation.operands))
        return replace(operation, operands=(*operation.operands, *extra))

    def item(self, item: Kernel | Operation) -> Item:
        if isinstance(item, Kernel):
            duration = item.cost(self.chip, item.part(0, self.lnc)).duration
            return Item(item.inputs, item.outputs, duration)
        if item.name not in COLLECTIVES:
            return Item(item.operands, item.results, 0)
        size = max(self.types[v].nbytes for v in (*item.operands, *item.results))
        stream = self.calls.stream(self.calls.groups(item))
        return Item(item.operands, item.results, self.calls.estimate(size), stream)

    def split(self, kernel: Kernel | Operation) -> "_Placed | Operation":
        """A kernel with the shares of the physical cores; other operators as they are."""
        if isinstance(kernel, Operation):
            return kernel
        small = sum(self.types[v].nbytes for v in kernel.outputs) <= REPLICATED_BYTES
        if self.lnc > 1 and small:
            self.replicated.update(kernel.outputs)
            return _Placed(kernel, (kernel.part(0, 1),) * self.lnc)
        return _Placed(kernel, tuple(kernel.part(core, self.lnc) for core in range(self.lnc)))

    def emit(self, placed: Sequence[_Placed | Operation], returns: Sequence[int]) -> list[Step]:
        residency = self.residency(placed, returns)
        steps: list[Step] = []
        pending: dict[int, int] = {}  # result of a collective in flight -> its key

        def settle(values: Iterable[int]) -> None:
            keys = {pending.pop(v) for v in values if v in pending}
            steps.extend(WaitCollective(key) for key in sorted(keys))

        for index, item in enumerate(placed):
            if isinstance(item, _Placed):
                settle(item.kernel.inputs)
                steps.append(self.run(item, residency[index]))
                continue
            settle(item.operands)
            if item.name not in COLLECTIVES:
                steps += self.foreign(item)
                continue
            for start in self.start(item):
                pending[start.result] = start.key
                steps.append(start)
        settle(list(pending))
        return steps

    def residency(
        self, placed: Sequence[_Placed | Operation], returns: Sequence[int]
    ) -> dict[int, tuple[Residency, ...]]:
        """For each kernel of the block by its place: what stays in SBUF on each core."""
        plans = []
        for core in range(self.lnc):
            sequence = [
                (item.kernel, item.parts) if isinstance(item, _Placed) else item for item in placed
            ]
            plans.append(plan_residency(sequence, core, set(returns), self.chip))
        return {
            i: tuple(plan[i] for plan in plans)
            for i, item in enumerate(placed)
            if isinstance(item, _Placed)
        }

    # -- steps ----------------------------------------------------------------------------------

    def run(self, placed: _Placed, residency: tuple[Residency, ...]) -> RunKernel:
        costs = tuple(
            self.cost(placed.kernel, part, held)
            for part, held in zip(placed.parts, residency, strict=True)
        )
        return RunKernel(placed.kernel, placed.parts, residency, costs)

    def cost(self, kernel: Kernel, part: Part, residency: Residency) -> Cost:
        if part.empty:
            return Cost(0)
        if self.fidelity == "operator" or kernel.fallback:
            return kernel.cost(self.chip, part, residency)
        return kernel.run(Core(self.chip, data=False), {}, part, residency)

    def start(self, operation: Operation) -> list[StartCollective]:
        """One call for each operand; XLA may have combined several into one operator."""
        starts = []
        for operand, result in zip(operation.operands, operation.results, strict=True):
            plan = self.calls.plan(operation, self.types[operand], self.types[result])
            self.keys += 1
            starts.append(
                StartCollective(
                    self.keys, operation, operand, result, plan.groups, plan.collective,
                    plan.schedule, plan.algorithm, plan.reason, self.calls.stream(plan.groups),
                )
            )  # fmt: skip
        return starts

    def foreign(self, operation: Operation) -> list[Step]:
        match operation.name:
            case "partition_id" | "replica_id":
                result = operation.results[0]
                self.replicated.add(result)
                return [SetRank(result, zero=operation.name == "replica_id")]
            case "constant":
                result = operation.results[0]
                value = np.asarray(operation.attributes["value"])
                self.constants[result] = np.broadcast_to(value, self.types[result].shape)
                return []
            case "while":
                return self.loop(operation)
            case _:
                return self.branch(operation)

    def alias(self, values: Sequence[int], homes: Sequence[int]) -> None:
        for value, home in zip(values, homes, strict=True):
            self.home[value] = home

    def small(self, values: Sequence[int]) -> None:
        if self.lnc > 1:
            self.replicated.update(v for v in values if self.types[v].nbytes <= REPLICATED_BYTES)

    def move(self, targets: Sequence[int], sources: Sequence[int]) -> list[Step]:
        pairs = tuple(
            (target, source)
            for target, source in zip(targets, sources, strict=True)
            if self.home.get(source, source) != target
        )
        return [Move(pairs)] if pairs else []

    def loop(self, operation: Operation) -> list[Step]:
        """Carried values live in the buffers of the loop's results."""
        condition, body = operation.regions
        carried = operation.results
        self.small(carried)
        self.alias(condition.arguments, carried)
        self.alias(body.arguments, carried)
        before = self.move(carried, operation.operands[: len(carried)])
        inside = self.block(body, body.returns, body.arguments)
        inside += self.move(carried, body.returns)
        test = self.block(condition, condition.returns)
        loop = While(
            carried[0], tuple(test), condition.returns[0], tuple(inside), operation.location
        )
        return [*before, loop]

    def branch(self, operation: Operation) -> list[Step]:
        self.small(operation.results)
        branches = tuple(
            tuple(self.block(region, region.returns) + self.move(operation.results, region.returns))
            for region in operation.regions
        )
        index = operation.operands[0]
        key = operation.results[0]
        return [Branch(key, index, branches, operation.name == "if", operation.location)]
