"""Parsing and running tool calls as real models write them."""

import gc
import json
import math
import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import END, MemoryVideos, crop, play, turns
from tiny import CONTRACT

import tools
from episode import Task, episode_record
from runtime.video import Clip
from tools import TOOLS, ClipForSubagent, ToolError, crop_video, make_tool, parse_calls, read_time, run_tool

TASK = Task("t", "What happens?", ("/data/first.mp4", "/data/second.mp4"), "oe", "")


def call_text(tool: str, **arguments) -> str:
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"


def look(videos=None, **arguments) -> ClipForSubagent:
    """Run a call of crop_video."""
    [call] = parse_calls(call_text("crop_video", **arguments))
    return run_tool(call, TASK, ("crop_video",), videos or MemoryVideos(), CONTRACT)


# ---- the parser

CALLS = yaml.safe_load((Path(__file__).parent / "calls.yaml").read_text("utf-8"))
TOO_LONG = crop().replace("</tool_call>", " " * 5000 + "</tool_call>")


@pytest.mark.parametrize("case", [*CALLS["texts"], {"name": "too long", "calls": ["unparseable"], "text": TOO_LONG}], ids=lambda case: case["name"])  # fmt: skip
def test_each_call_is_read_or_fails_alone(case):
    calls = parse_calls(case["text"], 2)
    assert [call.error or call.arguments for call in calls] == case["calls"]
    assert all(call.turn == 2 and call.name == "crop_video" for call in calls if not call.error)
    assert all("could not be read" in call.text for call in calls if call.error)


DEEP = {
    "JSON": '<tool_call>{"name": "crop_video", "arguments": {"start_time": %s}}</tool_call>',
    "a string of JSON": '<tool_call>{"name": "crop_video", "arguments": "{\\"start_time\\": %s}"}</tool_call>',
    "code": "<tool_code>crop_video(start_time=%s)</tool_code>",
}


@pytest.mark.parametrize("call", DEEP.values(), ids=DEEP)
def test_a_call_nested_more_than_16_deep_is_unparseable(call):
    """Past bug: 982 brackets were parsed, but no log or record could hold them, and the run ended."""
    for depth in (0, 14, 15, 100, 982, 1900):  # the call and its arguments are two more
        [read] = parse_calls(call % ("[" * depth + "1" + "]" * depth))
        assert read.error == ("" if depth <= 14 else "unparseable")


FLOODS = {"unclosed": ("<tool_call>", 3000), "nested": ("<tool_code>" + "(" * 50 + "</tool_code>", 500)}


@pytest.mark.parametrize("flood, count", FLOODS.values(), ids=FLOODS)
def test_many_calls_take_linear_time(flood, count):
    def seconds(n: int) -> float:
        text = flood * n
        started = time.process_time()  # of this process, because the machine can be busy
        assert len(parse_calls(text)) == n
        return time.process_time() - started

    few = seconds(count // 10)
    many = min(seconds(count) for _ in range(2))  # Python's garbage collector may run in one of them
    assert many < max(40 * few, 0.1)  # linear: 10 times, quadratic: 100 times


PIECES = [f"<{slash}{tag}>" for slash in ("", "/") for tag in ("tool_call", "tool_code")]
PIECES += ['{"name": "crop_video", "arguments": {', "}}", "crop_video(", "start_time=1", ", ", ")", '"start_time": ']
PIECES += ["NaN", "1e999", "9" * 5000, "[" * 3000, '"\\ud800"']


@settings(max_examples=100)
@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=8), max_size=30))
def test_nothing_that_a_model_writes_breaks_a_turn(pieces):
    """Parsing returns, every call is readable or has an error, and running one gives a ClipForSubagent or a ToolError."""
    for call in parse_calls("".join(pieces)):
        json.dumps(call.arguments)  # episodes are recorded as JSON
        if not call.error:
            try:
                assert isinstance(run_tool(call, TASK, ("crop_video",), MemoryVideos(), CONTRACT), ClipForSubagent)
            except ToolError as error:
                assert error.kind != "crashed"
                str(error).encode()  # a tokenizer reads it, so it must be valid Unicode


# ---- arguments

TIMES = {12.5: 12.5, "12.5": 12.5, "12.5s": 12.5, "12 seconds": 12, " 00:07.5 ": 7.5, "01:02:03": 3723}
NO_TIMES = [None, True, math.nan, "inf", "soon", [], 10**400, "9" * 400, "\ud800"]


