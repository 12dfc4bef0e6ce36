"""rl.py: PARA-GRPO, and plain GRPO as its special case.

    torchrun --standalone --nproc_per_node=4 rl.py configs/paragrpo_8b.yaml     # GPUs 4-7 sample, the others train
    python rl.py configs/toy_paragrpo.yaml                                      # the same code on a CPU
    python rl.py configs/toy_grpo.yaml steps=20                                 # accuracy-only GRPO, for contrast

A step samples B tasks at one K each (nFrames gating) with G episodes each, rewards the episodes, compares them within
their group (advantages), takes an AdamW step on the loss and gives the new weights to the engine. The run leaves
RUN/metrics.jsonl, RUN/episodes/ (what was said), RUN/state/ (to resume from) and RUN/model/ (the result).

The equations are in grpo.py; plain GRPO is the same loop without anchor, prefix and gating. With `staleness: 1` the
episodes of the next step are sampled, by the weights of the last one, while this one trains. (A resumed run samples its
first batch by the newest weights; with `staleness: 0` it is the uninterrupted run.)

Deliberately missing: batches that are more than one update old, trainers that come and go.
"""

import os
import sys
from dataclasses import dataclass, replace
from typing import Literal

from rewards import RewardConfig
from rollout import RolloutConfig
from runtime import config
from runtime.settings import GRPOConfig, PolicyConfig, RunConfig, refuse_below_1


@dataclass(frozen=True, kw_only=True)
class RLConfig(RunConfig, GRPOConfig):
    """One RL run."""

    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    gating: tuple[int, ...] = (4, 8, 16, 32, 64)
    """nFrames gating: K is drawn from these, once per task and epoch. [] switches it off: visual.overview_frames."""
    steps: int = 54
    batch_tasks: int = 56
    """B: tasks of a step, over all ranks."""
    minibatches: int = 1
    """Updates per batch."""
    staleness: Literal[0, 1] = 0
    """0: sample, then train. 1: the next batch is sampled while this one trains, by weights that are one update old."""
    val_tasks: int = 64
    """Tasks of `val`, answered greedily with tools and without."""
    val_frames: tuple[int, ...] = ()
    """Each of them is asked once with every one of these K; []: with visual.overview_frames."""
    dump_groups: int = 1
    """Groups per step whose episodes are kept in full, in RUN/episodes/."""
    seed: int = 0

    def __post_init__(self):
        RunConfig.__post_init__(self)
        GRPOConfig.__post_init__(self)
        refuse_below_1(self, "batch_tasks", "minibatches", "val_tasks")
        if self.rollout.temperature == 0:
            raise ValueError("rollout.temperature = 0: greedy episodes of a group are all alike")
        agents = self.rollout.subagents
        if agents.train and agents.temperature != self.rollout.temperature:
            raise ValueError(
                f"rollout.subagents.train needs rollout.subagents.temperature = {self.rollout.temperature}, the main agent's"
            )
        if self.rollout.gpus and self.rollout.urls:
            raise ValueError("rollout.gpus and rollout.urls: give one of the two")
        for k in (*self.gating, *self.val_frames):
            if k < 1:
                raise ValueError(f"gating or val_frames: {k}: an overview has at least 1 frame; gating = [] is off")

    @property
    def choices_of_k(self) -> tuple[int, ...]:
        return self.gating or (self.visual.overview_frames,)


if __name__ == "__main__":  # --help and a bad YAML are answered before the imports below, which take seconds
    cfg, args = config.command_line(RLConfig, __doc__)
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # no two micro-batches have the same length

import math
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np
import torch

from data import CALL_ERRORS, Group, Task, draw_frames, parse_task
from grpo import Lesson, bundles, lessons_loss, make_lessons, micro_batches
from rewards import give_rewards
from rollout import keep_episodes, open_engine, rollout
from runtime.checks import check_bad_steps, check_servers, open_run
from runtime.contract import ContractError, Renderer
from runtime.dataset import DataError, Dataset, check_rows
from runtime.distributed import (
    barrier,
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
    snapshot_folder,
    sum_over_ranks,
    world_size,
)
from runtime.doctor import self_check
from runtime.engine import Engine, EngineError
from runtime.judge import Judge
from runtime.plan import Plan, PlanError, check_disk, engine_load, plan_engine, plan_updates, utilisation
from runtime.policy import Policy, load, make_optimizer, optimizer_step
from runtime.video import Videos
from tools import TOOLS

