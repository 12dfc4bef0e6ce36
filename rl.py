"""rl.py: PARA-GRPO, and plain GRPO as its special case.

    torchrun --standalone --nproc_per_node=4 rl.py configs/paragrpo_8b.yaml     # GPUs 4-7 sample, the others train
    python rl.py configs/toy_paragrpo.yaml                                      # the same code on a CPU
    python rl.py configs/toy_grpo.yaml steps=20                                 # accuracy-only GRPO, for contrast

A step samples B tasks at one K each (nFrames gating) with G episodes each, rewards the episodes, compares them within
their group (advantages), takes an AdamW step on the loss and gives the new weights to the engine. The run leaves
RUN/metrics.jsonl, RUN/episodes/ (what was said), RUN/state/ (to resume from) and RUN/model/ (the result).

The equations are in grpo.py; plain GRPO is the same loop without anchor, prefix and gating. With `staleness: 1` the
episodes of the next step are sampled, by the weights of the last one, while this one trains. (A resumed run samples its
first batch by the newest weights; with `staleness: 0` and the engine in this process it is the uninterrupted run.)

Deliberately missing: batches that are more than one update old, trainers that come and go.
"""

import contextlib
import os
import shutil
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from data import CALL_ERRORS, Episode, Group, Task, draw_k, overview, parse_task
from grpo import GRPOConfig, TrainExample, assign_advantages, bundles, examples_loss, make_examples, micro_batches
from rewards import TAG, RewardConfig, give_rewards
from rollout import RolloutConfig, keep_episodes, open_engine, rollout
from runtime.checks import RunConfig, check_servers, open_run
from runtime.config import ConfigError, command_line, refuse_below_1, run_script
from runtime.dataset import Dataset
from runtime.distributed import (
    barrier,
    device,
    export,
    gather,
    init_distributed,
    local_rank,
    local_size,
    mean_over_ranks,
    place,
    print0,
    rank,
    saved_step,
    snapshot_folder,
    sum_over_ranks,
    world_size,
)
from runtime.doctor import check_gap, refuse_empty, self_check
from runtime.engine import Engine
from runtime.judge import Judge
from runtime.plan import plan_rl, utilisation
from runtime.policy import Policy, load, make_optimizer, optimizer_step, sum_over_nodes
from runtime.render import Renderer
from runtime.run import USER_ERRORS, Run, check_room, dry_run
from runtime.servers import IMAGES, on_this_machine
from runtime.video import VideoError, Videos
from tools import TOOLS


@dataclass(frozen=True, kw_only=True)
class RLConfig(RunConfig):
    """One RL run."""

    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    grpo: GRPOConfig = GRPOConfig()
    gating: tuple[int, ...] = (4, 8, 16, 32, 64)
    """nFrames gating: K is drawn from these, once per task and epoch. [] switches it off: visual.overview_frames."""
    steps: int = 54
    batch_tasks: int = 8
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
    """Draws K and, in the engine in this process, tokens. `data.seed` draws the order of the rows."""

    def __post_init__(self):
        super().__post_init__()
        refuse_below_1(self, "batch_tasks", "minibatches", "val_tasks")
        temperature, agents = self.rollout.temperature, self.rollout.subagents
        if temperature == 0:
            raise ValueError("rollout.temperature = 0: greedy episodes of a group are all alike")
        if agents.train and agents.temperature != temperature:
            raise ValueError(f"rollout.subagents.train needs rollout.subagents.temperature = {temperature}")
        if self.rollout.server_gpus and self.rollout.urls:
            raise ValueError("rollout.server_gpus and rollout.urls: give one of the two")
        for k in (*self.gating, *self.val_frames):
            if k < 1:
                raise ValueError(f"gating or val_frames: {k}: an overview has at least 1 frame; gating = [] is off")

    @property
    def choices_of_k(self) -> tuple[int, ...]:
        return self.gating or (self.visual.overview_frames,)


SHOWN = ("R", "R_acc", "f", "well_formed", "kappa", "loss", "kl", "entropy", "logprob_gap", "grad_norm", "seconds")


