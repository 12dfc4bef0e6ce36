"""The paper's ablation tables: each row has a config and a command, and the toy's runs print through the same command."""

import contextlib
import json
import re
import shlex
import subprocess

import pytest
from scripts import REPO, line, lines, sections, write_results

import eval as evaluation
import rl
from eval import EvalConfig
from evals import rows, tables
from evals.tables import read_published
from rl import RLConfig
from runtime import config
from runtime.dataset import DataError

PAGE = (REPO / "docs" / "node.md").read_text("utf-8")
SECTION = PAGE.partition("## Every row of the paper")[2].partition("\n## ")[0]


def train(folder, f: list[float], kappa: list[float]) -> None:
    folder.mkdir(parents=True)
    steps = [{"step": i, "f": f, "f_release": f / 2, "kappa": k} for i, (f, k) in enumerate(zip(f, kappa, strict=True))]
    text = "".join(json.dumps(step) + "\n" for step in steps)
    (folder / "metrics.jsonl").write_text(text + '{"step": 9, "f": 0.')  # a running training's last line


@pytest.fixture
def toy(tmp_path):
    """The toy's runs: the cold start, GRPO and PARA-GRPO, the last with both dispatches."""
    train(tmp_path / "grpo", [0.4, 0.2, 0.0], [2.0, 1.0, 0.0])
    train(tmp_path / "paragrpo", [0.4, 1.0], [2.0, 2.0])
    results = tmp_path / "eval"
    results.mkdir()
    write_results(results / "sft", "toy", lines("1100"), k=4)
    write_results(results / "paragrpo", "toy", lines("1110"), k=4)
    write_results(results / "paragrpo", "toy", lines("1010"), k=4, arm="sequential")
    prose = line("a", 1, tagged=False)
    write_results(results / "paragrpo", "lvbench", [prose], total=1549)
    return tmp_path


def cells(table: list[list[str]], row: str, source: str = "ours") -> dict[str, str]:
    header, _, *rows = table
    [found] = [cells for cells in rows if cells[:2] == [row, source]]
    return dict(zip(header[2:], found[2:], strict=True))


def test_the_toys_ablation_prints_beside_the_papers(toy, capsys):
    tables.main(["ablation", f"{toy}/NAME", f"{toy}/eval/NAME"])
    found = sections(capsys.readouterr().out)
    stages, components, dispatch = (next(found[title] for title in found if title[0] == letter) for letter in "ABC")
    dash = dict.fromkeys(("videomme", "videomme_wsub", "mlvu", "lvbench", "toy, K=4"), "")
    # A start has the first step of plain GRPO from it, and a training the mean of its steps.
    start = {"steps": "1", "f": "0.40", "f_release": "0.20", "kappa": "2.00"}
    assert cells(stages, "+SFT") == dash | start | {"toy, K=4": "50.0"}
    mean = {"steps": "3", "f": "0.20", "f_release": "0.10", "kappa": "1.00"}
    assert cells(stages, "+SFT+GRPO") == cells(components, "SFT+GRPO") == dash | mean
    ours = cells(components, "Full PARA-GRPO")
    assert ours == cells(stages, "+SFT+PARA-GRPO") and (ours["f"], ours["steps"], ours["toy, K=4"]) == (
        "0.70",
        "2",
        "75.0",
    )
    assert ours["lvbench"] == "100.0 (1 of 1549)"  # in prose, as the published scores
    # What is missing is empty, and the paper's f stands in the column of its scale.
    assert set(cells(stages, "Qwen3-VL-8B").values()) == set(cells(components, "-R_tool").values()) == {""}
    paper = cells(stages, "+SFT", "paper")
    assert (paper["f"], paper["f_release"], paper["kappa"], paper["lvbench"]) == ("", "0.13", "2.5", "39.1")
    assert cells(dispatch, "sequential")["toy, K=4"] == "50.0" and cells(dispatch, "parallel")["toy, K=4"] == "75.0"
    assert "kappa" not in cells(dispatch, "parallel") and cells(dispatch, "sequential", "paper")["lvbench"] == "37.5"


def test_a_place_without_runs_is_refused(tmp_path):
    for words, told in (
        (
            [f"{tmp_path}/NAME", f"{tmp_path}/eval/NAME"],
            f"nothing at {tmp_path}/NAME or {tmp_path}/eval/NAME, with NAME = grpo",
        ),
        (["runs/toy", "runs/eval/NAME"], "runs/toy: write NAME where the rows' names differ, as in runs/NAME_8b"),
    ):
        with pytest.raises(SystemExit, match=f"error: {told}"):
            tables.main(["ablation", *words])


# ------------------------------------------------------------------------------------------------ node.sh


PRINTED = subprocess.run(["bash", "node.sh", "--print"], cwd=REPO, capture_output=True, text=True, check=True).stdout


def commands(script: str) -> list[tuple[str, ...]]:
    """Return the config and the overrides of each command of a script, in node.sh and in the page's section on the rows."""
    found = re.findall(rf"^(?:python|torchrun .*) {script} (configs/.*)", PRINTED + SECTION, re.M)
    return [tuple(shlex.split(words, comments=True)) for words in found]


def test_every_row_of_the_ablations_is_trained_and_evaluated():
    published = read_published()
    # The names that `eval.py ablation` looks for are those of the configs.
    trainings = {config.load(RLConfig, REPO / file, words).run for file, *words in commands("rl.py")}
    evaluations = set()
    for file, *words in commands("eval.py"):
        evaluations.add(evaluation.with_names(rows.load(EvalConfig, REPO / file, words)).run)
    for block in tables.TITLES:
        for row in published["ablations"][block]:
            assert "run" not in row or f"runs/{row['run']}_8b" in trainings
            assert f"runs/eval/own/{row.get('eval') or row['run']}_8b" in evaluations


QWEN25 = [(f"configs/{name}_qwen25vl_7b.yaml",) for name in ("grpo", "paragrpo")]


@pytest.mark.parametrize("words", commands("rl.py") + QWEN25, ids=lambda words: words[0].split("/")[-1])
def test_the_dry_run_of_each_training_lacks_only_its_start(words, toy_dir, capsys):
    rows = [f"data.sources=[{{path: {toy_dir}/rl.parquet}}]", f"data.video_root={toy_dir}"]
    cfg = config.load(RLConfig, REPO / words[0], [*words[1:], *rows])
    start = cfg.policy.checkpoint
    lacks_start = pytest.raises(config.ConfigError, match=f"{start}: neither a folder nor a model on the hub")
    with lacks_start if start.startswith("runs/") else contextlib.nullcontext():
        rl.main(cfg, dry=True)
    assert "data: " in capsys.readouterr().out


@pytest.mark.parametrize("words", commands("eval.py"), ids=" ".join)
def test_the_dry_run_of_each_evaluation_names_all_data_that_are_missing(words):
    cfg = rows.load(EvalConfig, REPO / words[0], words[1:])
    with pytest.raises(DataError) as missing:
        evaluation.main(cfg, dry=True)
    told = dict(line.split(": ", 1) for line in str(missing.value).splitlines())
    assert set(told) == set(cfg.splits)
    assert all("hf download" in told[split] for split in cfg.splits)
