"""protocols.py: how each model of the comparison is asked. The protocol is part of what a score measures.

    episode, answer = play(stage, task, k, seed, Prompting("video_zoomer"))

    agent                   our agent, as in training: rollout.run_episode
    direct, think, ...      one turn, no tools; seven of them, which differ in their words
    conan                   names clips, and gets unseen frames of them in a user's turn
    longvt                  calls crop_video, and gets the frames themselves in the tool's turn
    sage                    reads the video once; then a reasoner without eyes sends one tool at a time
    video_zoomer            asks for one segment a turn, at a rate of its choice

All sample through the stage's engine and leave an Episode: exact tokens, turns, calls with their windows and errors.
Flows, limits and formats are those of the models' own code, but frames may be up to a quarter larger
(configs/eval/base.yaml); the words, in protocols.yaml, are **ours**. Other words give other scores: a `prompt_file`
brings the authors', and a result should say which were used.

Deliberately missing: sampling beyond a temperature (top-p, repetition penalties), SAGE's tools that need a network or
speech recognition, the video channel (what a model knew from the positions of a video, it reads as stamps).
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
from typing import Any, Literal, get_args

import numpy as np

from data import Call, Episode, Task, Trajectory
from rewards import ANSWER, final_answer, turn_texts
from rollout import Stage, Stopped, append, derive, open_trajectory, opening, run_episode, sample_turn
from runtime.answers import parse_span
from runtime.config import read_tree
from runtime.contract import ContractError, Live, Renderer, clock
from runtime.engine import EngineError
from runtime.video import Frames, VideoError, VideoInfo, uniform_indices, window_indices
from tools import ToolError, parse_calls, read_number, read_time, use

# ------------------------------------------------------------------------------------------------ what is asked for

WORDS = read_tree(Path(__file__).with_suffix(".yaml"))  # protocol -> name -> text


@functools.cache
def words(protocol: str, prompt_file: str) -> dict[str, str]:
    """What a protocol says, by name; the texts of the prompt file go first."""
    known, own = WORDS.get(protocol, {}), read_tree(Path(prompt_file)) if prompt_file else {}
    if wrong := [name for name, text in own.items() if name not in known or not isinstance(text, str)]:
        names = ", ".join(known) or "none: its prompts are those of data.py"
        raise ValueError(f"prompt_file = {prompt_file!r}: {wrong} must be texts that {protocol!r} has: {names}")
    return known | own


Protocol = Literal[
    "agent", "direct", "think", "video_r1", "videochat_r1", "time_r1", "rewatch_r1",
    "video_thinker", "conan", "longvt", "sage", "video_zoomer",
]  # fmt: skip


@dataclass(frozen=True)
class Prompting:
    """How one model is asked. What is left out is the protocol's own."""

    protocol: Protocol = "agent"
    """agent: our own, and the only one that heeds the rollout's tools, dispatch, turns and think_prefix. video_r1 is
    VideoRFT's as well."""
    prompt_file: str = ""
    """A YAML file of `name: text`, names as in protocols.yaml: the words of the model's authors, in place of ours."""
    fps: float | None = None
    """Frames per second of the overview, K at most; 0: always K. Not of the agent."""
    rounds: int | None = None
    """conan, video_zoomer: turns; longvt: rounds of calls; sage: steps of the reasoner."""
    frames: int | None = None
    """Most frames of one call (of one round: conan)."""

    def __post_init__(self):
        words(self.protocol, self.prompt_file)  # refuses a file that cannot be used
        own = OWN.get(self.protocol, {"fps": 0.0} if self.protocol != "agent" else {})
        for name in ("fps", "rounds", "frames"):
            value = getattr(self, name)
            if value is None:
                object.__setattr__(self, name, own.get(name))
            elif name not in own or value < (0 if name == "fps" else 1):
                raise ValueError(f"{name} = {value}: must be positive; {self.protocol!r} has {list(own)}")

    @property
    def texts(self) -> dict[str, str]:
        return words(self.protocol, self.prompt_file)


OWN = {
    "rewatch_r1": {"fps": 2.0},
    "conan": {"fps": 0.0, "rounds": 3, "frames": 8},
    "longvt": {"fps": 1.0, "rounds": 5, "frames": 128},
    "sage": {"fps": 1.0, "rounds": 10, "frames": 10},
    "video_zoomer": {"fps": 0.5, "rounds": 5, "frames": 16},
}
CROP_FPS = 1.0  # longvt's crops, and what sage's tools see of a window
SAGE_SPANS = {"identify_timestamps_visually": 600, "extract_parts_from_timestamp": 300}  # seconds of a window, at most
ATTEMPTS, RETRY_TEMPERATURE = 5, 0.7  # of sage, to write JSON


