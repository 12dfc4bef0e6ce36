"""protocols.py: ask each model of the comparison in its own way. The protocol is part of what a score measures.

    episode, answer = run_protocol(context, item, k, seed, Prompting("video_zoomer"))

    agent                   our agent, as in training: rollout.run_episode
    direct, think, ...      one turn without tools; seven protocols that differ in their prompts (VideoRFT: video_r1)
    conan                   names clips, and gets their unseen frames in a user turn
    longvt                  calls crop_video, and gets the frames themselves in the tool turn
    sage                    watches the video once; then a text-only reasoner makes one tool call per step
    video_zoomer            requests one segment per turn, at a frame rate of its choice

FLOWS lists the functions of the protocols; every other protocol is `_one_turn`. A function adds turns to an Episode of exact
tokens. Flows, limits and formats follow the models' own code. The prompts in protocols.yaml are **ours**. Other words give
other scores; a `prompt_file` supplies the words of a model's authors.

Deliberately missing: top-p, repetition penalties, SAGE's tools that need a network or speech recognition, and the video
channel: a model that was trained on a video's positions reads stamps instead.
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

import rollout
from data import Call, Episode, Task, Trajectory
from evals.benchmarks import Item, ask_with_subtitles
from rewards import ANSWER, final_answer, last_answer, turn_texts
from runtime.answers import LETTERS, parse_span, unboxed
from runtime.config import read_tree
from runtime.engine import EngineError
from runtime.render import Live, Renderer, clock
from runtime.video import Clip, VideoError, VideoInfo, uniform_indices, window_indices
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
OVERVIEW_FPS = {"rewatch_r1": 2.0, "longvt": 1.0, "sage": 1.0, "video_zoomer": 0.5}
CROP_FPS = 1.0  # of longvt's crops, and of the frames that sage's tools see of a window
LONGVT_FRAMES = 128  # per call
# How these protocols read frames. They override the run's visual contract.
READS = {
    "conan": {"stamp": "{clock}"},
    "longvt": {"stamp": "", "crop_fps": CROP_FPS, "crop_max_frames": LONGVT_FRAMES},
    "sage": {"stamp": "{clock}"},
    "video_zoomer": {"stamp": "<frame{i}_time{:.2f}s>"},
}


def run_protocol(
    context: rollout.AgentContext, item: Item, k: int, seed: int, cfg: Prompting
) -> tuple[Episode, str | None]:
    """Make one attempt. Return the episode and the text to grade (None: no answer). An error that a model or a file can
    cause becomes the episode's error, and the turns before it are kept."""
    task = item.task
    if len(task.videos) != 1 and cfg.protocol != "agent":
        raise ValueError(f"task {task.id} has {len(task.videos)} videos: the protocol {cfg.protocol!r} takes only one")
    if cfg.protocol in READS:
        renderer = context.renderer
        contract = replace(renderer.contract, **READS[cfg.protocol])
        context = replace(context, renderer=Renderer(renderer.tokenizer, contract))
    episode = Episode(task, k, Trajectory(), seed=seed)
    answer = None
    started = time.perf_counter()
    try:
        # Sample the overview, and give the question the subtitles of its frames.
        frames = []
        if item.subtitles or cfg.protocol != "agent":  # rollout.run_episode samples the agent's overview itself
            info = context.videos.info(task.videos[0])
            size = context.renderer.contract.frame_size(info.width, info.height)
            frames = [context.videos.frames(info.path, overview_indices(info, k, cfg.protocol), size)]
            episode.task = ask_with_subtitles(item, frames[0].times)

        # Fill `request`, the text of the task's kind, and run the protocol.
        values = values_of(context, episode.task, item.caption) | {"frames": frames}
        attempt = Attempt(context, episode, cfg, values)
        values["request"] = attempt.fill(task.kind)
        flow = FLOWS.get(cfg.protocol, _one_turn)
        answer = flow(attempt)
    except (EngineError, VideoError, rollout.Stopped) as error:
        episode.fail(error)
    episode.seconds = time.perf_counter() - started
    return episode, answer or None


def overview_indices(info: VideoInfo, k: int, protocol: Protocol) -> Sequence[int]:
    """Choose the overview: frames at the protocol's rate, or K uniform ones if it has no rate or would exceed K."""
    fps = OVERVIEW_FPS.get(protocol)
    if fps:
        every = max(1, round(info.n_frames / max(info.duration, 1e-9) / fps))
        at_rate = range(0, info.n_frames, every)
        if len(at_rate) <= k:
            return at_rate
    return uniform_indices(info.n_frames, k)


