"""The Ray runtime: one actor per physical NeuronCore, messages from actor to actor.

A chip's actors are one bundle of a placement group, so that they land on one node (the cores of a
rank share memory) and chips are packed on nodes. A Ray instance that was started here is stopped
here, whatever happens; any other is left as it was.
"""

import fcntl
import logging
import os
import re
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any

os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # else uv's projects are uploaded

import ray
from ray._private import ray_constants
from ray._private import worker as ray_worker
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from trnsim.device import errors
from trnsim.device.errors import BadInput, CoreLost

from .. import wire
from .base import CoreAddress, Execute, Wait, explain, spread
from .ray_actor import CoreActor

_GROUPS = {"mail": 1, "watch": 1}
_SHARES = (1.0, 0.5, 0.25, 0.1, 0.05, 0.02, 0.01)
_POLL_S = 1.0
_SETUP_S = 120.0
_ANSWER_S = 20.0
LOCK = "lock"
"""File of a folder of Ray's that its starter has locked."""


class RayRuntime:
    """See `base.Runtime`.

    `address` is a running Ray instance (`ray://host:port`, `host:port` or `auto`); without it, the
    one this process is connected to, else one that is started for the purpose. `deadline_s` bounds
    every wait of a core for another one.
    """

    def __init__(self, address: str | None = None, deadline_s: float = 600.0) -> None:
        self._instance = RayInstance(address)
        self._deadline = deadline_s
        self._cores: list[CoreAddress] = []
        self._actors: list[Any] = []
        self._places: list[dict[str, Any]] = []
        self._group: Any = None

    def open(self, cores: Sequence[CoreAddress], execute: Execute) -> None:
        """Start an actor for each core. Raises BadInput if Ray cannot be reached or has no room."""
        try:
            self._instance.connect()
            self._start(list(cores), execute)
        except BaseException:
            self.close()
            raise

    def _start(self, cores: list[CoreAddress], execute: Execute) -> None:
        self._cores = cores
        chips = list(dict.fromkeys(address.chip for address in cores))
        sizes = [sum(address.chip == chip for address in cores) for chip in chips]
        share = cpu_share(_node_cpus(), sizes)
        self._group = _reserve(sizes, share)
        actor: Any = ray.remote(concurrency_groups=_GROUPS)(CoreActor)  # type: ignore
        for address in cores:
            strategy = PlacementGroupSchedulingStrategy(self._group, chips.index(address.chip))
            options = {
                "num_cpus": share,
                "scheduling_strategy": strategy,
            }
            handle = actor.options(**options).remote(address, execute, self._deadline)
            self._actors.append(handle)
            self._places.append({"pid": "?", "host": "?"})
        self._places = self._gather([actor.describe.remote() for actor in self._actors])
        self._share_memories()
        self._connect_peers()

    def _share_memories(self) -> None:
        """Core 0 of each rank makes the HBM, the others attach, core 0 gives up the name."""
        refs = []
        for index, address in enumerate(self._cores):
            if address.core == 0:
                actors = self._actors[index : index + address.cores]
                name = actors[0].create_arena.remote()
                attached = [actor.attach_arena.remote(name) for actor in actors[1:]]
                refs += [actors[0].seal_arena.remote(*attached), *attached][: address.cores]
        self._gather(refs)

    def _connect_peers(self) -> None:
        peers = {
            address.rank: actor
            for address, actor in zip(self._cores, self._actors, strict=True)
            if address.core == 0
        }
        self._gather([actor.connect.remote(peers) for actor in self._actors])

    @property
    def places(self) -> list[dict[str, Any]]:
        """`pid` and `host` of each core's process."""
        return self._places

    @property
    def folder(self) -> str:
        """Where the Ray that was started here keeps its files until it is stopped, or empty."""
        return self._instance.folder

    def load(self, name: str, payload: bytes) -> None:
        """See `base.Runtime.load`; the bytes reach each node once."""
        ref = ray.put(payload)
        self._gather([actor.load.remote(name, ref) for actor in self._actors])

    def call(self, call: str, arguments: Sequence[Any] | None = None) -> list[Any]:
        """See `base.Runtime.call`."""
        each = spread(arguments, len(self._actors))
        refs = [
            actor.run.remote(call, wire.encode(argument))
            for actor, argument in zip(self._actors, each, strict=True)
        ]
        return self._gather(refs, decode=_result)

    # --- waiting ---

    def _gather(self, refs: list[Any], decode: Any = lambda value: value) -> list[Any]:
        """The value of each core's ref; on any error the cores are killed and it is raised."""
        try:
            return self._wait(refs, decode)
        except BaseException:
            self._release()
            raise

    def _wait(self, refs: list[Any], decode: Any) -> list[Any]:
        index = {ref: place for place, ref in enumerate(refs)}
        values: list[Any] = [None] * len(refs)
        pending, watch = list(refs), _Watch(self)
        while pending:
            ready, pending = ray.wait(pending, num_returns=1, timeout=_POLL_S)
            failures = []
            for ref in ready:
                try:
                    values[index[ref]] = decode(self._get(ref, index[ref]))
                except Exception as error:
                    failures.append(error)
            if failures:
                raise min(failures, key=lambda error: not isinstance(error, CoreLost))
            if not ready:
                watch.look([index[ref] for ref in pending])
        return values

    def _get(self, ref: Any, core: int) -> Any:
        try:
            return ray.get(ref)
        except RayTaskError:
            raise
        except RayError as error:
            if "creation task" in str(error):  # the class or the execution cannot be imported there
                raise ExecutionFailed(f"{self._cores[core]} did not start: {error}") from None
            raise self._lost(core, _cause(error)) from None

    def _lost(self, core: int, cause: str) -> CoreLost:
        place = self._places[core]
        where = f"host {place['host']}, process {place['pid']}"
        return CoreLost(f"{self._cores[core]} on {where} is lost: {cause}")

    # --- ending ---

    def _release(self) -> None:
        """Kill the actors and give back their place."""
        actors, self._actors = self._actors, []
        for actor in actors:
            ray.kill(actor, no_restart=True)
        group, self._group = self._group, None
        if group is not None:
            remove_placement_group(group)

    def close(self) -> None:
        """Kill the actors, and stop Ray if it was started here."""
        try:
            if ray.is_initialized():
                self._release()
        finally:
            self._instance.disconnect()

    def __enter__(self) -> "RayRuntime":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _result(document: bytes) -> Any:
    """The result of a call. Raises what the core has raised."""
    answer = wire.decode(document, "result")
    if "error" not in answer:
        return answer["result"]
    if not answer["error"]:
        raise ExecutionFailed(answer["message"])
    cls = getattr(errors, answer["error"])
    error = cls.__new__(cls, answer["message"])  # past constructors that compose a message
    raise error


