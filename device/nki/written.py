"""Which elements of an allocation have been written: uninitialised reads, and PSUM's first write.

In PSUM also which elements another engine than Tensor wrote last: what a matmul may not add to.

An allocation that was written as a whole needs no mask; one that is written in parts keeps a bool
per element of its own dtype, or per byte once it is used as another.
"""

import numpy as np

from ..memory import ITEMSIZE, Tensor, View


class Written:
    """The written elements of one tensor, whose first partition is `origin`."""

    __slots__ = ("tensor", "full", "unit", "line", "foreign", "_mask", "_origin")

    def __init__(self, tensor: Tensor, full: bool = False, origin: int = 0) -> None:
        self.tensor, self.full, self._origin = tensor, full, origin
        self.unit = ITEMSIZE[tensor.dtype]
        self.line = ""  # of the kernel, where the tensor was made
        self.foreign: Written | None = None  # in PSUM: written last by another engine than Tensor
        self._mask: np.ndarray | None = None

    def add(self, view: View) -> None:
        """The view has been written."""
        if self.full:
            return
        if view.nbytes == self.tensor.nbytes and 0 not in _moving_strides(view):
            self.full, self._mask = True, None
            return
        self._window(view)[...] = True

    def note_engine(self, view: View, engine: str) -> None:
        """An engine has written the view, which is in PSUM."""
        if engine != "tensor":
            self.foreign = self.foreign or Written(self.tensor, origin=self._origin)
            self.foreign.add(view)
        elif self.foreign is not None:
            self.foreign.clear(view)

    def covers(self, view: View) -> bool:
        """Whether every element of the view has been written."""
        if self.full or not view.size:
            return True
        if self._mask is None or not self._window(view).all():
            return False
        if self._mask.all():
            self.full, self._mask = True, None
        return True

    def any(self, view: View) -> bool:
        """Whether some element of the view has been written."""
        if self.full:
            return True
        return self._mask is not None and bool(self._window(view).any())

    def mask(self, view: View) -> np.ndarray:
        """True for each written element of the view; one bool per element."""
        if self.full:
            return np.ones(view.shape, bool)
        window = self._window(view)
        return np.asarray(window if window.ndim == len(view.shape) else window.all(axis=-1))

    def clear(self, view: View) -> None:
        """The view counts as never written again."""
        if self.full:
            self._mask = np.ones(self.tensor.nbytes // self.unit, bool)
            self.full = False
        self._window(view)[...] = False

    def _window(self, view: View) -> np.ndarray:
        if self._mask is None:
            self._mask = np.zeros(self.tensor.nbytes // self.unit, bool)
        itemsize = ITEMSIZE[view.dtype]
        steps = list(view.strides)
        offset = view.offset
        if view.space != "hbm":
            row = self.tensor.footprint
            steps[0] = row
            offset += (view.partition - self._origin) * row
        if any(step % self.unit for step in (itemsize, offset, *steps)):
            self._mask = np.repeat(self._mask, self.unit)
            self.unit = 1
        unit = self.unit
        shape, strides = view.shape, tuple(step // unit for step in steps)
        if itemsize != unit:
            shape, strides = (*shape, itemsize // unit), (*strides, 1)
        return np.ndarray(shape, np.bool_, self._mask.data, offset // unit, strides)


def _moving_strides(view: View) -> list[int]:
    """Strides of the axes that move; the partition axis of a view on chip always moves."""
    first = 0 if view.space == "hbm" else 1
    pairs = list(zip(view.shape, view.strides, strict=True))[first:]
    return [stride for extent, stride in pairs if extent != 1]
