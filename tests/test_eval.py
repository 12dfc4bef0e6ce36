"""Evaluation: interrupted and failing runs end with the results of an undisturbed one. test_tables.py has the tables."""

import json
import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import evaluations
import pytest
from endpoint import Endpoint
from evaluations import line, write_eval_config
from scripted import Scripted, crop, is_subagent, load_episodes, turns
from scripts import REPO

import eval as evaluation
from eval import EvalConfig, as_trained
from evals import protocols, rows
from evals.benchmarks import SPLITS, load_split
from evals.results import read_results, read_run
from evals.tables import rates
from rollout import derive_seed
from runtime import config
from runtime.engine import EngineError
from runtime.folder import hold_folder, only_run_in
from runtime.render import END_OF_TURN

CONFIGS = REPO / "configs" / "eval"
refused = evaluations.refused  # a fixture
LOOK = f"I look closer.\n</think>\n{crop(0, 1000)}{END_OF_TURN}"
RED = f"It is red.\n</think>\n<answer>red</answer>{END_OF_TURN}"


@pytest.fixture
def write(toy_dir, tmp_path):
    """write(key=value, ...) -> a config of evaluations.write_eval_config."""
    return lambda folder=tmp_path, **changes: write_eval_config(folder, toy_dir, **changes)


def load(path: Path, *overrides: str) -> EvalConfig:
    return rows.load(EvalConfig, path, overrides)


def run(path: Path, *overrides: str) -> int:
    return evaluation.main(load(path, *overrides))


@pytest.fixture
def model(monkeypatch):
    """model(reply): give all later runs a model that says `reply(prompt, seed)`, or this text. Returns the list of engines."""

    def install(reply) -> list[Scripted]:
        opened = []
        said = reply if callable(reply) else lambda prompt, seed: reply + END_OF_TURN

        def open_engine(source, renderer, *_, **__):
            opened.append(Scripted(renderer, said))
            return opened[-1]

        monkeypatch.setattr(evaluation, "open_engine", open_engine)
        return opened

    return install


def asked(engines: list[Scripted]) -> int:
    return sum(len(engine.asked) for engine in engines)


def results_file(folder: Path, arm: str = "direct", k: int = 4) -> Path:
    return folder / "run" / f"toy-K{k}-{arm}.jsonl"


def outcomes(path: Path) -> dict[str, tuple]:
    """Return the outcome of a run without its seconds and the order of its lines."""
    names = ("answer", "prediction", "score", "judged", "turns", "tokens", "error")
    return {r["id"]: tuple(r[name] for name in names) for r in read_results(path).records}


# ------------------------------------------------------------------------------------------------ a run


def test_an_item_leaves_a_line_with_what_was_said_and_seen(
    write, model, toy_dir, tmp_path, monkeypatch, capsys, golden
):
    """The golden figures by hand: 2 of the 8 golds are `often`, 1 is `other`. LOOK and `seen` have 31 tokens, the report has 3.
    Without tools, f is 0.3 + 0.2 for the tags and 0.1 for their balance: "No." is not a thought."""
    golds = Counter(item.task.answer for item in load_split("toy", str(toy_dir)))
    often, *_, other = sorted(golds, key=golds.get, reverse=True)
    seen = f"A clip shows it.\n</think>\n<answer>{often}</answer>{END_OF_TURN}"
    unseen = f"No.\n</think>\n<answer>{other}</answer>{END_OF_TURN}"

    def reply(prompt, seed):
        if is_subagent(prompt):
            return f"A flash.{END_OF_TURN}"
        return seen if "A flash." in prompt else LOOK if "crop_video" in prompt else unseen

    model(reply)
    monkeypatch.setattr(
        evaluation, "load_split", lambda *split: [replace(i, duration="short") for i in load_split(*split)]
    )
    monkeypatch.setattr(protocols, "time", SimpleNamespace(perf_counter=lambda: 0.0))  # all items take 0 seconds
    run(write(prompting={"protocol": "agent"}, arms=["parallel", "none"]), "rollout.concurrency=1")
    record, *_ = read_results(results_file(tmp_path, "parallel")).records
    golden("eval_run.txt", capsys.readouterr().out + "\n" + json.dumps(record, indent=2) + "\n")
    assert {*line("x", 1), "f", "well_formed"} == set(record)  # the tests of the tables use lines like these


def test_saved_episodes_are_all_of_the_run_and_the_page_shows_them(write, model, tmp_path):
    model(turns(LOOK, RED))
    path = write(prompting={"protocol": "agent"}, limit=2)
    run(path)
    assert not (tmp_path / "run" / "episodes").exists()
    run(path, "limit=4", "save_episodes=true")  # the two others
    episodes = load_episodes(tmp_path / "run" / "episodes" / "toy-K4-parallel.jsonl")
    records = read_results(results_file(tmp_path, "parallel")).records
    assert {e.task.id: e.rewards["R_acc"] for e in episodes} == {r["id"]: r["score"] for r in records[2:]}
    page = pytest.importorskip("study.report").read_run_data(tmp_path / "run", {})
    assert [len(episode["calls"]) for episode in page.episodes] == [1, 1]


