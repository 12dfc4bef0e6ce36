"""paradox.py: the Tool Prior Paradox on the toy: trainings, evaluations, and the paper's tables with the toy's numbers.

    python -m study.paradox demo      # one seed: cold start, plain GRPO, PARA-GRPO, evaluation, runs/demo/report.html
    python -m study.paradox study     # every row over three seeds, the controls over one; the tables of results/paradox.md

All rows of a seed have the same budget, and the same cold start unless their name says otherwise. Each training or
evaluation is a process of its own, as a user would start it; those that are done are not run again, so that the study
may be stopped at any time. f and kappa are those of samples at tau = 1 on test videos, of all rows alike.

What the rows are called, and which reward they have:

    grpo, paragrpo           R = R_acc: accuracy-only GRPO, and what anchoring and gating make of it
    grpo_full, ...           the paper's full reward, which pays for tags and for calls at every K

Deliberately missing: tuning. No row has settings of its own beyond what its name says.
"""

import argparse
import json
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

from evals.compare import PUBLISHED, Results, costs, executed, markdown, put_between_marks, read_results
from runtime.config import git_commit

GREEDY, SAMPLED, ALONE = (4, 8, 16, 32, 64), (4, 16, 64), (4, 64)  # K of the evaluations
LIMIT = 64  # test tasks of each


@dataclass(frozen=True)
class Row:
    """One training by RL; without a config, a cold start or the untrained model."""

    name: str
    title: str
    config: str = ""
    changes: tuple[str, ...] = ()  # of the config; of a cold start, the flags of `toy.py build`
    start: str = "sft"
    prefix: bool = True  # as trained
    paper: str = ""  # its row in the paper's tables

    @property
    def arm(self) -> str:
        return "sequential" if "sequential" in self.name else "parallel"


UNTRAINED = Row("base", "untrained", prefix=False, paper="Qwen3-VL-8B")
STARTS = (
    Row("sft", "cold start", prefix=False, paper="+SFT"),
    Row("sft_sequential", "cold start, one call per turn", changes=("--one-by-one",), prefix=False),
    Row("sft_tidy", "cold start without loose formats", changes=("--p-loose", "0"), prefix=False),
    Row("sft_no_tools", "cold start without tools, either", changes=("--p-loose", "0", "--p-tool", "0"), prefix=False),
)
MAIN = (
    Row("grpo", "GRPO, accuracy only", "toy_grpo", prefix=False, paper="SFT+GRPO"),
    Row("paragrpo", "PARA-GRPO", "toy_paragrpo", paper="Full PARA-GRPO"),
)
# It cannot start where the others do: their cold start never saw one call after another.
SEQUENTIAL = Row("sequential", "PARA-GRPO, one call per turn", "toy_paragrpo", ("rollout.dispatch=sequential",), "sft_sequential")  # fmt: skip
COMPONENTS = (
    Row("anchoring", "+ Exploration Anchoring", "toy_anchoring", paper="+Exploration Anchoring"),
    Row("gating", "+ nFrames Gating", "toy_gating", prefix=False, paper="+nFrames Gating"),
    Row("no_gamma", "PARA-GRPO, - gamma", "toy_no_gamma", paper="-gamma penalty"),
    Row("grpo_full", "GRPO, full reward", "toy_grpo_full", prefix=False, paper="SFT+GRPO"),
    Row("paragrpo_full", "PARA-GRPO, full reward", "toy_paragrpo_full", paper="Full PARA-GRPO"),
    Row("no_tool_reward", "PARA-GRPO, full reward, - R_tool", "toy_no_tool_reward", paper="-R_tool"),
)
CONTROLS = (
    Row("prefix_only", "prefix and gating, no anchor", "toy_paragrpo", ("reward.anchor.credit=off",)),
    Row("anchor_only", "anchor and gating, no prefix", "toy_paragrpo", ("rollout.think_prefix=false",), prefix=False),
    Row("credit_sequence", "full reward, credit: sequence", "toy_paragrpo_full", ("reward.anchor.credit=sequence",)),
    Row("credit_logp", "full reward, credit: logp", "toy_paragrpo_full", ("reward.anchor.credit=logp",)),
    Row("grpo_tidy_start", "GRPO, from the tidy start", "toy_grpo", start="sft_tidy", prefix=False),
    Row("paragrpo_tidy_start", "PARA-GRPO, from there", "toy_paragrpo", start="sft_tidy"),
    Row("grpo_no_tool_start", "GRPO, full reward, without tools before", "toy_grpo_full", start="sft_no_tools", prefix=False),
    Row("paragrpo_no_tool_start", "PARA-GRPO, full reward, from there", "toy_paragrpo_full", start="sft_no_tools"),
)  # fmt: skip
STUDY = (*MAIN, SEQUENTIAL, *COMPONENTS)
ROWS = {row.name: row for row in (UNTRAINED, *STARTS, *STUDY, *CONTROLS)}
# How calls are dispatched in table C: (whose weights, arm). The two cold starts teach the same calls, so their budgets are
# equal; RL moves them apart.
DISPATCH = {
    "cold start: parallel": ("sft", "parallel"),
    "cold start: one call per turn": ("sft_sequential", "sequential"),
    "PARA-GRPO: parallel": ("paragrpo", "parallel"),
    "PARA-GRPO: one call per turn": ("sequential", "sequential"),
    "PARA-GRPO: trained parallel, one call per turn": ("paragrpo", "sequential"),
}
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
    run: Path | None = None  # whose metrics tell how far it is


