"""claims.py: check the paper's claims on the figures of the study's runs, and write results/paradox.md.

    figures = read_figures(Path("runs/paradox"))        # of all finished gates, trainings and evaluations
    failed = judge(figures, recorded)                   # prints each claim; returns those that should hold and do not
    write_tables(Path("runs/paradox"), Path("results")) # paradox.json, and the tables of paradox.md

*The gate* asks whether a cold start is sound, *the contrast* whether the claims hold in each run, and *the repair* whether
PARA-GRPO holds until the end of its training.
"""

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from evals.results import read_published, read_results
from evals.tables import markdown, outcomes, put_between_marks
from runtime.config import write_whole
from study import toy
from study.rows import GATE_JOBS, PATHS, ROWS

# "seed0/grpo/K=4", "seed0-old/grpo" (of the training), "seed0/gate" -> figures by name
Figures = dict[str, dict[str, float | str]]
BySeed = dict[int, float]  # seed -> a figure, for every seed that has it
ALL = 0  # in place of a K: all K of an evaluation together
DRAWN = ("grpo", "anchoring", "gating", "paragrpo")  # in the curves: plain GRPO, each part of the method alone, both

# ------------------------------------------------------------------------------------------------ the claims

# All margins and bounds were fixed before the runs of results/paradox.md. Two seeds of an earlier toy set the margins.


class Claim(NamedTuple):
    """A claim that one row's figure exceeds another's by a margin."""

    text: str
    figure: str
    k: int
    more: str  # the row with the larger figure
    less: str  # the row with the smaller one
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
# that falls by more, or calls that stay: then the paradox does not come from the strong prior.
WEAK_CLAIMS = (
    Claim("plain GRPO keeps a tidy format (f falls by at most 0.1)", "f", ALL, "grpo_weak", "sft_weak", -0.1),
    Claim("plain GRPO drops the few calls (kappa)", "calls", 4, "sft_weak", "grpo_weak", 0.1),
)
# Bounds on the figures of a cold start. Outside of them, RL from it would measure nothing.
SKILLS = {"reports_flash": (0.97, 1.0), "reports_none": (0.97, 1.0), "copied": (0.98, 1.0), "direct_k64": (0.97, 1.0)}
GATE = SKILLS | {"well_formed": (0.15, 0.40), "kappa": (0.5, 1.0)}
WEAK_GATE = SKILLS | {"f": (0.75, 0.95), "kappa_k64": (0.0, 0.1)}
# Lower bounds that a PARA-GRPO training must hold until its end. Otherwise its repair is luck.
REPAIR = {"lowest_accuracy": 0.85, "lowest_well_formed": 0.8, "last_f": 0.9, "reports_right": 0.98}

# ------------------------------------------------------------------------------------------------ the figures


def read_figures(root: Path) -> Figures:
    """Read the figures of all finished gates, trainings and evaluations."""
    figures: Figures = {}
    for name in GATE_JOBS.values():
        for run, commit in finished(root, name):
            measured = json.loads((root / run / f"{name}.json").read_text())
            figures[f"{run}/{name}"] = measured | {"commit": commit}
    for row in ROWS.values():
        for run, commit in finished(root, row.name) if row.config else ():
            lines = (root / run / row.name / "metrics.jsonl").read_text().splitlines()
            figures[f"{run}/{row.name}"] = last_third([json.loads(line) for line in lines]) | {"commit": commit}
        for run, commit in finished(root, f"{row.name}-eval"):
            seed = int(run.removeprefix("seed").partition("-")[0])
            for k, means in read_means(root / run / "eval" / row.name, seed).items():
                figures[f"{run}/{row.name}/K={k}"] = means | {"commit": commit}
    return figures


def finished(root: Path, name: str) -> list[tuple[str, str]]:
    """Return (run, commit) of every finished job of this name: ("seed0-old", "969a21f2427c")."""
    jobs = []
    for marker in sorted((root / "done").glob(f"seed*-{name}")):
        jobs.append((marker.name.removesuffix(f"-{name}"), marker.read_text()))
    return jobs


