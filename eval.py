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
import dataclasses
import hashlib
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

import data
from evals import tables
from evals.benchmarks import SPLITS, UNGRADED, Item, count_items, grade, grade_leniently, load_split
from evals.protocols import READS, Prompting, run_protocol
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
from runtime.checks import MAY_CHANGE, check_run, check_servers, find_checkpoint, on_the_hub, weights_digest
from runtime.plan import PUBLISHED, count, meta_policy, plan_engine
from runtime.run import USER_ERRORS

# ------------------------------------------------------------------------------------------------ the run


def main(cfg: EvalConfig) -> int:
    """Ask what has not been answered yet, and print the table; exit status 1 where all items of a split failed."""
    jobs, source = list_jobs(cfg), find_model(cfg)
    renderer, todo = prepare(cfg, jobs, source)

    # Ask the rest. No results are written before the engine is there.
    if todo:
        with (
            checks.only_run_in(Path(cfg.run)),
            contextlib.closing(open_model(cfg, source, renderer)) as engine,
            Videos(cfg.decoders) as videos,
        ):
            if any(earlier_results(job, header) != kept for job, _, (header, *kept) in todo):
                raise config.ConfigError(f"run = {cfg.run!r}: another process has just answered items; start again")
            config.save_run(cfg, cfg.run)
            for job, items, before in todo:
                run_job(job, items, before, AgentContext(engine, renderer, videos, job.rollout), cfg)

    # Show all results of the run.
    tables.report([cfg.run])
    failed = 0
    for job in jobs:
        errors = [record["error"] for record in tables.read_results(job.path).records]
        if errors and all(errors):
            failed = 1
            print(f"error: all {len(errors)} items of {job.path} failed; the last: {errors[-1]}", file=sys.stderr)
    return failed


def dry_run(cfg: EvalConfig) -> int:
    """Print what is there and missing, and what the published run did otherwise; exit status 1 if something is missing.
    What else the run would refuse ends the dry run, too, with the same sentence."""
    print(f"{cfg.name} -> {cfg.run}, protocol {cfg.prompting.protocol}")
    jobs, missing = [], 0
    for split, root in cfg.splits.items():
        try:
            found = list_jobs(replace(cfg, splits={split: root}))
            print(f"  ok      {split}: {len(found[0].items)} items, {len(found) * len(found[0].items)} episodes")
            jobs += found
        except DataError as error:
            missing = 1
            print(f"  MISSING {split}: {error}")

    source = None
    try:
        source = find_model(cfg, fetch=False)
        if not source:
            print(f"  note    {cfg.checkpoint} is not here; the run would fetch it from the hub")
    except config.ConfigError as error:
        missing = 1
        print(f"  MISSING {error}")

    unlike = [text for job in jobs for text in unlike_training(cfg, job, source)]
    for text in (*dict.fromkeys(unlike), *unlike_published(cfg, source)):
        print(f"  note    {text}")
    prepare(cfg, jobs, source)
    return missing


def unlike_training(cfg: EvalConfig, job: "EvalJob", source: Path | None) -> list[str]:
    """List how a model of rl.py is asked otherwise than it was trained. RUN/config.yaml, beside RUN/model, says how."""
    run = source.resolve().parent if source else None
    trained = config.read_tree(run / "config.yaml") if run and (run / "run.json").exists() else {}
    if "rollout" not in trained or cfg.api.url:  # sft.py learns from trajectories that were written elsewhere
        return []
    names = ("tools", "dispatch", "tool_return", "think_prefix", "temperature")
    frames = trained.get("gating") or [trained["visual"]["overview_frames"]]
    was = {name: trained["rollout"].get(name) for name in names} | {"protocol": "agent", "frames": frames}
    asked = {name: getattr(job.rollout, name) for name in names} | {"tools": list(job.rollout.tools)}
    asked |= {"protocol": cfg.prompting.protocol, "frames": frames if job.k in frames else [job.k]}
    return [f"unlike its training: {text}" for text in config.differences(was, asked).values()]


def unlike_published(cfg: EvalConfig, source: Path | None) -> list[str]:
    """List how this run differs from its row in configs/eval, and that one from the published run."""
    row, found = cfg.name.partition(" (")[0], []
    own = VisualContract.load(source) if source else VisualContract()  # what `visual: null` stands for
    ours = dataclasses.asdict(replace(cfg, visual=cfg.visual or own))
    for path in sorted(tables.PUBLISHED.parent.glob("*.yaml")):
        if config.read_tree(path).get("name") == row:
            theirs = config.load(EvalConfig, path)
            theirs = dataclasses.asdict(replace(theirs, visual=theirs.visual or own))
            for key, text in config.differences(theirs, ours).items():
                shapes_results = key.startswith(("frames", "arms", "prompting", "rollout", "visual"))
                if shapes_results and key not in MAY_CHANGE:
                    found.append(f"unlike {path.name}: {text}")
    for group in tables.read_published()["differs"].get(row, ()):
        found += [f"the published run: {text}" for text in group]
    return found


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


