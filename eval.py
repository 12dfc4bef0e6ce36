"""eval.py: ask one model, under one protocol, on any of the splits of evals/benchmarks.py.

    python eval.py configs/eval/toy.yaml                    # the toy, with tools and without, at every K
    python eval.py configs/eval/paravt_8b.yaml              # called again, it goes on where it was stopped
    python eval.py configs/eval/paravt_8b.yaml --dry-run    # what is missing, how long it takes, what differs from the paper
    python eval.py configs/eval/paravt_8b.yaml shard=0/4    # items 0, 4, 8, ...: four machines share a run
    python eval.py table runs/eval/* --baseline NAME        # evals/tables.py: our numbers beside the published ones

RUN/SPLIT-K64-parallel.jsonl holds one line per item, written as the item ends: what was said last, what was read from
it, the score (and under `lenient` both, as the splits' own scorers read), the calls with their windows, turns, tokens,
seconds, and the error if there was one. Its first line holds the settings that shape a result: weights, prompts,
contract, data. A file made under other settings is refused, unless nothing in it was answered. Items that ended in an
error count as wrong, and the next call asks them again (its line then counts). `limit=2` tries a config on two items of
each split, and needs no other videos; a larger limit goes on from there. A run in which all items of a split failed ends
with exit status 1.

With `transcripts`, RUN/episodes has a file of that name with the whole episodes:
`python -m study.report FILE --model CHECKPOINT` shows them.

Deliberately missing: several checkpoints in a run, ensembles, majority votes.
"""

import dataclasses
import hashlib
import json
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

import data
import tools
from data import Episode
from evals import tables
from evals.benchmarks import SPLITS, UNGRADED, Item, ask_with_subtitles, count_items, grade, grade_leniently, load_split
from evals.protocols import Prompting, look_over, overview_indices, play
from rewards import RewardConfig, final_answer, score, turn_texts
from rollout import RolloutConfig, Stage, derive, dump, open_engine, run_all
from runtime import config
from runtime.api import Api, OpenAI, check_api
from runtime.checks import check_run, check_servers, differences, find_checkpoint, find_tokenizer, on_the_hub
from runtime.contract import ContractError, Renderer, VisualContract, load_tokenizer
from runtime.dataset import DataError
from runtime.engine import EngineError
from runtime.judge import Judge, JudgeError
from runtime.video import VideoError, Videos


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """One model on some splits."""

    run: str
    """Folder of the results."""
    name: str
    """The row of the table. The names in configs/eval/published.yaml bring the published numbers along, also with more in
    brackets: "ParaVT-8B (own)"."""
    checkpoint: str
    """A Hugging Face folder, or its name on the hub."""
    splits: dict[str, str]
    """Split -> the folder of its dataset."""
    frames: tuple[int, ...] = (64,)
    """K: overview frames. Every split is asked once with each K."""
    arms: tuple[Literal["parallel", "sequential", "none"], ...] = ("parallel",)
    """Ways in which the agent may call tools (`rollout.dispatch`); every split is asked once in each. Only the protocol
    `agent` has arms."""
    prompting: Prompting = Prompting()
    rollout: RolloutConfig = RolloutConfig(temperature=0.0)
    api: Api = Api()
    """A model behind an API, asked in place of the checkpoint; that one's tokenizer and chat template still write the
    prompts and count the tokens. `rollout.concurrency` bounds the requests under way."""
    visual: VisualContract | None = None
    """null: the checkpoint's own."""
    grading: RewardConfig = RewardConfig(open_answer="exact")
    """Only how answers are read counts here: open_answer, untagged_answer, judge."""
    limit: int = 0
    """Only the first so many items of each split; 0: all."""
    shard: str = ""
    """i/n: only the items i, i + n, i + 2n, ... (i from 0), in files of their own; the table joins the n shards."""
    transcripts: bool = False
    """Keep whole episodes, too: about 100 kB each."""
    seed: int = 0
    decoders: int = 8

    def __post_init__(self):
        unknown = [name for name in self.splits if name not in SPLITS]
        if unknown:
            raise ValueError(f"splits = {unknown}: there is only {', '.join(SPLITS)}")
        if not self.agentic and self.arms != ("parallel",):
            raise ValueError(f"arms = {list(self.arms)}: only the protocol 'agent' has them")
        if min(self.frames) < 1:
            raise ValueError(f"frames = {list(self.frames)}: an overview has at least 1 frame")
        if self.rollout.dispatch != "parallel":
            raise ValueError(f"rollout.dispatch = {self.rollout.dispatch!r}: here, `arms` says how tools are called")
        i, _, n = self.shard.partition("/")
        if self.shard and not (i.isdecimal() and n.isdecimal() and int(i) < int(n)):
            raise ValueError(f"shard = {self.shard!r}: write i/n with i from 0 to n - 1, such as 0/4")
        if self.api.url and (self.rollout.gpus or self.rollout.urls):
            raise ValueError("api.url: the model is asked there, so leave rollout.gpus and rollout.urls empty: []")
        if self.api.url and self.agentic and (self.rollout.think_prefix or "sequential" in self.arms):
            raise ValueError(
                "api.url: an API cannot open a turn or stop at a tag; set rollout.think_prefix: false, no arm sequential"
            )

    @property
    def agentic(self) -> bool:
        """Say if the model is asked as our own agent, which has arms and the format that the rewards speak of."""
        return self.prompting.protocol == "agent"


