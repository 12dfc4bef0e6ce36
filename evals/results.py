"""results.py: read the result files of eval.py, and find what is left to ask.

    results = read_results(path)                        # one file; its name says split, K and arm
    read_runs(["runs/eval/a", ...])                     # all files of several runs, for one table
    records = read_records(path)                        # of a file that an earlier call of eval.py left
    kept = records_to_keep(records, items, whole)
    left = items_to_ask(items, kept)                    # those that none of the kept records answers

RUN/SPLIT-K64-ARM.jsonl has one line per item. RUN/config.yaml has the name of the model's row, and RUN/run.json has the sizes of
the splits. `folder.refuse_other_run` refuses to add answers that were given under other settings.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from evals import benchmarks
from runtime import config
from runtime.dataset import DataError
from runtime.folder import RESULTS
from runtime.lines import read_lines
from runtime.visual import read_json

RECORD = (  # fields of each line that the tables read; our own agent's lines have f and well_formed as well
    "id", "videos", "kind", "gold", "tagged", "prediction", "score", "judged", "calls", "turns", "tokens", "subagent_tokens",
    "truncated", "seconds", "error",
)  # fmt: skip


@dataclass(frozen=True)
class Results:
    """One file of results."""

    split: str
    k: int
    arm: str
    records: list[dict[str, Any]]  # one per item
    name: str = ""  # the model's row in the table
    total: int = 0  # items of the whole split

    def figures(self) -> dict[str, float]:
        return benchmarks.figures(self.split, self.records)

    def score(self) -> float:
        """Return the split's headline figure, in percent."""
        return next(iter(self.figures().values()))

    def complete(self) -> bool:
        return len(self.records) == self.total


def read_records(path: Path) -> list[dict[str, Any]]:
    """Read the records of a file of results. A file that does not exist yet has none."""
    records = list(read_lines(path)) if path.exists() else []
    for number, record in enumerate(records, start=1):
        if not isinstance(record, dict) or not record.keys() >= set(RECORD):
            raise DataError(
                f"{path}: line {number} is no result of this version of the code: delete the folder, and run again"
            )
    return records


def read_results(path: Path) -> Results:
    """Read a file of results, without the name and total that its run knows."""
    split, k, arm = path.stem.rsplit("-", 2)
    return Results(split, int(k.removeprefix("K")), arm, read_records(path))


def read_run(run: str | Path) -> dict[Path, Results]:
    """Read all results in a run's folder."""
    paths = sorted(Path(run).glob(RESULTS))
    if not paths:
        return {}
    name = config.read_tree(Path(run) / "config.yaml").get("name", "")
    sizes = (read_json(Path(run) / "run.json") or {}).get("items", {})
    by_path = {}
    for path in paths:
        results = read_results(path)
        by_path[path] = replace(results, name=name, total=sizes.get(results.split, 0))
    return by_path


def read_runs(runs: Sequence[str | Path]) -> list[Results]:
    """Read the results of several runs, for one table. Runs of one name share a row."""
    all_results = []
    paths: dict[tuple, Path] = {}  # cell of the table -> its file
    for run in runs:
        for path, results in read_run(run).items():
            cell = (results.name, results.arm, results.k, results.split)
            if cell in paths:
                raise DataError(
                    f"{paths[cell]} and {path} fill the same cell of the table: change `name` in the config.yaml of one"
                )
            if results.records:
                paths[cell] = path
                all_results.append(results)
    if not all_results:
        raise DataError(f"no results in {', '.join(map(str, runs))}: run `python eval.py CONFIG` first")
    return all_results


def records_to_keep(records: list[dict], items: list[benchmarks.Item], whole: bool) -> list[dict]:
    """Return the records that still count: one per item, without those that ended in an error or have another gold answer. Records
    of other ids are dropped if `items` are the whole split."""
    tasks = {item.task.id: item.task for item in items}
    kept = {}
    for record in records:
        task = tasks.get(record["id"])
        if task:
            keep = not record["error"] and (record["kind"], record["gold"]) == (task.kind, task.answer)
        else:
            keep = not whole  # its item lies beyond the limit
        if keep:
            kept[record["id"]] = record
    return list(kept.values())


def items_to_ask(items: list[benchmarks.Item], kept: list[dict]) -> list[benchmarks.Item]:
    """Return the items that have no record."""
    answered = {record["id"] for record in kept}
    return [item for item in items if item.task.id not in answered]
