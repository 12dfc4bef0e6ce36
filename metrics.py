"""metrics.py: what a step's episodes show, one number per name.

    add_format_metrics(groups, renderer, cfg)    # into the episodes' rewards: their tags, and f on the paper's scale
    describe(groups, ks, step)                   # means over all ranks: rewards, calls, reports, lengths

The last part computes f as the released code does, only to compare it with the paper's. grpo.accumulate measures the update
(loss, KL, entropy, log-prob gaps), and runtime/run.py the speed. run.py writes everything to RUN/metrics.jsonl.
"""

import contextlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Sequence

from episode import CALL_ERRORS, Episode, Group, Trajectory
from rewards import FORMAT_WEIGHTS, TAG_LIMITS, Elements, RewardConfig, is_spam, split_turn, turn_texts
from runtime.distributed import gather, mean_over_ranks
from runtime.render import END_OF_TURN, TAG, Renderer
from tools import TOOLS

# ------------------------------------------------------------------------------------------------ means over a step


def describe(groups: Sequence[Group], ks: Sequence[int], step: int) -> dict[str, float]:
    """Return a step's metrics, averaged over all ranks. `ks`: the values of K that are drawn.

    share/K=..., flat_groups    mean over the groups
    failed_rate                 over all episodes
    parallel_rate               over the episodes that called
    call_errors/...             over all calls
    calls/distinct              over the calls that ran: 1 unless the episode made exactly the same call before
    report/...                  over the sub-agents' reports
    all others                  over the episodes that did not fail; acc/K=... only over those with that K, closure/... only over
                                those that opened the tag"""
    seen: dict[str, list[float]] = defaultdict(list)
    for group in groups:
        for k in ks:
            seen[f"share/K={k}"].append(group.k == k)
        seen["flat_groups"].append(group.flat)
        for episode in group.episodes:
            seen["failed_rate"].append(bool(episode.error_kind))

    ran = [episode for group in groups for episode in group.ran]
    # A fork's tool may add error kinds. All ranks must count the same ones.
    own_kinds = {call.error for episode in ran for call in episode.calls if call.error}
    error_kinds = set(CALL_ERRORS).union(*gather(own_kinds))
    for episode in ran:
        collect_episode(seen, episode, step)
        collect_calls(seen, episode, error_kinds)
    return mean_over_ranks(seen)


def collect_episode(seen: dict[str, list[float]], episode: Episode, step: int) -> None:
    """Add an episode's rewards, accuracy by K, calls (kappa is their number), lengths and staleness to the metrics."""
    for name, value in episode.rewards.items():
        seen[name].append(value)
    called = "called" if episode.n_executed else "skipped"
    seen[f"acc/K={episode.k}"].append(episode.rewards["R_acc"])
    seen[f"acc/K={episode.k}/{called}"].append(episode.rewards["R_acc"])
    seen["kappa"].append(episode.n_executed)
    seen[f"kappa/K={episode.k}"].append(episode.n_executed)
    seen["calling_rate"].append(episode.n_executed > 0)
    calls_per_turn = Counter(call.turn for call in episode.calls if not call.error)
    if calls_per_turn:
        seen["parallel_rate"].append(max(calls_per_turn.values()) > 1)
    seen["truncated_rate"].append(episode.main.finish == "length")
    seen["turns"].append(len(episode.main.turns))
    seen["sampled_tokens"].append(episode.main.n_sampled)
    seen["critical_tokens"].append(episode.critical_tokens)
    versions = [version for version in episode.main.versions if version >= 0]
    if versions:
        seen["staleness"].append(step - sum(versions) / len(versions))


def collect_calls(seen: dict[str, list[float]], episode: Episode, error_kinds: set[str]) -> None:
    """Add an episode's calls and their reports to the metrics."""
    for name in TOOLS:
        seen[f"calls/{name}"].append(sum(call.name == name and not call.error for call in episode.calls))
    made_before = []
    for call in episode.calls:
        if not call.error:
            seen["calls/distinct"].append((call.name, call.arguments) not in made_before)
            made_before.append((call.name, call.arguments))
        for kind in error_kinds:
            seen[f"call_errors/{kind}"].append(call.error == kind)
        if call.subagent:  # a good report ends by itself, is short and has no tags
            seen["report/ended"].append(call.subagent.finish == "stop")
            seen["report/tokens"].append(call.subagent.n_sampled)
            seen["report/tagged"].append(bool(TAG.search(call.text)))


# ------------------------------------------------------------------------------------------------ the tags of an episode


def add_format_metrics(groups: Sequence[Group], renderer: Renderer, cfg: RewardConfig) -> None:
    """Add the metrics that no reward needs to the rewards of every episode that ran, because records keep the rewards."""
    for group in groups:
        for episode in group.ran:
            episode.rewards |= format_metrics(episode, renderer, cfg)


