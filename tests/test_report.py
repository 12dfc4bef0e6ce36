"""The report: its numbers are computed by hand, its episodes match the tokens, its page works in a real browser."""

import base64
import html
import io
import itertools
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from evaluations import line, write_results
from PIL import Image
from scripted import MemoryVideos, crop, load_episodes, turns
from scripted import play as roll_out
from tiny import CONTRACT

from episode import Group, Task, episode_record, keep_episodes
from rewards import structural_mask
from runtime.lines import append_line
from runtime.video import VideoError
from study import report
from study.report import RunData, read_run_data, view_episode

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FIRST = f"Look closer 🦆.\n</think>\n{crop(0, 20)}{crop(30, 50)}<|im_end|>"
SECOND = "A red cube.\n</think>\n<answer>red</answer><|im_end|>"
HOSTILE = "</script><img src=x onerror=alert(1)> What color?"
TASK = Task("t1", HOSTILE, ("/gone/v.mp4",), "oe", "red")
STRUCT = {"anchor": {"credit": "struct", "lam": 0.5}}


def play(renderer):
    """Return two episodes with two parallel calls and an answer, with rewards and advantages as after a step."""
    episodes = roll_out(renderer, turns(FIRST, SECOND, report="A red cube."), (TASK,), 2)
    for i, episode in enumerate(episodes):
        episode.rewards = {"R": i + 0.5, "R_acc": 1.0 - i, "well_formed": 1.0 - i}
        episode.advantage, episode.anchor_advantage = 0.25 - i, 0.8
        episode.main.structural = structural_mask(episode.main, renderer)
    return episodes


def write_run(folder, rows, episodes=(), renderer=None, steps=(0,), **config):
    """Write a run's folder as rl.py does."""
    (folder / "episodes").mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({"run": str(folder), **config}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for step in steps if episodes else ():
        keep_episodes([Group(TASK, 0, episodes)], renderer.readable, folder / "episodes" / f"step-{step:06d}.jsonl")
    return folder


def write_evaluation(folder, k, scores, arm="parallel"):
    """Write an evaluation's folder as eval.py does. Its second item has two calls and one that failed."""
    rows = [line("", score, f=1.0, well_formed=1.0) for score in scores]
    rows[1] |= {"calls": [{"error": ""}, {"error": ""}, {"error": "timeout"}], "well_formed": 0.0}
    return write_results(folder, "toy", rows, arm=arm, k=k).parent


def content(page) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.S)[1])


def pixels(uri: str) -> np.ndarray:
    """Return the picture of a data URI: [H, W, 3]."""
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))).convert("RGB"), int)


# ---- curves and tables


def told(content: dict) -> str:
    """Return what the page says about runs. A panel is its title."""
    text = content["lead"] + "\n"
    for title, section in content["sections"].items():
        text += f"\n## {title}\n" + "".join(" | ".join(row) + "\n" for row in section["table"])
        for prefix, panels in section["groups"].items():
            text += f"{prefix or '-'}: {', '.join(panel['title'] for panel in panels)}\n"
        text += f"({section['note']})\n"
    return text


def test_a_page_has_tables_panels_and_notes(tmp_path, golden):
    """Seeds are a mean, an evaluation shows one arm, what has no values or never changes is named, and one K is a table."""

    def show(name: str, folders: list) -> None:
        report.write_page(tmp_path / "page.html", [read_run_data(folder) for folder in folders])
        golden(name, told(content(tmp_path / "page.html")))

    evaluated = []
    for seed, scores in ((0, [1, 1, 0, 1]), (1, [1, 0])):
        for name, drop in (("sft", 0), ("grpo", 1), ("paragrpo", 0)):
            evaluated.append(write_evaluation(tmp_path / f"eval{seed}" / name, 4, [*scores[drop:], 1 - drop]))
    write_evaluation(evaluated[0], 4, [0, 0], arm="none")  # not shown
    other = write_evaluation(tmp_path / "eval0" / "qwen", 4, [1, 0], arm="direct")
    file = other / "toy-K4-direct.jsonl"
    file.write_text(file.read_text().replace('"f"', '"other"').replace('"well_formed"', '"other"'))
    show("report_one_k.txt", [*evaluated, other])

    frames = {"overview_frames": 64}
    trained = []
    configs = {"grpo": {"gating": [], "visual": frames}, "paragrpo": {"gating": [4, 64], "visual": frames}}
    configs |= {"older": {"gating": []}, "sft": {"visual": frames}}
    for name, config in configs.items():
        rows = [{"step": step, "f": 1.0, "val/f": step, "lr": 0.1, "acc/K=4": step, "acc/K=64": 1} for step in (0, 1)]
        trained.append(write_run(tmp_path / "trained" / name, [row | {"loss": row["step"]} for row in rows], **config))
    for folder in evaluated[:3]:
        write_evaluation(folder, 64, [1, 1])
    show("report_two_ks.txt", [*trained, *evaluated])