@pytest.mark.parametrize("written", [*TIMES, *NO_TIMES], ids=ascii)
def test_times_are_read_as_people_write_them_and_others_are_a_text_for_the_model(written):
    if written not in NO_TIMES:
        assert read_time({"t": written}, "t") == TIMES[written]
        return
    with pytest.raises(ToolError, match="start_time") as caught:
        read_time({"start_time": written}, "start_time")
    assert caught.value.kind == "bad_arguments" and len(str(caught.value)) < 120


@pytest.mark.parametrize("arguments, window", CALLS["windows"])
def test_windows_are_clamped_and_an_impossible_one_names_the_range(arguments, window):
    with pytest.raises(ToolError, match=window) if isinstance(window, str) else nullcontext():
        assert look(**arguments).window == tuple(window)


@settings(max_examples=80)
@given(st.floats(-100, 200), st.floats(-100, 200), st.none() | st.integers(-5, 1000))
def test_every_window_that_runs_lies_in_the_video_and_holds_what_it_says(start, end, count):
    videos = MemoryVideos(duration=37.3)
    arguments = {"start_time": start, "end_time": end} | ({} if count is None else {"num_frames": count})
    try:
        clip = look(videos, **arguments)
    except ToolError:
        assert start >= end or start >= 37.3 or end <= 0
        return
    low, high = clip.window
    assert 0 <= low < high <= 37.3
    assert 1 <= len(clip.frames) <= CONTRACT.crop_max_frames
    if ((low <= videos.times) & (videos.times <= high)).any():  # otherwise the clip has the nearest frame
        assert all(low <= t <= high for t in clip.frames.times)


@pytest.mark.parametrize("end, wanted, shown", [(20, 1, 1), (20, 2, 2), (20, 99, 4), (2, None, 2), (2, 4, 4)])
def test_the_model_may_ask_for_fewer_frames_or_for_more(end, wanted, shown):
    """More frames than the contract's rate gives for a short window, but never more than crop_max_frames."""
    assert (CONTRACT.crop_fps, CONTRACT.crop_max_frames) == (1, 4)
    assert len(look(start_time=0, end_time=end, num_frames=wanted).frames) == shown


def test_a_tool_that_is_not_offered_in_this_run_is_unknown():
    [call] = parse_calls(crop())  # it is in tools.py
    with pytest.raises(ToolError, match="'crop_video'; there is look_up, read") as caught:
        run_tool(call, TASK, ("look_up", "read"), MemoryVideos(), CONTRACT)
    assert caught.value.kind == "unknown_tool"


# ---- what a tool returns


TWO = np.zeros((2, 64, 96, 3), np.uint8)  # frames


def clip_of(pixels=TWO, times=(1.0, 2.0), window=(1, 2), **more) -> ClipForSubagent:
    return ClipForSubagent(Clip(pixels, times), window, **more)


RETURNS = {
    "frames": (Clip(TWO, (1.0, 2.0)), "returned Clip.* ClipForSubagent"),
    "no request": (clip_of(request=None), "returned ClipForSubagent"),
    "floats": (clip_of(np.zeros((2, 64, 96, 3))), r"float64 \(2, 64, 96, 3\) and 2 times"),
    "one frame alone": (clip_of(np.zeros((64, 96, 3), np.uint8)), r"uint8 \(64, 96, 3\) and 2 times"),
    "no frames": (clip_of(np.zeros((0, 64, 96, 3), np.uint8), ()), r"\(0, 64, 96, 3\) and 0 times"),
    "few times": (clip_of(times=(1.0,)), "and 1 times"),
    "odd sides": (clip_of(np.zeros((2, 60, 96, 3), np.uint8)), "96 x 60"),
    "too large": (clip_of(np.broadcast_to(np.uint8(0), (2, 8192, 8192, 3))), "8192 x 8192"),
    "an exit": (SystemExit("the tool leaves"), "the tool leaves"),
    "two windows": (clip_of(window=(8, 2)), r"\(8, 2\)"),
    "a time that is none": (clip_of(times=(1.0, math.nan)), r"\(1.0, nan\)"),
    "an exception": (KeyError("a bug of the fork"), "a bug of the fork"),
}


@pytest.fixture
def used(renderer, monkeypatch):
    """used(run, arguments, ...) -> the episode of an agent that calls this tool."""
    monkeypatch.setattr(tools, "_logged", set())

    def play_it(run, arguments=None, more="", **cfg):
        monkeypatch.setitem(TOOLS, "own", make_tool(run, "Own.", [], {}))
        said = turns(
            f"So.</think>{call_text('own', **arguments or {})}{more}{END}", f"x</think>{END}", report="It is red."
        )
        [episode] = play(renderer, said, **{"tools": ("own", "crop_video")} | cfg)
        json.dumps(episode_record(episode, renderer.readable))
        return episode

    return play_it


