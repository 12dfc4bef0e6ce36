"""protocols.py: how each model of the comparison is asked. The protocol is part of what a score measures.

    episode, answer = run_protocol(context, item, k, seed, Prompting("video_zoomer"))

    agent                   our agent, as in training: rollout.run_episode
    direct, think, ...      one turn, no tools; seven of them, which differ in their words (VideoRFT: video_r1)
    conan                   names clips, and gets unseen frames of them in a user's turn
    longvt                  calls crop_video, and gets the frames themselves in the tool's turn
    sage                    reads the video once; then a reasoner without eyes sends one tool at a time
    video_zoomer            asks for one segment a turn, at a rate of its choice

All leave an Episode, with exact tokens. Flows, limits and formats are those of the models' own code; the words, in
protocols.yaml, are **ours**. Other words give other scores: a `prompt_file` brings the authors'.

Deliberately missing: top-p, repetition penalties, SAGE's tools that need a network or speech recognition, the video
channel (what a model knew from the positions of a video, it reads as stamps).
"""

import contextlib
import functools
import json
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from data import Call, Episode, Task, Trajectory
from evals.benchmarks import Item, ask_with_subtitles
from rewards import ANSWER, final_answer, last_answer, turn_texts
from rollout import (
    AgentContext,
    Stopped,
    append_rendered,
    derive_seed,
    open_trajectory,
    render_prompt,
    run_episode,
    sample_turn,
)
from runtime.answers import parse_span, spoken, unboxed
from runtime.config import read_tree
from runtime.engine import EngineError
from runtime.render import Live, Renderer, clock
from runtime.video import Frames, VideoError, VideoInfo, uniform_indices, window_indices
from runtime.visual import ContractError
from tools import ToolError, parse_calls, read_number, read_time, run_tool

Protocol = Literal[
    "agent", "direct", "think", "video_r1", "videochat_r1", "time_r1", "rewatch_r1",
    "video_thinker", "conan", "longvt", "sage", "video_zoomer",
]  # fmt: skip
WORDS = read_tree(Path(__file__).with_suffix(".yaml"))  # protocol -> name -> text
PLACE = re.compile(r"\{\{\w+\}\}|\{(\w+)\}")  # {{word}} is the word in braces


@dataclass(frozen=True)
class Prompting:
    """The way in which one model is asked."""

    protocol: Protocol = "agent"
    """agent: our own, and the only one that heeds the rollout's tools, dispatch, turns and think_prefix."""
    prompt_file: str = ""
    """A YAML file of `name: text`, names as in protocols.yaml: the words of the model's authors, in place of ours."""

    def __post_init__(self):
        read_words(self.protocol, self.prompt_file)  # refuses a file that cannot be used

    @property
    def texts(self) -> dict[str, str]:
        return read_words(self.protocol, self.prompt_file)


# What every text may speak of, beside the {places} that our own text of that name has.
PLACES = {"question", "stem", "options", "caption", "path", "duration", "minutes", "clock"}


@functools.cache
def read_words(protocol: str, prompt_file: str) -> dict[str, str]:
    """Return the texts of a protocol by name; those of the prompt file replace ours."""
    known, own = WORDS[protocol], read_tree(Path(prompt_file)) if prompt_file else {}
    for name, text in own.items():
        if name not in known or not isinstance(text, str):
            raise ValueError(f"{prompt_file}: {name!r} must be a text that {protocol!r} has: {', '.join(known)}")
        places = PLACES | set(PLACE.findall(known[name]))
        if name == "message":
            places.add("tools")
        unknown = sorted(set(PLACE.findall(text)) - places - {""})
        if unknown:
            rule = f"only of {', '.join(sorted(places))}. Write {{{{word}}}} for a word in braces"
            raise ValueError(f"{prompt_file}: {name!r} of {protocol!r} cannot speak of {', '.join(unknown)}, {rule}")
    return known | own


