"""Follow the guides of docs/ literally: apply their diffs to a copy of the repository, write their configs, run their
commands, and check what they promise.

The functions without `test_` run and assert in the copy (a `Fork`), and import its modules."""

import json
import os
import re
import shlex
import shutil
import subprocess
import zipfile
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scripts import GONE, REPO, Forked, finish

pytestmark = pytest.mark.skipif(not shutil.which("patch"), reason="the guides' diffs are applied with `patch`")


class Fork:
    """A copy of the repository that has followed a guide, with the toy's data."""

    def __init__(self, root: Path, toy: Path, guide: str):
        self.root = root
        page = (REPO / "docs" / guide).read_text("utf-8")
        if named := GONE.search(page):
            pytest.skip(f"{guide} needs {named[0]}, which is not here")
        for path in REPO.glob("*.py"):
            shutil.copy(path, root)
        for room in ("runtime", "evals", "study", "configs"):
            if (REPO / room).exists():
                shutil.copytree(REPO / room, root / room)
        (root / "tests").mkdir()
        for name in ("conftest", "scripts", "scripted", "tiny"):
            shutil.copy(REPO / "tests" / f"{name}.py", root / "tests")
        (root / "toy_data").mkdir()
        for path in toy.iterdir():  # files that a guide adds there stay in the copy
            (root / "toy_data" / path.name).symlink_to(path)
        blocks = re.findall(r"^```(\w+)\n(.*?)^```$", page, re.M | re.S)
        self.diffs = [text for kind, text in blocks if kind == "diff"]
        self.files = [text for kind, text in blocks if kind in ("yaml", "python")]
        self.commands = [text for kind, text in blocks if kind == "sh"]
        self.snippets = [text for kind, text in blocks if kind == "py"]
        self.rows = [json.loads(text) for kind, text in blocks if kind == "json"]
        self.change()

    def patch(self, diff: str, *options: str) -> bool:
        return subprocess.run(["patch", "-p1", *options], cwd=self.root, input=diff.encode()).returncode == 0

    def change(self) -> None:
        """Apply the guide's diffs, except those that this repository has already: a fork that follows a guide runs these tests.
        Write its configs and tests to the path in their first line."""
        for diff in self.diffs:
            undo = ["--reverse", "--force", "--dry-run"]
            assert self.patch(diff, *undo) or (self.patch(diff) and self.patch(diff, *undo)), diff
        for text in self.files:
            if path := re.match(r"# ((?:configs|tests)/\S+)\n", text):
                (self.root / path[1]).write_text(text, "utf-8")

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
def follow(tmp_path, toy_dir):
    return lambda guide: Fork(tmp_path, toy_dir, guide)


# ---- a tool


def a_zoom_shows_the_quarter_around_its_point() -> None:
    """Red grows from left to right and green from top to bottom, so a crop's colours show its position."""
    import numpy as np
    from scripted import MemoryVideos
    from tiny import CONTRACT

    from episode import Call, Task
    from rl import RLConfig
    from runtime import config
    from runtime.video import Clip
    from tools import run_tool

    assert "zoom_frame" in config.load(RLConfig, "configs/toy_zoom.yaml").rollout.tools

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


def a_search_returns_subtitles_with_their_times(code: str) -> None:
    import tools
    from episode import Call, Task

    exec(code, vars(tools))
    schema = {"video_path": "string", "text": "string"}
    tools.TOOLS["search_subtitles"] = tools.make_tool(tools.search_subtitles, "Find what is said.", ["text"], schema)
    first, second = "1\n00:00:01,000 --> 00:00:02,000\nA red flash.", "2\n00:00:05,000 --> 00:00:06,000\nNothing."
    Path("said.srt").write_text(f"{first}\n\n{second}\n")

    def search(video: str, **arguments) -> str:
        call, task = Call(0, "search_subtitles", arguments), Task("t", "", (video,), "oe", "")
        return tools.run_tool(call, task, ("search_subtitles",), None, None)

    assert search("said.mp4", text="RED") == first
    assert search("said.mp4", text="0") == f"{first}\n\n{second}"
    assert search("said.mp4", text="blue") == "No subtitle has this text."
    for mistake in ({"video": "silent.mp4", "text": "red"}, {"video": "said.mp4"}):
        with pytest.raises(tools.ToolError, match="^This video has no subtitles, or text is missing"):
            search(**mistake)


