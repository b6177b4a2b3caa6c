"""Runs the steps of a tape with values on all ranks of a mesh at once, for tests of pieces."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from trnsim.cluster.mesh import Mesh
from trnsim.cluster.plans.program import Exchange, Run, Step
from trnsim.device.chip import load_chip

Arrays = list[dict[str, np.ndarray]]  # by rank


def run_ranks(steps: Sequence[Step], mesh: Mesh, arrays: Arrays) -> None:
    """Every rank runs every step on its own arrays; results are written there."""
    chip = load_chip("trn2")
    for step in steps:
        match step:
            case Run(segment, reads, writes):
                for own in arrays:
                    found = segment.run([own[r.name] for r in reads], chip, 2)
                    own |= dict(zip((w.name for w in writes), found, strict=True))
            case Exchange(operation, axes, (read,), (write,)):
                for group in mesh.groups(*axes):
                    sent = [arrays[rank][read.name] for rank in group]
                    found = exchanged(operation.name, operation.attributes, sent)
                    for rank, result in zip(group, found, strict=True):
                        arrays[rank][write.name] = result
            case _:
                raise AssertionError(step)


def exchanged(name: str, attributes: Any, sent: list[np.ndarray]) -> list[np.ndarray]:
    """What each rank of a group gets."""
    count = len(sent)
    match name:
        case "all_gather":
            return [np.concatenate(sent, attributes["dimension"])] * count
        case "reduce_scatter":
            return np.split(np.asarray(sum(sent)), count, attributes["dimension"])
        case "all_reduce":
            return [np.asarray(sum(sent))] * count
        case "all_to_all":
            parts = [np.split(x, count, attributes["split_dimension"]) for x in sent]
            at = attributes["concat_dimension"]
            return [np.concatenate([p[rank] for p in parts], at) for rank in range(count)]
        case "collective_permute":
            sources = {target: source for source, target in attributes["source_target_pairs"]}
            return [sent[sources[rank]] for rank in range(count)]
    raise AssertionError(name)


def with_gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    """(result, gradients) of a function, from the cotangent of the result and the arguments."""

    def both(given: Any, *arguments: Any) -> Any:
        result, pull = jax.vjp(function, *arguments)
        return result, pull(given)

    return both