def play(stage: Stage, task: Task, k: int, seed: int, cfg: Prompting) -> tuple[Episode, str | None]:
    """One attempt, and the text that is graded (None: there is none). What a model or a file can cause becomes
    `episode.error`, and what was played until then is kept."""
    if len(task.videos) != 1 and cfg.protocol != "agent":
        raise ValueError(f"task {task.id} has {len(task.videos)} videos: the protocol {cfg.protocol!r} asks about one")
    episode = Episode(task, k, Trajectory([], [], [], [], [], 0), seed=seed)
    started, answer = time.perf_counter(), None
    try:
        answer = PROTOCOLS[cfg.protocol](stage, episode, cfg)
    except (EngineError, VideoError, Stopped) as error:
        episode.error = f"{type(error).__name__}: {error}"
    episode.seconds = time.perf_counter() - started
    return episode, None if episode.error else answer or None


# ------------------------------------------------------------------------------------------------ verbs


def reading(stage: Stage, **contract: Any) -> Stage:
    """The stage of a model that reads frames in another form, such as other stamps."""
    renderer = stage.renderer
    return replace(stage, renderer=Renderer(renderer.tokenizer, replace(renderer.contract, **contract)))


def look_over(stage: Stage, path: str, k: int, fps: float) -> Frames:
    """The overview: every n-th frame, so that there are `fps` a second; K uniform ones if that is more than K."""
    info = stage.videos.info(path)
    every = max(1, round(info.n_frames / max(info.duration, 1e-9) / fps)) if fps else 1
    indices = range(0, info.n_frames, every)
    return show(stage, info, indices if fps and len(indices) <= k else uniform_indices(info.n_frames, k))


def show(stage: Stage, info: VideoInfo, indices: Sequence[int]) -> Frames:
    return stage.videos.frames(info.path, indices, stage.renderer.contract.frame_size(info.width, info.height))


def fill(text: str, values: dict[str, str | list]) -> list:
    """A text of ours -> the parts of a message. What fills its {places} may come from outside, and is inert."""
    parts = []
    for piece in re.split(r"(\{\w+\})", text):
        value = values.get(piece[1:-1]) if piece[:1] == "{" else None
        parts += [Live(piece)] if value is None else value if isinstance(value, list) else [value]
    return parts


def values_of(stage: Stage, episode: Episode, cfg: Prompting) -> dict[str, str | list]:
    """What the texts of all protocols may speak of."""
    task, path = episode.task, episode.task.videos[0]
    duration = stage.videos.info(path).duration
    return {
        "frames": [look_over(stage, path, episode.k, cfg.fps)],
        "question": task.question,
        "request": Live(cfg.texts[task.kind]),
        "path": os.path.basename(path),  # authors write the whole path: prompts would depend on the machine
        "minutes": "{:02d}:{:02d}".format(*divmod(int(duration), 60)),
        "clock": clock(duration),
    }


def begin(stage: Stage, cfg: Prompting, values: dict, user="user", system="system", tools=None) -> Trajectory:
    """A conversation that opens with the texts of these names."""
    names = {"system": system, "user": user}
    messages = [{"role": r, "content": fill(cfg.texts[n], values)} for r, n in names.items() if n in cfg.texts]
    return open_trajectory(stage.renderer.render(messages, tools, generate=True))


def speak(stage: Stage, agent: Trajectory, seed: int, closing: str = "", **limits: Any) -> str:
    """One turn, appended -> its text. It ends after the text `closing`, if it says that: what follows is dropped."""
    renderer, start, cfg = stage.renderer, len(agent.ids), replace(stage.cfg, **limits)
    sample_turn(stage, agent, cfg.max_new_tokens, cfg.temperature, seed, (renderer.end_of_turn,))
    said = agent.ids[start : len(agent.ids) - (agent.finish == "stop")]
    text = renderer.decode(said)
    if closing and closing in text:
        text = text[: text.index(closing) + len(closing)]
        kept = sum(begun < len(text) for begun, _ in renderer.offsets(said))
        for column in (agent.ids, agent.mask, agent.logprobs, agent.versions):
            del column[start + kept :]
        agent.finish = "stop"
    agent.turns.append((start, len(agent.ids)))
    return text


