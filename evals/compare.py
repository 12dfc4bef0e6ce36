"""compare.py: results of eval.py -> one table. (The command `python eval.py table`.)

    python eval.py table runs/eval/* [--csv FILE] [--baseline NAME]

1. Scores: one row per model, arm and K, with bootstrap 95 % intervals; under it what its authors published.
2. Gains over the baseline, averaged both ways: ratio of the means, and mean of the columns' ratios. They differ.
3. What a score cost, and how clean it is: calls, turns, tokens, seconds; errors, unparsed and truncated answers.
4. Arms of one model against each other, item by item: tools or none, parallel or sequential.

The bootstrap draws videos, not questions: those of one video are not independent. A split that is not finished, or was
limited, says `n of N`; items that ended in an error count as wrong, and are named beside the score. Where arms are
compared, a pair with an error is left out: it says nothing of either arm.

Deliberately missing: significance tests, corrections for many comparisons.
"""

import argparse
import csv
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from evals.benchmarks import figures

FILES = "*-K*-*.jsonl"  # of results, as eval.py names them
PUBLISHED = Path(__file__).parent.parent / "configs" / "eval" / "published.yaml"
ARMS = (("parallel", "none"), ("parallel", "sequential"), ("sequential", "none"))  # that are compared item by item
DRAWS = 1000


class TableError(ValueError):
    """Results that are not there, or that cannot stand in one table."""


@dataclass
class Results:
    """One file of results."""

    settings: dict[str, Any]
    records: list[dict[str, Any]]  # one per item, the last that was written

    @property
    def row(self) -> tuple[str, str, int]:
        return self.settings["name"], self.settings["arm"], self.settings["k"]

    @property
    def split(self) -> str:
        return self.settings["split"]

    def figures(self) -> dict[str, float]:
        return figures(self.split, self.records)

    def headline(self) -> list[dict]:
        """The records that the split's first figure is the mean of."""
        return [r for r in self.records if self.split != "mmvu" or r["kind"] == "mcq"]

    def complete(self) -> bool:
        return len(self.records) == self.settings["total"]


def read_results(path: Path, repair: bool = False) -> Results:
    """A file of results. A last line that a kill has torn is forgotten, and with `repair` cut off."""
    whole = path.read_bytes()
    kept = whole[: whole.rfind(b"\n") + 1]
    if repair and kept != whole:
        with path.open("r+b") as file:
            file.truncate(len(kept))
    try:
        settings, *records = [json.loads(line) for line in kept.splitlines()]
    except ValueError as error:
        raise TableError(
            f"{path}: not a file of results: {error}; delete it, and `python eval.py CONFIG` asks again"
        ) from None
    return Results(settings, list({record["id"]: record for record in records}.values()))


def collect(runs: Sequence[str | Path]) -> list[Results]:
    """The results of all runs, each file once."""
    found = {}
    for run in map(Path, runs):
        if not run.exists():
            raise TableError(f"{run}: no such folder; `python eval.py CONFIG` makes it")
        found |= {path.resolve(): path for path in ([run] if run.match(FILES) else sorted(run.glob(FILES)))}
    whose: dict[tuple, Path] = {}
    results = []
    for path in found.values():
        r = read_results(path)
        if r.records:
            if (first := whose.setdefault((*r.row, r.split), path)) != path:
                raise TableError(
                    f"{first} and {path} are the same cell of the table: name one, or give one another `name`"
                )
            results.append(r)
    if not results:
        raise TableError(f"no results in {', '.join(map(str, runs))}: `python eval.py CONFIG` makes them")
    return results


# ------------------------------------------------------------------------------------------------ intervals


def interval(values: Sequence[float], clusters: Sequence[str]) -> tuple[float, float]:
    """95 % interval of the mean: 1000 draws of whole clusters, with replacement."""
    names, index = np.unique(list(clusters), return_inverse=True)
    sums, counts = np.bincount(index, values), np.bincount(index)  # [clusters]
    rng, means = np.random.default_rng(0), []
    for _ in range(DRAWS):
        chosen = rng.integers(0, len(names), len(names))
        means.append(sums[chosen].sum() / counts[chosen].sum())
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def videos(records: Iterable[dict]) -> list[str]:
    return ["/".join(r["videos"]) for r in records]


@dataclass
class Difference:
    """What changes from arm B to arm A, on the items that both have without an error."""

    items: int
    score: float  # percent
    low: float
    high: float
    seconds: float  # ratio A / B of their means
    tokens: float  # those of sub-agents included


