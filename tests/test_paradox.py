"""The study: all rows share start and budget, stages run in order and once, and claims compare figures seed by seed."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from evaluations import line, write_results
from scripts import REPO

from eval import EvalConfig
from rl import RLConfig
from runtime import config
from study import paradox, toy
from study.paradox import CLAIMS, ROWS

SEED1 = paradox.stages_of(Path("runs/paradox"), 1, ROWS)
FOLDER = "runs/paradox/seed1"


def configs(cls: type, stage: int) -> dict[str, RLConfig | EvalConfig]:
    """Return the configs of a stage of seed 1, by the folders of their runs."""
    loaded = [config.load(cls, str(REPO / name), changes) for _, name, *changes in SEED1[stage].values()]
    return {Path(cfg.run).name: cfg for cfg in loaded}


TRAINED = configs(RLConfig, 2)
ASKED = configs(EvalConfig, 3)

# ------------------------------------------------------------------------------------------------ the jobs


def test_what_a_job_reads_was_made_in_a_stage_before():
    made = set()
    for stage in SEED1:
        commands = [" ".join(command) for command in stage.values()]
        own = {re.search(r"(?:\brun=|toy build )(\S+)", command)[1] for command in commands}
        assert set(re.findall(rf"{FOLDER}/(?!eval)[\w-]+", " ".join(commands))) <= made | own
        made |= own
    assert len(made) == 2 + 10 + len(ROWS)


def test_all_rows_of_a_seed_have_the_same_start_and_the_same_budget():
    for name, cfg in TRAINED.items():
        assert cfg.run == f"{FOLDER}/{name}"
        assert cfg.policy.checkpoint == f"{FOLDER}/sft/model"
        assert [source.path for source in cfg.data.sources] == [f"{FOLDER}/sft-toy/rl.parquet"]
        assert cfg.seed == cfg.data.seed == 1
        assert (cfg.steps, cfg.batch_tasks, cfg.grpo.group_size, cfg.optim.lr) == (60, 8, 8, 3e-4)


def test_a_row_and_its_control_differ_in_what_the_title_says():
    rows = {name: replace(cfg, run="run") for name, cfg in TRAINED.items()}
    para, full = rows["paragrpo"], rows["paragrpo_full"]
    off = replace(para.reward, anchor=replace(para.reward.anchor, credit="off"))
    assert rows["prefix_only"] == replace(para, reward=off)
    assert rows["anchor_only"] == replace(para, rollout=replace(para.rollout, think_prefix=False))
    assert rows["anchoring"] == replace(para, gating=())
    assert rows["gating"] == replace(rows["grpo"], gating=para.gating)
    assert rows["no_tool_reward"] == replace(full, reward=replace(full.reward, w_tool=0))


def test_evaluations_differ_in_their_model_and_the_dispatch():
    for name, cfg in ASKED.items():
        model = {"base": "sft-toy", "sequential": "paragrpo"}.get(name, name)
        own = {"run": f"{FOLDER}/eval/{name}", "name": name, "checkpoint": f"{FOLDER}/{model}/model"}
        own |= {"arms": ("sequential" if name == "sequential" else "parallel",)}
        assert cfg == replace(ASKED["paragrpo"], **own)


def test_the_paper_s_figures_are_the_published_ones():
    published = config.read_tree(REPO / "configs" / "eval" / "published.yaml")["ablations"]
    scores = [row["scores"][:2] for row in published["stages"] + published["components"]]
    papers = [row.paper for row in ROWS if row.paper]
    assert all([float(figure) for figure in paper.split(", ")] in scores for paper in papers)


def says(folder: Path, name: str, seconds: float = 0.0, status: int = 0) -> list[str]:
    """Return a command that appends its name to the file `order` after some seconds."""
    write = f"open({str(folder / 'order')!r}, 'a').write({name!r})"
    return ["-c", f"import sys, time\ntime.sleep({seconds})\n{write}\nsys.exit({status})"]


def test_stages_run_in_order_and_their_jobs_once_and_one_that_fails_ends_the_study_and_is_tried_again(tmp_path):
    first = {"b": says(tmp_path, "b", seconds=0.5), "a": says(tmp_path, "a")}
    last = {"d": says(tmp_path, "d", seconds=0.5)}
    with pytest.raises(SystemExit, match="c failed, see .*/logs/c.log"):
        paradox.run_stages([first, {"c": says(tmp_path, "c", status=1)}, last], tmp_path)
    paradox.run_stages([first, {"c": says(tmp_path, "C")}, last], tmp_path)
    assert (tmp_path / "order").read_text() == "abcCd"


def test_the_progress_of_a_training_is_its_step_and_its_main_figures():
    """Past bug: the console cut each line in the middle of a word."""
    line = "rl step 9/60 R 1 R_acc 0.9 f 0.5 well_formed 0.4 kappa 1 loss 0 entropy 0 bad_steps 1"
    assert paradox.progress_in(line) == "rl step 9/60 R_acc 0.9 f 0.5 well_formed 0.4 kappa 1 loss 0 bad_steps 1"
    bar = "toy K=4 parallel:   2%|▏         | 1/64 [00:01<01:39,  1.57s/item]"
    assert (paradox.progress_in(bar), paradox.progress_in("")) == (bar, "")


# ------------------------------------------------------------------------------------------------ figures and claims


def write_evaluation(root: Path, seed: int, row: str, scores: list[float], calls: int, f: float, k=4) -> None:
    """Write an evaluation. Each call looks at a window of its own (0-8 s, 8-16 s) and reports no flash."""
    lines = []
    made = [{"error": "", "window": window, "text": toy.NOTHING} for window in ([0, 8], [8, 16])]
    for i, score in enumerate(scores):
        video = f"videos/test{i:05d}.mp4"
        failed = [{"error": "timeout", "window": None, "text": ""}] * (calls == 1)
        lines.append(line(str(i), score, video=video, calls=made[:calls] + failed, f=f, well_formed=1.0))
    write_results(root / f"seed{seed}" / "eval" / row, "toy", lines, k=k)
    (root / "done" / f"seed{seed}-{row}-eval").write_text("abc")


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    """Create the folder of a study whose seed 0 shows all claims. Seed 1 has only a cold start. All flashes are at 12 to 14 s."""
    flashes = [toy.Flash(f"test{i:05d}.mp4", 0, 32, "red", 12.0, 2.0) for i in range(4)]
    monkeypatch.setattr(toy, "draw_splits", lambda seed: {"test": flashes})
    (tmp_path / "done").mkdir()
    write_evaluation(tmp_path, 0, "sft", [1, 1, 0, 1], calls=1, f=0.4)
    write_evaluation(tmp_path, 0, "grpo", [0, 0, 1, 0], calls=0, f=0.1)
    write_evaluation(tmp_path, 0, "paragrpo", [1, 1, 1, 1], calls=2, f=1.0)
    write_evaluation(tmp_path, 0, "paragrpo", [1, 0], calls=1, f=0.7, k=64)
    write_evaluation(tmp_path, 1, "sft", [1, 0], calls=1, f=0.3)
    return tmp_path


def test_a_claim_holds_in_the_seeds_whose_gain_reaches_the_margin():
    figures = {(seed, "paragrpo", 4): {"accuracy": accuracy} for seed, accuracy in enumerate([0.9, 0.8, 0.9])}
    figures |= {(seed, "sft", 4): {"accuracy": 0.75} for seed in (0, 1)} | {(2, "sft", "all"): {"accuracy": 0}}
    claim = next(claim for claim in CLAIMS if claim.text == "PARA-GRPO raises accuracy at K=4")
    assert claim.gains(figures) == pytest.approx({0: 0.15, 1: 0.05})
    assert claim.true_in(figures) == {0}  # by at least 0.1


def test_the_demo_requires_five_claims_or_more_and_only_those_that_hold_in_every_recorded_run():
    assert sum(claim.required for claim in CLAIMS) >= 5
    page = (REPO / "results" / "paradox.md").read_text("utf-8")
    for claim in CLAIMS:
        true, runs = re.search(rf"^\| {re.escape(claim.text)} .* (\d+) of (\d+) +\|$", page, re.M).groups()
        assert true == runs or not claim.required, claim.text


@pytest.mark.parametrize("score, shown, status", [(1, True, 0), (1, False, 1), (0.75, True, 1)])
def test_the_demo_fails_without_a_required_claim_or_an_episode_to_show(root, monkeypatch, capsys, score, shown, status):
    """With a score of 0.75, PARA-GRPO answers no better than its start."""
    for name in ("sft-toy", "sft", "grpo", "paragrpo"):
        (root / "done" / f"seed0-{name}").touch()  # nothing is left to run
    file = root / "seed0" / "eval" / "paragrpo" / "toy-K4-parallel.jsonl"
    file.write_text(file.read_text().replace('"score": 1.0', f'"score": {score}'))
    monkeypatch.setattr(paradox, "draw_pictures", lambda *_: None)
    monkeypatch.setattr(paradox, "ask_paragrpo", lambda _: shown)
    assert paradox.demo(root) == status
    told = capsys.readouterr().out
    lost = re.findall(r"^Does not hold here: (.*) \(it holds in all runs", told, re.M)
    assert lost == ["PARA-GRPO raises accuracy at K=4"] * (score < 1)
    assert ("All 7 claims hold." in told) is (score == 1)


def test_the_demo_asks_about_a_video_with_two_calls_and_a_right_answer(root, monkeypatch):
    file = root / "seed0" / "eval" / "paragrpo" / "toy-K4-parallel.jsonl"
    file.write_text(file.read_text().replace('"score": 1', '"score": 0', 2))
    monkeypatch.setattr(paradox.subprocess, "call", lambda command: "test00002.mp4" not in " ".join(command))
    assert paradox.ask_paragrpo(root / "seed0")


def test_tables_of_finished_runs_replace_those_of_the_page_and_no_runs_replace_nothing(root, tmp_path, golden):
    """One of two reports is right: a flash at 12 to 14 s is in the second window only."""
    page = tmp_path / "paradox.md"
    page.write_text("# Ours\n\n<!-- tables: written by paradox.py -->\nSTALE\n<!-- end of tables -->\nWhat it means.\n")
    paradox.write_tables(root, page)
    text = page.read_text()
    golden("paradox.md", text)
    with pytest.raises(SystemExit, match="has been evaluated"):
        paradox.write_tables(tmp_path / "empty", page)
    assert page.read_text() == text
