"""tables.py: results of eval.py -> tables. (The command `python eval.py table`.)

    python eval.py table runs/eval/* [--baseline NAME]

1. Scores with 95 % intervals: one row per model, arm and reading of the answers (READINGS), each split at the K of the
   paper's table, with the average of its columns and the gain over the baseline's first arm; other K in rows of their
   own; its gain item by item; what was published of finished splits. Others say `n of N`; errors count as wrong.
2. What a score cost, and how clean it is: calls, turns, tokens, seconds; errors, unparsed and truncated answers.

Deliberately missing: significance tests, breakdowns.
"""

import argparse
import difflib
import json
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from evals.benchmarks import figures
from runtime.config import differences
from runtime.dataset import DataError

PUBLISHED = Path(__file__).parent.parent / "configs" / "eval" / "published.yaml"
HEADER = ("name", "arm", "k", "split", "total")  # fields of every file's first line
RECORD = (  # and of every other line
    "id", "videos", "kind", "prediction", "score", "judged", "lenient", "calls", "turns", "tokens", "agent_tokens",
    "truncated", "seconds", "error",
)  # fmt: skip
READINGS = ("tagged", "lenient")
LEGEND = """

tagged: an answer counts where its protocol asks for it: all of `direct`'s, the agent's in closed tags (or behind "the
answer is", if the run has grading.untagged_answer).
lenient: read where the splits' own scorers look, in prose too. The published numbers are lenient.
gain: points over the baseline on the items of both, and how many they are. Intervals: bootstrap over videos; that of a
score is never narrower than Wilson's on the number of videos.
Models of other authors are asked in our words, unless their run names a prompt_file."""


# ------------------------------------------------------------------------------------------------ results and numbers


@dataclass
class Results:
    """One file of results."""

    settings: dict[str, Any]
    records: list[dict[str, Any]]  # one per item

    def __post_init__(self):
        self.name, self.arm = self.settings["name"], self.settings["arm"]
        self.k, self.split = self.settings["k"], self.settings["split"]

    def read(self, reading: str) -> "Results":
        """Return the results with the scores of that reading."""
        if reading == "tagged":
            return self
        return Results(self.settings, [record | record["lenient"] for record in self.records])

    def figures(self) -> dict[str, float]:
        return figures(self.split, self.records)

    def score(self) -> float:
        """The split's first figure, in percent."""
        return next(iter(self.figures().values()))

    def complete(self) -> bool:
        return len(self.records) == self.settings["total"]


def read_results(path: Path) -> Results:
    """Read a file of results. A last line that a kill has torn is ignored; any other damage raises DataError."""
    content, found = path.read_bytes(), []
    lines = content[: content.rfind(b"\n") + 1].splitlines() or [b""]
    for number, line in enumerate(lines, start=1):
        try:
            found.append(json.loads(line))
            for name in HEADER if number == 1 else RECORD:
                found[-1][name]
        except (ValueError, TypeError, KeyError):
            raise DataError(f"{path}: line {number} is damaged; delete it (line 1: the file), to ask again") from None
    return Results(found[0], found[1:])


def read_run(run: str | Path) -> dict[Path, Results]:
    """Read the results in a run's folder. A damaged file is named and left out."""
    found = {}
    for path in sorted(Path(run).glob("*-K*-*.jsonl")):
        try:
            found[path] = read_results(path)
        except DataError as error:
            print(f"left out: {error}", file=sys.stderr)
    return found


def collect(runs: Sequence[str | Path]) -> list[Results]:
    """Read the results in the folders of all runs."""
    results, paths = [], {}
    for run in runs:
        for path, found in read_run(run).items():
            cell = (found.name, found.arm, found.k, found.split)
            if cell in paths:
                raise DataError(f"{paths[cell]} and {path} have the same place in the table: give one another `name`")
            if found.records:
                paths[cell] = path
                results.append(found)
    if not results:
        raise DataError(f"no results in {', '.join(map(str, runs))}: `python eval.py CONFIG` makes them")
    return results


def refuse_mixtures(results: Sequence[Results]) -> None:
    """Refuse results of one name that come of different models, ways of sampling or, within an arm, prompts: a row would be
    true of neither."""
    first = {}
    for r in results:
        shared = {r.name: ("weights", "api", "rollout"), (r.name, r.arm): ("prompts",)}
        for place, keys in shared.items():
            identity = {key: r.settings.get(key) for key in keys}
            other, expected = first.setdefault(place, (r, identity))
            wrong = differences(expected, identity)
            wrong.pop("rollout.max_context", None)  # a limit, that one split may need more of
            if r.settings.get("weights") is None:  # of a dry run's checkpoint, which is not here
                wrong.pop("weights", None)
            if wrong:
                told = f"{other.split} K={other.k} {other.arm} and {r.split} K={r.k} {r.arm} differ ({'; '.join(wrong.values())})"
                raise DataError(f"name = {r.name!r}: {told}; give one another `name` and `run`, or delete its file")


