"""protocols.py: ask each model of the comparison in its own way. The protocol is part of what a score measures.

    episode, answer = run_protocol(context, item, k, seed, Prompting("video_zoomer"))

    agent                   our agent, as in training
    direct, think, ...      one turn without tools. Seven protocols, each with its own prompt; VideoRFT is asked by video_r1
    conan                   names clips, and gets their unseen frames in a user turn
    longvt                  calls crop_video, and gets the frames themselves in the tool turn
    video_zoomer            requests one segment per turn, at a frame rate of its choice

All run in rollout.run_episode; PROTOCOLS, at the end, has what differs. Flows, limits and formats follow the models' own code; the stamps and
sizes of frames are in each model's row. The prompts in protocols.yaml are **ours**. Other words give other scores; a
`prompt_file` supplies the words of a model's authors.

Deliberately missing: top-p, repetition penalties, SAGE's tools, and the video channel: a model that was trained on a video's
positions reads stamps instead.
"""

import functools
import json
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from episode import NO_PROMPT, Call, Episode, Prompt, Task, Trajectory
from evals.benchmarks import Item, with_subtitles
from rewards import turn_texts
from rollout import AgentContext, Flow, RolloutConfig, agent_flow, render_prompt, run_episode
from runtime.answers import ANSWER, LETTERS, final_answer, last_answer, parse_span, unboxed
from runtime.config import read_tree
from runtime.prompts import Live
from runtime.render import END_OF_TURN, Renderer, clock
from runtime.video import Clip, VideoError, VideoInfo, uniform_indices
from runtime.visual import ContractError
from tools import MAX_DEPTH, ClipForSubagent, ToolError, is_deeper, parse_calls, read_number, run_tool

WORDS = read_tree(Path(__file__).with_suffix(".yaml"))  # protocol -> name -> text
PLACE = re.compile(r"(\{\{\w+\}\}|\{\w+\})")  # {question}, or {{word}} for the word in braces


@dataclass(frozen=True)
class Prompting:
    """How one model is asked."""

    protocol: Literal[
        "agent", "direct", "think", "video_r1", "videochat_r1", "time_r1", "rewatch_r1",
        "video_thinker", "conan", "longvt", "video_zoomer",
    ] = "agent"  # fmt: skip
    """agent: our own. Only agent uses the rollout's tools, dispatch, turns and think_prefix."""
    prompt_file: str = ""
    """A YAML file of `name: text`, with names as in protocols.yaml. Texts of the model's authors replace ours."""

    def __post_init__(self):
        read_words(self.protocol, self.prompt_file)  # refuses a file that cannot be used

    @property
    def texts(self) -> dict[str, str]:
        return read_words(self.protocol, self.prompt_file)


def run_protocol(context: AgentContext, item: Item, k: int, seed: int, cfg: Prompting) -> tuple[Episode, str | None]:
    """Ask one item. Return the episode and the text to grade (None: no answer). An error that a model or a file can cause becomes
    the episode's error, and the turns before it are kept."""
    task = item.task
    ours = cfg.protocol == "agent"
    protocol = PROTOCOLS[cfg.protocol]
    if len(task.videos) != 1 and not ours:
        raise ValueError(f"task {task.id} has {len(task.videos)} videos: the protocol {cfg.protocol!r} takes only one")
    started = time.perf_counter()
    try:
        info = context.videos.info(task.videos[0])

        # Sample the overview, and give the question the subtitles of its frames.
        frames = []
        if item.subtitles or not ours:  # render_prompt samples the agent's overview itself
            size = context.renderer.contract.frame_size(info.width, info.height)
            frames = [context.videos.frames(info.path, overview_indices(info, k, protocol.overview_fps), size)]
            task = with_subtitles(item, [time for time in frames[0].times if time is not None])

        # Write the prompt. The request is the text of the task's kind: our agent's question, and a place in the other prompts.
        values = values_of(task, item.caption, info.duration) | {"frames": frames}
        request = Words(cfg.texts, values).fill(task.kind)  # parts of a message
        if protocol.flow is None:  # ours
            prompt = render_prompt(replace(task, question="".join(request)), k, context)
            flow = agent_flow(context.cfg)
        else:
            words = Words(cfg.texts, values | {"request": request})
            prompt = write_prompt(words, context.renderer)
            flow = protocol.flow(words)
        episode = run_episode(context, task, k, prompt, seed, flow)
    except VideoError as error:
        episode = Episode(task, k, Trajectory(NO_PROMPT), seed=seed)
        episode.fail(error)
    episode.seconds = time.perf_counter() - started
    if episode.error_kind:
        return episode, None
    texts = [text.removesuffix(END_OF_TURN) for text in turn_texts(episode.main, context.renderer)]
    return episode, protocol.read_answer(texts) or None