def values_of(context: rollout.AgentContext, task: Task, caption: str) -> dict[str, str | list]:
    """Return the values of the {places} that every text may use."""
    path = task.videos[0]
    duration = context.videos.info(path).duration
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
        "path": os.path.basename(path),  # not the whole path, as authors write it: prompts would depend on the machine
        "duration": f"{duration:.1f}",
        "minutes": f"{minutes:02d}:{seconds:02d}",
        "clock": clock(duration),
    }


# ------------------------------------------------------------------------------------------------ an attempt


@dataclass
class Attempt:
    """An attempt at one item, which a protocol works on."""

    context: rollout.AgentContext
    episode: Episode  # grows turn by turn
    cfg: Prompting
    values: dict[str, str | list]  # {place} -> what replaces it

    @property
    def info(self) -> VideoInfo:
        return self.context.videos.info(self.episode.task.videos[0])

    def fill(self, name: str, **more: str | list) -> list:
        """Return the text of this name as parts of a message. The values of its {places} may come from outside, so they
        are inert: they cannot become control tokens."""
        text = self.cfg.texts[name]
        values = self.values | more
        parts = []
        done = 0
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

    def open_conversation(self, user="user", system="system", tools=None, **more: str | list) -> Trajectory:
        """Open a conversation with the texts of these names. There is no system message if the protocol has no such text."""
        messages = [{"role": "user", "content": self.fill(user, **more)}]
        if system in self.cfg.texts:
            messages.insert(0, {"role": "system", "content": self.fill(system, **more)})
        return rollout.open_trajectory(self.context.renderer.render(messages, tools, generate=True))

    def sample(self, trajectory: Trajectory, *seed_parts: Any, closing: str = "", **limits: Any) -> str:
        """Sample one turn, append it and return its text. Its seed derives from `seed_parts`. If the text contains `closing`,
        the turn ends there and its later tokens are dropped."""
        renderer = self.context.renderer
        cfg = replace(self.context.cfg, **limits)
        start = len(trajectory.ids)
        seed = rollout.derive_seed(*seed_parts)
        rollout.sample_turn(self.context, trajectory, cfg.max_new_tokens, cfg.temperature, seed, renderer.ends_of_turn)
        ids = trajectory.ids[start:]
        if trajectory.finish == "stop":
            ids = ids[:-1]  # without the end of turn
        text = renderer.decode(ids)
        if closing and closing in text:
            text = text[: text.index(closing) + len(closing)]
            kept = sum(first < len(text) for first, _ in renderer.offsets(ids))  # tokens that begin in the text
            for column in (trajectory.ids, trajectory.mask, trajectory.logprobs, trajectory.versions):
                del column[start + kept :]
            trajectory.finish = "stop"
        trajectory.turns.append((start, len(trajectory.ids)))
        return text

    def append_message(self, contents: list[list], role: str) -> bool:
        """Append a message between two turns. Return False if the context has no room for it."""
        delta = self.context.renderer.continuation(contents, role)
        return rollout.append_rendered(self.context, self.episode.main, delta)

    def run_call(self, call: Call, work: Callable[..., list], *more: Any) -> list:
        """Run and record one call. Return what the model reads: the parts that `work` returns, or the text of an error. `work`
        writes fields of the call into `outcome` as soon as it knows them, so that a failed call keeps them."""
        started = time.perf_counter()
        parts = []
        outcome = {}
        try:
            if not call.error:
                parts = work(self, call, outcome, *more)
        except ToolError as error:
            outcome |= {"error": error.kind, "text": str(error)}
        except (VideoError, EngineError):
            outcome |= {"error": "failed", "text": "The tool failed: it could not read this part of the video."}
        call = replace(call, **outcome, seconds=time.perf_counter() - started)
        self.episode.calls.append(call)
        return [call.text] if call.error else parts

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
    """Run our agent as in training, with the request as its question."""
    episode = attempt.episode
    context = attempt.context
    task = replace(episode.task, question="".join(attempt.values["request"]))
    prompt = rollout.render_prompt(task, episode.k, context)
    result = rollout.run_episode(context, task, episode.k, prompt, episode.seed)
    episode.main = result.main
    episode.calls = result.calls
    episode.error_kind = result.error_kind
    episode.error_text = result.error_text
    return final_answer(turn_texts(episode.main, context.renderer))