class ExecutionFailed(Exception):
    """A core's process raised something that is no user error: a fault, with its traceback."""


def _cause(error: Exception) -> str:
    """Ray's long story of an actor's death in a few words."""
    story = " ".join(str(error).split())
    if "connection error code 2" in story:  # Ray saw the process's socket close
        return "its process ended unexpectedly (killed, out of memory, or crashed)"
    detail = re.search(r"(?:exit detail|The actor is dead because):? (.*?)\.(?: |$)", story)
    return detail.group(1) if detail else story[:200]


class _Watch:
    """Looks at cores that have been silent: are they alive, and does anything move?"""

    def __init__(self, runtime: RayRuntime) -> None:
        self._runtime = runtime
        self._before: list[Any] = []

    def look(self, pending: list[int]) -> None:
        """Raise CoreLost for a core that does not answer, `explain`'s error if nothing moves."""
        actors = self._runtime._actors
        refs = [actor.status.remote() for actor in actors]
        _, silent = ray.wait(refs, num_returns=len(refs), timeout=_ANSWER_S)
        for ref in silent:
            raise self._runtime._lost(refs.index(ref), f"it gave no answer in {_ANSWER_S:g} s")
        statuses = [self._runtime._get(ref, core) for core, ref in enumerate(refs)]
        if statuses == self._before and self._stuck(statuses, pending):
            waits = [statuses[core][0] for core in pending]
            cores = enumerate(self._runtime._cores)
            raise explain(waits, [address for core, address in cores if core not in pending])
        self._before = statuses

    @staticmethod
    def _stuck(statuses: list[tuple[Wait | None, int, int, int]], pending: list[int]) -> bool:
        """Whether every unfinished core waits and no message is on its way."""
        waiting = all(statuses[core][0] is not None for core in pending)
        return waiting and sum(s[1] for s in statuses) == sum(s[2] for s in statuses)


# --- room --------------------------------------------------------------------------------------


def _node_cpus() -> list[float]:
    return [node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]]


