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
from dataclasses import replace

import numpy as np
import pytest
import yaml
from PIL import Image
from test_rollout import play as roll_out
from test_rollout import turns
from tiny_checkpoint import MemoryVideos

from data import Task
from evals.results import RECORD
from records import dump
from rewards import structural_mask
from runtime.render import Renderer, load_tokenizer
from runtime.visual import VisualContract
from study import report
from study.report import RunData, panel_sections, read_run, seed_groups

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
CALL = '<tool_call>\n{"name": "crop_video", "arguments": {"start_time": %d, "end_time": %d}}\n</tool_call>'
FIRST = "Look closer 🦆.\n</think>\n" + CALL % (0, 20) + CALL % (30, 50) + "<|im_end|>"
SECOND = "A red cube.\n</think>\n<answer>red</answer><|im_end|>"
HOSTILE = "</script><img src=x onerror=alert(1)> What color?"
TASK = Task("t1", HOSTILE, ("/gone/v.mp4",), "oe", "red")


def play(renderer, videos=None, task=TASK, group_size=2):
    """Return an episode with two parallel calls and an answer, with rewards and advantages as after a step."""
    said = turns(FIRST, SECOND, report="A red cube.")
    episodes = roll_out(renderer, said, (task,), group_size, videos=videos)
    for i, episode in enumerate(episodes):
        episode.rewards = {"R": i + 0.5, "R_acc": 1.0 - i, "f": 1.0, "well_formed": 1.0 - i, "R_anchor": 0.7}
        episode.advantage, episode.anchor_advantage = 0.25 - i, 0.8
        episode.main.structural = structural_mask(episode.main, renderer)
    return episodes


