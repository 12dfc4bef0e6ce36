"""The study: every row has the same start and budget, jobs run once and in order, and the tables hold what the runs say."""

import json
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
from study import paradox
from study.paradox import CONTROLS, STUDY, Job, Seeds, plan, spread, work

ROOT = Path("runs/paradox")
JOBS = plan(ROOT, range(3), STUDY, CONTROLS)
CLASSES = {"sft.py": SFTConfig, "rl.py": RLConfig, "eval.py": EvalConfig}


def config_of(job: Job):
    script, path, *changes = job.command
    return config.load(CLASSES[script], str(REPO / path), changes)


# ------------------------------------------------------------------------------------------------ the plan


def test_every_job_comes_after_what_it_needs_and_has_a_name_of_its_own():
    seen = set()
    for job in JOBS:
        assert job.name not in seen and (not job.needs or job.needs in seen), job
        seen.add(job.name)


def test_all_rows_of_a_seed_have_the_same_start_and_the_same_budget():
    trainings = [(job, config_of(job)) for job in JOBS if job.command[0] == "rl.py"]
    assert len(trainings) == 3 * len(STUDY) + len(CONTROLS)
    budgets = {
        (c.steps, c.batch_tasks, c.group_size, c.optim, c.rollout.temperature, c.kl, c.staleness) for _, c in trainings
    }
    assert len(budgets) == 1
    for job, cfg in trainings:
        seed = int(job.name.removeprefix("seed")[0])
        assert cfg.seed == cfg.data.seed == seed and cfg.run == str(job.run)
        row = paradox.ROWS[job.run.name]
        assert cfg.policy.checkpoint == f"runs/paradox/seed{seed}/{row.start}/model"
        assert row.prefix == cfg.rollout.think_prefix
        assert [source.path for source in cfg.data.sources] == ["runs/paradox/data/sft/rl.parquet"]


def test_a_row_and_its_control_differ_in_what_the_name_says():
    by_name = {job.run.name: replace(config_of(job), run="") for job in JOBS if job.name.startswith("seed0-") and job.command[0] == "rl.py"}  # fmt: skip
    para, full = by_name["paragrpo"], by_name["paragrpo_full"]
    off = replace(para, reward=replace(para.reward, anchor=replace(para.reward.anchor, credit="off")))
    assert by_name["prefix_only"] == off
    assert by_name["anchor_only"] == replace(para, rollout=replace(para.rollout, think_prefix=False))
    assert by_name["gating"] == replace(by_name["grpo"], gating=para.gating)
    assert by_name["anchoring"] == replace(para, gating=())
    for credit in ("sequence", "logp"):
        anchor = replace(full.reward.anchor, credit=credit)
        assert by_name[f"credit_{credit}"] == replace(full, reward=replace(full.reward, anchor=anchor))
    assert by_name["no_tool_reward"] == replace(full, reward=replace(full.reward, w_tool=0))
    assert (para.reward.w_fmt, para.reward.w_tool, full.reward.w_fmt, full.reward.w_tool) == (0, 0, 1, 1)


def test_every_evaluation_reads_answers_alike_and_says_how_it_asked():
    for job in JOBS:
        if job.command[0] == "eval.py":
            cfg = config_of(job)
            assert cfg.limit == 64 and cfg.grading.untagged_answer and cfg.splits == {"toy": "runs/paradox/data/sft"}
            assert ("sampled" in job.name) == (cfg.rollout.temperature == 1)
            assert ("alone" in job.name) == (cfg.rollout.concurrency == 1)
            if cfg.name in ("sequential", "paragrpo") and "alone" not in job.name:
                assert cfg.arms[0] == {"sequential": "sequential", "paragrpo": "parallel"}[cfg.name]
            assert job.name.endswith("-bare") == (not cfg.rollout.think_prefix)
            assert cfg.checkpoint == ("runs/paradox/data/sft/model" if cfg.name == "base" else f"{Path(cfg.run).parent.parent}/{cfg.name}/model")  # fmt: skip


