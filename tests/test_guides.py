"""Follow the guides of docs/ literally: apply their diffs to a copy of the repository, write their configs, run their
commands, and check what they promise.

The functions without `test_` run and assert in the copy (a `Fork`), and import its modules."""

import json
import math
import os
import re
import shlex
import shutil
import subprocess
from functools import partial
from pathlib import Path

import pytest
from scripts import REPO, Forked, finish

pytestmark = pytest.mark.skipif(not shutil.which("patch"), reason="the guides' diffs are applied with `patch`")


class Fork:
    """A copy of the repository with the toy's data, and the guide whose changes it gets."""

    def __init__(self, root: Path, toy: Path, guide: str):
        self.root = root
        for path in REPO.glob("*.py"):
            shutil.copy(path, root)
        for room in ("runtime", "evals", "study", "configs"):
            shutil.copytree(REPO / room, root / room)
        (root / "tests").mkdir()
        for name in ("conftest", "scripts", "tiny_checkpoint"):
            shutil.copy(REPO / "tests" / f"{name}.py", root / "tests")
        (root / "toy_data").mkdir()
        for path in toy.iterdir():  # files that a guide adds there stay in the copy
            (root / "toy_data" / path.name).symlink_to(path)
        blocks = re.findall(r"^```(\w+)\n(.*?)^```$", (REPO / "docs" / guide).read_text("utf-8"), re.M | re.S)
        self.diffs = [text for kind, text in blocks if kind == "diff"]
        self.files = [text for kind, text in blocks if kind in ("yaml", "python")]
        self.commands = [text for kind, text in blocks if kind == "sh"]

    def change(self) -> None:
        """Apply the guide's diffs. Write its configs and tests to the path in their first line."""
        for diff in self.diffs:
            told = subprocess.run(["patch", "-p1"], cwd=self.root, input=diff, text=True, capture_output=True)
            assert told.returncode == 0, f"{told.stdout}\n{diff}"
        for text in self.files:
            (self.root / re.match(r"# ((?:configs|tests)/\S+)\n", text)[1]).write_text(text, "utf-8")

    def shell(self, i: int) -> str:
        """Run the guide's i-th block of commands, Python in forked processes and `cat` in bash. Return the output."""
        told = ""
        block = self.commands[i].replace("\\\n", " ")
        # One command per line, some with a here-document.
        for command, text in re.findall(r"^([^\n]+)\n(?:(?<=<<'END'\n)(.*?)^END\n)?", block, re.M | re.S):
            if command.startswith("python - "):
                told += self.run(partial(exec, text, {}))
            elif command.startswith("python "):
                told += self.run(shlex.split(command)[1:])
            else:
                text = f"{text}END" if text else ""
                subprocess.run(["bash", "-ec", f"{command}\n{text}"], cwd=self.root, check=True)
        return told

    def run(self, command) -> str:
        """Run a script or a function in the copy and return its output. It must not fail."""
        return finish(Forked(command, self.root))


@pytest.fixture
def fork(tmp_path, toy_dir):
    return lambda guide: Fork(tmp_path, toy_dir, guide)


# ---- a tool


def a_call_runs_beside_its_siblings() -> None:
    """Run an episode whose agent calls both tools, the new one also with bad arguments."""
    from test_rollout import reports, text_of, user_turns
    from tiny_checkpoint import play, turns

    from rollout import RolloutConfig
    from runtime import config
    from runtime.render import Renderer, load_tokenizer
    from runtime.visual import VisualContract

    arguments = [{"start_time": 0, "end_time": 8}, {"time": "0:10", "x": 0.5, "y": 0}, {"time": 10, "x": 1.5, "y": 0}]
    calls = [json.dumps({"name": "zoom_frame" if "x" in a else "crop_video", "arguments": a}) for a in arguments]
    first = "Both.\n</think>" + "".join(f"<tool_call>{call}</tool_call>" for call in calls) + "<|im_end|>"
    requests = {True: "asked for details", False: "asked what happens"}
    said = turns(first, "Seen.\n</think><answer>red</answer><|im_end|>", report=lambda prompt: requests["What can be seen or read here?" in prompt])  # fmt: skip

    renderer = Renderer(load_tokenizer("toy_data/model"), VisualContract.load("toy_data/model"))
    cfg = config.build(RolloutConfig, config.read_tree(Path("configs/toy_zoom.yaml"))["rollout"], "rollout.")
    [episode] = play(renderer, said, **vars(cfg) | {"max_new_tokens": 2048})
    assert '"y": {"type": "number", "description": "0 (top) to 1"}' in text_of(episode, renderer)
    crop, good, bad = episode.calls
    assert (crop.window, crop.error, crop.text) == ((0, 8), "", requests[False])
    assert (good.window, good.error, good.text) == ((10, 10), "", requests[True])
    assert bad.error == "bad_arguments" and "x and y in 0 ... 1" in bad.text
    assert reports(user_turns(episode, renderer)[1]) == [crop.text, good.text, bad.text]


