"""paradox.py: reproduce the Tool Prior Paradox on the toy: train and evaluate the rows below, and check the paper's claims.

    python -m study.paradox demo      # seed 0 of the cold start, plain GRPO and PARA-GRPO; exit status 1 if a claim fails
    python -m study.paradox study     # five seeds of every row, then the tables and pictures of results/
    python -m study.paradox tables    # only the tables and pictures, of what has been evaluated

A seed sets everything: clips, initial weights, order of the data, samples. All rows of a seed have the same cold start and
the same budget. A job that is in ROOT/done (ROOT: runs/demo or runs/paradox) is not run again, so a study can be stopped at any time.
Remove ROOT after a change of the code.

Deliberately missing: tuning. A row differs from the others only in what its title says.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from evals.results import read_results
from evals.tables import markdown, per_item
from runtime.config import read_tree
from runtime.folder import git_commit
from runtime.processes import start_group
from runtime.run import ALARMS
from study import toy

SEEDS = 5
RANKS = 2  # ranks that train a cold start, on any number of cores: its figures depend on them
KS = (4, 16, 64)  # values of K in evaluations, which sample as training does

# Figures of a step that the console shows while trainings run: five of RL, and five of SFT.
PROGRESS = ("R_acc", "f", "well_formed", "kappa", "loss", "loss_answer", "loss_arguments", "lr", "tokens_per_second")

Stage = dict[str, list[str]]  # name of a job -> its command: the arguments of Python
# (seed, row, K) -> figures by name. K is "all" for all K of an evaluation together.
Figures = dict[tuple[int, str, int | str], dict[str, float]]


class Row(NamedTuple):
    """A row of the tables: a policy, which is evaluated. An RL training has a config."""

    name: str
    title: str
    config: str = ""
    changes: tuple[str, ...] = ()  # overrides of the config
    paper: str = ""  # f and kappa of the paper's row
    policy: str = ""  # the folder whose model is evaluated, if it is not the row's own
    arm: str = "parallel"  # how the evaluation dispatches calls


ROWS = (
    Row("base", "untrained", paper="0.03, 0.45", policy="sft-toy"),
    Row("sft", "cold start", paper="0.13, 2.50"),
    Row("grpo", "accuracy-only GRPO", "toy_grpo", paper="0.13, 0.02"),
    Row("paragrpo", "PARA-GRPO", "toy_paragrpo", paper="0.41, 0.21"),
    Row("sequential", "PARA-GRPO, one call per turn", policy="paragrpo", arm="sequential"),
    Row("anchoring", "+ Exploration Anchoring", "toy_anchoring", paper="0.35, 0.19"),
    Row("gating", "+ nFrames Gating", "toy_gating", paper="0.10, 1.36"),
    Row("grpo_full", "GRPO, full reward", "toy_grpo_full", paper="0.13, 0.02"),
    Row("paragrpo_full", "PARA-GRPO, full reward", "toy_paragrpo_full", paper="0.41, 0.21"),
    Row("no_tool_reward", "PARA-GRPO, full reward, - R_tool", "toy_no_tool_reward", paper="0.33, 0.04"),
    Row("no_gamma", "PARA-GRPO, - gamma", "toy_no_gamma", paper="0.36, 0.27"),
    Row("prefix_only", "prefix and gating, no anchor", "toy_paragrpo", ("reward.anchor.credit=off",)),
    Row("anchor_only", "anchor and gating, no prefix", "toy_paragrpo", ("rollout.think_prefix=false",)),
)

# ------------------------------------------------------------------------------------------------ the jobs


def stages_of(root: Path, seed: int, rows: Sequence[Row]) -> list[Stage]:
    """Return the jobs of one seed in four stages: build, cold start, RL, evaluation. Each needs those before it."""
    folder = root / f"seed{seed}"
    # The build's folder and job are called sft-toy: videos, questions, SFT rows and the untrained model.
    build = ["-m", "study.toy", "build", f"{folder}/sft-toy", "--seed", str(seed)]
    trainings: Stage = {}
    evaluations: Stage = {}
    for row in rows:
        if row.config:
            trainings[f"seed{seed}-{row.name}"] = train_command(row, folder, seed)
        evaluations[f"seed{seed}-{row.name}-eval"] = eval_command(row, folder)
    return [{f"seed{seed}-sft-toy": build}, {f"seed{seed}-sft": start_command(folder, seed)}, trainings, evaluations]


def start_command(folder: Path, seed: int) -> list[str]:
    """Return the command that trains the cold start from the toy's untrained model."""
    built = folder / "sft-toy"
    sources = read_tree(Path("configs/toy_sft.yaml"))["data"]["sources"]
    for source in sources:
        source["path"] = str(built / Path(source["path"]).name)
    changes = [f"run={folder}/sft", f"data.seed={seed}", f"policy.checkpoint={built}/model"]
    changes += [f"data.sources={json.dumps(sources)}", f"val.sources=[{{path: {built}/sft_val.parquet}}]"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={RANKS}"]
    return [*torchrun, "sft.py", "configs/toy_sft.yaml", *changes]


def train_command(row: Row, folder: Path, seed: int) -> list[str]:
    """Return the command that trains a row by RL, from the cold start."""
    changes = [f"run={folder / row.name}", f"data.seed={seed}", f"policy.checkpoint={folder}/sft/model", f"seed={seed}"]
    changes += [f"data.sources=[{{path: {folder}/sft-toy/rl.parquet}}]", "val=null", *row.changes]
    return ["rl.py", f"configs/{row.config}.yaml", *changes]


def eval_command(row: Row, folder: Path) -> list[str]:
    """Return the command that evaluates a row. Answers of every row are read as in the accuracy-only reward."""
    model = folder / (row.policy or row.name) / "model"
    changes = [f"run={folder}/eval/{row.name}", f"name={row.name}", f"checkpoint={model}", f"frames={list(KS)}"]
    changes += [f"arms=[{row.arm}]", "rollout.temperature=1", "grading.untagged_answer=stated"]
    changes += [f"splits.toy={folder}/sft-toy", "limit=64"]
    return ["eval.py", "configs/eval/toy.yaml", *changes]


def run_stages(stages: Sequence[Stage], root: Path) -> None:
    """Run the jobs that are not done, one per core. They end with this process, and it ends if one of them fails."""
    done = root / "done"
    logs = root / "logs"
    done.mkdir(parents=True, exist_ok=True)
    logs.mkdir(exist_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}
    running: dict[str, subprocess.Popen] = {}
    printed_at = time.monotonic()
    for stage in stages:
        waiting = [name for name in stage if not (done / name).exists()]
        while waiting or running:
            # Start a job on every free core.
            while waiting and len(running) < len(os.sched_getaffinity(0)):
                name = waiting.pop(0)
                print(f"{name}: started, writes {logs}/{name}.log", flush=True)
                with (logs / f"{name}.log").open("ab") as log:
                    running[name] = start_group([sys.executable, *stage[name]], stdout=log, stderr=log, env=environment)

            # Mark the jobs that have succeeded.
            time.sleep(0.2)
            for name, process in list(running.items()):
                if process.poll() == 0:
                    del running[name]
                    (done / name).write_text(git_commit())
                elif process.returncode:
                    sys.exit(f"error: {name} failed, see {logs}/{name}.log; the same command goes on from there")

            # Every 20 seconds, print how far each job is.
            if time.monotonic() - printed_at > 20:
                printed_at = time.monotonic()
                for name in running:
                    lines = (logs / f"{name}.log").read_text(errors="replace").splitlines()  # a progress bar is many
                    if lines:
                        print(f"{name}: {progress_in(lines[-1])}", flush=True)


def progress_in(line: str) -> str:
    """Return the last line of a log. Of a training's step, only five figures and the alarms."""
    words = line.split()
    if words[1:2] != ["step"]:
        return line
    figures = dict(zip(words[3::2], words[4::2]))  # after "rl step 9/60"
    shown = [f"{name} {figures[name]}" for name in (*PROGRESS, *ALARMS) if name in figures]
    return " ".join([*words[:3], *shown])


# ------------------------------------------------------------------------------------------------ figures and claims


def read_figures(root: Path) -> Figures:
    """Read the figures of all rows that have been evaluated."""
    figures: Figures = {}
    for seed in range(SEEDS):
        flashes = {flash.name: flash for flash in toy.draw_splits(seed)["test"]}
        for row in ROWS:
            if not (root / "done" / f"seed{seed}-{row.name}-eval").exists():
                continue
            records = []
            for file in sorted((root / f"seed{seed}/eval/{row.name}").glob("*.jsonl")):  # one per K
                results = read_results(file)
                figures[seed, row.name, results.k] = means_of(results.records, flashes)
                records += results.records
            figures[seed, row.name, "all"] = means_of(records, flashes)
    return figures


def means_of(records: Sequence[dict], flashes: dict[str, toy.Flash]) -> dict[str, float]:
    """Return means over episodes, and the share of reports that are right, if there are reports."""
    means = {"accuracy": statistics.fmean(record["score"] for record in records), **per_item(records)}
    right = []
    for record in records:
        flash = flashes[Path(record["videos"][0]).name]
        for call in record["calls"]:
            if not call["error"]:
                right.append(toy.report_is_right(flash, call["window"], call["text"]))
    if right:
        means["reports_right"] = statistics.fmean(right)
    return means


def by_seed(figures: Figures, row: str, name: str, k: int | str = "all") -> dict[int, float]:
    """Return a row's figure for every seed that has it."""
    values = {}
    for (seed, *place), measured in figures.items():
        if place == [row, k] and name in measured:
            values[seed] = measured[name]
    return values


def mean_and_std(figures: Figures, row: str, name: str, k: int | str = "all") -> str:
    """Write a row's figure as mean ± std over seeds."""
    values = list(by_seed(figures, row, name, k).values())
    if len(values) > 1:
        return f"{statistics.fmean(values):.2f} ± {statistics.stdev(values):.2f}"
    return f"{values[0]:.2f}" if values else ""


class Claim(NamedTuple):
    """A claim that one row's figure exceeds another's by a margin."""

    text: str
    figure: str
    k: int | str  # a K, or "all"
    more: str  # the row with the larger figure
    less: str  # the row with the smaller one
    margin: float
    required: bool = True  # the demo fails without it: it held in all runs of results/paradox.md

    def gains(self, figures: Figures) -> dict[int, float]:
        """Return by how much `more` exceeds `less`, for every seed that has both."""
        more = by_seed(figures, self.more, self.figure, self.k)
        less = by_seed(figures, self.less, self.figure, self.k)
        return {seed: more[seed] - less[seed] for seed in more if seed in less}

    def true_in(self, figures: Figures) -> set[int]:
        """Return the seeds in which it holds."""
        return {seed for seed, gain in self.gains(figures).items() if gain >= self.margin}


# The paper's claims about its 8B model. Their margins were fixed before the runs of results/paradox.md.
CLAIMS = (
    Claim("plain GRPO loses its calls (kappa)", "calls", "all", "sft", "grpo", 0.3),
    Claim("plain GRPO loses its format (f)", "f", "all", "sft", "grpo", 0.2, False),
    Claim("PARA-GRPO keeps them at K=4 (kappa)", "calls", 4, "paragrpo", "grpo", 0.5),
    Claim("PARA-GRPO repairs the format (f)", "f", "all", "paragrpo", "sft", 0.2),
    Claim("PARA-GRPO learns to call where it pays, at K=4 (kappa)", "calls", 4, "paragrpo", "sft", 0.15, False),
    Claim("PARA-GRPO raises accuracy at K=4", "accuracy", 4, "paragrpo", "sft", 0.1),
    Claim("plain GRPO does not: accuracy at K=4", "accuracy", 4, "paragrpo", "grpo", 0.2),
)


# ------------------------------------------------------------------------------------------------ tables and pictures


def claims_table(figures: Figures) -> str:
    """Return one row per claim: by how much it holds in each seed."""
    rows = []
    for claim in CLAIMS:
        gains = claim.gains(figures)
        more, less = (mean_and_std(figures, row, claim.figure, claim.k) for row in (claim.more, claim.less))
        each = " ".join(f"{gain:.2f}" for gain in gains.values())
        true = f"{len(claim.true_in(figures))} of {len(gains)}"
        cells = {"claim": claim.text, "figure": f"{claim.more} {more}", "exceeds": f"{claim.less} {less}"}
        rows.append(cells | {"by": claim.margin, "gain, by seed": each, "holds in": true})
    return markdown("#### The contrast", list(rows[0]), rows)


def rows_table(figures: Figures) -> str:
    """Return one row per variant, sampled as in training. Figures without a K are means over all K."""
    header = ["row", "seeds", "f", "kappa", "well_formed", "reports right"]
    header += ["kappa K=4", "kappa K=64", "acc K=4", "acc K=64", "paper's f (other scale), kappa"]
    rows = []
    for row in ROWS:
        cells = [row.title, len(by_seed(figures, row.name, "f"))]
        cells += [mean_and_std(figures, row.name, name) for name in ("f", "calls", "well_formed", "reports_right")]
        for name in ("calls", "accuracy"):
            cells += [mean_and_std(figures, row.name, name, k) for k in (4, 64)]
        if by_seed(figures, row.name, "f"):
            rows.append(dict(zip(header, [*cells, row.paper])))
    return markdown("#### The rows", header, rows)


def write_tables(root: Path, page: Path) -> None:
    """Replace the tables of results/paradox.md by those of finished runs."""
    figures = read_figures(root)
    if not figures:
        sys.exit(f"error: no row in {root} has been evaluated; `make paradox` runs all of them")
    commits = sorted({marker.read_text() for marker in (root / "done").iterdir()})
    made = f"`python -m study.paradox study` at commit {', '.join(commits)}; mean ± std over seeds."
    text = "\n\n".join([made, claims_table(figures), rows_table(figures)])

    # Replace the section between the marks. The text around it stays.
    begin = "<!-- tables: written by paradox.py -->"
    end = "<!-- end of tables -->"
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{rest.partition(end)[2]}", encoding="utf-8")


def draw_pictures(root: Path, rows: Sequence[str], pictures: Path) -> None:
    """Write ROOT/report.html, and pictures of the rows and the cold start."""
    runs = []
    for name in (*rows, *(f"eval/{row}" for row in (*rows, "sft"))):
        runs += [str(folder) for folder in sorted(root.glob(f"seed?/{name}"))]
    report = ["-m", "study.report", *runs, "-o", f"{root}/report.html", "--png", str(pictures)]
    subprocess.run([sys.executable, *report], check=True)


def main() -> int:
    parser = argparse.ArgumentParser("python -m study.paradox", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("what", choices=["demo", "study", "tables"])
    what = parser.parse_args().what
    if what == "demo":
        return demo(Path("runs/demo"))
    root = Path("runs/paradox")
    if what == "study":
        for seed in range(SEEDS):
            run_stages(stages_of(root, seed, ROWS), root)
    write_tables(root, Path("results/paradox.md"))
    draw_pictures(root, ("grpo", "anchoring", "gating", "paragrpo"), Path("results"))
    return 0


def demo(root: Path) -> int:
    """Run one seed, and ask its PARA-GRPO. Return 1 if a claim fails, or if there is nothing to show."""
    run_stages(stages_of(root, 0, [row for row in ROWS if row.name in ("sft", "grpo", "paragrpo")]), root)
    figures = read_figures(root)
    print(f"\n{rows_table(figures)}\n\n{claims_table(figures)}\n", flush=True)
    draw_pictures(root, ("grpo", "paragrpo"), root)
    failed = [claim for claim in CLAIMS if not claim.true_in(figures)]
    for claim in failed:
        known = "it fails in some runs of results/paradox.md as well"
        if claim.required:
            known = "it holds in all runs of results/paradox.md"
        print(f"Does not hold here: {claim.text} ({known})")
    if not failed:
        print(f"All {len(CLAIMS)} claims hold.")
    print(f"Pictures: {root}/outcomes.png, {root}/curves.png. Open {root}/report.html for the episodes.", flush=True)
    shown = ask_paragrpo(root / "seed0")
    return int(any(claim.required for claim in failed) or not shown)


def ask_paragrpo(folder: Path) -> bool:
    """Ask PARA-GRPO about a video on which two calls have led it to the right answer. Return False if there is none."""
    for record in read_results(folder / "eval/paragrpo/toy-K4-parallel.jsonl").records:
        if len(record["calls"]) == 2 and record["score"] == 1:
            video = f"{folder}/sft-toy/{record['videos'][0]}"
            question = ["--model", f"{folder}/paragrpo/model", "--video", video, "--k", "4", toy.question("")]
            return subprocess.call([sys.executable, "-m", "study.ask", *question]) == 0
    print("\nNo episode has two calls and a right answer.")
    return False


if __name__ == "__main__":
    sys.exit(main())
