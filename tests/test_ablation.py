"""The paper's ablation tables: each row has a config and a command, and the toy's runs print through the same command."""

import contextlib
import json
import re
import shlex

import pytest
from evaluations import lines, write_results
from scripts import REPO

import eval as evaluation
import rl
from eval import EvalConfig
from evals import rows, tables
from evals.tables import read_published
from rl import RLConfig
from runtime import config

PAGE = (REPO / "docs" / "node.md").read_text("utf-8")
SECTION = PAGE.partition("## Every row of the paper")[2].partition("\n## ")[0]


def train(folder, f: list[float], kappa: list[float]) -> None:
    folder.mkdir(parents=True)
    steps = [{"step": i, "f": f, "f_release": f / 2, "kappa": k} for i, (f, k) in enumerate(zip(f, kappa, strict=True))]
    text = "".join(json.dumps(step) + "\n" for step in steps)
    (folder / "metrics.jsonl").write_text(text + '{"step": 9, "f": 0.')  # a running training's last line


@pytest.fixture
def toy(tmp_path):
    """The toy's runs: the cold start, GRPO and PARA-GRPO, the last with both dispatches. The others are missing."""
    train(tmp_path / "grpo", [0.4, 0.2, 0.0], [2.0, 1.0, 0.0])
    train(tmp_path / "paragrpo", [0.4, 1.0], [2.0, 2.0])
    write_results(tmp_path / "eval/sft", "toy", lines("1100"), k=4)
    write_results(tmp_path / "eval/paragrpo", "toy", lines("1110"), k=4)
    write_results(tmp_path / "eval/paragrpo", "toy", lines("1010"), k=4, arm="sequential")
    write_results(tmp_path / "eval/paragrpo", "lvbench", lines("1", tagged=False), total=1549)  # in prose, as published
    return tmp_path


def test_the_toys_ablation_prints_beside_the_papers(toy, golden, capsys):
    """What is missing is empty, and the paper's f stands in the column of its scale."""
    tables.main(["ablation", f"{toy}/NAME", f"{toy}/eval/NAME"])
    golden("eval_ablation.txt", capsys.readouterr().out)


def test_a_start_has_the_first_step_of_plain_grpo_and_a_training_the_mean_of_its_steps(toy):
    places = f"{toy}/NAME", f"{toy}/eval/NAME"
    start = tables.ablation_cells({"run": "grpo", "steps": 1, "eval": "sft"}, *places)
    assert start == {"steps": "1", "f": "0.40", "f_release": "0.20", "kappa": "2.00", "toy, K=4": "50.0"}
    mean = tables.ablation_cells({"run": "grpo"}, *places)
    assert mean == {"steps": "3", "f": "0.20", "f_release": "0.10", "kappa": "1.00"}
    assert tables.ablation_cells({"eval": "paragrpo", "arm": "sequential"}, *places) == {"toy, K=4": "50.0"}


@pytest.mark.parametrize("place, named", [("nowhere/NAME", "nowhere/NAME"), ("runs/toy", "runs/toy: write NAME")])
def test_a_place_without_runs_is_refused(place, named):
    with pytest.raises(SystemExit, match=f"error: .*{named}"):
        tables.main(["ablation", place, "runs/eval/NAME"])


# ------------------------------------------------------------------------------------------------ docs/node.md


def commands(script: str) -> list[tuple[str, ...]]:
    """Return the config and the overrides of each command in the columns of a script."""
    found = []
    for table in re.findall(r"^\| row .*?(?=\n\n)", SECTION, re.M | re.S):
        header, _, *rows = ([cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines())
        for row in rows:
            for title, cell in zip(header, row, strict=True):
                if script in title and cell.startswith("`"):
                    found.append(tuple(shlex.split(cell.split("`")[1])))
    for words in re.findall(rf"^python {script} (configs/.*)", SECTION, re.M):
        found.append(tuple(shlex.split(words, comments=True)))
    return found


def test_every_row_of_the_paper_is_in_the_tables():
    published = read_published()
    named = re.findall(r"^\| ([^|]+?) \|", SECTION, re.M)
    assert {row["name"] for row in published["table"]["rows"]} <= set(named)
    for splits in published["table"]["columns"]:
        assert f"`{splits}`" in SECTION
    # The names that `eval.py ablation` looks for are those of the configs.
    trainings = {config.load(RLConfig, REPO / file, words).run for file, *words in commands("rl.py")}
    evaluations = set()
    for file, *words in commands("eval.py"):
        evaluations.add(evaluation.with_names(rows.load(EvalConfig, REPO / file, words)).run)
    for block in tables.TITLES:
        for row in published["ablations"][block]:
            assert "run" not in row or f"runs/{row['run']}_8b" in trainings
            assert f"runs/eval/own/{row.get('eval') or row['run']}_8b" in evaluations


@pytest.mark.parametrize("words", commands("rl.py"), ids=lambda words: words[0].split("/")[-1])
def test_the_dry_run_of_each_training_lacks_only_its_start(words, toy_dir, capsys):
    rows = [f"data.sources=[{{path: {toy_dir}/rl.parquet}}]", f"data.video_root={toy_dir}"]
    cfg = config.load(RLConfig, REPO / words[0], [*words[1:], *rows])
    start = cfg.policy.checkpoint
    lacks_start = pytest.raises(config.ConfigError, match=f"{start}: neither a folder nor a model on the hub")
    with lacks_start if start.startswith("runs/") else contextlib.nullcontext():
        rl.main(cfg, dry=True)
    assert "data: " in capsys.readouterr().out
