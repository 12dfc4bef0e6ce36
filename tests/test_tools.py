"""Calls as models really write them, and tools that survive them."""

import gc
import json
import math
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_checkpoint import CONTRACT, MemoryVideos

from data import Task
from tools import TOOLS, Look, ToolError, parse_calls, read_time, use

TASK = Task("t", "What happens?", ("/data/first.mp4", "/data/second.mp4"), "oe", "")


def call_text(**arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'crop_video', 'arguments': arguments})}\n</tool_call>"


def crop(videos=None, **arguments) -> Look:
    [call] = parse_calls(call_text(**arguments))
    return use(call, TASK, ("crop_video",), videos or MemoryVideos(), CONTRACT)


# ---- the parser


def test_each_call_parses_or_fails_alone():
    good = call_text(start_time=1, end_time=2)
    text = (
        good
        + "<tool_call>{oops</tool_call>"
        + good
        + "<tool_call>[1]</tool_call>"
        + '<tool_call>{"name": 3}</tool_call>'
    )
    errors = [call.error for call in parse_calls(text, turn=2)]
    assert errors == ["", "unparseable", "", "unparseable", "unparseable"]
    assert all(call.turn == 2 and (not call.error or "could not be read" in call.text) for call in parse_calls(text, 2))


def test_a_call_inside_another_ends_the_outer_one_only():
    inner = call_text(start_time=1, end_time=2)
    calls = parse_calls("<tool_call>\n" + inner + "\n</tool_call>")
    assert [call.error for call in calls] == ["unparseable", ""]


def test_an_unclosed_call_is_seen():
    assert [call.error for call in parse_calls("<think>so</think><tool_call>{")] == ["unparseable"]
    assert parse_calls("no call </tool_call> here") == []


def test_the_pretrained_habit_is_read_as_literals_and_never_run():
    text = "<tool_code>\ncrop_video(video_path='a.mp4', start_time=-1.5, end_time=20)\ncrop_video(1, 2)\n</tool_code>"
    first, second = parse_calls(text)
    assert (first.name, first.arguments) == ("crop_video", {"video_path": "a.mp4", "start_time": -1.5, "end_time": 20})
    assert second.error == "unparseable"  # positions mean nothing without the schema
    for evil in ("crop_video(start_time=__import__('os').getpid())", "crop_video(**{})", "a.b(x=1)", "x = 1", ""):
        assert [call.error for call in parse_calls(f"<tool_code>{evil}</tool_code>")] == ["unparseable"], evil


def test_arguments_may_come_as_a_string_of_json():
    text = json.dumps({"name": "crop_video", "arguments": json.dumps({"start_time": 1, "end_time": 2})})
    assert parse_calls(f"<tool_call>{text}</tool_call>")[0].arguments == {"start_time": 1, "end_time": 2}


def test_of_a_key_given_twice_the_last_counts():
    text = (
        '<tool_call>{"name": "crop_video", "arguments": {"start_time": 1, "start_time": 5, "end_time": 9}}</tool_call>'
    )
    assert parse_calls(text)[0].arguments == {"start_time": 5, "end_time": 9}


@pytest.mark.parametrize(
    "flood",
    [
        call_text(start_time=1, end_time=2),
        "<tool_call>",
        "<tool_call></tool_call>",
        "<tool_code>f(",
        "<tool_code>" + "(" * 50 + "</tool_code>",
        "<tool_call>" + "[" * 500,
    ],
    ids=["good", "unclosed", "empty", "code", "nested code", "nested json"],
)
def test_ten_thousand_calls_take_linear_time(flood):
    def seconds(n: int) -> float:
        text = flood * n
        started = time.process_time()  # of this process alone: the machine may be busy
        assert len(parse_calls(text)) == n
        return time.process_time() - started

    seconds(100)
    assert seconds(10_000) < max(40 * seconds(1000), 0.5)  # linear is 10 times; quadratic would be 100


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                "<tool_call>",
                "</tool_call>",
                "<tool_code>",
                "</tool_code>",
                '{"name": "crop_video", "arguments": {',
                "}}",
            ]
            + [
                "crop_video(",
                "start_time=1",
                ", ",
                ")",
                '"start_time": ',
                "NaN",
                "1e999",
                "9" * 5000,
                "[" * 3000,
                '"\\ud800"',
            ]
        )
        | st.text(max_size=8),
        max_size=30,
    )
)
def test_nothing_that_a_model_writes_breaks_a_turn(pieces):
    """Parsing returns, every call is either readable or an error, and running one yields a Look or a ToolError."""
    for call in parse_calls("".join(pieces)):
        json.dumps(call.arguments)  # what is recorded must be recordable
        if not call.error:
            try:
                assert isinstance(use(call, TASK, ("crop_video",), MemoryVideos(), CONTRACT), Look)
            except ToolError as error:
                str(error).encode()  # read by a tokenizer, so it must be Unicode


# ---- arguments


