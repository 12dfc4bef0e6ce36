"""configs/eval/rows.yaml: each row is asked as in the paper's table and as its authors ask, and says what still differs.
node.sh: every row of the ablations is trained and evaluated."""

import os
import re
import shlex

import pytest
from scripts import REPO, printed_by_node_sh

from eval import EvalConfig, main, with_names
from evals import rows, tables
from evals.rows import ROWS_FILE
from evals.tables import read_published
from rl import RLConfig
from runtime import config
from runtime.dataset import DataError
from runtime.visual import VisualContract

ROWS = config.read_tree(ROWS_FILE)["rows"]
ONE_WAY = ("gpt4o", "gemini_15_pro", "qwen25vl_7b", "sage")
TWO_WAYS = [row for row in ROWS if row not in ONE_WAY]


def load(*words: str, path=ROWS_FILE) -> EvalConfig:
    return rows.load(EvalConfig, path, words)


@pytest.mark.parametrize("row", TWO_WAYS)
def test_a_row_is_asked_in_both_ways(row):
    own, cfg = load(f"row={row}", "way=own"), load(f"row={row}")
    # As in the published run, all models get the same settings.
    visual, agent, protocol = cfg.visual, cfg.rollout, own.prompting.protocol
    assert (visual.frame_pixels, visual.max_frame_pixels, cfg.frames) == (100352, 602112, (64,))
    # No stamps and the same crops, except a protocol's own.
    stamps = {"conan": "{clock}", "video_zoomer": "<frame{i}_time{:.2f}s>"}
    assert visual.stamp == stamps.get(protocol, "")
    assert (visual.crop_fps, visual.crop_max_frames) == (1.0, 128 if protocol == "longvt" else 16)
    if protocol in ("conan", "longvt", "video_zoomer"):
        assert own.visual.stamp == visual.stamp
        assert own.visual.crop_max_frames == visual.crop_max_frames
    assert (agent.temperature, agent.max_new_tokens, agent.max_context) == (0, 2048, 65536)
    assert cfg.prompting.protocol == (protocol if protocol in ("agent", "conan", "longvt", "video_zoomer") else "think")
    if cfg.agentic:
        assert (agent.tool_return, agent.think_prefix, agent.max_rounds, agent.max_calls) == ("frames", False, 3, 5)
    # With the authors' settings: the same weights on the same data, in a run and a row of its own.
    assert (own.name, own.run, cfg.run) == (f"{cfg.name} (own)", f"runs/eval/own/{row}", f"runs/eval/{row}")
    assert (own.checkpoint, own.splits) == (cfg.checkpoint, cfg.splits)
    assert (own.visual or VisualContract()).patch == visual.patch == (16 if cfg.agentic else 14)
    # Past bug: rows were written for 8 GPUs and refused on other machines.
    assert own.rollout.server_gpus is agent.server_gpus is None
    assert own.decoders == cfg.decoders == min(64, os.cpu_count())
    # A request takes 906 MB of the host's memory, one of our agent 113.
    assert (agent.concurrency, own.rollout.concurrency) == (64, 256 if cfg.agentic else 64)


def test_an_api_gets_few_requests_at_once():
    assert load("row=gpt4o").rollout.concurrency == 8


def test_the_dry_run_of_every_row_names_what_is_missing_and_how_the_published_run_differs(
    tmp_path, monkeypatch, capsys
):
    """Past bug: a fact with a colon was printed as a mapping."""
    monkeypatch.chdir(tmp_path)  # without datasets
    notes = {}
    for row, way in [(row, "table") for row in ROWS] + [(row, "own") for row in TWO_WAYS]:
        cfg = load(f"row={row}", f"way={way}", "rollout.server_gpus=[]", "api={url: ''}")
        with pytest.raises(DataError) as missing:
            main(cfg, dry=True)
        told = dict(line.split(": ", 1) for line in str(missing.value).splitlines())
        assert told.keys() == cfg.splits.keys()
        assert all("hf download" in text for text in told.values())
        differences = re.findall("note    the published run: (.*)", capsys.readouterr().out)
        assert len(differences) >= 4
        assert notes.setdefault(cfg.name.removesuffix(" (own)"), differences) == differences  # the same in both ways
    assert notes.keys() == {row["name"] for row in read_published()["table"]["rows"]}
    assert "Charades: ParaVT-8B reads the minimal system prompt" in " ".join(notes["Qwen3-VL-8B"])


