"""Scripted agents and in-memory videos, for tests of the rollout and of tools.

[episode] = play(renderer, turns("Closer.</think>" + call + END, last, report="It is red."), tools=("my_tool",))
"""

import json
import threading
import time
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from tiny import TOOL, noise

from episode import NO_PROMPT, Episode, Group, Prompt, Task, Trajectory, episodes_of
from rewards import assign_rewards
from rollout import AgentContext, RolloutConfig, rollout
from runtime.engine import Sample
from runtime.lines import read_lines
from runtime.prompts import subagent_system_prompt
from runtime.render import END_OF_TURN, Renderer
from runtime.video import Clip, VideoError, VideoInfo, uniform_indices, window_indices
from tools import parse_calls

TASK = Task("t1", "What happens?", ("/data/v.mp4",), "oe", "")
END = "<|im_end|>"


def load_episodes(path: Path) -> list[Episode]:
    return episodes_of(read_lines(path))


NO_TABLE = np.zeros((0, 3), np.int64)  # of a video without a file


class MemoryVideos:
    """`video.Videos` without files. A name stands for a video; names that begin with "bad" cannot be decoded."""

    def __init__(self, duration: float = 60.0, fps: float = 2.0, size: tuple[int, int] = (64, 64)):
        self.duration, self.times, self.size = duration, np.arange(int(duration * fps)) / fps, size
        self._cache, self._lock = {}, threading.Lock()

    def info(self, path: str) -> VideoInfo:
        if Path(path).name.startswith("bad"):
            raise VideoError(path, "is not a video")
        return VideoInfo(path, *self.size, self.times, self.duration, NO_TABLE)

    def frames(self, path: str, indices: list[int], size: tuple[int, int]) -> Clip:
        self.info(path)
        key = (path, tuple(indices), size)
        with self._lock:  # as with the real one, threads that ask for the same frames get one array
            if key not in self._cache:
                seed = zlib.crc32(repr(key).encode())
                self._cache[key] = noise(len(indices), seed, *size).pixels
        return Clip(self._cache[key], tuple(self.times[list(indices)].tolist()))

    def overview(self, path: str, k: int, size_rule) -> Clip:
        return self.frames(path, uniform_indices(len(self.times), k), size_rule(*self.size))

    def window(self, path, start, end, size_rule, fps, max_frames) -> Clip:
        return self.frames(path, window_indices(self.times, start, end, fps, max_frames), size_rule(*self.size))


@dataclass
class Request:
    """A call of a scripted engine's `generate`."""

    ids: list[int]
    prompt: str  # the text of the ids
    clips: list[Clip]
    max_new_tokens: int
    temperature: float
    seed: int


class Scripted:
    """An engine that samples what `reply(prompt_text, seed)` returns (text or ids). It records its requests, and asserts that
    weights do not change while it samples."""

    version = 0
    servers = ()

    def __init__(self, renderer: Renderer, reply, latency: float = 0.0):
        self.renderer, self.reply, self.latency = renderer, reply, latency
        self.asked: list[Request] = []
        self.busy, self.expected, self.least_expected = 0, 0, 0
        self._lock = threading.Lock()

    def generate(self, prompt, ids, clips, *, max_new_tokens, temperature, seed, stop=()) -> Sample:
        ids, clips = prompt.ids + ids, [*prompt.clips, *clips]
        request = Request(ids, self.renderer.decode(ids), clips, max_new_tokens, temperature, seed)
        with self._lock:
            self.asked.append(request)
            self.busy += 1
        try:
            time.sleep(self.latency)
            said = self.reply(request.prompt, seed)
        finally:
            with self._lock:
                self.busy -= 1
        said = self.renderer.tokenizer.encode(said, add_special_tokens=False) if isinstance(said, str) else list(said)
        ends = [i for i, token in enumerate(said) if token in stop]
        said = said[: ends[0] + 1] if ends else said
        finish = "stop" if ends and len(said) <= max_new_tokens else "length"
        said = said[:max_new_tokens]
        return Sample(said, [-1.0] * len(said), finish, self.version)

    def announce(self, change: int) -> None:
        with self._lock:
            self.expected += change
            self.least_expected = min(self.least_expected, self.expected)

    def update_weights(self, path, version) -> None:
        assert not self.busy
        self.version = version

    def close(self) -> None:
        pass


def is_subagent(prompt: str) -> bool:
    return subagent_system_prompt() in prompt


