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
from short_runs import train, try_out

import rl
import sft
from data import parse_task
from rl import RLConfig
from rollout import derive_seed
from runtime import config, servers
from runtime.dataset import Dataset
from runtime.distributed import rank
from runtime.engine import EngineError
from runtime.run import clip_gradients
from runtime.script import run_script
from runtime.servers import SGLang

run = partial(start, "rl.py")


def test_a_resumed_run_is_the_uninterrupted_one(toy_dir, tmp_path, paid_by_chance):
    whole = train(tmp_path / "whole.yaml", toy_dir, steps=3, grpo={"kl_coef": 0.1})
    train(tmp_path / "parts.yaml", toy_dir, steps=1, grpo={"kl_coef": 0.1})
    parts = train(tmp_path / "parts.yaml", toy_dir, steps=3, grpo={"kl_coef": 0.1})
    assert same_weights(tmp_path / "whole", tmp_path / "parts") and same_metrics(whole, parts)

    # The files that a run writes, and the weights that it changes.
    assert [(line["step"], line["staleness"]) for line in whole] == [(0, 0), (1, 0), (2, 0)]
    assert all(line["grad_norm"] > 0 for line in whole)
    assert abs(whole[0]["kl"]) < 1e-6 < whole[2]["kl"] and all(line["logprob_gap"] < 1e-4 for line in whole)
    assert all(line["share/K=4"] + line["share/K=8"] == 1 for line in whole)
    kept = (tmp_path / "whole" / "episodes" / "step-000002.jsonl").read_text().splitlines()
    assert len(kept) == 4 and json.loads(kept[0])["rewards"]
    before = load_file(toy_dir / "model" / "model.safetensors")
    after = load_file(tmp_path / "whole" / "model" / "model.safetensors")
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved and not any(".visual." in name for name in moved)  # the vision tower is frozen


