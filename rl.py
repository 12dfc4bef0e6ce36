"""rl.py: PARA-GRPO, and plain GRPO as its special case.

    torchrun --nproc_per_node=7 rl.py configs/paragrpo_8b.yaml     # GPU 7 samples, the others train
    python rl.py configs/toy_paragrpo.yaml                         # the same code on a CPU
    python rl.py configs/toy_grpo.yaml steps=20                    # accuracy-only GRPO, for contrast

A step: B tasks -> one K each (nFrames gating) -> G episodes each -> rewards -> advantages -> loss -> AdamW -> weights to
the engine. RUN/metrics.jsonl, RUN/episodes/ (what was said), RUN/state/ (to resume from), RUN/model/ (the result).

The equations are in grpo.py; plain GRPO is the same loop without anchor, prefix and gating.

Deliberately missing: generation that overlaps training.
"""

import math
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

import config
from contract import ContractError, Renderer, VisualContract, load_tokenizer
from data import Group, draw_frames
from dataset import DataConfig, Dataset, RowError, parse_task
from distributed import (
    barrier,
    checkpoint_dir,
    export,
    gather,
    init_distributed,
    load_state,
    print0,
    rank,
    save_state,
    sum_over_ranks,
)
from engine import Engine, EngineError, open_engine
from grpo import GRPOConfig, Lesson, bundles, group_advantage, lessons_loss, make_lessons, micro_batches
from plan import PlanError, plan_engine, plan_training
from policy import OptimConfig, Policy, PolicyConfig, clip_gradients, load, make_optimizer, set_lr
from rewards import JudgeError, RewardConfig, score
from rollout import RolloutConfig, dump, rollout
from video import Videos


@dataclass(frozen=True, kw_only=True)
class RLConfig(GRPOConfig):
    """One RL run."""

    run: str
    """Folder of everything the run leaves."""
    policy: PolicyConfig
    """Where the policy starts; the reference of the KL is the same checkpoint."""
    data: DataConfig
    visual: VisualContract = VisualContract()
    optim: OptimConfig = OptimConfig()
    gating: tuple[int, ...] = (4, 8, 16, 32, 64)
    """nFrames gating: K is drawn from these, once per task and epoch. [] switches it off: visual.overview_frames."""
    steps: int = 54
    batch_tasks: int = 56
    """B: tasks of a step, over all ranks."""
    minibatches: int = 1
    """Updates per batch."""
    gap_limit: float = 0.5
    """The first batch stops the run if log pi of trainer and engine differ more than this on average."""
    save_every: int = 10
    keep: int = 2
    resume: Literal["auto", "never"] = "auto"
    max_bad_steps: int = 5
    """As in sft.py: steps whose loss or gradient is not finite are skipped; more than this many stop the run."""
    dump_groups: int = 1
    """Groups per step whose episodes are kept in full, in RUN/episodes/."""
    seed: int = 0
    decoders: int = 2
    """Video decoder processes per rank."""
    gpus: int = 7
    """Training GPUs that --dry-run plans for; torchrun decides how many there are ..."""
    gpu_gib: float = 80.0
    """... and the machine, how much memory each has."""

    def __post_init__(self):
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
        if self.group_size < 2:
            raise ValueError(f"group_size = {self.group_size}: an advantage compares at least 2 episodes")
        if min(self.steps, self.batch_tasks, self.minibatches, self.train_tokens, self.save_every, self.keep) < 1:
            raise ValueError("steps, batch_tasks, minibatches, train_tokens, save_every, keep: must be at least 1")
        if self.rollout.tool_return == "frames":
            raise ValueError("rollout.tool_return = 'frames' is for evaluation: rewards and credit assume reports")


SHOWN = ("reward", "acc", "fmt", "strict", "kappa", "loss", "kl", "entropy", "gap", "grad_norm", "seconds")


