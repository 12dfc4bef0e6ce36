"""eval.py: one model, asked under one protocol, on any of the splits of benchmarks.py.

    python eval.py configs/eval/toy.yaml                    # the toy, with tools and without, at every K
    python eval.py configs/eval/paravt_8b.yaml              # called again, it goes on where it was stopped
    python eval.py configs/eval/paravt_8b.yaml --dry-run    # what is there, what is missing, what fits
    python eval.py table runs/eval/* [--csv FILE]           # compare.py: our numbers beside the published ones

RUN/SPLIT-K64-parallel.jsonl holds one line per item, written as the item ends: what was said last, what was read from
it, the score, the calls with their windows, turns, tokens, seconds, and the error if there was one. Its first line holds
the settings that shape a result: weights, prompts, contract, data. A file made under others is refused, so a run of a
few items never passes as the whole. Items that ended in an error are asked again by the next call, and count as wrong
until then; so are those whose video file was replaced.

Deliberately missing: several checkpoints in a run, ensembles, majority votes.
"""

import dataclasses
import hashlib
import json
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

import data
from evals import compare
from evals.benchmarks import SPLITS, UNGRADED, Item, ask_with_subtitles, grade, load_split
from evals.protocols import Prompting, look_over, play
from rewards import JudgeError, RewardConfig, final_answer, score, turn_texts
from rollout import RolloutConfig, Stage, derive, open_engine, run_all
from runtime import config
from runtime.checks import check_run, check_servers, differences, find_checkpoint
from runtime.contract import ContractError, Renderer, VisualContract, load_tokenizer
from runtime.dataset import DataError
from runtime.engine import EngineError
from runtime.video import VideoError, Videos


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """One model on some splits."""

    run: str
    """Folder of the results."""
    name: str
    """The row of the table; the names in configs/eval/published.yaml bring the published numbers along."""
    checkpoint: str
    """A Hugging Face folder, or its name on the hub."""
    family: str = ""
    """What --dry-run plans with as long as `checkpoint` is not there."""
    splits: dict[str, str]
    """Split -> the folder of its dataset."""
    frames: tuple[int, ...] = (64,)
    """K: overview frames. Every split is asked once with each."""
    arms: tuple[Literal["parallel", "sequential", "none"], ...] = ("parallel",)
    """How the agent may call tools (its `rollout.dispatch`); every split is asked once in each way. Only of the protocol
    `agent`."""
    prompting: Prompting = Prompting()
    rollout: RolloutConfig = RolloutConfig(temperature=0.0)
    visual: VisualContract | None = None
    """null: the checkpoint's own."""
    grading: RewardConfig = RewardConfig(open_answer="exact")
    """Of this, only how answers are read: open_answer, untagged_answer, judge."""
    limit: int = 0
    """Only the first so many items of each split; 0: all."""
    seed: int = 0
    decoders: int = 8
    gpu_gib: float = 80.0
    """What --dry-run plans for."""

    def __post_init__(self):
        if unknown := [name for name in self.splits if name not in SPLITS]:
            raise ValueError(f"splits = {unknown}: there is only {', '.join(SPLITS)}")
        if self.prompting.protocol != "agent" and self.arms != ("parallel",):
            raise ValueError(f"arms = {list(self.arms)}: only the protocol 'agent' has them")
        if not self.splits or not self.frames or not self.arms or min(self.frames) < 1:
            raise ValueError("splits, frames and arms must not be empty, and K not below 1")
        if self.rollout.dispatch != "parallel":
            raise ValueError(f"rollout.dispatch = {self.rollout.dispatch!r}: here, `arms` says how tools are called")
        if self.limit < 0:
            raise ValueError(f"limit = {self.limit}: must not be negative; 0 asks all items")


@dataclass(frozen=True)
class Cell:
    """One file of results: a split, asked in one way."""

    split: str
    k: int
    arm: str  # of the agent; of others, the protocol
    items: list[Item]
    total: int  # items of the whole split
    path: Path


