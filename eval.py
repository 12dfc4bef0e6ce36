"""eval.py: evaluate one model, under one protocol, on the splits of evals/benchmarks.py.

    python eval.py configs/eval/toy.yaml                            # the toy, with tools and without, at every K
    python eval.py configs/eval/rows.yaml row=paravt_8b             # a row of the paper; called again, it resumes
    python eval.py configs/eval/rows.yaml row=paravt_8b --dry-run   # lists what is missing, and what the paper did otherwise
    python eval.py table runs/eval/* --baseline NAME        # evals/tables.py: our numbers beside the published ones
    python eval.py ablation runs/NAME_8b runs/eval/own/NAME_8b    # the paper's ablation tables

RUN/SPLIT-K64-parallel.jsonl gets one line per item as soon as the item ends: the end of the last turn, the answer, its
score, whether it stood in the protocol's own form (`tagged`), calls, costs, and the error if there was one.
More splits, K and arms may be added to a run, but no answers under other settings or of other weights.

An item is asked again if it ended in an error or an API's refusal (which count as wrong until then). `limit=2` asks two
items of each split and needs only their videos. A later run with a larger limit asks the others.

Deliberately missing: several checkpoints per run, several machines per run, ensembles, majority votes.
"""

import contextlib
import os
import signal
import sys
import threading
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from episode import Episode, episode_record
from evals import rows, tables
from evals.benchmarks import SPLITS, UNGRADED, Item, count_items, grade, load_split
from evals.protocols import Prompting, run_protocol
from evals.results import items_to_ask, read_records, records_to_keep
from rewards import RewardConfig, score, turn_texts
from rollout import AgentContext, Dispatch, RolloutConfig, derive_seed
from runtime.answers import Judge, JudgeError, final_answer
from runtime.api import ApiJudge, require_api
from runtime.checkpoints import on_the_hub, weights_digest
from runtime.config import ConfigError
from runtime.dataset import DataError
from runtime.engine import Api, run_all
from runtime.folder import ScriptConfig, hold_folder, refuse_other_weights, require_folder, save_run
from runtime.lines import append_line, write_lines
from runtime.open_engine import for_this_machine, open_engine, require_servers
from runtime.policy import MODELS
from runtime.prompts import Prompts
from runtime.render import Renderer, refuse_template
from runtime.script import command_line, note_not_looked_up, open_checkpoint, progress_bar, run_script
from runtime.video import Videos
from runtime.visual import VisualContract, read_json
from tools import schemas_of


@dataclass(frozen=True, kw_only=True)
class EvalConfig(ScriptConfig):
    """One evaluation: one model on some splits."""

    run: str = ""
    """Folder of the results. Empty: runs/eval/own/X, where X is the training that wrote the checkpoint (`with_names`)."""
    name: str = ""
    """The model's row in the table. A name that begins with one of published.yaml, such as "ParaVT-8B (mine)", adds the
    published numbers. Empty: X."""
    checkpoint: str
    """A Hugging Face folder, or its name on the hub."""
    splits: dict[Literal[*SPLITS], str]  # type: ignore[valid-type]  # mypy wants the words written out
    """Split -> folder of its dataset."""
    frames: tuple[int, ...] = (64,)
    """Values of K, the number of overview frames. Every split is asked once per K."""
    arms: tuple[Dispatch, ...] = ("parallel",)
    """How the protocol `agent` calls tools (`rollout.dispatch`). Every split is asked once per arm."""
    prompting: Prompting = Prompting()
    rollout: RolloutConfig = RolloutConfig(temperature=0.0, think_prefix=None, server_gpus=None, concurrency=None)
    """`think_prefix: null` means as in the checkpoint's training. A checkpoint of other authors has none."""
    api: Api = Api()
    """A model behind an API, to ask instead of the checkpoint. Prompts still use the checkpoint's tokenizer and chat
    template. `rollout.concurrency` limits the concurrent requests."""
    visual: VisualContract | None = None
    """How frames are sampled and sized. null: the checkpoint's own contract."""
    prompts: Prompts | None = None
    """A YAML file with texts in place of our agent's prompts. null: those that the checkpoint was trained with."""
    grading: RewardConfig = RewardConfig(open_answer="exact", untagged_answer="prose")
    """Only the fields for reading answers are used: open_answer, untagged_answer, judge."""
    limit: int = 0
    """Ask only the first `limit` items of each split. 0: all."""
    save_episodes: bool = False
    """Write each episode to RUN/episodes/, for study.report."""
    seed: int = 0
    """Seed of the answers that the in-process engine samples."""
    decoders: int = min(64, os.cpu_count() or 1)
    """Video decoder processes."""

    def __post_init__(self):
        if not self.agentic and self.arms != ("parallel",):
            raise ValueError(f"arms = {list(self.arms)}: only the protocol 'agent' has arms; leave the default")
        if not self.frames or not self.arms or 0 in self.frames:
            raise ValueError("frames and arms: each needs at least one value, and an overview has at least 1 frame")
        if self.rollout.dispatch != "parallel":
            raise ValueError(f"rollout.dispatch = {self.rollout.dispatch!r}: set `arms` instead")
        if self.api.url and self.agentic and (self.rollout.think_prefix is not False or "sequential" in self.arms):
            rule = "set rollout.think_prefix: false, and drop the arm sequential"
            raise ValueError(f"api.url: an API cannot open a turn or stop at a tag; {rule}")

    @property
    def agentic(self) -> bool:
        """Return whether the model is our own agent. Only the agent has arms and a rewarded format."""
        return self.prompting.protocol == "agent"


