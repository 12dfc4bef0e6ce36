"""`python -m study.ask`, on the toy's untrained checkpoint and one of its videos."""

import argparse
import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scripts import REPO, fake_server

from data import Trajectory
from rollout import RolloutConfig, load_episodes
from runtime import checks, inprocess, servers
from runtime.doctor import engine_logprobs
from runtime.engine import EngineError, Sample
from runtime.video import Frames
from runtime.visual import VisualContract
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
    [episode] = load_episodes("t.json", videos, VisualContract.load(toy_dir / "model"))
    assert [call.window for call in episode.calls] == [(0, 16), (16, 32), None]
    assert len(episode.main.frames[0]) == 4 and Path(episode.task.videos[0]).is_absolute()


def test_a_bug_of_ours_is_not_one_line(command, monkeypatch):
    monkeypatch.setattr(ask, "run_episode", lambda *_: int("bug"))
    with pytest.raises(ValueError, match="bug"):
        command("Which color flashes?")


def test_the_weights_of_a_model_that_others_serve_are_not_fetched(toy_dir, monkeypatch):
    wanted = []
    monkeypatch.setattr(checks, "checkpoint_dir", lambda name, only: wanted.extend(only) or toy_dir / "model")
    monkeypatch.setattr(ask, "check_servers", lambda cfg, ranks: None)
    monkeypatch.setattr(ask, "open_engine", lambda *_: None)
    ask.context_of(
        argparse.Namespace(prompts=None, model="owner/name"), None, RolloutConfig(urls=("http://somewhere",))
    )
    assert wanted == ["*.json", "*.jinja", "*.txt"]


def table(printed: str) -> dict[str, bool]:
    """Return the doctor's claims: claim -> whether it holds."""
    rows = (re.fullmatch(r"(ok  |FAIL)  (.*?)  +.*", line) for line in printed.splitlines())
    return {row[2]: row[1] == "ok  " for row in rows if row}


def test_the_doctor_finds_a_healthy_model_healthy(command):
    status, printed = command("doctor", "--max-new-tokens", "8")
    assert status == 0 and len(table(printed)) == 7 and all(table(printed).values()), printed


def test_the_doctor_compares_texts_as_the_tokenizer_normalises_them(toy_dir, tmp_path, command, monkeypatch):
    """Qwen's tokenizer normalises its input to NFC. A model that writes e and an accent has the same conversation."""
    model = shutil.copytree(toy_dir / "model", tmp_path / "model")
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    (model / "tokenizer.json").write_text(json.dumps(tokenizer | {"normalizer": {"type": "NFC"}}))

    def decomposed(self, ids, frames, **more):
        said = [*self.renderer.encode("caf"), *self.renderer.encode("e"), *self.renderer.encode("\u0301")]
        assert self.renderer.decode(said) == "cafe\u0301"
        return Sample([*said, self.renderer.end_of_turn], [-1.0] * (len(said) + 1), "stop", 0)

    monkeypatch.setattr(inprocess.InProcess, "generate", decomposed)
    _, printed = command("doctor", "--model", str(model))
    assert table(printed)["one conversation"], printed


def blind(self, ids, frames, plain=inprocess.InProcess.generate, **more):
    return plain(self, ids, [Frames(np.zeros_like(clip.pixels), clip.times) for clip in frames], **more)


def hot(self, ids, frames, plain=inprocess.InProcess.generate, **more):
    return plain(self, ids, frames, **more | {"temperature": 2 * more["temperature"]})


@pytest.mark.parametrize("fault", [blind, hot])
def test_the_doctor_notices_an_engine_that_differs_from_the_trainer(command, monkeypatch, fault):
    monkeypatch.setattr(inprocess.InProcess, "generate", fault)
    status, printed = command("doctor", "--max-new-tokens", "8")
    assert status == 1 and not table(printed)["engine and trainer agree"], printed


def test_the_doctors_server_has_the_gpus_of_its_config(command, monkeypatch):
    """Past bug: the config's tensor_parallel was ignored."""

    def open_engine(source, renderer, cfg):
        raise EngineError(f"{cfg.tensor_parallel} of {cfg.server_gpus}")

    monkeypatch.setattr(ask, "check_servers", lambda cfg, ranks: None)
    monkeypatch.setattr(ask, "open_engine", open_engine)
    with pytest.raises(SystemExit, match=re.escape("4 of (4, 5, 6, 7)")):
        command("doctor", "--gpu", "4", "--config", str(REPO / "configs" / "paragrpo_8b_tp4.yaml"))


def test_a_server_of_ones_own_and_one_at_a_url_exclude_each_other(command, capsys):
    """Past bug: the doctor tried to kill a server that it had not started, and ended with a traceback."""
    with pytest.raises(SystemExit) as end:
        command("doctor", "--gpu", "4", "--url", "http://127.0.0.1:9")
    assert end.value.code == 2 and "--url: not allowed with argument --gpu" in capsys.readouterr().err


@pytest.mark.parametrize("gaps, good", [({0: 2.0}, True), ({0: 2.0, 1: 2.0, 2: 2.0}, False), (range(200), False)])
def test_in_bf16_the_doctor_judges_the_mean_and_the_99th_percentile(monkeypatch, gaps, good):
    """Past bug: it judged the largest gap of all tokens, which can exceed its limit by bf16 rounding alone."""
    far = torch.zeros(200)
    for token in gaps:
        far[token] = 0.06 if isinstance(gaps, range) else gaps[token]
    agent = Trajectory([0] * 201, [0] + [1] * 200, [-1.0] * 201, [0] * 201, [], 1, turns=[(1, 201)])
    monkeypatch.setattr(ask, "trainer_logprobs", lambda policy, agents, scale, start: far - 1)
    episode = SimpleNamespace(trajectories=[agent], main=agent)
    for dtype, expected in ((torch.bfloat16, good), (torch.float32, False)):
        assert ask.agreement(SimpleNamespace(dtype=dtype), episode, 0.7)[0] == expected


@pytest.mark.parametrize("wrong_at", [None, 0.7])
def test_the_doctor_asks_a_server_of_its_own_at_two_temperatures_and_after_its_death(command, monkeypatch, wrong_at):
    """The server is a fake, so the trainer repeats its log-probs. The trainer's own model then sees no frames."""
    started = []

    def server_command(checkpoint, renderer, port, flags):
        started.append(flags)
        return fake_server(renderer, port)

    def trainer_logprobs(policy, agents, temperature, start):
        return engine_logprobs(agents, start) + (temperature == wrong_at)

    monkeypatch.setattr(servers, "server_command", server_command)
    monkeypatch.setattr(ask, "check_servers", lambda cfg, ranks: None)
    monkeypatch.setattr(ask, "trainer_logprobs", trainer_logprobs)
    status, printed = command("doctor", "--gpu", "7")
    found = table(printed)
    assert [name for name in found if not found[name]] == ["frames are seen"] + ["they agree at 0.7"] * bool(wrong_at)
    assert status == 1 and len(found) == 9
    assert len(started) == 2 and {"--enable-fp32-lm-head", "--mm-preprocess-cache-size-mb=65536"} < {*started[1]}
