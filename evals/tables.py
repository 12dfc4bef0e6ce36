"""tables.py: print the results of eval.py as Markdown tables, with the published values beside them.

    python eval.py table runs/eval/* [--baseline NAME] [--by duration]
    python eval.py ablation runs/NAME_8b runs/eval/own/NAME_8b     # where the trainings and the evaluations are
    python eval.py ablation runs/toy/NAME runs/toy/eval/NAME       # the same tables of the toy

`table` has one row per model, arm and K. Runs of one `name` share a row, and so do the K of the paper's table, where Charades has
its own. A cell has the score and the gain over the baseline; an unfinished score says `n of N`. Errors count as wrong. Below a
model are the published scores of its finished splits. Two more tables have all figures of each split, and means per item: the
format of our own agent (f and the share of well-formed episodes) and the costs. --by splits the scores by a field of the records.

`ablation` has the paper's three ablation tables. NAME stands for grpo, paragrpo and so on: `run` and `eval` of the rows in
configs/eval/published.yaml. What is missing is an empty cell.

Deliberately missing: significance tests, several seeds of a row (`make paradox` has them on the toy).
"""

import argparse
import functools
import math
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from evals.benchmarks import headline
from evals.results import Results, read_run, read_runs
from runtime.config import UserError, read_tree, suggest
from runtime.dataset import DataError
from runtime.lines import read_lines

COMMANDS = ("table", "ablation")
PUBLISHED_FILE = Path(__file__).parent.parent / "configs" / "eval" / "published.yaml"
Row = dict[str, Results]  # one row of the table of scores: split -> results


class RowKey(NamedTuple):
    """What the results of a row have in common."""

    name: str  # of the model
    arm: str
    k: int | None  # None: as in the paper's table, where Charades has a K of its own


# ------------------------------------------------------------------------------------------------ the main table

LEGEND = """

A cell: the score in percent, and the gain in points over {baseline} on the items of both, with its 95 % interval (a paired
bootstrap over videos). The gain is over the baseline's first arm, at the same K if it has that.
tagged: the share of items whose answer stands where its protocol asks for it: anywhere for `direct`, in closed tags for the
others. Other answers also count, as far as the run's grading.untagged_answer reads them (prose, the default: anywhere after the
thought, much as in the published run).
Models of other authors are asked with our prompts, unless their run names a prompt_file."""


def all_tables(runs: Sequence[str | Path], baseline: str = "", by: str = "") -> str:
    """Write all tables as Markdown."""
    all_results = read_runs(runs)
    names = list(dict.fromkeys(results.name for results in all_results))
    baseline = baseline or names[0]
    if baseline not in names:
        raise DataError(f"--baseline {baseline!r}: no results have that name; {suggest(baseline, names)}")
    all_results.sort(key=lambda r: (names.index(r.name), r.arm != "parallel", r.arm, r.k))
    parts = [scores_table(all_results, baseline), figures_table(all_results), per_item_table(all_results)]
    if by:
        parts.append(breakdown_table(all_results, by))
    return "\n\n".join(parts)


def scores_table(all_results: Sequence[Results], baseline: str) -> str:
    """Write each model's measured scores, with their gains, and below them its published scores."""
    published = read_published()["table"]
    rows = group_rows(all_results, published)
    measured = measured_lines(rows, baseline, published["columns"])
    lines = measured + published_lines(rows, published)
    names = [key.name for key in rows]
    lines.sort(key=lambda line: names.index(line["model"]))

    # Order the splits as in the paper, then the others. Empty columns are left out, and so is K if all rows have the same.
    splits = list(published["columns"])
    for results in all_results:
        if results.split not in splits:
            splits.append(results.split)
    header = ["model", "arm", "K", "tagged", *splits, "average"]
    if len({line["K"] for line in measured}) == 1:
        header.remove("K")
    return markdown("### Scores", header, lines) + LEGEND.format(baseline=baseline)


