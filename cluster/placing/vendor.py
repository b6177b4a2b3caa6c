"""The vendor's published layouts of tensor-parallel groups that are not simply in order.

Source: neuronx-distributed, parallel_layers/parallel_state.py (@978fe3a): on trn2.48xlarge a group
of half the node is rows 0+3 or 1+2 of the torus ("Logic 2": 64 ranks at LNC=1, 32 at LNC=2), since
ranks of the same place in rows 0+1 and 2+3 are no neighbours; and on trn1.32xlarge groups of 4 are
one rank in each row, [0, 8, 16, 24]. All other published groups are consecutive ranks.
"""

from dataclasses import dataclass

import numpy as np

from ..instances import Instance
from ..mesh import Mesh
from .arrangements import Arrangement, Part
from .positions import Positions


@dataclass(frozen=True)
class VendorLayout:
    """A published layout as a placement: int64[ranks]."""

    name: str
    slots: np.ndarray


def vendor_layouts(
    instance: Instance, lnc: int, mesh: Mesh, positions: Positions
) -> list[VendorLayout]:
    """The published layouts for this instance, LNC and tp degree; none where it is in order."""
    tp = dict(mesh.axes).get("tp", 1)
    torus = instance.dims[-2:] == (4, 4) and positions.size == mesh.size
    if not torus or not {"row", "column"} <= {d.name for d in positions.dimensions}:
        return []
    half = instance.chips_per_server * instance.chip.cores // lnc // 2
    if instance.chip.name == "trn2" and tp == half:
        return _rows(mesh, positions, {"row": 2}, folded=True, name="vendor: rows 0+3 and 1+2")
    if instance.chip.name == "trn1" and tp == 4:
        return _rows(
            mesh, positions, {"row": 4}, folded=False, name="vendor: stride 8, [0,8,16,24]"
        )
    return []


def _rows(
    mesh: Mesh, positions: Positions, tp: dict[str, int], *, folded: bool, name: str
) -> list[VendorLayout]:
    """tp takes its part of the rows first; where folded, also whatever is inside a row."""
    others = [(axis, degree) for axis, degree in mesh.axes if axis != "tp" and degree > 1]
    parts: list[tuple[Part, ...]] = []
    for dimension in reversed(positions.dimensions):
        inside = dimension.name in ("column", "core") and folded
        share = tp.get(dimension.name, dimension.extent if inside else 1)
        left, found = dimension.extent // share, []
        while left > 1:
            if not others:
                return []
            axis, degree = others[-1]
            part = np.gcd(left, degree).item()
            if part == 1:
                return []
            found.insert(0, (axis, part))
            others[-1] = (axis, degree // part)
            left //= part
            if others[-1][1] == 1:
                others.pop()
        parts.insert(0, ((("tp", share), *found) if share > 1 else tuple(found)))
    rows = [d.name for d in positions.dimensions].index("row")
    fold = frozenset((rows,)) if folded else frozenset()
    return [VendorLayout(name, Arrangement(positions, tuple(parts), fold).slots(mesh))]
