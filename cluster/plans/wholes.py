"""Whole arrays of a model and the parts of them that ranks hold; batches and where they go.

Whole parameters and gradients are named by (name, layer), layer -1 for those outside of the layers.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal
from zlib import crc32

import numpy as np

from trnsim.device.errors import BadInput, TrnsimError
from trnsim.device.ops.ir import TensorType

from .plan import Plan
from .program import Share, Split, StageProgram, TrainingProgram, Value
from .ring_attention import positions

Wholes = dict[tuple[str, int], np.ndarray]
Place = Mapping[str, int]
"""A rank's coordinates on the mesh."""
What = Literal["parameter", "gradient"]


def start(program: TrainingProgram, plan: Plan, seed: int) -> Wholes:
    """Random parameters of the model: normal with deviation hidden^-1/2, ones or zeros."""
    found: Wholes = {}
    for stage in program.stages:
        for value, split in _parameters(stage):
            for layer in value.of(n for chunk in stage.layers for n in chunk):
                found[value.name, layer] = _random(plan, value, split, layer, seed)
    return found


def _parameters(stage: StageProgram) -> Iterator[tuple[Value, Split]]:
    """The parameters of a stage, also those of which a rank keeps only a share."""
    kept = [v for v in stage.values.values() if v.role == "parameter"]
    names = [n for v in kept for n in (v.place.parts if isinstance(v.place, Share) else [v.name])]
    for name in names:
        value = stage.values[name]
        assert isinstance(value.place, Split)
        yield value, value.place


def _random(plan: Plan, value: Value, split: Split, layer: int, seed: int) -> np.ndarray:
    shape, dtype = whole_shape(plan, value.type, split), value.type.numpy
    if split.start != "normal":
        return np.full(shape, split.start == "ones", dtype)
    source = np.random.default_rng([seed, crc32(value.name.encode()), layer + 1])
    return (source.normal(size=shape) * plan.model.hidden**-0.5).astype(dtype)


def whole_shape(plan: Plan, kind: TensorType, split: Split) -> tuple[int, ...]:
    """The shape of the whole array of a rank's part."""
    shape = list(kind.shape)
    for axis, dimension in split.cuts:
        shape[dimension] *= plan.degree(axis) // split.copies
    return tuple(shape)


