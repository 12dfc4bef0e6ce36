"""Evaluation: interrupted and failing runs end with the results of one that was neither; tables are computed by hand."""

import json
import math
import os
import random
import re
import shlex
import shutil
import signal
import time
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml
from endpoint import Endpoint
from scripts import REPO, start, wait_for
from tiny_checkpoint import Scripted, is_subagent

import eval as evaluation
import rewards
from eval import EvalConfig, dry_run
from evals import protocols, tables
from evals.benchmarks import Cue, Item, load_split
from evals.protocols import Prompting
from evals.tables import TableError, interval, read_results
from rollout import RolloutConfig, Stage, derive, load_episodes
from runtime import config, judge
from runtime.contract import END_OF_TURN, Renderer, VisualContract
from runtime.engine import EngineError
from study.report import read_run
from study.toy import DURATIONS

CALL = '<tool_call>\n{"name": "crop_video", "arguments": {"start_time": 0, "end_time": 1000}}\n</tool_call>'
CONFIGS = REPO / "configs" / "eval"


@pytest.fixture
def write(toy_dir, tmp_path):
    """write(key=value, ...) -> a config of the toy's 8 test items: each is asked once, and the answer is what is said."""

    def make(folder=tmp_path, **changes) -> Path:
        tree = {
            "run": str(folder / "run"),
            "name": "toy",
            "checkpoint": str(toy_dir / "model"),
            "splits": {"toy": str(toy_dir)},
            "frames": [4],
            "prompting": {"protocol": "direct"},
            "rollout": {"temperature": 0, "max_turns": 1, "max_new_tokens": 24, "subagents": {"max_new_tokens": 8}},
            "decoders": 1,
        }
        folder.mkdir(exist_ok=True)
        path = folder / "c.yaml"
        path.write_text(yaml.safe_dump(tree | changes))
        return path

    return make


def load(path: Path, *overrides: str) -> EvalConfig:
    return config.load(EvalConfig, path, overrides)


def run(path: Path, *overrides: str) -> int:
    return evaluation.main(load(path, *overrides))


@pytest.fixture
def model(monkeypatch):
    """model(reply): from now on runs are given a model that says `reply(prompt, seed)`; returns the list of engines."""

    def install(reply) -> list[Scripted]:
        opened = []

        def open_engine(source, renderer, **place):
            opened.append(Scripted(renderer, reply))
            return opened[-1]

        monkeypatch.setattr(evaluation, "open_engine", open_engine)
        return opened

    return install


def asked(engines: list[Scripted]) -> int:
    return sum(len(engine.asked) for engine in engines)


def says(text: str):
    return lambda prompt, seed: text + END_OF_TURN


def results_file(folder: Path, arm: str = "direct", k: int = 4) -> Path:
    return folder / "run" / f"toy-K{k}-{arm}.jsonl"


def found(path: Path) -> dict[str, tuple]:
    """Return the outcome of a run, without its seconds and the order in which items ended."""
    names = ("answer", "prediction", "score", "judged", "turns", "tokens", "error")
    return {r["id"]: tuple(r[name] for name in names) for r in read_results(path).records}


@pytest.fixture(scope="module")
def golds(toy_dir) -> Counter:
    return Counter(item.task.answer for item in load_split("toy", str(toy_dir)))


# ------------------------------------------------------------------------------------------------ a run


def test_an_item_leaves_a_line_with_what_was_said_and_seen(write, model, golds, tokenizer, tmp_path, capsys):
    (often, many), *rest = golds.most_common()
    other, few = rest[-1]
    calls = f"I look closer.\n</think>\n{CALL}{END_OF_TURN}"
    seen = f"A clip shows it.\n</think>\n<answer>{often}</answer>{END_OF_TURN}"
    unseen = f"No.\n</think>\n<answer>{other}</answer>{END_OF_TURN}"
    report = f"A flash.{END_OF_TURN}"

    def reply(prompt, seed):
        if is_subagent(prompt):
            return report
        return seen if "A flash." in prompt else calls if "crop_video" in prompt else unseen

    model(reply)
    run(write(prompting={"protocol": "agent"}, arms=["parallel", "none"]))
    with_tools, without = (read_results(results_file(tmp_path, arm)) for arm in ("parallel", "none"))
    assert len(with_tools.records) == len(without.records) == 8
    length = lambda *texts: sum(len(tokenizer.encode(text, add_special_tokens=False)) for text in texts)  # noqa: E731
    for record in with_tools.records:
        (call,) = record["calls"]
        assert (call["name"], call["error"], call["window"][0]) == ("crop_video", "", 0)
        assert call["window"][1] in DURATIONS and call["seconds"] > 0  # clamped to the video
        assert (record["turns"], record["tokens"]) == (2, length(calls, seen))
        assert record["agent_tokens"] == length(report) and not record["truncated"] and not record["error"]
        assert record["prediction"] == often and record["score"] == (record["gold"] == often)
        assert record["said"] == "<think>\n" + seen
        assert (record["fmt"], record["strict"]) == (1.0, 1.0)
    for record in without.records:
        assert (record["turns"], record["tokens"], record["calls"]) == (1, length(unseen), [])
        assert record["fmt"] == pytest.approx(0.3 + 0.2 + 0.1)  # the tags and their balance; "No." is no thought
    assert {*line("x", 1), "fmt", "strict"} == set(with_tools.records[0])  # the tables' tests stand on lines like these
    assert with_tools.figures()["accuracy"] == 100 * many / 8 and without.figures()["accuracy"] == 100 * few / 8
    shown = sections(capsys.readouterr().out)
    *row, score, average, gain = shown["Scores"][2]
    assert row == ["toy", "parallel", "strict", "4"] and score.startswith(f"{100 * many / 8:.1f} [")