def test_the_values_of_an_evaluation_are_means_over_the_items_of_all_splits_on_the_line_of_its_training(tmp_path):
    folder = write_evaluation(tmp_path / "eval" / "grpo", 4, [1, 1, 1, 1])
    (folder / "toy-K4-parallel.jsonl").rename(folder / "charades-K4-parallel.jsonl")
    write_evaluation(folder, 4, [0, 0])
    runs = [read_run_data(folder), RunData("grpo", [{"step": 0, "f": 1.0}])]
    values = {"accuracy": 4 / 6, "calls": 4 / 6, "well_formed": 4 / 6}  # in each file, one item has two calls
    assert {key: report.points_of(runs, key, "K") for key in values} == {
        key: {"grpo": {4: [pytest.approx(value)]}} for key, value in values.items()
    }
    assert report.points_of(runs, "f", "step") == {"grpo": {0: [1.0]}}


def test_runs_of_one_name_are_a_mean_with_a_band_of_one_standard_deviation():
    rows = [[{"step": 0, "f": value}] for value in (1.0, 2.0, 6.0)]
    rows[0].append({"step": 1, "f": 4.0})  # the others are behind
    rows[1].append({"step": 1, "f": math.nan})
    [axis] = report.draw_panels([RunData("grpo", own) for own in rows], {"f": "f"}, "step").axes
    assert axis.lines[0].get_xydata().tolist() == [[0, 3], [1, 4]]
    [band] = axis.collections
    at_0 = [y for x, y in band.get_paths()[0].vertices if x == 0]
    assert max(at_0) - min(at_0) == pytest.approx(2 * math.sqrt(7))  # (4 + 1 + 9) / 2


def test_a_click_on_a_curve_hits_the_step_under_the_pointer():
    rows = [{"step": step, "f": float(step == 30)} for step in range(101)]  # a peak at step 30
    [panel] = report.draw_groups([RunData("grpo", rows)], {"f": "f"}, "step")[""]
    shown = pixels(panel["picture"])
    is_blue = np.abs(shown - [0x00, 0x72, 0xB2]).sum(-1) < 60  # [H, W]
    is_blue[: len(shown) // 5] = False  # the legend
    peak = is_blue[np.argmax(is_blue.any(1))].nonzero()[0].mean()
    left, right = panel["edges"]
    assert left + (right - left) * peak / shown.shape[1] == pytest.approx(30, abs=0.5)


# ---- what is missing or broken


def test_a_run_that_is_incomplete_shows_what_it_has(tmp_path, renderer, checkpoint, capsys):
    """A line can be cut, a video gone, a folder hold only its config. Past bug: one NaN left the page blank, since a browser's
    JSON has no NaN."""
    episodes = play(renderer)
    episodes[0].rewards = {"R": math.nan}
    run = write_run(tmp_path / "a", [{"step": 0, "f": 0.5}], episodes, renderer)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "f')
    file = run / "episodes" / "step-000000.jsonl"
    file.write_text(file.read_text()[:-2000])
    read = read_run_data(run, checkpoint)
    assert read.rows == [{"step": 0, "f": 0.5}]
    [episode] = read.episodes
    assert said(episode["main"], "sampled") == FIRST + SECOND
    assert not any("picture" in token for token in tokens(episode["main"], ""))
    assert "shown without frames: /gone/v.mp4" in capsys.readouterr().out
    begun = write_run(tmp_path / "b", [])
    (begun / "metrics.jsonl").unlink()
    (begun / "toy-K4-parallel.jsonl").touch()  # of an evaluation whose first item is not answered
    report.write_page(tmp_path / "page.html", [read, read_run_data(begun)])
    [shown] = content(tmp_path / "page.html")["runs"]
    assert shown["episodes"][0]["rewards"] == {"R": None}


# ---- episodes


def tokens(blocks: list[dict], style: str) -> list[dict]:
    return [token for block in blocks for token in block["tokens"] if style in token["style"]]


def said(blocks: list[dict], style: str) -> str:
    """Return the text of the tokens of one style, as the page joins them."""
    return "".join(token["text"] for token in tokens(blocks, style))


def spelled(blocks: list[dict]) -> str:
    """Return an agent's text, {forced} and ⟦structural⟧ tokens in brackets, with the advantages of each block."""
    text = ""
    for block in blocks:
        advantages = sorted({round(token["advantage"], 6) for token in block["tokens"] if "advantage" in token})
        text += f"\n[{block['name']}, {advantages}]\n"
        for style, run in itertools.groupby(block["tokens"], lambda token: token["style"]):
            piece = "".join(token["text"] for token in run)
            text += {"forced": f"{{{piece}}}", "sampled structural": f"⟦{piece}⟧"}.get(style, piece)
    return text + "\n"


def test_each_token_says_who_wrote_it_and_its_advantage_and_shows_its_frame(renderer, golden):
    """Structural tokens have the anchor's advantage too: 0.25 + 0.5 * 0.8. Reports have the episode's if sub-agents learn. Each
    frame is stored once."""
    [episode, _] = play(renderer)
    agents, pictures = [], {}
    for train in (True, False):
        config = {"reward": STRUCT | {"of_an_older_version": 1}, "rollout": {"subagents": {"train": train}}}
        view = view_episode(episode, config, renderer, pictures)
        agents += [view["main"], view["calls"][0]["subagent"]]
    golden("report_episode.txt", "".join(spelled(blocks[1:]) for blocks in (*agents[:2], agents[3])))
    text = renderer.decode(renderer.compact(episode.main.all_ids))  # an image's pads are one token
    assert said(view["main"], "") == text
    seen = [frame for agent in [episode.main, *episode.subagents] for frame in agent.clips[0].pixels]
    assert len(pictures) == len({frame.tobytes() for frame in seen})
    for agent, blocks in ((episode.main, view["main"]), (episode.calls[1].subagent, view["calls"][1]["subagent"])):
        shown = [token for token in tokens(blocks, "prompt") if "picture" in token]
        assert [token["time"] for token in shown] == list(agent.clips[0].times)
        for token, frame in zip(shown, agent.clips[0].pixels):
            assert np.abs(pixels(pictures[token["picture"]]) - frame).mean() < 20  # of noise in a JPEG: 85 apart


@pytest.mark.parametrize("tool_return", ["subagent", "frames"])
def test_frames_of_a_loaded_episode_are_decoded_again_at_their_times(renderer, tmp_path, tool_return):
    [episode] = roll_out(renderer, turns(FIRST, SECOND), tool_return=tool_return)
    append_line(tmp_path / "episodes.jsonl", episode_record(episode, renderer.readable))
    [loaded] = load_episodes(tmp_path / "episodes.jsonl")
    report.decode_frames(loaded, MemoryVideos(), CONTRACT)
    for ours, theirs in zip([episode.main, *episode.subagents], [loaded.main, *loaded.subagents], strict=True):
        assert all((a.pixels == b.pixels).all() for a, b in zip(ours.clips, theirs.clips, strict=True))
    with pytest.raises(VideoError, match="frame times"):
        report.decode_frames(loaded, MemoryVideos(fps=3.0), CONTRACT)


# ---- the page


@pytest.fixture(scope="module")
def page(tmp_path_factory, renderer, checkpoint):
    """Write a page of a training with episodes of steps 0 and 30, and of the cold start's evaluation. The last sibling has one
    call."""
    root = tmp_path_factory.mktemp("runs")
    rows = [{"step": step, "f": step / 50} for step in range(40)]
    siblings = [*play(renderer), play(renderer)[0]]
    siblings[2].calls.pop()
    write_run(root / "paragrpo", rows, siblings, renderer, steps=(0, 30), reward=STRUCT)
    write_evaluation(root / "sft", 4, [1, 0])
    given = f"{root}/paragrpo {root}/sft --model {checkpoint} --png {root}/png -o {root}/new/report.html"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["report.py", *given.split()])
        report.main()
    return root / "new" / "report.html"


