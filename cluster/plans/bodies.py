"""Bodies of a unit's passes: what is saved from pass to pass, and where values end."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from .layers import Unit
from .program import Exchange, Free, Layers, Ref, Run, Step, Value
from .tape import again, cotangent

BOUNDARY = "x"
"""Hidden states between layers: x of layer l is its input; of the layer after a stage's last one
the stage's output. Its cotangent goes the other way."""

LOSS = "loss"

Body = tuple[Step, ...]


@dataclass(frozen=True)
class Passes:
    """The bodies of a unit; `weights` is empty unless the backward pass is split."""

    forward: Body
    backward: Body
    weights: Body
    values: tuple[Value, ...]


def passes(unit: Unit, out: str, *, split: bool, full: bool) -> Passes:
    """The bodies of a unit with result `out`.

    In a layer, `out` becomes the next layer's x; in the embedding, the first layer's. `full`: only
    x is saved, and the backward pass starts with the forward pass again.
    """
    tape = unit.tape
    result = tape.array(out)
    forward = tape.forward()
    backward, weights = tape.backward(result, split=split, again=not full)
    if full:
        backward = [*_again(forward, live_in([*backward, *weights])), *backward]
    kept = tape.given | {g.name for g in tape.parameters.values()} | {cotangent(BOUNDARY)}
    kept |= {LOSS, cotangent(LOSS)}
    between = {result, cotangent(result)} if result != LOSS else set()
    local = mentions([*forward, *backward, *weights]) - kept - between
    late = live_in(weights) & local
    saved = (live_in(backward) & local) | late
    before = mentions(backward) & local - late
    after = mentions(weights) & local
    ending = ({BOUNDARY} & tape.given) | ({cotangent(result)} & between)  # with the last pass
    names = {result: BOUNDARY, cotangent(result): cotangent(BOUNDARY)} if between else {}
    bodies = (
        freed(forward, mentions(forward) & local - saved),
        freed(backward, before if split else before | ending),
        freed(weights, after | ending) if split else [],
    )
    shift = int(unit.layered)
    return Passes(
        *(renamed(body, {name: Ref(to, shift) for name, to in names.items()}) for body in bodies),
        values=tuple(_value(unit, name, name in saved) for name in sorted(local)),
    )


def _value(unit: Unit, name: str, saved: bool) -> Value:
    """A saved value is one for each microbatch and layer, another one at a time."""
    kind = unit.tape.types[name]
    if saved:
        return Value(name, kind, "activation", layered=unit.layered, micro=True)
    return Value(name, kind, "buffer")


def _again(forward: Sequence[Step], wanted: set[str]) -> list[Step]:
    """The steps of a forward pass that make `wanted`."""
    kept: list[Step] = []
    for step in reversed(forward):
        if wanted & {ref.name for ref in _writes(step)}:
            kept += again([step])
            wanted = wanted | {ref.name for ref in _reads(step)}
    return kept[::-1]


def freed(steps: Sequence[Step], names: Iterable[str]) -> list[Step]:
    """The steps with the end of each named value after the last step that mentions it."""
    ends: dict[int, list[str]] = {}
    for name in sorted(names):
        places = [i for i, step in enumerate(steps) if name in mentions([step])]
        ends.setdefault(places[-1] if places else len(steps) - 1, []).append(name)
    found: list[Step] = []
    for i, step in enumerate(steps):
        found.append(step)
        if i in ends:
            found.append(Free(tuple(Ref(name) for name in ends[i])))
    return found


def renamed(steps: Sequence[Step], names: Mapping[str, Ref]) -> Body:
    """The steps with other references in place of some values."""

    def other(refs: tuple[Ref, ...]) -> tuple[Ref, ...]:
        return tuple(names.get(ref.name, ref) for ref in refs)

    found: list[Step] = []
    for step in steps:
        match step:
            case Run() | Exchange():
                step = replace(step, reads=other(step.reads), writes=other(step.writes))
            case Free(values=values):
                step = Free(other(values))
        found.append(step)
    return tuple(found)


def live_in(steps: Iterable[Step]) -> set[str]:
    """Values that the steps read before they write them."""
    written: set[str] = set()
    found: set[str] = set()
    for step in steps:
        found |= {ref.name for ref in _reads(step)} - written
        written |= {ref.name for ref in _writes(step)}
    return found


def mentions(steps: Iterable[Step]) -> set[str]:
    """Values that the steps read or write."""
    return {ref.name for step in steps for ref in (*_reads(step), *_writes(step))}


def _reads(step: Step) -> tuple[Ref, ...]:
    return step.reads if isinstance(step, Run | Exchange) else ()


def _writes(step: Step) -> tuple[Ref, ...]:
    return step.writes if isinstance(step, Run | Exchange) else ()


def at(layer: int, *steps: Step) -> Layers:
    """Steps that stand outside of the loop over layers, at the boundary before `layer`."""
    return Layers(range(layer, layer + 1), steps)