def plan(root: Path, seeds: Sequence[int], rows: Sequence[Row], controls: Sequence[Row] = ()) -> list[Job]:
    """All jobs, in the order of their importance; the controls with the first seed only."""
    jobs = []
    for seed, part in [*((seed, rows) for seed in seeds), (seeds[0], controls)]:
        folder = root / f"seed{seed}"
        starts = list(dict.fromkeys(row.start for row in part))
        jobs += [build(root, start) for start in starts] + [cold_start(root, folder, start, seed) for start in starts]
        for start in starts:
            jobs += evaluations(folder, ROWS[start], folder / start / "model")
        if seed == seeds[0]:
            jobs += evaluations(folder, UNTRAINED, data_of(root, "sft") / "model")
        jobs += [train(root, folder, row, seed) for row in part]
        for row in part:
            jobs += evaluations(folder, row, folder / row.name / "model")
    return list(dict.fromkeys(jobs))


def data_of(root: Path, start: str) -> Path:
    return root / "data" / start


def build(root: Path, start: str) -> Job:
    target = data_of(root, start)
    return Job(f"data-{start}", ("-m", "study.toy", "build", str(target), *ROWS[start].changes))


def cold_start(root: Path, folder: Path, start: str, seed: int) -> Job:
    run, where = folder / start, data_of(root, start)
    tree = yaml.safe_load(Path("configs/toy_sft.yaml").read_text())
    sources = [source | {"path": str(where / Path(source["path"]).name)} for source in tree["data"]["sources"]]
    changes = [f"run={run}", f"policy.checkpoint={where}/model", f"data.sources={json.dumps(sources)}"]
    changes += [f"data.seed={seed}", f"val.sources=[{{path: {where}/sft_val.parquet}}]"]
    return Job(f"{folder.name}-{start}", ("sft.py", "configs/toy_sft.yaml", *changes), f"data-{start}", run)


def train(root: Path, folder: Path, row: Row, seed: int) -> Job:
    run, start, where = folder / row.name, folder / row.start / "model", data_of(root, "sft")
    changes = [f"run={run}", f"policy.checkpoint={start}", f"seed={seed}", "val=null", *row.changes]
    changes += [f"data.sources=[{{path: {where}/rl.parquet}}]", f"data.seed={seed}"]
    command = ("rl.py", f"configs/{row.config}.yaml", *changes)
    return Job(f"{folder.name}-{row.name}", command, f"{folder.name}-{row.start}", run)


def evaluations(folder: Path, row: Row, model: Path) -> list[Job]:
    """Greedy at every K; sampled, as in training; for table C, one episode at a time, so that its seconds are its own."""
    arms = (row.arm, "none") if row.name in NECESSITY else (row.arm,)
    jobs = [evaluate(folder, row.name, model, "greedy", GREEDY, arms, row.prefix)]
    for prefix in (row.prefix, not row.prefix)[: 1 + (row.name in PREFIX)]:
        jobs.append(evaluate(folder, row.name, model, "sampled", SAMPLED, (row.arm,), prefix))
    if arms := tuple(arm for name, arm in DISPATCH.values() if name == row.name):
        jobs.append(evaluate(folder, row.name, model, "alone", ALONE, arms, row.prefix))
    return jobs


