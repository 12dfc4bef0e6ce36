"""Rows become tasks and tokens: schemas, shuffling, packing, gating, and `--check-data`."""

import collections
import contextlib
import json
import os
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from scripted import Scripted
from scripts import REPO
from sft_rows import check_rows_of_a_rollout

from data import parse_task
from dialogues import Media, parse_dialogue
from episode import Task
from grpo import GRPOConfig
from rl import RLConfig, Sampler, draw_k
from rl import check_row as check_rl_row
from rollout import AgentContext, RolloutConfig, ask_subagent, overview
from runtime import config, dataset
from runtime.dataset import DataConfig, DataError, Dataset, RowError, Rows, Source, row_errors
from runtime.packing import best_fit
from runtime.policy import PolicyConfig
from runtime.script import read_all_rows, read_row
from runtime.video import Videos
from sft import Batches, SFTConfig, check_row, encode_dialogue
from tools import ClipForSubagent


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# ------------------------------------------------------------------------------------------------ gating and the overview


def test_the_drawn_k_is_the_same_in_every_process():
    """The released code seeds K with Python's `hash`, which differs per process."""
    drawn = [draw_k(f"t{i}", i, [4, 8, 16, 32, 64], 7) for i in range(12)]
    assert drawn == [64, 32, 64, 64, 8, 8, 16, 4, 32, 64, 16, 8]


def test_k_is_uniform_over_the_choices_and_drawn_anew_each_epoch():
    choices = [4, 8, 16, 32, 64]
    first, second = ([draw_k(f"task-{i}", epoch, choices) for i in range(5000)] for epoch in (0, 1))
    assert all(abs(first.count(k) - 1000) < 4 * (1000 * 0.8) ** 0.5 for k in choices)
    again = [a == b for a, b in zip(first, second)]
    assert 0.15 < np.mean(again) < 0.25


def test_the_frames_of_several_videos_share_k_and_carry_their_names(toy_dir, renderer, videos):
    paths = tuple(str(toy_dir / "videos" / f"train0000{i}.mp4") for i in range(3))
    task = Task("t", "Which?", paths, "oe", "red")
    frames = overview(task, 8, videos, renderer.contract)
    assert [len(f) for f in frames] == [3, 3, 2]
    messages = renderer.prompts.main_messages(task.question, paths, frames, renderer.contract, with_tools=False)
    text = renderer.decode(renderer.render(messages).ids)
    places = [text.index(f"train0000{i}.mp4: <0.0 seconds>") for i in range(3)]
    assert places == sorted(places)
    assert [len(f) for f in overview(task, 2, videos, renderer.contract)] == [1, 1, 1]


# ------------------------------------------------------------------------------------------------ SFT rows


@pytest.fixture
def video(toy_dir) -> str:
    return str(toy_dir / "videos" / "train00000.mp4")


def user(video, text="What?", **options):
    return {"role": "user", "content": [{"type": "video_url", "video_url": {"url": video, **options}}, {"type": "text", "text": text}]}  # fmt: skip


def parse(messages, **columns):
    with row_errors():
        return parse_dialogue({"messages": messages, **columns}, "file:0", Path("/nowhere"))


@pytest.fixture
def encode(toy_renderer, videos, schemas):
    """encode(messages, agent="sub", ...) -> the row that SFT trains on for such a row."""

    def make(messages, root=Path("/nowhere"), **columns):
        dialogue = parse_dialogue({"messages": messages, **columns}, "file:0", root)
        return encode_dialogue(dialogue, videos, toy_renderer, schemas)

    return make


SAID = {"role": "assistant", "content": "a"}
CALL = '<tool_call>\n{"name": "crop_video", "arguments": {"start_time": 0, "end_time": 4}}\n</tool_call>'


def test_messages_come_as_a_json_string_or_as_a_list(video):
    messages = [{"role": "system", "content": "old"}, user(f"file://{video}"), {"role": "assistant", "content": "Yes."}]
    dialogue = parse(messages)
    assert dialogue == parse(json.dumps(messages))
    assert dialogue.question == "What?" and dialogue.media == (Media(video),)
    assert dialogue.turns == ({"role": "assistant", "content": ["Yes."]},)  # the row's system prompt is dropped


@pytest.mark.parametrize("opening, edges", [("<think>", "  {}\r\n"), ("\n\n<think>\r\n  ", "\n{} ")])
def test_a_row_has_the_ids_of_the_same_conversation_rolled_out(video, toy_renderer, videos, schemas, opening, edges):
    """Published rows begin with `<think>Text` or `<think>\\n\\n`, so their first token differs from the one after the forced
    prefix."""
    thoughts = (f"I look.\n</think>\n{CALL}\n{CALL}", "It flashed.\n</think>\n<answer>red</answer>")
    check_rows_of_a_rollout(toy_renderer, videos, schemas, video, opening, edges.format("A red flash."), thoughts)