# The numbers of the models' own code.
# Frames per second of the overview, at most K of them; where none is said, always K.
OVERVIEW_FPS = {"rewatch_r1": 2.0, "longvt": 1.0, "sage": 1.0, "video_zoomer": 0.5}
CONAN_TURNS, CONAN_FRAMES = 3, 8  # frames of one round
LONGVT_ROUNDS, LONGVT_FRAMES = 5, 128  # rounds of calls; frames of one call
SAGE_STEPS, SAGE_STILLS = 10, 10
ZOOM_TURNS, ZOOM_FRAMES = 5, 16  # frames of one segment
CROP_FPS = 1.0  # of longvt's crops, and of what sage's tools see of a window
SAGE_SPANS = {"identify_timestamps_visually": 600, "extract_parts_from_timestamp": 300}  # seconds of a window, at most
ATTEMPTS, RETRY_TEMPERATURE = 5, 0.7  # of sage, to write JSON
# How these read frames, whatever the run's contract says.
READS = {
    "conan": {"stamp": "{clock}"},
    "longvt": {"stamp": "", "crop_fps": CROP_FPS, "crop_max_frames": LONGVT_FRAMES},
    "sage": {"stamp": "{clock}"},
    "video_zoomer": {"stamp": "<frame{i}_time{:.2f}s>"},
}


def run_protocol(context: AgentContext, item: Item, k: int, seed: int, cfg: Prompting) -> tuple[Episode, str | None]:
    """Make one attempt; returns it with the text that is graded (None: there is none). An error that a model or a file
    can cause becomes `episode.error`, and the turns until then are kept."""
    task = item.task
    if len(task.videos) != 1 and cfg.protocol != "agent":
        raise ValueError(f"task {task.id} has {len(task.videos)} videos: the protocol {cfg.protocol!r} asks about one")
    if cfg.protocol in READS:
        renderer = context.renderer
        contract = replace(renderer.contract, **READS[cfg.protocol])
        context = replace(context, renderer=Renderer(renderer.tokenizer, contract))
    episode = Episode(task, k, Trajectory(), seed=seed)
    started, answer = time.perf_counter(), None
    try:
        frames = []
        if item.subtitles or cfg.protocol != "agent":  # the agent's overview is part of its episode
            info = context.videos.info(task.videos[0])
            size = context.renderer.contract.frame_size(info.width, info.height)
            frames = [context.videos.frames(info.path, overview_indices(info, k, cfg.protocol), size)]
            episode.task = ask_with_subtitles(item, frames[0].times)
        values = values_of(context, episode.task, cfg, item.caption) | {"frames": frames}
        answer = PROTOCOLS.get(cfg.protocol, _one_turn)(context, episode, cfg, values)
    except (EngineError, VideoError, Stopped) as error:
        episode.error = f"{type(error).__name__}: {error}"
    episode.seconds = time.perf_counter() - started
    return episode, answer or None


# ------------------------------------------------------------------------------------------------ verbs


def overview_indices(info: VideoInfo, k: int, protocol: Protocol) -> Sequence[int]:
    """Choose the overview: every n-th frame at the protocol's rate; K uniform ones if it has none or would show more."""
    fps = OVERVIEW_FPS.get(protocol)
    if fps:
        every = max(1, round(info.n_frames / max(info.duration, 1e-9) / fps))
        at_rate = range(0, info.n_frames, every)
        if len(at_rate) <= k:
            return at_rate
    return uniform_indices(info.n_frames, k)


def show(context: AgentContext, info: VideoInfo, indices: Sequence[int]) -> Frames:
    """Return what a tool shows."""
    return context.videos.frames(info.path, indices, context.renderer.contract.crop_size(info.width, info.height))


def fill(text: str, values: dict[str, str | list]) -> list:
    """Return a text of ours as the parts of a message. What fills its {places} may come from outside, and is inert."""
    parts, done = [], 0
    for place in PLACE.finditer(text):
        parts.append(Live(text[done : place.start()]))
        done = place.end()
        if place[1] is None:  # {{word}}
            parts.append(Live(place[0][1:-1]))
        elif isinstance(values[place[1]], list):
            parts += values[place[1]]
        else:
            parts.append(values[place[1]])
    return [*parts, Live(text[done:])]


