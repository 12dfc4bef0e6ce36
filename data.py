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

import sys

if (
    __name__ == "__main__"
):  # the commands, before this file's own imports: what is loaded as a script is not loaded again
    from study.prepare import main

    sys.exit(main())

import functools
import hashlib
import itertools
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from runtime.answers import parse_span
from runtime.contract import Bundle, Renderer, VisualContract
from runtime.dataset import RowError, read_json
from runtime.video import Frames, VideoError, Videos

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


# ------------------------------------------------------------------------------------------------ RL rows


def _refusing(parse: Callable) -> Callable:
    """Whatever else a foreign row may be shaped like costs that row, not the run."""

    @functools.wraps(parse)
    def parse_or_refuse(*arguments, **more):
        try:
            return parse(*arguments, **more)
        except (KeyError, TypeError, AttributeError) as error:
            raise RowError(f"malformed: {error!r}") from error

    return parse_or_refuse


@_refusing
def parse_task(row: dict, origin: str, root: Path, _weight: float = 1.0) -> Task:
    """`prompt` (messages, a literal <video>), `videos` ([{"video": path}]), `extra_info` (answer, question_type)."""
    info = read_json(row.get("extra_info") or {}, "extra_info")
    if "prompt" not in row:
        raise RowError(
            f"no field `prompt`, only {', '.join(row)}: RL rows have it; rows with `messages` are for sft.py"
        )
    messages = read_json(row["prompt"], "prompt")
    videos = [
        _resolve(v["video"] if isinstance(v, dict) else v, root) for v in read_json(row.get("videos") or [], "videos")
    ]
    present = tuple(path for path in videos if os.path.exists(path))
    if not present:
        raise RowError(f"no video of the row exists: {', '.join(videos) or 'none is named'}")
    users = [m["content"] for m in messages or [] if isinstance(m, dict) and m.get("role") == "user"]
    if not users or not isinstance(users[-1], str):
        raise RowError("`prompt` holds no user message with text")
    kind, answer = info.get("question_type") or "oe", info.get("answer")  # parquet fills what a row lacks with None
    if kind not in ("mcq", "tvg", "oe"):
        raise RowError(f"question_type = {kind!r}: must be mcq, tvg or oe")
    answer = "" if answer is None else str(answer).strip()
    if not answer:
        raise RowError("extra_info has no answer")
    if kind == "mcq" and not re.fullmatch("[A-J]", answer.strip("() .").upper()):
        raise RowError(f"answer = {answer!r}: of an mcq, must be a letter from A to J")
    if kind == "tvg" and not parse_span(answer):
        raise RowError(f"answer = {answer!r}: of a tvg, must be a span of seconds, as in [12.5, 20.1]")
    return Task(
        id=origin if info.get("id") is None else str(info["id"]),
        question=users[-1].replace("<video>", "").strip(),
        videos=present,
        kind=kind,
        answer=answer,
        options=tuple(map(str, info.get("options") or ())),
    )


# ------------------------------------------------------------------------------------------------ SFT rows


@dataclass(frozen=True)
class Clip:
    """A video or an image of a row. The keys are qwen-vl-utils': nframes, video_start, video_end."""

    path: str
    nframes: int | None = None  # frames of the overview; None: the contract's
    start: float | None = None  # seconds; with `end` a window, sampled like a crop
    end: float | None = None
    still: bool = False

    def frames(self, videos: Videos, contract: VisualContract) -> Frames:
        if self.still:
            return _still(self.path, contract)
        if self.start is None:
            return videos.overview(self.path, self.nframes or contract.overview_frames, contract.frame_size)
        limits = contract.crop_fps, contract.crop_min_frames, contract.crop_max_frames
        return videos.window(self.path, self.start, self.end, contract.frame_size, *limits)


@dataclass(frozen=True)
class Dialogue:
    """An SFT row: the opening question and the turns that answer it."""

    id: str
    agent: str  # whose opening the first user turn gets: main | direct (a main agent without tools) | sub
    question: str
    media: tuple[Clip, ...]
    turns: tuple[dict, ...]  # {"role": assistant | user | tool, "content": [str | Clip, ...]}
    weight: float = 1.0


