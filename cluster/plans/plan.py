"""A training plan: a model, a machine with its mesh, and how a step is run; checked up front."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from trnsim.device.errors import BadInput, Unsupported
from trnsim.device.ops.attention import HEAD_MAX

from ..instances import Instance, check_nodes, load_instance
from ..lnc import check_lnc, check_streams, logical_per_chip
from ..machine import Machine
from ..mesh import Mesh, data_parallel_degree, microbatches, parse_mesh
from ..models.config import ModelConfig, load_model
from ..placement import check_tensor_parallel, place
from ..placing.rank_file import Cores, read_rank_file
from .schedules import Schedule, parse_schedule

AXES = ("pp", "dp", "ep", "cp", "tp")  # from the slowest in ranks to the fastest
Dtype = Literal["bf16", "f32"]
Zero = Literal["none", "1", "fsdp"]
Recompute = Literal["none", "selective", "full"]
MESH_MOST_COUNTS = (4, 8, 16)  # of an all-to-all inside a node, beside multiples of 32


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a model is trained on a machine. Raises BadInput or Unsupported for what cannot be.

    The machine's mesh has axes of `AXES`: pp (pipeline stages), dp (data), ep (experts; data
    parallel for everything else), cp (parts of the sequence), tp (heads, widths, vocabulary, and
    the sequence outside of them). `global_batch` and `microbatch` count sequences of `seq` tokens;
    a microbatch is of one rank. `zero` "1" shards the optimizer's states, "fsdp" also parameters
    and gradients, over the ranks with equal parameters. `bucket_bytes` is of one gradient or
    parameter collective; the `early` and `late` shifts are in layers, as the vendor's
    NEURON_FSDP_NUM_LAYER_EARLY_AG_SHIFT and _LATE_RS_SHIFT. An expert takes at most `capacity`
    times its even share of a rank's tokens.
    """

    model: ModelConfig
    machine: Machine
    global_batch: int
    seq: int
    microbatch: int = 1
    dtype: Dtype = "bf16"
    zero: Zero = "none"
    recompute: Recompute = "none"
    schedule: Schedule = Schedule()
    streams: int = 2
    bucket_bytes: int = 512 * 2**20  # neuronx-distributed, parallel_layers/grads.py
    early_all_gather: int = 1
    late_reduce_scatter: int = 1
    dropout: float = 0.0
    capacity: float = 2.0
    seed: int = 0
    algorithm: str = "policy"

    @classmethod
    def of(
        cls,
        model: str | Path | ModelConfig,
        *,
        instance: str,
        nodes: int = 1,
        lnc: int | None = None,
        mesh: str | Mesh = "tp=1",
        order: str | Sequence[str] | None = None,
        overlay: str | Path | None = None,
        rank_file: str | Path | None = None,
        **fields: Any,
    ) -> "Plan":
        """A plan by names. A mesh without dp has as much data parallelism as fills the machine.

        Degrees may be in any order: ranks are numbered by `order` ("tp,dp": dp fastest) or, without
        it, by `AXES` with tp fastest. `rank_file`: the core of each rank, as `trnsim place` writes.
        `schedule` may be text.
        """
        kind = load_instance(instance, overlay)
        check_nodes(kind, nodes)
        given = ordered(parse_mesh(mesh) if isinstance(mesh, str) else mesh)
        lnc = check_lnc(kind.chip, lnc)
        cores = nodes * kind.logical_cores(lnc)
        check_tensor_parallel(kind, given, cores)
        check_degree_is_listed(kind, dict(given.axes).get("tp", 1))
        whole = ordered(with_data_parallel(given, cores), order)
        slots = None
        if rank_file is not None:
            where = Cores(nodes, kind.chips, logical_per_chip(kind.chip, lnc))
            slots = read_rank_file(rank_file, where, whole.size).tolist()
        machine = Machine(place(kind, whole, nodes=nodes, lnc=lnc, slots=slots))
        config = model if isinstance(model, ModelConfig) else load_model(model)
        schedule = parse_schedule(fields.pop("schedule", Schedule()))
        return cls(model=config, machine=machine, schedule=schedule, **fields)

    def __post_init__(self) -> None:
        self._check_model()
        self._check_choices()
        self._check_axes()
        self._check_widths()
        self._check_sequence()
        self.schedule.check(self.pp, self.microbatches)

    @property
    def mesh(self) -> Mesh:
        """Axes of the machine's ranks."""
        return self.machine.placement.mesh

    def degree(self, axis: str) -> int:
        """Degree of an axis; 1 if the mesh does not have it."""
        return dict(self.mesh.axes).get(axis, 1)

    @property
    def pp(self) -> int:
        return self.degree("pp")

    @property
    def dp(self) -> int:
        return self.degree("dp")

    @property
    def ep(self) -> int:
        return self.degree("ep")

    @property
    def cp(self) -> int:
        return self.degree("cp")

    @property
    def tp(self) -> int:
        return self.degree("tp")

    @property
    def microbatches(self) -> int:
        """Of a rank in one step."""
        return microbatches(self.global_batch, self.dp * self.ep, self.microbatch)

    @property
    def gradient_axes(self) -> tuple[str, ...]:
        """Axes over which gradients of everything but experts are summed: those with replicas."""
        return self._larger("dp", "ep", "cp")

    @property
    def expert_gradient_axes(self) -> tuple[str, ...]:
        """Axes over which gradients of routed experts are summed."""
        return self._larger("dp", "cp")

    def _larger(self, *axes: str) -> tuple[str, ...]:
        """Those of `axes` with a degree above 1, in the mesh's order."""
        return tuple(name for name, degree in self.mesh.axes if name in axes and degree > 1)

    @cached_property
    def stage_layers(self) -> tuple[tuple[range, ...], ...]:
        """Of each stage, the layers of each of its chunks, as numbers in the model.

        Where they do not divide, chunks in the middle have one more than those of the embedding
        and of the loss, as Llama 3 405B was split (arXiv:2407.21783, section 3.3.2).
        """
        parts = split_layers(self.model.layers, self.pp * self.schedule.chunks)
        return tuple(parts[stage :: self.pp] for stage in range(self.pp))

    @property
    def local_seq(self) -> int:
        """Positions of a sequence on one rank of cp."""
        return self.seq // self.cp

    @property
    def local_heads(self) -> int:
        """Query heads of a rank."""
        return self.model.heads // self.tp

    @property
    def local_kv_heads(self) -> int:
        """Key and value heads of a rank: at least one, which `kv_copies` ranks then share."""
        return max(1, self.model.kv_heads // self.tp)

    @property
    def kv_copies(self) -> int:
        """Neighbouring ranks of tp that hold the same key and value heads."""
        return max(1, self.tp // self.model.kv_heads)

    @property
    def rotated(self) -> int:
        """Elements of a head that rotary embedding turns: an even number, 0 without it.

        Latent attention, which turns a part of its own, has 0.
        """
        model = self.model
        if model.positions != "rope" or model.kv_rank:
            return 0
        return int(model.head_dim * model.rope_fraction) // 2 * 2

    @property
    def local_experts(self) -> int:
        """Routed experts of a rank."""
        return self.model.experts // self.ep

    @property
    def vocab(self) -> int:
        """Rows of the embedding: the model's vocabulary, filled up to a multiple of tp."""
        return -(-self.model.vocab // self.tp) * self.tp

    @property
    def tokens(self) -> int:
        """Of one step of the whole job."""
        return self.global_batch * self.seq

    @property
    def flops(self) -> int:
        """Model FLOPs of one step of the whole job, as MFU counts them."""
        return self.tokens * self.model.flops_per_token(self.seq)

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """What was assumed or is doubtful about the plan, in full sentences."""
        return tuple(self._notes())

    def _notes(self) -> Iterable[str]:
        model = self.model
        if self.vocab > model.vocab:
            yield f"Vocabulary of {model.vocab} filled up to {self.vocab}, a multiple of tp."
        if model.positions != "learned" and self.seq > model.max_positions:
            yield f"Sequences of {self.seq} exceed the model's {model.max_positions} positions."
        if model.rope_scaling:
            yield (
                f"Positions are rotated without the model's scaling ({model.rope_scaling}), which"
                " changes values, not times."
            )
        if self.kv_copies > 1:
            yield f"Each of {model.kv_heads} key and value heads is on {self.kv_copies} ranks."
        if self.ep > 1 and self.ep not in MESH_MOST_COUNTS and self.ep % 32:
            yield (
                f"All-to-all over {self.ep} ranks: runtime 2.32 was seen to take 4, 8, 16 or"
                " multiples of 32 (jimburtoft/cookbook, docs/phase_e_report.md)."
            )
        if model.experts:
            yield (
                f"Experts have room for {self.capacity:g} times their even share of a rank's"
                " tokens, and later tokens are left out; no loss balances their load."
            )
        if self.tp == 16 and self.machine.lnc == 1 and len(self.machine.chip.lnc_allowed) > 1:
            yield (
                "tp=16 at LNC=1 is a group layout that neuronx-distributed does not have"
                " (parallel_state.py at fbac349)."
            )

    def _check_model(self) -> None:
        model = self.model
        if model.kv_rank and self.cp > 1:
            raise BadInput("cp", self.cp, f"1 with the latent attention of {model.name}", 1)
        if not model.kv_rank and model.head_dim > HEAD_MAX:
            raise Unsupported(f"{model.name}: heads of {model.head_dim}; at most {HEAD_MAX}")

    def _check_choices(self) -> None:
        choices = {"dtype": Dtype, "zero": Zero, "recompute": Recompute}
        for name, allowed in choices.items():
            if getattr(self, name) not in get_args(allowed):
                raise BadInput(name, getattr(self, name), get_args(allowed))
        for name in ("global_batch", "seq", "microbatch", "bucket_bytes"):
            _at_least(name, getattr(self, name), 1)
        for name in ("early_all_gather", "late_reduce_scatter"):
            _at_least(name, getattr(self, name), 0)
        if not 0 <= self.dropout < 1:
            raise BadInput("dropout", self.dropout, "0 to less than 1", 0)
        if not 0 < self.capacity < math.inf:
            raise BadInput("capacity", self.capacity, "more than 0", 1.0)
        check_streams(self.machine.chip, self.machine.lnc, self.streams)

    def _check_axes(self) -> None:
        for name in self.mesh.names:
            if name not in AXES:
                raise BadInput("mesh axis", name, AXES)
        check_degree_is_listed(self.machine.instance, self.tp)
        parts = self.pp * self.schedule.chunks
        if parts > self.model.layers:
            allowed = f"at most {self.model.layers} layers over chunks of {self.schedule}"
            raise BadInput(
                "pp", self.pp, allowed, self.model.layers // self.schedule.chunks or None
            )
        if self.ep > 1 and not self.model.experts:
            raise BadInput("ep", self.ep, f"1: {self.model.name} has no experts", 1)
        if self.model.experts:
            _divides("ep", self.ep, "experts", self.model.experts)

    def _check_widths(self) -> None:
        model, tp = self.model, self.tp
        _divides("tp", tp, "heads", model.heads)
        if model.kv_heads % tp and tp % model.kv_heads:
            allowed = f"a divisor or a multiple of kv_heads = {model.kv_heads}"
            near = [
                n for n in divisors(model.heads) if not model.kv_heads % n or not n % model.kv_heads
            ]
            raise BadInput("tp", tp, allowed, nearest(tp, near))
        if model.expert_layers < model.layers:
            _divides("tp", tp, "ffn", model.ffn)
        if model.experts:
            _divides("tp", tp, "expert_ffn", model.expert_ffn)
            _divides("tp", tp, "shared_ffn", model.shared_ffn)

    def _check_sequence(self) -> None:
        model = self.model
        if model.positions == "learned" and self.seq > model.max_positions:
            allowed = f"at most {model.max_positions}, the learned positions of {model.name}"
            raise BadInput("seq", self.seq, allowed, model.max_positions)
        if 0 < model.window < self.seq:
            raise Unsupported(
                f"{model.name}: a sliding window of {model.window} under seq {self.seq} is not"
                f" modelled; nearest valid: seq {model.window}"
            )
        halves = (
            2 if self.cp > 1 and model.causal else 1
        )  # zigzag gives a rank an early, a late one
        unit = halves * self.cp * self.tp
        if self.seq % unit:
            parts = " x ".join(["2"] * (halves - 1) + ["cp x tp"]) + f" = {unit}"
            near = nearest(self.seq, range(unit, self.seq + unit + 1, unit))
            raise BadInput("seq", self.seq, f"a multiple of {parts}", near)


def with_data_parallel(mesh: Mesh, world: int) -> Mesh:
    """The mesh with dp = `world` / its size, unless it has dp.

    Raises BadInput if the degrees do not divide `world`.
    """
    if "dp" in mesh.names:
        return mesh
    return Mesh((*mesh.axes, ("dp", data_parallel_degree(world, mesh.size))))


def ordered(mesh: Mesh, order: str | Sequence[str] | None = None) -> Mesh:
    """The mesh with its axes in `order`, from the slowest to the fastest in ranks; else as `AXES`.

    Raises BadInput for an axis that is not of `AXES`, or an order that is not of the mesh's axes.
    """
    for name in mesh.names:
        if name not in AXES:
            raise BadInput("mesh axis", name, AXES)
    usual = [name for name in AXES if name in mesh.names]
    names = usual if order is None else [n.strip() for n in _listed(order)]
    if sorted(names) != sorted(usual):
        allowed = f"each axis of mesh {mesh} once"
        raise BadInput("order", ",".join(names), allowed, ",".join(usual))
    return Mesh(tuple((name, mesh.degree(name)) for name in names))


def _listed(order: str | Sequence[str]) -> Sequence[str]:
    return order.split(",") if isinstance(order, str) else order


def split_layers(layers: int, parts: int) -> tuple[range, ...]:
    """Consecutive layers of each part; the middle parts are larger by one if need be."""
    base, more = divmod(layers, parts)
    first = (parts - more) // 2
    sizes = [base + (first <= part < first + more) for part in range(parts)]
    starts = [sum(sizes[:part]) for part in range(parts)]
    return tuple(range(start, start + size) for start, size in zip(starts, sizes, strict=True))


def check_degree_is_listed(instance: Instance, tp: int) -> None:
    """Raises BadInput for a tensor-parallel degree that the vendor does not list for `instance`."""
    allowed = instance.tensor_parallel
    if allowed and tp not in allowed:
        listed = f"{', '.join(map(str, allowed))} on {instance.name}"
        raise BadInput("tp", tp, listed, nearest(tp, allowed))


def divisors(number: int) -> list[int]:
    """In rising order."""
    return [n for n in range(1, number + 1) if number % n == 0]


def nearest(value: int, allowed: Iterable[int]) -> str:
    """`"16 or 32"`: the allowed values below and above."""
    options = sorted(allowed)
    below, above = [n for n in options if n < value], [n for n in options if n > value]
    return " or ".join(map(str, below[-1:] + above[:1]))


def _divides(name: str, degree: int, what: str, width: int) -> None:
    if width % degree:
        raise BadInput(
            name, degree, f"a divisor of {what} = {width}", nearest(degree, divisors(width))
        )


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise BadInput(name, value, f"{least} or more", least)
