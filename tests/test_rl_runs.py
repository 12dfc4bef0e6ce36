"""rl.py: whole runs, resumed, killed, and on several ranks."""

import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from scripted import Scripted
from scripts import (
    Forked,
    alive,
    fake_server,
    finish,
    kill_at_random,
    metrics,
    rl_config,
    same_metrics,
    same_weights,
    sft_config,
    start,
    wait_for,
)
from short_runs import pay_by_chance, train, try_out

import rl
import sft
from data import parse_task
from rl import RLConfig
from rollout import derive_seed
from runtime import config, open_engine
from runtime.dataset import Dataset
from runtime.distributed import rank
from runtime.engine import EngineError
from runtime.script import run_script
from runtime.servers import SGLang

run = partial(start, "rl.py")


@pytest.fixture(scope="module")
def three_steps(toy_dir, tmp_path_factory) -> Path:
    """A folder with `whole`, a run of three steps, and `parts`, which stopped after two of them. `two` is its model then."""
    folder = tmp_path_factory.mktemp("three_steps")
    more = {"grpo": {"kl_coef": 0.1}, "export_every": 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rl, "assign_rewards", pay_by_chance)
        train(folder / "whole.yaml", toy_dir, steps=3, **more)
        train(folder / "parts.yaml", toy_dir, steps=2, **more)
        shutil.move(folder / "parts" / "model", folder / "two")
        train(folder / "parts.yaml", toy_dir, steps=3, **more)
    return folder


def test_a_resumed_run_is_the_uninterrupted_one(three_steps):
    whole, parts = three_steps / "whole", three_steps / "parts"
    assert same_weights(whole, parts)
    assert same_metrics(metrics(whole), metrics(parts))


def test_a_run_writes_its_metrics_and_episodes_and_moves_the_weights_that_are_not_frozen(three_steps, toy_dir):
    whole = three_steps / "whole"
    lines = metrics(whole)
    assert [(line["step"], line["staleness"]) for line in lines] == [(0, 0), (1, 0), (2, 0)]
    assert all(line["grad_norm"] > 0 for line in lines)
    assert abs(lines[0]["kl"]) < 1e-6 < lines[2]["kl"]
    assert all(line["logprob_gap"] < 1e-4 for line in lines)
    assert all(line["share/K=4"] + line["share/K=8"] == 1 for line in lines)
    kept = (whole / "episodes" / "step-000002.jsonl").read_text().splitlines()
    assert len(kept) == 4 and json.loads(kept[0])["rewards"]
    before = load_file(toy_dir / "model" / "model.safetensors")
    after = load_file(whole / "model" / "model.safetensors")
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved and not any(".visual." in name for name in moved)


