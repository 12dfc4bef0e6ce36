"""data.py: the nouns of the project, what the agents are told, and how rows become tasks and dialogues.

    Task -> Trajectory (an agent's exact tokens) -> Episode (main agent, sub-agents, calls) -> Group (G of them, one K)
    render.Bundle (one prompt, the suffixes that continue it): the unit of training for SFT and RL alike

    overview(task, k, videos, contract) -> frames; main_messages(task, frames, True) -> messages for render.Renderer
    parse_task(RL row) -> Task;  parse_dialogue(SFT row) -> Dialogue;  encode_dialogue(dialogue, ...) -> Bundle

SFT, RL, evaluation and `ask` open every agent with the functions here. runtime/dataset.py streams the rows;
`python -m study.prepare` checks them, and makes the published ones ready. Deliberately missing: prompts per dataset.
"""

import hashlib
import itertools
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runtime.answers import normalise, parse_span
from runtime.dataset import RowError, decode_json
from runtime.render import Bundle, Live, Renderer
from runtime.video import Frames, Videos
from runtime.visual import VisualContract

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

    ids: list[int] = field(default_factory=list)  # image pads expanded
    mask: list[int] = field(default_factory=list)  # 1 = sampled by the policy
    logprobs: list[float] = field(default_factory=list)  # behaviour log-prob under temperature tau; 0 where mask is 0
    versions: list[int] = field(default_factory=list)  # of the weights that sampled the token; -1 where mask is 0
    prompt_frames: list[Frames] = field(default_factory=list)  # what the prompt shows; shared by a group
    prompt_length: int = 0  # ids before the first assistant turn's content; shared by a group
    turns: list[tuple[int, int]] = field(default_factory=list)  # the assistant's, [start, end) in ids with the prefix
    finish: str = ""  # why the last turn ended: stop | length
    call_frames: list[Frames] = field(default_factory=list)  # what its own calls showed (`tool_return: frames`)

    @property
    def n_sampled(self) -> int:
        return sum(self.mask)

    @property
    def suffix(self) -> list[int]:
        """The ids after the prompt."""
        return self.ids[self.prompt_length :]

    @property
    def frames(self) -> list[Frames]:
        """All that the agent saw, in the order of their pads."""
        return self.prompt_frames + self.call_frames


CALL_ERRORS = ("unparseable", "unknown_tool", "bad_arguments", "over_limit", "timeout", "failed", "engine", "crashed")


@dataclass
class Call:
    """One tool call of the main agent and what came of it."""

    turn: int
    name: str
    arguments: dict[str, Any]
    text: str = ""  # what the model read: a report, an error, or which frames it was shown
    error: str = ""  # "" = executed; else one of CALL_ERRORS, or a kind of the tool's own
    window: tuple[float, float] | None = None  # seconds, after clamping
    seconds: float = 0.0
    subagent: Trajectory | None = None  # the sub-agent that answered


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
    rewards: dict[str, float] = field(default_factory=dict)  # R and its parts, by name
    advantage: float = 0.0  # A_i, of every sampled token ...
    anchor_advantage: float = 0.0  # ... and A_anchor_i, of its structural ones (credit: struct)

    @property
    def subagents(self) -> list[Trajectory]:
        return [call.subagent for call in self.calls if call.subagent is not None]

    @property
    def trajectories(self) -> list[Trajectory]:
        return [self.main, *self.subagents]

    @property
    def executed(self) -> int:
        """Calls that ran; kappa is their mean per episode."""
        return sum(not call.error for call in self.calls)

    @property
    def all_tokens(self) -> int:
        """Tokens that all agents sampled."""
        return sum(trajectory.n_sampled for trajectory in self.trajectories)

    @property
    def critical_tokens(self) -> int:
        """Sampled tokens that had to wait for each other: the main agent's, and the longest report of each turn."""
        longest: dict[int, int] = {}
        for call in self.calls:
            if call.subagent is not None:
                longest[call.turn] = max(longest.get(call.turn, 0), call.subagent.n_sampled)
        return self.main.n_sampled + sum(longest.values())


@dataclass
class Group:
    """G episodes of one task that share K and thus the prompt."""

    task: Task
    k: int
    episodes: list[Episode]

    @property
    def ran(self) -> list[Episode]:
        """The episodes that did not fail. Only they are rewarded, compared and trained on."""
        return [episode for episode in self.episodes if not episode.error]


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
THINK_PREFIX = "<think>\n"  # forced at the start of every turn of a main agent
NO_REPORT = "(empty report)"


