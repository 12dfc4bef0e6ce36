"""tables.py: results of eval.py -> tables. (The command `python eval.py table`.)

    python eval.py table runs/eval/* [--baseline NAME]

1. Scores with 95 % intervals: one row per model, arm and reading of the answers (READINGS), each split at the K of the
   paper's table, with the average of its columns and the gain over the baseline; other K in rows of their own; under it
   what was published. Shards of a run are joined.
2. What a score cost, and how clean it is: calls, turns, tokens, seconds; errors, unparsed and truncated answers.

A split that is not finished, or was limited, says `n of N`; items that ended in an error count as wrong, and are named
beside the score.

Deliberately missing: significance tests, breakdowns.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from evals.benchmarks import figures
from runtime.checks import differences

FILES = "*-K*-*.jsonl"  # of results, as eval.py names them
PUBLISHED = Path(__file__).parent.parent / "configs" / "eval" / "published.yaml"
# How answers are read. strict: in closed tags, as training reads them (of the protocol `direct`, all that was said).
READINGS = ("strict", "lenient")
OUR_PROTOCOLS = ("agent", "direct", "think")  # all others belong to a model whose authors have words of their own


class TableError(ValueError):
    """Results that are not there, or that cannot stand in one table."""


# ------------------------------------------------------------------------------------------------ files of results


@dataclass
class Results:
    """One file of results."""

    settings: dict[str, Any]
    records: list[dict[str, Any]]  # one per item, the last that was written

    def __post_init__(self):
        self.name, self.arm = self.settings["name"], self.settings["arm"]
        self.k, self.split = self.settings["k"], self.settings["split"]

    def read(self, reading: str) -> "Results":
        """Return the results with the scores of that reading."""
        if reading == "strict":
            return self
        return Results(self.settings, [record | record["lenient"] for record in self.records])

    def figures(self) -> dict[str, float]:
        return figures(self.split, self.records)

    def score(self) -> float:
        """The split's first figure, in percent."""
        return next(iter(self.figures().values()))

    def headline(self) -> list[dict]:
        """The records that the split's first figure is the mean of."""
        return [r for r in self.records if self.split != "mmvu" or r["kind"] == "mcq"]

    def complete(self) -> bool:
        return len(self.records) == self.settings["total"]


def read_results(path: Path) -> Results:
    """Read a file of results. A last line that a kill has torn is ignored."""
    content = path.read_bytes()
    lines = content[: content.rfind(b"\n") + 1].splitlines()
    try:
        settings, *records = [json.loads(line) for line in lines]
    except ValueError as error:
        raise TableError(
            f"{path}: not a file of results: {error}; delete it, and `python eval.py CONFIG` asks again"
        ) from None
    last_of_item = {record["id"]: record for record in records}
    return Results(settings, list(last_of_item.values()))


def collect(runs: Sequence[str | Path]) -> list[Results]:
    """Read the results in the folders of all runs."""
    results, cells, paths = [], {}, {}
    for run in map(Path, runs):
        if not run.exists():
            raise TableError(f"{run}: no such folder; `python eval.py CONFIG` makes it")
        for path in sorted(run.glob(FILES)):
            found = read_results(path)
            if not found.records:
                continue
            cell = (found.name, found.arm, found.k, found.split)
            shard = found.settings.get("shard")
            if cell not in cells:
                cells[cell], paths[cell] = found, {shard: path}
                results.append(found)
                continue
            # Another shard of the cell joins it, if it was asked in the same way.
            own = dict.fromkeys(("shard", "items", "data"))  # what each shard has of its own
            wrong = differences(cells[cell].settings | own, found.settings | own)
            if not shard or None in paths[cell] or shard in paths[cell] or wrong:
                why = "; ".join(wrong.values()) or "both have the same items"
                raise TableError(
                    f"{[*paths[cell].values()][0]} and {path} are the same cell of the table, and not two shards of a run "
                    f"({why}): name one, or give one another `name`"
                )
            paths[cell][shard] = path
            cells[cell].records += found.records
    if not results:
        raise TableError(f"no results in {', '.join(map(str, runs))}: `python eval.py CONFIG` makes them")
    return results


# ------------------------------------------------------------------------------------------------ numbers


def interval(values: Sequence[float], videos: Sequence[str]) -> tuple[float, float]:
    """Return the 95 % interval of the mean of values in 0 ... 1. The questions of one video are not independent, so
    videos are the sample, not questions."""
    _, index = np.unique(list(videos), return_inverse=True)
    sums, counts = np.bincount(index, values), np.bincount(index)  # [C], C videos
    mean, c = sums.sum() / counts.sum(), len(counts)
    # se² = C / (C - 1) · Σ_c (S_c - n_c · mean)² / N²; of one video nothing is known, and Σ is 0
    variance = c / max(1, c - 1) * ((sums - counts * mean) ** 2).sum() / counts.sum() ** 2
    half = 1.96 * variance**0.5
    return max(0.0, float(mean - half)), min(1.0, float(mean + half))