def test_a_turn_without_think_keeps_its_words_and_an_empty_report_says_so(video):
    empty = {"role": "user", "content": "<tool_response>\n \r\n</tool_response>"}
    called, red = ({"role": "assistant", "content": said} for said in (CALL, "\nRed. <think>?"))
    assert [turn["content"] for turn in parse([user(video), called, empty, red]).turns] == [
        [CALL],
        ["(empty report)"],
        ["Red. <think>?"],
    ]


def test_a_sub_agents_row_is_what_a_rollout_asks_in_its_tools_words(video, encode, toy_renderer, videos):
    row = [user(video, "", video_start=4, video_end=12), {"role": "assistant", "content": "No flash."}]
    engine = Scripted(toy_renderer, lambda prompt, seed: "No flash.<|im_end|>")
    context = AgentContext(engine, toy_renderer, videos, RolloutConfig())
    for words in ({}, {"request": "Which text is here?", "system": "You read text."}):
        learned = encode(row, agent="sub", **words)
        agent, said = ask_subagent(context, ClipForSubagent(learned.clips[0], (4, 12), **words), 0)
        assert said == "No flash." and agent.all_ids == learned.ids[: len(agent.all_ids)]
        text = toy_renderer.decode(agent.all_ids)
        assert all(word in text for word in words.values()) and ("What happens here?<" in text) != bool(words)
        assert len(learned.clips[0]) == 8 and all(4 <= t <= 12 for t in learned.clips[0].times)
    asked = encode([user(video, "Which?", video_start=4, video_end=12), row[1]], agent="sub")
    assert "What happens here?\nQuestion: Which?<" in toy_renderer.decode(asked.ids)


def test_a_direct_agents_row_shows_and_tells_of_no_tools(video, encode, toy_renderer):
    row = [user(video, nframes=4), {"role": "assistant", "content": "Red."}]
    for agent, tools in (("main", True), ("direct", False)):
        text = toy_renderer.decode(encode(row, agent=agent).ids)
        assert ("<tools>" in text) is ("call tools" in text) is tools


def test_images_and_text_only_rows_are_rows_too(tmp_path, encode, toy_renderer):
    path = tmp_path / "a.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (100, 200, 3), dtype=np.uint8)).save(path)
    part = {"type": "image_url", "image_url": {"url": "a.png"}}
    question = {"role": "user", "content": [part, {"type": "text", "text": "<image>What?"}]}
    learned = encode([question, {"role": "assistant", "content": "Noise."}], tmp_path)
    assert learned.ids.count(toy_renderer.image_pad) == 2 * 1
    assert "seconds>" not in toy_renderer.decode(learned.ids)
    text_only = encode([{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}])
    assert text_only.clips == [] and sum(text_only.mask) >= 2


def test_the_placeholder_of_a_video_is_part_of_no_question(video):
    for text in ("<video>\nWhich?", "<video>Which?", "Which?"):
        row = rl(video, answer="x") | {"prompt": [{"role": "user", "content": text}]}
        assert parse([user(video, text), SAID]).question == parse_task(row, "rl:0", Path("/")).question == "Which?"


ASKED = [{"role": "user", "content": "q"}, SAID]


@pytest.mark.parametrize(
    "messages, says",
    [
        ("{", "messages is not JSON"),
        (None, "TypeError: 'NoneType' object is not iterable"),
        ([user(__file__, nframes=0)], "nframes = 0: must be a whole number above 0"),
        ([SAID], "must start with the user"),
        ([*ASKED, ASKED[1]], "two of the assistant cannot follow each other"),
        ([{"role": "user", "content": "q"}, {"role": "critic", "content": "a"}], "role 'critic'"),
        ([{"role": "user", "content": [{"type": "audio"}]}, SAID], "neither text, video nor image"),
        ([user("gone.mp4"), SAID], "/nowhere/gone.mp4: no such file"),
        ([*ASKED[:1], {"role": "assistant", "content": [{"image": __file__}, "a"]}], "the assistant's turn shows a video or an image"),
        ([{"role": "system", "content": [{"image": __file__}]}, *ASKED], "the system's turn shows a video or an image"),
        ([*ASKED, {"role": "user", "content": "<tool_response>\na\n</tool_response>\nWhat else?"}, ASKED[1]], "after the last </tool_response>"),
        ([user(__file__, video_start=3, video_end=3)], "video_start = 3, video_end = 3: must be seconds"),
        ([*ASKED[:1], ASKED[1] | {"tool_calls": [{"function": {}}]}], "a message has `tool_calls`: write calls into"),
        ([{"role": "user", "content": [{"type": "video_url", "video_url": {"path": "x"}}]}], "KeyError: 'url'"),
    ],
)  # fmt: skip
def test_a_malformed_row_says_what_is_wrong(messages, says):
    with pytest.raises(RowError, match=says):
        parse(messages)


def test_columns_may_repeat_the_media_that_the_messages_show(video):
    asked = [{"role": "user", "content": [{"video": video}, "<video>Which?"]}, SAID]
    for columns in ({"videos": [f"file://{video}"]}, {"video": video}, {"images": [], "objects": {"bbox": []}}):
        assert parse(asked, **columns) == parse(asked)


