"""paradox.py: reproduce the Tool Prior Paradox on the toy: train the rows of rows.py, and judge them by claims.py.

    python -m study.paradox demo      # one seed: cold start, plain GRPO, PARA-GRPO; exit status 1 if it fails
    python -m study.paradox study     # all runs, then the tables and pictures of results/paradox.md
    python -m study.paradox tables    # only the tables and pictures of finished runs

The study can be stopped and resumed at any time (jobs.py). `--only seed0-` runs a part of it. The figures of all parts
are merged into results/paradox.json (claims.py).
"""

import argparse
import contextlib
import io
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from rewards import final_answer, turn_texts
from rollout import render_prompt, run_episode
from runtime.config import read_tree
from runtime.video import Videos
from study import ask, gate, toy
from study.claims import DRAWN, judge, read_figures, write_tables
from study.jobs import Job, other_commits, run_jobs
from study.rows import CONTRAST, GATE_JOBS, KS, PATHS, ROWS, Row

RANKS = 2  # ranks that train a cold start, on any number of cores: its figures depend on them


def row_jobs(row: Row, root: Path, seed: int, path: str = "") -> list[Job]:
    """Return the jobs that train and evaluate one row, for one seed on one numeric path."""
    run = f"seed{seed}{path}"  # the jobs' names begin with it
    folder = root / run
    jobs = []

    def add(kind: str, name: str, command: list[str], needs: list[str], cores: int = 1) -> None:
        needs = [f"{run}-{other}" for other in needs]
        jobs.append(Job(kind, f"{run}-{name}", command, needs, cores, PATHS[path]))

    # Train. Each cold start has its own toy. RL starts from a cold start, on the toy of `sft`.
    if row.config:
        add("train", row.name, train_command(row, folder, seed), [row.start, "sft-toy"])
    elif not row.policy:
        own_toy = folder / f"{row.name}-toy"
        add("build", own_toy.name, ["-m", "study.toy", "build", str(own_toy), "--seed", str(seed), *row.changes], [])
        add("start", row.name, start_command(row, folder, seed), [own_toy.name], cores=RANKS)

    # Evaluate on the toy of `sft`.
    policy = row.policy or row.name
    needs = [policy, "sft-toy"]
    model = folder / policy / "model"
    add("evaluate", f"{row.name}-eval", eval_command(row, folder, model), needs)
    if row.name in GATE_JOBS:
        name = GATE_JOBS[row.name]
        command = ["-m", "study.gate", str(model), f"{folder}/sft-toy", str(seed), f"{folder}/{name}.json"]
        add("evaluate", name, command, needs)
    return jobs