# ------------------------------------------------------------------------------------------------ the work


def script(tmp_path, name, text) -> str:
    path = tmp_path / f"{name}.py"
    path.write_text(
        f"import pathlib, sys, time\nwith open({str(tmp_path / 'order')!r}, 'a') as f: f.write('{name} ')\n{text}"
    )
    return str(path)


def test_a_job_that_is_done_is_not_run_again_and_one_that_failed_stops_only_those_that_need_it(tmp_path, capsys):
    fails = tmp_path / "fails"
    fails.touch()
    jobs = [
        Job("a", (script(tmp_path, "a", ""),)),
        Job("b", (script(tmp_path, "b", f"sys.exit(pathlib.Path({str(fails)!r}).exists())"),), "a"),
        Job("c", (script(tmp_path, "c", ""),), "b"),
        Job("d", (script(tmp_path, "d", ""),), "a"),
    ]
    assert not work(jobs, 2, tmp_path)
    assert sorted((tmp_path / "order").read_text().split()) == ["a", "b", "d"]
    assert "failed: b, see" in capsys.readouterr().out
    fails.unlink()
    assert work(jobs, 2, tmp_path)
    assert (tmp_path / "order").read_text().split()[3:] == ["b", "c"]
    assert {path.name for path in (tmp_path / "done").iterdir()} == set("abcd")


