"""eval.py: ask one model, under one protocol, on any of the splits of evals/benchmarks.py.

    python eval.py configs/eval/toy.yaml                    # the toy, with tools and without, at every K
    python eval.py configs/eval/paravt_8b.yaml              # called again, it goes on where it was stopped
    python eval.py configs/eval/paravt_8b.yaml --dry-run    # what is missing, what differs from the paper
    python eval.py table runs/eval/* --baseline NAME        # evals/tables.py: our numbers beside the published ones

RUN/SPLIT-K64-parallel.jsonl holds one line per item, written as the item ends: what was said last, what was read from
it, the score (and under `lenient` both, as the splits' own scorers read), calls, costs, and the error if there was one.
Its first line holds the settings that shape a result; a file of answers under other settings is refused.

An item is asked again if it ended in an error (which counts as wrong until then), or if its question, options, answer
or subtitles have changed. `limit=2` asks two items of each split, and needs no other videos; a larger one goes on.

Deliberately missing: several checkpoints in a run, several machines for a run, ensembles, majority votes.
"""

import contextlib
import dataclasses
import hashlib
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

import data
from evals import tables
from evals.benchmarks import SPLITS, UNGRADED, Item, count_items, grade, grade_leniently, load_split
from evals.protocols import Prompting, play
from rewards import RewardConfig, final_answer, score, turn_texts
from rollout import RolloutConfig, Stage, derive, open_engine, run_all
from runtime import config
from runtime.api import Api, OpenAI, check_api
from runtime.checks import check_run, check_servers, find_checkpoint, on_the_hub
from runtime.dataset import DataError
from runtime.engine import Engine
from runtime.judge import Judge, JudgeError
from runtime.render import Renderer, load_tokenizer
from runtime.run import USER_ERRORS
from runtime.video import Videos
from runtime.visual import VisualContract


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """One model on some splits."""

    run: str
    """Folder of the results."""
    name: str
    """The row of the table. A name of published.yaml, also "ParaVT-8B (own)", brings its published numbers along."""
    checkpoint: str
    """A Hugging Face folder, or its name on the hub."""
    splits: dict[str, str]
    """Split -> the folder of its dataset."""
    frames: tuple[int, ...] = (64,)
    """K: overview frames. Every split is asked once with each K."""
    arms: tuple[Literal["parallel", "sequential", "none"], ...] = ("parallel",)
    """How the protocol `agent` may call tools (`rollout.dispatch`). Every split is asked once in each way."""
    prompting: Prompting = Prompting()
    rollout: RolloutConfig = RolloutConfig(temperature=0.0)
    api: Api = Api()
    """A model behind an API, asked in place of the checkpoint. The checkpoint's tokenizer and chat template still write
    the prompts; `rollout.concurrency` bounds the requests under way."""
    visual: VisualContract | None = None
    """null: the checkpoint's own."""
    grading: RewardConfig = RewardConfig(open_answer="exact")
    """Only how answers are read counts here: open_answer, untagged_answer, judge."""
    limit: int = 0
    """Only the first so many items of each split; 0: all."""
    seed: int = 0
    decoders: int = 8

    def __post_init__(self):
        unknown = [name for name in self.splits if name not in SPLITS]
        if unknown:
            raise ValueError(f"splits = {unknown}: there is only {', '.join(SPLITS)}")
        if not self.agentic and self.arms != ("parallel",):
            raise ValueError(f"arms = {list(self.arms)}: only the protocol 'agent' has them")
        if self.rollout.dispatch != "parallel":
            raise ValueError(f"rollout.dispatch = {self.rollout.dispatch!r}: here, `arms` says how tools are called")
        if self.api.url and self.agentic and (self.rollout.think_prefix or "sequential" in self.arms):
            rule = "set rollout.think_prefix: false, no arm sequential"
            raise ValueError(f"api.url: an API cannot open a turn or stop at a tag; {rule}")

    @property
    def agentic(self) -> bool:
        """Say if the model is our own agent, which has arms, and the format of the rewards."""
        return self.prompting.protocol == "agent"


# ------------------------------------------------------------------------------------------------ the run


