"""Ring attention: each rank of cp has a part of the sequence, and keys and values go around.

A rank's queries meet the keys and values of every rank, one rank a step, while the next ones are
on their way (arXiv:2310.01889). What the steps give is joined by their log-sum-exp. With a causal
mask the sequence is cut in 2·cp chunks of which rank r has the r-th and the r-th from the end
("zigzag"): then every rank has two pairs of whole chunks to do in every step after its own, and
which ones depends on its place, so that all ranks run the same program. The backward pass sends
keys and values around once more, with their gradients, and takes the log-sum-exp of the whole row:
nothing but q, k, v, the result and its log-sum-exp is saved.

Shapes: b sequences, s positions and n heads of the rank, m key-value heads, h head width.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trnsim.device.ops.ir import TensorType

from ..frontends.attention import attention, attention_gradient
from .tape import Tape

Array = jax.Array
Two = tuple[Array, Array]
Three = tuple[Array, Array, Array]
Pairs = tuple[tuple[int, int], ...]
AXIS, LABEL = "cp", "context parallel"


def positions(seq: int, cp: int, causal: bool) -> np.ndarray:
    """i32 [cp, seq / cp]: the positions in the sequence that each rank has, in order."""
    if not causal or cp == 1:
        return np.arange(seq, dtype=np.int32).reshape(cp, -1)
    chunks = np.arange(seq, dtype=np.int32).reshape(2 * cp, -1)
    return np.concatenate([chunks[:cp], chunks[: cp - 1 : -1]], axis=1)


def ring(cp: int) -> Pairs:
    """Each rank sends to the next."""
    return tuple((rank, (rank + 1) % cp) for rank in range(cp))


def record_ring(
    tape: Tape, q: str, k: str, v: str, write: str, *, causal: bool, again: bool = False
) -> str:
    """Record attention of q [b, s, n, h] to k, v [b, s, m, h] of all ranks of cp, as q.

    `cp.index` is given. Other values that it writes are called `write` with a suffix.
    """
    lse, differentiated = f"{write}.lse", (q, k, v)
    q, k, v = map(tape.array, differentiated)
    there = tape.part(q, k, v, place(tape))
    made = _Around(there, write, k, v)
    out, total = f"{write}.wide0", f"{write}.lse0"
    made.prefetch(0)
    there.run(own(causal), [q, k, v], [out, total])
    for step in range(1, made.count):
        made.prefetch(step)
        kv = made.at(step)
        sums, out, total = [out, total], f"{write}.wide{step}", f"{write}.lse{step}"
        part = join(causal, step)
        there.run(part, [q, *kv, *sums, place(tape)], [out, total])
    there.run(finish, [out, total, q], [write, lse])

    def back(given: Sequence[str], targets: Sequence[str]) -> Tape:
        return _backward(tape, (q, k, v, write, lse), given[0], targets, causal)

    return tape.compose(differentiated, (write, lse), there, back, again=again)


def place(tape: Tape) -> str:
    """The rank's place in the ring."""
    name = f"{AXIS}.index"
    if name not in tape.types:
        tape.give(name, TensorType((), "i32"))
    return name


class _Around:
    """Keys and values on their way around: `at(i)` are those of the rank i places before."""

    def __init__(self, tape: Tape, prefix: str, *values: str) -> None:
        self.tape, self.prefix, self.values = tape, prefix, values
        self.count = tape.degrees.get(AXIS, 1)

    def at(self, step: int) -> list[str]:
        if step == 0:
            return list(self.values)
        return [f"{self.prefix}.{'kv'[i]}{step}" for i in range(len(self.values))]

    def prefetch(self, step: int) -> None:
        """Send what is here at `step` to the next rank, if there are further steps."""
        if step < self.count - 1:
            for read, write in zip(self.at(step), self.at(step + 1), strict=True):
                self.tape.permute(read, write, AXIS, ring(self.count), LABEL)


def _backward(
    tape: Tape, saved: Sequence[str], given: str, targets: Sequence[str], causal: bool
) -> Tape:
    """dq, dk, dv of the cotangent `given`, under the names `targets`."""
    q, k, v, out, lse = saved
    prefix = f"{out}.back"
    back = tape.part(*saved, given, place(tape))
    around = _Around(back, prefix, k, v)
    around.prefetch(0)
    wide = f"{prefix}.dq0"
    held = [f"{prefix}.dk0", f"{prefix}.dv0"]
    back.run(own_gradient(causal), [*saved, given], [wide, *held])
    for step in range(1, around.count):
        around.prefetch(step)
        reads = [q, *around.at(step), out, lse, given, wide, place(tape)]
        wide, parts = f"{prefix}.dq{step}", [f"{prefix}.{x}part{step}" for x in "kv"]
        back.run(gradient(causal, step), reads, [wide, *parts])
        moved = _sent(back, held, step)
        held = [f"{prefix}.dk{step}", f"{prefix}.dv{step}"]
        for one, other, total in zip(moved, parts, held, strict=True):
            back.run(added, [one, other], [total])
    home = _sent(back, held, around.count) if around.count > 1 else held
    back.run(finish_gradient, [wide, *home, q], targets)
    return back


def _sent(tape: Tape, values: Sequence[str], step: int) -> list[str]:
    """Gradients of keys and values go on with them."""
    names = [f"{value}.to{step}" for value in values]
    pairs = ring(tape.degrees[AXIS])
    for read, write in zip(values, names, strict=True):
        tape.permute(read, write, AXIS, pairs, LABEL)
    return names