def difference(a: Results, b: Results) -> Difference | None:
    """None where they share no item yet."""
    theirs = {r["id"]: r for r in b.headline() if not r["error"]}
    pairs = [(r, theirs[r["id"]]) for r in a.headline() if not r["error"] and r["id"] in theirs]
    if not pairs:
        return None
    gain = [100 * (x["score"] - y["score"]) for x, y in pairs]
    low, high = interval(gain, videos(x for x, _ in pairs))

    def ratio(*names):
        ours, other = (sum(r[name] for r in column for name in names) for column in zip(*pairs))
        return ours / other if other else float("nan")

    return Difference(len(pairs), float(np.mean(gain)), low, high, ratio("seconds"), ratio("tokens", "agent_tokens"))


# ------------------------------------------------------------------------------------------------ the tables


def report(runs: Sequence[str | Path], csv_path: str = "", baseline: str = "") -> str:
    """Print all tables as Markdown; returns the text."""
    results, published = collect(runs), yaml.safe_load(PUBLISHED.read_text())["table"]
    names = ordered(r.row[0] for r in results)
    if baseline and baseline not in (known := ordered([*names, *(row["name"] for row in published["rows"])])):
        raise TableError(f"baseline {baseline!r}: there is only {', '.join(known)}")
    results.sort(key=lambda r: (names.index(r.row[0]), r.row[2], r.row[1] != "parallel", r.row[1]))
    parts = [scores_table(results, published), gains_table(results, published, baseline)]
    parts += [breakdown_table(results), costs_table(results), arms_table(results)]
    text = "\n\n".join(part for part in parts if part)
    print(text)
    if csv_path:
        with open(csv_path, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["name", "arm", "k", "split", "figure", "value", "items", "total"])
            for r in results:
                rows = [(name, value) for name, value in (r.figures() | costs(r)).items()]
                writer.writerows(
                    [*r.row, r.split, name, value, len(r.records), r.settings["total"]] for name, value in rows
                )
    return text


def markdown(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(str(row[i])) for row in (header, *rows)) for i in range(len(header))]
    line = lambda row: "| " + " | ".join(str(x).ljust(w) for x, w in zip(row, widths)) + " |"  # noqa: E731
    return "\n".join([title, "", line(header), "|" + "|".join("-" * (w + 2) for w in widths) + "|", *map(line, rows)])


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
    return list(dict.fromkeys(values))


def scores_table(results: Sequence[Results], published: dict) -> str:
    splits, shown = ordered(r.split for r in results), dict(zip(published["columns"], published["frames"]))
    rows = []
    for row in ordered(r.row for r in results):
        cells = []
        for split in splits:
            found = next((r for r in results if r.row == row and r.split == split), None)
            cells.append(score_cell(found) if found else "")
        rows.append([row[0], row[1], row[2], *cells])
        theirs = published_scores(row[0], published)
        last_of_name = row == ordered(r.row for r in results if r.row[0] == row[0])[-1]
        for k in ordered(shown.values()) if last_of_name else ():
            cells = [theirs.get(split, "") if shown.get(split) == k else "" for split in splits]
            if any(cells):
                rows.append([row[0], "published", k, *cells])
    table = markdown("### Scores (percent, 95 % interval)", ["model", "arm", "K", *splits], rows)
    asked = ((r.row[0], r.settings["prompting"]) for r in results)
    ours = ordered(name for name, p in asked if p["protocol"] != "agent" and not p["prompt_file"])
    return table + (f"\n\nAsked in our words, not in their authors': {', '.join(ours)}." if ours else "")


def score_cell(r: Results) -> str:
    headline = r.headline()
    if not headline:
        return ""
    value = next(iter(r.figures().values()))
    low, high = (100 * edge for edge in interval([x["score"] for x in headline], videos(headline)))
    errors = sum(bool(x["error"]) for x in r.records)
    remarks = [] if r.complete() else [f"{len(r.records)} of {r.settings['total']}"]
    remarks += [f"{errors} errors"] if errors else []
    return f"{value:.1f} [{low:.1f}, {high:.1f}]" + (f" ({', '.join(remarks)})" if remarks else "")


def published_scores(name: str, published: dict) -> dict[str, float]:
    rows = [row for row in published["rows"] if row["name"] == name]
    return {c: s for c, s in zip(published["columns"], rows[0]["scores"]) if s is not None} if rows else {}


