"""eval.py: evaluate one model, under one protocol, on the splits of evals/benchmarks.py.

    python eval.py configs/eval/toy.yaml                    # the toy, with tools and without, at every K
    python eval.py configs/eval/paravt_8b.yaml              # called again, it resumes where it stopped
    python eval.py configs/eval/paravt_8b.yaml --dry-run    # lists what is missing and what differs from the paper
    python eval.py table runs/eval/* --baseline NAME        # evals/tables.py: our numbers beside the published ones

RUN/SPLIT-K64-parallel.jsonl gets one line per item as soon as the item ends: the end of the last turn, the answer, its
score (under `lenient`, answer and score of a reader that accepts prose), calls, costs, and the error if there was one.
Its first line holds the settings that shape a result. A file with answers under other settings is refused.

An item is asked again if it ended in an error or an API's refusal (which count as wrong until then), or if its
question, options, answer or subtitles have changed. `limit=2` asks two items of each split and needs only their videos.
A later run with a larger limit asks the others.

Deliberately missing: several checkpoints per run, several machines per run, ensembles, majority votes.
"""

import contextlib
import difflib
import functools
import importlib.util
import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import snapshot_download
from tqdm import tqdm
from transformers import AutoConfig, Qwen3VLConfig

from evals import results, tables
from evals.benchmarks import SPLITS, UNGRADED, Item, count_items, grade, grade_leniently, load_split
from evals.protocols import Prompting, run_protocol
from evals.results import EvalJob, Results, contract_of, read_results
from rewards import RewardConfig, final_answer, score, turn_texts
from rollout import AgentContext, RolloutConfig, derive_seed, open_engine
from runtime import checks, config
from runtime.api import Api, OpenAI, check_api
from runtime.checks import check_run, check_servers, find_checkpoint, on_the_hub, weights_digest
from runtime.dataset import DataError
from runtime.engine import Engine, run_all
from runtime.judge import Judge, JudgeError
from runtime.plan import PUBLISHED, count, meta_policy, plan_engine
from runtime.policy import PolicyConfig
from runtime.render import Renderer, load_tokenizer
from runtime.run import USER_ERRORS
from runtime.video import Videos
from runtime.visual import VisualContract

# By default, one SGLang server per GPU of this machine. Without SGLang, the model runs in this process.
GPUS = tuple(range(torch.cuda.device_count())) if importlib.util.find_spec("sglang") else ()
# Host memory in bytes for the frames of one GPU's requests: 8 of the published size, which fill a server's KV cache.
FRAME_BYTES = 8e9
BYTES_PER_PIXEL = 24 + 3  # in SGLang, and in the file that we write for it


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """One evaluation: one model on some splits."""

    run: str
    """Folder of the results."""
    name: str
    """The model's row in the table. A name of published.yaml, such as "ParaVT-8B (own)", adds its published numbers."""
    checkpoint: str
    """A Hugging Face folder, a model on the hub that a file in configs/ names, or hub:OWNER/MODEL."""
    splits: dict[str, str]
    """Split -> folder of its dataset."""
    frames: tuple[int, ...] = (64,)
    """Values of K, the number of overview frames. Every split is asked once per K."""
    arms: tuple[Literal["parallel", "sequential", "none"], ...] = ("parallel",)
    """How the protocol `agent` calls tools (`rollout.dispatch`). Every split is asked once per arm."""
    prompting: Prompting = Prompting()
    rollout: RolloutConfig = RolloutConfig(temperature=0.0, server_gpus=GPUS, concurrency=32 * max(1, len(GPUS)))
    api: Api = Api()
    """A model behind an API, to ask instead of the checkpoint. Prompts still use the checkpoint's tokenizer and chat
    template. `rollout.concurrency` limits the concurrent requests."""
    visual: VisualContract | None = None
    """How frames are sampled and sized. null: the checkpoint's own contract."""
    grading: RewardConfig = RewardConfig(open_answer="exact")
    """Only the fields for reading answers are used: open_answer, untagged_answer, judge."""
    limit: int = 0
    """Ask only the first `limit` items of each split. 0: all."""
    seed: int = 0
    decoders: int = min(64, os.cpu_count() or 1)

    def __post_init__(self):
        config.refuse_below_1(self, "decoders")
        unknown = [name for name in self.splits if name not in SPLITS]
        if unknown:
            raise ValueError(f"splits = {unknown}: unknown; {config.choose(unknown[0], SPLITS)}")
        if not self.agentic and self.arms != ("parallel",):
            raise ValueError(f"arms = {list(self.arms)}: only the protocol 'agent' has arms; leave the default")
        if not self.frames or not self.arms or min(self.frames) < 1:
            raise ValueError("frames and arms: each needs at least one value, and each K in frames must be 1 or more")
        if self.rollout.dispatch != "parallel":
            raise ValueError(f"rollout.dispatch = {self.rollout.dispatch!r}: set `arms` instead")
        if self.api.url and self.agentic and (self.rollout.think_prefix or "sequential" in self.arms):
            rule = "set rollout.think_prefix: false, and drop the arm sequential"
            raise ValueError(f"api.url: an API cannot open a turn or stop at a tag; {rule}")

    @property
    def agentic(self) -> bool:
        """Return whether the model is our own agent. Only the agent has arms and a rewarded format."""
        return self.prompting.protocol == "agent"