# ------------------------------------------------------------------------------------------------ one item


def ask_item(
    item: Item, k: int, context: AgentContext, cfg: EvalConfig, judge: Judge
) -> tuple[dict[str, Any], Episode]:
    """Ask one item. Return its record and its episode."""
    episode, answer = run_protocol(context, item, k, derive_seed(cfg.seed, item.task.id), cfg.prompting)
    turns = turn_texts(episode.main, context.renderer)

    # The answer: if it is not in the protocol's own form, read what the run accepts. Then grade it.
    tagged = answer is not None
    verdict = UNGRADED
    if not episode.error_kind:
        if not tagged:
            answer = final_answer(turns, cfg.grading.untagged_answer)
        try:
            verdict = grade(item, answer, cfg.grading.open_answer, judge)
        except JudgeError as error:
            episode.fail(error)

    # The format, of our own agent only: with the default weights, whatever it was trained with, so that f compares.
    format_rewards: dict[str, float] = {}
    if cfg.agentic and not episode.error_kind:
        parts = score(episode, context.renderer, RewardConfig())
        format_rewards = {"f": parts["f"], "well_formed": parts["well_formed"]}

    # The record. The episode keeps its rewards for study.report.
    episode.rewards = {"R": verdict["score"], "R_acc": verdict["score"], **format_rewards}
    return make_record(item, episode, turns, answer, tagged, verdict | format_rewards), episode


def make_record(
    item: Item, episode: Episode, turns: list[str], answer: str | None, tagged: bool, grades: dict[str, Any]
) -> dict[str, Any]:
    """Describe the item, its answer and its costs."""
    calls = []
    for call in episode.calls:
        calls.append({"window": call.window, "error": call.error, "text": call.text})
    return {
        "id": item.task.id,
        "videos": ["/".join(Path(path).parts[-2:]) for path in item.task.videos],  # MMVU numbers its videos per folder
        "kind": item.task.kind,
        "gold": item.task.answer,
        "duration": item.duration,
        "said": "".join(turns[-1:])[-2000:],  # the end of the last turn: shows why an answer could not be read
        "answer": answer,
        "tagged": tagged,
        **grades,
        "calls": calls,
        "turns": len(turns),
        "tokens": episode.main.n_sampled,
        "subagent_tokens": sum(subagent.n_sampled for subagent in episode.subagents),
        "critical_tokens": episode.critical_tokens,
        "truncated": episode.main.finish == "length",
        "seconds": episode.seconds,
        "error": episode.error,
    }


# ------------------------------------------------------------------------------------------------ one run