def test_results_of_other_settings_or_weights_are_refused_and_the_setting_is_named(
    write, model, toy_dir, tmp_path, refused
):
    """Past bug: a retrained model that was asked the remaining splits shared its row with its predecessor."""
    shutil.copytree(toy_dir / "model", tmp_path / "trained")
    path = write(checkpoint=str(tmp_path / "trained"))
    engines = model("red")
    run(path)
    refused(load(path, "rollout.max_new_tokens=12", "frames=[8]"), "rollout.max_new_tokens: 24, now 12")
    refused(load(path, f"checkpoint={toy_dir}/model", "frames=[8]"), "checkpoint: .*, now ")
    weights = tmp_path / "trained" / "model.safetensors"
    before = weights.read_bytes()
    kept = len(before) * 3 // 4  # past bug: only the first MiB of a file was looked at
    weights.write_bytes(before[:kept] + bytes(byte ^ 1 for byte in before[kept:]))
    refused(load(path, "frames=[8]"), "checkpoint = '.*trained' has changed")
    assert len(engines) == 1
    assert not results_file(tmp_path, k=8).exists()


def test_a_run_takes_more_splits_frames_arms_and_items(write, model, toy_dir, tmp_path):
    """Past bug: a larger limit asked every item anew. A smaller one keeps the answers beyond it."""
    engines = model("Hm.\n</think>\n<answer>red</answer>")
    path = write(prompting={"protocol": "agent"}, arms=["none"])
    for override, asked_in_all in (
        ("limit=2", 2),
        ("limit=3", 3),
        ("limit=1", 3),
        ("frames=[8]", 3 + 2),
        ("arms=[none, parallel]", 3 + 2 + 2),
        (f"splits={{charades: {toy_dir}}}", 3 + 2 + 2 + 2),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(SPLITS, "charades", SPLITS["toy"])  # the toy's questions under another name
            run(path, *([override] if "limit" in override else ["limit=2", override]))
        assert asked(engines) == asked_in_all
    assert len(outcomes(results_file(tmp_path, "none"))) == 3
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["items"] == {"toy": 8, "charades": 8}  # sizes of all calls
    assert {file.total for file in read_run(tmp_path / "run").values()} == {8}


def test_items_of_torn_lines_errors_and_other_golds_are_asked_again_and_leave_one_line(write, model, toy_dir, tmp_path):
    items = [item.task.id for item in load_split("toy", str(toy_dir))]
    path = write(prompting={"protocol": "agent"})
    file = results_file(tmp_path, "parallel")
    failing = derive_seed(derive_seed(0, items[0]), 0)  # the first turn of the first item

    def broken(prompt, seed):
        if seed == failing:
            raise EngineError("gone")
        return turns(LOOK, RED)(prompt, seed)

    model(broken)
    run(path, "limit=5", "rollout.concurrency=1")  # in sequence, so that the torn line is the fifth item's
    assert outcomes(file)[items[0]] == (None, None, 0.0, False, 0, 0, "EngineError: gone")
    records = [line("gone", 1), *read_results(file).records]  # an item that the split no longer has
    records[2]["gold"] = "another"  # past bug: a split whose folder had changed under equal ids kept its old answers
    file.write_text("".join(json.dumps(record) + "\n" for record in records)[:-30])
    # Past bug: config.yaml had the GPUs of the machine on which the run began, so another machine could not resume it.
    assert "server_gpus: null" in (tmp_path / "run" / "config.yaml").read_text()
    engines = model(turns(LOOK, RED))
    run(path)
    run(path, "rollout.concurrency=2", "decoders=2", "rollout.urls=[http://127.0.0.1:9]")  # a place is not a setting
    assert len(engines) == 1  # no engine was opened
    assert asked(engines) == 3 * 6  # two turns and a report of all but the third and the fourth item
    assert sorted(record["id"] for record in read_results(file).records) == sorted(items)


# ------------------------------------------------------------------------------------------------ what fails


def test_a_run_in_which_every_item_failed_says_so(write, model, capsys):
    """Past bug: it exited with 0."""
    model("red")
    assert run(write(), "rollout.max_context=40") == 1
    assert re.search(r"8 items of .*toy-K4-direct.jsonl.*max_context = 40", capsys.readouterr().err)


def test_two_evaluations_in_one_folder_ask_nothing_twice(write, model, tmp_path, monkeypatch):
    """Past bug: both asked (and paid for) every item, and one of them printed a wrong figure."""
    path, engines = write(), model("red")
    with only_run_in(tmp_path / "run"), pytest.raises(config.ConfigError, match="is using this folder"):
        run(path)

    def hold_later(cfg, folder):
        """Another process is faster: it ends before this one holds the folder."""
        monkeypatch.setattr(evaluation, "hold_folder", hold_folder)
        run(path)
        return hold_folder(cfg, folder)

    monkeypatch.setattr(evaluation, "hold_folder", hold_later)
    run(path)
    assert asked(engines) == 8 == len(outcomes(results_file(tmp_path)))


def test_an_engine_that_does_not_start_leaves_no_results(write, monkeypatch, tmp_path):
    """Past bug: the next try was refused as "made under other settings"."""
    opened = []

    def gone(source, renderer, cfg, logs, api):
        opened.append(logs)
        raise EngineError("gone")

    monkeypatch.setattr(evaluation, "open_engine", gone)
    with pytest.raises(EngineError):
        run(write())
    assert opened == [tmp_path / "run" / "logs"]  # of its servers
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]


