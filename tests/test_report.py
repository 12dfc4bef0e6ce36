"""The report: its numbers are computed by hand, its episodes match the tokens, its page works in a real browser."""

import base64
import html
import io
import json
import math
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import yaml
from evaluations import line
from PIL import Image
from scripted import play as roll_out
from scripted import turns

from episode import Group, Task, keep_episodes
from rewards import structural_mask
from runtime.render import Renderer, load_tokenizer
from runtime.visual import VisualContract
from study import report
from study.report import RunData, read_run_data, view_episode

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
CALL = '<tool_call>\n{"name": "crop_video", "arguments": {"start_time": %d, "end_time": %d}}\n</tool_call>'
FIRST = "Look closer 🦆.\n</think>\n" + CALL % (0, 20) + CALL % (30, 50) + "<|im_end|>"
SECOND = "A red cube.\n</think>\n<answer>red</answer><|im_end|>"
HOSTILE = "</script><img src=x onerror=alert(1)> What color?"
TASK = Task("t1", HOSTILE, ("/gone/v.mp4",), "oe", "red")
STRUCT = {"anchor": {"credit": "struct", "lam": 0.5}}


def play(renderer, videos=None, task=TASK):
    """Return two episodes with two parallel calls and an answer, with rewards and advantages as after a step."""
    episodes = roll_out(renderer, turns(FIRST, SECOND, report="A red cube."), (task,), 2, videos=videos)
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
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({"run": str(folder)}))
    lines = []
    for score in scores:
        lines.append(line("", score, f=1.0, well_formed=1.0))
    lines[1] |= {"calls": [{"error": ""}, {"error": ""}, {"error": "timeout"}], "well_formed": 0.0}
    (folder / f"toy-K{k}-{arm}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def content(page) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.S)[1])


def pixels(uri: str) -> np.ndarray:
    """Return the picture of a data URI: [H, W, 3]."""
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))).convert("RGB"), int)


# ---- curves


def test_runs_of_one_name_are_a_mean_with_a_band_of_one_standard_deviation():
    rows = [[{"step": 0, "f": value}] for value in (1.0, 2.0, 6.0)]
    rows[0].append({"step": 1, "f": 4.0})  # the others are behind
    rows[1].append({"step": 1, "f": math.nan})
    [axis] = report.draw_panels([RunData("grpo", own) for own in rows], {"f": "f"}, "step").axes
    assert axis.lines[0].get_xydata().tolist() == [[0, 3], [1, 4]]
    [band] = axis.collections
    at_0 = [y for x, y in band.get_paths()[0].vertices if x == 0]
    assert max(at_0) - min(at_0) == pytest.approx(2 * math.sqrt(7))  # (4 + 1 + 9) / 2


def test_an_evaluation_is_a_point_per_k_on_the_line_of_its_training(tmp_path):
    folder = write_evaluation(tmp_path / "eval" / "grpo", 4, [1, 1, 1, 1], arm="none")  # not shown
    write_evaluation(folder, 4, [1, 0, 0, 0])
    runs = [read_run_data(folder), RunData("grpo", [{"step": 0, "f": 1.0}])]
    assert report.points_of(runs, "accuracy", "K") == {"grpo": {4: [0.25]}}
    assert report.points_of(runs, "calls", "K") == {"grpo": {4: [0.5]}}
    assert report.points_of(runs, "well_formed", "K") == {"grpo": {4: [0.75]}}
    assert report.points_of(runs, "f", "step") == {"grpo": {0: [1.0]}}


@pytest.mark.parametrize(
    ("arms", "note"), [(["parallel"], ""), (["none", "parallel"], "arm parallel, not none"), (["direct"], "arm direct")]
)
def test_an_evaluation_shows_one_arm_and_says_which(tmp_path, arms, note):
    """Past bug: the page of another model, whose arm is its protocol, was a title on white."""
    for arm in arms:
        write_evaluation(tmp_path / "sft", 64, [arm == arms[-1], 0], arm=arm)
    run = read_run_data(tmp_path / "sft")
    assert [row["accuracy"] for row in run.rows] == [0.5]
    assert run.note == note