def main(cfg: RLConfig) -> None:
    """Build the parts of a run, train to the last step, and export the policy."""
    init_distributed()
    with open_run(cfg, parse_task, check_hardware) as (source, renderer), contextlib.ExitStack() as until_it_ends:
        per_node = on_this_machine(cfg.rollout.urls)  # servers elsewhere sample for all nodes
        images = IMAGES if cfg.rollout.server_gpus or cfg.rollout.urls else 0
        snapshots = until_it_ends.enter_context(snapshot_folder(cfg.run, source, per_node, images))
        # Servers start while the policy loads; where both share a GPU, afterwards: they take a share of what is free by then.
        overlapping_gpus = set(cfg.rollout.server_gpus) & set(range(local_size()))
        engine = None
        if not overlapping_gpus and saved_step(Path(cfg.run) / "state") < cfg.steps:
            engine = until_it_ends.enter_context(contextlib.closing(start_engine(source, renderer, cfg)))

        # The policy, the reference of the KL and the optimizer; then all that the newest state has of them.
        policy_cfg = replace(cfg.policy, checkpoint=str(source))
        policy, reference = load(policy_cfg, renderer.never_sampled), None
        if cfg.grpo.kl_coef:
            reference = load(policy_cfg, renderer.never_sampled, train=False)
            if policy.vision_frozen:  # one tower for both
                reference.model.model.visual = policy.vision
        run = Run(cfg, "rl", SHOWN, policy, make_optimizer(policy, cfg.optim))

        if run.done < cfg.steps:
            engine, videos = engine or start_engine(source, renderer, cfg), Videos(cfg.workers)
            with videos, Sampler(cfg, engine, renderer, videos, snapshots) as sampler:
                engine.wait_until_ready()
                barrier()  # a node's first rank has warmed its servers, and given up those that do not start
                # The engine has the checkpoint's weights; servers that already run may hold those of another run.
                if run.done or cfg.rollout.urls:
                    sampler.export(policy, run.done)
                    sampler.publish(run.done)
                train(cfg, policy, reference, sampler, run)
        run.export()


def train(cfg: RLConfig, policy: Policy, reference: Policy | None, sampler: "Sampler", run: Run) -> None:
    """Train to the last step: sample, reward, update, sync, log, save."""
    renderer, judge, held_out = sampler.renderer, Judge(cfg.reward.judge), []
    if cfg.val:  # this rank's share of the tasks that are evaluated
        val = Dataset(cfg.val, parse_task)
        draws = val.batch(0, min(cfg.val_tasks, len(val)), rank(), world_size())
        held_out = [draw.item for draw in draws]
    print0(f"sampling the first batch: {cfg.batch_tasks} x {cfg.grpo.group_size} episodes")
    for step in range(run.done, cfg.steps):
        clock = Clock()

        # Sample: this rank's groups of episodes.
        groups, clock.seconds["sampling_seconds"] = sampler.get(step)
        clock.lap("rollout")

        # Reward the episodes, turn rewards into advantages, and both into training examples.
        give_rewards(groups, renderer, cfg.reward, judge)
        refuse_empty(groups, step)
        assign_advantages(groups, cfg.grpo, cfg.reward.anchor)
        examples, total_tokens = make_examples(
            groups, renderer, cfg.grpo, cfg.reward.anchor, cfg.rollout.subagents.train
        )
        barrier()  # who is ahead waits here, not inside NCCL
        clock.lap("reward")

        # Update. Before the first one: does the trainer compute the engine's log-probs?
        if step == run.done:
            self_check(policy, groups, cfg.rollout.temperature, cfg.rollout.subagents.temperature)
        measured = update(policy, reference, run.optimizer, examples, total_tokens, cfg, step)
        clock.lap("train")

        # Sync: the new weights are written while the engine still samples, and loaded once it samples no more.
        sampler.export(policy, step + 1)
        clock.lap("export")
        sampler.wait()
        clock.lap("wait")
        sampler.publish(step + 1)
        clock.lap("publish")
        sampler.prefetch(step + 2)  # goes on during all that follows
        if local_rank() == 0:
            shutil.rmtree(sampler.snapshots / f"weights-{step}", ignore_errors=True)  # no server reads it any more

        # Log.
        measured |= describe(groups, cfg.choices_of_k, step)
        measured |= speed(examples, policy, clock.seconds["train_seconds"]) | clock.seconds
        measured |= sum_over_ranks({"bad_rows": len(sampler.dataset.bad)})
        if cfg.val and run.is_time(step, cfg.eval_every):
            measured |= evaluate(held_out, sampler, cfg, judge)
        if rank() == 0:
            keep_episodes(groups[: cfg.dump_groups], renderer, run.folder / "episodes" / f"step-{step:06d}.jsonl")
        run.log(step, measured)

        # Save.
        run.save(step)


