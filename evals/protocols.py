"""protocols.py: ask each model of the comparison in its own way. The protocol is part of what a score measures.

    episode, answer = run_protocol(context, item, k, seed, Prompting("video_zoomer"))

    agent                   our agent, as in training: rollout.run_episode
    direct, think, ...      one turn without tools; seven prompts (VideoRFT: video_r1). rewatch_r1 has its own overview
    conan                   names clips, and gets their unseen frames in a user turn
    longvt                  calls crop_video, and gets the frames themselves in the tool turn
    video_zoomer            requests one segment per turn, at a frame rate of its choice

Each is a function in FLOWS, except those of one turn. Flows, limits and formats follow the models' own code; the stamps and sizes
of frames are in each model's config. The prompts in protocols.yaml are **ours**. Other words give other scores; a `prompt_file`
supplies the words of a model's authors.

Deliberately missing: top-p, repetition penalties, SAGE's tools, and the video channel: a model that was trained on a video's
positions reads stamps instead.
"""

import functools
import json
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from episode import NO_PROMPT, Call, Episode, Task, Trajectory
from evals.benchmarks import Item, with_subtitles
from rewards import turn_texts
from rollout import (
    AgentContext,
    Stopped,
    append_rendered,
    derive_seed,
    end_turn_at,
    render_prompt,
    run_episode,
    sample_turn,
)
from runtime.answers import ANSWER, LETTERS, final_answer, last_answer, parse_span, unboxed
from runtime.config import read_tree
from runtime.engine import EngineError
from runtime.prompts import Live
from runtime.render import clock
from runtime.video import Clip, VideoError, VideoInfo, uniform_indices
from runtime.visual import ContractError
from tools import MAX_DEPTH, ToolError, is_deeper, parse_calls, read_number, run_tool

Protocol = Literal[
    "agent", "direct", "think", "video_r1", "videochat_r1", "time_r1", "rewatch_r1",
    "video_thinker", "conan", "longvt", "video_zoomer",
]  # fmt: skip
WORDS = read_tree(Path(__file__).with_suffix(".yaml"))  # protocol -> name -> text
PLACE = re.compile(r"(\{\{\w+\}\}|\{\w+\})")  # {question}, or {{word}} for the word in braces


@dataclass(frozen=True)
class Prompting:
    """How one model is asked."""

    protocol: Protocol = "agent"
    """agent: our own. Only agent uses the rollout's tools, dispatch, turns and think_prefix."""
    prompt_file: str = ""
    """A YAML file of `name: text`, with names as in protocols.yaml. Texts of the model's authors replace ours."""

    def __post_init__(self):
        read_words(self.protocol, self.prompt_file)  # refuses a file that cannot be used

    @property
    def texts(self) -> dict[str, str]:
        return read_words(self.protocol, self.prompt_file)


# Frames per second of the overview, at most K frames in all. All other protocols have K frames.
OVERVIEW_FPS = {"rewatch_r1": 2.0, "longvt": 1.0, "video_zoomer": 0.5}


def run_protocol(context: AgentContext, item: Item, k: int, seed: int, cfg: Prompting) -> tuple[Episode, str | None]:
    """Make one attempt. Return the episode and the text to grade (None: no answer). An error that a model or a file can
    cause becomes the episode's error, and the turns before it are kept."""
    task = item.task
    if len(task.videos) != 1 and cfg.protocol != "agent":
        raise ValueError(f"task {task.id} has {len(task.videos)} videos: the protocol {cfg.protocol!r} takes only one")
    attempt = Attempt(context, Episode(task, k, Trajectory(NO_PROMPT), seed=seed), cfg)
    answer = None
    started = time.perf_counter()
    try:
        # Sample the overview, and give the question the subtitles of its frames.
        frames = []
        if item.subtitles or cfg.protocol != "agent":  # run_episode samples the agent's overview itself
            info = attempt.info
            size = context.renderer.contract.frame_size(info.width, info.height)
            frames = [context.videos.frames(info.path, overview_indices(info, k, cfg.protocol), size)]
            task = with_subtitles(item, frames[0].times)
            attempt.episode.task = task

        # Fill `request`, the text of the task's kind, and run the protocol.
        attempt.values = values_of(task, item.caption, attempt.info.duration) | {"frames": frames}
        attempt.values["request"] = attempt.fill(task.kind)
        answer = FLOWS.get(cfg.protocol, _one_turn)(attempt)
    except (EngineError, VideoError, Stopped) as error:
        attempt.episode.fail(error)
    attempt.episode.seconds = time.perf_counter() - started
    return attempt.episode, answer or None


