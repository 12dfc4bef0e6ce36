"""rl.py: PARA-GRPO, and plain GRPO as its special case.

    torchrun --standalone --nproc_per_node=4 rl.py configs/paragrpo_8b.yaml     # GPUs 4-7 sample, the others train
    python rl.py configs/toy_paragrpo.yaml                                      # the same code on a CPU
    python rl.py configs/toy_grpo.yaml steps=20                                 # accuracy-only GRPO, for contrast

A step: B tasks -> one K each (nFrames gating) -> G episodes each -> rewards -> advantages -> loss -> AdamW -> weights to
the engine. RUN/metrics.jsonl, RUN/episodes/ (what was said), RUN/state/ (to resume from), RUN/model/ (the result).

The equations are in grpo.py; plain GRPO is the same loop without anchor, prefix and gating. With `staleness: 1` the
episodes of the next step are sampled, by the weights of the last one, while this one trains. (A resumed run samples its
first batch by the newest weights; with `staleness: 0` it is the uninterrupted run.)

Deliberately missing: batches that are more than one update old, trainers that come and go.
"""

import os

from runtime import config

if __name__ == "__main__":
    config.answer_help(__doc__)  # before torch and transformers, which take seconds to import
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # no two micro-batches have the same length

import itertools
import math
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from data import CALL_ERRORS, Group, Task, draw_frames, parse_task
from grpo import Lesson, bundles, lessons_loss, make_lessons, micro_batches
from rewards import RewardConfig, give_rewards
from rollout import RolloutConfig, keep_episodes, open_engine, rollout
from runtime.checks import check_run, check_servers, find_checkpoint
from runtime.contract import ContractError, Renderer, VisualContract, load_tokenizer
from runtime.dataset import DataConfig, DataError, Dataset, check_rows
from runtime.distributed import (
    barrier,
    checkpoint_dir,
    device,
    export,
    gather,
    init_distributed,
    load_state,
    mean_over_ranks,
    peak_memory,
    print0,
    rank,
    save_state,
    sum_over_ranks,
    world_size,
)
from runtime.doctor import self_check
from runtime.engine import Engine, EngineError
from runtime.plan import Plan, PlanError, engine_load, plan_disk, plan_engine, plan_updates, utilisation
from runtime.policy import Policy, load, make_optimizer, optimizer_step
from runtime.settings import GRPOConfig, OptimConfig, PolicyConfig
from runtime.video import Videos


@dataclass(frozen=True, kw_only=True)
class RLConfig(GRPOConfig):
    """One RL run."""

    run: str
    """Folder of everything the run leaves."""
    policy: PolicyConfig
    """Where the policy starts; the reference of the KL is the same checkpoint."""
    data: DataConfig
    visual: VisualContract = VisualContract()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    optim: OptimConfig = OptimConfig()
    gating: tuple[int, ...] = (4, 8, 16, 32, 64)
    """nFrames gating: K is drawn from these, once per task and epoch. [] switches it off: visual.overview_frames."""
    steps: int = 54
    batch_tasks: int = 56
    """B: tasks of a step, over all ranks."""
    minibatches: int = 1
    """Updates per batch."""
    staleness: Literal[0, 1] = 0
    """0: sample, then train. 1: the next batch is sampled while this one trains, by weights that are one update old."""
    val: DataConfig | None = None
    """Held-out tasks, answered greedily with tools and without, every `eval_every` steps and at the end."""
    eval_every: int = 10
    val_tasks: int = 64
    val_frames: tuple[int, ...] = ()
    """Each of them is asked once with every one of these K; []: with visual.overview_frames."""
    save_every: int = 10
    keep: int = 2
    resume: Literal["auto", "never"] = "auto"
    max_bad_steps: int = 5
    """Updates whose gradient is not finite are skipped; more than this many steps with one stop the run."""
    dump_groups: int = 1
    """Groups per step whose episodes are kept in full, in RUN/episodes/."""
    seed: int = 0
    decoders: int = 2
    """Video decoder processes per rank."""
    gpus: int = 4
    """Training GPUs that --dry-run plans for; torchrun decides how many there are ..."""
    gpu_gib: float = 80.0
    """... and the machine, how much memory each has."""

    def __post_init__(self):
        super().__post_init__()
        if self.rollout.temperature == 0:
            raise ValueError(
                "rollout.temperature = 0: greedy episodes of a group are all alike, there is nothing to learn"
            )
        agents = self.rollout.subagents
        if agents.train and agents.temperature != self.rollout.temperature:
            raise ValueError(
                f"rollout.subagents.train needs rollout.subagents.temperature = {self.rollout.temperature}, the main "
                f"agent's, not {agents.temperature}: the loss has one softmax"
            )
        if self.rollout.gpus and self.rollout.urls:
            raise ValueError(
                f"rollout.gpus = {list(self.rollout.gpus)}, rollout.urls = {list(self.rollout.urls)}: give one of the two: "
                "servers that are started here, or servers that already run"
            )
        if small := [k for k in (*self.gating, *self.val_frames) if k < 1]:
            raise ValueError(f"gating or val_frames = {small}: an overview has at least 1 frame; gating = [] is off")
        counts = ("steps", "batch_tasks", "minibatches", "eval_every", "val_tasks", "save_every", "keep")
        if small := [f"{name} = {getattr(self, name)}" for name in counts if getattr(self, name) < 1]:
            raise ValueError(f"{', '.join(small)}: must be at least 1")
        if self.rollout.tool_return == "frames":
            raise ValueError("rollout.tool_return = 'frames' is for evaluation: rewards and credit assume reports")