def _one_turn(attempt: Attempt) -> str | None:
    """Ask once. The whole reply to `direct` is the answer. All others ask for tags."""
    main = attempt.episode.main = attempt.open_conversation()
    text = attempt.sample(main, attempt.episode.seed, 0)
    if attempt.cfg.protocol == "direct":
        return final_answer([text], "prose")
    return last_answer(text)


# ------------------------------------------------------------------------------------------------ conan

CONAN_TURNS = 3
CONAN_FRAMES = 8  # per turn


def _conan(attempt: Attempt) -> str | None:
    """In each turn but the last, the model may name clips: a user turn shows it frames of them."""
    last = CONAN_TURNS - 1
    main = attempt.episode.main = attempt.open_conversation()
    for turn in range(CONAN_TURNS):
        text = attempt.sample(main, attempt.episode.seed, turn)
        wanted = "".join(re.findall(r"<clip>(.*?)</clip>", text, re.S)[-1:]).strip()
        if not wanted or turn == last or main.finish == "length":
            break
        frames = attempt.run_call(Call(turn, "clip", {"clips": wanted}), _retrieve)
        if not attempt.append_message([attempt.fill("last" if turn == last - 1 else "more", frames=frames)], "user"):
            break
    return last_answer(text)


def _retrieve(attempt: Attempt, call: Call, outcome: dict) -> list:
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
    outcome["window"] = within(info, min(starts), max(ends))  # spans all clips
    return [attempt.decode([new[j] for j in uniform_indices(len(new), CONAN_FRAMES)])]


# ------------------------------------------------------------------------------------------------ longvt

LONGVT_ROUNDS = 5  # rounds of calls, before one turn that answers


def _longvt(attempt: Attempt) -> str | None:
    """The model calls crop_video, in all turns but the last. A tool turn shows it the frames."""
    main = attempt.episode.main = attempt.open_conversation(tools=[json.loads(attempt.cfg.texts["tool"])])
    if main.ids == attempt.open_conversation().ids:
        raise ContractError("the chat template renders no tools: put its authors' template into chat_template.jinja")
    texts = []
    for turn in range(LONGVT_ROUNDS + 1):
        texts.append(attempt.sample(main, attempt.episode.seed, turn))
        calls = parse_calls(texts[-1], turn)
        if not calls or turn == LONGVT_ROUNDS or main.finish == "length":
            break
        if not attempt.append_message([attempt.run_call(call, _crop) for call in calls], "tool"):
            break
    # Read the answer as its authors do: the first <answer> of all turns, else the last box, else a number at the end.
    whole = "\n".join(texts)
    answers = ANSWER.findall(whole)
    if answers:
        return answers[0].strip()
    if "\\boxed{" in whole:
        return unboxed(whole)
    return "".join(re.findall(r"\d+(?:\.\d+)?(?=\W*$)", whole)[:1])


def _crop(attempt: Attempt, call: Call, outcome: dict) -> list:
    """Show the frames of a window, and say which they are."""
    context = attempt.context
    clip = run_tool(call, attempt.episode.task, ("crop_video",), context.videos, context.renderer.contract)
    outcome["window"] = clip.window
    start, end = clip.window
    parts = attempt.fill("shown", count=str(len(clip.frames)), start=f"{start:.1f}", end=f"{end:.1f}")
    outcome["text"] = "".join(parts)
    return [clip.frames, *parts]


# ------------------------------------------------------------------------------------------------ sage

SAGE_STEPS = 10
SAGE_STILLS = 10
SAGE_SPANS = {"identify_timestamps_visually": 600, "extract_parts_from_timestamp": 300}  # longest window in seconds
SAGE_ATTEMPTS = 5  # attempts to write JSON
SAGE_RETRY_TEMPERATURE = 0.7


