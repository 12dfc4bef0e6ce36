"""rl.py: PARA-GRPO, and plain GRPO as its special case.

    torchrun --nproc_per_node=7 rl.py configs/paragrpo_8b.yaml     # GPU 7 samples, the others train
    python rl.py configs/toy_paragrpo.yaml                         # the same code on a CPU
    python rl.py configs/toy_grpo.yaml steps=20                    # accuracy-only GRPO, for contrast

A step: B tasks -> one K each (nFrames gating) -> G episodes each -> rewards -> advantages -> loss -> AdamW -> weights to
the engine. RUN/metrics.jsonl, RUN/episodes/ (what was said), RUN/state/ (to resume from), RUN/model/ (the result).

    A_i    = (R_i - mean_group R) / max(std_group R, floor)                    group-normalised advantage of episode i
    A_i,t  = A_i + lambda * A_anchor_i * 1[t in struct(o_i)]                   Selective Anchoring (credit: struct)
    l_i,t  = -w * min(r A, clip(r, 1 - eps, 1 + eps_high) A) + beta * KL       r = pi / pi_prox, w = pi_prox / pi_behaviour
    KL     = exp(d) - d - 1, d = log pi_ref - log pi                           (k3; the release puts its KL into the reward)
    L      = sum of l over all sampled tokens of all ranks / their number      (aggregation: token)

With one minibatch per batch (the paper), pi_prox is pi itself, so r = 1 and the clip is inert; with more, pi_prox is
computed before the first update. Tokens with w above `behaviour_cap` are left out, as in the release.

Deliberately missing: a value model, rewards on parts of an episode, generation that overlaps training.
"""

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

import config
from contract import ContractError, Renderer, VisualContract, load_tokenizer
from data import Bundle, Episode, Group, Trajectory, draw_frames
from dataset import DataConfig, Dataset, RowError, pack, parse_task
from distributed import (
    barrier,
    checkpoint_dir,
    export,
    gather,
    init_distributed,
    load_state,
    print0,
    save_state,
    sum_over_ranks,
)
from engine import Engine, EngineError, open_engine
from plan import PlanError, plan_engine, plan_training
from policy import OptimConfig, Policy, PolicyConfig, Scores, clip_gradients, load, make_optimizer, set_lr
from rewards import JudgeError, RewardConfig, score, structural_mask
from rollout import RolloutConfig, dump, rollout
from video import Videos


@dataclass(frozen=True)
class RLConfig:
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
    group_size: int = 8
    """G: episodes per task."""
    kl: float = 0.01
    """beta; 0 loads no reference."""
    clip: float = 0.2
    clip_high: float | None = None
    """eps_high; null: the same as clip."""
    std_floor: float = 1e-3
    """A group whose rewards vary less is flat. Fractional rewards leave a residue of rounding."""
    normalise: Literal["group", "mean", "batch"] = "group"
    """group: mean and std of the group; mean: its mean alone; batch: group, then mean and std of the batch."""
    aggregation: Literal["token", "sequence"] = "token"
    """token: mean over all tokens; sequence: mean over episodes of their tokens' mean."""
    minibatches: int = 1
    """Updates per batch."""
    behaviour_cap: float = 5.0
    train_tokens: int = 16_384
    """Tokens of a micro-batch. A group over it is split, and its prompt repeated."""
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
    rank, world = init_distributed()
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
    engine = shared_engine(source, renderer, cfg.rollout, rank)
    if done:
        publish(policy, engine, run, source, cfg.visual, done)
    metrics = None
    if rank == 0:
        config.save_run(cfg, run)
        metrics = config.Metrics(run, "rl", done, cfg.steps, SHOWN)
    with Videos(cfg.decoders, quarantine=run / "bad_videos.jsonl") as videos:
        for step in range(done, cfg.steps):
            clock = Clock()
            drawn = dataset.batch(step, cfg.batch_tasks, rank, world)
            tasks, ks = [task for task, _ in drawn], [choose_k(cfg, task.id, epoch) for task, epoch in drawn]
            stage = {"engine": engine, "renderer": renderer, "videos": videos, "cfg": cfg.rollout}
            groups = rollout(
                tasks, ks, cfg.group_size, **stage, seed=cfg.seed, step=step, progress=rank == 0 and sys.stderr.isatty()
            )
            clock.lap("rollout")

            lost = give_rewards(groups, renderer, cfg.reward)
            lessons = make_lessons(groups, renderer, cfg)
            clock.lap("reward")

            measured, bad = update(policy, reference, optimizer, lessons, cfg, step)
            bad_steps += bad
            clock.lap("train")

            publish(policy, engine, run, source, cfg.visual, step + 1)
            clock.lap("publish")

            measured |= describe(groups) | clock.seconds | {"bad_steps": bad_steps}
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