def values_of(context: AgentContext, task: Task, cfg: Prompting, caption: str) -> dict[str, str | list]:
    """Return what every text may speak of; `request` is the text of the task's kind."""
    path = task.videos[0]
    duration = context.videos.info(path).duration
    minutes, seconds = divmod(int(duration), 60)
    lists = list(re.finditer(r"^[ \t]*\(?A\)?[.:)]", task.question, re.M)) if task.options else []
    values = {
        "question": task.question,  # its lettered options included
        "stem": task.question[: lists[-1].start()].rstrip() if lists else task.question,
        "options": "\n".join(f"{letter}. {option}" for letter, option in zip("ABCDEFGHIJ", task.options)),
        "caption": caption or task.question,  # the event that a span is asked of
        "path": os.path.basename(path),  # authors write the whole path: prompts would depend on the machine
        "duration": f"{duration:.1f}",
        "minutes": f"{minutes:02d}:{seconds:02d}",
        "clock": clock(duration),
    }
    return values | {"request": fill(cfg.texts[task.kind], values)}


def begin(context: AgentContext, cfg: Prompting, values: dict, user="user", system="system", tools=None) -> Trajectory:
    """Open a conversation with the texts of these names; a protocol without that system text has none."""
    messages = []
    for role, name in (("system", system), ("user", user)):
        if name in cfg.texts:
            messages.append({"role": role, "content": fill(cfg.texts[name], values)})
    return open_trajectory(context.renderer.render(messages, tools, generate=True))


def speak(context: AgentContext, trajectory: Trajectory, seed: int, closing: str = "", **limits: Any) -> str:
    """Append one turn; returns its text. It ends after the text `closing`, if it says that: what follows is dropped."""
    renderer, start, cfg = context.renderer, len(trajectory.ids), replace(context.cfg, **limits)
    sample_turn(context, trajectory, cfg.max_new_tokens, cfg.temperature, seed, renderer.ends_of_turn)
    said = trajectory.ids[start:]
    if trajectory.finish == "stop":
        said = said[:-1]
    text = renderer.decode(said)
    if closing and closing in text:
        text = text[: text.index(closing) + len(closing)]
        kept = sum(begun < len(text) for begun, _ in renderer.offsets(said))
        for column in (trajectory.ids, trajectory.mask, trajectory.logprobs, trajectory.versions):
            del column[start + kept :]
        trajectory.finish = "stop"
    trajectory.turns.append((start, len(trajectory.ids)))
    return text


def run(context: AgentContext, episode: Episode, call: Call, work: Callable[..., list], *more: Any) -> list:
    """Run and record one call; returns what the model reads: what `work` returns, or the text of an error."""
    started, parts = time.perf_counter(), []
    try:
        if not call.error:
            parts = work(context, episode, call, *more)
    except ToolError as error:
        call.error, call.text = error.kind, str(error)
    except (VideoError, EngineError):
        call.error, call.text = "failed", "The tool failed: it could not read this part of the video."
    call.seconds = time.perf_counter() - started
    episode.calls.append(call)
    return [call.text] if call.error else parts


def within(info: VideoInfo, start: float, end: float) -> tuple[float, float]:
    """Clamp a window to the video."""
    return min(max(start, 0.0), info.duration), min(max(end, 0.0), info.duration)


# ------------------------------------------------------------------------------------------------ the protocols


def _agent(context: AgentContext, episode: Episode, cfg: Prompting, values: dict) -> str | None:
    task = replace(episode.task, question="".join(values["request"]))
    played = run_episode(context, task, episode.k, render_prompt(task, episode.k, context), episode.seed)
    episode.main, episode.calls, episode.error = played.main, played.calls, played.error
    return final_answer(turn_texts(played.main, context.renderer))