# ------------------------------------------------------------------------------------------------ the run


def main(cfg: EvalConfig) -> int:
    """Ask the items that have no answer yet, and print the table. Return 1 if all items of a file failed."""
    # Refuse what cannot run before anything is written or loaded.
    jobs = list_jobs(cfg)
    folder = find_model(cfg)
    renderer = load_renderer(cfg, folder)
    jobs = with_headers(cfg, jobs, folder)
    any_left = check_jobs(cfg, jobs, folder)

    # Ask the remaining items. Nothing is written before the engine is up.
    if any_left:
        with (
            checks.only_run_in(Path(cfg.run)),
            contextlib.closing(open_model(cfg, folder, renderer)) as engine,
            Videos(cfg.decoders) as videos,
        ):
            config.save_run(cfg, cfg.run)
            for job in jobs:
                # Read the file only now. Before this process held the lock, another one may have answered items.
                kept_lines, items = results.resume(job)
                if items:
                    run_job(job, kept_lines, items, AgentContext(engine, renderer, videos, job.rollout), cfg)

    # Print all results of the run.
    tables.report([cfg.run])
    status = 0
    for job in jobs:
        errors = [record["error"] for record in read_results(job.path).records]
        if errors and all(errors):
            status = 1
            print(f"error: all {len(errors)} items of {job.path} failed; the last error: {errors[-1]}", file=sys.stderr)
    return status


def dry_run(cfg: EvalConfig) -> int:
    """Print what is there, what is missing, and what differs from the published run. Return 1 if something is missing.
    Any other fault that the run would refuse ends the dry run with the same error."""
    print(f"{cfg.name} -> {cfg.run}, protocol {cfg.prompting.protocol}")
    status = 0

    # The datasets.
    jobs = []
    for split, root in cfg.splits.items():
        try:
            jobs_of_split = list_jobs(replace(cfg, splits={split: root}))
        except DataError as error:
            status = 1
            print(f"  MISSING {split}: {error}")
            continue
        items = len(jobs_of_split[0].items)
        print(f"  ok      {split}: {items} items, {len(jobs_of_split) * items} episodes")
        jobs += jobs_of_split

    # The model.
    folder = None
    try:
        folder = find_model(cfg, fetch=False)
        if not folder:
            print(f"  note    {cfg.checkpoint} is not on this machine; the run would fetch it from the hub")
    except config.ConfigError as error:
        status = 1
        print(f"  MISSING {error}")

    # Settings that differ from the training or from the published run.
    notes = []
    jobs = with_headers(cfg, jobs, folder)
    for job in jobs:
        notes += job.header["unlike_training"]
    notes += results.unlike_published(cfg, folder)
    for note in dict.fromkeys(notes):
        print(f"  note    {note}")

    if folder:
        load_renderer(cfg, folder)
    check_jobs(cfg, jobs, folder)
    return status


def find_model(cfg: EvalConfig, fetch: bool = True) -> Path | None:
    """Return the checkpoint's folder, downloaded if needed (None without `fetch`). An API needs only the tokenizer."""
    name = cfg.checkpoint.removeprefix("hub:")
    if not Path(name).is_dir():
        # Without the prefix hub:, a name that no config has is taken for a path.
        configs = [path.read_text("utf-8") for path in (Path(__file__).parent / "configs").rglob("*.yaml")]
        known = re.search(rf"(^checkpoint|family): {re.escape(name)}[\s,}}]", "\n".join(configs), re.M)
        asked_for_hub = cfg.checkpoint.startswith("hub:")
        if not on_the_hub(name) or not (known or asked_for_hub):
            rule = "no such folder, and no file of configs/ names it; give a folder like RUN/model, or hub:OWNER/MODEL"
            raise config.ConfigError(f"checkpoint = {cfg.checkpoint!r}: {rule}")
        if not fetch:
            try:
                cached = Path(snapshot_download(name, local_files_only=True))
            except OSError:
                return None
            return cached if cfg.api.url or any(cached.glob("*.safetensors")) else None
    return find_checkpoint(name, weights=not cfg.api.url)


