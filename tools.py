"""tools.py: what the main agent can call, and how its calls are read.

    parse_calls(text, turn) -> [Call]                # each call of a turn parses or fails alone; nothing the model writes raises
    run_tool(call, task, names, videos, contract)    # run one call: a ClipForSubagent, a str, or a ToolError

A `Tool` is a schema and a function; docs/add_a_tool.md adds one. The frames of a ClipForSubagent go to a sub-agent, whose
report the main agent reads (or, with `tool_return: frames`, to the main agent itself). It reads other results unchanged.

A call is `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. Pretrained models also write
`<tool_code>crop_video(start_time=1, end_time=2)</tool_code>`, which is read as well (as literals, never evaluated).

Deliberately missing: tools that run code or reach the network, and a check of arguments against the schema.
"""

import ast
import json
import logging
import math
import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from data import Call, Task
from runtime.video import Frames, VideoError, Videos
from runtime.visual import VisualContract

log = logging.getLogger(__name__)
MAX_TEXT_CHARS = 4000  # of a tool's text: 15 calls of 1000 tokens each fit into a context of 32,768
MAX_CALL_CHARS = 4096  # a call has about 100; a longer one is unreadable
MAX_BRACKETS = 64  # a call has 2; parsers recurse into nested ones


class ToolError(Exception):
    """A call that cannot run. The model reads the text; `kind`, any word, is counted (Call.error)."""

    def __init__(self, kind: str, text: str):
        super().__init__(text)
        self.kind = kind


@dataclass(frozen=True)
class ClipForSubagent:
    """Frames for a sub-agent, or for the main agent itself, to look at."""

    frames: Frames
    window: tuple[float, float]  # seconds
    request: str = ""  # what the sub-agent is asked about them; empty: data.SUBAGENT_REQUEST
    system: str = ""  # its system prompt; empty: data.subagent_system_prompt


@dataclass(frozen=True)
class Tool:
    schema: dict  # OpenAI's function form
    run: Callable[[Task, dict[str, Any], Videos, VisualContract], ClipForSubagent | str]


# ------------------------------------------------------------------------------------------------ the tools

# Add your tool here: a function like crop_video and an entry in TOOLS. choose_video, read_window, read_time, read_times and
# read_number (below) read its arguments. It raises ToolError for whatever else the model can get wrong.


def crop_video(task: Task, arguments: dict, videos: Videos, contract: VisualContract) -> ClipForSubagent:
    """Show dense frames of one window."""
    path = choose_video(task, arguments)
    start, end = read_window(arguments, videos.info(path).duration)
    # The model may ask for a number of frames; otherwise the contract's rate gives it.
    fps, max_frames = contract.crop_fps, contract.crop_max_frames
    if arguments.get("num_frames") is not None:
        wanted = read_number(arguments["num_frames"], "num_frames")
        max_frames = int(max(1, min(wanted, contract.crop_max_frames)))
        fps = max_frames / max(end - start, 1e-3)
    frames = videos.window(path, start, end, contract.crop_size, fps=fps, max_frames=max_frames)
    return ClipForSubagent(frames, (start, end))


def make_tool(run: Callable, description: str, required: list[str], properties: dict[str, str | tuple | dict]) -> Tool:
    """Make a tool that the model calls by the function's name. `properties`: the JSON type of each argument, alone or with
    its description, or any JSON schema."""
    arguments = {}
    for name, kind in properties.items():
        if isinstance(kind, tuple):
            kind = {"type": kind[0], "description": kind[1]}
        arguments[name] = {"type": kind} if isinstance(kind, str) else kind
    parameters = {"type": "object", "properties": arguments, "required": required}
    function = {"name": run.__name__, "description": description, "parameters": parameters}
    return Tool({"type": "function", "function": function}, run)


TOOLS = {
    "crop_video": make_tool(
        crop_video,
        "Look closely at a part of the video. Times are in seconds.",
        ["start_time", "end_time"],
        {"video_path": "string", "start_time": "number", "end_time": "number", "num_frames": "integer"},
    ),
}