SHOWN = ("reward", "acc", "fmt", "strict", "kappa", "loss", "kl", "entropy", "gap", "grad_norm", "seconds")


def main(cfg: RLConfig) -> None:
    """Refuse what cannot run before any weight is loaded; then train, as the only run in its folder."""
    init_distributed()
    with open_run(cfg, parse_task, check_hardware) as (source, renderer), snapshot_folder(cfg.run, source) as snapshot:
        train(cfg, source, renderer, snapshot)


def train(cfg: RLConfig, source: Path, renderer: Renderer, snapshot: Path) -> None:
    """Train from the newest state of the run, or from its checkpoint, to the last step; export the policy."""
    run, policy_cfg = Path(cfg.run), replace(cfg.policy, checkpoint=str(source))

    # The policy, the reference of the KL and the optimizer; then all that the newest state has of them.
    policy = load(policy_cfg, renderer.never_sampled)
    reference = None
    if cfg.kl_coef:
        reference = load(policy_cfg, renderer.never_sampled, train=False)
        if policy.vision_frozen:  # one tower for both
            reference.model.model.visual = policy.vision
    optimizer = make_optimizer(policy, cfg.optim)
    done, counted = load_state(run / "state", policy, optimizer)
    bad_steps = counted.get("bad_steps", 0)
    print0(f"{run}: goes on after step {done} of {cfg.steps}" if done else f"{run}: starts anew from {source}")

    # The engine starts from the checkpoint; servers that already run may hold the weights of another run.
    engine = shared_engine(source, renderer, cfg.rollout)
    if done or cfg.rollout.urls:
        publish(policy, engine, cfg, source, snapshot, done)

    if rank() == 0:
        config.save_run(cfg, run)
        metrics = config.Metrics(cfg, "rl", done, SHOWN)
    dataset, held_out = Dataset(cfg.data, parse_task), held_out_tasks(cfg)
    judge = Judge(cfg.reward.judge)
    videos = Videos(cfg.decoders, quarantine=run / "bad_videos.jsonl")
    print0(f"sampling the first batch: {cfg.batch_tasks} x {cfg.group_size} episodes")
    with videos, Sampler(cfg, dataset, engine, renderer, videos) as sampler:
        for step in range(done, cfg.steps):
            clock = Clock()

            # Sample: this rank's groups of episodes.
            groups, sampling_seconds = sampler.take(step)
            clock.lap("rollout")

            # Reward the episodes, and turn rewards into advantages.
            lost = give_rewards(groups, renderer, cfg.reward, judge)
            lessons = make_lessons(groups, renderer, cfg, cfg.reward.anchor, cfg.rollout.subagents.train)
            clock.lap("reward")

            # Update. Before the first one: does the trainer compute the engine's log-probs?
            if step == done:
                self_check(policy, groups, cfg.rollout.temperature)
            measured, bad = update(policy, reference, optimizer, lessons, cfg, step)
            bad_steps += bad
            clock.lap("train")

            # Sync: the engine gets the new weights once it samples no more.
            sampler.settle()
            clock.lap("rollout")
            publish(policy, engine, cfg, source, snapshot, step + 1)
            clock.lap("publish")

            # Log.
            measured |= describe(groups, cfg.choices_of_k, step)
            measured |= speed(groups, lessons, policy_cfg, clock, sampling_seconds)
            measured |= sum_over_ranks({"lost_judgements": lost, "bad_rows": len(dataset.bad)}) | clock.seconds
            measured |= {"bad_steps": bad_steps, "peak_memory_gib": peak_memory()}
            last = step + 1 == cfg.steps
            if cfg.val and (last or (step + 1) % cfg.eval_every == 0):
                measured |= evaluate(held_out, engine, renderer, videos, cfg, judge)
            if rank() == 0:
                keep_episodes(groups[: cfg.dump_groups], renderer, run / "episodes" / f"step-{step:06d}.jsonl")
                metrics.write(step, measured)

            # Save.
            check_bad_steps(bad_steps)
            if last or (step + 1) % cfg.save_every == 0:
                save_state(run / "state", policy, optimizer, step + 1, cfg.keep, {"bad_steps": bad_steps})

    engine.close()
    export(policy, run / "model", source, cfg.visual)
    print0(f"done: {run}/model")