def true_prompt(system: str, stamped: bool, tool_return: str = "subagent") -> str:
    """Return a system prompt that claims no times where frames have no stamps, and no reports where calls return frames."""
    text = system
    if not stamped:
        text = text.replace(", each after its time", "").replace(", and when", "")
    if tool_return == "frames":
        text = text.replace("each returns a report", "each returns frames of its window")
    return type(system)(text)  # render.Live stays Live


def main_messages(task: Task, overview: Sequence[Frames], with_tools: bool, stamped=True, returns="subagent") -> list:
    """Return the messages that open a main agent, in SFT, RL, evaluation and `ask` alike."""
    parts: list[str | Frames] = []
    for path, frames in zip(task.videos, overview, strict=True):
        if len(task.videos) > 1:  # tools pick a video by its name
            parts.append(f"\n{os.path.basename(path)}: ")
        parts.append(frames)
    # Ours, and live: it names the tags.
    system = Live(true_prompt(SYSTEM_WITH_TOOLS if with_tools else SYSTEM, stamped, returns))
    return [{"role": "system", "content": system}, {"role": "user", "content": [*parts, "\n" + task.question]}]


def subagent_messages(frames: Frames, question: str | None, request=SUBAGENT_REQUEST, system=SUBAGENT_SYSTEM) -> list:
    """Return the messages that open a sub-agent. A row of SFT may carry a question; a rollout never gives one."""
    if question:
        request += f"\nQuestion: {question}"
    return [{"role": "system", "content": system}, {"role": "user", "content": [frames, "\n" + request]}]


def overview(task: Task, k: int, videos: Videos, contract: VisualContract) -> list[Frames]:
    """Return K uniform frames: of one video, or shared out over several, each of which shows at least one."""
    lengths = [videos.info(path).n_frames for path in task.videos]
    shares = [0] * len(lengths)
    left = min(max(k, len(lengths)), sum(lengths))
    while left:
        # Deal one frame to each video that has more. What a short video cannot fill, the others get.
        for i, length in enumerate(lengths):
            if left and shares[i] < length:
                shares[i] += 1
                left -= 1
    return [videos.overview(path, share, contract.frame_size) for path, share in zip(task.videos, shares)]


def draw_k(task_id: str, epoch: int, choices: Sequence[int], seed: int = 0) -> int:
    """Draw K ~ Uniform(choices) for nFrames gating: the same in every process and for all rollouts of the prompt."""
    digest = hashlib.sha256(f"{seed}/{epoch}/{task_id}".encode()).digest()
    return choices[int.from_bytes(digest[:8], "big") % len(choices)]


# ------------------------------------------------------------------------------------------------ RL rows


def parse_task(row: dict, origin: str, root: Path, _weight: float = 1.0) -> Task:
    """Read `prompt` (messages, a literal <video>), `videos` ([{"video": path}]), `extra_info` (answer, question_type)."""
    info = decode_json(row.get("extra_info") or {}, "extra_info")
    if "prompt" not in row:
        raise RowError("no field `prompt`, as RL rows have it; rows with `messages` are for sft.py")

    # The question: the text of the last user message.
    messages = decode_json(row["prompt"], "prompt")
    users = [m["content"] for m in messages or [] if isinstance(m, dict) and m.get("role") == "user"]

    # All its videos: without one of them the question may have another answer.
    paths = []
    for video in decode_json(row.get("videos") or [], "videos"):
        paths.append(_resolve(video["video"] if isinstance(video, dict) else video, root))
    missing = [path for path in paths if not os.path.exists(path)]
    if missing or not paths:
        raise RowError(f"{', '.join(missing)}: no such file" if missing else "`videos` names no video")
    names = [os.path.basename(path) for path in set(paths)]
    if len(set(names)) < len(names):
        raise RowError(f"two videos are called {max(names, key=names.count)}, and calls know a video by that name")
    if not users or not isinstance(users[-1], str):
        raise RowError("`prompt` holds no user message with text")

    # The gold answer must be one that an answer can match. (Parquet fills what a row lacks with None.)
    kind = info.get("question_type") or "oe"
    if kind not in ("mcq", "tvg", "oe"):
        raise RowError(f"question_type = {kind!r}: must be mcq, tvg or oe")
    answer = "" if info.get("answer") is None else str(info["answer"]).strip()
    if kind == "mcq" and not re.fullmatch("[A-J]", answer.strip("() .").upper()):
        raise RowError(f"answer = {answer!r}: the answer of an mcq must be a letter from A to J")
    if kind == "tvg":
        start, end = parse_span(answer) or (0, 0)
        if start == end:
            raise RowError(f"answer = {answer!r}: the answer of a tvg must be a span of seconds, as in [12.5, 20.1]")
    if kind == "oe" and not normalise(answer):
        raise RowError(f"answer = {answer!r}: the answer of an open question must have a word or a number")

    options = info.get("options") or []
    if not isinstance(options, list):
        raise RowError(f"options = {options!r}: must be a list of texts")
    name = origin if info.get("id") is None else str(info["id"])
    name.encode()  # K and all seeds are drawn by its bytes, which half a character does not have
    return Task(
        id=name,
        question=users[-1].replace("<video>", "").strip(),
        videos=tuple(paths),
        kind=kind,
        answer=answer,
        options=tuple(map(str, options)),
    )