def _one_turn(context: AgentContext, episode: Episode, cfg: Prompting, values: dict) -> str | None:
    episode.main = begin(context, cfg, values)
    text = speak(context, episode.main, derive_seed(episode.seed, 0))
    if cfg.protocol == "direct":
        return final_answer([text]) or spoken(text)  # none that stands in a thought
    return last_answer(text)


def _conan(context: AgentContext, episode: Episode, cfg: Prompting, values: dict) -> str | None:
    last = CONAN_TURNS - 1
    main = episode.main = begin(context, cfg, values)
    for turn in range(CONAN_TURNS):
        text = speak(context, main, derive_seed(episode.seed, turn))
        wanted = "".join(re.findall(r"<clip>(.*?)</clip>", text, re.S)[-1:]).strip()
        if not wanted or turn == last or main.finish == "length":
            break
        found = run(context, episode, Call(turn, "clip", {"clips": wanted}), _retrieve)
        told = fill(cfg.texts["last" if turn == last - 1 else "more"], values | {"frames": found})
        if not append_rendered(context, main, context.renderer.continuation([told], "user")):
            break
    return last_answer(text)


def _retrieve(context: AgentContext, episode: Episode, call: Call) -> list:
    """Show frames of the clips, evenly out of those not seen yet."""
    info = context.videos.info(episode.task.videos[0])
    spans = [parse_span(clip) for clip in re.split(r"[,;\n]", call.arguments["clips"])]
    if None in spans:
        raise ToolError("unparseable", "The clips could not be read. Write HH:MM:SS-HH:MM:SS,HH:MM:SS-HH:MM:SS.")
    seen = {t for clip in episode.main.frames for t in clip.times}
    new = []
    for i, t in enumerate(info.times.tolist()):
        # In whole seconds, as the stamps are: 00:00:07 is any frame from 7.0 to 7.9 seconds.
        inside = any(start - 1 < int(t) <= end for start, end in spans)
        if inside and t not in seen:
            new.append(i)
    if not new:
        raise ToolError("bad_arguments", f"There are no unseen frames; the video ends at {clock(info.duration)}.")
    call.window = within(info, min(start for start, _ in spans), max(end for _, end in spans))  # the hull of all clips
    return [show(context, info, [new[j] for j in uniform_indices(len(new), CONAN_FRAMES)])]


def _longvt(context: AgentContext, episode: Episode, cfg: Prompting, values: dict) -> str | None:
    main = episode.main = begin(context, cfg, values, tools=[json.loads(cfg.texts["tool"])])
    if main.ids == begin(context, cfg, values).ids:
        raise ContractError("the chat template shows no tools: write that of its authors into chat_template.jinja")
    said = []
    for turn in range(LONGVT_ROUNDS + 1):
        said.append(speak(context, main, derive_seed(episode.seed, turn)))
        calls = parse_calls(said[-1], turn)
        if not calls or turn == LONGVT_ROUNDS or main.finish == "length":
            break
        responses = [run(context, episode, call, _crop, cfg, values) for call in calls]
        if not append_rendered(context, main, context.renderer.continuation(responses, "tool")):
            break
    # As its authors read it: the first <answer> of all turns, else the last box, else a number at the end.
    whole = "\n".join(said)
    answers = ANSWER.findall(whole)
    if answers:
        return answers[0].strip()
    return unboxed(whole) if "\\boxed{" in whole else "".join(re.findall(r"\d+(?:\.\d+)?(?=\W*$)", whole)[:1])


def _crop(context: AgentContext, episode: Episode, call: Call, cfg: Prompting, values: dict) -> list:
    look = run_tool(call, episode.task, ("crop_video",), context.videos, context.renderer.contract)
    call.window = look.window
    seen = {"count": str(len(look.frames)), "start": f"{look.window[0]:.1f}", "end": f"{look.window[1]:.1f}"}
    parts = fill(cfg.texts["shown"], values | seen)
    call.text = "".join(parts)
    return [look.frames, *parts]


