"""data.py: the nouns of the project, and what the agents are told.

    Task -> Trajectory (an agent's exact tokens) -> Episode (main agent, sub-agents, calls) -> Group (G of them, one K)
    Bundle (one prompt, the suffixes that continue it): the unit of training for SFT and RL alike

    overview(task, k, videos, contract) -> frames; main_messages(task, frames, True) -> messages for contract.Renderer

SFT, RL, evaluation and `ask` open every agent with the functions here. Datasets become these nouns in dataset.py.

    python data.py check PATH|CONFIG      # schema, types, missing and corrupt videos, token lengths; exit status
    python data.py materialize ...        # sentinel paths of the published parquets -> file:// paths
    python data.py parallelize IN OUT     # sequential tool trajectories -> several calls in one turn

Deliberately missing: prompts in other languages, prompts per dataset.
"""

import hashlib
import itertools
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from runtime.contract import VisualContract
from runtime.video import Frames, Videos

# ------------------------------------------------------------------------------------------------ the nouns


@dataclass(frozen=True)
class Task:
    """One question about one video (or several)."""

    id: str
    question: str  # as the user asks it, options included
    videos: tuple[str, ...]  # absolute paths
    kind: str  # mcq | tvg | oe
    answer: str  # gold: a letter, "[start, end]" in seconds, or free text
    options: tuple[str, ...] = ()  # mcq: the option texts without their letters, where the source lists them


@dataclass
class Trajectory:
    """One agent's exact tokens, append-only: template, sampled ids as the engine returned them, tokenised deltas."""

    ids: list[int]  # image pads expanded
    mask: list[int]  # 1 = sampled by the policy
    logprobs: list[float]  # behaviour log-prob under temperature tau; 0 where mask is 0
    versions: list[int]  # version of the weights that sampled the token; -1 where mask is 0
    frames: list[Frames]  # in the order of their pads
    prompt_length: int  # ids before the first assistant turn's content; shared by a group
    turns: list[tuple[int, int]] = field(default_factory=list)  # the assistant's, [start, end) in ids with the prefix
    finish: str = ""  # why the last turn ended: stop | length


CALL_ERRORS = ("unparseable", "unknown_tool", "bad_arguments", "over_limit", "timeout", "failed")


@dataclass
class Call:
    """One tool call of the main agent and what came of it."""

    turn: int
    name: str
    arguments: dict[str, Any]
    text: str = ""  # what the model read: a report or an error text
    error: str = ""  # "" = executed; else one of CALL_ERRORS
    window: tuple[float, float] | None = None  # seconds, after clamping
    seconds: float = 0.0
    agent: Trajectory | None = None  # the sub-agent that answered


@dataclass
class Episode:
    """One attempt at a task."""

    task: Task
    k: int  # overview frames
    main: Trajectory
    calls: list[Call] = field(default_factory=list)
    seed: int = 0
    seconds: float = 0.0
    error: str = ""  # the episode could not run (video, engine): it earns nothing and is not trained on
    reward: dict[str, float] = field(default_factory=dict)  # parts by name
    advantage: float = 0.0  # A_i, of every sampled token ...
    anchor_advantage: float = 0.0  # ... and A_anchor_i, of its structural ones (credit: struct)

    @property
    def agents(self) -> list[Trajectory]:
        return [call.agent for call in self.calls if call.agent is not None]

    @property
    def trajectories(self) -> list[Trajectory]:
        return [self.main, *self.agents]

    @property
    def executed(self) -> int:
        """Calls that ran, which kappa counts."""
        return sum(not call.error for call in self.calls)


@dataclass
class Group:
    """G episodes of one task that share K and thus the prompt."""

    task: Task
    k: int
    episodes: list[Episode]


@dataclass
class Bundle:
    """One prompt and the suffixes that continue it; a lone conversation is one suffix of an empty prompt."""

    prompt: list[int]
    suffixes: list[list[int]]
    masks: list[list[int]]  # per suffix: 1 on the tokens whose log-probs are wanted
    frames: list[Frames]  # of the prompt, then of each suffix, in the order of their pads
    weight: float = 1.0  # of its target tokens in the loss

    def __len__(self) -> int:
        return len(self.prompt) + sum(map(len, self.suffixes))


# ------------------------------------------------------------------------------------------------ prompts

SYSTEM = (
    "You answer questions about a video. You see frames of it, each after its time.\n"
    "Think between <think> and </think>, then give the final answer between <answer> and </answer>: "
    "an option's letter, a time span as start - end in seconds, or a few words."
)
SYSTEM_WITH_TOOLS = SYSTEM + (
    "\nThe frames are only a sample. If they do not show enough, call tools before you answer: "
    "several calls in one turn run in parallel, and each returns a report."
)
SUBAGENT_SYSTEM = (
    "You see frames of one part of a video, each after its time. Report briefly what happens in it, and when."
)
SUBAGENT_REQUEST = "What happens here?"


def main_messages(task: Task, overview: Sequence[Frames], with_tools: bool) -> list[dict]:
    """The opening of every main agent: SFT, RL, evaluation and `ask`."""
    parts: list[str | Frames] = []
    for path, frames in zip(task.videos, overview, strict=True):
        if len(overview) > 1:  # tools pick a video by its name
            parts.append(f"\n{os.path.basename(path)}: ")
        parts.append(frames)
    system = SYSTEM_WITH_TOOLS if with_tools else SYSTEM
    return [{"role": "system", "content": system}, {"role": "user", "content": [*parts, "\n" + task.question]}]


def subagent_messages(frames: Frames, question: str | None) -> list[dict]:
    """The opening of a sub-agent; it reads the question only where the config says so."""
    request = SUBAGENT_REQUEST + (f"\nQuestion: {question}" if question else "")
    return [{"role": "system", "content": SUBAGENT_SYSTEM}, {"role": "user", "content": [frames, "\n" + request]}]


def overview(task: Task, k: int, videos: Videos, contract: VisualContract) -> list[Frames]:
    """K uniform frames: of one video, or shared out evenly over several, each of which shows at least one."""
    n = [videos.info(path).n_frames for path in task.videos]
    # Dealt out one by one to those that have more: what a short video cannot fill, the others get.
    turns = (i for turn in range(k) for i in range(len(n)) if turn < n[i])
    shares = Counter(itertools.islice(turns, max(k, len(n))))
    return [videos.overview(path, shares[i], contract.frame_size) for i, path in enumerate(task.videos)]


def draw_frames(task_id: str, epoch: int, choices: Sequence[int], seed: int = 0) -> int:
    """nFrames gating: K ~ Uniform(choices), the same in every process and for all rollouts of the prompt."""
    digest = hashlib.sha256(f"{seed}/{epoch}/{task_id}".encode()).digest()
    return choices[int.from_bytes(digest[:8], "big") % len(choices)]


if __name__ == "__main__":
    from study import prepare  # the commands stand apart from what training imports

    sys.exit(prepare.main())
