"""Values of rng_bit_generator: the bits that XLA's generators give on a CPU.

Threefry-2x32 (20 rounds) and Philox-4x32 (10 rounds) of Salmon et al., "Parallel random numbers:
as easy as 1, 2, 3", SC 2011; the use of key, counter and halves follows XLA's prng library.
"""

import math
from collections.abc import Sequence

import numpy as np

from ..errors import Unsupported

Shape = tuple[int, ...]

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_THREEFRY_PARITY = np.uint32(0x1BD11BDA)
_PHILOX_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF


def _halves(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Low and high 32 bits of uint64."""
    return x.astype(np.uint32), (x >> np.uint64(32)).astype(np.uint32)


def _joined(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return low.astype(np.uint64) | (high.astype(np.uint64) << np.uint64(32))


def threefry2x32(
    key: tuple[np.ndarray, np.ndarray], counters: tuple[np.ndarray, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Two uint32 words per pair of counter words."""
    with np.errstate(over="ignore"):
        keys = (*key, key[0] ^ key[1] ^ _THREEFRY_PARITY)
        x0, x1 = counters[0] + keys[0], counters[1] + keys[1]
        for block in range(5):
            for distance in _ROTATIONS[block % 2]:
                x0 = x0 + x1
                x1 = (x1 << np.uint32(distance)) | (x1 >> np.uint32(32 - distance))
                x1 ^= x0
            x0 = x0 + keys[(block + 1) % 3]
            x1 = x1 + (keys[(block + 2) % 3] + np.uint32(block + 1))
    return x0, x1


def philox4x32(key: tuple[int, int], counters: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Four uint32 words per four counter words."""
    x0, x1, x2, x3 = counters
    for turn in range(10):
        k0, k1 = (
            np.uint32((k + turn * w) & _MASK32) for k, w in zip(key, _PHILOX_WEYL, strict=True)
        )
        low0, high0 = _halves(x0.astype(np.uint64) * _PHILOX_MULTIPLIERS[0])
        low1, high1 = _halves(x2.astype(np.uint64) * _PHILOX_MULTIPLIERS[1])
        x0, x1, x2, x3 = high1 ^ x1 ^ k0, low1, high0 ^ x3 ^ k1, low0
    return [x0, x1, x2, x3]


def _split_dimension(shape: Shape) -> int:
    """The dimension over which XLA lays the two words: the first even one, else the largest."""
    even = [d for d, extent in enumerate(shape) if extent % 2 == 0]
    return even[0] if even else max(range(len(shape)), key=lambda d: shape[d])


def _threefry_bits32(key: int, counter: int, shape: Shape) -> tuple[np.ndarray, int]:
    outer = shape or (1,)
    d = _split_dimension(outer)
    half = (*outer[:d], -(-outer[d] // 2), *outer[d + 1 :])
    words, advance = _threefry_words(key, counter, half)
    both = np.stack(words, axis=d + 1).reshape(*outer[:d], 2 * half[d], *outer[d + 1 :])
    kept = both[(slice(None),) * d + (slice(outer[d]),)]
    return kept.reshape(shape), advance


def _threefry_words(
    key: int, counter: int, shape: Shape
) -> tuple[tuple[np.ndarray, np.ndarray], int]:
    count = math.prod(shape)
    numbers = np.arange(count, dtype=np.uint64) + np.uint64(counter)
    words = threefry2x32(
        (np.uint32(key & _MASK32), np.uint32(key >> 32)),  # pyright: ignore[reportArgumentType]
        _halves(numbers.reshape(shape)),
    )
    return words, count


def _threefry(state: np.ndarray, shape: Shape, bits: int) -> tuple[np.ndarray, np.ndarray]:
    key, counter = int(state[0]), int(state[1])
    if bits == 64:
        words, advance = _threefry_words(key, counter, shape)
        values = _joined(*words)
    else:
        values, advance = _threefry_bits32(key, counter, shape)
    after = np.array([key, (counter + advance) & _MASK64], np.uint64)
    return after, values


def _philox(state: np.ndarray, shape: Shape, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """The state is (key, counter), or (key, counter low, counter high); two words are reversed."""
    key = int(state[0])
    low, high = (int(state[1]), int(state[2])) if state.size > 2 else (int(state[1]), key)
    words = math.prod(shape) * (2 if bits == 64 else 1)
    vectors = -(-words // 4)
    lows = np.arange(vectors, dtype=np.uint64) + np.uint64(low)
    highs = np.where(lows < np.uint64(low), np.uint64((high + 1) & _MASK64), np.uint64(high))
    counters = [*_halves(lows), *_halves(highs)]
    output = np.stack(philox4x32((key & _MASK32, key >> 32), counters), axis=1).reshape(-1)
    values = output[: -(-words // 2) * 2].view(np.uint64) if bits == 64 else output
    values = values[: math.prod(shape)].reshape(shape)
    new_low = low + vectors
    new_high = (high + (new_low > _MASK64)) & _MASK64
    after = [key, new_low & _MASK64, new_high][: state.size]
    return np.array(after, np.uint64), values


def rng_bit_generator(
    state: np.ndarray, algorithm: str, shape: Shape, dtype: np.dtype
) -> list[np.ndarray]:
    """The next state (uint64, like `state`) and random bits of `shape` and unsigned `dtype`."""
    bits = 8 * dtype.itemsize
    if algorithm == "THREE_FRY":
        after, values = _threefry(state, shape, bits)
    elif algorithm in ("PHILOX", "DEFAULT"):
        after, values = _philox(state, shape, bits)
    else:
        raise Unsupported(f"random algorithm {algorithm} is not modelled")
    unsigned = np.dtype(f"u{dtype.itemsize}")
    return [after.astype(state.dtype, copy=False), values.astype(unsigned, copy=False).view(dtype)]