def test_a_judge_that_fails_is_an_error_and_no_verdict(write, model, tmp_path):
    there = Endpoint("Yes.", (401, {}, {"error": "gone"}))
    path = write(grading={"open_answer": "judge", "judge": {"url": there.url, "model": "j"}})
    model("reddish")
    run(path)
    there.shutdown()
    for answer, prediction, score, judged, *_, error in outcomes(results_file(tmp_path)).values():
        assert (answer, prediction, score, judged) == ("reddish", None, 0.0, False)
        assert error.startswith(f"JudgeError: EngineError: {there.url}: status 401")
    there = Endpoint("Yes.")
    run(path, f"grading.judge.url={there.url}")  # the judge's URL is not a setting
    there.shutdown()
    assert {r[1:4] for r in outcomes(results_file(tmp_path)).values()} == {("reddish", 1.0, True)}


@pytest.mark.parametrize("mode", ["off", "prose"])
def test_answers_without_a_tag_count_only_where_the_config_says_so_and_leave_their_last_2000_characters(
    write, model, tmp_path, mode
):
    """Past bug: an item whose answer could not be read left no trace."""
    said = "I see it. " * 300 + "\n</think>\nThe answer is red."
    model(said)
    grading = {"open_answer": "exact", "untagged_answer": mode}
    run(write(prompting={"protocol": "think"}, rollout={"max_new_tokens": 4000}, grading=grading))
    records = read_results(results_file(tmp_path, "think")).records
    assert {(r["prediction"], r["tagged"]) for r in records} == {("red." if mode == "prose" else None, False)}
    assert rates(records)["unparsed_rate"] == 100 * (mode == "off")
    assert {r["said"] for r in records} == {(said + END_OF_TURN)[-2000:]}


# ------------------------------------------------------------------------------------------------ configs


def test_a_model_opens_its_turns_as_it_was_trained_to_unless_the_config_says_otherwise(tmp_path):
    asked = load(CONFIGS / "trained.yaml").rollout
    assert as_trained(asked, tmp_path).think_prefix is False  # a checkpoint without a record
    (tmp_path / "rollout.json").write_text('{"think_prefix": true}')
    assert as_trained(asked, tmp_path).think_prefix is True
    assert as_trained(replace(asked, think_prefix=False), tmp_path).think_prefix is False


def test_episodes_run_as_many_at_once_as_the_servers_have_room_for(write):
    assert load(write(), "rollout.server_gpus=[0, 1]").rollout.at_once == 64


def test_what_is_missing_or_was_trained_otherwise_is_named_and_a_dry_run_downloads_nothing(write, refused, capsys):
    refused(load(write(), "splits={toy: nowhere, mlvu: gone}"), "^toy: nowhere: .*\nmlvu: gone: ")
    refused(load(write(), "visual={frame_pixels: 4096}"), "4096, the checkpoint 1024")
    for checkpoint in ("runs/sft_8b/model", "tests/model"):  # tests/ is here, so it is a path
        refused(load(write(), f"checkpoint={checkpoint}"), f"{checkpoint}: neither a folder")
    evaluation.main(load(write(), "checkpoint=Somebody/Else"), dry=True)
    assert "Somebody/Else was not looked up" in capsys.readouterr().out


@pytest.fixture
def other(toy_dir, tmp_path) -> Path:
    """A copy of the toy's model, to change."""
    return shutil.copytree(toy_dir / "model", tmp_path / "other")


def test_another_family_is_not_answered_by_random_weights(write, other, refused):
    """Past bug: without SGLang, another family was loaded into a Qwen3-VL with "newly initialized" layers."""
    (other / "config.json").write_text('{"model_type": "qwen2_vl"}')
    cfg = load(write(), f"checkpoint={other}")
    refused(cfg, "qwen3_vl and qwen2_5_vl, not 'qwen2_vl'")
    cfg = replace(cfg, rollout=replace(cfg.rollout, urls=("localhost:9",)))
    refused(cfg, "no server answers at")  # a server may support it


def test_a_model_of_others_may_have_another_template_but_the_run_says_so(write, other, tmp_path, refused, capsys):
    template = other / "chat_template.jinja"
    template.write_text(template.read_text().replace("assistant\\n' if", "assistant\\n<think>\\n' if"))
    cfg = load(write(), f"checkpoint={other}", "limit=1", "rollout.max_new_tokens=4")
    for dry in (True, False):
        assert not evaluation.main(cfg, dry)
        assert f"  note    {other}: its chat template" in capsys.readouterr().out
    agent = load(write(), f"checkpoint={other}", "prompting.protocol=agent", f"run={tmp_path}/agent")
    refused(agent, "its chat template")