# ------------------------------------------------------------------------------------------------ rollouts


class Sampler:
    """Samples batches by step number: when they are asked for, or (staleness 1) one step ahead, in a thread.

    staleness 1:  get(s) returns batch s, while batch s + 1 is sampled with the weights from before update s;
                  wait()   waits for batch s + 1; then update s is published, and prefetch(s + 2) begins at once."""

    def __init__(self, cfg: RLConfig, engine: Engine, renderer: Renderer, videos: Videos, snapshots: Path):
        self.cfg, self.dataset, self.engine, self.renderer = cfg, Dataset(cfg.data, parse_task), engine, renderer
        self.snapshots = snapshots  # the folder through which the engine gets its weights
        self.per_node = on_this_machine(cfg.rollout.urls)  # or one snapshot for all nodes
        self.thread, self.stopped = ThreadPoolExecutor(1, "sampler"), threading.Event()
        self.decoding = ThreadPoolExecutor(1, "look ahead")
        self.ahead: dict[int, Future] = {}  # by step: batches that nobody has taken yet
        self.rollout = partial(rollout, engine=engine, renderer=renderer, videos=videos, stopped=self.stopped)
        self.videos = videos

    def get(self, step: int) -> tuple[list[Group], float]:
        """Return this rank's groups of a step and the seconds that sampling them took; begin the next where it may."""
        batch = self.ahead.pop(step).result() if step in self.ahead else self.sample(step)
        self.prefetch(step + 1)
        return batch

    def prefetch(self, step: int) -> None:
        """Begin to sample the batch of a step, if it may be sampled ahead, will be needed and is not under way."""
        if self.cfg.staleness and step < self.cfg.steps and step not in self.ahead:
            self.ahead[step] = self.thread.submit(self.sample, step)

    def wait(self) -> None:
        """Wait until no rank samples, so that the weights may change: all tokens of a batch are of one version."""
        wait(self.ahead.values())
        barrier()

    def sample(self, step: int) -> tuple[list[Group], float]:
        cfg, started = self.cfg, time.perf_counter()
        if step + 1 < cfg.steps:
            self.decoding.submit(self.look_ahead, *self.draw(step + 1))
        tasks, ks = self.draw(step)
        size, progress = cfg.grpo.group_size, rank() == 0 and sys.stderr.isatty()
        groups = self.rollout(tasks, ks, size, cfg=cfg.rollout, seed=cfg.seed, step=step, progress=progress)
        # A row whose prompt cannot be rendered is a bad row.
        for task, group in zip(tasks, groups):
            kind, _, reason = group.episodes[0].error.partition(": ")
            if kind == "RowError":
                self.dataset.reject(task.id, reason)
        # A video that cannot be shown is counted as a bad row is, once, however many tasks ask about it.
        for task in tasks:
            for path in task.videos:
                if path in self.videos.unreadable:
                    self.dataset.reject(path, self.videos.unreadable[path])
        return groups, time.perf_counter() - started

    def draw(self, step: int) -> tuple[list[Task], list[int]]:
        """Return this rank's tasks of a step, and the K of each."""
        cfg, tasks, ks = self.cfg, [], []
        draws = self.dataset.batch(step, cfg.batch_tasks, rank(), world_size(), count_ids=True)
        for task, epoch, repeat in draws:
            if repeat:  # K and all seeds are drawn by the name, so a name that the batch has twice needs two
                task = replace(task, id=f"{task.id}#{repeat + 1}")
            tasks.append(task)
            ks.append(draw_k(task.id, epoch, cfg.choices_of_k, cfg.seed))  # nFrames gating
        return tasks, ks

    def look_ahead(self, tasks: list[Task], ks: list[int]) -> None:
        """Decode the overviews of the next batch into the cache of `videos`, while the decoders have little to do."""
        for task, k in zip(tasks, ks):
            with contextlib.suppress(VideoError):  # the next request for it raises
                overview(task, k, self.videos, self.renderer.contract)

    def export(self, policy: Policy, version: int) -> None:
        """Write a snapshot of the policy, in safetensors. A server that restarts meanwhile still reads the one before. Servers
        of our own have begun with the checkpoint, so they have the weights that do not train."""
        target, frozen = self.snapshots / f"weights-{version}", not self.cfg.rollout.server_gpus
        export(policy, target, policy.cfg.checkpoint, self.cfg.visual, per_node=self.per_node, frozen=frozen)

    def publish(self, version: int) -> None:
        """Have the engines load a snapshot."""
        snapshot, serving = self.snapshots / f"weights-{version}", self.cfg.rollout
        # Where both share a GPU, the server needs now what this process keeps for later.
        if device().index in serving.server_gpus:
            torch.cuda.empty_cache()
        me, _ = place(self.per_node)
        pushes = me == 0 or not (serving.server_gpus or serving.urls)
        if pushes:
            self.engine.update_weights(snapshot, version)
        barrier()
        if not pushes:  # the first rank has loaded them into the servers, which the others share
            self.engine.update_weights(snapshot, version, push=False)
        barrier()  # from now on nobody reads an older snapshot

    def __enter__(self) -> "Sampler":
        return self

    def __exit__(self, *_) -> None:
        self.stopped.set()
        self.engine.close()  # nobody waits for a batch that is not wanted: what was asked fails now
        self.thread.shutdown()