def _sage(attempt: Attempt) -> str | None:
    """The model watches the video once. Then it reasons about texts only, with one tool call per step. Episode.main holds the
    conversations one after another, each with its prompt."""
    values = attempt.values
    values |= {"tools": Live(attempt.cfg.texts["tools"]), "latest": "none"}
    results = []
    media = {}  # handles from tools -> frame indices; never opened as paths
    for step in range(SAGE_STEPS + 1):
        # Step 0 watches the video. Later steps reason about the reports of step 0 and of the tools.
        if step == 0:
            reply = _reply(attempt, step, "user", "system")
            values["context"] = str(_at(reply, "video_context"))
            ready = not _at(reply, "recommended_tools", "needed")
        else:
            reply = _reply(attempt, step, "message", "reasoner")
            ready = _at(reply, "answerable", "verdict")
        answer = _at(reply, "final_answer")
        if ready and answer is not None:
            return answer if isinstance(answer, str) else json.dumps(answer)
        if reply is None or step == SAGE_STEPS:
            return None

        # Run the first call of the reply, and no other.
        wanted = _at(reply, "recommended_tools", "tool_calls")
        if isinstance(wanted, list) and wanted and wanted[0] is not None:
            arguments = _at(wanted[0], "arguments")
            call = Call(step, str(_at(wanted[0], "name")), arguments if isinstance(arguments, dict) else {})
            [result] = attempt.run_call(call, _use_sage, media)
            number = sum(c.name == call.name for c in attempt.episode.calls)
            results.append(f"{call.name}_#{number} output: {result}")
            values["latest"] = json.dumps({"name": call.name, "arguments": call.arguments})
        elif step:
            return None  # without a call, the next prompt would be the same
        values["results"] = "\n".join(results[-10:]) or "none"
    return None


def _reply(attempt: Attempt, step: int, user: str, system: str) -> dict | None:
    """Hold one conversation of two messages. Return the JSON of its reply, or None if no attempt gives any."""
    main = attempt.episode.main
    seed = rollout.derive_seed(attempt.episode.seed, step)
    temperature = attempt.context.cfg.temperature
    for number in range(SAGE_ATTEMPTS):
        trajectory = attempt.open_conversation(user, system)
        text = attempt.sample(trajectory, seed, number, temperature=temperature)
        # Append it to the main trajectory.
        shift = len(main.ids)
        for column in ("ids", "mask", "logprobs", "versions", "prompt_clips"):
            getattr(main, column).extend(getattr(trajectory, column))
        main.turns += [(start + shift, end + shift) for start, end in trajectory.turns]
        main.prompt_length = main.prompt_length or trajectory.prompt_length
        main.finish = trajectory.finish
        reply = parse_reply(text)
        if reply is not None:
            return reply
        temperature = SAGE_RETRY_TEMPERATURE
    return None


def parse_reply(text: str) -> dict | None:
    """Read the object in <json></json>, or in the whole text. Trailing commas and raw line breaks are accepted."""
    body = text.partition("<json>")[2] or text
    body = body[body.find("{") : body.rfind("}") + 1]
    for repaired in (body, re.sub(r",\s*([}\]])", r"\1", body)):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(repaired, strict=False)
    return None