def group_rows(all_results: Sequence[Results], published: dict) -> dict[RowKey, Row]:
    """Group the results into the rows of the table."""
    published_k = dict(zip(published["columns"], published["frames"]))
    rows: dict[RowKey, Row] = {}
    for results in all_results:
        k = None if results.k == published_k.get(results.split) else results.k
        rows.setdefault(RowKey(results.name, results.arm, k), {})[results.split] = results
    return rows


def measured_lines(rows: dict[RowKey, Row], baseline: str, columns: Sequence[str]) -> list[dict[str, str]]:
    """Write the cells of each row: its K, its share of tagged answers, its scores with their gains, and their average."""
    # Gains are over the baseline's first arm (`parallel` comes first): at the row's K or, without it, at that arm's first K.
    arm = next(key.arm for key in rows if key.name == baseline)
    base_at = {key.k: row for key, row in rows.items() if (key.name, key.arm) == (baseline, arm)}  # K -> row
    first_base = next(iter(base_at.values()))
    lines = []
    for key, row in rows.items():
        base = base_at.get(key.k, first_base)
        ks = sorted({results.k for results in row.values()})
        line = {"model": key.name, "arm": key.arm, "K": ", ".join(map(str, ks))}
        tagged = []
        finished = {}  # split -> score
        for split, results in row.items():
            tagged += [record["tagged"] for record in results.records]
            line[split] = score_cell(results)
            if row is not base and split in base:
                line[split] += gain_text(results, base[split])
            if results.complete():
                finished[split] = results.score()
        line["tagged"] = f"{100 * statistics.fmean(tagged):.1f}"
        line["average"] = average_cell(finished, columns)
        lines.append(line)
    return lines


def published_lines(rows: dict[RowKey, Row], published: dict) -> list[dict[str, Any]]:
    """Write the published scores of each model, on the splits that one of its rows has finished."""
    finished = defaultdict(set)  # model -> splits
    for key, row in rows.items():
        for split, results in row.items():
            if results.complete():
                finished[key.name].add(split)
    lines = []
    for name, splits in finished.items():
        scores = {split: score for split, score in published_scores(name, published).items() if split in splits}
        if scores:
            average = average_cell(scores, published["columns"])
            lines.append({"model": name, "arm": "published", **scores, "average": average})
    return lines


def figures_table(all_results: Sequence[Results]) -> str:
    """Write all figures of each split, and the shares of items without a good answer."""
    rows = []
    for results in all_results:
        figures = ", ".join(f"{name} {value:.1f}" for name, value in results.figures().items())
        cells = {name: f"{value:.1f}" for name, value in rates(results.records).items()}
        rows.append(first_cells(results) | {"items": len(results.records), "figures": figures} | cells)
    return markdown("### Figures", list(rows[0]), rows)


def per_item_table(all_results: Sequence[Results]) -> str:
    """Write the means per item."""
    rows = []
    for results in all_results:
        cells = {name: f"{value:.2f}" for name, value in per_item(results.records).items() if not math.isnan(value)}
        rows.append(first_cells(results) | cells)
    header = [*first_cells(all_results[0]), *per_item(all_results[0].records)]
    return markdown("### Per item", header, rows)


def breakdown_table(all_results: Sequence[Results], by: str) -> str:
    """Write the scores of the items with each value of a field of the records."""
    rows = []
    for results in all_results:
        parts = defaultdict(list)  # value -> records
        for record in headline(results.split, results.records):
            if record.get(by) not in (None, ""):
                parts[str(record[by])].append(record)
        for value, records in sorted(parts.items()):
            score = replace(results, records=records).score()
            rows.append(first_cells(results) | {by: value, "items": len(records), "score": f"{score:.1f}"})
    if not rows:
        raise DataError(f"--by {by}: no record has that field; those of VideoMME have duration")
    return markdown(f"### By {by}", list(rows[0]), rows)