def videos_of(record: dict) -> str:
    return "/".join(record["videos"])


def executed(record: dict) -> int:
    """Count the calls that ran, as `data.Episode.executed`."""
    return sum(not call["error"] for call in record["calls"])


def costs(r: Results) -> dict[str, float]:
    """Return means per item, and rates in percent."""
    n = max(1, len(r.records))

    def mean(values: Iterable[float]) -> float:
        return sum(values) / n

    def rate(values: Iterable[bool]) -> float:
        return 100 * sum(values) / n

    answered = [x for x in r.records if not x["error"]]
    return {
        "calls": mean(executed(x) for x in r.records),
        "failed_calls": mean(len(x["calls"]) - executed(x) for x in r.records),
        "turns": mean(x["turns"] for x in r.records),
        "tokens": mean(x["tokens"] for x in r.records),
        "agent_tokens": mean(x["agent_tokens"] for x in r.records),
        "seconds": mean(x["seconds"] for x in r.records),
        "error_rate": rate(bool(x["error"]) for x in r.records),
        "unparsed_rate": rate(x["prediction"] is None for x in answered),
        "truncated_rate": rate(x["truncated"] for x in r.records),
        "fmt": mean(x.get("fmt", 0.0) for x in r.records),  # 0 where the protocol has another format
        "strict": mean(x.get("strict", 0.0) for x in r.records),
    }


# ------------------------------------------------------------------------------------------------ the tables


def read_published() -> dict[str, Any]:
    return yaml.safe_load(PUBLISHED.read_text(encoding="utf-8"))


def report(runs: Sequence[str | Path], baseline: str = "") -> str:
    """Print all tables as Markdown; returns the text."""
    results, published = collect(runs), read_published()["table"]
    names = ordered(r.name for r in results)
    results.sort(key=lambda r: (names.index(r.name), r.k, r.arm != "parallel", r.arm))
    text = scores_table(results, published, baseline or names[0]) + "\n\n" + costs_table(results)
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


def ordered(values: Iterable) -> list:
    """Drop repetitions."""
    return list(dict.fromkeys(values))


@dataclass
class Line:
    """One row of scores."""

    name: str
    arm: str
    cells: dict[str, Results]  # split -> its results
    joined: bool  # each split at the K of the paper's table, where it was asked so; else all at one other K

    def k(self) -> str:
        return k_text({split: r.k for split, r in self.cells.items()})

    def read(self, reading: str) -> "Line":
        """Return the line with the scores of that reading, without results that are older than the lenient one."""
        cells = {}
        for split, r in self.cells.items():
            if reading == "strict" or all("lenient" in record for record in r.records):
                cells[split] = r.read(reading)
        return replace(self, cells=cells)

    def finished(self) -> dict[str, float]:
        return {split: r.score() for split, r in self.cells.items() if r.complete()}


def lines_of(results: Sequence[Results], published: dict) -> list[Line]:
    """Join the splits of a model and arm, the paper's way: Charades has its own K."""
    k_published, lines = dict(zip(published["columns"], published["frames"])), []
    for name, arm in ordered((r.name, r.arm) for r in results):
        joined, others = {}, {}
        own = [r for r in results if (r.name, r.arm) == (name, arm)]
        for r in own:
            asked_at = [other.k for other in own if other.split == r.split]
            if r.k == k_published.get(r.split) or len(asked_at) == 1:
                joined[r.split] = r
            else:
                others.setdefault(r.k, {})[r.split] = r
        # A split that was asked at several K, none of them the paper's, has no place in the joined row.
        if joined:
            lines.append(Line(name, arm, joined, joined=True))
        for k in sorted(others):
            lines.append(Line(name, arm, others[k], joined=False))
    return lines


def k_text(k_of: dict[str, int]) -> str:
    """Name the usual K and the splits that have another: "64 (charades 32)"."""
    ks = list(k_of.values())
    usual = max(ks, key=ks.count)
    others = [f"{split} {k}" for split, k in k_of.items() if k != usual]
    return f"{usual} ({', '.join(others)})" if others else str(usual)


def average(scores: dict[str, float], columns: Sequence[str]) -> str:
    """Average the columns of the paper's table, if all are there."""
    return f"{sum(scores[c] for c in columns) / len(columns):.1f}" if set(columns) <= set(scores) else ""