def load_renderer(cfg: EvalConfig, folder: Path) -> Renderer:
    contract = contract_of(cfg, folder)
    contract.check(folder)
    return Renderer(load_tokenizer(folder), contract)


def check_jobs(cfg: EvalConfig, jobs: Sequence[EvalJob], folder: Path | None) -> bool:
    """Return whether items are left to ask, after refusing a run that cannot work or would mix its results with others. The run
    and its dry run both call this. A dry run may lack jobs or the checkpoint."""
    check_run(cfg)

    # Look for items that have no answer yet. A file of answers under other settings is refused.
    any_left = False
    for job in jobs:
        _, items = results.resume(job)
        any_left |= bool(items)

    # Other files in this folder may come from another model.
    mine = {job.path for job in jobs}
    others = [other for path, other in results.read_run(cfg.run).items() if path not in mine]
    results.refuse_mixtures([*others, *(Results(job.header, []) for job in jobs)])

    if any_left or not jobs:
        check_engine(cfg, folder)
    return any_left


def check_engine(cfg: EvalConfig, folder: Path | None) -> None:
    """Refuse a model or a judge that does not answer, and a model that this process or its GPUs cannot run."""
    if cfg.grading.open_answer == "judge":
        check_api(cfg.grading.judge)
    if cfg.api.url:
        check_api(cfg.api)
        return
    check_servers(cfg.rollout)
    if cfg.rollout.urls:
        return
    if cfg.rollout.server_gpus:
        checks.check_host_memory(*requests_at_once(cfg, contract_of(cfg, folder) or VisualContract()))

    # Get the model's sizes from its config.json. Those of the published models are known without it.
    name = cfg.checkpoint.removeprefix("hub:")
    if folder:
        model = AutoConfig.from_pretrained(folder)
        stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        weights = stored * 2 / (model.dtype or torch.bfloat16).itemsize  # it runs in bf16
    elif name in PUBLISHED:
        model = Qwen3VLConfig(**PUBLISHED[name])
        weights = 2 * count(meta_policy(PolicyConfig(name)))
    else:
        return
    if not cfg.rollout.server_gpus and model.model_type != "qwen3_vl":
        told = f"checkpoint = {cfg.checkpoint!r}: this process only runs Qwen3-VL, not {model.model_type!r}"
        raise config.ConfigError(f"{told}; install SGLang, or set rollout.urls")
    if torch.cuda.is_available():
        longest = cfg.rollout.max_context  # the cache holds at least one trajectory
        plan_engine(cfg.rollout, model.get_text_config(), weights, 1, longest).check(gpu_gib=80)


def requests_at_once(cfg: EvalConfig, contract: VisualContract) -> tuple[int, int]:
    """Return how many items to ask at the same time, and the host memory of one item's overview in bytes. Servers that we start
    get at most FRAME_BYTES per GPU."""
    width, height = contract.frame_size(1280, 720)  # as if every video were 720p
    item_bytes = BYTES_PER_PIXEL * max(cfg.frames) * width * height
    at_once = cfg.rollout.concurrency
    if cfg.rollout.server_gpus and not (cfg.api.url or cfg.rollout.urls):
        per_gpu = max(1, round(FRAME_BYTES / item_bytes))
        at_once = min(at_once, per_gpu * len(cfg.rollout.server_gpus))
    return at_once, item_bytes


def open_model(cfg: EvalConfig, folder: Path, renderer: Renderer) -> Engine:
    if cfg.api.url:
        return OpenAI(cfg.api, renderer)
    gpus = () if cfg.rollout.urls else cfg.rollout.server_gpus  # the default is all GPUs, so `urls` must override it
    return open_engine(folder, renderer, replace(cfg.rollout, server_gpus=gpus), logs=Path(cfg.run) / "logs")


# ------------------------------------------------------------------------------------------------ one file of results, one item


