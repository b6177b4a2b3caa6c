"""Placement studies: the optimum of small tori, defaults that are worse, rank files."""

from pathlib import Path
from random import Random

import numpy as np
import pytest

from trnsim.cluster.collective import file_site
from trnsim.cluster.mesh import parse_mesh
from trnsim.cluster.placing import positions
from trnsim.cluster.placing.command import PlaceRun
from trnsim.cluster.placing.local_search import exhaustive
from trnsim.cluster.placing.rank_file import Cores, rank_file, read_rank_file
from trnsim.cluster.placing.score import Scorer
from trnsim.cluster.placing.study import study
from trnsim.cluster.placing.traffic import Traffic, parse_demand
from trnsim.device.errors import BadInput


def scorer(folder: Path, torus: list[int], mesh: str, traffic: list[str], seed: int) -> Scorer:
    """A torus whose chips have ranks in a drawn order."""
    chips = [f"chip{i}" for i in range(int(np.prod(torus)))]
    Random(seed).shuffle(chips)
    file = folder / "torus.toml"
    file.write_text(
        f'[part.box]\ntorus = {torus}\nbandwidth = "50GB/s"\nlatency = "500ns"\n'
        f"[ranks]\non = {chips}\n".replace("'", '"')
    )
    shape = parse_mesh(mesh)
    demands = Traffic.of(parse_demand(text, shape) for text in traffic)
    return Scorer(file_site(file)[0], shape, demands, "ring")


@pytest.mark.parametrize(
    ("torus", "mesh", "traffic"),
    [
        ([2, 3], "dp=2,tp=3", ["tp=all_reduce:1MiB:8", "dp=all_reduce:4MiB"]),
        ([2, 3], "dp=3,tp=2", ["tp=all_reduce:1MiB:8", "dp=all_reduce:4MiB"]),
        ([6], "tp=6", ["tp=all_reduce:6MiB"]),
        ([2, 2], "dp=2,tp=2", ["tp=all_reduce:1MiB", "dp=all_reduce:1MiB"]),
    ],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_search_finds_the_optimum_of_small_tori(tmp_path, torus, mesh, traffic, seed):
    scores = scorer(tmp_path, torus, mesh, traffic, seed)
    found = study(scores, positions.of_fabric(scores.site.fabric), seed=seed)
    assert found.best.score.total == exhaustive(scores).score.total
    assert found.best.score.total <= found.default.score.total


def test_best_of_a_shuffled_ring_is_the_closed_form(tmp_path):
    scores = scorer(tmp_path, [6], "tp=6", ["tp=all_reduce:6MiB"], 0)
    found = study(scores, positions.of_fabric(scores.site.fabric))
    step = 2**19 * 20 + 500_000  # ps: half a chunk each way round, at 50 GB/s over one hop
    assert found.best.score.total == 10 * step


ASKED = dict(
    instance="trn2-ultraserver", nodes=1, lnc=None, fabric_file=None, mesh="dp=4,tp=64",
    demands=("dp=all_reduce:64MiB", "tp=all_reduce:64MiB"), dtype="bf16", algorithm="policy",
    files=(), candidates=20, search_steps=10, seed=0, degraded=(), failed=(),
)  # fmt: skip


def test_default_on_an_ultraserver_is_worse_when_data_parallel_traffic_is_heavy(tmp_path):
    run = PlaceRun.of(**ASKED)
    found = run.run()
    assert found.gain > 0.2
    again = PlaceRun.of(**ASKED).run()
    names = [[item.candidate.name for item in each.ranking] for each in (found, again)]
    assert names[0] == names[1]
    file = tmp_path / "ranks"
    file.write_text(rank_file(found.best.candidate.slots, run.cores, run.title))
    assert (read_rank_file(file, run.cores, 256) == found.best.candidate.slots).all()
    given = PlaceRun.of(**ASKED | dict(files=(str(file),), candidates=1, search_steps=0)).run()
    assert given.best.score.total == found.best.score.total


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rank 0=node0 slot=0:0\n", "1 ranks is not valid; allowed: 2: rank 1 is missing"),
        ("rank 0=node0 slot=0:0\nrank 1=node0 slot=0:0\n", "a core not of rank 0"),
        ("rank 0=node0 slot=9:0\n", "line 1: chip: 9 is not valid; allowed: 0 to 3"),
        ("rank 0=node0\n", "line 1: 'rank 0=node0' is not valid"),
    ],
)
def test_wrong_rank_files(tmp_path, text, message):
    file = tmp_path / "ranks"
    file.write_text(text)
    with pytest.raises(BadInput, match=message):
        read_rank_file(file, Cores(1, 4, 4), 2)