def test_a_finished_run_asks_nothing_and_errors_are_asked_again(write, model, toy_dir, tmp_path):
    ids = [item.task.id for item in load_split("toy", str(toy_dir))]
    failing = {derive(derive(0, id), 0) for id in (ids[2], ids[5])}

    def broken(prompt, seed):
        if seed in failing:
            raise EngineError("gone")
        return "red" + END_OF_TURN

    path = write()
    model(broken)
    run(path)
    first = found(results_file(tmp_path))
    assert len(first) == 8 and {id for id, r in first.items() if r[-1]} == {ids[2], ids[5]}
    assert all(first[id] == (None, None, 0.0, False, 0, 0, "EngineError: gone") for id in (ids[2], ids[5]))
    engines = model(says("red"))
    run(path)
    assert asked(engines) == 2
    second = found(results_file(tmp_path))
    assert {r[1] for r in second.values()} == {"red"} and not any(r[-1] for r in second.values())
    run(path, "rollout.concurrency=1", "decoders=2", "rollout.urls=[http://127.0.0.1:9]")  # where is no setting
    assert len(engines) == 1  # not even opened


def test_results_of_other_settings_are_refused_and_the_setting_is_named(write, model, toy_dir, tmp_path):
    (tmp_path / "words.yaml").write_text('user: "{frames} {question}"')
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "videos").symlink_to(toy_dir / "videos")
    pq.write_table(pq.read_table(toy_dir / "test.parquet").take([1, 0, *range(2, 8)]), tmp_path / "data/test.parquet")
    shutil.copytree(toy_dir / "model", tmp_path / "trained")
    weights = tmp_path / "trained" / "model.safetensors"
    changed = bytearray(weights.read_bytes())
    changed[-1] ^= 1
    weights.write_bytes(changed)
    path = write()
    model(says("red"))
    run(path)
    results_file(tmp_path, k=8).write_bytes(results_file(tmp_path).read_bytes())  # as if it had been renamed
    for change, says_what in (
        ("limit=4", "items: 8, now 4"),
        (f"splits={{toy: {tmp_path}/data}}", "data: "),
        ("seed=1", "seed: 0, now 1"),
        ("name=other", "name: 'toy', now 'other'"),
        ("rollout.max_new_tokens=12", "(rollout.max_new_tokens: 24, now 12)"),
        ("grading={open_answer: f1}", "grading.open_answer: 'exact', now 'f1'"),
        (f"prompting.prompt_file={tmp_path}/words.yaml", "prompts: "),
        (f"checkpoint={tmp_path}/trained", "(weights: "),
        ("frames=[8]", "(k: 4, now 8)"),
    ):
        with pytest.raises(config.ConfigError, match="made under other settings") as error:
            run(path, change)
        assert says_what in str(error.value)


def test_what_a_tool_says_is_a_setting_only_where_tools_are_offered(write, tmp_path, monkeypatch):
    """A tool may ask its sub-agents in its own words. Past bug: a comment in tools.py ended runs without tools."""
    cfg = load(write(prompting={"protocol": "agent"}), "arms=[parallel, none]")
    cells = evaluation.cells_of(cfg)
    before = [evaluation.settings(cfg, cell, VisualContract(), "") for cell in cells]
    (tmp_path / "tools.py").write_text("# another one")
    monkeypatch.setattr(evaluation.tools, "__file__", tmp_path / "tools.py")
    after = [evaluation.settings(cfg, cell, VisualContract(), "") for cell in cells]
    assert before[0]["prompts"] != after[0]["prompts"] and before[1] == after[1]


def test_what_was_said_is_kept_to_its_last_2000_characters_in_one_line(write, model, tmp_path):
    """An item whose answer could not be read left no trace; separators of Unicode broke its line."""
    odd = "red\u2028blue\x85green\x0bend"
    model(says("I am sure. " * 300 + odd))
    path = write(prompting={"protocol": "think"}, rollout={"temperature": 0, "max_new_tokens": 4000})
    run(path)
    for record in read_results(results_file(tmp_path, "think")).records:
        assert (record["answer"], record["prediction"], record["error"]) == (None, None, "")
        assert len(record["said"]) == 2000 and record["said"].endswith("I am sure. " + odd + END_OF_TURN)
    run(path)


def test_a_run_killed_at_a_random_moment_ends_with_the_same_records(write, tmp_path):
    """With a real model in a real process. What it says is random, so that records differ and can be told apart."""
    rollout = {"temperature": 1.0, "max_new_tokens": 120, "concurrency": 1}
    run(write(tmp_path / "whole", rollout=rollout))
    cfg, file = write(rollout=rollout), results_file(tmp_path)
    lines = lambda: file.read_bytes().count(b"\n") if file.exists() else 0  # noqa: E731
    process = start("eval.py", cfg)
    wait_for(lambda: lines() >= 3, process)
    time.sleep(0.15 * random.random())
    assert process.poll() is None, process.communicate()[0]  # it was not done yet
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert 2 < lines() < 9
    run(cfg)
    expected = found(results_file(tmp_path / "whole"))
    assert found(file) == expected and len({r[1] for r in expected.values()}) == 8
    assert lines() == 9  # nothing was asked twice