# ------------------------------------------------------------------------------------------------ rollouts


class Sampler:
    """Samples batches by step number: when they are asked for, or (staleness 1) one step ahead, in a thread.

    staleness 1:  take(s) returns batch s and starts sampling batch s + 1, with the weights from before update s;
                  settle() waits for batch s + 1; only then are the weights of update s published."""

    def __init__(self, cfg: RLConfig, dataset: Dataset, engine: Engine, renderer: Renderer, videos: Videos):
        self.cfg, self.dataset, self.engine = cfg, dataset, engine
        self.surroundings = {"engine": engine, "renderer": renderer, "videos": videos}
        self.thread, self.stopped = ThreadPoolExecutor(1, "sampler"), threading.Event()
        self.ahead: Future | None = None  # the next batch, while it is being sampled

    def take(self, step: int) -> tuple[list[Group], float]:
        """Return this rank's groups of a step and the seconds that sampling them took; begin the next where it may."""
        batch = self.ahead.result() if self.ahead else self.sample(step)
        if self.cfg.staleness and step + 1 < self.cfg.steps:
            self.ahead = self.thread.submit(self.sample, step + 1)
        return batch

    def settle(self) -> None:
        """Wait until nobody samples, so that the weights may change: all tokens of a batch are of one version."""
        if self.ahead:
            wait([self.ahead])

    def sample(self, step: int) -> tuple[list[Group], float]:
        cfg, started = self.cfg, time.perf_counter()
        tasks, ks = [], []
        for task, epoch, before in self.dataset.batch(step, cfg.batch_tasks, rank(), world_size()):
            if before:  # K and all seeds are drawn by the name, so a row that the batch has twice needs two
                task = replace(task, id=f"{task.id}#{before + 1}")
            tasks.append(task)
            ks.append(draw_frames(task.id, epoch, cfg.choices_of_k, cfg.seed))  # nFrames gating
        groups = rollout(
            tasks, ks, cfg.group_size, **self.surroundings, cfg=cfg.rollout,
            seed=cfg.seed, step=step, progress=rank() == 0 and sys.stderr.isatty(), stopped=self.stopped,
        )  # fmt: skip
        return groups, time.perf_counter() - started

    def __enter__(self) -> "Sampler":
        return self

    def __exit__(self, error, *_) -> None:
        self.stopped.set()
        if error:
            self.engine.close()  # nobody waits for a batch that is not wanted: what was asked fails now
        self.thread.shutdown()


def shared_engine(source: Path, renderer: Renderer, cfg: RolloutConfig) -> Engine:
    """Open the engine in this process, or servers: rank 0 starts and supervises them, the other ranks connect."""
    if not cfg.gpus:
        return open_engine(source, renderer, urls=cfg.urls, max_batch_tokens=cfg.max_batch_tokens)
    engine = None
    if rank() == 0:
        engine = open_engine(source, renderer, gpus=cfg.gpus, server_args=cfg.server_args, max_context=cfg.max_context)
    urls = gather(engine.urls if engine else None)[0]
    return engine or open_engine(source, renderer, urls=urls)


def publish(policy: Policy, engine: Engine, cfg: RLConfig, source: Path, snapshot: Path, version: int) -> None:
    """Give the policy's weights to the engines: a snapshot in safetensors, which each of them loads.

    The snapshot stays until the next one, since a server that restarts reads it again."""
    export(policy, snapshot, source, cfg.visual)
    if device().index in cfg.rollout.gpus:  # one GPU for both: what this process keeps for later, the server needs now
        torch.cuda.empty_cache()
    servers = bool(cfg.rollout.gpus or cfg.rollout.urls)  # which all ranks share
    if rank() == 0 or not servers:
        engine.update_weights(snapshot, version)
        barrier()
    else:
        barrier()  # rank 0 has loaded them into the servers
        engine.update_weights(snapshot, version, push=False)


# ------------------------------------------------------------------------------------------------ the update