# ------------------------------------------------------------------------------------------------ before it runs


def dry_run(cfg: EvalConfig) -> int:
    """Print what is there and what is missing, all at once; exit status 1 if the run could not start. Names on the hub
    are not verified."""
    good = True

    def check(what: str, look: Callable[[], Any]) -> None:
        nonlocal good
        try:
            print(f"  ok      {what}: {look()}")
        except (config.ConfigError, ContractError, DataError, VideoError, tables.TableError) as error:
            good = False
            print(f"  MISSING {what}: {error}")

    def checkpoint() -> str:
        if on_the_hub(cfg.checkpoint):
            return f"{cfg.checkpoint} is not here; the run would fetch it from the hub"
        source = find_checkpoint(cfg.checkpoint)
        (cfg.visual or VisualContract.load(source)).check(source)
        return str(source)

    def servers() -> str:
        check_api(cfg.api)
        check_servers(cfg.rollout)
        return str(cfg.api.url or cfg.rollout.urls or cfg.rollout.gpus or "none, the model runs in this process")

    def items(split: str, root: str) -> str:
        cells = cells_of(replace(cfg, splits={split: root}))
        for cell in cells:
            check_room(cell, videos, cfg)
        episodes = sum(len(cell.items) for cell in cells)
        return f"{cells[0].total} items, {episodes} episodes{time_left(cells, cfg)}"

    print(f"{cfg.name} -> {cfg.run}, protocol {cfg.prompting.protocol}")
    check("checkpoint", checkpoint)
    with Videos(1) as videos:
        for split, root in cfg.splits.items():
            check(split, lambda split=split, root=root: items(split, root))
    check("servers", servers)
    if cfg.prompting.protocol not in tables.OUR_PROTOCOLS and not cfg.prompting.prompt_file:
        print("  note    prompting.prompt_file is empty: our own words, so scores differ from the authors'")
    for text in unlike_published(cfg):
        print(f"  note    the published run: {text}")
    for url in cfg.rollout.urls:
        print(f"  note    {url} must serve {cfg.checkpoint}")
    return 0 if good else 1


def unlike_published(cfg: EvalConfig) -> list[str]:
    """List what the published run of this row did otherwise: keys of the config, then what no key can say."""
    published, row = tables.read_published(), tables.row_of(cfg.name)
    asked, table, differs = published["asked"], published["table"], published["differs"]
    if row not in asked["rows"]:
        return differs.get(row, [])
    here = replace(cfg, visual=cfg.visual or VisualContract.load(cfg.checkpoint))
    ours = json.loads(json.dumps(dataclasses.asdict(here)))  # tuples become lists, as in a file
    splits_of = {}  # a difference -> the splits that have it
    for split, k in zip(table["columns"], table["frames"]):
        if split in cfg.splits:
            theirs = config.merge(asked["all"], asked["rows"][row])
            theirs = config.merge(theirs, asked["splits"].get(split, {})) | {"frames": [k]}
            for text in other_values(theirs, ours):
                splits_of.setdefault(text, []).append(split)
    found = [f"{text} ({', '.join(splits)})" for text, splits in splits_of.items()]
    return [*found, *differs["open"], *differs[row]]


