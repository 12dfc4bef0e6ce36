"""tables.py: print the results of eval.py as Markdown tables, with the published values beside them.

    python eval.py table runs/eval/* [--baseline NAME] [--by duration] [--tagged]
    python eval.py ablation runs/NAME_8b runs/eval/own/NAME_8b     # where the trainings and the evaluations are
    python eval.py ablation runs/toy/NAME runs/toy/eval/NAME       # the same tables of the toy

`table` has one row per model, arm and K. Runs of one `name` share a row, and so do the K of the paper's table, where Charades has
its own. A cell has the score and the gain over the baseline; an unfinished score says `n of N`. Errors count as wrong. Below a
model are the published scores of its finished splits. A second table has the costs per item; --by splits the scores by a field
of the records.

`ablation` has the paper's three ablation tables. NAME stands for grpo, paragrpo and so on: `run` and `eval` of the rows in
configs/eval/published.yaml. What is missing is an empty cell.

Deliberately missing: significance tests, several seeds of a row (`make paradox` has them on the toy).
"""

import argparse
import json
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from evals.results import Results, read_published, read_run, read_runs, whole_lines
from runtime.config import ConfigError, suggest
from runtime.dataset import DataError

Row = dict[str, Results]  # one row of the table of scores: split -> results
COMMANDS = ("table", "ablation")

# ------------------------------------------------------------------------------------------------ the main table

LEGEND = """

A cell: the score in percent, and the gain in points over {baseline} on the items of both, with its 95 % interval (a paired
bootstrap over videos). The gain is over the baseline's first arm, at the same K if it has that.
tagged: the share of items whose answer stands where its protocol asks for it: anywhere for `direct`, in closed tags for the
others. Answers in prose also count as right, as in the published run; with --tagged they do not.
Models of other authors are asked with our prompts, unless their run names a prompt_file."""


def report(runs: Sequence[str | Path], baseline: str = "", by: str = "", tagged: bool = False) -> str:
    """Print all tables as Markdown, and return the text. `tagged`: only tagged answers count as right."""
    all_results = read_runs(runs)
    if tagged:
        for record in (record for results in all_results for record in results.records):
            record["score"] *= record["tagged"]
    names = list(dict.fromkeys(results.name for results in all_results))
    baseline = baseline or names[0]
    if baseline not in names:
        raise DataError(f"--baseline {baseline!r}: no results have that name; {suggest(baseline, names)}")
    all_results.sort(key=lambda r: (names.index(r.name), r.arm != "parallel", r.arm, r.k))
    text = scores_table(all_results, baseline) + "\n\n" + costs_table(all_results)
    if by:
        text += "\n\n" + breakdown_table(all_results, by)
    print(text)
    return text


def scores_table(all_results: Sequence[Results], baseline: str) -> str:
    """Write each model's measured scores, with their gains, and its published scores."""
    published = read_published()["table"]
    columns = published["columns"]
    # List the splits in the paper's order, then others.
    ours = dict.fromkeys(results.split for results in all_results)
    splits = [split for split in dict.fromkeys([*columns, *ours]) if split in ours]

    # Group the results into rows. The K of the paper's table count as one.
    rows: dict[tuple, Row] = {}
    published_k = dict(zip(columns, published["frames"]))
    for results in all_results:
        k = "paper" if results.k == published_k.get(results.split) else results.k
        rows.setdefault((results.name, results.arm, k), {})[results.split] = results
    first = next(place for place in rows if place[0] == baseline)  # its first arm: `parallel` comes first

    # Write the measured rows. Below a model, write the published scores of the splits that it has finished.
    lines = []
    finished: dict[str, set] = {}  # model -> splits
    for (name, arm, k), row in rows.items():
        base = rows.get((baseline, first[1], k), rows[first])
        lines.append({"model": name, "arm": arm} | measured_cells(row, {} if row is base else base, columns))
        finished.setdefault(name, set()).update(split for split, results in row.items() if results.complete())
    for name, done in finished.items():
        scores = {split: score for split, score in published_scores(name, published).items() if split in done}
        if scores:
            lines.append({"model": name, "arm": "published"} | scores | average(scores, columns))
    names = list(finished)
    lines.sort(key=lambda line: names.index(line["model"]))
    if len({line.get("K") for line in lines if line["arm"] != "published"}) == 1:
        for line in lines:
            line.pop("K", None)
    order = ["model", "arm", "K", "tagged", *splits, "average"]
    return write_table("### Scores", order, lines) + LEGEND.format(baseline=baseline)


