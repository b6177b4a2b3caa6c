"""Which pieces and collectives an embedding, a transformer layer and a loss are made of.

Tensor parallelism with sequence parallelism (Korthikanti et al., arXiv:2205.05198, figure 5):
outside of attention and feed-forward a rank holds its part of the sequence; before them the parts
are gathered, after them partial sums are reduced and scattered. The vocabulary of the embedding and
of the loss is split over the same ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from trnsim.device.ops.ir import TensorType

from . import pieces
from .experts import record_experts, with_shared
from .latent_attention import latent_attention
from .plan import Plan
from .program import Split
from .ring_attention import record_ring
from .tape import Gradient, Tape

TENSOR = "tensor parallel"
LOSS = "loss"
TABLE = "embedding.table"
BOUNDARY = "x"
"""Hidden states between layers: x of layer l is its input; of the layer after a stage's last one
the stage's output. Its cotangent goes the other way."""
ROTATION = ("rotation.cosine", "rotation.sine")
"""Tables of rotary embedding, made once per step."""
SEQUENCE = 1  # dimension of the sequence in [b, s, d]

Start = Literal["normal", "ones", "zeros"]


@dataclass(frozen=True)
class Parameter:
    """A rank's parameter and where its gradient's contributions come from.

    axes: its gradients are summed over these, as other batches or positions. partial: also over
    tp, where it is replicated and meets a part of the sequence. copies: ranks of tp that share it.
    """

    name: str
    type: TensorType
    split: Split
    axes: tuple[str, ...]
    partial: bool = False
    layered: bool = False

    @property
    def gradient(self) -> str:
        """The name of its gradient."""
        return f"{self.name}.gradient"


@dataclass(frozen=True)
class Unit:
    """A part of the model with parameters of its own: the embedding, a kind of layer, the loss."""

    name: str
    tape: Tape
    parameters: tuple[Parameter, ...]
    result: str
    layered: bool = False