def overview_indices(info: VideoInfo, k: int, fps: float) -> Sequence[int]:
    """Choose the overview: frames at this rate, or K uniform ones if it is 0 or gives more than K."""
    if fps:
        every = max(1, round(info.n_frames / max(info.duration, 1e-9) / fps))
        at_rate = range(0, info.n_frames, every)
        if len(at_rate) <= k:
            return at_rate
    return uniform_indices(info.n_frames, k)


# ------------------------------------------------------------------------------------------------ the words of a protocol


@dataclass(frozen=True)
class Words:
    """The texts of a protocol, and what an item puts into their {places}."""

    texts: dict[str, str]
    values: dict[str, str | list]

    def fill(self, name: str, **more: str | list) -> list:
        """Return the text of this name as parts of a message. The values of its places may come from outside, so they
        are inert: they cannot become control tokens."""
        values = self.values | more
        parts: list = []
        for piece in PLACE.split(self.texts[name]):
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


def write_prompt(words: Words, renderer: Renderer) -> Prompt:
    """Open a conversation, with a system message and a tool if the protocol has such texts."""
    messages = [{"role": "user", "content": words.fill("user")}]
    if "system" in words.texts:
        messages.insert(0, {"role": "system", "content": words.fill("system")})
    tools = [json.loads(words.texts["tool"])] if "tool" in words.texts else None
    prompt = renderer.prompt(messages, tools)
    if tools and prompt.ids == renderer.prompt(messages).ids:
        raise ContractError("the chat template renders no tools: put its authors' into chat_template.jinja")
    return prompt


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


# ------------------------------------------------------------------------------------------------ what tools show


def within(info: VideoInfo, start: float, end: float) -> tuple[float, float]:
    """Clamp a window to the video."""
    return min(max(start, 0.0), info.duration), min(max(end, 0.0), info.duration)


def decode(context: AgentContext, info: VideoInfo, indices: Sequence[int]) -> Clip:
    """Decode the frames that a tool shows."""
    return context.videos.frames(info.path, indices, context.renderer.contract.crop_size(info.width, info.height))


# ------------------------------------------------------------------------------------------------ conan

CONAN_FRAMES = 8  # per turn


def conan(words: Words) -> Flow:
    """The model names clips. A user turn shows it frames of them that it has not seen."""
    return Flow(
        rounds=2,
        calls_per_turn=1,
        find_calls=find_clips,
        use_tool=show_unseen,
        reply=partial(reply_to_clips, words),
        role="user",
    )


def find_clips(text: str, turn: int) -> list[Call]:
    """Read the last <clip> of a turn."""
    wanted = "".join(re.findall(r"<clip>(.*?)</clip>", text, re.S)[-1:]).strip()
    return [Call(turn, "clip", {"clips": wanted})] if wanted else []


def show_unseen(context: AgentContext, episode: Episode, call: Call, seed: int) -> Call:
    """Show frames of the clips, evenly spread over those not seen yet."""
    texts = re.split(r"[,;\n]", call.arguments["clips"])
    spans = [span for span in map(parse_span, texts) if span]
    if len(spans) < len(texts):
        raise ToolError("unparseable", "The clips could not be read. Write HH:MM:SS-HH:MM:SS,HH:MM:SS-HH:MM:SS.")
    info = context.videos.info(episode.task.videos[0])
    seen = {t for clip in episode.main.clips for t in clip.times}
    new = []
    for i, t in enumerate(info.times.tolist()):
        # Count in whole seconds, like the stamps: 00:00:07 is any frame from 7.0 to 7.9 seconds.
        inside = any(start - 1 < int(t) <= end for start, end in spans)
        if inside and t not in seen:
            new.append(i)
    if not new:
        raise ToolError("bad_arguments", f"There are no unseen frames; the video ends at {clock(info.duration)}.")
    starts, ends = zip(*spans)
    chosen = [new[j] for j in uniform_indices(len(new), CONAN_FRAMES)]
    window = within(info, min(starts), max(ends))  # spans all clips
    return replace(call, window=window, clips=[decode(context, info, chosen)])


def reply_to_clips(words: Words, calls: list[Call], last: bool) -> list[list]:
    [call] = calls
    return [words.fill("last" if last else "more", frames=call.clips or [call.text])]


# ------------------------------------------------------------------------------------------------ longvt


def longvt(words: Words) -> Flow:
    """The model calls crop_video, several times a turn. A tool turn shows it the frames."""
    return Flow(
        rounds=5,
        calls_per_turn=32,  # more than it makes
        find_calls=parse_calls,
        use_tool=partial(show_window, words),
        reply=partial(reply_with_windows, words),
    )


def show_window(words: Words, context: AgentContext, episode: Episode, call: Call, seed: int) -> Call:
    clip = run_tool(call, episode.task, ("crop_video",), context.videos, context.renderer.contract)
    assert isinstance(clip, ClipForSubagent)
    call = replace(call, window=clip.window, clips=[clip.frames])
    return replace(call, text="".join(describe_frames(words, call)))