def gain(ours: dict[str, float], base: dict[str, float]) -> str:
    """Write both gains over the baseline that the paper mixes, and the number of splits that both have finished: the mean
    of the splits' ratios, and the ratio of the averages."""
    shared = [split for split in ours if base.get(split)]
    if not shared:
        return ""
    mean_of_ratios = sum(ours[split] / base[split] for split in shared) / len(shared)
    ratio_of_means = sum(ours[split] for split in shared) / sum(base[split] for split in shared)
    return f"{100 * (mean_of_ratios - 1):+.1f} / {100 * (ratio_of_means - 1):+.1f} % ({len(shared)})"


def scores_table(results: Sequence[Results], published: dict, baseline: str) -> str:
    lines, splits = lines_of(results, published), ordered(r.split for r in results)
    rows = []
    for name in ordered(line.name for line in lines):
        for line in lines:
            if line.name == name:
                rows += rows_of_line(line, baseline_of(line, lines, baseline), splits, published)
        rows += published_row(name, baseline, splits, published)
    gains = f"gain over {baseline}: mean of ratios / ratio of averages"
    header = ["model", "arm", "reading", "K", *splits, "average", gains]
    table = markdown("### Scores (percent, 95 % interval)", header, rows)
    table += (
        "\n\nstrict: an answer counts where its protocol asks for it, the agent's in closed tags as in training. lenient: "
        "read as the splits' own scorers do, in prose too.\nThe published numbers are lenient (the paper's driver takes a letter from anywhere in the reply): "
        "compare them with the lenient rows."
    )
    in_our_words = []
    for r in results:
        prompting = r.settings["prompting"]
        if prompting["protocol"] not in OUR_PROTOCOLS and not prompting["prompt_file"]:
            in_our_words.append(r.name)
    if in_our_words:
        table += f"\n\nAsked in our words, not in their authors': {', '.join(ordered(in_our_words))}."
    return table


def baseline_of(line: Line, lines: Sequence[Line], baseline: str) -> Line | None:
    """Return what a line is measured against: the baseline's row of the same arm, or its first one where it has none, as
    for other protocols. Rows at another K than the paper's have no gain."""
    rows = [other for other in lines if other.joined and other.name == baseline]
    if not rows or not line.joined:
        return None
    for row in rows:
        if row.arm == line.arm:
            return row
    return rows[0]


def rows_of_line(line: Line, base: Line | None, splits: Sequence[str], published: dict) -> list[list[str]]:
    """Write one row per reading."""
    rows = []
    for reading in READINGS:
        read = line.read(reading)
        if not read.cells:
            continue
        cells = [score_cell(read.cells[split]) if split in read.cells else "" for split in splits]
        finished = read.finished()
        gained = gain(finished, base.read(reading).finished()) if base else ""
        rows.append([line.name, line.arm, reading, read.k(), *cells, average(finished, published["columns"]), gained])
    return rows


def published_row(name: str, baseline: str, splits: Sequence[str], published: dict) -> list[list[str]]:
    """Write what the paper has of a model, if it has any of these splits."""
    scores = published_scores(name, published)
    k_published = dict(zip(published["columns"], published["frames"]))
    shown = {split: k_published[split] for split in splits if split in scores}
    if not shown:
        return []
    cells = [scores.get(split, "") for split in splits]
    gained = gain(scores, published_scores(baseline, published))
    return [[name, "published", "lenient", k_text(shown), *cells, average(scores, published["columns"]), gained]]


def score_cell(r: Results) -> str:
    headline = r.headline()
    if not headline:
        return ""
    low, high = interval([x["score"] for x in headline], [videos_of(x) for x in headline])
    cell = f"{r.score():.1f} [{100 * low:.1f}, {100 * high:.1f}]"
    remarks = []
    if not r.complete():
        remarks.append(f"{len(r.records)} of {r.settings['total']}")
    errors = sum(bool(x["error"]) for x in r.records)
    if errors:
        remarks.append(f"{errors} errors")
    return f"{cell} ({', '.join(remarks)})" if remarks else cell


def row_of(name: str) -> str:
    """Return the row of the paper's table that a name belongs to: "ParaVT-8B (own)" is still ParaVT-8B."""
    return name.partition(" (")[0]


def published_scores(name: str, published: dict) -> dict[str, float]:
    for row in published["rows"]:
        if row["name"] == row_of(name):
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


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="eval.py table", description="Print the tables of some results.")
    parser.add_argument("runs", nargs="+", help="folders of results")
    parser.add_argument("--baseline", default="", help="the model that gains are measured against (default: the first)")
    args = parser.parse_args(arguments)
    try:
        report(args.runs, args.baseline)
    except TableError as error:
        sys.exit(f"error: {error}")
    return 0
