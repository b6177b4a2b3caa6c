"""From a list of operators to kernels in a legal order.

Reshapes are names for the same data. Constants, iotas and broadcasts are recomputed by the rowwise
kernels that use them; transposes that only matmuls read become their operands' layouts. Walking in
order, an operator joins the latest kernel among its producers, or starts one; producers that nobody
else waits for are then pulled into it. What is not the device's (collectives, control flow) comes
back as it is, and the kernels that feed it take no further work.
"""

import math
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from .. import arithmetic
from ..dtypes import is_float
from . import lower
from .group import Group, Node, Space, is_splat, reducer, space_of
from .ir import Block, Operation, TensorType
from .kernel import Kernel, plain
from .rowwise import rowwise_kernel
from .strided import Strided

FOREIGN = frozenset(
    {
        "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute",
        "collective_broadcast", "while", "case", "if", "partition_id", "replica_id",
    }
)  # fmt: skip


VIEWS = ("transpose", "slice", "reverse", "dynamic_slice", "broadcast_in_dim")
"""Operators whose result has only elements of operand 0: of one constant, that constant."""

GENERATED_MAX = 8
"""Operators of a value on constants and iotas alone that its readers rather recompute."""


def is_foreign(operation: Operation) -> bool:
    """Whether the device leaves the operator to the layer above: collectives, control flow, and
    constants that are not one value throughout (stored as buffers)."""
    if operation.name == "constant":
        return not is_splat(operation) and np.size(operation.attributes["value"]) > 0
    return operation.name in FOREIGN


def captured(operation: Operation) -> set[int]:
    """Values that the regions of `operation` use and do not define."""
    used: set[int] = set()
    made: set[int] = set()

    def visit(block: Block) -> None:
        made.update(block.arguments)
        for inner in block.operations:
            used.update(inner.operands)
            made.update(inner.results)
            for region in inner.regions:
                visit(region)
        used.update(block.returns)

    for region in operation.regions:
        visit(region)
    return used - made


def needs(operation: Operation) -> list[int]:
    """Operands and captured values."""
    return [*operation.operands, *sorted(captured(operation))]


class Aliases:
    """Values that are the same data: reshapes, and results of equal operators on equal operands.

    Each class has one representative that holds the data.
    """

    def __init__(
        self,
        operations: Sequence[Operation],
        types: Sequence[TensorType],
        pinned: Collection[int],
    ) -> None:
        self._root: dict[int, int] = {}
        self.copies: dict[int, int] = {}
        self.repeated: set[int] = set()
        made: dict[int, Operation] = {}
        members: dict[int, list[int]] = {}
        known: dict[Hashable, int] = {}
        for operation in operations:
            for result in operation.results:
                made[result] = operation
            if operation.name == "reshape":
                root = self[operation.operands[0]]
            else:
                root = self._earlier(operation, types, pinned, known)
                if root is None:
                    continue
                self.repeated.add(operation.results[0])
            self._root[operation.results[0]] = root
            members.setdefault(root, [root]).append(operation.results[0])
        for root, names in members.items():
            self._choose(root, names, made.get(root), pinned)

    def _earlier(
        self,
        operation: Operation,
        types: Sequence[TensorType],
        pinned: Collection[int],
        known: dict[Hashable, int],
    ) -> int | None:
        """The value of an equal operator before this one, if any."""
        if len(operation.results) != 1 or operation.regions or is_foreign(operation):
            return None
        result = types[operation.results[0]]
        operands = tuple((self[v], types[v].shape) for v in operation.operands)
        key = (operation.name, operands, plain(operation.attributes), result.shape, result.dtype)
        if key in known and operation.results[0] not in pinned:
            return known[key]
        known.setdefault(key, operation.results[0])
        return None

    def _choose(
        self, root: int, members: list[int], source: Operation | None, pinned: Collection[int]
    ) -> None:
        held = [v for v in members if v in pinned]
        fixed = source is None or is_foreign(source)
        chosen = root if fixed or not held else held[0]
        for member in members:
            self._root[member] = chosen
        for extra in held:
            if extra != chosen:
                self.copies[extra] = chosen

    def __getitem__(self, value: int) -> int:
        return self._root.get(value, value)


