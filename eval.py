"""eval.py: ask one model, under one protocol, on any of the splits of evals/benchmarks.py.

    python eval.py configs/eval/toy.yaml                    # the toy, with tools and without, at every K
    python eval.py configs/eval/paravt_8b.yaml              # called again, it goes on where it was stopped
    python eval.py configs/eval/paravt_8b.yaml --dry-run    # what is missing, what differs from the paper
    python eval.py table runs/eval/* --baseline NAME        # evals/tables.py: our numbers beside the published ones

RUN/SPLIT-K64-parallel.jsonl holds one line per item, written as the item ends: what was said last, what was read from
it, the score (and under `lenient` both, read in prose too), calls, costs, and the error if there was one.
Its first line holds the settings that shape a result; a file of answers under other settings is refused.

An item is asked again if it ended in an error or an API's refusal (which count as wrong until then), or if its question,
options, answer or subtitles have changed. `limit=2` asks two items of each split, and needs no other videos; a larger
one goes on.

Deliberately missing: several checkpoints in a run, several machines for a run, ensembles, majority votes.
"""

import contextlib
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

from huggingface_hub import snapshot_download
from tqdm import tqdm

from evals import results, tables
from evals.benchmarks import SPLITS, UNGRADED, Item, count_items, grade, grade_leniently, load_split
from evals.protocols import Prompting, run_protocol
from evals.results import EvalJob, Results, contract_of, read_results
from rewards import RewardConfig, final_answer, score, turn_texts
from rollout import AgentContext, RolloutConfig, derive_seed, open_engine, run_all
from runtime import config
from runtime.api import Api, OpenAI, check_api
from runtime.dataset import DataError
from runtime.engine import Engine
from runtime.judge import Judge, JudgeError
from runtime.render import Renderer, load_tokenizer
from runtime.settings import PolicyConfig
from runtime.video import Videos
from runtime.visual import VisualContract

# A server on each GPU of this machine, as torch counts them; without SGLang, the model runs in this process.
GPUS = ()
if importlib.util.find_spec("sglang"):
    import torch

    GPUS = tuple(range(torch.cuda.device_count()))
# Bytes of the host's memory for frames of the requests of a GPU: 8 published ones, whose tokens fill a server's cache.
FRAME_BYTES = 8e9


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """One model on some splits."""

    run: str
    """Folder of the results."""
    name: str
    """The row of the table. A name of published.yaml, also "ParaVT-8B (own)", brings its published numbers along."""
    checkpoint: str
    """A Hugging Face folder, the name of a model on the hub that a file of configs/ uses, or hub:OWNER/MODEL."""
    splits: dict[str, str]
    """Split -> the folder of its dataset."""
    frames: tuple[int, ...] = (64,)
    """K: overview frames. Every split is asked once with each K."""
    arms: tuple[Literal["parallel", "sequential", "none"], ...] = ("parallel",)
    """How the protocol `agent` may call tools (`rollout.dispatch`). Every split is asked once in each way."""
    prompting: Prompting = Prompting()
    rollout: RolloutConfig = RolloutConfig(temperature=0.0, server_gpus=GPUS, concurrency=32 * max(1, len(GPUS)))
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
    decoders: int = min(64, os.cpu_count() or 1)

    def __post_init__(self):
        config.refuse_below_1(self, "decoders")
        unknown = [name for name in self.splits if name not in SPLITS]
        if unknown:
            raise ValueError(f"splits = {unknown}: there is only {', '.join(SPLITS)}")
        if not self.agentic and self.arms != ("parallel",):
            raise ValueError(f"arms = {list(self.arms)}: only the protocol 'agent' has them")
        if not self.frames or not self.arms or min(self.frames) < 1:
            raise ValueError("frames and arms: each needs at least one value, and frames at least 1, to ask anything")
        if self.rollout.dispatch != "parallel":
            raise ValueError(f"rollout.dispatch = {self.rollout.dispatch!r}: here, `arms` says how tools are called")
        if self.api.url and self.agentic and (self.rollout.think_prefix or "sequential" in self.arms):
            rule = "set rollout.think_prefix: false, no arm sequential"
            raise ValueError(f"api.url: an API cannot open a turn or stop at a tag; {rule}")

    @property
    def agentic(self) -> bool:
        """Say if the model is our own agent, which has arms, and the format of the rewards."""
        return self.prompting.protocol == "agent"