def start_engine(source: Path, renderer: Renderer, cfg: RLConfig) -> Engine:
    """Open the engine in this process, or begin to start servers: a node's first rank supervises them, its others
    connect."""
    serving, engine = cfg.rollout, None
    if not serving.server_gpus:
        return open_engine(source, renderer, urls=serving.urls, max_batch_tokens=serving.max_batch_tokens, wait=False)
    if local_rank() == 0:
        logs = Path(cfg.run) / "logs"
        if rank() > 0:
            logs /= f"node-{rank() // local_size()}"
        engine = open_engine(
            source, renderer, gpus=serving.server_gpus, tensor_parallel=serving.tensor_parallel, server_args=serving.server_args,
            max_context=serving.max_context, logs=logs, wait=False,
        )  # fmt: skip
    urls = gather(engine.urls if engine else None)[rank() - local_rank()]
    return engine or open_engine(source, renderer, urls=urls, wait=False)


# ------------------------------------------------------------------------------------------------ the update


def update(
    policy: Policy, reference: Policy | None, optimizer, examples: list[TrainExample], total_tokens: float, cfg: RLConfig,
    step: int,
) -> dict[str, float]:  # fmt: skip
    """Take one AdamW step per minibatch, over the examples of all ranks. Return what was measured; `grad_norm` is not finite
    if one of the gradients was not, whose step was skipped."""
    temperature = cfg.rollout.temperature

    # Deal the examples out into minibatches of micro-batches. A minibatch is empty on all ranks or on none.
    minibatches = []
    for i in range(cfg.minibatches):
        minibatch = micro_batches(examples[i :: cfg.minibatches], cfg.grpo.train_tokens)
        if minibatch:
            minibatches.append(minibatch)

    sums, norms, gaps = {"tokens": 0.0, "loss": 0.0}, [], [0.0]
    proximal = proximal_logprobs(policy, minibatches, temperature)
    for minibatch, prox_of_minibatch in zip(minibatches, proximal):
        for i, (micro, prox_logprobs) in enumerate(zip(minibatch, prox_of_minibatch)):
            # Policy and reference, at the temperature of sampling; a frozen vision tower works once for both.
            features = policy.encode(bundles(micro)) if policy.vision_frozen else None
            scores = policy(bundles(micro), temperature, features)
            ref_logprobs = None
            if reference is not None:
                with torch.no_grad():
                    ref_logprobs = reference(bundles(micro), temperature, features).logprobs

            # The loss divides by all tokens of the batch. Each minibatch is its own optimizer step, so scale its share back up.
            loss, stats = examples_loss(scores, micro, total_tokens, prox_logprobs, ref_logprobs, cfg.grpo)
            sum_over_nodes(policy, now=i + 1 == len(minibatch))
            (loss * len(minibatches)).backward()

            sums["tokens"] += len(scores.logprobs)
            sums["loss"] += loss.item()
            for name, values in stats.items():
                sums[name] = sums.get(name, 0.0) + values.sum().item()
            gaps += stats["logprob_gap"].tolist()
        norms.append(optimizer_step(policy, optimizer, cfg.optim, step, cfg.steps))

    # Means over the tokens of all ranks; the loss is a mean already.
    sums = sum_over_ranks(sums)
    tokens, loss = max(1.0, sums.pop("tokens")), sums.pop("loss")
    measured = {"logprob_gap": 0.0, "entropy": 0.0} | {name: value / tokens for name, value in sums.items()}
    measured["logprob_gap_max"] = float(np.max(gather(np.max(gaps))))  # NaN if one of them is
    check_gap(measured["logprob_gap"], measured["logprob_gap_max"], step)
    return measured | {"loss": loss, "learned_tokens": tokens, "grad_norm": float(np.mean(norms or [0.0]))}