def interval(values: Sequence[float], videos: Sequence[str]) -> tuple[float, float]:
    """Return the 95 % interval of the mean, by bootstrap. The questions of one video are not independent, so videos are
    drawn, with all their questions; of one video alone nothing is known."""
    _, index = np.unique(list(videos), return_inverse=True)
    sums, counts = np.bincount(index, values), np.bincount(index)  # [C], C videos
    if len(counts) == 1:
        return np.nan, np.nan
    drawn = np.random.default_rng(0).integers(len(counts), size=(1000, len(counts)))  # [1000, C]
    low, high = np.quantile(sums[drawn].sum(1) / counts[drawn].sum(1), (0.025, 0.975))
    return float(low), float(high)


def wilson(mean: float, n: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share of n. Of 20 right of 20 the bootstrap says [1, 1], this one [0.84, 1]."""
    z = 1.96
    center, spread = mean + z * z / (2 * n), z * np.sqrt(mean * (1 - mean) / n + z * z / (4 * n * n))
    return max(0.0, center - spread) / (1 + z * z / n), (center + spread) / (1 + z * z / n)


def executed(record: dict) -> int:
    """Count the calls that ran, as `data.Episode.executed`."""
    return sum(not call["error"] for call in record["calls"])


def costs(r: Results) -> dict[str, float]:
    """Return means per item, and rates in percent."""
    totals = Counter()
    for x in r.records:
        totals["calls"] += executed(x)
        totals["failed_calls"] += len(x["calls"]) - executed(x)
        for name in ("turns", "tokens", "agent_tokens", "seconds"):
            totals[name] += x[name]
        refused = x["error"].startswith("Refusal: ")
        totals["error_rate"] += 100 * (bool(x["error"]) and not refused)
        totals["refused_rate"] += 100 * refused
        totals["unparsed_rate"] += 100 * (x["prediction"] is None and not x["error"])
        totals["truncated_rate"] += 100 * x["truncated"]
    return {name: total / len(r.records) for name, total in totals.items()}


# ------------------------------------------------------------------------------------------------ the tables


def read_published() -> dict[str, Any]:
    return yaml.safe_load(PUBLISHED.read_text(encoding="utf-8"))


def report(runs: Sequence[str | Path], baseline: str = "") -> str:
    """Print all tables as Markdown; returns the text."""
    results, published = collect(runs), read_published()["table"]
    refuse_mixtures(results)
    names = list(dict.fromkeys(r.name for r in results))
    baseline = baseline or names[0]
    if baseline not in names:
        near = difflib.get_close_matches(baseline, names, n=1, cutoff=0)[0]
        raise DataError(f"--baseline {baseline!r}: no results have that name; did you mean {near!r}?")
    results.sort(key=lambda r: (names.index(r.name), r.arm != "parallel", r.arm, r.k))
    text = scores_table(results, published, baseline) + "\n\n" + costs_table(results)
    print(text)
    return text


def markdown(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a table with aligned columns."""
    widths = [max(len(str(row[i])) for row in (header, *rows)) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        return "| " + " | ".join(str(x).ljust(width) for x, width in zip(row, widths)) + " |"

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([title, "", line(header), rule, *map(line, rows)])


def put_between_marks(path: Path, name: str, writer: str, text: str, title: str) -> None:
    """Replace a script's part of a file, or append it; what people wrote around it stays."""
    begin, end = f"<!-- {name}: written by {writer} -->", f"<!-- end of {name} -->"
    old = path.read_text(encoding="utf-8") if path.exists() else f"# {title}\n"
    if begin not in old:
        old = f"{old.rstrip()}\n\n{begin}\n{end}\n"
    before, _, rest = old.partition(begin)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{before}{begin}\n\n{text}\n\n{end}{rest.partition(end)[2]}", encoding="utf-8")


def scores_table(results: Sequence[Results], published: dict, baseline: str) -> str:
    # Group the results into rows. K is "paper" for the K of the paper's table, where Charades has its own.
    found, columns = dict.fromkeys(r.split for r in results), published["columns"]
    splits = sorted(found, key=[*columns, *found].index)  # in the paper's order, then others
    published_k = dict(zip(columns, published["frames"]))
    rows, bases, lines = {}, {}, []
    for r in results:
        k = "paper" if r.k == published_k.get(r.split) else r.k
        row = rows.setdefault((r.name, r.arm, k), {})
        row[r.split] = r
        if r.name == baseline:
            bases.setdefault(k, row)  # its first arm, which is `parallel` if it has that

    for name in dict.fromkeys(r.name for r in results):
        # What we measured, in both readings.
        for (model, arm, k), row in rows.items():
            if model != name:
                continue
            base = bases.get(k, {})
            ks = ", ".join(dict.fromkeys(str(r.k) for r in row.values()))
            for reading in READINGS:
                cells = [score_cell(row[split].read(reading)) if split in row else "" for split in splits]
                summary = average_and_gain(finished(row, reading), finished(base, reading), columns)
                lines.append([name, arm, reading, ks, *cells, *summary])

            # Item by item, where the baseline has the same ones: also of `limit=20`, and at another K if it has but one.
            if not base:
                base = bases.get("paper") or (next(iter(bases.values())) if len(bases) == 1 else {})
                ks += " over " + ", ".join(dict.fromkeys(str(r.k) for r in base.values()))
            for reading in READINGS:
                cells = dict.fromkeys(splits, "")
                for split in row.keys() & base.keys():
                    cells[split] = gain_cell(row[split].read(reading), base[split].read(reading))
                if base is not row and any(cells.values()):
                    lines.append([name, arm, f"gain, {reading}", ks, *cells.values(), "", ""])

        # What was published of the splits that it has finished.
        scores = published_scores(name, published)
        done = {r.split for r in results if r.name == name and r.complete()}
        cells = [scores.get(split, "") if split in done else "" for split in splits]
        if any(cells):
            summary = average_and_gain(scores, published_scores(baseline, published), columns)
            lines.append([name, "published", "lenient", "", *cells, *summary])
    gains = f"gain over {baseline}: mean of ratios / ratio of averages"
    header = ["model", "arm", "reading", "K", *splits, "average", gains]
    return markdown("### Scores (percent, 95 % interval)", header, lines) + LEGEND


def finished(row: dict[str, Results], reading: str) -> dict[str, float]:
    """Return the scores of complete splits."""
    return {split: r.read(reading).score() for split, r in row.items() if r.complete()}


def average_and_gain(ours: dict[str, float], base: dict[str, float], columns: Sequence[str]) -> tuple[str, str]:
    """Write the average of the paper's columns, if all are there; and both gains that the paper mixes, with the number of
    splits that they are over."""
    average = gain = ""
    if set(columns) <= set(ours):
        average = f"{sum(ours[c] for c in columns) / len(columns):.1f}"
    shared = [split for split in ours if base.get(split)]
    if shared:
        mean_of_ratios = sum(ours[split] / base[split] for split in shared) / len(shared)
        ratio_of_means = sum(ours[split] for split in shared) / sum(base[split] for split in shared)
        gain = f"{100 * (mean_of_ratios - 1):+.1f} / {100 * (ratio_of_means - 1):+.1f} % ({len(shared)})"
    return average, gain


def headline(r: Results) -> list[dict]:
    """Return the records that the split's first figure is the mean of."""
    return [x for x in r.records if r.split != "mmvu" or x["kind"] == "mcq"]


def mean_cell(values: Sequence[float], records: Sequence[dict], sign: str = "") -> str:
    """Write the mean of the records' values with its interval, in percent."""
    if not records:
        return ""
    videos = ["/".join(x["videos"]) for x in records]
    mean, (low, high) = sum(values) / len(values), interval(values, videos)
    if not sign:  # a score, not a gain
        least, most = wilson(mean, len(set(videos)))
        low, high = np.minimum(low, least), np.maximum(high, most)
    text = f"{100 * mean:{sign}.1f}"
    return text if np.isnan(low) else f"{text} [{100 * low:{sign}.1f}, {100 * high:{sign}.1f}]"


def score_cell(r: Results) -> str:
    records = headline(r)
    cell = mean_cell([x["score"] for x in records], records)
    if cell and not r.complete():
        cell += f" ({len(r.records)} of {r.settings['total']})"
    return cell


def gain_cell(ours: Results, base: Results) -> str:
    """Write the gain on the items that both have, its interval, and how many they are."""
    theirs = {(x["id"], x.get("item")): x["score"] for x in headline(base)}  # an item that has changed is another one
    gains, shared = [], []
    for x in headline(ours):
        if (x["id"], x.get("item")) in theirs:
            gains.append(x["score"] - theirs[x["id"], x.get("item")])
            shared.append(x)
    return f"{mean_cell(gains, shared, '+')} ({len(gains)})" if gains else ""


def published_scores(name: str, published: dict) -> dict[str, float]:
    """Return the published scores of a model; "ParaVT-8B (own)" is still ParaVT-8B."""
    for row in published["rows"]:
        if row["name"] == name.partition(" (")[0]:
            return {c: score for c, score in zip(published["columns"], row["scores"]) if score is not None}
    return {}


def costs_table(results: Sequence[Results]) -> str:
    """Show what a score cost, and all figures of the split."""
    rows = []
    for r in results:
        numbers = [f"{value:.2f}" for value in costs(r).values()]
        further = [f"{name} {value:.1f}" for name, value in r.figures().items()]
        rows.append([r.name, r.arm, r.k, r.split, len(r.records), *numbers, ", ".join(further)])
    header = ["model", "arm", "K", "split", "items", *costs(results[0]), "figures"]
    return markdown("### Per item", header, rows)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="eval.py table")
    parser.add_argument("runs", nargs="+", help="folders of results")
    parser.add_argument("--baseline", default="", help="the model that gains are measured against (default: the first)")
    args = parser.parse_args(arguments)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends this process, as it ends any other command
    try:
        report(args.runs, args.baseline)
    except DataError as error:
        sys.exit(f"error: {error}")
