"""`python -m study.ask`, on the toy's untrained checkpoint and one of its videos."""

import argparse
import sys
from pathlib import Path

import pytest

from episode import load_episodes
from rollout import RolloutConfig
from runtime import inprocess
from runtime.engine import Sample
from study import ask

CALL = '<tool_call>{"name": "crop_video", "arguments": {"start_time": %s, "end_time": %s}}</tool_call>'


@pytest.fixture
def command(toy_dir, monkeypatch, capsys):
    """command(*arguments) -> (exit status, output), run in this process and in the toy's folder."""
    monkeypatch.chdir(toy_dir)

    def run(*arguments: str) -> tuple[int, str]:
        given = ["--model", "model", "--video", "videos/test00000.mp4", "--k", "4"]
        monkeypatch.setattr(sys, "argv", ["ask.py", arguments[0], *given, *arguments[1:]])
        status = ask.main()
        return status, capsys.readouterr().out

    return run


def test_ask_shows_thoughts_windows_and_reports_and_keeps_a_trace(toy_dir, videos, command, monkeypatch, tmp_path):
    """The trace is readable from any folder."""
    said = "I look twice.</think>" + CALL % (0, 16) + CALL % (16, 32) + CALL % (9, 5)
    plain, first = inprocess.InProcess.generate, [said]

    def generate(self, ids, frames, **more):
        if not first:
            return plain(self, ids, frames, **more | {"max_new_tokens": 5})
        new = [*self.renderer.encode(first.pop()), self.renderer.end_of_turn]
        return Sample(new, [-1.0] * len(new), "stop", 0)

    monkeypatch.setattr(inprocess.InProcess, "generate", generate)
    status, printed = command("Which color flashes?", "--trace", str(tmp_path / "t.json"))
    assert status == 0
    assert "I look twice." in printed and "<tool_call>" not in printed.split("turn 2")[0]
    for window in ("0.0–16.0 s", "16.0–32.0 s"):
        assert printed.count(window) == 2  # on the timeline, and with its report
    assert "│█" in printed and "·█" in printed and "bad_arguments" in printed and "2 turns, 3 calls" in printed
    monkeypatch.chdir(tmp_path)
    [episode] = load_episodes("t.json")
    assert [call.window for call in episode.calls] == [(0, 16), (16, 32), None]
    assert len(episode.main.clips[0].times) == 4 and Path(episode.task.videos[0]).is_absolute()


def test_a_bug_of_ours_is_not_one_line(command, monkeypatch):
    monkeypatch.setattr(ask, "run_episode", lambda *_: int("bug"))
    with pytest.raises(ValueError, match="bug"):
        command("Which color flashes?")


def test_the_weights_of_a_model_that_others_serve_are_not_fetched(toy_dir, monkeypatch):
    wanted = []
    monkeypatch.setattr(
        "runtime.checkpoints.snapshot_download",
        lambda name, allow_patterns: wanted.extend(allow_patterns) or toy_dir / "model",
    )
    monkeypatch.setattr(ask, "require_servers", lambda cfg, ranks: None)
    monkeypatch.setattr(ask, "open_engine", lambda *_: None)
    ask.context_of(
        argparse.Namespace(prompts=None, model="owner/name"), None, RolloutConfig(urls=("http://somewhere",))
    )
    assert wanted == ["*.json", "*.jinja", "*.txt"]


def test_a_k_without_frames_is_refused(command, capsys):
    """Past bug: `--k 0` showed the default number of frames."""
    with pytest.raises(SystemExit):
        command("Which color flashes?", "--k", "0")
    assert "--k 0: must be at least 1" in capsys.readouterr().err