def evaluate(folder: Path, name: str, model: Path, kind: str, ks: tuple, arms: tuple, prefix: bool) -> Job:
    run = folder / "eval" / evaluation(name, kind, prefix)
    changes = [f"run={run}", f"name={name}", f"checkpoint={model}", f"frames={list(ks)}", f"arms=[{', '.join(arms)}]"]
    changes += [f"rollout.think_prefix={str(prefix).lower()}", f"rollout.temperature={int(kind == 'sampled')}"]
    # The same reading of answers for every row: that of the accuracy-only reward.
    changes += ["grading.untagged_answer=true", f"splits.toy={folder.parent}/data/sft", f"limit={LIMIT}"]
    changes += ["rollout.concurrency=1"] if kind == "alone" else []
    command = ("eval.py", "configs/eval/toy.yaml", *changes)
    made_by = "data-sft" if name == "base" else f"{folder.name}-{name}"
    return Job(f"{folder.name}-eval-{run.name}", command, made_by)


def evaluation(name: str, kind: str, prefix: bool) -> str:
    return f"{name}-{kind}{'' if prefix else '-bare'}"


def work(jobs: Sequence[Job], at_once: int, root: Path) -> bool:
    """Run what is not done, as soon as what it needs is there. False if something failed; its log says why."""
    done, logs = root / "done", root / "logs"
    for folder in (done, logs):
        folder.mkdir(parents=True, exist_ok=True)
    waiting, running, good = [job for job in jobs if not (done / job.name).exists()], {}, True
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}
    with tqdm(total=len(jobs), initial=len(jobs) - len(waiting), desc="paradox", unit="job") as bar:
        try:
            while waiting or running:
                for job, process in list(running.items()):
                    if process.poll() is not None:
                        del running[job]
                        if process.returncode == 0:
                            (done / job.name).write_text(git_commit())
                            bar.update()
                        else:
                            good = False
                            bar.write(f"failed: {job.name}, see {logs / job.name}.log")
                ready = [job for job in waiting if not job.needs or (done / job.needs).exists()]
                if waiting and not ready and not running:  # what they need has failed
                    return False
                for job in ready[: at_once - len(running)]:
                    waiting.remove(job)
                    with (logs / f"{job.name}.log").open("ab") as log:
                        command = [sys.executable, *job.command]
                        running[job] = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
                bar.set_postfix_str("; ".join(f"{job.name}{progress(job)}" for job in running))
                time.sleep(0.5)
        finally:
            for process in running.values():
                process.kill()
    return good


def progress(job: Job) -> str:
    """How many steps a training has done."""
    lines = job.run / "metrics.jsonl" if job.run else None
    return f" {len(lines.read_bytes().splitlines())}" if lines and lines.exists() else ""


# ------------------------------------------------------------------------------------------------ the numbers

BySeed = dict[str, float]


