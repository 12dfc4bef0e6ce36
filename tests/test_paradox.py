"""The study: every row has the same start and budget, jobs run once and in order, and the tables hold what the runs say."""

import json
import os
import re
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from scripts import REPO

from eval import EvalConfig
from rl import RLConfig
from runtime import config
from sft import SFTConfig
from study import jobs, paradox
from study.jobs import FAULTY, FEW, HALVES, MAIN, OTHERS, PATHS, ROWS, SEEDS, Job, demo_jobs, run_jobs, study_jobs
from study.paradox import CLAIMS, Measured, judge, read_figures, spread

JOBS = study_jobs(Path("runs/paradox"))
CLASSES = {"sft.py": SFTConfig, "rl.py": RLConfig, "eval.py": EvalConfig}


def config_of(job: Job):
    script, path, *changes = job.command
    return config.load(CLASSES[script], str(REPO / path), changes)


@pytest.fixture(scope="module")
def trainings() -> dict[str, RLConfig]:
    """Configs by the job's name: seed0-grpo."""
    return {job.name: config_of(job) for job in JOBS if job.command[0] == "rl.py"}


# ------------------------------------------------------------------------------------------------ the jobs


def test_every_job_comes_after_what_it_needs_and_has_a_name_of_its_own():
    for listed in (JOBS, demo_jobs(Path("runs/demo"))):
        seen = set()
        for job in listed:
            assert job.name not in seen and (not job.needs or job.needs in seen), job
            seen.add(job.name)


def test_a_part_of_the_study_brings_what_it_needs():
    names = {job.name for job in jobs.select(JOBS, "seed1-old-grpo")}
    assert names == {"data-seed1-sft", "seed1-old-sft", "seed1-old-grpo"}
    assert jobs.select(JOBS, "") == JOBS and jobs.select(JOBS, "seed9") == []


def test_every_seed_has_a_toy_of_its_own_which_all_paths_share():
    built = {job.name: job.command for job in JOBS if job.command[:2] == ("-m", "study.toy")}
    for name, command in built.items():
        assert name.split("-")[1] == f"seed{command[command.index('--seed') + 1]}"
    starts = {job.name: config_of(job) for job in JOBS if job.command[0] == "sft.py"}
    cold = [name for name in starts if name.endswith("-sft")]
    assert len(cold) == 2 * len(SEEDS) + 2 * len(FEW) == 14
    for name in cold:
        seed = int(name[4])
        assert starts[name].data.seed == seed
        assert starts[name].policy.checkpoint == f"runs/paradox/data/seed{seed}-sft/model"
    assert {job.path for job in JOBS if job.command[0] == "sft.py"} == set(PATHS)


def test_all_rows_of_a_seed_have_the_same_start_and_the_same_budget(trainings):
    healthy = [row for row in FAULTY if not row.faults]
    assert len(trainings) == len(SEEDS) * (2 * len(MAIN) + len(HALVES)) + len(FEW) * (len(OTHERS) + len(healthy))
    budgets = {
        (c.steps, c.batch_tasks, c.group_size, c.optim, c.rollout.temperature, c.kl_coef, c.staleness)
        for c in trainings.values()
    }
    assert len(budgets) == 1
    for job, cfg in trainings.items():
        place, _, name = job.rpartition("-")
        seed = place.removeprefix("seed").partition("-")[0]
        assert cfg.seed == cfg.data.seed == int(seed)
        assert cfg.run == f"runs/paradox/{place}/{name}"
        assert cfg.policy.checkpoint == f"runs/paradox/{place}/{ROWS[name].start}/model"
        assert ROWS[name].prefix == cfg.rollout.think_prefix
        assert [source.path for source in cfg.data.sources] == [f"runs/paradox/data/seed{seed}-sft/rl.parquet"]


