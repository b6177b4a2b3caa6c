"""Both runtimes run the same cores: same bytes, same errors; and nobody waits for ever."""

import fcntl
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import threadpoolctl
from hypothesis import given
from hypothesis import strategies as st
from ray import cloudpickle

from trnsim.cluster import wire
from trnsim.cluster.runtimes import base, ray_actor
from trnsim.cluster.runtimes.base import Barrier, Call, CoreAddress, Exchange, Message, Seat
from trnsim.cluster.runtimes.local import LocalRuntime
from trnsim.cluster.runtimes.ray_runtime import LOCK, RayRuntime, cpu_share, remove_leftovers
from trnsim.collectives.algorithms import mesh, ring
from trnsim.collectives.execute import execute
from trnsim.collectives.schedule import Collective
from trnsim.device.errors import BadInput, CollectiveMismatch, CoreLost, DeadlineExceeded

BF16 = np.dtype(ml_dtypes.bfloat16)


def cores(ranks: int, lnc: int = 2) -> list[CoreAddress]:
    """All ranks on chip 0."""
    return [
        CoreAddress(rank, core, lnc, chip=0, physical=rank * lnc + core, hbm_bytes=1 << 20)
        for rank in range(ranks)
        for core in range(lnc)
    ]


# --- what the cores run (sent to the actors by value) ------------------------------------------


def all_reduce(count: int, ranks: int = 2, key: int = 1, rank: int = 0, dtype: str = "bf16"):
    """An Exchange of ones, over a ring."""
    collective = Collective("all_reduce", ranks, count, dtype, "add")
    data = np.ones(count, BF16 if dtype == "bf16" else np.float32)
    group = tuple(range(ranks))
    return Exchange(key, collective, ring.schedule(collective), group, rank, [data], [data])


def broadcast(root: int, to: int, rank: int, key: int):
    """An Exchange of 8 numbers from `root` to `to`."""
    group = (root, to)
    collective = Collective("broadcast", 2, 8, "f32")
    data = np.full(8, rank, np.float32)
    schedule = mesh.schedule(collective)
    return Exchange(key, collective, schedule, group, group.index(rank), [data], [data])


def step(seat: Seat, argument: int) -> base.Execution:
    """Each core writes its half, core 0 sums over ranks, each core scales its half; four times."""
    rank, core = seat.address.rank, seat.address.core
    data = seat.arena.array(512, (2, 35), BF16)
    total = seat.arena.array(4096, (2, 35), BF16)
    data[core] = np.linspace(rank, argument + core, 35).astype(BF16)
    for turn in range(4):
        yield Barrier()
        if core == 0:
            collective = Collective("all_reduce", 2, 70, "bf16", "add")
            way = ring.schedule(collective)
            yield Exchange(turn, collective, way, (0, 1), rank, [data], [total])
        yield Barrier()
        data[core] = total[1 - core] * BF16.type(0.3)
    yield Barrier()
    return {"data": data.copy(), "loaded": seat.loaded["program"]}


def misbehave(seat: Seat, call: str) -> base.Execution:
    """One core (or rank) does something wrong in the middle of a call."""
    rank, core = seat.address.rank, seat.address.core
    yield Barrier()
    if call == "killed" and (rank, core) == (1, 1):
        os.kill(os.getpid(), signal.SIGKILL)
    if call == "bad input" and rank == 1:
        raise BadInput("lnc", 3, (1, 2))
    if call == "fault" and rank == 1:
        raise ZeroDivisionError("a fault")
    if call == "absent" and rank == 1:
        threading.Event().wait()
    if call == "missing barrier" and (rank, core) == (0, 0):
        yield Barrier()
    if call == "sizes" and core == 0:
        yield all_reduce(8 + 8 * rank, rank=rank)
    if call == "order" and core == 0:
        for key in (1, 2) if rank == 0 else (2, 1):
            yield all_reduce(8, rank=rank, key=key)
    if call in ("absent", "finished") and (rank, core) == (0, 0):
        yield all_reduce(8)
    yield Barrier()


def run_ahead(seat: Seat) -> base.Execution:
    """Rank 0 only sends: many more messages than the window holds."""
    total = 0.0
    for turn in range(5 * ray_actor.WINDOW_MESSAGES):
        exchange = broadcast(0, 1, seat.address.rank, key=turn)
        exchange.inputs[0][:] += turn
        if seat.address.core == 0:
            yield exchange
        total += float(exchange.outputs[0].sum())
    return total


