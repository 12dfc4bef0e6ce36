"""Evaluation: interrupted and failing runs end with the results of an undisturbed one. Tables are computed by hand."""

import contextlib
import importlib.util
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import evaluations
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from endpoint import Endpoint
from scripted import Scripted, is_subagent, load_episodes, turns
from scripts import REPO, Forked, finish, line, lines, sections, start, wait_for, write_results

import eval as evaluation
from episode import Task
from eval import EvalConfig, as_trained
from evals import rows, tables
from evals.benchmarks import SPLITS, Item, load_split
from evals.results import read_results, read_run, resume
from evals.tables import interval, per_item, rates
from rollout import derive_seed
from runtime import config
from runtime.dataset import DataError
from runtime.engine import EngineError
from runtime.folder import only_run_in
from runtime.open_engine import for_this_machine
from runtime.prompts import Prompts
from runtime.render import END_OF_TURN
from study.toy import DURATIONS

CALL = '<tool_call>\n{"name": "crop_video", "arguments": {"start_time": 0, "end_time": 1000}}\n</tool_call>'
CONFIGS = REPO / "configs" / "eval"
OURS = ("row=paravt_8b", "way=own")
refused = evaluations.refused  # a fixture


@pytest.fixture
def write(toy_dir, tmp_path):
    """write(key=value, ...) -> a config for the toy's 8 test items. Each is asked once; the whole reply is the answer."""

    def make(folder=tmp_path, **changes) -> Path:
        tree = {
            "run": str(folder / "run"),
            "name": "toy",
            "checkpoint": str(toy_dir / "model"),
            "splits": {"toy": str(toy_dir)},
            "frames": [4],
            "prompting": {"protocol": "direct"},
            "rollout": {"temperature": 0, "max_rounds": 1, "max_new_tokens": 24, "subagents": {"max_new_tokens": 8}},
            "decoders": 1,
        }
        tree["rollout"]["think_prefix"] = True
        folder.mkdir(exist_ok=True)
        path = folder / "c.yaml"
        path.write_text(yaml.safe_dump(tree | changes))
        return path

    return make


def load(path: Path, *overrides: str) -> EvalConfig:
    return rows.load(EvalConfig, path, overrides)


def run(path: Path, *overrides: str) -> int:
    return evaluation.main(load(path, *overrides))


@pytest.fixture
def model(monkeypatch):
    """model(reply): give all later runs a model that says `reply(prompt, seed)`. Returns the list of engines."""

    def install(reply) -> list[Scripted]:
        opened = []

        def open_engine(source, renderer, cfg, logs, api):
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


def outcomes(path: Path) -> dict[str, tuple]:
    """Return the outcome of a run without its seconds and the order of its lines."""
    names = ("answer", "prediction", "score", "judged", "turns", "tokens", "error")
    return {r["id"]: tuple(r[name] for name in names) for r in read_results(path).records}


@pytest.fixture(scope="module")
def golds(toy_dir) -> Counter:
    return Counter(item.task.answer for item in load_split("toy", str(toy_dir)))


# ------------------------------------------------------------------------------------------------ a run


def test_the_logs_of_its_servers_lie_below_the_run(write, tmp_path, monkeypatch):
    opened = []

    def open_engine(source, renderer, cfg, logs, api):
        opened.append(logs)
        raise EngineError("gone")

    monkeypatch.setattr(evaluation, "open_engine", open_engine)
    with pytest.raises(EngineError, match="gone"):
        run(write())
    assert opened == [tmp_path / "run" / "logs"]


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
        assert re.fullmatch(r"videos/test\d+\.mp4", "".join(record["videos"]))
        (call,) = record["calls"]
        assert (call["error"], call["window"][0]) == ("", 0)
        assert call["window"][1] in DURATIONS  # clamped to the video
        assert (record["turns"], record["tokens"]) == (2, length(calls, seen))
        assert record["subagent_tokens"] == length(report) and not record["truncated"] and not record["error"]
        assert record["prediction"] == often and record["score"] == (record["gold"] == often)
        assert record["said"] == "<think>\n" + seen
        assert (record["f"], record["well_formed"]) == (1.0, 1.0)
    for record in without.records:
        assert (record["turns"], record["tokens"], record["calls"]) == (1, length(unseen), [])
        assert record["f"] == pytest.approx(0.3 + 0.2 + 0.1)  # the tags and their balance; "No." is not a thought
    # The tests of the tables use lines like these.
    assert {*line("x", 1), "f", "well_formed"} == set(with_tools.records[0])
    assert with_tools.figures()["accuracy"] == 100 * many / 8 and without.figures()["accuracy"] == 100 * few / 8
    shown = sections(capsys.readouterr().out)
    assert shown["Scores"][2] == ["toy", "parallel", "100.0", f"{100 * many / 8:.1f}"]
    lost = f"{100 * few / 8:.1f}, {100 * (few - many) / 8:+.1f} ["  # over the first arm, not its own
    assert shown["Scores"][3][-1].startswith(lost)


