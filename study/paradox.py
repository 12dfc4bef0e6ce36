"""paradox.py: reproduce the Tool Prior Paradox on the toy: run the trainings, and check the paper's claims on them.

    python -m study.paradox demo      # one seed: cold start, plain GRPO, PARA-GRPO; exit status 1 if it fails
    python -m study.paradox study     # all runs, then the tables and pictures of results/paradox.md
    python -m study.paradox tables    # only the tables and pictures of finished runs

*The gate* (gate.py) checks whether a cold start is sound. *The contrast* repeats plain GRPO and PARA-GRPO with five
seeds on two numeric paths. *The rows* are the ablations. A seed sets everything: clips, initial weights, order of the
data, samples. All rows of a seed have the same budget, and the same cold start unless their name says otherwise.

The study can be stopped and resumed at any time (jobs.py). `--only seed0-` runs a part of it. The figures of all parts
are merged into results/paradox.json.

Deliberately missing: tuning. A row's settings differ from the others' only in what its name says.
"""

import argparse
import contextlib
import io
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from evals.results import read_published, read_results
from evals.tables import markdown, outcomes, put_between_marks
from rewards import final_answer, turn_texts
from rollout import render_prompt, run_episode
from runtime.config import read_tree, write_whole
from runtime.video import Videos
from study import ask, gate, toy
from study.jobs import Job, other_commits, run_jobs
from study.report import LINE_COLORS, png_axes

