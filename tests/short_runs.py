"""Short trainings in this process."""

from pathlib import Path

from scripts import metrics, rl_config

import rl
from rewards import assign_rewards
from rl import RLConfig
from runtime import config


def train(path: Path, toy_dir: Path, **changes) -> list[dict]:
    """Run rl.py in this process. Return its metrics."""
    rl.main(config.load(RLConfig, rl_config(path, toy_dir, **changes)))
    return metrics(path.with_suffix(""))


def try_out(cfg: RLConfig) -> None:
    rl.main(cfg, dry=True)


def pay_by_chance(groups, renderer, cfg, judge) -> None:
    """Reward episodes at random: an untrained policy earns nothing, and without rewards no weight would change."""
    assign_rewards(groups, renderer, cfg, judge)
    for group in groups:
        for episode in group.episodes:
            episode.rewards["R"] = float(sum(episode.main.ids) % 5)