def test_a_row_and_its_control_differ_in_what_the_name_says(trainings):
    by_name = {name.removeprefix("seed0-"): replace(cfg, run="") for name, cfg in trainings.items()}
    para, full = by_name["paragrpo"], by_name["paragrpo_full"]
    off = replace(para, reward=replace(para.reward, anchor=replace(para.reward.anchor, credit="off")))
    assert by_name["prefix_only"] == off
    assert by_name["anchor_only"] == replace(para, rollout=replace(para.rollout, think_prefix=False))
    assert by_name["gating"] == replace(by_name["grpo"], gating=para.gating)
    assert by_name["anchoring"] == replace(para, gating=())
    sequence = replace(full.reward.anchor, credit="sequence")
    assert by_name["credit_sequence"] == replace(full, reward=replace(full.reward, anchor=sequence))
    assert by_name["no_tool_reward"] == replace(full, reward=replace(full.reward, w_tool=0))
    assert (para.reward.w_fmt, para.reward.w_tool, full.reward.w_fmt, full.reward.w_tool) == (0, 0, 1, 1)


def test_every_evaluation_reads_answers_alike_and_says_how_it_asked():
    for job in JOBS:
        if job.command[0] != "eval.py":
            continue
        cfg = config_of(job)
        place, _, run = job.name.partition("-eval-")
        data = f"runs/paradox/data/seed{place[4]}-sft"
        assert cfg.limit == 64 and cfg.grading.untagged_answer and cfg.splits == {"toy": data}
        assert ("sampled" in run) == (cfg.rollout.temperature == 1)
        assert ("alone" in run) == (cfg.rollout.concurrency == 1)
        assert run.endswith("-bare") == (not cfg.rollout.think_prefix)
        if cfg.name in ("sequential", "paragrpo") and "alone" not in run:
            assert cfg.arms[0] == {"sequential": "sequential", "paragrpo": "parallel"}[cfg.name]
        assert cfg.checkpoint == (f"{data}/model" if cfg.name == "base" else f"runs/paradox/{place}/{cfg.name}/model")


# ------------------------------------------------------------------------------------------------ the work


def python(tmp_path, name: str, then: str = "") -> tuple[str, str]:
    """A command that notes its name in the file `order`."""
    return "-c", f"import sys, time\nwith open({str(tmp_path / 'order')!r}, 'a') as f: f.write('{name}')\n{then}"