def other_values(theirs: dict, ours: dict, prefix: str = "") -> list[str]:
    """List the keys that have another value in a config than they had in the published run."""
    found = []
    for key, value in theirs.items():
        if isinstance(value, dict):
            found += other_values(value, ours[key], f"{prefix}{key}.")
        elif ours[key] != value:
            found.append(f"{prefix}{key} = {value!r}, here {ours[key]!r}")
    return found


def check_room(cell: "Cell", videos: Videos, cfg: EvalConfig) -> None:
    """Refuse an overview that alone overflows the context, by the video of the first item."""
    contract = cfg.visual or VisualContract.load(cfg.checkpoint)
    info = videos.info(cell.items[0].task.videos[0])
    frames = len(overview_indices(info, cell.k, cfg.prompting.protocol))
    # Beside its pixels, a frame has a start, an end and a stamp: <123.4 seconds> is 8 tokens of Qwen's.
    tokens = contract.frame_tokens(*contract.frame_size(info.width, info.height)) + 2 + 8 * bool(contract.stamp)
    if frames * tokens > cfg.rollout.max_context:
        raise config.ConfigError(
            f"{frames} frames of {tokens} tokens do not fit into rollout.max_context = {cfg.rollout.max_context}: "
            "lower `frames` or the pixels in `visual`, or raise max_context"
        )


def time_left(cells: list["Cell"], cfg: EvalConfig) -> str:
    """Estimate how long the rest takes by what has been measured; empty before anything has."""
    left, seconds = 0, []
    for cell in cells:
        records = tables.read_results(cell.path).records if cell.path.exists() else []
        left += len(unanswered(cell, records))
        seconds += [record["seconds"] for record in records if not record["error"]]
    if not seconds:
        return ""
    at_once = min(cfg.rollout.concurrency, left) or 1
    hours = left * sum(seconds) / len(seconds) / at_once / 3600
    return f"; {hours:.2g} hours for the {left} left, if {at_once} at once go as fast as the {len(seconds)} measured"


# ------------------------------------------------------------------------------------------------ one item


def ask(
    item: Item, k: int, stage: Stage, cfg: EvalConfig, keep: Callable | None = None, judge: Judge | None = None
) -> dict[str, Any]:
    """Ask one item; returns its line of the results. The episode goes to `keep`: held, its frames would fill memory."""
    task = item.task
    episode, turns, answer = None, [], None
    verdict, lenient, form = UNGRADED, UNGRADED, {}
    try:
        if item.subtitles:
            shown = look_over(stage, task.videos[0], k, cfg.prompting.protocol)
            task = ask_with_subtitles(item, shown.times)
        episode, answer = play(stage, task, k, derive(cfg.seed, task.id), cfg.prompting, item.caption)
        turns, error = turn_texts(episode.main, stage.renderer), episode.error
        if not error:
            if answer is None and cfg.grading.untagged_answer:
                answer = final_answer(turns[-1:], untagged=True)
            verdict = grade(item, answer, cfg.grading, judge)
            lenient = grade_leniently(item, verdict, turns[-1], cfg.grading, judge)
    except (VideoError, JudgeError) as problem:
        error = f"{type(problem).__name__}: {problem}"
    if cfg.agentic and not error:
        parts = score(episode, stage.renderer, RewardConfig(open_answer="exact"))
        form = {name: parts[name] for name in ("fmt", "strict")}
    if keep and episode:
        keep(episode)
    calls = episode.calls if episode else []
    return {
        "id": task.id,
        "videos": ["/".join(Path(path).parts[-2:]) for path in task.videos],  # MMVU numbers them anew in every folder
        "kind": task.kind,
        "gold": task.answer,
        "said": "".join(turns[-1:])[-2000:],  # the end of the last turn: why an answer could not be read
        "answer": answer,
        **verdict,
        "lenient": lenient,
        **form,
        "calls": [{"name": c.name, "window": c.window, "error": c.error, "seconds": c.seconds} for c in calls],
        "turns": len(turns),
        "tokens": sum(episode.main.mask) if episode else 0,
        "agent_tokens": sum(sum(call.agent.mask) for call in calls if call.agent),
        "truncated": bool(episode and episode.main.finish == "length"),
        "seconds": episode.seconds if episode else 0.0,
        "error": error,
    }


# ------------------------------------------------------------------------------------------------ one file of results


@dataclass(frozen=True)
class Cell:
    """One file of results: a split, asked in one way."""

    split: str
    k: int
    arm: str  # of the agent; of others, the protocol
    items: list[Item]  # the first of the split, as many as `limit` says, and of these the shard's
    total: int  # items of the whole split
    path: Path


