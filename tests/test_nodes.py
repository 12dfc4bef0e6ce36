"""Two nodes: their ranks share no memory, and no disk unless the user provides one.

Here, a node is a part of one machine's ranks, with its own working directory and its own folder instead of /dev/shm."""

import json
import os
import shutil
from functools import partial
from pathlib import Path

import pytest
import requests
from scripts import Forked, fake_server, finish
from test_rl import write_config as rl_config
from test_sft import write_config as sft_config

import rl
import sft
from runtime import checks, cleanup, config, run, servers, weights
from runtime.dataset import DataConfig, Source
from runtime.policy import PolicyConfig
from runtime.run import RunConfig
from runtime.script import run_script
from runtime.weights import WeightSync


def train_sft(cfg: Path, *overrides: str) -> None:
    """Run sft.py in this node's own directory."""
    node = Path(os.environ["GROUP_RANK"])
    node.mkdir(exist_ok=True)
    os.chdir(node)
    if node == Path("0"):
        overrides = ()
    run_script(sft.main, config.load(sft.SFTConfig, cfg, overrides))


# ------------------------------------------------------------------------------------------------ what is refused


def test_nodes_that_do_not_share_the_run_are_refused(toy_dir, tmp_path):
    cfg = sft_config(tmp_path / "run.yaml", toy_dir, run="run", steps=1)
    told = finish(Forked(partial(train_sft, cfg), tmp_path, ranks=2, nodes=2), code=1)
    assert set(told.splitlines()) == {  # each node reports it
        "error: run = 'run': rank 1 sees another folder; run must be a folder that all nodes share"
    }
    assert not list(tmp_path.glob("*/run/[!.]*"))


def test_nodes_with_other_settings_or_data_are_refused(toy_dir, tmp_path):
    for node, rows in enumerate(["perception", "sft"]):
        (tmp_path / str(node)).mkdir()
        shutil.copy(toy_dir / f"{rows}.parquet", tmp_path / str(node) / "rows.parquet")
    data = {"sources": [{"path": "rows.parquet"}], "video_root": str(toy_dir)}
    cfg = sft_config(tmp_path / "run.yaml", toy_dir, data=data)
    told = finish(Forked(partial(train_sft, cfg, "batch_rows=8"), tmp_path, ranks=2, nodes=2), code=1)
    [line] = set(told.splitlines())
    assert line.startswith("error: rank 1 differs from rank 0 (config.batch_rows: 4, now 8; bytes.rows.parquet: ")
    assert line.endswith("): start all nodes alike") and not (tmp_path / "run" / "config.yaml").exists()


@pytest.mark.parametrize("what", ["config.steps", "commit", "bytes", "nproc_per_node", "checkpoint"])
def test_a_node_that_differs_in_anything_is_refused(tmp_path, monkeypatch, what):
    """Past bug: each node read its own cold start and held-out rows, and nothing compared them."""
    held_out, model, seen = tmp_path / "val.parquet", tmp_path / "model", []
    model.mkdir()
    monkeypatch.setattr(checks, "gather", lambda mine: seen.append(mine) or seen)

    def check(other: str = "") -> None:
        """Check as a rank that differs in one thing: it has 2 there, and 1 everywhere else."""

        def number(name: str) -> int:
            return 2 if name == other else 1

        held_out.write_bytes(bytes(number("bytes")))
        (model / "model.safetensors").write_bytes(bytes(number("checkpoint")))
        monkeypatch.setattr(checks, "git_commit", lambda: number("commit"))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(number("nproc_per_node")))
        val, steps = DataConfig((Source(str(held_out)),)), number("config.steps")
        cfg = RunConfig(
            run="run", policy=PolicyConfig(""), data=DataConfig((Source(str(held_out)),)), val=val, steps=steps
        )
        checks.check_nodes(cfg, model)

    check()
    with pytest.raises(SystemExit, match=rf"rank 1 differs from rank 0 \({what}[^;]*\): start all nodes alike"):
        check(what)


# ------------------------------------------------------------------------------------------------ sampling


def train_rl(cfg: Path) -> None:
    """Run rl.py with stand-ins for servers, in this node's own memory. Then its first rank asks each what it has seen."""
    run.GAP_LIMIT = 100  # the stand-ins' log-probs are not a model's
    node = os.environ.get("GROUP_RANK", "0")
    cleanup.MEMORY = weights.MEMORY = cfg.parent / f"memory-{node}"
    cleanup.MEMORY.mkdir(exist_ok=True)
    rl.check_servers = lambda *_: None
    rl.IMAGE_BYTES = 0  # a test's disk can be small
    servers.server_command = lambda checkpoint, renderer, port, extra: fake_server(renderer, port)
    publish = WeightSync.publish

    def publish_and_ask(sync, version):
        publish(sync, version)
        seen = [requests.get(url + "/model_info").json() for url in sync.engine.urls]
        told = {"snapshots": str(sync.folder), "servers": seen}
        told["noted"] = (cfg.parent / "run" / "memory.txt").read_text()
        (cfg.parent / f"seen-{os.environ.get('RANK')}.json").write_text(json.dumps(told))

    WeightSync.publish = publish_and_ask
    run_script(rl.main, config.load(rl.RLConfig, cfg))


def test_each_node_samples_by_its_own_servers_and_keeps_images_and_weights_in_its_own_memory(toy_dir, tmp_path):
    """Past bug of the tests: LOCAL_RANK equalled RANK, so rank 2 would have written into rank 0's /dev/shm."""
    changes = {"rollout": {"server_gpus": [4, 5]}, "batch_tasks": 4, "grpo": {"kl_coef": 0.1, "train_tokens": 20}}
    cfg = rl_config(tmp_path / "run.yaml", toy_dir, steps=1, **changes)
    finish(Forked(partial(train_rl, cfg), ranks=4, nodes=2))
    seen = [json.loads((tmp_path / f"seen-{rank}.json").read_text()) for rank in range(4)]
    read = seen[0]["servers"][0]["read"]  # file -> hash; a node's two ranks write one file each
    assert len([name for name in read if name.endswith(".safetensors")]) == 2
    for rank, told in enumerate(seen):
        assert told["snapshots"] == seen[rank // 2 * 2]["snapshots"]
        assert told["snapshots"].startswith(f"{tmp_path}/memory-{rank // 2}/")
        for server in told["servers"]:
            assert (server["version"], server["loads"]) == ("1", 1)
            assert server["read"] == read and server["served"]
            assert all(told["snapshots"] in image for image in server["prompts"])
    logs = (tmp_path / "run" / "logs").rglob("*.log")
    assert len({str(log) for log in logs}) == 4 and (tmp_path / "run" / "logs" / "node-1").is_dir()
    assert not list(tmp_path.glob("memory-*/*"))
    assert seen[3]["noted"].splitlines() == [seen[0]["snapshots"], seen[2]["snapshots"]]