def measured_cells(row: Row, base: Row, columns: Sequence[str]) -> dict[str, Any]:
    """Write a row's K, its share of tagged answers, its scores with their gains, and their average."""
    tagged = [record["tagged"] for results in row.values() for record in results.records]
    cells = {"K": ", ".join(dict.fromkeys(str(results.k) for results in row.values()))}
    cells["tagged"] = f"{100 * statistics.fmean(tagged):.1f}"
    for split, results in row.items():
        cells[split] = score_cell(results)
        if split in base:
            cells[split] += gain_text(results, base[split])
    return cells | average({split: r.score() for split, r in row.items() if r.complete()}, columns)


def costs_table(all_results: Sequence[Results]) -> str:
    """Write the cost per item, and all figures of the split."""
    rows = []
    for results in all_results:
        numbers = {name: f"{value:.2f}" for name, value in costs(results).items()}
        figures = ", ".join(f"{name} {value:.1f}" for name, value in results.figures().items())
        rows.append(place_cells(results) | {"items": len(results.records)} | numbers | {"figures": figures})
    return write_table("### Per item", list(rows[0]), rows)


def breakdown_table(all_results: Sequence[Results], by: str) -> str:
    """Write the scores of the items with each value of a field of the records."""
    rows = []
    for results in all_results:
        values = {str(record[by]) for record in results.records if record.get(by) not in (None, "")}
        for value in sorted(values):
            part = replace(results, records=[r for r in results.records if str(r.get(by)) == value])
            rows.append(place_cells(results) | {by: value, "items": len(part.records), "score": f"{part.score():.1f}"})
    if not rows:
        raise DataError(f"--by {by}: no record has that field; those of VideoMME have duration")
    return write_table(f"### By {by}", list(rows[0]), rows)


# ------------------------------------------------------------------------------------------------ the ablation tables

METRICS = ("f", "f_release", "kappa")
TITLES = {"stages": "A. Training stages", "components": "B. Components", "dispatch": "C. Dispatch"}
ABLATION_LEGEND = """

f, f_release, kappa: means over a training's steps. A start has those of the first step of plain GRPO from it.
f_release: f by the released code, on the sampled text, which lacks a forced <think>. The paper's f is on this scale.
Answers in prose count, as in the published scores."""


def report_ablations(trainings: str, evaluations: str) -> str:
    """Print one table per block of the paper, and return the text."""
    for pattern in (trainings, evaluations):
        if "NAME" not in pattern:
            raise DataError(f"{pattern}: write NAME where the rows' names differ, as in runs/NAME_8b")
    published = read_published()["ablations"]
    scores = published["columns"][2:]
    tables = []
    measured = False
    for block, title in TITLES.items():
        rows = []
        for row in published[block]:
            ours = ablation_cells(row, trainings, evaluations)
            measured |= bool(ours)
            rows.append({"row": row["name"], "": "ours"} | ours)
            rows.append({"row": row["name"], "": "paper"} | dict(zip(("f_release", "kappa", *scores), row["scores"])))
        others = dict.fromkeys(column for row in rows for column in row)  # other splits, other K
        order = list(dict.fromkeys(["row", "", "steps", *METRICS, *scores, *others]))
        tables.append(write_table(f"### {title}", order, rows))
    if not measured:
        raise DataError(f"nothing at {trainings} or {evaluations}, with NAME = grpo, paragrpo, ...: train first")
    text = "\n\n".join(tables) + ABLATION_LEGEND
    print(text)
    return text


