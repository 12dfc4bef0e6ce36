"""episode.py: the data types that the whole code shares, and the records of episodes.

    Task -> Prompt -> Trajectory (an agent's tokens) -> Episode (main agent, sub-agents, calls) -> Group (G episodes, one K)

    keep_episodes(groups, renderer.readable, path)                 # a line of JSON per episode: its `episode_record`
    episodes_of(read_lines(path))                                  # episodes again; their clips have times, but no pixels

rl.py and eval.py write episodes to RUN/episodes/, and `study.ask --trace` to a file. `study.report` shows them. This file
imports only Clip and the writer of lines, so every file may import it but runtime/video.py.

Deliberately missing: pixels in the records, and reading the records of another version of this code.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from runtime.lines import printable, write_lines
from runtime.video import Clip

# ------------------------------------------------------------------------------------------------ data types


@dataclass(frozen=True)
class Task:
    """One question about one video (or several)."""

    id: str  # K and all seeds derive from it
    question: str  # as the user asks it, including the options
    videos: tuple[str, ...]  # absolute paths with distinct base names: a call names a video by its base name
    kind: str  # mcq (multiple choice) | tvg (a span of time) | oe (open-ended)
    answer: str  # gold: a letter, "[start, end]" in seconds, or free text
    options: tuple[str, ...] = ()  # mcq: the option texts without their letters, if the source lists them


@dataclass(frozen=True, eq=False)
class Prompt:
    """What an agent reads first. Agents that read the same hold the same object, so nobody compares ids: the episodes of a
    group, and the sub-agents that see the same frames."""

    ids: list[int]  # image pads expanded
    clips: list[Clip]  # in the order of their pads


NO_PROMPT = Prompt([], [])  # of an episode that failed before it had one, and of rows that share none with others


@dataclass
class Trajectory:
    """One agent's exact tokens after its prompt, append-only: sampled ids as the engine returned them, and tool turns. It is
    also the row that SFT and RL train on.

    The columns from `ids` to `versions` have one entry per token. So have `structural` and `loss_weights`, once they are filled."""

    prompt: Prompt
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)  # 1 = a target: the policy sampled it, or SFT teaches it
    logprobs: list[float] = field(default_factory=list)  # behaviour log-prob under temperature tau; 0 where mask is 0
    versions: list[int] = field(default_factory=list)  # version of the weights that sampled it; -1 where mask is 0
    turns: list[tuple[int, int]] = field(default_factory=list)  # the assistant's [start, end) in ids, opening included
    finish: str = ""  # why the last turn ended: stop | length
    call_clips: list[Clip] = field(default_factory=list)  # clips that its calls returned (`tool_return: frames`)
    structural: list[int] = field(default_factory=list)  # 1 = sampled, in struct(o); rewards.py fills the main agent's
    loss_weights: Sequence[float] | np.ndarray = field(default=(), compare=False)  # RL: A_i,t; SFT: w_t; not in records

    @property
    def n_sampled(self) -> int:
        return sum(self.mask)

    @property
    def all_ids(self) -> list[int]:
        """The ids of the prompt and those after it."""
        return self.prompt.ids + self.ids

    @property
    def length(self) -> int:
        """The number of all ids."""
        return len(self.prompt.ids) + len(self.ids)

    @property
    def clips(self) -> list[Clip]:
        """All clips that the agent sees, in the order of their pads."""
        return self.prompt.clips + self.call_clips


CALL_ERRORS = ("unparseable", "unknown_tool", "bad_arguments", "over_limit", "timeout", "failed", "engine", "crashed")


@dataclass(frozen=True)
class Call:
    """One tool call of the main agent. The rollout adds the fields from `text` on, unless the call could not be parsed."""

    turn: int  # the assistant's turn that makes the call; 0 is the first
    name: str  # name and arguments are as the model wrote them
    arguments: dict[str, Any]
    text: str = ""  # what the model reads: a report, an error, or a line about its frames
    error: str = ""  # "": the call ran; otherwise one of CALL_ERRORS, or a tool's own kind
    window: tuple[float, float] | None = None  # seconds, after clamping
    seconds: float = 0.0  # wall-clock, including the sub-agent's report
    subagent: Trajectory | None = None  # the sub-agent that answered
    # Frames that the main agent itself sees. Not in records.
    clips: list[Clip] = field(default_factory=list, compare=False)


@dataclass
class Episode:
    """One attempt at a task. The rollout fills the fields down to `error_text`; `rewards` and the advantages come after it."""

    task: Task
    k: int  # requested overview frames; a shorter video has fewer
    main: Trajectory
    calls: list[Call] = field(default_factory=list)  # in call order; the main agent has read their results
    seed: int = 0
    seconds: float = 0.0  # wall-clock
    # "" if it ran, else RowError, VideoError, EngineError, Refusal (of an API), Stopped or JudgeError
    error_kind: str = ""
    error_text: str = ""  # the reason
    # By name: R and its parts, and what metrics.py adds. eval.py has its own.
    rewards: dict[str, float] = field(default_factory=dict)
    advantage: float = 0.0  # A_i, for every sampled token
    anchor_advantage: float = 0.0  # A_anchor_i, for structural tokens only (credit: struct)

    def fail(self, error: Exception) -> None:
        self.error_kind = type(error).__name__
        self.error_text = str(error)

    @property
    def error(self) -> str:
        """The error in one line, "" if the episode ran."""
        return f"{self.error_kind}: {self.error_text}" if self.error_kind else ""

    @property
    def subagents(self) -> list[Trajectory]:
        return [call.subagent for call in self.calls if call.subagent is not None]

    @property
    def n_executed(self) -> int:
        """Calls that ran. The metric kappa is their mean per episode."""
        return sum(not call.error for call in self.calls)

    @property
    def critical_tokens(self) -> int:
        """Sampled tokens that were waited for: the main agent's, and the longest report of each turn, since reports are written
        in parallel."""
        longest: dict[int, int] = defaultdict(int)  # turn -> tokens
        for call in self.calls:
            if call.subagent:
                longest[call.turn] = max(longest[call.turn], call.subagent.n_sampled)
        return self.main.n_sampled + sum(longest.values())


@dataclass
class Group:
    """G episodes of one task with the same K, so with the same prompt."""

    task: Task
    k: int
    episodes: list[Episode]

    @property
    def ran(self) -> list[Episode]:
        """The episodes that did not fail. Only they are rewarded, compared and trained on."""
        return [episode for episode in self.episodes if not episode.error_kind]

    @property
    def flat(self) -> bool:
        """No episode is better or worse than the others: all advantages are 0."""
        return not any(episode.advantage or episode.anchor_advantage for episode in self.episodes)


# ------------------------------------------------------------------------------------------------ records of episodes


# The pixels of all recorded clips.
NO_PIXELS = np.zeros((0, 0, 0, 3), np.uint8)


def episode_record(episode: Episode, readable: Callable[[list[int]], str]) -> dict[str, Any]:
    """Return the record of an episode: exact ids, their text, and the times of its frames, but no pixels. `readable(ids)` returns
    the text."""
    calls = []
    for call in episode.calls:
        called = vars(call) | {"subagent": call.subagent and trajectory_record(call.subagent, readable)}
        del called["clips"]
        calls.append(called)
    main = trajectory_record(episode.main, readable)
    return vars(episode) | {"task": vars(episode.task), "main": main, "calls": calls}


def console_text(episode: Episode, readable: Callable[[list[int]], str]) -> str:
    """Return what the main agent said and read, in at most twelve lines. The first and the last ones show its format."""
    lines = [f"{episode.task.id}, K={episode.k}: {episode.task.question}", *readable(episode.main.ids).split("\n")]
    if len(lines) > 12:
        lines[8:-3] = ["..."]
    return "\n".join(printable(line[:160]) for line in lines)


def trajectory_record(trajectory: Trajectory, readable: Callable[[list[int]], str]) -> dict[str, Any]:
    prompt = {"ids": trajectory.prompt.ids, "clips": [clip.times for clip in trajectory.prompt.clips]}
    call_clips = [clip.times for clip in trajectory.call_clips]
    text = readable(trajectory.all_ids)
    record = vars(trajectory) | {"prompt": prompt, "call_clips": call_clips, "text": text}
    del record["loss_weights"]
    return record


def keep_episodes(groups: Sequence[Group], readable: Callable[[list[int]], str], path: Path) -> None:
    """Write all episodes of the groups to a new file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    records = []
    for group in groups:
        for episode in group.episodes:
            records.append(episode_record(episode, readable))
    write_lines(path, records)