SHOWN = ("reward", "acc", "fmt", "strict", "kappa", "loss", "kl", "entropy", "gap", "grad_norm", "seconds")


def main(cfg: RLConfig) -> None:
    """Train from the newest state of the run, or from its checkpoint, to the last step; export the policy."""
    me, world = init_distributed()
    check_run(cfg)
    run, source = Path(cfg.run), find_checkpoint(cfg.policy.checkpoint, checkpoint_dir)
    cfg.visual.check(source)
    check_servers(cfg.rollout, world)
    renderer = Renderer(load_tokenizer(source), cfg.visual)
    every_frame = (cfg.visual.overview_frames,)
    check_rows(parse_task, cfg.data, cfg.val)
    dataset, held_out = Dataset(cfg.data, parse_task), []
    if cfg.val:
        tasks = Dataset(cfg.val, parse_task)
        held_out = [task for task, _ in tasks.batch(0, min(cfg.val_tasks, tasks.total), me, world)]
    start = replace(cfg.policy, checkpoint=str(source))
    if torch.cuda.is_available():
        check_memory(replace(cfg, gpus=world, policy=start))
    policy = load(start, renderer.never_sampled)
    reference = load(start, renderer.never_sampled, train=False) if cfg.kl else None
    if reference and policy.vision_frozen:  # one tower for both: it stays what the reference's is
        reference.model.model.visual = policy.vision
    optimizer = make_optimizer(policy, cfg.optim)
    done, counted = load_state(run / "state", policy, optimizer, cfg.resume)
    bad_steps = counted.get("bad_steps", 0)
    engine = shared_engine(source, renderer, cfg.rollout)
    snapshot = snapshot_folder(run, source)
    if done or cfg.rollout.urls:  # servers that already run may hold the weights of another run
        publish(policy, engine, cfg, source, snapshot, done)
    metrics = None
    if me == 0:
        config.save_run(cfg, run)
        metrics = config.Metrics(run, "rl", done, cfg.steps, SHOWN)
    with (
        Videos(cfg.decoders, quarantine=run / "bad_videos.jsonl") as videos,
        Sampler(cfg, dataset, (engine, renderer, videos), me, world) as sampler,
    ):
        for step in range(done, cfg.steps):
            clock = Clock()
            groups, sampling = sampler.take(step)
            clock.lap("rollout")

            lost = give_rewards(groups, renderer, cfg.reward)
            lessons = make_lessons(groups, renderer, cfg, cfg.reward.anchor, cfg.rollout.subagents.train)
            clock.lap("reward")

            if step == done:
                self_check(policy, groups, cfg.rollout.temperature, cfg.gap_limit)
            measured, bad = update(policy, reference, optimizer, lessons, cfg, step)
            clock.lap("train")

            sampler.settle()
            clock.lap("rollout")
            publish(policy, engine, cfg, source, snapshot, step + 1)
            clock.lap("publish")

            bad_steps += bad
            measured |= describe(groups, cfg.gating or every_frame, step)
            measured |= speed(groups, lessons, start, clock, sampling)
            measured |= sum_over_ranks({"lost_judgements": lost, "bad_rows": len(dataset.bad)}) | clock.seconds
            measured |= {"bad_steps": bad_steps, "peak_memory_gib": peak_memory()}
            last = step + 1 == cfg.steps
            if cfg.val and (last or (step + 1) % cfg.eval_every == 0):
                measured |= evaluate(held_out, cfg.val_frames or every_frame, engine, renderer, videos, cfg)
            if metrics:
                keep_episodes(groups[: cfg.dump_groups], renderer, run / "episodes" / f"step-{step:06d}.jsonl")
                metrics.write(step, measured)
            if bad:  # all there is to run this update again: exact tokens, log-probs, rewards, advantages
                keep_episodes(groups, renderer, run / "bad_steps" / f"step-{step:06d}-rank{me}.jsonl")
            if bad_steps > cfg.max_bad_steps:
                raise FloatingPointError(
                    f"gradient not finite in {bad_steps} steps, more than max_bad_steps = {cfg.max_bad_steps}: "
                    f"lower optim.lr; the batches are in {run}/bad_steps, and rollout.load reads them"
                )
            if last or (step + 1) % cfg.save_every == 0:
                save_state(run / "state", policy, optimizer, step + 1, cfg.keep, {"bad_steps": bad_steps})
    engine.close()
    if me == 0:
        shutil.rmtree(snapshot, ignore_errors=True)
    export(policy, run / "model", source, cfg.visual)
    print0(f"done: {run}/model")


