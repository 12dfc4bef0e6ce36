"""results.py: the result files of eval.py: read, resume and append them. Also name a run, and compare it with the published one.

    results = read_results(path)                        # one file; its name says split, K and arm
    read_runs(["runs/eval/a", ...])                     # all files of several runs, for one table
    kept, dropped, left = resume(path, items, whole)    # the records to keep, how many to drop, and the items to ask
    write_records(path, kept)                           # then `append_record` adds one at a time

RUN/SPLIT-K64-ARM.jsonl has one line per item. RUN/config.yaml has the name of the model's row, and RUN/run.json has the sizes of
the splits. `checks.refuse_other_run` refuses to add answers that were given under other settings.
"""

import dataclasses
import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from evals import benchmarks
from runtime import config
from runtime.checks import MAY_CHANGE, RESULTS
from runtime.dataset import DataError
from runtime.plan import PUBLISHED
from runtime.run import write_whole
from runtime.visual import VisualContract, read_json

PUBLISHED_FILE = Path(__file__).parent.parent / "configs" / "eval" / "published.yaml"
RECORD = (  # fields of each line that the tables read; our own agent's lines have f and well_formed as well
    "id", "videos", "kind", "gold", "tagged", "prediction", "score", "judged", "calls", "turns", "tokens", "subagent_tokens",
    "truncated", "seconds", "error",
)  # fmt: skip
SHAPES_RESULTS = ("frames", "arms", "prompting", "rollout", "visual")  # settings that decide what a model sees and says


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


def whole_lines(path: Path) -> list[bytes]:
    """Return the lines of a file. Leave out an incomplete last one: it is still being written, or was cut off by a kill."""
    content = path.read_bytes()
    return content[: content.rfind(b"\n") + 1].splitlines()


def read_results(path: Path) -> Results:
    """Read a file of results, without the name and total that its run knows."""
    records = []
    for number, line in enumerate(whole_lines(path), start=1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict) or not record.keys() >= set(RECORD):
            advice = "delete the line if it is damaged, or the folder if an older version of this code wrote it"
            raise DataError(f"{path}: line {number} is no result: {advice}, and run again")
        records.append(record)
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
    paths = {}  # cell of the table -> its file
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


def write_records(path: Path, records: list[dict]) -> None:
    """Write a file of results anew."""
    write_whole(path, "".join(json.dumps(record) + "\n" for record in records))


def append_record(path: Path, record: dict) -> None:
    """Add a record to a file of results. One thread at a time may do so."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")  # as ASCII, so that no separator of Unicode breaks the line


# ------------------------------------------------------------------------------------------------ the published run


# Rows of the paper's table, and checkpoints of their sizes.
ROW_SIZES = {"ParaVT-8B": "Qwen/Qwen3-VL-8B-Instruct", "Qwen2.5-VL-7B": "Qwen/Qwen2.5-VL-7B-Instruct"}


def default_names(checkpoint: str) -> tuple[str, str]:
    """Return the run's folder and the row's name of a checkpoint, from the label X in it: runs/X/model -> X,
    runs/X/models/step-N -> X-step-N, owner/model -> model."""
    *above, label = Path(checkpoint).parts
    if label == "model" and above:
        label = above[-1]
    elif len(above) > 1 and above[-1] == "models":
        label = f"{above[-2]}-{label}"

    # A name that begins with a row of the paper's table gets the published numbers.
    size = size_of(read_json(Path(checkpoint) / "config.json") or PUBLISHED.get(checkpoint, {}))
    name = label
    for row, same_size in ROW_SIZES.items():
        if size == size_of(PUBLISHED[same_size]):
            name = f"{row} ({label})"
    return f"runs/eval/own/{label}", name


def size_of(model: dict) -> tuple:
    """Return the family, the width and the depth that a config.json describes."""
    text = model.get("text_config", model)
    return model.get("model_type"), text.get("hidden_size"), text.get("num_hidden_layers")


def unlike_published(cfg: Any) -> list[str]:
    """List how a run (an EvalConfig) differs from its row in configs/eval, and how that row differs from the published run."""
    notes = []
    row = cfg.name.partition(" (")[0]
    checkpoint = Path(cfg.checkpoint)
    own = VisualContract.load(checkpoint) if checkpoint.is_dir() else VisualContract()  # what `visual: null` means
    ours = dataclasses.asdict(replace(cfg, visual=cfg.visual or own))
    path = row_files().get(row)
    if path:
        theirs = config.load(type(cfg), path)
        theirs = dataclasses.asdict(replace(theirs, visual=theirs.visual or own))
        for key, text in config.differences(theirs, ours).items():
            if key.startswith(SHAPES_RESULTS) and key not in MAY_CHANGE:
                notes.append(f"unlike {path.name}: {text}")
    for group in read_published()["differs"].get(row, ()):
        notes += [f"the published run: {text}" for text in group]
    return notes


@functools.cache
def row_files() -> dict[str, Path]:
    """Return name of a row -> its file in configs/eval."""
    return {config.read_tree(path).get("name"): path for path in PUBLISHED_FILE.parent.glob("*.yaml")}


@functools.cache
def read_published() -> dict[str, Any]:
    return yaml.safe_load(PUBLISHED_FILE.read_text(encoding="utf-8"))
