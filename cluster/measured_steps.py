"""Measured training steps to calibrate on, read from files in TOML.

A file has a table `[[step]]` for each, as device/specs/measured_steps.toml, which is shipped: what
`trnsim plan` is asked, and the sequences per second that were measured.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any

from trnsim.device.errors import BadFile, TrnsimError
from trnsim.device.units import PS_PER_S

from .plans.plan import Plan


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """A training step that somebody ran: the plan's fields as `trnsim plan` takes them.

    others: what else is known of it, for the reader.
    """

    name: str
    model: str
    instance: str
    mesh: str
    seq: int
    global_batch: int
    sequences_per_s: float
    source: str
    nodes: int = 1
    lnc: int | None = None
    microbatch: int = 1
    zero: str = "none"
    recompute: str = "none"
    schedule: str = "1f1b"
    others: str = ""

    def __post_init__(self) -> None:
        if not 0 < self.sequences_per_s < float("inf"):
            raise BadFile(f"{self.name}: sequences_per_s {self.sequences_per_s} is not above 0")

    @property
    def ps(self) -> float:
        """The measured step."""
        return self.global_batch / self.sequences_per_s * PS_PER_S

    def plan(self) -> Plan:
        """The same step as a plan. Raises BadInput for one that trnsim refuses."""
        return Plan.of(
            self.model, instance=self.instance, nodes=self.nodes, lnc=self.lnc, mesh=self.mesh,
            seq=self.seq, global_batch=self.global_batch, microbatch=self.microbatch,
            zero=self.zero, recompute=self.recompute, schedule=self.schedule,
        )  # fmt: skip


def shipped_steps() -> list[MeasuredStep]:
    """The measured steps that come with trnsim."""
    name = "measured_steps.toml"
    return parse_steps((resources.files("trnsim.device.specs") / name).read_text("utf-8"), name)


def read_steps(path: str | Path) -> list[MeasuredStep]:
    """The steps of a file. Raises BadFile naming the step and the field."""
    try:
        return parse_steps(Path(path).read_text("utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise BadFile(f"{path}: {getattr(error, 'strerror', None) or error}") from None


def parse_steps(text: str, where: str) -> list[MeasuredStep]:
    """The steps of a text; `where` is what errors call it."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadFile(f"{where}: {error}") from None
    rows = tables.pop("step", [])
    if tables or not isinstance(rows, list) or not rows:
        raise BadFile(f"{where}: needs tables [[step]], and nothing else")
    return [_step(row, where) for row in rows]


def _step(row: Mapping[str, Any], where: str) -> MeasuredStep:
    name = f"{where}: step {row.get('name', 'without a name')}"
    known = {item.name: item for item in fields(MeasuredStep)}
    unknown = sorted(row.keys() - known.keys())
    missing = [n for n, item in known.items() if item.default is MISSING and n not in row]
    if unknown or missing:
        said = [f"unknown {', '.join(unknown)}"] if unknown else []
        said += [f"{', '.join(missing)} missing"] if missing else []
        raise BadFile(f"{name}: {'; '.join(said)}")
    try:
        return MeasuredStep(**row)
    except (TrnsimError, TypeError) as error:
        raise BadFile(f"{name}: {error}") from None