@torch.no_grad()
def proximal_logprobs(policy: Policy, minibatches: list, temperature: float) -> list[list[Tensor | None]]:
    """Return log pi_prox of every micro-batch, by minibatch: of the policy before the first update. With one minibatch that
    is pi itself (None)."""
    found = []
    for minibatch in minibatches:
        if len(minibatches) > 1:
            found.append([policy(bundles(micro), temperature).logprobs for micro in minibatch])
        else:
            found.append([None] * len(minibatch))
    return found


# ------------------------------------------------------------------------------------------------ what happened


class Clock:
    """Seconds per phase, on this rank."""

    def __init__(self):
        self.seconds, self._last = {"seconds": 0.0}, time.perf_counter()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[f"{phase}_seconds"] = now - self._last
        self.seconds["seconds"] += now - self._last
        self._last = now


def describe(groups: Sequence[Group], ks: Sequence[int], step: int) -> dict[str, float]:
    """Return means over all ranks: of groups (share/K, flat_groups), of all episodes (failed_rate), of calls
    (call_errors/..., calls/distinct), of sub-agents' reports (report/...), else of the episodes that ran. kappa: executed
    calls per episode; `ks`: the K that are drawn."""
    seen: dict[str, list[float]] = defaultdict(list)
    for group in groups:
        for k in ks:
            seen[f"share/K={k}"].append(group.k == k)
        seen["flat_groups"].append(not any(e.advantage or e.anchor_advantage for e in group.episodes))
        for episode in group.episodes:
            seen["failed_rate"].append(bool(episode.error))

    ran = [episode for group in groups for episode in group.episodes if not episode.error]
    # A tool may have kinds of errors of its own; all ranks must count the same ones.
    own = {call.error for episode in ran for call in episode.calls if call.error}
    kinds = set(CALL_ERRORS).union(*gather(own))
    for episode in ran:
        for name, value in episode.rewards.items():
            seen[name].append(value)
        did = "called" if episode.executed else "skipped"
        seen[f"acc/K={episode.k}"].append(episode.rewards["R_acc"])
        seen[f"acc/K={episode.k}/{did}"].append(episode.rewards["R_acc"])
        seen["kappa"].append(episode.executed)
        seen[f"kappa/K={episode.k}"].append(episode.executed)
        for name in TOOLS:
            seen[f"calls/{name}"].append(sum(call.name == name and not call.error for call in episode.calls))
        seen["calls/distinct"] += are_distinct(episode)
        for call in episode.calls:
            for kind in kinds:
                seen[f"call_errors/{kind}"].append(call.error == kind)
            if call.subagent:  # a report ends by itself, in a few words, and has no tags
                seen["report/ended"].append(call.subagent.finish == "stop")
                seen["report/tokens"].append(call.subagent.n_sampled)
                seen["report/tagged"].append(bool(TAG.search(call.text)))
        seen["truncated_rate"].append(episode.main.finish == "length")
        seen["turns"].append(len(episode.main.turns))
        seen["sampled_tokens"].append(episode.main.n_sampled)
        seen["critical_tokens"].append(episode.critical_tokens)
        seen["all_tokens"].append(episode.all_tokens)
        versions = [version for version in episode.main.versions if version >= 0]
        if versions:
            seen["staleness"].append(step - sum(versions) / len(versions))
    return mean_over_ranks(seen)


