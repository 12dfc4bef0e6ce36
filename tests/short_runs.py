"""Short trainings, in this process or as the work of a forked one."""

import math
import sys
from pathlib import Path

from scripted import Scripted, by_chance
from scripts import fake_server, metrics, rl_config

import rl
from rewards import assign_rewards
from rl import RLConfig
from runtime import config, open_engine
from runtime.script import run_script


def train(path: Path, toy_dir: Path, **changes) -> list[dict]:
    """Run rl.py in this process. Return its metrics."""
    rl.main(config.load(RLConfig, rl_config(path, toy_dir, **changes)))
    return metrics(path.with_suffix(""))


def pay_by_chance(groups, renderer, cfg, judge) -> None:
    """Reward episodes at random: an untrained policy earns nothing, and without rewards no weight would change."""
    assign_rewards(groups, renderer, cfg, judge)
    for group in groups:
        for episode in group.episodes:
            episode.rewards["R"] = float(sum(episode.main.ids) % 5)


# ------------------------------------------------------------------------------------------------ in forked processes


def train_by_chance(cfg: Path) -> None:
    """Run rl.py with `pay_by_chance`. A config with GPUs for servers gets stand-ins, whose tokens depend on the prompt, the seed
    and the weights' version."""
    rl.assign_rewards = pay_by_chance
    loaded = config.load(RLConfig, cfg)
    if loaded.rollout.server_gpus:
        use_stand_ins()
    run_script(rl.main, loaded)


def train_scripted(cfg: Path) -> None:
    """Run rl.py with an engine whose episodes depend on their seeds only."""
    rl.open_engine = lambda source, renderer, *_: Scripted(renderer, by_chance)
    rl.GAP_LIMIT = math.inf
    run_script(rl.main, config.load(RLConfig, cfg))


def use_stand_ins() -> None:
    """Let this process start stand-ins in place of SGLang's servers."""
    from runtime.servers import SGLang  # a fork without it keeps the other trainings

    rl.GAP_LIMIT = math.inf  # their log-probs are not a model's
    rl.IMAGE_BYTES = 0  # a test's disk can be small
    rl.require_servers = lambda *_: None
    SGLang.request_timeout = 10.0
    open_engine.server_command = lambda checkpoint, renderer, port, extra=(): fake_server(renderer, port)


if __name__ == "__main__":  # as a rank of torchrun
    train_by_chance(Path(sys.argv[1]))