@dataclass
class Recorder:
    """Records one unit of a plan: values by name, parameters with their split."""

    plan: Plan
    name: str
    layered: bool = False
    parameters: list[Parameter] = field(default_factory=list)
    tape: Tape = field(init=False)

    def __post_init__(self) -> None:
        plan = self.plan
        self.tape = Tape(dict(plan.mesh.axes))
        batch, seq = plan.microbatch, plan.local_seq
        integers = {
            "tokens": (batch, seq),
            "labels": (batch, seq),
            "positions": (seq,),
            "shard_positions": (seq // plan.tp,),
            "samples": (batch,),
            "tp.index": (),
            "cp.index": (),
            "layer": (),
        }
        for name, shape in integers.items():
            self.tape.give(name, TensorType(shape, "i32"))
        for name in ROTATION:
            self.tape.give(name, TensorType((seq, plan.model.head_dim), "f32"))

    def unit(self, result: str) -> Unit:
        """What was recorded, with the value that it ends with."""
        return Unit(self.name, self.tape, tuple(self.parameters), result, self.layered)

    @property
    def shard(self) -> TensorType:
        """Hidden states of a rank's part of the sequence: [b, s/tp, d]."""
        plan = self.plan
        return self.kind(plan.microbatch, plan.local_seq // plan.tp, plan.model.hidden)

    def kind(self, *shape: int) -> TensorType:
        """An array of the plan's dtype."""
        return TensorType(shape, self.plan.dtype)

    def parameter(
        self,
        name: str,
        *shape: int,
        cut: int | None = None,
        partial: bool = False,
        copies: int = 1,
        sections: tuple[int, ...] = (),
        start: Start = "normal",
        axes: tuple[str, ...] | None = None,
        cuts: tuple[tuple[str, int], ...] = (),
    ) -> str:
        """Declare a parameter of the rank's shape; `cut` is the dimension that tp splits."""
        name = f"{self.name}.{name}"
        cuts = (*cuts, *([("tp", cut)] if cut is not None and self.plan.tp > 1 else []))
        made = Parameter(
            name,
            self.kind(*shape),
            Split(cuts, copies, sections, start),
            self.plan.gradient_axes if axes is None else axes,
            partial and self.plan.tp > 1,
            self.layered,
        )
        self.parameters.append(made)
        return self.use(made)

    def use(self, made: Parameter, *, sums: bool | None = None) -> str:
        """A declared parameter on this unit's tape. Its gradient adds up unless FSDP takes it."""
        fsdp = sharded(self.plan, made.axes)
        kind = made.type if fsdp else replace(made.type, dtype="f32")
        adds = not fsdp if sums is None else sums
        return self.tape.parameter(made.name, made.type, Gradient(made.gradient, kind, adds))

    def norm(self, name: str, x: str) -> str:
        """The model's norm of x, whose scale meets a part of the sequence."""
        model = self.plan.model
        function = pieces.norm(model.norm, model.norm_eps)
        return self.tape.run(function, [x, *self.scales(name)], [f"{self.name}.{name}"])

    def scales(self, name: str) -> list[str]:
        """Scale (and shift) of a norm over the hidden width."""
        model = self.plan.model
        made = [self.parameter(f"{name}.scale", model.hidden, partial=True, start="ones")]
        if model.norm == "layer":
            made.append(self.parameter(f"{name}.shift", model.hidden, partial=True, start="zeros"))
        return made

    def gather(self, x: str, write: str) -> str:
        """The whole sequence of x."""
        return self.tape.all_gather(x, f"{self.name}.{write}", "tp", SEQUENCE, TENSOR)

    def scatter(self, x: str, write: str) -> str:
        """The rank's part of the sequence of the sum of partial x."""
        return self.tape.reduce_scatter(x, f"{self.name}.{write}", "tp", SEQUENCE, TENSOR)

    def residual(self, x: str, o: str, write: str, site: int) -> str:
        """x + dropout(o + bias)."""
        plan = self.plan
        reads = [x, o]
        if plan.model.linear_bias:
            reads.append(
                self.parameter(f"{write}.bias", plan.model.hidden, partial=True, start="zeros")
            )
        if plan.dropout:
            reads += ["samples", "shard_positions", "layer"]
        function = pieces.residual(plan.model.linear_bias, plan.dropout, site)
        return self.tape.run(function, reads, [f"{self.name}.{write}"])


def sharded(plan: Plan, axes: Sequence[str]) -> bool:
    """Whether FSDP shards parameters whose gradients are summed over `axes`."""
    return plan.zero == "fsdp" and bool(axes)


def embedding(plan: Plan) -> Unit:
    """Tokens to hidden states: the value `x`, [b, s/tp, d]."""
    r = Recorder(plan, "embedding")
    model = plan.model
    table = r.parameter("table", plan.vocab // plan.tp, model.hidden, cut=0)
    if model.tied and plan.pp == 1:  # the loss has set its part of the gradient
        r.use(r.parameters[0], sums=True)
    partial = r.tape.run(pieces.embed, [table, "tokens", "tp.index"], ["embedding.partial"])
    x = r.scatter(partial, "tokens")
    if model.positions == "learned":
        rows = [r.parameter("positions", model.max_positions, model.hidden, partial=True)]
        if model.type_vocab:
            rows.append(r.parameter("types", model.type_vocab, model.hidden, partial=True))
        rest = ["samples", "layer"] if plan.dropout else []
        runs = 2 if plan.cp > 1 and model.causal else 1
        function = pieces.place(runs, len(rows) > 1, plan.dropout, 0)
        x = r.tape.run(function, [x, "shard_positions", *rows, *rest], ["embedding.placed"])
    if model.post_norm:
        x = r.norm("norm", x)
    return r.unit(x)


def dense_layer(plan: Plan) -> Unit:
    """A layer with a dense feed-forward block."""
    return _layer(Recorder(plan, "layer", layered=True), feed_forward)


def expert_layer(plan: Plan) -> Unit:
    """A layer with a mixture of experts."""
    return _layer(Recorder(plan, "experts", layered=True), mixture)


def _layer(r: Recorder, block: Callable[[Recorder, str], str]) -> Unit:
    """A layer with attention and a feed-forward block: `x` to its last value, both [b, s/tp, d]."""
    x = r.tape.give(BOUNDARY, r.shard, active=True)
    model = r.plan.model
    if model.parallel_residual:
        attended = attention(r, r.norm("attention.norm", x))
        made = block(r, r.norm("mlp.norm", x))
        out = r.residual(r.residual(x, attended, "attended", 1), made, "out", 2)
    elif model.post_norm:
        x = r.norm("attention.norm", r.residual(x, attention(r, x), "attended", 1))
        out = r.norm("mlp.norm", r.residual(x, block(r, x), "out", 2))
    else:
        x = r.residual(x, attention(r, r.norm("attention.norm", x)), "attended", 1)
        out = r.residual(x, block(r, r.norm("mlp.norm", x)), "out", 2)
    return r.unit(out)


def attention(r: Recorder, x: str) -> str:
    """Self-attention of x; the heads are split over tp."""
    plan, model = r.plan, r.plan.model
    if model.kv_rank:
        return latent_attention(r, x)
    reads = [r.gather(x, "attention.in"), *projections(r)]
    if model.qk_norm:
        scales = ("attention.query_scale", "attention.key_scale")
        reads += [
            r.parameter(scale, model.head_dim, partial=True, start="ones") for scale in scales
        ]
    if plan.rotated:
        reads += ROTATION
    function = pieces.queries(
        (plan.local_heads, plan.local_kv_heads),
        2 if plan.kv_copies > 1 else 1,
        model.qkv_bias * (2 if plan.kv_copies > 1 else 1),
        model.norm_eps if model.qk_norm else 0.0,
        plan.rotated,
    )
    name = f"{r.name}.attention"
    qkv = f"{name}.q", f"{name}.k", f"{name}.v"
    r.tape.run(function, reads, qkv)
    context = attend(r, qkv)
    shape = (plan.local_heads, model.head_dim, model.hidden)
    out = r.parameter("attention.wo", *shape, cut=0)
    partial = r.tape.run(pieces.project, [context, out], [f"{r.name}.attention.partial"])
    return r.scatter(partial, "attention.out")


def projections(r: Recorder) -> list[str]:
    """Weights (and biases) of queries, keys and values.

    One array of all three, unless several ranks have the same key and value heads: the gradients of
    those are summed over these ranks, and so they are an array of their own.
    """
    plan, model = r.plan, r.plan.model
    n, m = plan.local_heads, plan.local_kv_heads
    if plan.kv_copies > 1:
        kinds = [("q", n, (n,), 1), ("kv", 2 * m, (m, m), plan.kv_copies)]
    else:
        kinds = [("qkv", n + 2 * m, (n, m, m), 1)]

    def declared(letter: str, *first: int, start: Start) -> list[str]:
        return [
            r.parameter(
                f"attention.{letter}{name}",
                *(*first, extent, model.head_dim),
                cut=len(first),
                copies=copies,
                sections=sections,
                start=start,
            )
            for name, extent, sections, copies in kinds
        ]

    weights = declared("w", model.hidden, start="normal")
    return [*weights, *(declared("b", start="zeros") if model.qkv_bias else [])]


def attend(r: Recorder, qkv: tuple[str, str, str]) -> str:
    """The attention core. Selective recomputation does it again in the backward pass."""
    plan, causal = r.plan, r.plan.model.causal
    again = plan.recompute == "selective"
    context = f"{r.name}.attention.context"
    if plan.cp > 1:
        return record_ring(r.tape, *qkv, context, causal=causal, again=again)
    made = (context, f"{context}.lse")
    there = r.tape.part(*qkv)
    there.run(pieces.attention(causal), qkv, made)

    def back(given: Sequence[str], targets: Sequence[str]) -> Tape:
        reads = [*qkv, *made, given[0]]
        tape = r.tape.part(*reads)
        tape.run(pieces.attention_backward(causal), reads, targets)
        return tape

    return r.tape.compose(qkv, made, there, back, again=again)


def feed_forward(r: Recorder, x: str) -> str:
    """The dense feed-forward block."""
    return gated_block(r, x, "mlp", r.plan.model.ffn)


def gated_block(r: Recorder, x: str, name: str, ffn: int) -> str:
    """A feed-forward block of width `ffn`, which is split over tp."""
    plan, model = r.plan, r.plan.model
    gated, width = model.activation == "swiglu", ffn // plan.tp
    shape = (model.hidden, 2, width) if gated else (model.hidden, width)
    reads = [r.gather(x, f"{name}.in"), r.parameter(f"{name}.up", *shape, cut=len(shape) - 1)]
    if model.linear_bias:
        reads.append(r.parameter(f"{name}.up_bias", *shape[1:], cut=len(shape) - 2, start="zeros"))
    expand = pieces.expand(model.linear_bias, gated)
    made = r.tape.run(expand, reads, [f"{r.name}.{name}.expanded"])
    down = r.parameter(f"{name}.down", width, model.hidden, cut=0)
    contract = pieces.contract(model.activation)
    partial = r.tape.run(contract, [made, down], [f"{r.name}.{name}.partial"])
    return r.scatter(partial, f"{name}.out")


def mixture(r: Recorder, x: str) -> str:
    """Routed experts, spread over ep, and shared ones, which are a dense block for every token."""
    plan, model = r.plan, r.plan.model
    routed = record_experts(r.tape, plan, x, expert_weights(r), f"{r.name}.routed")
    if not model.shared_ffn:
        return routed
    reads = [routed, gated_block(r, x, "shared", model.shared_ffn)]
    if model.shared_gate:
        reads += [x, r.parameter("shared.gate", model.hidden, partial=True)]
    return r.tape.run(with_shared, reads, [f"{r.name}.mixed"])


def expert_weights(r: Recorder) -> dict[str, str]:
    """Parameters of the router and the routed experts, by their names in `record_experts`."""
    plan, model = r.plan, r.plan.model
    own, width = plan.local_experts, model.expert_ffn // plan.tp
    gate = (2,) if model.activation == "swiglu" else ()
    place: Any = {"axes": plan.expert_gradient_axes, "cuts": (("ep", 0),) * (plan.ep > 1)}
    up, down = (own, model.hidden, *gate, width), (own, width, model.hidden)
    found = {
        "router": r.parameter("router", model.hidden, model.experts, partial=True),
        "expert_in": r.parameter("expert_in", *up, cut=len(up) - 1, **place),
        "expert_out": r.parameter("expert_out", *down, cut=1, **place),
    }
    if model.router == "sigmoid":
        found["router_bias"] = r.parameter(
            "router_bias", model.experts, partial=True, start="zeros"
        )
    return found


def head(plan: Plan, table: Parameter) -> Unit:
    """Hidden states `x` to the value `loss`: f32 [], the rank's part of the mean over all tokens.

    `table` is the embedding's, which is also the output matrix of a tied model.
    """
    r = Recorder(plan, "head")
    model = plan.model
    x = r.tape.give(BOUNDARY, r.shard, active=True)
    if model.post_norm:
        x = _transformed(r, x)
    else:
        x = r.norm("norm", x)
    whole = r.gather(x, "in")
    reads = [whole, r.use(table) if model.tied else _output(r)]
    if model.post_norm:
        reads.append(r.parameter("bias", plan.vocab // plan.tp, cut=0, start="zeros"))
    function = pieces.biased_logits if model.post_norm else pieces.logits
    r.tape.run(function, reads, ["head.logits", "head.largest"])
    r.tape.all_reduce("head.largest", "head.maximum", ["tp"], LOSS, "maximum")
    filled = model.vocab if plan.vocab > model.vocab else 0
    r.tape.run(
        pieces.exponentials(filled),
        ["head.logits", "head.maximum", "labels", "tp.index"],
        ["head.partial"],
    )
    r.tape.all_reduce("head.partial", "head.sums", ["tp"], LOSS)
    r.tape.run(pieces.cross_entropy(plan.tokens), ["head.sums"], ["loss"])
    return r.unit("loss")


def _output(r: Recorder) -> str:
    return r.parameter("output", r.plan.vocab // r.plan.tp, r.plan.model.hidden, cut=0)


def _transformed(r: Recorder, x: str) -> str:
    model = r.plan.model
    hidden = model.hidden
    reads = [
        x,
        r.parameter("transform", hidden, hidden, partial=True),
        r.parameter("transform_bias", hidden, partial=True, start="zeros"),
        *r.scales("norm"),
    ]
    function = pieces.transform(model.norm, model.norm_eps, model.activation)
    return r.tape.run(function, reads, ["head.transformed"])
