"""grpo.py: rewards become advantages, advantages become a loss. Each equation stands above its code.

    examples, total_tokens = make_examples(groups, renderer, cfg, anchor)   # this rank's episodes, with their advantages
    for part in micro_batches(examples, cfg.train_tokens):                  # as many on every rank
        loss, stats = examples_loss(policy(bundles(part), tau), part, total_tokens, prox_logprobs, ref_logprobs, cfg)
        loss.backward()

Symbols: i an episode of a group of G, t a token of its output o_i, R_i its reward, r the ratio, N target tokens.

Three policies have log-probs of the same tokens: `behaviour_logprobs` are the engine's, at the moment of sampling
(pi_behaviour); `prox_logprobs` those of the policy before the first update on this batch (pi_prox); `logprobs` those
of the policy that learns (pi). With one minibatch per batch (the paper) pi_prox is pi itself: r = 1, and the clip is
inert.

Deliberately missing: a value model, rewards for parts of an episode.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from data import Episode, Group, Trajectory
from rewards import Anchor, structural_mask
from runtime.distributed import gather, sum_over_ranks
from runtime.packing import best_fit
from runtime.policy import TokenScores
from runtime.render import Bundle, Renderer
from runtime.settings import GRPOConfig

# ------------------------------------------------------------------------------------------------ advantages

STD_FLOOR = 1e-3  # a group whose rewards vary less is flat: fractional rewards leave a residue of rounding


def group_advantage(rewards: Sequence[float]) -> np.ndarray:
    """Return the advantages of one group, [G]."""
    # A_i = (R_i - mean_group R) / std_group R, and 0 where std_group R < floor. The std is the sample's (G - 1).
    rewards = np.asarray(rewards, np.float64)  # [G]
    if len(rewards) < 2 or rewards.std(ddof=1) < STD_FLOOR:
        return np.zeros(len(rewards))
    return (rewards - rewards.mean()) / rewards.std(ddof=1)


def assign_advantages(groups: Sequence[Sequence[Episode]], cfg: GRPOConfig, anchor: Anchor) -> None:
    """Write A_i and, under credit `struct`, A_anchor_i into the episodes, where reports find them."""
    # A_anchor_i = (R_anchor_i - mean_group R_anchor) / std_group R_anchor, as A_i is of R
    for episodes in groups:
        advantages = group_advantage([e.rewards["R"] for e in episodes])
        anchor_advantages = group_advantage([e.rewards["R_anchor"] for e in episodes])
        for episode, a, a_anchor in zip(episodes, advantages, anchor_advantages, strict=True):
            episode.advantage = float(a)
            episode.anchor_advantage = float(a_anchor) if anchor.credit == "struct" else 0.0

    if cfg.normalise == "batch":
        # A_i <- A_i / max(std_batch A, floor), the std of all episodes of all ranks; A_anchor_i stays as it is.
        mine = [episode for episodes in groups for episode in episodes]
        batch = sum(gather([episode.advantage for episode in mine]), [])
        std = max(np.std(batch or [0.0]), STD_FLOOR)
        for episode in mine:
            episode.advantage /= std


# ------------------------------------------------------------------------------------------------ examples


@dataclass
class TrainExample:
    """A bundle and what the loss needs to know of each of its N target tokens."""

    bundle: Bundle
    advantages: np.ndarray  # float32 [N]: A_i,t
    behaviour_logprobs: np.ndarray  # float32 [N]: log pi_behaviour


@dataclass
class Learner:
    """An agent that learns, and the episode whose advantage it gets."""

    trajectory: Trajectory
    episode: Episode


def make_examples(
    groups: Sequence[Group], renderer: Renderer, cfg: GRPOConfig, anchor: Anchor, subagents: bool = False
) -> tuple[list[TrainExample], float]:
    """Give this rank's episodes their advantages. Return the examples that the update trains on, and the number of tokens
    that the loss divides by."""
    # Episodes that failed are neither compared nor learned from.
    ran = [[episode for episode in group.episodes if not episode.error] for group in groups]
    assign_advantages(ran, cfg, anchor)

    # Collect the trajectories to train on. The loss divides by all sampled tokens on all ranks, including those of skipped
    # groups.
    learners = [[] for _ in ran]
    tokens = 0
    for i, episodes in enumerate(ran):
        for episode in episodes:
            for trajectory in episode.trajectories if subagents else [episode.main]:
                learners[i].append(Learner(trajectory, episode))
                tokens += trajectory.n_sampled
    total_tokens = sum_over_ranks({"tokens": float(tokens)})["tokens"]

    examples = []
    for i, episodes in enumerate(ran):
        # Leave a group out if nothing in it can be learned: R and R_anchor are flat, and there is no KL.
        varies = any(episode.advantage or episode.anchor_advantage for episode in episodes)
        if varies or cfg.kl_coef:
            for part in share_prompts(learners[i], cfg.train_tokens):
                examples.append(example_of(part, renderer, anchor))
    return examples, total_tokens


def share_prompts(learners: Sequence[Learner], budget: int) -> list[list[Learner]]:
    """Put agents with the same prompt together, so that it is computed once, up to `budget` tokens (a single one may be
    longer). What does not fit opens another example, which repeats the prompt."""
    parts: list[list[Learner]] = []
    newest, length = {}, {}  # per prompt, the part that still has room, and its tokens
    for learner in learners:
        p = learner.trajectory.prompt_length
        # Two clips may have the same words, stamps included, and yet other pixels.
        prompt = (tuple(learner.trajectory.ids[:p]), *(id(clip.pixels) for clip in learner.trajectory.prompt_frames))
        n = len(learner.trajectory.suffix)
        if prompt not in newest or length[prompt] + n > budget:
            newest[prompt], length[prompt] = [], p
            parts.append(newest[prompt])
        newest[prompt].append(learner)
        length[prompt] += n
    return parts


def example_of(learners: Sequence[Learner], renderer: Renderer, anchor: Anchor) -> TrainExample:
    """Return agents of one prompt as one example."""
    first = learners[0].trajectory
    p = first.prompt_length
    bundle = Bundle(first.ids[:p], [], [], list(first.prompt_frames))
    advantages, behaviour_logprobs = [], []
    for learner in learners:
        trajectory, episode = learner.trajectory, learner.episode
        bundle.suffixes.append(trajectory.suffix)
        bundle.masks.append(trajectory.mask[p:])
        bundle.frames.extend(trajectory.call_frames)

        # Of the trajectory's tokens, the N that were sampled.
        sampled = np.array(trajectory.mask, bool)
        struct = np.zeros(len(trajectory.ids))  # 1[t in struct(o_i)]; sub-agents write no tags
        if trajectory is episode.main:
            struct = np.array(structural_mask(trajectory, renderer), float)

        # Selective Anchoring: A_i,t = A_i + lambda * A_anchor_i * 1[t in struct(o_i)]
        a = episode.advantage + anchor.lam * episode.anchor_advantage * struct
        advantages.append(a[sampled].astype(np.float32))
        behaviour_logprobs.append(np.array(trajectory.logprobs, np.float32)[sampled])
    return TrainExample(bundle, np.concatenate(advantages), np.concatenate(behaviour_logprobs))


# ------------------------------------------------------------------------------------------------ the loss


def token_losses(
    logprobs: Tensor, prox_logprobs: Tensor, behaviour_logprobs: Tensor, ref_logprobs: Tensor | None, advantages: Tensor,
    cfg: GRPOConfig,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """Return the loss of each token, [N], and what is worth watching of it (no gradient), each [N]."""
    # l_i,t = - w * min(r * A_i,t, clip(r, 1 - eps, 1 + eps_high) * A_i,t) + beta * w * r * KL
    # r = pi / pi_prox
    ratio = (logprobs - prox_logprobs).exp()
    low, high = 1 - cfg.clip_eps, 1 + (cfg.clip_eps if cfg.clip_eps_high is None else cfg.clip_eps_high)
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)

    # w = pi_prox / pi_behaviour, and 0 where it exceeds the cap: those tokens are left out, as in the release. The cap goes
    # on w and not on the product, where an infinite w would give 0 * inf in the backward pass.
    importance = (prox_logprobs - behaviour_logprobs).exp()
    kept = importance <= cfg.behaviour_cap
    weight = torch.where(kept, importance, 0.0)
    losses = -weight * surrogate
    stats = {
        "clip_fraction": ((ratio < low) & (advantages < 0) | (ratio > high) & (advantages > 0)).float(),
        "over_cap_fraction": (~kept).float(),
        "logprob_gap": (prox_logprobs - behaviour_logprobs).abs(),
    }
    if ref_logprobs is not None:
        # KL = exp(d) - d - 1, d = log pi_ref - log pi (the k3 estimator). The release puts its KL into the reward.
        # pi_behaviour sampled the tokens. Weighted by w * r = pi / pi_behaviour, value and gradient are those of KL(pi || pi_ref).
        d = ref_logprobs - logprobs
        kl = weight * ratio * (d.exp() - d - 1)
        losses = losses + cfg.kl_coef * kl
        stats["kl"] = kl.detach()
    return losses, stats


def examples_loss(
    scores: TokenScores, examples: list[TrainExample], total_tokens: float, prox_logprobs: Tensor | None,
    ref_logprobs: Tensor | None, cfg: GRPOConfig,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """Return the micro-batch's part of the batch's loss L, and what is worth watching per token, [N]. `prox_logprobs` and
    `ref_logprobs` are log-probs [N]; without `prox_logprobs`, pi_prox is pi."""
    logprobs = scores.logprobs  # [N]
    if prox_logprobs is None:
        prox_logprobs = logprobs.detach()

    # A rank without examples of its own still runs every collective, with N = 0.
    columns = [np.zeros((2, 0), np.float32)]
    for example in examples:
        columns.append(np.stack([example.advantages, example.behaviour_logprobs]))
    advantages, behaviour_logprobs = torch.from_numpy(np.concatenate(columns, axis=1)).to(logprobs)  # each [N]

    # L = sum over all sampled tokens of all ranks of l_i,t / their number
    losses, stats = token_losses(logprobs, prox_logprobs, behaviour_logprobs, ref_logprobs, advantages, cfg)
    return losses.sum() / total_tokens, stats | {"entropy": scores.entropies}


def bundles(examples: list[TrainExample]) -> list[Bundle]:
    return [example.bundle for example in examples]


def micro_batches(examples: list[TrainExample], budget: int) -> list[list[TrainExample]]:
    """Return the examples of each forward pass. Ranks with fewer get empty ones: all run the same collectives."""
    mine = []
    for members in best_fit([len(example.bundle) for example in examples], budget):
        mine.append([examples[i] for i in members])
    max_batches = max(gather(len(mine)))
    return mine + [[]] * (max_batches - len(mine))