@dataclass
class Item:
    """A place in the sequence: a rowwise group, another kernel's node, or a foreign operator."""

    content: "Group | Node | Operation | None"
    needs: set[int] = field(default_factory=set)
    users: set[int] = field(default_factory=set)
    constants: dict[int, np.ndarray] = field(default_factory=dict)
    strided: tuple[Strided, ...] = ()
    epilogue: Node | None = None


class Fuser:
    """One walk over a list of operators."""

    def __init__(
        self, operations: Sequence[Operation], types: Sequence[TensorType], returns: Collection[int]
    ) -> None:
        self.types = types
        self.pinned = set(returns)
        for operation in operations:
            if is_foreign(operation):
                self.pinned.update(needs(operation))
        self.alias = Aliases(operations, types, self.pinned)
        self.items: list[Item] = []
        self.home: dict[int, int] = {}
        self.lazies: dict[int, Node] = {}
        self.sizes: dict[int, int] = {}
        self.uses = self._count_uses(operations)
        self._spaces: dict[int, Space | None] = {}
        self._only_matmuls = self._read_by_matmuls_only(operations)

    def _count_uses(self, operations: Sequence[Operation]) -> dict[int, int]:
        """How many operators read each value; pinned values have one more reader."""
        uses = {self.alias[v]: 1 for v in self.pinned}
        for operation in operations:
            if operation.name != "reshape":
                for value in {self.alias[v] for v in operation.operands}:
                    uses[value] = uses.get(value, 0) + 1
        return uses

    def _read_by_matmuls_only(self, operations: Sequence[Operation]) -> set[int]:
        others, matmuls = set(self.alias[v] for v in self.pinned), set()
        for operation in operations:
            if operation.name != "reshape":
                found = matmuls if operation.name == "dot_general" else others
                found.update(self.alias[v] for v in operation.operands)
        return matmuls - others

    # ---- nodes ----

    def node(self, operation: Operation) -> Node:
        """The operator on representative values."""
        return Node(
            operation,
            tuple(self.alias[v] for v in operation.operands),
            tuple(self.alias[v] for v in operation.results),
            tuple(self.types[v] for v in operation.operands),
            tuple(self.types[v] for v in operation.results),
        )

    def lazy(self, value: int) -> Node | None:
        """The node of a value that rowwise kernels recompute."""
        node = self.lazies.get(value)
        return None if node is None or node.name == "transpose" else node

    def constant(self, value: int) -> np.ndarray | None:
        """The scalar of a splat constant."""
        node = self.lazies.get(value)
        if node is not None and node.name == "broadcast_in_dim":
            return self.constant(node.operands[0])
        if node is None or node.name != "constant":
            return None
        return np.asarray(node.operation.attributes["value"]).reshape(-1)[:1].reshape(())

    def _is_identity(self, value: int, kind: TensorType, reduction: str) -> bool:
        scalar = self.constant(value)
        if scalar is None:
            return False
        identity = arithmetic.IDENTITY[reduction](kind.numpy)
        same = scalar == identity or (reduction == "add" and scalar == 0)
        lowest = reduction in ("maximum", "minimum") and bool(scalar.astype(np.float64) == (
            -np.inf if reduction == "maximum" else np.inf))  # fmt: skip
        return bool(same) or lowest

    def space(self, node: Node) -> Space | None:
        """The node's iteration space, if it is rowwise (cached)."""
        key = node.operation.results[0] if node.operation.results else -1
        if key not in self._spaces:
            self._spaces[key] = space_of(node, self._is_identity)
        return self._spaces[key]

    def group(self) -> Group:
        """An empty group."""
        return Group(self.lazy, self.space)

    # ---- the walk ----

    def walk(self, operations: Sequence[Operation]) -> None:
        """Places every operator."""
        for operation in operations:
            if operation.name == "reshape":
                self._copy_alias(operation)
            elif operation.results and operation.results[0] in self.alias.repeated:
                continue
            elif is_foreign(operation):
                self._foreign(operation)
            else:
                self._own(self.node(operation))
        for value in sorted(self.pinned):
            self.demand(self.alias[value])

    def _copy_alias(self, operation: Operation) -> None:
        """A second pinned name of the same data is a copy."""
        result = operation.results[0]
        if result not in self.alias.copies:
            return
        source = self.alias.copies[result]
        copy = Operation("copy", (source,), (result,), {}, (), operation.location)
        kind = self.types[result]
        self._rowwise(Node(copy, (source,), (result,), (kind,), (kind,)))

    def _foreign(self, operation: Operation) -> None:
        wanted = needs(operation)
        for value in wanted:
            self.demand(self.alias[value])
        self._put(operation, wanted, operation.results)
        for value in wanted:
            self._seal(self.home.get(self.alias[value]))

    def _seal(self, place: int | None) -> None:
        """Kernels that a foreign operator waits for take no more work."""
        if place is None or isinstance(self.items[place].content, Operation):
            return
        content = self.items[place].content
        if isinstance(content, Group):
            if content.sealed:
                return
            content.sealed = True
        for value in self.items[place].needs:
            self._seal(self.home.get(value))

    def _own(self, node: Node) -> None:
        if node.name == "reduce" and self._reduces_nothing(node):
            node = _as_copy(node)
        if node.name in VIEWS:
            scalar = self.constant(node.operands[0])
            node = node if scalar is None else _as_constant(node, scalar)
        size = self._generated(node)
        if size and self.space(node) is not None:
            self.lazies[node.results[0]] = node
            self.sizes[node.results[0]] = size
        elif node.name == "transpose" and node.results[0] in self._only_matmuls:
            self.lazies[node.results[0]] = node
        elif node.name == "add" and self._into_matmul(node):
            pass
        elif self.space(node) is not None:
            self._rowwise(node)
        elif node.name == "dot_general" and lower.on_tensor_engine(node):
            self._matmul(node)
        else:
            self._single(node)

    def _reduces_nothing(self, node: Node) -> bool:
        """Whether every reduced axis has one element and the start value changes nothing."""
        kind, shape = reducer(node.operation), node.operand_types[0].shape
        extents = [shape[d] for d in node.operation.attributes["dimensions"]]
        if kind is None or any(extent != 1 for extent in extents):
            return False
        return self._is_identity(node.operands[1], node.operand_types[1], kind)

    def _generated(self, node: Node) -> int:
        """Operators to recompute the node's result where it is used; 0 if it has to be stored.

        Constants, iotas and broadcasts; and short chains on nothing else (masks).
        """
        if node.name in ("constant", "iota"):
            return 1
        if node.name == "broadcast_in_dim":
            return 1 + self.sizes.get(node.operands[0], 0)
        if node.name == "reduce" or not all(v in self.sizes for v in node.operands):
            return 0
        if any(not self._made_here(v) for v in node.operands):
            return 0
        size = 1 + sum(self.sizes[v] for v in node.operands)
        return size if size <= GENERATED_MAX else 0

    def _made_here(self, value: int) -> bool:
        """Whether a lazy value depends on constants and iotas alone."""
        node = self.lazies.get(value)
        return node is not None and all(self._made_here(v) for v in node.operands)

    def demand(self, value: int) -> None:
        """Makes sure that a lazy value is computed into memory."""
        if value in self.home or value not in self.lazies:
            return
        node = self.lazies[value]
        if node.name == "transpose":
            self._single(node)
        else:
            self._rowwise(node)

    def _put(self, content: "Group | Node | Operation", wanted: Iterable[int],
             made: Iterable[int]) -> int:  # fmt: skip
        place = len(self.items)
        self.items.append(Item(content))
        self._wire(place, wanted)
        for value in made:
            self.home[value] = place
        return place

    def _wire(self, place: int, wanted: Iterable[int]) -> None:
        for value in wanted:
            value = self.alias[value]
            self.items[place].needs.add(value)
            if value in self.home:
                self.items[self.home[value]].users.add(place)

    def _single(self, node: Node) -> None:
        """A kernel of one operator; scalar constants among its operands travel with it."""
        constants = {}
        for original, value in zip(node.operation.operands, node.operands, strict=True):
            scalar = self.constant(value)
            if scalar is not None:
                constants[original] = scalar
            else:
                self.demand(value)
        wanted = [
            v
            for o, v in zip(node.operation.operands, node.operands, strict=True)
            if o not in constants
        ]
        place = self._put(node, wanted, node.results)
        self.items[place].constants = constants

    def _matmul(self, node: Node) -> None:
        operands = tuple(
            self._strided(v, t) for v, t in zip(node.operands, node.operand_types, strict=True)
        )
        place = self._put(node, [o.value for o in operands], node.results)
        self.items[place].strided = operands

    def _into_matmul(self, node: Node) -> bool:
        """Adds to the result of a matmul as it leaves, if nobody else reads that result."""
        for value, other in (node.operands, node.operands[::-1]):
            place = self.home.get(value, -1)
            item = self.items[place] if place >= 0 else None
            if item is None or not item.strided or item.epilogue or self.uses[value] > 1:
                continue
            assert isinstance(item.content, Node)
            source = self._addend(node, other, item.content)
            if source is None or self.home.get(source, -1) >= place or source == value:
                continue
            i = node.operands.index(other)
            operands, kinds = list(node.operands), list(node.operand_types)
            operands[i], kinds[i] = source, self.types[source]
            item.epilogue = replace(node, operands=tuple(operands), operand_types=tuple(kinds))
            del self.home[value]
            self.home[node.results[0]] = place
            self._wire(place, [source])
            return True
        return False

    def _addend(self, add: Node, value: int, dot: Node) -> int | None:
        """The value in memory that holds an addend of a matmul: all of it, or one row; or None."""
        kinds = {add.result_types[0].dtype, dot.result_types[0].dtype}
        if dot.operation.attributes["lhs_batch"] or len(kinds) > 1 or not is_float(*kinds):
            return None
        lazy = self.lazies.get(value)
        if lazy is None:
            return value
        columns = math.prod(add.result_types[0].shape) // max(1, self._rows(dot))
        source = lazy.operands[0] if _is_row(lazy, columns) else None
        return None if source in self.lazies else source

    @staticmethod
    def _rows(dot: Node) -> int:
        """Rows of a dot_general's result: the free elements of its left operand."""
        left, gone = dot.operand_types[0].shape, dot.operation.attributes["lhs_contracting"]
        return math.prod(extent for d, extent in enumerate(left) if d not in gone)

    def _strided(self, value: int, kind: TensorType) -> Strided:
        """The operand as a strided view of what is in memory, through transposes and reshapes."""
        node = self.lazies.get(value)
        if node is not None and node.name == "transpose" and value not in self.home:
            source = self._strided(node.operands[0], node.operand_types[0])
            moved = source.transposed(node.operation.attributes["permutation"])
            shaped = moved.reshaped(kind.shape)
            if shaped is not None:
                return shaped
        self.demand(value)
        return Strided.dense(value, kind)

    def _rowwise(self, node: Node) -> None:
        leaves = self.group().leaves(node)
        if leaves is None or not self.group().add(node):
            self._alone(node)
            return
        for value in leaves:
            self.demand(value)
        place = self._join(node, leaves)
        for value in leaves:
            self._pull(value, place)

    def _alone(self, node: Node) -> None:
        """A kernel of its own for a node whose recomputed operands have clashing patterns."""
        space = self.space(node)
        needed = node.operands if space is None else node.operands[: len(space.operands)]
        for value in needed:
            self.demand(value)
        group = Group(lambda value: None, self.space)
        if group.add(node):
            group.lazy = self.lazy
            self._put(group, needed, node.results)
        else:
            self._single(node)

    def _join(self, node: Node, leaves: Iterable[int]) -> int:
        latest = max((self.home.get(v, -1) for v in leaves), default=-1)
        content = self.items[latest].content if latest >= 0 else None
        if isinstance(content, Group) and not content.sealed:
            trial = content.copy()
            if trial.add(node) and not self._tears(trial, content):
                self.items[latest].content = trial
                self._wire(latest, leaves)
                self.items[latest].users.discard(latest)
                self.home[node.results[0]] = latest
                return latest
        fresh = self.group()
        if fresh.add(node):
            return self._put(fresh, leaves, node.results)
        for value in node.operands:  # one recomputed operand in two places of the space
            self.demand(value)
        self._single(node)
        return len(self.items) - 1

    def _pull(self, value: int, place: int) -> None:
        """Moves the producer of `value` into the kernel at `place` if nobody else waits for it."""
        origin = self.home.get(value, place)
        if origin == place:
            return
        theirs, mine = self.items[origin].content, self.items[place].content
        if not isinstance(theirs, Group) or not isinstance(mine, Group) or theirs.sealed:
            return
        scalar = theirs.n == 1 and mine.n > 1
        if scalar or not self.items[origin].users <= {place}:
            return
        trial = mine.copy()
        shared = [v for v in trial.inputs() if v in theirs.made]
        if not shared or not trial.absorb(theirs.copy(), shared) or self._tears(trial, theirs):
            return
        self.items[place].content = trial
        self.items[origin].content = None
        for v in theirs.made:
            if self.home.get(v) == origin:
                self.home[v] = place
        for v in self.items[origin].needs:
            if v in self.home:
                self.items[self.home[v]].users.discard(origin)
        self._wire(place, self.items[origin].needs)
        self.items[place].users.discard(place)

    def _tears(self, trial: Group, before: Group) -> bool:
        """Whether a value that others read too would now be spread over some row axes only: the
        kernel's rows could not be divided."""
        if trial.n == before.n:
            return False
        inside: dict[int, int] = {}
        for node in trial.nodes:
            for value in set(node.operands):
                inside[value] = inside.get(value, 0) + 1
        shared = (
            v
            for v in before.made
            if self.home.get(v) is not None and self.uses.get(v, 0) > inside.get(v, 0)
        )
        return any(trial.partial(v) for v in shared)

    # ---- the result ----

    def result(self) -> list[Kernel | Operation]:
        """The sequence with groups and nodes turned into kernels."""
        wanted = {self.alias[v] for v in self.pinned} | set(self.alias.copies)
        readers: dict[int, set[int]] = {}
        for place, item in enumerate(self.items):
            if item.content is not None:
                for value in item.needs:
                    readers.setdefault(value, set()).add(place)
        made = []
        for place, item in enumerate(self.items):
            if isinstance(item.content, Operation):
                made.append(item.content)
            elif isinstance(item.content, Node):
                made.append(
                    lower.kernel(
                        item.content, item.constants, item.strided, self.types, item.epilogue
                    )
                )
            elif item.content is not None:
                kernel = self._rowwise_kernel(item.content, place, wanted, readers)
                made.extend(kernel)
        return made

    def _rowwise_kernel(
        self, group: Group, place: int, wanted: set[int], readers: dict[int, set[int]]
    ) -> list[Kernel]:
        outputs = [
            v
            for v in group.made
            if self.home.get(v) == place and (v in wanted or readers.get(v, set()) - {place})
        ]
        if not outputs:
            return []
        types = {v: self.types[v] for v in group.extent}
        return [rowwise_kernel(group, tuple(sorted(outputs)), types)]