def main(cfg: EvalConfig, dry: bool = False) -> int:
    """Ask the items that have no answer yet, and print the table. Return 1 if all items of a file failed. A dry run ends before
    the model is loaded."""
    cfg = with_names(cfg)
    if dry:
        print(f"{cfg.name} -> {cfg.run}, protocol {cfg.prompting.protocol}")
        for text in rows.list_differences(cfg.name):
            print(f"  note    the published run: {text}")

    # Refuse what cannot work, in the order of cost.
    jobs = list_jobs(cfg)
    require_folder(cfg)
    folder: Path | None = None
    if dry and on_the_hub(cfg.checkpoint):
        note_not_looked_up(cfg.checkpoint)
    else:
        folder, renderer = open_model(cfg)
        refuse_other_weights(Path(cfg.run), folder, f"checkpoint = {cfg.checkpoint!r}")
    left = work_is_left(jobs)
    if left:
        require_engine(cfg, folder)
    if dry:
        print(f"ready: {cfg.run}")
        return 0

    # Ask the remaining items. No config and no result is written before the engine is up.
    if left:
        assert folder is not None  # only a dry run may have none
        # config.yaml keeps each null, so that the same command resumes. Only the engine and the agents get the values.
        rollout = for_this_machine(as_trained(cfg.rollout, folder))
        logs = Path(cfg.run) / "logs"
        with (
            hold_folder(cfg, folder),
            contextlib.closing(open_engine(folder, renderer, rollout, logs, api=cfg.api)) as engine,
            Videos(max(1, cfg.decoders)) as videos,
        ):
            save_with_sizes(cfg, folder)
            for job in jobs:
                run_job(job, AgentContext(engine, renderer, videos, replace(rollout, dispatch=job.dispatch)), cfg)

    # Print all results of the run.
    print(tables.all_tables([cfg.run]))
    status = 0
    for job in jobs:
        errors = [record["error"] for record in read_records(job.path)]
        if errors and all(errors):
            status = 1
            print(f"error: all {len(errors)} items of {job.path} failed; the last error: {errors[-1]}", file=sys.stderr)
    return status


@dataclass(frozen=True)
class Job:
    """One file of results: a split at one K under one arm."""

    split: str
    k: int
    arm: str  # of our agent, its dispatch; of other models, the protocol
    dispatch: Dispatch
    items: list[Item]  # the first `limit` of the split, or all
    whole: bool  # these are all items of the split
    path: Path


def list_jobs(cfg: EvalConfig) -> list[Job]:
    """List the result files of the run with their items. Name all datasets that are missing at once."""
    jobs = []
    missing = []
    for split, root in cfg.splits.items():
        try:
            items = load_split(split, root, cfg.limit)
        except (DataError, FileNotFoundError) as error:
            missing.append(f"{split}: {error}")
            continue
        for k in cfg.frames:
            for dispatch in cfg.arms:
                arm = dispatch if cfg.agentic else cfg.prompting.protocol
                path = Path(cfg.run) / f"{split}-K{k}-{arm}.jsonl"
                jobs.append(Job(split, k, arm, dispatch, items, not cfg.limit, path))
        print(f"{split}: {len(items)} items, {len(items) * len(cfg.frames) * len(cfg.arms)} episodes")
    if missing:
        raise DataError("\n".join(missing))
    return jobs


def work_is_left(jobs: list[Job]) -> bool:
    """Return whether a job has an item to ask, or a record to drop."""
    for job in jobs:
        records = read_records(job.path)
        kept = records_to_keep(records, job.items, job.whole)
        if len(kept) < len(records) or items_to_ask(job.items, kept):
            return True
    return False