@_refusing
def parse_dialogue(row: dict, origin: str, root: Path, weight: float = 1.0) -> Dialogue:
    """`messages` (a JSON string or a list); tool results as `tool` messages or as user text in <tool_response> tags.

    The row's system prompt is dropped: SFT, RL and evaluation share one. The optional column `agent` marks rows that
    teach another agent than the main one."""
    if "messages" not in row:
        raise RowError(
            f"no field `messages`, only {', '.join(row)}: SFT rows have it; rows with `prompt` are for rl.py"
        )
    messages = read_json(row["messages"], "messages")
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise RowError("`messages` is not a list of messages")
    turns: list[dict] = []
    for message in messages:
        role, parts = message.get("role"), _parts(message, root)
        if role == "system":
            continue
        if role not in ("user", "assistant", "tool"):
            raise RowError(f"role {role!r}: must be system, user, assistant or tool")
        if role == "user" and any(isinstance(p, str) and "<tool_response>" in p for p in parts):
            turns += [{"role": "tool", "content": content} for content in _responses(parts)]
        else:
            turns.append({"role": role, "content": parts})
    roles = [turn["role"] for turn in turns]
    if not roles or roles[0] != "user" or roles[-1] != "assistant":
        raise RowError(f"turns {roles}: must open with the user and close with the assistant")
    if any(a == b == "assistant" or (a == "user" and b != "assistant") for a, b in zip(roles, roles[1:])):
        raise RowError(f"turns {roles}: the assistant must follow each user, and never itself")
    agent, opening = row.get("agent") or "main", turns[0]["content"]
    if agent not in ("main", "direct", "sub"):
        raise RowError(f"agent {agent!r}: must be main, direct or sub")
    return Dialogue(
        id=origin,
        agent=agent,
        question=re.sub(r"<(video|image)>", "", " ".join(p for p in opening if isinstance(p, str))).strip(),
        media=tuple(p for p in opening if isinstance(p, Clip)),
        turns=tuple(turns[1:]),
        weight=weight,
    )


def encode_dialogue(dialogue: Dialogue, videos: Videos, renderer: Renderer, tools: list[dict]) -> Bundle:
    """Tokens and frames of a row; loss only on assistant tokens."""
    contract = renderer.contract
    media = [clip.frames(videos, contract) for clip in dialogue.media]
    if dialogue.agent == "sub":
        if len(media) != 1:
            raise RowError(f"a sub-agent's row shows one clip, this one {len(media)}")
        opening = subagent_messages(media[0], dialogue.question or None)
    else:
        paths = tuple(clip.path for clip in dialogue.media)
        task = Task(dialogue.id, dialogue.question, paths, "oe", "")
        opening = main_messages(task, media, with_tools=dialogue.agent == "main")
    turns = [
        t | {"content": [p.frames(videos, contract) if isinstance(p, Clip) else p for p in t["content"]]}
        for t in dialogue.turns
    ]
    rendered = renderer.render([*opening, *turns], tools if dialogue.agent == "main" else None)
    if 1 not in rendered.mask:
        raise RowError("no assistant token to learn")
    return Bundle([], [rendered.ids], [rendered.mask], rendered.frames, dialogue.weight)


def _parts(message: dict, root: Path) -> list[str | Clip]:
    content = message.get("content")
    parts: list[str | Clip] = []
    for part in [content] if isinstance(content, str) else content or []:
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        if part.get("type") == "text" and isinstance(part.get("text"), str):
            parts.append(part["text"])
            continue
        key = next((k for k in ("video_url", "image_url", "video", "image") if part.get(k)), None)
        if key is None:
            raise RowError(f"a part of type {part.get('type')!r} is neither text, video nor image")
        url = part[key]
        options = url | part if isinstance(url, dict) else part
        path = _resolve(url["url"] if isinstance(url, dict) else url, root)
        if not os.path.exists(path):
            raise RowError(f"{path}: no such file")
        nframes, start, end = (options.get(name) for name in ("nframes", "video_start", "video_end"))
        if (start is None) != (end is None):
            raise RowError(f"{path}: video_start and video_end come together")
        if start is not None and not -math.inf < start <= end < math.inf:
            raise RowError(
                f"{path}: video_start = {start}, video_end = {end}: must be seconds, the start before the end"
            )
        if nframes is not None and not (isinstance(nframes, int) and nframes > 0):
            raise RowError(f"{path}: nframes = {nframes!r}: must be a whole number above 0")
        parts.append(Clip(path, nframes, start, end, still=key.startswith("image")))
    for call in message.get("tool_calls") or []:
        function = call.get("function", call)
        arguments = read_json(function.get("arguments", {}), "arguments")
        text = json.dumps({"name": function.get("name"), "arguments": arguments}, ensure_ascii=False)
        parts.append("\n" * bool(parts) + f"<tool_call>\n{text}\n</tool_call>")
    return parts


def _responses(parts: list[str | Clip]) -> list[list[str | Clip]]:
    """A user turn of <tool_response> blocks -> the content of each; media belong to the block they precede."""
    responses: list[list[str | Clip]] = []
    current: list[str | Clip] = []
    for part in parts:
        for piece in re.split("(</?tool_response>)", part) if isinstance(part, str) else [part]:
            if piece == "</tool_response>":
                responses.append(current)
                current = []
            elif not isinstance(piece, str):
                current.append(piece)
            elif piece != "<tool_response>" and piece.strip():
                current.append(piece.strip("\n"))
    if current:
        raise RowError("text or media after the last </tool_response>")
    return responses


def _still(path: str, contract: VisualContract) -> Frames:
    try:
        with Image.open(path) as image:
            pixels = np.array(image.convert("RGB").resize(contract.frame_size(*image.size), Image.Resampling.BICUBIC))
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise VideoError(path, f"not a readable image: {error}") from None
    return Frames(pixels[None], (None,))  # an image has no time, so no stamp


def _resolve(url: str, root: Path) -> str:
    """A path of a row -> an absolute path: file:// and absolute ones as they are, others below the root."""
    return os.path.abspath(os.path.join(root, url.removeprefix("file://")))