def main(cfg: EvalConfig) -> None:
    from runtime.distributed import checkpoint_dir  # torch, which `table` does not need

    check_run(cfg)
    served = bool(cfg.rollout.gpus or cfg.rollout.urls)
    source = find_checkpoint(cfg.checkpoint, checkpoint_dir, served)
    contract = cfg.visual or VisualContract.load(source)
    contract.check(source)
    renderer = Renderer(load_tokenizer(source), contract)
    weights = weights_digest(source)
    todo = [(cell, unfinished(cell, settings(cfg, cell, contract, weights))) for cell in list(cells(cfg))]
    config.save_run(cfg, cfg.run)
    if any(items for _, items in todo):
        check_servers(cfg.rollout)
        where = {name: getattr(cfg.rollout, name) for name in ("gpus", "urls", "server_args", "max_batch_tokens")}
        engine = open_engine(source, renderer, **where)
        try:
            with Videos(cfg.decoders, quarantine=Path(cfg.run) / "bad_videos.jsonl") as videos:
                for cell, items in todo:
                    dispatch = cell.arm if agentic(cfg) else cfg.rollout.dispatch
                    stage = Stage(engine, renderer, videos, replace(cfg.rollout, dispatch=dispatch))
                    work(cell, items, stage, cfg)
        finally:
            engine.close()
    compare.report([cfg.run])


def cells(cfg: EvalConfig) -> Iterator[Cell]:
    arms = cfg.arms if agentic(cfg) else (cfg.prompting.protocol,)
    for split, root in cfg.splits.items():
        items = load_split(split, root)
        for k in cfg.frames:
            for arm in arms:
                yield Cell(split, k, arm, items[: cfg.limit or None], len(items), Path(cfg.run) / f"{split}-K{k}-{arm}.jsonl")  # fmt: skip


def agentic(cfg: EvalConfig) -> bool:
    """Asked as our own agent is: it has arms, and the format that the rewards speak of."""
    return cfg.prompting.protocol == "agent"


# ------------------------------------------------------------------------------------------------ one cell


def work(cell: Cell, items: list[Item], stage: Stage, cfg: EvalConfig) -> None:
    """Ask the items, many at a time; each leaves its line as it ends."""
    asked = {item.task.id for item in items}
    scores = [record["score"] for record in compare.read_results(cell.path).records if record["id"] not in asked]
    title = f"{cell.split} K={cell.k} {cell.arm}"
    stage = replace(stage, stopped=threading.Event())
    with (
        cell.path.open("a", encoding="utf-8") as file,
        tqdm(total=len(cell.items), initial=len(cell.items) - len(items), desc=title, unit="item") as bar,
    ):

        def done(_: int, record: dict) -> None:
            file.write(json.dumps(record) + "\n")  # ASCII: whatever a model says, a line stays one line
            file.flush()
            scores.append(record["score"])
            bar.set_postfix(score=f"{100 * sum(scores) / len(scores):.1f}", refresh=False)
            bar.update()

        try:
            jobs = [lambda item=item: ask(item, cell.k, stage, cfg) for item in items]
            run_all(stage.engine, jobs, cfg.rollout.concurrency, done)
        except BaseException:
            stage.stopped.set()  # nobody starts another turn
            raise