def write_run(folder, rows, episodes=(), renderer=None, steps=(0,), **config):
    """Write a run's folder as rl.py does."""
    (folder / "episodes").mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({"run": str(folder), "seed": 0, "kl": 0.0, **config}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for step in steps if episodes else ():
        with (folder / "episodes" / f"step-{step:06d}.jsonl").open("w") as file:
            for episode in episodes:
                dump(episode, file, renderer)
    return folder


def write_evaluation(folder, scores_by_k, **settings):
    """Write an evaluation's folder as eval.py does. Its second item has a call, a call that failed, and an error."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({"run": str(folder), "name": "x", **settings}))
    for k, scores in scores_by_k.items():
        for arm in ("parallel", "none"):  # the page shows the first
            lines = [json.dumps({"name": "x", "split": "toy", "arm": arm, "k": k, "total": len(scores)})]
            for i, score in enumerate(scores):
                record = dict.fromkeys(RECORD, "") | {"score": score if arm == "parallel" else 0.0, "calls": []}
                if i == 1:
                    record |= {
                        "calls": [{"error": ""}, {"error": ""}, {"error": "timeout"}],
                        "error": "EngineError: gone",
                    }
                else:
                    record |= {"f": 1.0, "well_formed": 1.0}
                lines.append(json.dumps(record))
            (folder / f"toy-K{k}-{arm}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def run_of(name, *rows, **config) -> RunData:
    return RunData(name, {}, config=config, metrics=[{"step": step, **row} for step, row in enumerate(rows)])


def content(page) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.S)[1])


# ---- curves and table


def test_runs_that_differ_in_their_seed_alone_are_a_mean_with_std():
    runs = []
    for seed, accuracy in enumerate((1.0, 2.0, 6.0)):
        start = {"policy": {"checkpoint": f"runs/seed{seed}/sft/model"}, "data": {"seed": seed}, "run": str(seed)}
        runs.append(run_of(f"seed{seed}/para", {"R_acc": accuracy}, kl_coef=0.5, **start))
        runs.append(run_of(f"toy/grpo-seed{seed}", {"R_acc": 5.0}, kl_coef=0.0, **start))
    groups = seed_groups([*runs, run_of("seed0/other", {"R_acc": 5.0})])
    assert [(name, len(members)) for name, members in groups] == [("para (3 seeds)", 3), ("toy/grpo (3 seeds)", 3), ("seed0/other", 1)]  # fmt: skip
    line, _, alone = panel_sections(groups)[0]["panels"][0]["lines"]
    assert line["y"] == [3.0] and line["std"][0] == pytest.approx(math.sqrt(7))  # (4 + 1 + 9) / 2
    assert alone == {"group": 2, "x": [0], "y": [5.0]}
    # A seed that is behind is left out of the later means.
    runs = [run_of("a", {"R_acc": 1.0}, {"R_acc": 4.0}), run_of("b", {"R_acc": 3.0})]
    [line] = report.curves([("a", runs)], "R_acc")
    assert line == {"group": 0, "x": [0, 1], "y": [2.0, 4.0], "std": [pytest.approx(math.sqrt(2)), 0.0]}


def test_the_page_begins_with_evaluations_by_k_each_on_the_line_of_its_training(tmp_path):
    """Past bug: the page began with the trainings' last rewards. GRPO, which sees all frames, had 0.99, PARA-GRPO 0.97."""
    runs = []
    for seed, scores in enumerate(([1, 0, 0, 0], [1, 1, 1, 0])):
        run = write_run(tmp_path / f"seed{seed}" / "grpo", [{"step": 0, "R_acc": 1.0}], seed=seed)
        told = {"checkpoint": f"{run}/model"}  # as a user types it
        runs += [run, write_evaluation(tmp_path / f"seed{seed}" / "eval", {4: scores, 64: [1, 1, 1, 1]}, **told)]
    runs.append(write_evaluation(tmp_path / "start", {4: [1, 1, 0, 0]}, checkpoint="elsewhere/model"))
    read = [read_run(path, path.relative_to(tmp_path).as_posix(), {}, 200) for path in runs]
    groups = seed_groups(report.join_evaluations(read))
    assert [name for name, _ in groups] == ["grpo (2 seeds)", "start"]

    first = panel_sections(groups)[0]
    assert first["by"] == "K" and [panel["key"] for panel in first["panels"]] == ["accuracy", "calls", "well_formed"]
    trained, start = first["panels"][0]["lines"]
    assert (trained["x"], trained["y"]) == ([4, 64], [0.5, 1.0])
    assert trained["std"] == [pytest.approx(0.5 / math.sqrt(2)), 0.0]  # of 0.25 and 0.75
    assert start == {"group": 1, "x": [4], "y": [0.5]}
    assert [panel["lines"][1]["y"] for panel in first["panels"][1:]] == [[0.5], [0.75]]  # a failed item has no format


def test_an_evaluation_with_episodes_is_in_the_viewer_too():
    trained, asked = run_of("a", run="runs/a"), run_of("b", run="runs/e", checkpoint="runs/a/model")
    asked.outcomes = [{"K": 4, "accuracy": 1.0}]
    assert report.join_evaluations([trained, asked]) == [trained]
    asked.outcomes, asked.steps = [{"K": 16, "accuracy": 0.5}], {0: []}
    assert [run.name for run in report.join_evaluations([trained, asked])] == ["a", "b"]
    assert ([row["K"] for row in trained.outcomes], asked.outcomes) == ([4, 16], [])


def test_every_key_has_one_panel_and_no_key_none():
    by_k = {f"acc/K={k}": 0.5 for k in (16, 4, 64, 8)}
    run = run_of(
        "a",
        {
            "R_acc": 1.0,
            "closure/think": 0.5,
            "my_own": 2.0,
            "eval/acc": 0.5,
            "report/ended": 1.0,
            "loss": 0.1,
            "seconds": 1.0,
            **by_k,
        },
    )
    shown = panel_sections(seed_groups([run]))
    titles = {s["title"]: [panel["key"] for panel in s["panels"]] for s in shown}
    assert titles == {
        "Reward": ["R_acc"], "Accuracy by K": [f"acc/K={k}" for k in (4, 8, 16, 64)], "Format": ["closure/think"], "Sub-agents' reports": ["report/ended"],
        "Evaluation while training": ["eval/acc"], "Learning": ["loss"], "Seconds": ["seconds"], "More": ["my_own"],
    }  # fmt: skip
    assert [s["title"] for s in shown if s["folded"]] == ["Learning", "Seconds", "More"]


# ---- what is missing or broken


def test_a_run_that_still_goes_on_shows_what_it_has(tmp_path, renderer, checkpoint):
    """A last line can be incomplete, and a folder can hold only its config."""
    run = write_run(tmp_path / "a", [{"step": 0, "R_acc": 0.5, "loss": math.nan}, {"step": 1, "R_acc": 0.25}], play(renderer), renderer)  # fmt: skip
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "ac')
    assert report.read_metrics(run / "metrics.jsonl") == [{"step": 0, "R_acc": 0.5}, {"step": 1, "R_acc": 0.25}]
    file = run / "episodes" / "step-000000.jsonl"
    file.write_text(file.read_text()[:-2000])
    read = read_run(run, "run", {}, 200, checkpoint)
    assert [len(group["episodes"]) for group in read.steps[0]] == [1]
    begun = write_run(tmp_path / "b", [])
    (begun / "metrics.jsonl").unlink()
    report.write_page(tmp_path / "page.html", [read_run(begun, "begun", {}, 200)])
    assert content(tmp_path / "page.html")["runs"] == []


def test_a_page_shows_an_episode_with_numbers_that_are_none(tmp_path, renderer, checkpoint):
    """Past bug: one NaN left the page blank, since a browser's JSON has no NaN."""
    episodes = play(renderer)
    episodes[0].rewards, episodes[0].advantage = {"R": math.nan}, math.inf
    run = write_run(tmp_path / "a", [{"step": 0}], episodes, renderer)
    report.write_page(tmp_path / "page.html", [read_run(run, "run", {}, 200, checkpoint)])
    page = (tmp_path / "page.html").read_text("utf-8")
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1]
    assert not re.search(r":(NaN|-?Infinity)\b", data) and '"R":null' in data