# ------------------------------------------------------------------------------------------------ rollouts


class Sampler:
    """Batches of episodes by step number: sampled when they are asked for, or (staleness 1) one step ahead."""

    def __init__(self, cfg: RLConfig, dataset: Dataset, stage: tuple[Engine, Renderer, Videos], me: int, world: int):
        self.cfg, self.dataset, self.stage, self.me, self.world = cfg, dataset, stage, me, world
        self.thread, self.stopped = ThreadPoolExecutor(1, "sampler"), threading.Event()
        self.ahead: Future | None = None

    def take(self, step: int) -> tuple[list[Group], float]:
        """This rank's groups of a step, and the seconds that sampling them took; begins the next where it may."""
        batch = self.ahead.result() if self.ahead else self._sample(step)
        go_on = self.cfg.staleness and step + 1 < self.cfg.steps
        self.ahead = self.thread.submit(self._sample, step + 1) if go_on else None
        return batch

    def settle(self) -> None:
        """Nobody samples any more, so the weights may change: all tokens of a batch are of one version."""
        if self.ahead:
            wait([self.ahead])

    def _sample(self, step: int) -> tuple[list[Group], float]:
        cfg, started = self.cfg, time.perf_counter()
        drawn = self.dataset.batch(step, cfg.batch_tasks, self.me, self.world)
        tasks, ks = [task for task, _ in drawn], [choose_k(cfg, task.id, epoch) for task, epoch in drawn]
        engine, renderer, videos = self.stage
        shown = self.me == 0 and not cfg.staleness and sys.stderr.isatty()
        groups = rollout(
            tasks, ks, cfg.group_size, engine=engine, renderer=renderer, videos=videos, cfg=cfg.rollout,
            seed=cfg.seed, step=step, progress=shown, stopped=self.stopped,
        )  # fmt: skip
        return groups, time.perf_counter() - started

    def __enter__(self) -> "Sampler":
        return self

    def __exit__(self, error, *_) -> None:
        self.stopped.set()
        if error:
            self.stage[0].close()  # nobody waits for a batch that is not wanted: what was asked fails now
        self.thread.shutdown()


def choose_k(cfg: RLConfig, task_id: str, epoch: int) -> int:
    return draw_frames(task_id, epoch, cfg.gating, cfg.seed) if cfg.gating else cfg.visual.overview_frames


def shared_engine(source: Path, renderer: Renderer, cfg: RolloutConfig) -> Engine:
    """In this process, or servers: rank 0 starts and supervises them, the other ranks connect to the same."""
    if not cfg.gpus:
        return open_engine(source, renderer, urls=cfg.urls, max_batch_tokens=cfg.max_batch_tokens)
    engine = open_engine(source, renderer, gpus=cfg.gpus, server_args=cfg.server_args) if rank() == 0 else None
    urls = gather(engine.urls if engine else None)[0]
    return engine or open_engine(source, renderer, urls=urls)


