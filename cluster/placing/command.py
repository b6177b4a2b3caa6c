"""One call of `trnsim place`: its options as a study that can be run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from trnsim.device.errors import BadInput

from ..collective import Site, file_site, instance_site
from ..conditions import parse_degraded, with_failures, with_rates
from ..instances import Instance, load_instance
from ..lnc import logical_per_chip
from ..mesh import Mesh, parse_mesh
from ..placement import place
from . import positions
from .positions import Positions
from .rank_file import Cores, read_rank_file
from .score import Scorer
from .study import PlacementStudy, study
from .traffic import Traffic, parse_demand


@dataclass(frozen=True, eq=False)
class PlaceRun:
    """What to place and where. `run` prices the candidates and searches."""

    scorer: Scorer
    positions: Positions
    instance: Instance | None
    cores: Cores
    given: Mapping[str, np.ndarray]
    most: int
    steps: int
    seed: int

    @classmethod
    def of(cls, **asked: Any) -> "PlaceRun":
        """From the options of the command. Raises TrnsimError for whatever does not fit."""
        for name, least in (("candidates", 1), ("search_steps", 0)):
            if asked[name] < least:
                option = f"--{name.replace('_', '-')}"
                raise BadInput(option, asked[name], f"{least} or more", least)
        mesh = parse_mesh(asked["mesh"])
        found = _fabric(mesh, asked) if asked["fabric_file"] is not None else _nodes(mesh, asked)
        site, where, instance, cores = found
        fabric = with_rates(site.fabric, dict(map(parse_degraded, asked["degraded"])))
        site = replace(site, fabric=with_failures(fabric, asked["failed"]))
        traffic = _traffic(mesh, asked["demands"], asked["dtype"])
        return cls(
            scorer=Scorer(site, mesh, traffic, asked["algorithm"]),
            positions=where,
            instance=instance,
            cores=cores,
            given={str(f): read_rank_file(f, cores, mesh.size) for f in asked["files"]},
            most=asked["candidates"],
            steps=asked["search_steps"],
            seed=asked["seed"],
        )

    @property
    def title(self) -> str:
        """Where and what."""
        return f"{self.scorer.site.title}, mesh {self.scorer.mesh}"

    def run(self, advance: Callable[[], object] = lambda: None) -> PlacementStudy:
        """The ranking; calls `advance` for each placement that is priced."""
        return study(
            self.scorer,
            self.positions,
            self.instance,
            given=self.given,
            most=self.most,
            steps=self.steps,
            seed=self.seed,
            advance=advance,
        )


_Where = tuple[Site, Positions, Instance | None, Cores]


def _fabric(mesh: Mesh, asked: Mapping[str, Any]) -> _Where:
    if asked["lnc"] is not None or asked["nodes"] != 1:
        raise BadInput("--fabric", asked["fabric_file"], "without --nodes and --lnc")
    site, _ = file_site(asked["fabric_file"])
    ranks = site.fabric.ranks
    if mesh.size > ranks:
        raise BadInput("mesh", f"{mesh} ({mesh.size} ranks)", f"at most {ranks} ranks", ranks)
    return site, positions.of_fabric(site.fabric), None, Cores(1, 1, ranks, named=False)


def _nodes(mesh: Mesh, asked: Mapping[str, Any]) -> _Where:
    instance, nodes = load_instance(asked["instance"]), asked["nodes"]
    site = instance_site(asked["instance"], nodes=nodes, lnc=asked["lnc"])
    lnc = site.lnc or instance.chip.lnc_default
    place(instance, mesh, nodes=nodes, lnc=lnc)  # refuses what does not fit
    cores = Cores(nodes, instance.chips, logical_per_chip(instance.chip, lnc))
    return site, positions.of_instance(instance, nodes, lnc), instance, cores


def _traffic(mesh: Mesh, demands: Sequence[str], dtype: str) -> Traffic:
    if not demands:
        raise BadInput("--traffic", "(missing)", "what a step moves, as tp=all_reduce:64MiB:160")
    traffic = Traffic.of(parse_demand(text, mesh, dtype) for text in demands)
    if not traffic.demands:
        raise BadInput("--traffic", ", ".join(demands), "an axis of degree above 1")
    return traffic


def check_folder(path: Path | None) -> None:
    """Raises BadInput unless the folder of a file to be written exists."""
    if path is not None and not path.absolute().parent.is_dir():
        raise BadInput("file", path, "a name in a folder that exists")