# ------------------------------------------------------------------------------------------------ the ablation tables

METRICS = ("f", "f_release", "kappa")
PAPER_K = 64  # of all splits in these tables
TITLES = {"stages": "A. Training stages", "components": "B. Components", "dispatch": "C. Dispatch"}
ABLATION_LEGEND = """

f, f_release, kappa: means over a training's steps. A start has those of the first step of plain GRPO from it.
f_release: f by the released code, on the sampled text, which lacks a forced <think>. The paper's f is on this scale, on which
well-formed text after a forced <think> has at most 0.50.
Answers outside the tags count, as far as the evaluation's grading.untagged_answer reads them."""


def ablation_tables(trainings: str, evaluations: str) -> str:
    """Write one table per block of the paper."""
    for pattern in (trainings, evaluations):
        if "NAME" not in pattern:
            raise DataError(f"{pattern}: write NAME where the rows' names differ, as in runs/NAME_8b")
    published = read_published()["ablations"]
    splits = published["columns"][2:]
    tables = []
    measured = False
    for block, title in TITLES.items():
        rows = []
        header = ["row", "", "steps", *METRICS, *splits]
        for row in published[block]:
            ours = ablation_cells(row, trainings, evaluations)
            paper = dict(zip(("f_release", "kappa", *splits), row["scores"]))
            rows.append({"row": row["name"], "": "ours"} | ours)
            rows.append({"row": row["name"], "": "paper"} | paper)
            measured |= bool(ours)
            header += [column for column in ours if column not in header]  # other splits, other K
        tables.append(markdown(f"### {title}", header, rows))
    if not measured:
        raise DataError(f"nothing at {trainings} or {evaluations}, with NAME = grpo, paragrpo, ...: train first")
    return "\n\n".join(tables) + ABLATION_LEGEND


def ablation_cells(row: dict, trainings: str, evaluations: str) -> dict[str, str]:
    """Return our cells of one row: metrics of its training, and scores of its evaluation at the paper's K."""
    cells = {}
    metrics = Path(trainings.replace("NAME", row.get("run", "")), "metrics.jsonl")
    if "run" in row and metrics.exists():
        steps = list(read_lines(metrics))[: row.get("steps")]
        cells["steps"] = str(len(steps))
        for name in METRICS:
            values = [step[name] for step in steps if name in step]
            if values:
                cells[name] = f"{statistics.fmean(values):.2f}"
    evaluation = read_run(evaluations.replace("NAME", row.get("eval") or row["run"]))
    for results in sorted(evaluation.values(), key=lambda results: results.k):
        if results.arm == row.get("arm", "parallel") and results.records:
            column = results.split if results.k == PAPER_K else f"{results.split}, K={results.k}"
            cells[column] = score_cell(results)
    return cells


# ------------------------------------------------------------------------------------------------ text


def markdown(title: str, header: Sequence[str], rows: Sequence[dict[str, Any]]) -> str:
    """Write a table with aligned columns from rows of column -> cell. Leave out the columns that are empty."""
    columns = []  # of text, the name first
    for name in header:
        cells = []
        for row in rows:
            value = row.get(name)
            cells.append("" if value is None else str(value))
        if any(cells) or not rows:
            width = max(map(len, [name, *cells]))
            columns.append([text.ljust(width) for text in (name, *cells)])
    lines = ["| " + " | ".join(cells) + " |" for cells in zip(*columns)]
    rule = "|" + "|".join("-" * (len(column[0]) + 2) for column in columns) + "|"
    return "\n".join([title, "", lines[0], rule, *lines[1:]])


def first_cells(results: Results) -> dict[str, Any]:
    return {"model": results.name, "arm": results.arm, "K": results.k, "split": results.split}


def score_cell(results: Results) -> str:
    """Write the score in percent, and of how many items it is if some are missing."""
    if not headline(results.split, results.records):
        return ""
    cell = f"{results.score():.1f}"
    if not results.complete():
        cell += f" ({len(results.records)} of {results.total})"
    return cell