def test_stopping_the_study_stops_its_processes(tmp_path, monkeypatch):
    naps = iter([None, None, KeyboardInterrupt()])

    def sleep(_):
        if stop := next(naps):
            raise stop

    started, popen = [], paradox.subprocess.Popen
    monkeypatch.setattr(paradox, "time", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(paradox.subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[-1])
    with pytest.raises(KeyboardInterrupt):
        work([Job("slow", (script(tmp_path, "slow", "time.sleep(60)"),))], 1, tmp_path)
    assert started[0].wait(5) < 0 and not (tmp_path / "done" / "slow").exists()


# ------------------------------------------------------------------------------------------------ the tables


def write_seed(root: Path, seed: int, scores: dict[str, list[float]]) -> None:
    """PARA-GRPO of one seed at K = 4: items 1 and 3 have called, and items 4 ... twice."""
    (root / "done").mkdir(exist_ok=True)
    for kind in ("greedy", "sampled", "alone"):
        folder = root / f"seed{seed}" / "eval" / f"paragrpo-{kind}"
        folder.mkdir(parents=True)
        (root / "done" / f"seed{seed}-eval-paragrpo-{kind}").write_text("abc")
        for arm, values in scores.items():
            settings = {"name": "paragrpo", "split": "toy", "k": 4, "arm": arm, "items": len(values), "total": 128}
            records = [
                {"id": str(i), "videos": [f"{i}"], "kind": "oe", "groups": {}, "prediction": "x", "score": v, "judged": False, "error": "",
                 "calls": [{"error": ""}] * calls, "turns": 2, "tokens": 10, "agent_tokens": 0, "truncated": False,
                 "seconds": (1.0 if arm == "parallel" else 2.0) * (1 + calls), "fmt": 0.25, "strict": 1.0}
                for i, v in enumerate(values) for calls in [2 if i >= 4 else i % 2]
            ]  # fmt: skip
            text = "".join(json.dumps(line) + "\n" for line in (settings, *records))
            (folder / f"toy-K4-{arm}.jsonl").write_text(text)


@pytest.fixture
def studied(tmp_path) -> Path:
    write_seed(tmp_path, 0, {"parallel": [1, 1, 0, 1], "sequential": [1, 0, 0, 1]})
    write_seed(tmp_path, 1, {"parallel": [0, 1, 0, 1, 0, 1, 0, 1], "sequential": [1] * 8})
    return tmp_path


def test_figures_are_of_each_seed(studied):
    seeds = Seeds(studied)
    assert seeds.accuracy("paragrpo", 4) == {"seed0": 0.75, "seed1": 0.5} and seeds.accuracy("paragrpo", 8) == {}
    assert seeds.accuracy_if("paragrpo", 4, True) == {"seed0": 1.0, "seed1": 4 / 6}
    assert seeds.accuracy_if("paragrpo", 4, False) == {"seed0": 0.5, "seed1": 0.0}
    assert seeds.cost("paragrpo", "calls") == {"seed0": 0.5, "seed1": 1.25} and seeds.cost("grpo", "calls") == {}
    assert seeds.cost("paragrpo", "fmt") == {"seed0": 0.25, "seed1": 0.25}
    assert seeds.cost("paragrpo", "calls", k=4) == {"seed0": 0.5, "seed1": 1.25}
    assert seeds.cost("paragrpo", "calls", k=64) == {}


def test_a_spread_is_mean_and_sample_deviation():
    assert spread({"a": 1.0, "b": 2.0}) == "1.50 ± 0.71" and spread({"a": 1.0}) == "1.00" and spread({}) == ""


def test_claims_count_the_seeds_in_which_they_hold(studied, monkeypatch):
    monkeypatch.setitem(paradox.DISPATCH, "cold start: one call per turn", ("paragrpo", "sequential"))
    monkeypatch.setitem(paradox.DISPATCH, "cold start: parallel", ("paragrpo", "parallel"))
    monkeypatch.setattr(paradox, "GREEDY", (4,))
    table = {
        row.split("|")[1].strip(): row.split("|")[2:4] for row in paradox.claims_table(Seeds(studied)).splitlines()[4:]
    }
    faster = next(v for k, v in table.items() if k.startswith("parallel calls are"))
    assert "parallel 3.00 < sequential 6.00" in faster[0] and "1 of 1" in faster[1]  # seed 0 never called twice
    better = next(v for k, v in table.items() if k.startswith("and no worse"))
    assert "parallel 0.62 ± 0.18 >= sequential 0.62 ± 0.18" in better[0] and "2 of 2" in better[1]
    assert not any("GRPO loses" in claim for claim in table)  # nobody has run it


def test_the_tables_show_the_papers_values_beside_ours(studied):
    text = paradox.tables(studied, demo=False)
    assert "0.25 ± 0.00 [0.41] | 0.88 ± 0.53 [0.21]" in text
    assert "on videomme, videomme_wsub, lvbench, mlvu: sequential 61.4, 68.8, 37.5, 64.1; parallel 62.1, " in text


def test_results_keep_what_people_wrote_around_the_tables(studied):
    path = studied / "results" / "paradox.md"
    paradox.write_results(path, "first", "python x", studied)
    path.write_text(path.read_text().replace("# The paradox on the toy", "# Ours") + "\nWhat it means.\n")
    paradox.write_results(path, "second", "python x", studied)
    text = path.read_text()
    assert text.startswith("# Ours") and text.endswith("What it means.\n") and "second" in text and "first" not in text
    assert "commit abc" in text


def test_the_command_writes_tables_and_curves_of_what_there_is(studied, monkeypatch, capsys):
    """`tables` runs nothing and needs no finished study."""
    called, drawn = [], []
    monkeypatch.setattr(paradox, "SAMPLED", (4,))  # what there is
    monkeypatch.setattr("matplotlib.axes.Axes.errorbar", lambda axis, x, y, std, **style: drawn.append((y, std)))
    monkeypatch.setattr(sys, "argv", ["paradox.py", "tables", "--root", str(studied)])
    monkeypatch.setattr(paradox.subprocess, "call", lambda command: called.append(command) or 0)
    monkeypatch.setattr(paradox, "write_results", lambda *args: called.append(args))
    assert paradox.main() == 0
    assert (studied / "outcomes.png").exists()
    assert drawn == [([0.625], [pytest.approx(0.125 * 2**0.5)]), ([0.875], [pytest.approx(0.375 * 2**0.5)])]
    assert "#### A. Stages" in capsys.readouterr().out and "study.report" in called[0] and len(called) == 2
