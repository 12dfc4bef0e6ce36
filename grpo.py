"""grpo.py: from rewards to the gradient, in this order: advantages, bundles, the loss, its gradient.

    assign_advantages(groups, cfg, anchor)                # writes A_i, A_anchor_i into the episodes, A_i,t into the rows
    bundles, total_tokens = bundle_groups(groups, cfg)       # what this rank trains on, and the tokens of all ranks
    measured = accumulate(policy, reference, bundles, total_tokens, temperature, cfg)      # adds gradients

Each equation stands above its code. Symbols: i an episode in a group of G, t a token of its output o_i, R_i its reward, r the
ratio, T all tokens of a row, N the sampled tokens of a micro-batch, row after row, as `Policy` returns them.

The loss names three policies. pi_behaviour sampled the token, and the engine reported its log-prob (`behaviour_logprobs`). pi is
the policy in training (`logprobs`), and pi_prox the policy before the first update on this batch. There is one update per
batch, as in the paper, so pi_prox has the values of pi: r = 1, the clip has no effect, and no extra forward pass is needed.

Deliberately missing, though GRPO implementations often have it:
- minibatches, and several epochs over a batch
- a value model, and rewards for parts of an episode
- a mean per episode before the mean over episodes: here every token of the batch has the same weight
- one ratio per sequence instead of one per token
- resampling of flat groups: here they are counted, and skipped if there is no KL
- a KL inside the reward, an adaptive beta, a moving reference, an entropy bonus, a length penalty
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from episode import Episode, Group
from rewards import Anchor
from runtime.distributed import gather, sum_over_ranks
from runtime.packing import Bundle, best_fit, bundle_rows
from runtime.policy import Policy


@dataclass(frozen=True, kw_only=True)
class GRPOConfig:
    """How a batch of episodes becomes an update."""

    group_size: int = 8
    """G: episodes per task."""
    kl_coef: float = 0.01
    """beta; 0 loads no reference."""
    clip_eps: float = 0.2
    """eps of the paper's equation. With one update per batch the clip has no effect (see above)."""
    normalise: Literal["group", "batch"] = "group"
    """group: by the group's mean and std. batch: then also by the batch's std, which is small if many groups are flat."""
    behaviour_cap: float = 5.0
    """Tokens with pi_prox / pi_behaviour above this are masked."""
    train_tokens: int = 16_384
    """Tokens per micro-batch. A larger group is split and its prompt repeated. A single episode may exceed the limit."""

    def __post_init__(self):
        if self.group_size < 2:
            raise ValueError(f"group_size = {self.group_size}: an advantage compares at least 2 episodes")
        if self.behaviour_cap == 0:
            raise ValueError("behaviour_cap = 0: every token would be masked; for no cap, set a large one")


# ------------------------------------------------------------------------------------------------ advantages

STD_FLOOR = 1e-3  # a group with a smaller std is flat; equal fractional rewards can differ by rounding


def group_advantage(rewards: Sequence[float]) -> np.ndarray:
    """Return the advantages of one group, [G]."""
    # A_i = (R_i - mean_group R) / std_group R, and 0 where std_group R < floor. The std is the sample std (G - 1).
    rewards = np.asarray(rewards, np.float64)  # [G]
    if len(rewards) < 2 or rewards.std(ddof=1) < STD_FLOOR:
        return np.zeros(len(rewards))
    return (rewards - rewards.mean()) / rewards.std(ddof=1)


def assign_advantages(groups: Sequence[Group], cfg: GRPOConfig, anchor: Anchor) -> None:
    """Write A_i and, under credit `struct`, A_anchor_i into the episodes, and A_i,t into the rows of their agents. Failed
    episodes are left out of their group."""
    # A_anchor_i = (R_anchor_i - mean_group R_anchor) / std_group R_anchor
    for group in groups:
        advantages = group_advantage([episode.rewards["R"] for episode in group.ran])
        anchor_advantages = group_advantage([episode.rewards["R_anchor"] for episode in group.ran])
        for episode, a, a_anchor in zip(group.ran, advantages, anchor_advantages, strict=True):
            episode.advantage = float(a)
            episode.anchor_advantage = float(a_anchor) if anchor.credit == "struct" else 0.0

    mine = [episode for group in groups for episode in group.ran]
    if cfg.normalise == "batch":
        # A_i <- A_i / max(std_batch A, floor). The std (of n) is over all episodes of all ranks. A_anchor_i is unchanged.
        batch: list[float] = sum(gather([episode.advantage for episode in mine]), [])
        std = max(float(np.std(batch or [0.0])), STD_FLOOR)
        for episode in mine:
            episode.advantage /= std

    for episode in mine:
        episode.main.loss_weights = token_advantages(episode, anchor)
        for report in episode.subagents:  # it has its episode's A_i, without the anchor
            report.loss_weights = np.full(len(report.ids), episode.advantage, np.float32)


def token_advantages(episode: Episode, anchor: Anchor) -> np.ndarray:
    """Return A_i,t for each token of the main agent, float32 [T]."""
    # Selective Anchoring: A_i,t = A_i + lambda * A_anchor_i * 1[t in struct(o_i)]
    struct = np.array(episode.main.structural)  # [T]
    return (episode.advantage + anchor.lam * episode.anchor_advantage * struct).astype(np.float32)


# ------------------------------------------------------------------------------------------------ what to train on