@cache
def own(causal: bool) -> Callable[..., Any]:
    """Queries and keys of one rank: f32 [b, s, n, h] and log-sum-exp f32 [b, n, s].

    The rank's chunks are in the order of the sequence, so that the mask is the usual one.
    """

    def own(q: Array, k: Array, v: Array) -> Any:
        out, lse = attention(q, k, v, causal=causal)
        return out.astype(jnp.float32), lse

    return own


@cache
def join(causal: bool, step: int) -> Callable[..., Any]:
    """The keys of the rank `step` places before, joined with `out` and `lse` of earlier steps."""

    def join(q: Array, k: Array, v: Array, out: Array, lse: Array, rank: Array) -> Any:
        if not causal:
            return merged(out, lse, *attention(q, k, v, causal=False))
        before = rank >= step
        early, late = zip(halves(out, 1), halves(lse, 2), strict=True)
        late = merged(*late, *attention(*late_pair(q, k, v), causal=False))
        found = attention(*other_pair(before, q, k, v), causal=False)
        both = merged(*chosen(before, early, late), *found)
        early, late = chosen(before, both, early), chosen(before, late, both)
        return jnp.concatenate([early[0], late[0]], 1), jnp.concatenate([early[1], late[1]], 2)

    return join


def finish(out: Array, lse: Array, q: Array) -> tuple[Array, Array]:
    """The result in the type of q."""
    return out.astype(q.dtype), lse


@cache
def own_gradient(causal: bool) -> Callable[..., Any]:
    """dq in f32, dk and dv of the rank's own keys."""

    def own_gradient(q: Array, k: Array, v: Array, out: Array, lse: Array, dout: Array) -> Any:
        zero = jnp.zeros_like(lse)
        dq, dk, dv = attention_gradient(q, k, v, out, lse, dout, zero, causal=causal)
        return dq.astype(jnp.float32), dk, dv

    return own_gradient


@cache
def gradient(causal: bool, step: int) -> Callable[..., Any]:
    """dq so far f32 [b, s, n, h], and what a step adds to dk and dv of the keys that are here."""

    def gradient(
        q: Array, k: Array, v: Array, out: Array, lse: Array, dout: Array, dq: Array, rank: Array
    ) -> Any:
        if not causal:
            parts = attention_gradient(q, k, v, out, lse, dout, jnp.zeros_like(lse), causal=False)
            return dq + parts[0].astype(jnp.float32), parts[1], parts[2]
        before = rank >= step
        rows = (out, lse, dout)
        q2, k1, v1 = pair_gradient(late_pair(q, k, v), [half(x)[1] for x in rows])
        picked = [jnp.where(before, *half(x)) for x in rows]
        dq2, dk2, dv2 = pair_gradient(other_pair(before, q, k, v), picked)
        here, there = jnp.where(before, dq2, 0), jnp.where(before, 0, dq2)
        return (
            dq + jnp.concatenate([here, q2 + there], 1).astype(jnp.float32),
            jnp.concatenate([k1 + jnp.where(before, dk2, 0), jnp.where(before, 0, dk2)], 1),
            jnp.concatenate([v1 + jnp.where(before, dv2, 0), jnp.where(before, 0, dv2)], 1),
        )

    return gradient


def pair_gradient(pair: Three, rows: Sequence[Array]) -> Three:
    """Gradients of one pair of chunks, from the rows' results, log-sum-exp and cotangents."""
    out, lse, dout = rows
    return attention_gradient(*pair, out, lse, dout, jnp.zeros_like(lse), causal=False)


def finish_gradient(dq: Array, dk: Array, dv: Array, q: Array) -> Three:
    """dq in the type of q."""
    return dq.astype(q.dtype), dk, dv


def added(one: Array, other: Array) -> Array:
    """The sum in f32, rounded to their type."""
    return (one.astype(jnp.float32) + other.astype(jnp.float32)).astype(one.dtype)


def merged(out: Array, lse: Array, more: Array, other: Array) -> Two:
    """Attention over two sets of keys from that over each: outs [b, s, n, h], lse f32 [b, n, s]."""
    total = jnp.logaddexp(lse, other)

    def weight(part: Array) -> Array:
        return jnp.exp(part - total).transpose(0, 2, 1)[..., None]

    return out * weight(lse) + more.astype(jnp.float32) * weight(other), total


def late_pair(q: Array, k: Array, v: Array) -> Three:
    """The late queries see the early keys of every other rank."""
    return halves(q, 1)[1], halves(k, 1)[0], halves(v, 1)[0]


def other_pair(before: Array, q: Array, k: Array, v: Array) -> Three:
    """Of a rank before, its early keys with the early queries; of one behind, the late ones."""
    q, k, v = (jnp.where(before, *halves(x, 1)) for x in (q, k, v))
    return q, k, v


def chosen(before: Array, one: Two, other: Two) -> Two:
    return jnp.where(before, one[0], other[0]), jnp.where(before, one[1], other[1])


def half(x: Array) -> list[Array]:
    """Early and late rows of [b, s, n, h] or of a log-sum-exp [b, n, s]."""
    return halves(x, 1 if x.ndim == 4 else 2)


def halves(x: Array, axis: int) -> list[Array]:
    return jnp.split(x, 2, axis)