def test_a_model_of_every_so_many_steps_is_what_a_run_of_these_steps_leaves(three_steps):
    """A model is written before the state of its step: after a kill between the two, the resumed run writes it again."""
    [model] = (three_steps / "whole" / "models").iterdir()
    written = {path.name: path.read_bytes() for path in model.iterdir()}
    assert model.name == "step-000002"
    assert written == {path.name: path.read_bytes() for path in (three_steps / "two").iterdir()}
    assert json.loads(written["rollout.json"]) == {"think_prefix": True}  # as it was trained
    state = three_steps / "whole" / "state" / "step-00000002"
    assert model.stat().st_mtime < state.stat().st_mtime


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", ["qwen2_5_vl"], indirect=True)
def test_a_published_qwen25_vl_trains_and_its_result_trains_on(checkpoint, toy_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(rl, "assign_rewards", pay_by_chance)
    stock = tiny.as_published(checkpoint, tmp_path / "stock")
    (stock / "visual.json").unlink()
    changes = {"visual": {"patch": 14, "frame_pixels": 6 * 28 * 28}, "steps": 2, "grpo": {"kl_coef": 0.1}}
    lines = train(tmp_path / "one.yaml", toy_dir, policy={"checkpoint": str(stock)}, **changes)
    lines += train(tmp_path / "two.yaml", toy_dir, policy={"checkpoint": str(tmp_path / "one" / "model")}, **changes)
    assert all(line["logprob_gap"] < 1e-4 and not line["failed_rate"] and line["kl"] >= 0 for line in lines)
    before, after = (load_file(folder / "model.safetensors") for folder in (stock, tmp_path / "two" / "model"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and not any(name.startswith("visual") for name in changed)


def test_an_update_that_is_not_finite_is_skipped_and_shown(scripted, toy_dir, tmp_path, monkeypatch, capsys):
    norms = iter([math.nan, 1.0])
    monkeypatch.setattr("runtime.run.clip_gradients", lambda *_: next(norms))
    lines = train(tmp_path / "run.yaml", toy_dir, steps=2, export_every=1)
    assert [line["bad_steps"] for line in lines] == [1, 0]
    assert " bad_steps 1" in capsys.readouterr().out
    before = load_file(toy_dir / "model" / "model.safetensors")
    after = load_file(tmp_path / "run" / "models" / "step-000001" / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_run_whose_last_update_is_not_finite_keeps_its_earlier_states_and_has_no_result(
    scripted, toy_dir, tmp_path, monkeypatch
):
    """Past bug: `optim.lr=1e30` ended with "done" and a model of weights of 9e29."""
    with monkeypatch.context() as patched:
        norms = iter([1.0, math.nan])
        patched.setattr("runtime.run.clip_gradients", lambda *_: next(norms))
        with pytest.raises(config.ConfigError, match="last step.* norm nan"):
            train(tmp_path / "run.yaml", toy_dir, steps=2, save_every=1)
    assert [state.name for state in (tmp_path / "run" / "state").iterdir()] == ["step-00000001"]
    assert not (tmp_path / "run" / "model").exists()
    rl.main(config.load(RLConfig, tmp_path / "run.yaml", ["optim.lr=1e-9"]))
    assert (tmp_path / "run" / "model").exists()


def test_a_run_does_not_go_on_from_a_checkpoint_that_was_made_anew(scripted, toy_dir, tmp_path):
    """Past bug: reference and frozen tower came from the new checkpoint, the text model from the old state."""
    start = tmp_path / "start"
    shutil.copytree(toy_dir / "model", start)
    train(tmp_path / "c.yaml", toy_dir, policy={"checkpoint": str(start)}, steps=1)
    weights = load_file(start / "model.safetensors")
    save_file({name: w + 0.01 for name, w in weights.items()}, start / "model.safetensors", {"format": "pt"})
    cfg = config.load(RLConfig, tmp_path / "c.yaml", ["steps=2", "plan.gpus=1"])
    for go_on in (rl.main, try_out):
        with pytest.raises(config.ConfigError, match="start' has changed since .*/c started from it: restore it"):
            go_on(cfg)
    save_file(weights, start / "model.safetensors", {"format": "pt"})
    try_out(cfg)


def test_a_finished_run_exports_again_and_samples_no_more(scripted, toy_dir, tmp_path):
    """Past bug: it started servers and gave them weights, only to export again."""
    for _ in range(2):
        train(tmp_path / "c.yaml", toy_dir, steps=1)
        shutil.rmtree(tmp_path / "c" / "model")  # which is there
    assert len(scripted) == 1


def test_a_step_without_an_episode_stops_the_run_and_one_goes_on(scripted, toy_dir, tmp_path, monkeypatch, capsys):
    """Past bug: only the first batch was checked. Later, the run exited with status 0 and had replaced all its states."""

    def fail(own, prompt, ids, clips, *, seed, **more):
        if own.version >= served and seed != survivor:
            raise EngineError("gone")
        return generate(own, prompt, ids, clips, seed=seed, **more)

    generate, survivor, served = Scripted.generate, None, 1
    monkeypatch.setattr(Scripted, "generate", fail)
    with pytest.raises(EngineError, match="step 2: none of its 8 episodes ran; the last error: EngineError: gone"):
        train(tmp_path / "c.yaml", toy_dir, steps=9, save_every=1)
    assert len(metrics(tmp_path / "c")) == 1
    assert [path.name for path in (tmp_path / "c" / "state").iterdir()] == ["step-00000001"]

    served = 0
    task, *_ = Dataset(config.load(RLConfig, tmp_path / "c.yaml").data, parse_task).batch(0, 2)[0]
    survivor = derive_seed(derive_seed(0, 0, task.id, 1), 0)
    [line] = train(tmp_path / "d.yaml", toy_dir, steps=1, rollout={"dispatch": "none"})
    assert line["failed_rate"] == 7 / 8
    assert " failed_rate 0.875" in capsys.readouterr().out


@pytest.fixture(scope="module")
def cold_start(toy_dir, tmp_path_factory) -> Path:
    """A checkpoint that has begun to write the tags, so that groups differ."""
    folder, rows = tmp_path_factory.mktemp("cold_start"), {"sources": [{"path": str(toy_dir / "sft.parquet")}]}
    changes = {"data": rows, "kind_weights": {}, "optim": {"lr": 3e-3, "warmup": 0.1}}
    path = sft_config(folder / "sft.yaml", toy_dir, **changes, steps=32, batch_rows=8, save_every=32)
    sft.main(config.load(sft.SFTConfig, path))
    return folder / "sft" / "model"


@pytest.fixture(scope="module")
def uninterrupted(toy_dir, cold_start, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    train(folder / "run.yaml", toy_dir, policy={"checkpoint": str(cold_start)})
    return folder / "run"


@pytest.mark.slow
def test_two_processes_have_the_metrics_of_one(uninterrupted, toy_dir, cold_start, tmp_path):
    """Batches of other shapes round differently, so at some step a sampled token differs. Compare the first steps."""
    finish(run(rl_config(tmp_path / "run.yaml", toy_dir, policy={"checkpoint": str(cold_start)}, steps=2), ranks=2))
    for one, two in zip(metrics(uninterrupted)[:2], metrics(tmp_path / "run"), strict=True):
        for name in ("R", "R_acc", "f", "kappa", "R_anchor", "loss", "kl", "entropy", "grad_norm", "learned_tokens"):
            assert two[name] == pytest.approx(one[name], abs=1e-4, rel=1e-4), name


@pytest.mark.slow
def test_a_run_killed_at_random_moments_ends_with_the_same_bits(uninterrupted, toy_dir, cold_start, tmp_path):
    cfg = rl_config(tmp_path / "run.yaml", toy_dir, policy={"checkpoint": str(cold_start)})
    lines = tmp_path / "run" / "metrics.jsonl"
    steps = lambda: len(lines.read_text().splitlines()) if lines.exists() else 0  # noqa: E731
    kills = kill_at_random(partial(run, cfg), steps, random.Random(1), 2, 1.0)
    finish(run(cfg))
    assert kills and same_weights(uninterrupted, tmp_path / "run")
    assert same_metrics(metrics(uninterrupted), metrics(tmp_path / "run"))


# ------------------------------------------------------------------------------------------------ servers that fail


def train_beside_servers(cfg: Path, verb: str, call: int, signals: tuple[int, int]) -> None:
    """Run rl.py with two stand-ins. At this call of the engine after the first update, send each of them a signal."""
    rl.GAP_LIMIT = 100  # the stand-ins' log-probs are not a model's
    SGLang.request_timeout = 300.0 if all(signals) else 2.0
    rl.require_servers = lambda *_: None
    open_engine.server_command = lambda checkpoint, renderer, port, extra: fake_server(renderer, port)
    plain, calls = getattr(SGLang, verb), itertools.count(1)

    def disturbed(engine, *given, **more):
        if rank() == 0 and engine.version == 1 and next(calls) == call:
            for server, number in zip(engine.servers, signals):
                os.killpg(server.process.pid, number)
            pids = " ".join(str(server.process.pid) for server in engine.servers)
            os.write(1, f"\ndisturbed {pids}\n".encode())  # at once: other threads print, too
        return plain(engine, *given, **more)

    setattr(SGLang, verb, disturbed)
    run_script(rl.main, config.load(RLConfig, cfg))


BESIDE_SERVERS = {"rollout": {"server_gpus": [0, 1], "max_rounds": 1}, "staleness": 1, "steps": 3}


HANGS = pytest.param(2, signal.SIGSTOP, "Read timed out", marks=pytest.mark.slow)


@pytest.mark.parametrize("ranks, number, told", [(1, signal.SIGKILL, "exit code -9"), HANGS])
def test_a_server_that_dies_or_hangs_costs_no_step_and_no_episode(toy_dir, tmp_path, ranks, number, told):
    cfg = rl_config(tmp_path / "c.yaml", toy_dir, **BESIDE_SERVERS)
    output = finish(Forked(partial(train_beside_servers, cfg, "generate", 3, (number, 0)), ranks=ranks))
    lines = metrics(tmp_path / "c")
    assert [line["failed_rate"] for line in lines] == [0] * 3
    assert (lines[0]["servers"], lines[-1]["servers"]) == (2, 1)
    assert output.count("servers left: 1, because the server on GPU ") == 1 and told in output


@pytest.mark.slow
@pytest.mark.parametrize("verb, call", [("generate", 3), ("update_weights", 1)])
def test_one_interrupt_ends_a_run_whose_servers_hang(toy_dir, tmp_path, verb, call):
    cfg = rl_config(tmp_path / "c.yaml", toy_dir, **BESIDE_SERVERS)
    process = Forked(partial(train_beside_servers, cfg, verb, call, (signal.SIGSTOP, signal.SIGSTOP)))
    wait_for(lambda: "disturbed" in Path(process.log).read_text(), process)
    pids = re.search(r"^disturbed (\d+) (\d+)$", Path(process.log).read_text(), re.M).groups()
    time.sleep(0.5)  # until the main thread waits for them
    started = time.monotonic()
    os.kill(process.pid, signal.SIGINT)
    assert "interrupted. The same command resumes" in finish(process, code=1)
    assert time.monotonic() - started < 10 and not any(alive(int(pid)) for pid in pids)