def _is_row(node: Node, columns: int) -> bool:
    """Whether a broadcast repeats one dense row of `columns` elements."""
    if node.name != "broadcast_in_dim" or node.operand_types[0].size != columns:
        return False
    source, result = node.operand_types[0].shape, node.result_types[0].shape
    pairs = zip(source, node.operation.attributes["dimensions"], strict=True)
    kept = [(extent, d) for extent, d in pairs if extent > 1]
    inner = [(extent, d) for d, extent in enumerate(result) if extent > 1][-len(kept) :]
    return bool(kept) and kept == inner


def _as_constant(node: Node, scalar: np.ndarray) -> Node:
    source = node.operation
    value = {"value": scalar}
    constant = Operation("constant", (), source.results, value, (), source.location)
    return Node(constant, (), node.results, (), node.result_types)


def _as_copy(node: Node) -> Node:
    source = node.operation
    copy = Operation("copy", source.operands[:1], source.results, {}, (), source.location)
    return Node(copy, node.operands[:1], node.results, node.operand_types[:1], node.result_types)


def fuse(
    operations: Sequence[Operation], types: Sequence[TensorType], returns: Collection[int]
) -> list[Kernel | Operation]:
    """Kernels, and the operators that are not the device's, in a legal order.

    `types[v]` is the type of value v; `returns` are the values needed afterwards. Only values that
    something outside a kernel reads are its outputs. A result of `reshape` that is neither returned
    nor read by a foreign operator does not appear: its readers read the source's array.
    """
    fuser = Fuser(operations, types, returns)
    fuser.walk(operations)
    return fuser.result()


__all__: list[str] = ["FOREIGN", "captured", "fuse", "is_foreign"]