def shared_engine(source: Path, renderer: Renderer, cfg: RolloutConfig, rank: int) -> Engine:
    """In this process, or servers: rank 0 starts and supervises them, the other ranks connect to the same."""
    if not cfg.gpus:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        options = {"device": device, "max_batch_tokens": cfg.max_batch_tokens}
        return open_engine(source, renderer, urls=cfg.urls, **options)
    engine = open_engine(source, renderer, gpus=cfg.gpus, server_args=cfg.server_args) if rank == 0 else None
    urls = gather(engine.urls if engine else None)[0]
    return engine or open_engine(source, renderer, urls=urls)


def publish(policy: Policy, engine: Engine, run: Path, source: Path, contract: VisualContract, version: int) -> None:
    """The policy's weights become the engine's: safetensors in memory where there is /dev/shm, then one load.

    The snapshot stays until the next one, since a server that restarts reads it again."""
    memory = Path("/dev/shm")
    snapshot = (memory if memory.is_dir() else run) / f"minparavt{run.resolve().as_posix().replace('/', '-')}"
    export(policy, snapshot, source, contract)
    engine.update_weights(snapshot, version)
    barrier("the engines have the new weights")  # before the folder is written again


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


# ------------------------------------------------------------------------------------------------ advantages


def group_advantage(rewards: Sequence[float], floor: float, by_std: bool = True) -> np.ndarray:
    """A_i = (R_i - mean R) / max(std R, floor); all 0 where the group is flat. The std is the sample's (G - 1)."""
    r = np.asarray(rewards, np.float64)  # [G]
    spread = r.std(ddof=1) if len(r) > 1 else 0.0
    if spread < floor:
        return np.zeros(len(r))
    return (r - r.mean()) / (spread if by_std else 1.0)


@dataclass
class Lesson:
    """A bundle, and what the loss needs of each of its N target tokens."""

    bundle: Bundle
    advantage: np.ndarray  # float32 [N]
    behaviour: np.ndarray  # float32 [N]: the engine's log-probs
    weight: np.ndarray  # float32 [N]: share in the mean over the batch
    anchor: np.ndarray  # float32 [N]: share in the objective of credit `logp`


def make_lessons(groups: Sequence[Group], renderer: Renderer, cfg: RLConfig) -> list[Lesson]:
    """Advantages of this rank's groups, and their bundles. Normalisers are those of all ranks.

    A group is left out if nothing in it can be learned: R and R_anchor are flat, and no KL pulls. Its tokens still count
    in the mean."""
    anchor = cfg.reward.anchor
    ran = [[e for e in group.episodes if not e.error] for group in groups]
    advantages = [
        group_advantage([e.reward["reward"] for e in es], cfg.std_floor, cfg.normalise != "mean") for es in ran
    ]
    anchors = [group_advantage([e.reward["anchor"] for e in es], cfg.std_floor) for es in ran]
    if cfg.normalise == "batch":
        everyone = np.concatenate([a for rank in gather(advantages) for a in rank] or [np.zeros(1)])
        advantages = [(a - everyone.mean()) / max(everyone.std(), cfg.std_floor) for a in advantages]

    spoken = [[learned(e, cfg) for e in es] for es in ran]  # per group and episode: trajectories in the loss
    every = [t for es in spoken for ts in es for t in ts]
    tidy = sum(e.reward["strict"] for es in ran for e in es)
    mine = {"tokens": sum(sum(t.mask) for t in every), "agents": len(every), "tidy": tidy}
    total = sum_over_ranks({name: float(value) for name, value in mine.items()})

    lessons = []
    for es, a, r, trajectories in zip(ran, advantages, anchors, spoken):
        if not (a.any() or (anchor.credit == "struct" and r.any()) or (anchor.credit == "logp" and es) or cfg.kl):
            continue
        rows = []
        for episode, own, structural, agents in zip(es, a, r, trajectories):
            for trajectory in agents:
                main = trajectory is episode.main
                mask = np.array(trajectory.mask, bool)
                struct = (
                    np.array(structural_mask(trajectory, renderer), np.float32)[mask] if main else np.zeros(mask.sum())
                )
                advantage = np.full(mask.sum(), own)
                if anchor.credit == "struct":
                    advantage = advantage + anchor.scale * structural * struct
                pulled = anchor.credit == "logp" and episode.reward["strict"] and struct.any()
                pull = anchor.scale * struct / struct.sum() / total["tidy"] if pulled else np.zeros(len(struct))
                share = total["tokens"] if cfg.aggregation == "token" else total["agents"] * max(1, mask.sum())
                behaviour = np.array(trajectory.logprobs)[mask]
                rows.append((trajectory, [advantage, behaviour, np.full(mask.sum(), 1 / share), pull]))
        lessons += [make_lesson(part) for part in split_by_prompt(rows, cfg.train_tokens)]
    return lessons


