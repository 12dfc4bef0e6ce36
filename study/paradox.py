"""paradox.py: the Tool Prior Paradox on the toy: trainings, evaluations, tables.

    python -m study.paradox demo      # one seed: cold start, plain GRPO, PARA-GRPO, evaluation, runs/demo/report.html
    python -m study.paradox study     # every row over three seeds, the controls over one; the tables of results/paradox.md
    python -m study.paradox tables    # only the tables and pictures of what has run

All rows of a seed have the same budget, and the same cold start unless their name says otherwise. Each training or
evaluation is a process of its own, as a user would start it. Jobs that are done are not run again, so the study may be
stopped at any time. f and kappa are those of samples at tau = 1 on test videos, of all rows alike.

What the rows are called, and which reward they have:

    grpo, paragrpo           R = R_acc: accuracy-only GRPO, and what anchoring and gating make of it
    grpo_full, ...           the paper's full reward, which pays for tags and for calls at every K

Deliberately missing: tuning. No row has settings of its own beyond what its name says.
"""

import argparse
import json
import operator
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from tqdm import tqdm

from evals.tables import PUBLISHED, Results, costs, executed, markdown, put_between_marks, read_results
from runtime.config import git_commit

GREEDY, SAMPLED, ALONE = (4, 8, 16, 32, 64), (4, 16, 64), (4, 64)  # K of the evaluations
ALL = 0  # in place of a K: all of an evaluation together
LIMIT = 64  # test tasks of each


@dataclass(frozen=True)
class Variant:
    """One row of the tables: a training by RL; without a config, a cold start or the untrained model."""

    name: str
    title: str
    config: str = ""
    changes: tuple[str, ...] = ()  # of the config; of a cold start, the flags of `toy.py build`
    start: str = "sft"
    prefix: bool = True  # the think prefix, as trained
    paper: str = ""  # its row in the paper's tables

    @property
    def arm(self) -> str:
        return "sequential" if "sequential" in self.name else "parallel"