IN_MESSAGES = "SFT shows only media that are parts of messages"


@pytest.mark.parametrize(
    "content, columns, says",
    [
        ("<video>q", {"videos": [__file__]}, f"`videos` names .*: {IN_MESSAGES}"),
        ("q", {"image": __file__}, f"`image` names .*: {IN_MESSAGES}"),
        ("<image>q", {"images": [{"bytes": "x", "path": __file__}]}, f"`images` names .*: {IN_MESSAGES}"),
        ([{"video": __file__}, "q"], {"videos": [__file__, f"{REPO}/data.py"]}, f"`videos` names .*data.py': {IN_MESSAGES}"),
        ("<video>q", {}, f"<video> in a text: {IN_MESSAGES}"),
        ("q", {"audios": ["a.wav"]}, r"`audios` = \['a.wav'\]: SFT shows only videos and images"),
    ],
)  # fmt: skip
def test_media_that_a_training_would_not_show_are_refused(content, columns, says):
    with pytest.raises(RowError, match=says):
        parse([{"role": "user", "content": content}, {"role": "assistant", "content": "<video><image>"}], **columns)


# ------------------------------------------------------------------------------------------------ RL rows


def rl(video, **info):
    return {"prompt": [{"role": "user", "content": "<video>\nWhich?"}], "videos": [{"video": video}], "extra_info": json.dumps(info)}  # fmt: skip


def test_an_rl_row_becomes_a_task_without_what_parquet_fills_up(video, tmp_path):
    """The rows of a parquet file share one struct, so a field that only some rows have is None in the others."""
    infos = [{"answer": "B", "question_type": "mcq", "options": ["x", "y"], "id": "one"}, {"answer": "x"}]
    pq.write_table(pa.Table.from_pylist([rl(video) | {"extra_info": info} for info in infos]), tmp_path / "rl.parquet")
    rows = Rows(tmp_path / "rl.parquet")
    assert rows[1]["extra_info"] == {"answer": "x", "question_type": None, "options": None, "id": None}
    assert parse_task(rows[0], "rl:0", tmp_path) == Task("one", "Which?\nA. x\nB. y", (video,), "mcq", "B", ("x", "y"))
    assert parse_task(rows[1], "rl:1", tmp_path) == Task("rl:1", "Which?", (video,), "oe", "x")  # the published default
    row = rl(video, answer=0) | {"videos": [{"video": video}] * 2}
    row["prompt"].insert(0, {"role": "system", "content": "Hello."})  # RL has its own system prompt
    task = parse_task(row, "rl:2", tmp_path)
    assert (task.question, task.answer) == ("Which?", "0")


@pytest.mark.parametrize(
    "info, change, says",
    [
        ({}, {"videos": []}, "`videos` names no video"),
        # The question is about all videos, and a call names a video by its base name.
        ({}, {"videos": [{"video": "gone.mp4"}, {"video": __file__}]}, "^/nowhere/gone.mp4: no such file$"),
        ({}, {"videos": [{"video": f"{REPO}/{room}/__init__.py"} for room in ("study", "evals")]}, "two videos are called __init__.py"),
        ({"answer": None}, {}, "answer = '': the answer of an open question must have a word"),
        # A gold that no answer can match.
        ({"question_type": "mcq", "answer": "A dog"}, {}, "answer = 'A dog': .* must begin with a letter"),
        ({"question_type": "tvg", "answer": "[5, 5]"}, {}, "must be a span"),
        ({"options": "red, blue"}, {}, "options = 'red, blue': must be a list of at most 10 texts"),
        ({"question_type": "mcq", "answer": "D", "options": ["red", "blue"]}, {}, "answer = 'D': the answer of an mcq must begin with a letter of AB, as"),
        ({"answer": ["red", "crimson"]}, {}, r"answer = \['red', 'crimson'\]: must be one text"),
        ({}, {"videos": [{"video": __file__, "video_start": 4.0}]}, "RL shows whole videos"),
    ],
)  # fmt: skip
def test_an_rl_row_that_cannot_be_learned_from_is_refused(video, info, change, says):
    with pytest.raises(RowError, match=says), row_errors():
        parse_task(rl(video, **{"answer": "x"} | info) | change, "rl:0", Path("/nowhere"))


def test_options_are_read_from_the_question_where_the_row_has_none(video):
    """Published RL rows have no `options`."""
    listed = "Which?\nA. Vitamin B\nB. Vitamin C\nC. U.S. Team A"
    odd = "A. What\nB. an odd question"
    for question, gold, options in (
        (listed, "B", ("Vitamin B", "Vitamin C", "U.S. Team A")),
        (odd, "B", ("What", "an odd question")),
        (odd, "D", ()),  # a list that lacks the gold letter is not the list of options
    ):
        row = rl(video, answer=gold, question_type="mcq") | {"prompt": [{"role": "user", "content": question}]}
        task = parse_task(row, "rl:0", Path("/"))
        assert task.options == options