def main(cfg: RLConfig) -> None:
    """Train from the newest state of the run, or from its checkpoint, to the last step; export the policy."""
    me, world = init_distributed()
    torch.manual_seed(cfg.seed)
    run, source = Path(cfg.run), checkpoint_dir(cfg.policy.checkpoint)
    cfg.visual.check(source)
    renderer = Renderer(load_tokenizer(source), cfg.visual)
    dataset = Dataset(cfg.data, parse_task)
    policy = load(cfg.policy, renderer.never_sampled)
    reference = load(cfg.policy, renderer.never_sampled, train=False) if cfg.kl else None
    optimizer = make_optimizer(policy, cfg.optim)
    done, counted = load_state(run / "state", policy, optimizer) if cfg.resume == "auto" else (0, {})
    bad_steps = counted.get("bad_steps", 0)
    engine = shared_engine(source, renderer, cfg.rollout)
    if done:
        publish(policy, engine, cfg, source, done)
    metrics = None
    if me == 0:
        config.save_run(cfg, run)
        metrics = config.Metrics(run, "rl", done, cfg.steps, SHOWN)
    with Videos(cfg.decoders, quarantine=run / "bad_videos.jsonl") as videos:
        for step in range(done, cfg.steps):
            clock = Clock()
            drawn = dataset.batch(step, cfg.batch_tasks, me, world)
            tasks, ks = [task for task, _ in drawn], [choose_k(cfg, task.id, epoch) for task, epoch in drawn]
            stage = {"engine": engine, "renderer": renderer, "videos": videos, "cfg": cfg.rollout}
            groups = rollout(
                tasks, ks, cfg.group_size, **stage, seed=cfg.seed, step=step, progress=me == 0 and sys.stderr.isatty()
            )
            clock.lap("rollout")

            lost = give_rewards(groups, renderer, cfg.reward)
            lessons = make_lessons(groups, renderer, cfg)
            clock.lap("reward")

            measured, bad = update(policy, reference, optimizer, lessons, cfg, step)
            bad_steps += bad
            clock.lap("train")

            publish(policy, engine, cfg, source, step + 1)
            clock.lap("publish")

            measured |= describe(groups, cfg.std_floor) | clock.seconds | {"bad_steps": bad_steps}
            measured |= sum_over_ranks({"lost_judgements": lost, "bad_rows": len(dataset.bad)})
            if metrics:
                keep_episodes(groups, renderer, run, step, cfg.dump_groups)
                metrics.write(step, measured)
            if step == done and measured["gap"] > cfg.gap_limit:
                raise EngineError(
                    f"trainer and engine disagree: their log-probs differ by {measured['gap']:.3f} on average, more than "
                    f"gap_limit = {cfg.gap_limit}. `python rollout.py doctor` finds the reason"
                )
            if bad_steps > cfg.max_bad_steps:
                raise FloatingPointError(
                    f"loss or gradient not finite in {bad_steps} steps, more than max_bad_steps = {cfg.max_bad_steps}: "
                    f"lower optim.lr; the episodes are in {run}/episodes"
                )
            if step + 1 == cfg.steps or (step + 1) % cfg.save_every == 0:
                save_state(run / "state", policy, optimizer, step + 1, cfg.keep, {"bad_steps": bad_steps})
    engine.close()
    if me == 0:
        shutil.rmtree(snapshot_folder(run), ignore_errors=True)
    export(policy, run / "model", source, cfg.visual)
    print0(f"done: {run}/model")


class Clock:
    """Seconds per phase, on this rank."""

    def __init__(self):
        self.seconds, self._last = {"seconds": 0.0}, time.perf_counter()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[f"{phase}_seconds"] = now - self._last
        self.seconds["seconds"] += now - self._last
        self._last = now


# ------------------------------------------------------------------------------------------------ rollouts


def choose_k(cfg: RLConfig, task_id: str, epoch: int) -> int:
    return draw_frames(task_id, epoch, cfg.gating, cfg.seed) if cfg.gating else cfg.visual.overview_frames


