"""What `trnsim specs` and `trnsim topology` show: as plain dicts, and as tables for a terminal."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from trnsim.collectives.fabric import Fabric
from trnsim.device.chip import Chip
from trnsim.device.numbers import Number
from trnsim.device.units import format_bytes, format_rate, format_time

from ..instances import Instance, check_nodes, fabric, interface_rate
from ..lnc import LogicalCore, check_lnc, logical_per_chip

STATUS_STYLE = {
    "published": "", "measured": "green", "derived": "cyan", "calibrated": "yellow",
    "assumed": "yellow",
}  # fmt: skip
CANONICAL = ("B", "B/s", "ps", "Hz", "FLOP/s")
SECTIONS = (
    "chip", "core", "tensor", "vector", "scalar", "gpsimd", "memory", "dma", "host", "collective",
    "program",
)  # fmt: skip
OVERVIEW = (
    ("physical cores", "cores"),
    ("LNC", "lnc_allowed"),
    ("HBM", "hbm_bytes"),
    ("HBM stacks", "hbm_stacks"),
    ("HBM bandwidth", "hbm_bytes_per_s"),
    ("SBUF per partition", "sbuf_physical_partition_bytes"),
    ("  usable by kernels", "sbuf_partition_bytes"),
    ("Tensor clock", "clock_hz.tensor"),
    ("Vector clock", "clock_hz.vector"),
    ("Scalar clock", "clock_hz.scalar"),
    ("bf16 per core", "peak_flops.bf16"),
    ("fp8 per core", "peak_flops.f8"),
    ("fp32 per core", "peak_flops.f32"),
    ("bf16 per chip", "chip_peak_flops.bf16"),
    ("DMA per core", "dma_bytes_per_s"),
    ("CC-cores", "cc_cores"),
    ("NeuronLink per chip", "neuronlink_bytes_per_s"),
)

_PATH = re.compile(r"(?:[\w.-]+/)+(?=[\w{},-]+\.(?:rst|py|png))")


def value_text(number: Number) -> str:
    """A number with its unit as its source prints it: `96 GiB`, `64 cycles`, `1 or 2`."""
    if isinstance(number.value, tuple):
        return _tuple_text(number.value)
    return re.sub(r"^([0-9.]+)([A-Za-z])", r"\1 \2", number.text)


def _tuple_text(values: tuple[Any, ...]) -> str:
    if values and isinstance(values[0], tuple):
        return ", ".join(f"{key} B: {fraction:.1%}" for key, fraction in values)
    return " or ".join(map(str, values))


def specs(chip: Chip) -> list[dict[str, Any]]:
    """Every number of a chip: section, name, value, text, unit, status, source, note, conflict."""
    return [
        {
            "section": number.section.partition(".")[0],
            "name": key,
            "value": number.value,
            "unit": number.unit,
            "text": value_text(number),
            "status": number.status,
            "source": number.source,
            "note": number.note,
            "conflict": number.conflict,
        }
        for key, number in sorted(chip.numbers.items(), key=lambda item: _order(item[1]))
    ]


def _order(number: Number) -> int:
    return SECTIONS.index(number.section.partition(".")[0])


def specs_table(chip: Chip) -> Table:
    """The numbers of one chip with status and source, in sections."""
    rows = specs(chip)
    count = Counter(row["status"] for row in rows)
    caption = ", ".join(f"{count[status]} {status}" for status in STATUS_STYLE if count[status])
    caption += "; file names are those of the AWS Neuron documentation, full paths with --json"
    table = Table(box=SIMPLE_HEAD, title=f"{chip.title} ({chip.name})", caption=caption)
    table.add_column("number", no_wrap=True)
    table.add_column("value", max_width=30)
    table.add_column("status", no_wrap=True)
    table.add_column("source", overflow="fold")
    section = ""
    for row in rows:
        if row["section"] != section:
            section = row["section"]
            table.add_section()
            table.add_row(Text(section, style="bold"))
        status = Text(row["status"], style=STATUS_STYLE[row["status"]])
        table.add_row("  " + row["name"], row["text"], status, _source(row))
    return table


def _source(row: dict[str, Any]) -> Text:
    """Source, note and conflict, with the folders of the documentation left out."""
    text = Text(_PATH.sub("", row["source"]))
    for label in ("note", "conflict"):
        if row[label]:
            text.append(f"\n{label}: {_PATH.sub('', row[label])}", style="dim")
    return text


def overview_table(chips: Sequence[Chip]) -> Table:
    """The main numbers of several chips side by side; `*` marks one with a conflicting source."""
    table = Table(box=SIMPLE_HEAD, caption="* another public source disagrees; see specs CHIP")
    table.add_column("", no_wrap=True)
    for chip in chips:
        table.add_column(f"{chip.title} ({chip.name})")
    for label, key in OVERVIEW:
        table.add_row(label, *(_marked(chip.number(key)) for chip in chips))
    return table


def _marked(number: Number) -> str:
    counted = isinstance(number.value, int) and number.unit not in CANONICAL
    text = str(number.value) if counted else value_text(number)
    return text + "*" * bool(number.conflict)


def topology(instance: Instance, *, nodes: int = 1, lnc: int | None = None) -> dict[str, Any]:
    """Chips, cores, HBM per logical core, links and neighbours. Raises BadInput as `place` does."""
    check_nodes(instance, nodes)
    lnc = check_lnc(instance.chip, lnc)
    core = LogicalCore(instance.chip, lnc)
    one = fabric(instance, 1, lnc)
    return {
        "instance": instance.name,
        "nodes": nodes,
        "chip": instance.chip.name,
        "topology": instance.topology,
        "dims": list(instance.dims),
        "lnc": lnc,
        "chips": nodes * instance.chips,
        "physical_cores": nodes * instance.physical_cores,
        "logical_cores": nodes * instance.logical_cores(lnc),
        "hbm_bytes_per_logical_core": core.hbm_bytes,
        "hbm_stack_bytes": instance.chip.stack_bytes,
        "logical_cores_per_hbm_stack": core.sharers,
        "hbm_bytes_per_s_per_logical_core": core.hbm_bytes_per_s,
        "bf16_flops_per_logical_core": core.peak("bf16"),
        "efa_bytes_per_s_per_node": instance.efa_bytes_per_s,
        "efa_interfaces_per_node": instance.efa_devices,
        "links": _links(instance, one),
        "neighbours": {
            one.names[node]: one.neighbours(one.names[node]) for node in one.chips.tolist()
        },
    }


def _links(instance: Instance, one: Fabric) -> list[dict[str, Any]]:
    """The kinds of link: ends, how many (one direction each), rate and latency."""
    chip = instance.chip
    found = Counter(
        (one.kinds[a], one.kinds[b], int(rate), int(latency))
        for a, b, rate, latency in zip(one.source, one.target, one.rate, one.latency, strict=True)
        if a != b
    )
    rows = [
        _link(_level(chip, rate), f"{a} to {b}", count, rate, latency, chip)
        for (a, b, rate, latency), count in found.items()
    ]
    lnc = chip.cores * instance.chips // one.ranks
    rate, latency = chip.on_chip_bytes_per_s, chip.on_chip_latency_ps
    key = "on_chip_bytes_per_s"
    rows.insert(0, _link(key, "rank to chip", one.ranks, rate * lnc, latency, chip))
    if instance.efa_devices:
        rate, latency = interface_rate(instance), chip.efa_latency_ps
        row = _link("efa", "nic to nic", instance.efa_devices, rate, latency, chip)
        rows.append(row | {"status": instance.numbers["efa_bytes_per_s"].status})
    return rows


def _level(chip: Chip, rate: int) -> str:
    names = [name for name in chip.link_bytes_per_s if chip.link_rate(name) == rate]
    return f"link_bytes_per_s.{names[0]}"


def _link(key: str, ends: str, count: int, rate: int, latency: int, chip: Chip) -> dict[str, Any]:
    status = chip.numbers[key].status if key in chip.numbers else ""
    return {
        "kind": key.removeprefix("link_bytes_per_s.").removesuffix("_bytes_per_s"),
        "ends": ends,
        "count": count,
        "bytes_per_s": rate,
        "latency_ps": latency,
        "status": status,
    }


def topology_view(instance: Instance, *, nodes: int = 1, lnc: int | None = None) -> Group:
    """The same for a terminal: summary, links, and the neighbours of each chip of one node."""
    facts = topology(instance, nodes=nodes, lnc=lnc)
    return Group(_summary(instance, facts), _link_table(facts), _chip_table(instance, facts))


def _summary(instance: Instance, facts: dict[str, Any]) -> Table:
    chip, each = instance.chip, facts["logical_cores_per_hbm_stack"]
    nodes = f"{facts['nodes']} x " if facts["nodes"] > 1 else ""
    table = Table(box=None, show_header=False, title=nodes + instance.name, title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    dims = " x ".join(map(str, facts["dims"]))
    shape = f"{facts['topology']} {dims}".strip()
    table.add_row("chips", f"{facts['chips']} {chip.title} ({shape})")
    table.add_row("physical cores", f"{facts['physical_cores']} ({chip.cores} per chip)")
    per_chip = logical_per_chip(chip, facts["lnc"])
    table.add_row(
        "logical cores", f"{facts['logical_cores']} at LNC={facts['lnc']} ({per_chip} per chip)"
    )
    shared = f", half of a {format_bytes(chip.stack_bytes)} stack" if each == 2 else ""
    hbm = f"{format_bytes(facts['hbm_bytes_per_logical_core'])}{shared}"
    rate = format_rate(facts["hbm_bytes_per_s_per_logical_core"])
    table.add_row("HBM per logical core", f"{hbm}, {rate}")
    flops = facts["bf16_flops_per_logical_core"] / 1e12
    table.add_row("bf16 per logical core", f"{flops:g} TFLOP/s")
    table.add_row("EFA per node", _efa(facts))
    return table


def _efa(facts: dict[str, Any]) -> str:
    if not facts["efa_bytes_per_s_per_node"]:
        return "none"
    many = facts["efa_interfaces_per_node"]
    plural = "s" * (many > 1)
    return f"{format_rate(facts['efa_bytes_per_s_per_node'])}, {many} interface{plural}"


def _link_table(facts: dict[str, Any]) -> Table:
    caption = "per node; rates per link and direction"
    table = Table(box=SIMPLE_HEAD, caption=caption, caption_justify="left")
    for name in ("link", "ends"):
        table.add_column(name)
    for name in ("links", "rate", "latency"):
        table.add_column(name, justify="right")
    table.add_column("rate is")
    for row in facts["links"]:
        rate, latency = format_rate(row["bytes_per_s"]), format_time(row["latency_ps"])
        status = Text(row["status"], style=STATUS_STYLE[row["status"]])
        kind = row["kind"].replace("_", " ")
        table.add_row(kind, row["ends"], str(row["count"]), rate, latency, status)
    return table


def _chip_table(instance: Instance, facts: dict[str, Any]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    for name in ("chip", "logical cores", "physical cores", "neighbours"):
        table.add_column(name)
    chip, per_chip = instance.chip, logical_per_chip(instance.chip, facts["lnc"])
    for index, near in enumerate(facts["neighbours"].values()):
        names = ", ".join(sorted((n.removeprefix("chip") for n in near), key=_natural)) or "none"
        table.add_row(str(index), _span(index, per_chip), _span(index, chip.cores), names)
    return table


def _span(index: int, size: int) -> str:
    first = index * size
    return str(first) if size == 1 else f"{first}-{first + size - 1}"


def _natural(name: str) -> tuple[bool, int, str]:
    return (not name.isdigit(), int(name) if name.isdigit() else 0, name)