def cpu_share(node_cpus: Sequence[float], chips: Sequence[int]) -> float:
    """The processor share of an actor with which all chips (numbers of cores) fit on the nodes.

    A whole processor for each core if possible, so that Ray spreads chips over nodes; less where
    there are more simulated cores than processors.
    """
    largest = max(chips)
    for share in _SHARES:
        if sum(int(cpus / (share * largest) + 1e-9) for cpus in node_cpus) >= len(chips):
            return share
    return _SHARES[-1]


def _reserve(chips: Sequence[int], share: float) -> Any:
    """A placement group with one bundle per chip. Raises BadInput if Ray has no room."""
    group = placement_group([{"CPU": round(share * cores, 4)} for cores in chips], strategy="PACK")
    if not group.wait(_SETUP_S):
        remove_placement_group(group)
        free = ray.available_resources().get("CPU", 0)
        raise BadInput(
            "cores", sum(chips), f"what fits on Ray's {free:g} free CPUs at {share:g} per core"
        )
    return group


_QUIET: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}


def _silence_raylet() -> None:
    """Keep Ray's own story of a dead process out of standard output, where results go.

    `log_to_driver=False` does not reach it. A Ray that has no such function prints it.
    """
    if hasattr(ray_worker, "print_to_stdstream"):
        ray_worker.print_to_stdstream = lambda *arguments, **options: None


def _check_reachable(address: str) -> None:
    """Raise BadInput if nothing listens at `[ray://]host:port`: Ray would try for minutes."""
    if address in ("auto", "local"):
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        raise _bad_address(address, "neither ray://host:port nor host:port nor auto")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except (OSError, OverflowError) as error:
        raise _bad_address(address, str(error)) from None


def _bad_address(address: str, reason: str) -> BadInput:
    return BadInput("address", address, f"that of a running Ray ({reason})")


@contextmanager
def _first_interrupt_waits() -> Iterator[None]:
    """Ctrl-C once is heard at the end: Ray leaves processes behind when its start is cut short."""
    if threading.current_thread() is not threading.main_thread():
        yield  # where Python delivers no signals
        return
    heard: list[int] = []

    def hear(number: int, frame: object) -> None:
        if heard:
            raise KeyboardInterrupt
        heard.append(number)

    before = signal.signal(signal.SIGINT, hear)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if heard:
        raise KeyboardInterrupt


def remove_leftovers() -> None:
    """Removes files of Rays whose starters were killed: their locks are nobody's."""
    for path in Path("/tmp").glob(f"trnsim-*/{LOCK}"):
        with suppress(OSError), _locked(path):
            shutil.rmtree(path.parent, ignore_errors=True)


def _locked(path: Path) -> IO[bytes]:
    """The file, which nobody else has until it is closed. Raises OSError if somebody has it."""
    file = open(path, "ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise
    return file


class RayInstance:
    """The Ray instance in use: found, or started here (and then stopped here)."""

    def __init__(self, address: str | None = None) -> None:
        self._address = address
        self._connected = False
        self.folder = ""

    def connect(self) -> None:
        """Connect to Ray, or start it. Raises BadInput for an address where no Ray is."""
        address = self._address or os.environ.get("RAY_ADDRESS")
        if address:
            _check_reachable(address)
        if ray.is_initialized():
            return
        _silence_raylet()
        if address:
            self._join(address)
        else:
            self._start()

    def _join(self, address: str) -> None:
        if hasattr(ray_constants, "NUM_REDIS_GET_RETRIES"):
            # One try, of 40 s. Ray makes 20 against a server that listens but is no Ray.
            ray_constants.NUM_REDIS_GET_RETRIES = 1
        try:
            ray.init(address, **_QUIET)
        except (ConnectionError, RuntimeError, ValueError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            if os.environ.get("RAY_AUTH_MODE") is None:
                reason += "; if it asks for a token, set RAY_AUTH_MODE=token"
            raise _bad_address(address, reason) from None
        self._connected = True

    def _start(self) -> None:
        remove_leftovers()
        # A short path: sockets below it may have 107 characters.
        self.folder = tempfile.mkdtemp(prefix="trnsim-", dir="/tmp")
        name = Path(self.folder, "starting")
        self._lock = _locked(name)
        name.rename(name.with_name(LOCK))  # nobody may take it before it is locked
        self._connected = True
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        with _first_interrupt_waits():
            ray.init(
                address="local",
                include_dashboard=False,
                **_QUIET,
                _temp_dir=self.folder,
            )

    def disconnect(self) -> None:
        """Leave Ray; stop it and remove its files if it was started here."""
        if self._connected:
            ray.shutdown()
            self._connected = False
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = ""
            self._lock.close()