def test_a_torn_last_line_costs_its_item_only_and_of_whole_episodes_each_is_kept_once(
    write, model, toy_dir, tokenizer, tmp_path
):
    ids = {item.task.id for item in load_split("toy", str(toy_dir))}
    look = f"I look closer.\n</think>\n{CALL}{END_OF_TURN}"
    answer = f"It is red.\n</think>\n<answer>red</answer>{END_OF_TURN}"
    path = write(prompting={"protocol": "agent"}, transcripts=True)
    file, episodes = results_file(tmp_path, "parallel"), tmp_path / "run" / "episodes" / "toy-K4-parallel.jsonl"
    reply = lambda prompt, seed: answer if "tool_response" in prompt or is_subagent(prompt) else look  # noqa: E731
    model(reply)
    run(path, "limit=5")
    for torn in (file, episodes):
        torn.write_bytes(torn.read_bytes()[:-30])
    assert len(read_results(file).records) == 4
    engines = model(reply)
    run(path)
    assert asked(engines) == 3 * 4 and len(found(file)) == 8  # two turns and a report of each of the other 4 items
    loaded, renderer = load_episodes(episodes), Renderer(tokenizer, VisualContract.load(toy_dir / "model"))
    assert len(loaded) == 8 and {episode.task.id for episode in loaded} == ids
    for episode in loaded:
        assert rewards.turn_texts(episode.main, renderer) == ["<think>\n" + look, "<think>\n" + answer]
        assert len(episode.calls) == 1 and episode.calls[0].agent and episode.k == 4
    shown = read_run(episodes, "eval", {}, 100, toy_dir / "model")
    assert not shown.notes and len(shown.steps[0]) == 8  # the report shows them, with their pictures


def test_a_run_of_a_few_items_is_no_whole_and_a_larger_limit_continues_it_in_the_hours_that_a_dry_run_names(
    write, model, tmp_path, capsys
):
    path = write()
    assert dry_run(load(path)) == 0 and "hours" not in capsys.readouterr().out
    first = model(says("red"))
    assert run(path, "limit=5") == 0 and asked(first) == 5
    assert re.search(r"\[\d+\.\d, \d+\.\d\] \(5 of 8\) +\|", capsys.readouterr().out)
    assert not read_results(results_file(tmp_path)).complete()
    hours = sum(record["seconds"] for record in read_results(results_file(tmp_path)).records) / 5 * 3 / 2 / 3600
    assert dry_run(load(path, "rollout.concurrency=2")) == 0
    assert f"; {hours:.2g} hours for the 3 left, if 2 at once go as fast as the 5 mea" in capsys.readouterr().out
    with pytest.raises(config.ConfigError, match="seed: 0, now 1"):
        run(path, "seed=1")
    rest = model(says("red"))
    assert run(path) == 0 and asked(rest) == 3
    results = read_results(results_file(tmp_path))
    assert results.complete() and results.settings["items"] == 8 and " of 8)" not in capsys.readouterr().out
    run(write(tmp_path / "all"))
    assert read_results(results_file(tmp_path / "all")).settings == results.settings
    assert found(results_file(tmp_path / "all")) == found(results_file(tmp_path))


# ------------------------------------------------------------------------------------------------ what fails


def test_a_run_in_which_every_item_failed_says_so_and_blocks_nothing(write, model, tmp_path, capsys):
    """It exited with 0, and its file was "made under other settings" when the setting had been corrected."""
    path, file = write(), results_file(tmp_path)
    model(says("red"))
    assert run(path, "rollout.max_context=40") == 1
    says_so = r"error: all 8 items of .*toy-K4-direct.jsonl failed; the last: .* fills max_context = 40"
    assert re.search(says_so, capsys.readouterr().err)
    assert run(path) == 0
    assert read_results(file).settings["rollout"]["max_context"] == 32768 and len(found(file)) == 8


@pytest.mark.parametrize("fault", ["no server", "no engine"])
def test_a_connection_that_fails_leaves_nothing(write, monkeypatch, tmp_path, fault):
    """A header was there already: the next try was told that it was "made under other settings"."""

    def gone(*arguments, **more):
        raise EngineError("gone")

    overrides = ["rollout.urls=[localhost:1]"] if fault == "no server" else []
    monkeypatch.setattr(evaluation, "open_engine", gone)
    with pytest.raises((config.ConfigError, EngineError), match="no server answers|gone"):
        run(write(), *overrides)
    assert not (tmp_path / "run").exists()


def test_a_video_that_cannot_be_read_costs_its_items_until_it_is_mended(write, model, toy_dir, tmp_path):
    """The sizes of all videos were a setting: to mend one video was to begin anew."""
    root = tmp_path / "data"
    (root / "videos").mkdir(parents=True)
    shutil.copy(toy_dir / "test.parquet", root)
    for video in toy_dir.glob("videos/test*.mp4"):
        (root / "videos" / video.name).symlink_to(video)
    bad = root / "videos" / "test00003.mp4"
    bad.unlink()
    bad.write_bytes(b"not a video")
    path = write(splits={"toy": str(root)})
    model(says("red"))
    run(path)
    results = read_results(results_file(tmp_path))
    (record,) = [r for r in results.records if r["error"]]
    assert tables.videos_of(record) == f"videos/{bad.name}"  # MMVU numbers its videos anew in every folder
    assert record["score"] == 0
    assert record["error"].startswith("VideoError: ")
    assert tables.costs(results)["error_rate"] == 12.5
    shutil.copy(toy_dir / "videos" / bad.name, bad)
    engines = model(says("red"))
    run(path)
    assert asked(engines) == 1 and not any(r[-1] for r in found(results_file(tmp_path)).values())


