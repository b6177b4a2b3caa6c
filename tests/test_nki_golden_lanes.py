"""The documentation's examples of elementwise instructions: each against its numpy formula."""

# pyright: reportMissingImports=false
import ml_dtypes
import numpy as np
import pytest

from trnsim.device.nki import simulate

from .nki_golden import on_tiles, saved, tile, uniform
from .nki_kernels import nisa, nki, nl


def test_activation_exp():
    """nisa.activation, exponential of [128, 1024]; golden np.exp (inf where float32 ends)."""

    def body(a):
        out = tile(a.shape)
        nisa.activation(dst=out, op=nl.exp, data=a)
        return out

    a = uniform(128, 1024)
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(on_tiles(body, a), np.exp(a), rtol=1e-5)


def test_activation_square_with_scale_and_bias():
    """nisa.activation, square(2 b + c), c a column, rounded to bfloat16; golden by numpy."""

    def body(b, c):
        out = tile(b.shape, nl.bfloat16)
        nisa.activation(dst=out, op=nl.square, data=b, bias=c, scale=2.0)
        return out

    b, c = uniform(128, 512), uniform(128, 1)
    golden = np.square(b * 2 + c).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(on_tiles(body, b, c), golden)


def test_tensor_copy():
    """nisa.tensor_copy on Vector, [8, 8]; golden the input."""

    def body(x):
        copy = tile(x.shape)
        nisa.tensor_copy(dst=copy, src=x, engine=nisa.engine.vector)
        return copy

    x = uniform(8, 8)
    np.testing.assert_array_equal(on_tiles(body, x), x)


def test_copy_predicated():
    """nisa.tensor_copy_predicated over a tile of other values; golden np.where."""

    def body(predicate, on_true, on_false):
        nisa.tensor_copy_predicated(dst=on_false, src=on_true, predicate=predicate)
        return on_false

    a, b = uniform(128, 512), uniform(128, 512)
    chosen = a <= 50
    golden = np.where(chosen, a, b)
    np.testing.assert_array_equal(on_tiles(body, chosen.astype(np.uint8), a, b), golden)


def test_memset():
    """nisa.memset of [128, 128] to 0.2; golden np.full."""

    def kernel(x):
        made = tile((128, 128))
        nisa.memset(dst=made, value=0.2)
        return saved(made)

    golden = np.full((128, 128), 0.2, np.float32)
    np.testing.assert_array_equal(simulate(kernel, uniform(1, 1)).output, golden)


def test_reciprocal():
    """nisa.reciprocal of [128, 512]; golden np.reciprocal."""

    def body(x):
        out = tile(x.shape)
        nisa.reciprocal(dst=out, data=x)
        return out

    x = uniform(128, 512) + np.float32(0.5)
    np.testing.assert_allclose(on_tiles(body, x), np.reciprocal(x), rtol=1e-6)


def test_tensor_scalar():
    """nisa.tensor_scalar: a - 1; 1 - c by reverse0; e * f + 2.5, f a column; goldens by numpy."""

    def body(a, c, e, f):
        b, d, g = tile(a.shape), tile(c.shape), tile(e.shape)
        nisa.tensor_scalar(dst=b, data=a, op0=nl.subtract, operand0=1.0)
        nisa.tensor_scalar(dst=d, data=c, op0=nl.subtract, operand0=1.0, reverse0=True)
        nisa.tensor_scalar(dst=g, data=e, op0=nl.multiply, operand0=f, op1=nl.add, operand1=2.5)
        return b, d, g

    a, c, e, f = uniform(128, 512), uniform(128, 512), uniform(64, 1024), uniform(64, 1)
    b, d, g = on_tiles(body, a, c, e, f)
    np.testing.assert_array_equal(b, a - 1)
    np.testing.assert_array_equal(d, 1 - c)
    np.testing.assert_allclose(g, e * f + np.float32(2.5), rtol=1e-6)


def test_tensor_tensor():
    """nisa.tensor_tensor, sum of two [128, 512]; golden np.add."""

    def body(a, b):
        c = tile(a.shape)
        nisa.tensor_tensor(dst=c, data1=a, data2=b, op=nl.add)
        return c

    a, b = uniform(128, 512), uniform(128, 512)
    np.testing.assert_array_equal(on_tiles(body, a, b), a + b)