def reply_with_windows(words: Words, calls: list[Call], last: bool) -> list[list]:
    """Answer each call by its frames, and say which they are."""
    contents = []
    for call in calls:
        text = [call.text] if call.error else describe_frames(words, call)
        contents.append([*call.clips, *text])
    return contents


def describe_frames(words: Words, call: Call) -> list:
    assert call.window is not None
    start, end = call.window
    return words.fill("shown", count=str(len(call.clips[0])), start=f"{start:.1f}", end=f"{end:.1f}")


def read_longvt(texts: list[str]) -> str:
    """Read the answer as its authors do: the first <answer> of all turns, else the last box, else a number at the end."""
    whole = "\n".join(texts)
    if answers := ANSWER.findall(whole):
        return answers[0].strip()
    if "\\boxed{" in whole:
        return unboxed(whole)
    return "".join(re.findall(r"\d+(?:\.\d+)?(?=\W*$)", whole)[:1])


# ------------------------------------------------------------------------------------------------ video_zoomer

ZOOM_FRAMES = 16  # per request
ZOOM_END = "</video_zoom>"


def video_zoomer(words: Words) -> Flow:
    """The model requests a segment and a frame rate. A user turn shows it the frames."""
    return Flow(
        rounds=4,
        calls_per_turn=1,
        find_calls=find_zoom,
        use_tool=zoom,
        reply=partial(reply_to_zoom, words),
        role="user",
        closing=ZOOM_END,
    )


def find_zoom(text: str, turn: int) -> list[Call]:
    """Read the request that ends a turn."""
    if ZOOM_END not in text:
        return []
    try:
        [request] = map(json.loads, re.findall(r"\{.*?\}", text.rpartition("<video_zoom>")[2], re.S))
        if is_deeper(request, MAX_DEPTH):
            raise ValueError("nested too deep")
        start, end = request["segment"]
        return [Call(turn, "video_zoom", {"start": start, "end": end, "fps": request["fps"]})]
    except (ValueError, KeyError, TypeError, RecursionError):
        reply = 'The request could not be read. Write <video_zoom> {"segment": [start, end], "fps": n} </video_zoom>.'
        return [Call(turn, "video_zoom", {}, text=reply, error="unparseable")]


def zoom(context: AgentContext, episode: Episode, call: Call, seed: int) -> Call:
    """Show the requested segment at the requested rate, or nothing if less than one frame is due."""
    start, end, fps = (read_number(call.arguments[name], name) for name in ("start", "end", "fps"))
    wanted = max(0.0, fps * (end - start))
    if wanted >= ZOOM_FRAMES + 1:
        raise ToolError("bad_arguments", f"At most {ZOOM_FRAMES} frames: take a shorter segment or a lower fps.")
    info = context.videos.info(episode.task.videos[0])
    window = within(info, start, end)
    if wanted < 1:
        return replace(call, window=window)
    first, last = (int(np.abs(info.times - t).argmin()) for t in window)
    chosen = np.linspace(first, last, int(wanted)).round().astype(int).tolist()
    return replace(call, window=window, clips=[decode(context, info, chosen)])


def reply_to_zoom(words: Words, calls: list[Call], last: bool) -> list[list]:
    [call] = calls
    parts = words.fill("failed", error=call.text) if call.error else words.fill("found", frames=call.clips)
    if last:
        parts += words.fill("last")
    return [parts]


def read_zoomer(texts: list[str]) -> str:
    return unboxed(last_answer("\n".join(texts)) or "")


# ------------------------------------------------------------------------------------------------ all protocols


@dataclass(frozen=True)
class Protocol:
    """What differs between the ways to ask."""

    flow: Callable[[Words], Flow] | None  # None: our agent's
    read_answer: Callable[[list[str]], str | None]  # (texts of all turns) -> the text to grade
    overview_fps: float = 0.0  # frames per second of the overview, at most K in all; 0: always K


def one_turn(words: Words) -> Flow:
    return agent_flow(RolloutConfig(dispatch="none", think_prefix=False))


def read_tagged(texts: list[str]) -> str | None:
    return last_answer(texts[-1])


PROTOCOLS = {
    "agent": Protocol(None, final_answer),
    "direct": Protocol(one_turn, partial(final_answer, untagged="prose")),
    "think": Protocol(one_turn, read_tagged),
    "video_r1": Protocol(one_turn, read_tagged),
    "videochat_r1": Protocol(one_turn, read_tagged),
    "time_r1": Protocol(one_turn, read_tagged),
    "rewatch_r1": Protocol(one_turn, read_tagged, overview_fps=2.0),
    "video_thinker": Protocol(one_turn, read_tagged),
    "conan": Protocol(conan, read_tagged),
    "longvt": Protocol(longvt, read_longvt, overview_fps=1.0),
    "video_zoomer": Protocol(video_zoomer, read_zoomer, overview_fps=0.5),
}