class Seeds:
    """What the evaluations of all seeds say: a value for each seed that has got so far."""

    def __init__(self, root: Path):
        self.folders, self.done = sorted(root.glob("seed*")), root / "done"

    def evaluated(self, name: str, kind: str = "greedy", arm: str = "", prefix: bool | None = None) -> dict[str, dict[int, Results]]:  # fmt: skip
        """Results by K. Arm and prefix: as the row was trained, unless said."""
        found, trained = {}, ROWS[name]
        for folder in self.folders:
            run = folder / "eval" / evaluation(name, kind, trained.prefix if prefix is None else prefix)
            if (self.done / f"{folder.name}-eval-{run.name}").exists():
                files = map(read_results, run.glob(f"*-{arm or trained.arm}.jsonl"))
                found[folder.name] = {r.settings["k"]: r for r in files}
        return found

    def accuracy(self, name: str, k: int, kind: str = "greedy", *how, **more) -> BySeed:
        found = self.evaluated(name, kind, *how, **more)
        return {seed: next(iter(by_k[k].figures().values())) / 100 for seed, by_k in found.items() if k in by_k}

    def cost(self, name: str, what: str, kind: str = "sampled", *how, k: int = 0, **more) -> BySeed:
        """At one K, or the mean over those of an evaluation: `fmt` is the paper's f, `calls` its kappa."""
        found = {
            seed: [costs(results)[what] for at, results in by_k.items() if k in (0, at)]
            for seed, by_k in self.evaluated(name, kind, *how, **more).items()
        }
        return {seed: statistics.fmean(values) for seed, values in found.items() if values}

    def seconds_of_two(self, name: str, arm: str) -> BySeed:
        """Of the lone episodes with exactly two calls: both dispatches at the same budget."""
        found = {}
        for seed, by_k in self.evaluated(name, "alone", arm).items():
            records = [r for results in by_k.values() for r in results.records]
            seconds = [r["seconds"] for r in records if executed(r) == 2]
            found |= {seed: statistics.fmean(seconds)} if seconds else {}
        return found

    def mean_accuracy(self, name: str) -> BySeed:
        by_k = [self.accuracy(name, k) for k in GREEDY]
        whole = [seed for seed in by_k[0] if all(seed in found for found in by_k)]
        return {seed: statistics.fmean(found[seed] for found in by_k) for seed in whole}

    def accuracy_if(self, name: str, k: int, called: bool) -> BySeed:
        """Of the sampled episodes that called a tool, or of those that did not."""
        found = {}
        for seed, by_k in self.evaluated(name, "sampled").items():
            records = by_k[k].records if k in by_k else []
            scores = [r["score"] for r in records if (executed(r) > 0) is called]
            found |= {seed: statistics.fmean(scores)} if scores else {}
        return found


def deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def spread(values: BySeed) -> str:
    """mean ± std over seeds."""
    if not values:
        return ""
    mean, std = (f"{how(list(values.values())):.2f}" for how in (statistics.fmean, deviation))
    return f"{mean} ± {std}" if len(values) > 1 else mean


# ------------------------------------------------------------------------------------------------ the tables


def claims_table(seeds: Seeds) -> str:
    """What the paper says, and in how many seeds the toy says it, too."""
    f, kappa = ({name: seeds.cost(name, what) for name in ("sft", "grpo", "paragrpo")} for what in ("fmt", "calls"))
    at_4 = {name: seeds.accuracy(name, 4, "sampled") for name in ("sft", "grpo", "paragrpo")}
    few, many = (seeds.cost("paragrpo", "calls", k=k) for k in (4, 64))
    called, skipped = (seeds.accuracy_if("sft", 4, called) for called in (True, False))
    ways = [DISPATCH[f"cold start: {way}"] for way in ("parallel", "one call per turn")]
    quick, slow = (seeds.seconds_of_two(name, arm) for name, arm in ways)
    at_once, in_turn = (seeds.mean_accuracy(name) for name, _ in ways)  # greedy at every K
    claims = [
        ("plain GRPO loses its calls: kappa", "cold start", kappa["sft"], ">", "GRPO", kappa["grpo"]),
        ("PARA-GRPO keeps them: kappa", "PARA-GRPO", kappa["paragrpo"], ">", "GRPO", kappa["grpo"]),
        ("plain GRPO loses its format: f", "cold start", f["sft"], ">", "GRPO", f["grpo"]),
        ("anchoring repairs it: f", "PARA-GRPO", f["paragrpo"], ">", "cold start", f["sft"]),
        ("with 4 frames, calling pays: accuracy of the cold start", "called", called, ">", "did not", skipped),
        ("plain GRPO unlearns it: accuracy with 4 frames", "cold start", at_4["sft"], ">", "GRPO", at_4["grpo"]),
        ("PARA-GRPO learns it: accuracy with 4 frames", "PARA-GRPO", at_4["paragrpo"], ">", "cold start", at_4["sft"]),
        ("and calls where it pays: kappa of PARA-GRPO", "4 frames", few, ">", "64 frames", many),
        ("parallel calls are faster: seconds of an episode with two", "parallel", quick, "<", "sequential", slow),
        ("and no worse: greedy accuracy, mean over K", "parallel", at_once, ">=", "sequential", in_turn),
    ]  # fmt: skip
    rows = []
    for claim, left, a, sign, right, b in claims:
        if not (both := a.keys() & b.keys()):  # the demo does without some
            continue
        true = [{">": a[s] > b[s], "<": a[s] < b[s], ">=": a[s] >= b[s]}[sign] for s in both]
        rows.append([claim, f"{left} {spread(a)} {sign} {right} {spread(b)}", f"{sum(true)} of {len(both)} seeds"])
    return markdown("#### The point", ["claim", "measured", "holds in"], rows)