def test_tensor_reduce():
    """nisa.tensor_reduce, row sums of [128, 512]; golden np.sum with kept axis."""

    def body(a):
        b = tile((128, 1))
        nisa.tensor_reduce(dst=b, op=nl.add, data=a, axis=1)
        return b

    a = uniform(128, 512)
    np.testing.assert_allclose(on_tiles(body, a), a.sum(1, keepdims=True), rtol=1e-5)


def test_dropout():
    """nisa.dropout with a column and with a number as probability; kept values are unchanged,
    their share is that asked for, and 0 and 1 keep and drop everything."""

    def body(a, b):
        by_column, by_number = tile(a.shape), tile(a.shape)
        nisa.dropout(dst=by_column, data=a, prob=b)
        nisa.dropout(dst=by_number, data=a, prob=0.2)
        return by_column, by_number

    a, b = uniform(128, 512) + np.float32(1), np.zeros((128, 1), np.float32)
    b[64:] = 1.0
    by_column, by_number = on_tiles(body, a, b)
    np.testing.assert_array_equal(by_column[:64], a[:64])
    assert not by_column[64:].any()
    kept = by_number != 0
    np.testing.assert_array_equal(by_number[kept], a[kept])
    assert abs(kept.mean() - 0.8) < 0.01


# ---- functions of tiles ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "a, b", [((128, 512), (128, 512)), ((128, 512), (128, 1)), ((128, 512), (1, 512)),
             ((128, 512), (1, 1)), ((128, 1), (1, 512))],
)  # fmt: skip
def test_nl_add(a, b):
    """nl.add of tiles, broadcast along free axis, partitions, both, and each; golden np.add."""
    x, y = uniform(*a), uniform(*b)
    made = on_tiles(lambda p, q: nl.add(p, q), x, y)
    np.testing.assert_array_equal(made, np.add(x, y))


def test_nl_add_of_a_number():
    """nl.add of a tile and 2.2; golden np.add in float32."""
    x = uniform(128, 512)
    np.testing.assert_array_equal(on_tiles(lambda p: nl.add(p, 2.2), x), x + np.float32(2.2))


def test_nl_broadcast_to():
    """nl.broadcast_to of one partition to 128; golden np.repeat."""
    x = np.arange(64, dtype=np.int32)[None]
    made = on_tiles(lambda p: nl.broadcast_to(p, (128, 64)), x)
    np.testing.assert_array_equal(made, np.repeat(x, 128, axis=0))


def test_square_of_a_part():
    """A part of a tile (what `mask=` selected in the first NKI), squared; golden np.square."""
    x = uniform(128, 512)
    made = on_tiles(lambda p: nl.square(p[0:64, 0:256]), x)
    np.testing.assert_array_equal(made, np.square(x[:64, :256]))


@nki.jit
def exp_of_batches(x):
    """exp of [B, 128, F]: what block dimensions were is a list of tiles."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    tiles = []
    for b in nl.affine_range(x.shape[0]):
        tiles.append(nl.load(x[b]))
    for b in nl.affine_range(x.shape[0]):
        nl.store(out[b], nl.exp(tiles[b]))
    return out


def test_memory_semantics():
    """Tiles of a batch kept in a list, then used; golden np.exp."""
    x = uniform(4, 128, 512, scale=10)
    np.testing.assert_allclose(exp_of_batches(x), np.exp(x), rtol=1e-5)


@nki.jit
def printed(a):
    """A copy that prints its tile while it runs."""
    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    loaded = nl.load(a)
    nl.device_print("value of a:", loaded)
    nl.store(out, loaded)
    return out


def test_simulate(capsys):
    """nki.simulate and nl.device_print of a [3, 4] copy; golden the input, and what is printed."""
    a = uniform(3, 4)
    np.testing.assert_array_equal(nki.simulate(printed)(a), a)
    shown = capsys.readouterr().out
    assert shown.startswith("value of a:") and str(a[0, 0])[:5] in shown