UNTRAINED = Variant("base", "untrained", prefix=False, paper="Qwen3-VL-8B")
STARTS = (
    Variant("sft", "cold start", prefix=False, paper="+SFT"),
    Variant("sft_sequential", "cold start, one call per turn", changes=("--one-by-one",), prefix=False),
    Variant("sft_tidy", "cold start without loose formats", changes=("--p-loose", "0"), prefix=False),
    Variant("sft_no_tools", "cold start without tools, either", changes=("--p-loose", "0", "--p-tool", "0"), prefix=False),
)  # fmt: skip
MAIN = (
    Variant("grpo", "GRPO, accuracy only", "toy_grpo", prefix=False, paper="SFT+GRPO"),
    Variant("paragrpo", "PARA-GRPO", "toy_paragrpo", paper="Full PARA-GRPO"),
)
# It cannot start where the others do: their cold start never saw one call after another.
SEQUENTIAL = Variant("sequential", "PARA-GRPO, one call per turn", "toy_paragrpo", ("rollout.dispatch=sequential",), "sft_sequential")  # fmt: skip
COMPONENTS = (
    Variant("anchoring", "+ Exploration Anchoring", "toy_anchoring", paper="+Exploration Anchoring"),
    Variant("gating", "+ nFrames Gating", "toy_gating", prefix=False, paper="+nFrames Gating"),
    Variant("no_gamma", "PARA-GRPO, - gamma", "toy_no_gamma", paper="-gamma penalty"),
    Variant("grpo_full", "GRPO, full reward", "toy_grpo_full", prefix=False, paper="SFT+GRPO"),
    Variant("paragrpo_full", "PARA-GRPO, full reward", "toy_paragrpo_full", paper="Full PARA-GRPO"),
    Variant("no_tool_reward", "PARA-GRPO, full reward, - R_tool", "toy_no_tool_reward", paper="-R_tool"),
)
CONTROLS = (
    Variant("prefix_only", "prefix and gating, no anchor", "toy_paragrpo", ("reward.anchor.credit=off",)),
    Variant("anchor_only", "anchor and gating, no prefix", "toy_paragrpo", ("rollout.think_prefix=false",), prefix=False),
    Variant("credit_sequence", "full reward, credit: sequence", "toy_paragrpo_full", ("reward.anchor.credit=sequence",)),
    Variant("credit_logp", "full reward, credit: logp", "toy_paragrpo_full", ("reward.anchor.credit=logp",)),
    Variant("grpo_tidy_start", "GRPO, from the tidy start", "toy_grpo", start="sft_tidy", prefix=False),
    Variant("paragrpo_tidy_start", "PARA-GRPO, from there", "toy_paragrpo", start="sft_tidy"),
    Variant("grpo_no_tool_start", "GRPO, full reward, without tools before", "toy_grpo_full", start="sft_no_tools", prefix=False),
    Variant("paragrpo_no_tool_start", "PARA-GRPO, full reward, from there", "toy_paragrpo_full", start="sft_no_tools"),
)  # fmt: skip
STUDY = (*MAIN, SEQUENTIAL, *COMPONENTS)
ROWS = {row.name: row for row in (UNTRAINED, *STARTS, *STUDY, *CONTROLS)}
# How calls are dispatched in table C: (row, arm). The two cold starts teach the same calls, so their budgets are equal; RL
# moves them apart.
DISPATCH = (
    ("sft", "parallel"),
    ("sft_sequential", "sequential"),
    ("paragrpo", "parallel"),
    ("sequential", "sequential"),
    ("paragrpo", "sequential"),
)
DRAWN = ("grpo", "anchoring", "gating", "paragrpo")  # the curves: neither half of the method, one, the other, both
# Whose samples are asked for what a call is worth, and both with the think prefix and without.
NECESSITY, PREFIX = ("sft", "paragrpo"), ("sft", "grpo", "paragrpo", "prefix_only", "anchor_only")


# ------------------------------------------------------------------------------------------------ the jobs


@dataclass(frozen=True)
class Job:
    """One process of the study."""

    name: str
    command: tuple[str, ...]
    needs: str = ""  # the job that must have ended well before


def all_jobs(root: Path, seeds: Sequence[int], rows: Sequence[Variant], controls: Sequence[Variant] = ()) -> list[Job]:
    """List all jobs in the order of their importance; the untrained model and the controls have the first seed only."""
    jobs = []
    for seed in seeds:
        jobs += seed_jobs(root, seed, rows)
    jobs += eval_jobs(root / f"seed{seeds[0]}", UNTRAINED, root / "data" / "sft" / "model")
    jobs += seed_jobs(root, seeds[0], controls)
    return list(dict.fromkeys(jobs))  # rows share their cold starts


def seed_jobs(root: Path, seed: int, rows: Sequence[Variant]) -> list[Job]:
    folder, jobs = root / f"seed{seed}", []
    for start in dict.fromkeys(row.start for row in rows):
        build = ("-m", "study.toy", "build", f"{root}/data/{start}", *ROWS[start].changes)
        jobs += [Job(f"data-{start}", build), sft_job(root, folder, start, seed)]
        jobs += eval_jobs(folder, ROWS[start], folder / start / "model")
    jobs += [rl_job(root, folder, row, seed) for row in rows]
    for row in rows:
        jobs += eval_jobs(folder, row, folder / row.name / "model")
    return jobs


def sft_job(root: Path, folder: Path, start: str, seed: int) -> Job:
    toy, cfg = root / "data" / start, yaml.safe_load(Path("configs/toy_sft.yaml").read_text())
    sources = [source | {"path": str(toy / Path(source["path"]).name)} for source in cfg["data"]["sources"]]
    changes = [f"run={folder / start}", f"policy.checkpoint={toy}/model", f"data.sources={json.dumps(sources)}"]
    changes += [f"data.seed={seed}", f"val.sources=[{{path: {toy}/sft_val.parquet}}]"]
    return Job(f"{folder.name}-{start}", ("sft.py", "configs/toy_sft.yaml", *changes), f"data-{start}")