def format_metrics(episode: Episode, renderer: Renderer, cfg: RewardConfig) -> dict[str, float]:
    """Return what the tags of an episode show beside its rewards."""
    turns = [split_turn(text) for text in turn_texts(episode.main, renderer)]
    return tag_metrics(turns) | {"f_release": f_release(sampled_text(episode.main, renderer), cfg)}


def tag_metrics(turns: list[Elements]) -> dict[str, float]:
    """Return three metrics per tag. `spam/TAG` is 1 if a turn exceeds the tag's limit. `closure/TAG` is the share of opened
    tags that were closed in their turn, if any was opened; Format Fragility shows here first. `surplus/TAG` counts the
    closing tags beyond the opened ones of their turn. <tool_code>, in which pretrained models call, only has its closure."""
    metrics = {}
    for name in (*TAG_LIMITS, "tool_code"):
        opened = closed = surplus = 0  # in all turns
        for turn in turns:
            opening, closing = turn.count(f"<{name}>"), turn.count(f"</{name}>")
            opened += opening
            closed += min(opening, closing)
            surplus += max(0, closing - opening)
        if name in TAG_LIMITS:
            metrics[f"spam/{name}"] = float(is_spam(turns, name))
            metrics[f"surplus/{name}"] = float(surplus)
        if opened:
            metrics[f"closure/{name}"] = closed / opened
    return metrics


# ------------------------------------------------------------------------------------------------ f on the paper's scale

MIN_CHARS = 10  # of a thought in the release; ours counts letters and digits (rewards.MIN_THOUGHT)


def f_release(text: str, cfg: RewardConfig) -> float:
    """Return f as the released code computes it, to compare with the paper's. It is a metric and no part of R. `text` is the
    sampled text of all turns. It lacks a forced <think>, so a tidy direct answer scores 0.5."""
    # s = w_think * [thinks] + w_answer * [answers] + w_think_before_call * [thinks and calls, and <think> comes first]
    # R_anchor = alpha * [thinks and closed] + beta * [thinks, closed and answers] - gamma * [opened and not closed]
    # u = s + lambda * R_anchor; with credit off, u = s
    # f = min(1, u + 0.1 * [u > 0, and the tags are balanced])
    thinks = len(release_thought(text)) >= MIN_CHARS
    answers = any(part.partition("<answer>")[2].strip() for part in text.split("</answer>")[:-1])
    before_calls = re.split("<tool_call>|<tool_code>", text)[0]
    thinks_before_call = thinks and "<think>" in before_calls and release_has_call(text)
    opened, closed = "<think>" in text, "</think>" in text
    names = ("think", "tool_call", "tool_code", "answer")
    balanced = all(text.count(f"<{name}>") == text.count(f"</{name}>") for name in names)

    weights = FORMAT_WEIGHTS[cfg.answer_suffix]
    s = weights["think"] * thinks
    s += weights["answer"] * answers
    s += weights["think_before_call"] * thinks_before_call
    anchor = cfg.anchor.alpha * (thinks and closed)
    anchor += cfg.anchor.beta * (thinks and closed and answers)
    anchor -= cfg.anchor.gamma * (opened and not closed)
    total = s
    if cfg.anchor.credit != "off":
        total += cfg.anchor.lam * anchor
    return min(1.0, total + 0.1 * (total > 0 and balanced))


def release_thought(text: str) -> str:
    """Return the first thought as the release reads it. If no </think> follows, it ends at the next call, answer or end of turn."""
    thought = text.partition("<think>")[2]
    if "</think>" not in thought:
        thought = re.split(r"<tool_|<answer>|<\|im_end\|>", thought)[0]
    return thought.partition("</think>")[0].strip()


def release_has_call(text: str) -> bool:
    """Return whether the release finds a call: a JSON object with a name, or a line of code with a bracket. The call's tag need
    not be closed."""
    for call in re.findall(r"<tool_call>(.*?)(?:</tool_call>|\Z)", text, re.S):
        with contextlib.suppress(ValueError, RecursionError):
            call = json.loads(call.strip())
            if isinstance(call, dict) and "name" in call:
                return True
    for code in re.findall(r"<tool_code>(.*?)(?:</tool_code>|\Z)", text, re.S):
        lines = [line.strip() for line in code.strip().splitlines()]
        if not code.strip().startswith(END_OF_TURN) and any("(" in line and line[0] != "#" for line in lines):
            return True
    return False


def sampled_text(trajectory: Trajectory, renderer: Renderer) -> str:
    return renderer.decode([id for id, sampled in zip(trajectory.ids, trajectory.mask) if sampled])