def a_zoom_shows_the_quarter_around_its_point() -> None:
    """Red grows from left to right and green from top to bottom, so a crop's colours show its position."""
    import numpy as np
    from tiny_checkpoint import CONTRACT, MemoryVideos

    from data import Call, Task
    from runtime.video import Clip
    from tools import ToolError, run_tool

    class Gradient(MemoryVideos):
        def frames(self, path, indices, size):
            x, y = np.meshgrid(np.linspace(0, 255, size[0]), np.linspace(0, 255, size[1]))
            image = np.stack([x, y, np.zeros_like(x)], -1).round().astype(np.uint8)
            return Clip(np.stack([image] * len(indices)), tuple(self.times[list(indices)].tolist()))

    def zoom(**arguments) -> Clip:
        call, task = Call(0, "zoom_frame", arguments), Task("t", "", ("v.mp4",), "oe", "")
        return run_tool(call, task, ("zoom_frame",), Gradient(size=(640, 480)), CONTRACT).frames

    # A quarter of 0 ... 255 is 64 wide: 96 ... 159 around 0.5, 32 ... 96 around 0.25, the outermost 64 at an edge.
    for x, y, expected in ((0.5, 0.25, [96, 159, 32, 96]), (0, 1, [0, 63, 192, 255])):
        frames = zoom(time=10.2, x=x, y=y)
        red, green = frames.pixels[0, ..., 0], frames.pixels[0, ..., 1]
        assert [red.min(), red.max(), green.min(), green.max()] == pytest.approx(expected, abs=2)
        assert frames.times == (10.0,) and frames.pixels.shape[2:0:-1] == CONTRACT.frame_size(640, 480)
    for x in (-1, math.nan, "left"):
        with pytest.raises(ToolError, match="x"):
            zoom(time=60, x=x, y=0.3)


def test_a_tool_is_a_function_and_an_entry_in_forty_lines(fork):
    fork = fork("add_a_tool.md")
    [diff] = fork.diffs
    assert len(diff.splitlines()) <= 40 and set(re.findall(r"^\+\+\+ b/(.*)$", diff, re.M)) == {"tools.py"}
    fork.change()
    fork.run(a_call_runs_beside_its_siblings)
    fork.run(a_zoom_shows_the_quarter_around_its_point)
    assert "zoom_frame 10.0–10.0 s" in fork.shell(0)
    episode = json.loads((fork.root / "zoom.json").read_text("utf-8"))
    assert '"zoom_frame"' in episode["main"]["text"] and not episode["error_kind"]
    # Past bug: the model was untrained and called nothing, so the command showed no zoom.
    [call] = episode["calls"]
    assert (call["name"], call["error"], len(call["subagent"]["prompt_clips"][0])) == ("zoom_frame", "", 1)
    assert "zoom_frame" in (fork.root / "report.html").read_text("utf-8")
    assert "1 passed" in fork.shell(1)


# ---- a reward