def program(seat: Seat, call: str, argument) -> base.Execution:
    """The Execute of all tests."""
    if call == "step":
        return (yield from step(seat, argument))
    if call == "run ahead":
        return (yield from run_ahead(seat))
    if call == "modules":
        return "jax" in sys.modules
    if call == "threads":
        return max(pool["num_threads"] for pool in threadpoolctl.threadpool_info())
    return (yield from misbehave(seat, call))


# --- fixtures ----------------------------------------------------------------------------------


@pytest.fixture
def ray_runtime(ray_instance):
    """Makes Ray runtimes; a test's functions travel with them."""
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    yield RayRuntime
    cloudpickle.unregister_pickle_by_value(module)


@pytest.fixture(params=["local", "ray"])
def runtime(request) -> Iterator[Callable[..., base.Runtime]]:
    """Opens a runtime of either kind."""
    make = LocalRuntime
    if request.param == "ray":
        make = partial(request.getfixturevalue("ray_runtime"), deadline_s=20)
    with ExitStack() as stack:

        def opened(addresses: list[CoreAddress]) -> base.Runtime:
            made = stack.enter_context(make())
            made.open(addresses, program)
            return made

        yield opened


@pytest.fixture
def local() -> Iterator[base.Runtime]:
    """Two ranks of two cores in this process."""
    with LocalRuntime() as opened:
        opened.open(cores(2), program)
        yield opened


# --- values ------------------------------------------------------------------------------------


def by_hand(argument: int) -> np.ndarray:
    """bf16[rank, core, 35]: what `step` computes, without runtimes."""
    starts = [[np.linspace(r, argument + c, 35) for c in (0, 1)] for r in (0, 1)]
    data = np.array(starts).astype(BF16)
    collective = Collective("all_reduce", 2, 70, "bf16", "add")
    for _ in range(4):
        flat = [data[rank].reshape(-1) for rank in (0, 1)]
        totals = execute(collective, ring.schedule(collective), flat)
        for rank in (0, 1):
            data[rank] = totals[rank].reshape(2, 35)[::-1] * BF16.type(0.3)
    return data