def test_a_tool_is_a_function_and_an_entry(follow, toy_dir):
    fork = follow("add_a_tool.md")
    fork.run(a_zoom_shows_the_quarter_around_its_point)
    fork.run(partial(a_search_returns_subtitles_with_their_times, *fork.snippets))
    # The toy's files stand for those of the demo.
    demo = fork.root / "runs" / "demo" / "seed0"
    (demo / "paragrpo").mkdir(parents=True)
    (demo / "paragrpo" / "model").symlink_to(toy_dir / "model")
    (demo / "sft-toy").symlink_to(toy_dir)
    assert "zoom_frame 10.0–10.0 s" in fork.shell(0)
    episode = json.loads((fork.root / "zoom.json").read_text("utf-8"))
    assert '"zoom_frame"' in episode["main"]["text"] and not episode["error_kind"]
    [call] = episode["calls"]
    assert (call["name"], call["error"], len(call["subagent"]["prompt"]["clips"][0])) == ("zoom_frame", "", 1)
    assert "zoom_frame" in (fork.root / "report.html").read_text("utf-8")
    assert "1 passed" in fork.shell(1)


# ---- a reward


def brevity_is_paid_and_logged() -> None:
    """Reward episodes of 44 and 45 tokens (here: characters) with the guide's config, and read what a step logs."""
    from scripted import Characters, episode_of_turns

    from episode import Group, Task
    from metrics import describe
    from rewards import score
    from rl import RLConfig
    from runtime import config
    from runtime.render import END_OF_TURN

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


def test_a_reward_is_a_weighted_part_and_logged_by_its_name(follow):
    fork = follow("add_a_reward.md")
    fork.run(brevity_is_paid_and_logged)
    assert re.search(r"^ *R_brief +0\.91$", fork.shell(0), re.M)  # 1 - 44 / 512


# ---- a dataset


def the_printed_rows_are_read(rl: dict, sft: dict) -> None:
    from data import parse_task
    from dialogues import parse_dialogue

    task = parse_task(rl, "rl:0", Path("toy_data"))
    assert (task.kind, task.answer, task.options) == ("mcq", "A", ("red", "blue"))
    dialogue = parse_dialogue(sft, "sft:0", Path("toy_data"))
    assert dialogue.question == "Which color flashes?" and dialogue.media[0].path == task.videos[0]
    assert [turn["role"] for turn in dialogue.turns] == ["assistant", "tool", "assistant"]


def media_of_columns_become_parts(code: str) -> None:
    from dialogues import Media, parse_dialogue
    from runtime.dataset import RowError

    space = {"re": re}
    exec(code, space)
    says = {"user": "<image><video>Which?", "assistant": "A <video>.", "tool": "<video>Red."}
    messages = [{"role": role, "content": text} for role, text in [*says.items(), ("assistant", "Red.")]]
    films = [f"videos/test0000{i}.mp4" for i in range(2)]
    row = {"messages": messages, "images": ["rl.parquet"], "videos": films}
    shown = [Media(os.path.abspath(f"toy_data/{film}")) for film in films]
    image = Media(os.path.abspath("toy_data/rl.parquet"), still=True)

    with pytest.raises(RowError, match="docs/add_a_dataset.md"):
        parse_dialogue(row, "sft:0", Path("toy_data"))
    dialogue = parse_dialogue(space["show_media"](row), "sft:0", Path("toy_data"))
    assert (dialogue.question, dialogue.media) == ("Which?", (image, shown[0]))
    assert [turn["content"] for turn in dialogue.turns] == [["A <video>."], [shown[1], "Red."], ["Red."]]