def _where(plan: Plan, kind: TensorType, split: Split, at: Place) -> tuple[np.ndarray, ...]:
    """Indices of a rank's part in the whole array, for each dimension (as of `numpy.ix_`)."""
    found = [np.arange(extent) for extent in kind.shape]
    for axis, dimension in split.cuts:
        last = (axis, dimension) == split.cuts[-1]
        sections = split.sections if last and split.sections else (kind.shape[dimension],)
        parts, start = plan.degree(axis) // split.copies, 0
        pieces = []
        for extent in sections:
            pieces.append(start + at.get(axis, 0) // split.copies * extent + np.arange(extent))
            start += extent * parts
        found[dimension] = np.concatenate(pieces)
    return np.ix_(*found)


def _index(plan: Plan, share: Share, at: Place) -> int:
    """A rank's place in the group over the share's axes."""
    index = 0
    for axis in share.axes:
        index = index * plan.degree(axis) + at.get(axis, 0)
    return index


def initial(
    plan: Plan, stage: StageProgram, value: Value, layer: int, at: Place, given: Wholes
) -> np.ndarray | None:
    """What a rank's array holds before the step; None if a step writes it first."""
    match value.role:
        case "coordinate":
            known = {"layer": layer, "step": 1}
            number = known.get(value.name, at.get(value.name.removesuffix(".index"), 0))
            return np.array(number, value.type.numpy)
        case "parameter":
            return _part(plan, stage, value, layer, at, given)
        case "optimizer":
            if value.name.endswith(".master"):
                return _part(plan, stage, value, layer, at, given)
            return np.zeros(value.type.shape, value.type.numpy)
    return None


def _part(
    plan: Plan, stage: StageProgram, value: Value, layer: int, at: Place, given: Wholes
) -> np.ndarray:
    """A rank's part of a parameter, or its share of several."""
    if isinstance(value.place, Split):
        whole = given[value.name.removesuffix(".master"), layer]
        return whole[_where(plan, value.type, value.place, at)].astype(value.type.numpy)
    assert isinstance(value.place, Share)
    parts = [
        _part(plan, stage, stage.values[name], layer, at, given).reshape(-1)
        for name in value.place.parts
    ]
    size, flat = value.type.size, np.concatenate(parts)
    first = _index(plan, value.place, at) * size
    found = np.zeros(size, value.type.numpy)
    mine = flat[first : first + size]
    found[: mine.size] = mine
    return found


def inputs(
    plan: Plan, batch: Mapping[str, np.ndarray], microbatch: int, at: Place, seed: int
) -> dict[str, np.ndarray]:
    """A rank's inputs of a microbatch: its rows of the batch and its positions of them."""
    for name in ("tokens", "labels"):
        if np.shape(batch[name]) != (plan.global_batch, plan.seq):
            allowed = f"[global batch, seq] = {[plan.global_batch, plan.seq]}"
            raise BadInput(name, np.shape(batch[name]), allowed)
    share = Share((), tuple(name for name in plan.mesh.names if name in ("dp", "ep")))
    row = (_index(plan, share, at) * plan.microbatches + microbatch) * plan.microbatch
    rows = slice(row, row + plan.microbatch)
    places = positions(plan.seq, plan.cp, plan.model.causal)[at.get("cp", 0)]
    numbers = np.arange(plan.global_batch, dtype=np.int32)[rows]
    return {
        "tokens": np.asarray(batch["tokens"][rows][:, places], np.int32),
        "labels": np.asarray(batch["labels"][rows][:, places], np.int32),
        "samples": numbers + np.int32(seed * 1_000_003 % 2**31),
        "positions": places,
        "shard_positions": np.split(places, plan.tp)[at.get("tp", 0)],
    }


def join(
    plan: Plan,
    stage: StageProgram,
    what: What,
    places: Sequence[Place],
    arrays: Sequence[Mapping[Any, np.ndarray]],
) -> Wholes:
    """Whole parameters or gradients from all ranks of a stage.

    Raises TrnsimError if ranks that hold the same part differ.
    """
    shares = {
        part: value
        for value in stage.values.values()
        if value.role == what and isinstance(value.place, Share)
        for part in value.place.parts
    }
    names = {v.name for v in stage.values.values() if v.role == what and v.name not in shares}
    names = {n for n in names if isinstance(stage.values[n].place, Split)} | set(shares)
    found: Wholes = {}
    for name in sorted(names):
        value = stage.values[name]
        for layer in value.of(n for chunk in stage.layers for n in chunk):
            if name in shares:
                held = _gathered(plan, stage, shares[name], name, layer, places, arrays)
            else:
                held = [own[name, layer, -1, -1] for own in arrays]
            key = (name.removesuffix(".gradient"), layer)
            found[key] = _assembled(plan, value, places, held)
    return found


def _gathered(
    plan: Plan,
    stage: StageProgram,
    value: Value,
    name: str,
    layer: int,
    places: Sequence[Place],
    arrays: Sequence[Mapping[Any, np.ndarray]],
) -> list[np.ndarray]:
    """A rank's array `name` for every rank, from the shares of its group."""
    share = value.place
    assert isinstance(share, Share)
    kinds = [stage.values[part].type for part in share.parts]
    first = sum(kind.size for kind in kinds[: share.parts.index(name)])
    kind = stage.values[name].type
    groups: dict[tuple, dict[int, np.ndarray]] = {}
    for at, own in zip(places, arrays, strict=True):
        group = groups.setdefault(_others(share, at), {})
        group[_index(plan, share, at)] = own[value.name, layer, -1, -1]
    flat = {key: np.concatenate([g[i] for i in range(len(g))]) for key, g in groups.items()}
    return [
        flat[_others(share, at)][first : first + kind.size].reshape(kind.shape) for at in places
    ]


def _others(share: Share, at: Place) -> tuple:
    return tuple((axis, i) for axis, i in at.items() if axis not in share.axes)


def _assembled(
    plan: Plan, value: Value, places: Sequence[Place], held: Sequence[np.ndarray]
) -> np.ndarray:
    """The whole array from every rank's part. Raises TrnsimError if equal parts differ."""
    split = value.place
    assert isinstance(split, Split)
    whole = np.empty(whole_shape(plan, value.type, split), held[0].dtype)
    parts: dict[tuple, np.ndarray] = {}
    for at, array in zip(places, held, strict=True):
        key = tuple(at.get(axis, 0) // split.copies for axis, _ in split.cuts)
        first = parts.setdefault(key, array)
        if not np.array_equal(first, array, equal_nan=True):
            raise TrnsimError(f"{value.name}: ranks that hold the same part of it differ")
        whole[_where(plan, value.type, split, at)] = array
    return whole


def joined(stages: Sequence[Wholes]) -> Wholes:
    """The arrays of all stages. Raises TrnsimError if stages differ in one that they share."""
    found: Wholes = {}
    for stage in stages:
        for key, array in stage.items():
            if key in found and not np.array_equal(found[key], array):
                raise TrnsimError(f"{key[0]}: pipeline stages hold different values")
            found[key] = array
    return found