def rl_job(root: Path, folder: Path, row: Variant, seed: int) -> Job:
    changes = [f"run={folder / row.name}", f"policy.checkpoint={folder / row.start / 'model'}", f"seed={seed}"]
    changes += ["val=null", *row.changes, f"data.sources=[{{path: {root}/data/sft/rl.parquet}}]", f"data.seed={seed}"]
    command = ("rl.py", f"configs/{row.config}.yaml", *changes)
    return Job(f"{folder.name}-{row.name}", command, f"{folder.name}-{row.start}")


def eval_jobs(folder: Path, row: Variant, model: Path) -> list[Job]:
    """Greedy at every K; sampled, as in training; for table C, one episode at a time, so that its seconds are its own."""
    arms = (row.arm, "none") if row.name in NECESSITY else (row.arm,)
    asked = [("greedy", GREEDY, arms, row.prefix), ("sampled", SAMPLED, (row.arm,), row.prefix)]
    if row.name in PREFIX:
        asked.append(("sampled", SAMPLED, (row.arm,), not row.prefix))
    alone = tuple(arm for name, arm in DISPATCH if name == row.name)
    if alone:
        asked.append(("alone", ALONE, alone, row.prefix))

    jobs = []
    for kind, ks, arms, prefix in asked:
        run = folder / "eval" / evaluation(row.name, kind, prefix)
        changes = [f"run={run}", f"name={row.name}", f"checkpoint={model}", f"frames={list(ks)}"]
        changes += [f"arms=[{', '.join(arms)}]", f"rollout.think_prefix={str(prefix).lower()}"]
        # The same reading of answers for every row: that of the accuracy-only reward.
        changes += [f"rollout.temperature={int(kind == 'sampled')}", "grading.untagged_answer=true"]
        changes += [f"splits.toy={folder.parent}/data/sft", f"limit={LIMIT}"]
        if kind == "alone":
            changes.append("rollout.concurrency=1")
        made_by = "data-sft" if row is UNTRAINED else f"{folder.name}-{row.name}"
        jobs.append(Job(f"{folder.name}-eval-{run.name}", ("eval.py", "configs/eval/toy.yaml", *changes), made_by))
    return jobs


def evaluation(name: str, kind: str, prefix: bool) -> str:
    return f"{name}-{kind}" if prefix else f"{name}-{kind}-bare"


def run_jobs(jobs: Sequence[Job], root: Path) -> bool:
    """Run what is not done, one process per core. False if something failed; its log says why."""
    done, logs = root / "done", root / "logs"
    done.mkdir(parents=True, exist_ok=True)
    logs.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}
    waiting = [job for job in jobs if not (done / job.name).exists()]
    running: dict[Job, subprocess.Popen] = {}
    good = True
    bar = tqdm(total=len(jobs), initial=len(jobs) - len(waiting), unit="job", disable=None)  # none in a pipe
    try:
        while True:
            # Start what is ready.
            ready = [job for job in waiting if not job.needs or (done / job.needs).exists()]
            for job in ready[: os.cpu_count() - len(running)]:
                waiting.remove(job)
                with (logs / f"{job.name}.log").open("ab") as log:
                    running[job] = subprocess.Popen(
                        [sys.executable, *job.command], stdout=log, stderr=log, env=environment
                    )
            if not running:  # what still waits needs a job that failed
                return good
            bar.set_postfix_str(", ".join(job.name for job in running))
            time.sleep(0.5)
            # Collect what has ended.
            for job, process in list(running.items()):
                if process.poll() is None:
                    continue
                del running[job]
                bar.update()
                if process.returncode == 0:
                    (done / job.name).write_text(git_commit())
                    tqdm.write(f"done: {job.name}")
                else:
                    good = False
                    tqdm.write(f"failed: {job.name}, see {logs / job.name}.log")
    finally:
        bar.close()
        for process in running.values():
            process.kill()


