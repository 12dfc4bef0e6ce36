"""tools.py: the tools that the main agent can call, and how its calls are read.

    parse_calls(text, turn) -> [Call]                # a bad call becomes a Call with an error; no text of the model raises
    run_tool(call, task, names, videos, contract)    # return a ClipForSubagent or a str, or raise ToolError

A `Tool` is a schema and a function; docs/add_a_tool.md adds one. The frames of a ClipForSubagent go to a sub-agent, and the
main agent reads its report. With `tool_return: frames`, they go to the main agent itself, as a str always does.

A call is `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. Pretrained models also write
`<tool_code>print(crop_video(start_time=1, end_time=2))`, often without `</tool_code>`. We parse its literals, and never
evaluate it. An unclosed `<tool_call>` does not run: it is the format that we teach.

Deliberately missing: tools that run code or use the network, and a check of arguments against the schema.
"""

import ast
import copy
import json
import logging
import math
import os
import re
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from episode import Call, Task
from runtime.video import Clip, VideoError, Videos
from runtime.visual import VisualContract

log = logging.getLogger(__name__)
# Longest text of a tool, about 1000 tokens. rollout.append_rendered ends an episode that has no room for it.
MAX_TEXT_CHARS = 4000
_logged: set[tuple[str, type]] = set()  # (tool, exception type) whose traceback this process has logged


def truncate(text: str) -> str:
    return text if len(text) <= MAX_TEXT_CHARS else text[:MAX_TEXT_CHARS] + " ... (clipped)"


class ToolError(Exception):
    """A call that cannot run. The model reads the text. Metrics count `kind`, which can be any word (Call.error)."""

    def __init__(self, kind: str, text: str):
        super().__init__(truncate(str(text)))
        self.kind = str(kind or "failed")  # never empty: a call without an error counts as one that ran


@dataclass(frozen=True)
class ClipForSubagent:
    """Frames for a sub-agent to look at. Only with `tool_return: frames`, the main agent sees them itself."""

    frames: Clip
    window: tuple[float, float]  # seconds
    request: str = ""  # the sub-agent's instruction; empty: the run's, or else prompts.SUBAGENT_REQUEST
    system: str = ""  # its system prompt; empty: the run's, or else prompts.subagent_system_prompt


@dataclass
class Tool:
    """What the model reads about a tool, and the function that runs it."""

    schema: dict  # OpenAI's function form, as make_tool writes it
    run: Callable[[Task, dict[str, Any], Videos, VisualContract], ClipForSubagent | str]


# ------------------------------------------------------------------------------------------------ the tools

# Add your tool here: a function like crop_video and an entry in TOOLS. choose_video, read_window, read_time and
# read_number (below) read and check arguments. For any other mistake of the model, raise ToolError. A tool that returns
# something else than frames or a text needs its own branch in _check_result, rollout.look_closely and study.report.decode_frames.


def crop_video(task: Task, arguments: dict, videos: Videos, contract: VisualContract) -> ClipForSubagent:
    """Return densely sampled frames of one window."""
    path = choose_video(task, arguments)
    start, end = read_window(arguments, videos.info(path).duration)
    # Use the number of frames that the model asks for, if any. Otherwise the contract's rate decides.
    fps, max_frames = contract.crop_fps, contract.crop_max_frames
    if arguments.get("num_frames") is not None:
        wanted = read_number(arguments["num_frames"], "num_frames")
        max_frames = int(max(1, min(wanted, contract.crop_max_frames)))
        fps = max_frames / max(end - start, 1e-3)
    frames = videos.window(path, start, end, contract.crop_size, fps=fps, max_frames=max_frames)
    return ClipForSubagent(frames, (start, end))


def make_tool(run: Callable, description: str, required: list[str], properties: dict[str, str | tuple | dict]) -> Tool:
    """Make a tool that the model calls by the function's name. `properties` maps each argument to its JSON type, to a pair
    (type, description), or to any JSON schema."""
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


def schemas_of(names: Iterable[str]) -> dict[str, dict]:
    """Return the schemas of these tools, by their names in TOOLS."""
    return {name: TOOLS[name].schema for name in names}


# ------------------------------------------------------------------------------------------------ arguments


def choose_video(task: Task, arguments: dict) -> str:
    """Return the task's video with the base name that the model wrote, or the first if it wrote none or the task has only one.
    The model's own path is never opened."""
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