LAYERS = """
groups: {open: &open [they differ]}
shared: {splits: {toy: a, mlvu: a}, checkpoint: shared, frames: [1], decoders: 1, limit: 1, seed: 1}
rows:
  old: {name: Old, frames: [2], decoders: 2, limit: 2, seed: 2, own: {limit: 4, seed: 4}, differs: [*open]}
  new: {like: old, name: New, decoders: 3, limit: 3, seed: 3, own: {seed: 5}}
"""
MINE = "{base: rows.yaml, row: new, way: own, name: '', seed: 6, splits: {mmvu: a}}"


@pytest.mark.parametrize(
    "words, settings",
    [
        ("rows.yaml row=old", ("runs/eval/old", "Old", 2, 2, 2, 2, "toy mlvu")),
        ("rows.yaml row=new", ("runs/eval/new", "New", 2, 3, 3, 3, "toy mlvu")),
        # The `own` of both rows lies over both rows.
        ("rows.yaml way=own row=new", ("runs/eval/own/new", "New (own)", 2, 3, 4, 5, "toy mlvu")),
        # A file on top merges its mappings. A value of the command line replaces them.
        ("mine.yaml", ("runs/eval/own/new", "", 2, 3, 4, 6, "toy mlvu mmvu")),
        ('mine.yaml row=old way=table run=r splits={"toy":"b"}', ("r", "", 2, 2, 2, 6, "toy")),
    ],
)
def test_each_layer_lies_over_the_one_before(tmp_path, words, settings):
    (tmp_path / "rows.yaml").write_text(LAYERS)
    (tmp_path / "mine.yaml").write_text(MINE)
    file, *overrides = words.split()
    cfg = load(*overrides, path=tmp_path / file)
    found = cfg.run, cfg.name, cfg.frames[0], cfg.decoders, cfg.limit, cfg.seed, " ".join(cfg.splits)
    assert found == settings


@pytest.mark.parametrize(
    "words, named",
    [
        ([], "row = '': .* gpt4o, gemini_15_pro, paravt_8b"),
        (["row=conann"], "row = 'conann': .* conan?"),
        (["row=conan", "way=onw"], "way = 'onw': conan .* own?"),
        (["row=sage", "way=own"], "way = 'own': sage .* table"),
    ],
)
def test_a_row_or_a_way_that_is_not_there_is_refused(words, named):
    with pytest.raises(config.ConfigError, match=named):
        load(*words)


@pytest.mark.parametrize(
    "checkpoint, label",
    [
        ("runs/mine/model", "mine"),
        ("/data/runs/mine/models/step-000040", "mine-step-000040"),
        ("mwxely/ParaVT-8B-SFT", "ParaVT-8B-SFT"),
    ],
)
def test_a_model_of_our_own_is_named_after_its_training_and_asked_in_our_way(checkpoint, label):
    trained, own = ROWS_FILE.with_name("trained.yaml"), load("row=paravt_8b", "way=own")
    cfg = with_names(load(f"checkpoint={checkpoint}", path=trained))
    assert (cfg.run, cfg.name) == (f"runs/eval/own/{label}", label)
    assert (cfg.arms, cfg.splits, cfg.visual) == (own.arms, own.splits, None)
    assert (cfg.rollout.tool_return, cfg.rollout.think_prefix) == ("subagent", None)
    given = with_names(load(f"checkpoint={checkpoint}", "name=ParaVT-8B (mine)", "run=there", path=trained))
    assert (given.run, given.name) == ("there", "ParaVT-8B (mine)")


def test_only_a_name_of_the_table_has_a_published_run():
    assert rows.list_differences("mine") == []
    assert rows.list_differences("ParaVT-8B (mine)") == rows.list_differences("ParaVT-8B") != []


# ------------------------------------------------------------------------------------------------ node.sh


def test_every_row_of_the_ablations_is_trained_and_evaluated():
    """The names that `eval.py ablation` looks for are those of the configs."""
    commands = re.findall(r"(\w+\.py) (configs/.*)", printed_by_node_sh())
    trainings, evaluations = set(), set()
    for script, words in commands:
        file, *words = shlex.split(words)
        if script == "rl.py":
            trainings.add(config.load(RLConfig, REPO / file, words).run)
        elif script == "eval.py":
            evaluations.add(with_names(load(*words, path=REPO / file)).run)
    for block in tables.TITLES:
        for row in read_published()["ablations"][block]:
            assert "run" not in row or f"runs/{row['run']}_8b" in trainings
            assert f"runs/eval/own/{row.get('eval') or row['run']}_8b" in evaluations