def ablation_cells(row: dict, trainings: str, evaluations: str) -> dict[str, str]:
    """Return our cells of one row: metrics of its training, and scores of its evaluation at the paper's K."""
    cells = {}
    metrics = Path(trainings.replace("NAME", row.get("run", "")), "metrics.jsonl")
    if "run" in row and metrics.exists():
        steps = [json.loads(line) for line in whole_lines(metrics)][: row.get("steps")]
        cells["steps"] = str(len(steps))
        for name in METRICS:
            values = [step[name] for step in steps if name in step]
            if values:
                cells[name] = f"{statistics.fmean(values):.2f}"
    evaluation = read_run(evaluations.replace("NAME", row.get("eval") or row["run"]))
    for results in sorted(evaluation.values(), key=lambda results: results.k):
        if results.arm == row.get("arm", "parallel") and results.records:
            column = results.split if results.k == 64 else f"{results.split}, K={results.k}"
            cells[column] = score_cell(results)
    return cells


# ------------------------------------------------------------------------------------------------ text


def write_table(title: str, order: Sequence[str], rows: Sequence[dict[str, Any]]) -> str:
    """Write a table from rows of column -> cell."""
    lines = []
    for row in rows:
        cells = [row.get(column) for column in order]
        lines.append(["" if cell is None else cell for cell in cells])
    return markdown(title, order, lines)


