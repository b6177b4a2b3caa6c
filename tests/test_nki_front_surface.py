"""The documented names of `nki.language` and `nki`: each is there, and each function computes."""

import importlib
from typing import Any

import numpy as np
import pytest
from scipy import special

from trnsim.device.nki import install, simulate
from trnsim.device.nki import isa as nisa
from trnsim.device.nki import language as nl
from trnsim.device.nki.errors import NotModelled
from trnsim.device.nki.install import uninstall

ISA_CONSTANTS = """
tensor_engine vector_engine scalar_engine gpsimd_engine unknown_engine engine reduce_cmd dge_mode
oob_mode matmul_perf_mode nc_version dma_engine NkiInstruction NkiValidationError VirtualRegister
"""
LANGUAGE = """
is_hbm is_on_chip is_psum is_sbuf where dropout ones full zeros_like empty_like random_seed
expand_dims broadcast_to transpose matmul no_reorder load_transpose2d gather_flattened ds
affine_range sequential_range static_range dynamic_range fori_loop while_loop ndarray zeros load
store program_id num_programs program_ndim shared_constant shared_identity_matrix device_print rand
softmax rms_norm DType bool_ int8 int16 int32 uint8 uint16 uint32 float16 float32 bfloat16 tfloat32
float8_e4m3 float8_e4m3fn float8_e5m2 float8_e5m2_x4 float8_e4m3fn_x4 float8_e8m0fnu
float4_e2m1fn_x4 sbuf psum hbm private_hbm shared_hbm tile_size average prelu bypass MemoryRegion
NKIObject NkiTensor
"""
"""Of NKI 0.6 (nki/api/nki/{isa,language}/__init__.py), beside the functions that tests call."""


@pytest.mark.parametrize(("module", "names"), [(nisa, ISA_CONSTANTS), (nl, LANGUAGE)])
def test_every_documented_name_is_there(module, names):
    assert [name for name in names.split() if name not in dir(module)] == []


def test_what_is_not_there_says_so_by_its_name():
    with pytest.raises(NotModelled, match="nki.language.mgrid is not modelled"):
        print(nl.mgrid)
    install()
    try:
        with pytest.raises(NotModelled, match="nki.benchmark is not modelled"):
            print(importlib.import_module("nki").benchmark)
    finally:
        uninstall()


def _gelu(x: Any) -> Any:
    return x * special.ndtr(x)


def _logistic(x: Any) -> Any:
    return special.expit(x)


UNARY = {
    "abs": np.abs, "square": np.square, "exp": np.exp, "log": np.log, "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x), "tanh": np.tanh, "sigmoid": _logistic,
    "relu": lambda x: np.maximum(x, 0), "gelu": _gelu,
    "gelu_apprx_sigmoid": lambda x: x * _logistic(1.702 * x),
    "gelu_apprx_tanh":
        lambda x: x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "gelu_dx": lambda x: special.ndtr(x) + x * np.exp(-x * x / 2) / np.sqrt(2 * np.pi),
    "silu": lambda x: x * _logistic(x),
    "silu_dx": lambda x: _logistic(x) * (1 + x * (1 - _logistic(x))),
    "softplus": lambda x: np.log1p(np.exp(x)),
    "mish": lambda x: x * np.tanh(np.log1p(np.exp(x))),
    "erf": special.erf, "erf_dx": lambda x: 2 / np.sqrt(np.pi) * np.exp(-x * x),
    "reciprocal": lambda x: 1 / x, "copy": lambda x: x, "sin": np.sin, "cos": np.cos,
    "tan": np.tan, "arctan": np.arctan, "ceil": np.ceil, "floor": np.floor, "trunc": np.trunc,
    "negative": np.negative, "sign": np.sign, "logical_not": lambda x: (x == 0) * 1.0,
}  # fmt: skip
BINARY = {
    "add": np.add, "subtract": np.subtract, "multiply": np.multiply, "divide": np.divide,
    "maximum": np.maximum, "minimum": np.minimum, "power": np.power, "equal": np.equal,
    "not_equal": np.not_equal, "less": np.less, "less_equal": np.less_equal,
    "greater": np.greater, "greater_equal": np.greater_equal, "logical_and": np.logical_and,
    "logical_or": np.logical_or, "logical_xor": np.logical_xor,
    "abs_max": lambda x, y: np.maximum(np.abs(x), np.abs(y)),
    "abs_min": lambda x, y: np.minimum(np.abs(x), np.abs(y)),
}  # fmt: skip
BITS = {
    "bitwise_and": np.bitwise_and, "bitwise_or": np.bitwise_or, "bitwise_xor": np.bitwise_xor,
    "left_shift": np.left_shift, "right_shift": np.right_shift,
}  # fmt: skip
REDUCTIONS = {"sum": np.sum, "max": np.max, "min": np.min, "mean": np.mean, "prod": np.prod,
              "var": np.var, "all": np.all}  # fmt: skip

RANDOM = np.random.default_rng(0)
X = RANDOM.uniform(0.1, 1.4, (128, 8)).astype(np.float32)  # sine and cosine: within one turn
Y = RANDOM.uniform(0.1, 1.4, (128, 8)).astype(np.float32)
Y[:, :2] = X[:, :2]


def evaluated(name: str, *inputs: np.ndarray, **options: Any) -> np.ndarray:
    """nl.<name> of tiles."""

    def kernel(*tensors):
        result = getattr(nl, name)(*(nl.load(tensor) for tensor in tensors), **options)
        out = nl.ndarray(result.shape, dtype=result.dtype, buffer=nl.shared_hbm)
        nl.store(out, result)
        return out

    return simulate(kernel, *inputs).output


@pytest.mark.parametrize("name", UNARY)
def test_functions_of_one_tile(name):
    np.testing.assert_allclose(evaluated(name, X), UNARY[name](X), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", BINARY)
def test_functions_of_two_tiles(name):
    golden = BINARY[name](X, Y).astype(np.float32)
    np.testing.assert_allclose(evaluated(name, X, Y), golden, rtol=2e-6)


@pytest.mark.parametrize("name", BITS)
def test_functions_of_bits(name):
    x = RANDOM.integers(0, 1 << 20, (128, 8)).astype(np.int32)
    y = RANDOM.integers(0, 9, (128, 8)).astype(np.int32)
    np.testing.assert_array_equal(evaluated(name, x, y), BITS[name](x, y))


def test_invert_is_of_every_bit():
    x = RANDOM.integers(0, 1 << 20, (128, 8)).astype(np.int32)
    np.testing.assert_array_equal(evaluated("invert", x), ~x)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_along_the_free_axis(name):
    golden = REDUCTIONS[name](X, axis=1, keepdims=True).astype(np.float32)
    np.testing.assert_allclose(evaluated(name, X, axis=1), golden, rtol=1e-5)


def test_softmax_and_rms_norm():
    powers = np.exp(X - X.max(1, keepdims=True))
    golden = powers / powers.sum(1, keepdims=True)
    np.testing.assert_allclose(evaluated("softmax", X), golden, rtol=1e-5)
    golden = X / np.sqrt((X * X).sum(1, keepdims=True) / 8 + 1e-6) * Y
    np.testing.assert_allclose(evaluated("rms_norm", X, Y, axis=1, n=8), golden, rtol=1e-5)