def test_a_models_text_cannot_end_the_pages_data_and_the_pictures_are_beside_it(page):
    text = page.read_text()
    assert text.count("</script>") == 2
    assert "<img" not in text
    assert content(page)["runs"][0]["episodes"][0]["task"]["question"] == HOSTILE
    assert {file.name for file in (page.parent.parent / "png").iterdir()} == {"curves.png", "outcomes.png"}


def in_a_browser(test):
    return pytest.mark.slow(pytest.mark.skipif(not CHROMIUM, reason="no Chromium here")(test))


@pytest.fixture
def act(page):
    """act("f()"): open the page in a browser, call f of report_acts.js, and return what it returns."""

    def run(call: str):
        acted = page.with_name("acted.html")
        script = Path(__file__).with_name("report_acts.js").read_text("utf-8")
        acted.write_text(f"{page.read_text()}<script>{script}; document.title = JSON.stringify({call});</script>")
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=2000"]
        command = [CHROMIUM, *flags, "--dump-dom", acted.as_uri()]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert "CONSOLE" not in shown.stderr, shown.stderr
        return json.loads(html.unescape(re.search(r"<title>([{[].*?)</title>", shown.stdout, re.S)[1]))

    return run


@in_a_browser
def test_the_page_opens_a_right_episode_with_two_calls_and_a_click_on_a_curve_or_a_key_opens_a_step(act, golden):
    golden("report_browser.json", json.dumps(act("open()"), indent=1, ensure_ascii=False) + "\n")


def contrast(text: list[float], background: list[float]) -> float:
    """Return WCAG's contrast of two colors. The background may be transparent, over white."""
    *tint, alpha = [*background, 1.0][:4]
    luminances = []
    for color in (text, [alpha * value + (1 - alpha) * 255 for value in tint]):
        linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in np.array(color) / 255]
        luminances.append(np.dot(linear, [0.2126, 0.7152, 0.0722]))
    return (max(luminances) + 0.05) / (min(luminances) + 0.05)


@in_a_browser
def test_structural_tokens_are_readable_at_every_advantage(act):
    """Past bug: violet on the orange of a large advantage had a contrast of 1.7."""
    seen = act("tint()")
    assert seen["looks"] == ["700", "underline"]
    assert len({tuple(background) for _, background in seen["colors"]}) > 20  # the tint shows the advantage
    assert min(contrast(*colors) for colors in seen["colors"]) > 4.5