def are_distinct(episode: Episode) -> list[bool]:
    """Return, for each executed call with a window, whether no earlier one of the episode covers more than half of it."""
    distinct = []
    earlier: dict[str, list[tuple[float, float]]] = defaultdict(list)  # the windows of each video
    for call in episode.calls:
        if call.error or call.window is None:
            continue
        video = ""
        if len(episode.task.videos) > 1:
            video = os.path.basename(str(call.arguments.get("video_path")))
        start, end = call.window
        covered = [min(end, e) - max(start, s) for s, e in earlier[video]]
        distinct.append(max(covered, default=0.0) <= (end - start) / 2)
        earlier[video].append(call.window)
    return distinct


def speed(examples: list[TrainExample], policy: Policy, seconds: float) -> dict[str, float]:
    """Return the tokens per second that all ranks train on together, and how well that uses the GPUs."""
    tokens = sum(gather(sum(len(example.bundle) for example in examples)))
    slowest = max(gather(seconds))
    return {"trained_tokens_per_second": tokens / slowest, **utilisation(policy.cfg, tokens, slowest, world_size())}


def evaluate(tasks: Sequence[Task], sampler: Sampler, cfg: RLConfig, judge: Judge | None = None) -> dict[str, float]:
    """Return the greedy accuracy on held-out tasks at each K of `val_frames`: as the policy likes, and without tools."""
    asked, ks = [], []
    for task in tasks:
        for k in cfg.val_frames or (cfg.visual.overview_frames,):
            asked.append(task)
            ks.append(k)
    seen: dict[str, list[float]] = defaultdict(list)
    subagents = replace(cfg.rollout.subagents, temperature=0.0)
    for name, dispatch in (("eval", cfg.rollout.dispatch), ("eval_no_tools", "none")):
        greedy = replace(cfg.rollout, temperature=0.0, subagents=subagents, dispatch=dispatch)
        groups = sampler.rollout(asked, ks, 1, cfg=greedy, progress=False, stopped=None)  # not stopped with the sampler
        give_rewards(groups, sampler.renderer, cfg.reward, judge)
        for group in groups:
            [episode] = group.episodes
            seen[f"{name}/failed_rate"].append(bool(episode.error))
            if episode.error:
                continue
            rewards = episode.rewards
            values = {"acc": rewards["R_acc"], "well_formed": rewards["well_formed"], "kappa": episode.executed}
            for part, value in values.items():
                seen[f"{name}/{part}"].append(value)
                seen[f"{name}/{part}/K={group.k}"].append(value)
    return mean_over_ranks(seen)


# ------------------------------------------------------------------------------------------------ before it starts


def check_hardware(cfg: RLConfig) -> None:
    """Refuse a run whose servers cannot start, or that has no room on this machine's GPUs."""
    if cfg.batch_tasks < world_size():
        raise ConfigError(f"batch_tasks = {cfg.batch_tasks}: each of {world_size()} ranks needs a task; raise it")
    check_servers(cfg.rollout, local_size())
    check_room(cfg, plan_rl)


if __name__ == "__main__":
    cfg, args = command_line(RLConfig, __doc__)
    check = partial(dry_run, parse=parse_task, plans=plan_rl)
    run_script(check if args.dry_run else main, cfg, *USER_ERRORS)