def test_both_runtimes_compute_the_bytes_that_are_computed_by_hand(runtime):
    opened = runtime(cores(2))
    opened.load("program", wire.encode(("a", 1)))
    for argument in (3, 4):
        results = opened.call("step", [argument] * 4)
        expected = by_hand(argument)
        assert [r["loaded"] for r in results] == [("a", 1)] * 4
        for index, result in enumerate(results):
            assert result["data"].tobytes() == expected[index // 2].tobytes()


def test_actors_do_without_jax_and_a_sender_that_runs_ahead_waits(ray_runtime):
    with ray_runtime(deadline_s=20) as opened:
        opened.open(cores(2, lnc=1), program)
        turns = 5 * ray_actor.WINDOW_MESSAGES
        assert opened.call("run ahead") == [8.0 * sum(range(turns))] * 2
        assert opened.call("modules") == [False, False]
        assert opened.call("threads") == [1, 1]


def test_blas_has_one_thread_while_the_local_runtime_is_open():
    pools = threadpoolctl.threadpool_info()
    with LocalRuntime() as opened:
        opened.open(cores(2), program)
        assert opened.call("threads") == [1] * 4
    assert threadpoolctl.threadpool_info() == pools


def test_arguments_are_one_for_each_core(local):
    with pytest.raises(ValueError, match=r"^3 arguments for 4 cores$"):
        local.call("step", [1, 2, 3])


# --- errors ------------------------------------------------------------------------------------


def test_a_user_error_comes_back_as_it_was(runtime):
    with pytest.raises(BadInput, match=r"^lnc: 3 is not valid; allowed: one of 1, 2$"):
        runtime(cores(2, lnc=1)).call("bad input")


def test_a_fault_comes_back_with_its_traceback(runtime):
    with pytest.raises(Exception, match=r"a fault"):
        runtime(cores(2, lnc=1)).call("fault")


def test_different_sizes_are_a_mismatch_before_data_are_used(runtime):
    message = (
        r"^rank ([01]) is in round 0 of all_reduce\(add\) #1 of (16|32) B bf16 on \[0, 1\], but"
        r" rank ([01]) sent it round 0 of all_reduce\(add\) #1 of (16|32) B bf16 on \[0, 1\]$"
    )
    with pytest.raises(CollectiveMismatch, match=message) as caught:
        runtime(cores(2, lnc=1)).call("sizes")
    match = re.match(message, str(caught.value))
    assert match and match[1] != match[3]
    sizes = {match[1]: match[2], match[3]: match[4]}
    assert sizes == {"0": "16", "1": "32"}


def test_different_order_is_a_mismatch(local):
    message = r"^rank [01] is in round 0 of all_reduce\(add\) #[12] .*, but rank [01] sent it"
    with pytest.raises(CollectiveMismatch, match=message):
        local.call("order")


def test_a_rank_that_does_not_take_part_is_a_mismatch(runtime):
    with pytest.raises(
        CollectiveMismatch,
        match=r"^rank 0 \(chip 0, physical core 0, node 0\) waits for rank 1 in round 0 of"
        r" all_reduce\(add\) #1 of 16 B bf16 on \[0, 1\], but rank 1 has finished$",
    ):
        runtime(cores(2, lnc=1)).call("finished")


def test_a_barrier_that_only_one_core_reaches_is_named(local):
    with pytest.raises(
        DeadlineExceeded,
        match=r"^nothing moves: rank 0 \(chip 0, physical core 0, node 0\) waits at the barrier of"
        r" its physical cores$",
    ):
        local.call("missing barrier")


def test_a_cycle_of_waits_is_printed_as_a_cycle():
    def circle(seat: Seat, call: str, argument) -> base.Execution:
        rank = seat.address.rank
        yield broadcast((rank + 1) % 3, rank, rank, key=rank)

    with LocalRuntime() as opened:
        opened.open(cores(3, lnc=1), circle)
        with pytest.raises(
            DeadlineExceeded,
            match=r"^nothing moves: ranks 0 -> 1 -> 2 -> 0 wait for each other: rank 0 .* waits for"
            r" rank 1 in round 0 of broadcast #0 .*; rank 1 .*; rank 2 .*",
        ):
            opened.call("circle")


def test_a_deadline_names_who_waits_for_whom_in_what(ray_runtime):
    with ray_runtime(deadline_s=0.3) as opened:
        opened.open(cores(2, lnc=1), program)
        with pytest.raises(
            DeadlineExceeded,
            match=r"^rank 0 \(chip 0, physical core 0, node 0\) waits for rank 1 in round 0 of"
            r" all_reduce\(add\) #1 of 16 B bf16 on \[0, 1\], since 0\.3 s$",
        ):
            opened.call("absent")


def test_a_killed_process_is_named_and_takes_the_others_with_it(ray_runtime, capfd):
    with ray_runtime(deadline_s=20) as opened:
        opened.open(cores(2), program)
        handles = [os.pidfd_open(place["pid"]) for place in opened.places]
        with pytest.raises(
            CoreLost,
            match=r"^rank 1 \(chip 0, physical core 3, node 0\) on host \S+, process \d+ is lost:"
            r" its process ended unexpectedly \(killed, out of memory, or crashed\)$",
        ):
            opened.call("killed")
        for handle in handles:
            assert select.select([handle], [], [], 20)[0], "a core's process is still there"
            os.close(handle)
    assert capfd.readouterr() == ("", "")


INTERRUPTED = """
import threading
from trnsim.cluster.runtimes.base import CoreAddress
from trnsim.cluster.runtimes.ray_runtime import RayRuntime

def hang(seat, call, argument):
    threading.Event().wait()

runtime = RayRuntime()
with runtime:
    runtime.open([CoreAddress(0, 0, 1, 0, 0, 4096)], hang)
    print(runtime.places[0]["pid"], runtime.folder, flush=True)
    runtime.call("hang")
"""


def test_an_interrupt_leaves_no_process_and_no_file():
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    command = [sys.executable, "-c", INTERRUPTED]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment) as child:
        assert child.stdout
        pid, folder = child.stdout.readline().split()
        handle = os.pidfd_open(int(pid))
        child.send_signal(signal.SIGINT)
        try:
            _, errors = child.communicate(timeout=60)
        finally:
            child.kill()
    assert errors.splitlines()[-1] == "KeyboardInterrupt"
    assert select.select([handle], [], [], 20)[0], "the core's process is still there"
    os.close(handle)
    assert not os.path.exists(folder)
    assert not any(folder in line for line in command_lines())