# ------------------------------------------------------------------------------------------------ SFT rows


@dataclass(frozen=True)
class Media:
    """A video or an image of a row. The keys are qwen-vl-utils': nframes, video_start, video_end."""

    path: str
    nframes: int | None = None  # frames of the overview; None: the contract's
    start: float | None = None  # seconds; with `end` a window, sampled like a crop
    end: float | None = None
    still: bool = False

    def frames(self, videos: Videos, contract: VisualContract) -> Frames:
        """Decode what is shown."""
        if self.still:
            return videos.image(self.path, contract.frame_size)
        if self.start is None:
            return videos.overview(self.path, self.nframes or contract.overview_frames, contract.frame_size)
        fps, max_frames = contract.crop_fps, contract.crop_max_frames
        return videos.window(self.path, self.start, self.end, contract.crop_size, fps, max_frames)


@dataclass(frozen=True)
class Dialogue:
    """An SFT row: the opening question and the turns that answer it."""

    id: str
    agent: str  # whose opening the first user turn gets: main | direct (a main agent without tools) | sub
    question: str
    media: tuple[Media, ...]
    turns: tuple[dict, ...]  # {"role": assistant | user | tool, "content": [str | Media, ...]}
    weight: float = 1.0
    request: str = SUBAGENT_REQUEST  # of a sub-agent, as a tool's ClipForSubagent has them
    system: str = SUBAGENT_SYSTEM


def parse_dialogue(row: dict, origin: str, root: Path, weight: float = 1.0) -> Dialogue:
    """Read `messages` (a JSON string or a list); tool results are `tool` messages, or user text in <tool_response> tags.

    The row's system prompt is dropped: SFT, RL and evaluation share one. The optional column `agent` marks rows that
    teach another agent than the main one; `request` and `system` are a sub-agent's prompts, if its tool has its own."""
    if "messages" not in row:
        raise RowError("no field `messages`, as SFT rows have it; rows with `prompt` are for rl.py")
    messages = decode_json(row["messages"], "messages")
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise RowError("`messages` is not a list of messages")

    # One turn per message, and one per tool response, as a rollout writes them.
    turns: list[dict] = []
    for message in messages:
        role, parts = message.get("role"), _parts(message, root)
        if role == "system":
            continue
        if role not in ("user", "assistant", "tool"):
            raise RowError(f"role {role!r}: must be system, user, assistant or tool")
        if role == "user" and any(isinstance(p, str) and "<tool_response>" in p for p in parts):
            turns += [{"role": "tool", "content": _strip_report(content)} for content in _responses(parts)]
            continue
        if role == "tool":
            parts = _strip_report(parts)
        elif role == "assistant":
            if not all(isinstance(part, str) for part in parts):
                raise RowError("the assistant's turn shows a video or an image: put it into the user's, or a report")
            parts = [_open_turn("".join(parts))]
        turns.append({"role": role, "content": parts})

    # The user opens, the assistant closes, and answers every user.
    roles = [turn["role"] for turn in turns]
    if not roles or roles[0] != "user" or roles[-1] != "assistant":
        raise RowError(f"turns {roles}: must open with the user and close with the assistant")
    for before, after in itertools.pairwise(roles):
        if before == after == "assistant" or (before == "user" and after != "assistant"):
            raise RowError(f"turns {roles}: the assistant must follow each user, and never itself")

    agent, opening = row.get("agent") or "main", turns[0]["content"]
    if agent not in ("main", "direct", "sub"):
        raise RowError(f"agent {agent!r}: must be main, direct or sub")
    text = " ".join(part for part in opening if isinstance(part, str))
    return Dialogue(
        id=origin,
        agent=agent,
        question=re.sub(r"<(video|image)>", "", text).strip(),
        media=tuple(part for part in opening if isinstance(part, Media)),
        turns=tuple(turns[1:]),
        weight=weight,
        request=str(row.get("request") or SUBAGENT_REQUEST),
        system=str(row.get("system") or SUBAGENT_SYSTEM),
    )


