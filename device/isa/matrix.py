"""The Tensor engine's matmul and transpose as a kernel writes them, MX formats included."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from ..arithmetic import convert
from ..chip import Chip
from ..memory import ITEMSIZE, View
from .base import is_wide, lane_cycles
from .indirection import IndirectView
from .lanes import Lanes
from .numerics import FLOAT32, cast, load, to_tfloat32
from .tensor import _buffer, check_banks

FLOATS = frozenset({"f32", "bf16", "f16", "f8E4M3", "f8E5M2", "f8E4M3FN"})
FP8 = frozenset({"f8E4M3", "f8E5M2", "f8E4M3FN"})
TILE = 128  # rows and columns of the array
MX_GROUP_PARTITIONS = 8
MX_PACK = 4
QUADRANT = 32
MX_ELEMENTS = {
    "f8E4M3FN": (np.dtype(ml_dtypes.float8_e4m3fn), 8),
    "f8E5M2": (np.dtype(ml_dtypes.float8_e5m2), 15),
    "f4E2M1FN": (np.dtype(ml_dtypes.float4_e2m1fn), 2),
}
"""Elements of MX formats, and their largest exponents."""

_ONEZERO_GAIN = 2  # of a float32 matmul, for each operand of ones and zeros (nc_matmul docstring)


class OnTensor(Lanes):
    """Base of the Tensor engine's instructions: operands in SBUF, result in PSUM."""

    __slots__ = ()
    engine = "tensor"

    def check_places(self, chip: Chip, dst: View, **operands: View) -> None:
        """Operands in SBUF, the result in PSUM."""
        for operand, view in operands.items():
            self.check_place(chip, operand, view, ("sbuf",))
        self.check_place(chip, "dst", dst, ("psum",))

    def check_product(self, chip: Chip, dst: View, m: int, n: int) -> None:
        """dst is [m, n] in a bank of PSUM, m and n inside the array's limits."""
        if m > chip.stationary_free_max:
            raise self.illegal(f"stationary free size is {m}; limit: {chip.stationary_free_max}")
        limit = chip.moving_free_max
        if limit > 512 and dst.dtype == "bf16":
            limit *= 2
        if n > limit:
            raise self.illegal(f"moving free size is {n}; limit: {limit}")
        if dst.shape[0] != m or dst.free != n:
            raise self.illegal(
                f"dst has shape {list(dst.shape)}; stationary and moving give [{m}, {n}]"
            )
        check_banks(self, chip)  # type: ignore[arg-type]

    def check_result(self, chip: Chip, dst: View) -> None:
        """The result is float32, or from v4 on bfloat16."""
        if dst.dtype != "f32" and not (dst.dtype == "bf16" and chip.generation >= 4):
            allowed = "f32 or bf16" if chip.generation >= 4 else "f32"
            raise self.illegal(f"dst is {dst.dtype}; a matmul writes {allowed} on {chip.name}")

    def check_tiling(
        self,
        chip: Chip,
        size: tuple[int, int],
        position: tuple[int, int],
        rows: int,
        columns: int,
    ) -> None:
        """Row and column tiles are 32 (v3 on), 64 or 128, and hold the stationary tile."""
        sizes = (32, 64, 128) if chip.generation >= 3 else (64, 128)
        used = (rows, columns)
        for name, tile, start, need in zip(("row", "column"), size, position, used, strict=True):
            if tile not in sizes:
                allowed = ", ".join(map(str, sizes))
                raise self.illegal(f"tile_size {name} is {tile}; allowed: {allowed}")
            if start % tile or not 0 <= start <= TILE - tile:
                raise self.illegal(
                    f"tile_position {name} is {start}; allowed: multiples of {tile} that leave "
                    f"room for {tile} of {TILE}"
                )
            if need > tile:
                raise self.illegal(f"stationary has {need} {name}s; tile_size allows {tile}")