def tell(stage: Stage, agent: Trajectory, contents: list, role: str = "user") -> bool:
    """Append what the model reads next; False if its context has no room for it."""
    return append(stage, agent, stage.renderer.continuation(contents, role))


def run(stage: Stage, episode: Episode, call: Call, work: Callable[..., list], *more: Any) -> list:
    """Run and record one call -> what the model reads: what `work` returns, or the text of an error."""
    started, parts = time.perf_counter(), []
    try:
        parts = work(stage, episode, call, *more) if not call.error else []
    except ToolError as error:
        call.error, call.text = error.kind, str(error)
    except (VideoError, EngineError):
        call.error, call.text = "failed", "The tool failed: it could not read this part of the video."
    call.seconds = time.perf_counter() - started
    episode.calls.append(call)
    return [call.text] if call.error else parts


def within(info: VideoInfo, start: float, end: float) -> tuple[float, float]:
    return min(max(start, 0.0), info.duration), min(max(end, 0.0), info.duration)


def boxed(text: str) -> str | None:
    """The content of the last \\boxed{}."""
    found = re.findall(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}", text)
    return found[-1].strip() if found else None


# ------------------------------------------------------------------------------------------------ one turn, and ours


def _agent(stage: Stage, episode: Episode, cfg: Prompting) -> str | None:
    prompt = opening(episode.task, episode.k, stage)
    played = run_episode(stage, episode.task, episode.k, prompt, episode.seed)
    episode.main, episode.calls, episode.error = played.main, played.calls, played.error
    return final_answer(turn_texts(played.main, stage.renderer))


def _one_turn(stage: Stage, episode: Episode, cfg: Prompting) -> str | None:
    episode.main = begin(stage, cfg, values_of(stage, episode, cfg))
    text = speak(stage, episode.main, derive(episode.seed, 0))
    return final_answer([text]) or (text.strip() if cfg.protocol == "direct" else None)


# ------------------------------------------------------------------------------------------------ several turns


def _conan(stage: Stage, episode: Episode, cfg: Prompting) -> str | None:
    stage = reading(stage, stamp="{clock}")
    main = episode.main = begin(stage, cfg, values_of(stage, episode, cfg))
    for turn in range(cfg.rounds):
        text = speak(stage, main, derive(episode.seed, turn))
        clips = "".join(re.findall(r"<clip>(.*?)</clip>", text, re.S)[-1:]).strip()
        if not clips or turn == cfg.rounds - 1 or main.finish == "length":
            break
        found = run(stage, episode, Call(turn, "clip", {"clips": clips}), _retrieve, cfg)
        after = cfg.texts["last" if turn == cfg.rounds - 2 else "more"]
        if not tell(stage, main, [fill(after, {"frames": found})]):
            break
    return final_answer([text])


def _retrieve(stage: Stage, episode: Episode, call: Call, cfg: Prompting) -> list:
    """Frames of the clips, evenly out of those not seen yet."""
    info = stage.videos.info(episode.task.videos[0])
    spans = [parse_span(clip) for clip in re.split(r"[,;\n]", call.arguments["clips"])]
    if None in spans:
        raise ToolError("unparseable", "The clips could not be read. Write HH:MM:SS-HH:MM:SS,HH:MM:SS-HH:MM:SS.")
    seen = {t for clip in episode.main.frames for t in clip.times}
    # In whole seconds, as the stamps are: 00:00:07 is any frame from 7.0 to 7.9 seconds.
    inside = [any(a - 1 < int(t) <= b for a, b in spans) and t not in seen for t in info.times.tolist()]
    new = np.flatnonzero(inside).tolist()
    if not new:
        raise ToolError("bad_arguments", f"There are no unseen frames; the video ends at {clock(info.duration)}.")
    call.window = within(info, min(a for a, _ in spans), max(b for _, b in spans))  # the hull of all clips
    return [show(stage, info, [new[j] for j in uniform_indices(len(new), cfg.frames)])]


def _longvt(stage: Stage, episode: Episode, cfg: Prompting) -> str | None:
    stage = reading(stage, stamp="", crop_fps=CROP_FPS, crop_max_frames=cfg.frames)
    values = values_of(stage, episode, cfg)
    main = episode.main = begin(stage, cfg, values, tools=[json.loads(cfg.texts["tool"])])
    if main.ids == begin(stage, cfg, values).ids:
        raise ContractError(
            "the checkpoint's chat template shows no tools, so the model could not call any: put the template that its "
            "authors serve it with into the checkpoint's folder, as chat_template.jinja"
        )
    said = []
    for turn in range(cfg.rounds + 1):
        said.append(speak(stage, main, derive(episode.seed, turn)))
        calls = parse_calls(said[-1], turn)
        if not calls or turn == cfg.rounds or main.finish == "length":
            break
        if not tell(stage, main, [run(stage, episode, call, _crop, cfg) for call in calls], "tool"):
            break
    whole = "\n".join(said)
    if answers := ANSWER.findall(whole):
        return answers[0].strip()  # the first, as its authors do
    return boxed(whole) or "".join(re.findall(r"\d+(?:\.\d+)?(?=\W*$)", whole))