def test_saved_episodes_are_all_of_the_run_and_the_page_shows_them(write, model, toy_dir, tmp_path):
    model(
        turns(
            f"I look closer.\n</think>\n{CALL}{END_OF_TURN}", f"It is red.\n</think>\n<answer>red</answer>{END_OF_TURN}"
        )
    )
    path = write(prompting={"protocol": "agent"}, limit=2)
    run(path)
    assert not (tmp_path / "run" / "episodes").exists()
    run(path, "limit=4", "save_episodes=true")  # the two others
    episodes = load_episodes(tmp_path / "run" / "episodes" / "toy-K4-parallel.jsonl")
    records = read_results(results_file(tmp_path, "parallel")).records
    assert {e.task.id: e.rewards["R_acc"] for e in episodes} == {r["id"]: r["score"] for r in records[2:]}
    page = pytest.importorskip("study.report").read_run_data(tmp_path / "run", {})
    assert [len(episode["calls"]) for episode in page.episodes] == [1, 1]


def test_the_agents_prompts_are_the_checkpoints_or_the_runs_and_a_mismatch_is_named(
    write, model, toy_dir, tmp_path, refused
):
    shutil.copytree(toy_dir / "model", tmp_path / "model")
    Prompts(system_without_tools="Answer in tags.").save(tmp_path / "model")
    engines = model(says("Hm.\n</think>\n<answer>red</answer>"))
    cfg = {"prompting": {"protocol": "agent"}, "arms": ["none"], "limit": 1, "checkpoint": str(tmp_path / "model")}
    run(write(**cfg))
    assert "Answer in tags." in engines[0].asked[0].prompt
    (tmp_path / "words.yaml").write_text("system_without_tools: Guess.")
    own = write(**cfg | {"prompts": str(tmp_path / "words.yaml"), "run": str(tmp_path / "other")})
    refused(load(own), r"with other prompts \(prompts.system_without_tools: 'Answer in tags.', now 'Guess.'\)")
    run(own, f"checkpoint={toy_dir}/model")
    assert "Guess." in engines[1].asked[0].prompt


def test_results_of_other_settings_or_weights_are_refused_and_the_setting_is_named(
    write, model, toy_dir, tmp_path, refused
):
    """Past bug: a retrained model that was asked the remaining splits shared its row with its predecessor."""
    shutil.copytree(toy_dir / "model", tmp_path / "trained")
    path = write(checkpoint=str(tmp_path / "trained"))
    engines = model(says("red"))
    run(path)
    for change, says_what in (
        ("seed=1", "seed: 0, now 1"),
        ("rollout.max_new_tokens=12", "rollout.max_new_tokens: 24, now 12"),
        (f"checkpoint={toy_dir}/model", "checkpoint: .*, now "),
    ):
        refused(load(path, change, "frames=[8]"), f"belongs to a run with other settings .{says_what}")
    weights = tmp_path / "trained" / "model.safetensors"
    before = weights.read_bytes()
    kept = len(before) * 3 // 4  # past bug: only the first MiB of a file was looked at
    weights.write_bytes(before[:kept] + bytes(byte ^ 1 for byte in before[kept:]))
    refused(load(path, "frames=[8]"), "checkpoint = '.*trained' has changed since .*run started from it: restore it")
    assert len(engines) == 1 and not results_file(tmp_path, k=8).exists()


