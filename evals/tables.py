"""tables.py: turn results of eval.py into Markdown tables.

    python eval.py table runs/eval/* [--baseline NAME] [--by duration] [--tagged]

1. Scores with 95 % intervals: one row per model and arm, at the K of the paper's table, with the share of tagged answers,
   the average and the gain over the baseline's first arm. Other K have their own rows. Further rows give the gain on
   shared items and the published scores of finished splits; the others say `n of N`. Errors count as wrong.
2. The cost and quality per item: calls, turns, tokens, seconds; errors, unparsed and truncated answers.
3. With --by, the scores by a field of the records, such as VideoMME's duration.

Deliberately missing: significance tests.
"""

import argparse
import difflib
import signal
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from evals.results import Results, read_published, read_runs, refuse_mixtures
from runtime.dataset import DataError

Row = dict[str, Results]  # one row of the table of scores: split -> results


# ------------------------------------------------------------------------------------------------ tables

LEGEND = """

tagged: the share of items whose answer stands where its protocol asks for it: anywhere for `direct`, in closed tags for the
others. Answers in prose also count as right, as in the published run; with --tagged they do not.
gain: points over the baseline on the items of both, and their number. Intervals: bootstrap over videos; the interval of
a score is never narrower than Wilson's on the number of videos.
Models of other authors are asked with our prompts, unless their run names a prompt_file."""


def report(runs: Sequence[str | Path], baseline: str = "", by: str = "", tagged: bool = False) -> str:
    """Print all tables as Markdown, and return the text. `tagged`: only tagged answers count as right."""
    all_results = read_runs(runs)
    refuse_mixtures(all_results)
    if tagged:
        for record in (record for results in all_results for record in results.records):
            record["score"] *= record["tagged"]
    names = list(dict.fromkeys(results.name for results in all_results))
    baseline = baseline or names[0]
    if baseline not in names:
        near = difflib.get_close_matches(baseline, names, n=1, cutoff=0)[0]
        raise DataError(f"--baseline {baseline!r}: no results have that name; did you mean {near!r}?")
    all_results.sort(key=lambda r: (names.index(r.name), r.arm != "parallel", r.arm, r.k))
    published = read_published()["table"]
    text = scores_table(all_results, published, baseline) + "\n\n" + costs_table(all_results)
    if by:
        text += "\n\n" + breakdown_table(all_results, by)
    print(text)
    return text


def scores_table(all_results: Sequence[Results], published: dict, baseline: str) -> str:
    """Write each model's measured scores, its gains on shared items, and its published scores."""
    columns = published["columns"]
    # List the splits in the paper's order, then others.
    ours = dict.fromkeys(results.split for results in all_results)
    splits = [split for split in dict.fromkeys([*columns, *ours]) if split in ours]

    # Group the results into rows. K is "paper" for the K of the paper's table, where Charades has its own.
    rows: dict[tuple, Row] = {}
    bases: dict[int | str, Row] = {}  # K -> the baseline's first arm (`parallel` comes first)
    published_k = dict(zip(columns, published["frames"]))
    for results in all_results:
        k = "paper" if results.k == published_k.get(results.split) else results.k
        row = rows.setdefault((results.name, results.arm, k), {})
        row[results.split] = results
        if results.name == baseline:
            bases.setdefault(k, row)

    lines = []
    for name in dict.fromkeys(results.name for results in all_results):
        complete = set()
        for (model, arm, k), row in rows.items():
            if model == name:
                lines.append(measured_line([name, arm], row, bases.get(k, {}), splits, columns))
                lines += gain_lines([name, arm], row, k, bases, splits)
                complete |= finished(row).keys()

        # Add the published scores of the splits that the model has finished.
        scores = published_scores(name, published)
        cells = [scores.get(split, "") if split in complete else "" for split in splits]
        if any(cells):
            summary = summary_cells(scores, published_scores(baseline, published), columns)
            lines.append([name, "published", "score", "", "", *cells, *summary])
    gains = f"gain over {baseline}: mean of ratios / ratio of averages"
    header = ["model", "arm", "figure", "K", "tagged", *splits, "average", gains]
    return markdown("### Scores (percent, 95 % interval)", header, lines) + LEGEND