def episodes_of(records: Iterable[dict[str, Any]]) -> list[Episode]:
    """Rebuild the episodes of a file of records. Equal prompts become one object again."""
    prompts: dict[str, Prompt] = {}
    return [episode_of(record, prompts) for record in records]


def episode_of(record: dict, prompts: dict[str, Prompt]) -> Episode:
    """Rebuild an episode from its record. `prompts`: those of earlier records; new ones are added."""
    task = record["task"]
    task = Task(**task | {"videos": tuple(task["videos"]), "options": tuple(task["options"])})
    calls = []
    for call in record["calls"]:
        window = call["window"] and tuple(call["window"])
        subagent = call["subagent"] and trajectory_of(call["subagent"], prompts)
        calls.append(Call(**call | {"window": window, "subagent": subagent}))
    return Episode(**record | {"task": task, "main": trajectory_of(record["main"], prompts), "calls": calls})


def trajectory_of(record: dict, prompts: dict[str, Prompt]) -> Trajectory:
    prompt = Prompt(record["prompt"]["ids"], clips_of(record["prompt"]["clips"]))
    fields = {name: value for name, value in record.items() if name != "text"}
    fields["prompt"] = prompts.setdefault(json.dumps(record["prompt"]), prompt)
    fields["call_clips"] = clips_of(record["call_clips"])
    fields["turns"] = [tuple(turn) for turn in record["turns"]]
    return Trajectory(**fields)


def clips_of(times: list) -> list[Clip]:
    return [Clip(NO_PIXELS, tuple(of_clip)) for of_clip in times]