# ------------------------------------------------------------------------------------------------ the numbers

BySeed = dict[str, float]  # "seed0" -> a figure, for every seed that has got so far


class Measured:
    """The figures of all evaluations: those of evals, the accuracy, and what calling has to do with it."""

    def __init__(self, root: Path):
        self._figures: dict[tuple[str, str, int], dict[str, dict[str, float]]] = {}  # (run, arm, K) -> seed -> figures
        for marker in sorted((root / "done").glob("seed*-eval-*")):
            seed, _, run = marker.name.partition("-eval-")
            pooled: dict[str, Results] = {}  # of an arm: all K together
            for file in sorted((root / seed / "eval" / run).glob("*.jsonl")):
                results = read_results(file)
                arm, k = results.settings["arm"], results.settings["k"]
                self._figures.setdefault((run, arm, k), {})[seed] = figures_of(results)
                pooled.setdefault(arm, Results(results.settings, [])).records.extend(results.records)
            for arm, results in pooled.items():
                self._figures.setdefault((run, arm, ALL), {})[seed] = figures_of(results)

    def get(
        self, name: str, what: str, kind: str = "sampled", k: int = ALL, arm: str = "", prefix: bool | None = None
    ) -> BySeed:
        """Return a figure by seed. Arm and prefix are those of the training, unless said."""
        row = ROWS[name]
        run = evaluation(name, kind, row.prefix if prefix is None else prefix)
        by_seed = self._figures.get((run, arm or row.arm, k), {})
        return {seed: figures[what] for seed, figures in by_seed.items() if what in figures}

    def show(self, name: str, what: str, *how, **more) -> str:
        return spread(self.get(name, what, *how, **more))


def figures_of(results: Results) -> dict[str, float]:
    """Return the figures of one file: `fmt` is the paper's f, `calls` its kappa."""
    found = costs(results) | {"accuracy": next(iter(results.figures().values())) / 100}
    called = [record["score"] for record in results.records if executed(record)]
    skipped = [record["score"] for record in results.records if not executed(record)]
    # Both dispatches at the same budget: episodes with exactly two calls.
    of_two = [record["seconds"] for record in results.records if executed(record) == 2]
    for name, values in (("accuracy_called", called), ("accuracy_skipped", skipped), ("seconds_of_two", of_two)):
        if values:
            found[name] = statistics.fmean(values)
    return found


def deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def spread(values: BySeed) -> str:
    """Write mean ± std over seeds."""
    found = list(values.values())
    if len(found) < 2:
        return "".join(f"{value:.2f}" for value in found)
    return f"{statistics.fmean(found):.2f} ± {deviation(found):.2f}"


# ------------------------------------------------------------------------------------------------ the tables


