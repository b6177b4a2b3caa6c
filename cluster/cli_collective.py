"""`trnsim collective` and `trnsim compare`: nccom-test's habits on a simulated machine."""

import json
import re
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from trnsim.device.errors import BadFile, BadInput, DeadlineExceeded, Unsupported
from trnsim.device.units import PS_PER_S, parse_time

PROGRESS_AFTER = 2.0  # seconds of this machine
WIDE = 160  # columns of a table that no terminal shows

_ALONE = "trnsim runs in this process, without hosts, MPI or Slurm"
_BUFFERS = "buffers and their handshakes are not modelled one by one"
_SBUF = "collectives between SBUFs are not modelled; operands are in HBM"
_PINNED = "nothing runs on vCPUs; times are modelled"
REFUSED = {
    **dict.fromkeys(
        ["-s", "--hosts", "--hosts-file", "--mpi-log-dir", "-S", "--slurm-mode", "-u",
         "--slurm-vcpus-per-node", "--slurm-setup-script", "--slurm-job-id",
         "--slurm-use-head-node-neuron-bench", "--data-collector-port", "--data-collector-host"],
        f"{_ALONE}; use -N for the number of nodes",
    ),
    **dict.fromkeys(
        ["--unique-buff", "--shared-output-buff", "--coalesced-cc-size-ratio"], _BUFFERS
    ),
    **dict.fromkeys(["--sb2sb", "--input-shape", "--output-shape", "--cc-dim"], _SBUF),
    "--vcpu-pin-mode": _PINNED,
    "--debug": "there are no logs of neuron-bench; --json has everything that is known",
}  # fmt: skip


class NccomCommand(click.Command):
    """A command line in nccom-test's habits.

    Options of nccom-test that make no sense here are refused by name; `--stats avg p50` takes
    several words, and `-c` its mode only if one follows.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """click's, on words that it can read."""
        return super().parse_args(ctx, list(_readable(args)))


def _readable(args: Sequence[str]) -> Iterator[str]:
    words = list(args)
    while words:
        word = words.pop(0)
        name = word.partition("=")[0]
        if name in REFUSED:
            raise Unsupported(f"{name} of nccom-test has no meaning here: {REFUSED[name]}")
        yield word
        if word in ("-c", "--check"):
            given = words and words[0] in ("random", "all_ones")
            yield words.pop(0) if given else "random"
        elif word in ("-t", "--stats"):
            named = []
            while words and re.fullmatch(r"(avg|p[0-9]+)(,(avg|p[0-9]+))*", words[0]):
                named.append(words.pop(0))
            yield ",".join(named)


