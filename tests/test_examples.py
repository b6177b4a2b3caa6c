"""The studies of examples/ in a small form, and the pages of the documentation."""

import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import click
import pytest

from trnsim.cluster import cli
from trnsim.cluster.studies.definition import Study, read_study
from trnsim.cluster.studies.run import StudyRun
from trnsim.cluster.studies.runners import RUNNERS, runner
from trnsim.cluster.studies.table import StudyTable

ROOT = Path(__file__).parents[1]
STUDIES = sorted((ROOT / "examples" / "studies").glob("*.toml"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SMALL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048,
    "intermediate_size": 4096, "num_hidden_layers": 4, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 32768, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip


def study(name: str) -> Study:
    return read_study(ROOT / "examples" / "studies" / f"{name}.toml", tuple(RUNNERS))


def small_plans(name: str, folder: Path, keep) -> StudyTable:
    """A study of plans with a small model and the points that are kept."""
    (folder / "config.json").write_text(json.dumps(SMALL))
    whole = study(name)
    fixed = {**whole.fixed, "model": str(folder / "config.json"), "seq": 1024}
    points = tuple(point for point in whole.points if keep(point))
    cut = replace(whole, fixed=fixed, points=points)
    return StudyRun(cut, folder / "out", "local", None).run(lambda done, total: None)


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_all_points_of_a_study_have_known_options(path: Path) -> None:
    whole = read_study(path, tuple(RUNNERS))
    for point in whole.points:
        runner(whole.run).parameters({**whole.fixed, **point})


@pytest.mark.parametrize("kind", ["weak", "strong"])
def test_scaling_from_1_to_1024_nodes(kind: str, tmp_path: Path) -> None:
    table = small_plans(f"scale_out_{kind}", tmp_path, lambda p: p["nodes"] in (1, 32, 1024))
    rows = table.rows
    assert [(row["nodes"], row["refused"]) for row in rows] == [(1, ""), (32, ""), (1024, "")]
    speeds = [row["tokens_per_s"] / row["nodes"] for row in rows]
    steps = [row["step_s"] for row in rows]
    assert speeds[0] >= speeds[1] > speeds[2] > 0.1 * speeds[0]
    assert rows[0]["exposed_communication"] < rows[2]["exposed_communication"] < 1
    assert steps == sorted(steps, reverse=kind == "strong")
    picture = tmp_path / "out" / "scaling-nodes-tokens_per_s.svg"
    assert f"{kind} scaling" in picture.read_text()


def test_llama_on_ultraservers(tmp_path: Path) -> None:
    table = small_plans(
        "llama3_70b_ultraservers", tmp_path, lambda p: p["pp"] == 2 and p["tp"] * p["lnc"] == 32
    )
    done = {(row["instance"], row["lnc"], row["tp"]): row for row in table.rows}
    assert {row["refused"] for row in table.rows} == {""}
    for lnc, tp in ((1, 32), (2, 16)):
        old, new, large = (
            done[f"{name}-ultraserver", lnc, tp] for name in ("trn2", "trn3-gen1", "trn3-gen2")
        )
        assert (old["chips"], new["chips"], large["chips"]) == (64, 64, 144)
        assert old["step_s"] > new["step_s"] > large["step_s"]
        assert old["memory_gib"] == new["memory_gib"] > large["memory_gib"]
        assert 0 < old["mfu"] < 1


def test_a_default_placement_that_is_worse() -> None:
    whole = study("placement")
    gains = {}
    for point in whole.points[:3]:
        row = runner("place").run({**whole.fixed, **point, "search_steps": 0})
        gains[point["mesh"]] = row["default_us"] / row["best_us"]
    assert gains["dp=4,tp=16"] == 1
    assert gains["dp=2,tp=32"] > 1.05
    assert gains["dp=8,ep=8"] > 1.1


# ---- pages ---------------------------------------------------------------------------------------


def documented() -> list[str]:
    """The commands whose output is in a page."""
    block = re.compile(r"^```\n\$ ((?:.*\\\n)*.*)\n", re.MULTILINE)
    pages = (page.read_text() for page in PAGES)
    return [match.replace("\\\n", " ") for text in pages for match in block.findall(text)]


@pytest.mark.parametrize("line", documented())
def test_documented_commands_are_accepted(line: str) -> None:
    """Options exist and take these values, and files of examples are there."""
    program, name, *words = shlex.split(line.partition("|")[0])
    command = cli.cli.commands[name]
    assert program == "trnsim" and isinstance(command, click.Command)
    command.make_context(name, list(words))
    for word in words:
        file = word.partition(":")[0]
        assert not file.startswith("examples/") or (ROOT / file).is_file(), file


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        file, _, heading = target.partition("#")
        if target.startswith("http"):
            continue
        there = page.parent / file if file else page
        assert there.exists(), target
        if there.suffix == ".png":
            assert there.stat().st_size < 200_000
        if heading:
            heads = re.findall(r"^#+ (.*)$", there.read_text(), re.MULTILINE)
            assert heading in {re.sub(r"[^\w-]", "", h.lower().replace(" ", "-")) for h in heads}


def test_outputs_are_put_in_place(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n\n```\n$ echo one \\\n  two | tr o 0\nold\nlines\n```\n\nb\n")
    script = [sys.executable, str(ROOT / "docs" / "outputs.py")]
    assert subprocess.run([*script, "--check", str(page)], check=False).returncode == 1
    subprocess.run([*script, str(page)], check=True)
    assert page.read_text() == "a\n\n```\n$ echo one \\\n  two | tr o 0\n0ne tw0\n```\n\nb\n"
    assert subprocess.run([*script, "--check", str(page)], check=False).returncode == 0


def test_make_bench_runs_all_benchmarks() -> None:
    programs = {p.name for p in (ROOT / "benchmarks").glob("*.py") if "__main__" in p.read_text()}
    recipe = (ROOT / "Makefile").read_text().partition("\nbench:")[2].partition("\n\n")[0]
    assert set(re.findall(r"benchmarks/(\w+\.py)", recipe)) == programs
