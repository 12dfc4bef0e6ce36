"""grpo.py: rewards become advantages, advantages become a loss. Each equation stands above its code.

    assign_advantages(groups, cfg, anchor)                                  # writes A_i and A_anchor_i into the episodes
    examples, total_tokens = make_examples(groups, renderer, cfg, anchor)   # what this rank trains on; N of all ranks
    for part in micro_batches(examples, cfg.train_tokens):                  # as many on every rank
        loss, stats = examples_loss(policy(bundles(part), tau), part, total_tokens, prox_logprobs, ref_logprobs, cfg)
        loss.backward()

Symbols: i an episode of a group of G, t a token of its output o_i, R_i its reward, r the ratio, N target tokens.

Three policies have log-probs of the same tokens: `behaviour_logprobs` are the engine's, at the moment of sampling
(pi_behaviour); `prox_logprobs` those of the policy before the first update on this batch (pi_prox); `logprobs` those
of the policy that learns (pi). With one minibatch per batch (the paper) pi_prox is pi itself: r = 1, and the clip is
inert.

What GRPO implementations often have, and this one leaves out:
- a value model, and rewards for parts of an episode
- a mean per episode before the mean over episodes: here each token of the batch counts the same
- several epochs over a batch, and one ratio per sequence in place of one per token
- new samples in place of a flat group, which is skipped and counted here
- a KL inside the reward, an adaptive beta, a reference that moves, an entropy bonus, a penalty for length
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from data import Episode, Group
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


def assign_advantages(groups: Sequence[Group], cfg: GRPOConfig, anchor: Anchor) -> None:
    """Write A_i and, under credit `struct`, A_anchor_i into the episodes. Those that failed are not compared."""
    # A_anchor_i = (R_anchor_i - mean_group R_anchor) / std_group R_anchor, as A_i is of R
    for group in groups:
        advantages = group_advantage([episode.rewards["R"] for episode in group.ran])
        anchor_advantages = group_advantage([episode.rewards["R_anchor"] for episode in group.ran])
        for episode, a, a_anchor in zip(group.ran, advantages, anchor_advantages, strict=True):
            episode.advantage = float(a)
            episode.anchor_advantage = float(a_anchor) if anchor.credit == "struct" else 0.0

    if cfg.normalise == "batch":
        # A_i <- A_i / max(std_batch A, floor), the std of all episodes of all ranks; A_anchor_i stays as it is.
        mine = [episode for group in groups for episode in group.ran]
        batch = sum(gather([episode.advantage for episode in mine]), [])
        std = max(np.std(batch or [0.0]), STD_FLOOR)
        for episode in mine:
            episode.advantage /= std


# ------------------------------------------------------------------------------------------------ examples


@dataclass
class TrainExample:
    """A bundle, and what the loss needs to know of each of its N target tokens: those that were sampled, in the order of
    (suffix, token). A micro-batch has them in the order of (bundle, suffix, token), as the policy returns them."""

    bundle: Bundle
    advantages: np.ndarray  # float32 [N]: A_i,t
    behaviour_logprobs: np.ndarray  # float32 [N]: log pi_behaviour


def make_examples(
    groups: Sequence[Group], renderer: Renderer, cfg: GRPOConfig, anchor: Anchor, subagents: bool = False
) -> tuple[list[TrainExample], float]:
    """Return the examples that this rank trains on, and the number of tokens that the loss divides by: all sampled tokens of
    all ranks, including those of skipped groups. Episodes that failed are left out of both."""
    examples = []
    tokens = 0
    for group in groups:
        episodes = []
        for episode in group.ran:
            episodes.append(episode)
            if subagents:  # a report trains as an episode of its own, with its episode's A_i and without an anchor
                for report in episode.subagents:
                    episodes.append(replace(episode, main=report, anchor_advantage=0.0))
        tokens += sum(episode.main.n_sampled for episode in episodes)

        # Skip a group if nothing in it can be learned: R and R_anchor are flat, and there is no KL.
        varies = any(episode.advantage or episode.anchor_advantage for episode in episodes)
        if varies or cfg.kl_coef:
            for part in share_prompts(episodes, cfg.train_tokens):
                examples.append(example_of(part, renderer, anchor))
    return examples, sum_over_ranks({"tokens": float(tokens)})["tokens"]


def share_prompts(episodes: Sequence[Episode], budget: int) -> list[list[Episode]]:
    """Put episodes with the same prompt together, so that it is computed once, up to `budget` tokens (a single one may be
    longer). What does not fit opens another example, which repeats the prompt."""
    parts: list[list[Episode]] = []
    newest, length = {}, {}  # per prompt, the part that still has room, and its tokens
    for episode in episodes:
        main = episode.main
        # Two clips may have the same words, stamps included, and yet other pixels.
        prompt = (tuple(main.ids[: main.prompt_length]), *(id(clip.pixels) for clip in main.prompt_frames))
        n = len(main.suffix)
        if prompt not in newest or length[prompt] + n > budget:
            newest[prompt] = []
            length[prompt] = main.prompt_length
            parts.append(newest[prompt])
        newest[prompt].append(episode)
        length[prompt] += n
    return parts


def example_of(episodes: Sequence[Episode], renderer: Renderer, anchor: Anchor) -> TrainExample:
    """Return episodes of one prompt as one example."""
    first = episodes[0].main
    bundle = Bundle(first.ids[: first.prompt_length], [], [], list(first.prompt_frames))
    advantages, behaviour_logprobs = [], []
    for episode in episodes:
        main = episode.main
        bundle.suffixes.append(main.suffix)
        bundle.masks.append(main.mask[main.prompt_length :])
        bundle.frames.extend(main.call_frames)

        # Of the episode's tokens, the N that were sampled.
        sampled = np.array(main.mask, bool)
        advantages.append(token_advantages(episode, renderer, anchor)[sampled])
        behaviour_logprobs.append(np.array(main.logprobs, np.float32)[sampled])
    return TrainExample(bundle, np.concatenate(advantages), np.concatenate(behaviour_logprobs))


def token_advantages(episode: Episode, renderer: Renderer, anchor: Anchor) -> np.ndarray:
    """Return A_i,t of each token of the main agent, float32 [T]."""
    # Selective Anchoring: A_i,t = A_i + lambda * A_anchor_i * 1[t in struct(o_i)]
    struct = np.array(structural_mask(episode.main, renderer), float)
    return (episode.advantage + anchor.lam * episode.anchor_advantage * struct).astype(np.float32)


# ------------------------------------------------------------------------------------------------ the loss


def token_losses(
    logprobs: Tensor, prox_logprobs: Tensor, behaviour_logprobs: Tensor, ref_logprobs: Tensor | None, advantages: Tensor,
    cfg: GRPOConfig,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """Return the loss of each token, [N], and its statistics (no gradient), each [N]."""
    # l_i,t = - w * min(r * A_i,t, clip(r, 1 - eps, 1 + eps_high) * A_i,t) + beta * w * r * KL
    # r = pi / pi_prox
    ratio = (logprobs - prox_logprobs).exp()
    low = 1 - cfg.clip_eps
    high = 1 + (cfg.clip_eps if cfg.clip_eps_high is None else cfg.clip_eps_high)
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
    """Return the micro-batch's part of the batch's loss L, and statistics per token, each [N]. `prox_logprobs` and
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