def encode_dialogue(dialogue: Dialogue, videos: Videos, renderer: Renderer, tools: list[dict]) -> Bundle:
    """Return the tokens and frames of a row, with mask 1 on the assistant's tokens only."""
    contract, stamped = renderer.contract, bool(renderer.contract.stamp)
    media = [clip.frames(videos, contract) for clip in dialogue.media]

    # The opening that this agent has in a rollout.
    if dialogue.agent == "sub":
        if len(media) != 1:
            raise RowError(f"a sub-agent's row shows one video or image, this one {len(media)}")
        system = true_prompt(dialogue.system, stamped)
        messages = subagent_messages(media[0], dialogue.question or None, dialogue.request, system)
    else:
        paths = tuple(clip.path for clip in dialogue.media)
        task = Task(dialogue.id, dialogue.question, paths, "oe", "")
        messages = main_messages(task, media, dialogue.agent == "main", stamped)

    # The turns, their clips decoded.
    for turn in dialogue.turns:
        content = [part.frames(videos, contract) if isinstance(part, Media) else part for part in turn["content"]]
        messages.append({"role": turn["role"], "content": content})

    rendered = renderer.render(messages, tools if dialogue.agent == "main" else None)
    return Bundle([], [rendered.ids], [rendered.mask], rendered.frames, dialogue.weight)


def _parts(message: dict, root: Path) -> list[str | Media]:
    """Return a message's texts and clips."""
    if message.get("tool_calls"):
        raise RowError("calls in a field `tool_calls`: write them into the content, as <tool_call>...</tool_call>")
    content = message.get("content")
    if isinstance(content, str):
        content = [content]
    parts: list[str | Media] = []
    for part in content or []:
        if isinstance(part, str):
            parts.append(part)
        elif part.get("type") == "text" and isinstance(part.get("text"), str):
            parts.append(part["text"])
        else:
            parts.append(_clip(part, root))
    return parts


def _clip(part: dict, root: Path) -> Media:
    """Read a part of a message that shows something: {"video": path} or {"video_url": {"url": path}}, or an image."""
    keys = [key for key in ("video_url", "image_url", "video", "image") if part.get(key)]
    if not keys:
        raise RowError(f"a part of type {part.get('type')!r} is neither text, video nor image")
    url, options = part[keys[0]], part
    if isinstance(url, dict):
        url, options = url["url"], url | part
    path = _resolve(url, root)
    if not os.path.exists(path):
        raise RowError(f"{path}: no such file")
    nframes, start, end = options.get("nframes"), options.get("video_start"), options.get("video_end")
    if (start, end) != (None, None) and not -math.inf < start < end < math.inf:
        raise RowError(f"{path}: video_start = {start}, video_end = {end}: must be seconds, the start before the end")
    if nframes is not None and not (isinstance(nframes, int) and nframes > 0):
        raise RowError(f"{path}: nframes = {nframes!r}: must be a whole number above 0")
    return Media(path, nframes, start, end, still=keys[0].startswith("image"))


def _open_turn(text: str) -> str:
    """Let an assistant's turn begin as in a rollout, where `<think>\\n` is forced: published rows have `<think>Thought` or
    `<think>\\n\\n`, which would teach another first token than the one that the model is asked for."""
    text = text.lstrip()
    if text.startswith("<think>"):
        text = THINK_PREFIX + text.removeprefix("<think>").lstrip()
    return text


def _strip_report(parts: list[str | Media]) -> list[str | Media]:
    """Take the white space from a report's edges, as a rollout does."""
    stripped = [part.strip() if isinstance(part, str) else part for part in parts]
    return [part for part in stripped if part != ""] or [NO_REPORT]


def _responses(parts: list[str | Media]) -> list[list[str | Media]]:
    """Split a user turn of <tool_response> blocks into their contents; media belong to the block they precede."""
    responses: list[list[str | Media]] = []
    current: list[str | Media] = []
    for part in parts:
        pieces = re.split("(</?tool_response>)", part) if isinstance(part, str) else [part]
        for piece in pieces:
            if piece == "</tool_response>":
                responses.append(current)
                current = []
            elif isinstance(piece, Media) or (piece != "<tool_response>" and piece.strip()):
                current.append(piece)
    if current:
        raise RowError("text or media after the last </tool_response>")
    return responses


def _resolve(url: str, root: Path) -> str:
    """Return an absolute path: file:// and absolute ones stay as they are, others start at the root."""
    return os.path.abspath(os.path.join(root, url.removeprefix("file://")))