def test_an_evaluation_without_our_format_has_no_value_of_it(tmp_path):
    file = write_evaluation(tmp_path / "qwen", 64, [1, 0], arm="direct") / "toy-K64-direct.jsonl"
    file.write_text(file.read_text().replace('"f"', '"other"').replace('"well_formed"', '"other"'))
    [_, row] = report.draw_section([read_run_data(tmp_path / "qwen")], report.PANELS, "K")["table"]
    assert row == ["qwen", "0.50", "1.00", "–"]


def test_at_one_k_outcomes_are_a_table_with_seeds_as_mean_and_deviation():
    """Past bug: the page of one evaluation at one K was a title on white."""
    runs = [RunData("sft", [{"K": 64, "accuracy": value, "calls": 1.0}]) for value in (0.5, 0.7)]
    section = report.draw_section(
        [*runs, RunData("own", [{"K": 64, "accuracy": 1.0, "calls": 0.0}])], report.PANELS, "K"
    )
    assert section["groups"] == {}
    assert section["table"] == [
        ["K = 64", *report.PANELS.values()],
        ["cold start", "0.60 ± 0.14", "1.00 ± 0.00", "–"],
        ["own", "1.00", "0.00", "–"],
    ]


def test_outcomes_that_never_change_have_a_panel():
    rows = [{"K": k, "accuracy": 1.0, "calls": 0.0, "well_formed": 1.0} for k in (4, 64)]
    groups = report.draw_section([RunData("own", rows)], report.PANELS, "K")["groups"]
    assert [panel["title"] for panel in groups[""]] == list(report.PANELS.values())


def test_other_metrics_are_grouped_by_prefix_and_those_that_never_change_are_named():
    rows = [
        {"step": step, "f": 1.0, "val/f": step, "lr": 0.1, "acc/K=4": step, "acc/K=64": 1, "loss": step}
        for step in range(2)
    ]
    others = report.draw_others([RunData("grpo", rows), RunData("sft", [{"K": 4, "accuracy": 1.0}])])
    assert {prefix: [panel["title"] for panel in panels] for prefix, panels in others["groups"].items()} == {
        "": ["loss"],
        "acc": ["acc/K=4"],
        "val": ["val/f"],
    }
    assert others["note"] == "never changes: lr 0.1, acc/K=64 1"


@pytest.mark.parametrize(
    ("config", "notes"),
    [
        ({"gating": [4, 64], "visual": {"overview_frames": 64}}, ["PARA-GRPO: K = 4, 64"]),
        ({"gating": [], "visual": {"overview_frames": 64}}, ["PARA-GRPO: K = 64"]),
        ({"gating": []}, []),  # of an older version
        ({"visual": {"overview_frames": 64}}, []),  # of SFT
    ],
)
def test_the_page_says_k_of_each_training_if_its_config_does(tmp_path, config, notes):
    rows = [{"step": step, "f": step / 2} for step in range(3)]
    runs = [read_run_data(write_run(tmp_path / seed / "paragrpo", rows, **config)) for seed in ("seed0", "seed1")]
    section = report.draw_section(runs, report.CURVES, "step")
    missing = [f"no values: {report.CURVES[key]}" for key in ("well_formed", "kappa")]
    assert section["note"] == "; ".join([*notes, *missing])


