"""The study: all rows share start and budget, each job runs once after its needs, and tables show finished runs."""

import functools
import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from scripts import REPO, Forked, alive, wait_for
from tiny_checkpoint import END, MemoryVideos, Scripted, turns

from eval import EvalConfig
from evals import results
from rl import RLConfig
from rollout import AgentContext, RolloutConfig
from runtime import config
from sft import SFTConfig
from study import claims, jobs, paradox, toy
from study.claims import CLAIMS, by_seed, judge, read_figures
from study.jobs import SECONDS, Job, run_jobs
from study.rows import CONTRAST, PATHS, ROWS

ROOT = Path("runs/paradox")
# A video of the test split, for any seed, with no flash in its first 8 seconds and one within 32.
LATE = toy.Flash("test00000.mp4", seed=0, duration=32, color="red", start=12.0, length=2.0)
JOBS = paradox.study_jobs(ROOT)
CLASSES = {"sft.py": SFTConfig, "rl.py": RLConfig, "eval.py": EvalConfig}


def configs(script: str) -> dict[str, SFTConfig | RLConfig | EvalConfig]:
    """Return the configs of all jobs that run a script, by the job's name: seed0-grpo."""
    loaded = {}
    for job in JOBS:
        if script in job.command:  # after torchrun or alone
            name, *changes = job.command[job.command.index(script) + 1 :]
            loaded[job.name] = config.load(CLASSES[script], str(REPO / name), changes)
    return loaded


# ------------------------------------------------------------------------------------------------ the jobs


def test_every_job_needs_exactly_those_that_make_what_it_reads():
    for listed in (JOBS, paradox.demo_jobs(ROOT)):
        makers = {}  # file or folder -> the job that makes it
        for job in listed:
            made = re.search(r"(?:\brun=|toy build |study.gate \S+ \S+ \d |-o )(\S+)", " ".join(job.command))[1]
            assert made not in makers, job
            makers[made] = job
        assert len({job.name for job in listed}) == len(listed)
        for job in listed:
            paths = re.findall(r"runs/[\w/.-]+", " ".join(job.command))
            read = [maker for made, maker in makers.items() for path in paths if f"{path}/".startswith(f"{made}/")]
            assert {maker.name for maker in read} - {job.name} == set(job.needs)
            kinds = list(SECONDS)
            assert all(maker is job or kinds.index(maker.kind) < kinds.index(job.kind) for maker in read)


def test_cold_starts_have_a_toy_of_their_seed_and_a_gate_on_each_path():
    starts = {name: cfg for name, cfg in configs("sft.py").items() if name.endswith("-sft")}
    assert len(starts) == len(PATHS) * 5 == 10
    flags = {job.name: job.command[-2:] for job in JOBS if job.kind == "build"}
    for name, cfg in starts.items():
        place, seed = name.removesuffix("-sft"), name[4]
        assert cfg.data.seed == int(seed) and flags[f"{name}-toy"] == ["--seed", seed]
        assert cfg.policy.checkpoint == f"runs/paradox/{place}/sft-toy/model"
        assert f"{place}-gate" in {job.name for job in JOBS}
    for job in JOBS:
        assert job.environment == PATHS[re.match(r"seed\d(-old|)-", job.name)[1]]


def test_all_rows_of_a_seed_have_the_same_start_and_the_same_budget():
    trainings, rows = configs("rl.py"), [row for row in ROWS.values() if row.config]
    assert len(trainings) == sum(row.seeds for row in rows) + 2 * 5  # and two rows on the other path
    budgets = set()
    for job, cfg in trainings.items():
        budgets.add((cfg.steps, cfg.batch_tasks, cfg.grpo, cfg.optim, cfg.rollout.temperature, cfg.staleness))
        place, _, name = job.rpartition("-")
        seed = place.removeprefix("seed").partition("-")[0]
        assert cfg.seed == cfg.data.seed == int(seed)
        assert cfg.run == f"runs/paradox/{place}/{name}"
        assert cfg.policy.checkpoint == f"runs/paradox/{place}/{ROWS[name].start}/model"
        assert ROWS[name].prefix == cfg.rollout.think_prefix
        assert [source.path for source in cfg.data.sources] == [f"runs/paradox/{place}/sft-toy/rl.parquet"]
    assert len(budgets) == 1