def _sage(context: AgentContext, episode: Episode, cfg: Prompting, values: dict) -> str | None:
    """Watch once, then reason in text. The conversations stand one after another in Episode.main, each with its prompt."""
    values |= {"tools": Live(cfg.texts["tools"]), "latest": "none"}
    results, media = [], {}
    for step in range(SAGE_STEPS + 1):
        # Step 0 watches the video, the others reason about what it and the tools have told.
        names = ("message", "reasoner") if step else ("user", "system")
        reply = _reply(context, episode, cfg, values, names, derive_seed(episode.seed, step))
        answer, tools = _at(reply, "final_answer"), _at(reply, "recommended_tools")
        ready = _at(reply, "answerable", "verdict") if step else not _at(tools, "needed")
        if ready and answer is not None:
            return answer if isinstance(answer, str) else json.dumps(answer)
        if reply is None or step == SAGE_STEPS:
            return None
        if step == 0:
            values["context"] = str(_at(reply, "video_context"))
        # Only the first call of a reply is run.
        wanted = _at(tools, "tool_calls")
        if isinstance(wanted, list) and wanted and wanted[0] is not None:
            arguments = _at(wanted[0], "arguments")
            call = Call(step, str(_at(wanted[0], "name")), arguments if isinstance(arguments, dict) else {})
            [result] = run(context, episode, call, _use_sage, cfg, values, media)
            number = sum(c.name == call.name for c in episode.calls)
            results.append(f"{call.name}_#{number} output: {result}")
            values["latest"] = json.dumps({"name": call.name, "arguments": call.arguments})
        elif step:
            return None  # without a call, nothing would change
        values["results"] = "\n".join(results[-10:]) or "none"
    return None


def _reply(
    context: AgentContext, episode: Episode, cfg: Prompting, values: dict, names: tuple, seed: int
) -> dict | None:
    """Hold one conversation of two messages; returns its JSON, or None if no attempt gives any."""
    main = episode.main
    for attempt in range(ATTEMPTS):
        trajectory, shift = begin(context, cfg, values, *names), len(main.ids)
        temperature = RETRY_TEMPERATURE if attempt else context.cfg.temperature
        text = speak(context, trajectory, derive_seed(seed, attempt), temperature=temperature)
        for column in ("ids", "mask", "logprobs", "versions", "prompt_frames"):
            getattr(main, column).extend(getattr(trajectory, column))
        main.turns += [(start + shift, end + shift) for start, end in trajectory.turns]
        main.prompt_length, main.finish = main.prompt_length or trajectory.prompt_length, trajectory.finish
        reply = read_json(text)
        if reply is not None:
            return reply
    return None


def read_json(text: str) -> dict | None:
    """Read the object in <json></json>, or in the whole text; trailing commas and bare line breaks are forgiven."""
    body = text.partition("<json>")[2] or text
    body = body[body.find("{") : body.rfind("}") + 1]
    for repaired in (body, re.sub(r",\s*([}\]])", r"\1", body)):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(repaired, strict=False)
    return None