def test_files_of_killed_starters_are_removed():
    killed, alive = (Path(tempfile.mkdtemp(prefix="trnsim-", dir="/tmp")) for _ in range(2))
    with open(alive / LOCK, "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (killed / LOCK).touch()
        (killed / "session").mkdir()
        remove_leftovers()
        assert alive.exists() and not killed.exists()
    remove_leftovers()
    assert not alive.exists()


def command_lines() -> Iterator[str]:
    """Of all processes."""
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended meanwhile
            yield entry.read_text(errors="replace")


def test_an_interrupt_while_ray_starts_is_heard_when_it_has(monkeypatch):
    """Ray would leave the processes that it has started by then."""
    story = []

    def start(**options):
        signal.raise_signal(signal.SIGINT)
        story.append("started")

    monkeypatch.setattr("ray.init", start)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.shutdown", lambda: story.append("stopped"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    runtime = RayRuntime()
    with pytest.raises(KeyboardInterrupt):
        runtime.open(cores(1), program)
    assert story == ["started", "stopped"]
    assert not runtime.folder


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("nonsense", "neither ray://host:port nor host:port nor auto"),
        ("ray://127.0.0.1:1", r"\[Errno 111\] Connection refused"),
        ("127.0.0.1:1", r"\[Errno 111\] Connection refused"),
    ],
)
def test_an_address_without_ray_is_refused_at_once(address, reason):
    message = rf"^address: {address} is not valid; allowed: that of a running Ray \({reason}\)$"
    with pytest.raises(BadInput, match=message):
        RayRuntime(address).open(cores(1), program)


# --- parts -------------------------------------------------------------------------------------

CALLS = st.builds(
    Call,
    key=st.integers(0, 2**40),
    kind=st.text(max_size=9),
    reduction=st.text(max_size=9),
    nbytes=st.integers(0, 2**50),
    dtype=st.text(max_size=5),
    group=st.lists(st.integers(0, 10**6)).map(tuple),
)


@given(CALLS, st.integers(0, 2**31 - 1), st.integers(0, 2**31 - 1), st.binary())
def test_messages_come_back_with_aligned_data(call, source, turn, data):
    message = Message(source, turn, base.pack_call(call), memoryview(data))
    frame = message.pack()
    assert Message.unpack(frame) == message
    assert base.unpack_call(message.call) == call
    assert (len(frame) - len(data)) % 16 == 0


def test_a_mailbox_keeps_a_sender_within_its_window():
    mailbox = ray_actor.Mailbox()
    for _ in range(ray_actor.WINDOW_MESSAGES):
        mailbox.sent(7, 10)
    assert mailbox.wait_for_credit(0) is None
    mailbox.sent(7, 10)
    assert mailbox.wait_for_credit(0.01) == 7
    mailbox.credit(7, 1, 10)
    assert mailbox.wait_for_credit(0) is None
    mailbox.sent(8, ray_actor.WINDOW_BYTES + 1)
    assert mailbox.wait_for_credit(0.01) == 8


@pytest.mark.parametrize(
    ("nodes", "chips", "share"),
    [
        ([2], [8], 0.25),
        ([8, 8], [8, 8], 1.0),
        ([8, 8], [8, 8, 8], 0.5),
        ([4, 64], [8] * 8, 1.0),
        ([1], [64] * 4, 0.01),  # as little as Ray can count, even if too much
    ],
)
def test_the_processor_share_is_the_largest_with_which_the_chips_fit(nodes, chips, share):
    assert cpu_share(nodes, chips) == share


@given(
    st.lists(st.integers(1, 256), min_size=1, max_size=8),
    st.lists(st.integers(1, 8), min_size=1, max_size=64),
)
def test_chips_fit_on_the_nodes_with_the_processor_share(nodes, chips):
    share = cpu_share(nodes, chips)
    free = list(nodes)
    for count in chips:
        place = max(range(len(free)), key=free.__getitem__)
        free[place] -= round(share * count, 4)
    assert share == 0.01 or min(free) >= -1e-9