def overview_indices(info: VideoInfo, k: int, protocol: Protocol) -> Sequence[int]:
    """Choose the overview: frames at the protocol's rate, or K uniform ones if it has no rate or would exceed K."""
    fps = OVERVIEW_FPS.get(protocol)
    if fps:
        every = max(1, round(info.n_frames / max(info.duration, 1e-9) / fps))
        at_rate = range(0, info.n_frames, every)
        if len(at_rate) <= k:
            return at_rate
    return uniform_indices(info.n_frames, k)


def values_of(task: Task, caption: str, duration: float) -> dict[str, str | list]:
    """Return the values of the {places} that every text may use. `duration`: seconds of the video."""
    minutes, seconds = divmod(int(duration), 60)
    stem = task.question
    if task.options:  # drop the list of options, which begins with A
        lists = list(re.finditer(r"^[ \t]*\(?A\)?[.:)]", stem, re.M))
        if lists:
            stem = stem[: lists[-1].start()].rstrip()
    return {
        "question": task.question,  # with its lettered options
        "stem": stem,
        "options": "\n".join(f"{letter}. {option}" for letter, option in zip(LETTERS, task.options)),
        "caption": caption or task.question,  # the event to locate
        "path": os.path.basename(task.videos[0]),  # not the whole one: prompts would depend on the machine
        "duration": f"{duration:.1f}",
        "minutes": f"{minutes:02d}:{seconds:02d}",
        "clock": clock(duration),
    }


# ------------------------------------------------------------------------------------------------ an attempt


class Shown(NamedTuple):
    """What a call shows to the model."""

    parts: list  # of a message
    window: tuple[float, float] | None = None  # seconds
    text: str = ""  # for the record of the call


@dataclass
class Attempt:
    """An attempt at one item. A flow calls `converse`, its reply to a turn `run_call` and `fill`, and the work of a call `decode`:
    _conan -> converse -> _show_clips -> run_call -> _retrieve -> decode. Flows of one turn call `sample` themselves."""

    context: AgentContext
    episode: Episode  # grows turn by turn
    cfg: Prompting
    values: dict[str, str | list] = field(default_factory=dict)  # {place} -> what replaces it

    @property
    def info(self) -> VideoInfo:
        return self.context.videos.info(self.episode.task.videos[0])

    def fill(self, name: str, **more: str | list) -> list:
        """Return the text of this name as parts of a message. The values of its places may come from outside, so they
        are inert: they cannot become control tokens."""
        values = self.values | more
        parts = []
        for piece in PLACE.split(self.cfg.texts[name]):
            inner = piece[1:-1]
            if not PLACE.fullmatch(piece):
                parts.append(Live(piece))
            elif inner.startswith("{"):  # {{word}}
                parts.append(Live(inner))
            elif isinstance(values[inner], list):
                parts += values[inner]
            else:
                parts.append(values[inner])
        return parts

    def open_conversation(self) -> Trajectory:
        """Open a conversation, with a system message and a tool if the protocol has such texts."""
        texts = self.cfg.texts
        messages = [{"role": "user", "content": self.fill("user")}]
        if "system" in texts:
            messages.insert(0, {"role": "system", "content": self.fill("system")})
        tools = [json.loads(texts["tool"])] if "tool" in texts else None
        renderer = self.context.renderer
        prompt = renderer.prompt(messages, tools)
        if tools and prompt.ids == renderer.prompt(messages).ids:
            raise ContractError("the chat template renders no tools: put its authors' into chat_template.jinja")
        return Trajectory(prompt)

    def converse(
        self, turns: int, reply: Callable[["Attempt", str, int], list[list]], role: str = "user", closing: str = ""
    ) -> list[str]:
        """Sample up to `turns` turns, and return their texts. After each but the last, `reply(attempt, text, turn)` runs the
        calls of the turn and returns what the model gets in messages of this role. Without calls it returns nothing, and the
        conversation ends."""
        main = self.episode.main = self.open_conversation()
        texts = [self.sample(closing)]
        for turn in range(turns - 1):
            if main.finish == "length":
                break
            contents = reply(self, texts[-1], turn)
            if not contents:
                break
            delta = self.context.renderer.continuation(contents, role)
            if not append_rendered(self.context, main, delta):
                break  # the context has no room for it
            texts.append(self.sample(closing))
        return texts

    def sample(self, closing: str = "") -> str:
        """Sample the next turn, append it and return its text. If the text contains `closing`, the turn ends there."""
        renderer = self.context.renderer
        cfg = self.context.cfg
        trajectory = self.episode.main
        start = len(trajectory.ids)
        seed = derive_seed(self.episode.seed, len(trajectory.turns))
        sample_turn(self.context, trajectory, cfg.max_new_tokens, cfg.temperature, seed, renderer.ends_of_turn)
        ids = trajectory.ids[start:]
        if trajectory.finish == "stop":
            ids = ids[:-1]  # without the end of turn
        text = renderer.decode(ids)
        if closing and closing in text:
            text = text[: text.index(closing) + len(closing)]
            kept = sum(first < len(text) for first, _ in renderer.offsets(ids))  # tokens that begin in the text
            end_turn_at(trajectory, start + kept)
        trajectory.turns.append((start, len(trajectory.ids)))
        return text

    def run_call(self, call: Call, work: Callable[["Attempt", Call], Shown]) -> list:
        """Run and record one call. Return what the model reads: the parts that `work` shows, or the text of an error. A call
        that failed has no window."""
        started = time.perf_counter()
        shown = Shown([call.text], text=call.text)
        error = call.error
        try:
            if not error:
                shown = work(self, call)
        except ToolError as problem:
            error = problem.kind
            shown = Shown([str(problem)], text=str(problem))
        except VideoError:
            error = "failed"
            text = "The tool failed: it could not read this part of the video."
            shown = Shown([text], text=text)
        seconds = time.perf_counter() - started
        self.episode.calls.append(replace(call, window=shown.window, text=shown.text, error=error, seconds=seconds))
        return shown.parts

    def decode(self, indices: Sequence[int]) -> Clip:
        """Decode the frames that a tool shows."""
        info = self.info
        size = self.context.renderer.contract.crop_size(info.width, info.height)
        return self.context.videos.frames(info.path, indices, size)


