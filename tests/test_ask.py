"""`python -m study.ask` shows an episode while it runs. (The guide on tools runs the whole command.)"""

import argparse
import json
import re
import shutil
import sys

import pytest
from scripted import MemoryVideos, Scripted, crop, load_episodes, turns

from rollout import AgentContext, RolloutConfig
from runtime.prompts import Prompts
from study import ask

LOOK = f"I look twice.</think>{crop(0, 30)}{crop(30, 30.5)}{crop(9, 5)}<|im_end|>"
LAST = "Red.</think><answer>red</answer><|im_end|>"


@pytest.fixture
def run(renderer, tmp_path):
    """run(first call) -> exit status. The video lasts 60 s; the agent looks twice, then answers."""

    def run_ask(call: str | None = None) -> int:
        agent = Scripted(renderer, turns(LOOK, LAST, report="A red flash."))
        context = AgentContext(agent, renderer, MemoryVideos(), RolloutConfig())
        args = argparse.Namespace(question="What?", video=["v.mp4"], k=4, call=call, trace=tmp_path / "t.json")
        return ask.run_ask(args, context)

    return run_ask


def test_the_terminal_has_thoughts_and_calls_and_the_trace_finds_its_videos_from_any_folder(
    run, tmp_path, monkeypatch, capsys, golden
):
    monkeypatch.chdir("/")
    assert run() == 0
    told = re.sub(r"(\(|, )\d+\.\d s", r"\1N s", capsys.readouterr().out)
    in_order = lambda lines: "".join(sorted(lines[0].splitlines(True)))  # noqa: E731  # calls come in any order
    golden("ask.txt", re.sub(r"(  .*\n)+", in_order, told))
    [episode] = load_episodes(tmp_path / "t.json")
    assert [call.window for call in episode.calls] == [(0, 30), (30, 30.5), None]
    assert len(episode.main.clips[0].times) == 4
    assert episode.task.videos == ("/v.mp4",)


def test_the_weights_of_a_model_that_others_serve_are_not_fetched(toy_dir, monkeypatch):
    wanted = []
    fetch = lambda name, allow_patterns: wanted.extend(allow_patterns) or toy_dir / "model"  # noqa: E731
    monkeypatch.setattr("runtime.checkpoints.snapshot_download", fetch)
    monkeypatch.setattr(ask, "require_servers", lambda cfg, ranks: None)
    monkeypatch.setattr(ask, "open_engine", lambda *_: None)
    ask.open_context("owner/name", None, None, RolloutConfig(urls=("http://somewhere",)))
    assert wanted == ["*.json", "*.jinja", "*.txt"]


@pytest.mark.parametrize("windows", [[(1, 2)], [(0, 1), (1, 2)]], ids=["a call", "calls in a list"])
def test_given_calls_are_the_first_turn_of_any_model(run, tmp_path, windows):
    calls = [json.loads(crop(*window).split("\n")[1]) for window in windows]
    run(call=json.dumps(calls if len(calls) > 1 else calls[0]))
    [episode] = load_episodes(tmp_path / "t.json")
    assert [call.window for call in episode.calls if call.turn == 0] == windows


@pytest.mark.parametrize("option", ["--k", "--max-new-tokens"])
def test_no_frames_and_no_tokens_are_refused(monkeypatch, capsys, option):
    """Past bugs: `--k 0` showed the default number of frames, and no new tokens ended in a traceback."""
    monkeypatch.setattr(sys, "argv", ["ask.py", "what", "--model", "m", "--video", "v.mp4", option, "0"])
    with pytest.raises(SystemExit):
        ask.parse_arguments()
    assert f"{option} 0: must be at least 1" in capsys.readouterr().err


def test_ask_uses_the_checkpoints_words_or_a_files(toy_dir, tmp_path, monkeypatch):
    shutil.copytree(toy_dir / "model", tmp_path / "model")
    Prompts(system="Trained.").save(tmp_path / "model")
    (tmp_path / "words.yaml").write_text("system: Asked.")
    monkeypatch.setattr(ask, "open_engine", lambda *_: None)
    for file, system in ((None, "Trained."), (tmp_path / "words.yaml", "Asked.")):
        context = ask.open_context(tmp_path / "model", file, None, RolloutConfig())
        assert context.renderer.prompts == Prompts(system=system)
