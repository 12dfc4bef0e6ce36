"""paradox.py: the Tool Prior Paradox on the toy: its runs, what they show, and whether that is what the paper says.

    python -m study.paradox demo      # one seed: cold start, plain GRPO, PARA-GRPO; exit status 1 if it misses the point
    python -m study.paradox study     # every run of jobs.py; the tables and pictures of results/paradox.md
    python -m study.paradox tables    # only the tables and pictures of what has run

Each training or evaluation is a process of its own, as a user would start it. Jobs that are done are not run again, so
the study may be stopped at any time, and `--only` runs a part of it; the figures of all parts meet in results/paradox.json.
f and kappa are those of samples at tau = 1 on test videos, of all rows alike.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from evals.tables import PUBLISHED, Results, costs, executed, markdown, put_between_marks, read_results
from runtime.config import write_whole
from study.jobs import (
    CONTRAST,
    DISPATCH,
    FAULTY,
    GREEDY,
    NECESSITY,
    ROWS,
    SAMPLED,
    demo_jobs,
    evaluation,
    run_jobs,
    select,
    study_jobs,
)
from study.report import LINE_COLORS, png_axes

ALL = 0  # in place of a K: all of an evaluation together
DRAWN = ("grpo", "anchoring", "gating", "paragrpo")  # the curves: neither half of the method, one, the other, both
# What a cold start must be, or RL on it would measure nothing (gate.py): the least, the most.
GATE = {
    "reports_flash": (0.97, 1.0),
    "reports_none": (0.97, 1.0),
    "copied": (0.98, 1.0),
    "tools_k4": (0.97, 1.0),
    "direct_k64": (0.97, 1.0),
    "strict": (0.15, 0.40),
    "kappa": (0.5, 1.0),
}

# ------------------------------------------------------------------------------------------------ the numbers

BySeed = dict[str, float]  # "seed0" or "seed0-old" -> a figure, for every seed that has got so far
Figures = dict[str, dict[str, float | str]]  # "seed0/grpo-sampled/parallel/K=4", "seed0/gate" -> figures by name


def read_figures(root: Path) -> Figures:
    """Read the figures of all runs that are done: evaluations, gates, and the trainings with faults."""
    found: Figures = {}
    for marker in sorted((root / "done").glob("seed*")):
        commit = {"commit": marker.read_text()}
        if marker.name.endswith("-gate"):
            seed = marker.name.removesuffix("-gate")
            found[f"{seed}/gate"] = json.loads((root / seed / "gate.json").read_text()) | commit
        elif "-eval-" in marker.name:
            seed, _, run = marker.name.partition("-eval-")
            pooled: dict[str, Results] = {}  # of an arm: all K together
            for file in sorted((root / seed / "eval" / run).glob("*.jsonl")):
                results = read_results(file)
                arm, k = results.settings["arm"], results.settings["k"]
                found[f"{seed}/{run}/{arm}/K={k}"] = figures_of(results) | commit
                pooled.setdefault(arm, Results(results.settings, [])).records.extend(results.records)
            for arm, results in pooled.items():
                found[f"{seed}/{run}/{arm}/K={ALL}"] = figures_of(results) | commit
    for row in (ROWS["grpo_full"], *FAULTY):
        for marker in sorted((root / "done").glob(f"seed?-{row.name}")):
            seed = marker.name.partition("-")[0]
            steps = [json.loads(line) for line in (root / seed / row.name / "metrics.jsonl").read_text().splitlines()]
            found[f"{seed}/{row.name}/training"] = {"commit": marker.read_text()} | {
                f"{what}, {when}": statistics.fmean(step[what] for step in part)
                for when, part in (("steps 1-5", steps[:5]), ("last 10", steps[-10:]))
                for what in ("kappa", "fmt", "acc")
            }
    return found


@dataclass(frozen=True)
class Measured:
    """Questions to the figures."""

    figures: Figures

    def get(
        self, name: str, what: str, kind: str = "sampled", k: int = ALL, arm: str = "", prefix: bool | None = None,
        path: str = "",
    ) -> BySeed:  # fmt: skip
        """Return a figure by seed, on one numeric path. Arm and prefix are those of the training, unless said."""
        row = ROWS[name]
        run = evaluation(name, kind, row.prefix if prefix is None else prefix)
        asked = f"/{run}/{arm or row.arm}/K={k}"
        found = {}
        for key, figures in self.figures.items():
            seed = key.partition("/")[0]
            if key == seed + asked and seed.partition("-")[2] == path and what in figures:
                found[seed] = figures[what]
        return found

    def show(self, name: str, what: str, *how, **more) -> str:
        return spread(self.get(name, what, *how, **more))


def figures_of(results: Results) -> dict[str, float]:
    """Return the figures of some results: `fmt` is the paper's f, `calls` its kappa."""
    found = {name: costs(results)[name] for name in ("fmt", "strict", "calls", "turns", "tokens", "seconds")}
    found["accuracy"] = next(iter(results.figures().values())) / 100
    called = [record["score"] for record in results.records if executed(record)]
    skipped = [record["score"] for record in results.records if not executed(record)]
    # Both dispatches at the same budget: episodes with exactly two calls.
    of_two = [record["seconds"] for record in results.records if executed(record) == 2]
    for name, values in (("accuracy_called", called), ("accuracy_skipped", skipped), ("seconds_of_two", of_two)):
        if values:
            found[name] = statistics.fmean(values)
    return {name: round(value, 4) for name, value in found.items()}


def deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def spread(values: BySeed) -> str:
    """Write mean ± std over seeds."""
    found = list(values.values())
    if len(found) < 2:
        return "".join(f"{value:.2f}" for value in found)
    return f"{statistics.fmean(found):.2f} ± {deviation(found):.2f}"


# ------------------------------------------------------------------------------------------------ the point


def table_of(title: str, header: list[str], rows: list[list]) -> str:
    """Write a table; nothing where nothing has run."""
    return markdown(title, header, rows) if rows else ""


@dataclass(frozen=True)
class Claim:
    """One figure exceeds another by a margin, which was settled on the first two seeds."""

    text: str
    more: tuple[str, str, int]  # row, figure, K
    less: tuple[str, str, int]
    margin: float

    def gains(self, measured: Measured, path: str = "") -> BySeed:
        """Return by how much the one exceeds the other, for every seed that has both."""
        more, less = (measured.get(name, what, k=k, path=path) for name, what, k in (self.more, self.less))
        return {seed: more[seed] - less[seed] for seed in more if seed in less}

    def compare(self, measured: Measured) -> str:
        """Write `PARA-GRPO 0.94 > GRPO, accuracy only 0.34`."""
        sides = [f"{ROWS[name].title} {measured.show(name, what, k=k)}" for name, what, k in (self.more, self.less)]
        return " > ".join(sides)

    def count(self, measured: Measured) -> tuple[int, int]:
        """Return in how many runs of the contrast it holds, and how many there are."""
        gains = [gain for path in CONTRAST for gain in self.gains(measured, path).values()]
        return sum(gain >= self.margin for gain in gains), len(gains)


# What the paper says of its 8B model. The demo is judged by what has held in every run of the contrast.
CLAIMS = (
    Claim("plain GRPO loses its calls (kappa)", ("sft", "calls", ALL), ("grpo", "calls", ALL), 0.3),
    Claim("plain GRPO loses its format (f)", ("sft", "fmt", ALL), ("grpo", "fmt", ALL), 0.2),
    Claim("PARA-GRPO keeps them at K=4 (kappa)", ("paragrpo", "calls", 4), ("grpo", "calls", 4), 0.5),
    Claim("PARA-GRPO repairs the format (f)", ("paragrpo", "fmt", ALL), ("sft", "fmt", ALL), 0.2),
    Claim(
        "PARA-GRPO learns to call where it pays, at K=4 (kappa)", ("paragrpo", "calls", 4), ("sft", "calls", 4), 0.15
    ),
    Claim("PARA-GRPO raises accuracy at K=4", ("paragrpo", "accuracy", 4), ("sft", "accuracy", 4), 0.1),
    Claim("plain GRPO does not: accuracy at K=4", ("paragrpo", "accuracy", 4), ("grpo", "accuracy", 4), 0.2),
)