@dataclass(frozen=True, slots=True, eq=False)
class Matmul(OnTensor):
    """dst[M, N] = stationary[K, M].T @ moving[K, N], free axes flattened, in float32.

    `accumulate`: False overwrites dst, True adds to it; a bool array of dst's shape adds where it
    is true. With `double_row` (fp8, v3 on) operands are [K, 2, ...]. `transpose` is the mode that
    keeps bits (v3 on): moving is a permutation. `tfloat32`: operands rounded to it, at the rate of
    bfloat16. `onezero`: how many operands are said to be of ones and zeros.
    Cost: max(N, 64) cycles, x 4 for float32, halved for each `onezero`.
    """

    dst: View
    stationary: View
    moving: View
    accumulate: bool | np.ndarray = False
    double_row: bool = False
    transpose: bool = False
    tfloat32: bool = False
    onezero: int = 0
    tile_size: tuple[int, int] = (TILE, TILE)
    tile_position: tuple[int, int] = (0, 0)

    def reads(self) -> tuple[View, ...]:
        """The operands. PSUM adds as it writes: a matmul does not wait for the one before."""
        return self.stationary, self.moving

    def used(self) -> tuple[View, ...]:
        if self.accumulate is True:
            return self.stationary, self.moving, self.dst
        return self.stationary, self.moving

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(K partitions, M, N)."""
        rows = 2 if self.double_row else 1
        stationary, moving = self.stationary, self.moving
        return stationary.shape[0], stationary.free // rows, moving.free // rows

    @property
    def flops(self) -> int:  # type: ignore[override]
        """Multiplications and additions."""
        k, m, n = self.sizes
        return 2 * k * m * n * (2 if self.double_row else 1)

    def check(self, chip: Chip) -> None:
        stationary, moving = self.stationary, self.moving
        self.check_places(chip, self.dst, stationary=stationary, moving=moving)
        if stationary.shape[0] != moving.shape[0]:
            raise self.illegal(
                f"stationary has {stationary.shape[0]} partitions and moving {moving.shape[0]}: "
                "the contraction must be equal"
            )
        if self.double_row:
            self._check_double_row(chip)
        self._check_indirect()
        k, m, n = self.sizes
        self.check_product(chip, self.dst, m, n)
        self._check_dtypes(chip)
        if self.tile_size != (TILE, TILE) or self.tile_position != (0, 0):
            self.check_tiling(chip, self.tile_size, self.tile_position, k, m)

    def _check_dtypes(self, chip: Chip) -> None:
        left, right = self.stationary.dtype, self.moving.dtype
        if self.transpose and chip.generation >= 3:
            if self.dst.dtype != left:
                raise self.illegal(
                    f"dst is {self.dst.dtype}; a transpose writes stationary's dtype, {left}"
                )
            return
        for operand, dtype in (("stationary", left), ("moving", right)):
            if dtype not in FLOATS or (dtype == "f8E4M3FN" and chip.generation < 4):
                allowed = sorted(FLOATS if chip.generation >= 4 else FLOATS - {"f8E4M3FN"})
                raise self.illegal(f"{operand} is {dtype}; allowed: {', '.join(allowed)}")
        if (left == "f32") != (right == "f32"):
            raise self.illegal(f"stationary is {left} and moving {right}; f32 pairs only with f32")
        if {left, right} == {"f8E4M3", "f8E4M3FN"}:
            raise self.illegal("f8E4M3 and f8E4M3FN cannot be mixed in one matmul")
        self.check_result(chip, self.dst)

    def _check_indirect(self) -> None:
        """Tensor indirection goes with no tiling, and not with a moving operand of a transpose."""
        operands = (("stationary", self.stationary), ("moving", self.moving), ("dst", self.dst))
        indirect = {name: view for name, view in operands if type(view) is IndirectView}
        if not indirect:
            return
        if self.tile_position != (0, 0):
            raise self.illegal(
                f"tile_position is {self.tile_position}; with tensor indirection it must be (0, 0)"
            )
        if self.transpose and "moving" in indirect:
            raise self.illegal("moving of a transpose takes no tensor indirection")
        for name, view in indirect.items():
            if name != "dst":
                self.check_dtype(name, view, *sorted(FLOATS - {"f32"}))

    def _check_double_row(self, chip: Chip) -> None:
        left, right = self.stationary, self.moving
        if chip.generation < 3 or left.dtype not in FP8 or right.dtype not in FP8:
            raise self.illegal(
                f"double_row needs fp8 operands on NeuronCore v3 or later, not {left.dtype} and "
                f"{right.dtype} on {chip.name}"
            )
        for operand, view in (("stationary", left), ("moving", right)):
            if len(view.shape) < 3 or view.shape[1] != 2:
                raise self.illegal(
                    f"{operand} has shape {list(view.shape)}; double_row needs [K, 2, ...]"
                )
        if self.tile_size[1] != TILE or self.transpose:
            raise self.illegal("double_row goes with neither column tiling nor transpose")

    def cycles(self, chip: Chip) -> int:
        _, m, n = self.sizes
        cycles = max(n, chip.matmul_init_cycles, -(-m // chip.load_stationary_speedup))
        if ITEMSIZE[self.moving.dtype] == 4 and not self.tfloat32:
            cycles *= self._fp32_factor(chip)
        return cycles * chip.strided_access_factor if is_wide(chip, self.moving) else cycles

    def _fp32_factor(self, chip: Chip) -> int:
        factor = chip.matmul_fp32_factor
        if self.transpose and chip.generation >= 3:
            return max(factor // 2, 1)
        return max(factor // _ONEZERO_GAIN**self.onezero, 1)

    def execute(self) -> None:
        if self.transpose and _keeps_bits(self.stationary, self.dst):
            self._permute()
            return
        stationary, moving = self._operand(self.stationary), self._operand(self.moving)
        _, m, n = self.sizes
        product = np.matmul(stationary.T, moving, out=_buffer((m, n)))
        accumulate_into(self.dst, product, self.accumulate)

    def _operand(self, view: View) -> np.ndarray:
        values = load(view)
        if self.tfloat32:
            values = to_tfloat32(values)
        k = view.shape[0] * (2 if self.double_row else 1)
        return values.reshape(k, -1)

    def _permute(self) -> None:
        """dst[:, n] = the row of stationary that moving's column n picks, bit by bit."""
        stationary = self.stationary.array.reshape(self.stationary.shape[0], -1)
        moving = load(self.moving).reshape(len(stationary), -1)
        picked = stationary[np.abs(moving).argmax(axis=0)].T
        out = self.dst.array
        out[...] = np.where(np.any(moving, axis=0), picked, np.zeros((), out.dtype)).reshape(
            out.shape
        )