def _crop(stage: Stage, episode: Episode, call: Call, cfg: Prompting) -> list:
    look = use(call, episode.task, ("crop_video",), stage.videos, stage.renderer.contract)
    call.window = look.window
    seen = {"count": str(len(look.frames)), "start": f"{look.window[0]:.1f}", "end": f"{look.window[1]:.1f}"}
    call.text = "".join(fill(cfg.texts["shown"], seen))
    return [look.frames, Live(call.text)]


def _sage(stage: Stage, episode: Episode, cfg: Prompting) -> str | None:
    """Its conversations stand one after another in Episode.main: each begins with the opening of a prompt."""
    stage = reading(stage, stamp="{clock}")
    values = values_of(stage, episode, cfg) | {"tools": Live(cfg.texts["tools"]), "latest": "none"}
    results, media, names = [], {}, ("user", "system")
    for step in range(cfg.rounds + 1):
        reply = _reply(stage, episode, cfg, values, names, derive(episode.seed, step))
        plan, answer = _at(reply, "recommended_tools"), _at(reply, "final_answer")
        ready = _at(reply, "answerable", "verdict") if step else not _at(plan, "needed")
        if ready and answer is not None:
            return answer if isinstance(answer, str) else json.dumps(answer)
        wanted = _at(plan, "tool_calls")
        first = wanted[0] if isinstance(wanted, list) and wanted else None
        if reply is None or (step and first is None) or step == cfg.rounds:  # without a call, nothing would change
            return None
        if step == 0:
            values["context"] = str(_at(reply, "video_context"))
        if first is not None:
            arguments = _at(first, "arguments")
            call = Call(step, str(_at(first, "name")), arguments if isinstance(arguments, dict) else {})
            [result] = run(stage, episode, call, _use_sage, cfg, media)
            number = sum(c.name == call.name for c in episode.calls)
            results.append(f"{call.name}_#{number} output: {result}")
            values["latest"] = json.dumps({"name": call.name, "arguments": call.arguments})
        values["results"] = "\n".join(results[-10:]) or "none"
        names = ("message", "reasoner")
    return None


def _reply(stage: Stage, episode: Episode, cfg: Prompting, values: dict, names: tuple, seed: int) -> dict | None:
    """One conversation of two messages -> its JSON; None if no attempt gives any."""
    for attempt in range(ATTEMPTS):
        agent, main, shift = begin(stage, cfg, values, *names), episode.main, len(episode.main.ids)
        temperature = RETRY_TEMPERATURE if attempt else stage.cfg.temperature
        text = speak(stage, agent, derive(seed, attempt), temperature=temperature)
        for column in ("ids", "mask", "logprobs", "versions", "frames"):
            getattr(main, column).extend(getattr(agent, column))
        main.turns += [(start + shift, end + shift) for start, end in agent.turns]
        main.prompt_length, main.finish = main.prompt_length or agent.prompt_length, agent.finish
        if (reply := read_json(text)) is not None:
            return reply
    return None


def read_json(text: str) -> dict | None:
    """The object in <json></json>, or in the whole text; trailing commas and bare line breaks are forgiven."""
    body = text.partition("<json>")[2] or text
    body = body[body.find("{") : body.rfind("}") + 1]
    for repaired in (body, re.sub(r",\s*([}\]])", r"\1", body)):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(repaired, strict=False)
    return None