def shared_engine(source: Path, renderer: Renderer, cfg: RolloutConfig) -> Engine:
    """In this process, or servers: rank 0 starts and supervises them, the other ranks connect to the same."""
    if not cfg.gpus:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        options = {"device": device, "max_batch_tokens": cfg.max_batch_tokens}
        return open_engine(source, renderer, urls=cfg.urls, **options)
    engine = open_engine(source, renderer, gpus=cfg.gpus, server_args=cfg.server_args) if rank() == 0 else None
    urls = gather(engine.urls if engine else None)[0]
    return engine or open_engine(source, renderer, urls=urls)


def publish(policy: Policy, engine: Engine, cfg: RLConfig, source: Path, version: int) -> None:
    """The policy's weights become the engines': safetensors in memory where there is /dev/shm, then one load each.

    The snapshot stays until the next one, since a server that restarts reads it again."""
    snapshot = snapshot_folder(Path(cfg.run))
    export(policy, snapshot, source, cfg.visual)
    servers = bool(cfg.rollout.gpus or cfg.rollout.urls)  # which all ranks share: rank 0 loads, the others take note
    if rank() == 0 or not servers:
        engine.update_weights(snapshot, version)
    barrier("the engines have the new weights")
    if rank() > 0 and servers:
        engine.update_weights(snapshot, version, push=False)


def snapshot_folder(run: Path) -> Path:
    memory = Path("/dev/shm")
    return memory / f"minparavt{run.resolve().as_posix().replace('/', '-')}" if memory.is_dir() else run / "snapshot"


def give_rewards(groups: Sequence[Group], renderer: Renderer, cfg: RewardConfig) -> int:
    """Score every episode that ran; returns how many the judge failed on. Those earn nothing, not zero."""
    lost = 0
    for group in groups:
        for episode in group.episodes:
            if episode.error:
                continue
            try:
                episode.reward = score(episode, renderer, cfg)
            except JudgeError as error:
                lost += 1
                episode.error = f"JudgeError: {error}"
    return lost


# ------------------------------------------------------------------------------------------------ the update


def update(
    policy: Policy, reference: Policy | None, optimizer, lessons: list[Lesson], cfg: RLConfig, step: int
) -> tuple[dict[str, float], int]:
    """One AdamW step per minibatch, over the lessons of all ranks; returns what was measured and the steps skipped."""
    micro = micro_batches(lessons, cfg.train_tokens)
    prox = [None] * len(micro)  # with one minibatch, pi itself
    if cfg.minibatches > 1:
        with torch.no_grad():
            prox = [policy(bundles(part), cfg.rollout.temperature).logprobs for part in micro]
    sums, norms, bad = {"tokens": 0.0, "loss": 0.0}, [], 0
    for first in range(min(cfg.minibatches, len(micro))):
        for part, before in list(zip(micro, prox))[first :: cfg.minibatches]:
            features = policy.encode(bundles(part)) if policy.vision_frozen else None
            scores = policy(bundles(part), cfg.rollout.temperature, features)
            pulled_to = None
            if reference is not None:
                with torch.no_grad():
                    pulled_to = reference(bundles(part), cfg.rollout.temperature, features).logprobs
            loss, watched = lessons_loss(scores, part, before, pulled_to, cfg)
            (loss * cfg.minibatches).backward()
            for name, values in (watched | {"loss": loss.detach()}).items():
                sums[name] = sums.get(name, 0.0) + values.sum().item()
            sums["tokens"] += len(scores.logprobs)
        norms.append(clip_gradients(policy, cfg.optim.clip))
        if math.isfinite(norms[-1]):
            set_lr(optimizer, cfg.optim, step, cfg.steps)
            optimizer.step()
        else:
            bad += 1
        optimizer.zero_grad()
    sums = sum_over_ranks(sums)
    tokens, loss = max(1.0, sums.pop("tokens")), sums.pop("loss")
    means = {"gap": 0.0, "kl": 0.0, "entropy": 0.0} | {name: value / tokens for name, value in sums.items()}
    lr = optimizer.param_groups[0]["lr"]
    return means | {"loss": loss, "learned_tokens": tokens, "grad_norm": float(np.mean(norms or [0.0])), "lr": lr}, bad


