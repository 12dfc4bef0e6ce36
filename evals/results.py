"""results.py: read the result files of eval.py, and find what is left to ask.

    results = read_results(path)                        # one file; its name says split, K and arm
    read_runs(["runs/eval/a", ...])                     # all files of several runs, for one table
    kept, dropped, left = resume(path, items, whole)    # the records to keep, how many to drop, and the items to ask
    write_lines(path, kept)                             # of lines.py, whose `append_line` then adds one at a time

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


def read_results(path: Path) -> Results:
    """Read a file of results, without the name and total that its run knows."""
    records = list(read_lines(path))
    for number, record in enumerate(records, start=1):
        if not isinstance(record, dict) or not record.keys() >= set(RECORD):
            raise DataError(
                f"{path}: line {number} is no result of this version of the code: delete the folder, and run again"
            )
    split, k, arm = path.stem.rsplit("-", 2)
    return Results(split, int(k.removeprefix("K")), arm, records)


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


def resume(path: Path, items: list[benchmarks.Item], whole: bool) -> tuple[list[dict], int, list[benchmarks.Item]]:
    """Return the records of a file to keep, how many others it has, and the items still to ask. An item is asked again if it ended
    in an error, or if its record has another gold answer. Records of other ids are dropped if `items` are the whole split."""
    records = read_results(path).records if path.exists() else []
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
    left = [item for item in items if item.task.id not in kept]
    return list(kept.values()), len(records) - len(kept), left