def test_a_run_takes_more_splits_frames_arms_and_items(write, model, toy_dir, tmp_path):
    """Past bug: a larger limit asked every item anew."""
    engines = model(says("Hm.\n</think>\n<answer>red</answer>"))
    path = write(prompting={"protocol": "agent"}, arms=["none"], limit=2)
    for override, asked_in_all in (
        ("limit=2", 2),
        ("limit=3", 3),
        ("frames=[8]", 3 + 2),
        ("arms=[none, parallel]", 3 + 2 + 2),
        (f"splits={{charades: {toy_dir}}}", 3 + 2 + 2 + 2),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(SPLITS, "charades", SPLITS["toy"])  # the toy's questions under another name
            run(path, override)
        assert asked(engines) == asked_in_all
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["items"] == {"toy": 8, "charades": 8}  # sizes of all calls
    assert {file.total for file in read_run(tmp_path / "run").values()} == {8}


def test_what_was_said_is_kept_to_its_last_2000_characters_in_one_line(write, model, tmp_path):
    """Past bug: an item whose answer could not be read left no trace, and separators of Unicode broke its line."""
    odd = "red\u2028blue\x85green\x0bend"
    model(says("I am sure. " * 300 + odd))
    sampling = {"temperature": 0, "max_new_tokens": 4000}
    path = write(prompting={"protocol": "think"}, rollout=sampling, grading={"untagged_answer": "off"})
    run(path)
    for record in read_results(results_file(tmp_path, "think")).records:
        assert (record["answer"], record["prediction"], record["error"]) == (None, None, "")
        assert len(record["said"]) == 2000 and record["said"].endswith("I am sure. " + odd + END_OF_TURN)
    run(path)


@pytest.mark.slow
def test_a_run_killed_at_a_random_moment_ends_with_the_same_records(write, tmp_path):
    """A real model in a real process. Its replies are random, so that records differ."""
    rollout = {"temperature": 1.0, "max_new_tokens": 120, "concurrency": 1}
    run(write(tmp_path / "whole", rollout=rollout))
    cfg, file = write(rollout=rollout), results_file(tmp_path)
    lines = lambda: file.read_bytes().count(b"\n") if file.exists() else 0  # noqa: E731
    process = start("eval.py", cfg)
    wait_for(lambda: lines() >= 3, process)
    time.sleep(0.15 * random.random())
    assert process.poll() is None, process.communicate()[0]  # it had not finished yet
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert 2 < lines() < 8
    run(cfg)
    expected = outcomes(results_file(tmp_path / "whole"))
    assert outcomes(file) == expected and len({r[1] for r in expected.values()}) == 8
    assert lines() == 8  # nothing was asked twice


def test_items_of_torn_lines_and_errors_are_asked_again_and_leave_one_line(write, model, toy_dir, tokenizer, tmp_path):
    items = [item.task.id for item in load_split("toy", str(toy_dir))]
    look = f"I look closer.\n</think>\n{CALL}{END_OF_TURN}"
    answer = f"It is red.\n</think>\n<answer>red</answer>{END_OF_TURN}"
    path = write(prompting={"protocol": "agent"})
    file = results_file(tmp_path, "parallel")
    reply = lambda prompt, seed: answer if "tool_response" in prompt or is_subagent(prompt) else look  # noqa: E731
    failing = derive_seed(derive_seed(0, items[0]), 0)  # the first turn of the first item

    def broken(prompt, seed):
        if seed == failing:
            raise EngineError("gone")
        return reply(prompt, seed)

    model(broken)
    run(path, "limit=5", "rollout.concurrency=1")  # in sequence, so that the torn line is the fifth item's
    file.write_bytes(file.read_bytes()[:-30])
    assert len(outcomes(file)) == 4 and outcomes(file)[items[0]] == (None, None, 0.0, False, 0, 0, "EngineError: gone")
    engines = model(reply)
    run(path)
    run(path, "rollout.concurrency=2", "decoders=2", "rollout.urls=[http://127.0.0.1:9]")  # a place is not a setting
    assert len(engines) == 1  # no engine was opened
    assert asked(engines) == 3 * 5 and len(outcomes(file)) == 8  # two turns and a report of all but three items


def test_a_run_records_no_gpus_and_resumes_on_a_machine_with_others(write, model, tmp_path):
    """Past bug: config.yaml had the GPUs of the machine on which the run began."""
    model(says("red"))
    run(write(), "limit=2")
    file = tmp_path / "run" / "config.yaml"
    recorded = yaml.safe_load(file.read_text())
    assert recorded["rollout"]["server_gpus"] is None and recorded["rollout"]["concurrency"] is None
    recorded["rollout"] |= {"server_gpus": [0, 1], "concurrency": 64}  # as an older version wrote it
    file.write_text(yaml.safe_dump(recorded))
    run(write())
    assert len(outcomes(results_file(tmp_path))) == 8


def test_an_answer_to_another_question_is_not_kept(write, model, toy_dir, tmp_path):
    """Past bug: a split whose folder had changed under equal ids kept its old answers."""
    split = tmp_path / "split"
    shutil.copytree(toy_dir, split)
    path = write(splits={"toy": str(split)})
    model(says("red"))
    run(path)
    before = outcomes(results_file(tmp_path))

    # The first item has another gold answer, the sixth had failed, and the last one is gone.
    rows = pq.read_table(split / "test.parquet").to_pylist()
    first, sixth, last = (json.loads(rows[i]["extra_info"]) for i in (0, 5, -1))
    rows[0]["extra_info"] = json.dumps(first | {"answer": "violet"})
    pq.write_table(pa.Table.from_pylist(rows[:-1]), split / "test.parquet")
    file = results_file(tmp_path)
    records = [json.loads(line) for line in file.read_text().splitlines()]
    for record in records:
        record["error"] = "EngineError: gone" if record["id"] == sixth["id"] else ""
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    engines = model(says("violet"))
    run(path, "limit=3")
    assert asked(engines) == 1
    assert outcomes(file).keys() == before.keys()  # the others lie beyond the limit
    engines = model(says("red"))
    run(path)
    assert asked(engines) == 1  # the sixth, which lay beyond the limit
    now = outcomes(file)
    assert before.keys() - now.keys() == {last["id"]}
    assert now.pop(first["id"])[0] == "violet" and now.items() <= before.items()


@pytest.mark.parametrize(
    "whole, kept, dropped, left",
    [
        (True, ["a"], 3, ["b", "c", "d"]),
        (False, ["a", "e"], 2, ["b", "c", "d"]),  # e lies beyond the limit
    ],
)
def test_a_file_resumes_with_the_records_whose_items_are_the_same_and_ran(tmp_path, whole, kept, dropped, left):
    items = [Item(Task(id, "Which?", (), "mcq", "A")) for id in "abcd"]
    rows = [line("a", 1), line("b", 0, error="EngineError: gone"), line("c", 1, gold="B"), line("e", 1)]
    records, n_dropped, asked = resume(write_results(tmp_path, "toy", rows), items, whole)
    assert ([record["id"] for record in records], n_dropped, [item.task.id for item in asked]) == (kept, dropped, left)
    assert resume(tmp_path / "toy-K4-none.jsonl", items, whole) == ([], 0, items)


# ------------------------------------------------------------------------------------------------ what fails


def test_a_run_in_which_every_item_failed_says_so(write, model, tmp_path, capsys):
    """Past bug: it exited with 0."""
    path = write()
    model(says("red"))
    assert run(path, "rollout.max_context=40") == 1
    says_so = r"error: all 8 items of .*toy-K4-direct.jsonl failed; the last error: .* fills max_context = 40"
    assert re.search(says_so, capsys.readouterr().err)


def test_two_evaluations_in_one_folder_ask_nothing_twice(write, model, tmp_path, monkeypatch):
    """Past bug: both asked (and paid for) every item, and one of them printed a wrong figure."""
    path, engines = write(), model(says("red"))
    with (
        only_run_in(tmp_path / "run"),
        pytest.raises(config.ConfigError, match="is using this folder; wait, or choose another"),
    ):
        run(path)

    def overtaken(*given, **more):
        monkeypatch.setattr(evaluation, "open_engine", plain)
        with monkeypatch.context() as patch:
            patch.setattr(evaluation, "hold_folder", lambda cfg, folder: contextlib.nullcontext())
            run(path)
        return plain(*given, **more)

    plain = evaluation.open_engine
    monkeypatch.setattr(evaluation, "open_engine", overtaken)
    run(path)
    assert asked(engines) == 8 == len(outcomes(results_file(tmp_path)))


def test_a_connection_that_fails_leaves_no_results(write, monkeypatch, tmp_path):
    """Past bug: the next try was refused as "made under other settings"."""

    def gone(*arguments, **more):
        raise EngineError("gone")

    monkeypatch.setattr(evaluation, "open_engine", gone)
    with pytest.raises(EngineError):
        run(write())
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]