def raising(error: BaseException):
    def run(*_):
        raise error

    return run


@pytest.mark.parametrize("returned, says", RETURNS.values(), ids=RETURNS)
def test_a_mistake_in_a_tool_costs_its_call_and_is_logged(used, caplog, returned, says):
    run = raising(returned) if isinstance(returned, BaseException) else lambda *_: returned
    bad, good = used(run, more=crop()).calls
    assert bad.error == "crashed" and re.match(f"The tool failed: [A-Za-z]+: .*{says}", bad.text)
    assert (good.error, good.text) == ("", "It is red.")
    [record] = caplog.records
    assert "tool own crashed" in record.getMessage() and re.search(says, str(record.exc_info[1]))


def test_a_crash_leaves_one_traceback_of_its_type(used, caplog):
    for error in (ValueError, ValueError, KeyError, ValueError, KeyError):
        [call] = used(raising(error("one line\nand another"))).calls
        assert re.fullmatch(rf"The tool failed: {error.__name__}: '?one line\S*.*", call.text)
    assert [record.exc_info[0] for record in caplog.records] == [ValueError, KeyError]


@pytest.mark.parametrize("tool_return", ["subagent", "frames"])
def test_what_a_tool_returns_is_recorded_and_shown_as_it_is(used, tool_return):
    """JSON cannot hold np.float32 times."""
    returned = clip_of(times=np.float32([1, 2]), window=np.float32([1, 2]))
    episode = used(lambda *_: returned, tool_return=tool_return)
    [call] = episode.calls
    assert (call.error, call.window) == ("", (1.0, 2.0))
    [clip] = (call.subagent or episode.main).clips[-1:]
    assert clip.pixels is returned.frames.pixels and clip.times == (1.0, 2.0)


def test_a_tool_that_changes_its_arguments_changes_no_record(used):
    def pop(task, arguments, videos, contract) -> str:
        arguments["at"].append({1, 2})
        del arguments["do"]
        return "Done."

    [call] = used(pop, {"do": "it", "at": [1]}).calls
    assert (call.text, call.arguments) == ("Done.", {"do": "it", "at": [1]})


FILM = "<|im_end|><|image_pad|> \ud800" + "a word " * 100_000  # subtitles can be longer than the context
CLIPPED = FILM[:4000] + " ... (clipped)"


@pytest.mark.parametrize(
    "run, error, text",
    [
        (raising(ToolError("", "No.")), "failed", "No."),  # an error of no kind is no call that ran
        (raising(ToolError("too_dark", ValueError("It is dark."))), "too_dark", "It is dark."),
        (raising(ToolError("too_dark", FILM)), "too_dark", CLIPPED),
        (lambda *_: FILM, "", CLIPPED),
    ],
    ids=["no kind", "an exception as text", "a long error", "a long text"],
)
def test_a_text_of_a_tool_is_clipped_and_none_can_spell_control_tokens(used, renderer, run, error, text):
    episode = used(run, max_context=32_768)
    [call] = episode.calls
    assert (call.error, call.text) == (error, text) and episode.n_executed == (not error)
    delta = episode.main.ids[episode.main.turns[0][1] : episode.main.turns[1][0]]
    assert delta.count(renderer.image_pad) == 0 and delta.count(renderer.end_of_turn) == 1  # the turn's own


def test_a_tool_may_ask_for_any_schema():
    times = {"type": "array", "items": {"type": "number"}, "minItems": 1}
    tool = make_tool(crop_video, "Look.", ["times"], {"times": times, "x": "number", "y": ("number", "0 to 1")})
    described = {"type": "number", "description": "0 to 1"}
    asked = tool.schema["function"]["parameters"]["properties"]
    assert asked == {"times": times, "x": {"type": "number"}, "y": described}


# ---- threads


def test_many_threads_may_read_code_calls_at_once():
    """Episodes run in threads. CPython 3.11's parser raised `SystemError: AST constructor recursion depth mismatch` if the
    garbage collector switched threads while one parsed a <tool_code>."""
    text = "<tool_code>crop_video(start_time=1, end_time=9)</tool_code>" * 20

    def yield_to_others(*_):
        time.sleep(0)

    threshold = gc.get_threshold()
    gc.callbacks.append(yield_to_others)
    gc.set_threshold(20)
    try:
        with ThreadPoolExecutor(8) as pool:
            turns_read = list(pool.map(parse_calls, [text] * 40))
    finally:
        gc.callbacks.remove(yield_to_others)
        gc.set_threshold(*threshold)
    assert all(len(calls) == 20 and not any(call.error for call in calls) for calls in turns_read)