def claims_table(measured: Measured) -> str:
    """What the paper says, and in how many seeds the toy says it, too."""
    get = measured.get
    claims = [
        ("plain GRPO loses its calls: kappa", "cold start", get("sft", "calls"), ">", "GRPO", get("grpo", "calls")),
        ("PARA-GRPO keeps them: kappa", "PARA-GRPO", get("paragrpo", "calls"), ">", "GRPO", get("grpo", "calls")),
        ("plain GRPO loses its format: f", "cold start", get("sft", "fmt"), ">", "GRPO", get("grpo", "fmt")),
        ("anchoring repairs it: f", "PARA-GRPO", get("paragrpo", "fmt"), ">", "cold start", get("sft", "fmt")),
        ("with 4 frames, calling pays: accuracy of the cold start",
         "called", get("sft", "accuracy_called", k=4), ">", "did not", get("sft", "accuracy_skipped", k=4)),
        ("plain GRPO unlearns it: accuracy with 4 frames",
         "cold start", get("sft", "accuracy", k=4), ">", "GRPO", get("grpo", "accuracy", k=4)),
        ("PARA-GRPO learns it: accuracy with 4 frames",
         "PARA-GRPO", get("paragrpo", "accuracy", k=4), ">", "cold start", get("sft", "accuracy", k=4)),
        ("and calls where it pays: kappa of PARA-GRPO",
         "4 frames", get("paragrpo", "calls", k=4), ">", "64 frames", get("paragrpo", "calls", k=64)),
        ("parallel calls are faster: seconds of an episode with two", "parallel",
         get("sft", "seconds_of_two", "alone"), "<", "sequential", get("sft_sequential", "seconds_of_two", "alone")),
        ("and no worse: greedy accuracy, mean over K", "parallel",
         get("sft", "accuracy", "greedy"), ">=", "sequential", get("sft_sequential", "accuracy", "greedy")),
    ]  # fmt: skip
    compare = {">": operator.gt, "<": operator.lt, ">=": operator.ge}
    rows = []
    for claim, left, a, sign, right, b in claims:
        both = a.keys() & b.keys()
        if both:  # the demo does without some
            true = sum(compare[sign](a[seed], b[seed]) for seed in both)
            rows.append([claim, f"{left} {spread(a)} {sign} {right} {spread(b)}", f"{true} of {len(both)} seeds"])
    return markdown("#### The point", ["claim", "measured", "holds in"], rows)


def outcome_table(measured: Measured) -> str:
    """In samples, as in training: f, kappa (paper's values in brackets), accuracy with 4 frames; greedy accuracy by K.

    Some rows are also asked with the think prefix although they were trained without, or the other way round."""
    published = yaml.safe_load(PUBLISHED.read_text())["ablations"]
    paper = {row["name"]: row["scores"][:2] for row in published["stages"] + published["components"]}
    lines = []
    for row in ROWS.values():
        for prefix in (row.prefix, not row.prefix):
            title, seeds = row.title, len(measured.get(row.name, "fmt", prefix=prefix))
            if not seeds:
                continue
            f, kappa = (measured.show(row.name, what, prefix=prefix) for what in ("fmt", "calls"))
            if prefix != row.prefix:
                title += ", asked with the prefix" if prefix else ", asked without the prefix"
            elif row.paper in paper:
                f, kappa = f"{f} [{paper[row.paper][0]}]", f"{kappa} [{paper[row.paper][1]}]"
            line = [title, seeds, f, kappa, measured.show(row.name, "strict", prefix=prefix)]
            line += [measured.show(row.name, "calls", k=k, prefix=prefix) for k in (4, 64)]
            line.append(measured.show(row.name, "accuracy", k=4, prefix=prefix))
            lines.append(line + [measured.show(row.name, "accuracy", "greedy", k, prefix=prefix) for k in GREEDY])
    header = ["row", "seeds", "f [paper]", "kappa [paper]", "strict", "kappa K=4", "kappa K=64", "acc K=4, sampled"]
    return markdown("#### A. Rows", header + [f"acc K={k}" for k in GREEDY], lines)


def dispatch_table(measured: Measured) -> str:
    """All calls of a turn at once, or one per turn with the same number in all; one episode at a time."""
    rows = []
    for name, arm in DISPATCH:
        accuracy = [measured.show(name, "accuracy", "alone", k, arm) for k in ALONE]
        figures = ("calls", "turns", "tokens", "seconds", "seconds_of_two")
        if any(accuracy):
            rows.append(
                [ROWS[name].title, arm, *accuracy, *(measured.show(name, what, "alone", arm=arm) for what in figures)]
            )
    header = ["row", "arm", *(f"acc K={k}" for k in ALONE), "calls", "turns", "tokens", "seconds", "with two calls"]
    return markdown("#### C. Dispatch (greedy, one episode at a time)", header, rows)