# ------------------------------------------------------------------------------------------------ arguments


def choose_video(task: Task, arguments: dict) -> str:
    """Pick one of the task's own videos by the base name of the model's path, which is never opened. Without a name, or
    where there is but one video: the first."""
    names = [os.path.basename(path) for path in task.videos]
    wanted = os.path.basename(str(arguments.get("video_path") or "").strip())
    if wanted in names:
        return task.videos[names.index(wanted)]
    if wanted and len(names) > 1:
        raise ToolError("bad_arguments", f"There is no video {ascii(wanted)[:60]}; there is {', '.join(names)}.")
    return task.videos[0]


_CLOCK = re.compile(r"(?:(\d{1,3}):)?(\d{1,4}):(\d{1,2}(?:\.\d{1,6})?)")  # HH:MM:SS, MM:SS, MM:SS.s


def read_time(arguments: dict, name: str) -> float:
    """Read seconds from a number, a numeric string ("12.5", "12.5s") or a clock ("01:02:03", "2:05")."""
    value = arguments.get(name)
    if isinstance(value, str):
        clock = _CLOCK.fullmatch(value.strip())
        if clock:
            return int(clock[1] or 0) * 3600 + int(clock[2]) * 60 + float(clock[3])
        value = re.sub("(?:second|sec)?s?$", "", value.strip())
    return read_number(value, name)


def read_times(arguments: dict, name: str) -> list[float]:
    """Read a list of times, at least one, each as `read_time` does. A single time is a list of one."""
    values = arguments.get(name)
    if not isinstance(values, list) or not values:
        values = [values]
    return [read_time({name: value}, name) for value in values]


def read_window(arguments: dict, duration: float) -> tuple[float, float]:
    """Read start_time and end_time. An impossible window is an error; one that reaches beyond the video is clamped to it."""
    start, end = read_time(arguments, "start_time"), read_time(arguments, "end_time")
    whole = f"the video lasts from 0 to {duration:.1f} seconds"
    if start >= end:
        raise ToolError("bad_arguments", f"start_time must be less than end_time; {whole}.")
    if start >= duration or end <= 0:
        raise ToolError("bad_arguments", f"The window lies outside the video; {whole}.")
    return max(0.0, start), min(end, duration)


def read_number(value: Any, name: str) -> float:
    try:
        number = math.nan if isinstance(value, bool) or value is None else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        # ascii(): what the model wrote may be no valid Unicode.
        raise ToolError("bad_arguments", f"{name} must be a number, not {ascii(value)[:40]}.")
    return number


# ------------------------------------------------------------------------------------------------ calls

_TAG = re.compile(r"<(/?)(tool_call|tool_code)>")
UNPARSEABLE = 'This call could not be read. Write <tool_call>{"name": ..., "arguments": {...}}</tool_call>.'


def parse_calls(text: str, turn: int = 0) -> list[Call]:
    """Read the calls of one assistant turn, in order. A bad one is a Call with an error; its siblings are untouched.

    One pass over the tags takes linear time: an opening tag inside an open call ends that call as unreadable."""
    calls = []
    opened = None  # the tag whose call is being read
    for tag in _TAG.finditer(text):
        closing, name = tag[1], tag[2]
        if not closing:
            if opened:
                calls.append(_unparseable(turn))
            opened = tag
        elif opened and name == opened[2]:
            body = text[opened.end() : min(tag.start(), opened.end() + MAX_CALL_CHARS + 1)]
            calls += _read_json(body, turn) if name == "tool_call" else _read_code(body, turn)
            opened = None
    if opened:
        calls.append(_unparseable(turn))
    return calls


def _unparseable(turn: int) -> Call:
    return Call(turn, "", {}, text=UNPARSEABLE, error="unparseable")


def _is_parser_safe(body: str) -> bool:
    return len(body) <= MAX_CALL_CHARS and sum(map(body.count, "([{")) <= MAX_BRACKETS


