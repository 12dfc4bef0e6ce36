"""grpo.py: rewards -> advantages -> loss. Tensors and lists in, tensors out; ranks only where a mean is over all of them.

    lessons = make_lessons(groups, renderer, cfg, anchor)             # advantages of this rank's episodes, as bundles
    for part in micro_batches(lessons, cfg.train_tokens):     # as many on every rank
        loss, watched = lessons_loss(policy(bundles(part), tau), part, prox, reference, cfg)

    A_i    = (R_i - mean_group R) / std_group R, 0 where that is < floor       group-normalised advantage of episode i
    A_i,t  = A_i + lambda * A_anchor_i * 1[t in struct(o_i)]                   Selective Anchoring (credit: struct)
    l_i,t  = -w * min(r A, clip(r, 1 - eps, 1 + eps_high) A) + beta * KL       r = pi / pi_prox, w = pi_prox / pi_behaviour
    KL     = exp(d) - d - 1, d = log pi_ref - log pi                           (k3; the release puts its KL into the reward)
    L      = sum of l over all sampled tokens of all ranks / their number      (aggregation: token)

With one minibatch per batch (the paper), pi_prox is pi itself, so r = 1 and the clip is inert; with more, pi_prox is
computed before the first update. Tokens with w above `behaviour_cap` are left out, as in the release.

Deliberately missing: a value model, rewards on parts of an episode.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from data import Episode, Group, Trajectory
from rewards import Anchor, structural_mask
from runtime.contract import Bundle, Renderer
from runtime.distributed import gather, sum_over_ranks
from runtime.packing import best_fit
from runtime.policy import Scores
from runtime.settings import GRPOConfig

# ------------------------------------------------------------------------------------------------ advantages


def group_advantage(rewards: Sequence[float], floor: float, by_std: bool = True) -> np.ndarray:
    """A_i = (R_i - mean R) / std R; all 0 where std R < floor. The std is the sample's (G - 1)."""
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
    pull: np.ndarray  # float32 [N]: share in the objective of credit `logp`


def make_lessons(
    groups: Sequence[Group], renderer: Renderer, cfg: GRPOConfig, anchor: Anchor, subagents: bool = False
) -> list[Lesson]:
    """Advantages of this rank's groups, and their bundles. Normalisers are those of all ranks.

    A group is left out if nothing in it can be learned: R and R_anchor are flat, and no KL pulls."""
    ran = [[e for e in group.episodes if not e.error] for group in groups]
    give_advantages(ran, cfg, anchor)
    agents = [agent for es in ran for e in es for agent in learned(e, subagents)]
    mine = {"tokens": sum(sum(agent.mask) for agent in agents), "agents": len(agents)}
    mine["tidy"] = sum(e.reward["strict"] for es in ran for e in es)
    total = sum_over_ranks({name: float(value) for name, value in mine.items()})

    lessons = []
    for es in ran:
        if cfg.kl or any(e.advantage or e.anchor_advantage or anchor.credit == "logp" for e in es):
            rows = [
                (agent, per_token(agent, e, total, renderer, cfg, anchor))
                for e in es
                for agent in learned(e, subagents)
            ]
            lessons += [make_lesson(part) for part in split_by_prompt(rows, cfg.train_tokens)]
    return lessons


def give_advantages(groups: Sequence[Sequence[Episode]], cfg: GRPOConfig, anchor: Anchor) -> None:
    """A_i and, under credit `struct`, A_anchor_i: written into the episodes, where reports find them."""
    for episodes in groups:
        own = group_advantage([e.reward["reward"] for e in episodes], cfg.std_floor, cfg.normalise != "mean")
        of_anchor = group_advantage([e.reward["anchor"] for e in episodes], cfg.std_floor)
        for episode, a, a_anchor in zip(episodes, own, of_anchor):
            episode.advantage = float(a)
            episode.anchor_advantage = float(a_anchor) if anchor.credit == "struct" else 0.0
    if cfg.normalise == "batch":
        mine = [episode.advantage for episodes in groups for episode in episodes]
        spread = np.std([a for rank in gather(mine) for a in rank] or [0.0])
        for episode in (episode for episodes in groups for episode in episodes):
            episode.advantage /= max(spread, cfg.std_floor)