def update(
    policy: Policy, reference: Policy | None, optimizer, lessons: list[Lesson], cfg: RLConfig, step: int
) -> tuple[dict[str, float], bool]:
    """Take one AdamW step per minibatch, over the lessons of all ranks. Return what was measured, and whether a gradient
    was not finite, so that its step was skipped."""
    temperature = cfg.rollout.temperature

    # Deal the lessons out into minibatches of micro-batches, each with its pi_prox: the policy before the first update.
    # With one minibatch that is pi itself (None). A minibatch is empty on all ranks or on none.
    minibatches = []
    for i in range(cfg.minibatches):
        minibatch = []
        for micro in micro_batches(lessons[i :: cfg.minibatches], cfg.train_tokens):
            prox = None
            if cfg.minibatches > 1:
                with torch.no_grad():
                    prox = policy(bundles(micro), temperature).logprobs
            minibatch.append((micro, prox))
        if minibatch:
            minibatches.append(minibatch)

    sums, norms = {"tokens": 0.0, "loss": 0.0}, []
    for minibatch in minibatches:
        for micro, prox in minibatch:
            # Policy and reference, at the temperature of sampling; a frozen vision tower works once for both.
            features = policy.encode(bundles(micro)) if policy.vision_frozen else None
            scores = policy(bundles(micro), temperature, features)
            ref_logprobs = None
            if reference is not None:
                with torch.no_grad():
                    ref_logprobs = reference(bundles(micro), temperature, features).logprobs

            # Each lesson's weight is its share of the batch; a minibatch is an update of its own, so it weighs as a batch.
            loss, watched = lessons_loss(scores, micro, prox, ref_logprobs, cfg)
            (loss * len(minibatches)).backward()

            sums["tokens"] += len(scores.logprobs)
            sums["loss"] += loss.item()
            for name, values in watched.items():
                sums[name] = sums.get(name, 0.0) + values.sum().item()
        norms.append(optimizer_step(policy, optimizer, cfg.optim, step, cfg.steps))

    # Means over the tokens of all ranks; the loss is a mean already.
    sums = sum_over_ranks(sums)
    tokens, loss = max(1.0, sums.pop("tokens")), sums.pop("loss")
    measured = {"gap": 0.0, "entropy": 0.0} | {name: value / tokens for name, value in sums.items()}
    norm = float(np.mean(norms)) if norms else 0.0
    measured |= {"loss": loss, "learned_tokens": tokens, "grad_norm": norm, "lr": optimizer.param_groups[0]["lr"]}
    return measured, not math.isfinite(norm)


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
    """Return means over all ranks: of groups (share/K, flat_groups), of all episodes (failed_rate), of calls
    (call_errors/...), else of the episodes that ran. kappa is executed calls per episode, fmt the paper's f. `ks`: the K
    that may be drawn."""
    seen: dict[str, list[float]] = defaultdict(list)
    for group in groups:
        for k in ks:
            seen[f"share/K={k}"].append(group.k == k)
        seen["flat_groups"].append(not any(e.advantage or e.anchor_advantage for e in group.episodes))
        for episode in group.episodes:
            seen["failed_rate"].append(bool(episode.error))

    ran = [episode for group in groups for episode in group.episodes if not episode.error]
    # A tool may have kinds of errors of its own; all ranks must count the same ones.
    kinds = set(CALL_ERRORS)
    for theirs in gather({call.error for episode in ran for call in episode.calls if call.error}):
        kinds |= theirs
    for episode in ran:
        for name, value in episode.reward.items():
            seen[name].append(value)
        did = "called" if episode.executed else "skipped"
        seen[f"acc/K={episode.k}"].append(episode.reward["acc"])
        seen[f"acc/K={episode.k}/{did}"].append(episode.reward["acc"])
        seen["kappa"].append(episode.executed)
        seen[f"kappa/K={episode.k}"].append(episode.executed)
        for name in TOOLS:
            seen[f"calls/{name}"].append(sum(call.name == name and not call.error for call in episode.calls))
        for call in episode.calls:
            for kind in kinds:
                seen[f"call_errors/{kind}"].append(call.error == kind)
        seen["truncated_rate"].append(episode.main.finish == "length")
        seen["turns"].append(len(episode.main.turns))
        seen["sampled_tokens"].append(sum(episode.main.mask))
        versions = [version for version in episode.main.versions if version >= 0]
        if versions:
            seen["staleness"].append(step - sum(versions) / len(versions))
    return mean_over_ranks(seen)