def _at(value: Any, *keys: str) -> Any:
    """Follow keys into a reply. Return None if a key is missing."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _use_sage(attempt: Attempt, call: Call, outcome: dict, media: dict[str, Sequence[int]]) -> list[str]:
    """Run a tool: choose frames, then return handles to them, or let the model look at them."""
    # Choose the frames.
    info = attempt.info
    if call.name in SAGE_SPANS:
        start, end = (read_time(call.arguments, name) for name in ("timestamp_start", "timestamp_end"))
        start, end = within(info, start, end)
        if not start < end < start + SAGE_SPANS[call.name]:
            rule = f"start before end, less than {SAGE_SPANS[call.name]} seconds apart"
            raise ToolError("bad_arguments", f"Write {rule}, as HH:MM:SS; the video ends at {clock(info.duration)}.")
        outcome["window"] = start, end
        indices = window_indices(info.times, start, end, CROP_FPS, attempt.episode.k)
    elif call.name == "perform_reasoning":
        known = media | {attempt.values["path"]: uniform_indices(info.n_frames, attempt.episode.k)}  # the video itself
        paths = call.arguments.get("media_paths")
        names = [os.path.basename(str(path)) for path in paths] if isinstance(paths, list) else []
        if not names or not known.keys() >= set(names):
            raise ToolError("bad_arguments", f"media_paths must be a list of some of: {', '.join(known)}.")
        indices = sorted({i for name in names for i in known[name]})
    else:
        there = ", ".join((*SAGE_SPANS, "perform_reasoning"))
        raise ToolError("unknown_tool", f"There is no tool {ascii(call.name)[:60]}; there is {there}.")

    # Return handles to them.
    if call.name == "extract_parts_from_timestamp":
        if call.arguments.get("extract_type") == "subclips":
            made = {f"clip_{start:.2f}s_{end:.2f}s.mp4": indices}
        else:
            stills = window_indices(info.times, start, end, SAGE_STILLS / (end - start), SAGE_STILLS)
            made = {f"frame_{info.times[i]:.2f}s.jpg": [i] for i in stills}
        media |= made
        outcome["text"] = json.dumps({"media_paths": list(made)})
        return [outcome["text"]]

    # Or let the model look at them: the same weights, in a fresh context.
    asked = {name: str(call.arguments.get(name)) for name in ("event", "query")}
    frames = [attempt.decode(indices)]
    subagent = attempt.open_conversation(user=call.name, system="", frames=frames, **asked)
    outcome["subagent"] = subagent
    limits = {name: getattr(attempt.context.cfg.subagents, name) for name in ("temperature", "max_new_tokens")}
    reply = attempt.sample(subagent, attempt.episode.seed, call.turn, "tool", **limits).strip()
    outcome["text"] = json.dumps({"answer": reply}) if call.name == "perform_reasoning" else reply
    return [outcome["text"]]


# ------------------------------------------------------------------------------------------------ video_zoomer

ZOOM_TURNS = 5
ZOOM_FRAMES = 16  # per request


def _video_zoomer(attempt: Attempt) -> str | None:
    """In each turn but the last, the model may request a segment and a frame rate: a user turn shows it the frames."""
    last = ZOOM_TURNS - 1
    main = attempt.episode.main = attempt.open_conversation()
    for turn in range(ZOOM_TURNS):
        text = attempt.sample(main, attempt.episode.seed, turn, closing="</video_zoom>")
        if "</video_zoom>" not in text or turn == last:
            break
        frames = attempt.run_call(Call(turn, "video_zoom", {}), _zoom, text)
        call = attempt.episode.calls[-1]
        parts = attempt.fill("failed", error=call.text) if call.error else attempt.fill("found", frames=frames)
        if turn == last - 1:
            parts += attempt.fill("last", frames=frames, error=call.text)
        if not attempt.append_message([parts], "user"):
            break
    return unboxed(last_answer("\n".join(turn_texts(main, attempt.context.renderer))) or "")


def _zoom(attempt: Attempt, call: Call, outcome: dict, text: str) -> list:
    """Show the requested segment at the requested rate, or nothing if less than one frame is due."""
    try:
        [arguments] = map(json.loads, re.findall(r"\{.*?\}", text.rpartition("<video_zoom>")[2], re.S))
        outcome["arguments"] = arguments
        start, end = arguments["segment"]
        fps = arguments["fps"]
    except (ValueError, KeyError, TypeError, RecursionError):
        form = '<video_zoom> {"segment": [start, end], "fps": n} </video_zoom>'
        raise ToolError("unparseable", f"The request could not be read. Write {form}.") from None
    start, end, fps = read_number(start, "start"), read_number(end, "end"), read_number(fps, "fps")
    wanted = max(0.0, fps * (end - start))
    if wanted >= ZOOM_FRAMES + 1:
        raise ToolError("bad_arguments", f"At most {ZOOM_FRAMES} frames: take a shorter segment or a lower fps.")
    outcome["window"] = within(attempt.info, start, end)
    if wanted < 1:
        return []
    first, last = (int(np.abs(attempt.info.times - t).argmin()) for t in outcome["window"])
    return [attempt.decode(np.linspace(first, last, int(wanted)).round().astype(int).tolist())]


# Each function adds turns to the episode and returns the text to grade. Every other protocol is one turn.
FLOWS = {"agent": _agent, "conan": _conan, "longvt": _longvt, "sage": _sage, "video_zoomer": _video_zoomer}


# ------------------------------------------------------------------------------------------------ the texts

# The {places} that every text may use, in addition to those in our own text of that name.
PLACES = {"question", "stem", "options", "caption", "path", "duration", "minutes", "clock"}


@functools.cache
def read_words(protocol: str, prompt_file: str) -> dict[str, str]:
    """Return the texts of a protocol by name. Those of the prompt file replace ours."""
    known, own = WORDS[protocol], read_tree(Path(prompt_file)) if prompt_file else {}
    for name, text in own.items():
        if name not in known or not isinstance(text, str):
            raise ValueError(f"{prompt_file}: {name!r} must be a string and a text of {protocol!r}: {', '.join(known)}")
        places = PLACES | set(PLACE.findall(known[name]))
        if name == "message":
            places.add("tools")
        unknown = sorted(set(PLACE.findall(text)) - places - {""})
        if unknown:
            rule = f"only {', '.join(sorted(places))}. Write {{{{word}}}} for a word in braces"
            raise ValueError(f"{prompt_file}: {name!r} of {protocol!r} cannot use {', '.join(unknown)}, {rule}")
    return known | own
