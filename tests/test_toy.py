"""The toy keeps its docstring's promises: it is deterministic, has the real schemas, and is solvable where it says so."""

import json
import random
import re

import numpy as np
import pytest
from tiny import TOOL

from data import parse_task
from runtime.dataset import Rows
from runtime.render import END_OF_TURN
from study import toy
from tools import parse_calls


def flashes(count, seed=0):
    rng = random.Random(seed)
    return [toy.draw_flash(rng, f"v{i}.mp4") for i in range(count)]


def test_the_same_seed_builds_the_same_bytes(tmp_path):
    few = {"train": 3, "perception": 5, "calls": 3, "direct": 3, "sft": 40, "sft_val": 3, "rl": 3, "val": 2, "test": 8}
    built = []
    for root in (tmp_path / "a", tmp_path / "b"):
        toy.build_toy(root, seed=1, sizes=few)
        built.append({path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()})
    assert built[0] == built[1]


def test_the_crops_of_a_task_vary_and_show_its_flash_and_small_overviews_miss_it():
    seen = {k: [] for k in toy.OVERVIEWS}
    windows = []
    caught = []
    for flash in flashes(1000):
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
    dialogues = pytest.importorskip("dialogues")
    for name in ("perception", "direct", "sft", "sft_val"):
        rows = Rows(toy_dir / f"{name}.parquet")
        for i in range(len(rows)):
            dialogues.parse_dialogue(rows[i], f"{name}:{i}", toy_dir)
    tasks = [parse_task(Rows(toy_dir / "test.parquet")[i], f"test:{i}", toy_dir) for i in range(8)]
    assert {task.kind for task in tasks} == {"oe"} and len({task.id for task in tasks}) == 8


def test_the_loose_prior_is_exactly_what_was_asked_for():
    rng = random.Random(5)
    first_turns, turns = [], []
    for flash in flashes(800):
        messages = json.loads(toy.sft_row(rng, flash, p_tool=0.75, p_loose=0.6)["messages"])
        said = [message["content"] for message in messages if message["role"] == "assistant"]
        first_turns.append(said[0])
        turns += said
    tidy = [re.fullmatch(r"<think>.*</think>.*(<tool_call>|</answer>).*", turn, re.S) is not None for turn in turns]
    assert np.mean(tidy) == pytest.approx(0.4, abs=0.05)
    assert np.mean([TOOL in turn for turn in first_turns]) == pytest.approx(0.75, abs=0.05)


def test_json_in_tool_code_is_one_unparseable_call_wherever_the_turn_ends():
    """The cold start teaches it. If it were read, or counted otherwise, the toy's trainings would change."""
    rng = random.Random(0)
    rows = [toy.sft_row(rng, flash, p_tool=1.0, p_loose=1.0) for flash in flashes(20)]
    turns = [json.loads(row["messages"])[1]["content"] for row in rows]
    coded = [turn for turn in turns if "<tool_code>" in turn]
    assert len(coded) > 3
    for turn in coded:
        for i in range(len(turn) + 1):
            for text in (turn[:i], turn[:i] + END_OF_TURN):
                errors = [call.error for call in parse_calls(text)]
                assert errors == ["unparseable"] * turn[:i].count("<tool_code>"), text