def gains_table(results: Sequence[Results], published: dict, baseline: str) -> str:
    """Relative gains over the baseline model, asked in the same way, over the splits that both have finished."""
    names = ordered(r.row[0] for r in results)
    base, measured = baseline or names[0], {}
    for r in results:
        if r.complete():
            measured.setdefault(r.row, {})[r.split] = next(iter(r.figures().values()))
    pairs = [
        (name, f"{arm} K={k}", scores, measured.get((base, arm, k))) for (name, arm, k), scores in measured.items()
    ]
    pairs += [(n, "published", published_scores(n, published), published_scores(base, published)) for n in names]
    rows = []
    for name, source, scores, of_base in pairs:
        shared = [split for split in scores if name != base and of_base and of_base.get(split)]
        if shared:
            both = map("{:+.1f} %".format, gains(scores, of_base, shared))
            rows.append([name, source, base, len(shared), *both])
    header = ["model", "numbers", "over", "splits", "ratio of means", "mean of ratios"]
    return markdown("### Average gain", header, rows) if rows else ""


def gains(ours: dict[str, float], base: dict[str, float], columns: Sequence[str]) -> tuple[float, float]:
    """The two averages of a relative gain, in percent."""
    of_means = sum(ours[c] for c in columns) / sum(base[c] for c in columns) - 1
    of_ratios = sum(ours[c] / base[c] for c in columns) / len(columns) - 1
    return 100 * of_means, 100 * of_ratios


def breakdown_table(results: Sequence[Results]) -> str:
    """Every other figure of a split."""
    rows = []
    for r in results:
        if found := list(r.figures().items())[1:]:
            rows.append([*r.row, r.split, ", ".join(f"{name} {value:.1f}" for name, value in found)])
    return markdown("### Breakdown", ["model", "arm", "K", "split", "figures"], rows) if rows else ""


def executed(record: dict) -> int:
    """Calls that ran, as `data.Episode.executed`."""
    return sum(not call["error"] for call in record["calls"])


def costs(r: Results) -> dict[str, float]:
    """Means per item, and rates in percent."""
    n = max(1, len(r.records))
    rate = lambda test: 100 * sum(map(test, r.records)) / n  # noqa: E731
    mean = lambda value: sum(map(value, r.records)) / n  # noqa: E731
    return {
        "calls": mean(executed),
        "failed_calls": mean(lambda x: len(x["calls"]) - executed(x)),
        "turns": mean(lambda x: x["turns"]),
        "tokens": mean(lambda x: x["tokens"]),
        "agent_tokens": mean(lambda x: x["agent_tokens"]),
        "seconds": mean(lambda x: x["seconds"]),
        "error_rate": rate(lambda x: bool(x["error"])),
        "no_frames_rate": rate(lambda x: x["error"].startswith("VideoError")),
        "unparsed_rate": rate(lambda x: not x["error"] and x["prediction"] is None),
        "truncated_rate": rate(lambda x: x["truncated"]),
        "fmt": mean(lambda x: x.get("fmt", 0.0)),  # 0 where the protocol has another format
        "strict": mean(lambda x: x.get("strict", 0.0)),
    }


def costs_table(results: Sequence[Results]) -> str:
    rows = [[*r.row, r.split, len(r.records), *(f"{value:.2f}" for value in costs(r).values())] for r in results]
    names = [name.removesuffix("_rate") + (" %" if name.endswith("_rate") else "") for name in costs(results[0])]
    return markdown("### Per item", ["model", "arm", "K", "split", "items", *names], rows)


def arms_table(results: Sequence[Results]) -> str:
    rows = []
    for a in results:
        for b in results:
            same = (a.row[0], a.row[2], a.split) == (b.row[0], b.row[2], b.split)
            if same and (a.row[1], b.row[1]) in ARMS and (d := difference(a, b)):
                score = f"{d.score:+.1f} [{d.low:+.1f}, {d.high:+.1f}]"
                rows.append([a.row[0], a.row[2], a.split, f"{a.row[1]} - {b.row[1]}", d.items, score, f"{d.seconds:.2f}", f"{d.tokens:.2f}"])  # fmt: skip
    header = ["model", "K", "split", "arms", "items", "score", "seconds ratio", "tokens ratio"]
    return markdown("### Arms, item by item", header, rows) if rows else ""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="eval.py table", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", help="folders or files of results")
    parser.add_argument("--csv", default="", help="also write every figure to this file")
    parser.add_argument("--baseline", default="", help="the model that gains are measured against (default: the first)")
    args = parser.parse_args(arguments)
    try:
        report(args.runs, args.csv, args.baseline)
    except TableError as error:
        sys.exit(f"error: {error}")
    return 0