def cells_of(cfg: EvalConfig) -> list[Cell]:
    found = []
    for split, root in cfg.splits.items():
        items, total = load_split(split, root, cfg.limit), count_items(split, root)
        suffix = ""
        if cfg.shard:
            i, n = map(int, cfg.shard.split("/"))
            items, suffix = items[i::n], f"-{i}of{n}"
            if not items:
                raise config.ConfigError(f"shard = {cfg.shard!r}: no item of {split} is in it; take fewer shards")
        for k in cfg.frames:
            for arm in cfg.arms if cfg.agentic else (cfg.prompting.protocol,):
                found.append(Cell(split, k, arm, items, total, Path(cfg.run) / f"{split}-K{k}-{arm}{suffix}.jsonl"))
    return found


def settings(cfg: EvalConfig, cell: Cell, contract: VisualContract, weights: str) -> dict[str, Any]:
    """Collect all that shapes a result, for the file's first line; where and how fast it is computed does not."""
    rollout, grading = dataclasses.asdict(cfg.rollout), dataclasses.asdict(cfg.grading)
    elsewhere = ("gpus", "urls", "server_args", "max_batch_tokens", "concurrency", "call_timeout", "dispatch")
    prompts = [data.SYSTEM, data.SYSTEM_WITH_TOOLS, data.SUBAGENT_SYSTEM, data.SUBAGENT_REQUEST, cfg.rollout.schemas]
    if cfg.agentic and cell.arm != "none":  # a tool may ask its sub-agents in its own words
        prompts.append(Path(tools.__file__).read_text(encoding="utf-8"))
    header = {
        "name": cfg.name,
        "split": cell.split,
        "k": cell.k,
        "arm": cell.arm,
        "items": len(cell.items),
        "total": cell.total,
        "weights": weights,
        "data": items_digest(cell.items),
        "prompts": _digest([*prompts, cfg.prompting.texts]),
        "prompting": dataclasses.asdict(cfg.prompting),
        "rollout": {name: value for name, value in rollout.items() if name not in elsewhere},
        "visual": dataclasses.asdict(contract),
        "grading": {"open_answer": grading["open_answer"], "untagged_answer": grading["untagged_answer"]},
        "judge": grading["judge"]["model"],
        "seed": cfg.seed,
        **({"shard": cfg.shard} if cfg.shard else {}),
    }
    return json.loads(json.dumps(header))  # tuples become lists, as in a file


def items_digest(items: list[Item]) -> str:
    return _digest([(i.task.id, i.task.question, i.task.answer, repr(i.subtitles)) for i in items])


def weights_digest(folder: Path) -> str:
    """Hash a checkpoint: names and sizes of its files, and 1 MiB from each end (training changes every weight)."""
    whole = hashlib.sha256()
    for path in sorted(p for p in folder.iterdir() if p.is_file()):
        size = path.stat().st_size
        whole.update(f"{path.name}/{size}/".encode())
        with path.open("rb") as file:
            whole.update(file.read(1 << 20))
            file.seek(max(0, size - (1 << 20)))
            whole.update(file.read())
    return whole.hexdigest()[:16]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def earlier_results(cell: Cell, header: dict[str, Any]) -> list[dict]:
    """Read what earlier calls left, which must be of the same settings; a larger limit goes on from a smaller one."""
    if not cell.path.exists():
        return []
    found = tables.read_results(cell.path)
    expected, before = header, found.settings.get("items", 0)
    if before < len(cell.items):  # the limit was smaller then
        expected = header | {"items": before, "data": items_digest(cell.items[:before])}
    wrong = differences(found.settings, expected)
    if not wrong:
        return found.records
    if all(record["error"] for record in found.records):
        return []  # nothing was answered, so nothing is lost
    raise config.ConfigError(
        f"{cell.path} was made under other settings ({'; '.join(wrong.values())}): choose another `run`, or delete the "
        "file"
    )


def unanswered(cell: Cell, records: list[dict]) -> list[Item]:
    answered = {record["id"] for record in records if not record["error"]}
    return [item for item in cell.items if item.task.id not in answered]