def markdown(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a table with aligned columns. Leave out the columns that are empty."""
    widths = {}  # column -> its width
    for i in range(len(header)):
        if not rows or any(row[i] != "" for row in rows):
            widths[i] = max(len(str(row[i])) for row in (header, *rows))

    def line(row: Sequence[str]) -> str:
        return "| " + " | ".join(str(row[i]).ljust(width) for i, width in widths.items()) + " |"

    rule = "|" + "|".join("-" * (width + 2) for width in widths.values()) + "|"
    return "\n".join([title, "", line(header), rule, *map(line, rows)])


def put_between_marks(path: Path, name: str, writer: str, text: str, title: str) -> None:
    """Replace a script's section of a file, or append it. The text around it stays."""
    begin, end = f"<!-- {name}: written by {writer} -->", f"<!-- end of {name} -->"
    old = path.read_text(encoding="utf-8") if path.exists() else f"# {title}\n"
    if begin not in old:
        old = f"{old.rstrip()}\n\n{begin}\n{end}\n"
    before, _, rest = old.partition(begin)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{before}{begin}\n\n{text}\n\n{end}{rest.partition(end)[2]}", encoding="utf-8")


def place_cells(results: Results) -> dict[str, Any]:
    return {"model": results.name, "arm": results.arm, "K": results.k, "split": results.split}


def score_cell(results: Results) -> str:
    """Write the score in percent, and of how many items it is if some are missing."""
    if not headline(results):
        return ""
    cell = f"{results.score():.1f}"
    if not results.complete():
        cell += f" ({len(results.records)} of {results.total})"
    return cell


def gain_text(ours: Results, base: Results) -> str:
    """Write the gain in points on the items that both have, and its interval."""
    base_scores = {record["id"]: record["score"] for record in headline(base)}
    shared = [record for record in headline(ours) if record["id"] in base_scores]
    if not shared:
        return ""
    gains = [100 * (record["score"] - base_scores[record["id"]]) for record in shared]
    text = f", {statistics.fmean(gains):+.1f}"
    low, high = interval(gains, ["/".join(record["videos"]) for record in shared])
    return text if np.isnan(low) else f"{text} [{low:+.1f}, {high:+.1f}]"


# ------------------------------------------------------------------------------------------------ figures


def interval(values: Sequence[float], videos: Sequence[str]) -> tuple[float, float]:
    """Return the 95 % interval of the mean, by bootstrap. Questions about one video are not independent, so whole videos
    are drawn. With a single video, the interval is unknown (NaN)."""
    _, index = np.unique(list(videos), return_inverse=True)
    sums = np.bincount(index, values)  # [C], C videos
    counts = np.bincount(index)  # [C]
    if len(counts) == 1:
        return np.nan, np.nan
    drawn = np.random.default_rng(0).integers(len(counts), size=(1000, len(counts)))  # [1000, C]
    low, high = np.quantile(sums[drawn].sum(1) / counts[drawn].sum(1), (0.025, 0.975))
    return float(low), float(high)


def headline(results: Results) -> list[dict]:
    """Return the records whose mean is the split's headline figure."""
    return [record for record in results.records if results.split != "mmvu" or record["kind"] == "mcq"]


def average(scores: dict[str, float], columns: Sequence[str]) -> dict[str, str]:
    """Return the average of the paper's columns as a cell, if all are there."""
    if not set(columns) <= set(scores):
        return {}
    return {"average": f"{statistics.fmean(scores[column] for column in columns):.1f}"}


def published_scores(name: str, published: dict) -> dict[str, float]:
    """Return the published scores of a model. "ParaVT-8B (own)" has those of ParaVT-8B."""
    for row in published["rows"]:
        if row["name"] == name.partition(" (")[0]:
            return {c: score for c, score in zip(published["columns"], row["scores"]) if score is not None}
    return {}


def executed(record: dict) -> int:
    """Count the calls that ran, like `episode.Episode.n_executed`."""
    return sum(not call["error"] for call in record["calls"])


def outcomes(records: Sequence[dict]) -> dict[str, float]:
    """Return means over items: f, well_formed, calls (the paper's kappa) and accuracy. Failed items have no format: 0."""
    columns = {
        "f": [record.get("f", 0.0) for record in records],
        "well_formed": [record.get("well_formed", 0.0) for record in records],
        "calls": [executed(record) for record in records],
        "accuracy": [record["score"] for record in records],
    }
    return {name: statistics.fmean(values) for name, values in columns.items()}


def costs(results: Results) -> dict[str, float]:
    """Return means per item, and rates in percent."""
    totals = Counter()
    for record in results.records:
        totals["calls"] += executed(record)
        totals["tool_usage_rate"] += 100 * (executed(record) > 0)
        totals["failed_calls"] += len(record["calls"]) - executed(record)
        for name in ("turns", "tokens", "subagent_tokens", "seconds"):
            totals[name] += record[name]
        refused = record["error"].startswith("Refusal: ")  # begins with Episode.error_kind
        totals["error_rate"] += 100 * (bool(record["error"]) and not refused)
        totals["refused_rate"] += 100 * refused
        totals["unparsed_rate"] += 100 * (record["prediction"] is None and not record["error"])
        totals["truncated_rate"] += 100 * record["truncated"]
    return {name: total / len(results.records) for name, total in totals.items()}


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("eval.py")
    commands = parser.add_subparsers(dest="command", required=True)
    table = commands.add_parser("table")
    table.add_argument("runs", nargs="+", help="folders of results")
    table.add_argument("--baseline", default="", help="the model that gains are measured against (default: the first)")
    table.add_argument("--by", default="", help="also print scores by this field of the records, such as duration")
    table.add_argument("--tagged", action="store_true", help="count only answers in the protocol's own form as right")
    ablation = commands.add_parser("ablation")
    ablation.add_argument("trainings", help="their folders, with NAME in place of the row's name")
    ablation.add_argument("evaluations", help="the folders of their results, likewise")
    args = parser.parse_args(arguments)
    try:
        if args.command == "table":
            report(args.runs, args.baseline, args.by, args.tagged)
        else:
            report_ablations(args.trainings, args.evaluations)
    except (ConfigError, DataError) as error:
        sys.exit(f"error: {error}")