# Read the command line before torch is imported, which takes four seconds: --help and mistakes are answered at once.
if __name__ == "__main__":
    if sys.argv[1:2] == ["table"]:
        sys.exit(tables.main(sys.argv[2:]))
    cfg, args = config.command_line(EvalConfig, __doc__)

import torch
from transformers import AutoConfig, Qwen3VLConfig

from runtime import checks
from runtime.checks import check_run, check_servers, find_checkpoint, on_the_hub, weights_digest
from runtime.plan import PUBLISHED, count, meta_policy, plan_engine
from runtime.run import USER_ERRORS

# ------------------------------------------------------------------------------------------------ the run


def main(cfg: EvalConfig) -> int:
    """Ask what has not been answered yet, and print the table; exit status 1 where all items of a split failed."""
    # Refuse what cannot run before anything is written or loaded.
    jobs = list_jobs(cfg)
    folder = find_model(cfg)
    renderer = load_renderer(cfg, folder)
    jobs = with_headers(cfg, jobs, folder)
    left = refuse_what_cannot_run(cfg, jobs, folder)

    # Ask the rest. No results are written before the engine is there.
    if left:
        with (
            checks.only_run_in(Path(cfg.run)),
            contextlib.closing(open_model(cfg, folder, renderer)) as engine,
            Videos(cfg.decoders) as videos,
        ):
            config.save_run(cfg, cfg.run)
            for job in jobs:
                # The file is read only now: until the folder was ours, another process may have answered items.
                lines, items = results.resume(job)
                if items:
                    run_job(job, lines, items, AgentContext(engine, renderer, videos, job.rollout), cfg)

    # Show all results of the run.
    tables.report([cfg.run])
    failed = 0
    for job in jobs:
        errors = [record["error"] for record in read_results(job.path).records]
        if errors and all(errors):
            failed = 1
            print(f"error: all {len(errors)} items of {job.path} failed; the last: {errors[-1]}", file=sys.stderr)
    return failed


def dry_run(cfg: EvalConfig) -> int:
    """Print what is there and missing, and what the published run did otherwise; exit status 1 if something is missing.
    Whatever else the run would refuse ends the dry run with the same sentence."""
    print(f"{cfg.name} -> {cfg.run}, protocol {cfg.prompting.protocol}")
    missing = 0

    # The datasets.
    jobs = []
    for split, root in cfg.splits.items():
        try:
            jobs_of_split = list_jobs(replace(cfg, splits={split: root}))
        except DataError as error:
            missing = 1
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
            print(f"  note    {cfg.checkpoint} is not here; the run would fetch it from the hub")
    except config.ConfigError as error:
        missing = 1
        print(f"  MISSING {error}")

    # Settings that are not those of its training, or of the published run.
    notes = []
    jobs = with_headers(cfg, jobs, folder)
    for job in jobs:
        notes += job.header["unlike_training"]
    notes += results.unlike_published(cfg, folder)
    for note in dict.fromkeys(notes):
        print(f"  note    {note}")

    if folder:
        load_renderer(cfg, folder)
    refuse_what_cannot_run(cfg, jobs, folder)
    return missing


def find_model(cfg: EvalConfig, fetch: bool = True) -> Path | None:
    """Return the checkpoint's folder; one on the hub is fetched, or None. A model behind an API needs the tokenizer only."""
    name = cfg.checkpoint.removeprefix("hub:")
    if not Path(name).is_dir():
        # Without the prefix, a name that no config has is a path.
        configs = [path.read_text("utf-8") for path in (Path(__file__).parent / "configs").rglob("*.yaml")]
        known = re.search(rf"(^checkpoint|family): {re.escape(name)}[\s,}}]", "\n".join(configs), re.M)
        if not on_the_hub(name) or not (known or name != cfg.checkpoint):
            rule = "no such folder, and no file of configs/ names it; training leaves RUN/model, the hub has hub:OWNER/MODEL"
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