def outcome_table(title: str, seeds: Seeds, rows: Sequence[Row]) -> str:
    """In samples, as in training: f, kappa (paper's values in brackets), accuracy with 4 frames; greedy accuracy by K."""
    published = yaml.safe_load(PUBLISHED.read_text())["ablations"]
    paper = {row["name"]: row["scores"][:2] for row in published["stages"] + published["components"]}
    lines = []
    for row in rows:
        if count := len(seeds.evaluated(row.name)):
            theirs = [f" [{value}]" for value in paper.get(row.paper, ())] or ["", ""]
            ours = [spread(seeds.cost(row.name, what)) for what in ("fmt", "calls")]
            sampled = [seeds.cost(row.name, "strict"), *(seeds.cost(row.name, "calls", k=k) for k in (4, 64))]
            values = [*sampled, seeds.accuracy(row.name, 4, "sampled"), *(seeds.accuracy(row.name, k) for k in GREEDY)]
            lines.append([row.title, count, *map("".join, zip(ours, theirs)), *map(spread, values)])
    header = ["row", "seeds", "f [paper]", "kappa [paper]", "strict", "kappa K=4", "kappa K=64", "acc K=4, sampled"]
    header += [f"acc K={k}" for k in GREEDY]
    return markdown(title, header, lines)


def prefix_table(seeds: Seeds, names: Sequence[str]) -> str:
    """At test time, sampled as in training, with the forced <think> and without."""
    rows = []
    for name in names:
        columns = [seeds.cost(name, what, prefix=p) for p in (True, False) for what in ("fmt", "strict", "calls")]
        if any(columns):
            rows.append([ROWS[name].title, *map(spread, columns)])
    header = ["row", *(f"{what}, {kind}" for kind in ("prefix", "none") for what in ("f", "strict", "kappa"))]
    return markdown("#### With the think prefix at test time, and without (mean over K = 4, 16, 64)", header, rows)


def dispatch_table(seeds: Seeds) -> str:
    """Table C: all calls of a turn at once, or one per turn with the same number in all; one episode at a time."""
    rows = []
    for way, (name, arm) in DISPATCH.items():
        if not seeds.evaluated(name, "alone", arm):
            continue
        accuracy = [spread(seeds.accuracy(name, k, "alone", arm)) for k in ALONE]
        spent = [spread(seeds.cost(name, what, "alone", arm)) for what in ("calls", "turns", "tokens", "seconds")]
        rows.append([way, *accuracy, *spent, spread(seeds.seconds_of_two(name, arm))])
    header = ["dispatch", *(f"acc K={k}" for k in ALONE), "calls", "turns", "tokens", "seconds", "with two calls"]
    table = markdown("#### C. Dispatch (greedy, one episode at a time)", header, rows)
    published = yaml.safe_load(PUBLISHED.read_text())["ablations"]
    theirs = [f"{row['name']} {', '.join(map(str, row['scores'][2:]))}" for row in published["dispatch"]]
    return f"{table}\n\nThe paper's accuracy on {', '.join(published['columns'][2:])}: {'; '.join(theirs)}."


def necessity_table(seeds: Seeds, names: Sequence[str]) -> str:
    """The Tool Necessity Gap: what calling is worth at each K, in a policy's own samples and when it cannot."""
    rows = []
    for name in names:
        for k in SAMPLED:
            columns = [
                seeds.accuracy_if(name, k, True),
                seeds.accuracy_if(name, k, False),
                seeds.accuracy(name, k, arm="none"),
            ]
            rows.append([ROWS[name].title, k, *map(spread, columns)])
    header = ["row", "K", "it called", "it did not", "no tools offered (greedy)"]
    return markdown("#### What a call is worth: accuracy", header, rows)