def _keeps_bits(src: View, dst: View) -> bool:
    return src.dtype == dst.dtype


def accumulate_into(dst: View, product: np.ndarray, accumulate: bool | np.ndarray) -> None:
    """Writes a float32 product over dst, onto it, or onto it where a mask is true."""
    out = dst.array
    product = product.reshape(out.shape)
    if accumulate is True:
        if out.dtype == FLOAT32:
            np.add(out, product, out=out)
            return
        product = convert(out, FLOAT32) + product
    elif accumulate is not False:
        product = np.where(accumulate, convert(out, FLOAT32) + product, product)
    out[...] = cast(product, out.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Transpose(Lanes):
    """dst[F, P] = src[P, F].T, the free axes of src flattened.

    On Tensor: src in SBUF, dst in PSUM, up to [128, 128]; from v3 on bits are kept, on v2 dst may
    be float32. On Vector: in SBUF or PSUM, up to [32, 32].
    Cost: on Tensor max(P, 64) cycles (4 bytes: x 4 on v2, x 2 later), on Vector max(64, F).
    """

    dst: View
    src: View
    engine: str = "tensor"

    def check(self, chip: Chip) -> None:
        dst, src = self.dst, self.src
        if self.engine == "tensor":
            self.check_place(chip, "data", src, ("sbuf",))
            self.check_place(chip, "dst", dst, ("psum",))
        else:
            self.spaces(("tensor", "vector"))
            self.check_place(chip, "data", src)
            self.check_place(chip, "dst", dst)
        limit = TILE if self.engine == "tensor" else QUADRANT
        if max(src.shape[0], src.free) > limit:
            raise self.illegal(
                f"data has shape {list(src.shape)}; limit on {self.engine}: [{limit}, {limit}]"
            )
        if dst.shape[0] != src.free or dst.free != src.shape[0]:
            raise self.illegal(
                f"dst has shape {list(dst.shape)}; data {list(src.shape)} transposed is "
                f"[{src.free}, {src.shape[0]}]"
            )
        widened = dst.dtype == "f32" and self.engine == "tensor" and chip.generation < 3
        if dst.dtype != src.dtype and not widened:
            raise self.illegal(f"data is {src.dtype} and dst {dst.dtype}; they must be equal")
        if self.engine == "tensor":
            check_banks(self, chip)  # type: ignore[arg-type]

    def cycles(self, chip: Chip) -> int:
        if self.engine == "vector":
            return lane_cycles(chip, self.src.free, self.src)
        cycles = max(self.src.shape[0], chip.matmul_init_cycles)
        if ITEMSIZE[self.src.dtype] == 4:
            factor = chip.matmul_fp32_factor
            cycles *= factor if chip.generation < 3 else max(factor // 2, 1)
        return cycles

    def execute(self) -> None:
        src, out = self.src.array, self.dst.array
        turned = src.reshape(src.shape[0], -1).T.reshape(out.shape)
        out[...] = turned if turned.dtype == out.dtype else cast(turned, out.dtype)


# ---- MX formats ----------------------------------------------------------------------------


def unpack(view: View, element: str) -> np.ndarray:
    """[P, F, 4] float32 elements of a packed tensor, whose bytes are in unsigned integers."""
    array = np.ascontiguousarray(view.array.reshape(view.shape[0], -1))
    if element == "f4E2M1FN":
        nibbles = (array[:, :, None] >> np.array([0, 4, 8, 12], array.dtype)) & 0xF
        return nibbles.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    kind = MX_ELEMENTS[element][0]
    return convert(array.view(np.uint8).view(kind), FLOAT32).reshape(*array.shape, MX_PACK)


def scale_rows(partitions: int) -> np.ndarray:
    """Partition of the scales of each 8 partitions of data: the first four of their quadrant."""
    groups = np.arange(partitions // MX_GROUP_PARTITIONS)
    per = QUADRANT // MX_GROUP_PARTITIONS
    return groups // per * QUADRANT + groups % per


def scale_views(scale: View, partitions: int, columns: int) -> tuple[View, ...]:
    """The part of a scale tensor that belongs to data of that many partitions and columns."""
    if len(scale.shape) != 2 or isinstance(scale, IndirectView):
        return (scale,)
    rows = QUADRANT // MX_GROUP_PARTITIONS
    return tuple(scale[first : first + rows, :columns] for first in range(0, partitions, QUADRANT))


def scaled(view: View, scale: View, element: str) -> np.ndarray:
    """[P, 4, F] float32 values of an MX tensor."""
    values = unpack(view, element)
    table = scale.array.reshape(scale.shape[0], -1).view(np.uint8)
    exponents = table[scale_rows(view.shape[0])][:, : values.shape[1]].astype(np.int32)
    factors = np.ldexp(np.float32(1), exponents - 127).astype(np.float32)
    factors = np.repeat(factors, MX_GROUP_PARTITIONS, axis=0)
    return (values * factors[:, :, None]).transpose(0, 2, 1)


class OnMx(OnTensor):
    """Base of the MX instructions: NeuronCore-v4, and where scales lie."""

    __slots__ = ()

    def check_scale(self, operand: str, scale: View, data: View, columns: int) -> None:
        """Scales are bytes in SBUF: rows 0-3 of each quadrant of the data, a column for each."""
        if scale.space != "sbuf":
            raise self.illegal(f"{operand} must be in sbuf, not in {scale.space}")
        if scale.dtype != "ui8":
            raise self.illegal(f"{operand} is {scale.dtype}; allowed: float8_e8m0fnu, uint8")
        rows = int(scale_rows(data.shape[0])[-1]) + 1
        if scale.shape[0] < rows or scale.free < columns:
            raise self.illegal(
                f"{operand} has shape {list(scale.shape)}; it needs [{rows}, {columns}]"
            )

    def check_partitions(self, operand: str, view: View) -> None:
        """Whole quadrants of partitions."""
        if view.shape[0] % QUADRANT:
            raise self.illegal(
                f"{operand} has {view.shape[0]} partitions; a multiple of {QUADRANT} is needed"
            )


@dataclass(frozen=True, slots=True, eq=False)
class MatmulMx(OnMx):
    """dst = stationary.T @ moving of MX tensors, contracting partitions and packed elements.

    stationary [K, M] and moving [K, N] are packed (`element` names say which format), each 8
    partitions x 4 elements share a scale. NeuronCore-v4. Cost: max(N, 64) cycles (4 x bfloat16).
    """

    dst: View
    stationary: View
    moving: View
    stationary_scale: View
    moving_scale: View
    elements: tuple[str, str]
    accumulate: bool | np.ndarray = False
    tile_size: tuple[int, int] = (TILE, TILE)
    tile_position: tuple[int, int] = (0, 0)

    def reads(self) -> tuple[View, ...]:
        stationary, moving = self.stationary, self.moving
        return (
            stationary, moving,
            *scale_views(self.stationary_scale, stationary.shape[0], stationary.free),
            *scale_views(self.moving_scale, moving.shape[0], moving.free),
        )  # fmt: skip

    def used(self) -> tuple[View, ...]:
        return (*self.reads(), self.dst) if self.accumulate is True else self.reads()

    @property
    def flops(self) -> int:  # type: ignore[override]
        """Multiplications and additions."""
        return 2 * MX_PACK * self.stationary.size * self.moving.free

    def check(self, chip: Chip) -> None:
        self.check_generation(chip, 4)
        stationary, moving = self.stationary, self.moving
        self.check_places(chip, self.dst, stationary=stationary, moving=moving)
        self.check_partitions("stationary", stationary)
        if stationary.shape[0] != moving.shape[0]:
            raise self.illegal(
                f"stationary has {stationary.shape[0]} partitions and moving {moving.shape[0]}: "
                "the contraction must be equal"
            )
        if stationary.free % 2:
            raise self.illegal(f"stationary free size is {stationary.free}; it must be even")
        self.check_product(chip, self.dst, stationary.free, moving.free)
        self.check_result(chip, self.dst)
        self.check_scale("stationary_scale", self.stationary_scale, stationary, stationary.free)
        self.check_scale("moving_scale", self.moving_scale, moving, moving.free)
        if self.tile_size[1] != TILE or self.tile_position[1] != 0:
            raise self.illegal(
                f"tile_size is {self.tile_size} at {self.tile_position}; MX has row tiles only"
            )
        self.check_tiling(
            chip, self.tile_size, self.tile_position, stationary.shape[0], stationary.free
        )

    def cycles(self, chip: Chip) -> int:
        stationary = -(-self.stationary.free // chip.load_stationary_speedup)
        return max(self.moving.free, chip.matmul_init_cycles, stationary)

    def execute(self) -> None:
        left = scaled(self.stationary, self.stationary_scale, self.elements[0])
        right = scaled(self.moving, self.moving_scale, self.elements[1])
        depth = left.shape[0] * MX_PACK
        product = left.reshape(depth, -1).T @ right.reshape(depth, -1)
        accumulate_into(self.dst, product, self.accumulate)


@dataclass(frozen=True, slots=True, eq=False)
class QuantizeMx(OnMx):
    """dst (packed), scale = MX form of src: 8 partitions x 4 elements share 2^(e - (Emax - 1)).

    e is the exponent of the largest magnitude, Emax that of the element type; a group of zeros has
    2^-127. On Vector, NeuronCore-v4. Cost: N / 4 cycles of src.
    """

    dst: View
    src: View
    scale: View
    element: str
    engine = "vector"

    def writes(self) -> tuple[View, ...]:
        return self.dst, *scale_views(self.scale, self.src.shape[0], self.dst.free)

    def check(self, chip: Chip) -> None:
        self.check_generation(chip, 4)
        self.check_place(chip, "src", self.src, ("sbuf",))
        self.check_place(chip, "dst", self.dst, ("sbuf",))
        if self.src.dtype not in ("f16", "bf16"):
            raise self.illegal(f"src is {self.src.dtype}; allowed: f16, bf16")
        if self.element not in ("f8E4M3FN", "f8E5M2"):
            raise self.illegal(
                f"dst holds {self.element}; allowed: float8_e5m2_x4, float8_e4m3fn_x4"
            )
        self.check_partitions("src", self.src)
        if self.src.free % MX_PACK:
            raise self.illegal(f"src free size is {self.src.free}; a multiple of 4 is needed")
        columns = self.src.free // MX_PACK
        if self.dst.shape[0] != self.src.shape[0] or self.dst.free != columns:
            raise self.illegal(
                f"dst has shape {list(self.dst.shape)}; src {list(self.src.shape)} gives "
                f"[{self.src.shape[0]}, {columns}]"
            )
        self.check_scale("dst_scale", self.scale, self.src, columns)

    def cycles(self, chip: Chip) -> int:
        return lane_cycles(chip, self.src.free / MX_PACK, self.src)

    def execute(self) -> None:
        kind, largest = MX_ELEMENTS[self.element]
        src = load(self.src)
        src = src.reshape(src.shape[0] // MX_GROUP_PARTITIONS, MX_GROUP_PARTITIONS, -1, MX_PACK)
        amax = np.abs(src).max(axis=(1, 3))
        exponent = np.frexp(amax)[1].astype(np.int32) - 1 - (largest - 1)
        exponent = np.clip(np.where(amax == 0, -127, exponent), -127, 127)
        quotient = np.ldexp(src.astype(np.float64), -exponent[:, None, :, None])
        packed = convert(quotient.astype(np.float32), kind).view(np.uint8).view(np.uint32)
        self.dst.array[...] = packed.reshape(self.dst.shape)
        columns = amax.shape[1]
        table = self.scale.array
        flat = (exponent + 127).astype(np.uint8)
        for row, values in zip(scale_rows(self.src.shape[0]), flat, strict=True):
            line = table[row].reshape(-1).copy()
            line[:columns] = values
            table[row] = line.reshape(table.shape[1:])