def test_a_click_on_a_curve_hits_the_step_under_the_pointer():
    rows = [{"step": step, "f": float(step == 30)} for step in range(101)]  # a peak at step 30
    [panel] = report.draw_groups([RunData("grpo", rows)], {"f": "f"}, "step")[""]
    shown = pixels(panel["picture"])
    is_blue = np.abs(shown - [0x00, 0x72, 0xB2]).sum(-1) < 60  # [H, W]
    is_blue[: len(shown) // 5] = False  # the legend
    peak = is_blue[np.argmax(is_blue.any(1))].nonzero()[0].mean()
    left, right = panel["edges"]
    assert left + (right - left) * peak / shown.shape[1] == pytest.approx(30, abs=0.5)


def test_the_points_of_an_evaluation_are_means_over_the_items_of_all_splits(tmp_path):
    folder = write_evaluation(tmp_path / "grpo", 4, [1, 1, 1, 1])
    (folder / "toy-K4-parallel.jsonl").rename(folder / "charades-K4-parallel.jsonl")
    write_evaluation(folder, 4, [0, 0])
    assert report.points_of([read_run_data(folder)], "accuracy", "K") == {"grpo": {4: [pytest.approx(4 / 6)]}}


def test_the_page_leads_with_the_three_runs_and_their_numbers_at_the_smallest_k_if_all_are_there():
    sft, grpo, paragrpo = (
        RunData(name, [{"K": 64, "calls": 0.1, "accuracy": 1.0}, {"K": 4, "calls": calls, "accuracy": accuracy}])
        for name, calls, accuracy in (("sft", 0.88, 0.76), ("grpo", 0.2, 0.38), ("paragrpo", 1.31, 0.95))
    )
    told = report.lead([sft, grpo, paragrpo])
    assert "one cold start (76 % right, 0.88 calls per episode with 4 frames)" in told
    assert told.endswith("GRPO ends at 38 % right, 0.20 calls, PARA-GRPO at 95 % right, 1.31 calls.")
    assert report.lead([sft, grpo]) == ""


# ---- what is missing or broken


def test_a_run_that_still_goes_on_shows_what_it_has(tmp_path, renderer, checkpoint):
    """A last line can be incomplete, and a folder can hold only its config."""
    run = write_run(tmp_path / "a", [{"step": 0, "f": 0.5}], play(renderer), renderer)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "f')
    file = run / "episodes" / "step-000000.jsonl"
    file.write_text(file.read_text()[:-2000])
    read = read_run_data(run, checkpoint)
    assert read.rows == [{"step": 0, "f": 0.5}]
    assert len(read.episodes) == 1
    begun = write_run(tmp_path / "b", [])
    (begun / "metrics.jsonl").unlink()
    (begun / "toy-K4-parallel.jsonl").touch()  # of an evaluation whose first item is not answered
    report.write_page(tmp_path / "page.html", [read_run_data(begun)])
    assert content(tmp_path / "page.html")["runs"] == []


def test_a_page_shows_an_episode_with_numbers_that_are_none(tmp_path, renderer, checkpoint):
    """Past bug: one NaN left the page blank, since a browser's JSON has no NaN."""
    episodes = play(renderer)
    episodes[0].rewards = {"R": math.nan}
    run = write_run(tmp_path / "a", [], episodes, renderer)
    report.write_page(tmp_path / "page.html", [read_run_data(run, checkpoint)])
    assert '"rewards":{"R":null}' in (tmp_path / "page.html").read_text("utf-8")


def test_episodes_whose_videos_are_gone_are_shown_without_frames(tmp_path, renderer, checkpoint, capsys):
    run = read_run_data(write_run(tmp_path / "run", [], play(renderer), renderer), checkpoint)
    assert said(run.episodes[0]["main"], "sampled") == FIRST + SECOND
    assert not any("picture" in token for episode in run.episodes for token in tokens(episode["main"], ""))
    assert "shown without frames: /gone/v.mp4" in capsys.readouterr().out


# ---- episodes


def tokens(blocks: list[dict], style: str) -> list[dict]:
    return [token for block in blocks for token in block["tokens"] if style in token["style"]]


def said(blocks: list[dict], style: str) -> str:
    """Return the text of the tokens of one style, as the page joins them."""
    return "".join(token["text"] for token in tokens(blocks, style))


def test_each_token_says_who_wrote_it_and_whether_it_is_structural(renderer):
    [episode, _] = play(renderer)
    main = view_episode(episode, {}, renderer, {})["main"]
    assert [block["name"] for block in main] == ["prompt", "turn", "tools", "turn"]
    assert said(main, "sampled") == FIRST + SECOND
    assert said(main, "forced") == "<think>\n" * 2
    assert said(main, "tools").count("<tool_response>\nA red cube.\n</tool_response>") == 2
    assert said(main, "") == renderer.decode(renderer.compact(episode.main.all_ids))  # an image's pads are one token
    assert len([token for token in tokens(main, "prompt") if "picture" in token]) == 4
    end = "<|im_end|>"
    tags = ["</think>", *["<tool_call>", "</tool_call>"] * 2, end, "</think>", "<answer>", "</answer>", end]
    assert "".join(said(main, "structural").split()) == "".join(tags)


def test_a_structural_token_has_the_anchors_advantage_too(renderer):
    view = view_episode(play(renderer)[0], {"reward": STRUCT}, renderer, {})
    sampled = tokens(view["main"], "sampled")
    assert {token["advantage"] for token in sampled if "structural" not in token["style"]} == {0.25}
    structural = [token["advantage"] for token in sampled if "structural" in token["style"]]
    assert structural == pytest.approx([0.65] * len(structural))  # 0.25 + 0.5 * 0.8


@pytest.mark.parametrize(("train", "advantages"), [(True, {0.25}), (False, set())])
def test_a_report_has_its_episodes_advantage_if_sub_agents_learn(renderer, train, advantages):
    config = {"reward": STRUCT, "rollout": {"subagents": {"train": train}}}
    view = view_episode(play(renderer)[0], config, renderer, {})
    sampled = tokens(view["calls"][0]["subagent"], "sampled")
    assert sampled
    assert {token["advantage"] for token in sampled if "advantage" in token} == advantages


def test_a_reward_key_of_an_older_version_does_not_refuse_the_page(renderer):
    assert view_episode(play(renderer)[0], {"reward": STRUCT | {"w_old": 1}}, renderer, {})["kappa"] == 2


def test_a_file_of_episodes_has_each_frame_of_the_video_once(tmp_path, toy_dir, videos):
    renderer = Renderer(load_tokenizer(toy_dir / "model"), VisualContract.load(toy_dir / "model"))
    path = str(sorted((toy_dir / "videos").glob("*.mp4"))[0])
    played = play(renderer, videos, Task("t", "What?", (path,), "oe", "red"))
    keep_episodes([Group(played[0].task, 0, played)], renderer.readable, tmp_path / "trace.jsonl")
    run = read_run_data(tmp_path / "trace.jsonl", toy_dir / "model")
    report.write_page(tmp_path / "page.html", [run])
    clips = [clip for agent in [played[0].main, *played[0].subagents] for clip in agent.clips]
    pictures = content(tmp_path / "page.html")["pictures"]
    assert len(pictures) == len({pixels.tobytes() for clip in clips for pixels in clip.pixels})
    shown = [token for token in tokens(run.episodes[1]["calls"][0]["subagent"], "prompt") if "picture" in token]
    seen = played[0].calls[0].subagent.clips[0]
    assert [token["time"] for token in shown] == list(seen.times)
    difference = pixels(pictures[shown[3]["picture"]]) - seen.pixels[3]
    assert np.abs(difference).mean() < 12  # JPEG loses some of the noise


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
    given = [
        root / "paragrpo",
        root / "sft",
        "--model",
        checkpoint,
        "--png",
        root / "png",
        "-o",
        root / "new" / "report.html",
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["report.py", *map(str, given)])
        report.main()
    return root / "new" / "report.html"


def test_both_pictures_are_written(page):
    assert {file.name for file in (page.parent.parent / "png").iterdir()} == {"curves.png", "outcomes.png"}


def test_a_models_text_cannot_end_the_pages_data(page):
    text = page.read_text()
    assert text.count("</script>") == 2
    assert "<img" not in text
    assert content(page)["runs"][0]["episodes"][0]["task"]["question"] == HOSTILE


def browse(page, script) -> dict:
    """Run a script at the end of the page in a browser. Return what it puts into `seen`."""
    helpers = """
    const seen = {};
    const all = selector => [...document.querySelectorAll(selector)];
    const text = selector => document.querySelector(selector).textContent;
    """
    acted = page.with_name("acted.html")
    acted.write_text(f"{page.read_text()}<script>{helpers} {script}; document.title = JSON.stringify(seen);</script>")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=2000"]
    command = [CHROMIUM, *flags, "--dump-dom", acted.as_uri()]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "CONSOLE" not in told.stderr, told.stderr
    return json.loads(html.unescape(re.search(r"<title>(\{.*?)</title>", told.stdout, re.S)[1]))


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="no Chromium here")
def test_a_browser_opens_a_right_episode_with_two_calls_and_a_click_on_a_curve_or_a_key_opens_a_step(page):
    seen = browse(
        page,
        """
    seen.legend = text("#viewer");
    seen.title = text("#task h2");
    seen.said = all("#episode > :first-child .sampled").map(token => token.textContent).join("");
    seen.calls = all("#episode > :last-child > .block").length;
    seen.step = text("#siblings h3");
    seen.cards = all("#siblings button").map(card => [...card.children].map(line => line.textContent));
    seen.tag = document.querySelector("#episode .sampled.structural").title;
    seen.word = document.querySelector("#episode .sampled:not(.structural)").title;
    const select = document.querySelector("select");
    seen.selected = [select.value];
    const curve = document.querySelector("img.step"), [left, right] = DATA.sections["While training"].groups[""][0].edges;
    const x = curve.getBoundingClientRect().left + curve.width * (8 - left) / (right - left);
    curve.dispatchEvent(new MouseEvent("click", {clientX: x}));
    seen.clicked = text("#siblings h3");
    seen.selected.push(select.value);
    select.focus();
    select.value = 30;  // as the arrow keys do
    select.dispatchEvent(new Event("change"));
    seen.keyed = [text("#siblings h3"), document.activeElement.id];
    all("#siblings button")[1].click();
    seen.chosen = text("#siblings .chosen").includes("not well-formed");
    seen.table = all("tr").map(row => [...row.children].map(cell => cell.textContent));
    """,
    )
    assert "K: overview frames · κ: calls that ran · R: reward" in seen["legend"]
    assert seen["title"] == HOSTILE
    assert seen["said"] == FIRST + SECOND
    assert seen["calls"] == 2
    assert seen["step"] == "PARA-GRPO, step 30"
    assert seen["cards"][0] == ["red", "K 4, κ 2, R 0.5", "advantage 0.25", ""]
    assert seen["cards"][1] == ["red", "K 4, κ 2, R 1.5", "advantage −0.75", "not well-formed"]
    assert re.search(r'"</think>", sampled structural, id \d+, log p -1.0000, advantage 0.650', seen["tag"])
    assert re.search(r"sampled, id \d+, log p -1.0000, advantage 0.250", seen["word"])
    assert seen["clicked"] == "PARA-GRPO, step 0"  # the nearest to step 8
    assert seen["selected"] == ["30", "0"]
    assert seen["keyed"] == ["PARA-GRPO, step 30", "step"]
    assert seen["chosen"]
    assert seen["table"] == [["K = 4", *report.PANELS.values()], ["cold start", "0.50", "1.00", "0.50"]]


