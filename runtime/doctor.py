"""doctor.py: is what was sampled what will be learned? The check before the first update of a training."""

import itertools
from collections.abc import Sequence

import torch

from runtime.contract import Bundle
from runtime.distributed import gather
from runtime.engine import EngineError
from runtime.policy import Policy


def self_check(policy: Policy, groups: Sequence, sampled_at: float, gap_limit: float) -> None:
    """Before the first update: the trajectories are whole, and the trainer computes the engine's log-probs."""
    ran = [episode for group in groups for episode in group.episodes if not episode.error]
    errors = [error for own in gather([e.error for group in groups for e in group.episodes]) for error in own]
    if errors and all(errors):  # a training without episodes would end as if nothing were wrong
        raise EngineError(f"all {len(errors)} episodes of the first batch failed, such as: {errors[0]}")
    flaws = [flaw for episode in ran for agent in episode.trajectories if (flaw := flaw_of(agent, policy))]
    sample = sorted((e.main for e in ran if sum(e.main.mask)), key=lambda agent: len(agent.ids))[:1]  # memory is dear
    rows = [Bundle([], [agent.ids], [agent.mask], agent.frames) for agent in sample]
    behaviour = [p for agent in sample for p, m in zip(agent.logprobs, agent.mask) if m]
    gaps = {}
    with torch.no_grad():  # on every rank, whatever it has sampled
        for temperature in (sampled_at, 1.0):
            found = policy(rows, temperature).logprobs
            gaps[temperature] = (found - torch.tensor(behaviour).to(found)).abs().mean().item() if sample else 0.0
    gap = gaps[sampled_at]
    if gap > gap_limit:
        reason = "its images, its weights or its banned tokens are others than the trainer's"
        if gaps[1.0] < gap / 2:
            reason = f"its log-probs are those of temperature 1, not {sampled_at}"
        flaws.append(
            f"trainer and engine disagree: their log-probs differ by {gap:.3f} on average, more than gap_limit = "
            f"{gap_limit}; {reason}. `python rollout.py doctor` looks closer"
        )
    if flaws := list(itertools.chain(*gather(flaws[:3]))):
        raise EngineError("; ".join(flaws))


def flaw_of(agent, policy: Policy) -> str:
    """The first invariant that a trajectory breaks, or ""."""
    sampled = [i for i, m in enumerate(agent.mask) if m]
    spoken = {i for a, b in agent.turns for i in range(a, b)}
    if len({len(column) for column in (agent.ids, agent.mask, agent.logprobs, agent.versions)}) > 1:
        return "a trajectory's ids, mask, log-probs and versions have different lengths"
    if not spoken.issuperset(sampled):
        return "a token outside the assistant's turns has mask 1"
    if any((agent.versions[i] >= 0) != bool(m) for i, m in enumerate(agent.mask)):
        return "mask and versions disagree on which tokens were sampled"
    if any(not agent.logprobs[i] <= 0 for i in sampled):
        return "a sampled token's log-prob is positive or not a number"
    if any(agent.ids[i] in policy.never_sampled for i in sampled):
        return "a token that stands for pixels was sampled"
    return ""