def test_a_row_and_its_control_differ_in_what_the_name_says():
    by_name = {name.removeprefix("seed0-"): replace(cfg, run="run") for name, cfg in configs("rl.py").items()}
    para, full = by_name["paragrpo"], by_name["paragrpo_full"]
    off = replace(para, reward=replace(para.reward, anchor=replace(para.reward.anchor, credit="off")))
    assert by_name["prefix_only"] == off
    assert by_name["anchor_only"] == replace(para, rollout=replace(para.rollout, think_prefix=False))
    assert by_name["gating"] == replace(by_name["grpo"], gating=para.gating)
    assert by_name["anchoring"] == replace(para, gating=())
    for name in ("grpo", "paragrpo"):  # from the weak prior: another start, and the patches of its class
        weak, strong = by_name[f"{name}_weak"], by_name[name]
        assert weak.policy.checkpoint == strong.policy.checkpoint.replace("/sft/", "/sft_weak/")
        assert (weak.visual, strong.visual) == (toy.CONTRACT_14, toy.CONTRACT)
        assert replace(weak, policy=strong.policy, visual=strong.visual) == strong
    assert by_name["no_tool_reward"] == replace(full, reward=replace(full.reward, w_tool=0))
    assert (para.reward.w_fmt, para.reward.w_tool, full.reward.w_fmt, full.reward.w_tool) == (0, 0, 1, 1)


def test_every_evaluation_reads_answers_alike_and_says_how_it_asked():
    for job, cfg in configs("eval.py").items():
        place, _, name = job.removesuffix("-eval").rpartition("-")
        toy = f"runs/paradox/{place}/sft-toy"
        assert cfg.limit == 64 and cfg.grading.untagged_answer == "stated" and cfg.splits == {"toy": toy}
        assert (cfg.rollout.temperature, cfg.rollout.think_prefix) == (1, ROWS[name].prefix)
        assert cfg.arms == ("sequential" if name == "sequential" else "parallel",)
        model = {"base": "sft-toy", "sequential": "paragrpo"}.get(name, name)
        assert cfg.checkpoint == f"runs/paradox/{place}/{model}/model"


def test_the_dispatch_row_asks_the_model_of_paragrpo_and_trains_nothing():
    asked = configs("eval.py")
    for seed in range(5):
        parallel, sequential = (asked[f"seed{seed}-{name}-eval"] for name in ("paragrpo", "sequential"))
        assert replace(sequential, run=parallel.run, name=parallel.name, arms=("parallel",)) == parallel
    assert {job.name for job in JOBS if "sequential" in job.name} == {f"seed{n}-sequential-eval" for n in range(5)}
    assert not any("sequential" in job.name for job in paradox.demo_jobs(ROOT))


# ------------------------------------------------------------------------------------------------ the work


def python(tmp_path, name: str, then: str = "") -> list[str]:
    """Return a command that appends its name to the file `order`."""
    return ["-c", f"import sys, time\nwith open({str(tmp_path / 'order')!r}, 'a') as f: f.write('{name}')\n{then}"]


def test_a_job_runs_after_those_it_needs_until_one_fails_and_never_twice(tmp_path, capsys):
    """The jobs are listed last first, and have kinds that would start in that order."""
    listed = [
        Job("train", name, python(tmp_path, name), needs) for name, needs in (("c", ["b"]), ("b", ["a"]), ("a", []))
    ]
    fails = replace(listed[1], command=python(tmp_path, "b", "sys.exit(1)"))
    assert not run_jobs([listed[0], fails, listed[2]], tmp_path)
    assert (tmp_path / "order").read_text() == "ab" and "b: failed, see" in capsys.readouterr().out
    assert run_jobs(listed, tmp_path)
    assert (tmp_path / "order").read_text() == "ab" + "bc"
    assert {path.name for path in (tmp_path / "done").iterdir()} == set("abc")


def test_a_job_ends_with_the_study_even_if_it_is_killed(tmp_path):
    """Past bug: jobs continued after a SIGTERM, and the next study started them a second time."""
    job = Job("train", "slow", python(tmp_path, "s", "import os\nprint(os.getpid(), flush=True)\ntime.sleep(60)"))
    study = Forked(functools.partial(run_jobs, [job], tmp_path))
    log = tmp_path / "logs" / "slow.log"
    wait_for(lambda: log.exists() and log.read_text())
    study.kill()
    wait_for(lambda: not alive(int(log.read_text())), seconds=10)
    assert not (tmp_path / "done" / "slow").exists()