def read_means(folder: Path, seed: int) -> dict[int, dict[str, float]]:
    """Read an evaluation: means over its episodes by K, and over all of them."""
    flashes = {flash.name: flash for flash in toy.draw_splits(seed)["test"]}
    by_k: dict[int, list[dict]] = {ALL: []}
    for file in sorted(folder.glob("*.jsonl")):  # one per K
        results = read_results(file)
        by_k[results.settings["k"]] = results.records
        by_k[ALL] += results.records
    return {k: means_of(records, flashes) for k, records in by_k.items()}


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

    held = {
        "lowest_accuracy": min(means("R_acc")),
        "lowest_well_formed": min(means("well_formed")),
        "last_f": means("f")[-1],
    }
    return {name: round(value, 4) for name, value in held.items()}


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


# ------------------------------------------------------------------------------------------------ the verdict


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


# ------------------------------------------------------------------------------------------------ the tables


def runs_of(name: str) -> list[tuple[str, str, int]]:
    """Return (run, path, seed) of every run of a row of the contrast."""
    return [(f"seed{seed}{path}", path, seed) for path in PATHS for seed in range(ROWS[name].seeds)]


def gate_table(figures: Figures, start: str, bounds: dict[str, tuple[float, float]]) -> str:
    """Return one row per cold start: its figures, and whether they are within the bounds."""
    rows = []
    sound = 0
    for run, path, seed in runs_of(start):
        tested = figures.get(f"{run}/{GATE_JOBS[start]}")
        sampled = figures.get(f"{run}/{start}/K={ALL}")
        if not tested or not sampled:
            continue
        measured = {
            **tested,
            "f": sampled["f"],
            "well_formed": sampled["well_formed"],
            "kappa": sampled["calls"],
            "kappa_k64": figures[f"{run}/{start}/K=64"]["calls"],
        }
        good = all(low <= measured[what] <= high for what, (low, high) in bounds.items())
        sound += good
        cells = [f"{measured[what]:.3f}" for what in bounds]
        rows.append([title_of(path), f"seed{seed}", *cells, "yes" if good else "NO"])
    header = [f"{what} [{low:g}, {high:g}]" for what, (low, high) in bounds.items()]
    title = f"#### The gate, {ROWS[start].title}: {sound} of {len(rows)} are sound"
    return markdown(title, ["path", "seed", *header, "sound"], rows)


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
    held = 0  # trainings
    complete = 0  # runs that show all claims
    for run, path, seed in runs_of("paragrpo"):
        measured = figures.get(f"{run}/paragrpo", {}) | figures.get(f"{run}/paragrpo/K={ALL}", {})
        if not measured.keys() >= REPAIR.keys():
            continue
        good = all(measured[what] >= least for what, least in REPAIR.items())
        held += good
        true = sum(claim.gains(figures, path).get(seed, 0.0) >= claim.margin for claim in CLAIMS)
        complete += true == len(CLAIMS)
        cells = [f"{measured[what]:.2f}" for what in REPAIR]
        rows.append([title_of(path), f"seed{seed}", *cells, "yes" if good else "NO", f"{true} of {len(CLAIMS)}"])
    header = [f"{what} [{least:g}]" for what, least in REPAIR.items()]
    runs = len(rows)
    title = f"#### The repair: {held} of {runs} trainings hold to the end; {complete} of {runs} runs show all claims"
    return markdown(title, ["path", "seed", *header, "holds", "claims"], rows)


def title_of(path: str) -> str:
    return path.removeprefix("-") or "native"


def outcome_table(figures: Figures) -> str:
    """Return one row per variant, sampled as in training: f, kappa (the paper's in brackets), kappa and accuracy by K."""
    published = read_published()["ablations"]
    paper = {row["name"]: row["scores"][:2] for row in published["stages"] + published["components"]}
    rows = []
    for row in ROWS.values():
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
    header = ["row", "seeds", "f [paper's scale]", "kappa [paper]", "well_formed"]
    return markdown("#### The rows", [*header, "kappa K=4", "kappa K=64", "acc K=4", "acc K=64"], rows)


def write_tables(root: Path, written: Path) -> None:
    """Merge the runs' figures into paradox.json, and write all tables from that file."""
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
    commits = ", ".join(sorted({str(value["commit"]) for value in figures.values()}))
    made = f"`python -m study.paradox study` at commit {commits}; mean ± std over seeds. All figures: [paradox.json](paradox.json)."
    text = "\n\n".join([made, *tables])
    put_between_marks(written / "paradox.md", "tables", "paradox.py", text, "The paradox on the toy")
