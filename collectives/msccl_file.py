"""MSCCL XML as plain data: an algorithm is gpus, thread blocks and their steps.

    <algo name= coll= ngpus= nchannels= nchunksperloop= inplace= outofplace= proto= ..>
      <gpu id= i_chunks= o_chunks= s_chunks=>
        <tb id= send= recv= chan=>
          <step s= type= srcbuf= srcoff= dstbuf= dstoff= cnt= depid= deps= hasdep=/>

Step types: s send, r receive, rcs receive-copy-send, rrs receive-reduce-send, rrc
receive-reduce-copy, rrcs receive-reduce-copy-send, cpy local copy, re local reduction (into dst),
nop. Buffers: i input, o output, s scratch; offsets and counts in chunks. A step waits for the step
before it in its thread block, and for step `deps` of thread block `depid` of its gpu. Attributes
`root` (of broadcast, reduce, gather, scatter) and any others are optional.

Format after the public MSCCL runtime (microsoft/msccl) and its tools.
"""

import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field

from trnsim.device.errors import BadFile, BadInput

COLLECTIVES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
}
MOST_SLOTS = 1 << 20  # every slot of every gpu is followed
TYPES = ("s", "r", "rcs", "rrs", "rrc", "rrcs", "cpy", "re", "nop")
SENDS = ("s", "rcs", "rrs", "rrcs")
RECEIVES = ("r", "rcs", "rrs", "rrc", "rrcs")
REDUCES = ("rrs", "rrc", "rrcs", "re")


@dataclass(frozen=True)
class Step:
    """One step; waits: (thread block, step) of the same gpu."""

    type: str
    src: tuple[str, int]
    dst: tuple[str, int]
    count: int
    waits: tuple[int, int] | None = None


@dataclass(frozen=True)
class ThreadBlock:
    """Steps in order, all over one connection out and one in (-1: none) of a channel."""

    id: int
    send: int
    recv: int
    channel: int
    steps: list[Step] = field(default_factory=list)


@dataclass(frozen=True)
class Gpu:
    """scratch: chunks of its scratch buffer."""

    id: int
    scratch: int
    blocks: list[ThreadBlock] = field(default_factory=list)


@dataclass(frozen=True)
class Algorithm:
    """chunks: of the larger one of input and output, all ranks' pieces together."""

    name: str
    collective: str
    ranks: int
    chunks: int
    inplace: bool
    root: int
    gpus: list[Gpu] = field(default_factory=list)


def parse(text: str) -> Algorithm:
    """Read MSCCL XML. Raises BadFile and BadInput with the gpu, thread block and step."""
    try:
        top = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise BadFile(f"MSCCL XML: not well formed: {error}") from None
    if top.tag != "algo":
        raise BadFile(f"MSCCL XML: the top element is <{top.tag}>, must be <algo>")
    coll = _text(top, "coll", "algo")
    if coll not in COLLECTIVES:
        raise BadInput("coll of the MSCCL algorithm", coll, COLLECTIVES)
    made = Algorithm(
        name=top.get("name", "msccl"),
        collective=COLLECTIVES[coll],
        ranks=_number(top, "ngpus", "algo"),
        chunks=_number(top, "nchunksperloop", "algo"),
        inplace=_number(top, "inplace", "algo", 0) == 1,
        root=_number(top, "root", "algo", 0),
        gpus=[_gpu(node) for node in top.findall("gpu")],
    )
    _check(made)
    return made


def _check(made: Algorithm) -> None:
    ids = sorted(gpu.id for gpu in made.gpus)
    if made.ranks < 1 or made.chunks < 1:
        raise BadFile(f"MSCCL XML: ngpus {made.ranks} and nchunksperloop {made.chunks} must be > 0")
    if made.ranks * made.chunks > MOST_SLOTS:
        size = f"ngpus {made.ranks} times nchunksperloop {made.chunks}"
        raise BadFile(f"MSCCL XML: {size} is above {MOST_SLOTS}, the most that is followed")
    if ids != list(range(made.ranks)):
        raise BadFile(f"MSCCL XML: gpu ids {ids} are not 0..{made.ranks - 1}")
    for gpu in made.gpus:
        names = [block.id for block in gpu.blocks]
        if len(set(names)) != len(names):
            raise BadFile(f"MSCCL XML: gpu {gpu.id} has a thread block id twice: {sorted(names)}")
        for block in gpu.blocks:
            _check_block(made, gpu, block)


def _check_block(made: Algorithm, gpu: Gpu, block: ThreadBlock) -> None:
    where = f"MSCCL XML: gpu {gpu.id}, thread block {block.id}"
    for peer, name in ((block.send, "send"), (block.recv, "recv")):
        if not -1 <= peer < made.ranks or peer == gpu.id:
            raise BadFile(f"{where}: {name}={peer} is no other gpu")
    steps = {other.id: len(other.steps) for other in gpu.blocks}
    for number, step in enumerate(block.steps):
        if (step.type in SENDS and block.send < 0) or (step.type in RECEIVES and block.recv < 0):
            raise BadFile(f"{where}, step {number}: {step.type} without a peer")
        if step.waits and not 0 <= step.waits[1] < steps.get(step.waits[0], 0):
            raise BadFile(
                f"{where}, step {number}: depends on step {step.waits}, which is not there"
            )


def _gpu(node: ElementTree.Element) -> Gpu:
    gpu = _number(node, "id", "gpu")
    blocks = [_block(child, gpu) for child in node.findall("tb")]
    return Gpu(gpu, _number(node, "s_chunks", f"gpu {gpu}", 0), blocks)


def _block(node: ElementTree.Element, gpu: int) -> ThreadBlock:
    name = _number(node, "id", f"gpu {gpu}, tb")
    where = f"gpu {gpu}, thread block {name}"
    peers = _number(node, "send", where), _number(node, "recv", where)
    steps = node.findall("step")
    steps.sort(key=lambda step: _number(step, "s", where))
    numbers = [_number(step, "s", where) for step in steps]
    if numbers != list(range(len(steps))):
        raise BadFile(f"MSCCL XML: {where}: steps {numbers} are not 0..{len(steps) - 1}")
    made = [_step(step, f"{where}, step {i}") for i, step in enumerate(steps)]
    return ThreadBlock(name, *peers, _number(node, "chan", where, 0), made)


def _step(node: ElementTree.Element, where: str) -> Step:
    kind = _text(node, "type", where)
    if kind not in TYPES:
        raise BadInput(f"type of {where}", kind, TYPES)
    waits = _number(node, "depid", where, -1), _number(node, "deps", where, -1)
    return Step(
        kind,
        _place(node, "src", where),
        _place(node, "dst", where),
        _number(node, "cnt", where, 1),
        waits if waits[0] >= 0 else None,
    )


def _place(node: ElementTree.Element, end: str, where: str) -> tuple[str, int]:
    buffer = node.get(f"{end}buf", "i")
    if buffer not in ("i", "o", "s"):
        raise BadInput(f"{end}buf of {where}", buffer, ("i", "o", "s"))
    return buffer, _number(node, f"{end}off", where, -1)


def _text(node: ElementTree.Element, key: str, where: str) -> str:
    value = node.get(key)
    if value is None:
        raise BadFile(f"MSCCL XML: {where} has no attribute {key}")
    return value


def _number(node: ElementTree.Element, key: str, where: str, default: int | None = None) -> int:
    value = node.get(key)
    if value is None and default is not None:
        return default
    try:
        return int(_text(node, key, where))
    except ValueError:
        raise BadFile(f"MSCCL XML: {where}: {key}={value!r} is not a number") from None