@click.command(cls=NccomCommand)
@click.argument("operation")
@click.option(
    "-r",
    "--nworkers",
    "ranks",
    type=int,
    default=None,
    metavar="N",
    help="Ranks, the same number on every node.  [default: all logical cores]",
)
@click.option(
    "-N", "--nnodes", "nodes", type=int, default=1, show_default=True, help="Instances, over EFA."
)
@click.option("-b", "--minbytes", default=None, metavar="SIZE", help="First size.  [default: 32M]")
@click.option(
    "-e", "--maxbytes", default=None, metavar="SIZE", help="Last size.  [default: 32M, or -b]"
)
@click.option(
    "-i",
    "--stepbytes",
    default=None,
    metavar="SIZE",
    help="Step between sizes.  [default: (max - min) / 10]",
)
@click.option(
    "-f", "--stepfactor", type=int, default=None, metavar="N", help="Factor between sizes."
)
@click.option(
    "-d",
    "--datatype",
    default="uint8",
    show_default=True,
    help="uint8 int8 fp8 uint16 int16 fp16 bf16 uint32 int32 fp32.",
)
@click.option(
    "-n",
    "--iters",
    type=int,
    default=20,
    show_default=True,
    help="Iterations. Only jitter makes them differ: without, one is computed.",
)
@click.option(
    "-w",
    "--warmup_iters",
    type=int,
    default=5,
    show_default=True,
    help="Accepted: modelled time needs no warm-up.",
)
@click.option("-I", "--neff_iters", type=int, default=None, help="Accepted: no NEFF is run.")
@click.option("-W", "--neff_warmup_iters", type=int, default=None, help="Accepted: no NEFF is run.")
@click.option(
    "-t",
    "--stats",
    default="avg",
    show_default=True,
    help="avg and percentiles (p50 p99) of the time over the iterations.",
)
@click.option(
    "-c",
    "--check",
    default=None,
    metavar="[random|all_ones]",
    help="Move real data through the schedule and compare with numpy.",
)
@click.option("--seed", type=int, default=None, help="Of --check and --jitter.  [default: 0]")
@click.option(
    "--custom-replica-groups",
    "--custom-replica-group",
    "groups",
    default=None,
    type=click.Path(path_type=Path),
    help='JSON: {"replica_groups": [[[0, 1], [2, 3]]]}.',
)
@click.option(
    "--data-parallel-dimension",
    "apart",
    type=int,
    default=None,
    metavar="N",
    help="Many groups of N ranks, as far apart as they can be (one per node).",
)
@click.option(
    "--custom-src-target-pairs",
    "pairs",
    default=None,
    type=click.Path(path_type=Path),
    help='JSON for permute: {"src_target_pairs": [[[0, 1], [1, 0]]]}.',
)
@click.option(
    "--variable-size-op-metadata",
    "--alltoallv-metadata",
    "shares",
    default=None,
    type=click.Path(path_type=Path),
    help="JSON: counts of the uneven operations.",
)
@click.option(
    "--streams-json",
    "streams",
    default=None,
    type=click.Path(path_type=Path),
    help="JSON: one operation per stream, all at once.",
)
@click.option("--show-algorithm", is_flag=True, help="Accepted: the algorithm is always shown.")
@click.option("--show-input-output-size", "sizes", is_flag=True, help="Bytes in and out per rank.")
@click.option(
    "--report-to-json-file",
    "report",
    default=None,
    type=click.Path(path_type=Path),
    help="Also write the results in nccom-test's keys.",
)
@click.option("--non-interactive", is_flag=True, help="No progress bar.")
@click.option(
    "--algorithm",
    default="policy",
    show_default=True,
    help="policy (the vendor's), best (the cheapest), or a name.",
)
@click.option(
    "--msccl",
    default=None,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="An algorithm as MSCCL XML: verified, priced, run on data with -c.",
)
@click.option(
    "--msccl-out",
    "written",
    default=None,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the algorithm of the first size as MSCCL XML.",
)
@click.option(
    "--reduction", default=None, help="add, multiply, minimum, maximum, and, or.  [default: add]"
)
@click.option(
    "--root",
    type=int,
    default=None,
    metavar="N",
    help="Of broadcast, reduce, gather, scatter: position in the group.  [default: 0]",
)
@click.option("--instance", default="trn2.48xlarge", show_default=True, help="Kind of instance.")
@click.option(
    "--lnc",
    type=int,
    default=None,
    envvar="NEURON_LOGICAL_NC_CONFIG",
    show_envvar=True,
    help="Physical cores per logical core.",
)
@click.option(
    "--overlay",
    default=None,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Numbers over the chip's, as `trnsim calibrate` writes them.",
)
@click.option(
    "--fabric",
    "fabric_file",
    default=None,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A fabric of your own, instead of --instance.",
)
@click.option(
    "--fail",
    "failed",
    multiple=True,
    metavar="LINK|NODE",
    help="chip0<->chip1 (both ways), chip0->chip1 or chip5 has failed; repeatable.",
)
@click.option(
    "--degrade",
    "degraded",
    multiple=True,
    metavar="LINK=RATE",
    help="chip0->chip1=10GB/s, or rank 3=50GB/s for its DMA; repeatable.",
)
@click.option(
    "--delay",
    "delays",
    multiple=True,
    metavar="RANK=TIME",
    help="Ranks that come late (3=1ms, 8-15=5us); repeatable.",
)
@click.option(
    "--jitter",
    default=None,
    metavar="TIME",
    help="Each rank comes late by up to this, drawn anew for each of -n iterations.",
)
@click.option(
    "--deadline",
    default="600s",
    show_default=True,
    metavar="TIME",
    help="Give up after this much time of this machine.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")  # fmt: skip