def start_transcripts(cell: Cell, asked: set[str], renderer: Renderer) -> Callable[[Episode], None]:
    """Return a function that appends an episode to the cell's file of them. A torn last line, and items that are asked
    again, are removed from the file first."""
    path, kept, one_at_a_time = cell.path.parent / "episodes" / cell.path.name, [], threading.Lock()
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            if line.endswith("\n") and json.loads(line)["task"]["id"] not in asked:
                kept.append(line)
    path.parent.mkdir(parents=True, exist_ok=True)
    config.write_whole(path, "".join(kept))

    def keep(episode: Episode) -> None:
        with one_at_a_time, path.open("a", encoding="utf-8") as file:
            dump(episode, file, renderer)

    return keep


def work(cell: Cell, header: dict, records: list[dict], stage: Stage, cfg: EvalConfig) -> None:
    """Ask what has no answer among the records, many items at a time; each leaves its line as it ends."""
    items = unanswered(cell, records)
    asked = {item.task.id for item in items}
    scores = [record["score"] for record in records if record["id"] not in asked]
    stage = replace(stage, stopped=threading.Event())
    config.write_whole(cell.path, "".join(json.dumps(line) + "\n" for line in (header, *records)))
    bar = tqdm(total=len(cell.items), initial=len(scores), desc=f"{cell.split} K={cell.k} {cell.arm}", unit="item")
    keep = start_transcripts(cell, asked, stage.renderer) if cfg.transcripts else None
    judge = Judge(cfg.grading.judge)
    with cell.path.open("a", encoding="utf-8") as file, bar:

        def done(_: int, record: dict) -> None:
            file.write(json.dumps(record) + "\n")  # ASCII: whatever a model says, a line stays one line
            file.flush()
            scores.append(record["score"])
            bar.set_postfix(score=f"{100 * sum(scores) / len(scores):.1f}", refresh=False)
            bar.update()

        try:
            jobs = [lambda item=item: ask(item, cell.k, stage, cfg, keep, judge) for item in items]
            run_all(stage.engine, jobs, cfg.rollout.concurrency, done)
        except BaseException:
            stage.stopped.set()  # nobody starts another turn
            raise


# ------------------------------------------------------------------------------------------------ the run


def main(cfg: EvalConfig) -> int:
    """Ask what has not been answered yet, and print the table; exit status 1 where all items of a split failed."""
    check_run(cfg)
    if cfg.api.url:
        source, weights = find_tokenizer(cfg.checkpoint), cfg.api.model
    else:
        source = find_checkpoint(cfg.checkpoint)
        weights = weights_digest(source)
    contract = cfg.visual or VisualContract.load(source)
    contract.check(source)
    renderer = Renderer(load_tokenizer(source), contract)

    # What has been answered is not asked again.
    todo, cells = [], cells_of(cfg)
    for cell in cells:
        header = settings(cfg, cell, contract, weights)
        records = earlier_results(cell, header)
        if unanswered(cell, records):
            todo.append((cell, header, records))

    # Nothing is written before the engine is there.
    if todo:
        check_api(cfg.api)
        check_servers(cfg.rollout)
        if cfg.api.url:
            engine = OpenAI(cfg.api, renderer)
        else:
            names = ("gpus", "urls", "server_args", "max_batch_tokens", "max_context")
            where = {name: getattr(cfg.rollout, name) for name in names}
            engine = open_engine(source, renderer, **where)
        try:
            config.save_run(cfg, cfg.run)
            with Videos(cfg.decoders) as videos:
                for cell, header, records in todo:
                    dispatch = cell.arm if cfg.agentic else cfg.rollout.dispatch
                    stage = Stage(engine, renderer, videos, replace(cfg.rollout, dispatch=dispatch))
                    work(cell, header, records, stage, cfg)
        finally:
            engine.close()
    tables.report([cfg.run])

    failed = 0
    for cell in cells:
        errors = [record["error"] for record in tables.read_results(cell.path).records]
        if errors and all(errors):
            failed = 1
            print(f"error: all {len(errors)} items of {cell.path} failed; the last: {errors[-1]}", file=sys.stderr)
    return failed


if __name__ == "__main__":
    if sys.argv[1:2] == ["table"]:
        sys.exit(tables.main(sys.argv[2:]))
    cfg, args = config.command_line(EvalConfig, __doc__)
    user_errors = (config.ConfigError, tables.TableError, ContractError, EngineError, FileNotFoundError, DataError)
    config.run_script(dry_run if args.dry_run else main, cfg, *user_errors)
