"""ablation.py: the paper's ablation tables from our runs, with the published values beside them.

    python eval.py ablation runs/NAME_8b runs/eval/own/NAME_8b     # where the trainings and the evaluations are
    python eval.py ablation runs/toy/NAME runs/toy/eval/NAME       # the same table of the toy

NAME stands for grpo, paragrpo and so on: `run` and `eval` of the rows in configs/eval/published.yaml. Missing runs print
as a dash. Deliberately missing: several seeds of a row (`make paradox` has them on the toy).
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from evals.results import read_published, read_run
from evals.tables import markdown, score_cell
from runtime.dataset import DataError

METRICS = ("f", "f_release", "kappa")
TITLES = {"stages": "A. Training stages", "components": "B. Components", "dispatch": "C. Dispatch"}
LEGEND = """
f, f_release, kappa: means over a training's steps. A start has those of the first step of plain GRPO from it.
f_release: f by the released code, on the sampled text, which lacks a forced <think>. The paper's f is on this scale.
Answers in prose count, as in the published scores."""


def report(trainings: str, evaluations: str) -> str:
    """Print one table per block of the paper, and return the text."""
    published = read_published()["ablations"]
    scores = published["columns"][2:]
    rows = []  # (block, row's name, ours or paper, cells by column)
    for block in TITLES:
        for row in published[block]:
            rows.append((block, row["name"], "ours", measure(row, trainings, evaluations)))
            rows.append((block, row["name"], "paper", dict(zip(("f_release", "kappa", *scores), row["scores"]))))
    if not any(cells for _, _, source, cells in rows if source == "ours"):
        raise DataError(f"nothing at {trainings} or {evaluations}, with NAME = grpo, paragrpo, ...: train first")

    columns = dict.fromkeys(["steps", *METRICS, *scores])
    columns |= dict.fromkeys(column for *_, cells in rows for column in cells)  # other splits, other K
    tables = []
    for block, title in TITLES.items():
        of_block = [row for row in rows if row[0] == block]
        filled = [column for column in columns if any(cells.get(column) is not None for *_, cells in of_block)]
        lines = []
        for _, name, source, cells in of_block:
            shown = ["–" if cells.get(column) is None else cells[column] for column in filled]
            lines.append([name, source, *shown])
        tables.append(markdown(f"### {title}", ["row", "", *filled], lines))
    text = "\n\n".join([*tables, LEGEND.strip()])
    print(text)
    return text


def measure(row: dict, trainings: str, evaluations: str) -> dict[str, str]:
    """Return our cells of one row: metrics of its training, and scores of its evaluation at the paper's K."""
    cells = {}
    metrics = Path(trainings.replace("NAME", row.get("run", "")), "metrics.jsonl")
    if "run" in row and metrics.exists():
        lines = metrics.read_text(encoding="utf-8").splitlines()
        steps = [json.loads(line) for line in lines if line.endswith("}")]  # a kill may cut off the last
        steps = steps[: row.get("steps")]
        cells["steps"] = str(len(steps))
        for name in METRICS:
            values = [step[name] for step in steps if name in step]
            if values:
                cells[name] = f"{sum(values) / len(values):.2f}"
    evaluation = read_run(evaluations.replace("NAME", row.get("eval") or row["run"]))
    for results in sorted(evaluation.values(), key=lambda results: results.k):
        if results.arm == row.get("arm", "parallel") and results.records:
            column = results.split if results.k == 64 else f"{results.split}, K={results.k}"
            cells[column] = score_cell(results)
    return cells


def main(arguments: Sequence[str]) -> str | None:
    parser = argparse.ArgumentParser("eval.py ablation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("trainings", help="their folders, with NAME in place of the row's name")
    parser.add_argument("evaluations", help="the folders of their results, likewise")
    args = parser.parse_args(arguments)
    for pattern in (args.trainings, args.evaluations):
        if "NAME" not in pattern:
            return f"error: {pattern}: write NAME where the rows' names differ, as in runs/NAME_8b"
    try:
        report(args.trainings, args.evaluations)
    except DataError as error:
        return f"error: {error}"