@pytest.mark.parametrize(
    "options, gold, letter",
    [
        (["red", " blue "], "blue", "B"),
        (["red", "blue"], "B. blue", "B"),
        (["A", "B", "AB", "O"], "O", "D"),
        (["b", "a"], "a", "A"),  # a letter alone is a letter
        (["C. elegans", "x", "y"], "C. elegans", "A"),
    ],
)
def test_a_gold_may_be_an_options_text_and_options_make_a_question_multiple_choice(video, options, gold, letter):
    task = parse_task(rl(video, answer=gold, options=options), "rl:0", Path("/"))
    assert (task.kind, task.answer) == ("mcq", letter)
    listed = "Which?" + "".join(f"\n{x}) {option}" for x, option in zip("ABCD", options))
    row = rl(video, answer=gold, question_type="mcq") | {"prompt": [{"role": "user", "content": listed}]}
    assert parse_task(row, "rl:0", Path("/")).answer == letter
    assert parse_task(rl(video, answer=gold * 2, options=options, question_type="oe"), "rl:0", Path("/")).kind == "oe"


def test_a_gold_may_be_written_in_many_ways(video):
    for gold, letter in {"(b)": "B", "J.": "J", "B. A dog": "B"}.items():
        assert parse_task(rl(video, answer=gold, question_type="mcq"), "rl:0", Path("/")).answer == letter
    for gold in ([3, 7.5], "00:03 to 00:07"):
        assert parse_task(rl(video, answer=gold, question_type="tvg"), "rl:0", Path("/")).answer == str(gold)


@pytest.mark.parametrize(
    "asked, options, shown",
    [
        ("Which?", ["red", "blue"], "Which?\nA. red\nB. blue"),
        ("Which?", ["(A) red", "(B) blue"], "Which?\nA. red\nB. blue"),
        ("Which?\nA. red", ["red", "blue"], "Which?\nA. red\nA. red\nB. blue"),  # one line is no list
        ("Which? (A) red (B) blue", ["red", "blue"], "Which? (A) red (B) blue"),
        ("Which?\nA) red;\nB) a\nC) blue", ["red ", "a"], "Which?\nA) red;\nB) a\nC) blue"),
        ("Which?\nA. red\ncar\nB. bus", ["red\ncar", "bus"], "Which?\nA. red\ncar\nB. bus"),
        ("Which?\nA. Red.\nB. Blue.", ["red", "blue"], "Which?\nA. Red.\nB. Blue."),
    ],
)
def test_the_model_sees_every_option_once(video, asked, options, shown):
    row = rl(video, answer="B", options=options) | {"prompt": [{"role": "user", "content": asked}]}
    assert parse_task(row, "rl:0", Path("/")).question == shown


def test_a_question_type_may_be_spelled_in_many_ways_and_an_unknown_one_is_reported_once(video, caplog):
    """The release treats unknown types as open-ended. Its rows have no `options`."""
    for name, kind, gold in (("Multiple-choice", "mcq", "B"), ("temporal grounding", "tvg", "[3, 7]")):
        assert parse_task(rl(video, answer=gold, question_type=name), "rl:0", Path("/")).kind == kind
    for _ in range(2):
        assert parse_task(rl(video, answer="B", question_type="essay"), "rl:0", Path("/")).kind == "oe"
        assert parse_task(rl(video, answer="B", question_type="essay", options=["x", "y"]), "", Path("/")).kind == "mcq"
    [said] = caplog.messages
    assert "question_type = 'essay'" in said and "as mcq if the row has options, otherwise as open-ended" in said


# ------------------------------------------------------------------------------------------------ what would be ignored


def says(**message) -> list[dict]:
    """Return an SFT row's messages, of which the assistant's has these fields."""
    return [{"role": "user", "content": "q"}, SAID | message]


def asks(*parts) -> list[dict]:
    return [{"role": "user", "content": parts[0] if len(parts) == 1 else list(parts)}, SAID]


def turns(*contents) -> list[dict]:
    """Return an RL row's messages: the user's and the assistant's in turn."""
    return [{"role": role, "content": content} for role, content in zip(["user", "assistant"] * 2, contents)]


FILM = {"type": "video", "video": __file__}
LISTED = turns("<video>Which?\nA. red\nB. blue")
MCQ = {"answer": "B", "options": ["red", "blue"]}
TVG = {"question_type": "tvg"}


