"""A tape of one rank's forward pass, and the backward pass that follows from it.

The forward pass is a list of *pieces* (JAX functions of the rank's arrays) and collectives over
mesh axes. Its backward pass is the pieces' vector-Jacobian products and the collectives'
transposes, in reverse:

    all_gather           <->  reduce_scatter
    all_to_all           <->  all_to_all
    permute              <->  permute along the reversed pairs
    all_reduce of partial sums  ->  nothing: each rank's part has the cotangent of the sum
    copy (a replicated array that each rank uses in its own way)  ->  all_reduce

so that the backward pass of every parallelism is right by construction. What it needs of the
forward pass is saved: arguments of pieces. The result of an all_gather is not saved, but gathered
again from what it was gathered from (Korthikanti et al., arXiv:2205.05198, section 4.2.2).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trnsim.device.ops.ir import Operation, TensorType

from .derivative import backward
from .program import Exchange, Ref, Run, Step
from .segment import Segment, segment


@dataclass(frozen=True)
class Piece:
    """A JAX function of named values."""

    function: Callable[..., Any]
    reads: tuple[str, ...]
    writes: tuple[str, ...]


@dataclass(frozen=True)
class Collective:
    """A collective of one value over mesh axes; `back` is the operation on its cotangent."""

    forward: Operation | None
    back: Operation | None
    axes: tuple[str, ...]
    read: str
    write: str
    label: str
    again: bool = False  # do it again in the backward pass instead of saving the result


@dataclass(frozen=True, eq=False)
class Composed:
    """Steps with a backward pass of their own: `there` forward, and `back(given, targets)`.

    `back` records how cotangents of `writes` (values `given`, "" for none) become those of `reads`
    under the names `targets`.
    """

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    there: "Tape"
    back: "Callable[[Sequence[str], Sequence[str]], Tape]"
    again: bool = False  # do it again in the backward pass instead of saving the results


Node = Piece | Collective | Composed


@dataclass(eq=False)
class Tape:
    """Records a forward pass; `degrees` of the mesh axes.

    `types` has every value so far. Values are *given* (set before the tape runs: parameters,
    batches, coordinates, what another tape wrote) or made by a step. `gradients` maps a parameter
    to its gradient's name and type; a `sum` is added to, otherwise it is set.
    """

    degrees: Mapping[str, int]
    types: dict[str, TensorType] = field(default_factory=dict)
    given: set[str] = field(default_factory=set)
    active: set[str] = field(default_factory=set)
    parameters: dict[str, "Gradient"] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)

    # -- recording ------------------------------------------------------------------------------

    def give(self, name: str, kind: TensorType, *, active: bool = False) -> str:
        """A value from outside; `active` if the backward pass gives its cotangent."""
        self.types[name] = kind
        self.given.add(name)
        if active:
            self.active.add(name)
        return name

    def parameter(self, name: str, kind: TensorType, gradient: "Gradient") -> str:
        """A parameter, and where its gradient goes."""
        self.parameters[name] = gradient
        return self.give(name, kind, active=True)

    def run(self, function: Callable[..., Any], reads: Sequence[str], writes: Sequence[str]) -> str:
        """Record a piece; gives the name of its first result."""
        node = Piece(function, tuple(reads), tuple(writes))
        self.nodes.append(node)
        self.types |= dict(zip(node.writes, self.segment(node).results, strict=True))
        if any(name in self.active for name in node.reads):
            self.active |= {name for name in node.writes if _differentiable(self.types[name])}
        return node.writes[0]

    def all_gather(self, read: str, write: str, axis: str, dimension: int, label: str) -> str:
        """Join the shards of the ranks on `axis` along `dimension`."""
        back = Operation("reduce_scatter", (), (), {"dimension": dimension, "reduction": "add"})
        there = Operation("all_gather", (), (), {"dimension": dimension})
        kind = resized(self.types[read], dimension, self.degrees.get(axis, 1))
        return self._collective(there, back, (axis,), read, write, kind, label, again=True)

    def reduce_scatter(self, read: str, write: str, axis: str, dimension: int, label: str) -> str:
        """Sum the partial arrays of the ranks on `axis`, each keeping its part of `dimension`."""
        there = Operation("reduce_scatter", (), (), {"dimension": dimension, "reduction": "add"})
        back = Operation("all_gather", (), (), {"dimension": dimension})
        kind = resized(self.types[read], dimension, 1, self.degrees.get(axis, 1))
        return self._collective(there, back, (axis,), read, write, kind, label)

    def all_reduce(
        self, read: str, write: str, axes: Sequence[str], label: str, reduction: str = "add"
    ) -> str:
        """Sum the partial arrays of the ranks on `axes` (or their maximum, which is a constant)."""
        there = Operation("all_reduce", (), (), {"reduction": reduction})
        kind = self.types[read]
        self._collective(there, None, tuple(axes), read, write, kind, label)
        if reduction != "add":
            self.active.discard(write)
        return write

    def copy(self, read: str, write: str, axes: Sequence[str], label: str) -> str:
        """A replicated array that each rank of `axes` uses in its own way: cotangents add up."""
        back = Operation("all_reduce", (), (), {"reduction": "add"})
        return self._collective(None, back, tuple(axes), read, write, self.types[read], label)

    def all_to_all(
        self, read: str, write: str, axis: str, split: int, concat: int, label: str
    ) -> str:
        """Part i of dimension `split` goes to rank i of `axis`; joined along `concat`."""
        n = self.degrees.get(axis, 1)
        kind = resized(resized(self.types[read], split, 1, n), concat, n)
        there, back = _all_to_all(split, concat, n), _all_to_all(concat, split, n)
        return self._collective(there, back, (axis,), read, write, kind, label)

    def permute(
        self, read: str, write: str, axis: str, pairs: Sequence[tuple[int, int]], label: str
    ) -> str:
        """Send along `pairs` of (source, target) positions on `axis`."""
        there, back = _permute(pairs), _permute([(b, a) for a, b in pairs])
        return self._collective(there, back, (axis,), read, write, self.types[read], label)

    def part(self, *names: str) -> "Tape":
        """A tape for steps on these values alone, which are constants to it."""
        made = Tape(self.degrees)
        for name in names:
            made.give(name, self.types[name])
        return made

    def compose(
        self,
        reads: Sequence[str],
        writes: Sequence[str],
        there: "Tape",
        back: "Callable[[Sequence[str], Sequence[str]], Tape]",
        *,
        again: bool = False,
    ) -> str:
        """Record the steps of a `part`, with their own backward pass; gives the first result."""
        self.nodes.append(Composed(tuple(reads), tuple(writes), there, back, again))
        self.types |= there.types
        if any(name in self.active for name in reads):
            self.active.add(writes[0])
        return writes[0]

    def _collective(
        self,
        there: Operation | None,
        back: Operation | None,
        axes: tuple[str, ...],
        read: str,
        write: str,
        kind: TensorType,
        label: str,
        again: bool = False,
    ) -> str:
        """Record a collective; over axes of degree 1 the result is the operand under its name."""
        axes = tuple(axis for axis in axes if self.degrees.get(axis, 1) > 1)
        there, back = (there, back) if axes else (None, None)
        node = Collective(there, back, axes, read, write, label, again and bool(axes))
        self.nodes.append(node)
        self.types[write] = kind
        if read in self.active:
            self.active.add(write)
        return write

    # -- what a node is in the program -------------------------------------------------------------

    def segment(self, node: Piece) -> Segment:
        """The piece as it runs forward."""
        return segment(node.function, self.kinds(node))

    def kinds(self, node: Piece) -> tuple[TensorType, ...]:
        """Types of its arguments."""
        return tuple(self.types[name] for name in node.reads)

    def differentiated(self, node: Piece) -> tuple[int, ...]:
        """Arguments of the piece that have a cotangent."""
        found = ((i, name) for i, name in enumerate(node.reads) if name in self.active)
        return tuple(i for i, name in found if _differentiable(self.types[name]))

    def maker(self, name: str) -> Collective | None:
        """The collective that made a value, if one did."""
        made = (n for n in self.nodes if isinstance(n, Collective) and n.write == name)
        return next(made, None)

    def array(self, name: str) -> str:
        """The value whose array this is: copies and collectives of one rank make no array."""
        node = self.maker(name)
        return self.array(node.read) if node and node.forward is None else name

    def same(self, name: str) -> str:
        """The value that this is but another name of: also its cotangent is the same."""
        node = self.maker(name)
        return self.same(node.read) if node and not node.axes else name

    # -- programs ----------------------------------------------------------------------------------

    def forward(self) -> list[Step]:
        """The forward pass."""
        return [step for node in self.nodes for step in self.forward_of(node)]

    def forward_of(self, node: Node) -> Iterator[Step]:
        if isinstance(node, Composed):
            yield from node.there.forward()
            return
        if isinstance(node, Collective):
            if node.forward:
                yield self._exchange(node, node.forward, node.read, node.write)
            return
        yield Run(self.segment(node), self._refs(node.reads), _refs(node.writes))

    def _refs(self, names: Sequence[str]) -> tuple[Ref, ...]:
        return _refs([self.array(name) for name in names])

    def _exchange(self, node: Collective, what: Operation, read: str, write: str) -> Exchange:
        return Exchange(what, node.axes, self._refs([read]), _refs([write]), node.label)

    def backward(
        self, *results: str, split: bool = False, again: bool = True
    ) -> tuple[list[Step], list[Step]]:
        """The backward pass from the cotangents of `results`, which are given.

        With `split`, the first list makes only cotangents of values that are no parameters, and
        the second the gradients of parameters from those cotangents; else the second is empty.
        The cotangents of active given values are called `cotangent(name)`. `again`: gather arrays
        that were not saved; else they are there.
        """
        made = _Backward(self, results, split, again)
        for node in reversed(self.nodes):
            made.visit(node)
        for name in self.given & self.active - set(self.parameters):
            if made.cotangents.get(name) != cotangent(name):
                raise AssertionError(f"the cotangent of {name} is {made.cotangents.get(name)}")
        return made.steps, made.weights


@dataclass(frozen=True)
class Gradient:
    """The gradient of a parameter: its name and type, and whether it adds up (or is set)."""

    name: str
    type: TensorType
    sums: bool = True


class _Backward:
    """Writes the backward pass of a tape, node by node in reverse.

    `cotangents` says which value holds the cotangent of each value that has one so far.
    """

    def __init__(self, tape: Tape, results: Sequence[str], split: bool, again: bool) -> None:
        self.tape, self.split, self.again = tape, split, again
        self.cotangents = {name: cotangent(name) for name in results}
        self.steps: list[Step] = []
        self.weights: list[Step] = []
        self.gathered: set[tuple[int, str]] = set()
        for name in results:
            tape.types[cotangent(name)] = tape.types[name]

    def visit(self, node: Node) -> None:
        if isinstance(node, Composed):
            self.composed(node)
            return
        if isinstance(node, Collective):
            self.collective(node)
            return
        active = self.tape.differentiated(node)
        if not active or not any(name in self.cotangents for name in node.writes):
            return
        weights = tuple(i for i in active if node.reads[i] in self.tape.parameters)
        inputs = tuple(i for i in active if i not in weights)
        if self.split and inputs and weights:
            self.run(node, weights, self.weights)
            self.run(node, inputs, self.steps)
        else:
            late = self.split and not inputs
            self.run(node, active, self.weights if late else self.steps)

    def run(self, node: Piece, wanted: tuple[int, ...], into: list[Step]) -> None:
        """Run the piece backward for its arguments `wanted`."""
        totals = [self.total(node.reads[i]) for i in wanted]
        there = tuple(name in self.cotangents for name in node.writes)
        sums = tuple(kind for _, kind in totals)
        made = backward(node.function, self.tape.kinds(node), there, wanted, sums)
        reads = {
            source: self.argument(node, source, totals, into)
            for source in {*made.used, *(r for r in made.results if r[0] != "made")}
        }
        names: dict[int, str] = {}
        for i, source in zip(wanted, made.results, strict=True):
            name = node.reads[i]
            if source[0] == "made":
                target = names.setdefault(source[1], self.target(name))
                self.tape.types[target] = made.segment.results[source[1]]
            else:
                target = reads[source]
            if name not in self.tape.parameters:
                self.cotangents[self.tape.same(name)] = target
        if names:
            writes = [names[i] for i in range(len(names))]
            into.append(Run(made.segment, _refs([reads[s] for s in made.used]), _refs(writes)))

    def total(self, name: str) -> tuple[str, TensorType | None]:
        """What the cotangent of an argument is added to: a value and its type, or nothing."""
        gradient = self.tape.parameters.get(name)
        if gradient:
            return gradient.name, gradient.type if gradient.sums else None
        held = self.cotangents.get(self.tape.same(name), "")
        return held, self.tape.types[held] if held else None

    def target(self, name: str) -> str:
        """What the cotangent of an argument is called."""
        gradient = self.tape.parameters.get(name)
        return gradient.name if gradient else cotangent(self.tape.same(name))

    def argument(
        self,
        node: Piece,
        source: tuple[str, int],
        totals: Sequence[tuple[str, TensorType | None]],
        into: list[Step],
    ) -> str:
        """The value that an argument of a backward segment is, gathered again if need be."""
        kind, i = source
        match kind:
            case "argument":
                self.gather_again(node.reads[i], into)
                return self.tape.array(node.reads[i])
            case "cotangent":
                return self.cotangents[node.writes[i]]
        return totals[i][0]

    def gather_again(self, name: str, into: list[Step]) -> None:
        """Gather an array that was not saved, once in each of the two lists."""
        array = self.tape.array(name)
        maker = self.tape.maker(array)
        if self.again and maker and maker.again and (id(into), array) not in self.gathered:
            self.gathered.add((id(into), array))
            into += again(self.tape.forward_of(maker))

    def collective(self, node: Collective) -> None:
        given = self.cotangents.get(node.write)
        if given is None or not node.axes or node.read not in self.tape.active:
            return
        source = self.tape.same(node.read)
        name, held = cotangent(source), self.cotangents.get(source)
        self.cotangents[source] = name
        if node.back is None:
            assert held is None, f"{source} has a cotangent besides that of its sum"
            self.cotangents[source] = given
        elif held is None:
            self.transpose(node, node.back, given, name, source)
        else:
            part = f"{node.write}.part"
            self.transpose(node, node.back, given, part, source)
            kind = self.tape.types[source]
            self.tape.types[name] = kind
            self.steps.append(Run(segment(_add, (kind, kind)), _refs([held, part]), _refs([name])))

    def composed(self, node: Composed) -> None:
        tape = self.tape
        given = [self.cotangents.get(name, "") for name in node.writes]
        if not any(given):
            return
        sources = [tape.same(name) for name in node.reads]
        held = [self.cotangents.get(name) for name in sources]
        parts = [f"{node.writes[0]}.d{i}" for i in range(len(sources))]
        targets = [
            part if total else cotangent(source)
            for source, total, part in zip(sources, held, parts, strict=True)
        ]
        if node.again and self.again:
            self.steps += again(node.there.forward())
        back = node.back(given, targets)
        tape.types |= back.types
        self.steps += back.forward()
        for source, total, part in zip(sources, held, targets, strict=True):
            self.cotangents[source] = cotangent(source)
            if total:
                kind = tape.types[cotangent(source)] = tape.types[source]
                run = Run(
                    segment(_add, (kind, kind)), _refs([total, part]), _refs([cotangent(source)])
                )
                self.steps.append(run)

    def transpose(
        self, node: Collective, back: Operation, given: str, name: str, source: str
    ) -> None:
        self.tape.types[name] = self.tape.types[source]
        self.steps.append(Exchange(back, node.axes, _refs([given]), _refs([name]), node.label))


def again(steps: Iterable[Step]) -> list[Step]:
    """Steps of the forward pass as they are done once more in the backward pass."""
    return [replace(s, again=True) if isinstance(s, Run | Exchange) else s for s in steps]


def cotangent(name: str) -> str:
    """What the cotangent of a value is called."""
    return f"{name}.cotangent"


def resized(kind: TensorType, dimension: int, times: int, over: int = 1) -> TensorType:
    """`kind` with one extent multiplied and divided."""
    shape = list(kind.shape)
    shape[dimension] = shape[dimension] * times // over
    return replace(kind, shape=tuple(shape))


def _add(one: Any, other: Any) -> Any:
    return one + other


def _refs(names: Sequence[str]) -> tuple[Ref, ...]:
    return tuple(Ref(name) for name in names)


def _differentiable(kind: TensorType) -> bool:
    return kind.dtype.startswith(("f", "bf"))


def _all_to_all(split: int, concat: int, count: int) -> Operation:
    attributes = {"split_dimension": split, "concat_dimension": concat, "split_count": count}
    return Operation("all_to_all", (), (), attributes)


def _permute(pairs: Sequence[tuple[int, int]]) -> Operation:
    attributes = {"source_target_pairs": tuple(map(tuple, pairs))}
    return Operation("collective_permute", (), (), attributes)