def gain_text(ours: Results, base: Results) -> str:
    """Write the gain in points on the items that both have, and its interval."""
    base_scores = {record["id"]: record["score"] for record in headline(base.split, base.records)}
    gains = []  # points, one per item
    videos = []
    for record in headline(ours.split, ours.records):
        if record["id"] in base_scores:
            gains.append(100 * (record["score"] - base_scores[record["id"]]))
            videos.append("/".join(record["videos"]))
    if not gains:
        return ""
    text = f", {statistics.fmean(gains):+.1f}"
    low, high = interval(gains, videos)
    return text if np.isnan(low) else f"{text} [{low:+.1f}, {high:+.1f}]"


# ------------------------------------------------------------------------------------------------ figures


def rates(records: Sequence[dict]) -> dict[str, float]:
    """Return the shares of items without a good answer, in percent."""
    totals: Counter[str] = Counter()
    for record in records:
        refused = record["error"].startswith("Refusal: ")  # begins with Episode.error_kind
        totals["error_rate"] += bool(record["error"]) and not refused
        totals["refused_rate"] += refused
        totals["unparsed_rate"] += record["prediction"] is None and not record["error"]
        totals["truncated_rate"] += record["truncated"]
    return {name: 100 * total / len(records) for name, total in totals.items()}


def per_item(records: Sequence[dict]) -> dict[str, float]:
    """Return means over items. Only our own agent has f and well_formed; its failed items count 0. A figure that a record lacks is
    NaN."""
    no_format = 0.0 if any("f" in record for record in records) else math.nan
    columns = defaultdict(list)
    for record in records:
        ran = sum(not call["error"] for call in record["calls"])  # like `episode.Episode.n_executed`
        columns["f"].append(record.get("f", no_format))
        columns["well_formed"].append(record.get("well_formed", no_format))
        columns["calls"].append(ran)  # the paper's kappa
        columns["tool_usage_rate"].append(100 * (ran > 0))
        columns["failed_calls"].append(len(record["calls"]) - ran)
        for name in ("turns", "tokens", "subagent_tokens", "critical_tokens", "seconds"):
            columns[name].append(record.get(name, math.nan))  # older records have no critical_tokens
    return {name: statistics.fmean(values) for name, values in columns.items()}


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


def average_cell(scores: dict[str, float], columns: Sequence[str]) -> str:
    """Write the average over the paper's columns, or nothing if one of them is missing."""
    if not set(columns) <= set(scores):
        return ""
    return f"{statistics.fmean(scores[column] for column in columns):.1f}"


@functools.cache
def read_published() -> dict[str, Any]:
    return read_tree(PUBLISHED_FILE)


def published_scores(name: str, published: dict) -> dict[str, float]:
    """Return the published scores of a model. "ParaVT-8B (own)" has those of ParaVT-8B."""
    for row in published["rows"]:
        if row["name"] == name.partition(" (")[0]:
            return {c: score for c, score in zip(published["columns"], row["scores"]) if score is not None}
    return {}


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("eval.py")
    commands = parser.add_subparsers(dest="command", required=True)
    table = commands.add_parser("table")
    table.add_argument("runs", nargs="+", help="folders of results")
    table.add_argument("--baseline", default="", help="the model that gains are measured against (default: the first)")
    table.add_argument("--by", default="", help="also print scores by this field of the records, such as duration")
    ablation = commands.add_parser("ablation")
    ablation.add_argument("trainings", help="their folders, with NAME in place of the row's name")
    ablation.add_argument("evaluations", help="the folders of their results, likewise")
    args = parser.parse_args(arguments)
    try:
        if args.command == "table":
            text = all_tables(args.runs, args.baseline, args.by)
        else:
            text = ablation_tables(args.trainings, args.evaluations)
    except UserError as error:
        sys.exit(f"error: {error}")
    print(text)