def judge(root: Path, recorded: Measured) -> bool:
    """Print each claim with the numbers of one seed. Return whether all of those hold that held in every recorded run of
    the contrast; the others are shown, and judge nothing."""
    measured, failed = Measured(read_figures(root)), []
    print(
        "\nWhat the paper claims, on 64 held-out videos (kappa: calls per episode; f: format reward; K: frames seen):\n"
    )
    for claim in CLAIMS:
        true, runs = claim.count(recorded)
        gain = claim.gains(measured).get("seed0")
        holds = gain is not None and gain >= claim.margin
        if not holds and true == runs:
            failed.append(claim.text)
        print(f"  {'holds' if holds else 'FAILS'}  {claim.text}: {claim.compare(measured)}, by {claim.margin} or more")
        print(f"         (in results/paradox.md in {true} of {runs} runs)")
    print(f"\ncurves, and episodes token by token: {root}/report.html")
    if failed:
        print(f"\nThis run fails where every run of results/paradox.md succeeds: {'; '.join(failed)}.")
    return not failed


def contrast_table(measured: Measured) -> str:
    """By how much each claim holds in each run, seed by seed."""
    rows = []
    for claim in CLAIMS:
        cells = []
        for path in CONTRAST:
            cells.append(" ".join(f"{gain:.2f}" for _, gain in sorted(claim.gains(measured, path).items())))
        true, runs = claim.count(measured)
        if runs:
            rows.append([claim.text, claim.compare(measured), claim.margin, *cells, f"{true} of {runs}"])
    header = [
        "claim",
        "native path, mean ± std",
        "margin",
        *(f"gains, {path or 'native'}" for path in CONTRAST),
        "holds in",
    ]
    return table_of("#### The contrast", header, rows)


def gate_table(measured: Measured) -> str:
    """One row per cold start; bits: what the path makes of a matmul and of a softmax."""
    starts = {key.removesuffix("/gate"): value for key, value in measured.figures.items() if key.endswith("/gate")}
    rows, sound = [], 0
    for name in sorted(starts, key=lambda name: name.partition("-")[::-1]):
        figures = starts[name]
        seed, _, path = name.partition("-")
        good = all(low <= figures[what] <= high for what, (low, high) in GATE.items())
        sound += good
        bits = f"{figures['matmul']}, {figures['softmax']}"
        rows.append([path or "native", seed, bits, *(f"{figures[what]:.3f}" for what in GATE), "yes" if good else "NO"])
    bounds = [f"{what} [{low:g}, {high:g}]" for what, (low, high) in GATE.items()]
    title = f"#### The gate: {sound} of {len(rows)} cold starts are sound"
    return table_of(title, ["path", "seed", "bits of matmul, softmax", *bounds, "sound"], rows)


# ------------------------------------------------------------------------------------------------ the tables


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
    return table_of("#### A. Rows", header + [f"acc K={k}" for k in GREEDY], lines)


def necessity_table(measured: Measured) -> str:
    """The Tool Necessity Gap: what calling is worth at each K, in a policy's own samples and when it cannot."""
    rows = []
    for name in NECESSITY:
        for k in SAMPLED:
            called = measured.show(name, "accuracy_called", k=k)
            skipped = measured.show(name, "accuracy_skipped", k=k)
            rows.append([ROWS[name].title, k, called, skipped, measured.show(name, "accuracy", "greedy", k, "none")])
    header = ["row", "K", "it called", "it did not", "no tools offered (greedy)"]
    return table_of("#### B. What a call is worth: accuracy", header, rows)


