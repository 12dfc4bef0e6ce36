"""The guides of docs/, followed to the letter: their diffs are applied to a copy of the repository, their configs
written, their commands run, and what they promise is looked at.

The functions without `test_` run in the copy (a `Fork`), whose modules they import; they return what JSON can hold."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import REPO

pytestmark = pytest.mark.skipif(not shutil.which("patch"), reason="the guides' diffs are applied with `patch`")


class Fork:
    """A copy of the repository beside the toy, and one guide to change it by."""

    def __init__(self, root: Path, toy: Path, guide: str):
        self.root = root
        for path in REPO.glob("*.py"):
            shutil.copy(path, root)
        for room in ("runtime", "evals", "study"):
            shutil.copytree(REPO / room, root / room)
        shutil.copytree(REPO / "configs", root / "configs")
        (root / "toy_data").mkdir()
        for path in toy.iterdir():  # what a guide adds beside them stays in the copy
            (root / "toy_data" / path.name).symlink_to(path)
        blocks = re.findall(r"^```(\w+)\n(.*?)^```$", (REPO / "docs" / guide).read_text("utf-8"), re.M | re.S)
        self.diffs, self.configs, self.commands = (
            [t for kind, t in blocks if kind == k] for k in ("diff", "yaml", "sh")
        )

    def change(self) -> None:
        """Apply the guide's diffs, and write its configs where their first line says."""
        for diff in self.diffs:
            told = subprocess.run(["patch", "-p1"], cwd=self.root, input=diff, text=True, capture_output=True)
            assert told.returncode == 0, f"{told.stdout}\n{diff}"
        for text in self.configs:
            (self.root / re.match(r"# (configs/\S+\.yaml)\n", text)[1]).write_text(text, "utf-8")

    def run(self, *command: str) -> str:
        paths = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(REPO / "tests")}
        done = subprocess.run(
            command, cwd=self.root, env=os.environ | paths | {"OMP_NUM_THREADS": "1"}, text=True, capture_output=True
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def shell(self, i: int) -> str:
        """What the guide's i-th block of commands prints."""
        return self.run("bash", "-ec", self.commands[i])

    def call(self, function) -> dict:
        """What a function of this file returns in the copy."""
        code = f"import json, test_guides; print(json.dumps(test_guides.{function.__name__}()))"
        return json.loads(self.run(sys.executable, "-c", code).splitlines()[-1])


@pytest.fixture
def fork(tmp_path, toy_dir):
    return lambda guide: Fork(tmp_path, toy_dir, guide)


# ---- a tool


def zooming() -> dict:
    """An episode whose agent calls both tools, once badly; then zooms into a picture that tells where it was cut."""
    import numpy as np
    from tiny_checkpoint import CONTRACT, MemoryVideos, Scripted, is_subagent

    from data import Call, Task
    from rollout import RolloutConfig, rollout
    from runtime import config
    from runtime.contract import Renderer, VisualContract, load_tokenizer
    from runtime.video import Frames, Videos
    from tools import Look, ToolError, use

    said = [
        "Both.\n</think>"
        + "".join(
            f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
            for name, arguments in (
                ("crop_video", {"start_time": 0, "end_time": 8}),
                ("zoom_frame", {"time": "0:10", "x": 0.5, "y": 0}),
                ("zoom_frame", {"time": 10, "x": 1.5, "y": 0}),
            )
        ),
        "Seen.\n</think><answer>red</answer>",
    ]

    def reply(prompt: str, seed: int) -> str:
        if is_subagent(prompt):
            return f"{prompt.count('seconds>')} frames.<|im_end|>"
        return said[prompt.count("<|im_start|>assistant") - 1] + "<|im_end|>"

    renderer = Renderer(load_tokenizer("toy_data/model"), VisualContract.load("toy_data/model"))
    tree = config.read_tree(Path("configs/toy_zoom.yaml"))["rollout"]
    cfg = config.build(RolloutConfig, tree | {"max_new_tokens": 2048}, "rollout.")
    task = Task("t", "Which color flashes?", (os.path.abspath("toy_data/videos/test00000.mp4"),), "oe", "red")
    with Videos(workers=1) as videos:
        engine = Scripted(renderer, reply)
        stage = {"engine": engine, "renderer": renderer, "videos": videos, "cfg": cfg}
        [[episode]] = [group.episodes for group in rollout([task], [4], 1, progress=False, **stage)]

    class Gradient(MemoryVideos):
        """Red grows from left to right, green from top to bottom."""

        def frames(self, path, indices, size):
            x, y = np.meshgrid(np.linspace(0, 255, size[0]), np.linspace(0, 255, size[1]))
            image = np.stack([x, y, np.zeros_like(x)], -1).round().astype(np.uint8)
            return Frames(np.stack([image] * len(indices)), tuple(self.times[list(indices)].tolist()))

    def zoom(**arguments) -> Look | str:
        try:
            return use(Call(0, "zoom_frame", arguments), task, ("zoom_frame",), Gradient(size=(640, 480)), CONTRACT)
        except ToolError as error:
            return error.kind

    seen = {}
    for x, y in ((0.5, 0.25), (0, 1)):
        look = zoom(time=10.2, x=x, y=y)
        red, green = look.frames.pixels[0, ..., 0], look.frames.pixels[0, ..., 1]
        seen[f"{x}, {y}"] = [int(edge) for channel in (red, green) for edge in (channel.min(), channel.max())]
    written = [-1, 0, 1e-9, 0.999, 1, 1.1, 1e308, math.nan, math.inf, None, True, "0.5", "left", [], {}, 10**400]
    looks = [zoom(time=time, x=x, y=y) for time in (60, 61, "soon") for y in (0, 0.3, 2) for x in written]
    shapes = {look if isinstance(look, str) else str(look.frames.pixels.shape) for look in looks}
    return {
        "prompt": renderer.decode(list(engine.asked[0][0])),
        "read": renderer.decode(episode.main.ids[episode.main.turns[0][1] :]),
        "calls": [[c.name, c.window, c.text, c.error, len(c.agent.frames[0]) if c.agent else 0] for c in episode.calls],
        "error": episode.error,
        "times": look.frames.times,
        "size": [*look.frames.pixels.shape[1:3]],
        "expected_size": [*CONTRACT.frame_size(640, 480)][::-1],
        "seen": seen,
        "shapes": sorted(shapes),
    }


def test_a_tool_is_a_function_and_an_entry_in_thirty_lines(fork):
    fork = fork("add_a_tool.md")
    [diff] = fork.diffs
    assert len(diff.splitlines()) <= 30 and set(re.findall(r"^\+\+\+ b/(.*)$", diff, re.M)) == {"tools.py"}
    fork.change()
    found = fork.call(zooming)

    # The call ran beside its siblings, and its report came back in the same turn, in call order.
    assert not found["error"] and '"zoom_frame"' in found["prompt"]
    crop, good, bad = found["calls"]
    assert crop[:2] == ["crop_video", [0, 8]] and crop[3] == "" and crop[4] > 1
    assert good == ["zoom_frame", [10.0, 10.0], "1 frames.", "", 1]
    assert bad[0] == "zoom_frame" and bad[3] == "bad_arguments" and "x and y in 0 ... 1" in bad[2]
    responses = re.findall(r"<tool_response>\n(.*?)\n</tool_response>", found["read"].split("<|im_start|>assistant")[0])
    assert responses == [crop[2], good[2], bad[2]]

    # A quarter of 0 ... 255 is 64 wide: around 0.5 that is 96 ... 159, around 0.25 32 ... 96, at an edge the outermost.
    assert found["seen"]["0.5, 0.25"] == pytest.approx([96, 159, 32, 96], abs=2)
    assert found["seen"]["0, 1"] == pytest.approx([0, 63, 192, 255], abs=2)
    assert found["times"] == [10.0] and found["size"] == found["expected_size"]
    assert found["shapes"] == [f"(1, {found['size'][0]}, {found['size'][1]}, 3)", "bad_arguments"]

    [episode] = map(json.loads, fork.shell(0).splitlines())
    assert '"zoom_frame"' in episode["main"]["text"] and not episode["error"]


# ---- a reward


def brevity() -> dict:
    """Episodes of 44 and 45 tokens (here: characters) under the guide's config, and what a step writes of them."""
    from data import Group, Task
    from rewards import Characters, score, stage
    from rl import RLConfig, describe
    from runtime import config
    from runtime.contract import END_OF_TURN

    cfg, renderer = config.load(RLConfig, "configs/toy_brief.yaml").reward, Characters()
    task = Task("t", "", (), "mcq", "B")
    said = [
        "<think>\nI look.\n</think>\n<answer>B</answer>",
        "<think>\nI look..\n</think>\n<answer>C</answer>",
        "<answer>" * 9,
    ]
    episodes = [stage([text + END_OF_TURN], task, renderer) for text in said]
    for episode in episodes:
        episode.reward = score(episode, renderer, cfg)
    plain = score(episodes[0], renderer, config.load(RLConfig, "configs/toy_paragrpo.yaml").reward)
    try:
        config.load(RLConfig, "configs/toy_brief.yaml", ["reward.brief_tokens=0"])
        refused = ""
    except config.ConfigError as error:
        refused = str(error)
    metrics = describe([Group(task, 64, episodes)], [64], step=0)
    return {"parts": [e.reward for e in episodes], "plain": plain, "metrics": metrics, "refused": refused}


def test_a_reward_is_a_weighted_part_and_logged_by_its_name(fork):
    fork = fork("add_a_reward.md")
    fork.change()
    found = fork.call(brevity)
    right, wrong, spam = found["parts"]
    assert right["brief"] == pytest.approx(52 / 96) and wrong["brief"] == 0 == spam["brief"]
    # The config pays for accuracy and brevity alone: 1 + 0.2 * 52 / 96.
    assert right["reward"] == pytest.approx(1.108333, abs=1e-6) and wrong["reward"] == 0
    assert found["plain"]["reward"] == 1 and found["plain"]["brief"] == pytest.approx(1 - 44 / 512)
    assert found["metrics"]["brief"] == pytest.approx(52 / 96 / 3)
    assert found["metrics"]["reward"] == pytest.approx(1.108333 / 3, abs=1e-6)
    assert "brief_tokens = 0: must be positive" in found["refused"]
    assert re.search(r"^ *brief +0\.91$", fork.shell(0), re.M)  # 1 - 44 / 512


# ---- a dataset


def mine() -> dict:
    """The guide's rows as tasks and as items, and a row that cannot be used."""
    import dataclasses

    from data import parse_task
    from eval import EvalConfig
    from evals.benchmarks import load_split
    from runtime import config
    from runtime.dataset import DataConfig, RowError, Rows

    data = config.build(DataConfig, config.read_tree(Path("configs/toy_mine.yaml"))["data"], "data.")
    rows = Rows(data.sources[1].path)
    tasks = [parse_task(rows[i], f"mine:{i}", rows.path.parent) for i in range(len(rows))]
    refused = []
    for change in ({"video": "videos/none.mp4"}, {"video": None}, {"answer": ""}):
        try:
            parse_task(rows[0] | change, "mine:0", rows.path.parent)
        except RowError as error:
            refused.append(str(error))
    published = Rows(data.sources[0].path)
    items = load_split("mine", config.load(EvalConfig, "configs/eval/toy_mine.yaml").splits["mine"])
    return {
        "tasks": [dataclasses.asdict(task) for task in tasks],
        "open": dataclasses.asdict(
            parse_task(rows[0] | {"options": None, "answer": "green"}, "mine:0", rows.path.parent)
        ),
        "published": dataclasses.asdict(parse_task(published[0], "rl:0", rows.path.parent)),
        "refused": refused,
        "items": [[dataclasses.asdict(item.task), item.groups] for item in items],
    }


def test_a_dataset_is_rows_that_become_tasks_and_items(fork):
    fork = fork("add_a_dataset.md")
    fork.change()
    fork.shell(0)
    found = fork.call(mine)
    video = str(fork.root / "toy_data/videos/test00000.mp4")
    first = {
        "id": "mine:0",
        "question": "Which color flashes?\nA. red\nB. green\nC. blue",
        "videos": [video],
        "kind": "mcq",
        "answer": "B",
        "options": ["red", "green", "blue"],
    }
    assert found["tasks"][0] == first and len(found["tasks"]) == 3
    assert found["open"] == first | {"question": "Which color flashes?", "kind": "oe", "answer": "green", "options": []}
    assert found["published"]["kind"] == "oe" and found["published"]["question"].startswith("Which color flashes")
    missing, unnamed, mute = found["refused"]
    assert "none.mp4" in missing and "none is named" in unnamed and "no answer" in mute
    assert found["items"][0] == [first | {"id": "mine-0"}, {"topic": ["color"]}] and len(found["items"]) == 3

    told = fork.shell(1)
    assert "3 rows" in told and "mcq 3" in told and "all rows are usable" in told
    told = fork.shell(2)
    assert "ok      mine: 3 items, 30 episodes" in told and "MISSING" not in told


# ---- a base model


def test_a_base_model_is_checked_before_it_is_trained(fork):
    fork = fork("add_a_base_model.md")
    fork.change()
    told = fork.shell(0)
    sizes = json.loads((fork.root / "runs/other/model/config.json").read_text())["text_config"]
    assert (sizes["hidden_size"], sizes["num_hidden_layers"]) == (96, 3)
    assert "all rows are usable" in told and "tokens per row: 50 % at most" in told
    assert len(re.findall(r"^ok  ", told, re.M)) == 7 and "FAIL" not in told

    told = fork.shell(1)
    # 64 blocks of 487,598,336 weights, two tables of 151,936 x 5,120, a norm: 32,762,123,264, in fp32 over 8 GPUs.
    assert re.search(r"master weights.* 15\.3 GiB", told) and re.search(r"sum .* GiB of 141", told)
    assert re.search(r"data: \d+ rows", told)