def publish(policy: Policy, engine: Engine, cfg: RLConfig, source: Path, snapshot: Path, version: int) -> None:
    """The policy's weights become the engines': a snapshot in safetensors, then one load each.

    The snapshot stays until the next one, since a server that restarts reads it again."""
    export(policy, snapshot, source, cfg.visual)
    if device().index in cfg.rollout.gpus:  # one GPU for both: what this process keeps for later, the server needs now
        torch.cuda.empty_cache()
    servers = bool(cfg.rollout.gpus or cfg.rollout.urls)  # which all ranks share: rank 0 loads, the others take note
    if rank() == 0 or not servers:
        engine.update_weights(snapshot, version)
    barrier("the engines have the new weights")
    if rank() > 0 and servers:
        engine.update_weights(snapshot, version, push=False)


def snapshot_folder(run: Path, source: Path) -> Path:
    """In memory if two snapshots fit there (the old one stays until the new one is whole), else beside the run."""
    memory = Path("/dev/shm")
    snapshot = memory / f"minparavt{run.resolve().as_posix().replace('/', '-')}"
    size = sum(file.stat().st_size for file in source.glob("*.safetensors"))
    if rank() == 0:
        shutil.rmtree(snapshot, ignore_errors=True)  # of a process that was killed
        if not memory.is_dir() or shutil.disk_usage(memory).free < 2.2 * size:
            print(f"{memory} has no room for two snapshots of {size / 2**30:.1f} GiB: weights go through {run}")
            snapshot = run / "snapshot"
    return gather(snapshot)[0]


# ------------------------------------------------------------------------------------------------ the update


def update(
    policy: Policy, reference: Policy | None, optimizer, lessons: list[Lesson], cfg: RLConfig, step: int
) -> tuple[dict[str, float], bool]:
    """One AdamW step per minibatch, over the lessons of all ranks -> what was measured; was an update skipped?"""
    minibatches = [micro_batches(lessons[i :: cfg.minibatches], cfg.train_tokens) for i in range(cfg.minibatches)]
    minibatches = [micro for micro in minibatches if micro]  # empty on all ranks or on none
    tau = cfg.rollout.temperature
    prox = {}  # with one minibatch, pi itself; with more, computed here, and frames are encoded once more
    if len(minibatches) > 1:
        with torch.no_grad():
            prox = {id(part): policy(bundles(part), tau).logprobs for micro in minibatches for part in micro}
    sums, norms = {"tokens": 0.0, "loss": 0.0}, []
    for micro in minibatches:
        for part in micro:
            features = policy.encode(bundles(part)) if policy.vision_frozen else None
            scores = policy(bundles(part), tau, features)
            pulled_to = None
            if reference is not None:
                with torch.no_grad():
                    pulled_to = reference(bundles(part), tau, features).logprobs
            loss, watched = lessons_loss(scores, part, prox.get(id(part)), pulled_to, cfg)
            (loss * len(minibatches)).backward()
            for name, values in (watched | {"loss": loss.detach()}).items():
                sums[name] = sums.get(name, 0.0) + values.sum().item()
            sums["tokens"] += len(scores.logprobs)
        norms.append(optimizer_step(policy, optimizer, cfg.optim, step, cfg.steps))
    sums = sum_over_ranks(sums)
    tokens, loss = max(1.0, sums.pop("tokens")), sums.pop("loss")
    means = {"gap": 0.0, "entropy": 0.0} | {name: value / tokens for name, value in sums.items()}
    norm, lr = float(np.mean(norms or [0.0])), optimizer.param_groups[0]["lr"]
    return means | {"loss": loss, "learned_tokens": tokens, "grad_norm": norm, "lr": lr}, not math.isfinite(norm)


# ------------------------------------------------------------------------------------------------ what happened


class Clock:
    """Seconds per phase, on this rank."""

    def __init__(self):
        self.seconds, self._last = {"seconds": 0.0}, time.perf_counter()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        for name in (f"{phase}_seconds", "seconds"):
            self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now


def describe(groups: Sequence[Group], ks: Sequence[int], step: int) -> dict[str, float]:
    """Means over the episodes of all ranks that ran; kappa is executed calls per episode, fmt the paper's f. `ks`: the K
    that may be drawn."""
    episodes = [episode for group in groups for episode in group.episodes]
    seen: dict[str, list[float]] = {"failed_rate": [float(bool(episode.error)) for episode in episodes]}

    def note(name: str, value: float) -> None:
        seen.setdefault(name, []).append(float(value))

    for episode in episodes:
        if episode.error:
            continue
        for name, value in episode.reward.items():
            note(name, value)
        note("kappa", episode.executed)
        note(f"kappa/K={episode.k}", episode.executed)
        note(f"acc/K={episode.k}/{'called' if episode.executed else 'skipped'}", episode.reward["acc"])
        note("truncated_rate", episode.main.finish == "length")
        note("turns", len(episode.main.turns))
        note("sampled_tokens", sum(episode.main.mask))
        for call in episode.calls:
            for kind in CALL_ERRORS:
                note(f"call_errors/{kind}", call.error == kind)
        if versions := [version for version in episode.main.versions if version >= 0]:
            note("staleness", step - sum(versions) / len(versions))
    for group in groups:
        for k in ks:
            note(f"share/K={k}", group.k == k)
        note("flat_groups", not any(episode.advantage for episode in group.episodes))
    return mean_over_ranks(seen)


