"""The toy keeps its docstring's promises: it is deterministic, has the real schemas, and is solvable where it says so."""

import hashlib
import json
import random
from pathlib import Path

import numpy as np
import pytest

from data import parse_dialogue, parse_task
from runtime.calls import parse_calls
from runtime.dataset import Rows
from runtime.render import END_OF_TURN, TEMPLATE_TAGS
from study import toy


def flashes(count, seed=0):
    rng = random.Random(seed)
    return [toy.draw_flash(rng, f"v{i}.mp4") for i in range(count)]


def digest(root: Path) -> dict[str, str]:
    return {str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(root.rglob("*")) if p.is_file()}  # fmt: skip


def test_the_same_seed_builds_the_same_bytes(tmp_path):
    few = {"train": 3, "perception": 5, "calls": 3, "direct": 3, "sft": 40, "sft_val": 3, "rl": 3, "val": 2, "test": 8}
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        toy.build_toy(tmp_path / name, seed=seed, sizes=few)
    a, b, c = (digest(tmp_path / name) for name in "abc")
    assert a == b and a.keys() == c.keys() and a["sft.parquet"] != c["sft.parquet"]


def test_the_crops_of_a_task_vary_and_show_its_flash_and_small_overviews_miss_it():
    seen = {k: [] for k in toy.OVERVIEWS}
    windows = []
    caught = []
    for flash in flashes(2000):
        for cue in {"", flash.half}:
            windows.append(tuple(toy.windows(flash, cue)))
            caught.append(any(flash.visible(toy.crop_times(flash, *window)) for window in windows[-1]))
        if flash.length == toy.SHORT:
            for k in toy.OVERVIEWS:
                seen[k].append(flash.visible(toy.overview_times(flash, k)))
        else:
            assert flash.visible(toy.overview_times(flash, 4))
    assert np.mean(caught) > 0.99
    assert len(set(windows)) == 8  # 3 durations x (anywhere, first half, second half), of which one coincides
    assert 0.15 < np.mean([len(crops) == 2 for crops in windows]) < 0.6  # tasks that need two windows
    chance = {k: round(float(np.mean(v)), 2) for k, v in seen.items()}
    assert chance[4] < 0.3 and chance[8] < 0.5 and chance[64] > 0.99
    assert sorted(chance.values()) == list(chance.values())


def test_a_decoded_flash_has_its_color_and_the_rest_is_grey(toy_dir, videos):
    flash = toy.draw_flash(random.Random(0), "train00000.mp4")
    frames = videos.frames(toy_dir / "videos" / flash.name, range(flash.duration * toy.FPS), (32, 32))
    for pixels, time in zip(frames.pixels, frames.times, strict=True):
        center = pixels[12:20, 12:20].reshape(-1, 3).mean(0)
        if flash.visible([time]):
            assert np.abs(center - toy.COLORS[flash.color]).max() < 40
        else:
            assert np.ptp(center) < 25


def test_every_row_is_in_the_published_schema(toy_dir):
    for name in ("perception", "direct", "sft", "sft_val"):
        rows = Rows(toy_dir / f"{name}.parquet")
        for i in range(len(rows)):
            parse_dialogue(rows[i], f"{name}:{i}", toy_dir)
    tasks = [parse_task(Rows(toy_dir / "test.parquet")[i], f"test:{i}", toy_dir) for i in range(8)]
    assert {task.kind for task in tasks} == {"oe"} and len({task.id for task in tasks}) == 8


@pytest.mark.parametrize("p_loose, p_tool", [(0.0, 1.0), (0.6, 0.75)])
def test_the_loose_prior_is_exactly_what_was_asked_for(p_loose, p_tool):
    rng = random.Random(5)
    turns, with_tools, rows = [], 0, 800
    for flash in flashes(rows):
        said = [m["content"] for m in json.loads(toy.sft_row(rng, flash, p_tool, p_loose)["messages"]) if m["role"] == "assistant"]  # fmt: skip
        with_tools += "crop_video" in said[0]
        turns += said
    tidy = np.mean([t.startswith("<think>") and "</think>" in t and ("<tool_call>" in t or "</answer>" in t) for t in turns])  # fmt: skip
    assert abs(tidy - (1 - p_loose)) < 0.05 and abs(with_tools / rows - p_tool) < 0.05


def test_the_answer_tags_are_several_tokens_and_the_others_one(tokenizer):
    """This is as in Qwen's vocabulary, so anchors must be found by character spans."""
    for tag in TEMPLATE_TAGS:
        assert len(tokenizer.encode(tag)) == 1
    for text in ("<answer>", "</answer>"):
        assert len(tokenizer.encode(text)) == 3
    ids = tokenizer.encode("<answer>red</answer>")
    assert tokenizer.encode("red")[0] in ids and len(tokenizer.encode("red")) == 1


def test_json_in_tool_code_is_one_unparseable_call_wherever_the_turn_ends():
    """The cold start teaches it. If it were read, or counted otherwise, the toy's trainings would change."""
    rng = random.Random(0)
    rows = [toy.sft_row(rng, flash, p_tool=1.0, p_loose=1.0) for flash in flashes(60)]
    turns = [json.loads(row["messages"])[1]["content"] for row in rows]
    coded = [turn for turn in turns if "<tool_code>" in turn]
    assert len(coded) > 10
    for turn in coded:
        for i in range(len(turn) + 1):
            for text in (turn[:i], turn[:i] + END_OF_TURN):
                errors = [call.error for call in parse_calls(text)]
                assert errors == ["unparseable"] * turn[:i].count("<tool_code>"), text
