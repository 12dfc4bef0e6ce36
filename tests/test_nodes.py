"""Two nodes: they share the run's folder, but no memory.

Here, a node is a part of one machine's ranks, with its own working directory and its own folder instead of /dev/shm."""

import json
import os
from functools import partial
from pathlib import Path

import pytest
import requests
from scripts import Forked, finish, rl_config
from short_runs import use_stand_ins

import rl
from runtime import config, folder, weights
from runtime.dataset import DataConfig, Source
from runtime.policy import PolicyConfig
from runtime.run import RunConfig
from runtime.script import run_script
from runtime.weights import WeightSync


@pytest.mark.parametrize("what", [".lock", "config", "commit", "checkpoint"])
def test_a_node_with_another_run_folder_settings_code_or_cold_start_is_refused(tmp_path, monkeypatch, what):
    (tmp_path / ".lock").write_text("process 1 on node 0")
    cfg = RunConfig(run=str(tmp_path), policy=PolicyConfig(""), data=DataConfig((Source("rows"),)), steps=1)
    others = lambda mine: {key: not key.endswith(what) and mine[key] for key in mine}  # noqa: E731
    monkeypatch.setattr(folder, "gather", lambda mine: [mine, others(mine)])
    with pytest.raises(config.ConfigError, match=rf"rank 1 .*{what}"):
        folder.refuse_unlike_nodes(cfg, tmp_path)


def train_rl(cfg: Path) -> None:
    """Run rl.py with stand-ins for servers. After a push, each rank asks its servers what they have seen."""
    weights.MEMORY = cfg.parent / f"memory-{os.environ['GROUP_RANK']}"
    weights.MEMORY.mkdir(exist_ok=True)
    use_stand_ins()
    publish = WeightSync.publish

    def publish_and_ask(sync, version):
        publish(sync, version)
        seen = [requests.get(url + "/model_info").json() for url in sync.engine.urls]
        assert (cfg.parent / "run" / "snapshot" / f"weights-{version}").is_dir()
        (cfg.parent / f"seen-{os.environ['RANK']}-{version}.json").write_text(json.dumps(seen))

    WeightSync.publish = publish_and_ask
    run_script(rl.main, config.load(rl.RLConfig, cfg))


@pytest.mark.slow
def test_weights_go_through_the_runs_folder_to_each_nodes_own_servers_and_images_through_its_memory(toy_dir, tmp_path):
    changes = {"rollout": {"server_gpus": [4, 5]}, "batch_tasks": 4, "grpo": {"kl_coef": 0.1, "train_tokens": 20}}
    cfg = rl_config(tmp_path / "run.yaml", toy_dir, steps=2, **changes)
    finish(Forked(partial(train_rl, cfg), ranks=4, nodes=2))
    for rank in range(4):
        for server in json.loads((tmp_path / f"seen-{rank}-2.json").read_text()):
            assert (server["version"], server["loads"]) == ("2", 2)
            assert len([name for name in server["read"] if name.endswith(".safetensors")]) == 4
            assert all(f"/memory-{rank // 2}/" in image for image in server["prompts"])
    assert len(list((tmp_path / "run" / "logs" / "node-1").glob("*.log"))) == 2
    assert not list(tmp_path.glob("memory-*/*"))
    assert not (tmp_path / "run" / "snapshot").exists()