@pytest.mark.parametrize(
    ("written", "seconds"),
    [(12, 12), (12.5, 12.5), ("12.5", 12.5), ("12.5s", 12.5), ("12 seconds", 12), ("2:05", 125), ("01:02:03", 3723)]
    + [(" 00:07.5 ", 7.5), ("-3", -3), ("1e1", 10)],
)
def test_times_are_read_as_people_write_them(written, seconds):
    assert read_time({"t": written}, "t") == seconds


@pytest.mark.parametrize(
    "written",
    [
        None,
        True,
        False,
        math.nan,
        math.inf,
        -math.inf,
        "nan",
        "inf",
        "soon",
        "",
        [],
        {},
        10**400,
        "9" * 400,
        "1:2:3:4",
        "\ud800",
    ],
    ids=ascii,
)
def test_what_is_no_time_is_a_text_for_the_model(written):
    with pytest.raises(ToolError, match="start_time must be a number") as caught:
        read_time({"start_time": written}, "start_time")
    assert caught.value.kind == "bad_arguments" and len(str(caught.value)) < 120


def test_windows_are_clamped_to_the_video():
    assert crop(start_time=-10, end_time=5).window == (0, 5)
    assert crop(start_time=50, end_time=1e308).window == (50, 60)


@pytest.mark.parametrize(("start", "end"), [(10, 10), (20, 10), (60, 70), (1e9, 1e10), (-9, -1)])
def test_an_impossible_window_names_the_valid_range(start, end):
    with pytest.raises(ToolError, match="from 0 to 60.0 seconds"):
        crop(start_time=start, end_time=end)


@settings(max_examples=200, deadline=None)
@given(st.floats(-100, 200), st.floats(-100, 200), st.none() | st.integers(-5, 1000))
def test_every_window_that_runs_lies_in_the_video_and_holds_what_it_says(start, end, count):
    videos = MemoryVideos(duration=37.3)
    arguments = {"start_time": start, "end_time": end} | ({} if count is None else {"num_frames": count})
    try:
        look = crop(videos, **arguments)
    except ToolError:
        assert start >= end or start >= 37.3 or end <= 0
        return
    low, high = look.window
    assert 0 <= low < high <= 37.3
    assert 1 <= len(look.frames) <= CONTRACT.crop_max_frames
    if high - low > 0.5:
        assert all(low <= t <= high for t in look.frames.times)


def test_the_models_path_only_picks_among_the_tasks_own_videos():
    videos = MemoryVideos()
    for path in (
        "/etc/passwd",
        "second.mp4",
        "/tmp/second.mp4",
        "../second.mp4",
        7,
        None,
        ["second.mp4"],
        "first.mp4\0",
    ):
        crop(videos, video_path=path, start_time=0, end_time=5)
    assert set(videos.opened) == set(TASK.videos)
    videos.opened.clear()
    crop(videos, video_path="elsewhere/second.mp4", start_time=0, end_time=5)
    crop(videos, video_path="/etc/passwd", start_time=0, end_time=5)
    assert set(videos.opened[:1]) == {"/data/second.mp4"} and videos.opened[-1] == "/data/first.mp4"


def test_a_video_that_cannot_be_read_is_a_text_without_its_path():
    call = parse_calls(call_text(start_time=0, end_time=5))[0]
    task = Task("t", "?", ("/secret/bad.mp4",), "oe", "")
    with pytest.raises(ToolError) as caught:
        use(call, task, ("crop_video",), MemoryVideos(), CONTRACT)
    assert caught.value.kind == "failed" and "secret" not in str(caught.value)


def test_an_unknown_tool_is_told_which_there_are():
    call = parse_calls('<tool_call>{"name": "rm\\ud800", "arguments": {}}</tool_call>')[0]
    with pytest.raises(ToolError, match="there is crop_video, look_up") as caught:
        use(call, TASK, ("crop_video", "look_up"), MemoryVideos(), CONTRACT)
    assert caught.value.kind == "unknown_tool" and str(caught.value).encode()


# ---- schemas and threads


def test_schemas_are_short_and_name_what_the_functions_need():
    for name, tool in TOOLS.items():
        function = tool.schema["function"]
        assert function["name"] == name and len(json.dumps(tool.schema)) < 450
        assert set(function["parameters"]["required"]) <= set(function["parameters"]["properties"])
    assert TOOLS["crop_video"].schema["function"]["parameters"]["required"] == ["start_time", "end_time"]


def test_many_threads_may_read_code_calls_at_once():
    """Episodes run in threads, and CPython 3.11's parser raised `SystemError: AST constructor recursion depth mismatch`
    where the garbage collector let a second thread in while one was reading a <tool_code>."""
    text = "<tool_code>crop_video(start_time=1, end_time=9)</tool_code>" * 20
    threshold = gc.get_threshold()
    gc.callbacks.append(yield_to_others)
    gc.set_threshold(20)
    try:
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(parse_calls, [text] * 40))
    finally:
        gc.callbacks.remove(yield_to_others)
        gc.set_threshold(*threshold)
    assert all(len(calls) == 20 and not any(call.error for call in calls) for calls in found)


def yield_to_others(*_) -> None:
    time.sleep(0)