def dispatch_table(measured: Measured) -> str:
    """All calls of a turn at once, or one per turn with the same number in all; one episode at a time."""
    rows = []
    for name, arm in DISPATCH:
        accuracy = [measured.show(name, "accuracy", "alone", k, arm) for k in (4, 64)]
        figures = ("calls", "turns", "tokens", "seconds", "seconds_of_two")
        if any(accuracy):
            rows.append(
                [ROWS[name].title, arm, *accuracy, *(measured.show(name, what, "alone", arm=arm) for what in figures)]
            )
    header = ["row", "arm", "acc K=4", "acc K=64", "calls", "turns", "tokens", "seconds", "with two calls"]
    return table_of("#### C. Dispatch (greedy, one episode at a time)", header, rows)


def fault_table(measured: Measured) -> str:
    """Do the released code's faults stop the calls? Means over the steps of the trainings themselves, faults and all."""
    rows, names = [], []
    for row in (ROWS["grpo_full"], *FAULTY):
        for key, figures in measured.figures.items():
            seed, _, rest = key.partition("/")
            if rest == f"{row.name}/training":
                names = [name for name in figures if name != "commit"]
                rows.append([row.title, seed, *(f"{figures[name]:.2f}" for name in names)])
    return table_of("#### D. The released code's faults, under the full reward", ["training", "seed", *names], rows)


def draw_outcomes(measured: Measured, path: Path) -> None:
    """Draw the point in two panels: accuracy and calls of sampled episodes by K, after training."""
    with png_axes(path, 2, (9, 3)) as axes:
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


# ------------------------------------------------------------------------------------------------ the commands


def draw_page(root: Path, written: Path) -> bool:
    """Draw the curves and make ROOT/report.html of the rows that are drawn, on the CPU's own path."""
    runs = [str(path) for name in DRAWN for path in sorted(root.glob(f"seed?/{name}"))]
    if not runs:  # `tables` of figures alone
        return True
    page = [sys.executable, "-m", "study.report", *runs, "-o", f"{root}/report.html", "--png", str(written)]
    return subprocess.call(page) == 0


def write_tables(root: Path, written: Path) -> None:
    """Add the runs' figures to those of paradox.json, and make all tables and the picture from that file."""
    file = written / "paradox.json"
    figures = json.loads(file.read_text()) if file.exists() else {}
    figures = dict(sorted((figures | read_figures(root)).items()))
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in figures.items())
    write_whole(file, f"{{\n{lines}\n}}\n")

    measured = Measured(figures)
    tables = (gate_table, contrast_table, outcome_table, necessity_table, dispatch_table, fault_table)
    text = "\n\n".join(filter(None, (table(measured) for table in tables)))
    print(f"\n{text}\n")
    draw_outcomes(measured, written / "outcomes.png")
    commits = sorted({str(value["commit"]) for value in figures.values()})
    made = f"`python -m study.paradox study` at commit {', '.join(commits)}; mean ± std over seeds. All figures: [paradox.json](paradox.json)."
    put_between_marks(written / "paradox.md", "tables", "paradox.py", f"{made}\n\n{text}", "The paradox on the toy")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["demo", "study", "tables"])
    parser.add_argument("--root", type=Path, help="folder of the runs and of what is written (default: runs/demo; of the study, runs/paradox and results)")  # fmt: skip
    parser.add_argument("--only", default="", metavar="PART", help="of the study: the jobs with this in their names, as in seed0-old, and what they need")  # fmt: skip
    args = parser.parse_args()
    os.chdir(Path(__file__).parent.parent)
    root = args.root or Path("runs/demo" if args.what == "demo" else "runs/paradox")
    written = Path("results") if root == Path("runs/paradox") else root
    if args.what == "demo":
        good = run_jobs(demo_jobs(root), root) and draw_page(root, written)
        recorded = Measured(json.loads(Path("results/paradox.json").read_text(encoding="utf-8")))
        return 0 if good and judge(root, recorded) else 1
    if args.what == "tables" and not written.is_dir():
        parser.error(f"there is no study in {root}; `python -m study.paradox study --root {root}` makes one")
    good = args.what == "tables" or run_jobs(select(study_jobs(root), args.only), root)
    write_tables(root, written)
    return 0 if draw_page(root, written) and good else 1


if __name__ == "__main__":
    sys.exit(main())