def tables(root: Path, demo: bool) -> str:
    seeds, stages = Seeds(root), [UNTRAINED, STARTS[0], *MAIN]
    parts = [outcome_table("#### A. Stages", seeds, stages)]
    if not demo:
        parts.append(outcome_table("#### B. Components", seeds, [*MAIN, *COMPONENTS]))
    parts.append(dispatch_table(seeds))
    if not demo:
        parts.append(outcome_table("#### Controls", seeds, [*CONTROLS[:4], *STARTS[1:], *CONTROLS[4:]]))
    parts += [prefix_table(seeds, PREFIX), necessity_table(seeds, NECESSITY)]
    return "\n\n".join([*parts, claims_table(seeds)])


def draw_outcomes(seeds: Seeds, path: Path) -> None:
    """The point in two panels: accuracy and calls of sampled episodes by K, after training."""
    from matplotlib import pyplot, rc_context

    from study.report import COLORS, STYLE

    panels = {
        "accuracy": lambda name, k: seeds.accuracy(name, k, "sampled"),
        "κ: calls per episode": lambda name, k: seeds.cost(name, "calls", k=k),
    }
    with rc_context(STYLE):
        figure, axes = pyplot.subplots(1, len(panels), figsize=(9, 3), layout="constrained")
        for axis, (title, values_at) in zip(axes, panels.items()):
            for name, color in zip((*DRAWN, "sft"), (*COLORS[: len(DRAWN)], "#777777")):
                at = [values for k in SAMPLED if (values := list(values_at(name, k).values()))]
                if len(at) == len(SAMPLED):  # all K have been evaluated
                    y, std = ([how(values) for values in at] for how in (statistics.fmean, deviation))
                    form = {"color": color, "linestyle": "--" if name == "sft" else "-", "marker": "o", "capsize": 2}
                    axis.errorbar(range(len(at)), y, std, label=ROWS[name].title, **form)
            axis.set_title(title)
            axis.set_xticks(range(len(SAMPLED)), [f"{k} frames" for k in SAMPLED])
            axis.set_ylim(bottom=0)
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper left", ncols=5)
        figure.savefig(path)
        pyplot.close(figure)


# ------------------------------------------------------------------------------------------------ the commands


def write_results(path: Path, text: str, command: str, root: Path) -> None:
    """Put the tables between their marks; what people wrote around them stays."""
    commits = sorted({marker.read_text() for marker in (root / "done").iterdir()})
    made = f"`{command}` at commit {', '.join(commits)}; {os.cpu_count()} CPU cores; mean ± std over seeds."
    put_between_marks(path, "tables", "paradox.py", f"{made}\n\n{text}", "The paradox on the toy")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["demo", "study", "tables"], help="tables: only write what there is")
    parser.add_argument(
        "--root",
        type=Path,
        help="folder of the runs and of what is written (default: runs/demo; of the study, runs/paradox and results)",
    )
    parser.add_argument("--seeds", type=int, default=3, help="of the study")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at once, one thread each")
    args = parser.parse_args()
    if min(args.seeds, args.jobs) < 1:
        parser.error(f"--seeds {args.seeds} --jobs {args.jobs}: at least 1 of each")
    demo = args.what == "demo"
    os.chdir(Path(__file__).parent.parent)
    root = args.root or Path("runs/demo" if demo else "runs/paradox")
    if args.what == "tables" and not (root / "done").exists():
        parser.error(f"there is no study in {root}; `python -m study.paradox study --root {root}` makes one")
    jobs = plan(root, [0], MAIN) if demo else plan(root, range(args.seeds), STUDY, CONTROLS)
    good = args.what == "tables" or work(jobs, args.jobs, root)
    text = tables(root, demo)
    print(f"\n{text}\n")
    shown = [path for name in DRAWN for path in sorted(root.glob(f"seed*/{name}"))]
    target, written = root / "report.html", root if demo or args.root else Path("results")
    report = [sys.executable, "-m", "study.report", *map(str, shown), "-o", str(target), "--png", str(written)]
    good &= subprocess.call(report) == 0
    draw_outcomes(Seeds(root), written / "outcomes.png")
    if not demo:
        seeds = len(list(root.glob("seed*")))
        write_results(written / "paradox.md", text, f"python -m study.paradox study --seeds {seeds}", root)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