def turns(*said, report="I saw a cat."):
    """Make a `reply` for an agent that says these turns in order, and for sub-agents that report."""

    def reply(prompt: str, seed: int) -> str:
        if is_subagent(prompt):
            return (report(prompt) if callable(report) else report) + END
        turn = prompt.count("<|im_start|>assistant") - 1
        return said[min(turn, len(said) - 1)]

    return reply


def crop(start: float = 0, end: float = 8, **more) -> str:
    """Return the text of a call of TOOL."""
    call = {"name": TOOL, "arguments": {"start_time": start, "end_time": end} | more}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


RIGHT_OR_WRONG = "I see it.\n</think>\n<answer>{}</answer>" + END_OF_TURN


def by_chance(prompt: str, seed: int) -> str:
    """Reply so that episodes call or do not, and answer well or badly, depending on their seeds."""
    if is_subagent(prompt):
        return f"A red flash at 3 s.{END_OF_TURN}"
    if "<tools>" in prompt and "<tool_response>" not in prompt and seed % 3:
        return f"I look.\n</think>\n{crop()}{END_OF_TURN}"
    return RIGHT_OR_WRONG.format("red" if seed % 2 else "blue")


def play(renderer, reply, tasks=(TASK,), group_size=1, engine=None, videos=None, **cfg) -> list[Episode]:
    """Run episodes whose agents say what `reply` returns, and return them. `cfg`: settings of RolloutConfig."""
    settings = RolloutConfig(**{"max_context": 100_000, **cfg})
    context = AgentContext(engine or Scripted(renderer, reply), renderer, videos or MemoryVideos(), settings)
    groups = rollout(context, tasks, [4] * len(tasks), group_size)
    return [episode for group in groups for episode in group.episodes]


def check_trajectory(agent: Trajectory, renderer: Renderer) -> None:
    """Check the invariants that every trajectory must keep."""
    n = len(agent.ids)
    assert n == len(agent.mask) == len(agent.logprobs) == len(agent.versions)
    assert all((lp == 0) and v == -1 for lp, v, m in zip(agent.logprobs, agent.versions, agent.mask) if not m)
    assert all(lp <= 0 and v >= 0 for lp, v, m in zip(agent.logprobs, agent.versions, agent.mask) if m)
    assert not set(renderer.never_sampled) & {t for t, m in zip(agent.ids, agent.mask) if m}
    inside = {i for a, b in agent.turns for i in range(a, b)}
    assert all(i in inside for i, m in enumerate(agent.mask) if m)
    pads = 0
    for clip in agent.clips:
        pads += len(clip) * renderer.contract.frame_tokens(*clip.pixels.shape[2:0:-1])
    assert agent.all_ids.count(renderer.image_pad) == pads


class Characters:
    """A renderer with one token per character and one for the end of turn."""

    ends_of_turn = (0x10FFFF,)

    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text.replace(END_OF_TURN, "\U0010ffff")]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(i) for i in ids).replace("\U0010ffff", END_OF_TURN)

    def offsets(self, ids: list[int]) -> list[tuple[int, int]]:
        ends = [len(self.decode(ids[: i + 1])) for i in range(len(ids))]
        return list(zip([0, *ends], ends))


def episode_of_turns(turns: list[str], task: Task, renderer, executed: int = 0, forced: str = "") -> Episode:
    """Return the episode that a rollout with these turns would record. The first `executed` calls count as run."""
    main, calls = Trajectory(NO_PROMPT), []
    for i, turn in enumerate(turns):
        given = renderer.encode(forced) if turn.startswith(forced) else []
        sampled = renderer.encode(turn.removeprefix(forced))
        main.turns.append((len(main.ids), len(main.ids) + len(given) + len(sampled)))
        main.ids += given + sampled
        main.mask += [0] * len(given) + [1] * len(sampled)
        for call in parse_calls(turn, i):
            ran = len(calls) < executed
            calls.append(call if ran or call.error else replace(call, error="failed"))
    return Episode(task, 64, main, calls)


def group_that_said(renderer, cfg, turns, name="t", prompt=(40, 41, 42)):
    """Return a group of one-turn episodes with behaviour log-probs and rewards."""
    task, episodes = Task(name, "Which?", (), "oe", "red"), []
    prompt = Prompt([*prompt], [])
    for i, turn in enumerate(turns):
        episode = episode_of_turns([turn], task, renderer)
        main = episode.main
        main.prompt = prompt
        main.logprobs = [-0.1 * (i + 1) * m for m in main.mask]
        main.versions = [m - 1 for m in main.mask]
        episodes.append(episode)
    one = Group(task, 64, episodes)
    assign_rewards([one], renderer, cfg.reward)
    return one