def start_command(row: Row, folder: Path, seed: int) -> list[str]:
    """Return Python's arguments that train a cold start from its toy's untrained model."""
    own_toy = folder / f"{row.name}-toy"
    sources = read_tree(Path("configs/toy_sft.yaml"))["data"]["sources"]
    for source in sources:
        source["path"] = str(own_toy / Path(source["path"]).name)
    changes = [f"run={folder / row.name}", f"data.seed={seed}", *row.settings]
    changes += [f"policy.checkpoint={own_toy}/model", f"data.sources={json.dumps(sources)}"]
    changes += [f"val.sources=[{{path: {own_toy}/sft_val.parquet}}]"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={RANKS}"]
    return [*torchrun, "sft.py", "configs/toy_sft.yaml", *changes]


def train_command(row: Row, folder: Path, seed: int) -> list[str]:
    """Return Python's arguments that train a row by RL, from its cold start."""
    changes = [f"run={folder / row.name}", f"data.seed={seed}", *row.settings]
    changes += [f"policy.checkpoint={folder / row.start / 'model'}", f"seed={seed}"]
    changes += [f"data.sources=[{{path: {folder}/sft-toy/rl.parquet}}]", "val=null", *row.changes]
    return ["rl.py", f"configs/{row.config}.yaml", *changes]


def eval_command(row: Row, folder: Path, model: Path) -> list[str]:
    """Return Python's arguments that evaluate a row. Answers of every row are read as in the accuracy-only reward."""
    changes = [f"run={folder}/eval/{row.name}", f"name={row.name}", f"checkpoint={model}", f"frames={list(KS)}"]
    changes += [f"arms=[{row.arm}]", "rollout.temperature=1", f"rollout.think_prefix={str(row.prefix).lower()}"]
    changes += ["grading.untagged_answer=stated", f"splits.toy={folder}/sft-toy", "limit=64"]
    return ["eval.py", "configs/eval/toy.yaml", *changes]


def demo_jobs(root: Path) -> list[Job]:
    """Return the jobs of seed 0 without its gate, and the job that writes the report page."""
    jobs = []
    for name in CONTRAST:
        jobs += [job for job in row_jobs(ROWS[name], root, seed=0) if job.name != "seed0-gate"]
    runs = [f"{root}/seed0/{run}" for run in ("grpo", "paragrpo", "eval/grpo", "eval/paragrpo", "eval/sft")]
    needs = [job.name for job in jobs if job.kind in ("train", "evaluate")]
    jobs.append(Job("report", "seed0-page", report_command(runs, root, root), needs))
    return jobs


def study_jobs(root: Path) -> list[Job]:
    """Return the jobs of all rows and seeds. The rows of the contrast run on all paths."""
    jobs = []
    for row in ROWS.values():
        for path in PATHS if row.name in CONTRAST else ("",):
            for seed in range(row.seeds):
                jobs += row_jobs(row, root, seed, path)
    return jobs


def report_command(runs: list[str], root: Path, written: Path) -> list[str]:
    """Return Python's arguments that write ROOT/report.html, and the runs' curves and outcomes as PNGs."""
    return ["-m", "study.report", *runs, "-o", f"{root}/report.html", "--png", str(written)]


# ------------------------------------------------------------------------------------------------ the commands


def demo() -> int:
    """Run one seed; return 1 if a job, a claim or the episode fails."""
    root = Path("runs/demo")
    started = time.monotonic()
    if others := other_commits(root):
        sys.exit(f"error: {others}: remove the folder, so that only figures of this code are judged")
    if not run_jobs(demo_jobs(root), root):
        return 1
    failed = judge(read_figures(root), json.loads(Path("results/paradox.json").read_text(encoding="utf-8")))
    has_episode = show_episode(root)
    minutes = (time.monotonic() - started) / 60
    print(f"\ndone in {minutes:.1f} minutes; curves, and episodes token by token, are in {root}/report.html")
    return 1 if failed or not has_episode else 0


def show_episode(root: Path) -> bool:
    """Show PARA-GRPO's first episode with two calls, right reports and a right answer. Return False if ten have none."""
    folder = root / "seed0"
    with_two_windows = [flash for flash in toy.draw_splits(0)["test"] if len(toy.windows(flash, "")) == 2]
    with Videos(workers=1) as videos:
        context = gate.greedy_agent(folder / "paragrpo" / "model", videos, think_prefix=True)
        for flash in with_two_windows[:10]:
            # Run an episode, and keep what it prints.
            task = gate.task_of(folder / "sft-toy", flash)
            observed = replace(context, observe=ask.Screen(flash.duration).show)
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                episode = run_episode(observed, task, 4, render_prompt(task, 4, context), 0)

            # Show it if all is right.
            reports = [not c.error and toy.report_is_right(flash, c.window, c.text) for c in episode.calls]
            answer = final_answer(turn_texts(episode.main, context.renderer))
            if reports == [True, True] and answer == flash.color:
                print(f"\n{task.question} ({task.videos[0]}, 4 overview frames){printed.getvalue()}")
                return True
    print("\nNone of ten episodes has two calls, right reports and a right answer.")
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["demo", "study", "tables"])
    parser.add_argument("--only", default="", metavar="PART", help="run only the study's jobs with PART in their names, such as seed0-old")  # fmt: skip
    args = parser.parse_args()
    if args.what == "demo":
        return demo()

    root = Path("runs/paradox")
    if others := other_commits(root):
        print(f"{others}: both are kept, and paradox.json names the commit of each figure")
    good = args.what == "tables" or run_jobs([job for job in study_jobs(root) if args.only in job.name], root)
    write_tables(root, Path("results"))

    runs = []  # on the native path
    for name in (*DRAWN, *(f"eval/{name}" for name in (*DRAWN, "sft"))):
        runs += [str(folder) for folder in sorted(root.glob(f"seed?/{name}"))]
    drawn = not runs or subprocess.call([sys.executable, *report_command(runs, root, Path("results"))]) == 0
    return 0 if good and drawn else 1


if __name__ == "__main__":
    sys.exit(main())