def read_window(arguments: dict, duration: float) -> tuple[float, float]:
    """Read start_time and end_time, or start and end, which some models write. Refuse an impossible window, and clamp one that
    reaches beyond the video."""
    arguments = {"start_time": arguments.get("start"), "end_time": arguments.get("end")} | arguments
    start, end = read_time(arguments, "start_time"), read_time(arguments, "end_time")
    whole = f"the video lasts from 0 to {duration:.1f} seconds"
    if start >= end:
        raise ToolError("bad_arguments", f"start_time must be less than end_time; {whole}.")
    if start >= duration or end <= 0:
        raise ToolError("bad_arguments", f"The window lies outside the video; {whole}.")
    return max(0.0, start), min(end, duration)


def read_number(value: Any, name: str) -> float:
    """Return a finite number. Refuse anything else."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if isinstance(value, bool) or not math.isfinite(number):
        # ascii(): the model can write invalid Unicode.
        raise ToolError("bad_arguments", f"{name} must be a number, not {ascii(value)[:40]}.")
    return number


# ------------------------------------------------------------------------------------------------ running one call


def run_tool(
    call: Call, task: Task, names: tuple[str, ...], videos: Videos, contract: VisualContract
) -> ClipForSubagent | str:
    """Run one parsed call. Mistakes of the model become a ToolError. So do exceptions in the tool's own code, even SystemExit, and
    invalid results; the first traceback of each type is logged. A VideoError stays one."""
    if call.name not in names:
        raise ToolError("unknown_tool", f"There is no tool {ascii(call.name)[:60]}; there is {', '.join(names)}.")
    try:
        arguments = copy.deepcopy(call.arguments)  # a tool may change them, but not the record
        return _check_result(TOOLS[call.name].run(task, arguments, videos, contract), contract)
    except (ToolError, VideoError):
        raise
    except (Exception, SystemExit) as error:
        if (call.name, type(error)) not in _logged:
            _logged.add((call.name, type(error)))
            log.exception("tool %s crashed on %s", call.name, call.arguments)
        reason = f"The tool failed: {type(error).__name__}: {error}".splitlines()[0]
        raise ToolError("crashed", reason) from None


def _check_result(result: Any, contract: VisualContract) -> ClipForSubagent | str:
    """Return a tool's result with clipped text, or with times as floats. Raise if an agent cannot read it."""
    if isinstance(result, str):
        return truncate(result)
    is_clip = isinstance(result, ClipForSubagent)
    if not is_clip or not isinstance(result.request, str) or not isinstance(result.system, str):
        wanted = "return a str, or wrap frames in ClipForSubagent(frames, window), whose texts are str"
        raise TypeError(f"it returned {type(result).__name__}: {wanted}")
    # The window, and the form of the frames.
    pixels, times = result.frames.pixels, result.frames.times
    start, end = result.window
    if not -math.inf < start <= end < math.inf:  # or NaN
        raise ValueError(f"its window is {result.window}: it must be finite, and it must not end before it starts")
    if pixels.dtype != "uint8" or pixels.ndim != 4 or pixels.shape[3] != 3 or not 1 <= len(pixels) == len(times):
        raise ValueError(
            f"it returned {pixels.dtype} {pixels.shape} and {len(times)} times: "
            "return uint8 [n, height, width, 3], at least one frame, and a time for each"
        )
    # A server would resize frames of another size, and the trainer would see other pixels than the server.
    height, width = pixels.shape[1:3]
    area = contract.processor_size()
    fits = area["shortest_edge"] <= height * width <= area["longest_edge"]
    if height % contract.cell or width % contract.cell or not fits:
        raise ValueError(f"it returned frames of {width} x {height}: decode them at contract.crop_size of the video")
    # Convert times to Python floats: JSON cannot hold np.float32 and the like. None is the time of an image.
    times = tuple(None if time is None else float(time) for time in times)
    if not all(time is None or math.isfinite(time) for time in times):
        raise ValueError(f"its frames have the times {times}: each must be finite")
    return replace(result, frames=Clip(pixels, times), window=(float(start), float(end)))


# ------------------------------------------------------------------------------------------------ finding calls in a turn

MAX_CALL_CHARS = 4096  # a typical call has 100; a longer one is unparseable
MAX_DEPTH = 16  # levels of {} and []; a typical call has 2. Where Python itself gives up depends on the thread's stack
_TAG = re.compile(r"<(/?)(tool_call|tool_code)>")
_END_OF_TURN = re.compile(r"<\|\w+\|>\Z")
POSITIONAL = ("video_path", "start_time", "end_time")  # the arguments of a call in <tool_code> that writes no names
UNPARSEABLE = 'This call could not be read. Write <tool_call>{"name": ..., "arguments": {...}}</tool_call>.'