def within(info: VideoInfo, start: float, end: float) -> tuple[float, float]:
    """Clamp a window to the video."""
    return min(max(start, 0.0), info.duration), min(max(end, 0.0), info.duration)


# ------------------------------------------------------------------------------------------------ agent, and one turn


def _agent(attempt: Attempt) -> str | None:
    """Run our agent as in training. Its prompt has the request in place of the question."""
    episode = attempt.episode
    asked = replace(episode.task, question="".join(attempt.values["request"]))
    prompt = render_prompt(asked, episode.k, attempt.context)
    attempt.episode = run_episode(attempt.context, episode.task, episode.k, prompt, episode.seed)
    return final_answer(turn_texts(attempt.episode.main, attempt.context.renderer))


def _one_turn(attempt: Attempt) -> str | None:
    """Ask once. The whole reply to `direct` is the answer. All others ask for tags."""
    attempt.episode.main = attempt.open_conversation()
    text = attempt.sample()
    if attempt.cfg.protocol == "direct":
        return final_answer([text], "prose")
    return last_answer(text)


# ------------------------------------------------------------------------------------------------ conan

CONAN_TURNS = 3
CONAN_FRAMES = 8  # per turn


def _conan(attempt: Attempt) -> str | None:
    """The model may name clips: a user turn shows it frames of them."""
    return last_answer(attempt.converse(CONAN_TURNS, _show_clips)[-1])


def _show_clips(attempt: Attempt, text: str, turn: int) -> list[list]:
    call = parse_clips(text, turn)
    if not call:
        return []
    frames = attempt.run_call(call, _retrieve)
    name = "last" if turn == CONAN_TURNS - 2 else "more"
    return [attempt.fill(name, frames=frames)]


def parse_clips(text: str, turn: int) -> Call | None:
    """Read the last <clip> of a turn."""
    wanted = "".join(re.findall(r"<clip>(.*?)</clip>", text, re.S)[-1:]).strip()
    return Call(turn, "clip", {"clips": wanted}) if wanted else None


def _retrieve(attempt: Attempt, call: Call) -> Shown:
    """Show frames of the clips, evenly spread over those not seen yet."""
    spans = [parse_span(clip) for clip in re.split(r"[,;\n]", call.arguments["clips"])]
    if None in spans:
        raise ToolError("unparseable", "The clips could not be read. Write HH:MM:SS-HH:MM:SS,HH:MM:SS-HH:MM:SS.")
    info = attempt.info
    seen = {t for clip in attempt.episode.main.clips for t in clip.times}
    new = []
    for i, t in enumerate(info.times.tolist()):
        # Count in whole seconds, like the stamps: 00:00:07 is any frame from 7.0 to 7.9 seconds.
        inside = any(start - 1 < int(t) <= end for start, end in spans)
        if inside and t not in seen:
            new.append(i)
    if not new:
        raise ToolError("bad_arguments", f"There are no unseen frames; the video ends at {clock(info.duration)}.")
    starts, ends = zip(*spans)
    window = within(info, min(starts), max(ends))  # spans all clips
    chosen = [new[j] for j in uniform_indices(len(new), CONAN_FRAMES)]
    return Shown([attempt.decode(chosen)], window)


# ------------------------------------------------------------------------------------------------ longvt

LONGVT_TURNS = 6


def _longvt(attempt: Attempt) -> str | None:
    """The model may call crop_video, several times a turn. A tool turn shows it the frames."""
    texts = attempt.converse(LONGVT_TURNS, _show_windows, role="tool")

    # Read the answer as its authors do: the first <answer> of all turns, else the last box, else a number at the end.
    whole = "\n".join(texts)
    if answers := ANSWER.findall(whole):
        return answers[0].strip()
    if "\\boxed{" in whole:
        return unboxed(whole)
    return "".join(re.findall(r"\d+(?:\.\d+)?(?=\W*$)", whole)[:1])