def collective(operation: str, as_json: bool, deadline: str, non_interactive: bool,
               report: Path | None, written: Path | None, **asked: Any) -> None:  # fmt: skip
    """Time a collective OPERATION on simulated NeuronCores, as nccom-test does on real ones.

    \b
    OPERATION: allr allg allgv redsct alltoall alltoallv sendrecv permute, long names
    (all_reduce, ...), and broadcast reduce gather scatter reduce_scatterv barrier.

    SIZE is 32MiB, or nccom-test's 32M, 1kb, 1GB, which are binary; plain numbers are bytes. As
    there, the size of all_gather is its output, of reduce_scatter and alltoall a rank's input.

    time is virtual, in us. algbw = size / time; busbw = algbw x 2(N-1)/N for all_reduce, (N-1)/N
    for all_gather, reduce_scatter, alltoall, gather, scatter, and 1 for the others. bound is the
    bus bandwidth if only the most loaded link or memory mattered. GB/s is 1e9 bytes per second.
    """
    from .collective_command import CollectiveRun
    from .report.nccom_json import write_json, write_text

    for path in (report, written):
        if path is not None and not path.absolute().parent.is_dir():
            raise BadFile(f"{path}: its folder does not exist")
    check_fabric_alone(asked["fabric_file"], asked["instance"])
    with within(deadline):
        run = CollectiveRun.of(operation, **asked)
        with progress(run.count, "sizes", quiet=non_interactive or as_json) as advance:
            run.measure(advance)
        xml = run.msccl() if written is not None else ""
    document = run.document()
    if report is not None:
        write_json(report, document)
    if written is not None:
        write_text(written, xml)
    if as_json:
        click.echo(json.dumps(document, indent=4))
        return
    console = _console()
    _show(console, run.views(console.width))
    for path, what in ((report, "results"), (written, "MSCCL XML")):
        if path is not None:
            console.print(f"{what} in {path}", highlight=False)


def check_fabric_alone(fabric_file: Path | None, instance: str) -> None:
    """Raises BadInput for an --instance that is given beside a fabric."""
    given = click.get_current_context().get_parameter_source("instance")
    if fabric_file is not None and given is not ParameterSource.DEFAULT:
        raise BadInput("--instance", instance, "not with --fabric, which says it all")


@click.command()
@click.argument("real", type=click.Path(path_type=Path))
@click.argument("simulated", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def compare(real: Path, simulated: Path, as_json: bool) -> None:
    """Compare two files of results: REAL of nccom-test, SIMULATED of `trnsim collective`.

    Each is the JSON of --report-to-json-file, or the table that nccom-test prints. Rows are joined
    by size and type. Bandwidths are computed anew from size and time; what "GB/s" was in a file is
    said (older releases of nccom-test print GiB/s).
    """
    from . import compare as comparing
    from .nccom_files import read_results
    from .report.collective_tables import comparison_view

    found = comparing.compare(read_results(real), read_results(simulated))
    if as_json:
        click.echo(json.dumps(comparing.document(found), indent=4))
    else:
        console = _console()
        _show(console, comparison_view(found, width=console.width))


def _console() -> Console:
    """The terminal's width; wide enough for everything where there is no terminal."""
    console = Console()
    if not console.is_terminal and "COLUMNS" not in console._environ:
        return Console(width=WIDE)
    return console


def _show(console: Console, parts: Sequence[RenderableType]) -> None:
    """Text is wrapped, a table too wide for the terminal is not: its numbers stay whole."""
    from .report.collective_tables import natural_width

    for part in parts:
        where = console
        if isinstance(part, Table) and (width := natural_width(part)) > console.width:
            where = Console(width=width)
        where.print(part, highlight=False, markup=False)


@contextmanager
def within(deadline: str) -> Iterator[None]:
    """Raises DeadlineExceeded once the body has taken longer. No effect outside the main thread."""
    seconds = parse_time(deadline, "--deadline") / PS_PER_S
    if seconds <= 0:
        raise BadInput("--deadline", deadline, "more than 0")
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGALRM"):
        yield
        return

    def stop(*_: object) -> None:
        raise DeadlineExceeded(
            f"not done after --deadline {deadline}: ask for less, or wait longer"
        )

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def progress(total: int, what: str, *, quiet: bool = False):
    """A function to call after each of `total` steps; a bar shows once they take over 2 seconds."""
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet)
    task, shown = bar.add_task(what, total=total), []

    def show() -> None:
        shown.append(True)
        bar.start()

    timer = threading.Timer(PROGRESS_AFTER, show)
    timer.daemon = True
    timer.start()
    try:
        yield lambda: bar.advance(task)
    finally:
        timer.cancel()
        timer.join()
        if shown:
            bar.stop()