def test_a_note_says_that_videos_are_gone_or_which_tokenizer_to_pass(tmp_path, renderer, checkpoint):
    folder = write_run(tmp_path / "run", [{"step": 0}], play(renderer), renderer)
    run = read_run(folder, "run", {}, 200, checkpoint)
    episode = run.steps[0][0]["episodes"][0]
    assert said(episode["main"], "s") == FIRST + SECOND and episode["main"]["images"] == episode["overview"] == []
    assert any("2 episodes are shown without pictures: /gone/v.mp4" in note for note in run.notes)
    run = read_run(folder, "run", {}, 200)
    assert run.steps == {} and "--model" in run.notes[-1]


def test_a_run_of_another_version_keeps_its_curves_and_a_note_says_why_it_has_no_episodes(
    tmp_path, renderer, checkpoint
):
    """Past bugs: after a renaming, a report on an older run ended with a TypeError, and then without its curves."""
    file = (
        write_run(tmp_path / "run", [{"step": 0, "loss": 1.0}], play(renderer), renderer)
        / "episodes"
        / "step-000000.jsonl"
    )
    file.write_text(file.read_text().replace('"rewards"', '"reward"'))
    run = read_run(tmp_path / "run", "old", {}, 200, checkpoint)
    assert run.metrics == [{"step": 0, "loss": 1.0}] and run.steps == {}
    [note] = run.notes
    assert note.startswith(
        "old: its episodes are left out: an episode of another version of this code, whose Episode has"
    )


def test_a_long_curve_is_thinned_and_keeps_its_ends():
    """Past bug: the page of a run of 100,000 steps was not finished in 150 s."""
    run = RunData("long", {}, metrics=[{"step": step, "loss": step / 2} for step in range(5001)])
    [line] = report.curves([("long", [run])], "loss")
    assert len(line["x"]) == report.MAX_POINTS and (line["x"][0], line["x"][-1]) == (0, 5000)
    assert line["y"] == [x / 2 for x in line["x"]]


# ---- episodes


def said(agent: dict, kind: str) -> str:
    """Return the text of the tokens of one kind, as the page joins them."""
    return "".join(text for text, k in zip(agent["texts"], agent["kinds"]) if k in kind)


def test_each_token_says_who_wrote_it_and_whether_it_is_structural(renderer):
    episodes, run = play(renderer), RunData("a", {}, renderer)
    report.add_episodes(run, 7, episodes, MemoryVideos())
    main = run.steps[7][0]["episodes"][0]["main"]
    assert said(main, "s") == FIRST + SECOND
    assert said(main, "f") == "<think>\n" * 2
    assert said(main, "t").count("<tool_response>\nA red cube.\n</tool_response>") == 2
    assert said(main, "pfst") == renderer.decode(renderer.compact(episodes[0].main.ids))
    assert main["logprobs"] == [-1.0] * main["kinds"].count("s")
    pads = [i for i, token in enumerate(main["ids"]) if token == renderer.image_pad]
    assert len(pads) == len(main["images"]) == 4  # each image of 4 pads is one token

    # The sampled tags and ends of turn are structural.
    painted = "".join(main["texts"][i] for i in main["structural"])
    end = "<|im_end|>"
    tags = ["</think>", *["<tool_call>", "</tool_call>"] * 2, end, "</think>", "<answer>", "</answer>", end]
    assert "".join(painted.split()) == "".join(tags)
    assert all(main["kinds"][i] == "s" for i in main["structural"])


