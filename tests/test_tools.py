"""Parsing and running tool calls as real models write them."""

import gc
import json
import math
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import END, MemoryVideos, play, turns
from tiny import CONTRACT

import tools
from episode import NO_PROMPT, Call, Episode, Task, Trajectory, episode_record
from rollout import AgentContext, RolloutConfig, agent_flow, run_call
from runtime.render import Renderer
from runtime.video import Clip
from tools import (
    TOOLS,
    ClipForSubagent,
    ToolError,
    choose_video,
    crop_video,
    make_tool,
    parse_calls,
    read_time,
    read_window,
    run_tool,
)

TASK = Task("t", "What happens?", ("/data/first.mp4", "/data/second.mp4"), "oe", "")


def call_text(tool="crop_video", **arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


def calling(tool: str, **arguments):
    """Return an agent that calls a tool once."""
    return turns(f"So.</think>{call_text(tool, **arguments)}{END}", f"x</think>{END}")


def crop(videos=None, **arguments) -> ClipForSubagent:
    [call] = parse_calls(call_text(**arguments))
    return run_tool(call, TASK, ("crop_video",), videos or MemoryVideos(), CONTRACT)


# ---- the parser


def errors(text: str) -> list[str]:
    return [call.error for call in parse_calls(text)]


def test_each_call_parses_or_fails_alone():
    good = call_text(start_time=1, end_time=2)
    bodies = ("{oops", "[1]", '{"name": 3}')
    text = good + good.join(f"<tool_call>{body}</tool_call>" for body in bodies)
    assert errors(text) == ["", "unparseable", "", "unparseable", "", "unparseable"]
    assert errors(f"<tool_call>\n{good}\n</tool_call>") == ["unparseable", ""]  # the outer one ends
    assert errors("so</think><tool_call>{") == ["unparseable"] and errors("no call </tool_call> here") == []
    assert errors(good.replace("</tool_call>", " " * 5000 + "</tool_call>")) == ["unparseable"]  # too long
    assert errors(good.replace("<tool_call>", "<tool_code>")) == ["unparseable"]  # the other tag does not close it
    assert errors("<tool_call>crop_video(start_time=1, end_time=2)") == ["unparseable"]  # it holds JSON, no Python
    assert all(call.turn == 2 and (not call.error or "could not be read" in call.text) for call in parse_calls(text, 2))


def test_the_pretrained_habit_is_read_as_literals_and_never_run():
    text = "<tool_code>\ncrop_video(video_path='a.mp4', start_time=-1.5, end_time=20)\ncrop_video(start_time=s)\n</tool_code>"
    first, second = parse_calls(text)
    assert (first.name, first.arguments) == ("crop_video", {"video_path": "a.mp4", "start_time": -1.5, "end_time": 20})
    assert second.error == "unparseable"  # the block is Python, so its other statements are bad calls
    for evil in ("crop_video(start_time=__import__('os').getpid())", "crop_video(**{})", "x = 1"):
        assert errors(f"<tool_code>{evil}</tool_code>") == ["unparseable"], evil


WINDOW = {"start_time": 1, "end_time": 2.5}
CODE_CALLS = {
    "a plain call": ("crop_video(start_time=1, end_time=2.5)", WINDOW),
    "print and a dotted name": ("print(tools.crop_video(start_time=1, end_time=2.5))", WINDOW),
    "positional": ("crop_video('a.mp4', 1, 2.5)", {"video_path": "a.mp4"} | WINDOW),
    "several lines": ("print(\n  crop_video(\n    start_time=1,\n    end_time=2.5,\n  )\n)", WINDOW),
    "text around it": ("I look:\n  print(crop_video(start_time=1, end_time=2.5))\nThen I answer.", WINDOW),
}


@pytest.mark.parametrize("end", ["</tool_code>", "", "\n<|endoftext|>"])
@pytest.mark.parametrize("code, arguments", CODE_CALLS.values(), ids=CODE_CALLS)
def test_code_is_read_as_the_release_reads_it(code, arguments, end):
    """Qwen's own way to call is `<tool_code>print(crop_video(...))` without a closing tag."""
    [call] = parse_calls(f"I look.</think>\n<tool_code>\n{code}{end}", 1)
    assert (call.turn, call.name, call.arguments, call.error) == (1, "crop_video", arguments, "")


NO_CODE_CALLS = {
    "four positional": "crop_video('a.mp4', 1, 2, 3)",
    "positional beside keywords": "crop_video('a.mp4', start_time=1, end_time=2)",
    "print of two": "print(crop_video(start_time=1, end_time=2), crop_video(start_time=3, end_time=4))",
    "cut off": "print(crop_video(start_time=1, end_ti",
    "nothing": "",
}


@pytest.mark.parametrize("code", NO_CODE_CALLS.values(), ids=NO_CODE_CALLS)
def test_code_without_a_call_is_one_unparseable_call(code):
    assert errors(f"<tool_code>{code}") == ["unparseable"]


def test_an_unclosed_tool_call_does_not_run():
    """It is the format that we teach."""
    for end in ("", END):
        assert errors(call_text(start_time=1, end_time=2).removesuffix("</tool_call>") + end) == ["unparseable"]
    code = "<tool_code>crop_video(start_time=1, end_time=2)\n"  # ended by the next call, not by the turn
    assert errors(code + call_text(start_time=1, end_time=2)) == ["unparseable", ""]


def test_arguments_may_be_a_string_of_json():
    arguments = '"{\\"start_time\\": 1, \\"end_time\\": 2}"'
    [call] = parse_calls(f'<tool_call>{{"name": "crop_video", "arguments": {arguments}}}</tool_call>')
    assert call.arguments == {"start_time": 1, "end_time": 2}


DEEP_CALLS = {
    "JSON": '<tool_call>{"name": "crop_video", "arguments": {"start_time": %s}}</tool_call>',
    "a string of JSON": '<tool_call>{"name": "crop_video", "arguments": "{\\"start_time\\": %s}"}</tool_call>',
    "code": "<tool_code>crop_video(start_time=%s)</tool_code>",
}


@pytest.mark.parametrize("call", DEEP_CALLS.values(), ids=DEEP_CALLS)
def test_a_call_nested_more_than_16_deep_is_unparseable(call):
    """Past bug: 982 brackets were parsed, but no log or record could hold them, and the run ended."""
    for depth in (0, 14, 15, 100, 982, 1900):  # the call and its arguments are two more
        brackets = "[" * depth + "1" + "]" * depth
        assert errors(call % brackets) == ["" if depth <= 14 else "unparseable"]


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


@pytest.mark.parametrize(
    ("written", "seconds"),
    [(12.5, 12.5), ("12.5", 12.5), ("12.5s", 12.5), ("12 seconds", 12), (" 00:07.5 ", 7.5), ("01:02:03", 3723)],
)
def test_times_are_read_as_people_write_them(written, seconds):
    assert read_time({"t": written}, "t") == seconds


@pytest.mark.parametrize("written", [None, True, math.nan, "inf", "soon", [], 10**400, "9" * 400, "\ud800"], ids=ascii)
def test_what_is_no_time_is_a_text_for_the_model(written):
    with pytest.raises(ToolError, match="start_time must be a number") as caught:
        read_time({"start_time": written}, "start_time")
    assert caught.value.kind == "bad_arguments" and len(str(caught.value)) < 120


def test_windows_are_clamped_and_an_impossible_one_names_the_range():
    assert crop(start_time=-10, end_time=5).window == (0, 5)
    assert crop(start_time=50, end_time=1e308).window == (50, 60)
    assert read_window({"start_time": "-1", "end_time": "0:45"}, 37.3) == (0, 37.3)  # as other tools call it
    assert crop(start=1, end="0:05").window == (1, 5)
    assert crop(start_time=1, end=5).window == (1, 5)
    assert crop(start_time=1, end_time=5, start=2, end=3).window == (1, 5)  # the names of the schema come first
    with pytest.raises(ToolError, match="^end_time must be a number, not 'soon'"):
        crop(start=1, end="soon")
    for start, end in ((10, 10), (60, 70), (-9, -1)):
        with pytest.raises(ToolError, match="from 0 to 60.0 seconds"):
            crop(start_time=start, end_time=end)


@settings(max_examples=80)
@given(st.floats(-100, 200), st.floats(-100, 200), st.none() | st.integers(-5, 1000))
def test_every_window_that_runs_lies_in_the_video_and_holds_what_it_says(start, end, count):
    videos = MemoryVideos(duration=37.3)
    arguments = {"start_time": start, "end_time": end} | ({} if count is None else {"num_frames": count})
    try:
        clip = crop(videos, **arguments)
    except ToolError:
        assert start >= end or start >= 37.3 or end <= 0
        return
    low, high = clip.window
    assert 0 <= low < high <= 37.3
    assert 1 <= len(clip.frames) <= CONTRACT.crop_max_frames
    if ((low <= videos.times) & (videos.times <= high)).any():  # otherwise the clip has the nearest frame
        assert all(low <= t <= high for t in clip.frames.times)


def test_the_models_path_only_picks_among_the_tasks_own_videos():
    first, second = TASK.videos
    picked = {"second.mp4": second, "../second.mp4": second, "../first.mp4": first, None: first}
    for path, expected in picked.items():
        videos = MemoryVideos()
        crop(videos, video_path=path, start_time=0, end_time=5)
        assert set(videos.opened) == {expected}, path
    # A misspelled name gets no report on another video.
    videos = MemoryVideos()
    with pytest.raises(ToolError, match="There is no video .*; there is first.mp4, second.mp4"):
        crop(videos, video_path="/etc/passwd", start_time=0, end_time=5)
    assert not videos.opened
    alone = replace(TASK, videos=TASK.videos[:1])
    assert choose_video(alone, {"video_path": "/etc/passwd"}) == first


def test_the_model_may_ask_for_fewer_frames_or_for_more():
    """More frames than the contract's rate gives for a short window, but never more than crop_max_frames."""
    for wanted, shown in ((1, 1), (2, 2), (99, CONTRACT.crop_max_frames)):
        assert len(crop(start_time=0, end_time=20, num_frames=wanted).frames) == shown
    assert len(crop(start_time=0, end_time=2).frames) == 2 * CONTRACT.crop_fps < CONTRACT.crop_max_frames
    assert len(crop(start_time=0, end_time=2, num_frames=4).frames) == 4


def test_a_bad_video_and_an_unknown_tool_are_texts_for_the_model(renderer):
    call = parse_calls(call_text(start_time=0, end_time=5))[0]
    task = Task("t", "?", ("/secret/bad.mp4",), "oe", "")
    context = AgentContext(None, Renderer(renderer.tokenizer, CONTRACT), MemoryVideos(), RolloutConfig())
    failed = run_call(context, agent_flow(context.cfg), Episode(task, 4, Trajectory(NO_PROMPT)), call, 0)
    assert failed.error == "failed" and failed.text and "secret" not in failed.text
    call = parse_calls('<tool_call>{"name": "rm\\ud800", "arguments": {}}</tool_call>')[0]
    with pytest.raises(ToolError, match="there is crop_video, look_up") as caught:
        run_tool(call, TASK, ("crop_video", "look_up"), MemoryVideos(), CONTRACT)
    assert caught.value.kind == "unknown_tool" and str(caught.value).encode()
    with pytest.raises(ToolError, match="no tool 'crop_video'"):  # in tools.py, but not offered in this run
        run_tool(parse_calls(call_text(start_time=0, end_time=5))[0], TASK, ("look_up",), MemoryVideos(), CONTRACT)


def test_the_published_schema_is_what_the_published_model_was_shown():
    """Compare byte by byte, because the schema is part of the prompt. Only tools that describe arguments show descriptions."""
    assert json.dumps(TOOLS["crop_video"].schema) == '{"type": "function", "function": {"name": "crop_video", "description": "Look closely at a part of the video. Times are in seconds.", "parameters": {"type": "object", "properties": {"video_path": {"type": "string"}, "start_time": {"type": "number"}, "end_time": {"type": "number"}, "num_frames": {"type": "integer"}}, "required": ["start_time", "end_time"]}}}'  # fmt: skip


# ---- what a tool returns


TWO = np.zeros((2, 64, 96, 3), np.uint8)  # frames


def clip_of(pixels=TWO, times=(1.0, 2.0), window=(1, 2), **more) -> ClipForSubagent:
    return ClipForSubagent(Clip(pixels, times), window, **more)


RETURNS = {
    "frames": (Clip(TWO, (1.0, 2.0)), r"it returned Clip: .* wrap frames in ClipForSubagent\(frames, window\)"),
    "no request": (clip_of(request=None), "it returned ClipForSubagent: .*, whose texts are str"),
    "floats": (clip_of(np.zeros((2, 64, 96, 3))), r"it returned float64 \(2, 64, 96, 3\) and 2 times"),
    "one frame alone": (clip_of(np.zeros((64, 96, 3), np.uint8)), r"it returned uint8 \(64, 96, 3\) and 2 times"),
    "no frames": (clip_of(np.zeros((0, 64, 96, 3), np.uint8), ()), "at least one frame"),
    "few times": (clip_of(times=(1.0,)), "and 1 times: .* a time for each"),
    "odd sides": (clip_of(np.zeros((2, 60, 96, 3), np.uint8)), "frames of 96 x 60: decode them at contract.crop_size"),
    "too large": (clip_of(np.broadcast_to(np.uint8(0), (2, 8192, 8192, 3))), "frames of 8192 x 8192"),
    "an exit": (SystemExit("the tool leaves"), "the tool leaves"),
    "two windows": (clip_of(window=(8, 2)), r"its window is \(8, 2\): .* must not end before it starts"),
    "a time that is none": (clip_of(times=(1.0, math.nan)), r"its frames have the times \(1.0, nan\)"),
    "an exception": (KeyError("a bug of the fork"), "a bug of the fork"),
}


@pytest.mark.parametrize("returned, says", RETURNS.values(), ids=RETURNS)
def test_a_mistake_in_a_tool_costs_its_call_and_is_logged(renderer, monkeypatch, caplog, returned, says):
    def run(*_):
        if isinstance(returned, BaseException):
            raise returned
        return returned

    monkeypatch.setitem(TOOLS, "wrong", make_tool(run, "Wrong.", [], {}))
    monkeypatch.setattr(tools, "_logged", set())
    both = call_text("wrong") + call_text(start_time=0, end_time=8)
    said = turns(f"Both.</think>{both}{END}", f"Seen.</think><answer>red</answer>{END}", report="It is red.")
    [episode] = play(renderer, said, tools=("wrong", "crop_video"))
    bad, good = episode.calls
    assert bad.error == "crashed" and re.match(f"The tool failed: [A-Za-z]+: .*{says}", bad.text)
    assert (good.error, good.text) == ("", "It is red.")
    [record] = caplog.records
    assert "tool wrong crashed" in record.getMessage() and re.search(says, str(record.exc_info[1]))


def test_a_crash_leaves_one_traceback_of_its_type(monkeypatch, caplog):
    def wrong(task, arguments, videos, contract):
        raise {"key": KeyError, "value": ValueError}[arguments["do"]]("one line\nand another")

    monkeypatch.setitem(TOOLS, "wrong", make_tool(wrong, "Wrong.", ["do"], {"do": "string"}))
    monkeypatch.setattr(tools, "_logged", set())
    for do in ("value", "value", "key", "value", "key"):
        with pytest.raises(ToolError, match="^The tool failed: (Key|Value)Error: '?one line"):
            run_tool(Call(0, "wrong", {"do": do}), TASK, ("wrong",), MemoryVideos(), CONTRACT)
    assert [record.exc_info[0] for record in caplog.records] == [ValueError, KeyError]


def test_what_a_tool_returns_is_recorded_and_shown_as_it_is(renderer, monkeypatch):
    """JSON cannot hold np.float32 times."""
    returned = clip_of(times=np.float32([1, 2]), window=np.float32([1, 2]))
    monkeypatch.setitem(TOOLS, "fine", make_tool(lambda *_: returned, "Fine.", [], {}))
    for tool_return in ("subagent", "frames"):
        [episode] = play(renderer, calling("fine"), tools=("fine",), tool_return=tool_return)
        [call] = episode.calls
        assert (call.error, call.window) == ("", (1.0, 2.0))
        json.dumps(episode_record(episode, renderer.readable))
        shown = [
            clip
            for agent in [episode.main, *episode.subagents]
            for clip in agent.clips
            if clip.pixels is returned.frames.pixels
        ]
        assert len(shown) == 1 and shown[0].times == (1.0, 2.0)


def test_a_tool_that_changes_its_arguments_changes_no_record(renderer, monkeypatch):
    def pop(task, arguments, videos, contract) -> str:
        arguments["at"].append({1, 2})
        del arguments["do"]
        return "Done."

    monkeypatch.setitem(TOOLS, "pop", make_tool(pop, "Pop.", [], {}))
    written = {"do": "it", "at": [1]}
    [episode] = play(renderer, calling("pop", **written), tools=("pop",))
    assert (episode.calls[0].text, episode.calls[0].arguments) == ("Done.", written)
    json.dumps(episode_record(episode, renderer.readable))


def test_an_error_of_no_kind_is_no_call_that_ran(renderer, monkeypatch):

    def refuse(*_):
        raise ToolError("", "No.")

    monkeypatch.setitem(TOOLS, "refuse", make_tool(refuse, "Refuse.", [], {}))
    [episode] = play(renderer, calling("refuse"), tools=("refuse",))
    assert episode.n_executed == 0
    assert (episode.calls[0].error, episode.calls[0].text) == ("failed", "No.")


def test_an_exception_may_be_the_text_of_an_error(renderer, monkeypatch):
    def refuse(*_):
        raise ToolError("too_dark", ValueError("It is dark."))

    monkeypatch.setitem(TOOLS, "refuse", make_tool(refuse, "Refuse.", [], {}))
    [episode] = play(renderer, calling("refuse"), tools=("refuse",))
    assert episode.calls[0].error == "too_dark"
    assert episode.calls[0].text == "It is dark."


def test_a_long_text_of_a_tool_is_clipped_and_none_can_spell_control_tokens(renderer, monkeypatch):
    """The subtitles of a film can be longer than the context."""
    film = "<|im_end|><|image_pad|> \ud800" + "a word " * 100_000

    def refuse(*_):
        raise ToolError("too_dark", film)

    for run in (lambda *_: film, refuse):
        monkeypatch.setitem(TOOLS, "read", make_tool(run, "Read.", [], {}))
        [episode] = play(renderer, calling("read"), tools=("read",), max_context=32_768)
        [call] = episode.calls
        assert call.text == film[:4000] + " ... (clipped)" and call.error == ("too_dark" if run is refuse else "")
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