def _at(value: Any, *keys: str) -> Any:
    """Follow keys into a reply; None where there is nothing of that name."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _use_sage(
    context: AgentContext, episode: Episode, call: Call, cfg: Prompting, values: dict, media: dict
) -> list[str]:
    """Run a tool. `media` holds the handles that tools gave out, each with its frame indices; none is opened as a path."""
    info = context.videos.info(episode.task.videos[0])
    if call.name in SAGE_SPANS:
        start, end = (read_time(call.arguments, name) for name in ("timestamp_start", "timestamp_end"))
        start, end = within(info, start, end)
        if not start < end < start + SAGE_SPANS[call.name]:
            rule = f"start before end, less than {SAGE_SPANS[call.name]} seconds apart"
            raise ToolError("bad_arguments", f"Write {rule}, as HH:MM:SS; the video ends at {clock(info.duration)}.")
        call.window = start, end
        looked_at = window_indices(info.times, start, end, CROP_FPS, episode.k)
    elif call.name == "perform_reasoning":
        known = media | {values["path"]: uniform_indices(info.n_frames, episode.k)}  # the video is a handle, too
        paths = call.arguments.get("media_paths")
        names = [os.path.basename(str(path)) for path in paths] if isinstance(paths, list) else []
        if not names or not known.keys() >= set(names):
            raise ToolError("bad_arguments", f"media_paths must be a list of some of: {', '.join(known)}.")
        looked_at = sorted({i for name in names for i in known[name]})
    else:
        there = ", ".join((*SAGE_SPANS, "perform_reasoning"))
        raise ToolError("unknown_tool", f"There is no tool {ascii(call.name)[:60]}; there is {there}.")
    if call.name == "extract_parts_from_timestamp":
        made = {f"clip_{start:.2f}s_{end:.2f}s.mp4": looked_at}
        if call.arguments.get("extract_type") != "subclips":
            few = window_indices(info.times, start, end, SAGE_STILLS / (end - start), SAGE_STILLS)
            made = {f"frame_{info.times[i]:.2f}s.jpg": [i] for i in few}
        media |= made
        call.text = json.dumps({"media_paths": list(made)})
        return [call.text]
    # The same weights are the model behind the tool, in a fresh context.
    wanted = {name: str(call.arguments.get(name)) for name in ("event", "query")}
    shown = values | wanted | {"frames": [show(context, info, looked_at)]}
    call.subagent = begin(context, cfg, shown, user=call.name, system="")
    seed, sub = derive_seed(episode.seed, call.turn, "tool"), context.cfg.subagents
    said = speak(context, call.subagent, seed, temperature=sub.temperature, max_new_tokens=sub.max_new_tokens).strip()
    call.text = json.dumps({"answer": said}) if call.name == "perform_reasoning" else said
    return [call.text]


def _video_zoomer(context: AgentContext, episode: Episode, cfg: Prompting, values: dict) -> str | None:
    last = ZOOM_TURNS - 1
    main = episode.main = begin(context, cfg, values)
    for turn in range(ZOOM_TURNS):
        text = speak(context, main, derive_seed(episode.seed, turn), closing="</video_zoom>")
        if "</video_zoom>" not in text or turn == last:
            break
        call = Call(turn, "video_zoom", {})
        found = run(context, episode, call, _zoom, text)
        known = values | {"frames": found, "error": call.text}
        parts = fill(cfg.texts["failed" if call.error else "found"], known)
        if turn == last - 1:
            parts += fill(cfg.texts["last"], known)
        if not append_rendered(context, main, context.renderer.continuation([parts], "user")):
            break
    return unboxed(last_answer("\n".join(turn_texts(main, context.renderer))) or "")


def _zoom(context: AgentContext, episode: Episode, call: Call, text: str) -> list:
    info = context.videos.info(episode.task.videos[0])
    try:
        [call.arguments] = map(json.loads, re.findall(r"\{.*?\}", text.rpartition("<video_zoom>")[2], re.S))
        (start, end), fps = call.arguments["segment"], call.arguments["fps"]
    except (ValueError, KeyError, TypeError, RecursionError):
        form = '<video_zoom> {"segment": [start, end], "fps": n} </video_zoom>'
        raise ToolError("unparseable", f"The request could not be read. Write {form}.") from None
    start, end, fps = read_number(start, "start"), read_number(end, "end"), read_number(fps, "fps")
    wanted = max(0.0, fps * (end - start))
    if wanted >= ZOOM_FRAMES + 1:
        raise ToolError("bad_arguments", f"At most {ZOOM_FRAMES} frames: take a shorter segment or a lower fps.")
    call.window, count = within(info, start, end), int(wanted)
    if count == 0:
        return []
    first, last = (int(np.abs(info.times - t).argmin()) for t in call.window)
    return [show(context, info, np.linspace(first, last, count).round().astype(int).tolist())]


# Each plays its turns into the episode, and returns the text that is graded. Every other protocol is one turn.
PROTOCOLS = {"agent": _agent, "conan": _conan, "longvt": _longvt, "sage": _sage, "video_zoomer": _video_zoomer}