def ask(item: Item, k: int, stage: Stage, cfg: EvalConfig) -> dict[str, Any]:
    """One item -> its line."""
    task, episode, turns, answer, verdict = item.task, None, [], None, UNGRADED
    try:
        if item.subtitles:
            task = ask_with_subtitles(item, look_over(stage, task.videos[0], k, cfg.prompting.fps or 0.0).times)
        episode, answer = play(stage, task, k, derive(cfg.seed, task.id), cfg.prompting)
        turns = turn_texts(episode.main, stage.renderer)
        if not (error := episode.error):
            if answer is None and cfg.grading.untagged_answer:
                answer = final_answer(turns[-1:], untagged=True)
            verdict = grade(item, answer, cfg.grading)
    except (VideoError, JudgeError) as problem:
        error = f"{type(problem).__name__}: {problem}"
    form = score(episode, stage.renderer, RewardConfig(open_answer="exact")) if not error and agentic(cfg) else {}
    calls = episode.calls if episode else []
    agents = [agent for call in calls if (agent := call.agent)]
    return {
        "id": task.id,
        "videos": ["/".join(Path(path).parts[-2:]) for path in task.videos],  # MMVU numbers them anew in every folder
        "bytes": sizes(item),
        "kind": task.kind,
        "groups": item.groups,
        "gold": task.answer,
        "said": "".join(turns[-1:])[-2000:],  # the end of the last turn: why an answer could not be read
        "answer": answer,
        **verdict,
        **{name: form[name] for name in ("fmt", "strict") if name in form},
        "calls": [{"name": c.name, "window": c.window, "error": c.error, "seconds": c.seconds} for c in calls],
        "turns": len(turns),
        "tokens": sum(episode.main.mask) if episode else 0,
        "agent_tokens": sum(sum(agent.mask) for agent in agents),
        "truncated": bool(episode and episode.main.finish == "length"),
        "seconds": episode.seconds if episode else 0.0,
        "error": error,
    }


# ------------------------------------------------------------------------------------------------ settings


def settings(cfg: EvalConfig, cell: Cell, contract: VisualContract, weights: str) -> dict[str, Any]:
    """All that shapes a result; where and how fast it is computed does not."""
    rollout, grading = dataclasses.asdict(cfg.rollout), dataclasses.asdict(cfg.grading)
    elsewhere = ("gpus", "urls", "server_args", "max_batch_tokens", "concurrency", "call_timeout", "dispatch")
    asked = [(i.task.id, i.task.question, i.task.answer, repr(i.subtitles)) for i in cell.items]
    prompts = [data.SYSTEM, data.SYSTEM_WITH_TOOLS, data.SUBAGENT_SYSTEM, data.SUBAGENT_REQUEST, cfg.rollout.schemas]
    return {
        "name": cfg.name,
        "split": cell.split,
        "k": cell.k,
        "arm": cell.arm,
        "items": len(cell.items),
        "total": cell.total,
        "weights": weights,
        "data": _digest(asked),
        "prompts": _digest([*prompts, cfg.prompting.texts]),
        "prompting": dataclasses.asdict(cfg.prompting),
        "rollout": {name: value for name, value in rollout.items() if name not in elsewhere},
        "visual": dataclasses.asdict(contract),
        "grading": {"open_answer": grading["open_answer"], "untagged_answer": grading["untagged_answer"]},
        "judge": grading["judge"]["model"],
        "seed": cfg.seed,
    }


def unfinished(cell: Cell, wanted: dict[str, Any]) -> list[Item]:
    """The items without a result, after a file of these settings was opened or begun."""
    wanted = json.loads(json.dumps(wanted))
    if not cell.path.exists():
        cell.path.parent.mkdir(parents=True, exist_ok=True)
        config.write_whole(cell.path, json.dumps(wanted) + "\n")
        return cell.items
    results = compare.read_results(cell.path, repair=True)
    if wrong := differences(results.settings, wanted):
        raise config.ConfigError(
            f"{cell.path} was made under other settings ({'; '.join(wrong.values())}): choose another `run`, or delete the "
            "file"
        )
    answered = {record["id"]: record["bytes"] for record in results.records if not record["error"]}
    return [item for item in cell.items if answered.get(item.task.id) != sizes(item)]


