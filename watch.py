"""watch.py: what a step of RL tells about itself: the figures of metrics.jsonl, the check before the first update.

    self_check(policy, groups, cfg)                      # trajectories are whole, trainer and engine agree; or stop
    describe(groups, ks, step)                           # rewards, kappa, closure, K, truncation, tool errors, staleness
    speed(groups, lessons, policy_cfg, clock, sampling)  # tokens per second, MFU
    evaluate(tasks, frames, engine, renderer, videos, cfg)           # greedy, with tools and without

All figures are over the episodes of all ranks, and every rank calls every function.

Deliberately missing: writing them down (config.Metrics, rollout.keep_episodes), drawing them (report.py).
"""

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from data import CALL_ERRORS, Bundle, Group, Task, Trajectory
from grpo import GRPOConfig, Lesson
from rewards import give_rewards
from rollout import rollout
from runtime.contract import Renderer
from runtime.distributed import gather, mean_over_ranks, sum_over_ranks, world_size
from runtime.engine import Engine, EngineError
from runtime.plan import utilisation
from runtime.policy import Policy, PolicyConfig
from runtime.video import Videos


class Clock:
    """Seconds per phase, on this rank."""

    def __init__(self):
        self.seconds, self._last = {"seconds": 0.0}, time.perf_counter()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        for name in (f"{phase}_seconds", "seconds"):
            self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now


# ------------------------------------------------------------------------------------------------ before the first update


def self_check(policy: Policy, groups: Sequence[Group], cfg: GRPOConfig) -> None:
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
        for temperature in (cfg.rollout.temperature, 1.0):
            found = policy(rows, temperature).logprobs
            gaps[temperature] = (found - torch.tensor(behaviour).to(found)).abs().mean().item() if sample else 0.0
    gap = gaps[cfg.rollout.temperature]
    if gap > cfg.gap_limit:
        reason = "its images, its weights or its banned tokens are others than the trainer's"
        if gaps[1.0] < gap / 2:
            reason = f"its log-probs are those of temperature 1, not {cfg.rollout.temperature}"
        flaws.append(
            f"trainer and engine disagree: their log-probs differ by {gap:.3f} on average, more than gap_limit = "
            f"{cfg.gap_limit}; {reason}. `python rollout.py doctor` looks closer"
        )
    if flaws := list(itertools.chain(*gather(flaws[:3]))):
        raise EngineError("; ".join(flaws))


def flaw_of(agent: Trajectory, policy: Policy) -> str:
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


# ------------------------------------------------------------------------------------------------ what happened


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
    tasks: Sequence[Task], frames: Sequence[int], engine: Engine, renderer: Renderer, videos: Videos, cfg: GRPOConfig
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