def speed(
    groups: Sequence[Group], lessons: Sequence[Lesson], policy: PolicyConfig, clock: Clock, sampling: float
) -> dict[str, float]:
    """Tokens per second of all ranks together; `sampling_seconds` may lie within the training of the last step."""
    every = [agent for group in groups for e in group.episodes for agent in e.trajectories]
    mine = {"sampled": sum(sum(agent.mask) for agent in every), "packed": sum(len(x.bundle) for x in lessons)}
    total = sum_over_ranks({name: float(value) for name, value in mine.items()})
    seconds = max(gather(clock.seconds["train_seconds"]))
    found = {"sampling_seconds": max(gather(sampling))}
    found["sampled_tokens_per_second"] = total["sampled"] / found["sampling_seconds"]
    found["trained_tokens_per_second"] = total["packed"] / seconds
    return found | utilisation(policy, int(total["packed"]), seconds, world_size())


def evaluate(
    tasks: Sequence[Task], frames: Sequence[int], engine: Engine, renderer: Renderer, videos: Videos, cfg: RLConfig
) -> dict[str, float]:
    """Greedy accuracy on held-out tasks at each K of `frames`: as the policy likes, and without tools."""
    seen: dict[str, list[float]] = {}
    for name, dispatch in (("eval", cfg.rollout.dispatch), ("eval_no_tools", "none")):
        agent = replace(cfg.rollout, temperature=0.0, dispatch=dispatch)
        asked, ks = zip(*itertools.product(tasks, frames)) if tasks else ((), ())
        groups = rollout(asked, ks, 1, engine=engine, renderer=renderer, videos=videos, cfg=agent, progress=False)
        give_rewards(groups, renderer, cfg.reward)
        for episode in [episode for group in groups for episode in group.episodes]:
            seen.setdefault(f"{name}/failed_rate", []).append(float(bool(episode.error)))
            if not episode.error:
                values = episode.reward | {"kappa": episode.executed}
                for part in ("acc", "strict", *(["kappa"] if dispatch != "none" else [])):
                    for key in (f"{name}/{part}", f"{name}/{part}/K={episode.k}"):
                        seen.setdefault(key, []).append(values[part])
    return mean_over_ranks(seen)


# ------------------------------------------------------------------------------------------------ before it starts


def check_memory(cfg: RLConfig) -> None:
    """Print the plan of trainer and engine; PlanError if they do not fit."""
    plans = [plan_updates(cfg, cfg.gpus)]
    if engines := len(cfg.rollout.gpus):
        plans.append(plan_engine(cfg.policy, engines, *engine_load(cfg)))
    if set(cfg.rollout.gpus) & set(range(cfg.gpus)):
        plans = [Plan("training and engine on the same GPU", [row for plan in plans for row in plan.rows])]
    for plan in plans:
        print0(plan.table(cfg.gpu_gib))
        plan.check(cfg.gpu_gib)


def dry_run(cfg: RLConfig) -> int:
    """Memory, data, disk: what `main` would stumble over; exit status 1: there is no cold start yet."""
    check_memory(cfg)
    check_rows(parse_task, cfg.data, cfg.val)
    print(f"data: {Dataset(cfg.data, parse_task).total} rows")
    print(plan_disk(cfg.policy, cfg.run, cfg.keep))
    if cfg.policy.family and not Path(cfg.policy.checkpoint).exists():
        print(f"policy.checkpoint: {cfg.policy.checkpoint} is not there yet; the plan is that of {cfg.policy.family}")
        return 1
    return 0


if __name__ == "__main__":
    cfg, args = config.command_line(RLConfig, __doc__)
    try:
        sys.exit(dry_run(cfg) if args.dry_run else main(cfg))
    except (config.ConfigError, ContractError, DataError, EngineError, FileNotFoundError, PlanError) as error:
        sys.exit(f"error: {error}")