def main(cfg: EvalConfig) -> int:
    """Ask what has not been answered yet, and print the table; exit status 1 where all items of a split failed."""
    check_run(cfg)
    source, contract = find_model(cfg)
    renderer = Renderer(load_tokenizer(source), contract)
    weights = cfg.api.model if cfg.api.url else weights_digest(source)

    # What has been answered is not asked again.
    cells, todo = cells_of(cfg), []
    for cell in cells:
        header = settings(cfg, cell, contract, weights)
        records = earlier_results(cell, header)
        answered = {record["id"] for record in records}
        items = [item for item in cell.items if item.task.id not in answered]
        if items:
            todo.append((cell, items, [header, *records]))

    # Ask the rest. Nothing is written before the engine is there.
    if todo:
        with contextlib.closing(open_model(cfg, source, renderer)) as engine, Videos(cfg.decoders) as videos:
            config.save_run(cfg, cfg.run)
            for cell, items, before in todo:
                ask_all(cell, items, before, Stage(engine, renderer, videos, cell.rollout), cfg)

    # Show all results of the run.
    tables.report([cfg.run])
    failed = 0
    for cell in cells:
        errors = [record["error"] for record in tables.read_results(cell.path).records]
        if errors and all(errors):
            failed = 1
            print(f"error: all {len(errors)} items of {cell.path} failed; the last: {errors[-1]}", file=sys.stderr)
    return failed


def dry_run(cfg: EvalConfig) -> int:
    """Print what is there and missing, and what the published run did otherwise; exit status 1 if data is missing."""
    print(f"{cfg.name} -> {cfg.run}, protocol {cfg.prompting.protocol}")
    missing = 0
    for split, root in cfg.splits.items():
        try:
            count = len(load_split(split, root, cfg.limit))
            print(f"  ok      {split}: {count} items, {count * len(cfg.frames) * len(cfg.arms)} episodes")
        except DataError as error:
            missing = 1
            print(f"  MISSING {split}: {error}")

    for text in tables.read_published()["differs"].get(cfg.name.partition(" (")[0], ()):
        print(f"  note    the published run: {text}")

    # What the model needs: a refusal ends the dry run with its sentence.
    if on_the_hub(cfg.checkpoint):
        print(f"  note    {cfg.checkpoint} is not here; the run would fetch it from the hub")
    else:
        find_model(cfg)
    check_api(cfg.api)
    if not cfg.api.url:
        check_servers(cfg.rollout)
    return missing


def find_model(cfg: EvalConfig) -> tuple[Path, VisualContract]:
    """Return the checkpoint's folder and contract. Of a model behind an API, only the tokenizer is needed."""
    source = find_checkpoint(cfg.checkpoint, weights=not cfg.api.url)
    contract = cfg.visual or VisualContract.load(source)
    contract.check(source)
    return source, contract