def rows_are_tasks_and_items() -> None:
    from dataclasses import replace

    from data import parse_task
    from episode import Task
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
    with pytest.raises(RowError, match="names no video"):
        parse_task(rows[0] | {"video": None}, "mine:0", root)
    items = load_split("mine", config.load(EvalConfig, "configs/eval/toy_mine.yaml").splits["mine"])
    assert len(items) == 3 and items[0].task == replace(first, id="mine-0")


def test_a_dataset_is_rows_that_become_tasks_and_items(follow):
    fork = follow("add_a_dataset.md")
    fork.shell(0)
    fork.run(partial(the_printed_rows_are_read, *fork.rows))
    fork.run(partial(media_of_columns_become_parts, *fork.snippets))
    fork.run(rows_are_tasks_and_items)
    told = fork.shell(1)
    assert "mine.jsonl: 3 rows, 0 unusable" in told
    told = fork.shell(2)
    assert "mine: 3 items, 30 episodes" in told and "MISSING" not in told
    alone = "eval.py configs/eval/toy_mine.yaml checkpoint=toy_data/model 'splits={mine: toy_data}' --dry-run"
    assert "toy: " in told and "toy: " not in fork.run(shlex.split(alone))


# ---- a base model


def test_a_base_model_is_checked_before_it_is_trained(follow):
    fork = follow("add_a_base_model.md")
    told = fork.shell(0)
    sizes = json.loads((fork.root / "runs/other/model/config.json").read_text())["text_config"]
    assert (sizes["hidden_size"], sizes["num_hidden_layers"]) == (96, 3)
    assert re.search(r"sft_val.parquet: \d+ rows, 0 unusable", told)

    told = fork.shell(1)
    # 64 blocks of 487,598,336 weights, two tables of 151,936 x 5,120, a norm: 32,762,123,264 x 16 bytes on 8 GPUs.
    assert re.search(r"weights, gradients.* 61\.0 GiB", told) and re.search(r"sum .* GiB of 141", told)
    assert re.search(r"data: \d+ rows", told)


# ---- a first evaluation, with a folder as the hub


def read_hub(hub: Path, video: Path, code: str) -> None:
    """Run the page's Python on a hub whose second zip has the first seven videos of twenty questions."""
    import huggingface_hub

    for number, held in (("01", [800, 899]), ("02", range(10))):
        with zipfile.ZipFile(hub / f"videos_chunked_{number}.zip", "w") as archive:
            for i in held:
                archive.write(video, f"data/{i:03d}_-x.mp4")

    class Folder:
        def glob(self, pattern):
            return sorted(map(str, hub.glob(Path(pattern).name)))

        open = staticmethod(partial(open, mode="rb"))

    huggingface_hub.HfFileSystem = Folder
    exec(code, {})


@pytest.mark.slow
def test_the_first_evaluation_runs_and_fetches_the_first_seven_videos_of_the_hub(follow, tmp_path, toy_dir):
    """test_docs: the other commands load."""
    page = follow("evaluate.md")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").touch()
    assert "| untrained " in page.shell(0)

    fetch, code = page.commands[1].split("python - <<'END'\n")
    questions = tmp_path / shlex.split(fetch)[-1] / "videomme" / "test-00000-of-00001.parquet"
    questions.parent.mkdir(parents=True)
    pq.write_table(pa.table({"videoID": [f"{i // 3:03d}_-x" for i in range(2700)]}), questions)
    video = min((toy_dir / "videos").glob("test*.mp4"))
    told = page.run(partial(read_hub, tmp_path, video, code.removesuffix("END\n")))
    assert [Path(line).name for line in told.splitlines()] == [f"{i:03d}_-x.mp4" for i in range(7)]