def contrast(text: list[float], background: list[float]) -> float:
    """Return WCAG's contrast of two colors. The background may be transparent, over white."""
    *tint, alpha = [*background, 1.0][:4]
    luminances = []
    for color in (text, [alpha * value + (1 - alpha) * 255 for value in tint]):
        linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in np.array(color) / 255]
        luminances.append(np.dot(linear, [0.2126, 0.7152, 0.0722]))
    return (max(luminances) + 0.05) / (min(luminances) + 0.05)


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="no Chromium here")
def test_a_browser_shows_structural_tokens_readably_at_every_advantage(page):
    """Past bug: violet on the orange of a large advantage had a contrast of 1.7."""
    seen = browse(
        page,
        """
    const numbers = color => color.match(/[\\d.]+/g).map(Number);
    seen.colors = [];
    for (let advantage = -6; advantage <= 6; advantage += 0.25) {
      const node = token({text: "</think>", style: "sampled structural", fact: "", advantage});
      document.body.append(node);
      const style = getComputedStyle(node);
      seen.colors.push([numbers(style.color), numbers(style.backgroundColor)]);
      seen.looks = [style.fontWeight, style.textDecorationLine];
    }
    """,
    )
    assert seen["looks"] == ["700", "underline"]
    assert len({tuple(background) for _, background in seen["colors"]}) > 20  # the tint shows the advantage
    assert min(contrast(*colors) for colors in seen["colors"]) > 4.5


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="no Chromium here")
def test_a_browser_cuts_no_stamp_of_the_first_three_rows_of_frames(page):
    seen = browse(
        page,
        """
    const frame = {picture: "p", time: 12.5, text: "", style: "prompt", fact: ""};
    DATA.pictures.p = "data:image/svg+xml,<svg xmlns='http://www.w3.org/2000/svg' width='80' height='44'/>";
    const [frames] = agent([{name: "prompt", tokens: Array(64).fill(frame)}])[0];
    document.body.replaceChildren(frames);
    const bottoms = [...new Set([...frames.children].map(cell => cell.getBoundingClientRect().bottom))];
    seen.bottoms = bottoms.map(bottom => bottom - frames.getBoundingClientRect().bottom);
    """,
    )
    assert len(seen["bottoms"]) > 3
    assert seen["bottoms"][2] <= 0
    assert seen["bottoms"][3] > 15.75  # a stamp of the fourth row: only its picture shows
