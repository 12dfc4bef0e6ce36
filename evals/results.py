"""results.py: read and resume the result files of eval.py, and refuse to mix results that do not compare.

    lines, items = resume(job)          # the lines of job.path to keep, and the items to ask
    results = read_results(path)        # one file: settings (its first line), records (one line per item)
    refuse_mixtures(all_results)        # one row of a table is one model, sampled in one way

`cfg` is an EvalConfig, `folder` its checkpoint. In a dry run it can be None. Settings that need it are then not compared.
"""

import dataclasses
import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

import data
from evals.benchmarks import Item, figures
from evals.protocols import READS
from rollout import RolloutConfig
from runtime import config
from runtime.checks import MAY_CHANGE
from runtime.dataset import DataError
from runtime.prompts import Prompts
from runtime.visual import VisualContract

PUBLISHED_FILE = Path(__file__).parent.parent / "configs" / "eval" / "published.yaml"
HEADER = ("name", "arm", "k", "split", "total")  # fields of a file's first line that the tables read
RECORD = (  # fields of each other line
    "id", "videos", "kind", "tagged", "prediction", "score", "judged", "calls", "turns", "tokens", "subagent_tokens",
    "truncated", "seconds", "error",
)  # fmt: skip


@dataclass(frozen=True)
class EvalJob:
    """One file of results: a split at one K under one arm."""

    split: str
    k: int
    arm: str  # of our agent, its dispatch; of other models, the protocol
    rollout: RolloutConfig  # with the arm as its dispatch
    items: list[Item]  # the first `limit` of the split, or all
    total: int  # items of the whole split
    path: Path
    header: dict[str, Any] = field(default_factory=dict)  # the settings that shape its results


@dataclass
class Results:
    """One file of results."""

    settings: dict[str, Any]  # its header
    records: list[dict[str, Any]]  # one per item

    def __post_init__(self):
        self.name = self.settings["name"]
        self.arm = self.settings["arm"]
        self.k = self.settings["k"]
        self.split = self.settings["split"]

    def figures(self) -> dict[str, float]:
        return figures(self.split, self.records)

    def score(self) -> float:
        """Return the split's headline figure, in percent."""
        return next(iter(self.figures().values()))

    def complete(self) -> bool:
        return len(self.records) == self.settings["total"]


# ------------------------------------------------------------------------------------------------ reading


def read_results(path: Path) -> Results:
    """Read a file of results. Ignore a last line that a kill cut off. Any other damage raises DataError."""
    content = path.read_bytes()
    whole_lines = content[: content.rfind(b"\n") + 1].splitlines() or [b""]
    parsed = []
    for number, line in enumerate(whole_lines, start=1):
        try:
            parsed.append(json.loads(line))
            for name in HEADER if number == 1 else RECORD:
                parsed[-1][name]
        except (ValueError, TypeError, KeyError):
            raise DataError(f"{path}: line {number} is damaged; delete it (line 1: the file) and run again") from None
    return Results(parsed[0], parsed[1:])


def read_run(run: str | Path) -> dict[Path, Results]:
    """Read the results in a run's folder. Damaged files are reported and skipped."""
    by_path = {}
    for path in sorted(Path(run).glob("*-K*-*.jsonl")):
        try:
            by_path[path] = read_results(path)
        except DataError as error:
            print(f"skipped: {error}", file=sys.stderr)
    return by_path


# ------------------------------------------------------------------------------------------------ resuming


def resume(job: EvalJob) -> tuple[list[dict], list[Item]]:
    """Return the lines of a job's file to keep, header first, and the items still to ask. Refuse a file with answers
    under other settings."""
    if not job.path.exists():
        return [job.header], job.items
    earlier = read_results(job.path)
    answered = [record for record in earlier.records if not record["error"]]
    changed = changes(earlier.settings, job.header)
    if answered and changed:
        fix = "choose another `run`, or delete the file"
        raise config.ConfigError(f"{job.path} was made under other settings ({changed}): {fix}")

    # Keep an answer if its item has not changed, or if its item lies beyond this run's limit.
    digests = {item.task.id: item_digest(item) for item in job.items}
    limited = len(job.items) < job.total
    kept = {}
    for record in answered:
        now = digests.get(record["id"])
        if record["item"] == now or (limited and now is None):
            kept[record["id"]] = record
    commits = earlier.settings.get("commits", [])
    commits += [commit for commit in job.header["commits"] if commit not in commits]
    return [job.header | {"commits": commits}, *kept.values()], [item for item in job.items if item.task.id not in kept]


def items_left(job: EvalJob) -> list[Item]:
    """Return the items still to ask."""
    return resume(job)[1]


def changes(before: dict, now: dict) -> str:
    """Name the settings that differ. A dry run without the checkpoint does not know its weights, contract and prompts."""
    unknown = [name for name in ("weights", "visual", "own_prompts") if name in now and now[name] is None]
    unknown.append("commits")  # they shape no result
    was = {name: value for name, value in before.items() if name not in unknown}
    now = {name: value for name, value in now.items() if name not in unknown}
    return "; ".join(config.differences(was, now).values())