def test_a_judge_that_fails_is_an_error_and_no_verdict(write, model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(judge, "TRIES", 1)
    settings = {"open_answer": "judge", "judge": {"url": "http://127.0.0.1:1/v1", "model": "j"}}
    path = write(grading=settings)
    model(says("reddish"))
    run(path)
    for answer, prediction, score, judged, turns, _, error in found(results_file(tmp_path)).values():
        assert (answer, prediction, score, judged, turns) == ("reddish", None, 0.0, False, 1)
        assert error.startswith("JudgeError: http://127.0.0.1:1/v1: no answer after 1 tries")
    assert "(8 errors)" in capsys.readouterr().out
    there = Endpoint("Yes.")
    run(path, f"grading.judge.url={there.url}")  # where the judge runs is no setting
    there.shutdown()
    assert {r[1:4] for r in found(results_file(tmp_path)).values()} == {("reddish", 1.0, True)}


# ------------------------------------------------------------------------------------------------ one item


@pytest.fixture
def ask(toy_renderer, videos):
    """ask(item, k, protocol) -> its line of results, and the engine that was asked."""

    def ask_about(item: Item, k: int, protocol: str):
        engine = Scripted(toy_renderer, says("red"))
        cfg = EvalConfig(run="", name="", checkpoint="", splits={"toy": ""}, prompting=Prompting(protocol))
        stage = Stage(engine, toy_renderer, videos, RolloutConfig(temperature=0, max_turns=0))
        return evaluation.ask(item, k, stage, cfg), engine

    return ask_about


@pytest.mark.parametrize("protocol, k", [("agent", 4), ("think", 8), ("rewatch_r1", 1000), ("video_zoomer", 64)])
def test_the_prompt_holds_the_cues_of_the_shown_frames_and_no_others(ask, toy_dir, videos, protocol, k):
    task = load_split("toy", str(toy_dir))[0].task
    duration = round(videos.info(task.videos[0]).duration)
    cues = tuple(Cue(t, t + 0.3, f"cue{t}.") for t in range(0, duration, 3))  # some frames have one, some have none
    record, engine = ask(Item(task, cues), k, protocol)
    assert not record["error"]
    [request] = engine.asked
    times = [t for clip in request.frames for t in clip.times]
    expected = [cue.text for cue in cues if any(cue.start <= t <= cue.end for t in times)]
    assert re.findall(r"cue\d+\.", request.prompt) == expected
    assert expected and (len(expected) < len(cues) or protocol == "rewatch_r1")  # which is shown every frame


@pytest.mark.parametrize("lenient", [False, True])
def test_answers_without_a_tag_count_only_where_the_config_says_so(write, model, golds, tmp_path, lenient):
    color, count = golds.most_common(1)[0]
    model(says(f"I see it.\n</think>\nThe answer is {color}."))
    grading = {"open_answer": "exact", "untagged_answer": lenient}
    run(write(prompting={"protocol": "agent"}, arms=["none"], grading=grading))
    results = read_results(results_file(tmp_path, "none"))
    assert {r["prediction"] for r in results.records} == {f"{color}." if lenient else None}
    assert results.figures()["accuracy"] == (100 * count / 8 if lenient else 0)
    assert results.read("lenient").figures()["accuracy"] == 100 * count / 8  # which every record holds
    assert tables.costs(results)["unparsed_rate"] == (0 if lenient else 100)


# ------------------------------------------------------------------------------------------------ tables


def line(id, score, *, video="", **more) -> dict:
    """A line of results."""
    plain = {
        "id": id, "videos": [video or f"v/{id}.mp4"], "kind": "mcq", "gold": "A",
        "said": "A", "answer": "A", "prediction": "A", "score": float(score), "judged": False, "calls": [], "turns": 1, "tokens": 10,
        "agent_tokens": 0, "truncated": False, "seconds": 1.0, "error": "",
        "lenient": {"prediction": "A", "score": float(score), "judged": False},
    }  # fmt: skip
    return plain | more


def lines(scores: str) -> list[dict]:
    """A digit per item."""
    return [line(str(i), int(score)) for i, score in enumerate(scores)]


def write_results(folder, split, rows, *, name="toy", arm="parallel", k=64, total=0, **more) -> Path:
    settings = {"name": name, "split": split, "arm": arm, "k": k, "items": len(rows), "total": total or len(rows)}
    settings |= {"prompting": {"protocol": "agent", "prompt_file": ""}} | more
    folder.mkdir(exist_ok=True)
    path = folder / f"{split}-K{k}-{arm}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in (settings, *rows)))
    return path


def sections(text: str) -> dict[str, list[list[str]]]:
    """Title -> the table's rows of cells, header and rule included."""
    found = {}
    for part in re.split(r"^### ", text, flags=re.M)[1:]:
        title, _, body = part.partition("\n\n")
        rows = [row for row in body.splitlines() if row.startswith("|")]
        assert len({len(row) for row in rows}) == 1, f"{title}: columns are not aligned"
        found[title.partition(" (")[0]] = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]
    return found