def bundle_groups(groups: Sequence[Group], cfg: GRPOConfig, subagents: bool = False) -> tuple[list[Bundle], float]:
    """Return what this rank trains on, and the number of sampled tokens on all ranks, including those of skipped groups.
    Failed episodes are left out of both. `subagents`: train on their reports as well."""
    bundles = []
    tokens = 0
    for group in groups:
        rows = []
        for episode in group.ran:
            rows.append(episode.main)
            if subagents:
                rows += episode.subagents
        assert all(len(row.loss_weights) == len(row.ids) for row in rows), "assign_advantages comes first"
        tokens += sum(row.n_sampled for row in rows)

        # Skip a group that teaches nothing: it is flat, and there is no KL.
        if cfg.kl_coef or not group.flat:
            bundles += bundle_rows(rows, cfg.train_tokens)
    return bundles, float(sum(gather(tokens)))


# ------------------------------------------------------------------------------------------------ the loss


def token_losses(
    logprobs: Tensor,
    prox_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    ref_logprobs: Tensor | None,
    advantages: Tensor,
    cfg: GRPOConfig,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of each token, [N], and statistics without gradient, each [N]. All inputs are [N] as well."""
    # l_i,t = - w * min(r * A_i,t, clip(r, 1 - eps, 1 + eps) * A_i,t) + beta * w * r * KL
    # r = pi / pi_prox
    ratio = (logprobs - prox_logprobs).exp()
    low, high = 1 - cfg.clip_eps, 1 + cfg.clip_eps
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)

    # w = pi_prox / pi_behaviour. Above the cap w is 0: such tokens add no loss, as in the release.
    # w itself is masked. Were the product masked, an infinite w would give 0 * inf = NaN in the backward pass.
    importance = (prox_logprobs - behaviour_logprobs).exp()
    kept = importance <= cfg.behaviour_cap
    capped_importance = torch.where(kept, importance, 0.0)
    losses = -capped_importance * surrogate
    stats = {
        "over_cap_fraction": (~kept).float(),
        "logprob_gap": (prox_logprobs - behaviour_logprobs).abs(),
    }
    if ref_logprobs is not None:
        # KL = exp(d) - d - 1, d = log pi_ref - log pi (the k3 estimator). The release puts its KL into the reward.
        # pi_behaviour sampled the tokens, so weight each by w * r = pi / pi_behaviour. Value and gradient are then those of
        # KL(pi || pi_ref).
        d = ref_logprobs - logprobs
        kl = capped_importance * ratio * (d.exp() - d - 1)
        losses = losses + cfg.kl_coef * kl
        stats["kl"] = kl.detach()
    return losses, stats


# ------------------------------------------------------------------------------------------------ its gradient


def accumulate(
    policy: Policy,
    reference: Policy | None,
    bundles: list[Bundle],
    total_tokens: float,
    temperature: float,
    cfg: GRPOConfig,
) -> dict[str, float]:
    """Add the gradient of the loss over the bundles of all ranks. Return the metrics, averaged over the tokens of all ranks.

    `temperature`: the one at which the tokens were sampled."""
    # L = sum of l_i,t over all sampled tokens of all ranks / their number
    sums = {"tokens": 0.0, "loss": 0.0, "logprob_gap": 0.0}  # also on a rank without bundles
    largest_gap = 0.0
    for micro in micro_batches(bundles, cfg.train_tokens):
        losses, stats = micro_batch_losses(policy, reference, micro, temperature, cfg)
        loss = losses.sum() / total_tokens
        loss.backward()

        sums["tokens"] += len(losses)  # N
        sums["loss"] += loss.item()
        for name, values in stats.items():
            sums[name] = sums.get(name, 0.0) + values.sum().item()
        largest_gap = np.max([largest_gap, *stats["logprob_gap"].tolist()])  # NaN if any gap is NaN

    # Average over the learned tokens: those of skipped groups are not among them. The loss is already divided by all tokens.
    totals = sum_over_ranks(sums)
    learned_tokens = totals.pop("tokens")
    mean_loss = totals.pop("loss")
    measured = {name: value / max(1.0, learned_tokens) for name, value in totals.items()}
    measured["logprob_gap_max"] = float(np.max(gather(largest_gap)))
    return measured | {"loss": mean_loss, "learned_tokens": learned_tokens}


def micro_batch_losses(
    policy: Policy, reference: Policy | None, micro: list[Bundle], temperature: float, cfg: GRPOConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of each sampled token of a micro-batch, [N], and statistics, each [N]."""
    # Run policy and reference at the sampling temperature. A frozen vision tower runs once for both.
    output = policy(micro, temperature)
    ref_logprobs = None
    if reference is not None:
        with torch.no_grad():
            ref_logprobs = reference(micro, temperature, output.features).logprobs  # [N]

    # One update per batch: pi_prox is pi without its gradient, so r is 1 and only carries the gradient.
    prox_logprobs = output.logprobs.detach()  # [N]
    advantages = output.loss_weights  # [N]: A_i,t
    losses, stats = token_losses(
        output.logprobs, prox_logprobs, output.behaviour_logprobs, ref_logprobs, advantages, cfg
    )
    return losses, stats | {"entropy": output.entropies}


def micro_batches(bundles: list[Bundle], budget: int) -> list[list[Bundle]]:
    """Return the bundles of each forward pass. Ranks with fewer passes get empty ones, so all run the same collectives."""
    mine = []
    for members in best_fit([len(bundle) for bundle in bundles], budget):
        mine.append([bundles[i] for i in members])
    max_batches = max(gather(len(mine)))
    return mine + [[]] * (max_batches - len(mine))