def test_a_judge_that_fails_is_an_error_and_no_verdict(write, model, tmp_path):
    there = Endpoint("Yes.", (401, {}, {"error": "gone"}))
    path = write(grading={"open_answer": "judge", "judge": {"url": there.url, "model": "j"}})
    model(says("reddish"))
    run(path)
    there.shutdown()
    for answer, prediction, score, judged, *_, error in outcomes(results_file(tmp_path)).values():
        assert (answer, prediction, score, judged) == ("reddish", None, 0.0, False)
        assert error.startswith(f"JudgeError: EngineError: {there.url}: status 401")
    there = Endpoint("Yes.")
    run(path, f"grading.judge.url={there.url}")  # the judge's URL is not a setting
    there.shutdown()
    assert {r[1:4] for r in outcomes(results_file(tmp_path)).values()} == {("reddish", 1.0, True)}


@pytest.mark.parametrize("mode, prediction", [("off", None), ("prose", "{}.")])
def test_answers_without_a_tag_count_only_where_the_config_says_so(write, model, golds, tmp_path, mode, prediction):
    color, count = golds.most_common(1)[0]
    model(says(f"I see it.\n</think>\nThe answer is {color}."))
    grading = {"open_answer": "exact", "untagged_answer": mode}
    run(write(prompting={"protocol": "agent"}, arms=["none"], grading=grading))
    results = read_results(results_file(tmp_path, "none"))
    assert {r["prediction"] for r in results.records} == {prediction and prediction.format(color)}
    assert results.figures()["accuracy"] == (100 * count / 8 if prediction else 0)
    assert rates(results.records)["unparsed_rate"] == (0 if prediction else 100)
    assert not any(record["tagged"] for record in results.records)


# ------------------------------------------------------------------------------------------------ tables