def test_a_call_that_named_no_video_of_several_is_shown(renderer):
    """Past bug: the report failed with the error that the model had read."""
    task = Task("t", "What?", ("/a.mp4", "/b.mp4"), "oe", "red")
    episodes, run = play(renderer, task=task), RunData("a", {}, renderer)
    calls = episodes[0].calls
    calls[1] = replace(calls[1], arguments={"video_path": "c.mp4"}, error="bad_arguments", window=None)
    report.add_episodes(run, 0, episodes, MemoryVideos())
    assert [call["video"] for call in run.steps[0][0]["episodes"][0]["calls"]] == [0, None]


@pytest.mark.parametrize(("credit", "expected"), [("struct", 0.4), ("sequence", 0.0), ("off", 0.0)])
def test_only_struct_credit_adds_the_anchors_advantage(renderer, credit, expected):
    run = RunData("a", {}, renderer, config={"reward": {"anchor": {"credit": credit, "lam": 0.5}}})
    report.add_episodes(run, 0, play(renderer), MemoryVideos())
    first, second = run.steps[0][0]["episodes"]
    assert (first["advantage"], second["advantage"]) == (0.25, -0.75)
    assert first["anchor_advantage"] == pytest.approx(expected)  # 0.5 * 0.8


def test_a_file_of_episodes_shows_each_frame_of_the_video_once(tmp_path, toy_dir, videos):
    renderer = Renderer(load_tokenizer(toy_dir / "model"), VisualContract.load(toy_dir / "model"))
    path = str(sorted((toy_dir / "videos").glob("*.mp4"))[0])
    played = play(renderer, videos, Task("t", "What?", (path,), "oe", "red"), group_size=3)
    with (tmp_path / "trace.jsonl").open("w") as file:
        for episode in played:
            dump(episode, file, renderer)
    pictures = {}
    run = read_run(tmp_path / "trace.jsonl", "trace", pictures, 200, toy_dir / "model")
    assert run.notes == [] and run.steps[0][0]["durations"] == [videos.info(path).duration]
    clips = [clip for agent in played[0].trajectories for clip in agent.clips]
    assert len(pictures) == len({pixels.tobytes() for clip in clips for pixels in clip.pixels})
    time, place = run.steps[0][0]["episodes"][2]["calls"][0]["subagent"]["images"][3]
    shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(list(pictures)[place].partition(",")[2]))), int)
    seen = played[0].calls[0].subagent.clips[0]
    assert time == seen.times[3] and np.abs(shown - seen.pixels[3]).mean() < 12  # JPEG loses some of the noise
    report.write_page(tmp_path / "page.html", [run])
    assert content(tmp_path / "page.html")["sections"] == []  # the viewer alone


def test_the_steps_that_are_kept_are_spread_over_the_run(tmp_path, renderer, checkpoint):
    folder = write_run(tmp_path / "run", [], play(renderer), renderer, steps=range(0, 90, 10))
    run = read_run(folder, "run", {}, 6, checkpoint)
    assert list(run.steps) == [0, 40, 80]


# ---- the page


@pytest.fixture(scope="module")
def page(tmp_path_factory, renderer, checkpoint):
    """Write a page of two seeds of one method and one other run. The viewer has steps 0 and 10."""
    root = tmp_path_factory.mktemp("runs")
    rows = [{"step": s, "kappa": 1.0 + s / 50, "f": s / 50, "R_acc": 0.5, "loss": 0.1} for s in range(40)]
    struct = {"anchor": {"credit": "struct", "lam": 0.5}}
    first = write_run(root / "para-seed0", rows, play(renderer), renderer, steps=(0, 10), reward=struct)
    second = write_run(root / "para-seed1", rows, reward=struct, seed=1)
    other = write_run(root / "grpo", rows, kl_coef=0.5)
    evaluations = [write_evaluation(root / "eval", {4: [1, 0], 16: [1, 1]}, checkpoint=f"{first}/model")]
    evaluations.append(write_evaluation(root / "start", {4: [0, 0]}, checkpoint="elsewhere/model"))
    with pytest.MonkeyPatch.context() as patch:
        given = [first, second, other, *evaluations, "--model", checkpoint, "--png", root / "png"]
        patch.setattr(sys, "argv", ["report.py", *map(str, given)])
        assert report.main() == 0
    return root / "report.html"