def open_model(cfg: EvalConfig, source: Path, renderer: Renderer) -> Engine:
    if cfg.api.url:
        check_api(cfg.api)
        return OpenAI(cfg.api, renderer)
    check_servers(cfg.rollout)
    return open_engine(
        source, renderer, gpus=cfg.rollout.gpus, urls=cfg.rollout.urls, server_args=cfg.rollout.server_args,
        max_batch_tokens=cfg.rollout.max_batch_tokens, max_context=cfg.rollout.max_context,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ one file of results, one item


@dataclass(frozen=True)
class Cell:
    """One file of results: a split, asked in one way."""

    split: str
    k: int
    arm: str  # of other models, the protocol
    rollout: RolloutConfig  # with the arm as its dispatch
    items: list[Item]  # as many as `limit` says
    total: int  # items of the whole split
    path: Path


def cells_of(cfg: EvalConfig) -> list[Cell]:
    found = []
    for split, root in cfg.splits.items():
        items, total = load_split(split, root, cfg.limit), count_items(split, root)
        for k in cfg.frames:
            for dispatch in cfg.arms:
                arm = dispatch if cfg.agentic else cfg.prompting.protocol
                path = Path(cfg.run) / f"{split}-K{k}-{arm}.jsonl"
                found.append(Cell(split, k, arm, replace(cfg.rollout, dispatch=dispatch), items, total, path))
    return found


def settings(cfg: EvalConfig, cell: Cell, contract: VisualContract, weights: str) -> dict[str, Any]:
    """Collect what shapes a result, for the file's first line. Where and how fast it is computed does not; what a fork's
    tool asks its sub-agents (`Look.request`) is not seen here."""
    rollout, grading = dataclasses.asdict(cell.rollout), cfg.grading
    elsewhere = ("gpus", "urls", "server_args", "max_batch_tokens", "concurrency", "call_timeout", "dispatch")
    prompts = [cfg.prompting.texts]
    if cfg.agentic:
        prompts += [data.SYSTEM, data.SYSTEM_WITH_TOOLS, data.SUBAGENT_SYSTEM, data.SUBAGENT_REQUEST]
        prompts += [cell.rollout.schemas]
    place = {"name": cfg.name, "split": cell.split, "k": cell.k, "arm": cell.arm, "total": cell.total}
    header = place | {
        "weights": weights,
        "prompts": digest(prompts),
        "prompting": dataclasses.asdict(cfg.prompting),
        "rollout": {name: value for name, value in rollout.items() if name not in elsewhere},
        "visual": dataclasses.asdict(contract),
        "grading": {"open_answer": grading.open_answer, "untagged_answer": grading.untagged_answer},
        "judge": grading.judge.model,
        "seed": cfg.seed,
    }
    return json.loads(json.dumps(header))  # tuples become lists, as in a file


def weights_digest(folder: Path) -> str:
    """Hash the names and sizes of a checkpoint's files and the first MiB of each, where a shard has trained weights."""
    whole = hashlib.sha256()
    for path in sorted(p for p in folder.iterdir() if p.is_file()):
        with path.open("rb") as file:
            whole.update(f"{path.name}/{path.stat().st_size}/".encode() + file.read(1 << 20))
    return whole.hexdigest()[:16]


def item_digest(item: Item) -> str:
    return digest((item.task.question, item.task.options, item.task.answer, item.subtitles))


def digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def earlier_results(cell: Cell, header: dict[str, Any]) -> list[dict]:
    """Read the answers that earlier calls left, under the same settings. Those to items that have changed are dropped."""
    if not cell.path.exists():
        return []
    found = tables.read_results(cell.path)
    answers = [record for record in found.records if not record["error"]]
    wrong = config.differences(found.settings, header)
    if wrong and answers:
        cure = "choose another `run`, or delete the file"
        raise config.ConfigError(f"{cell.path} was made under other settings ({'; '.join(wrong.values())}): {cure}")
    digests = {item.task.id: item_digest(item) for item in cell.items}
    kept = []
    for record in answers:
        beyond_limit = record["id"] not in digests and len(cell.items) < cell.total
        if beyond_limit or record["item"] == digests.get(record["id"]):
            kept.append(record)
    return kept


def ask_all(cell: Cell, items: list[Item], before: list[dict], stage: Stage, cfg: EvalConfig) -> None:
    """Ask items of a cell, many at a time. Each leaves its line as it ends, behind the lines that stay from before."""
    config.write_whole(cell.path, "".join(json.dumps(line) + "\n" for line in before))
    judge = Judge(cfg.grading.judge)
    bar = tqdm(total=len(items), desc=f"{cell.split} K={cell.k} {cell.arm}", unit="item")
    with cell.path.open("a", encoding="utf-8") as file, bar:

        def done(_: int, record: dict) -> None:
            file.write(json.dumps(record) + "\n")  # ASCII: whatever a model says, a line stays one line
            file.flush()
            bar.update()

        try:
            jobs = [lambda item=item: ask(item, cell.k, stage, cfg, judge) for item in items]
            run_all(stage.engine, jobs, cfg.rollout.concurrency, done)
        finally:
            stage.stopped.set()  # after an error, nobody starts another turn


def ask(item: Item, k: int, stage: Stage, cfg: EvalConfig, judge: Judge) -> dict[str, Any]:
    """Ask one item; returns its line of the results, and not the episode: held, its frames would fill memory."""
    episode, answer = play(stage, item, k, derive(cfg.seed, item.task.id), cfg.prompting)
    turns, error = turn_texts(episode.main, stage.renderer), episode.error

    # Read and grade the answer in both ways; our own agent's format has rewards, too.
    verdict, lenient, form = UNGRADED, UNGRADED, {}
    if not error:
        if answer is None and cfg.grading.untagged_answer:
            answer = final_answer(turns[-1:], untagged=True)
        try:
            verdict = grade(item, answer, cfg.grading, judge)
            lenient = grade_leniently(item, verdict, turns[-1], cfg.grading, judge)
        except JudgeError as problem:
            error = f"JudgeError: {problem}"
    if cfg.agentic and not error:
        parts = score(episode, stage.renderer, RewardConfig(open_answer="exact"))
        form = {name: parts[name] for name in ("fmt", "strict")}

    return {
        "id": item.task.id,
        "item": item_digest(item),
        "videos": ["/".join(Path(path).parts[-2:]) for path in item.task.videos],  # MMVU numbers them in every folder
        "kind": item.task.kind,
        "gold": item.task.answer,
        "said": "".join(turns[-1:])[-2000:],  # the end of the last turn: why an answer could not be read
        "answer": answer,
        **verdict,
        "lenient": lenient,
        **form,
        "calls": [{"name": c.name, "window": c.window, "error": c.error, "seconds": c.seconds} for c in episode.calls],
        "turns": len(turns),
        "tokens": sum(episode.main.mask),
        "agent_tokens": sum(sum(call.agent.mask) for call in episode.calls if call.agent),
        "truncated": episode.main.finish == "length",
        "seconds": episode.seconds,
        "error": error,
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["table"]:
        sys.exit(tables.main(sys.argv[2:]))
    cfg, args = config.command_line(EvalConfig, __doc__)
    config.run_script(dry_run if args.dry_run else main, cfg, *USER_ERRORS)