def make_header(cfg: Any, job: EvalJob, folder: Path | None, weights: str | None) -> dict[str, Any]:
    """Collect the settings that shape a result, but not where or how fast it is computed. Not covered are a fork's
    requests to sub-agents (`ClipForSubagent.request`), the weights of a server at `rollout.urls`, and flags in
    `rollout.server_args` that change weights, such as quantization."""
    # The prompts in their default form. Their other forms follow from the settings below.
    prompts = [cfg.prompting.texts]
    if cfg.agentic:
        prompts += [data.system_prompt(with_tools=False), data.system_prompt(with_tools=True)]
        prompts += [data.subagent_system_prompt(), data.SUBAGENT_REQUEST, job.rollout.schemas]

    rollout = {}
    for name, value in dataclasses.asdict(job.rollout).items():
        if f"rollout.{name}" not in MAY_CHANGE and name != "dispatch":  # the dispatch is the arm
            rollout[name] = value

    # Some protocols override how frames are read.
    contract = contract_of(cfg, folder)
    if contract:
        contract = dataclasses.asdict(replace(contract, **READS.get(cfg.prompting.protocol, {})))

    own = prompts_of(cfg, folder)
    header = {
        "name": cfg.name,
        "split": job.split,
        "k": job.k,
        "arm": job.arm,
        "total": job.total,
        "commits": [config.git_commit()],  # of all runs that answered items
        "weights": weights,  # a digest, or the model's name at an API
        "api": {"url": cfg.api.url, "parameters": cfg.api.parameters},
        "prompts": digest(prompts),
        "own_prompts": own and dataclasses.asdict(own),
        "prompting": dataclasses.asdict(cfg.prompting),
        "rollout": rollout,
        "visual": contract,
        "grading": {"open_answer": cfg.grading.open_answer, "untagged_answer": cfg.grading.untagged_answer},
        "judge": cfg.grading.judge.model,
        "seed": cfg.seed,
    }
    return json.loads(json.dumps(header))  # tuples become lists, as in a file


def contract_of(cfg: Any, folder: Path | None) -> VisualContract | None:
    """Return how frames are read. `visual: null` means the checkpoint's own contract."""
    return cfg.visual or (VisualContract.load(folder) if folder else None)


def prompts_of(cfg: Any, folder: Path | None) -> Prompts | None:
    """Return the words in place of our prompts. `prompts: null` means those of the checkpoint's training."""
    return cfg.prompts or (Prompts.load(folder) if folder else None)


def item_digest(item: Item) -> str:
    return digest((item.task.question, item.task.options, item.task.answer, item.subtitles))


def digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


# ------------------------------------------------------------------------------------------------ comparing


def read_runs(runs: Sequence[str | Path]) -> list[Results]:
    """Read the results in the folders of all runs, for one table."""
    all_results = []
    paths = {}  # cell of the table -> its file
    for run in runs:
        for path, results in read_run(run).items():
            cell = (results.name, results.arm, results.k, results.split)
            if cell in paths:
                raise DataError(f"{paths[cell]} and {path} fill the same cell of the table: change the `name` of one")
            if results.records:
                paths[cell] = path
                all_results.append(results)
    if not all_results:
        raise DataError(f"no results in {', '.join(map(str, runs))}: run `python eval.py CONFIG` first")
    return all_results


def refuse_mixtures(all_results: Sequence[Results]) -> None:
    """Refuse results under one name that come from different models or sampling settings. Such a row would describe neither."""
    first = {}  # name -> its first results
    for results in all_results:
        other = first.setdefault(results.name, results)
        same = ("weights", "api", "rollout")
        was, now = ({name: r.settings.get(name) for name in same} for r in (other, results))
        if unlike := changes(was, now):
            places = " and ".join(f"{r.split} K={r.k} {r.arm}" for r in (other, results))
            raise DataError(
                f"name = {results.name!r}: {places} differ ({unlike}); give one of them another `name` and `run`, or delete its file"
            )


def refuse_mixed_run(run: str, jobs: Sequence[EvalJob]) -> None:
    """Refuse jobs that would put another model, or other sampling settings, under a name that the run's folder already holds."""
    mine = {job.path for job in jobs}
    others = [results for path, results in read_run(run).items() if path not in mine]
    refuse_mixtures([*others, *(Results(job.header, []) for job in jobs)])


def unlike_published(cfg: Any, folder: Path | None) -> list[str]:
    """List how this run differs from its row in configs/eval, and how that row differs from the published run."""
    notes = []
    row = cfg.name.partition(" (")[0]
    own = VisualContract.load(folder) if folder else VisualContract()  # what `visual: null` means
    ours = dataclasses.asdict(replace(cfg, visual=cfg.visual or own))
    for path in sorted(PUBLISHED_FILE.parent.glob("*.yaml")):
        if config.read_tree(path).get("name") != row:
            continue
        theirs = config.load(type(cfg), path)
        theirs = dataclasses.asdict(replace(theirs, visual=theirs.visual or own))
        for key, text in config.differences(theirs, ours).items():
            shapes_results = key.startswith(("frames", "arms", "prompting", "rollout", "visual"))
            if shapes_results and key not in MAY_CHANGE:
                notes.append(f"unlike {path.name}: {text}")
    for group in read_published()["differs"].get(row, ()):
        notes += [f"the published run: {text}" for text in group]
    return notes


def read_published() -> dict[str, Any]:
    return yaml.safe_load(PUBLISHED_FILE.read_text(encoding="utf-8"))