def _at(value: Any, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _use_sage(stage: Stage, episode: Episode, call: Call, cfg: Prompting, media: dict[str, list[int]]) -> list[str]:
    """`media`: the handles that tools gave out, and the frames that each stands for. None is ever opened as a path."""
    arguments, info = call.arguments, stage.videos.info(episode.task.videos[0])
    if call.name in SAGE_SPANS:
        start, end = within(info, *(read_time(arguments, f"timestamp_{name}") for name in ("start", "end")))
        if not start < end < start + SAGE_SPANS[call.name]:
            rule = f"start before end, less than {SAGE_SPANS[call.name]} seconds apart"
            raise ToolError("bad_arguments", f"Write {rule}, as HH:MM:SS; the video ends at {clock(info.duration)}.")
        call.window = start, end
        looked_at = window_indices(info.times, start, end, CROP_FPS, 1, episode.k)
    elif call.name == "perform_reasoning":
        known = media | {os.path.basename(episode.task.videos[0]): uniform_indices(info.n_frames, episode.k)}
        paths = arguments.get("media_paths")
        names = [os.path.basename(str(p)) for p in paths] if isinstance(paths, list) else []
        if not names or not known.keys() >= set(names):
            raise ToolError("bad_arguments", f"media_paths must be a list of some of: {', '.join(known)}.")
        looked_at = sorted({i for name in names for i in known[name]})
    else:
        there = ", ".join((*SAGE_SPANS, "perform_reasoning"))
        raise ToolError("unknown_tool", f"There is no tool {ascii(call.name)[:60]}; there is {there}.")
    if call.name == "extract_parts_from_timestamp":
        made = {f"clip_{start:.2f}s_{end:.2f}s.mp4": looked_at}
        if arguments.get("extract_type") != "subclips":
            few = window_indices(info.times, start, end, CROP_FPS, cfg.frames, cfg.frames)
            made = {f"frame_{info.times[i]:.2f}s.jpg": [i] for i in few}
        media |= made
        call.text = json.dumps({"media_paths": list(made)})
        return [call.text]
    # The same weights are the model behind the tool, in a fresh context.
    values = {name: str(arguments.get(name)) for name in ("event", "query")}
    call.agent = begin(stage, cfg, values | {"frames": [show(stage, info, looked_at)]}, call.name, "")
    seed, sub = derive(episode.seed, call.turn, "tool"), stage.cfg.subagents
    said = speak(stage, call.agent, seed, temperature=sub.temperature, max_new_tokens=sub.max_new_tokens).strip()
    call.text = json.dumps({"answer": said}) if call.name == "perform_reasoning" else said
    return [call.text]


def _video_zoomer(stage: Stage, episode: Episode, cfg: Prompting) -> str | None:
    stage = reading(stage, stamp="<frame{i}_time{:.2f}s>")
    main = episode.main = begin(stage, cfg, values_of(stage, episode, cfg))
    for turn in range(cfg.rounds):
        text = speak(stage, main, derive(episode.seed, turn), closing="</video_zoom>")
        if "</video_zoom>" not in text or turn == cfg.rounds - 1:
            break
        call = Call(turn, "video_zoom", {})
        found = run(stage, episode, call, _zoom, text, cfg.frames)
        parts = fill(cfg.texts["failed" if call.error else "found"], {"frames": found, "error": call.text})
        if turn == cfg.rounds - 2:
            parts.append(Live(cfg.texts["last"]))
        if not tell(stage, main, [parts]):
            break
    answer = final_answer(turn_texts(main, stage.renderer))
    return boxed(answer or "") or answer


def _zoom(stage: Stage, episode: Episode, call: Call, text: str, most: int) -> list:
    info = stage.videos.info(episode.task.videos[0])
    try:
        [call.arguments] = map(json.loads, re.findall(r"\{.*?\}", text.rpartition("<video_zoom>")[2], re.S))
        (start, end), fps = call.arguments["segment"], call.arguments["fps"]
    except (ValueError, KeyError, TypeError, RecursionError):
        form = '<video_zoom> {"segment": [start, end], "fps": n} </video_zoom>'
        raise ToolError("unparseable", f"The request could not be read. Write {form}.") from None
    start, end, fps = read_number(start, "start"), read_number(end, "end"), read_number(fps, "fps")
    wanted = max(0.0, fps * (end - start))
    if wanted >= most + 1:
        raise ToolError("bad_arguments", f"At most {most} frames: take a shorter segment or a lower fps.")
    call.window, count = within(info, start, end), int(wanted)
    if count == 0:
        return []
    first, last = (int(np.abs(info.times - t).argmin()) for t in call.window)
    return [show(stage, info, np.linspace(first, last, count).round().astype(int).tolist())]


PROTOCOLS: dict[str, Callable[[Stage, Episode, Prompting], str | None]] = dict.fromkeys(get_args(Protocol), _one_turn)
PROTOCOLS |= {"agent": _agent, "conan": _conan, "longvt": _longvt, "sage": _sage, "video_zoomer": _video_zoomer}