def per_token(
    agent: Trajectory, episode: Episode, total: dict, renderer: Renderer, cfg: GRPOConfig, anchor: Anchor
) -> list[np.ndarray]:
    """Of one trajectory, what a Lesson holds of its N sampled tokens: advantage, behaviour, weight, pull."""
    sampled = np.array(agent.mask, bool)
    n = sampled.sum()
    is_struct = np.zeros(n)
    if agent is episode.main:
        is_struct = np.array(structural_mask(agent, renderer), float)[sampled]
    advantage = episode.advantage + anchor.scale * episode.anchor_advantage * is_struct
    share = total["tokens"] if cfg.aggregation == "token" else total["agents"] * max(1, n)
    pull = np.zeros(n)
    if anchor.credit == "logp" and episode.reward["strict"] and is_struct.any():
        pull = anchor.scale * is_struct / is_struct.sum() / total["tidy"]
    return [advantage, np.array(agent.logprobs)[sampled], np.full(n, 1 / share), pull]


def learned(episode: Episode, subagents: bool) -> list[Trajectory]:
    return episode.trajectories if subagents else [episode.main]


def split_by_prompt(rows: list, budget: int) -> list[list]:
    """Rows that share a prompt, in parts of at most `budget` tokens (a single row may exceed it)."""
    parts, room = [], {}
    for row in rows:
        trajectory = row[0]
        # Two looks may have the same words, stamps included, and yet other pixels.
        key = (*trajectory.ids[: trajectory.prompt_length], *(id(clip.pixels) for clip in trajectory.frames))
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
    logprobs: Tensor, prox: Tensor, behaviour: Tensor, reference: Tensor | None, advantage: Tensor, cfg: GRPOConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """l per token [N], as at the top of the file, and what is worth watching (no gradient), per token [N]."""
    ratio = (logprobs - prox).exp()
    low, high = 1 - cfg.clip, 1 + (cfg.clip if cfg.clip_high is None else cfg.clip_high)
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    w = (prox - behaviour).exp()
    kept = w <= cfg.behaviour_cap
    losses = -torch.where(kept, w, 0.0) * surrogate  # not where(kept, w * surrogate, 0): 0 * inf in its backward pass
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


def lessons_loss(
    scores: Scores, lessons: list[Lesson], prox: Tensor | None, reference: Tensor | None, cfg: GRPOConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """The micro-batch's part of L, and per token [N] what is worth watching."""
    logprobs = scores.logprobs  # [N]

    def column(name: str) -> Tensor:
        values = [getattr(lesson, name) for lesson in lessons]
        return torch.from_numpy(np.concatenate(values)).to(logprobs) if values else logprobs.detach()  # N = 0

    prox = logprobs.detach() if prox is None else prox
    losses, watched = token_losses(logprobs, prox, column("behaviour"), reference, column("advantage"), cfg)
    # Credit `logp`: + lambda * mean over struct(o) of log pi, averaged over the rollouts that parse.
    loss = (column("weight") * losses).sum() - (column("pull") * logprobs).sum()
    return loss, watched | {"entropy": scores.entropies}


def bundles(lessons: list[Lesson]) -> list[Bundle]:
    return [lesson.bundle for lesson in lessons]


def micro_batches(lessons: list[Lesson], budget: int) -> list[list[Lesson]]:
    """Lessons that share a forward pass. Every rank gets as many as the one with the most: the rest are empty, since all
    ranks run the same collectives."""
    mine = [[lessons[i] for i in members] for members in best_fit([len(lesson.bundle) for lesson in lessons], budget)]
    return mine + [[] for _ in range(max(gather(len(mine))) - len(mine))]