def necessity_table(measured: Measured) -> str:
    """The Tool Necessity Gap: what calling is worth at each K, in a policy's own samples and when it cannot."""
    rows = []
    for name in NECESSITY:
        for k in SAMPLED:
            called = measured.show(name, "accuracy_called", k=k)
            skipped = measured.show(name, "accuracy_skipped", k=k)
            rows.append([ROWS[name].title, k, called, skipped, measured.show(name, "accuracy", "greedy", k, "none")])
    header = ["row", "K", "it called", "it did not", "no tools offered (greedy)"]
    return markdown("#### B. What a call is worth: accuracy", header, rows)


def draw_outcomes(measured: Measured, path: Path) -> None:
    """Draw the point in two panels: accuracy and calls of sampled episodes by K, after training."""
    from matplotlib import pyplot, rc_context

    from study.report import LINE_COLORS, STYLE

    with rc_context(STYLE):
        figure, axes = pyplot.subplots(1, 2, figsize=(9, 3), layout="constrained")
        for axis, what, title in zip(axes, ("accuracy", "calls"), ("accuracy", "κ: calls per episode")):
            for name, color in zip((*DRAWN, "sft"), (*LINE_COLORS[: len(DRAWN)], "#777777")):
                by_k = [list(measured.get(name, what, k=k).values()) for k in SAMPLED]
                if not all(by_k):  # not every K has been evaluated
                    continue
                y, std = [statistics.fmean(values) for values in by_k], [deviation(values) for values in by_k]
                form = {"color": color, "linestyle": "--" if name == "sft" else "-", "marker": "o", "capsize": 2}
                axis.errorbar(range(len(y)), y, std, label=ROWS[name].title, **form)
            axis.set_title(title)
            axis.set_xticks(range(len(SAMPLED)), [f"{k} frames" for k in SAMPLED])
            axis.set_ylim(bottom=0)
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper left", ncols=5)
        figure.savefig(path)
        pyplot.close(figure)


# ------------------------------------------------------------------------------------------------ the commands


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["demo", "study", "tables"])
    parser.add_argument("--root", type=Path, help="folder of the runs and of what is written (default: runs/demo; of the study, runs/paradox and results)")  # fmt: skip
    parser.add_argument("--seeds", type=int, default=3, help="of the study")
    args = parser.parse_args()
    os.chdir(Path(__file__).parent.parent)
    demo, study = args.what == "demo", Path("runs/paradox")
    root = args.root or (Path("runs/demo") if demo else study)
    written = Path("results") if root == study else root
    if args.what == "tables" and not (root / "done").exists():
        parser.error(f"there is no study in {root}; `python -m study.paradox study --root {root}` makes one")

    good = True
    if demo:
        good = run_jobs(all_jobs(root, [0], MAIN), root)
    elif args.what == "study":
        good = run_jobs(all_jobs(root, range(args.seeds), STUDY, CONTROLS), root)
    measured = Measured(root)
    tables = (outcome_table, necessity_table, dispatch_table, claims_table)
    text = "\n\n".join(table(measured) for table in tables)
    print(f"\n{text}\n")
    shown = [str(path) for name in DRAWN for path in sorted(root.glob(f"seed*/{name}"))]
    page = [sys.executable, "-m", "study.report", *shown, "-o", f"{root}/report.html", "--png", str(written)]
    good &= subprocess.call(page) == 0
    draw_outcomes(measured, written / "outcomes.png")
    if not demo:
        command = f"python -m study.paradox study --seeds {len(list(root.glob('seed*')))}"
        commits = sorted({marker.read_text() for marker in (root / "done").iterdir()})
        made = f"`{command}` at commit {', '.join(commits)}; {os.cpu_count()} CPU cores; mean ± std over seeds."
        put_between_marks(written / "paradox.md", "tables", "paradox.py", f"{made}\n\n{text}", "The paradox on the toy")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
