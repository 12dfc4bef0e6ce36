"""doctor.py: check that the trainer learns exactly the tokens that the engine sampled, with the same log-probs.

    self_check(policy, groups, temperature)     # rl.py, on every rank before its first update; raises EngineError
    refuse_empty(groups, step); check_gap(mean, largest, step)      # rl.py, in every step
    position_error, logprob_gap, ...            # `python -m study.ask doctor` prints them

A `trajectory` is a data.Trajectory, a `group` a data.Group. runtime/ imports no script, so this file only
reads their fields.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from runtime.distributed import gather, print0
from runtime.engine import EngineError
from runtime.packing import Bundle, rope_positions
from runtime.policy import Policy
from runtime.render import Renderer
from runtime.visual import patchify

GAP_LIMIT = 0.5  # largest mean |trainer's - engine's log-prob|: rounding stays far below, a wrong image is above
GAP_WARNING = 0.2  # other projects report poor convergence above this mean, and 0.04 from bf16 rounding
_warned: list[str] = []  # warnings that this process has printed


def refuse_empty(groups: Sequence, step: int) -> None:
    """Refuse a step in which no episode ran on any rank. The run would go on and replace its good states."""
    errors = sum(gather([episode.error for group in groups for episode in group.episodes]), [])
    if all(errors):
        reason = errors[-1] if errors else "no row of the batch can be used"
        raise EngineError(f"step {step + 1}: none of its {len(errors)} episodes ran; the last error: {reason}")


def self_check(policy: Policy, groups: Sequence, temperature: float, subagent_temperature: float = 0.0) -> None:
    """Refuse a first batch with broken trajectories, or with log-probs that the trainer does not reproduce."""
    ran = [episode for group in groups for episode in group.ran]
    trajectories = [trajectory for episode in ran for trajectory in episode.trajectories]
    refuse_flaws([flaw for flaw in (flaw_of(trajectory, policy) for trajectory in trajectories) if flaw])

    # Check one episode: the shortest with a call, since crops differ in size from the overview; else the shortest.
    main, subagent = [], []
    if ran:
        episode = min(ran, key=lambda episode: (not episode.n_executed, len(episode.main.ids)))
        main = [episode.main]
        subagent = episode.subagents[:1]
    gap = logprob_gap(policy, main, temperature)  # all ranks must call it, even without an episode
    # A greedy sub-agent's log-probs are those of temperature 1. np.max keeps a NaN, which max() can drop.
    largest = float(np.max([gap, logprob_gap(policy, subagent, subagent_temperature or 1.0)]))
    flaws = []
    if not largest <= GAP_LIMIT:  # or NaN
        reason = "the engine's images, weights, temperature or banned tokens differ from the trainer's"
        flaws = [f"trainer and engine disagree: their log-probs differ by {largest:.3f} on average; {reason}"]
    refuse_flaws(flaws)
    worst = max(gather(largest))  # all ranks call it
    print0(f"trainer and engine agree: their log-probs differ by {worst:.4f} on average")


def check_gap(mean: float, largest: float, step: int) -> None:
    """Refuse a step whose log-prob gaps are not finite. Warn once about a large mean. All ranks pass the same values."""
    told = f"step {step + 1}: log-probs of trainer and engine differ by {mean:.2f} on average, {largest:.2f} at most"
    if not np.isfinite([mean, largest]).all():
        raise EngineError(f"{told}: one of the two has broken weights; lower optim.lr")
    if mean > GAP_WARNING and not _warned:
        _warned.append(told)
        print0(f"warning: {told}")


def refuse_flaws(flaws: list[str]) -> None:
    """Raise EngineError on every rank if any rank has found a flaw."""
    flaws = sum(gather(flaws[:3]), [])
    if flaws:
        raise EngineError("; ".join(flaws) + ". Run `python -m study.ask doctor` for details")


def flaw_of(trajectory, policy: Policy) -> str:
    """Return the first invariant that a trajectory breaks, or ""."""
    if len({len(trajectory.ids), len(trajectory.mask), len(trajectory.logprobs), len(trajectory.versions)}) > 1:
        return "a trajectory's ids, mask, log-probs and versions have different lengths"
    in_turns = {i for start, end in trajectory.turns for i in range(start, end)}
    for i, sampled in enumerate(trajectory.mask):
        if sampled and i not in in_turns:
            return "a token outside the assistant's turns has mask 1"
        if bool(sampled) != (trajectory.versions[i] >= 0):
            return "mask and versions disagree on which tokens were sampled"
        if sampled and not trajectory.logprobs[i] <= 0:
            return "a sampled token's log-prob is positive or not a number"
        if sampled and trajectory.ids[i] in policy.never_sampled:
            return "a token that stands for pixels was sampled"
    return ""


def trainer_logprobs(policy: Policy, trajectories: Sequence, temperature: float) -> Tensor:
    """Return the trainer's log-probs of the sampled tokens. All ranks call it."""
    bundles = [Bundle.conversation(t.ids, t.mask, t.clips) for t in trajectories]
    with torch.no_grad():
        return policy(bundles, temperature).logprobs.cpu()


def logprob_gap(policy: Policy, trajectories: Sequence, temperature: float) -> float:
    """Return the mean |trainer's - engine's log-prob| of the sampled tokens; 0 if there are none. All ranks call it."""
    gaps = (trainer_logprobs(policy, trajectories, temperature) - engine_logprobs(trajectories)).abs()
    return gaps.sum().item() / max(1, len(gaps))


def engine_logprobs(trajectories: Sequence) -> Tensor:
    """Return the log-probs that the engine reported for the same tokens."""
    return torch.tensor([p for t in trajectories for p, m in zip(t.logprobs, t.mask) if m])


def position_error(policy: Policy, trajectory, renderer: Renderer) -> int:
    """Return the largest difference between our M-RoPE positions and transformers' own."""
    merge = renderer.contract.merge
    _, grid = patchify(trajectory.clips, renderer.contract.patch, merge)
    sizes = [(rows // merge, columns // merge) for _, rows, columns in grid.tolist()]
    ours, _, _ = rope_positions(np.array(trajectory.ids), sizes, renderer.image_pad, 0)
    ids = torch.tensor([trajectory.ids])
    pads = (ids == renderer.image_pad).int()
    theirs, _ = policy.model.model.get_rope_index(ids, mm_token_type_ids=pads, image_grid_thw=grid)
    return int(np.abs(theirs[:, 0].numpy() - ours).max())