def test_a_core_that_is_free_gets_the_next_job_at_once(tmp_path, monkeypatch):
    """An evaluation runs beside another row's training. Past bug: jobs ran in batches, so a core was idle while the longer
    one of two finished."""
    monkeypatch.setattr(jobs.os, "sched_getaffinity", lambda pid: {0, 1})
    read = f"open({str(tmp_path / 'order')!r}).read()"
    waits = f"for _ in range(100):\n    time.sleep(0.2)\n    if 'c' in {read}: sys.exit()"
    listed = [Job("evaluate", "c", python(tmp_path, "c"), needs=["b"])]
    listed += [Job("train", "a", python(tmp_path, "a", f"{waits}\nsys.exit('c never came')"))]
    listed += [Job("train", "b", python(tmp_path, "b"))]
    assert run_jobs(listed, tmp_path)


def test_a_job_of_two_cores_has_both_or_the_only_one_to_itself():
    start, other = Job("start", "s", [], cores=2), Job("train", "t", [])
    busy = [Job("build", "b", [])]
    assert jobs.next_job([start, other], busy, 2) is None and jobs.next_job([start, other], busy, 3) == start
    assert jobs.next_job([start, other], [], 1) == start


def test_a_job_that_takes_long_says_how_far_it_is_and_what_is_left(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(jobs, "NEWS", 0.3)
    job = Job("train", "slow", python(tmp_path, "s", "print('step 1\\rstep 2', flush=True)\ntime.sleep(1)"))
    assert run_jobs([job], tmp_path)
    left = "0 of 1 jobs are done; the rest takes about 0.6 minutes on two quiet cores"  # 75 s of one core
    assert f"{left}\nslow: step 2\n" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------ the tables


def write_seed(root: Path, seed: int | str, scores: dict[str, list[float]]) -> None:
    """Write evaluations of one seed at K = 4, by row: items 1 and 3 call once, and items 4 ... call twice."""
    (root / "done").mkdir(parents=True, exist_ok=True)
    for name, values in scores.items():
        lines = [{"name": name, "split": "toy", "k": 4, "arm": "parallel", "items": len(values), "total": 128}]
        for i, score in enumerate(values):
            calls = 2 if i >= 4 else i % 2
            made = [{"error": "", "window": window, "text": toy.NOTHING} for window in ([0, 8], [8, 16])]
            line = {"id": str(i), "score": score, "calls": made[:calls], "f": 0.25, "well_formed": 1.0}
            lines.append(dict.fromkeys(results.RECORD) | line | {"videos": [f"videos/{LATE.name}"]})
        folder = root / f"seed{seed}" / "eval" / name
        folder.mkdir(parents=True)
        (folder / f"toy-K4-{ROWS[name].arm}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (root / "done" / f"seed{seed}-{name}-eval").write_text("abc")


@pytest.fixture
def studied(tmp_path, monkeypatch) -> Path:
    """Create a repository's root in which a part of the study has run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(toy, "draw_splits", lambda seed: {"test": [LATE]})
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "paradox.json").write_text("{}")
    four = [1, 1, 0, 1]
    write_seed(ROOT, 0, {"sft": four})
    write_seed(ROOT, 1, {"sft": [0, 1, 0, 1, 0, 1, 0, 1]})
    write_seed(ROOT, "0-old", {"sft": [0, 0, 0, 1], "paragrpo": [1, 1, 1, 1]})
    write_seed(ROOT, 2, {"paragrpo": four, "sequential": [1, 0, 0, 1]})
    return tmp_path


def test_figures_are_of_each_seed_and_path(studied):
    figures = read_figures(ROOT)
    assert by_seed(figures, "sft", "accuracy", 4) == {0: 0.75, 1: 0.5}
    assert by_seed(figures, "sft", "accuracy", 4, path="-old") == {0: 0.25}
    assert by_seed(figures, "sft", "accuracy", 8) == by_seed(figures, "grpo", "calls") == {}
    assert by_seed(figures, "sequential", "accuracy", 4) == {2: 0.5}
    assert by_seed(figures, "sft", "calls") == {0: 0.5, 1: 1.25}
    assert by_seed(figures, "sft", "f") == {0: 0.25, 1: 0.25}
    assert by_seed(figures, "sft", "reports_right") == {0: 1.0, 1: 0.6}  # 4 of 10 wrongly report nothing
    assert claims.show(figures, "sft", "calls") == "0.88 ± 0.53" and claims.show(figures, "grpo", "calls") == ""


def test_a_collapse_that_recovers_before_the_end_is_seen(tmp_path):
    acc = [0.0] * 35 + [1.0] * 10 + [0.5] * 5 + [1.0] * 10  # 60 steps, of which the last 20 count
    metrics = [{"R_acc": a, "well_formed": 1 - a / 2, "f": i / 60} for i, a in enumerate(acc)]
    folder = tmp_path / "seed1-old" / "paragrpo"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    (tmp_path / "done").mkdir()
    (tmp_path / "done" / "seed1-old-paragrpo").write_text("abc")
    held = {"lowest_accuracy": 0.5, "lowest_well_formed": 0.5, "last_f": 0.95}
    assert read_figures(tmp_path) == {"seed1-old/paragrpo": held | {"commit": "abc"}}


def run_command(monkeypatch, what: str = "tables") -> list:
    """Run a command, and return its calls of report.py."""
    called = []
    monkeypatch.setattr(sys, "argv", ["paradox.py", what])
    monkeypatch.setattr(paradox.subprocess, "call", lambda command: called.append(command) or 0)
    assert paradox.main() == 0
    return called


def test_the_command_writes_tables_and_a_report_of_what_there_is(studied, monkeypatch):
    """`tables` runs nothing and needs no finished study. The text around its tables stays."""
    path = studied / "results" / "paradox.md"
    path.write_text("# Ours\n\n<!-- tables: written by paradox.py -->\nSTALE\n<!-- end of tables -->\nWhat it means.\n")
    (ROOT / "seed0" / "grpo").mkdir()
    assert "study.report" in run_command(monkeypatch)[0]
    text = path.read_text()
    assert text.startswith("# Ours") and text.endswith("What it means.\n") and "STALE" not in text
    assert "at commit abc;" in text and "#### The rows" in text
    assert "0.25 ± 0.00 [0.13] | 0.88 ± 0.53 [2.5]" in text  # the paper's values beside ours
    # A claim counts the runs in which it holds by its margin: no native run has both rows, one of the other path has.
    assert re.search(r"raises accuracy at K=4 .*\| 0.1 +\| 0.75 +\| 1 of 1", text)
    assert re.search(r"plain GRPO loses its calls .*\| 0 of 0", text)


def test_figures_outlive_their_runs_and_newer_ones_replace_them(studied, monkeypatch):
    file = studied / "results" / "paradox.json"
    run_command(monkeypatch)
    first = json.loads(file.read_text())
    shutil.rmtree(ROOT / "seed1")
    (ROOT / "done" / "seed1-sft-eval").unlink()
    (ROOT / "done" / "seed0-sft-eval").write_text("def")
    run_command(monkeypatch)
    second = json.loads(file.read_text())
    changed = {key for key in first if first[key] != second[key]}
    assert first.keys() == second.keys()
    assert changed == {f"seed0/sft/K={k}" for k in (0, 4)}


def test_figures_of_another_commit_are_refused_by_the_demo_and_told_of_by_the_study(studied, monkeypatch, capsys):
    """Past bug: on runs from before a renaming, both ended with a KeyError."""
    monkeypatch.setattr(jobs, "git_commit", lambda: "def")
    run_command(monkeypatch)
    assert "runs/paradox has figures of commit abc; the code is at def: both are kept" in capsys.readouterr().out
    shutil.copytree(ROOT, "runs/demo")
    with pytest.raises(SystemExit, match="runs/demo has figures of commit abc; the code is at def: remove the folder"):
        run_command(monkeypatch, "demo")
    (ROOT / "seed0" / "grpo").mkdir()
    (ROOT / "seed0" / "grpo" / "metrics.jsonl").write_text('{"accuracy": 1}\n' * 20)
    (ROOT / "done" / "seed0-grpo").write_text("abc")
    with pytest.raises(SystemExit, match="runs/paradox comes from another version of this code and lacks 'R_acc'"):
        run_command(monkeypatch)


# ------------------------------------------------------------------------------------------------ the verdict


def figures_of_claims(seed: str, **by_figure: dict[str, float]) -> dict:
    """Return the figures that the claims compare, the same at every K."""
    figures = {}
    for name in CONTRAST:
        for k in (0, 4):
            figures[f"{seed}/{name}/K={k}"] = {what: by_row[name] for what, by_row in by_figure.items()}
    return figures


GOOD = {
    "calls": {"sft": 0.7, "grpo": 0.1, "paragrpo": 1.2},
    "f": {"sft": 0.4, "grpo": 0.0, "paragrpo": 0.95},
    "accuracy": {"sft": 0.7, "grpo": 0.4, "paragrpo": 0.9},
}


def test_the_demo_fails_where_every_recorded_run_succeeds_and_names_what(capsys):
    """A claim that misses its margin or lacks a figure fails the demo, unless it also failed in a recorded run."""
    recorded = figures_of_claims("seed0", **GOOD) | figures_of_claims("seed1-old", **GOOD)
    assert len(CLAIMS) == 7 and not judge(figures_of_claims("seed0", **GOOD), recorded)
    told = capsys.readouterr().out
    assert "FAILS" not in told and told.count("in 2 of 2 runs") == 7
    short = GOOD | {"accuracy": GOOD["accuracy"] | {"paragrpo": 0.7 + 0.09}}  # the margin is 0.1
    assert judge(figures_of_claims("seed0", **short), recorded) == ["PARA-GRPO raises accuracy at K=4"]
    told = capsys.readouterr().out
    assert told.count("FAILS") == 1 and told.splitlines()[-1].endswith("succeeds: PARA-GRPO raises accuracy at K=4.")
    assert not judge(figures_of_claims("seed0", **short), recorded | figures_of_claims("seed2", **short))
    told = capsys.readouterr().out
    assert told.count("FAILS") == 1 and "in 2 of 3 runs" in told
    assert judge({}, recorded) == [claim.text for claim in CLAIMS]


def test_the_repair_needs_the_whole_last_third_and_right_reports_and_claims_are_counted_beside_it():
    bad = {1: {"lowest_accuracy": 0.84}, 2: {"reports_right": 0.97}, 3: {}}
    figures = {}
    for seed in range(4):
        by_figure = GOOD if seed != 3 else GOOD | {"f": GOOD["f"] | {"grpo": 0.3}}
        figures |= figures_of_claims(f"seed{seed}-old", **by_figure)
        held = {"lowest_accuracy": 0.85, "lowest_well_formed": 0.8, "last_f": 0.9, "reports_right": 0.98}
        figures[f"seed{seed}-old/paragrpo"] = held | bad.get(seed, {})
    table = claims.repair_table(figures)
    assert "2 of 4 trainings hold to the end; 3 of 4 runs show all claims" in table and table.count("NO") == 2
    assert re.search(r"seed0 .* yes +\| 7 of 7", table) and re.search(r"seed3 .* yes +\| 6 of 7", table)


@pytest.mark.parametrize("honest", [True, False])
def test_the_demo_ends_with_an_episode_that_is_all_right(toy_renderer, monkeypatch, capsys, honest):
    """Two reports and the answer must be right. The flash is in the second half. The first video needs only one window."""
    long = replace(LATE, name="test00001.mp4", duration=64, start=40.0, length=24.0)
    monkeypatch.setattr(toy, "draw_splits", lambda seed: {"test": [LATE, long]})

    def report(prompt: str) -> str:
        seen = float(re.search(r"<([\d.]+) sec", prompt)[1]) >= 32 or not honest
        return toy.report_on(long, [50.0] if seen else [0.0])

    calls = "Closer.\n</think>\n" + toy.call(0, 32) + toy.call(32, 64) + END
    agent = turns(calls, "A clip shows it.\n</think>\n<answer>red</answer>" + END, report=report)
    cfg = RolloutConfig(temperature=0.0, think_prefix=True)
    context = AgentContext(Scripted(toy_renderer, agent), toy_renderer, MemoryVideos(duration=64), cfg)
    monkeypatch.setattr(paradox.gate, "greedy_agent", lambda model, videos, think_prefix: context)
    assert paradox.show_episode(Path("runs/demo")) == honest
    told = capsys.readouterr().out
    assert ("32.0–64.0 s A red flash." in told) == honest and ("None of ten" in told) == (not honest)