# A row, as columns of an SFT row or as (columns, extra_info) of an RL row, and what its refusal says. "": it is accepted.
@pytest.mark.parametrize(
    "row, refusal",
    [
        # RL: media and turns that nobody would see.
        (({"images": ["a.png"]}, {}), r"`images` = \['a.png'\]: RL shows only videos; remove the column"),
        (({"audios": ["a.wav"]}, {}), "`audios` = "),
        (({"objects": {"ref": [], "bbox": [[1, 2, 3, 4]]}}, {}), "`objects` = "),
        (({"images": [], "audios": None, "objects": {"ref": [], "bbox": []}}, {}), ""),
        (({"images": "[]", "audios": [{"bytes": None, "path": None}], "objects": [None]}, {}), ""),
        (({"prompt": turns("<image>Which?")}, {}), "<image>: RL shows only videos"),
        (({"prompt": turns("<video><video>Which?")}, {}), "2 <video> in the question, but `videos` names 1"),
        (({"prompt": turns("Which?")}, {}), ""),
        (({"prompt": turns("Hi.", "Hello.", "Which?")}, {}), r"`prompt` has the turns \['user', 'assistant', 'user'\]: RL asks one"),
        (({"prompt": [*turns("Hi."), *turns("Which?")]}, {}), r"`prompt` has the turns \['user', 'user'\]"),
        (({"prompt": turns("Which?", "<think>")}, {}), r"`prompt` has the turns \['user', 'assistant'\]"),
        (({"prompt": [{"role": "system", "content": "old"}, *turns("Which?")]}, {}), ""),
        (({"prompt": turns("<video>\n ")}, {}), "`prompt` has no user message with text"),
        # RL: options under other letters, and golds that are none, or several.
        (({"prompt": LISTED}, MCQ), ""),
        (({"prompt": LISTED}, {"answer": "blue", "options": ["blue", "red"]}), r"options = \['blue', 'red'\]: .* another order"),
        (({"prompt": LISTED}, {"answer": "B", "options": ["(A) blue", "(B) red"]}), "options = .* another order"),
        (({"prompt": LISTED}, {"answer": "A", "options": ["blue"]}), "options = .* another order"),
        (({"prompt": turns("Which?\nA. Blue.\nB. Red.")}, MCQ | {"options": ["red", "blue"]}), "options = .* another order"),
        (({"prompt": LISTED}, {"answer": "x", "options": ["blue", "red"], "question_type": "oe"}), ""),
        (({}, {"answer": "green", "question_type": "essay", "options": ["red", "blue"]}), "the answer of an mcq"),
        (({}, {"answer": float("nan")}), "answer = nan"),
        (({}, {"answer": float("nan")} | TVG), "answer = nan"),
        (({}, {"answer": "nan"} | TVG), "answer = 'nan': .* must be a span"),
        (({}, {"answer": [12.5, float("nan")]} | TVG), "must be a span"),
        (({}, {"answer": [[1, 2], [5, 6]]} | TVG), r"answer = '\[\[1, 2\], \[5, 6\]\]': .* must be one span"),
        (({}, {"answer": "1.5 - 2.5, 00:05 to 00:06"} | TVG), "must be one span"),
        (({}, {"answer": [[1, 2]]} | TVG), ""),
        (({}, {"answer": "12.5 - 20.1, of 60 s"} | TVG), ""),
        # SFT: what a message says beside its text.
        ({"messages": says(reasoning_content="I look.")}, "`reasoning_content`: write it into its content"),
        ({"messages": says(loss=False)}, "`loss` = False: SFT trains on every turn"),
        ({"messages": says(weight=0)}, "`weight` = 0: SFT trains on every turn"),
        ({"messages": says(weight=1, loss=True)}, ""),
        ({"messages": says(weight=None, loss=None, reasoning_content=None, tool_calls=None)}, ""),
        ({"messages": [asks("q")[0] | {"loss": False}, SAID]}, ""),  # no user's turn is trained on
        ({"messages": says(content=" \n")}, "a turn of the assistant is empty"),
        ({"messages": says(content=None)}, "a turn of the assistant is empty"),
        ({"messages": asks({"type": "text", "text": "q", "video": __file__}, "q")}, "a part has `text` and `video`: make two parts"),
        ({"messages": asks(FILM | {"text": "q"}, "q")}, "a part has `text` and `video`"),
        ({"messages": asks(FILM | {"text": None}, {"type": "text", "text": "q", "video": None, "video_url": {"url": None}})}, ""),
        ({"messages": asks({"text": "q"})}, "`content` = .'text': 'q'.: must be a text or a list"),
        ({"messages": asks(7)}, "`content` = 7: must be a text or a list"),
    ],
)  # fmt: skip
def test_what_a_row_says_and_training_would_ignore_is_refused_by_name(video, row, refusal):
    def read():
        with row_errors():
            if isinstance(row, dict):
                return parse_dialogue(row, "sft:0", Path("/"))
            columns, info = row
            return parse_task(rl(video, **{"answer": "x"} | info) | columns, "rl:0", Path("/"))

    if refusal:
        with pytest.raises(RowError, match=refusal):
            read()
    else:
        read()


# ------------------------------------------------------------------------------------------------ hostile rows


HALF = "\ud800"  # one half of an emoji's surrogate pair