@pytest.mark.parametrize("checkpoint", ["qwen2_5_vl"], indirect=True)
def test_a_published_qwen25_vl_trains_and_its_result_trains_on(checkpoint, toy_dir, tmp_path, paid_by_chance):
    stock = tiny.as_published(checkpoint, tmp_path / "stock")
    (stock / "visual.json").unlink()
    changes = {"visual": {"patch": 14, "frame_pixels": 6 * 28 * 28}, "steps": 2, "grpo": {"kl_coef": 0.1}}
    lines = train(tmp_path / "one.yaml", toy_dir, policy={"checkpoint": str(stock)}, **changes)
    lines += train(tmp_path / "two.yaml", toy_dir, policy={"checkpoint": str(tmp_path / "one" / "model")}, **changes)
    assert all(line["logprob_gap"] < 1e-4 and not line["failed_rate"] and line["kl"] >= 0 for line in lines)
    before, after = (load_file(folder / "model.safetensors") for folder in (stock, tmp_path / "two" / "model"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and not any(name.startswith("visual") for name in changed)


def test_a_model_of_every_so_many_steps_is_what_a_run_of_these_steps_leaves(toy_dir, tmp_path, paid_by_chance):
    """A model is written before the state of its step: after a kill between the two, the resumed run writes it again."""
    train(tmp_path / "short.yaml", toy_dir, steps=2)
    assert not (tmp_path / "short" / "models").exists()
    train(tmp_path / "long.yaml", toy_dir, steps=5, export_every=2)
    models = tmp_path / "long" / "models"
    assert sorted(path.name for path in models.iterdir()) == ["step-000002", "step-000004"]
    written = {path.name: path.read_bytes() for path in (models / "step-000002").iterdir()}
    assert json.loads(written["rollout.json"]) == {"think_prefix": True}  # as it was trained
    assert written == {path.name: path.read_bytes() for path in (tmp_path / "short" / "model").iterdir()}
    assert (models / "step-000004").stat().st_mtime < (tmp_path / "long" / "state" / "step-00000004").stat().st_mtime


def test_an_update_that_is_not_finite_is_skipped_and_shown(scripted, toy_dir, tmp_path, monkeypatch, capsys):
    def clip(policy, largest):
        norms.append(clip_gradients(policy, largest))
        return math.nan if len(norms) == 2 else norms[-1]

    norms = []
    monkeypatch.setattr("runtime.run.clip_gradients", clip)
    train(tmp_path / "two.yaml", toy_dir, steps=2)
    assert [line["bad_steps"] for line in metrics(tmp_path / "two")] == [0, 1]
    assert re.findall(r"step (\d)/2 .* bad_steps 1", capsys.readouterr().out) == ["2"]
    norms.clear()
    train(tmp_path / "one.yaml", toy_dir, steps=1)
    assert same_weights(tmp_path / "one", tmp_path / "two")


def test_a_run_does_not_go_on_from_a_checkpoint_that_was_made_anew(scripted, toy_dir, tmp_path, monkeypatch, capsys):
    """Past bug: reference and frozen tower came from the new checkpoint, the text model from the old state."""
    monkeypatch.chdir(tmp_path)
    more = {"policy": {"checkpoint": "start"}, "plan": {"gpus": 1}, "steps": 1}
    shutil.copytree(toy_dir / "model", "start")
    train(tmp_path / "c.yaml", toy_dir, **more)
    weights = load_file("start/model.safetensors")
    save_file({name: w + 0.01 for name, w in weights.items()}, "start/model.safetensors", {"format": "pt"})
    cfg = config.load(RLConfig, rl_config(tmp_path / "c.yaml", toy_dir, **more | {"steps": 2}))
    changed = r"'start' has changed since .*/c started from it: restore it"
    with pytest.raises(config.ConfigError, match=changed):
        rl.main(cfg)
    with pytest.raises(config.ConfigError, match=changed):
        try_out(cfg)
    save_file(weights, "start/model.safetensors", {"format": "pt"})
    rl.main(cfg)
    assert len(metrics(tmp_path / "c")) == 2


def test_a_finished_run_says_so_exports_again_and_samples_no_more(scripted, toy_dir, tmp_path, capsys):
    """Past bug: it started servers and gave them weights, only to export again."""
    for _ in range(2):
        train(tmp_path / "c.yaml", toy_dir, steps=1)
        shutil.rmtree(tmp_path / "c" / "model")  # which is there
    assert len(scripted) == 1 and capsys.readouterr().out.count("/c: finished; ") == 1


def test_a_step_without_an_episode_stops_the_run_and_one_goes_on(scripted, toy_dir, tmp_path, monkeypatch, capsys):
    """Past bug: only the first batch was checked. Later, the run exited with status 0 and had replaced all its states."""

    def fail(own, ids, frames, *, seed, **more):
        if own.version >= served and seed != survivor:
            raise EngineError("gone")
        return generate(own, ids, frames, seed=seed, **more)

    generate, survivor, served = Scripted.generate, None, 2
    monkeypatch.setattr(Scripted, "generate", fail)
    with pytest.raises(EngineError, match="step 3: none of its 8 episodes ran; the last error: EngineError: gone"):
        train(tmp_path / "c.yaml", toy_dir, steps=9, save_every=1)
    assert len(metrics(tmp_path / "c")) == 2 and "failed_rate" not in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "c" / "state").iterdir()) == ["step-00000001", "step-00000002"]

    served = 0
    task, *_ = Dataset(config.load(RLConfig, tmp_path / "c.yaml").data, parse_task).batch(0, 2)[0]
    survivor = derive_seed(derive_seed(0, 0, task.id, 1), 0)
    [line] = train(tmp_path / "d.yaml", toy_dir, steps=1, rollout={"dispatch": "none"})
    assert line["failed_rate"] == 7 / 8 and " failed_rate 0.875" in capsys.readouterr().out


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
    """Run rl.py with two stand-ins. At this call of the engine after the second update, send each of them a signal."""
    rl.GAP_LIMIT = 100  # the stand-ins' log-probs are not a model's
    SGLang.request_timeout = 300.0 if all(signals) else 2.0
    rl.require_servers = lambda *_: None
    servers.server_command = lambda checkpoint, renderer, port, extra: fake_server(renderer, port)
    plain = getattr(SGLang, verb)
    calls = itertools.count()

    def disturbed(engine, *given, **more):
        if rank() == 0 and engine.version == 2 and next(calls) == call:
            for server, number in zip(engine.servers, signals):
                os.killpg(server.process.pid, number)
            pids = " ".join(str(server.process.pid) for server in engine.servers)
            os.write(1, f"\ndisturbed {pids}\n".encode())  # at once: other threads print, too
        return plain(engine, *given, **more)

    setattr(SGLang, verb, disturbed)
    run_script(rl.main, config.load(RLConfig, cfg))


BESIDE_SERVERS = {"rollout": {"server_gpus": [0, 1], "max_turns": 1}, "staleness": 1, "steps": 5, "save_every": 2}


@pytest.mark.parametrize("number, told", [(signal.SIGKILL, "exit code -9"), (signal.SIGSTOP, "Read timed out")])
def test_a_server_that_dies_or_hangs_costs_no_step_and_no_episode(toy_dir, tmp_path, number, told):
    cfg = rl_config(tmp_path / "c.yaml", toy_dir, **BESIDE_SERVERS)
    output = finish(Forked(partial(train_beside_servers, cfg, "generate", 3, (number, 0)), ranks=2))
    lines = metrics(tmp_path / "c")
    assert [line["failed_rate"] for line in lines] == [0] * 5
    assert (lines[0]["servers"], lines[-1]["servers"]) == (2, 1)
    assert output.count("servers left: 1, because the server on GPU ") == 1 and told in output


@pytest.mark.parametrize("verb, call", [("generate", 3), ("update_weights", 0)])
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