def run_job(job: Job, context: AgentContext, cfg: EvalConfig) -> None:
    """Write the records to keep, then ask the other items concurrently. Each item appends its record when it ends."""
    # Read the file again, now under the run's lock: until then, another process may have answered items.
    kept = records_to_keep(read_records(job.path), job.items, job.whole)
    write_lines(job.path, kept)
    items = items_to_ask(job.items, kept)
    if not items:
        return
    judge = ApiJudge(cfg.grading.judge)
    episodes = Path(cfg.run) / "episodes" / job.path.name
    writing = threading.Lock()
    bar = progress_bar(total=len(items), desc=f"{job.split} K={job.k} {job.arm}", unit="item")

    def ask(item: Item) -> None:
        """Ask an item in its thread, and write its record. Its episode is dropped, because the frames of all episodes would
        fill the memory."""
        record, episode = ask_item(item, job.k, context, cfg, judge)
        with writing:
            if cfg.save_episodes:
                episodes.parent.mkdir(exist_ok=True)
                append_line(episodes, episode_record(episode, context.renderer.readable))
            append_line(job.path, record)
            bar.update()

    with bar:
        try:
            pending = {i: partial(ask, item) for i, item in enumerate(items)}
            run_all(context.engine, pending, context.cfg.at_once)
        finally:
            context.stopped.set()  # after an error, no episode starts another turn


def save_with_sizes(cfg: EvalConfig, folder: Path) -> None:
    """Save the config, the digest of the weights, and the sizes of all splits that this and earlier calls asked."""
    sizes = (read_json(Path(cfg.run) / "run.json") or {}).get("items", {})
    sizes |= {split: count_items(split, root) for split, root in cfg.splits.items()}
    digest = "" if cfg.api.url else weights_digest(folder)  # an API's model has no files here
    save_run(cfg, cfg.run, checkpoint=digest, items=sizes)


def as_trained(rollout: RolloutConfig, folder: Path) -> RolloutConfig:
    """Let the checkpoint say whether its turns open with `<think>`, unless the config does."""
    if rollout.think_prefix is not None:
        return rollout
    trained = read_json(folder / "rollout.json") or {}
    return replace(rollout, think_prefix=trained.get("think_prefix", False))


def with_names(cfg: EvalConfig) -> EvalConfig:
    """Derive the run and the name, unless they are given, from the label X in the checkpoint's path: runs/X/model -> X,
    runs/X/models/step-N -> X-step-N, owner/model -> model."""
    *above, label = Path(cfg.checkpoint).parts
    if label == "model" and above:
        label = above[-1]
    elif len(above) > 1 and above[-1] == "models":
        label = f"{above[-2]}-{label}"
    return replace(cfg, run=cfg.run or f"runs/eval/own/{label}", name=cfg.name or label)


# ------------------------------------------------------------------------------------------------ checks


def open_model(cfg: EvalConfig) -> tuple[Path, Renderer]:
    """Return the checkpoint's folder and its renderer. A chat template on which our agent cannot rely is refused; with the
    protocols of other models, it is a note."""
    # An API needs only the tokenizer.
    folder, renderer = open_checkpoint(cfg.checkpoint, cfg.visual, cfg.prompts, weights=not cfg.api.url)
    try:
        refuse_template(folder, renderer, schemas_of(cfg.rollout.tools))
    except ConfigError as error:
        if cfg.agentic:
            raise
        print(f"  note    {error}")
    return folder, renderer


def require_engine(cfg: EvalConfig, folder: Path | None) -> None:
    """Refuse a model or a judge that does not answer, and a model that this process cannot run."""
    if cfg.grading.open_answer == "judge":
        require_api(cfg.grading.judge)
    if cfg.api.url:
        require_api(cfg.api)
        return
    rollout = for_this_machine(cfg.rollout)
    require_servers(rollout)
    if rollout.uses_servers or not folder:  # servers support more models; without a folder the model is unknown
        return
    family = (read_json(folder / "config.json") or {}).get("model_type")
    if family not in MODELS:
        raise ConfigError(
            f"checkpoint = {cfg.checkpoint!r}: this process runs {' and '.join(MODELS)}, not {family!r}; "
            "install SGLang, or set rollout.urls"
        )


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] in tables.COMMANDS:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends this process quietly
        tables.main(sys.argv[1:])
        sys.exit()
    cfg, args = command_line(EvalConfig, __doc__, rows.load)
    run_script(partial(main, dry=args.dry_run), cfg)