# CPUs round differently and small differences grow, so a result on one path can be luck. Path -> environment.
PATHS = {"": {}, "-old": {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"}}
KS = (4, 16, 64)  # values of K in evaluations, which sample as training does
ALL = 0  # in place of a K: all K of an evaluation together
# Bounds on the figures of a cold start. Outside of them, RL from it would measure nothing.
GATE = {"reports_flash": (0.97, 1.0), "reports_none": (0.97, 1.0), "copied": (0.98, 1.0), "direct_k64": (0.97, 1.0)}
GATE |= {"well_formed": (0.15, 0.40), "kappa": (0.5, 1.0)}  # from its evaluation
# The same for the weak prior of Qwen2.5-VL's class: it can do everything, its format is tidy, and it rarely calls.
WEAK_GATE = {what: GATE[what] for what in ("reports_flash", "reports_none", "copied", "direct_k64")}
WEAK_GATE |= {"f": (0.75, 0.95), "kappa_k64": (0.0, 0.1)}
WEAK_TOY = ("--p-loose", "0.1", "--p-tool", "0.1", "--model-type", "qwen2_5_vl")
WEAK_VISUAL = ("visual.patch=14", "visual.frame_pixels=784")
# Lower bounds that a PARA-GRPO training must hold until its end. Otherwise its repair is luck.
REPAIR = {"lowest_accuracy": 0.85, "lowest_well_formed": 0.8, "last_f": 0.9, "reports_right": 0.98}


class Variant(NamedTuple):
    """One row of the tables: an RL training or, without a config, a cold start or the untrained model."""

    name: str
    title: str
    config: str = ""
    changes: tuple[str, ...] = ()  # overrides of the config; for a cold start, flags of `toy.py build`
    start: str = "sft"
    prefix: bool = True  # whether training used the think prefix
    paper: str = ""  # its row in the paper's tables
    seeds: int = 2
    settings: tuple[str, ...] = ()  # overrides of the config of sft.py or rl.py that a row's start shares


VARIANTS = (
    Variant("base", "untrained", prefix=False, paper="Qwen3-VL-8B", seeds=1),
    Variant("sft", "cold start", prefix=False, paper="+SFT", seeds=5),
    Variant("sft_tidy", "cold start without loose formats", changes=("--p-loose", "0"), prefix=False),
    Variant("grpo", "GRPO, accuracy only", "toy_grpo", prefix=False, paper="SFT+GRPO", seeds=5),
    Variant("paragrpo", "PARA-GRPO", "toy_paragrpo", paper="Full PARA-GRPO", seeds=5),
    Variant("anchoring", "+ Exploration Anchoring", "toy_anchoring", paper="+Exploration Anchoring", seeds=5),
    Variant("gating", "+ nFrames Gating", "toy_gating", prefix=False, paper="+nFrames Gating", seeds=5),
    Variant("grpo_full", "GRPO, full reward", "toy_grpo_full", prefix=False, paper="SFT+GRPO"),
    Variant("paragrpo_full", "PARA-GRPO, full reward", "toy_paragrpo_full", paper="Full PARA-GRPO"),
    Variant("no_tool_reward", "PARA-GRPO, full reward, - R_tool", "toy_no_tool_reward", paper="-R_tool"),
    Variant("no_gamma", "PARA-GRPO, - gamma", "toy_no_gamma", paper="-gamma penalty"),
    Variant("prefix_only", "prefix and gating, no anchor", "toy_paragrpo", ("reward.anchor.credit=off",)),
    Variant("anchor_only", "anchor and gating, no prefix", "toy_paragrpo", ("rollout.think_prefix=false",), prefix=False),
    Variant("grpo_tidy_start", "GRPO, from the tidy start", "toy_grpo", start="sft_tidy", prefix=False),
    Variant("paragrpo_tidy_start", "PARA-GRPO, from there", "toy_paragrpo", start="sft_tidy"),
    Variant("sft_weak", "weak cold start", changes=WEAK_TOY, prefix=False, seeds=3, settings=(*WEAK_VISUAL, "steps=700")),
    Variant("grpo_weak", "GRPO, from the weak start", "toy_grpo", start="sft_weak", prefix=False, seeds=3, settings=WEAK_VISUAL),
    Variant("paragrpo_weak", "PARA-GRPO, from there", "toy_paragrpo", start="sft_weak", seeds=3, settings=WEAK_VISUAL),
)  # fmt: skip
ROWS = {row.name: row for row in VARIANTS}
GATES = {"sft": "gate", "sft_weak": "weak_gate"}  # a cold start -> the job that measures it
CONTRAST = ("sft", "grpo", "paragrpo")
DRAWN = ("grpo", "anchoring", "gating", "paragrpo")  # in the curves: plain GRPO, each part of the method alone, both

# ------------------------------------------------------------------------------------------------ the jobs

RANKS = 2  # ranks that train a cold start, on any number of cores: its figures depend on them


def row_jobs(row: Variant, root: Path, seed: int, path: str = "") -> list[Job]:
    """Return the jobs that train and evaluate one row, for one seed on one numeric path."""
    place = f"seed{seed}{path}"
    folder = root / place
    jobs = []

    def add(kind: str, name: str, command: list[str], needs: list[str], cores: int = 1) -> None:
        needs = [f"{place}-{other}" for other in needs]
        jobs.append(Job(kind, f"{place}-{name}", command, needs, cores, PATHS[path]))

    # Train. Each cold start has its own toy. RL starts from a cold start, on the toy of `sft`.
    own_toy = folder / f"{row.name}-toy"
    rl_toy = folder / "sft-toy"
    changes = [f"run={folder / row.name}", f"data.seed={seed}", *row.settings]
    if row.config:
        changes += [f"policy.checkpoint={folder / row.start / 'model'}", f"seed={seed}"]
        changes += [f"data.sources=[{{path: {rl_toy}/rl.parquet}}]", "val=null", *row.changes]
        add("train", row.name, ["rl.py", f"configs/{row.config}.yaml", *changes], needs=[row.start, "sft-toy"])
    elif row.name != "base":
        build = ["-m", "study.toy", "build", str(own_toy), "--seed", str(seed), *row.changes]
        add("build", own_toy.name, build, needs=[])
        sources = read_tree(Path("configs/toy_sft.yaml"))["data"]["sources"]
        for source in sources:
            source["path"] = str(own_toy / Path(source["path"]).name)
        changes += [f"policy.checkpoint={own_toy}/model", f"data.sources={json.dumps(sources)}"]
        changes += [f"val.sources=[{{path: {own_toy}/sft_val.parquet}}]"]
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={RANKS}"]
        command = [*torchrun, "sft.py", "configs/toy_sft.yaml", *changes]
        add("start", row.name, command, needs=[own_toy.name], cores=RANKS)

    # Evaluate on the toy of `sft`. For every row, answers are read as in the accuracy-only reward.
    untrained = row.name == "base"
    model = rl_toy / "model" if untrained else folder / row.name / "model"
    changes = [f"run={folder}/eval/{row.name}", f"name={row.name}", f"checkpoint={model}", f"frames={list(KS)}"]
    changes += ["arms=[parallel]", "rollout.temperature=1", f"rollout.think_prefix={str(row.prefix).lower()}"]
    changes += ["grading.untagged_answer=stated", f"splits.toy={rl_toy}", "limit=64"]
    needs = ["sft-toy"] if untrained else [row.name, "sft-toy"]
    add("evaluate", f"{row.name}-eval", ["eval.py", "configs/eval/toy.yaml", *changes], needs)
    if row.name in GATES:
        written = folder / f"{GATES[row.name]}.json"
        command = ["-m", "study.gate", str(model), str(rl_toy), str(seed), str(written)]
        add("evaluate", GATES[row.name], command, needs)
    return jobs


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
    jobs = []
    for row in VARIANTS:
        for path in PATHS if row.name in CONTRAST else ("",):
            for seed in range(row.seeds):
                jobs += row_jobs(row, root, seed, path)
    return jobs


# ------------------------------------------------------------------------------------------------ the numbers

BySeed = dict[int, float]  # seed -> a figure, for every seed that has it
Figures = dict[str, dict[str, float | str]]  # "seed0/grpo/K=4", "seed0/grpo", "seed0/gate" -> figures by name


def read_figures(root: Path) -> Figures:
    """Read the figures of all finished gates, trainings and evaluations."""
    figures: Figures = {}
    done = root / "done"
    for name in GATES.values():
        for marker in sorted(done.glob(f"seed*-{name}")):
            place = marker.name.removesuffix(f"-{name}")
            measured = json.loads((root / place / f"{name}.json").read_text())
            figures[f"{place}/{name}"] = measured | {"commit": marker.read_text()}

    for name in [row.name for row in VARIANTS if row.config]:
        for marker in sorted(done.glob(f"seed*-{name}")):
            place = marker.name.removesuffix(f"-{name}")
            lines = (root / place / name / "metrics.jsonl").read_text().splitlines()
            held = last_third([json.loads(line) for line in lines])
            figures[f"{place}/{name}"] = held | {"commit": marker.read_text()}

    for marker in sorted(done.glob("seed*-eval")):
        place, _, name = marker.name.removesuffix("-eval").rpartition("-")
        seed = int(place.removeprefix("seed").partition("-")[0])
        flashes = {flash.name: flash for flash in toy.draw_splits(seed)["test"]}
        by_k: dict[int, list[dict]] = {ALL: []}
        for file in sorted((root / place / "eval" / name).glob("*-parallel.jsonl")):
            results = read_results(file)
            by_k[results.settings["k"]] = results.records
            by_k[ALL] += results.records
        for k, records in by_k.items():
            figures[f"{place}/{name}/K={k}"] = means_of(records, flashes) | {"commit": marker.read_text()}
    return figures


def means_of(records: list[dict], flashes: dict[str, toy.Flash]) -> dict[str, float]:
    """Return means over episodes. `reports_right` is the report accuracy, if there are reports."""
    means = outcomes(records)
    right = []
    for record in records:
        flash = flashes[Path(record["videos"][0]).name]
        for call in record["calls"]:
            if not call["error"]:
                right.append(toy.report_is_right(flash, call["window"], call["text"]))
    if right:
        means["reports_right"] = statistics.fmean(right)
    return {name: round(mean, 4) for name, mean in means.items()}


def last_third(lines: list[dict]) -> dict[str, float]:
    """Return how well a training holds until its end: the lowest 5-step means of its last 20 steps, and f's last one."""

    def means(name: str) -> list[float]:
        values = [line[name] for line in lines]
        return [statistics.fmean(values[end - 5 : end]) for end in range(len(values) - 19, len(values) + 1)]

    lowest = {"lowest_accuracy": min(means("R_acc")), "lowest_well_formed": min(means("well_formed"))}
    return {name: round(value, 4) for name, value in (lowest | {"last_f": means("f")[-1]}).items()}


def by_seed(figures: Figures, name: str, what: str, k: int = ALL, path: str = "") -> BySeed:
    """Return a row's figure by seed, on one numeric path."""
    values = {}
    for seed in range(ROWS[name].seeds):
        measured = figures.get(f"seed{seed}{path}/{name}/K={k}", {})
        if what in measured:
            values[seed] = measured[what]
    return values


def show(figures: Figures, name: str, what: str, k: int = ALL) -> str:
    """Write a row's figure as mean ± std over seeds."""
    values = list(by_seed(figures, name, what, k).values())
    if not values:
        return ""
    mean = f"{statistics.fmean(values):.2f}"
    return f"{mean} ± {statistics.stdev(values):.2f}" if len(values) > 1 else mean


class Claim(NamedTuple):
    """A claim that one row's figure exceeds another's by a margin. The margins were fixed on the first two seeds."""

    text: str
    figure: str
    k: int
    more: str  # a row
    less: str
    margin: float

    def gains(self, figures: Figures, path: str = "") -> BySeed:
        """Return by how much `more` exceeds `less`, for every seed that has both."""
        more = by_seed(figures, self.more, self.figure, self.k, path)
        less = by_seed(figures, self.less, self.figure, self.k, path)
        return {seed: more[seed] - less[seed] for seed in more if seed in less}

    def compare(self, figures: Figures) -> str:
        """Write `PARA-GRPO 0.94 > GRPO, accuracy only 0.34`."""
        more = f"{ROWS[self.more].title} {show(figures, self.more, self.figure, self.k)}"
        return f"{more} > {ROWS[self.less].title} {show(figures, self.less, self.figure, self.k)}"

    def tally(self, figures: Figures) -> tuple[int, int]:
        """Return in how many runs of the contrast the claim holds, and the number of runs."""
        gains = []
        for path in PATHS:
            gains += self.gains(figures, path).values()
        return sum(gain >= self.margin for gain in gains), len(gains)


# The paper's claims about its 8B model. The demo must show those that held in every run of the contrast.
CLAIMS = (
    Claim("plain GRPO loses its calls (kappa)", "calls", ALL, "sft", "grpo", 0.3),
    Claim("plain GRPO loses its format (f)", "f", ALL, "sft", "grpo", 0.2),
    Claim("PARA-GRPO keeps them at K=4 (kappa)", "calls", 4, "paragrpo", "grpo", 0.5),
    Claim("PARA-GRPO repairs the format (f)", "f", ALL, "paragrpo", "sft", 0.2),
    Claim("PARA-GRPO learns to call where it pays, at K=4 (kappa)", "calls", 4, "paragrpo", "sft", 0.15),
    Claim("PARA-GRPO raises accuracy at K=4", "accuracy", 4, "paragrpo", "sft", 0.1),
    Claim("plain GRPO does not: accuracy at K=4", "accuracy", 4, "paragrpo", "grpo", 0.2),
)
# The paper's cross-model contrast. Plain GRPO from a weak prior neither loses its format nor finds calls. A null result is a format
# that falls by more, or calls that stay: then the paradox does not come from the strong prior. Both were fixed before any RL.
WEAK_CLAIMS = (
    Claim("plain GRPO keeps a tidy format (f falls by at most 0.1)", "f", ALL, "grpo_weak", "sft_weak", -0.1),
    Claim("plain GRPO drops the few calls (kappa)", "calls", 4, "sft_weak", "grpo_weak", 0.1),
)


def judge(figures: Figures, recorded: Figures) -> list[str]:
    """Print each claim with the numbers of one seed. Return the claims that fail here but held in every recorded run."""
    failed = []
    print("\nWhat the paper claims, on held-out videos (kappa: calls per episode; f: format reward; K: frames seen):\n")
    for claim in CLAIMS:
        true, runs = claim.tally(recorded)
        holds = claim.tally(figures) == (1, 1)
        if not holds and true == runs:
            failed.append(claim.text)
        print(f"  {'holds' if holds else 'FAILS'}  {claim.text}: {claim.compare(figures)}, by {claim.margin} or more")
        print(f"         (in results/paradox.md in {true} of {runs} runs)")
    if failed:
        print(f"\nThis run fails where every run of results/paradox.md succeeds: {'; '.join(failed)}.")
    return failed


def show_episode(root: Path) -> bool:
    """Show PARA-GRPO's first episode with two calls, right reports and a right answer. Return False if ten have none."""
    folder = root / "seed0"
    long = [flash for flash in toy.draw_splits(0)["test"] if len(toy.windows(flash, "")) == 2]
    with Videos(workers=1) as videos:
        context = gate.greedy_agent(folder / "paragrpo" / "model", videos, think_prefix=True)
        for flash in long[:10]:
            task = gate.task_of(folder / "sft-toy", flash)
            screen = io.StringIO()
            with contextlib.redirect_stdout(screen):
                observed = replace(context, observe=ask.Screen(flash.duration).show)
                episode = run_episode(observed, task, 4, render_prompt(task, 4, context), 0)
            right = [not c.error and toy.report_is_right(flash, c.window, c.text) for c in episode.calls]
            if right == [True, True] and final_answer(turn_texts(episode.main, context.renderer)) == flash.color:
                print(f"\n{task.question} ({task.videos[0]}, 4 overview frames){screen.getvalue()}")
                return True
    print("\nNone of ten episodes has two calls, right reports and a right answer.")
    return False


# ------------------------------------------------------------------------------------------------ the tables


def runs_of(name: str) -> list[tuple[str, int]]:
    """Return (path, seed) of every run of a row of the contrast."""
    return [(path, seed) for path in PATHS for seed in range(ROWS[name].seeds)]


def gate_table(figures: Figures, start: str, gate: dict[str, tuple[float, float]]) -> str:
    """Return one row per cold start: its figures, and whether they are within the bounds."""
    rows = []
    sound = 0
    for path, seed in runs_of(start):
        place = f"seed{seed}{path}"
        evaluated = figures.get(f"{place}/{start}/K={ALL}")
        if evaluated and f"{place}/{GATES[start]}" in figures:
            sampled = {"f": evaluated["f"], "well_formed": evaluated["well_formed"], "kappa": evaluated["calls"]}
            sampled["kappa_k64"] = figures[f"{place}/{start}/K=64"]["calls"]
            measured = figures[f"{place}/{GATES[start]}"] | sampled
            good = all(low <= measured[what] <= high for what, (low, high) in gate.items())
            sound += good
            cells = [f"{measured[what]:.3f}" for what in gate]
            rows.append([title_of(path), f"seed{seed}", *cells, "yes" if good else "NO"])
    bounds = [f"{what} [{low:g}, {high:g}]" for what, (low, high) in gate.items()]
    title = f"#### The gate, {ROWS[start].title}: {sound} of {len(rows)} are sound"
    return markdown(title, ["path", "seed", *bounds, "sound"], rows)


def contrast_table(figures: Figures, title: str, claims: Sequence[Claim]) -> str:
    """Return one row per claim: by how much it holds in each run, seed by seed."""
    rows = []
    for claim in claims:
        row = [claim.text, claim.compare(figures), claim.margin]
        for path in PATHS:
            row.append(" ".join(f"{gain:.2f}" for gain in claim.gains(figures, path).values()))
        true, runs = claim.tally(figures)
        rows.append([*row, f"{true} of {runs}"])
    gains = [f"gains, {title_of(path)}" for path in PATHS]
    return markdown(f"#### {title}", ["claim", "native path, mean ± std", "margin", *gains, "holds in"], rows)


def repair_table(figures: Figures) -> str:
    """Return one row per PARA-GRPO training: whether it holds until its end, and how many claims its run shows."""
    rows = []
    held = 0
    shown_all = 0
    for path, seed in runs_of("paragrpo"):
        place = f"seed{seed}{path}/paragrpo"
        measured = figures.get(place, {}) | figures.get(f"{place}/K={ALL}", {})
        if measured.keys() >= REPAIR.keys():
            good = all(measured[what] >= least for what, least in REPAIR.items())
            true = sum(claim.gains(figures, path).get(seed, 0.0) >= claim.margin for claim in CLAIMS)
            held += good
            shown_all += true == len(CLAIMS)
            cells = [f"{measured[what]:.2f}" for what in REPAIR]
            claims = f"{true} of {len(CLAIMS)}"
            rows.append([title_of(path), f"seed{seed}", *cells, "yes" if good else "NO", claims])
    bounds = [f"{what} [{least:g}]" for what, least in REPAIR.items()]
    runs = len(rows)
    title = f"#### The repair: {held} of {runs} trainings hold to the end; {shown_all} of {runs} runs show all claims"
    return markdown(title, ["path", "seed", *bounds, "holds", "claims"], rows)


def title_of(path: str) -> str:
    return path.removeprefix("-") or "native"


def outcome_table(figures: Figures) -> str:
    """Return one row per variant, sampled as in training: f, kappa (the paper's in brackets), kappa and accuracy by K."""
    published = read_published()["ablations"]
    paper = {row["name"]: row["scores"][:2] for row in published["stages"] + published["components"]}
    rows = []
    for row in VARIANTS:
        seeds = len(by_seed(figures, row.name, "f"))
        if not seeds:
            continue
        f, kappa = show(figures, row.name, "f"), show(figures, row.name, "calls")
        if row.paper in paper:
            f, kappa = f"{f} [{paper[row.paper][0]}]", f"{kappa} [{paper[row.paper][1]}]"
        cells = [row.title, seeds, f, kappa, show(figures, row.name, "well_formed")]
        for what in ("calls", "accuracy"):
            cells += [show(figures, row.name, what, k) for k in (4, 64)]
        rows.append(cells)
    header = ["row", "seeds", "f [paper]", "kappa [paper]", "well_formed"]
    return markdown("#### The rows", [*header, "kappa K=4", "kappa K=64", "acc K=4", "acc K=64"], rows)


def draw_outcomes(figures: Figures, path: Path) -> None:
    """Draw accuracy, calls and format of sampled episodes by K, after training."""
    titles = {"accuracy": "accuracy", "calls": "κ: calls per episode", "well_formed": "exactly well-formed episodes"}
    with png_axes(path, len(titles), (11, 3)) as axes:
        for axis, (what, title) in zip(axes, titles.items()):
            for name, color in zip((*DRAWN, "sft"), (*LINE_COLORS[: len(DRAWN)], "#777777")):
                by_k = [list(by_seed(figures, name, what, k).values()) for k in KS]
                if min(map(len, by_k)) < 2:  # a K has no evaluation, or only one seed
                    continue
                y = [statistics.fmean(values) for values in by_k]
                std = [statistics.stdev(values) for values in by_k]
                form = {"color": color, "linestyle": "--" if name == "sft" else "-", "marker": "o", "capsize": 2}
                axis.errorbar(range(len(y)), y, std, label=ROWS[name].title, **form)
            axis.set_title(title)
            axis.set_xticks(range(len(KS)), [f"{k} frames" for k in KS])
            axis.set_ylim(bottom=0)


def report_command(runs: list[str], root: Path, written: Path) -> list[str]:
    """Return Python's arguments that write ROOT/report.html and the runs' curves as a PNG."""
    return ["-m", "study.report", *runs, "-o", f"{root}/report.html", "--png", str(written)]


def write_tables(root: Path, written: Path) -> None:
    """Merge the runs' figures into paradox.json, and write all tables and the picture from that file."""
    file = written / "paradox.json"
    try:
        new = read_figures(root)
    except KeyError as error:
        sys.exit(f"error: {root} comes from another version of this code and lacks {error}: remove the folder")
    figures = dict(sorted((json.loads(file.read_text()) | new).items()))
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in figures.items())
    write_whole(file, f"{{\n{lines}\n}}\n")

    tables = [gate_table(figures, "sft", GATE), contrast_table(figures, "The contrast", CLAIMS), repair_table(figures)]
    tables += [gate_table(figures, "sft_weak", WEAK_GATE), contrast_table(figures, "The weak prior", WEAK_CLAIMS)]
    tables.append(outcome_table(figures))
    draw_outcomes(figures, written / "outcomes.png")
    commits = ", ".join(sorted({str(value["commit"]) for value in figures.values()}))
    made = f"`python -m study.paradox study` at commit {commits}; mean ± std over seeds. All figures: [paradox.json](paradox.json)."
    text = "\n\n".join([made, *tables])
    put_between_marks(written / "paradox.md", "tables", "paradox.py", text, "The paradox on the toy")


def demo() -> int:
    """Run one seed; return 1 if a job, a claim or the episode fails."""
    root = Path("runs/demo")
    started = time.monotonic()
    if others := other_commits(root):
        sys.exit(f"error: {others}: remove the folder, so that only figures of this code are judged")
    if not run_jobs(demo_jobs(root), root):
        return 1
    failed = judge(read_figures(root), json.loads(Path("results/paradox.json").read_text(encoding="utf-8")))
    shown = show_episode(root)
    minutes = (time.monotonic() - started) / 60
    print(f"\ndone in {minutes:.1f} minutes; curves, and episodes token by token, are in {root}/report.html")
    return 1 if failed or not shown else 0


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