def parse_calls(text: str, turn: int = 0) -> list[Call]:
    """Read the calls of one assistant turn, in order. A bad one becomes a Call with an error, and the others still parse.

    One pass over the tags takes linear time: an opening tag inside an open call ends that call as unparseable. A <tool_code>
    that is still open at the end of the turn is read like a closed one."""
    calls = []
    opened = None  # the opening tag of the current call
    for tag in _TAG.finditer(text):
        closing, name = tag[1], tag[2]
        if not closing:
            if opened:
                calls.append(_unparseable(turn))
            opened = tag
        elif opened and name == opened[2]:
            body = text[opened.end() : tag.start()]
            calls += [_read_json(body, turn)] if name == "tool_call" else _read_code(body, turn)
            opened = None
    if opened and opened[2] == "tool_code":
        calls += _read_code(_END_OF_TURN.sub("", text[opened.end() :]), turn)
    elif opened:
        calls.append(_unparseable(turn))
    return calls


def _unparseable(turn: int) -> Call:
    return Call(turn, "", {}, text=UNPARSEABLE, error="unparseable")


def _read_json(body: str, turn: int) -> Call:
    try:
        call = json.loads(body) if len(body) <= MAX_CALL_CHARS else None
        if not isinstance(call, dict):
            return _unparseable(turn)
        arguments = call.get("arguments")
        if isinstance(arguments, str):  # some models write a JSON string
            arguments = json.loads(arguments)
    except (ValueError, RecursionError):
        return _unparseable(turn)
    if not isinstance(arguments, dict) or not isinstance(call.get("name"), str):
        return _unparseable(turn)
    return _make_call(turn, call["name"], arguments)


def _make_call(turn: int, name: str, arguments: dict[str, Any]) -> Call:
    """Return the call, which is unparseable if it is nested too deep."""
    if is_deeper(arguments, MAX_DEPTH - 1):  # the call itself is a level
        return _unparseable(turn)
    return Call(turn, name, arguments)


def is_deeper(value: Any, levels: int) -> bool:
    """Return whether lists and dicts are nested more than so many levels deep."""
    if not isinstance(value, list | dict):
        return False
    parts = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(is_deeper(part, levels - 1) for part in parts)


# CPython's parser counts its depth per interpreter, not per thread, so two at once can raise a SystemError.
_PARSING = threading.Lock()
# What ast.parse and literal_eval raise on bad or too deeply nested input.
NO_LITERALS = (SyntaxError, TypeError, ValueError, RecursionError, MemoryError)


def _read_code(body: str, turn: int) -> list[Call]:
    """Read a <tool_code> block. If the whole is Python, each statement is a call. Otherwise each line that is a call counts, and
    the others are ignored. A block without any is one unparseable call."""
    calls = _read_python(body, turn)
    if not calls:
        for line in body.splitlines():
            calls += [call for call in _read_python(line, turn) if not call.error]
    return calls or [_unparseable(turn)]


def _read_python(code: str, turn: int) -> list[Call]:
    """Return a call per statement, or none if the code is not Python."""
    try:
        with _PARSING:
            statements = ast.parse(code.strip()).body if len(code) <= MAX_CALL_CHARS else []
    except NO_LITERALS:
        statements = []
    return [_read_statement(statement, turn) for statement in statements]


def _read_statement(statement: ast.stmt, turn: int) -> Call:
    """Read `crop_video(start_time=1, end_time=2)`, `tools.crop_video("a.mp4", 1, 2)`, or either one inside `print(...)`."""
    # Take the call out of print(...).
    call = statement.value if isinstance(statement, ast.Expr) else None
    match call:
        case ast.Call(ast.Name("print"), args=[printed], keywords=[]):
            call = printed
    if not isinstance(call, ast.Call):
        return _unparseable(turn)

    # Read the name: `crop_video`, or what follows the dot of `tools.crop_video`.
    if isinstance(call.func, ast.Name):
        name = call.func.id
    elif isinstance(call.func, ast.Attribute):
        name = call.func.attr
    else:
        return _unparseable(turn)

    # Read the arguments. Either all have a name or none has.
    by_position = dict(zip(POSITIONAL, call.args))
    by_name = {keyword.arg: keyword.value for keyword in call.keywords}
    unpacked = None in by_name  # `**arguments`
    if len(call.args) > len(POSITIONAL) or (by_position and by_name) or unpacked:
        return _unparseable(turn)
    try:
        arguments = {key: ast.literal_eval(value) for key, value in (by_position or by_name).items()}
        arguments = json.loads(json.dumps(arguments))  # the same types as from JSON
    except NO_LITERALS:
        return _unparseable(turn)
    return _make_call(turn, name, arguments)