@pytest.fixture(scope="module")
def trap(tmp_path_factory, toy_dir) -> Path:
    """A folder with a good video, an image that is cut off, and a pipe without a writer."""
    folder = tmp_path_factory.mktemp("trap")
    (folder / "good.mp4").symlink_to(toy_dir / "videos" / "train00000.mp4")
    Image.new("RGB", (9, 9)).save(folder / "half.png")
    os.truncate(folder / "half.png", 45)
    os.mkfifo(folder / "fifo")
    return folder


def shows(name: str, **options) -> dict:
    return {"role": "user", "content": [{"image" if name.endswith(".png") else "video": name, **options}]}


def test_a_row_that_nobody_foresaw_costs_itself_and_is_named_with_what_it_raised(
    trap, toy_renderer, videos, caplog, monkeypatch
):
    """Training rejects the rows that `--check-data` names, and gives the same reasons."""
    monkeypatch.setattr(dataset, "_logged", set())
    whys = {
        "RecursionError": "[" * 100_000,
        "OverflowError": [shows("good.mp4", video_start=-1e308, video_end=1e308), SAID],
        "OverflowError: ": [shows("good.mp4", video_start=-(10**400), video_end=10**400), SAID],
        "half.png: cannot be decoded": [shows("half.png"), SAID],
        "fifo: is not a regular file": [shows("good.mp4"), SAID, shows("fifo"), SAID],
        r"\ud800.png: no such file": [shows(f"{HALF}.png"), SAID],
        "good.mp4: cannot be decoded (Unidentified": [{"role": "user", "content": [{"image": "good.mp4"}]}, SAID],
    }
    rows = [{"messages": messages} for messages in (*whys.values(), [shows("good.mp4"), SAID])]
    path = write_jsonl(trap / "sft.jsonl", rows)
    data = DataConfig((Source(path),), max_bad_fraction=1.0)
    cfg = SFTConfig(run="run", policy=PolicyConfig(""), data=data, pack_tokens=2000)
    batches = Batches(data, cfg, videos, toy_renderer)
    assert sum(len(micro.bundles) for micro in batches.make(0, len(rows))) == 1
    check = partial(check_row, root=trap, cfg=cfg, renderer=toy_renderer, videos=videos)
    for i, why in enumerate(whys):
        _, reason, _ = read_row(i, Rows(path), check)
        assert why in reason
        assert batches.dataset.bad[f"sft.jsonl:{i}"] == reason
    traces = [record.exc_info[0] for record in caplog.records if record.exc_info]
    assert traces == [OverflowError]  # the first of its type; errors from a file's worker are not ours


RL_ROW = {"prompt": [{"role": "user", "content": "q"}], "videos": ["good.mp4"], "extra_info": {"answer": "B", "question_type": "mcq"}}  # fmt: skip


def test_a_bad_rl_row_is_left_out_and_a_video_that_cannot_be_shown_fails_its_episodes(trap, toy_renderer):
    half = {"answer": "x", "id": HALF}
    bad = [RL_ROW | change for change in ({"prompt": "[" * 100_000}, {"extra_info": half}, {"videos": [HALF]})]
    (trap / "zeros.mp4").write_bytes(bytes(2000))
    shown = [RL_ROW | {"videos": [name]} for name in ("zeros.mp4", "fifo", "good.mp4")]
    data = DataConfig((Source(write_jsonl(trap / "rl.jsonl", [*bad, *shown])),), max_bad_fraction=1.0)
    cfg = RLConfig(run="run", policy=PolicyConfig(""), data=data, batch_tasks=6, grpo=GRPOConfig(group_size=2), gating=(2,))  # fmt: skip
    engine = Scripted(toy_renderer, lambda prompt, seed: "B<|im_end|>")
    with Videos(1) as videos, contextlib.closing(Sampler(cfg, engine, toy_renderer, videos)) as sampler:
        sampler.start(0)
        groups, _ = sampler.get(0)
        failed = {Path(g.task.videos[0]).name for g in groups if g.episodes[0].error.startswith("VideoError: ")}
        assert len(groups) == 3 and failed == {"zeros.mp4", "fifo"}
        for i, why in enumerate(["RecursionError", "UnicodeEncodeError", "no such file"]):
            assert why in sampler.dataset.bad[f"rl.jsonl:{i}"]
        tokens, oddities = check_rl_row(RL_ROW, "rl.jsonl:5", trap, cfg, toy_renderer, videos)
        assert tokens > 0 and not oddities


# ------------------------------------------------------------------------------------------------ batches


class Row(NamedTuple):
    """The item that `number` parses from a row."""

    id: str
    n: int


def number(row, origin, root):
    if row.get("bad"):
        raise RowError("marked as bad")
    return Row(row.get("id", origin), row["n"])


def numbers(dataset: Dataset, *steps: int, size: int, **share) -> list[int]:
    return [draw.item.n for step in steps for draw in dataset.batch(step, size, **share)]