def check_engine(cfg: EvalConfig, source: Path | None) -> None:
    """Refuse a model or a judge that does not answer, and a model that this process or its GPUs cannot run."""
    if cfg.grading.open_answer == "judge":
        check_api(cfg.grading.judge)
    if cfg.api.url:
        check_api(cfg.api)
        return
    check_servers(cfg.rollout)
    contract = cfg.visual or (VisualContract.load(source) if source else VisualContract())
    if cfg.rollout.server_gpus and not cfg.rollout.urls:
        checks.check_host_memory(*requests_at_once(cfg, contract))
    name = cfg.checkpoint.removeprefix("hub:")
    if cfg.rollout.urls or not (source or name in PUBLISHED):
        return
    model = AutoConfig.from_pretrained(source) if source else Qwen3VLConfig(**PUBLISHED[name])
    if not cfg.rollout.server_gpus and model.model_type != "qwen3_vl":
        told = f"checkpoint = {cfg.checkpoint!r}: this process runs Qwen3-VL, not {model.model_type!r}"
        raise config.ConfigError(f"{told}; install SGLang, or give rollout.urls")
    if torch.cuda.is_available():
        if source:
            stored = sum(path.stat().st_size for path in source.glob("*.safetensors"))
            weights = stored * 2 / (model.dtype or torch.bfloat16).itemsize  # it computes in bf16
        else:
            weights = 2 * count(meta_policy(PolicyConfig(name)))
        longest = cfg.rollout.max_context  # one trajectory, at least
        plan_engine(cfg.rollout, model.get_text_config(), weights, 1, longest).check(gpu_gib=80)


def requests_at_once(cfg: EvalConfig, contract: VisualContract) -> tuple[int, int]:
    """Return how many items are asked at the same time, and the bytes that each one's overview takes in the host's memory: 24 a
    pixel at SGLang, 3 as our file. Servers that we start get no more than FRAME_BYTES hold."""
    width, height = contract.frame_size(1280, 720)
    size, most = 27 * max(cfg.frames) * width * height, cfg.rollout.concurrency
    if cfg.rollout.server_gpus and not (cfg.api.url or cfg.rollout.urls):
        most = min(most, max(1, round(FRAME_BYTES / size)) * len(cfg.rollout.server_gpus))
    return most, size


def open_model(cfg: EvalConfig, source: Path, renderer: Renderer) -> Engine:
    if cfg.api.url:
        return OpenAI(cfg.api, renderer)
    gpus = () if cfg.rollout.urls else cfg.rollout.server_gpus  # all of this machine, by default
    return open_engine(source, renderer, replace(cfg.rollout, server_gpus=gpus), logs=Path(cfg.run) / "logs")


# ------------------------------------------------------------------------------------------------ one file of results, one item


@dataclass(frozen=True)
class EvalJob:
    """One file of results: a split, asked in one way."""

    split: str
    k: int
    arm: str  # of other models, the protocol
    rollout: RolloutConfig  # with the arm as its dispatch
    items: list[Item]  # as many as `limit` says
    total: int  # items of the whole split
    path: Path


def list_jobs(cfg: EvalConfig) -> list[EvalJob]:
    found = []
    for split, root in cfg.splits.items():
        items, total = load_split(split, root, cfg.limit), count_items(split, root)
        for k in cfg.frames:
            for dispatch in cfg.arms:
                arm = dispatch if cfg.agentic else cfg.prompting.protocol
                path = Path(cfg.run) / f"{split}-K{k}-{arm}.jsonl"
                found.append(EvalJob(split, k, arm, replace(cfg.rollout, dispatch=dispatch), items, total, path))
    return found


def prepare(cfg: EvalConfig, jobs: Sequence[EvalJob], source: Path | None) -> tuple[Renderer | None, list]:
    """Refuse what could not run, or would mix with other results: the run and its dry run both come by here. Return the
    renderer, and (job, items to ask, lines before them) where there are any. A dry run may lack jobs or the source."""
    check_run(cfg)
    renderer, headers, todo = None, [], []
    contract = cfg.visual
    if source:
        contract = cfg.visual or VisualContract.load(source)
        contract.check(source)
        renderer = Renderer(load_tokenizer(source), contract)
    weights = cfg.api.model if cfg.api.url else source and weights_digest(source)

    # What has been answered is not asked again.
    for job in jobs:
        header = settings(cfg, job, contract, weights) | {"unlike_training": unlike_training(cfg, job, source)}
        headers.append(tables.Results(header, []))
        records = earlier_results(job, header)
        answered = {record["id"] for record in records}
        items = [item for item in job.items if item.task.id not in answered]
        if items:
            todo.append((job, items, [header, *records]))

    # Other files of this folder may be of another model.
    mine = {job.path for job in jobs}
    others = [results for path, results in tables.read_run(cfg.run).items() if path not in mine]
    tables.refuse_mixtures([*others, *headers])

    if todo or not jobs:
        check_engine(cfg, source)
    return renderer, todo