def brevity_is_paid_and_logged() -> None:
    """Reward episodes of 44 and 45 tokens (here: characters) with the guide's config, and read what a step logs."""
    from data import Group, Task
    from rewards import score
    from rl import RLConfig, describe
    from runtime import config
    from runtime.render import END_OF_TURN
    from study.lab import Characters, episode_of_turns

    cfg, renderer = config.load(RLConfig, "configs/toy_brief.yaml").reward, Characters()
    task = Task("t", "", (), "mcq", "B")
    said = ["<think>\nI look.\n</think>\n<answer>B</answer>", "<think>\nI look..\n</think>\n<answer>C</answer>"]
    episodes = [episode_of_turns([text + END_OF_TURN], task, renderer) for text in [*said, "<answer>" * 9]]
    for episode in episodes:
        episode.rewards = score(episode, renderer, cfg)
    right, wrong, spam = (episode.rewards for episode in episodes)
    assert right["R_brief"] == pytest.approx(52 / 96) and wrong["R_brief"] == 0 == spam["R_brief"]
    # The config rewards only accuracy and brevity: 1 + 0.2 * 52 / 96.
    assert right["R"] == pytest.approx(1.108333, abs=1e-6) and wrong["R"] == 0
    metrics = describe([Group(task, 64, episodes)], [64], step=0)
    assert metrics["R_brief"] == pytest.approx(52 / 96 / 3)
    plain = score(episodes[0], renderer, config.load(RLConfig, "configs/toy_paragrpo.yaml").reward)
    assert plain["R"] == 1 and plain["R_brief"] == pytest.approx(1 - 44 / 512)
    with pytest.raises(config.ConfigError, match="brief_tokens = 0: must be positive"):
        config.load(RLConfig, "configs/toy_brief.yaml", ["reward.brief_tokens=0"])


def test_a_reward_is_a_weighted_part_and_logged_by_its_name(fork):
    fork = fork("add_a_reward.md")
    fork.change()
    fork.run(brevity_is_paid_and_logged)
    assert re.search(r"^ *R_brief +0\.91$", fork.shell(0), re.M)  # 1 - 44 / 512


# ---- a dataset


def rows_are_tasks_and_items() -> None:
    from dataclasses import replace

    from data import Task, parse_task
    from eval import EvalConfig
    from evals.benchmarks import load_split
    from runtime import config
    from runtime.dataset import DataConfig, RowError, Rows

    data = config.build(DataConfig, config.read_tree(Path("configs/toy_mine.yaml"))["data"], "data.")
    published, rows = (Rows(source.path) for source in data.sources)
    video = os.path.abspath("toy_data/videos/test00000.mp4")
    question, options = "Which color flashes?", ("red", "green", "blue")
    first = Task("mine:0", f"{question}\nA. red\nB. green\nC. blue", (video,), "mcq", "B", options)
    root = rows.path.parent
    assert len(rows) == 3 and parse_task(rows[0], "mine:0", root) == first
    without = rows[0] | {"options": None, "answer": "green"}
    assert parse_task(without, "mine:0", root) == Task("mine:0", question, (video,), "oe", "green")
    assert parse_task(published[0], "rl:0", root).kind == "oe"  # the schema that was already known
    changes = {"none.mp4": {"video": "videos/none.mp4"}, "names no video": {"video": None}, "a letter": {"answer": ""}}
    for says, change in changes.items():
        with pytest.raises(RowError, match=says):
            parse_task(rows[0] | change, "mine:0", root)
    items = load_split("mine", config.load(EvalConfig, "configs/eval/toy_mine.yaml").splits["mine"])
    assert len(items) == 3 and items[0].task == replace(first, id="mine-0")


def test_a_dataset_is_rows_that_become_tasks_and_items(fork):
    fork = fork("add_a_dataset.md")
    fork.change()
    fork.shell(0)
    fork.run(rows_are_tasks_and_items)
    told = fork.shell(1)
    assert "mine.jsonl: 3 rows, 0 unusable" in told
    told = fork.shell(2)
    assert "ok      mine: 3 items, 30 episodes" in told and "MISSING" not in told


# ---- a base model


def test_a_base_model_is_checked_before_it_is_trained(fork):
    fork = fork("add_a_base_model.md")
    fork.change()
    told = fork.shell(0)
    sizes = json.loads((fork.root / "runs/other/model/config.json").read_text())["text_config"]
    assert (sizes["hidden_size"], sizes["num_hidden_layers"]) == (96, 3)
    assert re.search(r"sft_val.parquet: 20 rows, 0 unusable; \d+ tokens", told)

    told = fork.shell(1)
    # 64 blocks of 487,598,336 weights, two tables of 151,936 x 5,120, a norm: 32,762,123,264 x 16 bytes on 8 GPUs.
    assert re.search(r"weights, gradients.* 61\.0 GiB", told) and re.search(r"sum .* GiB of 141", told)
    assert re.search(r"data: \d+ rows", told)