def measured_line(model: list, row: Row, base: Row, splits: list[str], columns: list[str]) -> list:
    """Write the scores of a row, its share of tagged answers, and the gain over the baseline at the same K."""
    tagged = [record["tagged"] for results in row.values() for record in results.records]
    cells = [score_cell(row[split]) if split in row else "" for split in splits]
    summary = summary_cells(finished(row), finished(base), columns)
    return [*model, "score", list_ks(row), f"{100 * statistics.fmean(tagged):.1f}", *cells, *summary]


def gain_lines(model: list, row: Row, k: int | str, bases: dict[int | str, Row], splits: list[str]) -> list[list]:
    """Write the gain on items shared with the baseline: at the same K, else at its K of the paper or its only K."""
    ks = list_ks(row)
    base = bases.get(k)
    if not base:
        base = bases.get("paper") or (next(iter(bases.values())) if len(bases) == 1 else {})
        ks += f" over {list_ks(base)}"
    cells = [gain_cell(row[split], base[split]) if split in row and split in base else "" for split in splits]
    return [[*model, "gain", ks, "", *cells, "", ""]] if base is not row and any(cells) else []


def costs_table(all_results: Sequence[Results]) -> str:
    """Write the cost per item, and all figures of the split."""
    rows = []
    for results in all_results:
        numbers = [f"{value:.2f}" for value in costs(results).values()]
        figures = ", ".join(f"{name} {value:.1f}" for name, value in results.figures().items())
        place = [results.name, results.arm, results.k, results.split]
        rows.append([*place, len(results.records), *numbers, figures])
    header = ["model", "arm", "K", "split", "items", *costs(all_results[0]), "figures"]
    return markdown("### Per item", header, rows)


def breakdown_table(all_results: Sequence[Results], by: str) -> str:
    """Write the scores of the items with each value of a field."""
    rows = []
    for results in all_results:
        groups: dict[str, list[dict]] = {}  # value -> its records
        for record in results.records:
            if record.get(by, "") != "":
                groups.setdefault(str(record[by]), []).append(record)
        for value, records in sorted(groups.items()):
            part = Results(results.settings | {"total": len(records)}, records)
            rows.append([results.name, results.arm, results.k, results.split, value, len(records), score_cell(part)])
    if not rows:
        raise DataError(f"--by {by}: no results have that field; VideoMME has duration")
    return markdown(f"### By {by}", ["model", "arm", "K", "split", by, "items", "score"], rows)


# ------------------------------------------------------------------------------------------------ text


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


def mean_cell(mean: float, low: float, high: float, sign: str = "") -> str:
    """Write a mean and its interval, in percent. `sign`: "+" for a gain."""
    text = f"{100 * mean:{sign}.1f}"
    return text if np.isnan(low) else f"{text} [{100 * low:{sign}.1f}, {100 * high:{sign}.1f}]"


def score_cell(results: Results) -> str:
    records = headline(results)
    if not records:
        return ""
    cell = mean_cell(*mean_and_interval([record["score"] for record in records], records, is_share=True))
    if not results.complete():
        cell += f" ({len(results.records)} of {results.settings['total']})"
    return cell


def gain_cell(ours: Results, base: Results) -> str:
    """Write the gain on the items that both have, its interval, and the number of items."""
    gains, records = shared_gains(ours, base)
    if not gains:
        return ""
    return f"{mean_cell(*mean_and_interval(gains, records, is_share=False), '+')} ({len(gains)})"