def list_jobs(cfg: EvalConfig) -> list[EvalJob]:
    """List the result files of a run with their items, still without headers, which need the model."""
    jobs = []
    for split, root in cfg.splits.items():
        items = load_split(split, root, cfg.limit)
        total = count_items(split, root)
        for k in cfg.frames:
            for dispatch in cfg.arms:
                arm = dispatch if cfg.agentic else cfg.prompting.protocol
                path = Path(cfg.run) / f"{split}-K{k}-{arm}.jsonl"
                jobs.append(EvalJob(split, k, arm, replace(cfg.rollout, dispatch=dispatch), items, total, path))
    return jobs


def with_headers(cfg: EvalConfig, jobs: Sequence[EvalJob], folder: Path | None) -> list[EvalJob]:
    weights = cfg.api.model if cfg.api.url else folder and weights_digest(folder)
    return [replace(job, header=results.make_header(cfg, job, folder, weights)) for job in jobs]


def run_job(job: EvalJob, lines: list[dict], items: list[Item], context: AgentContext, cfg: EvalConfig) -> None:
    """Write the lines to keep, then ask the items concurrently. Each item appends its line when it ends."""
    config.write_whole(job.path, "".join(json.dumps(line) + "\n" for line in lines))
    judge = Judge(cfg.grading.judge)
    bar = tqdm(total=len(items), desc=f"{job.split} K={job.k} {job.arm}", unit="item")
    with job.path.open("a", encoding="utf-8") as file, bar:

        def done(_: int, record: dict) -> None:
            file.write(json.dumps(record) + "\n")  # as ASCII, so that no separator of Unicode breaks the line
            file.flush()
            bar.update()

        try:
            asked = [functools.partial(ask_item, item, job.k, context, cfg, judge) for item in items]
            at_once, _ = requests_at_once(cfg, context.renderer.contract)
            run_all(context.engine, asked, at_once, done)
        finally:
            context.stopped.set()  # after an error, no episode starts another turn


def ask_item(item: Item, k: int, context: AgentContext, cfg: EvalConfig, judge: Judge) -> dict[str, Any]:
    """Ask one item and return its line of the results. The episode is dropped: its frames would fill the memory."""
    episode, answer = run_protocol(context, item, k, derive_seed(cfg.seed, item.task.id), cfg.prompting)
    turns = turn_texts(episode.main, context.renderer)
    error = episode.error

    # Grade the answer, strictly and leniently.
    strict = UNGRADED
    lenient = UNGRADED
    if not error:
        if answer is None and cfg.grading.untagged_answer != "off":
            answer = final_answer(turns[-1:], cfg.grading.untagged_answer)
        try:
            strict = grade(item, answer, cfg.grading, judge)
            lenient = grade_leniently(item, strict, turns[-1], cfg.grading, judge)
        except JudgeError as problem:
            error = f"JudgeError: {problem}"

    # Our own agent also gets its format rewards.
    format_rewards = {}
    if cfg.agentic and not error:
        parts = score(episode, context.renderer, RewardConfig(open_answer="exact"))
        format_rewards = {"f": parts["f"], "well_formed": parts["well_formed"]}

    calls = []
    for call in episode.calls:
        names = ("name", "window", "error", "text", "seconds")
        calls.append({name: getattr(call, name) for name in names})
    return {
        "id": item.task.id,
        "item": results.item_digest(item),
        "videos": ["/".join(Path(path).parts[-2:]) for path in item.task.videos],  # MMVU numbers its videos per folder
        "kind": item.task.kind,
        "gold": item.task.answer,
        "said": "".join(turns[-1:])[-2000:],  # the end of the last turn: shows why an answer could not be read
        "answer": answer,
        **strict,
        "lenient": lenient,
        **format_rewards,
        "calls": calls,
        "turns": len(turns),
        "tokens": episode.main.n_sampled,
        "agent_tokens": sum(subagent.n_sampled for subagent in episode.subagents),
        "truncated": episode.main.finish == "length",
        "seconds": episode.seconds,
        "error": error,
    }


if __name__ == "__main__":
    first = "".join(sys.argv[1:2])
    if first == "table":
        sys.exit(tables.main(sys.argv[2:]))
    if difflib.get_close_matches(first, ["table"]) and not Path(first).exists():
        sys.exit(f"error: {first}: neither a config nor a command; did you mean table?")
    cfg, args = config.command_line(EvalConfig, __doc__)
    config.run_script(dry_run if args.dry_run else main, cfg, *USER_ERRORS)
