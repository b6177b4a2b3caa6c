"""Random operator programs: kernels give the reference interpreter's values at both fidelities, on
one core and two, with residency, and both fidelities agree in time."""

import itertools
import random

import numpy as np
import pytest

from trnsim.device.core import Core
from trnsim.device.ops.evaluate import evaluate_block
from trnsim.device.ops.fuse import fuse
from trnsim.device.ops.ir import Block, Operation, TensorType
from trnsim.device.ops.kernel import Kernel
from trnsim.device.ops.residency import plan_residency

from .kernels import CHIP

EXTENTS = (1, 2, 3, 5, 8, 16, 33, 64, 128, 130, 256, 300)
LONG = (512, 1100, 2500)
Shape = tuple[int, ...]


class RandomProgram:
    """Operators drawn from a seed, on a few related shapes, with bounded values."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.types: list[TensorType] = []
        self.operations: list[Operation] = []
        dims = [self.draw.choice(EXTENTS) for _ in range(3)]
        if self.draw.random() < 0.3:
            dims = [min(dims[0], 8), min(dims[1], 40), self.draw.choice(LONG)]
        while np.prod(dims) > 200_000:
            dims[self.draw.randrange(3)] = self.draw.choice((1, 2, 3, 8))
        a, b, c = dims
        self.shapes: list[Shape] = [
            (a, b, c),
            (a, b),
            (b, c),
            (c,),
            (a,),
            (b,),
            (a, c),
            (),
            (a * b, c),
        ]
        chosen = [(a, b, c), *self.draw.sample(self.shapes, self.draw.randint(2, 4))]
        self.values = [self.value(shape) for shape in dict.fromkeys(chosen)]
        self.arguments = tuple(self.values)
        steps = (self.unary, self.unary, self.binary, self.binary, self.scaled, self.broadcast,
                 self.broadcast, self.reduce, self.reduce, self.reshape, self.transpose, self.dot,
                 self.select, self.slice, self.concatenate, self.iota)  # fmt: skip
        for _ in range(self.draw.randint(3, 25)):
            value = self.draw.choice(self.values[-6:] if self.draw.random() < 0.6 else self.values)
            self.draw.choice(steps)(value)
        made = [v for v in self.values if v not in self.arguments]
        self.returns = self.draw.sample(made, min(len(made), self.draw.randint(1, 4)))

    def value(self, shape: Shape, dtype: str = "f32") -> int:
        self.types.append(TensorType(tuple(shape), dtype))
        return len(self.types) - 1

    def add(self, name: str, operands: Shape, shape: Shape, dtype: str = "f32", **more) -> int:
        regions = more.pop("regions", ())
        result = self.value(shape, dtype)
        self.operations.append(Operation(name, operands, (result,), more, regions))
        if dtype == "f32" and name != "constant":
            self.values.append(result)
        return result

    def shape(self, value: int) -> Shape:
        return self.types[value].shape

    def alike(self, value: int) -> int:
        return self.draw.choice([v for v in self.values if self.shape(v) == self.shape(value)])

    def constant(self, number: float, shape: Shape) -> int:
        scalar = self.add("constant", (), (), value=np.float32(number))
        return self.add("broadcast_in_dim", (scalar,), shape, dimensions=())

    # ---- operators ----

    def unary(self, v: int) -> None:
        bounded = self.add("tanh", (v,), self.shape(v))
        name = self.draw.choice(["negate", "logistic", "abs", "exponential", "sine"])
        self.add(name, (bounded,), self.shape(v))

    def binary(self, v: int) -> None:
        name = self.draw.choice(["add", "subtract", "multiply", "maximum", "minimum"])
        pair = [v, self.alike(v)]
        self.draw.shuffle(pair)
        self.add(name, tuple(pair), self.shape(v))

    def scaled(self, v: int) -> None:
        name = self.draw.choice(["add", "multiply", "divide", "subtract"])
        self.add(
            name, (v, self.constant(self.draw.choice((0.5, 2.0)), self.shape(v))), self.shape(v)
        )

    def broadcast(self, v: int) -> None:
        target, source = self.draw.choice([s for s in self.shapes if s]), self.shape(v)
        fitting = [
            d
            for d in itertools.combinations(range(len(target)), len(source))
            if all(source[i] in (1, target[x]) for i, x in enumerate(d))
        ]
        if fitting:
            self.add("broadcast_in_dim", (v,), target, dimensions=self.draw.choice(fitting))

    def reduce(self, v: int) -> None:
        shape = self.shape(v)
        if not shape:
            return
        axes = sorted(self.draw.sample(range(len(shape)), self.draw.randint(1, len(shape))))
        name, start = self.draw.choice([("add", 0.0), ("maximum", -np.inf)])
        init, a, b, c = (
            self.add("constant", (), (), value=np.float32(start)),
            *(self.value(()) for _ in range(3)),
        )
        region = Block((a, b), (Operation(name, (a, b), (c,)),), (c,))
        kept = tuple(e for d, e in enumerate(shape) if d not in axes)
        result = self.add("reduce", (v, init), kept, dimensions=tuple(axes), regions=(region,))
        self.add("tanh", (result,), kept)

    def reshape(self, v: int) -> None:
        shape = self.shape(v)
        options = [(*shape, 1), (1, *shape), (int(np.prod(shape)),)]
        if len(shape) > 1:
            options += [(shape[0] * shape[1], *shape[2:]), (*shape[:-2], shape[-2] * shape[-1])]
        self.add("reshape", (v,), self.draw.choice(options))

    def transpose(self, v: int) -> None:
        order = list(range(len(self.shape(v))))
        self.draw.shuffle(order)
        if order:
            shape = tuple(self.shape(v)[d] for d in order)
            self.add("transpose", (v,), shape, permutation=tuple(order))

    def dot(self, v: int) -> None:
        left = self.shape(v)
        pairs = [
            (u, i, j)
            for u in self.values
            for i, e in enumerate(left)
            for j, f in enumerate(self.shape(u))
            if e == f
        ]
        if not pairs:
            return
        u, i, j = self.draw.choice(pairs)
        right = self.shape(u)
        shape = (*left[:i], *left[i + 1 :], *right[:j], *right[j + 1 :])
        if np.prod(shape) * left[i] < 2e7 and np.prod(shape) < 200_000:
            result = self.add(
                "dot_general", (v, u), shape,
                lhs_batch=(), rhs_batch=(), lhs_contracting=(i,), rhs_contracting=(j,),
            )  # fmt: skip
            self.add("tanh", (result,), shape)

    def select(self, v: int) -> None:
        shape = self.shape(v)
        mask = self.add("compare", (v, self.alike(v)), shape, "i1", direction="GT")
        self.add("select", (mask, v, self.alike(v)), shape)

    def slice(self, v: int) -> None:
        starts = tuple(self.draw.randint(0, e - 1) for e in self.shape(v))
        limits = tuple(
            self.draw.randint(s + 1, e) for s, e in zip(starts, self.shape(v), strict=True)
        )
        shape = tuple(b - a for a, b in zip(starts, limits, strict=True))
        self.add("slice", (v,), shape, start=starts, limit=limits, strides=(1,) * len(shape))

    def concatenate(self, v: int) -> None:
        shape = list(self.shape(v))
        if shape:
            axis = self.draw.randrange(len(shape))
            shape[axis] *= 2
            self.add("concatenate", (v, v), tuple(shape), dimension=axis)

    def iota(self, v: int) -> None:
        shape = self.shape(v)
        if shape:
            axis = self.draw.randrange(len(shape))
            counted = self.add("iota", (), shape, "i32", dimension=axis)
            self.add("convert", (counted,), shape)


def _run(program: RandomProgram, inputs: dict[int, np.ndarray], cores: int, instructions: bool):
    """Returned values at one fidelity; asserts that times agree at instruction fidelity."""
    items = fuse(program.operations, program.types, program.returns)
    kernels = [item for item in items if isinstance(item, Kernel)]
    sequence = [(k, tuple(k.part(c, cores) for c in range(cores))) for k in kernels]
    plans = [plan_residency(sequence, c, set(program.returns), CHIP) for c in range(cores)]
    arrays, devices = dict(inputs), [Core(CHIP) for _ in range(cores)]
    for place, (kernel, parts) in enumerate(sequence):
        assert not kernel.fallback
        for v in kernel.outputs:
            arrays[v] = np.full(program.shape(v), np.nan, program.types[v].numpy)
        for core, part in enumerate(parts):
            if not instructions:
                kernel.evaluate(arrays, part)
                continue
            held = plans[core][place]
            run, cost = kernel.run(devices[core], arrays, part, held), kernel.cost(CHIP, part, held)
            assert abs(run.duration - cost.duration) <= 0.05 * run.duration
    return [arrays[v] for v in program.returns]


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")
@pytest.mark.parametrize("seed", range(60))
def test_random_programs(seed):
    program = RandomProgram(seed)
    draw = np.random.default_rng(seed)
    inputs = {
        v: draw.standard_normal(program.shape(v)).astype(np.float32) for v in program.arguments
    }
    block = Block(program.arguments, tuple(program.operations), tuple(program.returns))
    expected = evaluate_block(block, program.types, list(inputs.values()))
    for cores, instructions in itertools.product((1, 2), (False, True)):
        found = _run(program, inputs, cores, instructions)
        for a, b in zip(found, expected, strict=True):
            assert np.abs(a - b).max() <= 2e-4 * max(np.abs(b).max(), 1e-3)
