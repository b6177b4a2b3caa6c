"""Reductions over leading or middle axes: a matmul with ones, or rows gathered on partitions."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import arithmetic
from .group import reducer
from .kernel import Part, split_rows, whole
from .single import SingleKernel


def axis_groups(shape: tuple[int, ...], reduced: tuple[int, ...]) -> list[tuple[int, bool]]:
    """Neighbouring axes merged: (extent, whether it is reduced), ones dropped."""
    groups: list[tuple[int, bool]] = []
    for d, extent in enumerate(shape):
        if extent == 1:
            continue
        if groups and groups[-1][1] == (d in reduced):
            groups[-1] = (groups[-1][0] * extent, groups[-1][1])
        else:
            groups.append((extent, d in reduced))
    return groups


@dataclass(frozen=True, kw_only=True, eq=False)
class ReductionKernel(SingleKernel):
    """reduce of one input with a known reducer over any axes."""

    @property
    def groups(self) -> list[tuple[int, bool]]:
        """The operand's merged axes: (extent, reduced)."""
        return axis_groups(self.operand_type(0).shape, self.attributes["dimensions"])

    @property
    def reduction(self) -> str:
        """Name of the reducer."""
        kind = reducer(self.operation)
        assert kind is not None
        return kind

    @property
    def on_device(self) -> bool:
        """Whether the nest can do it: the start value is a constant."""
        return self.operation.operands[1] in self.constants

    @property
    def first_kept(self) -> int:
        """Index of the first kept group (the axis that cores split); -1 if all is reduced."""
        return next((i for i, (_, gone) in enumerate(self.groups) if not gone), -1)

    def part(self, core: int, cores: int) -> Part:
        if self.first_kept < 0:
            return whole(1, core, cores)
        return split_rows(self.groups[self.first_kept][0], core, cores)

    def _inner(self) -> int:
        kept = [e for e, gone in self.groups if not gone]
        return math.prod(kept[1:])

    def writes(self, part: Part) -> dict[int, tuple[int, int]]:
        if part.empty:
            return {}
        inner = self._inner() if self.first_kept >= 0 else 1
        return {self.targets[0]: (part.start * inner, part.stop * inner)}

    def reads(self, part: Part) -> dict[int, tuple[int, int]]:
        spans = super().reads(part)
        if not part.empty and self.first_kept == 0:
            inner = math.prod(e for e, _ in self.groups[1:])
            spans[self.sources[0]] = (part.start * inner, part.stop * inner)
        return spans

    def evaluate(self, arrays: Mapping[int, np.ndarray], part: Part) -> None:
        if part.empty:
            return
        x = self.operand(0, arrays).reshape([e for e, _ in self.groups])
        axes = tuple(i for i, (_, gone) in enumerate(self.groups) if gone)
        if self.first_kept >= 0:
            x = x[(slice(None),) * self.first_kept + (slice(part.start, part.stop),)]
        init = self.operand(1, arrays)
        kind = self.result_type.numpy
        with np.errstate(all="ignore"):
            result = _reduce(self.reduction, x, axes)
            if init != arithmetic.IDENTITY[self.reduction](kind):
                wide = arithmetic.convert(init, result.dtype)
                result = arithmetic.apply(_joined(self.reduction, kind), result, wide)
        out = arrays[self.targets[0]].reshape(-1)
        first, last = self.writes(part)[self.targets[0]]
        out[first:last] = arithmetic.convert(result, kind).reshape(-1)

    def nest(self, context: Any) -> Any:
        from .reduction_nest import nest

        return nest(self, context)


def _joined(reduction: str, kind: np.dtype) -> str:
    if kind == np.bool_:
        return {"add": "or", "maximum": "or", "multiply": "and", "minimum": "and"}.get(
            reduction, reduction
        )
    return reduction


def _reduce(reduction: str, x: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """In the compute dtype."""
    x = arithmetic.convert(x, arithmetic.compute_dtype(x.dtype))
    if reduction == "add" and x.dtype.char in "fd" and x.ndim >= 2 and axes == (x.ndim - 2,):
        return _sum_rows(x)
    return arithmetic.reduce(reduction, x, axes) if axes else x


def _sum_rows(x: np.ndarray) -> np.ndarray:
    """Sum over the second last axis, 128 rows at a time as the device does: a running sum loses
    more, and BLAS rounds a column differently when cores share the columns out."""
    rows = x.shape[-2]
    if rows <= 128:
        return np.add.reduce(x, axis=-2)
    pieces = [np.add.reduce(x[..., i : i + 128, :], axis=-2) for i in range(0, rows, 128)]
    return _sum_rows(np.stack(pieces, axis=-2))