def summary_cells(ours: dict[str, float], base: dict[str, float], columns: Sequence[str]) -> tuple[str, str]:
    """Write the average of the paper's columns, if all are there, and the gains over the baseline."""
    average = gain = ""
    if set(columns) <= set(ours):
        average = f"{sum(ours[c] for c in columns) / len(columns):.1f}"
    if gains := relative_gains(ours, base):
        mean_of_ratios, ratio_of_means, splits = gains
        gain = f"{100 * mean_of_ratios:+.1f} / {100 * ratio_of_means:+.1f} % ({splits})"
    return average, gain


def list_ks(row: Row) -> str:
    return ", ".join(dict.fromkeys(str(results.k) for results in row.values()))


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


def wilson(mean: float, n: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share of n. For 20 right of 20, the bootstrap gives [1, 1], Wilson [0.84, 1]."""
    # (p + z^2 / 2n -+ z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)
    z = 1.96
    center = mean + z * z / (2 * n)
    spread = z * np.sqrt(mean * (1 - mean) / n + z * z / (4 * n * n))
    return max(0.0, center - spread) / (1 + z * z / n), (center + spread) / (1 + z * z / n)


def headline(results: Results) -> list[dict]:
    """Return the records whose mean is the split's headline figure."""
    return [record for record in results.records if results.split != "mmvu" or record["kind"] == "mcq"]


def mean_and_interval(values: Sequence[float], records: Sequence[dict], is_share: bool) -> tuple[float, float, float]:
    """Return the mean of the records' values and its 95 % interval. The interval of a share holds Wilson's."""
    videos = ["/".join(record["videos"]) for record in records]
    mean = sum(values) / len(values)
    low, high = interval(values, videos)
    if is_share:
        least, most = wilson(mean, len(set(videos)))
        low, high = np.minimum(low, least), np.maximum(high, most)
    return mean, low, high


def shared_gains(ours: Results, base: Results) -> tuple[list[float], list[dict]]:
    """Return our gain on each item that both have, and our record of the item."""

    def item(record: dict) -> tuple:
        return record["id"], record.get("item")  # an item that has changed counts as a new one

    base_scores = {item(record): record["score"] for record in headline(base)}
    shared = [record for record in headline(ours) if item(record) in base_scores]
    return [record["score"] - base_scores[item(record)] for record in shared], shared


def finished(row: Row) -> dict[str, float]:
    """Return the scores of complete splits."""
    return {split: results.score() for split, results in row.items() if results.complete()}


def relative_gains(ours: dict[str, float], base: dict[str, float]) -> tuple[float, float, int] | None:
    """Return two gains, since the paper uses both: the mean of the splits' ratios, and the ratio of their means. The third
    value is the number of splits that both have."""
    shared = [split for split in ours if base.get(split)]
    if not shared:
        return None
    mean_of_ratios = sum(ours[split] / base[split] for split in shared) / len(shared)
    ratio_of_means = sum(ours[split] for split in shared) / sum(base[split] for split in shared)
    return mean_of_ratios - 1, ratio_of_means - 1, len(shared)


def published_scores(name: str, published: dict) -> dict[str, float]:
    """Return the published scores of a model. "ParaVT-8B (own)" has those of ParaVT-8B."""
    for row in published["rows"]:
        if row["name"] == name.partition(" (")[0]:
            return {c: score for c, score in zip(published["columns"], row["scores"]) if score is not None}
    return {}


def executed(record: dict) -> int:
    """Count the calls that ran, like `data.Episode.n_executed`."""
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
    parser = argparse.ArgumentParser(prog="eval.py table")
    parser.add_argument("runs", nargs="+", help="folders of results")
    parser.add_argument("--baseline", default="", help="the model that gains are measured against (default: the first)")
    parser.add_argument("--by", default="", help="also print scores by this field of the rows, such as duration")
    parser.add_argument("--tagged", action="store_true", help="count only answers in the protocol's own form as right")
    args = parser.parse_args(arguments)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends this process quietly
    try:
        report(args.runs, args.baseline, args.by, args.tagged)
    except DataError as error:
        sys.exit(f"error: {error}")