def _read_json(body: str, turn: int) -> list[Call]:
    try:
        call = json.loads(body) if _is_parser_safe(body) else None
        if not isinstance(call, dict):
            return [_unparseable(turn)]
        arguments = call.get("arguments")
        if isinstance(arguments, str) and _is_parser_safe(arguments):  # some models write them as a string of JSON
            arguments = json.loads(arguments)
    except (ValueError, RecursionError):
        return [_unparseable(turn)]
    if not isinstance(arguments, dict) or not isinstance(call.get("name"), str):
        return [_unparseable(turn)]
    return [Call(turn, call["name"], arguments)]


# CPython's parser keeps its depth per interpreter, not per thread: two at once may raise a SystemError.
_PARSING = threading.Lock()


def _read_code(body: str, turn: int) -> list[Call]:
    try:
        with _PARSING:
            statements = ast.parse(body.strip()).body if _is_parser_safe(body) else []
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        statements = []
    return [_read_statement(statement, turn) for statement in statements] or [_unparseable(turn)]


def _read_statement(statement: ast.stmt, turn: int) -> Call:
    match statement:
        case ast.Expr(ast.Call(ast.Name(name), [], keywords)) if all(k.arg for k in keywords):
            try:
                arguments = {k.arg: ast.literal_eval(k.value) for k in keywords}
                return Call(turn, name, json.loads(json.dumps(arguments)))  # the types that the JSON form has
            except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
                pass
    return _unparseable(turn)


# ------------------------------------------------------------------------------------------------ running one call


def run_tool(
    call: Call, task: Task, names: tuple[str, ...], videos: Videos, contract: VisualContract
) -> ClipForSubagent | str:
    """Run one parsed call. Whatever the model or the file can do wrong becomes a ToolError, and so does an exception in the
    tool's own code or a result that no agent can be shown. Those two are logged."""
    if call.name not in names:
        raise ToolError("unknown_tool", f"There is no tool {ascii(call.name)[:60]}; there is {', '.join(names)}.")
    try:
        return _check_result(TOOLS[call.name].run(task, call.arguments, videos, contract), contract)
    except ToolError as error:
        raise ToolError(error.kind, _clip_text(str(error))) from None
    except VideoError:
        raise ToolError("failed", "This part of the video could not be read.") from None
    except Exception:
        log.exception("tool %s crashed on %s", call.name, call.arguments)
        raise ToolError("crashed", "The tool failed.") from None


def _clip_text(text: str) -> str:
    return text if len(text) <= MAX_TEXT_CHARS else text[:MAX_TEXT_CHARS] + " ... (clipped)"


def _check_result(result: Any, contract: VisualContract) -> ClipForSubagent | str:
    """Return a tool's result, its text clipped and its times as floats. Raise if no agent could be shown it."""
    if isinstance(result, str):
        return _clip_text(result)
    if not isinstance(result, ClipForSubagent) or not isinstance(result.request + result.system, str):
        raise TypeError(f"it returned {result!r:.80}: return a str, or a ClipForSubagent whose texts are str")
    pixels, times = result.frames.pixels, result.frames.times
    start, end = result.window
    if pixels.dtype != "uint8" or pixels.ndim != 4 or pixels.shape[3] != 3 or not 1 <= len(pixels) == len(times):
        told = f"it returned {pixels.dtype} {pixels.shape} and {len(times)} times"
        raise ValueError(f"{told}: return uint8 [n, height, width, 3], at least one frame, and a time for each")
    # A server would resize other frames, and the trainer would see other pixels.
    height, width = pixels.shape[1:3]
    area = contract.processor_size()
    fits = area["shortest_edge"] <= height * width <= area["longest_edge"]
    if height % contract.cell or width % contract.cell or not fits:
        raise ValueError(f"it returned frames of {width} x {height}: decode them at contract.crop_size of the video")
    # As Python's floats: others, such as np.float32, cannot be recorded as JSON. None is the time of an image.
    times = tuple(None if time is None else float(time) for time in times)
    return replace(result, frames=Frames(pixels, times), window=(float(start), float(end)))
