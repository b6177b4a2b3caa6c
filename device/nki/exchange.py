"""What the two cores of a logical core do together: `core_barrier` and `sendrecv`.

Both cores meet, which takes `core_barrier_ps` from the later one's arrival. A core arrives when
what it would read and write is ready. A transfer then takes a DMA's time; its GpSimd form has no
DMA start, takes the GpSimd engine, and is assumed to move data at the DMA rate.
"""

from typing import Any

from ..dtypes import numpy_dtype
from ..errors import BadInput, IllegalInstruction, TrnsimError
from ..memory import View
from .errors import at_line
from .session import NkiInstruction, Session, current
from .tensor import MemoryRegion, NkiTensor
from .trace import Met

GPSIMD_LIMITS = {4: 1024, 2: 512, 1: 256}  # bytes per partition by itemsize (nki.isa.sendrecv)


def core_barrier(
    data: NkiTensor, cores: Any, engine: Any = "gpsimd", name: str | None = None
) -> NkiInstruction:
    """Waits on `engine` until both cores are here; both then see `data` (in shared HBM).

    On one core, `cores` being 0 or (0,), it waits for nobody. The documentation wants `data` in
    shared HBM and nki-library passes tiles of SBUF too: that is a finding.
    """
    session = current()
    line = session.line
    try:
        view = _barrier_operand(session, data, cores)
        met = Met("CoreBarrier", _engine(engine), (), (view,), line, name or "")
        arrival = session.core.arrive(met)
        arrivals = [arrival]
        if len(session.launch.sessions) > 1:
            key = ("core_barrier", data.on_chip or id(data.storage.tensor))
            arrivals = session.launch.meet(session, key, arrival, f"core_barrier at {line}")
    except TrnsimError as error:
        raise at_line(error, line) from None
    return _settled(session, met, arrivals)


def sendrecv(
    src: NkiTensor,
    dst: NkiTensor,
    send_to_rank: int,
    recv_from_rank: int,
    pipe_id: int,
    dma_engine: Any = "dma",
    name: str | None = None,
) -> NkiInstruction:
    """Sends `src` (SBUF) to core `send_to_rank`, receives `dst` from core `recv_from_rank`."""
    session = current()
    line = session.line
    try:
        source, target = _exchange_operands(session, src, dst)
        by_gpsimd = getattr(dma_engine, "name", dma_engine) == "gpsimd_dma"
        _check_gpsimd(by_gpsimd, src)
        engine = "gpsimd" if by_gpsimd else "dma"
        session.check_reads((source,), line)
        met = Met("SendRecv", engine, (source,), (target,), line, name or "")
        arrival = session.core.arrive(met)
        sent = source.array.copy() if session.data else None
        offer = (int(send_to_rank), arrival, sent, source.shape, source.dtype)
        key = ("sendrecv", int(pipe_id), by_gpsimd)
        offers = session.launch.meet(session, key, offer, f"sendrecv (pipe {pipe_id}) at {line}")
        received = _matching(session, offers, int(send_to_rank), int(recv_from_rank), target)
    except TrnsimError as error:
        raise at_line(error, line) from None
    if received is not None:
        target.array[...] = received
    session.launch.written(target).add(target)
    return _settled(session, met, [offer[1] for offer in offers])


def _settled(session: Session, met: Met, arrivals: list[int]) -> NkiInstruction:
    place = len(session.core.trace.entries)
    session.core.trace.entries.append(met)
    start, end = session.core.settle(met, arrivals, session.program)
    return NkiInstruction(start, end, met.name, place)


def _barrier_operand(session: Session, data: NkiTensor, cores: Any) -> View:
    given = (cores,) if isinstance(cores, int) else tuple(cores)
    all_cores = tuple(range(len(session.launch.sessions)))
    if given != all_cores:
        raise IllegalInstruction(f"core_barrier: cores is {given}; allowed: {all_cores}")
    view = session.operand(data)
    if data.buffer is not MemoryRegion.shared_hbm and len(all_cores) > 1:
        message = f"core_barrier: data is in {data.buffer}; documented is shared_hbm"
        session.launch.findings.setdefault(session.line, message)
    return view


def _exchange_operands(session: Session, src: NkiTensor, dst: NkiTensor) -> tuple[View, View]:
    source, target = session.operand(src), session.operand(dst)
    for operand, tensor in (("src", src), ("dst", dst)):
        if tensor.buffer is not MemoryRegion.sbuf:
            raise IllegalInstruction(f"sendrecv: {operand} must be in sbuf, not {tensor.buffer}")
    if src.shape != dst.shape or src.dtype != dst.dtype:
        raise IllegalInstruction(
            f"sendrecv: src is {src.dtype}{list(src.shape)} and dst {dst.dtype}{list(dst.shape)}"
        )
    return source, target


def _check_gpsimd(by_gpsimd: bool, src: NkiTensor) -> None:
    limit = GPSIMD_LIMITS.get(src.itemsize, 0)
    held = src.size // src.shape[0] * src.itemsize
    if by_gpsimd and held > limit:
        raise IllegalInstruction(
            f"sendrecv: gpsimd_dma moves at most {limit} B per partition of {src.dtype}, "
            f"not {held} B"
        )


def _matching(session: Session, offers: list, to: int, source: int, target: View) -> Any:
    count = len(offers)
    for field, rank in (("send_to_rank", to), ("recv_from_rank", source)):
        if not 0 <= rank < count:
            raise IllegalInstruction(f"sendrecv: {field} is {rank}; allowed: 0 to {count - 1}")
    sent_to, _, values, shape, dtype = offers[source]
    if sent_to != session.program:
        raise IllegalInstruction(
            f"sendrecv: core {session.program} receives from core {source}, which sends to "
            f"core {sent_to}"
        )
    if (shape, dtype) != (target.shape, target.dtype):
        raise IllegalInstruction(
            f"sendrecv: core {source} sends {dtype}{list(shape)} and core {session.program} "
            f"receives {target.dtype}{list(target.shape)}"
        )
    return values if values is None else values.astype(numpy_dtype(dtype), copy=False)


def _engine(engine: Any) -> str:
    name = str(getattr(engine, "name", engine))
    if name == "unknown":
        return "gpsimd"
    if name not in ("tensor", "vector", "scalar", "gpsimd", "sync"):
        raise BadInput("engine", name, ("tensor", "vector", "scalar", "gpsimd", "sync"))
    return name