def speed(
    groups: Sequence[Group], lessons: Sequence[Lesson], policy: PolicyConfig, clock: Clock, sampling_seconds: float
) -> dict[str, float]:
    """Return tokens per second of all ranks together; sampling may lie within the training of the last step."""
    agents = [agent for group in groups for episode in group.episodes for agent in episode.trajectories]
    sampled = sum(sum(agent.mask) for agent in agents)
    packed = sum(len(lesson.bundle) for lesson in lessons)
    tokens = sum_over_ranks({"sampled": float(sampled), "packed": float(packed)})
    sampling = max(gather(sampling_seconds))
    training = max(gather(clock.seconds["train_seconds"]))
    return {
        "sampling_seconds": sampling,
        "sampled_tokens_per_second": tokens["sampled"] / sampling,
        "trained_tokens_per_second": tokens["packed"] / training,
        **utilisation(policy, int(tokens["packed"]), training, world_size()),
    }


def held_out_tasks(cfg: RLConfig) -> list[Task]:
    """Return this rank's share of the tasks that are evaluated."""
    if not cfg.val:
        return []
    rows = Dataset(cfg.val, parse_task)
    return [task for task, *_ in rows.batch(0, min(cfg.val_tasks, len(rows)), rank(), world_size())]


def evaluate(
    tasks: Sequence[Task], engine: Engine, renderer: Renderer, videos: Videos, cfg: RLConfig, judge: Judge | None = None
) -> dict[str, float]:
    """Return the greedy accuracy on held-out tasks at each K of `val_frames`: as the policy likes, and without tools."""
    asked, ks = [], []
    for task in tasks:
        for k in cfg.val_frames or (cfg.visual.overview_frames,):
            asked.append(task)
            ks.append(k)
    seen: dict[str, list[float]] = defaultdict(list)
    for name, dispatch in (("eval", cfg.rollout.dispatch), ("eval_no_tools", "none")):
        greedy = replace(cfg.rollout, temperature=0.0, dispatch=dispatch)
        groups = rollout(asked, ks, 1, engine=engine, renderer=renderer, videos=videos, cfg=greedy, progress=False)
        give_rewards(groups, renderer, cfg.reward, judge)
        for group in groups:
            [episode] = group.episodes
            seen[f"{name}/failed_rate"].append(bool(episode.error))
            if episode.error:
                continue
            values = {"acc": episode.reward["acc"], "strict": episode.reward["strict"]}
            if dispatch != "none":
                values["kappa"] = episode.executed
            for part, value in values.items():
                seen[f"{name}/{part}"].append(value)
                seen[f"{name}/{part}/K={group.k}"].append(value)
    return mean_over_ranks(seen)


# ------------------------------------------------------------------------------------------------ before it starts


def check_memory(cfg: RLConfig) -> None:
    """Print the plan of trainer and engine; PlanError if they do not fit."""
    plans = [plan_updates(cfg, cfg.gpus)]
    if cfg.rollout.gpus:
        plans.append(plan_engine(cfg.policy, len(cfg.rollout.gpus), *engine_load(cfg)))
    if set(cfg.rollout.gpus) & set(range(cfg.gpus)):
        plans = [Plan("training and engine on the same GPU", [row for plan in plans for row in plan.rows])]
    for plan in plans:
        print0(plan.table(cfg.gpu_gib))
        plan.check(cfg.gpu_gib)


def check_hardware(cfg: RLConfig) -> None:
    """Refuse a run that has no room on this machine's GPUs or disk."""
    check_servers(cfg.rollout, world_size())
    if torch.cuda.is_available():
        check_memory(replace(cfg, gpus=world_size()))
    check_disk(cfg.policy, cfg.keep, cfg.run)


def dry_run(cfg: RLConfig) -> int:
    """Check memory, data and disk without loading weights; exit status 1 if there is no cold start yet."""
    check_memory(cfg)
    check_rows(parse_task, cfg.data, cfg.val)
    print(f"data: {Dataset(cfg.data, parse_task).total} rows")
    print(check_disk(cfg.policy, cfg.keep, cfg.run))
    if cfg.policy.family and not Path(cfg.policy.checkpoint).exists():
        print(f"policy.checkpoint: {cfg.policy.checkpoint} is not there yet; the plan is that of {cfg.policy.family}")
        return 1
    return 0


if __name__ == "__main__":
    user_errors = (config.ConfigError, ContractError, DataError, EngineError, FileNotFoundError, PlanError)
    config.run_script(dry_run if args.dry_run else main, cfg, FloatingPointError, *user_errors)