def test_an_interval_is_the_binomials_and_as_wide_as_there_are_videos():
    ones, width = [1] * 300 + [0] * 700, 2 * 1.96 * math.sqrt(0.3 * 0.7 / 1000)
    low, high = interval(ones, [str(i) for i in range(1000)])
    assert high - low == pytest.approx(width, rel=0.1) and (low + high) / 2 == pytest.approx(0.3, abs=0.005)
    low, high = interval(ones, [str(i // 10) for i in range(1000)])  # ten questions a video, right or wrong together
    assert high - low == pytest.approx(width * math.sqrt(10), rel=0.15)
    assert interval([1, 0] * 50, [f"v{i // 2}" for i in range(100)]) == (0.5, 0.5)  # all videos are alike


def test_results_equal_to_the_published_ones_have_the_published_average_and_gains(tmp_path):
    """Charades has its own K, so that no row of a full run had all seven splits; other protocols had no baseline."""
    published = tables.read_published()["table"]
    arms = {"ParaVT-8B": "parallel", "Qwen3-VL-8B": "parallel", "Video-R1-7B": "video_r1"}
    for name, arm in arms.items():
        scores = tables.published_scores(name, published)
        for split, k in zip(published["columns"], published["frames"]):
            write_results(tmp_path / name, split, [line("0", scores[split] / 100)], name=name, arm=arm, k=k)
        write_results(tmp_path / name, "charades", lines("1"), name=name, arm=arm, k=64)  # asked at both
    shown = sections(tables.report([tmp_path / name for name in arms], baseline="Qwen3-VL-8B"))
    header, _, *rows = shown["Scores"]
    found = {(row[0], row[1], row[3]): row[-2:] for row in rows}
    for name, arm, average, gain in (
        ("ParaVT-8B", "parallel", "59.3", "+7.9 / +6.7 % (7)"),  # as on the project page
        ("Qwen3-VL-8B", "parallel", "55.6", "+0.0 / +0.0 % (7)"),
        ("Video-R1-7B", "video_r1", "52.3", "-5.5 / -5.9 % (7)"),
    ):
        assert found[name, arm, "64 (charades 32)"] == found[name, "published", "64 (charades 32)"] == [average, gain]
        assert found[name, arm, "64"] == ["", ""]  # its other Charades


def test_gains_are_over_what_both_have_finished(tmp_path):
    for name, first, second in (("ParaVT-8B", "1111110000", "1110000000"), ("Qwen3-VL-8B", "1111100000", "1100000000")):
        write_results(tmp_path / name, "videomme", lines(first), name=name)
        write_results(tmp_path / name, "lvbench", lines(second), name=name)
        write_results(tmp_path / name, "mlvu", lines(first), name=name, total=2175)  # not finished, so not compared
    told = tables.report([tmp_path / "ParaVT-8B", tmp_path / "Qwen3-VL-8B"], "Qwen3-VL-8B")
    ours = sections(told)["Scores"][2]
    assert ours[-1] == "+35.0 / +28.6 % (2)"  # the mean of +20 % and +50 %; 0.9 against 0.7


def test_a_score_says_what_is_missing_failed_or_published(tmp_path):
    rows = [*lines("110"), line("3", 0, error="EngineError: gone", prediction=None)]
    write_results(tmp_path, "videomme", rows, name="ParaVT-8B (mine)", total=2700)
    write_results(tmp_path, "lvbench", lines("1100"), name="ParaVT-8B (mine)")  # still a row of the table
    header, _, *scores = sections(tables.report([tmp_path]))["Scores"]
    by_split = [dict(zip(header, row)) for row in scores]
    assert re.fullmatch(r"50\.0 \[\d+\.\d, \d+\.\d\] \(4 of 2700, 1 errors\)", by_split[0]["videomme"])
    assert re.fullmatch(r"50\.0 \[\d+\.\d, \d+\.\d\]", by_split[0]["lvbench"])
    assert (by_split[-1]["arm"], by_split[-1]["videomme"], by_split[-1]["lvbench"]) == ("published", "62.1", "39.8")


def test_both_readings_stand_side_by_side_each_with_its_own_gain(tmp_path):
    """An untrained model that closes no tag scored 0, so that every gain over it was partly one of format."""
    read = lambda score: {"lenient": {"prediction": "A", "score": float(score), "judged": False}}  # noqa: E731
    base = [line(str(i), 0, prediction=None, **read(i < 5)) for i in range(10)]
    base[0] |= {"prediction": "A", "score": 1.0}
    write_results(tmp_path / "base", "videomme", base, name="Qwen3-VL-8B")
    write_results(tmp_path / "ours", "videomme", lines("1111110000"), name="ParaVT-8B")
    told = tables.report([tmp_path / "ours", tmp_path / "base"], "Qwen3-VL-8B")
    header, _, *rows = sections(told)["Scores"]
    column, gain = header.index("videomme"), len(header) - 1
    found = {(row[0], row[1], row[2]): (row[column][:4], row[gain]) for row in rows}
    assert found == {
        ("ParaVT-8B", "parallel", "strict"): ("60.0", "+500.0 / +500.0 % (1)"),
        ("ParaVT-8B", "parallel", "lenient"): ("60.0", "+20.0 / +20.0 % (1)"),
        ("ParaVT-8B", "published", "lenient"): ("62.1", "+7.9 / +6.7 % (7)"),
        ("Qwen3-VL-8B", "parallel", "strict"): ("10.0", "+0.0 / +0.0 % (1)"),
        ("Qwen3-VL-8B", "parallel", "lenient"): ("50.0", "+0.0 / +0.0 % (1)"),
        ("Qwen3-VL-8B", "published", "lenient"): ("59.9", "+0.0 / +0.0 % (7)"),
    }
    assert "The published numbers are lenient" in told
    for record in base:
        del record["lenient"]
    write_results(tmp_path / "base", "videomme", base, name="Qwen3-VL-8B")  # a file of an earlier version
    _, _, *rows = sections(tables.report([tmp_path / "base"]))["Scores"]
    assert [row[1:3] for row in rows] == [["parallel", "strict"], ["published", "lenient"]]


def test_mmvu_is_its_multiple_choice_questions_unless_a_judge_graded_the_others(tmp_path):
    rows = [*lines("1110"), line("4", 0, kind="oe"), line("5", 0, kind="oe")]
    for figures in ("mc_625 75.0", "mc_625 75.0, all_1000 66.7"):
        write_results(tmp_path, "mmvu", rows)
        found = sections(tables.report([tmp_path]))
        assert found["Scores"][2][4].startswith("75.0 [") and found["Per item"][2][-1] == figures
        rows[4] |= {"judged": True, "score": 1.0}


def test_costs_are_means_and_rates_over_all_items(tmp_path):
    rows = [line("a", 1), line("b", 0, prediction=None)]
    rows[0] |= {"calls": [{"error": ""}, {"error": "timeout"}], "tokens": 30, "seconds": 3.0, "truncated": True}
    assert tables.costs(read_results(write_results(tmp_path, "videomme", rows, total=2700))) == {
        "calls": 0.5, "failed_calls": 0.5, "turns": 1, "tokens": 20, "agent_tokens": 0, "seconds": 2,
        "error_rate": 0, "unparsed_rate": 50, "truncated_rate": 50, "fmt": 0, "strict": 0,
    }  # fmt: skip


def test_a_table_names_the_models_that_were_asked_in_our_words(tmp_path):
    """The remark was printed for every row, ours included."""

    def remark(protocol: str, prompt_file: str = "") -> bool:
        asked = {"protocol": protocol, "prompt_file": prompt_file}
        write_results(tmp_path, "lvbench", lines("10"), name="Video-R1-7B", arm=protocol, prompting=asked)
        return "in our words, not in their authors': Video-R1-7B." in tables.report([tmp_path])

    assert not remark("direct") and not remark("think") and not remark("agent")
    assert remark("video_r1")
    assert remark("video_thinker", "words.yaml")  # for the row before: the last arm of a name spoke for all of them
    assert not remark("video_r1", "words.yaml")


def test_shards_ask_every_item_once_and_the_table_joins_them_but_no_other_files_of_one_cell(
    write, model, toy_dir, tmp_path, capsys
):
    ids = [item.task.id for item in load_split("toy", str(toy_dir))]
    path, file = write(), tmp_path / "run" / "toy-K4-direct-1of3.jsonl"
    for shard, own in (("0/3", {0, 3, 6}), ("2/3", {2, 5}), ("1/3", {1, 4, 7})):
        engines = model(says("red"))
        run(path, f"shard={shard}")
        assert asked(engines) == len(own)
        assert found(file.with_stem(f"toy-K4-direct-{shard.replace('/', 'of')}")).keys() == {ids[i] for i in own}
        assert ("of 8)" in capsys.readouterr().out) == (shard != "1/3")  # then all are there
    model(says("red"))
    run(write(tmp_path / "whole"))
    [joined], [whole] = tables.collect([tmp_path / "run"]), tables.collect([tmp_path / "whole" / "run"])
    assert joined.complete() and len(joined.records) == 8 and joined.figures() == whole.figures()
    # What has the same items, or was asked in another way, does not join.
    for run_twice in ([tmp_path / "run"] * 2, [tmp_path / "run", tmp_path / "whole" / "run"]):
        same = r"are the same cell .* not two shards of a run \(both have the same items\)"
        with pytest.raises(TableError, match=same):
            tables.collect(run_twice)
    file.write_text(file.read_text().replace('"seed": 0', '"seed": 1'))
    with pytest.raises(TableError, match=r"not two shards of a run \(seed: 0, now 1\)"):
        tables.collect([tmp_path / "run"])
    with pytest.raises(config.ConfigError, match="no item of toy is in it"):
        run(path, "shard=2/3", "limit=2")


# ------------------------------------------------------------------------------------------------ configs

ROWS = {  # row -> its protocol in the published run, or the nearest that we have
    **dict.fromkeys(("paravt_8b", "qwen3vl_8b"), "agent"),
    **dict.fromkeys(("video_r1", "videorft", "videochat_r1", "time_r1", "rewatch_r1", "video_thinker"), "think"),
    **{name: name for name in ("conan", "longvt", "sage", "video_zoomer")},
    "qwen25vl_7b": "direct",
}
OWN = {  # as its authors ask: (protocol, K, tokens of a frame, temperature, new tokens per turn)
    "paravt_8b": ("agent", 64, 64, 0, 2048),
    "qwen3vl_8b": ("agent", 64, 64, 0, 2048),
    "video_r1": ("video_r1", 64, 256, 0, 1024),
    "videorft": ("video_r1", 32, 256, 0, 1024),
    "videochat_r1": ("videochat_r1", 32, 224, 0, 2048),
    "time_r1": ("time_r1", 64, 112, 0, 2048),
    "rewatch_r1": ("rewatch_r1", 192, 128, 0, 2048),
    "video_thinker": ("video_thinker", 64, 768, 0, 2048),
    "conan": ("conan", 16, 144, 1, 4000),
    "longvt": ("longvt", 512, 64, 0, 4096),
    "sage": ("sage", 128, 48, 0, 32768),
    "video_zoomer": ("video_zoomer", 64, 128, 0, 4096),
}
SHAPES = ((1920, 1080), (1080, 1920), (640, 480), (1280, 544), (1000, 1000), (320, 240))


def most_tokens(visual: VisualContract) -> int:
    return max(visual.frame_tokens(*visual.frame_size(*shape)) for shape in SHAPES)


def test_every_row_of_the_published_table_has_a_config():
    published = tables.read_published()["table"]["rows"]
    stems = {path.stem for path in CONFIGS.glob("*.yaml")} - {"base", "published", "toy"}
    assert stems == {*ROWS, "gpt4o", "gemini_15_pro"}
    assert {load(CONFIGS / f"{stem}.yaml").name for stem in stems} == {row["name"] for row in published}
    assert {path.stem for path in CONFIGS.glob("own/*.yaml")} == OWN.keys()


def differing(row: str, *overrides: str) -> list[str]:
    """What a dry run says of the config's keys; the rest is the same text for all configs of a row."""
    cfg = load(CONFIGS / f"{row}.yaml", *overrides)
    differs = tables.read_published()["differs"]
    told, fixed = evaluation.unlike_published(cfg), [*differs["open"], *differs[tables.row_of(cfg.name)]]
    assert told[-len(fixed) :] == fixed
    return told[: -len(fixed)]


@pytest.mark.parametrize("row", ROWS)
def test_a_row_is_asked_as_in_the_published_run_on_every_split_and_its_answers_have_room(row):
    assert differing(row) == []
    charades = ["splits={charades: x}", "frames=[32]"]
    assert differing(row, *charades, "visual.stamp=<{:.1f} seconds>") == []
    assert differing(row, *charades) == ["visual.stamp = '<{:.1f} seconds>', here '' (charades)"]
    cfg = load(CONFIGS / f"{row}.yaml")
    visual, agent = cfg.visual, cfg.rollout
    assert (cfg.prompting.protocol, cfg.frames, cfg.run) == (ROWS[row], (64,), f"runs/eval/{row}")
    assert visual.patch == (16 if cfg.agentic else 14) and len(agent.gpus) == 8
    assert agent.max_context > 64 * (most_tokens(visual) + 2) + 2 * agent.max_new_tokens


@pytest.mark.parametrize("row", OWN)
def test_in_own_a_row_is_asked_as_its_authors_ask_and_its_answers_have_room(row):
    cfg, released = load(CONFIGS / "own" / f"{row}.yaml"), load(CONFIGS / f"{row}.yaml")
    visual, agent, protocol = cfg.visual or VisualContract(), cfg.rollout, cfg.prompting.protocol
    tokens, rest = divmod(visual.max_frame_pixels or visual.frame_pixels, visual.cell**2)
    assert (protocol, *cfg.frames, tokens, agent.temperature, agent.max_new_tokens) == OWN[row]
    assert rest == 0 and visual.patch == released.visual.patch and visual.crop_frame_pixels is None
    assert (cfg.name, cfg.run) == (f"{released.name} (own)", f"runs/eval/own/{row}")
    assert (cfg.checkpoint, cfg.splits) == (released.checkpoint, released.splits)
    assert cfg.arms == (("parallel", "none") if cfg.agentic else ("parallel",))
    assert visual.max_frame_pixels is None or most_tokens(visual) <= tokens  # at most, as its authors say
    rounds, more, stamp = {
        "conan": (protocols.CONAN_TURNS, protocols.CONAN_FRAMES, 12),
        "longvt": (protocols.LONGVT_ROUNDS, protocols.LONGVT_FRAMES, 2),
    }.get(protocol, (0, 0, 12))
    frames = cfg.frames[0] + rounds * more
    assert agent.max_context > frames * (most_tokens(visual) + stamp) + (rounds + 1) * agent.max_new_tokens


def test_every_command_in_a_config_is_one_that_loads():
    commands = []
    for path in CONFIGS.rglob("*.yaml"):
        text = path.read_text().replace("\\\n#", "")  # a command goes on in the next line
        for command in re.findall(r"^#.*python eval\.py (configs/[^`\n]*)", text, re.M):
            file, *words = shlex.split(command.replace("ROW", "sage"), comments=True)
            commands.append(file)
            load(REPO / file, *(word for word in words if word != "--dry-run"))
    files = {str(path.relative_to(REPO)) for path in CONFIGS.rglob("*.yaml")}
    assert set(commands) == files - {"configs/eval/base.yaml", "configs/eval/published.yaml"}


def test_a_dry_run_names_every_key_that_is_not_the_published_runs_and_its_splits():
    both = "splits={mlvu: x, charades: y}"
    assert differing("video_r1", both, "visual.max_frame_pixels=200704") == [
        "visual.max_frame_pixels = 602112, here 200704 (mlvu, charades)",
        "visual.stamp = '<{:.1f} seconds>', here '' (charades)",
        "frames = [32], here [64] (charades)",
    ]
    for row, text in (
        ("own/paravt_8b", "visual.max_frame_pixels = 602112, here None (mlvu)"),  # `visual: null`: the checkpoint's own
        ("own/paravt_8b", "rollout.tool_return = 'frames', here 'subagent' (mlvu)"),
        ("own/time_r1", "prompting.protocol = 'think', here 'time_r1' (mlvu)"),
    ):
        assert text in differing(row, "splits={mlvu: x}")
    for row in ("gpt4o", "gemini_15_pro"):
        [text] = evaluation.unlike_published(load(CONFIGS / f"{row}.yaml"))
        assert "copied from leaderboards" in text
    assert evaluation.unlike_published(load(CONFIGS / "toy.yaml")) == []


@pytest.mark.parametrize("row", ["paravt_8b", "conan"])
def test_a_dry_run_names_all_that_is_missing(row, tmp_path, monkeypatch, capsys):
    cfg = load(CONFIGS / f"{row}.yaml")
    monkeypatch.chdir(tmp_path)
    assert dry_run(cfg) == 1
    told = capsys.readouterr().out
    assert f"ok      checkpoint: {cfg.checkpoint} is not here; the run would fetch it from the hub" in told
    for split, root in cfg.splits.items():
        assert f"MISSING {split}: {root}: no such folder" in told and f"--local-dir {root}`" in told
    assert ("our own words" in told) == (cfg.prompting.protocol != "agent")
    assert "note    the published run: frames are JPEGs" in told
    assert ("after 3 rounds the letter alone" in told) == (row == "paravt_8b") != ("in place of its clips" in told)


@pytest.fixture
def eight_gpus(monkeypatch):
    """This machine is a node for which the configs are written."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)


def test_a_dry_run_passes_what_could_start(toy_dir, eight_gpus, capsys):
    for row, override, told in (
        ("toy", f"checkpoint={toy_dir}/model", "ok      toy: 8 items, 80 episodes"),  # 5 K, with tools and without
        ("paravt_8b", "rollout.max_context=6528", "ok      toy: 8 items, 8 episodes"),  # 64 * (100 + 2), not more
        ("own/paravt_8b", "rollout.max_context=4736", "ok      toy: 8 items, 16 episodes"),  # 64 * (64 + 10), not more
    ):
        assert dry_run(load(CONFIGS / f"{row}.yaml", f"splits={{toy: {toy_dir}}}", override)) == 0
        assert told in capsys.readouterr().out


@pytest.mark.parametrize(
    "overrides, told",
    [
        (["visual={frame_pixels: 4096}"], "MISSING checkpoint: .*this run has 4096, the checkpoint 1024"),
        (["checkpoint=EMPTY"], "MISSING checkpoint: .* has no config.json"),
        (["rollout.gpus=[7, 8]"], r"MISSING servers: rollout.gpus = \[7, 8\]: there are 8 GPUs here"),
        (["rollout.gpus=[]", "rollout.urls=[localhost:9]"], "MISSING servers: no server answers at localhost:9"),
        (["rollout.max_context=703"], "MISSING toy: 64 frames of 11 tokens do not fit into rollout.max_context = 703"),
        (
            ["checkpoint=a/b", "visual={frame_pixels: 100352, max_frame_pixels: 602112}", "rollout.max_context=7039"],
            "MISSING toy: 64 frames of 110 tokens do not fit into rollout.max_context = 7039",
        ),
        (["splits={toy: EMPTY}"], r"MISSING toy: .*test00000\.mp4"),  # no video
    ],
)
def test_a_dry_run_fails_where_the_run_would(toy_dir, tmp_path, eight_gpus, overrides, told, capsys):
    usual = [f"checkpoint={toy_dir}/model", f"splits={{toy: {toy_dir}}}"]
    shutil.copy(toy_dir / "test.parquet", tmp_path)
    (tmp_path / "videos").mkdir()
    for video in toy_dir.glob("videos/test*.mp4"):
        (tmp_path / "videos" / video.name).write_text("milk")
    assert dry_run(load(CONFIGS / "own" / "paravt_8b.yaml", *usual)) == 0
    overrides = [text.replace("EMPTY", str(tmp_path)) for text in overrides]
    assert dry_run(load(CONFIGS / "own" / "paravt_8b.yaml", *usual, *overrides)) == 1
    assert re.search(told, capsys.readouterr().out)


@pytest.mark.parametrize(
    "changes, rule",
    [
        ({"frames": [0]}, "at least 1 frame"),
        ({"arms": ["none"]}, "only the protocol 'agent' has them"),
        ({"rollout": {"dispatch": "none"}}, "rollout.dispatch = 'none': here, `arms` says how"),
        ({"shard": "4/4"}, "shard = '4/4': write i/n with i from 0 to n - 1"),
        ({"shard": "1"}, "shard = '1': write i/n"),
        ({"api": {"url": "http://x"}}, "api: url = 'http://x': needs the name of a model"),
        (
            {"api": {"url": "http://x", "model": "m"}, "rollout": {"gpus": [0]}},
            "leave rollout.gpus and rollout.urls empty",
        ),
        ({"api": {"url": "http://x", "model": "m"}, "prompting": {}}, "an API cannot open a turn or stop at a tag"),
    ],
)
def test_what_cannot_run_says_so(write, changes, rule):
    with pytest.raises(config.ConfigError, match=rule):
        load(write(**changes))