@pytest.fixture
def mixture(tmp_path):
    a = write_jsonl(tmp_path / "a.jsonl", [{"n": i} for i in range(30)])
    b = str(tmp_path / "b.parquet")
    pq.write_table(pa.Table.from_pylist([{"n": 100 + i} for i in range(20)]), b)
    return DataConfig(sources=(Source(a, weight=2.0), Source(b, weight=0.5)), seed=3)


def test_an_epoch_holds_each_row_as_often_as_its_weight_says(mixture):
    dataset = Dataset(mixture, number)
    assert len(dataset) == 70
    epochs = [collections.Counter(), collections.Counter()]
    for draw in dataset.batch(0, 140):
        epochs[draw.epoch][draw.item.n] += 1
    for counts in epochs:
        assert all(counts[i] == 2 for i in range(30))
        assert sum(counts[100 + i] for i in range(20)) == 10 and max(counts[100 + i] for i in range(20)) == 1
    halves = [{n for n in counts if n >= 100} for counts in epochs]
    assert halves[0] != halves[1]  # another random half in every epoch


def test_a_batch_depends_on_the_step_and_not_on_the_ranks_or_the_past(mixture):
    steps = [numbers(Dataset(mixture, number), step, size=12) for step in range(14)]
    resumed = Dataset(mixture, number)
    for step in (9, 2, 13):
        assert numbers(resumed, step, size=12) == steps[step]
        for world in (2, 3, 5):
            shares = [numbers(resumed, step, size=12, rank=rank, world=world) for rank in range(world)]
            assert [shares[i % world][i // world] for i in range(12)] == steps[step]
    assert steps[0] != numbers(Dataset(DataConfig(mixture.sources, seed=4), number), 0, size=12)


def test_the_copies_of_a_row_in_a_batch_are_counted_over_all_ranks(mixture):
    """Past bug: a row that stood twice in a batch was sampled twice with the same seeds."""
    copies = collections.defaultdict(list)
    for rank in range(3):
        for draw in Dataset(mixture, number).batch(0, 70, rank, 3):
            copies[draw.item.n].append(draw.copy)
    assert all(sorted(copies[i]) == [0, 1] for i in range(30))
    assert [counts for n, counts in copies.items() if n >= 100] == [[0]] * 10


def test_the_first_sources_are_read_once_before_the_mixture(mixture, tmp_path):
    """This is a curriculum. It delays the mixture and changes nothing else."""
    opening = Source(write_jsonl(tmp_path / "c.jsonl", [{"n": 200 + i} for i in range(10)]), first=True)
    read = numbers(Dataset(DataConfig((*mixture.sources, opening), seed=3), number), *range(10), size=8)
    assert sorted(read[:10]) == list(range(200, 210)) and max(read[10:]) < 200
    assert read[10:] == numbers(Dataset(mixture, number), 0, size=70)
    with pytest.raises(ValueError, match="apart from those read `first`"):
        Dataset(DataConfig((opening,)), number)


@pytest.mark.parametrize("first", [True, False])
def test_a_source_that_gives_no_row_is_refused(mixture, tmp_path, first):
    few = Source(write_jsonl(tmp_path / "c.jsonl", [{"n": i} for i in range(20)]), weight=0.02, first=first)
    with pytest.raises(DataError, match="c.jsonl: weight = 0.02 times 20 rows rounds to 0 rows"):
        Dataset(DataConfig((*mixture.sources, few)), number)
    assert numbers(Dataset(DataConfig((replace(few, weight=0.03), mixture.sources[0])), number), 0, size=1)


def test_a_bad_row_is_named_once_and_skipped_and_too_many_stop_the_run(tmp_path, capsys):
    path = write_jsonl(tmp_path / "a.jsonl", [{"n": i, "bad": i in (3, 7)} for i in range(50)])
    seen = numbers(Dataset(DataConfig((Source(path),), max_bad_fraction=0.04), number), *range(30), size=5)
    assert collections.Counter(seen) == {i: 3 for i in range(50) if i not in (3, 7)}
    assert capsys.readouterr().err.count("marked as bad") == 2
    with pytest.raises(RowError, match="2 of 50 rows are unusable, more than max_bad_fraction = 0.02"):
        Dataset(DataConfig((Source(path),), max_bad_fraction=0.02), number).batch(0, 50)
    dataset = Dataset(DataConfig((Source(path),), max_bad_fraction=0.1), number)
    assert 1 in numbers(dataset, 0, size=50)
    dataset.reject("a.jsonl:1", "too long")  # SFT rejects a row after reading it
    assert sorted(numbers(dataset, 1, size=50)) == [0, 2, *range(4, 7), *range(8, 50)]
    with pytest.raises(RowError, match="the line is not JSON"):
        Path(path).write_text("{\n")
        Dataset(DataConfig((Source(path),), max_bad_fraction=0.0), number).batch(0, 1)


def test_a_rank_holds_its_bad_rows_against_the_rows_that_it_has_met(tmp_path):
    datasets = []
    for n in (400, 20):
        path = write_jsonl(tmp_path / f"{n}.jsonl", [{"n": i, "bad": i % n == 0} for i in range(4000)])
        datasets.append(Dataset(DataConfig((Source(path),), max_bad_fraction=0.01), number))
    good, bad = datasets
    numbers(good, *range(100), size=400, rank=7, world=8)  # ten epochs
    assert 5 <= len(good.bad) <= 10
    with pytest.raises(RowError, match="6 of 500 rows are unusable"):
        numbers(bad, *range(10), size=400, rank=7, world=8)


def test_a_bad_row_costs_no_row_of_another_file_of_the_same_name(tmp_path):
    paths = []
    for name in "xy":
        (tmp_path / name).mkdir()
        rows = [{"n": f"{name}{i}", "bad": (name, i) == ("x", 3)} for i in range(5)]
        paths.append(write_jsonl(tmp_path / name / "train.jsonl", rows))
    dataset = Dataset(DataConfig(tuple(map(Source, paths)), max_bad_fraction=0.5), number)
    seen = collections.Counter(numbers(dataset, *range(3), size=10))
    assert seen["x3"] == 0 and seen["y3"] == 3


def test_a_row_has_the_same_name_wherever_its_file_is(tmp_path):
    """K and all seeds derive from task names."""
    for folder in (tmp_path, tmp_path / "moved"):
        folder.mkdir(exist_ok=True)
        source = Source(write_jsonl(folder / "a.jsonl", [{"n": i} for i in range(3)]))
        names = sorted(draw.item.id for draw in Dataset(DataConfig((source,)), number).batch(0, 3))
        assert names == ["a.jsonl:0", "a.jsonl:1", "a.jsonl:2"]


def test_packing_puts_the_longest_first_where_the_least_room_stays():
    """60 opens a bin, 50 opens another, 40 just fits beside 60, and 30 and 20 beside 50. Longer items get their own bin."""
    assert best_fit([20, 30, 40, 50, 60], 100) == [[4, 2], [3, 1, 0]]
    assert best_fit([5, 101, 60, 35, 250], 100) == [[4], [1], [2, 3, 0]]


# ------------------------------------------------------------------------------------------------ --check-data


def test_check_data_counts_every_row_and_names_the_bad_ones(toy_dir, tmp_path, capsys):
    """A row is bad if the encoder refuses it, or if it is longer than `pack_tokens`."""
    overrides = [f"policy.checkpoint={toy_dir}/model", f"run={tmp_path}/run", "decoders=1", "pack_tokens=2000"]
    cfg = config.load(SFTConfig, REPO / "configs" / "toy_sft.yaml", overrides)
    rows = [{"messages": [shows(name, nframes=2), SAID]} for name in ("good.mp4", "gone.mp4", "good.mp4")]
    good = DataConfig((Source(write_jsonl(tmp_path / "good.jsonl", rows[:1])),))
    rows[2]["messages"][0]["content"].append({"type": "text", "text": "why " * 3000})
    mine = DataConfig((Source(write_jsonl(tmp_path / "mine.jsonl", rows)),))
    (tmp_path / "good.mp4").symlink_to(toy_dir / "videos" / "train00000.mp4")
    assert read_all_rows(replace(cfg, data=mine, val=good), check_row) == 1
    told = capsys.readouterr().out
    assert re.search(r"mine.jsonl: 3 rows, 2 unusable; (\d+) tokens, at most \1\n", told)
    assert re.search(r"  row 1: .*gone.mp4: no such file.*\n  row 2: \d+ tokens, more than pack_tokens = 2000\n", told)
    assert re.search(r"good.jsonl: 1 rows, 0 unusable; \d+ tokens", told)
    assert read_all_rows(replace(cfg, data=good, val=None), check_row) == 0


def test_check_data_counts_what_is_odd_about_usable_rows(toy_dir, tmp_path, capsys):
    """It is often a mistake, but the toy builds it in on purpose."""
    overrides = [f"policy.checkpoint={toy_dir}/model", f"run={tmp_path}/run", "decoders=1"]
    cfg = config.load(SFTConfig, REPO / "configs" / "toy_sft.yaml", overrides)
    asked = {"role": "user", "content": "q"}
    called, unread = ({"role": "assistant", "content": text} for text in (CALL * 2, "<tool_call>{</tool_call>"))
    reply = {"role": "tool", "content": "r"}
    told = []
    odd = [[asked, called, reply, SAID], [asked, unread], [asked, unread, reply, SAID]]
    for rows in (odd, [[shows("train00000.mp4"), called, reply, reply, SAID]]):
        path = write_jsonl(tmp_path / "odd.jsonl", [{"messages": messages} for messages in rows])
        data = DataConfig((Source(path),), video_root=f"{toy_dir}/videos")
        assert read_all_rows(replace(cfg, data=data, val=None), check_row) == 0
        told.append(capsys.readouterr().out.splitlines()[1:])
    counts = [
        "2 rows with fewer replies than calls",
        "3 rows with no frame",
        "2 rows with a call that cannot be parsed",
    ]
    assert told == [[f"  note    {count}" for count in counts], []]