def _show_windows(attempt: Attempt, text: str, turn: int) -> list[list]:
    return [attempt.run_call(call, _crop) for call in parse_calls(text, turn)]


def _crop(attempt: Attempt, call: Call) -> Shown:
    """Show the frames of a window, and say which they are."""
    context = attempt.context
    clip = run_tool(call, attempt.episode.task, ("crop_video",), context.videos, context.renderer.contract)
    start, end = clip.window
    parts = attempt.fill("shown", count=str(len(clip.frames)), start=f"{start:.1f}", end=f"{end:.1f}")
    return Shown([clip.frames, *parts], clip.window, "".join(parts))


# ------------------------------------------------------------------------------------------------ video_zoomer

ZOOM_TURNS = 5
ZOOM_FRAMES = 16  # per request
ZOOM_END = "</video_zoom>"


def _video_zoomer(attempt: Attempt) -> str | None:
    """The model may request a segment and a frame rate: a user turn shows it the frames."""
    texts = attempt.converse(ZOOM_TURNS, _show_segment, closing=ZOOM_END)
    return unboxed(last_answer("\n".join(texts)) or "")


def _show_segment(attempt: Attempt, text: str, turn: int) -> list[list]:
    call = parse_zoom(text, turn)
    if not call:
        return []
    shown = attempt.run_call(call, _zoom)
    failed = attempt.episode.calls[-1].error
    parts = attempt.fill("failed", error=shown) if failed else attempt.fill("found", frames=shown)
    if turn == ZOOM_TURNS - 2:
        parts += attempt.fill("last")
    return [parts]


def parse_zoom(text: str, turn: int) -> Call | None:
    """Read the request that ends a turn."""
    if ZOOM_END not in text:
        return None
    try:
        [request] = map(json.loads, re.findall(r"\{.*?\}", text.rpartition("<video_zoom>")[2], re.S))
        if is_deeper(request, MAX_DEPTH):
            raise ValueError("nested too deep")
        start, end = request["segment"]
        return Call(turn, "video_zoom", {"start": start, "end": end, "fps": request["fps"]})
    except (ValueError, KeyError, TypeError, RecursionError):
        reply = 'The request could not be read. Write <video_zoom> {"segment": [start, end], "fps": n} </video_zoom>.'
        return Call(turn, "video_zoom", {}, text=reply, error="unparseable")


def _zoom(attempt: Attempt, call: Call) -> Shown:
    """Show the requested segment at the requested rate, or nothing if less than one frame is due."""
    start, end, fps = (read_number(call.arguments[name], name) for name in ("start", "end", "fps"))
    wanted = max(0.0, fps * (end - start))
    if wanted >= ZOOM_FRAMES + 1:
        raise ToolError("bad_arguments", f"At most {ZOOM_FRAMES} frames: take a shorter segment or a lower fps.")
    window = within(attempt.info, start, end)
    if wanted < 1:
        return Shown([], window)
    first, last = (int(np.abs(attempt.info.times - t).argmin()) for t in window)
    chosen = np.linspace(first, last, int(wanted)).round().astype(int).tolist()
    return Shown([attempt.decode(chosen)], window)


# Each function adds turns to the episode and returns the text to grade.
FLOWS = {"agent": _agent, "conan": _conan, "longvt": _longvt, "video_zoomer": _video_zoomer}


# ------------------------------------------------------------------------------------------------ the texts

# The places that every text may use, in addition to those in our own text of that name.
PLACES = {"question", "stem", "options", "caption", "path", "duration", "minutes", "clock"}


@functools.cache
def read_words(protocol: str, prompt_file: str) -> dict[str, str]:
    """Return the texts of a protocol by name. Those of the prompt file replace ours."""
    ours = WORDS[protocol]
    if not prompt_file:
        return ours
    theirs = read_tree(Path(prompt_file))
    for name, text in theirs.items():
        if name not in ours or not isinstance(text, str):
            raise ValueError(f"{prompt_file}: {name!r} must be a string and a text of {protocol!r}: {', '.join(ours)}")
        places = PLACES | places_in(ours[name])
        unknown = places_in(text) - places
        if unknown:
            rule = f"only {', '.join(sorted(places))}. Write {{{{word}}}} for a word in braces"
            raise ValueError(f"{prompt_file}: {name!r} of {protocol!r} cannot use {', '.join(sorted(unknown))}, {rule}")
    return ours | theirs


def places_in(text: str) -> set[str]:
    return {piece[1:-1] for piece in PLACE.findall(text) if not piece.startswith("{{")}
