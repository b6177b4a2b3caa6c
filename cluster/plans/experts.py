"""Mixture of experts: top-k routing, dispatch to experts on other ranks, and the way back.

Every rank routes its own tokens (its part of the batch over dp and ep, of the sequence over cp and
tp). An expert has room for `capacity` of them in a buffer of fixed shape, as the vendor's capacity
factor has (neuronx-distributed, modules/moe); what does not fit is left out of the expert's sum.
Buffers go to the experts by an all-to-all over ep, and the parts of the tp ranks are joined there,
because each rank of tp has a slice of every expert's width. Rows are moved by gathers in both
directions of both passes: an assignment is kept as its own inverse, tokens of slots and slots of
tokens.

Shapes: T tokens of the rank, E experts, k experts of a token, C slots of an expert, d hidden, e
experts of the rank, f width of an expert on the rank.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..models.config import ModelConfig
from .pieces import activated
from .plan import Plan
from .tape import Tape

Array = jax.Array
LABEL = "experts"
EXPERT = "expert_"  # names of segments that work on the slots of experts begin with it
BLOCK = 128  # tokens counted at once: their number is exact in bf16


def local_tokens(plan: Plan) -> int:
    """Tokens of a microbatch that a rank routes."""
    return plan.microbatch * plan.local_seq // plan.tp


def slots_of_expert(plan: Plan) -> int:
    """C: room of an expert for tokens of one rank: `plan.capacity` times the even share."""
    tokens = local_tokens(plan)
    share = Fraction(tokens * plan.model.top_k, plan.model.experts) * Fraction(plan.capacity)
    return min(tokens, -(-share.numerator // share.denominator))


def record_experts(tape: Tape, plan: Plan, x: str, weights: dict[str, str], write: str) -> str:
    """Record the routed experts of a layer on `x` [b, s, d], sharded over the sequence in tp.

    weights: values by name: router [d, E] and, for a sigmoid router, router_bias [E];
    expert_in [e, d, f] (swiglu: [e, d, 2, f]) and expert_out [e, f, d]. Gives the name of the sum
    over each token's experts, as `x`; other values that it writes are called `write` with a suffix.
    """
    model = plan.model
    room = slots_of_expert(plan)
    router = [weights["router"], *([weights["router_bias"]] if "router_bias" in weights else [])]
    chosen, slots, tokens = f"{write}.weights", f"{write}.slots", f"{write}.tokens"
    tape.run(route(model, room), [x, *router], [chosen, slots, tokens])
    sent = tape.run(dispatch(model.experts), [x, slots, tokens], [f"{write}.sent"])
    got = tape.all_to_all(sent, f"{write}.got", "ep", 0, 1, LABEL)
    whole = tape.all_gather(got, f"{write}.gathered", "tp", 1, LABEL)
    made = tape.run(expert_expand, [whole, weights["expert_in"]], [f"{write}.made"])
    function = expert_contract(model.activation)
    part = tape.run(function, [made, weights["expert_out"]], [f"{write}.partial"])
    done = tape.reduce_scatter(part, f"{write}.done", "tp", 1, LABEL)
    back = tape.all_to_all(done, f"{write}.back", "ep", 1, 0, LABEL)
    return tape.run(combine, [back, chosen, slots, tokens, x], [write])


@cache
def route(model: ModelConfig, room: int) -> Callable[..., Any]:
    """Which experts take which tokens: x [b, s, d], router [d, E], correction [E].

    Gives the weights f32 [T, k] of each token's experts, their slots i32 [T, k] in the buffer
    [E · C] (E · C where an expert has no room: the first tokens get it), and the tokens i32 [E · C]
    of the slots (T for an empty one). Scores are computed in f32.
    """

    def route(x: Array, router: Array, *correction: Array) -> Any:
        logits = jnp.dot(flat_tokens(x), router, preferred_element_type=jnp.float32)
        scores = scored(model, logits)
        ranked = scores + correction[0].astype(jnp.float32) if correction else scores
        ranked = jax.lax.stop_gradient(within_groups(model, ranked))
        _, experts = jax.lax.top_k(ranked, model.top_k)
        chosen = [jax.nn.one_hot(experts[:, i], model.experts) for i in range(model.top_k)]
        weights = of_experts(chosen, scores)
        if model.normalized_top_k:
            weights = weights / jnp.sum(weights, -1, keepdims=True)
        return weights * model.router_scale, *places(experts, chosen, room)

    return route


def scored(model: ModelConfig, logits: Array) -> Array:
    """Scores of experts, from their logits."""
    return jax.nn.sigmoid(logits) if model.router == "sigmoid" else jax.nn.softmax(logits, -1)


def within_groups(model: ModelConfig, scores: Array) -> Array:
    """Scores [T, E] with minus infinity outside of each token's best groups of experts.

    A group counts as its best expert (DeepSeek-V2) or, for a sigmoid router, as its best two
    together (DeepSeek-V3, arXiv:2412.19437, section 2.1.2).
    """
    groups = model.expert_groups
    if groups == 1 or model.top_groups == groups:
        return scores
    inside = scores.reshape(-1, groups, model.experts // groups)
    best, _ = jax.lax.top_k(inside, 2 if model.router == "sigmoid" else 1)
    _, chosen = jax.lax.top_k(jnp.sum(best, -1), model.top_groups)
    kept = jnp.sum(jax.nn.one_hot(chosen, groups), 1) > 0
    return jnp.where(kept[..., None], inside, -jnp.inf).reshape(scores.shape)


def of_experts(chosen: Sequence[Array], table: Array) -> Array:
    """f32 [T, k]: what a table [T, E] has for the experts, one-hot f32 [T, E] for each of k."""
    return jnp.stack([jnp.sum(one * table, -1) for one in chosen], -1)


def places(experts: Array, chosen: Sequence[Array], room: int) -> tuple[Array, Array]:
    """Slots i32 [T, k] and tokens i32 [E · C] of experts i32 [T, k], as one-hot in `chosen`."""
    count, k = experts.shape
    total = chosen[0].shape[-1] * room
    before = earlier(jnp.asarray(sum(chosen)))
    place = of_experts(chosen, before).astype(jnp.int32)
    slots = jnp.where(place < room, experts * room + place, total)
    token = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32)[:, None], (count, k))
    empty = jnp.full((total,), count, jnp.int32)
    return slots, empty.at[slots.reshape(-1)].set(token.reshape(-1), mode="drop")


def earlier(taken: Array) -> Array:
    """f32 [T, E]: the sum of 0 and 1 in `taken` [T, E] over all earlier tokens.

    By products with triangles of ones, which the Tensor engine does at once and exactly, as
    neuronx-distributed does (utils/tensor_utils.py).
    """
    count, total = taken.shape
    block = BLOCK if count % BLOCK == 0 else count
    inside = taken.astype(jnp.bfloat16).reshape(-1, block, total)
    sums = jnp.sum(inside, 1, dtype=jnp.float32).astype(jnp.bfloat16)
    exact = {"preferred_element_type": jnp.float32}
    within = jnp.einsum("ij,bje->bie", triangle(block), inside, **exact)
    whole = jnp.einsum("ab,be->ae", triangle(sums.shape[0]), sums, **exact)
    return (within + whole[:, None]).reshape(count, total)


def triangle(count: int) -> Array:
    """bf16 [count, count]: 1 where the column is before the row."""
    return jnp.tri(count, k=-1, dtype=jnp.bfloat16)


def flat_tokens(x: Array) -> Array:
    """[..., d] to [T, d]."""
    return x.reshape(-1, x.shape[-1])


def rows(table: Array, index: Array) -> Array:
    """Rows of a table [n, ...]; any row where the index is n, for which there is no use."""
    return jnp.take(table, index, axis=0, mode="clip")


@cache
def dispatch(experts: int) -> Callable[..., Array]:
    """Tokens to their slots: x [b, s, d], slots i32 [T, k], tokens i32 [E · C] -> [E, C, d]."""

    @jax.custom_vjp
    def moved(flat: Array, slots: Array, tokens: Array) -> Array:
        return rows(flat, tokens)

    def forward(flat: Array, slots: Array, tokens: Array) -> Any:
        return moved(flat, slots, tokens), (slots, tokens)

    def backward(saved: Any, given: Array) -> Any:
        slots, tokens = saved
        there = (slots < given.shape[0]).astype(jnp.float32)
        return of_slots(given, there, slots), none(slots), none(tokens)

    moved.defvjp(forward, backward)

    def dispatch(x: Array, slots: Array, tokens: Array) -> Array:
        return moved(flat_tokens(x), slots, tokens).reshape(experts, -1, x.shape[-1])

    return dispatch


def of_slots(table: Array, weights: Array, slots: Array) -> Array:
    """Σ over k of weights f32 [T, k] · table [E · C, d] at slots [T, k]; sums in f32."""
    parts = (weights[:, i : i + 1] * rows(table, slots[:, i]) for i in range(slots.shape[1]))
    return jnp.asarray(sum(parts)).astype(table.dtype)


def expert_expand(x: Array, weight: Array) -> Array:
    """Tokens of experts [e, n, d] to their width: weight [e, d, f] or with a gate [e, d, 2, f]."""
    gated = weight.ndim == 4
    return jnp.einsum("end,edcf->encf" if gated else "end,edf->enf", x, weight)


@cache
def expert_contract(activation: str) -> Callable[..., Array]:
    """The activation and the way back: [e, n, f] (swiglu: [e, n, 2, f]), weight [e, f, d]."""

    def expert_contract(made: Array, weight: Array) -> Array:
        return jnp.einsum("enf,efd->end", activated(made, activation), weight)

    return expert_contract


def combine(back: Array, weights: Array, slots: Array, tokens: Array, x: Array) -> Array:
    """The weighted sum of each token's experts: [E, C, d], f32 [T, k], i32 [T, k] -> as x."""
    flat = flat_tokens(back)
    there = jnp.where(slots < flat.shape[0], weights, 0)
    return weighted(flat, there, slots, tokens).reshape(x.shape)