# ------------------------------------------------------------------------------------------------ what happened


def describe(groups: Sequence[Group], floor: float) -> dict[str, float]:
    """Means over the episodes of all ranks that ran; kappa is executed calls per episode, fmt the paper's f."""
    episodes = [episode for group in groups for episode in group.episodes]
    ran = [episode for episode in episodes if not episode.error]
    seen: dict[str, list[float]] = {"failed_rate": [float(bool(episode.error)) for episode in episodes]}

    def note(name: str, value: float) -> None:
        seen.setdefault(name, []).append(float(value))

    for episode in ran:
        executed = sum(not call.error for call in episode.calls)
        for name, value in episode.reward.items():
            note(name, value)
        note("kappa", executed)
        note(f"kappa/K={episode.k}", executed)
        note(f"acc/K={episode.k}/{'called' if executed else 'skipped'}", episode.reward["acc"])
        note("truncated_rate", episode.main.finish == "length")
        note("turns", len(episode.main.turns))
        note("sampled_tokens", sum(episode.main.mask))
        for call in episode.calls:
            note("call_error_rate", bool(call.error))
    for group in groups:
        note(f"share/K={group.k}", 1)
        rewards = [episode.reward["reward"] for episode in group.episodes if not episode.error]
        note("flat_groups", not group_advantage(rewards, floor).any())
    totals = sum_over_ranks(
        {f"{what} {name}": f(v) for name, v in seen.items() for what, f in (("sum", sum), ("n", len))}
    )
    names = [name.removeprefix("sum ") for name in totals if name.startswith("sum ")]
    means = {name: totals[f"sum {name}"] / max(1, totals[f"n {name}"]) for name in names}
    drawn = totals.get("n flat_groups", 0.0)
    return means | {name: totals[f"n {name}"] / drawn for name in names if name.startswith("share/")}


def keep_episodes(groups: Sequence[Group], renderer: Renderer, run: Path, step: int, count: int) -> None:
    folder = run / "episodes"
    folder.mkdir(exist_ok=True)
    with (folder / f"step-{step:06d}.jsonl").open("w", encoding="utf-8") as file:
        for group in groups[:count]:
            for episode in group.episodes:
                dump(episode, file, renderer)


def dry_run(cfg: RLConfig) -> int:
    """The memory plan of trainer and engine, then the data; exit status 1 if the run could not start."""
    training = plan_training(cfg.policy, cfg.gpus, cfg.train_tokens, cfg.train_tokens, reference=cfg.kl > 0)
    rows = min(cfg.rollout.concurrency, cfg.batch_tasks * cfg.group_size)
    # A group shares its prompt's keys (about 80 tokens a frame); each episode is given two full turns.
    context = cfg.visual.overview_frames * 80 // cfg.group_size + 2 * cfg.rollout.max_new_tokens
    plans = [training, *([plan_engine(cfg.policy, len(cfg.rollout.gpus), rows, context)] if cfg.rollout.gpus else [])]
    for plan in plans:
        print(plan.table(cfg.gpu_gib))
        plan.check(cfg.gpu_gib)
    dataset = Dataset(cfg.data, parse_task)
    first = dataset.batch(0, cfg.batch_tasks)
    print(f"data: {dataset.total} rows; {len(first)} of the first {cfg.batch_tasks} are usable")
    return 0


if __name__ == "__main__":
    cfg, args = config.command_line(RLConfig, __doc__)
    try:
        sys.exit(dry_run(cfg) if args.dry_run else main(cfg))
    except (ContractError, EngineError, FileNotFoundError, PlanError, RowError) as error:
        sys.exit(f"error: {error}")