def test_an_interval_is_the_binomials_and_as_wide_as_there_are_videos():
    ones, width = [1] * 300 + [0] * 700, 2 * 1.96 * math.sqrt(0.3 * 0.7 / 1000)
    low, high = interval(ones, [str(i) for i in range(1000)])
    assert high - low == pytest.approx(width, rel=0.1) and (low + high) / 2 == pytest.approx(0.3, abs=0.005)
    low, high = interval(ones, [str(i // 10) for i in range(1000)])  # ten questions a video, right or wrong together
    assert high - low == pytest.approx(width * math.sqrt(10), rel=0.15)
    assert interval([1, 0] * 50, [f"v{i // 2}" for i in range(100)]) == (0.5, 0.5)  # no spread between videos
    assert str(interval([1, 1, 1], ["v"] * 3)) == "(nan, nan)"  # one video gives no interval


def test_the_published_scores_have_the_published_average(tmp_path):
    """Past bug: Charades has its own K, so no row of a full run had all splits. Its run has the row's name."""
    published = tables.read_published()["table"]
    for name, arm, average in (
        ("ParaVT-8B", "parallel", "59.3"),  # as on the project page
        ("Qwen3-VL-8B", "parallel", "55.6"),
        ("Video-R1-7B", "think", "52.3"),
    ):
        scores = tables.published_scores(name, published)
        for split, k in zip(published["columns"], published["frames"]):
            folder = tmp_path / (f"{name}-charades" if split == "charades" else name)
            write_results(folder, split, [line("0", scores[split] / 100)], name=name, arm=arm, k=k)
        write_results(tmp_path / name, "charades", lines("1"), name=name, arm=arm, k=64)  # asked at both
        header, _, *rows = sections(tables.all_tables([tmp_path / name, tmp_path / f"{name}-charades"]))["Scores"]
        rows = [dict(zip(header, row)) for row in rows]
        assert [row["average"] for row in rows if (row["arm"], row["K"]) == (arm, "32, 64")] == [average]
        assert [row["average"] for row in rows if row["arm"] == "published"] == [average]
        assert [row["charades"][:5] for row in rows if (row["arm"], row["K"]) == (arm, "64")] == ["100.0"]


def test_a_score_says_what_is_missing_or_published(tmp_path):
    rows = [*lines("110"), line("3", 0, error="EngineError: gone", prediction=None)]
    write_results(tmp_path, "lvbench", lines("1100"), name="ParaVT-8B (mine)")  # still the row of ParaVT-8B
    write_results(tmp_path, "videomme", rows, name="ParaVT-8B (mine)", total=2700)
    header, _, *scores = sections(tables.all_tables([tmp_path]))["Scores"]
    assert header == ["model", "arm", "tagged", "videomme", "lvbench"]  # in the paper's order, not in that of the files
    assert scores == [
        ["ParaVT-8B (mine)", "parallel", "100.0", "50.0 (4 of 2700)", "50.0"],
        ["ParaVT-8B (mine)", "published", "", "", "39.8"],
    ]


def test_a_table_leaves_out_its_empty_columns(tmp_path):
    """Past bug: without all splits of the paper, the table had a column `average` with nothing in it."""
    rows = [{"a": "1", "b": "", "c": 0}, {"a": "", "b": None}]
    assert tables.markdown("t", ["a", "b", "c"], rows).splitlines()[2] == "| a | c |"
    assert tables.markdown("t", ["a", "b"], []).splitlines()[2] == "| a | b |"
    write_results(tmp_path, "lvbench", lines("1100"), name="mine")
    assert sections(tables.all_tables([tmp_path]))["Scores"][0] == ["model", "arm", "tagged", "lvbench"]


def test_a_gain_is_over_the_items_of_both_and_beside_no_published_figure(tmp_path):
    """Past bug: with limit=20 there was none, but the published scores of all 2700 items stood beside the 20."""
    ours = [line(f"{v}-{n}", v < 6, video=f"v/{v}.mp4") for v in range(7) for n in range(3)][:20]
    base = [row | {"score": float(i % 2)} for i, row in enumerate(ours)]
    write_results(tmp_path / "a", "videomme", ours, name="ParaVT-8B", total=2700)
    write_results(tmp_path / "b", "videomme", base[1:19], name="Qwen3-VL-8B", total=2700)
    _, _, *rows = sections(tables.all_tables([tmp_path / "a", tmp_path / "b"], "Qwen3-VL-8B"))["Scores"]
    assert [row[:2] for row in rows] == [["ParaVT-8B", "parallel"], ["Qwen3-VL-8B", "parallel"]]
    assert rows[1][3] == "50.0 (18 of 2700)"
    # Of items 1 to 18, ours has 17 and the base 9 (the odd ones).
    gain, low, high = re.fullmatch(r"90\.0 \(20 of 2700\), (\S+) \[(\S+), (\S+)\]", rows[0][3]).groups()
    assert gain == "+44.4"
    # All 7 ** 7 draws of 7 videos: two items of the first, one of the last, three of the others.
    sums, counts = np.array([2, 3, 3, 3, 3, 3, 0]) - [1, 2, 1, 2, 1, 2, 0], np.array([2, 3, 3, 3, 3, 3, 1])
    draws = np.array(np.meshgrid(*[np.arange(7)] * 7)).reshape(7, -1)
    exact = np.quantile(100 * sums[draws].sum(0) / counts[draws].sum(0), [0.025, 0.975])
    assert [float(low), float(high)] == pytest.approx(exact, abs=3)


def test_a_gain_over_one_video_has_no_interval(tmp_path):
    """Past bug: `limit=2` printed [nan, nan]."""
    for name, scores in (("a", (1, 1)), ("b", (1, 0))):
        write_results(tmp_path / name, "lvbench", [line(str(i), s, video="v") for i, s in enumerate(scores)], name=name)
    assert sections(tables.all_tables([tmp_path / "b", tmp_path / "a"]))["Scores"][3][3] == "100.0, +50.0"


def test_a_gain_is_over_the_same_number_of_frames_or_else_over_the_baselines_first_row(tmp_path):
    """Past bug: a model that is asked with its own K had no gain at all."""
    write_results(tmp_path / "a", "videomme", lines("11"), name="Conan-7B (own)", arm="conan", k=16)
    for k, base, gain in ((64, "10", "+50.0"), (16, "00", "+100.0")):
        write_results(tmp_path / "b", "videomme", lines(base), name="Qwen3-VL-8B (own)", k=k)
        found = sections(tables.all_tables([tmp_path / "a", tmp_path / "b"], "Qwen3-VL-8B (own)"))["Scores"]
        [cell] = [row[4] for row in found if row[:3] == ["Conan-7B (own)", "conan", "16"]]
        assert cell.startswith(f"100.0, {gain} [")


def test_results_of_an_older_version_are_refused_with_one_sentence(write, model, tmp_path, refused):
    model(says("red"))
    run(write())
    file = results_file(tmp_path)
    file.write_text('{"name": "toy", "split": "toy", "weights": "abc", "total": 8}\n' + file.read_text())
    refused(load(write()), "line 1 is no result of this version of the code: delete the folder")


def test_scores_are_broken_down_by_a_field_of_the_rows(tmp_path):
    rows = [line(str(i), int(score), duration=size) for i, (score, size) in enumerate(zip("1101", "sslz"))]
    write_results(tmp_path, "videomme", [*rows, line("4", 1)], total=2700)  # the last has none
    found = sections(tables.all_tables([tmp_path], by="duration"))["By duration"]
    assert [row[4:] for row in found[2:]] == [["l", "1", "0.0"], ["s", "2", "100.0"], ["z", "1", "100.0"]]
    with pytest.raises(DataError, match="--by topic: no record has that field"):
        tables.all_tables([tmp_path], by="topic")


def test_a_damaged_line_is_named(tmp_path):
    for damage in ('{"id": "0", "sc', ""):
        path = write_results(tmp_path, "lvbench", lines("10"))
        first, second = path.read_text().splitlines()
        path.write_text(f"{first}\n{damage}\n{second}\n")
        with pytest.raises(config.UserError, match="lvbench-K64-parallel.jsonl: line 2 is damaged: delete it"):
            tables.all_tables([tmp_path])


def test_a_baseline_that_is_not_there_is_refused_with_the_nearest_name(tmp_path):
    """Past bug: the column of gains was empty without a message."""
    for name in ("ParaVT-8B (own)", "Qwen3-VL-8B (own)"):
        write_results(tmp_path / name, "lvbench", lines("1"), name=name)
    with pytest.raises(DataError, match=r"--baseline 'Qwen3-VL-8B': .* did you mean Qwen3-VL-8B \(own\)\?"):
        tables.all_tables(list(tmp_path.iterdir()), "Qwen3-VL-8B")


def test_answers_in_prose_count_and_the_table_says_how_many_are_in_tags(tmp_path):
    base = [line(str(i), i < 5, tagged=i < 1) for i in range(10)]
    write_results(tmp_path / "base", "videomme", base, name="Qwen3-VL-8B")
    write_results(tmp_path / "ours", "videomme", lines("1111110000"), name="ParaVT-8B")
    for folder, name in (("ours", "ParaVT-8B"), ("base", "Qwen3-VL-8B")):
        write_results(tmp_path / folder, "mlvu", [line("0", 1)], name=name, total=2175)  # unfinished
    told = tables.all_tables([tmp_path / "ours", tmp_path / "base"], "Qwen3-VL-8B")
    header, _, *rows = sections(told)["Scores"]
    assert header == ["model", "arm", "tagged", "videomme", "mlvu"]
    assert [row[:4] for row in rows[1:]] == [
        ["ParaVT-8B", "published", "", "62.1"],
        ["Qwen3-VL-8B", "parallel", "18.2", "50.0"],  # 2 of 11
        ["Qwen3-VL-8B", "published", "", "59.9"],
    ]
    assert rows[0][2] == "100.0" and rows[0][3].startswith("60.0, +10.0 [") and not rows[1][4]


def test_mmvu_is_its_multiple_choice_unless_a_judge_graded_the_others(tmp_path):
    rows = [*lines("1110"), line("4", 0, kind="oe"), line("5", 0, kind="oe")]
    for figures in ("mc_625 75.0", "mc_625 75.0, all_1000 66.7"):
        write_results(tmp_path, "mmvu", rows)
        found = sections(tables.all_tables([tmp_path]))
        assert found["Scores"][2][3] == "75.0" and found["Figures"][2][5] == figures
        rows[4] |= {"judged": True, "score": 1.0}


def test_costs_and_rates_are_means_over_all_items(tmp_path):
    rows = [line("a", 1), line("b", 0, prediction=None)]
    rows[0] |= {"calls": [{"error": ""}, {"error": "timeout"}], "tokens": 30, "seconds": 3.0, "truncated": True}
    rows[0] |= {"subagent_tokens": 9, "critical_tokens": 36}
    results = read_results(write_results(tmp_path, "videomme", rows, total=2700))
    assert rates(results.records) == {"error_rate": 0, "refused_rate": 0, "unparsed_rate": 50, "truncated_rate": 50}
    means = per_item(results.records)
    assert math.isnan(means.pop("f")) and math.isnan(means.pop("well_formed"))  # of our own agent only
    assert means == {
        "calls": 0.5, "tool_usage_rate": 50, "failed_calls": 0.5, "turns": 1, "tokens": 20, "subagent_tokens": 4.5,
        "critical_tokens": 23, "seconds": 2,
    }  # fmt: skip


def test_the_format_is_a_mean_over_all_items_of_our_own_agent(tmp_path):
    """A failed item has no format and counts 0. Models of other authors have an empty cell."""
    ours = [line("a", 1, f=1.0, well_formed=1.0), line("b", 1, f=0.5, well_formed=0.0)]
    ours += [line("c", 0, error="EngineError: gone"), line("d", 0, error="EngineError: gone")]
    write_results(tmp_path / "theirs", "videomme", lines("10"), name="theirs", arm="think")
    write_results(tmp_path / "ours", "videomme", ours, name="ours")
    header, _, *rows = sections(tables.all_tables([tmp_path / "theirs", tmp_path / "ours"]))["Per item"]
    columns = [header.index("f"), header.index("well_formed")]
    assert [[row[0], *(row[i] for i in columns)] for row in rows] == [["theirs", "", ""], ["ours", "0.38", "0.25"]]


def test_records_of_an_older_version_have_no_critical_tokens_and_a_table(tmp_path):
    rows = [line("a", 1), line("b", 0)]
    del rows[0]["critical_tokens"]
    write_results(tmp_path, "videomme", rows, total=2700)
    header, _, cells = sections(tables.all_tables([tmp_path]))["Per item"]
    assert "critical_tokens" not in header and cells[header.index("tokens")] == "10.00"


def test_results_that_make_no_table_are_refused(tmp_path):
    write_results(tmp_path / "a", "lvbench", lines("1"))
    write_results(tmp_path / "b", "lvbench", lines("0"))
    with pytest.raises(DataError, match="a/lvbench-K64-parallel.jsonl and .* fill the same cell of the table"):
        tables.all_tables([tmp_path / "a", tmp_path / "b"])
    with pytest.raises(DataError, match="no results in .*/c: run `python eval.py CONFIG` first"):
        tables.all_tables([tmp_path / "c"])


@pytest.mark.slow
def test_output_that_nobody_reads_to_its_end_stops_in_silence(tmp_path):
    """Past bug: `python eval.py table RUN | head` ended with a BrokenPipeError."""
    write_results(tmp_path, "lvbench", lines("1"))
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, str(REPO / "eval.py"), "table", "."]
    ended = subprocess.run(command, cwd=tmp_path, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert ended.stderr == ""


@pytest.mark.slow
def test_the_exit_status_of_a_table_reaches_the_shell():
    ended = subprocess.run([sys.executable, "eval.py", "table", "nowhere"], cwd=REPO, capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr == "error: no results in nowhere: run `python eval.py CONFIG` first\n"


# ------------------------------------------------------------------------------------------------ configs


def two_gpus_with_sglang_and_three_cores() -> None:
    sys.modules.pop("eval", None)
    torch.cuda.device_count, os.cpu_count = lambda: 2, lambda: 3
    importlib.util.find_spec = lambda name: name
    from eval import EvalConfig

    for words in ("rows row=paravt_8b", "rows row=paravt_8b way=own", "rows row=gpt4o", "toy"):
        name, *overrides = words.split()
        cfg = rows.load(EvalConfig, f"configs/eval/{name}.yaml", overrides)
        rollout = for_this_machine(cfg.rollout)
        print(rollout.server_gpus, rollout.at_once, cfg.decoders)


@pytest.mark.slow
def test_a_row_takes_the_gpus_and_cores_of_its_machine():
    """Past bug: rows were written for 8 GPUs and refused on other machines."""
    cfg = load(CONFIGS / "rows.yaml", *OURS)
    assert (for_this_machine(cfg.rollout).server_gpus, cfg.decoders) == ((), os.cpu_count())  # without SGLang
    # Published frames are large. For GPT-4o, the number of concurrent requests counts.
    told = finish(Forked(two_gpus_with_sglang_and_three_cores))
    assert told == "(0, 1) 64 3\n(0, 1) 256 3\n() 8 3\n() 32 1\n"


def test_a_model_opens_its_turns_as_it_was_trained_to_unless_the_config_says_otherwise(tmp_path):
    asked = load(CONFIGS / "trained.yaml").rollout
    assert as_trained(asked, tmp_path).think_prefix is False  # a checkpoint without a record
    (tmp_path / "rollout.json").write_text('{"think_prefix": true}')
    assert as_trained(asked, tmp_path).think_prefix is True
    assert as_trained(replace(asked, think_prefix=False), tmp_path).think_prefix is False


def test_a_dry_run_refuses_what_the_run_would(toy_dir, capsys, refused):
    usual = [f"checkpoint={toy_dir}/model", f"splits={{toy: {toy_dir}}}", "rollout.server_gpus=[]"]
    evaluation.main(load(CONFIGS / "rows.yaml", *OURS, *usual), dry=True)
    assert "toy: 8 items, 16 episodes" in capsys.readouterr().out  # with tools and without
    for override, rule in (
        ("visual={frame_pixels: 4096}", "this run has 4096, the checkpoint 1024"),
        ("rollout.urls=[localhost:9]", "no server answers at localhost:9"),
    ):
        refused(load(CONFIGS / "rows.yaml", *OURS, *usual, override), rule)


def test_all_missing_splits_are_one_fault_and_a_dry_run_downloads_nothing(write, refused, capsys):
    refused(
        load(write(), "splits={toy: nowhere, mlvu: gone}"),
        "^toy: nowhere: no file test.parquet.*\nmlvu: gone: no file test-",
    )
    refused(load(write(), "checkpoint=runs/sft_8b/model"), "runs/sft_8b/model: neither a folder nor a model on the hub")
    refused(load(write(), "checkpoint=tests/model"), "tests/model: neither a folder")  # tests/ is here, so it is a path
    evaluation.main(load(write(), "checkpoint=Somebody/Else"), dry=True)
    assert "note    checkpoint: Somebody/Else was not looked up; the run fetches it" in capsys.readouterr().out


def test_another_family_is_not_answered_by_random_weights(write, toy_dir, tmp_path, refused):
    """Past bug: without SGLang, another family was loaded into a Qwen3-VL with "newly initialized" layers."""
    shutil.copytree(toy_dir / "model", tmp_path / "other")
    (tmp_path / "other" / "config.json").write_text('{"model_type": "qwen2_vl"}')
    cfg = load(write(), f"checkpoint={tmp_path}/other")
    refused(cfg, "runs qwen3_vl and qwen2_5_vl, not 'qwen2_vl'; install SGLang, or set")
    cfg = replace(cfg, rollout=replace(cfg.rollout, urls=("localhost:9",)))
    refused(cfg, "no server answers at")  # a server may support it


def test_a_model_of_others_may_have_another_template_but_the_run_says_so(write, toy_dir, tmp_path, refused, capsys):
    shutil.copytree(toy_dir / "model", tmp_path / "other")
    template = tmp_path / "other" / "chat_template.jinja"
    template.write_text(template.read_text().replace("assistant\\n' if", "assistant\\n<think>\\n' if"))
    cfg = load(write(), f"checkpoint={tmp_path}/other", "limit=1", "rollout.max_new_tokens=4")
    for dry in (True, False):
        assert not evaluation.main(cfg, dry)
        assert f"  note    {tmp_path}/other: its chat template does not continue a dialogue" in capsys.readouterr().out
    agent = load(write(), f"checkpoint={tmp_path}/other", "prompting.protocol=agent", f"run={tmp_path}/agent")
    refused(agent, "its chat template does not continue a dialogue as rollouts do")


def test_what_cannot_run_says_so(write):
    api = {"url": "http://x", "model": "m"}
    for changes, rule in (
        ({"arms": ["none"]}, "only the protocol 'agent' has arms; leave the default"),
        ({"frames": []}, "frames and arms: each needs at least one value"),
        ({"rollout": {"dispatch": "none"}}, "rollout.dispatch = 'none': set `arms` instead"),
        ({"frames": [0]}, "an overview has at least 1 frame"),
        ({"api": api, "prompting": {}}, "an API cannot open a turn or stop at a tag"),
    ):
        with pytest.raises(config.ConfigError, match=rule):
            load(write(**changes))