def test_the_page_needs_nothing_but_itself_and_has_a_picture_beside_it(page):
    text = page.read_text()
    template = report.TEMPLATE.read_text()
    assert not re.search(r"""https?:|//\w+\.|@import|\burl\(|<link|\bsrc=|href="[^#]""", template)
    assert text.count("</script>") == template.count("</script>")  # no text of a model ends the element
    assert "<img" not in text
    shown = content(page)
    assert shown["groups"] == ["para (2 seeds)", "grpo", "start"]
    assert shown["runs"][0]["steps"][0][1][0]["question"] == HOSTILE
    colors = {color for _, color in Image.open(page.parent / "png" / "curves.png").convert("RGB").getcolors(1 << 24)}
    assert {(0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)} <= colors  # in the PNG, both groups have a line


@pytest.mark.skipif(not CHROMIUM, reason="no Chromium here")
def test_a_browser_draws_the_curves_opens_an_episode_and_finds_others(page):
    script = """
    const all = selector => [...document.querySelectorAll(selector)];
    const text = selector => document.querySelector(selector).textContent;
    const hover = token => { token.dispatchEvent(new MouseEvent("mousemove", {bubbles: true})); return text("#tip"); };
    seen.table = all("#table tr").map(row => [...row.children].map(cell => cell.textContent));
    seen.folded = all("details > .panels").map(panels => panels.children.length);
    all("details").forEach(fold => { fold.open = true; });
    seen.lines = all("figure[data-key=kappa] polyline[style*='1.7']").length;
    location.hash = "run=0&step=10&group=0&episode=1";
    render();
    seen.title = text("#question");
    seen.said = all(".two > :first-child .tok.s").map(token => token.textContent).join("");
    seen.calls = all(".window").length;
    seen.why = all(".note").at(-1).textContent;
    seen.values = all(".parts > span").map(span => span.textContent);
    seen.tag = hover(document.querySelector(".two .tok.s.struct"));
    seen.word = hover(document.querySelector(".two .tok.s:not(.struct)"));
    const select = document.querySelector("select.kind");
    select.value = "wrong";
    select.dispatchEvent(new Event("change"));
    seen.found = text("#matches");
    """
    report_back = f"<script>const seen = {{}}; {script}; document.title = JSON.stringify(seen);</script>"
    acted = page.with_name("acted.html")
    acted.write_text(page.read_text().replace("</body>", report_back))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=2000"]
    command = [CHROMIUM, *flags, "--dump-dom", acted.as_uri()]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "CONSOLE" not in told.stderr, told.stderr
    seen = json.loads(html.unescape(re.search(r"<title>(.*?)</title>", told.stdout, re.S)[1]))
    header, *rows = seen["table"]
    assert header == ["run", *(f"{name}, K = {k}" for k in (4, 16) for name in ("accuracy", "calls", "well-formed"))]
    assert rows[0] == [
        "para (2 seeds)",
        *("0.50 ± 0.00", "1.00 ± 0.00", "0.50 ± 0.00"),
        *("1.00 ± 0.00",) * 2,
        "0.50 ± 0.00",
    ]
    assert rows[1] == ["start", "0.00", "1.00", "0.50", "–", "–", "–"]
    assert (seen["folded"], seen["lines"], seen["calls"]) == ([0], 2, 2)
    assert seen["why"].startswith(
        "not well-formed: <think> text </think> <tool_call> json </tool_call> <tool_call> json"
    )
    assert seen["values"][:4] == ["R 1.50", "R_acc 0.00", "f 1.00", "advantage −0.750, of structural tokens −0.350"]
    assert seen["title"] == HOSTILE and seen["said"] == FIRST + SECOND
    assert "advantage −0.350" in seen["tag"] and "structural" in seen["tag"]  # -0.75 + 0.5 * 0.8
    assert "advantage −0.750" in seen["word"] and "log p −1.0000" in seen["word"]
    assert seen["found"] == "2 episodes"  # the second one of both steps