def refuse_what_cannot_run(cfg: EvalConfig, jobs: Sequence[EvalJob], folder: Path | None) -> bool:
    """Refuse what could not run, or would mix with other results: the run and its dry run both come by here. Return whether
    items are left to ask. A dry run may lack jobs or the checkpoint."""
    check_run(cfg)

    # What has been answered under these settings is not asked again; other settings are refused.
    left = False
    for job in jobs:
        _, items = results.resume(job)
        left |= bool(items)

    # Other files of this folder may be of another model.
    mine = {job.path for job in jobs}
    others = [other for path, other in results.read_run(cfg.run).items() if path not in mine]
    results.refuse_mixtures([*others, *(Results(job.header, []) for job in jobs)])

    if left or not jobs:
        check_engine(cfg, folder)
    return left


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

    # The sizes of the model are in its config.json; those of the published models are known without it.
    name = cfg.checkpoint.removeprefix("hub:")
    if folder:
        model = AutoConfig.from_pretrained(folder)
        stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        weights = stored * 2 / (model.dtype or torch.bfloat16).itemsize  # it computes in bf16
    elif name in PUBLISHED:
        model = Qwen3VLConfig(**PUBLISHED[name])
        weights = 2 * count(meta_policy(PolicyConfig(name)))
    else:
        return
    if not cfg.rollout.server_gpus and model.model_type != "qwen3_vl":
        told = f"checkpoint = {cfg.checkpoint!r}: this process runs Qwen3-VL, not {model.model_type!r}"
        raise config.ConfigError(f"{told}; install SGLang, or give rollout.urls")
    if torch.cuda.is_available():
        longest = cfg.rollout.max_context  # one trajectory, at least
        plan_engine(cfg.rollout, model.get_text_config(), weights, 1, longest).check(gpu_gib=80)


def requests_at_once(cfg: EvalConfig, contract: VisualContract) -> tuple[int, int]:
    """Return how many items are asked at the same time, and the bytes that each one's overview takes in the host's memory: 24 a
    pixel at SGLang, 3 as our file. Servers that we start get no more than FRAME_BYTES hold."""
    width, height = contract.frame_size(1280, 720)
    size = 27 * max(cfg.frames) * width * height
    most = cfg.rollout.concurrency
    if cfg.rollout.server_gpus and not (cfg.api.url or cfg.rollout.urls):
        most = min(most, max(1, round(FRAME_BYTES / size)) * len(cfg.rollout.server_gpus))
    return most, size


def open_model(cfg: EvalConfig, folder: Path, renderer: Renderer) -> Engine:
    if cfg.api.url:
        return OpenAI(cfg.api, renderer)
    gpus = () if cfg.rollout.urls else cfg.rollout.server_gpus  # all of this machine, by default
    return open_engine(folder, renderer, replace(cfg.rollout, server_gpus=gpus), logs=Path(cfg.run) / "logs")


# ------------------------------------------------------------------------------------------------ one file of results, one item


def list_jobs(cfg: EvalConfig) -> list[EvalJob]:
    """List the files of a run, each with its items; their headers need the model."""
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
    """Write the lines that stay, then ask the items, many at a time. Each leaves its line as it ends."""
    config.write_whole(job.path, "".join(json.dumps(line) + "\n" for line in lines))
    judge = Judge(cfg.grading.judge)
    bar = tqdm(total=len(items), desc=f"{job.split} K={job.k} {job.arm}", unit="item")
    with job.path.open("a", encoding="utf-8") as file, bar:

        def done(_: int, record: dict) -> None:
            file.write(json.dumps(record) + "\n")  # ASCII: whatever a model says, a line stays one line
            file.flush()
            bar.update()

        try:
            asked = [functools.partial(ask_item, item, job.k, context, cfg, judge) for item in items]
            at_once, _ = requests_at_once(cfg, context.renderer.contract)
            run_all(context.engine, asked, at_once, done)
        finally:
            context.stopped.set()  # after an error, nobody starts another turn


def ask_item(item: Item, k: int, context: AgentContext, cfg: EvalConfig, judge: Judge) -> dict[str, Any]:
    """Ask one item; returns its line of the results, and not the episode: held, its frames would fill memory."""
    episode, answer = run_protocol(context, item, k, derive_seed(cfg.seed, item.task.id), cfg.prompting)
    turns = turn_texts(episode.main, context.renderer)
    error = episode.error

    # Grade the answer, strictly and leniently.
    strict = UNGRADED
    lenient = UNGRADED
    if not error:
        if answer is None and cfg.grading.untagged_answer:
            answer = final_answer(turns[-1:], untagged=True)
        try:
            strict = grade(item, answer, cfg.grading, judge)
            lenient = grade_leniently(item, strict, turns[-1], cfg.grading, judge)
        except JudgeError as problem:
            error = f"JudgeError: {problem}"

    # The format of our own agent has rewards.
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
        "videos": ["/".join(Path(path).parts[-2:]) for path in item.task.videos],  # MMVU numbers them in every folder
        "kind": item.task.kind,
        "gold": item.task.answer,
        "said": "".join(turns[-1:])[-2000:],  # the end of the last turn: why an answer could not be read
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
    config.run_script(dry_run if args.dry_run else main, cfg, *USER_ERRORS)