def learned(episode: Episode, cfg: RLConfig) -> list[Trajectory]:
    return [episode.main, *(episode.agents if cfg.rollout.subagents.train else [])]


def split_by_prompt(rows: list, budget: int) -> list[list]:
    """Rows that share a prompt, in parts of at most `budget` tokens (a single row may exceed it)."""
    parts, room = [], {}
    for row in rows:
        trajectory = row[0]
        key = tuple(trajectory.ids[: trajectory.prompt_length])
        suffix = len(trajectory.ids) - trajectory.prompt_length
        if room.get(key, (0, -1))[1] < suffix:
            parts.append([])
            room[key] = (len(parts) - 1, budget - trajectory.prompt_length)
        place, left = room[key]
        parts[place].append(row)
        room[key] = (place, left - suffix)
    return parts


def make_lesson(rows: list) -> Lesson:
    first = rows[0][0]
    p = first.prompt_length
    suffixes, masks = ([getattr(t, name)[p:] for t, _ in rows] for name in ("ids", "mask"))
    bundle = Bundle(first.ids[:p], suffixes, masks, list(first.frames))
    return Lesson(
        bundle, *(np.concatenate(column).astype(np.float32) for column in zip(*(values for _, values in rows)))
    )


# ------------------------------------------------------------------------------------------------ the loss


def token_losses(
    logprobs: Tensor, prox: Tensor, behaviour: Tensor, reference: Tensor | None, advantage: Tensor, cfg: RLConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """l per token [N], as at the top of the file, and what is worth watching (no gradient), per token [N]."""
    ratio = (logprobs - prox).exp()
    low, high = 1 - cfg.clip, 1 + (cfg.clip if cfg.clip_high is None else cfg.clip_high)
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    w = (prox - behaviour).exp()
    kept = w <= cfg.behaviour_cap
    losses = -torch.where(kept, w * surrogate, 0.0)
    watched = {
        "clip_fraction": ((ratio < low) & (advantage < 0) | (ratio > high) & (advantage > 0)).float(),
        "capped_fraction": (~kept).float(),
        "gap": (prox - behaviour).abs(),
    }
    if reference is not None:
        d = reference - logprobs
        kl = d.exp() - d - 1
        losses = losses + cfg.kl * kl
        watched["kl"] = kl.detach()
    return losses, watched


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


def lessons_loss(
    scores: Scores, lessons: list[Lesson], prox: Tensor | None, reference: Tensor | None, cfg: RLConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """The micro-batch's part of L, and per token [N] what is worth watching."""
    logprobs = scores.logprobs  # [N]

    def column(name: str) -> Tensor:
        values = [getattr(lesson, name) for lesson in lessons]
        return torch.from_numpy(np.concatenate(values)).to(logprobs) if values else logprobs.detach()  # N = 0

    prox = logprobs.detach() if prox is None else prox
    losses, watched = token_losses(logprobs, prox, column("behaviour"), reference, column("advantage"), cfg)
    # Credit `logp`: + lambda * mean over struct(o) of log pi, averaged over the rollouts that parse.
    loss = (column("weight") * losses).sum() - (column("anchor") * logprobs).sum()
    return loss, watched | {"entropy": scores.entropies}


def bundles(lessons: list[Lesson]) -> list[Bundle]:
    return [lesson.bundle for lesson in lessons]


def micro_batches(lessons: list[Lesson], budget: int) -> list[list[Lesson]]:
    """Lessons that share a forward pass. Every rank gets as many as the one with the most: the rest are empty, since all
    ranks run the same collectives."""
    lengths = [len(lesson.bundle) for lesson in lessons]
    mine = [[lessons[i] for i in members] for members in pack(lengths, max([budget, *lengths]))]
    return mine + [[] for _ in range(max(gather(len(mine))) - len(mine))]


# ------------------------------------------------------------------------------------------------ what happened


def describe(groups: Sequence[Group]) -> dict[str, float]:
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
        note("flat_groups", np.ptp(rewards) < 1e-3 if rewards else True)
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