def settings(cfg: EvalConfig, job: EvalJob, contract: VisualContract | None, weights: str | None) -> dict[str, Any]:
    """Collect what shapes a result, for the file's first line. Where and how fast it is computed does not. Not seen here:
    what a fork's tool asks its sub-agents (`ClipForSubagent.request`), which weights a server at `rollout.urls` holds, and
    what `rollout.server_args` do to them, such as quantization. None: a dry run does not know it."""
    rollout, grading = dataclasses.asdict(job.rollout), cfg.grading
    elsewhere = MAY_CHANGE | {"rollout.dispatch"}
    prompts = [cfg.prompting.texts]  # of stamped frames and of reports: other forms follow from settings below
    if cfg.agentic:
        prompts += [data.system_prompt(with_tools=False), data.system_prompt(with_tools=True)]
        prompts += [data.subagent_system_prompt(), data.SUBAGENT_REQUEST, job.rollout.schemas]
    asked = {"name": cfg.name, "split": job.split, "k": job.k, "arm": job.arm, "total": job.total}
    header = asked | {
        "weights": weights,
        "api": {"url": cfg.api.url, "parameters": cfg.api.parameters},
        "prompts": digest(prompts),
        "prompting": dataclasses.asdict(cfg.prompting),
        "rollout": {name: value for name, value in rollout.items() if f"rollout.{name}" not in elsewhere},
        "visual": contract and dataclasses.asdict(replace(contract, **READS.get(cfg.prompting.protocol, {}))),
        "grading": {"open_answer": grading.open_answer, "untagged_answer": grading.untagged_answer},
        "judge": grading.judge.model,
        "seed": cfg.seed,
    }
    return json.loads(json.dumps(header))  # tuples become lists, as in a file


def item_digest(item: Item) -> str:
    return digest((item.task.question, item.task.options, item.task.answer, item.subtitles))


def digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def earlier_results(job: EvalJob, header: dict[str, Any]) -> list[dict]:
    """Read the answers that earlier calls left, under the same settings. Those to items that have changed are dropped."""
    if not job.path.exists():
        return []
    found = tables.read_results(job.path)
    answers = [record for record in found.records if not record["error"]]
    wrong = config.differences(found.settings, header)
    wrong.pop("unlike_training", None)  # a note; the checkpoint may have been copied away from its run
    for name in ("weights", "visual"):
        if header[name] is None:
            wrong.pop(name, None)
    if wrong and answers:
        cure = "choose another `run`, or delete the file"
        raise config.ConfigError(f"{job.path} was made under other settings ({'; '.join(wrong.values())}): {cure}")
    digests = {item.task.id: item_digest(item) for item in job.items}
    kept = []
    for record in answers:
        beyond_limit = record["id"] not in digests and len(job.items) < job.total
        if beyond_limit or record["item"] == digests.get(record["id"]):
            kept.append(record)
    return kept


def run_job(job: EvalJob, items: list[Item], before: list[dict], context: AgentContext, cfg: EvalConfig) -> None:
    """Ask items of a job, many at a time. Each leaves its line as it ends, behind the lines that stay from before."""
    config.write_whole(job.path, "".join(json.dumps(line) + "\n" for line in before))
    judge = Judge(cfg.grading.judge)
    bar = tqdm(total=len(items), desc=f"{job.split} K={job.k} {job.arm}", unit="item")
    with job.path.open("a", encoding="utf-8") as file, bar:

        def done(_: int, record: dict) -> None:
            file.write(json.dumps(record) + "\n")  # ASCII: whatever a model says, a line stays one line
            file.flush()
            bar.update()

        try:
            asked = [lambda item=item: ask_item(item, job.k, context, cfg, judge) for item in items]
            at_once, _ = requests_at_once(cfg, context.renderer.contract)
            run_all(context.engine, asked, at_once, done)
        finally:
            context.stopped.set()  # after an error, nobody starts another turn


def ask_item(item: Item, k: int, context: AgentContext, cfg: EvalConfig, judge: Judge) -> dict[str, Any]:
    """Ask one item; returns its line of the results, and not the episode: held, its frames would fill memory."""
    episode, answer = run_protocol(context, item, k, derive_seed(cfg.seed, item.task.id), cfg.prompting)
    turns, error = turn_texts(episode.main, context.renderer), episode.error

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
        parts = score(episode, context.renderer, RewardConfig(open_answer="exact"))
        form = {name: parts[name] for name in ("f", "well_formed")}

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
        "calls": [
            {"name": call.name, "window": call.window, "error": call.error, "text": call.text, "seconds": call.seconds}
            for call in episode.calls
        ],
        "turns": len(turns),
        "tokens": episode.main.n_sampled,
        "agent_tokens": sum(subagent.n_sampled for subagent in episode.subagents),
        "truncated": episode.main.finish == "length",
        "seconds": episode.seconds,
        "error": error,
    }


if __name__ == "__main__":
    config.run_script(dry_run if args.dry_run else main, cfg, *USER_ERRORS)
