"""Values of dot_general and convolution: products summed in float32, or in the integer result."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .. import arithmetic
from .values_shape import pad

Shape = tuple[int, ...]


def _sum_dtype(out: np.dtype, *operands: np.dtype) -> np.dtype:
    """The type in which products are summed."""
    if not arithmetic.is_float(out):
        return out
    wide = any(d == np.float64 for d in (out, *operands))
    return np.dtype(np.float64 if wide else np.float32)


def _matmul(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return np.matmul(a, b)


def _as_matrices(
    x: np.ndarray, batch: Sequence[int], rows: Sequence[int], columns: Sequence[int]
) -> np.ndarray:
    extents = [math.prod(x.shape[d] for d in dims) for dims in (batch, rows, columns)]
    return x.transpose([*batch, *rows, *columns]).reshape(extents)


def dot_general(
    lhs: np.ndarray,
    rhs: np.ndarray,
    lhs_batch: Sequence[int],
    rhs_batch: Sequence[int],
    lhs_contracting: Sequence[int],
    rhs_contracting: Sequence[int],
    out: np.dtype,
) -> np.ndarray:
    """[batch..., free of lhs..., free of rhs...] of dtype `out`."""
    wide = _sum_dtype(out, lhs.dtype, rhs.dtype)
    lhs, rhs = arithmetic.convert(lhs, wide), arithmetic.convert(rhs, wide)
    lhs_free = [d for d in range(lhs.ndim) if d not in (*lhs_batch, *lhs_contracting)]
    rhs_free = [d for d in range(rhs.ndim) if d not in (*rhs_batch, *rhs_contracting)]
    product = _matmul(
        _as_matrices(lhs, lhs_batch, lhs_free, lhs_contracting),
        _as_matrices(rhs, rhs_batch, rhs_contracting, rhs_free),
    )
    shape = [lhs.shape[d] for d in (*lhs_batch, *lhs_free)] + [rhs.shape[d] for d in rhs_free]
    return arithmetic.convert(product.reshape(shape), out)


@dataclass(frozen=True)
class Convolution:
    """StableHLO's attributes of a convolution, under the names of `ops.ir`."""

    window_strides: Shape
    padding: tuple[tuple[int, int], ...]
    lhs_dilation: Shape
    rhs_dilation: Shape
    window_reversal: tuple[bool, ...]
    input_batch: int
    input_feature: int
    input_spatial: Shape
    kernel_input_feature: int
    kernel_output_feature: int
    kernel_spatial: Shape
    output_batch: int
    output_feature: int
    output_spatial: Shape
    feature_group_count: int
    batch_group_count: int

    def base(self, lhs: np.ndarray) -> np.ndarray:
        """The input as [batch, feature, spatial...], dilated and padded."""
        x = lhs.transpose([self.input_batch, self.input_feature, *self.input_spatial])
        return pad(
            x,
            x.dtype.type(0),
            [0, 0, *(low for low, _ in self.padding)],
            [0, 0, *(high for _, high in self.padding)],
            [0, 0, *(d - 1 for d in self.lhs_dilation)],
        )

    def kernel(self, rhs: np.ndarray) -> np.ndarray:
        """The kernel as [spatial..., input feature, output feature], reversed if asked."""
        order = [*self.kernel_spatial, self.kernel_input_feature, self.kernel_output_feature]
        reversed_axes = tuple(axis for axis, flip in enumerate(self.window_reversal) if flip)
        return np.flip(rhs.transpose(order), reversed_axes)

    def output_extents(self, padded: Shape, kernel: Shape) -> Shape:
        """Spatial extents of the result."""
        spans = zip(padded, kernel, self.rhs_dilation, self.window_strides, strict=True)
        return tuple(max((p - ((k - 1) * d + 1)) // s + 1, 0) for p, k, d, s in spans)

    def grouped(self, view: np.ndarray) -> np.ndarray:
        """[batch, feature, out...] as [groups, batch * out, features of a group]."""
        groups = self.feature_group_count * self.batch_group_count
        batch, feature, *out = view.shape
        per_batch, per_feature = (
            batch // self.batch_group_count,
            feature // self.feature_group_count,
        )
        split = view.reshape(
            self.batch_group_count, per_batch, self.feature_group_count, per_feature, -1
        )
        return split.transpose(0, 2, 1, 4, 3).reshape(
            groups, per_batch * math.prod(out), per_feature
        )

    def result(self, product: np.ndarray, out: Shape) -> np.ndarray:
        """[groups, batch * out, output features of a group] in the output's layout."""
        groups, rows, features = product.shape
        batch = rows // max(math.prod(out), 1)
        shaped = product.reshape(groups, batch, *out, features)
        last = shaped.ndim - 1
        ordered = shaped.transpose([1, 0, last, *range(2, last)])
        ordered = ordered.reshape(batch, groups * features, *out)
        places = [self.output_batch, self.output_feature, *self.output_spatial]
        return ordered.transpose(np.argsort(places))


def convolution(
    lhs: np.ndarray, rhs: np.ndarray, numbers: Convolution, out: np.dtype
) -> np.ndarray:
    """One matrix product per kernel offset, summed in float32."""
    wide = _sum_dtype(out, lhs.dtype, rhs.dtype)
    base = numbers.base(arithmetic.convert(lhs, wide))
    kernel = numbers.kernel(arithmetic.convert(rhs, wide))
    window, (inner, features) = kernel.shape[:-2], kernel.shape[-2:]
    extents = numbers.output_extents(base.shape[2:], window)
    groups = numbers.feature_group_count * numbers.batch_group_count
    rows = base.shape[0] // numbers.batch_group_count * math.prod(extents)
    total = np.zeros((groups, rows, features // groups), wide)
    for offset in itertools.product(*(range(k) for k in window)):
        if total.size == 0:
            break
        spans = zip(offset, numbers.rhs_dilation, extents, numbers.window_strides, strict=True)
        cut = [slice(o * d, o * d + (n - 1) * s + 1, s) for o, d, n, s in spans]
        weights = kernel[offset].reshape(inner, groups, features // groups).transpose(1, 0, 2)
        total += _matmul(numbers.grouped(base[:, :, *cut]), weights)
    return arithmetic.convert(numbers.result(total, extents), out)