@jax.custom_vjp
def weighted(flat: Array, weights: Array, slots: Array, tokens: Array) -> Array:
    """`of_slots`; `tokens` of the slots are for its gradient."""
    return of_slots(flat, weights, slots)


def _weighted(flat: Array, weights: Array, slots: Array, tokens: Array) -> Any:
    return weighted(flat, weights, slots, tokens), (flat, weights, slots, tokens)


def _weighted_back(saved: Any, given: Array) -> Any:
    flat, weights, slots, tokens = saved
    wide = given.astype(jnp.float32)
    of_weights = [jnp.sum(wide * rows(flat, slots[:, i]), -1) for i in range(slots.shape[1])]
    mine = rows(slots, tokens) == jnp.arange(flat.shape[0], dtype=jnp.int32)[:, None]
    mine &= (tokens < given.shape[0])[:, None]
    weight = jnp.sum(jnp.where(mine, rows(weights, tokens), 0), -1, keepdims=True)
    of_rows = (weight * rows(given, tokens)).astype(flat.dtype)
    return of_rows, jnp.stack(of_weights, -1), none(slots), none(tokens)


weighted.defvjp(_weighted, _weighted_back)


def with_shared(routed: Array, shared: Array, *gate: Array) -> Array:
    """The sum with the shared experts, which a sigmoid of x [b, s, d] · gate [d] may scale."""
    if gate:
        scale = jnp.sum(gate[0].astype(jnp.float32) * gate[1].astype(jnp.float32), -1)
        shared = (shared * jax.nn.sigmoid(scale)[..., None]).astype(shared.dtype)
    return routed + shared


def none(index: Array) -> np.ndarray:
    """The cotangent of an integer array."""
    return np.zeros(index.shape, jax.dtypes.float0)