def test_a_done_job_is_not_run_again_and_a_failed_one_stops_only_those_that_need_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    listed = {name: Job(name, python(tmp_path, name), needs) for name, needs in zip("abcd", ("", "a", "b", "a"))}
    fails = Job("b", python(tmp_path, "b", "sys.exit(1)"), "a")
    assert not run_jobs([listed["a"], fails, listed["c"], listed["d"]], tmp_path)
    assert sorted((tmp_path / "order").read_text()) == ["a", "b", "d"]
    told = capsys.readouterr().out.splitlines()
    assert len(told) == 3 and sum("failed: b, see" in line for line in told) == 1  # in a pipe, one line per job
    assert run_jobs(list(listed.values()), tmp_path)
    assert (tmp_path / "order").read_text()[3:] == "bc"
    assert {path.name for path in (tmp_path / "done").iterdir()} == set("abcd")


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_stopping_the_study_stops_its_processes(tmp_path, monkeypatch, how):
    """Past bug: after a SIGTERM the jobs went on, and the next study started them a second time."""
    naps = []

    def sleep(_):
        naps.append(1)
        if len(naps) == 3:
            os.kill(os.getpid(), how)

    started, popen = [], jobs.subprocess.Popen
    monkeypatch.setattr(jobs, "time", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(jobs.subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[-1])
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background job ignores
    with pytest.raises(KeyboardInterrupt):
        run_jobs([Job("slow", python(tmp_path, "slow", "time.sleep(60)"))], tmp_path)
    for number, handler in before.items():
        signal.signal(number, handler)
    assert started[0].wait(5) < 0 and not (tmp_path / "done" / "slow").exists()


# ------------------------------------------------------------------------------------------------ the tables


def write_seed(root: Path, seed: int | str, scores: dict[tuple[str, str], list[float]]) -> None:
    """Evaluations of one seed at K = 4, by row and arm: items 1 and 3 have called, and items 4 ... twice."""
    (root / "done").mkdir(exist_ok=True)
    for (name, arm), values in scores.items():
        settings = {"name": name, "split": "toy", "k": 4, "arm": arm, "items": len(values), "total": 128}
        lines = [settings]
        for i, score in enumerate(values):
            calls = 2 if i >= 4 else i % 2
            seconds = (1.0 if arm == "parallel" else 2.0) * (1 + calls)
            lines.append({"id": str(i), "videos": [f"{i}"], "kind": "oe", "groups": {}, "prediction": "x", "score": score,
                          "judged": False, "error": "", "calls": [{"error": ""}] * calls, "turns": 2, "tokens": 10, "agent_tokens": 0,
                          "truncated": False, "seconds": seconds, "fmt": 0.25, "strict": 1.0})  # fmt: skip
        for kind in ("greedy", "sampled", "alone"):
            run = jobs.evaluation(name, kind, ROWS[name].prefix)
            folder = root / f"seed{seed}" / "eval" / run
            folder.mkdir(parents=True)
            (folder / f"toy-K4-{arm}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
            (root / "done" / f"seed{seed}-eval-{run}").write_text("abc")


@pytest.fixture
def studied(tmp_path) -> Path:
    four, eight = [1, 1, 0, 1], [0, 1, 0, 1, 0, 1, 0, 1]
    write_seed(tmp_path, 0, {("sft", "parallel"): four, ("sft_sequential", "sequential"): [1, 0, 0, 1]})
    write_seed(tmp_path, 1, {("sft", "parallel"): eight, ("sft_sequential", "sequential"): [1] * 8})
    write_seed(tmp_path, "0-old", {("sft", "parallel"): [0, 0, 0, 1], ("paragrpo", "parallel"): [1, 1, 1, 1]})
    write_seed(tmp_path, 2, {("paragrpo", "parallel"): four})
    return tmp_path


def test_figures_are_of_each_seed_and_path(studied):
    get = Measured(read_figures(studied)).get
    assert get("sft", "accuracy", "greedy", 4) == {"seed0": 0.75, "seed1": 0.5}
    assert get("sft", "accuracy", "greedy", 4, path="old") == {"seed0-old": 0.25}
    assert get("sft", "accuracy", "greedy", 8) == get("grpo", "calls") == get("sft", "fmt", prefix=True) == {}
    assert get("sft", "accuracy_called", k=4) == {"seed0": 1.0, "seed1": 0.6667}
    assert get("sft", "accuracy_skipped", k=4) == {"seed0": 0.5, "seed1": 0.0}
    assert get("sft", "calls") == get("sft", "calls", k=4) == {"seed0": 0.5, "seed1": 1.25}
    assert get("sft", "fmt") == {"seed0": 0.25, "seed1": 0.25}
    assert get("sft_sequential", "seconds_of_two", "alone") == {"seed1": 6.0}  # seed 0 never called twice
    assert spread({"a": 1.0, "b": 2.0}) == "1.50 ± 0.71" and spread({"a": 1.0}) == "1.00" and spread({}) == ""


def run_command(monkeypatch, root: Path) -> list:
    """`tables` of a folder; returns the calls of report.py."""
    called = []
    monkeypatch.setattr(paradox, "SAMPLED", (4,))  # what there is
    monkeypatch.setattr(sys, "argv", ["paradox.py", "tables", "--root", str(root)])
    monkeypatch.setattr(paradox.subprocess, "call", lambda command: called.append(command) or 0)
    assert paradox.main() == 0
    return called


def test_the_command_writes_tables_and_curves_of_what_there_is(studied, monkeypatch, capsys):
    """`tables` runs nothing and needs no finished study; what people wrote around its tables stays."""
    drawn = []
    monkeypatch.setattr("matplotlib.axes.Axes.errorbar", lambda axis, x, y, std, **style: drawn.append((y, std)))
    path = studied / "paradox.md"
    path.write_text("# Ours\n\n<!-- tables: written by paradox.py -->\nSTALE\n<!-- end of tables -->\nWhat it means.\n")
    (studied / "seed0" / "grpo").mkdir()
    assert "study.report" in run_command(monkeypatch, studied)[0]
    assert (studied / "outcomes.png").exists()
    accuracy, calls = ([0.625], [pytest.approx(0.125 * 2**0.5)]), ([0.875], [pytest.approx(0.375 * 2**0.5)])
    assert accuracy in drawn and calls in drawn
    text = path.read_text()
    assert text.startswith("# Ours") and text.endswith("What it means.\n") and "STALE" not in text
    assert "at commit abc;" in text and "#### A. Rows" in capsys.readouterr().out
    assert "0.25 ± 0.00 [0.13] | 0.88 ± 0.53 [2.5]" in text  # the paper's values beside ours
    # A claim counts the runs in which it holds by its margin: natively nobody has both rows, on the other path one has.
    assert re.search(r"raises accuracy at K=4 .*\| 0.1 +\| +\| 0.75 +\| 1 of 1", text)
    assert "plain GRPO loses" not in text


def test_figures_outlive_their_runs_and_newer_ones_replace_them(studied, monkeypatch):
    run_command(monkeypatch, studied)
    first = json.loads((studied / "paradox.json").read_text())
    shutil.rmtree(studied / "seed1")
    (studied / "done" / "seed1-eval-sft-greedy-bare").unlink()
    (studied / "done" / "seed0-eval-sft-sampled-bare").write_text("def")
    run_command(monkeypatch, studied)
    second = json.loads((studied / "paradox.json").read_text())
    changed = {key for key in first if first[key] != second[key]}
    assert first.keys() == second.keys()
    assert changed == {f"seed0/sft-sampled-bare/parallel/K={k}" for k in (0, 4)}


# ------------------------------------------------------------------------------------------------ the verdict


def figures_of_claims(seed: str, calls: dict, fmt: dict, accuracy: dict) -> dict:
    """The figures that the claims compare, at every K the same."""
    figures = {}
    for claim in CLAIMS:
        for name, _, k in (claim.less, claim.more):
            key = f"{seed}/{jobs.evaluation(name, 'sampled', ROWS[name].prefix)}/parallel/K={k}"
            figures[key] = {"calls": calls[name], "fmt": fmt[name], "accuracy": accuracy[name]}
    return figures


GOOD = {
    "calls": {"sft": 0.7, "grpo": 0.1, "paragrpo": 1.2},
    "fmt": {"sft": 0.4, "grpo": 0.0, "paragrpo": 0.95},
    "accuracy": {"sft": 0.7, "grpo": 0.4, "paragrpo": 0.9},
}


def test_the_demo_fails_where_every_recorded_run_succeeds_and_names_what(monkeypatch, capsys, tmp_path):
    """A claim that misses its margin, or lacks a figure, fails the demo, unless it has missed in a recorded run, too."""
    recorded = Measured(figures_of_claims("seed0", **GOOD) | figures_of_claims("seed1-old", **GOOD))

    def verdict(recorded=recorded, **changed) -> tuple[bool, str]:
        found = figures_of_claims("seed0", **(GOOD | changed))
        monkeypatch.setattr(paradox, "read_figures", lambda root: found)
        return judge(tmp_path, recorded), capsys.readouterr().out

    good, told = verdict()
    assert good and "FAILS" not in told and told.count("in 2 of 2 runs") == len(CLAIMS)
    short = {"accuracy": GOOD["accuracy"] | {"paragrpo": 0.7 + 0.09}}  # the margin is 0.1
    good, told = verdict(**short)
    assert not good and told.count("FAILS") == 1
    assert told.splitlines()[-1].endswith("succeeds: PARA-GRPO raises accuracy at K=4.")
    mixed = Measured(recorded.figures | figures_of_claims("seed2", **(GOOD | short)))
    good, told = verdict(mixed, **short)
    assert good and told.count("FAILS") == 1 and "in 2 of 3 runs" in told
    monkeypatch.setattr(paradox, "read_figures", lambda root: {})
    assert not judge(tmp_path, recorded)
    last = capsys.readouterr().out.splitlines()[-1]
    assert all(claim.text in last for claim in CLAIMS)