def weights_digest(folder: Path) -> str:
    """Of a checkpoint: names and sizes of its files, and 1 MiB from each end of them (training changes every weight)."""
    whole = hashlib.sha256()
    for path in sorted(p for p in folder.iterdir() if p.is_file()):
        size = path.stat().st_size
        whole.update(f"{path.name}/{size}/".encode())
        with path.open("rb") as file:
            whole.update(file.read(1 << 20))
            file.seek(max(0, size - (1 << 20)))
            whole.update(file.read())
    return whole.hexdigest()[:16]


def sizes(item: Item) -> list[int]:
    """Bytes of its videos, which tell that a file was replaced."""
    return [Path(path).stat().st_size for path in item.task.videos]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


# ------------------------------------------------------------------------------------------------ before it runs


def dry_run(cfg: EvalConfig) -> int:
    """What is there and what is missing, all of it at once; exit status 1 if the run could not start. That a name on the
    hub exists is believed."""
    missing = 0

    def on_the_hub(name: str | Path) -> Path:
        raise FileNotFoundError(f"{name} is not here; the run would fetch it from the hub")

    def check(what: str, found: str, good: bool) -> None:
        nonlocal missing
        missing += not good
        print(f"  {'ok     ' if good else 'MISSING'} {what}: {found}")

    print(f"{cfg.name} -> {cfg.run}, protocol {cfg.prompting.protocol}")
    try:
        source = find_checkpoint(cfg.checkpoint, on_the_hub, served=bool(cfg.rollout.gpus or cfg.rollout.urls))
        check("checkpoint", str(source), True)
        (cfg.visual or VisualContract.load(source)).check(source)
    except FileNotFoundError as error:
        print(f"  note    checkpoint: {error}")
    except config.ConfigError as error:
        check("checkpoint", str(error), False)
    except ContractError as error:
        check("visual", str(error), False)
    if cfg.prompting.protocol != "agent" and not cfg.prompting.prompt_file:
        print("  note    prompting.prompt_file is empty: our own words, so scores differ from the authors'")
    for split, root in cfg.splits.items():
        try:
            items = load_split(split, root)
        except DataError as error:
            check(split, str(error), False)
        else:
            asked = len(items[: cfg.limit or None]) * len(cfg.frames) * len(cfg.arms)
            check(split, f"{len(items)} items, {asked} episodes", True)
    if cfg.rollout.gpus:
        missing += not servers_fit(cfg)
    for url in cfg.rollout.urls:
        print(f"  note    {url} must serve {cfg.checkpoint}")
    return int(missing > 0)


def servers_fit(cfg: EvalConfig) -> bool:
    """Whether the servers fit into their GPUs; of a model whose shapes are unknown, that is believed."""
    from runtime.plan import PlanError, plan_engine
    from runtime.settings import PolicyConfig

    rows, visual = cfg.rollout.concurrency, cfg.visual or VisualContract()
    frame = visual.frame_pixels // visual.cell**2 + 16  # its tokens, and its stamp's
    context = max(cfg.frames) * frame + (cfg.rollout.max_turns + 1) * cfg.rollout.max_new_tokens // 2
    try:
        found = plan_engine(PolicyConfig(cfg.checkpoint, family=cfg.family), len(cfg.rollout.gpus), rows, context)
    except ValueError as error:  # no config.json yet, or not a Qwen3-VL
        print(f"  note    memory is not planned: {error}")
        return True
    print(found.table(cfg.gpu_gib))
    try:
        found.check(cfg.gpu_gib)
    except PlanError as error:
        print(f"  MISSING memory: {error}")
        return False
    return True


if __name__ == "__main__":
    if sys.argv[1:2] == ["table"]:
        sys.exit(compare.main(sys.argv[2:]))
    cfg, args = config.command_line(EvalConfig, __doc__)
    try:
        sys.exit(dry_run(cfg) if args.dry_run else main(cfg))
    except (config.ConfigError, compare.TableError, ContractError, EngineError, FileNotFoundError, DataError) as error:
        sys.exit(f"error: {error}")
